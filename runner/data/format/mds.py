"""MosaicML's MDS: a directory of shards and of `index.json`, as `mosaicml-streaming` writes it. A sample is a document.

A shard is, little-endian: uint32 number n of samples; n + 1 uint32, the byte at which each begins, and the end of the
last; the names, encodings and sizes of the columns as JSON; the samples. (Source: mosaicml-streaming,
`base/format/mds/writer.py`.) Read is one column, `data.options.column`, of one of these encodings:

    bytes            the ids themselves, of `data.options.dtype`
    ndarray:TYPE     an array of one dimension, of any length
    ndarray:TYPE:N   one of N ids in each sample

To open a shard its offsets are read, and all of it only where another column varies in size too. In memory stay 16
bytes a sample. A shard of which there only is one compressed with zstd is unpacked into the cache directory, once.
"""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import zstandard

from runner.data.cache import cache_key, publish
from runner.data.format.document import DocumentFiles, RecordFile
from runner.data.format.mds_column import Column, parse_column
from runner.data.source import SourceFile, describe_file, read_source_file
from runner.data.store import read_bytes
from runner.errors import DataError
from runner.record import Key, check
from runner.storage import JsonObject, parse_json

VERSION = 2
DEFAULT_COLUMN = "tokens"

_OF_COLUMNS = (
    Key("column_names", list, "ascending"),
    Key("column_encodings", list, "of each"),
    Key("column_sizes", list, "bytes of each in a sample; null where they vary"),
)
_OF_SHARD = (
    Key("format", str, "`mds`, where it is one"),
    Key("version", int, "of the format"),
    *_OF_COLUMNS,
    Key("compression", str | None, "a name, or name:level"),
    Key("samples", int, "samples in it"),
    Key("raw_data", dict, "the shard"),
    Key("zip_data", dict | None, "the same, compressed"),
)
_OF_FILE = (Key("basename", str, "its path below the index"), Key("bytes", int, "its size"))


def open_mds(
    indexes: Sequence[SourceFile],
    cache_directory: Path,
    believed: int | None = None,
    *,
    column: str = DEFAULT_COLUMN,
    dtype: str | None = None,
) -> DocumentFiles:
    """Open the shards that these `index.json` name. Raises DataError, with a line that names the file, otherwise.

    `believed` is the vocabulary that the spec names, if it does. `column` holds the ids, `dtype` is their type,
    which a column of bytes does not say.
    """
    parts = []
    for index in indexes:
        for record in _parse_index(index):
            file = _find_file(record, index.path.parent, cache_directory)
            try:
                place = _find_column(record["column_names"], column)
                layout = parse_column(record["column_encodings"][place], tuple(record["column_sizes"]), place, dtype)
            except DataError:
                raise
            except ValueError as error:
                raise DataError(f"{index.path}: column {column}: {error}") from error
            try:
                parts.append(_open_shard(file, record, layout))
            except DataError:
                raise
            except ValueError as error:
                raise DataError(f"{file.path}: {error}") from error
    return DocumentFiles(parts, cache_directory, believed)


@dataclass(frozen=True, eq=False)
class MdsShard(RecordFile):
    """One shard; sample i is document i.

    Attributes:
        column: how the ids lie in a sample.
        samples: the byte at which each sample begins, and the end of the last.
        starts: the byte at which the ids of each begin.
    """

    column: Column
    samples: np.ndarray
    starts: np.ndarray

    def __getitem__(self, piece: slice) -> np.ndarray:
        """See `TokenFile`. What each sample begins with is held against what was found at the start."""
        start, stop, _ = piece.indices(self.num_tokens)
        if start >= stop:
            return np.empty(0, self.dtype)
        first, last = self.documents_in(start, stop)
        bounds, item_bytes = self.bounds[first : last + 1], self.dtype.itemsize
        starts = self.starts[first:last].astype(np.int64)
        lows = starts + np.maximum(start - bounds[:-1], 0) * item_bytes
        highs = starts + (np.minimum(stop, bounds[1:]) - bounds[:-1]) * item_bytes
        is_cut = start > bounds[0]  # the first sample is read from the middle of its ids on
        origin = int(lows[0] if is_cut else self.samples[first])
        content = np.frombuffer(read_bytes(self.file, origin, int(highs[-1])), np.uint8)
        if first + is_cut < last:
            self._check_heads(content, origin, first + is_cut, last)
        pieces = [
            content[low:high] for low, high in zip((lows - origin).tolist(), (highs - origin).tolist(), strict=True)
        ]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(self.dtype)

    def _check_heads(self, content: np.ndarray, origin: int, first: int, last: int) -> None:
        """Raise DataError unless samples `first .. last` begin as they should. `content` begins at byte `origin`."""
        samples, starts = (places[first:last].astype(np.int64) - origin for places in (self.samples, self.starts))
        try:
            self.column.check(content, samples, starts, np.diff(self.bounds[first : last + 1]))
        except ValueError as error:
            raise DataError(f"{self.file.path}: {error}; it is one of samples {first} to {last - 1}") from error

    @property
    def meaning(self) -> str:
        """See `TokenFile`."""
        return f"mds{self.column.place}-{self.dtype.name}"


def _parse_index(index: SourceFile) -> list[JsonObject]:
    """The records of the shards. Raises DataError."""
    raw = read_source_file(index)
    try:
        content = parse_json(raw)
        check(content, (Key("version", int, ""), Key("shards", list, "")), ("version", "shards"))
        for number in {content["version"], *(shard.get("version", VERSION) for shard in content["shards"])}:
            if number != VERSION:
                raise ValueError(f"has version {number!r}, needs {VERSION}")
        for record in content["shards"]:
            _check_record(record)
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{index.path} is no index of MDS: {error}") from error
    shards: list[JsonObject] = content["shards"]
    return shards


