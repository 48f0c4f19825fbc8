"""Forecast of a program: range of its step time, breakdown of the time, and live memory over the step.

Each op belongs to one part of the step. `_classify_op` decides by the operation of the op and the calls that led to it,
in this order: everything called by the optimizer; kernels; ops that only save or read a slice of a stack; ops that only
change a layout; matmuls; the loss; and the rest.

Live memory are the buffers (temporaries) in a device's HBM at each op of the schedule, and their peak. A result is
alive from the op that makes it to the last op that uses it. The state of a loop has one buffer, and so has an array
that is updated in place. The result of an elementwise op reuses the buffer of an operand of the same shape that is no
longer needed. Arguments, results of the whole program and constants are not temporaries. How a compiler packs buffers,
and what it reserves beside them, is not modelled; compare with the compiler's own figure.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypedDict

from runner.plan.forecast.cost import (
    FREE_OPCODES,
    DeviceRates,
    OpCost,
    compute_cost,
    find_matmuls,
    has_estimates,
    is_attention_kernel,
    is_kernel,
)
from runner.plan.forecast.hlo import Instruction, get_output_shape, parse_op_name
from runner.plan.forecast.module import (
    ArrayShape,
    HloModule,
    Op,
    StackFrame,
    find_source_line,
    load_module,
    parse_arrays,
    parse_sources,
)
from runner.plan.forecast.schedule import (
    COPIES,
    OpKey,
    ScheduledOp,
    Timing,
    build_schedule,
    find_transfers,
    simulate_schedule,
)

MATMULS, ATTENTION, ELEMENTWISE = "matmuls", "attention", "elementwise and reductions"
_ACTIVATIONS, LAYOUT, _GATHERS = "saving and reading slices", "layout changes", "gathers and scatters"
LOSS, OPTIMIZER, KERNELS = "loss", "optimizer", "other kernels"
WAITING = "waiting for copies"

_MOVING_OPCODES = {"copy", "transpose", "reshape", "slice", "pad", "concatenate", "convert", "broadcast", "reverse"}
_MOVING_OPCODES |= FREE_OPCODES
_SLICE_OPCODES = {"dynamic-slice", "dynamic-update-slice"}
_LAYOUT_OPCODES = {"copy", "transpose", "reshape", "concatenate", "pad", "reverse"}

# Ops are attributed by the files and functions that they come from, so these names are part of the code's structure.
_OPTIMIZER_FILE = re.compile(r"/optax/(?!losses)|/runner/optim/")
_LOSS_FILE = re.compile(r"/train/loss\.py$|/optax/losses/")
_LOSS_FUNCTION = re.compile(r"loss|cross_entropy|log_softmax", re.IGNORECASE)
_LOSS_OP = re.compile(r"log_softmax|logsumexp|cross_entropy")
_ATTENTION_FUNCTION = re.compile(r"attention|attend", re.IGNORECASE)
_MATMUL_KERNEL = re.compile(r"ragged|gmm|matmul|gemm|grouped", re.IGNORECASE)

_LIBRARY = "runner"  # directory whose lines are not the experiment's own
_TRACE_PROCESS = 1

_ALIAS_OPCODES = {"bitcast", "opt-barrier", "add-dependency", "domain", "after-all"}
_TUPLE_OPCODES = {"tuple", "get-tuple-element"}
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "select", "maximum", "minimum", "negate", "exponential", "or"}
_ELEMENTWISE |= {"tanh", "all-reduce", "clamp", "rsqrt", "sqrt", "power", "and", "xor", "not", "log", "abs", "sort"}
_OPCODES_WITHOUT_BUFFER = {"parameter", "constant", "partition-id", "replica-id"}
_OPCODES_WITHOUT_BUFFER |= {"send", "recv", "recv-done", "send-done"}
_INDEX = re.compile(r"\bindex=(\d+)")
_ALIASED_OPERAND = re.compile(r"output_to_operand_aliasing=\{\{\}: \((\d+),")
_NO_TEMPORARY = -1  # buffer number of a value that is not a temporary of the computation

_BufferTree = int | tuple["_BufferTree", ...]  # buffer number of an array, or those of a tuple


# Live memory.


class LiveBuffer(NamedTuple):
    """Array that is alive."""

    bytes: int
    shape: str
    op: Op


@dataclass(frozen=True)
class LiveMemory:
    """Bytes of live temporaries."""

    own_bytes: dict[OpKey, int]  # op -> bytes of its own computation that are alive while it runs
    inner_bytes: dict[OpKey, int]  # op that runs other computations -> peak bytes of these
    # Op -> live buffers, for ops that are the peak of their computation.
    buffers: dict[OpKey, tuple[LiveBuffer, ...]] = field(repr=False, default_factory=dict)
    peak: int = 0  # peak bytes of the whole program
    peak_stack: tuple[OpKey, ...] = ()  # ops that run at the peak, outermost first

    def count_bytes(self, stack: tuple[OpKey, ...]) -> int:
        """Return the bytes alive while these nested ops run."""
        return sum(self.own_bytes.get(key, 0) for key in stack)

    @property
    def peak_buffers(self) -> list[LiveBuffer]:
        """Buffers alive at the peak, largest first."""
        buffers = (buffer for key in self.peak_stack for buffer in self.buffers.get(key, ()))
        return sorted(buffers, key=lambda buffer: -buffer.bytes)


def compute_live_memory(module: HloModule) -> LiveMemory:
    """Return the bytes of temporaries that are alive at each op of a module."""
    own_bytes: dict[OpKey, int] = {}
    inner_bytes: dict[OpKey, int] = {}
    peak_buffers: dict[OpKey, tuple[LiveBuffer, ...]] = {}
    peaks: dict[str, tuple[int, tuple[OpKey, ...]]] = {}

    def find_peak(computation: str) -> tuple[int, tuple[OpKey, ...]]:
        # Computations that are called several times have one peak.
        if computation in peaks:
            return peaks[computation]
        peak: tuple[int, tuple[OpKey, ...]] = (0, ())
        peaks[computation] = peak
        ops = list(module.computations.get(computation, {}).values())
        for op, buffers in zip(ops, _BufferAssignment(module, computation).iter_live_buffers(), strict=True):
            key = computation, op.name
            own_bytes[key] = sum(buffer.bytes for buffer in buffers)
            # The computation inside a fusion has no buffers in HBM. The largest of several branches counts.
            callees = op.callees.values() if op.opcode in ("while", "conditional", "call") else ()
            inner_bytes[key], stack = max((find_peak(name) for name in callees), default=(0, ()))
            if own_bytes[key] + inner_bytes[key] > peak[0]:
                peak = own_bytes[key] + inner_bytes[key], (key, *stack)
                peak_buffers[key] = tuple(buffers)
        peaks[computation] = peak
        return peak

    return LiveMemory(own_bytes, inner_bytes, peak_buffers, *find_peak(module.entry))


class _BufferAssignment:
    """Buffers of one computation."""

    def __init__(self, module: HloModule, computation: str):
        self.ops = list(module.computations.get(computation, {}).values())
        self.module, self.order = module, {op.name: index for index, op in enumerate(self.ops)}
        self.made: list[tuple[ArrayShape, Op, int]] = []  # array, op and position of each buffer, by its number
        self.values: dict[str, _BufferTree] = {}  # op -> the buffers that hold its result
        self.names: dict[int, list[str]] = defaultdict(list)  # buffer -> ops whose results it holds
        self.last_uses: dict[int, int] = {}  # buffer -> position of the last op that needs it
        # Ops, with the element of a tuple, whose results the computation returns. Their buffers belong to the caller,
        # or to the result of the program.
        self.results = set(self._find_results(module.roots.get(computation, ""), None))
        self.uses: dict[str, int] = defaultdict(int)  # op -> position of the last op that names it as an operand
        for index, op in enumerate(self.ops):
            for name in op.operands:
                self.uses[name] = index

    def iter_live_buffers(self) -> Iterator[list[LiveBuffer]]:
        """Yield the buffers that are alive while each op runs."""
        for index, op in enumerate(self.ops):
            self.values[op.name] = self._assign(op, index)
            for number in _iter_leaves(self.values[op.name]):
                self.names[number].append(op.name)
            # An op that only names a value does not need its buffer; the users of the name do.
            if op.opcode not in _ALIAS_OPCODES | _TUPLE_OPCODES:
                for name in op.operands:
                    for number in _iter_leaves(self.values.get(name, _NO_TEMPORARY)):
                        self.last_uses[number] = index
        # A buffer without a use is alive only while the op runs that makes it.
        ends: dict[int, list[int]] = defaultdict(list)
        begins: dict[int, list[int]] = defaultdict(list)
        for number, (_, _, born) in enumerate(self.made):
            begins[born].append(number)
            ends[max(self.last_uses.get(number, born), born)].append(number)
        current: dict[int, LiveBuffer] = {}
        for index in range(len(self.ops)):
            for number in begins[index]:
                array, op, _ = self.made[number]
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                current[number] = LiveBuffer(array.hbm_bytes, shape, op)
            yield list(current.values())
            for number in ends[index]:
                del current[number]

    def _assign(self, op: Op, index: int) -> _BufferTree:
        """Return the buffers of an op's result, new ones where it reuses none."""
        operand = self.values.get(op.operands[0], _NO_TEMPORARY) if op.operands else _NO_TEMPORARY
        if op.opcode in _OPCODES_WITHOUT_BUFFER:
            return _NO_TEMPORARY
        if op.opcode == "tuple":
            return tuple(self.values.get(name, _NO_TEMPORARY) for name in op.operands)
        if op.opcode == "get-tuple-element":
            if not isinstance(operand, tuple):
                return operand
            element = int(stated[1]) if (stated := _INDEX.search(op.rest)) else 0
            return operand[element] if element < len(operand) else _NO_TEMPORARY
        if op.opcode in _ALIAS_OPCODES or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            return operand
        # The shape of an asynchronous start also lists its operands.
        is_start = op.opcode.endswith("-start")
        output = get_output_shape(Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest))
        arrays = parse_arrays(output if is_start else op.shape)
        leaves = []
        for element, array in enumerate(arrays):
            is_result = (op.name, element) in self.results or (op.name, None) in self.results
            number: int | None = _NO_TEMPORARY
            if not is_result and array.hbm_bytes:
                number = self._find_reused_buffer(op, element, array, index)
            if number is None:
                self.made.append((array, op, index))
                number = len(self.made) - 1
            leaves.append(number)
        return tuple(leaves) if len(leaves) != 1 or (op.shape.startswith("(") and not is_start) else leaves[0]

    def _find_reused_buffer(self, op: Op, element: int, array: ArrayShape, index: int) -> int | None:
        """Return the buffer of an operand that an element of the result reuses, None if it needs a new one."""
        aliased = _ALIASED_OPERAND.search(op.rest)
        # A kernel may state that it writes into an operand.
        updated = int(aliased[1]) if aliased else self._find_updated_operand(op, element)
        is_elementwise = op.opcode in _ELEMENTWISE or (op.opcode == "fusion" and "kind=kLoop" in op.rest)
        candidates = [updated] if updated is not None else range(len(op.operands)) if is_elementwise else []
        for position in candidates:
            name = op.operands[position] if position < len(op.operands) else ""
            value = self.values.get(name, _NO_TEMPORARY)
            # An operand that a later op needs keeps its buffer.
            if isinstance(value, tuple) or self.uses[name] > index:
                continue
            if value == _NO_TEMPORARY:
                if updated is not None:
                    return _NO_TEMPORARY
                continue
            there = self.made[value][0]
            # The buffer may have other names, by which later ops use it.
            is_needed = any(self.uses[other] > index for other in self.names[value])
            if not is_needed and _get_layout(there) == _get_layout(array):
                return value
        return None

    def _find_updated_operand(self, op: Op, element: int) -> int | None:
        """Return the position of the operand of which an element of the result is an update, None if none."""
        if op.opcode == "dynamic-update-slice":
            return 0
        inner = self.module.get_inner_computation(op) if op.opcode == "fusion" else ""
        if not inner:
            return None
        value: Op | None = self.module.get_root(inner)
        if value is not None and value.opcode == "tuple":
            value = self.module.get_operand(value, element)
        # Follow the updates of the root back to the parameter that they write into.
        while value is not None and value.opcode in ("bitcast", "dynamic-update-slice", "reshape"):
            is_update = value.opcode == "dynamic-update-slice"
            value = self.module.get_operand(value, 0)
            while is_update and value is not None and value.opcode == "bitcast":
                value = self.module.get_operand(value, 0)
            if is_update and value is not None and value.opcode == "parameter":
                return int(value.rest[1 : value.rest.index(")")])
        return None

    def _find_results(self, name: str, element: int | None) -> Iterator[tuple[str, int | None]]:
        """Yield the ops whose results the computation returns: the caller provides their buffers."""
        index = self.order.get(name)
        if index is None:
            return
        op = self.ops[index]
        if op.opcode == "tuple":
            for operand in op.operands if element is None else op.operands[element : element + 1]:
                yield from self._find_results(operand, None)
        elif op.opcode == "get-tuple-element" and (found := _INDEX.search(op.rest)):
            yield from self._find_results(op.operands[0], int(found[1]))
        elif op.opcode in _ALIAS_OPCODES or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            yield from self._find_results(op.operands[0] if op.operands else "", element)
        elif op.opcode != "parameter":
            yield name, element
            updated = self._find_updated_operand(op, element or 0)
            if updated is not None and updated < len(op.operands):
                yield from self._find_results(op.operands[updated], None)


