"""Incremental decoding: logits from the cache equal those of the training forward pass at every position.

Shape legend: B batch, T sequence, V vocabulary.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.gpt import GPT, GPTConfig
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder
from runner.errors import InvalidError
from runner.evaluation.generation import (
    CachedDecoder,
    RecomputingDecoder,
    Sampler,
    filter_top_p,
    generate,
    infer_vocabulary_size,
    make_decoder,
)
from runner.parallel.mesh import AXES, make_mesh

VOCABULARY, SEQUENCE = 61, 24
TOKENS_BxT = np.random.default_rng(7).integers(0, VOCABULARY, (2, SEQUENCE), dtype=np.int32)


def make_gpt_model(**config: Any) -> GPT:
    return GPT(GPTConfig(**{"layers": 2, "heads": 2, "width": 32, **config}), VOCABULARY, SEQUENCE)


def make_decoder_model(**config: Any) -> Decoder:
    sizes = {"layers": 2, "heads": 4, "key_value_heads": 2, "width": 32, "mlp_width": 48, "window": 9}
    return Decoder(DecoderConfig(**sizes | {"layer_pattern": ["window", "full"]} | config), VOCABULARY)


# All models that support a cache bit by bit; decoders have further tests of their own.
MODELS = {
    "gpt": make_gpt_model(),
    "gpt, its layers in line": make_gpt_model(layer_loop="unroll", layers=1, heads=4, dropout=0.5),
    "decoder": make_decoder_model(),
    "decoder with experts": make_decoder_model(
        moe={
            "experts": 4,
            "experts_per_token": 2,
            "expert_width": 16,
            "dense_layers": 1,
            "gate": "sigmoid",
            "bias_rate": 0.1,
        }
    ),
    "decoder with linear layers": make_decoder_model(
        layers=3,
        layer_pattern=["linear", "full"],
        window=None,
        linear={"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 4},
    ),
    "decoder with latents": make_decoder_model(
        key_value_heads="auto",
        latent={"query_rank": 12, "key_value_rank": 16, "plain_head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 6},
    ),
}
ONE = make_mesh(dict.fromkeys(AXES, 1), jax.devices()[:1])
DECODE_LENGTHS = (8, *[1] * 7, 8, 1)  # lengths in which a sequence is decoded


@functools.cache
def make_weights(name: str) -> Any:
    """Return weights large enough that every token matters."""
    init = functools.partial(MODELS[name].init, deterministic=True)
    generator = np.random.default_rng(0)
    shapes = nn.unbox(jax.eval_shape(init, jax.random.key(0), TOKENS_BxT))
    return jax.tree.map(lambda leaf: generator.normal(0, 0.2, leaf.shape).astype(np.float32), shapes)


@pytest.fixture(scope="module")
def readers() -> tuple[CachedDecoder, RecomputingDecoder]:
    """Readers of the first model, one on two devices; texts share a cache, which must not leak between them."""
    model, weights = MODELS["gpt"], make_weights("gpt")
    mesh = make_mesh({"data": 1, "fsdp": 2, "tensor": 1}, jax.devices()[:2])
    cut = jax.device_put(weights, NamedSharding(mesh, PartitionSpec()))
    cut["params"]["embedding"] = jax.device_put(
        weights["params"]["embedding"], NamedSharding(mesh, PartitionSpec(None, "fsdp"))
    )
    return CachedDecoder(model, cut, SEQUENCE, jnp.float32, mesh), RecomputingDecoder(model, weights, SEQUENCE, ONE)


@pytest.mark.parametrize(
    "name", ["gpt", *(pytest.param(name, marks=pytest.mark.soak) for name in MODELS if name != "gpt")]
)
def test_cached_logits_equal_the_forward_pass_at_every_position(name):
    model, weights = MODELS[name], make_weights(name)
    step = jax.jit(functools.partial(model.apply, deterministic=True))
    expected_BxTxV = step(weights, TOKENS_BxT)
    # The cache is longer than the sequence and filled with values that must not be used.
    cache = jax.tree.map(lambda leaf: leaf + 1e3, model.init_cache(2, SEQUENCE + 8, jnp.float32))
    found, start = [], 0
    for length in DECODE_LENGTHS:
        tokens = TOKENS_BxT[:, start : start + length]
        logits, cache = step(weights, tokens, cache=cache, start=jnp.int32(start))
        found.append(logits)
        start += length
    assert start == SEQUENCE
    np.testing.assert_allclose(np.concatenate(found, axis=1), expected_BxTxV, atol=1e-5, rtol=0)
    assert np.ptp(expected_BxTxV, axis=-1).min() > 0.1


@pytest.mark.daily(1)
@pytest.mark.parametrize("sampling", [Sampler(temperature=0), Sampler(1.0, top_p=0.7, seed=5)], ids=str)
def test_cached_and_recomputed_decoding_generate_the_same_text(readers, sampling):
    choose = sampling.make_chooser(VOCABULARY)
    for prompt in ([3], list(range(SEQUENCE - 1)), list(range(40))):
        texts = [list(generate(read, choose, prompt, 40, SEQUENCE)) for read in readers]
        assert texts[0] == texts[1]
        assert len(texts[0]) == 40
        assert len(set(texts[0])) > 3


def test_a_full_window_keeps_its_last_half():
    windows = []

    def read(window, num_new):
        windows.append((list(window), num_new))
        return jnp.zeros(4)

    assert list(generate(read, lambda logits, index: jnp.int32(index), [7, 8, 9, 10, 11], 4, 4)) == [0, 1, 2, 3]
    assert windows == [([8, 9, 10, 11], 4), ([11, 0], 2), ([11, 0, 1], 1), ([11, 0, 1, 2], 1)]
    windows.clear()
    assert list(generate(read, lambda logits, index: jnp.int32(index), [7], 2, 1)) == [0, 1]
    assert windows == [([7], 1), ([0], 1)]


def test_a_token_depends_only_on_seed_and_position(readers):
    def text(num_tokens, seed):
        choose = Sampler(1.0, seed=seed).make_chooser(VOCABULARY)
        return list(generate(readers[0], choose, [3], num_tokens, SEQUENCE))

    assert text(20, 0) == text(33, 0)[:20]
    assert text(20, 0) != text(20, 1)


def test_a_model_without_a_cache_is_decoded_by_one_program():
    class Bigram(nn.Module):
        @nn.compact
        def __call__(self, tokens_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
            return nn.Embed(5, 5)(tokens_BxT)

    model = Bigram()
    weights = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), deterministic=True)
    read = make_decoder(model, weights, 4, jnp.float32, ONE)
    choose = Sampler(temperature=0).make_chooser(5)
    following = np.argmax(weights["params"]["Embed_0"]["embedding"], axis=1)
    tokens = list(generate(read, choose, [2], 9, 4))
    assert tokens == [following[token] for token in [2, *tokens[:-1]]]
    assert read._step._cache_size() == 1


def test_a_model_without_token_logits_is_rejected():
    class Classifier(nn.Module):
        @nn.compact
        def __call__(self, tokens_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
            return nn.Embed(5, 3)(tokens_BxT).mean(axis=1)

    model = Classifier()
    weights = model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32), deterministic=True)
    with pytest.raises(InvalidError, match=r"Classifier returns an array of \(1, 3\) for tokens \(1, 4\); a model of"):
        infer_vocabulary_size(model, weights, 4)


# Sampling.

PROBABILITIES = np.array([0.15, 0.5, 0.1, 0.25])


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.1, [1]), (0.5, [1]), (0.51, [1, 3]), (0.8, [0, 1, 3]), (0.95, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_sufficient_set_of_tokens(top_p, kept):
    logits_V = jnp.log(PROBABILITIES)
    found = filter_top_p(logits_V, top_p)
    assert np.flatnonzero(np.isfinite(found)).tolist() == kept
    assert (found[np.array(kept)] == logits_V[np.array(kept)]).all()


@pytest.mark.parametrize(("temperature", "top_p"), [(0.5, 1.0), (2.0, 0.8)])
def test_token_frequencies_follow_temperature_and_top_p(temperature, top_p):
    expected = PROBABILITIES ** (1 / temperature)
    expected /= expected.sum()
    order = np.argsort(-expected)
    dropped = order[np.cumsum(expected[order]) - expected[order] >= top_p]
    expected[dropped] = 0
    expected /= expected.sum()
    choose = Sampler(temperature, top_p).make_chooser(4)
    drawn = jax.vmap(choose, (None, 0))(jnp.log(jnp.append(PROBABILITIES, 9.0)), jnp.arange(4000))
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / 4000, expected, atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.5}, "--temperature -0.5: needs"),
        ({"temperature": float("nan")}, "--temperature nan: needs"),
        ({"top_p": 0}, "--top-p 0: needs"),
        ({"top_p": 1.5}, "--top-p 1.5: needs"),
        ({"seed": -1}, "--seed -1: needs"),
    ],
)
def test_invalid_sampling_options_are_rejected(options, message):
    with pytest.raises(InvalidError, match=message):
        Sampler(**options)
