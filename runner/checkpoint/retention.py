"""Which steps may go, and how they go. By step number: never by a time, never by the order of a listing."""

from collections.abc import Mapping
from typing import Literal

from runner.attempt.claim import Attempt
from runner.checkpoint.manifest import CHECKPOINTS, Manifest, committed
from runner.checkpoint.tombstone import remove_files, uncommit
from runner.terminal import warn

Mode = Literal["min", "max"]


def superfluous(
    metrics: Mapping[int, float | None],
    keep_last: int,
    keep_every_steps: int | None = None,
    best: Mode | None = None,
) -> list[int]:
    """The steps to delete, ascending, of those committed: `metrics` has for each the value that `best` compares.

    Kept are the newest `keep_last`, multiples of `keep_every_steps`, and the best; of equals the older.
    """
    steps = sorted(metrics)
    kept = set(steps[-keep_last:])
    if keep_every_steps is not None:
        kept |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        kept |= {step for step in [best_step(metrics, best)] if step is not None}
    return [step for step in steps if step not in kept]


def best_step(metrics: Mapping[int, float | None], mode: Mode) -> int | None:
    """The step with the best value, of equals the older; None if none has a value."""
    measured = {step: value for step, value in sorted(metrics.items()) if value is not None and value == value}
    choose = min if mode == "min" else max
    return choose(measured, key=lambda step: measured[step]) if measured else None


def delete(attempt: Attempt, step: int) -> None:
    """Delete one step: first the manifest, then the files. Main host only."""
    attempt.fence.check()
    directory = f"{CHECKPOINTS}/{step}"
    uncommit(attempt.store, directory, attempt.number)
    remove_files(attempt.store, directory)


class Retention:
    """The committed steps of a run, and the rule by which they stay. Main host only."""

    def __init__(self, attempt: Attempt, keep_last: int, keep_every_steps: int | None = None, best: Mode | None = None):
        self._attempt = attempt
        self._rule = (keep_last, keep_every_steps, best)
        self._metrics: dict[int, float | None] = {}

    def look(self) -> None:
        """Take in what is there when an attempt begins, and delete what one that was killed has left undeleted."""
        self._metrics = {step: manifest.metric for step, manifest in committed(self._attempt.store).items()}
        self._prune()

    def apply(self, manifest: Manifest) -> None:
        """Take in a step that has just been committed, and delete what it has made superfluous. In the background."""
        self._metrics[manifest.step] = manifest.metric
        self._prune()

    def _prune(self) -> None:
        """Delete what is superfluous. What cannot be deleted now is tried again after the next commit."""
        for step in superfluous(self._metrics, *self._rule):
            try:
                delete(self._attempt, step)
            except OSError as error:
                warn(f"checkpoint {step} cannot be deleted, will be tried again: {error}")
                return
            del self._metrics[step]
