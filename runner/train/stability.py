"""Stability policy: skip the update of a step whose gradient norm or loss is a spike, or is not finite.

The policy is an auxiliary state (`runner.train.auxiliary`) that judges each step inside the compiled program, so that
the host does not wait for it. A skipped update leaves parameters, variables, moments, averages and the other auxiliary
states as they were; the step itself counts, and so do learning-rate schedule, random key and position in the data.

**Spikes.** A value is a spike if it is more than `sigmas` standard deviations above the mean of the last `over_steps`
accepted steps; there is no spike before that many steps were accepted. This is the rule of OLMo-core and Levanter
(`SkipStepOptimizer`, `SkipStepConfig`), which begin at half of the window and keep skipped values in it. Here the
window holds accepted values only, so that a stretch of bad data cannot raise its own threshold; a lasting change of
level ends the run after `max_consecutive_skips` instead of being accepted.

The window holds the observed values themselves, and they are added in a fixed order. The decision is then the same on
any number of devices on which the values are the same (`train.same_bits_devices`).

Shape legend: N steps of the window.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from runner.config import StabilityConfig
from runner.metrics.meta import CONSECUTIVE_SKIPS, SKIPPED_UPDATES
from runner.train.auxiliary import AuxiliaryState, Scalars, StepOutcome

STABILITY = "stability"
_SKIPPED, _CONSECUTIVE, _ACCEPTED, _WINDOW = "skipped", "consecutive", "accepted", "window"


def make_stability(config: StabilityConfig) -> AuxiliaryState:
    """Return the policy of a config with `skips_updates`."""
    spike, skips_non_finite = config.spike, config.non_finite == "skip"

    def init(params: Any) -> Any:
        # Each leaf is an array of its own, because the step donates them.
        counts = {name: jnp.zeros((), jnp.int32) for name in (_SKIPPED, _CONSECUTIVE)}
        if spike is None:
            return counts
        return counts | {_ACCEPTED: jnp.zeros((), jnp.int32), _WINDOW: jnp.zeros(spike.over_steps, jnp.float32)}

    def judge(before: Any, outcome: StepOutcome) -> tuple[jax.Array, Any, Scalars]:
        is_finite = jnp.isfinite(outcome.loss) & jnp.isfinite(outcome.grad_norm)
        # With non_finite: stop the host ends the run, whatever becomes of the state.
        is_skipped = ~is_finite if skips_non_finite else jnp.bool_(False)
        after = {}
        if spike is not None:
            value = outcome.grad_norm if config.watches_grad_norm else outcome.loss
            is_skipped |= is_finite & is_spike(before[_WINDOW], before[_ACCEPTED], value, spike.sigmas)
            is_accepted = is_finite & ~is_skipped & outcome.has_target
            index_N = jnp.arange(spike.over_steps)
            is_oldest_N = is_accepted & (index_N == before[_ACCEPTED] % spike.over_steps)
            after[_WINDOW] = jnp.where(is_oldest_N, value, before[_WINDOW])
            after[_ACCEPTED] = before[_ACCEPTED] + is_accepted
        # A step without a target neither is skipped nor ends a series of skips.
        is_skipped &= outcome.has_target
        after[_SKIPPED] = before[_SKIPPED] + is_skipped
        following = jnp.where(is_skipped, before[_CONSECUTIVE] + 1, 0)
        after[_CONSECUTIVE] = jnp.where(outcome.has_target, following, before[_CONSECUTIVE])
        scalars = {SKIPPED_UPDATES: after[_SKIPPED], CONSECUTIVE_SKIPS: after[_CONSECUTIVE]}
        return ~is_skipped, after, scalars

    return AuxiliaryState(STABILITY, init, judge=judge)


def is_spike(window_N: jax.Array, num_accepted: jax.Array, value: jax.Array, sigmas: float) -> jax.Array:
    """Return True if `value` is more than `sigmas` standard deviations above the mean of a full window."""
    N = window_N.shape[0]
    mean = _sum_pairwise(window_N) / N
    # The barrier keeps XLA from fusing squares and sum to multiply-adds, which would depend on the code around them.
    squares_N = lax.optimization_barrier((window_N - mean) ** 2)
    deviation = jnp.sqrt(_sum_pairwise(squares_N) / (N - 1))
    # Equal values have no scale by which another could be judged.
    return (num_accepted >= N) & (deviation > 0) & (value - mean > jnp.float32(sigmas) * deviation)


def _sum_pairwise(values_N: jax.Array) -> jax.Array:
    """Return the sum, added in an order that does not depend on how it is compiled."""
    while (N := values_N.shape[0]) > 1:
        half = -(-N // 2)
        values_N = values_N[:half] + jnp.pad(values_N[half:], (0, 2 * half - N))
    return values_N[0]
