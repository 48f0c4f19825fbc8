"""MosaicML's MDS: a directory of shards and `index.json`, as `mosaicml-streaming` writes it. A sample is a document.

One column is read, `data.options.column`, in one of these encodings:

    bytes            the ids themselves, of `data.options.dtype`
    ndarray:TYPE     a 1-D array of any length
    ndarray:TYPE:N   a 1-D array of N ids in each sample

A shard holds, little-endian: uint32 number n of samples; n + 1 uint32, the byte at which each sample begins and the end
of the last; the names, encodings and sizes of the columns as JSON; the samples. (Source: mosaicml-streaming,
`base/format/mds/writer.py`.)

A sample holds, for each column of variable size, in order, its size as uint32; then the values of all columns in that
order. The value of an array of variable shape is a byte, `dimensions << 2 | code of the dimensions' type`; the
dimensions; the elements. (Source: mosaicml-streaming, `base/format/mds/encodings.py`.)

Opening a shard reads its offsets, and the whole shard only if another column has a variable size, too. 16 bytes a
sample stay in memory. A shard that exists only compressed with zstd is decompressed into the cache directory, once.
"""

import difflib
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

import numpy as np
import zstandard

from runner.data.readers import ByteRange, DerivedFile, Reader, cache_key, wrap_parse_errors
from runner.data.source_files import File
from runner.data.token_files import ID_DTYPES, RecordFile, parse_dtype
from runner.errors import DataError
from runner.storage import JsonObject, Key, parse_json, run_in_parallel, validate_record

VERSION = 2
_DEFAULT_COLUMN = "tokens"
# Encodings of the shape of a 1-D array: first byte, bytes of the dimension, smallest and largest dimension.
SHAPES = ((4, 1, 1, 0xFF), (5, 2, 0x100, 0xFFFF), (6, 4, 0x10000, 0xFFFFFFFF))

_COLUMN_KEYS = (
    Key("column_names", list, "names in ascending order"),
    Key("column_encodings", list, "encoding of each column"),
    Key("column_sizes", list, "bytes of each column in a sample; null where they vary"),
)
_SHARD_KEYS = (
    Key("format", str, "`mds`"),
    Key("version", int, "version of the format"),
    *_COLUMN_KEYS,
    Key("compression", str | None, "a name, or name:level"),
    Key("samples", int, "number of samples"),
    Key("raw_data", dict, "file of the shard"),
    Key("zip_data", dict | None, "compressed file of the shard"),
)
_FILE_KEYS = (Key("basename", str, "path below the index"), Key("bytes", int, "size"))


