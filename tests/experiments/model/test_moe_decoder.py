"""Decoders with experts: invariance to padding, micro-batches, caching and sharding; expert biases during a run.

Shape legend: S accumulation steps, B examples, T sequence length.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.model.config import DecoderConfig, DecoderTrainerConfig
from experiments.model.decoder import Decoder, PretrainDecoder
from runner.config import MemoryConfig
from runner.parallel.mesh import make_batch_sharding, make_mesh, use_sharding_rules
from runner.storage import parse_lines, read_json
from runner.train.flops import count_matmul_flops
from runner.train.state import compute_variable_shardings, get_shardings, make_abstract_state
from tests.experiments.test_documents import LENGTHS, make_documents, pack_documents
from tests.support.tiny_jobs import are_leaves_equal, format_mesh, make_gpt, make_mesh_options, stop_after
from tests.support.train_states import make_state

SOAK = pytest.mark.soak
KEY = jax.random.key(0)
V, T = 31, 128
SIZES = {"layers": 3, "width": 32, "heads": 8, "key_value_heads": 2, "mlp_width": 48}
LOSSES = {"auxiliary_loss": 0.1, "router_z_loss": 0.01}
EXPERTS = {"experts": 8, "experts_per_token": 2, "expert_width": 16, "dense_layers": 1, **LOSSES}
LATENT = {"query_rank": 12, "key_value_rank": 16, "plain_head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 6}
BIASES = EXPERTS | {"gate": "sigmoid", "shared_experts": 1, "bias_rate": 0.01}
MODELS = {
    "biases": {"moe": BIASES, "latent": LATENT, "key_value_heads": "auto"},  # like DeepSeek-V3
    "capacity": {"moe": EXPERTS | {"capacity_factor": 1.0}},
    "further": {"moe": BIASES, "extra_predictions": 2, "extra_prediction_weight": 8.0},
    "sinks": {  # like GPT-OSS
        "moe": EXPERTS | {"bias": True},
        "mlp": "clamped_swiglu",
        "attention_sinks": True,
        "bias": {"query_key_value": True, "attention_out": True},
    },
}
PATTERN = {"layer_pattern": ["window", "full"], "window": 9}  # its first period ends among the layers with experts


def make_config(name, **changes):
    return DecoderConfig(**SIZES | MODELS[name] | changes)


@functools.cache
def make_trainer_class(name):
    """Return the class of a job with this model."""
    config = DecoderTrainerConfig(
        model=SIZES | MODELS[name] | PATTERN,
        data={"source": "none", "sequence_length": T},
        train={"total_steps": 1, "global_batch_examples": 8},
        optimizer={"learning_rate": 1.0},
    )
    return type("Trainer", (PretrainDecoder,), {"config": config})


def build_model(name, memory=None, **changes):
    return Decoder(make_config(name, **PATTERN, **changes), V, memory=MemoryConfig(**memory or {}))


def init_variables(model, key):
    return make_state(model, key, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)


@functools.cache
def make_spread_state(name):
    """Return a state with scores so far apart that rounding does not change the chosen experts."""
    state = jax.jit(functools.partial(init_variables, build_model(name)))(KEY)

    def spread(leaf):
        # Biases and sinks are zero at first.
        noise = 0.003 * np.random.default_rng(leaf.size).normal(size=leaf.shape).astype(np.float32)
        return jnp.asarray(noise) if not leaf.any() else 3 * leaf if leaf.ndim > 2 else leaf

    return state.replace(params=jax.tree.map(spread, state.params))


def make_batch(S, tokens_of_padding=0):
    """Return packed documents, sequences with padding at both ends, and a sequence of padding."""
    rows = pack_documents([*make_documents(LENGTHS), *make_documents(LENGTHS[:3]), []])
    padding = rows["segment"] == 0
    rows = rows | {"x": np.where(padding, tokens_of_padding, rows["x"])}
    return {name: leaf.reshape(S, 8 // S, T) for name, leaf in rows.items()}


def take_step(name, S, mesh=None, tokens_of_padding=0, **memory):
    """Return (parameters, biases, loss, metrics) after one train step."""
    state, batch = make_spread_state(name), make_batch(S, tokens_of_padding)
    model = build_model(name, memory)
    state = state.replace(apply_fn=model.apply)
    train_step = functools.partial(make_trainer_class(name).train_step, accumulate_steps=S)
    if mesh is None:
        after, loss, meta = jax.jit(train_step)(state, batch, KEY)
    else:
        boxed = jax.eval_shape(functools.partial(model.init, deterministic=True), KEY, jnp.zeros((1, T), jnp.int32))
        shardings = compute_variable_shardings(boxed, mesh)
        others = {name: shardings[name] for name in shardings if name != "params"}
        abstract = make_abstract_state(functools.partial(init_variables, model), KEY, shardings["params"], mesh, others)
        state = jax.device_put(state.replace(tx=abstract.tx), get_shardings(abstract).replace(apply_fn=model.apply))
        with use_sharding_rules(mesh):
            rows = jax.device_put(batch, make_batch_sharding(mesh))
            jitted = jax.jit(train_step, out_shardings=(get_shardings(abstract), None, None))
            after, loss, meta = jitted(state, rows, KEY)
    return jax.device_get((after.params, after.variables, loss, meta))


@functools.cache
def expected(name):
    return take_step(name, 1)


def assert_same_step(name, actual):
    params, variables, loss, meta = actual
    expected_params, expected_variables, expected_loss, expected_meta = expected(name)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    before = jax.device_get(make_spread_state(name).params)
    for new, want, old in zip(*map(jax.tree.leaves, (params, expected_params, before)), strict=True):
        np.testing.assert_allclose(new - old, want - old, rtol=0, atol=1e-4 * np.abs(want - old).max())
    assert are_leaves_equal(variables, expected_variables)
    for key, value in expected_meta.items():
        np.testing.assert_allclose(meta[key], value, rtol=0 if key.endswith(("load", "dropped")) else 1e-5)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "S"), [("biases", 4), *(pytest.param(name, S, marks=SOAK) for name in MODELS for S in (2, 8))]
)
def test_padding_and_micro_batches_do_not_change_a_step(name, S):
    assert_same_step(name, take_step(name, S, tokens_of_padding=7))
    figures = expected(name)[3]
    for layer in (1, 2):
        assert 1 < figures[f"moe/{layer}/load"] < 4
        assert 0 < figures[f"moe/{layer}/entropy"] < np.log(8)
    assert ("moe/1/dropped" in figures) == (name == "capacity")
    assert "moe/0/load" not in figures


@pytest.mark.soak
def test_biases_move_towards_an_even_load():
    _, variables, _, _ = expected("biases")
    biases = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(variables)])
    assert biases.shape == (2 * 8,)
    assert set(np.abs(biases)) <= {np.float32(0), np.float32(0.01)}
    assert biases.min() < 0 < biases.max()


MESHES = [
    {"data": 2, "fsdp": 2, "tensor": 2},
    {"data": 8},
    {"fsdp": 8},
    {"tensor": 8},
    {"data": 4, "fsdp": 2},
    {"data": 4, "tensor": 2},
    {"fsdp": 2, "tensor": 4},
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"expert": 4, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"fsdp": 2, "sequence": 2, "expert": 2},
    {"sequence": 2, "expert": 2, "tensor": 2},
]


@pytest.mark.soak
@pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)
@pytest.mark.parametrize("name", MODELS)
def test_a_step_on_many_devices_equals_one(name, sizes):
    assert_same_step(name, take_step(name, 1, make_mesh(sizes)))


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [None, {"fsdp": 2, "expert": 4}], ids=["one device", "many"])
@pytest.mark.parametrize("remat", ["dots", "layers"])
@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_does_not_change_a_step(name, remat, sizes):
    mesh = None if sizes is None else make_mesh(sizes)
    assert_same_step(name, take_step(name, 1, mesh, remat=remat, loss_chunk_positions=32))


@pytest.mark.soak
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
@pytest.mark.parametrize("name", ["biases", "sinks"])
def test_a_cached_decode_equals_the_whole_sequence(name, layer_loop):
    model, state = build_model(name, layer_loop=layer_loop), make_spread_state(name)
    balance = jax.tree.map(lambda leaf: leaf + 0.1, (state.variables or {}).get("balance", {}))
    variables = {"params": state.params, "balance": balance}
    apply = jax.jit(functools.partial(model.apply, deterministic=True))
    tokens_BxT = np.random.default_rng(0).integers(0, V, (2, 12))
    cache, found = model.init_cache(2, 14, jnp.float32), []
    for start in range(0, 12, 4):
        logits_BxTxV, cache = apply(variables, tokens_BxT[:, start : start + 4], cache=cache, start=start)
        found.append(logits_BxTxV)
    np.testing.assert_allclose(np.concatenate(found, axis=1), apply(variables, tokens_BxT), atol=1e-5)


ATTENTION = {
    "grouped": {},
    "latent": {"key_value_heads": "auto", "latent": LATENT},
    "latent, queries not": {"key_value_heads": "auto", "latent": LATENT | {"query_rank": None}},
    "shared": {  # like Gemma 4
        "layer_pattern": ["no_rope", "full"],
        "full_heads": {"head_dim": 12, "key_value_heads": 1, "keys_as_values": True},
        "key_value_sharing": {"layers": 1, "mlp_width": 64},
        "layer_embedding_width": 6,
        "layer_scale": True,
        "moe": {"dense_layers": 0, "beside_mlp": True, "scaled_router": True},
    },
}


@pytest.mark.parametrize(
    ("attention", "remat"),
    [
        ("shared", "layers"),
        *(pytest.param(name, remat, marks=SOAK) for name in ATTENTION for remat in ("none", "dots", "layers")),
    ],
)
@pytest.mark.soak
def test_the_formula_counts_every_form_of_attention_and_active_experts(attention, remat, tmp_path):
    """Check with a capacity that is exactly used, so that there are as many slots as assignments.

    The formula excludes masked scores, which no implementation skips in such a short sequence.
    """
    keys = SIZES | {"vocabulary_size": V} | ATTENTION[attention]
    keys["moe"] = MODELS["capacity"]["moe"] | {"shared_experts": 1} | keys.get("moe", {})
    changes = {"config.model": keys, "config.memory.remat": remat}
    job = make_gpt(tmp_path / "run", PretrainDecoder, **changes)
    model = job.model()
    tokens_BxT, weight_BxT = jnp.zeros((1, 16), jnp.int32), jnp.ones((1, 16))
    variables = nn.unbox(jax.eval_shape(functools.partial(model.init, deterministic=True), KEY, tokens_BxT))

    def loss(params):
        return model.apply({"params": params}, tokens_BxT, targets=(tokens_BxT, weight_BxT), deterministic=False)

    executed = count_matmul_flops(jax.make_jaxpr(jax.grad(loss))(variables["params"]), platform="cpu") / 16
    flops = job.flops_per_token(job.setup_builder.build(jax.devices()))
    config = job.config.model
    score, value = (2 * config.heads * width for width in (config.head_size, config.value_size))
    again = score if remat == "none" else 2 * score + value
    widths = sum(config.get_head_size(kind) for kind in config.layer_kinds) / config.head_size  # of all layers
    hidden = widths * 8 * (3 * (score + value) + again)
    assert executed == pytest.approx(flops.per_token + flops.recomputed_per_token + hidden, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "parameters", "of_a_token"),
    [
        ("olmoe_1b_7b", 6_919_161_856, 1.3e9),
        ("deepseek_v2_lite", 15_706_484_224, 2.66e9),  # published as 2.4 without the embedding
        pytest.param("gpt_oss_20b", 20_914_757_184, 4.19e9, marks=SOAK),  # published as 3.6 without the embedding
        pytest.param("gpt_oss_120b", 116_829_156_672, 5.71e9, marks=SOAK),  # published as 5.1 without the embedding
        pytest.param("deepseek_v2", 235_741_434_880, 21e9, marks=SOAK),
        pytest.param("deepseek_v3", 671_026_404_352, 37e9, marks=SOAK),
        pytest.param("mixtral_8x7b", 46_702_792_704, 12.9e9, marks=SOAK),
        pytest.param("qwen3_next_80b_a3b", 79_674_391_296, 3.9e9, marks=SOAK),
        pytest.param("qwen3_30b_a3b", 30_532_122_624, 3.3e9, marks=SOAK),
    ],
)
def test_a_preset_has_its_published_total_and_active_parameters(name, parameters, of_a_token):
    config = DecoderConfig(preset=name)
    model = Decoder(config, config.vocabulary_size)
    shapes = jax.eval_shape(functools.partial(model.init, deterministic=True), KEY, jnp.zeros((1, 8), jnp.int32))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nn.unbox(shapes)["params"])) == parameters
    embedding_and_head = 2 * config.vocabulary_size * config.width
    assert config.layers * config.layer_matmul_parameters + embedding_and_head == pytest.approx(of_a_token, rel=0.02)


# Jobs.

JOB = {"config.model": SIZES | MODELS["biases"], "config.train.total_steps": 6, "config.eval.every_steps": 3}


def run_job(directory, **changes):
    job = make_gpt(directory, PretrainDecoder, **JOB, **changes)
    job()
    return job


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run_job(tmp_path_factory.mktemp("sparse") / "whole")


@pytest.mark.soak
@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(make_mesh_options(1, 4, 2), marks=SOAK)], ids=["the same devices", "another mesh"]
)
def test_a_stopped_run_resumes_to_the_same_bits_and_rows(tmp_path, uninterrupted, mesh):
    first = make_gpt(tmp_path / "run", PretrainDecoder, **JOB)
    stop_after(first, 2)
    again = run_job(tmp_path / "run", **mesh)
    rows, expected_rows = (
        parse_lines((job.store.root / "metrics.jsonl").read_bytes()) for job in (again, uninterrupted)
    )
    assert [row["step"] for row in rows] == list(range(1, 7))
    for row, expected_row in zip(rows, expected_rows, strict=True):
        for key in ("train/moe/1/load", "train/moe/2/load", "train/moe/1/entropy", "train/loss"):
            assert row[key] == (expected_row[key] if not mesh else pytest.approx(expected_row[key], rel=0.05))
    if not mesh:
        assert read_json(again.store, "result.json") == read_json(uninterrupted.store, "result.json")
        assert are_leaves_equal(again.state, uninterrupted.state)
    biases = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(jax.device_get(again.state.variables))])
    assert 0.01 < np.abs(biases).max() <= 6 * 0.0101
