"""Instructions of an HLO module by computation, in scheduled order, with the sizes and memories of their results."""

import functools
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


@dataclass(frozen=True)
class ArrayShape:
    """Shape of one array.

    Attributes:
        dtype: element type as HLO names it.
        dims: sizes.
        bytes: size in memory, in whole tiles.
        space: XLA's number of the memory that holds it; 0 is HBM.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int

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
    """Instruction with its operands by name.

    Attributes:
        computation: computation that contains it.
        name: unique within its computation.
        opcode: HLO opcode.
        shape: shape of its result.
        operands: names of its operands.
        rest: text of operands and attributes.
        called: pairs of an attribute and the computation that it names.
    """

    computation: str
    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    rest: str
    called: tuple[tuple[str, str], ...] = ()

    @property
    def callees(self) -> dict[str, str]:
        """Attribute -> the computation that it names. Branches of a conditional are numbered."""
        return dict(self.called)


@dataclass(frozen=True)
class HloModule:
    """Module whose instructions can be looked up by name.

    Attributes:
        text: HLO with each instruction on one line, and without the code of kernels.
        program: calls, loops and collectives.
        computations: name -> its ops by name, in scheduled order.
        roots: computation -> name of the op whose value it returns.
        trips: `while` op -> trip count, None where it is unknown.
    """

    text: str
    program: HloProgram
    computations: dict[str, dict[str, Op]] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)
    trips: dict[str, int | None] = field(default_factory=dict)

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
    """Read a module.

    Raises:
        ValueError: replica groups have an unknown form.
    """
    # Instructions are read by line, so line breaks inside them must go.
    text = _KERNEL_NOTES.sub(lambda match: "kernel_metadata={" + match[1].replace("\n", " ") + "}", text)
    text = _KERNEL_CODE.sub('"body":""', text)
    program = parse_program(text)
    module = HloModule(text, program, trips=count_trips(program))
    for one in iter_instructions(text):
        # What stands in the parentheses of these is a number or a value, not a name.
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
