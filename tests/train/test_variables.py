"""A model's variables other than its parameters are state: every theorem of the state holds for them."""

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
from runner.train.state import bind_variables, make_state
from tests.support.tiny import gpt, leaves_equal, mesh_of, set_mesh, stop_after

V, T, R = 256, 16, 16
KEY = jax.random.key(0)
RATE = np.float32(0.1)


class Biased(nn.Module):
    """Logits looked up by token, and a bias of each token that no gradient moves."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        table_VxV = self.param("table", nn.initializers.normal(0.02), (V, V))
        bias_init = nn.with_logical_partitioning(nn.initializers.zeros, ("vocab",))
        bias_V = self.variable("balance", "bias", bias_init, None, (V,), jnp.float32).value
        return table_VxV[x_BxT] + jax.lax.stop_gradient(nn.unbox(bias_V))


class Balanced(BaseTrainer):
    """Lowers the bias of the tokens that the step has had more often than the mean, and raises that of the others."""

    def model(self):
        return Biased()

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


def batch_of(S):
    generator = np.random.default_rng(0)
    rows = {"x": generator.integers(0, V, (R, T)), "y": generator.integers(0, V, (R, T))}
    rows["padding_mask"] = np.arange(T) < generator.integers(0, T + 1, (R, 1))
    return {name: jnp.asarray(leaf).reshape(S, R // S, T) for name, leaf in rows.items()}


def make(key):
    return make_state(Biased(), key, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)


def biases_of(batch):
    """By numpy, from the whole batch."""
    counts_V = np.bincount(batch["y"][batch["padding_mask"]], minlength=V)
    return RATE * np.sign(counts_V.sum() - V * counts_V).astype(np.float32)


SPLITS = [(1, None), (8, None), (2, (8, 1, 1))]


@pytest.mark.parametrize(
    ("S", "sizes"), [(2, None), (8, (1, 2, 4)), *(pytest.param(*case, marks=pytest.mark.soak) for case in SPLITS)]
)
def test_no_split_of_the_batch_moves_a_bit_of_the_next_variables(S, sizes):
    batch, state = batch_of(S), make(KEY)
    step = jax.jit(Balanced.train_step, static_argnums=3)
    if sizes is None:
        after, _, meta = step(state, batch, KEY, S)
    else:
        mesh = mesh_of(*sizes)
        with use_sharding_rules(mesh):
            after, _, meta = step(state, jax.device_put(batch, make_batch_sharding(mesh)), KEY, S)
    expected = biases_of(jax.device_get(batch))
    assert np.asarray(after.variables["balance"]["bias"]).tobytes() == expected.tobytes()
    assert set(meta) == {"grad_norm", "last", "most", "tokens_seen"}
    assert meta["tokens_seen"].dtype == jnp.float32
    parts = sizes[0] if sizes else 1  # along `data`, of which the last one says it
    assert meta["last"] == batch["padding_mask"][-1, -R // S // parts :].sum()


def test_validation_sees_the_variables():
    state, batch = make(KEY), batch_of(2)
    other = state.replace(variables={"balance": {"bias": jnp.arange(V, dtype=jnp.float32)}})
    loss, _, meta = Balanced.val_step(state, batch)
    assert set(meta) == {"last"}
    assert float(loss) != float(Balanced.val_step(other, batch)[0])


def test_a_state_without_variables_has_the_names_and_the_fingerprint_that_flaxs_has():
    model = nn.Dense(3)
    state = make_state(model, KEY, optax.adamw(1e-3), jnp.zeros((1, 2)))
    plain = flax_state.TrainState.create(apply_fn=model.apply, params=state.params, tx=optax.adamw(1e-3))
    plain = plain.replace(step=state.step)
    assert state.variables == {}
    assert list_leaf_names(state) == list_leaf_names(plain)
    assert compute_fingerprint(state) == compute_fingerprint(plain)


def test_variables_have_names_of_their_own_and_count_in_the_fingerprint():
    state = make(KEY)
    assert "variables.balance.bias" in list_leaf_names(state)
    assert compute_fingerprint(state) != compute_fingerprint(
        state.replace(variables={"balance": {"bias": jnp.ones(V)}})
    )


def test_what_a_model_takes_is_known_behind_its_variables():
    state = make(KEY)
    apply_fn = bind_variables(state.apply_fn, state.variables)
    with pytest.raises(InvalidError, match="Biased takes no segments"):
        document_arguments(apply_fn, {"segment": jnp.ones((1, T))})


# As a job.


def job(directory, job_class=Balanced, **changes):
    return gpt(directory, job_class, **{"config.model": {}, **changes})


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("variables")


@pytest.fixture(scope="module")
def whole(directory):
    found = job(directory / "whole")
    found()
    return found


def test_they_lie_on_the_mesh_as_their_names_say(directory):
    sharded = job(directory / "sharded", **set_mesh(2, 2, 2))
    sharded.setup(Hosts.single_process())
    for state in (sharded.abstract_state(), sharded.init_state()):
        leaf = state.variables["balance"]["bias"]
        assert math.prod(leaf.sharding.shard_shape(leaf.shape)) == V // 4


@pytest.mark.parametrize(
    "mesh", [{}, pytest.param(set_mesh(1, 4, 2), marks=pytest.mark.soak)], ids=["here", "on another mesh"]
)
def test_stopped_and_resumed_they_have_the_bits_of_the_whole_run(directory, whole, mesh):
    name = "elsewhere" if mesh else "resumed"
    first = job(directory / name)
    stop_after(first, 3)
    again = job(directory / name, **mesh)
    again()
    assert leaves_equal(again.state.variables, whole.state.variables)
    assert np.abs(whole.state.variables["balance"]["bias"]).max() > 0.7
    if not mesh:
        assert read_json(again.store, "result.json") == read_json(whole.store, "result.json")


def test_an_open_checkpoint_has_them(whole):
    weights, _ = open_checkpoint(whole.store.root)
    assert leaves_equal(weights, whole.weights(whole.state))
    assert set(weights) == {"params", "variables"}
    apply_fn, variables = Biased().apply, {"params": weights["params"], **weights["variables"]}
    tokens = jnp.zeros((1, T), jnp.int32)
    assert leaves_equal(
        apply_fn(variables, tokens, deterministic=True),
        bind_variables(apply_fn, whole.state.variables)({"params": whole.state.params}, tokens, deterministic=True),
    )


def test_another_run_begins_with_them(directory, whole):
    class Still(Balanced):
        update_variables = BaseTrainer.update_variables

    other = job(directory / "warm", Still, **{"checkpoint.init_from": str(whole.store.root)})
    other()
    assert leaves_equal(other.state.variables, whole.state.variables)


def test_weights_without_them_are_refused_by_their_name(directory):
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


def test_variables_that_come_back_in_another_form_are_refused_by_their_name(directory):
    class Narrow(Balanced):
        @classmethod
        def update_variables(cls, variables, statistics):
            return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), variables), {}

    with pytest.raises(StateError, match=r"variables\.balance\.bias: was float32\[256\], is bfloat16"):
        job(directory / "narrow", Narrow)()
