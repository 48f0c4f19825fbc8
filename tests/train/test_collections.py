"""Flax collections other than `params`, updated by `update_variables`: batch statistics and float8 scales."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner import BaseTrainer
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.storage import parse_lines
from runner.train.loss import cross_entropy_sum
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, make_mesh_options, stop_after

V, D, STEPS = 256, 16, 4
MOMENTUM, LARGEST = 0.9, 448.0  # largest float8_e4m3fn


class NormModel(nn.Module):
    """Token model with batch normalisation."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        hidden_BxTxD = nn.Embed(V, D)(x_BxT)
        hidden_BxTxD = nn.BatchNorm(use_running_average=deterministic, momentum=MOMENTUM)(hidden_BxTxD)
        return nn.Dense(V)(nn.gelu(hidden_BxTxD))


class ScaledModel(nn.Module):
    """Token model with 8-bit activations, scaled by the maximum of the previous step."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        hidden_BxTxD = nn.Embed(V, D)(x_BxT)
        variable = self.variable("fp8", "scale", lambda: jnp.float32(1 / LARGEST))
        scale = variable.value
        if not deterministic:
            variable.value = jnp.max(jnp.abs(jax.lax.stop_gradient(hidden_BxTxD))) / LARGEST
        narrow_BxTxD = jnp.clip(hidden_BxTxD / scale, -LARGEST, LARGEST).astype(jnp.float8_e4m3fn)
        rounding_BxTxD = narrow_BxTxD.astype(jnp.float32) * scale - hidden_BxTxD
        return nn.Dense(V)(hidden_BxTxD + jax.lax.stop_gradient(rounding_BxTxD))


class CollectionJob(BaseTrainer):
    """Job whose next collections are the mean of those that each device computes for each micro-batch."""

    module: type[nn.Module]

    def model(self):
        return self.module()

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        if key is None:
            logits_BxTxV, meta = apply_fn({"params": params}, batch["x"], deterministic=True), {}
        else:
            collections = ["batch_stats", "fp8"]
            logits_BxTxV, changed = apply_fn({"params": params}, batch["x"], deterministic=False, mutable=collections)
            meta = {"statistics": {"sums": changed, "micro_batches": jnp.int32(1)}}
        return cross_entropy_sum(logits_BxTxV, batch["y"], batch["padding_mask"])[0], meta

    @classmethod
    def update_variables(cls, variables, statistics):
        return jax.tree.map(lambda total: total / statistics["micro_batches"], statistics["sums"]), {}


class TrainNormed(CollectionJob):
    module = NormModel


class TrainScaled(CollectionJob):
    module = ScaledModel


def job(directory, job_class, **changes):
    fixed = {"config.model": {}, "config.train.total_steps": STEPS, "config.train.micro_batch_examples": 1}
    return make_gpt(directory, job_class, **fixed | {"config.optimizer.learning_rate": 0.1} | changes)


@pytest.fixture(
    scope="module",
    params=[TrainNormed, pytest.param(TrainScaled, marks=pytest.mark.soak)],
    ids=["batch statistics", "scales of float8"],
)
def uninterrupted(request, tmp_path_factory):
    found = job(tmp_path_factory.mktemp("collections") / "whole", request.param)
    found()
    return found


@pytest.mark.parametrize(
    "mesh",
    [{}, pytest.param(make_mesh_options(4, 1, 2), marks=pytest.mark.soak)],
    ids=["here", "on a mesh of as large parts"],
)
def test_resumed_collections_equal_those_of_an_uninterrupted_run(uninterrupted, tmp_path, mesh):
    job_class = type(uninterrupted).__mro__[1]
    first = job(tmp_path / "run", job_class)
    stop_after(first, 2)
    again = job(tmp_path / "run", job_class, **mesh)
    again()
    for leaf, other in zip(*map(jax.tree.leaves, (again.state.variables, uninterrupted.state.variables)), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-6)
    if not mesh:
        assert again.result() == uninterrupted.result()
        assert are_leaves_equal(again.state.variables, uninterrupted.state.variables)


@pytest.mark.soak
def test_collections_are_averaged_over_devices_and_micro_batches(tmp_path):
    one = job(tmp_path / "run", TrainNormed, **{"config.train.total_steps": 1, "config.schedule": {}})
    one()
    table_VxD = one.train_setup.init_state().params["Embed_0"]["embedding"]
    x_SxBxT = np.asarray(one.batch("train", 0)["x"])
    assert x_SxBxT.shape[:2] == (2, 8)  # on 8 devices, so that each device sees one example
    rows_PxTxD = np.asarray(table_VxD)[x_SxBxT.reshape(16, -1)]
    found = one.state.variables["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(found["mean"], (1 - MOMENTUM) * rows_PxTxD.mean(axis=(0, 1)), rtol=1e-4, atol=1e-6)
    variance_D = rows_PxTxD.var(axis=1).mean(axis=0)
    np.testing.assert_allclose(found["var"], MOMENTUM + (1 - MOMENTUM) * variance_D, rtol=1e-4)


def test_evaluation_uses_the_collections(uninterrupted):
    rows = parse_lines(uninterrupted.store.read("metrics.jsonl"))
    state, loss = uninterrupted.state, rows[-1]["val/loss"]
    fresh = uninterrupted.train_setup.init_state().variables
    hosts = Hosts.single_process()
    assert uninterrupted.validation.evaluate(uninterrupted.weights(state), STEPS, hosts)["val/loss"] == loss
    assert (
        uninterrupted.validation.evaluate(uninterrupted.weights(state.replace(variables=fresh)), STEPS, hosts)[
            "val/loss"
        ]
        != loss
    )


class FlaxFp8Model(nn.Module):
    """Token model with one of Flax's float8 matrix products."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        return nn.Dense(V, dot_general_cls=nn.Fp8DirectDotGeneralOp)(nn.Embed(V, D)(x_BxT))


class TrainFlaxFp8(BaseTrainer):
    def model(self):
        return FlaxFp8Model()


def test_scales_overwritten_by_gradients_are_rejected_before_the_run_starts(tmp_path):
    with pytest.raises(InvalidError, match=r"^the model has variables _overwrite_with_gradient .*fp8_ops"):
        job(tmp_path / "run", TrainFlaxFp8)()
    assert not (tmp_path / "run").exists()
