"""Choice of optimizer and schedule: those of the library that the spec names, or objects of the job's own.

`config.optimizer.learning_rate` takes this way from YAML to optax: `OptimizerConfig` (runner.optim.config) -> here
`OptimizerChoice.build_schedule` -> `make_schedule` (runner.optim.library) -> `OptimizerChoice.build_optimizer` ->
`make_optimizer` (runner.optim.library). `TrainSetupBuilder.build_on_mesh` makes both calls.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import optax

from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.optim.config import READERS, OptimizerConfig, ScheduleConfig
from runner.optim.library import make_optimizer, make_schedule

SPEC = "spec"  # `BaseTrainer.optimizer` and `schedule` return it for the name in the spec


@dataclass(frozen=True)
class OptimizerChoice:
    """Optimizer and schedule of a job. Made by `choose_optimizer`.

    Attributes:
        optimizer: library name, or an optax transformation of the job's own, to which nothing is added.
        schedule: library name, or an optax schedule of the job's own.
        overridden: `optimizer`, `schedule`: those for which the job returns a library name instead of the spec's.
    """

    optimizer: str | optax.GradientTransformation
    schedule: str | optax.Schedule
    overridden: tuple[str, ...]

    def build_schedule(
        self, config: TrainerConfig, get_config_in_steps: Callable[[], TrainerConfig] | None = None
    ) -> optax.Schedule | None:
        """Return the learning rate by completed steps; None if an optimizer of the job's own has its own.

        Args:
            config: config of the trainer.
            get_config_in_steps: function that returns the config with a total in steps, for a total in epochs. It reads
                the data, and is called only when a train step is traced: read-only tools trace none and need no data.
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
        """Return the whole transformation: the library's with the groups of the spec, or the job's own unchanged.

        `parameters` is a tree of `Parameter`. Raises `InvalidError` if groups or learning-rate multipliers do not fit.
        """
        if not isinstance(self.optimizer, str):
            if any(parameter.rate != 1 for parameter in jax.tree.leaves(parameters)):
                raise InvalidError(
                    "an optax object of the job's own does not read the learning-rate multipliers of the model's "
                    "parameters; use an optimizer of the library, or multipliers of 1"
                )
            return self.optimizer
        assert schedule is not None, "the library's optimizers have a schedule"
        return make_optimizer(self.optimizer, config.optimizer, schedule, parameters)

    def find_unread_keys(self) -> dict[str, str]:
        """Return the unread keys below `config` and why; an object of the job's own may read any of them."""
        found = {f"{section}.name": f"{section}() of the job names its own" for section in self.overridden}
        for key, readers in READERS.items():
            name = self.optimizer if key.startswith("optimizer.") else self.schedule
            if isinstance(self.optimizer, str) and isinstance(name, str) and name not in readers:
                found[key] = f"{name} does not read it, {' or '.join(readers)} would"
        return found

    def find_problems(self, config: TrainerConfig) -> dict[str, str]:
        """Return by key below `config` what is wrong with it: an unread key must have its default value."""
        found = {key: why for key, why in self.find_unread_keys().items() if not config.is_default(key)}
        is_rate_read = isinstance(self.optimizer, str) and isinstance(self.schedule, str)
        if is_rate_read and config.optimizer.learning_rate is None:
            found["optimizer"] = "missing key learning_rate"
        return found


def choose_optimizer(
    optimizer: str | optax.GradientTransformation, schedule: str | optax.Schedule | None, config: TrainerConfig
) -> OptimizerChoice:
    """Resolve what `optimizer` and `schedule` of a job return, `SPEC` and None included.

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
