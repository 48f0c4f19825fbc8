"""Token embedding, output head and loss, with NEFTune noise.

Lookup. Each device looks up whole rows of the table. A lookup in a table whose width is sharded over fsdp would return
an array sharded by width where one sharded by batch is needed, and the partitioner would bridge that by gathering the
whole batch. In the backward pass each device accumulates the gradient of its own tokens, and the sum is
reduce-scattered (`replicate_per_device`); the partitioner would all-reduce all rows. On GPUs each device sums the
gradients of equal tokens in float32 after sorting them, so that the result is the same at every run.

Loss in chunks (`memory.loss_chunk_positions`). Each shard of the tokens is processed by itself. So a device accumulates
the gradient of the output matrix over all of its chunks before it communicates: one reduction for each micro-batch.
Left to the partitioner it would be one for each chunk.

NEFTune. Noise on embeddings in training (Jain et al., 2023, arXiv 2310.05914).

Embeddings of layers (Gemma 4). A token has a second embedding with a part for each layer. The table is as wide as all
parts together, so here the tokens travel instead of the rows: each device looks its columns up for the tokens of all
devices that share the width of the table, and an all-to-all gives each its own tokens.

Shape legend: B batch, T sequence, N = BT tokens, V vocabulary, D width, L layers, P width of a layer's embedding,
G devices that share the width of a table, W = LP.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    RMSNorm,
    constrain,
    constrain_stream,
    flatten_tokens,
    gather_stream,
    make_partition_spec,
    num_devices,
    replicate_per_device,
    split_axes,
    with_axes,
    with_scattered_gradient,
)
from experiments.model.platform import guesses_logsumexp, reduce_scatters_only_rows, sorts_before_summing
from runner.metrics.meta import ACCURACY, SUMS
from runner.parallel.mesh import get_active_rules, list_axes, remove_axes_from_rules
from runner.train.kernel_check import KernelCase, KernelTrial, get_kernel_use
from runner.train.loss import chunked_cross_entropy_sum, cross_entropy_sum, evaluate_cross_entropy

KERNEL = "take_rows_sorted"  # name of the sorted gradient in its test
Unembed = Callable[[jax.Array, jax.Array], jax.Array]  # (weights (V, D), hidden states (B, T, D)) -> logits (B, T, V)


class EmbeddingNoise(nn.Module):
    """NEFTune: adds uniform noise of at most `alpha` / sqrt(T D) to each embedding, unless `deterministic`.

    T is the length of the sequence. The noise of an example is drawn from the step's key "dropout" and the place of the
    example in the step. So neither the split of a step into micro-batches, devices and hosts nor a restart changes it.
    With an `alpha` of 0 nothing is drawn. Call it once in a model, under a name of its own.
    """

    alpha: float
    deterministic: bool

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array, examples_B: jax.Array | None = None) -> jax.Array:
        """Return the embeddings with noise; `examples_B` is `batch["example"]`, and None is 0, 1, 2 ..."""
        if self.deterministic or self.alpha == 0:
            return x_BxTxD
        B, T, D = x_BxTxD.shape
        examples_B = jnp.arange(B) if examples_B is None else examples_B
        bound = self.alpha / math.sqrt(T * D)
        keys_B = jax.vmap(jax.random.fold_in, (None, 0))(self.make_rng("dropout"), examples_B)
        draw = jax.vmap(lambda key: jax.random.uniform(key, (T, D), jnp.float32, -bound, bound))
        return x_BxTxD + draw(keys_B).astype(x_BxTxD.dtype)


def embed(embedding_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the embeddings of tokens, (B, T, D), sharded as the residual stream is."""
    return constrain_stream(lookup(embedding_VxD, tokens_BxT))


