"""Comparison of a train step on many simulated devices with the same step on one device, over meshes of all axes.

    python -m tests.support.sharded_step DEVICES KIND     prints the difference of a step for each mesh of DEVICES

A kind of job combines options whose computation depends on the mesh. New mesh axes are included through `AXES`.
"""

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner.parallel.mesh import AXES, STATE_AXES
from runner.train.layout import list_batch_layouts
from runner.train.state import get_shardings
from runner.train.step import Batch
from runner.trainer import BaseTrainer
from tests.support.tiny_jobs import format_mesh, make_gpt

Mesh = Mapping[str, int]
Changes = dict[str, Any]

MAX_DEVICES = 16  # divides the half sequences, heads, experts, examples and vocabulary below
GRADIENTS = optax.trace(decay=0.0)  # its state is the gradients of the last step
SCALE = 3.0  # factor of the initial matrices, so that no router decision depends on rounding and every term contributes

DECODER = {"layers": 2, "width": 64, "heads": 16, "mlp_width": 96}
GPT = {"layers": 2, "width": 64, "heads": 16}
EXPERTS = {"experts": 16, "experts_per_token": 2, "auxiliary_loss": 0.1, "router_z_loss": 0.01}


class JobKind(NamedTuple):
    """Kind of job: its class, its model, other keys of `config`, axes that it refuses, and factor of its matrices.

    `loss` and `gradient` are the largest differences that a mesh may make, see `Difference`.
    """

    job: type[BaseTrainer]
    model: Changes
    others: Mapping[str, Any] = MappingProxyType({})
    refused_axes: frozenset[str] = frozenset()
    scale: float = SCALE
    loss: float = 1e-5
    gradient: float = 1e-4


