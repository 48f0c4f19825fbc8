"""What the step knows of the fields of a batch. The data declares them; a field is an array of (S, B, T) by name.

- `x`, `y`, `padding_mask`: input, target, and where the target is real.
- `segment`, `position`: where rows hold several documents, which of them a token is of (1, 2, ...; 0 is padding), and
  its place in that.
- `loss_weight`: what a target counts for, where not all count the same.

Any other is `forward`'s to read. Knows no model, no data and no mesh.

Shape legend: S accumulation steps, B examples, T sequence length.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from runner.errors import InvalidError
from runner.train.variables import model_of

_DOCUMENT_FIELDS = {"segments": "segment", "positions": "position"}  # by the name of a model's argument
# A loss may do without the target, and attention whose positions are relative without these: it has the segments.
_MAY_STAY_UNREAD = frozenset({"x", "y", "padding_mask", "position"})


def target_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """What each target counts for in the loss: `padding_mask` as it is, or the `loss_weight` of what is real.

    Of any leading shape. Raises `InvalidError` if the batch has no `padding_mask`.
    """
    if "padding_mask" not in batch:
        raise uncounted(batch)
    mask = batch["padding_mask"]
    return jnp.where(mask, batch["loss_weight"], 0.0) if "loss_weight" in batch else mask


def uncounted(batch: Mapping[str, jax.Array]) -> InvalidError:
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
    model = model_of(apply_fn)
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


def refuse_unread(
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
