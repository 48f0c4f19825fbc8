"""Documents of input files, and the split of the input into pieces.

A piece is the unit of work. The split is a pure function of the files and of `shard_bytes`, independent of the number
of hosts and cores.
"""

import bz2
import contextlib
import difflib
import hashlib
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import zstandard

from experiments.tokenise.config import ChatConfig
from experiments.tokenise.inputs import BLOCK_BYTES, InputFile, ObjectFile, read_file, read_object
from runner.data.chat import DIALOGUE_KEYS, FORMS, ChatTemplate, Dialogue, Renderer, parse_dialogue, read_template
from runner.errors import DataError, RetryableError, format_reason
from runner.spec.imports import import_extra

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 12
_LONGEST_WINDOW_BYTES = 1 << 31  # the largest window of zstd, used by --ultra --long=31


Document = bytes | Dialogue  # A document is UTF-8 text, or a dialogue.


@dataclass(frozen=True)
class InputPart:
    """Part of an input file."""

    file: InputFile
    size_bytes: int
    # First byte of a .jsonl range, or first row group of a .parquet; None for the whole file. A line belongs to the
    # range in which it begins.
    start: int | None = None
    stop: int | None = None


Piece = tuple[InputPart, ...]
_PARTS_PER_PIECE = 16  # of a source that is shuffled


def shuffle_indices(size: int, seed: int, *place: int) -> list[int]:
    """Return the numbers below `size` in an order that `seed` and `place` determine, the same in every version.

    NumPy promises this of the raw values of a bit generator, and not of its `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, *place])).random_raw(size)
    return [int(index) for index in np.argsort(keys, kind="stable")]


class DocumentSet:
    """Set of documents: a bit for each document of the source."""

    def __init__(self, counts: Sequence[int]) -> None:
        """Make an empty set. `counts` are the numbers of documents of each piece."""
        self.counts = np.array(counts, np.int64)
        self._starts = np.cumsum([0, *counts])
        self.bits = np.zeros(-(-int(self._starts[-1]) // 8), np.uint8)

    def add(self, pieces: np.ndarray, numbers: np.ndarray) -> None:
        """Add documents, given by arrays of their pieces and of their numbers in them."""
        places = self._starts[pieces] + numbers
        np.bitwise_or.at(self.bits, places // 8, np.left_shift(1, places % 8).astype(np.uint8))

    def contains(self, piece: int, number: int) -> bool:
        """Return True if a document is in the set."""
        place = int(self._starts[piece]) + number
        return bool(self.bits[place // 8] >> (place % 8) & 1)


@dataclass(frozen=True)
class BadRecord:
    """Line or row without a usable text."""

    where: str
    reason: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


def encode_document(document: Document) -> bytes:
    """Return bytes that differ for documents with different tokens."""
    # Two dialogues with equal text may differ in their completions.
    return f"{document.completions}\0{document.text}".encode() if isinstance(document, Dialogue) else document


class DocumentsDigest:
    """Digest of the documents of a piece, which tells later whether its files still have them."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, document: Document) -> None:
        """Add the next document."""
        content = encode_document(document)
        self._hash.update(len(content).to_bytes(8, "little"))
        self._hash.update(content)

    def hexdigest(self) -> str:
        """Return the digest of the documents so far."""
        return self._hash.hexdigest()


def fetch_small(part: InputPart) -> bytes | None:
    """Return the content of a small file in a bucket, or None for any other file, which is streamed later."""
    if part.file.bucket_url is None or part.file.size_bytes > BLOCK_BYTES:
        return None
    return read_object(part.file, 0, part.file.size_bytes)


def read_documents(
    part: InputPart, content: bytes | None, field: str, renderer: Renderer | None = None
) -> Iterator[Document | BadRecord]:
    """Yield the documents of a part, and a `BadRecord` for each line or row without one.

    `content` is the result of `fetch_small`. With a renderer lines and rows are dialogues, else `field` is the key or
    column of the text.

    Raises:
        DataError: the file cannot be read, is damaged or truncated, or has changed since the source was resolved.
    """
    for number, found in _read_records(part, content, field, renderer):
        yield BadRecord(_format_place(part, number), found) if isinstance(found, str) else found


def find_documents(piece: Piece, wanted: Sequence[int], field: str, renderer: Renderer | None = None) -> list[str]:
    """Return the locations of documents of a piece, such as `file:line`, by their ascending numbers in it from 0.

    Reads the piece again, because locations are needed only for messages and are not kept.

    Raises:
        DataError: as `read_documents`.
    """
    places: list[str] = []
    index, left = 0, iter(wanted)
    target = next(left, None)
    for part in piece:
        for number, found in _read_records(part, fetch_small(part), field, renderer):
            if target is None:
                return places
            if isinstance(found, str):
                continue
            if index == target:
                places.append(_format_place(part, number))
                target = next(left, None)
            index += 1
    return places


