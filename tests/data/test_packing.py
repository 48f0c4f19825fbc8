"""Tokens cut into examples: every target once, documents whole where they fit, and nothing but the number decides."""

from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from runner.data import packing
from runner.data.packing import PACKINGS, Examples, GroupedOrder, Packed, Padded, pack, runs_between
from runner.data.protocol import Source
from runner.data.window import Split
from tests.data.corpus import load

T = 16


class Documents(Source):
    """Documents of given lengths: the id of a token is its position."""

    has_documents = True
    fingerprint = "documents"
    fields: ClassVar = {"loss_weight": np.float32}
    vocabulary_size = 1 << 30

    def __init__(self, lengths: list[int]):
        self.ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return int(self.ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self)
        return np.arange(start, stop)

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        return np.arange(start, stop, dtype=np.float32) / 2

    def document_ends(self, start: int, stop: int) -> np.ndarray:
        return self.ends[(self.ends > start) & (self.ends <= stop)]


def lengths_of(seed: int, num_documents: int = 400) -> list[int]:
    return np.random.default_rng(seed).zipf(1.5, num_documents).clip(1, 20 * T).tolist()


CORPORA = {
    "many lengths": lengths_of(0),
    "short": [2, 3] * 300,
    "single tokens too": [1, 1, 5, 1, 40, 1] * 50,
    "one long": [5000],
    "as long as an example": [T, T + 1, T + 2] * 60,
    "one short": [3],
}
PARTS = {"all": (0, 1), "head": (0, 0.63), "tail": (0.37, 1)}  # a split cuts a document where it falls


