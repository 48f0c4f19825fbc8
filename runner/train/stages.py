"""Stages of a run (`config.stages`): their configs, their place in the trajectory, and their compiled steps.

The config of stage i is the config of the run with the values of stages 1 to i in place of its own; stage 0 is the run
before its first stage. A step depends only on the config of its stage, with two exceptions that also depend on earlier
stages: the position in each source of data (`Dataset.continue_stages`), and the learning rate (`make_stage_rates`).

**Data at a border.** A stage with the data and the batch size of the stage before it continues the data as if there
were no border: a stage that changes no value changes no bit, so it may be added, moved or removed at any time. At any
other border the sources of a mixture continue, and their interleaving restarts. Earlier versions restarted it at every
border. The trajectory records which borders continue (`CONTINUES`); one without this mark that a run has passed
restarts the interleaving in later attempts too, and may neither be moved nor removed.
"""

import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import jax
import optax

from runner.checkpoint.leaves import format_type, list_leaf_names
from runner.config import TOTAL_KEYS, TrainerConfig, complete_sources, list_stage_keys
from runner.data import TRAIN, DataPosition, Dataset, SkippedBatches, SkippedExamples, has_targets
from runner.errors import InvalidError, SpecError, format_error, suggest_choices
from runner.metrics.meta import Meta
from runner.optim.config import ScheduleConfig
from runner.run.fence import RunIdentity
from runner.spec import Document, Trajectory, flatten, is_below, validate_config
from runner.storage import JsonObject
from runner.train.compile import CompiledStep
from runner.train.optimizer import (
    ScheduleStage,
    StageRates,
    find_first_other_rate,
    make_stage_rates,
    make_stage_schedules,
)
from runner.train.replay import ReplayedStep
from runner.train.setup import StageContext, TrainSetup, TrainSetupBuilder
from runner.train.state import PARAMS, TrainState, get_shardings
from runner.train.step import Batch, skip_step

