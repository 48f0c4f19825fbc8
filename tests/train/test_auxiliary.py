"""What rides along with the parameters is state: every theorem of the state holds for it, and without it no leaf is."""

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
from tests.support.tiny import gpt, leaves_equal, set_mesh, stop_after
from tests.test_values import TrainLookup


def path_of(params):
    """How far each parameter has gone: the sum of what its gradients were, by their size."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)


def walk(own, seen):
    """One step of it."""
    after = jax.tree.map(lambda far, grad: far + jnp.abs(grad), own, seen.grads)
    return after, {"walked": sum(map(jnp.sum, jax.tree.leaves(after))), "walked_steps": seen.step}


WALK = AuxiliaryState("walk", path_of, walk)
START = AuxiliaryState("start", lambda params: jax.tree.map(jnp.copy, params))
COUNTS = AuxiliaryState("counts", lambda params: {"fired": jnp.zeros(8, jnp.int32)})


class Riding(TrainLookup):
    """A table, how far each of its numbers has gone, where it began, and what the host counts."""

    @classmethod
    def auxiliary_states(cls):
        return *super().auxiliary_states(), WALK, START, COUNTS

    def save_or_stop(self):
        if self.step % 2 == 1:  # as a hook does: between two steps
            counts = {"fired": self.state.riders["counts"]["fired"] + 1}
            self.state = self.state.replace(riders=self.state.riders | {"counts": counts})
        super().save_or_stop()


def job(directory, job_class=Riding, **changes) -> BaseTrainer:
    return gpt(directory, job_class, **{"config.train.total_steps": 5, "checkpoint.every_steps": 2, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("riders")


@pytest.fixture(scope="module")
def whole(directory):
    found = job(directory / "whole")
    found()
    return found


def test_where_nothing_rides_there_is_no_leaf_and_the_parameters_are_those_without(directory, whole):
    without = job(directory / "without", TrainLookup)
    without()
    assert without.state.riders == {}
    names = list_leaf_names(whole.state)
    assert list_leaf_names(without.state) == [name for name in names if not name.startswith("riders.")]
    assert "riders.walk.Embed_0.embedding" in names
    assert leaves_equal(without.state.params, whole.state.params)
    assert leaves_equal(without.state.opt_state, whole.state.opt_state)


def test_they_see_each_step_and_are_replaced_between_two(whole):
    row = parse_lines(whole.store.read("metrics.jsonl"))[-1]
    assert row["train/walked_steps"] == 5
    far = sum(float(np.sum(leaf)) for leaf in jax.tree.leaves(whole.state.riders["walk"]))
    assert row["train/walked"] == pytest.approx(far, rel=1e-5)
    assert far > 0
    assert whole.state.riders["counts"]["fired"].tolist() == [3] * 8


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(set_mesh(2, 4, 1), marks=pytest.mark.soak)], ids=["here", "on another mesh"]
)
def test_stopped_and_resumed_they_have_the_bits_of_the_whole_run(directory, whole, mesh):
    name = "elsewhere" if mesh else "resumed"
    first = job(directory / name)
    stop_after(first, 3)
    again = job(directory / name, **mesh)
    again()
    assert leaves_equal(again.state.riders["start"], whole.state.riders["start"])
    assert leaves_equal(again.state.riders["counts"], whole.state.riders["counts"])
    if not mesh:
        assert again.result() == whole.result()


def test_what_is_shaped_like_a_parameter_lies_as_that_and_all_else_is_everywhere(directory, whole):
    sharded = job(directory / "sharded", **set_mesh(2, 2, 2))
    sharded.setup(Hosts.single_process())
    for state in (sharded.abstract_state(), sharded.init_state()):
        table = state.params["Embed_0"]["embedding"].sharding
        assert not table.is_fully_replicated
        assert state.riders["walk"]["Embed_0"]["embedding"].sharding == table
        assert state.riders["counts"]["fired"].sharding.is_fully_replicated
    assert compute_fingerprint(sharded.init_state()) == compute_fingerprint(whole.train_setup.init_state())


def test_weights_of_another_run_are_what_they_begin_from(directory, whole):
    warm = job(directory / "warm", **{"checkpoint.init_from": str(directory / "whole"), "config.train.total_steps": 3})
    warm()
    assert leaves_equal(warm.state.riders["start"], whole.state.params)


def test_a_rider_that_the_checkpoints_lack_is_refused_by_its_leaves(directory):
    class More(Riding):
        @classmethod
        def auxiliary_states(cls):
            return *super().auxiliary_states(), AuxiliaryState("more", lambda params: jnp.zeros(()))

    first = job(directory / "fewer")
    stop_after(first, 1)
    with pytest.raises(InvalidError, match=r"riders\.more: checkpoint has nothing, the job float32"):
        job(directory / "fewer", More)()


def test_two_of_one_name_are_refused():
    with pytest.raises(InvalidError, match="2 auxiliary states of the job are called 'walk'"):
        init_auxiliary([WALK, WALK], {})
