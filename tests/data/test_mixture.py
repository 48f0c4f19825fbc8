"""Mixtures: the source of an example follows from its number, and every range has the shares of the weights."""

import itertools

import numpy as np
import pytest

from runner.data.sampling import Mixture

WEIGHTS = {
    "one": [3.0],
    "equal": [1, 1, 1],
    "uneven": [0.7, 0.2, 0.1],
    "not of one": [12.5, 4, 0.31],
    "tiny": [1e-4, 1, 3.3],
    "tinier": [1e-9, 1],
    "many": [1 + index % 7 for index in range(100)],
}


@pytest.fixture(params=WEIGHTS)
def mixture(request: pytest.FixtureRequest) -> Mixture:
    return Mixture(WEIGHTS[request.param])


@pytest.mark.parametrize("first", [0, 1, 12_345, 10**12])
def test_every_range_has_the_shares_of_the_weights(mixture: Mixture, first: int) -> None:
    before, after = mixture.count_examples(first), mixture.count_examples(first + 10_000)
    for old, new, share in zip(before, after, mixture.shares, strict=True):
        assert abs((new - old) / 10_000 - share) < 1e-3


def test_each_example_increments_one_count(mixture: Mixture) -> None:
    counts = [mixture.count_examples(number) for number in range(2_000)]
    for number, (old, new) in enumerate(itertools.pairwise(counts)):
        assert sum(old) == number
        assert sorted(later - earlier for earlier, later in zip(old, new, strict=True))[-2:] in ([1], [0, 1])


@pytest.mark.parametrize("first", [0, 7, 999, 10**12])
def test_any_example_is_located_directly(mixture: Mixture, first: int) -> None:
    sources, numbers = mixture.locate(first, 50)
    for index in range(50):
        source, number = mixture.locate(first + index, 1)
        assert (source[0], number[0]) == (sources[index], numbers[index])
    counts = np.array(mixture.count_examples(first))
    for source, number in zip(sources, numbers, strict=True):
        assert number == counts[source]
        counts[source] += 1
