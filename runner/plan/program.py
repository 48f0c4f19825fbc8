"""Compiled steps of a job for devices that need not be present: memory, collectives, compile time, roofline.

libtpu compiles for any TPU topology on any machine, and XLA for GPU for any number of NVIDIA GPUs (`runner.plan.gpu`).
Without them the same program is partitioned for the same number of simulated CPU devices. Sharding and collectives are
then those of the mesh, but temporaries are those of XLA for CPU.

The roofline is a bound: a step cannot be faster than its matmuls at peak FLOP/s, its memory traffic at HBM bandwidth,
or its collectives at the bandwidth of their network. If all of these overlap, it is as fast as the slowest of them.

`schedule_program` ends a compilation once the compiler has planned the schedule and the memory of the step. For a large
step on a TPU that takes a tenth of the time, and leaves out the size of the code and the compiler's estimates of ops.

`uses_all_reduce` probes how the compiler treats one parameter on a mesh: gathered for a matmul and its gradient
scattered, or reduced whole. Compiling one matmul takes a second or two, where a step takes minutes.
"""

import contextlib
import importlib.metadata
import math
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from runner.accelerator import TPU_DEVICES, Accelerator, PeakRates, has_device
from runner.checkpoint.leaves import is_on_host
from runner.errors import InvalidError
from runner.parallel.mesh import (
    AXES,
    BATCH_AXES,
    STATE_AXES,
    make_mesh,
    read_device_memory_bytes,
    split_axes_over_slices,
)
from runner.plan.figures import format_amount
from runner.plan.forecast.collectives import Collective, find_collectives
from runner.plan.gpu import add_gpu_flags, count_attention_workspace, is_gpu_compiler_installed, open_gpu_devices
from runner.plan.mesh import MeshSizes
from runner.spec.imports import format_install, is_extra_installed
from runner.train.compile import MEMORY_SHARE, CompiledStep, ProgramMemory, StepTooLargeError
from runner.train.layout import BatchLayout
from runner.train.setup import TrainSetup, TrainSetupBuilder

# Otherwise libtpu would query the metadata server of a TPU host, which does not exist here, and log errors.
_LIBTPU_VARIABLES = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
}

# Two devices per chip of the largest slice. XLA takes 12 s to fake that many, and four times as long for twice as many.
_MAX_FAKE_DEVICES = 8192
_FAKE_DEVICE_FLAG = re.compile(r"--xla_force_host_platform_device_count=\d+")

# Dump of a program with its schedule, which libtpu and XLA for CPU write once its buffers are planned.
_SCHEDULED = re.compile(r"(\.after_optimizations)_after_buffer_assignment\.txt$|(\.cpu_after_optimizations)\.txt$")
# A line of its list of buffers, like `allocation 7: size 512, parameter 3, ...`; on-chip memory has `color` there.
_ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
# A job compares libtpu's statistics of the whole program with the memory of a device. They count 7% to 14% more
# temporaries than its plan of the buffers does (measured on steps of GPT and Llama).
_TEMPORARIES_IN_STATISTICS = 1.15
_POLL_SECONDS = 0.1

_PROBE_TOKENS = 4096  # of one device, in the matmul of a probe
# Speeds of one host, assumed and not measured: writing to a bucket or a shared disk, and copying out of its devices.
DURABLE_BYTES_PER_SECOND = 1e9
STALL_BYTES_PER_SECOND = 10e9
# From a failure to the first new step, without reading the state: detection, rendezvous, a warm compile cache; assumed.
RESTART_SECONDS = 120.0

# Share of the best speed that a tuned step is assumed to reach where a time is promised and not only bounded.
TYPICAL_SHARE = 0.5


