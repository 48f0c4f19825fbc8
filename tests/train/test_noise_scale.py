"""Gradient-noise scale: it matches the paper's formulas for any split of the batch; the state holds its average."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runner.errors import InvalidError
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.storage import parse_lines
from runner.train import step as pure
from runner.train.auxiliary import HalfBatchGradients, StepObservation
from runner.train.features.noise_scale import make_noise_scale
from runner.train.state import TrainState
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh, make_gpt, make_mesh_options, stop_after
from tests.test_values import TrainLookup

T, R, V = 8, 16, 32
KEY = jax.random.key(0)
DECAY = 0.9


def forward(apply_fn, params, batch, key):
    """Return the cross-entropy sum of logits looked up by token."""
    logits = params["table"][batch["x"]]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.sum(losses * batch["padding_mask"]), {}


def forward_with_token_count(apply_fn, params, batch, key):
    """Return the same loss together with its token count."""
    loss_sum, _ = forward(apply_fn, params, batch, key)
    return loss_sum, {"token_count": jnp.sum(batch["padding_mask"])}


def make_rows():
    generator = np.random.default_rng(0)
    found = {"x": generator.integers(0, V, (R, T)), "y": generator.integers(0, V, (R, T))}
    return found | {"padding_mask": np.arange(T) < generator.integers(1, T + 1, (R, 1))}


def make_state():
    rider, optimizer = make_noise_scale(DECAY), optax.sgd(0.1)
    params = {"table": jax.random.normal(KEY, (V, V))}
    riders = {"noise_scale": rider.init(params)}
    return TrainState(jnp.int32(0), None, params, optimizer, optimizer.init(params), riders=riders)


def estimate_by_numpy():
    """Return the estimates of McCandlish et al., appendix A.1, from the gradients of two halves and of the whole batch.

    The halves have different numbers of tokens and are weighted by them, unlike the paper's halves of equal size.
    """
    batch = make_rows()
    half = {name: leaf.reshape(2, R // 2, T) for name, leaf in batch.items()}
    means = []
    for number in range(2):
        one = {name: jnp.asarray(leaf[number]) for name, leaf in half.items()}
        gradient = jax.grad(lambda params, one=one: forward(None, params, one, None)[0])(make_state().params)["table"]
        means.append(np.asarray(gradient, np.float64) / one["padding_mask"].sum())
    counts = half["padding_mask"].sum(axis=(1, 2))
    square = np.sum(means[0] * means[1])
    trace = np.mean([count * (np.sum(mean**2) - square) for count, mean in zip(counts, means, strict=True)])
    return square, trace


SPLITS = [(16, None, forward), (2, None, forward_with_token_count), (2, (2, 2, 2), forward)]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("S", "sizes", "run"),
    [
        (2, None, forward),
        (2, (2, 2, 2), forward_with_token_count),
        *(pytest.param(*split, marks=pytest.mark.soak) for split in SPLITS),
    ],
)
def test_estimates_do_not_depend_on_the_split_of_the_batch(S, sizes, run):
    batch = {name: jnp.asarray(leaf).reshape(S, R // S, T) for name, leaf in make_rows().items()}
    rider = make_noise_scale(DECAY)

    def step(state, batch):
        return pure.train_step(run, state, batch, KEY, S, pure.StepOptions(auxiliary_states=[rider]))

    if sizes is None:
        after, _, meta = jax.jit(step)(make_state(), batch)
    else:
        mesh = make_full_mesh(*sizes)
        with use_sharding_rules(mesh):
            after, _, meta = jax.jit(step)(make_state(), jax.device_put(batch, make_batch_sharding(mesh)))
    square, trace = estimate_by_numpy()
    np.testing.assert_allclose(after.riders["noise_scale"]["square"], (1 - DECAY) * square, rtol=1e-4)
    np.testing.assert_allclose(after.riders["noise_scale"]["trace"], (1 - DECAY) * trace, rtol=1e-4)
    scale = trace / square if trace / square > 0 else np.nan
    np.testing.assert_allclose(meta["noise_scale"], scale, rtol=1e-3)


def test_estimates_of_equal_halves_match_the_paper():
    """|G|^2 = (B |G_B|^2 - b |G_b|^2)
    (B - b) and S = (|G_b|^2 - |G_B|^2)
    (1/b - 1/B), with B = 2 b.
    """
    first, second = np.random.default_rng(1).normal(size=(2, 50)) + 0.3
    b = 40.0
    small, big = np.mean([first @ first, second @ second]), np.sum(((first + second) / 2) ** 2)
    square, trace = (2 * b * big - b * small) / b, (small - big) / (1 / b - 1 / (2 * b))
    found = make_noise_scale(0.0).update(
        {"square": jnp.float32(0), "trace": jnp.float32(0)}, make_observation(first, second, [b, b])
    )[0]
    np.testing.assert_allclose([found["square"], found["trace"]], [square, trace], rtol=1e-5)


def make_observation(first, second, counts):
    squares = jnp.asarray([first @ first, second @ second], jnp.float32)
    halves = HalfBatchGradients(squares, jnp.float32(first @ second), jnp.asarray(counts, jnp.float32))
    return StepObservation(jnp.int32(1), {}, {}, jnp.float32(0), {}, halves)


def test_the_average_converges_to_the_true_noise_scale():
    generator, rider = np.random.default_rng(2), make_noise_scale(0.999)
    true, sigma, counts = np.full(20, 0.1), 2.0, np.array([24, 40])
    own = rider.init({})
    update = jax.jit(lambda own, *halves: rider.update(own, make_observation(*halves)))
    for _ in range(4000):
        halves = [true + sigma * generator.normal(size=20) / np.sqrt(count) for count in counts]
        own, scalars = update(own, *halves, counts)
    assert float(scalars["noise_scale"]) == pytest.approx(20 * sigma**2 / np.sum(true**2), rel=0.2)


def test_an_empty_half_and_a_zero_gradient_give_no_estimate():
    rider = make_noise_scale(0.5)
    own = {"square": jnp.float32(1), "trace": jnp.float32(3)}
    one = np.ones(3)
    after, scalars = rider.update(own, make_observation(one, 0 * one, [3, 0]))
    assert (after, float(scalars["noise_scale"])) == (own, 3.0)
    _, scalars = rider.update(rider.init({}), make_observation(one, -one, [3, 3]))
    assert np.isnan(scalars["noise_scale"])


# Whole jobs.

MEASURED = {"config.noise_scale": {"decay": DECAY}, "config.train.total_steps": 5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("noise")


@pytest.fixture(scope="module")
def uninterrupted(directory):
    found = make_gpt(directory / "whole", TrainLookup, **MEASURED)
    found()
    return found


def read_scales(job):
    return [row["train/noise_scale"] for row in parse_lines(job.store.read("metrics.jsonl"))]


@pytest.mark.parametrize(
    "split", [{}, pytest.param(make_mesh_options(2, 2, 2), marks=pytest.mark.soak)], ids=["here", "split otherwise"]
)
def test_resumed_rows_equal_those_of_an_uninterrupted_run(directory, uninterrupted, split):
    name = "elsewhere" if split else "resumed"
    first = make_gpt(directory / name, TrainLookup, **MEASURED)
    stop_after(first, 2)
    again = make_gpt(directory / name, TrainLookup, **MEASURED, **split)
    again()
    assert None not in read_scales(uninterrupted)
    if split:
        assert again.compiled.layout.accumulate_steps == uninterrupted.compiled.layout.accumulate_steps
        np.testing.assert_allclose(read_scales(again), read_scales(uninterrupted), rtol=1e-3)
    else:
        assert read_scales(again) == read_scales(uninterrupted)
        assert again.result() == uninterrupted.result()


@pytest.mark.soak
def test_measuring_leaves_the_weights_bit_identical(directory, uninterrupted):
    split = {"config.train.micro_batch_examples": 1}
    without = make_gpt(directory / "without", TrainLookup, **MEASURED | {"config.noise_scale": None} | split)
    without()
    assert are_leaves_equal(without.state.params, uninterrupted.state.params)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {"config.train.global_batch_examples": 8},
            "8 examples over 8 devices, .* make 1; use multiples of 16 examples",
        ),
        ({"config.train.micro_batch_examples": 2}, "micro_batch_examples=2 make 1; use micro_batch_examples=1"),
    ],
)
def test_a_batch_without_two_halves_is_rejected(tmp_path, changes, line):
    with pytest.raises(InvalidError, match=line):
        make_gpt(tmp_path / "run", TrainLookup, **MEASURED | changes)()


def test_the_noise_scale_needs_an_even_number_of_micro_batches():
    batch = {name: jnp.asarray(leaf)[None] for name, leaf in make_rows().items()}
    with pytest.raises(InvalidError, match="1 micro-batches; use an even number"):
        pure.train_step(
            forward, make_state(), batch, KEY, 1, pure.StepOptions(auxiliary_states=[make_noise_scale(DECAY)])
        )
