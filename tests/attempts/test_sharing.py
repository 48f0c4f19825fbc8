"""Hosts that do not share the run's directory are found at the start, by every process."""

import os
import threading

import pytest

from runner.attempts.attempt import validate_shared, write_token
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.process import make_placements
from runner.storage import LocalStore, Store
from tests.support.job_process import ROOT, Attempt, Job, link_peers
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

OPTIONS = ("config.width=64", "config.total_steps=4", "config.step_seconds=0", "deadlines.phase_seconds=20")


class SeveralHosts(Hosts):
    """One process of several, whose others have reported already."""

    def __init__(self, process_id: int, others: list[list[str | None]]):
        single = Hosts.single_process()
        super().__init__(process_id, len(others) + 1, single.store, single.liveness)
        self._others = others

    def reduce(self, value, function):
        return function([*self._others[: self.process_id], value, *self._others[self.process_id :]])


def validate(
    store: Store, token: str, others: list[list[str | None]], process_id: int = 1, seconds: float = 0.3
) -> None:
    validate_shared(store, SeveralHosts(process_id, others), token, seconds)


@pytest.fixture(params=["disk", "bucket"])
def stores(request, tmp_path):
    """Two stores on the same place, and one on another."""
    if request.param == "disk":
        return LocalStore(tmp_path / "run"), LocalStore(tmp_path / "run"), LocalStore(tmp_path / "other")
    driver = MemoryDriver()
    return make_memory_bucket(driver), make_memory_bucket(driver), make_memory_bucket()


def test_processes_that_share_the_directory_go_on(stores):
    token = write_token(stores[0], SeveralHosts(0, [[None, "b", ""]]))
    validate(stores[1], token, [[None, "a", ""]])
    validate(stores[0], token, [[None, "b", ""]], process_id=0)
    assert stores[0].list_names("") == [], "process 0 removes its file"


def test_a_process_with_another_directory_is_named(stores):
    token = write_token(stores[0], SeveralHosts(0, [[None, "b", ""]]))
    with pytest.raises(InvalidError, match=r"process 1 .*nothing is there.* cannot see what process 0"):
        validate(stores[2], token, [[None, "a", "/there"]])
    # The others learn of it, and process 0 removes its file.
    blind = [["nothing is there", f"host{number}", "/other"] for number in range(6)]
    with pytest.raises(InvalidError, match=r"process 1 \(host host0, /other: nothing .* and 2 others cannot"):
        validate(stores[0], token, blind, process_id=0)
    assert stores[0].list_names("") == []


def test_a_process_whose_cache_is_stale_looks_again(tmp_path):
    store, token = LocalStore(tmp_path), ".shared.token"
    threading.Timer(0.5, lambda: store.write(token, token.encode())).start()
    validate(store, token, [[None, "a", ""]], seconds=60.0)
    assert store.list_names("") == [token]


def test_a_store_that_fails_is_named_and_not_raised(tmp_path):
    driver = MemoryDriver()
    driver.before = lambda verb, key: (_ for _ in ()).throw(PermissionError("no credentials"))
    with pytest.raises(InvalidError, match=r"process 1 .*no credentials.* cannot see"):
        validate(make_memory_bucket(driver), ".shared.x", [[None, "a", ""]])


def test_one_process_writes_nothing(tmp_path):
    hosts, store = Hosts.single_process(), LocalStore(tmp_path / "run")
    assert write_token(store, hosts) == ""
    validate_shared(store, hosts, "", 1.0)
    assert not store.root.exists()


class AttemptIn(Attempt):
    """A process that is started in another working directory."""

    def __init__(self, job, arguments, devices, directory):
        self._wrapper = ["sh", "-c", 'cd "$0" && exec "$@"', str(directory)]
        super().__init__(job, arguments, devices, PYTHONPATH=str(ROOT))


def start_in(directories, directory="run"):
    attempts = []
    for place, placement in zip(directories, make_placements(len(directories)), strict=True):
        job = Job(str(ROOT / "specs/counter.yaml"), directory, OPTIONS)
        attempts.append(AttemptIn(NoFiles(job), ["runner", *job.arguments, *placement], 1, place))
    return link_peers(attempts)


class NoFiles:
    """A job whose directory is not looked at, because it is relative to that of each process."""

    def __init__(self, job):
        self.directory, self._job = ROOT / "nothing" / "here", job

    def __getattr__(self, name):
        return (lambda *_: []) if name == "events" else (lambda: 0)


@pytest.mark.soak
def test_processes_with_other_working_directories_end_with_2(tmp_path):
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    attempts = start_in(places)
    for attempt in attempts:
        attempt.expect(2)
        line = attempt.output.strip().splitlines()[-1]
        assert f"{places[1]}/run: nothing is there) cannot see what process 0" in line
        assert f"writes into {places[0]}/run" in line
        assert "Traceback" not in attempt.output
    assert os.listdir(places[0] / "run") == []
    assert os.listdir(places[1]) == []
