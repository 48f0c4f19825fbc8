"""Server of the dashboard: one shared reader of all runs, and waitress, which responds to clients in threads.

One reader serves all clients. A run is read at most once per second, independent of the number of clients, and only
while there is a client:

1. A request names a page and at once gets the newest data that were read for it. It waits, up to a deadline, only if
   there are none yet, or if they are old and no other request waits.
2. One loop reads the pages that were requested since its last round. It rests after each round, so that it takes no
   more than a fixed share of one core from a job that trains on this machine.
3. If a run cannot be read, its page shows the reason, also if that is a bug of the reader.

Runs are read again only where something has changed. On a disk, a run whose files are unchanged is not read again,
unless it is alive, since it may have stalled. In a bucket, where checking costs as much as reading, each run is read
again after a while. A round over the table of runs takes a bounded time; the next round begins with the remaining runs.
"""

import collections
import functools
import itertools
import logging
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from waitress.adjustments import Adjustments
from waitress.channel import HTTPChannel
from waitress.server import MultiSocketServer, TcpWSGIServer
from waitress.task import ThreadedTaskDispatcher

from runner.console import format_duration, say
from runner.dashboard.app import (
    HOSTS,
    METRICS,
    SWEEPS,
    DashboardApp,
    ResponseBody,
    is_loopback,
    make_access_policy,
    parse_address,
)
from runner.dashboard.reader import (
    DiscoveredRun,
    DiscoveryResult,
    RunReader,
    confine,
    find_runs,
    flatten_spec,
    make_id,
    read_ancestors,
)
from runner.dashboard.report import encode_json
from runner.dashboard.sweep import build_sweep_curves, build_sweep_view, count_bins, read_law
from runner.dashboard.view import (
    build_view,
    format_number,
    format_state,
    get_state_class,
    round_value,
    summarize,
    truncate,
)
from runner.errors import InvalidError, RunnerError
from runner.history.hosts import KINDS, RULE, HostRecord, merge_hosts, read_hosts
from runner.history.ledger import get_float, to_single_line
from runner.history.reader import HistoryReader
from runner.history.records import ForkRecord, History, RunState
from runner.history.sweep import (
    RUNS_MAX,
    SWEEP,
    Sweep,
    SweepRow,
    SweepRun,
    SweepStatus,
    compare_runs,
    format_value,
    join_run,
    read_sweep_or_problem,
    shorten_keys,
)
from runner.metrics.media import read_media
from runner.storage import JsonObject, Store, parse_number

# Settings of the loop and its cache.
_REST_SECONDS_MIN = 1.0
_REST_TIMES = 4  # rest of the loop after a round, in times of the round's duration
_FRESH_SECONDS = 10.0
KEEP_SECONDS = 600.0
_WAIT_SECONDS = 30.0

# Limits of reading runs.
SEARCH_SECONDS = 10.0
LIVING_SECONDS = 5.0
_BUCKET_SECONDS = 15.0
_ROUND_SECONDS = 5.0
POINTS_MAX = 6000  # of the curves of one run, which are sent repeatedly
_SWEEP_POINTS_MAX = 24_000  # likewise, of all runs of a sweep
_SAME_NAMES_MAX = 20  # runs of one last name that are asked for their id
_READERS_MAX = 16  # kept for the runs that were requested last
_NUM_THREADS_PER_TABLE = 8
_TREND_MAX = 100
_KEYS_MAX = 300  # of a spec
_HOSTS_SHOWN_MAX = 500
_KEYS_SHOWN_MAX = 40  # in which runs differ
_VALUE_CHARACTERS_MAX = 80
_TAGS_MAX = 20
_SHOWN_ANYWAY = ("name", "directory", "project", "group", "logging.wandb_tags")  # in columns of their own
_WATCHED_FILES = (
    SWEEP,
    "events.jsonl",
    "metrics.jsonl",
    "result.json",
    "spec.yaml",
    "job.json",
    "checkpoints",
    "attempts",
)

