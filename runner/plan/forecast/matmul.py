"""The matrix multiplications in an op: `dot`, `convolution`, and those within fusions and library calls.

A TPU's compiler writes every matmul as a convolution. Batches, and the splitting or joining of sizes, stand there as
windows: of the positions of such a window only those count that fall on a value, and not on padding or dilation.
"""

import math
import re
from dataclasses import dataclass

from runner.plan.forecast.array import arrays_in
from runner.plan.forecast.module import Module, Op

_DIMS = re.compile(r"\b(lhs|rhs)_(contracting|batch)_dims=\{([\d,]*)\}")
_LIBRARY_DIMS = re.compile(r'"(lhs|rhs)_(contracting|batch)_dimensions":\[([\d",]*)\]')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUPS = re.compile(r"(feature|batch)_group_count=(\d+)")
_LIBRARY_MATMUL = re.compile(r'custom_call_target="(?:__cublas\$|__onednn\$matmul|\w*gemm)')


@dataclass(frozen=True)
class Matmul:
    """`batch` products of (m, k) by (k, n)."""

    batch: int
    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    def filled_flops(self, width: int) -> int:
        """What it costs on matrix units of this width, which a smaller size leaves partly empty.

        One operand is held in the unit, width x width at a time, and the other streams past it; loading takes as long
        as `width` rows of the other do. Width 1: nothing is lost.
        """
        if width == 1:
            return self.flops
        m, n = (max(_up(size, min(8, width)), width) for size in (self.m, self.n))
        held = min(_up(self.n, width) * m, _up(self.m, width) * n)
        return 2 * self.batch * _up(self.k, width) * held


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def matmuls_in(module: Module, op: Op) -> list[Matmul]:
    """Those of an op, and of all that it calls in one run; a loop's are not its own."""
    if op.opcode == "dot":
        return [_dot(module, op, _DIMS)]
    if op.opcode == "convolution":
        return [_convolution(module, op)]
    if op.opcode == "custom-call" and _LIBRARY_MATMUL.search(op.rest):
        return [_dot(module, op, _LIBRARY_DIMS)]
    if op.opcode in ("fusion", "call", "async-start") and (inner := module.fused(op)):
        return [one for part in module.computations.get(inner, {}).values() for one in matmuls_in(module, part)]
    return []


def _dims(module: Module, op: Op, index: int) -> tuple[int, ...]:
    operand = module.operand(op, index)
    arrays = arrays_in(operand.shape) if operand else ()
    return arrays[0].dims if arrays else ()


def _dot(module: Module, op: Op, form: re.Pattern[str]) -> Matmul:
    lhs, rhs = _dims(module, op, 0), _dims(module, op, 1)
    named = {(match[1], match[2]): [int(n) for n in re.findall(r"\d+", match[3])] for match in form.finditer(op.rest)}
    k = math.prod(lhs[dim] for dim in named.get(("lhs", "contracting"), ()) if dim < len(lhs))
    batch = math.prod(lhs[dim] for dim in named.get(("lhs", "batch"), ()) if dim < len(lhs))
    whole = max(k * batch, 1)
    return Matmul(batch, math.prod(lhs) // whole, math.prod(rhs) // whole, k)


def _convolution(module: Module, op: Op) -> Matmul:
    lhs, rhs, out = _dims(module, op, 0), _dims(module, op, 1), arrays_in(op.shape)[0].dims
    labels = _LABELS.search(op.rest)
    if labels is None or not lhs or not rhs:
        return Matmul(1, math.prod(out), 1, 1)
    groups = {match[1]: int(match[2]) for match in _GROUPS.finditer(op.rest)}
    by_feature, by_batch = groups.get("feature", 1), groups.get("batch", 1)
    batch = by_feature * by_batch
    m = out[labels[3].index("b")] // (1 if by_feature > 1 else by_batch)
    n = out[labels[3].index("f")] // batch
    k = rhs[labels[2].index("i")]
    if by_batch > 1:
        m = lhs[labels[1].index("b")] // by_batch
    window = _WINDOW.search(op.rest)
    axes = _window(window[1]) if window else {}
    for number, letter in enumerate(sorted(set(labels[3]) - {"b", "f"})):
        taken, size = lhs[labels[1].index(letter)], rhs[labels[2].index(letter)]
        made = out[labels[3].index(letter)]
        valid = _valid(taken, size, made, {key: values[number] for key, values in axes.items()})
        if valid == made == size == taken:
            batch *= made
        elif valid == made == size and taken == 1:
            n *= made  # each result takes another part of what streams past one value: a size of the second operand
        else:
            m, k = m * made, k * -(-valid // max(made, 1))
    return Matmul(batch, m, n, k)


def _window(text: str) -> dict[str, list[tuple[int, int]]]:
    """`size=8x4 pad=0_0x3_3` -> name -> per axis (before, after), or the number twice."""
    found = {}
    for key, values in re.findall(r"(\w+)=([\d_x\-]+)", text):
        pairs = [[int(number) for number in value.split("_")] for value in values.split("x")]
        found[key] = [(pair[0], pair[-1]) for pair in pairs]
    return found


def _valid(taken: int, size: int, made: int, axis: dict[str, tuple[int, int]]) -> int:
    """Positions of a window, over all results of an axis, that fall on a value."""
    stride, before = axis.get("stride", (1, 1))[0], axis.get("pad", (0, 0))[0]
    spread, dilation = axis.get("lhs_dilate", (1, 1))[0], axis.get("rhs_dilate", (1, 1))[0]
    last = (taken - 1) * spread
    if stride == spread == dilation == 1:
        firsts = (max(0, before - step) for step in range(made))
        return sum(max(0, min(size, last + 1 + before - step) - first) for step, first in enumerate(firsts))
    total = 0
    for step in range(made):
        start = step * stride - before
        total += sum(
            1 for place in range(start, start + size * dilation, dilation) if 0 <= place <= last and place % spread == 0
        )
    return total
