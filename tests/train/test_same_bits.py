"""Whole jobs with `same_bits_devices`: stopped on one mesh, resumed on another, they end as on a third one."""

from pathlib import Path
from typing import Any

import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner.trainer import BaseTrainer
from tests.support.tiny import gpt, outcome, stop_after

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
    "frozen": (PretrainGPT, {"config.optimizer.groups": [{"pattern": "*embedding", "frozen": True}]}),
    "schedule_free": (
        PretrainGPT,
        {"config.optimizer.name": "schedule_free_adamw", "config.schedule": {"name": "constant", "warmup_steps": 1}},
    ),
}


@pytest.mark.soak
@pytest.mark.parametrize("feature", FEATURES)
def test_moved_between_meshes_a_job_ends_in_the_same_bits_and_rows(feature: str, tmp_path: Path) -> None:
    job_class, changes = FEATURES[feature]

    def job(name: str, mesh: dict[str, int]) -> BaseTrainer:
        return gpt(tmp_path / name, job_class, **JOB | changes | {"topology.mesh": mesh})

    stop_after(job("moved", FIRST), STOP)
    job("moved", THEN)()
    job("whole", WHOLE)()
    assert outcome(tmp_path / "moved") == outcome(tmp_path / "whole")
