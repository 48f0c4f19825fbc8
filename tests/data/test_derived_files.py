"""Derived files kept on a host's disk: one process makes each file, and all processes use it."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runner.data.readers import DerivedFile, DiskReader
from runner.data.remote import FileCopies
from runner.data.source_files import SourceFile, describe_file
from runner.errors import StorageError
from tests.support.coordinator import DEADLINE_SECONDS

NUM_PROCESSES = 4
CONTENT = [b"first half, ", b"second half"]
SIZE_BYTES = sum(map(len, CONTENT))

KeepFunction = Callable[[Sequence[DerivedFile]], list[SourceFile]]


def make_bucket_keep(directory: Path) -> KeepFunction:
    """Return the `keep` function of a process that reads from a bucket."""
    copies = FileCopies(directory, "source", None)

    def keep(wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        copies.make_room(wanted)
        return [copies.get(derived) for derived in wanted]

    return keep


def make_disk_keep(directory: Path) -> KeepFunction:
    """Return the `keep` function of a process that reads from disk."""
    return DiskReader(directory).keep


KEEP_FACTORIES = [make_bucket_keep, make_disk_keep]


def count_waiting_locks() -> int:
    """Return the number of file locks that this process waits for."""
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(row[1] == "->" and str(os.getpid()) in row for row in rows)


def make_derived_file(make: Callable[[], Iterator[bytes]]) -> DerivedFile:
    return DerivedFile(SourceFile(Path("origin"), 1, 1), "kept", SIZE_BYTES, make)


class ConcurrentMakers:
    """A file that several processes make at once; the first one pauses halfway until the others make it or wait."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self._lock = error, threading.Lock()
        self.num_made = 0

    def make(self) -> Iterator[bytes]:
        with self._lock:
            self.num_made += 1
            is_first = self.num_made == 1
        yield CONTENT[0]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while is_first and self.num_made + count_waiting_locks() < NUM_PROCESSES:
            assert time.monotonic() < deadline, "the other processes neither make the file nor wait for it"
            time.sleep(0.001)
        if is_first and self._error is not None:
            raise self._error
        yield CONTENT[1]

    def play(self, keeper: Callable[[Path], KeepFunction], directory: Path) -> list[Any]:
        """Run all processes and return the result or error of each."""

        def act(keep: KeepFunction) -> Any:
            try:
                return keep([make_derived_file(self.make)])[0]
            except StorageError as error:
                return error

        with ThreadPoolExecutor(NUM_PROCESSES) as pool:
            return list(pool.map(act, [keeper(directory) for _ in range(NUM_PROCESSES)]))


@pytest.mark.parametrize("keeper", KEEP_FACTORIES)
def test_one_process_makes_the_file_and_all_use_it(keeper: Callable[[Path], KeepFunction], tmp_path: Path) -> None:
    makers = ConcurrentMakers()
    found = makers.play(keeper, tmp_path)
    assert found == [describe_file(found[0].path)] * NUM_PROCESSES
    assert found[0].path.read_bytes() == b"".join(CONTENT)
    assert makers.num_made == 1


@pytest.mark.parametrize("keeper", KEEP_FACTORIES)
def test_another_process_makes_the_file_after_a_failure(keeper: Callable[[Path], KeepFunction], tmp_path: Path) -> None:
    makers = ConcurrentMakers(StorageError("the bucket does not answer"))
    found = makers.play(keeper, tmp_path)
    (failed,) = [each for each in found if isinstance(each, StorageError)]
    kept = [each for each in found if each is not failed]
    assert kept == [describe_file(kept[0].path)] * (NUM_PROCESSES - 1)
    assert makers.num_made == 2
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("keeper", KEEP_FACTORIES)
def test_a_partial_file_of_a_killed_process_is_made_again(
    keeper: Callable[[Path], KeepFunction], tmp_path: Path
) -> None:
    (kept,) = keeper(tmp_path)([make_derived_file(lambda: iter(CONTENT))])
    shutil.move(kept.path, kept.path.with_name(".kept.tmp"))
    (again,) = keeper(tmp_path)([make_derived_file(lambda: iter(CONTENT))])
    assert again.path.read_bytes() == b"".join(CONTENT)
    assert not list(tmp_path.rglob("*.tmp"))
