"""The data of the dashboard's pages, read anew only where something has changed: the table of all runs, and each run.

On a disk a run whose files are as they were is not read again, unless it lives, since a living one may have stalled. In
a bucket, where looking costs as much as reading, each is read again after a while. A round of the table takes so many
seconds at most; what it does not come to, the next one begins with.

One reader for all clients: a run is read at most once a second, however many look, and not at all if none does.

1. A request names what it wants, and gets what was last read of it, at once. It waits, up to a deadline, only where
   nothing was read yet, or where that was long ago and no other waits.
2. One loop reads what was wanted since its last round. It rests after each round, so that it takes no more than a fixed
   share of one core from whatever trains on this machine.
3. What cannot be read is data too: the reader says so on the page. A bug in the reader ends the loop.

The dashboard as a server: waitress answers in some threads, and this one reads. Ends on Ctrl-C or SIGTERM.
"""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeVar

import waitress

from runner.console import say
from runner.dashboard.app import DashboardApp, ResponseBody, is_loopback, make_access_policy, parse_address
from runner.dashboard.discovery import DiscoveredRun, DiscoveryResult, find_runs
from runner.dashboard.html import encode_json
from runner.dashboard.reader import RunReader
from runner.dashboard.view import (
    build_view,
    format_duration,
    format_number,
    format_state,
    get_state_class,
    round_value,
    truncate,
)
from runner.errors import InvalidError, RunnerError
from runner.history.reader import HistoryReader
from runner.history.records import History, RunState
from runner.storage import JsonObject, Store, parse_number

REST_SECONDS_MIN = 1.0
REST_TIMES = 4  # a round of so many seconds is followed by so many times that of rest
FRESH_SECONDS = 10.0
KEEP_SECONDS = 600.0
WAIT_SECONDS = 30.0


@dataclass(frozen=True)
class CachedReading:
    """What was read of one thing, and when by the monotonic clock."""

    body: ResponseBody | None
    when: float


class SharedReader:
    """See above. `read` gives the data of a run by its id, of all runs by ""; None if there is no such run."""

    def __init__(self, read: Callable[[str], ResponseBody | None], wait_seconds: float = WAIT_SECONDS):
        self._read = read
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        self._kept: dict[str, CachedReading] = {}  # bounded by what was asked for in the last KEEP_SECONDS

    def data(self, name: str) -> ResponseBody | None:
        """What was last read of `name`; None if there is no such thing. Any thread.

        Raises `TimeoutError` if nothing was read of it within `wait_seconds`.
        """
        with self._changed:
            is_first = name not in self._wanted  # one waits for what is old, the others take it
            self._wanted.add(name)
            self._changed.notify_all()
            if is_first or name not in self._kept:
                self._changed.wait_for(lambda: self._is_fresh(name), self._wait_seconds)
            if name not in self._kept:
                raise TimeoutError(f"nothing was read within {self._wait_seconds} s")
            return self._kept[name].body

    def _is_fresh(self, name: str) -> bool:
        kept = self._kept.get(name)
        return kept is not None and time.monotonic() - kept.when < FRESH_SECONDS

    def serve(self) -> None:
        """Read what is wanted, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
            began = time.monotonic()
            self.round()
            time.sleep(max(REST_SECONDS_MIN, REST_TIMES * (time.monotonic() - began)))

    def round(self) -> None:
        """Read once what is wanted by now."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            oldest = time.monotonic() - KEEP_SECONDS
            self._kept = {name: kept for name, kept in self._kept.items() if kept.when > oldest}
        for name in sorted(wanted):
            body = self._read(name)
            with self._changed:
                self._kept[name] = CachedReading(body, time.monotonic())
                self._changed.notify_all()


SEARCH_SECONDS = 10.0
LIVING_SECONDS = 5.0
BUCKET_SECONDS = 15.0
ROUND_SECONDS = 5.0
POINTS_MAX = 6000  # of the curves of one run, which are sent again and again
READERS_MAX = 16  # that are held, the last that were asked for
_NUM_READERS = 8
_TREND_MAX = 100
_FILES = ("events.jsonl", "metrics.jsonl", "result.json", "spec.yaml", "job.json", "checkpoints", "attempts")

