"""RestoreableJob: restore or init, saves, stops, named checkpoints, metrics, and rejected changes."""

import dataclasses
import json
import math
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.counter import Counter, advance
from runner import RestoreableJob
from runner.attempts.fence import Fence
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.manifest import read_committed
from runner.cli.app import run_command
from runner.distributed.agreement import Hosts
from runner.errors import (
    FencedError,
    InvalidError,
    MiscountError,
    PhaseError,
    PreemptedError,
    RemovedError,
    ResumeError,
    StorageError,
)
from runner.metrics.file import read_rows
from runner.recipe import JobSession
from runner.spec import ExecutionSpec, read_spec
from runner.storage import LocalStore, read_json, read_log
from tests.support.tiny_jobs import StopAfter, are_leaves_equal, make_counter


def read_events(directory, *kinds):
    return [event for event in read_log(LocalStore(directory), "events") if event["event"] in kinds or not kinds]


def read_result(directory):
    return read_json(LocalStore(directory), "result.json")


def list_committed_steps(directory):
    return list(read_committed(LocalStore(directory)))


def stop_after(job, step):
    with pytest.raises(PreemptedError, match=f"step {step} is saved"):
        job(stop=StopAfter(job, step))


def test_a_state_beyond_the_memory_is_refused_before_the_claim(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.lifecycle.read_device_memory_bytes", lambda: 2**20)
    with pytest.raises(InvalidError, match=r"the state needs 0\.03 GiB .* they have 0\.01 GiB"):
        make_counter(tmp_path, **{"config.width": 2**20})()
    assert not (tmp_path / "attempts").exists()
    make_counter(tmp_path, **{"config.width": 2**17})()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("undisturbed")
    make_counter(directory)()
    return read_result(directory)


def test_the_public_methods_of_a_job():
    for name in ("done", "save", "load", "run", "init", "total_steps", "setup", "prepare", "abstract_state"):
        assert hasattr(RestoreableJob, name)
    assert isinstance(RestoreableJob.done, property)


def test_an_uninterrupted_job_writes_its_result(tmp_path, undisturbed):
    job = make_counter(tmp_path)
    assert not job.done
    job()
    assert job.done
    assert read_result(tmp_path) == undisturbed == {"step": 40, "fingerprint": compute_fingerprint(job.state)}
    assert int(job.state["count"]) == 40
    assert list_committed_steps(tmp_path) == [20, 30, 40]
    kinds = [event["event"] for event in read_events(tmp_path)]
    assert kinds[0] == "start"
    assert kinds.index("init") < kinds.index("save")
    assert kinds[-1] == "done"
    assert kinds.count("commit") == kinds.count("save") == 4


@pytest.mark.parametrize("step", [1, 10, 15, 39])
def test_a_stopped_and_resumed_job_is_bit_identical(tmp_path, undisturbed, step):
    stop_after(make_counter(tmp_path), step)
    assert not make_counter(tmp_path).done
    assert list_committed_steps(tmp_path)[-1] == step
    make_counter(tmp_path)()
    assert read_result(tmp_path) == undisturbed
    (restored,) = read_events(tmp_path, "restore")
    assert (restored["attempt"], restored["step"]) == (2, step)
    (preempted,) = read_events(tmp_path, "preempt")
    assert (preempted["step"], preempted["saved"]) == (step, True)


def test_a_job_stopped_at_every_step_is_bit_identical(tmp_path, undisturbed):
    small = {"checkpoint.keep_last": 1}
    for step in range(1, 40, 3):
        stop_after(make_counter(tmp_path, **small), step)
    make_counter(tmp_path, **small)()
    assert read_result(tmp_path) == undisturbed


def test_a_stop_at_a_saved_step_does_not_save_it_twice(tmp_path):
    stop_after(make_counter(tmp_path), 10)
    assert [event["step"] for event in read_events(tmp_path, "save")] == [10]
    stop_after(make_counter(tmp_path), 11)
    assert [event["step"] for event in read_events(tmp_path, "save")] == [10, 11]


def test_a_stop_at_the_last_step_leaves_only_the_result_to_the_next_attempt(tmp_path, undisturbed):
    stop_after(make_counter(tmp_path), 40)
    make_counter(tmp_path)()
    assert read_result(tmp_path) == undisturbed
    assert [event["step"] for event in read_events(tmp_path, "save")] == [10, 20, 30, 40]


class DoublingSession(JobSession):
    def result(self, step):
        return {"doubled": 2 * step}


class ReportingCounter(Counter):
    def __init__(self, *args):
        super().__init__(*args)
        self.session = DoublingSession()


def test_a_job_can_add_to_its_result(tmp_path, undisturbed):
    make_counter(tmp_path, ReportingCounter)()
    assert read_result(tmp_path) == undisturbed | {"doubled": 80}


def test_running_a_finished_job_again_does_nothing(tmp_path, capsys):
    make_counter(tmp_path)()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    make_counter(tmp_path)()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert "done, nothing to do" in capsys.readouterr().out


def test_a_finished_job_whose_last_checkpoint_was_deleted_says_so(tmp_path, capsys):
    make_counter(tmp_path / "run")()
    shutil.rmtree(tmp_path / "run/checkpoints/40")
    capsys.readouterr()
    make_counter(tmp_path / "run")()
    output, problems = capsys.readouterr()
    assert "done, nothing to do" in output
    assert problems == f"{tmp_path}/run: checkpoint 40, the last of this run, is not there any more\n"


def test_a_finished_job_continues_if_its_end_can_be_moved(tmp_path):
    make_counter(tmp_path / "a")()
    make_counter(tmp_path / "a", **{"config.total_steps": 60})()
    make_counter(tmp_path / "b", **{"config.total_steps": 60})()
    assert read_result(tmp_path / "a") == read_result(tmp_path / "b")
    assert read_events(tmp_path / "a", "restore")[0]["step"] == 40


def test_changes_of_trajectory_keys_are_rejected_on_resume(tmp_path):
    stop_after(make_counter(tmp_path), 15)
    for key, value in (("seed", 1), ("config.width", 65)):
        with pytest.raises(InvalidError, match=rf"{key}: .*has \d+, the spec {value}"):
            make_counter(tmp_path, **{key: value})()
    assert len(read_events(tmp_path, "start")) == 1


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "change",
    [
        {"logging.every_steps": 3},
        {"checkpoint.every_steps": 7},
        {"checkpoint.keep_last": 1},
        {"config.step_seconds": 0.001},
        {"topology": {"mesh": {"data": 1}}},
        {"project": "other"},
        {"group": "other"},
    ],
    ids=str,
)
def test_other_keys_can_change_on_resume(tmp_path, undisturbed, change):
    stop_after(make_counter(tmp_path), 15)
    make_counter(tmp_path, **change)()
    assert read_result(tmp_path) == undisturbed


