"""Train states of small models."""

from typing import Any

import flax.linen as nn
import jax

from runner.train.state import TrainState, make_state_from_variables


def make_state(model: nn.Module, key: jax.Array, tx: Any, *args: Any, **kwargs: Any) -> TrainState:
    """Return the state at step 0, from a random key and the arguments of `model.init`."""
    return make_state_from_variables(model, nn.unbox(model.init(key, *args, **kwargs)), tx)
