"""Fused TPU kernels of causal attention, for sequences that a device holds whole.

There are two kernels: one for the result, and one that computes all gradients from scores that it computes once. JAX's
own kernels compute scores twice or leave the gradient of queries in parts. Gradients of keys and values are accumulated
in VMEM, which must have room for those of a whole sequence. Scores have keys as rows and queries as columns. So the
values that belong to a query form a row of lanes, its maximum and sum need no exchange between lanes, and the
logarithms of the sums are stored as they are read. Queries and keys are rotated as they come in, and their gradients
rotated back as they go out.

Arrays are head-major, (B, N, T, H), or packed, (B, T, N H). The memory of a TPU is in rows of 128 lanes, so a
head-major array of heads of 64 takes twice its size, and what reads or writes it twice the time. A packed array takes
its own size, and projections write and read it as any matrix. The kernels then process the heads of 128 lanes one after
the other: a product over all lanes, with zeros in those of the other heads, is that of one head. Heads can be packed if
their width divides 128 and the heads of queries that share one of keys fill whole rows (`layers.packs_heads`).

A block of queries visits a block of keys only if one of the queries sees one of the keys (`CausalBlocks`). If every
query sees every key, keys are taken in long steps without a mask; otherwise in short steps, each with only those
queries that may see its keys.

Importing this module imports Pallas, which takes long; see `platform.import_for_tpu`.

Shape legend: B batch, N heads of queries, K heads of keys, G = N / K neighbours that share one, T positions, H and W
widths of a head, L = P H lanes of a block of P heads (P = 1 if arrays are head-major), Q queries and S keys that are
taken at once.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace as Refs
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from experiments.model.context_layout import AttentionInputs
from experiments.model.platform import LANES, LONG_STEP, SAVED_NAME

# Flags of a visit: the first one of its block of queries, the last one of it, and the last one of its block of keys.
FIRST, LAST, DONE = 1, 2, 4


# Which blocks of queries visit which blocks of keys, and in which order.


class _BlockWalk(NamedTuple):
    """Visits in order, int32: the columns are prefetched scalars of a kernel."""

    queries: np.ndarray  # block of queries
    keys: np.ndarray  # block of keys
    flags: np.ndarray  # FIRST, LAST and DONE
    written: np.ndarray  # next block of keys to be done, which is where gradients of keys are written


class _BlockStep(NamedTuple):
    """Keys and queries of two blocks that are processed at once."""

    keys: slice
    queries: slice
    ahead: int | None  # position of the first query minus that of the first key; None if no mask is needed


class CausalBlocks(NamedTuple):
    """A causal sequence in blocks, whose size is a multiple of `LANES`; a query sees the last `window` positions."""

    block: int
    window: int | None = None

    def walk(self, length: int) -> _BlockWalk:
        """Return the visits of a sequence: blocks of queries in order, for each the blocks of keys that it sees."""
        # The first query of a block is (distance - 1) * block + 1 positions after the last key of another one.
        number, reach = length // self.block, length if self.window is None else self.window - 1
        visits = [(i, j) for i in range(number) for j in range(i + 1) if (i - j - 1) * self.block < reach]
        last = {key: place for place, (_, key) in enumerate(visits)}
        is_first = [place == 0 or visits[place - 1][0] != query for place, (query, _) in enumerate(visits)]
        is_last, is_done = [i == j for i, j in visits], [last[key] == place for place, (_, key) in enumerate(visits)]
        queries, keys = np.array(visits, np.int32).T
        flags = FIRST * np.array(is_first) | LAST * np.array(is_last) | DONE * np.array(is_done)
        written = np.cumsum(is_done) - is_done  # blocks of keys are done in their order
        return _BlockWalk(queries, keys, flags.astype(np.int32), written.astype(np.int32))

    def sees_all(self, distance: int) -> bool:
        """Return True if every query of a block sees every key of the block that is `distance` blocks before it."""
        return distance > 0 and (self.window is None or (distance + 1) * self.block <= self.window)

    def steps(self, distance: int) -> Iterator[_BlockStep]:
        """Yield the steps of a visit to the block that is `distance` blocks before."""
        if self.sees_all(distance):
            for start in range(0, self.block, LONG_STEP):
                yield _BlockStep(slice(start, min(start + LONG_STEP, self.block)), slice(0, self.block), None)
            return
        behind = distance * self.block  # from a key to the query at the same place in its block
        for start in range(0, self.block, LANES):
            first, stop = max(0, start - behind), self.block
            if self.window is not None:  # stop after the last query that sees the last of these keys
                stop = min(stop, -(-(self.window + start + LANES - 1 - behind) // LANES) * LANES)
            if first < stop:
                yield _BlockStep(slice(start, start + LANES), slice(first, stop), behind + first - start)

    def num_scores(self, length: int) -> int:
        """Return the number of scores that are computed for a sequence, masked or not."""
        walk = self.walk(length)
        return sum(
            (step.keys.stop - step.keys.start) * (step.queries.stop - step.queries.start)
            for distance in (walk.queries - walk.keys).tolist()
            for step in self.steps(distance)
        )


# The operation and its gradient.

UNSEEN = -0.7 * float(np.finfo(np.float32).max)  # a masked score; finite, because differences of two are computed
_PLAIN, _LEFT_TRANSPOSED = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))
_RIGHT_TRANSPOSED = (((1,), (1,)), ((), ()))


class FusedAttention(NamedTuple):
    """Attention to sequences whose length is a multiple of `causal.block`. The kernels read all inputs but sinks."""

    causal: CausalBlocks
    scale: float
    softcap: float | None = None
    vmem_limit_bytes: int | None = None  # None is the compiler's default for every kernel
    packed_head: int | None = None  # width of a head of packed arrays; None: arrays are head-major

    def attend(self, inputs: AttentionInputs) -> jax.Array:
        """Attend; returns (B, N, T, W) in the dtype of `v`, or (B, T, N H) if arrays are packed.

        Args:
            inputs: queries (B, N, T, H), keys (B, K, T, H) and values (B, K, T, W), or packed (B, T, N H), (B, T, K H)
                and (B, T, K H). Cosines and sines are (B or 1, T, L), the same for both halves of a head, and get no
                gradient. Packed heads have no sinks.
        """
        return _attend(self, inputs)

    @property
    def heads(self) -> range:
        """Heads of a block, which are processed one after the other."""
        return range(1 if self.packed_head is None else LANES // self.packed_head)

    def get_rows(self, head: int) -> slice:
        """Return the rows of one head in the transpose of a block."""
        width = self.packed_head
        return slice(None) if width is None else slice(head * width, (head + 1) * width)

    def move(self, x_TxL: jax.Array, source: Any, target: Any) -> jax.Array:
        """Return one head of a block, float32, moved to the lanes of another one, with zeros in all other lanes.

        The product of two blocks over their lanes is then that of one head. It takes the matrix unit no longer than
        the lanes of one head would.
        """
        if self.packed_head is None:
            return x_TxL
        distance = (target - source) * self.packed_head
        if not isinstance(distance, int):
            x_TxL = pltpu.roll(x_TxL, lax.rem(distance + LANES, LANES), axis=1)
        lanes_TxL, first = lax.broadcasted_iota(jnp.int32, x_TxL.shape, 1), target * self.packed_head
        is_own_TxL = (lanes_TxL >= first) & (lanes_TxL < first + self.packed_head)
        return jnp.where(is_own_TxL, x_TxL, jnp.zeros_like(x_TxL))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(attention: FusedAttention, inputs: AttentionInputs) -> jax.Array:
    return _forward(attention, inputs)[0]


def _forward(attention: FusedAttention, inputs: AttentionInputs) -> tuple[jax.Array, tuple[Any, ...]]:
    out, logsumexp = _run_forward(attention, inputs)
    if inputs.sinks is not None:
        # A score for the value zero only adds to the sum that the result is divided by.
        sinks_Nx1x1 = inputs.sinks.astype(jnp.float32)[:, None, None]
        without, logsumexp = logsumexp, jnp.logaddexp(logsumexp, sinks_Nx1x1)
        shrink_BxNxTx1 = jnp.exp(without - logsumexp).swapaxes(2, 3)
        out = (out.astype(jnp.float32) * shrink_BxNxTx1).astype(out.dtype)
    out, logsumexp = (checkpoint_name(x, SAVED_NAME) for x in (out, logsumexp))
    return out, (inputs, out, logsumexp)


def _backward(
    attention: FusedAttention, residuals: tuple[AttentionInputs, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[AttentionInputs]:
    inputs, out, logsumexp = residuals
    # The kernel needs no sinks: they are part of the result and of the logarithms of the sums.
    q, k, v = _run_backward(attention, inputs, out, logsumexp, gradient)
    sinks = inputs.sinks
    if sinks is not None:
        inner_BxNxT = jnp.sum(out.astype(jnp.float32) * gradient.astype(jnp.float32), axis=-1)
        weights_BxNxT = jnp.exp(sinks.astype(jnp.float32)[:, None] - logsumexp[:, :, 0])
        sinks = -jnp.sum(weights_BxNxT * inner_BxNxT, axis=(0, 2)).astype(sinks.dtype)
    return (AttentionInputs(q, k, v, sinks=sinks),)


_attend.defvjp(_forward, _backward)


# Kernels. `refs` holds the blocks at hand and the scratch memory by name; `_run` says where the names come from.


def _forward_kernel(attention: FusedAttention, walk: _BlockWalk, refs: Refs) -> None:
    @pl.when(refs.flags[refs.place] & FIRST != 0)
    def _() -> None:
        _prepare(attention, refs)
        refs.most[...] = jnp.full_like(refs.most, UNSEEN)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.result[...] = jnp.zeros_like(refs.result)

    def process(step: _BlockStep) -> None:
        # Online softmax: the sums so far shrink when a larger maximum is found.
        some, v_LxS = step.queries, refs.v[step.keys, :].T
        for head in attention.heads:
            row, rows = slice(head, head + 1), attention.get_rows(head)
            v_WxS = v_LxS[attention.get_rows(0)]
            for other in attention.heads[1:]:
                v_WxS = lax.select(refs.key_heads[head] == other, v_LxS[attention.get_rows(other)], v_WxS)
            scores_SxQ, _ = _compute_scores(attention, refs, step, head)
            before_1xQ = refs.most[row, some]
            most_1xQ = jnp.maximum(before_1xQ, scores_SxQ.max(axis=0, keepdims=True))
            weights_SxQ = jnp.exp(scores_SxQ - most_1xQ)
            shrink_1xQ = jnp.exp(before_1xQ - most_1xQ)
            refs.most[row, some] = most_1xQ
            refs.total[row, some] = refs.total[row, some] * shrink_1xQ + weights_SxQ.sum(axis=0, keepdims=True)
            added_WxQ = _multiply(v_WxS, weights_SxQ.astype(v_WxS.dtype), _PLAIN)
            refs.result[rows, some] = refs.result[rows, some] * shrink_1xQ + added_WxQ

    _visit(attention, walk, refs, process)

    @pl.when(refs.flags[refs.place] & LAST != 0)
    def _() -> None:
        for head in attention.heads:
            row, rows = slice(head, head + 1), attention.get_rows(head)
            refs.result[rows, :] /= refs.total[row, :]
            refs.logsumexp[head] = refs.most[row, :] + jnp.log(refs.total[row, :])
        refs.out[...] = refs.result[...].T.astype(refs.out.dtype)


def _backward_kernel(attention: FusedAttention, walk: _BlockWalk, refs: Refs) -> None:
    @pl.when((refs.group == 0) & (refs.place == 0))
    def _() -> None:
        refs.k_sum[...] = jnp.zeros_like(refs.k_sum)
        refs.v_sum[...] = jnp.zeros_like(refs.v_sum)

    @pl.when(refs.flags[refs.place] & FIRST != 0)
    def _() -> None:
        _prepare(attention, refs)
        refs.q_sum[...] = jnp.zeros_like(refs.q_sum)
        inner_WxQ = (refs.out[...].astype(jnp.float32) * refs.gradient[...].astype(jnp.float32)).T
        for head in attention.heads:
            refs.inner[head : head + 1, :] = inner_WxQ[attention.get_rows(head)].sum(axis=0, keepdims=True)
        if hasattr(refs, "ready_gradient"):
            gradient_QxL = refs.gradient[...].astype(jnp.float32)
            for head, key_head in zip(attention.heads, refs.key_heads, strict=True):
                refs.ready_gradient[head] = attention.move(gradient_QxL, head, key_head).astype(refs.gradient.dtype)

    def process(step: _BlockStep) -> None:
        some, k_SxH, summed = step.queries, _get_keys(attention, refs, step), _slice_of_sequence(attention, refs, step)
        for head in attention.heads:
            q_QxH = refs.ready_q[head, some, :]
            is_packed = hasattr(refs, "ready_gradient")
            gradient_QxW = refs.ready_gradient[head, some, :] if is_packed else refs.gradient[some, :]
            scores_SxQ, share_SxQ = _compute_scores(attention, refs, step, head)
            weights_SxQ = jnp.exp(scores_SxQ - refs.logsumexp[head, :, some])
            refs.v_sum[summed, :] += _multiply(weights_SxQ.astype(gradient_QxW.dtype), gradient_QxW, _PLAIN)
            slopes_SxQ = _multiply(refs.v[step.keys, :], gradient_QxW, _RIGHT_TRANSPOSED)
            slopes_SxQ = (slopes_SxQ - refs.inner[head : head + 1, some]) * weights_SxQ
            if share_SxQ is not None:
                slopes_SxQ *= 1 - share_SxQ * share_SxQ
            slopes_SxQ = slopes_SxQ.astype(q_QxH.dtype)
            refs.k_sum[summed, :] += _multiply(slopes_SxQ, q_QxH, _PLAIN)
            # In packed blocks the lanes of the other heads hold products that mean nothing.
            refs.q_sum[head, some, :] += _multiply(slopes_SxQ, k_SxH, _LEFT_TRANSPOSED)

    _visit(attention, walk, refs, process)

    @pl.when(refs.flags[refs.place] & LAST != 0)
    def _() -> None:
        heads = zip(attention.heads, refs.key_heads, strict=True)
        sum_QxH = functools.reduce(jnp.add, [attention.move(refs.q_sum[head], key, head) for head, key in heads])
        gradient_QxH = (sum_QxH * attention.scale).astype(refs.q_gradient.dtype)
        if hasattr(refs, "cos"):
            gradient_QxH = _rotate(attention, gradient_QxH, refs.cos[...], -refs.sin[...])
        refs.q_gradient[...] = gradient_QxH

    # Gradients of keys are complete after the last head of queries that shares them.
    @pl.when((refs.flags[refs.place] & DONE != 0) & refs.is_last_group)
    def _() -> None:
        summed = pl.ds(refs.keys[refs.place] * attention.causal.block, attention.causal.block)
        gradient_SxH = refs.k_sum[summed, :].astype(refs.k_gradient.dtype)
        if hasattr(refs, "cos"):
            gradient_SxH = _rotate(attention, gradient_SxH, refs.written_cos[...], -refs.written_sin[...])
        refs.k_gradient[...] = gradient_SxH
        refs.v_gradient[...] = refs.v_sum[summed, :].astype(refs.v_gradient.dtype)


def _prepare(attention: FusedAttention, refs: Refs) -> None:
    """Rotate and scale a block of queries, and rotate the keys at the same positions, which no query has met yet."""
    q_QxH = refs.q[...]
    if hasattr(refs, "cos"):
        q_QxH = _rotate(attention, q_QxH, refs.cos[...], refs.sin[...])

        @pl.when(refs.group == 0)  # the other heads of queries that share the keys find them rotated
        def _() -> None:
            own = pl.ds(refs.queries[refs.place] * attention.causal.block, attention.causal.block)
            refs.ready_k[own, :] = _rotate(attention, refs.k[...], refs.cos[...], refs.sin[...])

    q_QxH = q_QxH.astype(jnp.float32) * attention.scale
    for head, key_head in zip(attention.heads, refs.key_heads, strict=True):
        refs.ready_q[head] = attention.move(q_QxH, head, key_head).astype(refs.ready_q.dtype)


def _rotate(attention: FusedAttention, x_QxH: jax.Array, cos_QxH: jax.Array, sin_QxH: jax.Array) -> jax.Array:
    """Return heads rotated, in their own dtype; a product with ones and zeros, which rounds nothing, swaps halves."""
    L = x_QxH.shape[1]
    H = attention.packed_head or L
    places, others = (lax.broadcasted_iota(jnp.int32, (L, L), axis) for axis in (0, 1))
    is_own = lax.div(places, H) == lax.div(others, H)
    ahead, behind = (is_own & (others - places == distance) for distance in (H // 2, -(H // 2)))
    swap_HxH = jnp.where(ahead, 1.0, 0.0) - jnp.where(behind, 1.0, 0.0)
    other_QxH = lax.dot(
        x_QxH,
        swap_HxH.astype(x_QxH.dtype),
        precision=lax.Precision.HIGHEST if x_QxH.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    return (x_QxH.astype(jnp.float32) * cos_QxH + other_QxH * sin_QxH).astype(x_QxH.dtype)


def _slice_of_sequence(attention: FusedAttention, refs: Refs, step: _BlockStep) -> Any:
    """Return the slice of a step's keys in memory that holds all keys of a sequence."""
    start = refs.keys[refs.place] * attention.causal.block + step.keys.start
    return pl.ds(start, step.keys.stop - step.keys.start)


