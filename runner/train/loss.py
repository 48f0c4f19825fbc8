"""Token cross-entropy as a sum, and the fields of a batch that it reads.

The loss is summed, so that the mean over any split of a batch is exact. This module owns the float32 arithmetic from
logits to the summed loss, whole or chunked. It depends on no model, data or mesh.

The data declare the fields of a batch, arrays (S, B, T) by name:

- `x`, `y`, `padding_mask`: input, target, and mask of the real targets.
- `segment`, `position`: only if sequences hold several documents: the document of each token (1, 2, ...; 0 is padding)
  and its position in the document.
- `loss_weight`: weight of each target, only if the weights are not all equal.

`forward` must read every other field that the data declare.

Shape legend: S accumulation steps, B examples, T sequence length, V vocabulary, D width, K chunks of a sequence, C
positions of a chunk.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.errors import InvalidError, format_place
from runner.train.state import get_bound_module

_DOCUMENT_FIELDS = {"segments": "segment", "positions": "position"}  # fields by the name of a model's argument
# A loss may need no target, and attention with relative positions needs segments, but no positions.
_MAY_STAY_UNREAD = frozenset({"x", "y", "padding_mask", "position"})


def target_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the weight of each target: `padding_mask` itself, or `loss_weight` where the mask is set.

    Arrays may have any leading shape. Raises `InvalidError` if the batch has no `padding_mask`.
    """
    if "padding_mask" not in batch:
        raise make_uncounted_error(batch)
    mask = batch["padding_mask"]
    return jnp.where(mask, batch["loss_weight"], 0.0) if "loss_weight" in batch else mask


def make_uncounted_error(batch: Mapping[str, jax.Array]) -> InvalidError:
    """Return the error for a batch without `padding_mask` whose `forward` returns no `token_count`."""
    fields = ", ".join(sorted(set(batch) - {"example"}))
    return InvalidError(
        f"the data's batches hold {fields} and no padding_mask; return from forward as meta token_count how many "
        "targets it has counted"
    )


def document_arguments(apply_fn: Callable[..., Any], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Return the keyword arguments that describe the documents of a sequence: `segments` and `positions`, or none.

    `apply_fn` is the model's `apply`. Raises `InvalidError` if the batch has documents and the model does not take
    these arguments, because it would attend across documents.
    """
    arguments = {argument: batch[field] for argument, field in _DOCUMENT_FIELDS.items() if field in batch}
    model = get_bound_module(apply_fn)
    if arguments and isinstance(model, nn.Module):
        parameters = inspect.signature(type(model).__call__).parameters.values()
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        names = {parameter.name for parameter in parameters}
        if missing := [name for name in arguments if name not in names and not takes_any]:
            raise InvalidError(
                f"sequences of the data hold several documents, and {type(model).__name__} takes no "
                f"{' and no '.join(missing)}: it would attend across them; add what is missing to its __call__, or use "
                "data with one document per sequence"
            )
    return arguments


def validate_fields_read(
    forward: Callable[..., Any], apply_fn: Callable[..., Any], params: Any, batch: Mapping[str, Any], key: Any
) -> None:
    """Raise `InvalidError` if the data declare a field that no operation of `forward` reads.

    `batch` has arrays (S, B, ...); all arguments may be abstract. Called where the train step is traced. It costs
    another trace of `forward`, or nothing if the data declare only fields that every trainer reads.
    """
    declared = [name for name in batch if name not in _MAY_STAY_UNREAD]
    if not declared:
        return
    micro = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}
    micro["example"] = jax.ShapeDtypeStruct(next(iter(micro.values())).shape[:1], jnp.int32)

    def loss_and_meta(micro: Any, params: Any, key: Any) -> Any:
        return forward(apply_fn, params, micro, key)

    jaxpr = jax.make_jaxpr(loss_and_meta)(micro, params, key).jaxpr
    read = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    # The inputs of a jaxpr are the leaves of the arguments in order, and those of a dictionary are sorted by name.
    inputs = dict(zip(sorted(micro), jaxpr.invars, strict=False))
    if unread := [name for name in declared if id(inputs[name]) not in read]:
        raise InvalidError(
            f"{format_place(forward)}: the data's batches hold {', '.join(unread)}, which forward never reads; read it "
            "there, or use data without it"
        )


def compute_log_probs(logits_BxTxV: jax.Array, y_BxT: jax.Array) -> jax.Array:
    """Return log p(y) of each token in float32, (B, T). The logits may be sharded over V, as in `cross_entropy_sum`."""
    logits_BxTxV = logits_BxTxV.astype(jnp.float32)
    # The label is picked by comparison, which works on logits that are sharded over V.
    is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
    label_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
    return label_BxT - jax.nn.logsumexp(logits_BxTxV, axis=-1)


def cross_entropy_sum(
    logits_BxTxV: jax.Array,
    y_BxT: jax.Array,
    mask_BxT: jax.Array,
    z_loss: float = 0.0,
    guess_BxT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Sum -log p(y) over the tokens.

    Args:
        logits_BxTxV: logits of any float type, which may be sharded over V: the label's logit is selected by a
            comparison, which is local to a shard, instead of a gather.
        y_BxT: labels.
        mask_BxT: weight of each token; 1 for real and 0 for padding tokens, or any other weights.
        z_loss: factor of the squared logsumexp that is added to each token's loss, which keeps logits from drifting
            (Chowdhery et al., 2022).
        guess_BxT: guess at the logsumexp of each token, which saves a pass over the logits (see `logsumexp_near`).

    Returns:
        (loss_sum, token_count), float32 scalars; the count is the sum of the weights.
    """
    stored_BxTxV, logits_BxTxV = logits_BxTxV, logits_BxTxV.astype(jnp.float32)
    mask_BxT = mask_BxT.astype(jnp.float32)
    is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
    label_logit_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
    if guess_BxT is None:
        log_sum_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1)
    else:
        log_sum_BxT = logsumexp_near(logits_BxTxV, *jax.lax.stop_gradient((stored_BxTxV, guess_BxT)))
    loss_BxT = log_sum_BxT - label_logit_BxT
    if z_loss:
        loss_BxT += z_loss * jnp.square(log_sum_BxT)
    return jnp.sum(loss_BxT * mask_BxT), jnp.sum(mask_BxT)


