"""How rows lie on devices whose positions are cut, and what each device has to do of their attention: arithmetic.

Owns the choice of a way by the mesh of the caller, and which blocks of keys meet which blocks of queries. The same
functions of a device's place serve a device that is known (numpy, when a program is made) and the one that asks (jax,
inside of it). `row_attention` says why it is as it is.

Shape legend: T sequence, on one device 2 halves of c positions, M blocks a half, C positions a block, P halves of keys.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.model.layers import cuts_of, num_devices, row_parts
from experiments.model.platform import platform
from runner.config import ContextParallelMethod
from runner.parallel.context import (
    AttentionShape,
    ContextMethod,
    choose_context_method,
    count_key_shards,
    find_peak_rates,
    is_redistributed,
)

MAX_BLOCK_TOKENS = 512
KERNEL_TOKENS = 128  # that a half must be a multiple of for the TPU's kernel


@dataclass(frozen=True)
class SequenceLayout:
    """How rows lie on devices, and what attention is asked for: static.

    Attributes:
        length: positions of a whole row, a multiple of 2 `num_shards`.
        axes: of the mesh, over which positions are cut.
        spec: how (B, T, N, H) and (B, T, K, H) lie.
        has_kernel: whether the TPU's kernel can serve, and is wanted.
    """

    length: int
    num_shards: int
    axes: str | tuple[str, ...]
    spec: PartitionSpec
    way: ContextMethod
    window: int | None
    softcap: float | None
    scale: float
    block_tokens: int  # C
    has_kernel: bool

    @property
    def ids_spec(self) -> PartitionSpec:
        """How segments (B, T) lie."""
        return PartitionSpec(*self.spec[:2])

    @property
    def is_redistributed(self) -> bool:
        """Whether queries move for the sake of balance."""
        return is_redistributed(self.length, self.num_shards, self.window)

    @property
    def before(self) -> int:
        """How many other devices hold keys that a device needs."""
        return count_key_shards(self.length, self.num_shards, self.window)

    @property
    def num_rounds(self) -> int:
        """How often keys are at hand."""
        return self.before + 1 if self.way == "ring" else 1

    @property
    def half_tokens(self) -> int:
        """c."""
        return self.length // (2 * self.num_shards)

    @property
    def num_blocks(self) -> int:
        """M."""
        return -(-self.half_tokens // self.block_tokens)


class BlockVisits(NamedTuple):
    """Which blocks of keys every block of queries attends to, and where all of these stand."""

    first: Any  # (M, 2)
    count: Any  # (M, 2)
    query_positions: Any  # (M, 2): of the first of a block
    key_positions: Any  # (M, P): of the first of a half, for each pair of blocks of queries the same


def rows_on_devices(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    row_attention: ContextParallelMethod,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> SequenceLayout | None:
    """How rows lie by the mesh and the rules of the caller; None if every device has whole ones, or can have no halves.

    `auto` takes the way that `row_seconds` predicts to be faster on the mesh's devices.
    """
    spec, T = cuts_of(q.shape, "batch", "sequence", "heads", "head_dim"), q.shape[1]
    n = row_parts()
    if spec is None or n == 1 or T % (2 * n):
        return None
    batch, axes, heads, _ = spec
    if k.shape[2] % num_devices(heads):
        heads = None
    spec = PartitionSpec(batch, axes, heads, None)
    factor = factor_of(q, scale)
    can_kernel = platform() == "tpu" and T // (2 * n) % KERNEL_TOKENS == 0
    way = _way(row_attention, spec, q, k, v, window, can_kernel)
    has_kernel = can_kernel and way == "gather"
    return SequenceLayout(T, n, axes, spec, way, window, softcap, factor, _block_tokens(T // (2 * n)), has_kernel)


def factor_of(q: jax.Array, scale: float | None) -> float:
    """What scores are multiplied by, of queries whose last axis is a head."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


