"""Files that a reader keeps on this host's disk: made by one process of all that want them, the same for each."""

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

Keep = Callable[[Sequence[DerivedFile]], list[SourceFile]]


def keep_of_a_bucket(directory: Path) -> Keep:
    """Return the `keep` function of one process that reads a bucket."""
    copies = FileCopies(directory, "source", None)

    def keep(wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        copies.make_room(wanted)
        return [copies.get(derived) for derived in wanted]

    return keep


def keep_of_a_disk(directory: Path) -> Keep:
    """Return the `keep` function of one process that reads a disk."""
    return DiskReader(directory).keep


KEEPERS = [keep_of_a_bucket, keep_of_a_disk]


def num_waiting() -> int:
    """Return the number of file locks that this process waits for."""
    rows = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(row[1] == "->" and str(os.getpid()) in row for row in rows)


def derived(make: Callable[[], Iterator[bytes]]) -> DerivedFile:
    return DerivedFile(SourceFile(Path("origin"), 1, 1), "kept", SIZE_BYTES, make)


class Makers:
    """File made by several processes at once: the first stops in the middle until the others make it or wait."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error, self._lock = error, threading.Lock()
        self.num_made = 0

    def make(self) -> Iterator[bytes]:
        with self._lock:
            self.num_made += 1
            is_first = self.num_made == 1
        yield CONTENT[0]
        deadline = time.monotonic() + DEADLINE_SECONDS
        while is_first and self.num_made + num_waiting() < NUM_PROCESSES:
            assert time.monotonic() < deadline, "the others neither make the file nor wait for it"
            time.sleep(0.001)
        if is_first and self._error is not None:
            raise self._error
        yield CONTENT[1]

    def play(self, keeper: Callable[[Path], Keep], directory: Path) -> list[Any]:
        """Return the result of each process, or its error."""

        def act(keep: Keep) -> Any:
            try:
                return keep([derived(self.make)])[0]
            except StorageError as error:
                return error

        with ThreadPoolExecutor(NUM_PROCESSES) as pool:
            return list(pool.map(act, [keeper(directory) for _ in range(NUM_PROCESSES)]))


@pytest.mark.parametrize("keeper", KEEPERS)
def test_of_processes_that_want_a_file_one_makes_it_and_all_have_the_one_that_stays(
    keeper: Callable[[Path], Keep], tmp_path: Path
) -> None:
    makers = Makers()
    found = makers.play(keeper, tmp_path)
    assert found == [describe_file(found[0].path)] * NUM_PROCESSES
    assert found[0].path.read_bytes() == b"".join(CONTENT)
    assert makers.num_made == 1


@pytest.mark.parametrize("keeper", KEEPERS)
def test_where_one_fails_in_the_middle_another_makes_the_file(keeper: Callable[[Path], Keep], tmp_path: Path) -> None:
    makers = Makers(StorageError("the bucket does not answer"))
    found = makers.play(keeper, tmp_path)
    (failed,) = [each for each in found if isinstance(each, StorageError)]
    kept = [each for each in found if each is not failed]
    assert kept == [describe_file(kept[0].path)] * (NUM_PROCESSES - 1)
    assert makers.num_made == 2
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.mark.parametrize("keeper", KEEPERS)
def test_the_half_that_a_killed_process_has_left_is_made_anew(keeper: Callable[[Path], Keep], tmp_path: Path) -> None:
    (kept,) = keeper(tmp_path)([derived(lambda: iter(CONTENT))])
    shutil.move(kept.path, kept.path.with_name(".kept.tmp"))
    (again,) = keeper(tmp_path)([derived(lambda: iter(CONTENT))])
    assert again.path.read_bytes() == b"".join(CONTENT)
    assert not list(tmp_path.rglob("*.tmp"))
