"""Meshes that do not fit a job: rejected before compilation, in one line with key, numbers and a fix.

Each case is a mesh with config keys of a job. A start raises the error, and `plan` reports it as a problem.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from experiments.model.decoder import PretrainDecoder
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, RetryableError
from runner.parallel.mesh import AXES
from runner.spec import load_document
from tests.support.tiny_jobs import make_gpt

EXPERTS = {"experts": 6, "experts_per_token": 2}


class InvalidMesh(NamedTuple):
    """Mesh and keys of a spec, and a part of the expected error."""

    mesh: dict[str, Any]
    keys: dict[str, Any]
    line: str


INVALID_MESHES = {
    "rows": InvalidMesh(
        {"sequence": 8}, {"data.sequence_length": 24}, "config.data.sequence_length=24 does not divide into"
    ),
    "halves of rows": InvalidMesh(
        {"sequence": 4, "data": 2}, {"data.sequence_length": 20}, "use 16 or 24, or a sequence axis of 2"
    ),
    "chunks": InvalidMesh(
        {"sequence": 4, "data": 2},
        {"data.sequence_length": 48, "memory.loss_chunk_positions": 8},
        "config.memory.loss_chunk_positions=8 does not divide the 12 positions",
    ),
    "experts": InvalidMesh(
        {"expert": 4, "data": 2},
        {"model.moe": EXPERTS},
        "config.model.moe.experts=6 does not divide over topology.mesh.expert=4; use 4 or 8 experts",
    ),
    "heads": InvalidMesh(
        {"tensor": 8},
        {},
        "config.model.heads=4 does not divide over the devices that share the heads (mesh: data 1, fsdp 1, sequence 1, "
        "expert 1, tensor 8); make topology.mesh.tensor a divisor of it",
    ),
    "too few devices": InvalidMesh({"sequence": 2, "expert": 2}, {}, "does not use exactly the 8 devices here"),
    "too many devices": InvalidMesh({"sequence": 16}, {}, "sequence 16 x tensor 1 is larger than the 8 devices here"),
    "a batch": InvalidMesh(
        {"expert": 8}, {"train.global_batch_examples": 12}, "does not divide over 8 devices (data x fsdp x expert)"
    ),
}


@pytest.mark.parametrize("name", INVALID_MESHES)
def test_a_mesh_that_does_not_divide_is_rejected_in_one_line(name: str, tmp_path: Path) -> None:
    mesh, keys, line = INVALID_MESHES[name]
    changes = {"config.model": {"layers": 1, "heads": 4, "width": 16, "mlp_width": 16}} | {
        f"config.{key}": value for key, value in keys.items()
    }
    job = make_gpt(tmp_path / "run", PretrainDecoder, **changes, **{"topology.mesh": dict.fromkeys(AXES, 1) | mesh})
    with pytest.raises(InvalidError) as refused:
        job.setup_builder.trace(job.setup_builder.build(jax.devices()))
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("axis", AXES)
def test_a_duplicate_axis_is_rejected_with_both_lines(axis: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: tiny\ntopology:\n  mesh:\n    {axis}: 2\n    {axis}: 4\n")
    with pytest.raises(InvalidError) as refused:
        load_document(spec, [])
    assert f"spec.yaml:5: topology.mesh.{axis}: duplicate key, first given at " in str(refused.value)
    assert "spec.yaml:4" in str(refused.value)


# Elastic jobs.


@pytest.mark.daily(4)
@pytest.mark.parametrize(
    ("keys", "num_missing", "error"),
    [
        ({"topology.mesh": {"data": 1, "tensor": 3, "fsdp": "auto"}}, 2, RetryableError),  # 24 devices in all
        ({"topology.mesh": {"data": 1, "tensor": 3, "fsdp": "auto"}}, 1, InvalidError),
        ({"topology.mesh": {"data": 1, "tensor": 3, "fsdp": "auto"}}, 0, InvalidError),
        ({"topology.mesh": {"data": 16}}, 1, RetryableError),
        ({"topology.accelerator": "cpu-16", "topology.mesh": {"data": 16}}, 1, RetryableError),
        ({"topology.accelerator": "cpu-16"}, 1, None),
        ({"topology.accelerator": "cpu-16"}, 2, InvalidError),
        ({"config.train.global_batch_examples": 12}, 1, InvalidError),
        ({}, 3, None),
    ],
)
def test_a_job_that_needs_its_missing_hosts_ends_with_76(
    keys: dict[str, Any], num_missing: int, error: type[Exception] | None, tmp_path: Path
) -> None:
    job = make_gpt(tmp_path / "run", **{"topology.mesh": {"data": "auto", "fsdp": 1}} | keys)
    if error is None:
        job.setup(Hosts.single_process(num_missing))
        return
    words = f"1 of {num_missing + 1} processes joined, .* over their 8 devices" if error is RetryableError else None
    with pytest.raises(error, match=words):
        job.setup(Hosts.single_process(num_missing))
    assert not (tmp_path / "run").exists()
