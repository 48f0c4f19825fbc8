"""Record of a sweep: the runs below one root, and the keys in which their specs differ; and how far its runs are.

`launch.sweep` writes `sweep.json` in the root; `status`, `report` and `dashboard` read it. Each run is an ordinary run
in a directory of its own below the root.

Runs are compared by the metric in their last row. A run that is not finished comes after all finished ones, and after
those that went further. Where runs differ in their seed, settings are compared by the mean over their seeds instead.
"""

import contextlib
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runner.attempts.layout import FORECAST_KEYS, OWNER, DamagedRecordError, read_record
from runner.errors import InvalidError, NewerFormatError
from runner.history.ledger import get_float, to_single_line
from runner.history.reader import HistoryReader
from runner.history.records import History, RunState
from runner.metrics.file import MetricsTail, read_rows
from runner.spec import format_setting
from runner.storage import (
    ConfinedStore,
    DiskError,
    JsonObject,
    Key,
    Store,
    WrongKindError,
    encode_json,
    make_store,
    validate_record,
)

RUNS_MAX = 1000  # of a sweep that are read
SEED = "seed"  # key in whose values equal settings may differ
DIVERGED, STOPPED, NOT_STARTED, UNREADABLE = "diverged", "stopped", "not started", "unreadable"
_ENDED = (RunState.DONE.value, RunState.FAILED.value, RunState.INVALID.value, DIVERGED, STOPPED)
_NUM_READERS = 8
_VALUE_CHARACTERS_MAX = 80
RATIO_SPREAD = 1.5  # factor between ratios of tokens to parameters from which they count as different, in a ladder
SWEEP = "sweep.json"
_NAME = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
SWEEP_KEYS = (
    Key("name", str, "Name in the spec that is swept."),
    Key("spec", str, "Path of that spec, as it was given."),
    Key("digest", str, "Digest of that spec with its overrides; another one is another sweep."),
    Key("metric", str, "Key of `metrics.jsonl` by which runs are compared."),
    Key("is_maximised", bool, "True if a larger value of the metric is better."),
    Key("rule", dict, "How the runs were chosen, and which are stopped early: the options of the command."),
    Key("runs", dict, "Runs in their order, by name: the directory below the root."),
    Key("runs.*.values", dict, "Values by dotted key of the spec."),
    Key("runs.*.stopped_step", int | None, "Step at which the rule has stopped the run; null if it has not."),
    Key("runs.*.stopped_value", float | None, "Metric at that step.", "of the metric"),
    Key("submitted", dict, "Id of the engine's job by name of a run; engines that queue only."),
    Key("ladder", dict, "Sizes of a ladder, and its forecast; ladders only."),
)


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # its directory below the root
    values: Mapping[str, Any]  # values by dotted key of the spec
    stopped_step: int | None = None  # step at which the rule of the sweep has stopped it; None if it has not
    stopped_value: float | None = None  # metric at that step


@dataclass(frozen=True)
class Sweep:
    """Content of `sweep.json`; see `SWEEP_KEYS`."""

    name: str
    spec: str
    digest: str
    metric: str
    is_maximised: bool
    rule: JsonObject
    runs: tuple[SweepRun, ...]
    submitted: Mapping[str, str] = field(default_factory=dict)
    ladder: JsonObject = field(default_factory=dict)

    @property
    def keys(self) -> tuple[str, ...]:
        """Dotted keys in which the runs differ, in the order in which they were given."""
        return tuple(dict.fromkeys(key for run in self.runs for key in run.values))

    @property
    def forecasts(self) -> dict[str, JsonObject]:
        """Forecasts of a ladder (`FORECAST_KEYS`) by the name of the run; those that are damaged are left out."""
        found = self.ladder.get("forecasts")
        forecasts = {}
        for name, forecast in found.items() if isinstance(found, dict) else ():
            if not isinstance(forecast, dict) or not re.fullmatch(_NAME, name):  # never a path out of the root
                continue
            with contextlib.suppress(ValueError):
                validate_record(forecast, FORECAST_KEYS, [key.name for key in FORECAST_KEYS])
                forecasts[name] = forecast
        return forecasts

    def encode(self) -> bytes:
        """Return the content of `sweep.json`."""
        record = {"format": 1, **asdict(self)}
        return encode_json(record | {"runs": {run.pop("name"): run for run in record["runs"]}})

    def find_best(self, values: Iterable[tuple[str, float | None]]) -> str | None:
        """Return the name of the run with the best metric, the first of equal ones; `values` are metrics by name."""
        known = [(name, value) for name, value in values if value is not None and math.isfinite(value)]
        sign = -1 if self.is_maximised else 1
        return min(known, key=lambda each: sign * each[1])[0] if known else None


