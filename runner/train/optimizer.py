"""Choice of optimizer and schedule: from the library, by the names in the spec, or custom objects of the job.

The path of `config.optimizer.learning_rate` from YAML to optax:

1. `OptimizerConfig` (`runner.optim.config`) validates it.
2. `OptimizerChoice.build_schedule` passes it as the peak to `make_schedule` (`runner.optim.library`).
3. `OptimizerChoice.build_optimizer` passes the schedule to `make_optimizer` (`runner.optim.library`).

`TrainSetupBuilder.build_on_mesh` (`runner.train.setup`) makes the calls of steps 2 and 3.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import jax
import numpy as np
import optax

from runner.config import TOTAL_KEYS, TrainerConfig
from runner.errors import InvalidError
from runner.optim.config import READERS, OptimizerConfig, ScheduleConfig
from runner.optim.library import make_optimizer, make_schedule
from runner.spec import Trajectory, is_below

SPEC = "spec"  # returned by `BaseTrainer.optimizer` and `schedule` to choose the name in the spec


@dataclass(frozen=True)
class OptimizerChoice:
    """Optimizer and schedule of a job. Made by `choose_optimizer`.

    Attributes:
        optimizer: library name, or a custom optax transformation, which is used unchanged.
        schedule: library name, or a custom optax schedule.
        overridden: names of the methods (`optimizer`, `schedule`) that return a library name other than `SPEC`.
    """

    optimizer: str | optax.GradientTransformation
    schedule: str | optax.Schedule
    overridden: tuple[str, ...]

    def build_schedule(
        self, config: TrainerConfig, get_config_in_steps: Callable[[], TrainerConfig] | None = None
    ) -> optax.Schedule | None:
        """Return the learning rate by completed steps; None if a custom optimizer contains its own.

        Args:
            config: config of the trainer.
            get_config_in_steps: function that converts a total in epochs to steps and returns that config. It reads the
                data, so it is called only when a train step is traced, which read-only tools never do.
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
            if any(parameter.rate != 1 for parameter in jax.tree.leaves(parameters)):
                raise InvalidError(
                    "a custom optax optimizer does not apply the learning-rate multipliers of the model's parameters; "
                    "use an optimizer of the library, or multipliers of 1"
                )
            return self.optimizer
        assert schedule is not None, "the library's optimizers have a schedule"
        return make_optimizer(self.optimizer, config.optimizer, schedule, parameters)

    def find_unread_keys(self) -> dict[str, str]:
        """Return the keys below `config` that have no effect, with the reason; a custom optimizer may read any key."""
        found = {f"{section}.name": f"{section}() of the job names its own" for section in self.overridden}
        for key, readers in READERS.items():
            name = self.optimizer if key.startswith("optimizer.") else self.schedule
            if isinstance(self.optimizer, str) and isinstance(name, str) and name not in readers:
                found[key] = f"{name} does not read it, {' or '.join(readers)} would"
        return found

    def find_first_change(
        self, config: TrainerConfig, get_num_examples: Callable[[], int], saved: Trajectory, keys: Sequence[str]
    ) -> int | None:
        """Return the first step with another learning rate than in a saved trajectory; None if there is no such step.

        Args:
            config: config of the trainer.
            get_num_examples: function that returns the training examples of an epoch; called for totals in epochs.
            saved: the saved trajectory.
            keys: keys in which it differs from the config. If one of them has another effect, the result is 0.
        """
        is_of_library = isinstance(self.optimizer, str) and self.schedule == config.schedule.name
        if not is_of_library or not all(is_below(key, ("schedule", *TOTAL_KEYS)) for key in keys):
            return 0
        try:
            configs = [config.replace_schedule(saved), config]
        except ValueError:  # of a version that had other schedules
            return 0
        configs = [each.resolve_epochs(get_num_examples()) if each.train.total_epochs else each for each in configs]
        steps, peak = np.arange(max(each.total_steps for each in configs)), config.optimizer.learning_rate
        assert peak is not None, "`find_problems` reports a missing learning rate"
        schedules = [make_schedule(each.schedule.name, each.schedule, peak, each.total_steps) for each in configs]
        # As the update is computed: a constant schedule returns a Python number.
        former, present = (np.broadcast_to(np.float32(schedule(steps)), steps.shape) for schedule in schedules)
        differing = np.flatnonzero(former != present)
        return int(differing[0]) if differing.size else None

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
