"""Fields of a batch: the step reads what the data declares, and refuses what nothing reads.

Shape legend: S accumulation steps, B examples, T sequence length, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from runner import BaseTrainer
from runner.data import get_batch_fields
from runner.errors import InvalidError
from runner.train import compile
from runner.train.state import make_state
from tests.support.tiny import gpt

S, B, T, V = 2, 3, 8, 16
KEY = jax.random.key(0)
DTYPES = {"x": "int32", "y": "int32", "padding_mask": "bool", "segment": "int32", "position": "int32"}
DOCUMENTS = ("x", "y", "padding_mask", "segment", "position")


class Plain(nn.Module):
    """Knows of no documents."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        return nn.Dense(V)(nn.Embed(V, 4)(x_BxT))


class WithSegments(Plain):
    """Its positions are relative, and so the row's."""

    @nn.compact
    def __call__(self, x_BxT, *, segments=None, deterministic):
        return super().__call__(x_BxT, deterministic=deterministic)


class Deaf(Plain):
    """Takes whatever it is given, and reads none of it."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic, **rest):
        return super().__call__(x_BxT, deterministic=deterministic)


class Hearing(Plain):
    @nn.compact
    def __call__(self, x_BxT, *, segments=None, positions=None, deterministic):
        logits_BxTxV = super().__call__(x_BxT, deterministic=deterministic)
        return logits_BxTxV if segments is None else logits_BxTxV * segments[..., None]


class Balanced(BaseTrainer):
    """Reads a field of its own."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum * jnp.sum(batch["difficulty"]), meta


class Counting(BaseTrainer):
    """No text: says itself how many targets there are."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        error_BxT = batch["pixel"] * params["Dense_0"]["bias"][0] - batch["depth"]
        return jnp.sum(error_BxT**2), {"token_count": batch["pixel"].size}


class Uncounted(Counting):
    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        return super().forward(apply_fn, params, batch, key)[0], {}


def trace(job, model, fields):
    """Trace a train step over abstract arrays of these fields."""
    state = jax.eval_shape(
        lambda: make_state(model, KEY, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)
    )
    batch = {name: jax.ShapeDtypeStruct((S, B, T), DTYPES.get(name, "float32")) for name in fields}
    return jax.eval_shape(lambda state, batch: job.train_step(state, batch, KEY, S), state, batch)


@pytest.mark.parametrize(
    ("job", "model", "fields", "message"),
    [
        (BaseTrainer, Plain, DOCUMENTS, "several documents, and Plain takes no segments and no positions: it would"),
        (BaseTrainer, WithSegments, DOCUMENTS, "several documents, and WithSegments takes no positions: it would"),
        (BaseTrainer, Deaf, DOCUMENTS, "batches hold segment, which forward never reads"),
        (BaseTrainer, Plain, (*DOCUMENTS[:3], "difficulty"), "batches hold difficulty, which forward never reads"),
        (Balanced, Plain, (*DOCUMENTS[:3], "difficulty", "age"), "batches hold age, which forward never reads"),
        (Balanced, Plain, (*DOCUMENTS, "difficulty"), "Plain takes no segments and no positions"),
        (Uncounted, Plain, ("pixel", "depth"), "hold depth, pixel and no padding_mask; return from forward as meta"),
        (BaseTrainer, Plain, ("x", "y"), "hold x, y and no padding_mask; return from forward as meta token_count"),
    ],
)
def test_what_would_be_ignored_in_silence_is_refused_when_the_step_is_traced(job, model, fields, message):
    with pytest.raises(InvalidError, match=message):
        trace(job, model(), fields)


@pytest.mark.parametrize(
    ("job", "model", "fields"),
    [
        (BaseTrainer, Plain, DOCUMENTS[:3]),
        (BaseTrainer, Hearing, DOCUMENTS),
        (BaseTrainer, Plain, (*DOCUMENTS[:3], "loss_weight")),
        (Balanced, Hearing, (*DOCUMENTS, "loss_weight", "difficulty")),
        (Counting, Plain, ("pixel", "depth")),
    ],
)
def test_declared_fields_that_are_read_are_trained_on(job, model, fields):
    trace(job, model(), fields)


def test_a_trainer_of_something_else_than_text_has_its_own_fields():
    generator = np.random.default_rng(0)
    batch = {name: jnp.asarray(generator.normal(size=(S, B, T)), jnp.float32) for name in ("pixel", "depth")}
    state = make_state(Plain(), KEY, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)
    _, loss, meta = jax.jit(Counting.train_step, static_argnums=3)(state, batch, KEY, S)
    np.testing.assert_allclose(loss, np.mean(np.square(batch["depth"])), rtol=1e-6)
    assert meta["token_count"] == S * B * T


class Text(BaseTrainer):
    """A trainer of somebody else, whose model knows of no documents."""

    def model(self):
        return Plain()


def test_a_model_that_knows_of_no_documents_is_refused_before_anything_is_made(tmp_path, monkeypatch):
    declared = {"segment": np.int32, "position": np.int32}
    monkeypatch.setattr(compile, "get_batch_fields", lambda config: get_batch_fields(config) | declared)
    job = gpt(tmp_path / "run", Text, **{"config.model": {}})
    with pytest.raises(InvalidError, match="Plain takes no segments"):
        job()
    assert not (tmp_path / "run").exists()