def read_sweep(store: Store) -> Sweep | None:
    """Return the sweep whose root is `store`, or None if it is no root of a sweep.

    Raises:
        DamagedRecordError: the record is damaged.
        NewerFormatError: a newer runner wrote it.
        OSError: it cannot be read.
    """
    record = read_record(store, SWEEP, SWEEP_KEYS, [key.name for key in SWEEP_KEYS[:7]])
    if record is None:
        return None
    for name in record["runs"]:  # never a path out of the root
        if not re.fullmatch(_NAME, name):
            raise DamagedRecordError(f"{store.url}/{SWEEP} is damaged ({name!r:.100} is no name of a run)")
    names = {each.name for each in fields(Sweep)} & record.keys()
    try:
        runs = tuple(SweepRun(name=name, **run) for name, run in record["runs"].items())
        return Sweep(**{name: record[name] for name in names} | {"runs": runs})
    except TypeError as error:
        raise DamagedRecordError(f"{store.url}/{SWEEP} is damaged ({error})") from error


def read_sweep_or_problem(store: Store) -> Sweep | str | None:
    """Return the sweep whose root is `store`, one line on what is wrong with its record, or None if there is none.

    Raises `StorageError` if a bucket does not answer.
    """
    try:
        return read_sweep(store)
    except (DamagedRecordError, NewerFormatError, WrongKindError, DiskError) as error:
        return to_single_line(str(error))


@dataclass(frozen=True)
class SweepRow:
    """One run of a sweep with the end of its history. A value that is not known is None."""

    name: str
    values: Mapping[str, Any]  # values by dotted key of the spec
    state: str  # a `RunState`, or `diverged`, `stopped`, `not started` or `unreadable`
    reason: str | None = None  # reason of a failure
    step: int = 0
    total_steps: int | None = None
    metric: float | None = None  # metric of the sweep in the last row that has it; None if it is not finite
    metric_step: int | None = None  # step of that row
    stopped_step: int | None = None  # step at which the rule of the sweep has stopped it
    seconds: float | None = None  # wall time
    left_seconds: float | None = None  # estimated time to its last step, if it is alive

    @property
    def has_ended(self) -> bool:
        """True if the sweep does not continue the run."""
        return self.state in _ENDED

    @property
    def is_ranked(self) -> bool:
        """True if the run is compared with others."""
        return self.metric is not None and self.state != DIVERGED


@dataclass(frozen=True)
class SweepSetting:
    """Runs of a sweep whose values are equal but for the seed."""

    values: Mapping[str, Any]  # without the seed
    runs: tuple[str, ...]
    count: int  # seeds that are finished and have the metric
    mean: float | None = None  # of the metric over these
    deviation: float | None = None  # sample standard deviation over these; None for a single one


@dataclass(frozen=True)
class SweepStatus:
    """Runs of a sweep and their comparison. `status --json` prints it."""

    sweep: Sweep
    rows: tuple[SweepRow, ...]  # those with a metric first, from the best to the worst; the others as in the record
    best: str | None  # name of the best run; None if none is finished and some go on, or if settings are compared
    settings: tuple[SweepSetting, ...]  # from the best to the worst; empty if no setting has several seeds
    best_setting: SweepSetting | None  # None if no setting has several finished seeds
    counts: Mapping[str, int]  # number of runs by state
    left_seconds: float | None  # estimated time until all runs have ended, with as many at a time as are running


