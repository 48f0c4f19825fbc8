"""Readers of byte ranges, and the cache of derived files on this host's disk.

Every format reads its files through a `Reader`, wherever they are stored: `DiskReader` for a disk,
`runner.data.remote.BucketReader` for a bucket. Files are read with `pread` and never memory-mapped, because a mapped
file that is truncated under a running job would end the process with SIGBUS.

Derived files are small records and the arrays they point to. The protocol of the cache:

1. The key of a record is made of the paths, sizes, modification and change times of the files it is derived from (in
   a bucket: of URLs and versions), and of FORMAT. No tool can set a change time back, so an edit that keeps size and
   modification time has another key. So has a file after a chmod or a new hard link, whose record is then made again.
2. A file is written under a temporary name in the same directory, fsynced, then renamed. A reader sees it whole or not
   at all, even if a process is killed. Processes that race to write a small file write the same content, and the last
   rename wins. A file that is identified by its modification time, or is expensive to make, is made by one process
   while the others wait (`publish_once`).
3. An array is named by the digest of its content and written before the record that points to it.
4. A record carries its own digest and the size of its array. A mismatch counts as a miss, and the file is made again.

A cache that cannot be written never stops a run: a warning is printed, and the work is repeated at the next start.
"""

import contextlib
import fcntl
import functools
import hashlib
import io
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from runner.data.source_files import BucketFile, File, SourceFile, describe_file
from runner.errors import DataError, StorageError
from runner.storage import JsonObject
from runner.storage.local import try_lock

FORMAT = 2  # to be raised when the meaning of a record or of a tokenizer changes
OPEN_FILES_MAX = 128  # a process may hold only so many files open, and a corpus may have thousands

logger = logging.getLogger(__name__)


def cache_key(kind: str, files: Sequence[SourceFile | BucketFile]) -> str:
    """Return the name of the record that `kind` derives from `files`."""
    identity = [[*file.identity, file.ctime_ns] if isinstance(file, SourceFile) else file.identity for file in files]
    return f"{kind}-{_sha256(json.dumps([FORMAT, kind, identity]).encode())[:32]}"


