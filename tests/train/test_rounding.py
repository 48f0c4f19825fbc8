"""Stochastic rounding of bfloat16 parameters: unbiased, independent of the mesh, and as good as float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.gpt import PretrainGPT
from runner import BaseTrainer
from runner.config import PrecisionConfig
from runner.optim.library import update_in_float32
from runner.train import step as pure
from runner.train.step import round_stochastically
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh, make_gpt, stop_after
from tests.support.train_states import make_state

KEY = jax.random.key(0)
NARROW = {"config.precision.params": "bfloat16", "config.precision.rounding": "stochastic"}
NARROW |= {"config.train.total_steps": 5, "config.eval.every_steps": None}
DRAWS, WIDTH, V, T = 10_000, 16, 64, 16


def test_the_mean_of_many_draws_is_the_value():
    values = jnp.asarray(np.random.default_rng(0).normal(size=64) * 10.0 ** np.arange(-32, 32), jnp.float32)
    draw = jax.jit(jax.vmap(lambda number: round_stochastically(values, jax.random.fold_in(KEY, number))))
    drawn = np.asarray(draw(jnp.arange(DRAWS)), np.float64)
    exact = np.asarray(values, np.float64)
    gap = np.abs(drawn - exact).max(axis=0)
    assert (np.abs(drawn - exact) <= np.abs(exact) / 128).all()  # one of the two nearest values
    assert ((drawn > exact).any(axis=0) & (drawn < exact).any(axis=0)).all()
    assert (np.abs(drawn.mean(axis=0) - exact) < 5 * gap / np.sqrt(DRAWS)).all()
    nearest = np.asarray(values.astype(jnp.bfloat16), np.float64)
    assert (np.abs(nearest - exact) > 5 * gap / np.sqrt(DRAWS)).any()


def test_bfloat16_and_non_finite_values_are_unchanged():
    values = jnp.asarray([0.0, -0.0, 1.0, -1.5, jnp.inf, -jnp.inf, jnp.nan, 3.0e38], jnp.float32)
    values = values.at[-1].set(values[-1].astype(jnp.bfloat16).astype(jnp.float32))
    for number in range(20):
        found = round_stochastically(values, jax.random.fold_in(KEY, number))
        np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(values))


class NarrowModel(nn.Module):
    """Token model with a hidden layer; its initial weights do not depend on the dtype."""

    vocabulary_size: int
    dtype: str

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        def matrix(name, *shape):
            return self.param(name, lambda key: jax.random.normal(key, shape).astype(self.dtype)).astype(jnp.float32)

        hidden_BxTxD = jax.nn.gelu(matrix("inner", self.vocabulary_size, WIDTH)[x_BxT])
        return hidden_BxTxD @ matrix("outer", WIDTH, self.vocabulary_size) / WIDTH**0.5


class TrainNarrow(BaseTrainer):
    """Trainer of the narrow model."""

    Config = PretrainGPT.Config

    def model(self):
        return NarrowModel(self.vocabulary_size, self.config.precision.params)


def job(directory):
    return make_gpt(directory, TrainNarrow, **NARROW)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("rounding")


@pytest.mark.soak
def test_resumed_run_is_bit_identical_and_moments_are_float32(directory):
    whole = job(directory / "whole")
    whole()
    first = job(directory / "resumed")
    stop_after(first, 3)
    again = job(directory / "resumed")
    again()
    assert again.result() == whole.result()
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(whole.state.params)} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(whole.state.opt_state)} == {"float32", "int32"}


@pytest.mark.parametrize("sizes", [(4, 2, 1), (2, 2, 2)], ids=["fsdp", "all axes"])
def test_the_draws_do_not_depend_on_the_mesh(sizes):
    values = jax.random.normal(KEY, (64, 32))
    lying = jax.device_put(values, jax.NamedSharding(make_full_mesh(*sizes), jax.P("fsdp", "tensor")))
    found = jax.jit(round_stochastically)(lying, KEY)
    assert not found.sharding.is_fully_replicated
    assert are_leaves_equal(jax.device_get(found), jax.device_get(jax.jit(round_stochastically)(values, KEY)))


def compute_last_loss(dtype, rounding):
    """Return the mean of the last losses of 200 steps on fixed data and initial weights."""
    model, optimizer = NarrowModel(V, dtype), update_in_float32(optax.adamw(2e-3))
    state = make_state(model, KEY, optimizer, jnp.zeros((1, T), jnp.int32), deterministic=True)
    sequences = np.random.default_rng(0).integers(0, V, (200, 1, 16, T + 1)) // np.arange(1, T + 2)  # learnable
    batches = {"x": jnp.asarray(sequences[..., :-1]), "y": jnp.asarray(sequences[..., 1:])}
    batches["padding_mask"] = jnp.ones(batches["x"].shape, bool)

    def step(state, batch):
        key = jax.random.fold_in(KEY, state.step)
        options = pure.StepOptions(update_variables=TrainNarrow.update_variables, rounding=rounding)
        after, loss, _ = pure.train_step(TrainNarrow.forward, state, batch, key, 1, options)
        return after, loss

    _, losses = jax.jit(lambda state: jax.lax.scan(step, state, batches))(state)
    return float(losses[-10:].mean())


@pytest.mark.soak
def test_the_loss_after_200_steps_is_within_one_percent_of_float32():
    whole = compute_last_loss("float32", "nearest")
    assert abs(compute_last_loss("bfloat16", "stochastic") / whole - 1) < 0.01
    assert abs(compute_last_loss("bfloat16", "nearest") / whole - 1) > 0.02


def test_rounding_of_float32_parameters_is_rejected():
    with pytest.raises(ValueError, match="rounding=stochastic: nothing reads it, as params are float32"):
        PrecisionConfig(rounding="stochastic")
