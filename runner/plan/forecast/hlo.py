"""What a compiled step communicates and what fills its memory, read from the text of its optimised HLO module.

Text in, numbers out: the text of a compiled program is the same on CPU, GPU and TPU up to the forms told here, and it
can be read where none of these devices is. Knows no jax, no model and no device.

How the text is read, in order:
1. Computations call each other. A collective runs once for every run of the computation that holds it: once for each
   call, and the body of a `while` once for each trip. The compiler states the trips of most loops; where it does not
   (TPU), they follow from the counter's first value, step and bound. Where these are no constants the body counts
   once, and `is_at_least` says so. All branches of a conditional count as taken.
2. An asynchronous collective counts where it starts. On TPU one may be spread over several fusions, each of which
   repeats it: these share a `chain_id`, and the one that `AsyncCollectiveStart` takes is counted.
3. An all-reduce of which each device of a group keeps its own part, inside a TPU's fusion, is a reduce-scatter. One
   that stands by itself moves the whole array twice, whatever is cut out of its result later: it is an all-reduce.
4. Between TPU slices the runtime carries data from host to host, so a collective there is a `send` that names its kind.

The ids in a replica group are positions in the mesh's devices, row-major. Where a module holds fewer partitions than
the mesh has devices it is the program of one slice of several, and slices are the outermost split of the mesh.

A module as a whole: which computation calls which, how often a loop turns, and the collectives as they stand.

One pass over the text; what it keeps is small beside it.

Lines of an HLO module: instructions, operands, shapes and their bytes. Knows nothing of what they mean together.

How often each computation of a module runs in one run of the program.
"""

import functools
import graphlib
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Their results hold the values of their first operand.
VALUE_PRESERVING_OPCODES = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"}
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}  # the others say it in their name

ARRAY_PATTERN = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")  # type, sizes, layout

_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)(\(.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+)")
_OPERAND = re.compile(r"%([\w.\-]+)")
_OP_NAME = re.compile(r'metadata=\{[^}]*?op_name="((?:[^"\\]|\\.)*)"')
_TILE = re.compile(r"T\(([\d,]+)\)")


class Instruction(NamedTuple):
    computation: str
    is_root: bool
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes


def iter_instructions(text: str) -> Iterator[Instruction]:
    """Every instruction, with the computation that it stands in."""
    computation, start = "", 0
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
    """Names of the operands, whether or not their types are printed before them."""
    inside = rest[1 : _closing(rest)]
    if "%" in inside:
        return tuple(_OPERAND.findall(inside))
    return tuple(part.split()[-1] for part in inside.split(",") if part.strip()) or ("",)


def _closing(text: str) -> int:
    """Where the parenthesis that `text` begins with is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    return len(text)


def parse_op_name(rest: str) -> str:
    """The traced operation that an instruction comes from, or the name of an argument; "" if the compiler lost it."""
    match = _OP_NAME.search(rest)
    return match[1].replace('\\"', '"').replace("\\'", "'") if match else ""


def get_output_shape(instruction: Instruction) -> str:
    """The shape of what an instruction makes, without what the start of an asynchronous one carries along."""
    opcode, shape = instruction.opcode, instruction.shape
    if not shape.startswith("(") or not (opcode.endswith("-start") or opcode in ("send", "recv")):
        return shape
    elements = _elements(shape)
    if opcode in ("copy-start", "send", "recv"):
        return elements[0]
    if opcode == "all-reduce-start" and not elements[0].startswith("("):
        return shape
    return elements[1]


def _elements(shape: str) -> list[str]:
    """The shapes in a tuple's shape."""
    elements, depth, start = [], 0, 1
    for match in re.finditer(r"[()\[\]{},]", shape):
        depth += (match[0] in "([{") - (match[0] in ")]}")
        if (match[0] == "," and depth == 1) or depth == 0:
            elements.append(re.sub(r"/\*.*?\*/", "", shape[start : match.start()]).strip())
            start = match.end()
    return elements


def count_shape_bytes(shape: str) -> int:
    """Bytes of an array or of all arrays in a tuple."""
    return sum(count_array_bytes(match) for match in ARRAY_PATTERN.finditer(shape))


def parse_shape_sizes(shape: str) -> tuple[tuple[int, ...], ...]:
    """The sizes of an array, or of each array in a tuple."""
    return tuple(parse_sizes(match) for match in ARRAY_PATTERN.finditer(shape))


def parse_sizes(match: re.Match[str]) -> tuple[int, ...]:
    """The sizes of an array that `ARRAY_PATTERN` matched."""
    return tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)


