"""Optax transformations for GaLore and schedule-free optimizers.

**GaLore** (`project_low_rank`): moments of gradients that are projected to a low rank. Each matrix of a stack has its
own projection. optax's version does not support stacks, and projects the longer side of a matrix where the paper
projects the shorter one.

**Schedule-free** (`average_schedule_free`): the parameters of the train state are an average of the iterates, and the
optimizer's state holds the iterates themselves. Evaluation, sampling, export and warm starts therefore use the average
without special code; only the train step needs the point between the two at which the gradient is taken
(`compute_gradient_point`). optax's version keeps that point as the parameters, and computes the average on request.

Shape legend: M x N a matrix, S its shorter side, R the rank of the projection. Leading axes stack matrices.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

from runner.optim.muon import SphereState, restart_norms


@struct.dataclass
class GaLoreState:
    """State of `project_low_rank`."""

    count: jax.Array
    projector: Any  # tree with an array (..., S, R) for each projected parameter, and `optax.MaskedNode` for the others
    inner: Any


def project_low_rank(
    inner: optax.GradientTransformation, is_projected: Any, rank: int, every_steps: int, scale: float
) -> optax.GradientTransformation:
    """Return `inner` applied to gradients that are projected to a low rank. Source: arXiv:2403.03507.

    The first R left or right singular vectors of the gradient become the projector in the first step and every
    `every_steps` steps; moments are kept. `inner` sees gradients (..., R, N) where M <= N, else (..., M, R), and no
    parameters. Its update is projected back and multiplied by `scale`. Gradients of parameters that are False in
    `is_projected` are passed to `inner` unchanged.
    """

    def map_projected(function: Any, *trees: Any) -> Any:
        return jax.tree.map(lambda yes, *leaves: function(*leaves) if yes else leaves[0], is_projected, *trees)

    def make_projector(param: jax.Array) -> jax.Array:
        side = min(param.shape[-2:])
        return jnp.zeros((*param.shape[:-2], side, min(rank, side)), jnp.float32)

    def init(params: Any) -> GaLoreState:
        projector = jax.tree.map(lambda yes, p: make_projector(p) if yes else optax.MaskedNode(), is_projected, params)
        # The inner state has the shapes of projected gradients, which are float32.
        low = map_projected(lambda p, q: _project(p.astype(jnp.float32), q), params, projector)
        return GaLoreState(jnp.zeros((), jnp.int32), projector, inner.init(low))

    def update(grads: Any, state: GaLoreState, params: Any = None) -> tuple[Any, GaLoreState]:
        # The first step, of count 0, replaces the zeros that `init` makes, so they are never used for an update.
        projector = lax.cond(
            state.count % every_steps == 0,
            lambda: map_projected(lambda q, g: _compute_singular_vectors(g, q.shape[-1]), state.projector, grads),
            lambda: state.projector,
        )
        low, inner_state = inner.update(map_projected(_project, grads, projector), state.inner)
        updates = map_projected(lambda u, q, g: scale * _project_back(u, q, g.shape), low, projector, grads)
        return updates, GaLoreState(optax.safe_increment(state.count), projector, inner_state)

    return optax.GradientTransformation(init, update)


def _compute_singular_vectors(grad_MxN: jax.Array, rank: int) -> jax.Array:
    """Return the first `rank` singular vectors of the shorter side, each with a positive largest component.

    The sign of a singular vector is arbitrary, and libraries differ in it. Since moments are kept, vectors of the
    opposite sign would work against them.
    """
    *_, M, N = grad_MxN.shape
    left, _, right = jnp.linalg.svd(grad_MxN.astype(jnp.float32), full_matrices=False)
    vectors_SxR = left[..., :rank] if M <= N else jnp.swapaxes(right[..., :rank, :], -1, -2)
    # The component of the largest magnitude is far from 0, so rounding cannot change its sign.
    largest = jnp.argmax(jnp.abs(vectors_SxR), axis=-2, keepdims=True)
    return vectors_SxR * jnp.where(jnp.take_along_axis(vectors_SxR, largest, axis=-2) < 0, -1.0, 1.0)


def _project(grad_MxN: jax.Array, projector_SxR: jax.Array) -> jax.Array:
    *_, M, N = grad_MxN.shape
    return jnp.swapaxes(projector_SxR, -1, -2) @ grad_MxN if M <= N else grad_MxN @ projector_SxR


def _project_back(update: jax.Array, projector_SxR: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *_, M, N = shape
    return projector_SxR @ update if M <= N else update @ jnp.swapaxes(projector_SxR, -1, -2)


@struct.dataclass
class ScheduleFreeState:
    """State of `average_schedule_free`."""

    count: jax.Array
    weight_sum: jax.Array  # sum of the weights of all steps so far
    max_rate: jax.Array  # highest learning rate so far
    fast: Any  # the iterates that the inner optimizer updates, in float32
    inner: Any
    b1: float = struct.field(pytree_node=False)  # weight of the average in the point where the gradient is taken


def average_schedule_free(
    inner: optax.GradientTransformation, schedule: optax.Schedule, b1: float
) -> optax.GradientTransformation:
    """Return `inner` with an average over its iterates as the parameters. Source: arXiv:2405.15682.

    Each iterate has the square of the highest learning rate so far as its weight. Gradients have to be taken at
    `compute_gradient_point`; parameters are the average, and updates lead to the next average. Parameters do not change
    before the first learning rate above 0.
    """

    def init(params: Any) -> ScheduleFreeState:
        zero = jnp.zeros((), jnp.float32)
        # A copy, because the train step donates parameters and state, and one buffer cannot be donated twice.
        fast = jax.tree.map(lambda p: p.astype(jnp.float32).copy(), params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, zero, fast, inner.init(params), b1)

    def update(grads: Any, state: ScheduleFreeState, params: Any) -> tuple[Any, ScheduleFreeState]:
        # The inner optimizer decays the point where the gradient was taken, as published.
        moves, inner_state = inner.update(grads, state.inner, _interpolate(params, state.fast, b1))
        fast = optax.apply_updates(state.fast, moves)
        max_rate = jnp.maximum(state.max_rate, jnp.asarray(schedule(state.count), jnp.float32))
        weight_sum = state.weight_sum + max_rate**2
        # The inner `where` keeps the division finite while the learning rate has always been 0.
        share = jnp.where(weight_sum > 0, max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1.0), 0.0)
        updates = jax.tree.map(lambda z, x: share * (z - x), fast, params)
        return updates, ScheduleFreeState(
            optax.safe_increment(state.count), weight_sum, max_rate, fast, inner_state, b1
        )

    return optax.GradientTransformation(init, update)


def compute_gradient_point(params: Any, opt_state: Any) -> Any:
    """Return the point where the train step takes the gradient: the parameters, unless they are an average."""
    # The state may be nested in those of clipping and of frozen parameters.
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_made_from_params)
    state = next((leaf for leaf in leaves if isinstance(leaf, ScheduleFreeState)), None)
    return params if state is None else _interpolate(params, state.fast, state.b1)


def restart_from_params(params: Any, opt_state: Any) -> Any:
    """Return the `opt_state` of step 0 for other parameters than it was made with, such as those of another run."""

    def restart(state: Any) -> Any:
        if isinstance(state, SphereState):
            return restart_norms(params, state)
        if not isinstance(state, ScheduleFreeState):
            return state
        fast = _map_trained(lambda z, p: p.astype(z.dtype).copy(), state.fast, params)
        return dataclasses.replace(state, fast=fast)

    return jax.tree.map(restart, opt_state, is_leaf=_is_made_from_params)


def is_made_from_params(opt_state: Any) -> bool:
    """Return True if the optimizer's state at step 0 depends on the values of the parameters."""
    return any(map(_is_made_from_params, jax.tree.leaves(opt_state, is_leaf=_is_made_from_params)))


def _interpolate(mean: Any, fast: Any, b1: float) -> Any:
    """Return b1 mean + (1 - b1) fast, in the types of `mean`."""
    return _map_trained(lambda z, x: (x + (1 - b1) * (z - x)).astype(x.dtype), fast, mean)


def _map_trained(function: Any, fast: Any, params: Any) -> Any:
    """Map a function over iterates and parameters; frozen parameters, which have no iterate, stay as they are."""
    return jax.tree.map(
        lambda z, p: p if isinstance(z, optax.MaskedNode) else function(z, p),
        fast,
        params,
        is_leaf=lambda leaf: isinstance(leaf, optax.MaskedNode),
    )


def _is_made_from_params(node: Any) -> bool:
    return isinstance(node, ScheduleFreeState | SphereState)
