"""The bytes of a source's files, asked for by ranges: what every format reads through, wherever the files lie.

`Reader` is what is asked of a place: of a disk it is `DiskReader`, of a bucket `remote.reader.BucketReader`. Files are
read with `pread` and never through a mapping: one that is cut under a running job would end the process with SIGBUS.

Derived data on disk: small records and the arrays they point to. Knows neither tokens nor text.

1. What is derived from files is kept under a key made of their paths, sizes and modification times (in a bucket: URLs
   and versions), and of FORMAT.
2. A file is written under a temporary name in the same directory, fsynced, then renamed: a reader sees it whole or not
   at all, whoever is killed. Of small ones processes that race write the same content, and the last rename wins; a file
   that is known by its time, or is much work, is made by one process while the others wait.
3. An array is named by the digest of its content and written before the record that points to it.
4. A record carries its own digest and the size of its array: what does not match is a miss, and is rebuilt.

A cache that cannot be written never stops a run: it costs a warning and the work of deriving again.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from runner.data.source_files import BucketFile, File, SourceFile, describe_file
from runner.errors import DataError, StorageError
from runner.storage import JsonObject

FORMAT = 2  # raise it when the meaning of a record or of a tokenizer changes

logger = logging.getLogger(__name__)


def cache_key(kind: str, files: Sequence[SourceFile | BucketFile]) -> str:
    """Return the name under which what `kind` derives from `files` is kept."""
    identity = [file.identity for file in files]
    return f"{kind}-{_digest(json.dumps([FORMAT, kind, identity]).encode())[:32]}"


def read_record(directory: Path, key: str) -> JsonObject | None:
    """Return the record, or None if there is none that is whole."""
    try:
        record = json.loads((directory / f"{key}.json").read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("sha256") != _digest(_canonical_json(record.get("content"))):
        return None
    return record["content"]


def write_record(directory: Path, key: str, content: JsonObject) -> None:
    """Publish a record. Raises OSError."""
    record = {"sha256": _digest(_canonical_json(content)), "content": content}
    publish(directory / f"{key}.json", [json.dumps(record, indent=1).encode()])


def publish(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write `path` so that it is seen whole or not at all. Raises OSError or what `chunks` does, leaving nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp"
    try:
        with open(aside, "xb") as file:
            _write_through(file, chunks)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def publish_once(path: Path, make: Callable[[], Iterable[bytes]], is_whole: Callable[[], bool]) -> None:
    """Unless `is_whole`, write `path` as `publish` does, in one process of all that come here at a time.

    Blocks while another process makes the file, and takes over from one that is killed. So a file that was found whole
    is not replaced by another of the same content, which would have another time.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.tmp"
    while not is_whole():
        with open(aside, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, aside):
                continue  # who held it has published it, or given up
            try:
                if not is_whole():  # else published before `aside` was opened
                    file.truncate(0)
                    _write_through(file, make())
                    os.replace(aside, path)
                    return
            finally:
                if _is_at(file, aside):
                    aside.unlink()


def _write_through(file: BinaryIO, chunks: Iterable[bytes | memoryview]) -> None:
    for chunk in chunks:
        file.write(chunk)
    file.flush()
    os.fsync(file.fileno())


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether the open file is the one at `path`."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def warn_unwritable(directory: Path, error: OSError) -> None:
    logger.warning(
        "cannot write the data cache in %s (%s): the work is repeated at every start; set RUNNER_CACHE to a "
        "directory that can be written",
        directory,
        error.strerror or error,
    )


