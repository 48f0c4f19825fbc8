"""Clock of a process, with time controlled by the test."""

import random

import pytest

from runner.distributed import clock as phases
from runner.distributed.clock import (
    COUNTED_CATEGORIES,
    DATA,
    EVALUATION,
    SAVE,
    Clock,
    ClockReading,
    Phase,
    Progress,
    TimeCategory,
)

PHASES = [value for value in vars(phases).values() if isinstance(value, Phase)]


@pytest.fixture
def now(monkeypatch):
    """Control the monotonic clock, and a wall clock that is set back meanwhile."""
    moment = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: moment[0])
    monkeypatch.setattr("time.time", lambda: 5000.0 - moment[0] / 7)
    return moment


class RecordingStore:
    def __init__(self) -> None:
        self.put_readings: list[ClockReading] = []
        self.beats: list[ClockReading] = []

    def put(self, reading: ClockReading) -> None:
        self.put_readings.append(reading)

    def put_heartbeat(self, reading: ClockReading) -> None:
        self.beats.append(reading)


def get_seconds(reading: ClockReading) -> dict[TimeCategory, float]:
    return {category: value for category, value in zip(COUNTED_CATEGORIES, reading.seconds, strict=True) if value}


def test_each_phase_has_a_unique_name_and_a_counted_category():
    assert len({phase.name for phase in PHASES}) == len(PHASES) > 5
    assert {phase.category for phase in PHASES} <= set(COUNTED_CATEGORIES)
    assert all(category.meaning.endswith(".") for category in TimeCategory)


def test_the_time_of_a_phase_is_counted_in_its_category(now):
    clock = Clock(age=3.0, category=TimeCategory.PROCESS_START)
    progress = Progress(clock)
    now[0] += 2.0
    progress.report_step(7)
    now[0] += 5.0
    progress.report_step(8)

    def batches():
        now[0] += 0.25
        yield "batch"

    progress.take_batch(batches())
    now[0] += 1.0
    with progress.report_phase(EVALUATION):
        now[0] += 10.0
        with progress.report_phase(SAVE):
            now[0] += 4.0
        now[0] += 20.0
    assert get_seconds(clock.read()) == {
        TimeCategory.PROCESS_START: 3.0,
        TimeCategory.SET_UP: 2.0,
        TimeCategory.STEPS: 5.0 + 1.0,
        DATA.category: 0.25,
        TimeCategory.EVALUATION: 30.0,
        TimeCategory.SAVE_STALL: 4.0,
    }
    assert clock.read_step_seconds() == {"process_start": 3.0, "set_up": 2.0, "steps": 5.0}
    now[0] += 1.0
    clock.end(75)
    now[0] += 0.5
    assert get_seconds(clock.read())[TimeCategory.SHUTDOWN] == 0.5
    assert (clock.read().code, clock.read().step) == (75, 8)


def test_the_categories_sum_to_the_elapsed_time_in_any_order(now):
    chance = random.Random(0)
    clock = Clock(age=1.0)
    progress = Progress(clock)
    began = now[0] - 1.0
    for step in range(200):
        act = chance.choice(["arrive", *PHASES])
        if act == "arrive":
            progress.report_step(step)
        else:
            with progress.report_phase(act):
                now[0] += chance.random()
        now[0] += chance.random()
        reading = clock.read()
        assert sum(reading.seconds) == pytest.approx(now[0] - began)
        assert reading.time - clock.began == pytest.approx(sum(reading.seconds))


def test_a_heartbeat_has_the_time_of_a_wall_clock_that_was_set_ahead(monkeypatch):
    wall, now = [5000.0], [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: wall[0] + now[0])
    clock, kept = Clock(), RecordingStore()
    clock.attach_store(kept)
    for wall[0] in (5000.0, 5001.0, 8600.0, 8601.0, 4000.0):  # a suspend, and a clock that is set back
        now[0] += 1.0
        assert clock.send_heartbeat()
    times = [5101.0, 5102.0, 8703.0, 8704.0, 8705.0]
    assert [reading.time for reading in kept.beats] == times
    assert [sum(reading.seconds) for reading in kept.beats] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert kept.beats[2].since == 8700.0


def test_a_store_gets_steps_phases_and_heartbeats_but_not_batches(now):
    clock, kept = Clock(), RecordingStore()
    progress = Progress(clock)
    progress.report_step(3)
    clock.attach_store(kept)
    assert [reading.step for reading in kept.put_readings] == [3]
    progress.take_batch(iter("b"))
    assert len(kept.put_readings) == 1
    progress.report_step(4)
    with progress.report_phase(SAVE):
        assert (kept.put_readings[-1].step, kept.put_readings[-1].category) == (4, TimeCategory.SAVE_STALL)
    assert kept.put_readings[-1].category is TimeCategory.STEPS
    assert not kept.beats
    clock.send_heartbeat()
    clock.end(1)
    assert [reading.code for reading in kept.beats] == [None, 1]
    clock.attach_store(None)
    clock.end(2)
    assert len(kept.beats) == 2