def count_array_bytes(match: re.Match[str], is_padded: bool = False) -> int:
    """Bytes of an array that `ARRAY_PATTERN` matched, as packed values; or as they lie in memory, in whole tiles."""
    dims = list(parse_sizes(match))
    layout = match[3] or ""
    if is_padded and (tile := _TILE.search(layout)):
        tile_sizes = [int(size) for size in tile[1].split(",")]
        minor_to_major = [int(axis) for axis in layout.split(":")[0].split(",") if axis]
        for axis, size in zip(minor_to_major, reversed(tile_sizes), strict=False):
            dims[axis] = -(-dims[axis] // size) * size
    return -(-math.prod(dims) * _bits(match[1]) // 8)


@functools.cache
def _bits(dtype: str) -> int:
    """Bits of one value: `bf16`, `f8e4m3fn`, `s4`, `u32` ..."""
    if dtype in _BITS:
        return _BITS[dtype]
    match = re.match(r"[fsu](\d+)", dtype)
    if match is None:
        raise ValueError(f"{dtype} is no element type that is known here")
    return int(match[1])


COLLECTIVE_KINDS = (
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
_ARITHMETIC = {"constant", "add", "subtract", "compare", "get-tuple-element", *VALUE_PRESERVING_OPCODES}


class ComputationCall(NamedTuple):
    """One computation names another."""

    caller: str
    callee: str
    opcode: str
    op_name: str
    loop: str  # the name of the `while` whose body this is, or ""


class RawCollective(NamedTuple):
    """A collective as it stands in the text."""

    kind: str
    groups: str  # replica groups, source-target pairs or slices
    bytes: int  # of what one device gets out
    instruction: Instruction
    chain: tuple[str, ...] = ()  # what the pieces of one asynchronous collective have in common
    is_between_slices: bool = False


class ScalarInstruction(NamedTuple):
    """An instruction on which the trips of a loop may depend."""

    opcode: str
    operands: tuple[str, ...]
    rest: str


@dataclass
class HloProgram:
    """What `parse_program` keeps of a module."""

    entry: str = ""
    num_partitions: int = 0
    found: list[RawCollective] = field(default_factory=list)
    calls: list[ComputationCall] = field(default_factory=list)
    trips: dict[str, int] = field(default_factory=dict)  # of the loops that state them
    loops: dict[str, tuple[str, str, str]] = field(default_factory=dict)  # state, condition and body of the others
    scalars: dict[str, ScalarInstruction] = field(default_factory=dict)
    tuples: dict[str, tuple[str, ...]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    states: set[str] = field(default_factory=set)  # parameters that are tuples
    slices: dict[str, int] = field(default_factory=dict)  # an all-reduce -> bytes of the part that is cut out of it
    started: set[str] = field(default_factory=set)  # what AsyncCollectiveStart takes


def parse_program(text: str) -> HloProgram:
    """Read a module in one pass over its instructions. Raises `ValueError` for replica groups of an unknown form."""
    program = HloProgram()
    if partitions := _PARTITIONS.search(text[: text.find("\n")]):
        program.num_partitions = int(partitions[1])
    if entry := _ENTRY.search(text):
        program.entry = entry[1]
    reduced: set[str] = set()
    for instruction in iter_instructions(text):
        opcode, rest = instruction.opcode, instruction.rest
        if instruction.is_root:
            program.roots[instruction.computation] = instruction.name
        if found := _found(instruction):
            program.found.append(found)
            reduced.add(instruction.name)
        elif opcode == "dynamic-slice" and (name := parse_operands(rest)[0]) in reduced:
            program.slices[name] = count_shape_bytes(instruction.shape)
        elif opcode == "parameter" and instruction.shape.startswith("("):
            program.states.add(instruction.name)
        elif opcode == "tuple":
            program.tuples[instruction.name] = parse_operands(rest)
        elif opcode == "custom-call" and 'custom_call_target="AsyncCollectiveStart"' in rest:
            program.started.update(parse_operands(rest))
        elif opcode in _ARITHMETIC and _SCALAR.match(instruction.shape):
            program.scalars[instruction.name] = ScalarInstruction(opcode, parse_operands(rest), rest[:200])
        if not found and "=" in rest and not opcode.endswith(("-done", "-update")):
            _read_calls(program, instruction)
    return program


def _found(instruction: Instruction) -> RawCollective | None:
    """The collective that an instruction is or starts."""
    opcode, rest = instruction.opcode, instruction.rest
    kind = opcode.removesuffix("-start")
    if kind in COLLECTIVE_KINDS:
        groups = (_PAIRS if kind == "collective-permute" else _GROUPS).search(rest)
        if groups is None and "replica_groups=" in rest:
            raise ValueError(f"{instruction.name}: replica groups of a form that is not known here: {rest[:400]}")
        chain = _CHAIN.search(rest)
        size = count_shape_bytes(get_output_shape(instruction))
        return RawCollective(kind, groups[0] if groups else "", size, instruction, chain.groups() if chain else ())
    if opcode == "send" and (between := _BETWEEN_SLICES.search(rest)):
        slices = _SLICES.search(rest)
        if slices is None:
            raise ValueError(f"{instruction.name}: slices of a form that is not known here: {rest[:400]}")
        kind = between[1].lower().replace("_", "-").replace("one-to-one", "collective-permute")
        return RawCollective(
            kind,
            slices[1] or slices[2],
            count_shape_bytes(get_output_shape(instruction)),
            instruction,
            is_between_slices=True,
        )
    return None


def _read_calls(program: HloProgram, instruction: Instruction) -> None:
    """Note which computations an instruction calls, and if it is a loop, all that says how often."""
    opcode, rest = instruction.opcode, instruction.rest
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


_FLIPPED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE"}


class _Value(NamedTuple):
    """A constant, or (`element` given) that element of the loop's state plus a constant."""

    element: int | None
    number: int


def count_runs(program: HloProgram) -> dict[str, tuple[int, bool]]:
    """How often each computation runs in one run of the entry, and whether that is a lower bound."""
    callers: dict[str, list[ComputationCall]] = defaultdict(list)
    for call in program.calls:
        callers[call.callee].append(call)
    graph = {callee: {call.caller for call in calls} for callee, calls in callers.items()}
    trips = count_trips(program)
    counts: dict[str, tuple[int, bool]] = defaultdict(lambda: (0, False))
    for name in graphlib.TopologicalSorter(graph).static_order():
        runs, is_at_least = int(name == program.entry), False
        for call in callers.get(name, ()):
            times = trips[call.loop] if call.loop else 1
            runs += counts[call.caller][0] * (1 if times is None else times)
            is_at_least |= counts[call.caller][1] or times is None
        counts[name] = runs, is_at_least
    counts.setdefault(program.entry, (1, False))
    return counts


def count_trips(program: HloProgram) -> dict[str, int | None]:
    """Trips of each `while`, None where they are not known."""
    return {loop: _trips(program, *parts) for loop, parts in program.loops.items()} | program.trips


def _trips(program: HloProgram, state: str, condition: str, body: str) -> int | None:
    """Trips of a loop that counts from one constant to another in constant steps, else None."""
    test = program.scalars.get(program.roots.get(condition, ""))
    direction = re.search(r"direction=(\w+)", test.rest) if test else None
    if test is None or direction is None:
        return None
    left, right = (_value(program, name) for name in test.operands)
    compare = direction[1]
    if right and right.element is not None:
        left, right, compare = right, left, _FLIPPED.get(compare, "")
    if not left or not right or left.element is None or right.element is not None:
        return None
    start = _value(program, _element(program, state, left.element))
    step = _value(program, _element(program, program.roots.get(body, ""), left.element))
    if not start or not step or start.element is not None or step.element != left.element or step.number == 0:
        return None
    distance = right.number - left.number - start.number
    if compare in ("LE", "GE"):
        distance += 1 if compare == "LE" else -1
    if compare not in _FLIPPED or ((compare in ("LT", "LE")) != (step.number > 0) and compare != "NE"):
        return None
    return max(-(-distance // step.number), 0)


def _element(program: HloProgram, name: str, index: int) -> str:
    """Which instruction gives that element of a tuple, or ""."""
    return dict(enumerate(program.tuples.get(name, ()))).get(index, "")


def _value(program: HloProgram, name: str) -> _Value | None:
    """What is known of a scalar before the program runs."""
    scalar = program.scalars.get(name)
    if scalar is None:
        return None
    if scalar.opcode == "constant":
        number = re.match(r"\((-?\d+)\)", scalar.rest)
        return _Value(None, int(number[1])) if number else None
    if scalar.opcode == "get-tuple-element":
        index = re.search(r"index=(\d+)", scalar.rest)
        return _Value(int(index[1]), 0) if index and scalar.operands[0] in program.states else None
    values = [_value(program, operand) for operand in scalar.operands]
    if scalar.opcode in VALUE_PRESERVING_OPCODES:
        return values[0]
    if scalar.opcode not in ("add", "subtract"):
        return None
    left, right = values
    if left is None or right is None:
        return None
    if scalar.opcode == "subtract":
        return _Value(left.element, left.number - right.number) if right.element is None else None
    if left.element is not None and right.element is not None:
        return None
    return _Value(right.element if left.element is None else left.element, left.number + right.number)
