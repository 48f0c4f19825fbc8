"""What is asked of a file of token ids, on a disk or in a bucket: `.bin` of whole ids, `.npy` of one dimension."""

import io
import tokenize

import numpy as np

from runner.data.source import File
from runner.errors import DataError

NPY_HEADER_BYTES = 1 << 12
ZIP_MAGIC = b"PK\x03\x04"  # of `np.savez`, under whatever name


def num_ids(file: File, dtype: np.dtype) -> int:
    """How many ids a `.bin` holds. Raises DataError if its size is no whole number of them."""
    if file.size_bytes % dtype.itemsize:
        raise DataError(
            f"{file}: {file.size_bytes} bytes are no whole number of {dtype.itemsize}-byte ({dtype.name}) token ids"
        )
    return file.size_bytes // dtype.itemsize


def parse_npy(file: File, head: bytes) -> tuple[np.dtype, int, int]:
    """Type, number and offset in bytes of the ids, as the first bytes of the file say. Raises DataError."""
    stream = io.BytesIO(head)
    if head.startswith(ZIP_MAGIC):
        raise DataError(f"{file}: needs a 1-D array of integers, holds an archive of arrays")
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{file}: is no whole .npy file of numbers ({reason})") from error
    if len(shape) != 1 or dtype.kind not in "iu" or shape[0] < 0:
        raise DataError(f"{file}: needs a 1-D array of integers, holds {dtype} of shape {shape}")
    num_tokens, offset = int(shape[0]), stream.tell()
    if offset + num_tokens * dtype.itemsize > file.size_bytes:
        raise DataError(f"{file}: is no whole .npy file of numbers (it is cut: {file.size_bytes} bytes)")
    return dtype, num_tokens, offset
