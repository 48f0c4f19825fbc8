"""Compiled steps of a job: memory, collectives, compile time; roofline of a step by the chip's peak figures.

A step cannot be faster than its matmuls at peak FLOP/s, its memory traffic at HBM bandwidth, or its collectives at the
bandwidth of their network. If all of these overlap, it is as fast as the slowest of them.
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

# Speeds of one host, assumed and not measured: writing to a bucket or a shared disk, and copying out of its devices.
DURABLE_BYTES_PER_SECOND = 1e9
STALL_BYTES_PER_SECOND = 10e9

# Share of the best speed that a tuned step is assumed to reach where a time is promised and not only bounded.
TYPICAL_SHARE = 0.5


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

    The optimizer reads and writes the state once. Each pass over the model reads the parameters once in every
    micro-batch.

    Args:
        state_bytes: state on the device.
        parameter_bytes: parameters as a matmul reads them.
        passes: forward, backward and recomputation.
        accumulate_steps: micro-batches of a step.
    """
    return 2 * state_bytes + accumulate_steps * passes * parameter_bytes


def split_over_domains(
    sizes: Mapping[str, int], over_domains: Mapping[str, int], axes: tuple[str, ...], sent_factor: float, payload: float
) -> tuple[float, float]:
    """Return the bytes that a device sends inside its domain (a slice, a GPU node) and out of it, for a collective.

    The collective runs in two stages, as good implementations do: inside each domain, and then across domains on the
    part that each device of a domain then holds.

    Args:
        sizes: axis -> size of the mesh.
        over_domains: axis -> number of domains along it.
        axes: axes of the collective.
        sent_factor: 2 for an all-reduce, 1 for the other kinds.
        payload: bytes of the whole array of a group.
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
    """Compiled steps of a job on one machine.

    Attributes:
        train_setup: abstract state and shardings.
        step: compiled train step.
        collectives: collectives of the train step.
        compile_seconds: compile time of the train step.
        val_compile_seconds: compile time of the validation step, None if it was not compiled.
        interconnect_bytes: bytes that one device sends in a step over the fast interconnect.
        network_bytes: bytes that one device sends in a step between domains.
    """

    train_setup: TrainSetup
    step: CompiledStep
    collectives: tuple[Collective, ...]
    compile_seconds: float
    val_compile_seconds: float | None
    interconnect_bytes: float
    network_bytes: float


def compile_program(
    setup_builder: TrainSetupBuilder, train_setup: TrainSetup, machine: TargetMachine, *, with_val: bool = True
) -> CompiledProgram:
    """Compile the steps that the job would run. Allocates no parameter.

    Both steps are compiled in parallel, as a compiler uses few threads. The validation step is compiled for the
    micro-batch that the train step tries first, and again if that does not fit.

    Raises:
        InvalidError: the step does not fit in memory, with the numbers.
    """
    # The train step tries the largest micro-batch first.
    first = setup_builder.get_largest_layout(train_setup)

    def compile_val(layout: BatchLayout) -> float:
        """Compile the validation step for this split of the batch, and return the seconds that it took."""
        started = time.monotonic()
        train_setup.compile_val(setup_builder.val_step, train_setup.abstract_state.replace(opt_state=()), layout)
        return time.monotonic() - started

    with ThreadPoolExecutor(1) as executor:
        val = executor.submit(compile_val, first) if with_val else None
        started = time.monotonic()
        step = setup_builder.compile(train_setup, int(machine.hbm_bytes * MEMORY_SHARE))
        compile_seconds = time.monotonic() - started
        val_seconds = None if val is None else val.result()
    if with_val and step.layout != first:
        val_seconds = compile_val(step.layout)
    found = tuple(find_collectives(step.text, train_setup.mesh_sizes))
    interconnect, network = compute_sent_bytes(found, train_setup.mesh_sizes, machine)
    return CompiledProgram(train_setup, step, found, compile_seconds, val_seconds, interconnect, network)


def compute_sent_bytes(
    collectives: Iterable[Collective], sizes: Mapping[str, int], machine: TargetMachine
) -> tuple[float, float]:
    """Return the bytes that one device sends in a step over the fast interconnect, and between domains.

    libtpu compiles the program of one slice, in which collectives between slices are separate ops. Elsewhere one
    program spans all domains, and each collective is split by arithmetic.
    """
    # Devices of one machine, and the slice that libtpu compiles for, are one domain.
    num_domains = max(1, len(machine.devices) // machine.devices_per_domain) if machine.is_faked else 1
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


def count_bytes_per_device(tree: Any) -> int:
    """Return the bytes that one device holds of abstract arrays with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
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
