"""One run as it is read for a page, again and again where it lives: its history, its rows, its log. Writes nothing.

The rows of `metrics.jsonl` as they come, on a disk or in a bucket, each read once. For who looks at a living run.

On a disk it goes on behind the last line that it has read, as long as that line still stands there; in a bucket it
reads only the parts that are new. If a resumed attempt has dropped rows, all are read again. Memory holds a line at a
time, or the content of one part.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

from runner.dashboard.charts import RunCurves
from runner.history.reader import HistoryReader
from runner.history.records import History
from runner.metrics.file import METRICS_FILE, decode_parts, read_content
from runner.metrics.rows import Row, select_surviving
from runner.run.logs import LOG_FOLDER
from runner.storage import FileInfo, FileTail, Store


class RowBatch(NamedTuple):
    """What one reading gives.

    Attributes:
        is_anew: whether what was fed before is void, and `rows` begins with the first.
        rows: that stand for good; to be used up before the next reading. May raise `OSError`.
        newest: the rows after them, which a later reading gives again.
    """

    is_anew: bool
    rows: Iterator[Row]
    newest: list[Row]


class RowFeed(Protocol):
    """The rows of one run."""

    def read(self) -> RowBatch:
        """What is new since the last reading; nothing where there are no rows yet. Raises `OSError`."""


class DiskFeed:
    """See `RowFeed`."""

    def __init__(self, directory: Path):
        self._file = FileTail(directory / METRICS_FILE)
        self._step = -1

    def read(self) -> RowBatch:
        """See `RowFeed`."""
        is_anew, lines = self._file.read()
        if is_anew:
            self._step = -1
        return RowBatch(is_anew, self._rows(lines), [])

    def _rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        for text in lines:
            for line in select_surviving([text], beyond=self._step):
                self._step = line.step
                yield line.row


class BucketFeed:
    """See `RowFeed`."""

    def __init__(self, store: Store):
        self._store = store
        self._parts: list[str] = []  # that were read, in order
        self._step = -1

    def read(self) -> RowBatch:
        """See `RowFeed`."""
        names, content = read_content(self._store, self._parts)
        if names and names[0] in self._parts:
            names = [*self._parts[: self._parts.index(names[0])], *names]
        is_anew = names[: len(self._parts)] != self._parts or not self._parts
        if is_anew:
            self._parts, self._step = [], -1
        sealed = decode_parts(content)
        newest = select_surviving(content.splitlines(), beyond=sealed[-1].last_step if sealed else -1)
        return RowBatch(is_anew, self._rows(names[len(self._parts) :]), [line.row for line in newest])

    def _rows(self, names: Iterable[str]) -> Iterator[Row]:
        for name in names:
            for line in select_surviving(self._store.read(name).splitlines(), beyond=self._step):
                self._step = line.step
                yield line.row
            self._parts.append(name)


def open_feed(store: Store) -> RowFeed:
    """The rows of the run in a directory, on a disk or in a bucket."""
    return BucketFeed(store) if store.root is None else DiskFeed(store.root)


_SPEC = "spec.yaml"
_LOG_BYTES = 1 << 15
_SPEC_CHARACTERS_MAX = 1 << 16
_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}

Value = TypeVar("Value")


@dataclass(frozen=True)
class LogExcerpt:
    """The end of a file below `logs/`."""

    name: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """What was read of a run.

    Attributes:
        name: what a person calls it.
        newest: rows that `curves` does not hold yet.
        spec: the text of `spec.yaml`, cut where it is very long; None if it cannot be read.
        log: of the newest attempt's main host, None if there is none.
        notes: what could not be read, a line each.
    """

    name: str
    history: History
    curves: RunCurves
    newest: list[Row]
    spec: str | None
    log: LogExcerpt | None
    notes: list[str]


class RunReader:
    """Reads one run. Between two readings it holds its curves and what its events tell, whose size is bounded."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._history, self._feed, self._curves = HistoryReader(store), open_feed(store), RunCurves()

    def read(self) -> RunSnapshot:
        """All of it, as it stands. Raises `OSError` if the store does not answer, `InvalidError` if no run is there."""
        history = self._history.read()
        notes: list[str] = []
        newest: list[Row] = _noting(notes, self._read_rows, [])
        spec = _noting(notes, self._read_spec, None)
        log = _noting(notes, self._read_log, None)
        return RunSnapshot(self._name, history, self._curves, newest, spec, log, notes)

    def _read_rows(self) -> list[Row]:
        """Take in the rows that are new; those that come after them."""
        fed = self._feed.read()
        if fed.is_anew:
            self._curves = RunCurves()
        for row in fed.rows:
            self._curves.add(row)
        return fed.newest

    def _read_spec(self) -> str:
        return self._store.read(_SPEC).decode(errors="replace")[:_SPEC_CHARACTERS_MAX]

    def _read_log(self) -> LogExcerpt | None:
        """The end of `logs/<attempt>.<process>.log`, of the newest attempt and its lowest process."""
        found = {_number_of(name): (name, file) for name, file in self._store.list_files(f"{LOG_FOLDER}/").items()}
        numbers = [each for each in found if each is not None]
        if not numbers:
            return None
        name, file = found[max(numbers)]
        content = self._end_of(name, file)
        return LogExcerpt(name, content.decode(errors="replace").translate(_CONTROLS))

    def _end_of(self, name: str, file: FileInfo) -> bytes:
        """Of a file that grows meanwhile; in a bucket it would be replaced."""
        if self._store.root is None:
            start = max(file.size_bytes - _LOG_BYTES, 0)
            return self._store.read_range(name, start, file.size_bytes, file.version)
        with (self._store.root / name).open("rb") as opened:
            opened.seek(max(os.fstat(opened.fileno()).st_size - _LOG_BYTES, 0))
            return opened.read(_LOG_BYTES)


def _number_of(name: str) -> tuple[int, int] | None:
    """Attempt, and process counted down, of a log's name; None of what is no log."""
    parts = name.removeprefix(f"{LOG_FOLDER}/").split(".")
    if len(parts) != 3 or parts[2] != "log" or not all(part.isascii() and part.isdecimal() for part in parts[:2]):
        return None
    return int(parts[0]), -int(parts[1])


def _noting(notes: list[str], read: Callable[[], Value], otherwise: Value) -> Value:
    """What `read` returns; if it cannot, why is noted. What is not there needs no note."""
    try:
        return read()
    except FileNotFoundError:
        return otherwise
    except (OSError, ValueError) as error:
        notes.append(str(error))
        return otherwise
