"""The matrix multiplications in an op: `dot`, `convolution`, and those within fusions and library calls.

A TPU's compiler writes every matmul as a convolution. Batches, and the splitting or joining of sizes, stand there as
windows: of the positions of such a window only those count that fall on a value, and not on padding or dilation.

What a custom kernel costs: as it states it, or for attention kernels that state nothing, from their shapes.

How attention fills matrix units, which no kernel states, is told from the width of its heads.

Attention kernels are taken to be causal, as all those of this project are: of the blocks of queries and keys those
above the diagonal are left out, and the one on it is computed whole.

The bytes that an op moves in a device's main memory: each operand read once, each result written once.

What is cut out of a larger array counts by the cut, what is put into one in place by what is put in; inside a fusion
too. What a fusion hands on counts nothing, and neither does a collective that goes on beside it: its links count. What
lies in the chip's fast memory counts nothing, since a copy that is counted by itself brought it there.

The time of one run of an op: at its roofline, and by the compiler's estimate.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from runner.plan.forecast.collectives import Collective
from runner.plan.forecast.hlo import COLLECTIVE_KINDS
from runner.plan.forecast.module import ArrayShape, HloModule, Op, parse_arrays

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


def find_matmuls(module: HloModule, op: Op) -> list[Matmul]:
    """Those of an op, and of all that it calls in one run; a loop's are not its own."""
    if op.opcode == "dot":
        return [_dot(module, op, _DIMS)]
    if op.opcode == "convolution":
        return [_convolution(module, op)]
    if op.opcode == "custom-call" and _LIBRARY_MATMUL.search(op.rest):
        return [_dot(module, op, _LIBRARY_DIMS)]
    if op.opcode in ("fusion", "call", "async-start") and (inner := module.fused(op)):
        return [one for part in module.computations.get(inner, {}).values() for one in find_matmuls(module, part)]
    return []


def _dims(module: HloModule, op: Op, index: int) -> tuple[int, ...]:
    operand = module.operand(op, index)
    arrays = parse_arrays(operand.shape) if operand else ()
    return arrays[0].dims if arrays else ()


