"""Simulation of a program's schedule, a tree of loops, calls and branches, with its asynchronous transfers.

Ops run one after the other on the compute lane. Copies between memories and collectives run beside them, each on a lane
of its own kind. A transfer begins when it has been started and its lane is free. The ops wait at its end until it is
done, and this waiting time is exposed.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runner.plan.forecast.collectives import Collective, locate_collectives
from runner.plan.forecast.cost import OpCost, find_matmuls
from runner.plan.forecast.hlo import Instruction, get_output_shape, parse_op_name
from runner.plan.forecast.module import HloModule, Op, parse_arrays

COPIES, _LINKS, NETWORK = "copies", "links", "network"

# An update in place between two memories.
_UPDATE_START = "dynamic-update-slice-start"
_RENDEZVOUS = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_ASYNC_START = re.compile(r'custom_call_target="AsyncCollectiveStart"')
_ASYNC_DONE = re.compile(r'custom_call_target="AsyncCollectiveDone"')

# A trace shows every trip of a loop up to this number of spans in all, and then the remaining trips as one span.
MAX_TRACE_SPANS = 60_000

_RangeEnd = Literal["low", "high"]
OpKey = tuple[str, str]  # computation, op


@dataclass(frozen=True)
class Transfer:
    """Copy or collective that takes time on a lane."""

    lane: str  # transfers of one lane follow one another
    kind: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Transfers:
    """Transfers of a module."""

    # Op -> collective for which the ops wait where it stands.
    synchronous: dict[OpKey, Transfer] = field(default_factory=dict)
    # Fusion with a matmul -> collective inside it, among `starts`, that runs while the fusion does.
    fused: dict[OpKey, Op] = field(default_factory=dict)
    starts: dict[OpKey, Transfer] = field(default_factory=dict)  # op -> transfer that begins there
    # Op -> name of the op whose transfer it awaits, "" for the oldest pending transfer of its kind.
    waits: dict[OpKey, str] = field(default_factory=dict)


def find_transfers(
    module: HloModule,
    mesh_sizes: Mapping[str, int],
    copy_bytes_per_second: float,
    get_seconds: Callable[[Collective], float],
) -> Transfers:
    """Return all transfers of a module on a mesh (axis -> size); `get_seconds` gives the time of a collective's run."""
    transfers = Transfers()
    ops = [op for ops in module.computations.values() for op in ops.values()]

    # Collectives where they stand in the text.
    holders: dict[str, tuple[str, str]] = {}  # computation -> the synchronous collective in it, and its chain
    for raw, collective in locate_collectives(module.text, mesh_sizes):
        axes = " x ".join(collective.axes) or "none"
        lane = NETWORK if collective.is_between_slices else _LINKS
        sent = collective.sent_bytes_per_device
        transfer = Transfer(lane, f"{collective.kind} over {axes}", get_seconds(collective), sent)
        computation, name = raw.instruction.computation, raw.instruction.name
        if raw.instruction.opcode.endswith("-start") or raw.instruction.opcode == "send":
            transfers.starts[computation, name] = transfer
        else:
            transfers.synchronous[computation, name] = transfer
            holders[computation] = name, "/".join(raw.chain)

    # A collective inside a fusion, or inside an asynchronous op, belongs to the op that runs it. The pieces of one that
    # is spread over several fusions share a chain: it runs from the fusion that starts it to the fusion that ends it,
    # and the fusions between are ordinary ops.
    chains = {chain: transfers.synchronous[place, name] for place, (name, chain) in holders.items() if chain}
    callers = [op for op in ops if op.callees.get("calls") and not op.opcode.endswith(("-done", "-update"))]
    first_pieces: dict[str, str] = {}
    last_pieces: list[tuple[Op, str]] = []
    for op in callers:
        parts = module.computations.get(op.callees["calls"], {})
        matches = (_CHAIN.search(part.rest) for part in parts.values())
        names = ("/".join(match.groups()) for match in matches if match)
        chain = next((name for name in names if name in chains), "")
        if chain and any(_ASYNC_START.search(part.rest) for part in parts.values()):
            transfers.starts[op.computation, op.name] = chains[chain]
            first_pieces[chain] = op.name
        elif chain and any(_ASYNC_DONE.search(part.rest) for part in parts.values()):
            last_pieces.append((op, chain))
    for op, chain in last_pieces:
        transfers.waits[op.computation, op.name] = first_pieces.get(chain, "")
    for op in callers:
        name, _ = holders.get(op.callees["calls"], ("", ""))
        key = op.computation, op.name
        if not name or key in transfers.starts:
            continue
        inner = module.computations[op.callees["calls"]][name]
        transfer = transfers.synchronous[inner.computation, inner.name]
        if op.opcode.endswith("-start"):
            transfers.starts[key] = transfer
        elif find_matmuls(module, op):
            transfers.fused[key], transfers.starts[inner.computation, inner.name] = inner, transfer
        else:
            transfers.synchronous[key] = transfer

    # Every other asynchronous start is a copy between memories.
    for op in ops:
        if not op.opcode.endswith("-start") or (op.computation, op.name) in transfers.starts:
            continue
        output = get_output_shape(Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest))
        arrays, target = parse_arrays(op.shape), parse_arrays(output)
        size = sum(array.bytes for array in target)
        source = arrays[1] if op.opcode in ("copy-start", _UPDATE_START) and len(arrays) > 1 else arrays[0]
        if op.opcode == _UPDATE_START:
            # An update in place moves only the new part.
            size = source.bytes
        # A copy from HBM to HBM passes its bandwidth twice.
        is_within_hbm = sum(array.traffic_bytes for array in target) > 0 and source.traffic_bytes > 0
        seconds = (1 + is_within_hbm) * size / copy_bytes_per_second
        transfers.starts[op.computation, op.name] = Transfer(COPIES, "copy between memories", seconds, size)

    # An end awaits the start that it leads back to through updates, or the oldest one if the start stands elsewhere.
    for op in ops:
        if not op.opcode.endswith("-done") or (op.computation, op.name) in transfers.waits:
            continue
        awaited, seen = "", op
        while seen.operands and (before := module.computations[op.computation].get(seen.operands[0])) is not None:
            if (before.computation, before.name) in transfers.starts:
                awaited = before.name
                break
            if not before.opcode.endswith("-update"):
                break
            seen = before
        transfers.waits[op.computation, op.name] = awaited

    # Data sent between slices has arrived when its answer has been received. The sender waits for nothing.
    meetings = {
        op.name: match[1] for op in ops if op.opcode in ("send", "recv") and (match := _RENDEZVOUS.search(op.rest))
    }
    sent_by = {meetings[op.name]: op.name for op in ops if op.opcode == "send" and op.name in meetings}
    received = {meetings[op.name] for op in ops if op.opcode == "recv" and op.name in meetings}
    for op in ops:
        meeting = meetings.get(op.operands[0], "") if op.operands else ""
        if op.opcode == "recv-done" and meeting in sent_by:
            transfers.waits[op.computation, op.name] = sent_by[meeting]
        elif op.opcode == "send-done" and meeting in received:
            transfers.waits.pop((op.computation, op.name), None)
    return transfers


