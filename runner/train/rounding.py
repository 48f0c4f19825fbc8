"""How a new parameter becomes one of a narrow type, where the sum with its update is float32. Pure."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

NEAREST = "nearest"
_ROUNDING = 0x726F756E  # folded into the key of the step: numbers of examples and of leaves are far below


def apply_stochastically(state: Any, grads: Any, key: jax.Array) -> Any:
    """`state.apply_gradients`, but that parameters of bfloat16 are rounded stochastically.

    `key` is that of the step. A leaf draws from its own, by its place among the parameters, one number for each of its
    elements: the bits depend on no mesh. All other types are as ever.
    """
    updates, opt_state = state.tx.update(grads, state.opt_state, state.params)
    key = jax.random.fold_in(key, _ROUNDING)
    params, structure = jax.tree.flatten(state.params)
    found = [
        round_stochastically(param.astype(jnp.float32) + update, jax.random.fold_in(key, number))
        if param.dtype == jnp.bfloat16
        else optax.apply_updates(param, update)
        for number, (param, update) in enumerate(zip(params, jax.tree.leaves(updates), strict=True))
    ]
    return state.replace(step=state.step + 1, params=jax.tree.unflatten(structure, found), opt_state=opt_state)


def round_stochastically(values: jax.Array, key: jax.Array) -> jax.Array:
    """Each of `values`, float32, as one of the two nearest bfloat16, so that the mean over keys is the value.

    The lower half of a word is how far the value is from the one towards zero, in 1/65536 of the way to the other: with
    16 random bits added, it carries into the upper half just as often. What is not finite is as ever.
    """
    words = lax.bitcast_convert_type(values, jnp.uint32)
    carried = words + jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    rounded = lax.bitcast_convert_type((carried >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), rounded, values.astype(jnp.bfloat16))
