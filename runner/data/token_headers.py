r"""Recognition of token files by their first bytes: where the ids begin, their type, and their number.

A `.bin` file is one of these, all little-endian:

    raw ids          as nanoGPT writes them; the spec says their type
    256 int32, ids   llm.c, modded-nanogpt, NeMo: magic number, version, number of ids, bytes of an id (NeMo only)

(Sources: llm.c, `dev/data/data_common.py`; NeMo Automodel, `components/datasets/llm/nanogpt_dataset.py`.)

A `.npy` file is an array of NumPy with its header, or raw ids, as Dolma and OLMo write them. Other known formats with
these suffixes are refused, with the name of the format, because their bytes would otherwise be read as ids.
"""

import io
import re
import tokenize
from typing import NamedTuple

import numpy as np

from runner.data.source_files import File
from runner.errors import DataError

HEAD_BYTES = 1 << 12  # bytes of each file that are read for its recognition; no header of NumPy is longer
_NPY_MAGIC = b"\x93NUMPY"
_TEXT_BYTES_MIN = 64  # fewer bytes may look like text by chance

_HEADER = np.dtype("<i4"), 256
_HEADER_BYTES = _HEADER[0].itemsize * _HEADER[1]
# Type of the ids by magic number and version. A missing version is not supported; None: the header says the width.
_ID_TYPES: dict[int, dict[int, str | None]] = {
    20240520: {1: "<u2"},  # llm.c with GPT-2's vocabulary, modded-nanogpt, FineWeb shards
    20240801: {7: "<u4"},  # llm.c with Llama 3's vocabulary
    278895051: {1: None},  # NeMo Automodel
}
_ID_WIDTHS = {2: "<u2", 4: "<u4"}
_OTHER_HEADERS = {
    20240522: "an evaluation set of llm.c",
    20240326: "weights of llm.c",
    20240327: "a debug state of llm.c",
    20240328: "a tokenizer of llm.c",
}

# First bytes of formats that share a suffix with token files. Long enough that ids do not begin like this by chance.
_FOREIGN = (
    (re.compile(rb"PK\x03\x04"), "a zip archive, such as an .npz or a PyTorch checkpoint"),
    (re.compile(rb"\x1f\x8b\x08[\0-\x1f].{4}[\0\x02\x04][\0-\x0d\xff]", re.DOTALL), "compressed with gzip"),
    (re.compile(rb"\x28\xb5\x2f\xfd"), "compressed with zstd"),
    (re.compile(rb"\xfd7zXZ\0"), "compressed with xz"),
    (re.compile(rb"BZh[1-9]1AY&SY"), "compressed with bzip2"),
    (re.compile(rb"\x04\x22\x4d\x18"), "compressed with lz4"),
    (re.compile(rb"\x80[\x04\x05]\x95.{5}\0\0\0", re.DOTALL), "a pickle"),
    (
        re.compile(rb"\x80[\x02\x03](c[\w.]+\n|[]})(]q\0|\x8a\x0al\xfc\x9cF\xf9)"),
        "a pickle, such as a PyTorch checkpoint",
    ),
    (re.compile(rb'.{4}\0{4}\{ *"', re.DOTALL), "a safetensors file"),
    (re.compile(rb"PAR1"), "a Parquet file"),
    (re.compile(rb"ARROW1\0\0"), "an Arrow file"),
    (re.compile(rb"\xff\xff\xff\xff.{3}\0\x10\0\0\0", re.DOTALL), "an Arrow stream"),
    (re.compile(rb"Obj\x01"), "an Avro file"),
    (re.compile(rb"\x89HDF\r\n\x1a\n"), "an HDF5 file"),
    (re.compile(rb"GGUF[\x01-\x09]\0\0\0"), "a GGUF file"),
    (re.compile(rb"SQLite format 3\0"), "an SQLite file"),
    (re.compile(rb"\x7fELF[\x01\x02]"), "a program"),
    (re.compile(rb"%PDF-"), "a PDF"),
    (re.compile(rb"MMIDIDX\0"), "an index of Megatron's; name it .idx"),
    (re.compile(rb"LITPKDS"), "a packed data set of Lit-GPT"),
    (re.compile(rb"fast_llm_prepared_dataset"), "a data set of Fast-LLM"),
    (re.compile(rb".{257}ustar", re.DOTALL), "a tar archive"),
)
_CONTROL_CHARACTERS = re.compile(rb"[^\t\n\x0b\x0c\r\x1b\x20-\x7e\x80-\xff]")


class TokenLayout(NamedTuple):
    """Place of the ids in a file."""

    dtype: np.dtype
    num_tokens: int
    offset_bytes: int  # first byte of the ids
    is_raw: bool  # True if the file does not say the type of its ids


