"""Stages of a run (`config.stages`): their configs, and their place in the trajectory.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import optax

from runner.attempts.fence import RunIdentity
from runner.config import TOTAL_KEYS, TrainerConfig, complete_sources
from runner.errors import SpecError, suggest_choices
from runner.optim.config import ScheduleConfig
from runner.spec import Document, Trajectory, flatten, is_below, validate_config
from runner.spec.model import Policy, list_keys
from runner.storage import JsonObject
from runner.train.optimizer import (
    ScheduleStage,
    StageRates,
    find_first_other_rate,
    make_stage_rates,
    make_stage_schedules,
)

_STAGES = "config.stages"
CONTINUES = "continues"  # fourth item of a stage in a trajectory: its data continue those of the stage before it
_SECOND_SOURCE = "config.data.mixture.1"
_COMPARED_STEPS = 1000  # of a stage, whose learning rates are compared
_RATE_KEYS = ("schedule", "optimizer.learning_rate", *TOTAL_KEYS)


@dataclass(frozen=True)
class StagePlan:
    """One stage of a run, as the spec describes it."""

    number: int  # 0 for the config itself, before the first stage of the spec
    start: int  # completed steps before it
    # Completed steps before the next stage, or the steps of the run; 0 in a run without stages, whose total may not
    # be known yet.
    stop: int
    # Config of the stage, with `stages` empty; its total is the total of the run as of this stage.
    config: TrainerConfig[Any]
    document: Document  # origin of the config, for errors with a line
    values: Mapping[str, Any]  # values that the stage sets, by dotted key below `config`
    key: str = ""  # dotted key of the stage in the spec; empty for stage 0
    why: str = ""  # reason of the stage; empty if it has none

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
    allowed = list_keys(type(config), Policy.STAGE)
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


def format_idle_rates(stages: Sequence[StagePlan]) -> list[str]:
    """Return a line for each stage that sets a peak learning rate with no effect, as after the end of a schedule.

    Only for an optimizer whose learning rates are those of the config.
    """
    listed, lines = list_schedule_stages(stages), []
    for number, stage in enumerate(stages[1:], 1):
        if not stage.sets("optimizer.learning_rate"):
            continue
        stop = stages[number + 1].start if number + 1 < len(stages) else stage.config.total_steps
        steps = np.unique(np.linspace(stage.start, max(stop - 1, stage.start), _COMPARED_STEPS, dtype=np.int64))
        without = [dataclasses.replace(each, peak=None) if each is listed[number] else each for each in listed]
        given, former = (make_stage_schedules(each)[number](steps) for each in (listed, without))
        # The end of a schedule is computed from its peak, so it is rounded.
        if np.allclose(given, former, rtol=1e-4, atol=0.0):
            lines.append(
                f"{stage.key}: optimizer.learning_rate changes the rate of no step, since the schedule has reached its "
                "end; set schedule in the stage too, for example schedule: {name: constant}"
            )
    return lines


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
    """Part of a trajectory: its keys from one step until the next piece."""

    start: int  # completed steps before it
    keys: Trajectory  # trajectory without stages
    values: frozenset[str] = frozenset()  # dotted keys below `config` that the stage sets
    # False if the interleaving of sources restarts at its start; None if the data are not known.
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

    `identities` are the start of each stage, and its part of `present`, the identity of the run. `uses_config_rates` is
    True if the learning rates are those that the config describes. `get_num_examples` returns the training examples of
    an epoch; called for totals in epochs.
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
