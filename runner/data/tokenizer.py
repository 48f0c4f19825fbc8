"""Text to token ids and back. Knows no files and no cache."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from runner.errors import DataError


class Tokenizer(Protocol):
    """`characters` is the sorted vocabulary of a character tokenizer, None where the ids mean themselves."""

    name: str
    vocabulary_size: int
    characters: str | None
    dtype: np.dtype

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of `text`, 1-D of `dtype`."""

    def encode_file(self, raw: bytes) -> np.ndarray:
        """Return the ids of a file's content, which need not be valid UTF-8."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of `ids`; a cut UTF-8 sequence becomes a replacement character."""


class ByteTokenizer:
    """An id is a byte of UTF-8: needs no training, represents every file exactly."""

    name = "bytes"
    vocabulary_size = 256
    characters: str | None = None
    dtype = np.dtype("u1")

    def encode(self, text: str) -> np.ndarray:
        return self.encode_file(text.encode())

    def encode_file(self, raw: bytes) -> np.ndarray:
        return np.frombuffer(raw, self.dtype)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


class CharacterTokenizer:
    """An id is the position of a character in the sorted characters of the whole text."""

    name = "characters"

    def __init__(self, characters: str) -> None:
        self.characters: str | None = characters
        self.vocabulary_size = len(characters)
        self.dtype = _smallest_dtype(len(characters))
        self._code_points = _code_points(characters)

    def encode(self, text: str) -> np.ndarray:
        code_points = _code_points(text)
        ids = np.minimum(np.searchsorted(self._code_points, code_points), self.vocabulary_size - 1)
        unknown = code_points[self._code_points[ids] != code_points]
        if unknown.size:
            raise DataError(
                f"character {chr(unknown[0])!r} (U+{unknown[0]:04X}) is not among the "
                f"{self.vocabulary_size} characters of data.source; use data.tokenizer=bytes, which has them all"
            )
        return ids.astype(self.dtype)

    def encode_file(self, raw: bytes) -> np.ndarray:
        return self.encode(decode_file(raw))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return "".join(chr(self._code_points[i]) for i in ids)


def collect_characters(files: Iterable[bytes]) -> tuple[str, int]:
    """Return the sorted distinct characters of all files, and how many characters the files have together."""
    characters: set[str] = set()
    num_characters = 0
    for raw in files:
        text = decode_file(raw)
        characters.update(text)
        num_characters += len(text)
    return "".join(sorted(characters)), num_characters


def decode_file(raw: bytes) -> str:
    return raw.decode(errors="replace")


def _code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), "<u4")


def _smallest_dtype(vocabulary_size: int) -> np.dtype:
    return np.dtype("u1" if vocabulary_size <= 1 << 8 else "<u2" if vocabulary_size <= 1 << 16 else "<i4")
