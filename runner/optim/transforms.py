"""Schedule-free: the parameters of the train state are a mean, and what is trained stands in the optimizer's state.

So whoever evaluates, samples, exports or takes over parameters has the mean with no more ado; the step alone asks where
to take the gradient, which is between the two. That of optax has its parameters there, and the mean is computed.

An update made orthogonal, which is muon's: each matrix of a stack by itself.

That of optax has a momentum that is corrected, gives the rest to Adam with Nesterov's step and a decay of its own, and
keeps its coefficients in the state; this one is the published one, with one rate for all.

Moments of gradients of low rank, which are GaLore's: each matrix of a stack has a projection of its own.

That of optax knows no stacks, and projects the longer side of a matrix where the paper projects the shorter one.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NUM_ITERATIONS = 5
_NORM_MIN = 1e-7
_RMS = 0.2  # of an update of adamw, with which this one so shares rate and decay


def orthogonalise() -> optax.GradientTransformation:
    """Make each matrix nearly orthogonal, and the mean square of its elements that of an update of adamw.

    Of updates whose last two axes are those of matrices. Newton and Schulz's iteration, of five steps as published, in
    float32: its singular values end between 0.7 and 1.2. Source: arXiv:2502.16982.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return jax.tree.map(_orthogonalised, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def _orthogonalised(matrices: jax.Array) -> jax.Array:
    """Of (..., M, N)."""
    *_, M, N = matrices.shape
    is_tall = M > N
    x = jnp.swapaxes(matrices, -1, -2) if is_tall else matrices
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + _NORM_MIN)
    a, b, c = _COEFFICIENTS

    def iterate(_: int, x: jax.Array) -> jax.Array:
        square = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * square + c * square @ square) @ x

    x = lax.fori_loop(0, _NUM_ITERATIONS, iterate, x)
    x = jnp.swapaxes(x, -1, -2) if is_tall else x
    return x * (_RMS * math.sqrt(max(M, N)))


@struct.dataclass
class GaLoreState:
    """`projector` (..., S, R) of each matrix whose shorter side is S; what is not projected has none there."""

    count: jax.Array
    projector: Any
    inner: Any


def project_low_rank(
    inner: optax.GradientTransformation, is_projected: Any, rank: int, every_steps: int, scale: float
) -> optax.GradientTransformation:
    """`inner`, shown gradients (..., M, N) as (..., R, N) where M <= N, else as (..., M, R), and shown no parameters.

    Every so many steps, from the first on, the R singular vectors of the largest singular values of the gradient at
    hand become the projector; moments go on as they are. An update is projected back, times `scale`. What
    `is_projected`, a tree of bools, leaves out passes as it is. Source: arXiv:2403.03507.
    """

    def mapped(function: Any, *trees: Any) -> Any:
        return jax.tree.map(lambda yes, *leaves: function(*leaves) if yes else leaves[0], is_projected, *trees)

    def init(params: Any) -> GaLoreState:
        projector = jax.tree.map(
            lambda yes, p: jnp.zeros(_projector_shape(p.shape, rank), jnp.float32) if yes else optax.MaskedNode(),
            is_projected,
            params,
        )
        low = mapped(lambda p, q: _low(p.astype(jnp.float32), q), params, projector)
        return GaLoreState(jnp.zeros((), jnp.int32), projector, inner.init(low))

    def update(grads: Any, state: GaLoreState, params: Any = None) -> tuple[Any, GaLoreState]:
        projector = lax.cond(
            state.count % every_steps == 0,
            lambda: mapped(lambda q, g: _singular_vectors(g, q.shape[-1]), state.projector, grads),
            lambda: state.projector,
        )
        low, inner_state = inner.update(mapped(_low, grads, projector), state.inner)
        updates = mapped(lambda u, q, g: scale * _high(u, q, g.shape), low, projector, grads)
        return updates, GaLoreState(optax.safe_increment(state.count), projector, inner_state)

    return optax.GradientTransformation(init, update)


