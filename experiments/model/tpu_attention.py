"""The fused TPU kernels of causal attention over rows that a device has whole. Imports Pallas, which is slow.

Two kernels: one for the result, and one that makes all gradients and scores once for them, where JAX's own make them
twice or leave the gradient of queries in parts. Gradients of keys and values are summed in fast memory, which so has to
have room for those of a whole row. Scores lie with keys before queries: what belongs to a query is then a row of lanes,
its maximum and sum need no exchange between lanes, and the logs of sums are kept as they are read.

A block of queries meets a block of keys only where one of them sees another, and a mask is computed only where one does
not: there keys are taken in steps, each with the queries alone that may see it. `_walk` says who meets whom.

Shape legend: B batch, K heads of keys, G heads of queries for each of them, T positions, H and W widths of a head, Q
queries and S keys that are taken at once.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from experiments.model.form import KEPT

UNSEEN = -0.7 * float(
    np.finfo(np.float32).max
)  # a score: finite, since where all of a block are so they are subtracted
LANES = 128  # of a register; and keys that are taken at once where some are not seen
FULL_STEP = 512  # and where all are
_FIRST, _LAST, _DONE = 1, 2, 4  # notes of a meeting: of this block of queries, and the last one of this block of keys
_PLAIN, _LEFT_TRANSPOSED = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))
_RIGHT_TRANSPOSED = (((1,), (1,)), ((), ()))


class Kernel(NamedTuple):
    """How a row is attended to, whose length is a multiple of `block`, and that of `LANES`."""

    block: int  # queries, or keys, that are read at once
    window: int | None = None
    softcap: float | None = None
    memory_bytes: int | None = None  # fast memory that it may take; None is what the compiler leaves to every kernel

    def attend(
        self,
        q_BxKxGxTxH: jax.Array,
        k_BxKxTxH: jax.Array,
        v_BxKxTxW: jax.Array,
        segments_BxT: jax.Array | None = None,
    ) -> jax.Array:
        """Attend, with queries that are scaled; returns (B, K, G, T, W) in the dtype of `v`."""
        return _attend(self, q_BxKxGxTxH, k_BxKxTxH, v_BxKxTxW, segments_BxT)


class Walk(NamedTuple):
    """Which block of queries meets which of keys, one after the other: of int32, as a kernel is told."""

    queries: np.ndarray
    keys: np.ndarray
    notes: np.ndarray
    written: np.ndarray  # the block of keys whose gradients are the next that are done


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None) -> jax.Array:
    return _run_forward(kernel, q, k, v, segments)[0]


def _forward(kernel: Kernel, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    out, logsumexp = (checkpoint_name(x, KEPT) for x in _run_forward(kernel, *arrays))
    return out, (*arrays, out, logsumexp)


def _backward(kernel: Kernel, kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    q, k, v, segments, out, logsumexp = kept
    return (*_run_backward(kernel, q, k, v, segments, out, logsumexp, gradient), None)


_attend.defvjp(_forward, _backward)


def _walk(kernel: Kernel, length: int) -> Walk:
    """Blocks of queries in order, and to each the blocks of keys that one of its queries sees, in order."""
    number = length // kernel.block
    met = [(i, j) for i in range(number) for j in range(i + 1) if _some_seen(kernel, i - j)]
    last = {j: place for place, (_, j) in enumerate(met)}
    notes, written = [], []
    for place, (i, j) in enumerate(met):
        is_first, is_last = place == 0 or met[place - 1][0] != i, i == j
        notes.append(_FIRST * is_first | _LAST * is_last | _DONE * (last[j] == place))
        written.append(min(key for key, end in last.items() if end >= place))
    return Walk(*(np.array(x, np.int32) for x in (*zip(*met, strict=True), notes, written)))


def _some_seen(kernel: Kernel, distance: int) -> bool:
    """Whether a query sees a key of the block that stands so many blocks before its own."""
    return kernel.window is None or (distance - 1) * kernel.block + 1 < kernel.window


def _all_seen(kernel: Kernel, distance: int) -> bool:
    return distance > 0 and (kernel.window is None or (distance + 1) * kernel.block <= kernel.window)


def _steps(kernel: Kernel, distance: int | None) -> Iterator[tuple[slice, slice, int | None]]:
    """Keys of a block that are taken at once, queries to them, and where not all see all, how far these stand ahead.

    `distance` is that of the blocks, None where every query sees every key.
    """
    if distance is None:
        for start in range(0, kernel.block, FULL_STEP):
            yield slice(start, min(start + FULL_STEP, kernel.block)), slice(0, kernel.block), None
        return
    ahead = distance * kernel.block  # of keys that stand at the same place in their block
    for start in range(0, kernel.block, LANES):
        first, stop = max(0, start - ahead), kernel.block
        if kernel.window is not None:  # the last query that sees the last of these keys
            stop = min(stop, -(-(kernel.window + start + LANES - 1 - ahead) // LANES) * LANES)
        if first < stop:
            yield slice(start, start + LANES), slice(first, stop), ahead + first - start


def _for_each_distance(kernel: Kernel, walk: Walk, distance: jax.Array, meet: Callable[[int | None], None]) -> None:
    """Call `meet` as blocks stand to each other: what it does is compiled for each distance where not all is seen."""
    partly = [int(d) for d in np.unique(walk.queries - walk.keys) if not _all_seen(kernel, int(d))]
    for one in partly:
        pl.when(distance == one)(functools.partial(meet, one))
    if len(partly) < len(np.unique(walk.queries - walk.keys)):
        pl.when(functools.reduce(jnp.logical_and, [distance != one for one in partly]))(functools.partial(meet, None))


class Scores(NamedTuple):
    """Of keys and queries, (S, Q), those that are seen."""

    capped: jax.Array
    share: jax.Array | None  # of the bound, which the gradient needs


def _scores(
    kernel: Kernel, q_QxH: jax.Array, k_SxH: jax.Array, ids: tuple[jax.Array, ...], ahead: int | None
) -> Scores:
    scores_SxQ = _multiply(k_SxH, q_QxH, _RIGHT_TRANSPOSED)
    share = None
    if kernel.softcap is not None:
        share = jnp.tanh(scores_SxQ / kernel.softcap)
        scores_SxQ = share * kernel.softcap
    visible = []
    if ahead is not None:
        queries, keys = (lax.broadcasted_iota(jnp.int32, scores_SxQ.shape, axis) for axis in (1, 0))
        distances = queries - keys
        visible.append(distances >= -ahead)
        if kernel.window is not None:
            visible.append(distances < kernel.window - ahead)
    if ids:
        ids_1xQ, ids_1xS = ids
        ids_Sx1 = jnp.broadcast_to(ids_1xS, (LANES, ids_1xS.shape[1])).T[:, :1]
        visible.append(ids_Sx1 == ids_1xQ)
    if visible:
        scores_SxQ = jnp.where(functools.reduce(jnp.logical_and, visible), scores_SxQ, UNSEEN)
    return Scores(scores_SxQ, share)


def _multiply(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)


def _forward_kernel(
    kernel: Kernel, walk: Walk, queries: Any, keys: Any, notes: Any, q: Any, k: Any, v: Any, *refs: Any
) -> None:
    *ids, out, logsumexp, most, total, result = refs
    place = pl.program_id(3)

    @pl.when(notes[place] & _FIRST != 0)
    def _() -> None:
        most[...] = jnp.full_like(most, UNSEEN)
        total[...] = jnp.zeros_like(total)
        result[...] = jnp.zeros_like(result)

    def meet(distance: int | None) -> None:
        for some_keys, some, ahead in _steps(kernel, distance):
            seen_ids = tuple(x[:, part] for x, part in zip(ids, (some, some_keys), strict=False))
            scores_SxQ = _scores(kernel, q[some, :], k[some_keys, :], seen_ids, ahead).capped
            before_1xQ = most[:, some]
            most_1xQ = jnp.maximum(before_1xQ, scores_SxQ.max(axis=0, keepdims=True))
            weights_SxQ = jnp.exp(scores_SxQ - most_1xQ)
            shrunk_1xQ = jnp.exp(before_1xQ - most_1xQ)
            most[:, some] = most_1xQ
            total[:, some] = total[:, some] * shrunk_1xQ + weights_SxQ.sum(axis=0, keepdims=True)
            v_SxW = v[some_keys, :]
            added_WxQ = _multiply(v_SxW.T, weights_SxQ.astype(v_SxW.dtype), _PLAIN)
            result[:, some] = result[:, some] * shrunk_1xQ + added_WxQ

    _for_each_distance(kernel, walk, queries[place] - keys[place], meet)

    @pl.when(notes[place] & _LAST != 0)
    def _() -> None:
        out[...] = (result[...] / total[...]).T.astype(out.dtype)
        logsumexp[...] = most[...] + jnp.log(total[...])


def _backward_kernel(
    kernel: Kernel,
    walk: Walk,
    queries: Any,
    keys: Any,
    notes: Any,
    written: Any,
    q: Any,
    k: Any,
    v: Any,
    *refs: Any,
) -> None:
    *ids, out, logsumexp, gradient, q_gradient, k_gradient, v_gradient, inner, q_sum, k_sum, v_sum = refs
    group, place = pl.program_id(2), pl.program_id(3)
    first_key = keys[place] * kernel.block

    @pl.when((group == 0) & (place == 0))
    def _() -> None:
        k_sum[...] = jnp.zeros_like(k_sum)
        v_sum[...] = jnp.zeros_like(v_sum)

    @pl.when(notes[place] & _FIRST != 0)
    def _() -> None:
        q_sum[...] = jnp.zeros_like(q_sum)
        inner_QxW = out[...].astype(jnp.float32) * gradient[...].astype(jnp.float32)
        inner[...] = inner_QxW.T.sum(axis=0, keepdims=True)

    def meet(distance: int | None) -> None:
        for some_keys, some, ahead in _steps(kernel, distance):
            seen_ids = tuple(x[:, part] for x, part in zip(ids, (some, some_keys), strict=False))
            q_QxH, k_SxH, v_SxW, gradient_QxW = q[some, :], k[some_keys, :], v[some_keys, :], gradient[some, :]
            scores = _scores(kernel, q_QxH, k_SxH, seen_ids, ahead)
            weights_SxQ = jnp.exp(scores.capped - logsumexp[:, some])
            summed = pl.ds(first_key + some_keys.start, k_SxH.shape[0])
            v_sum[summed, :] += _multiply(weights_SxQ.astype(gradient_QxW.dtype), gradient_QxW, _PLAIN)
            scores_SxQ = (_multiply(v_SxW, gradient_QxW, _RIGHT_TRANSPOSED) - inner[:, some]) * weights_SxQ
            if scores.share is not None:
                scores_SxQ *= 1 - scores.share * scores.share
            scores_SxQ = scores_SxQ.astype(q_QxH.dtype)
            k_sum[summed, :] += _multiply(scores_SxQ, q_QxH, _PLAIN)
            q_sum[some, :] += _multiply(scores_SxQ, k_SxH, _LEFT_TRANSPOSED)

    _for_each_distance(kernel, walk, queries[place] - keys[place], meet)

    @pl.when(notes[place] & _LAST != 0)
    def _() -> None:
        q_gradient[...] = q_sum[...].astype(q_gradient.dtype)

    @pl.when((notes[place] & _DONE != 0) & (group == pl.num_programs(2) - 1))
    def _() -> None:
        summed = pl.ds(first_key, kernel.block)
        k_gradient[...] = k_sum[summed, :].astype(k_gradient.dtype)
        v_gradient[...] = v_sum[summed, :].astype(v_gradient.dtype)


def _run_forward(
    kernel: Kernel, q: jax.Array, k: jax.Array, v: jax.Array, segments_BxT: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """The result, and of each query the log of the sum of its exponentials (B, K, G, T)."""
    B, K, G, T, H = q.shape
    W = v.shape[-1]
    walk, blocks = _walk(kernel, T), _Blocks(kernel.block)
    ids = () if segments_BxT is None else (segments_BxT[:, None],) * 2
    row = jax.ShapeDtypeStruct((B, K, G, 1, T), jnp.float32)
    out, logsumexp = pl.pallas_call(
        functools.partial(_forward_kernel, kernel, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, K, G, len(walk.notes)),
            in_specs=[blocks.of_queries(H), blocks.of_keys(H), blocks.of_keys(W), *blocks.of_ids[: len(ids)]],
            out_specs=[blocks.of_queries(W), blocks.of_numbers],
            scratch_shapes=[_memory(1, kernel.block), _memory(1, kernel.block), _memory(W, kernel.block)],
        ),
        out_shape=[jax.ShapeDtypeStruct((*q.shape[:4], W), v.dtype), row],
        compiler_params=_parameters(kernel, "parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(kernel, walk, (q, k, v, q), 1, 1),
        name="attention_forward",
    )(*walk[:3], q, k, v, *ids)
    return out, logsumexp[..., 0, :]


def _run_backward(
    kernel: Kernel,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segments_BxT: jax.Array | None,
    out: jax.Array,
    logsumexp: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, ...]:
    """The gradients of queries, keys and values."""
    B, K, G, T, H = q.shape
    W = v.shape[-1]
    walk, blocks = _walk(kernel, T), _Blocks(kernel.block)
    ids = () if segments_BxT is None else (segments_BxT[:, None],) * 2
    found: tuple[jax.Array, ...] = pl.pallas_call(
        functools.partial(_backward_kernel, kernel, walk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(B, K, G, len(walk.notes)),
            in_specs=[
                blocks.of_queries(H),
                blocks.of_keys(H),
                blocks.of_keys(W),
                *blocks.of_ids[: len(ids)],
                blocks.of_queries(W),
                blocks.of_numbers,
                blocks.of_queries(W),
            ],
            out_specs=[blocks.of_queries(H), blocks.of_written_keys(H, G), blocks.of_written_keys(W, G)],
            scratch_shapes=[_memory(1, kernel.block), _memory(kernel.block, H), _memory(T, H), _memory(T, W)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)],
        compiler_params=_parameters(kernel, "parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(kernel, walk, (q, k, v, out, gradient, q, k, v), 3, 2),
        name="attention_backward",
    )(*walk, q, k, v, *ids, out, logsumexp[..., None, :], gradient)
    return found


class _Blocks(NamedTuple):
    """What a kernel has of an array at a time, where `_walk` stands."""

    size: int

    def of_queries(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (None, None, None, self.size, width), lambda b, k, g, p, queries, *_: (b, k, g, queries[p], 0)
        )

    def of_keys(self, width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, self.size, width), lambda b, k, g, p, queries, keys, *_: (b, k, keys[p], 0))

    def of_written_keys(self, width: int, groups: int) -> pl.BlockSpec:
        """Those that are done next; before the last of the heads of queries none are, and the first stay."""

        def place(b: Any, k: Any, g: Any, p: Any, queries: Any, keys: Any, notes: Any, written: Any) -> Any:
            return b, k, jnp.where(g == groups - 1, written[p], written[0]), 0

        return pl.BlockSpec((None, None, self.size, width), place)

    @property
    def of_numbers(self) -> pl.BlockSpec:
        """One number for each query."""
        return pl.BlockSpec((None, None, None, 1, self.size), lambda b, k, g, p, queries, *_: (b, k, g, 0, queries[p]))

    @property
    def of_ids(self) -> tuple[pl.BlockSpec, pl.BlockSpec]:
        """Segments of queries, and of keys."""
        return (
            pl.BlockSpec((None, 1, self.size), lambda b, k, g, p, queries, *_: (b, 0, queries[p])),
            pl.BlockSpec((None, 1, self.size), lambda b, k, g, p, queries, keys, *_: (b, 0, keys[p])),
        )


def _parameters(kernel: Kernel, *axes: Literal["parallel", "arbitrary"]) -> pltpu.CompilerParams:
    """Two cores of a chip may share the axes that are `parallel`."""
    return pltpu.CompilerParams(dimension_semantics=axes, vmem_limit_bytes=kernel.memory_bytes)


def _memory(rows: int, columns: int) -> Any:
    return pltpu.VMEM((rows, columns), jnp.float32)


def _cost(kernel: Kernel, walk: Walk, arrays: tuple[jax.Array, ...], of_heads: int, of_values: int) -> pl.CostEstimate:
    """What a run computes and moves: of products so many have the width of a head, and so many that of a value."""
    B, K, G, T, H = arrays[0].shape
    W = arrays[2].shape[-1]
    scores = 0
    for distance in (walk.queries - walk.keys).tolist():
        steps = _steps(kernel, None if _all_seen(kernel, distance) else distance)
        scores += sum((keys.stop - keys.start) * (queries.stop - queries.start) for keys, queries, _ in steps)
    return pl.CostEstimate(
        flops=2 * B * K * G * scores * (of_heads * H + of_values * W),
        transcendentals=B * K * G * scores,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays) + 4 * B * K * G * T,
    )
