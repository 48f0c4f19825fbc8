"""Experts that are cut over devices, and rows that are: a layer does what it does on one device.

Shape legend: as in `experiments.model.moe`.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.model import exchange
from experiments.model.moe import MixtureOfExperts, MoeConfig
from runner.train.mesh import BATCH_AXES, make_mesh
from runner.train.state import sharding_rules, variable_shardings

SOAK = pytest.mark.soak
KEY = jax.random.key(0)
B, T, D, E, K, F = 8, 24, 16, 8, 2, 12
LAYER = {"experts": E, "experts_per_token": K, "auxiliary_loss": 0.5, "router_z_loss": 0.1, "bias_rate": 0.01}
ROOM = {"dropless": {}, "capacity": {"capacity_factor": 1.0}}
DEEPSEEK = {"gate": "sigmoid", "shared_experts": 1, "groups": 4, "groups_per_token": 2, "routed_scale": 2.5}
MESHES = {
    "expert 8": {"expert": 8},
    "data 2, expert 4": {"data": 2, "expert": 4},
    "expert 4, tensor 2": {"expert": 4, "tensor": 2},
    "fsdp 2, expert 2, tensor 2": {"fsdp": 2, "expert": 2, "tensor": 2},
    "fsdp 2, sequence 2, expert 2": {"fsdp": 2, "sequence": 2, "expert": 2},
    "sequence 2, expert 2, tensor 2": {"sequence": 2, "expert": 2, "tensor": 2},
    "sequence 4, tensor 2": {"sequence": 4, "tensor": 2},
    "sequence 8": {"sequence": 8},
}
# What the router's biases make of the load: as it comes; one expert is in every choice; two of one device are all.
TRAFFIC = {"any": (), "one": (5,), "two": (4, 5)}


def inputs():
    """Tokens, and rows of several lengths: whole, padded, and of padding alone."""
    lengths = np.asarray([T, T, 1, 0, 7, T, 13, 2])
    return jax.random.normal(jax.random.key(1), (B, T, D)), jnp.asarray(np.arange(T) < lengths[:, None])


@functools.cache
def layer(room, traffic, family=()):
    """A layer and its variables, with scores far enough apart that rounding chooses no other experts."""
    config = MoeConfig(**LAYER | ROOM[room] | dict(family))
    model = MixtureOfExperts(config, F, "swiglu", 0.3)
    variables = jax.jit(lambda key: nn.unbox(model.init(key, *inputs())))(KEY)
    variables = jax.tree.map(lambda leaf: 20 * leaf, variables)
    favoured = np.isin(np.arange(E), TRAFFIC[traffic])
    variables["balance"]["bias"] = jnp.linspace(-0.2, 0.2, E) + 9 * jnp.asarray(favoured, jnp.float32)
    return model, variables


def gradients_of(model):
    def loss(variables, x_BxTxD, real_BxT):
        y_BxTxD, statistics = model.apply(variables, x_BxTxD, real_BxT)
        total = jnp.sum(jnp.where(real_BxT[..., None], 1 + jnp.sin(y_BxTxD), 0)) + jnp.sum(statistics["loss_B"])
        return total, (jnp.where(real_BxT[..., None], y_BxTxD, 0), statistics)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def expected(*names):
    model, variables = layer(*names)
    return jax.device_get(jax.jit(gradients_of(model))(variables, *inputs()))


def lying(mesh, model, variables):
    """Variables, tokens and what is real, as they lie in a job."""
    boxed = jax.eval_shape(model.init, KEY, *inputs())
    variables = jax.device_put(variables, variable_shardings(boxed, mesh))
    stream = NamedSharding(mesh, PartitionSpec(BATCH_AXES, ("sequence", "tensor")))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))
    return variables, jax.device_put(inputs()[0], stream), jax.device_put(inputs()[1], rows)


def sharded(mesh, *names):
    model, variables = layer(*names)
    arrays = lying(mesh, model, variables)
    with sharding_rules(mesh):
        return jax.device_get(jax.jit(gradients_of(model))(*arrays))


def assert_same(actual, expected):
    (loss, (y, statistics)), gradients = actual
    (expected_loss, (expected_y, expected_statistics)), expected_gradients = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-5 * np.abs(expected_y).max())
    for name in ("load_E", "dropped"):
        np.testing.assert_array_equal(statistics[name], expected_statistics[name])
    for name in ("loss_B", "entropy"):
        np.testing.assert_allclose(statistics[name], expected_statistics[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


DAILY = {("fsdp 2, expert 2, tensor 2", "dropless", "two"), ("data 2, expert 4", "capacity", "any")}
CASES = [
    case if case in DAILY else pytest.param(*case, marks=SOAK)
    for case in ((mesh, room, traffic) for mesh in MESHES for room in ROOM for traffic in TRAFFIC)
]


@pytest.mark.parametrize(("mesh", "room", "traffic"), CASES)
def test_a_layer_on_many_devices_is_that_on_one(mesh, room, traffic):
    assert_same(sharded(make_mesh(MESHES[mesh]), room, traffic), expected(room, traffic))
