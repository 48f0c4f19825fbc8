"""ArrayRecord files of token ids: a record is a document of little-endian ids of `data.options.dtype`.

Other contents are not supported: no `tf.train.Example`, no pickled or compressed record. The format does not store the
lengths of records, so the first start on a host reads the files whole, and caches the lengths (8 bytes a document).
Records are read by the `array_record` package through its own file handles, never through a memory map. The package
opens only paths, so objects in a bucket are first copied whole to this host's disk.
"""

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from runner.data.readers import (
    OPEN_FILES_MAX,
    Reader,
    cache_key,
    make_changed_error,
    publish,
    read_record,
    warn_unwritable,
    write_record,
)
from runner.data.source_files import File, SourceFile, describe_file
from runner.data.token_files import RecordFile, parse_dtype
from runner.errors import DataError, format_reason
from runner.storage import run_in_parallel

_SCAN_RECORDS = 256
_READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # recommended by the package for random access


def read_array_record(files: Sequence[File], reader: Reader, *, dtype: str) -> list["ArrayRecordFile"]:
    """Open the files (a `TokenReader`), each record of which must hold a whole number of ids."""
    id_dtype = parse_dtype(dtype)

    def open_file(file: File, copy: SourceFile) -> ArrayRecordFile:
        sizes = _load_sizes(file, copy, reader.directory)
        is_odd = sizes % id_dtype.itemsize != 0
        if is_odd.any():
            odd = int(is_odd.argmax())
            raise DataError(
                f"{file}: record {odd} has {int(sizes[odd])} bytes, not a whole number of {id_dtype.itemsize}-byte "
                f"({id_dtype.name}) token ids"
            )
        bounds = np.concatenate([[0], np.cumsum(sizes // id_dtype.itemsize)])
        return ArrayRecordFile(file, id_dtype, int(bounds[-1]), 0, reader, bounds, copy)

    calls = [partial(open_file, *pair) for pair in zip(files, reader.copies(files), strict=True)]
    return run_in_parallel(calls)


@dataclass(frozen=True, eq=False)
class ArrayRecordFile(RecordFile):
    """ArrayRecord file, in which record i is document i. The package reads `copy` on this host's disk."""

    copy: SourceFile

    has_byte_ranges = False

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a range of ids through the package."""
        start, stop, _ = piece.indices(self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self.find_documents(start, stop)
        # The package reads whole records, so the ends of the range are cut off afterwards.
        ids = np.frombuffer(b"".join(_open_records(self.file, self.copy).read(first, last)), self.dtype)
        begin = int(self.bounds[first])
        if len(ids) != self.bounds[last] - begin:
            raise make_changed_error(self.file)
        return ids[start - begin : stop - begin]

    def reopen(self, file: SourceFile) -> "ArrayRecordFile":
        """Return this part of the file in its present state, which is its own copy on a disk."""
        return replace(self, file=file, copy=file)

    @property
    def encoding(self) -> str:
        """Name of the encoding in the cache of scans."""
        return f"record-{self.dtype.name}"

    @property
    def bytes_fetched_per_token(self) -> int:
        """Zero, because the whole file is fetched at the start."""
        return 0

    @property
    def bytes_copied(self) -> int:
        """Size of the copy on this host's disk, if the source is in a bucket."""
        return self.copy.size_bytes if self.reader.is_remote else 0


class _RecordReader:
    """Open file with a lock, as the package is not thread-safe. Its errors become a DataError that names `file`."""

    def __init__(self, file: File, copy: SourceFile) -> None:
        self._file, self._lock = file, threading.Lock()
        try:
            self._reader = ArrayRecordReader(str(copy.path), _READ_OPTIONS)
            self.num_records: int = self._reader.num_records()
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise self._make_error(error) from error
        if not self.num_records:  # the package also reports no records for a file that was cut
            raise DataError(f"{file}: holds no records: it is cut, or nothing was ever written to it")

    def read(self, first: int, last: int) -> list[bytes]:
        try:
            with self._lock:
                records: list[bytes] = self._reader.read(first, last)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise self._make_error(error) from error
        return records

    def _make_error(self, error: Exception) -> DataError:
        return DataError(f"{self._file}: is not a complete ArrayRecord file ({format_reason(error)})")


@functools.lru_cache(maxsize=OPEN_FILES_MAX)
def _open_records(file: File, copy: SourceFile) -> _RecordReader:
    # The key includes size and modification time, so a replaced file is never read through the old handle.
    if describe_file(copy.path).identity != copy.identity:
        raise make_changed_error(copy)
    return _RecordReader(file, copy)


def _load_sizes(file: File, copy: SourceFile, directory: Path) -> np.ndarray:
    key = cache_key("records", [file])
    record = read_record(directory, key)
    if record is not None:
        try:
            content = (directory / f"{record['sha256']}.sizes").read_bytes()
        except OSError:
            content = b""
        # A truncated or altered entry of the cache counts as a miss, and the file is scanned again.
        is_whole = len(content) == 8 * record["num_records"]
        if is_whole and hashlib.sha256(content).hexdigest() == record["sha256"]:
            return np.frombuffer(content, "<i8")
    sizes = _scan_sizes(file, copy)
    name = hashlib.sha256(sizes.data).hexdigest()
    with warn_unwritable(directory):
        publish(directory / f"{name}.sizes", [sizes.data])
        write_record(directory, key, {"sha256": name, "num_records": len(sizes)})
    return sizes


def _scan_sizes(file: File, copy: SourceFile) -> np.ndarray:
    reader = _open_records(file, copy)
    sizes = np.empty(reader.num_records, "<i8")
    for first in range(0, len(sizes), _SCAN_RECORDS):
        records = reader.read(first, min(first + _SCAN_RECORDS, len(sizes)))
        sizes[first : first + len(records)] = [len(record) for record in records]
    return sizes