# Rounding in the compute type takes a few values to the next one of 8 bits.
FLIPS: Changes = {"scale": 1.0, "loss": 1e-4, "gradient": 5e-3}
STOCHASTIC = {"precision.gradient_rounding": "stochastic"}
PACKED = {"data.packing": "documents", "data.source": "TEXTS"}
GROUPED = {
    "key_value_heads": 2,
    "head_dim": 8,
    "norm": "both",
    "norm_offset": True,
    "norm_epsilon": 1e-4,
    "query_key_norm": "head",
    "bias": {"query_key_value": True, "attention_out": True, "mlp": True},
    "query_scale": 0.3,
    "mlp": "geglu",
    "embedding_scale": "sqrt_width",
}
# The window is narrower than a sequence shard on most meshes, and wider than one (4 positions) on 16 devices.
WINDOWS = {
    "layers": 3,
    "layer_pattern": ["window", "full", "no_rope"],
    "window": 5,
    "rope": {"theta": 100.0, "scaling": {"name": "yarn", "factor": 4.0, "original_positions": 16}},
    "window_rope": {"theta": 50.0},
    "attention_softcap": 3.0,
    "logit_softcap": 2.0,
    "z_loss": 0.1,
}
LATENT = {
    "latent": {"query_rank": 12, "key_value_rank": 16, "plain_head_dim": 8, "rotary_head_dim": 4, "value_head_dim": 6},
    "rope": {"pairs": "neighbours"},
    "layer_loop": "unroll",
    "neftune_alpha": 5.0,
}
SIGMOID = {"gate": "sigmoid", "bias_rate": 0.01, "shared_experts": 1, "dense_layers": 1, "expert_width": 16}
GROUPS = {"groups": 4, "groups_per_token": 2, "group_score": "max", "routed_scale": 2.5, "normalise_gates": False}
HYBRID = {
    "layers": 3,
    "layer_pattern": ["linear", "full"],
    "linear": {"key_heads": 16, "value_heads": 32, "key_head_dim": 4, "value_head_dim": 4}
    | {"conv_width": 3, "projections": "separate"},
    "attention_gate": True,
    "head_dim": 8,
    "rope": {"fraction": 0.5},
    "moe": EXPERTS | {"shared_experts": 1, "shared_gate": True, "shared_width": 32},
}
SHARING = {
    "layers": 6,
    "layer_pattern": ["window", "full"],
    "window": 5,
    "head_dim": 8,
    "full_heads": {"head_dim": 12, "key_value_heads": 2, "keys_as_values": True},
    "key_value_sharing": {"layers": 2, "mlp_width": 128},
    "layer_embedding_width": 16,
    "layer_scale": True,
    "norm": "both",
    "query_key_norm": "head",
    "value_norm": True,
    "rope": {"fraction": 0.5, "proportional": True},
    "query_scale": 0.5,
}
BESIDE = {"norm": "both", "moe": EXPERTS | {"expert_width": 32, "beside_mlp": True, "scaled_router": True}}
FURTHER = {"extra_predictions": 2, "extra_prediction_weight": 1.0}
SINKS = {"attention_sinks": True, "mlp": "clamped_swiglu", "moe": EXPERTS | {"bias": True}}
JOB_KINDS = {
    "dense": JobKind(PretrainDecoder, {"tied_embedding": True}),
    "packed": JobKind(PretrainDecoder, {}, PACKED),
    "grouped heads": JobKind(PretrainDecoder, GROUPED, {"memory.row_attention": "ring", "memory.attention": "library"}),
    "window": JobKind(PretrainDecoder, WINDOWS, PACKED | {"memory.row_attention": "ring"}),
    "window, gathered": JobKind(PretrainDecoder, WINDOWS, PACKED | {"memory.row_attention": "gather"}),
    "latent": JobKind(PretrainDecoder, LATENT, {"memory.remat": "layers", "memory.loss_chunk_positions": 2}),
    "offloaded": JobKind(PretrainDecoder, {}, {"memory.offload_optimizer": True, "memory.shard_optimizer": True}),
    "dropout": JobKind(PretrainGPT, {"dropout": 0.3, "neftune_alpha": 5.0}, {"train.micro_batch_examples": 1}),
    "sparse": JobKind(PretrainDecoder, {"moe": EXPERTS | SIGMOID | GROUPS}, {"memory.remat": "dots"}),
    "sparse, with capacity": JobKind(PretrainDecoder, {"moe": EXPERTS | {"capacity_factor": 1.0}}, PACKED),
    "sinks": JobKind(PretrainDecoder, SINKS | FURTHER, PACKED),
    "sharing": JobKind(PretrainDecoder, SHARING, PACKED),
    "sharing, with experts": JobKind(PretrainDecoder, SHARING | BESIDE, PACKED),
    # Large matrices make the gradients of a delta rule sensitive to rounding: a factor of 3 to some 1e-3.
    "linear": JobKind(PretrainDecoder, HYBRID, PACKED, frozenset({"sequence"}), 1.0),
    "int8": JobKind(PretrainGPT, {}, {"precision.matmul": "int8", "memory.remat": "dots"}, **FLIPS),
    # A value of a hidden layer is one of 16: a token that flips moves the gradients of its two experts by 7e-3.
    "int8, sparse": JobKind(
        PretrainDecoder,
        {"moe": EXPERTS | SIGMOID} | FURTHER,
        PACKED | {"precision.matmul": "int8"},
        **FLIPS | {"gradient": 1e-2},
    ),
    "float8": JobKind(PretrainDecoder, LATENT, {"precision.matmul": "float8"}, **FLIPS),
    # Neighbours in float8 are farther apart than in int8: up to 2e-2.
    "float8, with capacity": JobKind(
        PretrainDecoder,
        {"moe": EXPERTS | {"capacity_factor": 1.0}},
        {"precision.matmul": "float8"},
        **FLIPS | {"gradient": 3e-2},
    ),
    "int8, adapter": JobKind(
        PretrainGPT,
        {},
        {"precision.matmul": "int8", "adapter": {"rank": 4, "targets": ["blocks.query", "blocks.mlp_*"]}},
        **FLIPS,
    ),
    # Other random numbers move the gradients by 5.3e-3, and those of "float8, stochastic" by 6.6e-2.
    "int8, stochastic": JobKind(
        PretrainGPT,
        {},
        STOCHASTIC | {"precision.matmul": "int8", "memory.remat": "dots", "train.micro_batch_examples": 1},
        **FLIPS | {"gradient": 2.5e-3},
    ),
    "int8, stochastic, sparse": JobKind(
        PretrainDecoder,
        {"moe": EXPERTS | SIGMOID} | FURTHER,
        PACKED | STOCHASTIC | {"precision.matmul": "int8"},
        **FLIPS | {"gradient": 1e-2},
    ),
    "float8, stochastic": JobKind(
        PretrainDecoder,
        LATENT,
        STOCHASTIC | {"precision.matmul": "float8", "memory.remat": "layers"},
        **FLIPS,
    ),
}


