"""Warnings about inefficient meshes: small shards, gradients reduced without sharding, repeated gathers."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from runner.accelerator import parse_accelerator
from runner.parallel.mesh import AXES, STATE_AXES, resolve_mesh_sizes
from runner.plan import report
from runner.plan.checks import Findings, open_job
from runner.plan.forecast.collectives import find_collectives
from runner.plan.mesh import ParameterPasses, find_mesh_warnings, find_small_shards, is_significant, order_sizes
from runner.plan.prediction import Predictor, build_abstract
from runner.plan.program import TargetMachine
from runner.plan.report import EarlyEstimate
from runner.spec import load_document
from runner.trainer import BaseTrainer
from tests.plan.test_hlo import STATED_TRIPS, make_computation, make_module
from tests.support.job_process import ROOT

ONES = dict.fromkeys(AXES, 1)
SPECS = sorted(path.stem for path in (ROOT / "specs").glob("*.yaml"))


def make_parameter(mesh: dict[str, int], shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
    abstract: Any = AbstractMesh(tuple((ONES | mesh).values()), AXES)
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(abstract, PartitionSpec(*axes)))


# Before compilation.


@pytest.mark.parametrize(
    ("shape", "axes", "rows"),
    [
        ((4096, 14336), ("fsdp", None), 8),
        ((14336, 4096), (None, ("fsdp", "sequence")), 8),
        ((32, 4096, 512), (None, "fsdp", "tensor"), 8),
        ((8192, 64), ("fsdp", None), None),  # 16 rows are a whole tile
        ((512, 64, 8), ("fsdp", None, None), None),  # the first of three dimensions is not tiled
        ((8, 4096), (None, "tensor"), None),  # shards of `tensor` are not gathered
        ((8, 4096), ("data", None), None),
    ],
)
def test_a_shard_is_too_small_if_it_has_fewer_rows_than_a_tile(
    shape: tuple[int, ...], axes: tuple[Any, ...], rows: int | None
) -> None:
    found = find_small_shards({"w": make_parameter({"fsdp": 512, "tensor": 16}, shape, *axes)}, itemsize=2)
    assert [shard.rows for shard in found] == ([] if rows is None else [rows])


def test_the_float32_tile_has_half_the_rows_and_tiny_arrays_are_ignored() -> None:
    leaf = make_parameter({"fsdp": 512}, (4096, 14336), "fsdp", None)
    assert find_small_shards({"w": leaf}, itemsize=4) == []
    scale = make_parameter({"fsdp": 512}, (32, 4096), None, "fsdp")
    assert [shard.name for shard in find_small_shards({"scale": scale, "w": leaf}, itemsize=2)] == ["w", "scale"]
    large = make_parameter({"fsdp": 512}, (65536, 14336), "fsdp", None)
    assert find_small_shards({"scale": scale, "w": large}, itemsize=2) == []


def build_estimate(spec: str, *overrides: str) -> tuple[BaseTrainer, EarlyEstimate] | None:
    """Return a shipped job and its estimate on the spec's topology, or None if it has no steps to plan."""
    findings = Findings()
    document = load_document(f"specs/{spec}.yaml", list(overrides))
    if "topology" not in document.data:
        return None
    job = open_job(document, findings)
    assert isinstance(job, BaseTrainer), findings.problems
    accelerator = parse_accelerator(job.topology.accelerator)
    if accelerator is None or accelerator.num_devices is None:
        return None
    machine = TargetMachine((), (), accelerator, "", True, accelerator.chip.speeds.hbm_bytes)
    sizes = order_sizes(resolve_mesh_sizes(job.topology.mesh, accelerator.num_devices))
    if all(size == 1 for axis, size in sizes if axis in STATE_AXES):
        return None
    train_setup = build_abstract(job.setup_builder, sizes)
    return job, EarlyEstimate(Predictor(job, job.flops_per_token(train_setup), accelerator), machine, train_setup)


@pytest.mark.daily(6)
@pytest.mark.parametrize("spec", SPECS)
def test_no_shipped_spec_shards_parameters_below_the_tile(spec: str) -> None:
    found = build_estimate(spec)
    assert found is None or found[1].small_shard_warnings == []


def test_too_many_shards_are_reported_before_compiling_with_a_better_mesh() -> None:
    found = build_estimate("llama3_8b", "topology.accelerator=v5p-512", "topology.mesh={data: 1, fsdp: 512}")
    assert found is not None
    (fault,) = found[1].small_shard_warnings
    for part in ("data 1 x fsdp 512 x tensor 1 splits ", " rows of ", " shards of 8", "a tile of bfloat16 has 16"):
        assert part in fault.text
    cure = found[1].suggest_mesh(fault)
    assert "by arithmetic data " in cure
    assert "avoids this" in cure
    assert "fits" in found[1].line
    assert "data 1 x fsdp 512" in found[1].line


