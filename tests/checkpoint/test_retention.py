"""Retention: the steps to delete depend only on step numbers and metrics, for every store and listing order."""

import contextlib
import itertools
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from runner.checkpoint.manifest import MANIFEST, Manifest, commit, read_committed
from runner.checkpoint.policy import (
    METRIC,
    Retention,
    StepMetric,
    find_superfluous_steps,
    read_step_metric,
    select_metrics,
)
from runner.storage import DeadlineError, ForbiddenError, LocalStore, compute_crc32c, encode_json, open_store
from tests.support.attempt import make_attempt
from tests.support.cloud_job import make_unique_name
from tests.support.job_process import Job
from tests.support.memory_bucket import MemoryDriver, MemoryLog, make_memory_bucket
from tests.support.object_stores import BACKENDS, route_stores_to, start_backend


def make_unmeasured_steps(*steps):
    return dict.fromkeys(steps)


def list_kept(metrics, *arguments, **options):
    return sorted(metrics.keys() - set(find_superfluous_steps(metrics, *arguments, **options)))


@pytest.mark.parametrize(
    ("steps", "keep_last", "expected"),
    [
        ((800, 900, 1000), 2, [800]),
        ((800, 900, 1000), 1, [800, 900]),
        ((800, 900, 1000), 3, []),
        ((800, 900, 1000), 4, []),
        ((1000,), 1, []),
        ((), 1, []),
    ],
)
def test_the_newest_steps_are_kept(steps, keep_last, expected):
    assert find_superfluous_steps(make_unmeasured_steps(*steps), keep_last) == expected


def test_steps_are_sorted_as_numbers():
    assert find_superfluous_steps(make_unmeasured_steps(5, 10, 99, 100, 900, 1000), 2) == [5, 10, 99, 100]


def test_multiples_of_keep_every_steps_are_kept_permanently():
    steps = range(100, 1300, 100)
    assert list_kept(make_unmeasured_steps(*steps), 2, keep_every_steps=500) == [500, 1000, 1100, 1200]
    assert list_kept(make_unmeasured_steps(*steps), 2, keep_every_steps=5000) == [1100, 1200]
    assert list_kept(make_unmeasured_steps(*steps), 2, keep_every_steps=100) == list(steps)


@pytest.mark.parametrize(("best", "expected"), [("min", [200, 500]), ("max", [300, 500]), (None, [500])])
def test_the_best_step_is_kept(best, expected):
    assert list_kept({100: 2.0, 200: -1.0, 300: 4.0, 400: 3.0, 500: 1.0}, 1, best=best) == expected


@pytest.mark.parametrize(("step", "expected"), [(900, [600, 1000]), (600, [600, 1000]), (599, [100, 1000])])
def test_the_newest_step_before_a_running_spike_is_kept(step, expected):
    assert list_kept(make_unmeasured_steps(100, 600, 1000), 1, roll_back_to=step) == expected
    assert list_kept(make_unmeasured_steps(600, 1000), 1, roll_back_to=99) == [1000]


@pytest.mark.parametrize("best", ["min", "max"])
def test_the_older_of_equally_good_steps_is_kept(best):
    worse = 2.0 if best == "min" else 0.0
    assert list_kept({100: worse, 200: 1.0, 300: 1.0, 400: worse, 500: worse}, 1, best=best) == [200, 500]