_STAGES = "config.stages"
CONTINUES = "continues"  # fourth item of a stage in a trajectory: its data continue those of the stage before it
_SECOND_SOURCE = "config.data.mixture.1"
_RATE_KEYS = ("schedule", "optimizer.learning_rate", *TOTAL_KEYS)
# Sections and keys on which shapes and types of the state may depend.
_STATE_KEYS = ("model", "optimizer", "ema", "noise_scale", "data.sequence_length", "data.packing")


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run, as the spec describes it.

    Attributes:
        number: 0 for the config itself, before the first stage of the spec.
        start: completed steps before it.
        stop: completed steps before the next stage, or the steps of the run; 0 in a run without stages, whose total may
            not be known yet.
        config: config of the stage, with `stages` empty; its total is the total of the run as of this stage.
        document: origin of the config, for errors with a line.
        values: values that the stage sets, by dotted key below `config`.
        key: dotted key of the stage in the spec; empty for stage 0.
        why: reason of the stage; empty if it has none.
    """

    number: int
    start: int
    stop: int
    config: TrainerConfig[Any]
    document: Document
    values: Mapping[str, Any]
    key: str = ""
    why: str = ""

    def sets(self, *sections: str) -> bool:
        """Return True if the stage sets one of these dotted keys, or a part of one."""
        return any(is_below(f"config.{key}", sections) for key in self.values)

    def is_evaluated(self, total_steps: int) -> bool:
        """Return True if the loss on the validation sets is due at one of its steps."""
        every_steps = self.config.eval.every_steps
        is_due = every_steps is not None and self.stop // every_steps > self.start // every_steps
        return is_due or (self.config.eval.at_end and self.stop == total_steps)


def make_stages(
    document: Document, config_class: type[TrainerConfig[Any]], config: TrainerConfig[Any]
) -> list[StagePlan]:
    """Return the stages of a run; only stage 0 if the spec has none.

    Raises `SpecError` with a line for each problem of a stage.
    """
    if not config.stages:
        return [StagePlan(0, 0, 0, config, document, {})]
    starts, total = config.list_starts(), config.total_steps
    # The stages of a batch ramp come first; they are not in `config.stages`.
    given = document.data["config"]
    num_ramp = len(config.stages) - len(given.get("stages") or [])
    first_batch = {"batch_ramp": None, "global_batch_examples": config.train.global_batch_examples}
    given = given | {"train": given["train"] | first_batch}
    document = dataclasses.replace(document, data=document.data | {"config": given})
    places = [("config", "train", "batch_ramp")] * num_ramp
    places += [("config", "stages", str(index)) for index in range(len(config.stages) - num_ramp)]
    allowed = list_stage_keys(type(config.model))
    problems: list[tuple[tuple[str, ...], str]] = []
    for index, stage in enumerate(config.stages):
        place, key = places[index], "from_tokens" if stage.from_step is None else "from_step"
        start, before = starts[index + 1].step, starts[index].step
        end = config.get_total_steps(index)
        if start == before and index:
            problems.append(((*place, key), f"begins at step {start}, as the stage before it; make one stage of them"))
        elif start < before:
            reason = f"begins at step {start}, before the stage before it, at step {before}; put stages in order"
            problems.append(((*place, key), reason))
        elif start > end or start >= total:
            # A stage may begin at the end of the run so far, and extend the run.
            reason = f"begins at step {start}, and the run ends at step {min(total, end)}; use an earlier start"
            problems.append(((*place, key), f"{reason}, or a longer total"))
        for name, value in stage.set.items():
            if not is_below(f"config.{name}", allowed):
                hint = suggest_choices(name, allowed)
                problems.append(((*place, "set", name), f"may not change during a run{hint}"))
            elif name in TOTAL_KEYS and (type(value) is not int or value < 1):
                problems.append(((*place, "set", name), f"got {value!r}, needs a whole number above 0"))
    if problems:
        raise SpecError(document.format_problems(problems))

    stops = [*(start.step for start in starts[1:]), total]
    base = config.model_copy(update={"stages": []})
    stages = [StagePlan(0, 0, stops[0], base, document, {})]
    for number, stage in enumerate(config.stages, 1):
        origins = [place if place[1] == "train" else (*place, "set") for place in places[:number]]
        own = document.replace_values(
            ("config",),
            [(origin, complete_sources(entry.set)) for origin, entry in zip(origins, config.stages, strict=False)],
        )
        # The total of the config counts the steps of all stages up to this one.
        end = config.get_total_steps(number)
        own.data["config"]["train"] |= {"total_steps": end, "total_tokens": None}
        own.data["config"]["stages"] = []
        # The position in the data is that of the whole run.
        own.data["config"]["train"]["skip_steps"] = []
        own_config = validate_config(own, config_class)
        if stage.sets("schedule"):
            # A schedule that begins here has only the rest of the run.
            rest = own_config.train.model_copy(update={"total_steps": end - starts[number].step})
            try:
                own_config.model_copy(update={"train": rest}).validate_schedule()
            except ValueError as error:
                raise own.error("config.schedule", f"from step {starts[number].step} on, {error}") from error
        dumped = own_config.model_dump(mode="json")
        # Values with all defaults, so that equal ones are equal in the trajectory however they are written.
        values: JsonObject = {}
        for key, value in stage.set.items():
            parts = () if key in TOTAL_KEYS else key.split(".")
            begin = value if key in TOTAL_KEYS else dumped
            values[key] = functools.reduce(
                lambda data, part: data[int(part) if isinstance(data, list) else part], parts, begin
            )
        stages.append(
            StagePlan(
                number,
                starts[number].step,
                stops[number],
                own_config,
                own,
                values,
                ".".join(places[number - 1]),
                stage.why or "",
            )
        )
    return stages


def resolve_config(config: TrainerConfig[Any], stages: Sequence[StagePlan]) -> TrainerConfig[Any]:
    """Return the config of a run with all defaults in the values of its stages."""
    resolved = [
        entry.model_copy(update={"set": dict(stage.values)})
        for entry, stage in zip(config.stages, stages[1:], strict=True)
    ]
    return config.model_copy(update={"stages": resolved}) if resolved else config


def format_rounded_starts(config: TrainerConfig[Any], stages: Sequence[StagePlan]) -> list[str]:
    """Return a line for each stage whose start in tokens is inside a step, and is therefore rounded up."""
    return [
        f"{stage.key}: {entry.from_tokens:,} tokens are reached within step {start.step}, so the stage begins after "
        f"it, at {start.units:,} tokens"
        for stage, entry, start in zip(stages[1:], config.stages, config.list_starts()[1:], strict=True)
        if entry.from_tokens is not None and start.units != entry.from_tokens
    ]


# Learning rates.


def list_schedule_stages(stages: Sequence[StagePlan]) -> list[ScheduleStage]:
    """Return the inputs of the learning rates of a run."""
    return [
        ScheduleStage(
            stage.start,
            stage.number == 0 or stage.sets("schedule"),
            stage.config.schedule,
            stage.config.optimizer.learning_rate
            if stage.number == 0 or stage.sets("optimizer.learning_rate")
            else None,
            stage.config.total_steps,
        )
        for stage in stages
    ]


def make_schedules(stages: Sequence[StagePlan]) -> list[optax.Schedule]:
    """Return the learning rate of each stage by completed steps. Raises `SpecError` if a schedule begins at 0."""
    listed = list_schedule_stages(stages)
    for number, stage in enumerate(stages[1:], 1):
        with stage.document.errors_at("config.schedule"):
            make_stage_schedules(listed[: number + 1])
    return make_stage_schedules(listed)


# Trajectory.


@dataclass(frozen=True)
class TrajectoryPiece:
    """Part of a trajectory: its keys from one step until the next piece.

    Attributes:
        start: completed steps before it.
        keys: trajectory without stages.
        values: dotted keys below `config` that the stage sets.
        continues_data: False if the interleaving of sources restarts at its start; None if the data are not known.
    """

    start: int
    keys: Trajectory
    values: frozenset[str] = frozenset()
    continues_data: bool | None = True


def split_trajectory(trajectory: Trajectory) -> list[TrajectoryPiece]:
    """Return the pieces of a trajectory, whose key `config.stages` has a list for each stage.

    Its items are: start, values, keys that follow from the data, and `CONTINUES` if the data continue. The last two are
    left out before the data are read.
    """
    keys = {key: value for key, value in trajectory.items() if key != _STAGES}
    pieces = [TrajectoryPiece(0, keys)]
    for start, values, *others in trajectory.get(_STAGES, []):
        kept = {key: value for key, value in keys.items() if not is_below(key, values)}
        keys = kept | flatten(values, "config.") | (others[0] if others else {})
        continues_data = CONTINUES in others[1:] if others else None
        pieces.append(TrajectoryPiece(start, keys, frozenset(values), continues_data))
    return pieces


def list_restarts(trajectory: Trajectory) -> list[int]:
    """Return the starts of the stages of a trajectory at which the interleaving of sources restarts."""
    return [piece.start for piece in split_trajectory(trajectory) if piece.continues_data is False]


def find_first_border(first: Sequence[TrajectoryPiece], second: Sequence[TrajectoryPiece]) -> int | None:
    """Return the first step at which the interleaving of sources restarts in only one of two trajectories, or None.

    A single source has no interleaving. Also None if the data of one of them are not known.
    """
    if any(piece.continues_data is None for piece in (*first, *second)):
        return None
    borders = [
        {piece.start for piece in pieces if not piece.continues_data and f"{_SECOND_SOURCE}.weight" in piece.keys}
        for pieces in (first, second)
    ]
    return min(borders[0] ^ borders[1], default=None)


def find_first_change(
    identities: Sequence[tuple[int, RunIdentity]],
    present: Trajectory,
    config: TrainerConfig[Any],
    uses_config_rates: bool,
    get_num_examples: Callable[[], int],
    saved: Trajectory,
) -> int | None:
    """Return the number of steps before the first update that differs from a saved trajectory; None if none differs.

    Both are compared piece by piece. Keys that affect an update only through the learning rate are compared by the
    resulting rates.

    Args:
        identities: start of each stage, and its part of the identity of the run.
        present: identity of the run.
        config: config of the run.
        uses_config_rates: True if the learning rates are those that the config describes.
        get_num_examples: function that returns the training examples of an epoch; called for totals in epochs.
        saved: the saved trajectory.
    """
    pieces = split_trajectory(saved)
    borders = sorted({start for start, _ in identities} | {piece.start for piece in pieces})
    # The position in the data is compared as a whole, see `DataPosition`.
    ignored = config.free_keys | {"train.skip_steps"}
    first_other = math.inf
    for start in borders:
        identity = next(each for begin, each in reversed(identities) if begin <= start)
        piece = next(each for each in reversed(pieces) if each.start <= start)
        differing = [key for key in identity.compare_values(piece.keys) if not is_below(key, ignored)]
        if any(not uses_config_rates or not is_below(key, _RATE_KEYS) for key in differing):
            first_other = start
            break
    border = find_first_border(pieces, split_trajectory(present))
    first_other = min(first_other, math.inf if border is None else border)
    if not uses_config_rates:
        return None if math.isinf(first_other) else int(first_other)
    try:
        runs = [compute_run_rates(each, config, get_num_examples) for each in (saved, present)]
    except (KeyError, ValueError):  # saved by a version with other schedules
        return 0
    (former, former_total), (new, new_total) = runs
    other_rate = find_first_other_rate(former, new, max(former_total, new_total))
    first = min(first_other, math.inf if other_rate is None else other_rate)
    return None if math.isinf(first) else int(first)


def compute_run_rates(
    trajectory: Trajectory, config: TrainerConfig[Any], get_num_examples: Callable[[], int]
) -> tuple[list[StageRates], int]:
    """Return the learning rates of the stages of a trajectory, and its total number of steps.

    If no learning rate of the trajectory depends on the total, that of the config is returned.
    """
    stages: list[ScheduleStage] = []
    totals: JsonObject = {key: trajectory.get(f"config.{key}") for key in TOTAL_KEYS}
    if not any(totals.values()):
        totals = {key: getattr(config.train, key.partition(".")[2]) for key in TOTAL_KEYS}
    start = units = units_per_step = 0
    for piece in split_trajectory(trajectory):
        prefix = "config.schedule."
        values = {key.removeprefix(prefix): value for key, value in piece.keys.items() if key.startswith(prefix)}
        units += (piece.start - start) * units_per_step
        start, batch = piece.start, piece.keys["config.train.global_batch_examples"]
        units_per_step = batch * (piece.keys.get("config.data.sequence_length") or 1)
        if given := {key: piece.keys[f"config.{key}"] for key in TOTAL_KEYS if key in piece.values}:
            totals = given
        if (steps := totals.get("train.total_steps")) is not None:
            total = steps
        elif (budget := totals.get("train.total_tokens")) is not None:
            total = start - (units - budget) // units_per_step
        else:
            total = math.ceil(Fraction(str(totals["train.total_epochs"])) * get_num_examples() / batch)
        sets_rate = piece.start == 0 or "optimizer.learning_rate" in piece.values
        stages.append(
            ScheduleStage(
                start,
                piece.start == 0 or any(is_below(f"config.{key}", ("schedule",)) for key in piece.values),
                ScheduleConfig.model_validate(values),
                piece.keys["config.optimizer.learning_rate"] if sets_rate else None,
                total,
            )
        )
    return make_stage_rates(stages), total


# Running.


class CompiledStage:
    """Stage on the devices of this process: its setup and its compiled step, made when first needed.

    Attributes:
        plan: the stage as the spec describes it.
        builder: builder of its setup.
        val_step: compiled validation step, if it is compiled ahead.
    """

    def __init__(
        self,
        plan: StagePlan,
        builder: TrainSetupBuilder,
        get_setup: Callable[[], TrainSetup] | None = None,
        is_evaluated: bool = False,
    ):
        """Prepare the stage; builds and compiles nothing.

        Args:
            plan: the stage as the spec describes it.
            builder: builder of its setup.
            get_setup: function that returns the setup, by default one that builds it.
            is_evaluated: True if the loss on the validation sets is due at one of its steps.
        """
        self.plan, self.builder = plan, builder
        self._get_setup = (lambda: builder.build(jax.devices())) if get_setup is None else get_setup
        self._compiled: Future[CompiledStep] | None = None
        self._is_evaluated = is_evaluated
        self.val_step: Future[jax.stages.Compiled] | None = None
        self._lock = threading.Lock()

    @functools.cached_property
    def train_setup(self) -> TrainSetup:
        """Setup of the stage on all devices."""
        return self._get_setup()

    def start_compiling(self, limit_bytes: int) -> Future[CompiledStep]:
        """Start to compile the train step on a thread at the first call, and return its future.

        If the stage is evaluated, the thread then compiles the validation step.
        """
        with self._lock:
            if self._compiled is None:
                compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compile")
                self._compiled = train = compiler.submit(self._compile, limit_bytes, None)
                if self._is_evaluated and self.builder.dataset.validation:
                    self.val_step = compiler.submit(
                        lambda: self.builder.compile_val(self.train_setup, train.result().layout)
                    )
                compiler.shutdown(wait=False)  # the thread ends once it has compiled
            return self._compiled

    def compile(self, limit_bytes: int, micro_batch: int | None = None) -> CompiledStep:
        """Return the compiled train step; compiles on this thread, or waits for the one that does.

        Args:
            limit_bytes: memory of a device that the step may use.
            micro_batch: micro-batch that an earlier attempt has chosen; None: the largest that fits.
        """
        with self._lock:
            if self._compiled is None:
                self._compiled = Future()
                self._compiled.set_result(self._compile(limit_bytes, micro_batch))
        return self._compiled.result()

    def _compile(self, limit_bytes: int, micro_batch: int | None) -> CompiledStep:
        return self.builder.compile(self.train_setup, limit_bytes, micro_batch)

    def validate(self, abstract: TrainState, devices: Sequence[jax.Device]) -> None:
        """Check the stage before the run begins, without compiling its step.

        Raises `SpecError`, also if its state differs in shape or type from that of the run, `abstract`.
        """
        self.builder.validate_keys_read()
        self.builder.make_mesh(devices)
        data = self.builder.config.data
        changes_arrays = not data.has_tokens and any(is_below(f"config.{key}", ("data",)) for key in self.plan.values)
        if not changes_arrays and not any(is_below(f"config.{key}", _STATE_KEYS) for key in self.plan.values):
            return
        if changes_arrays:
            # The data may have other fields, which the job's code reads.
            with self.plan.document.errors_at("config"):
                try:
                    self.builder.trace(self.train_setup)
                except (KeyError, TypeError, ValueError) as error:
                    raise InvalidError(f"its step cannot be traced with its data: {format_error(error)}") from error
        former, own = (
            {
                name: format_type(leaf.dtype, leaf.shape)
                for name, leaf in zip(list_leaf_names(state), jax.tree.leaves(state), strict=True)
            }
            for state in (abstract, self.train_setup.abstract_state)
        )
        problems = [
            f"{name} {former.get(name, 'is not there')} would become {own.get(name, 'nothing')}"
            for name in former | own
            if former.get(name) != own.get(name)
        ]
        if problems:
            shown = ", ".join(problems[:4]) + (f" and {len(problems) - 4} more" if len(problems) > 4 else "")
            # Weights of other shapes cannot be taken over.
            has_same_weights = not any(problem.startswith(f"{PARAMS}.") for problem in problems)
            advice = "begin another run" + (", with checkpoint.init_from" if has_same_weights else "")
            reason = f"it changes the shape of the state, which a run cannot: {shown}; {advice}"
            raise self.plan.document.error("config", reason)

    def find_restarts(self, dataset: Dataset) -> list[str]:
        """Return a line for each source that starts a new epoch although an earlier stage had it."""
        return [
            f"{self.plan.key}: the epoch of {train.name} starts again at step {self.plan.start}, because its examples "
            "are others than those before (sequence length, packing or split)"
            for train in dataset.train_sources
            if train.is_restarted
        ]

    @functools.cached_property
    def skip_step(self) -> Callable[[TrainState], tuple[TrainState, jax.Array, Meta]]:
        """Compiled step over a batch without a target; the state is donated."""
        setup = self.train_setup
        skip = functools.partial(skip_step, schedule=setup.schedule, auxiliary_states=setup.auxiliary_states)
        return jax.jit(skip, donate_argnums=0, out_shardings=(get_shardings(setup.abstract_state), None, None))

    @functools.cached_property
    def replayed_step(self) -> ReplayedStep:
        """Compiled train step with replays, if its layout `is_replayable`. Needs `compile` or `start_compiling`."""
        assert self._compiled is not None, "the stage is compiled"
        compiled = self._compiled.result()
        layout = compiled.layout
        return ReplayedStep(compiled.executable, self.train_setup.abstract_state, layout.mesh, layout.is_ordered)

    def adopt(self, state: TrainState) -> TrainState:
        """Return a state of any stage with the (static) functions of this stage; the arrays are the same."""
        leaves, structure = jax.tree.flatten(state)
        own: Any = jax.tree.structure(self.train_setup.abstract_state)
        return state if structure == own else jax.tree.unflatten(own, leaves)


class StageSequence:
    """Stages of a run: their plans, and on the devices of this process their data, learning rates and compiled steps.

    The run is in one of them. The data of a stage continue at the positions that the stages before it have reached, and
    its program is compiled while the devices train the stage before it.

    Attributes:
        plans: the stages; the first is the config before any stage of the spec, and the only one if it has no stages.
        number: number of the current stage: that of the next step or, until it begins, of the last step.
        limit_bytes: memory of a device that a step may use; known once the job prepares its first step.
        restarts: starts of stages at which the run has restarted the interleaving of sources; known after the setup.
    """

    def __init__(
        self,
        config: TrainerConfig[Any],
        plans: Sequence[StagePlan],
        get_builders: Callable[[], Sequence[TrainSetupBuilder]],
        get_setup: Callable[[], TrainSetup],
        get_position: Callable[[], DataPosition],
    ):
        """Prepare the stages; builds and compiles nothing.

        Args:
            config: config of the run.
            plans: its stages.
            get_builders: function that returns the builder of each stage's setup; called when first needed.
            get_setup: function that returns the setup of the first stage.
            get_position: function that returns the position in the data by step, which a roll-back changes.
        """
        self.plans = plans
        self.number = 0
        self.limit_bytes = 0
        self.restarts: frozenset[int] = frozenset()
        self._config = config
        self._get_builders, self._get_setup, self._get_position = get_builders, get_setup, get_position
        # By skipped ranges of data, and stage.
        self._datasets: dict[tuple[tuple[SkippedBatches, ...], int], Dataset] = {}

    @functools.cached_property
    def compiled(self) -> list[CompiledStage]:
        """Stages on the devices of this process."""
        return [
            CompiledStage(
                plan,
                builder,
                None if plan.number else self._get_setup,
                # The validation step of the first stage is compiled by its evaluator.
                is_evaluated=plan.number > 0 and plan.is_evaluated(self._config.total_steps),
            )
            for plan, builder in zip(self.plans, self._get_builders(), strict=True)
        ]

    @functools.cached_property
    def schedules(self) -> list[optax.Schedule]:
        """Learning rate of each stage by completed steps."""
        return make_schedules(self.plans)

    def make_context(self, number: int) -> StageContext | None:
        """Return the dependencies of a stage on those before it; None if the run has no stages."""
        if len(self.plans) == 1:
            return None
        plan = self.plans[number]
        return StageContext(
            plan.stop - plan.start,
            lambda: self.schedules[number],
            (lambda: self._get_builders()[0].vocabulary_size) if number else None,
        )

    # The current stage.

    @property
    def current(self) -> CompiledStage:
        """Stage of the next step or, until that begins, of the last step."""
        return self.compiled[self.number]

    def enter(self, step: int) -> CompiledStep:
        """Enter the stage of the step after `step` completed ones, and return its program, for which it may wait."""
        number = self._config.find_stage(step)
        compiled = self.compiled[number].start_compiling(self.limit_bytes).result()
        self.number = number
        return compiled

    def compile_next(self) -> None:
        """Start to compile the step of the next stage on a background thread, unless that has been started."""
        if self.number + 1 < len(self.plans):
            self.compiled[self.number + 1].start_compiling(self.limit_bytes)

    # Data.

    def continues_data(self, number: int) -> bool:
        """Return True if the data of a stage continue those of the stage before it as if there were no border."""
        plan, before = self.plans[number], self.plans[number - 1]
        if not number or plan.start in self.restarts:
            return not number
        batches = {each.config.train.global_batch_examples for each in (plan, before)}
        return len(batches) == 1 and (
            not plan.sets("data")
            or self.compiled[number].builder.dataset.fingerprint
            == self.compiled[number - 1].builder.dataset.fingerprint
        )

    def find_data_start(self, number: int) -> StagePlan:
        """Return the first of the successive stages that have the data and the batch size of this one."""
        while number and self.continues_data(number):
            number -= 1
        return self.plans[number]

    def count_examples(self, number: int, step: int | None = None) -> tuple[int, Sequence[SkippedExamples]]:
        """Return (number of examples of a stage's data up to `step`, ranges of those that were skipped).

        `step` is by default the end of the stage. Examples count from the first stage with the same data.
        """
        plan, start = self.plans[number], self.find_data_start(number).start
        # Without stages `plan.stop` is 0, and the caller passes `step`.
        end = plan.stop if step is None else step
        skipped = [each for each in self._get_position().skipped if each.begin >= start]
        own = DataPosition(tuple(each._replace(begin=each.begin - start) for each in skipped))
        return own.count_examples(end - start, plan.config.train.global_batch_examples)

    def get_dataset(self, number: int) -> Dataset:
        """Return the data set of a stage, whose sources continue at the positions that earlier stages have reached."""
        key = self._get_position().skipped, number
        if key not in self._datasets:
            loaded, first = self.compiled[number].builder.dataset, self.find_data_start(number).number
            if first < number:
                self._datasets[key] = loaded.continue_equal(self.get_dataset(first))
                return self._datasets[key]
            # A roll-back in one stage moves the position in the data of the later ones. Stages with the same data
            # count together.
            ends = [each for each in range(number) if self.find_data_start(each + 1).number == each + 1]
            earlier = [(self.get_dataset(each), *self.count_examples(each)) for each in ends]
            self._datasets[key] = loaded.continue_stages(earlier) if earlier else loaded
        return self._datasets[key]

    def locate_batch(self, step: int) -> tuple[CompiledStage, int]:
        """Return (stage of the step after `step` completed ones, batches of its data before it)."""
        number, position = self._config.find_stage(step), self._get_position()
        start = self.find_data_start(number).start
        return self.compiled[number], position.get_data_step(step) - position.count_examples(start, 1)[0]

    def load_batch(self, step: int) -> Batch:
        """Return the global (S, B, ...) training batch after `step` completed steps. May wait for its program."""
        stage, data_step = self.locate_batch(step)
        layout = stage.start_compiling(self.limit_bytes).result().layout
        return layout.batch(self.get_dataset(stage.plan.number), TRAIN, data_step)

    def has_targets(self, batch: Batch, step: int) -> bool:
        """Return False if `batch`, the one of `load_batch`, is known to have no target."""
        stage, data_step = self.locate_batch(step)
        dataset = self.get_dataset(stage.plan.number)
        return has_targets(dataset, batch, data_step, stage.plan.config.train.global_batch_examples)
