"""Hooks for every run. Each is an example, too: what is to survive is in `init`, and nowhere else."""

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


class Metric:
    """Reads one figure of rows. A row may lack it, as evaluators have cadences of their own: the first is told."""

    def __init__(self, name: str):
        self.name = name
        self._has_told = False

    def of(self, row: Row) -> float | None:
        """As the state holds it: NaN for null, None if the row lacks it. Called on every host."""
        if self.name in row:
            return math.nan if row[self.name] is None else float(np.float32(row[self.name]))
        if not self._has_told:
            self._has_told = True
            near = suggest_choices(self.name, list(row))
            warn(f"hooks wait for {self.name}, which the row of step {row.get('step')} lacks{near}")
        return None


def is_better(value: float, best: float, mode: Mode, min_delta: float = 0.0) -> bool:
    """Whether a value is better by more than `min_delta`. NaN never is."""
    return value < best - min_delta if mode == "min" else value > best + min_delta


def worst(mode: Mode) -> np.float32:
    """What any value is better than."""
    return np.float32(math.inf if mode == "min" else -math.inf)


class EarlyStoppingConfig(HookConfig):
    """When an evaluation is no progress, and how many of these in a row end the run."""

    metric: str = Field(
        default="val/loss", min_length=1, description="Key of an evaluated row; rows without it are passed over."
    )
    mode: Mode = Field(default="min", description="Whether less or more is better.")
    patience: PositiveInt = Field(default=3, description="Evaluations in a row without progress that end the run.")
    min_delta: NonNegativeFloat = Field(default=0.0, description="By how much a value must be better than the best.")

    @property
    def free_keys(self) -> frozenset[str]:
        """The counters do not depend on the patience, so who has lost it may be given more."""
        return frozenset({"patience"})


class EarlyStopping(Hook):
    """Ends the run when its evaluations get no better."""

    Config: ClassVar[type[HookConfig]] = EarlyStoppingConfig

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        self._metric = Metric(config.metric)

    def init(self) -> Any:
        """The best value, and the evaluations since then."""
        return {"best": worst(self.config.mode), "waited": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Compare, count, and stop when the patience is lost."""
        rule, best, waited = self.config, float(moment.counters["best"]), int(moment.counters["waited"])
        value = self._metric.of(moment.row)
        if value is None:
            return None
        if is_better(value, best, rule.mode, rule.min_delta):
            return Verdict(counters={"best": np.float32(value), "waited": np.int32(0)})
        counters = {"best": np.float32(best), "waited": np.int32(waited + 1)}
        if waited + 1 < rule.patience:
            return Verdict(counters=counters)
        return Verdict(Act.STOP, counters, f"{rule.metric} is not better than {best:g} for {waited + 1} evaluations")


class StopAtLossConfig(HookConfig):
    """A value that is good enough."""

    metric: str = Field(
        default="train/loss", min_length=1, description="Key of a row; rows without it are passed over."
    )
    mode: Mode = Field(default="min", description="Whether less or more is better.")
    value: float = Field(description="The run ends at the first row whose metric is this, or better.")

    @property
    def free_keys(self) -> frozenset[str]:
        """There are no counters."""
        return frozenset({"metric", "mode", "value"})


class StopAtLoss(Hook):
    """Ends the run at a loss, or any other figure of a row."""

    Config: ClassVar[type[HookConfig]] = StopAtLossConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Compare."""
        rule, value = self.config, moment.row.get(self.config.metric)
        if value is None or not (value <= rule.value if rule.mode == "min" else value >= rule.value):
            return None
        return Verdict(Act.STOP, reason=f"{rule.metric} is {value:g}, {rule.value:g} was asked for")


class StopAtTimeConfig(HookConfig):
    """A moment by the clock of host 0; one of both."""

    at: str | None = Field(default=None, description="Date and time with its zone, as 2030-01-31T18:00:00+00:00.")
    after_hours: PositiveFloat | None = Field(
        default=None, description="Since the run's directory was claimed first, whatever has happened since then."
    )

    @field_validator("at")
    @classmethod
    def _a_moment(cls, at: str | None) -> str | None:
        if at is not None and datetime.datetime.fromisoformat(at).tzinfo is None:
            raise ValueError(f"{at} has no time zone; write {at}+00:00 for UTC")
        return at

    @model_validator(mode="after")
    def _one_of_both(self) -> "StopAtTimeConfig":
        if (self.at is None) == (self.after_hours is None):
            raise ValueError("needs one of at and after_hours")
        return self

    @property
    def free_keys(self) -> frozenset[str]:
        """There are no counters."""
        return frozenset({"at", "after_hours"})


class StopAtTime(Hook):
    """Ends the run at the first row after a moment. That depends on a clock: another run ends at another step."""

    Config: ClassVar[type[HookConfig]] = StopAtTimeConfig

    def on_row(self, moment: Moment) -> Verdict | None:
        """Look at the clock."""
        rule = self.config
        if rule.at is not None:
            is_over, when = time.time() >= datetime.datetime.fromisoformat(rule.at).timestamp(), rule.at
        else:
            is_over = time.time() >= moment.run_began + rule.after_hours * 3600
            when = f"{rule.after_hours:g} hours"
        return Verdict(Act.STOP, reason=f"the time is over: {when}") if is_over else None


class BestAtEnd(Hook):
    """Saves each step that is the best by `checkpoint.keep_best`, which keeps it, and names it in `result.json`.

    `best` then names it for `init_from`, `export`, `sample` and `evaluate`, even if no save was due there.
    """

    def __init__(self, config: Any, job: SeenJob):
        super().__init__(config, job)
        if job.spec.checkpoint.keep_best is None:
            raise InvalidError("BestAtEnd needs checkpoint.keep_best, which says what is best, and keeps it")
        self._rule = job.spec.checkpoint.keep_best
        self._metric = Metric(self._rule.metric)

    def init(self) -> Any:
        """The best value, and its step; 0 before the first."""
        return {"value": worst(self._rule.mode), "step": np.int32(0)}

    def on_evaluation(self, moment: Moment) -> Verdict | None:
        """Save what is better than all before."""
        value = self._metric.of(moment.row)
        if value is None or not is_better(value, float(moment.counters["value"]), self._rule.mode):
            return None
        return Verdict(Act.SAVE, {"value": np.float32(value), "step": np.int32(moment.step)})

    def on_end(self, moment: Moment) -> Mapping[str, str | float | int | None]:
        """Name it."""
        step, value = int(moment.counters["step"]), float(moment.counters["value"])
        return {"best_step": step or None, "best_value": value if step else None}
