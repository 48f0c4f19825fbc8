"""Parser of optimised HLO text: instructions, shapes, calls between computations, and loop trip counts.

The text of a compiled program has the same form on CPU, GPU and TPU, apart from the variants that are handled here, and
it can be read on a machine without these devices. The parser does not depend on jax, models or devices. One pass over
the text is enough, and the data that it keeps is small beside the text.

How collectives are read:

1. A collective runs once per run of the computation that contains it: once per call, and once per trip for the body of
   a `while`. The compiler states the trip count of most loops. Where it does not (TPU), the trip count follows from the
   counter's first value, step and bound. If these are not constants, the body counts once and `is_at_least` is set. All
   branches of a conditional count as taken.
2. An asynchronous collective counts where it starts. On TPU one collective may be spread over several fusions, each of
   which repeats it. These fusions share a `chain_id`, and the one that feeds `AsyncCollectiveStart` is counted.
3. An all-reduce inside a TPU fusion, of which each device keeps its own part, is a reduce-scatter. An all-reduce
   outside a fusion moves the whole array twice, whatever is sliced out of its result later: it stays an all-reduce.
4. Between TPU slices the runtime carries data from host to host, so a collective there is a `send` that names its kind.

Ids in a replica group are positions in the mesh's devices, row-major. A module with fewer partitions than the mesh has
devices is the program of one slice of several, and slices are the outermost split of the mesh.
"""

import functools
import graphlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Opcodes whose result holds the values of the first operand.
VALUE_PRESERVING_OPCODES = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"}

COLLECTIVE_KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
    "collective-broadcast",
)

ARRAY_PATTERN = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")  # type, sizes, layout

# Widths of types whose name does not end in their number of bits.
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}

# `  ROOT %name = shape opcode(operands), attributes`
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)(\(.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+)")
_ENTRY = re.compile(r"^ENTRY %?([\w.\-]+)", re.MULTILINE)
_PARTITIONS = re.compile(r"\bnum_partitions=(\d+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_TILE = re.compile(r"T\(([\d,]+)\)")

_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
# Part of the backend_config of a `while`.
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')

_CHAIN = re.compile(r'channel_id=(\d+).*chain_id="(\d+)"')
# Attributes of transfers by Megascale, the runtime that connects TPU slices.
_BETWEEN_SLICES = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_SLICES = re.compile(r'_xla_megascale_target=(?:"(\{[\d,:]+\})|(\{\{[\d,{}]+\}\}))')
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{} ]*\})?\}")
_GROUPS = re.compile(
    r"replica_groups=(\{\}|\{\{[\d,{} ]*\}\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|mesh\[[^\]]*\](?:, device_ids=\([^()]*(?:\([^()]*\))?\))?(?: \{[^}]*\})?)"
)

# Scalars of these opcodes are kept, since the trip count of a loop may depend on them.
_SCALAR = re.compile(r"\(?(?:[su](?:8|16|32|64)|pred)\[\]")
_SCALAR_OPCODES = {"constant", "add", "subtract", "compare", "get-tuple-element", *VALUE_PRESERVING_OPCODES}
_FLIPPED_DIRECTIONS = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class Instruction(NamedTuple):
    """One line of a computation."""

    computation: str
    is_root: bool
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def iter_instructions(text: str) -> Iterator[Instruction]:
    """Yield every instruction of a module, in the order of the text."""
    computation, start = "", 0
    # `str.splitlines` would hold a second copy of the text, which is long for a large model.
    while start < len(text):
        end = text.find("\n", start)
        end = len(text) if end < 0 else end
        line = text[start:end]
        start = end + 1
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            header = _COMPUTATION.match(line)
            computation = header[1] if header else ""
        elif line.startswith(" ") and (match := _INSTRUCTION.match(line)):
            yield Instruction(computation, bool(match[1]), match[2], match[3], match[4], match[5])


def parse_operands(rest: str) -> tuple[str, ...]:
    """Return the names of the operands, whether or not the text prints their types."""
    depth, end = 0, len(rest)
    for match in re.finditer(r"[()]", rest):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            end = match.start()
            break
    inside = rest[1:end]
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    return tuple(part.split()[-1] for part in inside.split(",") if part.strip()) or ("",)


