"""Fence and event ledger, on disk and in a bucket."""

import threading

import pytest

from runner.attempts.attempt import IncidentRecorder
from runner.attempts.events import EventLog
from runner.attempts.fence import Fence, is_unstarted
from runner.distributed.watchdog import Diagnosis
from runner.errors import FencedError
from runner.storage import BackgroundWriter, JsonlLog, LocalStore, read_log
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path) if request.param == "disk" else make_memory_bucket()


def test_attempts_count_from_one(store):
    fence = Fence(store)
    assert fence.find_newest() == 0
    assert [Fence(store).claim() for _ in range(3)] == [1, 2, 3]
    assert fence.find_newest() == 3
    assert fence.attempt is None


@pytest.mark.parametrize(
    ("lives", "is_free"),
    [
        ([["start", ("failed", 2)]], True),
        ([["start", "init", ("failed", 2)]], True),
        ([["start", ("failed", 2)], ["start", ("failed", 2)]], True),
        ([["start"]], False),  # running or killed
        ([["start", ("failed", 2)], ["start"]], False),
        ([["start", ("failed", 2)], []], False),  # no ledger yet
        ([["start", ("failed", 1)]], False),
        ([["start", "preempt"]], False),
        ([["start", "init", "save", ("failed", 2)]], False),
        ([["start", "init", "save", "commit"], ["start", ("failed", 2)]], False),
        ([], False),
    ],
)
def test_a_directory_is_free_if_nothing_was_saved_and_the_newest_attempt_ended_with_2(store, lives, is_free):
    background = BackgroundWriter()
    for events in lives:
        number = Fence(store).claim()
        log = EventLog(JsonlLog(store, "events", f"{number:06}.0", background), number, 0)
        for event in events:
            name, code = event if isinstance(event, tuple) else (event, None)
            log.append(name, 0, **({} if code is None else {"code": code}))
    background.drain(10.0)
    assert is_unstarted(store) == is_free
    store.write("checkpoints/10/manifest.json", b"{}")
    assert not is_unstarted(store)


def test_attempts_are_ordered_by_number_not_by_text(store):
    assert [Fence(store).claim() for _ in range(11)] == list(range(1, 12))


def test_a_newer_attempt_fences_the_older_one(store):
    older, newer = Fence(store), Fence(store)
    older.claim()
    older.check()
    older.check_locally()
    newer.claim()
    with pytest.raises(FencedError, match=r"attempt 2 has taken over .*; attempt 1 stops"):
        older.check()
    with pytest.raises(FencedError, match=r"attempt 2 has taken over .*; attempt 1 stops"):
        older.check_locally()
    newer.check()
    newer.check_locally()


@pytest.mark.parametrize("is_bucket", [False, True])
def test_every_process_of_the_newest_attempt_owns_the_directory(is_bucket, tmp_path):
    driver = MemoryDriver()

    def make_store():
        return make_memory_bucket(driver) if is_bucket else LocalStore(tmp_path)

    number = [Fence(make_store()).claim() for _ in range(3)][-1]
    peer = Fence(make_store())
    peer.join(number)
    peer.check_locally()
    peer.check()


def test_the_local_check_on_a_disk_sees_a_newer_attempt(tmp_path):
    older = Fence(LocalStore(tmp_path))
    older.claim()
    Fence(LocalStore(tmp_path)).claim()
    with pytest.raises(FencedError):
        older.check_locally()


def test_the_local_check_in_a_bucket_makes_no_request(tmp_path):
    driver = MemoryDriver()
    older = Fence(make_memory_bucket(driver))
    older.claim()
    Fence(make_memory_bucket(driver)).claim()
    asked = []
    driver.before = lambda verb, key: asked.append(verb)
    older.check_locally()
    assert not asked
    with pytest.raises(FencedError):
        older.check()
    assert asked


def test_concurrent_claims_get_different_numbers(store):
    claimed, barrier = [], threading.Barrier(8)

    def race():
        fence = Fence(store)
        barrier.wait()
        claimed.append(fence.claim())

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))
    assert sorted(map(int, store.list_names("attempts"))) == list(range(1, 9))


def test_names_that_are_no_numbers_are_ignored(store):
    Fence(store).claim()
    store.write("attempts/.2.abc.tmp", b"")
    assert Fence(store).find_newest() == 1


def test_events_of_all_attempts_and_processes_are_in_one_log(store):
    background = BackgroundWriter()
    for attempt, process, event, step, details in (
        (1, 0, "start", None, {"devices": 8}),
        (2, 1, "commit", 50, {"fingerprint": "ab"}),
    ):
        log = JsonlLog(store, "events", f"{attempt:06}.{process}", background)
        EventLog(log, attempt, process).append(event, step, **details)
    background.flush()
    first, second = read_log(store, "events")
    assert list(first) == ["time", "attempt", "process", "event", "step", "devices"]
    assert (first["attempt"], first["process"], first["event"], first["step"]) == (1, 0, "start", None)
    assert (second["attempt"], second["process"], second["event"], second["step"]) == (2, 1, "commit", 50)
    assert second["fingerprint"] == "ab"
    assert first["time"] <= second["time"]


def test_a_full_disk_loses_the_record_and_reports_it(tmp_path, capsys):
    log = JsonlLog(LocalStore(tmp_path / "run"), "events", "000001.0", BackgroundWriter())
    (tmp_path / "run").touch()
    EventLog(log, 1, 0).append("commit", 50, fingerprint="ab")
    said = capsys.readouterr().err
    assert "the ledger cannot be written" in said
    assert "commit at step 50 {'fingerprint': 'ab'}" in said


@pytest.mark.parametrize("has_newer", [True, False])
def test_a_process_that_loses_its_peers_says_if_the_attempt_is_fenced(has_newer, tmp_path, capsys):
    """A start of the same command would fence the attempt that has taken over."""
    store = LocalStore(tmp_path)
    incidents = IncidentRecorder()
    incidents.attempt = make_attempt(store)
    if has_newer:
        Fence(store).claim()
    ending = incidents.on_diagnosis(Diagnosis("the job cannot continue: process 0 has died", 76), is_recorder=True)
    message = f"attempt 2 has taken over {store.url}; attempt 1 stops"
    assert ending == ((message, 1) if has_newer else None)
    assert (tmp_path / "stacks").exists() != has_newer
    assert "Thread" not in capsys.readouterr().err
