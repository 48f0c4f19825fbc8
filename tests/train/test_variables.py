"""Model variables other than parameters are part of the state: saved, restored, sharded and exported like them."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state as flax_state

from runner import BaseTrainer, open_checkpoint
from runner.checkpoint.fingerprint import compute_fingerprint, list_leaf_names
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, StateError
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.storage import read_json
from runner.train.loss import cross_entropy_sum, document_arguments
from runner.train.state import bind_variables
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh, make_gpt, make_mesh_options, stop_after
from tests.support.train_states import make_state

V, T, R = 256, 16, 16
KEY = jax.random.key(0)
RATE = np.float32(0.1)


class BiasModel(nn.Module):
    """Logits looked up by token, plus a bias per token that gets no gradient."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        table_VxV = self.param("table", nn.initializers.normal(0.02), (V, V))
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
        bias_V = self.variable("balance", "bias", bias_init, None, (V,), jnp.float32).value
        return table_VxV[x_BxT] + jax.lax.stop_gradient(nn.unbox(bias_V))


class BalancingJob(BaseTrainer):
    """A job that lowers the bias of tokens that were more frequent than the mean and raises that of the others."""

    def model(self):
        return BiasModel()

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        logits_BxTxV = apply_fn({"params": params}, batch["x"], deterministic=True)
        loss_sum, count = cross_entropy_sum(logits_BxTxV, batch["y"], batch["padding_mask"])
        is_target_BxTxV = (batch["y"][..., None] == jnp.arange(V)) & batch["padding_mask"][..., None]
        counts_V = jnp.sum(is_target_BxTxV, axis=(0, 1), dtype=jnp.int32)
        return loss_sum, {"statistics": {"counts": counts_V, "tokens": count.astype(jnp.bfloat16)}, "last": count}

    @classmethod
    def update_variables(cls, variables, statistics):
        counts_V = statistics["counts"]
        bias_V = variables["balance"]["bias"] + RATE * jnp.sign(jnp.sum(counts_V) - V * counts_V)
        return {"balance": {"bias": bias_V}}, {"most": jnp.max(counts_V), "tokens_seen": statistics["tokens"]}


