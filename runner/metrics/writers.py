"""Displays of rows while a job runs: progress on the terminal or in a log, and asynchronous metric writers.

Process 0 uses them. A **metric writer** (`MetricWriter`) keeps rows for another tool, such as TensorBoard or W&B. It
may be slow, hang or fail, and must not delay a step. `AsyncMetricWriter` therefore runs it on a thread of its own
behind a bounded queue.

A metric writer only mirrors `metrics.jsonl`: each attempt first gives it the rows up to the step that it resumed from,
and then its own rows. So it shows one trajectory, whatever was lost, recomputed with other bits, or missed while the
writer was off, and it needs no memory of its own. In return, each start writes those rows once more, during
the first steps.

A writer that raises, or does not keep up, is switched off for the rest of the attempt, and `on_failure` is called once.
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
    """Writer that keeps rows for another tool. It is called on one thread, which may wait; an exception ends it."""

    def add(self, row: Row) -> None:
        """Write a row. Steps ascend; a row with the step of the row before has only the keys that are new."""

    def supersede(self) -> None:
        """Remove the files of earlier attempts, whose rows have all been written again. Called once."""

    def finish(self) -> None:
        """Finish after the last row."""


class RowDisplay(Protocol):
    """Display of rows, called by the training thread."""

    def show(self, row: Row) -> None:
        """Show a row. Must not block for long, and never raise."""

    def close(self) -> None:
        """Finish within seconds."""


class AsyncMetricWriter:
    """Asynchronous metric writer, a `RowDisplay`.

    Args:
        name: Name of the writer, for `on_failure`.
        open_writer: Function that opens the writer, called on the thread of the writer.
        earlier: Function that returns the surviving rows of earlier attempts.
        on_failure: Function of the name and the reason, called once when the writer is switched off.
    """

    def __init__(
        self,
        name: str,
        open_writer: Callable[[], MetricWriter],
        earlier: Callable[[], Iterable[Row]],
        on_failure: Callable[[str, str], None],
    ):
        self._name, self._on_failure = name, on_failure
        self._rows: queue.Queue[Row | None] = queue.Queue(QUEUE_ROWS)
        self._off = threading.Lock()  # acquired once, by the thread that switches the writer off
        self._thread = threading.Thread(target=self._work, args=(open_writer, earlier), name=name, daemon=True)
        self._thread.start()

    def show(self, row: Row) -> None:
        """Queue a row, without waiting."""
        self._put(row)

    def close(self) -> None:
        """Let the writer finish for up to `CLOSE_SECONDS`, then leave its thread behind."""
        # None tells the thread to finish after the rows that are queued.
        if self._put(None):
            self._thread.join(CLOSE_SECONDS)
            if self._thread.is_alive():
                self._switch_off(f"it has not finished {CLOSE_SECONDS:g} s after the last row")

    def _put(self, row: Row | None) -> bool:
        """Queue a row or the end; return False if the writer is switched off or its queue is full."""
        if self._off.locked():
            return False
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._switch_off(f"{QUEUE_ROWS} rows wait for it")
            return False
        return True

    def _work(self, open_writer: Callable[[], MetricWriter], earlier: Callable[[], Iterable[Row]]) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._on_exit)
            writer = open_writer()
            last: Row = {}
            for last in earlier():
                writer.add(last)
            writer.supersede()
            while (row := self._rows.get()) is not None and not self._off.locked():
                if row["step"] == last.get("step"):
                    # The row completes the one before, as after an evaluation; only new keys are written.
                    writer.add({key: value for key, value in row.items() if key == "step" or key not in last})
                else:
                    writer.add(row)
                last = row
            writer.finish()

    def _on_exit(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        # Any exception of a writer ends here: a library for viewing rows must not end a run.
        if error is not None:
            self._switch_off(format_error(error))
        return isinstance(error, Exception)

    def _switch_off(self, reason: str) -> None:
        if self._off.acquire(blocking=False):
            self._on_failure(self._name, reason)


def _format_row(row: Row) -> str:
    parts = [f"loss {row['train/loss']:.4f}"] if "train/loss" in row else []
    if row.get("val/loss") is not None:
        parts.append(f"val {row['val/loss']:.4f}")
    if row.get("perf/tokens_per_second"):
        parts.append(f"{row['perf/tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


class LiveProgress:
    """Progress bar on a terminal, a `RowDisplay`."""

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
        """Move the bar; a row with a validation loss is also printed on a line that stays."""
        self._progress.update(self._task, completed=row["step"], figures=_format_row(row))
        if "val/loss" in row:
            self._progress.console.print(f"step {row['step']}  {_format_row(row)}", highlight=False)

    def close(self) -> None:
        """Stop the bar and leave it on the terminal."""
        self._progress.stop()


class PlainProgress:
    """One line per row, for logs; a `RowDisplay`."""

    def __init__(self, tokens_per_step: int, total_steps: int):
        self._tokens_per_step = tokens_per_step
        self._total_steps = total_steps

    def show(self, row: Row) -> None:
        """Print step, loss, speed and remaining time."""
        speed = row.get("perf/tokens_per_second")
        left = "" if not speed else f"  {(self._total_steps - row['step']) * self._tokens_per_step / speed:.0f} s left"
        say(f"step {row['step']}/{self._total_steps}  {_format_row(row)}{left}")

    def close(self) -> None:
        """Do nothing: every line is printed."""


def make_progress(spec: ExecutionSpec, total_steps: int, step: int, tokens_per_step: int) -> RowDisplay:
    """Return a progress bar if standard output is a terminal and logs are text, plain lines otherwise."""
    if sys.stdout.isatty() and spec.logging.format == "text":
        return LiveProgress(spec.name, total_steps, step, Console())
    return PlainProgress(tokens_per_step, total_steps)


def open_displays(attempt: Attempt, spec: ExecutionSpec, config: TrainerConfig, step: int) -> list[RowDisplay]:
    """Return the displays that the spec names, for an attempt that continues from `step`."""

    def read_earlier() -> Iterator[Row]:
        return (line.row for line in read_encoded_rows(attempt.store, step))

    def report_failure(name: str, reason: str) -> None:
        warn(f"{name} is switched off: {reason}")
        attempt.record("sink_off", None, sink=name, reason=reason)

    def open_wandb() -> MetricWriter:
        # The import of wandb takes a second. The thread of the writer can wait for it, the training thread cannot.
        writer: MetricWriter = importlib.import_module("runner.metrics.wandb").WandbWriter(spec, attempt)
        return writer

    displays: list[RowDisplay] = [make_progress(spec, config.total_steps, step, config.tokens_per_step)]
    if spec.logging.tensorboard:
        open_tensorboard = functools.partial(TensorBoardWriter, attempt.store, attempt.run_id, attempt.number)
        displays.append(AsyncMetricWriter("tensorboard", open_tensorboard, read_earlier, report_failure))
    if spec.logging.wandb != "disabled":
        displays.append(AsyncMetricWriter("wandb", open_wandb, read_earlier, report_failure))
    return displays
