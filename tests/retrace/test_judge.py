"""Statistics of a trial: outcomes by the interval, and the rate of false alarms with correlated differences."""

import math

import numpy as np
import pytest

from runner.errors import InvalidError
from runner.retrace.judge import CRITERIA, MIN_STEPS, NUM_BLOCKS, Comparison, Criterion, compare_paired, parse_criteria

LOSS = Criterion("train/loss", 0.001)


def make_pairs(effect: float, noise: float, correlation: float = 0.0, num_steps: int = 64, seed: int = 0):
    """Return losses around 2, and those with a relative effect and noise, whose successive values are correlated."""
    chance = np.random.default_rng(seed)
    old = 2 + chance.normal(0, 0.3, num_steps)
    state, differences = 0.0, []
    for shock in chance.normal(0, noise * math.sqrt(1 - correlation**2), num_steps):
        state = correlation * state + shock
        differences.append(2 * (effect + state))
    return old.tolist(), (old + differences).tolist()


@pytest.mark.parametrize(
    ("effect", "noise", "outcome"),
    [
        (0.0, 0.0, "same"),
        (0.05, 1e-4, "worse"),
        (-0.05, 1e-4, "better"),
        (0.0005, 1e-5, "no worse"),
        (-0.0005, 1e-5, "no worse"),
        (0.0, 0.1, "unclear"),
        (0.001, 0.01, "unclear"),
    ],
)
def test_an_outcome_needs_the_whole_interval(effect, noise, outcome):
    found = compare_paired("loss", LOSS, *make_pairs(effect, noise))
    assert found is not None
    assert found.outcome == outcome
    assert found.low <= found.difference <= found.high
    assert found.num_pairs == 32
    assert outcome.upper() in found.format() or found.is_same


def test_the_first_half_of_the_steps_does_not_count():
    old, new = make_pairs(0.0, 1e-5)
    new[:32] = [value * 10 for value in new[:32]]
    found = compare_paired("loss", LOSS, old, new)
    assert found is not None
    assert found.outcome == "no worse"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_worse_in_the_new_run_and_no_reference_in_the_old_one(bad):
    old, new = make_pairs(-0.1, 1e-4)
    found = compare_paired("loss", LOSS, old, [*new[:-1], bad])
    assert found is not None
    assert found.outcome == "worse"
    assert compare_paired("loss", LOSS, [*old[:-1], bad], new) is None


@pytest.mark.parametrize("num_steps", [0, 1, NUM_BLOCKS, 2 * NUM_BLOCKS - 2])
def test_too_few_steps_are_not_compared(num_steps):
    assert compare_paired("loss", LOSS, *make_pairs(0.0, 0.01, num_steps=num_steps)) is None


def test_values_without_noise_have_no_interval():
    memory = Criterion("perf/peak_bytes", 0.0, has_noise=False)
    found = compare_paired("memory", memory, [100.0] * MIN_STEPS, [101.0] * MIN_STEPS)
    assert found is not None
    assert (found.low, found.high, found.outcome) == (pytest.approx(0.01), pytest.approx(0.01), "worse")


# Shares of 400 trials without an effect in which the interval is above 0. That of independent differences is 2.5% by
# construction; differences that are alike over more than a block make intervals too narrow.
@pytest.mark.parametrize(("correlation", "limit"), [(0.0, 0.035), (0.5, 0.05), (0.8, 0.07)])
def test_false_alarms_are_rare(correlation, limit):
    alarms = 0
    for seed in range(400):
        found = compare_paired("loss", LOSS._replace(margin=0.0), *make_pairs(0, 0.01, correlation, 200, seed))
        assert found is not None
        alarms += found.outcome == "worse"
    assert 0.005 < alarms / 400 <= limit


def test_the_advised_number_of_steps_tells():
    old, new = make_pairs(-0.0001, 0.01, num_steps=64)
    found = compare_paired("loss", LOSS, old, new)
    assert found is not None
    assert found.outcome == "unclear"
    more = compare_paired("loss", LOSS, *make_pairs(-0.0001, 0.01, num_steps=4 * found.num_steps_needed))
    assert more is not None
    assert more.outcome == "no worse"


@pytest.mark.parametrize(
    ("margin", "high", "advice"),
    [
        (0.001, 0.0045, "try about --steps 1296, or accept a larger increase by --judge loss=0.45%"),
        (0.0, 0.0045, "accept a larger increase by --judge loss=0.45%"),
        (0.0, 1.5, "try many more steps"),
    ],
)
def test_an_unclear_outcome_names_the_options_that_help(margin: float, high: float, advice: str) -> None:
    found = Comparison("loss", margin, 1.0, 1.0, 0.0, -high, high, 32, False)
    assert found.outcome == "unclear"
    assert found.advise() == advice


def test_criteria_have_margins_in_shares_and_percent():
    assert parse_criteria([]) == {"loss": CRITERIA["loss"]}
    found = parse_criteria(["loss=0.5%", "step-time=0.1", "memory"])
    assert [each.margin for each in found.values()] == [0.005, 0.1, 0.0]


@pytest.mark.parametrize(
    "text", ["speed", "", "=1", "loss=x", "loss=-1", "loss=1", "loss=nan", "loss=200%", "loss=1%%"]
)
def test_a_wrong_criterion_is_refused(text):
    with pytest.raises(InvalidError, match="--judge"):
        parse_criteria([text])
