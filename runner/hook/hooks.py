"""Hooks: their protocol (five calls, a verdict, and counters in the train state), and the built-in ones.

The runner makes each hook of the spec once per process. The training thread of every host calls it between two steps,
in the order of the spec:

1. `on_start` in each attempt, before its first step.
2. `on_row` when the metrics of a step are complete (with its evaluation, if it has one), then `on_evaluation` if the
   step was evaluated. Only these two return a verdict and new counters.
3. `on_checkpoint` right before the state is saved as a step's checkpoint in the run's directory.
4. `on_end` when the last step is complete and saved.

Counters are arrays of fixed shape and type in the train state, so they are saved, restored and fingerprinted with it. A
saved step includes the counters after its own calls, so each step is counted exactly once, however often the job is
killed. Steps that were lost are computed again, and their calls are made again. State that a hook keeps elsewhere is
not restored: an attribute is lost, and an append to a file is repeated. `verify-resume` finds such hooks.
"""

import datetime
import enum
import math
import numbers
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import flax.linen as nn
import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from runner.config import TrainerConfig
from runner.console import warn
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.metrics.rows import Row
from runner.spec import ExecutionSpec, JobConfig, suggest_choices
from runner.storage import Store
from runner.storage.store import INT_MAX

Mode = Literal["min", "max"]
LOGGED_MAX = 256  # metrics of one call of a hook
_LOG_KEY = re.compile(r"[\w.-]+(/[\w.-]+)*", re.ASCII)


class HookConfig(JobConfig):
    """Base of a hook's `config`; no keys by default.

    `free_keys` of a hook with counters are the keys that may change on resume, because no bit of the counters depends
    on them.
    """


class SeenJob(Protocol):
    """Read-only view of the job for hooks: its spec, its config, and the store of its directory."""

    spec: ExecutionSpec
    config: TrainerConfig[Any]
    store: Store

    def model(self) -> nn.Module:
        """Return the module that is trained."""


class Act(enum.Enum):
    """Request of a verdict, carried out after all hooks have been called."""

    GO_ON = "go on"
    SAVE = "save"  # save this step, even if no save is due
    EVALUATE = "evaluate"  # evaluate this step, if it was not evaluated; then `on_evaluation` is called
    STOP = "stop"  # end the run as done: this step becomes the last one, and is evaluated and saved


@dataclass(frozen=True)
class Verdict:
    """Return value of `on_row` and `on_evaluation`; None means `Verdict()`. Process 0's verdict applies on every host.

    Attributes:
        act: request to the run.
        counters: new counters, in the structure of `init`; None: unchanged.
        reason: reason of a stop, for people and `result.json`.
    """

    act: Act = Act.GO_ON
    counters: Any = None
    reason: str = ""


