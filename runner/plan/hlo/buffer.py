"""The largest arrays of a module, to tell a person what fills a device's memory."""

import heapq
import re
import sys
from dataclasses import dataclass

from runner.plan.hlo.program import read
from runner.plan.hlo.text import ARRAY, SAME_VALUE, array_bytes, instructions, op_name_of, operands_of, output_of

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


def largest_arrays(text: str, number: int) -> list[Buffer]:
    """The `number` largest results of a module, largest first, each operation and shape once.

    Named are results in a device's main memory, and the arguments of the module; not what lives only within a fusion.
    How many of them are alive at a time, and which share one buffer, the text does not say.
    """
    program = read(text)
    outer = {program.entry} | {call.callee for call in program.calls if call.opcode in _CONTROL}
    sizes: dict[tuple[str, str], int] = {}
    op_names: dict[str, str] = {}
    for instruction in instructions(text):
        opcode, computation = instruction.opcode, instruction.computation
        if computation not in outer:
            continue
        op_name = op_name_of(instruction.rest)
        if not op_name and opcode in SAME_VALUE | {"get-tuple-element"}:
            op_name = op_names.get(operands_of(instruction.rest)[0], "")
        op_names[instruction.name] = sys.intern(op_name)
        if opcode in _NO_BUFFER or opcode.endswith(("-done", "-update")):
            continue
        if opcode == "parameter" and computation != program.entry:
            continue
        name = op_name or instruction.name
        for match in ARRAY.finditer(output_of(instruction)):
            if not _MEMORY_SPACE.search(match[3] or ""):
                key = name, f"{match[1]}[{match[2]}]"
                sizes[key] = max(sizes.get(key, 0), array_bytes(match, is_padded=True))
    largest = heapq.nlargest(number, sizes.items(), key=lambda item: item[1])
    return [Buffer(size, shape, name) for (name, shape), size in largest]
