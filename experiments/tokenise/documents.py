"""From a part of an input file to its documents, one after the other. Knows no tokens.

The work, cut into pieces: a pure function of the files and of `shard_bytes`, never of hosts and cores.
"""

import difflib
import io
import itertools
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import zstandard

from experiments.tokenise.chat import DIALOGUE_KEYS, FORMS, Dialogue, Renderer, parse_dialogue
from experiments.tokenise.inputs import BLOCK_BYTES, InputFile, ObjectFile, read_object
from runner.errors import DataError, RetryableError, format_reason
from runner.spec.imports import import_extra

_CHUNK_BYTES = 1 << 20
_LONGEST_WINDOW_BYTES = 1 << 31  # of .zst files made with --ultra --long=31


Document = bytes | Dialogue


@dataclass(frozen=True)
class InputPart:
    """What is read of one file: bytes `start .. stop` of a .jsonl, row groups of a .parquet, else all of it.

    Lines that begin in the range belong to it. `size_bytes` is how much of the file that is.
    """

    file: InputFile
    size_bytes: int
    start: int | None = None
    stop: int | None = None


@dataclass(frozen=True)
class BadRecord:
    """A line or row without a text."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def fetch(part: InputPart) -> bytes | None:
    """The content of a small file in a bucket; None of any other, which is read as it is needed."""
    if part.file.place is None or part.file.size_bytes > BLOCK_BYTES:
        return None
    return read_object(part.file, 0, part.file.size_bytes)


def documents(
    part: InputPart, content: bytes | None, field: str, renderer: Renderer | None = None
) -> Iterator[Document | BadRecord]:
    """The documents of a part, as UTF-8; of a text file its own bytes. `content` is what `fetch` gave.

    With a `renderer` lines and rows are dialogues.
    Raises `DataError` if the file cannot be read, is damaged, cut short, or has changed since it was resolved.
    """
    part.file.validate_unchanged()
    try:
        with _open(part.file) if content is None else io.BytesIO(content) as file:
            if part.file.form == "text":
                yield file.read()
            elif part.file.form == "jsonl":
                yield from _of_lines(part, file, field, renderer)
            else:
                yield from _of_table(part, file, field, renderer)
    except RetryableError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {part.file.where}: {error.strerror or error}") from error


def _open(file: InputFile) -> BinaryIO:
    return open(file.name, "rb") if file.place is None else io.BufferedReader(ObjectFile(file), _CHUNK_BYTES)


def _of_lines(part: InputPart, file: BinaryIO, field: str, renderer: Renderer | None) -> Iterator[Document | BadRecord]:
    number = 0
    for number, line in enumerate(_lines(part, file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BadRecord(_place(part, number), f"is not JSON ({error})")
            continue
        try:
            found = _text_of(record, field) if renderer is None else _dialogue_of(record, renderer)
        except DataError as error:
            raise DataError(f"{_place(part, number)}: {error}") from error
        yield BadRecord(_place(part, number), found) if isinstance(found, str) else found


def _text_of(record: Any, field: str) -> bytes | str:
    """The text of a line as UTF-8, or what the line lacks."""
    text = record.get(field) if isinstance(record, dict) else None
    if isinstance(text, str):
        return text.encode(errors="replace")  # JSON can hold half a character, which no text can
    return _lack(record, field)


def _dialogue_of(record: Any, renderer: Renderer) -> Dialogue | str:
    """The dialogue of a line or row, or what it lacks. Raises `DataError` for what no template may do."""
    asked = parse_dialogue(record)
    return asked if isinstance(asked, str) else renderer.render(asked)


def _lack(record: Any, field: str) -> str:
    if not isinstance(record, dict):
        return f"is no JSON object with a text {field!r}"
    if field in record:
        return f"{field!r} is no text: {json.dumps(record[field])[:40]}"
    near = difflib.get_close_matches(field, record, n=1)
    hint = f"did you mean config.field: {near[0]}?" if near else f"it has {_some(list(record))}"
    return f"has no {field!r}; {hint}"


def _some(names: list[str]) -> str:
    """The first of them, for a message of one line."""
    return ", ".join(repr(name[:40]) for name in names[:8]) or "none"


def _place(part: InputPart, number: int) -> str:
    """File and line; of a part that does not begin with the file, the lines before it are counted now."""
    if part.start:
        with open(part.file.name, "rb") as file:
            file.seek(part.start - 1)
            file.readline()
            left_bytes = file.tell()
            file.seek(0)
            while left_bytes and (chunk := file.read(min(left_bytes, _CHUNK_BYTES))):
                number += chunk.count(b"\n")
                left_bytes -= len(chunk)
    return f"{part.file.where}:{number}"


def _lines(part: InputPart, file: BinaryIO) -> Iterator[bytes]:
    if part.file.compression:
        yield from _split(_decompress(part.file, file))
        return
    if part.start:
        file.seek(part.start - 1)  # a line that begins right at `start` is this part's
        file.readline()
    while (part.stop is None or file.tell() < part.stop) and (line := file.readline()):
        yield line


def _split(chunks: Iterable[bytes]) -> Iterator[bytes]:
    rest: list[bytes] = []
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        if others:
            yield b"".join(rest)
            yield from others[:-1]
            rest = [others[-1]]
    yield b"".join(rest)


class _Decompressor(Protocol):
    """What `zlib` and `zstandard` have alike."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _decompressor(compression: str) -> _Decompressor:
    if compression == ".gz":
        return zlib.decompressobj(wbits=31)
    return zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW_BYTES).decompressobj()


