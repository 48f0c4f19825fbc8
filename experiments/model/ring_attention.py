"""Context parallelism: causal attention where the positions of every sequence are sharded over devices, in order.

The attention here consists of blocks of plain matmuls and runs on every platform, with keys that go round a ring or are
all-gathered; `context_splash` uses a TPU kernel instead. `context_layout` computes what each device has to do. Nothing
of size T x T exists on any device, and nothing of it is saved for the backward pass, which keeps q, k, v, the result
and one number per query, and recomputes scores.

1. Zigzag. With n devices a sequence consists of 2n halves of a device's positions, and device i holds halves 2i and
   2i + 1. Later positions see more keys. So halves of queries are redistributed: device j attends for halves j and
   2n - 1 - j, which together see 2n + 1 halves of keys, whatever j is. Even halves move in one permutation and odd ones
   in another, because each of the two reaches every device once. Results go back the same way. Outside of attention
   every position is where it always was.
2. `gather`: a device all-gathers keys and values of the whole sequence, in order. `ring`: keys and values are put in
   zigzag order too, and go from device to device. Every round but the first, in which a device meets its own keys, has
   two halves of keys for two of queries without any key in the future.
3. A window that reaches over few devices is balanced by itself, and its keys are near. Then nothing is redistributed:
   `gather` collects keys from the few devices before, and `ring` ends after as many rounds.
4. The work is done in blocks. For each pair of blocks of queries, one from either half, a loop runs over the blocks of
   keys that the first and then the second may see. Its length is that of the device with most work. Which keys a block
   may see is arithmetic on positions, so that one program serves all devices.

Gradients of keys and values are accumulated in float32: in the ring as they go round; in a gather on each device,
before they are reduce-scattered in their own dtype, like every gradient that crosses devices.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, G = N / K, H width of a head of
queries and keys, W width of a head of values. On one device: t positions, 2 halves of c, P halves of keys, M blocks a
half, C positions a block, R = G C rows of a block of queries. D: any trailing axes.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.model.context_layout import AttentionInputs, BlockVisits, SequenceLayout, compute_own_visits, max_steps
from runner.parallel.mesh import list_axes

_WIDE = jnp.float32
_MASKED = -1e30  # below every real score, and finite, so that no difference of scores is NaN


# Communication between devices, inside a `shard_map`.


def to_zigzag(layout: SequenceLayout, x: jax.Array) -> jax.Array:
    """Return the two halves (B, 2, c, D) that a device attends for, from its shard (B, t, D).

    They come from both ends of each sequence, or are the device's own if the layout is not zigzag.
    """
    halves = x.reshape(x.shape[0], 2, layout.half_tokens, *x.shape[2:])
    if not layout.is_zigzag:
        return halves
    even, odd = (_permute(layout, halves[:, parity], _zigzag(layout, parity)) for parity in (0, 1))
    is_even = jax.lax.axis_index(layout.axes) % 2 == 0
    return jnp.stack([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def from_zigzag(layout: SequenceLayout, halves: jax.Array) -> jax.Array:
    """Return `x` of `to_zigzag(layout, x)`."""
    if layout.is_zigzag:
        is_even = jax.lax.axis_index(layout.axes) % 2 == 0
        first, second = halves[:, 0], halves[:, 1]
        sent = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
        received = (
            _permute(layout, half, [(target, source) for source, target in _zigzag(layout, parity)])
            for parity, half in enumerate(sent)
        )
        halves = jnp.stack([*received], axis=1)
    return halves.reshape(halves.shape[0], -1, *halves.shape[3:])


def _zigzag(layout: SequenceLayout, parity: int) -> list[tuple[int, int]]:
    """Return (source, target) of each half of this parity.

    The parity of a device determines whether its first half is even or odd.
    """
    n = layout.num_shards
    halves = [2 * place + parity for place in range(n)]
    return [(place, half if half < n else 2 * n - 1 - half) for place, half in enumerate(halves)]


def _permute(layout: SequenceLayout, x: jax.Array, pairs: list[tuple[int, int]]) -> jax.Array:
    """Send `x` from each source to its target; no communication if all stay, as the even halves of two devices do."""
    if all(source == target for source, target in pairs):
        return x
    return jax.lax.ppermute(x, layout.axes, pairs)


def gather_keys(layout: SequenceLayout, x: jax.Array) -> jax.Array:
    """Return (B, P c, D) from (B, t, D): the whole sequence, or with a narrow window what it reaches.

    Positions before the beginning of a sequence are zeros.
    """
    if layout.is_zigzag:
        return _gather_sequence(layout, x)
    n = layout.num_shards
    others = [
        jax.lax.ppermute(x, layout.axes, [(place, place + distance) for place in range(n - distance)])
        for distance in range(layout.num_preceding, 0, -1)
    ]
    return jnp.concatenate([*others, x], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gather_sequence(layout: SequenceLayout, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, layout.axes, axis=1, tiled=True)


_gather_sequence.defvjp(
    lambda layout, x: (_gather_sequence(layout, x), None), lambda layout, _, g: (scatter_gradients(layout, g),)
)


def scatter_gradients(layout: SequenceLayout, x: jax.Array) -> jax.Array:
    """Return the sum over all devices of the gradients of a device's own positions; the transpose of `gather_keys`."""
    if layout.is_zigzag:
        # The sum is taken of a matrix of positions and everything else: with more axes libtpu makes an all-reduce,
        # which sends twice as much.
        B, T, *rest = x.shape
        x_TxBD = x.swapaxes(0, 1).reshape(T, -1)
        own_txBD = jax.lax.psum_scatter(x_TxBD, layout.axes, scatter_dimension=0, tiled=True)
        return own_txBD.reshape(-1, B, *rest).swapaxes(0, 1)
    n, parts = layout.num_shards, jnp.split(x, layout.num_preceding + 1, axis=1)
    total = parts.pop()
    for distance, part in zip(range(layout.num_preceding, 0, -1), parts, strict=True):
        back = [(place + distance, place) for place in range(n - distance)]
        total = total + jax.lax.ppermute(part, layout.axes, back)
    return total


