"""Cross entropy as sums.

Shape legend: B batch, T sequence, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner.loss import cross_entropy_sum

B, T, V = 3, 5, 17


@pytest.fixture
def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(0)
    logits_BxTxV = jnp.asarray(generator.normal(size=(B, T, V)) * 4, jnp.float32)
    y_BxT = jnp.asarray(generator.integers(0, V, size=(B, T)))
    mask_BxT = jnp.asarray(generator.integers(0, 2, size=(B, T)))
    return logits_BxTxV, y_BxT, mask_BxT


def reference(logits_BxTxV, y_BxT, mask_BxT):
    """Loss and gradient in float64, token by token."""
    logits_BxTxV, y_BxT, mask_BxT = (np.asarray(x) for x in (logits_BxTxV, y_BxT, mask_BxT))
    loss, gradient_BxTxV = 0.0, np.zeros(logits_BxTxV.shape)
    for b, t in np.ndindex(y_BxT.shape):
        logits_V = logits_BxTxV[b, t].astype(np.float64)
        p_V = np.exp(logits_V - logits_V.max())
        p_V /= p_V.sum()
        loss -= mask_BxT[b, t] * np.log(p_V[y_BxT[b, t]])
        gradient_BxTxV[b, t] = mask_BxT[b, t] * (p_V - (np.arange(logits_V.size) == y_BxT[b, t]))
    return loss, gradient_BxTxV


def test_loss_count_and_gradient_equal_a_float64_reference(inputs):
    (loss, count), gradient_BxTxV = jax.jit(jax.value_and_grad(cross_entropy_sum, has_aux=True))(*inputs)
    expected_loss, expected_gradient_BxTxV = reference(*inputs)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient_BxTxV, expected_gradient_BxTxV, atol=1e-6)
    assert count == inputs[2].sum()


def test_a_masked_token_adds_nothing_whatever_its_label(inputs):
    logits_BxTxV, y_BxT, mask_BxT = inputs
    other_y_BxT = jnp.where(mask_BxT == 1, y_BxT, (y_BxT + 1) % V)
    assert cross_entropy_sum(logits_BxTxV, y_BxT, mask_BxT) == cross_entropy_sum(logits_BxTxV, other_y_BxT, mask_BxT)


def test_sums_of_parts_are_the_sum_of_the_whole(inputs):
    whole = cross_entropy_sum(*inputs)
    parts = [cross_entropy_sum(*(x[b : b + 1] for x in inputs)) for b in range(B)]
    np.testing.assert_allclose(np.sum(parts, axis=0), whole, rtol=1e-6)


def test_huge_logits_stay_finite(inputs):
    logits_BxTxV, y_BxT, mask_BxT = inputs
    grad = jax.value_and_grad(cross_entropy_sum, has_aux=True)
    (loss, _), gradient_BxTxV = grad(logits_BxTxV * 1e4, y_BxT, mask_BxT)
    assert jnp.isfinite(loss)
    assert jnp.isfinite(gradient_BxTxV).all()


def test_bfloat16_logits_are_summed_in_float32(inputs):
    logits_BxTxV, y_BxT, mask_BxT = inputs
    half_BxTxV = logits_BxTxV.astype(jnp.bfloat16)
    loss, count = cross_entropy_sum(half_BxTxV, y_BxT, mask_BxT)
    assert loss.dtype == count.dtype == jnp.float32
    assert loss == cross_entropy_sum(half_BxTxV.astype(jnp.float32), y_BxT, mask_BxT)[0]
