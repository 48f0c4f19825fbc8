"""Text in a bucket: copied whole, with the same tokens, documents and fingerprint as on disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data import Dataset
from runner.data.remote import COPIES_DIRECTORY
from runner.errors import DataError, StorageError
from runner.storage import DeniedError
from tests.data.buckets import URL, CountingDriver, make_failing_callback, put_in_bucket
from tests.data.datasets import load
from tests.support.object_stores import BACKENDS, Faults, route_stores_to, start_backend

TEXTS = {
    "docs/a.txt": "The quick brown fox, größer.\n" * 9,
    "docs/b/c.md": "A second file, of another kind.\n" * 12,
    "docs/b/empty.txt": "",
    "docs/b/d.txt": "A third one. " * 30,
    "docs/LICENSE": "without a suffix " * 8,
    "other/e.py": "print('elsewhere')\n" * 20,
    "other/wrong.pdf": "%PDF",
}
# Globs and the files they match, on disk and in a bucket.
GLOBS = {
    "docs/**/*.txt": ["docs/a.txt", "docs/b/d.txt", "docs/b/empty.txt"],
    "docs/**/*": ["docs/LICENSE", "docs/a.txt", "docs/b/c.md", "docs/b/d.txt", "docs/b/empty.txt"],
    "*/[be]*.py": ["other/e.py"],
    "docs/a.txt": ["docs/a.txt"],
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bytes": {},
    "characters": {"tokenizer": "characters"},
    "separator": {"document_separator": "nul", "packing": "documents"},
    "pad": {"packing": "pad", "sequence_length": 32},
}
STORAGES = ["bucket", "bucket with digests"]


@pytest.fixture(autouse=True)
def _shorten_order_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe of the sampling order, which dominates the cost of opening a small source."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


def write_texts(root: Path) -> Path:
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class TextPair:
    """The same texts on disk and in a bucket, each with a cache."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
        self.root, self.cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
        self.driver = CountingDriver()
        self.driver.reports_digests = where == "bucket with digests"
        put_in_bucket(monkeypatch, self.root, self.driver)

    def load_local(self, name: str, **changes: Any) -> Dataset:
        return load(f"{self.root}/{name}", cache=self.cache.with_name("local"), **changes)

    def load_remote(self, name: str, **changes: Any) -> Dataset:
        return load(f"{URL}/{name}", cache=self.cache, **changes)