# Forward and backward passes.


class Keys(NamedTuple):
    """Blocks of keys and values at hand, in ascending order of their positions."""

    k: jax.Array  # (PM, B, K, C, H)
    v: jax.Array  # (PM, B, K, C, W)
    ids: jax.Array | None = None  # (2nM, B, C): segments of the whole sequence, which are small and do not move


class _OutputGradients(NamedTuple):
    """Residuals and gradients of the result for the backward pass, in pairs of blocks of queries."""

    g: jax.Array  # (M, 2, B, K, R, W): gradient of the result
    lse: jax.Array  # (M, 2, B, K, R): logarithm of the sum of exponentials of scores
    dot: jax.Array  # (M, 2, B, K, R): product of the gradient and the result, summed over W


class _OnlineSoftmax(NamedTuple):
    """State of a softmax that receives its scores block by block."""

    most: jax.Array  # (M, 2, B, K, R): largest score so far
    total: jax.Array  # (M, 2, B, K, R): sum of exp(score - most)
    out: jax.Array  # (M, 2, B, K, R, W): sum of exp(score - most) v


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sharded_attention(layout: SequenceLayout, inputs: AttentionInputs) -> jax.Array:
    """Attend from all positions of sharded sequences; returns (B, T, N, W) in the dtype of `v`.

    Inputs are whole arrays, in a program that the partitioner splits under the caller's mesh.
    """
    return _forward(layout, inputs)[0]


def _forward(layout: SequenceLayout, inputs: AttentionInputs) -> tuple[jax.Array, tuple[Any, ...]]:
    run = jax.shard_map(
        functools.partial(_forward_on_device, layout),
        in_specs=(layout.input_specs,),
        out_specs=(layout.spec, _lse_spec(layout)),
        check_vma=False,
    )
    out, lse = run(inputs)
    return out, (inputs, out, lse)


