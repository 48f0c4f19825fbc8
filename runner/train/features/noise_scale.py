"""Gradient-noise scale (`config.noise_scale`).

The gradient-noise scale is the batch size, in tokens, above which more data per step gains little
(McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A). The expected squared norm of a gradient over n
tokens is |G|^2 + tr / n, with G the gradient over all data and tr the trace of its covariance for one token; two batch
sizes determine both, and their ratio tr / |G|^2 is the scale. The two batch sizes used here are the global batch and
each of its two halves, in the order of its examples, so that the result does not depend on devices or micro-batches.
The formulas of the paper then become

    |G|^2 = g1 . g2,    tr = mean of n_i (|g_i|^2 - g1 . g2),    g_i the mean gradient over the n_i tokens of half i.

A single estimate is very noisy, so both are averaged over steps before they are divided.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.train.auxiliary import AuxiliaryState, Scalars, StepObservation
from runner.train.feature import Feature

NOISE_SCALE = "noise_scale"


class NoiseScale(Feature):
    """Gradient-noise scale in tokens, as the metric `train/noise_scale`."""

    key = NOISE_SCALE

    @staticmethod
    def is_on(config: TrainerConfig[Any]) -> bool:
        """Return True if the config asks for the noise scale."""
        return config.noise_scale is not None

    def make_auxiliary(self) -> AuxiliaryState:
        """Return the running averages from which the scale is computed."""
        assert self.config.noise_scale is not None, "the feature is on"
        return make_noise_scale(self.config.noise_scale.decay)

    def select_micro_batches(self, sizes: Sequence[int], num_shards: int) -> list[int]:
        """Return the sizes that make an even number of micro-batches.

        The first half of the batch is the first half of the micro-batches.
        """
        examples = self.config.train.global_batch_examples
        share, smallest = examples // num_shards, sizes[0]
        even = [size for size in sizes if share // size % 2 == 0]
        if not even:
            split = f"{examples} examples over {num_shards} devices, micro_batch_examples={smallest}"
            fix = f"micro_batch_examples={share // 2}" if share % 2 == 0 else f"multiples of {2 * num_shards} examples"
            raise InvalidError(
                f"noise_scale compares two halves of each batch, and needs an even number of micro-batches; {split} "
                f"make {share // smallest}; use {fix}"
            )
        return even


def make_noise_scale(decay: float) -> AuxiliaryState:
    """Return running averages with this decay; their ratio, if positive, is the metric `noise_scale` in tokens."""

    def init(params: Any) -> Any:
        return {"square": jnp.zeros((), jnp.float32), "trace": jnp.zeros((), jnp.float32)}

    def update(averages: Any, observation: StepObservation) -> tuple[Any, Scalars]:
        halves = observation.halves
        assert halves is not None, "an auxiliary state with needs_halves gets them"
        trace = jnp.mean(halves.counts * (halves.squares - halves.product))
        estimates = {"square": halves.product, "trace": trace}
        is_known = jnp.all(halves.counts > 0)  # a half that holds only padding has no gradient

        def move(average: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(is_known, average + jnp.float32(1 - decay) * (value - average), average)

        after = jax.tree.map(move, averages, estimates)
        scale = after["trace"] / after["square"]
        return after, {NOISE_SCALE: jnp.where((after["square"] > 0) & (scale > 0), scale, jnp.nan)}

    return AuxiliaryState(NOISE_SCALE, init, update, needs_halves=True)
