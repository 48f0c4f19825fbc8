"""Bounded, thinned series of a run's metrics, and the charts that show them.

A series of any length is kept as bins of neighbouring points. When there are too many bins, neighbours are merged and
bins are twice as wide from then on. A merged bin holds exactly the extremes of its points, so every peak survives.
Values that are not finite are counted, and the first of them are kept.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runner.history.ledger import get_int, get_time
from runner.metrics.rows import Row
from runner.storage import JsonObject

BINS_MAX = 1000  # of a series, each with at most two points
BROKEN_MAX = 100  # values of a series that are not finite
SERIES_MAX = 40  # of a run; a job of its own may log any number of them
TIME = "perf/time"
_AXES = ("step", "train/tokens", TIME, "perf/attempt")


class Point(NamedTuple):
    """Value with its position on each axis; `seconds` is None for a row without a timestamp."""

    step: int
    tokens: int | None
    seconds: float | None
    value: float


class Bin(NamedTuple):
    """Extremes of neighbouring points."""

    low: Point
    high: Point


@dataclass(frozen=True)
class ThinnedSeries:
    """Part of a series that is drawn.

    Attributes:
        points: in order of step; all points if they were few, else the extremes of each bin, the first and the last.
        broken: the first points whose values are not finite.
        num_points: number of points of the series, broken ones included.
        num_broken: number of points whose values are not finite.
    """

    points: Sequence[Point]
    broken: Sequence[Point]
    num_points: int
    num_broken: int


class SeriesReducer:
    """One series, added in order of step, in bounded memory."""

    def __init__(self, bins_max: int = BINS_MAX):
        assert bins_max % 2 == 0, "bins are merged in pairs"
        self._bins_max = bins_max
        self._bins: list[Bin] = []
        self._width = self._num_in_last = 1  # points of a full bin, and of the last one
        self._first: Point | None = None
        self._last: Point | None = None
        self._broken: list[Point] = []
        self._num_points = self._num_broken = 0

    def add(self, point: Point) -> None:
        """Add the next point."""
        self._num_points += 1
        # A value that is not finite would hide the extremes of its bin.
        if not math.isfinite(point.value):
            self._num_broken += 1
            if len(self._broken) < BROKEN_MAX:
                self._broken.append(point)
            return
        self._first = self._first or point
        self._last = point
        if self._bins and self._num_in_last < self._width:
            self._bins[-1] = _merge(self._bins[-1], Bin(point, point))
            self._num_in_last += 1
            return
        # All bins are full here, so merging pairs leaves no partial bin.
        if len(self._bins) == self._bins_max:
            self._bins = _halve(self._bins)
            self._width *= 2
        self._bins.append(Bin(point, point))
        self._num_in_last = 1

    def thin(self, bins_max: int, more: Iterable[Point] = ()) -> ThinnedSeries:
        """Return at most `bins_max` bins of the series, followed by the points of `more`, which are not stored."""
        whole = SeriesReducer(self._bins_max)
        whole._bins, whole._width, whole._num_in_last = list(self._bins), self._width, self._num_in_last
        whole._first, whole._last = self._first, self._last
        whole._broken, whole._num_points, whole._num_broken = list(self._broken), self._num_points, self._num_broken
        for point in more:
            whole.add(point)
        bins = whole._bins
        while len(bins) > max(bins_max, 1):
            bins = _halve(bins)
        # A point may be both extremes of its bin.
        kept = {point.step: point for each in bins for point in each}
        kept |= {point.step: point for point in (whole._first, whole._last) if point is not None}
        points = [kept[step] for step in sorted(kept)]
        return ThinnedSeries(points, whole._broken, whole._num_points, whole._num_broken)


def _merge(left: Bin, right: Bin) -> Bin:
    low = right.low if right.low.value < left.low.value else left.low
    high = right.high if right.high.value > left.high.value else left.high
    return Bin(low, high)


def _halve(bins: Sequence[Bin]) -> list[Bin]:
    """Return each two neighbours as one bin; the last stays alone if their number is odd."""
    pairs = [_merge(*bins[index : index + 2]) for index in range(0, len(bins) - 1, 2)]
    return pairs + list(bins[len(pairs) * 2 :])


@dataclass(frozen=True)
class Chart:
    """Chart with a title, the label of its vertical axis, and the keys that it shows."""

    title: str
    unit: str
    keys: re.Pattern[str]
    has_log_axis: bool = False

    def to_json(self) -> JsonObject:
        """Return the chart as `page.js` reads it."""
        return {"title": self.title, "unit": self.unit, "log": self.has_log_axis}


CHARTS = (
    Chart("Loss", "loss (nats / token)", re.compile(r"train/loss|val/(.+/)?loss"), has_log_axis=True),
    Chart("Gradient norm", "global norm before clipping", re.compile(r"train/grad_norm"), has_log_axis=True),
    Chart("Learning rate", "learning rate", re.compile(r"train/learning_rate")),
    Chart("Throughput", "tokens / s", re.compile(r"perf/tokens_per_second")),
    Chart("Model FLOPs utilisation", "share of the devices' peak", re.compile(r"perf/mfu")),
)


def find_chart(key: str) -> Chart:
    """Return the chart of a key: one of `CHARTS`, or one of its own."""
    for chart in CHARTS:
        if chart.keys.fullmatch(key):
            return chart
    return Chart(key, key, re.compile(re.escape(key)))


class RunCurves:
    """All series of one run.

    Attributes:
        left_out: keys that are not drawn since there are too many; at most `SERIES_MAX` of them.
        num_rows: number of rows added.
    """

    def __init__(self, bins_max: int = BINS_MAX):
        self._bins_max = bins_max
        self._by_key: dict[str, SeriesReducer] = {}
        self.left_out: set[str] = set()
        self.num_rows = 0

    @property
    def keys(self) -> list[str]:
        """Keys of the series that are drawn."""
        return list(self._by_key)

    def add(self, row: Row) -> None:
        """Add the next row."""
        self.num_rows += 1
        for key, point in _list_points(row):
            if key in self._by_key:
                self._by_key[key].add(point)
            elif len(self._by_key) < SERIES_MAX:
                self._by_key[key] = SeriesReducer(self._bins_max)
                self._by_key[key].add(point)
            elif len(self.left_out) < SERIES_MAX:
                self.left_out.add(key)

    def thin(self, bins_max: int, newest: Iterable[Row] = ()) -> dict[str, ThinnedSeries]:
        """Return each thinned series by its key, followed by the `newest` rows, which are not stored."""
        more: dict[str, list[Point]] = {}
        for row in newest:
            for key, point in _list_points(row):
                more.setdefault(key, []).append(point)
        # Keys that occur only in the newest rows have no series yet.
        known = self._by_key | {key: SeriesReducer(self._bins_max) for key in more if key not in self._by_key}
        return {key: series.thin(bins_max, more.get(key, ())) for key, series in list(known.items())[:SERIES_MAX]}


def _list_points(row: Row) -> list[tuple[str, Point]]:
    """Return the numbers of a row that can be drawn, by key. A value that was not finite is null in the row."""
    tokens, seconds = get_int(row, "train/tokens"), get_time(row, TIME)
    points = []
    for key, value in row.items():
        if key in _AXES or isinstance(value, bool) or not isinstance(value, int | float | None):
            continue
        try:
            number = float("nan") if value is None else float(value)
        except OverflowError:  # an integer with hundreds of digits
            number = float("inf")
        points.append((key, Point(row["step"], tokens, seconds, number)))
    return points
