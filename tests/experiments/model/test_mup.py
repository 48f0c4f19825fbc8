"""mu-P of the decoder: the coordinate check of Tensor Programs V, and its table of multipliers."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.model.config import DecoderConfig
from experiments.model.decoder import PretrainDecoder
from experiments.model.huggingface import DecoderFiles
from runner.errors import InvalidError
from tests.support.tiny_jobs import are_leaves_equal, make_gpt

BASE, WIDTHS, VOCABULARY, STEPS = 32, (32, 64, 128), 64, 5
TOKENS_BxT = np.random.default_rng(0).integers(0, VOCABULARY, (8, 16))


def make_sizes(width, **changes):
    return {"layers": 1, "width": width, "heads": width // 8, "mlp_width": 2 * width} | changes


def make_job(directory, width, job_class=PretrainDecoder, **changes):
    fixed = {
        "config.model": make_sizes(width, vocabulary_size=VOCABULARY),
        "config.optimizer.learning_rate": 0.02,
        "config.schedule": {"name": "constant"},
        "config.train": {"total_steps": STEPS, "global_batch_examples": 8},
    }
    directory.mkdir(exist_ok=True)
    return make_gpt(directory / str(width), job_class, **fixed | changes)


def train(found, num_steps=STEPS, tokens_BxT=TOKENS_BxT):
    """Return the initial state and the state after some steps on one batch."""
    mask = np.ones((1, *tokens_BxT.shape), bool)
    batch = {"x": tokens_BxT[None], "y": np.roll(tokens_BxT, -1)[None], "padding_mask": mask}
    train_setup = found.setup_builder.build(jax.devices()[:1])
    first = train_setup.init_state()
    step = jax.jit(functools.partial(found.train_step, accumulate_steps=1))
    state = first
    for _ in range(num_steps):
        state, *_ = step(state, batch, train_setup.key)
    return first, state


def compute_stream_and_logits(found, states, tokens_BxT):
    """Return the residual stream after the last layer and the logits for each state."""

    @jax.jit
    def run(params):
        streams = []

        def spy(call, arguments, options, context):
            if context.module.name == "final_norm":
                streams.append(arguments[0])
            return call(*arguments, **options)

        with nn.intercept_methods(spy):
            logits_BxTxV = found.model().apply({"params": params}, tokens_BxT, deterministic=True)
        return streams[0], logits_BxTxV

    return [run(each.params) for each in states]


def changes_by_width(directory, widths=WIDTHS, tokens_BxT=TOKENS_BxT, **changes):
    """Return the mean change of a coordinate of the stream and of the logits, by width."""
    moved = []
    for width in widths:
        found = make_job(directory, width, **changes)
        before, after = compute_stream_and_logits(found, train(found, STEPS, tokens_BxT), tokens_BxT)
        moved.append([float(jnp.mean(jnp.abs(new - old))) for old, new in zip(before, after, strict=True)])
    return np.array(moved)


@pytest.mark.soak
def test_updates_keep_their_size_over_widths_only_with_mup(tmp_path):
    with_mup = changes_by_width(tmp_path / "mup", **{"config.model.base_width": BASE})
    without = changes_by_width(tmp_path / "plain")
    np.testing.assert_allclose(with_mup[0], without[0], rtol=1e-6)
    assert (np.abs(np.log2(with_mup / with_mup[0])) < 0.6).all(), with_mup
    assert (np.diff(np.log2(without), axis=0) > 0.4).all(), without


# The change of the stream is that of the hidden matrices alone.
HIDDEN_ALONE = {"config.optimizer.groups": [{"pattern": name, "frozen": True} for name in ("embedding*", "head*")]}
RATES = {"adamw": 0.02, "muon": 0.1, "normuon": 0.1, "muonh": 0.1}


@pytest.mark.parametrize(
    ("name", "widths"),
    [
        ("muon", (32, 128)),
        *(pytest.param(name, (64, 256, 1024), marks=pytest.mark.soak) for name in RATES if name != "adamw"),
    ],
)
def test_hidden_matrices_move_the_stream_alike_at_every_width(name, widths, tmp_path):
    """Updates of normuon and muonh have a fixed norm: they are alike only if gradients have a full rank."""
    vocabulary = 4 * max(widths)
    tokens_BxT = np.random.default_rng(0).integers(0, vocabulary, (vocabulary // 16, 16))
    changes = HIDDEN_ALONE | {
        "config.optimizer.name": name,
        "config.optimizer.learning_rate": RATES[name],
        "config.train": {"total_steps": STEPS, "global_batch_examples": len(tokens_BxT)},
    }
    bases, growths = {"mup": widths[0], "plain": None}, {}
    for kind, base in bases.items():
        model = {"config.model.base_width": base, "config.model.vocabulary_size": vocabulary}
        moved = changes_by_width(tmp_path / kind, widths, tokens_BxT, **changes, **model)[:, 0]
        growths[kind] = np.diff(np.log2(moved)) / np.diff(np.log2(widths))
    print(name, growths)
    assert (np.abs(growths["mup"]) < 0.25).all(), growths
    assert (growths["plain"] > 0.75).all(), growths


@pytest.fixture(scope="module")
def wide_job(tmp_path_factory):
    """Return a job of four times the base width, its setup, and its initial weights."""
    found = make_job(tmp_path_factory.mktemp("wide"), 128, **{"config.model.base_width": BASE})
    train_setup = found.setup_builder.build(jax.devices()[:1])
    return found, train_setup, train_setup.init_state().params


def test_initial_weights_and_learning_rates_follow_the_table(wide_job, tmp_path):
    found, train_setup, first = wide_job
    other = make_job(tmp_path / "plain", 128).setup_builder.build(jax.devices()[:1]).init_state().params
    layer, of_plain = (params["blocks"]["layer_0"] for params in (first, other))
    for part, name in (("attention", "query"), ("attention", "out"), ("mlp", "up"), ("mlp", "down")):
        np.testing.assert_allclose(layer[part][name]["kernel"], of_plain[part][name]["kernel"] / 2, rtol=1e-5)
    for name in ("embedding", "head"):
        assert are_leaves_equal(first[name], other[name])
    ones, zeros = (jax.tree.map(like, jax.device_get(first)) for like in (np.ones_like, np.zeros_like))
    moved = update(train_setup.optimizer, ones, first, zeros)
    rate = found.config.optimizer.learning_rate
    for name, leaf in _named(moved).items():
        wanted = rate / 4 if name.endswith("kernel") else rate
        np.testing.assert_allclose(leaf, -wanted, rtol=1e-4, err_msg=name)


@functools.partial(jax.jit, static_argnums=0)
def update(optimizer, gradients, started_with, params):
    """Return what the first step adds to `params`."""
    return optimizer.update(gradients, optimizer.init(started_with), params)[0]


def _named(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


def test_weight_decay_does_not_depend_on_the_width(wide_job):
    found, train_setup, params = wide_job
    moved = update(train_setup.optimizer, jax.tree.map(np.zeros_like, jax.device_get(params)), params, params)
    share = found.config.optimizer.learning_rate * found.config.optimizer.weight_decay
    kernel = params["blocks"]["layer_0"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(moved["blocks"]["layer_0"]["mlp"]["up"]["kernel"], -share * kernel, rtol=1e-4)


@pytest.mark.soak
def test_mup_changes_nothing_at_the_base_width(tmp_path):
    states = [
        train(make_job(tmp_path / str(base), BASE, **{"config.model.base_width": base}), 2)[1] for base in (None, BASE)
    ]
    assert are_leaves_equal(states[0].params, states[1].params)


class CustomOptimizerJob(PretrainDecoder):
    """Job with an optax optimizer."""

    @classmethod
    def optimizer(cls):
        return optax.adam(0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"config.optimizer.name": "lion"},
            r"config.optimizer: base_width=32: mu-P is implemented for adamw, muon, normuon, muonh, not for lion",
        ),
        (
            {"config.optimizer.name": "muon", "config.optimizer.matrices": ["*up.kernel"]},
            r"config.optimizer: matrices: mu-P of base_width=32 has learning rates for muon of all hidden matrices",
        ),
        (
            {"job_class": CustomOptimizerJob},
            r"config.optimizer: a custom optax optimizer does not apply the learning-rate multipliers",
        ),
        (
            {"config.model.moe": {"experts": 4, "experts_per_token": 2}},
            r"base_width=32: mu-P does not scale the matrices that moe adds",
        ),
    ],
    ids=["lion", "matrices", "own", "moe"],
)
def test_unsupported_combinations_are_refused(tmp_path, changes, message):
    with pytest.raises(InvalidError, match=message):
        make_job(tmp_path, 64, **{"config.model.base_width": BASE} | changes).setup_builder.build(jax.devices()[:1])


def test_scaled_logits_are_exported_to_no_family():
    with pytest.raises(InvalidError, match="no family of transformers has this model"):
        DecoderFiles(DecoderConfig(**make_sizes(64, base_width=32)), VOCABULARY, 16).config()
    assert DecoderFiles(DecoderConfig(**make_sizes(64, base_width=64)), VOCABULARY, 16).config()
