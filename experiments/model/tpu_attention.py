"""The fused TPU kernels of causal attention over rows that a device has whole. Imports Pallas, which is slow.

Two kernels: one for the result, and one that makes all gradients and scores once for them, where JAX's own make them
twice or leave the gradient of queries in parts. Gradients of keys and values are summed in fast memory, which so has to
have room for those of a whole row. Scores lie with keys before queries: what belongs to a query is then a row of lanes,
its maximum and sum need no exchange between lanes, and the logs of sums are kept as they are read. `tpu_walk` says who
meets whom. Queries and keys are turned by their positions as they come in, and their gradients back as they go.

Shape legend: B batch, N heads of queries, K heads of keys, G = N / K neighbours that share one, T positions, H and W
widths of a head, Q queries and S keys that are taken at once.

Which queries and keys of a row the TPU kernels of attention take together, and in which order.

Owns no kernel. A block of queries meets a block of keys only where one of them sees another; where all see all the keys
are taken in long steps and without a mask, elsewhere in short ones, each with those queries alone that may see them.
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

from experiments.model.platform import KEPT

LANES = 128  # of a register; and keys of a short step
LONG_STEP = 512
FIRST, LAST, DONE = 1, 2, 4  # meetings of this block of queries, and the last one of this block of keys


class BlockWalk(NamedTuple):
    """Meetings of blocks, one after the other: int32, as a kernel is told."""

    queries: np.ndarray
    keys: np.ndarray
    notes: np.ndarray  # FIRST, LAST and DONE
    written: np.ndarray  # the block of keys that is the next of which all is done


class BlockPair(NamedTuple):
    """Keys and queries of two blocks that are taken at once; `ahead` is None where all of them see all."""

    keys: slice
    queries: slice
    ahead: int | None  # the position of the first query less that of the first key


class Causal(NamedTuple):
    """A row that is read in blocks, multiples of `LANES`, and of which a query sees the last `window` positions."""

    block: int
    window: int | None = None

    def walk(self, length: int) -> BlockWalk:
        """Blocks of queries in order, and to each in order the blocks of keys that one of its queries sees."""
        number = length // self.block
        met = [(i, j) for i in range(number) for j in range(i + 1) if self._sees_some(i - j)]
        last = {key: place for place, (_, key) in enumerate(met)}
        is_first = [place == 0 or met[place - 1][0] != query for place, (query, _) in enumerate(met)]
        is_last, is_done = [i == j for i, j in met], [last[key] == place for place, (_, key) in enumerate(met)]
        queries, keys = np.array(met, np.int32).T
        notes = FIRST * np.array(is_first) | LAST * np.array(is_last) | DONE * np.array(is_done)
        written = np.cumsum(is_done) - is_done  # keys are done in their order
        return BlockWalk(queries, keys, notes.astype(np.int32), written.astype(np.int32))

    def sees_all(self, distance: int) -> bool:
        """Whether every query of a block sees every key of the block that stands so many blocks before it."""
        return distance > 0 and (self.window is None or (distance + 1) * self.block <= self.window)

    def steps(self, distance: int) -> Iterator[BlockPair]:
        """What is taken at once of two blocks that stand so far from each other."""
        if self.sees_all(distance):
            for start in range(0, self.block, LONG_STEP):
                yield BlockPair(slice(start, min(start + LONG_STEP, self.block)), slice(0, self.block), None)
            return
        behind = distance * self.block  # that a query stands, of a key at the same place in its block
        for start in range(0, self.block, LANES):
            first, stop = max(0, start - behind), self.block
            if self.window is not None:  # the last query that sees the last of these keys
                stop = min(stop, -(-(self.window + start + LANES - 1 - behind) // LANES) * LANES)
            if first < stop:
                yield BlockPair(slice(start, start + LANES), slice(first, stop), behind + first - start)

    def num_scores(self, length: int) -> int:
        """Scores that are computed of a row, seen or not."""
        walk = self.walk(length)
        return sum(
            (step.keys.stop - step.keys.start) * (step.queries.stop - step.queries.start)
            for distance in (walk.queries - walk.keys).tolist()
            for step in self.steps(distance)
        )

    def _sees_some(self, distance: int) -> bool:
        return self.window is None or (distance - 1) * self.block + 1 < self.window


UNSEEN = -0.7 * float(np.finfo(np.float32).max)  # a score that is finite: where all are so, they are subtracted
_PLAIN, _LEFT_TRANSPOSED = (((1,), (0,)), ((), ())), (((0,), (0,)), ((), ()))
_RIGHT_TRANSPOSED = (((1,), (1,)), ((), ()))


class Kernel(NamedTuple):
    """How a row is attended to, whose length is a multiple of `causal.block`."""

    causal: Causal
    scale: float
    softcap: float | None = None
    memory_bytes: int | None = None  # fast memory that it may take; None is what the compiler leaves to every kernel

    def attend(
        self,
        q_BxNxTxH: jax.Array,
        k_BxKxTxH: jax.Array,
        v_BxKxTxW: jax.Array,
        segments_BxT: jax.Array | None = None,
        angles: tuple[jax.Array, jax.Array] | None = None,
    ) -> jax.Array:
        """Attend; returns (B, N, T, W) in the dtype of `v`.

        Queries and keys are turned first, their halves against each other, by `angles`: cosines and sines (B or 1, T,
        H), both halves the same. Of them there is no gradient.
        """
        return _attend(self, KernelInputs(q_BxNxTxH, k_BxKxTxH, v_BxKxTxW, segments_BxT, angles))


class KernelInputs(NamedTuple):
    """What a kernel reads, and keeps for the gradients."""

    q: jax.Array  # (B, N, T, H)
    k: jax.Array  # (B, K, T, H)
    v: jax.Array  # (B, K, T, W)
    segments: jax.Array | None  # (B, T)
    angles: tuple[jax.Array, jax.Array] | None  # (B or 1, T, H)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(kernel: Kernel, row: KernelInputs) -> jax.Array:
    return _run_forward(kernel, row)[0]


def _forward(kernel: Kernel, row: KernelInputs) -> tuple[jax.Array, tuple[Any, ...]]:
    out, logsumexp = (checkpoint_name(x, KEPT) for x in _run_forward(kernel, row))
    return out, (row, out, logsumexp)


def _backward(
    kernel: Kernel, kept: tuple[KernelInputs, jax.Array, jax.Array], gradient: jax.Array
) -> tuple[KernelInputs]:
    row, out, logsumexp = kept
    q, k, v = _run_backward(kernel, row, out, logsumexp, gradient)
    return (KernelInputs(q, k, v, None, None),)


_attend.defvjp(_forward, _backward)


def _forward_kernel(kernel: Kernel, walk: BlockWalk, refs: Refs) -> None:
    @pl.when(refs.notes[refs.place] & FIRST != 0)
    def _() -> None:
        _make_ready(kernel, refs)
        refs.most[...] = jnp.full_like(refs.most, UNSEEN)
        refs.total[...] = jnp.zeros_like(refs.total)
        refs.result[...] = jnp.zeros_like(refs.result)

    def take(step: BlockPair) -> None:
        some = step.queries
        scores_SxQ, _ = _scores(kernel, refs, step)
        before_1xQ = refs.most[:, some]
        most_1xQ = jnp.maximum(before_1xQ, scores_SxQ.max(axis=0, keepdims=True))
        weights_SxQ = jnp.exp(scores_SxQ - most_1xQ)
        shrunk_1xQ = jnp.exp(before_1xQ - most_1xQ)
        refs.most[:, some] = most_1xQ
        refs.total[:, some] = refs.total[:, some] * shrunk_1xQ + weights_SxQ.sum(axis=0, keepdims=True)
        v_SxW = refs.v[step.keys, :]
        added_WxQ = _multiply(v_SxW.T, weights_SxQ.astype(v_SxW.dtype), _PLAIN)
        refs.result[:, some] = refs.result[:, some] * shrunk_1xQ + added_WxQ

    _meet(kernel, walk, refs, take)

    @pl.when(refs.notes[refs.place] & LAST != 0)
    def _() -> None:
        refs.out[...] = (refs.result[...] / refs.total[...]).T.astype(refs.out.dtype)
        refs.logsumexp[...] = refs.most[...] + jnp.log(refs.total[...])


def _backward_kernel(kernel: Kernel, walk: BlockWalk, refs: Refs) -> None:
    @pl.when((refs.group == 0) & (refs.place == 0))
    def _() -> None:
        refs.k_sum[...] = jnp.zeros_like(refs.k_sum)
        refs.v_sum[...] = jnp.zeros_like(refs.v_sum)

    @pl.when(refs.notes[refs.place] & FIRST != 0)
    def _() -> None:
        _make_ready(kernel, refs)
        refs.q_sum[...] = jnp.zeros_like(refs.q_sum)
        inner_QxW = refs.out[...].astype(jnp.float32) * refs.gradient[...].astype(jnp.float32)
        refs.inner[...] = inner_QxW.T.sum(axis=0, keepdims=True)

    def take(step: BlockPair) -> None:
        some, q_QxH, gradient_QxW = step.queries, refs.ready_q[step.queries, :], refs.gradient[step.queries, :]
        k_SxH, summed = _ready_keys(kernel, refs, step), _keys_of_row(kernel, refs, step)
        scores_SxQ, share_SxQ = _scores(kernel, refs, step)
        weights_SxQ = jnp.exp(scores_SxQ - refs.logsumexp[:, some])
        refs.v_sum[summed, :] += _multiply(weights_SxQ.astype(gradient_QxW.dtype), gradient_QxW, _PLAIN)
        slopes_SxQ = _multiply(refs.v[step.keys, :], gradient_QxW, _RIGHT_TRANSPOSED) - refs.inner[:, some]
        slopes_SxQ *= weights_SxQ
        if share_SxQ is not None:
            slopes_SxQ *= 1 - share_SxQ * share_SxQ
        slopes_SxQ = slopes_SxQ.astype(q_QxH.dtype)
        refs.k_sum[summed, :] += _multiply(slopes_SxQ, q_QxH, _PLAIN)
        refs.q_sum[some, :] += _multiply(slopes_SxQ, k_SxH, _LEFT_TRANSPOSED)

    _meet(kernel, walk, refs, take)

    @pl.when(refs.notes[refs.place] & LAST != 0)
    def _() -> None:
        gradient_QxH = (refs.q_sum[...] * kernel.scale).astype(refs.q_gradient.dtype)
        if hasattr(refs, "cos"):
            gradient_QxH = _turned(gradient_QxH, refs.cos[...], -refs.sin[...])
        refs.q_gradient[...] = gradient_QxH

    @pl.when((refs.notes[refs.place] & DONE != 0) & refs.is_last_group)
    def _() -> None:
        summed = pl.ds(refs.keys[refs.place] * kernel.causal.block, kernel.causal.block)
        gradient_SxH = refs.k_sum[summed, :].astype(refs.k_gradient.dtype)
        if hasattr(refs, "cos"):
            gradient_SxH = _turned(gradient_SxH, refs.written_cos[...], -refs.written_sin[...])
        refs.k_gradient[...] = gradient_SxH
        refs.v_gradient[...] = refs.v_sum[summed, :].astype(refs.v_gradient.dtype)


def _make_ready(kernel: Kernel, refs: Refs) -> None:
    """Turn and scale a block of queries, and turn the keys at the same positions, which no query has met before."""
    q_QxH = refs.q[...]
    if hasattr(refs, "cos"):
        q_QxH = _turned(q_QxH, refs.cos[...], refs.sin[...])

        @pl.when(refs.group == 0)  # the other heads of queries find them there
        def _() -> None:
            own = pl.ds(refs.queries[refs.place] * kernel.causal.block, kernel.causal.block)
            refs.ready_k[own, :] = _turned(refs.k[...], refs.cos[...], refs.sin[...])

    refs.ready_q[...] = (q_QxH.astype(jnp.float32) * kernel.scale).astype(refs.ready_q.dtype)


def _turned(x_QxH: jax.Array, cos_QxH: jax.Array, sin_QxH: jax.Array) -> jax.Array:
    """`x` turned, in its own dtype. Its halves change places by a product with ones and zeros, which rounds nothing."""
    H = x_QxH.shape[1]
    places, others = (lax.broadcasted_iota(jnp.int32, (H, H), axis) for axis in (0, 1))
    swap_HxH = jnp.where(others == places + H // 2, 1.0, 0.0) - jnp.where(places == others + H // 2, 1.0, 0.0)
    other_QxH = lax.dot(
        x_QxH,
        swap_HxH.astype(x_QxH.dtype),
        precision=lax.Precision.HIGHEST if x_QxH.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )
    return (x_QxH.astype(jnp.float32) * cos_QxH + other_QxH * sin_QxH).astype(x_QxH.dtype)


def _keys_of_row(kernel: Kernel, refs: Refs, step: BlockPair) -> Any:
    """The keys of a step, where all keys of a row are."""
    return pl.ds(refs.keys[refs.place] * kernel.causal.block + step.keys.start, step.keys.stop - step.keys.start)


def _ready_keys(kernel: Kernel, refs: Refs, step: BlockPair) -> Any:
    if hasattr(refs, "ready_k"):
        return refs.ready_k[_keys_of_row(kernel, refs, step), :]
    return refs.k[step.keys, :]


def _meet(kernel: Kernel, walk: BlockWalk, refs: Refs, take: Callable[[BlockPair], None]) -> None:
    """Take each step of two blocks that meet: compiled for each distance where not all see all, and once for others."""

    def meet(distance: int) -> None:
        for step in kernel.causal.steps(distance):
            take(step)

    distance = refs.queries[refs.place] - refs.keys[refs.place]
    distances = np.unique(walk.queries - walk.keys).tolist()
    partly = [one for one in distances if not kernel.causal.sees_all(one)]
    for one in partly:
        pl.when(distance == one)(functools.partial(meet, one))
    for one in [one for one in distances if one not in partly][:1]:
        is_none_of_them = functools.reduce(jnp.logical_and, [distance != other for other in partly])
        pl.when(is_none_of_them)(functools.partial(meet, one))


def _scores(kernel: Kernel, refs: Refs, step: BlockPair) -> tuple[jax.Array, jax.Array | None]:
    """Of keys and queries, (S, Q), those that are seen; and before that their share of the bound, if there is one."""
    k_SxH, q_QxH = _ready_keys(kernel, refs, step), refs.ready_q[step.queries, :]
    scores_SxQ, share_SxQ = _multiply(k_SxH, q_QxH, _RIGHT_TRANSPOSED), None
    if kernel.softcap is not None:
        share_SxQ = jnp.tanh(scores_SxQ / kernel.softcap)
        scores_SxQ = share_SxQ * kernel.softcap
    visible = []
    if step.ahead is not None:
        queries, keys = (lax.broadcasted_iota(jnp.int32, scores_SxQ.shape, axis) for axis in (1, 0))
        visible.append(queries - keys >= -step.ahead)
        if kernel.causal.window is not None:
            visible.append(queries - keys < kernel.causal.window - step.ahead)
    if hasattr(refs, "query_ids"):
        ids_1xS = refs.key_ids[:, step.keys]
        ids_Sx1 = jnp.broadcast_to(ids_1xS, (LANES, ids_1xS.shape[1])).T[:, :1]
        visible.append(ids_Sx1 == refs.query_ids[:, step.queries])
    if visible:
        scores_SxQ = jnp.where(functools.reduce(jnp.logical_and, visible), scores_SxQ, UNSEEN)
    return scores_SxQ, share_SxQ


def _multiply(a: jax.Array, b: jax.Array, dimensions: Any) -> jax.Array:
    """A product in float32; of 16 bits, whatever `jax_default_matmul_precision` asks of others."""
    precision = lax.Precision.DEFAULT if a.dtype.itemsize == 2 else None
    return lax.dot_general(a, b, dimensions, precision, preferred_element_type=jnp.float32)


Column = Literal["queries", "keys", "written"]


class _Blocks(NamedTuple):
    """What a kernel has of an array at a time.

    at which place of the `BlockWalk`, the blocks of which of its columns.
    """

    size: int
    groups: int

    def of_queries(self, width: int) -> pl.BlockSpec:
        return self._spec((None, None, self.size, width), lambda b, n, k, block: (b, n, block, 0), "queries")

    @property
    def of_numbers(self) -> pl.BlockSpec:
        """One number for each query."""
        return self._spec((None, None, 1, self.size), lambda b, n, k, block: (b, n, 0, block), "queries")

    def of_keys(self, width: int, of: Column) -> pl.BlockSpec:
        return self._spec((None, None, self.size, width), lambda b, n, k, block: (b, k, block, 0), of)

    def of_ids(self, of: Column) -> pl.BlockSpec:
        return self._spec((None, 1, self.size), lambda b, n, k, block: (b, 0, block), of)

    def of_angles(self, angles: jax.Array, of: Column) -> pl.BlockSpec:
        """Of every row, or one for all rows."""
        rows, _, width = angles.shape
        return self._spec((None, self.size, width), lambda b, n, k, block: (b if rows > 1 else 0, block, 0), of)

    def _spec(self, shape: tuple[int | None, ...], index: Callable[..., Any], of: Column) -> pl.BlockSpec:
        def of_grid(b: Any, k: Any, g: Any, p: Any, *walk: Any) -> Any:
            block = getattr(BlockWalk(*walk), of)[p]
            if of == "written" and self.groups > 1:  # before the last of the heads of queries no keys are done
                block = jnp.where(g == self.groups - 1, block, 0)
            return index(b, k * self.groups + g, k, block)

        return pl.BlockSpec(shape, of_grid)


def _run_forward(kernel: Kernel, row: KernelInputs) -> tuple[jax.Array, jax.Array]:
    """The result, and of each query the log of the sum of its exponentials (B, N, 1, T)."""
    (B, N, T, _), (_, K, _, W), block = row.q.shape, row.v.shape, kernel.causal.block
    blocks = _Blocks(block, N // K)
    out, logsumexp = _run(
        _forward_kernel,
        kernel,
        inputs=_read(row, blocks),
        outputs={
            "out": (jax.ShapeDtypeStruct((B, N, T, W), row.v.dtype), blocks.of_queries(W)),
            "logsumexp": (jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32), blocks.of_numbers),
        },
        memory=_ready(row, block) | {"most": _sums(1, block), "total": _sums(1, block), "result": _sums(W, block)},
        products=(1, 1),
    )
    return out, logsumexp


def _run_backward(
    kernel: Kernel, row: KernelInputs, out: jax.Array, logsumexp: jax.Array, gradient: jax.Array
) -> list[jax.Array]:
    """The gradients of queries, keys and values."""
    q, k, v = row[:3]
    (_, N, T, H), (_, K, _, W), block = q.shape, v.shape, kernel.causal.block
    blocks = _Blocks(block, N // K)
    inputs = _read(row, blocks) | {
        "out": (out, blocks.of_queries(W)),
        "logsumexp": (logsumexp, blocks.of_numbers),
        "gradient": (gradient, blocks.of_queries(W)),
    }
    if row.angles is not None:
        spec = blocks.of_angles(row.angles[0], "written")
        inputs |= {"written_cos": (row.angles[0], spec), "written_sin": (row.angles[1], spec)}
    return _run(
        _backward_kernel,
        kernel,
        inputs=inputs,
        outputs={
            "q_gradient": (jax.ShapeDtypeStruct(q.shape, q.dtype), blocks.of_queries(H)),
            "k_gradient": (jax.ShapeDtypeStruct(k.shape, k.dtype), blocks.of_keys(H, "written")),
            "v_gradient": (jax.ShapeDtypeStruct(v.shape, v.dtype), blocks.of_keys(W, "written")),
        },
        memory=_ready(row, block)
        | {"inner": _sums(1, block), "q_sum": _sums(block, H), "k_sum": _sums(T, H), "v_sum": _sums(T, W)},
        products=(3, 2),
    )


def _run(
    body: Callable[[Kernel, BlockWalk, Refs], None],
    kernel: Kernel,
    inputs: Mapping[str, tuple[jax.Array, pl.BlockSpec]],
    outputs: Mapping[str, tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
    memory: Mapping[str, pl.MemoryRef],
    products: tuple[int, int],
) -> list[jax.Array]:
    """Run `body` once for every meeting of every head of queries; it finds all that it has by these names.

    Of its products so many are as wide as a head of keys, and so many as one of values.
    """
    (B, N, T, H), (_, K, _, W) = inputs["q"][0].shape, inputs["v"][0].shape
    walk, names = kernel.causal.walk(T), (*BlockWalk._fields, *inputs, *outputs, *memory)
    arrays, shapes = [array for array, _ in inputs.values()], [shape for shape, _ in outputs.values()]
    moved = [(x.shape, x.dtype) for x in arrays] + [(x.shape, x.dtype) for x in shapes]
    scores = B * N * kernel.causal.num_scores(T)
    # Two cores of a chip may share rows, heads of keys, and heads of queries that have nothing in common.
    of_group: Literal["arbitrary", "parallel"] = "arbitrary" if memory.keys() & {"ready_k", "k_sum"} else "parallel"

    def run(*refs: Any) -> None:
        group = pl.program_id(2)
        where = {"group": group, "is_last_group": group == N // K - 1, "place": pl.program_id(3)}
        body(kernel, walk, Refs(**where, **dict(zip(names, refs, strict=True))))

    found: list[jax.Array] = pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(walk),
            grid=(B, K, N // K, len(walk.notes)),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(memory.values()),
        ),
        out_shape=shapes,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", of_group, "arbitrary"),
            vmem_limit_bytes=kernel.memory_bytes,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (products[0] * H + products[1] * W),
            transcendentals=scores,
            bytes_accessed=sum(math.prod(shape) * dtype.itemsize for shape, dtype in moved),
        ),
        name=body.__name__.strip("_").replace("kernel", "attention"),
    )(*walk, *arrays)
    return found


def _read(row: KernelInputs, blocks: _Blocks) -> dict[str, tuple[jax.Array, pl.BlockSpec]]:
    q, k, v, segments, angles = row
    # Keys that are turned are read once, with the queries at the same positions.
    of_k = blocks.of_keys(k.shape[-1], "keys" if angles is None else "queries")
    inputs = {"q": (q, blocks.of_queries(q.shape[-1])), "k": (k, of_k), "v": (v, blocks.of_keys(v.shape[-1], "keys"))}
    if segments is not None:
        ids = segments[:, None]
        inputs |= {"query_ids": (ids, blocks.of_ids("queries")), "key_ids": (ids, blocks.of_ids("keys"))}
    if angles is not None:
        spec = blocks.of_angles(angles[0], "queries")
        inputs |= {"cos": (angles[0], spec), "sin": (angles[1], spec)}
    return inputs


def _ready(row: KernelInputs, block: int) -> dict[str, pl.MemoryRef]:
    """Room for queries and keys that are turned."""
    q, k = row[:2]
    room = {"ready_q": pltpu.VMEM((block, q.shape[-1]), q.dtype)}
    return room if row.angles is None else room | {"ready_k": pltpu.VMEM(k.shape[-2:], k.dtype)}


def _sums(rows: int, columns: int) -> pl.MemoryRef:
    return pltpu.VMEM((rows, columns), jnp.float32)
