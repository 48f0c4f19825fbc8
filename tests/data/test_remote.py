"""Tokens in a bucket: same content as on disk for any state of the cache and any behaviour of the bucket."""

import os
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data import Dataset
from runner.data.corpus_index import HEAD_BYTES
from runner.data.remote import RANGES_FILE
from runner.errors import DataError, StorageError
from runner.storage import ABSENT, DeniedError, LocalStore, read_json, run_in_parallel
from runner.storage.store import TransientError
from tests.data.buckets import (
    URL,
    CountingDriver,
    make_failing_callback,
    make_random_shards,
    put_in_bucket,
    write_corpus,
)
from tests.data.datasets import load, write_bin, write_npy
from tests.data.golden import CASES, copy_golden
from tests.support.object_stores import BACKENDS, Backend, Faults, route_stores_to, start_backend
from tests.support.tiny_jobs import make_gpt, stop_after

NUM_TOKENS = 5000
SIZES = [[40, 900, 1, 300], [], [5], [1500, 0, 700], [0, 90, 1464]]


def write_bins(directory: Path) -> str:
    ids = np.random.default_rng(0).integers(0, 1000, NUM_TOKENS)
    for index, (start, stop) in enumerate([(0, 1700), (1700, 1700), (1700, 1705), (1705, NUM_TOKENS)]):
        write_bin(directory / f"{index}.bin", ids[start:stop])
    return "*.bin"


def write_uint32(directory: Path) -> str:
    np.random.default_rng(0).integers(0, 1000, NUM_TOKENS).astype("<u4").tofile(directory / "wide.bin")
    return "wide.bin"


def write_npys(directory: Path) -> str:
    ids = np.random.default_rng(0).integers(0, 200, NUM_TOKENS)
    for index, dtype in enumerate(["<u2", ">i8", "<u1", "<i4"]):
        write_npy(directory / f"{index}.npy", ids[index * 1250 : index * 1250 + 1250], dtype)
    return "?.npy"


def write_small_corpus(directory: Path) -> str:
    write_corpus(directory, make_random_shards(SIZES))
    return ""


def write_wide_corpus(directory: Path) -> str:
    write_corpus(directory, make_random_shards(SIZES, 100_000), "uint32", 100_000)
    return "index.json"


KINDS: dict[str, Callable[[Path], str]] = {
    "bin": write_bins,
    "uint32": write_uint32,
    "npy": write_npys,
    "corpus": write_small_corpus,
    "wide corpus": write_wide_corpus,
}


