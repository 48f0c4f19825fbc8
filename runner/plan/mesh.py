"""Shapes that betray a mesh: said before the step is compiled, from shapes and shardings, and after, from its text.

1. A shard below the tile (`tile`): the compiler then moves the parameter whole.
2. An all-reduce of a parameter, or of its gradient, over axes that cut it: a gather or a scatter sends half of that.
3. A parameter that is gathered more often than the passes over it need.

Arrays are known again by their number of elements, which no reshape or transposition changes.

Meshes to choose from: all that a job can be laid over, and those near one. Arithmetic; knows no job and no device.

What bounds their number: `tensor` is 16 at most, `expert` divides the experts, and `sequence` leaves each device two
stretches of a row of `_LEAST_POSITIONS`, below which it only waits for its neighbours.

Shards that are smaller than the tiles in which a TPU holds an array: known from shapes and shardings alone.

A tile has 128 columns and 8 rows of 32 bits, 16 of 16 bits ("TPU tiled layouts", openxla/xla, docs/tiled_layout.md),
and the compiler chooses which axis of a matrix lies along which. So a cut axis of less than a tile's rows is below it
either way. Such a shard is gathered and reduced as if it were whole: by all-reduce.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.parallel.mesh import AXES, STATE_AXES, list_axes
from runner.plan.figures import format_amount
from runner.plan.forecast.collectives import Collective

_MAX_TENSOR = 16  # beyond a few chips next to each other, tensor parallelism only waits for its network
_LEAST_POSITIONS = 1024

MeshSizes = tuple[tuple[str, int], ...]  # devices by axis, in the order of AXES


def iter_meshes(num_devices: int, sequence_length: int, num_experts: int) -> Iterator[MeshSizes]:
    """Every mesh over so many devices that rows of this length and so many experts of a layer (1: none) allow."""
    for tensor in _divisors(num_devices, _MAX_TENSOR):
        for expert in _divisors(num_devices // tensor):
            if not allows_axis_sizes({"expert": expert}, sequence_length, num_experts):
                continue
            for sequence in _divisors(num_devices // (tensor * expert)):
                if not allows_axis_sizes({"sequence": sequence}, sequence_length, num_experts):
                    continue
                left = num_devices // (tensor * expert * sequence)
                for fsdp in _divisors(left):
                    yield order_sizes(
                        {"data": left // fsdp, "fsdp": fsdp, "sequence": sequence, "expert": expert, "tensor": tensor}
                    )


def list_near_meshes(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> list[MeshSizes]:
    """Those that a factor makes of a mesh that goes from one axis to another."""
    found = []
    for giver in AXES:
        for factor in _divisors(sizes[giver])[1:]:
            for taker in (axis for axis in AXES if axis != giver):
                near = {**sizes, giver: sizes[giver] // factor, taker: sizes[taker] * factor}
                is_allowed = taker in ("data", "fsdp") or allows_axis_sizes(
                    {taker: near[taker]}, sequence_length, num_experts
                )
                if is_allowed and near["tensor"] <= max(_MAX_TENSOR, sizes["tensor"]):
                    found.append(order_sizes(near))
    return found


def allows_axis_sizes(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> bool:
    """Whether rows and experts can be cut so, and rows are long enough for it."""
    sequence, expert = sizes.get("sequence", 1), sizes.get("expert", 1)
    halves = 2 * sequence  # the first part of a row and the last, the second and the last but one: equal causal work
    is_long = sequence == 1 or (sequence_length % halves == 0 and sequence_length // halves >= _LEAST_POSITIONS)
    return is_long and num_experts % expert == 0


def order_sizes(sizes: Mapping[str, int]) -> MeshSizes:
    """As `MeshSizes`."""
    return tuple((axis, sizes[axis]) for axis in AXES)


def _divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]


_TILE_BYTES = 32  # of one column of a tile
_LEAST_SHARE_TILE = 0.01  # of all parameters; what is less is not worth a word


@dataclass(frozen=True)
class SmallShard:
    """A parameter that a mesh cuts below the tile."""

    name: str
    shape: tuple[int, ...]
    axis: int
    rows: int  # of a shard along that axis
    tile_rows: int

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


def find_small_shards(parameters: Mapping[str, Any], itemsize: int) -> list[SmallShard]:
    """Those of abstract parameters with shardings that are below the tile of their type when sent, largest first.

    Only the last two axes lie in tiles. None if all of them together are next to nothing.
    """
    tile_rows = _TILE_BYTES // itemsize
    found = []
    for name, leaf in parameters.items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        for axis in range(max(leaf.ndim - 2, 0), leaf.ndim):
            if _is_cut_over_state(leaf.sharding.spec, axis) and shard[axis] < min(tile_rows, leaf.shape[axis]):
                found.append(SmallShard(name, leaf.shape, axis, shard[axis], tile_rows))
                break
    total = sum(math.prod(leaf.shape) for leaf in parameters.values())
    if sum(shard.size for shard in found) < _LEAST_SHARE_TILE * total:
        return []
    return sorted(found, key=lambda shard: -shard.size)


def compute_small_share(shards: Iterable[SmallShard], parameters: Mapping[str, Any]) -> float:
    """The share of all parameters that they hold."""
    return sum(shard.size for shard in shards) / sum(math.prod(leaf.shape) for leaf in parameters.values())


def _is_cut_over_state(spec: Any, axis: int) -> bool:
    axes = spec[axis] if axis < len(spec) else None
    return bool({*list_axes(axes)} & {*STATE_AXES})


_LEAST_SHARE = 0.05  # of a step's least time; a fault that costs less is not worth a word


@dataclass(frozen=True)
class MeshWarning:
    """What is wrong with a mesh, for a person; what it costs; and the parameters that it is about, largest first."""

    text: str
    excess_bytes: float  # that a device sends in a step for nothing
    names: tuple[str, ...]
    is_of_mesh: bool = True  # whether another mesh could cure it


@dataclass(frozen=True)
class ParameterPasses:
    """How often a step needs each parameter whole."""

    accumulate_steps: int
    of_layers: int
    of_logits: int


def make_small_shard_warning(shards: list[SmallShard], mesh: str, dtype: str, sent_bytes: float) -> MeshWarning:
    """The fault that shards are too small; `sent_bytes` is what arithmetic says that a device then sends in a step."""
    first = shards[0]
    others = f" and {len(shards) - 1} more" if len(shards) > 1 else ""
    text = (
        f"{mesh} cuts {first.shape[first.axis]:,} rows of {first.name}{others} into shards of {first.rows}, and a tile "
        f"of {dtype} has {first.tile_rows} on this chip: the compiler gathers and reduces these by all-reduce, "
        f"{format_amount(sent_bytes, 'bytes')} sent by a device and step by arithmetic"
    )
    return MeshWarning(text, sent_bytes / 2, tuple(shard.name for shard in shards))


def find_mesh_warnings(
    found: Iterable[Collective], parameters: Mapping[str, Any], passes: ParameterPasses, cut: set[str]
) -> list[MeshWarning]:
    """The faults of a compiled step. `parameters` are abstract, with shardings; `cut` the state's axes above 1."""
    by_size = _by_size(parameters)
    over_state = [one for one in found if {*one.axes} & cut]
    return [*_whole(over_state, by_size), *_repeated(over_state, by_size, passes)]