def _get_layout(array: ArrayShape) -> tuple[str, int, tuple[int, ...]]:
    """Return what is the same for arrays of which one may take the buffer of the other: rows may be grouped anew."""
    return array.dtype, array.hbm_bytes, array.dims[-1:]


def _iter_leaves(value: _BufferTree) -> Iterator[int]:
    if isinstance(value, tuple):
        for part in value:
            yield from _iter_leaves(part)
    elif value != _NO_TEMPORARY:
        yield value


# Step time.


def _classify_op(module: HloModule, op: Op, calls: tuple[StackFrame, ...]) -> str:
    """Return the part of a step that an op of the schedule belongs to, by the calls that led to it, innermost first."""
    if any(_OPTIMIZER_FILE.search(frame.file) for frame in calls):
        return OPTIMIZER
    if is_kernel(op):
        if is_attention_kernel(op):
            return ATTENTION
        return MATMULS if _MATMUL_KERNEL.search(op.name) else KERNELS
    # All that a fusion does decides, not the op that it is named after.
    opcodes = set(_list_opcodes(module, op))
    own = [frame for frame in calls if not frame.is_installed]
    matmuls = find_matmuls(module, op)
    # Scans over layers save activations into stacks in the forward pass and read them in the backward pass.
    if not matmuls and opcodes & _SLICE_OPCODES and opcodes <= _MOVING_OPCODES | _SLICE_OPCODES:
        return _ACTIVATIONS
    if not matmuls and "dynamic-update-slice" in _list_result_opcodes(module, op):
        return _ACTIVATIONS
    # Copies and transpositions that compute nothing.
    if opcodes & _LAYOUT_OPCODES and opcodes <= _MOVING_OPCODES:
        return LAYOUT
    if matmuls:
        # Attention multiplies batches of matrices; a projection within an attention function does not.
        is_batched = any(matmul.batch > 1 for matmul in matmuls)
        is_attention = is_batched and any(_ATTENTION_FUNCTION.search(frame.function) for frame in own)
        return ATTENTION if is_attention else MATMULS
    if any(_LOSS_FILE.search(frame.file) for frame in calls) or (own and _LOSS_FUNCTION.search(own[0].function)):
        return LOSS
    # Embedding lookups, and the dispatch of tokens to experts.
    if opcodes & {"gather", "scatter"}:
        return _GATHERS
    if _LOSS_OP.search(op.rest):
        return LOSS
    return ATTENTION if own and _ATTENTION_FUNCTION.search(own[0].function) else ELEMENTWISE


