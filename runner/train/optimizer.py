"""What a job trains with: optimizer and schedule of the library, or of its own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, get_args

import jax
import optax

from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.optim.config import READERS, OptimizerConfig, ScheduleConfig
from runner.optim.library import make_optimizer, make_schedule

SPEC = "spec"  # what a hook of a job returns for the one that the spec names


@dataclass(frozen=True)
class OptimizerChoice:
    """What a job trains with: names of the library, or objects of its own, which are taken as they stand.

    Made by `choose_optimizer`.
    """

    optimizer: str | optax.GradientTransformation
    schedule: str | optax.Schedule
    own_names: tuple[str, ...]  # `optimizer`, `schedule`: where the job says the library's name, and not the spec

    def build_schedule(
        self, config: TrainerConfig, counted: Callable[[], TrainerConfig] | None = None
    ) -> optax.Schedule | None:
        """The learning rate by completed steps; None where an optimizer of the job's own keeps it to itself.

        Of a total in epochs, `counted` gives the config with its steps. It is asked when a train step is traced:
        whoever only looks at a run traces none, and needs no data.
        """
        if callable(self.schedule):
            return self.schedule
        if not isinstance(self.optimizer, str):
            return None
        peak = config.optimizer.learning_rate
        assert peak is not None, "`find_problems` says that it is missing"
        name, rule = self.schedule, config.schedule
        if config.train.total_epochs is not None and counted is not None:
            return lambda step: make_schedule(name, rule, peak, counted().total_steps)(step)
        return make_schedule(name, rule, peak, config.total_steps)

    def build_optimizer(self, config: TrainerConfig, schedule: optax.Schedule | None, parameters: Any) -> Any:
        """The whole transformation: the library's, by the groups of the spec, or the job's own and nothing else.

        `parameters` is a tree of `Parameter`. Raises `InvalidError` where groups do not fit it.
        """
        if not isinstance(self.optimizer, str):
            if any(parameter.rate != 1 for parameter in jax.tree.leaves(parameters)):
                raise InvalidError("an optax object of the job's own does not read the rates of the model's parameters")
            return self.optimizer
        assert schedule is not None, "the library's optimizers have a schedule"
        return make_optimizer(self.optimizer, config.optimizer, schedule, parameters)

    def find_unread_keys(self) -> dict[str, str]:
        """Why nothing reads a key below `config`, by key. An object of the job's own may read any, through `config`."""
        found = {f"{section}.name": f"{section}() of the job names its own" for section in self.own_names}
        for key, readers in READERS.items():
            name = self.optimizer if key.startswith("optimizer.") else self.schedule
            if isinstance(self.optimizer, str) and isinstance(name, str) and name not in readers:
                found[key] = f"{name} does not read it, {' or '.join(readers)} would"
        return found

    def find_problems(self, config: TrainerConfig) -> dict[str, str]:
        """What is wrong with a key below `config`, by key: what nothing reads may stand at its default only."""
        found = {key: why for key, why in self.find_unread_keys().items() if not config.is_default(key)}
        is_rate_read = isinstance(self.optimizer, str) and isinstance(self.schedule, str)
        if is_rate_read and config.optimizer.learning_rate is None:
            found["optimizer"] = "missing key learning_rate"
        return found


def choose_optimizer(
    optimizer: str | optax.GradientTransformation, schedule: str | optax.Schedule | None, config: TrainerConfig
) -> OptimizerChoice:
    """What the hooks of a job return, with `SPEC` and None resolved. Raises `InvalidError` for a name that is none."""
    own_names: list[str] = []

    def resolved(hook: str, own: Any, spec: OptimizerConfig | ScheduleConfig) -> Any:
        if isinstance(own, str) and own == SPEC:
            return spec.name
        if isinstance(own, str) or own is None:
            names = get_args(type(spec).model_fields["name"].annotation)
            if own not in names:
                raise InvalidError(f"{hook}() of the job returns {own!r}, needs one of {', '.join(names)}")
            own_names.append(hook)
        return own

    schedule = "constant" if schedule is None else schedule
    chosen = resolved("optimizer", optimizer, config.optimizer), resolved("schedule", schedule, config.schedule)
    return OptimizerChoice(*chosen, tuple(own_names))