def lookup(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of a table, whose axes are "vocab" and "embed", at these tokens: (B, T, D)."""
    table_spec = make_partition_spec(table_VxD.shape, "vocab", "embed")
    token_spec = make_partition_spec(tokens_BxT.shape, "batch", "sequence")
    if table_spec is None or token_spec is None:
        return constrain(table_VxD, "vocab", "embed_act")[tokens_BxT]
    (vocab_axes, width_axes), (batch_axes, position_axes) = map(split_axes, table_spec), map(split_axes, token_spec)
    axes = (*batch_axes, *position_axes)
    # A device can look up its own tokens by itself if it can gather whole rows, over axes along which all devices have
    # different tokens.
    can_gather_rows = not vocab_axes and set(axes).issuperset(width_axes)
    use = get_kernel_use()
    is_sorted = sorts_before_summing() and use.is_allowed(KERNEL)
    if not can_gather_rows or not (width_axes or is_sorted):
        return constrain(table_VxD, "vocab", "embed_act")[tokens_BxT]
    take_rows = take_rows_sorted if is_sorted else operator.getitem
    if is_sorted:
        use.record(_make_case(table_VxD))
    if not axes:
        return take_rows(table_VxD, tokens_BxT)

    def lookup_own(table_1xDxV: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
        return take_rows(table_1xDxV[0].T, tokens_BxT)

    own = PartitionSpec(batch_axes, position_axes)
    run = jax.shard_map(lookup_own, in_specs=(PartitionSpec(axes), own), out_specs=own)
    return run(replicate_per_device(table_VxD, table_spec, axes), tokens_BxT)


class LayerEmbeddings(nn.Module):
    """A further embedding of each token for each layer: a row of a table plus the projection of its first embedding.

    The row is multiplied by the square root of its width, the projection is normalised, and the sum of the two is
    divided by the square root of two.
    """

    vocabulary_size: int
    layers: int
    width: int
    epsilon: float
    has_norm_offset: bool
    param_dtype: DTypeLike
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, x_BxTxD: jax.Array) -> jax.Array:
        """Return the embeddings (L, B, T, P) of tokens, whose first ones are `x`."""
        L, P, types = self.layers, self.width, (self.param_dtype, self.compute_dtype)
        init = with_axes(nn.initializers.normal(INIT_STDDEV), "vocab", "embed")
        table_VxW = self.param("embedding", init, (self.vocabulary_size, L * P), self.param_dtype)
        rows_BxTxW = constrain_stream(lookup_columns(table_VxW.astype(self.compute_dtype), tokens_BxT))
        project = Dense(L * P, ("embed", "latent"), INIT_STDDEV, *types, has_bias=False, name="projection")
        y_BxTxW = constrain_stream(project(x_BxTxD) * jnp.asarray(x_BxTxD.shape[-1] ** -0.5, self.compute_dtype))
        norm = RMSNorm(self.epsilon, "latent", self.has_norm_offset, *types, name="norm")
        shape = (*tokens_BxT.shape, L, P)
        rows_BxTxLxP = (rows_BxTxW * jnp.asarray(math.sqrt(P), self.compute_dtype)).reshape(shape)
        sum_BxTxLxP = (norm(y_BxTxW.reshape(shape)) + rows_BxTxLxP) * jnp.asarray(2**-0.5, self.compute_dtype)
        return jnp.moveaxis(sum_BxTxLxP, 2, 0)


def lookup_columns(table_VxW: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return `lookup` of a table that is too wide to be gathered: (B, T, W)."""
    table_spec = make_partition_spec(table_VxW.shape, "vocab", "embed")
    token_spec = make_partition_spec(tokens_BxT.shape, "batch", "sequence")
    if table_spec is None or token_spec is None:
        return table_VxW[tokens_BxT]
    (vocab_axes, width_axes), (batch_axes, position_axes) = map(split_axes, table_spec), map(split_axes, token_spec)
    use = get_kernel_use()
    is_sorted = sorts_before_summing() and use.is_allowed(KERNEL)
    take_rows = take_rows_sorted if is_sorted else operator.getitem
    # Along the axes of the width all devices must have different tokens, which are gathered.
    if not set(width_axes) <= {*batch_axes, *position_axes} or set(vocab_axes) & {*batch_axes, *position_axes}:
        return constrain(table_VxW, "vocab", "embed_act")[tokens_BxT]

    # Over these axes the gradient of the columns is all-reduced.
    others = tuple(axis for axis in (*batch_axes, *position_axes) if axis not in width_axes)

    def look_up_own(table_VxC: jax.Array, tokens_bxt: jax.Array) -> jax.Array:
        if is_sorted:
            use.record(_make_case(table_VxC))
        table_VxC = jax.lax.pcast(table_VxC, others, to="varying")
        tokens_Gxbxt = jax.lax.all_gather(tokens_bxt, width_axes) if width_axes else tokens_bxt[None]
        if vocab_axes:
            tokens_Gxbxt = tokens_Gxbxt - jax.lax.axis_index(vocab_axes) * table_VxC.shape[0]
        is_own_Gxbxt = (tokens_Gxbxt >= 0) & (tokens_Gxbxt < table_VxC.shape[0])
        rows_GxbxtxC = take_rows(table_VxC, jnp.where(is_own_Gxbxt, tokens_Gxbxt, 0))
        if vocab_axes:
            rows_GxbxtxC = jax.lax.psum(jnp.where(is_own_Gxbxt[..., None], rows_GxbxtxC, 0), vocab_axes)
        if width_axes:
            rows_GxbxtxC = jax.lax.all_to_all(rows_GxbxtxC, width_axes, 0, 3, tiled=True)
        return rows_GxbxtxC[0]

    own = PartitionSpec(batch_axes, position_axes)
    run = jax.shard_map(look_up_own, in_specs=(PartitionSpec(vocab_axes, width_axes), own), out_specs=own)
    return run(table_VxW, tokens_BxT)


@jax.custom_vjp
def take_rows_sorted(table_VxD: jax.Array, tokens_BxT: jax.Array) -> jax.Array:
    """Return the rows of a table at these tokens; its gradient is summed in float32, over sorted tokens."""
    return table_VxD[tokens_BxT]


def _take_rows_backward(residuals: tuple[jax.Array, jax.Array], gradient_BxTxD: jax.Array) -> tuple[jax.Array, None]:
    empty_Vx0, tokens_BxT = residuals
    tokens_N = tokens_BxT.reshape(-1).astype(jnp.int32)
    order_N = jnp.argsort(tokens_N, stable=True)
    sorted_N = tokens_N[order_N]
    is_first_N = jnp.concatenate([jnp.ones(1, bool), sorted_N[1:] != sorted_N[:-1]])
    rows_NxD = gradient_BxTxD.reshape(tokens_N.size, -1)[order_N].astype(jnp.float32)

    def add(before: tuple[jax.Array, jax.Array], after: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (starts_before, sum_before), (starts_after, sum_after) = before, after
        return starts_before | starts_after, jnp.where(starts_after, sum_after, sum_before + sum_after)

    # Running sums that begin again at each new token: the last one of a token is its gradient.
    _, sums_NxD = jax.lax.associative_scan(add, (is_first_N[:, None], rows_NxD))
    ids_V = jnp.arange(empty_Vx0.shape[0], dtype=tokens_N.dtype)
    # -1 for a token below all others; the row at -1 is then that of another token.
    last_V = jnp.searchsorted(sorted_N, ids_V, side="right", method="sort") - 1
    is_present_V = sorted_N[last_V] == ids_V
    return jnp.where(is_present_V[:, None], sums_NxD[last_V], 0).astype(empty_Vx0.dtype), None


take_rows_sorted.defvjp(lambda table, tokens: (table[tokens], (table[:, :0], tokens)), _take_rows_backward)


def _make_case(table_VxD: jax.Array) -> KernelCase:
    D, dtype = table_VxD.shape[1], table_VxD.dtype

    def make_trial() -> KernelTrial:
        generator = np.random.default_rng(0)
        table_VxD = generator.normal(size=(300, D)).astype(dtype)
        # Some tokens many times, most a few times, and some never.
        tokens_BxT = np.minimum(generator.geometric(0.01, (2, 500)), 298).astype(np.int32)
        gradient_BxTxD = generator.normal(size=(2, 500, D)).astype(dtype)

        def run(table: jax.Array, tokens: jax.Array, gradient: jax.Array) -> Any:
            rows, pull_back = jax.vjp(lambda table: take_rows_sorted(table, tokens), table)
            return rows, *pull_back(gradient)

        def reference(table: jax.Array, tokens: jax.Array, gradient: jax.Array) -> Any:
            one_hot_BxTxV = (tokens[..., None] == jnp.arange(table.shape[0])).astype(jnp.float32)
            product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
            rows = product("btv,vd->btd", one_hot_BxTxV, table.astype(jnp.float32))
            return rows, product("btv,btd->vd", one_hot_BxTxV, gradient.astype(jnp.float32))

        return KernelTrial(run, reference, (table_VxD, tokens_BxT, gradient_BxTxD))

    return KernelCase(
        KERNEL, "gradient of the embedding", "ours", "XLA's scatter", {"width": D}, dtype.name, make_trial, (__file__,)
    )


def unembed(embedding_VxD: jax.Array, x_BxTxD: jax.Array, softcap: float | None = None) -> jax.Array:
    """Return logits (B, T, V) of normalised hidden states, in their dtype; with `softcap` s, s tanh(logits / s)."""
    B, T, _ = x_BxTxD.shape
    embedding_VxD = with_scattered_gradient(embedding_VxD, make_partition_spec(embedding_VxD.shape, "vocab", "embed"))
    logits_BxTxV = (flatten_tokens(x_BxTxD) @ embedding_VxD.T).reshape(B, T, -1)
    if softcap is not None:
        capped_BxTxV = softcap * jnp.tanh(logits_BxTxV.astype(jnp.float32) / softcap)
        logits_BxTxV = capped_BxTxV.astype(x_BxTxD.dtype)
    return constrain(logits_BxTxV, "batch", "sequence", "vocab")


def loss_sum_of(
    unembed: Unembed,
    weights: jax.Array,
    x_BxTxD: jax.Array,
    targets: tuple[jax.Array, jax.Array],
    *,
    chunk_positions: int | None,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> jax.Array:
    """Return the summed cross entropy, float32.

    Args:
        unembed: function from weights and hidden states to logits.
        weights: output matrix (V, D).
        x_BxTxD: normalised hidden states.
        targets: (y_BxT, weight_BxT).
        chunk_positions: `memory.loss_chunk_positions`. If set, logits exist only for a chunk of positions at a time,
            and each device accumulates the gradient of its own chunks before it communicates.
        z_loss: weight of the squared log-denominator of the softmax.
        softcap: that of `unembed`, if it has one.
    """
    x_BxTxD = gather_stream(x_BxTxD)
    if chunk_positions is None:
        guess_BxT = None
        spec = make_partition_spec(weights.shape, "vocab", "embed") or ()
        # Rows of sharded weights would have to be gathered.
        if guesses_logsumexp() and softcap is None and not any(map(split_axes, spec)):
            # The logsumexp is the logit of the label plus the loss of the token, so it is near that logit.
            labels_BxTxD = weights[targets[0]].astype(jnp.float32)
            guess_BxT = jnp.sum(labels_BxTxD * x_BxTxD.astype(jnp.float32), axis=-1)
        return cross_entropy_sum(unembed(weights, x_BxTxD), *targets, z_loss, guess_BxT)[0]

    def sum_loss(unembed: Unembed, weights: jax.Array, *tokens: jax.Array) -> jax.Array:
        loss_sum, _ = chunked_cross_entropy_sum(
            unembed, weights, *tokens, chunk_positions=chunk_positions, z_loss=z_loss
        )
        return loss_sum

    return _sum_over_shards(sum_loss, unembed, weights, x_BxTxD, targets)


def evaluated_loss_sum_of(
    module: nn.Module,
    unembed: Unembed,
    weights: jax.Array,
    x_BxTxD: jax.Array,
    targets: tuple[jax.Array, jax.Array],
    chunk_positions: int | None,
) -> jax.Array:
    """Return `loss_sum_of` without z-loss; the module sows the weight of the targets that are predicted correctly.

    Called where the collection `sums` is mutable, which it is in evaluations.
    """
    evaluate = functools.partial(evaluate_cross_entropy, chunk_positions=chunk_positions)
    x_BxTxD = gather_stream(x_BxTxD)
    if chunk_positions is None:
        loss_sum, correct = evaluate(unembed, weights, x_BxTxD, *targets)
    else:
        loss_sum, correct = _sum_over_shards(evaluate, unembed, weights, x_BxTxD, targets)
    module.sow(SUMS, ACCURACY, correct, reduce_fn=lambda _, new: new, init_fn=lambda: None)
    return loss_sum


def _sum_over_shards(
    function: Callable[..., Any],
    unembed: Unembed,
    weights_VxD: jax.Array,
    x_BxTxD: jax.Array,
    targets: tuple[jax.Array, jax.Array],
) -> Any:
    """Return the sum of `function(unembed, weights, x, *targets)` over the shards of the tokens."""
    spec = make_partition_spec(x_BxTxD.shape, "batch", "sequence", "embed_act")
    batch_axes, position_axes = ((), ()) if spec is None else map(list_axes, spec[:2])
    axes, counts = (*batch_axes, *position_axes), (num_devices(batch_axes), num_devices(position_axes))
    if counts == (1, 1):
        return function(unembed, weights_VxD, x_BxTxD, *targets)

    def split(leaf_BxT: jax.Array) -> jax.Array:
        """Return the shards of an array, stacked in a leading axis that is sharded over all of the mesh axes."""
        (B, T, *rest), (num_batch, num_positions) = leaf_BxT.shape, counts
        by_place = leaf_BxT.reshape(num_batch, B // num_batch, num_positions, T // num_positions, *rest)
        shards = jnp.moveaxis(by_place, 2, 1).reshape(-1, B // num_batch, T // num_positions, *rest)
        return jax.lax.with_sharding_constraint(shards, PartitionSpec(axes))

    def apply(weights_DxV: jax.Array, *tokens: jax.Array) -> Any:
        if reduce_scatters_only_rows():
            # The gradient is accumulated over chunks in the form in which it is scattered: transposed.
            return function(lambda weights_DxV, x: unembed(weights_DxV.T, x), weights_DxV, *tokens)
        return function(unembed, weights_DxV.T, *tokens)

    weight_spec = make_partition_spec(weights_VxD.shape, "vocab", "embed")
    assert weight_spec is not None, "tokens are sharded, so there is a mesh"
    shards = (replicate_per_device(weights_VxD, weight_spec, axes), *map(split, (x_BxTxD, *targets)))
    # Inside of a shard the rules must not shard over these axes again.
    with nn.logical_axis_rules(remove_axes_from_rules(axes, get_active_rules())):
        return jax.tree.map(jnp.sum, jax.vmap(apply, spmd_axis_name=axes)(*shards))
