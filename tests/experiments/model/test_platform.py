"""The forms of a model for TPUs and GPUs have the same parameters, loss and gradients as its form for CPUs.

All run on a CPU here, so all use plain attention; the kernels have their own tests.

Shape legend: B batch, T sequence.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from experiments.gpt import GPT, GPTConfig
from experiments.model import platform
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder
from experiments.model.layers import ToHeads, gelu
from runner.config import MemoryConfig
from runner.parallel.mesh import make_mesh, use_sharding_rules
from tests.experiments.model.test_decoder import FAMILIES, LLAMA
from tests.support.tiny_jobs import format_mesh

SOAK = pytest.mark.soak
VOCABULARY, CUT_VOCABULARY = 31, 32  # indivisible and divisible by two devices
TOKENS_BxT = np.random.default_rng(0).integers(0, VOCABULARY, (4, 16))
TARGETS = TOKENS_BxT, np.ones((4, 16), np.float32)
MOE = LLAMA | {"moe": {"experts": 4, "experts_per_token": 2}}
REMATS = ("none", "dots", "layers")
# Heads that the TPU kernel reads packed: two heads of queries for each of keys, and biases.
PACKED = LLAMA | {"heads": 4, "key_value_heads": 2, "head_dim": 64, "bias": {"query_key_value": True}}


def make_gpt(remat, width=16):
    config = GPTConfig(layers=2, heads=4, width=width)
    model = GPT(config, VOCABULARY, 16, memory=MemoryConfig(remat=remat, loss_chunk_positions=8))
    return functools.partial(model.apply, examples_B=None, deterministic=True), model


def make_decoder(keys, remat, chunk=None, vocabulary=VOCABULARY):
    model = Decoder(DecoderConfig(**keys), vocabulary, memory=MemoryConfig(remat=remat, loss_chunk_positions=chunk))
    return functools.partial(model.apply, deterministic=True), model


MODELS = {"gpt": make_gpt, "packed gpt": functools.partial(make_gpt, width=128)} | {
    name: functools.partial(make_decoder, keys) for name, keys in (FAMILIES | {"moe": MOE, "packed": PACKED}).items()
}
DAILY = {("packed gpt", "dots")}
CASES = [
    pytest.param(name, remat, id=f"{name}-{remat}", marks=() if (name, remat) in DAILY else SOAK)
    for name in MODELS
    for remat in REMATS
]


@pytest.fixture
def switch_to(monkeypatch):
    """Function that switches to the form of a platform, except for attention, which uses the real platform."""
    return lambda name: monkeypatch.setattr(platform, "platform", lambda: name)


def compute_value_and_gradients(apply, variables):
    """Compile and run; a new function is needed because the form is not part of JAX's cache key."""
    return jax.jit(jax.value_and_grad(lambda params: apply(params, TOKENS_BxT, targets=TARGETS)))(variables)


@pytest.mark.parametrize("form", ["tpu", "gpu"])
@pytest.mark.parametrize(("name", "remat"), CASES)
def test_each_form_computes_the_function_of_the_cpus_form(name, remat, form, switch_to):
    apply, model = MODELS[name](remat)
    variables = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), TOKENS_BxT)
    noise = np.random.default_rng(1)
    variables = jax.tree.map(lambda leaf: leaf + 0.05 * noise.normal(size=leaf.shape).astype(np.float32), variables)
    expected_loss, expected = compute_value_and_gradients(apply, variables)
    switch_to(form)
    loss, gradients = compute_value_and_gradients(apply, variables)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), gradients, expected)


