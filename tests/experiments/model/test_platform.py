"""The form of a model for TPUs computes what the form for CPUs does: the same parameters, loss and gradients.

Both run on a CPU here, so attention is the plain one in both; the TPU kernels have tests of their own.

Shape legend: B batch, T sequence.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpt import GPT, GPTConfig
from experiments.model import platform
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder
from runner.config import MemoryConfig
from runner.parallel.mesh import make_mesh, use_sharding_rules
from tests.experiments.model.test_decoder import FAMILIES, LLAMA
from tests.support.tiny_jobs import format_mesh

SOAK = pytest.mark.soak
VOCABULARY, CUT_VOCABULARY = 31, 32  # that two devices do not share, and that they do
TOKENS_BxT = np.random.default_rng(0).integers(0, VOCABULARY, (4, 16))
TARGETS = TOKENS_BxT, np.ones((4, 16), np.float32)
MOE = LLAMA | {"moe": {"experts": 4, "experts_per_token": 2}}
REMATS = ("none", "dots", "layers")


def make_gpt(remat):
    config = GPTConfig(layers=2, heads=4, width=16)
    model = GPT(config, VOCABULARY, 16, memory=MemoryConfig(remat=remat, loss_chunk_positions=8))
    return functools.partial(model.apply, examples_B=None, deterministic=True), model


def make_decoder(keys, remat, chunk=None, vocabulary=VOCABULARY):
    model = Decoder(DecoderConfig(**keys), vocabulary, memory=MemoryConfig(remat=remat, loss_chunk_positions=chunk))
    return functools.partial(model.apply, deterministic=True), model


MODELS = {"gpt": make_gpt} | {
    name: functools.partial(make_decoder, keys) for name, keys in (FAMILIES | {"moe": MOE}).items()
}
DAILY = {("gpt", "dots")}
CASES = [
    pytest.param(name, remat, marks=() if (name, remat) in DAILY else SOAK, id=f"{name}-{remat}")
    for name in MODELS
    for remat in REMATS
]


@pytest.fixture
def as_on_a_tpu(monkeypatch):
    """Return a function that switches to the form for TPUs; attention still uses the real platform."""
    return lambda: monkeypatch.setattr(platform, "platform", lambda: "tpu")


def value_and_gradients(apply, variables):
    """Compile anew: the form is not part of the key by which JAX caches compiled functions."""
    return jax.jit(jax.value_and_grad(lambda params: apply(params, TOKENS_BxT, targets=TARGETS)))(variables)


@pytest.mark.parametrize(("name", "remat"), CASES)
def test_both_forms_compute_the_same_function(name, remat, as_on_a_tpu):
    apply, model = MODELS[name](remat)
    variables = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), TOKENS_BxT)
    noise = np.random.default_rng(1)
    variables = jax.tree.map(lambda leaf: leaf + 0.05 * noise.normal(size=leaf.shape).astype(np.float32), variables)
    expected_loss, expected = value_and_gradients(apply, variables)
    as_on_a_tpu()
    loss, gradients = value_and_gradients(apply, variables)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), gradients, expected)


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        {"data": 2, "fsdp": 2},
        *(
            pytest.param({"data": 2} | sizes, marks=SOAK)
            for sizes in ({"fsdp": 2, "tensor": 2}, {"sequence": 2, "fsdp": 2}, {"expert": 2, "tensor": 2})
        ),
    ],
    ids=format_mesh,
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SOAK)], ids=["tied", "apart"])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, pytest.param(CUT_VOCABULARY, marks=SOAK)])
def test_both_forms_compute_the_same_function_on_a_mesh(vocabulary, sizes, tied, chunk, as_on_a_tpu):
    keys = LLAMA | {"key_value_heads": 4, "tied_embedding": tied}
    apply, model = make_decoder(keys, "dots", chunk, vocabulary)
    variables = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), TOKENS_BxT)
    expected_loss, expected = value_and_gradients(apply, variables)
    as_on_a_tpu()
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    with use_sharding_rules(mesh):
        loss, gradients = value_and_gradients(apply, variables)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), gradients, expected)


def test_dots_save_named_residuals_on_a_tpu_only(as_on_a_tpu):
    def num_sines():
        """Count in a new function each time, because JAX caches traces."""
        layer = jax.checkpoint(lambda x: jnp.sin(platform.mark_saved(jnp.sin(x))), policy=platform.dots_policy())
        return str(jax.make_jaxpr(jax.grad(layer))(1.0)).count(" sin ")

    on_a_cpu = num_sines()
    as_on_a_tpu()
    assert num_sines() == on_a_cpu - 1  # that within is not computed again
