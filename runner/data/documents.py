r"""Megatron's token files: of each pair `<name>.idx`, `<name>.bin` the spec names the `.idx`.

The `.idx` is, little-endian: 9 bytes `MMIDIDX\0\0`; uint64 version, 1; uint8 code of the ids' type; uint64 number n
of sequences; uint64 number m of document indices; n int32, the tokens of each sequence; n int64, the byte of the `.bin`
at which each begins; m int64: the documents' bounds, as numbers of sequences, from 0 to n. (Source: megatron-core,
`datasets/indexed_dataset.py`.) It is read whole at the start and held against the `.bin`, which holds the ids and
nothing else; what stays in memory is 8 bytes a document. A multimodal index has n int8 more, and is not read.

Token files that know where their documents end. Knows no format: each makes its parts and hands them over here.
"""

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from runner.data.readers import ByteRange, Reader
from runner.data.remote import run_in_parallel
from runner.data.source_files import BucketFile, File
from runner.data.token_files import TokenFile, TokenFiles
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

    def read_part_ends(self, part: int, start: int, stop: int) -> np.ndarray:
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


MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
FLOATS = (6, 7)


def open_megatron(
    indexes: Sequence[File], reader: Reader, cache_directory: Path, believed: int | None = None
) -> DocumentFiles:
    """Open the pairs of these `.idx` files. Raises DataError, with a line that names the file, on any other content.

    `believed` is the vocabulary that the spec names, if it does.
    """
    places = [str(index).removesuffix(".idx") + ".bin" for index in indexes]
    for place, tokens in zip(places, found := reader.find(places), strict=True):
        if tokens is None:
            raise DataError(f"{place} is missing: its .idx needs it")
    acts = [partial(_parse_pair, index, tokens, reader) for index, tokens in zip(indexes, found, strict=True) if tokens]
    pairs = run_in_parallel(acts)
    reader = reader.for_id_width(max(dtype.itemsize for _, dtype, _ in pairs))
    parts = [DocumentFile(tokens, dtype, int(bounds[-1]), 0, reader, bounds) for tokens, dtype, bounds in pairs]
    return DocumentFiles(parts, cache_directory, believed)


def _parse_pair(index: File, tokens: File, reader: Reader) -> tuple[File, np.dtype, np.ndarray]:
    """The file of the ids, their type, and the bounds of the documents in it. Raises DataError."""
    try:
        dtype, bounds = _parse(index, reader)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{index}: {error}") from error
    size_bytes = int(bounds[-1]) * dtype.itemsize
    if tokens.size_bytes != size_bytes:
        raise DataError(
            f"{tokens}: {tokens.size_bytes:,} bytes, needs {size_bytes:,}: {os.path.basename(str(index))} counts "
            f"{int(bounds[-1]):,} tokens of {dtype.itemsize} bytes; one of the two is cut, or they are no pair"
        )
    return tokens, dtype, bounds


def _parse(index: File, reader: Reader) -> tuple[np.dtype, np.ndarray]:
    """The type of the ids, and the bounds of the documents in tokens. Raises ValueError."""
    (header,) = reader.read([ByteRange(index, 0, min(HEADER.size, index.size_bytes))])
    if not header.startswith(MAGIC):
        raise ValueError(f"begins with {header[:9]!r}, needs {MAGIC!r}: is no index of Megatron's token files")
    if len(header) < HEADER.size:
        raise ValueError(f"{len(header)} bytes, needs at least {HEADER.size}: it is cut")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"has version {version}, needs {VERSION}")
    if code in FLOATS:
        raise ValueError(f"holds floats (type {code}), needs token ids")
    if code not in DTYPES:
        raise ValueError(f"has the unknown type {code}, needs one of {', '.join(map(str, DTYPES))}")
    need = HEADER.size + 12 * num_sequences + 8 * num_bounds
    if index.size_bytes == need + num_sequences and num_sequences:
        raise ValueError("has a mode for each sequence: multimodal data are not read")
    if index.size_bytes != need:
        raise ValueError(
            f"{index.size_bytes:,} bytes, needs {need:,} for {num_sequences:,} sequences and {num_bounds:,} bounds of "
            "documents"
        )
    dtype = np.dtype(DTYPES[code])
    kinds, counts = ("<i4", "<i8", "<i8"), (num_sequences, num_sequences, num_bounds)
    ends = HEADER.size + np.cumsum([np.dtype(kind).itemsize * count for kind, count in zip(kinds, counts, strict=True)])
    stops = ends.tolist()
    contents = reader.read([ByteRange(index, *edges) for edges in itertools.pairwise([HEADER.size, *stops])])
    lengths, pointers, documents = map(np.frombuffer, contents, kinds)
    return dtype, _bounds_of(lengths, pointers, documents, dtype.itemsize)


def _bounds_of(lengths: np.ndarray, pointers: np.ndarray, documents: np.ndarray, item_bytes: int) -> np.ndarray:
    """The bounds of the documents, in tokens. Raises ValueError where the three arrays cannot be of one file."""
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"sequence {int(lengths.argmin())} has {int(lengths.min())} tokens")
    first_tokens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_wrong = pointers != first_tokens[:-1] * item_bytes
    if is_wrong.any():
        wrong = int(is_wrong.argmax())
        need = int(first_tokens[wrong]) * item_bytes
        raise ValueError(
            f"sequence {wrong} begins at byte {int(pointers[wrong]):,}, needs {need:,}: "
            "the sequences must lie one after the other"
        )
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise ValueError(f"its documents must ascend from sequence 0 to {len(lengths)}, the number of sequences")
    return first_tokens[documents]
