"""ArrayRecord files of token ids: a record is a document, its bytes are little-endian ids of `data.options.dtype`.

Nothing else is read: no `tf.train.Example`, no pickled or compressed record. The format does not say how long a record
is, so the first start on a host reads the files whole; what it finds, 8 bytes a document, is kept in the cache.
Records are read by the `array_record` package, through its own file handles and never through a mapping. It opens
nothing but paths: of files in a bucket whole copies are kept on this host's disk.
"""

import functools
import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordReader

from runner.data.documents import DocumentFiles, RecordFile, parse_dtype
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
from runner.data.remote import run_in_parallel
from runner.data.source_files import File, SourceFile, describe_file
from runner.errors import DataError, format_reason

SCAN_RECORDS = 256
READ_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # what the package advises for random access


def open_array_record(
    files: Sequence[File], reader: Reader, cache_directory: Path, believed: int | None = None, *, dtype: str
) -> DocumentFiles:
    """Open the files. Raises DataError, with a line that names the file, if one is damaged or holds no whole ids.

    `believed` is the vocabulary that the spec names, if it does; `dtype` names the type of the ids.
    """
    parsed = parse_dtype(dtype)

    def open_file(file: File, copy: SourceFile) -> ArrayRecordFile:
        bounds = _cached_bounds(file, copy, parsed, cache_directory)
        return ArrayRecordFile(file, parsed, int(bounds[-1]), 0, reader, bounds, copy)

    acts = [partial(open_file, *pair) for pair in zip(files, reader.copies(files), strict=True)]
    return DocumentFiles(run_in_parallel(acts), cache_directory, believed)


@dataclass(frozen=True, eq=False)
class ArrayRecordFile(RecordFile):
    """An ArrayRecord file; record i is document i. The package reads `copy`, which lies on this host's disk."""

    copy: SourceFile

    is_ranged = False

    def __getitem__(self, piece: slice) -> np.ndarray:
        """See `TokenFile`."""
        start, stop, _ = piece.indices(self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self.documents_in(start, stop)
        ids = np.frombuffer(b"".join(_open_reader(self.file, self.copy).read(first, last)), self.dtype)
        begin = int(self.bounds[first])
        if len(ids) != self.bounds[last] - begin:
            raise make_changed_error(self.file)
        return ids[start - begin : stop - begin]

    @property
    def meaning(self) -> str:
        """See `TokenFile`."""
        return f"record-{self.dtype.name}"

    @property
    def bytes_fetched_per_token(self) -> int:
        """See `TokenFile`: the whole was fetched at the start."""
        return 0

    @property
    def bytes_copied(self) -> int:
        """See `TokenFile`."""
        return self.copy.size_bytes if self.reader.is_remote else 0


class _Reader:
    """One open file, for one thread at a time; what its package raises comes out as DataError, which names `file`."""

    def __init__(self, file: File, copy: SourceFile) -> None:
        self._file, self._lock = file, threading.Lock()
        try:
            self._reader = ArrayRecordReader(str(copy.path), READ_OPTIONS)
            self.num_records: int = self._reader.num_records()
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise self._damaged(error) from error
        if not self.num_records:  # so says the package of a file that was cut, too
            raise DataError(f"{file}: holds no records: it is cut, or nothing was ever written to it")

    def read(self, first: int, last: int) -> list[bytes]:
        """Records `first .. last`."""
        try:
            with self._lock:
                records: list[bytes] = self._reader.read(first, last)
        except (RuntimeError, ValueError, IndexError, OSError) as error:
            raise self._damaged(error) from error
        return records

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"{self._file}: is no whole ArrayRecord file ({format_reason(error)})")


@functools.lru_cache(maxsize=OPEN_FILES_MAX)
def _open_reader(file: File, copy: SourceFile) -> _Reader:
    """Open the file; keyed by its size and time too, so that a replaced file is never read as the one before."""
    if describe_file(copy.path) != copy:
        raise make_changed_error(copy)
    return _Reader(file, copy)


def _cached_bounds(file: File, copy: SourceFile, dtype: np.dtype, directory: Path) -> np.ndarray:
    """The bounds of the file's documents; from the cache, if the file was scanned before."""
    key = cache_key("records", [file])
    record = read_record(directory, key)
    sizes = None if record is None else _read_sizes(directory, record["sha256"], record["num_records"])
    if sizes is None:
        sizes = _scan_sizes(file, copy)
        name = hashlib.sha256(sizes.data).hexdigest()
        try:
            publish(directory / f"{name}.sizes", [sizes.data])
            write_record(directory, key, {"sha256": name, "num_records": len(sizes)})
        except OSError as error:
            warn_unwritable(directory, error)
    is_odd = sizes % dtype.itemsize != 0
    if is_odd.any():
        odd = int(is_odd.argmax())
        raise DataError(
            f"{file}: record {odd} has {int(sizes[odd])} bytes, no whole number of {dtype.itemsize}-byte "
            f"({dtype.name}) token ids"
        )
    return np.concatenate([[0], np.cumsum(sizes // dtype.itemsize)])


def _read_sizes(directory: Path, name: str, num_records: int) -> np.ndarray | None:
    """The sizes that were kept, or None if they are gone, cut or altered."""
    try:
        content = (directory / f"{name}.sizes").read_bytes()
    except OSError:
        return None
    if len(content) != 8 * num_records or hashlib.sha256(content).hexdigest() != name:
        return None
    return np.frombuffer(content, "<i8")


def _scan_sizes(file: File, copy: SourceFile) -> np.ndarray:
    """The bytes of each record, int64. Reads the file whole."""
    reader = _open_reader(file, copy)
    sizes = np.empty(reader.num_records, "<i8")
    for first in range(0, len(sizes), SCAN_RECORDS):
        records = reader.read(first, min(first + SCAN_RECORDS, len(sizes)))
        sizes[first : first + len(records)] = [len(record) for record in records]
    return sizes
