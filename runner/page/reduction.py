"""A series of any length in bounded memory, thinned so that every peak survives: the lowest and highest of each bin.

A bin is so many neighbouring points. When there are too many bins, neighbours are merged and bins are twice as wide
from then on, so a series can be fed for ever, and a merged bin holds exactly the extremes of what went into it.
Values that are no numbers are peaks too: they are counted, and the first of them are kept.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

BINS_MAX = 1000  # held while a series is fed; each is at most two points
BROKEN_MAX = 100


class Point(NamedTuple):
    """One value and where it stands on each axis; `seconds` is None for a row that does not say when it was."""

    step: int
    tokens: int | None
    seconds: float | None
    value: float


class Bin(NamedTuple):
    """The extremes of neighbouring points."""

    low: Point
    high: Point


@dataclass(frozen=True)
class Thinned:
    """What is drawn of a series.

    Attributes:
        points: in order of step; all of them if they were few, else the extremes of each bin, the first and the last.
        broken: the first points whose values are not finite.
        num_points: that were fed, broken ones too.
        num_broken: how many were not finite.
    """

    points: Sequence[Point]
    broken: Sequence[Point]
    num_points: int
    num_broken: int


class Reduction:
    """One series, fed in order of step."""

    def __init__(self, bins_max: int = BINS_MAX):
        assert bins_max % 2 == 0, "bins are merged in pairs"
        self._bins_max = bins_max
        self._bins: list[Bin] = []
        self._width = self._num_in_last = 1  # points that a bin holds, and that the last one does
        self._first: Point | None = None
        self._last: Point | None = None
        self._broken: list[Point] = []
        self._num_points = self._num_broken = 0

    def add(self, point: Point) -> None:
        """Feed the next point."""
        self._num_points += 1
        if not math.isfinite(point.value):
            self._num_broken += 1
            if len(self._broken) < BROKEN_MAX:
                self._broken.append(point)
            return
        self._first = self._first or point
        self._last = point
        if self._bins and self._num_in_last < self._width:
            self._bins[-1] = _merged(self._bins[-1], Bin(point, point))
            self._num_in_last += 1
            return
        if len(self._bins) == self._bins_max:
            self._bins = _halved(self._bins)
            self._width *= 2
        self._bins.append(Bin(point, point))
        self._num_in_last = 1

    def thinned(self, bins_max: int, more: Iterable[Point] = ()) -> Thinned:
        """At most `bins_max` bins of it, with `more` points at its end that are not fed for good."""
        whole = self._copy()
        for point in more:
            whole.add(point)
        bins = whole._bins
        while len(bins) > max(bins_max, 1):
            bins = _halved(bins)
        kept = {point.step: point for each in bins for point in each}
        kept |= {point.step: point for point in (whole._first, whole._last) if point is not None}
        points = [kept[step] for step in sorted(kept)]
        return Thinned(points, whole._broken, whole._num_points, whole._num_broken)

    def _copy(self) -> "Reduction":
        copy = Reduction(self._bins_max)
        copy._bins, copy._width, copy._num_in_last = list(self._bins), self._width, self._num_in_last
        copy._first, copy._last = self._first, self._last
        copy._broken, copy._num_points, copy._num_broken = list(self._broken), self._num_points, self._num_broken
        return copy


def _merged(left: Bin, right: Bin) -> Bin:
    low = right.low if right.low.value < left.low.value else left.low
    high = right.high if right.high.value > left.high.value else left.high
    return Bin(low, high)


def _halved(bins: Sequence[Bin]) -> list[Bin]:
    """Each two neighbours as one; the last alone if they are odd in number."""
    pairs = [_merged(*bins[index : index + 2]) for index in range(0, len(bins) - 1, 2)]
    return pairs + list(bins[len(pairs) * 2 :])