@pytest.mark.parametrize("best", ["min", "max"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_unmeasured_steps_are_never_the_best(best, value):
    assert list_kept({100: value, 200: 1.0, 300: value, 400: value}, 1, best=best) == [200, 400]
    assert list_kept({100: value, 200: value, 300: value}, 1, best=best) == [300]


@pytest.mark.parametrize(("best", "expected"), [("min", [100, 400]), ("max", [300, 400])])
def test_an_infinite_value_is_valid(best, expected):
    assert list_kept({100: -math.inf, 200: 0.0, 300: math.inf, 400: 0.0}, 1, best=best) == expected


def test_steps_kept_for_one_reason_do_not_count_for_another():
    metrics = {100: 3.0, 200: 1.0, 300: 2.0, 400: 2.0, 500: 2.0, 600: 2.0}
    assert list_kept(metrics, 2, keep_every_steps=300, best="min") == [200, 300, 500, 600]


@pytest.mark.parametrize("best", [None, "min", "max"])
@pytest.mark.parametrize("keep_every_steps", [None, 2])
def test_the_newest_step_is_always_kept_in_any_order_of_the_mapping(best, keep_every_steps):
    values = {9: 1.0, 10: None, 11: 0.5, 100: math.nan, 1000: 0.5}
    expected = find_superfluous_steps(values, 1, keep_every_steps, best)
    assert expected == sorted(expected)
    assert 1000 not in expected
    for order in itertools.permutations(values.items()):
        assert find_superfluous_steps(dict(order), 1, keep_every_steps, best) == expected


class ShuffledDriver(MemoryDriver):
    """A bucket that lists keys in a given order."""

    def __init__(self, order: tuple[int, ...]):
        super().__init__()
        self._order = order

    def list(self, prefix: str, delimiter: str):
        found = list(super().list(prefix, delimiter))
        yield from sorted(found, key=lambda entry: [f"/{step}/" not in entry.key for step in self._order])


@contextlib.contextmanager
def open_store_of_kind(kind, order, tmp_path, monkeypatch):
    if kind == "memory":
        yield make_memory_bucket(ShuffledDriver(order))
    elif kind == "disk":
        yield open_store(str(tmp_path / "run"))
    else:
        with start_backend(kind) as backend:
            route_stores_to(monkeypatch, backend)
            yield open_store(backend.url(make_unique_name("retention")))


def commit_step(store, step):
    directory = f"checkpoints/{step}"
    store.write(f"{directory}/arrays.1/piece", b"bits")
    files = {"arrays.1/piece": [4, compute_crc32c(b"bits")]}
    commit(store, directory, Manifest(name=str(step), step=step, arrays="arrays.1", files=files, attempt=1), 1)


def assert_only(store, steps):
    assert sorted(read_committed(store)) == steps
    assert {name.split("/")[0] for name in store.list_sizes("checkpoints")} == {str(step) for step in steps}
    for step in steps:
        assert store.read(f"checkpoints/{step}/arrays.1/piece") == b"bits"


ORDERS = [*itertools.permutations((800, 900, 1000))]


@pytest.mark.parametrize(
    ("kind", "killed_before", "order"),
    [
        *itertools.product(("disk", "memory"), (False, True), ORDERS),
        # Servers list names in an order of their own.
        *(
            pytest.param(kind, False, order, marks=() if order in (ORDERS[0], ORDERS[-1]) else pytest.mark.soak)
            for kind in BACKENDS
            for order in ORDERS
        ),
    ],
    ids=str,
)
def test_the_last_two_steps_are_kept_for_every_store_and_listing_order(
    kind, order, killed_before, tmp_path, monkeypatch
):
    with open_store_of_kind(kind, order, tmp_path, monkeypatch) as store:
        retention = Retention(make_attempt(store, MemoryLog()), keep_last=2)
        for step in order:
            commit_step(store, step)
            if not killed_before:
                retention.add(read_committed(store)[step])
        if killed_before:
            retention.scan()
        retention.wait()
        assert_only(store, [900, 1000])


@pytest.mark.soak
@pytest.mark.parametrize("mode", [pytest.param("min", marks=pytest.mark.soak), "max"])
def test_the_best_step_by_a_metric_is_kept_across_a_kill(mode, tmp_path):
    options = (
        "config.train.total_steps=30",  # the same shapes as in other tests, so that compilations are shared
        "checkpoint.every_steps=6",
        "config.eval.every_steps=6",
        "config.eval.batches=2",
        "checkpoint.keep_last=1",
        f"checkpoint.keep_best={{metric: val/loss, mode: {mode}}}",
    )
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", options)
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 12, "two commits")
    attempt.kill()
    job.finish()
    losses = {row["step"]: row["val/loss"] for row in job.rows() if "val/loss" in row}
    assert sorted(losses) == [6, 12, 18, 24, 30]
    best = (min if mode == "min" else max)(losses, key=losses.__getitem__)
    assert job.committed() == sorted({best, 30})
    assert job.uncommitted() == []


# Checkpoints that cannot be deleted.


@contextlib.contextmanager
def make_undeletable(store, step, patch):
    """Let the store refuse to delete anything of a step."""
    remove, remove_tree = store.remove, store.remove_tree

    def refuse(act, name):
        if f"{name}/".startswith(f"checkpoints/{step}/"):
            raise ForbiddenError(f"{name}: Operation not permitted")
        act(name)

    with patch.context() as context:
        context.setattr(store, "remove", lambda name: refuse(remove, name))
        context.setattr(store, "remove_tree", lambda name: refuse(remove_tree, name))
        yield


@pytest.mark.parametrize("kind", ["disk", "memory"])
def test_a_step_that_cannot_be_deleted_stops_no_other_deletion(kind, tmp_path, monkeypatch, capsys):
    with open_store_of_kind(kind, (), tmp_path, monkeypatch) as store:
        retention = Retention(make_attempt(store, MemoryLog()), keep_last=1)
        with make_undeletable(store, 1, monkeypatch), make_undeletable(store, 2, monkeypatch):
            for step in range(1, 7):
                commit_step(store, step)
                retention.add(read_committed(store)[step])
            retention.wait()
            assert_only(store, [1, 2, 6])
        warnings = [line for line in capsys.readouterr().err.splitlines() if "cannot be deleted" in line]
        assert len(warnings) == 2, "one of each step, however many saves follow"
        next_retention = Retention(make_attempt(store, MemoryLog()), keep_last=1)
        next_retention.scan()
        next_retention.wait()
        assert_only(store, [6])


def test_steps_that_could_not_be_deleted_are_tried_again_one_at_a_save(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "run"))
    retention = Retention(make_attempt(store, MemoryLog()), keep_last=1)
    with make_undeletable(store, 1, monkeypatch), make_undeletable(store, 2, monkeypatch):
        for step in (1, 2, 3):
            commit_step(store, step)
            retention.add(read_committed(store)[step])
        retention.wait()
    for step, left in ((4, 1), (5, 0)):
        commit_step(store, step)
        retention.add(read_committed(store)[step])
        retention.wait()
        assert len(read_committed(store)) == 1 + left


