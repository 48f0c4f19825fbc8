"""Growth of an elastic job: the notices of hosts that wait to join, and the save at which it stops for them."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from runner.run import attempt as attempt_module
from runner.run.attempt import DAY_SECONDS, WAITING, WaitingHosts, announce_waiting
from runner.run.layout import Owner, write_owner
from runner.spec import ExecutionSpec
from runner.storage import LocalStore
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
    monkeypatch.setattr(attempt_module, "_LOOK_SECONDS", 0.01)
    with watch(store, num_missing) as hosts:
        assert becomes_due(hosts, store, waiting, 600.0)


@pytest.mark.parametrize(("num_missing", "waiting", "left"), [(2, ["1"], []), (2, ["1"], ["2"]), (1, [], ["1", "2"])])
def test_growth_is_not_due_for_hosts_that_are_gone(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, num_missing: int, waiting: list[str], left: list[str]
) -> None:
    """Notices in `left` are not written anew: the host that wrote them is dead."""
    monkeypatch.setattr(attempt_module, "_LOOK_SECONDS", 0.01)
    for name in left:
        store.write(f"{WAITING}/{name}", b"{}")
    with watch(store, num_missing) as hosts:
        assert not becomes_due(hosts, store, waiting, 0.3)


def test_a_host_that_no_longer_announces_itself_is_forgotten(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt_module, "_LOOK_SECONDS", 0.01)
    with watch(store, 1) as hosts:
        assert becomes_due(hosts, store, ["1"], 600.0)
        monkeypatch.setattr(attempt_module, "WAITING_SECONDS", 0.1)
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
        ([NOW - DAY_SECONDS - 60], 1),
        (["damaged", None, 3], 1),
    ],
)
def test_each_growth_within_a_day_doubles_the_saves_before_the_next(
    store: LocalStore, times: list[Any], save: int
) -> None:
    rows = [{"event": "grow", "time": moment} for moment in times] + [{"event": "grow"}, {"event": "save", "time": NOW}]
    store.write("events.jsonl", b"".join(attempt_module.encode_json(row).replace(b"\n", b"") + b"\n" for row in rows))
    with watch(store, 1) as hosts:
        hosts._seen_seconds["1"] = time.monotonic()
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


@pytest.mark.parametrize("topology", [None, {}, {"elastic": True}, GROWS], ids=str)
def test_a_process_announces_itself_in_a_run_that_may_grow(store: LocalStore, topology: dict[str, Any] | None) -> None:
    with announce_waiting(make_spec(store.root, topology), 2) as announce:
        contents = []
        for _ in range(2):
            announce()
            contents += [store.read(f"{WAITING}/{name}") for name in store.list_names(WAITING)]
        assert len(set(contents)) == (2 if topology == GROWS else 0)
        assert store.list_names(WAITING) == (["2"] if topology == GROWS else [])
    assert store.list_names(WAITING) == []


def test_the_next_process_on_a_host_removes_the_notice_of_one_that_did_not_join(store: LocalStore) -> None:
    spec = make_spec(store.root, GROWS)
    with contextlib.suppress(RuntimeError), announce_waiting(spec, 2) as announce:
        announce()
        raise RuntimeError("it could not join")
    assert store.list_names(WAITING) == ["2"]
    with announce_waiting(spec, 2):
        pass
    assert store.list_names(WAITING) == []


def test_nothing_is_written_where_there_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for directory in (tmp_path / "new", tmp_path / "file", tmp_path / "file" / "below"):
        with announce_waiting(make_spec(directory, GROWS), 1) as announce:
            announce()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_job_that_is_not_elastic_cannot_grow() -> None:
    with pytest.raises(ValueError, match="grow: at_save is read by an elastic job only; set elastic: true too"):
        make_spec(Path("run"), {"grow": "at_save"})
