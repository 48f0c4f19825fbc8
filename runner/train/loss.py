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

    `unembed` maps (weights, (B, C, D)) to (B, C, V), position by position. The backward pass computes each chunk's
    logits again. Chunks are cut along T, so that a batch that is sharded over B stays as it lies.
    """
    B, T, _ = x_BxTxD.shape
    if T % chunk_positions:
        raise ValueError(f"chunk_positions={chunk_positions} does not divide the sequence of {T}")
    # The loop over chunks adds up the weights' gradient in the type in which they enter it: float32, not their own.
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def sum_of_chunk(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_BxCxD, y_BxC, mask_BxC = chunk
        narrow = jax.tree.map(_standing_for, wide, jax.lax.stop_gradient(weights))
        return cross_entropy_sum(unembed(narrow, x_BxCxD), y_BxC, mask_BxC, z_loss)

    def in_chunks(leaf_BxT: jax.Array) -> jax.Array:
        rest = leaf_BxT.shape[2:]
        return jnp.moveaxis(leaf_BxT.reshape(B, -1, chunk_positions, *rest), 1, 0)

    loss_K, count_K = jax.lax.map(sum_of_chunk, (in_chunks(x_BxTxD), in_chunks(y_BxT), in_chunks(mask_BxT)))
    return jnp.sum(loss_K), jnp.sum(count_K)


@jax.custom_vjp
def _standing_for(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """`narrow`, whose gradient is that of `wide`, which was made of it."""
    return narrow


def _standing_for_forward(wide: jax.Array, narrow: jax.Array) -> tuple[jax.Array, None]:
    return narrow, None


def _standing_for_backward(_: None, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient.astype(jnp.float32), jnp.zeros_like(gradient)


_standing_for.defvjp(_standing_for_forward, _standing_for_backward)
