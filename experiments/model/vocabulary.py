"""From hidden states to the summed loss: logits, whole or by chunks of positions.

Each part of the tokens, which is what one device has of them, is looked at by itself (`_by_part`). So a device adds up
the gradient of the output matrix over all of its chunks before the others hear of it, and what is sent is one sum for
each micro-batch: left to the partitioner it would be one for each chunk.

Shape legend: B batch, T sequence, V vocabulary, D width; P parts, L along axes that cut no matrix, S along the others.

NEFTune: noise on embeddings in training (Jain et al., 2023, arXiv 2310.05914). Owns no parameters and no model.

Shape legend: B batch, T sequence, D width.

From tokens to their rows of an embedding, and where the embedding's gradient goes.

Each device looks up whole rows: a lookup in rows cut by fsdp would come out cut by width where it is needed cut by
batch, and the partitioner bridges that by gathering the whole batch. Backwards each device adds up the gradient of its
own tokens, and the sum is scattered (`whole_on_each`), where the partitioner would sum all rows up on every device.

Shape legend: B batch, T sequence, V vocabulary, D width.
"""

import math
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from experiments.model.layers import (
    cut,
    cuts_of,
    cutting,
    flat,
    in_rows,
    in_stream,
    num_devices,
    scattered_back,
    whole_on_each,
)
from experiments.model.platform import scatters_rows_alone
from runner.parallel.mesh import get_active_rules, list_axes, remove_axes_from_rules
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum


class EmbeddingNoise(nn.Module):
    """Adds to each embedding uniform noise of at most `alpha` / sqrt(T D), where not `deterministic`.

    T is the length of the row. An example's noise is drawn from the step's key "dropout" and the example's place in the
    step: how a step is split into micro-batches, devices and hosts changes none of it, and nor does a kill. With an
    `alpha` of 0 nothing is drawn. Call it once in a model, under a name of its own.
    """

    alpha: float
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, examples_B: jax.Array | None = None) -> jax.Array:
        """`examples_B` is `batch["example"]`, the place of each example in the step; None: 0, 1, 2 ..."""
        if self.deterministic or self.alpha == 0:
            return x_BxTxD
        B, T, D = x_BxTxD.shape
        examples_B = jnp.arange(B) if examples_B is None else examples_B
        bound = self.alpha / math.sqrt(T * D)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(self.make_rng("dropout"), examples_B)
        draw = jax.vmap(lambda key: jax.random.uniform(key, (T, D), jnp.float32, -bound, bound))
        return x_BxTxD + draw(keys_B).astype(x_BxTxD.dtype)


def embed(embedding_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of an embedding at these tokens, (B, T, D), as the residual stream lies."""
    return in_stream(rows_at(embedding_VxD, tokens_BxT))


def rows_at(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of a table, whose axes are "vocab" and "embed", at these tokens: (B, T, D)."""
    of_table = cuts_of(table_VxD.shape, "vocab", "embed")
    of_tokens = cuts_of(tokens_BxT.shape, "batch", "sequence")
    if of_table is None or of_tokens is None or not _is_scattered(of_table, of_tokens):
        return cut(table_VxD, "vocab", "embed_act")[tokens_BxT]
    of_batch, of_row = map(cutting, of_tokens)
    axes = (*of_batch, *of_row)

    def on_device(whole_1xDxV: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        return whole_1xDxV[0].T[tokens_BxT]

    specs, of_rows = (PartitionSpec(axes), PartitionSpec(of_batch, of_row)), PartitionSpec(of_batch, of_row)
    return jax.shard_map(on_device, in_specs=specs, out_specs=of_rows)(
        whole_on_each(table_VxD, of_table, axes), tokens_BxT
    )


def _is_scattered(of_table: PartitionSpec, of_tokens: PartitionSpec) -> bool:
    """Whether a table is cut by width alone, over axes along which no two devices have the same tokens."""
    rows, width = map(cutting, of_table)
    differ = {axis for entry in of_tokens for axis in cutting(entry)}
    return bool(width) and not rows and differ.issuperset(width)


Unembed = Callable[[jax.Array, jax.Array], jax.Array]


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
    unembed: Unembed,
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

    def of_part(unembed: Unembed, weights: jax.Array, *tokens: jax.Array) -> jax.Array:
        loss_sum, _ = chunked_cross_entropy_sum(
            unembed, weights, *tokens, chunk_positions=chunk_positions, z_loss=z_loss
        )
        return loss_sum

    return _by_part(of_part, unembed, weights, x_BxTxD, targets)


def _by_part(
    of_part: Callable[..., jax.Array],
    unembed: Unembed,
    weights_VxD: jax.Array,
    x_BxTxD: jax.Array,
    targets: tuple[jax.Array, jax.Array],
) -> jax.Array:
    """Return the sum of `of_part(unembed, weights, x, *targets)` over the parts of the tokens."""
    spec = cuts_of(x_BxTxD.shape, "batch", "sequence", "embed_act")
    of_batch, of_rows = ((), ()) if spec is None else map(list_axes, spec[:2])
    axes, counts = (*of_batch, *of_rows), (num_devices(of_batch), num_devices(of_rows))
    if counts == (1, 1):
        return of_part(unembed, weights_VxD, x_BxTxD, *targets)

    def in_parts(leaf_BxT: jax.Array) -> jax.Array:
        (B, T, *rest), (num_batch, num_rows) = leaf_BxT.shape, counts
        by_place = leaf_BxT.reshape(num_batch, B // num_batch, num_rows, T // num_rows, *rest)
        return _lies(jnp.moveaxis(by_place, 2, 1).reshape(-1, B // num_batch, T // num_rows, *rest), axes)

    def of_turned(weights_DxV: jax.Array, *tokens: jax.Array) -> jax.Array:
        if scatters_rows_alone():  # the gradient is added up over chunks as it is scattered: turned
            return of_part(lambda weights_DxV, x: unembed(weights_DxV.T, x), weights_DxV, *tokens)
        return of_part(unembed, weights_DxV.T, *tokens)

    of_weights = cuts_of(weights_VxD.shape, "vocab", "embed")
    assert of_weights is not None, "without a mesh there are no parts"
    parts = (whole_on_each(weights_VxD, of_weights, axes), *map(in_parts, (x_BxTxD, *targets)))
    with nn.logical_axis_rules(remove_axes_from_rules(axes, get_active_rules())):
        return jnp.sum(jax.vmap(of_turned, spmd_axis_name=axes)(*parts))


def _lies(x: jax.Array, *entries: str | tuple[str, ...] | None) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))