def _backward(layout: SequenceLayout, residuals: tuple[Any, ...], g: jax.Array) -> tuple[AttentionInputs]:
    inputs, out, lse = residuals
    run = jax.shard_map(
        functools.partial(_backward_on_device, layout),
        in_specs=(layout.input_specs, layout.spec, _lse_spec(layout), layout.spec),
        out_specs=layout.input_specs,
        check_vma=False,
    )
    return (run(inputs, out, lse, g),)


sharded_attention.defvjp(_forward, _backward)


def _lse_spec(layout: SequenceLayout) -> PartitionSpec:
    batch, positions, heads, _ = layout.spec
    return PartitionSpec(positions, None, batch, heads, None)


def _forward_on_device(layout: SequenceLayout, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
    q, k, v, _, _, sinks_N = inputs
    queries = _pair_blocks(layout, q, k.shape[2])
    shape = queries.shape[:-1]
    softmax = _OnlineSoftmax(
        jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, v.shape[3]), jnp.float32)
    )
    if sinks_N is not None:  # the first score of every query, for the value zero
        sinks_KxR = _repeat_for_rows(layout, sinks_N, k.shape[2])
        softmax = _OnlineSoftmax(jnp.broadcast_to(sinks_KxR, shape), jnp.ones(shape, jnp.float32), softmax.out)
    last = layout.num_rounds - 1

    def run_round(number: jax.Array, carry: tuple[Keys, _OnlineSoftmax]) -> tuple[Keys, _OnlineSoftmax]:
        keys, softmax = carry
        next_keys = _pass_along_ring(layout, keys)  # issued first, so that it overlaps with the work on these keys
        return next_keys, _attend_to(layout, queries, keys, compute_own_visits(layout, number), range(last), softmax)

    keys = _make_first_keys(layout, inputs)
    if last:
        keys, softmax = jax.lax.fori_loop(0, last, run_round, (keys, softmax))
    softmax = _attend_to(layout, queries, keys, compute_own_visits(layout, last), range(last, last + 1), softmax)
    total = jnp.where(softmax.total > 0, softmax.total, 1)  # queries that pad a block may see nothing
    out = _unpair_blocks(layout, softmax.out / total[..., None], q.shape[2])
    return out.astype(v.dtype), softmax.most + jnp.log(total)


def _backward_on_device(
    layout: SequenceLayout, inputs: AttentionInputs, out: jax.Array, lse: jax.Array, g: jax.Array
) -> AttentionInputs:
    q, k, v, _, _, sinks_N = inputs
    K = k.shape[2]
    dot = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1, keepdims=True)
    pairs = [_pair_blocks(layout, x, K) for x in (q, g, dot)]
    queries, outputs = pairs[0], _OutputGradients(pairs[1], lse, pairs[2][..., 0])
    dq = jnp.zeros(queries.shape, jnp.float32)
    last = layout.num_rounds - 1
    keys = _make_first_keys(layout, inputs)
    zeros = Keys(jnp.zeros(keys.k.shape, jnp.float32), jnp.zeros(keys.v.shape, jnp.float32))

    def run_round(number: jax.Array, carry: tuple[Keys, Keys, jax.Array]) -> tuple[Keys, Keys, jax.Array]:
        keys, gradients, dq = carry
        # Both are issued first, so that they overlap with the work on these keys.
        next_keys, received = _pass_along_ring(layout, keys), _pass_along_ring(layout, gradients)
        visits = compute_own_visits(layout, number)
        own, dq = _differentiate(layout, queries, outputs, keys, visits, range(last), zeros, dq)
        return next_keys, jax.tree.map(jnp.add, received, own), dq

    # After each round the gradients at hand are those of the keys that were at hand in it.
    gradients = zeros
    if last:
        keys, gradients, dq = jax.lax.fori_loop(0, last, run_round, (keys, zeros, dq))
        gradients = _pass_along_ring(layout, gradients)
    gradients, dq = _differentiate(
        layout, queries, outputs, keys, compute_own_visits(layout, last), range(last, last + 1), gradients, dq
    )

    # Send the gradients to the devices that hold the keys.
    if layout.way == "ring" and layout.num_rounds > 1:
        gradients = _pass_along_ring(layout, gradients, 1 - layout.num_rounds)
    returned = []
    for x, like in ((gradients.k, k), (gradients.v, v)):
        halves = _join_blocks(layout, x.reshape(-1, layout.num_blocks, *x.shape[1:]))
        if layout.way == "ring":
            returned.append(from_zigzag(layout, halves).astype(like.dtype))
        else:
            whole = halves.reshape(halves.shape[0], -1, *halves.shape[3:]).astype(like.dtype)
            returned.append(scatter_gradients(layout, whole))
    dsinks_N: jax.Array | None = None
    if sinks_N is not None:
        weights = jnp.exp(_repeat_for_rows(layout, sinks_N, K) - lse)
        own_KxR = -jnp.sum(weights * outputs.dot, axis=(0, 1, 2))
        own_N = jnp.sum(own_KxR.reshape(q.shape[2], layout.block_tokens), axis=-1)
        # Devices with other sequences or other positions have the same sinks.
        dsinks_N = jax.lax.psum(own_N, (*list_axes(layout.spec[0]), *list_axes(layout.axes))).astype(sinks_N.dtype)
    dq = _unpair_blocks(layout, dq, q.shape[2]).astype(q.dtype)
    return AttentionInputs(dq, returned[0], returned[1], sinks=dsinks_N)


