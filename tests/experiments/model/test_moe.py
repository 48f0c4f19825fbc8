"""Mixture of experts, compared with a plain reference that computes every expert for every token.

Shape legend: as in `experiments.model.moe`.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.model.layers import activate
from experiments.model.moe import MixtureOfExperts, MoeConfig

B, T, D, E, K, F = 8, 24, 16, 8, 2, 12
KEY = jax.random.key(0)
SIZES = {"experts": E, "experts_per_token": K}

GATES = {
    "softmax": {},
    "softmax as it is": {"normalise_gates": False, "routed_scale": 2.0},
    "sigmoid": {"gate": "sigmoid", "routed_scale": 2.5},
    "groups of two best": {"gate": "sigmoid", "groups": 4, "groups_per_token": 2},
    "groups of the best": {"groups": 4, "groups_per_token": 1, "group_score": "max"},
}
BALANCING = {
    "loss": {"auxiliary_loss": 0.5, "router_z_loss": 0.1},
    "bias": {"auxiliary_loss": 0.0, "bias_rate": 0.01},
}
ROOM = {"dropless": {}, "capacity": {"capacity_factor": 0.6}}
SHARED = {"shared_experts": 2}
FAMILIES = {
    f"{gate}, {balance}, {room}": {**SIZES, **GATES[gate], **BALANCING[balance], **ROOM[room]}
    for gate in GATES
    for balance in BALANCING
    for room in ROOM
}


def choose_by_loops(variables, config, x_BxTxD, real_BxT):
    """Return (chosen, kept), bool (B, T, E), by loops over sequences, tokens and choices."""
    gates = np.asarray(compute_gates(variables, config, x_BxTxD)) + np.asarray(get_bias(variables))
    best, size = {"max": 1, "top_2": 2}[config.group_score], E // config.groups
    chosen, kept = np.zeros(gates.shape, bool), np.zeros(gates.shape, bool)
    for b, t in np.argwhere(real_BxT):
        scores_GxI = gates[b, t].reshape(config.groups, size)
        groups = np.argsort(-np.sort(scores_GxI)[:, -best:].sum(-1))[: config.groups_per_token]
        scores = np.where(np.isin(np.arange(E) // size, groups), gates[b, t], -np.inf)
        for e in np.argsort(-scores)[:K]:
            chosen[b, t, e] = True
            kept[b, t, e] = chosen[b, :, e].sum() <= config.capacity(T)
    return chosen, kept


def get_bias(variables):
    return variables.get("balance", {"bias": np.zeros(E)})["bias"]


def compute_gates(variables, config, x_BxTxD):
    function = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}[config.gate]
    return function(x_BxTxD @ variables["params"]["router"] + variables["params"].get("router_bias", 0))


def compute_reference(variables, config, activation, x_BxTxD, real_BxT, chosen, kept):
    """Return (y, loss_B) from the outputs of all experts for every token, most of them with weight 0."""
    params, gates = variables["params"], compute_gates(variables, config, x_BxTxD)
    weights = jnp.where(chosen, gates, 0)
    if config.normalise_gates:
        weights = weights / jnp.where(real_BxT[..., None], weights.sum(-1, keepdims=True), 1)
    weights = jnp.where(kept, weights, 0) * config.routed_scale
    names = ("up",) if activation == "squared_relu" else ("gate", "up")
    hidden = [jnp.einsum("btd,edf->btef", x_BxTxD, params[name]) + params.get(f"{name}_bias", 0) for name in names]
    every = jnp.einsum("btef,efd->bted", activate(activation, *hidden), params["down"]) + params.get("down_bias", 0)
    y = jnp.einsum("bted,bte->btd", every, weights)
    if "shared" in params:
        kernels = [params["shared"][name]["kernel"] for name in (*names, "down")]
        y += activate(activation, *(x_BxTxD @ kernel for kernel in kernels[:-1])) @ kernels[-1]
    n = np.maximum(real_BxT.sum(1), 1)
    shares = jnp.where(real_BxT[..., None], gates / gates.sum(-1, keepdims=True), 0).sum(1) / n[:, None]
    balance = E * (chosen.sum(1) / n[:, None] / K * shares).sum(-1)
    scores_BxTxE = x_BxTxD @ params["router"] + params.get("router_bias", 0)
    z = jnp.where(real_BxT, jax.nn.logsumexp(scores_BxTxE, axis=-1) ** 2, 0).sum(1) / n
    return y, config.auxiliary_loss * balance + config.router_z_loss * z


def make_inputs():
    """Return tokens and a mask of sequences that are whole, padded, or only padding."""
    x_BxTxD = jax.device_get(jax.random.normal(jax.random.key(1), (B, T, D)))
    lengths = np.asarray([T, T, 1, 0, 7, T, 13, 2])
    return x_BxTxD, np.arange(T) < lengths[:, None]


def make_layer(config, activation="swiglu"):
    model = MixtureOfExperts(config, F, activation, 0.3)
    x_BxTxD, real_BxT = make_inputs()
    variables = jax.device_get(nn.unbox(jax.jit(model.init)(KEY, x_BxTxD, real_BxT)))
    variables = jax.tree.map(lambda leaf: 20 * leaf, variables)  # scores so far apart that rounding does not matter
    for name, leaf in variables["params"].items():
        if name.endswith("_bias"):
            variables["params"][name] = 0.3 * np.random.default_rng(2).normal(size=leaf.shape).astype(np.float32)
    if "balance" in variables:
        variables["balance"]["bias"] = np.linspace(-0.2, 0.2, E, dtype=np.float32)
    return model, variables


def assert_near(actual, expected, tolerance):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * max(1, np.abs(b).max()))


# The daily tests cover each gate, balancing and capacity option at least once; the soak tests cover all combinations.
DAILY = ("softmax as it is, loss, capacity", "groups of two best, bias, dropless")


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "family", [name if name in DAILY else pytest.param(name, marks=pytest.mark.soak) for name in FAMILIES]
)
def test_a_layer_is_the_weighted_sum_of_its_experts(family):
    config = MoeConfig(**FAMILIES[family])
    check_against_reference(config, "swiglu")


@pytest.mark.soak
@pytest.mark.parametrize("activation", ["squared_relu", pytest.param("geglu", marks=pytest.mark.soak)])
def test_shared_experts_process_every_token(activation):
    check_against_reference(MoeConfig(**SIZES, **SHARED), activation)


@pytest.mark.parametrize("room", ["capacity", pytest.param("dropless", marks=pytest.mark.soak)])
def test_router_and_experts_may_have_biases(room):
    check_against_reference(MoeConfig(**SIZES, **ROOM[room], bias=True, router_z_loss=0.1), "clamped_swiglu")


def check_against_reference(config, activation):
    model, variables = make_layer(config, activation)
    x_BxTxD, real_BxT = make_inputs()
    chosen, kept = choose_by_loops(variables, config, x_BxTxD, real_BxT)

    def compute_expected(params, x):
        return compute_reference({**variables, "params": params}, config, activation, x, real_BxT, chosen, kept)

    def compute_actual(params, x):
        y, statistics = model.apply({**variables, "params": params}, x, jnp.asarray(real_BxT))
        return y, statistics["loss_B"], statistics

    def compute_all(compute):
        def loss(params, x):
            found = compute(params, x)
            y, loss_B = found[:2]
            return jnp.sum(jnp.where(real_BxT[..., None], jnp.sin(y), 0)) + jnp.sum(loss_B), found

        return jax.device_get(jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(variables["params"], x_BxTxD))

    gradients, (y, loss_B, statistics) = compute_all(compute_actual)
    expected_gradients, (expected, expected_loss_B) = compute_all(compute_expected)
    assert_near(y[real_BxT], expected[real_BxT], 1e-5)
    assert_near(loss_B, expected_loss_B, 1e-5)
    assert_near(gradients, expected_gradients, 1e-4)
    np.testing.assert_array_equal(statistics["load_E"], chosen.sum((0, 1)))
    assert int(statistics["dropped"]) == chosen.sum() - kept.sum()
    assert (statistics["dropped"] > 0) == (config.capacity_factor is not None)
