"""`metrics.jsonl`: the rows of the surviving trajectory, on a disk and in a bucket. Main host only.

The file holds each logged step exactly once, in order, whatever was killed: a row is written before the
checkpoint of its step is committed, and a resumed attempt first drops the rows beyond the checkpoint it restored, by
replacing the file. A zombie of an earlier attempt then still holds the old file, which nobody reads.
"""

import contextlib
import errno
import os
import threading
from io import FileIO
from pathlib import Path
from typing import Protocol

from runner.attempt.fence import Fence
from runner.errors import FencedError
from runner.storage import ABSENT, BackgroundWriter, LocalStore, Store, Version, encode_line, parse_lines
from runner.terminal import warn
from runner.train.metrics.row import Row

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


def open_metrics(store: Store, background: BackgroundWriter, fence: Fence) -> Metrics:
    """The metrics of a run's directory, for the attempt that `fence` stands for."""
    return BucketMetrics(store, background, fence) if store.root is None else MetricsFile(store.root)


def _up_to(step: int, rows: list[Row]) -> list[Row]:
    """The rows up to `step`, each step once, in order; what is no row is left out."""
    kept: list[Row] = []
    for row in filter(_is_row, rows):
        if row["step"] <= step and (not kept or row["step"] > kept[-1]["step"]):
            kept.append(row)
    return kept


def _is_row(row: Row) -> bool:
    """Whether a JSON object is a row: damage may have left another."""
    return type(row.get("step")) is int and isinstance(row.get("train/loss"), int | float)


def _row_of(step: int, rows: list[Row]) -> Row | None:
    return rows[-1] if rows and rows[-1]["step"] == step else None


class BucketMetrics:
    """The file as one object, written anew in the background whenever it has grown.

    Each write looks whether a newer attempt owns the run, and names the version that it replaces. A zombie that was
    stopped between the two may win once, where versions are digests of the content; the owner then writes over it.
    """

    def __init__(self, store: Store, background: BackgroundWriter, fence: Fence):
        self._store, self._background, self._fence = store, background, fence
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
        self._background.mark(NAME, self._send_unless_fenced)

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
        try:
            return parse_lines(LocalStore(self._path.parent).read(NAME))
        except FileNotFoundError:
            return []

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
