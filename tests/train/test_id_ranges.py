"""Token files on many hosts: one host reads what each would read of all files, and shares the result with all hosts."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.checkpoint.manifest import Manifest
from runner.data import token_files as tokens
from runner.distributed.agreement import Hosts
from runner.errors import DataError, InvalidError
from runner.storage import LocalStore
from runner.train.checks import share_data
from tests.data.buckets import put_in_bucket
from tests.data.datasets import load, write_bin, write_npy
from tests.support.coordinator import MemoryCoordinator, run_on_all_hosts

NUM_HOSTS = 3


def record_scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the number of tokens that each scan reads from now on."""
    scanned: list[int] = []
    scan = tokens.TokenSequence.scan

    def counted(self: tokens.TokenSequence) -> Any:
        scanned.append(len(self))
        return scan(self)

    monkeypatch.setattr(tokens.TokenSequence, "scan", counted)
    return scanned


def test_one_host_scans_all_ids_and_shares_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write_bin(tmp_path / "a.bin", np.arange(2000) % 700)
    second = write_npy(tmp_path / "b.npy", np.arange(1000) % 900)
    scanned = record_scans(monkeypatch)
    mixture = [{"name": "a", "source": str(first)}, {"name": "b", "source": str(second)}]
    datasets = [load("python-stdlib", cache=tmp_path / f"{host}", mixture=mixture) for host in range(NUM_HOSTS)]

    def know(hosts: Hosts) -> tuple[int, str]:
        dataset = datasets[hosts.process_id]
        share_data(lambda: dataset, False, LocalStore(tmp_path / "run"), hosts)
        with pytest.raises(DataError) as caught:
            dataset.validate_vocabulary(800)
        return dataset.vocabulary_size, str(caught.value)

    found = run_on_all_hosts(MemoryCoordinator(NUM_HOSTS).hosts(), know)
    assert sorted(scanned) == [1000, 2000]
    assert [size for size, _ in found] == [900] * NUM_HOSTS
    assert {line for _, line in found} == {found[0][1]}
    assert "token id 899 at position 899 of" in found[0][1]


def test_invalid_ids_stop_all_hosts_with_the_same_line(tmp_path: Path) -> None:
    path = write_npy(tmp_path / "a.npy", [*range(200), -1, *range(200)])
    datasets = [load(path, cache=tmp_path / f"{host}") for host in range(NUM_HOSTS)]

    def know(hosts: Hosts) -> str:
        with pytest.raises(InvalidError) as caught:
            share_data(lambda: datasets[hosts.process_id], False, LocalStore(tmp_path / "run"), hosts)
        return str(caught.value)

    lines = run_on_all_hosts(MemoryCoordinator(NUM_HOSTS).hosts(), know)
    assert lines == [f"token id -1 at position 200 of {path} is negative"] * NUM_HOSTS


def test_an_invalid_id_in_one_hosts_copy_is_reported_when_read(tmp_path: Path) -> None:
    ids = np.arange(2000) % 700
    path = write_bin(tmp_path / "a.bin", ids)
    found = load(path, cache=tmp_path / "first").find_id_ranges(None)
    ids[1234] = 5000
    second = load(write_bin(path, ids), cache=tmp_path / "second")
    second.set_id_ranges(None, found)
    with pytest.raises(DataError, match=rf"token id 5,000 at position 1234 of {path} is beyond .* 700 ids"):
        second.train_sources[0].source.read(1200, 1300)


@pytest.mark.parametrize("has_other_data", [False, True])
def test_resuming_on_the_same_data_does_not_scan_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_other_data: bool
) -> None:
    path = write_bin(tmp_path / "a.bin", np.arange(4000) % 200)
    monkeypatch.setattr(tokens, "SCANNED_TOKENS_MAX", 100)
    dataset = load(path, cache=tmp_path / "cache")
    fingerprint = "another" if has_other_data else dataset.fingerprint
    identity = {"config.data": fingerprint, "config.model.vocabulary_size": 300}
    store = LocalStore(tmp_path / "run")
    store.write("checkpoints/4/manifest.json", Manifest(name="4", step=4, identity=identity).encode())
    scanned = record_scans(monkeypatch)
    share_data(lambda: dataset, False, store, Hosts.single_process())
    assert (scanned, dataset.vocabulary_size) == (([4000], 200) if has_other_data else ([], 300))


@pytest.mark.parametrize("vocabulary_size", [None, 700])
def test_one_host_reads_all_objects_of_a_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary_size: int | None
) -> None:
    for number in range(5):
        write = write_npy if number % 2 else write_bin
        write(tmp_path / "corpus" / f"{number}{'.npy' if number % 2 else '.bin'}", np.arange(2000) % 700)
    driver = put_in_bucket(monkeypatch, tmp_path / "corpus")
    requests: dict[int, list[str]] = {host: [] for host in range(NUM_HOSTS)}
    host = threading.local()

    def count(verb: str, key: str) -> None:
        requests[getattr(host, "number", 0)].append(verb)

    driver.before = count
    monkeypatch.setattr("runner.train.checks.default_cache_directory", lambda: tmp_path / f"cache{host.number}")
    # Requests are made by the thread of their host.
    monkeypatch.setattr("runner.data.remote.run_in_parallel", lambda acts: [act() for act in acts])
    monkeypatch.setattr("runner.data.token_files.run_in_parallel", lambda acts: [act() for act in acts])

    def know(hosts: Hosts) -> tuple[str, int, int]:
        host.number = hosts.process_id
        loaded = []

        def load_once() -> Any:
            if not loaded:
                cache = tmp_path / f"cache{host.number}"
                loaded.append(load("s3://bkt/corpus/*", cache=cache, vocabulary_size=vocabulary_size))
            return loaded[0]

        share_data(load_once, True, LocalStore(tmp_path / "run"), hosts)
        dataset = load_once()
        fingerprint, size = dataset.fingerprint, dataset.vocabulary_size
        return fingerprint, size, dataset.train_sources[0].source.parts[3].offset_bytes

    found = run_on_all_hosts(MemoryCoordinator(NUM_HOSTS).hosts(), know)
    assert found == [found[0]] * NUM_HOSTS
    assert found[0][1:] == (700, 128)
    assert requests[0].count("get") > 5
    assert [set(requests[number]) for number in range(1, NUM_HOSTS)] == [{"list"}] * (NUM_HOSTS - 1)
    driver.put("corpus/3.npy", driver.get("corpus/3.npy")[0][::-1], None)
    with pytest.raises(DataError, match=r"3\.npy"):
        load("s3://bkt/corpus/*", cache=tmp_path / "cache0", vocabulary_size=vocabulary_size)
