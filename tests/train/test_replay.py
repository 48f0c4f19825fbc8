"""Replayed steps: faults of one simulated device are found and named, and without a fault nothing changes."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from jax import lax

from runner.errors import DeviceError, InvalidError
from runner.history.hosts import read_hosts
from runner.parallel.mesh import BATCH_AXES
from runner.storage import LocalStore, read_log
from runner.train.replay import find_faulty_groups
from runner.trainer import BaseTrainer
from tests.support.job_process import Job
from tests.support.tiny_jobs import get_job_name, make_gpt, make_gpt_document, read_outcome, stop_after
from tests.test_values import TrainLookup

STEPS, EVERY_STEPS = 12, 4
BASE: dict[str, Any] = {
    "config.train": {"total_steps": STEPS, "global_batch_examples": 16, "micro_batch_examples": 1},
    "config.train.replay_every_steps": EVERY_STEPS,
    "checkpoint.every_steps": 2,
}
MESHES: dict[str, dict[str, Any]] = {
    "data": {"topology.mesh": {"data": 8}},
    "two devices share a shard": {"topology.mesh": {"data": 4, "fsdp": 2}},
    "two shards": {"topology.mesh": {"data": 2, "fsdp": 4}},
    "one shard": {"topology.mesh": {"data": 1, "fsdp": 8}},
    "same bits": {"topology.mesh": {"data": 8}, "config.train.same_bits_devices": 8},
    "same bits, sharded parameters": {"topology.mesh": {"data": 2, "fsdp": 4}, "config.train.same_bits_devices": 8},
}


FAULTY_PLACE = "TEST_REPLAY_FAULTY_PLACE"  # of the processes of a job


class Fault:
    """Fault of one simulated device, as the step's program has it.

    Attributes:
        place: index of the device, or of the group of devices, among those that compute shards apart; -1: none is
            faulty.
        calls: numbers of the micro-batches, counted from the first that the faulty device computes, whose gradients
            are wrong; None: all. Needs a mesh on which each device computes a shard.
        count: micro-batches that the faulty device has computed.
    """

    place = int(os.environ.get(FAULTY_PLACE, -1))
    calls: range | None = None
    count = 0


def find_flag(place: np.ndarray, example: np.ndarray) -> np.ndarray:
    assert Fault.calls is not None
    # Every device calls this on a thread of its own, and only that of the faulty one may count.
    if int(place) != Fault.place:
        return np.uint32(0)
    Fault.count += 1
    return np.uint32(Fault.count - 1 in Fault.calls)


@jax.custom_vjp
def corrupt(values: jax.Array, flag: jax.Array) -> jax.Array:
    """Return the values; one bit of the gradient is flipped if the flag is 1."""
    return values


def _corrupt_gradient(flag: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    words, first = lax.bitcast_convert_type(grad, jnp.uint32), (0,) * grad.ndim
    # A flip of a low bit of 0 would make a number so small that CPUs take it for 0.
    return lax.bitcast_convert_type(words.at[first].set(words[first] ^ (flag << 27)), jnp.float32), None


corrupt.defvjp(lambda values, flag: (values, flag), _corrupt_gradient)


def find_place() -> jax.Array:
    for axes in (BATCH_AXES, ("data",)):
        try:
            return lax.axis_index(axes)
        except NameError:
            continue
    return jnp.int32(0)


class FaultyLookup(TrainLookup):
    """Lookup-table job whose gradient of one parameter is wrong on a faulty device."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        if key is None or Fault.place < 0:
            return super().forward(apply_fn, params, batch, key)
        place = find_place()
        flag = jnp.uint32(place == Fault.place)
        if Fault.calls is not None:
            # The example keeps XLA from calling it once for all micro-batches.
            flag = jax.pure_callback(find_flag, jax.ShapeDtypeStruct((), jnp.uint32), place, batch["example"][0])
        first, *others = jax.tree.leaves(params)
        params = jax.tree.unflatten(jax.tree.structure(params), [corrupt(first, flag), *others])
        return super().forward(apply_fn, params, batch, key)


