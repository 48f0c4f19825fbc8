"""A model's variables that no gradient moves: part of the train state, seen by `forward`, replaced by each step.

They are what `init` of the model makes besides `params`, by collection, such as the biases that balance the load of
experts. A model that has none has no leaf here, and its state is that of flax. They are saved, restored, compared and
fingerprinted like every leaf.

A step changes them by sums over its whole global batch: `forward` returns these as meta `statistics`, a pytree for one
micro-batch, and `BaseTrainer.update_variables` makes the next variables of their total. Counts are added up as
integers, in which no split of the batch moves a bit; all else in float32.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.training import train_state

from runner.checkpoint.adapted import BASE, Merge, merged
from runner.errors import InvalidError

BY_GRADIENT = "_overwrite_with_gradient"  # of flax's float8 operations
PARAMS, VARIABLES, RIDERS = "params", "variables", "riders"
STATISTICS = "statistics"
Meta = dict[str, jax.Array]
# (variables, statistics of the step) -> (variables of the next step, scalars for the step's row)
UpdateVariables = Callable[[Any, Any], tuple[Any, Meta]]


class TrainState(train_state.TrainState):
    """That of flax, with the model's variables other than `params`, by collection, and what rides along, by name.

    With `merge`, `params` are an adapter, and the model's own stand still in `variables.base`: see `adapter`.
    """

    variables: Any = struct.field(default_factory=dict)
    riders: Any = struct.field(default_factory=dict)  # see `runner.train.rider`
    merge: Merge | None = struct.field(pytree_node=False, default=None)


def others(variables: Mapping[str, Any]) -> Any:
    """What `init` of a model returns, without its parameters."""
    return {name: collection for name, collection in variables.items() if name != PARAMS}


def variables_of(state: Any) -> Any:
    """The model's variables of a train state, which a caller may have made as flax's own: that has none."""
    found = getattr(state, VARIABLES, {})
    return found if merge_of(state) is None else {name: own for name, own in found.items() if name != BASE}


def merge_of(state: Any) -> Merge | None:
    """How the adapter that a train state trains is merged; None: it trains the model's own parameters."""
    return getattr(state, "merge", None)


def with_other_variables(state: TrainState, variables: Any) -> TrainState:
    """`state` with other variables of its model."""
    return state.replace(variables=variables if state.merge is None else {**variables, BASE: state.variables[BASE]})


def model_params(state: Any) -> Callable[[Any], Any]:
    """From what is trained of a state to the parameters that the model is applied to: the same, or merged. Pure."""
    merge = merge_of(state)
    if merge is None:
        return lambda params: params
    return lambda params: merged(state.variables[BASE], params, merge)


def with_variables(apply_fn: Callable[..., Any], variables: Any) -> Callable[..., Any]:
    """`apply_fn` of a model, which sees `variables` beside what it is given; the same function if there are none."""
    if not variables:
        return apply_fn

    @functools.wraps(apply_fn)
    def apply(given: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        return apply_fn({**variables, **given}, *args, **kwargs)

    return apply


def model_of(apply_fn: Callable[..., Any]) -> Any:
    """The object whose method `apply_fn` is, or was before `with_variables`; None for a plain function."""
    method = inspect.unwrap(apply_fn, stop=lambda function: hasattr(function, "__self__"))
    return getattr(method, "__self__", None)


def refuse_by_gradient(variables: Mapping[str, Any]) -> None:
    """Raise `InvalidError` for variables whose gradients are their next values: a step would leave them as they are."""
    if BY_GRADIENT in variables:
        raise InvalidError(
            f"the model has variables {BY_GRADIENT}, of flax.linen.fp8_ops, whose gradients are their next values, and "
            "no step here does that: their scales would stand still; use an operation whose scales are variables that "
            "update_variables makes, or a train_step of your own"
        )


def total(meta: Mapping[str, Any], num_steps: int) -> Meta:
    """The statistics of all micro-batches, if `meta` has any; of several they are the first axis of each leaf."""
    if STATISTICS not in meta:
        return {}

    def added(leaf: Any) -> jax.Array:
        wide = jnp.asarray(leaf, _wide(jnp.result_type(leaf)))
        return wide if num_steps == 1 else jnp.sum(wide, axis=0)

    return {STATISTICS: jax.tree.map(added, meta[STATISTICS])}


def unchanged(variables: Any, statistics: Any) -> tuple[Any, Meta]:
    """(variables of the next step, scalars for the step's row) from the sums of the step's statistics; none here.

    Pure. An experiment replaces it where its `forward` returns `statistics`.
    """
    return variables, {}


def weights_of(state: Any) -> Any:
    """What is trained of a state, which must not be an adapter, and the model's other variables where it has any."""
    variables = variables_of(state)
    return {PARAMS: state.params} | ({VARIABLES: variables} if variables else {})


def without_statistics(meta: Mapping[str, Any]) -> Meta:
    """What a row may hold of a forward's meta."""
    return {name: value for name, value in meta.items() if name != STATISTICS}


def _wide(dtype: Any) -> Any:
    return jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32