def test_a_directory_of_another_job_is_rejected_and_unchanged(tmp_path):
    stop_after(make_counter(tmp_path), 15)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InvalidError, match="belongs to the job 'count', this one is 'other'"):
        make_counter(tmp_path, name="other")()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"name": "other"}, "belongs to the job 'count', this one is 'other'"), ({"config.width": 32}, "another")],
    ids=["another name", "another trajectory"],
)
def test_a_job_that_another_one_has_overtaken_in_its_set_up_is_rejected(changes, message, tmp_path):
    class Late(Counter):
        def setup(self, hosts):
            super().setup(hosts)
            if not (tmp_path / "job.json").exists():  # a refusal tries its advice, and sets up another such job
                stop_after(make_counter(tmp_path), 15)

    late = make_counter(tmp_path, Late, **changes)
    with pytest.raises(InvalidError, match=message):
        late()
    assert json.loads((tmp_path / "job.json").read_text())["name"] == "count"
    assert Fence(LocalStore(tmp_path)).find_newest() == 1


def test_the_resolved_spec_is_saved_and_round_trips(tmp_path):
    job = make_counter(tmp_path)
    job()
    saved = read_spec(tmp_path / "spec.yaml")
    assert saved == job.resolved_spec()
    assert saved.config == {"total_steps": 40, "width": 64, "step_seconds": 0.0}


