"""Formats of other tools in a bucket: same ids, documents and fingerprints as on disk, also with a failing service."""

import fcntl
import os
import shutil
from collections.abc import Callable
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.remote import COPIES_DIRECTORY
from runner.errors import DataError, StorageError
from runner.storage import DeniedError
from tests.data.buckets import URL, CountingDriver, make_failing_callback, put_in_bucket
from tests.data.datasets import load
from tests.data.golden import CASES, FormatCase, copy_golden

each_case = pytest.mark.parametrize("name", CASES)
COPIED_WHOLE = ("mds_zstd", "array_record", "array_record_several")


class GoldenFiles:
    """Golden files on disk and in a bucket, and a cache for those read from the bucket."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.root, self.cache = copy_golden(tmp_path / "golden"), tmp_path / "cache"
        self.driver = CountingDriver()
        put_in_bucket(monkeypatch, self.root, self.driver)

    def open(self, name: str, cache_bytes: int | None = 1 << 20) -> Any:
        return CASES[name].open(URL, self.cache, cache_bytes)

    def load(self, name: str, root: Path | str, **changes: Any) -> Any:
        case = CASES[name]
        cache = self.cache if root == URL else self.cache.with_name("local")
        changes = {"options": dict(case.options), "vocabulary_size": 100_000} | changes
        return load(f"{root}/{case.source}", cache=cache, **changes)

    def change(self, path: str, content: bytes | None) -> None:
        """Replace an object, or delete it."""
        if content is None:
            self.driver.delete(f"corpus/{path}")
        else:
            self.driver.put(f"corpus/{path}", content, None)


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


@pytest.fixture
def golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GoldenFiles:
    return GoldenFiles(tmp_path, monkeypatch)


def check_equal(case: FormatCase, source: Any) -> None:
    """Compare ids and document ends with the expected ones, for ranges of all positions."""
    assert len(source) == len(case.ids)
    ranges = list(
        combinations_with_replacement(sorted({0, 1, 7, *case.ends[::3], len(case.ids) - 1, len(case.ids)}), 2)
    )
    for (start, stop), found in zip(ranges, source.read_ranges(ranges), strict=True):
        assert found.tolist() == case.ids[start:stop]
        assert source.document_ends(start, stop).tolist() == [end for end in case.ends if start < end <= stop]
    assert source.read(0, len(source)).dtype == case.dtype


@each_case
def test_content_and_fingerprint_equal_those_on_disk(
    golden: GoldenFiles, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    case = CASES[name]
    expected = case.open(golden.root).fingerprint
    for rate in (0.0, 0.0, 0.3):
        golden.driver.before = make_failing_callback(rate)
        monkeypatch.setattr("runner.data.remote.REQUEST_BYTES_MAX", 1000 if rate else 4 << 20)
        source = golden.open(name, cache_bytes=None if rate < 0.3 or name in COPIED_WHOLE else 0)
        check_equal(case, source)
        assert source.fingerprint == expected
        source.check()


@each_case
@pytest.mark.parametrize("packing", ["concatenate", "documents"])
def test_sequences_equal_those_on_disk(golden: GoldenFiles, name: str, packing: str) -> None:
    local, there = (golden.load(name, root, packing=packing) for root in (golden.root, URL))
    assert there.fingerprint == local.fingerprint
    source = there.train_sources[0].source
    is_copied = name in COPIED_WHOLE
    assert (source.bytes_copied > 0, source.bytes_fetched_per_token > 0) == (is_copied, not is_copied)
    assert not local.train_sources[0].source.bytes_copied
    for split in ("train", "validation"):
        for field, values in local.read(split, 0, 6).items():
            np.testing.assert_array_equal(there.read(split, 0, 6)[field], values)


@each_case
def test_a_check_is_one_listing_and_a_warm_start_fetches_no_whole_object(golden: GoldenFiles, name: str) -> None:
    golden.open(name)
    golden.driver.ranges.clear()
    calls: list[str] = []
    source = golden.open(name)
    whole = {path.stat().st_size for path in golden.root.rglob("*.array_record*")}
    assert not any((start, stop - start) in {(0, size) for size in whole} for _, start, stop in golden.driver.ranges)
    golden.driver.before = lambda verb, key: calls.append(verb)
    source.check()
    assert calls in (["list"], [])  # no further look at objects that are copied whole


# One object of each format, which a test replaces.
OBJECTS = {
    "megatron_int32": "megatron/int32.bin",
    "mds_array": "mds/ndarray_int32/shard.00001.mds",
    "mds_columns": "mds/columns/shard.00000.mds",
    "array_record": "array_record/single.array_record",
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("change", ["replaced", "cut", "gone"])
def test_a_changed_object_is_reported_by_name(golden: GoldenFiles, name: str, change: str) -> None:
    path = OBJECTS[name]
    source = golden.open(name, cache_bytes=None if name == "array_record" else 0)
    content = (golden.root / path).read_bytes()
    golden.change(path, {"replaced": content[::-1], "cut": content[:-4], "gone": None}[change])
    acts = [source.check, lambda: source.read(0, len(source))]
    for act in acts[: 1 if name == "array_record" else 2]:
        with pytest.raises(DataError, match=rf"^{URL}/{path}: changed since the job started, or gone"):
            act()


@pytest.mark.parametrize("name", OBJECTS)
def test_a_replaced_object_is_read_anew(golden: GoldenFiles, name: str) -> None:
    path = OBJECTS[name]
    golden.open(name).read(0, 300)
    before = golden.open(name).fingerprint
    content = bytearray((golden.root / path).read_bytes())
    if name in ("megatron_int32", "mds_array"):
        content[-4] ^= 1  # in the last id
        golden.change(path, bytes(content))
        assert golden.open(name).fingerprint != before
    golden.change(path, (golden.root / path).read_bytes())
    assert golden.open(name).fingerprint == before


@pytest.mark.parametrize(
    ("name", "path", "message"),
    [
        ("megatron_int32", "megatron/int32.bin", r"megatron/int32\.bin is missing: its \.idx needs it"),
        ("megatron_int32", "megatron/int32.idx", r"no object matches"),
        ("mds_array", "mds/ndarray_int32/shard.00001.mds", r"ndarray_int32/shard\.00001\.mds is missing: its index"),
        ("mds_zstd", "mds/zstd/shard.00001.mds.zstd", r"zstd/shard\.00001\.mds\.zstd is missing: its index"),
    ],
)
def test_a_missing_object_is_reported_by_name(golden: GoldenFiles, name: str, path: str, message: str) -> None:
    golden.change(path, None)
    with pytest.raises(DataError, match=message):
        golden.open(name)


@pytest.mark.parametrize("name", ["megatron_int32", "mds_array", "mds_zstd", "array_record"])
@pytest.mark.parametrize("verb", ["list", "get"])
def test_denied_access_is_a_user_error_and_an_outage_is_not(
    golden: GoldenFiles, monkeypatch: pytest.MonkeyPatch, name: str, verb: str
) -> None:
    def before(asked: str, key: str) -> None:
        if asked == verb:
            raise DeniedError(f"{key}: 403")

    golden.driver.before = before
    with pytest.raises(DataError, match="403"):
        golden.load(name, URL)
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.01)
    golden.driver.before = make_failing_callback(1.0)
    with pytest.raises(StorageError, match="503 Slow Down") as caught:
        golden.load(name, URL)
    assert caught.value.exit_code == 76


# Whole copies.


def list_copies(golden: GoldenFiles) -> list[Path]:
    return sorted(
        path for path in (golden.cache / COPIES_DIRECTORY).rglob("*") if path.is_file() and path.suffix != ".json"
    )


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("name", COPIED_WHOLE)
@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=lambda damage: damage.__name__)
def test_a_damaged_copy_is_fetched_again(golden: GoldenFiles, name: str, damage: Callable[[Path], None]) -> None:
    golden.open(name)
    for path in (copies := list_copies(golden)):
        damage(path)
    check_equal(CASES[name], golden.open(name))
    assert list_copies(golden) == copies != []


def test_a_copy_damaged_in_transfer_is_not_kept(golden: GoldenFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CountingDriver.get_range
    monkeypatch.setattr(CountingDriver, "get_range", lambda *asked: whole(*asked)[:-1] + b"\xff")
    with pytest.raises(StorageError, match=rf"{URL}/array_record/single\.array_record: came damaged"):
        golden.open("array_record")
    assert not list_copies(golden)
    monkeypatch.undo()


@pytest.mark.parametrize("cache_bytes", [0, 1000])
@pytest.mark.parametrize("name", ["mds_zstd", "array_record"])
def test_objects_larger_than_the_cache_are_rejected(golden: GoldenFiles, name: str, cache_bytes: int) -> None:
    with pytest.raises(DataError, match=rf"need [\d,]+ bytes .*data\.cache_bytes .* allows {cache_bytes:,}$"):
        golden.load(name, URL, cache_bytes=cache_bytes)
    assert not list_copies(golden)


def test_unused_copies_are_evicted_and_used_ones_stay(golden: GoldenFiles) -> None:
    others = [golden.cache / COPIES_DIRECTORY / name for name in ("oldest", "older", "held")]
    for age, other in enumerate(others):
        other.mkdir(parents=True)
        (other / "copy").write_bytes(bytes(40_000))
        os.utime(other, (age, age))
    held = os.open(others[2], os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_SH)
    golden.open("array_record", cache_bytes=215_000)
    assert [other.exists() for other in others] == [False, True, True]
    with pytest.raises(DataError, match=r"beside 171,\d\d\d of other sources; .* allows 100,000$"):
        golden.open("mds_zstd", cache_bytes=100_000)
    os.close(held)


@pytest.mark.parametrize("look", ["open", "scandir"])
def test_a_directory_removed_concurrently_is_tolerated(
    golden: GoldenFiles, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    golden.open("array_record")
    (own,) = (golden.cache / COPIES_DIRECTORY).iterdir()
    (other := own.with_name("other")).mkdir()
    doomed, really, removed = own if look == "open" else other, getattr(os, look), []

    def remove_first(path: Any, *options: Any, **names: Any) -> Any:
        if not removed and str(path) == str(doomed):
            removed.append(path)
            shutil.rmtree(doomed)
        return really(path, *options, **names)

    monkeypatch.setattr(os, look, remove_first)
    check_equal(CASES["array_record"], golden.open("array_record"))
    assert removed


def test_leftovers_of_killed_processes_and_earlier_versions_are_removed(golden: GoldenFiles) -> None:
    golden.open("mds_zstd")
    (directory,) = (golden.cache / COPIES_DIRECTORY).iterdir()
    copies = list_copies(golden)
    # The copy is another directory than the one that this process holds a lock on.
    shutil.copytree(directory.rename(golden.cache / "held"), directory)
    (directory / ".half.tmp").write_bytes(b"half")
    golden.open("mds_zstd")
    assert list_copies(golden) == copies