class SourcePair:
    """The same tokens on disk and in a bucket."""

    starts = np.random.default_rng(3).integers(0, NUM_TOKENS - 9, 200)

    def __init__(self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.directory, self.cache = tmp_path / "source", tmp_path / "cache"
        self.directory.mkdir()
        self.pattern = KINDS[kind](self.directory)
        self.changes: dict[str, Any] = {"dtype": "uint32"} if kind == "uint32" else {}
        self.driver = put_in_bucket(monkeypatch, self.directory, CountingDriver())
        self.local = load(self.directory / self.pattern, cache=tmp_path / "local", **self.changes)
        self.row_bytes = 9 * {"bin": 2, "corpus": 2, "npy": (2 + 8 + 1 + 4) / 4}.get(kind, 4)

    def open(self, **changes: Any) -> Dataset:
        return load(f"{URL}/{self.pattern}".rstrip("/"), cache=self.cache, **self.changes, **changes)

    def check_equal(self, dataset: Dataset) -> None:
        """Compare sequences of both splits, and random ranges, some of which overlap."""
        assert dataset.fingerprint == self.local.fingerprint
        splits: list[str] = ["train", "validation"]
        for split in splits:
            for field, values in self.local.read(split, 0, 10).items():
                np.testing.assert_array_equal(dataset.read(split, 0, 10)[field], values)
        expected = self.local.train_sources[0].source.read_many(self.starts, 9)
        for first in range(0, len(self.starts), 40):
            found = dataset.train_sources[0].source.read_many(self.starts[first : first + 40], 9)
            np.testing.assert_array_equal(found, expected[first : first + 40])


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourcePair:
    return SourcePair(request.param, tmp_path, monkeypatch)


@pytest.fixture
def bins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SourcePair:
    return SourcePair("bin", tmp_path, monkeypatch)


# Content.


def test_sequences_equal_those_on_disk(pair: SourcePair) -> None:
    dataset = pair.open(vocabulary_size=100_000)
    pair.check_equal(dataset)
    dataset.check()


def test_ranges_read_together_equal_ranges_read_singly(pair: SourcePair) -> None:
    starts = np.random.default_rng(1).integers(0, NUM_TOKENS - 1600, 30)
    for dataset in (pair.local, pair.open(vocabulary_size=100_000)):
        for length in (1, 9, 1600):
            found = dataset.train_sources[0].source.read_many(starts, length)
            assert found.shape == (30, length)
            expected = [pair.local.train_sources[0].source.read(int(start), int(start) + length) for start in starts]
            np.testing.assert_array_equal(found, expected)
        assert dataset.train_sources[0].source.read_many([], 9).shape == (0, 9)


def test_a_small_bucket_is_scanned_for_its_vocabulary_size(bins: SourcePair) -> None:
    dataset = bins.open()
    assert dataset.vocabulary_size == bins.local.vocabulary_size
    with pytest.raises(
        DataError, match=r"token id \d+ at position \d+ of s3://bkt/corpus/\d\.bin is beyond the model's"
    ):
        dataset.validate_vocabulary(500)


def test_a_large_bucket_is_not_scanned_for_its_vocabulary_size(
    bins: SourcePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.data.token_files.SCANNED_TOKENS_MAX", 100)
    with pytest.raises(DataError, match=r"5,000 ids in a bucket are not read .* name the vocabulary's size"):
        _ = bins.open().vocabulary_size
    assert bins.open(vocabulary_size=1000).vocabulary_size == 1000


def test_an_invalid_id_in_a_bucket_is_reported_when_read(bins: SourcePair) -> None:
    tokens = bins.open(vocabulary_size=500).train_sources[0].source
    with pytest.raises(
        DataError, match=r"token id \d+ at position \d+ of s3://bkt/corpus/0\.bin is beyond .* of 500 ids"
    ):
        tokens.read_many([0, 100, 200], 50)


# Cache.


def flip_bytes(path: Path) -> None:
    content = bytearray(path.read_bytes())
    for position in range(0, len(content), 7):
        content[position] ^= 1 << position % 8
    path.write_bytes(content)


def flip_one_bit_a_slot(path: Path) -> None:
    with path.open("r+b") as file:
        for start in range(0, path.stat().st_size - 50, 42):
            file.seek(start + start % 41)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 4]))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 3)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def fill_with_garbage(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(100_000))


def shift(path: Path) -> None:
    path.write_bytes(b"x" + path.read_bytes()[:-1])


def swap_slots(path: Path) -> None:
    content, slot = path.read_bytes(), 42
    path.write_bytes(content[slot : 2 * slot] + content[:slot] + content[2 * slot :])


def replace_by_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [flip_bytes, flip_one_bit_a_slot, cut, empty, fill_with_garbage, shift, swap_slots, replace_by_directory]


def test_a_warm_cache_fetches_almost_nothing(pair: SourcePair) -> None:
    settings = {"vocabulary_size": 100_000, "cache_bytes": 1 << 28, "sequence_length": 400}
    cold = pair.open(**settings)
    expected = cold.train_sources[0].source.read_many(pair.starts[:50], 9), cold.fingerprint
    pair.driver.ranges.clear()
    warm = pair.open(**settings)
    np.testing.assert_array_equal(warm.train_sources[0].source.read_many(pair.starts[:50], 9), expected[0])
    assert warm.fingerprint == expected[1]
    assert pair.driver.bytes_fetched <= (HEAD_BYTES + 1) * len(SIZES)  # only the heads of a corpus's files


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_cache_is_a_miss(bins: SourcePair, damage: Callable[[Path], None]) -> None:
    bins.check_equal(bins.open(vocabulary_size=1000, cache_bytes=1 << 15))
    damage(bins.cache / RANGES_FILE)
    bins.check_equal(bins.open(vocabulary_size=1000, cache_bytes=1 << 15))


@pytest.mark.parametrize("cache_bytes", [0, 41, 42, 100, 1 << 15, 1 << 70, None])
def test_a_cache_of_any_size_is_correct_and_bounded(bins: SourcePair, cache_bytes: int | None) -> None:
    for sequence_length in (8, 5):
        local = load(bins.directory / bins.pattern, cache=bins.cache, sequence_length=sequence_length)
        dataset = bins.open(vocabulary_size=1000, cache_bytes=cache_bytes, sequence_length=sequence_length)
        np.testing.assert_array_equal(dataset.read("train", 0, 30)["x"], local.read("train", 0, 30)["x"])
    if cache_bytes is not None:
        assert not (bins.cache / RANGES_FILE).exists() or (bins.cache / RANGES_FILE).stat().st_size <= cache_bytes


