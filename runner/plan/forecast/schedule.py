"""The schedule of a program as a tree of loops, calls and branches, and the time that it takes.

Ops run one after the other. A transfer begins when it is started and its lane is free, and the ops wait at its end for
as long as it is not done: that time is exposed.

What runs beside the ops: copies between memories, and collectives; where each starts, and where it is awaited.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runner.plan.forecast.collectives import Collective, locate_collectives
from runner.plan.forecast.cost import OpCost, find_matmuls
from runner.plan.forecast.hlo import Instruction, get_output_shape
from runner.plan.forecast.module import HloModule, Op, parse_arrays

COPIES, LINKS, NETWORK = "copies", "links", "network"
_UPDATE = "dynamic-update-slice-start"
_MEETING = re.compile(r'_xla_host_transfer_rendezvous="([^"]*)"')
_START = re.compile(r'custom_call_target="AsyncCollectiveStart"')
_DONE = re.compile(r'custom_call_target="AsyncCollectiveDone"')


@dataclass(frozen=True)
class Transfer:
    """One transfer. Those of one `lane` follow one another; `kind` names it for a person."""

    lane: str
    kind: str
    seconds: float
    bytes: int


@dataclass(frozen=True)
class Transfers:
    """The transfers of a module.

    Attributes:
        at_once: op -> a collective for which the ops wait where it stands.
        beside: fusion with a matmul -> the collective inside it, among `starts`, that runs while the fusion does.
        starts: op -> what begins there.
        waits: op -> the op whose transfer it awaits, "" for the oldest of its kind that is under way.
    """

    at_once: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    beside: dict[tuple[str, str], Op] = field(default_factory=dict)
    starts: dict[tuple[str, str], Transfer] = field(default_factory=dict)
    waits: dict[tuple[str, str], str] = field(default_factory=dict)


def find_transfers(
    module: HloModule,
    mesh_sizes: Mapping[str, int],
    copy_bytes_per_second: float,
    seconds_of: Callable[[Collective], float],
) -> Transfers:
    """All transfers of a module. `seconds_of` is the time of one run of a collective."""
    found = Transfers()
    holders: dict[str, tuple[str, str]] = {}  # a computation -> the collective in it, and its chain
    for place, collective in locate_collectives(module.text, mesh_sizes):
        axes = " x ".join(collective.axes) or "none"
        lane = NETWORK if collective.is_between_slices else LINKS
        sent = collective.sent_bytes_per_device
        transfer = Transfer(lane, f"{collective.kind} over {axes}", seconds_of(collective), sent)
        computation, name = place.instruction.computation, place.instruction.name
        if place.instruction.opcode.endswith("-start") or place.instruction.opcode == "send":
            found.starts[computation, name] = transfer
        else:
            found.at_once[computation, name] = transfer
            holders[computation] = name, "/".join(place.chain)
    _lift(module, found, holders)
    for ops in module.computations.values():
        for op in ops.values():
            _copy(op, found, copy_bytes_per_second)
    for computation, ops in module.computations.items():
        for op in ops.values():
            if op.opcode.endswith("-done") and (computation, op.name) not in found.waits:
                found.waits[computation, op.name] = _origin(ops, op, found)
    _meet(module, found)
    return found


def _meet(module: HloModule, found: Transfers) -> None:
    """What is sent between slices is there when what answers it has been received; the sender waits for nothing."""
    ops = [op for ops in module.computations.values() for op in ops.values()]
    met = {op.name: match[1] for op in ops if op.opcode in ("send", "recv") and (match := _MEETING.search(op.rest))}
    sent = {met[op.name]: op.name for op in ops if op.opcode == "send" and op.name in met}
    received = {met[op.name] for op in ops if op.opcode == "recv" and op.name in met}
    for op in ops:
        meeting = met.get(op.operands[0], "") if op.operands else ""
        if op.opcode == "recv-done" and meeting in sent:
            found.waits[op.computation, op.name] = sent[meeting]
        elif op.opcode == "send-done" and meeting in received:
            found.waits.pop((op.computation, op.name), None)


def _lift(module: HloModule, found: Transfers, holders: Mapping[str, tuple[str, str]]) -> None:
    """Move a collective inside a fusion, or inside what is started, to the op that runs it.

    The pieces of one that is spread over several fusions share a chain: it runs from the one that starts it to the one
    that is done with it, and those between are ops like others.
    """
    chains = {chain: found.at_once[computation, name] for computation, (name, chain) in holders.items() if chain}
    callers = [op for ops in module.computations.values() for op in ops.values() if op.callees.get("calls")]
    callers = [op for op in callers if not op.opcode.endswith(("-done", "-update"))]
    begun: dict[str, str] = {}
    ended: list[tuple[Op, str]] = []
    for op in callers:
        parts = module.computations.get(op.callees["calls"], {})
        chain = _chain_in(parts, chains)
        if chain and any(_START.search(part.rest) for part in parts.values()):
            found.starts[op.computation, op.name] = chains[chain]
            begun[chain] = op.name
        elif chain and any(_DONE.search(part.rest) for part in parts.values()):
            ended.append((op, chain))
    for op, chain in ended:
        found.waits[op.computation, op.name] = begun.get(chain, "")
    for op in callers:
        name, _ = holders.get(op.callees["calls"], ("", ""))
        if name and (op.computation, op.name) not in found.starts:
            _place(module, found, op, module.computations[op.callees["calls"]][name])


def _place(module: HloModule, found: Transfers, op: Op, collective: Op) -> None:
    """Say how the collective inside an op runs: started by it, beside its matmul, or alone."""
    key, inside = (op.computation, op.name), (collective.computation, collective.name)
    transfer = found.at_once[inside]
    if op.opcode.endswith("-start"):
        found.starts[key] = transfer
    elif find_matmuls(module, op):
        found.beside[key], found.starts[inside] = collective, transfer
    else:
        found.at_once[key] = transfer


def _chain_in(parts: Mapping[str, Op], chains: Mapping[str, Transfer]) -> str:
    for part in parts.values():
        match = re.search(r'channel_id=(\d+).*chain_id="(\d+)"', part.rest)
        if match and "/".join(match.groups()) in chains:
            return "/".join(match.groups())
    return ""


def _copy(op: Op, found: Transfers, bytes_per_second: float) -> None:
    key = op.computation, op.name
    if not op.opcode.endswith("-start") or key in found.starts:
        return
    made = get_output_shape(Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest))
    arrays = parse_arrays(op.shape)
    target = parse_arrays(made)
    size = sum(array.bytes for array in target)
    source = arrays[1] if op.opcode in ("copy-start", _UPDATE) and len(arrays) > 1 else arrays[0]
    if op.opcode == _UPDATE:  # in place: what moves is the new part
        size = source.bytes
    both = sum(array.main_bytes for array in target) > 0 and source.main_bytes > 0
    found.starts[key] = Transfer(COPIES, "copy between memories", (1 + both) * size / bytes_per_second, size)


def _origin(ops: Mapping[str, Op], op: Op, found: Transfers) -> str:
    """The start that an op awaits, through the updates between them; "" if it stands elsewhere."""
    seen = op
    while seen.operands and (before := ops.get(seen.operands[0])) is not None:
        if (before.computation, before.name) in found.starts:
            return before.name
        if not before.opcode.endswith("-update"):
            break
        seen = before
    return ""


End = Literal["low", "high"]
OpKey = tuple[str, str]  # computation, op

# A loop is drawn turn by turn up to so many ops in all; of longer ones the first turn is.
MAX_TRACE_SPANS = 60_000


@dataclass(frozen=True)
class ScheduledOp:
    """One op as the clock sees it: what it costs, what it starts or awaits, and what it runs inside.

    `inside` are the computations that run where it stands: the body and condition of a loop, all branches of a
    conditional, what is called. `trips` counts a loop's turns.
    """

    op: Op
    cost: OpCost | None = None
    begins: Transfer | None = None
    awaits: str | None = None
    at_once: Transfer | None = None
    inside: tuple[tuple["ScheduledOp", ...], ...] = ()
    kind: Literal["op", "loop", "branches", "call"] = "op"
    trips: int = 1

    @property
    def key(self) -> OpKey:
        """Which op it is."""
        return self.op.computation, self.op.name


@dataclass
class OpSeconds:
    """The time of one op over all its runs: of the ops themselves, of its transfer, and of the ops waiting for it."""

    runs: float = 0
    busy: float = 0.0
    transfer: float = 0.0
    exposed: float = 0.0

    def add(self, other: "OpSeconds", times: float) -> None:
        """Count another's `times` over."""
        self.runs += times * other.runs
        self.busy += times * other.busy
        self.transfer += times * other.transfer
        self.exposed += times * other.exposed


