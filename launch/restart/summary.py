"""Where the time went, from the attempts that were started and the ledger that the job kept."""

from collections import Counter
from collections.abc import Sequence

from launch.restart.supervisor import Attempt
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, EXIT_PREEMPTED, EXIT_RETRYABLE
from runner.storage import JsonObject

_NAMES = {
    EXIT_DONE: "done",
    EXIT_FAILED: "failed",
    EXIT_INVALID: "invalid",
    EXIT_PREEMPTED: "preempted",
    EXIT_RETRYABLE: "retryable",
}
_AT_A_STEP = ("init", "restore", "save")
PHASES = ("start-up", "compile", "restore", "train", "saves blocked", "lost", "between attempts")


def phases(attempts: Sequence[Attempt], ledger: Sequence[JsonObject]) -> dict[str, float]:
    """Seconds by phase, which sum to the time from the first attempt's begin to the last one's end.

    `lost` is from the save that the next attempt went on from to the end of an attempt: what had to be done again.
    """
    seconds = dict.fromkeys(PHASES, 0.0)
    resumed_step: int | None = None  # that a later attempt went on from
    for number, attempt in reversed(list(enumerate(attempts))):
        rows = [row for row in ledger if row["process"] == 0 and attempt.began <= row["time"] < attempt.ended]
        times = {row["event"]: row["time"] for row in rows if row["event"] in ("start", "prepare", "init", "restore")}
        started = times.get("start", attempt.ended)
        compiled = times.get("prepare", attempt.ended)
        ready = times.get("restore", times.get("init", attempt.ended))
        seconds["start-up"] += started - attempt.began
        seconds["compile"] += compiled - started
        seconds["restore"] += ready - compiled
        kept_until = attempt.ended if resumed_step is None else _last_time_at(resumed_step, rows, ready)
        blocked = sum(row["blocked_seconds"] for row in rows if row["event"] == "save" and row["time"] <= kept_until)
        seconds["saves blocked"] += blocked
        seconds["train"] += kept_until - ready - blocked
        seconds["lost"] += attempt.ended - kept_until
        resumed_step = next((row["step"] for row in rows if row["event"] in ("init", "restore")), resumed_step)
        if number:
            seconds["between attempts"] += attempt.began - attempts[number - 1].ended
    return seconds


def lost_steps(attempts: Sequence[Attempt], ledger: Sequence[JsonObject]) -> int:
    """Steps that were done again, as far as the ledger knows how far each attempt had come."""
    lost = 0
    resumed_step: int | None = None
    for attempt in reversed(attempts):
        rows = [row for row in ledger if row["process"] == 0 and attempt.began <= row["time"] < attempt.ended]
        reached = max((row["step"] for row in rows if row["step"] is not None), default=None)
        if resumed_step is not None and reached is not None:
            lost += max(reached - resumed_step, 0)
        resumed_step = next((row["step"] for row in rows if row["event"] in ("init", "restore")), resumed_step)
    return lost


def _last_time_at(step: int, rows: Sequence[JsonObject], otherwise: float) -> float:
    """When an attempt had saved this step, or taken it up."""
    return max((row["time"] for row in rows if row["step"] == step and row["event"] in _AT_A_STEP), default=otherwise)


def lines(attempts: Sequence[Attempt], ledger: Sequence[JsonObject]) -> list[str]:
    """For a person."""
    codes = Counter(_NAMES.get(attempt.code, str(attempt.code)) for attempt in attempts)
    total_seconds = attempts[-1].ended - attempts[0].began
    ended = ", ".join(f"{count} {name}" for name, count in codes.items())
    parts = [f"{name} {value:.1f} s" for name, value in phases(attempts, ledger).items() if value >= 0.05]
    again = lost_steps(attempts, ledger)
    return [
        f"launch: {len(attempts)} attempt{'s' * (len(attempts) != 1)} ({ended}) in {total_seconds:.1f} s, "
        f"{again} step{'s' * (again != 1)} done again",
        f"launch: {', '.join(parts)}",
    ]