def _decompress(source: InputFile, file: BinaryIO) -> Iterator[bytes]:
    """The content, of however many frames. Raises `DataError` where the last is cut short."""
    frame, data = _decompressor(source.compression), file.read(_CHUNK_BYTES)
    try:
        while data:
            yield frame.decompress(data)
            data = frame.unused_data if frame.eof else file.read(_CHUNK_BYTES)
            if frame.eof and (data := data or file.read(_CHUNK_BYTES)):
                frame = _decompressor(source.compression)
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{source.where} is no whole {source.compression} file: {error}") from error
    if not frame.eof:
        raise DataError(f"{source.where} is no whole {source.compression} file: it is cut short")


def _of_table(part: InputPart, file: BinaryIO, field: str, renderer: Renderer | None) -> Iterator[Document | BadRecord]:
    arrow = import_extra("pyarrow", "parquet")
    try:
        yield from _texts(part, file, field) if renderer is None else _dialogues(part, file, renderer)
    except (DataError, RetryableError):
        raise
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{part.file.where} is no whole {part.file.form} file: {format_reason(error)}") from error


def _texts(part: InputPart, file: BinaryIO, field: str) -> Iterator[bytes | BadRecord]:
    types, number = import_extra("pyarrow", "parquet").types, 0

    def columns(names: list[str]) -> list[str]:
        _refuse_missing(part, field, names)
        return [field]

    for batch in _batches(part, file, columns):
        column = batch.column(field)
        if not (types.is_string(column.type) or types.is_large_string(column.type)):
            raise DataError(f"{part.file.where}: column {field!r} is {column.type}, needs string")
        for text in column:
            number += 1
            value = text.as_buffer()
            yield value.to_pybytes() if value is not None else BadRecord(_row(part, number), f"{field!r} is null")