@dataclass(frozen=True)
class ScheduledOp:
    """Op of the schedule: its cost, the transfer that it starts or awaits, and the computations that it runs."""

    op: Op
    cost: OpCost | None = None
    starts: Transfer | None = None  # transfer that begins here
    # Name of the op whose transfer is awaited here, "" for the oldest pending one of its kind.
    awaits: str | None = None
    synchronous: Transfer | None = None  # collective that runs here while the ops wait
    # Computations that run here: body and condition of a loop as one, each branch of a conditional, the computation
    # that is called.
    bodies: tuple[tuple["ScheduledOp", ...], ...] = ()
    kind: Literal["op", "loop", "branches", "call"] = "op"
    trips: int = 1

    @property
    def key(self) -> OpKey:
        """Computation and name of the op."""
        return self.op.computation, self.op.name


def build_schedule(
    module: HloModule, transfers: Transfers, get_cost: Callable[[Op], OpCost | None]
) -> tuple[ScheduledOp, ...]:
    """Return the ops of one run of a module, in order."""
    known: dict[str, tuple[ScheduledOp, ...]] = {}

    def build(computation: str) -> tuple[ScheduledOp, ...]:
        # A computation that is called several times is built once.
        if computation not in known:
            ops = module.computations.get(computation, {}).values()
            known[computation] = tuple(scheduled for op in ops for scheduled in schedule(op))
        return known[computation]

    def schedule(op: Op) -> Iterator[ScheduledOp]:
        key = op.computation, op.name
        callees = op.callees
        # A collective inside a fusion starts before the fusion and is awaited behind it.
        collective = transfers.fused.get(key)
        if collective is not None:
            yield ScheduledOp(collective, starts=transfers.starts[collective.computation, collective.name])
        if op.opcode == "while":
            bodies = (build(callees["body"]) + build(callees["condition"]),)
            trips = module.trips.get(op.name)
            yield ScheduledOp(op, bodies=bodies, kind="loop", trips=1 if trips is None else trips)
        elif op.opcode == "conditional":
            # By this scope a program marks what it computes only in rare cases.
            usual = [
                name
                for name in callees.values()
                if not any("/fallback/" in parse_op_name(part.rest) for part in module.computations[name].values())
            ]
            yield ScheduledOp(op, bodies=tuple(map(build, usual or callees.values())), kind="branches")
        elif op.opcode == "call":
            yield ScheduledOp(op, bodies=(build(callees["to_apply"]),), kind="call")
        elif key in transfers.synchronous:
            yield ScheduledOp(op, synchronous=transfers.synchronous[key])
        else:
            starts, awaits = transfers.starts.get(key), transfers.waits.get(key)
            cost = None if starts is not None or awaits is not None else get_cost(op)
            if starts is not None or awaits is not None or cost is not None:
                yield ScheduledOp(op, cost, starts, awaits)
        if collective is not None:
            yield ScheduledOp(op, awaits=collective.name)

    return build(module.entry)


