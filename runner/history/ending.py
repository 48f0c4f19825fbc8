"""How an attempt has ended, or that it lives: by its own word, else by the signs that it has left. Asks for processes.

Its own word is the exit code that its clock has kept, or the event that says so. Without one it was killed, fenced, or
lives: its process is asked for where it ran on this machine, and elsewhere `SILENT_SECONDS` without a sign are no life.
"""

from typing import NamedTuple

from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.history.account import Life
from runner.history.record import State
from runner.hosts.clock import Bucket

SILENT_SECONDS = 30.0
SILENT_WITHOUT_CLOCK_SECONDS = 120.0  # of a runner that kept none, whose events are a minute apart
_STEPS_FACTOR, _LEAST_STEP_SECONDS = 20.0, 60.0  # as the watchdog has them
_STATES = {
    EXIT_DONE: State.DONE,
    EXIT_FAILED: State.FAILED,
    EXIT_INVALID: State.INVALID,
    EXIT_PREEMPTED: State.PREEMPTED,
    EXIT_RETRYABLE: State.RETRYABLE,
}
_EVENTS = {"done": State.DONE, "preempt": State.PREEMPTED, "failed": State.FAILED, "stuck": State.RETRYABLE}


class Ending(NamedTuple):
    """A state, and since when.

    Attributes:
        is_alive: signs of life are recent: its time goes on.
    """

    state: State
    since: float
    is_alive: bool = False
    code: int | None = None
    reason: str | None = None


def ending_of(life: Life, newer: Life | None, now: float) -> Ending:
    """How `life` has ended at `now`, where `newer` is the attempt after it."""
    told, kept = life.told, life.kept
    code = told.code if kept is None or kept.reading.code is None else kept.reading.code
    if code is not None or told.end is not None:
        state = _STATES.get(code, State.FAILED) if code is not None else _EVENTS[str(told.end)]
        return Ending(state, life.ended, False, code, told.reason)
    if newer is not None:
        is_fenced = newer.claimed is not None and life.ended > newer.claimed
        return Ending(State.FENCED if is_fenced else State.KILLED, life.ended)
    if kept is not None and kept.is_process_there is False:
        return Ending(State.KILLED, life.ended)
    if now - life.ended > (SILENT_WITHOUT_CLOCK_SECONDS if kept is None else SILENT_SECONDS):
        return Ending(State.STALLED, life.ended)
    if kept is not None and kept.reading.bucket is Bucket.STEPS:
        steps = max(kept.reading.step - (told.resumed_step or 0), 0)
        seconds = kept.reading.seconds[Bucket.STEPS.index] - (now - kept.reading.since)
        usual_seconds = max(seconds, 0.0) / steps if steps else 0.0
        if steps and now - kept.reading.since > max(_LEAST_STEP_SECONDS, _STEPS_FACTOR * usual_seconds):
            return Ending(State.STALLED, kept.reading.since, is_alive=True)
    return Ending(State.RUNNING, life.began, is_alive=True)