@dataclass(frozen=True)
class TargetMachine:
    """Devices to compile for."""

    devices: Sequence[jax.Device]  # devices in jax's order
    stand_ins: Sequence[jax.Device]  # the same number of CPU devices; equal to `devices` if these are simulated
    accelerator: Accelerator | None  # accelerator that the devices represent, None for the devices of this machine
    compiler: str  # name of the compiler, for the user
    is_faked: bool  # True if the devices are CPU devices that represent others
    hbm_bytes: int

    @property
    def num_hosts(self) -> int:
        """Number of hosts of the job."""
        if self.accelerator is None:
            return 1
        return self.accelerator.hosts_per_slice * self.accelerator.num_slices

    @property
    def usable_bytes(self) -> float:
        """Memory of one device that a step may use."""
        return self.hbm_bytes * MEMORY_SHARE

    @property
    def is_compiled_for_gpus(self) -> bool:
        """True if XLA for GPU compiles for these devices."""
        return not self.is_faked and self.accelerator is not None and self.accelerator.chip.processors is not None

    @property
    def spans_domains(self) -> bool:
        """True if one program runs on the devices of all domains. libtpu compiles the program of a slice."""
        return self.is_faked or self.is_compiled_for_gpus

    @property
    def devices_per_domain(self) -> int:
        """Number of devices that the fast interconnect joins: those of a slice, or of one or several GPU nodes."""
        found = self.accelerator
        if found is None or found.num_chips is None:
            return len(self.devices)
        chips = found.num_chips if found.chip.is_tpu else min(found.num_chips, found.chip.chips_per_domain or 1)
        return chips * found.chip.devices_per_chip


def is_libtpu_installed() -> bool:
    """Return True if libtpu can be imported."""
    return is_extra_installed("tpu-plan")


def open_machine(accelerator: Accelerator | None, *, is_deterministic: bool = True) -> TargetMachine:
    """Return the devices of an accelerator; None, or a CPU without a number, stands for the devices of this machine.

    Programs for other devices are compiled as those of a job with `topology.deterministic`, or one without.

    Call it before jax starts a backend. A caller that opens several machines must open the largest first, because the
    number of simulated devices is fixed when the backend starts. Raises InvalidError if there is no such topology, or
    libtpu cannot compile for it.
    """
    if accelerator is None or (accelerator.name == "cpu" and accelerator.num_chips is None):
        local = jax.devices()
        compiler = f"XLA for {local[0].device_kind}"
        return TargetMachine(local, local, accelerator, compiler, False, read_device_memory_bytes())
    if accelerator.num_devices is None:
        raise InvalidError(
            f"{accelerator.name}: a plan needs the number of chips; add it, for example {accelerator.name}-8"
        )
    if accelerator.num_devices > _MAX_FAKE_DEVICES:
        raise InvalidError(
            f"{accelerator}: {accelerator.num_devices} devices; plan can stand in for at most {_MAX_FAKE_DEVICES}, "
            "so plan for fewer slices"
        )
    jax.config.update("jax_platforms", "cpu")
    shape = accelerator.shape if accelerator.chip.is_tpu else ""  # raises for a number of chips that is not a slice

    # The number of devices in XLA_FLAGS would win over the one that is set here. If a backend has been started, its
    # number is fixed, and the first of its devices are used.
    os.environ["XLA_FLAGS"] = _FAKE_DEVICE_FLAG.sub("", os.environ.get("XLA_FLAGS", ""))
    if accelerator.hosts_per_slice * (accelerator.num_chips_per_host or 1) != accelerator.num_chips:
        nodes, per_node = accelerator.hosts_per_slice, accelerator.chip.chips_per_host
        raise InvalidError(
            f"{accelerator}: {accelerator.num_chips} GPUs do not divide over {nodes} nodes of {per_node}"
        )
    has_gpu_compiler = accelerator.chip.processors is not None and is_gpu_compiler_installed()
    if has_gpu_compiler:
        add_gpu_flags(os.environ, is_deterministic=is_deterministic)  # before XLA reads them
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", accelerator.num_devices)
    cpu_devices = jax.devices("cpu")
    assert len(cpu_devices) >= accelerator.num_devices, "the largest machine is opened first"
    stand_ins = cpu_devices[: accelerator.num_devices]

    hbm_bytes = read_device_memory_bytes() if accelerator.chip.speeds is None else accelerator.chip.device_hbm_bytes
    if shape and is_libtpu_installed():
        devices, compiler = _open_libtpu_devices(accelerator, shape)
        return TargetMachine(devices, stand_ins, accelerator, compiler, False, hbm_bytes)
    if has_gpu_compiler:
        devices, compiler = open_gpu_devices(accelerator)
        return TargetMachine(devices, stand_ins, accelerator, compiler, False, hbm_bytes)
    is_cpu = accelerator.name == "cpu"
    reason = f", since libtpu is not installed ({format_install('tpu-plan')})" if accelerator.chip.is_tpu else ""
    if accelerator.chip.processors is not None:
        reason = f", since XLA for GPU is not installed ({format_install('gpu-plan')})"
    compiler = "XLA for CPU" if is_cpu else f"XLA for {len(stand_ins)} fake CPU devices{reason}"
    return TargetMachine(stand_ins, stand_ins, accelerator, compiler, not is_cpu, hbm_bytes)


