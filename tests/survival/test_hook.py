"""Hooks on real processes: kill -9 and stops at any moment, on one host or two, and hooks that fail on one of them."""

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.job_process import SMALL_GPT_OPTIONS, Job, make_uninterrupted_run
from tests.survival.test_kill import TRAINER_DELAYS, storm

pytestmark = pytest.mark.soak
SPEC = "specs/gpt_nano.yaml"
SMALL = (
    *SMALL_GPT_OPTIONS,
    "config.model={layers: 1, heads: 1, width: 16}",
    "config.train.total_steps=300",
    "checkpoint.every_steps=5",
    "checkpoint.keep_best={metric: val/loss}",
    "logging.every_steps=3",
    "config.eval.every_steps=10",
)
HERE = "tests.support.hooks"
HOOKS = (
    f"hooks=[{HERE}:DiaryHook, {HERE}:DiaryObserver, runner.hook:BestAtEnd, "
    f"{{hook: {HERE}:StepActionHook, config: {{step: 150}}}}]"
)
EARLY = f"hooks=[{{hook: runner.hook:EarlyStopping, config: {{patience: 4, min_delta: 0.2}}}}, {HERE}:DiaryHook]"


def diary(job: Job) -> list[str]:
    """Return the calls for rows and evaluations in order, without repetitions."""
    lines = (job.directory / "diary").read_text().splitlines()
    return [*dict.fromkeys(line for line in lines if line.split()[0] in ("row", "evaluation", "saw"))]


def by_step(lines: list[str]) -> list[str]:
    return sorted(lines, key=lambda line: (int(line.split()[-1]), line))


@pytest.mark.parametrize("hooks", [HOOKS, EARLY])
def test_kills_in_every_phase_change_no_hook_state(hooks: str, tmp_path: Path) -> None:
    job = Job(SPEC, tmp_path / "run", (*SMALL, hooks))
    storm(job, 14, seed=5, delays=TRAINER_DELAYS)
    job.finish()
    whole = make_uninterrupted_run(SPEC, (*SMALL, hooks))
    assert job.outcome() == whole.outcome()
    assert job.result()["stopped_by"] in ("StepActionHook", "EarlyStopping")
    assert by_step(diary(job)) == by_step(diary(whole))
    again = job.start()
    again.expect(0)
    assert "done, nothing to do" in again.output
    assert job.outcome() == whole.outcome()


@pytest.mark.parametrize("number", [2, 3, 5])
def test_stops_of_two_processes_change_no_hook_state(number: int, tmp_path) -> None:
    job, chance = Job(SPEC, tmp_path / "run", (*SMALL, HOOKS)), random.Random(number)
    for round_ in range(4):
        attempts, before = job.start_processes(2), job.newest()
        if not attempts[0].wait_until_or_exit(lambda before=before: job.newest() >= before + 10, "two more saves"):
            break
        time.sleep(chance.uniform(0, 0.2))
        if round_ % 2:
            attempts[chance.randrange(2)].process.send_signal(signal.SIGTERM)
            for attempt in attempts:
                attempt.wait()
        else:
            for attempt in attempts:
                attempt.process.kill()
                attempt.wait()
    if not (job.directory / "result.json").exists():
        for attempt in job.start_processes(2):
            attempt.expect(0)
    whole = make_uninterrupted_run(SPEC, (*SMALL, HOOKS), num_processes=2)
    assert job.outcome() == whole.outcome()
    assert by_step(diary(job)) == by_step(diary(whole))


def sick_options(**config: object) -> str:
    words = ", ".join(f"{key}: {value}" for key, value in config.items())
    return f"hooks=[{{hook: {HERE}:FaultyHook, config: {{{words}}}}}]"


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize("method", ["on_row", "on_checkpoint"])
def test_an_exception_of_a_hook_on_one_host_exits_1(process: int, method: str, tmp_path) -> None:
    options = (*SMALL, sick_options(step=15, method=method, process=process), "config.train.total_steps=30")
    job = Job(SPEC, tmp_path / "run", options)
    for attempt in job.start_processes(2):
        attempt.expect(1)
        assert (
            f"hook FaultyHook in {method} at step 15 on process {process}: ZeroDivisionError: a bug" in attempt.output
        )
        assert "Traceback" not in attempt.output
    assert job.newest() == 10
    for attempt in job.with_options(sick_options(step=1000)).start_processes(2):
        attempt.expect(2)  # another rule of a hook with counters
    fixed = job.with_options(sick_options(step=15, method=method, process=process).replace("process: 1", "process: 7"))
    assert fixed.newest() == 10


@pytest.mark.parametrize(("process", "last_step"), [(0, 15), (1, 30)])
def test_only_the_verdict_of_host_0_counts(process: int, last_step: int, tmp_path) -> None:
    options = (*SMALL, sick_options(step=15, process=process, how="stop"), "config.train.total_steps=30")
    job = Job(SPEC, tmp_path / "run", options)
    attempts = job.start_processes(2)
    for attempt in attempts:
        attempt.expect(0)
    assert job.result()["step"] == last_step
    said = ("stop", "go on") if process == 0 else ("go on", "stop")
    assert (
        f"hook FaultyHook says {said[0]} on process 0 and {said[1]} on process 1, in on_row at step 15"
        in attempts[0].output
    )


@pytest.mark.parametrize("processes", [1, 2])
def test_the_watchdog_names_a_hanging_hook(processes: int, tmp_path) -> None:
    guilty = processes - 1
    options = (*SMALL, sick_options(step=15, how="hang", process=guilty), "deadlines.phase_seconds=60")
    job = Job(SPEC, tmp_path / "run", options)
    for attempt in job.start_processes(2) if processes == 2 else [job.start()]:
        attempt.expect(76)
        assert "is in hook FaultyHook.on_row at step 14 for" in attempt.output, attempt.report("does not name the hook")
        assert "past the deadline" in attempt.output
    stacks = (job.directory / "stacks" / f"000001.{guilty}.txt").read_text()
    assert "tests/support/hooks.py" in stacks


@pytest.mark.parametrize("process", [0, 1])
def test_a_hook_that_raises_before_a_collective_exits_1(process: int, tmp_path: Path) -> None:
    job = Job(SPEC, tmp_path / "run", (*SMALL, sick_options(step=15, how="alone", process=process)))
    for attempt in job.start_processes(2):
        attempt.expect(1)
        line = f"hook FaultyHook in on_row at step 15 on process {process}: ZeroDivisionError: a bug"
        assert line in attempt.output, attempt.report("does not name the hook")
        assert f"waiting for process {1 - process} to finish the same call" in attempt.output
        assert f"process {1 - process} did not finish the same call within" in attempt.output


def test_every_host_names_a_failed_evaluator(tmp_path: Path) -> None:
    options = (
        *SMALL,
        "job=tests.support.bigram:FailingEvaluatorTrainer",
        "checkpoint.keep_best=null",
        "deadlines.phase_seconds=60",
    )
    for attempt in Job(SPEC, tmp_path / "run", options).start_processes(2):
        attempt.expect(76)
        line = "evaluator alone at step 10: ValueError: no such figure on process 1"
        assert f"{line}; waiting for process 0 to finish the same call" in attempt.output, attempt.report(
            "does not name it"
        )
        told, verdict = attempt.output.index(line), attempt.output.index("the job cannot continue: ")
        assert told < verdict
        assert line in attempt.output[verdict:]