def _read_records(
    part: InputPart, content: bytes | None, field: str, renderer: Renderer | None
) -> Iterator[tuple[int, Document | str]]:
    """Yield the number of each line or row, from 1, with its document or a description of its problem."""
    # The split into pieces was made for the size and version that the file had at the start.
    part.file.validate_unchanged()
    try:
        if content is not None:
            opened: BinaryIO = io.BytesIO(content)
        elif part.file.bucket_url is None:
            opened = open(part.file.name, "rb")  # noqa: SIM115 - closed by the next statement
        else:
            opened = io.BufferedReader(ObjectFile(part.file), _CHUNK_BYTES)
        with opened as file:
            if part.file.format == "text":
                yield 1, file.read()
            elif part.file.format == "jsonl":
                yield from _read_jsonl(part, file, field, renderer)
            else:
                yield from _read_table(part, file, field, renderer)
    except RetryableError:
        raise
    except OSError as error:
        raise DataError(f"cannot read {part.file.where}: {error.strerror or error}") from error


def _read_jsonl(
    part: InputPart, file: BinaryIO, field: str, renderer: Renderer | None
) -> Iterator[tuple[int, Document | str]]:
    for number, line in enumerate(_read_lines(part, file), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield number, f"is not JSON ({error})"
            continue
        try:
            yield number, _extract_text(record, field) if renderer is None else _render(record, renderer)
        except DataError as error:
            raise DataError(f"{_format_place(part, number)}: {error}") from error


def _validate_lines(part: InputPart, head: bytes) -> None:
    """Raise `DataError` if a file that begins with `head` is one JSON array, which would be read into memory whole."""
    if not part.start and head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"[":
        raise DataError(
            f"{part.file.where} is one JSON array; needs a JSON object on each line, which jq -c '.[]' makes of it"
        )


def _extract_text(record: Any, field: str) -> bytes | str:
    """Return the text of a line as UTF-8 bytes, or a string with the problem of the line."""
    if not isinstance(record, dict):
        return f"is not a JSON object with a string {field!r}"
    if isinstance(text := record.get(field), str):
        return text.encode(errors="replace")  # JSON can hold lone surrogates, which UTF-8 cannot.
    if field in record:
        return f"{field!r} is not a string: {json.dumps(record[field])[:40]}"
    near = difflib.get_close_matches(field, record, n=1)
    hint = (
        f"did you mean field: {near[0]}?" if near else f"it has {_format_names(list(record))}; set field to one of them"
    )
    return f"has no {field!r}; {hint}"


def _render(record: Any, renderer: Renderer) -> Dialogue | str:
    """Return the dialogue of a line or row, or a string with its problem. Raises what `Renderer.render` raises."""
    parsed = parse_dialogue(record)
    return parsed if isinstance(parsed, str) else renderer.render(parsed)


def _format_names(names: list[str]) -> str:
    return ", ".join(repr(name[:40]) for name in names[:8]) or "none"


def _format_place(part: InputPart, number: int) -> str:
    """Format the place of line or row `number` of a part: `file:line`, or the file and the row.

    For a part that does not begin at the start of its file, the lines before it are counted here, for the message.
    """
    if part.file.format == "text":
        return part.file.where
    if part.file.format != "jsonl":
        groups = f" of row groups {part.start} to {part.stop}" if part.start is not None else ""
        return f"{part.file.where}, row {number}{groups}"
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


def _read_lines(part: InputPart, file: BinaryIO) -> Iterator[bytes]:
    if part.file.compression:
        rest: list[bytes] = []
        chunks = _decompress(part.file, file)
        head = next(chunks, b"")
        _validate_lines(part, head)
        for chunk in itertools.chain([head], chunks):
            # `rest` collects the parts of a line that spans chunks, which is joined once: quadratic time otherwise.
            first, *others = chunk.split(b"\n")
            rest.append(first)
            if others:
                yield b"".join(rest)
                yield from others[:-1]
                rest = [others[-1]]
        yield b"".join(rest)
        return
    _validate_lines(part, file.read(_HEAD_BYTES))
    file.seek(0)
    if part.start:
        # Seek one byte back: a line that begins exactly at `start` belongs to this part and must not be skipped.
        file.seek(part.start - 1)
        file.readline()
    while (part.stop is None or file.tell() < part.stop) and (line := file.readline()):
        yield line


class _Decompressor(Protocol):
    """Common interface of the decompressors of `zlib`, `bz2`, `lzma` and `zstandard`."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _make_decompressor(compression: str) -> _Decompressor:
    if compression == ".gz":
        return zlib.decompressobj(wbits=31)
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        return lzma.LZMADecompressor()
    return zstandard.ZstdDecompressor(max_window_size=_LONGEST_WINDOW_BYTES).decompressobj()


def _decompress(source: InputFile, file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of any number of concatenated frames, with padding behind them where a format has it.

    Raises `DataError` if the last frame is truncated, or anything else follows it.
    """
    frame, data = _make_decompressor(source.compression), file.read(_CHUNK_BYTES)
    try:
        while data:
            yield frame.decompress(data)
            if not frame.eof:
                data = file.read(_CHUNK_BYTES)
            elif data := _skip_padding(source.compression, frame.unused_data, file):
                frame = _make_decompressor(source.compression)
    except RetryableError:
        raise
    except (zlib.error, lzma.LZMAError, zstandard.ZstdError, OSError, EOFError) as error:
        raise DataError(f"{source.where} is not a valid {source.compression} file: {error}") from error
    if not frame.eof:
        raise DataError(f"{source.where} is not a valid {source.compression} file: it is truncated")


def _skip_padding(compression: str, data: bytes, file: BinaryIO) -> bytes:
    """Return what follows the zero bytes behind a frame, from `data` or else from the file; nothing at its end.

    Tapes and file systems pad to whole blocks. Readers of gzip and bzip2 ignore any number of zeros, those of xz a
    multiple of four, and those of zstd none.
    """
    num_zeros = 0
    while data := data or file.read(_CHUNK_BYTES):
        rest = data if compression == ".zst" else data.lstrip(b"\0")
        num_zeros += len(data) - len(rest)
        if data := rest:
            break
    if compression == ".xz" and num_zeros % 4:
        raise EOFError(f"its padding has {num_zeros:,} bytes, needs a multiple of 4")
    return data


def _read_table(
    part: InputPart, file: BinaryIO, field: str, renderer: Renderer | None
) -> Iterator[tuple[int, Document | str]]:
    arrow = import_extra("pyarrow")
    try:
        yield from _read_texts(part, file, field) if renderer is None else _read_dialogues(part, file, renderer)
    except (DataError, RetryableError):
        raise
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{part.file.where} is not a valid {part.file.format} file: {format_reason(error)}") from error


def _read_texts(part: InputPart, file: BinaryIO, field: str) -> Iterator[tuple[int, bytes | str]]:
    number = 0

    def select(names: list[str]) -> list[str]:
        _validate_column(part, field, names)
        return [field]

    for batch in _read_batches(part, file, select):
        for text in _cast_to_bytes(part, field, batch.column(field)):
            number += 1
            # The column holds UTF-8 already, which is what a tokenizer takes.
            value = text.as_buffer()
            yield number, value.to_pybytes() if value is not None else f"{field!r} is null"


def _cast_to_bytes(part: InputPart, field: str, column: Any) -> Any:
    """Return a column of text in any of Arrow's encodings as `large_binary`, which has no limit of 2 GiB."""
    arrow = import_extra("pyarrow")
    kind, text = column.type, ("string", "large_string", "string_view", "binary", "large_binary", "binary_view", "null")
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
        column = column.cast(kind)
    if str(kind) not in text:
        raise DataError(f"{part.file.where}: column {field!r} is {column.type}, needs string")
    return column.cast(arrow.large_binary())


def _read_dialogues(part: InputPart, file: BinaryIO, renderer: Renderer) -> Iterator[tuple[int, Dialogue | str]]:
    """Yield the dialogues in the rows of a table. Nulls at any depth are dropped, as a JSON line would omit them."""
    number = 0

    def select(names: list[str]) -> list[str]:
        found = [name for name in names if name in DIALOGUE_KEYS]
        if not set(found) & set(FORMS):
            raise DataError(
                f"{part.file.where} has no column 'messages', and none 'prompt' and 'completion'; it has "
                f"{_format_names(names)}"
            )
        for name in found:
            _validate_column(part, name, names)
        return found

    for batch in _read_batches(part, file, select):
        wanted = batch.select([name for name in batch.schema.names if name in DIALOGUE_KEYS])
        for row in wanted.to_pylist():
            number += 1
            record = _drop_nulls(row)
            try:
                json.dumps(record)  # A template may only see what a .jsonl file could hold, such as no dates or bytes.
                yield number, _render(record, renderer)
            except TypeError as error:
                yield number, f"holds a value that JSON does not have ({error})"
            except DataError as error:
                raise DataError(f"{_format_place(part, number)}: {error}") from error


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_batches(part: InputPart, file: BinaryIO, select: Callable[[list[str]], list[str]]) -> Iterator[Any]:
    """Yield the record batches of a part.

    `select` gets the names of all columns and returns those to read; only Parquet can leave out the others.
    """
    if part.file.format == "parquet":
        table = import_extra("pyarrow.parquet").ParquetFile(file)
        names = select(table.schema_arrow.names)
        groups = None if part.start is None or part.stop is None else list(range(part.start, part.stop))
        yield from table.iter_batches(row_groups=groups, columns=names)
        return
    ipc = import_extra("pyarrow.ipc")
    # Arrow has a file format with a footer and a stream format without; both use the suffix `.arrow`.
    is_file = file.read(6) == b"ARROW1"
    file.seek(0)
    reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
    select(reader.schema.names)
    yield from (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader


def _validate_column(part: InputPart, field: str, names: list[str]) -> None:
    """Raise `DataError` unless exactly one column has the name `field`."""
    if names.count(field) > 1:
        raise DataError(f"{part.file.where} has {names.count(field)} columns {field!r}, needs one")
    if field not in names:
        near = difflib.get_close_matches(field, names, n=1)
        hint = f"did you mean field: {near[0]}?" if near else f"it has {_format_names(names)}; set field to one of them"
        raise DataError(f"{part.file.where} has no column {field!r}; {hint}")


def cut_into_pieces(files: Iterable[InputFile], shard_bytes: int, seed: int | None = None) -> list[Piece]:
    """Return pieces of about `shard_bytes` of input, in reading order, or of random parts of the source.

    Small files share a piece. A large local .jsonl is split into byte ranges, and a large local .parquet between its
    row groups. Compressed files, files in buckets and text files stay whole.

    With a seed parts are smaller, and it determines their order.

    Raises:
        DataError: a large file is not a valid Parquet file.
    """
    pieces: list[Piece] = []
    piece: list[InputPart] = []
    size_bytes = 0
    part_bytes = shard_bytes if seed is None else max(1, shard_bytes // _PARTS_PER_PIECE)
    parts = [part for file in files for part in _split_file(file, part_bytes)]
    order = range(len(parts)) if seed is None else shuffle_indices(len(parts), seed)
    for part in (parts[index] for index in order):
        if piece and size_bytes + part.size_bytes > shard_bytes:
            pieces.append(tuple(piece))
            piece, size_bytes = [], 0
        piece.append(part)
        size_bytes += part.size_bytes
    return [*pieces, tuple(piece)] if piece else pieces


def _split_file(file: InputFile, part_bytes: int) -> Iterator[InputPart]:
    is_large = file.bucket_url is None and file.size_bytes > part_bytes
    if is_large and file.format == "jsonl" and not file.compression:
        num_parts = -(-file.size_bytes // part_bytes)
        # Edges need not fall between lines: a line belongs to the range in which it begins.
        edges = [file.size_bytes * i // num_parts for i in range(num_parts + 1)]
        yield from (InputPart(file, stop - start, start, stop) for start, stop in itertools.pairwise(edges))
    # Only the footer is read here, with the sizes of the row groups.
    elif is_large and file.format == "parquet":
        arrow, parquet = import_extra("pyarrow"), import_extra("pyarrow.parquet")
        try:
            table = parquet.read_metadata(Path(file.name))
        except (arrow.ArrowException, OSError) as error:
            raise DataError(f"{file.where} is not a valid parquet file: {format_reason(error)}") from error
        start, size_bytes = 0, 0
        for group in range(table.num_row_groups):
            # The size without compression, which is closer to the work and to the tokens than the size on disk.
            group_bytes = table.row_group(group).total_byte_size
            if size_bytes and size_bytes + group_bytes > part_bytes:
                yield InputPart(file, size_bytes, start, group)
                start, size_bytes = group, 0
            size_bytes += group_bytes
        if start < table.num_row_groups:
            yield InputPart(file, size_bytes, start, table.num_row_groups)
    else:
        yield InputPart(file, file.size_bytes)


# Dialogues.


@dataclass(frozen=True)
class ChatReader:
    """Template of dialogues, their maximum number of tokens, and whether longer ones are cut or dropped."""

    template: ChatTemplate | None
    max_tokens: int | None
    cuts_longer: bool


def load_chat(config: ChatConfig) -> ChatReader:
    """Read and compile the template. Raises `DataError` if it cannot be used."""
    template = None if config.template is None else read_template(config.template, read_file)
    # Compiled once here, so that a bad template is found before any data is read.
    Renderer(template).close()
    return ChatReader(template, config.max_tokens, config.longer == "cut")


def start_renderer(chat: ChatReader | None) -> contextlib.AbstractContextManager[Renderer | None]:
    """Return the context of the process that renders dialogues; of nothing if documents are plain text."""
    return contextlib.nullcontext() if chat is None else Renderer(chat.template)


def combine_digests(tokenizer: str, chat: ChatReader | None) -> str:
    """Return a digest that changes if the same lines give other ids: of the tokenizer and the template, if any."""
    if chat is None or chat.template is None:
        return tokenizer
    return hashlib.sha256(f"{tokenizer} {chat.template.sha256}".encode()).hexdigest()
