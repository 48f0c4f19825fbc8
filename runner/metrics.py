"""The rows of the surviving trajectory, and where people see them. Main host only.

`metrics.jsonl` holds each logged step exactly once, in order, whatever was killed: a row is written before the
checkpoint of its step is committed, and a resumed attempt first drops the rows beyond the checkpoint it restored, by
replacing the file. A zombie of an earlier attempt then still holds the old file, which nobody reads.
"""

import contextlib
import errno
import math
import os
import sys
import threading
import time
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from runner.cadence import tokens_at
from runner.errors import DivergedError, FencedError
from runner.ledger import Fence
from runner.storage import ABSENT, LocalStore, Store, Uplink, Version, encode_line, parse_lines
from runner.terminal import say, warn

Row = dict[str, Any]


class Window:
    """The steps since the last row, kept on the device until they are asked for: nothing here waits in a step."""

    def __init__(self, step: int = 0):
        self._pending: list[tuple[int, jax.Array, dict[str, jax.Array]]] = []
        self._last: tuple[int, float, dict[str, float]] | None = None
        self._since_step = step
        self.restart_clock()

    def add(self, step: int, loss: jax.Array, meta: dict[str, jax.Array]) -> None:
        """Take what step `step` returned, without waiting for it."""
        self._pending.append((step, loss, meta))

    def fetch(self) -> None:
        """Wait for the device. Raises `DivergedError` naming the first step that is not finite."""
        for step, loss, meta in jax.device_get(self._pending):
            figures = {key: float(value) for key, value in meta.items()}
            if not (math.isfinite(loss) and math.isfinite(figures["grad_norm"])):
                raise DivergedError(
                    f"step {step}: training diverged: loss {float(loss)}, gradient norm {figures['grad_norm']}; "
                    "the last good checkpoint is kept"
                )
            self._last = (step, float(loss), figures)
        self._pending = []

    def close(self, tokens_per_step: int) -> Row:
        """The row of the newest step; the next window begins."""
        self.fetch()
        assert self._last is not None, "a row needs a step"
        step, loss, figures = self._last
        seconds = time.monotonic() - self._since_seconds
        tokens = tokens_at(step - self._since_step, tokens_per_step)
        self._since_step = step
        self.restart_clock()
        return {
            "step": step,
            "train/loss": loss,
            "train/grad_norm": figures["grad_norm"],
            "train/learning_rate": figures["learning_rate"],
            "train/tokens": tokens_at(step, tokens_per_step),
            "perf/tokens_per_second": tokens / max(seconds, 1e-9),
        }

    def restart_clock(self) -> None:
        """Leave out of the speed what has passed so far."""
        self._since_seconds = time.monotonic()


class Sink(Protocol):
    """Anything that shows rows."""

    def show(self, row: Row) -> None:
        """Take one row; must not block for long and never raise."""

    def close(self) -> None:
        """Finish, within seconds."""


NAME = "metrics.jsonl"


class Metrics(Protocol):
    """`metrics.jsonl` of one directory."""

    def rewind(self, step: int, kept: bytes | None = None) -> Row | None:
        """Keep the rows up to `step`, of the file or of `kept`, and open it for more; the row of `step`, if any."""

    def append(self, row: Row) -> None:
        """Add one row. Never raises for a store that is full or down: the row is kept, and tried again."""

    def replace_last(self, row: Row) -> None:
        """Write the last row anew, with what was still missing in it."""

    def rows(self) -> list[Row]:
        """All rows so far."""

    def sync(self) -> None:
        """Wait until all rows are durable. Raises `OSError` if they cannot be, `FencedError` if others write them."""

    def close(self) -> None:
        """Release what is open."""


def open_metrics(store: Store, uplink: Uplink, fence: Fence) -> Metrics:
    """The metrics of a run's directory, for the attempt that `fence` stands for."""
    return BucketMetrics(store, uplink, fence) if store.root is None else MetricsFile(store.root)


def _up_to(step: int, rows: list[Row]) -> list[Row]:
    """The rows up to `step`, each step once, in order."""
    kept: list[Row] = []
    for row in rows:
        if isinstance(row.get("step"), int) and row["step"] <= step and (not kept or row["step"] > kept[-1]["step"]):
            kept.append(row)
    return kept


def _row_of(step: int, rows: list[Row]) -> Row | None:
    return rows[-1] if rows and rows[-1]["step"] == step else None


