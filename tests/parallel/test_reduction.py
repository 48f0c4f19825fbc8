"""Deferred all-reduce over `data`: sums over shards, values of the last shard, and the model's view of the mesh.

Shape legend: S micro-batches, B examples, T sequence length, D width.
"""

import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, PartitionSpec

from runner.parallel.mesh import AXES, BATCH_AXES, use_sharding_rules
from runner.parallel.reduction import has_deferred_all_reduce, run_per_data_shard
from runner.train.layout import list_batch_layouts
from runner.train.step import StepOptions, train_step
from tests.support.llama import PretrainLlama
from tests.support.tiny_jobs import format_mesh, make_gpt, make_partial_mesh

S, B, T, D = 4, 8, 6, 3
KEY = jax.random.key(0)
SOAK = pytest.mark.soak
MESHES = [{"data": 4}, {"data": 2, "fsdp": 4}, {"data": 2, "tensor": 2}, {"fsdp": 4}]
parametrize_meshes = pytest.mark.parametrize("sizes", MESHES, ids=format_mesh)


@parametrize_meshes
def test_sums_are_reduced_and_other_values_are_those_of_the_last_shard(sizes):
    mesh, values = make_partial_mesh(sizes), np.arange(S * B, dtype=np.float32).reshape(S, B)

    def of_part(factor, part):
        return (
            {"sum": jnp.sum(factor * part)},
            {
                "first": part[0, 0],
                "is_last": part[0, 0] == B // sizes.get("data", 1),
            },
            part[0, 0],
        )

    with use_sharding_rules(mesh):
        batch = jax.device_put(values, NamedSharding(mesh, PartitionSpec(None, BATCH_AXES)))
        sums, last, own = jax.jit(lambda batch: run_per_data_shard(of_part, jnp.float32(2), batch))(batch)
    parts = sizes.get("data", 1)
    assert float(sums["sum"]) == 2 * values.sum()
    assert float(last["first"]) == B - B // parts
    assert bool(last["is_last"]) == (parts == 2)
    assert own.tolist() == [B // parts * part for part in range(parts)]


@parametrize_meshes
def test_a_data_shard_sees_only_the_other_axes(sizes):
    seen = []

    def of_part(_, part):
        mesh, spec = jax.sharding.get_abstract_mesh(), nn.logical_to_mesh_axes(("batch",))
        seen.append((part.shape, mesh.empty, spec and spec[0]))
        return jnp.sum(part), (), ()

    with use_sharding_rules(make_partial_mesh(sizes)):
        jax.eval_shape(lambda batch: run_per_data_shard(of_part, (), batch), jnp.zeros((S, B)))
    parts, is_alone = sizes.get("data", 1), set(sizes) == {"data"}
    axes = BATCH_AXES if parts == 1 else None if is_alone else ("fsdp", "expert")
    assert seen == [((S, B // parts), is_alone, axes)]


@pytest.mark.parametrize(
    ("sizes", "elsewhere", "on_tpu"),
    [
        ({"data": 1}, False, False),
        ({"data": 8}, True, True),
        ({"data": 2, "fsdp": 4}, True, False),
        ({"data": 2, "fsdp": 2, "tensor": 2}, False, False),
    ],
    ids=str,
)
def test_the_all_reduce_is_deferred_only_for_some_axes(sizes, elsewhere, on_tpu):
    assert (has_deferred_all_reduce(sizes, is_tpu=False), has_deferred_all_reduce(sizes, is_tpu=True)) == (
        elsewhere,
        on_tpu,
    )


def list_meshes(devices):
    """Return all meshes over the given number of devices, a power of two."""
    sizes = [2**power for power in range(devices.bit_length())]
    found = itertools.product(sizes, repeat=len(AXES))
    return [dict(zip(AXES, mesh, strict=True)) for mesh in found if math.prod(mesh) == devices]


DAILY = ({"data": 2, "fsdp": 2, "tensor": 2},)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(sizes, marks=() if {axis: size for axis, size in sizes.items() if size > 1} in DAILY else SOAK)
        for sizes in list_meshes(8)
    ],
    ids=format_mesh,
)
def test_a_model_without_sharding_constraints_compiles(sizes, tmp_path):
    changes = {"topology.mesh": sizes, "config.data.sequence_length": 64, "config.train.global_batch_examples": 16}
    job = make_gpt(tmp_path / "run", PretrainLlama, **changes, **{"config.model": {"layers": 1}})
    train_setup = job.setup_builder.build(jax.devices())
    step = train_setup.compile_train(job.train_step, list_batch_layouts(job.config, train_setup.mesh)[0])
    assert step.executable is not None


# Train step.


def forward(apply_fn, params, batch, key):
    """Return squared errors, with meta of every kind."""
    errors_BxT = (batch["x"] @ params["weights"] - 1) ** 2 * batch["padding_mask"]
    error, count = jnp.sum(errors_BxT), jnp.sum(batch["padding_mask"], dtype=jnp.float32)
    return error, {
        "token_count": count,
        "sums": {"error": error, "of_half": (error, count / 2)},
        "statistics": {"rows": jnp.int32(batch["x"].shape[0])},
        "last_example": batch["example"][-1],
    }


def run_step(sizes):
    """Return loss, meta and parameters after a step, on a mesh or unsharded."""
    generator = np.random.default_rng(0)
    batch = {
        "x": generator.normal(size=(S, B, T, D)).astype(np.float32),
        "padding_mask": generator.random((S, B, T)) < 0.7,
    }
    params = {"weights": jnp.arange(D, dtype=jnp.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))

    def step(state, batch):
        return train_step(
            forward, state, batch, KEY, S, StepOptions(update_variables=lambda variables, sums: (variables, sums))
        )

    if sizes is None:
        return jax.device_get(jax.jit(step)(state, batch))
    mesh = make_partial_mesh(sizes)
    with use_sharding_rules(mesh):
        batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec(None, BATCH_AXES)))
        return jax.device_get(jax.jit(step)(state, batch))


@pytest.mark.daily(2)
@parametrize_meshes
def test_a_deferred_all_reduce_gives_the_same_step_within_rounding(sizes):
    (state, loss, meta), (expected, expected_loss, expected_meta) = run_step(sizes), run_step(None)
    np.testing.assert_allclose(state.params["weights"], expected.params["weights"], rtol=1e-6)
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-6)
    assert {*meta} == {*expected_meta} == {"token_count", "error", "of_half", "rows", "last_example", "grad_norm"}
    assert (meta["rows"], meta["last_example"]) == (S * B, S * B - 1)
    for name, value in expected_meta.items():
        np.testing.assert_allclose(meta[name], value, rtol=1e-6)
