"""A series of any length in bounded memory, thinned so that every peak survives: the lowest and highest of each bin.

A bin is so many neighbouring points. When there are too many bins, neighbours are merged and bins are twice as wide
from then on, so a series can be fed for ever, and a merged bin holds exactly the extremes of what went into it.
Values that are no numbers are peaks too: they are counted, and the first of them are kept.

Which numbers of a row are drawn, in which chart, with which unit; and the series of one run, fed row by row.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.metrics.rows import Row
from runner.storage import JsonObject

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
class ThinnedSeries:
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


class SeriesReducer:
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

    def thinned(self, bins_max: int, more: Iterable[Point] = ()) -> ThinnedSeries:
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
        return ThinnedSeries(points, whole._broken, whole._num_points, whole._num_broken)

    def _copy(self) -> "SeriesReducer":
        copy = SeriesReducer(self._bins_max)
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


TIME = "perf/time"
_AXES = ("step", "train/tokens", TIME, "perf/attempt")
SERIES_MAX = 40  # of a run; a job of its own may log any number of them


@dataclass(frozen=True)
class Chart:
    """One picture: its title, what its vertical axis measures, and the keys that belong into it."""

    title: str
    unit: str
    keys: re.Pattern[str]
    has_log_axis: bool = False

    def to_json(self) -> JsonObject:
        """For the page."""
        return {"title": self.title, "unit": self.unit, "log": self.has_log_axis}


CHARTS = (
    Chart("Loss", "loss (nats / token)", re.compile(r"train/loss|val/(.+/)?loss"), has_log_axis=True),
    Chart("Gradient norm", "global norm before clipping", re.compile(r"train/grad_norm"), has_log_axis=True),
    Chart("Learning rate", "learning rate", re.compile(r"train/learning_rate")),
    Chart("Throughput", "tokens / s", re.compile(r"perf/tokens_per_second")),
    Chart("Model FLOPs utilisation", "share of the devices' peak", re.compile(r"perf/mfu")),
)


def find_chart(key: str) -> Chart:
    """The chart that a key is drawn in: one of `CHARTS`, or one of its own."""
    for chart in CHARTS:
        if chart.keys.fullmatch(key):
            return chart
    return Chart(key, key, re.compile(re.escape(key)))


class RunCurves:
    """All series of one run."""

    def __init__(self, bins_max: int = BINS_MAX):
        self._bins_max = bins_max
        self._by_key: dict[str, SeriesReducer] = {}
        self.left_out: set[str] = set()  # SERIES_MAX at most
        self.num_rows = 0

    @property
    def keys(self) -> list[str]:
        """Of the series that are drawn."""
        return list(self._by_key)

    def add(self, row: Row) -> None:
        """Feed the next row."""
        self.num_rows += 1
        for key, point in _points(row):
            if key in self._by_key:
                self._by_key[key].add(point)
            elif len(self._by_key) < SERIES_MAX:
                self._by_key[key] = SeriesReducer(self._bins_max)
                self._by_key[key].add(point)
            elif len(self.left_out) < SERIES_MAX:
                self.left_out.add(key)

    def thinned(self, bins_max: int, newest: Iterable[Row] = ()) -> dict[str, ThinnedSeries]:
        """Each series by its key, with `newest` rows at the end that are not fed for good."""
        more: dict[str, list[Point]] = {}
        for row in newest:
            for key, point in _points(row):
                more.setdefault(key, []).append(point)
        known = self._by_key | {key: SeriesReducer(self._bins_max) for key in more if key not in self._by_key}
        return {key: series.thinned(bins_max, more.get(key, ())) for key, series in list(known.items())[:SERIES_MAX]}


def _points(row: Row) -> Iterable[tuple[str, Point]]:
    """The numbers of a row that can be drawn; null is what `float` would not take, a value that was not finite."""
    tokens, seconds = row.get("train/tokens"), row.get(TIME)
    for key, value in row.items():
        if key in _AXES or isinstance(value, bool) or not isinstance(value, int | float | None):
            continue
        yield (
            key,
            Point(
                row["step"],
                tokens if type(tokens) is int else None,
                float(seconds) if isinstance(seconds, int | float) else None,
                _float(value),
            ),
        )


def _float(value: float | None) -> float:
    try:
        return float("nan") if value is None else float(value)
    except OverflowError:  # of an integer with hundreds of digits
        return float("inf")
