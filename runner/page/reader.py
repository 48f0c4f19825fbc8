"""One run as it is read for a page, again and again where it lives: its history, its rows, its log. Writes nothing."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from runner.attempt.log_file import FOLDER
from runner.history.read import HistoryReader
from runner.history.record import History
from runner.page.chart import Curves
from runner.page.row_feed import open_feed
from runner.storage import Listed, Store
from runner.train.metrics.row import Row

_SPEC = "spec.yaml"
_LOG_BYTES = 1 << 15
_SPEC_CHARACTERS_MAX = 1 << 16
_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}

Value = TypeVar("Value")


@dataclass(frozen=True)
class Log:
    """The end of a file below `logs/`."""

    name: str
    text: str


@dataclass(frozen=True)
class Seen:
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
    curves: Curves
    newest: list[Row]
    spec: str | None
    log: Log | None
    notes: list[str]


class RunReader:
    """Reads one run. Between two readings it holds its curves and what its events tell, whose size is bounded."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._history, self._feed, self._curves = HistoryReader(store), open_feed(store), Curves()

    def read(self) -> Seen:
        """All of it, as it stands. Raises `OSError` if the store does not answer, `InvalidError` if no run is there."""
        history = self._history.read()
        notes: list[str] = []
        newest: list[Row] = _noting(notes, self._read_rows, [])
        spec = _noting(notes, self._read_spec, None)
        log = _noting(notes, self._read_log, None)
        return Seen(self._name, history, self._curves, newest, spec, log, notes)

    def _read_rows(self) -> list[Row]:
        """Take in the rows that are new; those that come after them."""
        fed = self._feed.read()
        if fed.is_anew:
            self._curves = Curves()
        for row in fed.rows:
            self._curves.add(row)
        return fed.newest

    def _read_spec(self) -> str:
        return self._store.read(_SPEC).decode(errors="replace")[:_SPEC_CHARACTERS_MAX]

    def _read_log(self) -> Log | None:
        """The end of `logs/<attempt>.<process>.log`, of the newest attempt and its lowest process."""
        found = {_number_of(name): (name, file) for name, file in self._store.listing(f"{FOLDER}/").items()}
        numbers = [each for each in found if each is not None]
        if not numbers:
            return None
        name, file = found[max(numbers)]
        content = self._end_of(name, file)
        return Log(name, content.decode(errors="replace").translate(_CONTROLS))

    def _end_of(self, name: str, file: Listed) -> bytes:
        """Of a file that grows meanwhile; in a bucket it would be replaced."""
        if self._store.root is None:
            start = max(file.size_bytes - _LOG_BYTES, 0)
            return self._store.read_range(name, start, file.size_bytes, file.version)
        with (self._store.root / name).open("rb") as opened:
            opened.seek(max(os.fstat(opened.fileno()).st_size - _LOG_BYTES, 0))
            return opened.read(_LOG_BYTES)


def _number_of(name: str) -> tuple[int, int] | None:
    """Attempt, and process counted down, of a log's name; None of what is no log."""
    parts = name.removeprefix(f"{FOLDER}/").split(".")
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