def parse_op_name(rest: str) -> str:
    """Return the traced operation or argument that an instruction comes from, "" if the compiler dropped it."""
    match = _OP_NAME.search(rest)
    return match[1].replace('\\"', '"').replace("\\'", "'") if match else ""


def get_output_shape(instruction: Instruction) -> str:
    """Return the shape of an instruction's result; of an asynchronous start, without the state it carries along."""
    opcode, shape = instruction.opcode, instruction.shape
    if not shape.startswith("(") or not (opcode.endswith("-start") or opcode in ("send", "recv")):
        return shape
    elements = _split_tuple_shape(shape)
    if opcode in ("copy-start", "send", "recv"):
        return elements[0]
    # The start of a combined all-reduce is a flat tuple of results, without a copy of its operands.
    if opcode == "all-reduce-start" and not elements[0].startswith("("):
        return shape
    return elements[1]


def _split_tuple_shape(shape: str) -> list[str]:
    """Return the element shapes of a tuple's shape, without the index comments that the text holds."""
    elements, depth, start = [], 0, 1
    for match in re.finditer(r"[()\[\]{},]", shape):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if (match[0] == "," and depth == 1) or depth == 0:
            elements.append(re.sub(r"/\*.*?\*/", "", shape[start : match.start()]).strip())
            start = match.end()
    return elements


def parse_sizes(match: re.Match[str]) -> tuple[int, ...]:
    """Return the sizes of an array that `ARRAY_PATTERN` matched."""
    return tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)


