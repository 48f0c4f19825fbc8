"""The learning rate of an optax object of a job's own, where it keeps that in its state: `optax.inject_hyperparams`."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

_RATE = "learning_rate"


def injected_rate(opt_state: Any) -> jax.Array | None:
    """The rate of the update that this state comes from, a float32 scalar; None if none is kept, or several are.

    To be traced. An optimizer that keeps its rate to itself in a function, or has several by groups, shows none.
    """

    def is_injected(node: Any) -> bool:
        return isinstance(node, optax.InjectHyperparamsState | optax.InjectStatefulHyperparamsState)

    nodes = [node for node in jax.tree.leaves(opt_state, is_leaf=is_injected) if is_injected(node)]
    rates = [node.hyperparams[_RATE] for node in nodes if _RATE in node.hyperparams]
    is_scalar = len(rates) == 1 and jnp.shape(rates[0]) == ()
    return jnp.asarray(rates[0], jnp.float32) if is_scalar else None
