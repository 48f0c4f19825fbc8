"""Sampling order of the training stream: shuffles within a source, and mixtures of sources.

Everything here is integer arithmetic. No token and no file is read, and no state is kept between steps.

Window w of a split covers T + 1 tokens, beginning at token `w * T` of the split: T inputs and, shifted by one, their T
targets. Neighbouring windows share one token, which is a target of the first and an input of the second. The training
and the validation split share no token.

- `ShuffledOrder` permutes all windows in each epoch.
- `LocalShuffle` keeps the examples of one block of packed documents close together, so that a host reads few blocks.
- `FileOrder` is the order of the source, in each epoch.
- `Mixture` interleaves sources. For every k, the first k examples of a run contain each source in proportion to its
  weight, within one or two examples. The index of an example determines its source, and how many examples of that
  source precede it.
"""

import functools
import hashlib
import importlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from runner.errors import DataError

ORDER_PROBE_INDICES = 512
# grain's shuffle repeats until the result is below the number of windows, which is slow for few of them: an element
# takes 0.06 ms with 512 windows and 5 ms with three. Up to this number whole epochs are therefore cached.
FEW_WINDOWS = 512
GROUP_BLOCKS = 64  # smallest number of blocks that `LocalShuffle` mixes within a group


@dataclass(frozen=True)
class TokenSplit:
    """The tokens `start .. start + num_tokens` of a source, divided into windows of `sequence_length` + 1.

    For a data set of arrays: its examples, with a `sequence_length` of 1.
    """

    start: int
    num_tokens: int
    sequence_length: int

    @property
    def num_windows(self) -> int:
        """Number of whole windows."""
        return max(0, self.num_tokens - 1) // self.sequence_length


def split_tokens(num_tokens: int, *, validation_fraction: float, sequence_length: int) -> tuple[TokenSplit, TokenSplit]:
    """Return the training split and, behind it, the validation split. Raises DataError if one holds no window."""
    assert 0 <= validation_fraction < 1
    assert sequence_length > 0
    # The boundary is part of a run's identity: the rounding of this expression must never change.
    num_train_tokens = int(num_tokens * (1 - validation_fraction))
    train = TokenSplit(0, num_train_tokens, sequence_length)
    validation = TokenSplit(num_train_tokens, num_tokens - num_train_tokens, sequence_length)
    need = f"fewer than one window of data.sequence_length={sequence_length} + 1"
    have = f"data.validation_fraction={validation_fraction:g} of {num_tokens:,} tokens"
    if not train.num_windows:
        raise DataError(
            f"the training split has {train.num_tokens:,} tokens ({have} are set aside), {need}; use more tokens or a "
            "smaller fraction"
        )
    if validation_fraction and not validation.num_windows:
        raise DataError(
            f"the validation split has {validation.num_tokens:,} tokens ({have}), {need}; "
            f"use a fraction of at least {(sequence_length + 2) / num_tokens:.2g}, or 0 for no validation"
        )
    return train, validation


def split_examples(num_examples: int, validation_fraction: float) -> tuple[TokenSplit, TokenSplit]:
    """Return the training examples (the head) and the last `validation_fraction` of them. See `split_tokens`."""
    # The boundary is part of a run's identity, like that of tokens.
    num_train = int(num_examples * (1 - validation_fraction))
    if not num_train or (validation_fraction and num_train == num_examples):
        split = "validation" if num_train else "training"
        raise DataError(
            f"the {split} split has no example: data.validation_fraction={validation_fraction:g} of {num_examples:,} "
            f"are set aside; use more examples, or a {'larger' if num_train else 'smaller'} fraction"
        )
    return TokenSplit(0, num_train, 1), TokenSplit(num_train, num_examples - num_train, 1)


@dataclass(frozen=True)
class ShuffledOrder(Sequence[int]):
    """Endless training order with a new permutation of all windows in each epoch, and random access in O(1)."""

    num_windows: int
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        # grain computes any element on request; the cached epoch below only saves time and gives the same order.
        if self.num_windows > FEW_WINDOWS:
            return self._shuffled[index]
        epoch, position = divmod(index, self.num_windows)
        return _compute_epoch(self, epoch)[position]

    @functools.cached_property
    def _shuffled(self) -> Sequence[int]:
        # Its import takes a fifth of that of a trainer, and a class that is only looked at needs no order.
        grain: Any = importlib.import_module("grain")
        order: Sequence[int] = grain.MapDataset.range(self.num_windows).seed(self.seed).shuffle().repeat()
        return order


@functools.lru_cache(maxsize=256)
def _compute_epoch(order: ShuffledOrder, epoch: int) -> tuple[int, ...]:
    first = epoch * order.num_windows
    return tuple(order._shuffled[first + position] for position in range(order.num_windows))


@dataclass(frozen=True)
class FileOrder(Sequence[int]):
    """Endless training order in which each epoch has all examples as they lie in the source."""

    num_examples: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        return index % self.num_examples


