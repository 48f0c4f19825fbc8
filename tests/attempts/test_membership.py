"""Membership of an elastic job: notices of hosts that wait, attempts that run, and the save at which the job grows."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from runner.attempts import attempt as attempt_module
from runner.attempts import membership
from runner.attempts.clock_file import start_clock_file
from runner.attempts.fence import Fence
from runner.attempts.layout import Owner, write_owner
from runner.attempts.membership import _DAY_SECONDS, WAITING, Membership, WaitingHosts, find_running_attempt
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.errors import FencedError, RemovedError, RetryableError, RunnerError, StorageError
from runner.spec import ExecutionSpec
from runner.storage import BackgroundWriter, LocalStore
from tests.support.attempt import make_attempt
from tests.support.tiny_jobs import make_counter

GROWS = {"elastic": True, "grow": "at_save"}


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "run")
    write_owner(store, Owner.create("tiny", {}))
    return store


def make_spec(directory: Path, topology: dict[str, Any] | None) -> ExecutionSpec:
    document = {"name": "tiny", "job": "experiments.counter:Counter", "directory": str(directory)}
    return ExecutionSpec.model_validate(document | ({} if topology is None else {"topology": topology}))


@contextlib.contextmanager
def watch(store: LocalStore, num_missing: int) -> Iterator[WaitingHosts]:
    hosts = WaitingHosts(store, num_missing)
    try:
        yield hosts
    finally:
        hosts.close()


def becomes_due(hosts: WaitingHosts, store: LocalStore, names: list[str], seconds: float) -> bool:
    """Write the notices `names` anew until the growth is due, at most for `seconds`."""
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        number += 1
        for name in names:
            store.write(f"{WAITING}/{name}", str(number).encode())
        if hosts.is_growth_due():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(("num_missing", "waiting"), [(1, ["2"]), (1, ["1", "2"]), (2, ["1", "3"])])
def test_growth_is_due_once_all_missing_hosts_wait(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, num_missing: int, waiting: list[str]
) -> None:
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.01)
    with watch(store, num_missing) as hosts:
        assert becomes_due(hosts, store, waiting, 600.0)


@pytest.mark.parametrize(("num_missing", "waiting", "left"), [(2, ["1"], []), (2, ["1"], ["2"]), (1, [], ["1", "2"])])
def test_growth_is_not_due_for_hosts_that_are_gone(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, num_missing: int, waiting: list[str], left: list[str]
) -> None:
    """Notices in `left` are not written anew: the host that wrote them is dead."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.01)
    for name in left:
        store.write(f"{WAITING}/{name}", b"{}")
    with watch(store, num_missing) as hosts:
        assert not becomes_due(hosts, store, waiting, 0.3)


def test_a_host_that_no_longer_announces_itself_is_forgotten(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.01)
    with watch(store, 1) as hosts:
        assert becomes_due(hosts, store, ["1"], 600.0)
        monkeypatch.setattr(membership, "_WAITING_SECONDS", 0.1)
        time.sleep(0.2)
        hosts._is_requested = False
        assert not hosts.is_growth_due()


NOW = time.time()


# Times of earlier growths, and the save at which the job grows again.
@pytest.mark.parametrize(
    ("times", "save"),
    [
        ([], 1),
        ([NOW - 60], 2),
        ([NOW - 7000, NOW - 60], 4),
        ([NOW - _DAY_SECONDS - 60], 1),
        (["damaged", None, 3], 1),
    ],
)
def test_each_growth_within_a_day_doubles_the_saves_before_the_next(
    store: LocalStore, times: list[Any], save: int
) -> None:
    rows = [{"event": "grow", "time": moment} for moment in times] + [{"event": "grow"}, {"event": "save", "time": NOW}]
    store.write("events.jsonl", b"".join(attempt_module.encode_json(row).replace(b"\n", b"") + b"\n" for row in rows))
    with watch(store, 1) as hosts:
        hosts._notices.changed_seconds[1] = time.monotonic()
        # A second save before the processes have agreed on the stop is no second growth.
        assert [hosts.is_growth_due() for _ in range(save + 2)] == [False] * (save - 1) + [True, False, False]


