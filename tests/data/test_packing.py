"""Packing of tokens into examples: every target once, short documents unsplit, and order determined by number."""

from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.data import packing, sampling
from runner.data.packing import (
    PACKINGS,
    Examples,
    PackedDocuments,
    PackingPlan,
    PackingPlanCache,
    PaddedDocuments,
    Sequences,
    find_spans,
    pack_spans,
)
from runner.data.sampling import LocalShuffle, Mixture, TokenSplit, floor_sum
from runner.data.source import Source
from tests.data.buckets import URL, CountingDriver, put_in_bucket, write_corpus
from tests.data.datasets import load

T = 16


class PositionSource(Source):
    """A source with documents of given lengths; the id of a token is its position."""

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


def draw_lengths(seed: int, num_documents: int = 400) -> list[int]:
    return np.random.default_rng(seed).zipf(1.5, num_documents).clip(1, 20 * T).tolist()


CORPORA = {
    "many lengths": draw_lengths(0),
    "short": [2, 3] * 300,
    "single tokens too": [1, 1, 5, 1, 40, 1] * 50,
    "one long": [5000],
    "as long as an example": [T, T + 1, T + 2] * 60,
    "one short": [3],
}
PARTS = {"all": (0, 1), "head": (0, 0.63), "tail": (0.37, 1)}  # the bounds of a split can fall inside a document


