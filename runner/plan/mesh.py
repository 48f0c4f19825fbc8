"""Meshes to choose from, and warnings about inefficient ones.

A warning is given before compilation, from shapes and shardings, or after it, from the compiled step's text:

1. A shard is smaller than a tile. The compiler then gathers and reduces the parameter whole.
2. An all-reduce moves a parameter or its gradient over axes that shard it. An all-gather or a reduce-scatter would send
   half of that.
3. A parameter is all-gathered more often than the forward and backward passes need.

Arrays are matched with parameters by their number of elements, which no reshape or transposition changes.

A TPU holds an array in tiles of 128 columns and 8 rows of 32 bits, or 16 rows of 16 bits ("TPU tiled layouts",
openxla/xla, docs/tiled_layout.md), and the compiler chooses which axis of a matrix lies along which. So a sharded axis
with fewer elements than a tile has rows is below the tile either way.

The number of meshes is bounded: `tensor` is 16 at most, `expert` divides the experts, and `sequence` leaves each device
two chunks of at least `_MIN_STRETCH_POSITIONS` of a sequence, below which it only waits for its neighbours.

The module is pure arithmetic and depends on no job and no device.
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

_MAX_TENSOR = 16  # beyond a few neighbouring chips, tensor parallelism only waits for its network
_MIN_STRETCH_POSITIONS = 1024
_TILE_BYTES = 32  # of one column of a tile
_MIN_SMALL_SHARE = 0.01  # of all parameters: the share of small shards that is worth a warning
_MIN_STEP_SHARE = 0.05  # of a step's least time: the cost that is worth a warning

MeshSizes = tuple[tuple[str, int], ...]  # devices by axis, in the order of AXES


def order_sizes(sizes: Mapping[str, int]) -> MeshSizes:
    """Return the sizes of a mesh in the order of `AXES`."""
    return tuple((axis, sizes[axis]) for axis in AXES)


def iter_meshes(num_devices: int, sequence_length: int, num_experts: int) -> Iterator[MeshSizes]:
    """Yield every mesh over `num_devices` that sequences of this length and the experts of a layer (1: none) allow."""
    for tensor in _list_divisors(num_devices, _MAX_TENSOR):
        for expert in _list_divisors(num_devices // tensor):
            if not _allows_axis_sizes({"expert": expert}, sequence_length, num_experts):
                continue
            for sequence in _list_divisors(num_devices // (tensor * expert)):
                if not _allows_axis_sizes({"sequence": sequence}, sequence_length, num_experts):
                    continue
                left = num_devices // (tensor * expert * sequence)
                for fsdp in _list_divisors(left):
                    yield order_sizes(
                        {"data": left // fsdp, "fsdp": fsdp, "sequence": sequence, "expert": expert, "tensor": tensor}
                    )


def list_near_meshes(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> list[MeshSizes]:
    """Return the meshes that differ from one by a factor moved from one axis to another."""
    meshes = []
    for giver in AXES:
        for factor in _list_divisors(sizes[giver])[1:]:
            for taker in (axis for axis in AXES if axis != giver):
                near = {**sizes, giver: sizes[giver] // factor, taker: sizes[taker] * factor}
                changed = {taker: near[taker]}
                is_allowed = taker in ("data", "fsdp") or _allows_axis_sizes(changed, sequence_length, num_experts)
                if is_allowed and near["tensor"] <= max(_MAX_TENSOR, sizes["tensor"]):
                    meshes.append(order_sizes(near))
    return meshes


def _allows_axis_sizes(sizes: Mapping[str, int], sequence_length: int, num_experts: int) -> bool:
    """Return True if sequences and experts can be sharded so, and sequences are long enough for it."""
    sequence, expert = sizes.get("sequence", 1), sizes.get("expert", 1)
    # A device takes the first and the last chunk of a sequence, the next device the second and the second to last
    # (zigzag), so that all have equal causal work.
    stretches = 2 * sequence
    is_long = sequence == 1 or (
        sequence_length % stretches == 0 and sequence_length // stretches >= _MIN_STRETCH_POSITIONS
    )
    return is_long and num_experts % expert == 0


def _list_divisors(number: int, most: int | None = None) -> list[int]:
    return [size for size in range(1, min(number, most or number) + 1) if number % size == 0]


@dataclass(frozen=True)
class SmallShard:
    """Parameter whose shards, along an axis, have fewer rows than a tile of its type."""

    name: str
    shape: tuple[int, ...]
    axis: int
    rows: int
    tile_rows: int

    @property
    def size(self) -> int:
        """Number of elements of the parameter."""
        return math.prod(self.shape)


def find_small_shards(parameters: Mapping[str, Any], itemsize: int) -> list[SmallShard]:
    """Return the parameters with shards below the tile, largest first; none if they are a negligible share of all.

    `parameters` are abstract, with shardings, and are sent in a type of `itemsize` bytes.
    """
    tile_rows = _TILE_BYTES // itemsize
    found = []
    for name, leaf in parameters.items():
        shard, spec = leaf.sharding.shard_shape(leaf.shape), leaf.sharding.spec
        # Only the last two axes lie in tiles.
        for axis in range(max(leaf.ndim - 2, 0), leaf.ndim):
            is_over_state = bool({*list_axes(spec[axis] if axis < len(spec) else None)} & {*STATE_AXES})
            if is_over_state and shard[axis] < min(tile_rows, leaf.shape[axis]):
                found.append(SmallShard(name, leaf.shape, axis, shard[axis], tile_rows))
                break
    total = sum(math.prod(leaf.shape) for leaf in parameters.values())
    if sum(shard.size for shard in found) < _MIN_SMALL_SHARE * total:
        return []
    return sorted(found, key=lambda shard: -shard.size)


def compute_small_share(shards: Iterable[SmallShard], parameters: Mapping[str, Any]) -> float:
    """Return the share of all parameters that belongs to small shards."""
    return sum(shard.size for shard in shards) / sum(math.prod(leaf.shape) for leaf in parameters.values())


@dataclass(frozen=True)
class MeshWarning:
    """Warning about an inefficient mesh."""

    text: str  # message for the user
    excess_bytes: float  # bytes that a device sends in a step unnecessarily
    names: tuple[str, ...]  # parameters that it is about, largest first
    is_avoidable: bool = True  # True if another mesh could avoid it


@dataclass(frozen=True)
class ParameterPasses:
    """Number of times that a step of `accumulate_steps` micro-batches needs each parameter whole, in a micro-batch."""

    accumulate_steps: int
    layers: int
    logits: int


def make_small_shard_warning(shards: list[SmallShard], mesh: str, dtype: str, sent_bytes: float) -> MeshWarning:
    """Return the warning that shards, the largest of them first, are below the tile of the type that is sent."""
    first = shards[0]
    others = f" (and those of {len(shards) - 1} more parameters)" if len(shards) > 1 else ""
    text = (
        f"{mesh} splits the {first.shape[first.axis]:,} rows of {first.name}{others} into shards of {first.rows}, but "
        f"a tile of {dtype} has {first.tile_rows} rows on this chip: the compiler gathers and reduces such parameters "
        f"by all-reduce, and each device sends {format_amount(sent_bytes, 'bytes')} per step, by arithmetic"
    )
    return MeshWarning(text, sent_bytes / 2, tuple(shard.name for shard in shards))


def is_significant(warning: MeshWarning, bytes_per_second: float, step_seconds: float) -> bool:
    """Return True if the excess traffic costs a noticeable part of the lower bound of the step time."""
    return warning.excess_bytes / bytes_per_second >= _MIN_STEP_SHARE * step_seconds


@dataclass(frozen=True)
class _MovedArray:
    """Array of a parameter's size in a collective."""

    collective: Collective
    shape: tuple[int, ...]

    @property
    def sent_bytes(self) -> float:
        elements = sum(math.prod(shape) for shape in self.collective.shapes)
        sent = self.collective.count * self.collective.sent_bytes_per_device
        return sent * math.prod(self.shape) / elements


