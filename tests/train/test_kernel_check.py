"""Kernels are tested before the first step: faulty ones are found, replaced by all processes, and stay replaced."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from runner.attempts.attempt import Attempt
from runner.errors import InvalidError, PeerLostError
from runner.plan.report import make_kernels_section
from runner.storage import LocalStore, read_json, read_log
from runner.train import kernel_check
from runner.train.kernel_check import RECORD, KernelCase, KernelChecker, KernelUse, find_difference, run_case
from tests.support.attempt import make_attempt
from tests.support.coordinator import MemoryCoordinator
from tests.support.job_process import Job
from tests.support.kernel_jobs import FAULT, FAULTS, PROCESS, SECONDS, Calls, DoublingTrainer, make_case
from tests.support.tiny_jobs import get_job_name, make_gpt, read_outcome, stop_after

SMALL: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 1, "width": 8},
    "config.train": {"total_steps": 4, "global_batch_examples": 8, "micro_batch_examples": 1},
    "config.eval": {"every_steps": None, "at_end": False},
    "checkpoint.every_steps": 2,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of results for each test, and no fault."""
    monkeypatch.setattr(kernel_check, "default_cache_directory", lambda: tmp_path / "cache")
    for name in (FAULT, PROCESS):
        monkeypatch.delenv(name, raising=False)
    Calls.trials = Calls.faulty = 0


def check(attempt: Attempt, *cases: KernelCase) -> set[str]:
    """Check a program that has these cases, without those that are avoided; returns what it avoids."""
    use = KernelUse()
    KernelChecker(attempt).check([use], lambda: [case for case in cases if use.is_allowed(case.kernel)], lambda: None)
    return {*use.avoided}


# One case.


def test_a_good_kernel_passes() -> None:
    assert run_case(make_case()) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_kernel_is_found(fault: str) -> None:
    words = {
        "wrong": "relative error",
        "a wrong gradient": "result 1 has a relative error",
        "not finite": "1 numbers that are not finite",
        "wrong once in ten": "different bits",
        "raises": "it raised JaxRuntimeError",
    }
    assert words[fault] in run_case(make_case(fault))


def test_a_kernel_that_is_wrong_once_in_ten_is_found_with_the_stated_probability() -> None:
    assert 1 - 0.9**kernel_check.REPETITIONS > 0.998
    assert 1 - 0.9**2 < 0.2  # two runs would find it in a fifth of the starts


def test_an_error_is_relative_to_its_row() -> None:
    wanted = np.ones((3, 4), np.float32)
    wanted[1] = 1e-3  # a row with small numbers
    found = wanted.copy()
    found[1, 2] += 0.02
    assert find_difference([found], [wanted], 0.03) == ""
    found[1, 2] += 0.2
    assert "result 0" in find_difference([found], [wanted], 0.03)
    assert "shapes" in find_difference([found[:2]], [wanted], 0.03)
    assert "relative error of nan" in find_difference([wanted], [wanted * np.nan], 0.03)


# The cache.


def test_a_result_is_kept_on_the_host(tmp_path: Path) -> None:
    for number in range(2):
        check(make_attempt(LocalStore(tmp_path / f"run{number}")), make_case())
    assert Calls.trials == 1
    assert not (tmp_path / "run1" / RECORD).exists()


@pytest.mark.daily(2)
@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"passed": false}', b'{"passed": true, "case": "another"}'])
def test_a_damaged_result_runs_the_case_again(content: bytes, tmp_path: Path) -> None:
    check(make_attempt(LocalStore(tmp_path / "run")), make_case())
    (path,) = (tmp_path / "cache" / "kernels").iterdir()
    path.write_bytes(content)
    check(make_attempt(LocalStore(tmp_path / "run")), make_case())
    assert Calls.trials == 2


def test_another_source_fact_or_version_runs_the_case_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "kernel.py"
    source.write_text("a = 1")
    attempt, case = make_attempt(LocalStore(tmp_path / "run")), dataclasses.replace(make_case(), sources=(str(source),))
    check(attempt, case)
    source.write_text("a = 2")
    check(attempt, dataclasses.replace(case))
    check(attempt, make_case(window=3))
    monkeypatch.setattr(jax, "__version__", "0.0.1")
    check(attempt, make_case(window=3))
    assert Calls.trials == 4


