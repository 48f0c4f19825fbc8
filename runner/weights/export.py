"""The weights of a run in Hugging Face's layout, so that `transformers` opens them with no code of ours.

Read as by whoever only looks: nothing is claimed, and the run may go on meanwhile.
"""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from runner.checkpoint.leaves import dtype_called
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.manifest_key import LeafRecord
from runner.checkpoint.weights import read_weights, use_checkpoint, weight_names
from runner.config import DataConfig
from runner.data.subword import FILES
from runner.errors import DataError, InvalidError
from runner.record import PARAMS
from runner.storage import JsonObject, Store, encode_json
from runner.terminal import warn
from runner.weights.directory import CONFIG, INDEX, WHOLE
from runner.weights.family import Family, Piece, Shape, table_problems, tensor_shapes
from runner.weights.header import NAMES
from runner.weights.tokenizer import TOKENIZER, TOKENIZER_CONFIG, TokenizerFiles, tokenizer_files
from runner.weights.write import SHARD_BYTES, Writer, published_whole

GENERATION_CONFIG = "generation_config.json"
_NAMES = {CONFIG, GENERATION_CONFIG, INDEX, WHOLE, TOKENIZER, TOKENIZER_CONFIG, *FILES.values()}
_SHARD = re.compile(r"model-\d{5,}-of-\d{5,}\.safetensors")
Dtype = Literal["float32", "bfloat16", "float16"]


def export(
    where: str,
    step: int | str,
    family: Family,
    data: DataConfig | None,
    out: str,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: str = PARAMS,
) -> int:
    """Write the weights of a checkpoint to `out`, a path or URL where nothing is yet; the step that they are of.

    `where`, `step` and `weights` as of `open_checkpoint`. `data` says which tokenizer goes with them; `dtype` is the
    type of the files, by default that of each leaf. No more than a gibibyte, or one leaf, is in memory at a time.

    Raises `InvalidError`, or `StorageError` if something cannot be reached; then nothing is at `out`.
    """
    with published_whole(out) as directory:
        return export_into(directory, where, step, family, data, dtype, shard_bytes, weights).step


def export_into(
    directory: Path,
    where: str,
    step: int | str,
    family: Family,
    data: DataConfig | None,
    dtype: Dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    weights: str = PARAMS,
) -> Manifest:
    """Likewise into a directory on this disk that is there and empty; the manifest of the checkpoint."""

    def use(store: Store, manifest: Manifest) -> Manifest:
        _write(directory, store, manifest, family, data, dtype, shard_bytes, weights)
        return manifest

    return use_checkpoint(where, step, use)[0]


def may_be_written(name: str) -> bool:
    """Whether some export has a file of this name."""
    return name in _NAMES or _SHARD.fullmatch(name) is not None


def _write(
    directory: Path,
    store: Store,
    manifest: Manifest,
    family: Family,
    data: DataConfig | None,
    dtype: Dtype | None,
    shard_bytes: int,
    weights: str,
) -> None:
    names = weight_names(manifest, weights)
    leaves = {name: manifest.leaves[saved] for name, saved in names.items()}
    pieces, tensors = _tensors(manifest.name, leaves, family, dtype)
    tokenizer = _tokenizer(data, family.config())
    writer = Writer(directory, tensors, shard_bytes)
    for name, array in read_weights(store, manifest, weights):
        values = np.asarray(array)
        for piece in pieces[name]:
            writer.put(piece, values[piece.index])
    writer.verify()
    config = dict(family.config())
    config["torch_dtype"] = max((dtype for dtype, _ in tensors.values()), key=lambda dtype: dtype.itemsize).name
    if tokenizer.end is not None:
        config["eos_token_id"] = tokenizer.end
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config}
    files = {CONFIG: encode_json(config), GENERATION_CONFIG: encode_json({"_from_model_config": True, **ends})}
    for name, content in {**tokenizer.files, **files}.items():
        (directory / name).write_bytes(content)


def _tensors(
    checkpoint: str, leaves: Mapping[str, LeafRecord], family: Family, dtype: Dtype | None
) -> tuple[Mapping[str, list[Piece]], dict[str, tuple[np.dtype, Shape]]]:
    """The pieces of each leaf, and the type and shape of every tensor, in the order of the table."""
    shapes = {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}
    pieces = family.pieces()
    wrong = table_problems(pieces, shapes)
    if wrong:
        raise InvalidError("\n".join(f"checkpoint {checkpoint} is not of this model: {line}" for line in wrong))
    by_leaf: dict[str, list[Piece]] = defaultdict(list)
    dtypes: dict[str, np.dtype] = {}
    for piece in pieces:
        by_leaf[piece.leaf_name].append(piece)
        own = np.dtype(dtype_called(dtype or leaves[piece.leaf_name]["dtype"]))
        if own not in NAMES:
            raise InvalidError(f"{piece.leaf_name} is of type {own}; use --dtype")
        dtypes[piece.tensor] = own
    return by_leaf, {name: (dtypes[name], shape) for name, shape in tensor_shapes(pieces, shapes).items()}


def _tokenizer(data: DataConfig | None, config: JsonObject) -> TokenizerFiles:
    """The files of the tokenizer; none, and a line that says why, where it cannot be had."""
    try:
        found = TokenizerFiles(told="the job has no data") if data is None else tokenizer_files(data)
    except DataError as error:
        found = TokenizerFiles(told=str(error))
    size = config.get("vocab_size")
    if size is not None and found.vocabulary_size > size:
        raise InvalidError(f"the tokenizer has {found.vocabulary_size:,} ids, the model a vocabulary of {size:,}")
    if found.told is not None:
        warn(f"no tokenizer.json is written: {found.told}")
    return found
