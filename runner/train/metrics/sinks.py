"""Where people see the rows while the job runs: a live line on a terminal, plain lines in a log, and places.

Main host only.
"""

import functools
import importlib
import sys
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.attempt.claim import Attempt
from runner.config import TrainerConfig
from runner.spec import ExecutionSpec
from runner.terminal import say, warn
from runner.train.metrics.file import read_lines
from runner.train.metrics.place import Aside, Place
from runner.train.metrics.row import Row
from runner.train.metrics.tensorboard import EventFile


class Sink(Protocol):
    """Anything that shows rows."""

    def show(self, row: Row) -> None:
        """Take one row; must not block for long and never raise."""

    def close(self) -> None:
        """Finish, within seconds."""


def _describe(row: Row) -> str:
    parts = [f"loss {row['train/loss']:.4f}"] if "train/loss" in row else []
    if row.get("val/loss") is not None:
        parts.append(f"val {row['val/loss']:.4f}")
    if row.get("perf/tokens_per_second"):
        parts.append(f"{row['perf/tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


class LiveProgress:
    """One line on a terminal that keeps itself up to date."""

    def __init__(self, name: str, total_steps: int, step: int, console: Console):
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task(name, total=total_steps, completed=step, figures="")
        self._progress.start()

    def show(self, row: Row) -> None:
        """Move the bar; a validation loss also gets a line that stays."""
        self._progress.update(self._task, completed=row["step"], figures=_describe(row))
        if "val/loss" in row:
            self._progress.console.print(f"step {row['step']}  {_describe(row)}", highlight=False)

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._progress.stop()


class PlainProgress:
    """A line a row, for logs."""

    def __init__(self, tokens_per_step: int, total_steps: int):
        self._tokens_per_step = tokens_per_step
        self._total_steps = total_steps

    def show(self, row: Row) -> None:
        """Print step, loss, speed and time left."""
        speed = row.get("perf/tokens_per_second")
        left = "" if not speed else f"  {(self._total_steps - row['step']) * self._tokens_per_step / speed:.0f} s left"
        say(f"step {row['step']}/{self._total_steps}  {_describe(row)}{left}")

    def close(self) -> None:
        """Nothing is open."""


def make_progress(spec: ExecutionSpec, total_steps: int, step: int, tokens_per_step: int) -> Sink:
    """Live progress where standard output is a person's terminal, plain lines elsewhere."""
    if sys.stdout.isatty() and spec.logging.format == "text":
        return LiveProgress(spec.name, total_steps, step, Console())
    return PlainProgress(tokens_per_step, total_steps)


def open_sinks(attempt: Attempt, spec: ExecutionSpec, config: TrainerConfig, step: int) -> list[Sink]:
    """All places that the spec names, for an attempt that goes on from `step`."""

    def earlier() -> Iterator[Row]:
        return (line.row for line in read_lines(attempt.store, step))

    def on_off(name: str, reason: str) -> None:
        warn(f"{name} is off: {reason}")
        attempt.record("sink_off", None, sink=name, reason=reason)

    sinks: list[Sink] = [make_progress(spec, config.total_steps, step, config.tokens_per_step)]
    if spec.logging.tensorboard:
        open_place = functools.partial(EventFile, attempt.store, attempt.run_id, attempt.number)
        sinks.append(Aside("tensorboard", open_place, earlier, on_off))
    if spec.logging.wandb != "disabled":
        sinks.append(Aside("wandb", functools.partial(_track, spec, attempt), earlier, on_off))
    return sinks


def _track(spec: ExecutionSpec, attempt: Attempt) -> Place:
    """Import wandb, which takes a second, on the thread that waits for it."""
    place: Place = importlib.import_module("runner.train.metrics.tracking").Tracking(spec, attempt)
    return place
