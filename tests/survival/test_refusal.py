"""What the command must not do: exit 2 before it harms anything, exit 1 where a person must look, and why."""

import functools
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.attempts.fence import Fence
from runner.storage import LocalStore
from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    Attempt,
    Job,
    Phase,
    has_state,
    hash_tree,
    make_killed_run,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
    saving,
)

COUNTER_SPEC, NANO_SPEC = "specs/counter.yaml", "specs/gpt_nano.yaml"
COUNTER = ("config.total_steps=60", "config.step_seconds=0.02", "config.width=1000000", "checkpoint.every_steps=5")
NANO = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=30",
    "checkpoint.every_steps=5",
    "logging.every_steps=4",
    "config.eval.every_steps=10",
)


# What is refused for many reasons is told by one process of each kind; in this process by the tests of each reason.
in_the_soak = functools.partial(pytest.param, marks=pytest.mark.soak)


def assert_refused(job: Job, *texts: str) -> Attempt:
    """Exit 2, no traceback, all of `texts` in the message, and no file changed."""
    before = hash_tree(job.directory)
    attempt = job.start()
    attempt.expect(2)
    assert "Traceback" not in attempt.output, attempt.output
    for text in texts:
        assert text in attempt.output, f"{text!r} is not in {attempt.output!r}"
    assert hash_tree(job.directory) == before
    return attempt


@pytest.fixture
def nano(tmp_path: Path) -> Job:
    return make_killed_run(20, NANO_SPEC, NANO).copy_to(tmp_path / "run")


# Whose directory is this?


@pytest.mark.soak
@pytest.mark.soak
def test_a_directory_of_another_job_is_refused(nano: Job) -> None:
    assert_refused(nano.with_options("name=other"), "'gpt_nano'", "'other'", str(nano.directory))


OTHER_TRAJECTORIES = {
    "config.optimizer.learning_rate=1.0e-3": ("0.003", "0.001"),
    "seed=7": ("0", "7"),
    "config.train.global_batch_examples=16": ("8", "16"),
    "config.model.width=32": ("64", "32"),
    "config.schedule.warmup_steps=2": ("20", "2"),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    "options",
    [tuple(OTHER_TRAJECTORIES), *((option,) for option in OTHER_TRAJECTORIES)],
    ids=lambda options: options[0] if len(options) == 1 else "all",
)
def test_a_changed_trajectory_is_refused_naming_each_key(nano: Job, options: tuple[str, ...]) -> None:
    attempt = assert_refused(nano.with_options(*options))
    for option in options:
        key = option.partition("=")[0]
        (line,) = [line for line in attempt.output.splitlines() if key in line and " has " in line]
        for value in OTHER_TRAJECTORIES[option]:
            assert value in line


@pytest.mark.soak
def test_other_data_under_the_same_name_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_bytes(b"to be or not to be " * 1000)
    options = (*NANO, f"config.data.source={text}")
    job = Job(NANO_SPEC, tmp_path / "run", options)
    attempt = job.start_paused("step 8")
    attempt.wait_until(lambda: job.newest() >= 5, "the first commit")
    attempt.kill()
    text.write_bytes(b"to be or not to bee " * 1000)
    assert_refused(job, "config.data", "does not hold the data of the earlier steps")


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param((), id="same mesh", marks=pytest.mark.soak),
        in_the_soak(("topology.mesh={data: 1, fsdp: auto, tensor: 1}",), id="another mesh"),
    ],
)
def test_changes_of_logging_mesh_and_cadence_change_no_bit(nano: Job, mesh: tuple[str, ...]) -> None:
    changed = nano.with_options(
        "logging.every_steps=5",
        "checkpoint.every_steps=7",
        "checkpoint.keep_last=2",
        *mesh,
    )
    changed.finish()
    assert changed.result() == make_uninterrupted_run(NANO_SPEC, NANO).result()
    assert changed.committed() == [28, 30]
    assert [row["step"] for row in changed.rows()] == [4, 8, 10, 12, 16, 20, 25, 30]


# Two attempts at once.