def _make_first_keys(layout: SequenceLayout, inputs: AttentionInputs) -> Keys:
    """Return the keys of the first round."""

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, layout.half_tokens, *x.shape[2:])

    if layout.way == "ring":
        halves = [to_zigzag(layout, x) for x in (inputs.k, inputs.v)]
    else:
        halves = [split(gather_keys(layout, x)) for x in (inputs.k, inputs.v)]
    if inputs.segments is not None:
        halves.append(split(jax.lax.all_gather(inputs.segments, layout.axes, axis=1, tiled=True)))
    k, v, *segments = (x.reshape(-1, *x.shape[2:]) for x in (_split_blocks(layout, half) for half in halves))
    return Keys(k, v, segments[0] if segments else None)


def _pass_along_ring(layout: SequenceLayout, keys: Keys, distance: int = 1) -> Keys:
    """Return what the device had that is `distance` places before this one in the ring."""
    n = layout.num_shards
    pairs = [(place, (place + distance) % n) for place in range(n)]
    return keys._replace(k=jax.lax.ppermute(keys.k, layout.axes, pairs), v=jax.lax.ppermute(keys.v, layout.axes, pairs))


# Blocks of one device.


def _attend_to(
    layout: SequenceLayout, queries: jax.Array, keys: Keys, visits: BlockVisits, rounds: range, softmax: _OnlineSoftmax
) -> _OnlineSoftmax:
    """Return the softmax of all queries (M, 2, B, K, R, H), updated with the keys at hand.

    The loop is as long as any device needs in any of `rounds`.
    """
    num_steps = max_steps(layout, rounds)

    def attend_pair(_: None, pair: tuple[jax.Array, BlockVisits, _OnlineSoftmax]) -> tuple[None, _OnlineSoftmax]:
        queries, visits, softmax = pair

        def step(number: jax.Array, softmax: _OnlineSoftmax) -> _OnlineSoftmax:
            tile = _make_tile(layout, queries, keys, visits, number)
            most, total, out = (_get(x, tile.half) for x in softmax)
            scores, _ = _compute_scores(layout, tile)
            new_most = jnp.maximum(most, jnp.max(scores, axis=-1))
            weights = jnp.where(tile.mask, jnp.exp(scores - new_most[..., None]), 0)
            shrink = jnp.exp(most - new_most)
            added = jnp.einsum("bkrs,bksw->bkrw", weights.astype(tile.v.dtype), tile.v, preferred_element_type=_WIDE)
            new = (new_most, total * shrink + jnp.sum(weights, axis=-1), out * shrink[..., None] + added)
            return _OnlineSoftmax(*(_put(x, part, tile.half) for x, part in zip(softmax, new, strict=True)))

        return None, jax.lax.fori_loop(0, num_steps, step, softmax)

    return jax.lax.scan(attend_pair, None, (queries, visits, softmax))[1]