def _open_libtpu_devices(accelerator: Accelerator, shape: str) -> tuple[Sequence[jax.Device], str]:
    for name, value in _LIBTPU_VARIABLES.items():
        os.environ.setdefault(name, value)
    # The lock of libtpu protects a TPU. Without one, several commands may compile at once.
    if not has_device(TPU_DEVICES):
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
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
        message = str(error)
        # The advice of libtpu to remove the lock of another process is left out.
        line = re.sub(r" *(Run|Try) .*lockfile.*", "", message.split("\n", 1)[0])[:300]
        # libtpu guards its device by a lock file, also for compilation alone.
        if "lockfile" in message or "already in use" in message:
            raise InvalidError(
                f"another process holds libtpu ({line}); wait for it, or set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
            ) from error
        required = [text for text in importlib.metadata.requires("jax") or () if text.startswith("libtpu")]
        needed = required[0].partition(";")[0].strip() if required else "the libtpu of jax[tpu]"
        raise InvalidError(
            f"libtpu {importlib.metadata.version('libtpu')} cannot compile for {name}: {line}; "
            f"jax {jax.__version__} needs {needed}"
        ) from error
    return devices, f"libtpu {importlib.metadata.version('libtpu')}"


def uses_all_reduce(devices: Sequence[jax.Device], sizes: MeshSizes, leaf: Any, dtype: str) -> bool:
    """Return True if the compiler moves a parameter over `STATE_AXES` by all-reduce instead of gather and scatter.

    Compiles one matmul and its weight gradient. If a parameter stacks layers or experts, one matrix is tried. `leaf` is
    abstract, with a sharding on the mesh over `devices`, and `dtype` the type in which it is sent.
    """
    # T: tokens of all devices, K and N: rows and columns of the matrix.
    mesh = make_mesh(dict(sizes), devices)
    shape = leaf.shape[-2:]
    spec = [None] * leaf.ndim
    spec[: len(leaf.sharding.spec)] = leaf.sharding.spec
    token_axes = (*BATCH_AXES, "sequence")
    num_tokens = _PROBE_TOKENS * mesh.size // mesh.shape["tensor"]

    def make_argument(shape: tuple[int, ...], dtype: Any, *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    weight_KxN = make_argument(shape, leaf.dtype, *spec[-2:])
    x_TxK, dy_TxN = (make_argument((num_tokens, width), jnp.dtype(dtype), token_axes) for width in shape)

    def step(weight_KxN: jax.Array, x_TxK: jax.Array, dy_TxN: jax.Array) -> tuple[jax.Array, jax.Array]:
        gradient_KxN = (x_TxK.T @ dy_TxN).astype(weight_KxN.dtype)
        return x_TxK @ weight_KxN.astype(x_TxK.dtype), weight_KxN - gradient_KxN

    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(dy_TxN.sharding, weight_KxN.sharding))
        text = jitted.lower(weight_KxN, x_TxK, dy_TxN).compile().as_text() or ""
    found = find_collectives(text, {axis: int(size) for axis, size in mesh.shape.items()})
    reduced = [one for one in found if one.kind == "all-reduce" and {*one.axes} & {*STATE_AXES}]
    # An array of half the parameter or less is not the whole parameter that is reduced.
    return any(2 * math.prod(array) > math.prod(shape) for one in reduced for array in one.shapes)


