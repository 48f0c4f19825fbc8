"""Lines of an HLO module: instructions, operands, shapes and their bytes. Knows nothing of what they mean together."""

import functools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple

# Their results hold the values of their first operand.
SAME_VALUE = {"copy", "copy-start", "copy-done", "bitcast", "convert", "reshape"}
_BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}  # the others say it in their name

ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")  # type, sizes, layout

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


def instructions(text: str) -> Iterator[Instruction]:
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


def operands_of(rest: str) -> tuple[str, ...]:
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


def op_name_of(rest: str) -> str:
    """The traced operation that an instruction comes from, or the name of an argument; "" if the compiler lost it."""
    match = _OP_NAME.search(rest)
    return match[1].replace('\\"', '"').replace("\\'", "'") if match else ""


def output_of(instruction: Instruction) -> str:
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


def bytes_of(shape: str) -> int:
    """Bytes of an array or of all arrays in a tuple."""
    return sum(array_bytes(match) for match in ARRAY.finditer(shape))


def sizes_in(shape: str) -> tuple[tuple[int, ...], ...]:
    """The sizes of an array, or of each array in a tuple."""
    return tuple(sizes_of(match) for match in ARRAY.finditer(shape))


def sizes_of(match: re.Match[str]) -> tuple[int, ...]:
    """The sizes of an array that `ARRAY` matched."""
    return tuple(int(size.lstrip("<=")) for size in match[2].split(",") if size)


def array_bytes(match: re.Match[str], is_padded: bool = False) -> int:
    """Bytes of an array that `ARRAY` matched, as packed values; or as they lie in memory, in whole tiles."""
    dims = list(sizes_of(match))
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