def test_only_durable_saves_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    monkeypatch.setattr(attempt_module.Attempt, "stop_to_grow", lambda self, step: steps.append(step))
    tiers = {"checkpoint.local_directory": str(tmp_path / "local"), "checkpoint.local_every_steps": 2}
    make_counter(tmp_path / "run", **tiers | {"checkpoint.every_steps": 10, "config.total_steps": 25})()
    assert steps == [10, 20, 25]


@pytest.mark.parametrize("is_due", [False, True])
def test_a_stop_to_grow_is_recorded_and_requested(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, is_due: bool
) -> None:
    attempt, reasons = make_attempt(store), []
    monkeypatch.setattr(attempt.stop, "request_stop", reasons.append)
    attempt.stop_to_grow(7)
    with watch(store, 3) as hosts:
        monkeypatch.setattr(hosts, "is_growth_due", lambda: is_due)
        dataclasses.replace(attempt, waiting=hosts).stop_to_grow(8)
    attempt.events.flush()
    events = attempt_module.read_log(store, "events")
    assert [(event["event"], event["step"], event["processes"]) for event in events] == [("grow", 8, 3)] * is_due
    assert reasons == ["all missing hosts wait to join"] * is_due


def make_member(store: LocalStore, process: int) -> Membership:
    return Membership(make_spec(store.root, {"elastic": True}), process)


def wait_until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def list_waiting(store: LocalStore) -> list[str]:
    return sorted(store.list_names(WAITING))


def test_processes_that_wait_find_the_lower_ones(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.02)
    members = {process: make_member(store, process) for process in range(4)}
    for process, member in members.items():
        member.announce(f"10.0.0.{process}:80")
    # The address of process 0 is in the placement of all, and its notice says only that it waits.
    for process, member in members.items():
        expected = [f"10.0.0.{other}:80" for other in range(1, process)]
        assert wait_until(lambda member=member, expected=expected: member.list_addresses() == expected)
        assert wait_until(lambda member=member: member.run_id is not None)
    assert len({member.run_id for member in members.values()}) == 1
    members[1].close()
    # The others write their notices again meanwhile, each under a temporary name first.
    assert wait_until(lambda: list_waiting(store) == ["0", "2", "3"])
    monkeypatch.setattr(membership, "_FRESH_SECONDS", 0.2)
    assert wait_until(lambda: members[3].list_addresses() == ["10.0.0.2:80"])
    for member in members.values():
        member.close()
    assert list_waiting(store) == []


def test_files_that_are_being_written_are_no_notices(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they, or files that are gone since they were listed, keep the others from being read."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.02)
    (store.root / WAITING / "1.d").mkdir(parents=True)
    (store.root / WAITING / "2").mkdir()
    names = store.list_names(WAITING)
    monkeypatch.setattr(LocalStore, "list_names", lambda self, prefix: [*names, "3", ".4.5e.tmp", "4"])
    member, lower = make_member(store, 6), make_member(store, 4)
    lower.announce("10.0.0.4:80")
    member.announce("10.0.0.6:80")
    assert wait_until(lambda: member.list_addresses() == ["10.0.0.4:80"])
    assert member._notices is not None
    assert {*member._notices.contents} == {4}
    for each in (member, lower):
        each.close()


@pytest.mark.parametrize("error", [TimeoutError("no answer"), StorageError("503")])
def test_a_directory_that_does_not_answer_lets_no_group_begin(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(membership, "find_running_attempt", fail)
    with pytest.raises(StorageError, match="does not tell whether an attempt runs"):
        make_member(store, 1).find_running_attempt()
    monkeypatch.setattr(membership, "find_running_attempt", lambda store: time.sleep(5))
    monkeypatch.setattr(membership, "_OBSERVE_SECONDS", 0.1)
    monkeypatch.setattr(membership, "_STORE_SECONDS", 0.1)
    with pytest.raises(StorageError, match="does not tell whether an attempt runs"):
        make_member(store, 1).find_running_attempt()


# Notices that other programs, versions or damage may leave, of which none is an address.
@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b'{"address": 3}', b'{"address": null}', b"[" * 99999, b"\xff"])
def test_a_notice_without_an_address_is_left_out(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.02)
    store.write(f"{WAITING}/1", content)
    store.write(f"{WAITING}/x", content)
    member, lower = make_member(store, 3), make_member(store, 2)
    lower.announce("10.0.0.2:80")
    assert wait_until(lambda: "2" in store.list_names(WAITING))
    member.announce("10.0.0.3:80")
    assert wait_until(lambda: member.list_addresses() == ["10.0.0.2:80"])
    for each in (member, lower):
        each.close()


