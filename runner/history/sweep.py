"""Record of a sweep: the runs below one root, and the keys in which their specs differ.

`launch.sweep` writes `sweep.json` in the root; `status`, `report` and `dashboard` read it. Each run is an ordinary run
in a directory of its own below the root.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from runner.attempts.layout import read_record
from runner.storage import JsonObject, Key, Store, encode_json

SWEEP = "sweep.json"
SWEEP_KEYS = (
    Key("name", str, "Name in the spec that is swept."),
    Key("spec", str, "Path of that spec, as it was given."),
    Key("digest", str, "Digest of that spec with its overrides; another one is another sweep."),
    Key("metric", str, "Key of `metrics.jsonl` by which runs are compared."),
    Key("is_maximised", bool, "True if a larger value of the metric is better."),
    Key("rule", dict, "How the runs were chosen, and which are stopped early: the options of the command."),
    Key("runs", list, "Runs in their order, each with `name`, its directory below the root, and `values`."),
    Key("runs.values", dict, "Values by dotted key of the spec."),
    Key("runs.stopped_step", int | None, "Step at which the rule has stopped the run; null if it has not."),
    Key("runs.stopped_value", float | None, "Metric at that step.", "of the metric"),
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

    def encode(self) -> bytes:
        """Return the content of `sweep.json`."""
        return encode_json({"format": 1, **asdict(self)})

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
    runs = tuple(
        SweepRun(run["name"], run["values"], run.get("stopped_step"), run.get("stopped_value"))
        for run in record["runs"]
    )
    names = [key.name for key in SWEEP_KEYS if "." not in key.name and key.name in record]
    return replace(Sweep(**{name: record[name] for name in names}), runs=runs)
