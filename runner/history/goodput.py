"""Goodput accounting: every second of a run in exactly one category, and lost steps. Pure.

1. The window of an attempt lasts from its beginning to its last sign of life. If the next attempt began before that,
   for instance on a new machine while the old one still saves, the older attempt's window ends, and the newer one's
   begins, when the newer one has claimed the directory, so windows never overlap. The time between two windows is the
   gap; so is the time before the first one, if it is known when the job was submitted.
2. Within its window, time is attributed by the clock of the attempt. The rest is unattributed.
3. The steps of an attempt beyond the lowest step that a later attempt resumed from are lost. Their time is the time
   that the clock had counted for steps at the end, minus what it had counted when that step was saved. Steps that the
   attempt itself has repeated, because it went back to a checkpoint, are lost too.
4. If an attempt has claimed the directory at an earlier time than the one before it, the system clock was set back in
   between, or another host's clock is behind. The times of the attempts before are then moved back, until they end
   where the newer one begins; else their windows would be empty. An attempt that claims earlier than the one before
   it and than the newest one had a clock that is behind: it is moved to the end of the one before. Where two attempts
   ran on one machine since its last boot, the time between them is that of the machine's monotonic clock.
5. For an attempt without a clock, written by an older runner, the times of its events are used: from the availability
   of the state to the last event everything except saves counts as steps; the time before is compile, restore, or
   unattributed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from runner.attempts.clock_file import ClockRecord
from runner.distributed.clock import COUNTED_CATEGORIES, TimeCategory
from runner.history.ledger import AttemptEvents, get_time
from runner.history.records import AttemptRecord

Seconds = dict[TimeCategory, float]
# The time in a claim is that of its first try, so the times of attempts that claim at once may be in another order.
_CLAIM_RACE_SECONDS = 10.0
CLOCK_TOLERANCE_SECONDS = 60.0  # clocks of hosts that differ by less agree
# Categories in the order in which time is removed from them if the beginning, or the end, of a window is cut off.
_REMOVAL_FROM_START = (TimeCategory.UNATTRIBUTED, *COUNTED_CATEGORIES, TimeCategory.LOST_STEPS)
_REMOVAL_FROM_END = (
    TimeCategory.LOST_STEPS,
    TimeCategory.UNATTRIBUTED,
    TimeCategory.STEPS,
    *reversed(COUNTED_CATEGORIES),
)
# Time of an attempt before its first step.
START_CATEGORIES = (
    TimeCategory.PROCESS_START,
    TimeCategory.DISTRIBUTED_INIT,
    TimeCategory.SET_UP,
    TimeCategory.COMPILE,
    TimeCategory.RESTORE,
)


@dataclass(frozen=True)
class AttemptTimeline:
    """Known times of one attempt."""

    events: AttemptEvents  # summary of its events
    clock: ClockRecord | None  # its clock file, if there is one
    claimed: float | None  # when it claimed the directory, in Unix seconds
    shift_seconds: float = 0.0  # added to all times that are recorded about it; see `align_timelines`

    def shift(self, seconds: float) -> "AttemptTimeline":
        """Return the timeline with all times moved."""
        claimed = None if self.claimed is None else self.claimed + seconds
        return replace(self, claimed=claimed, shift_seconds=self.shift_seconds + seconds)

    @property
    def began(self) -> float:
        """First known time of the attempt, in Unix seconds."""
        if self.clock is not None:
            return self.clock.began + self.shift_seconds
        known = [self.events.first]
        began = get_time(self.events.start, "began")
        # A beginning after the first event is ignored: the system clock was changed in between.
        if began is not None and began <= self.events.first:
            known.append(began)
        if self.claimed is not None:
            known.append(self.claimed - self.shift_seconds)
        found = min(known)
        return found + self.shift_seconds if math.isfinite(found) else 0.0

    @property
    def submitted(self) -> float:
        """When the job was submitted, in Unix seconds; infinity if it is not known."""
        found = get_time(self.events.start, "submitted")
        return math.inf if found is None else found + self.shift_seconds

    @property
    def ended(self) -> float:
        """Last sign of life, in Unix seconds."""
        signs = [self.began, self.events.last + self.shift_seconds]
        if self.clock is not None:
            signs.append(self.clock.reading.time + self.shift_seconds)
        return max(signs)

    @property
    def reached_step(self) -> int | None:
        """Last completed step; None if the attempt never had a state."""
        if self.events.resumed_step is None:
            return None
        steps = [self.events.step, None if self.clock is None else self.clock.reading.step]
        return max((step for step in steps if step is not None), default=None)


@dataclass(frozen=True)
class AttemptGoodput:
    """Share of one attempt in the time of the run."""

    began: float  # beginning of its window
    ended: float  # end of its window
    gap_seconds: float  # time between the end of the previous window and this one
    seconds: Seconds  # seconds by category; they sum to the window
    lost_steps: int  # steps that a later attempt repeated
    repeated_steps: int  # steps that the attempt itself has repeated


def align_timelines(timelines: Sequence[AttemptTimeline]) -> list[AttemptTimeline]:
    """Return the timelines in the order of their numbers with times in the same order, those of the newest unchanged.

    The real time between two attempts is not known if the clock was set back between them, and counts as none.
    """
    aligned: list[AttemptTimeline] = []
    claimed, shift_seconds = math.inf, 0.0  # of the newer attempt
    for timeline in reversed(align_behind(align_by_uptime(timelines))):
        before_seconds, shift_seconds = shift_seconds, 0.0
        if aligned:
            excess_seconds = timeline.ended - aligned[-1].began
            if timeline.claimed is not None and timeline.claimed > claimed + _CLAIM_RACE_SECONDS:
                shift_seconds = -max(excess_seconds, 0.0)
            elif excess_seconds > 0:  # of the same clock as the newer one, so that an overlap is real
                shift_seconds = before_seconds
        if timeline.claimed is not None:
            claimed = timeline.claimed
        aligned.append(timeline.shift(shift_seconds))
    return aligned[::-1]


def align_by_uptime(timelines: Sequence[AttemptTimeline]) -> list[AttemptTimeline]:
    """Move attempts whose distance from the next one on the same machine is not that of its monotonic clock."""
    aligned: list[AttemptTimeline] = []
    newer: dict[str, AttemptTimeline] = {}  # by boot of a machine
    for timeline in reversed(timelines):
        clock = timeline.clock
        if clock is not None and clock.machine and clock.uptime is not None:
            after = newer.get(clock.machine)
            if after is not None and after.clock is not None and after.clock.uptime is not None:
                distance_seconds = after.clock.uptime - clock.uptime
                shift_seconds = after.began - distance_seconds - timeline.began
                if distance_seconds >= 0 and abs(shift_seconds) > CLOCK_TOLERANCE_SECONDS:
                    timeline = timeline.shift(shift_seconds)
            newer[clock.machine] = timeline
        aligned.append(timeline)
    return aligned[::-1]


def align_behind(timelines: Sequence[AttemptTimeline]) -> list[AttemptTimeline]:
    """Move an attempt whose clock is behind those of an older and of the newest attempt to the end of the older one."""
    claims = [math.nan if timeline.claimed is None else timeline.claimed for timeline in timelines]
    newest = next((claimed for claimed in reversed(claims) if claimed == claimed), math.inf)
    aligned: list[AttemptTimeline] = []
    highest, ended = -math.inf, 0.0
    for timeline, claimed in zip(timelines, claims, strict=True):
        if claimed < highest - _CLAIM_RACE_SECONDS:
            timeline = timeline.shift(ended - timeline.began)
            ended = timeline.ended
        elif claimed <= newest + _CLAIM_RACE_SECONDS and claimed > highest:
            highest, ended = claimed, timeline.ended
        aligned.append(timeline)
    return aligned


def compute_goodput(timelines: Sequence[AttemptTimeline], now: float | None) -> list[AttemptGoodput]:
    """Return the share of each attempt; `now` ends the newest attempt's window if it is alive, else it is None."""
    # For each attempt, the lowest step that a later one has resumed from.
    floors: list[int | None] = []
    floor: int | None = None
    for timeline in reversed(timelines):
        floors.insert(0, floor)
        resumed = timeline.events.resumed_step
        if resumed is not None:
            floor = resumed if floor is None else min(floor, resumed)

    shares: list[AttemptGoodput] = []
    # A job that was requeued reports a later submission, so the first one counts.
    submitted = min((timeline.submitted for timeline in timelines), default=math.inf)
    for timeline, newer, floor in zip(timelines, [*timelines[1:], None], floors, strict=True):
        # Only the newest attempt can be alive, so only its window reaches to now.
        share = _compute_share(timeline, floor, now if newer is None else None)
        claimed = math.inf
        if newer is not None:
            claimed = newer.began if newer.claimed is None else newer.claimed
        if share.ended > claimed:
            ended = max(claimed, share.began)
            seconds = _remove(share.seconds, share.ended - ended, _REMOVAL_FROM_END)
            share = replace(share, ended=ended, seconds=seconds)
        previous_end = shares[-1].ended if shares else min(timeline.began, submitted)
        if share.began >= previous_end:
            share = replace(share, gap_seconds=share.began - previous_end)
        else:
            # The window begins where the previous one ends, and is empty if it ended even before that.
            ended = max(share.ended, previous_end)
            excess = previous_end - share.began - (ended - share.ended)
            seconds = _remove(share.seconds, excess, _REMOVAL_FROM_START)
            share = replace(share, began=previous_end, ended=ended, seconds=seconds)
        shares.append(share)
    return shares


