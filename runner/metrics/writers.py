"""Where people see the rows while the job runs: a live line on a terminal, plain lines in a log, and places.

Main host only.

A place that holds the rows for another tool, fed aside: it may be slow, hang or fail, and no step notices.

All of a place happens on a thread of its own behind a bounded queue. It is a picture of `metrics.jsonl` and nothing
else: each attempt first gives it the rows up to the step that it resumed from, then its own. So there is one
trajectory, whatever was lost, recomputed with other bits or missed by a place that was off, and a place needs no memory
of its own. What it costs at a start is to write those rows once more, beside the first steps.

A place that raises, or does not come after, is left off for the rest of the attempt: `on_off` hears of it once.
"""

import contextlib
import functools
import importlib
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.config import TrainerConfig
from runner.console import say, warn
from runner.errors import format_error
from runner.metrics.file import read_encoded_rows
from runner.metrics.rows import Row
from runner.metrics.tensorboard import TensorBoardWriter
from runner.run.attempt import Attempt
from runner.spec import ExecutionSpec

QUEUE_ROWS = 10_000
CLOSE_SECONDS = 10.0


class MetricWriter(Protocol):
    """Where rows are kept. Called on one thread, which may wait there; whatever is raised ends it."""

    def add(self, row: Row) -> None:
        """Take a row. Steps ascend; one of the same step as the row before it has only keys that are new."""

    def supersede(self) -> None:
        """All rows of earlier attempts are in: remove what those attempts have left. Called once."""

    def finish(self) -> None:
        """No more rows come."""


class AsyncMetricWriter:
    """A sink (see `sinks`) that feeds a place. `earlier` gives the surviving rows of the attempts before."""

    def __init__(
        self,
        name: str,
        open_place: Callable[[], MetricWriter],
        earlier: Callable[[], Iterable[Row]],
        on_off: Callable[[str, str], None],
    ):
        self._name, self._on_off = name, on_off
        self._rows: queue.Queue[Row | None] = queue.Queue(QUEUE_ROWS)
        self._off = threading.Lock()  # taken once, by whoever leaves the place off
        self._thread = threading.Thread(target=self._work, args=(open_place, earlier), name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Queue one row. Waits for nothing."""
        self._put(row)

    def close(self) -> None:
        """Let the thread finish for some seconds, then leave it."""
        if self._put(None):
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._leave_off(f"it has not finished {CLOSE_SECONDS:g} s after the last row")

    def _put(self, row: Row | None) -> bool:
        """Whether it is taken: nothing is, once the place is off."""
        if self._off.locked():
            return False
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._leave_off(f"{QUEUE_ROWS} rows wait for it")
            return False
        return True

    def _work(self, open_place: Callable[[], MetricWriter], earlier: Callable[[], Iterable[Row]]) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._on_exit)
            place = open_place()
            last: Row = {}
            for last in earlier():
                place.add(last)
            place.supersede()
            while (row := self._rows.get()) is not None and not self._off.locked():
                place.add(row if row["step"] != last.get("step") else _what_is_new(row, last))
                last = row
            place.finish()

    def _on_exit(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Whatever a place raises ends here: a library for looking at rows is no reason to end a run."""
        if error is not None:
            self._leave_off(format_error(error))
        return isinstance(error, Exception)

    def _leave_off(self, reason: str) -> None:
        if self._off.acquire(blocking=False):
            self._on_off(self._name, reason)


def _what_is_new(row: Row, before: Row) -> Row:
    """Of a row that completes the one before: the step, and the keys that are not there yet."""
    return {key: value for key, value in row.items() if key == "step" or key not in before}


class RowDisplay(Protocol):
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


def make_progress(spec: ExecutionSpec, total_steps: int, step: int, tokens_per_step: int) -> RowDisplay:
    """Live progress where standard output is a person's terminal, plain lines elsewhere."""
    if sys.stdout.isatty() and spec.logging.format == "text":
        return LiveProgress(spec.name, total_steps, step, Console())
    return PlainProgress(tokens_per_step, total_steps)


def open_displays(attempt: Attempt, spec: ExecutionSpec, config: TrainerConfig, step: int) -> list[RowDisplay]:
    """All places that the spec names, for an attempt that goes on from `step`."""

    def earlier() -> Iterator[Row]:
        return (line.row for line in read_encoded_rows(attempt.store, step))

    def on_off(name: str, reason: str) -> None:
        warn(f"{name} is off: {reason}")
        attempt.record("sink_off", None, sink=name, reason=reason)

    sinks: list[RowDisplay] = [make_progress(spec, config.total_steps, step, config.tokens_per_step)]
    if spec.logging.tensorboard:
        open_place = functools.partial(TensorBoardWriter, attempt.store, attempt.run_id, attempt.number)
        sinks.append(AsyncMetricWriter("tensorboard", open_place, earlier, on_off))
    if spec.logging.wandb != "disabled":
        sinks.append(AsyncMetricWriter("wandb", functools.partial(_track, spec, attempt), earlier, on_off))
    return sinks


def _track(spec: ExecutionSpec, attempt: Attempt) -> MetricWriter:
    """Import wandb, which takes a second, on the thread that waits for it."""
    place: MetricWriter = importlib.import_module("runner.metrics.wandb").WandbWriter(spec, attempt)
    return place
