"""Cross-entropy sums.

Shape legend: B batch, T sequence, V vocabulary, D width, C positions of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from runner.train.loss import (
    _logsumexp_with_residuals,
    chunked_cross_entropy_sum,
    cross_entropy_sum,
    evaluate_cross_entropy,
)
from tests.support.tiny_jobs import make_partial_mesh

B, T, V = 3, 5, 17


@pytest.fixture
def inputs() -> tuple[jax.Array, jax.Array, jax.Array]:
    generator = np.random.default_rng(0)
    logits_BxTxV = jnp.asarray(generator.normal(size=(B, T, V)) * 4, jnp.float32)
    y_BxT = jnp.asarray(generator.integers(0, V, size=(B, T)))
    mask_BxT = jnp.asarray(generator.integers(0, 2, size=(B, T)))
    return logits_BxTxV, y_BxT, mask_BxT


def compute_reference(logits_BxTxV, y_BxT, mask_BxT):
    """Compute loss and gradient in float64, token by token."""
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
    expected_loss, expected_gradient_BxTxV = compute_reference(*inputs)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient_BxTxV, expected_gradient_BxTxV, atol=1e-6)
    assert count == inputs[2].sum()


@pytest.mark.daily(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("chunk_positions", [None, 1, T])
def test_an_evaluation_also_counts_correct_predictions(inputs, dtype, chunk_positions):
    """Predictions are those of argmax: of equal logits, as bfloat16 has them, the first one."""
    logits_BxTxV, _, mask_BxT = inputs
    logits_BxTxV = jnp.round(logits_BxTxV / 4).astype(dtype)
    best_BxT = np.argmax(logits_BxTxV, axis=-1)
    last_BxT = V - 1 - np.argmax(logits_BxTxV[..., ::-1], axis=-1)
    assert (best_BxT != last_BxT).any(), "there are equal logits"
    weight_BxT = mask_BxT * jnp.linspace(0.5, 2, T)
    for y_BxT in (best_BxT, last_BxT, (best_BxT + 1) % V):
        loss_sum, correct = jax.jit(evaluate_cross_entropy, static_argnames=("unembed", "chunk_positions"))(
            lambda _, x: x, (), logits_BxTxV, y_BxT, weight_BxT, chunk_positions=chunk_positions
        )
        expected, _ = cross_entropy_sum(logits_BxTxV, y_BxT, weight_BxT)
        np.testing.assert_allclose(loss_sum, expected, rtol=1e-6)
        np.testing.assert_allclose(correct, weight_BxT[y_BxT == best_BxT].sum(), rtol=1e-6)


def test_masked_tokens_add_nothing(inputs):
    logits_BxTxV, y_BxT, mask_BxT = inputs
    other_y_BxT = jnp.where(mask_BxT == 1, y_BxT, (y_BxT + 1) % V)
    assert cross_entropy_sum(logits_BxTxV, y_BxT, mask_BxT) == cross_entropy_sum(logits_BxTxV, other_y_BxT, mask_BxT)


def test_sums_of_parts_add_up_to_the_sum_of_the_batch(inputs):
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


# Chunked cross-entropy.

CHUNKED_T, D = 24, 8


def unembed(weights_VxD, x_BxCxD):
    return x_BxCxD @ weights_VxD.T


@pytest.fixture
def hidden() -> tuple[jax.Array, ...]:
    """Return weights, hidden states, labels, and a mask of ragged sequences, one of them empty."""
    generator = np.random.default_rng(1)
    weights_VxD = jnp.asarray(generator.normal(size=(V, D)), jnp.float32)
    x_BxTxD = jnp.asarray(generator.normal(size=(B, CHUNKED_T, D)), jnp.float32)
    y_BxT = jnp.asarray(generator.integers(0, V, size=(B, CHUNKED_T)))
    return weights_VxD, x_BxTxD, y_BxT, jnp.arange(CHUNKED_T) < jnp.asarray([0, 7, CHUNKED_T])[:, None]


def whole_loss(weights_VxD, x_BxTxD, y_BxT, mask_BxT):
    return cross_entropy_sum(unembed(weights_VxD, x_BxTxD), y_BxT, mask_BxT)


def chunked_loss(chunk_positions):
    return lambda weights_VxD, *rest: chunked_cross_entropy_sum(
        unembed, weights_VxD, *rest, chunk_positions=chunk_positions
    )


@pytest.mark.daily(2)
@pytest.mark.parametrize("chunk_positions", [1, 3, 8, CHUNKED_T])
def test_chunked_loss_and_gradients_equal_unchunked_ones(hidden, chunk_positions):
    def values(loss):
        return jax.tree.leaves(jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(*hidden))

    for actual, expected in zip(values(chunked_loss(chunk_positions)), values(whole_loss), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6 * float(jnp.abs(expected).max()))


def test_captured_parameters_of_the_logits_get_their_gradient(hidden):
    weights_VxD, *tokens = hidden

    def loss(bias_V, chunk_positions):
        def with_bias(weights_VxD, x_BxCxD):
            return unembed(weights_VxD, x_BxCxD) + bias_V

        if chunk_positions is None:
            return cross_entropy_sum(with_bias(weights_VxD, tokens[0]), *tokens[1:])[0]
        return chunked_cross_entropy_sum(with_bias, weights_VxD, *tokens, chunk_positions=chunk_positions)[0]

    bias_V = jnp.linspace(-1.0, 1.0, V)
    np.testing.assert_allclose(jax.grad(loss)(bias_V, 8), jax.grad(loss)(bias_V, None), rtol=1e-5, atol=1e-6)


def test_token_weights_get_gradients_from_loss_and_count(hidden):
    *before, mask_BxT = hidden

    def mean(loss):
        def of_weights(weight_BxT):
            loss_sum, count = loss(*before, weight_BxT)
            return loss_sum / count

        return jax.grad(of_weights)(jnp.where(mask_BxT, 0.5, 0.0))

    np.testing.assert_allclose(mean(chunked_loss(8)), mean(whole_loss), rtol=1e-5, atol=1e-7)


def test_weights_may_contain_leaves_without_a_gradient(hidden):
    weights_VxD, *tokens = hidden
    narrow = {"kernel": (10 * weights_VxD).astype(jnp.int8), "scale": jnp.float32(0.1), "offset": 2.0, "none": None}

    def scaled(weights, x_BxCxD):
        return unembed(weights["kernel"].astype(jnp.float32), x_BxCxD) * weights["scale"] + weights["offset"]

    def gradient(chunk_positions):
        def loss(scale, x_BxTxD):
            weights = narrow | {"scale": scale}
            if chunk_positions is None:
                return cross_entropy_sum(scaled(weights, x_BxTxD), *tokens[1:])[0]
            return chunked_cross_entropy_sum(scaled, weights, x_BxTxD, *tokens[1:], chunk_positions=chunk_positions)[0]

        return jax.grad(loss, argnums=(0, 1))(narrow["scale"], tokens[0])

    for found, expected in zip(gradient(8), gradient(None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.soak
def test_gradients_of_replicated_weights_are_summed_over_devices(hidden):
    mesh = make_partial_mesh({"data": 3})
    specs = PartitionSpec(), *(PartitionSpec("data"),) * 3

    def gradient(loss):
        def of_part(*inputs):
            return jax.lax.psum(loss(*inputs)[0], "data")

        spread = jax.shard_map(of_part, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
        return jax.jit(jax.grad(lambda *inputs: spread(*inputs), argnums=(0, 1)))(*hidden)

    for found, expected in zip(gradient(chunked_loss(8)), gradient(whole_loss), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("argument", [0, 1], ids=["weights", "hidden states"])
def test_frozen_inputs_cost_no_matmul(hidden, argument):
    def matmuls(argnums):
        gradient = jax.value_and_grad(lambda *inputs: chunked_loss(8)(*inputs)[0], argnums=argnums)
        return jax.jit(gradient).lower(*hidden).compile().as_text().count(" dot(")

    assert matmuls((0, 1)) == 3  # logits once and two gradients
    assert matmuls(argument) == 2


def test_gradients_of_bfloat16_weights_are_accumulated_over_chunks_in_float32(hidden):
    weights_VxD, x_BxTxD, *targets = hidden
    half = weights_VxD.astype(jnp.bfloat16), jnp.abs(x_BxTxD).astype(jnp.bfloat16)
    gradient_VxD, _ = jax.grad(chunked_loss(1), has_aux=True)(*half, *targets)
    gradient_of_part = jax.jit(jax.grad(whole_loss, has_aux=True))
    parts = [
        gradient_of_part(half[0], *(leaf[:, t : t + 1] for leaf in (half[1], *targets)))[0] for t in range(CHUNKED_T)
    ]
    assert gradient_VxD.dtype == jnp.bfloat16
    assert (gradient_VxD == sum(part.astype(jnp.float32) for part in reversed(parts)).astype(jnp.bfloat16)).all()


def test_chunks_that_do_not_divide_the_sequence_are_rejected(hidden):
    with pytest.raises(ValueError, match="chunk_positions=7 does not divide the sequence length 24"):
        chunked_loss(7)(*hidden)


# One pass over the logits, from a guess at their logsumexp.


@pytest.mark.daily(6)
@pytest.mark.parametrize("offset", [0.0, -40.0, 40.0, -300.0, 300.0, jnp.inf, jnp.nan])
@pytest.mark.parametrize("scale", [1, 20])
def test_any_guess_gives_the_loss_and_gradient_of_float64(inputs, scale, offset):
    logits_BxTxV, y_BxT, mask_BxT = inputs
    logits_BxTxV *= scale
    guess_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1).at[1, 2].add(offset)
    grad = jax.jit(jax.value_and_grad(functools.partial(cross_entropy_sum, guess_BxT=guess_BxT), has_aux=True))
    (loss, _), gradient_BxTxV = grad(logits_BxTxV, y_BxT, mask_BxT)
    expected_loss, expected_gradient_BxTxV = compute_reference(logits_BxTxV, y_BxT, mask_BxT)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    np.testing.assert_allclose(gradient_BxTxV, expected_gradient_BxTxV, atol=1e-6)


def test_a_near_guess_reads_no_maximum(inputs):
    """The branch from the maximum is taken only if a sum is huge or tiny."""
    logits_BxTxV, *_ = inputs
    near_BxT = jax.nn.logsumexp(logits_BxTxV, axis=-1) + 10

    def sums_from_guess(guess_BxT):
        # Residuals are logits, offsets and sums; the offset of a guess is the guess in whole numbers.
        _, (_, offset_BxT, _) = _logsumexp_with_residuals(logits_BxTxV, logits_BxTxV, guess_BxT)
        return bool((offset_BxT == jnp.round(guess_BxT)).all())

    assert sums_from_guess(near_BxT)
    assert not sums_from_guess(near_BxT.at[0, 0].add(-200))
    assert not sums_from_guess(near_BxT.at[0, 0].add(200))


def test_the_z_loss_and_its_gradient_do_not_depend_on_a_guess(inputs):
    def value_and_gradient(guess_BxT):
        return jax.value_and_grad(lambda logits: cross_entropy_sum(logits, *inputs[1:], 0.1, guess_BxT)[0])(inputs[0])

    for found, expected in zip(value_and_gradient(jnp.zeros((B, T))), value_and_gradient(None), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
