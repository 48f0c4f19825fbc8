"""One step's examples as global arrays. Knows shardings, not where the data comes from.

Shape legend: S accumulation steps, B examples of one micro-batch over all devices, T sequence length. Example r of a
step sits at [r // B, r % B]: which examples a step holds depends on S * B alone, and on no device or host.
"""

import functools

import jax
import numpy as np
from jax.sharding import Sharding

from runner.data.dataset import Dataset
from runner.data.packing import Rows


def global_batch(
    dataset: Dataset, split: str, step: int, *, accumulate_steps: int, micro_batch: int, sharding: Sharding
) -> dict[str, jax.Array]:
    """Return the data set's fields, each (S, B, T), of the step that follows `step` completed ones.

    Called on every host. Each reads only the rows that its devices hold, and each of them once: devices that
    replicate a row, and the arrays of a batch, share the read. `sharding` is that of all of them. Raises ValueError if
    there is no such split.
    """
    dataset.refuse_split(split)
    S, B, T = accumulate_steps, micro_batch, dataset.sequence_length
    first = step * S * B

    @functools.cache
    def read(micro: int, start: int, count: int) -> Rows:
        return dataset.rows(split, first + micro * B + start, count)

    def shard(field: str, index: tuple[slice, ...]) -> np.ndarray:
        micros, rows, positions = range(S)[index[0]], range(B)[index[1]], index[2]
        return np.stack([read(micro, rows.start, len(rows))[field][:, positions] for micro in micros])

    return {
        field: jax.make_array_from_callback((S, B, T), sharding, functools.partial(shard, field))
        for field in dataset.fields
    }
