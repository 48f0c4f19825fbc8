"""Which source each example of a mixture comes from: arithmetic on its number, and nothing that is drawn or kept.

Of the first k examples each source has its share of k, give or take one or two, for every k: the shares of any stretch,
and of each batch, are those of the weights. So the number of an example tells its source, and how many of that source
came before it.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np


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
