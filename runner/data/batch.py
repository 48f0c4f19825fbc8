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
    examples = _examples_here(sharding, (S, B, T))
    rows = _read(dataset, split, step * S * B, examples)

    def shard(field: str, index: tuple[slice, ...]) -> np.ndarray:
        numbers = np.arange(S * B).reshape(S, B)[index[:2]]
        return rows[field][np.searchsorted(examples, numbers)][:, :, index[2]]

    return {
        field: jax.make_array_from_callback((S, B, T), sharding, functools.partial(shard, field))
        for field in dataset.fields
    }


def _examples_here(sharding: Sharding, shape: tuple[int, int, int]) -> np.ndarray:
    """The numbers in the step of the examples that this host's devices hold, ascending."""
    numbers = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    held = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([numbers[index[:2]].ravel() for index in held if index is not None]))


def _read(dataset: Dataset, split: str, first: int, examples: np.ndarray) -> Rows:
    """The rows of these examples of the step that begins with example `first`: as few reads as there are stretches.

    A bucket answers a read of many rows about as soon as one of a single row.
    """
    stretches = np.split(examples, np.flatnonzero(np.diff(examples) > 1) + 1)
    found = [dataset.rows(split, first + int(stretch[0]), len(stretch)) for stretch in stretches]
    return (
        found[0] if len(found) == 1 else {field: np.concatenate([rows[field] for rows in found]) for field in found[0]}
    )
