"""What a custom kernel costs: as it states it, or for attention kernels that state nothing, from their shapes.

How attention fills matrix units, which no kernel states, is told from the width of its heads.

Attention kernels are taken to be causal, as all those of this project are: of the blocks of queries and keys those
above the diagonal are left out, and the one on it is computed whole.
"""

import math
import re
from dataclasses import dataclass

from runner.plan.forecast.array import Array, arrays_in
from runner.plan.forecast.matmul import Matmul
from runner.plan.forecast.module import Module, Op

_COST = re.compile(r'"cost_estimate":\{[^}]*?"flops":"?(\d+)"?(?:[^}]*?"bytes_accessed":"?(\d+)"?)?')
_BLOCK = re.compile(r'\\?"(block_\w+)\\?": (\d+)')
_ATTENTION = re.compile(r"splash|flash|attention|fmha", re.IGNORECASE)
# Products of (queries, head) by (head, keys), or of that size, in the kernels of one attention.
_FORWARD, _OF_QUERIES, _OF_KEYS, _FUSED_BACKWARD = 2, 3, 4, 5


@dataclass(frozen=True)
class KernelCost:
    """FLOPs of a kernel, and as they fill matrix units; `moved_bytes` is None where its arrays tell."""

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


def kernel_cost(module: Module, op: Op, width: int) -> KernelCost | None:
    """What one run of a kernel costs, None if nothing is known of it."""
    by_shapes = _attention(module, op, width) if is_attention_kernel(op) else None
    if stated := _COST.search(op.rest):
        flops = int(stated[1])
        filled = flops if by_shapes is None else flops * by_shapes.filled_flops // by_shapes.flops
        return KernelCost(flops, filled, int(stated[2]) if stated[2] else None)
    return by_shapes


def _attention(module: Module, op: Op, width: int) -> KernelCost | None:
    arrays = [array for operand in module.operands(op) if operand for array in arrays_in(operand.shape)]
    inputs = [array for array in arrays if len(array.dims) >= 3 and array.dtype in ("bf16", "f16", "f32")]
    if len(inputs) < 2:
        return None
    query, key = inputs[0], inputs[1]
    length, head, keys = query.dims[-2], query.dims[-1], key.dims[-2]
    blocks = {match[1]: int(match[2]) for match in _BLOCK.finditer(op.rest)}
    products, phase = _products(op)
    share = causal_share(length, keys, *_sizes(blocks, phase, length, keys), _blocks_in_a_row(arrays))
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
        return (_FUSED_BACKWARD if len(arrays_in(op.shape)) > 4 else _OF_KEYS), "_dkv"
    return (_OF_QUERIES, "_dq") if "dq" in op.name else (_FORWARD, "")


def _sizes(blocks: dict[str, int], phase: str, length: int, keys: int) -> tuple[int, int]:
    return blocks.get(f"block_q{phase}", length), blocks.get(f"block_kv{phase}", keys)


def _blocks_in_a_row(arrays: list[Array]) -> int | None:
    """Blocks of keys that a window leaves to a row of queries, from the table of blocks that a kernel is given."""
    tables = [array.dims[-1] for array in arrays if array.dtype in ("s8", "s32") and len(array.dims) == 3]
    return tables[0] if tables else None


def causal_share(length: int, keys: int, block_q: int, block_kv: int, blocks_in_a_row: int | None = None) -> float:
    """The part of all blocks that causal attention computes."""
    rows, columns = -(-length // block_q), -(-keys // block_kv)
    most = min(columns, blocks_in_a_row or columns)
    computed = sum(min(most, -(-min((row + 1) * block_q, keys) // block_kv)) for row in range(rows))
    return computed / (rows * columns)
