"""What a job's compiled steps say of themselves: memory, collectives, how long the compiler took.

Arithmetic on the chips' peak figures: the least time of a step, and what a save takes. Pure; imports no jax.

A roofline: a step cannot be faster than its matmuls at peak FLOP/s, its memory traffic at HBM bandwidth, or its
collectives at the bandwidth of their network, and it is as fast as the slowest of these if all overlap.
"""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from runner.accelerator import PeakRates
from runner.parallel.mesh import AXES, split_axes_over_slices
from runner.plan.forecast.collectives import Collective, find_collectives
from runner.plan.machine import TargetMachine
from runner.train.batch_layout import BatchLayout
from runner.train.compile import MEMORY_SHARE, CompiledStep
from runner.train.setup import TrainSetup, TrainSetupBuilder

# What a host writes to a bucket or a shared disk, and what it copies out of its devices: assumed, not measured.
DURABLE_BYTES_PER_SECOND = 1e9
STALL_BYTES_PER_SECOND = 10e9

# The share of peak that a tuned step is taken to reach where a time is promised rather than bounded.
TYPICAL_SHARE = 0.5


@dataclass(frozen=True)
class StepWork:
    """What one device does in one step."""

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
        """The least time of a step: that of the slowest resource."""
        return max(self.compute, self.memory, self.interconnect, self.network)

    @property
    def rank(self) -> tuple[float, float]:
        """The least first: by the time of a step; of equals the one with less of everything else."""
        return self.step_seconds, self.compute + self.memory + self.interconnect + self.network

    @property
    def bound(self) -> str:
        """The slowest resource."""
        times = {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
            "network": self.network,
        }
        return max(times, key=lambda name: times[name])


def compute_roofline(work: StepWork, speeds: PeakRates, devices_per_chip: int) -> Roofline:
    """The times of `work` on one device, which is a part of a chip if that shows several."""
    share = 1 / devices_per_chip
    return Roofline(
        work.flops / (speeds.flops_per_second * share),
        work.hbm_bytes / (speeds.hbm_bytes_per_second * share),
        work.interconnect_bytes / (speeds.interconnect_bytes_per_second * share),
        work.network_bytes / (speeds.network_bytes_per_second * share),
    )


def compute_hbm_traffic(state_bytes: float, parameter_bytes: float, passes: int, accumulate_steps: int) -> float:
    """Bytes that one device moves through its memory in a step, at least.

    The optimizer reads and writes the state once; each of `passes` passes over the model (forward, backward, what is
    computed again) reads the parameters once in every micro-batch. Activations are left out.
    """
    return 2 * state_bytes + accumulate_steps * passes * parameter_bytes


def split_over_domains(
    sizes: Mapping[str, int], over_domains: Mapping[str, int], axes: tuple[str, ...], sent_factor: float, payload: float
) -> tuple[float, float]:
    """Bytes that a device sends inside its domain (a slice, a GPU node) and out of it, for a collective over `axes`.

    Done in two stages, as every good implementation does: inside each domain, and then across on what each device of a
    domain then holds. `sent_factor` is 2 for an all-reduce, 1 for the others; `payload` is the whole array of a group.
    """
    group, across = 1, 1
    for axis in axes:
        group *= sizes[axis]
        across *= over_domains[axis]
    inside = group // across
    return (
        sent_factor * payload * (inside - 1) / inside,
        sent_factor * (payload / inside) * (across - 1) / across,
    )


@dataclass(frozen=True)
class CompiledProgram:
    """The compiled steps of a job on one machine."""

    train_setup: TrainSetup
    step: CompiledStep
    collectives: tuple[Collective, ...]
    compile_seconds: float
    val_compile_seconds: float | None
    interconnect_bytes: float  # sent by one device in a step
    network_bytes: float


def compile_program(
    setup_builder: TrainSetupBuilder, train_setup: TrainSetup, machine: TargetMachine, *, with_val: bool = True
) -> CompiledProgram:
    """Compile what the job would run, as its blueprint lies on the machine. Allocates no parameter.

    Both steps side by side, as a compiler has few threads of its own: the validation step for the micro-batch that the
    train step tries first, and again if that does not fit. Raises `InvalidError` with the numbers if it does not fit.
    """
    first = setup_builder.largest_layout(train_setup)
    with ThreadPoolExecutor(1) as beside:
        val = beside.submit(_seconds_of_val, setup_builder, train_setup, first) if with_val else None
        started = time.monotonic()
        step = setup_builder.compile(train_setup, int(machine.hbm_bytes * MEMORY_SHARE))
        compile_seconds = time.monotonic() - started
        val_seconds = None if val is None else val.result()
    if with_val and step.layout != first:
        val_seconds = _seconds_of_val(setup_builder, train_setup, step.layout)
    found = tuple(find_collectives(step.text, train_setup.mesh_sizes))
    interconnect, network = compute_sent_bytes(found, train_setup.mesh_sizes, machine)
    return CompiledProgram(train_setup, step, found, compile_seconds, val_seconds, interconnect, network)


def _seconds_of_val(setup_builder: TrainSetupBuilder, train_setup: TrainSetup, layout: BatchLayout) -> float:
    """How long the validation step takes to compile for this split of the batch."""
    started = time.monotonic()
    train_setup.compile_val(setup_builder.val_step, train_setup.abstract_state.replace(opt_state=()), layout)
    return time.monotonic() - started


def compute_sent_bytes(
    found: Iterable[Collective], sizes: Mapping[str, int], machine: TargetMachine
) -> tuple[float, float]:
    """Bytes that one device sends in a step over the fast interconnect, and over the network between domains.

    libtpu compiles the program of one slice, in which collectives between slices stand apart. Elsewhere one program
    spans all domains, and each collective is split by arithmetic.
    """
    num_domains = max(1, len(machine.devices) // machine.devices_per_domain) if machine.is_faked else 1
    over_domains = dict(zip(AXES, split_axes_over_slices(dict(sizes), num_domains), strict=True))
    interconnect = network = 0.0
    for collective in found:
        if collective.is_between_slices:
            network += collective.count * collective.sent_bytes_per_device
        elif num_domains == 1 or collective.kind == "collective-permute":
            interconnect += collective.count * collective.sent_bytes_per_device
        else:
            axes, payload = collective.axes, collective.bytes
            inside, across = split_over_domains(sizes, over_domains, axes, collective.rounds, payload)
            interconnect += collective.count * inside
            network += collective.count * across
    return interconnect, network


def count_bytes_per_device(tree: Any) -> int:
    """Bytes of the part that one device holds of abstract arrays with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
    return total


def count_bytes(tree: Any) -> int:
    """Bytes of abstract arrays, once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def count_elements(tree: Any) -> int:
    """Elements of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
