"""Incremental reader of one run, also while it is alive: its history, the rows of its metrics, its log. Writes nothing.

Each row of `metrics.jsonl` is read once. If a resumed attempt has dropped rows, all rows are read again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from runner.dashboard.charts import RunCurves
from runner.history.reader import HistoryReader
from runner.history.records import History
from runner.metrics.file import open_metrics_tail
from runner.metrics.rows import Row
from runner.run.logs import LOG_FOLDER
from runner.storage import Store

_SPEC = "spec.yaml"
_LOG_BYTES = 1 << 15
_SPEC_CHARACTERS_MAX = 1 << 16
# Control characters of a log, shown as their symbols; tabs and line breaks stay.
_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}

Value = TypeVar("Value")


@dataclass(frozen=True)
class LogExcerpt:
    """End of a file below `logs/`."""

    name: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """State of a run at one reading.

    Attributes:
        name: name for the user.
        history: events, attempts and checkpoints.
        curves: series of the run's metrics.
        newest: rows that `curves` does not hold yet.
        spec: text of `spec.yaml`, truncated if it is very long; None if it cannot be read.
        log: end of the log of the newest attempt's process 0, None if there is none.
        notes: parts that could not be read, one line each.
    """

    name: str
    history: History
    curves: RunCurves
    newest: list[Row]
    spec: str | None
    log: LogExcerpt | None
    notes: list[str]


class RunReader:
    """Reader of one run. Between two readings it holds curves and a summary of events, whose size is bounded."""

    def __init__(self, store: Store, name: str):
        self._store, self._name = store, name
        self._history, self._metrics, self._curves = HistoryReader(store), open_metrics_tail(store), RunCurves()

    def read(self) -> RunSnapshot:
        """Return the current state of the run.

        Raises:
            OSError: the store does not respond.
            InvalidError: there is no run in the directory.
        """
        history = self._history.read()
        notes: list[str] = []

        def try_reading(read: Callable[[], Value], otherwise: Value) -> Value:
            try:
                return read()
            # A file that does not exist yet needs no note.
            except FileNotFoundError:
                return otherwise
            except (OSError, ValueError) as error:
                notes.append(str(error))
                return otherwise

        def read_rows() -> list[Row]:
            """Add new final rows to the curves, and return the rows after them."""
            update = self._metrics.read()
            # Rows of lost steps cannot be removed from a series, so it is built anew.
            if update.is_restart:
                self._curves = RunCurves()
            for row in update.rows:
                self._curves.add(row)
            return update.newest

        def read_spec() -> str:
            return self._store.read(_SPEC).decode(errors="replace")[:_SPEC_CHARACTERS_MAX]

        newest: list[Row] = try_reading(read_rows, [])
        spec = try_reading(read_spec, None)
        log = try_reading(self._read_log, None)
        return RunSnapshot(self._name, history, self._curves, newest, spec, log, notes)

    def _read_log(self) -> LogExcerpt | None:
        """Return the end of `logs/<attempt>.<process>.log` of the newest attempt and its lowest process."""
        newest: tuple[int, int] | None = None
        newest_name = ""
        files = self._store.list_files(f"{LOG_FOLDER}/")
        for name in files:
            parts = name.removeprefix(f"{LOG_FOLDER}/").split(".")
            is_log = len(parts) == 3 and parts[2] == "log"
            if not is_log or not all(part.isascii() and part.isdecimal() for part in parts[:2]):
                continue
            # The newest attempt, and of its processes the lowest.
            number = int(parts[0]), -int(parts[1])
            if newest is None or number >= newest:
                newest, newest_name = number, name
        if newest is None:
            return None
        if self._store.root is None:
            file = files[newest_name]
            start = max(file.size_bytes - _LOG_BYTES, 0)
            content = self._store.read_range(newest_name, start, file.size_bytes, file.version)
        else:
            # The file may have grown since it was listed. In a bucket it would have been replaced.
            with (self._store.root / newest_name).open("rb") as opened:
                opened.seek(max(os.fstat(opened.fileno()).st_size - _LOG_BYTES, 0))
                content = opened.read(_LOG_BYTES)
        return LogExcerpt(newest_name, content.decode(errors="replace").translate(_CONTROLS))
