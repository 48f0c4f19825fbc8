"""Rotary embedding by a matmul, as on TPUs, compared with that of other platforms.

Shape legend: B batch, T sequence, N heads, H width of a head.
"""

import functools
from decimal import Decimal, localcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model import platform
from experiments.model.rotary import Rope, frequencies, rotate, rotation_at

B, T, N, H = 2, 24, 3, 16


def rotate_with_gradient(pairs, x_BxTxNxH, dy_BxTxNxH):
    rotation = rotation_at(jnp.arange(T)[None] * 97, Rope(), H)
    y_BxTxNxH, pull_back = jax.vjp(lambda x: rotate(x, rotation, pairs), x_BxTxNxH)
    return y_BxTxNxH, *pull_back(dy_BxTxNxH)


@pytest.mark.daily(3)
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_rotation_by_matmul_equals_rotation_with_its_gradient(dtype, pairs, monkeypatch):
    generator = np.random.default_rng(0)
    arrays = [jnp.asarray(generator.standard_normal((B, T, N, H)), dtype) for _ in range(2)]
    expected = jax.jit(functools.partial(rotate_with_gradient, pairs))(*arrays)
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    actual = jax.jit(functools.partial(rotate_with_gradient, pairs))(*arrays)
    for one, other in zip(actual, expected, strict=True):
        assert one.dtype == dtype
        rounding = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(one.astype(np.float32), other.astype(np.float32), rtol=rounding, atol=2 * rounding)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rotation_by_matmul_does_not_round(dtype, monkeypatch):
    """Check with rotations by a right angle, which only move numbers: the product must not round them."""
    monkeypatch.setattr(platform, "platform", lambda: "tpu")
    x_BxTxNxH = jnp.asarray(np.random.default_rng(0).standard_normal((B, T, N, H)) * 1000, dtype)
    quarter = rotation_at(jnp.zeros((1, T), jnp.int32), Rope(), H)
    quarter = quarter._replace(cos=quarter.sin, sin=quarter.cos)
    first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
    expected = jnp.concatenate([-second, first], axis=-1)
    np.testing.assert_array_equal(rotate(x_BxTxNxH, quarter).astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000.0, 5e6, 10_000_000.0, 150_000.0])
@pytest.mark.parametrize("head_dim", [2, 16, 32, 64, 80, 96, 128, 192, 256])
def test_radians_are_the_nearest_floats_on_every_cpu(theta: float, head_dim: int) -> None:
    """They are constants of the program, which hosts with other CPUs must trace alike."""
    with localcontext() as context:
        context.prec = 40
        exact = [(-Decimal(even) / head_dim * Decimal(theta).ln()).exp() for even in range(0, head_dim, 2)]
    radians, _ = frequencies(Rope(theta=theta), head_dim)
    np.testing.assert_array_equal(radians, np.array([float(each) for each in exact], np.float32))