def compare_runs(sweep: Sweep, rows: Sequence[SweepRow]) -> SweepStatus:
    """Return the rows in the order of their rank, the best one, the settings over their seeds, and the time left."""
    sign = -1 if sweep.is_maximised else 1

    def rank(row: SweepRow) -> tuple[int, int, float]:
        if row.metric is None or not row.is_ranked:
            return 2, 0, 0.0
        is_done = row.state == RunState.DONE.value
        return int(not is_done), 0 if is_done else -(row.metric_step or 0), sign * row.metric

    ranked = sorted(rows, key=rank)
    groups: dict[str, list[SweepRow]] = {}
    for row in rows if SEED in sweep.keys else ():
        groups.setdefault(repr({key: value for key, value in row.values.items() if key != SEED}), []).append(row)
    settings = []
    for group in groups.values() if any(len(group) > 1 for group in groups.values()) else ():
        found = [row.metric for row in group if row.metric is not None and row.state == RunState.DONE.value]
        settings.append(
            SweepSetting(
                {key: value for key, value in group[0].values.items() if key != SEED},
                tuple(row.name for row in group),
                len(found),
                statistics.fmean(found) if found else None,
                statistics.stdev(found) if len(found) > 1 else None,
            )
        )
    # The mean of fewer seeds is less certain, so it does not come before that of more.
    settings.sort(key=lambda each: (-each.count, 0.0 if each.mean is None else sign * each.mean))
    is_decided = bool(ranked) and rank(ranked[0])[0] < (2 if all(row.has_ended for row in rows) else 1)
    counts = Counter(row.state for row in rows)
    return SweepStatus(
        sweep,
        tuple(ranked),
        ranked[0].name if is_decided and not settings else None,
        tuple(settings),
        settings[0] if settings and settings[0].count > 1 else None,
        dict(counts.most_common()),
        _estimate_left(rows),
    )


def _estimate_left(rows: Sequence[SweepRow]) -> float | None:
    running = [row for row in rows if row.state == RunState.RUNNING.value]
    left = [row.left_seconds for row in running if row.left_seconds is not None]
    whole = [row.seconds for row in rows if row.state == RunState.DONE.value and row.seconds is not None]
    whole += [row.seconds + row.left_seconds for row in running if row.seconds and row.left_seconds is not None]
    if not left or len(left) < len(running):
        return None
    num_waiting = sum(not row.has_ended and row.state != UNREADABLE for row in rows) - len(running)
    return max(*left, (sum(left) + num_waiting * statistics.fmean(whole)) / len(running), 0.0)


def join_run(sweep: Sweep, run: SweepRun, history: History | None, problem: str | None = None) -> SweepRow:
    """Return the row of a run. Without a history the run has not started, or cannot be read because of `problem`."""
    if history is None:
        return SweepRow(run.name, run.values, NOT_STARTED if problem is None else UNREADABLE, problem)
    state = history.state.value
    is_short = history.total_steps is None or history.step < history.total_steps
    if history.state is RunState.FAILED and any(
        event.get("diverged") is True and event.get("attempt") == history.attempts[-1].number
        for event in history.events
    ):
        state = DIVERGED
    elif run.stopped_step is not None and is_short and history.state is not RunState.RUNNING:
        state = STOPPED
    points = [(run.stopped_step, get_float({"": run.stopped_value}, "")), *list_points(sweep.metric, history)]
    metric_step, metric = points[-1]
    return SweepRow(
        name=run.name,
        values=run.values,
        state=state,
        reason=history.reason,
        step=history.step,
        total_steps=history.total_steps,
        metric=metric,
        metric_step=metric_step,
        stopped_step=run.stopped_step,
        seconds=history.wall_seconds,
        left_seconds=history.speed.left_seconds,
    )


