"""Sampling order: which window or example of which source stands at each place of the training stream.

Everything here is arithmetic on integers. No token and no file is read, and no state is kept between steps.

Window w of a split covers the T + 1 tokens from `w * T` of the split on: T inputs and, shifted by one, their T targets.
Neighbouring windows share one token, which is a target of the first and an input of the second. The splits share none.

- `ShuffledOrder` permutes all windows in each epoch.
- `LocalShuffle` keeps the examples of one block of packed documents close together, so that a host reads few blocks.
- `Mixture` gives each source its share of any stretch of examples. Among the first k examples of a run each source has
  its share of k, give or take one or two, for every k. The number of an example therefore tells its source and how many
  examples of that source came before it.
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
# grain draws until a number is below the number of windows: 0.06 ms for one of 512 windows, 5 ms for one of three.
FEW_WINDOWS = 512
GROUP_BLOCKS = 64  # smallest number of blocks that `LocalShuffle` mixes within a group


@dataclass(frozen=True)
class TokenSplit:
    """The tokens `start .. start + num_tokens` of a source, cut into windows of `sequence_length` + 1."""

    start: int
    num_tokens: int
    sequence_length: int

    @property
    def num_windows(self) -> int:
        """Number of whole windows."""
        return max(0, self.num_tokens - 1) // self.sequence_length

    def window_start(self, window: int) -> int:
        """Return the position in the source of the first token of a window."""
        assert 0 <= window < self.num_windows
        return self.start + window * self.sequence_length


def split_tokens(num_tokens: int, *, validation_fraction: float, sequence_length: int) -> tuple[TokenSplit, TokenSplit]:
    """Return the training split (the head) and the validation split (the last `validation_fraction` of the tokens).

    Raises:
        DataError: a split that was requested does not hold one window.
    """
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


@dataclass(frozen=True)
class ShuffledOrder(Sequence[int]):
    """Endless training order with a new permutation of all windows in each epoch; any element is found in O(1).

    The epoch of a small number of windows is computed whole, once in a process.
    """

    num_windows: int
    seed: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        # grain computes any element on request; the cached epoch below only saves time and gives the same order.
        if self.num_windows > FEW_WINDOWS:
            return self._shuffled[index]
        epoch, place = divmod(index, self.num_windows)
        return _compute_epoch(self, epoch)[place]

    @functools.cached_property
    def _shuffled(self) -> Sequence[int]:
        return grain.MapDataset.range(self.num_windows).seed(self.seed).shuffle().repeat()


@functools.lru_cache(maxsize=256)
def _compute_epoch(order: ShuffledOrder, epoch: int) -> tuple[int, ...]:
    begin = epoch * order.num_windows
    return tuple(order._shuffled[begin + place] for place in range(order.num_windows))


def make_order(num_windows: int, *, seed: int) -> ShuffledOrder:
    """Return the shuffled training order of `num_windows` windows."""
    return ShuffledOrder(num_windows, seed)


class LocalShuffle(Sequence[int]):
    """Endless training order of packed documents: one slot of the batch draws from few blocks of examples.

    Each epoch holds every example once. A slot is the place of a sequence in the global batch. Blocks are shuffled and
    put into groups; a group holds the same number of blocks for each slot, and `GROUP_BLOCKS` blocks or more in all.
    The examples of a group are dealt out by slot: slot 0 of all steps that the group serves takes the first examples,
    slot 1 the next ones. So a host reads the blocks of its own slots and no others, however many hosts there are. The
    examples of one slot's blocks are shuffled. The rest of an epoch forms a smaller group, and a last block that is
    not whole stands at its end.

    A step takes `batch_examples` examples of this order. That is no whole number where other sources contribute to the
    batch, too; example p then has the slot `p % batch_examples`.
    """

    def __init__(self, num_examples: int, block_examples: int, batch_examples: Fraction, seed: int):
        self.batch_examples = batch_examples
        self._num_examples, self._block_examples, self._seed = num_examples, block_examples, seed
        self._num_blocks = num_examples // block_examples
        # A source with a small share of a mixture may have less than one example in a step on average.
        num_slots = max(1, round(batch_examples))
        slot_blocks = -(-GROUP_BLOCKS // num_slots)
        self._slot_examples = slot_blocks * block_examples
        self._group_examples = num_slots * self._slot_examples
        blocks = make_order(max(self._num_blocks, 1), seed=seed)
        self._block = functools.lru_cache(maxsize=num_slots * slot_blocks)(
            lambda epoch, place: blocks[epoch * self._num_blocks + place]
        )
        # The cached permutations take 8 bytes for each example of a group, all slots together.
        self._permutation = functools.lru_cache(maxsize=num_slots)(functools.partial(make_permutation, seed))

    def __len__(self) -> int:
        return self._num_examples

    def __getitem__(self, index: int) -> int:  # type: ignore[override]
        epoch, place = divmod(index, self._num_examples)
        group, place = divmod(place, self._group_examples)
        first = group * self._group_examples
        size = min(self._group_examples, self._num_examples - first)
        # The rank by slot turns the order of the stream into runs of examples that belong to one slot.
        slot, place = divmod(self._rank(index - place, size, place), self._slot_examples)
        begin = slot * self._slot_examples
        place = int(self._permutation(epoch, group, slot, min(self._slot_examples, size - begin))[place])
        block, within = divmod(first + begin + place, self._block_examples)
        if block < self._num_blocks:  # a last block that is not whole keeps its place
            block = self._block(epoch, block)
        return block * self._block_examples + within

    def _rank(self, first: int, size: int, place: int) -> int:
        """Return the rank of example `first + place` among `first .. first + size`, sorted by slot, then by number."""
        # The slot of p is p modulo a fraction. All numbers below are in units of 1 / scale, so that they are integers.
        num_slots, scale = self.batch_examples.as_integer_ratio()
        begin, slot = first * scale % num_slots, (first + place) * scale % num_slots
        # x mod n < r exactly where floor(x / n) and floor((x - r) / n) differ.
        before = floor_sum(size, num_slots, scale, begin) - floor_sum(size, num_slots, scale, begin - slot + num_slots)
        return before + size + place // num_slots


def floor_sum(count: int, divisor: int, factor: int, offset: int) -> int:
    """Return the sum of `(factor * i + offset) // divisor` over `i < count`, in O(log divisor).

    No argument is negative.
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (factor // divisor) + count * (offset // divisor)
        factor, offset = factor % divisor, offset % divisor
        # The rest counts the lattice points below a line; with the axes exchanged there are fewer columns.
        count, offset = divmod(factor * count + offset, divisor)
        factor, divisor = divisor, factor
    return total


def make_permutation(seed: int, epoch: int, group: int, slot: int, size: int) -> np.ndarray:
    """Return a permutation of the numbers below `size` that is the same in every version of numpy."""
    # The raw output of Philox is specified, whereas `Generator.permutation` may change between versions of numpy.
    key = hashlib.sha256(f"{seed} {epoch} {group} {slot}".encode()).digest()
    return np.argsort(np.random.Philox(key=np.frombuffer(key[:16], "<u8")).random_raw(size), kind="stable")


def probe_order(order: Sequence[int], *, num_windows: int) -> str:
    """Return a digest of the first places of two epochs: another version of the shuffle makes another data set."""
    return (_probe_once if isinstance(order, ShuffledOrder) else _probe)(order, num_windows)


def _probe(order: Sequence[int], num_windows: int) -> str:
    num_indices = min(ORDER_PROBE_INDICES, num_windows)
    indices = np.array([order[epoch * num_windows + i] for epoch in range(2) for i in range(num_indices)], "<i8")
    return hashlib.sha256(indices.data).hexdigest()


_probe_once = functools.lru_cache(maxsize=256)(_probe)


class Mixture:
    """Sources in fixed proportions. `weights` are positive, one for each source, and need not add up to one."""

    def __init__(self, weights: Sequence[float]):
        # Fractions of the decimal text make the shares exact, so that no rounding accumulates over a long run.
        exact = [Fraction(str(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._parts = [int(weight * scale) for weight in exact]
        self.shares = [Fraction(part, sum(self._parts)) for part in self._parts]

    def count_examples(self, num_examples: int) -> list[int]:
        """Return how many of the first `num_examples` come from each source.

        The first source takes its share, rounded up, then the second its share of the rest, and so on. As
        `num_examples` grows no count ever falls, and exactly one rises with each example.
        """
        counts, rest = [], sum(self._parts)
        for part in self._parts:
            count = -(-num_examples * part // rest)
            counts.append(count)
            num_examples, rest = num_examples - count, rest - part
        return counts

    def locate(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each of the examples `first .. first + count`, and its number within that source.

        Both arrays are int64 of shape (count,).
        """
        sources, numbers = np.empty(count, np.int64), np.empty(count, np.int64)
        before = self.count_examples(first)
        for index in range(count):
            after = self.count_examples(first + index + 1)
            # Exactly one count rises with each example: that of its source.
            source = next(place for place, (old, new) in enumerate(zip(before, after, strict=True)) if old < new)
            sources[index], numbers[index] = source, before[source]
            before = after
        return sources, numbers