@dataclass(frozen=True)
class Moment:
    """Argument of every call of a hook.

    Attributes:
        step: completed steps.
        row: metrics of this step as in `metrics.jsonl`, the same on every host; in calls other than `on_row` and
            `on_evaluation`, the newest row (empty before the first). In `on_row` of a hook with counters it lacks an
            evaluation that is made only because the run ends.
        weights: `params`, and `variables` if the model has any: global arrays with the shardings of the mesh, so
            computations with them must run on every host. Do not keep them: the next step overwrites their memory.
        counters: the hook's own counters as numpy arrays, in the structure of `init`.
        hosts: processes of the job. Put side effects (a file, a message) under `if hosts.is_main`, and never a
            collective.
        run_began: time when the run's directory was first claimed, in Unix seconds.
        logged: metrics that `log` has added; None in calls that cannot add any.
    """

    step: int
    row: Row
    weights: Any
    counters: Any
    hosts: Hosts
    run_began: float
    logged: dict[str, float | None] | None = None

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Add metrics to the row of this step, in `on_row` and `on_evaluation`; those of process 0 are written.

        A metric becomes `hook/<name of the hook>/<key>` in `on_row`, and `val/<name of the hook>/<key>` in
        `on_evaluation`. After a kill the call is repeated with the row, so each row has the metrics once. Other hooks
        do not see them, since an observer must not influence the run.

        Args:
            metrics: numbers by key, of Python, numpy or JAX; None, or a number that is not finite, is written as null.

        Raises:
            TypeError: a value is no number, or the call is not one of these two.
            ValueError: a key has other characters than letters, digits and `_ . - /`, or there are too many.
        """
        if self.logged is None:
            raise TypeError("log adds to a row, so it may be called in on_row and on_evaluation alone")
        for key, value in metrics.items():
            if not isinstance(key, str) or _LOG_KEY.fullmatch(key) is None:
                raise ValueError(f"log: got the key {key!r:.100}, needs letters, digits and _ . - between slashes")
            self.logged[key] = None if value is None else _convert_number(key, value)
        if len(self.logged) > LOGGED_MAX:
            raise ValueError(f"log: {len(self.logged)} metrics in one call, needs at most {LOGGED_MAX}")


def _convert_number(key: str, value: Any) -> float | None:
    """Return a number of Python, numpy or JAX as JSON has it; None for one that is not finite."""
    is_bool = isinstance(value, bool) or getattr(value, "dtype", None) == np.bool_
    is_number = hasattr(value, "__float__") and not (is_bool or np.ndim(value) or np.iscomplexobj(value))
    if not is_number:
        raise TypeError(f"log: {key} is {value!r:.100}, needs a number")
    if isinstance(value, numbers.Integral) and abs(int(value)) <= INT_MAX:
        return int(value)
    return float(value) if math.isfinite(float(value)) else None


class Hook:
    """Base of every hook. Override the methods that are needed; methods that are not overridden are never called.

    The time of a call is excluded from the speed and the deadline of steps. An exception on any host ends the run with
    exit code 1 and a message with the name of the hook; the last checkpoint remains.

    Attributes:
        former_paths: paths (`module:Class`) that this class had earlier. A run with counters of a hook of such a path
            continues with this class. Not inherited.
    """

    Config: ClassVar[type[HookConfig]] = HookConfig
    former_paths: ClassVar[Sequence[str]] = ()

    def __init__(self, config: Any, job: SeenJob):
        """Store `config`, an instance of `Config`, and `job`. Overrides may raise `InvalidError` if they do not fit."""
        self.config, self.job = config, job

    def init(self) -> Any:
        """Return the counters before the first step: a small tree of numpy arrays, none by default. Pure."""
        return {}

    def on_start(self, moment: Moment) -> None:
        """React to the start of an attempt at `moment.step`. Not part of the trajectory: each restart adds a call."""

    def on_row(self, moment: Moment) -> Verdict | None:
        """React to a new row of metrics. The verdict may depend on row, weights and counters only."""

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """React to an evaluation, whose metrics are in the row. The verdict may depend on the same as in `on_row`."""

    def on_checkpoint(self, moment: Moment) -> None:
        """React to a save that is about to start. Not part of the trajectory: saves depend on clocks and failures."""

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None] | None:
        """React to the end of the run, once the last step is saved.

        The returned mapping is added to `result.json`, and must not repeat a key of it.
        """


class Observer(Hook):
    """Base of read-only hooks: no counters and no verdicts, so that a run may get or lose one when it resumes."""


# Built-in hooks.


class MetricReader:
    """Reader of one metric. Warns once of a row without the metric, because each evaluator has its own schedule."""

    def __init__(self, name: str):
        self.name = name
        self._has_warned = False

    def read(self, row: Row) -> float | None:
        """Return the value as float32, as the train state stores it; None if null or missing. Called on every host."""
        if self.name in row:
            value = row[self.name]
            return float(np.float32(value)) if isinstance(value, int | float) else None
        if not self._has_warned:
            self._has_warned = True
            near = suggest_choices(self.name, list(row))
            warn(f"hooks wait for {self.name}, which the row of step {row.get('step')} lacks{near}")
        return None


def _is_better(value: float, best: float, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return True if a value is better by more than `min_delta`. NaN never is."""
    return value < best - min_delta if mode == "min" else value > best + min_delta


def _get_worst_value(mode: Mode) -> np.float32:
    """Return a value that any other value is better than."""
    return np.float32(math.inf if mode == "min" else -math.inf)


class EarlyStoppingConfig(HookConfig):
    """Config of `EarlyStopping`."""

    metric: str = Field(
        default="val/loss", min_length=1, description="Metric of an evaluation; rows without it are ignored."
    )
    mode: Mode = Field(default="min", description="Direction of improvement: smaller (min) or larger (max) is better.")
    patience: PositiveInt = Field(
        default=3, description="Number of consecutive evaluations without improvement that end the run."
    )
    min_delta: NonNegativeFloat = Field(
        default=0.0, description="Smallest difference from the best value that counts as an improvement."
    )

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys without influence on the counters: a stopped run may continue with more patience."""
        return frozenset({"patience"})


class EarlyStopping(Hook):
    """Hook that ends the run when its evaluations stop improving."""

    Config: ClassVar[type[HookConfig]] = EarlyStoppingConfig

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        self._metric = MetricReader(config.metric)

    def init(self) -> Any:
        """Return the best value, and the number of evaluations since then."""
        return {"best": _get_worst_value(self.config.mode), "waited": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Compare with the best value, count, and stop when patience runs out."""
        config, best, waited = self.config, float(moment.counters["best"]), int(moment.counters["waited"])
        value = self._metric.read(moment.row)
        # An evaluation that lacks this metric, or in which it is null, neither resets nor uses up the patience.
        if value is None:
            return None
        if _is_better(value, best, config.mode, config.min_delta):
            return Verdict(counters={"best": np.float32(value), "waited": np.int32(0)})
        counters = {"best": np.float32(best), "waited": np.int32(waited + 1)}
        if waited + 1 < config.patience:
            return Verdict(counters=counters)
        return Verdict(Act.STOP, counters, f"{config.metric} is not better than {best:g} for {waited + 1} evaluations")


