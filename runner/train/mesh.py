"""From a spec's topology to a mesh: axis arithmetic, logical axis rules, the split of a batch.

Axes: `data` shards only the batch; `fsdp` shards the batch, the parameters and the optimizer state; `tensor` shards
single matrices. Knows nothing of models beyond the names of their logical axes.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from runner.errors import InvalidError
from runner.spec import Mesh as MeshSpec

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")

# Logical axis of a parameter or an activation -> mesh axes. What is not named here is not sharded by name.
LOGICAL_AXIS_RULES = (
    ("batch", BATCH_AXES),
    ("vocab", "tensor"),
    ("heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", "fsdp"),
)


def mesh_sizes(mesh: MeshSpec, num_devices: int) -> dict[str, int]:
    """Axis sizes with `auto` filled in. Raises `InvalidError` if the mesh does not use exactly the devices at hand."""
    given = {axis: getattr(mesh, axis) for axis in AXES}
    fixed = int(np.prod([size for size in given.values() if size != "auto"]))
    auto = [axis for axis, size in given.items() if size == "auto"]
    text = " x ".join(f"{axis} {size}" for axis, size in given.items())
    if auto and num_devices % fixed == 0 and num_devices >= fixed:
        return {axis: num_devices // fixed if size == "auto" else size for axis, size in given.items()}
    if auto or fixed != num_devices:
        here = f"{num_devices} device{'s' * (num_devices != 1)} here"
        relation = "is larger than the" if fixed > num_devices else "does not use exactly the"
        raise InvalidError(
            f"{text} {relation} {here}; let one axis be auto, or give sizes whose product is {num_devices}"
        )
    return given


def does_mesh_fit(mesh: MeshSpec, num_devices: int) -> bool:
    """Whether the mesh can be laid over exactly so many devices."""
    try:
        mesh_sizes(mesh, num_devices)
    except InvalidError:
        return False
    return True


def make_mesh(sizes: dict[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh over all devices of the job, by default those at hand, in an order that suits their interconnect.

    Slices, which only a slow network joins, are told apart by the first axes that their number divides: `data` if it
    can be. Raises `InvalidError` if no axes can. Called on every host.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes[axis] for axis in AXES)
    num_slices = len({getattr(device, "slice_index", 0) for device in devices})
    if num_slices == 1:
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        outer = over_slices(sizes, num_slices)
        inner = [size // cut for size, cut in zip(shape, outer, strict=True)]
        grid = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def over_slices(sizes: dict[str, int], num_slices: int) -> list[int]:
    """By what each axis is cut over slices. Raises `InvalidError` if the axes do not make up their number."""
    left, outer = num_slices, []
    for axis in AXES:
        outer.append(math.gcd(left, sizes[axis]))
        left //= outer[-1]
    if left > 1:
        mesh = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
        raise InvalidError(f"{mesh} cannot be laid over {num_slices} slices; make data a multiple of {num_slices}")
    return outer


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """How (S, B, T) batches lie: B over data x fsdp."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES, None))


def num_batch_shards(mesh: Mesh) -> int:
    """Devices over which the examples of a batch are spread."""
    return int(mesh.shape["data"] * mesh.shape["fsdp"])


def micro_batch_sizes(global_batch_examples: int, micro_batch_examples: int | str, num_shards: int) -> list[int]:
    """The micro-batches per device that may be used, largest first: all divisors of a device's share if `auto`.

    Raises `InvalidError` with the nearest valid numbers if the division leaves a rest.
    """
    share, rest = divmod(global_batch_examples, num_shards)
    if rest:
        near = " or ".join(str(count * num_shards) for count in (share, share + 1) if count)
        raise InvalidError(
            f"global_batch_examples={global_batch_examples} does not divide over {num_shards} devices (data x fsdp); "
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


def device_peak_bytes() -> int | None:
    """The most that any device of this process has held at once since it was started; None where nobody counts."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((int(each["peak_bytes_in_use"]) for each in stats if "peak_bytes_in_use" in each), default=None)


def device_memory_bytes() -> int:
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
