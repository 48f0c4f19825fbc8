"""Layer norm and RMS norm over the last axis, in float32, and what their backward pass finds. Pure.

A sum over a row that stands by itself reads the whole residual stream once more. So on a TPU the statistics of a row, a
number or two, are kept for the backward pass (`form.kept`), and a layer norm takes mean and mean square in one pass,
which the matmul before it can make as it writes. Gradients are written out: a layer norm's that is derived also adds up
differences from the mean, which make 0. Elsewhere the input alone is kept, and all is computed again.

Shape legend: ... tokens, D width.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from experiments.model.form import keeps_heads_apart, kept

Found = tuple[jax.Array, ...]

_with_gradient = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
_again = functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))


def rms_norm(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Return x / rms(x) times `scale_D`, in float32."""
    return (_rms_norm_kept if keeps_heads_apart() else _rms_norm_again)(epsilon, x, scale_D)


@_again
def _rms_norm_again(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(_mean(x * x) + epsilon) * scale_D


@_with_gradient
def _rms_norm_kept(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    return _rms_norm_forward(epsilon, x, scale_D)[0]


def _rms_norm_forward(epsilon: float, x: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, Found]:
    wide = x.astype(jnp.float32)
    inverse = kept(lax.rsqrt(_mean(wide * wide) + epsilon))
    return wide * inverse * scale_D, (x, inverse, scale_D)


def _rms_norm_backward(epsilon: float, found: Found, dy: jax.Array) -> Found:
    x, inverse, scale_D = found
    normal, dnormal = x.astype(jnp.float32) * inverse, dy * scale_D
    dx = inverse * (dnormal - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _over_tokens(dy * normal, scale_D)


_rms_norm_kept.defvjp(_rms_norm_forward, _rms_norm_backward)


def layer_norm(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Return x, less its mean and divided by its standard deviation, times `scale_D`, plus `bias_D`, in float32."""
    return (_layer_norm_kept if keeps_heads_apart() else _layer_norm_again)(epsilon, x, scale_D, bias_D)


@_again
def _layer_norm_again(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    mean = _mean(x)
    return (x - mean) * (lax.rsqrt(_mean(jnp.square(x - mean)) + epsilon) * scale_D) + bias_D


@_with_gradient
def _layer_norm_kept(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    return _layer_norm_forward(epsilon, x, scale_D, bias_D)[0]


def _layer_norm_forward(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, Found]:
    wide = x.astype(jnp.float32)
    mean, mean_square = kept(_mean(wide)), _mean(wide * wide)
    inverse = kept(lax.rsqrt(jnp.maximum(mean_square - mean * mean, 0) + epsilon))
    return (wide - mean) * inverse * scale_D + bias_D, (x, mean, inverse, scale_D, bias_D)


def _layer_norm_backward(epsilon: float, found: Found, dy: jax.Array) -> Found:
    x, mean, inverse, scale_D, bias_D = found
    normal, dnormal = (x.astype(jnp.float32) - mean) * inverse, dy * scale_D
    dx = inverse * (dnormal - _mean(dnormal) - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _over_tokens(dy * normal, scale_D), _over_tokens(dy, bias_D)


_layer_norm_kept.defvjp(_layer_norm_forward, _layer_norm_backward)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _over_tokens(x: jax.Array, parameter_D: jax.Array) -> jax.Array:
    """The sum over all tokens, in the type of a parameter."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1))).astype(parameter_D.dtype)