@pytest.mark.soak
def test_the_older_of_two_live_attempts_is_fenced(tmp_path: Path) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", COUNTER)
    older = job.with_options("config.step_seconds=1").start()
    older.wait_until(lambda: job.newest() >= 5, "the first commit")
    newer = job.start()
    newer.expect(0)
    older.expect(1)
    assert "attempt 2 has taken over" in older.output
    assert "Traceback" not in older.output
    assert_older_committed_nothing_after_newer(job)
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()


@pytest.mark.soak
def test_every_process_of_a_fenced_job_says_so(tmp_path: Path) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", (*COUNTER, "config.total_steps=3000", "config.step_seconds=0.05"))
    processes = job.start_processes(2)
    processes[0].wait_until(lambda: job.newest() >= 5, "the first commit")
    Fence(LocalStore(job.directory)).claim()
    for process in processes:
        process.expect(1)
        assert "attempt 2 has taken over" in process.output
        assert "run the same command again" not in process.output


@pytest.mark.soak
@pytest.mark.parametrize(
    ("spec", "options", "phase"),
    [
        pytest.param(COUNTER_SPEC, COUNTER, has_state, marks=pytest.mark.soak, id="counter between steps"),
        pytest.param(COUNTER_SPEC, COUNTER, saving, id="counter saving"),
        pytest.param(NANO_SPEC, NANO, saving, marks=pytest.mark.soak, id="gpt_nano saving"),
    ],
)
def test_an_attempt_that_wakes_up_late_changes_nothing(
    tmp_path: Path, spec: str, options: tuple[str, ...], phase: Phase
) -> None:
    job = Job(spec, tmp_path / "run", options)
    older = job.start()
    assert older.freeze_during(phase), older.report("ended too early")
    job.finish()
    committed = job.committed()
    kept = {step: hash_tree(job.checkpoints / str(step)) for step in committed}
    before = hash_tree(job.directory)
    older.process.send_signal(signal.SIGCONT)
    older.expect(1)
    assert "attempt 2 has taken over" in older.output
    assert_older_committed_nothing_after_newer(job)
    after = hash_tree(job.directory)
    for name in ("result.json", "metrics.jsonl", "job.json", "spec.yaml"):
        assert after.get(name) == before.get(name)
    assert job.committed() == committed
    for step in committed:
        now = hash_tree(job.checkpoints / str(step))
        assert {name: now.get(name) for name in kept[step]} == kept[step]
    assert job.outcome() == make_uninterrupted_run(spec, options).outcome()
    job.finish()


def assert_older_committed_nothing_after_newer(job: Job) -> None:
    """Arrays that nobody will read may still be under way, and with them notes of their begin and of the last step."""
    events = job.events()
    start = next(index for index, event in enumerate(events) if event["attempt"] == 2)
    assert {event["event"] for event in events[start:] if event["attempt"] == 1} <= {"save", "progress"}


# Training that went wrong, and data that cannot serve.


@pytest.mark.soak  # daily in tests/test_trainer.py, and with a counter in test_exit_code.py
def test_a_loss_that_is_not_finite_names_the_step(tmp_path: Path) -> None:
    options = (
        "config.optimizer={name: sgd, learning_rate: 1.0e+30, clip_norm: null}",
        "config.train.total_steps=40",
        "checkpoint.every_steps=1",
        "logging.every_steps=1",
    )
    job = Job(NANO_SPEC, tmp_path / "run", options)
    failures = []
    for _ in range(2):
        attempt = job.start()
        attempt.expect(1)
        assert "Traceback" not in attempt.output, attempt.output
        (line,) = [line for line in attempt.output.splitlines() if "diverged" in line]
        failures.append(line)
        last_row = job.rows()[-1]
        assert line.startswith(f"step {last_row['step'] + 1}: ")
        assert 1 <= job.newest() <= last_row["step"]
        assert not (job.directory / "result.json").exists()
    assert failures[0] == failures[1]
    assert [event["event"] for event in attempt.events("init", "restore", "quarantine")] == ["restore"]


def write_text(path: Path, num_bytes: int) -> str:
    path.write_bytes(b"x" * num_bytes)
    return str(path)


