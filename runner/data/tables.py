"""Parquet and Arrow files of token ids: a row is a document, its ids are a list in the column `data.options.column`.

Columns, each with a list of one value per id:

    input_ids         the ids (or another column, `data.options.column`)
    attention_mask    if it exists: 0 for padding, which is left out, else 1
    loss_mask         with `train_on: answers`: 1 for an id that counts in the loss as a target, else 0
    labels            the same, as transformers writes it: the id itself, or -100 where it does not count
                      (`data.options.mask` names the column if it is neither of these)

The values of a row cannot be read without their page, so the columns are converted once on each host, into a file in
the cache of these parts:

    uint32    ids, and zeros for the padding that was left out
    uint8     marks: 1 for an id that counts in the loss; only with `train_on: answers`
    int64     bounds of the documents, from 0 to the number of ids
"""

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from runner.data.corpus import TrainOn
from runner.data.corpus_index import COMPLETION_DTYPE
from runner.data.readers import ByteRange, DerivedFile, Reader, SeekableStream, cache_key, load_record
from runner.data.source_files import File
from runner.data.token_files import DocumentFile, TokenFile
from runner.errors import DataError, InvalidError, RetryableError, format_reason
from runner.spec.imports import import_extra
from runner.storage import JsonObject

_ID_COLUMN, _PADDING_COLUMN, _MASK_COLUMNS = "input_ids", "attention_mask", ("loss_mask", "labels")
_NO_TARGET = -100
_ID_DTYPE, _BOUNDS_DTYPE = np.dtype("<u4"), np.dtype("<i8")
_BATCH_ROWS = 1024
BLOCK_BYTES = 16 << 20


@dataclass(frozen=True)
class _TableColumns:
    """Names of the columns that are read; None for one that is not."""

    ids: str
    padding: str | None
    mask: str | None

    @property
    def names(self) -> list[str]:
        """All names."""
        return [name for name in (self.ids, self.padding, self.mask) if name is not None]


@dataclass(frozen=True)
class _TableSize:
    """Upper bound of the number of ids in a file, and its number of rows."""

    num_values: int
    num_rows: int

    def list_parts(self, has_marks: bool) -> list[tuple[int, int]]:
        """Return (offset, bytes) of the ids, the marks and the bounds in the converted file."""
        sizes = [
            self.num_values * _ID_DTYPE.itemsize,
            self.num_values * COMPLETION_DTYPE.itemsize * has_marks,
            (self.num_rows + 1) * _BOUNDS_DTYPE.itemsize,
        ]
        return list(zip(itertools.accumulate(sizes[:-1], initial=0), sizes, strict=True))


@dataclass(frozen=True, eq=False)
class TableFile(DocumentFile):
    """Converted file, in which document i is row i of `origin`."""

    origin: File

    @property
    def label(self) -> str:
        """Name for messages."""
        return str(self.origin)


def read_tables(
    files: Sequence[File],
    reader: Reader,
    train_on: TrainOn | None = None,
    default_train_on: TrainOn | None = None,
    *,
    column: str = _ID_COLUMN,
    mask: str | None = None,
) -> list[TableFile]:
    """Open Parquet or Arrow files (a `TokenReader`), and convert those that are not in the cache.

    `mask` is the column that says which ids count in the loss. Files that have one need `train_on`, or its default.
    """
    try:
        import_extra("pyarrow")
    except InvalidError as error:
        raise DataError(f"{files[0]}: {error}") from error
    wanted, tables = [], []
    for file in files:
        names, size = _load_size(file, column, reader)
        columns = _choose_columns(file, names, column, mask, train_on, default_train_on)
        tables.append((file, size, columns.mask is not None))
        key = cache_key(f"table-{sha256(repr(columns).encode()).hexdigest()[:8]}", [file])
        num_bytes = sum(part for _, part in size.list_parts(columns.mask is not None))
        wanted.append(DerivedFile(file, f"{key}.ids", num_bytes, partial(_convert, file, columns, size, reader)))
    reader = reader.for_id_width(_ID_DTYPE.itemsize)
    parts = []
    for converted, (file, size, has_marks) in zip(reader.keep(wanted), tables, strict=True):
        (ids_start, _), (marks_start, _), (bounds_start, num_bytes) = size.list_parts(has_marks)
        (content,) = reader.read([ByteRange(converted, bounds_start, bounds_start + num_bytes)])
        bounds = np.frombuffer(content, _BOUNDS_DTYPE)
        if bounds[0] != 0 or bounds[-1] > size.num_values or (np.diff(bounds) < 0).any():
            raise DataError(f"{converted}, which was made of {file}, is damaged; remove it")
        num_tokens = int(bounds[-1])
        marks = TokenFile(converted, COMPLETION_DTYPE, num_tokens, marks_start, reader) if has_marks else None
        parts.append(TableFile(converted, _ID_DTYPE, num_tokens, ids_start, reader, bounds, file, marks=marks))
    return parts


