"""Device mesh, logical axis rules and batch sharding.

A mesh has five axes:

- `data`: data parallelism. Examples are sharded over it, and nothing else.
- `fsdp`: fully sharded data parallelism. Examples, parameters and optimizer state are sharded over it.
- `sequence`: context parallelism. The positions of every sequence, parameters and optimizer state are sharded over it.
- `expert`: expert parallelism. Examples and experts are sharded over it; other parameters and their optimizer state
  are sharded over it as over `fsdp`.
- `tensor`: tensor parallelism. Single matrices are sharded over it and, between them, the positions of the residual
  stream.

Devices that are adjacent along the last axes are the nearest to each other on the interconnect. `tensor` and `expert`
exchange activations in each layer and wait for them, `sequence` sends keys and values to its neighbours while attention
runs, `fsdp` all-gathers parameters ahead of their use, and `data` reduces gradients once a step, which may cross
slices. An axis for pipeline stages would come before all of these.

The module depends on a model only through the names of its logical axes. `list_manual_axes` and `enter_shard_map` are
for code that runs inside `jax.shard_map`, where some axes are manual: each device computes on its own shard.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from runner.accelerator import HOST_MEMORY
from runner.errors import InvalidError
from runner.nvidia import open_gpus
from runner.process import read_memory_bytes
from runner.spec import MeshConfig as MeshSpec
from runner.spec.imports import import_extra

AXES = ("data", "fsdp", "sequence", "expert", "tensor")
BATCH_AXES = ("data", "fsdp", "expert")
STATE_AXES = ("fsdp", "sequence", "expert")  # every parameter is sharded over these, where its shape divides

_ALWAYS_SHOWN = ("data", "fsdp", "tensor")

LogicalAxisRule = tuple[str, str | tuple[str, ...] | None]

# Logical axis of a parameter or activation -> mesh axes. A logical axis without a rule is replicated. If several rules
# have one name, the first applies whose mesh axes are not yet taken by another axis of the array.
LOGICAL_AXIS_RULES: tuple[LogicalAxisRule, ...] = (
    ("batch", BATCH_AXES),
    ("sequence", "sequence"),  # positions inside a layer, where matrices are sharded over tensor
    ("stream", ("sequence", "tensor")),  # positions of the residual stream
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("expert", "expert"),
    ("embed", STATE_AXES),
    ("embed", ("fsdp", "sequence")),  # for the parameters of experts, which are sharded over `expert` already
)


def resolve_mesh_sizes(mesh: MeshSpec, num_devices: int) -> dict[str, int]:
    """Return the axis sizes with `auto` filled in. Raises InvalidError if they do not use exactly `num_devices`."""
    given = {axis: getattr(mesh, axis) for axis in AXES}
    fixed = math.prod(size for size in given.values() if size != "auto")
    auto = [axis for axis, size in given.items() if size == "auto"]
    # At most one axis is `auto`, which the validation of the spec ensures.
    text = format_mesh(given)
    if auto and num_devices % fixed == 0 and num_devices >= fixed:
        return {axis: num_devices // fixed if size == "auto" else size for axis, size in given.items()}
    here = f"{num_devices} device{'s' * (num_devices != 1)} here"
    if auto:
        reason = f"the other axes have {fixed} devices together, which does not divide {num_devices}"
        raise InvalidError(f"{text} does not fit the {here}: {reason}; give sizes whose product divides it")
    if fixed != num_devices:
        relation = "is larger than the" if fixed > num_devices else "does not use exactly the"
        raise InvalidError(
            f"{text} {relation} {here}; let one axis be auto, or give sizes whose product is {num_devices}"
        )
    return given


def format_mesh(sizes: Mapping[str, int | str]) -> str:
    """Return a mesh as text: `data`, `fsdp` and `tensor` always, other axes where they are larger than 1."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1 or axis in _ALWAYS_SHOWN)


def build_logical_axis_rules(own: Sequence[LogicalAxisRule], owner: str) -> tuple[LogicalAxisRule, ...]:
    """Return a job's own rules, then `LOGICAL_AXIS_RULES`. Raises InvalidError for an axis that no mesh has."""
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
    """Return the rules without these mesh axes, so that nothing is sharded over them."""
    return [(name, tuple(axis for axis in list_axes(entry) if axis not in axes)) for name, entry in rules]


def list_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in a rule or in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else tuple(entry or ())


