"""Linear layers: chunks equal the recurrence token by token, documents are separate, and what is refused.

Further tests have the model `hybrid` in their tables: `test_decoder`, `test_decode` and `test_parity`.

Shape legend: B batch, T sequence, K heads of keys, R heads of values for each, P and W widths of their heads.
"""

import functools
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder, PretrainDecoder
from experiments.model.delta_net import CHUNK, apply_delta_rule, invert_unit_triangular
from runner.config import MemoryConfig
from runner.errors import InvalidError
from runner.parallel.mesh import AXES, make_mesh, use_sharding_rules
from runner.train.flops import count_train_flops
from tests.experiments.model.test_decoder import (
    FAMILIES,
    VOCABULARY,
    compute_loss_and_gradients,
    init_boxed_params,
    make_decoder,
)
from tests.experiments.test_documents import LENGTHS, make_documents, make_single_document_batch, pack_documents
from tests.support.tiny_jobs import make_gpt

B, T, K, R, P, W = 2, 150, 2, 2, 4, 3
# With a router that sends tokens to experts, and a shared expert with a gate.
HYBRID = FAMILIES["hybrid"] | {
    "layers": 2,
    "layer_pattern": ["linear", "full"],
    "moe": {"experts": 8, "experts_per_token": 2, "shared_experts": 1, "shared_gate": True, "shared_width": 24},
    "mlp_width": 16,
}


def make_arrays(seed=0):
    """Return queries, keys, values, betas and decays of a sequence, float32."""
    generator = np.random.default_rng(seed)
    q, k = (generator.normal(size=(B, T, K, P)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = generator.normal(size=(B, T, K, R, W))
    beta, g = generator.random((B, T, K, R)), -generator.exponential(0.2, (B, T, K, R))
    return [x.astype(np.float32) for x in (q, k, v, beta, g)]


def recur(q, k, v, beta, g):
    """Return what the tokens of one document read, and the states at the end, token by token in float64."""
    q, k, v, beta, g = (np.asarray(x, np.float64) for x in (q, k, v, beta, g))
    S, found = np.zeros((q.shape[0], K, R, P, W)), []
    for t in range(q.shape[1]):
        S = np.exp(g[:, t])[..., None, None] * S
        correction = beta[:, t][..., None] * (v[:, t] - np.einsum("bkp,bkrpw->bkrw", k[:, t], S))
        S = S + np.einsum("bkp,bkrw->bkrpw", k[:, t], correction)
        found.append(np.einsum("bkp,bkrpw->bkrw", q[:, t], S))
    return np.stack(found, axis=1), S


# Borders in the middle of a chunk, at its edges, several in one chunk, and a document over several chunks.
@pytest.mark.parametrize("borders", [[], [3, CHUNK - 1, CHUNK, CHUNK + 1, 71], [2 * CHUNK], [20, 140]], ids=str)
def test_chunks_equal_the_recurrence_of_each_document(borders):
    arrays = make_arrays()
    starts = [0, *borders]
    parts = [recur(*(x[:, i:j] for x in arrays)) for i, j in zip(starts, [*borders, T], strict=True)]
    is_first_BxT = np.zeros((B, T), bool)
    is_first_BxT[:, starts] = True
    found, states = jax.jit(apply_delta_rule)(*arrays, is_first_BxT if borders else None)
    np.testing.assert_allclose(found, np.concatenate([part for part, _ in parts], axis=1), atol=1e-5)
    np.testing.assert_allclose(states, parts[-1][1], atol=1e-5)


@pytest.mark.soak
def test_the_inverse_of_a_chunk_is_exact_where_all_keys_are_alike():
    # Powers of this system reach 1e17, and its inverse has no number above 1.
    system = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
    np.testing.assert_array_equal(jax.jit(invert_unit_triangular)(system), np.eye(CHUNK) - np.eye(CHUNK, k=-1))


@pytest.mark.soak
def test_gradients_of_chunks_equal_those_of_the_recurrence():
    arrays = make_arrays()
    is_first_BxT = np.zeros((B, T), bool)
    is_first_BxT[:, [0, 30, 130]] = True

    def scan(q, k, v, beta, g):
        def step(S, token):
            q, k, v, beta, g, is_first = token
            S = jnp.exp(g)[..., None, None] * jnp.where(is_first[:, None, None, None, None], 0, S)
            S += jnp.einsum("bkp,bkrw->bkrpw", k, beta[..., None] * (v - jnp.einsum("bkp,bkrpw->bkrw", k, S)))
            return S, jnp.einsum("bkp,bkrpw->bkrw", q, S)

        tokens = jax.tree.map(lambda x: jnp.swapaxes(jnp.asarray(x), 0, 1), (q, k, v, beta, g, is_first_BxT))
        return jnp.swapaxes(jax.lax.scan(step, jnp.zeros((B, K, R, P, W)), tokens)[1], 0, 1)

    weights = np.random.default_rng(1).normal(size=(B, T, K, R, W))
    rules = scan, lambda *arrays: apply_delta_rule(*arrays, is_first_BxT)[0]
    expected, found = (
        jax.jit(jax.grad(lambda arrays, rule=rule: jnp.sum(rule(*arrays) * weights)))(arrays) for rule in rules
    )
    for got, want in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


@pytest.mark.soak
@pytest.mark.parametrize(
    ("sizes", "remat"),
    [
        ({"data": 8}, "none"),
        ({"fsdp": 8}, "dots"),
        ({"tensor": 8}, "layers"),
        ({"data": 2, "fsdp": 2, "tensor": 2}, "dots"),
        ({"expert": 4, "tensor": 2}, "layers"),
    ],
    ids=str,
)
def test_packed_documents_on_many_devices_equal_single_ones(sizes, remat):
    # Without the loss of routers, which is a mean over a sequence.
    keys = HYBRID | {"heads": 8, "moe": HYBRID["moe"] | {"auxiliary_loss": 0.0}}
    plain, model = make_decoder(keys), make_decoder(keys, {"remat": remat})
    params = jax.jit(functools.partial(plain.init, deterministic=True))(jax.random.key(0), np.zeros((1, 8), np.int32))
    params = jax.tree.map(lambda leaf: 3 * leaf, nn.unbox(params)["params"])
    expected = compute_loss_and_gradients(plain, params, make_single_document_batch(make_documents(LENGTHS)))
    rows = pack_documents(make_documents(LENGTHS) + [[]] * (8 - len(LENGTHS)))
    actual = compute_loss_and_gradients(model, params, rows, make_mesh(sizes))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    for got, want in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"sequence": 2, "data": 4}, "topology.mesh.sequence=2: linear layers .* need whole sequences"),
        ({"tensor": 8}, r"config.model.linear.key_heads=4 does not divide .*topology.mesh.tensor a divisor"),
    ],
)
def test_a_mesh_that_linear_layers_cannot_use_is_refused(sizes, message):
    linear = HYBRID["linear"] | {"key_heads": 4, "value_heads": 8}
    with use_sharding_rules(make_mesh(sizes)), pytest.raises(InvalidError, match=message):
        init_boxed_params(make_decoder(HYBRID, heads=8, linear=linear))


