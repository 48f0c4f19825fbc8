"""Reader of objects in a bucket: exact ranges through a cache on this host's disk, many requests at a time.

An object is read only in the version that the listing at the start named. An object that is replaced under a running
job is therefore noticed by the next read.

**Cache of ranges** (`_RangeCache`). If its file is deleted, damaged or shared, the worst outcome is a cache miss.

1. The cache is one sparse file of slots of one size. A hash of object, version, start and stop gives the slot of a
   range, and a write replaces what was there. The file is therefore bounded, and no index is kept in memory.
2. A slot begins with the CRC-32C of the rest, the length, and the digest of its key. A slot that was torn by a kill,
   written by two processes at once, or damaged does not match and is a miss. The same holds for a slot overwritten by
   one of another size: sources with ids of different widths share the file and its space, as do those of one width.
3. A range longer than a slot takes several slots; a range much longer than that is not cached at all.
4. If a file cannot be written, a warning is printed and the requests are repeated; the run continues.

**Whole copies** (`FileCopies`), for files that cannot be read by ranges. Bounded by `data.cache_bytes`.

1. Each source has a directory of its own below `copies/`. A process that reads a source holds a shared `flock` on that
   directory until it ends, in whichever way.
2. A file is published whole, under a name that differs for each version of the object, by one process of this host. A
   record beside it holds its CRC-32C, which is compared at the next start; a file that does not match is made again.
3. Before files are made, their size must fit into the bound together with the files of other sources. Directories that
   no process holds are removed for them, the least recently opened one first.
4. Files that an earlier version or a killed process left in the source's own directory are removed if no other process
   holds the directory.
"""

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path

import google_crc32c

from runner.data.readers import (
    ByteRange,
    DerivedFile,
    DiskReader,
    Reader,
    cache_key,
    make_changed_error,
    read_record,
    warn_unwritable,
    wrap_disk_errors,
    write_derived,
    write_record,
)
from runner.data.source_files import (
    BucketFile,
    BucketFiles,
    File,
    SourceFile,
    SourceFiles,
    describe_file,
    make_bucket_file,
    wrap_source_errors,
)
from runner.errors import DataError, StorageError
from runner.storage import ChangedError, DeniedError, Store, compute_crc32c, run_in_parallel
from runner.storage.local import try_lock

RANGES_FILE = "ranges.cache"
COPIES_DIRECTORY = "copies"
_FREE_SHARE = 4  # without `data.cache_bytes` a quarter of the free disk is used
_SLOTS_OF_RANGE_MAX = 64
REQUEST_BYTES_MAX = 4 << 20
# Copies up to this size are read at each start (0.1 s); of larger ones the size is checked.
VERIFIED_BYTES_MAX = 1 << 27
_CHECKSUM, _HEAD = struct.Struct("<I"), struct.Struct("<I16s")
HEADER_BYTES = _CHECKSUM.size + _HEAD.size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """Settings of the cache on this host's disk."""

    directory: Path
    max_bytes: int | None = 0  # largest size in bytes; None for a share of the free disk, 0 for no cache
    sequence_tokens: int = 1  # number of tokens that one sequence reads, which sets the size of a slot