def test_the_job_id_is_kept_across_attempts(tmp_path):
    first, second = make_counter(tmp_path), make_counter(tmp_path)
    stop_after(first, 5)
    second()
    assert first.attempt.run_id == second.attempt.run_id == json.loads((tmp_path / "job.json").read_text())["id"]
    assert [event["attempt"] for event in read_events(tmp_path, "start")] == [1, 2]


class OvertakenCounter(Counter):
    """A job that is overtaken by a newer attempt at step 15."""

    def save_or_stop(self):
        if self.step == 15:
            Fence(self.store).claim()
        super().save_or_stop()


def test_a_fenced_attempt_ends_without_further_commits(tmp_path):
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        make_counter(tmp_path, OvertakenCounter)()
    assert set(list_committed_steps(tmp_path)) <= {10}
    assert not (tmp_path / "result.json").exists()
    assert [event["event"] for event in read_events(tmp_path) if event["step"] and event["step"] > 10] in ([], ["save"])


class OvertakenAtStartCounter(Counter):
    def init_state(self):
        state = super().init_state()
        Fence(self.store).claim()
        return state


def test_an_attempt_that_is_fenced_while_it_restores_writes_nothing(tmp_path):
    with pytest.raises(FencedError, match="attempt 2 has taken over"):
        make_counter(tmp_path, OvertakenAtStartCounter)()
    assert read_events(tmp_path, "init") == []
    assert not (tmp_path / "spec.yaml").exists()


def test_saves_by_time_happen_at_logged_steps(tmp_path):
    make_counter(tmp_path, checkpoint={"every_steps": None, "every_minutes": 1e-9}, **{"logging.every_steps": 16})()
    assert [event["step"] for event in read_events(tmp_path, "commit")] == [16, 32, 40]


class NamingCounter(Counter):
    """A job that saves a named checkpoint at step 12 and loads it once at step 25."""

    loaded = None

    def save_or_stop(self):
        if self.step == 12:
            self.kept = jax.tree.map(jnp.copy, self.state)
            self.save("before-the-change")
        if self.step == 25 and self.loaded is None:
            self.load("before-the-change")
            self.loaded = self.state, self.step
        super().save_or_stop()


