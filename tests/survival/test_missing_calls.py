"""Runs on file systems that lack calls, or whose handles become stale: killed and resumed, with the same outcome."""

import errno
from pathlib import Path

import pytest

from tests.support.job_process import (
    SMALL_GPT_OPTIONS,
    Attempt,
    Job,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)
from tests.support.missing_calls import CALLS, ERRORS, make_variables

COUNTER = ("config.width=64", "config.total_steps=60", "checkpoint.every_steps=5", "checkpoint.keep_last=2")
GPT = (*SMALL_GPT_OPTIONS, "config.train.total_steps=30", "checkpoint.every_steps=3", "logging.every_steps=1")
MAX_STARTS = 12


def start(job: Job, variables: dict[str, str]) -> Attempt:
    return Attempt(job, ["runner", *job.arguments], job.devices, **variables)


def run_with_kills(job: Job, variables: dict[str, str], kill_steps: tuple[int, ...], codes: tuple[int, ...]) -> None:
    """Start the job again and again, until it is done; the first starts are killed as soon as a step is committed."""
    kills = list(kill_steps)
    for _ in range(MAX_STARTS):
        attempt = start(job, variables)
        if kills and attempt.wait_until_or_exit(lambda: job.newest() >= kills[0], "a commit"):
            kills.pop(0)
            attempt.kill()
            continue
        code = attempt.wait()
        assert code in codes, attempt.report(f"ended with {code}")
        assert "Traceback" not in attempt.output
        if code == 0:
            return
    raise AssertionError(attempt.report(f"not done after {MAX_STARTS} starts"))


def list_refused(root: Path) -> set[str]:
    """Return the calls that the library has refused."""
    log = root.with_name(f"{root.name}.calls")
    return {line.split()[0] for line in log.read_text().splitlines()} if log.exists() else set()


def check_counter(tmp_path: Path, calls: str, code: int) -> None:
    root = tmp_path / "disk"
    fast = (f"checkpoint.local_directory={root}/fast", "checkpoint.local_every_steps=2")
    job = Job("specs/counter.yaml", root / "run", (*COUNTER, *fast, "config.step_seconds=0.03"), cache=root / "cache")
    run_with_kills(job, make_variables(root, calls, code), (20,), (0,))
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()
    assert len(job.events("start")) == 2
    assert job.events("save_failed") == []
    assert list_refused(root) & set(calls.split(","))
    assert list(root.rglob("*.claim")) == []


@pytest.mark.soak
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
@pytest.mark.parametrize("calls", [*CALLS, ",".join(CALLS)])
def test_a_run_without_any_of_the_calls_is_killed_and_resumed(calls, code, tmp_path):
    check_counter(tmp_path, calls, code)


@pytest.mark.soak
@pytest.mark.parametrize("code", ERRORS, ids=errno.errorcode.get)
def test_a_trainer_without_the_calls_is_killed_and_resumed(code, tmp_path):
    root = tmp_path / "disk"
    job = Job("specs/gpt_nano.yaml", root / "run", GPT, cache=root / "cache")
    run_with_kills(job, make_variables(root, ",".join(CALLS), code), (6, 15), (0,))
    assert job.outcome() == make_uninterrupted_run("specs/gpt_nano.yaml", GPT).outcome()
    assert len(job.events("start")) == 3
    assert list_refused(root) >= {"link", "flock", "fsyncdir"}


@pytest.mark.soak
def test_processes_without_the_calls_are_killed_and_resumed(tmp_path):
    root = tmp_path / "disk"
    job = Job("specs/counter.yaml", root / "run", (*COUNTER, "config.step_seconds=0.03"), cache=root / "cache")
    variables = make_variables(root, ",".join(CALLS))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        attempts = job.start_processes(2)
        attempts[0].wait_until(lambda: job.newest() >= 20, "step 20")
        for attempt in attempts:
            attempt.kill()
        for attempt in job.start_processes(2):
            attempt.expect(0)
    assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()


@pytest.mark.soak
@pytest.mark.parametrize("stale", ["7,11", "13,17", "29,31", "53,101", "149,211"])
@pytest.mark.parametrize("spec", ["counter", "gpt_nano"])
def test_a_run_with_stale_handles_is_killed_and_resumed(spec, stale, tmp_path):
    root = tmp_path / "disk"
    options = (*COUNTER, "config.step_seconds=0.01") if spec == "counter" else GPT
    job = Job(f"specs/{spec}.yaml", root / "run", options)
    variables = make_variables(root, stale=stale)
    run_with_kills(job, variables, (10,), (0, 76))
    if spec == "counter":
        assert job.outcome() == make_uninterrupted_counter_run(COUNTER).outcome()
    else:
        assert job.outcome() == make_uninterrupted_run("specs/gpt_nano.yaml", GPT).outcome()
    assert list_refused(root) & {"open", "read"}
