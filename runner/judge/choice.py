"""The next token: from logits and a key, by temperature and top-p. Pure.

Noise belongs to ids, not to ranks: logits that differ by rounding give the same token, unless two are nearly equal.

Shape legend: V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from runner.errors import InvalidError

Choose = Callable[[jax.Array, int], jax.Array]


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most probable token.
        top_p: drawn is from the fewest, most probable tokens whose probabilities add up to this; 1: from all.
        seed: of the random keys; that of token i is `fold_in(key(seed), i)`.
    """

    temperature: float = 0.8
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise InvalidError(f"--temperature {self.temperature:g}: needs a number of at least 0")
        if not 0 < self.top_p <= 1:
            raise InvalidError(f"--top-p {self.top_p:g}: needs a number above 0, and at most 1")
        if not 0 <= self.seed < 1 << 32:
            raise InvalidError(f"--seed {self.seed}: needs a whole number of 0 to {(1 << 32) - 1}")

    def make_choose(self, num_ids: int) -> Choose:
        """`(logits_V, index of the token) -> id`, one of the first `num_ids`."""

        @jax.jit
        def choose(logits_V: jax.Array, index: jax.Array | int) -> jax.Array:
            logits_V = logits_V[:num_ids].astype(jnp.float32)
            if self.temperature == 0:
                return jnp.argmax(logits_V)
            key = jax.random.fold_in(jax.random.key(self.seed), index)
            return jax.random.categorical(key, keep_top(logits_V / self.temperature, self.top_p))

        return choose


def keep_top(logits_V: jax.Array, top_p: float) -> jax.Array:
    """`logits_V`, and -inf for all but the fewest most probable tokens whose probabilities add up to `top_p`."""
    if top_p == 1:
        return logits_V
    order_V = jnp.argsort(-logits_V)
    sorted_V = jax.nn.softmax(logits_V)[order_V]
    before_V = jnp.cumsum(sorted_V) - sorted_V
    is_kept_V = jnp.zeros(logits_V.shape, bool).at[order_V].set((before_V < top_p).at[0].set(True))
    return jnp.where(is_kept_V, logits_V, -jnp.inf)
