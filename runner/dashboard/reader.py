"""Discovery of runs, differences of their specs, and an incremental reader of one run. Writes nothing.

A run is a directory with a `job.json`, and no run lies inside another. The search is bounded in levels, directories and
runs. It does not follow symbolic links, which could form cycles, and reads no file through a link (see
`ConfinedStore`).

`RunReader` reads one run, also while it is alive: its history, the rows of its metrics, its log. Each row of
`metrics.jsonl` is read once. If a resumed attempt has dropped rows, all rows are read again.
"""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from runner.attempts.events import ROLL_BACK_FOLDER, ROLL_BACKS_MAX
from runner.attempts.layout import DamagedRecordError, read_forecast, read_owner
from runner.attempts.logs import LOG_FOLDER
from runner.dashboard.charts import RunCurves
from runner.errors import InvalidError, RunnerError, SpecError
from runner.history.ledger import get_step
from runner.history.reader import HistoryReader
from runner.history.records import ForkRecord, History
from runner.history.sweep import SWEEP
from runner.metrics.file import MetricsTail
from runner.metrics.media import MEDIA_FOLDER, thin_steps
from runner.metrics.rows import Row
from runner.spec import parse_document
from runner.storage import ConfinedStore, JsonObject, Store, as_local, make_store, parse_number, read_json

ABSENT = "(absent)"
UNREADABLE = "(unreadable)"
_LEVELS_MAX = 6
DIRECTORIES_MAX = 5000
RUNS_MAX = 1000
ANCESTORS_MAX = 4  # that a page draws beside its runs

_RUN_FILE = "job.json"
_IDENTIFYING_KEYS = ("name", "directory")  # differ between any two runs, and do not change what they do
_SPEC = "spec.yaml"
_LOG_BYTES = 1 << 15
_MEDIA_KEYS_MAX = 16
_MEDIA_STEPS_MAX = 40  # of a key
_SPEC_CHARACTERS_MAX = 1 << 16
# Control characters of a log, shown as their symbols; tabs and line breaks stay.
_CONTROLS = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}

Value = TypeVar("Value")


class DiscoveredRun(NamedTuple):
    """Run or sweep below the root. Its `id` is its name in addresses, and does not reveal the path."""

    id: str
    path: str
    store: Store


@dataclass(frozen=True)
class DiscoveryResult:
    """Runs and sweeps in order of path, and notes about the search for the user."""

    runs: list[DiscoveredRun]
    notes: list[str]
    sweeps: list[DiscoveredRun] = field(default_factory=list)  # roots; their runs are among `runs`


def find_runs(root: Store) -> DiscoveryResult:
    """Search below `root`, which may be a run or a sweep itself. Raises OSError if it cannot be read."""
    runs: list[DiscoveredRun] = []
    sweeps: list[DiscoveredRun] = []
    notes: list[str] = []
    level = [""]
    num_directories = 0
    for depth in range(_LEVELS_MAX + 1):
        next_level: list[str] = []
        for path in sorted(level):
            num_directories += 1
            # A root such as `/` or a whole bucket would otherwise be listed for hours.
            if num_directories > DIRECTORIES_MAX or len(runs) >= RUNS_MAX:
                notes.append(
                    f"The search ended after {num_directories - 1} directories and {len(runs)} runs; "
                    "choose a directory with fewer."
                )
                break
            names = _list_children(root, path)
            if _RUN_FILE in names or SWEEP in names:
                if not path:
                    store = root
                else:
                    store = make_store(f"{root.url}/{path}") if root.root is None else ConfinedStore(root.root, path)
                found = DiscoveredRun(make_id(path), path, store)
                (runs if _RUN_FILE in names else sweeps).append(found)
            if _RUN_FILE not in names and depth < _LEVELS_MAX:
                below = (name for name, may_be_directory in names.items() if may_be_directory)
                next_level += [f"{path}/{name}".lstrip("/") for name in below if not name.startswith(".")]
        if notes:
            break
        level = next_level
    runs, sweeps = (sorted(each, key=lambda run: run.path) for each in (runs, sweeps))
    return DiscoveryResult(runs, notes, sweeps)