@pytest.fixture(params=CORPORA)
def source(request: pytest.FixtureRequest) -> PositionSource:
    return PositionSource(CORPORA[request.param])


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks and groups, the last of each incomplete."""
    monkeypatch.setattr(packing, "BLOCK_POSITIONS", 8 * T)
    monkeypatch.setattr(packing, "BLOCK_EXAMPLES_MIN", 2)
    monkeypatch.setattr(sampling, "GROUP_BLOCKS", 3)


def make_split(source: PositionSource, part: str) -> TokenSplit:
    first, last = (int(len(source) * share) for share in PARTS[part])
    return TokenSplit(first, last - first, T)


def read_all(examples: Examples) -> dict[str, np.ndarray]:
    return examples.read(np.arange(examples.num_examples))


def list_targets(source: PositionSource, split: TokenSplit) -> list[int]:
    """Return the positions of the split whose previous token is in the same document."""
    begins = {0, *source.ends.tolist()} | {split.start}
    return [position for position in range(split.start, split.start + split.num_tokens) if position not in begins]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("kind", ["documents", "pad"])
def test_each_target_appears_once_with_its_input_and_document(source: PositionSource, kind: str, part: str) -> None:
    split = make_split(source, part)
    rows = read_all(PACKINGS[kind](source, split))
    real = rows["padding_mask"]
    assert sorted(rows["y"][real]) == list_targets(source, split)
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
def test_an_example_is_a_function_of_its_number(source: PositionSource, kind: str) -> None:
    whole = read_all(PACKINGS[kind](source, make_split(source, "all")))
    numbers = np.random.default_rng(0).permutation(len(whole["x"]))[:20]
    for number in numbers:
        alone = PACKINGS[kind](source, make_split(source, "all")).read(np.array([number]))
        for name, field in alone.items():
            np.testing.assert_array_equal(field[0], whole[name][number])


class HugeSource(PositionSource):
    """Documents longer than 32 bits, never materialised as arrays."""

    def __init__(self) -> None:
        super().__init__([1 << 31, 5, (1 << 32) + 3, 7])


@pytest.mark.parametrize("kind", PACKINGS)
def test_documents_longer_than_32_bits_are_packed(kind: str) -> None:
    source = HugeSource()
    examples = PACKINGS[kind](source, TokenSplit(0, len(source), T))
    assert examples.num_examples >= 3 << 27
    order = examples.make_order(0, Fraction(4))
    for number in (0, examples.num_examples // 2, examples.num_examples - 1, order[10**11]):
        rows = examples.read(np.array([number]))
        real = rows["padding_mask"]
        np.testing.assert_array_equal(rows["x"][real].astype(np.uint32) + 1, rows["y"][real].astype(np.uint32))


def test_padding_is_small_and_short_documents_are_not_split(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.undo()
    dataset = load("python-stdlib", cache=tmp_path, sequence_length=2048, packing="documents", validation_fraction=0)
    examples = dataset.train_sources[0].examples
    assert isinstance(examples, PackedDocuments)
    num_whole = examples._num_whole_blocks * examples._block_examples
    held = np.concatenate([examples.get_spans(number) for number in range(num_whole)])
    filled = held[:, 1].sum()
    assert 1 - filled / (num_whole * 2048) < 0.01
    source = dataset.train_sources[0].source
    ends = source.document_ends(0, len(source))
    fitting = [(int(start), int(length)) for start, length in find_spans(0, len(source), ends) if length <= 2048]
    pieces = {*map(tuple, held.tolist())}
    inside = [run for run in fitting if sum(run) < num_whole * 2048 * 0.995]
    assert len(inside) > 100
    assert sum(run in pieces for run in inside) / len(inside) > 0.9


def list_rows(plan: PackingPlan, num_rows: int) -> list[list[tuple[int, int]]]:
    return [[(start, length) for start, length in plan[row].tolist()] for row in range(num_rows)]


def test_spans_are_packed_without_exceeding_examples() -> None:
    runs = np.array([[0, 35], [100, 9], [200, 7], [300, 16], [400, 1]])
    rows = list_rows(pack_spans(runs, 5, 16), 5)
    held = Counter(token for row in rows for start, length in row for token in range(start, start + length))
    assert held == Counter(token for start, length in runs for token in range(start, start + length))
    assert all(sum(length for _, length in row) <= 16 for row in rows)
    assert rows[0] == [(0, 16)]
    assert {(100, 9), (200, 7)} <= set(rows[3])


def test_spans_that_fit_nowhere_are_split_over_the_rest() -> None:
    rows = list_rows(pack_spans(np.array([[0, 10], [20, 10], [40, 10]]), 2, 15), 2)
    assert rows == [[(0, 10), (40, 5)], [(20, 10), (45, 5)]]


# Sampling order.


def mark_soak(*values: int) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.soak) for value in values]


SIZES = [1, 2, 7, 8, 9, 24, 25, 61, 200, 1003]
BATCHES = ["1", "2", "3", "50", "2000", "1/10", "8/3", "384/5", "44800/961"]


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("num_examples", [*SIZES[:-2], *mark_soak(*SIZES[-2:])])
def test_an_epoch_holds_each_example_once_at_random_access(num_examples: int, batch: str) -> None:
    order, other = (LocalShuffle(num_examples, 8, Fraction(batch), seed) for seed in (5, 6))
    epochs = [[order[epoch * num_examples + place] for place in range(num_examples)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(num_examples)) for epoch in epochs)
    alone = np.random.default_rng(0).integers(0, 3 * num_examples, 5).tolist()
    assert [LocalShuffle(num_examples, 8, Fraction(batch), seed=5)[place] for place in alone] == [
        epochs[place // num_examples][place % num_examples] for place in alone
    ]
    if num_examples > 6:
        assert len({*map(tuple, epochs)}) > 1
        assert np.concatenate(epochs).tolist() != [other[place] for place in range(3 * num_examples)]


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 50])
def test_each_slot_reads_its_own_blocks_and_a_group_mixes_many(monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
    monkeypatch.setattr(sampling, "GROUP_BLOCKS", 12)
    each = -(-12 // num_rows)
    order = LocalShuffle(2 * num_rows * each * 8 + 5, 8, Fraction(num_rows), seed=0)
    for group in range(2):
        first = group * num_rows * each * 8
        blocks = [{order[first + row + step * num_rows] // 8 for step in range(each * 8)} for row in range(num_rows)]
        assert [len(held) for held in blocks] == [each] * num_rows
        assert len(set.union(*blocks)) == num_rows * each >= 12


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [5, 3, 2], [7, 2.3, 0.31], [0.333333, 0.12345678, 0.54321]])
def test_a_slot_of_a_mixture_reads_few_blocks(weights: list[float]) -> None:
    mixture, rows, block, num_steps = Mixture(weights), 64, 256, 2048
    orders = [LocalShuffle(10**7, block, share * rows, seed=1) for share in mixture.shares]
    for row in (0, 40):
        held = set()
        for step in range(10**6, 10**6 + num_steps):
            (source,), (number,) = mixture.locate(step * rows + row, 1)
            held.add((source, orders[source][int(number)] // block))
        assert len(held) / num_steps < 1 / 16  # each end costs about one and a half sequences


@given(*[st.integers(low, 100) for low in (0, 1, 0, 0)])
def test_floor_sum_equals_the_sum_of_floors(count: int, divisor: int, factor: int, offset: int) -> None:
    assert floor_sum(count, divisor, factor, offset) == sum((factor * i + offset) // divisor for i in range(count))


def test_recently_used_plans_stay_cached_and_others_are_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    made: Counter[int] = Counter()

    def make(block: int) -> PackingPlan:
        made[block] += 1
        return PackingPlan(np.zeros((10, 2), np.int64), np.zeros(3, np.int32))

    plans = PackingPlanCache(make)
    for group in range(5):
        for _ in range(200):
            for row in range(30):
                plans[group * 30 + row]
    assert len(plans) == 30
    assert set(made.values()) == {1}
    monkeypatch.setattr(packing, "PLANS_BYTES_MAX", 4 * 172)
    for block in range(100):
        plans[block]
    assert len(plans) == 4


NUM_HOSTS = [4, 256, *mark_soak(1, 16, 64)]
BATCH_SEQUENCES = 256  # sequences in a global batch


@pytest.fixture(scope="module")
def web_corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Web-like corpora of 700-token documents: one of 290 blocks of 16 sequences of 256 tokens, and smaller ones."""
    directory, random = tmp_path_factory.mktemp("web"), np.random.default_rng(0)
    for name, num_tokens in (("one", 1_190_000), ("two", 300_000), ("three", 225_000)):
        sizes = random.lognormal(np.log(700) - 0.5, 1.0, num_tokens // 700).astype(int) + 1
        shards = [[np.zeros(size, np.uint16) for size in shard] for shard in np.array_split(sizes, 5)]
        write_corpus(directory / name, shards)
    return directory


MIXED = [{"name": name, "source": f"{URL}/{name}", "weight": w} for name, w in (("one", 5), ("two", 3), ("three", 2))]
FEEDS = {"one": ({"source": f"{URL}/one"}, 20), "mixture": ({"source": "python-stdlib", "mixture": MIXED}, 20)}


@pytest.mark.daily(2)
@pytest.mark.parametrize("num_hosts", NUM_HOSTS)
@pytest.mark.parametrize("feed", FEEDS)
def test_a_host_fetches_little_more_than_its_sequences(
    web_corpora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, feed: str, num_hosts: int
) -> None:
    monkeypatch.setattr(packing, "BLOCK_POSITIONS", 16 * 256)
    driver = put_in_bucket(monkeypatch, web_corpora, CountingDriver())
    named, num_steps = FEEDS[feed]
    settings = {
        "sequence_length": 256,
        "packing": "documents",
        "validation_fraction": 0,
        "batch_examples": BATCH_SEQUENCES,
    }
    for host in {0, num_hosts - 1}:
        dataset = load(cache=tmp_path, cache_bytes=0, **named, **settings)
        driver.ranges.clear()  # opening costs the same for every run
        first, count, needed = BATCH_SEQUENCES * host // num_hosts, BATCH_SEQUENCES // num_hosts, 0
        for step in range(num_steps):
            needed += 2 * int(dataset.read("train", step * BATCH_SEQUENCES + first, count)["padding_mask"].sum())
        assert driver.bytes_fetched <= 1.2 * needed


@pytest.mark.parametrize("num_hosts", [1, 2, 4, 64])
def test_the_sequences_of_a_step_do_not_depend_on_the_number_of_hosts(source: PositionSource, num_hosts: int) -> None:
    def rows_of_step(step: int, first: int, count: int) -> Sequences:
        examples = PackedDocuments(source, make_split(source, "all"))  # a host that has read nothing yet
        order = examples.make_order(0, Fraction(64))
        return examples.read(np.array([order[step * 64 + first + row] for row in range(count)]))

    count = 64 // num_hosts
    for step in (0, 3, 10**9):
        whole = rows_of_step(step, 0, 64)
        for host in {0, num_hosts // 2, num_hosts - 1}:
            for name, field in rows_of_step(step, host * count, count).items():
                np.testing.assert_array_equal(field, whole[name][host * count :][:count])


@pytest.mark.parametrize("kind", [PackedDocuments, PaddedDocuments])
def test_other_document_boundaries_change_the_fingerprint(kind: type[PackedDocuments | PaddedDocuments]) -> None:
    one, other = PositionSource([5, 7, 9] * 20), PositionSource([7, 5, 9] * 20)
    prints = [kind(source, make_split(source, "all")).fingerprint for source in (one, one, other)]
    assert prints[0] == prints[1] != prints[2]
