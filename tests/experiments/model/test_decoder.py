"""The decoder: sizes, layer loops, cache, loss, packed documents, and many devices.

Shape legend: B batch, T sequence, V vocabulary.
"""

import functools
import json
import math
import re
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import ValidationError

from experiments.model.config import DecoderConfig
from experiments.model.decoder import EXTRA_LOSSES, Decoder, PretrainDecoder
from experiments.model.huggingface import DecoderFiles
from experiments.model.presets import PRESETS
from runner.config import MemoryConfig
from runner.errors import InvalidError
from runner.parallel.mesh import BATCH_AXES, use_sharding_rules
from runner.train.state import STATISTICS, compute_variable_shardings
from tests.experiments.test_documents import (
    LENGTHS,
    NUM_DOCUMENTS,
    make_documents,
    make_single_document_batch,
    pack_documents,
)
from tests.support.tiny_jobs import make_full_mesh

SOAK = pytest.mark.soak
VOCABULARY = 31
# All branches of the model at once, with a number of layers that is not a multiple of the pattern.
ALL_FEATURES = {
    "layers": 5,
    "width": 32,
    "heads": 8,
    "key_value_heads": 2,
    "head_dim": 8,
    "mlp_width": 48,
    "mlp": "geglu",
    "norm": "both",
    "norm_offset": True,
    "query_key_norm": "head",
    "bias": {"query_key_value": True, "attention_out": True, "mlp": True},
    "layer_pattern": ["window", "full"],
    "window": 9,
    "rope": {"theta": 100.0, "scaling": {"name": "yarn", "factor": 4.0, "original_positions": 16}},
    "window_rope": {"theta": 50.0},
    "query_scale": 0.3,
    "attention_softcap": 3.0,
    "attention_sinks": True,
    "logit_softcap": 2.0,
    "embedding_scale": "sqrt_width",
    "z_loss": 0.1,
}
LLAMA = {"layers": 2, "width": 32, "heads": 4, "key_value_heads": 2, "mlp_width": 48}
OLMO = LLAMA | {"norm": "post", "query_key_norm": "whole", "mlp": "squared_relu", "tied_embedding": True}
# Latent attention with different widths of queries, keys and values.
LATENT = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "mlp_width": 48,
    "latent": {"query_rank": 12, "key_value_rank": 16, "plain_head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 6},
    "rope": {"pairs": "neighbours"},
    "bias": {"query_key_value": True},
    "query_scale": 0.4,
}
FURTHER = LLAMA | {"extra_predictions": 2, "extra_prediction_weight": 0.5}
# Linear layers beside gated attention that rotates a part of each head.
HYBRID = LLAMA | {
    "layers": 3,
    "head_dim": 8,
    "layer_pattern": ["linear", "full"],
    "linear": {"key_heads": 8, "value_heads": 16, "key_head_dim": 4, "value_head_dim": 6},
    "attention_gate": True,
    "query_key_norm": "head",
    "norm_offset": True,
    "rope": {"theta": 100.0, "fraction": 0.5},
}
# Layers with embeddings of their own, of which the last ones share keys and values; full layers have other heads. Among
# the layers before those that share, the last pattern is not whole.
SHARING = LLAMA | {
    "layers": 9,
    "head_dim": 8,
    "norm": "both",
    "layer_pattern": ["window", "window", "full"],
    "window": 9,
    "full_heads": {"head_dim": 12, "key_value_heads": 1, "keys_as_values": True},
    "key_value_sharing": {"layers": 4, "mlp_width": 64},
    "layer_embedding_width": 6,
    "layer_scale": True,
    "query_key_norm": "head",
    "value_norm": True,
    "rope": {"theta": 100.0, "fraction": 0.5, "proportional": True},
    "window_rope": {"theta": 50.0},
    "query_scale": 0.5,
}
FAMILIES = {"everything": ALL_FEATURES, "llama": LLAMA, "olmo": OLMO, "latent": LATENT}
FAMILIES |= {"hybrid": HYBRID, "further": FURTHER, "sharing": SHARING}
MODELS = {name: keys | {"heads": 8} for name, keys in FAMILIES.items()}
LLAMA3_SCALING = {"name": "llama3", "factor": 2.0, "original_positions": 8}
TOKENS_BxT = np.random.default_rng(0).integers(0, VOCABULARY, (2, 24))


