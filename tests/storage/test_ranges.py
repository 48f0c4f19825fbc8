"""Byte ranges, versioned listings and deleted trees: on disk, in an in-memory bucket, and at three cloud services."""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.storage import ABSENT, ChangedError, DeadlineError, DeniedError, LocalStore, Store, open_store
from runner.storage.store import TransientError
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.object_stores import BACKENDS, Backend, Faults, route_stores_to, start_backend

CONTENT = bytes(range(256)) * 40
RANGES = [(0, 1), (0, 10240), (255, 257), (5000, 9096), (10239, 10240)]


@pytest.fixture(autouse=True)
def _skip_retry_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.storage.store.FIRST_WAIT_SECONDS", 0.001)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with start_backend(request.param) as started:
        route_stores_to(monkeypatch, started)
        yield started


@pytest.fixture(params=["disk", "memory", *BACKENDS])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param in BACKENDS:
        with start_backend(request.param) as started:
            route_stores_to(monkeypatch, started)
            yield open_store(started.url(f"ranges/{request.node.name}"))
    else:
        yield LocalStore(tmp_path / "corpus") if request.param == "disk" else make_memory_bucket()


def test_a_listing_returns_names_sizes_and_versions(store: Store) -> None:
    for name in ("a/x.bin", "a/y+ é.bin", "a/deep/x.bin", "ax", "b/x.bin"):
        store.write(name, name.encode())
    for start in ("", "a", "a/", "a/x", "a/deep/", "b/x.bin", "a/z"):
        expected = [
            name for name in ("a/deep/x.bin", "a/x.bin", "a/y+ é.bin", "ax", "b/x.bin") if name.startswith(start)
        ]
        listing = store.list_files(start)
        assert list(listing) == expected
        assert all(found.size_bytes == len(name.encode()) for name, found in listing.items())
        assert all(found.version == store.read_versioned(name)[1] for name, found in listing.items())
        assert all(found.crc32c in (None, store.compute_digest(name)) for name, found in listing.items())


def test_a_range_returns_exactly_its_bytes(store: Store) -> None:
    store.write("deep/x.bin", CONTENT)
    for version in (store.list_files("deep/x.bin")["deep/x.bin"].version, None):
        for start, stop in RANGES:
            assert store.read_range("deep/x.bin", start, stop, version) == CONTENT[start:stop]
        assert store.read_range("deep/x.bin", 7, 7, version) == b""
    with pytest.raises(FileNotFoundError):
        store.read_range("deep/y.bin", 0, 1, None)


def test_a_range_of_a_replaced_or_deleted_file_is_rejected(store: Store) -> None:
    store.write("x.bin", CONTENT)
    version = store.list_files("x.bin")["x.bin"].version
    store.write("x.bin", CONTENT[::-1])
    assert store.list_files("x.bin")["x.bin"].version != version
    with pytest.raises(ChangedError, match=r"x\.bin is no longer the (file|object) that it was"):
        store.read_range("x.bin", 0, 10, version)
    store.remove("x.bin")
    with pytest.raises((ChangedError, FileNotFoundError)):
        store.read_range("x.bin", 0, 10, version)
    assert store.list_files("") == {}


def test_a_range_is_retried_after_errors_and_truncated_responses(backend: Backend) -> None:
    store = open_store(backend.url("ranges/trouble"))
    store.write("x.bin", CONTENT)
    versions = store.list_files("x.bin")["x.bin"].version, None
    backend.proxy.faults = Faults(error_rate=0.3, cut_rate=0.3)
    for version, (start, stop) in itertools.product(versions, RANGES * 3):
        assert store.read_range("x.bin", start, stop, version) == CONTENT[start:stop]
    assert backend.proxy.fired["error"]
    assert backend.proxy.fired["cut"]


