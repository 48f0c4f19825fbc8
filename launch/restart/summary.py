"""Where the time of a job went, in two lines for a person: what `status` says too, under whichever engine."""

from collections import Counter

from runner.history.record import History


def lines(history: History) -> list[str]:
    """For a person."""
    attempts = history.attempts
    ended = ", ".join(f"{count} {state}" for state, count in Counter(each.state.value for each in attempts).items())
    parts = [
        f"{bucket.value.replace('_', ' ')} {value:.1f} s" for bucket, value in history.seconds.items() if value >= 0.05
    ]
    return [
        f"launch: {len(attempts)} attempt{'s' * (len(attempts) != 1)} ({ended}) in {history.wall_seconds:.1f} s, "
        f"{history.lost_steps} step{'s' * (history.lost_steps != 1)} done again, goodput {history.goodput:.1%}",
        f"launch: {', '.join(parts)}",
    ]
