"""Clock file of an attempt: the newest complete reading survives any damage."""

import os
import threading
import time

import pytest

from runner.attempts import clock_file
from runner.attempts.clock_file import (
    HEADER_BYTES,
    NUM_SLOTS,
    decode_clock_file,
    encode_header,
    encode_slot,
    get_clock_file_name,
    start_clock_file,
)
from runner.distributed.clock import COUNTED_CATEGORIES, Clock, ClockReading, TimeCategory
from runner.storage import BackgroundWriter, LocalStore
from tests.support.memory_bucket import make_memory_bucket

SLOT_BYTES = len(encode_slot(0, ClockReading(0.0, 0, 0.0, TimeCategory.STEPS, (0.0,) * len(COUNTED_CATEGORIES), None)))


def make_reading(step: int, code: int | None = None) -> ClockReading:
    return ClockReading(
        1000.0 + step, step, 999.5, TimeCategory.EVALUATION, tuple(step + 0.5 for _ in COUNTED_CATEGORIES), code
    )


def make_content(*readings: ClockReading) -> bytes:
    """Return a file with these slots one after another."""
    content = bytearray(encode_header(Clock()).ljust(HEADER_BYTES + NUM_SLOTS * SLOT_BYTES, b"\0"))
    for number, each in enumerate(readings):
        start = HEADER_BYTES + number % NUM_SLOTS * SLOT_BYTES
        content[start : start + SLOT_BYTES] = encode_slot(number, each)
    return bytes(content)


@pytest.mark.parametrize("count", range(1, 10))
def test_the_newest_reading_is_found(count):
    readings = [make_reading(step, code=0 if step == 8 else None) for step in range(count)]
    assert decode_clock_file(make_content(*readings)).reading == readings[-1]


def test_an_exit_code_wins_over_a_later_heartbeat():
    assert (
        decode_clock_file(make_content(make_reading(5), make_reading(6, code=75), make_reading(6))).reading.code == 75
    )


@pytest.mark.parametrize("between", range(4))
def test_a_delayed_heartbeat_does_not_hide_newer_steps(between):
    steps = [make_reading(step) for step in range(3, 4 + between)]
    assert decode_clock_file(make_content(*steps, make_reading(2))).reading == steps[-1]


def test_a_damaged_file_returns_a_stored_reading_or_none():
    readings = [make_reading(step) for step in range(6)]
    whole = make_content(*readings)
    found = set()
    for place in range(HEADER_BYTES, len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 0x41
        found.add(decode_clock_file(bytes(flipped)).reading)
    assert found <= set(readings)
    for size in range(len(whole)):
        try:
            assert decode_clock_file(whole[:size]).reading in readings
        except ValueError:
            assert size < HEADER_BYTES + SLOT_BYTES


@pytest.mark.parametrize(
    "head",
    [b"", b"[]", b"{}", b"\xff\xfe", b'{"format": 2}', b"{" * 1000],
    ids=["nothing", "list", "no keys", "no text", "newer", "deep"],
)
def test_a_damaged_header_is_rejected(head):
    with pytest.raises(ValueError, match=r"."):
        decode_clock_file(head.ljust(HEADER_BYTES) + make_content(make_reading(1))[HEADER_BYTES:])


def test_categories_of_another_version_are_matched_by_name(monkeypatch):
    fewer = COUNTED_CATEGORIES[1:]
    content = make_content(make_reading(3))
    monkeypatch.setattr(clock_file, "COUNTED_CATEGORIES", fewer)
    found = decode_clock_file(content).reading
    assert found.seconds == (3.5,) * len(fewer)
    assert found.category is TimeCategory.EVALUATION


def test_each_step_is_stored_at_once_on_disk(tmp_path, monkeypatch):
    (tmp_path / "attempts").mkdir()
    monkeypatch.setattr(clock_file, "_send_heartbeats", lambda clock: None)
    store, clock = LocalStore(tmp_path), Clock()
    start_clock_file(clock, store, 4, BackgroundWriter())
    for step in range(1, 20):
        clock.record_step(step)
        kept = decode_clock_file(store.read(get_clock_file_name(4)))
        assert kept.reading.step == step
    assert kept.is_process_alive
    assert (kept.began, kept.pid) == (clock.began, os.getpid())
    size = len(store.read(get_clock_file_name(4)))
    clock.end(76)
    assert decode_clock_file(store.read(get_clock_file_name(4))).reading.code == 76
    assert size == HEADER_BYTES + NUM_SLOTS * SLOT_BYTES


@pytest.mark.parametrize("steps", range(1, 2 * NUM_SLOTS))
def test_a_heartbeat_delayed_by_the_disk_does_not_overwrite_newer_steps(steps, tmp_path, monkeypatch):
    (tmp_path / "attempts").mkdir()
    write, held = os.pwrite, []

    def hold(*arguments):
        if threading.current_thread() is threading.main_thread():
            return write(*arguments)
        held.append(arguments)
        return len(arguments[1])

    monkeypatch.setattr(clock_file.os, "pwrite", hold)
    store, clock = LocalStore(tmp_path), Clock()
    start_clock_file(clock, store, 1, BackgroundWriter())
    while not held:
        time.sleep(0.001)
    for step in range(1, steps + 1):
        clock.record_step(step)
    write(*held[0])
    assert decode_clock_file(store.read(get_clock_file_name(1))).reading.step == steps
    clock.end(75)
    write(*held[0])
    assert decode_clock_file(store.read(get_clock_file_name(1))).reading.code == 75


@pytest.mark.parametrize("stands", ["nothing", "directory", "pipe", "link", "link to a file"])
def test_another_entry_at_its_path_only_loses_the_record(stands, tmp_path, capsys):
    other = tmp_path / "other"
    other.write_bytes(b"mine")
    path = tmp_path / get_clock_file_name(1)
    if stands != "nothing":
        path.parent.mkdir()
    act = {"directory": path.mkdir, "pipe": lambda: os.mkfifo(path), "link": lambda: path.symlink_to("nowhere")}
    act |= {"link to a file": lambda: path.symlink_to(other), "nothing": lambda: None}
    act[stands]()
    clock = Clock()
    start_clock_file(clock, LocalStore(tmp_path), 1, BackgroundWriter())
    clock.record_step(1)
    clock.end(0)
    assert other.read_bytes() == b"mine"
    is_kept = stands not in ("nothing", "directory")
    assert ("cannot be written" in capsys.readouterr().err) is not is_kept
    assert not is_kept or decode_clock_file(path.read_bytes()).reading.step == 1


def test_the_file_is_uploaded_periodically_and_at_the_end(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    store, background, clock = make_memory_bucket(), BackgroundWriter(), Clock()
    monkeypatch.setattr(background, "mark", lambda name, send: send())
    written: list[int] = []
    write = store.write

    def count(name, content):
        written.append(decode_clock_file(content).reading.step)
        write(name, content)

    monkeypatch.setattr(store, "write", count)
    start_clock_file(clock, store, 2, background)
    for step in range(1, 101):  # ten steps per second, one heartbeat each
        now[0] += 0.1
        clock.record_step(step)
        if step % 10 == 0:
            clock.send_heartbeat()
    assert 4 <= len(written) <= 6
    before = len(written)
    for _ in range(60):  # a minute without steps
        now[0] += 1.0
        clock.send_heartbeat()
    assert 5 <= len(written) - before <= 8
    clock.end(75)
    assert decode_clock_file(store.read(get_clock_file_name(2))).reading.code == 75