@jax.custom_vjp
def logsumexp_near(logits_BxTxV: jax.Array, stored_BxTxV: jax.Array, guess_BxT: jax.Array) -> jax.Array:
    """Return the logsumexp of float32 logits in one pass over them, if each guess is within 40 of it.

    Usually the maximum of the logits must be known before their exponentials are summed. A guess takes its place, so
    that libtpu sums them in the matmul that makes the logits. If the sum of any token is huge or tiny, which means
    that its guess was wrong, all sums are computed again from the maximum.

    Args:
        logits_BxTxV: logits, the only argument with a gradient.
        stored_BxTxV: the same logits in the type in which the matmul returns them. What is computed later reads these,
            so that none are stored in float32.
        guess_BxT: guess at the logsumexp of each token.
    """
    return _logsumexp_with_residuals(logits_BxTxV, stored_BxTxV, guess_BxT)[0]


def _logsumexp_with_residuals(
    logits_BxTxV: jax.Array, stored_BxTxV: jax.Array, guess_BxT: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    @jax.named_scope("fallback")  # so that a plan does not count it
    def sum_below_maximum(stored_BxTxV: jax.Array, *_: jax.Array) -> tuple[jax.Array, jax.Array]:
        offset_BxT = jnp.max(stored_BxTxV, axis=-1).astype(jnp.float32)
        return offset_BxT, jnp.sum(jnp.exp(stored_BxTxV.astype(jnp.float32) - offset_BxT[..., None]), axis=-1)

    # The difference of a whole number and a bfloat16 logit is exact.
    offset_BxT = jnp.round(guess_BxT.astype(jnp.float32))
    sum_BxT = jnp.sum(jnp.exp(logits_BxTxV - offset_BxT[..., None]), axis=-1)
    # In this range neither exponentials nor gradients divided by the sum underflow where they matter. False for NaN.
    is_near = jnp.all((sum_BxT > 1e-20) & (sum_BxT < 1e20))
    offset_BxT, sum_BxT = jax.lax.cond(
        is_near, lambda _, *sums: sums, sum_below_maximum, stored_BxTxV, offset_BxT, sum_BxT
    )
    return jnp.log(sum_BxT) + offset_BxT, (stored_BxTxV, offset_BxT, sum_BxT)


logsumexp_near.defvjp(
    _logsumexp_with_residuals,
    # The gradient is the softmax. Residuals are the stored logits, offsets and sums.
    lambda kept, gradient_BxT: (
        jnp.exp(kept[0].astype(jnp.float32) - kept[1][..., None]) * (gradient_BxT / kept[2])[..., None],
        None,
        None,
    ),
)


def count_correct(logits_BxTxV: jax.Array, y_BxT: jax.Array, mask_BxT: jax.Array) -> jax.Array:
    """Return the summed weight of the tokens whose label has the largest logit, the first of equal ones; float32.

    Arguments are those of `cross_entropy_sum`.
    """
    # Two reductions instead of an argmax, because reductions are local if logits are sharded over V. bfloat16 logits
    # are often equal, so a label with the largest logit is not always the prediction.
    ids_V, largest_BxTx1 = jnp.arange(logits_BxTxV.shape[-1]), jnp.max(logits_BxTxV, axis=-1, keepdims=True)
    predicted_BxT = jnp.min(jnp.where(logits_BxTxV == largest_BxTx1, ids_V, logits_BxTxV.shape[-1]), axis=-1)
    return jnp.sum(jnp.where(predicted_BxT == y_BxT, mask_BxT, 0), dtype=jnp.float32)


def evaluate_cross_entropy(
    unembed: Callable[[Any, jax.Array], jax.Array],
    weights: Any,
    x_BxTxD: jax.Array,
    y_BxT: jax.Array,
    mask_BxT: jax.Array,
    *,
    chunk_positions: int | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of `cross_entropy_sum` and `count_correct`, from the same logits. For evaluations.

    `unembed` maps (weights, (B, C, D)) to logits (B, C, V). Logits of `chunk_positions` positions exist at a time;
    None: of all.
    """

    def evaluate_chunk(chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_BxCxD, mask_BxC, y_BxC = chunk
        logits_BxCxV = unembed(weights, x_BxCxD)
        return cross_entropy_sum(logits_BxCxV, y_BxC, mask_BxC)[0], count_correct(logits_BxCxV, y_BxC, mask_BxC)

    if chunk_positions is None:
        return evaluate_chunk((x_BxTxD, mask_BxT, y_BxT))
    loss_K, correct_K = jax.lax.map(evaluate_chunk, _split_chunks((x_BxTxD, mask_BxT, y_BxT), chunk_positions))
    return jnp.sum(loss_K), jnp.sum(correct_K)


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
    """Return `cross_entropy_sum(unembed(weights, x), y, mask, z_loss)`, with the logits of one chunk at a time.

    `unembed` maps (weights, (B, C, D)) to (B, C, V), position by position. No logits are computed twice: since the loss
    is a sum, the forward pass computes the gradients of a chunk while it has its logits, and the backward pass
    multiplies them by the gradient of the sum. Gradients of weights are accumulated over chunks in float32. Chunks are
    slices along T, so that a batch that is sharded over B keeps its sharding.
    """
    tokens = _split_chunks((x_BxTxD, mask_BxT.astype(jnp.float32), y_BxT), chunk_positions)
    leaves, form = jax.tree.flatten(weights)
    is_float = [jnp.issubdtype(jnp.result_type(leaf), jnp.inexact) for leaf in leaves]
    # Only floating-point weights have gradients, so the others are constants of the chunk's function.
    floats = [
        _cast_varying(jnp.asarray(leaf), x_BxTxD)
        for leaf, is_leaf_float in zip(leaves, is_float, strict=True)
        if is_leaf_float
    ]

    def sum_chunk(
        floats: list[jax.Array], x_BxCxD: jax.Array, mask_BxC: jax.Array, y_BxC: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rest = iter(floats)
        weights = jax.tree.unflatten(
            form, [next(rest) if is_leaf_float else leaf for leaf, is_leaf_float in zip(leaves, is_float, strict=True)]
        )
        return cross_entropy_sum(unembed(weights, x_BxCxD), y_BxC, mask_BxC, z_loss)

    # Arrays that `unembed` closes over have gradients too, so they must become arguments.
    pure, others = jax.closure_convert(sum_chunk, floats, *(leaf[0] for leaf in tokens))
    return _sum_over_chunks(pure, (floats, *others), *tokens)


def _split_chunks(tokens: tuple[jax.Array, ...], chunk_positions: int) -> tuple[jax.Array, ...]:
    """Return arrays (B, T, ...) as chunks of positions, (K, B, C, ...)."""
    T = tokens[0].shape[1]
    if T % chunk_positions:
        raise ValueError(f"chunk_positions={chunk_positions} does not divide the sequence length {T}; use a divisor")
    return tuple(
        jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, chunk_positions, *leaf.shape[2:]), 1, 0) for leaf in tokens
    )


def _cast_varying(tree: Any, other: jax.Array) -> Any:
    """Mark arrays as varying over the `jax.shard_map` axes of `other`, so that their gradients are summed there."""
    axes = jax.typeof(other).manual_axis_type.varying

    def cast(leaf: jax.Array) -> jax.Array:
        missing = tuple(axes - jax.typeof(leaf).manual_axis_type.varying)
        return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf

    return jax.tree.map(cast, tree)


_ChunkSum = Callable[..., tuple[jax.Array, jax.Array]]  # (weights, x, mask, y, *others) -> (loss_sum, token_count)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_over_chunks(
    sum_chunk: _ChunkSum, held: tuple[Any, ...], x_KxBxCxD: jax.Array, mask_KxBxC: jax.Array, y_KxBxC: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the sums of `sum_chunk(weights, x, mask, y, *others)` over all chunks; `held` is (weights, *others)."""
    weights, *others = held
    loss_K, count_K = jax.lax.map(lambda chunk: sum_chunk(weights, *chunk, *others), (x_KxBxCxD, mask_KxBxC, y_KxBxC))
    return jnp.sum(loss_K), jnp.sum(count_K)


def _sum_with_gradients(
    sum_chunk: _ChunkSum, held: tuple[Any, ...], x_KxBxCxD: jax.Array, mask_KxBxC: jax.Array, y_KxBxC: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[Any, ...]]:
    """Return the sums, and for the backward pass `held`, its gradients in float32, and those of x and mask."""

    def add(sums: Any, chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, Any]:
        x_BxCxD, mask_BxC, y_BxC = chunk

        def chunk_loss(held: tuple[Any, ...], x_BxCxD: jax.Array, mask_BxC: jax.Array) -> tuple[jax.Array, jax.Array]:
            weights, *others = held
            return sum_chunk(weights, x_BxCxD, mask_BxC, y_BxC, *others)

        loss_and_gradient = jax.value_and_grad(chunk_loss, argnums=(0, 1, 2), has_aux=True)
        loss_and_count, (held_grads, *token_grads) = loss_and_gradient(held, x_BxCxD, mask_BxC)
        sums = jax.tree.map(lambda total, leaf: total + leaf.astype(jnp.float32), sums, held_grads)
        return sums, (*loss_and_count, *token_grads)

    zeros = _cast_varying(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), held), x_KxBxCxD)
    sums, (loss_K, count_K, *token_grads) = jax.lax.scan(add, zeros, (x_KxBxCxD, mask_KxBxC, y_KxBxC))
    return (jnp.sum(loss_K), jnp.sum(count_K)), (held, sums, *token_grads)


def _scale_gradients(
    sum_chunk: _ChunkSum, kept: tuple[Any, ...], given: tuple[jax.Array, jax.Array]
) -> tuple[Any, jax.Array, jax.Array, None]:
    """Scale the gradients of the forward pass by those of the two sums, `given`."""
    held, sums, x_grads_KxBxCxD, mask_grads_KxBxC = kept
    by_loss, by_count = given
    held_grads = jax.tree.map(lambda leaf, total: (by_loss * total).astype(leaf.dtype), held, sums)
    x_grads_KxBxCxD = (by_loss * x_grads_KxBxCxD).astype(x_grads_KxBxCxD.dtype)
    return held_grads, x_grads_KxBxCxD, by_loss * mask_grads_KxBxC + by_count, None


_sum_over_chunks.defvjp(_sum_with_gradients, _scale_gradients)