@dataclass(frozen=True)
class _IdColumn:
    """Layout of the column that holds the ids: arithmetic on sizes and bytes."""

    sizes: tuple[int | None, ...]  # bytes of each column in a sample, in order; None where they vary
    place: int
    dtype: np.dtype
    has_shape: bool  # True if a shape stands before the ids

    @property
    def item_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the sizes at the start of a sample."""
        return 4 * sum(size is None for size in self.sizes)

    @property
    def is_only_variable(self) -> bool:
        """True if no other column has a variable size: the size of a sample then determines where its ids are."""
        return all(size is not None for i, size in enumerate(self.sizes) if i != self.place)

    def locate_by_size(self, sample_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the offset of the ids within samples of these sizes, and their numbers. Raises ValueError."""
        assert self.is_only_variable
        value_bytes = sample_bytes - self.head_bytes - sum(s or 0 for i, s in enumerate(self.sizes) if i != self.place)
        value_starts = np.full(len(sample_bytes), self.head_bytes + sum(s or 0 for s in self.sizes[: self.place]))
        own = self.sizes[self.place]
        if own is None:
            _validate("is smaller than its columns", value_bytes >= 0)
        else:
            _validate("has another size than its columns", value_bytes == own)
        return self._locate_ids(value_starts, value_bytes)

    def locate(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the same for samples that begin at the offsets `samples` of `content`, uint8. Raises ValueError."""
        value_starts, value_bytes = self._read_heads(content, samples)
        starts, counts = self._locate_ids(value_starts, value_bytes)
        self._check_shapes(content, value_starts, counts)
        return starts - samples, counts

    def check(self, content: np.ndarray, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError unless the heads of samples match `counts` ids from `starts` on; `content` may end there."""
        value_starts, value_bytes = self._read_heads(content, samples)
        _validate(
            "begins with sizes that are not its own", value_starts + value_bytes == starts + counts * self.item_bytes
        )
        self._check_shapes(content, value_starts, counts)

    def _read_heads(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return offset and size in bytes of this column's value in each sample. Raises ValueError."""
        # A sample begins with the sizes of its variable columns, in the order of the columns.
        heads = iter(_gather(content, samples, self.head_bytes).view("<u4").T.astype(np.int64))
        columns = [next(heads) if size is None else size for size in self.sizes]
        ones = np.ones(len(samples), np.int64)
        return samples + self.head_bytes + sum(columns[: self.place]), columns[self.place] * ones

    def _check_shapes(self, content: np.ndarray, value_starts: np.ndarray, counts: np.ndarray) -> None:
        for first_byte, width, low, high in SHAPES if self.has_shape else ():
            is_such = (low <= counts) & (counts <= high)
            if not is_such.any():
                continue
            shape = _gather(content, value_starts[is_such], 1 + width)
            dimension = np.ascontiguousarray(shape[:, 1:]).view(f"<u{width}")[:, 0]
            _validate("is not an array of one dimension", (shape[:, 0] == first_byte) & (dimension == counts[is_such]))

    def _locate_ids(self, value_starts: np.ndarray, value_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the offsets and numbers of the ids within values of these sizes. Raises ValueError."""
        if not self.has_shape:
            _validate(f"does not hold a whole number of {self.dtype.name} ids", value_bytes % self.dtype.itemsize == 0)
            return value_starts, value_bytes // self.dtype.itemsize
        counts = np.zeros_like(value_bytes)
        skips = np.zeros_like(value_bytes)
        # The number of ids decides how many bytes the dimension takes; only one of the encodings is consistent.
        for _, width, low, high in SHAPES:
            found, rest = np.divmod(value_bytes - 1 - width, self.dtype.itemsize)
            is_such = (rest == 0) & (low <= found) & (found <= high)
            counts[is_such], skips[is_such] = found[is_such], 1 + width
        _validate(f"holds no array of {self.dtype.name} of one dimension", skips != 0)
        return value_starts + skips, counts


def _parse_column(encoding: str, sizes: tuple[int | None, ...], place: int, dtype: str | None) -> _IdColumn:
    """Return the layout of a column; `dtype` is `data.options.dtype`. Raises ValueError if it holds no ids."""
    kind, _, rest = encoding.partition(":")
    if kind == "bytes" and not rest:
        if dtype is None:
            raise ValueError("holds bytes: say which ids they are, as data.options.dtype: int64")
        return _IdColumn(sizes, place, parse_dtype(dtype), has_shape=False)
    name, _, shape = rest.partition(":")
    if kind != "ndarray" or name not in ID_DTYPES:
        raise ValueError(f"is encoded as {encoding[:40]!r}, needs bytes or ndarray of an integer type")
    if dtype is not None:
        raise ValueError(f"holds {name}: leave out data.options.dtype, nothing reads it")
    return _IdColumn(sizes, place, parse_dtype(name), has_shape=not shape)


def _gather(content: np.ndarray, offsets: np.ndarray, count: int) -> np.ndarray:
    """Return `count` bytes from each offset on, of shape (len(offsets), count). Raises ValueError beyond the end."""
    if len(offsets) and offsets.max() + count > len(content):
        raise ValueError("a sample reaches beyond the end of the file")
    return np.ascontiguousarray(content[offsets[:, None] + np.arange(count)])


def _validate(problem: str, is_right: np.ndarray) -> None:
    if not is_right.all():
        raise ValueError(f"a sample {problem}")


@dataclass(frozen=True, eq=False)
class MdsShard(RecordFile):
    """Shard in which sample i is document i."""

    column: _IdColumn
    samples: np.ndarray  # byte at which each sample begins, and the end of the last
    starts: np.ndarray  # byte at which the ids of each sample begin

    def locate(self, start: int, stop: int) -> ByteRange:
        """Return the byte range of the ids, including the heads of the samples that begin in it."""
        _, highs, origin = self._locate_samples(start, stop)
        return ByteRange(self.file, origin, int(highs[-1]))

    def decode(self, content: bytes, start: int, stop: int) -> np.ndarray:
        """Return the ids, after a comparison of each sample's head with what was read at the start."""
        found = np.frombuffer(content, np.uint8)
        lows, highs, origin = self._locate_samples(start, stop)
        first, last = self.find_documents(start, stop)
        first += start > self.bounds[first]  # the head of a sample that is read from its middle on is not there
        if first < last:
            samples, starts = (places[first:last].astype(np.int64) - origin for places in (self.samples, self.starts))
            try:
                self.column.check(found, samples, starts, np.diff(self.bounds[first : last + 1]))
            except ValueError as error:
                raise DataError(f"{self.file}: {error}; it is one of samples {first} to {last - 1}") from error
        # The bytes between the ids of two samples (heads and other columns) are dropped.
        edges = np.stack([lows, highs], axis=1) - origin
        pieces = [found[low:high] for low, high in edges.tolist()]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(self.dtype)

    def _locate_samples(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
        """Return the bytes at which the ids of each sample begin and end, and the byte from which on all are read."""
        first, last = self.find_documents(start, stop)
        bounds, item_bytes = self.bounds[first : last + 1], self.dtype.itemsize
        starts = self.starts[first:last].astype(np.int64)
        lows = starts + np.maximum(start - bounds[:-1], 0) * item_bytes
        highs = starts + (np.minimum(stop, bounds[1:]) - bounds[:-1]) * item_bytes
        is_cut = start > bounds[0]  # the first sample is read from the middle of its ids on
        return lows, highs, int(lows[0] if is_cut else self.samples[first])

    @property
    def encoding(self) -> str:
        """Name of the encoding in the cache of scans."""
        return f"mds{self.column.place}-{self.dtype.name}"


def read_mds(
    indexes: Sequence[File], reader: Reader, *, column: str = _DEFAULT_COLUMN, dtype: str | None = None
) -> list[MdsShard]:
    """Open the shards that these `index.json` name (a `TokenReader`). A column of bytes needs a `dtype`."""
    contents = reader.read([ByteRange(index, 0, index.size_bytes) for index in indexes])
    records = [
        (index, record)
        for index, content in zip(indexes, contents, strict=True)
        for record in _parse_index(index, content)
    ]
    columns = []
    for index, record in records:
        with wrap_parse_errors(f"{index}: column {column}"):
            place = _find_column(record["column_names"], column)
            encoding, sizes = record["column_encodings"][place], tuple(record["column_sizes"])
            columns.append(_parse_column(encoding, sizes, place, dtype))
    files = _find_files(records, reader)
    reader = reader.for_id_width(max((layout.item_bytes for layout in columns), default=1))
    calls = [
        partial(_open_shard, file, record, layout, reader)
        for file, (_, record), layout in zip(files, records, columns, strict=True)
    ]
    return run_in_parallel(calls)


def _parse_index(index: File, raw: bytes) -> list[JsonObject]:
    """Return the records of the shards. Raises DataError."""
    try:
        content = parse_json(raw)
        validate_record(content, (Key("version", int, ""), Key("shards", list, "")), ("version", "shards"))
        _validate_version(content)
        for record in content["shards"]:
            if record.get("format") != "mds":
                raise ValueError(f"has a shard of format {str(record.get('format'))[:20]!r}, needs mds")
            validate_record(record, _SHARD_KEYS, [key.name for key in _SHARD_KEYS])
            _validate_version(record)
            for file in (record["raw_data"], record["zip_data"]):
                if file is None:
                    continue
                validate_record(file, _FILE_KEYS, [key.name for key in _FILE_KEYS])
                # An index from elsewhere must not make the job read files outside its directory.
                path = PurePosixPath(file["basename"])
                if path.is_absolute() or ".." in path.parts or not path.name:
                    raise ValueError(f"{file['basename'][:60]!r} is not a file below it")
            names, encodings, sizes = (record[key.name] for key in _COLUMN_KEYS)
            if not len(names) == len(encodings) == len(sizes):
                raise ValueError("has a shard with unequal numbers of names, encodings and sizes of columns")
            if not all(isinstance(text, str) for text in (*names, *encodings)):
                raise ValueError("has a shard with a name or an encoding of a column that is not a text")
            if not all(size is None or (isinstance(size, int) and size > 0) for size in sizes):
                raise ValueError("has a shard with the size of a column that is not a positive integer")
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{index} is not an index of MDS: {error}") from error
    shards: list[JsonObject] = content["shards"]
    return shards


def _validate_version(record: JsonObject) -> None:
    if record["version"] != VERSION:
        raise ValueError(f"has version {record['version']!r}, needs {VERSION}")


def _find_column(names: Sequence[str], column: str) -> int:
    if column in names:
        return names.index(column)
    near = difflib.get_close_matches(str(column), names, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(names)[:200]};"
    raise ValueError(f"there is none; {hint} data.options.column names the one that holds the ids")


def _find_files(records: Sequence[tuple[File, JsonObject]], reader: Reader) -> list[File]:
    """Return the files of the shards, decompressed into the cache where necessary. Raises DataError."""

    def make_place(index: File, named: JsonObject) -> str:
        return posixpath.join(posixpath.dirname(str(index)), named["basename"])

    raw_places = [make_place(index, record["raw_data"]) for index, record in records]
    packed_places = [make_place(index, record["zip_data"] or record["raw_data"]) for index, record in records]
    # One call for all places is one listing in a bucket.
    found = dict(zip(places := [*raw_places, *packed_places], reader.find(places), strict=True))
    files: dict[str, File] = {}
    unpacked: dict[str, DerivedFile] = {}
    for raw_place, packed_place, (_, record) in zip(raw_places, packed_places, records, strict=True):
        raw, packed, size_bytes = found[raw_place], found[packed_place], record["raw_data"]["bytes"]
        if raw is not None:
            files[raw_place] = raw
        elif packed is None:
            raise DataError(f"{packed_place} is missing: its index names it")
        else:
            kind = (record["compression"] or "").partition(":")[0]
            if kind != "zstd":
                raise DataError(f"{packed}: is compressed by {kind or 'nothing known'}, needs zstd or none")
            name = f"{cache_key('mds', [packed])}.mds"
            unpacked[raw_place] = DerivedFile(packed, name, size_bytes, partial(_unpack, packed, size_bytes, reader))
    files |= dict(zip(unpacked, reader.keep([*unpacked.values()]), strict=True))
    # A truncated shard would otherwise be noticed only in the middle of training.
    for place, (_, record) in zip(raw_places, records, strict=True):
        if (size := files[place].size_bytes) != record["raw_data"]["bytes"]:
            raise DataError(
                f"{place}: {size:,} bytes, needs {record['raw_data']['bytes']:,}, as its index says: it is cut"
            )
    return [files[place] for place in raw_places]


def _unpack(packed: File, size_bytes: int, reader: Reader) -> Iterator[bytes]:
    """Yield the decompressed shard. Raises DataError if it has not `size_bytes`."""
    (content,) = reader.read([ByteRange(packed, 0, packed.size_bytes)])
    try:
        # The size is compared before the memory is allocated; -1 means that the frame does not state it.
        if zstandard.frame_content_size(content) not in (size_bytes, -1):
            raise zstandard.ZstdError(f"it does not hold the {size_bytes:,} bytes that its index says")
        yield zstandard.ZstdDecompressor().decompress(content, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise DataError(f"{packed}: cannot be unpacked: {error}") from error


def _open_shard(file: File, record: JsonObject, column: _IdColumn, reader: Reader) -> MdsShard:
    with wrap_parse_errors(file):
        samples = _read_samples(file, record, reader)
        offsets = samples.astype(np.int64)
        # The offsets suffice to locate the ids, so a start reads only the head of each shard.
        if column.is_only_variable:
            starts, counts = column.locate_by_size(np.diff(offsets))
        else:
            (content,) = reader.read([ByteRange(file, 0, file.size_bytes)])
            starts, counts = column.locate(np.frombuffer(content, np.uint8), offsets[:-1])
        starts += offsets[:-1]
        if (starts + counts * column.dtype.itemsize > offsets[1:]).any():
            raise ValueError("the ids of a sample reach beyond its end")
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return MdsShard(file, column.dtype, int(bounds[-1]), 0, reader, bounds, column, samples, starts.astype(np.uint32))


def _read_samples(file: File, record: JsonObject, reader: Reader) -> np.ndarray:
    """Return the byte at which each sample begins, and the end of the last, as uint32. Raises ValueError."""
    table_bytes = 4 * (record["samples"] + 2)
    if record["samples"] < 0 or file.size_bytes < table_bytes:
        raise ValueError(f"{file.size_bytes:,} bytes cannot hold {record['samples']:,} samples, as its index says")
    (table,) = reader.read([ByteRange(file, 0, table_bytes)])
    numbers = np.frombuffer(table, "<u4")
    samples: np.ndarray = numbers[1:]
    if numbers[0] != record["samples"]:
        raise ValueError(f"holds {numbers[0]:,} samples, needs {record['samples']:,}, as its index says")
    if samples[0] < table_bytes or samples[-1] != file.size_bytes or (samples[1:] < samples[:-1]).any():
        raise ValueError("its samples do not lie one after the other up to its end: it is damaged")
    (described,) = reader.read([ByteRange(file, table_bytes, int(samples[0]))])
    columns = parse_json(described)
    for key in _COLUMN_KEYS:
        if columns.get(key.name) != record[key.name]:
            raise ValueError(f"its own {key.name} are not those of its index: the two are of different data sets")
    return samples
