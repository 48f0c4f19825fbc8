"""Token cross entropy as sums, so that a mean over any split of a batch is exact.

Owns the float32 arithmetic from logits to the summed loss, whole or chunk by chunk. Knows no model and no mesh.

Shape legend: B batch, T sequence, V vocabulary, D width, K chunks of a sequence, C positions of a chunk.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def cross_entropy_sum(
    logits_BxTxV: jax.Array, y_BxT: jax.Array, mask_BxT: jax.Array, z_loss: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """Sum -log p(y) over the tokens where `mask` is 1; returns (loss_sum, token_count), both float32 scalars.

    A mask that is not of ones and zeros weighs: each token's loss by its own value, and the count is their sum. With
    `z_loss` each token's loss has that times the square of its logsumexp added to it, which keeps logits from drifting
    (Chowdhery et al., 2022).

    The logits may be of any float type and may be sharded over V: the label's logit is picked by comparison, which
    stays on the shard that holds it, and not by a gather.
    """
    logits_BxTxV = logits_BxTxV.astype(jnp.float32)
    mask_BxT = mask_BxT.astype(jnp.float32)
    is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
    label_logit_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
    log_sum_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
    loss_BxT = log_sum_BxT - label_logit_BxT
    if z_loss:
        loss_BxT += z_loss * jnp.square(log_sum_BxT)
    return jnp.sum(loss_BxT * mask_BxT), jnp.sum(mask_BxT)


def chunked_cross_entropy_sum(
    unembed: Callable[[Any, jax.Array], jax.Array],
    weights: Any,
    x_BxTxD: jax.Array,
    y_BxT: jax.Array,
    mask_BxT: jax.Array,
    *,
    chunk_positions: int,
    z_loss: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
    """Return `cross_entropy_sum(unembed(weights, x), y, mask, z_loss)`, never holding the logits of more than a chunk.

    `unembed` maps (weights, (B, C, D)) to (B, C, V), position by position. No logits are computed twice: as the loss is
    a sum, the forward pass makes the gradients of a chunk while it has its logits, and the backward pass multiplies
    them by that of the sum. Those of weights are added up over chunks in float32. Chunks are cut along T, so that a
    batch that is sharded over B stays as it lies.
    """
    T = x_BxTxD.shape[1]
    if T % chunk_positions:
        raise ValueError(f"chunk_positions={chunk_positions} does not divide the sequence of {T}")
    tokens = _in_chunks((x_BxTxD, mask_BxT.astype(jnp.float32), y_BxT), chunk_positions)
    leaves, form = jax.tree.flatten(weights)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    floats = [_as_varying(jnp.asarray(leaf), x_BxTxD) for leaf, is_so in zip(leaves, is_float, strict=True) if is_so]

    def of_chunk(
        floats: list[jax.Array], x_BxCxD: jax.Array, mask_BxC: jax.Array, y_BxC: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rest = iter(floats)
        weights = jax.tree.unflatten(
            form, [next(rest) if is_so else leaf for leaf, is_so in zip(leaves, is_float, strict=True)]
        )
        return cross_entropy_sum(unembed(weights, x_BxCxD), y_BxC, mask_BxC, z_loss)

    # What `unembed` uses beside its arguments has gradients, too.
    pure, others = jax.closure_convert(of_chunk, floats, *(leaf[0] for leaf in tokens))
    return _sum_over_chunks(pure, (floats, *others), *tokens)


def _as_varying(tree: Any, other: jax.Array) -> Any:
    """Arrays that vary along the axes of a `jax.shard_map` that another does, so that gradients are added up there."""
    axes = jax.typeof(other).manual_axis_type.varying

    def varying(leaf: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(varying, tree)


def _in_chunks(leaves: tuple[jax.Array, ...], chunk_positions: int) -> tuple[jax.Array, ...]:
    """(B, T, ...) as (K, B, C, ...)."""
    return tuple(
        jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, chunk_positions, *leaf.shape[2:]), 1, 0) for leaf in leaves
    )


OfChunk = Callable[..., tuple[jax.Array, jax.Array]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_chunks(
    of_chunk: OfChunk, held: tuple[Any, ...], x_KxBxCxD: jax.Array, mask_KxBxC: jax.Array, y_KxBxC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The sums of `of_chunk(weights, x, mask, y, *others)` over all chunks; `held` are (weights, *others)."""
    weights, *others = held
    loss_K, count_K = jax.lax.map(lambda chunk: of_chunk(weights, *chunk, *others), (x_KxBxCxD, mask_KxBxC, y_KxBxC))
    return jnp.sum(loss_K), jnp.sum(count_K)


def _sum_with_gradients(
    of_chunk: OfChunk, held: tuple[Any, ...], x_KxBxCxD: jax.Array, mask_KxBxC: jax.Array, y_KxBxC: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    """The sums, and for the backward pass `held` and the gradients: its own in float32, and those of x and mask."""

    def add(sums: Any, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, Any]:
        x_BxCxD, mask_BxC, y_BxC = chunk

        def loss_of(held: tuple[Any, ...], x_BxCxD: jax.Array, mask_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights, *others = held
            return of_chunk(weights, x_BxCxD, mask_BxC, y_BxC, *others)

        loss_and_gradient = jax.value_and_grad(loss_of, argnums=(0, 1, 2), has_aux=True)
        loss_and_count, (of_held, *of_tokens) = loss_and_gradient(held, x_BxCxD, mask_BxC)
        sums = jax.tree.map(lambda total, leaf: total + leaf.astype(jnp.float32), sums, of_held)
        return sums, (*loss_and_count, *of_tokens)

    zeros = _as_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), held), x_KxBxCxD)
    sums, (loss_K, count_K, *of_tokens) = jax.lax.scan(add, zeros, (x_KxBxCxD, mask_KxBxC, y_KxBxC))
    return (jnp.sum(loss_K), jnp.sum(count_K)), (held, sums, *of_tokens)


def _scaled(
    of_chunk: OfChunk, kept: tuple[Any, ...], given: tuple[jax.Array, jax.Array]
) -> tuple[Any, jax.Array, jax.Array, None]:
    """The gradients of what is made of both sums, of which `given` are those by each."""
    held, sums, of_x_KxBxCxD, of_mask_KxBxC = kept
    by_loss, by_count = given
    of_held = jax.tree.map(lambda leaf, total: (by_loss * total).astype(leaf.dtype), held, sums)
    of_x_KxBxCxD = (by_loss * of_x_KxBxCxD).astype(of_x_KxBxCxD.dtype)
    return of_held, of_x_KxBxCxD, by_loss * of_mask_KxBxC + by_count, None


_sum_over_chunks.defvjp(_sum_with_gradients, _scaled)
