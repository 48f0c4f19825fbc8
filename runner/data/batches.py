"""What a generator yields, made ahead on a thread, such as batches. It holds no position that must survive.

One step's examples as global arrays. Knows shardings, not where the data comes from.

Shape legend: S accumulation steps, B examples of one micro-batch over all devices, T sequence length. Example r of a
step sits at [r // B, r % B]: which examples a step holds depends on S * B alone, and on no device or host.
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
from runner.data.packing import Sequences


def load_global_batch(
    dataset: Dataset, split: str, step: int, *, accumulate_steps: int, micro_batch: int, sharding: Sharding
) -> dict[str, jax.Array]:
    """Return the data set's fields, each (S, B, T), of the step that follows `step` completed ones.

    Called on every host. Each reads only the rows that its devices hold, and each of them once: devices that
    replicate a row, and the arrays of a batch, share the read. `sharding` is that of all of them. Raises ValueError if
    there is no such split.
    """
    dataset.validate_split(split)
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


def _read(dataset: Dataset, split: str, first: int, examples: np.ndarray) -> Sequences:
    """The rows of these examples of the step that begins with example `first`: as few reads as there are stretches.

    A bucket answers a read of many rows about as soon as one of a single row.
    """
    stretches = np.split(examples, np.flatnonzero(np.diff(examples) > 1) + 1)
    found = [dataset.read(split, first + int(stretch[0]), len(stretch)) for stretch in stretches]
    return (
        found[0] if len(found) == 1 else {field: np.concatenate([rows[field] for rows in found]) for field in found[0]}
    )


DEPTH = 2  # the batch that is needed next, and one more to ride out a slow read
CLOSE_SECONDS = 5.0

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Yields the items of a generator, made at most `depth` ahead; it is closed where it has run, on the thread.

    What the generator raises is raised by the `next` that would have returned its item, and by every later one. The
    thread is a daemon: a read that hangs cannot keep a dying process alive.
    """

    def __init__(self, items: Generator[T], depth: int = DEPTH) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._is_over = self._closed = False
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
            self._changed.wait_for(lambda: self._ready or self._is_over or self._closed)
            if self._ready and not self._closed:
                self._changed.notify_all()
                return self._ready.popleft()
            if self._error is not None and not self._closed:
                raise self._error
            raise StopIteration

    def close(self) -> None:
        """End the thread and drop what it made. Waits for the item in the making, but not for a read that hangs."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        self._thread.join(CLOSE_SECONDS)

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            with contextlib.closing(self._items):
                for item in self._items:
                    if not self._put(item):
                        break
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        with self._changed:
            self._error, self._is_over = error, True
            self._changed.notify_all()

    def _put(self, item: T) -> bool:
        """Hand it over, and wait until the next may be made; False if none shall be."""
        with self._changed:
            if not self._closed:
                self._ready.append(item)
                self._changed.notify_all()
            self._changed.wait_for(lambda: len(self._ready) < self._depth or self._closed)
            return not self._closed
