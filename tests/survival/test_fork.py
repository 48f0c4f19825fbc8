"""Forks without changes have the bits and rows of their parent: over kills, stores, processes, devices and features.

A parent is a run with checkpoints at `STEP` and later. Its fork begins at `STEP` and must end as it did.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.cloud_job import CloudJob, assert_verified, make_unique_name
from tests.support.job_process import (
    Job,
    Phase,
    compiling,
    has_state,
    just_committed,
    make_uninterrupted_run,
    saving,
    start_up,
)
from tests.support.object_stores import BACKENDS, Backend, start_backend
from tests.survival.test_kill import storm
from tests.survival.test_same_bits import OPTIONS as SAME_BITS_OPTIONS

pytestmark = pytest.mark.soak

GPT, COUNTER = "specs/gpt_nano.yaml", "specs/counter.yaml"
STEP = 8
# A bucket leaves out saves that fall due while another is in progress, so all of the others are kept.
SHORT = (
    "config.total_steps=40",
    "config.step_seconds=0.1",
    "config.width=100000",
    "checkpoint={every_steps: 4, keep_last: 99}",
)
SAVES = ("checkpoint.every_steps=4", f"checkpoint.keep_every_steps={STEP}")
# 30 steps after the fork.
NANO = (
    "config.train.total_steps=38",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.eval={every_steps: 10, batches: 2}",
    "logging.every_steps=3",
    *SAVES,
)
CUT = "topology.mesh={data: 1, fsdp: auto, tensor: 1}"
AnyJob = Job | CloudJob


def name_parent(parent: AnyJob, step: int | str = STEP) -> str:
    return f"checkpoint.fork_from={{run: '{parent.directory}', step: {step}}}"


def make_fork(parent: Job, directory: Path, *options: str) -> Job:
    kept = tuple(option for option in parent.options if not option.startswith("checkpoint.init_from"))
    return replace(parent, directory=directory, options=(*kept, name_parent(parent), *options))


def assert_like_parent(fork: AnyJob, parent: AnyJob, step: int = STEP) -> None:
    assert fork.result() == parent.result()
    assert fork.rows() == [row for row in parent.rows() if row["step"] > step]
    (lineage,) = {(event["run"], event["step"]) for event in fork.events("fork")}
    assert lineage == (str(parent.directory), step)


# Kills.


# After the event of the fork, its first own commit follows at once.
DELAYS: dict[Phase, float] = {start_up: 1.0, compiling: 0.5, has_state: 0.1, saving: 0.03, just_committed: 0.0}


@pytest.mark.parametrize("seed", range(2))
def test_random_kills_of_a_fork_change_no_bit_and_no_row(tmp_path: Path, seed: int) -> None:
    parent = make_uninterrupted_run(GPT, NANO)
    fork = make_fork(parent, tmp_path / "fork")
    storm(fork, 6, seed, DELAYS)
    # With a commit of its own it needs neither the parent nor the key.
    assert fork.committed()
    replace(fork, options=NANO).finish()
    assert_like_parent(fork, parent)


def test_a_killed_fork_of_a_fork_ends_as_its_grandparent(tmp_path: Path) -> None:
    first = make_uninterrupted_run(GPT, NANO)
    second = make_fork(first, tmp_path / "second")
    storm(second, 1, 7, {has_state: 0.1})
    second.finish()
    third = replace(second, directory=tmp_path / "third", options=(*NANO, name_parent(second, 16)))
    storm(third, 2, 8, {has_state: 0.1, just_committed: 0.0})
    third.finish()
    assert_like_parent(third, second, 16)
    assert third.result() == first.result()


# Stores.


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[str, Backend]]:
    found = {name: start_backend(name) for name in BACKENDS}
    yield found
    for backend in found.values():
        backend.proxy.close()


@pytest.fixture(scope="module")
def parents(backends: dict[str, Backend], tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnyJob]:
    """The same run in every store."""
    disk = Job(COUNTER, tmp_path_factory.mktemp("parent") / "run", SHORT)
    clouds = {name: make_cloud_job(backends, name, "parent") for name in BACKENDS}
    found: dict[str, AnyJob] = {"disk": disk, **clouds}
    for job in found.values():
        job.finish()
        assert job.result() == disk.result()
    return found


def make_cloud_job(backends: dict[str, Backend], name: str, stem: str, *options: str) -> CloudJob:
    """Return a job in one cloud that can reach the others."""
    others: dict[str, str | None] = {}
    for backend in backends.values():
        others |= backend.environment
    own = backends[name]
    return CloudJob(own, make_unique_name(stem), COUNTER, (*SHORT, *options), variables=others)


PLACES = ("disk", *BACKENDS)


@pytest.mark.parametrize("child", PLACES)
@pytest.mark.parametrize("parent", PLACES)
def test_a_fork_takes_a_parent_from_any_store(
    backends: dict[str, Backend],
    parents: dict[str, AnyJob],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parent: str,
    child: str,
) -> None:
    of = parents[parent]
    step = of.committed()[0]
    assert step < 40
    fork: AnyJob
    if child == "disk":
        for backend in backends.values():
            for name, value in backend.environment.items():
                monkeypatch.setenv(name, value)
        fork = Job(COUNTER, tmp_path / "fork", (*SHORT, name_parent(of, step)))
    else:
        fork = make_cloud_job(backends, child, "fork", name_parent(of, step))
    fork.finish()
    assert_like_parent(fork, of, step)
    if isinstance(fork, CloudJob):
        assert_verified(fork)


# A parent that is alive.


def test_forks_of_a_living_run_that_keeps_one_checkpoint(tmp_path: Path) -> None:
    live = ("config.total_steps=4000", "config.step_seconds=0.01", "config.width=200000")
    parent = Job(COUNTER, tmp_path / "parent", (*live, "checkpoint.every_steps=5", "checkpoint.keep_last=1"))
    attempt = parent.start()
    attempt.wait_until(lambda: bool(parent.committed()), "a checkpoint")
    for number in range(4):
        assert attempt.process.poll() is None, attempt.report("ended before it was forked")
        fork = replace(parent, directory=tmp_path / str(number)).with_options(name_parent(parent, "newest"))
        begun = fork.start()
        begun.wait_until_or_exit(lambda fork=fork: bool(fork.committed()), "its first commit")  # type: ignore[misc]
        assert fork.committed(), begun.report("made no fork")
        begun.kill()
        # Its checkpoint is gone by now.
        named = replace(parent, directory=tmp_path / f"named-{number}")
        ended = named.with_options(name_parent(parent, fork.committed()[0])).start()
        ended.expect(2)
        assert "was never saved, or has been deleted" in ended.output
        assert not named.directory.exists()
    attempt.kill()


# Processes, devices and features.


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_a_fork_takes_another_number_of_processes(tmp_path: Path, before: int, after: int) -> None:
    # 2 devices in all, so that the bits are the same.
    parent = Job(GPT, tmp_path / "parent", (*NANO, CUT), devices=2 // before)
    parent.launch(before).expect(0)
    fork = replace(make_fork(parent, tmp_path / "fork"), devices=2 // after)
    for committed in (False, True):
        attempt = fork.launch(after)
        attempt.wait_until(lambda attempt=attempt: has_state(attempt), "the state")  # type: ignore[misc]
        if committed:
            attempt.wait_until(lambda: len(fork.committed()) > 1, "an own save")
        attempt.kill_tree()
    fork.launch(after).expect(0)
    assert fork.result()["fingerprint"] == parent.result()["fingerprint"] or before != after
    if before == after:
        assert_like_parent(fork, parent)
    assert fork.events("fork")[0]["fingerprint"] == parent_fingerprint(parent)


def parent_fingerprint(parent: Job) -> Any:
    return next(event["fingerprint"] for event in parent.events("commit") if event["step"] == STEP)


def test_the_same_bits_on_another_number_of_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    options = (*SAME_BITS_OPTIONS, f"checkpoint.keep_every_steps={STEP}", "topology.mesh={data: auto, fsdp: 1}")
    parent = make_uninterrupted_run(GPT, options, devices=8)
    fork = replace(make_fork(parent, tmp_path / "fork"), devices=3)
    attempt = fork.start()
    attempt.wait_until(lambda: len(fork.committed()) > 1, "an own save")
    attempt.kill()
    replace(fork, devices=2).finish()
    assert_like_parent(fork, parent)


FEATURES = {
    "adapter": ("config.adapter={rank: 4, targets: [blocks.query, blocks.value]}",),
    "averages_and_rounding": (
        "config.ema={decays: [0.9, 0.99], evaluate: true}",
        "config.noise_scale={decay: 0.9}",
        "config.precision={params: bfloat16, rounding: stochastic}",
    ),
    "muon_and_dropout": ("config.optimizer.name=muon", "config.model.dropout=0.1", "config.model.neftune_alpha=5.0"),
    "packing": ("config.data.packing=documents",),
    "fast_tier": ("checkpoint.local_directory={tmp}/fast", "checkpoint.local_every_steps=1"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_killed_fork_of_every_feature_ends_as_its_parent(tmp_path: Path, name: str) -> None:
    options = tuple(option.replace("{tmp}", str(tmp_path)) for option in FEATURES[name])
    if name == "adapter":
        base = make_uninterrupted_run(GPT, NANO)
        options = (*options, f"checkpoint.init_from={base.directory}")
    parent = Job(GPT, tmp_path / "parent", (*NANO, *options))
    parent.finish()
    fork = make_fork(parent, tmp_path / "fork")
    for wanted in (False, True):
        attempt = fork.start()
        attempt.wait_until(lambda attempt=attempt: has_state(attempt), "the state")  # type: ignore[misc]
        if wanted:
            attempt.wait_until(lambda: len(fork.committed()) > 2, "own saves")
        attempt.kill()
    fork.finish()
    assert_like_parent(fork, parent)
