"""Which steps may go: decided by numbers alone."""

import itertools
import math

import pytest

from runner.checkpoint import superfluous


def unmeasured(*steps):
    return dict.fromkeys(steps)


def kept(metrics, *arguments, **options):
    return sorted(metrics.keys() - set(superfluous(metrics, *arguments, **options)))


@pytest.mark.parametrize(
    ("steps", "keep_last", "expected"),
    [
        ((800, 900, 1000), 2, [800]),
        ((800, 900, 1000), 1, [800, 900]),
        ((800, 900, 1000), 3, []),
        ((800, 900, 1000), 4, []),
        ((1000,), 1, []),
        ((), 1, []),
    ],
)
def test_the_newest_stay(steps, keep_last, expected):
    assert superfluous(unmeasured(*steps), keep_last) == expected


def test_steps_are_numbers_and_not_text():
    assert superfluous(unmeasured(5, 10, 99, 100, 900, 1000), 2) == [5, 10, 99, 100]


def test_multiples_of_keep_every_steps_stay_for_good():
    steps = range(100, 1300, 100)
    assert kept(unmeasured(*steps), 2, keep_every_steps=500) == [500, 1000, 1100, 1200]
    assert kept(unmeasured(*steps), 2, keep_every_steps=5000) == [1100, 1200]
    assert kept(unmeasured(*steps), 2, keep_every_steps=100) == list(steps)


@pytest.mark.parametrize(("best", "expected"), [("min", [200, 500]), ("max", [300, 500]), (None, [500])])
def test_the_best_stays_too(best, expected):
    assert kept({100: 2.0, 200: -1.0, 300: 4.0, 400: 3.0, 500: 1.0}, 1, best=best) == expected


@pytest.mark.parametrize("best", ["min", "max"])
def test_of_equals_the_older_stays(best):
    worse = 2.0 if best == "min" else 0.0
    assert kept({100: worse, 200: 1.0, 300: 1.0, 400: worse, 500: worse}, 1, best=best) == [200, 500]


@pytest.mark.parametrize("best", ["min", "max"])
@pytest.mark.parametrize("value", [None, math.nan])
def test_what_was_not_measured_is_never_the_best(best, value):
    assert kept({100: value, 200: 1.0, 300: value, 400: value}, 1, best=best) == [200, 400]
    assert kept({100: value, 200: value, 300: value}, 1, best=best) == [300]


@pytest.mark.parametrize(("best", "expected"), [("min", [100, 400]), ("max", [300, 400])])
def test_an_infinite_value_is_a_value(best, expected):
    assert kept({100: -math.inf, 200: 0.0, 300: math.inf, 400: 0.0}, 1, best=best) == expected


def test_what_is_kept_for_one_reason_does_not_count_for_another():
    metrics = {100: 3.0, 200: 1.0, 300: 2.0, 400: 2.0, 500: 2.0, 600: 2.0}
    assert kept(metrics, 2, keep_every_steps=300, best="min") == [200, 300, 500, 600]


@pytest.mark.parametrize("best", [None, "min", "max"])
@pytest.mark.parametrize("keep_every_steps", [None, 2])
def test_the_newest_never_goes_and_the_order_of_the_mapping_does_not_matter(best, keep_every_steps):
    values = {9: 1.0, 10: None, 11: 0.5, 100: math.nan, 1000: 0.5}
    expected = superfluous(values, 1, keep_every_steps, best)
    assert expected == sorted(expected)
    assert 1000 not in expected
    for order in itertools.permutations(values.items()):
        assert superfluous(dict(order), 1, keep_every_steps, best) == expected
