"""Batches: the examples of a step as global arrays, made ahead on a thread.

Shape legend: S accumulation steps, B examples of one micro-batch over all devices, T sequence length. Example r of a
step stands at [r // B, r % B]. The examples of a step therefore depend on S * B alone, and on no device or host.

Nothing here holds a position that must survive: any step is found by its number.
"""

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Generator, Iterator
from types import TracebackType
from typing import Generic, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from runner.data.dataset import Dataset

DEPTH = 2  # the batch that is needed next, and one more to cover a slow read
CLOSE_SECONDS = 5.0

T = TypeVar("T")


def load_global_batch(
    dataset: Dataset, split: str, step: int, *, accumulate_steps: int, micro_batch: int, sharding: Sharding
) -> dict[str, jax.Array]:
    """Return the batch of the step that follows `step` completed steps: each field of the data set, (S, B, T).

    Called on every host. Each host reads only the sequences on its devices, and each of them once: devices that hold
    replicas of a sequence, and the arrays of the batch, share the read.

    Args:
        dataset: data set to read.
        split: `train`, or the name of a validation set.
        step: number of completed steps.
        accumulate_steps: S.
        micro_batch: B.
        sharding: sharding of all arrays of the batch.

    Raises:
        ValueError: there is no such split.
    """
    dataset.validate_split(split)
    shape = S, B, _ = accumulate_steps, micro_batch, dataset.sequence_length
    numbers_SxB = np.arange(S * B).reshape(S, B)
    indices = sharding.addressable_devices_indices_map(shape).values()
    # Examples whose arrays are on devices of this host; replicas and both parts of a sharded sequence count once.
    local = np.unique(np.concatenate([numbers_SxB[index[:2]].ravel() for index in indices if index is not None]))

    # Adjacent examples are read together, because a bucket answers a read of many sequences about as soon as one of a
    # single sequence.
    first = step * S * B
    stretches = np.split(local, np.flatnonzero(np.diff(local) > 1) + 1)
    found = [dataset.read(split, first + int(stretch[0]), len(stretch)) for stretch in stretches]
    if len(found) == 1:
        sequences = found[0]
    else:
        sequences = {field: np.concatenate([part[field] for part in found]) for field in found[0]}

    def get_shard(field: str, index: tuple[slice, ...]) -> np.ndarray:
        return sequences[field][np.searchsorted(local, numbers_SxB[index[:2]])][:, :, index[2]]

    return {
        field: jax.make_array_from_callback(shape, sharding, functools.partial(get_shard, field))
        for field in dataset.fields
    }


class Prefetcher(Generic[T]):
    """Iterator over the items of a generator, which a thread makes at most `depth` items ahead.

    An error of the generator is raised by the `next` that would have returned its item, and by every later one. The
    generator is closed on the thread, where it has run. The thread is a daemon, so that a read that hangs cannot keep a
    dying process alive.
    """

    def __init__(self, items: Generator[T], depth: int = DEPTH) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_exhausted = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._is_exhausted or self._is_closed)
            if self._ready and not self._is_closed:
                self._changed.notify_all()
                return self._ready.popleft()
            # Items made before the error are returned first.
            if self._error is not None and not self._is_closed:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """Stop the thread and drop its items. Waits for the item in progress, but not for a read that hangs."""
        with self._changed:
            self._is_closed = True
            self._ready.clear()
            self._changed.notify_all()
        # The wait is bounded, because the read in progress may hang.
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._items):
                for item in self._items:
                    with self._changed:
                        if not self._is_closed:
                            self._ready.append(item)
                            self._changed.notify_all()
                        # The next item is begun only when there is room for it.
                        self._changed.wait_for(lambda: len(self._ready) < self._depth or self._is_closed)
                        if self._is_closed:
                            break
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        with self._changed:
            self._error, self._is_exhausted = error, True
            self._changed.notify_all()
