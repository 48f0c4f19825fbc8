"""Objects of a bucket, read by exact ranges: through the cache, many requests at a time.

An object is read only in the version that the listing at the start has named, so one that is replaced under a running
job is found by the next read.

Ranges of objects, kept on this host's disk. A cache: whatever happens to its file, the worst is a miss.

1. One sparse file of slots of one size. A range has one slot, by the hash of its object, version, start and stop; what
   is written to a slot replaces what was there. So the file is bounded, and nothing is looked for or kept in memory.
2. A slot begins with the CRC-32C of the rest, the length, and the digest of what it holds. A slot that is torn by a
   kill, raced for by two processes, or damaged does not match, and is a miss. So is one that was written over by one
   of another size: sources whose ids differ in width share the file, and its space, as those of one width do.
3. A range longer than a slot is kept in several, one much longer than that not at all.
4. A file that cannot be written costs a warning and the requests, and never stops a run.

Whole files of a bucket's source on this host's disk, for what cannot be read by ranges. Bounded.

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
import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

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
from runner.storage import ChangedError, DeniedError, Store, compute_crc32c

RANGES_FILE = "ranges.cache"
FREE_SHARE = 4  # without a size in the spec: a quarter of the free disk
SLOTS_OF_RANGE_MAX = 64
_CHECKSUM, _HEAD = struct.Struct("<I"), struct.Struct("<I16s")
HEADER_BYTES = _CHECKSUM.size + _HEAD.size

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CacheSettings:
    """Where ranges are kept, at most how many bytes (None: a share of the free disk, 0: none), and tokens in a row."""

    directory: Path
    max_bytes: int | None
    sequence_tokens: int

    def open(self, itemsize: int) -> "RangeCache":
        """The cache for rows of ids of `itemsize` bytes."""
        return RangeCache(self.directory, self.max_bytes, self.sequence_tokens * itemsize)


class RangeCache:
    """Read and written by any number of threads and processes."""

    def __init__(self, directory: Path, max_bytes: int | None, slot_bytes: int) -> None:
        """`slot_bytes` is how much content a slot holds. Creates the file, if it may be as large as a slot."""
        assert slot_bytes > 0
        self._directory, self._slot_bytes = directory, slot_bytes
        self._num_slots = 0
        self._file: FileIO | None = None
        self._is_written = True
        self._stopping = threading.Lock()
        if max_bytes == 0:
            return
        try:
            self._file = _open(directory / RANGES_FILE)
            self._num_slots = _size_file(self._file, max_bytes) // (HEADER_BYTES + slot_bytes)
        except OSError as error:
            self._stop_writing(error)

    def get(self, name: str, start: int, stop: int) -> bytes | None:
        """Bytes `start .. stop` of `name`, which tells the object and its version; None if they are not there."""
        pieces = []
        for first, last in self._pieces(start, stop):
            content = self._get_piece(name, first, last)
            if content is None:
                return None
            pieces.append(content)
        return b"".join(pieces) if pieces else None

    def put(self, name: str, start: int, stop: int, content: bytes) -> None:
        """Keep bytes `start .. stop` of `name`, as long as nothing else comes into their slots."""
        assert len(content) == stop - start
        if self._file is None or not self._is_written:
            return
        for first, last in self._pieces(start, stop):
            slot, key = self._slot(name, first, last)
            body = _HEAD.pack(last - first, key) + content[first - start : last - start]
            try:
                os.pwrite(self._file.fileno(), _CHECKSUM.pack(google_crc32c.value(body)) + body, slot)
            except OSError as error:
                self._stop_writing(error)
                return

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The range in parts of a slot's size; none if it is not to be kept."""
        size = self._slot_bytes
        if not self._num_slots or stop - start > min(SLOTS_OF_RANGE_MAX, self._num_slots) * size:
            return []
        return [(first, min(first + size, stop)) for first in range(start, stop, size)]

    def _slot(self, name: str, start: int, stop: int) -> tuple[int, bytes]:
        """Where the slot of a range is, and the digest that it must bear."""
        key = hashlib.blake2b(f"{name}\0{start}\0{stop}".encode(), digest_size=16).digest()
        return int.from_bytes(key[:8], "little") % self._num_slots * (HEADER_BYTES + self._slot_bytes), key

    def _get_piece(self, name: str, start: int, stop: int) -> bytes | None:
        assert self._file is not None, "a cache without a file has no slots"
        slot, key = self._slot(name, start, stop)
        try:
            found = os.pread(self._file.fileno(), HEADER_BYTES + stop - start, slot)
        except OSError:
            return None
        head = _HEAD.pack(stop - start, key)
        if len(found) != HEADER_BYTES + stop - start or found[_CHECKSUM.size : HEADER_BYTES] != head:
            return None
        is_whole = _CHECKSUM.unpack_from(found)[0] == google_crc32c.value(found[_CHECKSUM.size :])
        return found[HEADER_BYTES:] if is_whole else None

    def _stop_writing(self, error: OSError) -> None:
        """Keep nothing more, and say why, once."""
        with self._stopping:
            if self._is_written:
                warn_unwritable(self._directory, error)
            self._is_written = False