def test_a_named_checkpoint_round_trips(tmp_path, undisturbed):
    job = make_counter(tmp_path, NamingCounter, **{"checkpoint.keep_last": 1})
    job()
    state, step = job.loaded
    assert step == 12
    assert are_leaves_equal(state, job.kept)
    assert read_result(tmp_path)["fingerprint"] == undisturbed["fingerprint"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["40", "before-the-change"]


NAMES = (
    "best",
    Path("best"),
    "12",
    "a.b-c_D",
    "x" * 100,
    "٣",
    "",
    ".",
    "..",
    "../x",
    "a/b",
    Path("a/b"),
    "/",
    "7",
    "012",
)
NAMES += ("x" * 101, "best.retired", "a b", "a\nb", "a\0b", "-x", "é")


@pytest.mark.daily(8)
@pytest.mark.parametrize("name", NAMES, ids=repr)
def test_a_name_is_saved_and_loaded_or_rejected_without_writing(tmp_path, name):
    class Saving(Counter):
        def run(self):
            self.step = 12
            self.save(name)
            self.checkpointer.wait_until_committed(12)
            self.load(name)
            raise PreemptedError("enough")

    if os.fspath(name) in ("best", "12", "a.b-c_D", "x" * 100):
        with pytest.raises(PreemptedError):
            make_counter(tmp_path, Saving)()
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [os.fspath(name)]
    else:
        with pytest.raises(InvalidError, match=r"cannot be (called|saved as)"):
            make_counter(tmp_path, Saving)()
        assert not (tmp_path / "checkpoints").exists()


def test_a_job_does_not_resume_from_a_named_checkpoint(tmp_path, undisturbed):
    stop_after(make_counter(tmp_path, NamingCounter), 14)
    make_counter(tmp_path)()
    assert [event["step"] for event in read_events(tmp_path, "restore")] == [14]
    assert read_result(tmp_path) == undisturbed


def test_a_directory_with_a_damaged_owner_file_is_rejected(tmp_path):
    make_counter(tmp_path)()
    (tmp_path / "job.json").write_text('{"id": "0123')
    with pytest.raises(InvalidError, match=r"job\.json is damaged"):
        make_counter(tmp_path)()


def test_loading_a_missing_checkpoint_is_an_error(tmp_path):
    class Lost(Counter):
        def run(self):
            self.load("nothing")

    with pytest.raises(ResumeError, match=r"nothing: .*never committed; the run has none"):
        make_counter(tmp_path, Lost)()


@pytest.mark.daily(10)
@pytest.mark.parametrize("name", [*NAMES, 7, None, b"best", 7.0], ids=repr)
def test_loading_any_other_name_gives_one_line(tmp_path, name):
    class Lost(Counter):
        def run(self):
            self.load(name)

    with pytest.raises(InvalidError, match=r"as the name of a checkpoint|cannot be called|never committed") as caught:
        make_counter(tmp_path, Lost)()
    assert "\n" not in str(caught.value)


class LoggingCounter(Counter):
    """A job that logs its own metrics every other step, and on request loads an earlier checkpoint once."""

    loads = False

    def save_or_stop(self):
        if self.step % 2 == 0:
            self.log_metrics({"accuracy": self.step / 100, "eval/parts": [1, self.step]})
            self.log_metrics({"eval/error": math.nan if self.step == 4 else 1 / self.step})
        if self.step == 10 and self.loads:
            self.loads = False
            self.load("6")
        super().save_or_stop()


def read_own_rows(directory):
    rows = read_rows(LocalStore(directory))
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


def test_rows_of_a_job_that_is_no_trainer_survive_a_kill(tmp_path, capsys):
    changes = {"config.total_steps": 16, "checkpoint.every_steps": 3, "logging.tensorboard": True}
    changes["checkpoint.keep_best"] = {"metric": "accuracy", "mode": "max"}
    make_counter(tmp_path / "whole", LoggingCounter, **changes)()
    told = capsys.readouterr()
    assert "step 2/16  accuracy 0.02  eval/error 0.5\n" in told.out
    assert "step 4/16  accuracy 0.04  eval/error -\n" in told.out
    assert "log_metrics at step 4: eval/error: not finite; null in the row" in told.err
    expected = [
        {"step": step, "accuracy": step / 100, "eval/parts": [1, step], "eval/error": None if step == 4 else 1 / step}
        for step in range(2, 17, 2)
    ]
    assert read_own_rows(tmp_path / "whole") == expected
    assert read_committed(LocalStore(tmp_path / "whole"))[16].metric == 0.16

    class Killed(LoggingCounter):
        def save_or_stop(self):
            super().save_or_stop()
            if self.step == 11:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_counter(tmp_path / "killed", Killed, **changes)()
    assert read_own_rows(tmp_path / "killed")[-1]["step"] == 10
    make_counter(tmp_path / "killed", LoggingCounter, **changes)()
    back = make_counter(tmp_path / "back", LoggingCounter, **changes)
    back.loads = True
    back()
    for name in ("killed", "back"):
        assert read_own_rows(tmp_path / name) == expected
        assert read_result(tmp_path / name) == read_result(tmp_path / "whole")
    # Read-only commands.
    for arguments in (["metrics", "--csv"], ["status"], ["report", "-o", str(tmp_path / "page.html")]):
        assert run_command([arguments[0], str(tmp_path / "killed"), *arguments[1:]]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert "accuracy" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        ({"step": 1}, "it returns a metric named 'step'"),
        ({"perf/x": 1}, "it returns a metric named 'perf/x'"),
        ({"a b": 1}, "it returns a metric named 'a b'"),
        ({"a": object()}, "it returns as a a object; a row needs a number"),
        (7, "it returns a int, needs a dictionary"),
    ],
)
def test_invalid_metrics_are_reported_in_one_line(tmp_path, metrics, words, capsys):
    class Wrong(Counter):
        def run(self):
            self.log_metrics(metrics)
            super().run()

    make_counter(tmp_path, Wrong)()
    assert f"log_metrics at step 0: {words}" in capsys.readouterr().err
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_job_without_rows_has_no_metrics_file(tmp_path):
    make_counter(tmp_path)()
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize("call", ["save", "load", "save_or_stop", "log_metrics"])
def test_methods_of_a_job_that_is_not_running_raise(tmp_path, call):
    job = make_counter(tmp_path)
    arguments = {"save_or_stop": (), "log_metrics": ({},)}.get(call, ("name",))
    with pytest.raises(PhaseError, match=rf"Counter\.{call}: the job is not running yet"):
        getattr(job, call)(*arguments)
    job()
    with pytest.raises(PhaseError, match=rf"Counter\.{call}: the job has ended"):
        getattr(job, call)(*arguments)


