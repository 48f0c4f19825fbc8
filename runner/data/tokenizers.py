"""Tokenizers: text to token ids and back.

- `Tokenizer` is the protocol. `ByteTokenizer` and `CharacterTokenizer` need no file and tokenise text sources.
- `BatchTokenizer` takes many documents at once and makes corpora: bytes, Hugging Face, sentencepiece, tiktoken.

A record in the index of a corpus describes its tokenizer: `kind`, `vocabulary_size`, and for one with a file the file's
name beside the index (`file`) and its `sha256`. A record of tiktoken also holds `pattern` and `special_tokens`, which
its file lacks.
"""

import base64
import binascii
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tokenizers

from runner.data.corpus_index import read_tokenizer
from runner.errors import DataError, EncodeError, format_reason
from runner.spec.imports import import_extra
from runner.storage import JsonObject, Store


class Tokenizer(Protocol):
    """Mapping between text and token ids."""

    name: str
    vocabulary_size: int
    characters: str | None  # sorted vocabulary of a character tokenizer; None for any other
    dtype: np.dtype

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, 1-D of `dtype`."""

    def encode_file(self, raw: bytes) -> np.ndarray:
        """Return the ids of a file's content, which need not be valid UTF-8."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; a cut UTF-8 sequence becomes a replacement character."""


class ByteTokenizer:
    """Tokenizer whose ids are the bytes of UTF-8: needs no training and represents every file exactly."""

    name = "bytes"
    vocabulary_size = 256
    characters: str | None = None
    dtype = np.dtype("u1")

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of the text."""
        return self.encode_file(text.encode())

    def encode_file(self, raw: bytes) -> np.ndarray:
        """Return the bytes of the file."""
        return np.frombuffer(raw, self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text; bytes that are not UTF-8 become replacement characters."""
        return bytes(int(i) for i in ids).decode(errors="replace")


class CharacterTokenizer:
    """Tokenizer whose ids are positions in the sorted characters of the whole text."""

    name = "characters"

    def __init__(self, characters: str) -> None:
        size = len(characters)
        self.characters: str | None = characters
        self.vocabulary_size = size
        self.dtype = np.dtype("u1" if size <= 1 << 8 else "<u2" if size <= 1 << 16 else "<i4")
        # An array instead of a dictionary, so that a text is encoded by one vectorised search.
        self._code_points = _code_points(characters)

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of the text. Raises `DataError` for a character outside the vocabulary."""
        code_points = _code_points(text)
        # For an unknown character the search returns a neighbour, which the comparison below detects.
        ids = np.minimum(np.searchsorted(self._code_points, code_points), self.vocabulary_size - 1)
        unknown = code_points[self._code_points[ids] != code_points]
        if unknown.size:
            raise DataError(
                f"character {chr(unknown[0])!r} (U+{unknown[0]:04X}) is not among the "
                f"{self.vocabulary_size} characters of data.source; use data.tokenizer=bytes, which has them all"
            )
        return ids.astype(self.dtype)

    def encode_file(self, raw: bytes) -> np.ndarray:
        """Return the ids of a file's text."""
        return self.encode(_decode_file(raw))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the ids."""
        return "".join(chr(self._code_points[i]) for i in ids)


def collect_characters(files: Iterable[bytes]) -> tuple[str, int]:
    """Return the sorted distinct characters of all files, and the number of characters in all files."""
    characters: set[str] = set()
    num_characters = 0
    for raw in files:
        text = _decode_file(raw)
        characters.update(text)
        num_characters += len(text)
    return "".join(sorted(characters)), num_characters


def _decode_file(raw: bytes) -> str:
    """Return the text of a file; bytes that are not UTF-8 become replacement characters."""
    return raw.decode(errors="replace")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


# Name of the tokenizer's file beside the index of a corpus, by kind.
TOKENIZER_FILES = {"hf": "tokenizer.json", "sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.tiktoken"}


class BatchTokenizer(ABC):
    """`Tokenizer` that takes many documents at once, on all cores. Thread-safe. Replaces bytes that are not UTF-8."""

    name: str
    vocabulary_size: int
    characters: str | None = None

    @property
    def dtype(self) -> np.dtype:
        """Type of the ids in a corpus: uint16 where they fit, else uint32."""
        # Two bytes instead of four halve what a corpus takes on disk and on the network.
        return np.dtype("<u2" if self.vocabulary_size <= 1 << 16 else "<u4")

    @abstractmethod
    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the ids of each document, of `dtype`, without added tokens at either end. Raises EncodeError."""

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each text and the span of characters of each id, of shape (number of ids, 2).

        If a character has several ids, each of them has the span of the whole character. Raises DataError if this kind
        of tokenizer provides no spans, EncodeError if the library fails on a text.
        """
        raise DataError(
            f"a tokenizer of kind {self.name} does not tell which characters a token is of; use hf or bytes"
        )

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; a cut UTF-8 sequence becomes a replacement character."""

    @abstractmethod
    def list_tokens(self) -> dict[str, int]:
        """Return the ids of the tokens that have a text of their own. Slow for a large vocabulary."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text."""
        return self.encode_batch([text.encode()])[0]

    def encode_file(self, raw: bytes) -> np.ndarray:
        """Return the ids of a file's content."""
        return self.encode_batch([raw])[0]


