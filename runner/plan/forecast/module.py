"""Instructions of an HLO module by computation, in scheduled order, with the sizes and memories of their results.

Also their source lines, from the tables of files and stack frames at the start of the text, and the largest arrays.
"""

import functools
import heapq
import re
import sys
from dataclasses import dataclass, field

from runner.plan.forecast.hlo import (
    ARRAY_PATTERN,
    VALUE_PRESERVING_OPCODES,
    HloProgram,
    count_array_bytes,
    count_trips,
    get_output_shape,
    iter_instructions,
    parse_op_name,
    parse_operands,
    parse_program,
    parse_sizes,
)

# The memory space is a part of the layout: `{1,0:T(8,128)S(1)}`.
_SPACE = re.compile(r"S\((\d+)\)")
_HBM_SPACE = 0
_HOST_SPACE = 5

# The attributes of a kernel hold its code, and notes of its own that contain line breaks.
_KERNEL_CODE = re.compile(r'"body":"[^"]*"')
_KERNEL_NOTES = re.compile(r"kernel_metadata=\{\n(.*?)\n\}", re.DOTALL)
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_CALLED_LIST = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_OPCODES_WITHOUT_OPERANDS = {"parameter", "constant", "iota", "partition-id", "replica-id", "rng-bit-generator"}
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# `1 "file.py"` or `1 {file_name_id=1 line=7}`
_TABLE_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$', re.MULTILINE)
_FRAME_ID = re.compile(r"\bstack_frame_id=(\d+)")
# Some texts state file and line in the instruction instead.
_STATED_SOURCE = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")

# The callers of these functions only traced the step and are not part of it.
_OUTERMOST_FUNCTIONS = {"trace_train_step.<locals>.step", "lower_step"}