def _open(path: Path) -> FileIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)


def _size_file(file: FileIO, max_bytes: int | None) -> int:
    """Give the file its size, without taking the space yet: `max_bytes`, or what the disk has. Raises OSError.

    What depends on the free disk is kept while it is near: with another number of slots all would be misses.
    """
    status, disk = os.fstat(file.fileno()), os.fstatvfs(file.fileno())
    free_bytes = disk.f_bavail * disk.f_frsize + status.st_blocks * 512
    size_bytes = free_bytes // FREE_SHARE if max_bytes is None else min(max_bytes, free_bytes)
    if size_bytes != max_bytes and size_bytes // 2 <= status.st_size <= 2 * size_bytes:
        return status.st_size
    if status.st_size != size_bytes:
        os.ftruncate(file.fileno(), size_bytes)
    return size_bytes


COPIES_DIRECTORY = "copies"
VERIFIED_BYTES_MAX = 1 << 27  # files up to this size are read at each start (0.1 s); of larger ones the size tells


class FileCopies:
    """The files of one source; see the module. Safe to use from several threads.

    Every method raises `DataError` where the disk does not take them.
    """

    def __init__(self, directory: Path, source: str, max_bytes: int | None) -> None:
        """`max_bytes` bounds the files of all sources together; None: a share of the free disk."""
        self._root = directory / COPIES_DIRECTORY
        self._directory = self._root / hashlib.sha256(source.encode()).hexdigest()[:32]
        self._what, self._max_bytes = f"data.source={source}", max_bytes
        self._holding = threading.Lock()
        self._held: int | None = None  # a descriptor, which closes with the process

    def make_room(self, wanted: Sequence[DerivedFile]) -> None:
        """Hold the source's directory, and remove what must go. Raises `DataError` if there is no room."""
        with wrap_disk_errors(self._what, self._root), self._holding:
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

    def get(self, derived: DerivedFile) -> SourceFile:
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
        return size_bytes > VERIFIED_BYTES_MAX or compute_crc32c(path.read_bytes()) == record["crc32c"]

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


NUM_REQUESTS = 16  # at a time; as many as the clients of the services have connections
REQUEST_BYTES_MAX = 4 << 20

Result = TypeVar("Result")


def open_reader(source: SourceFiles | BucketFiles, settings: CacheSettings) -> Reader:
    """What reads the files of a source."""
    if isinstance(source, SourceFiles):
        return DiskReader(settings.directory)
    return BucketReader(source.name, source.store, settings)


