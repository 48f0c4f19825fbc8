"""The gradient-noise scale: the batch, in tokens, at which more data in a step begins to gain little.

McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A: of a gradient over n tokens the expected square is
|G|^2 + tr / n, with G the gradient over all data and tr the trace of its covariance for one token; from two sizes of
batch both follow, and their ratio is the scale tr / |G|^2.

The sizes here are the global batch and its two halves, by the order of its examples: figures that follow from the
trajectory, whatever devices and micro-batches a step is split over. The formulas of the paper then come to

    |G|^2 = g1 . g2,    tr = mean of n_i (|g_i|^2 - g1 . g2),    g_i the mean gradient over the n_i tokens of half i.

Both are averaged over steps, as each alone is noise, and then divided.
"""

from typing import Any

import jax
import jax.numpy as jnp

from runner.train.rider import Halves, Observation, Rider
from runner.train.variables import Meta

NOISE_SCALE = "noise_scale"


def make_noise_scale(decay: float) -> Rider:
    """The averages with this decay; their ratio, in tokens, is `noise_scale` of the step's row, if it is positive."""

    def init(params: Any) -> Any:
        return {"square": jnp.zeros((), jnp.float32), "trace": jnp.zeros((), jnp.float32)}

    def update(averages: Any, seen: Observation) -> tuple[Any, Meta]:
        assert seen.halves is not None, "the rider says that it sees them"
        found = estimates(seen.halves)
        are_known = jnp.all(seen.halves.counts > 0)  # a half of nothing but padding says nothing

        def moved(average: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(are_known, average + jnp.float32(1 - decay) * (value - average), average)

        after = jax.tree.map(moved, averages, found)
        scale = after["trace"] / after["square"]
        return after, {NOISE_SCALE: jnp.where((after["square"] > 0) & (scale > 0), scale, jnp.nan)}

    return Rider(NOISE_SCALE, init, update, sees_halves=True)


def estimates(halves: Halves) -> Any:
    """Of one step: the square of the gradient over all data, and the trace of the covariance for one token."""
    trace = jnp.mean(halves.counts * (halves.squares - halves.product))
    return {"square": halves.product, "trace": trace}