class ByteBatchTokenizer(BatchTokenizer):
    """Tokenizer whose ids are bytes, so that every document is represented exactly."""

    name = "bytes"
    vocabulary_size = 256

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        """Return the bytes of each document."""
        return [np.frombuffer(document, np.uint8).astype(self.dtype) for document in documents]

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the bytes of each text, each with the span of its character."""
        found = []
        for ids in self.encode_batch([text.encode() for text in texts]):
            character = np.cumsum((ids & 0xC0) != 0x80) - 1  # only the first byte of a character does not begin with 10
            found.append((ids, np.stack([character, character + 1], axis=1)))
        return found

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of the bytes."""
        return ByteTokenizer().decode(ids)

    def list_tokens(self) -> dict[str, int]:
        """Return nothing: a byte has no text of its own."""
        return {}


@contextlib.contextmanager
def _convert_encode_errors() -> Iterator[None]:
    """Turn an error of a tokenizer library, which may be a panic of Rust, into an `EncodeError`."""
    try:
        yield
    except Exception as error:  # the libraries raise nothing more specific
        raise EncodeError(f"the tokenizer cannot encode a document: {format_reason(error)}") from error
    except BaseException as error:
        # A panic is not an `Exception`, but the library can still encode the next document.
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise EncodeError(f"the tokenizer cannot encode a document: {format_reason(error)}") from error


class _TextTokenizer(BatchTokenizer):
    """Base of tokenizers whose library takes texts and returns lists of ids."""

    @abstractmethod
    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        """Return the ids of each text."""

    @abstractmethod
    def _decode(self, ids: list[int]) -> str:
        """Return the text of ids."""

    def encode_batch(self, documents: Sequence[bytes]) -> list[np.ndarray]:
        texts = [document.decode(errors="replace") for document in documents]
        with _convert_encode_errors():
            return [np.array(ids, self.dtype) for ids in self._encode(texts)]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._decode([int(i) for i in ids])