def make_decoder(keys, memory=None, **changes):
    return Decoder(DecoderConfig(**keys | changes), VOCABULARY, memory=MemoryConfig(**memory or {}))


def init_boxed_params(model):
    return jax.eval_shape(functools.partial(model.init, deterministic=True), jax.random.key(0), TOKENS_BxT)


@functools.cache
def trace_params(name):
    """Return the abstract parameters of a model, with the names of their axes."""
    return init_boxed_params(make_decoder(MODELS[name]))


@functools.cache
def make_params(name):
    """Return random parameters without ones and zeros."""
    generator = np.random.default_rng(1)
    shapes = nn.unbox(trace_params(name))

    def draw(path, leaf):
        # Small factors on the stream would amplify rounding from layer to layer.
        mean = 1.1 if path[-1].key == "layer_scale" else 0.1
        return generator.normal(mean, 0.2, leaf.shape).astype(leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def compute_logits(name):
    model = make_decoder(MODELS[name])
    return np.asarray(jax.jit(functools.partial(model.apply, deterministic=True))(make_params(name), TOKENS_BxT))


# Configuration and parameters.


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama3_8b", 8_030_261_248),
        ("qwen2.5_0.5b", 494_032_768),
        *(
            pytest.param(*published, marks=SOAK)
            for published in [
                ("llama2_7b", 6_738_415_616),
                ("gemma3_1b", 999_885_952),
                ("qwen3_0.6b", 596_049_920),
                ("mistral_7b", 7_241_732_096),
                ("gemma2_2b", 2_614_341_888),
                ("olmo2_7b", 7_298_617_344),
                ("olmo3_7b", 7_298_011_136),
                ("olmo3_32b", 32_233_522_176),
                ("smollm2_135m", 134_515_008),
                ("smollm3_3b", 3_075_098_624),
            ]
        ),
    ],
)
def test_a_preset_has_its_published_number_of_parameters(name, parameters):
    config = DecoderConfig(preset=name)
    shapes = nn.unbox(init_boxed_params(Decoder(config, config.vocabulary_size)))["params"]
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == parameters
    paths = jax.tree_util.tree_leaves_with_path(shapes)
    kernels = sum(math.prod(leaf.shape) for path, leaf in paths if path[-1].key == "kernel")
    assert kernels == config.layers * config.layer_matmul_parameters


