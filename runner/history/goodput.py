"""Every second of a run in exactly one bucket, and the steps that were lost. Pure.

1. An attempt's window is from its begin to its last sign of life. Where the next attempt began before that, as a new
   machine may while the old one still saves, the seconds belong to the older until the newer has claimed the directory,
   and to the newer from then on: windows never overlap, and what lies between two of them is the gap. So is what lies
   before the first, where it is known when the job was submitted.
2. Within its window an attempt's clock says where the time went. What it does not is unattributed.
3. Of an attempt's steps those beyond what any later attempt has resumed from were lost; their time is what the clock
   had counted for steps at its end, less what it had when the save of that step was made.
4. Of an attempt without a clock, by a runner that kept none, the ledger's own times are taken: from the state that was
   ready to the last event, but for saves, all is steps, and what lies before the state is compile, restore, or
   unattributed.

How an attempt has ended, or that it lives: by its own word, else by the signs that it has left. Asks for processes.

Its own word is the exit code that its clock has kept, or the event that says so. Without one it was killed, fenced, or
lives: its process is asked for where it ran on this machine, and elsewhere `SILENT_SECONDS` without a sign are no life.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from runner.distributed.clock import COUNTED_BUCKETS, TimeBucket
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.history.ledger import AttemptEvents, get_float
from runner.history.records import RunState
from runner.run.clock_file import ClockRecord

Seconds = dict[TimeBucket, float]
_EARLY = (TimeBucket.UNATTRIBUTED, *COUNTED_BUCKETS)  # what goes first where the begin of a window is cut off
_LATE = (TimeBucket.UNATTRIBUTED, TimeBucket.STEPS, *reversed(COUNTED_BUCKETS))  # and its end


@dataclass(frozen=True)
class AttemptTimeline:
    """What is known of one attempt, from whichever source."""

    told: AttemptEvents
    kept: ClockRecord | None
    claimed: float | None  # Unix seconds

    @property
    def began(self) -> float:
        """The first that is known of it, in Unix seconds."""
        if self.kept is not None:
            return self.kept.began
        began = self.told.start.get("began")
        known = [began if isinstance(began, float) and began <= self.told.first else math.inf, self.told.first]
        found = min(*known, math.inf if self.claimed is None else self.claimed)
        return found if math.isfinite(found) else 0.0

    @property
    def submitted(self) -> float:
        """When the engine was asked for it; infinity if nobody has said."""
        found = get_float(self.told.start, "submitted")
        return math.inf if found is None else found

    @property
    def ended(self) -> float:
        """Its last sign of life."""
        signs = [self.began, self.told.last]
        if self.kept is not None:
            signs.append(self.kept.reading.time)
        return max(signs)

    @property
    def reached_step(self) -> int | None:
        """The last step that it is known to have completed; None if it never had a state."""
        kept = self.kept.reading.step if self.kept is not None and self.told.resumed_step is not None else None
        steps = [step for step in (self.told.step, kept) if step is not None]
        return max(steps) if steps and self.told.resumed_step is not None else None


@dataclass(frozen=True)
class AttemptGoodput:
    """What one attempt has of the run's time: its window, which is at `began`, and the buckets that sum to it."""

    began: float
    ended: float
    gap_seconds: float
    seconds: Seconds
    lost_steps: int


def compute_goodput(lives: Sequence[AttemptTimeline], now: float | None) -> list[AttemptGoodput]:
    """The share of each attempt, in order; `now` ends the newest if that lives, else None."""
    floors = _floors(lives)
    shares: list[AttemptGoodput] = []
    submitted = min((life.submitted for life in lives), default=math.inf)  # one that was queued again says a later time
    for index, life in enumerate(lives):
        newer = lives[index + 1] if index + 1 < len(lives) else None
        share = _alone(life, floors[index], now if newer is None else None)
        if newer is not None:
            share = _cut_end(share, newer.began if newer.claimed is None else newer.claimed)
        shares.append(_after(share, shares[-1].ended if shares else min(life.began, submitted)))
    return shares


def _floors(lives: Sequence[AttemptTimeline]) -> list[int | None]:
    """For each attempt the lowest step that a later one has resumed from; None if none has."""
    floors: list[int | None] = []
    floor: int | None = None
    for life in reversed(lives):
        floors.append(floor)
        resumed = life.told.resumed_step
        if resumed is not None:
            floor = resumed if floor is None else min(floor, resumed)
    return floors[::-1]


def _alone(life: AttemptTimeline, floor: int | None, now: float | None) -> AttemptGoodput:
    """The share of an attempt as if there were no other."""
    ended = life.ended if now is None else max(now, life.ended)
    seconds = _counted(life) if life.kept is not None else _told(life.told)
    if life.kept is not None and now is not None and life.kept.reading.code is None:
        seconds[life.kept.reading.bucket] += max(ended - life.kept.reading.time, 0.0)
    reached, resumed, lost_steps = life.reached_step, life.told.resumed_step, 0
    if reached is not None and resumed is not None and floor is not None and floor < reached:
        kept_step = max(floor, resumed)
        steps_seconds = seconds[TimeBucket.STEPS]
        lost_seconds = steps_seconds - life.told.steps_seconds_at(kept_step, reached, steps_seconds)
        lost_seconds = min(max(lost_seconds, 0.0), steps_seconds)
        seconds[TimeBucket.STEPS] -= lost_seconds
        seconds[TimeBucket.LOST_STEPS] += lost_seconds
        lost_steps = reached - kept_step
    return _fitted(AttemptGoodput(life.began, ended, 0.0, seconds, lost_steps))


