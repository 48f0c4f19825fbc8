"""Optimizers and schedules by the names a spec uses, as optax objects; and which of them a job trains with.

Knows no model beyond which of its parameters are matrices.
"""

from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import optax

from runner.config import READERS, OptimizerConfig, ScheduleConfig, TrainerConfig
from runner.errors import InvalidError

SPEC = "spec"  # what a hook of a job returns for the one that the spec names


def make_schedule(name: str, config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of completed steps."""
    final, warmup = config.final_learning_rate, config.warmup_steps
    rest = total_steps - warmup
    shapes: dict[str, Any] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "wsd": lambda: optax.linear_schedule(peak, final, config.decay_steps or 1, rest - (config.decay_steps or 1)),
    }
    shape = shapes[name]()
    if warmup == 0:
        return shape
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), shape], [warmup])


def make_optimizer(name: str, config: OptimizerConfig, schedule: optax.Schedule, is_matrix: Any) -> Any:
    """Return the optax transformation `name`; `is_matrix` is a pytree of bools: the parameters that decay."""
    decay = {"weight_decay": config.weight_decay, "mask": is_matrix}
    transformations: dict[str, Any] = {
        "adamw": lambda: optax.adamw(schedule, config.b1, config.b2, config.eps, **decay),
        "lion": lambda: optax.lion(schedule, config.b1, config.b2, **decay),
        "sgd": lambda: optax.chain(
            optax.add_decayed_weights(config.weight_decay, is_matrix), optax.sgd(schedule, config.momentum)
        ),
        "adafactor": lambda: _adafactor(config.weight_decay, schedule, is_matrix),
    }
    return transformations[name]()


def _adafactor(weight_decay: float, schedule: optax.Schedule, is_matrix: Any) -> optax.GradientTransformation:
    """Adafactor whose decay is multiplied by the rate: that of optax comes after the rate, and is a share of a step."""
    inner = optax.adafactor(schedule)
    if weight_decay == 0:
        return inner

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        decay = weight_decay * schedule(state[0].count)  # the first part of the chain counts the updates before this
        updates, state = inner.update(grads, state, params)

        def decayed(update: jax.Array, param: jax.Array, is_matrix: bool) -> jax.Array:
            return update - decay * param if is_matrix else update

        return jax.tree.map(decayed, updates, params, is_matrix), state

    return optax.GradientTransformation(inner.init, update)


def in_float32(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """`optimizer`, shown float32 parameters whatever type they are stored in.

    So its state and its updates are float32 from the first step on, like the gradients. The new parameter is the sum
    of the old one and the update, made in float32 and rounded to the nearest value of the parameter's own type.
    """

    def widened(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if _is_narrow(leaf) else leaf, params)

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        return optimizer.update(grads, state, widened(params))

    return optax.GradientTransformation(lambda params: optimizer.init(widened(params)), update)


def _is_narrow(leaf: jax.Array) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.dtype.itemsize < 4


def clip(optimizer: Any, clip_norm: float | None) -> Any:
    """Clip the gradient to a global norm before `optimizer` sees it."""
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


@dataclass(frozen=True)
class Recipe:
    """What a job trains with: names of the library, or objects of its own, which are taken as they stand.

    Made by `choose_recipe`.
    """

    optimizer: str | optax.GradientTransformation
    schedule: str | optax.Schedule
    own_names: tuple[str, ...]  # `optimizer`, `schedule`: where the job says the library's name, and not the spec

    def schedule_of(self, config: TrainerConfig) -> optax.Schedule | None:
        """The learning rate by completed steps; None where an optimizer of the job's own keeps it to itself."""
        if callable(self.schedule):
            return self.schedule
        if not isinstance(self.optimizer, str):
            return None
        peak = config.optimizer.learning_rate
        assert peak is not None, "`problems` says that it is missing"
        return make_schedule(self.schedule, config.schedule, peak, config.total_steps)

    def optimizer_of(self, config: TrainerConfig, schedule: optax.Schedule | None, is_matrix: Any) -> Any:
        """The whole transformation: the library's, behind a clip of the gradient, or the job's own and nothing else."""
        if not isinstance(self.optimizer, str):
            return self.optimizer
        assert schedule is not None, "the library's optimizers have a schedule"
        return clip(make_optimizer(self.optimizer, config.optimizer, schedule, is_matrix), config.optimizer.clip_norm)

    def unread(self) -> dict[str, str]:
        """Why nothing reads a key below `config`, by key. An object of the job's own may read any, through `config`."""
        found = {f"{section}.name": f"{section}() of the job names its own" for section in self.own_names}
        for key, readers in READERS.items():
            name = self.optimizer if key.startswith("optimizer.") else self.schedule
            if isinstance(self.optimizer, str) and isinstance(name, str) and name not in readers:
                found[key] = f"{name} does not read it, {' or '.join(readers)} would"
        return found

    def problems(self, config: TrainerConfig) -> dict[str, str]:
        """What is wrong with a key below `config`, by key: what nothing reads may stand at its default only."""
        found = {key: why for key, why in self.unread().items() if not config.is_default(key)}
        is_rate_read = isinstance(self.optimizer, str) and isinstance(self.schedule, str)
        if is_rate_read and config.optimizer.learning_rate is None:
            found["optimizer"] = "missing key learning_rate"
        return found


def choose_recipe(
    optimizer: str | optax.GradientTransformation, schedule: str | optax.Schedule | None, config: TrainerConfig
) -> Recipe:
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
    return Recipe(*chosen, tuple(own_names))