# Settings of the HTTP server.
_NUM_THREADS = 16
CONNECTIONS_MAX = 500
IDLE_SECONDS = 20.0  # a page polls every two seconds
RESPONSE_SECONDS = 120.0
_REQUEST_BYTES_MAX = 1 << 14
_NICENESS = 10  # a job that trains on this machine comes first

Signature = tuple[tuple[int, int], ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class _CachedReading:
    """Data of one page, and the time of reading by the monotonic clock."""

    body: ResponseBody | None
    when: float


class SharedReader:
    """Reader shared by all clients. `read` returns the data of a run by its id, or of all runs by ""; None for none."""

    def __init__(self, read: Callable[[str], ResponseBody | None], wait_seconds: float = _WAIT_SECONDS):
        self._read = read
        self._wait_seconds = wait_seconds
        self._changed = threading.Condition()
        self._wanted: set[str] = set()
        self._cache: dict[str, _CachedReading] = {}  # bounded by the requests of the last KEEP_SECONDS

    def get_data(self, name: str) -> ResponseBody | None:
        """Return the newest data of a page; None for no such run. Thread-safe. Raises TimeoutError."""

        def is_fresh() -> bool:
            cached = self._cache.get(name)
            return cached is not None and time.monotonic() - cached.when < _FRESH_SECONDS

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
            time.sleep(max(_REST_SECONDS_MIN, _REST_TIMES * (time.monotonic() - began)))

    def read_wanted(self) -> None:
        """Read once what has been requested by now."""
        with self._changed:
            wanted, self._wanted = self._wanted, set()
            # Pages that were not requested for a while are dropped, so that the number of viewers bounds the memory.
            oldest = time.monotonic() - KEEP_SECONDS
            self._cache = {name: cached for name, cached in self._cache.items() if cached.when > oldest}
        # Reading happens outside of the lock, so requests for other pages are served meanwhile.
        for name in sorted(wanted):
            body = self._read(name)
            with self._changed:
                self._cache[name] = _CachedReading(body, time.monotonic())
                self._changed.notify_all()


@dataclass(frozen=True)
class _Trial:
    """Place of a run in a sweep."""

    sweep: Sweep
    run: SweepRun
    bins_max: int  # of each of its curves


@dataclass(frozen=True)
class _RunSummary:
    """Line of the table of all runs."""

    line: JsonObject
    keys: dict[str, str]  # keys of its spec and their values, as short texts
    when: float  # time of reading by the monotonic clock
    signature: Signature | None  # state of the run's files, None in a bucket
    is_living: bool  # the run is running or stalled
    reader: HistoryReader | None  # reader of a living run, which continues where it stopped
    trial: "_Trial | None" = None  # place of the run in a sweep when it was read
    row: SweepRow | None = None  # the run in the table of that sweep
    curves: JsonObject | None = None

    def is_current(self, signature: Signature | None, now: float, trial: _Trial | None) -> bool:
        """Return True if a run whose files and place in a sweep are now these need not be read again."""
        if (trial and (trial.sweep.metric, trial.run, trial.bins_max)) != (
            self.trial and (self.trial.sweep.metric, self.trial.run, self.trial.bins_max)
        ):
            return False
        # In a bucket each look at a file is a request, so there age decides.
        if signature is None:
            return now - self.when < _BUCKET_SECONDS
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
            status = os.stat(directory / name, follow_symlinks=False)
            signature.append((status.st_mtime_ns, status.st_size))
        except OSError:
            signature.append((0, 0))
    return tuple(signature)


class PageData:
    """Data of all pages, read in one thread."""

    def __init__(self, root: Store):
        self._root = confine(root)
        self._found = DiscoveryResult([], [])
        self._found_when = -SEARCH_SECONDS
        self._summaries: dict[str, _RunSummary] = {}
        self._sweeps: dict[str, Sweep | str] = {}  # the sweeps that were found, each with its record or what is wrong
        self._trials: dict[str, _Trial] = {}
        # Record of each sweep, with the state of its files and the time of reading.
        self._records: dict[str, tuple[Signature | None, float, Sweep | str]] = {}
        self._readers: dict[str, RunReader] = {}
        # Hosts of each run, with the state of its files and the time of reading.
        self._hosts: dict[str, tuple[Signature | None, float, list[HostRecord]]] = {}
        self._media: dict[str, tuple[Store, frozenset[str]]] = {}  # files that the page of each run refers to

    def read(self, name: str) -> ResponseBody | None:
        """Return the data of the runs with these ids, joined by commas, or of all; None if there is no such run."""
        if time.monotonic() - self._found_when >= SEARCH_SECONDS:
            found = _try_reading(lambda: find_runs(self._root))
            # A root that cannot be listed for a moment keeps the runs that were found before.
            self._found = DiscoveryResult(self._found.runs, [found]) if isinstance(found, str) else found
            self._found_when = time.monotonic()
            known = {run.id for run in self._found.runs}
            self._summaries = {key: value for key, value in self._summaries.items() if key in known}
            roots = {sweep.id for sweep in self._found.sweeps}
            self._records = {key: value for key, value in self._records.items() if key in roots}
            self._hosts = {key: value for key, value in self._hosts.items() if key in known}
            self._media = {key: value for key, value in self._media.items() if key in known}
        if name in ("", METRICS) or name.startswith(SWEEPS):
            self._read_records()
        if name == METRICS:
            text = format_prometheus(self._read_table()["table"], time.time())
            return ResponseBody.from_text("text/plain; version=0.0.4; charset=utf-8", text)
        if name == HOSTS:
            return ResponseBody.from_text("application/json", encode_json(self._read_hosts()))
        if not name:
            root = make_id("")
            others = [run for run in self._found.runs if run.id not in self._trials]
            if isinstance(self._sweeps.get(root), Sweep) and len(self._sweeps) == 1 and not others:
                return ResponseBody.from_text(
                    "application/json", encode_json(self._read_sweep(root) | {"is_top": True})
                )
            page = self._read_table()
            page["table"] = [line for line in page["table"] if line["id"] not in self._trials]
            page["sweeps"] = [self._build_sweep_line(found) for found in self._found.sweeps]
            return ResponseBody.from_text("application/json", encode_json(page))
        if name.startswith(f"{SWEEPS}/"):
            sweep_id = name.removeprefix(f"{SWEEPS}/")
            if sweep_id not in self._sweeps:
                return None
            return ResponseBody.from_text("application/json", encode_json(self._read_sweep(sweep_id)))
        known_runs = {run.id: run for run in self._found.runs}
        runs = [known_runs[run_id] for run_id in dict.fromkeys(name.split(",")) if run_id in known_runs]
        if len(runs) != len(set(name.split(","))):
            return None
        readers = [self._get_reader(run.store) for run in runs]
        title = _make_title(runs[0]) if len(runs) == 1 else f"{len(runs)} runs"
        results = [_try_reading(reader.read) for reader in readers]
        readable = [(run, each) for run, each in zip(runs, results, strict=True) if not isinstance(each, str)]
        snapshots = [each for _, each in readable]
        problems = [each for each in results if isinstance(each, str)]
        # A comparison needs more points than one run, but not in proportion.
        points_max = POINTS_MAX * min(len(runs), 4)
        shown = "; ".join(problems)
        if snapshots:
            more = {"run_ids": name, "notes": problems}

            def build() -> str:
                ancestors = read_ancestors(snapshots, self.list_parent_places, self._get_reader)
                view = build_view(title, snapshots, points_max, ancestors)
                for (run, snapshot), shown_run in zip(readable, view["runs"], strict=True):
                    shown_run["address"] = run.id
                    names = frozenset(name for items in snapshot.media.values() for _, name in items)
                    self._media[run.id] = confine(run.store), names
                return encode_json(view | more)

            shown = _try_reading(build)
        # A page that cannot be read is JSON too, but not an object with runs.
        content = encode_json({"title": title, "problem": shown}) if not shown.startswith("{") else shown
        return ResponseBody.from_text("application/json", content)

    def read_media(self, run_id: str, name: str) -> bytes | None:
        """Return an image or audio of a run; None if its page does not refer to it or it is gone. Thread-safe."""
        store, names = self._media.get(run_id, (self._root, frozenset()))
        try:
            return read_media(store, name) if name in names else None
        except OSError:
            return None

    def _get_reader(self, store: Store) -> RunReader:
        run = next(each for each in self._found.runs if each.store is store)
        # Put the reader at the end of the dict, whose first readers are dropped.
        reader = self._readers.pop(run.id, None) or RunReader(run.store, _make_title(run))
        self._readers[run.id] = reader
        while len(self._readers) > _READERS_MAX:
            del self._readers[next(iter(self._readers))]
        return reader

    def list_parent_places(self, fork: ForkRecord, url: str) -> list[Store]:
        """Return the runs below the root that have the last name of a fork's parent; no other run is read."""
        name = fork.run.rpartition("/")[2]
        return [run.store for run in self._found.runs if run.store.url.rpartition("/")[2] == name][:_SAME_NAMES_MAX]

    def _read_records(self) -> None:
        """Read the records of all sweeps, and find the place of each run in its sweep."""
        self._sweeps, self._trials = {}, {}
        for found in self._found.sweeps:
            signature, before = _read_signature(found.store.root), self._records.get(found.id)
            now = time.monotonic()
            if before is not None and (
                now - before[1] < _BUCKET_SECONDS if signature is None else before[0] == signature
            ):
                sweep = before[2]
            else:
                sweep = _try_reading(functools.partial(read_sweep_or_problem, confine(found.store))) or "it is gone"
                self._records[found.id] = signature, now, sweep
            self._sweeps[found.id] = sweep
            if isinstance(sweep, Sweep):
                bins_max = count_bins(len(sweep.runs), _SWEEP_POINTS_MAX)
                for run in sweep.runs[:RUNS_MAX]:
                    self._trials[make_id(f"{found.path}/{run.name}".lstrip("/"))] = _Trial(sweep, run, bins_max)

    def _join_sweep(self, sweep_id: str) -> tuple[SweepStatus, dict[str, str]]:
        """Return the runs of a sweep that have been read by now or have not started, and the ids of their pages."""
        (path,) = (found.path for found in self._found.sweeps if found.id == sweep_id)
        sweep = self._sweeps[sweep_id]
        assert isinstance(sweep, Sweep)
        known, addresses = {run.id for run in self._found.runs}, dict[str, str]()
        rows: list[SweepRow] = []
        for run in sweep.runs[:RUNS_MAX]:
            run_id = make_id(f"{path}/{run.name}".lstrip("/"))
            if run_id not in known:
                rows.append(join_run(sweep, run, None))
            elif run_id in self._summaries and (row := self._summaries[run_id].row) is not None:
                addresses[run.name] = run_id
                rows.append(row)
        return compare_runs(sweep, rows), addresses

    def _read_sweep(self, sweep_id: str) -> JsonObject:
        (found,) = (found for found in self._found.sweeps if found.id == sweep_id)
        sweep, title = self._sweeps[sweep_id], _make_title(found)
        if isinstance(sweep, str):
            return {"title": title, "problem": sweep}
        self._refresh(
            [run for run in self._found.runs if run.id in self._trials and self._trials[run.id].sweep is sweep]
        )
        status, addresses = self._join_sweep(sweep_id)
        curves = {name: self._summaries[run_id].curves or {} for name, run_id in addresses.items()}
        view = build_sweep_view(title, status, curves, addresses) | {"sweep_id": sweep_id}
        law = _try_reading(functools.partial(read_law, confine(found.store), sweep))
        view["law"] = None if isinstance(law, str) else law
        num_left = min(len(sweep.runs), RUNS_MAX) - len(status.rows)
        return view | {"notes": [*view["notes"], *([f"{num_left} more runs are being read."] if num_left else [])]}

    def _build_sweep_line(self, found: DiscoveredRun) -> JsonObject:
        """Return the line of a sweep in the table of all runs."""
        sweep = self._sweeps[found.id]
        line = {"id": found.id, "name": _make_title(found), "counts": "", "best": "", "values": ""}
        if not isinstance(sweep, Sweep):
            return line | {"counts": sweep}
        status, _ = self._join_sweep(found.id)
        best = next((row for row in status.rows if row.name == status.best), None)
        metric, chosen = (None, {}) if best is None else (best.metric, best.values)
        if status.best_setting is not None:
            metric, chosen = status.best_setting.mean, status.best_setting.values
        short = shorten_keys(sweep.keys)
        values = (f"{short[key]} {format_value(chosen, key)}" for key in itertools.islice(chosen, _KEYS_SHOWN_MAX))
        return line | {
            "counts": ", ".join(f"{count:,} {state}" for state, count in status.counts.items()),
            "best": format_number(metric, ".4f"),
            "values": truncate(", ".join(values)),
        }

    def _refresh(self, runs: Sequence[DiscoveredRun]) -> None:
        """Read those of the runs again that have changed, in a bounded time."""
        began = time.monotonic()
        signatures = {run.id: _read_signature(run.store.root) for run in runs}
        stale = []
        for run in runs:
            summary = self._summaries.get(run.id)
            if summary is None or not summary.is_current(signatures[run.id], began, self._trials.get(run.id)):
                stale.append(run)
        # The runs that have waited longest come first, so every run is reached in some round.
        stale.sort(key=lambda run: self._summaries[run.id].when if run.id in self._summaries else 0.0)
        with ThreadPoolExecutor(_NUM_THREADS_PER_TABLE if self._root.root is None else 1) as pool:
            for start in range(0, len(stale), _NUM_THREADS_PER_TABLE):
                # A large root is read over several rounds, and the page shows what is known so far.
                if time.monotonic() - began > _ROUND_SECONDS:
                    break
                some = stale[start : start + _NUM_THREADS_PER_TABLE]
                summaries = pool.map(lambda run: self._summarize(run, signatures[run.id]), some)
                self._summaries |= {run.id: summary for run, summary in zip(some, summaries, strict=True)}

    def _read_table(self) -> JsonObject:
        self._refresh(self._found.runs)
        known = [self._summaries[run.id] for run in self._found.runs if run.id in self._summaries]
        num_left = len(self._found.runs) - len(known)
        notes = [*self._found.notes, *([f"{num_left} more runs are being read."] if num_left else [])]
        # Keys in which runs differ can be shown as columns, and runs can be filtered by them.
        specs = [summary.keys for summary in known if summary.keys]
        names = sorted({key for spec in specs for key in spec})
        differing = [key for key in names if len({spec.get(key) for spec in specs}) > 1][:_KEYS_SHOWN_MAX]
        return {
            "title": truncate(f"Runs below {self._root.url}"),
            "table": [
                summary.line | {"keys": {key: summary.keys[key] for key in differing if key in summary.keys}}
                for summary in known
            ],
            "keys": differing,
            "notes": notes,
            "next": f"python -m runner specs/gpt_nano.yaml --set directory={shlex.quote(f'{self._root.url}/first')}",
        }

    def _read_hosts(self) -> JsonObject:
        began, now, notes = time.monotonic(), time.time(), [*self._found.notes]
        num_left = 0
        for run in self._found.runs:
            signature, known = _read_signature(run.store.root), self._hosts.get(run.id)
            is_old = known is None or (
                began - known[1] > _BUCKET_SECONDS if signature is None else known[0] != signature
            )
            # As with the table of runs, a large root is read over several rounds.
            if is_old and time.monotonic() - began > _ROUND_SECONDS:
                num_left += known is None
            elif is_old:
                found = _try_reading(functools.partial(read_hosts, run.store, run.path or _make_title(run)))
                notes += [found] if isinstance(found, str) else []
                self._hosts[run.id] = signature, began, [] if isinstance(found, str) else found
        hosts = merge_hosts((self._hosts[run.id][2] for run in self._found.runs if run.id in self._hosts), now)
        notes += [f"{num_left} more runs are being read."] if num_left else []
        return {
            "title": truncate(f"Hosts of the runs below {self._root.url}"),
            "hosts": [record.to_json(now) | {"words": record.describe_counts()} for record in hosts[:_HOSTS_SHOWN_MAX]],
            "num_hosts": len(hosts),
            "rule": RULE,
            "kinds": [[kind.replace("_", " "), meaning] for kind, meaning in KINDS.items()],
            "notes": notes,
        }

    def _summarize(self, run: DiscoveredRun, signature: Signature | None) -> _RunSummary:
        before = self._summaries.get(run.id)
        reader = (None if before is None else before.reader) or HistoryReader(run.store)

        trial = self._trials.get(run.id)

        def read() -> _RunSummary:
            history = reader.read()
            is_living = history.state in (RunState.RUNNING, RunState.STALLED)
            texts = itertools.islice(flatten_spec(history.spec).items(), _KEYS_MAX)
            keys = {key: text.strip('"')[:_VALUE_CHARACTERS_MAX] for key, text in texts if key not in _SHOWN_ANYWAY}
            line, kept = _build_line(run, history), reader if is_living else None
            joined = curves = None
            if trial is not None:
                joined = join_run(trial.sweep, trial.run, history)
                curves = build_sweep_curves(trial.sweep.metric, history, trial.bins_max)
            return _RunSummary(line, keys, time.monotonic(), signature, is_living, kept, trial, joined, curves)

        found = _try_reading(read)
        if not isinstance(found, str):
            return found
        line = {"id": run.id, "name": _make_title(run), "state": found, "kind": "bad", "trend": []}
        row = None if trial is None else join_run(trial.sweep, trial.run, None, found)
        # A run that cannot be read counts as living, so that it is tried again.
        return _RunSummary(line, {}, time.monotonic(), signature, is_living=True, reader=None, trial=trial, row=row)


def _make_title(run: DiscoveredRun) -> str:
    return truncate(run.path or run.store.url)


def _build_line(run: DiscoveredRun, history: History) -> JsonObject:
    losses = [loss for row in history.trend if (loss := get_float(row, "train/loss")) is not None]
    best, share = history.best_validation, len(losses) / _TREND_MAX
    trend = losses if share <= 1 else [losses[int(index * share)] for index in range(_TREND_MAX)]
    total = "" if history.total_steps is None else f" / {history.total_steps:,}"
    unit, per_second, _ = history.speed.rate
    logging_config = history.spec.get("logging")
    tags = logging_config.get("wandb_tags") if isinstance(logging_config, dict) else None
    # The column counts tokens.
    speed = format_number(per_second, ",.0f") + (f" {unit}" if unit != "tokens" else "")
    return {
        "id": run.id,
        "name": _make_title(run),
        "project": to_single_line(history.spec.get("project", "")),
        "group": to_single_line(history.spec.get("group", "")),
        "tags": list(map(to_single_line, tags[:_TAGS_MAX])) if isinstance(tags, list) else [],
        "state": format_state(history),
        "kind": get_state_class(history),
        "steps": f"{history.step:,}{total}",
        "trend": [round_value(value) for value in trend],
        "loss": format_number(get_float(history.row, "train/loss"), ".4f"),
        "validation": "" if best is None else f"{best[1]:.4f}",
        "speed": speed,
        "mfu": format_number(history.speed.mfu, ".1%"),
        "left": format_duration(history.speed.left_seconds),
        "goodput": f"{history.goodput:.1%}" if history.wall_seconds > 0 else "",
        "values": summarize(history),
    }


# Figures of a run for Prometheus: name, type, key of the figure in a line of the table, meaning.
_PROMETHEUS = (
    ("step", "gauge", "step", "Optimizer steps completed."),
    ("total_steps", "gauge", "total_steps", "Step at which the run is done."),
    ("loss", "gauge", "loss", "Training loss of the newest row."),
    ("validation_loss", "gauge", "validation_loss", "Newest validation loss."),
    ("tokens_per_second", "gauge", "tokens_per_second", "Throughput over the newest rows."),
    ("examples_per_second", "gauge", "examples_per_second", "Throughput of a run whose data are arrays."),
    ("mfu_ratio", "gauge", "mfu", "Model FLOPs utilisation."),
    ("left_seconds", "gauge", "left_seconds", "Estimated time to the last step of a run that is alive."),
    ("goodput_ratio", "gauge", "goodput", "Share of the wall time that was spent on steps of the final trajectory."),
    ("lost_steps", "gauge", "lost_steps", "Steps that were computed again, because no save contained them."),
    ("cost_dollars", "gauge", "dollars", "Cost so far, by the price in the spec."),
    ("restarts_total", "counter", "restarts", "Attempts after the first one."),
)
# Ages for Prometheus: name, key of the time in a line of the table, meaning.
_PROMETHEUS_AGES = (
    ("seconds_since_last_row", "last_row", "Time since the newest row of metrics was written."),
    ("seconds_since_last_commit", "last_commit", "Time since the newest checkpoint was committed."),
)


def format_prometheus(lines: Sequence[JsonObject], now: float) -> str:
    """Return the figures of runs in Prometheus' text format 0.0.4: a series of each known figure and each state."""
    runs: dict[str, JsonObject] = {}
    for line in lines:
        # A name may contain bytes that are not text, and was shortened if it is very long; a series must be unique.
        name = line["name"].encode(errors="backslashreplace").decode()
        name = name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        runs[f"{name} ({line['id']})" if name in runs else name] = line.get("values", {"state": "unreadable"})

    found: list[str] = []

    def add(name: str, kind: str, meaning: str, samples: Iterable[tuple[str, float]]) -> None:
        found.extend((f"# HELP runner_run_{name} {meaning}", f"# TYPE runner_run_{name} {kind}"))
        found.extend(f"runner_run_{name}{{{labels}}} {float(value)!r}" for labels, value in samples)

    for name, kind, key, meaning in _PROMETHEUS:
        known = ((run, values.get(key)) for run, values in runs.items())
        add(name, kind, meaning, ((f'run="{run}"', value) for run, value in known if value is not None))
    for name, key, meaning in _PROMETHEUS_AGES:
        times = ((run, values.get(key)) for run, values in runs.items())
        add(name, "gauge", meaning, ((f'run="{run}"', max(now - when, 0.0)) for run, when in times if when is not None))
    # A gauge: seconds of steps become seconds of lost steps when an attempt resumes from an earlier one.
    wall = (
        (f'run="{run}",category="{category}"', seconds)
        for run, values in runs.items()
        for category, seconds in values.get("seconds", {}).items()
    )
    add("wall_seconds", "gauge", "Wall time by category; the categories add up to all of it.", wall)
    states = [state.value for state in RunState] + ["unreadable"]
    shown = (
        (f'run="{run}",state="{state}"', values["state"] == state) for run, values in runs.items() for state in states
    )
    add("state", "gauge", "1 for the state that the run is in, 0 for the others.", shown)
    return "\n".join(found) + "\n"


def _try_reading(read: Callable[[], Value]) -> Value | str:
    try:
        return read()
    except (RunnerError, OSError, ValueError) as error:
        return truncate(str(error))
    # Files of a run may be damaged in an unforeseen way, which must not hide other runs.
    except Exception as error:  # shown in the place of the run, and logged with its traceback
        logging.getLogger(__name__).exception("a run cannot be read")
        return truncate(f"cannot be read, a bug: {type(error).__name__}: {error}")


class _DashboardChannel(HTTPChannel):
    """Connection of a client, with the time since which a request, or the reading of a response, is outstanding."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.since_seconds = time.monotonic()
        super().__init__(*arguments, **options)

    def received(self, data: bytes) -> bool:
        """Take bytes of a request; only a whole one counts as a sign of life, not each byte."""
        is_taken = bool(super().received(data))
        if self.request is None or self.requests:
            self.since_seconds = time.monotonic()
        return is_taken

    def service(self) -> None:
        super().service()
        self.since_seconds = time.monotonic()


class _DashboardServer(TcpWSGIServer):
    """HTTP server that idle, slow or numerous clients cannot block for others.

    A client must send each request within `IDLE_SECONDS` of the one before, and read each response within
    `RESPONSE_SECONDS`. If there are `CONNECTIONS_MAX` connections, a new one takes the place of another: the one that
    has been idle longest, among those of the address that has most.
    """

    channel_class = _DashboardChannel

    def maintenance(self, now: float) -> None:
        """Close the connections whose time is over; called every second."""
        for channel in self.active_channels.values():
            limit = RESPONSE_SECONDS if channel.total_outbufs_len else IDLE_SECONDS
            if not channel.requests and time.monotonic() - channel.since_seconds > limit:
                channel.will_close = True

    def handle_accept(self) -> None:
        """Accept a connection, and close another one if there are too many."""
        super().handle_accept()
        channels = list(self.active_channels.values())
        if len(channels) <= CONNECTIONS_MAX:
            return
        num_by_address = collections.Counter(channel.addr[0] for channel in channels)
        # A connection whose request is being processed comes last, and the new one has been idle for the shortest time.
        most = min(
            channels,
            key=lambda channel: (bool(channel.requests), -num_by_address[channel.addr[0]], channel.since_seconds),
        )
        most.handle_close()


def make_server(app: DashboardApp, host: str, port: int) -> MultiSocketServer:
    """Return a server that listens on each address of `host`. Raises OSError, or ValueError for an invalid name."""
    # The limits bound memory and threads, whatever clients send. Waitress must not stop accepting at its own limit of
    # connections, at which idle clients would keep all others out.
    adjustments = Adjustments(
        host=host,
        port=port,
        threads=_NUM_THREADS,
        connection_limit=2 * CONNECTIONS_MAX,
        cleanup_interval=1,
        max_request_header_size=_REQUEST_BYTES_MAX,
        max_request_body_size=_REQUEST_BYTES_MAX,
        asyncore_use_poll=True,
        ident=None,
    )
    dispatcher = ThreadedTaskDispatcher()
    dispatcher.set_thread_count(adjustments.threads)
    sockets: dict[int, Any] = {}
    servers = [
        _DashboardServer(app, sockets, dispatcher=dispatcher, adj=adjustments, sockinfo=address)
        for address in adjustments.listen
    ]
    listening = [(server.effective_host, server.effective_port) for server in servers]
    return MultiSocketServer(sockets, adjustments, listening, dispatcher)


def serve(root: Store, host: str, port: int, token: str | None) -> None:
    """Serve all runs below `root` until Ctrl-C or SIGTERM. To be called in the main thread. Raises InvalidError."""
    pages = PageData(root)
    watcher = SharedReader(pages.read)
    access = make_access_policy(host, token)
    try:
        server = make_server(DashboardApp(access, watcher.get_data, pages.read_media), host, port)
    except (OSError, ValueError) as error:
        raise InvalidError(f"--host {host} --port {port}: cannot be served: {error}; choose another") from error
    os.nice(_NICENESS)

    # waitress warns when clients wait for a thread, which is normal for many clients.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    threading.Thread(target=server.run, name="server", daemon=True).start()
    shown = f"[{host}]" if parse_address(host) is not None and ":" in host else host
    query = f"?token={access.token}" if access.token else ""
    say(f"dashboard of {root.url}: http://{shown}:{server.effective_listen[0][1]}/{query}")
    if not is_loopback(host):
        say("other machines can reach it: anyone with the token sees all runs, and the connection is not encrypted")
    try:
        watcher.serve()
    except KeyboardInterrupt:
        say("dashboard: stopped")
