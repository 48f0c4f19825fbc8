"""Whole files of a bucket's source on this host's disk, for what cannot be read by ranges. Bounded.

1. Each source has a directory of its own below `copies/`. A process that reads a source holds its directory (`flock`,
   shared) until it ends, however it ends.
2. A file is published whole, under a name that tells the object's version, by one process of this host. A record beside
   it tells its CRC-32C, which is compared at the next start: a file that does not match is made again.
3. Before files are made, what they need must fit into the bound, with what other sources hold. Those that nobody holds
   are removed for it, the one first that was opened longest ago.
4. What an earlier version or a killed process has left in the source's own directory goes, if nobody else holds it.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import google_crc32c

from runner.data.cache import read_record, write_record
from runner.data.reader import Derived, needing_room, write_derived
from runner.data.remote.cache import FREE_SHARE
from runner.data.source import SourceFile, describe_file
from runner.errors import DataError, StorageError
from runner.storage import digest_of

DIRECTORY = "copies"
VERIFIED_BYTES_MAX = 1 << 27  # files up to this size are read at each start (0.1 s); of larger ones the size tells


class Copies:
    """The files of one source; see the module. Safe to use from several threads.

    Every method raises `DataError` where the disk does not take them.
    """

    def __init__(self, directory: Path, source: str, max_bytes: int | None) -> None:
        """`max_bytes` bounds the files of all sources together; None: a share of the free disk."""
        self._root = directory / DIRECTORY
        self._directory = self._root / hashlib.sha256(source.encode()).hexdigest()[:32]
        self._what, self._max_bytes = f"data.source={source}", max_bytes
        self._holding = threading.Lock()
        self._held: int | None = None  # a descriptor, which closes with the process

    def make_room(self, wanted: Sequence[Derived]) -> None:
        """Hold the source's directory, and remove what must go. Raises `DataError` if there is no room."""
        with needing_room(self._what, self._root), self._holding:
            if self._held is None:
                self._held = self._hold({derived.name for derived in wanted})
            os.utime(self._directory)
            others = {path: _size_of(path) for path in self._root.iterdir() if path != self._directory}
            need, bound = sum(derived.size_bytes for derived in wanted), self._bound()
            for path in sorted(others, key=_opened):
                if need + sum(others.values()) > bound >= need and _is_removed(path):
                    del others[path]
            if need + sum(others.values()) > bound:
                raise DataError(
                    f"{self._what}: is read from whole copies on this host's disk, which need {need:,} bytes beside "
                    f"{sum(others.values()):,} of other sources; data.cache_bytes (by default a quarter of the free "
                    f"disk) allows {bound:,}"
                )

    def get(self, derived: Derived) -> SourceFile:
        """One of the files that `make_room` was called for, made if it is not there or not whole."""
        path, checksum = self._directory / derived.name, google_crc32c.Checksum()

        def summed() -> Iterator[bytes]:
            for chunk in derived.make():
                checksum.update(chunk)
                yield chunk
            digest = checksum.hexdigest().decode()
            if derived.crc32c not in (None, digest):
                raise StorageError(f"{derived.origin}: came damaged; its CRC-32C is {derived.crc32c}")
            write_record(self._directory, derived.name, {"crc32c": digest})  # first: a file without one is made again

        write_derived(replace(derived, make=summed), path, partial(self._is_whole, path, derived.size_bytes))
        return describe_file(path)

    def _is_whole(self, path: Path, size_bytes: int) -> bool:
        record = read_record(self._directory, path.name)
        if record is None or not path.is_file() or path.stat().st_size != size_bytes:
            return False
        return size_bytes > VERIFIED_BYTES_MAX or digest_of(path.read_bytes()) == record["crc32c"]

    def _bound(self) -> int:
        if self._max_bytes is not None:
            return self._max_bytes
        disk = os.statvfs(self._root)
        return (disk.f_bavail * disk.f_frsize + _size_of(self._root)) // FREE_SHARE

    def _hold(self, names: set[str]) -> int:
        """Hold the directory, so that nobody removes it; if nobody else does, files of other names go."""
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                held = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # somebody has removed it before it was opened
                continue
            if _is_held_alone(held):
                for path in self._directory.iterdir():
                    if path.name.removesuffix(".json") not in names:
                        path.unlink()
            fcntl.flock(held, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(held), self._directory.stat()):
                    return held
            os.close(held)  # somebody has removed it before it was held


def _is_held_alone(descriptor: int) -> bool:
    """Hold a directory, unless another process does."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_removed(directory: Path) -> bool:
    """Remove the directory of a source, unless a process holds it; whether it is gone."""
    try:
        held = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if _is_held_alone(held):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(held)
    return not directory.exists()


def _opened(directory: Path) -> int:
    """When it was opened last; 0 if it is gone."""
    try:
        return directory.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _size_of(directory: Path) -> int:
    """Bytes of all files below a directory, of which some may go meanwhile."""
    size_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += os.lstat(os.path.join(parent, name)).st_size
    return size_bytes