# The job.


def test_a_run_replaces_a_wrong_kernel_and_keeps_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(FAULT, "wrong")
    job = make_gpt(tmp_path / "run", DoublingTrainer, **SMALL)
    stop_after(job, 2)
    assert capsys.readouterr().err.count("KERNEL FAILED: double is wrong on this hardware; the run uses a sum") == 1
    (event,) = [row for row in read_log(job.store, "events") if row["event"] == "kernel_fallback"]
    assert (event["kernel"], event["facts"]) == ("double", {"size": 16})
    assert event["case"] == make_case().digest
    # The kernel is right again, as after an update, and the run is continued as it began.
    monkeypatch.delenv(FAULT)
    make_gpt(tmp_path / "run", DoublingTrainer, **SMALL)()
    monkeypatch.setenv(FAULT, "wrong")
    make_gpt(tmp_path / "whole", DoublingTrainer, **SMALL)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")
    monkeypatch.delenv(FAULT)
    make_gpt(tmp_path / "good", DoublingTrainer, **SMALL)()
    assert read_outcome(tmp_path / "run") != read_outcome(tmp_path / "good")
    (event,) = [row for row in read_log(LocalStore(tmp_path / "good"), "events") if row["event"] == "kernels"]
    assert (event["kernels"], event["avoided"], event["cases"]) == (["double"], [], 1)


def test_a_demanded_kernel_that_fails_ends_the_run(tmp_path: Path) -> None:
    case = dataclasses.replace(make_case("wrong"), is_demanded=True)
    with pytest.raises(InvalidError, match="use auto or library"):
        check(make_attempt(LocalStore(tmp_path)), case)


def test_the_replacement_is_tested_too(tmp_path: Path) -> None:
    use, cases = KernelUse(), [make_case("wrong"), make_case("raises", "other"), make_case(kernel="third")]

    def list_cases() -> list[KernelCase]:
        return next([case] for case in cases if use.is_allowed(case.kernel))

    KernelChecker(make_attempt(LocalStore(tmp_path))).check([use], list_cases, lambda: None)
    assert use.avoided == {"double", "other"}
    assert {*read_json(LocalStore(tmp_path), RECORD)["avoided"]} == {"double", "other"}


def test_a_damaged_record_is_refused(tmp_path: Path) -> None:
    for content in ("{", '{"avoided": ["double"], "starts": {}}', '{"avoided": {"double": 1}, "starts": {}}'):
        (tmp_path / RECORD).write_text(content)
        with pytest.raises(InvalidError, match="restore the file, or delete it"):
            check(make_attempt(LocalStore(tmp_path)), make_case())


# Kernels that never return.


class EndedError(Exception):
    """End of the process in a test."""


def test_a_case_that_ends_the_process_several_times_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(case: KernelCase) -> str:
        starts.append(read_json(LocalStore(tmp_path), RECORD)["starts"][case.digest])
        raise EndedError

    starts: list[int] = []
    monkeypatch.setattr(kernel_check, "run_case", die)
    for _ in range(kernel_check._MOST_STARTS):
        with pytest.raises(EndedError):
            check(make_attempt(LocalStore(tmp_path)), make_case())
    assert check(make_attempt(LocalStore(tmp_path)), make_case()) == {"double"}
    assert starts == [1, 2, 3, 4]


