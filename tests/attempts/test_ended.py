"""Files of ended attempts in blocks: the history stays the same, after a kill at any call, and for a late reader."""

import io
import zipfile

import pytest

from runner.attempts import ended, fence
from runner.attempts.clock_file import encode_header, encode_slot, get_clock_file_name
from runner.attempts.ended import fold_attempts
from runner.attempts.events import EventLog
from runner.attempts.fence import Fence
from runner.distributed.clock import COUNTED_CATEGORIES, Clock, ClockReading, TimeCategory
from runner.errors import FencedError
from runner.history.reader import read_history
from runner.storage import BackgroundWriter, JsonlLog, JsonlTail, LocalStore, encode_json, read_log
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

NUM_ATTEMPTS = 14
NOW = 2_000_000_000.0


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch):
    monkeypatch.setattr(ended, "BLOCK", 4)
    monkeypatch.setattr(ended, "NUM_RECENT", 2)
    monkeypatch.setattr(fence, "NUM_RECENT", 2)


@pytest.fixture(params=["disk", "bucket"])
def store(request, tmp_path):
    return LocalStore(tmp_path) if request.param == "disk" else make_memory_bucket()


def fill(store):
    """Write claims, clocks and events of attempts that were killed one after another."""
    background = BackgroundWriter()
    for number in range(1, NUM_ATTEMPTS + 1):
        moment = 1_900_000_000.0 + 100 * number
        store.write(f"attempts/{number}", encode_json({"time": moment, "host": "h", "pid": 1, "id": str(number)}))
        seconds = tuple(float(index) for index in range(len(COUNTED_CATEGORIES)))
        reading = ClockReading(moment + 50, number, moment + 40, TimeCategory.STEPS, seconds, None)
        clock = Clock()
        clock.began = moment
        store.write(get_clock_file_name(number), encode_header(clock) + encode_slot(0, reading))
        for process in range(2):
            log = JsonlLog(store, "events", f"{number:06}.{process}", background)
            EventLog(log, number, process).append("start" if process == 0 else "compile", 0, total_steps=20)
    background.drain(10.0)


def read_state(store):
    """Return all that a reader learns of a run."""
    history = read_history(store, NOW)
    return history.attempts, history.seconds, history.unread, read_log(store, "events")


def test_the_history_is_the_same_and_has_few_files(store):
    fill(store)
    before = read_state(store)
    fold_attempts(store, NUM_ATTEMPTS)
    assert read_state(store) == before  # both kinds of files are there
    assert len(store.list_names("attempts")) == 2 * NUM_ATTEMPTS + 3
    fold_attempts(store, NUM_ATTEMPTS)
    assert read_state(store) == before
    assert sorted(store.list_names("attempts")) == sorted(
        ["1-4.zip", "5-8.zip", "9-12.zip", "13", "13.clock", "14", "14.clock"]
    )
    if store.root is None:
        assert len(store.list_names("events")) == 3 + 2 * 2
    fold_attempts(store, NUM_ATTEMPTS)
    assert read_state(store) == before
    assert Fence(store).claim() == NUM_ATTEMPTS + 1


def test_a_kill_at_any_call_loses_nothing():
    calls = 0
    while True:
        driver = MemoryDriver()
        store = make_memory_bucket(driver)
        fill(store)
        before = read_state(store)
        left = calls

        def fail(verb, key):
            nonlocal left
            left -= 1
            if left < 0:
                raise PermissionError(f"{verb} {key}")

        driver.before = fail
        try:
            fold_attempts(store, NUM_ATTEMPTS)
            fold_attempts(store, NUM_ATTEMPTS)
            is_complete = True
        except PermissionError:
            is_complete = False
        driver.before = lambda verb, key: None
        assert read_state(store) == before
        for _ in range(2):
            fold_attempts(store, NUM_ATTEMPTS)
        assert read_state(store) == before
        assert len(store.list_names("attempts")) == 3 + 4
        if is_complete:
            break
        calls += 3
    assert calls > 60


def test_a_reader_that_has_listed_the_files_can_still_read_them(store):
    fill(store)
    names = store.list_names("attempts")
    fold_attempts(store, NUM_ATTEMPTS)
    for name in names:
        assert store.read(f"attempts/{name}")


def test_a_tail_gets_all_rows_again_and_then_new_ones():
    store = make_memory_bucket()
    fill(store)
    tail = JsonlTail(store, "events")
    rows = list(tail.read().items)
    fold_attempts(store, NUM_ATTEMPTS)
    is_restart, items = tail.read()
    assert (is_restart, sorted(map(str, items))) == (True, sorted(map(str, rows)))
    fold_attempts(store, NUM_ATTEMPTS)
    assert [list(tail.read().items) for _ in range(2)] == [[], []]
    background = BackgroundWriter()
    JsonlLog(store, "events", "000015.0", background).append({"event": "new"})
    background.drain(10.0)
    assert list(tail.read().items) == [{"event": "new"}]


def test_a_file_that_has_changed_since_is_kept_and_preferred(store):
    fill(store)
    fold_attempts(store, NUM_ATTEMPTS)
    store.write(get_clock_file_name(2), store.read(get_clock_file_name(3)))
    store.write("events/000002.0.0000.jsonl", b'{"event": "late"}\n')
    changed = read_state(store)
    fold_attempts(store, NUM_ATTEMPTS)
    assert {"2.clock", "1-4.zip"} <= set(store.list_names("attempts"))
    assert store.exists("events/000002.0.0000.jsonl")
    assert read_state(store) == changed


def test_an_attempt_that_was_suspended_before_its_claim_is_fenced(store):
    fill(store)
    for _ in range(2):
        fold_attempts(store, NUM_ATTEMPTS)
    late = Fence(store)
    find_newest = late.find_newest
    newest = iter([2])  # what it has listed long ago
    late.find_newest = lambda: next(newest, None) or find_newest()
    with pytest.raises(FencedError, match=r"attempt 14 has taken over"):
        late.claim()
    assert not store.exists("attempts/3")
    assert Fence(store).find_newest() == NUM_ATTEMPTS


def make_archive(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name, content)
    return buffer.getvalue()


DAMAGES = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "no archive": lambda content: b"x" * len(content),
    "flipped byte": lambda content: content[:40] + bytes([content[40] ^ 255]) + content[41:],
    "very large member": lambda content: make_archive(**{"1": b" " * (1 << 24)}),
    "many members": lambda content: make_archive(**{str(number): b"{}" for number in range(1, 5000)}),
    "nested": lambda content: make_archive(**{"1": b"[" * 60_000}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_block_is_reported_and_the_events_remain(store, damage):
    fill(store)
    before = read_history(store, NOW)
    for _ in range(2):
        fold_attempts(store, NUM_ATTEMPTS)
    store.write("attempts/1-4.zip", DAMAGES[damage](store.read("attempts/1-4.zip")))
    history = read_history(store, NOW)
    assert [each.number for each in history.attempts] == [each.number for each in before.attempts]
    assert history.attempts[5:] == before.attempts[5:]
    assert history.unread
    assert all("attempts/1" in line for line in history.unread)
    assert Fence(store).claim() == NUM_ATTEMPTS + 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_deleted_that_a_damaged_block_lacks(store, damage):
    fill(store)
    fold_attempts(store, NUM_ATTEMPTS)
    store.write("attempts/1-4.zip", DAMAGES[damage](store.read("attempts/1-4.zip")))
    fold_attempts(store, NUM_ATTEMPTS)
    kept = {"1", "2", "3", "4", "1.clock", "2.clock", "3.clock", "4.clock"}
    assert len(kept & set(store.list_names("attempts"))) >= 7
