import grain
import pytest

from runner.data.sampling import FEW_WINDOWS, ShuffledOrder, probe_order, split_tokens
from runner.errors import DataError


def test_validation_is_the_last_fraction_of_the_tokens() -> None:
    train, validation = split_tokens(1000, validation_fraction=0.1, sequence_length=9)
    assert (train.start, train.num_tokens, train.num_windows) == (0, 900, 99)
    assert (validation.start, validation.num_tokens, validation.num_windows) == (900, 100, 11)


@pytest.mark.parametrize("num_tokens", range(40, 60))
def test_windows_of_the_splits_share_no_token(num_tokens: int) -> None:
    train, validation = split_tokens(num_tokens, validation_fraction=0.3, sequence_length=5)
    last = train.start + 5 * (train.num_windows - 1)
    assert last + 5 < validation.start
    assert last + 5 + 5 >= validation.start, "another window would fit"
    assert validation.start + 5 * validation.num_windows < num_tokens


def test_a_split_of_exactly_one_window_is_enough() -> None:
    train, validation = split_tokens(9, validation_fraction=0, sequence_length=8)
    assert (train.num_windows, validation.num_windows) == (1, 0)


def test_a_training_split_shorter_than_a_window_is_rejected() -> None:
    message = (
        r"the training split has 8 tokens \(data\.validation_fraction=0\.2 of 10 tokens are set aside\), "
        r"fewer than one window of data\.sequence_length=8 \+ 1; use more tokens"
    )
    with pytest.raises(DataError, match=message):
        split_tokens(10, validation_fraction=0.2, sequence_length=8)


def test_a_validation_split_shorter_than_a_window_suggests_a_valid_fraction() -> None:
    message = (
        r"the validation split has 5 tokens \(data\.validation_fraction=0\.05 of 100 tokens\), fewer than one window "
        r"of data\.sequence_length=8 \+ 1; use a fraction of at least 0\.1, or 0 for no validation"
    )
    with pytest.raises(DataError, match=message):
        split_tokens(100, validation_fraction=0.05, sequence_length=8)
    split_tokens(100, validation_fraction=0.1, sequence_length=8)


def test_every_epoch_covers_each_window_once_in_a_new_order() -> None:
    order = ShuffledOrder(100, 7)
    epochs = [[order[epoch * 100 + i] for i in range(100)] for epoch in range(5)]
    assert all(sorted(epoch) == list(range(100)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


@pytest.mark.parametrize("num_windows", [1, 2, 3, 100, FEW_WINDOWS, FEW_WINDOWS + 1])
def test_the_order_of_windows_equals_that_of_grain(num_windows: int) -> None:
    of_grain = grain.MapDataset.range(num_windows).seed(7).shuffle().repeat()
    indices = [*range(3), *range(num_windows - 1, num_windows + 2), 5 * num_windows]
    order = ShuffledOrder(num_windows, 7)
    assert [order[index] for index in indices] == [of_grain[index] for index in indices]
    assert len(order) == len(of_grain)


def test_the_order_is_determined_by_the_seed() -> None:
    probes = [probe_order(ShuffledOrder(1000, seed), num_windows=1000) for seed in (1, 1, 2)]
    assert probes[0] == probes[1] != probes[2]


def test_the_order_probe_detects_a_repeated_epoch() -> None:
    order = ShuffledOrder(20, 1)
    repeated = [order[i % 20] for i in range(40)]
    assert probe_order(repeated, num_windows=20) != probe_order(order, num_windows=20)
