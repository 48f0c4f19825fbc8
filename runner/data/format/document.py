"""Token files that know where their documents end. Knows no format: each makes its parts and hands them over here."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from runner.data.source import BucketFile
from runner.data.store import TokenFile, TokenFiles
from runner.errors import DataError

ID_DTYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64")


@dataclass(frozen=True, eq=False)
class DocumentFile(TokenFile):
    """A file of ids in documents.

    Attributes:
        bounds: integers, ascending: document i of the file is its tokens `bounds[i] .. bounds[i + 1]`. The first is 0,
            the last `num_tokens`; two neighbours are equal where a document is empty.
    """

    bounds: np.ndarray

    def documents_in(self, start: int, stop: int) -> tuple[int, int]:
        """The first document that has one of the tokens `start .. stop`, and the one after the last."""
        assert start < stop
        first, last = np.searchsorted(self.bounds, [start, stop - 1], side="right") - 1
        return int(first), int(last) + 1


class RecordFile(DocumentFile):
    """One whose ids do not lie one after the other: other bytes stand between its documents."""

    is_plain = False

    @property
    def bytes_fetched_per_token(self) -> int:
        """See `TokenFile`: what stands between is fetched too."""
        return -(-self.file.size_bytes // self.num_tokens) if isinstance(self.file, BucketFile) else 0


class DocumentFiles(TokenFiles):
    """Files of documents, read one after the other. An empty document holds no token, and is none."""

    has_documents = True

    def __init__(self, parts: Sequence[DocumentFile], cache_directory: Path, believed: int | None = None) -> None:
        super().__init__(parts, cache_directory, believed)
        self._document_files = [part for part in parts if len(part)]

    def part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
        """See `Tokens`."""
        return self._document_files[part].bounds[1:]

    @cached_property
    def fingerprint(self) -> str:
        """Of sizes, types and a sample of the ids, see `probe`; and of where each document ends."""
        digest = hashlib.sha256(self.probe().encode())
        for file in self._document_files:
            ends = file.bounds[1:][np.diff(file.bounds) > 0].astype("<i8")
            digest.update(f"{len(ends)}\n".encode())
            digest.update(ends.data)
        return digest.hexdigest()


def parse_dtype(name: str) -> np.dtype:
    """The little-endian integer type that `data.options.dtype` names. Raises DataError if it names none."""
    if name not in ID_DTYPES:
        raise DataError(f"data.options.dtype={name}: needs one of {', '.join(ID_DTYPES)}")
    return np.dtype(name).newbyteorder("<")
