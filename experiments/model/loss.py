"""From hidden states to the summed loss: logits, whole or by chunks of positions.

Each part of the tokens, which is what one device has of them, is looked at by itself (`_by_part`). So a device adds up
the gradient of the output matrix over all of its chunks before the others hear of it, and what is sent is one sum for
each micro-batch: left to the partitioner it would be one for each chunk.

Shape legend: B batch, T sequence, V vocabulary, D width; P parts, L along axes that cut no matrix, S along the others.
"""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.model.blocks import cut, cuts_of, flat, in_rows, num_devices
from experiments.model.scatter import scattered_back
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum
from runner.train.mesh import STATE_AXES, axes_in, rules_without
from runner.train.state import rules_in_force


def unembed(embedding_VxD: jax.Array, x_BxTxD: jax.Array, softcap: float | None = None) -> jax.Array:
    """Return logits (B, T, V) of normalised hidden states, in their dtype; with `softcap` s, s tanh(logits / s)."""
    B, T, _ = x_BxTxD.shape
    embedding_VxD = scattered_back(embedding_VxD, cuts_of(embedding_VxD.shape, "vocab", "embed"))
    logits_BxTxV = (flat(x_BxTxD) @ embedding_VxD.T).reshape(B, T, -1)
    if softcap is not None:
        capped_BxTxV = softcap * jnp.tanh(logits_BxTxV.astype(jnp.float32) / softcap)
        logits_BxTxV = capped_BxTxV.astype(x_BxTxD.dtype)
    return cut(logits_BxTxV, "batch", "sequence", "vocab")


def loss_sum_of(
    unembed: Callable[[jax.Array, jax.Array], jax.Array],
    weights: jax.Array,
    x_BxTxD: jax.Array,
    targets: tuple[jax.Array, jax.Array],
    *,
    chunk_positions: int | None,
    z_loss: float = 0.0,
) -> jax.Array:
    """Return the summed cross entropy of `targets`, (y_BxT, weight_BxT), float32; `weights` are (V, D).

    With `chunk_positions` (`memory.loss_chunk_positions`) not all logits ever exist, and where several devices have
    tokens, each adds up the gradient of its own chunks before the others hear of it.
    """
    x_BxTxD = in_rows(x_BxTxD)
    if chunk_positions is None:
        return cross_entropy_sum(unembed(weights, x_BxTxD), *targets, z_loss)[0]

    def of_part(weights: jax.Array, *tokens: jax.Array) -> jax.Array:
        loss_sum, _ = chunked_cross_entropy_sum(
            unembed, weights, *tokens, chunk_positions=chunk_positions, z_loss=z_loss
        )
        return loss_sum

    return _by_part(of_part, weights, x_BxTxD, targets)


def _by_part(
    of_part: Callable[..., jax.Array], weights_VxD: jax.Array, x_BxTxD: jax.Array, targets: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Return the sum of `of_part(weights, x, *targets)` over the parts of the tokens."""
    spec = cuts_of(x_BxTxD.shape, "batch", "sequence", "embed_act")
    of_batch, of_rows = ((), ()) if spec is None else map(axes_in, spec[:2])
    axes, counts = (*of_batch, *of_rows), (num_devices(of_batch), num_devices(of_rows))
    if counts == (1, 1):
        return of_part(weights_VxD, x_BxTxD, *targets)

    def in_parts(leaf_BxT: jax.Array) -> jax.Array:
        (B, T, *rest), (num_batch, num_rows) = leaf_BxT.shape, counts
        by_place = leaf_BxT.reshape(num_batch, B // num_batch, num_rows, T // num_rows, *rest)
        return _lies(jnp.moveaxis(by_place, 2, 1).reshape(-1, B // num_batch, T // num_rows, *rest), axes)

    parts = (_at_hand(weights_VxD, axes), *map(in_parts, (x_BxTxD, *targets)))
    with nn.logical_axis_rules(rules_without(axes, rules_in_force())):
        sum_of_part = jax.vmap(lambda weights_DxV, *tokens: of_part(weights_DxV.T, *tokens), spmd_axis_name=axes)
        return jnp.sum(sum_of_part(*parts))


def _at_hand(weights_VxD: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """For each part, which lie along these mesh axes, the matrix, turned, whole but for the vocabulary: (P, D, V).

    Backwards, its gradient is scattered over the axes that cut the matrix, and the shards summed up over the others. It
    is turned since of a sum libtpu scatters rows alone.
    """
    D, V = weights_VxD.shape[::-1]
    spec = cuts_of((D, V), "embed", "vocab")
    assert spec is not None, "without a mesh there are no parts"
    width, vocabulary = spec
    inner = tuple(axis for axis in axes if axis in STATE_AXES)
    outer = tuple(axis for axis in axes if axis not in inner)
    L, S = num_devices(outer), num_devices(inner)
    turned_DxV = _lies(weights_VxD.T, width, vocabulary)
    turned_LxDxV = _lies(jnp.broadcast_to(turned_DxV, (L, D, V)), outer, width, vocabulary)
    whole_LxSxDxV = _lies(jnp.broadcast_to(turned_LxDxV[:, None], (L, S, D, V)), outer, inner, None, vocabulary)
    return _lies(whole_LxSxDxV.reshape(-1, D, V), axes, None, vocabulary)


def _lies(x: jax.Array, *entries: str | tuple[str, ...] | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