def _canonical_json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _digest(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


OPEN_FILES_MAX = 128  # a process may hold only so many, and a corpus may have thousands of files


class ByteRange(NamedTuple):
    """Bytes `start .. stop` of a file."""

    file: File
    start: int
    stop: int


@dataclass(frozen=True)
class DerivedFile:
    """A whole file to keep on this host's disk: a copy of `origin`, or what is unpacked from it.

    Attributes:
        name: of the file; another one for another content.
        make: yields the content, in chunks. Raises as a `Reader` does.
        crc32c: of the content, where it is known beforehand.
    """

    origin: File
    name: str
    size_bytes: int
    make: Callable[[], Iterable[bytes]]
    crc32c: str | None = None


class Reader(Protocol):
    """The files of one source, each read only as it was when the source was resolved. Safe to use from several threads.

    Every method raises `DataError` where a file cannot be read so, `OSError` if a bucket does not answer.
    """

    @property
    def is_remote(self) -> bool:
        """Whether each read is a request."""

    def for_id_width(self, itemsize: int) -> "Reader":
        """The same files, kept in a cache that suits rows of ids of so many bytes."""

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range; where each waits, many are asked for at a time."""

    def find(self, places: Sequence[str]) -> list[File | None]:
        """The files of these paths or URLs, which lie where the source does; None for one that is not there."""

    def check(self, files: Sequence[File]) -> None:
        """Raise `DataError` if one is no longer what it was. Reads no content."""

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """The files themselves, or whole copies on this host's disk, for a library that opens nothing else."""

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """Files on this host's disk, made where they are not there yet."""


@dataclass(frozen=True)
class DiskReader:
    """Files of a disk. What is derived from them is kept in `directory`."""

    directory: Path
    is_remote = False

    def for_id_width(self, itemsize: int) -> "DiskReader":
        """See `Reader`."""
        return self

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """See `Reader`."""
        return [read_file(*range_) for range_ in ranges]

    def find(self, places: Sequence[str]) -> list[File | None]:
        """See `Reader`."""
        return [describe_file(Path(place)) if os.path.exists(place) else None for place in places]

    def check(self, files: Sequence[File]) -> None:
        """See `Reader`."""
        for file in files:
            if describe_file(on_disk(file).path) != file:
                raise make_changed_error(file)

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """See `Reader`."""
        return [on_disk(file) for file in files]

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """See `Reader`."""
        for derived in wanted:
            path = self.directory / derived.name
            write_derived(derived, path, partial(_has_size, path, derived.size_bytes))
        return [describe_file(self.directory / derived.name) for derived in wanted]


def on_disk(file: File) -> SourceFile:
    """The file, which a disk has given."""
    assert isinstance(file, SourceFile)
    return file


def make_changed_error(file: File) -> DataError:
    """The error of a file that is another one than when the job began, or gone."""
    return DataError(f"{file}: changed since the job started, or gone; a running job needs its token files unchanged")


def read_file(file: File, start: int, stop: int) -> bytes:
    """Bytes `start .. stop` of a file of a disk. Raises DataError if it is not the one that was found, or has fewer."""
    size = stop - start
    opened = _open_file(on_disk(file))  # held here: the cache may drop it meanwhile
    try:
        content = os.pread(opened.fileno(), size, start)
        while len(content) < size and (more := os.pread(opened.fileno(), size - len(content), start + len(content))):
            content += more
    except OSError as error:
        raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error
    if len(content) < size:
        raise make_changed_error(file)
    return content


def fill_from_file(file: SourceFile, targets: Sequence[tuple[int, np.ndarray]]) -> None:
    """Fill contiguous arrays with the bytes of a file of a disk, from the place beside each on. Raises DataError."""
    opened = _open_file(file)
    for start, out in targets:
        try:
            size = os.preadv(opened.fileno(), [out.data], start)
        except OSError as error:
            raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error
        if size < out.nbytes:
            out[:] = np.frombuffer(read_file(file, start, start + out.nbytes), out.dtype)


def write_derived(derived: DerivedFile, path: Path, is_whole: Callable[[], bool]) -> None:
    """Make the file at `path`, in one process of this host, unless it `is_whole` there; it is never seen half.

    Raises DataError if the disk does not take it.
    """
    with wrap_disk_errors(str(derived.origin), path.parent):
        publish_once(path, derived.make, is_whole)


def _has_size(path: Path, size_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == size_bytes


@contextlib.contextmanager
def wrap_disk_errors(what: str, directory: Path) -> Iterator[None]:
    """Inside, what the disk of `directory` refuses is a DataError; what a bucket does is not touched."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise DataError(
            f"{what}: cannot be kept in {directory} ({error.strerror or error}); set RUNNER_CACHE to a directory "
            "that has room"
        ) from error


@functools.lru_cache(maxsize=OPEN_FILES_MAX)
def _open_file(file: SourceFile) -> FileIO:
    """Open the file; keyed by its size and time too, so that a replaced file is never read as the one before."""
    if describe_file(file.path) != file:
        raise make_changed_error(file)
    try:
        return file.path.open("rb", buffering=0)
    except OSError as error:
        raise DataError(f"data.source: cannot read {file}: {error.strerror or error}") from error
