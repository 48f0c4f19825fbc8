"""Built-in hooks. Each also serves as an example: all that survives a restart are its counters."""

import datetime
import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from runner.console import warn
from runner.errors import InvalidError
from runner.hook.protocol import Act, Hook, HookConfig, Moment, SeenJob, Verdict
from runner.metrics.rows import Row
from runner.spec import suggest_choices

Mode = Literal["min", "max"]


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


def is_better(value: float, best: float, mode: Mode, min_delta: float = 0.0) -> bool:
    """Return True if a value is better by more than `min_delta`. NaN never is."""
    return value < best - min_delta if mode == "min" else value > best + min_delta


def get_worst_value(mode: Mode) -> np.float32:
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
        return {"best": get_worst_value(self.config.mode), "waited": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Compare with the best value, count, and stop when patience runs out."""
        config, best, waited = self.config, float(moment.counters["best"]), int(moment.counters["waited"])
        value = self._metric.read(moment.row)
        # An evaluation that lacks this metric, or in which it is null, neither resets nor uses up the patience.
        if value is None:
            return None
        if is_better(value, best, config.mode, config.min_delta):
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
        return {"value": get_worst_value(self._keep_best.mode), "step": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Save the step if it is better than all before."""
        value = self._metric.read(moment.row)
        if value is None or not is_better(value, float(moment.counters["value"]), self._keep_best.mode):
            return None
        return Verdict(Act.SAVE, {"value": np.float32(value), "step": np.int32(moment.step)})

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None]:
        """Name the best step and its value in the result."""
        step, value = int(moment.counters["step"]), float(moment.counters["value"])
        return {"best_step": step or None, "best_value": value if step else None}