def test_the_next_process_on_a_host_removes_the_notice_of_one_that_did_not_join(store: LocalStore) -> None:
    first = make_member(store, 2)
    first.announce("10.0.0.2:80")
    assert wait_until(lambda: list_waiting(store) == ["2"])
    make_member(store, 2).close()
    first._closed.set()
    assert list_waiting(store) == []


def test_nothing_is_written_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "new", tmp_path / "file", tmp_path / "file" / "below"):
        member = Membership(make_spec(directory, GROWS), 1)
        member.announce("10.0.0.1:80")
        time.sleep(0.1)
        assert member.list_addresses() == []
        assert member.run_id is None
        assert member.find_running_attempt() is None
        member.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def begin_attempt(store: LocalStore) -> Clock:
    """Claim the next attempt as a process of another machine, and start its clock."""
    clock = Clock()
    with mock.patch("runner.attempts.clock_file.read_machine_id", return_value="another"):
        start_clock_file(clock, store, Fence(store).claim(), BackgroundWriter())
    return clock


def test_an_attempt_runs_while_its_clock_advances(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership, "_OBSERVE_POLL_SECONDS", 0.05)
    monkeypatch.setattr(membership, "_OBSERVE_SECONDS", 3.0)
    assert find_running_attempt(store) is None
    clock = begin_attempt(store)
    assert find_running_attempt(store) == 1
    clock.end(76)
    assert find_running_attempt(store) is None
    # The process or its machine is killed.
    killed = begin_attempt(store)
    assert find_running_attempt(store) == 2
    killed.attach_store(None)
    began = time.monotonic()
    assert find_running_attempt(store) is None
    assert time.monotonic() - began >= 3.0
    # A claim whose clock does not exist yet.
    assert Fence(store).claim() == 3
    assert find_running_attempt(store) is None


@pytest.mark.daily(1)
@pytest.mark.parametrize("ends", [True, False])
def test_an_attempt_that_has_run_while_a_process_waited_counts(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Its hosts are about to return."""
    monkeypatch.setattr(membership, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(membership, "_OBSERVE_SECONDS", 3.0)
    clock, member = begin_attempt(store), make_member(store, 1)
    member.announce("10.0.0.1:80")
    assert wait_until(lambda: member._running_attempt == 1)
    if ends:
        clock.end(75)
    else:
        clock.attach_store(None)  # killed
    assert member.find_running_attempt() == 1
    member.close()
    later = make_member(store, 1)
    later.announce("10.0.0.1:80")
    assert wait_until(lambda: later.run_id is not None)
    assert later.find_running_attempt() is None
    later.close()


def test_an_attempt_that_begins_while_another_is_observed_runs(store: LocalStore) -> None:
    Fence(store).claim()
    later = threading.Timer(0.3, lambda: Fence(store).claim())
    later.start()
    assert find_running_attempt(store) == 2
    later.join()


@pytest.mark.parametrize(("num_missing", "raised"), [(0, FencedError), (1, RetryableError)])
def test_a_group_of_an_elastic_job_that_another_has_fenced_waits(
    store: LocalStore, num_missing: int, raised: type[RunnerError]
) -> None:
    attempt = dataclasses.replace(make_attempt(store), hosts=Hosts.single_process(num_missing), is_elastic=True)
    with pytest.raises(raised) as caught, attempt.record_outcome():
        raise FencedError("attempt 2 has taken over")
    assert "attempt 2 has taken over" in str(caught.value)
    assert caught.value.exit_code == (76 if num_missing else 1)
    with pytest.raises(RemovedError), attempt.record_outcome():
        raise RemovedError("the directory is gone")


def test_a_job_that_is_not_elastic_cannot_grow() -> None:
    with pytest.raises(ValueError, match="grow: at_save is read by an elastic job only; set elastic: true too"):
        make_spec(Path("run"), {"grow": "at_save"})
