"""A module as a whole: which computation calls which, how often a loop turns, and the collectives as they stand.

One pass over the text; what it keeps is small beside it.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.plan.hlo.text import SAME_VALUE, Instruction, bytes_of, instructions, op_name_of, operands_of, output_of

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)

_SCALAR = re.compile(r"\(?(?:[su](?:8|16|32|64)|pred)\[\]")
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target=(?:"(\{[\d,:]+\})|(\{\{[\d,{}]+\}\}))')
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}")
_GROUPS = re.compile(
    r"replica_groups=(\{\}|\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^()]*(?:\([^()]*\))?\))?(?: \{[^}]*\})?)"
)
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_ARITHMETIC = {"constant", "add", "subtract", "compare", "get-tuple-element", *SAME_VALUE}


class Call(NamedTuple):
    """One computation names another."""

    caller: str
    callee: str
    opcode: str
    op_name: str
    loop: str  # the name of the `while` whose body this is, or ""


class Found(NamedTuple):
    """A collective as it stands in the text."""

    kind: str
    groups: str  # replica groups, source-target pairs or slices
    bytes: int  # of what one device gets out
    instruction: Instruction
    chain: tuple[str, ...] = ()  # what the pieces of one asynchronous collective have in common
    is_between_slices: bool = False


class Scalar(NamedTuple):
    """An instruction on which the trips of a loop may depend."""

    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclass
class Program:
    """What `read` keeps of a module."""

    entry: str = ""
    num_partitions: int = 0
    found: list[Found] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    trips: dict[str, int] = field(default_factory=dict)  # of the loops that state them
    loops: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # state, condition and body of the others
    scalars: dict[str, Scalar] = field(default_factory=dict)
    tuples: dict[str, tuple[str, ...]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)  # parameters that are tuples
    slices: dict[str, int] = field(default_factory=dict)  # an all-reduce -> bytes of the part that is cut out of it
    started: set[str] = field(default_factory=set)  # what AsyncCollectiveStart takes


def read(text: str) -> Program:
    """Read a module in one pass over its instructions. Raises `ValueError` for replica groups of an unknown form."""
    program = Program()
    if partitions := _PARTITIONS.search(text[: text.find("\n")]):
        program.num_partitions = int(partitions[1])
    if entry := _ENTRY.search(text):
        program.entry = entry[1]
    reduced: set[str] = set()
    for instruction in instructions(text):
        opcode, rest = instruction.opcode, instruction.rest
        if instruction.is_root:
            program.roots[instruction.computation] = instruction.name
        if found := _found(instruction):
            program.found.append(found)
            reduced.add(instruction.name)
        elif opcode == "dynamic-slice" and (name := operands_of(rest)[0]) in reduced:
            program.slices[name] = bytes_of(instruction.shape)
        elif opcode == "parameter" and instruction.shape.startswith("("):
            program.states.add(instruction.name)
        elif opcode == "tuple":
            program.tuples[instruction.name] = operands_of(rest)
        elif opcode == "custom-call" and 'custom_call_target="AsyncCollectiveStart"' in rest:
            program.started.update(operands_of(rest))
        elif opcode in _ARITHMETIC and _SCALAR.match(instruction.shape):
            program.scalars[instruction.name] = Scalar(opcode, operands_of(rest), rest[:200])
        if not found and "=" in rest and not opcode.endswith(("-done", "-update")):
            _read_calls(program, instruction)
    return program


def _found(instruction: Instruction) -> Found | None:
    """The collective that an instruction is or starts."""
    opcode, rest = instruction.opcode, instruction.rest
    kind = opcode.removesuffix("-start")
    if kind in KINDS:
        groups = (_PAIRS if kind == "collective-permute" else _GROUPS).search(rest)
        if groups is None and "replica_groups=" in rest:
            raise ValueError(f"{instruction.name}: replica groups of a form that is not known here: {rest[:400]}")
        chain = _CHAIN.search(rest)
        size = bytes_of(output_of(instruction))
        return Found(kind, groups[0] if groups else "", size, instruction, chain.groups() if chain else ())
    if opcode == "send" and (between := _BETWEEN_SLICES.search(rest)):
        slices = _SLICES.search(rest)
        if slices is None:
            raise ValueError(f"{instruction.name}: slices of a form that is not known here: {rest[:400]}")
        kind = between[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        return Found(
            kind, slices[1] or slices[2], bytes_of(output_of(instruction)), instruction, is_between_slices=True
        )
    return None


def _read_calls(program: Program, instruction: Instruction) -> None:
    """Note which computations an instruction calls, and if it is a loop, all that says how often."""
    opcode, rest = instruction.opcode, instruction.rest
    called = {match[1]: match[2] for match in _CALLED.finditer(rest)}
    listed = _CALLED_LIST.search(rest)
    names = [*called.values(), *([name.strip(" %") for name in listed[1].split(",")] if listed else [])]
    for name in names:
        loop = instruction.name if name == called.get("body") else ""
        program.calls.append(Call(instruction.computation, name, opcode, op_name_of(rest), loop))
    if opcode == "while":
        if trips := _TRIPS.search(rest):
            program.trips[instruction.name] = int(trips[1])
        else:
            program.loops[instruction.name] = (operands_of(rest)[0], called["condition"], called["body"])
