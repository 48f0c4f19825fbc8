"""Small family with every kind of tensor piece, its weights, and exports of them written by safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from runner.huggingface.mapping import Family, TensorPiece
from runner.storage import JsonObject

L, E, V, D, M = 2, 3, 8, 16, 24
SHAPES = {
    "params.embedding": (V, D),
    "params.scale": (),
    "params.blocks.query": (L, D, D),
    "params.blocks.key": (L, D, D // 2),
    "params.blocks.bias": (L, D),
    "params.blocks.expert": (L, E, D, M),
    "params.blocks.gain": (L, E),
    "params.blocks.even": (L, E, D),
    "params.blocks.odd": (L, E, D),
}


class SmallFamily(Family):
    """Family whose files have (out, in) kernels, one tensor for query and key, and one tensor per expert.

    Two leaves take turns in one tensor of all experts.
    """

    def pieces(self) -> list[TensorPiece]:
        found = [TensorPiece("model.embedding.weight", "embedding"), TensorPiece("model.scale", "scale")]
        for layer in range(L):
            prefix = f"model.layers.{layer}"
            found.append(TensorPiece(f"{prefix}.qk.weight", "blocks.query", (layer,), True, (0, 0, D)))
            found.append(TensorPiece(f"{prefix}.qk.weight", "blocks.key", (layer,), True, (0, D, D + D // 2)))
            found.append(TensorPiece(f"{prefix}.bias", "blocks.bias", (layer,)))
            for start, leaf in enumerate(("even", "odd")):
                part = (1, start, 2 * D)
                found.append(TensorPiece(f"{prefix}.experts.pairs", f"blocks.{leaf}", (layer,), part=part, step=2))
            for expert in range(E):
                found.append(TensorPiece(f"{prefix}.experts.{expert}.gain", "blocks.gain", (layer, expert)))
                found.append(TensorPiece(f"{prefix}.experts.{expert}.weight", "blocks.expert", (layer, expert), True))
        return found

    def config(self) -> JsonObject:
        return {"model_type": "small", "architectures": ["Small"], "theta": 1.0}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        needed = {"model_type": "small", "theta": 1.0}
        return [
            f"{key}: got {config.get(key)!r}, the model needs {value!r}"
            for key, value in needed.items()
            if config.get(key) != value
        ]


def make_leaves(seed: int = 0, dtype: str = "float32") -> dict[str, np.ndarray]:
    """Make random weights by the leaf names of the state."""
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.normal(size=shape)).astype(dtype) for name, shape in SHAPES.items()}


def convert_to_tensors(found: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Convert leaves to the tensors of the files, independently of the family's table."""
    files = {"model.embedding.weight": found["params.embedding"], "model.scale": found["params.scale"]}
    for layer in range(L):
        prefix = f"model.layers.{layer}"
        query, key = found["params.blocks.query"][layer].T, found["params.blocks.key"][layer].T
        files[f"{prefix}.qk.weight"] = np.concatenate([query, key])
        files[f"{prefix}.bias"] = found["params.blocks.bias"][layer]
        pairs = [found[f"params.blocks.{leaf}"][layer] for leaf in ("even", "odd")]
        files[f"{prefix}.experts.pairs"] = np.stack(pairs, axis=-1).reshape(E, 2 * D)
        for expert in range(E):
            files[f"{prefix}.experts.{expert}.gain"] = found["params.blocks.gain"][layer, expert]
            files[f"{prefix}.experts.{expert}.weight"] = found["params.blocks.expert"][layer, expert].T
    return {name: np.array(value, order="C") for name, value in files.items()}


def write_export(directory: Path, files: dict[str, np.ndarray], num_shards: int = 1, **config: Any) -> Path:
    """Write a directory in Hugging Face's layout with the library."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(SmallFamily().config() | config))
    if num_shards == 1:
        save_file(files, directory / "model.safetensors")
        return directory
    weight_map = {}
    for number in range(num_shards):
        name = f"model-{number + 1:05}-of-{num_shards:05}.safetensors"
        part = dict(list(files.items())[number::num_shards])
        save_file(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def nest(found: dict[str, Any]) -> dict[str, Any]:
    """Convert dotted names to nested dictionaries."""
    nested: dict[str, Any] = {}
    for name, value in found.items():
        *parents, last = name.split(".")
        branch = nested
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return nested


def are_bits_equal(found: Any, expected: dict[str, np.ndarray]) -> bool:
    """Return True if a tree of arrays is bit-identical to the expected leaves."""
    pairs = jax.tree.map(lambda a, b: np.asarray(a).tobytes() == b.tobytes(), found, nest(expected))
    return all(jax.tree.leaves(pairs))
