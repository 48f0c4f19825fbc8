"""Causal attention where the positions of every row lie on several devices, in order.

Owns the exchange of queries, keys and values, and an attention in blocks of plain matmuls that runs on every platform;
`row_splash` puts the TPU's kernel in its place. Nothing of T x T exists on any device, and nothing of it is kept for
the backward pass: that keeps q, k, v, the result and one number a query, and computes scores again.

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
   block may see is arithmetic on positions (`_visits`), so that one program serves all devices.

Gradients of keys and values are summed in float32: in the ring as they go round, of what was gathered on each device,
before they are scattered in their own type, like every gradient that crosses devices.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, G = N / K, H width of a head of
queries and keys, W width of a head of values. On one device: t positions, 2 halves of c, P halves of keys, M blocks a
half, C positions a block, R = G C rows of a block of queries. D: any axes behind.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from experiments.model.blocks import cuts_of, row_parts
from runner.config import RowAttention
from runner.train.row_attention import (
    RowShape,
    Way,
    faster_way,
    is_dealt,
    shards_before,
    speeds_between,
)

MAX_BLOCK_TOKENS = 512
KERNEL_TOKENS = 128  # that a half must be a multiple of for the TPU's kernel
_WIDE = jnp.float32
_MASKED = -1e30  # a score that no real one is below; finite, so that no difference is NaN


@dataclass(frozen=True)
class Rows:
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
    way: Way
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
    def is_dealt(self) -> bool:
        """Whether queries move for the sake of balance."""
        return is_dealt(self.length, self.num_shards, self.window)

    @property
    def before(self) -> int:
        """How many other devices hold keys that a device needs."""
        return shards_before(self.length, self.num_shards, self.window)

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


class Queries(NamedTuple):
    """What of queries a loop over pairs of blocks runs through: block m of the lower half with M - 1 - m of the other.

    In the backward pass with what came of them.
    """

    q: jax.Array  # (M, 2, B, K, R, H)
    ids: jax.Array | None  # (M, 2, B, C)
    g: jax.Array | None = None  # (M, 2, B, K, R, W): the gradient of the result
    lse: jax.Array | None = None  # (M, 2, B, K, R): log of the sum of exponentials of scores
    dot: jax.Array | None = None  # (M, 2, B, K, R): the gradient of the result times the result


class Keys(NamedTuple):
    """Blocks of keys and values, in ascending order of their positions."""

    k: jax.Array  # (PM, B, K, C, H)
    v: jax.Array  # (PM, B, K, C, W)
    ids: jax.Array | None  # (PM, B, C)


class Visits(NamedTuple):
    """Which blocks of keys every block of queries attends to, and where all of these stand."""

    first: Any  # (M, 2)
    count: Any  # (M, 2)
    query_positions: Any  # (M, 2): of the first of a block
    key_positions: Any  # (M, P): of the first of a half, for each pair of blocks of queries the same


def rows_on_devices(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    row_attention: RowAttention,
    *,
    window: int | None,
    softcap: float | None,
    scale: float | None,
) -> Rows | None:
    """How rows lie by the mesh and the rules of the caller; None if every device has whole ones, or can have no halves.

    `auto` takes the way that `row_seconds` predicts to be faster on the mesh's devices.
    """
    spec, T = cuts_of(q.shape, "batch", "sequence", "heads", "head_dim"), q.shape[1]
    n = row_parts()
    if spec is None or n == 1 or T % (2 * n):
        return None
    batch, axes, heads, _ = spec
    if k.shape[2] % _devices(heads):
        heads = None
    spec = PartitionSpec(batch, axes, heads, None)
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    can_kernel = platform_of_mesh() == "tpu" and T // (2 * n) % KERNEL_TOKENS == 0
    way = _way(row_attention, spec, q, k, v, window, can_kernel)
    has_kernel = can_kernel and way == "gather"
    return Rows(T, n, axes, spec, way, window, softcap, factor, _block_tokens(T // (2 * n)), has_kernel)


def _block_tokens(half_tokens: int) -> int:
    """The largest divisor of a half that is no block too long; where all are much shorter, a half is padded to blocks."""
    most = min(half_tokens, MAX_BLOCK_TOKENS)
    divisor = max(size for size in range(1, most + 1) if half_tokens % size == 0)
    return divisor if 4 * divisor >= most else -(-half_tokens // -(-half_tokens // most))


def _way(
    wanted: RowAttention,
    spec: PartitionSpec,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    window: int | None,
    can_kernel: bool,
) -> Way:
    """`wanted`, or the faster one."""
    if wanted != "auto":
        return wanted
    batch, rows, heads, _ = map(_devices, spec)
    shape = RowShape(
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
    return faster_way(shape, *speeds_between("" if device is None else device.device_kind, shape.shards * heads))


def _devices(axes: str | tuple[str, ...] | None) -> int:
    """Over how many devices of the caller's mesh an axis of an array lies that is cut over these axes."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def platform_of_mesh() -> str | None:
    """What the program is compiled for, if the mesh of the caller says so."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else str(device.platform)


def attend_to_rows(rows: Rows, q: jax.Array, k: jax.Array, v: jax.Array, *segments: jax.Array) -> jax.Array:
    """Attend from all positions of rows that lie on several devices; returns (B, T, N, W) in the dtype of `v`.

    Arguments are whole arrays, in a program that the partitioner splits under the caller's mesh.
    """
    return _attend(rows, q, k, v, segments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(rows: Rows, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]) -> jax.Array:
    return _forward(rows, q, k, v, ids)[0]


def _forward(
    rows: Rows, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[Any, ...]]:
    run = jax.shard_map(
        functools.partial(_forward_on_device, rows),
        in_specs=(*[rows.spec] * 3, tuple(rows.ids_spec for _ in ids)),
        out_specs=(rows.spec, _lse_spec(rows)),
        check_vma=False,
    )
    out, lse = run(q, k, v, ids)
    return out, (q, k, v, ids, out, lse)


def _backward(rows: Rows, kept: tuple[Any, ...], g: jax.Array) -> tuple[Any, ...]:
    ids = kept[3]
    run = jax.shard_map(
        functools.partial(_backward_on_device, rows),
        in_specs=(*[rows.spec] * 3, tuple(rows.ids_spec for _ in ids), rows.spec, _lse_spec(rows), rows.spec),
        out_specs=(rows.spec,) * 3,
        check_vma=False,
    )
    return *run(*kept, g), None


_attend.defvjp(_forward, _backward)


def _lse_spec(rows: Rows) -> PartitionSpec:
    batch, positions, heads, _ = rows.spec
    return PartitionSpec(positions, None, batch, heads, None)


# On one device: passes.


class Softmax(NamedTuple):
    """A softmax whose scores come block by block, and what it weighs."""

    most: jax.Array  # (M, 2, B, K, R): the largest score so far
    total: jax.Array  # (M, 2, B, K, R): sum of exp(score - most)
    out: jax.Array  # (M, 2, B, K, R, W): sum of exp(score - most) v


def _forward_on_device(
    rows: Rows, q: jax.Array, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    queries = Queries(_paired(rows, q, k.shape[2]), _paired_ids(rows, ids))
    shape = queries.q.shape[:-1]
    softmax = Softmax(
        jnp.full(shape, _MASKED), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, v.shape[3]), jnp.float32)
    )
    last = rows.num_rounds - 1

    def of_round(number: jax.Array, carry: tuple[Keys, Softmax]) -> tuple[Keys, Softmax]:
        keys, softmax = carry
        to_come = _passed_on(rows, keys)  # while these are at work
        return to_come, _attend_to(rows, queries, keys, _visits_here(rows, number), range(last), softmax)

    keys = _keys_at_hand(rows, k, v, ids)
    if last:
        keys, softmax = jax.lax.fori_loop(0, last, of_round, (keys, softmax))
    softmax = _attend_to(rows, queries, keys, _visits_here(rows, last), range(last, last + 1), softmax)
    total = jnp.where(softmax.total > 0, softmax.total, 1)  # what only pads a block may see nothing
    out = _unpaired(rows, softmax.out / total[..., None], q.shape[2])
    return out.astype(v.dtype), softmax.most + jnp.log(total)


def _backward_on_device(
    rows: Rows,
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
    queries = Queries(pairs[0], _paired_ids(rows, ids), pairs[1], lse, pairs[2][..., 0])
    dq = jnp.zeros(queries.q.shape, jnp.float32)
    last = rows.num_rounds - 1
    keys = _keys_at_hand(rows, k, v, ids)
    none = Keys(jnp.zeros(keys.k.shape, jnp.float32), jnp.zeros(keys.v.shape, jnp.float32), None)

    def of_round(number: jax.Array, carry: tuple[Keys, Keys, jax.Array]) -> tuple[Keys, Keys, jax.Array]:
        keys, gradients, dq = carry
        to_come, come = _passed_on(rows, keys), _passed_on(rows, gradients)  # while these are at work
        visits = _visits_here(rows, number)
        found, dq = _differentiate(rows, queries, keys, visits, range(last), none, dq)
        return to_come, jax.tree.map(jnp.add, come, found), dq

    # At the end of each round the gradients at hand are those of the keys that were at hand in it.
    gradients = none
    if last:
        keys, gradients, dq = jax.lax.fori_loop(0, last, of_round, (keys, none, dq))
        gradients = _passed_on(rows, gradients)
    gradients, dq = _differentiate(rows, queries, keys, _visits_here(rows, last), range(last, last + 1), gradients, dq)
    dk, dv = _gradients_brought_home(rows, gradients, k, v)
    return _unpaired(rows, dq, q.shape[2]).astype(q.dtype), dk, dv


# On one device: blocks.


def _attend_to(
    rows: Rows, queries: Queries, keys: Keys, visits: Visits, rounds: range, softmax: Softmax
) -> Softmax:
    """The softmax of all queries with the keys that are here; no device needs more steps in any of these `rounds`."""
    num_steps = _num_steps(rows, rounds)

    def of_pair(_: None, pair: tuple[Queries, Visits, Softmax]) -> tuple[None, Softmax]:
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

        return None, jax.lax.fori_loop(0, num_steps, step, softmax)

    return jax.lax.scan(of_pair, None, (queries, visits, softmax))[1]


def _differentiate(
    rows: Rows,
    queries: Queries,
    keys: Keys,
    visits: Visits,
    rounds: range,
    gradients: Keys,
    dq: jax.Array,
) -> tuple[Keys, jax.Array]:
    """Add to the gradients of the keys and values that are here, and of all queries; both are float32."""
    num_steps = _num_steps(rows, rounds)

    def of_pair(gradients: Keys, pair: tuple[Queries, Visits, jax.Array]) -> tuple[Keys, jax.Array]:
        queries, visits, dq = pair
        assert queries.g is not None
        assert queries.lse is not None
        assert queries.dot is not None

        def step(number: jax.Array, carry: tuple[Keys, jax.Array]) -> tuple[Keys, jax.Array]:
            (dk, dv, _), dq = carry
            tile = _tile(rows, queries, keys, visits, number)
            g, lse, dot = (_at(x, tile.half) for x in (queries.g, queries.lse, queries.dot))
            scores, slope = _scores(rows, tile)
            weights = jnp.where(tile.visible, jnp.exp(scores - lse[..., None]), 0)
            dweights = jnp.einsum("bkrw,bksw->bkrs", g, tile.v, preferred_element_type=_WIDE)
            dscores = (weights * (dweights - dot[..., None]) * slope * rows.scale).astype(tile.k.dtype)
            dv_here = jnp.einsum("bkrs,bkrw->bksw", weights.astype(g.dtype), g, preferred_element_type=_WIDE)
            dk_here = jnp.einsum("bkrs,bkrh->bksh", dscores, tile.q, preferred_element_type=_WIDE)
            dq_here = jnp.einsum("bkrs,bksh->bkrh", dscores, tile.k, preferred_element_type=_WIDE)
            dk, dv = _add(dk, dk_here, tile.block), _add(dv, dv_here, tile.block)
            return Keys(dk, dv, None), _add(dq, dq_here, tile.half)

        return jax.lax.fori_loop(0, num_steps, step, (gradients, dq))

    return jax.lax.scan(of_pair, gradients, (queries, visits, dq))


class Tile(NamedTuple):
    """A block of queries and a block of keys that meet."""

    half: jax.Array  # 0 or 1: which of the pair of blocks of queries
    block: jax.Array
    q: jax.Array  # (B, K, R, H)
    k: jax.Array  # (B, K, C, H)
    v: jax.Array  # (B, K, C, W)
    visible: jax.Array  # (B or 1, 1, R, C)


def _tile(rows: Rows, queries: Queries, keys: Keys, visits: Visits, number: jax.Array) -> Tile:
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
    if queries.ids is not None and keys.ids is not None:
        visible = visible & (_at(queries.ids, half)[:, :, None] == _at(keys.ids, block)[:, None, :])
    q = _at(queries.q, half)
    visible = jnp.tile(visible, (1, q.shape[2] // rows.block_tokens, 1))[:, None]
    return Tile(half, block, q, _at(keys.k, block), _at(keys.v, block), visible)


def _scores(rows: Rows, tile: Tile) -> tuple[jax.Array, jax.Array | float]:
    """Scores (B, K, R, C) in float32, and by how much they grow with what is capped."""
    scores = jnp.einsum("bkrh,bksh->bkrs", tile.q, tile.k, preferred_element_type=_WIDE) * rows.scale
    slope: jax.Array | float = 1.0
    if rows.softcap is not None:
        capped = jnp.tanh(scores / rows.softcap)
        scores, slope = rows.softcap * capped, 1 - capped * capped
    return jnp.where(tile.visible, scores, _MASKED), slope


# Which keys meet which queries: arithmetic on positions, for a device that is known and for the one that asks.


def _visits(rows: Rows, place: Any, number: Any) -> Visits:
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
    return Visits(first, (stop - first).clip(0), first_queries, key_starts + np.zeros((M, 1), np.int32))


def _visits_here(rows: Rows, number: Any) -> Visits:
    visits = _visits(rows, jax.lax.axis_index(rows.axes), number)
    return Visits(*(jnp.asarray(x, jnp.int32) for x in visits))


@functools.lru_cache
def _num_steps(rows: Rows, rounds: range) -> int:
    """The most blocks of keys that a pair of blocks of queries attends to, of any device in any of these rounds."""
    visits = (_visits(rows, place, number) for place in range(rows.num_shards) for number in rounds)
    return max(int(each.count.sum(axis=1).max()) for each in visits)


def _half_positions(rows: Rows, place: Any) -> Any:
    """Where the two halves begin that the device at `place` has queries of, (2,)."""
    n, c = rows.num_shards, rows.half_tokens
    steps, starts = ((c, -c), (0, (2 * n - 1) * c)) if rows.is_dealt else ((2 * c, 2 * c), (0, c))
    return place * np.array(steps, np.int32) + np.array(starts, np.int32)


def _key_positions(rows: Rows, place: Any, number: Any) -> Any:
    """Where the halves of keys begin that are at hand, (P,); those below 0 are none that a row has."""
    c = rows.half_tokens
    if rows.way == "ring":
        source = place - number
        return _half_positions(rows, source % rows.num_shards if rows.is_dealt else source)
    if rows.is_dealt:
        return np.arange(2 * rows.num_shards, dtype=np.int32) * c
    return (place - rows.before) * np.int32(2 * c) + np.arange(2 * (rows.before + 1), dtype=np.int32) * c


# Between devices.


def dealt(rows: Rows, x: jax.Array) -> jax.Array:
    """Two halves of each row (B, 2, c, D), from both ends of it, of (B, t, D); its own where nothing is dealt."""
    halves = x.reshape(x.shape[0], 2, rows.half_tokens, *x.shape[2:])
    if not rows.is_dealt:
        return halves
    even, odd = (jax.lax.ppermute(halves[:, parity], rows.axes, _deal(rows, parity)) for parity in (0, 1))
    is_even = jax.lax.axis_index(rows.axes) % 2 == 0
    return jnp.stack([jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)], axis=1)


def returned(rows: Rows, halves: jax.Array) -> jax.Array:
    """`x` of `dealt(rows, x)`."""
    if rows.is_dealt:
        is_even = jax.lax.axis_index(rows.axes) % 2 == 0
        first, second = halves[:, 0], halves[:, 1]
        sent = jnp.where(is_even, first, second), jnp.where(is_even, second, first)
        back = (
            jax.lax.ppermute(half, rows.axes, [(there, here) for here, there in _deal(rows, parity)])
            for parity, half in enumerate(sent)
        )
        halves = jnp.stack([*back], axis=1)
    return halves.reshape(halves.shape[0], -1, *halves.shape[3:])


def _deal(rows: Rows, parity: int) -> list[tuple[int, int]]:
    """Where the device of each half of this parity sends it. The lower halves of devices come by their own parity."""
    n = rows.num_shards
    halves = [2 * place + parity for place in range(n)]
    return [(place, half if half < n else 2 * n - 1 - half) for place, half in enumerate(halves)]


def gathered(rows: Rows, x: jax.Array) -> jax.Array:
    """(B, P c, D) of (B, t, D): the whole row, or of a narrow window what it reaches; zeros before a row's begin."""
    if rows.is_dealt:
        return jax.lax.all_gather(x, rows.axes, axis=1, tiled=True)
    n = rows.num_shards
    others = [
        jax.lax.ppermute(x, rows.axes, [(place, place + distance) for place in range(n - distance)])
        for distance in range(rows.before, 0, -1)
    ]
    return jnp.concatenate([*others, x], axis=1)