class BucketMetrics:
    """The file as one object, written anew in the background whenever it has grown.

    Each write looks whether a newer attempt owns the run, and names the version that it replaces. A zombie that was
    stopped between the two may win once, where versions are digests of the content; the owner then writes over it.
    """

    def __init__(self, store: Store, uplink: Uplink, fence: Fence):
        self._store, self._uplink, self._fence = store, uplink, fence
        self._lock = threading.Lock()
        self._rows: list[Row] = []
        self._version: Version = ABSENT
        self._revision = self._revision_written = 0

    def rewind(self, step: int, kept: bytes | None = None) -> Row | None:
        """See `Metrics`."""
        content, self._version = self._store.read_versioned(NAME)
        self._rows = _up_to(step, parse_lines(content if kept is None else kept))
        self._revision += 1
        self.sync()
        return _row_of(step, self._rows)

    def append(self, row: Row) -> None:
        """See `Metrics`."""
        self._rows.append(row)
        self._changed()

    def replace_last(self, row: Row) -> None:
        """See `Metrics`."""
        self._rows[-1] = row
        self._changed()

    def _changed(self) -> None:
        self._revision += 1
        self._uplink.mark(NAME, self._send_unless_fenced)

    def rows(self) -> list[Row]:
        """See `Metrics`."""
        if self._revision == 0:
            return parse_lines(self._store.read_versioned(NAME)[0])
        return list(self._rows)

    def _send_unless_fenced(self) -> None:
        with contextlib.suppress(FencedError):  # the next `sync` says so to somebody who can stop the run
            self.sync()

    def sync(self) -> None:
        """See `Metrics`."""
        with self._lock:
            revision, rows = self._revision, list(self._rows)
            if revision == self._revision_written:
                return
            content = b"".join(encode_line(row) for row in rows)
            while True:
                self._fence.check()
                try:
                    self._version = self._store.write_if(NAME, content, self._version)
                    break
                except FileExistsError:  # a last write of an attempt that is fenced; each has only one
                    self._version = self._store.read_versioned(NAME)[1]
            self._revision_written = revision

    def close(self) -> None:
        """See `Metrics`."""


class MetricsFile:
    """The file on a disk, a row appended at a time."""

    def __init__(self, directory: Path):
        self._path = directory / NAME
        self._file: FileIO | None = None
        self._num_bytes = 0
        self._unwritten: list[Row] = []
        self._lock = threading.Lock()

    def rewind(self, step: int, kept: bytes | None = None) -> Row | None:
        """See `Metrics`."""
        rows = _up_to(step, self.rows() if kept is None else parse_lines(kept))
        self._replace(rows)
        return _row_of(step, rows)

    def append(self, row: Row) -> None:
        """See `Metrics`. The row survives this process from here on."""
        self._unwritten.append(row)
        try:
            self._write()
        except OSError as error:
            warn(f"metrics cannot be written ({error}); {len(self._unwritten)} rows are kept")

    def _write(self) -> None:
        """Write what is unwritten, each row whole or not at all."""
        assert self._file is not None, "rewind opens the file"
        with self._lock:
            while self._unwritten:
                line = encode_line(self._unwritten[0])
                if self._file.write(line) != len(line):
                    self._file.truncate(self._num_bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._num_bytes += len(line)
                self._unwritten.pop(0)

    def replace_last(self, row: Row) -> None:
        """See `Metrics`."""
        self._replace([*self.rows()[:-1], row])

    def rows(self) -> list[Row]:
        """See `Metrics`."""
        return parse_lines(self._path.read_bytes()) if self._path.exists() else []

    def sync(self) -> None:
        """See `Metrics`."""
        if self._file is not None:
            self._write()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """See `Metrics`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _replace(self, rows: list[Row]) -> None:
        self.close()
        content = b"".join(encode_line(row) for row in rows)
        LocalStore(self._path.parent).write(NAME, content)
        self._num_bytes = len(content)
        self._file = self._path.open("ab", buffering=0)


def _describe(row: Row) -> str:
    parts = [f"loss {row['train/loss']:.4f}"]
    if "val/loss" in row:
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


def make_progress(name: str, total_steps: int, step: int, tokens_per_step: int) -> Sink:
    """Live progress where standard output is a terminal, plain lines elsewhere."""
    if sys.stdout.isatty():
        return LiveProgress(name, total_steps, step, Console())
    return PlainProgress(tokens_per_step, total_steps)