@pytest.fixture(params=STORAGES)
def text_pair(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TextPair:
    return TextPair(tmp_path, monkeypatch, request.param)


def check_equal(load_remote: Dataset, load_local: Dataset) -> None:
    """Compare tokenizer, tokens, documents and sequences of two datasets."""
    assert load_remote.fingerprint == load_local.fingerprint
    assert load_remote.tokenizer is not None
    assert load_remote.tokenizer.characters == load_local.tokenizer.characters
    tokens, others = load_remote.train_sources[0].source, load_local.train_sources[0].source
    np.testing.assert_array_equal(tokens.read(0, len(tokens)), others.read(0, len(others)))
    np.testing.assert_array_equal(tokens.document_ends(0, len(tokens)), others.document_ends(0, len(others)))
    for split in ("train", "validation"):
        for field, values in load_local.read(split, 0, 6).items():
            np.testing.assert_array_equal(load_remote.read(split, 0, 6)[field], values)


@pytest.mark.daily(16)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", GLOBS)
def test_text_equals_that_on_disk_with_failing_requests_and_a_warm_cache(
    text_pair: TextPair, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.data.remote.REQUEST_BYTES_MAX", 100)
    load_local = text_pair.load_local(name, **SETTINGS[kind])
    text_pair.driver.before = make_failing_callback(0.3)
    check_equal(text_pair.load_remote(name, **SETTINGS[kind]), load_local)
    size = sum(len((text_pair.root / found).read_bytes()) for found in GLOBS[name])
    assert sum(stop - start for _, start, stop in set(text_pair.driver.ranges)) == size  # no byte twice
    text_pair.driver.ranges.clear()
    found = text_pair.load_remote(name, **SETTINGS[kind])
    check_equal(found, load_local)
    found.check()
    assert text_pair.driver.ranges == []
    assert (found.train_sources[0].source.bytes_copied, load_local.train_sources[0].source.bytes_copied) == (size, 0)


def test_replaced_text_is_read_anew_and_a_running_job_continues(text_pair: TextPair) -> None:
    before = text_pair.load_remote("docs/**/*.txt")
    text_pair.driver.put("corpus/docs/a.txt", TEXTS["docs/a.txt"].upper().encode(), None)
    before.check()
    assert before.read("train", 0, 4)["x"].shape == (4, 8)
    after = text_pair.load_remote("docs/**/*.txt")
    assert after.fingerprint != before.fingerprint
    (text_pair.root / "docs/a.txt").write_text(TEXTS["docs/a.txt"].upper())
    check_equal(after, text_pair.load_local("docs/**/*.txt"))


def replace(driver: CountingDriver) -> None:
    driver.put("corpus/docs/b/d.txt", TEXTS["docs/b/d.txt"][::-1].encode(), None)


def remove(driver: CountingDriver) -> None:
    driver.delete("corpus/docs/b/d.txt")


@pytest.mark.parametrize("act", [replace, remove], ids=lambda act: act.__name__)
def test_text_changed_during_the_copy_is_reported_by_name(
    text_pair: TextPair, act: Callable[[CountingDriver], None]
) -> None:
    text_pair.driver.before = lambda verb, key: act(text_pair.driver) if verb == "get" else None
    with pytest.raises(DataError, match=rf"^{URL}/docs/b/d\.txt: changed since the job started, or gone"):
        text_pair.load_remote("docs/**/*.txt")
    text_pair.driver.before = lambda verb, key: None
    check_equal(text_pair.load_remote("docs/a.txt"), text_pair.load_local("docs/a.txt"))


INVALID_NAMES = {
    "docs/a.tx": r"no object matches; did you mean",
    "docs/*.json": r"no object matches$",
    "docs": r"no object matches; .*/docs/ holds no index\.json: name its objects",
    "other/*": r"1 of 2 files are of a kind that is not read, the first is other/wrong\.pdf|is wrong\.pdf",
}


@pytest.mark.parametrize("name", INVALID_NAMES)
def test_invalid_text_sources_are_rejected_in_one_line(text_pair: TextPair, name: str) -> None:
    with pytest.raises(DataError, match=INVALID_NAMES[name]) as caught:
        text_pair.load_remote(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"dtype": "uint16"}, {"options": {"a": 1}}], ids=str)
def test_keys_that_text_does_not_read_are_rejected(text_pair: TextPair, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"nothing reads it, .* names text files"):
        text_pair.load_remote("docs/a.txt", **changes)


@pytest.mark.parametrize("verb", ["list", "get"])
def test_denied_access_is_a_user_error_and_an_outage_is_not(
    text_pair: TextPair, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def before(asked: str, key: str) -> None:
        if asked == verb:
            raise DeniedError(f"{key}: 403")

    text_pair.driver.before = before
    with pytest.raises(DataError, match="403"):
        text_pair.load_remote("docs/a.txt")
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.01)
    text_pair.driver.before = make_failing_callback(1.0)
    with pytest.raises(StorageError, match="503 Slow Down") as caught:
        text_pair.load_remote("docs/a.txt")
    assert caught.value.exit_code == 76


def test_text_larger_than_the_cache_is_rejected_and_a_damaged_copy_is_fetched_again(
    text_pair: TextPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"need [\d,]+ bytes .*data\.cache_bytes .* allows 100$"):
        text_pair.load_remote("docs/**/*.txt", cache_bytes=100)
    load_local = text_pair.load_local("docs/**/*.txt")
    check_equal(text_pair.load_remote("docs/**/*.txt"), load_local)
    for path in text_pair.cache.glob("*.npy"):  # tokens are removed, and copies of the text damaged
        path.unlink()
    for path in (text_pair.cache / COPIES_DIRECTORY).rglob("copy-*"):
        if path.suffix != ".json" and path.stat().st_size:
            path.write_bytes(path.read_bytes()[::-1])
    check_equal(text_pair.load_remote("docs/**/*.txt"), load_local)


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_text_is_read_from_a_failing_and_slow_service(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_texts(tmp_path / "texts")
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        for path in TEXTS:
            backend.write(f"texts/{path}", TEXTS[path].encode())
        backend.proxy.faults = Faults(error_rate=0.3, latency_seconds=0.01)
        for number, pattern in enumerate(GLOBS):
            found = load(f"{backend.url('texts')}/{pattern}", cache=tmp_path / f"cache{number}")
            check_equal(found, load(f"{root}/{pattern}", cache=tmp_path / "local"))
