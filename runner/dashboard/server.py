"""Server of the dashboard: one shared reader of all runs, and waitress, which responds to clients in threads.

One reader serves all clients. A run is read at most once per second for any number of clients, and never without one:

1. A request names a page and at once gets the newest data that were read for it. It waits, up to a deadline, only if
   there are none yet, or if they are old and no other request waits.
2. One loop reads the pages that were requested since its last round. It rests after each round, so that it takes no
   more than a fixed share of one core from a job that trains on this machine.
3. A run that cannot be read is data too: the page shows the reason. A bug in the reader ends the loop.

Runs are read again only where something has changed. On a disk, a run whose files are unchanged is not read again,
unless it is alive, since it may have stalled. In a bucket, where checking costs as much as reading, each run is read
again after a while. A round of the table takes a bounded time; the next round begins with the runs that it left.
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
from runner.dashboard.reader import DiscoveredRun, DiscoveryResult, RunReader, find_runs
from runner.dashboard.report import encode_json
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

# Settings of the loop and its cache.
REST_SECONDS_MIN = 1.0
REST_TIMES = 4  # rest of the loop after a round, in times of the round's duration
FRESH_SECONDS = 10.0
KEEP_SECONDS = 600.0
WAIT_SECONDS = 30.0

# Limits of reading runs.
SEARCH_SECONDS = 10.0
LIVING_SECONDS = 5.0
BUCKET_SECONDS = 15.0
ROUND_SECONDS = 5.0
POINTS_MAX = 6000  # of the curves of one run, which are sent repeatedly
READERS_MAX = 16  # kept for the runs that were requested last
_NUM_THREADS_PER_TABLE = 8
_TREND_MAX = 100
_WATCHED_FILES = ("events.jsonl", "metrics.jsonl", "result.json", "spec.yaml", "job.json", "checkpoints", "attempts")

# Settings of waitress.
_NUM_THREADS = 16
_CONNECTIONS_MAX = 500
_REQUEST_BYTES_MAX = 1 << 14
_NICENESS = 10  # a job that trains on this machine comes first

Signature = tuple[tuple[int, int], ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class CachedReading:
    """Data of one page, and the time of reading by the monotonic clock."""

    body: ResponseBody | None
    when: float


class SharedReader:
    """Reader shared by all clients; see the module's description.

    `read` returns the data of a run by its id, or of all runs by ""; None if there is no such run.
    """

    def __init__(self, read: Callable[[str], ResponseBody | None], wait_seconds: float = WAIT_SECONDS):
        self._read = read
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        self._cache: dict[str, CachedReading] = {}  # bounded by the requests of the last KEEP_SECONDS

    def get_data(self, name: str) -> ResponseBody | None:
        """Return what was last read for a page, None if there is no such run. Thread-safe.

        Raises:
            TimeoutError: nothing was read for it within `wait_seconds`.
        """

        def is_fresh() -> bool:
            cached = self._cache.get(name)
            return cached is not None and time.monotonic() - cached.when < FRESH_SECONDS

        with self._changed:
            # If the data are old, the first request waits for new ones, and the others take the old ones.
            is_first = name not in self._wanted
            self._wanted.add(name)
            self._changed.notify_all()
            if is_first or name not in self._cache:
                self._changed.wait_for(is_fresh, self._wait_seconds)
            if name not in self._cache:
                raise TimeoutError(f"{name or 'table of runs'}: not read within {self._wait_seconds} s; try again")
            return self._cache[name].body

    def serve(self) -> None:
        """Read what is requested, for ever."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted)
            began = time.monotonic()
            self.read_wanted()
            # The rest grows with the work, so reading takes a fifth of one core at most, however many runs there are.
            time.sleep(max(REST_SECONDS_MIN, REST_TIMES * (time.monotonic() - began)))

    def read_wanted(self) -> None:
        """Read once what has been requested by now."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            # What nobody has requested for a while is dropped, which bounds the memory by the number of viewers.
            oldest = time.monotonic() - KEEP_SECONDS
            self._cache = {name: cached for name, cached in self._cache.items() if cached.when > oldest}
        # Reading happens outside of the lock, so requests for other pages are served meanwhile.
        for name in sorted(wanted):
            body = self._read(name)
            with self._changed:
                self._cache[name] = CachedReading(body, time.monotonic())
                self._changed.notify_all()


@dataclass(frozen=True)
class RunSummary:
    """Line of the table of all runs.

    Attributes:
        line: content of the line.
        when: time of reading by the monotonic clock.
        signature: state of the run's files, None in a bucket.
        is_living: the run is running or stalled.
        reader: reader of a living run, which continues where it stopped.
    """

    line: JsonObject
    when: float
    signature: Signature | None
    is_living: bool
    reader: HistoryReader | None

    def is_current(self, signature: Signature | None, now: float) -> bool:
        """Return True if a run whose files now have this signature need not be read again."""
        # In a bucket each look at a file is a request, so there age decides.
        if signature is None:
            return now - self.when < BUCKET_SECONDS
        return signature == self.signature and not (self.is_living and now - self.when >= LIVING_SECONDS)


def _read_signature(directory: Path | None) -> Signature | None:
    """Return modification time and size of the files that change when anything happens to a run."""
    if directory is None:
        return None
    try:
        names = os.listdir(directory / "attempts")
    except OSError:
        names = []
    # The clock file of the newest attempt is written while the attempt is alive.
    newest = max((number for number in map(parse_number, names) if number is not None), default=0)
    signature = []
    for name in (*_WATCHED_FILES, f"attempts/{newest}.clock"):
        try:
            status = (directory / name).stat()
            signature.append((status.st_mtime_ns, status.st_size))
        except OSError:
            signature.append((0, 0))
    return tuple(signature)


class PageData:
    """Data of all pages, read in one thread."""

    def __init__(self, root: Store):
        self._root = root
        self._found = DiscoveryResult([], [])
        self._found_when = -SEARCH_SECONDS
        self._summaries: dict[str, RunSummary] = {}
        self._readers: dict[str, RunReader] = {}

    def read(self, name: str) -> ResponseBody | None:
        """Return the data of the run with this id, or of all runs for ""; None if there is no such run."""
        if time.monotonic() - self._found_when >= SEARCH_SECONDS:
            found = _try_reading(lambda: find_runs(self._root))
            # A root that cannot be listed for a moment keeps the runs that were found before.
            self._found = DiscoveryResult(self._found.runs, [found]) if isinstance(found, str) else found
            self._found_when = time.monotonic()
            known = {run.id for run in self._found.runs}
            self._summaries = {key: value for key, value in self._summaries.items() if key in known}
        if not name:
            return ResponseBody.from_text("application/json", encode_json(self._read_table()))
        run = next((each for each in self._found.runs if each.id == name), None)
        if run is None:
            return None
        title = _make_title(run)
        # Put the reader at the end of the dict, whose first readers are dropped.
        reader = self._readers.pop(run.id, None) or RunReader(run.store, title)
        self._readers[run.id] = reader
        while len(self._readers) > READERS_MAX:
            del self._readers[next(iter(self._readers))]
        snapshot = _try_reading(reader.read)
        if isinstance(snapshot, str):
            data: JsonObject = {"title": title, "problem": snapshot}
        else:
            data = build_view(title, [snapshot], POINTS_MAX)
        return ResponseBody.from_text("application/json", encode_json(data))

    def _read_table(self) -> JsonObject:
        began = time.monotonic()
        signatures = {run.id: _read_signature(run.store.root) for run in self._found.runs}
        stale = []
        for run in self._found.runs:
            summary = self._summaries.get(run.id)
            if summary is None or not summary.is_current(signatures[run.id], began):
                stale.append(run)
        # The runs that have waited longest come first, so every run is reached in some round.
        stale.sort(key=lambda run: self._summaries[run.id].when if run.id in self._summaries else 0.0)
        with ThreadPoolExecutor(_NUM_THREADS_PER_TABLE if self._root.root is None else 1) as pool:
            for start in range(0, len(stale), _NUM_THREADS_PER_TABLE):
                # A large root is read over several rounds, and the page shows what is known so far.
                if time.monotonic() - began > ROUND_SECONDS:
                    break
                some = stale[start : start + _NUM_THREADS_PER_TABLE]
                summaries = pool.map(lambda run: self._summarize(run, signatures[run.id]), some)
                self._summaries |= {run.id: summary for run, summary in zip(some, summaries, strict=True)}
        lines = [self._summaries[run.id].line for run in self._found.runs if run.id in self._summaries]
        num_left = len(self._found.runs) - len(lines)
        notes = [*self._found.notes, *([f"{num_left} more runs are being read."] if num_left else [])]
        return {"title": truncate(f"Runs below {self._root.url}"), "table": lines, "notes": notes}

    def _summarize(self, run: DiscoveredRun, signature: Signature | None) -> RunSummary:
        before = self._summaries.get(run.id)
        reader = (None if before is None else before.reader) or HistoryReader(run.store)
        history = _try_reading(reader.read)
        if isinstance(history, str):
            line = {"id": run.id, "name": _make_title(run), "state": history, "kind": "bad", "trend": []}
            # A run that cannot be read counts as living, so that it is tried again.
            return RunSummary(line, time.monotonic(), signature, is_living=True, reader=None)
        is_living = history.state in (RunState.RUNNING, RunState.STALLED)
        line = _build_line(run, history)
        return RunSummary(line, time.monotonic(), signature, is_living, reader if is_living else None)


def _make_title(run: DiscoveredRun) -> str:
    return truncate(run.path or run.store.url)


def _build_line(run: DiscoveredRun, history: History) -> JsonObject:
    losses = [number for row in history.trend if isinstance(number := row.get("train/loss"), int | float)]
    best, share = history.best_validation, len(losses) / _TREND_MAX
    trend = losses if share <= 1 else [losses[int(index * share)] for index in range(_TREND_MAX)]
    total = "" if history.total_steps is None else f" / {history.total_steps:,}"
    speed = format_number(history.speed.tokens_per_second, ",.0f")
    return {
        "id": run.id,
        "name": _make_title(run),
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


def _try_reading(read: Callable[[], Value]) -> Value | str:
    """Return what `read` returns, or the reason why it cannot."""
    try:
        return read()
    except (RunnerError, OSError, ValueError) as error:
        return truncate(str(error))


def serve(root: Store, host: str, port: int, token: str | None) -> None:
    """Serve all runs below `root` until Ctrl-C or SIGTERM. To be called in the main thread.

    Raises:
        InvalidError: the address or the token cannot be used.
    """
    watcher = SharedReader(PageData(root).read)
    access = make_access_policy(host, token)
    try:
        # The limits bound memory and threads, whatever clients send.
        server = waitress.create_server(
            DashboardApp(access, watcher.get_data),
            host=host,
            port=port,
            threads=_NUM_THREADS,
            connection_limit=_CONNECTIONS_MAX,
            max_request_header_size=_REQUEST_BYTES_MAX,
            max_request_body_size=_REQUEST_BYTES_MAX,
            ident=None,
        )
    except (OSError, ValueError) as error:
        raise InvalidError(f"--host {host} --port {port}: cannot be served: {error}; choose another") from error
    os.nice(_NICENESS)

    # A signal ends the server. The handlers of the command line would ask a job to stop at its next step.
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)

    # waitress warns when clients wait for a thread, which is normal for many clients.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    threading.Thread(target=server.run, name="server", daemon=True).start()
    shown = f"[{host}]" if parse_address(host) is not None and ":" in host else host
    query = f"?token={access.token}" if access.token else ""
    say(f"dashboard of {root.url}: http://{shown}:{server.effective_port}/{query}")
    if not is_loopback(host):
        say("other machines can reach it: anyone with the token sees all runs, and the connection is not encrypted")
    try:
        watcher.serve()
    except KeyboardInterrupt:
        say("dashboard: stopped")
