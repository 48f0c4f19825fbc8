"""Jobs on meshes of all axes: init, resume and moves, with experts, packed documents and grouped-query attention."""

import jax
import pytest

from experiments.model.decoder import PretrainDecoder
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.parallel.mesh import AXES
from runner.storage import parse_lines
from tests.support.tiny_jobs import are_leaves_equal, format_mesh, make_gpt, read_outcome, stop_after

STOP, STEPS = 2, 3
JOB = {
    "config.model": {
        "layers": 1,
        "heads": 4,
        "key_value_heads": 2,
        "width": 16,
        "mlp_width": 24,
        "moe": {"experts": 4, "experts_per_token": 2, "bias_rate": 0.01, "auxiliary_loss": 0.01},
    },
    "config.data.sequence_length": 32,
    "config.train": {"total_steps": STEPS, "global_batch_examples": 16},
    "config.eval": {"every_steps": 1, "batches": 1},
}
ALL_AXES = {"fsdp": 2, "sequence": 2, "expert": 2}
MOVES = [
    (ALL_AXES, {"data": 8}),
    ({"data": 8}, ALL_AXES),
    ({"fsdp": 8}, {"sequence": 8}),
    ({"sequence": 8}, {"data": 2, "expert": 4}),
    ({"data": 2, "expert": 4}, {"data": 2, "tensor": 4}),
    ({"data": 2, "tensor": 4}, {"fsdp": 8}),
    ({"sequence": 2, "tensor": 4}, {"expert": 4, "tensor": 2}),
    ({"expert": 4, "tensor": 2}, {"sequence": 4, "fsdp": 2}),
    ({"data": 2, "sequence": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "expert": 2}),
    ({"sequence": 4, "expert": 2}, {"sequence": 2, "expert": 2, "tensor": 2}),
]
MESHES = list({format_mesh(mesh): mesh for way in MOVES for mesh in way}.values())


def job(directory, mesh):
    return make_gpt(directory, PretrainDecoder, **JOB, **{"topology.mesh": dict.fromkeys(AXES, 1) | mesh})


def stop_job(directory, mesh):
    made = job(directory, mesh)
    stop_after(made, STOP)
    return made


def read_restored_fingerprint(made):
    events = parse_lines((made.store.root / "events.jsonl").read_bytes())
    return [(event["step"], event["fingerprint"]) for event in events if event["event"] == "restore"]


@pytest.mark.soak
@pytest.mark.parametrize(("first", "then"), MOVES, ids=format_mesh)
def test_a_checkpoint_resumes_bit_identically_on_another_mesh(tmp_path, first, then):
    before = stop_job(tmp_path / "run", first)
    saved = compute_fingerprint(before.state)
    after = job(tmp_path / "run", then)
    after()
    assert read_restored_fingerprint(after) == [(STOP, saved)]


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES, ids=format_mesh)
def test_a_resume_is_bit_identical_on_every_mesh(tmp_path, mesh):
    stop_job(tmp_path / "run", mesh)
    job(tmp_path / "run", mesh)()
    job(tmp_path / "whole", mesh)()
    assert read_outcome(tmp_path / "run") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
@pytest.mark.parametrize("mesh", MESHES, ids=format_mesh)
def test_init_is_bit_identical_on_every_mesh_and_experts_are_sharded(tmp_path, mesh):
    here, alone = (stop_job(tmp_path / name, sizes) for name, sizes in (("here", mesh), ("alone", {"data": 8})))
    assert are_leaves_equal(here.init_state().params, alone.init_state().params)
    experts = mesh.get("expert", 1)
    for tree in (here.state.params, here.state.opt_state):
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if jax.tree_util.keystr(path).endswith("['moe']['up']"):
                assert leaf.sharding.shard_shape(leaf.shape)[1] == leaf.shape[1] // experts