def is_significant(fault: MeshWarning, bytes_per_second: float, step_seconds: float) -> bool:
    """Whether a fault costs a part of the least time of a step that anyone would care about."""
    return fault.excess_bytes / bytes_per_second >= _LEAST_SHARE * step_seconds


@dataclass(frozen=True)
class _Moved:
    """One array of a parameter's size in a collective."""

    one: Collective
    shape: tuple[int, ...]

    @property
    def sent_bytes(self) -> float:
        """By a device in a step, for this array."""
        elements = sum(math.prod(shape) for shape in self.one.shapes)
        return self.one.count * self.one.sent_bytes_per_device * math.prod(self.shape) / elements


def _moved(found: Iterable[Collective], kind: str, sizes: Mapping[int, Any]) -> Iterator[_Moved]:
    for one in found:
        for shape in one.shapes if one.kind == kind else ():
            if math.prod(shape) in sizes and sum(size > 1 for size in shape) > 1:
                yield _Moved(one, shape)


def _whole(found: list[Collective], by_size: Mapping[int, list[tuple[str, int]]]) -> list[MeshWarning]:
    arrays = sorted(_moved(found, "all-reduce", by_size), key=lambda moved: -moved.sent_bytes)
    if not arrays:
        return []
    first = next((moved for moved in arrays if moved.one.source), arrays[0])
    sizes = list(dict.fromkeys(math.prod(moved.shape) for moved in arrays))
    total = sum(moved.sent_bytes for moved in arrays)
    others = f" and {len(sizes) - 1} more sizes" if len(sizes) > 1 else ""
    text = (
        f"all-reduce over {' x '.join(first.one.axes)} of {_shape(first.shape)}{others}, parameters or their "
        f"gradients, which could be gathered and scattered{_place(first.one)}: {format_amount(total, 'bytes')} sent "
        "by a device and step, half of it for nothing"
    )
    return [MeshWarning(text, total / 2, tuple(by_size[size][0][0] for size in sizes))]