def _check_record(record: JsonObject) -> None:
    """Raise ValueError if a shard of the index is not as it should be."""
    if record.get("format") != "mds":
        raise ValueError(f"has a shard of format {str(record.get('format'))[:20]!r}, needs mds")
    check(record, _OF_SHARD, [key.name for key in _OF_SHARD])
    for file in (record["raw_data"], record["zip_data"]):
        if file is None:
            continue
        check(file, _OF_FILE, [key.name for key in _OF_FILE])
        path = PurePosixPath(file["basename"])
        if path.is_absolute() or ".." in path.parts or not path.name:
            raise ValueError(f"{file['basename'][:60]!r} is no file below it")
    names, encodings, sizes = (record[key.name] for key in _OF_COLUMNS)
    if not len(names) == len(encodings) == len(sizes):
        raise ValueError("has a shard with unequal numbers of names, encodings and sizes of columns")
    if not all(isinstance(text, str) for text in (*names, *encodings)):
        raise ValueError("has a shard with a name or an encoding of a column that is no text")
    if not all(size is None or (isinstance(size, int) and size > 0) for size in sizes):
        raise ValueError("has a shard with the size of a column that is no positive integer")


def _find_column(names: Sequence[str], column: str) -> int:
    """Which of the columns is meant. Raises ValueError."""
    if column in names:
        return names.index(column)
    near = difflib.get_close_matches(str(column), names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)[:200]};"
    raise ValueError(f"there is none; {hint} data.options.column names the one that holds the ids")


def _find_file(record: JsonObject, directory: Path, cache_directory: Path) -> SourceFile:
    """The shard, as it was written or as it was unpacked. Raises DataError."""
    raw = record["raw_data"]
    if record["zip_data"] is None or (directory / raw["basename"]).exists():
        file = describe_file(directory / raw["basename"])
    else:
        packed = describe_file(directory / record["zip_data"]["basename"])
        kind = (record["compression"] or "").partition(":")[0]
        if kind != "zstd":
            raise DataError(f"{packed.path}: is compressed by {kind or 'nothing known'}, needs zstd or none")
        file = _unpack(packed, raw["bytes"], cache_directory)
    if file.size_bytes != raw["bytes"]:
        raise DataError(f"{file.path}: {file.size_bytes:,} bytes, needs {raw['bytes']:,}, as its index says: it is cut")
    return file


def _unpack(packed: SourceFile, size_bytes: int, cache_directory: Path) -> SourceFile:
    """The shard of `size_bytes` from the cache, where it is put if it is not there. Raises DataError."""
    path = cache_directory / f"{cache_key('mds', [packed])}.mds"
    if path.exists() and path.stat().st_size == size_bytes:
        return describe_file(path)
    content = read_source_file(packed)
    try:
        if zstandard.frame_content_size(content) not in (size_bytes, -1):
            raise zstandard.ZstdError(f"it does not hold the {size_bytes:,} bytes that its index says")
        publish(path, [zstandard.ZstdDecompressor().decompress(content, max_output_size=size_bytes)])
    except zstandard.ZstdError as error:
        raise DataError(f"{packed.path}: cannot be unpacked: {error}") from error
    except OSError as error:
        raise DataError(
            f"{packed.path}: cannot be unpacked into {cache_directory} ({error.strerror or error}); unpack the shards "
            "beside their index, or set RUNNER_CACHE to a directory that has room"
        ) from error
    return describe_file(path)


def _open_shard(file: SourceFile, record: JsonObject, column: Column) -> MdsShard:
    """Read where the samples lie, and the ids in them. Raises ValueError where that cannot be of one whole shard."""
    samples = _read_samples(file, record)
    at = samples.astype(np.int64)
    if column.is_alone:
        starts, counts = column.locate_by_size(np.diff(at))
    else:
        content = np.frombuffer(read_bytes(file, 0, file.size_bytes), np.uint8)
        starts, counts = column.locate(content, at[:-1])
    starts += at[:-1]
    if (starts + counts * column.dtype.itemsize > at[1:]).any():
        raise ValueError("the ids of a sample reach beyond its end")
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return MdsShard(file, column.dtype, int(bounds[-1]), 0, bounds, column, samples, starts.astype(np.uint32))


def _read_samples(file: SourceFile, record: JsonObject) -> np.ndarray:
    """The byte at which each sample begins, and the end of the last: uint32. Raises ValueError."""
    table_bytes = 4 * (record["samples"] + 2)
    if record["samples"] < 0 or file.size_bytes < table_bytes:
        raise ValueError(f"{file.size_bytes:,} bytes cannot hold {record['samples']:,} samples, as its index says")
    numbers = np.frombuffer(read_bytes(file, 0, table_bytes), "<u4")
    samples: np.ndarray = numbers[1:]
    if numbers[0] != record["samples"]:
        raise ValueError(f"holds {numbers[0]:,} samples, needs {record['samples']:,}, as its index says")
    if samples[0] < table_bytes or samples[-1] != file.size_bytes or (samples[1:] < samples[:-1]).any():
        raise ValueError("its samples do not lie one after the other up to its end: it is damaged")
    columns = parse_json(read_bytes(file, table_bytes, int(samples[0])))
    for key in _OF_COLUMNS:
        if columns.get(key.name) != record[key.name]:
            raise ValueError(f"its own {key.name} are not those of its index: the two are of different data sets")
    return samples
