"""Which numbers of a row are drawn, in which chart, with which unit; and the series of one run, fed row by row."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from runner.page.reduction import BINS_MAX, Point, Reduction, Thinned
from runner.storage import JsonObject
from runner.train.metrics.row import Row

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


def chart_of(key: str) -> Chart:
    """The chart that a key is drawn in: one of `CHARTS`, or one of its own."""
    for chart in CHARTS:
        if chart.keys.fullmatch(key):
            return chart
    return Chart(key, key, re.compile(re.escape(key)))


class Curves:
    """All series of one run."""

    def __init__(self, bins_max: int = BINS_MAX):
        self._bins_max = bins_max
        self._by_key: dict[str, Reduction] = {}
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
                self._by_key[key] = Reduction(self._bins_max)
                self._by_key[key].add(point)
            elif len(self.left_out) < SERIES_MAX:
                self.left_out.add(key)

    def thinned(self, bins_max: int, newest: Iterable[Row] = ()) -> dict[str, Thinned]:
        """Each series by its key, with `newest` rows at the end that are not fed for good."""
        more: dict[str, list[Point]] = {}
        for row in newest:
            for key, point in _points(row):
                more.setdefault(key, []).append(point)
        known = self._by_key | {key: Reduction(self._bins_max) for key in more if key not in self._by_key}
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
