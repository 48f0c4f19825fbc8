"""Token after token, each from those before it, as far as the model's sequence length reaches.

The window holds the tokens that the next one is made from: at first the last `length` of the prompt, then each new one
too. When it is full, its last half stays, as a text of its own that begins there. So a text may become as long as one
likes, and what is read anew is a few tokens for each that is made.

A model with `init_cache` reads each token once: see `experiments.gpt`. Any other reads its whole row for each token,
padded to one length, so that it is compiled once.

Shape legend: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from runner.errors import InvalidError
from runner.judge.choice import Choose
from runner.train.mesh import num_batch_shards, sharding_rules

CHUNK_TOKENS = 256  # of a prompt that are read at a time, so that their logits stay few

# (window, how many of its last tokens are new) -> logits_V of the token after it, in float32
Reader = Callable[[Sequence[int], int], jax.Array]


def generate(read: Reader, choose: Choose, prompt: Sequence[int], num_tokens: int, length: int) -> Iterator[int]:
    """The `num_tokens` ids after `prompt`, which has at least one; see the top of this file for `length`."""
    window = list(prompt[-length:])
    num_new = len(window)
    for index in range(num_tokens):
        token = int(choose(read(window, num_new), index))
        yield token
        window, num_new = [*window, token], 1
        if len(window) > length:
            window = window[-max(1, length // 2) :]
            num_new = len(window)


def make_reader(
    model: nn.Module, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh
) -> "CachedReader | PlainReader":
    """What reads tokens with a model: by its cache, of `dtype`, if it can make one. `weights` lie on `mesh`."""
    if hasattr(model, "init_cache"):
        return CachedReader(model, weights, length, dtype, mesh)
    return PlainReader(model, weights, length, mesh)


class CachedReader:
    """Reads what is new, and keeps of it what later tokens look at."""

    def __init__(self, model: Any, weights: Any, length: int, dtype: DTypeLike, mesh: Mesh):
        self._mesh, self._chunk = mesh, min(CHUNK_TOKENS, length)
        # Whole chunks: the last one may be padded, and what it writes behind the window is never seen.
        places = -(-length // self._chunk) * self._chunk
        self._make_cache = lambda: model.init_cache(num_batch_shards(mesh), places, dtype)
        self._weights, self._cache = weights, None if weights is None else self._make_cache()

        def step(weights: Any, cache: Any, tokens_BxT: jax.Array, start: jax.Array, last: jax.Array) -> Any:
            logits_BxTxV, cache = model.apply(weights, tokens_BxT, cache=cache, start=start, deterministic=True)
            return whole(logits_BxTxV[0, last].astype(jnp.float32), mesh), cache

        self._step = jax.jit(step, donate_argnums=1)

    def use(self, weights: Any) -> None:
        """Read with other weights from now on; with None, hold none, and no memory, until the next."""
        self._weights = weights
        self._cache = None if weights is None else self._make_cache()

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """See `Reader`."""
        T = 1 if num_new == 1 else self._chunk
        logits_V = None
        for start in range(len(window) - num_new, len(window), T):
            tokens = window[start : start + T]
            tokens_BxT, place = _rows(tokens, T, self._mesh), (np.int32(start), np.int32(len(tokens) - 1))
            with sharding_rules(self._mesh):
                logits_V, self._cache = self._step(self._weights, self._cache, tokens_BxT, *place)
        assert logits_V is not None, "a window has a token"
        return logits_V


class PlainReader:
    """Reads the whole window each time."""

    def __init__(self, model: nn.Module, weights: Any, length: int, mesh: Mesh):
        self._weights, self._length, self._mesh = weights, length, mesh

        @jax.jit
        def step(weights: Any, tokens_BxT: jax.Array, last: jax.Array) -> jax.Array:
            logits_BxTxV: Any = model.apply(weights, tokens_BxT, deterministic=True)
            return whole(logits_BxTxV[0, last].astype(jnp.float32), mesh)

        self._step = step

    def use(self, weights: Any) -> None:
        """Read with other weights from now on; with None, hold none until the next."""
        self._weights = weights

    def __call__(self, window: Sequence[int], num_new: int) -> jax.Array:
        """See `Reader`."""
        with sharding_rules(self._mesh):
            return self._step(self._weights, _rows(window, self._length, self._mesh), np.int32(len(window) - 1))


def _rows(tokens: Sequence[int], length: int, mesh: Mesh) -> np.ndarray:
    """A row of `length`, padded at its end, since no token sees one after it; once for each device that shares a batch.

    Over several devices only weights are to be cut. Then each reads the same row.
    """
    row = np.zeros(length, np.int32)
    row[: len(tokens)] = tokens
    return np.tile(row, (num_batch_shards(mesh), 1))


def whole(array: jax.Array, mesh: Mesh) -> jax.Array:
    """A copy on every device, so that every process can look at it. For traced code."""
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, PartitionSpec()))


def variables_of(weights: Any) -> Any:
    """What a model is applied to: the parameters, and by collection what else it has."""
    return {"params": weights["params"], **weights.get("variables", {})}


def vocabulary_size_of(model: nn.Module, weights: Any, length: int) -> int:
    """V, by the logits of one row; `weights` may be abstract. Raises `InvalidError` if the model returns no logits."""
    tokens_BxT = jax.ShapeDtypeStruct((1, length), jnp.int32)
    found: Any = jax.eval_shape(
        lambda weights, tokens: model.apply(weights, tokens, deterministic=True), weights, tokens_BxT
    )
    if not isinstance(found, jax.ShapeDtypeStruct) or found.shape[:2] != (1, length) or len(found.shape) != 3:
        what = f"an array of {found.shape}" if isinstance(found, jax.ShapeDtypeStruct) else f"a {type(found).__name__}"
        raise InvalidError(
            f"{type(model).__name__} returns {what} for tokens (1, {length}); a model of tokens returns logits "
            f"(1, {length}, V)"
        )
    return int(found.shape[2])