@dataclass(frozen=True)
class StepWork:
    """Work of one device in one step."""

    flops: float
    hbm_bytes: float
    interconnect_bytes: float
    network_bytes: float


@dataclass(frozen=True)
class Roofline:
    """Seconds that each resource needs for a step."""

    compute: float
    memory: float
    interconnect: float
    network: float

    @property
    def step_seconds(self) -> float:
        """Least time of a step: that of the slowest resource."""
        return max(self.compute, self.memory, self.interconnect, self.network)

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: least step time first, and of equals the one with less time on all resources together."""
        return self.step_seconds, self.compute + self.memory + self.interconnect + self.network

    @property
    def bound(self) -> str:
        """Name of the slowest resource."""
        times = {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
            "network": self.network,
        }
        return max(times, key=lambda name: times[name])


def compute_roofline(work: StepWork, speeds: PeakRates, devices_per_chip: int) -> Roofline:
    """Return the roofline of one device, which is a part of a chip if the chip shows several devices."""
    # Peak figures are those of a whole chip.
    share = 1 / devices_per_chip
    return Roofline(
        work.flops / (speeds.flops_per_second * share),
        work.hbm_bytes / (speeds.hbm_bytes_per_second * share),
        work.interconnect_bytes / (speeds.interconnect_bytes_per_second * share),
        work.network_bytes / (speeds.network_bytes_per_second * share),
    )


def compute_hbm_traffic(state_bytes: float, parameter_bytes: float, passes: int, accumulate_steps: int) -> float:
    """Return the least bytes that one device moves through its HBM in a step, activations left out.

    The optimizer reads and writes the state once. Each pass over the model (forward, backward and recomputation) reads
    the parameters once in every micro-batch.
    """
    return 2 * state_bytes + accumulate_steps * passes * parameter_bytes


def split_over_domains(
    sizes: Mapping[str, int], over_domains: Mapping[str, int], axes: tuple[str, ...], sent_factor: float, payload: float
) -> tuple[float, float]:
    """Return the bytes that a device sends inside its domain (a slice, a GPU node) and out of it, for a collective.

    The collective runs in two stages, as good implementations do: inside each domain, and then across domains on the
    part that each device of a domain then holds. Its `payload` is the whole array of a group, and the factor 2 for an
    all-reduce, 1 for the other kinds.
    """
    group, across = 1, 1
    for axis in axes:
        group *= sizes[axis]
        across *= over_domains[axis]
    inside = group // across
    return (sent_factor * payload * (inside - 1) / inside, sent_factor * (payload / inside) * (across - 1) / across)


@dataclass(frozen=True)
class ScheduledStep:
    """Train step whose schedule and memory the compiler has planned, without machine code and estimates."""

    layout: BatchLayout
    text: str
    memory: ProgramMemory  # memory of the program without its code; temporaries are at most those of the statistics


@dataclass(frozen=True)
class CompiledProgram:
    """Compiled steps of a job on one machine."""

    train_setup: TrainSetup
    step: CompiledStep | ScheduledStep  # compiled or scheduled train step
    collectives: tuple[Collective, ...]
    compile_seconds: float
    val_compile_seconds: float | None  # compile time of the validation step, None if it was not compiled
    interconnect_bytes: float  # bytes that one device sends in a step over the fast interconnect
    network_bytes: float  # bytes that one device sends in a step between domains


def compile_program(
    setup_builder: TrainSetupBuilder,
    train_setup: TrainSetup,
    machine: TargetMachine,
    *,
    with_val: bool = True,
    micro_batch: int | None = None,
) -> CompiledProgram:
    """Compile the steps that the job would run. Allocates no parameter.

    Both steps are compiled in parallel, as a compiler uses few threads. The validation step is compiled for the
    micro-batch that the train step tries first, and again if that does not fit. On fake devices a step does not fit if
    its arguments and outputs alone do not: its temporaries are those of XLA for CPU, and say nothing about the chip.

    `micro_batch` is the only one to try, if the spec allows it. Raises InvalidError if the step does not fit in memory,
    with the numbers and a `StepTooLargeError` as its cause.
    """
    # The train step tries the largest micro-batch first.
    first = setup_builder.list_layouts(train_setup, micro_batch)[0]
    limit_bytes = int(machine.usable_bytes)

    def compile_val(layout: BatchLayout) -> float:
        """Compile the validation step for this split of the batch, and return the seconds that it took."""
        started = time.monotonic()
        train_setup.compile_val(setup_builder.recipe.val_step, train_setup.abstract_state.replace(opt_state=()), layout)
        return time.monotonic() - started

    def compile_train(layout: BatchLayout) -> CompiledStep:
        step = train_setup.compile_train(setup_builder.train_step, layout)
        if not machine.is_compiled_for_gpus:
            return step
        workspace = count_attention_workspace(step.text, machine.accelerator)
        return replace(step, memory=replace(step.memory, workspace=workspace))

    with ThreadPoolExecutor(1) as executor:
        val = executor.submit(compile_val, first) if with_val else None
        started = time.monotonic()
        limit = sys.maxsize if machine.is_faked else limit_bytes
        step = setup_builder.compile_by(compile_train, train_setup, limit, micro_batch)
        compile_seconds = time.monotonic() - started
        val_seconds = None if val is None else val.result()
    if with_val and step.layout != first:
        val_seconds = compile_val(step.layout)
    return _make_program(setup_builder, train_setup, step, machine, compile_seconds, val_seconds)


def _make_program(
    setup_builder: TrainSetupBuilder,
    train_setup: TrainSetup,
    step: CompiledStep | ScheduledStep,
    machine: TargetMachine,
    compile_seconds: float,
    val_seconds: float | None = None,
) -> CompiledProgram:
    resident_bytes, limit_bytes = 0, int(machine.usable_bytes)
    if machine.is_faked:
        # A fake device has no memory of a host, and counts what is offloaded to it among its own arguments.
        offloaded = count_bytes_per_device(train_setup.abstract_state, on_host=True)
        resident_bytes = step.memory.arguments + step.memory.outputs - offloaded
    if resident_bytes > limit_bytes:
        with setup_builder.document.errors_at("topology"):
            raise StepTooLargeError(
                f"state and batch alone need {format_amount(resident_bytes, 'bytes')} on each device and "
                f"{format_amount(limit_bytes, 'bytes')} are there; use more devices, or a larger fsdp or tensor axis",
                resident_bytes,
            )
    found = tuple(find_collectives(step.text, train_setup.mesh_sizes))
    interconnect, network = compute_sent_bytes(found, train_setup.mesh_sizes, machine)
    return CompiledProgram(train_setup, step, found, compile_seconds, val_seconds, interconnect, network)


def request_dumps(directory: Path) -> None:
    """Let XLA write the programs of train steps into a directory. Call it before the process compiles anything."""
    # XLA splits the flags at blanks, and takes a value in quotes whole, with a backslash before quotes and backslashes.
    quoted = str(directory).replace("\\", "\\\\").replace('"', '\\"')
    flags = f'--xla_dump_to="{quoted}" --xla_dump_hlo_module_re=jit_step'
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def schedule_program(
    setup_builder: TrainSetupBuilder, train_setup: TrainSetup, machine: TargetMachine, directory: Path
) -> CompiledProgram:
    """Compile the train step until its schedule and memory are planned; without dumps, to the end.

    XLA has no option to stop there, so the compilation goes on in a thread. Call this function in a process that ends
    afterwards, after `request_dumps` of the same directory. Raises as `compile_program` does.
    """

    def schedule(layout: BatchLayout) -> CompiledStep | ScheduledStep:
        earlier = set(directory.iterdir())
        # A pool of its own, because the compilation of a size that is too large may go on.
        compilation = ThreadPoolExecutor(1).submit(train_setup.compile_train, setup_builder.train_step, layout)
        while not compilation.done():
            for path in set(directory.iterdir()) - earlier:
                if not _SCHEDULED.search(path.name):
                    continue
                text = path.read_text()
                buffers = path.with_name(_SCHEDULED.sub(r"\1\2-buffer-assignment.txt", path.name))
                # The file is complete once the last computation, the entry, is closed.
                if text.partition("\nENTRY ")[2].endswith("}\n\n") and buffers.exists():
                    return ScheduledStep(layout, text, read_planned_memory(buffers.read_text()))
            time.sleep(_POLL_SECONDS)
        return compilation.result()

    started = time.monotonic()
    limit_bytes = sys.maxsize if machine.is_faked else int(machine.usable_bytes)
    step = setup_builder.compile_by(schedule, train_setup, limit_bytes)
    return _make_program(setup_builder, train_setup, step, machine, time.monotonic() - started)


def read_planned_memory(buffers: str) -> ProgramMemory:
    """Return the memory of a program from XLA's list of its buffers."""
    sums: Counter[str] = Counter()
    for size, kind in _ALLOCATION.findall(buffers):
        sums["output" if kind == "maybe-live-out:" else kind.split()[0]] += int(size)
    temporaries = int(_TEMPORARIES_IN_STATISTICS * sums["preallocated-temp:"])
    return ProgramMemory(sums["parameter"], sums["output"], temporaries, code=0)