def _get_keys(attention: FusedAttention, refs: Refs, step: _BlockStep) -> Any:
    """Return the keys of a step, rotated if there is a rotation."""
    if hasattr(refs, "ready_k"):
        return refs.ready_k[_slice_of_sequence(attention, refs, step), :]
    return refs.k[step.keys, :]


def _visit(attention: FusedAttention, walk: _BlockWalk, refs: Refs, process: Callable[[_BlockStep], None]) -> None:
    """Process each step of the visit at hand.

    The code is compiled once for every distance at which a mask is needed, and once for all other distances.
    """

    def visit(distance: int) -> None:
        for step in attention.causal.steps(distance):
            process(step)

    distance = refs.queries[refs.place] - refs.keys[refs.place]
    distances = np.unique(walk.queries - walk.keys).tolist()
    masked = [one for one in distances if not attention.causal.sees_all(one)]
    for one in masked:
        pl.when(distance == one)(functools.partial(visit, one))
    for one in [one for one in distances if one not in masked][:1]:
        is_unmasked = functools.reduce(jnp.logical_and, [distance != other for other in masked])
        pl.when(is_unmasked)(functools.partial(visit, one))


def _compute_scores(
    attention: FusedAttention, refs: Refs, step: _BlockStep, head: int
) -> tuple[jax.Array, jax.Array | None]:
    """Return masked scores of one head, (S, Q), and before the mask their share of the soft-cap, if any."""
    k_SxH, q_QxH = _get_keys(attention, refs, step), refs.ready_q[head, step.queries, :]
    scores_SxQ, share_SxQ = _multiply(k_SxH, q_QxH, _RIGHT_TRANSPOSED), None
    if attention.softcap is not None:
        share_SxQ = jnp.tanh(scores_SxQ / attention.softcap)
        scores_SxQ = share_SxQ * attention.softcap
    masks = []
    if step.ahead is not None:
        queries, keys = (lax.broadcasted_iota(jnp.int32, scores_SxQ.shape, axis) for axis in (1, 0))
        masks.append(queries - keys >= -step.ahead)
        if attention.causal.window is not None:
            masks.append(queries - keys < attention.causal.window - step.ahead)
    if hasattr(refs, "query_ids"):
        # Segments of keys come as a row of lanes, and are needed as a column.
        ids_1xS = refs.key_ids[:, step.keys]
        ids_Sx1 = jnp.broadcast_to(ids_1xS, (LANES, ids_1xS.shape[1])).T[:, :1]
        masks.append(ids_Sx1 == refs.query_ids[:, step.queries])
    if masks:
        scores_SxQ = jnp.where(functools.reduce(jnp.logical_and, masks), scores_SxQ, UNSEEN)
    return scores_SxQ, share_SxQ