def test_damage_to_the_cache_of_a_running_job_is_harmless(bins: SourcePair) -> None:
    dataset = bins.open(vocabulary_size=1000, cache_bytes=1 << 14)
    for damage in DAMAGES[:-1]:
        bins.check_equal(dataset)
        damage(bins.cache / RANGES_FILE)
    bins.check_equal(dataset)


def test_processes_of_a_host_share_the_cache(bins: SourcePair) -> None:
    """Open several handles of one file in threads that compete for its slots."""
    datasets = [bins.open(vocabulary_size=1000, cache_bytes=2000) for _ in range(4)]
    run_in_parallel([lambda dataset=dataset: bins.check_equal(dataset) for dataset in datasets])


def test_an_unwritable_cache_warns_once(
    bins: SourcePair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = bins.open(vocabulary_size=1000, cache_bytes=1 << 20)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    bins.check_equal(dataset)
    assert caplog.text.count("No space left on device") == 1
    assert "RUNNER_CACHE" in caplog.text


def test_a_replaced_object_is_not_read_from_the_old_cache(bins: SourcePair) -> None:
    bins.check_equal(bins.open(vocabulary_size=1000))
    content = bins.driver.objects["corpus/3.bin"][0]
    bins.driver.put("corpus/3.bin", content[::-1], None)
    starts = bins.starts[bins.starts >= 1705]
    found = bins.open(vocabulary_size=1 << 16).train_sources[0].source.read_many(starts, 9)
    replaced = np.frombuffer(content[::-1], "<u2")
    np.testing.assert_array_equal(found, [replaced[start - 1705 : start - 1696] for start in starts])


# Requests.


def test_only_the_bytes_of_the_sequences_are_fetched_from_the_bucket(pair: SourcePair) -> None:
    dataset = pair.open(vocabulary_size=100_000, cache_bytes=0)
    pair.driver.ranges.clear()
    count = pair.local.num_train_examples
    dataset.train_sources[0].source.read_many(np.arange(count) * 8, 9)
    assert pair.driver.bytes_fetched <= 1.2 * count * pair.row_bytes
    pair.driver.ranges.clear()
    dataset.train_sources[0].source.read_many(pair.starts, 9)
    assert pair.driver.bytes_fetched <= 1.2 * len(pair.starts) * pair.row_bytes


def test_adjacent_sequences_are_one_request(bins: SourcePair) -> None:
    dataset = bins.open(vocabulary_size=1000, cache_bytes=0)
    bins.driver.ranges.clear()
    dataset.train_sources[0].source.read_many(np.arange(1000, 1600, 8), 9)
    assert len(bins.driver.ranges) == 1


def test_requests_are_made_in_parallel(bins: SourcePair) -> None:
    dataset = bins.open(vocabulary_size=1000, cache_bytes=0)
    together = threading.Barrier(8)
    bins.driver.before = lambda verb, key: together.wait(600) and None
    assert dataset.train_sources[0].source.read_many(np.arange(8) * 100 + 1800, 9).shape == (8, 9)


def test_a_check_before_a_save_is_one_listing(pair: SourcePair) -> None:
    dataset = pair.open(vocabulary_size=100_000)
    calls: list[str] = []
    pair.driver.before = lambda verb, key: calls.append(verb)
    dataset.check()
    assert calls == ["list"]
    dataset.check(is_main=False)
    assert calls == ["list"]


# Faults and changes.


def make_callback_failing_first(number: int) -> Callable[[str, str], None]:
    calls: list[str] = []

    def before(verb: str, key: str) -> None:
        calls.append(key)
        if len(calls) <= number:
            raise TransientError("connection refused")

    return before


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    "before", [lambda: make_failing_callback(0.3), lambda: make_callback_failing_first(100)], ids=["503", "cut off"]
)
def test_failing_requests_are_retried_without_changing_the_data(
    pair: SourcePair, before: Callable[[], Callable[[str, str], None]]
) -> None:
    pair.driver.before = before()
    dataset = pair.open(vocabulary_size=100_000)
    pair.driver.before = before()
    pair.check_equal(dataset)
    dataset.check()


