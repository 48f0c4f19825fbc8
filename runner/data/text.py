"""Text files as a source: tokenised once on each host; later starts memory-map the cached array.

Text in a bucket is first copied whole to this host's disk.

The cached record of a text points to `<digest>.npy` and holds everything else that is needed to open it: the digest,
which is also the content's part of the data set's fingerprint, and the characters of a character tokenizer.
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

# An array up to this size is hashed whole each time it is opened (0.1 s); of a larger one only the size is checked.
VERIFIED_BYTES_MAX = 1 << 27


@dataclass(frozen=True)
class TokenisedText:
    """Token ids of all files of a text.

    Attributes:
        ids: 1-D, of the tokenizer's dtype.
        sha256: digest of the little-endian bytes of `ids`.
        ends: int64 positions in `ids` at which the files end, without repetitions.
    """

    ids: np.ndarray
    tokenizer: Tokenizer
    sha256: str
    ends: np.ndarray


class TextTokens(TokenSequence, Source):
    """Tokens of text files, made by this host or found in its cache. The files are not read again.

    A file is a document, and the separator that follows it belongs to it. The fingerprint is that of the ids alone;
    where documents matter, `ends` (int64 positions of the ends of files) must be compared, too.
    """

    has_documents = True

    def __init__(self, text: TokenisedText, bytes_copied: int = 0) -> None:
        super().__init__([text.ids])
        self.bytes_copied = bytes_copied
        self.tokenizer = text.tokenizer
        self._sha256, self.ends = text.sha256, text.ends

    @property
    def fingerprint(self) -> str:
        """Digest of the ids."""
        return self._sha256

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocabulary_size

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """Return the ends of all files."""
        return self.ends

    def validate_vocabulary(self, size: int) -> None:
        """Raise `DataError` if the tokenizer has more than `size` ids."""
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
    """Return the tokens of all files in order, from the cache if possible.

    Args:
        source: text files on a disk or in a bucket.
        tokenizer_name: tokenizer of the text.
        cache_directory: directory of the cached tokens.
        separator: bytes between two files.
        copies: cache for whole copies of objects in a bucket.

    Raises:
        DataError: a file cannot be read, or the copies do not fit.
        OSError: the bucket does not answer.
    """
    # Everything that the ids depend on is part of the key.
    key = cache_key(f"{tokenizer_name}{separator.hex()}", source.files)
    record = read_record(cache_directory, key)
    text = _open_cached(cache_directory, record) if record is not None else None
    if text is not None:
        return text
    files = open_reader(source, copies or CacheSettings(cache_directory, 0, 1)).copies(source.files)
    text = tokenise(files, tokenizer_name, separator)
    try:
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(text.ids))
        # The array is published before the record that points to it.
        publish(cache_directory / f"{text.sha256}.npy", [header.getvalue(), text.ids.data])
        write_record(
            cache_directory,
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
    except OSError as error:
        warn_unwritable(cache_directory, error)
    return text


def tokenise(
    files: Sequence[SourceFile], tokenizer_name: Literal["bytes", "characters"], separator: bytes
) -> TokenisedText:
    """Tokenise file by file into one array, so that memory holds the tokens and one file."""

    def read_files() -> Iterator[bytes]:
        for index, file in enumerate(files):
            yield read_source_file(file) + (separator if index + 1 < len(files) else b"")

    tokenizer: Tokenizer
    if tokenizer_name == "bytes":
        num_separators = max(len(files) - 1, 0)
        # A byte is a token, so the sizes of the files give the number of ids without a first pass.
        num_tokens = sum(file.size_bytes for file in files) + num_separators * len(separator)
        tokenizer = ByteTokenizer()
    else:
        # A first pass collects the vocabulary; the second one encodes.
        characters, num_tokens = collect_characters(read_files())
        tokenizer = CharacterTokenizer(characters)
    ids = np.empty(num_tokens, tokenizer.dtype)
    ends = []
    start = 0
    for raw in read_files():
        piece = tokenizer.encode_file(raw)
        ids[start : start + len(piece)] = piece
        start += len(piece)
        ends.append(start)
    assert start == num_tokens
    return TokenisedText(ids, tokenizer, hashlib.sha256(ids.data).hexdigest(), np.unique(np.array(ends, np.int64)))


def _open_cached(directory: Path, record: JsonObject) -> TokenisedText | None:
    """Memory-map the array that a record points to; return None if it is missing, cut or altered."""
    characters = record["characters"]
    tokenizer: Tokenizer = ByteTokenizer() if characters is None else CharacterTokenizer(characters)
    path = directory / f"{record['sha256']}.npy"
    num_tokens, offset_bytes = record["num_tokens"], record["data_offset_bytes"]
    try:
        if num_tokens == 0 or path.stat().st_size != offset_bytes + num_tokens * tokenizer.dtype.itemsize:
            return None
        # The record describes the array. The file's own header may be damaged and is never parsed.
        ids = np.memmap(path, tokenizer.dtype, mode="r", offset=offset_bytes, shape=(num_tokens,))
    except OSError:
        return None
    # A damaged array would be trained on without notice, so it is verified where that is cheap.
    if ids.nbytes <= VERIFIED_BYTES_MAX and hashlib.sha256(ids.data).hexdigest() != record["sha256"]:
        return None
    return TokenisedText(ids, tokenizer, record["sha256"], np.array(record["ends"], np.int64))
