r"""Megatron's indexed token files: pairs `<name>.idx`, `<name>.bin`, of which the spec names the `.idx`.

An `.idx` holds, little-endian:

    9 bytes    MMIDIDX\0\0
    uint64     version, 1
    uint8      code of the ids' type
    uint64     number n of sequences
    uint64     number m of document bounds
    n int32    tokens of each sequence
    n int64    byte of the `.bin` at which each sequence begins
    m int64    bounds of the documents as numbers of sequences, from 0 to n

(Source: megatron-core, `datasets/indexed_dataset.py`.) A multimodal index has n int8 more, and is not read. The index
is read whole at the start and compared with the `.bin`, which holds the ids and nothing else. It takes 8 bytes of
memory per document.
"""

import itertools
import os
import struct
from collections.abc import Sequence
from functools import partial

import numpy as np

from runner.data.readers import ByteRange, Reader, wrap_parse_errors
from runner.data.source_files import File
from runner.data.token_files import DocumentFile, TokenFile, TokenFiles
from runner.errors import DataError
from runner.storage import run_in_parallel

MAGIC = b"MMIDIDX\0\0"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "|u1", 2: "|i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_FLOATS = (6, 7)


def read_megatron(indexes: Sequence[File], reader: Reader) -> list[DocumentFile]:
    """Open the pairs of these `.idx` files (a `TokenReader`)."""
    places = [str(index).removesuffix(".idx") + ".bin" for index in indexes]
    found = reader.find(places)
    for place, tokens in zip(places, found, strict=True):
        if tokens is None:
            raise DataError(f"{place} is missing: its .idx needs it")
    pairs = [(index, tokens) for index, tokens in zip(indexes, found, strict=True) if tokens is not None]
    parsed = run_in_parallel([partial(_read_index, index, tokens, reader) for index, tokens in pairs])
    # The indexes were read through the first reader; the slots of the cache must now suit the ids.
    reader = reader.for_id_width(max(dtype.itemsize for dtype, _ in parsed))
    return [
        DocumentFile(tokens, dtype, int(bounds[-1]), 0, reader, bounds)
        for (_, tokens), (dtype, bounds) in zip(pairs, parsed, strict=True)
    ]


def validate_pairs(source: TokenFiles) -> None:
    """Raise `DataError` if a `.bin` file, which looks like raw ids, has a Megatron index with ids of another width."""
    tokens = [part for part in source.parts if isinstance(part, TokenFile) and str(part.file).endswith(".bin")]
    if not tokens:
        return
    reader = tokens[0].reader
    found = reader.find([f"{str(part.file).removesuffix('.bin')}.idx" for part in tokens])
    pairs = [(part, index) for part, index in zip(tokens, found, strict=True) if index is not None]
    heads = reader.read([ByteRange(index, 0, min(HEADER.size, index.size_bytes)) for _, index in pairs])
    for (part, index), head in zip(pairs, heads, strict=True):
        if head.startswith(MAGIC) and len(head) == HEADER.size:
            dtype = DTYPES.get(HEADER.unpack(head)[2])
            if dtype is None or np.dtype(dtype).itemsize != part.dtype.itemsize:
                raise DataError(
                    f"{part.file}: is not {part.dtype.name} ids: {index} beside it is an index of Megatron's; name "
                    "that as data.source"
                )


def _read_index(index: File, tokens: File, reader: Reader) -> tuple[np.dtype, np.ndarray]:
    with wrap_parse_errors(index):
        dtype, bounds = _parse_index(index, reader)
    size_bytes = int(bounds[-1]) * dtype.itemsize
    if tokens.size_bytes != size_bytes:
        raise DataError(
            f"{tokens}: {tokens.size_bytes:,} bytes, needs {size_bytes:,}: {os.path.basename(str(index))} counts "
            f"{int(bounds[-1]):,} tokens of {dtype.itemsize} bytes; one of the two is truncated, or they are not a pair"
        )
    return dtype, bounds


def _parse_index(index: File, reader: Reader) -> tuple[np.dtype, np.ndarray]:
    """Return the type of the ids and the bounds of the documents in tokens. Raises ValueError."""
    (header,) = reader.read([ByteRange(index, 0, min(HEADER.size, index.size_bytes))])
    if not header.startswith(MAGIC):
        raise ValueError(f"begins with {header[:9]!r}, needs {MAGIC!r}: is not an index of Megatron's token files")
    if len(header) < HEADER.size:
        raise ValueError(f"{len(header)} bytes, needs at least {HEADER.size}: it is cut")
    _, version, code, num_sequences, num_bounds = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"has version {version}, needs {VERSION}")
    if code in _FLOATS:
        raise ValueError(f"holds floats (type {code}), needs token ids")
    if code not in DTYPES:
        raise ValueError(f"has the unknown type {code}, needs one of {', '.join(map(str, DTYPES))}")
    need = HEADER.size + 12 * num_sequences + 8 * num_bounds
    # A multimodal index would otherwise be reported as one of the wrong size.
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
    contents = reader.read([ByteRange(index, *edges) for edges in itertools.pairwise([HEADER.size, *ends.tolist()])])
    lengths, pointers, documents = map(np.frombuffer, contents, kinds)

    # The three arrays may contradict each other in a damaged file.
    if len(lengths) and lengths.min() < 0:
        raise ValueError(f"sequence {int(lengths.argmin())} has {int(lengths.min())} tokens")
    # Sequences that follow each other without gaps make a token's place a multiple of its position.
    first_tokens = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    is_misplaced = pointers != first_tokens[:-1] * dtype.itemsize
    if is_misplaced.any():
        misplaced = int(is_misplaced.argmax())
        raise ValueError(
            f"sequence {misplaced} begins at byte {int(pointers[misplaced]):,}, needs "
            f"{int(first_tokens[misplaced]) * dtype.itemsize:,}: the sequences must lie one after the other"
        )
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise ValueError(f"its documents must ascend from sequence 0 to {len(lengths)}, the number of sequences")
    return dtype, first_tokens[documents]
