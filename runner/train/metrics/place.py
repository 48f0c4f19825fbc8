"""A place that holds the rows for another tool, fed aside: it may be slow, hang or fail, and no step notices.

All of a place happens on a thread of its own behind a bounded queue. It is a picture of `metrics.jsonl` and nothing
else: each attempt first gives it the rows up to the step that it resumed from, then its own. So there is one
trajectory, whatever was lost, recomputed with other bits or missed by a place that was off, and a place needs no memory
of its own. What it costs at a start is to write those rows once more, beside the first steps.

A place that raises, or does not come after, is left off for the rest of the attempt: `on_off` hears of it once.
"""

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Protocol

from runner.errors import first_line
from runner.train.metrics.row import Row

QUEUE_ROWS = 10_000
CLOSE_SECONDS = 10.0


class Place(Protocol):
    """Where rows are kept. Called on one thread, which may wait there; whatever is raised ends it."""

    def add(self, row: Row) -> None:
        """Take a row. Steps ascend; one of the same step as the row before it has only keys that are new."""

    def supersede(self) -> None:
        """All rows of earlier attempts are in: remove what those attempts have left. Called once."""

    def finish(self) -> None:
        """No more rows come."""


class Aside:
    """A sink (see `sinks`) that feeds a place. `earlier` gives the surviving rows of the attempts before."""

    def __init__(
        self,
        name: str,
        open_place: Callable[[], Place],
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

    def _work(self, open_place: Callable[[], Place], earlier: Callable[[], Iterable[Row]]) -> None:
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
            self._leave_off(first_line(error))
        return isinstance(error, Exception)

    def _leave_off(self, reason: str) -> None:
        if self._off.acquire(blocking=False):
            self._on_off(self._name, reason)


def _what_is_new(row: Row, before: Row) -> Row:
    """Of a row that completes the one before: the step, and the keys that are not there yet."""
    return {key: value for key, value in row.items() if key == "step" or key not in before}
