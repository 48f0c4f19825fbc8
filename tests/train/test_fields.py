"""Batch fields: the step uses those that the data declares, and a field that nothing reads is an error.

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
from runner.data.packing import make_token_fields
from runner.errors import InvalidError
from runner.train import setup
from tests.support.tiny_jobs import make_gpt
from tests.support.train_states import make_state

S, B, T, V = 2, 3, 8, 16
KEY = jax.random.key(0)
DTYPES = {"x": "int32", "y": "int32", "padding_mask": "bool", "segment": "int32", "position": "int32"}
DOCUMENTS = ("x", "y", "padding_mask", "segment", "position")


class PlainModel(nn.Module):
    """A model without arguments for packed documents."""

    num_ids: int = V

    @nn.compact
    def __call__(self, x_BxT, *, deterministic):
        return nn.Dense(self.num_ids)(nn.Embed(self.num_ids, 4)(x_BxT))


class SegmentModel(PlainModel):
    """A model that takes segments but no positions."""

    @nn.compact
    def __call__(self, x_BxT, *, segments=None, deterministic):
        return super().__call__(x_BxT, deterministic=deterministic)


class IgnoringModel(PlainModel):
    """A model that ignores the keyword arguments of documents."""

    @nn.compact
    def __call__(self, x_BxT, *, deterministic, **rest):
        return super().__call__(x_BxT, deterministic=deterministic)


class DocumentModel(PlainModel):
    @nn.compact
    def __call__(self, x_BxT, *, segments=None, positions=None, deterministic):
        logits_BxTxV = super().__call__(x_BxT, deterministic=deterministic)
        return logits_BxTxV if segments is None else logits_BxTxV * segments[..., None]


class DifficultyJob(BaseTrainer):
    """A job that reads an extra field of the batch."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum * jnp.sum(batch["difficulty"]), meta


class CountingJob(BaseTrainer):
    """A job that is not about text and returns its own token count."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        error_BxT = batch["pixel"] * params["Dense_0"]["bias"][0] - batch["depth"]
        return jnp.sum(error_BxT**2), {"token_count": batch["pixel"].size}


class UncountedJob(CountingJob):
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
        (
            BaseTrainer,
            PlainModel,
            DOCUMENTS,
            "several documents, and PlainModel takes no segments and no positions: it would",
        ),
        (BaseTrainer, SegmentModel, DOCUMENTS, "several documents, and SegmentModel takes no positions: it would"),
        (BaseTrainer, IgnoringModel, DOCUMENTS, "batches hold segment, which forward never reads"),
        (BaseTrainer, PlainModel, (*DOCUMENTS[:3], "difficulty"), "batches hold difficulty, which forward never reads"),
        (
            DifficultyJob,
            PlainModel,
            (*DOCUMENTS[:3], "difficulty", "age"),
            r"^tests/train/test_fields\.py:\d+: DifficultyJob\.forward: .*batches hold age, which forward never reads",
        ),
        (DifficultyJob, PlainModel, (*DOCUMENTS, "difficulty"), "PlainModel takes no segments and no positions"),
        (
            UncountedJob,
            PlainModel,
            ("pixel", "depth"),
            r"^\S*:\d+: UncountedJob\.forward: .*hold depth, pixel and no padding_mask; return from forward as meta",
        ),
        (BaseTrainer, PlainModel, ("x", "y"), "hold x, y and no padding_mask; return from forward as meta token_count"),
    ],
)
def test_unread_fields_are_rejected_when_the_step_is_traced(job, model, fields, message):
    with pytest.raises(InvalidError, match=message):
        trace(job, model(), fields)


@pytest.mark.parametrize(
    ("job", "model", "fields"),
    [
        (BaseTrainer, PlainModel, DOCUMENTS[:3]),
        (BaseTrainer, DocumentModel, DOCUMENTS),
        (BaseTrainer, PlainModel, (*DOCUMENTS[:3], "loss_weight")),
        (DifficultyJob, DocumentModel, (*DOCUMENTS, "loss_weight", "difficulty")),
        (CountingJob, PlainModel, ("pixel", "depth")),
    ],
)
def test_steps_with_all_fields_read_are_traced(job, model, fields):
    trace(job, model(), fields)


def test_a_trainer_can_use_fields_other_than_text():
    generator = np.random.default_rng(0)
    batch = {name: jnp.asarray(generator.normal(size=(S, B, T)), jnp.float32) for name in ("pixel", "depth")}
    state = make_state(PlainModel(), KEY, optax.sgd(1.0), jnp.zeros((1, T), jnp.int32), deterministic=True)
    _, loss, meta = jax.jit(CountingJob.train_step, static_argnums=3)(state, batch, KEY, S)
    np.testing.assert_allclose(loss, np.mean(np.square(batch["depth"])), rtol=1e-6)
    assert meta["token_count"] == S * B * T


class TextJob(BaseTrainer):
    """A user's trainer whose model has no arguments for packed documents."""

    def model(self):
        return PlainModel(256)


def test_a_model_without_document_arguments_is_rejected_before_the_run_starts(tmp_path, monkeypatch):
    declared = make_token_fields({"segment": np.int32, "position": np.int32}, 16)
    monkeypatch.setattr(setup, "get_batch_fields", lambda config: get_batch_fields(config) | declared)
    job = make_gpt(tmp_path / "run", TextJob, **{"config.model": {}})
    with pytest.raises(InvalidError, match="PlainModel takes no segments"):
        job()
    assert not (tmp_path / "run").exists()
