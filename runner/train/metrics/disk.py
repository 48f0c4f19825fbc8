"""`metrics.jsonl` on a disk, a row appended at a time.

A resumed attempt replaces the file. A zombie of an earlier attempt then still holds the old one, which nobody reads.

What bounds the memory: lines are held until they are on the disk, `UNSYNCED_BYTES_MAX` at most; where the disk is full,
as many as come until `checkpoint.max_unsaved_minutes` ends the run.
"""

import errno
import itertools
import os
import threading
from collections.abc import Iterable, Iterator
from io import FileIO

from runner.attempt.fence import Fence
from runner.storage import LocalStore
from runner.terminal import warn
from runner.train.metrics.line import Line, Tail, surviving, up_to
from runner.train.metrics.row import Row

NAME = "metrics.jsonl"
UNSYNCED_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 20


class MetricsFile:
    """See `Metrics`."""

    def __init__(self, store: LocalStore, fence: Fence):
        self._store, self._fence = store, fence
        self._path = store.root / NAME
        self._file: FileIO | None = None
        self._num_bytes = self._num_synced_bytes = 0
        self._newest: Line | None = None
        self._synced_step: int | None = None  # of the newest row that a power cut leaves
        self._written: list[Line] = []  # since then
        self._unwritten: list[Line] = []
        self._syncing = threading.Lock()  # held while one thread waits for the disk
        self._lock = threading.RLock()  # of all the rest; never held meanwhile

    def rewind(self, step: int, tail: Tail | None = None) -> Row | None:
        """See `Metrics`."""
        own = surviving(self._store.lines(NAME), up_to(step, tail))
        more = () if tail is None else tail.lines
        self._replace(itertools.chain(own, (line for line in more if line.step <= step)))
        return None if self._newest is None or self._newest.step != step else self._newest.row

    def reaches(self, step: int) -> bool:
        """See `Metrics`."""
        return any(line.step == step for line in surviving(self._store.lines(NAME), step))

    def append(self, row: Row) -> None:
        """See `Metrics`. The row survives this process from here on."""
        with self._lock:
            self._newest = Line.of(row)
            self._unwritten.append(self._newest)
        try:
            self._write()
            if self._num_bytes - self._num_synced_bytes > UNSYNCED_BYTES_MAX:
                self.sync()
        except OSError as error:
            warn(f"metrics cannot be written ({error}); {len(self._unwritten)} rows are kept")

    def _write(self) -> None:
        """Write what is unwritten, each row whole or not at all."""
        assert self._file is not None, "rewind opens the file"
        with self._lock:
            while self._unwritten:
                line = self._unwritten[0]
                if self._file.write(line.text) != len(line.text):
                    self._file.truncate(self._num_bytes)
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._num_bytes += len(line.text)
                self._written.append(self._unwritten.pop(0))

    def replace_last(self, row: Row) -> None:
        """See `Metrics`."""
        with self._lock:
            self._write()
            lines = surviving(self._store.lines(NAME), row["step"] - 1)
            self._replace(itertools.chain(lines, [Line.of(row)]))

    def newest(self) -> Row:
        """See `Metrics`."""
        return {} if self._newest is None else self._newest.row

    def tail(self) -> Tail:
        """See `Metrics`."""
        with self._lock:
            return Tail(self._synced_step, [*self._written, *self._unwritten])

    def sync(self) -> None:
        """See `Metrics`."""
        with self._syncing:
            with self._lock:
                if self._file is None:
                    return
                self._write()
                self._check_place()
                file, size, num_lines = self._file, self._num_bytes, len(self._written)
            os.fsync(file.fileno())
            with self._lock:
                self._num_synced_bytes = size
                if num_lines:
                    self._synced_step = self._written[num_lines - 1].step
                    del self._written[:num_lines]

    def close(self) -> None:
        """See `Metrics`."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _check_place(self) -> None:
        """If somebody has deleted, replaced or cut the file, say so, and make it anew from what is still open."""
        assert self._file is not None
        own = os.fstat(self._file.fileno())
        try:
            is_there = os.path.samestat(own, os.stat(self._path))
        except FileNotFoundError:
            is_there = False
        if own.st_size < self._num_bytes:
            warn(f"{self._path} was cut from {self._num_bytes} to {own.st_size} bytes by somebody else; rows are lost")
            self._num_bytes = self._num_synced_bytes = own.st_size
        if not is_there:
            self._fence.check()  # it may be a newer attempt's by now
            warn(f"{self._path} was deleted or replaced while the job runs; it is made anew from the open file")
            self._replace(surviving(_texts_of(self._file)))

    def _replace(self, lines: Iterable[Line]) -> None:
        """Put a file with these lines in the place of what is there, durably, and open it for more."""
        newest: list[Line] = []
        size = 0

        def texts() -> Iterator[bytes]:
            nonlocal size
            for line in lines:
                newest[:] = [line]
                size += len(line.text)
                yield line.text

        self._store.write_chunks(NAME, texts())
        self.close()
        self._file, self._num_bytes, self._num_synced_bytes = self._path.open("a+b", buffering=0), size, size
        self._newest = newest[0] if newest else None
        self._synced_step = None if self._newest is None else self._newest.step
        self._written.clear()


def _texts_of(file: FileIO) -> Iterator[bytes]:
    """The lines of an open file, wherever it stands."""
    offset, torn = 0, b""
    while chunk := os.pread(file.fileno(), _CHUNK_BYTES, offset):
        offset += len(chunk)
        *whole, torn = (torn + chunk).split(b"\n")
        yield from whole
    yield torn