def _scattered(rows: Rows, x: jax.Array) -> jax.Array:
    """The sum of what all devices have of a device's own positions, of what lies as `gathered` has it."""
    if rows.is_dealt:
        return jax.lax.psum_scatter(x, rows.axes, scatter_dimension=1, tiled=True)
    n, parts = rows.num_shards, jnp.split(x, rows.before + 1, axis=1)
    total = parts.pop()
    for distance, part in zip(range(rows.before, 0, -1), parts, strict=True):
        back = [(place + distance, place) for place in range(n - distance)]
        total = total + jax.lax.ppermute(part, rows.axes, back)
    return total


def _keys_at_hand(rows: Rows, k: jax.Array, v: jax.Array, ids: tuple[jax.Array, ...]) -> Keys:
    """What the first round finds."""
    if rows.way == "ring":
        halves = [dealt(rows, x) for x in (k, v, *ids)]
    else:
        whole = [gathered(rows, x) for x in (k, v, *ids)]
        halves = [x.reshape(x.shape[0], -1, rows.half_tokens, *x.shape[2:]) for x in whole]
    blocks = [_blocks(rows, x) for x in halves]
    k, v, *found = (x.reshape(-1, *x.shape[2:]) for x in blocks)
    return Keys(k, v, found[0] if found else None)


