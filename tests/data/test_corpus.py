"""Corpora on disk and in a bucket: document boundaries, and the error of every damaged file."""

import dataclasses
import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.data import Source
from runner.data.corpus_index import HEAD_BYTES, INDEX, CorpusIndex, CorpusShard
from runner.data.packing import PackedDocuments
from runner.data.sampling import TokenSplit
from runner.errors import DataError
from runner.storage import DeniedError, compute_crc32c
from tests.data.buckets import URL, CountingDriver, make_random_shards, put_in_bucket, write_corpus
from tests.data.datasets import READ_METHODS, count_train_units, load

SIZES = [[40, 900, 1, 300], [], [5, 0], [0, 0, 1500, 0, 700], [0, 90, 1464]]
NUM_TOKENS = 5000
STORAGES = ["disk", "bucket with digests", "bucket"]


def open_corpus(
    where: str,
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: Callable[[str, str], None] = lambda verb, key: None,
) -> Source:
    """Open the corpus in `directory` from disk or from a bucket whose driver calls `before`."""
    if where == "disk":
        return load(directory, cache=directory.parent / "cache").train_sources[0].source
    driver = CountingDriver()
    driver.reports_digests, driver.before = where == "bucket with digests", before
    put_in_bucket(monkeypatch, directory, driver)
    return load(URL, cache=directory.parent / "cache", cache_bytes=0).train_sources[0].source


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus", make_random_shards(SIZES), vocabulary_size=1000)


# Documents.


@pytest.mark.daily(3)
@pytest.mark.parametrize("where", STORAGES)
@pytest.mark.parametrize("are_kept", [True, False])
def test_document_ends_are_those_written(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, where: str, are_kept: bool
) -> None:
    if not are_kept:
        monkeypatch.setattr("runner.data.corpus.ENDS_BYTES_MAX", 0)
    tokens = open_corpus(where, corpus, monkeypatch)
    ends = np.unique(np.cumsum([size for shard in SIZES for size in shard]))
    ends = ends[ends > 0]
    assert tokens.has_documents
    assert ends[-1] == len(tokens) == NUM_TOKENS
    edges = sorted({0, *ends.tolist(), *(ends - 1).tolist(), *(ends[:-1] + 1).tolist()})
    for start in edges:
        for stop in edges:
            if start <= stop:
                found = tokens.document_ends(start, stop)
                assert found.dtype == np.int64
                assert found.tolist() == ends[(ends > start) & (ends <= stop)].tolist()


