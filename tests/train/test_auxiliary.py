"""Auxiliary train state: it is saved, restored and sharded like the parameters, and without it there are no leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner import BaseTrainer
from runner.checkpoint.fingerprint import compute_fingerprint, list_leaf_names
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.storage import parse_lines
from runner.train.auxiliary import AuxiliaryState, init_auxiliary
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, make_mesh_options, stop_after
from tests.test_values import TrainLookup


def init_path_lengths(params):
    """Return zeros of the shape of each parameter, to sum the absolute gradients in."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def add_step(own, seen):
    """Add the absolute gradients of one step."""
    after = jax.tree.map(lambda far, grad: far + jnp.abs(grad), own, seen.grads)
    return after, {"walked": sum(map(jnp.sum, jax.tree.leaves(after))), "walked_steps": seen.step}


PATH_LENGTHS = AuxiliaryState("walk", init_path_lengths, add_step)
START = AuxiliaryState("start", lambda params: jax.tree.map(jnp.copy, params))
COUNTS = AuxiliaryState("counts", lambda params: {"fired": jnp.zeros(8, jnp.int32)})


class TrainAuxiliary(TrainLookup):
    """A lookup-table job with auxiliary states: path lengths, initial parameters, and counters set by the host."""

    @classmethod
    def auxiliary_states(cls):
        return *super().auxiliary_states(), PATH_LENGTHS, START, COUNTS

    def save_or_stop(self):
        if self.step % 2 == 1:  # between two steps, as a hook does
            counts = {"fired": self.state.riders["counts"]["fired"] + 1}
            self.state = self.state.replace(riders=self.state.riders | {"counts": counts})
        super().save_or_stop()


def job(directory, job_class=TrainAuxiliary, **changes) -> BaseTrainer:
    return make_gpt(directory, job_class, **{"config.train.total_steps": 5, "checkpoint.every_steps": 2, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("riders")


@pytest.fixture(scope="module")
def uninterrupted(directory):
    found = job(directory / "whole")
    found()
    return found


def test_auxiliary_states_add_leaves_and_leave_parameters_unchanged(directory, uninterrupted):
    without = job(directory / "without", TrainLookup)
    without()
    assert without.state.riders == {}
    names = list_leaf_names(uninterrupted.state)
    assert list_leaf_names(without.state) == [name for name in names if not name.startswith("riders.")]
    assert "riders.walk.Embed_0.embedding" in names
    assert are_leaves_equal(without.state.params, uninterrupted.state.params)
    assert are_leaves_equal(without.state.opt_state, uninterrupted.state.opt_state)


def test_auxiliary_states_see_each_step_and_can_be_replaced_between_steps(uninterrupted):
    row = parse_lines(uninterrupted.store.read("metrics.jsonl"))[-1]
    assert row["train/walked_steps"] == 5
    far = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(uninterrupted.state.riders["walk"]))
    assert row["train/walked"] == pytest.approx(far, rel=1e-5)
    assert far > 0
    assert uninterrupted.state.riders["counts"]["fired"].tolist() == [3] * 8


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(make_mesh_options(2, 4, 1), marks=pytest.mark.soak)], ids=["here", "on another mesh"]
)
def test_resumed_auxiliary_states_are_bit_identical(directory, uninterrupted, mesh):
    name = "elsewhere" if mesh else "resumed"
    first = job(directory / name)
    stop_after(first, 3)
    again = job(directory / name, **mesh)
    again()
    assert are_leaves_equal(again.state.riders["start"], uninterrupted.state.riders["start"])
    assert are_leaves_equal(again.state.riders["counts"], uninterrupted.state.riders["counts"])
    if not mesh:
        assert again.result() == uninterrupted.result()


def test_parameter_shaped_states_are_sharded_and_others_replicated(directory, uninterrupted):
    sharded = job(directory / "sharded", **make_mesh_options(2, 2, 2))
    sharded.setup(Hosts.single_process())
    for state in (sharded.abstract_state(), sharded.init_state()):
        table = state.params["Embed_0"]["embedding"].sharding
        assert not table.is_fully_replicated
        assert state.riders["walk"]["Embed_0"]["embedding"].sharding == table
        assert state.riders["counts"]["fired"].sharding.is_fully_replicated
    assert compute_fingerprint(sharded.init_state()) == compute_fingerprint(uninterrupted.train_setup.init_state())


def test_auxiliary_states_are_initialised_from_loaded_weights(directory, uninterrupted):
    warm = job(directory / "warm", **{"checkpoint.init_from": str(directory / "whole"), "config.train.total_steps": 3})
    warm()
    assert are_leaves_equal(warm.state.riders["start"], uninterrupted.state.params)


def test_a_state_missing_from_the_checkpoint_is_rejected_with_its_leaves(directory):
    class More(TrainAuxiliary):
        @classmethod
        def auxiliary_states(cls):
            return *super().auxiliary_states(), AuxiliaryState("more", lambda params: jnp.zeros(()))

    first = job(directory / "fewer")
    stop_after(first, 1)
    with pytest.raises(InvalidError, match=r"riders\.more: checkpoint has nothing, the job float32"):
        job(directory / "fewer", More)()


def test_duplicate_state_names_are_rejected():
    with pytest.raises(InvalidError, match="2 auxiliary states of the job are called 'walk'"):
        init_auxiliary([PATH_LENGTHS, PATH_LENGTHS], {})
