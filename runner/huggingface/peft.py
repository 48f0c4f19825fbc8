"""Export of a run's adapter alone, in the layout of PEFT: `adapter_config.json` and `adapter_model.safetensors`.

By the documentation of PEFT (checkpoint format), the files hold `base_model.model.M.lora_A.weight` (rank, in) and
`lora_B.weight` (out, rank) for a linear module M. Several of our leaves may be one module there, as query, key and
value of GPT-2 are. The ranks of the adapted ones are then concatenated, and B is zero where A belongs to another leaf.

Shape legend: R rank of one adapter, I inputs and O outputs of a module, n adapted leaves of one module.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import safetensors

from runner.checkpoint.inspect import find_adapter, read_named_leaves, use_checkpoint
from runner.checkpoint.leaves import has_adapter, parse_dtype
from runner.checkpoint.manifest import Manifest
from runner.errors import InvalidError
from runner.huggingface.export import Dtype, publish_directory
from runner.huggingface.mapping import Family, TensorPiece
from runner.huggingface.safetensors import DTYPE_NAMES, encode_header
from runner.records import PARAMS
from runner.storage import JsonObject, Store, encode_json
from runner.storage.store import translate_errors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_WEIGHT, _PREFIX = ".weight", "base_model.model."


@dataclass(frozen=True)
class _Module:
    """Linear module of the files.

    Attributes:
        name: Name of the module.
        a: A of shape (n R, I).
        b: B of shape (O, n R).
        number: n.
        is_transposed: True if the weight of the module is (in, out).
    """

    name: str
    a: np.ndarray
    b: np.ndarray
    number: int
    is_transposed: bool


def export_adapter(
    where: str,
    step: int | str,
    family: Family,
    out: str,
    base: str,
    dtype: Dtype | None = None,
    weights: str = PARAMS,
) -> int:
    """Write the adapter of a checkpoint to `out`, and return its step.

    Args:
        where: Run directory or URL, as for `open_checkpoint`.
        step: Step, as for `open_checkpoint`.
        family: Mapping of the job.
        out: Path or URL, at which there is nothing yet.
        base: Name of the base model for `adapter_config.json`.
        dtype: Type of the files; by default that of the checkpoint.
        weights: Weights, as for `open_checkpoint`.

    Raises:
        InvalidError: There is no adapter, or the layout of PEFT cannot express it. Nothing is then at `out`.
    """
    with publish_directory(out) as directory:

        def write(store: Store, manifest: Manifest) -> int:
            if not has_adapter(manifest.leaves):
                raise InvalidError(
                    f"checkpoint {manifest.name} has no adapter: its run has no config.adapter; leave --adapter out"
                )
            # Averages of the weights have A and B of their own.
            pairs = find_adapter(manifest, weights)[1].matrices
            names = [name for pair in pairs.values() for name in pair]
            arrays = {name: np.asarray(array) for name, array in read_named_leaves(store, manifest, names)}
            matrices = {name: (arrays[a], arrays[b]) for name, (a, b) in pairs.items()}
            modules = list(_build_modules(family.pieces(), matrices))
            tensors: dict[str, np.ndarray] = {}
            for module in modules:
                tensors[f"{_PREFIX}{module.name}.lora_A.weight"] = module.a
                tensors[f"{_PREFIX}{module.name}.lora_B.weight"] = module.b
            tensors = {name: array.astype(parse_dtype(dtype)) if dtype else array for name, array in tensors.items()}
            head, _ = encode_header({name: (DTYPE_NAMES[array.dtype], array.shape) for name, array in tensors.items()})
            content = head + b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
            with translate_errors(directory / TENSORS):
                (directory / TENSORS).write_bytes(content)
            # A damaged file is found here, before it is published.
            with safetensors.safe_open(directory / TENSORS, framework="np") as found:
                assert set(found.keys()) == tensors.keys(), f"{TENSORS} does not hold what was written"
            with translate_errors(directory / CONFIG):
                (directory / CONFIG).write_bytes(encode_json(_make_config(manifest, modules, base)))
            return manifest.step

        return use_checkpoint(where, step, write)[0]


def _make_config(manifest: Manifest, modules: Sequence[_Module], base: str) -> JsonObject:
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


def _build_modules(
    pieces: Sequence[TensorPiece], matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]
) -> Iterator[_Module]:
    """Yield the modules that have an adapter, in the order of the table.

    Args:
        pieces: Table of the family.
        matrices: A and B by the name of the adapted leaf.

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
        yield _Module(tensor.removesuffix(_WEIGHT), a, b, len(own), not adapted[0].transpose)
