"""What runs beside the ops: copies between memories, and collectives; where each starts, and where it is awaited."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from runner.plan.forecast.array import arrays_in
from runner.plan.forecast.matmul import matmuls_in
from runner.plan.forecast.module import Module, Op
from runner.plan.hlo.collective import Collective, located_collectives
from runner.plan.hlo.text import Instruction, output_of

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


def transfers_in(
    module: Module,
    mesh_sizes: Mapping[str, int],
    copy_bytes_per_second: float,
    seconds_of: Callable[[Collective], float],
) -> Transfers:
    """All transfers of a module. `seconds_of` is the time of one run of a collective."""
    found = Transfers()
    holders: dict[str, tuple[str, str]] = {}  # a computation -> the collective in it, and its chain
    for place, collective in located_collectives(module.text, mesh_sizes):
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


def _meet(module: Module, found: Transfers) -> None:
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


def _lift(module: Module, found: Transfers, holders: Mapping[str, tuple[str, str]]) -> None:
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


def _place(module: Module, found: Transfers, op: Op, collective: Op) -> None:
    """Say how the collective inside an op runs: started by it, beside its matmul, or alone."""
    key, inside = (op.computation, op.name), (collective.computation, collective.name)
    transfer = found.at_once[inside]
    if op.opcode.endswith("-start"):
        found.starts[key] = transfer
    elif matmuls_in(module, op):
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
    made = output_of(Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest))
    arrays = arrays_in(op.shape)
    target = arrays_in(made)
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
