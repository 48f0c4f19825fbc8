"""Choice of optimizer and schedule: from the library, by the names in the spec, or custom objects of the job.

The path of `config.optimizer.learning_rate` from YAML to optax:

1. `OptimizerConfig` (`runner.optim.config`) validates it.
2. `OptimizerChoice.build_schedule` passes it as the peak to `make_schedule` (`runner.optim.library`).
3. `OptimizerChoice.build_optimizer` passes the schedule to `make_optimizer` (`runner.optim.library`).

`TrainSetupBuilder.build_on_mesh` (`runner.train.setup`) makes the calls of steps 2 and 3. In a stage of a run it takes
the schedule over all stages instead (`make_stage_rates` in `runner.train.stages`).
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.optim.config import READERS, OptimizerConfig, ScheduleConfig
from runner.optim.library import SchedulePiece, list_schedule_pieces, make_optimizer, make_schedule
from runner.optim.transforms import ScheduleFreeState

SPEC = "spec"  # returned by `BaseTrainer.optimizer` and `schedule` to choose the name in the spec


@dataclass(frozen=True)
class OptimizerChoice:
    """Optimizer and schedule of a job. Made by `choose_optimizer`."""

    # Library name, or a custom optax transformation, which is used unchanged.
    optimizer: str | optax.GradientTransformation
    schedule: str | optax.Schedule  # library name, or a custom optax schedule
    # Names of the methods (`optimizer`, `schedule`) that return a library name other than `SPEC`.
    overridden: tuple[str, ...]

    def build_schedule(
        self, config: TrainerConfig, get_config_in_steps: Callable[[], TrainerConfig] | None = None
    ) -> optax.Schedule | None:
        """Return the learning rate by completed steps; None if a custom optimizer contains its own schedule.

        `get_config_in_steps` returns the config with a total in epochs converted to steps. It reads the data, so it is
        called only when a train step is traced, which read-only tools never do.
        """
        if callable(self.schedule):
            return self.schedule
        if not isinstance(self.optimizer, str):
            return None
        peak = config.optimizer.learning_rate
        assert peak is not None, "`find_problems` reports a missing learning rate"
        name, schedule_config = self.schedule, config.schedule
        if config.train.total_epochs is not None and get_config_in_steps is not None:
            return lambda step: make_schedule(name, schedule_config, peak, get_config_in_steps().total_steps)(step)
        return make_schedule(name, schedule_config, peak, config.total_steps)

    def build_optimizer(self, config: TrainerConfig, schedule: optax.Schedule | None, parameters: Any) -> Any:
        """Return the transformation: that of the library with the groups of the spec, or the custom one unchanged.

        `parameters` is a tree of `Parameter`. Raises `InvalidError` if groups or learning-rate multipliers do not fit.
        """
        if not isinstance(self.optimizer, str):
            if any(parameter.rate_multiplier != 1 for parameter in jax.tree.leaves(parameters)):
                raise InvalidError(
                    "a custom optax optimizer does not apply the learning-rate multipliers of the model's parameters; "
                    "use an optimizer of the library, or multipliers of 1"
                )
            return self.optimizer
        assert schedule is not None, "the library's optimizers have a schedule"
        is_ordered = config.train.same_bits_devices is not None
        return make_optimizer(self.optimizer, config.optimizer, schedule, parameters, is_ordered)

    def find_unread_keys(self) -> dict[str, str]:
        """Return the keys below `config` that have no effect, with the reason; a custom optimizer may read any key."""
        found = {f"{section}.name": f"{section}() of the job names its own" for section in self.overridden}
        for key, readers in READERS.items():
            name = self.optimizer if key.startswith("optimizer.") else self.schedule
            if isinstance(self.optimizer, str) and isinstance(name, str) and name not in readers:
                found[key] = f"{name} does not read it, {' or '.join(readers)} would"
        return found

    def describe_code(self, job_class: type) -> list[str]:
        """Return a line for each of optimizer and schedule that a method of the job names instead of the spec."""
        lines = []
        for section, chosen in (("optimizer", self.optimizer), ("schedule", self.schedule)):
            if not isinstance(chosen, str) or section in self.overridden:
                owner = next(each for each in job_class.__mro__ if section in vars(each))
                method = f"{owner.__module__}:{owner.__qualname__}.{section}"
                what = chosen if isinstance(chosen, str) else "an object of optax"
                lines.append(f"config.{section}.name is not used: {method} returns {what}")
        return lines

    def uses_config_rates(self, config: TrainerConfig) -> bool:
        """Return True if the learning rates are those of the config, and affect updates in no other way."""
        return isinstance(self.optimizer, str) and self.schedule == config.schedule.name

    def find_problems(self, config: TrainerConfig) -> dict[str, str]:
        """Return the problem of each wrong key below `config`; a key without effect must have its default value."""
        found = {key: why for key, why in self.find_unread_keys().items() if not config.is_default(key)}
        is_rate_read = isinstance(self.optimizer, str) and isinstance(self.schedule, str)
        if is_rate_read and config.optimizer.learning_rate is None:
            found["optimizer"] = "missing key learning_rate"
        # The spec's own name is checked when it is read; a job that returns another one reads the same keys.
        missing = {"wsd": ("decay_steps",), "inverse_square_root": ("warmup_steps", "warmup_share")}
        keys = missing.get(self.schedule, ()) if isinstance(self.schedule, str) else ()
        if isinstance(self.optimizer, str) and keys and not any(getattr(config.schedule, key) for key in keys):
            found["schedule"] = f"missing key {keys[0]}, which {self.schedule} of schedule() needs"
        return found


@dataclass(frozen=True)
class ScheduleStage:
    """Learning rate of a stage of a run, as its config describes it."""

    start: int  # steps before the stage
    begins_schedule: bool  # True if the stage begins a schedule; False if that of the previous stage continues
    schedule: ScheduleConfig
    # Peak learning rate that the stage sets. None: that of the continued schedule, or for a new schedule the rate
    # that the run has reached.
    peak: float | None
    total_steps: int  # steps of the run, at which a schedule that begins here ends


@dataclass(frozen=True)
class StageRates:
    """Learning rates of a stage."""

    start: int  # steps before the stage
    schedule: optax.Schedule  # learning rate by completed steps of the run
    # Pieces of the schedule, by completed steps of the run; the first may begin before the stage.
    pieces: Sequence[SchedulePiece]


def make_stage_rates(stages: Sequence[ScheduleStage]) -> list[StageRates]:
    """Return the learning rates of each stage.

    A schedule that a stage begins counts its steps from the start of the stage, and ends with the run. The first item
    is the schedule of the run before its first stage.
    """
    rates: list[StageRates] = []
    begin, current, peak, total = 0, stages[0].schedule, stages[0].peak, stages[0].total_steps
    for stage in stages:
        if stage.begins_schedule:
            begin, current, total = stage.start, stage.schedule, stage.total_steps
            peak = compute_rate(rates[-1].schedule, stage.start) if rates and stage.peak is None else stage.peak
        elif stage.peak is not None:
            peak = stage.peak
        elif rates:
            rates.append(replace(rates[-1], start=stage.start))
            continue
        assert peak is not None, "`find_problems` reports a missing learning rate"
        if peak == 0:
            raise InvalidError(f"the learning rate has reached 0 at step {begin}; set optimizer.learning_rate too")
        schedule = make_schedule(current.name, current, peak, total - begin)
        pieces = list_schedule_pieces(current.name, current, peak, total - begin)
        if begin:
            schedule = functools.partial(lambda schedule, begin, count: schedule(count - begin), schedule, begin)
        moved = [piece._replace(start=begin + piece.start) for piece in pieces]
        rates.append(StageRates(stage.start, schedule, moved))
    return rates


def make_stage_schedules(stages: Sequence[ScheduleStage]) -> list[optax.Schedule]:
    """Return the learning rate of each stage as a function of the completed steps of the run."""
    return [rates.schedule for rates in make_stage_rates(stages)]


# Steps at which two different pieces are compared: a few at first, since most pieces differ at once.
_FIRST_STEPS, _MORE_STEPS = 1 << 10, 1 << 18
COMPARED_STEPS_MAX = 1 << 22


def find_first_other_rate(first: Sequence[StageRates], second: Sequence[StageRates], end: int) -> int | None:
    """Return the first step below `end` at which two runs have different learning rates; None if there is none.

    Pieces of equal form are equal, and constant ones are compared at one step, so that time and memory do not depend on
    `end`. Pieces of different forms are evaluated at up to `COMPARED_STEPS_MAX` steps. If none of these differs, the
    step after them is returned: a change may be found too early, and never too late.
    """
    borders = {0, end}
    for stage in (*first, *second):
        borders |= {stage.start, *(piece.start for piece in stage.pieces)}
    ordered = sorted(border for border in borders if border <= end)
    for start, stop in itertools.pairwise(ordered):
        stages = [next(stage for stage in reversed(run) if stage.start <= start) for run in (first, second)]
        pieces = [next(piece for piece in reversed(stage.pieces) if piece.start <= start) for stage in stages]
        if pieces[0].form is not None and pieces[0] == pieces[1]:
            continue
        # Two constant rates are compared at one step.
        is_constant = pieces[0].form is None and pieces[1].form is None
        begin, num_steps = start, 1 if is_constant else _FIRST_STEPS
        last = min(stop, start + (1 if is_constant else COMPARED_STEPS_MAX))
        while begin < last:
            # All chunks have one of three sizes, for each of which JAX compiles once; the end of the last one is
            # ignored. Steps are int32, as in the train state.
            steps = np.minimum(np.arange(begin, begin + num_steps), np.iinfo(np.int32).max).astype(np.int32)
            former, new = (
                np.broadcast_to(np.float32(each.schedule(jnp.asarray(steps))), steps.shape) for each in stages
            )
            differing = np.flatnonzero(former != new)[:1]
            if differing.size and begin + differing[0] < last:
                return begin + int(differing[0])
            begin, num_steps = begin + num_steps, _MORE_STEPS
        if last < stop and not is_constant:
            return last
    return None


def compute_rate(schedule: optax.Schedule, step: int) -> float:
    """Return the learning rate of a schedule at one step, also while another function is traced."""
    with jax.ensure_compile_time_eval():
        return float(np.float32(schedule(step)))


def compute_rates(schedules: Sequence[optax.Schedule], starts: Sequence[int], steps: np.ndarray) -> np.ndarray:
    """Return the learning rates that the updates at these steps use; stage i begins at `starts[i]`."""
    rates = np.zeros(steps.shape, np.float32)
    for schedule, start in zip(schedules, starts, strict=True):
        # A constant schedule returns a Python number.
        rates = np.where(steps >= start, np.broadcast_to(np.float32(schedule(steps)), steps.shape), rates)
    return rates


def choose_optimizer(
    optimizer: str | optax.GradientTransformation, schedule: str | optax.Schedule | None, config: TrainerConfig
) -> OptimizerChoice:
    """Resolve the return values of a job's `optimizer` and `schedule`, including `SPEC` and None.

    Raises `InvalidError` for an unknown name.
    """
    overridden: list[str] = []

    def resolve(method: str, returned: Any, spec: OptimizerConfig | ScheduleConfig) -> Any:
        if isinstance(returned, str) and returned == SPEC:
            return spec.name
        if isinstance(returned, str) or returned is None:
            names = get_args(type(spec).model_fields["name"].annotation)
            if returned not in names:
                raise InvalidError(f"{method}() of the job returns {returned!r}, needs one of {', '.join(names)}")
            overridden.append(method)
        return returned

    chosen_optimizer = resolve("optimizer", optimizer, config.optimizer)
    chosen_schedule = resolve("schedule", "constant" if schedule is None else schedule, config.schedule)
    return OptimizerChoice(chosen_optimizer, chosen_schedule, tuple(overridden))


# Optimizer states with a step count at which a schedule is evaluated.
_SCHEDULED = (
    optax.ScaleByScheduleState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
    optax.FactoredState,
    ScheduleFreeState,
)


def count_step(opt_state: Any) -> Any:
    """Return the state of an optimizer after a step without an update: only the counts of schedules advance.

    The learning rate thus follows the steps of the run.
    """

    def count(node: Any) -> Any:
        if not isinstance(node, _SCHEDULED):
            return node
        # The children of the node may be such states too.
        children, structure = jax.tree.flatten(node, is_leaf=lambda child: child is not node)
        counted: Any = jax.tree.unflatten(structure, [count_step(child) for child in children])
        update = {"count": optax.safe_increment(node.count)}
        return counted._replace(**update) if hasattr(counted, "_replace") else counted.replace(**update)

    return jax.tree.map(count, opt_state, is_leaf=lambda node: isinstance(node, _SCHEDULED))
