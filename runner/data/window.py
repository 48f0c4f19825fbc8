"""Arithmetic of windows: how a token sequence is split, cut and shuffled. Reads no token and no file.

Window w of a split covers the T + 1 tokens from `w * T` of the split on: T inputs and, one further, their T targets.
Neighbours share one token, which is a target of the first and an input of the second; the splits share none.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np

from runner.errors import DataError

ORDER_PROBE_INDICES = 512


@dataclass(frozen=True)
class Split:
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


def split_tokens(num_tokens: int, *, validation_fraction: float, sequence_length: int) -> tuple[Split, Split]:
    """Return (train, validation): the head, and the last `validation_fraction` of the tokens.

    Raises DataError where a split that is asked for does not hold one window.
    """
    assert 0 <= validation_fraction < 1
    assert sequence_length > 0
    num_train_tokens = int(num_tokens * (1 - validation_fraction))
    train = Split(0, num_train_tokens, sequence_length)
    validation = Split(num_train_tokens, num_tokens - num_train_tokens, sequence_length)
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


def make_order(num_windows: int, *, seed: int) -> Sequence[int]:
    """Return the endless train order: a new permutation of all windows each epoch, any element of it in O(1)."""
    return grain.MapDataset.range(num_windows).seed(seed).shuffle().repeat()


def probe_order(order: Sequence[int], *, num_windows: int) -> str:
    """Return a digest of how the first two epochs start: another version of the shuffle would be another data set."""
    num_indices = min(ORDER_PROBE_INDICES, num_windows)
    indices = np.array([order[epoch * num_windows + i] for epoch in range(2) for i in range(num_indices)], "<i8")
    return hashlib.sha256(indices.data).hexdigest()
