import contextlib
import subprocess
import sys
import threading
from collections.abc import Generator
from itertools import count, islice
from pathlib import Path

import numpy as np
import pytest

from runner.data import Prefetcher
from runner.errors import DataError
from tests.data.datasets import load, write_bin


def test_prefetched_batches_equal_direct_ones(tmp_path: Path) -> None:
    dataset = load(write_bin(tmp_path / "a.bin", range(1000)), cache=tmp_path)
    with contextlib.closing(Prefetcher(dataset.read("train", step * 4, 4) for step in count(17))) as batches:
        for step, batch in enumerate(islice(batches, 50), start=17):
            np.testing.assert_array_equal(batch["x"], dataset.read("train", step * 4, 4)["x"])


def test_prefetching_is_two_batches_ahead() -> None:
    made: list[int] = []
    two_ahead = threading.Semaphore(0)

    def make_batch(step: int) -> int:
        made.append(step)
        two_ahead.release()
        return step

    with contextlib.closing(Prefetcher(make_batch(step) for step in count())) as batches:
        for step in range(5):
            while len(made) < step + 2:
                assert two_ahead.acquire(timeout=600)
            assert made == list(range(step + 2))
            assert next(batches) == step


def test_an_error_is_raised_in_order_and_again() -> None:
    def make_batch(step: int) -> int:
        if step == 2:
            raise DataError("the third batch is bad")
        return step

    with contextlib.closing(Prefetcher(make_batch(step) for step in count())) as batches:
        assert [next(batches), next(batches)] == [0, 1]
        for _ in range(2):
            with pytest.raises(DataError, match="the third batch is bad"):
                next(batches)


def test_closing_stops_the_thread_and_the_iteration() -> None:
    def iterate() -> bool:
        return any(thread.name == "prefetch" for thread in threading.enumerate())

    with contextlib.closing(Prefetcher(step for step in count())) as batches:
        assert next(batches) == 0
        assert iterate()
    assert not iterate()
    assert list(batches) == []
    batches.close()


def test_a_finished_generator_ends_the_iteration_and_an_abandoned_one_is_closed() -> None:
    closed: list[int] = []

    def items(size: int) -> Generator[int]:
        try:
            yield from range(size)
        finally:
            closed.append(size)

    with contextlib.closing(Prefetcher(items(5), depth=3)) as made:
        assert list(made) == [0, 1, 2, 3, 4]
        assert list(made) == []
    with contextlib.closing(Prefetcher(items(1000))) as made:
        assert next(made) == 0
    assert closed == [5, 1000]


def test_closing_wakes_a_waiting_consumer() -> None:
    release = threading.Event()
    with contextlib.closing(Prefetcher(release.wait(600) for _ in count())) as batches:
        seen: list[list[bool]] = []
        consumer = threading.Thread(target=lambda: seen.append(list(batches)))
        consumer.start()
        closer = threading.Thread(target=batches.close)
        closer.start()
        consumer.join()
        release.set()
        closer.join()
    assert seen == [[]]


def test_a_hanging_read_does_not_keep_the_process_alive() -> None:
    program = (
        "import threading\n"
        "from runner.data import Prefetcher\n"
        "Prefetcher(threading.Event().wait() for _ in range(9))\n"
        "raise SystemExit(7)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=600, check=False).returncode == 7