@pytest.mark.parametrize("remat", ["none", pytest.param("layers", marks=pytest.mark.soak)])
def test_the_formula_of_flops_counts_the_delta_rule(remat, tmp_path):
    linear = {"key_heads": 2, "value_heads": 4, "key_head_dim": 128, "value_head_dim": 128}
    keys = {"layers": 2, "heads": 8, "width": 32, "mlp_width": 48, "layer_pattern": ["linear"], "linear": linear}
    length = 2 * CHUNK
    job = make_gpt(
        tmp_path,
        PretrainDecoder,
        **{"config.model": keys, "config.data.sequence_length": length, "config.memory.remat": remat},
    )
    flops = job.flops_per_token(SimpleNamespace(mesh_sizes=dict.fromkeys(AXES, 1), mesh=None))
    model = Decoder(DecoderConfig(**keys), VOCABULARY, memory=MemoryConfig(remat=remat))
    tokens = jnp.zeros((1, length), jnp.int32)
    params = jax.eval_shape(functools.partial(model.init, deterministic=True), jax.random.key(0), tokens)
    loss = lambda params: model.apply(nn.unbox(params), tokens, targets=(tokens, tokens), deterministic=True)  # noqa: E731
    counted = count_train_flops(loss, params, num_tokens=length, platform="cpu")
    vocabulary = 6 * (job.vocabulary_size - VOCABULARY) * 32
    assert counted.per_token == pytest.approx(flops.per_token - vocabulary, rel=1e-9)
    assert counted.recomputed_per_token == pytest.approx(flops.recomputed_per_token, rel=0.15)
