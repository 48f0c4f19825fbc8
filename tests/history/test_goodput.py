"""Goodput accounting: every second in one category, for overlapping, inconsistent and nearly empty attempts."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.attempts.clock_file import ClockRecord
from runner.distributed.clock import COUNTED_CATEGORIES, ClockReading, TimeCategory
from runner.history.goodput import AttemptGoodput, AttemptTimeline, align_timelines, compute_goodput, list_restarts
from runner.history.ledger import AttemptEvents, LedgerSummary, apply_events
from runner.history.records import AttemptRecord, RunState

SECONDS = st.floats(0.0, 1000.0)


def make_attempt(
    number=1, began=0.0, claimed=None, resumed=None, step=0, marks=(), **seconds: float
) -> AttemptTimeline:
    """Make an attempt whose clock has counted these seconds."""
    counted = tuple(seconds.get(category.value, 0.0) for category in COUNTED_CATEGORIES)
    told = AttemptEvents(number, resumed_step=resumed, step=step, ready=None if resumed is None else began)
    told.marks.extend(marks)
    reading = ClockReading(began + sum(counted), step, 0.0, TimeCategory.STEPS, counted, 0)
    return AttemptTimeline(told, ClockRecord(began, "host", "", 1, None, reading), claimed)


def check(lives: list[AttemptTimeline], shares: list[AttemptGoodput], now: float | None) -> None:
    assert len(shares) == len(lives)
    whole = shares[-1].ended - shares[0].began + shares[0].gap_seconds
    total = sum(sum(share.seconds.values()) + share.gap_seconds for share in shares)
    assert total == pytest.approx(whole, abs=1e-6, rel=1e-9)
    for before, share in zip([None, *shares], shares, strict=False):
        assert sum(share.seconds.values()) == pytest.approx(share.ended - share.began, abs=1e-6, rel=1e-9)
        assert min(share.seconds.values()) >= -1e-9
        assert share.lost_steps >= 0
        if before is not None:
            assert share.gap_seconds >= 0
            assert share.began == pytest.approx(before.ended + share.gap_seconds)
    assert now is None or shares[-1].ended >= now


@st.composite
def draw_attempt(draw: st.DrawFn) -> AttemptTimeline:
    began, resumed = draw(SECONDS), draw(st.none() | st.integers(0, 50))
    step = None if resumed is None else resumed + draw(st.integers(0, 50))
    marks = draw(st.lists(st.tuples(st.integers(0, 100), SECONDS), max_size=3))
    told = AttemptEvents(
        1,
        resumed_step=resumed,
        step=step,
        repeated_steps=draw(st.integers(0, 50)),
        ready=draw(st.none() | SECONDS),
        stall_seconds=draw(SECONDS),
    )
    told.marks.extend(sorted(marks))
    told.first, told.last = draw(SECONDS), draw(SECONDS)
    told.start = draw(st.just({}) | st.fixed_dictionaries({"submitted": SECONDS | st.just("soon")}))
    counted = tuple(draw(SECONDS) for _ in COUNTED_CATEGORIES)
    reading = ClockReading(
        draw(SECONDS), step or 0, 0.0, draw(st.sampled_from(COUNTED_CATEGORIES)), counted, draw(st.none() | st.just(0))
    )
    kept = draw(st.none() | st.just(ClockRecord(began, "host", "", 1, None, reading)))
    return AttemptTimeline(told, kept, draw(st.none() | SECONDS))


@settings(max_examples=100, deadline=None)
@given(st.lists(draw_attempt(), min_size=1, max_size=6), st.none() | SECONDS)
def test_the_categories_sum_to_the_wall_time_for_any_timelines(lives: list[AttemptTimeline], now: float | None) -> None:
    for timelines in (lives, align_timelines(lives)):
        check(timelines, compute_goodput(timelines, now), now)


@pytest.mark.parametrize(
    ("begins", "gaps"),
    [
        ((0.0, 110.0, 220.0), (10.0, 10.0)),
        ((0.0, 95.0, 220.0), (0.0, 25.0)),  # an overlap, until the claim
        ((7200.0, 110.0, 220.0), (0.0, 10.0)),
        ((7200.0, 7310.0, 220.0), (10.0, 0.0)),
        ((7200.0, 90.0, -7200.0), (0.0, 0.0)),
        ((0.0, 7200.0, 220.0), (20.0, 0.0)),
        ((0.0, -7200.0, 220.0), (0.0, 20.0)),
    ],
    ids=[
        "right",
        "overlap",
        "set back",
        "set back late",
        "set back twice",
        "ahead for one attempt",
        "behind for one attempt",
    ],
)
def test_a_clock_that_was_set_back_takes_no_time_from_attempts(begins, gaps) -> None:
    lives = [
        make_attempt(number, began=began, claimed=began + 5.0, resumed=0, step=1, set_up=5.0, steps=95.0)
        for number, began in enumerate(begins, 1)
    ]
    timelines = align_timelines(lives)
    shares = compute_goodput(timelines, None)
    check(timelines, shares, None)
    assert [share.ended for share in shares][-1] == begins[-1] + 100
    assert [sum(share.seconds.values()) for share in shares] == pytest.approx(
        [100.0, 95.0 if begins[1] == 95 else 100.0, 100.0]
    )
    assert [share.gap_seconds for share in shares][1:] == pytest.approx(list(gaps))


DAY = 86400.0


@pytest.mark.parametrize(
    ("offsets", "machines"),
    [
        ((0.0, -400 * DAY, 0.0), "aaa"),
        ((-400 * DAY, 0.0, 0.0), "aaa"),
        ((0.0, 0.0, -400 * DAY), "aaa"),
        ((400 * DAY, 0.0, 0.0), "aaa"),
        ((0.0, 400 * DAY, 0.0), "aaa"),
        ((-400 * DAY, 0.0, -400 * DAY), "aba"),
        ((0.0, -400 * DAY, 0.0), "abc"),
        ((0.0, 400 * DAY, 0.0), "abc"),
        ((0.0, 30.0, 0.0), "aaa"),
    ],
    ids=str,
)
def test_a_wrong_clock_of_one_attempt_takes_no_goodput(offsets, machines) -> None:
    lives = []
    for number, (offset, machine) in enumerate(zip(offsets, machines, strict=True), 1):
        real = 1000.0 * number
        life = make_attempt(
            number,
            began=real + offset,
            claimed=real + offset + 5.0,
            resumed=number,
            step=number + 1,
            set_up=5.0,
            steps=895.0,
        )
        lives.append(replace(life, clock=replace(life.clock, machine=machine, uptime=real)))
    timelines = align_timelines(lives)
    shares = compute_goodput(timelines, None)
    check(timelines, shares, None)
    assert sum(share.seconds[TimeCategory.STEPS] for share in shares) == pytest.approx(3 * 895.0)
    assert sum(share.gap_seconds for share in shares) <= 200.0
    is_moved = any(abs(timeline.shift_seconds) > 60 for timeline in timelines)
    assert is_moved == any(abs(offset) > 60 for offset in offsets)


def test_overlapping_time_belongs_to_the_older_attempt_until_the_claim() -> None:
    older = make_attempt(1, began=0.0, resumed=0, step=100, process_start=10.0, steps=80.0, shutdown=10.0)
    newer = make_attempt(2, began=70.0, claimed=90.0, resumed=60, process_start=15.0, set_up=5.0, steps=30.0, step=90)
    shares = compute_goodput([older, newer], None)
    check([older, newer], shares, None)
    assert [(share.began, share.ended) for share in shares] == [(0.0, 90.0), (90.0, 120.0)]
    assert shares[0].seconds[TimeCategory.SHUTDOWN] + shares[0].seconds[TimeCategory.PROCESS_START] == 20.0
    assert shares[0].seconds[TimeCategory.STEPS] + shares[0].seconds[TimeCategory.LOST_STEPS] == 70.0
    assert {category: seconds for category, seconds in shares[1].seconds.items() if seconds} == {
        TimeCategory.STEPS: 30.0
    }


def test_the_time_since_the_first_submission_is_a_gap() -> None:
    first, second = make_attempt(1, began=100.0, steps=10.0), make_attempt(2, began=150.0, steps=10.0)
    first.events.start, second.events.start = {"submitted": 40.0}, {"submitted": 120.0}
    shares = compute_goodput([first, second], None)
    check([first, second], shares, None)
    assert [(share.began, share.gap_seconds) for share in shares] == [(100.0, 60.0), (150.0, 40.0)]


@pytest.mark.parametrize(
    ("marks", "lost_seconds"),
    [((), 30.0), (((60, 45.0),), 5.0), (((40, 20.0),), 20.0), (((40, 20.0), (80, 40.0)), 20.0)],
    ids=["in proportion", "by the save of that step", "after a save before it", "between two saves"],
)
def test_lost_time_comes_from_save_marks_or_interpolation(marks, lost_seconds: float) -> None:
    older = make_attempt(1, began=0.0, resumed=20, step=100, steps=50.0 if marks else 60.0, marks=marks)
    shares = compute_goodput([older, make_attempt(2, began=70.0, resumed=60, step=60)], None)
    assert shares[0].lost_steps == 40
    assert shares[0].seconds[TimeCategory.LOST_STEPS] == pytest.approx(lost_seconds)


def test_steps_that_an_attempt_has_repeated_are_lost() -> None:
    attempt = make_attempt(1, began=0.0, resumed=20, step=80, steps=70.0)
    # From step 60 back to 50, which makes 70 steps in all.
    rows = [{"attempt": 1, "time": 1.0, "event": "load", "step": 50, "before": 60}]
    attempt.events.repeated_steps = apply_events(LedgerSummary(), rows).attempts[1].repeated_steps
    (share,) = compute_goodput([attempt], None)
    check([attempt], [share], None)
    assert (share.lost_steps, share.repeated_steps) == (0, 10)
    assert share.seconds[TimeCategory.STEPS] == pytest.approx(60.0)
    assert share.seconds[TimeCategory.LOST_STEPS] == pytest.approx(10.0)


def test_a_restart_lasts_from_the_end_of_an_attempt_to_the_first_step_of_the_next() -> None:
    seconds = {TimeCategory.PROCESS_START: 2.0, TimeCategory.RESTORE: 3.0, TimeCategory.STEPS: 50.0}
    first = AttemptRecord(1, 0, 60, RunState.KILLED, 60, resumed_step=0, reached_step=9, seconds=seconds)
    stuck = replace(first, number=2, resumed_step=5, reached_step=5)
    second = replace(stuck, number=3, reached_step=20, gap_seconds=4.0)
    ((attempt, restart),) = list_restarts([first, stuck, second])
    assert attempt is second
    assert sum(restart.values()) == 9
    assert restart[TimeCategory.GAP] == 4


def test_time_of_a_live_attempt_continues_in_its_category() -> None:
    running = make_attempt(1, began=0.0, resumed=0, step=3, steps=5.0)
    running = AttemptTimeline(
        running.events, ClockRecord(0.0, "", "", 1, None, running.clock.reading._replace(code=None)), None
    )
    assert compute_goodput([running], 9.0)[0].seconds[TimeCategory.STEPS] == 9.0