def test_an_unreachable_bucket_is_an_infrastructure_error(pair: SourcePair, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = pair.open(vocabulary_size=100_000, cache_bytes=0)
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.01)
    pair.driver.before = make_failing_callback(1.0)
    for act in (lambda: dataset.read("train", 0, 4), dataset.check, pair.open):
        with pytest.raises(StorageError, match=r"s3://bkt/corpus.*not within 0 s and \d+ tries") as caught:
            act()
        assert caught.value.exit_code == 76


def replace(driver: CountingDriver, key: str) -> None:
    driver.put(key, driver.get(key)[0][::-1], None)


def rewrite(driver: CountingDriver, key: str) -> None:
    driver.put(key, driver.get(key)[0], None)


def delete(driver: CountingDriver, key: str) -> None:
    driver.delete(key)


@pytest.mark.parametrize("change", [replace, rewrite, delete], ids=lambda change: change.__name__)
def test_a_changed_object_is_detected(bins: SourcePair, change: Callable[[CountingDriver, str], None]) -> None:
    dataset = bins.open(vocabulary_size=1000, cache_bytes=0)
    change(bins.driver, "corpus/3.bin")
    message = r"s3://bkt/corpus/3\.bin: changed since the job started, or gone"
    for act in (dataset.check, lambda: dataset.read("train", 0, 100)):
        with pytest.raises(DataError, match=message):
            act()


# Globs.

OBJECTS = ["a.bin", "a.bin.bak", "ab.bin", "b/a.bin", "b/c/a.bin", "b/.hidden.bin", "b/x[1].bin", "b/x1.bin", "b/*.bin"]
NAMES = {
    "s3://bkt/corpus/a.bin": ["a.bin"],
    "s3://bkt/corpus/*.bin": ["a.bin", "ab.bin"],
    "s3://bkt/corpus/?.bin": ["a.bin"],
    "s3://bkt/corpus/b/x[1].bin": ["b/x[1].bin"],
    "s3://bkt/corpus/b/[x]1.bin": ["b/x1.bin"],
    "s3://bkt/corpus/b/*.bin": ["b/*.bin"],
    "s3://bkt/corpus/b/**/a.bin": ["b/a.bin", "b/c/a.bin"],
    "s3://bkt/corpus/**/a.bin": ["a.bin", "b/a.bin", "b/c/a.bin"],
    "s3://bkt/corpus/*/a.bin": ["b/a.bin"],
    "s3://bkt/*/a.bin": ["a.bin"],
    "s3://bkt/corpus/b/?*.bin": ["b/*.bin", "b/a.bin", "b/x1.bin", "b/x[1].bin"],
}


@pytest.mark.parametrize("where", ["disk", "bucket"])
@pytest.mark.parametrize("name", NAMES)
def test_globs_of_urls_match_like_globs_of_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, where: str
) -> None:
    for number, relative in enumerate(OBJECTS):
        path = tmp_path / "corpus" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bin(path, np.full(64, number))
    put_in_bucket(monkeypatch, tmp_path / "corpus")
    source = name if where == "bucket" else name.replace("s3://bkt", str(tmp_path))
    tokens = load(source, cache=tmp_path / "cache", vocabulary_size=99).train_sources[0].source
    found = tokens.read(0, len(tokens))[::64].tolist()
    assert sorted(OBJECTS[number] for number in found) == NAMES[name]