_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")
_CONTROL_FLOW = {"while", "conditional", "call"}
# Opcodes whose results consist of the buffers of other instructions, or have none.
_OPCODES_WITHOUT_BUFFER = {"tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "send", *_CONTROL_FLOW}


@dataclass(frozen=True)
class ArrayShape:
    """Shape of one array."""

    dtype: str  # element type as HLO names it
    dims: tuple[int, ...]
    bytes: int  # size in memory, in whole tiles
    space: int  # XLA's number of the memory that holds it; 0 is HBM

    @property
    def hbm_bytes(self) -> int:
        """Bytes of the device's HBM that the array occupies."""
        return self.bytes if self.space == _HBM_SPACE else 0

    @property
    def traffic_bytes(self) -> int:
        """Bytes that pass through HBM when the array is read or written: none for the chip's fast memory."""
        return self.bytes if self.space in (_HBM_SPACE, _HOST_SPACE) else 0


@functools.lru_cache(maxsize=65536)
def parse_arrays(shape: str) -> tuple[ArrayShape, ...]:
    """Return the array of a shape, or the arrays of a tuple, in order."""
    arrays = []
    for match in ARRAY_PATTERN.finditer(shape):
        space = _SPACE.search(match[3] or "")
        num_bytes = count_array_bytes(match, is_padded=True)
        arrays.append(ArrayShape(match[1], parse_sizes(match), num_bytes, int(space[1]) if space else _HBM_SPACE))
    return tuple(arrays)


@dataclass(frozen=True, slots=True)
class Op:
    """Instruction with its operands by name."""

    computation: str  # computation that contains it
    name: str  # unique within its computation
    opcode: str
    shape: str
    operands: tuple[str, ...]  # names of its operands
    rest: str  # text of operands and attributes
    called: tuple[tuple[str, str], ...] = ()  # pairs of an attribute and the computation that it names

    @property
    def callees(self) -> dict[str, str]:
        """Attribute -> the computation that it names. Branches of a conditional are numbered."""
        return dict(self.called)


@dataclass(frozen=True)
class HloModule:
    """Module whose instructions can be looked up by name."""

    text: str  # HLO with each instruction on one line, and without the code of kernels
    program: HloProgram  # calls, loops and collectives
    computations: dict[str, dict[str, Op]] = field(default_factory=dict)  # name -> its ops by name, in scheduled order
    roots: dict[str, str] = field(default_factory=dict)  # computation -> name of the op whose value it returns
    trips: dict[str, int | None] = field(default_factory=dict)  # `while` op -> trip count, None where it is unknown

    @property
    def entry(self) -> str:
        """Computation that a run begins with."""
        return self.program.entry

    def get_root(self, computation: str) -> Op:
        """Return the op whose value a computation returns."""
        return self.computations[computation][self.roots[computation]]

    def get_operand(self, op: Op, index: int) -> Op | None:
        """Return the op that makes an operand, None if there is none."""
        if index >= len(op.operands):
            return None
        return self.computations[op.computation].get(op.operands[index])

    def get_operands(self, op: Op) -> list[Op | None]:
        """Return the op that makes each operand."""
        return [self.get_operand(op, index) for index in range(len(op.operands))]

    def get_inner_computation(self, op: Op) -> str:
        """Return the computation inside a fusion, or the one that an op calls and waits for; "" if none."""
        return op.callees.get("calls", "") or (op.callees.get("to_apply", "") if op.opcode == "call" else "")


def load_module(text: str) -> HloModule:
    """Read a module. Raises ValueError for an unknown form of replica groups."""
    # Instructions are read by line, so line breaks inside them must go.
    text = _KERNEL_NOTES.sub(lambda match: "kernel_metadata={" + match[1].replace("\n", " ") + "}", text)
    text = _KERNEL_CODE.sub('"body":""', text)
    program = parse_program(text)
    module = HloModule(text, program, trips=count_trips(program))
    for one in iter_instructions(text):
        # The parentheses of these hold a number or a value, not a name.
        has_operands = one.opcode not in _OPCODES_WITHOUT_OPERANDS
        operands = tuple(name for name in parse_operands(one.rest) if name) if has_operands else ()
        called = []
        if "=" in one.rest:
            called = [(match[1], match[2]) for match in _CALLED.finditer(one.rest)]
            # Branches of a conditional with more than two have no names of their own.
            if listed := _CALLED_LIST.search(one.rest):
                called += [(f"branch {number}", name.strip(" %")) for number, name in enumerate(listed[1].split(","))]
        op = Op(one.computation, one.name, one.opcode, one.shape, operands, one.rest, tuple(called))
        module.computations.setdefault(one.computation, {})[one.name] = op
        if one.is_root:
            module.roots[one.computation] = one.name
    return module


@dataclass(frozen=True)
class StackFrame:
    """Function call on the way to an op."""

    file: str
    line: int
    function: str

    @property
    def is_installed(self) -> bool:
        """True if the file belongs to an installed library."""
        return bool(_PACKAGES.match(self.file)) or self.file.startswith("<") or "/lib/python" in self.file

    def __str__(self) -> str:
        """`file:line`. A library's file is relative to the directory of packages."""
        return f"{_PACKAGES.sub('', self.file)}:{self.line}"


@dataclass(frozen=True)
class _SourceTable:
    """Stack frames of a module."""

    # Frame number -> the frame and the number of its caller, 0 if none.
    frames: dict[int, tuple[StackFrame, int]] = field(default_factory=dict)

    def get_line(self, rest: str) -> str:
        """Return `file:line` of the innermost call that made an op, from its attributes; "" if unknown."""
        calls = self.get_calls(rest)[:1]
        return "".join(f"{call.file}:{call.line}" if call.line else call.file for call in calls)

    def get_calls(self, rest: str) -> tuple[StackFrame, ...]:
        """Return the calls that led to an op, innermost first, from its attributes."""
        calls: list[StackFrame] = []
        seen: set[int] = set()
        match = _FRAME_ID.search(rest)
        number = int(match[1]) if match else 0
        # The set of seen frames guards against a cycle in a damaged text.
        while number in self.frames and number not in seen:
            seen.add(number)
            frame, number = self.frames[number]
            if frame not in calls:
                calls.append(frame)
            if frame.function in _OUTERMOST_FUNCTIONS:
                break
        if not calls and (stated := _STATED_SOURCE.search(rest)):
            return (StackFrame(stated[1], int(stated[2] or 0), ""),)
        return tuple(calls)


def parse_sources(text: str) -> _SourceTable:
    """Read the tables of files and stack frames in front of the first computation."""
    first = re.search(r"^(?:%|ENTRY )", text, re.MULTILINE)
    head = text[: first.start()] if first else text
    tables = {}
    for name in _TABLES:
        table = head.partition(f"\n{name}\n")[2].partition("\n\n")[0]
        rows = _TABLE_ROW.finditer(table)
        tables[name] = {int(row[1]): row[2] if row[2] is not None else row[3] for row in rows}
    locations = {number: _parse_fields(row) for number, row in tables["FileLocations"].items()}
    frames = {}
    for number, row in tables["StackFrames"].items():
        fields = _parse_fields(row)
        location = locations.get(fields.get("file_location_id", 0), {})
        file = tables["FileNames"].get(location.get("file_name_id", 0), "")
        function = tables["FunctionNames"].get(location.get("function_name_id", 0), "")
        # The text numbers callers from one more than their frame, and writes one for none.
        frames[number] = StackFrame(file, location.get("line", 0), function), fields.get("parent_frame_id", 1) - 1
    return _SourceTable(frames)


def _parse_fields(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


def find_source_line(calls: tuple[StackFrame, ...], library: str) -> str:
    """Return `file:line` of the innermost call, of these from the innermost on, in the user's own source.

    The directory `library` holds the runner's own source. If no call is in the user's source, it is the innermost call
    outside of installed files, else the outermost known call, else "".
    """
    own = [frame for frame in calls if not frame.is_installed]
    users = [frame for frame in own if f"/{library}/" not in frame.file]
    found = (users or own or list(calls[-1:]))[:1]
    return str(found[0]) if found else ""


@dataclass(frozen=True)
class Buffer:
    """Result of instructions with the same shape from the same operation, or an argument; `bytes` include padding."""

    bytes: int
    shape: str
    op_name: str


def find_largest_arrays(text: str, number: int) -> list[Buffer]:
    """Return the `number` largest results of a module, largest first, each operation and shape once.

    Results in a device's HBM and the arguments of the module count; values that exist only within a fusion do not. The
    text does not say how many of them are alive at a time, nor which share one buffer.
    """
    program = parse_program(text)
    outer = {program.entry} | {call.callee for call in program.calls if call.opcode in _CONTROL_FLOW}
    sizes: dict[tuple[str, str], int] = {}
    op_names: dict[str, str] = {}
    for instruction in iter_instructions(text):
        opcode, computation = instruction.opcode, instruction.computation
        if computation not in outer:
            continue
        op_name = parse_op_name(instruction.rest)
        if not op_name and opcode in VALUE_PRESERVING_OPCODES | {"get-tuple-element"}:
            op_name = op_names.get(parse_operands(instruction.rest)[0], "")
        op_names[instruction.name] = sys.intern(op_name)
        if opcode in _OPCODES_WITHOUT_BUFFER or opcode.endswith(("-done", "-update")):
            continue
        # A parameter of an inner computation is a buffer of its caller.
        if opcode == "parameter" and computation != program.entry:
            continue
        name = op_name or instruction.name
        for match in ARRAY_PATTERN.finditer(get_output_shape(instruction)):
            if not _OTHER_MEMORY.search(match[3] or ""):
                key = name, f"{match[1]}[{match[2]}]"
                sizes[key] = max(sizes.get(key, 0), count_array_bytes(match, is_padded=True))
    largest = heapq.nlargest(number, sizes.items(), key=lambda item: item[1])
    return [Buffer(size, shape, name) for (name, shape), size in largest]