def _list_opcodes(module: HloModule, op: Op) -> list[str]:
    """Return the opcode of an op, or those of all ops inside a fusion."""
    inner = module.get_inner_computation(op)
    if not inner:
        return [op.opcode]
    return [opcode for part in module.computations.get(inner, {}).values() for opcode in _list_opcodes(module, part)]


def _list_result_opcodes(module: HloModule, op: Op) -> list[str]:
    """Return the opcodes that make the results of an op, looking through aliases."""
    inner = module.get_inner_computation(op)
    root = module.get_root(inner) if inner else op
    values = [part for part in module.get_operands(root) if part] if root.opcode == "tuple" else [root]
    opcodes = []
    for value in values:
        while value.opcode in ("bitcast", "reshape") and (source := module.get_operand(value, 0)) is not None:
            value = source
        opcodes += _list_result_opcodes(module, value) if value.opcode == "fusion" else [value.opcode]
    return opcodes


@dataclass(frozen=True)
class OpTime:
    """Time of one op over all its runs in a step, in seconds."""

    name: str
    opcode: str
    shape: str
    op_name: str
    part: str  # part of the step; of a collective, its kind and axes
    line: str  # `file:line` of the experiment's own source, or the nearest call to it
    runs: float
    low: float  # seconds at its roofline; of a transfer, the exposed time while all other ops are at theirs
    high: float  # seconds by the compiler's estimate; of a transfer, the exposed time then
    transfer: float = 0.0  # of a transfer, its whole time, exposed and hidden
    basis: str = "estimate"  # `OpCost.basis`; of a transfer `copy` or `links`
    num_ops: int = 1  # number of ops that this is the sum of (`Forecast.sum_similar_ops`)

    @property
    def rank(self) -> tuple[float, float, str]:
        """Sort key: most expensive first."""
        return -self.high, -self.low, self.name


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a step."""

    low: float  # seconds if each op is as fast as its roofline
    high: float  # seconds by the compiler's estimates, or by typical shares of the peaks
    ops: tuple[OpTime, ...]  # time of each op, most expensive first
    timing: Timing  # simulated schedule by the compiler's estimates
    memory: LiveMemory  # live temporaries at each op
    has_estimates: bool  # True if the compiler has written estimates, and the clock that they count is known
    num_unknown: int  # number of kernels of which only their arrays are known
    num_endless: int  # number of loops that count once, since their trip count is unknown
    flops: float  # FLOPs of all matmuls and kernels that a device runs, recomputation included

    def sum_by_part(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each part, low and high, most expensive first."""
        return _sum_seconds([(op.part, op) for op in self.ops])

    def sum_by_line(self) -> dict[str, tuple[float, float]]:
        """Return the seconds of each line of source, low and high, most expensive first."""
        return _sum_seconds([(op.line or "no line", op) for op in self.ops])

    def sum_similar_ops(self) -> tuple[OpTime, ...]:
        """Return the ops, most expensive first, with ops that do the same summed, such as those of unrolled layers."""
        similar: dict[tuple[str, ...], list[OpTime]] = defaultdict(list)
        for op in self.ops:
            # Ops that differ only in the layout of their result are similar too.
            sizes = re.sub(r"\{[^{}]*\}", "", op.shape)
            similar[op.opcode, sizes, op.op_name, op.part, op.line, op.basis].append(op)
        sums = [
            replace(
                ops[0],
                runs=sum(op.runs for op in ops),
                low=sum(op.low for op in ops),
                high=sum(op.high for op in ops),
                transfer=sum(op.transfer for op in ops),
                num_ops=len(ops),
            )
            for ops in similar.values()
        ]
        return tuple(sorted(sums, key=lambda op: op.rank))

    def sum_collectives(self) -> dict[str, tuple[float, float]]:
        """Return the exposed and hidden seconds of each kind of collective, by the compiler's estimates."""
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for op in self.ops:
            # Only the exposed part of a collective is in the time of the step.
            if op.basis == "links":
                sums[op.part][0] += op.high
                sums[op.part][1] += max(0.0, op.transfer - op.high)
        return {part: (exposed, hidden) for part, (exposed, hidden) in sums.items()}


