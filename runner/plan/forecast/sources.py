"""Which line of whose source an op comes from: by the tables of files and stack frames that a module begins with.

The largest arrays of a module, to tell a person what fills a device's memory.
"""

import heapq
import re
import sys
from dataclasses import dataclass, field

from runner.plan.forecast.hlo import (
    ARRAY_PATTERN,
    VALUE_PRESERVING_OPCODES,
    count_array_bytes,
    get_output_shape,
    iter_instructions,
    parse_op_name,
    parse_operands,
    parse_program,
)

_ROW = re.compile(r'^(\d+) (?:"(.*)"|\{(.*)\})$', re.MULTILINE)
_FRAME_OF = re.compile(r"\bstack_frame_id=(\d+)")
_STATED = re.compile(r'source_file="([^"]*)"(?: source_line=(\d+))?')
_PACKAGES = re.compile(r".*/(?:site|dist)-packages/")
_TABLES = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
# Whoever traced a step stands outside of these functions, and is no part of it.
_OUTERMOST = {"trace_train_step.<locals>.step", "lower_train_step"}


@dataclass(frozen=True)
class StackFrame:
    """A call on the way to an op. `package` is where an installed file lies, "" for a file of one's own."""

    file: str
    line: int
    function: str

    @property
    def is_installed(self) -> bool:
        """Whether the file is a library's."""
        return bool(_PACKAGES.match(self.file)) or self.file.startswith("<") or "/lib/python" in self.file

    def __str__(self) -> str:
        """`file:line`, a library's file from its package on."""
        return f"{_PACKAGES.sub('', self.file)}:{self.line}"


@dataclass(frozen=True)
class SourceTable:
    """The calls that led to each op, innermost first, by the number of its innermost frame."""

    frames: dict[int, tuple[StackFrame, int]] = field(default_factory=dict)  # and the number of its caller, 0 if none

    def of(self, rest: str) -> str:
        """`file:line` of the innermost call that made an op, from its attributes; "" if the text lacks it."""
        calls = self.calls(rest)[:1]
        return "".join(f"{call.file}:{call.line}" if call.line else call.file for call in calls)

    def calls(self, rest: str) -> tuple[StackFrame, ...]:
        """The calls that led to an op, innermost first, from its attributes."""
        found: list[StackFrame] = []
        seen: set[int] = set()
        match = _FRAME_OF.search(rest)
        number = int(match[1]) if match else 0
        while number in self.frames and number not in seen:
            seen.add(number)
            frame, number = self.frames[number]
            if frame not in found:
                found.append(frame)
            if frame.function in _OUTERMOST:
                break
        if not found and (stated := _STATED.search(rest)):
            return (StackFrame(stated[1], int(stated[2] or 0), ""),)
        return tuple(found)


def parse_sources(text: str) -> SourceTable:
    """The tables in front of the first computation."""
    first = re.search(r"^(?:%|ENTRY )", text, re.MULTILINE)
    head = text[: first.start()] if first else text
    tables = {
        name: {int(row[1]): row[2] if row[2] is not None else row[3] for row in _ROW.finditer(_table(head, name))}
        for name in _TABLES
    }
    locations = {number: _numbers(row) for number, row in tables["FileLocations"].items()}
    frames = {}
    for number, row in tables["StackFrames"].items():
        values = _numbers(row)
        place = locations.get(values.get("file_location_id", 0), {})
        file = tables["FileNames"].get(place.get("file_name_id", 0), "")
        function = tables["FunctionNames"].get(place.get("function_name_id", 0), "")
        # The text counts callers from one, with one for none.
        frames[number] = StackFrame(file, place.get("line", 0), function), values.get("parent_frame_id", 1) - 1
    return SourceTable(frames)


def _table(head: str, name: str) -> str:
    return head.partition(f"\n{name}\n")[2].partition("\n\n")[0]


def _numbers(row: str) -> dict[str, int]:
    return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}


def find_source_line(calls: tuple[StackFrame, ...], library: str) -> str:
    """`file:line` of the innermost call in source that is neither installed nor below `library`, the runner's own.

    Where there is none, of the innermost that is not installed; else of the outermost call that is known; else "".
    """
    own = [frame for frame in calls if not frame.is_installed]
    users = [frame for frame in own if f"/{library}/" not in frame.file]
    found = (users or own or list(calls[-1:]))[:1]
    return str(found[0]) if found else ""


_MEMORY_SPACE = re.compile(r"S\([1-9]\d*\)")
_CONTROL = {"while", "conditional", "call"}
# Their results are made of the buffers of other instructions, or are none.
_NO_BUFFER = {"tuple", "get-tuple-element", "bitcast", "opt-barrier", "after-all", "send", *_CONTROL}


@dataclass(frozen=True)
class Buffer:
    """The result of one instruction, or several of the same shape from the same operation."""

    bytes: int  # with the padding of tiles
    shape: str
    op_name: str  # the traced operation that made it, or the name of an argument


def find_largest_arrays(text: str, number: int) -> list[Buffer]:
    """The `number` largest results of a module, largest first, each operation and shape once.

    Named are results in a device's main memory, and the arguments of the module; not what lives only within a fusion.
    How many of them are alive at a time, and which share one buffer, the text does not say.
    """
    program = parse_program(text)
    outer = {program.entry} | {call.callee for call in program.calls if call.opcode in _CONTROL}
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
        if opcode in _NO_BUFFER or opcode.endswith(("-done", "-update")):
            continue
        if opcode == "parameter" and computation != program.entry:
            continue
        name = op_name or instruction.name
        for match in ARRAY_PATTERN.finditer(get_output_shape(instruction)):
            if not _MEMORY_SPACE.search(match[3] or ""):
                key = name, f"{match[1]}[{match[2]}]"
                sizes[key] = max(sizes.get(key, 0), count_array_bytes(match, is_padded=True))
    largest = heapq.nlargest(number, sizes.items(), key=lambda item: item[1])
    return [Buffer(size, shape, name) for (name, shape), size in largest]