def test_a_denied_range_is_a_permission_error(backend: Backend) -> None:
    store = open_store(backend.url("ranges/forbidden"))
    store.write("x.bin", CONTENT)
    version = store.list_files("x.bin")["x.bin"].version
    backend.proxy.faults = Faults(forbidden=True)
    with pytest.raises(DeniedError):
        store.read_range("x.bin", 0, 10, version)


def test_a_truncated_file_on_disk_is_rejected(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("x.bin", CONTENT)
    with pytest.raises(ChangedError, match=r"x\.bin ends at 10240 bytes, needs 10241"):
        store.read_range("x.bin", 10000, 10241, store.list_files("x.bin")["x.bin"].version)


def test_a_temporary_outage_only_delays_a_range(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MemoryDriver()
    store = make_memory_bucket(driver)
    store.write("x.bin", CONTENT)
    version, calls = store.list_files("x.bin")["x.bin"].version, []

    def down(verb: str, key: str) -> None:
        calls.append(verb)
        if len(calls) < 4:
            raise TransientError("503")

    driver.before = down
    assert store.read_range("x.bin", 3, 9, version) == CONTENT[3:9]
    assert calls == ["get"] * 4
    driver.before = lambda verb, key: down("", key) if calls.clear() is None else None
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.0)
    with pytest.raises(TimeoutError, match=r"read mem://bucket/run/x\.bin: not within 0 s"):
        store.read_range("x.bin", 3, 9, version)
    assert store.read_range("x.bin", 3, 3, ABSENT) == b""


class ShortDriver(MemoryDriver):
    """A driver whose first responses are too short or too long, unnoticed by the client."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = [slice(0, 3), slice(0, 0), slice(None, None)]

    def get_range(self, key: str, start: int, stop: int, version: str) -> bytes:
        content = super().get_range(key, start, stop, version)
        return (content + b"more")[self.answers.pop()] if self.answers else content


def test_a_response_of_the_wrong_length_is_retried() -> None:
    store = make_memory_bucket(ShortDriver())
    store.write("x.bin", CONTENT)
    assert store.read_range("x.bin", 3, 9, store.list_files("x.bin")["x.bin"].version) == CONTENT[3:9]


# Trees in the services.


@pytest.fixture
def server_store(backend: Backend, request: pytest.FixtureRequest) -> Store:
    return open_store(backend.url(f"trees/{request.node.name}"))


def test_a_tree_is_deleted_in_batches(backend: Backend, server_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(server_store._driver), "batch_size", 4)
    names = [f"1/deep/a b+c%20d/é {number}.bin" for number in range(9)]
    for name in [*names, "10/x", "1x", "1/one"]:
        server_store.write(name, b"content")
    backend.proxy.requests.clear()
    server_store.remove_tree("1/deep")
    assert len(backend.proxy.requests) == 4  # a listing, two batches, and an object of its own
    assert list(server_store.list_sizes("")) == ["1/one", "10/x", "1x"]
    server_store.remove_tree("1/deep")


def test_a_batch_with_a_missing_object_is_deleted_one_by_one(
    backend: Backend, server_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("1/a", "1/c", "1/d"):
        server_store.write(name, b"content")
    with monkeypatch.context() as patch:
        patch.setattr(server_store, "list_sizes", lambda _: dict.fromkeys("abcd", 7))  # b is gone meanwhile
        server_store.remove_tree("1")
    assert server_store.list_sizes("") == {}


@pytest.mark.parametrize("fault", ["forbidden_writes", "error_rate"])
def test_a_batch_that_the_service_refuses_raises(
    backend: Backend, server_store: Store, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runner.storage.bucket.CALL_SECONDS", 0.2)
    for name in ("1/a", "1/b"):
        server_store.write(name, b"content")
    setattr(backend.proxy.faults, fault, 1.0)
    backend.proxy.faults.matching = lambda method, path: method in ("POST", "DELETE")
    with pytest.raises(DeniedError if fault == "forbidden_writes" else DeadlineError):
        server_store.remove_tree("1")
    backend.proxy.faults = Faults()
    server_store.remove_tree("1")
    assert server_store.list_sizes("") == {}
