"""Live buffers (temporaries) in a device's HBM at each op of the schedule, and their peak.

A result is alive from the op that makes it to the last op that uses it. The state of a loop has one buffer, and so has
an array that is updated in place. The result of an elementwise op reuses the buffer of an operand of the same shape
that is no longer needed. Arguments, results of the whole program and constants are not temporaries. How a compiler
packs buffers, and what it reserves beside them, is not modelled; compare with the compiler's own figure.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.plan.forecast.hlo import Instruction, get_output_shape
from runner.plan.forecast.module import ArrayShape, HloModule, Op, parse_arrays
from runner.plan.forecast.schedule import OpKey

_ALIAS_OPCODES = {"bitcast", "opt-barrier", "add-dependency", "domain", "after-all"}
_TUPLE_OPCODES = {"tuple", "get-tuple-element"}
_ELEMENTWISE = {"add", "subtract", "multiply", "divide", "select", "maximum", "minimum", "negate", "exponential", "or"}
_ELEMENTWISE |= {"tanh", "all-reduce", "clamp", "rsqrt", "sqrt", "power", "and", "xor", "not", "log", "abs", "sort"}
_OPCODES_WITHOUT_BUFFER = {"parameter", "constant", "partition-id", "replica-id"}
_OPCODES_WITHOUT_BUFFER |= {"send", "recv", "recv-done", "send-done"}
_INDEX = re.compile(r"\bindex=(\d+)")
_ALIASED_OPERAND = re.compile(r"output_to_operand_aliasing=\{\{\}: \((\d+),")
_NO_TEMPORARY = -1  # buffer number of a value that is not a temporary of the computation

_BufferTree = int | tuple["_BufferTree", ...]  # buffer number of an array, or those of a tuple


class LiveBuffer(NamedTuple):
    """Array that is alive."""

    bytes: int
    shape: str
    op: Op


@dataclass(frozen=True)
class LiveMemory:
    """Bytes of live temporaries.

    Attributes:
        own_bytes: op -> bytes of its own computation that are alive while it runs.
        inner_bytes: op that runs other computations -> peak bytes of these.
        buffers: op -> live buffers, for ops that are the peak of their computation.
        peak: peak bytes of the whole program.
        peak_stack: ops that run at the peak, outermost first.
    """

    own_bytes: dict[OpKey, int]
    inner_bytes: dict[OpKey, int]
    buffers: dict[OpKey, tuple[LiveBuffer, ...]] = field(repr=False, default_factory=dict)
    peak: int = 0
    peak_stack: tuple[OpKey, ...] = ()

    def count_bytes(self, stack: tuple[OpKey, ...]) -> int:
        """Return the bytes alive while these nested ops run."""
        return sum(self.own_bytes.get(key, 0) for key in stack)

    @property
    def peak_buffers(self) -> list[LiveBuffer]:
        """Buffers alive at the peak, largest first."""
        buffers = (buffer for key in self.peak_stack for buffer in self.buffers.get(key, ()))
        return sorted(buffers, key=lambda buffer: -buffer.bytes)


def compute_live_memory(module: HloModule) -> LiveMemory:
    """Return the bytes of temporaries that are alive at each op of a module."""
    own_bytes: dict[OpKey, int] = {}
    inner_bytes: dict[OpKey, int] = {}
    peak_buffers: dict[OpKey, tuple[LiveBuffer, ...]] = {}
    peaks: dict[str, tuple[int, tuple[OpKey, ...]]] = {}

    def find_peak(computation: str) -> tuple[int, tuple[OpKey, ...]]:
        # Computations that are called several times have one peak.
        if computation in peaks:
            return peaks[computation]
        peak: tuple[int, tuple[OpKey, ...]] = (0, ())
        peaks[computation] = peak
        ops = list(module.computations.get(computation, {}).values())
        for op, buffers in zip(ops, _BufferAssignment(module, computation).iter_live_buffers(), strict=True):
            key = computation, op.name
            own_bytes[key] = sum(buffer.bytes for buffer in buffers)
            # The computation inside a fusion has no buffers in HBM. The largest of several branches counts.
            callees = op.callees.values() if op.opcode in ("while", "conditional", "call") else ()
            inner_bytes[key], stack = max((find_peak(name) for name in callees), default=(0, ()))
            if own_bytes[key] + inner_bytes[key] > peak[0]:
                peak = own_bytes[key] + inner_bytes[key], (key, *stack)
                peak_buffers[key] = tuple(buffers)
        peaks[computation] = peak
        return peak

    return LiveMemory(own_bytes, inner_bytes, peak_buffers, *find_peak(module.entry))


class _BufferAssignment:
    """Buffers of one computation.

    Attributes:
        made: array, op and position of each buffer; a buffer's number is its index.
        values: op -> the buffers that hold its result.
        names: buffer -> ops whose results it holds.
        last_uses: buffer -> position of the last op that needs it.
        results: ops, with the element of a tuple, whose results the computation returns.
        uses: op -> position of the last op that names it as an operand.
    """

    def __init__(self, module: HloModule, computation: str):
        self.ops = list(module.computations.get(computation, {}).values())
        self.module, self.order = module, {op.name: index for index, op in enumerate(self.ops)}
        self.made: list[tuple[ArrayShape, Op, int]] = []
        self.values: dict[str, _BufferTree] = {}
        self.names: dict[int, list[str]] = defaultdict(list)
        self.last_uses: dict[int, int] = {}
        # The buffers of results belong to the caller, or to the result of the program.
        self.results = set(self._find_results(module.roots.get(computation, ""), None))
        self.uses: dict[str, int] = defaultdict(int)
        for index, op in enumerate(self.ops):
            for name in op.operands:
                self.uses[name] = index

    def iter_live_buffers(self) -> Iterator[list[LiveBuffer]]:
        """Yield the buffers that are alive while each op runs."""
        for index, op in enumerate(self.ops):
            self.values[op.name] = self._assign(op, index)
            for number in _iter_leaves(self.values[op.name]):
                self.names[number].append(op.name)
            # An op that only names a value does not need its buffer; the users of the name do.
            if op.opcode not in _ALIAS_OPCODES | _TUPLE_OPCODES:
                for name in op.operands:
                    for number in _iter_leaves(self.values.get(name, _NO_TEMPORARY)):
                        self.last_uses[number] = index
        # A buffer without a use is alive only while the op runs that makes it.
        ends: dict[int, list[int]] = defaultdict(list)
        begins: dict[int, list[int]] = defaultdict(list)
        for number, (_, _, born) in enumerate(self.made):
            begins[born].append(number)
            ends[max(self.last_uses.get(number, born), born)].append(number)
        current: dict[int, LiveBuffer] = {}
        for index in range(len(self.ops)):
            for number in begins[index]:
                array, op, _ = self.made[number]
                shape = f"{array.dtype}[{','.join(map(str, array.dims))}]"
                current[number] = LiveBuffer(array.hbm_bytes, shape, op)
            yield list(current.values())
            for number in ends[index]:
                del current[number]

    def _assign(self, op: Op, index: int) -> _BufferTree:
        """Return the buffers of an op's result, new ones where it reuses none."""
        operand = self.values.get(op.operands[0], _NO_TEMPORARY) if op.operands else _NO_TEMPORARY
        if op.opcode in _OPCODES_WITHOUT_BUFFER:
            return _NO_TEMPORARY
        if op.opcode == "tuple":
            return tuple(self.values.get(name, _NO_TEMPORARY) for name in op.operands)
        if op.opcode == "get-tuple-element":
            if not isinstance(operand, tuple):
                return operand
            element = int(stated[1]) if (stated := _INDEX.search(op.rest)) else 0
            return operand[element] if element < len(operand) else _NO_TEMPORARY
        if op.opcode in _ALIAS_OPCODES or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            return operand
        # The shape of an asynchronous start also lists its operands.
        is_start = op.opcode.endswith("-start")
        output = get_output_shape(Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest))
        arrays = parse_arrays(output if is_start else op.shape)
        leaves = []
        for element, array in enumerate(arrays):
            is_result = (op.name, element) in self.results or (op.name, None) in self.results
            number: int | None = _NO_TEMPORARY
            if not is_result and array.hbm_bytes:
                number = self._find_reused_buffer(op, element, array, index)
            if number is None:
                self.made.append((array, op, index))
                number = len(self.made) - 1
            leaves.append(number)
        return tuple(leaves) if len(leaves) != 1 or (op.shape.startswith("(") and not is_start) else leaves[0]

    def _find_reused_buffer(self, op: Op, element: int, array: ArrayShape, index: int) -> int | None:
        """Return the buffer of an operand that an element of the result reuses, None if it needs a new one."""
        aliased = _ALIASED_OPERAND.search(op.rest)
        # A kernel may state that it writes into an operand.
        updated = int(aliased[1]) if aliased else self._find_updated_operand(op, element)
        is_elementwise = op.opcode in _ELEMENTWISE or (op.opcode == "fusion" and "kind=kLoop" in op.rest)
        candidates = [updated] if updated is not None else range(len(op.operands)) if is_elementwise else []
        for position in candidates:
            name = op.operands[position] if position < len(op.operands) else ""
            value = self.values.get(name, _NO_TEMPORARY)
            # An operand that a later op needs keeps its buffer.
            if isinstance(value, tuple) or self.uses[name] > index:
                continue
            if value == _NO_TEMPORARY:
                if updated is not None:
                    return _NO_TEMPORARY
                continue
            there = self.made[value][0]
            # The buffer may have other names, by which later ops use it.
            is_needed = any(self.uses[other] > index for other in self.names[value])
            if not is_needed and (there.dims, there.dtype) == (array.dims, array.dtype):
                return value
        return None

    def _find_updated_operand(self, op: Op, element: int) -> int | None:
        """Return the position of the operand of which an element of the result is an update, None if none."""
        if op.opcode == "dynamic-update-slice":
            return 0
        inner = self.module.get_inner_computation(op) if op.opcode == "fusion" else ""
        if not inner:
            return None
        value: Op | None = self.module.get_root(inner)
        if value is not None and value.opcode == "tuple":
            value = self.module.get_operand(value, element)
        # Follow the updates of the root back to the parameter that they write into.
        while value is not None and value.opcode in ("bitcast", "dynamic-update-slice", "reshape"):
            is_update = value.opcode == "dynamic-update-slice"
            value = self.module.get_operand(value, 0)
            while is_update and value is not None and value.opcode == "bitcast":
                value = self.module.get_operand(value, 0)
            if is_update and value is not None and value.opcode == "parameter":
                return int(value.rest[1 : value.rest.index(")")])
        return None

    def _find_results(self, name: str, element: int | None) -> Iterator[tuple[str, int | None]]:
        """Yield the ops whose results the computation returns: the caller provides their buffers."""
        index = self.order.get(name)
        if index is None:
            return
        op = self.ops[index]
        if op.opcode == "tuple":
            for operand in op.operands if element is None else op.operands[element : element + 1]:
                yield from self._find_results(operand, None)
        elif op.opcode == "get-tuple-element" and (found := _INDEX.search(op.rest)):
            yield from self._find_results(op.operands[0], int(found[1]))
        elif op.opcode in _ALIAS_OPCODES or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            yield from self._find_results(op.operands[0] if op.operands else "", element)
        elif op.opcode != "parameter":
            yield name, element
            updated = self._find_updated_operand(op, element or 0)
            if updated is not None and updated < len(op.operands):
                yield from self._find_results(op.operands[updated], None)


def _iter_leaves(value: _BufferTree) -> Iterator[int]:
    if isinstance(value, tuple):
        for part in value:
            yield from _iter_leaves(part)
    elif value != _NO_TEMPORARY:
        yield value
