"""Layout of sequences under context parallelism, and the schedule of attention between their shards.

The module decides between ring and all-gather on the caller's mesh, and computes which blocks of keys each block of
queries attends to. It is pure arithmetic: the same functions of a device's place in the group serve numpy, when a
program is made, and jax, inside of the program. `ring_attention` explains the algorithm.

Shape legend: T sequence; on one device 2 halves of c positions, M blocks a half, C positions a block, P halves of keys.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.model.layers import num_devices, num_sequence_shards, partition_spec
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
KERNEL_TOKENS = 128  # the splash kernel needs halves that are a multiple of it


@dataclass(frozen=True)
class SequenceLayout:
    """Static description of sharded sequences and of the attention to compute.

    Attributes:
        length: positions of a whole sequence, a multiple of 2 `num_shards`.
        num_shards: devices that share a sequence.
        axes: mesh axes over which positions are sharded.
        spec: sharding of (B, T, N, H) and (B, T, K, H).
        way: `ring` or `gather`.
        window: positions that a query attends to; None is its whole past.
        softcap: soft-cap of scores.
        scale: factor on scores.
        block_tokens: C, positions of a block.
        has_kernel: True if the splash kernel is to be used.
    """

    length: int
    num_shards: int
    axes: str | tuple[str, ...]
    spec: PartitionSpec
    way: ContextMethod
    window: int | None
    softcap: float | None
    scale: float
    block_tokens: int
    has_kernel: bool

    @property
    def segment_spec(self) -> PartitionSpec:
        """Sharding of segments (B, T)."""
        return PartitionSpec(*self.spec[:2])

    @property
    def is_zigzag(self) -> bool:
        """True if queries are redistributed for load balance: each device gets a half from both ends of a sequence."""
        return is_redistributed(self.length, self.num_shards, self.window)

    @property
    def num_preceding(self) -> int:
        """Number of other devices that hold keys which a device needs."""
        return count_key_shards(self.length, self.num_shards, self.window)

    @property
    def num_rounds(self) -> int:
        """Rounds of attention, each with other keys at hand."""
        return self.num_preceding + 1 if self.way == "ring" else 1

    @property
    def half_tokens(self) -> int:
        """c, half of a device's positions."""
        return self.length // (2 * self.num_shards)

    @property
    def num_blocks(self) -> int:
        """M, blocks of a half."""
        return -(-self.half_tokens // self.block_tokens)


def make_sequence_layout(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    row_attention: ContextParallelMethod,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> SequenceLayout | None:
    """Return the layout under the mesh and the rules of the caller.

    Returns:
        None if sequences are not sharded, or do not divide into two halves for each device.
    """
    spec, T = partition_spec(q.shape, "batch", "sequence", "heads", "head_dim"), q.shape[1]
    n = num_sequence_shards()
    if spec is None or n == 1 or T % (2 * n):
        return None
    batch, axes, heads, _ = spec
    if k.shape[2] % num_devices(heads):
        heads = None
    spec = PartitionSpec(batch, axes, heads, None)
    half_tokens = T // (2 * n)
    can_use_kernel = platform() == "tpu" and half_tokens % KERNEL_TOKENS == 0
    if row_attention == "auto":
        # The faster way by predicted time, for what one device computes.
        num_batch, num_heads = num_devices(batch), num_devices(heads)
        shape = AttentionShape(
            shards=num_devices(axes),
            batch=q.shape[0] // num_batch,
            length=T,
            heads=q.shape[2] // num_heads,
            key_heads=k.shape[2] // num_heads,
            key_width=q.shape[3],
            value_width=v.shape[3],
            itemsize=k.dtype.itemsize,
            window=window,
            has_kernel=can_use_kernel,
        )
        device = jax.sharding.get_abstract_mesh().abstract_device
        kind = "" if device is None else device.device_kind
        way = choose_context_method(shape, *find_peak_rates(kind, shape.shards * num_heads))
    else:
        way = row_attention
    # The largest divisor of a half that is no longer than the longest block. If all divisors are short, the last block
    # of a half is padded instead.
    most = min(half_tokens, MAX_BLOCK_TOKENS)
    block_tokens = max(size for size in range(1, most + 1) if half_tokens % size == 0)
    if 4 * block_tokens < most:
        block_tokens = -(-half_tokens // -(-half_tokens // most))
    has_kernel = can_use_kernel and way == "gather"
    return SequenceLayout(T, n, axes, spec, way, window, softcap, score_scale(q, scale), block_tokens, has_kernel)


def score_scale(q: jax.Array, scale: float | None) -> float:
    """Return the factor on scores of queries whose last axis is a head."""
    return 1 / math.sqrt(q.shape[-1]) if scale is None else scale


class BlockVisits(NamedTuple):
    """Blocks of keys that each block of queries attends to, and the positions of all of them."""

    first: Any  # (M, 2): the first block of keys
    count: Any  # (M, 2): the number of blocks of keys
    query_positions: Any  # (M, 2): the first position of a block of queries
    key_positions: Any  # (M, P): the first position of a half of keys, the same for all pairs of blocks of queries


def compute_visits(layout: SequenceLayout, place: Any, number: Any) -> BlockVisits:
    """Return the visits of the device at `place` in the round `number`."""
    M, C = layout.num_blocks, layout.block_tokens
    starts = np.arange(M, dtype=np.int32) * C
    ends = np.minimum(starts + C, layout.half_tokens) - 1
    # A block that sees few keys is paired with one that sees many, so that all pairs take about as long.
    order = np.stack([np.arange(M), np.arange(M)[::-1]], axis=1)
    query_starts, key_starts = _half_positions(layout, place), _key_positions(layout, place, number)
    first_queries, last_queries = query_starts + starts[order], query_starts + ends[order]
    first_keys, last_keys = ((key_starts[:, None] + offsets).reshape(-1) for offsets in (starts, ends))
    is_behind = last_keys < np.zeros((M, 2, 1), np.int32)
    if layout.window is not None:
        is_behind |= last_keys < (first_queries - layout.window + 1)[..., None]
    first, stop = is_behind.sum(-1), (first_keys <= last_queries[..., None]).sum(-1)
    return BlockVisits(first, (stop - first).clip(0), first_queries, key_starts + np.zeros((M, 1), np.int32))


def compute_own_visits(layout: SequenceLayout, number: Any) -> BlockVisits:
    """Return the visits of the calling device, inside a `shard_map`."""
    visits = compute_visits(layout, jax.lax.axis_index(layout.axes), number)
    return BlockVisits(*(jnp.asarray(x, jnp.int32) for x in visits))


@functools.lru_cache
def max_steps(layout: SequenceLayout, rounds: range) -> int:
    """Return the most blocks of keys that a pair of blocks of queries visits, on any device in any of these rounds."""
    visits = (compute_visits(layout, place, number) for place in range(layout.num_shards) for number in rounds)
    return max(int(each.count.sum(axis=1).max()) for each in visits)


def _half_positions(layout: SequenceLayout, place: Any) -> Any:
    """Return the first positions of the two halves of queries of the device at `place`, (2,)."""
    n, c = layout.num_shards, layout.half_tokens
    steps, starts = ((c, -c), (0, (2 * n - 1) * c)) if layout.is_zigzag else ((2 * c, 2 * c), (0, c))
    return place * np.array(steps, np.int32) + np.array(starts, np.int32)


def _key_positions(layout: SequenceLayout, place: Any, number: Any) -> Any:
    """Return the first positions of the halves of keys at hand, (P,); below 0 if they precede the sequence."""
    c = layout.half_tokens
    if layout.way == "ring":
        source = place - number
        return _half_positions(layout, source % layout.num_shards if layout.is_zigzag else source)
    if layout.is_zigzag:
        return np.arange(2 * layout.num_shards, dtype=np.int32) * c
    num_halves = 2 * (layout.num_preceding + 1)
    return (place - layout.num_preceding) * np.int32(2 * c) + np.arange(num_halves, dtype=np.int32) * c