def list_meshes(devices: int) -> list[dict[str, int]]:
    """Return meshes of `devices`, a power of two: each axis alone, all pairs of axes, and two triples."""
    less, more = 2 ** ((devices.bit_length() - 1) // 2), 2 ** (devices.bit_length() // 2)
    return [
        *({axis: devices} for axis in AXES),
        *({first: less, second: more} for first, second in itertools.combinations(AXES, 2)),
        *({first: 2, second: 2, third: devices // 4} for first, second, third in (AXES[::2], STATE_AXES)),
    ]


def list_kind_meshes(name: str, devices: int) -> list[dict[str, int]]:
    """Return those meshes that a kind of job does not refuse."""
    return [mesh for mesh in list_meshes(devices) if not JOB_KINDS[name].refused_axes & mesh.keys()]


@functools.cache
def _directory() -> Path:
    """Make a directory of text files with documents of different lengths."""
    directory = Path(tempfile.mkdtemp())
    for number, length in enumerate(np.random.default_rng(0).integers(1, 90, 200)):
        (directory / f"{number:03}.txt").write_text("".join(chr(97 + (number + k * k) % 26) for k in range(length)))
    return directory


def make_changes(name: str) -> Changes:
    """Return the spec changes of a kind of job, except its mesh and optimizer."""
    kind = JOB_KINDS[name]
    others = {key: str(_directory() / "*.txt") if value == "TEXTS" else value for key, value in kind.others.items()}
    return {
        "config.model": (GPT if kind.job is PretrainGPT else DECODER) | kind.model,
        "config.data.sequence_length": 4 * MAX_DEVICES,
        "config.train": {"total_steps": 3, "global_batch_examples": 2 * MAX_DEVICES},
        **{f"config.{key}": value for key, value in others.items()},
        # The frozen weights of an adapter must be named, and are not read by a step.
        **({"checkpoint.init_from": str(_directory() / "base")} if "adapter" in others else {}),
    }


def make_job(name: str, mesh: Mesh) -> BaseTrainer:
    """Make a job of this kind whose optimizer state is the gradients of the last step."""
    job = JOB_KINDS[name].job
    methods = {"optimizer": classmethod(lambda cls: GRADIENTS), "schedule": classmethod(lambda cls: None)}
    changes = {"topology.mesh": dict.fromkeys(AXES, 1) | dict(mesh), "config.optimizer": {}, "config.schedule": {}}
    return make_gpt(_directory() / "run", type(job.__name__, (job,), methods), **changes, **make_changes(name))


class StepResult(NamedTuple):
    """Results of a step, on the host."""

    loss: Any
    gradients: Any
    variables: Any


def take_step(name: str, mesh: Mesh, devices: int, leaves: list[Any] | None = None) -> tuple[StepResult, list[Any]]:
    """Take one step from the state with `leaves`, or else from the scaled initial state; also return these leaves."""
    job = make_job(name, mesh)
    train_setup = job.setup_builder.build(jax.devices()[:devices])
    layout = list_batch_layouts(job.config, train_setup.mesh)[0]
    step = train_setup.compile_train(job.train_step, layout).executable
    if leaves is None:
        initial = jax.device_get(train_setup.init_state())
        scaled = jax.tree.map(lambda leaf: JOB_KINDS[name].scale * leaf if leaf.ndim > 1 else leaf, initial.params)
        if job.config.adapter is not None:
            # B is zero at the beginning, and then A has no gradient.
            values = np.random.default_rng(0)
            scaled = jax.tree.map(
                lambda leaf: leaf if leaf.any() else values.normal(0, 0.1, leaf.shape).astype(leaf.dtype), scaled
            )
        leaves = jax.tree.leaves(initial.replace(params=scaled))
    abstract = train_setup.abstract_state
    state = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    batch: Batch = layout.batch(job.setup_builder.dataset, "train", 0)
    after, loss, _ = step(jax.device_put(state, get_shardings(abstract)), batch, train_setup.key)
    return StepResult(*jax.device_get((loss, after.opt_state.trace, after.variables))), leaves


@functools.cache
def take_step_on_one_device(name: str) -> tuple[StepResult, list[Any]]:
    """Take the reference step of a kind, and return its result and initial leaves."""
    return take_step(name, {}, 1)


class Difference(NamedTuple):
    """Differences of a step: relative for the loss, relative to the largest element for a gradient."""

    loss: float
    gradient: float
    variables: float


def measure_difference(name: str, mesh: Mesh, devices: int) -> Difference:
    """Return the difference of a step on this mesh from the step on one device.

    The scale of a gradient is at least a thousandth of the largest one, since some gradients, such as that of the key
    bias, are zero up to rounding.
    """
    want, leaves = take_step_on_one_device(name)
    got, _ = take_step(name, mesh, devices, leaves)
    pairs = [*zip(jax.tree.leaves(got.gradients), jax.tree.leaves(want.gradients), strict=True)]
    floor = max(np.abs(b).max() for _, b in pairs) / 1000
    off = max(np.abs(a - b).max() / max(np.abs(b).max(), floor) for a, b in pairs)
    others = zip(jax.tree.leaves(got.variables), jax.tree.leaves(want.variables), strict=True)
    found = abs(got.loss - want.loss) / abs(want.loss), off, max((np.abs(a - b).max() for a, b in others), default=0)
    return Difference(*map(float, found))


if __name__ == "__main__":
    number = int(sys.argv[1])
    found = {
        format_mesh(mesh): measure_difference(sys.argv[2], mesh, number)
        for mesh in list_kind_meshes(sys.argv[2], number)
    }
    print(json.dumps(found))