def _block_tokens(half_tokens: int) -> int:
    """The largest divisor of a half that is no block too long; where all are short, a half is padded."""
    most = min(half_tokens, MAX_BLOCK_TOKENS)
    divisor = max(size for size in range(1, most + 1) if half_tokens % size == 0)
    return divisor if 4 * divisor >= most else -(-half_tokens // -(-half_tokens // most))


def _way(
    wanted: ContextParallelMethod,
    spec: PartitionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    can_kernel: bool,
) -> ContextMethod:
    """`wanted`, or the faster one."""
    if wanted != "auto":
        return wanted
    batch, rows, heads, _ = map(num_devices, spec)
    shape = AttentionShape(
        shards=rows,
        batch=q.shape[0] // batch,
        length=q.shape[1],
        heads=q.shape[2] // heads,
        key_heads=k.shape[2] // heads,
        key_width=q.shape[3],
        value_width=v.shape[3],
        itemsize=k.dtype.itemsize,
        window=window,
        has_kernel=can_kernel,
    )
    device = jax.sharding.get_abstract_mesh().abstract_device
    return choose_context_method(
        shape, *find_peak_rates("" if device is None else device.device_kind, shape.shards * heads)
    )


def visits_of(rows: SequenceLayout, place: Any, number: Any) -> BlockVisits:
    """What the device at `place` has to do in a round."""
    M, C = rows.num_blocks, rows.block_tokens
    starts = np.arange(M, dtype=np.int32) * C
    ends = np.minimum(starts + C, rows.half_tokens) - 1
    order = np.stack([np.arange(M), np.arange(M)[::-1]], axis=1)  # a block that sees few keys with one that sees many
    query_starts, key_starts = _half_positions(rows, place), _key_positions(rows, place, number)
    first_queries, last_queries = query_starts + starts[order], query_starts + ends[order]
    first_keys, last_keys = ((key_starts[:, None] + offsets).reshape(-1) for offsets in (starts, ends))
    is_behind = last_keys < np.zeros((M, 2, 1), np.int32)
    if rows.window is not None:
        is_behind |= last_keys < (first_queries - rows.window + 1)[..., None]
    first, stop = is_behind.sum(-1), (first_keys <= last_queries[..., None]).sum(-1)
    return BlockVisits(first, (stop - first).clip(0), first_queries, key_starts + np.zeros((M, 1), np.int32))


def visits_here(rows: SequenceLayout, number: Any) -> BlockVisits:
    visits = visits_of(rows, jax.lax.axis_index(rows.axes), number)
    return BlockVisits(*(jnp.asarray(x, jnp.int32) for x in visits))


@functools.lru_cache
def num_steps(rows: SequenceLayout, rounds: range) -> int:
    """The most blocks of keys that a pair of blocks of queries attends to, of any device in any of these rounds."""
    visits = (visits_of(rows, place, number) for place in range(rows.num_shards) for number in rounds)
    return max(int(each.count.sum(axis=1).max()) for each in visits)


def _half_positions(rows: SequenceLayout, place: Any) -> Any:
    """Where the two halves begin that the device at `place` has queries of, (2,)."""
    n, c = rows.num_shards, rows.half_tokens
    steps, starts = ((c, -c), (0, (2 * n - 1) * c)) if rows.is_redistributed else ((2 * c, 2 * c), (0, c))
    return place * np.array(steps, np.int32) + np.array(starts, np.int32)


def _key_positions(rows: SequenceLayout, place: Any, number: Any) -> Any:
    """Where the halves of keys begin that are at hand, (P,); those below 0 are none that a row has."""
    c = rows.half_tokens
    if rows.way == "ring":
        source = place - number
        return _half_positions(rows, source % rows.num_shards if rows.is_redistributed else source)
    if rows.is_redistributed:
        return np.arange(2 * rows.num_shards, dtype=np.int32) * c
    return (place - rows.before) * np.int32(2 * c) + np.arange(2 * (rows.before + 1), dtype=np.int32) * c