def select_dividing_axes(size: int, entry: str | tuple[str, ...] | None, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes of `entry`, in order, over which an axis of `size` divides together with those before."""
    kept: tuple[str, ...] = ()
    for axis in list_axes(entry):
        if size % math.prod(sizes[name] for name in (*kept, axis)) == 0:
            kept = (*kept, axis)
    return kept


def fit_sharding(shape: tuple[int, ...], spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding nearest to `spec` that divides `shape`, sharded over fsdp too if any axis allows it."""
    entries = (*spec, *[None] * (len(shape) - len(spec)))
    # Mesh axes of each dimension by the rules, without those that do not divide it.
    mesh_axes = [select_dividing_axes(size, entry, mesh.shape) for size, entry in zip(shape, entries, strict=True)]
    if all("fsdp" not in axes for axes in mesh_axes):
        num_shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in mesh_axes]
        sizes = [size // number for size, number in zip(shape, num_shards, strict=True)]
        # fsdp must divide the shape of a shard along the other mesh axes.
        fitting = [index for index, size in enumerate(sizes) if size % mesh.shape["fsdp"] == 0]
        if fitting:
            # The largest dimension, so that shards stay large and the same rule fits every parameter.
            largest = max(fitting, key=lambda index: sizes[index])
            mesh_axes[largest] = (*mesh_axes[largest], "fsdp")
    return NamedSharding(mesh, PartitionSpec(*mesh_axes))


def shard_over_data(shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Return a sharding that is also sharded over `data`, if any axis of the array allows it.

    A dimension of a matrix is preferred to those that stack matrices, then the one with the largest shards.
    """
    sizes, entries = sharding.mesh.shape, (*sharding.spec, *[None] * (len(shape) - len(sharding.spec)))
    axes = [list_axes(entry) for entry in entries]
    num_shards = [math.prod(sizes[axis] for axis in each) for each in axes]
    fitting = [
        (index >= len(shape) - 2, size // num_shards[index], -index)
        for index, size in enumerate(shape)
        if size and size % (num_shards[index] * sizes["data"]) == 0
    ]
    if any("data" in each for each in axes) or not fitting:
        return sharding
    chosen = -max(fitting)[-1]
    axes[chosen] = (*axes[chosen], "data")
    return NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def is_mesh_possible(mesh: MeshSpec, num_devices: int) -> bool:
    """Return True if the mesh can be built from exactly `num_devices` devices."""
    try:
        resolve_mesh_sizes(mesh, num_devices)
    except InvalidError:
        return False
    return True


def make_mesh(sizes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh over all devices of the job, in an order that suits their interconnect. Call it on every process.

    Slices, which are joined only by a slow network, are separated along the first axes that divide their number, which
    is `data` where possible.

    `sizes` has the devices by axis, 1 for axes that it does not name. Raises InvalidError if the axes do not divide
    over the slices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = dict.fromkeys(AXES, 1) | dict(sizes)
    shape = tuple(sizes[axis] for axis in AXES)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        # Splitting physical axes allows meshes that do not match the torus of a TPU slice.
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        outer = split_axes_over_slices(sizes, num_slices)
        inner = [size // factor for size, factor in zip(shape, outer, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def split_axes_over_slices(sizes: Mapping[str, int], num_slices: int) -> list[int]:
    """Return the factor of each axis that lies across slices, in the order of `AXES`. Raises InvalidError for none."""
    left, outer = num_slices, []
    # The first axes take the factors, because `data` has the least traffic.
    for axis in AXES:
        outer.append(math.gcd(left, sizes.get(axis, 1)))
        left //= outer[-1]
    if left > 1:
        raise InvalidError(
            f"{format_mesh(sizes)} cannot be laid over {num_slices} slices; make data a multiple of {num_slices}"
        )
    return outer


def make_batch_sharding(mesh: Mesh, has_sequences: bool = True) -> NamedSharding:
    """Return the sharding of (S, B, T): B over data x fsdp x expert, T over sequence; without sequences of B alone."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, *(["sequence"] if has_sequences else [])))


def make_abstract_mesh(sizes: Mapping[str, int]) -> Any:
    """Return a mesh without devices, for computations that depend only on its sizes."""
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))


