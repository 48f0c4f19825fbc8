"""Token ids in the objects of a bucket: `.bin` and `.npy`, of which no more is fetched than is asked for."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runner.data.id_file import num_ids, parsing_npy, refuse_other_array
from runner.data.remote.cache import CacheSettings
from runner.data.remote.reader import BucketReader, ByteRange
from runner.data.source import BucketFile, BucketFiles
from runner.errors import DataError

NPY_HEADER_BYTES = 1 << 12


@dataclass(frozen=True, eq=False)
class ObjectTokens:
    """One object, whose ids begin at `offset_bytes`. `listed` begins the names of all objects of its source."""

    file: BucketFile
    dtype: np.dtype
    num_tokens: int
    offset_bytes: int
    reader: BucketReader
    listed: str

    @property
    def meaning(self) -> str:
        """As of a `TokenFile`."""
        return self.dtype.name

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, piece: slice) -> np.ndarray:
        """Read a range of ids. Raises `DataError` if the object has changed, `OSError` if the bucket is down."""
        start, stop, _ = piece.indices(self.num_tokens)
        (content,) = self.reader.read([self.byte_range(start, stop)])
        return np.frombuffer(content, self.dtype)

    def byte_range(self, start: int, stop: int) -> ByteRange:
        """Where the ids `start .. stop` lie."""
        size, offset = self.dtype.itemsize, self.offset_bytes
        return ByteRange(self.file, offset + start * size, offset + stop * size)


def read_objects(pieces: Sequence[tuple[ObjectTokens, int, np.ndarray]]) -> None:
    """Fill each array with the ids from the position before it on; all are asked for at a time. One source's pieces."""
    if pieces:
        found = pieces[0][0].reader.read([part.byte_range(start, start + len(out)) for part, start, out in pieces])
        for (part, _, out), content in zip(pieces, found, strict=True):
            out[:] = np.frombuffer(content, part.dtype)


def check_objects(parts: Sequence[ObjectTokens]) -> None:
    """Raise `DataError` if an object of one source is another one than at the start, or gone."""
    if parts:
        parts[0].reader.check([part.file for part in parts], parts[0].listed)


def open_object_tokens(source: BucketFiles, dtype: np.dtype, ranges: CacheSettings) -> list[ObjectTokens]:
    """What each object holds: `.bin` ids of `dtype`; of `.npy` the header is read. Raises `DataError`."""
    headers = [file for file in source.files if file.name.endswith(".npy")]
    reader = BucketReader(source.store, ranges.open(dtype.itemsize))
    contents = reader.read([ByteRange(file, 0, min(file.size_bytes, NPY_HEADER_BYTES)) for file in headers])
    header_of = dict(zip(headers, contents, strict=True))
    shapes = [
        _parse_npy(file, header_of[file]) if file in header_of else (dtype, num_ids(file, dtype), 0)
        for file in source.files
    ]
    if headers:
        reader = BucketReader(source.store, ranges.open(max(dtype.itemsize for dtype, _, _ in shapes)))
    return [ObjectTokens(file, *shape, reader, source.listed) for file, shape in zip(source.files, shapes, strict=True)]


def _parse_npy(file: BucketFile, head: bytes) -> tuple[np.dtype, int, int]:
    """Type, number and offset of the ids, as the header says, which is compared with the object's size."""
    stream = io.BytesIO(head)
    with parsing_npy(file):
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    refuse_other_array(file, dtype, shape)
    num_tokens, offset = shape[0], stream.tell()
    if offset + num_tokens * dtype.itemsize > file.size_bytes:
        raise DataError(f"{file}: is no whole .npy file of numbers (it is cut: {file.size_bytes} bytes)")
    return dtype, num_tokens, offset
