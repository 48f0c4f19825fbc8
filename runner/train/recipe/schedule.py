"""The learning rate by completed steps: a linear warm-up from 0, and a shape after it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from runner.recipe import ScheduleConfig


def make_schedule(name: str, config: ScheduleConfig, peak: float, total_steps: int) -> optax.Schedule:
    """Return the learning rate as a function of completed steps. After the end it stays what it is there."""
    final, warmup = config.final_learning_rate, config.warmup_of(total_steps)
    rest = total_steps - warmup
    shapes: dict[str, Callable[[], optax.Schedule]] = {
        "constant": lambda: optax.constant_schedule(peak),
        "linear": lambda: optax.linear_schedule(peak, final, rest),
        "cosine": lambda: optax.cosine_decay_schedule(peak, rest, alpha=final / peak),
        "cosine_restarts": lambda: _cosine_restarts(peak, final, rest, config.cycles),
        "polynomial": lambda: optax.polynomial_schedule(peak, final, config.power, rest),
        "wsd": lambda: optax.linear_schedule(peak, final, config.decay_steps or 1, rest - (config.decay_steps or 1)),
        "inverse_square_root": lambda: _inverse_square_root(peak, warmup),
    }
    shape = shapes[name]()
    if warmup == 0:
        return shape
    return optax.join_schedules([optax.linear_schedule(0.0, peak, warmup), shape], [warmup])


def _cosine_restarts(peak: float, final: float, steps: int, cycles: int) -> optax.Schedule:
    """Half waves from the peak to the end, all of one length."""

    def rate(count: jax.Array) -> jax.Array:
        share = (count * cycles % steps) / steps  # of the cycle at hand, by whole numbers, so that a restart is one
        rate = final + (peak - final) * 0.5 * (1 + jnp.cos(jnp.pi * share))
        return jnp.where(jnp.asarray(count) < steps, rate, final)

    return rate


def _inverse_square_root(peak: float, warmup: int) -> optax.Schedule:
    """The peak at the end of the warm-up, and half of it after four times as many steps."""
    return lambda count: peak * jnp.sqrt(warmup / (jnp.maximum(count, 0) + warmup))