def _counted(life: AttemptTimeline) -> Seconds:
    assert life.kept is not None
    return dict.fromkeys(TimeBucket, 0.0) | dict(zip(COUNTED_BUCKETS, life.kept.reading.seconds, strict=True))


def _told(told: AttemptEvents) -> Seconds:
    """Of an attempt without a clock."""
    seconds = dict.fromkeys(TimeBucket, 0.0)
    seconds[TimeBucket.COMPILE], seconds[TimeBucket.RESTORE] = told.compile_seconds, told.restore_seconds
    if told.ready is not None:
        seconds[TimeBucket.SAVE_STALL] = told.stall_seconds
        seconds[TimeBucket.STEPS] = max(told.last - told.ready - told.stall_seconds, 0.0)
    return seconds


def _fitted(share: AttemptGoodput) -> AttemptGoodput:
    """Its seconds as they sum to the window: what is missing is unattributed, what is too much is cut off its end."""
    missing, seconds = share.ended - share.began - sum(share.seconds.values()), dict(share.seconds)
    seconds[TimeBucket.UNATTRIBUTED] += max(missing, 0.0)
    return replace(share, seconds=_without(seconds, max(-missing, 0.0), _LATE))


def _cut_end(share: AttemptGoodput, moment: float) -> AttemptGoodput:
    """Without what lies after `moment`."""
    if share.ended <= moment:
        return share
    ended = max(moment, share.began)
    return replace(share, ended=ended, seconds=_without(share.seconds, share.ended - ended, _LATE))


def _after(share: AttemptGoodput, moment: float) -> AttemptGoodput:
    """Without what lies before `moment`, where the attempt before has ended; with the gap since then."""
    if share.began >= moment:
        return replace(share, gap_seconds=share.began - moment)
    ended = max(share.ended, moment)
    lacking = moment - share.began - (ended - share.ended)
    return replace(share, began=moment, ended=ended, seconds=_without(share.seconds, lacking, _EARLY))


def _without(seconds: Seconds, amount: float, order: Sequence[TimeBucket]) -> Seconds:
    """The same with `amount` taken away, from the first of `order` that have any."""
    left = dict(seconds)
    for bucket in (TimeBucket.LOST_STEPS, *order) if order is _LATE else (*order, TimeBucket.LOST_STEPS):
        taken = min(left[bucket], amount)
        left[bucket] -= taken
        amount -= taken
    return left


SILENT_SECONDS = 30.0
SILENT_WITHOUT_CLOCK_SECONDS = 120.0  # of a runner that kept none, whose events are a minute apart
_STEPS_FACTOR, _LEAST_STEP_SECONDS = 20.0, 60.0  # as the watchdog has them
_STATES = {
    EXIT_DONE: RunState.DONE,
    EXIT_FAILED: RunState.FAILED,
    EXIT_INVALID: RunState.INVALID,
    EXIT_PREEMPTED: RunState.PREEMPTED,
    EXIT_RETRYABLE: RunState.RETRYABLE,
}
_EVENTS = {"done": RunState.DONE, "preempt": RunState.PREEMPTED, "failed": RunState.FAILED, "stuck": RunState.RETRYABLE}


class AttemptOutcome(NamedTuple):
    """A state, and since when.

    Attributes:
        is_alive: signs of life are recent: its time goes on.
    """

    state: RunState
    since: float
    is_alive: bool = False
    code: int | None = None
    reason: str | None = None


def infer_outcome(life: AttemptTimeline, newer: AttemptTimeline | None, now: float) -> AttemptOutcome:
    """How `life` has ended at `now`, where `newer` is the attempt after it."""
    told, kept = life.told, life.kept
    code = told.code if kept is None or kept.reading.code is None else kept.reading.code
    if code is not None or told.end is not None:
        state = _STATES.get(code, RunState.FAILED) if code is not None else _EVENTS[str(told.end)]
        return AttemptOutcome(state, life.ended, False, code, told.reason)
    if newer is not None:
        is_fenced = newer.claimed is not None and life.ended > newer.claimed
        return AttemptOutcome(RunState.FENCED if is_fenced else RunState.KILLED, life.ended)
    if kept is not None and kept.is_process_alive is False:
        return AttemptOutcome(RunState.KILLED, life.ended)
    if now - life.ended > (SILENT_WITHOUT_CLOCK_SECONDS if kept is None else SILENT_SECONDS):
        return AttemptOutcome(RunState.STALLED, life.ended)
    if kept is not None and kept.reading.bucket is TimeBucket.STEPS:
        steps = max(kept.reading.step - (told.resumed_step or 0), 0)
        seconds = kept.reading.seconds[TimeBucket.STEPS.index] - (now - kept.reading.since)
        usual_seconds = max(seconds, 0.0) / steps if steps else 0.0
        if steps and now - kept.reading.since > max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * usual_seconds):
            return AttemptOutcome(RunState.STALLED, kept.reading.since, is_alive=True)
    return AttemptOutcome(RunState.RUNNING, life.began, is_alive=True)