class TraceSpan(NamedTuple):
    """A stretch of a lane. `stack` is the ops that were running when it began, outermost first."""

    lane: str
    name: str
    start: float
    seconds: float
    stack: tuple[OpKey, ...]
    turns: int = 1  # how many turns of a loop it stands for


@dataclass
class Timing:
    """The time of a whole schedule."""

    seconds: float = 0.0
    spent: dict[OpKey, OpSeconds] = field(default_factory=dict)
    drawn: list[TraceSpan] = field(default_factory=list)


def build_schedule(
    module: HloModule, transfers: Transfers, cost: Callable[[Op], OpCost | None]
) -> tuple[ScheduledOp, ...]:
    """The steps of a run of a module, in order."""
    known: dict[str, tuple[ScheduledOp, ...]] = {}

    def steps_of(computation: str) -> tuple[ScheduledOp, ...]:
        if computation not in known:
            ops = module.computations.get(computation, {}).values()
            known[computation] = tuple(step for op in ops for step in around(op))
        return known[computation]

    def around(op: Op) -> Iterator[ScheduledOp]:
        """The step of an op, between begin and end of the collective that runs beside it, if one does."""
        beside = transfers.beside.get((op.computation, op.name))
        if beside is not None:
            yield ScheduledOp(beside, begins=transfers.starts[beside.computation, beside.name])
        if (step := step_of(op)) is not None:
            yield step
        if beside is not None:
            yield ScheduledOp(op, awaits=beside.name)

    def step_of(op: Op) -> ScheduledOp | None:
        key = op.computation, op.name
        callees = op.callees
        if op.opcode == "while":
            inside = (steps_of(callees["body"]) + steps_of(callees["condition"]),)
            trips = module.trips.get(op.name)
            return ScheduledOp(op, inside=inside, kind="loop", trips=1 if trips is None else trips)
        if op.opcode == "conditional":
            return ScheduledOp(op, inside=tuple(steps_of(name) for name in callees.values()), kind="branches")
        if op.opcode == "call":
            return ScheduledOp(op, inside=(steps_of(callees["to_apply"]),), kind="call")
        if key in transfers.at_once:
            return ScheduledOp(op, at_once=transfers.at_once[key])
        begins, awaits = transfers.starts.get(key), transfers.waits.get(key)
        found = None if begins is not None or awaits is not None else cost(op)
        return None if begins is None and awaits is None and found is None else ScheduledOp(op, found, begins, awaits)

    return steps_of(module.entry)