def _differentiate(
    layout: SequenceLayout,
    queries: jax.Array,
    outputs: _OutputGradients,
    keys: Keys,
    visits: BlockVisits,
    rounds: range,
    gradients: Keys,
    dq: jax.Array,
) -> tuple[Keys, jax.Array]:
    """Add to the float32 gradients of the keys and values at hand, and of all queries."""
    num_steps = max_steps(layout, rounds)

    def differentiate_pair(
        gradients: Keys, pair: tuple[jax.Array, _OutputGradients, BlockVisits, jax.Array]
    ) -> tuple[Keys, jax.Array]:
        queries, outputs, visits, dq = pair

        def step(number: jax.Array, carry: tuple[Keys, jax.Array]) -> tuple[Keys, jax.Array]:
            (dk, dv, _), dq = carry
            tile = _make_tile(layout, queries, keys, visits, number)
            g, lse, dot = (_get(x, tile.half) for x in outputs)
            scores, slope = _compute_scores(layout, tile)
            weights = jnp.where(tile.mask, jnp.exp(scores - lse[..., None]), 0)
            dweights = jnp.einsum("bkrw,bksw->bkrs", g, tile.v, preferred_element_type=_WIDE)
            dscores = (weights * (dweights - dot[..., None]) * slope * layout.scale).astype(tile.k.dtype)
            dv_block = jnp.einsum("bkrs,bkrw->bksw", weights.astype(g.dtype), g, preferred_element_type=_WIDE)
            dk_block = jnp.einsum("bkrs,bkrh->bksh", dscores, tile.q, preferred_element_type=_WIDE)
            dq_block = jnp.einsum("bkrs,bksh->bkrh", dscores, tile.k, preferred_element_type=_WIDE)
            dk, dv = _add(dk, dk_block, tile.block), _add(dv, dv_block, tile.block)
            return Keys(dk, dv), _add(dq, dq_block, tile.half)

        return jax.lax.fori_loop(0, num_steps, step, (gradients, dq))

    return jax.lax.scan(differentiate_pair, gradients, (queries, outputs, visits, dq))


class _Tile(NamedTuple):
    """Block of queries and the block of keys that it attends to in one step."""

    half: jax.Array  # 0 or 1: index in the pair of blocks of queries
    block: jax.Array  # index of the block of keys
    q: jax.Array  # (B, K, R, H)
    k: jax.Array  # (B, K, C, H)
    v: jax.Array  # (B, K, C, W)
    mask: jax.Array  # (B or 1, 1, R, C)


