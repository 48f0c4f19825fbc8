"""`config.memory.shard_optimizer`: moments sharded over `data`, with the same training except for rounding."""

import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer
from runner.parallel.mesh import make_abstract_mesh
from runner.train.state import get_shardings, reshard_abstract_state
from tests.support.tiny_jobs import make_gpt, read_outcome, read_rows, stop_after

SHARDED = "config.memory.shard_optimizer"
DATA, BOTH, THREE = {"data": 8}, {"data": 2, "fsdp": 4}, {"data": 2, "fsdp": 2, "tensor": 2}
JOB: dict[str, Any] = {
    "config.model": {"layers": 2, "heads": 2, "width": 32},
    "config.train": {"total_steps": 6, "global_batch_examples": 32, "micro_batch_examples": 2},
    "config.optimizer.clip_norm": 0.1,
    "config.eval": {"every_steps": 3, "batches": 1},
    "checkpoint.every_steps": 2,
}
MOE = {"config.model.moe": {"experts": 4, "experts_per_token": 2}, "config.model.mlp_width": 24}
# Keys of a job, and its mesh.
KINDS: dict[str, tuple[type[BaseTrainer], dict[str, int], dict[str, Any]]] = {
    "data": (PretrainGPT, DATA, {}),
    "data and fsdp": (PretrainGPT, BOTH, {}),
    "three axes": (PretrainGPT, THREE, {}),
    "muon": (PretrainGPT, DATA, {"config.optimizer.name": "muon"}),
    "muon, data and fsdp": (PretrainGPT, BOTH, {"config.optimizer.name": "muon"}),
    "adafactor": (PretrainGPT, BOTH, {"config.optimizer.name": "adafactor"}),
    "schedule-free": (
        PretrainGPT,
        DATA,
        {"config.optimizer.name": "schedule_free_adamw", "config.schedule": {"name": "constant", "warmup_steps": 1}},
    ),
    "frozen": (PretrainGPT, DATA, {"config.optimizer.groups": [{"pattern": "*embedding", "frozen": True}]}),
    "experts": (PretrainDecoder, {"data": 2, "fsdp": 2, "expert": 2}, MOE),
    "noise scale and averages": (PretrainGPT, DATA, {"config.noise_scale": {}, "config.ema": {"decays": [0.9]}}),
    "skipped updates": (
        PretrainGPT,
        BOTH,
        {"config.stability": {"skip_update": {"grad_norm_above": {"over_steps": 2, "sigmas": 100.0}}}},
    ),
    "offloaded": (PretrainGPT, DATA, {"config.memory.offload_optimizer": True}),
}


def make_job(directory: Path, kind: str, is_sharded: bool = True, **changes: Any) -> BaseTrainer:
    job_class, mesh, own = KINDS[kind]
    return make_gpt(directory, job_class, **JOB | own | {"topology.mesh": mesh, SHARDED: is_sharded} | changes)


def read_losses(directory: Path) -> list[float]:
    return [row[key] for row in read_rows(directory) for key in ("train/loss", "train/grad_norm") if key in row]


def list_moments(state: Any) -> list[jax.Array]:
    return [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 0]


@pytest.mark.daily(2)
@pytest.mark.daily(3)
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_without_it_except_for_rounding(kind: str, tmp_path: Path) -> None:
    usual, sharded = make_job(tmp_path / "usual", kind, is_sharded=False), make_job(tmp_path / "sharded", kind)
    usual()
    sharded()
    found, expected = read_losses(tmp_path / "sharded"), read_losses(tmp_path / "usual")
    assert len(found) > 6
    np.testing.assert_allclose(found, expected, rtol=5e-4)
    own_bytes = [
        sum(leaf.addressable_shards[0].data.nbytes for leaf in list_moments(job.state)) for job in (usual, sharded)
    ]
    assert own_bytes[1] < own_bytes[0] * (0.2 if KINDS[kind][1] == DATA else 0.6)
    params = [get_shardings(job.state.params) for job in (usual, sharded)]
    assert params[0] == params[1]


@pytest.mark.parametrize(
    "kind", ["data and fsdp", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("data", "muon", "three axes"))]
)
def test_a_resumed_run_is_bit_identical(kind: str, tmp_path: Path) -> None:
    make_job(tmp_path / "whole", kind)()
    stop_after(make_job(tmp_path / "run", kind), 3)
    make_job(tmp_path / "run", kind)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("then", [{"data": 4, "fsdp": 2}, {"data": 1, "fsdp": 8}, {"data": 1, "tensor": 2, "fsdp": 4}])
def test_a_checkpoint_is_read_on_any_mesh_with_the_key_or_without(then: dict[str, int], tmp_path: Path) -> None:
    make_job(tmp_path / "whole", "data")()
    stop_after(make_job(tmp_path / "run", "data"), 3)
    resumed = make_job(tmp_path / "run", "data", then["data"] > 1, **{"topology.mesh": then})
    resumed()
    np.testing.assert_allclose(read_losses(tmp_path / "run"), read_losses(tmp_path / "whole"), rtol=5e-4)


@pytest.mark.soak
def test_the_same_bits_on_any_number_of_devices_stay_the_same(tmp_path: Path) -> None:
    ordered = {"config.train": JOB["config.train"] | {"same_bits_devices": 8}}
    for name, kind, is_sharded in (("usual", "data", False), ("data", "data", True), ("both", "data and fsdp", True)):
        make_job(tmp_path / name, kind, is_sharded, **ordered)()
    assert read_outcome(tmp_path / "data") == read_outcome(tmp_path / "usual")
    assert read_outcome(tmp_path / "both") == read_outcome(tmp_path / "usual")


def compile_text(job: BaseTrainer) -> str:
    builder = job.setup_builder
    setup = builder.build(jax.devices())
    return str(setup.compile_train(job.train_step, builder.list_layouts(setup)[0]).executable.as_text())


def test_gradients_are_reduce_scattered_and_parameters_gathered(tmp_path: Path) -> None:
    found = []
    for is_sharded in (False, True):
        text = compile_text(make_job(tmp_path / "run", "data", is_sharded))
        found.append({name: text.count(f" {name}(") for name in ("reduce-scatter", "all-gather")})
    assert found[0] == {"reduce-scatter": 0, "all-gather": 0}
    assert min(found[1].values()) > 10
    # Only scalars are left to the all-reduce.
    assert max(int(size) for size in re.findall(r"f32\[(\d+)[\],][^=]* all-reduce\(", text) or [0]) <= 1


@pytest.mark.parametrize("kind", ["data", "data and fsdp", "three axes"])
def test_a_predicted_state_has_the_bytes_of_the_real_one(kind: str, tmp_path: Path) -> None:
    job = make_job(tmp_path / "run", kind)
    builder = job.setup_builder
    ones = builder.build_on_mesh(
        make_abstract_mesh(dict.fromkeys(("data", "fsdp", "sequence", "expert", "tensor"), 1)), jax.random.key(0)
    )
    built = builder.build(jax.devices()).abstract_state
    predicted = reshard_abstract_state(ones.abstract_state, built.step.sharding.mesh, shard_optimizer=True)

    def list_shards(state: Any) -> list[tuple[int, ...]]:
        return [leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state)]

    assert [np.prod(shape) for shape in list_shards(predicted)] == [np.prod(shape) for shape in list_shards(built)]
