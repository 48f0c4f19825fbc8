"""Scaling laws: their fit, and the coverage of their forecasts."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from runner.errors import InvalidError
from runner.history.scaling import COVERAGE, ScalingFit, ScalingPoint

Truth = Callable[[float, float], float]


def chinchilla(parameters: float, tokens: float) -> float:
    """Return the loss of the published law of arXiv:2203.15556."""
    return 1.69 + 406.4 / parameters**0.34 + 410.7 / tokens**0.28


def one_ratio(parameters: float, _: float) -> float:
    return 1.2 + 30 / parameters**0.3


def without_floor(parameters: float, _: float) -> float:
    return 12 / parameters**0.15


LADDER = [(size, 20 * size) for size in (20_000, 50_000, 100_000, 200_000, 400_000)]
GRID = [(size, ratio * size) for size in (10**7, 3 * 10**7, 10**8, 3 * 10**8) for ratio in (5, 20, 80)]


def measure(truth: Truth, sizes: list[tuple[int, int]], noise: float = 0.0, seed: int = 0) -> list[ScalingPoint]:
    """Return runs of these sizes whose log L has normal noise."""
    normal = np.random.default_rng(seed).standard_normal(len(sizes))
    return [ScalingPoint(n, d, truth(n, d) * math.exp(noise * z)) for (n, d), z in zip(sizes, normal, strict=True)]


# Law, sizes of the runs, size of the forecast, noise.
LAWS: dict[str, tuple[Truth, list[tuple[int, int]], tuple[int, int], float]] = {
    "five sizes": (one_ratio, LADDER, (1_600_000, 32_000_000), 0.005),
    "five sizes, little noise": (one_ratio, LADDER, (1_600_000, 32_000_000), 0.001),
    "four sizes": (one_ratio, LADDER[1:], (1_600_000, 32_000_000), 0.003),
    "no floor": (without_floor, LADDER, (800_000, 16_000_000), 0.003),
    "grid": (chinchilla, GRID, (3 * 10**9, 6 * 10**10), 0.003),
}


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", LAWS)
def test_intervals_contain_as_many_runs_as_they_state(name: str) -> None:
    truth, sizes, target, noise = LAWS[name]
    draws, hits = 300, 0
    came = np.random.default_rng(1).standard_normal(draws)
    for seed in range(draws):
        loss = truth(*target) * math.exp(noise * came[seed])
        hits += ScalingFit(measure(truth, sizes, noise, seed)).is_expected(ScalingPoint(*target, loss))
    # Three standard deviations of a share of 300 draws. The bounds of the law, such as E >= 0, may widen an interval.
    assert COVERAGE - 0.052 <= hits / draws <= 0.98


def test_an_interval_ends_where_runs_are_no_more_expected() -> None:
    fit = ScalingFit(measure(one_ratio, LADDER, 0.005))
    found = fit.forecast(1_600_000, 32_000_000)
    assert found.low < found.loss < found.high
    for loss, is_expected in ((found.low * 1.0001, True), (found.low * 0.9999, False), (found.high * 1.0001, False)):
        assert fit.is_expected(ScalingPoint(1_600_000, 32_000_000, loss)) == is_expected


def test_a_law_without_noise_is_found() -> None:
    law = ScalingFit(measure(chinchilla, GRID)).law
    assert (law.floor, law.of_size[0], law.of_size[1]) == pytest.approx((1.69, 406.4, 0.34), rel=1e-3)
    assert law.of_tokens == pytest.approx((410.7, 0.28), rel=1e-3)
    law = ScalingFit(measure(one_ratio, LADDER)).law
    assert (law.floor, *law.of_size) == pytest.approx((1.2, 30, 0.3), rel=1e-3)
    assert law.of_tokens is None


def test_fewer_runs_and_larger_sizes_have_wider_intervals() -> None:
    def width(points: list[ScalingPoint], factor: int) -> float:
        found = ScalingFit(points).forecast(factor * 400_000, factor * 8_000_000)
        return math.log(found.high / found.low)

    points = measure(one_ratio, [*LADDER, (30_000, 600_000), (300_000, 6_000_000)], 0.003)
    assert width(points, 4) < width(points, 16)
    assert width(points, 4) < width(points[1:5], 4)


def test_the_order_of_runs_changes_no_bit() -> None:
    points = measure(chinchilla, GRID, 0.003)
    fits = ScalingFit(points), ScalingFit(points[::-1])
    assert fits[0].law == fits[1].law
    assert fits[0].forecast(10**9, 10**10) == fits[1].forecast(10**9, 10**10)


def test_the_size_of_an_outlier_does_not_matter() -> None:
    def forecast(factor: float) -> float:
        points = measure(chinchilla, GRID, 0.003)
        points[4] = ScalingPoint(points[4].parameters, points[4].tokens, factor * points[4].loss)
        return ScalingFit(points).forecast(3 * 10**9, 6 * 10**10).loss

    assert forecast(1.5) == pytest.approx(forecast(3.0), rel=1e-3)
    assert forecast(1.5) == pytest.approx(chinchilla(3e9, 6e10), rel=0.03)


REFUSED: dict[str, tuple[list[ScalingPoint], str]] = {
    "no runs": ([], "at least 4"),
    "three sizes": (measure(one_ratio, LADDER[:3]), "3 sizes: .* at least 4"),
    "one size often": (measure(one_ratio, LADDER[:1] * 9), "1 sizes"),
    "few runs with two ratios": (measure(chinchilla, GRID[:5]), "5 runs of 2 sizes: .* at least 6 runs of at least 3"),
    "loss that is not finite": ([*measure(one_ratio, LADDER), ScalingPoint(10**6, 2 * 10**7, math.nan)], "loss nan"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_too_few_runs_are_refused(name: str) -> None:
    points, message = REFUSED[name]
    with pytest.raises(InvalidError, match=message):
        ScalingFit(points)
