"""Text files to tokens, once: later starts map the cached array. Knows no windows and no splits.

Text in a bucket is copied whole to this host's disk, and then read there.

The record of a text points to `<digest>.npy` and holds what rebuilding needs no more: the digest, which also is the
content's part of the data set's fingerprint, and the characters of a character tokenizer.
"""

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from runner.data.readers import cache_key, publish, read_record, warn_unwritable, write_record
from runner.data.remote import CacheSettings, open_reader
from runner.data.source import Source
from runner.data.source_files import BucketFiles, SourceFile, SourceFiles, read_source_file
from runner.data.token_files import TokenSequence
from runner.data.tokenizers import ByteTokenizer, CharacterTokenizer, Tokenizer, collect_characters
from runner.errors import DataError
from runner.storage import JsonObject

# An array up to this size is hashed whole each time it is opened (0.1 s); of a larger one the size alone is checked.
VERIFIED_BYTES_MAX = 1 << 27


@dataclass(frozen=True)
class TokenisedText:
    """`ids`: 1-D, of the tokenizer's dtype. `sha256`: of their bytes, little-endian. `ends`: of the files, in ids."""

    ids: np.ndarray
    tokenizer: Tokenizer
    sha256: str
    ends: np.ndarray


class TextTokens(TokenSequence, Source):
    """The tokens of text files, which this host has made or has found in its cache. They are read no more.

    A file is a document. What separates it from the next is its own end. The fingerprint is that of the ids alone:
    where documents matter, `ends` (int64, of the files, in ids) is looked at too.
    """

    has_documents = True

    def __init__(self, text: TokenisedText, bytes_copied: int = 0) -> None:
        super().__init__([text.ids])
        self.bytes_copied = bytes_copied
        self.tokenizer = text.tokenizer
        self._sha256, self.ends = text.sha256, text.ends

    @property
    def fingerprint(self) -> str:
        return self._sha256

    @property
    def vocabulary_size(self) -> int:
        """The tokenizer's."""
        return self.tokenizer.vocabulary_size

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """See `TokenSequence`."""
        return self.ends

    def validate_vocabulary(self, size: int) -> None:
        """See `Source`."""
        need = self.vocabulary_size
        if need > size:
            raise DataError(
                f"data.tokenizer={self.tokenizer.name} has {need:,} token ids, the model's vocabulary {size:,}; use a "
                f"vocabulary of at least {need:,}"
            )


def load_text(
    source: SourceFiles | BucketFiles,
    tokenizer_name: Literal["bytes", "characters"],
    cache_directory: Path,
    separator: bytes = b"",
    copies: CacheSettings | None = None,
) -> TokenisedText:
    """Return the tokens of all files in order, `separator` between them, from the cache if they are there already.

    `copies` says where objects of a bucket are kept whole, and how many bytes of them. Raises DataError, or OSError if
    the bucket does not answer.
    """
    key = cache_key(f"{tokenizer_name}{separator.hex()}", source.files)
    record = read_record(cache_directory, key)
    text = _open_cached(cache_directory, record) if record is not None else None
    if text is not None:
        return text
    files = open_reader(source, copies or CacheSettings(cache_directory, 0, 1)).copies(source.files)
    text = tokenise(files, tokenizer_name, separator)
    try:
        _write_cached(cache_directory, key, text)
    except OSError as error:
        warn_unwritable(cache_directory, error)
    return text


def tokenise(
    files: Sequence[SourceFile], tokenizer_name: Literal["bytes", "characters"], separator: bytes
) -> TokenisedText:
    """Tokenise file by file into one array: memory holds the tokens and one file."""
    tokenizer: Tokenizer
    if tokenizer_name == "bytes":
        num_separators = max(len(files) - 1, 0)
        num_tokens = sum(file.size_bytes for file in files) + num_separators * len(separator)
        tokenizer = ByteTokenizer()
    else:
        characters, num_tokens = collect_characters(_read_files(files, separator))
        tokenizer = CharacterTokenizer(characters)
    ids = np.empty(num_tokens, tokenizer.dtype)
    ends = []
    start = 0
    for raw in _read_files(files, separator):
        piece = tokenizer.encode_file(raw)
        ids[start : start + len(piece)] = piece
        start += len(piece)
        ends.append(start)
    assert start == num_tokens
    return TokenisedText(ids, tokenizer, hashlib.sha256(ids.data).hexdigest(), np.unique(np.array(ends, np.int64)))


def _read_files(files: Sequence[SourceFile], separator: bytes) -> Iterator[bytes]:
    """The files, each but the last with what separates it from the next."""
    for index, file in enumerate(files):
        yield read_source_file(file) + (separator if index + 1 < len(files) else b"")


def _write_cached(directory: Path, key: str, text: TokenisedText) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(text.ids))
    publish(directory / f"{text.sha256}.npy", [header.getvalue(), text.ids.data])
    write_record(
        directory,
        key,
        {
            "sha256": text.sha256,
            "num_tokens": len(text.ids),
            "data_offset_bytes": len(header.getvalue()),
            "tokenizer": text.tokenizer.name,
            "characters": text.tokenizer.characters,
            "ends": text.ends.tolist(),
        },
    )


def _open_cached(directory: Path, record: JsonObject) -> TokenisedText | None:
    """Map the array that the record points to, or return None if it is gone, cut or altered."""
    characters = record["characters"]
    tokenizer: Tokenizer = ByteTokenizer() if characters is None else CharacterTokenizer(characters)
    path = directory / f"{record['sha256']}.npy"
    num_tokens, offset_bytes = record["num_tokens"], record["data_offset_bytes"]
    try:
        if num_tokens == 0 or path.stat().st_size != offset_bytes + num_tokens * tokenizer.dtype.itemsize:
            return None
        # By the record, never by the file's own header: a damaged header is not worth parsing.
        ids = np.memmap(path, tokenizer.dtype, mode="r", offset=offset_bytes, shape=(num_tokens,))
    except OSError:
        return None
    if ids.nbytes <= VERIFIED_BYTES_MAX and hashlib.sha256(ids.data).hexdigest() != record["sha256"]:
        return None
    return TokenisedText(ids, tokenizer, record["sha256"], np.array(record["ends"], np.int64))
