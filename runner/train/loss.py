"""Token cross entropy as sums, so that a mean over any split of a batch is exact.

Owns the float32 arithmetic from logits to the summed loss, whole or chunk by chunk. Knows no model and no mesh.

Shape legend: B batch, T sequence, V vocabulary, D width, K chunks of a sequence, C positions of a chunk.

What the step knows of the fields of a batch. The data declares them; a field is an array of (S, B, T) by name.

- `x`, `y`, `padding_mask`: input, target, and where the target is real.
- `segment`, `position`: where rows hold several documents, which of them a token is of (1, 2, ...; 0 is padding), and
  its place in that.
- `loss_weight`: what a target counts for, where not all count the same.

Any other is `forward`'s to read. Knows no model, no data and no mesh.

Shape legend: S accumulation steps, B examples, T sequence length.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.errors import InvalidError
from runner.train.state import get_bound_module

_DOCUMENT_FIELDS = {"segments": "segment", "positions": "position"}  # by the name of a model's argument
# A loss may do without the target, and attention whose positions are relative without these: it has the segments.
_MAY_STAY_UNREAD = frozenset({"x", "y", "padding_mask", "position"})


def target_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """What each target counts for in the loss: `padding_mask` as it is, or the `loss_weight` of what is real.

    Of any leading shape. Raises `InvalidError` if the batch has no `padding_mask`.
    """
    if "padding_mask" not in batch:
        raise make_uncounted_error(batch)
    mask = batch["padding_mask"]
    return jnp.where(mask, batch["loss_weight"], 0.0) if "loss_weight" in batch else mask


def make_uncounted_error(batch: Mapping[str, jax.Array]) -> InvalidError:
    """The error of a batch without `padding_mask` whose `forward` does not say how many targets it has counted."""
    fields = ", ".join(sorted(set(batch) - {"example"}))
    return InvalidError(
        f"the data's batches hold {fields} and no padding_mask; return from forward as meta token_count how many "
        "targets it has counted"
    )


def document_arguments(apply_fn: Callable[..., Any], batch: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arguments by name that tell a model of the documents of a row: `segments` and `positions`, or none.

    `apply_fn` is the model's `apply`. Raises `InvalidError` if the model does not take what the batch has: it would
    attend across documents.
    """
    found = {argument: batch[field] for argument, field in _DOCUMENT_FIELDS.items() if field in batch}
    model = get_bound_module(apply_fn)
    if found and isinstance(model, nn.Module):
        taken = inspect.signature(type(model).__call__).parameters.values()
        takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken)
        if lacking := [name for name in found if name not in {one.name for one in taken} and not takes_any]:
            raise InvalidError(
                f"rows of the data hold several documents, and {type(model).__name__} takes no "
                f"{' and no '.join(lacking)}: it would attend across them; add what is missing to its __call__, or use "
                "data whose rows are one document"
            )
    return found


def validate_fields_read(
    forward: Callable[..., Any], apply_fn: Callable[..., Any], params: Any, batch: Mapping[str, Any], key: Any
) -> None:
    """Raise `InvalidError` if the data declares a field that no operation of `forward` takes.

    `batch` is of (S, B, ...); all may be abstract. Called where the train step is traced. Costs another trace of
    `forward`, and nothing where the data declares no more than every trainer reads.
    """
    declared = [name for name in batch if name not in _MAY_STAY_UNREAD]
    if not declared:
        return
    micro = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in batch.items()}
    micro["example"] = jax.ShapeDtypeStruct(next(iter(micro.values())).shape[:1], jnp.int32)

    def loss_and_meta(micro: Any, params: Any, key: Any) -> Any:
        return forward(apply_fn, params, micro, key)

    jaxpr = jax.make_jaxpr(loss_and_meta)(micro, params, key).jaxpr
    taken = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    inputs = dict(zip(sorted(micro), jaxpr.invars, strict=False))  # arguments come in order, and a dictionary's by name
    if unread := [name for name in declared if id(inputs[name]) not in taken]:
        raise InvalidError(
            f"the data's batches hold {', '.join(unread)}, which forward never reads; read it there, or use data "
            "without it"
        )


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