def _multiply(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """Return a product accumulated in float32; 16-bit inputs ignore `jax_default_matmul_precision`."""
    precision = lax.Precision.DEFAULT if a.dtype.itemsize == 2 else None
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


# Calls of the kernels.

Column = Literal["queries", "keys", "written"]


class _Sizes(NamedTuple):
    """Sizes of the arrays of attention (see the shape legend), and the block specs of these arrays.

    A spec takes a column of the `_BlockWalk` that says which block is at hand.
    """

    B: int
    N: int
    K: int
    T: int
    H: int
    W: int
    block: int  # positions of a block
    heads: int = 1  # heads of a block
    is_packed: bool = False

    def queries(self, width: int) -> pl.BlockSpec:
        return self._heads(width, "queries", lambda k, n: n)

    def keys(self, width: int, column: Column) -> pl.BlockSpec:
        return self._heads(width, column, lambda k, n: k)

    @property
    def numbers(self) -> pl.BlockSpec:
        """Spec of one number for each query of each head, (B, N, 1, T)."""
        shape = (None, self.heads, 1, self.block)
        return self._make_spec(shape, lambda b, n, k, block: (b, n, 0, block), "queries")

    def ids(self, column: Column) -> pl.BlockSpec:
        return self._make_spec((None, 1, self.block), lambda b, n, k, block: (b, 0, block), column)

    def angles(self, angles: jax.Array, column: Column) -> pl.BlockSpec:
        """Return the spec of angles, which each sequence has its own of, or all share."""
        batch, _, width = angles.shape
        return self._make_spec(
            (None, self.block, width), lambda b, n, k, block: (b if batch > 1 else 0, block, 0), column
        )

    def _heads(self, width: int, column: Column, choose: Callable[[Any, Any], Any]) -> pl.BlockSpec:
        if self.is_packed:
            packed = (None, self.block, self.heads * width)
            return self._make_spec(packed, lambda b, n, k, block: (b, block, choose(k, n)), column)
        head_major = (None, None, self.block, width)
        return self._make_spec(head_major, lambda b, n, k, block: (b, choose(k, n), block, 0), column)

    def _make_spec(self, shape: tuple[int | None, ...], index: Callable[..., Any], column: Column) -> pl.BlockSpec:
        groups = self.N // self.K

        def index_map(b: Any, k: Any, g: Any, p: Any, *walk: Any) -> Any:
            block = getattr(_BlockWalk(*walk), column)[p]
            if column == "written" and groups > 1:  # before the last head of queries no keys are done
                block = jnp.where(g == groups - 1, block, 0)
            return index(b, k * groups + g, k, block)

        return pl.BlockSpec(shape, index_map)


def _get_sizes(attention: FusedAttention, inputs: AttentionInputs) -> _Sizes:
    block, H = attention.causal.block, attention.packed_head
    if H is not None:
        (B, T, NH), (_, _, KH) = inputs.q.shape, inputs.k.shape
        return _Sizes(B, NH // H, KH // H, T, H, H, block, len(attention.heads), is_packed=True)
    (B, N, T, H), (_, K, _, W) = inputs.q.shape, inputs.v.shape
    return _Sizes(B, N, K, T, H, W, block)


def _run_forward(attention: FusedAttention, inputs: AttentionInputs) -> tuple[jax.Array, jax.Array]:
    """Return the result, and for each query the logarithm of the sum of its exponentials (B, N, 1, T)."""
    sizes = _get_sizes(attention, inputs)
    out_shape = (*inputs.q.shape[:-1], inputs.q.shape[-1] if sizes.is_packed else sizes.W)
    out, logsumexp = _run(
        _forward_kernel,
        attention,
        sizes,
        inputs=_name_inputs(inputs, sizes),
        outputs={
            "out": (jax.ShapeDtypeStruct(out_shape, inputs.v.dtype), sizes.queries(sizes.W)),
            "logsumexp": (jax.ShapeDtypeStruct((sizes.B, sizes.N, 1, sizes.T), jnp.float32), sizes.numbers),
        },
        scratch=_make_ready_scratch(inputs, sizes)
        | {
            "most": _float32(sizes.heads, sizes.block),
            "total": _float32(sizes.heads, sizes.block),
            "result": _float32(sizes.heads * sizes.W, sizes.block),
        },
        products=(1, 1),
    )
    return out, logsumexp


def _run_backward(
    attention: FusedAttention, inputs: AttentionInputs, out: jax.Array, logsumexp: jax.Array, gradient: jax.Array
) -> list[jax.Array]:
    sizes = _get_sizes(attention, inputs)
    named = _name_inputs(inputs, sizes) | {
        "out": (out, sizes.queries(sizes.W)),
        "logsumexp": (logsumexp, sizes.numbers),
        "gradient": (gradient, sizes.queries(sizes.W)),
    }
    if inputs.rotation is not None:
        spec = sizes.angles(inputs.rotation.cos, "written")
        named |= {"written_cos": (inputs.rotation.cos, spec), "written_sin": (inputs.rotation.sin, spec)}
    specs = {
        "q": sizes.queries(sizes.H),
        "k": sizes.keys(sizes.H, "written"),
        "v": sizes.keys(sizes.W, "written"),
    }
    arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
    return _run(
        _backward_kernel,
        attention,
        sizes,
        inputs=named,
        outputs={
            f"{name}_gradient": (jax.ShapeDtypeStruct(x.shape, x.dtype), specs[name]) for name, x in arrays.items()
        },
        scratch=_make_ready_scratch(inputs, sizes)
        | {
            "inner": _float32(sizes.heads, sizes.block),
            **({"ready_gradient": _make_ready(gradient.dtype, sizes)} if sizes.is_packed else {}),
            "q_sum": _float32(sizes.heads, sizes.block, sizes.heads * sizes.H),
            "k_sum": _float32(sizes.T, sizes.heads * sizes.H),
            "v_sum": _float32(sizes.T, sizes.heads * sizes.W),
        },
        products=(3, 2),
    )


def _run(
    body: Callable[[FusedAttention, _BlockWalk, Refs], None],
    attention: FusedAttention,
    sizes: _Sizes,
    inputs: Mapping[str, tuple[jax.Array, pl.BlockSpec]],
    outputs: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    scratch: Mapping[str, pl.MemoryRef],
    products: tuple[int, int],
) -> list[jax.Array]:
    """Run `body` once for every visit of every head of queries, or of every block of packed heads.

    The `refs` of the kernel `body` are inputs, outputs and scratch by name, the columns of the walk, the place in the
    walk, the number of the head of queries among those that share one of keys, and for each head of a block the place
    of its head of keys in a block. For the cost estimate, `products` are the matmuls per score whose other width is
    that of a head of keys, and of values.
    """
    walk, groups = attention.causal.walk(sizes.T), sizes.N // sizes.K
    names = (*_BlockWalk._fields, *inputs, *outputs, *scratch)
    arrays, shapes = [array for array, _ in inputs.values()], [shape for shape, _ in outputs.values()]
    moved = [(x.shape, x.dtype) for x in arrays] + [(x.shape, x.dtype) for x in shapes]
    scores = sizes.B * sizes.N * attention.causal.num_scores(sizes.T)
    # The two cores of a chip may share sequences, heads of keys, and heads of queries that share no memory.
    group_semantics: Literal["arbitrary", "parallel"] = (
        "arbitrary" if scratch.keys() & {"ready_k", "k_sum"} else "parallel"
    )

    def run(*refs: Any) -> None:
        group = pl.program_id(2)
        # If several heads of queries share one of keys, all those of a block share the same one.
        shared_key_head = lax.div(group * sizes.heads, groups)
        where = {
            "group": group,
            "is_last_group": group == groups - 1,
            "place": pl.program_id(3),
            "key_heads": list(attention.heads) if groups == 1 else [shared_key_head for _ in attention.heads],
        }
        body(attention, walk, Refs(**where, **dict(zip(names, refs, strict=True))))

    results: list[jax.Array] = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk),
            grid=(sizes.B, sizes.K // sizes.heads, groups, len(walk.flags)),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", group_semantics, "arbitrary"),
            vmem_limit_bytes=attention.vmem_limit_bytes,
        ),
        # A packed head takes the matrix unit as long as all lanes of its block, of which the others hold zeros.
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * sizes.heads * (products[0] * sizes.H + products[1] * sizes.W),
            transcendentals=scores,
            bytes_accessed=sum(math.prod(shape) * dtype.itemsize for shape, dtype in moved),
        ),
        # `forward_attention` and `backward_attention`: plans and benchmarks find the kernels by these names.
        name=body.__name__.strip("_").replace("kernel", "attention"),
    )(*walk, *arrays)
    return results