def find_mesh_warnings(
    collectives: Iterable[Collective], parameters: Mapping[str, Any], passes: ParameterPasses, sharded_axes: set[str]
) -> list[MeshWarning]:
    """Return the warnings about the collectives of a compiled step whose passes and sharded state axes are these."""
    # Elements of a parameter as a matmul needs it -> names, each with the number of such matrices that it stacks. That
    # is whole, except along axes that are not state axes, and for experts, of which a device has its own.
    names_by_size: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for name, leaf in parameters.items():
        if leaf.ndim < 2:
            continue
        mesh_shape, here = dict(leaf.sharding.mesh.shape), list(leaf.shape)
        for axis, entry in enumerate(leaf.sharding.spec):
            axes = list_axes(entry)
            kept = axes if axes == ("expert",) else [one for one in axes if one not in STATE_AXES]
            here[axis] //= math.prod(mesh_shape[one] for one in kept)
        number = here[0] if leaf.ndim > 2 else 1
        names_by_size[math.prod(here) // number].append((name, number))

    over_state = [one for one in collectives if {*one.axes} & sharded_axes]

    def iter_moved(kind: str) -> Iterator[_MovedArray]:
        for one in over_state:
            for shape in one.shapes if one.kind == kind else ():
                # A vector may have as many elements as a matrix, but it is not a parameter of a matmul.
                if math.prod(shape) in names_by_size and sum(size > 1 for size in shape) > 1:
                    yield _MovedArray(one, shape)

    warnings = []
    if reduced := sorted(iter_moved("all-reduce"), key=lambda moved: -moved.sent_bytes):
        first = next((moved for moved in reduced if moved.collective.source), reduced[0])
        sizes = list(dict.fromkeys(math.prod(moved.shape) for moved in reduced))
        total = sum(moved.sent_bytes for moved in reduced)
        others = f" and {len(sizes) - 1} more sizes" if len(sizes) > 1 else ""
        text = (
            f"all-reduce over {' x '.join(first.collective.axes)} of {_format_shape(first.shape)}{others}: parameters "
            f"or their gradients that could be gathered and scattered{_format_place(first.collective)}; each device "
            f"sends {format_amount(total, 'bytes')} per step, twice what is needed"
        )
        warnings.append(MeshWarning(text, total / 2, tuple(names_by_size[size][0][0] for size in sizes)))

    counts: Counter[int] = Counter()
    gathered_by_size: dict[int, list[_MovedArray]] = defaultdict(list)
    for moved in iter_moved("all-gather"):
        size = math.prod(moved.shape)
        counts[size] += moved.collective.count
        gathered_by_size[size].append(moved)
    for size, gathered in gathered_by_size.items():
        num_matrices = sum(number for _, number in names_by_size[size])
        times = counts[size] / (num_matrices * passes.accumulate_steps)
        # A parameter that stacks nothing is taken for the output embedding.
        is_of_logits = any(number == 1 for _, number in names_by_size[size])
        needed = passes.logits if is_of_logits else passes.layers
        if times <= needed + 0.5:
            continue
        total = sum(moved.sent_bytes for moved in gathered)
        largest = max(gathered, key=lambda moved: moved.sent_bytes)
        names = tuple(name for name, _ in names_by_size[size])
        text = (
            f"all-gather over {' x '.join(largest.collective.axes)} of {_format_shape(largest.shape)}, "
            f"{' or '.join(names)}: each is gathered {times:.0f} times per micro-batch, but its passes need it "
            f"{needed} times{_format_place(largest.collective)}; each device sends {format_amount(total, 'bytes')} "
            "per step"
        )
        warnings.append(MeshWarning(text, total * (1 - needed / times), names, is_avoidable=False))
    return warnings


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(f"{size:,}" for size in shape if size != 1)


def _format_place(collective: Collective) -> str:
    """Return the operation and source line of a collective in parentheses, as far as the compiler kept them."""
    names = collective.op_name.split("/")[1:]
    operation = "/".join(name for name in names if name not in ("while", "body", "closed_call"))
    path, _, line = collective.source.rpartition(":")
    here = Path.cwd()
    shown = str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
    parts = [part for part in (operation, f"{shown}:{line}" if path else "") if part]
    return f" ({', '.join(parts)})" if parts else ""
