"""Export of a run's weights in the layout of Hugging Face, or of its adapter alone in that of PEFT.

The files of an export include its assets, so that `transformers` opens them unchanged.

An export is read-only for the run, which may continue meanwhile. Shapes and types of all tensors are known before the
first one is written: each file gets its header and its size at once, and then each piece is written to its place.
Memory holds no more than a gibibyte, or one leaf. The result is published as a whole or not at all.
"""

import contextlib
import errno
import math
import os
import re
import shutil
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import safetensors

from runner.checkpoint.inspect import find_weights, read_named_leaves, read_weights, use_checkpoint
from runner.checkpoint.leaves import has_frozen_base, parse_dtype
from runner.checkpoint.manifest import LeafRecord, Manifest
from runner.config import DataConfig
from runner.console import warn
from runner.data.tokenizers import TOKENIZER_FILES
from runner.errors import DataError, InvalidError
from runner.huggingface.assets import (
    BASE_TOKENIZER_FILES,
    GENERATION_CONFIG,
    TOKENIZER,
    TOKENIZER_CONFIG,
    ExportAssets,
    TokenizerFiles,
    find_assets,
    read_assets,
    replace_tokenizer,
    unnest_config,
)
from runner.huggingface.mapping import Family, Shape, TensorPiece, compute_tensor_shapes, find_table_problems
from runner.huggingface.safetensors import (
    CONFIG_FILE,
    DTYPE_NAMES,
    DTYPES,
    INDEX_FILE,
    SINGLE_FILE,
    SUFFIX,
    TensorLocation,
    encode_header,
)
from runner.spec import PARAMS, InitFromConfig
from runner.storage import JsonObject, Store, encode_json, open_store, parse_json, probe_store
from runner.storage.store import fsync, make_directory, translate_errors

# Files of tensors.

SHARD_BYTES = 5_000_000_000
UPLOAD_SECONDS = 3600.0  # for one file


class _SafetensorsWriter:
    """Safetensors files of some tensors, in order, in an existing empty directory on this disk.

    Only a file with a single tensor may be larger than `shard_bytes`.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, tuple[np.dtype, Shape]], shard_bytes: int = SHARD_BYTES):
        self._directory = directory
        self._locations: dict[str, TensorLocation] = {}
        shards: list[list[str]] = [[]]
        size = 0
        for name, (dtype, shape) in tensors.items():
            num_bytes = math.prod(shape) * dtype.itemsize
            if shards[-1] and size + num_bytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append(name)
            size += num_bytes
        for number, names in enumerate(shards, start=1):
            file = SINGLE_FILE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}{SUFFIX}"
            head, locations = encode_header({name: (DTYPE_NAMES[tensors[name][0]], tensors[name][1]) for name in names})
            with translate_errors(directory / file), (directory / file).open("wb", buffering=0) as stream:
                stream.write(head)
                # Allocate the file, so that a full disk is an error here instead of a crash when a mapped page is
                # written.
                os.posix_fallocate(stream.fileno(), 0, max([len(head), *(each.stop for each in locations.values())]))
            self._locations |= {name: each._replace(file=file) for name, each in locations.items()}
        if len(shards) > 1:
            # The index is the form in which transformers finds the shard of each tensor.
            total = sum(each.stop - each.start for each in self._locations.values())
            files = {name: self._locations[name].file for name in sorted(self._locations)}
            with translate_errors(directory / INDEX_FILE):
                content = encode_json({"metadata": {"total_size": total}, "weight_map": files})
                (directory / INDEX_FILE).write_bytes(content)

    def put(self, piece: TensorPiece, values: np.ndarray) -> None:
        """Write one piece, whose values have the form of the leaf, rounded to the nearest values of the tensor's type.

        Raises:
            InvalidError: A value is too large for the type.
        """
        location = self._locations[piece.tensor]
        dtype = DTYPES[location.dtype]
        values = values.swapaxes(-1, -2) if piece.transpose else values
        with np.errstate(over="ignore"):
            converted = values.astype(dtype)
        # Infinite values of the leaf stay infinite; only values that become infinite are an error.
        if dtype.itemsize < values.dtype.itemsize and (np.isinf(converted) & ~np.isinf(values)).any():
            raise InvalidError(f"{piece.tensor} has values that {dtype} cannot hold; use another --dtype")
        if not converted.size:
            return
        # An error of the output must not look like one of the checkpoint.
        with translate_errors(self._directory / location.file):
            target = np.memmap(self._directory / location.file, dtype, "r+", location.start, location.shape)
        box = [slice(None)] * target.ndim
        if piece.part is not None:
            axis, start, stop = piece.part
            box[axis] = slice(start, stop, piece.step)
        target[tuple(box)] = converted

    def verify(self) -> None:
        """Open every file with the format's own library."""
        for file in sorted({each.file for each in self._locations.values()}):
            with safetensors.safe_open(self._directory / file, framework="np") as found:
                names = {name for name, each in self._locations.items() if each.file == file}
                assert set(found.keys()) == names, f"{file} does not hold what was written"