class FullDiskCounter(Counter):
    """A job whose disk is full when step 20 (or the last step) is committed."""

    full_at = 20

    def make_save_contents(self):
        return dataclasses.replace(super().make_save_contents(), flush=self.fill_the_disk)

    def fill_the_disk(self):
        if len(read_events(self.store.root, "commit", "save_failed")) == self.full_at // 10 - 1:
            raise OSError(28, "No space left on device")


def test_a_job_continues_after_a_failed_save(tmp_path, undisturbed, capsys):
    make_counter(tmp_path, FullDiskCounter)()
    assert [event["step"] for event in read_events(tmp_path, "save_failed")] == [20]
    assert [event["step"] for event in read_events(tmp_path, "commit")] == [10, 30, 40]
    assert "SAVE FAILED at step 20" in capsys.readouterr().err
    assert read_result(tmp_path) == undisturbed


class StoppedAfterFailureCounter(FullDiskCounter):
    """A job that saves step 20 under a name after its save failed, and is then asked to stop."""

    def run(self):
        while self.step < 20:
            self.state, self.step = advance(self.state), self.step + 1
            if self.step == 20:
                self.save()
                self.save("mine")  # waits for the previous save
                self.attempt.stop.request_stop("asked by the test")
            self.save_or_stop()


def test_a_stop_at_a_step_with_a_failed_save_saves_it_again(tmp_path):
    with pytest.raises(PreemptedError):
        make_counter(tmp_path, StoppedAfterFailureCounter)()
    assert [event["step"] for event in read_events(tmp_path, "save_failed")] == [20]
    assert (tmp_path / "checkpoints" / "20" / "manifest.json").exists()


def test_the_automatic_interval_is_based_on_a_durable_save(tmp_path):
    make_counter(
        tmp_path / "run",
        **{
            "checkpoint.every_steps": None,
            "checkpoint.every": "auto",
            "checkpoint.local_directory": str(tmp_path / "fast"),
            "checkpoint.local_every_steps": 1,
        },
    )()
    saves = [event for event in read_events(tmp_path / "run", "save", "cadence") if event.get("tier") != "fast"]
    assert saves[0]["event"] == "save"


class LostDiskCounter(Counter):
    """A job that ends with 76 at step 7 of its first two attempts."""

    def save_or_stop(self):
        if self.step == 7 and self.attempt.number < 3:
            raise StorageError("a disk is lost")
        super().save_or_stop()


@pytest.mark.parametrize(("given", "hours"), [(None, "8"), (5.0, "5")])
def test_the_automatic_interval_counts_the_failures_of_earlier_attempts(tmp_path, capsys, given, hours):
    checkpoint = {"every": "auto", "mean_time_between_failures_hours": given}
    changes = {"checkpoint": {"every_steps": None} | checkpoint, "logging.every_steps": 1}
    for _ in range(2):
        with pytest.raises(StorageError):
            make_counter(tmp_path, LostDiskCounter, **changes)()
        capsys.readouterr()
    job = make_counter(tmp_path, LostDiskCounter, **changes)
    job()
    job.checkpointer._reported_interval_seconds = 1e-9  # so that it is said again
    job.checkpointer.find_due_save(1, 99)
    assert f"and {hours} hours between failures" in capsys.readouterr().out


class FullDiskAtEndCounter(FullDiskCounter):
    full_at = 40