@pytest.mark.parametrize("name", PRESETS)
def test_keys_override_the_values_of_a_preset(name):
    config = DecoderConfig.model_validate_json(
        json.dumps({"preset": name, "norm_epsilon": 0.5, "rope": {"theta": 7.0}})
    )
    preset = DecoderConfig(**PRESETS[name])
    rope = preset.rope.model_copy(update={"theta": 7.0})
    assert config.model_copy(update={"preset": None}) == preset.model_copy(update={"norm_epsilon": 0.5, "rope": rope})
    assert "preset" not in config.model_dump()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=SOAK if name in ("olmo", "further") else ()) for name in MODELS]
)
def test_axis_names_distinguish_matrices_from_vectors(name):
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    boxed = trace_params(name)["params"]
    for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
        assert len(box.names) == box.value.ndim
        others = {"conv_input", "conv"} if path[-1].key.endswith("_conv") else {"layer_scale"}
        assert set(box.names) <= {"vocab", "embed", "heads", "head_dim", "latent", "mlp", "layers"} | others
        assert (len(set(box.names) - {"layers"}) == 2) == (path[-1].key in ("kernel", "embedding", "head"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "llama3_7b"}, r"unknown preset 'llama3_7b'; did you mean llama3_70b\?"),
        ({"width": 33}, "width=33 does not divide over heads=4; use a multiple of 4, or set head_dim"),
        ({"head_dim": 7}, "head_dim=7 is odd; rotary positions need pairs"),
        ({"key_value_heads": 3}, "heads=4 does not divide over key_value_heads=3"),
        ({"latent": LATENT["latent"]}, "key_value_heads=2 contradicts `latent`"),
        (
            {"latent": LATENT["latent"] | {"rotary_head_dim": 3}, "key_value_heads": "auto"},
            "latent.rotary_head_dim=3 is odd; rotary positions need pairs",
        ),
        (
            {"latent": LATENT["latent"], "key_value_heads": "auto", "attention_sinks": True},
            "attention_sinks=True contradicts `latent`",
        ),
        ({"layer_pattern": ["window"]}, "layer_pattern has window layers; set window"),
        ({"layer_pattern": ["linear"]}, "layer_pattern has linear layers; set `linear`, their heads"),
        ({"linear": HYBRID["linear"]}, "linear is set, and layer_pattern has no linear layer that reads it"),
        (
            {"layer_pattern": ["linear"], "linear": HYBRID["linear"] | {"value_heads": 12}},
            "linear.value_heads=12 does not divide over key_heads=8; use a multiple",
        ),
        (
            {"layer_pattern": ["linear"], "linear": HYBRID["linear"], "query_key_norm": "head"},
            "query_key_norm is set, and layer_pattern has no attention that reads it",
        ),
        ({"extra_prediction_weight": 0.5}, "extra_prediction_weight=0.5 is read by no layer; leave it out, or set"),
        ({"rope": {"fraction": 0.3}}, "rope.fraction=0.3 rotates 2.4 of the 8 elements of a head"),
        ({"attention_gate": True, "query_key_norm": "whole"}, "attention_gate is not supported with query_key_norm"),
        ({"window": 4}, "window is set, and layer_pattern has no window layer that reads it"),
        ({"full_heads": {"head_dim": 7}}, "full_heads.head_dim=7 is odd; rotary positions need pairs"),
        ({"full_heads": {"key_value_heads": 3}}, "heads=4 does not divide over full_heads.key_value_heads=3"),
        (
            {"full_heads": {}, "layer_pattern": ["window"], "window": 4},
            "full_heads is set, and layer_pattern has no full layer that reads it",
        ),
        (
            {"full_heads": {"keys_as_values": True}, "query_key_norm": "whole"},
            "full_heads.keys_as_values is not supported with query_key_norm=whole",
        ),
        (
            {"key_value_sharing": {"layers": 1}, "layer_pattern": ["window", "full"], "window": 4},
            "key_value_sharing.layers=1 leaves none of layers=2 of the kind full to give keys and values",
        ),
        ({"key_value_sharing": {"layers": 2}}, "key_value_sharing.layers=2 leaves none of layers=2 of the kind full"),
        (
            {"key_value_sharing": {"layers": 1}, "layer_pattern": ["full", "linear"], "linear": HYBRID["linear"]},
            "key_value_sharing.layers=1 has linear layers alone",
        ),
        (
            {"key_value_sharing": {"layers": 1}, "moe": {"experts": 4, "experts_per_token": 2, "dense_layers": 1}},
            "key_value_sharing is not supported with moe.dense_layers=1",
        ),
        (
            {"latent": LATENT["latent"], "key_value_heads": "auto", "key_value_sharing": {"layers": 1}},
            "key_value_sharing contradicts `latent`",
        ),
        (
            {"latent": LATENT["latent"], "key_value_heads": "auto", "full_heads": {"head_dim": 8}},
            "full_heads contradicts `latent`",
        ),
        (
            {"key_value_sharing": {"layers": 1}, "extra_predictions": 1},
            "key_value_sharing is not supported with extra_predictions=1",
        ),
        (
            {"layer_embedding_width": 4, "extra_predictions": 1},
            "layer_embedding_width is not supported with extra_predictions",
        ),
        ({"layer_embedding_width": 4, "mlp": "squared_relu"}, "layer_embedding_width needs the gate of mlp"),
        ({"layer_embedding_width": 4, "base_width": 32}, "mu-P does not scale the matrices that layer_embedding_width"),
        (
            {
                "rope": {
                    "scaling": {"name": "llama3", "factor": 2.0, "original_positions": 8, "low_frequency_factor": 4.0}
                }
            },
            "low_frequency_factor=4.0 is not below high_frequency_factor=4.0",
        ),
    ],
)
def test_inconsistent_keys_are_refused_with_their_values(changes, message):
    with pytest.raises(ValidationError, match=message):
        DecoderConfig(**LLAMA | changes)


def test_a_window_larger_than_the_sequence_is_full_attention():
    windows = MODELS["llama"] | {"layer_pattern": ["window"], "window": TOKENS_BxT.shape[1] + 1}
    results = [
        jax.jit(functools.partial(make_decoder(keys).apply, deterministic=True))(make_params("llama"), TOKENS_BxT)
        for keys in (MODELS["llama"], windows)
    ]
    np.testing.assert_array_equal(*results)
    # The config keeps the window as given.
    assert DecoderFiles(DecoderConfig(**windows), 64, 8).config()["sliding_window"] == windows["window"]


