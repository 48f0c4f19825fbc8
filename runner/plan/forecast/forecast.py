"""The forecast of a program: its time as a range, where it goes, and what is alive meanwhile.

Which part of a step an op belongs to, from what it does and from the calls that led to it.

Asked in this order: the optimizer, whatever it does; kernels; what only saves or reads a slice of a stack; what only
moves values to another layout; matmuls; the loss; and what is left.

The schedule as Chrome's trace format, which Perfetto opens: a lane of ops, and one for each kind of transfer.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypedDict

from runner.plan.forecast.cost import (
    FREE,
    DeviceRates,
    OpCost,
    compute_cost,
    find_matmuls,
    has_estimates,
    is_attention_kernel,
    is_kernel,
)
from runner.plan.forecast.hlo import parse_op_name
from runner.plan.forecast.memory import LiveMemory, compute_live_memory
from runner.plan.forecast.module import HloModule, Op, load_module
from runner.plan.forecast.schedule import (
    COPIES,
    OpKey,
    ScheduledOp,
    Timing,
    Transfer,
    Transfers,
    build_schedule,
    find_transfers,
    simulate_schedule,
)
from runner.plan.forecast.sources import StackFrame, find_source_line, parse_sources

MATMULS, ATTENTION, ELEMENTWISE = "matmuls", "attention", "elementwise and reductions"
ACTIVATIONS, LAYOUT, GATHERS = "saving and reading slices", "layout changes", "gathers and scatters"
LOSS, OPTIMIZER, KERNELS = "loss", "optimizer", "other kernels"
PARTS = (MATMULS, ATTENTION, ELEMENTWISE, ACTIVATIONS, LAYOUT, GATHERS, LOSS, OPTIMIZER, KERNELS)

_MOVES = {"copy", "transpose", "reshape", "slice", "pad", "concatenate", "convert", "broadcast", "reverse", *FREE}
_SLICES = {"dynamic-slice", "dynamic-update-slice"}
_CHANGES = {"copy", "transpose", "reshape", "concatenate", "pad", "reverse"}
_OF_OPTIMIZER = re.compile(r"/optax/(?!losses)|/runner/optim/")
_LOSS_FILE = re.compile(r"/train/loss\.py$|/optax/losses/")
_LOSS_NAME = re.compile(r"loss|cross_entropy|log_softmax", re.IGNORECASE)
_LOSS_OPS = re.compile(r"log_softmax|logsumexp|cross_entropy")
_ATTENTION = re.compile(r"attention|attend", re.IGNORECASE)
_MATMUL_KERNEL = re.compile(r"ragged|gmm|matmul|gemm|grouped", re.IGNORECASE)


def classify_op(module: HloModule, op: Op, calls: tuple[StackFrame, ...]) -> str:
    """The part of a step that an op's time belongs to. `calls` led to it, innermost first."""
    if any(_OF_OPTIMIZER.search(frame.file) for frame in calls):
        return OPTIMIZER
    if is_kernel(op):
        if is_attention_kernel(op):
            return ATTENTION
        return MATMULS if _MATMUL_KERNEL.search(op.name) else KERNELS
    opcodes = set(_opcodes(module, op))
    own = [frame for frame in calls if not frame.is_installed]
    matmuls = find_matmuls(module, op)
    if not matmuls and opcodes & _SLICES and opcodes <= _MOVES | _SLICES:
        return ACTIVATIONS
    if not matmuls and "dynamic-update-slice" in _results(module, op):
        return ACTIVATIONS
    if opcodes & _CHANGES and opcodes <= _MOVES:
        return LAYOUT
    if matmuls:
        is_batched = any(matmul.batch > 1 for matmul in matmuls)
        return ATTENTION if is_batched and any(_ATTENTION.search(frame.function) for frame in own) else MATMULS
    if any(_LOSS_FILE.search(frame.file) for frame in calls) or (own and _LOSS_NAME.search(own[0].function)):
        return LOSS
    if opcodes & {"gather", "scatter"}:
        return GATHERS
    if _LOSS_OPS.search(op.rest):
        return LOSS
    return ATTENTION if own and _ATTENTION.search(own[0].function) else ELEMENTWISE


def _opcodes(module: HloModule, op: Op) -> list[str]:
    inner = module.fused(op)
    if not inner:
        return [op.opcode]
    return [opcode for part in module.computations.get(inner, {}).values() for opcode in _opcodes(module, part)]


def _results(module: HloModule, op: Op) -> list[str]:
    """The opcodes that make the results of an op, seen through names."""
    inner = module.fused(op)
    value: Op | None = module.root(inner) if inner else op
    if value is not None and value.opcode == "tuple":
        return [opcode for part in module.operands(value) if part for opcode in _results_of(module, part)]
    return _results_of(module, value) if value is not None else []


def _results_of(module: HloModule, value: Op) -> list[str]:
    if value.opcode in ("bitcast", "reshape") and (before := module.operand(value, 0)) is not None:
        return _results_of(module, before)
    return _results(module, value) if value.opcode == "fusion" else [value.opcode]


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
    alive: LiveMemory
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


