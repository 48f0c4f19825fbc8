"""Optimizers and schedules by the names a spec uses, as optax objects.

Knows no model beyond which of its parameters are matrices.
"""

from typing import Any

import optax

from runner.config import OptimizerConfig, ScheduleConfig, TrainerConfig


def make_schedule(name: str | None, config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of completed steps; None is a constant."""
    final, warmup = config.final_learning_rate, config.warmup_steps
    rest = total_steps - warmup
    shapes: dict[str, Any] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "wsd": lambda: optax.linear_schedule(peak, final, config.decay_steps or 1, rest - (config.decay_steps or 1)),
    }
    shape = shapes[name or "constant"]()
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
        "adafactor": lambda: optax.adafactor(
            schedule, weight_decay_rate=config.weight_decay or None, weight_decay_mask=is_matrix
        ),
    }
    return transformations[name]()


def clip(optimizer: Any, clip_norm: float | None) -> Any:
    """Clip the gradient to a global norm before `optimizer` sees it."""
    return optimizer if clip_norm is None else optax.chain(optax.clip_by_global_norm(clip_norm), optimizer)


def choose_schedule(own: str | optax.Schedule | None, config: TrainerConfig) -> optax.Schedule:
    """The schedule that a job brings (`own`), or the one that it or the spec names."""
    if callable(own):
        return own
    return make_schedule(
        own or config.schedule.name, config.schedule, config.optimizer.learning_rate, config.total_steps
    )


def choose_optimizer(
    own: str | optax.GradientTransformation | None, config: TrainerConfig, schedule: optax.Schedule, is_matrix: Any
) -> Any:
    """The optimizer that a job brings (`own`), or the one that it or the spec names; the gradient is clipped before."""
    if own is None or isinstance(own, str):
        own = make_optimizer(own or config.optimizer.name, config.optimizer, schedule, is_matrix)
    return clip(own, config.optimizer.clip_norm)
