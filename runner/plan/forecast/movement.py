"""The bytes that an op moves in a device's main memory: each operand read once, each result written once.

What is cut out of a larger array counts by the cut, what is put into one in place by what is put in; inside a fusion
too. What a fusion hands on counts nothing, and neither does a collective that goes on beside it: its links count. What
lies in the chip's fast memory counts nothing, since a copy that is counted by itself brought it there.
"""

from runner.plan.forecast.array import Array, arrays_in
from runner.plan.forecast.module import Module, Op
from runner.plan.hlo.program import KINDS

# They compute nothing: names for what is there, and what `schedule` treats by itself.
FREE = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "recv",
    "add-dependency",
    "opt-barrier",
    "partition-id",
    "replica-id",
    "domain",
}
NO_WORK = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
_CUTS = {"dynamic-slice", "slice", "gather"}
_SAME = {"bitcast", "reshape", "get-tuple-element"}


def moved_bytes(module: Module, op: Op) -> int:
    """Bytes read from and written to main memory by one run of an op."""
    results = arrays_in(op.shape)
    written = sum(_in_main(size, array) for size, array in zip(_written(module, op), results, strict=True))
    read: dict[str, int] = {}
    for index, name in enumerate(op.operands):
        operand = module.operand(op, index)
        if operand is not None:
            arrays = arrays_in(operand.shape)
            size = _read(module, op, index, sum(array.bytes for array in arrays))
            read[name] = max(read.get(name, 0), min(size, sum(array.main_bytes for array in arrays)))
    return sum(read.values()) + written


def _in_main(size: int, array: Array) -> int:
    return min(size, array.bytes) if array.main_bytes else 0


def _read(module: Module, op: Op, index: int, whole: int) -> int:
    """Bytes that an op reads of its operand of `whole` bytes."""
    if op.opcode in _CUTS and index == 0:
        return sum(array.bytes for array in arrays_in(op.shape))
    if op.opcode in ("dynamic-update-slice", "scatter") and index == 0:
        return 0
    inner = module.fused(op) if op.opcode in ("fusion", "call") else ""
    if not inner:
        return whole
    number = f"({index})"
    parameter = next(
        (part for part in module.computations[inner].values() if part.opcode == "parameter" and _is(part, number)), None
    )
    return whole if parameter is None else min(whole, _read_inside(module, parameter, whole))


def _is(parameter: Op, number: str) -> bool:
    return parameter.rest.startswith(number)


def _read_inside(module: Module, value: Op, whole: int) -> int:
    """Bytes that the ops of a fused computation read of a value from outside."""
    total = 0
    for user in module.computations[value.computation].values():
        for index, name in enumerate(user.operands):
            if name == value.name and user.opcode != "tuple" and not user.opcode.startswith(KINDS):
                is_same = user.opcode in _SAME
                total += _read_inside(module, user, whole) if is_same else _read(module, user, index, whole)
    return total


def _written(module: Module, op: Op) -> list[int]:
    """Bytes that an op writes of each of its results."""
    sizes = [array.bytes for array in arrays_in(op.shape)]
    if op.opcode in ("dynamic-update-slice", "scatter"):
        update = module.operand(op, 1 if op.opcode == "dynamic-update-slice" else 2)
        return [sum(array.bytes for array in arrays_in(update.shape))] if update and len(sizes) == 1 else sizes
    inner = module.fused(op) if op.opcode in ("fusion", "call") else ""
    if not inner:
        return sizes
    found = _made_inside(module, module.root(inner))
    return found if len(found) == len(sizes) else sizes


def _made_inside(module: Module, value: Op) -> list[int]:
    """Bytes written for a value that a fused computation returns."""
    if value.opcode == "tuple":
        parts = [part for part in module.operands(value) if part is not None]
        return [size for part in parts for size in _made_inside(module, part)]
    if value.opcode in ("bitcast", "reshape") and (source := module.operand(value, 0)) is not None:
        found = _made_inside(module, source)
        return found if len(found) == 1 else [sum(array.bytes for array in arrays_in(value.shape))]
    if value.opcode == "parameter" or value.opcode.startswith(KINDS):
        return [0] * len(arrays_in(value.shape))
    return _written(module, value)