def write_ids(path: Path) -> str:
    np.array([1, 2, 3, 299] * 10_000, "<u2").tofile(path)
    return str(path)


@pytest.mark.parametrize(
    ("make", "options", "texts"),
    [
        in_the_soak(lambda path: write_text(path / "empty.txt", 0), (), ("empty.txt",), id="empty"),
        in_the_soak(
            lambda path: write_text(path / "short.txt", 30), (), ("28", "32", "short"), id="shorter than a window"
        ),
        pytest.param(
            lambda path: write_ids(path / "ids.bin"),
            ("config.model.vocabulary_size=256",),
            ("299", "256"),
            id="id beyond the vocabulary",
        ),
        in_the_soak(lambda path: str(path / "none.txt"), (), ("none.txt",), id="missing"),
    ],
)
def test_unusable_data_is_refused_with_numbers(
    tmp_path: Path, make: Callable[[Path], str], options: tuple[str, ...], texts: tuple[str, ...]
) -> None:
    source = make(tmp_path)
    job = Job(NANO_SPEC, tmp_path / "run", (*NANO, f"config.data.source={source}", *options))
    assert_refused(job, *(text for text in texts if text != "short"))
    assert not job.directory.exists()


# Specs and command lines.


@pytest.mark.parametrize(
    ("option", "texts"),
    [
        ("config.train.total_stepz=5", ("config.train.total_stepz", "did you mean config.train.total_steps?")),
        in_the_soak("config.train.total_steps=many", ("config.train.total_steps", "many")),
        in_the_soak("config.train.total_tokens=100000", ("total_steps=200", "total_tokens=100000")),
        in_the_soak(
            "config.train.global_batch_examples=31",
            ("config.train", "global_batch_examples=31", "2 devices", "30 or 32"),
        ),
        in_the_soak("topology.mesh={data: 4, fsdp: 4, tensor: 1}", ("topology.mesh", "2 devices")),
        in_the_soak("topology.mesh={data: auto, fsdp: auto, tensor: 1}", ("topology.mesh", "auto")),
        in_the_soak("topology.accelerator=v5e-16", ("topology.accelerator", "v5e-16", "2 x cpu", "--set")),
        in_the_soak("job=experiments.gpt:PretrainGTP", ("job", "did you mean PretrainGPT")),
        in_the_soak("job=experiments.gtp:PretrainGPT", ("job", "did you mean experiments.gpt")),
        in_the_soak("job=json:JSONDecoder", ("job", "RestoreableJob")),
    ],
    ids=lambda value: value.partition("=")[0] + "=" + value.partition("=")[2][:20] if isinstance(value, str) else "",
)
def test_an_invalid_spec_is_refused_before_any_write(tmp_path: Path, option: str, texts: tuple[str, ...]) -> None:
    assert_refused(Job(NANO_SPEC, tmp_path / "run", (option,), devices=2), *texts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "content",
    [
        in_the_soak(None, id="missing"),
        pytest.param("name: [", id="broken"),
        in_the_soak("- a list", id="list"),
        in_the_soak("", id="empty"),
    ],
)
def test_an_unreadable_spec_is_refused_by_its_name(tmp_path: Path, content: str | None) -> None:
    spec = tmp_path / "bad.yaml"
    if content is not None:
        spec.write_text(content)
    assert_refused(Job(str(spec), tmp_path / "run"), "bad.yaml")


def test_incomplete_process_options_are_refused(tmp_path: Path) -> None:
    job = Job(NANO_SPEC, tmp_path / "run")
    attempt = Attempt(job, ["runner", *job.arguments, "--coordinator", "127.0.0.1:1"], devices=1)
    attempt.expect(2)
    assert "give all three or none" in attempt.output


def test_a_process_with_other_code_is_refused_before_the_first_step(tmp_path: Path) -> None:
    job = Job(NANO_SPEC, tmp_path / "run", (*NANO, "job=tests.support.bigram:OtherCodeTrainer"))
    for attempt in job.start_processes(2):
        attempt.expect(2)
        assert "process 1 traced another program of the step than process 0" in attempt.output, attempt.output
    assert job.committed() == []