@pytest.fixture(autouse=True)
def fault() -> Iterator[type[Fault]]:
    yield Fault
    Fault.place, Fault.calls, Fault.count = -1, None, 0


def make_job(directory: Path, **changes: Any) -> BaseTrainer:
    return make_gpt(directory, FaultyLookup, **BASE | changes)


DAILY_MESHES = ("same bits",)
DAILY_FAULTS = (("same bits", 5),)


@pytest.mark.parametrize(
    "mesh", [pytest.param(mesh, marks=() if mesh in DAILY_MESHES else pytest.mark.soak) for mesh in MESHES]
)
def test_replays_change_no_bit(mesh: str, tmp_path: Path) -> None:
    make_job(tmp_path / "replayed", **MESHES[mesh])()
    make_job(tmp_path / "plain", **MESHES[mesh] | {"config.train.replay_every_steps": None})()
    assert read_outcome(tmp_path / "replayed") == read_outcome(tmp_path / "plain")


# A fault.

# Devices that are named, by the place of the faulty one.
NAMED: dict[str, dict[int, list[int]]] = {
    "data": {0: [0], 5: [5], 7: [7]},
    "two devices share a shard": {3: [6, 7]},
    "two shards": {1: [*range(8)]},
    "same bits": {5: [5]},
    "same bits, sharded parameters": {6: [6]},
}
PERSISTENT = [(mesh, place) for mesh, places in NAMED.items() for place in places]


def expect_fault(job: BaseTrainer) -> dict[str, Any]:
    """Run a job that ends with a fault, and return the event that it writes."""
    with pytest.raises(DeviceError, match="differs when it is computed again"):
        job()
    return [event for event in read_log(job.store, "events") if event["event"] == "device_fault"][-1]


@pytest.mark.parametrize(
    ("mesh", "place"),
    [pytest.param(*fault, marks=() if fault in DAILY_FAULTS else pytest.mark.soak) for fault in PERSISTENT],
)
def test_a_defective_device_is_named_and_its_updates_are_lost(mesh: str, place: int, tmp_path: Path) -> None:
    stop_after(make_job(tmp_path / "run", **MESHES[mesh]), 5)
    Fault.place = place
    event = expect_fault(make_job(tmp_path / "run", **MESHES[mesh]))
    assert (event["step"], event["verified"], event["devices"]) == (6, 5, NAMED[mesh][place])
    assert event["parameters"] == ["Embed_0.embedding"]
    Fault.place = -1
    make_job(tmp_path / "run", **MESHES[mesh])()
    make_job(tmp_path / "undisturbed", **MESHES[mesh])()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "undisturbed")


@pytest.mark.soak
@pytest.mark.parametrize("mesh", ["data", pytest.param("same bits", marks=pytest.mark.soak)])
def test_a_fault_that_begins_later_is_found_within_the_interval(mesh: str, tmp_path: Path) -> None:
    # From step 7 on: steps 1 and 4 are computed twice, and each step has two micro-batches on a device.
    Fault.place, Fault.calls = 2, range(2 * 8, 10**6)
    event = expect_fault(make_job(tmp_path / "run", **MESHES[mesh]))
    assert (event["step"], event["verified"], event["devices"]) == (8, 4, [2])
    # The checkpoint of step 6 could hold wrong updates of steps 5 and 6.
    names = LocalStore(tmp_path / "run").list_names
    assert (sorted(names("checkpoints")), sorted(names("quarantine"))) == (["2", "4"], ["6.1"])
    # The program of a job without the fault could have other bits.
    Fault.calls = range(0)
    make_job(tmp_path / "run", **MESHES[mesh])()
    make_job(tmp_path / "undisturbed", **MESHES[mesh])()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "undisturbed")


