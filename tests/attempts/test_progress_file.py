"""`progress.json`: after every history it says what has happened, and no fenced attempt writes it."""

import random
import socket

import pytest

from launch.supervisor import JobProgress, _read_store_progress
from runner.attempts.events import EventLog
from runner.attempts.fence import Fence
from runner.attempts.layout import PROGRESS, DamagedRecordError
from runner.attempts.progress_file import PROGRESS_KEYS, ProgressFile, read_progress_file
from runner.errors import NewerFormatError
from runner.storage import BackgroundWriter, JsonlLog, LocalStore, encode_json, read_json
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket
from tests.support.tiny_jobs import make_counter

SPEC = "digest"
OWN, OTHER = socket.gethostname(), "another.example.com"
STORES = {"disk": LocalStore, "bucket": lambda _: make_memory_bucket()}


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


class Attempt:
    """Process 0 of an attempt, as far as it writes the ledger and the file."""

    def __init__(self, store, hosts=(OWN,), is_elastic=False):
        self._background, fence = BackgroundWriter(), Fence(store)
        number = fence.claim()
        log = JsonlLog(store, "events", f"{number:06}.0", self._background)
        self._file = ProgressFile(store, fence, is_elastic, self._background)
        self._events, self._hosts = EventLog(log, number, 0, [self._file.on_event]), list(hosts)

    def write(self, event, step=None, **details):
        if event == "start":
            details |= {"hosts": self._hosts, "total_steps": 100}
        if event == "done":
            details |= {"spec": SPEC}
        self._events.append(event, step, **details)
        self._background.flush()
        return self


@pytest.mark.parametrize("seed", range(12))
def test_a_supervisor_learns_what_has_happened(store, seed):
    draw, is_elastic = random.Random(seed), seed % 2 == 1
    attempt, number, is_started, is_done = Attempt(store, [OWN], is_elastic).write("start"), 1, True, False
    step, hosts, seen = None, [OWN], frozenset()
    for _ in range(40):
        event = draw.choice(["attempt", "claim", "commit", "commit", "fast", "back", "done", "evaluate"])
        if event == "claim":  # of an attempt that ends before its start
            Fence(store).claim()
            number, is_started = number + 1, False
        elif event == "attempt" or not is_started:
            event = "attempt"
            hosts = draw.choice([[OWN], [OWN, OTHER]] + [[OTHER]] * is_elastic)
            attempt, number, is_started, is_done = Attempt(store, hosts, is_elastic).write("start"), number + 1, True, 0
            attempt.write("init", 0) if step is None else attempt.write("restore", step)
        elif event in ("commit", "fast"):
            step = (step or 0) + draw.randrange(1, 5)
            attempt.write("commit", step, **({"tier": "fast"} if event == "fast" else {}))
        elif event == "back" and step is not None:
            step = max(step - 2, 1)
            attempt.write("load", step)
        elif event in ("done", "evaluate"):
            is_done |= event == "done"
            attempt.write(event, step)
        found = _read_store_progress(store, SPEC)
        assert (found.newest_step, found.newest_attempt) == (step, number)
        assert found.is_done == (is_started and is_done)
        assert found.takes_part == (not is_started or OWN in hosts)
        assert not _read_store_progress(store, "other").is_done
        assert bool(found.commits - seen) == (event in ("commit", "fast"))
        seen |= found.commits
    assert len(seen) > 5


def test_a_supervisor_of_a_bucket_makes_two_requests():
    driver = MemoryDriver()
    store, verbs = make_memory_bucket(driver), []
    for _ in range(20):
        Attempt(store).write("start").write("commit", 7)
    driver.before = lambda verb, key: verbs.append(verb)
    assert _read_store_progress(store, SPEC).newest_step == 7
    assert sorted(verbs) == ["get", "list"]


def test_a_fenced_attempt_does_not_replace_the_file_of_a_newer_one(store):
    old = Attempt(store).write("start").write("commit", 3)
    claimed = Attempt(store)
    old.write("commit", 4)  # its manifest was written before the claim
    assert read_progress_file(store)["step"] == 4
    claimed.write("start")
    before = store.read(PROGRESS)
    for event in ("commit", "load", "done"):
        old.write(event, 9)
        assert store.read(PROGRESS) == before
    claimed.write("restore", 4).write("commit", 5)
    assert {**read_progress_file(store), "committed": 0} == {
        "format": 1,
        "attempt": 2,
        "hosts": None,
        "step": 5,
        "total_steps": 100,
        "committed": 0,
        "done": None,
    }


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\x00", b'{"format": 1}', b"[" * 99_999])
def test_a_damaged_file_is_not_read_and_written_again(store, content):
    def damage():
        store.remove(PROGRESS) if content is None else store.write(PROGRESS, content)

    attempt = Attempt(store).write("start").write("commit", 3)
    damage()
    assert _read_store_progress(store, SPEC) == JobProgress(None, 1)
    attempt.write("commit", 4)
    assert read_progress_file(store)["step"] == 4
    damage()
    Attempt(store).write("start").write("restore", 4)
    assert read_progress_file(store)["step"] == 4


@pytest.mark.parametrize("key", [key.name for key in PROGRESS_KEYS])
@pytest.mark.parametrize("value", ["missing", [[]], {"a": 1}, True, "x", float("nan")])
def test_a_file_with_a_wrong_value_counts_as_damaged(tmp_path, key, value):
    store = LocalStore(tmp_path)
    Attempt(store, is_elastic=True).write("start").write("commit", 3)
    values = read_json(store, PROGRESS)
    if value == "missing":
        del values[key]
    else:
        values[key] = value
    store.write(PROGRESS, encode_json(values))
    if (key, value) in (("done", "x"), ("hosts", [[]])):  # of the right type
        assert _read_store_progress(store, SPEC).newest_attempt == 1
    elif key == "format" and value not in ("missing", True):
        with pytest.raises(NewerFormatError):
            _read_store_progress(store, SPEC)
    else:
        with pytest.raises(DamagedRecordError):
            read_progress_file(store)
        assert _read_store_progress(store, SPEC) == JobProgress(None, 1)


def test_the_file_of_a_newer_runner_stays(store):
    Attempt(store).write("start").write("commit", 3)
    content = encode_json({"format": 2, "progress": 0.5})
    store.write(PROGRESS, content)
    Attempt(store).write("start").write("commit", 5).write("done", 5)
    assert store.read(PROGRESS) == content


def test_a_disk_that_is_full_costs_a_warning(tmp_path, monkeypatch, capsys):
    attempt = Attempt(LocalStore(tmp_path)).write("start")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStore, "write_if", fail)
    attempt.write("commit", 3)
    assert "progress.json cannot be written ([Errno 28] No space left on device)" in capsys.readouterr().err


def test_a_run_that_goes_on_and_is_extended_has_the_file(tmp_path):
    store = LocalStore(tmp_path / "run")
    for attempt, total in ((1, 4), (2, 6)):
        job = make_counter(tmp_path / "run", **{"config.total_steps": total, "checkpoint.every_steps": 2})
        job()
        found = read_progress_file(store)
        assert (found["attempt"], found["step"], found["total_steps"]) == (attempt, total, total)
        assert found["done"] == job.document.compute_digest()
        assert _read_store_progress(store, found["done"]).is_done
