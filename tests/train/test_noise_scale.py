"""The gradient-noise scale: the paper's formulas by numpy, on any split of the batch; smoothed in the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runner.errors import InvalidError
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.storage import parse_lines
from runner.train import step as pure
from runner.train.auxiliary import HalfBatchGradients, StepObservation, make_noise_scale
from runner.train.state import TrainState
from tests.support.tiny import gpt, leaves_equal, mesh_of, set_mesh, stop_after
from tests.test_values import TrainLookup

T, R, V = 8, 16, 32
KEY = jax.random.key(0)
DECAY = 0.9


def forward(apply_fn, params, batch, key):
    """Cross entropy of logits by token."""
    logits = params["table"][batch["x"]]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
    return jnp.sum(losses * batch["padding_mask"]), {}


def forward_that_counts(apply_fn, params, batch, key):
    """The same, whose step is told how many tokens there are."""
    loss_sum, _ = forward(apply_fn, params, batch, key)
    return loss_sum, {"token_count": jnp.sum(batch["padding_mask"])}


def rows():
    generator = np.random.default_rng(0)
    found = {"x": generator.integers(0, V, (R, T)), "y": generator.integers(0, V, (R, T))}
    return found | {"padding_mask": np.arange(T) < generator.integers(1, T + 1, (R, 1))}


def state():
    rider, optimizer = make_noise_scale(DECAY), optax.sgd(0.1)
    params = {"table": jax.random.normal(KEY, (V, V))}
    riders = {"noise_scale": rider.init(params)}
    return TrainState(jnp.int32(0), None, params, optimizer, optimizer.init(params), riders=riders)


def expected():
    """McCandlish et al., appendix A.1, from gradients of the sums of each half and of all; halves of n tokens each.

    The paper's halves are of one size. Weighed by their own, these are not, which the estimates of both allow for.
    """
    batch = rows()
    half = {name: leaf.reshape(2, R // 2, T) for name, leaf in batch.items()}
    means = []
    for number in range(2):
        one = {name: jnp.asarray(leaf[number]) for name, leaf in half.items()}
        gradient = jax.grad(lambda params, one=one: forward(None, params, one, None)[0])(state().params)["table"]
        means.append(np.asarray(gradient, np.float64) / one["padding_mask"].sum())
    counts = half["padding_mask"].sum(axis=(1, 2))
    square = np.sum(means[0] * means[1])
    trace = np.mean([count * (np.sum(mean**2) - square) for count, mean in zip(counts, means, strict=True)])
    return square, trace


SPLITS = [(16, None, forward), (2, None, forward_that_counts), (2, (2, 2, 2), forward)]


@pytest.mark.parametrize(
    ("S", "sizes", "run"),
    [
        (2, None, forward),
        (2, (2, 2, 2), forward_that_counts),
        *(pytest.param(*split, marks=pytest.mark.soak) for split in SPLITS),
    ],
)
def test_a_step_has_the_estimates_of_its_halves_whatever_the_split(S, sizes, run):
    batch = {name: jnp.asarray(leaf).reshape(S, R // S, T) for name, leaf in rows().items()}
    rider = make_noise_scale(DECAY)

    def step(state, batch):
        return pure.train_step(run, state, batch, KEY, S, pure.StepOptions(auxiliary_states=[rider]))

    if sizes is None:
        after, _, meta = jax.jit(step)(state(), batch)
    else:
        mesh = mesh_of(*sizes)
        with use_sharding_rules(mesh):
            after, _, meta = jax.jit(step)(state(), jax.device_put(batch, make_batch_sharding(mesh)))
    square, trace = expected()
    np.testing.assert_allclose(after.riders["noise_scale"]["square"], (1 - DECAY) * square, rtol=1e-4)
    np.testing.assert_allclose(after.riders["noise_scale"]["trace"], (1 - DECAY) * trace, rtol=1e-4)
    scale = trace / square if trace / square > 0 else np.nan
    np.testing.assert_allclose(meta["noise_scale"], scale, rtol=1e-3)


def test_of_equal_halves_they_are_the_papers_own():
    """|G|^2 = (B |G_B|^2 - b |G_b|^2) / (B - b) and S = (|G_b|^2 - |G_B|^2) / (1/b - 1/B), with B = 2 b."""
    first, second = np.random.default_rng(1).normal(size=(2, 50)) + 0.3
    b = 40.0
    small, big = np.mean([first @ first, second @ second]), np.sum(((first + second) / 2) ** 2)
    square, trace = (2 * b * big - b * small) / b, (small - big) / (1 / b - 1 / (2 * b))
    found = make_noise_scale(0.0).update(
        {"square": jnp.float32(0), "trace": jnp.float32(0)}, seen(first, second, [b, b])
    )[0]
    np.testing.assert_allclose([found["square"], found["trace"]], [square, trace], rtol=1e-5)


def seen(first, second, counts):
    squares = jnp.asarray([first @ first, second @ second], jnp.float32)
    halves = HalfBatchGradients(squares, jnp.float32(first @ second), jnp.asarray(counts, jnp.float32))
    return StepObservation(jnp.int32(1), {}, {}, halves)


def test_over_many_steps_it_is_the_scale_of_the_noise():
    generator, rider = np.random.default_rng(2), make_noise_scale(0.999)
    true, sigma, counts = np.full(20, 0.1), 2.0, np.array([24, 40])
    own = rider.init({})
    update = jax.jit(lambda own, *halves: rider.update(own, seen(*halves)))
    for _ in range(4000):
        halves = [true + sigma * generator.normal(size=20) / np.sqrt(count) for count in counts]
        own, scalars = update(own, *halves, counts)
    assert float(scalars["noise_scale"]) == pytest.approx(20 * sigma**2 / np.sum(true**2), rel=0.2)


def test_a_half_without_a_token_and_a_gradient_without_a_direction_say_nothing():
    rider = make_noise_scale(0.5)
    own = {"square": jnp.float32(1), "trace": jnp.float32(3)}
    one = np.ones(3)
    after, scalars = rider.update(own, seen(one, 0 * one, [3, 0]))
    assert (after, float(scalars["noise_scale"])) == (own, 3.0)
    _, scalars = rider.update(rider.init({}), seen(one, -one, [3, 3]))
    assert np.isnan(scalars["noise_scale"])


# As a job.

MEASURED = {"config.noise_scale": {"decay": DECAY}, "config.train.total_steps": 5}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("noise")


@pytest.fixture(scope="module")
def whole(directory):
    found = gpt(directory / "whole", TrainLookup, **MEASURED)
    found()
    return found


def scales(job):
    return [row["train/noise_scale"] for row in parse_lines(job.store.read("metrics.jsonl"))]


@pytest.mark.parametrize(
    "split", [{}, pytest.param(set_mesh(2, 2, 2), marks=pytest.mark.soak)], ids=["here", "split otherwise"]
)
def test_stopped_and_resumed_rows_are_those_of_the_whole_run(directory, whole, split):
    name = "elsewhere" if split else "resumed"
    first = gpt(directory / name, TrainLookup, **MEASURED)
    stop_after(first, 2)
    again = gpt(directory / name, TrainLookup, **MEASURED, **split)
    again()
    assert None not in scales(whole)
    if split:
        assert again.compiled.layout.accumulate_steps == whole.compiled.layout.accumulate_steps
        np.testing.assert_allclose(scales(again), scales(whole), rtol=1e-3)
    else:
        assert scales(again) == scales(whole)
        assert again.result() == whole.result()


@pytest.mark.soak
def test_measuring_moves_no_bit_of_the_weights(directory, whole):
    split = {"config.train.micro_batch_examples": 1}
    without = gpt(directory / "without", TrainLookup, **MEASURED | {"config.noise_scale": None} | split)
    without()
    assert leaves_equal(without.state.params, whole.state.params)


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
def test_a_batch_that_has_no_halves_is_refused(tmp_path, changes, line):
    with pytest.raises(InvalidError, match=line):
        gpt(tmp_path / "run", TrainLookup, **MEASURED | changes)()


def test_a_rider_that_sees_halves_needs_an_even_number_of_micro_batches():
    batch = {name: jnp.asarray(leaf)[None] for name, leaf in rows().items()}
    with pytest.raises(InvalidError, match="1 micro-batches; use an even number"):
        pure.train_step(forward, state(), batch, KEY, 1, pure.StepOptions(auxiliary_states=[make_noise_scale(DECAY)]))