def compute_sent_bytes(
    collectives: Iterable[Collective], sizes: Mapping[str, int], machine: TargetMachine
) -> tuple[float, float]:
    """Return the bytes that one device sends in a step over the fast interconnect, and between domains.

    libtpu compiles the program of one slice, in which collectives between slices are separate ops. Elsewhere one
    program spans all domains, and each collective is split by arithmetic.
    """
    # Devices of one machine, and the slice that libtpu compiles for, are one domain.
    num_domains = max(1, len(machine.devices) // machine.devices_per_domain) if machine.spans_domains else 1
    over_domains = dict(zip(AXES, split_axes_over_slices(dict(sizes), num_domains), strict=True))
    interconnect = network = 0.0
    for collective in collectives:
        if collective.is_between_slices:
            network += collective.count * collective.sent_bytes_per_device
        # A permutation is counted inside the domain, where most neighbours along an axis are.
        elif num_domains == 1 or collective.kind == "collective-permute":
            interconnect += collective.count * collective.sent_bytes_per_device
        else:
            axes, payload = collective.axes, collective.bytes
            inside, across = split_over_domains(sizes, over_domains, axes, collective.rounds, payload)
            interconnect += collective.count * inside
            network += collective.count * across
    return interconnect, network


def count_bytes_per_device(tree: Any, *, on_host: bool = False) -> int:
    """Return the bytes that one device holds of abstract arrays with shardings, or its host for it."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if is_on_host(leaf) != on_host:
            continue
        # An array without a sharding is replicated.
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
    return total


def count_bytes(tree: Any) -> int:
    """Return the bytes of abstract arrays, without replication."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_elements(tree: Any) -> int:
    """Return the number of elements of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
