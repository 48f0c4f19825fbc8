"""Ranges of objects, kept on this host's disk. A cache: whatever happens to its file, the worst is a miss.

1. One sparse file of slots of one size. A range has one slot, by the hash of its object, version, start and stop; what
   is written to a slot replaces what was there. So the file is bounded, and nothing is looked for or kept in memory.
2. A slot begins with the CRC-32C of the rest, the length, and the digest of what it holds. A slot that is torn by a
   kill, raced for by two processes, or damaged does not match, and is a miss. So is one that was written over by one
   of another size: sources whose ids differ in width share the file, and its space, as those of one width do.
3. A range longer than a slot is kept in several, one much longer than that not at all.
4. A file that cannot be written costs a warning and the requests, and never stops a run.
"""

import hashlib
import logging
import os
import struct
import threading
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import google_crc32c

from runner.data.cache import warn_unwritable

FILE = "ranges.cache"
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
    row_tokens: int

    def open(self, itemsize: int) -> "RangeCache":
        """The cache for rows of ids of `itemsize` bytes."""
        return RangeCache(self.directory, self.max_bytes, self.row_tokens * itemsize)


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
            self._file = _open(directory / FILE)
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
