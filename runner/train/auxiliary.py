"""The gradient-noise scale: the batch, in tokens, at which more data in a step begins to gain little.

McCandlish et al. 2018, https://arxiv.org/abs/1812.06162, appendix A: of a gradient over n tokens the expected square is
|G|^2 + tr / n, with G the gradient over all data and tr the trace of its covariance for one token; from two sizes of
batch both follow, and their ratio is the scale tr / |G|^2.

The sizes here are the global batch and its two halves, by the order of its examples: figures that follow from the
trajectory, whatever devices and micro-batches a step is split over. The formulas of the paper then come to

    |G|^2 = g1 . g2,    tr = mean of n_i (|g_i|^2 - g1 . g2),    g_i the mean gradient over the n_i tokens of half i.

Both are averaged over steps, as each alone is noise, and then divided.

Exponential moving averages of the weights: float32, they lie as the parameters do, one for each decay.

Each begins as the parameters do, and moves with every step by its share of the way to the new ones. A step takes the
difference before the share, so that an average of parameters that stand still is these, to the bit.

What the config of a trainer asks of its step besides gradients: riders, and how it rounds.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from runner.train.state import AuxiliaryState, HalfBatchGradients, Meta, StepObservation
from runner.train.step import NEAREST, StepOptions, norms_of_job

EMA = "ema"


def make_ema(decays: Sequence[float]) -> AuxiliaryState:
    """The averages with these decays, each in (0, 1): `average + (1 - decay) * (parameter - average)` in each step."""

    def init(params: Any) -> Any:
        return {str(decay): jax.tree.map(_own_copy, params) for decay in decays}

    def update(averages: Any, seen: StepObservation) -> tuple[Any, Meta]:
        return {str(decay): _moved(averages[str(decay)], seen.params, 1 - decay) for decay in decays}, {}

    return AuxiliaryState(EMA, init, update)


def _own_copy(param: jax.Array) -> jax.Array:
    return jnp.array(param, jnp.float32, copy=True)  # both are donated to the step


def _moved(averages: Any, params: Any, share: float) -> Any:
    return jax.tree.map(
        lambda average, param: average + jnp.float32(share) * (param.astype(jnp.float32) - average), averages, params
    )


NOISE_SCALE = "noise_scale"


def make_noise_scale(decay: float) -> AuxiliaryState:
    """The averages with this decay; their ratio, in tokens, is `noise_scale` of the step's row, if it is positive."""

    def init(params: Any) -> Any:
        return {"square": jnp.zeros((), jnp.float32), "trace": jnp.zeros((), jnp.float32)}

    def update(averages: Any, seen: StepObservation) -> tuple[Any, Meta]:
        assert seen.halves is not None, "the rider says that it sees them"
        found = estimates(seen.halves)
        are_known = jnp.all(seen.halves.counts > 0)  # a half of nothing but padding says nothing

        def moved(average: jax.Array, value: jax.Array) -> jax.Array:
            return jnp.where(are_known, average + jnp.float32(1 - decay) * (value - average), average)

        after = jax.tree.map(moved, averages, found)
        scale = after["trace"] / after["square"]
        return after, {NOISE_SCALE: jnp.where((after["square"] > 0) & (scale > 0), scale, jnp.nan)}

    return AuxiliaryState(NOISE_SCALE, init, update, needs_halves=True)


def estimates(halves: HalfBatchGradients) -> Any:
    """Of one step: the square of the gradient over all data, and the trace of the covariance for one token."""
    trace = jnp.mean(halves.counts * (halves.squares - halves.product))
    return {"square": halves.product, "trace": trace}


def make_auxiliary_states(job_class: Any) -> tuple[AuxiliaryState, ...]:
    """What rides along in the state of a trainer, whose class it is given: by default what `config` asks for.

    An experiment with auxiliary states of its own adds them to these:
    `return *super().auxiliary_states(), AuxiliaryState(...)`.
    """
    config = getattr(job_class, "config", None)  # a class alone, of which no job is made, has none
    if config is None:
        return ()
    found = [] if config.ema is None else [make_ema(config.ema.decays)]
    found += [] if config.noise_scale is None else [make_noise_scale(config.noise_scale.decay)]
    return tuple(found)


def make_step_options(job_class: Any) -> StepOptions:
    """Return the step options of a trainer, given its class."""
    config = getattr(job_class, "config", None)
    return StepOptions(
        update_variables=job_class.update_variables,
        auxiliary_states=tuple(job_class.auxiliary_states()),
        rounding=NEAREST if config is None else config.precision.rounding,
        norms=norms_of_job(job_class),
        num_groups=groups_of(job_class),
    )


def groups_of(job_class: Any) -> int | None:
    """`train.same_bits_devices` of a trainer, whose class it is given."""
    config = getattr(job_class, "config", None)
    return None if config is None else config.train.same_bits_devices
