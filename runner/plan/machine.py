"""The devices that a job is sized for, without having them: libtpu's own, or CPU devices that stand in for them.

libtpu compiles for any TPU topology on any machine. Without it, and for GPUs, the same program is partitioned for as
many faked CPU devices: the sharding and the collectives are those of the mesh, the temporaries are the CPU compiler's.

What a compiler makes of one parameter on a mesh: gathered for a matmul, its gradient scattered, or all of it whole.

A program of one matmul takes the compiler a second or two, where the step takes minutes.
"""

import contextlib
import importlib.metadata
import importlib.util
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from runner.accelerator import Accelerator
from runner.errors import InvalidError
from runner.parallel.mesh import BATCH_AXES, STATE_AXES, make_mesh, read_device_memory_bytes
from runner.plan.forecast.collectives import find_collectives
from runner.plan.mesh import MeshSizes

# What libtpu would otherwise ask of a TPU host that is not there, and how much it says.
_WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}
_MOST_STAND_INS = (
    8192  # two devices a chip of the largest slice; XLA takes 12 s for them, and four times as long for twice
)
_FAKED_BY_FLAG = re.compile(r"--xla_force_host_platform_device_count=\d+")


@dataclass(frozen=True)
class TargetMachine:
    """Devices to compile for, and what they stand for.

    Attributes:
        devices: in jax's order.
        stand_ins: as many CPU devices, the same ones where they are faked.
        accelerator: None where they are simply those at hand.
        compiler: what compiles for them, for a person.
        is_faked: whether they stand in for others.
        hbm_bytes: memory of one device.
    """

    devices: Sequence[jax.Device]
    stand_ins: Sequence[jax.Device]
    accelerator: Accelerator | None
    compiler: str
    is_faked: bool
    hbm_bytes: int

    @property
    def num_hosts(self) -> int:
        """Hosts of the job."""
        found = self.accelerator
        return 1 if found is None else found.hosts_per_slice * found.num_slices

    @property
    def devices_per_domain(self) -> int:
        """Devices that the fast interconnect joins: those of a slice, or of a GPU node."""
        found = self.accelerator
        if found is None or found.num_chips is None:
            return len(self.devices)
        chips = found.num_chips if found.chip.is_tpu else min(found.num_chips, found.chip.chips_per_host or 1)
        return chips * found.chip.devices_per_chip


def is_libtpu_installed() -> bool:
    """Whether libtpu is installed."""
    found = importlib.util.find_spec("libtpu")
    return found is not None and found.loader is not None


def open_machine(accelerator: Accelerator | None) -> TargetMachine:
    """The devices of `accelerator`; those at hand if it is None, or a CPU without a number.

    To be called before jax has started a backend, and with the largest first if with several. Raises `InvalidError`
    if there is no such topology, or libtpu cannot answer.
    """
    if accelerator is None or (accelerator.name == "cpu" and accelerator.num_chips is None):
        devices = jax.devices()
        return TargetMachine(
            devices, devices, accelerator, f"XLA for {devices[0].device_kind}", False, read_device_memory_bytes()
        )
    if accelerator.num_devices is None:
        raise InvalidError(f"{accelerator.name}: how many? needs a number, such as {accelerator.name}-8")
    if accelerator.num_devices > _MOST_STAND_INS:
        raise InvalidError(
            f"{accelerator}: {accelerator.num_devices} devices; plan stands in for {_MOST_STAND_INS} at most"
        )
    jax.config.update("jax_platforms", "cpu")
    shape = accelerator.shape if accelerator.chip.is_tpu else ""  # refuses what is no slice
    stand_ins = _fake_devices(accelerator.num_devices)
    if shape and is_libtpu_installed():
        return _libtpu_machine(accelerator, shape, stand_ins)
    is_cpu = accelerator.name == "cpu"
    why = ", since libtpu is not installed (extra tpu-plan)" if accelerator.chip.is_tpu else ""
    compiler = "XLA for CPU" if is_cpu else f"XLA for {len(stand_ins)} faked CPU devices{why}"
    return TargetMachine(stand_ins, stand_ins, accelerator, compiler, not is_cpu, _memory_of(accelerator))