def list_restarts(attempts: Sequence[AttemptRecord]) -> list[tuple[AttemptRecord, Seconds]]:
    """Return (attempt, seconds by category) of each restart that made a step.

    The seconds run from the end of the attempt before to that step.
    """
    return [
        (
            attempt,
            {TimeCategory.GAP: attempt.gap_seconds}
            | {category: attempt.seconds.get(category, 0.0) for category in START_CATEGORIES},
        )
        for attempt in attempts[1:]
        if attempt.resumed_step is not None and (attempt.reached_step or 0) > attempt.resumed_step
    ]


def _compute_share(timeline: AttemptTimeline, floor: int | None, now: float | None) -> AttemptGoodput:
    """Return the share of an attempt as if there were no others; `floor` is the lowest step resumed from later."""
    events, clock = timeline.events, timeline.clock
    ended = timeline.ended if now is None else max(now, timeline.ended)
    seconds = dict.fromkeys(TimeCategory, 0.0)
    if clock is not None:
        seconds |= dict(zip(COUNTED_CATEGORIES, clock.reading.seconds, strict=True))
        # Time since the last reading continues in the category that the attempt was in then.
        if now is not None and clock.reading.code is None:
            seconds[clock.reading.category] += max(ended - clock.reading.time - timeline.shift_seconds, 0.0)
    else:
        seconds[TimeCategory.COMPILE], seconds[TimeCategory.RESTORE] = events.compile_seconds, events.restore_seconds
        if events.ready is not None:
            seconds[TimeCategory.SAVE_STALL] = events.stall_seconds
            seconds[TimeCategory.STEPS] = max(events.last - events.ready - events.stall_seconds, 0.0)

    reached, resumed, lost_steps = timeline.reached_step, events.resumed_step, 0
    if reached is not None and resumed is not None and floor is not None and floor < reached:
        # Steps before the attempt's own beginning are the loss of an earlier attempt.
        kept_step = max(floor, resumed)
        steps_seconds = seconds[TimeCategory.STEPS]
        lost_seconds = steps_seconds - events.interpolate_steps_seconds(kept_step, reached, steps_seconds)
        lost_seconds = min(max(lost_seconds, 0.0), steps_seconds)
        seconds[TimeCategory.STEPS] -= lost_seconds
        seconds[TimeCategory.LOST_STEPS] += lost_seconds
        lost_steps = reached - kept_step
    if reached is not None and resumed is not None and events.repeated_steps:
        # All steps of the attempt are assumed to take equally long.
        share = events.repeated_steps / max(reached - resumed + events.repeated_steps, 1)
        repeated_seconds = seconds[TimeCategory.STEPS] * share
        seconds[TimeCategory.STEPS] -= repeated_seconds
        seconds[TimeCategory.LOST_STEPS] += repeated_seconds

    # The categories must sum to the window: missing time is unattributed, and excess is removed from the end.
    missing = ended - timeline.began - sum(seconds.values())
    seconds[TimeCategory.UNATTRIBUTED] += max(missing, 0.0)
    seconds = _remove(seconds, max(-missing, 0.0), _REMOVAL_FROM_END)
    return AttemptGoodput(timeline.began, ended, 0.0, seconds, lost_steps, events.repeated_steps)


def _remove(seconds: Seconds, amount: float, order: Sequence[TimeCategory]) -> Seconds:
    """Return `seconds` without `amount`, which is taken from the categories in `order`."""
    left = dict(seconds)
    for category in order:
        taken = min(left[category], amount)
        left[category] -= taken
        amount -= taken
    return left
