"""From a spec's topology to a mesh: axis arithmetic, logical axis rules, the split of a batch.

Axes, and what each cuts:

- `data`: the examples of a batch, and nothing else.
- `fsdp`: examples, parameters and optimizer state.
- `sequence`: the positions of every row, parameters and optimizer state.
- `expert`: examples and experts; other parameters and their optimizer state like `fsdp`.
- `tensor`: single matrices, and between them the positions of the residual stream.

The last axes lie nearest to each other on the interconnect: `tensor` and `expert` send activations in each layer and
wait for them, `sequence` sends keys and values behind the attention to those at hand, `fsdp` sends parameters ahead of
their use, and `data` sends gradients once, which may cross slices. A stage of a pipeline would be an axis before all.
Knows nothing of models beyond the names of their logical axes.

What a function finds that each device calls for itself along some axes of the mesh. Pure.

Where all other axes are 1 that is no mesh: what is traced is the program of one device. But a TPU's compiler would then
lay what kernels of attention read and write in an order that it has to copy, 39 of 382 ms of a step of
`specs/gpt2_124m.yaml` by its own estimates: there the other axes stay, and are 1.
"""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from runner.errors import InvalidError
from runner.spec import MeshConfig as MeshSpec

AXES = ("data", "fsdp", "sequence", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
STATE_AXES = ("fsdp", "sequence", "expert")  # what every parameter is cut over, if it divides

_ALWAYS_SHOWN = ("data", "fsdp", "tensor")

LogicalAxisRule = tuple[str, str | tuple[str, ...] | None]

# Logical axis of a parameter or an activation -> mesh axes. What is not named here is not sharded by name. Of several
# rules of one name the first holds whose mesh axes no other axis of the array has taken by a rule above it.
LOGICAL_AXIS_RULES: tuple[LogicalAxisRule, ...] = (
    ("batch", BATCH_AXES),
    ("sequence", "sequence"),  # positions where a matrix cut over tensor is at work
    ("stream", ("sequence", "tensor")),  # positions of the residual stream
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("expert", "expert"),
    ("embed", STATE_AXES),
    ("embed", ("fsdp", "sequence")),  # of experts, which `expert` cuts already
)


def resolve_mesh_sizes(mesh: MeshSpec, num_devices: int) -> dict[str, int]:
    """Axis sizes with `auto` filled in. Raises `InvalidError` if the mesh does not use exactly the devices at hand."""
    given = {axis: getattr(mesh, axis) for axis in AXES}
    fixed = math.prod(size for size in given.values() if size != "auto")
    auto = [axis for axis, size in given.items() if size == "auto"]
    text = format_mesh(given)
    if auto and num_devices % fixed == 0 and num_devices >= fixed:
        return {axis: num_devices // fixed if size == "auto" else size for axis, size in given.items()}
    if auto or fixed != num_devices:
        here = f"{num_devices} device{'s' * (num_devices != 1)} here"
        relation = "is larger than the" if fixed > num_devices else "does not use exactly the"
        raise InvalidError(
            f"{text} {relation} {here}; let one axis be auto, or give sizes whose product is {num_devices}"
        )
    return given


def format_mesh(sizes: Mapping[str, int | str]) -> str:
    """A mesh for people: the axes that there always are, and of the others those that cut something."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1 or axis in _ALWAYS_SHOWN)


def build_logical_axis_rules(own: Sequence[LogicalAxisRule], owner: str) -> tuple[LogicalAxisRule, ...]:
    """The rules of a job: its `own` first, then those above. Raises `InvalidError` if they name no axis of the mesh."""
    for name, axes in own:
        for axis in list_axes(axes):
            if axis not in AXES:
                near = get_close_matches(axis, AXES, n=1, cutoff=0)[0]
                raise InvalidError(
                    f"{owner}.logical_axis_rules: {name!r} names the mesh axis {axis!r}; needs one of "
                    f"{', '.join(AXES)}, did you mean {near}?"
                )
    return (*own, *LOGICAL_AXIS_RULES)


def remove_axes_from_rules(axes: Sequence[str], rules: Sequence[LogicalAxisRule]) -> list[LogicalAxisRule]:
    """The rules, of which none cuts over these mesh axes."""
    return [(name, tuple(axis for axis in list_axes(entry) if axis not in axes)) for name, entry in rules]


def list_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that a rule, or an entry of a `PartitionSpec`, names."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def select_dividing_axes(size: int, entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Of the mesh axes of `entry` those that, one after another, together divide an axis of `size` elements."""
    kept: tuple[str, ...] = ()
    for axis in list_axes(entry):
        if size % math.prod(sizes[name] for name in (*kept, axis)) == 0:
            kept = (*kept, axis)
    return kept


def is_mesh_possible(mesh: MeshSpec, num_devices: int) -> bool:
    """Whether the mesh can be laid over exactly so many devices."""
    try:
        resolve_mesh_sizes(mesh, num_devices)
    except InvalidError:
        return False
    return True


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices of the job, by default those at hand, in an order that suits their interconnect.

    Axes that `sizes` does not name are 1.
    Slices, which only a slow network joins, are told apart by the first axes that their number divides: `data` if it
    can be. Raises `InvalidError` if no axes can. Called on every host.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict.fromkeys(AXES, 1) | dict(sizes)
    shape = tuple(sizes[axis] for axis in AXES)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        outer = split_axes_over_slices(sizes, num_slices)
        inner = [size // cut for size, cut in zip(shape, outer, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split_axes_over_slices(sizes: Mapping[str, int], num_slices: int) -> list[int]:
    """By what each axis is cut over slices. Raises `InvalidError` if the axes do not make up their number."""
    left, outer = num_slices, []
    for axis in AXES:
        outer.append(math.gcd(left, sizes.get(axis, 1)))
        left //= outer[-1]
    if left > 1:
        raise InvalidError(
            f"{format_mesh(sizes)} cannot be laid over {num_slices} slices; make data a multiple of {num_slices}"
        )
    return outer


def make_batch_sharding(mesh: Mesh) -> NamedSharding:
    """How (S, B, T) batches lie: B over data x fsdp x expert, T over sequence."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, "sequence"))


def count_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Devices over which the examples of a batch are spread."""
    return math.prod(int(mesh.shape[axis]) for axis in BATCH_AXES)


def format_batch_axes(mesh: Mesh) -> str:
    """The axes over which the examples are spread, for people."""
    return " x ".join(axis for axis in BATCH_AXES if axis in _ALWAYS_SHOWN or mesh.shape[axis] > 1)


def validate_sequence_sharding(mesh: Mesh, sequence_length: int, chunk_positions: int | None) -> None:
    """Raise `InvalidError` if rows, or the chunks of their loss, do not divide over the `sequence` axis.

    Every device has two halves of its part of a row, one of which others attend for.
    """
    number = int(mesh.shape["sequence"])
    share, rest = divmod(sequence_length, number)
    if number > 1 and (rest or share % 2):
        below = sequence_length // (2 * number) * 2 * number
        near = " or ".join(str(length) for length in (below, below + 2 * number) if length)
        most = max(math.gcd(sequence_length, 2 * number) // 2, 1)
        raise InvalidError(
            f"config.data.sequence_length={sequence_length} does not divide into two halves for each of "
            f"topology.mesh.sequence={number} devices; use {near}, or a sequence axis of {most}"
        )
    if number > 1 and chunk_positions is not None and share % chunk_positions:
        raise InvalidError(
            f"config.memory.loss_chunk_positions={chunk_positions} does not divide the {share} positions that each of "
            f"topology.mesh.sequence={number} devices has of a row; use {math.gcd(share, chunk_positions)}"
        )


def validate_same_bits_mesh(mesh: Mesh, same_bits_devices: int) -> None:
    """Raise `InvalidError` on a mesh on which sums would have another order than on other numbers of devices."""
    for axis in AXES:
        if axis not in ("data", "fsdp") and mesh.shape[axis] > 1:
            raise InvalidError(
                f"config.train.same_bits_devices={same_bits_devices} holds for data x fsdp alone, and topology.mesh."
                f"{axis} is {mesh.shape[axis]}; make it 1, or same_bits_devices null"
            )
    number = count_batch_shards(mesh)
    if same_bits_devices % number:
        fitting = [size for size in range(1, same_bits_devices + 1) if same_bits_devices % size == 0]
        raise InvalidError(
            f"config.train.same_bits_devices={same_bits_devices} cannot be spread over {number} devices "
            f"(data x fsdp); use {', '.join(map(str, fitting))}"
        )


def list_micro_batch_sizes(
    global_batch_examples: int, micro_batch_examples: int | str, num_shards: int, axes: str = "data x fsdp"
) -> list[int]:
    """The micro-batches per device that may be used, largest first: all divisors of a device's share if `auto`.

    Raises `InvalidError` with the nearest valid numbers if the division leaves a rest.
    """
    share, rest = divmod(global_batch_examples, num_shards)
    if rest:
        near = " or ".join(str(count * num_shards) for count in (share, share + 1) if count)
        raise InvalidError(
            f"global_batch_examples={global_batch_examples} does not divide over {num_shards} devices ({axes}); "
            f"use {near}"
        )
    divisors = [size for size in range(share, 0, -1) if share % size == 0]
    if micro_batch_examples == "auto":
        return divisors
    if micro_batch_examples not in divisors:
        raise InvalidError(
            f"micro_batch_examples={micro_batch_examples} does not divide the {share} examples of a device "
            f"({global_batch_examples} over {num_shards} devices); use auto or one of {divisors}"
        )
    return [int(micro_batch_examples)]


def read_peak_memory_bytes() -> int | None:
    """The most that any device of this process has held at once since it was started; None where nobody counts."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((int(each["peak_bytes_in_use"]) for each in stats if "peak_bytes_in_use" in each), default=None)


def read_device_memory_bytes() -> int:
    """Memory of one device: what the backend reports, for CPU devices their share of the machine's (or container's)."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()).isdecimal():
        total = min(total, int(text))
    return total // jax.local_device_count()


@contextlib.contextmanager
def use_sharding_rules(mesh: Mesh, rules: Sequence[LogicalAxisRule] | None = None) -> Iterator[None]:
    """Inside, logical axis names in a model mean axes of `mesh`; in a trace it can only be the mesh of that trace.

    By `rules`, or else by those that are in force already, or else by `LOGICAL_AXIS_RULES`.
    """
    is_set = jax.sharding.get_abstract_mesh() == mesh.abstract_mesh
    with contextlib.nullcontext() if is_set else _context(mesh), nn.logical_axis_rules(rules or get_active_rules()):
        yield


def get_active_rules() -> Sequence[LogicalAxisRule]:
    """Those that logical axis names are read by here."""
    return nn.get_logical_axis_rules() or LOGICAL_AXIS_RULES


def _context(mesh: Mesh) -> contextlib.AbstractContextManager[Any]:
    return jax.sharding.use_abstract_mesh(mesh) if isinstance(mesh, AbstractMesh) else jax.set_mesh(mesh)


def is_tpu_mesh(mesh: AbstractMesh) -> bool:
    """Whether a mesh is of TPUs."""
    return mesh.abstract_device is not None and mesh.abstract_device.platform == "tpu"


def list_manual_axes(axes: tuple[str, ...]) -> set[str]:
    """The axes that `jax.shard_map` is to name, so that each device is by itself along `axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {*mesh.axis_names} if _is_alone(mesh, axes) else {*axes}


@contextlib.contextmanager
def enter_shard_map(axes: tuple[str, ...], outside: AbstractMesh) -> Iterator[None]:
    """Trace what stands in such a `jax.shard_map`, which was called under the mesh `outside`."""
    if _is_alone(outside, axes):
        nowhere = AbstractMesh((), (), abstract_device=outside.abstract_device)
        with nn.logical_axis_rules(()), jax.sharding.use_abstract_mesh(nowhere):
            yield
    else:
        with nn.logical_axis_rules(remove_axes_from_rules(axes, get_active_rules())):
            yield


def _is_alone(mesh: AbstractMesh, axes: tuple[str, ...]) -> bool:
    return mesh.size == math.prod(mesh.shape[axis] for axis in axes) and not is_tpu_mesh(mesh)
