"""MosaicML's MDS: a directory of shards and of `index.json`, as `mosaicml-streaming` writes it. A sample is a document.

A shard is, little-endian: uint32 number n of samples; n + 1 uint32, the byte at which each begins, and the end of the
last; the names, encodings and sizes of the columns as JSON; the samples. (Source: mosaicml-streaming,
`base/format/mds/writer.py`.) Read is one column, `data.options.column`, of one of these encodings:

    bytes            the ids themselves, of `data.options.dtype`
    ndarray:TYPE     an array of one dimension, of any length
    ndarray:TYPE:N   one of N ids in each sample

To open a shard its offsets are read, and all of it only where another column varies in size too. In memory stay 16
bytes a sample. A shard of which there only is one compressed with zstd is unpacked into the cache directory, once.

Where the token ids lie in a sample of MDS: arithmetic on sizes and bytes. Reads no file.

A sample is: for each column whose size varies, in their order, its size as uint32; then the values of all columns in
that order. The value of an array whose shape varies is: a byte, dimensions << 2 | code of the dimensions' type; the
dimensions; the elements. All is little-endian. (Source: mosaicml-streaming, `base/format/mds/encodings.py`.)
"""

import difflib
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import zstandard

from runner.data.documents import ID_DTYPES, DocumentFiles, RecordFile, parse_dtype
from runner.data.readers import ByteRange, DerivedFile, Reader, cache_key
from runner.data.remote import run_in_parallel
from runner.data.source_files import File
from runner.errors import DataError
from runner.records import Key, validate_record
from runner.storage import JsonObject, parse_json

# Of an array of one dimension: its first byte, the bytes of its dimension, the smallest and largest that takes so many.
SHAPES = ((4, 1, 1, 0xFF), (5, 2, 0x100, 0xFFFF), (6, 4, 0x10000, 0xFFFFFFFF))


