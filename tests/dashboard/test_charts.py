"""Thinned series: peaks are kept for every length and insertion order."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.dashboard.charts import CHARTS, EvenSample, Point, SeriesReducer, StepHistogram, find_chart
from runner.metrics.rows import ROW_KEYS


@pytest.mark.parametrize(
    ("counts", "edges", "shares"),
    [
        ([1.0, 3.0], [0.0, 1.0, 2.0], [0.125, 0.125, 0.375, 0.375]),
        ([4.0], [0.0, 2.0], [0.25] * 4),
        ([1.0, 0.0, 1.0], [0.0, 0.0, 2.0, 2.0], [0.5, 0.0, 0.0, 0.5]),
        ([0.0], [1.0, 1.0], [0.0] * 4),
    ],
)
def test_a_histogram_is_spread_over_common_bins(counts, edges, shares):
    histogram = StepHistogram(1, None, None, counts, edges)
    assert histogram.spread(0.0, 0.5, 4) == shares
    merged = histogram.merge_bins(1)
    assert (sum(merged.counts), merged.edges) == (sum(counts), [edges[0], edges[-1]])


@given(st.integers(1, 500), st.sampled_from([1, 2, 7, 12]))
def test_a_sample_is_evenly_spread_and_has_both_ends(num, num_max):
    items = EvenSample(num_max, range(num)).items
    gaps = {after - before for before, after in itertools.pairwise(items[:-1])}
    assert (items[0], items[-1], len(gaps) <= 1) == (0, num - 1, True)
    assert min(num, num_max) / 2 <= len(items) <= num_max + 1


VALUES = st.lists(st.floats(allow_nan=True, width=32), max_size=400)


def make_series(values: list[float], bins_max: int) -> SeriesReducer:
    series = SeriesReducer(bins_max)
    for step, value in enumerate(values):
        series.add(Point(step, None, None, value))
    return series


@given(VALUES, st.sampled_from([2, 4, 6, 16]), st.integers(1, 20), st.integers(0, 400))
def test_extremes_ends_and_non_finite_values_are_kept(values, bins_max, drawn_max, cut):
    cut = min(cut, len(values))
    points = [Point(step, None, None, value) for step, value in enumerate(values)]
    series = make_series(values[:cut], bins_max)
    thinned = series.thin(drawn_max, points[cut:])
    whole = [point for point in points if math.isfinite(point.value)]
    assert thinned == make_series(values, bins_max).thin(drawn_max)
    assert thinned.num_points == len(values)
    assert thinned.num_broken == len(values) - len(whole)
    assert [point.step for point in thinned.points] == sorted({point.step for point in thinned.points})
    assert set(thinned.points) <= set(whole)
    assert len(thinned.points) <= 2 * drawn_max + 2
    if not whole:
        return
    width = 1
    while math.ceil(len(whole) / width) > min(bins_max, drawn_max):
        width *= 2
    for start in range(0, len(whole), width):
        values_of_bin = [point.value for point in whole[start : start + width]]
        drawn = {point.value for point in thinned.points if point in whole[start : start + width]}
        assert {min(values_of_bin), max(values_of_bin)} <= drawn
    assert {whole[0], whole[-1]} <= set(thinned.points)


def test_a_spike_among_a_hundred_thousand_values_is_kept():
    values = [1.0] * 100_000
    values[54_321] = 9.0
    points = make_series(values, 1000).thin(100).points
    assert len(points) <= 202
    assert [point.step for point in points if point.value == 9.0] == [54_321]


@pytest.mark.parametrize("num", [1, 2, 999, 1000])
def test_a_series_with_fewer_points_than_bins_is_complete(num):
    assert [
        point.step for point in make_series([math.sin(step) for step in range(num)], 1000).thin(1000).points
    ] == list(range(num))


@given(st.lists(st.floats(-1e3, 1e3, width=32), max_size=400), st.sampled_from([2, 4, 16]), st.integers(1, 20))
def test_bin_means_include_all_values(values, bins_max, drawn_max):
    thinned = make_series(values, bins_max).thin(drawn_max)
    if len(thinned.points) == len(values):
        assert thinned.means == []
        return
    width = 1
    while math.ceil(len(values) / width) > min(bins_max, drawn_max):
        width *= 2
    bins = [values[start : start + width] for start in range(0, len(values), width)]
    assert [point.value for point in thinned.means] == pytest.approx([sum(each) / len(each) for each in bins], abs=1e-6)
    steps = [point.step for point in thinned.means]
    assert steps == sorted(steps)


@pytest.mark.parametrize(
    ("key", "title", "label"),
    [
        ("train/loss", "Loss", "training"),
        ("val/loss", "Loss", "validation"),
        ("val/web/loss", "Loss", "validation, web"),
        ("val/ema_0.99/loss", "Loss", "validation, EMA 0.99"),
        ("perf/step_seconds_median", "Step time", "median"),
        ("perf/step_seconds_p95", "Step time", "95th percentile"),
        ("perf/eval_seconds", "Evaluation time", "all evaluators"),
        ("perf/eval_tokens_per_second", "Throughput", "evaluation"),
        ("data/web/tokens", "Mixture of the data", "web"),
        ("data/a/b/tokens", "Mixture of the data", "a/b"),
        ("val/hellaswag/acc_norm", "Accuracy", "hellaswag, per character"),
        ("eval/hellaswag/acc_norm", "Accuracy", "hellaswag, per character"),
        ("eval/some/word_perplexity", "Eval some word perplexity", "eval some word perplexity"),
        ("train/router_z_loss", "Router z loss", "training"),
        ("val/router_z_loss", "Router z loss", "validation"),
        ("train/layer_3/norm", "Layer # norm", "layer 3 norm"),
        ("train/layer_12/norm", "Layer # norm", "layer 12 norm"),
        ("own", "Own", "own"),
        ("other/own_thing", "Other own thing", "other own thing"),
        ("", "", ""),
        ("///", "///", "///"),
        ("<b>{0}%s<i>", "<b>{0}%s<i>", "<b>{0}%s<i>"),
        ("train/top5", "Top5", "training"),
        ("val/recall_10", "Recall 10", "validation"),
        ("train/router/3/load", "Router # load", "router 3 load"),
        ("val/experts12/load", "Experts# load", "experts12 load, validation"),
    ],
)
def test_each_key_has_a_title_and_a_label(key, title, label):
    chart, found = find_chart(key)
    assert (chart.title, found) == (title, label)


def test_every_key_of_the_runner_belongs_to_a_chart():
    numbers = [key.name for key in ROW_KEYS if key.type not in (str, list, bool) and "<" not in key.name]
    for name in numbers:
        if name not in ("step", "train/tokens", "train/examples", "perf/time", "perf/attempt"):
            assert find_chart(name)[0] in CHARTS, name
