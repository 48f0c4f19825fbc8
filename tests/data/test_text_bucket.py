"""Text in a bucket: copied whole, and then the tokens, documents and fingerprint of the same text on a disk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data import Dataset
from runner.data.remote import COPIES_DIRECTORY
from runner.errors import DataError, StorageError
from runner.storage import DeniedError
from tests.data.buckets import URL, CountingDriver, fail_some, put_in_bucket
from tests.data.corpus import load
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
# What a name of text finds, which is the same on a disk and in a bucket.
NAMES = {
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
WHERE = ["bucket", "bucket with digests"]


@pytest.fixture(autouse=True)
def _opening_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order is not what these tests look at, and its probe is what opening a small source costs."""
    monkeypatch.setattr("runner.data.sampling.ORDER_PROBE_INDICES", 4)


def write_texts(root: Path) -> Path:
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


class Here:
    """The texts on a disk and in a bucket, each with a cache."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str):
        self.root, self.cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
        self.driver = CountingDriver()
        self.driver.reports_digests = where == "bucket with digests"
        put_in_bucket(monkeypatch, self.root, self.driver)

    def local(self, name: str, **changes: Any) -> Dataset:
        return load(f"{self.root}/{name}", cache=self.cache.with_name("local"), **changes)

    def there(self, name: str, **changes: Any) -> Dataset:
        return load(f"{URL}/{name}", cache=self.cache, **changes)


@pytest.fixture(params=WHERE)
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Here:
    return Here(tmp_path, monkeypatch, request.param)


def refuse_difference(there: Dataset, local: Dataset) -> None:
    """Nothing tells one from the other."""
    assert there.fingerprint == local.fingerprint
    assert there.tokenizer is not None
    assert there.tokenizer.characters == local.tokenizer.characters
    tokens, others = there.train_sources[0].source, local.train_sources[0].source
    np.testing.assert_array_equal(tokens.read(0, len(tokens)), others.read(0, len(others)))
    np.testing.assert_array_equal(tokens.document_ends(0, len(tokens)), others.document_ends(0, len(others)))
    for split in ("train", "validation"):
        for field, values in local.read(split, 0, 6).items():
            np.testing.assert_array_equal(there.read(split, 0, 6)[field], values)


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("name", NAMES)
def test_text_is_what_it_is_on_a_disk_in_trouble_and_warm(
    here: Here, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.data.remote.REQUEST_BYTES_MAX", 100)
    local = here.local(name, **SETTINGS[kind])
    here.driver.before = fail_some(0.3)
    refuse_difference(here.there(name, **SETTINGS[kind]), local)
    size = sum(len((here.root / found).read_bytes()) for found in NAMES[name])
    assert sum(stop - start for _, start, stop in set(here.driver.ranges)) == size  # once, but for what was refused
    here.driver.ranges.clear()
    found = here.there(name, **SETTINGS[kind])
    refuse_difference(found, local)
    found.check()
    assert here.driver.ranges == []
    assert (found.train_sources[0].source.bytes_copied, local.train_sources[0].source.bytes_copied) == (size, 0)


def test_text_that_was_replaced_is_read_as_it_is_now_and_a_run_that_has_read_it_goes_on(here: Here) -> None:
    before = here.there("docs/**/*.txt")
    here.driver.put("corpus/docs/a.txt", TEXTS["docs/a.txt"].upper().encode(), None)
    before.check()
    assert before.read("train", 0, 4)["x"].shape == (4, 8)
    after = here.there("docs/**/*.txt")
    assert after.fingerprint != before.fingerprint
    (here.root / "docs/a.txt").write_text(TEXTS["docs/a.txt"].upper())
    refuse_difference(after, here.local("docs/**/*.txt"))


def replace(driver: CountingDriver) -> None:
    driver.put("corpus/docs/b/d.txt", TEXTS["docs/b/d.txt"][::-1].encode(), None)


def remove(driver: CountingDriver) -> None:
    driver.delete("corpus/docs/b/d.txt")


@pytest.mark.parametrize("act", [replace, remove], ids=lambda act: act.__name__)
def test_text_that_changes_while_it_is_copied_is_named(here: Here, act: Callable[[CountingDriver], None]) -> None:
    here.driver.before = lambda verb, key: act(here.driver) if verb == "get" else None
    with pytest.raises(DataError, match=rf"^{URL}/docs/b/d\.txt: changed since the job started, or gone"):
        here.there("docs/**/*.txt")
    here.driver.before = lambda verb, key: None
    refuse_difference(here.there("docs/a.txt"), here.local("docs/a.txt"))


REFUSED = {
    "docs/a.tx": r"no object matches; did you mean",
    "docs/*.json": r"no object matches$",
    "docs": r"no object matches; .*/docs/ holds no index\.json: name its objects",
    "other/*": r"1 of 2 files are of a kind that is not read, the first is other/wrong\.pdf|is wrong\.pdf",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_of_no_text_is_refused_in_one_line(here: Here, name: str) -> None:
    with pytest.raises(DataError, match=REFUSED[name]) as caught:
        here.there(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"dtype": "uint16"}, {"options": {"a": 1}}], ids=str)
def test_a_key_that_text_does_not_read_is_refused(here: Here, changes: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"nothing reads it, .* names text files"):
        here.there("docs/a.txt", **changes)


@pytest.mark.parametrize("verb", ["list", "get"])
def test_no_permission_is_the_users_to_mend_and_an_outage_is_not(
    here: Here, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def before(asked: str, key: str) -> None:
        if asked == verb:
            raise DeniedError(f"{key}: 403")

    here.driver.before = before
    with pytest.raises(DataError, match="403"):
        here.there("docs/a.txt")
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.01)
    here.driver.before = fail_some(1.0)
    with pytest.raises(StorageError, match="503 Slow Down") as caught:
        here.there("docs/a.txt")
    assert caught.value.exit_code == 76


def test_text_that_does_not_fit_is_refused_with_numbers_and_a_damaged_copy_is_none(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"need [\d,]+ bytes .*data\.cache_bytes .* allows 100$"):
        here.there("docs/**/*.txt", cache_bytes=100)
    local = here.local("docs/**/*.txt")
    refuse_difference(here.there("docs/**/*.txt"), local)
    for path in here.cache.glob("*.npy"):  # the tokens are lost, and what they were made of is damaged
        path.unlink()
    for path in (here.cache / COPIES_DIRECTORY).rglob("copy-*"):
        if path.suffix != ".json" and path.stat().st_size:
            path.write_bytes(path.read_bytes()[::-1])
    refuse_difference(here.there("docs/**/*.txt"), local)


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_text_comes_whole_from_a_service_that_fails_and_is_slow(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_texts(tmp_path / "texts")
    with start_backend(name) as backend:
        route_stores_to(monkeypatch, backend)
        for path in TEXTS:
            backend.write(f"texts/{path}", TEXTS[path].encode())
        backend.proxy.faults = Faults(error_rate=0.3, latency_seconds=0.01)
        for number, pattern in enumerate(NAMES):
            found = load(f"{backend.url('texts')}/{pattern}", cache=tmp_path / f"cache{number}")
            refuse_difference(found, load(f"{root}/{pattern}", cache=tmp_path / "local"))