def _dot(module: HloModule, op: Op, form: re.Pattern[str]) -> Matmul:
    lhs, rhs = _dims(module, op, 0), _dims(module, op, 1)
    named = {(match[1], match[2]): [int(n) for n in re.findall(r"\d+", match[3])] for match in form.finditer(op.rest)}
    k = math.prod(lhs[dim] for dim in named.get(("lhs", "contracting"), ()) if dim < len(lhs))
    batch = math.prod(lhs[dim] for dim in named.get(("lhs", "batch"), ()) if dim < len(lhs))
    whole = max(k * batch, 1)
    return Matmul(batch, math.prod(lhs) // whole, math.prod(rhs) // whole, k)


def _convolution(module: HloModule, op: Op) -> Matmul:
    lhs, rhs, out = _dims(module, op, 0), _dims(module, op, 1), parse_arrays(op.shape)[0].dims
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


_COST = re.compile(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)"?(?:[^}]*?"bytes_accessed":"?(\d+)"?)?')
_BLOCK = re.compile(r'\\?"(block_\w+)\\?": (\d+)')
_ATTENTION = re.compile(r"splash|flash|attention|fmha", re.IGNORECASE)
# Products of (queries, head) by (head, keys), or of that size, in the kernels of one attention.
_FORWARD, _OF_QUERIES, _OF_KEYS, _FUSED_BACKWARD = 2, 3, 4, 5


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a kernel, and as they fill matrix units; `count_moved_bytes` is None where its arrays tell."""

    flops: int
    filled_flops: int
    moved_bytes: int | None = None


def is_kernel(op: Op) -> bool:
    """Whether an op runs code that the compiler has not made."""
    targets = ("tpu_custom_call", "triton_kernel_call", "__gpu$xla.gpu.triton", "__cudnn$", "mosaic_gpu")
    return op.opcode == "custom-call" and any(f'custom_call_target="{target}' in op.rest for target in targets)


def is_attention_kernel(op: Op) -> bool:
    """Whether a kernel's name says that it is attention's."""
    name = re.search(r'op_name="([^"]*)"', op.rest)
    return is_kernel(op) and bool(_ATTENTION.search(f"{op.name} {name[1] if name else ''} {op.rest[:300]}"))


def compute_kernel_cost(module: HloModule, op: Op, width: int) -> KernelCost | None:
    """What one run of a kernel costs, None if nothing is known of it."""
    by_shapes = _attention(module, op, width) if is_attention_kernel(op) else None
    if stated := _COST.search(op.rest):
        flops = int(stated[1])
        filled = flops if by_shapes is None else flops * by_shapes.filled_flops // by_shapes.flops
        return KernelCost(flops, filled, int(stated[2]) if stated[2] else None)
    return by_shapes


def _attention(module: HloModule, op: Op, width: int) -> KernelCost | None:
    arrays = [array for operand in module.operands(op) if operand for array in parse_arrays(operand.shape)]
    inputs = [array for array in arrays if len(array.dims) >= 3 and array.dtype in ("bf16", "f16", "f32")]
    if len(inputs) < 2:
        return None
    query, key = inputs[0], inputs[1]
    length, head, keys = query.dims[-2], query.dims[-1], key.dims[-2]
    blocks = {match[1]: int(match[2]) for match in _BLOCK.finditer(op.rest)}
    products, phase = _products(op)
    share = compute_causal_share(length, keys, *_sizes(blocks, phase, length, keys), _blocks_in_a_row(arrays))
    rows = math.prod(query.dims[:-2])
    scores, values = Matmul(rows, length, keys, head), Matmul(rows, length, head, keys)
    # Half of the products, or one more, make scores, whose inner size is the head; the others have it outside.
    outer = products - products // 2
    filled = outer * scores.filled_flops(width) + (products - outer) * values.filled_flops(width)
    return KernelCost(int(share * products * scores.flops), int(share * filled))


def _products(op: Op) -> tuple[int, str]:
    """How many products a kernel computes, and the name of its phase, which its block sizes have."""
    if "dkv" in op.name:
        # Of keys and values it makes the gradients, and an array for the sum of each; a fused one that of queries too.
        return (_FUSED_BACKWARD if len(parse_arrays(op.shape)) > 4 else _OF_KEYS), "_dkv"
    return (_OF_QUERIES, "_dq") if "dq" in op.name else (_FORWARD, "")


def _sizes(blocks: dict[str, int], phase: str, length: int, keys: int) -> tuple[int, int]:
    return blocks.get(f"block_q{phase}", length), blocks.get(f"block_kv{phase}", keys)


def _blocks_in_a_row(arrays: list[ArrayShape]) -> int | None:
    """Blocks of keys that a window leaves to a row of queries, from the table of blocks that a kernel is given."""
    tables = [array.dims[-1] for array in arrays if array.dtype in ("s8", "s32") and len(array.dims) == 3]
    return tables[0] if tables else None


def compute_causal_share(
    length: int, keys: int, block_q: int, block_kv: int, blocks_in_a_row: int | None = None
) -> float:
    """The part of all blocks that causal attention computes."""
    rows, columns = -(-length // block_q), -(-keys // block_kv)
    most = min(columns, blocks_in_a_row or columns)
    computed = sum(min(most, -(-min((row + 1) * block_q, keys) // block_kv)) for row in range(rows))
    return computed / (rows * columns)


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


def count_moved_bytes(module: HloModule, op: Op) -> int:
    """Bytes read from and written to main memory by one run of an op."""
    results = parse_arrays(op.shape)
    written = sum(_in_main(size, array) for size, array in zip(_written(module, op), results, strict=True))
    read: dict[str, int] = {}
    for index, name in enumerate(op.operands):
        operand = module.operand(op, index)
        if operand is not None:
            arrays = parse_arrays(operand.shape)
            size = _read(module, op, index, sum(array.bytes for array in arrays))
            read[name] = max(read.get(name, 0), min(size, sum(array.main_bytes for array in arrays)))
    return sum(read.values()) + written


def _in_main(size: int, array: ArrayShape) -> int:
    return min(size, array.bytes) if array.main_bytes else 0


def _read(module: HloModule, op: Op, index: int, whole: int) -> int:
    """Bytes that an op reads of its operand of `whole` bytes."""
    if op.opcode in _CUTS and index == 0:
        return sum(array.bytes for array in parse_arrays(op.shape))
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


def _read_inside(module: HloModule, value: Op, whole: int) -> int:
    """Bytes that the ops of a fused computation read of a value from outside."""
    total = 0
    for user in module.computations[value.computation].values():
        for index, name in enumerate(user.operands):
            if name == value.name and user.opcode != "tuple" and not user.opcode.startswith(COLLECTIVE_KINDS):
                is_same = user.opcode in _SAME
                total += _read_inside(module, user, whole) if is_same else _read(module, user, index, whole)
    return total


def _written(module: HloModule, op: Op) -> list[int]:
    """Bytes that an op writes of each of its results."""
    sizes = [array.bytes for array in parse_arrays(op.shape)]
    if op.opcode in ("dynamic-update-slice", "scatter"):
        update = module.operand(op, 1 if op.opcode == "dynamic-update-slice" else 2)
        return [sum(array.bytes for array in parse_arrays(update.shape))] if update and len(sizes) == 1 else sizes
    inner = module.fused(op) if op.opcode in ("fusion", "call") else ""
    if not inner:
        return sizes
    found = _made_inside(module, module.root(inner))
    return found if len(found) == len(sizes) else sizes


def _made_inside(module: HloModule, value: Op) -> list[int]:
    """Bytes written for a value that a fused computation returns."""
    if value.opcode == "tuple":
        parts = [part for part in module.operands(value) if part is not None]
        return [size for part in parts for size in _made_inside(module, part)]
    if value.opcode in ("bitcast", "reshape") and (source := module.operand(value, 0)) is not None:
        found = _made_inside(module, source)
        return found if len(found) == 1 else [sum(array.bytes for array in parse_arrays(value.shape))]
    if value.opcode == "parameter" or value.opcode.startswith(COLLECTIVE_KINDS):
        return [0] * len(parse_arrays(value.shape))
    return _written(module, value)


_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class DeviceRates:
    """What one device can do.

    Attributes:
        flops_per_second: of its matrix units, together.
        hbm_bytes_per_second: of its main memory.
        collective_seconds: the time of one run of a collective on its links.
        clock_hertz: what turns cycles into seconds; None where it is not known.
        matrix_unit_width: sizes of matmuls are filled up to it; 1 where that is not known.
    """

    flops_per_second: float
    hbm_bytes_per_second: float
    collective_seconds: Callable[[Collective], float]
    clock_hertz: float | None = None
    matrix_unit_width: int = 1


@dataclass(frozen=True)
class OpCost:
    """Seconds of one run, `low` at the roofline and `high` as estimated.

    Attributes:
        basis: `estimate`, `stated` by a kernel, `shapes` of an attention kernel, `roofline` where nothing else is
            known, or `unknown`, of a kernel that nothing but its arrays is known of.
        flops: of its matmuls, without what fills matrix units.
    """

    low: float
    high: float
    basis: str
    flops: int
    moved_bytes: int


def compute_cost(module: HloModule, op: Op, rates: DeviceRates) -> OpCost | None:
    """What one run of an op costs by itself; None for what costs nothing."""
    target = _TARGET.search(op.rest) if op.opcode == "custom-call" else None
    if op.opcode in FREE or op.opcode.endswith(("-done", "-update")) or (target and target[1] in NO_WORK):
        return None
    moved = count_moved_bytes(module, op)
    if is_kernel(op):
        kernel = compute_kernel_cost(module, op, rates.matrix_unit_width)
        if kernel is None:
            seconds = moved / rates.hbm_bytes_per_second
            return OpCost(seconds, seconds, "unknown", 0, moved)
        moved = moved if kernel.moved_bytes is None else min(moved, kernel.moved_bytes)
        seconds = max(kernel.filled_flops / rates.flops_per_second, moved / rates.hbm_bytes_per_second)
        return OpCost(seconds, seconds, "shapes" if kernel.moved_bytes is None else "stated", kernel.flops, moved)
    matmuls = find_matmuls(module, op)
    filled = sum(matmul.filled_flops(rates.matrix_unit_width) for matmul in matmuls)
    low = max(filled / rates.flops_per_second, moved / rates.hbm_bytes_per_second)
    flops = sum(matmul.flops for matmul in matmuls)
    cycles = _CYCLES.search(op.rest)
    if cycles is None or rates.clock_hertz is None:
        return OpCost(low, low, "roofline", flops, moved)
    return OpCost(low, int(cycles[1]) / rates.clock_hertz, "estimate", flops, moved)


def has_estimates(module: HloModule) -> bool:
    """Whether the compiler has written cycles beside its ops."""
    return _CYCLES.search(module.text) is not None
