"""Bounded, thinned series of a run's metrics, and the charts that show them.

A series of any length is kept as bins of neighbouring points. When there are too many bins, neighbours are merged and
bins are twice as wide from then on. A merged bin holds exactly the extremes of its points, so every peak survives.
Values that are not finite are counted, and the first of them are kept.

Histograms are kept for some steps, spread over the run, and so is the distribution of norms, if there are too many of
them for curves.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from runner.history.ledger import get_float, get_int, get_time
from runner.metrics.media import find_media, thin_steps
from runner.metrics.rows import Row, find_unit
from runner.storage import JsonObject

BINS_MAX = 1000  # of a series, each with at most two points, and of a histogram
_BROKEN_MAX = 100  # values of a series that are not finite
_SERIES_MAX = 44  # of a run; a job of its own may log any number of them
_SAMPLES_MAX = 12  # steps of a run with text samples, and texts of a step
_SAMPLE_CHARACTERS_MAX = 1500
_MEDIA_MAX = 400  # steps of a run with images and audio; half of them are left when there are more
_HISTOGRAMS_MAX = 8  # of a run
_HISTOGRAM_STEPS_MAX = 40
_HISTOGRAM_BINS_MAX = 64
_HISTOGRAM_VALUE_MAX = 1e30
_NORMS = ("train/grad_norm/", "train/param_norm/")
_NORMS_MAX = 16  # of a row, one kind; of more their distribution is drawn
TIME = "perf/time"
_AXES = ("step", TIME, "perf/attempt")  # and the unit that a row counts


Item = TypeVar("Item")


class Point(NamedTuple):
    """Value with its position on each axis; `seconds` is None for a row without a timestamp."""

    step: int
    tokens: int | None
    seconds: float | None
    value: float


class _Bin(NamedTuple):
    """Extremes of neighbouring points."""

    low: Point
    high: Point


@dataclass(frozen=True)
class ThinnedSeries:
    """Thinned series, as it is drawn."""

    # In order of step; all points if they were few, else the extremes of each bin, the first and the last.
    points: Sequence[Point]
    means: Sequence[Point]  # mean of each bin, at the place of its later extreme; empty if `points` has all
    broken: Sequence[Point]  # the first points whose values are not finite
    num_points: int  # number of points of the series, broken ones included
    num_broken: int  # number of points whose values are not finite


class SeriesReducer:
    """One series, added in order of step, in bounded memory."""

    def __init__(self, bins_max: int = BINS_MAX):
        assert bins_max % 2 == 0, "bins are merged in pairs"
        self._bins_max = bins_max
        self._bins: list[_Bin] = []
        self._sums: list[float] = []  # of the values of each bin
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
            if len(self._broken) < _BROKEN_MAX:
                self._broken.append(point)
            return
        self._first = self._first or point
        self._last = point
        if self._bins and self._num_in_last < self._width:
            self._bins[-1] = _merge(self._bins[-1], _Bin(point, point))
            self._sums[-1] += point.value
            self._num_in_last += 1
            return
        # All bins are full here, so merging pairs leaves no partial bin.
        if len(self._bins) == self._bins_max:
            self._bins, self._sums = _halve(self._bins), _sum_pairs(self._sums)
            self._width *= 2
        self._bins.append(_Bin(point, point))
        self._sums.append(point.value)
        self._num_in_last = 1

    def thin(self, bins_max: int, more: Iterable[Point] = ()) -> ThinnedSeries:
        """Return at most `bins_max` bins of the series, followed by the points of `more`, which are not stored."""
        whole = SeriesReducer(self._bins_max)
        whole._bins, whole._width, whole._num_in_last = list(self._bins), self._width, self._num_in_last
        whole._sums, whole._first, whole._last = list(self._sums), self._first, self._last
        whole._broken, whole._num_points, whole._num_broken = list(self._broken), self._num_points, self._num_broken
        for point in more:
            whole.add(point)
        bins, sums = whole._bins, whole._sums
        counts = [float(whole._width)] * (len(bins) - 1) + [float(whole._num_in_last)] * bool(bins)
        while len(bins) > max(bins_max, 1):
            bins, sums, counts = _halve(bins), _sum_pairs(sums), _sum_pairs(counts)
        means = [
            max(each, key=lambda point: point.step)._replace(value=total / count)
            for each, total, count in zip(bins, sums, counts, strict=True)
        ]
        # A point may be both extremes of its bin.
        kept = {point.step: point for each in bins for point in each}
        kept |= {point.step: point for point in (whole._first, whole._last) if point is not None}
        points = [kept[step] for step in sorted(kept)]
        is_whole = len(points) + whole._num_broken == whole._num_points
        return ThinnedSeries(points, [] if is_whole else means, whole._broken, whole._num_points, whole._num_broken)


def _merge(left: _Bin, right: _Bin) -> _Bin:
    low = right.low if right.low.value < left.low.value else left.low
    high = right.high if right.high.value > left.high.value else left.high
    return _Bin(low, high)


def _halve(bins: Sequence[_Bin]) -> list[_Bin]:
    """Return each two neighbours as one bin; the last stays alone if their number is odd."""
    pairs = [_merge(*bins[index : index + 2]) for index in range(0, len(bins) - 1, 2)]
    return pairs + list(bins[len(pairs) * 2 :])


def _sum_pairs(values: Sequence[float]) -> list[float]:
    return [sum(values[index : index + 2]) for index in range(0, len(values), 2)]


@dataclass(frozen=True)
class Chart:
    """Chart of series that belong together."""

    title: str
    unit: str
    form: str = ""  # "share" for fractions of 1, "stack" for amounts that are drawn as fractions of their sum, else ""
    allows_log_scale: bool = False  # True if the axis becomes logarithmic for values that differ by a large factor
    is_smoothed: bool = False  # True if a smoothed line is drawn over the values of training
    starts_at_zero: bool = True  # True if a linear axis includes zero
    factor: float = 1.0  # factor from the unit of the rows to the unit of the chart

    def to_json(self) -> JsonObject:
        """Return the chart as `page.js` reads it."""
        return {
            "title": self.title,
            "unit": self.unit,
            "form": self.form,
            "auto": self.allows_log_scale,
            "smooth": self.is_smoothed,
            "zero": self.starts_at_zero,
        }


LOSS = Chart("Loss", "nats / token", allows_log_scale=True, is_smoothed=True, starts_at_zero=False)
_BITS = Chart("Bits per byte", "bits / byte of text", allows_log_scale=True, starts_at_zero=False)
_ACCURACY = Chart("Accuracy", "share of right answers", form="share")
_GRADIENT = Chart("Gradient norm", "global norm before clipping", allows_log_scale=True, is_smoothed=True)
_GRADIENTS = Chart("Gradient norm by module", "norm before clipping", allows_log_scale=True)
_PARAMETERS = Chart("Parameter norm", "norm", allows_log_scale=True)
_RATE = Chart("Learning rate", "per step")
_THROUGHPUT = Chart("Throughput", "tokens / s", is_smoothed=True)
_EXAMPLES = Chart("Examples per second", "examples / s", is_smoothed=True)
_MFU = Chart("Model FLOPs utilisation", "share of the devices' peak", form="share", is_smoothed=True)
_EVALUATION_TIME = Chart("Evaluation time", "seconds")
_STEP_TIME = Chart("Step time", "seconds")
_MEMORY = Chart("Device memory", "GiB", factor=1 / (1 << 30))
_UTILIZATION = Chart("GPU utilisation", "share of the time with a kernel", form="share", is_smoothed=True)
_HOST_MEMORY = Chart("Host memory", "GiB", factor=1 / (1 << 30))
_CPUS = Chart("CPU cores in use", "cores", is_smoothed=True)
_NOISE = Chart("Gradient noise scale", "tokens", allows_log_scale=True)
_TARGETS = Chart("Real target tokens", "tokens of a step", is_smoothed=True)
_SKIPPED = Chart("Skipped updates", "steps since the start")
_ROLL_BACKS = Chart("Roll-backs", "since the start")
_HIGH_LOSS = Chart("Steps with a high loss", "in succession")
_MIXTURE = Chart("Mixture of the data", "share of the tokens drawn so far", form="stack")
_EPOCHS = Chart("Epochs of each source", "passes over the source")
CHARTS = (
    LOSS, _BITS, _ACCURACY, _GRADIENT, _RATE, _THROUGHPUT, _EXAMPLES, _MFU, _STEP_TIME, _EVALUATION_TIME, _MEMORY,
    _UTILIZATION, _HOST_MEMORY, _CPUS, _NOISE, _TARGETS, _SKIPPED, _ROLL_BACKS, _HIGH_LOSS, _MIXTURE, _EPOCHS,
    _GRADIENTS, _PARAMETERS,
)  # fmt: skip

# Keys of the rows, the chart that shows them, and the name of their series.
_SERIES = tuple(
    (re.compile(keys), chart, label)
    for keys, chart, label in (
        ("train/loss", LOSS, "training"),
        ("train/loss_mean", LOSS, "training, mean between rows"),
        ("val/loss", LOSS, "validation"),
        ("val/ema_([^/]+)/loss", LOSS, "validation, EMA {}"),
        ("val/(.+)/loss", LOSS, "validation, {}"),
        ("val/bits_per_byte", _BITS, "validation"),
        ("val/ema_([^/]+)/bits_per_byte", _BITS, "validation, EMA {}"),
        ("val/(.+)/bits_per_byte", _BITS, "validation, {}"),
        ("train/accuracy", _ACCURACY, "training"),
        ("val/accuracy", _ACCURACY, "validation"),
        ("e?val/(.+)/acc(?:uracy)?", _ACCURACY, "{}"),
        ("e?val/(.+)/acc_norm", _ACCURACY, "{}, per character"),
        ("e?val/(.+)/acc_bytes", _ACCURACY, "{}, per byte"),
        ("train/grad_norm", _GRADIENT, "training"),
        ("train/grad_norm/(.+)", _GRADIENTS, "{}"),
        ("train/param_norm", _PARAMETERS, "all parameters"),
        ("train/param_norm/(.+)", _PARAMETERS, "{}"),
        ("train/learning_rate", _RATE, "learning rate"),
        ("perf/tokens_per_second", _THROUGHPUT, "all devices"),
        ("perf/eval_tokens_per_second", _THROUGHPUT, "evaluation"),
        ("perf/examples_per_second", _EXAMPLES, "all devices"),
        ("perf/eval_examples_per_second", _EXAMPLES, "evaluation"),
        ("perf/eval_seconds", _EVALUATION_TIME, "all evaluators"),
        ("perf/mfu", _MFU, "all devices"),
        ("perf/step_seconds_median", _STEP_TIME, "median"),
        ("perf/step_seconds_p95", _STEP_TIME, "95th percentile"),
        ("perf/device_bytes", _MEMORY, "in use, fullest device of process 0"),
        ("perf/peak_bytes", _MEMORY, "peak so far"),
        ("perf/device_utilization", _UTILIZATION, "process 0"),
        ("perf/host_bytes", _HOST_MEMORY, "process 0"),
        ("perf/host_free_bytes", _HOST_MEMORY, "free"),
        ("perf/cpu_cores", _CPUS, "process 0"),
        ("train/noise_scale", _NOISE, "training"),
        ("train/token_count", _TARGETS, "training"),
        ("train/skipped_updates", _SKIPPED, "training"),
        ("train/roll_backs", _ROLL_BACKS, "training"),
        ("train/high_loss_steps", _HIGH_LOSS, "training"),
        ("data/(.+)/(?:tokens|examples)", _MIXTURE, "{}"),
        ("data/(.+)/epochs", _EPOCHS, "{}"),
    )
)
HIDDEN_KEYS = ("train/loss_mean",)  # shown by a click on the legend
# Number of a repeated part of a model, such as a layer. Any other number belongs to its name, as in `top5`.
_INDEX = re.compile(r"((?:layer|block|expert|head|stage|group|device)s?[_/]?|/)\d+(?=[_/]|$)")
_KINDS = {"train": "training", "val": "validation"}


def find_chart(key: str) -> tuple[Chart, str]:
    """Return the chart of a key, and the name of its series in the legend.

    Keys that a job has made up share a chart if they differ in the kind, `train` or `val`, or in the number of a layer,
    an expert, or another repeated part.
    """
    for keys, chart, label in _SERIES:
        if match := keys.fullmatch(key):
            return chart, label.format(*match.groups())
    kind, slash, name = key.partition("/")
    if kind not in (*_KINDS, "perf", "data") or not slash:
        kind, name = "", key
    label, title = (re.sub(r"[_/]+", " ", text).strip() or key for text in (name, _INDEX.sub(r"\1#", name)))
    kind = _KINDS.get(kind, "")
    if "#" not in title:
        return Chart(title[:1].upper() + title[1:], "value", allows_log_scale=True, starts_at_zero=False), kind or label
    return Chart(title[:1].upper() + title[1:], "value", allows_log_scale=True, starts_at_zero=False), (
        f"{label}, {kind}" if kind == "validation" else label
    )


class StepHistogram(NamedTuple):
    """Histogram of one row, with the position of the row on each axis."""

    step: int
    tokens: int | None
    seconds: float | None
    counts: Sequence[float]
    edges: Sequence[float]  # one more than `counts`, ascending

    def merge_bins(self, bins_max: int) -> "StepHistogram":
        """Return the histogram with neighbouring bins merged, so that it has at most `bins_max`."""
        stride = math.ceil(len(self.counts) / bins_max)
        counts = [sum(self.counts[start : start + stride]) for start in range(0, len(self.counts), stride)]
        return self._replace(counts=counts, edges=[*self.edges[:-1:stride], self.edges[-1]])

    def spread(self, low: float, width: float, num_bins: int) -> list[float]:
        """Return the share of the counts in each of `num_bins` bins of one width, beginning at `low`."""
        shares = [0.0] * num_bins
        total = sum(self.counts) or 1.0
        for count, left, right in zip(self.counts, self.edges, self.edges[1:], strict=False):
            first, last = (min(int((edge - low) / width), num_bins - 1) for edge in (left, right))
            for index in range(first, last + 1):
                # A bin of no width lies in one bin as a whole.
                begin, end = max(left, low + index * width), min(right, low + (index + 1) * width)
                shares[index] += count / total * ((end - begin) / (right - left) if first < last else 1.0)
        return shares


class EvenSample(Generic[Item]):
    """At most `num_max` items of a growing sequence, evenly spread, and its newest item."""

    def __init__(self, num_max: int, items: Iterable[Item] = ()):
        self._num_max = num_max
        self._kept: list[Item] = []
        self._newest: list[Item] = []  # if it is not kept
        self._every, self._num = 1, 0
        for item in items:
            self.add(item)

    def add(self, item: Item) -> None:
        """Add the next item."""
        is_kept = self._num % self._every == 0
        self._kept += [item] * is_kept
        self._newest = [] if is_kept else [item]
        self._num += 1
        if len(self._kept) > self._num_max:
            self._kept, self._newest = self._kept[::2], self._kept[-1:] * (len(self._kept) % 2 == 0)
            self._every *= 2

    @property
    def items(self) -> list[Item]:
        """The kept items in order."""
        return self._kept + self._newest


class RunCurves:
    """All series of one run, and some of its histograms and texts."""

    def __init__(self) -> None:
        self._by_key: dict[str, SeriesReducer] = {}
        self.left_out: set[str] = set()  # keys that are not drawn since there are too many
        self.num_rows = 0
        self._samples: EvenSample[tuple[int, dict[str, str]]] = EvenSample(_SAMPLES_MAX)
        self._histograms: dict[str, EvenSample[StepHistogram]] = {}
        self._media: dict[int, dict[str, str]] = {}

    @property
    def keys(self) -> list[str]:
        """Keys of the series that are drawn."""
        return list(self._by_key)

    def add(self, row: Row) -> None:
        """Add the next row."""
        self.num_rows += 1
        if texts := _list_samples(row):
            self._samples.add((row["step"], texts))
        if media := find_media(row):
            self._media[row["step"]] = media
            if len(self._media) > _MEDIA_MAX:
                self._media = {step: self._media[step] for step in thin_steps(self._media, _MEDIA_MAX // 2)}
        for key, histogram in _list_histograms(row):
            if key in self._histograms or len(self._histograms) < _HISTOGRAMS_MAX:
                known = self._histograms.setdefault(key, EvenSample(_HISTOGRAM_STEPS_MAX))
                known.add(histogram.merge_bins(_HISTOGRAM_BINS_MAX))
        for key, point in _list_points(row):
            if key in self._by_key:
                self._by_key[key].add(point)
            elif len(self._by_key) < _SERIES_MAX:
                self._by_key[key] = SeriesReducer()
                self._by_key[key].add(point)
            elif len(self.left_out) < _SERIES_MAX:
                self.left_out.add(key)

    def list_samples(self, newest: Iterable[Row] = ()) -> list[tuple[int, dict[str, str]]]:
        """Return steps spread over the run, the newest first, with the text samples of each by key."""
        more = ((row["step"], texts) for row in newest if (texts := _list_samples(row)))
        return (self._samples.items + EvenSample(_SAMPLES_MAX, more).items)[::-1]

    def list_media(self, newest: Iterable[Row] = ()) -> dict[int, dict[str, str]]:
        """Return the names of the images and audio that rows refer to, by key and step; of many steps some."""
        return self._media | {row["step"]: media for row in newest if (media := find_media(row))}

    def list_histograms(self, newest: Iterable[Row] = ()) -> dict[str, list[StepHistogram]]:
        """Return histograms of steps spread over the run, in order, by key."""
        found = {key: known.items for key, known in self._histograms.items()}
        more: dict[str, EvenSample[StepHistogram]] = {}
        for key, histogram in (each for row in newest for each in _list_histograms(row)):
            more.setdefault(key, EvenSample(_HISTOGRAM_STEPS_MAX)).add(histogram)
        known_keys = [*found, *(key for key in more if key not in found)][:_HISTOGRAMS_MAX]
        return {key: found.get(key, []) + (more[key].items if key in more else []) for key in known_keys}

    def thin(self, bins_max: int, newest: Iterable[Row] = ()) -> dict[str, ThinnedSeries]:
        """Return each thinned series by its key, followed by the `newest` rows, which are not stored."""
        more: dict[str, list[Point]] = {}
        for row in newest:
            for key, point in _list_points(row):
                more.setdefault(key, []).append(point)
        # Keys that occur only in the newest rows have no series yet.
        known = self._by_key | {key: SeriesReducer() for key in more if key not in self._by_key}
        return {key: series.thin(bins_max, more.get(key, ())) for key, series in list(known.items())[:_SERIES_MAX]}


def _list_samples(row: Row) -> dict[str, str]:
    """Return the texts that an evaluation has added to a row, shortened, by key."""
    texts = {key: value[:_SAMPLE_CHARACTERS_MAX] for key, value in row.items() if isinstance(value, str)}
    return dict([(key, text) for key, text in texts.items() if key.startswith("val/")][:_SAMPLES_MAX])


def _list_histograms(row: Row) -> list[tuple[str, StepHistogram]]:
    """Return the histograms of a row by key, and that of the logarithms of its norms where these are too many."""
    place = row["step"], get_int(row, "train/tokens"), get_time(row, TIME)
    found = []
    for key, value in row.items():
        if isinstance(value, dict) and {*value} == {"counts", "edges"}:
            counts, edges = value["counts"], value["edges"]
            if not isinstance(counts, list) or not isinstance(edges, list) or not 0 < len(counts) <= BINS_MAX:
                continue
            numbers = [get_float({"": each}, "") for each in (*counts, *edges)]
            known = [number for number in numbers if number is not None and abs(number) < _HISTOGRAM_VALUE_MAX]
            heights, borders = known[: len(counts)], known[len(counts) :]
            if len(known) == 2 * len(counts) + 1 and min(heights) >= 0 and borders == sorted(borders):
                found.append((key, StepHistogram(*place, heights, borders)))
    for prefix in _NORMS:
        norms = sorted(
            math.log10(norm) for key in row if key.startswith(prefix) and (norm := get_float(row, key) or 0) > 0
        )
        if _count_norms(row, prefix) > _NORMS_MAX and norms:
            # Each norm is a bin of no width.
            edges = [edge for norm in norms for edge in (norm, norm)]
            heights = [1.0, *(height for _ in norms[1:] for height in (0.0, 1.0))]
            found.append((prefix.rstrip("/"), StepHistogram(*place, heights, edges)))
    return found


def _count_norms(row: Row, prefix: str) -> int:
    return sum(key.startswith(prefix) for key in row)


def _list_points(row: Row) -> list[tuple[str, Point]]:
    """Return the numbers of a row that can be drawn, by key. A value that was not finite is null in the row."""
    tokens, seconds = get_int(row, "train/tokens"), get_time(row, TIME)
    points = []
    axes = (*_AXES, f"train/{find_unit(row)}")
    many = tuple(prefix for prefix in _NORMS if _count_norms(row, prefix) > _NORMS_MAX)
    for key, value in row.items():
        if key in axes or key.startswith(many) or isinstance(value, bool) or not isinstance(value, int | float | None):
            continue
        try:
            number = float("nan") if value is None else float(value)
        except OverflowError:  # an integer with hundreds of digits
            number = float("inf")
        points.append((key, Point(row["step"], tokens, seconds, number)))
    return points