def test_heads_that_do_not_divide_over_devices_are_refused():
    with (
        use_sharding_rules(make_full_mesh(1, 1, 8)),
        pytest.raises(
            InvalidError, match=r"config.model.heads=4 does not divide .*make topology.mesh.tensor a divisor"
        ),
    ):
        init_boxed_params(make_decoder(LLAMA))


# Computation.


@pytest.mark.parametrize("name", ["llama", pytest.param("everything", marks=SOAK)])
def test_both_layer_loops_have_the_same_weights_and_logits(name):
    unrolled = make_decoder(MODELS[name], layer_loop="unroll")
    shapes = jax.tree.map(lambda leaf: leaf.shape, nn.unbox(init_boxed_params(unrolled)))
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, make_params(name))
    logits = jax.jit(functools.partial(unrolled.apply, deterministic=True))(make_params(name), TOKENS_BxT)
    np.testing.assert_allclose(logits, compute_logits(name), atol=1e-5)


STEPS = [6] * 4, [13] + [1] * 11  # tokens of each call; calls of one length share a program


@pytest.mark.parametrize(
    ("name", "lengths"),
    [
        ("hybrid", STEPS[0]),
        *(pytest.param(name, lengths, marks=SOAK) for name in MODELS for lengths in STEPS),
    ],
)
def test_a_cached_decode_equals_the_whole_sequence(name, lengths):
    model = make_decoder(MODELS[name])
    apply = jax.jit(functools.partial(model.apply, deterministic=True))
    (B, T), start, found = TOKENS_BxT.shape, 0, []
    cache = model.init_cache(B, T + 3, jnp.float32)
    for length in lengths:
        # Each call has padding behind its tokens, which no later call may notice.
        tokens_BxT = np.pad(TOKENS_BxT[:, start : start + length], ((0, 0), (0, 2)), constant_values=7)
        logits_BxTxV, cache = apply(make_params(name), tokens_BxT, cache=cache, start=start, count=length)
        found.append(logits_BxTxV[:, :length])
        start += length
    np.testing.assert_allclose(np.concatenate(found, axis=1), compute_logits(name), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "remat"), [pytest.param("llama", "none", marks=SOAK), pytest.param("everything", "layers", marks=SOAK)]
)
def test_a_chunked_loss_equals_that_of_all_logits(name, remat):
    weights_BxT = np.random.default_rng(2).random(TOKENS_BxT.shape).astype(np.float32)
    model = make_decoder(MODELS[name] | {"z_loss": 0.1}, {"remat": remat, "loss_chunk_positions": 8})

    def loss(params):
        return model.apply(params, TOKENS_BxT, targets=(TOKENS_BxT, weights_BxT), deterministic=False)

    log_sum_BxT = jax.nn.logsumexp(compute_logits(name), axis=-1)
    label_BxT = np.take_along_axis(compute_logits(name), TOKENS_BxT[..., None], axis=-1)[..., 0]
    expected = ((log_sum_BxT - label_BxT + 0.1 * log_sum_BxT**2) * weights_BxT).sum()
    compiled = jax.jit(jax.value_and_grad(loss)).lower(make_params(name)).compile()
    np.testing.assert_allclose(compiled(make_params(name))[0], expected, rtol=1e-5)
    shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
    assert max(math.prod(shape) for shape in shapes if VOCABULARY in shape) < TOKENS_BxT.size * VOCABULARY


def test_extra_predictions_see_no_token_after_their_input():
    """The target at position 10 is predicted one and two positions further ahead, from tokens up to position 10."""
    model, weights_BxT = make_decoder(MODELS["further"]), np.zeros(TOKENS_BxT.shape, np.float32)
    weights_BxT[:, 10] = 1

    @jax.jit
    def compute_losses(tokens_BxT):
        targets = np.roll(TOKENS_BxT, -1, axis=1), weights_BxT
        _, sown = model.apply(
            jax.device_put(make_params("further")),
            tokens_BxT,
            targets=targets,
            deterministic=False,
            mutable=[STATISTICS],
        )
        return sown[STATISTICS][STATISTICS][EXTRA_LOSSES]

    expected = compute_losses(TOKENS_BxT)
    np.testing.assert_array_equal(expected["weight_K"], 2)
    for position, is_seen in {8: True, 9: True, 10: True, 11: False, 12: False}.items():
        tokens_BxT = TOKENS_BxT.copy()
        tokens_BxT[:, position] = (tokens_BxT[:, position] + 1) % VOCABULARY
        changed_K = compute_losses(tokens_BxT)["loss_K"] != expected["loss_K"]
        np.testing.assert_array_equal(changed_K, is_seen)