@pytest.mark.parametrize("chunk", [pytest.param(None, marks=SOAK), 8])
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 2},
        *(
            pytest.param({"data": 2} | sizes, marks=SOAK)
            for sizes in ({"fsdp": 2}, {"fsdp": 2, "tensor": 2}, {"sequence": 2, "fsdp": 2}, {"expert": 2, "tensor": 2})
        ),
    ],
    ids=format_mesh,
)
@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=SOAK)], ids=["tied", "apart"])
@pytest.mark.parametrize("vocabulary", [VOCABULARY, pytest.param(CUT_VOCABULARY, marks=SOAK)])
@pytest.mark.parametrize("width", [4, pytest.param(64, marks=SOAK)], ids=["head-major", "packed"])
@pytest.mark.parametrize("form", ["tpu", "gpu"])
@pytest.mark.soak
def test_each_form_computes_the_same_function_on_a_mesh(form, width, vocabulary, sizes, tied, chunk, switch_to):
    keys = LLAMA | {"heads": 4, "key_value_heads": 4, "head_dim": width, "tied_embedding": tied}
    apply, model = make_decoder(keys, "dots", chunk, vocabulary)
    variables = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), TOKENS_BxT)
    expected_loss, expected = compute_value_and_gradients(apply, variables)
    switch_to(form)
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))])
    with use_sharding_rules(mesh):
        loss, gradients = compute_value_and_gradients(apply, variables)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-5), gradients, expected)


def test_the_gradient_of_a_bias_of_packed_heads_is_accumulated_in_float32(switch_to):
    switch_to("tpu")
    layer = ToHeads(128, ("embed", "heads"), is_packed=True, num_heads=2, compute_dtype=jnp.bfloat16)
    x_BxTxD, g_BxTxNH = np.random.default_rng(0).normal(size=(2, 4, 500, 128)).astype(jnp.bfloat16)
    variables = layer.init(jax.random.key(0), x_BxTxD, (4, 500))
    _, pull_back = jax.vjp(lambda variables, x: layer.apply(variables, x, (4, 500)), variables, x_BxTxD)
    (gradients, _) = pull_back(jnp.asarray(g_BxTxNH.reshape(4, 500, 2, 64)))
    wanted = g_BxTxNH.astype(float).sum((0, 1))
    np.testing.assert_allclose(nn.unbox(gradients)["params"]["bias"], wanted, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("mark", [platform.mark_saved, platform.mark_weight])
@pytest.mark.parametrize("is_in_line", [True, False])
@pytest.mark.parametrize("form", ["cpu", "tpu", "gpu"])
def test_dots_save_named_residuals_on_chips(form, is_in_line, mark, switch_to):
    switch_to(form)

    def count_sines(mark):
        policy = platform.dots_policy(is_in_line=is_in_line)
        layer = jax.checkpoint(lambda x: jnp.sin(mark(jnp.sin(x))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(layer))(1.0)).count(" sin ")

    is_saved = form != "cpu" if mark is platform.mark_saved else form == "gpu" and is_in_line
    assert count_sines(mark) == count_sines(lambda x: x) - is_saved  # the one inside is not recomputed


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 2e-6), (jnp.bfloat16, 2**-7)])
def test_the_written_gradient_of_gelu_is_its_derivative(dtype, tolerance, switch_to):
    x, dy = (np.random.default_rng(0).normal(size=(2, 4096)) * [[4.0], [1.0]]).astype(dtype)
    wide, factor = x.astype(float), math.sqrt(2 / math.pi)
    tanh = np.tanh(factor * (wide + 0.044715 * wide**3))
    wanted = (1 + tanh) / 2 + wide * (1 - tanh**2) / 2 * factor * (1 + 3 * 0.044715 * wide**2)
    switch_to("gpu")
    value, pull_back = jax.vjp(gelu, x)
    np.testing.assert_array_equal(value, nn.gelu(x, approximate=True))
    np.testing.assert_allclose(
        pull_back(dy)[0].astype(float), dy.astype(float) * wanted, rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize(("policy", "calls"), [(platform.dots_policy(), 1), (None, 2)], ids=["dots", "layers"])
def test_dots_save_the_forward_pass_of_cudnn(policy, calls, monkeypatch):
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def attend(x_BxTxNxH):
        y_BxTxNxH = jax.nn.dot_product_attention(
            x_BxTxNxH, x_BxTxNxH, x_BxTxNxH, is_causal=True, implementation="cudnn"
        )
        return jnp.sin(y_BxTxNxH.astype(jnp.float32)).sum()

    x_BxTxNxH = jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)
    traced = jax.jit(jax.value_and_grad(jax.checkpoint(attend, policy=policy))).trace(x_BxTxNxH)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__cudnn$fmhaSoftmax(") == calls
    assert text.count("@__cudnn$fmhaSoftmaxBackward") == 1