def _sum_seconds(named: list[tuple[str, OpTime]]) -> dict[str, tuple[float, float]]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for name, op in named:
        sums[name][0] += op.low
        sums[name][1] += op.high
    return {name: (low, high) for name, (low, high) in sorted(sums.items(), key=lambda item: -item[1][1])}


def compute_forecast(text: str, mesh_sizes: Mapping[str, int], rates: DeviceRates) -> Forecast:
    """Return the forecast of a program, as scheduled HLO, on a mesh of axis -> size. Raises as `find_collectives`."""
    module = load_module(text)
    transfers = find_transfers(module, mesh_sizes, rates.hbm_bytes_per_second, rates.collective_seconds)
    costs: dict[OpKey, OpCost | None] = {}

    def get_cost(op: Op) -> OpCost | None:
        costs[op.computation, op.name] = compute_cost(module, op, rates)
        return costs[op.computation, op.name]

    # The schedule asks for each cost once; the dict keeps them for the basis of each op and for the FLOPs.
    schedule = build_schedule(module, transfers, get_cost)
    low, high = simulate_schedule(schedule, "low"), simulate_schedule(schedule, "high", has_trace=True)

    sources = parse_sources(module.text)
    ops = []
    # The two ends may take different branches, so an op may have run at one end only.
    for key in low.by_op.keys() | high.by_op.keys():
        op = module.computations[key[0]][key[1]]
        origin = _find_origin(module, op)
        calls = sources.get_calls(origin.rest)
        transfer = transfers.synchronous.get(key) or transfers.starts.get(key)
        cost = costs.get(key)
        if transfer is None:
            part, basis = _classify_op(module, op, calls), "roofline" if cost is None else cost.basis
        elif transfer.lane == COPIES:
            part, basis = WAITING, "copy"
        else:
            part, basis = transfer.kind, "links"
        low_seconds, high_seconds = low.by_op.get(key), high.by_op.get(key)
        known = high_seconds or low_seconds
        assert known is not None, "the key is from one of the two"
        ops.append(
            OpTime(
                op.name,
                op.opcode,
                op.shape,
                parse_op_name(origin.rest),
                part,
                find_source_line(calls, _LIBRARY),
                known.runs,
                low_seconds.busy + low_seconds.exposed if low_seconds else 0.0,
                high_seconds.busy + high_seconds.exposed if high_seconds else 0.0,
                known.transfer,
                basis,
            )
        )
    return Forecast(
        low.seconds,
        high.seconds,
        tuple(sorted(ops, key=lambda op: op.rank)),
        high,
        compute_live_memory(module),
        has_estimates(module) and rates.clock_hertz is not None,
        Counter(op.basis for op in ops)["unknown"],
        _count_endless_loops(module, schedule),
        sum(spent.runs * cost.flops for key, spent in high.by_op.items() if (cost := costs.get(key)) is not None),
    )