def _name_inputs(inputs: AttentionInputs, sizes: _Sizes) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    q, k, v, segments, rotation, _ = inputs
    # Keys that are to be rotated are read once, with the queries at the same positions.
    k_spec = sizes.keys(sizes.H, "keys" if rotation is None else "queries")
    named = {"q": (q, sizes.queries(sizes.H)), "k": (k, k_spec), "v": (v, sizes.keys(sizes.W, "keys"))}
    if segments is not None:
        ids = segments[:, None]
        named |= {"query_ids": (ids, sizes.ids("queries")), "key_ids": (ids, sizes.ids("keys"))}
    if rotation is not None:
        spec = sizes.angles(rotation.cos, "queries")
        named |= {"cos": (rotation.cos, spec), "sin": (rotation.sin, spec)}
    return named


def _make_ready_scratch(inputs: AttentionInputs, sizes: _Sizes) -> dict[str, pl.MemoryRef]:
    """Return scratch memory for a block of scaled queries, and for all keys of a sequence if they are rotated."""
    scratch = {"ready_q": _make_ready(inputs.q.dtype, sizes)}
    if inputs.rotation is not None:
        scratch["ready_k"] = pltpu.VMEM((sizes.T, sizes.heads * sizes.H), inputs.k.dtype)
    return scratch


def _make_ready(dtype: np.dtype[Any], sizes: _Sizes) -> pl.MemoryRef:
    """Return scratch memory for a block of each head that is processed at once."""
    return pltpu.VMEM((sizes.heads, sizes.block, sizes.heads * sizes.H), dtype)


def _float32(*shape: int) -> pl.MemoryRef:
    return pltpu.VMEM(shape, jnp.float32)