def make_batch(S):
    generator = np.random.default_rng(0)
    rows = {"x": generator.integers(0, V, (R, T)), "y": generator.integers(0, V, (R, T))}
    rows["padding_mask"] = np.arange(T) < generator.integers(0, T + 1, (R, 1))
    return {name: jnp.asarray(leaf).reshape(S, R // S, T) for name, leaf in rows.items()}


def init_train_state(key):
    return make_state(BiasModel(), key, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)


def compute_biases(batch):
    """Compute the biases with NumPy from the whole batch."""
    counts_V = np.bincount(batch["y"][batch["padding_mask"]], minlength=V)
    return RATE * np.sign(counts_V.sum() - V * counts_V).astype(np.float32)


SPLITS = [(1, None), (8, None), (2, (8, 1, 1))]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("S", "sizes"), [(2, None), (8, (1, 2, 4)), *(pytest.param(*case, marks=pytest.mark.soak) for case in SPLITS)]
)
def test_the_next_variables_do_not_depend_on_the_split_of_the_batch(S, sizes):
    batch, state = make_batch(S), init_train_state(KEY)
    step = jax.jit(BalancingJob.train_step, static_argnums=3)
    if sizes is None:
        after, _, meta = step(state, batch, KEY, S)
    else:
        mesh = make_full_mesh(*sizes)
        with use_sharding_rules(mesh):
            after, _, meta = step(state, jax.device_put(batch, make_batch_sharding(mesh)), KEY, S)
    expected = compute_biases(jax.device_get(batch))
    assert np.asarray(after.variables["balance"]["bias"]).tobytes() == expected.tobytes()
    assert set(meta) == {"grad_norm", "last", "most", "tokens_seen"}
    assert meta["tokens_seen"].dtype == jnp.float32
    parts = sizes[0] if sizes else 1  # along `data`; the last part returns it
    assert meta["last"] == batch["padding_mask"][-1, -R // S // parts :].sum()


def test_validation_uses_the_variables():
    state, batch = init_train_state(KEY), make_batch(2)
    other = state.replace(variables={"balance": {"bias": jnp.arange(V, dtype=jnp.float32)}})
    loss, _, meta = BalancingJob.val_step(state, batch)
    assert set(meta) == {"last"}
    assert float(loss) != float(BalancingJob.val_step(other, batch)[0])


def test_a_state_without_variables_has_the_fingerprint_of_flaxs_state():
    model = nn.Dense(3)
    state = make_state(model, KEY, optax.adamw(1e-3), jnp.zeros((1, 2)))
    plain = flax_state.TrainState.create(apply_fn=model.apply, params=state.params, tx=optax.adamw(1e-3))
    plain = plain.replace(step=state.step)
    assert state.variables == {}
    assert list_leaf_names(state) == list_leaf_names(plain)
    assert compute_fingerprint(state) == compute_fingerprint(plain)


def test_variables_have_leaf_names_and_enter_the_fingerprint():
    state = init_train_state(KEY)
    assert "variables.balance.bias" in list_leaf_names(state)
    assert compute_fingerprint(state) != compute_fingerprint(
        state.replace(variables={"balance": {"bias": jnp.ones(V)}})
    )


def test_arguments_of_a_model_are_found_when_its_variables_are_bound():
    state = init_train_state(KEY)
    apply_fn = bind_variables(state.apply_fn, state.variables)
    with pytest.raises(InvalidError, match="BiasModel takes no segments"):
        document_arguments(apply_fn, {"segment": jnp.ones((1, T))})


# Whole jobs.


def job(directory, job_class=BalancingJob, **changes):
    return make_gpt(directory, job_class, **{"config.model": {}, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("variables")


@pytest.fixture(scope="module")
def uninterrupted(directory):
    found = job(directory / "whole")
    found()
    return found


def test_variables_are_sharded_by_their_logical_axes(directory):
    sharded = job(directory / "sharded", **make_mesh_options(2, 2, 2))
    sharded.setup(Hosts.single_process())
    for state in (sharded.abstract_state(), sharded.init_state()):
        leaf = state.variables["balance"]["bias"]
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) == V // 4


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(make_mesh_options(1, 4, 2), marks=pytest.mark.soak)], ids=["here", "on another mesh"]
)
def test_resumed_variables_are_bit_identical(directory, uninterrupted, mesh):
    name = "elsewhere" if mesh else "resumed"
    first = job(directory / name)
    stop_after(first, 3)
    again = job(directory / name, **mesh)
    again()
    assert are_leaves_equal(again.state.variables, uninterrupted.state.variables)
    assert np.abs(uninterrupted.state.variables["balance"]["bias"]).max() > 0.7
    if not mesh:
        assert read_json(again.store, "result.json") == read_json(uninterrupted.store, "result.json")


def test_an_opened_checkpoint_contains_the_variables(uninterrupted):
    weights, _ = open_checkpoint(uninterrupted.store.root)
    assert are_leaves_equal(weights, uninterrupted.weights(uninterrupted.state))
    assert set(weights) == {"params", "variables"}
    apply_fn, variables = BiasModel().apply, {"params": weights["params"], **weights["variables"]}
    tokens = jnp.zeros((1, T), jnp.int32)
    assert are_leaves_equal(
        apply_fn(variables, tokens, deterministic=True),
        bind_variables(apply_fn, uninterrupted.state.variables)(
            {"params": uninterrupted.state.params}, tokens, deterministic=True
        ),
    )


def test_another_run_can_start_from_the_variables(directory, uninterrupted):
    class Still(BalancingJob):
        update_variables = BaseTrainer.update_variables

    other = job(directory / "warm", Still, **{"checkpoint.init_from": str(uninterrupted.store.root)})
    other()
    assert are_leaves_equal(other.state.variables, uninterrupted.state.variables)


def test_weights_without_the_variables_are_rejected_by_name(directory):
    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x_BxT, *, deterministic):
            return self.param("table", nn.initializers.normal(0.02), (V, V))[x_BxT]

    class Dense(BaseTrainer):
        def model(self):
            return Plain()

    job(directory / "plain", Dense)()
    with pytest.raises(InvalidError, match=r"variables\.balance\.bias: checkpoint has nothing"):
        job(directory / "from_plain", **{"checkpoint.init_from": str(directory / "plain")})()


def test_variables_of_a_changed_dtype_are_rejected_by_name(directory):
    class Narrow(BalancingJob):
        @classmethod
        def update_variables(cls, variables, statistics):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables), {}

    with pytest.raises(StateError, match=r"variables\.balance\.bias: was float32\[256\], is bfloat16"):
        job(directory / "narrow", Narrow)()