class StopAtLossConfig(HookConfig):
    """Config of `StopAtLoss`."""

    metric: str = Field(default="train/loss", min_length=1, description="Metric; rows without it are ignored.")
    mode: Mode = Field(default="min", description="Direction of improvement: smaller (min) or larger (max) is better.")
    value: float = Field(description="Target value; the run ends at the first row whose metric is as good or better.")

    @property
    def free_keys(self) -> frozenset[str]:
        """All keys: the hook has no counters."""
        return frozenset({"metric", "mode", "value"})


class StopAtLoss(Hook):
    """Hook that ends the run at a loss, or any other metric."""

    Config: ClassVar[type[HookConfig]] = StopAtLossConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Stop if the metric has reached its target."""
        config, value = self.config, moment.row.get(self.config.metric)
        if not isinstance(value, int | float) or not (
            value <= config.value if config.mode == "min" else value >= config.value
        ):
            return None
        return Verdict(Act.STOP, reason=f"{config.metric} is {value:g}, {config.value:g} was asked for")


class StopAtTimeConfig(HookConfig):
    """Config of `StopAtTime`: exactly one of two times, by the clock of process 0."""

    at: str | None = Field(default=None, description="Date and time with time zone, such as 2030-01-31T18:00:00+00:00.")
    after_hours: PositiveFloat | None = Field(
        default=None, description="Hours since the run's directory was first claimed, interruptions included."
    )

    @field_validator("at")
    @classmethod
    def _validate_time_zone(cls, at: str | None) -> str | None:
        if at is not None and datetime.datetime.fromisoformat(at).tzinfo is None:
            raise ValueError(f"{at} has no time zone; write {at}+00:00 for UTC")
        return at

    @model_validator(mode="after")
    def _validate_one_time(self) -> "StopAtTimeConfig":
        if (self.at is None) == (self.after_hours is None):
            raise ValueError("needs one of at and after_hours")
        return self

    @property
    def free_keys(self) -> frozenset[str]:
        """All keys: the hook has no counters."""
        return frozenset({"at", "after_hours"})


class StopAtTime(Hook):
    """Hook that ends the run at the first row after a point in time, hence at a step that differs between runs."""

    Config: ClassVar[type[HookConfig]] = StopAtTimeConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Stop if the time is over."""
        config = self.config
        if config.at is not None:
            # Only process 0's verdict counts, so clocks of other hosts do not matter.
            is_over, when = time.time() >= datetime.datetime.fromisoformat(config.at).timestamp(), config.at
        else:
            is_over = time.time() >= moment.run_began + config.after_hours * 3600
            when = f"{config.after_hours:g} hours"
        return Verdict(Act.STOP, reason=f"the time is over: {when}") if is_over else None


class BestAtEnd(Hook):
    """Hook that saves each step that is the best so far by `checkpoint.keep_best`, and names it in `result.json`.

    `best` then names that step for `init_from`, `export`, `sample` and `evaluate`, even if no save was due there.
    """

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        if job.spec.checkpoint.keep_best is None:
            raise InvalidError("BestAtEnd needs checkpoint.keep_best, which names the metric and keeps the checkpoint")
        self._keep_best = job.spec.checkpoint.keep_best
        self._metric = MetricReader(self._keep_best.metric)

    def init(self) -> Any:
        """Return the best value, and its step; 0 before the first."""
        return {"value": _get_worst_value(self._keep_best.mode), "step": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Save the step if it is better than all before."""
        value = self._metric.read(moment.row)
        if value is None or not _is_better(value, float(moment.counters["value"]), self._keep_best.mode):
            return None
        return Verdict(Act.SAVE, {"value": np.float32(value), "step": np.int32(moment.step)})

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None]:
        """Name the best step and its value in the result."""
        step, value = int(moment.counters["step"]), float(moment.counters["value"])
        return {"best_step": step or None, "best_value": value if step else None}