def _passed_on(rows: Rows, keys: Keys, distance: int = 1) -> Keys:
    """What the device before this one had."""
    n = rows.num_shards
    ring = [(place, (place + distance) % n) for place in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, rows.axes, ring), keys)


def _gradients_brought_home(rows: Rows, gradients: Keys, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of the keys and values that were at hand in the last round, as `k` and `v` lie."""
    if rows.way == "ring" and rows.num_rounds > 1:
        gradients = _passed_on(rows, gradients, 1 - rows.num_rounds)
    found = []
    for x, of in ((gradients.k, k), (gradients.v, v)):
        halves = _joined(rows, x.reshape(-1, rows.num_blocks, *x.shape[1:]))
        if rows.way == "ring":
            found.append(returned(rows, halves).astype(of.dtype))
        else:
            found.append(_scattered(rows, halves.reshape(halves.shape[0], -1, *halves.shape[3:]).astype(of.dtype)))
    return found[0], found[1]


# On one device: halves and blocks.


def _blocks(rows: Rows, halves: jax.Array) -> jax.Array:
    """(P, M, B, N, C, H) of halves (B, P, c, N, H), or (P, M, B, C) of (B, P, c); the last block of a half is padded."""
    B, P, c, *rest = halves.shape
    missing = rows.num_blocks * rows.block_tokens - c
    padded = jnp.pad(halves, [(0, 0), (0, 0), (0, missing)] + [(0, 0)] * len(rest)) if missing else halves
    blocks = padded.reshape(B, P, rows.num_blocks, rows.block_tokens, *rest)
    return blocks.transpose(1, 2, 0, 4, 3, 5) if rest else blocks.transpose(1, 2, 0, 3)


def _joined(rows: Rows, blocks: jax.Array) -> jax.Array:
    """Halves (B, P, c, N, H) of (P, M, B, N, C, H), without what padded them."""
    P, M, B, N, C, H = blocks.shape
    return blocks.transpose(2, 0, 1, 4, 3, 5).reshape(B, P, M * C, N, H)[:, :, : rows.half_tokens]


def _paired(rows: Rows, x: jax.Array, num_key_heads: int) -> jax.Array:
    """Blocks in pairs, (M, 2, B, K, R, H), of a device's queries (B, t, N, H); queries of a group are rows."""
    blocks = _blocks(rows, dealt(rows, x))
    *outer, N, C, H = blocks.shape
    blocks = blocks.reshape(*outer, num_key_heads, N // num_key_heads * C, H)
    return jnp.stack([blocks[0], blocks[1, ::-1]], axis=1)


def _unpaired(rows: Rows, pairs: jax.Array, num_heads: int) -> jax.Array:
    """`x` of `_paired(rows, x, K)`, of N heads."""
    blocks = jnp.stack([pairs[:, 0], pairs[::-1, 1]])
    blocks = blocks.reshape(*blocks.shape[:3], num_heads, rows.block_tokens, blocks.shape[-1])
    return returned(rows, _joined(rows, blocks))


def _paired_ids(rows: Rows, ids: tuple[jax.Array, ...]) -> jax.Array | None:
    """Segments of queries in pairs of blocks, (M, 2, B, C)."""
    for x in ids:
        blocks = _blocks(rows, dealt(rows, x))
        return jnp.stack([blocks[0], blocks[1, ::-1]], axis=1)
    return None


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, index, keepdims=False)


def _put(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, index, 0)


def _add(x: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    return _put(x, _at(x, index) + part, index)
