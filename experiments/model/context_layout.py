"""Arguments of attention; layout of sequences under context parallelism, its method and schedule between shards.

Attention over sequences that are sharded over several devices can exchange keys and values in two ways:

- `gather`: all-gather. Every device collects the keys and values of the whole sequence for its own queries.
- `ring`: ring attention. Every device lets its queries attend to the keys and values at hand, which then move on to the
  next device.

The module chooses one by predicted time on the caller's mesh, and computes which blocks of keys each block of queries
attends to. It is pure arithmetic: the same functions of a device's place in the group serve numpy, when a
program is made, and jax, inside of the program. `ring_attention` explains the algorithm.

Shape legend: T sequence; on one device 2 halves of c positions, M blocks a half, C positions a block, P halves of keys.
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.model.layers import make_partition_spec, num_devices, num_sequence_shards
from experiments.model.platform import platform
from experiments.model.rotary import Rotation
from runner.accelerator import PeakRates, find_chip
from runner.config import ContextParallelMethod

ContextMethod = Literal["gather", "ring"]

# For chips that the catalogue does not know, or whose rates depend on the machine: a few cores of a server.
UNKNOWN_CHIP_RATES = PeakRates(500e9, 16 * 2**30, 50e9, 10e9, 1e9)
_GATHERED_SHARE_MAX = 1 / 4  # share of a device's memory for gathered keys and values with their gradients
_TILE_BYTES = 8  # a float32 score of a tile that one operation writes to memory and another one reads

MAX_BLOCK_TOKENS = 512
KERNEL_TOKENS = 128  # the splash kernel needs halves that are a multiple of it


class AttentionInputs(NamedTuple):
    """Arrays that attention reads. Their gradients have the same form, with None for what has none.

    B batch, N heads of queries, K heads of keys and values, H width of a head of queries and keys, W of values.
    """

    q: jax.Array  # (B, T, N, H)
    k: jax.Array  # (B, T, K, H)
    v: jax.Array  # (B, T, K, W)
    segments: jax.Array | None = None  # (B, T), int32: documents of each sequence
    rotation: Rotation | None = None  # of halves of queries and keys, to apply first
    sinks: jax.Array | None = None  # (N), in the dtype of q: score of each head of queries for the value zero


class AttentionOptions(NamedTuple):
    """Static options of attention."""

    window: int | None = None  # positions that a query attends to, its own included; None: its whole past
    softcap: float | None = None  # a score s becomes softcap tanh(s / softcap), before masking
    scale: float | None = None  # factor on scores; None: 1 / sqrt(H)


@dataclass(frozen=True)
class SequenceLayout:
    """Static description of sharded sequences and of the attention to compute."""

    length: int  # positions of a whole sequence, a multiple of 2 `num_shards`
    num_shards: int  # devices that share a sequence
    axes: str | tuple[str, ...]  # mesh axes over which positions are sharded
    spec: PartitionSpec  # sharding of (B, T, N, H) and (B, T, K, H)
    way: ContextMethod  # `ring` or `gather`
    options: AttentionOptions
    scale: float  # factor on scores
    block_tokens: int  # C, positions of a block
    has_kernel: bool  # True if the splash kernel is to be used

    @property
    def input_specs(self) -> AttentionInputs:
        """Sharding of the inputs, which are not rotated here."""
        segments, sinks = PartitionSpec(*self.spec[:2]), PartitionSpec(self.spec[2])
        return AttentionInputs._make([self.spec, self.spec, self.spec, segments, None, sinks])

    @property
    def is_zigzag(self) -> bool:
        """True if queries are redistributed for load balance: each device gets a half from both ends of a sequence."""
        return _is_redistributed(self.length, self.num_shards, self.options.window)

    @property
    def num_preceding(self) -> int:
        """Number of other devices that hold keys which a device needs."""
        return _count_key_shards(self.length, self.num_shards, self.options.window)

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
    inputs: AttentionInputs, options: AttentionOptions, row_attention: ContextParallelMethod
) -> SequenceLayout | None:
    """Return the layout under the mesh and the rules of the caller.

    Returns:
        None if sequences are not sharded, or do not divide into two halves for each device.
    """
    q, k, v = inputs[:3]
    spec, T = make_partition_spec(q.shape, "batch", "sequence", "heads", "head_dim"), q.shape[1]
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
            window=options.window,
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
    return SequenceLayout(T, n, axes, spec, way, options, score_scale(q, options), block_tokens, has_kernel)


def score_scale(q: jax.Array, options: AttentionOptions) -> float:
    """Return the factor on scores of queries whose last axis is a head."""
    return 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale


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
    if layout.options.window is not None:
        is_behind |= last_keys < (first_queries - layout.options.window + 1)[..., None]
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


# Choice of the method.


@dataclass(frozen=True)
class AttentionShape:
    """Shape of attention on one device: its own examples and heads of sequences that are sharded."""

    shards: int  # devices over which a sequence is sharded
    batch: int  # examples of the device
    length: int  # positions of a whole sequence
    heads: int  # heads of queries on the device
    key_heads: int  # heads of keys and values on the device
    key_width: int  # width of a head of queries and keys
    value_width: int  # width of a head of values
    itemsize: int = 2  # bytes of an element of keys and values
    window: int | None = None  # number of positions that a query attends to; None for its whole past
    has_kernel: bool = False  # True if `gather` runs a fused kernel, which keeps tiles of scores on the chip


def _count_key_shards(length: int, shards: int, window: int | None) -> int:
    """Return the number of devices before its own from which a device needs keys.

    This is all other devices if queries are redistributed, since then the two halves of a device's queries come from
    opposite ends of the sequence.
    """
    share = length // shards
    before = -(-((window or length) - 1) // share)
    return shards - 1 if _is_redistributed(length, shards, window) else before


def _is_redistributed(length: int, shards: int, window: int | None) -> bool:
    """Return True if queries are redistributed, so that all devices have as many keys to attend to.

    A narrow window needs no redistribution: its work is balanced, and its keys are on neighbouring devices.
    """
    return window is None or 2 * window > length or -(-(window - 1) // (length // shards)) >= shards - 1


def predict_attention_seconds(
    shape: AttentionShape, speeds: PeakRates, bytes_per_second: float
) -> dict[ContextMethod, float]:
    """Predict the seconds that attention of one layer takes forward and backward, by method.

    Let p = batch heads length attended / shards be the scores of a device, where `attended` is length / 2 (for a window
    w it is w - w^2 / 2 length), H and W the widths of keys and values, C the bytes of keys and values on one device, d
    the devices whose keys another one needs, r = d + 1 the rounds, and f = 4 / itemsize, since gradients are exchanged
    in float32:

        forward  = 2 p (H + W) / FLOP/s      + tiles: 2 p float32 written to memory and read again
        backward = 2 p (3 H + 2 W) / FLOP/s  + tiles: 4 p
        gather   = forward + backward + 3 d C / bytes/s
        ring     = r max(forward / r, C / bytes/s) + r max(backward / r, (1 + f) C / bytes/s) + (2 + f) C / bytes/s

    An all-gather has to end before attention begins: in both passes for keys and values, whose gradients are then
    reduce-scattered. A ring overlaps communication with computation. Its last term redistributes keys and values,
    twice, and returns their gradients. A fused kernel avoids the tiles of `gather`.

    `bytes_per_second` is the bandwidth out of one device to the others that share a sequence.

    Returns:
        Seconds by method. `gather` is infinite if the gathered keys and values and their gradients would take more than
        a quarter of a device's memory.
    """
    # Queries near the beginning of a sequence have fewer positions before them than the window.
    window = min(shape.window or shape.length, shape.length)
    attended = window - window**2 / (2 * shape.length)
    scores = shape.batch * shape.heads * shape.length * attended / shape.shards
    H, W = shape.key_width, shape.value_width
    forward = 2 * scores * (H + W) / speeds.flops_per_second
    backward = 2 * scores * (3 * H + 2 * W) / speeds.flops_per_second
    tile = scores * _TILE_BYTES / speeds.hbm_bytes_per_second
    chunk_bytes = shape.batch * shape.length / shape.shards * shape.key_heads * (H + W) * shape.itemsize
    before = _count_key_shards(shape.length, shape.shards, shape.window)
    rounds, wide, move = before + 1, 4 / shape.itemsize, chunk_bytes / bytes_per_second
    tiles = 0.0 if shape.has_kernel else 6 * tile
    gather = forward + backward + tiles + 3 * before * move
    ring = max(forward + 2 * tile, rounds * move) + max(backward + 4 * tile, rounds * (1 + wide) * move)
    gathered_bytes = rounds * chunk_bytes * (1 + (1 if shape.has_kernel else wide))
    is_too_large = gathered_bytes > _GATHERED_SHARE_MAX * speeds.hbm_bytes
    return {"gather": float("inf") if is_too_large else gather, "ring": ring + (2 + wide) * move}


def choose_context_method(shape: AttentionShape, speeds: PeakRates, bytes_per_second: float) -> ContextMethod:
    """Return the method with the smaller predicted time, `gather` if both are equal."""
    seconds = predict_attention_seconds(shape, speeds, bytes_per_second)
    return "ring" if seconds["ring"] < seconds["gather"] else "gather"


def find_peak_rates(device_kind: str, neighbours: int) -> tuple[PeakRates, float]:
    """Return the peak rates of a device, and its bandwidth in bytes/s to the devices next to it in the mesh.

    GPUs of several nodes communicate over the network. Chips of one slice are assumed to use their interconnect.

    `neighbours` is the number of adjacent devices that communicate.
    """
    chip = find_chip(device_kind)
    if chip is None or chip.speeds is None:
        return UNKNOWN_CHIP_RATES, UNKNOWN_CHIP_RATES.interconnect_bytes_per_second
    speeds, share = chip.speeds, chip.devices_per_chip
    is_one_domain = chip.is_tpu or neighbours <= (chip.chips_per_domain or neighbours)
    between = speeds.interconnect_bytes_per_second if is_one_domain else speeds.network_bytes_per_second
    own = replace(
        speeds,
        flops_per_second=speeds.flops_per_second / share,
        hbm_bytes=speeds.hbm_bytes // share,
        hbm_bytes_per_second=speeds.hbm_bytes_per_second / share,
    )
    return own, between / share
