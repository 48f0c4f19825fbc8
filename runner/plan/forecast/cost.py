"""The time of one run of an op: at its roofline, and by the compiler's estimate."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from runner.plan.forecast.kernel import is_kernel, kernel_cost
from runner.plan.forecast.matmul import matmuls_in
from runner.plan.forecast.module import Module, Op
from runner.plan.forecast.movement import FREE, NO_WORK, moved_bytes
from runner.plan.hlo.collective import Collective

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class Rates:
    """What one device can do.

    Attributes:
        flops_per_second: of its matrix units, together.
        hbm_bytes_per_second: of its main memory.
        collective_seconds: the time of one run of a collective on its links.
        clock_hertz: what turns cycles into seconds; None where it is not known.
        matrix_unit_width: sizes of matmuls are filled up to it; 1 where that is not known.
    """

    flops_per_second: float
    hbm_bytes_per_second: float
    collective_seconds: Callable[[Collective], float]
    clock_hertz: float | None = None
    matrix_unit_width: int = 1


@dataclass(frozen=True)
class Cost:
    """Seconds of one run, `low` at the roofline and `high` as estimated.

    Attributes:
        basis: `estimate`, `stated` by a kernel, `shapes` of an attention kernel, `roofline` where nothing else is
            known, or `unknown`, of a kernel that nothing but its arrays is known of.
        flops: of its matmuls, without what fills matrix units.
    """

    low: float
    high: float
    basis: str
    flops: int
    moved_bytes: int


def cost_of(module: Module, op: Op, rates: Rates) -> Cost | None:
    """What one run of an op costs by itself; None for what costs nothing."""
    target = _TARGET.search(op.rest) if op.opcode == "custom-call" else None
    if op.opcode in FREE or op.opcode.endswith(("-done", "-update")) or (target and target[1] in NO_WORK):
        return None
    moved = moved_bytes(module, op)
    if is_kernel(op):
        kernel = kernel_cost(module, op, rates.matrix_unit_width)
        if kernel is None:
            seconds = moved / rates.hbm_bytes_per_second
            return Cost(seconds, seconds, "unknown", 0, moved)
        moved = moved if kernel.moved_bytes is None else min(moved, kernel.moved_bytes)
        seconds = max(kernel.filled_flops / rates.flops_per_second, moved / rates.hbm_bytes_per_second)
        return Cost(seconds, seconds, "shapes" if kernel.moved_bytes is None else "stated", kernel.flops, moved)
    matmuls = matmuls_in(module, op)
    filled = sum(matmul.filled_flops(rates.matrix_unit_width) for matmul in matmuls)
    low = max(filled / rates.flops_per_second, moved / rates.hbm_bytes_per_second)
    flops = sum(matmul.flops for matmul in matmuls)
    cycles = _CYCLES.search(op.rest)
    if cycles is None or rates.clock_hertz is None:
        return Cost(low, low, "roofline", flops, moved)
    return Cost(low, int(cycles[1]) / rates.clock_hertz, "estimate", flops, moved)


def has_estimates(module: Module) -> bool:
    """Whether the compiler has written cycles beside its ops."""
    return _CYCLES.search(module.text) is not None
