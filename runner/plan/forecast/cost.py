"""Cost of one run of an op: matmul FLOPs, HBM traffic, roofline time, and the compiler's own estimate.

**Matmuls** are `dot`, `convolution`, library calls, and those within fusions. A TPU's compiler writes every matmul as a
convolution. Batches, and the splitting or joining of sizes, appear there as windows. Only the positions of a window
that fall on a value are counted, not those on padding or dilation.

**Kernels** are counted by their stated cost, and by no less traffic than that of their arrays in whole tiles; attention
kernels without a stated cost by their shapes. The utilisation of matrix units by attention, which no kernel states, is
computed from the width of its heads. Attention kernels are assumed to be causal, as all those of this project are: the
blocks of queries and keys above the diagonal are left out, and the block on the diagonal is computed whole.

**HBM traffic** is each operand read once and each result written once. A slice of a larger array counts by the size of
the slice, and an update in place by the size of the update, inside a fusion too. Intermediate values of a fusion are
not counted. Neither are a collective that runs beside a fusion, which is counted on its links, and arrays in the chip's
fast memory, because the copy to that memory is counted separately.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from runner.plan.forecast.collectives import Collective
from runner.plan.forecast.hlo import COLLECTIVE_KINDS, count_shape_bytes
from runner.plan.forecast.module import HloModule, Op, parse_arrays

# `lhs_contracting_dims={1}` of a dot, and `"lhs_contracting_dimensions":["1"]` of a library call.
_DOT_DIMS = re.compile(r"\b(lhs|rhs)_(contracting|batch)_dims=\{([\d,]*)\}")
_LIBRARY_DIMS = re.compile(r'"(lhs|rhs)_(contracting|batch)_dimensions":\[([\d",]*)\]')
_LIBRARY_MATMUL = re.compile(r'custom_call_target="(?:__cublas\$|__onednn\$matmul|\w*gemm)')
_WINDOW = re.compile(r"window=\{([^}]*)\}")
# `dim_labels=b0f_0io->b0f`: the axes of both operands and the result.
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_GROUP_COUNT = re.compile(r"(feature|batch)_group_count=(\d+)")

_KERNEL_TARGETS = ("tpu_custom_call", "triton_kernel_call", "__gpu$xla.gpu.triton", "__cudnn$", "mosaic_gpu")
_STATED_COST = re.compile(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)"?(?:[^}]*?"bytes_accessed":"?(\d+)"?)?')
_BLOCK = re.compile(r'\\?"(block_\w+)\\?": (\d+)')
_ATTENTION = re.compile(r"splash|flash|attention|fmha", re.IGNORECASE)
# Products of (queries, head) by (head, keys), or of that size, in the kernels of one attention.
_FORWARD_PRODUCTS, _DQ_PRODUCTS, _DKV_PRODUCTS, _FUSED_BACKWARD_PRODUCTS = 2, 3, 4, 5

_CUDNN_ATTENTION = re.compile(r'custom_call_target="__cudnn\$fmha\w*?(Backward)?"')
_CUDNN_WINDOW = re.compile(r'"sliding_window_length": ?(\d+)')
_CUDNN_BLOCK = 128

# Opcodes that compute nothing: they name existing values, or `schedule` treats them by itself.
FREE_OPCODES = {
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
_FREE_TARGETS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding", "SPMDFullToShardShape"}
_SLICING_OPCODES = {"dynamic-slice", "slice", "gather"}
_UPDATING_OPCODES = {"dynamic-update-slice", "scatter"}
_ALIAS_OPCODES = {"bitcast", "reshape", "get-tuple-element"}

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_NO_ESTIMATE = 2**62  # cycles: libtpu writes the largest int64 for some fusions of a matmul with a part of a collective
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


@dataclass(frozen=True)
class Matmul:
    """`batch` products of (m, k) by (k, n); `dtype` is that of the operands if both have 8 bits, as HLO names it."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str | None = None

    @property
    def flops(self) -> int:
        """FLOPs: multiplications and additions."""
        return 2 * self.batch * self.m * self.n * self.k

    def count_padded_flops(self, width: int) -> int:
        """Return the FLOPs that matrix units spend, which a small size leaves partly empty.

        One operand is held in the unit, `width` x `width` at a time, and the other streams past it. Loading takes as
        long as `width` rows of the other operand. A width of 1 means no padding.
        """
        if width == 1:
            return self.flops
        m, n = (max(_round_up(size, min(8, width)), width) for size in (self.m, self.n))
        # Hold the operand that costs less to hold.
        held = min(_round_up(self.n, width) * m, _round_up(self.m, width) * n)
        return 2 * self.batch * _round_up(self.k, width) * held


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def find_matmuls(module: HloModule, op: Op) -> list[Matmul]:
    """Return the matmuls of an op and of all that it calls in one run. A loop has none of its own."""
    if op.opcode == "dot":
        return [_parse_dot(module, op, _DOT_DIMS)]
    if op.opcode == "convolution":
        return [_parse_convolution(module, op)]
    if op.opcode == "custom-call" and _LIBRARY_MATMUL.search(op.rest):
        return [_parse_dot(module, op, _LIBRARY_DIMS)]
    if op.opcode in ("fusion", "call", "async-start") and (inner := module.get_inner_computation(op)):
        return [one for part in module.computations.get(inner, {}).values() for one in find_matmuls(module, part)]
    return []