def make_id(path: str) -> str:
    """Return the name in addresses of a run or sweep: paths may hold any bytes, so it is a digest of the path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _list_children(root: Store, path: str) -> dict[str, bool]:
    """Return the names directly below a path, each with True if it may be a directory; none for a deleted path."""
    try:
        if root.root is None:
            # A bucket does not tell a prefix from an object; names of files have a suffix.
            return {name: "." not in name for name in root.list_names(path)}
        if not path and not root.root.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(root.root))
        return ConfinedStore(root.root).list_kinds(path)
    except OSError:
        if not path:
            raise
        return {}


def confine(store: Store) -> Store:
    """Return a store that reads nothing outside of its directory, whatever links are put there."""
    return store if store.root is None or isinstance(store, ConfinedStore) else ConfinedStore(store.root)


def read_ancestors(
    snapshots: Sequence["RunSnapshot"],
    list_places: Callable[[ForkRecord, str], Iterable[Store]],
    make_reader: Callable[[Store], "RunReader"],
) -> dict[str, "RunSnapshot"]:
    """Return the ancestors of forks that are not among these runs, by id, as far as they are found.

    `list_places` returns directories in which the parent of a fork at a URL may be. Any run in them with another id is
    not opened: a fork's record must not show other runs.
    """
    known = {run.history.id for run in snapshots}
    found: dict[str, RunSnapshot] = {}
    pending = [(run.history.fork, run.history.url) for run in snapshots]
    while pending and len(found) < ANCESTORS_MAX:
        fork, url = pending.pop(0)
        if fork is None or fork.id in known or fork.id in found:
            continue
        for store in list_places(fork, url):
            try:
                owner = read_owner(confine(store))
                if owner is not None and owner.id == fork.id:
                    found[fork.id] = snapshot = make_reader(store).read()
                    pending.append((snapshot.history.fork, snapshot.history.url))
                    break
            except (OSError, InvalidError):
                continue
    return found


class SpecDifference(NamedTuple):
    """Dotted key, and the value of each run under it as JSON."""

    key: str
    values: list[str]


def find_differences(specs: Sequence[str | None]) -> list[SpecDifference]:
    """Return the keys, sorted, whose values are not equal in all specs, as YAML; an unreadable one has no values."""
    flat: list[dict[str, str] | None] = []
    for text in specs:
        try:
            flat.append(None if text is None else flatten_spec(parse_document(text, "spec.yaml").data))
        # The spec of a killed or foreign run may be damaged.
        except (SpecError, ValueError, RecursionError):
            flat.append(None)
    keys = sorted({key for values in flat if values is not None for key in values} - set(_IDENTIFYING_KEYS))
    found = (
        SpecDifference(key, [UNREADABLE if values is None else values.get(key, ABSENT) for values in flat])
        for key in keys
    )
    return [each for each in found if len(set(each.values)) > 1]


def flatten_spec(value: Any, path: str = "") -> dict[str, str]:
    """Return the leaves of a tree of mappings as JSON by dotted key."""
    if isinstance(value, Mapping) and (value or not path):
        prefix = f"{path}." if path else ""
        return {
            leaf: text for key, inner in value.items() for leaf, text in flatten_spec(inner, prefix + str(key)).items()
        }
    try:
        return {path: json.dumps(value, default=str)}
    except ValueError:  # a whole number of thousands of digits
        return {path: UNREADABLE}


@dataclass(frozen=True)
class LogExcerpt:
    """End of a file below `logs/`."""

    name: str
    text: str


@dataclass(frozen=True)
class RunSnapshot:
    """State of a run at one reading."""

    name: str
    history: History  # events, attempts and checkpoints
    curves: RunCurves  # series of the run's metrics
    newest: list[Row]  # rows that `curves` does not hold yet
    discarded: dict[int, list[Row]]  # rows that each roll-back has discarded, by its number
    spec: str | None  # text of `spec.yaml`, truncated if it is very long; None if it cannot be read
    media: dict[str, list[tuple[int, str]]]  # steps, newest first, and files of images and audio, by key
    log: LogExcerpt | None  # end of the log of the newest attempt's process 0, None if there is none
    forecast: JsonObject | None  # that was written before the run began, see `FORECAST_KEYS`; None if there is none
    notes: list[str]  # parts that could not be read, one line each


class RunReader:
    """Reader of one run. Between two readings it holds curves and a summary of events, whose size is bounded."""

    def __init__(self, store: Store, name: str):
        store = confine(store)
        self._store, self._name = store, name
        self._history, self._metrics, self._curves = HistoryReader(store), MetricsTail(store), RunCurves()

    def read(self) -> RunSnapshot:
        """Return the current state of the run. Raises OSError, or InvalidError if there is no run in the directory."""
        history = self._history.read()
        notes: list[str] = []

        def try_reading(read: Callable[[], Value], otherwise: Value) -> Value:
            try:
                return read()
            # A file that does not exist yet needs no note.
            except FileNotFoundError:
                return otherwise
            except (OSError, ValueError, DamagedRecordError, RunnerError) as error:
                notes.append(str(error))
                return otherwise

        def read_rows() -> list[Row]:
            """Add new final rows to the curves, and return the rows after them."""
            update = self._metrics.read()
            # Rows of lost steps cannot be removed from a series, so it is built again.
            if update.is_restart:
                self._curves = RunCurves()
            for row in update.rows:
                self._curves.add(row)
            return update.newest

        def read_spec() -> str:
            return self._store.read(_SPEC).decode(errors="replace")[:_SPEC_CHARACTERS_MAX]

        newest: list[Row] = try_reading(read_rows, [])
        if num_skipped := self._metrics.num_skipped:
            notes.append(f"{num_skipped:,} lines of metrics.jsonl are no rows, and are skipped.")
        discarded: dict[int, list[Row]] = try_reading(self._read_discarded, {})
        spec = try_reading(read_spec, None)
        media: dict[str, list[tuple[int, str]]] = try_reading(lambda: self._list_media(newest), {})
        log = try_reading(self._read_log, None)
        forecast = try_reading(lambda: read_forecast(self._store), None)
        return RunSnapshot(self._name, history, self._curves, newest, discarded, spec, media, log, forecast, notes)

    def _list_media(self, newest: Sequence[Row]) -> dict[str, list[tuple[int, str]]]:
        """Return the images and audio that rows refer to and whose files were kept."""
        by_step = self._curves.list_media(newest)
        folders = set(self._store.list_names(MEDIA_FOLDER)) if by_step else set()
        found: dict[str, dict[int, str]] = {}
        for step, names in by_step.items():
            for key, name in names.items():
                if name.split("/")[1] in folders and (key in found or len(found) < _MEDIA_KEYS_MAX):
                    found.setdefault(key, {})[step] = name
        return {
            key: [(step, names[step]) for step in thin_steps(names, _MEDIA_STEPS_MAX)[::-1]]
            for key, names in found.items()
        }

    def _read_discarded(self) -> dict[int, list[Row]]:
        found = {}
        names = map(parse_number, self._store.list_names(ROLL_BACK_FOLDER))
        for number in sorted(number for number in names if number is not None)[-ROLL_BACKS_MAX:]:
            rows = read_json(self._store, f"{ROLL_BACK_FOLDER}/{number}").get("rows")
            if isinstance(rows, list):
                found[number] = [row for row in rows if isinstance(row, dict) and get_step(row) is not None]
        return found

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
            with as_local(self._store).open(newest_name) as opened:
                opened.seek(max(os.fstat(opened.fileno()).st_size - _LOG_BYTES, 0))
                content = opened.read(_LOG_BYTES)
        return LogExcerpt(newest_name, content.decode(errors="replace").translate(_CONTROLS))