# Publishing.


MARK_FILE = "export.json"  # in the export that a run makes at its end: the run, its step, and the options


def has_export(where: str, mark: JsonObject) -> bool:
    """Return True if the export with this mark is complete at `where`, False if nothing or a part of it is there.

    Raises `InvalidError` if something else is there, and `StorageError`.
    """
    store = open_store(where)
    names = store.list_names("")
    if not names:
        return False
    try:
        found = parse_json(store.read(MARK_FILE))
    except (FileNotFoundError, ValueError):
        found = None
    if found != mark:
        is_own = found is not None and found.get("run") == mark["run"]
        raise InvalidError(
            f"{store.url} is not empty{', but an export of this run with other options or step' if is_own else ''}; "
            "nothing is overwritten: remove it, or name another directory"
        )
    return CONFIG_FILE in names


@contextlib.contextmanager
def publish_directory(where: str, mark: JsonObject | None = None) -> Iterator[Path]:
    """Yield a local directory to write into, and publish its files at `where` at the end, all or nothing.

    On a disk the directory is renamed. In a bucket `config.json`, without which no reader accepts the rest, is uploaded
    last. A `mark` is a file of the export, the first one in a bucket, by which an upload that was killed is continued.

    Raises:
        InvalidError: The target is not empty, or cannot be written. Raised at the start.
    """
    store = open_store(where)
    if store.list_names("") and (mark is None or has_export(where, mark)):
        raise InvalidError(f"{store.url} is not empty; nothing is overwritten")
    if store.root is None:
        probe_store(store)
        with tempfile.TemporaryDirectory(prefix="export-") as directory:
            _write_mark(Path(directory), mark)
            yield Path(directory)
            order = {MARK_FILE: 0, CONFIG_FILE: 2}
            for path in sorted(Path(directory).iterdir(), key=lambda path: (order.get(path.name, 1), path.name)):
                store.upload(path, path.name, UPLOAD_SECONDS)
        return
    temporary = store.root.with_name(f".{store.root.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with translate_errors(temporary):
            make_directory(temporary)
        _write_mark(temporary, mark)
        yield temporary
        with translate_errors(store.root):
            # The content must be durable before the name is, or a power cut could leave an empty export.
            for path in [*temporary.iterdir(), temporary]:
                fsync(path)
            try:
                temporary.rename(store.root)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise InvalidError(f"{store.root} is not empty; nothing is overwritten") from error
                raise
            fsync(store.root.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_mark(directory: Path, mark: JsonObject | None) -> None:
    if mark is not None:
        with translate_errors(directory / MARK_FILE):
            (directory / MARK_FILE).write_bytes(encode_json(mark))


# Export.

_CONTEXT = "max_position_embeddings"
_NAMES = {CONFIG_FILE, GENERATION_CONFIG, INDEX_FILE, SINGLE_FILE, *BASE_TOKENIZER_FILES, *TOKENIZER_FILES.values()}
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
Dtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export."""

    dtype: Dtype | None = None  # type of the files; by default that of each leaf
    shard_bytes: int = SHARD_BYTES  # size of a file
    weights: str = PARAMS  # weights, as for `open_checkpoint`
    # `checkpoint.init_from` of the run, for runs that have not recorded their assets.
    base: InitFromConfig | None = None
    # Context length to write; by default that of the published weights that the run started from, if the model still
    # has their positions, else the sequence length.
    context: int | None = None
    tokenizer: str | None = None  # directory or URL of another tokenizer


def export(
    where: str, step: int | str, family: Family, data: DataConfig | None, out: str, options: ExportOptions | None = None
) -> int:
    """Write the weights of a checkpoint to `out`, and return their step.

    `where` and `step` are those of `open_checkpoint`, and at `out`, a path or URL, there is nothing yet. `data`
    determines the tokenizer of a run that has not recorded it.

    Raises:
        InvalidError: The weights cannot be exported in this form. Nothing is then at `out`.
        StorageError: A store cannot be reached. Nothing is then at `out`.
    """
    with publish_directory(out) as directory:
        return export_into(directory, where, step, family, data, options or ExportOptions()).step


def export_into(
    directory: Path, where: str, step: int | str, family: Family, data: DataConfig | None, options: ExportOptions
) -> Manifest:
    """Write the weights of a checkpoint into an existing empty directory on this disk, and return its manifest.

    The arguments and errors are those of `export`.
    """

    def write(store: Store, manifest: Manifest) -> Manifest:
        names = find_weights(manifest, options.weights).names
        leaves = {name: manifest.leaves[saved] for name, saved in names.items()}
        pieces, tensors = _plan_tensors(manifest.name, leaves, family, options.dtype)
        # Checks that may refuse the export come before the weights, which take long to write.
        dtype = max((dtype for dtype, _ in tensors.values()), key=lambda dtype: dtype.itemsize)
        files = _make_files(store, family, data, options, dtype)
        writer = _SafetensorsWriter(directory, tensors, options.shard_bytes)
        for name, array in read_weights(store, manifest, options.weights):
            values = np.asarray(array)
            for piece in pieces[name]:
                writer.put(piece, values[piece.index])
        # A damaged export is found here, before it is published.
        writer.verify()
        for name, content in files.items():
            # A full disk is not a problem of the checkpoint, so its error must not be reported as such.
            with translate_errors(directory / name):
                (directory / name).write_bytes(content)
        return manifest

    return use_checkpoint(where, step, write)[0]


def _make_files(
    store: Store, family: Family, data: DataConfig | None, options: ExportOptions, dtype: np.dtype
) -> dict[str, bytes]:
    """Return the files beside the weights: configs and tokenizer. Without a tokenizer a warning says why."""
    try:
        assets = read_assets(store) or find_assets(data, options.base)
    except DataError as error:
        assets = ExportAssets(TokenizerFiles(problem=str(error)))
    if options.tokenizer is not None:
        assets = replace_tokenizer(assets, options.tokenizer)
    config = dict(family.config())
    size = config.get("vocab_size")
    if size is not None and assets.tokenizer.vocabulary_size > size:
        raise InvalidError(
            f"the tokenizer has {assets.tokenizer.vocabulary_size:,} ids, the model a vocabulary of {size:,}"
        )
    if assets.tokenizer.problem is not None:
        warn(f"no {TOKENIZER} is written: {assets.tokenizer.problem}")
    # transformers loads all tensors in one type; the widest one loses nothing.
    config["torch_dtype"] = dtype.name
    files = dict(assets.tokenizer.files)
    if options.context is not None and _CONTEXT not in config:
        raise InvalidError(f"--context {options.context}: the positions of {config.get('model_type')} are a tensor")
    if options.context is not None:
        config[_CONTEXT] = options.context
        if TOKENIZER_CONFIG in files:
            settings = parse_json(files[TOKENIZER_CONFIG]) | {"model_max_length": options.context}
            files[TOKENIZER_CONFIG] = encode_json(settings)
    elif _CONTEXT in config and assets.config is not None and not family.differences(assets.config):
        # Training on shorter sequences does not reduce the context length of the published weights.
        context = unnest_config(assets.config).get(_CONTEXT)
        config[_CONTEXT] = max(config[_CONTEXT], context) if type(context) is int else config[_CONTEXT]
    ids = assets.list_ids()
    config |= ids
    files[CONFIG_FILE] = encode_json(config)
    files[GENERATION_CONFIG] = encode_json({"_from_model_config": True, **assets.generation, **ids})
    return files


def is_export_file(name: str) -> bool:
    """Return True if an export may have a file of this name."""
    return name in _NAMES or _SHARD.fullmatch(name) is not None


def _plan_tensors(
    checkpoint: str, leaves: Mapping[str, LeafRecord], family: Family, dtype: Dtype | None
) -> tuple[Mapping[str, list[TensorPiece]], dict[str, tuple[np.dtype, Shape]]]:
    """Return the pieces of each leaf, and the type and shape of every tensor in the order of the table."""
    shapes = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    pieces = family.pieces()
    problems = find_table_problems(pieces, shapes)
    if problems:
        raise InvalidError("\n".join(f"checkpoint {checkpoint} is not of this model: {line}" for line in problems))
    left_out = sorted({piece.leaf_name for piece in pieces if not piece.tensor})
    if left_out:
        warn(f"{len(left_out)} leaves are left out, which files of this family do not hold: {left_out[0]}, ...")
    copies = family.copies()
    pieces = [piece for piece in pieces if piece.tensor]
    pieces += [replace(piece, tensor=copy) for copy in copies for piece in pieces if piece.tensor == copies[copy]]
    by_leaf: dict[str, list[TensorPiece]] = defaultdict(list)
    dtypes: dict[str, np.dtype] = {}
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        own = np.dtype(parse_dtype(dtype or leaves[piece.leaf_name]["dtype"]))
        if own not in DTYPE_NAMES:
            raise InvalidError(f"{piece.leaf_name} is of type {own}, which cannot be exported; use --dtype")
        dtypes[piece.tensor] = own
    return by_leaf, {name: (dtypes[name], shape) for name, shape in compute_tensor_shapes(pieces, shapes).items()}


# The adapter alone, in the layout of PEFT.
#
# By the documentation of PEFT (checkpoint format), the files hold `base_model.model.M.lora_A.weight` (rank, in) and
# `lora_B.weight` (out, rank) for a linear module M. Several of our leaves may be one module there, as query, key and
# value of GPT-2 are. The ranks of the adapted ones are then concatenated, and B is zero where A belongs to another
# leaf. Shape legend: R rank of one adapter, I inputs and O outputs of a module, n adapted leaves of one module.

_ADAPTER_CONFIG, _ADAPTER_TENSORS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT, _PREFIX = ".weight", "base_model.model."


@dataclass(frozen=True)
class _AdaptedModule:
    """Linear module of the files."""

    name: str
    a: np.ndarray  # A of shape (n R, I)
    b: np.ndarray  # B of shape (O, n R)
    number: int  # n
    is_transposed: bool  # True if the weight of the module is (in, out)


def export_adapter(
    where: str, step: int | str, family: Family, out: str, base: str, dtype: Dtype | None = None, weights: str = PARAMS
) -> int:
    """Write the adapter of a checkpoint to `out`, and return its step.

    `where`, `step` and `weights` are those of `open_checkpoint`, and at `out`, a path or URL, there is nothing yet.
    `base` is the name of the base model for `adapter_config.json`. The type is by default that of the checkpoint.

    Raises:
        InvalidError: There is no adapter, or the layout of PEFT cannot express it. Nothing is then at `out`.
    """
    with publish_directory(out) as directory:

        def write(store: Store, manifest: Manifest) -> int:
            if not has_frozen_base(manifest.leaves):
                raise InvalidError(
                    f"checkpoint {manifest.name} has no adapter: its run has no config.adapter; leave --adapter out"
                )
            # Averages of the weights have separate A and B.
            pairs = find_weights(manifest, weights).matrices
            names = [name for pair in pairs.values() for name in pair]
            arrays = {name: np.asarray(array) for name, array in read_named_leaves(store, manifest, names)}
            matrices = {name: (arrays[a], arrays[b]) for name, (a, b) in pairs.items()}
            modules = list(_build_adapted_modules([piece for piece in family.pieces() if piece.tensor], matrices))
            tensors: dict[str, np.ndarray] = {}
            for module in modules:
                tensors[f"{_PREFIX}{module.name}.lora_A.weight"] = module.a
                tensors[f"{_PREFIX}{module.name}.lora_B.weight"] = module.b
            tensors = {name: array.astype(parse_dtype(dtype)) if dtype else array for name, array in tensors.items()}
            head, _ = encode_header({name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in tensors.items()})
            content = head + b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
            with translate_errors(directory / _ADAPTER_TENSORS):
                (directory / _ADAPTER_TENSORS).write_bytes(content)
            # A damaged file is found here, before it is published.
            with safetensors.safe_open(directory / _ADAPTER_TENSORS, framework="np") as found:
                assert set(found.keys()) == tensors.keys(), f"{_ADAPTER_TENSORS} does not hold what was written"
            with translate_errors(directory / _ADAPTER_CONFIG):
                (directory / _ADAPTER_CONFIG).write_bytes(encode_json(_make_adapter_config(manifest, modules, base)))
            return manifest.step

        return use_checkpoint(where, step, write)[0]


def _make_adapter_config(manifest: Manifest, modules: Sequence[_AdaptedModule], base: str) -> JsonObject:
    """Return the content of PEFT's `LoraConfig`."""
    rank, alpha = manifest.identity["config.adapter.rank"], manifest.identity["config.adapter.alpha"]
    # The alpha of a module grows with its rank, so that alpha / rank is the same for all.
    concatenated = [module for module in modules if module.number > 1]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.name for module in modules],
        "rank_pattern": {module.name: rank * module.number for module in concatenated},
        "alpha_pattern": {module.name: alpha * module.number for module in concatenated},
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "inference_mode": True,
    }