def test_document_ends_are_read_only_when_needed(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = put_in_bucket(monkeypatch, corpus, CountingDriver())
    tokens = load(URL, cache=corpus.parent / "cache", cache_bytes=0).train_sources[0].source
    driver.ranges.clear()
    tokens.read_many([0, 2000], 9)
    assert {key.rpartition(".")[2] for key, _, _ in driver.ranges} == {"bin"}
    driver.ranges.clear()
    tokens.document_ends(0, 1241)
    assert driver.ranges == [("corpus/00000.ends", 0, 32)]


SHAPES = {
    "alike": lambda random: random.integers(1, 20, 4000),
    "growing": lambda random: np.arange(4000) // 100,
    "shrinking": lambda random: np.arange(4000)[::-1] // 100,
    "one that is long": lambda random: np.where(np.arange(4000) == 3000, 30_000, 1),
    "empty but a few": lambda random: random.integers(0, 2, 4000) * random.integers(0, 2, 4000) * 9,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_only_the_document_ends_near_a_range_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    sizes = SHAPES[shape](np.random.default_rng(0))
    directory = write_corpus(tmp_path / "corpus", [[np.zeros(size, np.uint16) for size in sizes]])
    ends = np.unique(np.cumsum(sizes))
    driver = put_in_bucket(monkeypatch, directory, CountingDriver())
    tokens = load(URL, cache=tmp_path, cache_bytes=0).train_sources[0].source
    starts, fetched = np.linspace(0, len(tokens) - 100, 50).astype(int).tolist(), []
    for start in starts:
        driver.ranges.clear()
        found = tokens.document_ends(start, start + 100)
        assert found.tolist() == ends[(ends > start) & (ends <= start + 100)].tolist()
        fetched.append(driver.bytes_fetched)
    if shape == "alike":
        assert max(fetched) < 4000 * 8 / 8


@pytest.mark.parametrize("asked", ["document_ends", "read"])
def test_document_ends_of_several_shards_are_fetched_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    monkeypatch.setattr("runner.data.packing.BLOCK_POSITIONS", 5000)
    directory = write_corpus(tmp_path / "corpus", make_random_shards([[100] * 100] * 4), vocabulary_size=1000)
    driver = put_in_bucket(monkeypatch, directory, CountingDriver())
    source = load(URL, cache=tmp_path, cache_bytes=0).train_sources[0].source
    examples = PackedDocuments(source, TokenSplit(0, len(source), 8))  # opening read the first block
    together, number = threading.Barrier(4), itertools.count()

    def meet(verb: str, key: str) -> None:
        if key.endswith(".ends") and next(number) < 4:
            together.wait(600)

    driver.before = meet
    if asked == "read":
        assert examples.read(np.arange(examples.num_examples))["padding_mask"].sum() == len(source) - 400
    else:
        assert len(source.document_ends(0, len(source))) == 400


def test_a_corpus_is_opened_by_its_directory_or_index(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_bucket(monkeypatch, corpus)
    fingerprints = {
        load(name, cache=corpus.parent / "cache").fingerprint
        for name in (corpus, f"{corpus}/", corpus / INDEX, URL, f"{URL}/", f"{URL}/{INDEX}")
    }
    assert len(fingerprints) == 1


def test_the_vocabulary_size_is_that_of_the_tokenizer(corpus: Path) -> None:
    dataset = load(corpus, cache=corpus.parent / "cache")
    assert dataset.vocabulary_size == 1000
    dataset.validate_vocabulary(1000)
    message = r"its tokenizer has 1,000 ids \(the largest in the corpus is 99\d\), the model's vocabulary 999; use"
    with pytest.raises(DataError, match=message):
        dataset.validate_vocabulary(999)


def test_a_dtype_is_rejected_for_a_corpus(corpus: Path) -> None:
    with pytest.raises(DataError, match=r"data\.dtype=uint16: nothing reads it, .* names a corpus"):
        load(corpus, cache=corpus.parent / "cache", dtype="uint16")


# Damage: the change to a file and the error message when the corpus is opened or read.


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(8))


def fill(path: Path) -> None:
    path.write_bytes(b"\xee" * len(path.read_bytes()))


def reverse(path: Path) -> None:
    path.write_bytes(path.read_bytes()[::-1])


WRONG_SIZE = "by index.json it has"
WRONG_CHECKSUM = "is not the file that index.json was written for: CRC-32C"
DAMAGES = [
    ("00003.bin", remove, "00003.bin is missing, index.json names it"),
    ("00003.bin", empty, WRONG_SIZE),
    ("00003.bin", cut, WRONG_SIZE),
    ("00003.bin", lengthen, WRONG_SIZE),
    ("00003.bin", fill, WRONG_CHECKSUM),
    ("00003.bin", reverse, WRONG_CHECKSUM),
    ("00004.ends", remove, "00004.ends is missing, index.json names it"),
    ("00004.ends", empty, WRONG_SIZE),
    ("00004.ends", cut, WRONG_SIZE),
    ("00004.ends", lengthen, WRONG_SIZE),
    ("00004.ends", fill, WRONG_CHECKSUM),
    ("00004.ends", reverse, WRONG_CHECKSUM),
    ("index.json", remove, "is a directory, and no corpus|holds no index.json"),
    ("index.json", empty, "is not the index of a corpus"),
    ("index.json", cut, "is not the index of a corpus"),
    ("index.json", lengthen, "is not the index of a corpus"),
    ("index.json", fill, "is not the index of a corpus"),
    ("index.json", reverse, "is not the index of a corpus"),
]


@pytest.mark.parametrize("where", STORAGES)
@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES, ids=lambda part: getattr(part, "__name__", None))
def test_a_damaged_file_gives_a_one_line_error(
    corpus: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    name: str,
    damage: Callable[[Path], None],
    message: str,
) -> None:
    damage(corpus / name)

    def use() -> None:
        tokens = open_corpus(where, corpus, monkeypatch)
        tokens.document_ends(0, NUM_TOKENS)
        tokens.read_many([0, 1000, 2500], 1000)

    with pytest.raises(DataError, match=message) as caught:
        use()
    assert "\n" not in str(caught.value)
    assert name in str(caught.value)


@pytest.mark.parametrize("where", STORAGES)
def test_another_shard_of_the_same_size_is_rejected_at_the_start(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr("runner.data.corpus.VERIFIED_BYTES_MAX", 0)
    reverse(corpus / "00003.bin")
    with pytest.raises(DataError, match=rf"00003\.bin {WRONG_CHECKSUM}"):
        open_corpus(where, corpus, monkeypatch)


@pytest.mark.parametrize("where", STORAGES)
def test_a_changed_tokenizer_is_rejected_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    record = {"kind": "hf", "file": "tokenizer.json", "sha256": hashlib.sha256(b"{}").hexdigest()}
    directory = write_corpus(
        tmp_path / "corpus",
        make_random_shards([[200]], vocabulary_size=900),
        vocabulary_size=1000,
        change=lambda index: dataclasses.replace(index, tokenizer=record),
    )
    open_corpus(where, directory, monkeypatch)  # training needs only the ids
    (directory / "tokenizer.json").write_bytes(b"{}")
    open_corpus(where, directory, monkeypatch)
    (directory / "tokenizer.json").write_bytes(b"[]")
    with pytest.raises(DataError, match=r"tokenizer\.json is not the file that the corpus was tokenised with"):
        open_corpus(where, directory, monkeypatch)


def test_an_unreadable_shard_is_rejected_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus", make_random_shards([[20]] * 100), vocabulary_size=1000)
    for where, name in itertools.product(STORAGES, ("00002.bin", "00002.ends")):

        def refuse(verb: str, key: str, name: str = name) -> None:
            if (verb, key) == ("get", f"corpus/{name}"):
                raise DeniedError(f"{key}: 403")

        # Root can read every file.
        monkeypatch.setattr("os.access", lambda path, _, name=name: Path(path).name != name)
        with pytest.raises(DataError, match=rf"{name} cannot be read: no permission") as caught:
            open_corpus(where, corpus, monkeypatch, before=refuse)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", ["concatenate", "documents", "pad"])
def test_a_document_longer_than_31_bits_is_read_to_its_end(tmp_path: Path, packing: str) -> None:
    size = (1 << 31) + 100
    ends = np.array([size], "<i8").tobytes()
    huge = CorpusShard("00000", size, 1, 0, compute_crc32c(bytes(HEAD_BYTES)), "00000000", compute_crc32c(ends))
    write_corpus(tmp_path / "corpus", [[[5]]], change=lambda index: dataclasses.replace(index, shards=(huge,)))
    (tmp_path / "corpus" / "00000.ends").write_bytes(ends)
    (tmp_path / "corpus" / "00000.bin").write_bytes(b"")
    os.truncate(tmp_path / "corpus" / "00000.bin", 2 * size)  # sparse file
    settings = {"sequence_length": 4096, "packing": packing, "validation_fraction": 0}
    examples = load(tmp_path / "corpus", cache=tmp_path / "cache", **settings).train_sources[0].examples
    assert examples.num_examples >= size // 4096
    rows = examples.read(np.array([0, examples.num_examples - 1]))
    assert rows["padding_mask"][0].all()
    assert not rows["y"].any()


def test_an_id_above_the_largest_of_the_index_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_corpus(
        tmp_path / "corpus", make_random_shards([[5000]], vocabulary_size=900), vocabulary_size=1000
    )
    content = (directory / "00000.bin").read_bytes()
    (directory / "00000.bin").write_bytes(content[:5000] + b"\xee" * 5000)
    tokens = open_corpus("bucket", directory, monkeypatch)
    for read in READ_METHODS.values():
        read(tokens, 0, 2500)
        with pytest.raises(DataError, match=r"id 61,166 at position 2500 of s3://bkt/corpus/00000\.bin is beyond 899"):
            read(tokens, 2400, 2600)


@pytest.mark.parametrize("where", STORAGES)
@pytest.mark.parametrize("change", [fill, remove, cut], ids=lambda change: change.__name__)
@pytest.mark.parametrize("name", ["00003.bin", "00003.ends"])
def test_a_shard_that_changes_under_a_running_job_is_found(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, change: Callable[[Path], None]
) -> None:
    tokens = open_corpus(where, corpus, monkeypatch)
    tokens.check()
    change(corpus / name)
    if where != "disk":
        driver_of(tokens).delete(f"corpus/{name}")
        if change is not remove:
            driver_of(tokens).put(f"corpus/{name}", (corpus / name).read_bytes(), None)
    act = tokens.check if name.endswith(".bin") else lambda: tokens.document_ends(0, NUM_TOKENS)
    with pytest.raises(DataError, match=r"changed|cannot (be )?read") as caught:
        act()
    assert name in str(caught.value)


def driver_of(tokens: Source) -> CountingDriver:
    return tokens._store._driver


def test_decreasing_document_ends_with_a_valid_checksum_are_rejected(tmp_path: Path) -> None:
    directory = write_corpus(tmp_path / "corpus", make_random_shards([[100, 100, 100]]))
    for ends in ([200, 100, 300], [100, 200, 299], [-1, 200, 300]):
        content = np.array(ends, "<i8").tobytes()
        rewrite_ends(directory, content)
        tokens = load(directory, cache=tmp_path).train_sources[0].source
        with pytest.raises(DataError, match=r"00000\.ends: are not document ends"):
            tokens.document_ends(0, 300)


def rewrite_ends(directory: Path, content: bytes) -> None:
    (directory / "00000.ends").write_bytes(content)
    index = CorpusIndex.decode((directory / INDEX).read_bytes(), "")
    shard = dataclasses.replace(index.shards[0], ends_crc32c=compute_crc32c(content))
    (directory / INDEX).write_bytes(dataclasses.replace(index, shards=(shard,)).encode())


def test_the_cost_of_opening_does_not_grow_with_the_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.data.corpus.VERIFIED_BYTES_MAX", 0)
    fetched = []
    for size in (10_000, 100_000):
        directory = write_corpus(tmp_path / str(size), make_random_shards([[size]] * 4), vocabulary_size=1000)
        driver = put_in_bucket(monkeypatch, directory, CountingDriver())
        assert count_train_units(load(URL, cache=tmp_path / "cache", cache_bytes=0)) == int(4 * size * 0.8)
        fetched.append(driver.bytes_fetched)
    assert fetched == [4 * (4096 + 1)] * 2