def parse_head(file: File, head: bytes, dtype: str | None) -> TokenLayout:
    """Return the layout of the ids in a `.bin` or `.npy` file, of which `head` are the first `HEAD_BYTES`.

    `dtype` is the type that the spec gives to ids without a header; None for uint16 in `.bin` files. Raises DataError
    if the file holds something else, is cut, or contradicts `dtype`.
    """
    _refuse_foreign(file, head)
    is_npy = str(file).endswith(".npy")
    if head.startswith(_NPY_MAGIC):
        if not is_npy:
            raise DataError(f"{file}: is an array of NumPy, with a header; name it .npy")
        return _parse_npy(file, head)
    layout = _parse_int32_header(file, head)
    if layout is not None:
        if dtype not in (None, layout.dtype.name):
            raise DataError(f"{file}: its header says {layout.dtype.name} ids; leave out data.dtype={dtype}")
        return layout
    if is_npy and dtype is None:
        raise DataError(
            f"{file}: is not a complete .npy file of numbers (it has no header); if it holds raw ids, as Dolma writes "
            "them, say which: data.dtype: uint16, or uint32"
        )
    id_dtype = np.dtype(dtype or "uint16").newbyteorder("<")
    if file.size_bytes % id_dtype.itemsize:
        raise DataError(
            f"{file}: {file.size_bytes} bytes are not a whole number of {id_dtype.itemsize}-byte ({id_dtype.name}) "
            "token ids; the file is truncated, or data.dtype is wrong"
        )
    return TokenLayout(id_dtype, file.size_bytes // id_dtype.itemsize, 0, is_raw=True)


def _refuse_foreign(file: File, head: bytes) -> None:
    """Raise `DataError` if a file is of a format that is not read under its name."""
    # A file that begins like an archive of NumPy gets a message of its own, because it is a common mistake.
    if head.startswith(b"PK\x03\x04") and str(file).endswith(".npy"):
        raise DataError(f"{file}: needs a 1-D array of integers, holds an archive of arrays")
    for pattern, kind in _FOREIGN:
        if pattern.match(head):
            raise DataError(f"{file}: is {kind}, not token ids")
    numbers = np.frombuffer(head[: len(head) // 4 * 4], "<u4").astype(np.int64)
    if len(numbers) >= 2 and (name := _OTHER_HEADERS.get(int(numbers[0]))) and numbers[1] < 16:
        raise DataError(f"{file}: is {name}, not token ids")
    # A chunk of litdata, or a shard of MDS: the number of samples, then the byte at which each begins, and the end.
    if len(numbers) >= 3 and 4 * (numbers[0] + 2) <= numbers[1] <= file.size_bytes:
        offsets = numbers[1 : numbers[0] + 2]
        is_table = (np.diff(offsets) >= 0).all() and offsets[-1] <= file.size_bytes
        is_whole = len(offsets) == numbers[0] + 1
        if is_table and (offsets[-1] == file.size_bytes if is_whole else offsets[0] == 4 * (numbers[0] + 2)):
            raise DataError(
                f"{file}: is a chunk of litdata or a shard of MDS, not token ids; name an MDS data set by its directory"
            )
    if len(head) >= _TEXT_BYTES_MIN and _is_text(head):
        raise DataError(f"{file}: is text, not token ids; name it .txt")


def _is_text(head: bytes) -> bool:
    """Return True if the bytes are UTF-8 without control characters; the last character may be cut."""
    if _CONTROL_CHARACTERS.search(head):
        return False
    try:
        head.decode()
    except UnicodeDecodeError as error:
        return error.start > len(head) - 4 and error.reason == "unexpected end of data"
    return True


def _parse_npy(file: File, head: bytes) -> TokenLayout:
    stream = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(stream)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{file}: is not a complete .npy file of numbers ({reason})") from error
    if len(shape) != 1 or dtype.kind not in "iu" or shape[0] < 0:
        raise DataError(f"{file}: needs a 1-D array of integers, holds {dtype} of shape {shape}")
    num_tokens, offset = int(shape[0]), stream.tell()
    if offset + num_tokens * dtype.itemsize > file.size_bytes:
        raise DataError(f"{file}: is not a complete .npy file of numbers (it is cut: {file.size_bytes} bytes)")
    return TokenLayout(dtype, num_tokens, offset, is_raw=False)


def _parse_int32_header(file: File, head: bytes) -> TokenLayout | None:
    """Return the layout of the ids after a header of 256 int32; None if there is no such header. Raises DataError."""
    if len(head) < 8:
        return None
    magic, version = np.frombuffer(head, "<i4", 2).tolist()
    # A version is small: without this, a file of raw ids that begins with the magic number by chance would be refused.
    if magic not in _ID_TYPES or not 0 <= version < 256:
        return None
    if version not in _ID_TYPES[magic]:
        versions = ", ".join(map(str, _ID_TYPES[magic]))
        raise DataError(f"{file}: has a header with the magic number {magic} and version {version}; needs {versions}")
    if len(head) < _HEADER_BYTES:
        raise DataError(
            f"{file}: {file.size_bytes} bytes, its header alone takes {_HEADER_BYTES}; the file is truncated"
        )
    # llm.c limits the number of ids to 31 bits, but other writers use the 32nd.
    num_tokens, width = np.frombuffer(head, "<u4", 2, offset=8).tolist()
    dtype_name = _ID_TYPES[magic][version] or _ID_WIDTHS.get(width)
    if dtype_name is None:
        raise DataError(f"{file}: its header says ids of {width} bytes, needs 2 or 4")
    dtype = np.dtype(dtype_name)
    needs_bytes = _HEADER_BYTES + num_tokens * dtype.itemsize
    if file.size_bytes != needs_bytes:
        raise DataError(
            f"{file}: {file.size_bytes:,} bytes, needs {needs_bytes:,} for a header and {num_tokens:,} ids of "
            f"{dtype.itemsize} bytes; the file is truncated or damaged"
        )
    return TokenLayout(dtype, num_tokens, _HEADER_BYTES, is_raw=False)
