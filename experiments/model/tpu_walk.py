"""Which queries and keys of a row the TPU kernels of attention take together, and in which order.

Owns no kernel. A block of queries meets a block of keys only where one of them sees another; where all see all the keys
are taken in long steps and without a mask, elsewhere in short ones, each with those queries alone that may see them.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

LANES = 128  # of a register; and keys of a short step
LONG_STEP = 512
FIRST, LAST, DONE = 1, 2, 4  # meetings of this block of queries, and the last one of this block of keys


class Walk(NamedTuple):
    """Meetings of blocks, one after the other: int32, as a kernel is told."""

    queries: np.ndarray
    keys: np.ndarray
    notes: np.ndarray  # FIRST, LAST and DONE
    written: np.ndarray  # the block of keys that is the next of which all is done


class Step(NamedTuple):
    """Keys and queries of two blocks that are taken at once; `ahead` is None where all of them see all."""

    keys: slice
    queries: slice
    ahead: int | None  # the position of the first query less that of the first key


class Causal(NamedTuple):
    """A row that is read in blocks, multiples of `LANES`, and of which a query sees the last `window` positions."""

    block: int
    window: int | None = None

    def walk(self, length: int) -> Walk:
        """Blocks of queries in order, and to each in order the blocks of keys that one of its queries sees."""
        number = length // self.block
        met = [(i, j) for i in range(number) for j in range(i + 1) if self._sees_some(i - j)]
        last = {key: place for place, (_, key) in enumerate(met)}
        is_first = [place == 0 or met[place - 1][0] != query for place, (query, _) in enumerate(met)]
        is_last, is_done = [i == j for i, j in met], [last[key] == place for place, (_, key) in enumerate(met)]
        queries, keys = np.array(met, np.int32).T
        notes = FIRST * np.array(is_first) | LAST * np.array(is_last) | DONE * np.array(is_done)
        written = np.cumsum(is_done) - is_done  # keys are done in their order
        return Walk(queries, keys, notes.astype(np.int32), written.astype(np.int32))

    def sees_all(self, distance: int) -> bool:
        """Whether every query of a block sees every key of the block that stands so many blocks before it."""
        return distance > 0 and (self.window is None or (distance + 1) * self.block <= self.window)

    def steps(self, distance: int) -> Iterator[Step]:
        """What is taken at once of two blocks that stand so far from each other."""
        if self.sees_all(distance):
            for start in range(0, self.block, LONG_STEP):
                yield Step(slice(start, min(start + LONG_STEP, self.block)), slice(0, self.block), None)
            return
        behind = distance * self.block  # that a query stands, of a key at the same place in its block
        for start in range(0, self.block, LANES):
            first, stop = max(0, start - behind), self.block
            if self.window is not None:  # the last query that sees the last of these keys
                stop = min(stop, -(-(self.window + start + LANES - 1 - behind) // LANES) * LANES)
            if first < stop:
                yield Step(slice(start, start + LANES), slice(first, stop), behind + first - start)

    def num_scores(self, length: int) -> int:
        """Scores that are computed of a row, seen or not."""
        walk = self.walk(length)
        return sum(
            (step.keys.stop - step.keys.start) * (step.queries.stop - step.queries.start)
            for distance in (walk.queries - walk.keys).tolist()
            for step in self.steps(distance)
        )

    def _sees_some(self, distance: int) -> bool:
        return self.window is None or (distance - 1) * self.block + 1 < self.window