def list_points(metric: str, history: History) -> list[tuple[int, float | None]]:
    """Return step and value of a metric in a sample of the rows, in order; the value is None if it is not finite."""
    found = {row["step"]: get_float(row, metric) for row in history.trend if metric in row}
    if metric == "val/loss":
        found |= dict(history.validation)
    # Rows with an evaluation may be too rare for the sample.
    elif not found and metric in history.figures:
        found[history.step] = history.figures[metric]
    return sorted(found.items())


class SweepReader:
    """Reader of the runs of a sweep. Keep it to read them repeatedly: it reads each event once."""

    def __init__(self, root: Store):
        self._root, self._readers = root, dict[str, HistoryReader]()

    def read(self, sweep: Sweep, look: Callable[[str, History], None] = lambda name, history: None) -> SweepStatus:
        """Return the runs as they are now, `RUNS_MAX` at most; `look` is called with name and history of each.

        Raises `StorageError` if a bucket does not answer.
        """
        with ThreadPoolExecutor(_NUM_READERS if self._root.root is None else 1) as pool:
            rows = pool.map(lambda run: self._read_run(sweep, run, look), sweep.runs[:RUNS_MAX])
            return compare_runs(sweep, list(rows))

    def _read_run(self, sweep: Sweep, run: SweepRun, look: Callable[[str, History], None]) -> SweepRow:
        root = self._root
        # Links are not followed out of the root, since others may write to it.
        store = make_store(f"{root.url}/{run.name}") if root.root is None else ConfinedStore(root.root, run.name)
        try:
            if run.name not in self._readers and not store.exists(OWNER):
                return join_run(sweep, run, None)
            reader = self._readers.setdefault(run.name, HistoryReader(store))
            history = reader.read()
            look(run.name, history)
            return join_run(sweep, run, history)
        except (InvalidError, DiskError) as error:  # One damaged run must not hide the others.
            return join_run(sweep, run, None, to_single_line(str(error)))


def shorten_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return a short name of each dotted key: as many of its last parts as tell it from the others."""
    parts = {key: key.split(".") for key in keys}
    short = {}
    for key, own in parts.items():
        lengths = range(1, len(own) + 1)
        is_alone = (
            length for length in lengths if sum(each[-length:] == own[-length:] for each in parts.values()) == 1
        )
        short[key] = ".".join(own[-next(is_alone, len(own)) :])
    return short


def format_value(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a key as one short line; empty if the run does not set it."""
    return to_single_line(format_setting(values[key]))[:_VALUE_CHARACTERS_MAX] if key in values else ""


def read_last_metric(store: Store, metric: str) -> float | None:
    """Return the metric of the newest row of a run that has it; None if none has. Raises `OSError`."""
    values = (get_float(row, metric) for row in reversed(read_rows(store)))
    return next((value for value in values if value is not None), None)


@dataclass
class RungReader:
    """Metric of one run at the rungs, read from its rows as they come."""

    store: Store
    metric: str
    steps: Sequence[int]
    values: dict[int, float] = field(default_factory=dict)
    _last: float | None = field(default=None, init=False)
    _tail: MetricsTail | None = field(default=None, init=False)

    def read(self) -> None:
        """Read the rows that are new. Raises `OSError`."""
        self._tail = self._tail or MetricsTail(self.store)
        is_restart, rows, newest = self._tail.read()
        self._last = None if is_restart else self._last
        last = self._last
        for is_final, part in ((True, rows), (False, newest)):
            for row in part:
                step, value = row["step"], get_float(row, self.metric)
                for rung in self.steps:
                    # A row at the rung without the metric is completed by the next attempt, after a stop between them.
                    if rung not in self.values and (step > rung or (step == rung and value is not None)):
                        known = value if step == rung else last
                        self.values[rung] = math.nan if known is None else known
                last = value if value is not None else last
                self._last = last if is_final else self._last