# Packed documents and sharding.


def compute_loss_and_gradients(model, params, batch, mesh=None):
    """Return the summed training loss of a batch and its gradients, on one device or over a mesh."""
    batch = batch | {"example": np.arange(len(batch["x"]))}
    trainer = type("Trainer", (PretrainDecoder,), {"config": SimpleNamespace(model=model.config)})
    grad = jax.value_and_grad(lambda params, batch: trainer.forward(model.apply, params, batch, key)[0])
    key = jax.random.key(0)
    if mesh is None:
        return jax.device_get(jax.jit(grad)(params, batch))
    shardings = compute_variable_shardings(init_boxed_params(model)["params"], mesh)
    rows = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
    with use_sharding_rules(mesh):
        jitted = jax.jit(grad, in_shardings=(shardings, None), out_shardings=(None, shardings))
        return jax.device_get(jitted(jax.device_put(params, shardings), rows))


@functools.cache
def compute_expected(name):
    """Return loss and gradients on one device, with one document per sequence and no segments."""
    model = make_decoder(MODELS[name])
    return compute_loss_and_gradients(
        model, make_params(name)["params"], make_single_document_batch(make_documents(LENGTHS))
    )


SPLITS = [
    ("llama", (1, 2, 4)),
    *(
        pytest.param(name, sizes, marks=SOAK)
        for name in MODELS
        for sizes in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (4, 2, 1), (4, 1, 2), (2, 2, 2), (1, 2, 4)]
    ),
]


@pytest.mark.soak
@pytest.mark.parametrize(("name", "sizes"), SPLITS)
def test_packed_documents_on_many_devices_equal_single_documents_on_one(name, sizes):
    rows = make_documents(LENGTHS) + [[]] * (8 - len(LENGTHS))  # so that the batch divides over every mesh
    model = make_decoder(MODELS[name], {"loss_chunk_positions": 32})
    actual = compute_loss_and_gradients(
        model, make_params(name)["params"], pack_documents(rows), make_full_mesh(*sizes)
    )
    expected = compute_expected(name)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    # With these parameters the last bit of each changes the gradients of linear layers by 5e-4.
    tolerance = 1e-3 if name == "hybrid" else 1e-4
    # The factor before the last norm has a gradient of zero up to rounding.
    floor = max(np.abs(want).max() for want in jax.tree.leaves(expected[1])) / 1000
    for got, want in zip(jax.tree.leaves(actual[1]), jax.tree.leaves(expected[1]), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * max(np.abs(want).max(), floor))
    assert len(rows) < NUM_DOCUMENTS


AXES = ["layers", "heads", "width", "mlp_width", "head_dim", "vocabulary_size", "base_width", "window"]
AXES += [f"moe.{key}" for key in ("experts", "expert_width", "shared_experts")]
AXES += [f"linear.{key}" for key in ("value_heads", "key_head_dim", "value_head_dim", "conv_width")]
AXES += [f"latent.{key}" for key in ("key_value_rank", "query_rank", "rotary_head_dim", "value_head_dim")]
SECTIONS = {
    "moe": {"experts": 8, "experts_per_token": 2},
    "linear": HYBRID["linear"],
    "latent": {"key_value_rank": 8, "plain_head_dim": 8, "rotary_head_dim": 8, "value_head_dim": 8},
}


@pytest.mark.parametrize("key", AXES)
@pytest.mark.parametrize("size", [2**31, 2**63])
def test_a_size_that_no_mesh_axis_divides_is_rejected_with_its_key(key: str, size: int) -> None:
    sizes = {"layers": 2, "heads": 4, "width": 64, "mlp_width": 64}
    section, _, name = key.rpartition(".")
    sizes |= {section: SECTIONS[section] | {name: size}} if section else {key: size}
    with pytest.raises(ValidationError, match=rf"{key}={size} is too large; needs less than 2147483648"):
        DecoderConfig.model_validate(sizes)


def test_the_product_of_heads_and_width_may_be_sharded() -> None:
    with pytest.raises(ValidationError, match="heads x head size=2147483648 is too large for an axis"):
        DecoderConfig.model_validate({"layers": 1, "heads": 2, "head_dim": 2**30, "width": 8, "mlp_width": 8})
