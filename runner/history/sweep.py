"""Record of a sweep: the runs below one root, and the keys in which their specs differ.

`launch.sweep` writes `sweep.json` in the root; `status`, `report` and `dashboard` read it. Each run is an ordinary run
in a directory of its own below the root.
"""

import contextlib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from runner.attempts.layout import FORECAST_KEYS, DamagedRecordError, read_record
from runner.storage import JsonObject, Key, Store, encode_json, validate_record

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
