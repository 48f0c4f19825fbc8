"""Predicates for work that is due every N steps or minutes.

They are pure: a clock, where one is needed, is an argument. `step` is the number of completed optimizer steps, here and
everywhere.
"""


def is_due(step: int, every_steps: int | None, last_step: int | None = None) -> bool:
    """Return True if work that is due every `every_steps` steps is due at `step`: always at `last_step`, never at 0."""
    if step <= 0:
        return False
    if step == last_step:
        return True
    return every_steps is not None and step % every_steps == 0


def is_overdue(now_seconds: float, since_seconds: float, every_minutes: float | None) -> bool:
    """Return True if `every_minutes` have passed since `since_seconds`."""
    return every_minutes is not None and now_seconds - since_seconds >= every_minutes * 60