def parse_shape_sizes(shape: str) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of an array, or of each array in a tuple."""
    return tuple(parse_sizes(match) for match in ARRAY_PATTERN.finditer(shape))


def count_shape_bytes(shape: str) -> int:
    """Return the bytes of an array, or of all arrays in a tuple, without padding."""
    return sum(count_array_bytes(match) for match in ARRAY_PATTERN.finditer(shape))


def count_array_bytes(match: re.Match[str], is_padded: bool = False) -> int:
    """Return the bytes of an array that `ARRAY_PATTERN` matched: packed values, or whole tiles of its layout."""
    sizes = list(parse_sizes(match))
    layout = match[3] or ""
    if is_padded and (tile := _TILE.search(layout)):
        tile_sizes = [int(size) for size in tile[1].split(",")]
        minor_to_major = [int(axis) for axis in layout.split(":")[0].split(",") if axis]
        for axis, size in zip(minor_to_major, reversed(tile_sizes), strict=False):
            sizes[axis] = -(-sizes[axis] // size) * size
    return -(-math.prod(sizes) * _get_bits(match[1]) // 8)


@functools.cache
def _get_bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[fsu](\d+)", dtype)
    if match is None:
        raise ValueError(f"{dtype}: unknown element type in HLO text; add its width to runner.plan.forecast.hlo")
    return int(match[1])


class ComputationCall(NamedTuple):
    """Call of one computation by an instruction of another."""

    caller: str
    callee: str
    opcode: str
    op_name: str
    loop: str  # name of the `while` whose body this is, or ""


class RawCollective(NamedTuple):
    """Collective as the text states it."""

    kind: str
    groups: str  # replica groups, source-target pairs or slices
    bytes: int  # size of one device's result
    instruction: Instruction
    chain: tuple[str, ...] = ()  # identity that the pieces of one asynchronous collective share
    is_between_slices: bool = False


class _Scalar(NamedTuple):
    """Scalar instruction on which the trip count of a loop may depend."""

    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclass
class HloProgram:
    """Collectives, calls and loops of a module."""

    entry: str = ""  # computation that a run begins with
    num_partitions: int = 0  # partitions of the program, 0 if the text does not say
    collectives: list[RawCollective] = field(default_factory=list)
    calls: list[ComputationCall] = field(default_factory=list)
    trips: dict[str, int] = field(default_factory=dict)  # trip counts of the loops that state them
    loops: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # state, condition and body of the other loops
    scalars: dict[str, _Scalar] = field(default_factory=dict)  # scalar instructions by name
    tuples: dict[str, tuple[str, ...]] = field(default_factory=dict)  # operands of each `tuple` instruction
    roots: dict[str, str] = field(default_factory=dict)  # root instruction of each computation
    states: set[str] = field(default_factory=set)  # names of parameters that are tuples, such as the state of a loop
    slices: dict[str, int] = field(default_factory=dict)  # all-reduce -> bytes of the part that is sliced out of it
    started: set[str] = field(default_factory=set)  # names of the operands of `AsyncCollectiveStart`


def parse_program(text: str) -> HloProgram:
    """Read a module in one pass over its instructions. Raises ValueError for an unknown form of replica groups."""
    program = HloProgram()
    if partitions := _PARTITIONS.search(text[: text.find("\n")]):
        program.num_partitions = int(partitions[1])
    if entry := _ENTRY.search(text):
        program.entry = entry[1]
    collective_names: set[str] = set()
    for instruction in iter_instructions(text):
        opcode, rest = instruction.opcode, instruction.rest
        if instruction.is_root:
            program.roots[instruction.computation] = instruction.name
        if collective := _parse_collective(instruction):
            program.collectives.append(collective)
            collective_names.add(instruction.name)
            continue
        if opcode == "dynamic-slice" and (name := parse_operands(rest)[0]) in collective_names:
            program.slices[name] = count_shape_bytes(instruction.shape)
        elif opcode == "parameter" and instruction.shape.startswith("("):
            program.states.add(instruction.name)
        elif opcode == "tuple":
            program.tuples[instruction.name] = parse_operands(rest)
        elif opcode == "custom-call" and 'custom_call_target="AsyncCollectiveStart"' in rest:
            program.started.update(parse_operands(rest))
        elif opcode in _SCALAR_OPCODES and _SCALAR.match(instruction.shape):
            program.scalars[instruction.name] = _Scalar(opcode, parse_operands(rest), rest[:200])
        # The end of an asynchronous op names the same computation as its start, which has counted already.
        if "=" not in rest or opcode.endswith(("-done", "-update")):
            continue
        called = {match[1]: match[2] for match in _CALLED.finditer(rest)}
        listed = _CALLED_LIST.search(rest)
        names = [*called.values(), *([name.strip(" %") for name in listed[1].split(",")] if listed else [])]
        for name in names:
            loop = instruction.name if name == called.get("body") else ""
            program.calls.append(ComputationCall(instruction.computation, name, opcode, parse_op_name(rest), loop))
        if opcode == "while":
            if trips := _TRIPS.search(rest):
                program.trips[instruction.name] = int(trips[1])
            else:
                program.loops[instruction.name] = (parse_operands(rest)[0], called["condition"], called["body"])
    return program


def _parse_collective(instruction: Instruction) -> RawCollective | None:
    opcode, rest = instruction.opcode, instruction.rest
    kind = opcode.removesuffix("-start")
    if kind in COLLECTIVE_KINDS:
        groups = (_PAIRS if kind == "collective-permute" else _GROUPS).search(rest)
        if groups is None and "replica_groups=" in rest:
            raise ValueError(f"{instruction.name}: replica groups of an unknown form in HLO text: {rest[:400]}")
        chain = _CHAIN.search(rest)
        num_bytes = count_shape_bytes(get_output_shape(instruction))
        return RawCollective(kind, groups[0] if groups else "", num_bytes, instruction, chain.groups() if chain else ())
    if opcode == "send" and (between := _BETWEEN_SLICES.search(rest)):
        slices = _SLICES.search(rest)
        if slices is None:
            raise ValueError(f"{instruction.name}: slices of an unknown form in HLO text: {rest[:400]}")
        kind = between[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        num_bytes = count_shape_bytes(get_output_shape(instruction))
        return RawCollective(kind, slices[1] or slices[2], num_bytes, instruction, is_between_slices=True)
    return None


class RunCount(NamedTuple):
    """Number of times that a computation runs in one run of the entry."""

    runs: int
    is_at_least: bool  # a lower bound, since the trip count of a loop around it is unknown


def count_runs(program: HloProgram) -> dict[str, RunCount]:
    """Return how often each computation runs in one run of the entry."""
    callers: dict[str, list[ComputationCall]] = defaultdict(list)
    for call in program.calls:
        callers[call.callee].append(call)
    graph = {callee: {call.caller for call in calls} for callee, calls in callers.items()}
    trips = count_trips(program)
    counts: dict[str, RunCount] = defaultdict(lambda: RunCount(0, False))
    for name in graphlib.TopologicalSorter(graph).static_order():
        runs, is_at_least = int(name == program.entry), False
        for call in callers.get(name, ()):
            times = trips[call.loop] if call.loop else 1
            runs += counts[call.caller].runs * (1 if times is None else times)
            is_at_least |= counts[call.caller].is_at_least or times is None
        counts[name] = RunCount(runs, is_at_least)
    # A module without calls has no edge in the graph.
    counts.setdefault(program.entry, RunCount(1, False))
    return counts


def count_trips(program: HloProgram) -> dict[str, int | None]:
    """Return the trip count of each `while`, None where it is unknown."""
    return {loop: _derive_trips(program, *parts) for loop, parts in program.loops.items()} | program.trips


def _derive_trips(program: HloProgram, state: str, condition: str, body: str) -> int | None:
    """Return the trip count of a loop that counts from one constant to another in constant steps, else None."""
    # The condition compares a counter with a bound, in either order.
    test = program.scalars.get(program.roots.get(condition, ""))
    direction = re.search(r"direction=(\w+)", test.rest) if test else None
    if test is None or direction is None:
        return None
    left, right = (_evaluate(program, name) for name in test.operands)
    compare = direction[1]
    if right and right.element is not None:
        left, right, compare = right, left, _FLIPPED_DIRECTIONS.get(compare, "")
    if not left or not right or left.element is None or right.element is not None:
        return None
    start = _evaluate(program, _get_tuple_element(program, state, left.element))
    step = _evaluate(program, _get_tuple_element(program, program.roots.get(body, ""), left.element))
    if not start or not step or start.element is not None or step.element != left.element or step.number == 0:
        return None
    distance = right.number - left.number - start.number
    if compare in ("LE", "GE"):
        distance += 1 if compare == "LE" else -1
    # A counter that steps away from its bound does not end the loop, so the text was not understood.
    if compare not in _FLIPPED_DIRECTIONS or ((compare in ("LT", "LE")) != (step.number > 0) and compare != "NE"):
        return None
    return max(-(-distance // step.number), 0)


def _get_tuple_element(program: HloProgram, name: str, index: int) -> str:
    """Return the name of the instruction that gives this element of a tuple, "" if unknown."""
    return dict(enumerate(program.tuples.get(name, ()))).get(index, "")


class _SymbolicValue(NamedTuple):
    """Constant `number`, or, if `element` is given, that element of the loop's state plus `number`."""

    element: int | None
    number: int


def _evaluate(program: HloProgram, name: str) -> _SymbolicValue | None:
    """Return the value of a scalar as far as it is known before the program runs, else None."""
    scalar = program.scalars.get(name)
    if scalar is None:
        return None
    if scalar.opcode == "constant":
        number = re.match(r"\((-?\d+)\)", scalar.rest)
        return _SymbolicValue(None, int(number[1])) if number else None
    if scalar.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", scalar.rest)
        return _SymbolicValue(int(index[1]), 0) if index and scalar.operands[0] in program.states else None
    values = [_evaluate(program, operand) for operand in scalar.operands]
    if scalar.opcode in VALUE_PRESERVING_OPCODES:
        return values[0]
    if scalar.opcode not in ("add", "subtract"):
        return None
    left, right = values
    if left is None or right is None:
        return None
    if scalar.opcode == "subtract":
        return _SymbolicValue(left.element, left.number - right.number) if right.element is None else None
    if left.element is not None and right.element is not None:
        return None
    element = right.element if left.element is None else left.element
    return _SymbolicValue(element, left.number + right.number)