def _dialogues(part: InputPart, file: BinaryIO, renderer: Renderer) -> Iterator[Dialogue | BadRecord]:
    """Of each row what its columns of a dialogue hold; a null, however deep, is left out, as a line would."""
    number = 0

    def columns(names: list[str]) -> list[str]:
        found = [name for name in names if name in DIALOGUE_KEYS]
        if not set(found) & set(FORMS):
            raise DataError(
                f"{part.file.where} has no column 'messages', and none 'prompt' and 'completion'; it has {_some(names)}"
            )
        for name in found:
            _refuse_missing(part, name, names)
        return found

    for batch in _batches(part, file, columns):
        wanted = batch.select([name for name in batch.schema.names if name in DIALOGUE_KEYS])
        for row in wanted.to_pylist():
            number += 1
            record = _without_nulls(row)
            try:
                json.dumps(record)
                found = _dialogue_of(record, renderer)
            except TypeError as error:
                found = f"holds what JSON has not ({error})"
            except DataError as error:
                raise DataError(f"{_row(part, number)}: {error}") from error
            yield BadRecord(_row(part, number), found) if isinstance(found, str) else found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _batches(part: InputPart, file: BinaryIO, columns: Callable[[list[str]], list[str]]) -> Iterator[Any]:
    """The record batches of a part, of `columns(all names)` alone where the form allows it."""
    if part.file.form == "parquet":
        table = import_extra("pyarrow.parquet", "parquet").ParquetFile(file)
        names = columns(table.schema_arrow.names)
        groups = None if part.start is None or part.stop is None else list(range(part.start, part.stop))
        yield from table.iter_batches(row_groups=groups, columns=names)
        return
    ipc = import_extra("pyarrow.ipc", "parquet")
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    columns(reader.schema.names)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader


def _refuse_missing(part: InputPart, field: str, names: list[str]) -> None:
    if names.count(field) > 1:
        raise DataError(f"{part.file.where} has {names.count(field)} columns {field!r}, needs one")
    if field not in names:
        near = difflib.get_close_matches(field, names, n=1)
        hint = f"did you mean config.field: {near[0]}?" if near else f"it has {_some(names)}"
        raise DataError(f"{part.file.where} has no column {field!r}; {hint}")


def _row(part: InputPart, number: int) -> str:
    groups = f" of row groups {part.start} to {part.stop}" if part.start is not None else ""
    return f"{part.file.where}, row {number}{groups}"


def row_groups(file: InputFile) -> list[int]:
    """Bytes of each row group of a Parquet file on a disk. Raises `DataError` if it is none."""
    arrow, parquet = import_extra("pyarrow", "parquet"), import_extra("pyarrow.parquet", "parquet")
    try:
        table = parquet.read_metadata(Path(file.name))
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{file.where} is no whole parquet file: {format_reason(error)}") from error
    return [table.row_group(i).total_byte_size for i in range(table.num_row_groups)]


Piece = tuple[InputPart, ...]


def cut_into_pieces(files: Iterable[InputFile], shard_bytes: int) -> list[Piece]:
    """Pieces of about `shard_bytes` of input, in reading order.

    Small files share a piece. A large .jsonl on a disk is cut into ranges, a large .parquet on a disk between its row
    groups; what is compressed, in a bucket, or one document stays whole.
    """
    pieces: list[Piece] = []
    piece: list[InputPart] = []
    size_bytes = 0
    for part in (part for file in files for part in _parts(file, shard_bytes)):
        if piece and size_bytes + part.size_bytes > shard_bytes:
            pieces.append(tuple(piece))
            piece, size_bytes = [], 0
        piece.append(part)
        size_bytes += part.size_bytes
    return [*pieces, tuple(piece)] if piece else pieces


def _parts(file: InputFile, shard_bytes: int) -> Iterator[InputPart]:
    is_large = file.place is None and file.size_bytes > shard_bytes
    if is_large and file.form == "jsonl" and not file.compression:
        num_parts = -(-file.size_bytes // shard_bytes)
        edges = [file.size_bytes * i // num_parts for i in range(num_parts + 1)]
        yield from (InputPart(file, stop - start, start, stop) for start, stop in itertools.pairwise(edges))
    elif is_large and file.form == "parquet":
        yield from _row_group_parts(file, shard_bytes)
    else:
        yield InputPart(file, file.size_bytes)


def _row_group_parts(file: InputFile, shard_bytes: int) -> Iterator[InputPart]:
    start, size_bytes, sizes = 0, 0, row_groups(file)
    for group, group_bytes in enumerate(sizes):
        if size_bytes and size_bytes + group_bytes > shard_bytes:
            yield InputPart(file, size_bytes, start, group)
            start, size_bytes = group, 0
        size_bytes += group_bytes
    if start < len(sizes):
        yield InputPart(file, size_bytes, start, len(sizes))
