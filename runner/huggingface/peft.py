"""The adapter of a run alone, in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

By the documentation of PEFT (checkpoint format): of a linear module M the files hold `base_model.model.M.lora_A.weight`
(rank, in) and `lora_B.weight` (out, rank). Where several of our leaves are one tensor there, as query, key and value of
GPT-2, the ranks of those that are adapted stand in a row, and B is zero where A is of another one.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import safetensors

from runner.checkpoint.leaves import parse_dtype
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.weight_names import has_adapter
from runner.checkpoint.weights import find_adapter, read_named_leaves, use_checkpoint
from runner.errors import InvalidError
from runner.huggingface.export import Dtype, publish_directory
from runner.huggingface.mapping import Family, TensorPiece
from runner.huggingface.safetensors import DTYPE_NAMES, encode_header
from runner.records import PARAMS
from runner.storage import JsonObject, Store, encode_json

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT, _PREFIX = ".weight", "base_model.model."


@dataclass(frozen=True)
class _Module:
    """A linear module of the files: A (rank, in) and B (out, rank), of which `number` adapters stand in a row."""

    name: str
    a: np.ndarray
    b: np.ndarray
    number: int
    is_transposed: bool  # its weight is (in, out)


def export_adapter(
    where: str,
    step: int | str,
    family: Family,
    out: str,
    base: str,
    dtype: Dtype | None = None,
    weights: str = PARAMS,
) -> int:
    """Write the adapter of a checkpoint to `out`, a path or URL where nothing is yet; the step that it is of.

    `where`, `step` and `weights` as of `open_checkpoint`; `base` is told as what it adapts; `dtype` by default that of
    the checkpoint. Raises `InvalidError` if there is no adapter, or PEFT has no form for it; then nothing is at `out`.
    """
    with publish_directory(out) as directory:

        def use(store: Store, manifest: Manifest) -> int:
            _write(directory, store, manifest, family, base, dtype, weights)
            return manifest.step

        return use_checkpoint(where, step, use)[0]


def _write(
    directory: Path,
    store: Store,
    manifest: Manifest,
    family: Family,
    base: str,
    dtype: Dtype | None,
    weights: str,
) -> None:
    if not has_adapter(manifest.leaves):
        raise InvalidError(f"checkpoint {manifest.name} has no adapter: its run has no config.adapter; leave --adapter")
    pairs = find_adapter(manifest, weights)[1].matrices
    names = [name for pair in pairs.values() for name in pair]
    arrays = {name: np.asarray(array) for name, array in read_named_leaves(store, manifest, names)}
    matrices = {name: (arrays[a], arrays[b]) for name, (a, b) in pairs.items()}
    modules = list(_modules(family.pieces(), matrices))
    tensors: dict[str, np.ndarray] = {}
    for module in modules:
        tensors[f"{_PREFIX}{module.name}.lora_A.weight"] = module.a
        tensors[f"{_PREFIX}{module.name}.lora_B.weight"] = module.b
    tensors = {name: array.astype(parse_dtype(dtype)) if dtype else array for name, array in tensors.items()}
    head, _ = encode_header({name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in tensors.items()})
    content = head + b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    (directory / TENSORS).write_bytes(content)
    with safetensors.safe_open(directory / TENSORS, framework="np") as found:
        assert set(found.keys()) == tensors.keys(), f"{TENSORS} does not hold what was written"
    (directory / CONFIG).write_bytes(encode_json(_config(manifest, modules, base)))


def _config(manifest: Manifest, modules: Sequence[_Module], base: str) -> JsonObject:
    """What PEFT's `LoraConfig` reads. Each module's alpha grows with its rank, so that alpha over rank is the same."""
    rank, alpha = manifest.identity["config.adapter.rank"], manifest.identity["config.adapter.alpha"]
    in_a_row = [module for module in modules if module.number > 1]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [module.name for module in modules],
        "rank_pattern": {module.name: rank * module.number for module in in_a_row},
        "alpha_pattern": {module.name: alpha * module.number for module in in_a_row},
        "fan_in_fan_out": any(module.is_transposed for module in modules),
        "inference_mode": True,
    }


def _modules(pieces: Sequence[TensorPiece], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Iterator[_Module]:
    """The modules that have an adapter, in the order of the table."""
    by_tensor: dict[str, list[TensorPiece]] = defaultdict(list)
    for piece in pieces:
        by_tensor[piece.tensor].append(piece)
    for tensor, parts in by_tensor.items():
        if any(part.leaf_name in matrices for part in parts):
            _refuse(parts, matrices)
            size = max(part.part[2] for part in parts if part.part) if parts[0].part else None
            yield _module(tensor, size, [part for part in parts if part.leaf_name in matrices], matrices)


def _refuse(parts: Sequence[TensorPiece], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
    for part in parts:
        out_axis = 0 if part.transpose else 1
        is_linear = part.transpose or part.leaf.endswith(".kernel")
        is_cut_well = part.part is None or part.part[0] == out_axis
        if part.leaf_name in matrices and not (
            is_linear and is_cut_well and len(part.index) == 1 and part.tensor.endswith(_WEIGHT)
        ):
            raise InvalidError(
                f"{part.leaf} is {part.tensor}, which is no linear module of a layer: PEFT's files have no plain form "
                "for its adapter; export without --adapter, which merges"
            )


def _module(
    tensor: str, size: int | None, parts: Sequence[TensorPiece], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> _Module:
    """Of the adapted `parts` of a tensor that gives `size` features; None: the only part gives all."""
    own = [(part, *(matrix[part.index] for matrix in matrices[part.leaf_name])) for part in parts]
    rank, features = own[0][2].shape
    rows = np.zeros((size or features, rank * len(own)), own[0][2].dtype)
    for number, (part, _, b) in enumerate(own):
        start = part.part[1] if part.part else 0
        rows[start : start + b.shape[1], number * rank : (number + 1) * rank] = b.T
    a = np.concatenate([a.T for _, a, _ in own])
    return _Module(tensor.removesuffix(_WEIGHT), a, rows, len(own), not parts[0].transpose)