@pytest.mark.soak
def test_no_state_of_the_fast_tier_survives_that_may_hold_wrong_updates(tmp_path: Path) -> None:
    tier = {"checkpoint.local_directory": str(tmp_path / "local"), "checkpoint.local_every_steps": 1}
    Fault.place, Fault.calls = 2, range(2 * 8, 10**6)
    assert expect_fault(make_job(tmp_path / "run", **MESHES["data"] | tier))["verified"] == 4
    Fault.calls = range(0)
    job = make_job(tmp_path / "run", **MESHES["data"] | tier)
    job()
    assert [event["step"] for event in read_log(job.store, "events") if event["event"] == "restore"] == [4]


@pytest.mark.daily(1)
@pytest.mark.parametrize("number", range(2))
def test_the_third_computation_decides_between_two(number: int, tmp_path: Path) -> None:
    # One wrong micro-batch in one of the two computations of step 4, after those of steps 1 (twice), 2 and 3.
    Fault.place, Fault.calls = 6, range(2 * (4 + number), 2 * (4 + number) + 1)
    event = expect_fault(make_job(tmp_path / "run", **MESHES["data"]))
    assert (event["step"], event["devices"]) == (4, [6])


@pytest.mark.parametrize("num_groups", range(1, 6))
def test_the_group_is_found_among_those_that_disagree(num_groups: int) -> None:
    right = np.arange(3 * num_groups, dtype=np.uint32).reshape(num_groups, 3)
    for faulty in range(num_groups):
        for wrong in ([0], [1], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
            digests = [right.copy() for _ in range(3)]
            for shift in wrong:
                digests[shift][(faulty - shift) % num_groups] += 1 + shift * (num_groups == 1)
            found = find_faulty_groups(digests)
            assert faulty in found
            assert num_groups < 3 or found == [faulty]


def test_a_train_step_of_the_job_must_return_digests(tmp_path: Path) -> None:
    class OwnStep(TrainLookup):
        @classmethod
        def train_step(cls, state: Any, batch: Any, key: Any, accumulate_steps: int) -> Any:
            state, loss, meta = super().train_step(state, batch, key, accumulate_steps)
            return state, loss, {"grad_norm": meta["grad_norm"]}

    with pytest.raises(InvalidError, match="train_step of the job does not call it"):
        make_gpt(tmp_path / "run", OwnStep, **BASE)()


@pytest.mark.soak
def test_two_processes_end_at_the_same_step_and_name_the_defective_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steady = {"config.schedule": {"name": "constant", "warmup_steps": 1}, "job": get_job_name(FaultyLookup)}
    document = make_gpt_document(tmp_path / "run", **BASE | steady)
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(document))
    job = Job(str(spec), tmp_path / "run", devices=2)
    job.with_options("config.train.total_steps=5").launch(2).expect(0)
    monkeypatch.setenv(FAULTY_PLACE, "3")
    attempt = job.launch(2)
    attempt.expect(76)
    assert "(process 1) is defective; the update was not applied" in attempt.output
    (event,) = job.events("device_fault")
    assert (event["step"], len(event["devices"]), event["processes"]) == (6, 1, [1])
    monkeypatch.delenv(FAULTY_PLACE)
    job.launch(2).expect(0)
    Job(str(spec), tmp_path / "whole", devices=2).launch(2).expect(0)
    # The shorter run was evaluated at its end, so the rows differ.
    assert read_outcome(tmp_path / "run")[1] == read_outcome(tmp_path / "whole")[1]


def test_a_defective_host_is_named_to_the_scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_FAULTY_HOSTS", str(tmp_path / "faulty"))
    monkeypatch.setenv("SLURMD_NODENAME", "node-7")
    Fault.place = 3
    expect_fault(make_job(tmp_path / "run", **MESHES["data"]))
    assert (tmp_path / "faulty").read_text() == "node-7\n"
    (record,) = read_hosts(LocalStore(tmp_path / "run"), "run")
    assert (record.name, record.counts) == ("node-7", {"device_fault": 1})
    assert (len(record.incidents[0].devices), record.is_suspect(time.time())) == (1, True)
