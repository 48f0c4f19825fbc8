"""Jobs with `same_bits_devices`: runs that move between meshes, and steps of every model on other device counts.

tests/test_values.py does the same for values of every key, and tests/survival/test_same_bits.py for whole runs that
move to one device.
"""

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner.parallel.mesh import AXES
from runner.trainer import BaseTrainer
from tests.support import same_bits
from tests.support.sharded_step import JOB_KINDS, make_changes
from tests.support.tiny_jobs import make_gpt, read_outcome, stop_after

STOP, STEPS, DEVICES = 2, 3, 8
WHOLE, FIRST, THEN = {"data": 8}, {"data": 1, "fsdp": 8}, {"data": 2, "fsdp": 4}
JOB = {
    "config.data.sequence_length": 32,
    "config.model": {"layers": 1, "heads": 2, "width": 16},
    "config.optimizer.clip_norm": 0.1,
    "config.eval": {"every_steps": 1, "batches": 1},
    "config.train": {
        "total_steps": STEPS,
        "global_batch_examples": 2 * DEVICES,
        "micro_batch_examples": 1,
        "same_bits_devices": DEVICES,
    },
}
EXPERTS = {"experts": 4, "experts_per_token": 2, "bias_rate": 0.01, "auxiliary_loss": 0.01}
DECODER = {"config.model.mlp_width": 24, "config.model.key_value_heads": 1}
FEATURES: dict[str, tuple[type, dict[str, Any]]] = {
    "averages": (PretrainGPT, {"config.ema": {"decays": [0.9], "evaluate": True}}),
    "documents": (PretrainGPT, {"config.data.packing": "documents", "config.model.dropout": 0.1}),
    "decoder": (PretrainDecoder, DECODER),
    "experts": (PretrainDecoder, DECODER | {"config.model.moe": EXPERTS}),
    # Two routers in one pattern divide by the same number of tokens.
    "experts, two layers in a pattern": (
        PretrainDecoder,
        DECODER
        | {"config.model.moe": EXPERTS, "config.model.layers": 2, "config.model.layer_pattern": ["full", "window"]}
        | {"config.model.window": 5},
    ),
    "linear": (
        PretrainDecoder,
        DECODER
        | {"config.model.layers": 2, "config.model.layer_pattern": ["linear", "full"]}
        | {"config.model.linear": {"key_heads": 1, "value_heads": 2, "key_head_dim": 4, "value_head_dim": 4}}
        | {"config.data.packing": "documents"},
    ),
    "sinks": (
        PretrainDecoder,
        DECODER
        | {"config.model.attention_sinks": True, "config.model.extra_predictions": 2}
        | {"config.model.moe": EXPERTS | {"bias": True}},
    ),
    "frozen": (PretrainGPT, {"config.optimizer.groups": [{"pattern": "*embedding", "frozen": True}]}),
    "int8": (PretrainGPT, {"config.precision.matmul": "int8"}),
    "float8": (PretrainDecoder, DECODER | {"config.model.moe": EXPERTS, "config.precision.matmul": "float8"}),
    "int8, stochastic": (
        PretrainGPT,
        {"config.precision.matmul": "int8", "config.precision.gradient_rounding": "stochastic"}
        | {"config.model.dropout": 0.1, "config.ema": {"decays": [0.9]}},
    ),
    "float8, stochastic": (
        PretrainDecoder,
        DECODER
        | {"config.precision.matmul": "float8", "config.precision.gradient_rounding": "stochastic"}
        | {"config.model.layers": 2, "config.memory.remat": "layers", "config.memory.loss_chunk_positions": 2},
    ),
    **{
        name: (
            PretrainGPT,
            # Six stacks of four matrices on eight devices: none to half a stack each, and padding.
            {"config.optimizer.name": name, "config.model": {"layers": 4, "heads": 2, "width": 16}},
        )
        for name in ("muon", "normuon", "muonh")
    },
    "schedule_free": (
        PretrainGPT,
        {"config.optimizer.name": "schedule_free_adamw", "config.schedule": {"name": "constant", "warmup_steps": 1}},
    ),
}


@pytest.mark.parametrize(
    ("feature", "meshes"),
    [
        pytest.param("linear", (THEN,), id="linear, on both axes"),
        *(pytest.param(name, (WHOLE, FIRST, THEN), id=name, marks=pytest.mark.soak) for name in FEATURES),
    ],
)
@pytest.mark.soak
def test_the_initial_state_is_bit_identical_on_every_mesh(
    feature: str, meshes: tuple[dict[str, int], ...], tmp_path: Path
) -> None:
    job_class, changes = FEATURES[feature]

    def compute_leaves(mesh: dict[str, int]) -> list[bytes]:
        changed = JOB | changes | {"topology.mesh": dict.fromkeys(AXES, 1) | mesh}
        job = make_gpt(tmp_path / "run", job_class, **changed)
        setup = job.setup_builder.build(jax.devices()[: math.prod(mesh.values())])
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(setup.init_state())]

    on_one, *others = map(compute_leaves, ({"data": 1}, *meshes))
    assert others == [on_one] * len(others)


@pytest.mark.soak
@pytest.mark.parametrize("feature", FEATURES)
def test_a_job_moved_between_meshes_is_bit_identical(feature: str, tmp_path: Path) -> None:
    job_class, changes = FEATURES[feature]

    def job(name: str, mesh: dict[str, int]) -> BaseTrainer:
        return make_gpt(tmp_path / name, job_class, **JOB | changes | {"topology.mesh": mesh})

    stop_after(job("moved", FIRST), STOP)
    job("moved", THEN)()
    job("whole", WHOLE)()
    assert read_outcome(tmp_path / "moved") == read_outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("kind", "is_as_users"),
    [
        # XLA splits the code generation of some of its operations, and then compiles them differently.
        pytest.param(
            "window", False, id="window on one and eight devices, compiled in little time", marks=pytest.mark.soak
        ),
        *(pytest.param(kind, True, id=kind, marks=pytest.mark.soak) for kind in JOB_KINDS),
    ],
)
def test_steps_on_one_two_and_eight_devices_are_bit_identical(
    kind: str, is_as_users: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = same_bits.DEVICE_COUNTS if is_as_users else (1, DEVICES)
    if is_as_users:
        same_bits.use_user_compiler_options(monkeypatch)
    job = make_gpt(
        tmp_path / "run",
        JOB_KINDS[kind].job,
        **make_changes(kind) | same_bits.SAME_BITS_OPTIONS | {"config.schedule": {}},
    )
    on_one, *others = (same_bits.compute_bits(job, number) for number in counts)
    assert others == [on_one] * len(others)