def _repeated(
    found: list[Collective], by_size: Mapping[int, list[tuple[str, int]]], passes: ParameterPasses
) -> list[MeshWarning]:
    counts: Counter[int] = Counter()
    arrays: dict[int, list[_Moved]] = defaultdict(list)
    for moved in _moved(found, "all-gather", by_size):
        size = math.prod(moved.shape)
        counts[size] += moved.one.count
        arrays[size].append(moved)
    result = []
    for size, gathered in arrays.items():
        times = counts[size] / (sum(number for _, number in by_size[size]) * passes.accumulate_steps)
        is_of_logits = any(number == 1 for _, number in by_size[size])
        needed = passes.of_logits if is_of_logits else passes.of_layers
        if times <= needed + 0.5:
            continue
        total = sum(each.sent_bytes for each in gathered)
        largest = max(gathered, key=lambda each: each.sent_bytes)
        names = tuple(name for name, _ in by_size[size])
        text = (
            f"all-gather over {' x '.join(largest.one.axes)} of {_shape(largest.shape)}, {' or '.join(names)}, each "
            f"{times:.0f} times in a micro-batch whose passes need it {needed} times{_place(largest.one)}: "
            f"{format_amount(total, 'bytes')} sent by a device and step"
        )
        result.append(MeshWarning(text, total * (1 - needed / times), names, is_of_mesh=False))
    return result


def _by_size(parameters: Mapping[str, Any]) -> dict[int, list[tuple[str, int]]]:
    """Elements of a parameter as a matmul needs it -> names, each with how many such it stacks.

    That is whole but for the axes that are no axes of the state, and for experts, of which a device has its own.
    """
    found: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, leaf in parameters.items():
        if leaf.ndim < 2:
            continue
        sizes = dict(leaf.sharding.mesh.shape)
        here = list(leaf.shape)
        for axis, axes in enumerate(leaf.sharding.spec):
            names = list_axes(axes)
            kept = names if names == ("expert",) else [one for one in names if one not in STATE_AXES]
            here[axis] //= math.prod(sizes[one] for one in kept)
        number = here[0] if leaf.ndim > 2 else 1
        found[math.prod(here) // number].append((name, number))
    return found


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape if size != 1)


def _place(one: Collective) -> str:
    """Operation and line, where the compiler has kept them."""
    operation = "/".join(part for part in one.op_name.split("/")[1:] if part not in ("while", "body", "closed_call"))
    path, _, line = one.source.rpartition(":")
    with_line = f"{_short(path)}:{line}" if path else ""
    parts = [part for part in (operation, with_line) if part]
    return f" ({', '.join(parts)})" if parts else ""


def _short(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