REFUSED = {
    "s3://bkt/corpus/c.bin": r"no object matches; did you mean s3://bkt/corpus/\w\.\w+\?",
    "s3://bkt/corpus/*.npy": r"no object matches$",
    "s3://bkt/corpus": r"no object matches; s3://bkt/corpus/ holds no index\.json: name its objects, as",
    "s3://bkt/corpus/*": r"1 of 3 files are of a kind that is not read, the first is a\.jsonl",
    "s3://bkt/corpus/a.[bt]*": r"matches 1 token files \(\.bin, \.npy\) and 1 text files; name one kind",
    "s3://bkt/corpus/none/index.json": r"does not exist|no such|corpus/none/index\.json",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_url_without_training_data_is_rejected_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    driver = put_in_bucket(monkeypatch, tmp_path)
    for key in ("a.txt", "a.bin", "a.jsonl"):
        driver.put(f"corpus/{key}", b"text", ABSENT)
    with pytest.raises(DataError, match=REFUSED[name]) as caught:
        load(name, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("verb", ["list", "get"])
def test_denied_access_is_a_user_error(bins: SourcePair, verb: str) -> None:
    def before(asked: str, key: str) -> None:
        if asked == verb:
            raise DeniedError(f"{key}: 403")

    bins.driver.before = before
    with pytest.raises(DataError, match=r"403"):
        bins.open(vocabulary_size=1000, cache_bytes=0)


def test_the_cache_size_does_not_enter_the_fingerprint(bins: SourcePair) -> None:
    assert bins.open(cache_bytes=0).fingerprint == bins.open(cache_bytes=1 << 20).fingerprint
    with pytest.raises(DataError, match=r"data\.cache_bytes=9: nothing reads it"):
        load(bins.directory / "*.bin", cache=bins.cache, cache_bytes=9)


# Whole run.


@pytest.mark.soak
def test_resumed_run_is_bit_identical_with_a_damaged_cache_and_a_failing_bucket(
    bins: SourcePair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(bins.cache))

    def job(name: str, source: str, **changes: Any) -> Any:
        data = {"source": source, "sequence_length": 16, "validation_fraction": 0.0, **changes}
        return make_gpt(tmp_path / name, **{"config.data": data, "config.train.total_steps": 3})

    there, small = f"{URL}/*.bin", {"cache_bytes": 1 << 15}
    job("whole", str(bins.directory / "*.bin"))()
    stopped = job("stopped", there, **small)
    stop_after(stopped, 1)
    flip_bytes(bins.cache / RANGES_FILE)
    bins.driver.before = make_failing_callback(0.3)
    job("stopped", there, **small)()
    results = [read_json(LocalStore(tmp_path / name), "result.json") for name in ("whole", "stopped")]
    assert results[0] == results[1]


# The services of three clouds.


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] * (name == "az")) for name in BACKENDS])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with start_backend(request.param) as started:
        route_stores_to(monkeypatch, started)
        monkeypatch.setattr("runner.storage.store.FIRST_WAIT_SECONDS", 0.001)
        yield started


def test_every_service_recovers_from_errors_and_reports_changes(backend: Backend, tmp_path: Path) -> None:
    place = f"data/{backend.name}"
    (tmp_path / "bin").mkdir()
    write_bins(tmp_path / "bin")
    write_corpus(tmp_path / "shards", make_random_shards(SIZES))
    copy_golden(tmp_path / "golden")
    for path in filter(Path.is_file, tmp_path.rglob("*.*")):
        backend.write(f"{place}/{path.relative_to(tmp_path).as_posix()}", path.read_bytes())
    backend.proxy.faults = Faults(error_rate=0.3, cut_rate=0.1)
    for source in ("bin/*.bin", "shards"):
        local = load(tmp_path / source, cache=tmp_path / "local", vocabulary_size=1000)
        there = load(backend.url(f"{place}/{source}"), cache=tmp_path / "cache", vocabulary_size=1000)
        assert there.fingerprint == local.fingerprint
        starts = np.random.default_rng(0).integers(0, NUM_TOKENS - 9, 60)
        np.testing.assert_array_equal(
            there.train_sources[0].source.read_many(starts, 9), local.train_sources[0].source.read_many(starts, 9)
        )
        there.check()
    for case in (CASES[name] for name in ("megatron_int32", "mds_zstd", "array_record")):
        source = case.open(backend.url(f"{place}/golden"), tmp_path / "cache")
        assert source.read(0, len(case.ids)).tolist() == case.ids
        source.check()
    backend.proxy.faults = Faults()
    backend.write(f"{place}/shards/00003.bin", (tmp_path / "shards" / "00003.bin").read_bytes()[::-1])
    for act in (there.check, lambda: there.train_sources[0].source.read_many([1300], 100)):
        with pytest.raises(DataError, match=r"00003\.bin: changed since the job started, or gone"):
            act()
    is_third = f"/bkt/{place}/shards/00002.bin"
    backend.proxy.faults = Faults(forbidden=True, matching=lambda method, path: path == is_third)
    backend.write(f"{place}/shards/00003.bin", (tmp_path / "shards" / "00003.bin").read_bytes())
    with pytest.raises(DataError, match=r"00002\.bin cannot be read: no permission"):
        load(backend.url(f"{place}/shards"), cache=tmp_path / "none", cache_bytes=0)
