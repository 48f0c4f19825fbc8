"""Exponential moving averages of the weights: float32, they lie as the parameters do, one for each decay.

Each begins as the parameters do, and moves with every step by its share of the way to the new ones. A step takes the
difference before the share, so that an average of parameters that stand still is these, to the bit.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from runner.train.rider import Observation, Rider
from runner.train.variables import Meta

EMA = "ema"


def make_ema(decays: Sequence[float]) -> Rider:
    """The averages with these decays, each in (0, 1): `average + (1 - decay) * (parameter - average)` in each step."""

    def init(params: Any) -> Any:
        return {str(decay): jax.tree.map(_own_copy, params) for decay in decays}

    def update(averages: Any, seen: Observation) -> tuple[Any, Meta]:
        return {str(decay): _moved(averages[str(decay)], seen.params, 1 - decay) for decay in decays}, {}

    return Rider(EMA, init, update)


def _own_copy(param: jax.Array) -> jax.Array:
    return jnp.array(param, jnp.float32, copy=True)  # both are donated to the step


def _moved(averages: Any, params: Any, share: float) -> Any:
    return jax.tree.map(
        lambda average, param: average + jnp.float32(share) * (param.astype(jnp.float32) - average), averages, params
    )
