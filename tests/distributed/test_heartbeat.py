"""Diagnosis of a stalled job from heartbeats."""

import dataclasses

import pytest

from runner.distributed.agreement import format_processes
from runner.distributed.clock import DATA, STEP
from runner.distributed.watchdog import (
    LOCAL_FAILURE_SECONDS,
    Diagnosis,
    Heartbeat,
    choose_recorders,
    find_failure,
    find_late,
    find_unresponsive,
    format_diagnosis,
    has_overdue,
)


def make_heartbeat(step, phase="step", seconds=3.0, is_overdue=False):
    return Heartbeat(1, "n7", phase, step, seconds, is_overdue, suspects_peer=False)


def test_a_diagnosis_names_unresponsive_and_overdue_processes_and_all_phases():
    beats = {
        0: make_heartbeat(41),
        1: make_heartbeat(40),
        2: make_heartbeat(41),
        3: make_heartbeat(41, "evaluation", 90.0, is_overdue=True),
    }
    assert format_diagnosis(beats, {1: "has not responded for 16 s"}) == (
        "the job cannot continue: process 1 (n7) has not responded for 16 s, last seen in step 41; "
        "process 3 (n7) is in evaluation at step 41 for 90 s, past the deadline; processes 0, 2 are in step 42 for 3 s"
    )
    assert format_diagnosis({}, {5: "has died"}) == "the job cannot continue: process 5 has died"


def test_a_diagnosis_names_the_read_that_does_not_return():
    text = "example 7 of images:Images has been read for 61 s"
    reading = dataclasses.replace(make_heartbeat(41, "data", 61.0, is_overdue=True), waits_for=text)
    line = "process {} (n7) is in data at step 41 for 61 s, past the deadline; "
    assert format_diagnosis({0: reading}, {}).endswith(f"{line.format(0)}{text}")
    assert format_diagnosis({0: make_heartbeat(41), 1: reading}, {}).endswith(f"; on process 1 {text}")


@pytest.mark.parametrize(
    ("places", "unresponsive", "late"),
    [
        ([("step", 41, True), ("step", 40, True), ("step", 41, True)], [], [1]),
        ([("step", 41, True), ("data", 41, True), ("step", 41, False)], [], [1]),
        ([("save", 40, True), ("step", 41, True)], [], [0]),
        ([("step", 41, True), ("step", 40, False)], [], []),
        ([("step", 41, True), ("step", 41, True)], [], []),
        ([("step", 41, True), ("step", 40, True)], [0], []),
        ([("step", 41, True)], [], []),
        ([], [2], []),
    ],
)
def test_overdue_processes_behind_others_are_the_cause_of_a_hang(places, unresponsive, late):
    beats = {
        process: make_heartbeat(step, phase, 90.0, is_overdue)
        for process, (phase, step, is_overdue) in enumerate(places)
    }
    assert find_late(beats, unresponsive) == late


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([3], "process 3"),
        ([3, 4], "processes 3, 4"),
        ([3, 4, 5], "processes 3-5"),
        ([0, 1, 2, 5, 7, 8, 10, 11, 12, 13], "processes 0-2, 5, 7, 8, 10-13"),
    ],
)
def test_three_numbers_in_a_row_are_a_range(numbers, text):
    assert format_processes(numbers) == text


@pytest.mark.parametrize("num_lost", [1, 512, 4095])
@pytest.mark.parametrize("is_overdue", [False, True])
def test_the_record_of_a_large_job_is_small(num_lost, is_overdue):
    beats = {process: make_heartbeat(41, is_overdue=is_overdue) for process in range(4096)}
    lost = dict.fromkeys(range(1, num_lost + 1), "has not responded for 31 s")
    recorders, line = choose_recorders(beats, lost), format_diagnosis(beats, lost)
    assert 0 < len(recorders) <= 8
    assert not set(recorders) & set(lost)
    assert len(recorders) * len(line) < 20_000
    assert "process 1 (n7) has not responded for 31 s" in line
    if num_lost > 8:
        assert f"processes 9-{num_lost} did not respond either" in line