def test_nearby_meshes_are_tried_until_one_gathers_and_scatters(monkeypatch: pytest.MonkeyPatch) -> None:
    found = build_estimate("llama3_8b", "topology.accelerator=v5p-512", "topology.mesh={data: 1, fsdp: 512}")
    assert found is not None
    tried: list[dict[str, int]] = []

    def fake_uses_all_reduce(devices: Any, sizes: Any, leaf: Any, dtype: str) -> bool:
        tried.append(dict(sizes))
        assert (dtype, leaf.ndim) in {("bfloat16", 2), ("bfloat16", 3)}
        return dict(sizes)["fsdp"] != tried[0]["fsdp"] // 2

    monkeypatch.setattr(report, "uses_all_reduce", fake_uses_all_reduce)
    monkeypatch.setattr(report, "_NUM_PROBED_MESHES", 100)
    (fault,) = found[1].small_shard_warnings
    real = EarlyEstimate(
        found[1].predictor,
        TargetMachine((), (), found[1].machine.accelerator, "", False, 95 * 2**30),
        found[1].train_setup,
    )
    assert "gathers and scatters them" in real.suggest_mesh(fault)
    assert len(tried) > 1
    assert tried[-1]["fsdp"] == tried[0]["fsdp"] // 2


# After compilation.

MESH = ONES | {"fsdp": 8}
PARAMETERS = {
    "params.up": make_parameter(MESH, (3, 64, 256), None, "fsdp", None),
    "params.gate": make_parameter(MESH, (3, 64, 256), None, "fsdp", None),
    "params.embedding": make_parameter(MESH, (512, 64), None, "fsdp"),
    "params.norm": make_parameter(MESH, (3, 64), None, "fsdp"),
}
GROUPS_ALL = "channel_id=1, replica_groups=[1,8]<=[8], use_global_device_ids=true"
OP_METADATA = 'metadata={op_name="jit(step)/transpose(jvp(Decoder))/while/body/mlp/up/dot_general"}'


def list_warnings(*lines: str, accumulate_steps: int = 1) -> list[Any]:
    """Return the warnings about a module that runs the given instructions in a loop over three layers."""
    before = make_computation("body", *lines)
    loop = f"%w = (s32[], f32[8]) while(%p), condition=%cond, body=%body, {STATED_TRIPS}"
    found = find_collectives(make_module(loop, before=before), MESH)
    return find_mesh_warnings(found, PARAMETERS, ParameterPasses(accumulate_steps, 2, 3), {"fsdp"})


def test_a_gradient_reduced_whole_is_reported_with_its_bytes() -> None:
    reduce = f"%r = bf16[64,256]{{1,0}} all-reduce(%p), {GROUPS_ALL}, to_apply=%add, {OP_METADATA}"
    (fault,) = list_warnings(reduce)
    sent = 3 * 2 * 64 * 256 * 2 * 7 // 8
    assert fault.excess_bytes == sent / 2
    assert (fault.is_avoidable, fault.names) == (True, ("params.up",))
    assert "all-reduce over fsdp of 64 x 256" in fault.text
    assert "(transpose(jvp(Decoder))/mlp/up/dot_general)" in fault.text
    assert f"{sent / 1024:.2f} KiB per step, twice what is needed" in fault.text


@pytest.mark.parametrize(
    "line",
    [
        f"%r = bf16[64,256]{{1,0}} reduce-scatter(%p), {GROUPS_ALL}, dimensions={{0}}, to_apply=%add",
        f"%r = bf16[64,250]{{1,0}} all-reduce(%p), {GROUPS_ALL}, to_apply=%add",  # not the shape of a parameter
        f"%r = f32[64]{{0}} all-reduce(%p), {GROUPS_ALL}, to_apply=%add",  # gradient of a norm
        f"%r = f32[1,16384]{{1,0}} all-reduce(%p), {GROUPS_ALL}, to_apply=%add",  # a vector as large as a matrix
        f"%r = bf16[64,256]{{1,0}} all-gather(%p), {GROUPS_ALL}, dimensions={{0}}",  # once per layer
        "%r = bf16[64,256]{1,0} all-reduce(%p), channel_id=1, replica_groups=[8,1]<=[8], to_apply=%add",
    ],
)
def test_necessary_collectives_are_not_reported(line: str) -> None:
    assert list_warnings(line) == []


def make_gather(name: str, shape: str) -> str:
    return f"%{name} = {shape} all-gather(%p), {GROUPS_ALL}, dimensions={{0}}, {OP_METADATA}"


def test_a_parameter_gathered_more_often_than_needed_is_reported() -> None:
    twice = [make_gather(f"g{number}", "bf16[1,64,256]{2,1,0}") for number in range(4)]  # two matrices, two passes
    assert list_warnings(*twice) == []
    more = [*twice, *(make_gather(f"h{number}", "bf16[256,64]{1,0}") for number in range(4))]
    (fault,) = list_warnings(*more)
    assert (
        "params.up or params.gate: each is gathered 4 times per micro-batch, but its passes need it 2 times"
        in fault.text
    )
    assert fault.excess_bytes == 3 * 8 * 64 * 256 * 2 * 7 // 8 / 2
    assert not fault.is_avoidable
    assert list_warnings(*more, accumulate_steps=2) == []


def test_an_embedding_gathered_by_every_loss_chunk_is_reported() -> None:
    lines = [make_gather(f"g{number}", "bf16[512,64]{1,0}") for number in range(2)]  # in each of three iterations
    (fault,) = list_warnings(*lines)
    assert "params.embedding: each is gathered 6 times per micro-batch, but its passes need it 3 times" in fault.text


def test_a_warning_needs_a_noticeable_share_of_the_step() -> None:
    reduce = f"%r = bf16[64,256]{{1,0}} all-reduce(%p), {GROUPS_ALL}, to_apply=%add, {OP_METADATA}"
    (fault,) = list_warnings(reduce)
    assert is_significant(fault, bytes_per_second=fault.excess_bytes, step_seconds=20.0)
    assert not is_significant(fault, bytes_per_second=fault.excess_bytes, step_seconds=21.0)