@dataclass
class _OpSeconds:
    """Time of one op over all its runs."""

    runs: float = 0
    busy: float = 0.0  # seconds of the op itself
    transfer: float = 0.0  # seconds of the transfer that it starts
    exposed: float = 0.0  # seconds that the ops wait for this transfer

    def add(self, other: "_OpSeconds", times: float) -> None:
        """Add the time of another, `times` over."""
        self.runs += times * other.runs
        self.busy += times * other.busy
        self.transfer += times * other.transfer
        self.exposed += times * other.exposed


class TraceSpan(NamedTuple):
    """Busy interval of a lane."""

    lane: str  # lane, or kind of transfer
    name: str
    start: float  # seconds since the start of the step
    seconds: float
    stack: tuple[OpKey, ...]  # ops that were running when it began, outermost first
    trips: int = 1  # number of trips of a loop that the span stands for


@dataclass
class Timing:
    """Time of a whole schedule: in all, by op, and as spans of a trace."""

    seconds: float = 0.0
    by_op: dict[OpKey, _OpSeconds] = field(default_factory=dict)
    spans: list[TraceSpan] = field(default_factory=list)


def simulate_schedule(ops: Sequence[ScheduledOp], end: _RangeEnd, *, has_trace: bool = False) -> Timing:
    """Return the time of a schedule by one end of the range of its ops' costs."""
    simulation = _Simulation(end, MAX_TRACE_SPANS if has_trace else 0)
    simulation.run(ops, ())
    return Timing(simulation.now, simulation.by_op, simulation.spans)