def test_a_store_that_does_not_answer_is_asked_once_a_save(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "run"))
    retention = Retention(make_attempt(store, MemoryLog()), keep_last=1)
    for step in (1, 2, 3):
        commit_step(store, step)
    asked = []

    def time_out(name):
        asked.append(name)
        raise DeadlineError(f"{name}: not within 120 s")

    with monkeypatch.context() as patch:
        patch.setattr(store, "remove", time_out)
        retention.scan()
        retention.wait()
    assert asked == [f"checkpoints/1/{MANIFEST}"]
    commit_step(store, 4)
    retention.add(read_committed(store)[4])
    retention.wait()
    assert_only(store, [4])


def test_going_back_quarantines_a_later_step_that_could_not_be_deleted(tmp_path, monkeypatch):
    store = open_store(str(tmp_path / "run"))
    retention = Retention(make_attempt(store, MemoryLog()), keep_last=2)
    with make_undeletable(store, 2, monkeypatch):
        for step in (1, 2, 3, 4):
            commit_step(store, step)
            retention.add(read_committed(store)[step])
        retention.wait()
    assert retention.forget_after(1) == [2, 3, 4]
    assert retention.forget_after(1) == []


@pytest.fixture
def immutable(tmp_path):
    """Return a function that makes a tree immutable, as an operator does; it is undone at the end."""
    made = []

    def make(path):
        made.append(path)
        command = ["chattr", "-R", "+i", str(path)]
        if not shutil.which("chattr") or os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("needs root, and chattr on this file system")

    yield make
    for path in made:
        subprocess.run(["chattr", "-R", "-i", str(path)], capture_output=True)


@pytest.mark.soak
def test_a_run_goes_on_beside_immutable_checkpoints_and_leftovers(tmp_path, immutable):
    job = Job("specs/counter.yaml", tmp_path / "run", ("config.step_seconds=0", "checkpoint.every_steps=2"))
    job.with_options("checkpoint.keep_last=2", "config.total_steps=4").start().expect(0)
    leftover = job.directory / "checkpoints" / "3" / "arrays.1"
    leftover.mkdir(parents=True)
    for path in (job.directory / "checkpoints" / "2", leftover.parent):
        immutable(path)
    for total_steps in (20, 24):
        attempt = job.with_options("checkpoint.keep_last=1", f"config.total_steps={total_steps}").start()
        attempt.expect(0)
        assert job.committed() == [2, total_steps]
        assert attempt.output.count("checkpoint 2 cannot be deleted") == 1
        assert attempt.output.count("checkpoints/3, an unfinished save, cannot be moved away") == 1


# The metric of a step at which the run once ended.

ENDED: dict[str, tuple[Manifest, dict[str, Any] | None, StepMetric]] = {
    "any step": (Manifest("4", metric=1.0), None, StepMetric(1.0, 1.0)),
    "without metric": (Manifest("4"), None, StepMetric(None, None)),
    "evaluated at its end": (Manifest("4", metric=1.0, carry={"end": "row"}), None, StepMetric(1.0, None)),
    "measured anyway": (Manifest("4", metric=1.0, carry={"end": "row", "metric": 1.0}), None, StepMetric(1.0, 1.0)),
    "evaluated after its commit": (Manifest("4"), {"metric": 2, "end": False}, StepMetric(2.0, 2.0)),
    "evaluated at an end after its commit": (Manifest("4"), {"metric": 2.0, "end": True}, StepMetric(2.0, None)),
    "damaged": (Manifest("4"), {"metric": "2"}, StepMetric(None, None)),
}


@pytest.mark.parametrize("case", ENDED)
def test_a_step_has_the_metric_that_it_has_without_the_end_of_the_run(case: str, tmp_path: Path) -> None:
    manifest, record, expected = ENDED[case]
    store = LocalStore(tmp_path)
    if record is not None:
        store.write(f"checkpoints/4/{METRIC}", encode_json(record))
    metric = read_step_metric(store, manifest)
    assert metric == expected
    assert select_metrics({4: metric}) == {4: expected.at_end}
    assert select_metrics({4: metric, 6: StepMetric(3.0, None)}) == {4: expected.before_end, 6: 3.0}