def test_a_job_that_cannot_save_its_last_step_is_not_done(tmp_path):
    with pytest.raises(StorageError, match="step 40 could not be saved"):
        make_counter(tmp_path, FullDiskAtEndCounter)()
    assert not make_counter(tmp_path).done


def test_a_job_needs_neither_topology_nor_network(tmp_path):
    spec = ExecutionSpec(
        name="x", job="experiments.counter:Counter", directory=str(tmp_path), config={"total_steps": 3}
    )
    job = Counter(spec)
    job(Hosts.single_process())
    assert job.done


def test_saves_longer_than_the_grace_period_are_reported_once_per_attempt(tmp_path, capsys):
    job = make_counter(tmp_path, checkpoint={"every_steps": 10, "grace_seconds": 1e-6})
    stop_after(job, 25)
    assert capsys.readouterr().err.count("checkpoint.grace_seconds is 1e-06") == 1
    make_counter(tmp_path, checkpoint={"every_steps": 10, "grace_seconds": 1e-6})()
    grace = read_events(tmp_path, "grace")
    assert [row["attempt"] for row in grace] == [1, 2]
    assert [row["event"] for row in read_events(tmp_path) if row["attempt"] == 2][2:4] == ["grace", "restore"]
    make_counter(tmp_path / "enough", checkpoint={"every_steps": 10, "grace_seconds": 60.0})()
    assert not read_events(tmp_path / "enough", "grace")


@pytest.mark.parametrize("report", ["save_or_stop", "save"])
def test_an_invalid_step_ends_the_job_before_the_commit(tmp_path, report):
    class CountsBadly(Counter):
        def run(self):
            while self.step < self.total_steps:
                self.state = advance(self.state)
                self.step += 1 if self.step < 10 else 1.0
                getattr(self, report if self.step > 10 else "save_or_stop")()

    with pytest.raises(MiscountError, match=r"^experiments.counter:Counter: step is 11.0, of type float"):
        make_counter(tmp_path, CountsBadly)()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["10"]
    assert list_committed_steps(tmp_path) == [10]
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("last_step", [0, 13])
def test_a_run_that_returns_early_fails_and_keeps_its_checkpoints(tmp_path, undisturbed, last_step):
    class Lazy(Counter):
        def run(self):
            while self.step < last_step:
                self.state = advance(self.state)
                self.step += 1
                self.save_or_stop()

    words = f"^experiments.counter:Counter: run returned at step {last_step} of 40: "
    with pytest.raises(MiscountError, match=words) as caught:
        make_counter(tmp_path, Lazy)()
    assert len(str(caught.value).splitlines()) == 1
    assert not make_counter(tmp_path).done
    assert list_committed_steps(tmp_path) == list(range(10, last_step + 1, 10))
    make_counter(tmp_path)()
    assert read_result(tmp_path) == undisturbed


def test_an_end_below_the_step_that_was_reached_is_refused(tmp_path):
    stop_after(make_counter(tmp_path), 30)
    with pytest.raises(InvalidError, match="the run has reached step 30, and the spec ends it at step 20"):
        make_counter(tmp_path, **{"config.total_steps": 20})()
    assert not (tmp_path / "result.json").exists()
    make_counter(tmp_path, **{"config.total_steps": 30})()
    assert read_result(tmp_path)["step"] == 30


def move_away(directory):
    directory.rename(directory.with_name("elsewhere"))  # atomic, even while files in it are written


def remove_attempts(directory):
    shutil.rmtree(directory / "attempts")


def replace_by_another_run(directory):
    move_away(directory)
    make_counter(directory, **{"config.total_steps": 5})()


@pytest.mark.parametrize("strike", [move_away, remove_attempts, replace_by_another_run])
def test_removing_the_directory_of_a_running_job_is_a_user_error(tmp_path, strike):
    class Struck(Counter):
        def save_or_stop(self):
            if self.step == 15:
                strike(self.store.root)
            super().save_or_stop()

    with pytest.raises(RemovedError, match="attempts/1, the claim of this attempt, is missing") as caught:
        make_counter(tmp_path / "run", Struck)()
    assert caught.value.exit_code == 2
    assert not (tmp_path / "run" / "checkpoints" / "20" / "manifest.json").exists()