def _choose_columns(
    file: File,
    names: Sequence[str],
    column: str,
    mask: str | None,
    train_on: TrainOn | None,
    default_train_on: TrainOn | None,
) -> _TableColumns:
    """Return the columns to read. Raises `DataError` if one is missing, or `train_on` does not fit them."""
    found = mask if mask is not None else next((name for name in _MASK_COLUMNS if name in names), None)
    if found is not None and found not in names:
        raise DataError(f"{file}: has no column {found}, which data.options.mask names; it has {_format(names)}")
    if found is not None and (train_on := train_on or default_train_on) is None:
        raise DataError(
            f"{file}: has the column {found}; set data.train_on to answers, so that only the ids that it marks count "
            "in the loss, or to all"
        )
    if found is None and train_on is not None:
        raise DataError(
            f"{file}: data.train_on={train_on}: nothing reads it, there is no column {' or '.join(_MASK_COLUMNS)}; "
            f"leave it out, or name the column in data.options.mask, of {_format(names)}"
        )
    padding = _PADDING_COLUMN if _PADDING_COLUMN in names else None
    return _TableColumns(column, padding, found if train_on == "answers" else None)


def _format(names: Sequence[str]) -> str:
    return ", ".join(names)[:200] or "none"


class _RangeFile(SeekableStream):
    """File or object as a raw stream, read in large blocks. Not thread-safe; `open` makes one that reads in full."""

    @classmethod
    def open(cls, file: File, reader: Reader) -> io.BufferedReader:
        """Return a stream whose reads give as many bytes as requested, as pyarrow needs."""
        return io.BufferedReader(cls(file, reader))

    def __init__(self, file: File, reader: Reader) -> None:
        super().__init__(file.size_bytes)
        self._file, self._reader = file, reader
        self._block, self._content = -1, b""

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read at most to the end of a block, and return the number of bytes. Raises as a `Reader` does."""
        block, offset = divmod(self._position, BLOCK_BYTES)
        start, stop = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._file.size_bytes)
        if start + offset >= stop:
            return 0
        if block != self._block:
            (self._content,), self._block = self._reader.read([ByteRange(self._file, start, stop)]), block
        found = memoryview(self._content)[offset : offset + len(buffer)]
        buffer[: len(found)] = found
        self._position += len(found)
        return len(found)


def _load_size(file: File, column: str, reader: Reader) -> tuple[list[str], _TableSize]:
    key = cache_key(f"table_size-{sha256(column.encode()).hexdigest()[:8]}", [file])
    record = load_record(reader.directory, key, lambda: _read_valid(file, lambda: _measure(file, column, reader)))
    return record["names"], _TableSize(record["num_values"], record["num_rows"])


def _read_valid(file: File, read: Callable[[], Any]) -> Any:
    arrow = import_extra("pyarrow")
    try:
        return read()
    except (InvalidError, RetryableError):
        raise
    # A damaged size may ask for more memory than there is, and a damaged name may be no text.
    except (arrow.ArrowException, OSError, ValueError, MemoryError) as error:
        raise DataError(f"{file}: cannot be read as a Parquet or Arrow file: {format_reason(error)}") from error


def _measure(file: File, column: str, reader: Reader) -> JsonObject:
    if not str(file).endswith(".parquet"):
        names: list[str] = []
        num_values = num_rows = 0
        for batch in _read_batches(file, [], reader):
            names = list(batch.schema.names)
            lengths, _ = _unpack(file, batch, column)
            num_values, num_rows = num_values + int(lengths.sum()), num_rows + len(lengths)
        return {"names": names, "num_values": num_values, "num_rows": num_rows}
    table = import_extra("pyarrow.parquet").ParquetFile(_RangeFile.open(file, reader))
    names, footer = list(table.schema_arrow.names), table.metadata
    _validate_column(file, column, names)
    groups = [footer.row_group(group) for group in range(footer.num_row_groups)]
    # The values of a list also count the empty and the missing lists, so this is an upper bound.
    num_values = sum(
        leaf.num_values
        for group in groups
        for leaf in map(group.column, range(group.num_columns))
        if leaf.path_in_schema.split(".")[0] == column
    )
    return {"names": names, "num_values": num_values, "num_rows": footer.num_rows}


def _read_batches(file: File, columns: list[str], reader: Reader) -> Iterator[Any]:
    """Yield the record batches of a file; only Parquet can leave out the other columns."""
    stream = _RangeFile.open(file, reader)
    if str(file).endswith(".parquet"):
        table = import_extra("pyarrow.parquet").ParquetFile(stream, pre_buffer=False)
        yield from table.iter_batches(_BATCH_ROWS, columns=columns, use_threads=False)
        return
    ipc = import_extra("pyarrow.ipc")
    is_file = stream.read(6) == b"ARROW1"
    stream.seek(0)
    found = ipc.open_file(stream) if is_file else ipc.open_stream(stream)
    yield from (found.get_batch(index) for index in range(found.num_record_batches)) if is_file else found


def _validate_column(file: File, column: str, names: Sequence[str]) -> None:
    if column not in names:
        raise DataError(
            f"{file}: has no column {column}; it has {_format(names)}: data.options.column names that of the ids; text "
            "must be tokenised first (experiments.tokenise)"
        )


def _unpack(file: File, batch: Any, column: str, is_mask: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of each list of a column, and all values as int64; those of a mask may be bools or floats."""
    arrow, compute = import_extra("pyarrow"), import_extra("pyarrow.compute")
    _validate_column(file, column, batch.schema.names)
    lists = batch.column(column)
    lists.validate(full=True)  # Arrow files are mapped as they are: a damaged offset would be followed anywhere
    kind = lists.type
    if arrow.types.is_dictionary(kind):
        lists = lists.dictionary_decode()
    if not any(
        is_kind(lists.type)
        for is_kind in (arrow.types.is_list, arrow.types.is_large_list, arrow.types.is_fixed_size_list)
    ):
        raise DataError(f"{file}: column {column} is {kind}, needs lists of integers")
    lengths = compute.fill_null(compute.list_value_length(lists), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    values = lists.flatten()
    if arrow.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    if values.null_count:
        raise DataError(f"{file}: column {column} has a list with a missing value")
    is_number = arrow.types.is_boolean(values.type) or arrow.types.is_floating(values.type)
    if not (arrow.types.is_integer(values.type) or (is_mask and is_number)):
        raise DataError(f"{file}: column {column} is {kind}, needs lists of integers")
    found = values.cast(arrow.int64()).to_numpy(zero_copy_only=False)  # raises if a float has a fraction
    if len(found) != lengths.sum():
        raise DataError(f"{file}: column {column} has missing lists with values")
    return lengths, found


def _convert(file: File, columns: _TableColumns, size: _TableSize, reader: Reader) -> Iterator[bytes]:
    """Yield the content of the converted file."""
    lengths, marks = [np.zeros(1, np.int64)], []
    num_tokens = num_rows = 0
    batches = _read_batches(file, columns.names, reader)
    while True:
        batch = _read_valid(file, lambda: next(batches, None))
        if batch is None:
            break
        row_lengths, ids, batch_marks = _read_valid(file, partial(_read_rows, file, batch, columns, num_rows))
        lengths.append(row_lengths)
        # A bit for each id, until the ids are written.
        marks.append((len(ids), np.packbits(batch_marks)))
        num_tokens, num_rows = num_tokens + len(ids), num_rows + len(row_lengths)
        yield ids.astype(_ID_DTYPE).tobytes()
    if num_rows != size.num_rows or num_tokens > size.num_values:
        raise DataError(f"{file}: holds {num_rows:,} rows, its own counts say {size.num_rows:,}: it is damaged")
    (_, num_id_bytes), (_, num_mark_bytes), _ = size.list_parts(columns.mask is not None)
    yield from _make_zeros(num_id_bytes - num_tokens * _ID_DTYPE.itemsize)
    if columns.mask is not None:
        for count, packed in marks:
            yield np.unpackbits(packed, count=count).astype(COMPLETION_DTYPE).tobytes()
        yield from _make_zeros(num_mark_bytes - num_tokens)
    reader.check([file])  # a file that was replaced meanwhile may have been read in parts of both
    yield np.cumsum(np.concatenate(lengths)).astype(_BOUNDS_DTYPE).tobytes()


def _make_zeros(num_bytes: int) -> Iterator[bytes]:
    for start in range(0, num_bytes, BLOCK_BYTES):
        yield bytes(min(BLOCK_BYTES, num_bytes - start))


def _read_rows(
    file: File, batch: Any, columns: _TableColumns, first_row: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the lengths of the rows of a batch, their ids, and the mark of each id. Raises `DataError`."""
    lengths, ids = _unpack(file, batch, columns.ids)
    rows = np.repeat(np.arange(len(lengths)), lengths)

    def validate(is_right: np.ndarray, problem: str) -> None:
        if not is_right.all():
            place = int(is_right.argmin())
            raise DataError(f"{file}, row {first_row + int(rows[place]) + 1}: {problem.format(ids[place])}")

    def read_beside(name: str) -> np.ndarray:
        own_lengths, values = _unpack(file, batch, name, is_mask=True)
        if (own_lengths != lengths).any():
            row = int((own_lengths != lengths).argmax())
            raise DataError(
                f"{file}, row {first_row + row + 1}: {name} has {own_lengths[row]:,} values for {lengths[row]:,} ids"
            )
        return values

    validate((ids >= 0) & (ids <= np.iinfo(_ID_DTYPE).max), "{} is no token id")
    marks = np.ones(len(ids), bool)
    if columns.mask is not None:
        values = read_beside(columns.mask)
        if columns.mask == "labels":
            marks = values != _NO_TARGET
            validate(
                ~marks | (values == ids),
                "its label is another id than {}; labels must be the ids themselves, not shifted, or -100",
            )
        else:
            validate((values == 0) | (values == 1), f"{columns.mask} must be 0 or 1")
            marks = values == 1
    if columns.padding is not None:
        values = read_beside(columns.padding)
        validate((values == 0) | (values == 1), f"{columns.padding} must be 0 or 1")
        is_real = values == 1
        lengths = np.bincount(rows[is_real], minlength=len(lengths))
        ids, marks = ids[is_real], marks[is_real]
    return lengths, ids, marks