def simulate_schedule(steps: Sequence[ScheduledOp], end: End, *, is_drawn: bool = False) -> Timing:
    """The time of a schedule by one end of the range of its ops."""
    clock = _Clock(end, MAX_TRACE_SPANS if is_drawn else 0)
    timing = Timing(spent=clock.spent, drawn=clock.drawn)
    clock.run(steps, ())
    timing.seconds = clock.now
    return timing


class _Clock:
    """Runs steps. What is under way is known by the op that started it."""

    def __init__(self, end: End, most_drawn: int):
        self.end, self.most_drawn = end, most_drawn
        self.now = 0.0
        self.free: dict[str, float] = {}  # lane -> when its last transfer ends
        self.pending: dict[str, tuple[ScheduledOp, float]] = {}
        self.spent: dict[OpKey, OpSeconds] = defaultdict(OpSeconds)
        self.drawn: list[TraceSpan] = []

    def run(self, steps: Sequence[ScheduledOp], stack: tuple[OpKey, ...]) -> None:
        """All steps in order."""
        for step in steps:
            if step.kind == "loop":
                self._loop(step, stack)
            elif step.kind == "branches":
                self.run(max(step.inside, key=self._alone, default=()), (*stack, step.key))
            elif step.kind == "call":
                self.run(step.inside[0], (*stack, step.key))
            else:
                self._op(step, stack)

    def _op(self, step: ScheduledOp, stack: tuple[OpKey, ...]) -> None:
        if step.begins is not None:
            self._begin(step, step.begins, stack)
        elif step.awaits is not None:
            self._await(step, stack)
        elif step.at_once is not None:
            spent, seconds = self.spent[step.key], step.at_once.seconds
            begun = max(self.now, self.free.get(step.at_once.lane, 0.0))
            self._draw(step.at_once.kind, step.op.name, begun, seconds, stack)
            spent.runs += 1
            spent.transfer += seconds
            spent.exposed += begun + seconds - self.now
            self.now = self.free[step.at_once.lane] = begun + seconds
        elif step.cost is not None:
            spent = self.spent[step.key]
            seconds = step.cost.low if self.end == "low" else step.cost.high
            self._draw("compute", step.op.name, self.now, seconds, (*stack, step.key))
            spent.runs += 1
            spent.busy += seconds
            self.now += seconds

    def _begin(self, step: ScheduledOp, transfer: Transfer, stack: tuple[OpKey, ...]) -> None:
        begun = max(self.now, self.free.get(transfer.lane, 0.0))
        self.free[transfer.lane] = begun + transfer.seconds
        self.pending[step.op.name] = step, begun + transfer.seconds
        spent = self.spent[step.key]
        spent.runs += 1
        spent.transfer += transfer.seconds
        self._draw(transfer.kind, step.op.name, begun, transfer.seconds, stack)

    def _await(self, step: ScheduledOp, stack: tuple[OpKey, ...]) -> None:
        assert step.awaits is not None
        name = step.awaits
        if not name:
            stem = step.op.opcode.removesuffix("-done")
            same = [key for key, (begun, _) in self.pending.items() if begun.op.opcode.removesuffix("-start") == stem]
            name = same[0] if same else ""
        if name not in self.pending:
            return
        begun, until = self.pending.pop(name)
        wait = max(0.0, until - self.now)
        self.spent[begun.key].exposed += wait
        if wait:
            self._draw("waiting", name, self.now, wait, stack)
        self.now += wait

    def _loop(self, step: ScheduledOp, stack: tuple[OpKey, ...]) -> None:
        """Turn by turn, until one begins as the one before it did: from there all are equal."""
        outer, inner = self.spent, (*stack, step.key)
        before: tuple[tuple[str, float], ...] | None = None
        started, last = self.now, outer
        for turn in range(step.trips):
            at = self._relative()
            if at == before and len(self.drawn) >= self.most_drawn:
                self._repeat(step, step.trips - turn, self.now - started, last, outer, inner)
                break
            started, before, last = self.now, at, defaultdict(OpSeconds)
            self.spent = last
            self.run(step.inside[0], inner)
            self.spent = outer
            for key, spent in last.items():
                outer[key].add(spent, 1)

    def _repeat(
        self,
        step: ScheduledOp,
        times: int,
        seconds: float,
        spent: dict[OpKey, OpSeconds],
        outer: dict[OpKey, OpSeconds],
        stack: tuple[OpKey, ...],
    ) -> None:
        for key, one in spent.items():
            outer[key].add(one, times)
        self._draw("compute", f"{step.op.name}: {times} more", self.now, seconds * times, stack, times)
        self.now += seconds * times
        self.free = {lane: until + seconds * times for lane, until in self.free.items()}
        self.pending = {name: (begun, until + seconds * times) for name, (begun, until) in self.pending.items()}

    def _relative(self) -> tuple[tuple[str, float], ...]:
        """What is under way, as it lies to the clock: what is over does not matter."""
        ends = [*self.free.items(), *((name, until) for name, (_, until) in self.pending.items())]
        return tuple(sorted((name, round(max(0.0, until - self.now), 12)) for name, until in ends))

    def _alone(self, steps: Sequence[ScheduledOp]) -> float:
        """How long a branch takes by itself, its longest end."""
        return simulate_schedule(steps, "high").seconds

    def _draw(
        self, lane: str, name: str, start: float, seconds: float, stack: tuple[OpKey, ...], turns: int = 1
    ) -> None:
        if self.most_drawn and seconds:
            self.drawn.append(TraceSpan(lane, name, start, seconds, stack, turns))
