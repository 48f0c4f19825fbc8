"""How probable a text is after another, in nats, by a model of tokens.

As lm-evaluation-harness counts it (https://github.com/EleutherAI/lm-evaluation-harness, `lm_eval/api/model.py`): spaces
at the end of the context belong to what follows; both are encoded as one text, and what follows is the ids behind those
of the context alone; of what is longer than the model's sequence the end is read; an empty context is the token that a
text begins after (and where what follows begins with that, it is the context).

Shape legend: B rows of a batch, T sequence length, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.judge.decode import variables_of, whole
from runner.train.mesh import BATCH_AXES, num_batch_shards, sharding_rules


class Pair(NamedTuple):
    """The ids of a text, and of what may follow it; neither is empty."""

    context: Sequence[int]
    following: Sequence[int]


class Likely(NamedTuple):
    """How probable what follows is, and whether it is what the most probable token at each place makes."""

    log_likelihood: float
    is_greedy: bool


def encode_pair(encode: Callable[[str], Sequence[int]], first: int, context: str, following: str) -> Pair:
    """The ids of both. `first` is the token that a text begins after."""
    num_spaces = len(context) - len(context.rstrip())
    if num_spaces:
        context, following = context[:-num_spaces], context[-num_spaces:] + following
    if not context:
        ids = list(encode(following))
        return Pair(ids[:1], ids[1:]) if ids[0] == first else Pair([first], ids)
    before = list(encode(context))
    return Pair(before, list(encode(context + following))[len(before) :])


class Likelihood:
    """Of the model's weights on `mesh`, by one program. Made and called on every host, with the same pairs.

    `rows_per_device` are read at once. `is_stopping` says between batches whether the job was asked to stop.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, length: int, rows_per_device: int, is_stopping: Callable[[], bool]
    ):
        self._mesh, self._length, self._is_stopping = mesh, length, is_stopping
        self._num_rows = rows_per_device * num_batch_shards(mesh)

        @jax.jit
        def score(variables: Any, x_BxT: Any, y_BxT: Any, mask_BxT: Any) -> tuple[jax.Array, jax.Array]:
            logits_BxTxV: Any = model.apply(variables, x_BxT, deterministic=True)
            logits_BxTxV = logits_BxTxV.astype(jnp.float32)
            is_label_BxTxV = jnp.arange(logits_BxTxV.shape[-1]) == y_BxT[..., None]
            label_BxT = jnp.sum(jnp.where(is_label_BxTxV, logits_BxTxV, 0), axis=-1)
            log_p_BxT = label_BxT - jax.nn.logsumexp(logits_BxTxV, axis=-1)
            is_best_BxT = jnp.argmax(logits_BxTxV, axis=-1) == y_BxT
            sum_B = jnp.sum(jnp.where(mask_BxT, log_p_BxT, 0), axis=-1)
            return whole(sum_B, mesh), whole(jnp.all(is_best_BxT | ~mask_BxT, axis=-1), mesh)

        self._score = score

    def of(self, weights: Any, pairs: Sequence[Pair]) -> list[Likely] | None:
        """The likelihood of each pair; None if the job was asked to stop. `weights` are those of a checkpoint."""
        variables, found = variables_of(weights), []
        for first in range(0, len(pairs), self._num_rows):
            if self._is_stopping():
                return None
            some = pairs[first : first + self._num_rows]
            with sharding_rules(self._mesh):
                sums, is_greedy = jax.device_get(self._score(variables, *self._batch(some)))
            found += [Likely(float(a), bool(b)) for a, b in zip(sums, is_greedy, strict=True)][: len(some)]
        return found

    def _batch(self, pairs: Sequence[Pair]) -> Iterator[jax.Array]:
        """x, y and mask (B, T); rows that are too many hold nothing."""
        shape = self._num_rows, self._length
        x, y, mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.bool_)
        for row, pair in enumerate(pairs):
            ids = [*pair.context, *pair.following][-(self._length + 1) :]
            end = len(ids) - 1
            x[row, :end], y[row, :end] = ids[:-1], ids[1:]
            mask[row, max(0, end - len(pair.following)) : end] = True
        sharding = NamedSharding(self._mesh, PartitionSpec(BATCH_AXES))
        for array in (x, y, mask):
            yield jax.make_array_from_callback(shape, sharding, array.__getitem__)