def test_the_processes_that_may_be_the_cause_record_it():
    beats = {process: make_heartbeat(41) for process in range(64)}
    beats |= {50: make_heartbeat(41, is_overdue=True), 60: dataclasses.replace(beats[0], failure="hook A: E")}
    assert choose_recorders(beats, {0: "has died"}) == [*range(1, 7), 50, 60]
    beats |= {process: make_heartbeat(41, is_overdue=True) for process in range(20, 64)}
    assert choose_recorders(beats, {}) == [*range(20, 28)]
    assert choose_recorders({}, {0: "has died"}) == []


HOOK, EVALUATOR = "hook A in on_row at step 3 on process 1: E", "evaluator B at step 3: E on process 1"


def make_failed_heartbeat(line, seconds, *, is_end):
    return Heartbeat(
        1, "n7", "the wait", 3, seconds, is_overdue=False, suspects_peer=False, failure=line, is_end=is_end
    )


@pytest.mark.parametrize(
    ("line", "seconds", "is_end", "found"),
    [
        (EVALUATOR, 1.0, False, None),
        (EVALUATOR, 3.0, False, (f"{EVALUATOR}; waiting for processes 0, 2 to finish the same call", None)),
        (EVALUATOR, 600.0, False, (f"{EVALUATOR}; waiting for processes 0, 2 to finish the same call", None)),
        (HOOK, 3.0, True, (f"{HOOK}; waiting for processes 0, 2 to finish the same call", None)),
        (HOOK, LOCAL_FAILURE_SECONDS, True, (f"{HOOK}; processes 0, 2 did not finish the same call within 10 s", 1)),
    ],
)
def test_a_failure_on_one_process_is_announced_at_once(line, seconds, is_end, found):
    beats = {0: make_heartbeat(3), 1: make_failed_heartbeat(line, seconds, is_end=is_end), 2: make_heartbeat(3)}
    assert find_failure(beats) == (found and Diagnosis(*found))
    assert find_failure({1: beats[1]}) is None, "no process is waited for"
    assert format_diagnosis(beats, {}).endswith(f"; {line}")


@pytest.mark.parametrize(
    ("quiet_seconds", "left", "crashed", "found"),
    [
        ({0: 1.0, 1: 29.0}, {}, [], {}),
        ({0: 1.0, 1: 31.4}, {}, [], {1: "has not responded for 31 s"}),
        ({0: 1.0, 1: 31.4}, {1: 2}, [], {1: "has exited with code 2, see its own output"}),
        ({0: 1.0, 1: 31.4, 2: 1.0}, {1: 2, 2: 1}, [], {1: "has exited with code 2, see its own output"}),
        ({0: 1.0, 1: 1.0, 2: 31.4}, {2: 0}, [1], {1: "has died", 2: "has exited with code 0, see its own output"}),
        ({0: 1.0, 1: 31.4}, {}, [1], {1: "has died"}),
    ],
)
def test_a_process_that_exited_in_order_is_not_reported_as_hanging(
    quiet_seconds: dict[int, float], left: dict[int, int], crashed: list[int], found: dict[int, str]
) -> None:
    assert find_unresponsive(quiet_seconds, 30.0, left, crashed) == found


@pytest.mark.parametrize(
    ("phases", "seconds_since_data", "found"),
    [
        ((STEP.name, STEP.name), float("inf"), True),
        ((STEP.name, STEP.name), 61.0, True),
        ((STEP.name, STEP.name), 59.0, False),
        ((STEP.name, DATA.name), 0.0, False),
        ((STEP.name, "evaluation"), 0.0, True),
    ],
)
def test_a_wait_for_data_on_one_process_excuses_overdue_steps(
    phases: tuple[str, str], seconds_since_data: float, found: bool
) -> None:
    beats = [make_heartbeat(41, phase, 90.0, is_overdue=phase != DATA.name) for phase in phases]
    assert has_overdue(beats, seconds_since_data, 60.0) == found