def count_batch_shards(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of shards into which the examples of a batch are split."""
    return math.prod(int(mesh.shape[axis]) for axis in BATCH_AXES)


def format_batch_axes(mesh: Mesh) -> str:
    """Return the axes over which examples are sharded, as text."""
    return " x ".join(axis for axis in BATCH_AXES if axis in _ALWAYS_SHOWN or mesh.shape[axis] > 1)


def validate_sequence_sharding(mesh: Mesh, sequence_length: int | None, chunk_positions: int | None) -> None:
    """Validate that sequences and the chunks of their loss divide over the `sequence` axis.

    Each device's part of a sequence must consist of two equal halves, because zigzag context parallelism moves one of
    them to another device.

    `sequence_length` is None if the data are arrays, and `chunk_positions` (`config.memory.loss_chunk_positions`) for a
    loss that is not chunked. Raises InvalidError if they do not divide.
    """
    number = int(mesh.shape["sequence"])
    if sequence_length is None:
        if number > 1:
            raise InvalidError(
                f"topology.mesh.sequence={number} shards sequences of tokens, and the data are arrays; make it 1, and "
                "use data or fsdp"
            )
        return
    # `share` is the number of positions of one device.
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
            f"config.memory.loss_chunk_positions={chunk_positions} does not divide the {share} positions of a sequence "
            f"that each of topology.mesh.sequence={number} devices has; use {math.gcd(share, chunk_positions)}"
        )


def validate_same_bits_mesh(mesh: Mesh, same_bits_devices: int) -> None:
    """Validate that a mesh can keep the order of `train.same_bits_devices`. Raises InvalidError."""
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
    """Return the possible numbers of examples in the micro-batch of a device, largest first.

    `micro_batch_examples` is a number, or `auto` for all divisors of a device's share. Examples are sharded over
    `num_shards` devices along `axes`. Raises InvalidError, with the nearest valid numbers, if a remainder is left.
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
    """Return the peak memory of any device of this process since it started; None if the backend does not count it."""
    return read_memory_counter("peak_bytes_in_use")


def read_memory_counter(name: str) -> int | None:
    """Return a counter of the backend, such as `bytes_in_use`, of the device with most; None if there is none.

    Does not wait for the devices.
    """
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((int(each[name]) for each in stats if name in each), default=None)


def read_gpu_utilization() -> float | None:
    """Return the share of the driver's last sample, of up to a second, in which kernels ran.

    It is the mean over the GPUs of this process; None without GPUs of NVIDIA, without the library of their driver, or
    without the package `nvidia-ml-py`. Does not wait for the devices.
    """
    if jax.default_backend() != "gpu":
        return None
    try:
        pynvml = import_extra("pynvml")
    except InvalidError:
        return None
    try:
        handles = open_gpus(pynvml, [device.local_hardware_id or 0 for device in jax.local_devices()])
        return sum(pynvml.nvmlDeviceGetUtilizationRates(each).gpu for each in handles) / 100 / len(handles)
    except (pynvml.NVMLError, IndexError):
        return None


def has_host_memory(mesh: Mesh | AbstractMesh) -> bool:
    """Return True if the devices of a mesh can read pinned memory of their hosts. True for an abstract mesh."""
    if isinstance(mesh, AbstractMesh):
        return True
    devices = [device for device in mesh.devices.flat if device.process_index == jax.process_index()]
    return any(memory.kind == HOST_MEMORY for memory in (devices or [mesh.devices.flat[0]])[0].addressable_memories())


def read_device_memory_bytes() -> int:
    """Return the memory of one device: the backend's limit, or for a CPU its share of the machine's or container's."""
    # All devices of a process are assumed to have the same memory.
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats is not None and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return read_memory_bytes() // jax.local_device_count()


@contextlib.contextmanager
def use_sharding_rules(mesh: Mesh, rules: Sequence[LogicalAxisRule] | None = None) -> Iterator[None]:
    """Make `mesh`, inside a trace that of the trace, current, so that logical axis names in a model refer to its axes.

    Names are resolved by `rules`; by default the active ones, else `LOGICAL_AXIS_RULES`.
    """
    context: contextlib.AbstractContextManager[object]
    if jax.sharding.get_abstract_mesh() == mesh.abstract_mesh:
        context = contextlib.nullcontext()
    elif isinstance(mesh, AbstractMesh):  # `jax.set_mesh` takes concrete meshes only
        context = jax.sharding.use_abstract_mesh(mesh)
    else:
        context = jax.set_mesh(mesh)
    with context, nn.logical_axis_rules(rules or get_active_rules()):
        yield


def get_active_rules() -> Sequence[LogicalAxisRule]:
    """Return the rules by which logical axis names are resolved here."""
    return nn.get_logical_axis_rules() or LOGICAL_AXIS_RULES


def is_tpu_mesh(mesh: AbstractMesh) -> bool:
    """Return True if the devices of a mesh are TPUs."""
    return mesh.abstract_device is not None and mesh.abstract_device.platform == "tpu"


def list_manual_axes(axes: tuple[str, ...]) -> set[str]:
    """Return the `axis_names` for `jax.shard_map` that let each device compute by itself along `axes`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {*mesh.axis_names} if _has_no_other_axes(mesh, axes) else {*axes}


@contextlib.contextmanager
def enter_shard_map(axes: tuple[str, ...], outside: AbstractMesh) -> Iterator[None]:
    """Set mesh and rules for the body of a `jax.shard_map`, called under the mesh `outside`, over manual `axes`."""
    if _has_no_other_axes(outside, axes):
        # An empty mesh makes this trace the program of a single device.
        no_mesh = AbstractMesh((), (), abstract_device=outside.abstract_device)
        with nn.logical_axis_rules(()), jax.sharding.use_abstract_mesh(no_mesh):
            yield
    else:
        with nn.logical_axis_rules(remove_axes_from_rules(axes, get_active_rules())):
            yield


def _has_no_other_axes(mesh: AbstractMesh, axes: tuple[str, ...]) -> bool:
    """Return True if all axes besides `axes` have size 1 and may vanish inside of `jax.shard_map`.

    They never vanish on TPUs. Without them the TPU compiler would choose layouts for the inputs and outputs of
    attention kernels that it has to copy: 39 of the 382 ms of a step of `specs/gpt2_124m.yaml`, by its own estimates.
    """
    return mesh.size == math.prod(mesh.shape[axis] for axis in axes) and not is_tpu_mesh(mesh)
