import grain
import pytest

from runner.data.sampling import FEW_WINDOWS, make_order, probe_order, split_tokens
from runner.errors import DataError


def test_the_last_fraction_of_the_tokens_is_validation() -> None:
    train, validation = split_tokens(1000, validation_fraction=0.1, sequence_length=9)
    assert (train.start, train.num_tokens, train.num_windows) == (0, 900, 99)
    assert (validation.start, validation.num_tokens, validation.num_windows) == (900, 100, 11)


@pytest.mark.parametrize("num_tokens", range(40, 60))
def test_no_window_of_one_split_touches_a_token_of_the_other(num_tokens: int) -> None:
    train, validation = split_tokens(num_tokens, validation_fraction=0.3, sequence_length=5)
    last = train.start + 5 * (train.num_windows - 1)
    assert last + 5 < validation.start
    assert last + 5 + 5 >= validation.start, "another window would have fitted"
    assert validation.start + 5 * validation.num_windows < num_tokens


def test_a_split_of_exactly_one_window_is_enough() -> None:
    train, validation = split_tokens(9, validation_fraction=0, sequence_length=8)
    assert (train.num_windows, validation.num_windows) == (1, 0)


def test_a_training_split_shorter_than_a_window_is_refused_with_the_numbers() -> None:
    message = (
        r"the training split has 8 tokens \(data\.validation_fraction=0\.2 of 10 tokens are set aside\), "
        r"fewer than one window of data\.sequence_length=8 \+ 1; use more tokens"
    )
    with pytest.raises(DataError, match=message):
        split_tokens(10, validation_fraction=0.2, sequence_length=8)


def test_a_validation_split_shorter_than_a_window_is_refused_with_a_fraction_that_works() -> None:
    message = (
        r"the validation split has 5 tokens \(data\.validation_fraction=0\.05 of 100 tokens\), fewer than one window "
        r"of data\.sequence_length=8 \+ 1; use a fraction of at least 0\.1, or 0 for no validation"
    )
    with pytest.raises(DataError, match=message):
        split_tokens(100, validation_fraction=0.05, sequence_length=8)
    split_tokens(100, validation_fraction=0.1, sequence_length=8)


def test_every_epoch_covers_each_window_once_in_a_new_order() -> None:
    order = make_order(100, seed=7)
    epochs = [[order[epoch * 100 + i] for i in range(100)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("num_windows", [1, 2, 3, 100, FEW_WINDOWS, FEW_WINDOWS + 1])
def test_whether_windows_are_few_or_many_their_order_is_grains(num_windows: int) -> None:
    of_grain = grain.MapDataset.range(num_windows).seed(7).shuffle().repeat()
    indices = [*range(3), *range(num_windows - 1, num_windows + 2), 5 * num_windows]
    order = make_order(num_windows, seed=7)
    assert [order[index] for index in indices] == [of_grain[index] for index in indices]
    assert len(order) == len(of_grain)


def test_seeds_give_different_orders_and_a_seed_always_the_same() -> None:
    probes = [probe_order(make_order(1000, seed=seed), num_windows=1000) for seed in (1, 1, 2)]
    assert probes[0] == probes[1] != probes[2]


def test_the_probe_of_the_order_notices_a_second_epoch_that_repeats_the_first() -> None:
    order = make_order(20, seed=1)
    repeated = [order[i % 20] for i in range(40)]
    assert probe_order(repeated, num_windows=20) != probe_order(order, num_windows=20)
