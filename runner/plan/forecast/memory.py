"""What is alive in a device's main memory at each op, by the scheduled order: the step's temporaries.

A result is alive from the op that makes it to the last one that uses it. What a loop carries has one place, and so has
what is updated in place; a result takes the place of an operand of its own form that nothing needs any more, where the
op goes value by value. Arguments, results of the whole and constants are not temporaries. How a compiler packs
buffers, and what it reserves beside them, is not modelled: compare with its own figure.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from runner.plan.forecast.hlo import Instruction, get_output_shape
from runner.plan.forecast.module import ArrayShape, HloModule, Op, parse_arrays
from runner.plan.forecast.schedule import OpKey

_SAME = {"bitcast", "opt-barrier", "add-dependency", "domain", "after-all"}
_BY_VALUE = {"add", "subtract", "multiply", "divide", "select", "maximum", "minimum", "negate", "exponential", "tanh"}
_BY_VALUE |= {"all-reduce", "clamp", "rsqrt", "sqrt", "power", "and", "or", "xor", "not", "log", "abs", "sort"}
_NO_BUFFER = {"parameter", "constant", "partition-id", "replica-id", "send", "recv", "recv-done", "send-done"}
_INDEX = re.compile(r"\bindex=(\d+)")
_PLACED = re.compile(r"output_to_operand_aliasing=\{\{\}: \((\d+),")
_ELSEWHERE = -1  # a place that is not among the temporaries of the computation

Value = int | tuple["Value", ...]


class LiveBuffer(NamedTuple):
    """One array that is alive."""

    bytes: int
    shape: str
    op: Op


@dataclass(frozen=True)
class LiveMemory:
    """Bytes of temporaries.

    Attributes:
        at: op -> bytes alive while it runs, of its own computation.
        inside: op that runs other computations -> the most that these need at a time.
        peak: the most in the whole program.
        peak_stack: the ops that run at the peak, outermost first.
    """

    at: dict[OpKey, int]
    inside: dict[OpKey, int]
    held: dict[OpKey, tuple[LiveBuffer, ...]] = field(repr=False, default_factory=dict)
    peak: int = 0
    peak_stack: tuple[OpKey, ...] = ()

    def bytes_at(self, stack: tuple[OpKey, ...]) -> int:
        """Bytes alive while these ops run, one within the other."""
        return sum(self.at.get(key, 0) for key in stack)

    @property
    def at_peak(self) -> list[LiveBuffer]:
        """What is alive at the peak, the largest first."""
        return sorted((one for key in self.peak_stack for one in self.held.get(key, ())), key=lambda one: -one.bytes)


def compute_live_memory(module: HloModule) -> LiveMemory:
    """What is alive at each op of a module."""
    at: dict[OpKey, int] = {}
    inside: dict[OpKey, int] = {}
    held: dict[OpKey, tuple[LiveBuffer, ...]] = {}
    peaks: dict[str, tuple[int, tuple[OpKey, ...]]] = {}

    def peak_of(computation: str) -> tuple[int, tuple[OpKey, ...]]:
        if computation in peaks:
            return peaks[computation]
        best: tuple[int, tuple[OpKey, ...]] = (0, ())
        peaks[computation] = best
        ops = list(module.computations.get(computation, {}).values())
        for op, buffers in zip(ops, _Frame(module, computation).alive(), strict=True):
            key = computation, op.name
            at[key] = sum(one.bytes for one in buffers)
            callees = op.callees.values() if op.opcode in ("while", "conditional", "call") else ()
            within, stack = max((peak_of(name) for name in callees), default=(0, ()))
            inside[key] = within
            if at[key] + within > best[0]:
                best = at[key] + within, (key, *stack)
                held[key] = tuple(buffers)
        peaks[computation] = best
        return best

    peak, stack = peak_of(module.entry)
    return LiveMemory(at, inside, held, peak, stack)


class _Frame:
    """The buffers of one computation. A buffer's number is its index in `self.made`."""

    def __init__(self, module: HloModule, computation: str):
        self.ops = list(module.computations.get(computation, {}).values())
        self.module, self.order = module, {op.name: index for index, op in enumerate(self.ops)}
        self.made: list[tuple[ArrayShape, Op, int]] = []
        self.values: dict[str, Value] = {}
        self.names: dict[int, list[str]] = defaultdict(list)  # of a buffer
        self.last: dict[int, int] = {}
        self.results = set(self._results(module.roots.get(computation, ""), None))
        self.uses: dict[str, int] = defaultdict(int)
        for index, op in enumerate(self.ops):
            for name in op.operands:
                self.uses[name] = index

    def alive(self) -> Iterator[list[LiveBuffer]]:
        """What is alive while each op runs."""
        for index, op in enumerate(self.ops):
            self.values[op.name] = self._value(op, index)
            for number in _leaves(self.values[op.name]):
                self.names[number].append(op.name)
            if not self._is_name(op):
                for name in op.operands:
                    for number in _leaves(self.values.get(name, _ELSEWHERE)):
                        self.last[number] = index
        ends: dict[int, list[int]] = defaultdict(list)
        begins: dict[int, list[int]] = defaultdict(list)
        for number, (_, _, born) in enumerate(self.made):
            begins[born].append(number)
            ends[max(self.last.get(number, born), born)].append(number)
        current: dict[int, LiveBuffer] = {}
        for index in range(len(self.ops)):
            for number in begins[index]:
                array, op, _ = self.made[number]
                current[number] = LiveBuffer(array.held_bytes, f"{array.dtype}[{','.join(map(str, array.dims))}]", op)
            yield list(current.values())
            for number in ends[index]:
                del current[number]

    def _is_name(self, op: Op) -> bool:
        return op.opcode in _SAME or op.opcode in ("tuple", "get-tuple-element")

    def _value(self, op: Op, index: int) -> Value:
        operand = self.values.get(op.operands[0], _ELSEWHERE) if op.operands else _ELSEWHERE
        if op.opcode in _NO_BUFFER:
            return _ELSEWHERE
        if op.opcode == "tuple":
            return tuple(self.values.get(name, _ELSEWHERE) for name in op.operands)
        if op.opcode == "get-tuple-element":
            number = int(_INDEX.search(op.rest)[1]) if _INDEX.search(op.rest) else 0  # type: ignore[index]
            if isinstance(operand, tuple):
                return operand[number] if number < len(operand) else _ELSEWHERE
            return operand
        if op.opcode in _SAME or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            return operand
        is_start = op.opcode.endswith("-start")
        made = Instruction(op.computation, False, op.name, op.shape, op.opcode, op.rest)
        arrays = parse_arrays(get_output_shape(made)) if is_start else parse_arrays(op.shape)
        leaves = tuple(self._leaf(op, number, array, index, len(arrays)) for number, array in enumerate(arrays))
        return leaves if len(leaves) != 1 or (op.shape.startswith("(") and not is_start) else leaves[0]

    def _leaf(self, op: Op, number: int, array: ArrayShape, index: int, of: int) -> int:
        if (op.name, number) in self.results or (op.name, None) in self.results or not array.held_bytes:
            return _ELSEWHERE
        place = self._place_of(op, number, array, index, of)
        if place is not None:
            return place
        self.made.append((array, op, index))
        return len(self.made) - 1

    def _place_of(self, op: Op, number: int, array: ArrayShape, index: int, of: int) -> int | None:
        """The buffer of an operand whose place a result takes."""
        placed = _PLACED.search(op.rest)
        updated = int(placed[1]) if placed else self._updated(op, number)
        by_value = op.opcode in _BY_VALUE or (op.opcode == "fusion" and "kind=kLoop" in op.rest)
        candidates = [updated] if updated is not None else range(len(op.operands)) if by_value else []
        for position in candidates:
            name = op.operands[position] if position < len(op.operands) else ""
            value = self.values.get(name, _ELSEWHERE)
            if isinstance(value, tuple) or self.uses[name] > index:
                continue
            if value == _ELSEWHERE:
                if updated is not None:
                    return _ELSEWHERE
                continue
            there = self.made[value][0]
            is_needed = any(self.uses[other] > index for other in self.names[value])
            if not is_needed and (there.dims, there.dtype) == (array.dims, array.dtype):
                return value
        return None

    def _updated(self, op: Op, number: int) -> int | None:
        """Which operand a result is an updated form of."""
        if op.opcode == "dynamic-update-slice":
            return 0
        inner = self.module.fused(op) if op.opcode == "fusion" else ""
        if not inner:
            return None
        value: Op | None = self.module.root(inner)
        if value is not None and value.opcode == "tuple":
            value = self.module.operand(value, number)
        while value is not None and value.opcode in ("bitcast", "dynamic-update-slice", "reshape"):
            is_updated = value.opcode == "dynamic-update-slice"
            value = self.module.operand(value, 0)
            while is_updated and value is not None and value.opcode == "bitcast":
                value = self.module.operand(value, 0)
            if is_updated and value is not None and value.opcode == "parameter":
                return int(value.rest[1 : value.rest.index(")")])
        return None

    def _results(self, name: str, element: int | None) -> Iterator[tuple[str, int | None]]:
        """The ops whose results the computation returns: they lie where its caller wants them."""
        index = self.order.get(name)
        if index is None:
            return
        op = self.ops[index]
        if op.opcode == "tuple":
            for operand in op.operands if element is None else op.operands[element : element + 1]:
                yield from self._results(operand, None)
        elif op.opcode == "get-tuple-element" and (found := _INDEX.search(op.rest)):
            yield from self._results(op.operands[0], int(found[1]))
        elif op.opcode in _SAME or op.opcode == "while" or op.opcode.endswith(("-done", "-update")):
            yield from self._results(op.operands[0] if op.operands else "", element)
        elif op.opcode != "parameter":
            yield name, element
            updated = self._updated(op, element or 0)
            if updated is not None and updated < len(op.operands):
                yield from self._results(op.operands[updated], None)


def _leaves(value: Value) -> Iterator[int]:
    if isinstance(value, tuple):
        for part in value:
            yield from _leaves(part)
    elif value != _ELSEWHERE:
        yield value
