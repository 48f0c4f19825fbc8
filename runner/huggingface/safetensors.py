"""A directory or URL in Hugging Face's layout: `config.json`, and safetensors in one file or in shards with an index.

Opening it reads the index and the headers, no tensor; nothing of it is executed. `describe` finds what is wrong.

The header of a safetensors file: which tensors it holds, and where. Parsed, never believed.

Eight bytes, little-endian, say how long the header is; it is a JSON object of `dtype`, `shape` and `data_offsets` by
tensor, and behind it lie the tensors, one after the other, little-endian and in C order, to the end of the file.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from runner.errors import InvalidError
from runner.storage import FileInfo, JsonObject, Store, Version, WrongKindError, open_store, parse_json

PREFIX_BYTES = 8
_HEADER_BYTES_MAX = 100_000_000  # of a header, as the safetensors library has it
METADATA = "__metadata__"

# The types that are read, and how wide the others are of which the format knows.
DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
}
_OTHER_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorLocation(NamedTuple):
    """Where a tensor lies: its file, its type by the format's name, its shape, and its bytes `start .. stop`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header_length(prefix: bytes, file_bytes: int) -> int:
    """The length of the header of a file of `file_bytes` that begins with `prefix`. Raises `ValueError`."""
    if len(prefix) < PREFIX_BYTES:
        raise ValueError(f"is torn: it has {file_bytes} bytes, and its header is not whole")
    length = int.from_bytes(prefix, "little")
    if length > _HEADER_BYTES_MAX:
        raise ValueError(f"is no safetensors file: its header would have {length:,} bytes")
    if PREFIX_BYTES + length > file_bytes:
        raise ValueError(f"is torn: its header has {length:,} bytes, and it ends after {file_bytes:,}")
    return length


def parse_header(content: bytes, file: str, file_bytes: int) -> dict[str, TensorLocation]:
    """The tensors of a file of `file_bytes`, by name; `content` is its header. Raises `ValueError` if it is bad."""
    try:
        record = json.loads(content, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("its header is no text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is no JSON: {error.msg}") from error
    if not isinstance(record, dict):
        raise ValueError("its header is no JSON object")
    begin = PREFIX_BYTES + len(content)
    tensors = {name: _tensor(name, entry, file, begin) for name, entry in record.items() if name != METADATA}
    place, before = begin, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != place:
            how = "overlaps" if tensor.start < place else "leaves a hole after"
            raise ValueError(f"tensor {name} {how} {before}")
        place, before = tensor.stop, f"tensor {name}"
    if place != file_bytes:
        how = "is torn" if place > file_bytes else "holds more than its header says"
        raise ValueError(f"{how}: by its header it has {place:,} bytes, it has {file_bytes:,}")
    return tensors


def _once(pairs: list[tuple[str, Any]]) -> JsonObject:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"its header names {twice[0]} twice")
    return dict(pairs)


def _tensor(name: str, entry: Any, file: str, begin: int) -> TensorLocation:
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {name} has no dtype, shape and data_offsets")
    dtype, shape, offsets = str(entry.get("dtype")), _sizes(entry.get("shape")), _sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {name} has no shape or data_offsets that are whole numbers")
    bits = _OTHER_BITS.get(dtype) if dtype not in DTYPES else DTYPES[dtype].itemsize * 8
    if bits is None:
        raise ValueError(f"tensor {name} is of type {dtype[:20]}, which is not known")
    start, stop = offsets
    if (stop - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"tensor {name} is {dtype}{list(shape)} and has {stop - start} bytes")
    return TensorLocation(file, dtype, shape, begin + start, begin + stop)


def _sizes(value: Any) -> tuple[int, ...] | None:
    are_sizes = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
    return tuple(value) if are_sizes else None


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorLocation]]:
    """The head of a file that holds tensors of these types and shapes in this order, and where each will lie in it.

    The metadata say `format: pt`, which readers ask for: the tensors are named as torch names them.
    """
    record: JsonObject = {METADATA: {"format": "pt"}}
    place = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that what follows is aligned
    begin = PREFIX_BYTES + len(text)
    laid = {name: _tensor(name, entry, "", begin) for name, entry in record.items() if name != METADATA}
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, laid


CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUM_READERS = 8


@dataclass(frozen=True)
class PublishedWeights:
    """Weights as they were found.

    Attributes:
        config: the content of `config.json`.
        tensors: by the names that they have in the files.
        versions: of the files that hold them: another one is refused when they are read.
    """

    store: Store
    config: JsonObject
    tensors: dict[str, TensorLocation]
    versions: dict[str, Version]