@dataclass(frozen=True)
class IdColumn:
    """The column that holds the ids.

    Attributes:
        sizes: bytes of each column in a sample, in their order; None where they vary.
        place: which of them is this one.
        dtype: of the ids.
        has_shape: whether a shape stands before them.
    """

    sizes: tuple[int | None, ...]
    place: int
    dtype: np.dtype
    has_shape: bool

    @property
    def item_bytes(self) -> int:
        """Bytes of an id."""
        return self.dtype.itemsize

    @property
    def head_bytes(self) -> int:
        """Bytes of the sizes with which a sample begins."""
        return 4 * sum(size is None for size in self.sizes)

    @property
    def is_alone(self) -> bool:
        """Whether no other column varies in size, so that the size of a sample tells where its ids lie."""
        return all(size is not None for i, size in enumerate(self.sizes) if i != self.place)

    def locate_by_size(self, sample_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in each sample of so many bytes the ids begin, and how many they are. Raises ValueError."""
        assert self.is_alone
        value_bytes = sample_bytes - self.head_bytes - sum(s or 0 for i, s in enumerate(self.sizes) if i != self.place)
        value_starts = np.full(len(sample_bytes), self.head_bytes + sum(s or 0 for s in self.sizes[: self.place]))
        own = self.sizes[self.place]
        _refuse("is smaller than its columns" if own is None else "has another size than its columns", value_bytes < 0)
        if own is not None:
            _refuse("has another size than its columns", value_bytes != own)
        return self._inside(value_starts, value_bytes)

    def locate(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The same of the samples that begin at the places `samples` of `content`, uint8. Raises ValueError."""
        value_starts, value_bytes = self._read_heads(content, samples)
        starts, counts = self._inside(value_starts, value_bytes)
        self._check_shapes(content, value_starts, counts)
        return starts - samples, counts

    def check(self, content: np.ndarray, samples: np.ndarray, starts: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError unless the samples begin as they should whose ids, so many, begin at `starts`.

        `content` need not reach further than to the first id of the last.
        """
        value_starts, value_bytes = self._read_heads(content, samples)
        _refuse(
            "begins with sizes that are not its own", value_starts + value_bytes != starts + counts * self.item_bytes
        )
        self._check_shapes(content, value_starts, counts)

    def _read_heads(self, content: np.ndarray, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where in `content` the values of this column begin, and how many bytes they have. Raises ValueError."""
        heads = iter(_gather(content, samples, self.head_bytes).view("<u4").T.astype(np.int64))
        columns = [next(heads) if size is None else size for size in self.sizes]
        ones = np.ones(len(samples), np.int64)
        return samples + self.head_bytes + sum(columns[: self.place]), columns[self.place] * ones

    def _check_shapes(self, content: np.ndarray, value_starts: np.ndarray, counts: np.ndarray) -> None:
        """Raise ValueError if a value is no array of one dimension of so many ids."""
        for first_byte, width, low, high in SHAPES if self.has_shape else ():
            is_such = (low <= counts) & (counts <= high)
            if not is_such.any():
                continue
            shape = _gather(content, value_starts[is_such], 1 + width)
            dimension = np.ascontiguousarray(shape[:, 1:]).view(f"<u{width}")[:, 0]
            _refuse("is no array of one dimension", (shape[:, 0] != first_byte) | (dimension != counts[is_such]))

    def _inside(self, value_starts: np.ndarray, value_bytes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The starts and counts of the ids in values of so many bytes. Raises ValueError."""
        if not self.has_shape:
            _refuse(f"holds no whole number of {self.dtype.name} ids", value_bytes % self.dtype.itemsize != 0)
            return value_starts, value_bytes // self.dtype.itemsize
        counts = np.zeros_like(value_bytes)
        skips = np.zeros_like(value_bytes)
        for _, width, low, high in SHAPES:
            found, rest = np.divmod(value_bytes - 1 - width, self.dtype.itemsize)
            is_such = (rest == 0) & (low <= found) & (found <= high)
            counts[is_such], skips[is_such] = found[is_such], 1 + width
        _refuse(f"holds no array of {self.dtype.name} of one dimension", skips == 0)
        return value_starts + skips, counts


def parse_column(encoding: str, sizes: tuple[int | None, ...], place: int, dtype: str | None) -> IdColumn:
    """The column of this encoding; `dtype` is what the spec says of its ids. Raises ValueError if it holds none."""
    kind, _, rest = encoding.partition(":")
    if kind == "bytes" and not rest:
        if dtype is None:
            raise ValueError("holds bytes: say which ids they are, as data.options.dtype: int64")
        return IdColumn(sizes, place, parse_dtype(dtype), has_shape=False)
    name, _, shape = rest.partition(":")
    if kind != "ndarray" or name not in ID_DTYPES:
        raise ValueError(f"is encoded as {encoding[:40]!r}, needs bytes or ndarray of an integer type")
    if dtype is not None:
        raise ValueError(f"holds {name}: leave out data.options.dtype, nothing reads it")
    return IdColumn(sizes, place, parse_dtype(name), has_shape=not shape)


def _gather(content: np.ndarray, places: np.ndarray, count: int) -> np.ndarray:
    """`count` bytes from each place on, (len(places), count). Raises ValueError if one is beyond the end."""
    if len(places) and places.max() + count > len(content):
        raise ValueError("a sample reaches beyond the end of the file")
    return np.ascontiguousarray(content[places[:, None] + np.arange(count)])


def _refuse(what: str, is_wrong: np.ndarray) -> None:
    if is_wrong.any():
        raise ValueError(f"a sample {what}")


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
    indexes: Sequence[File],
    reader: Reader,
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
    contents = reader.read([ByteRange(index, 0, index.size_bytes) for index in indexes])
    records = [
        (index, record)
        for index, content in zip(indexes, contents, strict=True)
        for record in _parse_index(index, content)
    ]
    layouts = [_parse_layout(index, record, column, dtype) for index, record in records]
    files = _find_files(records, reader)
    reader = reader.for_id_width(max((layout.item_bytes for layout in layouts), default=1))
    acts = [
        partial(_open_shard, file, record, layout, reader)
        for file, (_, record), layout in zip(files, records, layouts, strict=True)
    ]
    return DocumentFiles(run_in_parallel(acts), cache_directory, believed)


def _parse_layout(index: File, record: JsonObject, column: str, dtype: str | None) -> IdColumn:
    """Where the ids lie in the samples of a shard. Raises DataError."""
    try:
        place = _find_column(record["column_names"], column)
        return parse_column(record["column_encodings"][place], tuple(record["column_sizes"]), place, dtype)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{index}: column {column}: {error}") from error


@dataclass(frozen=True, eq=False)
class MdsShard(RecordFile):
    """One shard; sample i is document i.

    Attributes:
        column: how the ids lie in a sample.
        samples: the byte at which each sample begins, and the end of the last.
        starts: the byte at which the ids of each begin.
    """

    column: IdColumn
    samples: np.ndarray
    starts: np.ndarray

    def locate(self, start: int, stop: int) -> ByteRange:
        """See `TokenFile`."""
        _, highs, origin = self._places(start, stop)
        return ByteRange(self.file, origin, int(highs[-1]))

    def decode(self, content: bytes, start: int, stop: int) -> np.ndarray:
        """See `TokenFile`. What each sample begins with is held against what was found at the start."""
        found = np.frombuffer(content, np.uint8)
        lows, highs, origin = self._places(start, stop)
        first, last = self.documents_in(start, stop)
        first += start > self.bounds[first]
        if first < last:
            self._check_heads(found, origin, first, last)
        edges = np.stack([lows, highs], axis=1) - origin
        pieces = [found[low:high] for low, high in edges.tolist()]
        return (pieces[0] if len(pieces) == 1 else np.concatenate(pieces)).view(self.dtype)

    def _places(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, int]:
        """The bytes at which the ids of each sample begin and end, and the byte from which on all of them is read."""
        first, last = self.documents_in(start, stop)
        bounds, item_bytes = self.bounds[first : last + 1], self.dtype.itemsize
        starts = self.starts[first:last].astype(np.int64)
        lows = starts + np.maximum(start - bounds[:-1], 0) * item_bytes
        highs = starts + (np.minimum(stop, bounds[1:]) - bounds[:-1]) * item_bytes
        is_cut = start > bounds[0]  # the first sample is read from the middle of its ids on
        return lows, highs, int(lows[0] if is_cut else self.samples[first])

    def _check_heads(self, content: np.ndarray, origin: int, first: int, last: int) -> None:
        """Raise DataError unless samples `first .. last` begin as they should. `content` begins at byte `origin`."""
        samples, starts = (places[first:last].astype(np.int64) - origin for places in (self.samples, self.starts))
        try:
            self.column.check(content, samples, starts, np.diff(self.bounds[first : last + 1]))
        except ValueError as error:
            raise DataError(f"{self.file}: {error}; it is one of samples {first} to {last - 1}") from error

    @property
    def meaning(self) -> str:
        """See `TokenFile`."""
        return f"mds{self.column.place}-{self.dtype.name}"


def _parse_index(index: File, raw: bytes) -> list[JsonObject]:
    """The records of the shards. Raises DataError."""
    try:
        content = parse_json(raw)
        validate_record(content, (Key("version", int, ""), Key("shards", list, "")), ("version", "shards"))
        for number in {content["version"], *(shard.get("version", VERSION) for shard in content["shards"])}:
            if number != VERSION:
                raise ValueError(f"has version {number!r}, needs {VERSION}")
        for record in content["shards"]:
            _check_record(record)
    except (ValueError, AttributeError, TypeError) as error:
        raise DataError(f"{index} is no index of MDS: {error}") from error
    shards: list[JsonObject] = content["shards"]
    return shards


def _check_record(record: JsonObject) -> None:
    """Raise ValueError if a shard of the index is not as it should be."""
    if record.get("format") != "mds":
        raise ValueError(f"has a shard of format {str(record.get('format'))[:20]!r}, needs mds")
    validate_record(record, _OF_SHARD, [key.name for key in _OF_SHARD])
    for file in (record["raw_data"], record["zip_data"]):
        if file is None:
            continue
        validate_record(file, _OF_FILE, [key.name for key in _OF_FILE])
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


def _find_files(records: Sequence[tuple[File, JsonObject]], reader: Reader) -> list[File]:
    """The shards, as they were written or as they were unpacked. Raises DataError."""
    raw_places = [_place(index, record["raw_data"]) for index, record in records]
    packed_places = [_place(index, record["zip_data"] or record["raw_data"]) for index, record in records]
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
    for place, (_, record) in zip(raw_places, records, strict=True):
        if (size := files[place].size_bytes) != record["raw_data"]["bytes"]:
            raise DataError(
                f"{place}: {size:,} bytes, needs {record['raw_data']['bytes']:,}, as its index says: it is cut"
            )
    return [files[place] for place in raw_places]


def _place(index: File, named: JsonObject) -> str:
    """The path or URL of a file that an index names."""
    return posixpath.join(posixpath.dirname(str(index)), named["basename"])


def _unpack(packed: File, size_bytes: int, reader: Reader) -> Iterator[bytes]:
    """The `size_bytes` of a shard. Raises DataError if it does not hold them."""
    (content,) = reader.read([ByteRange(packed, 0, packed.size_bytes)])
    try:
        if zstandard.frame_content_size(content) not in (size_bytes, -1):
            raise zstandard.ZstdError(f"it does not hold the {size_bytes:,} bytes that its index says")
        yield zstandard.ZstdDecompressor().decompress(content, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise DataError(f"{packed}: cannot be unpacked: {error}") from error


def _open_shard(file: File, record: JsonObject, column: IdColumn, reader: Reader) -> MdsShard:
    """Read where the samples lie, and the ids in them. Raises DataError where that cannot be of one whole shard."""
    try:
        samples = _read_samples(file, record, reader)
        at = samples.astype(np.int64)
        if column.is_alone:
            starts, counts = column.locate_by_size(np.diff(at))
        else:
            (content,) = reader.read([ByteRange(file, 0, file.size_bytes)])
            starts, counts = column.locate(np.frombuffer(content, np.uint8), at[:-1])
        starts += at[:-1]
        if (starts + counts * column.dtype.itemsize > at[1:]).any():
            raise ValueError("the ids of a sample reach beyond its end")
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file}: {error}") from error
    bounds = np.concatenate([[0], np.cumsum(counts)])
    return MdsShard(file, column.dtype, int(bounds[-1]), 0, reader, bounds, column, samples, starts.astype(np.uint32))


def _read_samples(file: File, record: JsonObject, reader: Reader) -> np.ndarray:
    """The byte at which each sample begins, and the end of the last: uint32. Raises ValueError."""
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
    for key in _OF_COLUMNS:
        if columns.get(key.name) != record[key.name]:
            raise ValueError(f"its own {key.name} are not those of its index: the two are of different data sets")
    return samples
