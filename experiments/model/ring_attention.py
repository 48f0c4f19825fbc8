"""Causal attention where the positions of every row lie on several devices, in order.

Owns an attention in blocks of plain matmuls that runs on every platform; `row_splash` puts the TPU's kernel in its
place. What each device has to do is said by `row_layout`, what goes between devices by `row_exchange`. Nothing of T x T
exists on any device, and nothing of it is kept for the backward pass: that keeps q, k, v, the result and one number a
query, and computes scores again.

1. With n devices a row is 2n halves of a device's positions, and device i holds halves 2i and 2i + 1. Later positions
   see more keys. So halves of queries are dealt: device j attends for halves j and 2n - 1 - j, which see 2n + 1 halves
   of keys together, whatever j. Even halves go round by one exchange and odd ones by another, as each of them reaches
   every device once. Results go back the same way; outside of attention every position is where it always was.
2. `gather`: a device collects keys and values of the whole row, in order. `ring`: keys and values are dealt as queries
   are, and go from device to device; in every round but the first, which meets the device's own, there are two halves
   of keys for two of queries in which nothing is in the future.
3. A window that reaches over few devices is balanced by itself and has its keys near: then nothing is dealt, `gather`
   collects from those few devices before, and `ring` ends after as many rounds.
4. Work is done block by block: for each pair of blocks of queries, one of either half, a loop over the blocks of keys
   that one and then the other may see. It is as long as it must be for the device that has most to do; which keys a
   block may see is arithmetic on positions (`row_layout`), so that one program serves all devices.

Gradients of keys and values are summed in float32: in the ring as they go round, of what was gathered on each device,
before they are scattered in their own type, like every gradient that crosses devices.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, G = N / K, H width of a head of
queries and keys, W width of a head of values. On one device: t positions, 2 halves of c, P halves of keys, M blocks a
half, C positions a block, R = G C rows of a block of queries. D: any axes behind.

What goes from device to device where the positions of a row are cut: inside of a program of one device.

Shape legend: B batch, on one device t positions, 2 halves of c, P halves of keys; D any axes behind.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.model.context_layout import BlockVisits, SequenceLayout, num_steps, visits_here


def dealt(rows: SequenceLayout, x: jax.Array) -> jax.Array:
    """Two halves of each row (B, 2, c, D), from both ends of it, of (B, t, D); its own where nothing is dealt."""
    halves = x.reshape(x.shape[0], 2, rows.half_tokens, *x.shape[2:])
    if not rows.is_redistributed:
        return halves
    even, odd = (_sent(rows, halves[:, parity], _deal(rows, parity)) for parity in (0, 1))
    is_even = jax.lax.axis_index(rows.axes) % 2 == 0
    return jnp.stack([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def returned(rows: SequenceLayout, halves: jax.Array) -> jax.Array:
    """`x` of `dealt(rows, x)`."""
    if rows.is_redistributed:
        is_even = jax.lax.axis_index(rows.axes) % 2 == 0
        first, second = halves[:, 0], halves[:, 1]
        sent = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
        back = (
            _sent(rows, half, [(there, here) for here, there in _deal(rows, parity)])
            for parity, half in enumerate(sent)
        )
        halves = jnp.stack([*back], axis=1)
    return halves.reshape(halves.shape[0], -1, *halves.shape[3:])


def _deal(rows: SequenceLayout, parity: int) -> list[tuple[int, int]]:
    """Where the device of each half of this parity sends it. The lower halves of devices come by their own parity."""
    n = rows.num_shards
    halves = [2 * place + parity for place in range(n)]
    return [(place, half if half < n else 2 * n - 1 - half) for place, half in enumerate(halves)]


def _sent(rows: SequenceLayout, x: jax.Array, ways: list[tuple[int, int]]) -> jax.Array:
    """What comes if every device sends; nothing moves where all keep their own, as even halves of two devices do."""
    if all(here == there for here, there in ways):
        return x
    return jax.lax.ppermute(x, rows.axes, ways)


def gathered(rows: SequenceLayout, x: jax.Array) -> jax.Array:
    """(B, P c, D) of (B, t, D): the whole row, or of a narrow window what it reaches; zeros before a row's begin."""
    if rows.is_redistributed:
        return _whole(rows, x)
    n = rows.num_shards
    others = [
        jax.lax.ppermute(x, rows.axes, [(place, place + distance) for place in range(n - distance)])
        for distance in range(rows.before, 0, -1)
    ]
    return jnp.concatenate([*others, x], axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole(rows: SequenceLayout, x: jax.Array) -> jax.Array:
    return jax.lax.all_gather(x, rows.axes, axis=1, tiled=True)


_whole.defvjp(lambda rows, x: (_whole(rows, x), None), lambda rows, _, g: (scattered(rows, g),))


def scattered(rows: SequenceLayout, x: jax.Array) -> jax.Array:
    """The sum of what all devices have of a device's own positions, of what lies as `gathered` has it.

    The whole row is summed as a matrix of positions and all else: of more axes libtpu makes an all-reduce, which sends
    twice as much.
    """
    if rows.is_redistributed:
        B, T, *rest = x.shape
        x_TxBD = x.swapaxes(0, 1).reshape(T, -1)
        own_txBD = jax.lax.psum_scatter(x_TxBD, rows.axes, scatter_dimension=0, tiled=True)
        return own_txBD.reshape(-1, B, *rest).swapaxes(0, 1)
    n, parts = rows.num_shards, jnp.split(x, rows.before + 1, axis=1)
    total = parts.pop()
    for distance, part in zip(range(rows.before, 0, -1), parts, strict=True):
        back = [(place + distance, place) for place in range(n - distance)]
        total = total + jax.lax.ppermute(part, rows.axes, back)
    return total


def passed_on(rows: SequenceLayout, x: jax.Array, distance: int = 1) -> jax.Array:
    """What the device had that comes so many before this one in the ring."""
    n = rows.num_shards
    return jax.lax.ppermute(x, rows.axes, [(place, (place + distance) % n) for place in range(n)])


_WIDE = jnp.float32
_MASKED = -1e30  # a score that no real one is below; finite, so that no difference is NaN


class Queries(NamedTuple):
    """What a loop over pairs of blocks runs through: block m of the lower half with block M - 1 - m of the other."""

    q: jax.Array  # (M, 2, B, K, R, H)


class Results(NamedTuple):
    """What came of queries, for the backward pass; in pairs of blocks too."""

    g: jax.Array  # (M, 2, B, K, R, W): the gradient of the result
    lse: jax.Array  # (M, 2, B, K, R): log of the sum of exponentials of scores
    dot: jax.Array  # (M, 2, B, K, R): the gradient of the result times the result


class Keys(NamedTuple):
    """Blocks of keys and values, in ascending order of their positions."""

    k: jax.Array  # (PM, B, K, C, H)
    v: jax.Array  # (PM, B, K, C, W)
    ids: jax.Array | None = None  # (2nM, B, C): segments of the whole row, few as they are, which stay where they are


def attend_to_rows(rows: SequenceLayout, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
    """Attend from all positions of rows that lie on several devices; returns (B, T, N, W) in the dtype of `v`.

    Arguments are whole arrays, in a program that the partitioner splits under the caller's mesh.
    """
    return _attend(rows, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rows: SequenceLayout, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]) -> jax.Array:
    return _forward(rows, q, k, v, ids)[0]


def _forward(
    rows: SequenceLayout, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    run = jax.shard_map(
        functools.partial(_forward_on_device, rows),
        in_specs=(*[rows.spec] * 3, tuple(rows.ids_spec for _ in ids)),
        out_specs=(rows.spec, _lse_spec(rows)),
        check_vma=False,
    )
    out, lse = run(q, k, v, ids)
    return out, (q, k, v, ids, out, lse)


def _backward(rows: SequenceLayout, kept: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    q, k, v, ids, out, lse = kept
    run = jax.shard_map(
        functools.partial(_backward_on_device, rows),
        in_specs=(*[rows.spec] * 3, tuple(rows.ids_spec for _ in ids), rows.spec, _lse_spec(rows), rows.spec),
        out_specs=(rows.spec,) * 3,
        check_vma=False,
    )
    return *run(q, k, v, ids, out, lse, g), None


_attend.defvjp(_forward, _backward)


def _lse_spec(rows: SequenceLayout) -> PartitionSpec:
    batch, positions, heads, _ = rows.spec
    return PartitionSpec(positions, None, batch, heads, None)


# On one device: passes.


class Softmax(NamedTuple):
    """A softmax whose scores come block by block, and what it weighs."""

    most: jax.Array  # (M, 2, B, K, R): the largest score so far
    total: jax.Array  # (M, 2, B, K, R): sum of exp(score - most)
    out: jax.Array  # (M, 2, B, K, R, W): sum of exp(score - most) v


def _forward_on_device(
    rows: SequenceLayout, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    queries = Queries(_paired(rows, q, k.shape[2]))
    shape = queries.q.shape[:-1]
    softmax = Softmax(
        jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, v.shape[3]), jnp.float32)
    )
    last = rows.num_rounds - 1

    def of_round(number: jax.Array, carry: tuple[Keys, Softmax]) -> tuple[Keys, Softmax]:
        keys, softmax = carry
        to_come = _passed_on(rows, keys)  # while these are at work
        return to_come, _attend_to(rows, queries, keys, visits_here(rows, number), range(last), softmax)

    keys = _keys_at_hand(rows, k, v, ids)
    if last:
        keys, softmax = jax.lax.fori_loop(0, last, of_round, (keys, softmax))
    softmax = _attend_to(rows, queries, keys, visits_here(rows, last), range(last, last + 1), softmax)
    total = jnp.where(softmax.total > 0, softmax.total, 1)  # what only pads a block may see nothing
    out = _unpaired(rows, softmax.out / total[..., None], q.shape[2])
    return out.astype(v.dtype), softmax.most + jnp.log(total)


def _backward_on_device(
    rows: SequenceLayout,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    ids: tuple[jax.Array, ...],
    out: jax.Array,
    lse: jax.Array,
    g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    K = k.shape[2]
    dot = jnp.sum(out.astype(jnp.float32) * g.astype(jnp.float32), axis=-1, keepdims=True)
    pairs = [_paired(rows, x, K) for x in (q, g, dot)]
    queries, results = Queries(pairs[0]), Results(pairs[1], lse, pairs[2][..., 0])
    dq = jnp.zeros(queries.q.shape, jnp.float32)
    last = rows.num_rounds - 1
    keys = _keys_at_hand(rows, k, v, ids)
    none = Keys(jnp.zeros(keys.k.shape, jnp.float32), jnp.zeros(keys.v.shape, jnp.float32))

    def of_round(number: jax.Array, carry: tuple[Keys, Keys, jax.Array]) -> tuple[Keys, Keys, jax.Array]:
        keys, gradients, dq = carry
        to_come, come = _passed_on(rows, keys), _passed_on(rows, gradients)  # while these are at work
        visits = visits_here(rows, number)
        found, dq = _differentiate(rows, queries, results, keys, visits, range(last), none, dq)
        return to_come, jax.tree.map(jnp.add, come, found), dq

    # At the end of each round the gradients at hand are those of the keys that were at hand in it.
    gradients = none
    if last:
        keys, gradients, dq = jax.lax.fori_loop(0, last, of_round, (keys, none, dq))
        gradients = _passed_on(rows, gradients)
    gradients, dq = _differentiate(
        rows, queries, results, keys, visits_here(rows, last), range(last, last + 1), gradients, dq
    )
    dk, dv = _gradients_brought_home(rows, gradients, k, v)
    return _unpaired(rows, dq, q.shape[2]).astype(q.dtype), dk, dv


# On one device: blocks.


def _attend_to(
    rows: SequenceLayout, queries: Queries, keys: Keys, visits: BlockVisits, rounds: range, softmax: Softmax
) -> Softmax:
    """The softmax of all queries with the keys that are here; no device needs more steps in any of these `rounds`."""
    most_steps = num_steps(rows, rounds)

    def of_pair(_: None, pair: tuple[Queries, BlockVisits, Softmax]) -> tuple[None, Softmax]:
        queries, visits, softmax = pair

        def step(number: jax.Array, softmax: Softmax) -> Softmax:
            tile = _tile(rows, queries, keys, visits, number)
            most, total, out = (_at(x, tile.half) for x in softmax)
            scores, _ = _scores(rows, tile)
            new_most = jnp.maximum(most, jnp.max(scores, axis=-1))
            weights = jnp.where(tile.visible, jnp.exp(scores - new_most[..., None]), 0)
            shrunk = jnp.exp(most - new_most)
            found = jnp.einsum("bkrs,bksw->bkrw", weights.astype(tile.v.dtype), tile.v, preferred_element_type=_WIDE)
            new = (new_most, total * shrunk + jnp.sum(weights, axis=-1), out * shrunk[..., None] + found)
            return Softmax(*(_put(x, part, tile.half) for x, part in zip(softmax, new, strict=True)))

        return None, jax.lax.fori_loop(0, most_steps, step, softmax)

    return jax.lax.scan(of_pair, None, (queries, visits, softmax))[1]


def _differentiate(
    rows: SequenceLayout,
    queries: Queries,
    results: Results,
    keys: Keys,
    visits: BlockVisits,
    rounds: range,
    gradients: Keys,
    dq: jax.Array,
) -> tuple[Keys, jax.Array]:
    """Add to the gradients of the keys and values that are here, and of all queries; both are float32."""
    most_steps = num_steps(rows, rounds)

    def of_pair(gradients: Keys, pair: tuple[Queries, Results, BlockVisits, jax.Array]) -> tuple[Keys, jax.Array]:
        queries, results, visits, dq = pair

        def step(number: jax.Array, carry: tuple[Keys, jax.Array]) -> tuple[Keys, jax.Array]:
            (dk, dv, _), dq = carry
            tile = _tile(rows, queries, keys, visits, number)
            g, lse, dot = (_at(x, tile.half) for x in results)
            scores, slope = _scores(rows, tile)
            weights = jnp.where(tile.visible, jnp.exp(scores - lse[..., None]), 0)
            dweights = jnp.einsum("bkrw,bksw->bkrs", g, tile.v, preferred_element_type=_WIDE)
            dscores = (weights * (dweights - dot[..., None]) * slope * rows.scale).astype(tile.k.dtype)
            dv_here = jnp.einsum("bkrs,bkrw->bksw", weights.astype(g.dtype), g, preferred_element_type=_WIDE)
            dk_here = jnp.einsum("bkrs,bkrh->bksh", dscores, tile.q, preferred_element_type=_WIDE)
            dq_here = jnp.einsum("bkrs,bksh->bkrh", dscores, tile.k, preferred_element_type=_WIDE)
            dk, dv = _add(dk, dk_here, tile.block), _add(dv, dv_here, tile.block)
            return Keys(dk, dv), _add(dq, dq_here, tile.half)

        return jax.lax.fori_loop(0, most_steps, step, (gradients, dq))

    return jax.lax.scan(of_pair, gradients, (queries, results, visits, dq))


class Tile(NamedTuple):
    """A block of queries and a block of keys that meet."""

    half: jax.Array  # 0 or 1: which of the pair of blocks of queries
    block: jax.Array
    q: jax.Array  # (B, K, R, H)
    k: jax.Array  # (B, K, C, H)
    v: jax.Array  # (B, K, C, W)
    visible: jax.Array  # (B or 1, 1, R, C)


def _tile(rows: SequenceLayout, queries: Queries, keys: Keys, visits: BlockVisits, number: jax.Array) -> Tile:
    """What meets in a step: blocks of the first of the pair until it has met all its keys, then those of the other.

    A device that has fewer steps to do than another sees nothing in the rest of them.
    """
    half = (number >= visits.count[0]).astype(jnp.int32)
    turn = number - half * visits.count[0]
    count = _at(visits.count, half)
    block = _at(visits.first, half) + jnp.clip(turn, 0, jnp.maximum(count - 1, 0))
    block = jnp.minimum(block, keys.k.shape[0] - 1)  # where it has nothing to meet
    places = jnp.arange(rows.block_tokens)
    in_half = block % rows.num_blocks * rows.block_tokens + places
    queries_at = (_at(visits.query_positions, half) + places)[:, None]
    keys_at = _at(visits.key_positions, block // rows.num_blocks) + in_half
    visible = (turn < count) & (in_half < rows.half_tokens) & (keys_at >= 0) & (queries_at >= keys_at)
    if rows.window is not None:
        visible &= queries_at - keys_at < rows.window
    visible = visible[None]
    if keys.ids is not None:
        own, others = (_at(keys.ids, _block_at(rows, first)) for first in (queries_at[0, 0], keys_at[0]))
        visible = visible & (own[:, :, None] == others[:, None, :])
    q = _at(queries.q, half)
    visible = jnp.tile(visible, (1, q.shape[2] // rows.block_tokens, 1))[:, None]
    return Tile(half, block, q, _at(keys.k, block), _at(keys.v, block), visible)


def _block_at(rows: SequenceLayout, position: jax.Array) -> jax.Array:
    """The block of a row that begins at a position; the first for one that no row has."""
    half, in_half = jnp.maximum(position, 0) // rows.half_tokens, jnp.maximum(position, 0) % rows.half_tokens
    return half * rows.num_blocks + in_half // rows.block_tokens


def _scores(rows: SequenceLayout, tile: Tile) -> tuple[jax.Array, jax.Array | float]:
    """Scores (B, K, R, C) in float32, and by how much they grow with what is capped."""
    scores = jnp.einsum("bkrh,bksh->bkrs", tile.q, tile.k, preferred_element_type=_WIDE) * rows.scale
    slope: jax.Array | float = 1.0
    if rows.softcap is not None:
        capped = jnp.tanh(scores / rows.softcap)
        scores, slope = rows.softcap * capped, 1 - capped * capped
    return jnp.where(tile.visible, scores, _MASKED), slope


# On one device: halves and blocks.


def _keys_at_hand(rows: SequenceLayout, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]) -> Keys:
    """What the first round finds."""
    if rows.way == "ring":
        parts = [dealt(rows, x) for x in (k, v)]
    else:
        parts = [_in_halves(rows, gathered(rows, x)) for x in (k, v)]
    row = [_in_halves(rows, jax.lax.all_gather(x, rows.axes, axis=1, tiled=True)) for x in ids]
    k, v, *found = (x.reshape(-1, *x.shape[2:]) for x in (_blocks(rows, halves) for halves in (*parts, *row)))
    return Keys(k, v, found[0] if found else None)


def _in_halves(rows: SequenceLayout, x: jax.Array) -> jax.Array:
    return x.reshape(x.shape[0], -1, rows.half_tokens, *x.shape[2:])


def _passed_on(rows: SequenceLayout, keys: Keys, distance: int = 1) -> Keys:
    return keys._replace(k=passed_on(rows, keys.k, distance), v=passed_on(rows, keys.v, distance))


def _gradients_brought_home(
    rows: SequenceLayout, gradients: Keys, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Gradients of the keys and values that were at hand in the last round, as `k` and `v` lie."""
    if rows.way == "ring" and rows.num_rounds > 1:
        gradients = _passed_on(rows, gradients, 1 - rows.num_rounds)
    found = []
    for x, of in ((gradients.k, k), (gradients.v, v)):
        halves = _joined(rows, x.reshape(-1, rows.num_blocks, *x.shape[1:]))
        if rows.way == "ring":
            found.append(returned(rows, halves).astype(of.dtype))
        else:
            found.append(scattered(rows, halves.reshape(halves.shape[0], -1, *halves.shape[3:]).astype(of.dtype)))
    return found[0], found[1]


def _blocks(rows: SequenceLayout, halves: jax.Array) -> jax.Array:
    """(P, M, B, N, C, H) of halves (B, P, c, N, H), or (P, M, B, C) of (B, P, c); the last block is padded."""
    B, P, c, *rest = halves.shape
    missing = rows.num_blocks * rows.block_tokens - c
    padded = jnp.pad(halves, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * len(rest)) if missing else halves
    blocks = padded.reshape(B, P, rows.num_blocks, rows.block_tokens, *rest)
    return blocks.transpose(1, 2, 0, 4, 3, 5) if rest else blocks.transpose(1, 2, 0, 3)


def _joined(rows: SequenceLayout, blocks: jax.Array) -> jax.Array:
    """Halves (B, P, c, N, H) of (P, M, B, N, C, H), without what padded them."""
    P, M, B, N, C, H = blocks.shape
    return blocks.transpose(2, 0, 1, 4, 3, 5).reshape(B, P, M * C, N, H)[:, :, : rows.half_tokens]


def _paired(rows: SequenceLayout, x: jax.Array, num_key_heads: int) -> jax.Array:
    """Blocks in pairs, (M, 2, B, K, R, H), of a device's queries (B, t, N, H); queries of a group are rows."""
    blocks = _blocks(rows, dealt(rows, x))
    *outer, N, C, H = blocks.shape
    blocks = blocks.reshape(*outer, num_key_heads, N // num_key_heads * C, H)
    return jnp.stack([blocks[0], blocks[1, ::-1]], axis=1)


def _unpaired(rows: SequenceLayout, pairs: jax.Array, num_heads: int) -> jax.Array:
    """`x` of `_paired(rows, x, K)`, of N heads."""
    blocks = jnp.stack([pairs[:, 0], pairs[::-1, 1]])
    blocks = blocks.reshape(*blocks.shape[:3], num_heads, rows.block_tokens, blocks.shape[-1])
    return returned(rows, _joined(rows, blocks))


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)


def _add(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return _put(x, _at(x, index) + part, index)