def _build_adapted_modules(
    pieces: Sequence[TensorPiece], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Iterator[_AdaptedModule]:
    """Yield the modules that have an adapter, in the order of the table.

    `matrices` are A and B by the name of the adapted leaf.

    Raises:
        InvalidError: An adapted leaf is not a linear module of a layer.
    """
    by_tensor: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.tensor].append(piece)
    for tensor, parts in by_tensor.items():
        adapted = [part for part in parts if part.leaf_name in matrices]
        if not adapted:
            continue
        for part in adapted:
            # PEFT adapts whole linear modules, so leaves may share a tensor only along its outputs.
            out_axis = 0 if part.transpose else 1
            is_linear = part.transpose or part.leaf.endswith(".kernel")
            is_split_by_outputs = part.part is None or part.part[0] == out_axis
            is_of_one_layer = len(part.index) == 1 and part.tensor.endswith(_WEIGHT)
            if not (is_linear and is_split_by_outputs and is_of_one_layer):
                raise InvalidError(
                    f"{part.leaf} is {part.tensor}, which is not a linear module of a layer: PEFT's files have no "
                    "plain form for its adapter; export without --adapter, which merges"
                )
        own = [(part, *(matrix[part.index] for matrix in matrices[part.leaf_name])) for part in adapted]
        rank, features = own[0][2].shape
        # A module that several leaves share has the outputs of all of them, adapted or not.
        num_outputs = max(part.part[2] for part in parts if part.part) if parts[0].part else features
        b = np.zeros((num_outputs, rank * len(own)), own[0][2].dtype)
        for number, (part, _, own_b) in enumerate(own):
            start = part.part[1] if part.part else 0
            b[start : start + own_b.shape[1], number * rank : (number + 1) * rank] = own_b.T
        # Leaves that share a module become one adapter of their joint rank, block by block.
        a = np.concatenate([own_a.T for _, own_a, _ in own])
        yield _AdaptedModule(tensor.removesuffix(_WEIGHT), a, b, len(own), not adapted[0].transpose)
