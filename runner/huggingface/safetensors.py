"""Weights in Hugging Face's layout: `config.json`, and safetensors in one file or in shards with an index.

`open_published_weights` reads the index and the headers, but no tensor. It executes nothing, does not trust the files,
and reports every inconsistency.

A safetensors file begins with eight bytes, little-endian, with the length of its header. The header is a JSON object of
`dtype`, `shape` and `data_offsets` by tensor. The tensors follow, without gaps, little-endian and in C order, up to the
end of the file.
"""

import copy
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from runner.console import escape_unprintable
from runner.errors import InvalidError, suggest_nearest
from runner.storage import FileInfo, JsonObject, Store, Version, WrongKindError, open_store, parse_json

CONFIG_FILE = "config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUFFIX = ".safetensors"

PREFIX_BYTES = 8
METADATA = "__metadata__"
_HEADER_BYTES_MAX = 100_000_000  # the limit of the safetensors library
_SIZE_DIGITS_MAX = 20  # of a number of 64 bits, which the format has
_DIMENSIONS_MAX = 64  # of numpy
_SHOWN_CHARACTERS = 200

# The types that can be read, and the width in bits of the other types of the format.
DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(jnp.bfloat16)}
_OTHER_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16"), 16),
    **dict.fromkeys(("U32", "I32"), 32),
    **dict.fromkeys(("U64", "I64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
# Also those that only quantised tensors have.
STORED_DTYPES = DTYPES | {"U8": np.dtype(np.uint8), "F8_E4M3": np.dtype(jnp.float8_e4m3fn)}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_NUM_READERS = 8


# Headers.


Box = Sequence[tuple[int, int]]  # (start, stop) on each axis of an array


class TensorLocation(NamedTuple):
    """Location of a tensor."""

    file: str  # name of its file
    dtype: str  # name of its type in the format
    shape: tuple[int, ...]
    start: int  # first byte in the file
    stop: int  # one past the last byte

    @property
    def stored(self) -> "tuple[TensorLocation, ...]":
        """Tensors of the files that hold the values: this one."""
        return (self,)

    def find_boxes(self, box: Box) -> list[Box]:
        """Return the box of each stored tensor that holds a box of the values."""
        return [box]

    def decode(self, arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Return the values at `index`, from the arrays of the stored tensors."""
        return arrays[0][index]


def parse_header_length(prefix: bytes, file_bytes: int) -> int:
    """Return the length of the header of a file of `file_bytes` that begins with `prefix`.

    Raises:
        ValueError: The file is torn, or no safetensors file.
    """
    if len(prefix) < PREFIX_BYTES:
        raise ValueError(f"is torn: it has {file_bytes} bytes, and its header is not whole")
    # The length is checked before anything of that size is read.
    length = int.from_bytes(prefix, "little")
    if length > _HEADER_BYTES_MAX:
        raise ValueError(f"is not a safetensors file: its header would have {length:,} bytes")
    if PREFIX_BYTES + length > file_bytes:
        raise ValueError(f"is torn: its header has {length:,} bytes, and it ends after {file_bytes:,}")
    return length


def parse_header(content: bytes, file: str, file_bytes: int) -> dict[str, TensorLocation]:
    """Return the tensors of a file of `file_bytes` by name, from the content of its header.

    Raises:
        ValueError: The header is damaged, or does not match the size of the file.
    """

    def reject_duplicates(pairs: list[tuple[str, Any]]) -> JsonObject:
        record = dict(pairs)
        if len(record) != len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise ValueError(f"its header names {_shorten(twice)} twice")
        return record

    def parse_size(digits: str) -> int:
        # Python's time to read and to multiply numbers grows with the square of their digits.
        if len(digits) > _SIZE_DIGITS_MAX:
            raise ValueError(f"its header has a number of {len(digits):,} digits")
        return int(digits)

    try:
        # The parser would keep the last of two entries of one name, and the first would be an undetected hole.
        record = json.loads(content, object_pairs_hook=reject_duplicates, parse_int=parse_size)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise ValueError("its header is not text") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"its header is not JSON: {error.msg}") from error
    if not isinstance(record, dict):
        raise ValueError("its header is not a JSON object")
    begin = PREFIX_BYTES + len(content)
    tensors = {name: _parse_tensor(name, entry, file, begin) for name, entry in record.items() if name != METADATA}
    # The tensors have to cover the rest of the file without gaps or overlaps.
    position, before = begin, "the header"
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        if tensor.start != position:
            relation = "overlaps" if tensor.start < position else "leaves a hole after"
            raise ValueError(f"tensor {_shorten(name)} {relation} {before}")
        position, before = tensor.stop, f"tensor {_shorten(name)}"
    if position != file_bytes:
        state = "is torn" if position > file_bytes else "holds more than its header says"
        raise ValueError(f"{state}: by its header it has {position:,} bytes, it has {file_bytes:,}")
    return tensors


def _parse_tensor(name: str, entry: Any, file: str, begin: int) -> TensorLocation:
    """Return the tensor of an entry of the header; `begin` is the byte from which offsets count."""

    def parse_sizes(value: Any) -> tuple[int, ...] | None:
        are_sizes = isinstance(value, list) and all(type(size) is int and size >= 0 for size in value)
        return tuple(value) if are_sizes else None

    shown = _shorten(name)
    if not isinstance(entry, dict):
        raise ValueError(f"tensor {shown} has no dtype, shape and data_offsets")
    dtype = str(entry.get("dtype"))
    shape, offsets = parse_sizes(entry.get("shape")), parse_sizes(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise ValueError(f"tensor {shown} has no shape or data_offsets of whole numbers")
    if len(shape) > _DIMENSIONS_MAX:
        raise ValueError(f"tensor {shown} has {len(shape):,} dimensions, needs at most {_DIMENSIONS_MAX}")
    bits = _OTHER_BITS.get(dtype) if dtype not in DTYPES else DTYPES[dtype].itemsize * 8
    if bits is None:
        raise ValueError(f"tensor {shown} is of type {dtype[:20]}, which is not a type of the format")
    start, stop = offsets
    # Types narrower than a byte make it necessary to compare bits.
    if (stop - start) * 8 != math.prod(shape) * bits:
        raise ValueError(f"tensor {shown} is {dtype}{list(shape)} and has {stop - start} bytes")
    return TensorLocation(file, dtype, shape, begin + start, begin + stop)


def _shorten(name: str) -> str:
    """Return an untrusted file name in a form that is safe for messages."""
    return escape_unprintable(name[:_SHOWN_CHARACTERS])


def encode_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, TensorLocation]]:
    """Return the beginning of a file, with prefix and header, and the location of each tensor in the file.

    `tensors` are the type and shape of each tensor, in the order of the file.
    """
    # Readers require the metadata `format: pt`: tensors are named as torch names them.
    record: JsonObject = {METADATA: {"format": "pt"}}
    position = 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * DTYPES[dtype].itemsize
        record[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(record, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    begin = PREFIX_BYTES + len(text)
    locations = {name: _parse_tensor(name, entry, "", begin) for name, entry in record.items() if name != METADATA}
    return len(text).to_bytes(PREFIX_BYTES, "little") + text, locations


# Quantised tensors: values that the files hold in several tensors of narrow types, by `quantization_config` of
# config.json. To read another kind, add its `_QuantisedFormat` to `QUANTISED_FORMATS`.


class _QuantisedFormat(Protocol):
    """Form of quantised tensors."""

    name: str  # name of the type, as messages show it
    suffixes: tuple[str, ...]  # endings of the names of the stored tensors, which replace `suffix`
    suffix: str  # ending of the name of the tensor itself
    dtypes: tuple[tuple[str, ...], ...]  # types in the format of the files that each stored tensor may have

    def compute_shape(self, stored: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the shape of the values from those of the stored tensors; None if these are inconsistent."""

    def find_boxes(self, box: Box) -> list[Box]:
        """Return the box of each stored tensor that holds a box of the values."""

    def decode(self, arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Return the values at a non-empty index in float32, from the arrays of the stored tensors."""


class QuantisedTensor(NamedTuple):
    """Tensor whose values follow from several stored ones."""

    format: _QuantisedFormat
    stored: tuple[TensorLocation, ...]
    shape: tuple[int, ...]

    @property
    def file(self) -> str:
        """Name of the file of the first stored tensor."""
        return self.stored[0].file

    @property
    def dtype(self) -> str:
        """Name of the type, as messages show it."""
        return self.format.name

    def find_boxes(self, box: Box) -> list[Box]:
        """Return the box of each stored tensor that holds a box of the values."""
        return self.format.find_boxes(box)

    def decode(self, arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Return the values at `index` in float32, from the arrays of the stored tensors."""
        return self.format.decode(arrays, index)


PublishedTensor = TensorLocation | QuantisedTensor

_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_E2M1_PAIRS = np.concatenate([_E2M1, -_E2M1])[np.stack([np.arange(256) & 15, np.arange(256) >> 4], axis=-1)]
_E8M0 = np.concatenate([np.ldexp(np.float32(1), np.arange(255) - 127), [np.float32(np.nan)]])


class _Mxfp4(_QuantisedFormat):
    """MXFP4 (Open Compute Project, Microscaling Formats, 2023), as in GPT-OSS.

    Groups of 32 inputs share a power of two (E8M0). Two values of four bits (E2M1) share a byte, the first one in its
    lower half. Matrices of experts are stored as (E, O, G, 16) with scales (E, O, G), and their values are (E, I, O),
    with I = 32 G.
    """

    name, suffixes, suffix, dtypes = "MXFP4", ("_blocks", "_scales"), "", (("U8",), ("U8",))
    group = 32

    def compute_shape(self, stored: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return (E, I, O) for blocks (E, O, G, 16) and scales (E, O, G)."""
        blocks, scales = stored
        if len(blocks) != 4 or blocks[:3] != scales or 2 * blocks[3] != self.group:
            return None
        return blocks[0], blocks[2] * self.group, blocks[1]

    def find_boxes(self, box: Box) -> list[Box]:
        """Return the boxes of blocks and of scales."""
        experts, (start, stop), outputs = box
        scales = [experts, outputs, (start // self.group, -(-stop // self.group))]
        return [[*scales, (0, self.group // 2)], scales]

    def decode(self, arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Return values (E, I, O), in float32."""
        experts, inputs, outputs = index
        first = inputs.start // self.group
        stored = experts, outputs, slice(first, -(-inputs.stop // self.group))
        blocks_ExOxGxB, scales_ExOxG = (array[stored] for array in arrays)
        values_ExOxGxBx2 = _E2M1_PAIRS[blocks_ExOxGxB] * _E8M0[scales_ExOxG][..., None, None]
        values_ExOxI = values_ExOxGxBx2.reshape(*scales_ExOxG.shape[:2], -1)
        skipped = first * self.group
        return values_ExOxI[..., inputs.start - skipped : inputs.stop - skipped : inputs.step].swapaxes(1, 2)


class _Fp8(_QuantisedFormat):
    """FP8 as in DeepSeek V3 and Qwen3: blocks of 128 x 128 values of eight bits (E4M3) share a scale."""

    name, suffixes, suffix, dtypes = (
        "FP8 in blocks of 128",
        (".weight", ".weight_scale_inv"),
        ".weight",
        (("F8_E4M3",), ("F32", "BF16")),
    )
    block = 128

    def compute_shape(self, stored: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
        """Return the shape of the values, (O, I)."""
        values, scales = stored
        return values if len(values) == 2 and scales == tuple(-(-size // self.block) for size in values) else None

    def find_boxes(self, box: Box) -> list[Box]:
        """Return the boxes of values and of scales."""
        return [box, [(start // self.block, -(-stop // self.block)) for start, stop in box]]

    def decode(self, arrays: Sequence[np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Return values (O, I), in float32."""
        values, scales = arrays
        blocks = np.ix_(*(np.arange(axis.start, axis.stop, axis.step) // self.block for axis in index))
        found: np.ndarray = values[index].astype(np.float32) * scales[blocks].astype(np.float32)
        return found


QUANTISED_FORMATS: dict[str, _QuantisedFormat] = {"fp8": _Fp8(), "mxfp4": _Mxfp4()}  # by `quant_method`


def join_quantised_tensors(
    url: str, config: JsonObject, tensors: Mapping[str, TensorLocation]
) -> tuple[dict[str, PublishedTensor], list[str]]:
    """Return the tensors, with each quantised one in place of those that store it, and their problems.

    Raises:
        InvalidError: `config.json` names a kind that is not read.
    """
    nested = config.get("text_config")
    given = config.get("quantization_config") or (
        nested.get("quantization_config") if isinstance(nested, dict) else None
    )
    if given is None:
        return {**tensors}, []
    method = given.get("quant_method") if isinstance(given, dict) else given
    if not isinstance(method, str) or method not in QUANTISED_FORMATS:
        raise InvalidError(
            f"{url}/{CONFIG_FILE}: quantization_config.quant_method {_shorten(str(method))} is not read; needs "
            f"{' or '.join(QUANTISED_FORMATS)}, or weights of type {', '.join(DTYPES)}: dequantise them with "
            "transformers, and write them with save_pretrained"
        )
    form = QUANTISED_FORMATS[method]
    joined: dict[str, PublishedTensor] = {**tensors}
    problems = []
    # The name of a tensor that is not quantised may have the same suffix.
    endings = [suffix for suffix in form.suffixes if suffix != form.suffix]
    stems = {name.removesuffix(ending) for ending in endings for name in tensors if name.endswith(ending)}
    for stem in sorted(stems):
        names = [stem + suffix for suffix in form.suffixes]
        missing = [each for each in names if each not in tensors]
        if missing:
            present = next(each for each in names if each in tensors)
            problems.append(f"{url}: tensor {_shorten(present)} has no {_shorten(missing[0])}")
            continue
        stored = tuple(tensors[each] for each in names)
        shape = form.compute_shape([each.shape for each in stored])
        if shape is None or any(each.dtype not in known for each, known in zip(stored, form.dtypes, strict=True)):
            found = " and ".join(f"{each.dtype}{list(each.shape)}" for each in stored)
            problems.append(f"{url}: tensor {_shorten(names[0])} and its scales are {found}, which is not {form.name}")
            continue
        for each in names:
            del joined[each]
        joined[stem + form.suffix] = QuantisedTensor(form, stored, shape)
    return joined, problems


# Directories.


@dataclass(frozen=True)
class PublishedWeights:
    """Weights of a directory or URL in Hugging Face's layout."""

    store: Store
    config: JsonObject
    # Tensors by their names in the files; a quantised one by the name that it would have unquantised.
    tensors: dict[str, PublishedTensor]
    versions: dict[str, Version]  # versions of the files. Later reads refuse another version.


def has_published_weights(store: Store) -> bool:
    """Return True if a directory is, or is meant to be, in Hugging Face's layout; otherwise it is that of a run."""
    names = store.list_names("")
    return CONFIG_FILE in names or any(name.endswith((SUFFIX, INDEX_FILE)) for name in names)


def open_published_weights(where: str | Store) -> PublishedWeights:
    """Return the weights at a path or URL.

    Raises:
        InvalidError: The directory or a file is damaged; one line for each problem.
    """
    store = open_store(where) if isinstance(where, str) else where
    # One listing gives the size and version of every file, against which all reads are checked.
    listing = {name: listed for name, listed in store.list_files("").items() if "/" not in name}
    names = list(listing)
    if CONFIG_FILE not in names:
        raise InvalidError(f"{store.url}: no {CONFIG_FILE} is here; needs a directory in Hugging Face's layout")
    config = _read_object(store, CONFIG_FILE)
    # As in the transformers library, the single file takes precedence over an index.
    index = _read_index(store) if SINGLE_FILE not in names and INDEX_FILE in names else None
    files = _list_weight_files(store, names, index)
    # A large model has hundreds of shards, and each header costs two requests.
    with ThreadPoolExecutor(_NUM_READERS, thread_name_prefix="header") as pool:
        headers = list(pool.map(lambda file: _read_header(store, file, listing[file]), files))
    problems = [header.problem for header in headers if header.problem is not None]
    tensors: dict[str, TensorLocation] = {}
    for file, header in zip(files, headers, strict=True):
        for name, tensor in header.tensors.items():
            if name in tensors:
                problems.append(f"{store.url}: tensor {name} is in {tensors[name].file} and in {file}")
            tensors[name] = tensor
    if index is not None and not problems:
        for name in sorted(index.keys() | tensors.keys()):
            if name not in tensors:
                problems.append(f"{store.url}/{INDEX_FILE}: tensor {name} is not in {index[name]}")
            elif name not in index:
                problems.append(f"{store.url}/{INDEX_FILE}: tensor {name} of {tensors[name].file} is not in it")
            elif tensors[name].file != index[name]:
                problems.append(
                    f"{store.url}/{INDEX_FILE}: tensor {name} is in {tensors[name].file}, not in {index[name]}"
                )
    if not problems:
        joined, problems = join_quantised_tensors(store.url, config, tensors)
    if problems:
        raise InvalidError("\n".join(sorted(problems)))
    versions = {file: header.version for file, header in zip(files, headers, strict=True)}
    return PublishedWeights(store, config, joined, versions)


def read_config_json(where: str) -> JsonObject:
    """Return the content of the `config.json` of the weights at a path or URL, without looking at the weights.

    Raises:
        InvalidError: It is not there, or is damaged.
        StorageError: It cannot be read now.
    """
    store = open_store(where)
    if store.root is not None and not store.root.is_dir():
        raise InvalidError(f"{store.url}: no such directory; needs one in Hugging Face's layout, with {CONFIG_FILE}")
    if CONFIG_FILE not in store.list_names(""):
        raise InvalidError(
            f"{store.url}: no {CONFIG_FILE} is here; name a directory in Hugging Face's layout, or write the model's "
            "keys yourself"
        )
    return _read_object(store, CONFIG_FILE)


def drop_config_keys(config: JsonObject, names: Sequence[str]) -> JsonObject:
    """Return the content of a `config.json` without some keys.

    A key in a section is SECTION.KEY. Those of a nested `text_config` are named without it.

    Raises:
        InvalidError: The file has no such key.
    """
    config = copy.deepcopy(config)
    for name in dict.fromkeys(names):
        *sections, key = name.split(".")
        holders, near = [], set[str]()
        for holder in (config, config.get("text_config")):
            for section in sections:
                holder = holder.get(section) if isinstance(holder, dict) else None
            if isinstance(holder, dict):
                near |= holder.keys()
                holders += [holder] if key in holder else []
        if not holders:
            hint = suggest_nearest(key, sorted(near), "".join(f"{section}." for section in sections))
            raise InvalidError(f"{CONFIG_FILE} has no key {_shorten(name)} to ignore{hint}")
        for holder in holders:
            del holder[key]
    return config


def _read_object(store: Store, name: str) -> JsonObject:
    try:
        return parse_json(store.read(name))
    except (FileNotFoundError, WrongKindError):
        raise InvalidError(f"{store.url}/{name} is missing, or is not a file") from None
    except ValueError as error:
        raise InvalidError(f"{store.url}/{name} cannot be read: {error}") from error


def _read_index(store: Store) -> dict[str, str]:
    """Return the file of each tensor by the index. Only names of files in the directory itself are accepted."""

    def is_plain(name: object) -> bool:
        return (
            isinstance(name, str)
            and "\\" not in name
            and "\0" not in name
            and name.endswith(SUFFIX)
            and (PurePosixPath(name).name == name)
        )

    files = _read_object(store, INDEX_FILE).get("weight_map")
    if not isinstance(files, dict) or not files:
        raise InvalidError(f"{store.url}/{INDEX_FILE}: has no weight_map")
    strange = sorted({str(file) for file in files.values() if not is_plain(file)})
    if strange:
        lines = [f"{store.url}/{INDEX_FILE}: names {file[:200]!r}, needs a {SUFFIX} beside it" for file in strange]
        raise InvalidError("\n".join(lines))
    return files


def _list_weight_files(store: Store, names: list[str], index: dict[str, str] | None) -> list[str]:
    """Return the files that hold the weights: those of the index, the single file, or all safetensors files."""
    if index is not None:
        files = sorted(set(index.values()))
        missing = [file for file in files if file not in names]
        if missing:
            raise InvalidError("\n".join(f"{store.url}/{file} is missing, {INDEX_FILE} names it" for file in missing))
        return files
    found = [SINGLE_FILE] if SINGLE_FILE in names else [name for name in names if name.endswith(SUFFIX)]
    if found:
        return found
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        raise InvalidError(
            f"{store.url}/{pickles[0]} may be a pickle, which could run any program; needs *{SUFFIX}: load it with "
            "transformers where you trust it, and convert it with save_pretrained"
        )
    raise InvalidError(f"{store.url}: no *{SUFFIX} is here")


class _Header(NamedTuple):
    """Tensors of one file, its version, and its problem if it has one."""

    tensors: dict[str, TensorLocation]
    version: Version
    problem: str | None = None


def _read_header(store: Store, file: str, listed: FileInfo) -> _Header:
    size, version = listed.size_bytes, listed.version
    try:
        length = parse_header_length(store.read_range(file, 0, min(PREFIX_BYTES, size), version), size)
        content = store.read_range(file, PREFIX_BYTES, PREFIX_BYTES + length, version)
        return _Header(parse_header(content, file, size), version)
    # The message of the store already has the path.
    except WrongKindError as error:
        return _Header({}, version, str(error))
    except ValueError as error:
        return _Header({}, version, f"{store.url}/{file}: {error}")
