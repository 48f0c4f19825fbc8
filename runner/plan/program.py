"""What a job's compiled steps say of themselves: memory, collectives, how long the compiler took."""

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from runner.plan.estimate import split_over_domains
from runner.plan.hlo.collective import Collective, collectives
from runner.plan.machine import Machine
from runner.train.batch_layout import BatchLayout
from runner.train.blueprint import Blueprint
from runner.train.compilation import MEMORY_SHARE, CompiledStep
from runner.train.design import Design
from runner.train.mesh import AXES, over_slices


@dataclass(frozen=True)
class Program:
    """The compiled steps of a job on one machine."""

    blueprint: Blueprint
    step: CompiledStep
    collectives: tuple[Collective, ...]
    compile_seconds: float
    val_compile_seconds: float | None
    interconnect_bytes: float  # sent by one device in a step
    network_bytes: float


def compile_design(design: Design, blueprint: Blueprint, machine: Machine, *, with_val: bool = True) -> Program:
    """Compile what the job would run, as its blueprint lies on the machine. Allocates no parameter.

    Both steps side by side, as a compiler has few threads of its own: the validation step for the micro-batch that the
    train step tries first, and again if that does not fit. Raises `InvalidError` with the numbers if it does not fit.
    """
    first = design.first_layout(blueprint)
    with ThreadPoolExecutor(1) as beside:
        val = beside.submit(_seconds_of_val, design, blueprint, first) if with_val else None
        started = time.monotonic()
        step = design.compile(blueprint, int(machine.hbm_bytes * MEMORY_SHARE))
        compile_seconds = time.monotonic() - started
        val_seconds = None if val is None else val.result()
    if with_val and step.layout != first:
        val_seconds = _seconds_of_val(design, blueprint, step.layout)
    found = tuple(collectives(step.text, blueprint.mesh_sizes))
    interconnect, network = sent_bytes(found, blueprint.mesh_sizes, machine)
    return Program(blueprint, step, found, compile_seconds, val_seconds, interconnect, network)


def _seconds_of_val(design: Design, blueprint: Blueprint, layout: BatchLayout) -> float:
    """How long the validation step takes to compile for this split of the batch."""
    started = time.monotonic()
    blueprint.compile_val(design.val_step, blueprint.abstract_state.replace(opt_state=()), layout)
    return time.monotonic() - started


def sent_bytes(found: Iterable[Collective], sizes: Mapping[str, int], machine: Machine) -> tuple[float, float]:
    """Bytes that one device sends in a step over the fast interconnect, and over the network between domains.

    libtpu compiles the program of one slice, in which collectives between slices stand apart. Elsewhere one program
    spans all domains, and each collective is split by arithmetic.
    """
    num_domains = max(1, len(machine.devices) // machine.devices_per_domain) if machine.is_faked else 1
    over_domains = dict(zip(AXES, over_slices(dict(sizes), num_domains), strict=True))
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


def bytes_on_a_device(tree: Any) -> int:
    """Bytes of the part that one device holds of abstract arrays with shardings."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        total += jax.ShapeDtypeStruct(shape, leaf.dtype).size * leaf.dtype.itemsize
    return total


def bytes_of(tree: Any) -> int:
    """Bytes of abstract arrays, once."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def num_elements(tree: Any) -> int:
    """Elements of abstract arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