def _make_tile(layout: SequenceLayout, queries: jax.Array, keys: Keys, visits: BlockVisits, number: jax.Array) -> _Tile:
    """Return the tile of a step: the first block of the pair visits all its keys, then the second block does.

    A device that has fewer steps than another one masks everything in the remaining steps.
    """
    half = (number >= visits.count[0]).astype(jnp.int32)
    turn = number - half * visits.count[0]
    count = _get(visits.count, half)
    block = _get(visits.first, half) + jnp.clip(turn, 0, jnp.maximum(count - 1, 0))
    block = jnp.minimum(block, keys.k.shape[0] - 1)  # stays a valid index where there is nothing to visit
    offsets = jnp.arange(layout.block_tokens)
    in_half = block % layout.num_blocks * layout.block_tokens + offsets
    query_positions = (_get(visits.query_positions, half) + offsets)[:, None]
    key_positions = _get(visits.key_positions, block // layout.num_blocks) + in_half
    mask = (turn < count) & (in_half < layout.half_tokens) & (key_positions >= 0) & (query_positions >= key_positions)
    if layout.options.window is not None:
        mask &= query_positions - key_positions < layout.options.window
    mask = mask[None]
    if keys.ids is not None:
        own, others = (
            _get(keys.ids, _find_block(layout, first)) for first in (query_positions[0, 0], key_positions[0])
        )
        mask = mask & (own[:, :, None] == others[:, None, :])
    q = _get(queries, half)
    # The queries of all heads of a group are rows of one matmul.
    mask = jnp.tile(mask, (1, q.shape[2] // layout.block_tokens, 1))[:, None]
    return _Tile(half, block, q, _get(keys.k, block), _get(keys.v, block), mask)


def _find_block(layout: SequenceLayout, position: jax.Array) -> jax.Array:
    """Return the block of a sequence that begins at a position; the first one for a position before the sequence."""
    half = jnp.maximum(position, 0) // layout.half_tokens
    in_half = jnp.maximum(position, 0) % layout.half_tokens
    return half * layout.num_blocks + in_half // layout.block_tokens


def _compute_scores(layout: SequenceLayout, tile: _Tile) -> tuple[jax.Array, jax.Array | float]:
    """Return masked scores (B, K, R, C) in float32, and their derivative by the scores before the soft-cap."""
    scores = jnp.einsum("bkrh,bksh->bkrs", tile.q, tile.k, preferred_element_type=_WIDE) * layout.scale
    slope: jax.Array | float = 1.0
    softcap = layout.options.softcap
    if softcap is not None:
        capped = jnp.tanh(scores / softcap)
        scores, slope = softcap * capped, 1 - capped * capped
    return jnp.where(tile.mask, scores, _MASKED), slope


# Rearrangement of a device's halves into blocks and back.


def _split_blocks(layout: SequenceLayout, halves: jax.Array) -> jax.Array:
    """Return (P, M, B, N, C, H) from (B, P, c, N, H), or (P, M, B, C) from (B, P, c); the last block is padded."""
    B, P, c, *rest = halves.shape
    missing = layout.num_blocks * layout.block_tokens - c
    padded = jnp.pad(halves, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * len(rest)) if missing else halves
    blocks = padded.reshape(B, P, layout.num_blocks, layout.block_tokens, *rest)
    return blocks.transpose(1, 2, 0, 4, 3, 5) if rest else blocks.transpose(1, 2, 0, 3)


def _join_blocks(layout: SequenceLayout, blocks: jax.Array) -> jax.Array:
    """Return halves (B, P, c, N, H) from (P, M, B, N, C, H), without the padding."""
    P, M, B, N, C, H = blocks.shape
    return blocks.transpose(2, 0, 1, 4, 3, 5).reshape(B, P, M * C, N, H)[:, :, : layout.half_tokens]


def _pair_blocks(layout: SequenceLayout, x: jax.Array, num_key_heads: int) -> jax.Array:
    """Return pairs of blocks, (M, 2, B, K, R, H), from a device's shard of queries (B, t, N, H).

    Block m of the lower half is paired with block M - 1 - m of the upper half; queries of a group are rows.
    """
    blocks = _split_blocks(layout, to_zigzag(layout, x))
    *outer, N, C, H = blocks.shape
    blocks = blocks.reshape(*outer, num_key_heads, N // num_key_heads * C, H)
    return jnp.stack([blocks[0], blocks[1, ::-1]], axis=1)


def _repeat_for_rows(layout: SequenceLayout, sinks_N: jax.Array, num_key_heads: int) -> jax.Array:
    """Return the sink of each row of a block of queries, (K, R), float32."""
    rows = jnp.repeat(sinks_N.astype(jnp.float32), layout.block_tokens)
    return rows.reshape(num_key_heads, -1)


def _unpair_blocks(layout: SequenceLayout, pairs: jax.Array, num_heads: int) -> jax.Array:
    """Return `x` of `_pair_blocks(layout, x, K)`, with N heads."""
    blocks = jnp.stack([pairs[:, 0], pairs[::-1, 1]])
    blocks = blocks.reshape(*blocks.shape[:3], num_heads, layout.block_tokens, blocks.shape[-1])
    return from_zigzag(layout, _join_blocks(layout, blocks))


def _get(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)


def _add(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return _put(x, _get(x, index) + part, index)