def _libtpu_machine(accelerator: Accelerator, shape: str, stand_ins: Sequence[jax.Device]) -> TargetMachine:
    for name, value in _WITHOUT_A_TPU.items():
        os.environ.setdefault(name, value)
    chip = accelerator.chip
    options: dict[str, Any] = {}
    if chip.libtpu_name == "v4":  # jax runs its two cores as one device
        options["chip_config_name"] = "megacore"
    if accelerator.num_chips == 1:
        options["chips_per_host_bounds"] = (1, 1, 1)
    if accelerator.num_slices > 1:
        options["num_slices"] = accelerator.num_slices
    name = f"{chip.libtpu_name}:{shape}"
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except (jax.errors.JaxRuntimeError, RuntimeError, AttributeError) as error:
        raise InvalidError(_why_libtpu_refuses(name, str(error))) from error
    version = importlib.metadata.version("libtpu")
    return TargetMachine(devices, stand_ins, accelerator, f"libtpu {version}", False, _memory_of(accelerator))


def _why_libtpu_refuses(name: str, message: str) -> str:
    line = message.split("\n", 1)[0][:300]
    needed = [text for text in importlib.metadata.requires("jax") or () if text.startswith("libtpu")]
    needed_version = needed[0].partition(";")[0].strip() if needed else "the libtpu of jax[tpu]"
    if "lockfile" in message or "already in use" in message:
        return f"another process holds libtpu ({line}); wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
    return (
        f"libtpu {importlib.metadata.version('libtpu')} cannot compile for {name}: {line}; "
        f"jax {jax.__version__} needs {needed_version}"
    )


def _fake_devices(number: int) -> Sequence[jax.Device]:
    """So many CPU devices; where a backend has been started, the first of those that it has."""
    os.environ["XLA_FLAGS"] = _FAKED_BY_FLAG.sub("", os.environ.get("XLA_FLAGS", ""))
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", number)
    devices = jax.devices("cpu")
    assert len(devices) >= number, "the largest machine is opened first"
    return devices[:number]


def _memory_of(accelerator: Accelerator) -> int:
    speeds = accelerator.chip.speeds
    return read_device_memory_bytes() if speeds is None else speeds.hbm_bytes // accelerator.chip.devices_per_chip


_TOKENS = 4096  # of a device


def uses_all_reduce(devices: Sequence[jax.Device], sizes: MeshSizes, leaf: Any, dtype: str) -> bool:
    """Whether `leaf`, an abstract parameter with a sharding on that mesh, is moved over `STATE_AXES` by all-reduce.

    Of one that stacks layers or experts it is a matrix that is tried, in `dtype` as it is sent.
    """
    mesh = make_mesh(dict(sizes), devices)
    shape = leaf.shape[-2:]
    spec = [None] * leaf.ndim
    spec[: len(leaf.sharding.spec)] = leaf.sharding.spec
    rows = (*BATCH_AXES, "sequence")
    num_tokens = _TOKENS * mesh.size // mesh.shape["tensor"]

    def argument(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    weight = argument(shape, leaf.dtype, *spec[-2:])
    x, dy = (argument((num_tokens, width), jnp.dtype(dtype), rows) for width in shape)

    def step(weight: jax.Array, x: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient = (x.T @ dy).astype(weight.dtype)
        return x @ weight.astype(x.dtype), weight - gradient

    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(dy.sharding, weight.sharding))
        text = jitted.lower(weight, x, dy).compile().as_text() or ""
    found = find_collectives(text, {axis: int(size) for axis, size in mesh.shape.items()})
    reduced = [one for one in found if one.kind == "all-reduce" and {*one.axes} & {*STATE_AXES}]
    return any(2 * math.prod(each) > math.prod(shape) for one in reduced for each in one.shapes)