class _RangeCache:
    """Cache of byte ranges, read and written by any number of threads and processes."""

    def __init__(self, directory: Path, max_bytes: int | None, slot_bytes: int) -> None:
        """Open or create the file, unless `max_bytes` is 0. A slot holds `slot_bytes` of content."""
        assert slot_bytes > 0
        self._directory, self._slot_bytes = directory, slot_bytes
        self._num_slots = 0
        self._file: FileIO | None = None
        self._is_writable = True
        self._warning_lock = threading.Lock()
        if max_bytes == 0:
            return
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # All processes of the host write to the same file without a lock: the checksum of a slot detects
            # collisions.
            descriptor = os.open(directory / RANGES_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._file = os.fdopen(descriptor, "r+b", buffering=0)
            self._num_slots = _resize(self._file, max_bytes) // (HEADER_BYTES + slot_bytes)
        except OSError as error:
            self._stop_writing(error)

    def get(self, name: str, start: int, stop: int) -> bytes | None:
        """Return bytes `start .. stop` of `name` (the key of an object's version); None if they are not cached."""
        pieces = []
        for first, last in self._split(start, stop):
            assert self._file is not None, "a cache without a file has no slots"
            slot, key = self._locate_slot(name, first, last)
            try:
                found = os.pread(self._file.fileno(), HEADER_BYTES + last - first, slot)
            except OSError:
                return None
            head = _HEAD.pack(last - first, key)
            if len(found) != HEADER_BYTES + last - first or found[_CHECKSUM.size : HEADER_BYTES] != head:
                return None
            # The key matched, so only a torn or damaged slot fails here.
            if _CHECKSUM.unpack_from(found)[0] != google_crc32c.value(found[_CHECKSUM.size :]):
                return None
            pieces.append(found[HEADER_BYTES:])
        return b"".join(pieces) if pieces else None

    def put(self, name: str, start: int, stop: int, content: bytes) -> None:
        """Store bytes `start .. stop` of `name`; they stay until another range is written to their slots."""
        assert len(content) == stop - start
        if self._file is None or not self._is_writable:
            return
        for first, last in self._split(start, stop):
            slot, key = self._locate_slot(name, first, last)
            # Checksum and content go in one write, which readers see whole or recognise as torn.
            body = _HEAD.pack(last - first, key) + content[first - start : last - start]
            try:
                os.pwrite(self._file.fileno(), _CHECKSUM.pack(google_crc32c.value(body)) + body, slot)
            except OSError as error:
                self._stop_writing(error)
                return

    def _split(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Split a range into parts of at most a slot's size; no part if the range is not to be cached."""
        size = self._slot_bytes
        if not self._num_slots or stop - start > min(_SLOTS_OF_RANGE_MAX, self._num_slots) * size:
            return []
        return [(first, min(first + size, stop)) for first in range(start, stop, size)]

    def _locate_slot(self, name: str, start: int, stop: int) -> tuple[int, bytes]:
        """Return the offset of a range's slot in the file, and the digest that the slot must hold."""
        key = hashlib.blake2b(f"{name}\0{start}\0{stop}".encode(), digest_size=16).digest()
        return int.from_bytes(key[:8], "little") % self._num_slots * (HEADER_BYTES + self._slot_bytes), key

    def _stop_writing(self, error: OSError) -> None:
        with self._warning_lock:  # one warning, however many threads fail
            if self._is_writable:
                with warn_unwritable(self._directory):
                    raise error
            self._is_writable = False


def _resize(file: FileIO, max_bytes: int | None) -> int:
    """Set the size of the sparse file to `max_bytes`, or to what the disk has room for, and return it. Raises OSError.

    A size that depends on the free disk stays as it is while it is about right, because another number of slots would
    make every lookup a miss.
    """
    status, disk = os.fstat(file.fileno()), os.fstatvfs(file.fileno())
    free_bytes = disk.f_bavail * disk.f_frsize + status.st_blocks * 512
    size_bytes = free_bytes // _FREE_SHARE if max_bytes is None else min(max_bytes, free_bytes)
    if size_bytes != max_bytes and size_bytes // 2 <= status.st_size <= 2 * size_bytes:
        return status.st_size
    if status.st_size != size_bytes:
        os.ftruncate(file.fileno(), size_bytes)
    return size_bytes


class FileCopies:
    """Whole copies of the files of one source. Thread-safe. Raises `DataError` if the disk has no room."""

    def __init__(self, directory: Path, source: str, max_bytes: int | None) -> None:
        """Make the copies of one source. `max_bytes` bounds those of all sources; None: a share of the free disk."""
        self._root = directory / COPIES_DIRECTORY
        self._directory = self._root / hashlib.sha256(source.encode()).hexdigest()[:32]
        self._label, self._max_bytes = f"data.source={source}", max_bytes
        self._lock = threading.Lock()
        self._descriptor: int | None = None  # of the locked directory; closed when the process ends

    def make_room(self, wanted: Sequence[DerivedFile]) -> None:
        """Lock the source's directory, and remove copies of unused sources until `wanted` fits."""
        with wrap_disk_errors(self._label, self._root), self._lock:
            # The lock is taken once and held until the process ends, because a reader may open its files at any time.
            if self._descriptor is None:
                self._descriptor = self._lock_directory({derived.name for derived in wanted})
            os.utime(self._directory)  # its modification time is when the source was last opened
            others = {path: _measure(path) for path in self._root.iterdir() if path != self._directory}
            if self._max_bytes is not None:
                bound = self._max_bytes
            else:
                disk = os.statvfs(self._root)
                bound = (disk.f_bavail * disk.f_frsize + _measure(self._root)) // _FREE_SHARE
            need = sum(derived.size_bytes for derived in wanted)
            for path in sorted(others, key=_get_last_opened):
                # Nothing is removed for a source that would not fit even alone.
                if need + sum(others.values()) > bound >= need and _remove_unused(path):
                    del others[path]
            # Whatever remains is in use by other processes.
            if need + sum(others.values()) > bound:
                raise DataError(
                    f"{self._label}: is read from whole copies on this host's disk, which need {need:,} bytes beside "
                    f"{sum(others.values()):,} of other sources; data.cache_bytes (by default a quarter of the free "
                    f"disk) allows {bound:,}"
                )

    def get(self, derived: DerivedFile) -> SourceFile:
        """Return a file that `make_room` was called for; make it if it is missing or damaged."""
        path, checksum = self._directory / derived.name, google_crc32c.Checksum()

        def make_and_sum() -> Iterator[bytes]:
            for chunk in derived.make():
                checksum.update(chunk)
                yield chunk
            digest = checksum.hexdigest().decode()
            if derived.crc32c not in (None, digest):
                raise StorageError(f"{derived.origin}: came damaged; its CRC-32C is {derived.crc32c}")
            # The record is written before the file is published. A file without a record would be made again.
            write_record(self._directory, derived.name, {"crc32c": digest})

        write_derived(replace(derived, make=make_and_sum), path, partial(self._is_whole, path, derived.size_bytes))
        return describe_file(path)

    def _is_whole(self, path: Path, size_bytes: int) -> bool:
        record = read_record(self._directory, path.name)
        if record is None or not path.is_file() or path.stat().st_size != size_bytes:
            return False
        return size_bytes > VERIFIED_BYTES_MAX or compute_crc32c(path.read_bytes()) == record["crc32c"]

    def _lock_directory(self, names: set[str]) -> int:
        """Lock the directory against removal, remove files of other names if it is alone, and return its descriptor."""
        while True:
            self._directory.mkdir(parents=True, exist_ok=True)
            try:
                descriptor = os.open(self._directory, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:  # another process removed it before it was opened
                continue
            if _try_lock_alone(descriptor):
                for path in self._directory.iterdir():
                    if path.name.removesuffix(".json") not in names:
                        path.unlink()
            # A process holds its exclusive lock only while it removes leftovers; the shared one says that it reads the
            # source.
            try_lock(descriptor, fcntl.LOCK_SH)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), self._directory.stat()):
                    return descriptor
            os.close(descriptor)  # another process removed the directory before the lock was taken


def _try_lock_alone(descriptor: int) -> bool:
    """Take the exclusive lock of a directory, as far as there are locks; return False if another process holds it."""
    try:
        return try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False


def _remove_unused(directory: Path) -> bool:
    """Remove the directory of a source unless a process holds it; return True if it is gone."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        if _try_lock_alone(descriptor):
            shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(descriptor)
    return not directory.exists()


def _get_last_opened(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _measure(directory: Path) -> int:
    size_bytes = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                size_bytes += os.lstat(os.path.join(parent, name)).st_size
    return size_bytes


def open_reader(source: SourceFiles | BucketFiles, settings: CacheSettings) -> Reader:
    """Return the reader of a source's files."""
    if isinstance(source, SourceFiles):
        return DiskReader(settings.directory)
    return BucketReader(source.name, source.store, settings)


class BucketReader:
    """Reader of objects in one store. Thread-safe."""

    is_remote = True

    def __init__(self, source: str, store: Store, settings: CacheSettings, itemsize: int = 2) -> None:
        """Open the cache. `source` is the value of `data.source`; slots suit sequences of ids of `itemsize` bytes."""
        self._source, self._store, self._settings = source, store, settings
        self.directory = settings.directory
        self._cache = _RangeCache(settings.directory, settings.max_bytes, settings.sequence_tokens * itemsize)
        self._disk = DiskReader(settings.directory)
        self._copies = FileCopies(settings.directory, source, settings.max_bytes)

    def for_id_width(self, itemsize: int) -> "BucketReader":
        """Return a reader whose cache has slots for ids of `itemsize` bytes."""
        return BucketReader(self._source, self._store, self._settings, itemsize)

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range, from this host's disk or the bucket; adjacent ranges take one request."""
        found: list[bytes | None] = [
            self._disk.read([range_])[0]
            if isinstance(range_.file, SourceFile)  # a whole copy on this host's disk
            else self._cache.get(range_.file.versioned_url, range_.start, range_.stop)
            for range_ in ranges
        ]
        missing = [index for index, content in enumerate(found) if content is None]
        groups = _group_adjacent(ranges, missing)
        requests = []
        for group in groups:
            file, first, _ = ranges[group[0]]
            stop = max(ranges[index].stop for index in group)
            # One request, except for a range that is larger than a request should be.
            requests.append(
                [
                    ByteRange(file, start, min(start + REQUEST_BYTES_MAX, stop))
                    for start in range(first, stop, REQUEST_BYTES_MAX)
                ]
            )
        # All requests of all groups run at the same time, because each waits for the network.
        contents = iter(self.fetch([request for pieces in requests for request in pieces]))
        for group, pieces in zip(groups, requests, strict=True):
            content, first = b"".join(next(contents) for _ in pieces), ranges[group[0]].start
            for index in group:
                file, start, stop = ranges[index]
                piece = content[start - first : stop - first]
                # The cache stores the range as it was requested, because the next attempt will look it up in this form.
                self._cache.put(_in_bucket(file).versioned_url, start, stop, piece)
                found[index] = piece
        return [content for content in found if content is not None]

    def find(self, places: Sequence[str]) -> list[File | None]:
        """Return the objects at these URLs, by one listing."""
        names = [place.removeprefix(f"{self._store.url}/") for place in places]
        with wrap_source_errors(self._source):
            # One listing of the common prefix is cheaper than a request for each object.
            prefix = os.path.commonprefix(names)  # noqa: RUF071 - the common characters, not a directory
            listing = self._store.list_files(prefix) if names else {}
        return [make_bucket_file(self._store.url, name, listing[name]) if name in listing else None for name in names]

    def check(self, files: Sequence[File]) -> list[File]:
        """Compare versions with those of the start, by one listing. Copies on this host's disk need no check."""
        objects = [file for file in files if isinstance(file, BucketFile)]
        for present, file in zip(self.find([str(file) for file in objects]), objects, strict=True):
            if present != file:
                raise make_changed_error(file)
        return list(files)  # equal versions mean equal content

    def fetch(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """Return the bytes of each range from the bucket itself, without the cache. Raises as `read` does."""
        return run_in_parallel([partial(self._request, *range_) for range_ in ranges])

    def _request(self, file: File, start: int, stop: int) -> bytes:
        try:
            return self._store.read_range(_in_bucket(file).name, start, stop, _in_bucket(file).version)
        except (ChangedError, FileNotFoundError) as error:
            raise make_changed_error(file) from error
        except DeniedError as error:
            raise DataError(f"{file} cannot be read: no permission ({error})") from error

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """Return whole copies of the objects on this host's disk."""

        def make_chunks(file: BucketFile) -> Iterator[bytes]:
            for start in range(0, file.size_bytes, REQUEST_BYTES_MAX):
                yield from self.fetch([ByteRange(file, start, min(start + REQUEST_BYTES_MAX, file.size_bytes))])

        return self.keep(
            [
                DerivedFile(file, cache_key("copy", [file]), file.size_bytes, partial(make_chunks, file), file.crc32c)
                for file in map(_in_bucket, files)
            ]
        )

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """Make room for the files, and make those that are missing or damaged."""
        if wanted:
            self._copies.make_room(wanted)
        return run_in_parallel([partial(self._copies.get, derived) for derived in wanted])


def _in_bucket(file: File) -> BucketFile:
    assert isinstance(file, BucketFile)
    return file


def _group_adjacent(ranges: Sequence[ByteRange], indices: Sequence[int]) -> list[list[int]]:
    """Group `indices` so that the ranges of a group, sorted by start, overlap or follow each other in one object."""
    groups: list[list[int]] = []
    first = stop = 0
    for index in sorted(indices, key=lambda index: (str(ranges[index].file), ranges[index].start)):
        file, start, end = ranges[index]
        is_adjacent = bool(groups) and ranges[groups[-1][0]].file == file and start <= stop
        if is_adjacent and max(end, stop) - first <= REQUEST_BYTES_MAX:
            groups[-1].append(index)
            stop = max(stop, end)
        else:
            groups.append([index])
            first, stop = start, end
    return groups
