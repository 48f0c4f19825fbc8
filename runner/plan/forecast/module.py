"""The instructions of a module by computation, in the order in which the compiler has scheduled them.

Sizes, bytes and memories of what instructions make.
"""

import functools
import math
import re
from dataclasses import dataclass, field

from runner.plan.forecast.hlo import (
    ARRAY_PATTERN,
    HloProgram,
    count_array_bytes,
    count_trips,
    iter_instructions,
    parse_operands,
    parse_program,
    parse_sizes,
)

_SPACE = re.compile(r"S\((\d+)\)")
_HOST = 5  # XLA's number for the memory of the host


@dataclass(frozen=True)
class ArrayShape:
    """One array. `bytes` are those that it takes in memory, in whole tiles; `space` is 0 for main memory."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int

    @property
    def elements(self) -> int:
        """How many values it holds."""
        return math.prod(self.dims)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's main memory that it takes up."""
        return self.bytes if self.space == 0 else 0

    @property
    def main_bytes(self) -> int:
        """Bytes that go through main memory: none for what lies in the chip's fast memory."""
        return self.bytes if self.space in (0, _HOST) else 0


@functools.lru_cache(maxsize=65536)
def parse_arrays(shape: str) -> tuple[ArrayShape, ...]:
    """The array of a shape, or those of a tuple, in order."""
    found = []
    for match in ARRAY_PATTERN.finditer(shape):
        space = _SPACE.search(match[3] or "")
        found.append(
            ArrayShape(
                match[1], parse_sizes(match), count_array_bytes(match, is_padded=True), int(space[1]) if space else 0
            )
        )
    return tuple(found)


# A kernel's attributes hold its code, and its own notes, which begin new lines.
_CODE = re.compile(r'"body":"[^"]*"')
_NOTES = re.compile(r"kernel_metadata=\{\n(.*?)\n\}", re.DOTALL)
_CALLED = re.compile(r"\b(calls|to_apply|condition|body|true_computation|false_computation)=%?([\w.\-]+)")
_LISTED = re.compile(r"\b(?:branch_computations|called_computations)=\{([^}]*)\}")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}")
_NO_OPERANDS = {"parameter", "constant", "iota", "partition-id", "replica-id", "rng-bit-generator"}


@dataclass(frozen=True, slots=True)
class Op:
    """One instruction. `rest` is its operands and attributes, as they stand."""

    computation: str
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    called: tuple[tuple[str, str], ...] = ()  # attribute, computation

    @property
    def callees(self) -> dict[str, str]:
        """Attribute -> the computation that it names; branches are numbered."""
        return dict(self.called)


@dataclass(frozen=True)
class HloModule:
    """A module whose instructions can be asked for.

    Attributes:
        text: with each instruction on one line, and without the code of kernels.
        computations: name -> its ops by name, in scheduled order.
        roots: computation -> name of the op whose value it returns.
        trips: `while` op -> trips, None where they are not known.
        donated: element of the result -> number of the argument whose memory it takes.
    """

    text: str
    program: HloProgram
    computations: dict[str, dict[str, Op]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    trips: dict[str, int | None] = field(default_factory=dict)
    donated: dict[int, int] = field(default_factory=dict)

    @property
    def entry(self) -> str:
        """The computation that a run begins with."""
        return self.program.entry

    def root(self, computation: str) -> Op:
        """The op whose value a computation returns."""
        return self.computations[computation][self.roots[computation]]

    def operand(self, op: Op, index: int) -> Op | None:
        """What makes an operand of an op, None if there is none."""
        if index >= len(op.operands):
            return None
        return self.computations[op.computation].get(op.operands[index])

    def operands(self, op: Op) -> list[Op | None]:
        """What makes each operand of an op."""
        return [self.operand(op, index) for index in range(len(op.operands))]

    def fused(self, op: Op) -> str:
        """The computation inside a fusion, or what an op calls and waits for; "" if none."""
        return op.callees.get("calls", "") or (op.callees.get("to_apply", "") if op.opcode == "call" else "")


def load_module(text: str) -> HloModule:
    """Read a module. Raises `ValueError` for replica groups of an unknown form."""
    text = _NOTES.sub(lambda match: "kernel_metadata={" + match[1].replace("\n", " ") + "}", text)
    text = _CODE.sub('"body":""', text)
    program = parse_program(text)
    module = HloModule(text, program, trips=count_trips(program), donated=_donated(text))
    for one in iter_instructions(text):
        operands = () if one.opcode in _NO_OPERANDS else tuple(name for name in parse_operands(one.rest) if name)
        op = Op(one.computation, one.name, one.opcode, one.shape, operands, one.rest, _called(one.rest))
        module.computations.setdefault(one.computation, {})[one.name] = op
        if one.is_root:
            module.roots[one.computation] = one.name
    return module


def _called(rest: str) -> tuple[tuple[str, str], ...]:
    if "=" not in rest:
        return ()
    found = [(match[1], match[2]) for match in _CALLED.finditer(rest)]
    if listed := _LISTED.search(rest):
        found += [(f"branch {number}", name.strip(" %")) for number, name in enumerate(listed[1].split(","))]
    return tuple(found)


def _donated(text: str) -> dict[int, int]:
    head = text[: max(text.find("\n"), 0)]
    _, _, aliases = head.partition("input_output_alias={")
    found = {}
    for match in _ALIAS.finditer(aliases.partition("entry_computation_layout")[0]):
        index = [int(number) for number in match[1].split(",") if number.strip()]
        found[index[0] if index else 0] = int(match[2])
    return found
