"""Schedule-free: the parameters of the train state are a mean, and what is trained stands in the optimizer's state.

So whoever evaluates, samples, exports or takes over parameters has the mean with no more ado; the step alone asks where
to take the gradient, which is between the two. That of optax has its parameters there, and the mean is computed.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct


@struct.dataclass
class AverageState:
    """What is trained, `fast`, in float32, and the state of the optimizer that moves it.

    `weight_sum` is that of all steps so far, `max_rate` their highest learning rate. `b1` is the mean's share of the
    point where the gradient is taken.
    """

    count: jax.Array
    weight_sum: jax.Array
    max_rate: jax.Array
    fast: Any
    inner: Any
    b1: float = struct.field(pytree_node=False)


def averaged(inner: optax.GradientTransformation, schedule: optax.Schedule, b1: float) -> optax.GradientTransformation:
    """`inner`, whose steps are averaged, each weighed by the square of the highest learning rate until then.

    It is given gradients that were taken at `gradient_point`, and parameters that are the mean: its updates lead to the
    next mean. Where the learning rate was 0 from the start on, nothing moves. Source: arXiv:2405.15682.
    """

    def init(params: Any) -> AverageState:
        zero = jnp.zeros((), jnp.float32)
        fast = jax.tree.map(lambda p: p.astype(jnp.float32).copy(), params)
        return AverageState(jnp.zeros((), jnp.int32), zero, zero, fast, inner.init(params), b1)

    def update(grads: Any, state: AverageState, params: Any) -> tuple[Any, AverageState]:
        moves, inner_state = inner.update(grads, state.inner, _between(params, state.fast, b1))
        fast = optax.apply_updates(state.fast, moves)
        max_rate = jnp.maximum(state.max_rate, jnp.asarray(schedule(state.count), jnp.float32))
        weight_sum = state.weight_sum + max_rate**2
        share = jnp.where(weight_sum > 0, max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1.0), 0.0)
        updates = jax.tree.map(lambda z, x: share * (z - x), fast, params)
        return updates, AverageState(optax.safe_increment(state.count), weight_sum, max_rate, fast, inner_state, b1)

    return optax.GradientTransformation(init, update)


def gradient_point(params: Any, opt_state: Any) -> Any:
    """Where the step takes the gradient: at the parameters, but for an optimizer that averages. Called in the step."""
    found = _find(opt_state)
    return params if found is None else _between(params, found.fast, found.b1)


def restarted(params: Any, opt_state: Any) -> Any:
    """`opt_state` of step 0, of other parameters than it was made with: those of another run, say."""

    def begun(state: Any) -> Any:
        if not isinstance(state, AverageState):
            return state
        fast = _mapped(lambda z, p: p.astype(z.dtype).copy(), state.fast, params)
        return dataclasses.replace(state, fast=fast)

    return jax.tree.map(begun, opt_state, is_leaf=_is_average)


def has_average(opt_state: Any) -> bool:
    """Whether parameters are averaged."""
    return _find(opt_state) is not None


def _find(opt_state: Any) -> AverageState | None:
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_average)
    return next((leaf for leaf in leaves if isinstance(leaf, AverageState)), None)


def _between(mean: Any, fast: Any, b1: float) -> Any:
    return _mapped(lambda z, x: (x + (1 - b1) * (z - x)).astype(x.dtype), fast, mean)


def _mapped(function: Any, fast: Any, params: Any) -> Any:
    """A tree like `params`; what is frozen, and so is not in `fast`, stays as it is."""
    return jax.tree.map(
        lambda z, p: p if isinstance(z, optax.MaskedNode) else function(z, p),
        fast,
        params,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )


def _is_average(node: Any) -> bool:
    return isinstance(node, AverageState)