class _Simulation:
    """Clock, lanes and pending transfers of a running schedule."""

    def __init__(self, end: _RangeEnd, max_spans: int):
        self.end, self.max_spans = end, max_spans
        self.now = 0.0  # seconds since the start of the step
        self.lane_ends: dict[str, float] = {}  # lane -> time when its last transfer ends
        # Name of the op that started a transfer -> that op, and the time when the transfer ends.
        self.pending: dict[str, tuple[ScheduledOp, float]] = {}
        self.by_op: dict[OpKey, _OpSeconds] = defaultdict(_OpSeconds)
        self.spans: list[TraceSpan] = []

    def run(self, ops: Sequence[ScheduledOp], stack: tuple[OpKey, ...]) -> None:
        for scheduled in ops:
            key, name = scheduled.key, scheduled.op.name
            if scheduled.kind == "loop":
                self._run_loop(scheduled, stack)
            elif scheduled.kind == "branches":
                # The longest branch by itself, by the high end of its costs at both ends of the range.
                longest = max(scheduled.bodies, key=lambda body: simulate_schedule(body, "high").seconds, default=())
                self.run(longest, (*stack, key))
            elif scheduled.kind == "call":
                self.run(scheduled.bodies[0], (*stack, key))
            elif scheduled.starts is not None:
                transfer = scheduled.starts
                begin = max(self.now, self.lane_ends.get(transfer.lane, 0.0))
                self.lane_ends[transfer.lane] = begin + transfer.seconds
                self.pending[name] = scheduled, begin + transfer.seconds
                self.by_op[key].runs += 1
                self.by_op[key].transfer += transfer.seconds
                self._add_span(transfer.kind, name, begin, transfer.seconds, stack)
            elif scheduled.awaits is not None:
                self._wait(scheduled.awaits, scheduled.op.opcode, stack)
            elif scheduled.synchronous is not None:
                transfer = scheduled.synchronous
                begin = max(self.now, self.lane_ends.get(transfer.lane, 0.0))
                self._add_span(transfer.kind, name, begin, transfer.seconds, stack)
                self.by_op[key].runs += 1
                self.by_op[key].transfer += transfer.seconds
                # The ops also wait for the transfers before it on the lane.
                self.by_op[key].exposed += begin + transfer.seconds - self.now
                self.now = self.lane_ends[transfer.lane] = begin + transfer.seconds
            elif scheduled.cost is not None:
                seconds = scheduled.cost.low if self.end == "low" else scheduled.cost.high
                self._add_span("compute", name, self.now, seconds, (*stack, key))
                self.by_op[key].runs += 1
                self.by_op[key].busy += seconds
                self.now += seconds

    def _wait(self, name: str, opcode: str, stack: tuple[OpKey, ...]) -> None:
        """Advance to the end of the transfer that the op `name` started, if it is still pending."""
        if not name:
            stem = opcode.removesuffix("-done")
            same = [key for key, (op, _) in self.pending.items() if op.op.opcode.removesuffix("-start") == stem]
            name = same[0] if same else ""
        # The transfer was awaited before, or began outside of this computation.
        if name not in self.pending:
            return
        starter, until = self.pending.pop(name)
        wait = max(0.0, until - self.now)
        self.by_op[starter.key].exposed += wait
        if wait:
            self._add_span("waiting", name, self.now, wait, stack)
        self.now += wait

    def _run_loop(self, loop: ScheduledOp, stack: tuple[OpKey, ...]) -> None:
        """Run a loop trip by trip, until one begins in the same state as the one before: all later trips are equal."""
        outer, inner_stack = self.by_op, (*stack, loop.key)
        state_before: tuple[tuple[str, float], ...] | None = None
        trip_start, trip_seconds_by_op = self.now, outer
        for trip in range(loop.trips):
            state = self._get_pending_state()
            if state == state_before and len(self.spans) >= self.max_spans:
                times = loop.trips - trip
                seconds = (self.now - trip_start) * times
                for key, spent in trip_seconds_by_op.items():
                    outer[key].add(spent, times)
                self._add_span("compute", f"{loop.op.name}: {times} more", self.now, seconds, inner_stack, times)
                self.now += seconds
                self.lane_ends = {lane: until + seconds for lane, until in self.lane_ends.items()}
                self.pending = {name: (op, until + seconds) for name, (op, until) in self.pending.items()}
                break
            trip_start, state_before, trip_seconds_by_op = self.now, state, defaultdict(_OpSeconds)
            self.by_op = trip_seconds_by_op
            self.run(loop.bodies[0], inner_stack)
            self.by_op = outer
            for key, spent in trip_seconds_by_op.items():
                outer[key].add(spent, 1)

    def _get_pending_state(self) -> tuple[tuple[str, float], ...]:
        """Return the remaining times of all lanes and pending transfers, which determine the time of what follows."""
        ends = [*self.lane_ends.items(), *((name, until) for name, (_, until) in self.pending.items())]
        # Times that have passed are equal, and rounding removes the error of the clock's additions.
        return tuple(sorted((name, round(max(0.0, until - self.now), 12)) for name, until in ends))

    def _add_span(
        self, lane: str, name: str, start: float, seconds: float, stack: tuple[OpKey, ...], trips: int = 1
    ) -> None:
        if self.max_spans and seconds:
            self.spans.append(TraceSpan(lane, name, start, seconds, stack, trips))
