"""Every form of causal attention computes the same function.

Shape legend: B batch, T sequence, N heads, H width of a head.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from experiments.attention import (
    blocked_attention,
    causal_attention,
    cudnn_attention,
    pallas_attention,
    xla_attention,
)

FORMS = [causal_attention, blocked_attention, xla_attention]


def random_qkvg(T, B=2, N=3, H=8):
    """Return queries, keys, values and an output gradient."""
    generator = np.random.default_rng(0)
    return [generator.normal(size=(B, T, N, H)) for _ in range(4)]


def random_segments(T, B=2):
    """Several segments in every row, other ones in each, and padding at the end."""
    generator = np.random.default_rng(1)
    cuts_Bx4 = np.sort(generator.integers(0, T + 1, (B, 4)))
    number_BxT = 1 + (np.arange(T) >= cuts_Bx4[:, :3, None]).sum(1)
    return np.where(np.arange(T) < cuts_Bx4[:, 3:], number_BxT, 0).astype(np.int32)


def reference(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, g_BxTxNxH, segments_BxT=None):
    """Output and gradients in float64, one head at a time."""
    (B, T, N, H), results = q_BxTxNxH.shape, np.zeros((4, *q_BxTxNxH.shape))
    segments_BxT = np.ones((B, T)) if segments_BxT is None else segments_BxT
    for b, n in np.ndindex(B, N):
        q_TxH, k_TxH, v_TxH, g_TxH = (x[b, :, n] for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, g_BxTxNxH))
        p_TxT = np.exp(q_TxH @ k_TxH.T / np.sqrt(H)) * np.tri(T)
        p_TxT *= segments_BxT[b][:, None] == segments_BxT[b]
        p_TxT /= p_TxT.sum(axis=1, keepdims=True)
        dp_TxT = g_TxH @ v_TxH.T
        ds_TxT = p_TxT * (dp_TxT - (p_TxT * dp_TxT).sum(axis=1, keepdims=True)) / np.sqrt(H)
        results[:, b, :, n] = p_TxT @ v_TxH, ds_TxT @ k_TxH, ds_TxT.T @ q_TxH, p_TxT.T @ g_TxH
    return results


def value_and_gradients(form, q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, g_BxTxNxH, *segments_BxT):
    out_BxTxNxH, pullback = jax.vjp(lambda *qkv: form(*qkv, *segments_BxT), q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)
    return out_BxTxNxH, *pullback(g_BxTxNxH)


@pytest.mark.parametrize("T", [1, 16, 64, 100, 128, 600])
@pytest.mark.parametrize("form", FORMS)
def test_form_equals_a_float64_reference_with_gradients(form, T):
    qkvg = random_qkvg(T)
    actual = jax.jit(functools.partial(value_and_gradients, form))(*(jnp.asarray(x, jnp.float32) for x in qkvg))
    for got, want in zip(actual, reference(*qkvg), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("form", [causal_attention, xla_attention, cudnn_attention])
def test_form_with_segments_equals_a_float64_reference_with_gradients(form):
    qkvg, segments_BxT = random_qkvg(150), random_segments(150)
    arrays = (*(jnp.asarray(x, jnp.float32) for x in qkvg), jnp.asarray(segments_BxT))
    actual = jax.jit(functools.partial(value_and_gradients, form))(*arrays)
    for got, want in zip(actual, reference(*qkvg, segments_BxT), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("form", FORMS)
def test_future_tokens_do_not_change_past_outputs(form):
    q, k, v, _ = (jnp.asarray(x, jnp.float32) for x in random_qkvg(150))
    changed_k, changed_v = k.at[:, 70:].add(1), v.at[:, 70:].add(1)
    before, after = form(q, k, v), form(q, changed_k, changed_v)
    assert (before[:, :70] == after[:, :70]).all()
    assert (before[:, 70:] != after[:, 70:]).any()


@pytest.mark.parametrize("segments", [(), (random_segments(256, B=1),)], ids=["one document", "segments"])
def test_tpu_kernel_interpreted_equals_a_float64_reference(segments):
    qkvg = random_qkvg(256, B=1, N=1, H=64)
    form = functools.partial(pallas_attention, block_tokens=128)
    with pltpu.force_tpu_interpret_mode():
        actual = value_and_gradients(form, *(jnp.asarray(x, jnp.float32) for x in qkvg), *map(jnp.asarray, segments))
    for got, want in zip(actual, reference(*qkvg, *segments), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


@pytest.mark.parametrize("has_segments", [False, True])
@pytest.mark.parametrize(("T", "fused"), [(256, True), (100, False)])
def test_lowering_for_a_tpu_takes_its_kernel_where_the_sequence_fits_its_blocks(T, fused, has_segments):
    shape = jax.ShapeDtypeStruct((2, T, 3, 64), jnp.bfloat16)
    segments = [jax.ShapeDtypeStruct((2, T), jnp.int32)] * has_segments
    lowered = jax.jit(causal_attention).trace(shape, shape, shape, *segments).lower(lowering_platforms=("tpu",))
    assert ("tpu_custom_call" in lowered.as_text()) == fused


def test_softmax_of_bfloat16_inputs_runs_in_float32():
    q, k, v, _ = (jnp.asarray(x, jnp.bfloat16) for x in random_qkvg(64))
    half = blocked_attention(q, k, v)
    full = blocked_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_allclose(half.astype(jnp.float32), full, atol=0.03)
    assert "exp bf16" not in str(jax.make_jaxpr(blocked_attention)(q, k, v))
