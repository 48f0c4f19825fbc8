"""NEFTune: noise of the published size, only in training, independent of the split into micro-batches."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder, PretrainDecoder
from experiments.model.embedding import EmbeddingNoise
from runner.config import TrainerConfig
from tests.support.tiny_jobs import are_leaves_equal, stop_after
from tests.support.tiny_jobs import make_gpt as tiny_gpt

B, T, D, V = 8, 6, 8, 16
X = np.random.default_rng(0).normal(size=(B, T, D)).astype(np.float32)
KEY = jax.random.key(1)
TOKENS_BxT = np.random.default_rng(3).integers(0, V, (B, T), dtype=np.int32)


def compute_noise(alpha: float, examples: jax.Array, deterministic: bool = False, x: np.ndarray = X) -> np.ndarray:
    """Return the noise that is added to the embeddings of the given examples."""
    module = EmbeddingNoise(alpha, deterministic)
    return np.asarray(module.apply({}, x, examples, rngs={"dropout": KEY}) - x)


def test_noise_is_uniform_within_the_published_bound():
    large = np.zeros((B, 64, 128), np.float32)
    noise, bound = compute_noise(5.0, jnp.arange(B), x=large), 5 / np.sqrt(64 * 128)
    assert bound * 0.999 < np.abs(noise).max() <= bound
    np.testing.assert_allclose(noise.mean(), 0, atol=0.01 * bound)
    np.testing.assert_allclose(noise.std(), bound / np.sqrt(3), rtol=0.01)


def test_the_noise_of_an_example_does_not_depend_on_its_position():
    noise = compute_noise(5.0, jnp.arange(B))
    np.testing.assert_array_equal(compute_noise(5.0, jnp.arange(B)), noise)
    np.testing.assert_allclose(compute_noise(5.0, jnp.arange(B)[::-1], x=X[::-1])[::-1], noise, atol=1e-6)
    assert len({row.tobytes() for row in noise}) == B
    assert not compute_noise(5.0, jnp.arange(B), deterministic=True).any()
    assert not compute_noise(0.0, jnp.arange(B)).any()


def gpt(alpha: float) -> tuple[nn.Module, type[PretrainGPT]]:
    config = GPTConfig(layers=1, heads=2, width=D, neftune_alpha=alpha)
    return GPT(config, V, T), PretrainGPT


def decoder(alpha: float) -> tuple[nn.Module, type[PretrainDecoder]]:
    config = DecoderConfig(layers=1, heads=2, width=D, mlp_width=12, neftune_alpha=alpha)
    job = type("Bound", (PretrainDecoder,), {"config": TrainerConfig[DecoderConfig].model_construct(model=config)})
    return Decoder(config, V), job


MODELS = {"gpt": gpt, "decoder": decoder}


@functools.cache
def make_params(name: str):
    """Return the parameters of a model, which do not depend on alpha."""
    model, _ = MODELS[name](0.0)
    init = jax.jit(functools.partial(model.init, deterministic=True))
    return nn.unbox(init(jax.random.key(2), TOKENS_BxT))["params"]


def compile_loss(name: str, alpha: float):
    """Compile the summed loss of a model as a function of tokens, examples and a key."""
    (model, job), params = MODELS[name](alpha), make_params(name)

    def loss(tokens_BxT, examples_B, key):
        micro = {"x": tokens_BxT, "y": tokens_BxT, "padding_mask": jnp.ones(tokens_BxT.shape, bool)}
        return job.forward(model.apply, params, micro | {"example": examples_B}, key)[0]

    return jax.jit(loss)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["decoder", pytest.param("gpt", marks=pytest.mark.soak)])
def test_noise_is_added_only_in_training_and_independent_of_the_split(name):
    noisy, plain, examples = compile_loss(name, 20.0), compile_loss(name, 0.0), jnp.arange(B)
    whole = noisy(TOKENS_BxT, examples, KEY)
    halves = [noisy(TOKENS_BxT[part], examples[part], KEY) for part in (slice(0, 4), slice(4, 8))]
    np.testing.assert_allclose(sum(halves), whole, rtol=1e-6)
    assert abs(noisy(TOKENS_BxT, examples + 8, KEY) - whole) > 1e-3
    assert abs(noisy(TOKENS_BxT, examples, jax.random.key(9)) - whole) > 1e-3
    assert abs(plain(TOKENS_BxT, examples, KEY) - whole) > 1e-3
    assert noisy(TOKENS_BxT, examples, None) == plain(TOKENS_BxT, examples, None) == plain(TOKENS_BxT, examples, KEY)


@pytest.mark.parametrize("name", ["decoder", pytest.param("gpt", marks=pytest.mark.soak)])
def test_no_noise_is_drawn_without_an_alpha(name):
    for alpha in (0.0, 5.0):
        lowered = compile_loss(name, alpha).trace(TOKENS_BxT, jnp.arange(B), KEY)
        assert ("random_bits" in str(lowered.jaxpr)) == (alpha > 0)


@pytest.mark.soak
@pytest.mark.parametrize("job", [PretrainGPT, PretrainDecoder])
def test_a_resumed_run_is_bit_identical(tmp_path, job):
    sizes = {"layers": 1, "heads": 2, "width": 16, "neftune_alpha": 10.0}
    changes = {"config.model": sizes | ({"mlp_width": 24} if job is PretrainDecoder else {})}
    whole, parts = (tiny_gpt(tmp_path / name, job, **changes) for name in ("whole", "parts"))
    whole()
    stop_after(parts, 3)
    parts = tiny_gpt(tmp_path / "parts", job, **changes)
    parts()
    assert are_leaves_equal(parts.state, whole.state)