Signature = tuple[tuple[int, int], ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class RunSummary:
    """A line of the table, and what it was made from."""

    line: JsonObject
    when: float  # by the monotonic clock
    signature: Signature | None  # None in a bucket
    is_living: bool
    reader: HistoryReader | None  # of one that lives, and will be read again

    def stands(self, signature: Signature | None, now: float) -> bool:
        """Whether a run whose files are now of this signature need not be read again."""
        if signature is None:
            return now - self.when < BUCKET_SECONDS
        return signature == self.signature and not (self.is_living and now - self.when >= LIVING_SECONDS)


def _signature(directory: Path | None) -> Signature | None:
    """Of the files that change when anything happens to a run."""
    if directory is None:
        return None
    numbers = [number for number in map(parse_number, _names(directory / "attempts")) if number is not None]
    newest = f"attempts/{max(numbers, default=0)}.clock"
    return tuple(_state_of(directory / name) for name in (*_FILES, newest))


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def _state_of(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except OSError:
        return 0, 0
    return status.st_mtime_ns, status.st_size


class PageData:
    """Reads for one `SharedReader`, in one thread."""

    def __init__(self, root: Store):
        self._root = root
        self._found = DiscoveryResult([], [])
        self._found_when = -SEARCH_SECONDS
        self._summaries: dict[str, RunSummary] = {}
        self._readers: dict[str, RunReader] = {}

    def read(self, name: str) -> ResponseBody | None:
        """The data of the run with this id, of all runs for ""; None if there is no such run."""
        self._search()
        if not name:
            return _body(self._table())
        run = next((each for each in self._found.runs if each.id == name), None)
        return None if run is None else _body(self._run(run))

    def _search(self) -> None:
        if time.monotonic() - self._found_when < SEARCH_SECONDS:
            return
        found = _trying(lambda: find_runs(self._root))
        self._found = DiscoveryResult(self._found.runs, [found]) if isinstance(found, str) else found
        self._found_when = time.monotonic()
        known = {run.id for run in self._found.runs}
        self._summaries = {key: value for key, value in self._summaries.items() if key in known}

    def _run(self, run: DiscoveredRun) -> JsonObject:
        title = _title(run)
        reader = self._readers.pop(run.id, None) or RunReader(run.store, title)
        self._readers[run.id] = reader  # as the last
        while len(self._readers) > READERS_MAX:
            del self._readers[next(iter(self._readers))]
        seen = _trying(reader.read)
        return {"title": title, "problem": seen} if isinstance(seen, str) else build_view(title, [seen], POINTS_MAX)

    def _table(self) -> JsonObject:
        began = time.monotonic()
        signatures = {run.id: _signature(run.store.root) for run in self._found.runs}
        stale = [run for run in self._found.runs if not self._stands(run, signatures[run.id], began)]
        stale.sort(key=lambda run: self._summaries[run.id].when if run.id in self._summaries else 0.0)
        with ThreadPoolExecutor(_NUM_READERS if self._root.root is None else 1) as pool:
            for start in range(0, len(stale), _NUM_READERS):
                if time.monotonic() - began > ROUND_SECONDS:
                    break
                some = stale[start : start + _NUM_READERS]
                summaries = pool.map(lambda run: self._summary(run, signatures[run.id]), some)
                self._summaries |= {run.id: summary for run, summary in zip(some, summaries, strict=True)}
        lines = [self._summaries[run.id].line for run in self._found.runs if run.id in self._summaries]
        num_left = len(self._found.runs) - len(lines)
        notes = [f"{num_left} more runs are being read."] if num_left else []
        return {
            "title": truncate(f"Runs below {self._root.url}"),
            "table": lines,
            "notes": [*self._found.notes, *notes],
        }

    def _summary(self, run: DiscoveredRun, signature: Signature | None) -> RunSummary:
        before = self._summaries.get(run.id)
        reader = (None if before is None else before.reader) or HistoryReader(run.store)
        history = _trying(reader.read)
        if isinstance(history, str):
            line = {"id": run.id, "name": _title(run), "state": history, "kind": "bad", "trend": []}
            return RunSummary(line, time.monotonic(), signature, is_living=True, reader=None)
        is_living = history.state in (RunState.RUNNING, RunState.STALLED)
        return RunSummary(_line(run, history), time.monotonic(), signature, is_living, reader if is_living else None)

    def _stands(self, run: DiscoveredRun, signature: Signature | None, now: float) -> bool:
        summary = self._summaries.get(run.id)
        return summary is not None and summary.stands(signature, now)


def _body(data: JsonObject) -> ResponseBody:
    return ResponseBody.of("application/json", encode_json(data))


def _title(run: DiscoveredRun) -> str:
    return truncate(run.path or run.store.url)


def _line(run: DiscoveredRun, history: History) -> JsonObject:
    losses = [number for row in history.trend if isinstance(number := row.get("train/loss"), int | float)]
    best, share = history.best_validation, len(losses) / _TREND_MAX
    trend = losses if share <= 1 else [losses[int(index * share)] for index in range(_TREND_MAX)]
    total = "" if history.total_steps is None else f" / {history.total_steps:,}"
    speed = format_number(history.speed.tokens_per_second, ",.0f")
    return {
        "id": run.id,
        "name": _title(run),
        "state": format_state(history),
        "kind": get_state_class(history),
        "steps": f"{history.step:,}{total}",
        "trend": [round_value(value) for value in trend],
        "loss": format_number(history.row.get("train/loss"), ".4f"),
        "validation": "" if best is None else f"{best[1]:.4f}",
        "speed": f"{speed} tokens / s" if speed else "",
        "left": format_duration(history.speed.left_seconds),
        "goodput": f"{history.goodput:.1%}" if history.wall_seconds > 0 else "",
        "alive": max((attempt.ended for attempt in history.attempts), default=None),
    }


def _trying(read: Callable[[], Value]) -> Value | str:
    """What `read` returns, or why it cannot, in words."""
    try:
        return read()
    except (RunnerError, OSError, ValueError) as error:
        return truncate(str(error))


_NUM_THREADS = 16
_CONNECTIONS_MAX = 500
_REQUEST_BYTES_MAX = 1 << 14
_NICENESS = 10  # whatever trains on this machine comes first


def serve(root: Store, host: str, port: int, token: str | None) -> None:
    """Serve all runs below `root` until asked to stop. Main thread only.

    Raises `InvalidError` if the address or the token is none.
    """
    watcher = SharedReader(PageData(root).read)
    access = make_access_policy(host, token)
    try:
        server = waitress.create_server(
            DashboardApp(access, watcher.data),
            host=host,
            port=port,
            threads=_NUM_THREADS,
            connection_limit=_CONNECTIONS_MAX,
            max_request_header_size=_REQUEST_BYTES_MAX,
            max_request_body_size=_REQUEST_BYTES_MAX,
            ident=None,
        )
    except (OSError, ValueError) as error:
        raise InvalidError(f"--host {host} --port {port}: cannot be served: {error}") from error
    os.nice(_NICENESS)
    _end_on_signals()
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # that many clients wait is no news
    threading.Thread(target=server.run, name="server", daemon=True).start()
    shown = f"[{host}]" if parse_address(host) is not None and ":" in host else host
    say(
        f"dashboard of {root.url}: http://{shown}:{server.effective_port}/"
        + (f"?token={access.token}" if access.token else "")
    )
    if not is_loopback(host):
        say("others can reach it; who has the token sees all runs, and what passes is not encrypted")
    try:
        watcher.serve()
    except KeyboardInterrupt:
        say("dashboard: stopped")


def _end_on_signals() -> None:
    """A signal ends the server, where it would ask a job to stop at its next step."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
