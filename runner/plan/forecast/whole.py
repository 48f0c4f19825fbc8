"""The forecast of a program: its time as a range, where it goes, and what is alive meanwhile."""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

from runner.plan.forecast.cost import Cost, Rates, cost_of, has_estimates
from runner.plan.forecast.live import Alive, alive_in
from runner.plan.forecast.matmul import matmuls_in
from runner.plan.forecast.module import Module, Op, load
from runner.plan.forecast.part import part_of
from runner.plan.forecast.schedule import Key, Step, Timing, schedule, time_of
from runner.plan.forecast.transfer import COPIES, Transfer, Transfers, transfers_in
from runner.plan.hlo.source import Frame, line_of, sources_in
from runner.plan.hlo.text import op_name_of

WAITING = "waiting for copies"
_LIBRARY = "runner"


@dataclass(frozen=True)
class OpTime:
    """The time of one op over all its runs in a step, in seconds.

    Attributes:
        part: of the step; a collective's is its kind and axes.
        line: `file:line` of the experiment's own source, or the nearest to it.
        low: at its roofline; of a transfer, what is exposed while all other ops are at theirs.
        high: as the compiler estimates it; of a transfer, what is exposed then.
        transfer: of a transfer, its whole time, exposed and hidden.
        alike: how many ops this is the sum of (`Forecast.sums_of_alike`).
    """

    name: str
    opcode: str
    shape: str
    op_name: str
    part: str
    line: str
    runs: float
    low: float
    high: float
    transfer: float = 0.0
    basis: str = "estimate"
    alike: int = 1


@dataclass(frozen=True)
class Forecast:
    """What a step will take.

    Attributes:
        low: seconds if each op is as fast as its roofline.
        high: seconds by the compiler's estimates.
        ops: with time, the dearest first.
        has_estimates: whether the compiler has written any, and the clock that they count is known.
        num_unknown: kernels of which nothing but their arrays is known.
        num_endless: loops that count once, since their trips are not known.
        flops: of all matmuls and kernels that a device runs, what is computed again included.
    """

    low: float
    high: float
    ops: tuple[OpTime, ...]
    timing: Timing
    alive: Alive
    has_estimates: bool
    num_unknown: int
    num_endless: int
    flops: float

    def by_part(self) -> dict[str, tuple[float, float]]:
        """Seconds of each part, low and high; the dearest first."""
        return self._sums([(op.part, op) for op in self.ops])

    def by_line(self) -> dict[str, tuple[float, float]]:
        """Seconds of each line of source, low and high; the dearest first."""
        return self._sums([(op.line or "no line", op) for op in self.ops])

    def sums_of_alike(self) -> tuple[OpTime, ...]:
        """The ops, and of those that do the same, as each of the layers in line does, one sum; the dearest first."""
        alike: dict[tuple[str, ...], list[OpTime]] = defaultdict(list)
        for op in self.ops:
            sizes = re.sub(r"\{[^{}]*\}", "", op.shape)  # but not where the compiler has laid it
            alike[op.opcode, sizes, op.op_name, op.part, op.line, op.basis].append(op)
        sums = [
            replace(
                ops[0],
                runs=sum(op.runs for op in ops),
                low=sum(op.low for op in ops),
                high=sum(op.high for op in ops),
                transfer=sum(op.transfer for op in ops),
                alike=len(ops),
            )
            for ops in alike.values()
        ]
        return tuple(sorted(sums, key=_dearest))

    def collectives(self) -> dict[str, tuple[float, float]]:
        """Seconds of each kind of collective over its axes: exposed and hidden, by the compiler's estimates."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for op in self.ops:
            if op.basis == "links":
                sums[op.part][0] += op.high
                sums[op.part][1] += max(0.0, op.transfer - op.high)
        return {part: (exposed, hidden) for part, (exposed, hidden) in sums.items()}

    @staticmethod
    def _sums(named: list[tuple[str, OpTime]]) -> dict[str, tuple[float, float]]:
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name, op in named:
            sums[name][0] += op.low
            sums[name][1] += op.high
        return {name: (low, high) for name, (low, high) in sorted(sums.items(), key=lambda item: -item[1][1])}


def forecast(text: str, mesh_sizes: Mapping[str, int], rates: Rates) -> Forecast:
    """The forecast of a compiled program, from its scheduled text. `mesh_sizes` is axis -> size, in mesh order.

    Raises `ValueError` for replica groups of an unknown form, or of devices that the mesh does not have.
    """
    module = load(text)
    transfers = transfers_in(module, mesh_sizes, rates.hbm_bytes_per_second, rates.collective_seconds)
    costs: dict[Key, Cost | None] = {}

    def cost(op: Op) -> Cost | None:
        found = costs[op.computation, op.name] = cost_of(module, op, rates)
        return found

    steps = schedule(module, transfers, cost)
    low, high = time_of(steps, "low"), time_of(steps, "high", is_drawn=True)
    ops = _op_times(module, transfers, costs, low, high)
    bases = Counter(op.basis for op in ops)
    return Forecast(
        low.seconds,
        high.seconds,
        ops,
        high,
        alive_in(module),
        has_estimates(module) and rates.clock_hertz is not None,
        bases["unknown"],
        _num_endless(module, steps),
        sum(one.runs * own.flops for key, one in high.spent.items() if (own := costs.get(key)) is not None),
    )


def _num_endless(module: Module, steps: tuple[Step, ...]) -> int:
    return sum(
        (step.kind == "loop" and module.trips.get(step.op.name) is None)
        + sum(_num_endless(module, inside) for inside in step.inside)
        for step in steps
    )


def _op_times(
    module: Module, transfers: Transfers, costs: Mapping[Key, Cost | None], low: Timing, high: Timing
) -> tuple[OpTime, ...]:
    sources = sources_in(module.text)
    found = []
    for key in low.spent.keys() | high.spent.keys():
        op = module.computations[key[0]][key[1]]
        named = _named(module, op)
        calls = sources.calls(named.rest)
        transfer = transfers.at_once.get(key) or transfers.starts.get(key)
        cost = costs.get(key)
        first, second = low.spent.get(key), high.spent.get(key)
        one = second or first
        assert one is not None, "one of the two has it"
        found.append(
            OpTime(
                op.name,
                op.opcode,
                op.shape,
                op_name_of(named.rest),
                _part(module, op, transfer, calls),
                line_of(calls, _LIBRARY),
                one.runs,
                first.busy + first.exposed if first else 0.0,
                second.busy + second.exposed if second else 0.0,
                one.transfer,
                _basis(transfer, cost),
            )
        )
    return tuple(sorted(found, key=_dearest))


def _dearest(op: OpTime) -> tuple[float, float, str]:
    return -op.high, -op.low, op.name


def _named(module: Module, op: Op) -> Op:
    """The op itself, or of a fusion whose origin the compiler has lost the op inside that tells it best."""
    inner = module.fused(op)
    if not inner or op_name_of(op.rest):
        return op
    parts = [_named(module, part) for part in module.computations[inner].values()]
    parts = [part for part in parts if op_name_of(part.rest)]
    return next((part for part in parts if matmuls_in(module, part)), parts[-1] if parts else op)


def _part(module: Module, op: Op, transfer: Transfer | None, calls: tuple[Frame, ...]) -> str:
    if transfer is None:
        return part_of(module, op, calls)
    return WAITING if transfer.lane == COPIES else transfer.kind


def _basis(transfer: Transfer | None, cost: Cost | None) -> str:
    if transfer is not None:
        return "copy" if transfer.lane == COPIES else "links"
    return cost.basis if cost is not None else "roofline"