def compute_forecast(text: str, mesh_sizes: Mapping[str, int], rates: DeviceRates) -> Forecast:
    """The forecast of a compiled program, from its scheduled text. `mesh_sizes` is axis -> size, in mesh order.

    Raises `ValueError` for replica groups of an unknown form, or of devices that the mesh does not have.
    """
    module = load_module(text)
    transfers = find_transfers(module, mesh_sizes, rates.hbm_bytes_per_second, rates.collective_seconds)
    costs: dict[OpKey, OpCost | None] = {}

    def cost(op: Op) -> OpCost | None:
        found = costs[op.computation, op.name] = compute_cost(module, op, rates)
        return found

    steps = build_schedule(module, transfers, cost)
    low, high = simulate_schedule(steps, "low"), simulate_schedule(steps, "high", is_drawn=True)
    ops = _op_times(module, transfers, costs, low, high)
    bases = Counter(op.basis for op in ops)
    return Forecast(
        low.seconds,
        high.seconds,
        ops,
        high,
        compute_live_memory(module),
        has_estimates(module) and rates.clock_hertz is not None,
        bases["unknown"],
        _num_endless(module, steps),
        sum(one.runs * own.flops for key, one in high.spent.items() if (own := costs.get(key)) is not None),
    )


def _num_endless(module: HloModule, steps: tuple[ScheduledOp, ...]) -> int:
    return sum(
        (step.kind == "loop" and module.trips.get(step.op.name) is None)
        + sum(_num_endless(module, inside) for inside in step.inside)
        for step in steps
    )


def _op_times(
    module: HloModule, transfers: Transfers, costs: Mapping[OpKey, OpCost | None], low: Timing, high: Timing
) -> tuple[OpTime, ...]:
    sources = parse_sources(module.text)
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
                parse_op_name(named.rest),
                _part(module, op, transfer, calls),
                find_source_line(calls, _LIBRARY),
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


def _named(module: HloModule, op: Op) -> Op:
    """The op itself, or of a fusion whose origin the compiler has lost the op inside that tells it best."""
    inner = module.fused(op)
    if not inner or parse_op_name(op.rest):
        return op
    parts = [_named(module, part) for part in module.computations[inner].values()]
    parts = [part for part in parts if parse_op_name(part.rest)]
    return next((part for part in parts if find_matmuls(module, part)), parts[-1] if parts else op)


def _part(module: HloModule, op: Op, transfer: Transfer | None, calls: tuple[StackFrame, ...]) -> str:
    if transfer is None:
        return classify_op(module, op, calls)
    return WAITING if transfer.lane == COPIES else transfer.kind


def _basis(transfer: Transfer | None, cost: OpCost | None) -> str:
    if transfer is not None:
        return "copy" if transfer.lane == COPIES else "links"
    return cost.basis if cost is not None else "roofline"


_PROCESS = 1


class TraceEvent(TypedDict, total=False):
    """One event; times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    cat: str
    args: dict[str, str | float]


def build_trace(found: Forecast, name: str) -> dict[str, list[TraceEvent] | str]:
    """The step by the compiler's estimates, as the content of a JSON file. Memory is a counter, in bytes."""
    ops = {op.name: op for op in found.ops}
    lanes = ["compute", "waiting", *sorted({one.lane for one in found.timing.drawn} - {"compute", "waiting"})]
    events: list[TraceEvent] = [{"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": name}}]
    for number, lane in enumerate(lanes):
        about: list[TraceEvent] = [
            {"name": "thread_name", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"name": lane}},
            {"name": "thread_sort_index", "ph": "M", "pid": _PROCESS, "tid": number, "args": {"sort_index": number}},
        ]
        events += about
    memory = -1
    for one in found.timing.drawn:
        op = ops.get(one.name)
        args: dict[str, str | float] = {}
        if op is not None:
            args = {"operation": op.op_name, "line": op.line, "shape": op.shape[:200], "runs": op.runs}
        event: TraceEvent = {
            "name": one.name,
            "ph": "X",
            "pid": _PROCESS,
            "tid": lanes.index(one.lane),
            "ts": one.start * 1e6,
            "dur": one.seconds * 1e6,
            "cat": op.part if op is not None else one.lane,
            "args": args,
        }
        events.append(event)
        held = get_live_bytes(found, one.stack, one.turns)
        if one.lane == "compute" and held != memory:
            memory = held
            events.append(
                {
                    "name": "temporaries",
                    "ph": "C",
                    "pid": _PROCESS,
                    "ts": one.start * 1e6,
                    "args": {"bytes": float(memory)},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def get_live_bytes(found: Forecast, stack: tuple[tuple[str, str], ...], turns: int) -> int:
    """Bytes of temporaries alive while these ops run; of several turns of a loop, the most."""
    more = found.alive.inside.get(stack[-1], 0) if turns > 1 and stack else 0
    return found.alive.bytes_at(stack) + more