class HuggingFaceTokenizer(_TextTokenizer):
    """Tokenizer of a `tokenizer.json`: the library's ids without padding, truncation or added special tokens.

    The text of a special token in a document becomes that token, as in the library.
    """

    name = "hf"

    def __init__(self, content: bytes) -> None:
        try:
            self._library = tokenizers.Tokenizer.from_str(content.decode())
        except UnicodeDecodeError as error:
            raise DataError(f"is not a tokenizer.json: {error}") from error
        except Exception as error:  # the library raises nothing more specific
            raise DataError(f"is not a tokenizer.json: {format_reason(error)}") from error
        # A file may enable padding and truncation, which would add ids to a corpus that are not in its text.
        self._library.no_padding()
        self._library.no_truncation()
        # Ids may have gaps, so the vocabulary size follows from the largest id, not from their number.
        self.vocabulary_size = max(self.list_tokens().values(), default=-1) + 1
        if not self.vocabulary_size:
            raise DataError("is not a usable tokenizer.json: it has no tokens")

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        # Documents must not get tokens at their ends here: separators are the job's choice.
        return (encoding.ids for encoding in self._library.encode_batch_fast(texts, add_special_tokens=False))

    def encode_spans(self, texts: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the ids of each text with the offsets of the library."""
        with _convert_encode_errors():
            # `encode_batch_fast` would give no offsets.
            found = self._library.encode_batch(list(texts), add_special_tokens=False)
        return [
            (np.array(encoding.ids, self.dtype), np.array(encoding.offsets, np.int64).reshape(-1, 2))
            for encoding in found
        ]

    def _decode(self, ids: list[int]) -> str:
        # A special token that the model writes is shown.
        return str(self._library.decode(ids, skip_special_tokens=False))

    def list_tokens(self) -> dict[str, int]:
        """Return the vocabulary, including added tokens."""
        return dict(self._library.get_vocab(with_added_tokens=True))


class _SentencePieceTokenizer(_TextTokenizer):
    """Tokenizer of a model of the `sentencepiece` library, which is an extra."""

    name = "sentencepiece"

    def __init__(self, content: bytes) -> None:
        library = import_extra("sentencepiece")
        try:
            self._library = library.SentencePieceProcessor(model_proto=content)
        except RuntimeError as error:
            raise DataError(f"is not a sentencepiece model: {format_reason(error)}") from error
        self.vocabulary_size = int(self._library.get_piece_size())
        if not self.vocabulary_size:
            raise DataError("is not a sentencepiece model: it has no pieces")

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        found: list[list[int]] = self._library.encode(texts, num_threads=os.cpu_count() or 1)
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids))

    def list_tokens(self) -> dict[str, int]:
        """Return the pieces of the model."""
        return {self._library.id_to_piece(i): i for i in range(self.vocabulary_size)}


class TiktokenTokenizer(_TextTokenizer):
    """Tokenizer of a file of ranks of the `tiktoken` library, which is an extra.

    The text of a special token in a document is encoded like any other text.
    """

    name = "tiktoken"

    def __init__(self, content: bytes, pattern: str, special_tokens: dict[str, int]) -> None:
        library = import_extra("tiktoken")
        ranks = _parse_ranks(content)
        taken = set(ranks.values())
        for token, rank in special_tokens.items():
            if rank in taken:
                raise DataError(f"has a token of id {rank} already, which special_tokens gives to {token!r}")
            taken.add(rank)
        try:
            self._library = library.Encoding(
                "file", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except ValueError as error:
            raise DataError(f"does not fit its pattern: {format_reason(error)}") from error
        self._special_tokens = special_tokens
        self.vocabulary_size = max(taken) + 1

    def _encode(self, texts: list[str]) -> Iterable[Sequence[int]]:
        # Text of the data must not become a special token, such as one that ends a document.
        found: list[list[int]] = self._library.encode_ordinary_batch(texts, num_threads=os.cpu_count() or 1)
        return found

    def _decode(self, ids: list[int]) -> str:
        return str(self._library.decode(ids))

    def list_tokens(self) -> dict[str, int]:
        """Return the special tokens; all others are bytes."""
        return self._special_tokens


_KINDS = (ByteBatchTokenizer.name, *TOKENIZER_FILES)
KINDS_WITH_SPANS = (ByteBatchTokenizer.name, HuggingFaceTokenizer.name)  # kinds that implement `encode_spans`


def make_tokenizer(record: JsonObject, content: bytes | None) -> BatchTokenizer:
    """Make the tokenizer of a record from the content of its file, which is None for bytes. Raises DataError."""
    kind = record["kind"]
    if kind not in _KINDS:
        raise DataError(f"a tokenizer of kind {kind!r} is not known; choose from {', '.join(_KINDS)}")
    if content is None:
        return ByteBatchTokenizer()
    if kind == TiktokenTokenizer.name:
        return TiktokenTokenizer(content, record["pattern"], record["special_tokens"])
    return HuggingFaceTokenizer(content) if kind == HuggingFaceTokenizer.name else _SentencePieceTokenizer(content)


def load_tokenizer(record: JsonObject, store: Store) -> BatchTokenizer:
    """Load the tokenizer of a corpus in `store`. Raises `DataError` if its file is missing or another one."""
    if record.get("file") is None:
        return make_tokenizer(record, None)
    return parse_tokenizer(record, read_tokenizer(record, store), store)


def parse_tokenizer(record: JsonObject, content: bytes, store: Store) -> BatchTokenizer:
    """Make the tokenizer of a corpus in `store` from its file. Raises `DataError` that names the file if damaged."""
    try:
        return make_tokenizer(record, content)
    except DataError as error:
        raise DataError(f"{store.url}/{record['file']}: {error}") from error


def _parse_ranks(content: bytes) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if line.strip():
            try:
                token, rank = line.split()
                ranks[base64.b64decode(token, validate=True)] = int(rank)
            except (ValueError, binascii.Error) as error:
                raise DataError(f"line {number} is not a tiktoken rank: {line[:40]!r}") from error
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:  # the library would panic at the first such byte
        raise DataError(f"holds no ranks of tiktoken: {len(lacking)} of the 256 bytes have none, as 0x{lacking[0]:02x}")
    if len(set(ranks.values())) < len(ranks):
        raise DataError("holds no ranks of tiktoken: two tokens have the same")
    return ranks