def read_record(directory: Path, key: str) -> JsonObject | None:
    """Return the record, or None if it is missing or damaged."""
    try:
        record = json.loads((directory / f"{key}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != _sha256(_canonical_json(record.get("content"))):
        return None
    return record["content"]


def write_record(directory: Path, key: str, content: JsonObject) -> None:
    """Publish a record. Raises OSError."""
    # The digest lets a reader recognise a record that was torn or edited.
    record = {"sha256": _sha256(_canonical_json(content)), "content": content}
    publish(directory / f"{key}.json", [json.dumps(record, indent=1).encode()])


def load_record(directory: Path, key: str, make: Callable[[], JsonObject]) -> JsonObject:
    """Return the record, from the cache or made now."""
    record = read_record(directory, key)
    if record is None:
        record = make()
        with warn_unwritable(directory):
            write_record(directory, key, record)
    return record


def adopt_records(directory: Path, records: Mapping[str, JsonObject]) -> None:
    """Put records that another host has made into the cache, unless they are there."""
    for key, record in records.items():
        load_record(directory, key, record.copy)


def _canonical_json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def publish(path: Path, chunks: Iterable[bytes | memoryview], is_published: Callable[[], bool] = lambda: False) -> None:
    """Write `path` atomically, unless it `is_published` by then. Leaves no file if `chunks` or the disk fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is unique, because several processes may publish the same file at a time.
    temporary = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            _write_durably(file, chunks)
        if not is_published():
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def publish_once(path: Path, make: Callable[[], Iterable[bytes]], is_whole: Callable[[], bool]) -> None:
    """Write `path` as `publish` does unless `is_whole`, in only one of the processes that call this at the same time.

    Blocks while another process makes the file, and takes over from a process that is killed. A file that was found
    whole is therefore never replaced by one of the same content, which would have another modification time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The name is the same in all processes, because it also serves as their lock file.
    temporary = path.parent / f".{path.name}.tmp"
    while not is_whole():
        with open(temporary, "ab") as file:
            # The kernel releases the lock when its holder dies, so that a killed process blocks no other.
            if not try_lock(file.fileno(), fcntl.LOCK_EX):
                break
            if not _is_open_file_at(file, temporary):
                continue  # the process that held the lock has published the file, or has given up
            try:
                if not is_whole():  # it may have been published before `temporary` was opened
                    file.truncate(0)
                    _write_durably(file, make())
                    os.replace(temporary, path)
                    return
            finally:
                if _is_open_file_at(file, temporary):
                    temporary.unlink()
    else:
        return
    # Without locks several processes may make the file; the first one that has it publishes it.
    temporary.unlink(missing_ok=True)
    publish(path, make(), is_whole)


def _write_durably(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> None:
    for chunk in chunks:
        file.write(chunk)
    file.flush()
    os.fsync(file.fileno())


def _is_open_file_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def warn_unwritable(directory: Path) -> Iterator[None]:
    """Turn an error of writing to the cache in `directory` into a warning."""
    try:
        yield
    except OSError as error:
        logger.warning(
            "cannot write the data cache in %s (%s): the work is repeated at every start; set RUNNER_CACHE to a "
            "directory that can be written",
            directory,
            error.strerror or error,
        )


@contextlib.contextmanager
def wrap_parse_errors(where: object) -> Iterator[None]:
    """Turn a ValueError of a parser into a DataError that names `where`; pass on a DataError, which names its own."""
    try:
        yield
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


@contextlib.contextmanager
def wrap_disk_errors(subject: str, directory: Path) -> Iterator[None]:
    """Turn errors of the disk of `directory` into a DataError about `subject`; pass on errors of a bucket."""
    try:
        yield
    # A bucket that does not answer is an infrastructure failure (exit code 76), not a problem of this disk.
    except StorageError:
        raise
    except OSError as error:
        raise DataError(
            f"{subject}: cannot be kept in {directory} ({error.strerror or error}); set RUNNER_CACHE to a directory "
            "that has room"
        ) from error


class SeekableStream(io.RawIOBase):
    """Base of raw streams over a file of known size, whose subclasses implement `readinto`. Not thread-safe."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes, self._position = size_bytes, 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to `offset` from the start, the position or the end, and return the new position."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size_bytes}[whence]
        self._position = origin + offset
        return self._position


class ByteRange(NamedTuple):
    """Bytes `start .. stop` of a file."""

    file: File
    start: int
    stop: int


@dataclass(frozen=True)
class DerivedFile:
    """Whole file to keep on this host's disk: a copy of `origin`, or its decompressed content."""

    origin: File
    name: str  # name of the file; different for different content
    size_bytes: int
    make: Callable[[], Iterable[bytes]]  # yields the content in chunks. Raises as a `Reader` does.
    crc32c: str | None = None  # CRC-32C of the content, where it is known in advance


class Reader(Protocol):
    """Reader of the files of one source, each in the state it had when the source was opened. Thread-safe.

    Every method raises `DataError` if a file has changed or cannot be read, `OSError` if a bucket does not answer.
    """

    @property
    def directory(self) -> Path:
        """Directory of derived files and records on this host's disk."""

    @property
    def is_remote(self) -> bool:
        """True if each read is a request to a bucket."""

    def for_id_width(self, itemsize: int) -> "Reader":
        """Return a reader of the same files whose cache suits sequences of ids of `itemsize` bytes."""

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range; where reads wait, many are requested at the same time."""

    def find(self, places: Sequence[str]) -> list[File | None]:
        """Return the files at these paths or URLs, which are stored where the source is; None for a missing one."""

    def check(self, files: Sequence[File]) -> list[File]:
        """Return the files in their present state. Reads no content.

        A file with another change time or inode may have other content of the same size and time. Raises `DataError` if
        one has changed for certain.
        """

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """Return the files, or whole copies on this host's disk, for a library that can only open paths."""

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """Return derived files on this host's disk, and make those that are missing."""


@dataclass(frozen=True)
class DiskReader:
    """Reader of files on a disk. Derived files are kept in `directory`."""

    directory: Path
    is_remote = False

    def for_id_width(self, itemsize: int) -> "DiskReader":
        """Return this reader, which has no cache."""
        return self

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Read the ranges one after the other."""
        return [read_file(*range_) for range_ in ranges]

    def find(self, places: Sequence[str]) -> list[File | None]:
        """Return the files at these paths."""
        return [describe_file(Path(place)) if os.path.exists(place) else None for place in places]

    def check(self, files: Sequence[File]) -> list[File]:
        """Compare sizes and modification times with those of the start."""
        found: list[File] = []
        for file in self.copies(files):
            found.append(describe_file(file.path))
            if found[-1].identity != file.identity:
                raise make_changed_error(file)
        return found

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """Return the files themselves."""
        local = [file for file in files if isinstance(file, SourceFile)]
        assert len(local) == len(files), "a disk has no objects of a bucket"
        return local

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """Make the files in `directory`; a file of the right size is assumed to be whole."""

        def is_whole(path: Path, size_bytes: int) -> bool:
            return path.exists() and path.stat().st_size == size_bytes

        for derived in wanted:
            path = self.directory / derived.name
            write_derived(derived, path, functools.partial(is_whole, path, derived.size_bytes))
        return [describe_file(self.directory / derived.name) for derived in wanted]


def make_changed_error(file: File) -> DataError:
    """Return the error for a file that has changed since the job started, or is gone."""
    return DataError(f"{file}: changed since the job started, or gone; a running job needs its token files unchanged")


def read_file(file: File, start: int, stop: int) -> bytes:
    """Return bytes `start .. stop` of a file on a disk. Raises DataError if the file was replaced or is too short."""
    assert isinstance(file, SourceFile)
    size = stop - start
    opened = _open_file(file)  # the local reference keeps the descriptor open if the cache of open files drops it
    try:
        # `pread` takes the offset with it, so threads can share one descriptor. It may return less than requested.
        content = os.pread(opened.fileno(), size, start)
        while len(content) < size and (more := os.pread(opened.fileno(), size - len(content), start + len(content))):
            content += more
    except OSError as error:
        raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error
    if len(content) < size:
        raise make_changed_error(file)
    return content


def fill_from_file(file: SourceFile, targets: Sequence[tuple[int, np.ndarray]]) -> None:
    """Fill contiguous arrays with bytes of a file on a disk, each from the offset given with it. Raises DataError."""
    opened = _open_file(file)
    for start, out in targets:
        try:
            size = os.preadv(opened.fileno(), [out.data], start)
        except OSError as error:
            raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error
        if size < out.nbytes:  # a short read is repeated, and reported if the file really is too short
            out[:] = np.frombuffer(read_file(file, start, start + out.nbytes), out.dtype)


@functools.lru_cache(maxsize=OPEN_FILES_MAX)
def _open_file(file: SourceFile) -> FileIO:
    # The key includes the times and the inode, so a replaced file is never read through the old descriptor.
    if describe_file(file.path).identity != file.identity:
        raise make_changed_error(file)
    try:
        return file.path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error


def write_derived(derived: DerivedFile, path: Path, is_whole: Callable[[], bool]) -> None:
    """Make the file at `path` unless it `is_whole`, in one process of this host. Raises DataError for want of room."""
    with wrap_disk_errors(str(derived.origin), path.parent):
        publish_once(path, derived.make, is_whole)
