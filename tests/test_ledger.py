"""The ledger and the fence."""

import os
import threading

import pytest

from runner.errors import FencedError
from runner.ledger import Fence, Ledger


def test_attempts_count_from_one(tmp_path):
    fence = Fence(tmp_path)
    assert fence.newest() == 0
    assert [Fence(tmp_path).claim() for _ in range(3)] == [1, 2, 3]
    assert fence.newest() == 3
    assert fence.attempt is None


def test_a_newer_attempt_fences_the_older_one(tmp_path):
    older, newer = Fence(tmp_path), Fence(tmp_path)
    older.claim()
    older.check()
    newer.claim()
    with pytest.raises(FencedError, match=r"attempt 2 has taken over .*; attempt 1 stops"):
        older.check()
    newer.check()


def test_racing_attempts_all_get_numbers_of_their_own(tmp_path):
    claimed, barrier = [], threading.Barrier(8)

    def race():
        fence = Fence(tmp_path)
        barrier.wait()
        claimed.append(fence.claim())

    threads = [threading.Thread(target=race) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == list(range(1, 9))
    assert sorted(map(int, os.listdir(tmp_path / "attempts"))) == list(range(1, 9))


def test_what_is_no_number_is_no_attempt(tmp_path):
    Fence(tmp_path).claim()
    (tmp_path / "attempts" / ".2.abc.tmp").touch()
    assert Fence(tmp_path).newest() == 1


def test_events_of_all_attempts_and_processes_stand_in_one_file(tmp_path):
    Ledger(tmp_path, attempt=1, process=0).append("start", None, devices=8)
    Ledger(tmp_path, attempt=2, process=1).append("commit", 50, fingerprint="ab")
    ledger = Ledger(tmp_path, attempt=3, process=0)
    first, second = ledger.events()
    assert list(first) == ["time", "attempt", "process", "event", "step", "devices"]
    assert (first["attempt"], first["process"], first["event"], first["step"]) == (1, 0, "start", None)
    assert (second["attempt"], second["process"], second["event"], second["step"]) == (2, 1, "commit", 50)
    assert second["fingerprint"] == "ab"
    assert first["time"] <= second["time"]