def _get_operand_dims(module: HloModule, op: Op, index: int) -> tuple[int, ...]:
    operand = module.get_operand(op, index)
    arrays = parse_arrays(operand.shape) if operand else ()
    return arrays[0].dims if arrays else ()


def _parse_dot(module: HloModule, op: Op, pattern: re.Pattern[str]) -> Matmul:
    lhs, rhs = _get_operand_dims(module, op, 0), _get_operand_dims(module, op, 1)
    axes = {(match[1], match[2]): [int(n) for n in re.findall(r"\d+", match[3])] for match in pattern.finditer(op.rest)}
    k = math.prod(lhs[axis] for axis in axes.get(("lhs", "contracting"), ()) if axis < len(lhs))
    batch = math.prod(lhs[axis] for axis in axes.get(("lhs", "batch"), ()) if axis < len(lhs))
    # The rest of each operand are the rows of the left and the columns of the right one.
    shared = max(k * batch, 1)
    return Matmul(batch, math.prod(lhs) // shared, math.prod(rhs) // shared, k, _find_8bit_type(module, op))


def _find_8bit_type(module: HloModule, op: Op) -> str | None:
    """Return the type of the first of two operands of a matmul that have 8 bits, None unless there are two.

    A kernel has further operands: tables, scales.
    """
    operands = [parse_arrays(operand.shape) for operand in module.get_operands(op) if operand is not None]
    found = [arrays[0].dtype for arrays in operands if arrays and arrays[0].dtype.startswith(("s8", "f8"))]
    return found[0] if len(found) == 2 else None


def _parse_convolution(module: HloModule, op: Op) -> Matmul:
    lhs, rhs = _get_operand_dims(module, op, 0), _get_operand_dims(module, op, 1)
    out = parse_arrays(op.shape)[0].dims
    labels = _LABELS.search(op.rest)
    if labels is None or not lhs or not rhs:
        return Matmul(1, math.prod(out), 1, 1)
    groups = {match[1]: int(match[2]) for match in _GROUP_COUNT.finditer(op.rest)}
    feature_groups, batch_groups = groups.get("feature", 1), groups.get("batch", 1)
    batch = feature_groups * batch_groups
    m = out[labels[3].index("b")] // (1 if feature_groups > 1 else batch_groups)
    n = out[labels[3].index("f")] // batch
    k = rhs[labels[2].index("i")]
    if batch_groups > 1:
        m = lhs[labels[1].index("b")] // batch_groups
    # `size=8x4 pad=0_0x3_3`: name -> per axis (before, after), or the number twice.
    window: dict[str, list[tuple[int, int]]] = {}
    if stated := _WINDOW.search(op.rest):
        for key, values in re.findall(r"(\w+)=([\d_x\-]+)", stated[1]):
            pairs = [[int(number) for number in value.split("_")] for value in values.split("x")]
            window[key] = [(pair[0], pair[-1]) for pair in pairs]
    for number, letter in enumerate(sorted(set(labels[3]) - {"b", "f"})):
        taken, size = lhs[labels[1].index(letter)], rhs[labels[2].index(letter)]
        made = out[labels[3].index(letter)]
        valid = _count_valid_positions(taken, size, made, {key: values[number] for key, values in window.items()})
        if valid == made == size == taken:
            batch *= made
        elif valid == made == size and taken == 1:
            # Each result takes another part of what streams past one value: a size of the second operand.
            n *= made
        else:
            # A true convolution: each result sums over the positions of its window.
            m, k = m * made, k * -(-valid // max(made, 1))
    return Matmul(batch, m, n, k, _find_8bit_type(module, op))


def _count_valid_positions(taken: int, size: int, made: int, axis: dict[str, tuple[int, int]]) -> int:
    """Return the number of window positions, over all results along an axis, that fall on a value.

    The window of `size` values makes `made` results of `taken` inputs; `axis` has its attributes as (before, after).
    """
    stride, before = axis.get("stride", (1, 1))[0], axis.get("pad", (0, 0))[0]
    spread, dilation = axis.get("lhs_dilate", (1, 1))[0], axis.get("rhs_dilate", (1, 1))[0]
    last = (taken - 1) * spread
    if stride == spread == dilation == 1:
        # Each result's window is an interval, so its positions need not be visited one by one.
        firsts = (max(0, before - step) for step in range(made))
        return sum(max(0, min(size, last + 1 + before - step) - first) for step, first in enumerate(firsts))
    total = 0
    for step in range(made):
        start = step * stride - before
        positions = range(start, start + size * dilation, dilation)
        total += sum(1 for position in positions if 0 <= position <= last and position % spread == 0)
    return total


def is_kernel(op: Op) -> bool:
    """Return True if an op runs code that the compiler has not generated."""
    return op.opcode == "custom-call" and any(f'custom_call_target="{target}' in op.rest for target in _KERNEL_TARGETS)


def is_attention_kernel(op: Op) -> bool:
    """Return True if the name of a kernel says that it computes attention."""
    name = re.search(r'op_name="([^"]*)"', op.rest)
    return is_kernel(op) and bool(_ATTENTION.search(f"{op.name} {name[1] if name else ''} {op.rest[:300]}"))


class _AttentionFlops(NamedTuple):
    flops: int
    padded_flops: int


def _count_attention_flops(module: HloModule, op: Op, width: int) -> _AttentionFlops | None:
    """Return the FLOPs of an attention kernel by its shapes and blocks, None if its arrays are not understood."""
    arrays = [array for operand in module.get_operands(op) if operand for array in parse_arrays(operand.shape)]
    inputs = [array for array in arrays if len(array.dims) >= 3 and array.dtype in ("bf16", "f16", "f32")]
    if len(inputs) < 2:
        return None
    query, key = inputs[0], inputs[1]
    if library := _CUDNN_ATTENTION.search(op.rest):
        # Batch, positions, heads and head. Its blocks are not known; those of 128 are usual.
        (batch, length, heads, head), keys = query.dims, key.dims[1]
        products = _FUSED_BACKWARD_PRODUCTS if library[1] else _FORWARD_PRODUCTS
        window = _CUDNN_WINDOW.search(op.rest)
        row = -(-int(window[1]) // _CUDNN_BLOCK) + 1 if window and int(window[1]) else None
        share = compute_causal_share(length, keys, _CUDNN_BLOCK, _CUDNN_BLOCK, row)
        flops = int(share * products * Matmul(batch * heads, length, keys, head).flops)
        return _AttentionFlops(flops, flops)
    length, head, keys = query.dims[-2], query.dims[-1], key.dims[-2]
    # The phase is the suffix of the kernel's block sizes.
    if "dkv" in op.name:
        # The kernel returns the gradients of keys and values, with an array for the sum of each. A fused backward
        # kernel returns the gradient of the queries too.
        products, phase = (_FUSED_BACKWARD_PRODUCTS if len(parse_arrays(op.shape)) > 4 else _DKV_PRODUCTS), "_dkv"
    elif "dq" in op.name:
        products, phase = _DQ_PRODUCTS, "_dq"
    else:
        products, phase = _FORWARD_PRODUCTS, ""
    blocks = {match[1]: int(match[2]) for match in _BLOCK.finditer(op.rest)}
    block_q, block_kv = blocks.get(f"block_q{phase}", length), blocks.get(f"block_kv{phase}", keys)
    # A kernel with a window is given a table of the blocks of keys that each row of queries keeps.
    tables = [array.dims[-1] for array in arrays if array.dtype in ("s8", "s32") and len(array.dims) == 3]
    share = compute_causal_share(length, keys, block_q, block_kv, tables[0] if tables else None)
    batch = math.prod(query.dims[:-2])
    scores, values = Matmul(batch, length, keys, head), Matmul(batch, length, head, keys)
    # Half of the products, or one more, make scores, whose inner size is the head; the others have it outside.
    outer = products - products // 2
    padded = outer * scores.count_padded_flops(width) + (products - outer) * values.count_padded_flops(width)
    return _AttentionFlops(int(share * products * scores.flops), int(share * padded))


def compute_causal_share(
    length: int, keys: int, block_q: int, block_kv: int, blocks_in_a_row: int | None = None
) -> float:
    """Return the share of all blocks, of `block_q` queries and `block_kv` keys, that causal attention computes.

    An attention window leaves `blocks_in_a_row` blocks of keys to a row of queries; None for no window.
    """
    rows, columns = -(-length // block_q), -(-keys // block_kv)
    most = min(columns, blocks_in_a_row or columns)
    computed = sum(min(most, -(-min((row + 1) * block_q, keys) // block_kv)) for row in range(rows))
    return computed / (rows * columns)


def count_moved_bytes(module: HloModule, op: Op) -> int:
    """Return the bytes that one run of an op reads from and writes to HBM."""
    results = parse_arrays(op.shape)
    written = sum(
        min(size, array.bytes)
        for size, array in zip(_count_written_bytes(module, op), results, strict=True)
        if array.traffic_bytes
    )
    # An operand that is passed twice is read once.
    read: dict[str, int] = {}
    for index, name in enumerate(op.operands):
        operand = module.get_operand(op, index)
        if operand is not None:
            arrays = parse_arrays(operand.shape)
            size = _count_read_bytes(module, op, index, sum(array.bytes for array in arrays))
            read[name] = max(read.get(name, 0), min(size, sum(array.traffic_bytes for array in arrays)))
    return sum(read.values()) + written


def _count_read_bytes(module: HloModule, op: Op, index: int, whole: int) -> int:
    """Return the bytes that an op reads of an operand that has `whole` bytes."""
    if op.opcode in _SLICING_OPCODES and index == 0:
        return sum(array.bytes for array in parse_arrays(op.shape))
    if op.opcode in _UPDATING_OPCODES and index == 0:
        return 0
    inner = module.get_inner_computation(op) if op.opcode in ("fusion", "call") else ""
    if not inner:
        return whole
    parts = module.computations[inner].values()
    parameter = next(
        (part for part in parts if part.opcode == "parameter" and part.rest.startswith(f"({index})")), None
    )
    return whole if parameter is None else min(whole, _count_bytes_read_inside(module, parameter, whole))


def _count_bytes_read_inside(module: HloModule, value: Op, whole: int) -> int:
    """Return the bytes that the ops of a fused computation read of a value from outside."""
    total = 0
    for user in module.computations[value.computation].values():
        for index, name in enumerate(user.operands):
            if name == value.name and user.opcode != "tuple" and not user.opcode.startswith(COLLECTIVE_KINDS):
                if user.opcode in _ALIAS_OPCODES:
                    total += _count_bytes_read_inside(module, user, whole)
                else:
                    total += _count_read_bytes(module, user, index, whole)
    return total


def _count_written_bytes(module: HloModule, op: Op) -> list[int]:
    sizes = [array.bytes for array in parse_arrays(op.shape)]
    if op.opcode in _UPDATING_OPCODES:
        update = module.get_operand(op, 1 if op.opcode == "dynamic-update-slice" else 2)
        return [sum(array.bytes for array in parse_arrays(update.shape))] if update and len(sizes) == 1 else sizes
    inner = module.get_inner_computation(op) if op.opcode in ("fusion", "call") else ""
    if not inner:
        return sizes
    written = _count_bytes_written_inside(module, module.get_root(inner))
    return written if len(written) == len(sizes) else sizes


def _count_bytes_written_inside(module: HloModule, value: Op) -> list[int]:
    """Return the bytes written for each array of a value that a fused computation returns."""
    if value.opcode == "tuple":
        parts = [part for part in module.get_operands(value) if part is not None]
        return [size for part in parts for size in _count_bytes_written_inside(module, part)]
    if value.opcode in ("bitcast", "reshape") and (source := module.get_operand(value, 0)) is not None:
        written = _count_bytes_written_inside(module, source)
        return written if len(written) == 1 else [sum(array.bytes for array in parse_arrays(value.shape))]
    if value.opcode == "parameter" or value.opcode.startswith(COLLECTIVE_KINDS):
        return [0] * len(parse_arrays(value.shape))
    return _count_written_bytes(module, value)


class TypicalShares(NamedTuple):
    """Shares of the peaks that ops of several microseconds typically reach."""

    matmul: float
    hbm: float
    attention: float
    launch_seconds: float  # between two kernels


@dataclass(frozen=True)
class DeviceRates:
    """Speeds of one device.

    Attributes:
        int8_per_second, float8_per_second: peaks for operands of 8 bits; None where there is none.
        typical: what ops reach of the peaks, for a compiler that writes no estimates; None leaves the upper end of an
            op without an estimate at its roofline.
    """

    flops_per_second: float  # peak of all its matrix units together
    hbm_bytes_per_second: float  # bandwidth of its HBM
    # Function that returns the time of one run of a collective on its links.
    collective_seconds: Callable[[Collective], float]
    clock_hertz: float | None = None  # clock that turns cycles into seconds, None where it is unknown
    matrix_unit_width: int = 1  # sizes of matmuls are padded to it; 1 where it is unknown
    int8_per_second: float | None = None
    float8_per_second: float | None = None
    typical: "TypicalShares | None" = None

    def compute_seconds(self, matmul: Matmul) -> float:
        """Return the time of a matmul at the peak for its operands."""
        return matmul.count_padded_flops(self.matrix_unit_width) / self.get_flops_per_second(matmul.dtype)

    def get_flops_per_second(self, dtype: str | None) -> float:
        """Return the peak for operands of a type of 8 bits; None stands for more bits."""
        is_integer = dtype is not None and dtype.startswith("s8")
        rate = None if dtype is None else self.int8_per_second if is_integer else self.float8_per_second
        return rate or self.flops_per_second


@dataclass(frozen=True)
class OpCost:
    """Time of one run of an op."""

    low: float  # seconds at the roofline
    high: float  # seconds by the compiler's estimate
    # `estimate` of the compiler; `stated` by a kernel; `shapes` of an attention kernel; `typical` where the upper end
    # is assumed; `roofline` where nothing else is known; `unknown` for a kernel of which only its arrays are known.
    basis: str
    flops: int  # FLOPs of its matmuls, without padding
    moved_bytes: int  # HBM traffic


def compute_cost(module: HloModule, op: Op, rates: DeviceRates) -> OpCost | None:
    """Return the cost of one run of an op by itself, None if it costs nothing."""
    target = _TARGET.search(op.rest) if op.opcode == "custom-call" else None
    is_free = op.opcode in FREE_OPCODES or op.opcode.endswith(("-done", "-update"))
    if is_free or (target and target[1] in _FREE_TARGETS):
        return None
    moved = count_moved_bytes(module, op)
    if is_kernel(op):
        stated = _STATED_COST.search(op.rest)
        is_attention = is_attention_kernel(op)
        attention = _count_attention_flops(module, op, rates.matrix_unit_width) if is_attention else None
        if stated:
            # A kernel states FLOPs without padding; the shapes tell by how much padding raises them.
            flops = int(stated[1])
            padded = flops if attention is None else flops * attention.padded_flops // attention.flops
        elif attention is not None:
            flops, padded = attention
        else:
            seconds = moved / rates.hbm_bytes_per_second
            return OpCost(seconds, seconds, "unknown", 0, moved)
        has_stated_bytes = stated is not None and stated[2] is not None
        if stated is not None and has_stated_bytes:
            # The arrays count in whole tiles, and without those in fast memory. A kernel that states more than the
            # packed bytes of all its arrays reads them several times.
            operands = {operand.name: operand.shape for operand in module.get_operands(op) if operand}
            packed = sum(map(count_shape_bytes, (op.shape, *operands.values())))
            moved = max(moved, moved * int(stated[2]) // max(packed, 1))
        # Operands of 8 bits of an attention kernel are tables of blocks.
        peak = rates.get_flops_per_second(None if is_attention else _find_8bit_type(module, op))
        compute, memory = padded / peak, moved / rates.hbm_bytes_per_second
        low = high = max(compute, memory)
        if rates.typical is not None:
            share = rates.typical.attention if is_attention else rates.typical.matmul
            high = max(compute / share, memory / rates.typical.hbm) + rates.typical.launch_seconds
        return OpCost(low, high, "stated" if has_stated_bytes else "shapes", flops, moved)
    matmuls = find_matmuls(module, op)
    compute, memory = sum(map(rates.compute_seconds, matmuls)), moved / rates.hbm_bytes_per_second
    low = max(compute, memory)
    # Elementwise FLOPs are not counted: memory traffic bounds such ops.
    flops = sum(matmul.flops for matmul in matmuls)
    cycles = _CYCLES.search(op.rest)
    if cycles is None or rates.clock_hertz is None or int(cycles[1]) >= _NO_ESTIMATE:
        if rates.typical is None or not low:
            return OpCost(low, low, "roofline", flops, moved)
        high = max(compute / rates.typical.matmul, memory / rates.typical.hbm) + rates.typical.launch_seconds
        return OpCost(low, high, "typical", flops, moved)
    return OpCost(low, int(cycles[1]) / rates.clock_hertz, "estimate", flops, moved)


def has_estimates(module: HloModule) -> bool:
    """Return True if the compiler has written cycle estimates beside its ops."""
    return _CYCLES.search(module.text) is not None
