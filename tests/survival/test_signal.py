"""SIGTERM and Ctrl-C in every phase of a single process: state saved, exit 75, no step lost, the same bits later."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from runner.history.reader import read_history
from runner.storage import LocalStore
from tests.support.job_process import (
    ROOT,
    SMALL_GPT_OPTIONS,
    Attempt,
    Job,
    Phase,
    compiling,
    has_signal_handler,
    has_state,
    hash_tree,
    just_committed,
    make_killed_run,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
    restoring,
    retaining,
    saving,
)
from tests.support.simulated_devices import environment

COUNTER_SPEC, NANO_SPEC = "specs/counter.yaml", "specs/gpt_nano.yaml"
COUNTER = ("config.total_steps=100", "config.step_seconds=0.05", "config.width=1000000", "checkpoint.every_steps=4")
NANO = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=30",
    "checkpoint.every_steps=6",
    "logging.every_steps=1",
    "config.eval.every_steps=8",
)
SIGTERM_AND_IN_THE_SOAK_SIGINT = (
    pytest.param(signal.SIGTERM, id="SIGTERM"),
    pytest.param(signal.SIGINT, id="SIGINT", marks=pytest.mark.soak),
)
NO_DELAY = "config.step_seconds=0"
WAIT_STEP = 9


def after_row(step: int) -> Phase:
    """The phase in which row `step` stands and the next does not: its own work, evaluation or wait."""

    def after(attempt: Attempt) -> bool:
        rows = attempt.job.rows()
        return has_state(attempt) and bool(rows) and rows[-1]["step"] == step

    return after


def make_up_evaluation(attempt: Attempt) -> bool:
    """The last row still lacks the validation loss that an earlier stop came before."""
    return has_state(attempt) and "val/loss" not in attempt.job.rows()[-1]


def handling_signals(attempt: Attempt) -> bool:
    """Python runs and has installed the handler, so this is the earliest moment that the command can answer for."""
    return has_signal_handler(attempt.process.pid, signal.SIGTERM) and not attempt.events("start")


def assert_stopped(attempt: Attempt, saved: bool) -> int:
    """Exit 75; the step that the job says it stopped at is the newest that is committed. Returns that step."""
    attempt.expect(75)
    assert "Traceback" not in attempt.output, attempt.output
    events = attempt.events("preempt")
    if saved:
        assert [event["saved"] for event in events] == [True], attempt.output
        assert events[0]["step"] == attempt.job.newest(), attempt.report("lost a step")
    else:
        assert not any(event["saved"] for event in events)
        assert attempt.job.newest() == attempt.newest_at_start, attempt.report("has committed something")
    return attempt.job.newest()


def signal_while_held(attempt: Attempt, phase: Phase, number: int, gate: Path) -> None:
    """Send a signal in a phase that lasts until `gate` is there, and open it when the signal has been heard."""
    # The process may be between the row that begins the phase and its look at signals, but not for so long.
    attempt.signal_during(phase, number, delay_seconds=0.5)
    attempt.wait_until(lambda: "stopping" in attempt.output, "the answer to the signal")
    gate.touch()


def assert_restores(attempt: Attempt, step: int) -> None:
    """The attempt goes on from `step`, and from the newest checkpoint without a detour."""
    attempt.wait_until(lambda: has_state(attempt), "restored")
    assert [event["step"] for event in attempt.events("restore")] == [step]
    assert not attempt.events("fallback", "quarantine")


def finish_like(whole: Job, job: Job, step: int) -> None:
    """Run to the end from `step`, and compare with the undisturbed run."""
    attempt = (job.with_options(NO_DELAY) if job.spec == COUNTER_SPEC else job).start()
    if step:
        assert_restores(attempt, step)
    attempt.expect(0)
    assert job.outcome() == whole.outcome()


def nano_at_six(directory: Path) -> Job:
    """Killed at step 6; rows that the kill came too late for are dropped, since tests wait for those to be written."""
    job = make_killed_run(6, NANO_SPEC, NANO).copy_to(directory)
    metrics = directory / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if json.loads(line)["step"] <= 6))
    return job


# Commands that run no job.

COMMANDS = {
    "export": (["export", "RUN", "-o", "OUT/weights"], ".weights.*.tmp"),
    "verify-resume": (["verify-resume", COUNTER_SPEC], "verify-resume-*/undisturbed/checkpoints"),
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "number"),
    [("export", signal.SIGINT), ("verify-resume", signal.SIGTERM)],
)
def test_a_signal_ends_a_command_without_leaving_files(name: str, number: signal.Signals, tmp_path: Path) -> None:
    job = nano_at_six(tmp_path / "run")
    before, output = hash_tree(job.directory), tmp_path / "out"
    output.mkdir()
    words, started = COMMANDS[name]
    words = [word.replace("RUN", str(job.directory)).replace("OUT", str(output)) for word in words]
    command = [sys.executable, "-m", "runner", *words]
    # The process is frozen as soon as it has begun its output, and started again if it was faster.
    for _ in range(5):
        shutil.rmtree(output / "weights", ignore_errors=True)
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(1) | {"TMPDIR": str(output)}, stderr=subprocess.PIPE, text=True
        )
        while process.poll() is None and not list(output.glob(started)):
            time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        if list(output.glob(started)):
            break
        process.kill()
    process.send_signal(number)
    process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 75, errors
    assert errors.splitlines()[-1] == f"{number.name}: stopped before the end; run the command again"
    assert not list(output.iterdir())
    assert hash_tree(job.directory) == before


# A trainer.


@pytest.mark.soak
def test_sigterm_at_startup_exits_at_once(tmp_path: Path) -> None:
    job = nano_at_six(tmp_path / "run")
    before = hash_tree(job.directory)
    attempt = job.start()
    attempt.signal_during(handling_signals, signal.SIGTERM)
    assert assert_stopped(attempt, saved=False) == 6
    assert hash_tree(job.directory) == before


@pytest.mark.soak
@pytest.mark.parametrize("number", SIGTERM_AND_IN_THE_SOAK_SIGINT)
def test_a_signal_does_not_wait_for_the_compiler(tmp_path: Path, number: int) -> None:
    job = Job(NANO_SPEC, tmp_path / "run", NANO, cache=tmp_path / "cold cache")
    attempt = job.start()
    attempt.signal_during(compiling, number, delay_seconds=0.2)
    assert_stopped(attempt, saved=False)
    assert not attempt.events("init"), "the compiler was waited for"
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), Job(NANO_SPEC, tmp_path / "run", NANO), 0)


@pytest.mark.soak
def test_sigterm_during_restore_keeps_the_checkpoint(tmp_path: Path) -> None:
    job = nano_at_six(tmp_path / "run")
    attempt = job.start()
    attempt.signal_during(restoring, signal.SIGTERM)
    assert_stopped(attempt, saved=False)
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), job, 6)


@pytest.mark.soak
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT], ids=["SIGTERM", "SIGINT"]
)
def test_a_signal_between_steps_saves_the_running_step(tmp_path: Path, number: int) -> None:
    job = nano_at_six(tmp_path / "run")
    attempt = job.start()
    assert attempt.freeze_during(lambda attempt: has_state(attempt) and job.rows()[-1]["step"] >= 8), attempt.report(
        "ended"
    )
    row = job.rows()[-1]["step"]
    attempt.process.send_signal(number)
    attempt.thaw()
    step = assert_stopped(attempt, saved=True)
    assert step in (row, row + 1, row + 2)  # the first if it was frozen between its row and the look at signals
    assert job.rows()[-1]["step"] == step
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), job, step)


@pytest.mark.soak
def test_sigterm_during_a_save_saves_the_next_step_too(tmp_path: Path) -> None:
    job = nano_at_six(tmp_path / "run")
    attempt = job.start()
    assert attempt.freeze_during(saving), attempt.report("ended without a save")
    saved = job.uncommitted()[-1]
    reached = max(saved, job.rows()[-1]["step"])  # steps go on while it is written
    attempt.process.send_signal(signal.SIGTERM)
    attempt.thaw()
    step = assert_stopped(attempt, saved=True)
    assert step in (reached, reached + 1, reached + 2)
    assert saved in job.committed()
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), job, step)


@pytest.mark.soak
def test_sigterm_while_waiting_for_data_finishes_the_step(tmp_path: Path) -> None:
    job = Job(NANO_SPEC, tmp_path / "run", NANO)
    attempt = job.start_paused(f"data {WAIT_STEP - 1}", until=tmp_path / "gate")
    signal_while_held(attempt, after_row(WAIT_STEP - 1), signal.SIGTERM, tmp_path / "gate")
    step = assert_stopped(attempt, saved=True)
    assert step in (WAIT_STEP - 1, WAIT_STEP)  # the first if it was frozen between its row and the look at signals
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), job, step)


@pytest.mark.soak
@pytest.mark.parametrize("step", [pytest.param(8, id="first evaluation"), pytest.param(30, id="last evaluation")])
def test_an_interrupted_evaluation_is_repeated(tmp_path: Path, step: int) -> None:
    job = nano_at_six(tmp_path / "run")
    gates = tmp_path / "first gate", tmp_path / "second gate"
    attempt = job.start_paused(f"evaluation {step} 0", until=gates[0])
    signal_while_held(attempt, after_row(step - 1), signal.SIGTERM, gates[0])
    assert assert_stopped(attempt, saved=True) == step
    assert job.rows()[-1]["step"] == step
    assert "val/loss" not in job.rows()[-1], "the evaluation was not cut short"

    again = job.start_paused(f"evaluation {step} 0", until=gates[1])
    signal_while_held(again, make_up_evaluation, signal.SIGTERM, gates[1])
    again.expect(75)
    assert job.newest() == step
    assert "val/loss" not in job.rows()[-1], "the evaluation was not cut short again"
    finish_like(make_uninterrupted_run(NANO_SPEC, NANO), job, step)


# The base class, by the counter.

# A save first: who is stopped before his first step leaves nothing to restore.
EVERY_PHASE = (saving, has_state, restoring, retaining, just_committed, has_state, handling_signals)


@pytest.mark.parametrize(
    ("number", "phases"),
    [
        pytest.param(signal.SIGTERM, (saving, restoring, just_committed), id="SIGTERM, three phases"),
        pytest.param(signal.SIGTERM, EVERY_PHASE, id="SIGTERM", marks=pytest.mark.soak),
        pytest.param(signal.SIGINT, EVERY_PHASE, id="SIGINT", marks=pytest.mark.soak),
    ],
)
def test_stops_of_a_counter_in_every_phase_change_no_bit(tmp_path: Path, number: int, phases: Sequence[Phase]) -> None:
    job = Job(COUNTER_SPEC, tmp_path / "run", COUNTER)
    rng = random.Random(number)
    step = 0
    for phase in phases:
        attempt = job.start()
        attempt.signal_during(phase, number, rng.uniform(0.05, 0.2) if phase is has_state else 0.0)
        attempt.expect(75)
        if step:
            assert [event["step"] for event in attempt.events("restore")] in ([step], [])
        before, step = step, job.newest()
        preempts = attempt.events("preempt")
        if phase in (restoring, handling_signals):
            assert step == before
            assert not any(event["saved"] for event in preempts)
        else:
            # An attempt that has not completed its first step has nothing to save.
            assert [event["saved"] for event in preempts] == [step > before]
            assert not preempts[0]["saved"] or preempts[0]["step"] == step
            assert step > before or phase is has_state, attempt.report(f"lost what it did {phase.__name__}")
    finish_like(make_uninterrupted_counter_run(COUNTER), job, step)


@pytest.mark.soak
def test_a_second_sigterm_exits_at_once(tmp_path: Path) -> None:
    job = make_killed_run(8, COUNTER_SPEC, COUNTER).copy_to(tmp_path / "run")
    before = hash_tree(job.checkpoints)
    attempt = job.with_options("config.step_seconds=3600").start()
    attempt.signal_during(has_state, signal.SIGTERM, delay_seconds=0.2)
    attempt.wait_until(lambda: "stopping" in attempt.output, "the answer to the first SIGTERM")
    attempt.process.send_signal(signal.SIGTERM)
    attempt.expect(75)
    assert hash_tree(job.checkpoints) == before
    assert read_history(LocalStore(job.directory)).attempts[-1].code == 75
    finish_like(make_uninterrupted_counter_run(COUNTER), job, 8)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        pytest.param(COUNTER_SPEC, COUNTER, marks=pytest.mark.soak, id="counter"),
        pytest.param(NANO_SPEC, NANO, id="gpt_nano"),
    ],
)
def test_a_repeated_finished_job_changes_no_file(tmp_path: Path, spec: str, options: tuple[str, ...]) -> None:
    job = make_uninterrupted_run(spec, options).copy_to(tmp_path / "run")
    before = hash_tree(job.directory)
    job.finish()
    assert hash_tree(job.directory) == before
