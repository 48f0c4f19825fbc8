"""Arithmetic of windows: how a token sequence is split, cut and shuffled. Reads no token and no file.

Window w of a split covers the T + 1 tokens from `w * T` of the split on: T inputs and, one further, their T targets.
Neighbours share one token, which is a target of the first and an input of the second; the splits share none.

Which source each example of a mixture comes from: arithmetic on its number, and nothing that is drawn or kept.

Of the first k examples each source has its share of k, give or take one or two, for every k: the shares of any stretch,
and of each batch, are those of the weights. So the number of an example tells its source, and how many of that source
came before it.
"""

import functools
import hashlib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import grain
import numpy as np

from runner.errors import DataError

ORDER_PROBE_INDICES = 512
FEW_WINDOWS = 512  # grain draws until a number is below theirs: 0.06 ms for one of 512, 5 ms for one of three


@dataclass(frozen=True)
class TokenSplit:
    """The tokens `start .. start + num_tokens` of the data set, cut into windows of `sequence_length` + 1."""

    start: int
    num_tokens: int
    sequence_length: int

    @property
    def num_windows(self) -> int:
        return max(0, self.num_tokens - 1) // self.sequence_length

    def window_start(self, window: int) -> int:
        """Return the position in the data set of the window's first token."""
        assert 0 <= window < self.num_windows
        return self.start + window * self.sequence_length


def split_tokens(num_tokens: int, *, validation_fraction: float, sequence_length: int) -> tuple[TokenSplit, TokenSplit]:
    """Return (train, validation): the head, and the last `validation_fraction` of the tokens.

    Raises DataError where a split that is asked for does not hold one window.
    """
    assert 0 <= validation_fraction < 1
    assert sequence_length > 0
    num_train_tokens = int(num_tokens * (1 - validation_fraction))
    train = TokenSplit(0, num_train_tokens, sequence_length)
    validation = TokenSplit(num_train_tokens, num_tokens - num_train_tokens, sequence_length)
    need = f"fewer than one window of data.sequence_length={sequence_length} + 1"
    have = f"data.validation_fraction={validation_fraction:g} of {num_tokens:,} tokens"
    if not train.num_windows:
        raise DataError(f"the training split has {train.num_tokens:,} tokens ({have} are set aside), {need}; need more")
    if validation_fraction and not validation.num_windows:
        raise DataError(
            f"the validation split has {validation.num_tokens:,} tokens ({have}), {need}; "
            f"use a fraction of at least {(sequence_length + 2) / num_tokens:.2g}, or 0 for no validation"
        )
    return train, validation


@dataclass(frozen=True)
class ShuffledOrder(Sequence[int]):
    """The endless train order: a new permutation of all windows each epoch, any element of it in O(1).

    Of few windows an epoch is computed whole, and once in a process.
    """

    num_windows: int
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        if self.num_windows > FEW_WINDOWS:
            return self._shuffled[index]
        epoch, place = divmod(index, self.num_windows)
        return _epoch(self, epoch)[place]

    @functools.cached_property
    def _shuffled(self) -> Sequence[int]:
        return grain.MapDataset.range(self.num_windows).seed(self.seed).shuffle().repeat()


@functools.lru_cache(maxsize=256)
def _epoch(order: ShuffledOrder, epoch: int) -> tuple[int, ...]:
    begin = epoch * order.num_windows
    return tuple(order._shuffled[begin + place] for place in range(order.num_windows))


def make_order(num_windows: int, *, seed: int) -> ShuffledOrder:
    """Return the train order of so many windows."""
    return ShuffledOrder(num_windows, seed)


def probe_order(order: Sequence[int], *, num_windows: int) -> str:
    """Return a digest of how the first two epochs start: another version of the shuffle would be another data set."""
    return (_probe_once if isinstance(order, ShuffledOrder) else _probe)(order, num_windows)


def _probe(order: Sequence[int], num_windows: int) -> str:
    num_indices = min(ORDER_PROBE_INDICES, num_windows)
    indices = np.array([order[epoch * num_windows + i] for epoch in range(2) for i in range(num_indices)], "<i8")
    return hashlib.sha256(indices.data).hexdigest()


_probe_once = functools.lru_cache(maxsize=256)(_probe)


class Mixture:
    """`weights`: positive, one for each source; they need not add up to one."""

    def __init__(self, weights: Sequence[float]):
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self.shares = [Fraction(part, sum(self._parts)) for part in self._parts]

    def counts(self, num_examples: int) -> list[int]:
        """How many of the first `num_examples` come from each source.

        The first source takes its share, rounded up, then the second its share of what is left: no count ever falls
        as `num_examples` grows, and exactly one rises with each example.
        """
        counts, rest = [], sum(self._parts)
        for part in self._parts:
            count = -(-num_examples * part // rest)
            counts.append(count)
            num_examples, rest = num_examples - count, rest - part
        return counts

    def place(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For examples `first .. first + count`: the source of each, and its number among the examples of that source.

        Both (count,), int64.
        """
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        before = self.counts(first)
        for index in range(count):
            after = self.counts(first + index + 1)
            source = next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old < new)
            sources[index], numbers[index] = source, before[source]
            before = after
        return sources, numbers
