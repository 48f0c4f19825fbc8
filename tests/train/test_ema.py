"""Exponential moving averages of the weights: recurrence, sharding, resume, evaluation and loading by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner import open_checkpoint
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.config import EmaConfig
from runner.errors import InvalidError
from runner.plan.report import make_state_section
from runner.storage import parse_lines
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, make_mesh_options, stop_after
from tests.test_values import TrainLookup

DECAYS = [0.5, 0.9]
EMA = {"config.ema.decays": DECAYS, "config.ema.evaluate": True, "config.optimizer.learning_rate": 0.1}
EMA |= {"config.train.total_steps": 6, "config.schedule": {}, "checkpoint.every_steps": 1, "checkpoint.keep_last": 10}


def job(directory, job_class=TrainLookup, **changes):
    return make_gpt(directory, job_class, **EMA | changes)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("ema")


@pytest.fixture(scope="module")
def uninterrupted(directory):
    found = job(directory / "whole")
    found()
    return found


def compute_average(params, decay):
    """Compute the average with NumPy from the initial parameters and those after each step."""
    average = params[0].astype(np.float32)
    for param in params[1:]:
        average = np.float32(decay) * average + np.float32(1 - decay) * param.astype(np.float32)
    return average


def test_averages_follow_the_recurrence_over_all_steps(uninterrupted):
    def table(step):
        return np.asarray(open_checkpoint(uninterrupted.store.root, step)[0]["params"]["Embed_0"]["embedding"])

    first = uninterrupted.train_setup.init_state().params["Embed_0"]["embedding"]
    params = [np.asarray(first), *map(table, range(1, 7))]
    for decay in DECAYS:
        found = open_checkpoint(uninterrupted.store.root, weights=f"ema_{decay}")[0]["params"]["Embed_0"]["embedding"]
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, compute_average(params, decay), rtol=1e-5, atol=1e-6)
        assert np.abs(found - params[-1]).max() > 0.01


def test_averages_are_evaluated_beside_the_weights(uninterrupted):
    row = parse_lines(uninterrupted.store.read("metrics.jsonl"))[-1]
    losses = [row["val/loss"], *(row[f"val/ema_{decay}/loss"] for decay in DECAYS)]
    assert losses == sorted(losses)  # all weights still improve, the slower the higher the decay
    assert len(set(losses)) == 3


@pytest.mark.soak
def test_averages_leave_training_bit_identical(directory, uninterrupted):
    without = job(directory / "without", **{"config.ema": None})
    without()
    assert without.state.riders == {}
    assert are_leaves_equal(without.state.params, uninterrupted.state.params)
    assert are_leaves_equal(without.state.opt_state, uninterrupted.state.opt_state)


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(make_mesh_options(4, 2, 1), marks=pytest.mark.soak)], ids=["here", "on another mesh"]
)
def test_resumed_averages_equal_those_of_an_uninterrupted_run(directory, uninterrupted, mesh):
    name = "elsewhere" if mesh else "resumed"
    first = job(directory / name)
    stop_after(first, 3)
    again = job(directory / name, **mesh)
    again()
    if mesh:
        for leaf, other in zip(*map(jax.tree.leaves, (again.state.riders, uninterrupted.state.riders)), strict=True):
            assert not leaf.sharding.is_fully_replicated
            np.testing.assert_allclose(leaf, other, rtol=1e-5, atol=1e-6)
    else:
        assert again.result() == uninterrupted.result()


@pytest.mark.soak
def test_averages_of_bfloat16_parameters_are_float32(directory):
    narrow = job(directory / "narrow", **{"config.precision.params": "bfloat16", "config.train.total_steps": 2})
    narrow()
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.state.riders)} == {jnp.dtype("float32")}
    row = parse_lines(narrow.store.read("metrics.jsonl"))[-1]
    assert row["val/ema_0.9/loss"] > row["val/loss"]


@pytest.mark.soak
def test_averages_start_from_loaded_weights(directory, uninterrupted):
    changes = {"checkpoint.init_from": str(uninterrupted.store.root), "config.optimizer.learning_rate": 1e-12}
    warm = job(directory / "warm", **changes, **{"config.train.total_steps": 1, "config.ema.evaluate": False})
    warm()
    (average, *_) = jax.tree.leaves(warm.state.riders["ema"]["0.9"])
    np.testing.assert_allclose(average, uninterrupted.state.params["Embed_0"]["embedding"], rtol=1e-6)


def make_job_from_average(directory, whole, name, decay, **changes):
    """Return a one-step job initialised from an average of another run."""
    source = {"path": str(whole.store.root), "weights": f"ema_{decay}"}
    begun = {"checkpoint.init_from": source, "config.train.total_steps": 1, "config.ema": None, "config.eval": {}}
    return job(directory / name, **begun | changes)


@pytest.mark.soak
def test_a_run_can_start_from_an_average_of_another_run(directory, uninterrupted):
    found = make_job_from_average(directory, uninterrupted, "begun", 0.9, **{"config.optimizer.learning_rate": 1e-12})
    found()
    average = open_checkpoint(uninterrupted.store.root, weights="ema_0.9")[0]["params"]
    (event,) = [each for each in parse_lines(found.store.read("events.jsonl")) if each["event"] == "init"]
    first = found.train_setup.init_state()
    begun = first.replace(params=jax.device_put(average, jax.tree.map(lambda leaf: leaf.sharding, first.params)))
    assert event["fingerprint"] == compute_fingerprint(begun)
    assert not are_leaves_equal(average, uninterrupted.state.params)
    narrow = make_job_from_average(
        directory, uninterrupted, "begun_narrow", 0.9, **{"config.precision.params": "bfloat16"}
    )
    narrow()
    assert {leaf.dtype for leaf in jax.tree.leaves(narrow.state.params)} == {jnp.dtype("bfloat16")}


def test_init_from_an_unknown_average_lists_the_available_ones(directory, uninterrupted):
    with pytest.raises(InvalidError, match=r"init_from: got weights 'ema_0.99', has params, ema_0.5, ema_0.9; needs"):
        make_job_from_average(directory, uninterrupted, "refused", 0.99)()


def test_a_run_without_averages_cannot_resume_with_averages(directory):
    first = job(directory / "later", **{"config.ema": None})
    stop_after(first, 1)
    with pytest.raises(InvalidError, match=r"config\.ema"):
        job(directory / "later")()


@pytest.mark.parametrize(
    ("decays", "line"),
    [
        ([1.0], "got a decay of 1; use numbers above 0 and below 1"),
        ([0.0], "got a decay of 0; use"),
        ([0.9, 0.90], "got the decay 0.9 twice"),
        ([], "at least 1 item"),
    ],
)
def test_invalid_decays_are_rejected(decays, line):
    with pytest.raises(ValueError, match=line):
        EmaConfig(decays=decays)


def test_opening_an_unknown_average_lists_the_available_ones(uninterrupted):
    with pytest.raises(InvalidError, match=r"got weights 'ema_0\.99', has params, ema_0\.5, ema_0\.9; needs one"):
        open_checkpoint(uninterrupted.store.root, weights="ema_0.99")


def test_evaluating_averages_without_validation_data_is_rejected(directory):
    with pytest.raises(InvalidError, match=r"ema\.evaluate: there is no validation set"):
        job(directory / "blind", **{"config.data.validation_fraction": 0.0})


def test_a_custom_train_step_that_skips_the_averages_is_rejected(directory):
    class Own(TrainLookup):
        @classmethod
        def train_step(cls, state, batch, key, accumulate_steps):
            after, loss, meta = super().train_step(state, batch, key, accumulate_steps)
            return after.replace(riders=state.riders), loss, meta

    with pytest.raises(InvalidError, match=r"train_step of the job leaves riders\.ema as it is"):
        job(directory / "own", Own)()


def test_the_plan_counts_the_averages(directory):
    section = make_state_section(job(directory / "plan").setup_builder.build(jax.devices()).abstract_state)
    assert section["rider ema bytes"] == 2 * section["parameter bytes"]