def _count_endless_loops(module: HloModule, schedule: tuple[ScheduledOp, ...]) -> int:
    return sum(
        (scheduled.kind == "loop" and module.trips.get(scheduled.op.name) is None)
        + sum(_count_endless_loops(module, body) for body in scheduled.bodies)
        for scheduled in schedule
    )


def _find_origin(module: HloModule, op: Op) -> Op:
    """Return the op with the origin of an op: itself, or the best one inside a fusion that has no origin."""
    inner = module.get_inner_computation(op)
    if not inner or parse_op_name(op.rest):
        return op
    # A fusion with a matmul comes from where the matmul does, else from its last op, which makes the result.
    parts = [_find_origin(module, part) for part in module.computations[inner].values()]
    parts = [part for part in parts if parse_op_name(part.rest)]
    return next((part for part in parts if find_matmuls(module, part)), parts[-1] if parts else op)


class _TraceEvent(TypedDict, total=False):
    """Event of Chrome's trace format, with times in microseconds."""

    name: str
    ph: str
    pid: int
    tid: int
    ts: float
    dur: float
    cat: str
    args: dict[str, str | float]


def build_trace(forecast: Forecast, name: str) -> dict[str, list[_TraceEvent] | str]:
    """Return the estimated schedule in Chrome's trace format, for Perfetto: ops, transfers, and live bytes."""
    ops = {op.name: op for op in forecast.ops}
    # Perfetto shows threads in this order.
    lanes = ["compute", "waiting", *sorted({span.lane for span in forecast.timing.spans} - {"compute", "waiting"})]
    events: list[_TraceEvent] = [{"name": "process_name", "ph": "M", "pid": _TRACE_PROCESS, "args": {"name": name}}]
    for number, lane in enumerate(lanes):
        thread: _TraceEvent = {"ph": "M", "pid": _TRACE_PROCESS, "tid": number}
        events.append({"name": "thread_name", **thread, "args": {"name": lane}})
        events.append({"name": "thread_sort_index", **thread, "args": {"sort_index": number}})
    # The counter gets an event only where the number of bytes changes.
    live_bytes = -1
    for span in forecast.timing.spans:
        op = ops.get(span.name)
        args: dict[str, str | float] = {}
        if op is not None:
            args = {"operation": op.op_name, "line": op.line, "shape": op.shape[:200], "runs": op.runs}
        events.append(
            {
                "name": span.name,
                "ph": "X",
                "pid": _TRACE_PROCESS,
                "tid": lanes.index(span.lane),
                "ts": span.start * 1e6,
                "dur": span.seconds * 1e6,
                "cat": op.part if op is not None else span.lane,
                "args": args,
            }
        )
        now_alive = get_live_bytes(forecast, span.stack, span.trips)
        if span.lane == "compute" and now_alive != live_bytes:
            live_bytes = now_alive
            events.append(
                {
                    "name": "temporaries",
                    "ph": "C",
                    "pid": _TRACE_PROCESS,
                    "ts": span.start * 1e6,
                    "args": {"bytes": float(live_bytes)},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def get_live_bytes(forecast: Forecast, stack: tuple[OpKey, ...], trips: int) -> int:
    """Return the bytes of temporaries alive while these nested ops run; of several trips of a loop, the peak."""
    inner = forecast.memory.inner_bytes.get(stack[-1], 0) if trips > 1 and stack else 0
    return forecast.memory.count_bytes(stack) + inner
