"""Batches: the examples of a step as global arrays, prefetched on a thread.

Shape legend: S gradient accumulation steps, B examples of one global micro-batch. An array has the shape (S, B, *shape
of the field in one example): (S, B, T) for sequences of T tokens. Example i of a step is at [i // B, i % B]. The
examples of a step therefore depend only on S * B, not on devices or hosts.

There is no iterator state to checkpoint: the batch of any step is computed from the step number (`DataPosition`).
"""

import contextlib
import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Self, TypeVar

import jax
import numpy as np
from jax.sharding import Sharding

from runner.data.dataset import TRAIN, Dataset, SkippedExamples
from runner.data.token_files import LOSS_WEIGHT

_PREFETCH_DEPTH = 2  # the batch that is needed next, and one more to hide a slow read
CLOSE_SECONDS = 5.0
_READ_EXAMPLES = 16  # sequences that are read at a time to find a target

Item = TypeVar("Item")


class SkippedBatches(NamedTuple):
    """Range of `num_batches` batches that a run does not use after `begin` completed steps."""

    begin: int
    num_batches: int


@dataclass(frozen=True)
class DataPosition:
    """Position of a run in its data: batches in order, except for the ranges `skipped`, which ascend by step."""

    skipped: tuple[SkippedBatches, ...] = ()

    @classmethod
    def from_ranges(cls, ranges: Iterable[Sequence[int]]) -> Self:
        """Return the position of `config.train.skip_steps`."""
        return cls(tuple(SkippedBatches(start, stop - start) for start, stop in ranges))

    def get_data_step(self, step: int) -> int:
        """Return the index, in the order of the data, of the batch after `step` completed steps."""
        return step + sum(each.num_batches for each in self.skipped if each.begin <= step)

    def count_examples(self, step: int, batch_examples: int) -> tuple[int, list[SkippedExamples]]:
        """Return (number of examples of the data up to `step` completed steps, ranges of those that were skipped)."""
        num_skipped, skipped = 0, []
        # A range that begins at this step is still ahead.
        for begin, num_batches in (each for each in self.skipped if each.begin < step):
            first = begin + num_skipped
            skipped.append(SkippedExamples(first * batch_examples, (first + num_batches) * batch_examples))
            num_skipped += num_batches
        return (step + num_skipped) * batch_examples, skipped

    def find_first_change(self, other: "DataPosition") -> int | None:
        """Return the number of steps before the first batch that differs in the other position; None if none does."""
        pairs = itertools.zip_longest(self.skipped, other.skipped)
        begins = (min(each.begin for each in pair if each is not None) for pair in pairs if pair[0] != pair[1])
        return next(begins, None)


def load_global_batch(
    dataset: Dataset, split: str, step: int, *, accumulate_steps: int, micro_batch: int, sharding: Sharding
) -> dict[str, jax.Array]:
    """Return the global batch that follows `step` others of a split: (S, B, ...) for each field.

    Called on every host. Each host reads only the sequences of its own devices, and each of them once, even if several
    devices hold replicas or parts of it. S is `accumulate_steps`, B `micro_batch`, and `sharding` that of the leading
    axes of all arrays. Raises ValueError if there is no such split.
    """
    dataset.validate_split(split)
    S, B = accumulate_steps, micro_batch
    examples_SxB = np.arange(S * B).reshape(S, B)
    # All fields have the same sharding over S and B, so any of them shows which examples this host has.
    anyone = next(iter(dataset.fields.values()))
    indices = sharding.addressable_devices_indices_map((S, B, *anyone.shape)).values()
    # Sorted indices, within the step, of the examples on devices of this host. With context parallelism several devices
    # hold parts of one sequence, which `unique` counts once.
    local = np.unique(np.concatenate([examples_SxB[index[:2]].ravel() for index in indices if index is not None]))

    sequences = dataset.read_numbers(split, step * S * B + local)

    def get_shard(field: str, index: tuple[slice, ...]) -> np.ndarray:
        # `sequences` holds the local examples only, so global indices are mapped to their ranks among these.
        return sequences[field][np.searchsorted(local, examples_SxB[index[:2]])][:, :, *index[2:]]

    return {
        name: jax.make_array_from_callback((S, B, *field.shape), sharding, functools.partial(get_shard, name))
        for name, field in dataset.fields.items()
    }


def has_targets(dataset: Dataset, batch: Mapping[str, jax.Array], step: int, batch_examples: int) -> bool:
    """Return True if a training batch has a target, the same on every host. Never computes on a device.

    A batch can lack targets only if the data have target weights. A host whose own sequences have no target reads those
    of the other hosts, which is rare. `batch` is the one of `step`, with `batch_examples` = S * B examples.
    """
    if LOSS_WEIGHT not in batch:
        return True
    weights = batch[LOSS_WEIGHT]
    if any((np.asarray(shard.data) > 0).any() for shard in weights.addressable_shards):
        return True
    firsts = () if weights.is_fully_addressable else range(0, batch_examples, _READ_EXAMPLES)
    return any(
        (
            dataset.read(TRAIN, step * batch_examples + first, min(_READ_EXAMPLES, batch_examples - first))[LOSS_WEIGHT]
            > 0
        ).any()
        for first in firsts
    )


class Prefetcher(Generic[Item]):
    """Iterator over the items of a generator, which a thread runs at most `depth` items ahead.

    An error of the generator is raised by the `next` that would have returned its item, and by every later one. The
    generator is closed on the thread on which it has run. The thread is a daemon, so that a read that hangs cannot keep
    a process alive that wants to exit.
    """

    def __init__(self, items: Generator[Item], depth: int = _PREFETCH_DEPTH) -> None:
        self._items, self._depth = items, depth
        self._ready: deque[Item] = deque()
        self._error: BaseException | None = None
        self._is_exhausted = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
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
                        # Work on the next item starts only when there is room for it, which bounds memory.
                        self._changed.wait_for(lambda: len(self._ready) < self._depth or self._is_closed)
                        if self._is_closed:
                            break
        except BaseException as raised:  # noqa: BLE001 - nothing is swallowed: the consumer raises it
            error = raised
        with self._changed:
            self._error, self._is_exhausted = error, True
            self._changed.notify_all()


class SeekablePrefetcher(Generic[Item]):
    """Iterator over `make(step)` for consecutive steps, made ahead on a thread, that can be moved to any step."""

    def __init__(self, make: Callable[[int], Item]) -> None:
        self._make = make
        self._step: int | None = None  # of the next item
        self._prefetcher: Prefetcher[Item] | None = None

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        assert self._prefetcher is not None, "seek comes first"
        assert self._step is not None, "seek comes first"
        item = next(self._prefetcher)
        self._step += 1
        return item

    def seek(self, step: int) -> Self:
        """Make the item of `step` the next one, and return the iterator. Items made for other steps are dropped."""
        if step != self._step:
            self.close()
            self._step = step
            self._prefetcher = Prefetcher(self._make(each) for each in itertools.count(step))
        return self

    def close(self) -> None:
        """Stop the thread and drop its items."""
        if self._prefetcher is not None:
            self._prefetcher.close()
        self._step = self._prefetcher = None