def _projector_shape(shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
    side = min(shape[-2:])
    return (*shape[:-2], side, min(rank, side))


def _singular_vectors(grad: jax.Array, rank: int) -> jax.Array:
    """The first `rank` of the shorter side, each with the sign that makes its largest component positive.

    The sign is free, and libraries differ in it; but moments go on, and those of another sign would work against them.
    """
    *_, M, N = grad.shape
    left, _, right = jnp.linalg.svd(grad.astype(jnp.float32), full_matrices=False)
    vectors = left[..., :rank] if M <= N else jnp.swapaxes(right[..., :rank, :], -1, -2)
    largest = jnp.argmax(jnp.abs(vectors), axis=-2, keepdims=True)
    return vectors * jnp.where(jnp.take_along_axis(vectors, largest, axis=-2) < 0, -1.0, 1.0)


def _low(grad: jax.Array, projector: jax.Array) -> jax.Array:
    *_, M, N = grad.shape
    return jnp.swapaxes(projector, -1, -2) @ grad if M <= N else grad @ projector


def _high(update: jax.Array, projector: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    *_, M, N = shape
    return projector @ update if M <= N else update @ jnp.swapaxes(projector, -1, -2)


@struct.dataclass
class ScheduleFreeState:
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


def average_schedule_free(
    inner: optax.GradientTransformation, schedule: optax.Schedule, b1: float
) -> optax.GradientTransformation:
    """`inner`, whose steps are averaged, each weighed by the square of the highest learning rate until then.

    It is given gradients that were taken at `compute_gradient_point`, and parameters that are the mean: its updates
    lead to the next mean. Where the learning rate was 0 from the start on, nothing moves. Source: arXiv:2405.15682.
    """

    def init(params: Any) -> ScheduleFreeState:
        zero = jnp.zeros((), jnp.float32)
        fast = jax.tree.map(lambda p: p.astype(jnp.float32).copy(), params)
        return ScheduleFreeState(jnp.zeros((), jnp.int32), zero, zero, fast, inner.init(params), b1)

    def update(grads: Any, state: ScheduleFreeState, params: Any) -> tuple[Any, ScheduleFreeState]:
        moves, inner_state = inner.update(grads, state.inner, _between(params, state.fast, b1))
        fast = optax.apply_updates(state.fast, moves)
        max_rate = jnp.maximum(state.max_rate, jnp.asarray(schedule(state.count), jnp.float32))
        weight_sum = state.weight_sum + max_rate**2
        share = jnp.where(weight_sum > 0, max_rate**2 / jnp.where(weight_sum > 0, weight_sum, 1.0), 0.0)
        updates = jax.tree.map(lambda z, x: share * (z - x), fast, params)
        return updates, ScheduleFreeState(
            optax.safe_increment(state.count), weight_sum, max_rate, fast, inner_state, b1
        )

    return optax.GradientTransformation(init, update)


def compute_gradient_point(params: Any, opt_state: Any) -> Any:
    """Where the step takes the gradient: at the parameters, but for an optimizer that averages. Called in the step."""
    found = _find(opt_state)
    return params if found is None else _between(params, found.fast, found.b1)


def restart_average(params: Any, opt_state: Any) -> Any:
    """`opt_state` of step 0, of other parameters than it was made with: those of another run, say."""

    def begun(state: Any) -> Any:
        if not isinstance(state, ScheduleFreeState):
            return state
        fast = _mapped(lambda z, p: p.astype(z.dtype).copy(), state.fast, params)
        return dataclasses.replace(state, fast=fast)

    return jax.tree.map(begun, opt_state, is_leaf=_is_average)


def is_averaged(opt_state: Any) -> bool:
    """Whether parameters are averaged."""
    return _find(opt_state) is not None


def _find(opt_state: Any) -> ScheduleFreeState | None:
    leaves = jax.tree.leaves(opt_state, is_leaf=_is_average)
    return next((leaf for leaf in leaves if isinstance(leaf, ScheduleFreeState)), None)


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
    return isinstance(node, ScheduleFreeState)