def test_one_start_that_was_killed_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(kernel_check, "run_case", lambda case: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            check(make_attempt(LocalStore(tmp_path)), make_case())
    assert check(make_attempt(LocalStore(tmp_path)), make_case()) == set()
    assert not (tmp_path / RECORD).exists()


@pytest.mark.soak
def test_a_kernel_that_never_returns_ends_with_76_and_is_replaced(tmp_path: Path) -> None:
    job, variables = make_process_job(tmp_path), {FAULT: "hangs", SECONDS: "2"}
    first = start_processes(job, 1, variables)[0]
    first.expect(76)
    assert "kernel double: it did not return within 2 s; run the same command again" in first.output
    assert "Traceback" not in first.output
    second = start_processes(job, 1, variables)[0]
    second.expect(0)
    assert [row["kernel"] for row in job.events("kernel_fallback")] == ["double"]
    assert job.events("kernels")[-1]["avoided"] == ["double"]


# Several processes.


def run_on_two(directory: Path, cases: list[KernelCase]) -> list[set[str] | str]:
    """Check one case on each of two simulated processes; returns what each avoids, or its error."""
    attempt = make_attempt(LocalStore(directory))
    attempts = [dataclasses.replace(attempt, hosts=hosts) for hosts in MemoryCoordinator(2).hosts()]

    def run(attempt: Attempt, case: KernelCase) -> set[str] | str:
        try:
            return check(attempt, case)
        except PeerLostError as error:
            return type(error).__name__

    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(run, attempts, cases))


@pytest.mark.parametrize("faulty", [0, 1])
def test_processes_replace_a_kernel_that_fails_on_one(faulty: int, tmp_path: Path) -> None:
    cases = [make_case("wrong" if process == faulty else "") for process in range(2)]
    assert run_on_two(tmp_path / "run", cases) == [{"double"}, {"double"}]
    assert f"process {faulty}: " in read_json(LocalStore(tmp_path / "run"), RECORD)["avoided"]["double"]


def test_a_process_whose_kernel_does_not_return_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_case(case: KernelCase) -> str:
        if case.is_demanded:  # the mark of the process that hangs
            raise PeerLostError("ended")
        return ""

    monkeypatch.setattr(kernel_check, "run_case", run_case)
    for name in ("CASE_SECONDS", "_SLACK_SECONDS"):
        monkeypatch.setattr(kernel_check, name, 0.2)
    cases = [make_case(), dataclasses.replace(make_case(), is_demanded=True)]
    assert run_on_two(tmp_path, cases) == ["PeerLostError", "PeerLostError"]
    assert "did not return in time" in read_json(LocalStore(tmp_path), RECORD)["avoided"]["double"]


def make_process_job(directory: Path) -> Job:
    options = (
        f"job={get_job_name(DoublingTrainer)}",
        "config.model={layers: 1, heads: 1, width: 8}",
        "config.train={total_steps: 4, global_batch_examples: 8}",
        "config.eval.every_steps=null",
        "config.schedule.warmup_steps=0",
    )
    return Job("specs/gpt_nano.yaml", directory / "run", options, cache=directory / "processes")


def start_processes(job: Job, number: int, variables: dict[str, str]) -> list[Any]:
    """Start the processes of a job with more environment variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        return [job.start()] if number == 1 else job.start_processes(number)


@pytest.mark.soak
def test_two_processes_train_on_without_a_kernel_that_fails_on_one(tmp_path: Path) -> None:
    job = make_process_job(tmp_path)
    for attempt in start_processes(job, 2, {FAULT: "wrong", PROCESS: "1"}):
        attempt.expect(0)
    (event,) = job.events("kernel_fallback")
    assert event["reason"].startswith("process 1: ")
    other = make_process_job(tmp_path / "other")
    for attempt in start_processes(other, 2, {FAULT: "wrong"}):
        attempt.expect(0)
    assert job.outcome() == other.outcome()


@pytest.mark.soak
def test_a_kernel_that_hangs_on_another_process_is_replaced_at_the_next_start(tmp_path: Path) -> None:
    job, variables = make_process_job(tmp_path), {FAULT: "hangs", PROCESS: "1", SECONDS: "3"}
    for attempt in start_processes(job, 2, variables):
        attempt.expect(76)
    for attempt in start_processes(job, 2, variables):
        attempt.expect(0)
    assert job.events("kernels")[-1]["avoided"] == ["double"]


# The plan.


def test_a_plan_says_which_kernels_are_tested() -> None:
    section = make_kernels_section([make_case(), make_case(window=3)], {"tripling": "a sum: tripling has no window"})
    assert section["doubling"] == "ours (tested at start)"
    assert section.figures[0].note == "double, 2 case(s), or else a sum"
    assert section["tripling, slow form"] == "plain XLA ops"
    assert section.figures[1].note == "a sum: tripling has no window"
    assert json.dumps(section["doubling"])