class LocalShuffle(Sequence[int]):
    """Endless training order of packed documents, in which each slot of the batch draws from few blocks of examples.

    Each epoch contains every example once. A slot is the position of a sequence in the global batch.

    1. The blocks of an epoch are shuffled and split into groups. A group has the same number of blocks for each slot,
       and at least `GROUP_BLOCKS` blocks.
    2. Each slot gets its own blocks of the group and draws from them in all steps that the group lasts. A host
       therefore reads the blocks of its own slots only, however many hosts there are.
    3. The examples in the blocks of a slot are shuffled.
    4. The last group of an epoch is smaller, and an incomplete last block is at its end.

    A step takes `batch_examples` examples of this order. In a mixture that is not an integer, because other sources
    contribute to the batch, too. Example p then has the slot `p % batch_examples`, a fraction.
    """

    def __init__(self, num_examples: int, block_examples: int, batch_examples: Fraction, seed: int):
        self.batch_examples = batch_examples
        self._num_examples, self._block_examples = num_examples, block_examples
        self._num_blocks = num_examples // block_examples
        # A source with a small share of a mixture may have less than one example in a step on average.
        num_slots = max(1, round(batch_examples))
        slot_blocks = -(-GROUP_BLOCKS // num_slots)
        self._slot_examples = slot_blocks * block_examples
        self._group_examples = num_slots * self._slot_examples
        blocks = ShuffledOrder(max(self._num_blocks, 1), seed)
        # The caches hold one group: the permuted block numbers, and one permutation for each slot, which take 8 bytes
        # for each example.
        self._block = functools.lru_cache(maxsize=num_slots * slot_blocks)(
            lambda epoch, position: blocks[epoch * self._num_blocks + position]
        )
        self._permutation = functools.lru_cache(maxsize=num_slots)(functools.partial(make_permutation, seed))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        epoch, epoch_offset = divmod(index, self._num_examples)
        group, group_offset = divmod(epoch_offset, self._group_examples)
        group_start = group * self._group_examples
        group_size = min(self._group_examples, self._num_examples - group_start)
        # Consecutive ranks belong to the same slot, so dividing a rank gives the slot and the offset in its blocks.
        rank = self._rank(index - group_offset, group_size, group_offset)
        slot, slot_offset = divmod(rank, self._slot_examples)
        slot_start = slot * self._slot_examples
        slot_size = min(self._slot_examples, group_size - slot_start)
        shuffled_offset = int(self._permutation(epoch, group, slot, slot_size)[slot_offset])
        block, block_offset = divmod(group_start + slot_start + shuffled_offset, self._block_examples)
        if block < self._num_blocks:  # an incomplete last block is not shuffled
            block = self._block(epoch, block)
        return block * self._block_examples + block_offset

    def _rank(self, first: int, size: int, offset: int) -> int:
        """Return the rank of example `first + offset` among `first .. first + size`, sorted by slot, then by index."""
        # The slot of p is p modulo the fraction n / scale. Everything below is multiplied by scale to get integers.
        n, scale = self.batch_examples.as_integer_ratio()
        begin, slot = first * scale % n, (first + offset) * scale % n
        # Count the examples with a lower slot: x mod n < slot exactly where floor(x / n) = floor((x - slot) / n) + 1.
        # The second sum adds n to its argument, to keep it positive, and is therefore larger by `size`.
        below = floor_sum(size, n, scale, begin) - floor_sum(size, n, scale, begin - slot + n)
        # Among the examples before this one every n-th has the same slot, because the fraction is reduced.
        return below + size + offset // n


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of `(factor * i + offset) // divisor` over `i` in `range(count)`, nothing negative, in O(log)."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        # The remaining sum is the number of lattice points below a line. Exchanging the axes leaves fewer columns, as
        # in Euclid's algorithm.
        count, offset = divmod(factor * count + offset, divisor)
        factor, divisor = divisor, factor
    return total


def make_permutation(seed: int, epoch: int, group: int, slot: int, size: int) -> np.ndarray:
    """Return a permutation of `range(size)` that is the same in every version of numpy."""
    # The raw output of Philox is specified, whereas `Generator.permutation` may change between versions of numpy.
    key = hashlib.sha256(f"{seed} {epoch} {group} {slot}".encode()).digest()
    return np.argsort(np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(size), kind="stable")


def probe_order(order: Sequence[int], *, num_windows: int) -> str:
    """Return a digest of the first elements of two epochs.

    It is part of the data fingerprint, so a version of grain that shuffles differently cannot resume a run unnoticed.
    """
    # Only a `ShuffledOrder` can be a key of the cache: it is a frozen dataclass, equal for equal seeds and sizes.
    return (_probe_once if isinstance(order, ShuffledOrder) else _probe)(order, num_windows)


def _probe(order: Sequence[int], num_windows: int) -> str:
    num_indices = min(ORDER_PROBE_INDICES, num_windows)
    indices = np.array([order[epoch * num_windows + i] for epoch in range(2) for i in range(num_indices)], "<i8")
    return hashlib.sha256(indices.data).hexdigest()


_probe_once = functools.lru_cache(maxsize=256)(_probe)


class Mixture:
    """Interleaving of sources in proportion to their weights, which are positive and need not sum to one."""

    def __init__(self, weights: Sequence[float]):
        # Weights are parsed from their decimal text into fractions, so that no rounding accumulates over a long run.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self.shares = [Fraction(part, sum(self._parts)) for part in self._parts]

    def count_examples(self, num_examples: int) -> list[int]:
        """Return the number of examples from each source among the first `num_examples`.

        The first source takes its share, rounded up, then the second takes its share of the remainder, and so on. When
        `num_examples` grows by one, exactly one count grows by one and the others stay.
        """
        counts, remaining_parts = [], sum(self._parts)
        for part in self._parts:
            count = -(-num_examples * part // remaining_parts)
            counts.append(count)
            num_examples, remaining_parts = num_examples - count, remaining_parts - part
        return counts

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each of the examples `first .. first + count`, and its index there: int64, (count,)."""
        sources, indices = np.empty(count, np.int64), np.empty(count, np.int64)
        before = self.count_examples(first)
        for i in range(count):
            after = self.count_examples(first + i + 1)
            # Exactly one count grows with each example: that of its source.
            source = next(index for index, (old, new) in enumerate(zip(before, after, strict=True)) if old < new)
            sources[i], indices[i] = source, before[source]
            before = after
        return sources, indices
