"""What is asked of a file of token ids, on a disk or in a bucket: `.bin` of whole ids, `.npy` of one dimension."""

import contextlib
import tokenize
from collections.abc import Iterator

import numpy as np

from runner.data.source import BucketFile, SourceFile
from runner.errors import DataError


def num_ids(file: SourceFile | BucketFile, dtype: np.dtype) -> int:
    """How many ids a `.bin` holds. Raises DataError if its size is no whole number of them."""
    if file.size_bytes % dtype.itemsize:
        raise DataError(
            f"{file}: {file.size_bytes} bytes are no whole number of {dtype.itemsize}-byte ({dtype.name}) token ids"
        )
    return file.size_bytes // dtype.itemsize


def refuse_other_array(file: SourceFile | BucketFile, dtype: np.dtype, shape: tuple[int, ...]) -> None:
    """Raise DataError if an array of this type and shape holds no ids."""
    if len(shape) != 1 or dtype.kind not in "iu":
        raise DataError(f"{file}: needs a 1-D array of integers, holds {dtype} of shape {shape}")


@contextlib.contextmanager
def parsing_npy(file: SourceFile | BucketFile) -> Iterator[None]:
    """Inside, whatever numpy's header parser lets out is a DataError that names the file."""
    try:
        yield
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{file}: is no whole .npy file of numbers ({reason})") from error