def has_published_weights(store: Store) -> bool:
    """Whether a directory is in Hugging Face's layout, or is meant to be; else it is a run's."""
    names = store.list_names("")
    return CONFIG_FILE in names or any(name.endswith((SUFFIX, INDEX_FILE)) for name in names)


def open_published_weights(where: str | Store) -> PublishedWeights:
    """The weights at a path or URL. Raises `InvalidError` with a line for each thing that is wrong."""
    store = open_store(where) if isinstance(where, str) else where
    listing = {name: listed for name, listed in store.list_files("").items() if "/" not in name}
    names = list(listing)
    if CONFIG_FILE not in names:
        raise InvalidError(f"{store.url}: no {CONFIG_FILE} is here; needs a directory in Hugging Face's layout")
    config = _read_object(store, CONFIG_FILE)
    index = _read_index(store) if SINGLE_FILE not in names and INDEX_FILE in names else None
    files = _files(store, names, index)
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="header") as pool:
        found = list(pool.map(lambda file: _read_header(store, file, listing[file]), files))
    problems = [problem for _, _, problem in found if problem is not None]
    tensors: dict[str, TensorLocation] = {}
    for file, (held, _, _) in zip(files, found, strict=True):
        for name, tensor in held.items():
            if name in tensors:
                problems.append(f"{store.url}: tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    if index is not None and not problems:
        problems += [f"{store.url}/{INDEX_FILE}: {problem}" for problem in _disagreements(index, tensors)]
    if problems:
        raise InvalidError("\n".join(sorted(problems)))
    return PublishedWeights(
        store, config, tensors, {file: version for file, (_, version, _) in zip(files, found, strict=True)}
    )


def _read_object(store: Store, name: str) -> JsonObject:
    try:
        return parse_json(store.read(name))
    except (FileNotFoundError, WrongKindError):
        raise InvalidError(f"{store.url}/{name} is missing, or is no file") from None
    except ValueError as error:
        raise InvalidError(f"{store.url}/{name} cannot be read: {error}") from error


def _read_index(store: Store) -> dict[str, str]:
    """The file of each tensor, by the index. No name in it leads out of the directory."""
    files = _read_object(store, INDEX_FILE).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InvalidError(f"{store.url}/{INDEX_FILE}: has no weight_map")
    strange = {str(file) for file in files.values() if not _is_plain(file)}
    if strange:
        lines = [
            f"{store.url}/{INDEX_FILE}: names {file[:200]!r}, needs a {SUFFIX} beside it" for file in sorted(strange)
        ]
        raise InvalidError("\n".join(lines))
    return files


def _is_plain(name: object) -> bool:
    """Whether a name is of a file in the very directory."""
    return (
        isinstance(name, str)
        and "\\" not in name
        and "\0" not in name
        and name.endswith(SUFFIX)
        and (PurePosixPath(name).name == name)
    )


def _files(store: Store, names: list[str], index: dict[str, str] | None) -> list[str]:
    if index is not None:
        files = sorted(set(index.values()))
        lacking = [file for file in files if file not in names]
        if lacking:
            raise InvalidError("\n".join(f"{store.url}/{file} is missing, {INDEX_FILE} names it" for file in lacking))
        return files
    found = [SINGLE_FILE] if SINGLE_FILE in names else [name for name in names if name.endswith(SUFFIX)]
    if found:
        return found
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise InvalidError(
            f"{store.url}/{pickles[0]} may be a pickle, which could run any program; needs *{SUFFIX}: load it with "
            "transformers where you trust it, and save_pretrained it"
        )
    raise InvalidError(f"{store.url}: no *{SUFFIX} is here")


def _read_header(store: Store, file: str, listed: FileInfo) -> tuple[dict[str, TensorLocation], Version, str | None]:
    """The tensors of a file, its version, and what is wrong with it."""
    size, version = listed.size_bytes, listed.version
    try:
        length = parse_header_length(store.read_range(file, 0, min(PREFIX_BYTES, size), version), size)
        content = store.read_range(file, PREFIX_BYTES, PREFIX_BYTES + length, version)
        return parse_header(content, file, size), version, None
    except WrongKindError as error:
        return {}, version, str(error)
    except ValueError as error:
        return {}, version, f"{store.url}/{file}: {error}"


def _disagreements(index: dict[str, str], tensors: dict[str, TensorLocation]) -> Iterator[str]:
    for name in sorted(index.keys() | tensors.keys()):
        if name not in tensors:
            yield f"tensor {name} is not in {index[name]}"
        elif name not in index:
            yield f"tensor {name} of {tensors[name].file} is not in it"
        elif tensors[name].file != index[name]:
            yield f"tensor {name} is in {tensors[name].file}, not in {index[name]}"