@pytest.fixture(params=CORPORA)
def source(request: pytest.FixtureRequest) -> Documents:
    return Documents(CORPORA[request.param])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and groups, the last of each not whole."""
    monkeypatch.setattr(packing, "BLOCK_POSITIONS", 8 * T)
    monkeypatch.setattr(packing, "BLOCK_EXAMPLES_MIN", 2)
    monkeypatch.setattr(packing, "GROUP_BLOCKS", 3)


def cut(source: Documents, part: str) -> Split:
    first, last = (int(len(source) * share) for share in PARTS[part])
    return Split(first, last - first, T)


def read_all(examples: Examples) -> dict[str, np.ndarray]:
    return examples.read(np.arange(examples.num_examples))


def targets_of(source: Documents, split: Split) -> list[int]:
    """Positions of the split whose token before them is of the same document."""
    begins = {0, *source.ends.tolist()} | {split.start}
    return [position for position in range(split.start, split.start + split.num_tokens) if position not in begins]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["documents", "pad"])
def test_each_target_stands_once_beside_its_input_and_in_its_own_document(
    source: Documents, kind: str, part: str
) -> None:
    split = cut(source, part)
    rows = read_all(PACKINGS[kind](source, split))
    real = rows["padding_mask"]
    assert sorted(rows["y"][real]) == targets_of(source, split)
    np.testing.assert_array_equal(rows["x"][real] + 1, rows["y"][real])
    np.testing.assert_array_equal(rows["loss_weight"][real], rows["y"][real] / 2)
    assert all(not field[~real].any() for field in rows.values())
    np.testing.assert_array_equal(rows["segment"] > 0, real)
    document = np.searchsorted(source.ends, rows["x"], side="right")
    for row in range(len(real)):
        for segment in range(1, rows["segment"][row].max() + 1):
            here = rows["segment"][row] == segment
            assert len(set(document[row][here])) == 1
            np.testing.assert_array_equal(rows["position"][row][here], np.arange(here.sum()))
            np.testing.assert_array_equal(np.diff(rows["x"][row][here]), 1)


@pytest.mark.parametrize("kind", ["documents", "pad"])
def test_an_example_is_a_function_of_its_number(source: Documents, kind: str) -> None:
    whole = read_all(PACKINGS[kind](source, cut(source, "all")))
    numbers = np.random.default_rng(0).permutation(len(whole["x"]))[:20]
    for number in numbers:
        alone = PACKINGS[kind](source, cut(source, "all")).read(np.array([number]))
        for name, field in alone.items():
            np.testing.assert_array_equal(field[0], whole[name][number])


class Huge(Documents):
    """Documents too long for 32 bits, of which no array is ever made."""

    def __init__(self) -> None:
        super().__init__([1 << 31, 5, (1 << 32) + 3, 7])


@pytest.mark.parametrize("kind", PACKINGS)
def test_a_document_may_be_longer_than_32_bits_can_count(kind: str) -> None:
    source = Huge()
    examples = PACKINGS[kind](source, Split(0, len(source), T))
    assert examples.num_examples >= 3 << 27
    order = examples.make_order(0)
    for number in (0, examples.num_examples // 2, examples.num_examples - 1, order[10**11]):
        rows = examples.read(np.array([number]))
        real = rows["padding_mask"]
        np.testing.assert_array_equal(rows["x"][real].astype(np.uint32) + 1, rows["y"][real].astype(np.uint32))


def test_padding_is_known_beforehand_and_documents_that_fit_stay_whole(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    dataset = load("python-stdlib", cache=tmp_path, sequence_length=2048, packing="documents", validation_fraction=0)
    examples = dataset.parts[0].examples
    assert isinstance(examples, Packed)
    num_whole = examples._num_whole_blocks * examples._block_examples
    held = [examples.pieces(number) for number in range(num_whole)]
    filled = sum(piece.length for pieces in held for piece in pieces)
    assert 1 - filled / (num_whole * 2048) < 0.01
    source = dataset.parts[0].source
    ends = source.document_ends(0, len(source))
    fitting = [(int(start), int(length)) for start, length in runs_between(0, len(source), ends) if length <= 2048]
    pieces = {(piece.start, piece.length) for some in held for piece in some}
    inside = [run for run in fitting if sum(run) < num_whole * 2048 * 0.995]
    assert len(inside) > 100
    assert sum(run in pieces for run in inside) / len(inside) > 0.9


def test_runs_are_packed_into_rows_that_hold_them() -> None:
    runs = np.array([[0, 35], [100, 9], [200, 7], [300, 16], [400, 1]])
    rows = pack(runs, 5, 16)
    held = Counter(token for row in rows for piece in row for token in range(piece.start, piece.start + piece.length))
    assert held == Counter(token for start, length in runs for token in range(start, start + length))
    assert all(sum(piece.length for piece in row) <= 16 for row in rows)
    assert [(piece.start, piece.length) for piece in rows[0]] == [(0, 16)]
    assert {(100, 9), (200, 7)} <= {(piece.start, piece.length) for row in rows for piece in row}


def test_what_fits_nowhere_is_cut_into_what_is_left() -> None:
    rows = pack(np.array([[0, 10], [20, 10], [40, 10]]), 2, 15)
    assert sorted(sum(piece.length for piece in row) for row in rows) == [15, 15]


@pytest.mark.parametrize("num_examples", [1, 2, 7, 8, 9, 24, 25, 61])
def test_an_epoch_of_the_grouped_order_holds_each_example_once(num_examples: int) -> None:
    order = GroupedOrder(num_examples, 8, seed=5)
    epochs = [[order[epoch * num_examples + place] for place in range(num_examples)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(num_examples))
    if num_examples > 6:
        assert epochs[0] != epochs[1]
        assert epochs[0] != [GroupedOrder(num_examples, 8, seed=6)[place] for place in range(num_examples)]


@pytest.mark.parametrize("kind", [Packed, Padded])
def test_other_documents_of_the_same_tokens_are_other_data(kind: type[Packed | Padded]) -> None:
    one, other = Documents([5, 7, 9] * 20), Documents([7, 5, 9] * 20)
    prints = [kind(source, cut(source, "all")).fingerprint for source in (one, one, other)]
    assert prints[0] == prints[1] != prints[2]
