"""Moments of gradients of low rank, which are GaLore's: each matrix of a stack has a projection of its own.

That of optax knows no stacks, and projects the longer side of a matrix where the paper projects the shorter one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax import lax


@struct.dataclass
class ProjectionState:
    """`projector` (..., S, R) of each matrix whose shorter side is S; what is not projected has none there."""

    count: jax.Array
    projector: Any
    inner: Any


def projected(
    inner: optax.GradientTransformation, is_projected: Any, rank: int, every_steps: int, scale: float
) -> optax.GradientTransformation:
    """`inner`, shown gradients (..., M, N) as (..., R, N) where M <= N, else as (..., M, R), and shown no parameters.

    Every so many steps, from the first on, the R singular vectors of the largest singular values of the gradient at
    hand become the projector; moments go on as they are. An update is projected back, times `scale`. What
    `is_projected`, a tree of bools, leaves out passes as it is. Source: arXiv:2403.03507.
    """

    def mapped(function: Any, *trees: Any) -> Any:
        return jax.tree.map(lambda yes, *leaves: function(*leaves) if yes else leaves[0], is_projected, *trees)

    def init(params: Any) -> ProjectionState:
        projector = jax.tree.map(
            lambda yes, p: jnp.zeros(_projector_shape(p.shape, rank), jnp.float32) if yes else optax.MaskedNode(),
            is_projected,
            params,
        )
        low = mapped(lambda p, q: _low(p.astype(jnp.float32), q), params, projector)
        return ProjectionState(jnp.zeros((), jnp.int32), projector, inner.init(low))

    def update(grads: Any, state: ProjectionState, params: Any = None) -> tuple[Any, ProjectionState]:
        projector = lax.cond(
            state.count % every_steps == 0,
            lambda: mapped(lambda q, g: _singular_vectors(g, q.shape[-1]), state.projector, grads),
            lambda: state.projector,
        )
        low, inner_state = inner.update(mapped(_low, grads, projector), state.inner)
        updates = mapped(lambda u, q, g: scale * _high(u, q, g.shape), low, projector, grads)
        return updates, ProjectionState(optax.safe_increment(state.count), projector, inner_state)

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