class BucketReader:
    """Reads objects of one store. Safe to use from several threads."""

    is_remote = True

    def __init__(self, source: str, store: Store, settings: CacheSettings, itemsize: int = 2) -> None:
        """`source` is what `data.source` says; the cache suits rows of ids of `itemsize` bytes."""
        self._source, self._store, self._settings = source, store, settings
        self._cache = settings.open(itemsize)
        self._disk = DiskReader(settings.directory)
        self._copies = FileCopies(settings.directory, source, settings.max_bytes)

    def for_id_width(self, itemsize: int) -> "BucketReader":
        """See `Reader`."""
        return BucketReader(self._source, self._store, self._settings, itemsize)

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """See `Reader`. Ranges of one object that touch are fetched in one request; files that are kept are read."""
        found = [self._at_hand(range_) for range_ in ranges]
        missing = [index for index, content in enumerate(found) if content is None]
        missing.sort(key=lambda index: (str(ranges[index].file), ranges[index].start))
        groups = _touching(ranges, missing)
        requests = [_split(ranges, group) for group in groups]
        contents = iter(self.fetch([request for pieces in requests for request in pieces]))
        for group, pieces in zip(groups, requests, strict=True):
            content, first = b"".join(next(contents) for _ in pieces), ranges[group[0]].start
            for index in group:
                file, start, stop = ranges[index]
                piece = content[start - first : stop - first]
                self._cache.put(_in_bucket(file).versioned_url, start, stop, piece)
                found[index] = piece
        return [content for content in found if content is not None]

    def _at_hand(self, range_: ByteRange) -> bytes | None:
        """The bytes of a range, if they are on this host's disk."""
        if isinstance(range_.file, SourceFile):
            return self._disk.read([range_])[0]
        return self._cache.get(range_.file.versioned_url, range_.start, range_.stop)

    def find(self, places: Sequence[str]) -> list[File | None]:
        """See `Reader`. One listing."""
        top = f"{self._store.url}/"
        names = [place.removeprefix(top) for place in places]
        with wrap_source_errors(self._source):
            start = os.path.commonprefix(names)  # noqa: RUF071 - of characters: no part of a path
            listing = self._store.list_files(start) if names else {}
        return [make_bucket_file(self._store.url, name, listing[name]) if name in listing else None for name in names]

    def check(self, files: Sequence[File]) -> None:
        """See `Reader`. One listing. What is kept on this host's disk is no longer fetched."""
        objects = [file for file in files if isinstance(file, BucketFile)]
        for present, file in zip(self.find([str(file) for file in objects]), objects, strict=True):
            if present != file:
                raise make_changed_error(file)

    def fetch(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range from the bucket itself, past the cache. Raises as `read` does."""
        return run_in_parallel([partial(self._request, *range_) for range_ in ranges])

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """See `Reader`."""
        objects = map(_in_bucket, files)
        return self.keep(
            [
                DerivedFile(file, cache_key("copy", [file]), file.size_bytes, partial(self._chunks, file), file.crc32c)
                for file in objects
            ]
        )

    def _chunks(self, file: BucketFile) -> Iterator[bytes]:
        """The whole object."""
        for start in range(0, file.size_bytes, REQUEST_BYTES_MAX):
            yield from self.fetch([ByteRange(file, start, min(start + REQUEST_BYTES_MAX, file.size_bytes))])

    def keep(self, wanted: Sequence[DerivedFile]) -> list[SourceFile]:
        """See `Reader`."""
        if wanted:
            self._copies.make_room(wanted)
        return run_in_parallel([partial(self._copies.get, derived) for derived in wanted])

    def _request(self, file: File, start: int, stop: int) -> bytes:
        try:
            return self._store.read_range(_in_bucket(file).name, start, stop, _in_bucket(file).version)
        except (ChangedError, FileNotFoundError) as error:
            raise make_changed_error(file) from error
        except DeniedError as error:
            raise DataError(f"{file} cannot be read: no permission ({error})") from error


def _in_bucket(file: File) -> BucketFile:
    assert isinstance(file, BucketFile)
    return file


def run_in_parallel(acts: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of all `acts`, some at a time. Raises what the first that failed has raised.

    The threads are daemons: a read that hangs cannot keep a dying process alive.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    waiting = iter(range(len(acts)))
    taking = threading.Lock()

    def work() -> None:
        while not errors:
            with taking:
                index = next(waiting, None)
            if index is None:
                return
            try:
                results[index] = acts[index]()
            except BaseException as error:  # noqa: BLE001 - nothing is swallowed: the caller raises it
                errors[index] = error

    threads = [threading.Thread(target=work, name="range", daemon=True) for _ in range(min(NUM_REQUESTS, len(acts)))]
    if len(threads) == 1:
        work()
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(acts))]


def _touching(ranges: Sequence[ByteRange], indices: Sequence[int]) -> list[list[int]]:
    """Groups of `indices`, which are sorted by object and start, whose ranges overlap or follow each other."""
    groups: list[list[int]] = []
    first = stop = 0
    for index in indices:
        file, start, end = ranges[index]
        is_same = bool(groups) and ranges[groups[-1][0]].file == file and start <= stop
        if is_same and max(end, stop) - first <= REQUEST_BYTES_MAX:
            groups[-1].append(index)
            stop = max(stop, end)
        else:
            groups.append([index])
            first, stop = start, end
    return groups


def _split(ranges: Sequence[ByteRange], group: Sequence[int]) -> list[ByteRange]:
    """The requests for what a group needs: one, but for a range that is larger than one should be."""
    file, first, stop = ranges[group[0]].file, ranges[group[0]].start, max(ranges[index].stop for index in group)
    return [
        ByteRange(file, start, min(start + REQUEST_BYTES_MAX, stop)) for start in range(first, stop, REQUEST_BYTES_MAX)
    ]
