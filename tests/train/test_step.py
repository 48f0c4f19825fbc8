"""Train step: the loss is a mean over real tokens, independent of micro-batches and devices except for rounding.

Shape legend: S accumulation steps, B examples, T sequence length, R = S * B examples of a global batch.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner import BaseTrainer
from runner.config import MemoryConfig
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.train.loss import cross_entropy_sum
from runner.train.state import compute_variable_shardings, get_shardings, make_abstract_state
from tests.support.tiny_jobs import make_full_mesh
from tests.support.train_states import make_state

VOCABULARY, T, R = 32, 12, 16
SPLITS = [1, 2, 4, 8]
KEY = jax.random.key(0)
MODEL = GPT(GPTConfig(layers=2, heads=4, width=32), VOCABULARY, T)
TX = optax.sgd(1.0)  # with a learning rate of 1, the update is the negative gradient


def init_train_state(key):
    return make_state(MODEL, key, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)


def ragged_lengths():
    """Return lengths from no real token to a full sequence; the first quarter of the sequences is all padding."""
    return np.asarray([0, 0, 0, 0, 1, 12, 12, 12, 1, 1, 2, 1, 12, 5, 7, 3])


def make_rows(lengths_R):
    generator = np.random.default_rng(0)
    x_RxT, y_RxT = generator.integers(0, VOCABULARY, (2, R, T)).astype(np.int32)
    return {"x": x_RxT, "y": y_RxT, "padding_mask": np.arange(T) < np.asarray(lengths_R)[:, None]}


def split(rows, S):
    """Reshape to (S, B, T)."""
    return {name: jnp.asarray(leaf.reshape(S, R // S, T)) for name, leaf in rows.items()}


@pytest.fixture(scope="module")
def state() -> TrainState:
    return jax.jit(init_train_state)(KEY)


@pytest.fixture(scope="module")
def train():
    return jax.jit(PretrainGPT.train_step, static_argnums=3)


@pytest.fixture(scope="module")
def val():
    return jax.jit(PretrainGPT.val_step)


@pytest.fixture(scope="module")
def full_batch(state, train):
    """Return loss, gradient norm and new parameters of the batch in one micro-batch."""
    return run(train, state, split(make_rows(ragged_lengths()), 1), 1)


def run(train, state, batch, S):
    new, loss, meta = train(state, batch, KEY, S)
    return jax.device_get((loss, meta["grad_norm"], new.params))


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("S", [*(pytest.param(S, marks=pytest.mark.soak) for S in (2, 8)), 4])
def test_loss_and_gradients_do_not_depend_on_the_split_into_micro_batches(state, train, full_batch, S):
    actual = run(train, state, split(make_rows(ragged_lengths()), S), S)
    assert_close(actual, full_batch)


@pytest.mark.parametrize("S", [2, *(pytest.param(S, marks=pytest.mark.soak) for S in SPLITS[2:])])
def test_a_mean_of_means_gives_another_loss(state, val, full_batch, S):
    """Check the power of the test above: weighting all micro-batches equally changes the loss far more."""
    batch = split(make_rows(ragged_lengths()), S)
    means = []
    for index in range(S):
        loss_sum, token_count, _ = val(state, {name: leaf[index : index + 1] for name, leaf in batch.items()})
        means.append(float(loss_sum) / max(float(token_count), 1.0))
    assert abs(np.mean(means) - float(full_batch[0])) > 1e-3


def test_the_loss_is_the_mean_over_real_tokens_in_float64(state, full_batch):
    batch = make_rows(ragged_lengths())
    apply = jax.jit(functools.partial(MODEL.apply, deterministic=True))
    logits_RxTxV = np.asarray(apply({"params": state.params}, batch["x"]), np.float64)
    log_p_RxTxV = logits_RxTxV - np.log(np.exp(logits_RxTxV).sum(-1, keepdims=True))
    loss_RxT = -np.take_along_axis(log_p_RxTxV, batch["y"][..., None], -1)[..., 0]
    np.testing.assert_allclose(full_batch[0], loss_RxT[batch["padding_mask"]].mean(), rtol=1e-6)


def test_padding_changes_nothing(state, train, full_batch):
    batch = make_rows(ragged_lengths())
    batch["y"] = np.where(batch["padding_mask"], batch["y"], 0)
    assert_close(run(train, state, split(batch, 4), 4), full_batch)


def test_a_batch_of_padding_has_zero_loss_and_updates_nothing(state, train):
    loss, grad_norm, params = run(train, state, split(make_rows(np.zeros(R)), 4), 4)
    assert loss == grad_norm == 0
    assert_close(params, jax.device_get(state.params))


@pytest.mark.parametrize(
    ("sizes", "S"),
    [
        pytest.param((8, 1, 1), 1, marks=pytest.mark.soak),
        pytest.param((8, 1, 1), 2, marks=pytest.mark.soak),
        pytest.param((1, 8, 1), 2, marks=pytest.mark.soak),
        ((2, 2, 2), 2),
        pytest.param((1, 2, 4), 2, marks=pytest.mark.soak),
    ],
)
def test_loss_and_gradients_do_not_depend_on_the_devices(state, full_batch, sizes, S):
    assert_close(run_on(make_full_mesh(*sizes), state, S), full_batch)


def run_on(mesh, state, S):
    """Call `run` on the ragged sequences, with state and batch sharded over `mesh`."""
    boxed = jax.eval_shape(lambda key: MODEL.init(key, jnp.zeros((1, T), jnp.int32), deterministic=True), KEY)
    shardings = compute_variable_shardings(boxed["params"], mesh)
    abstract = make_abstract_state(init_train_state, KEY, shardings, mesh).replace(apply_fn=state.apply_fn)
    sharded = jax.device_put(state, get_shardings(abstract))
    batch = jax.device_put(split(make_rows(ragged_lengths()), S), make_batch_sharding(mesh))
    with use_sharding_rules(mesh):
        return run(jax.jit(PretrainGPT.train_step, static_argnums=3), sharded, batch, S)


def with_remat(model, remat, chunk_positions=None):
    return model.clone(memory=MemoryConfig(remat=remat, loss_chunk_positions=chunk_positions))


@pytest.mark.parametrize(
    ("remat", "chunk_positions", "layer_loop"),
    [
        pytest.param("none", 4, "scan", marks=pytest.mark.soak),
        pytest.param("dots", None, "scan", marks=pytest.mark.soak),
        pytest.param("layers", None, "scan", marks=pytest.mark.soak),
        pytest.param("dots", None, "unroll", marks=pytest.mark.soak),
        ("layers", 4, "unroll"),
    ],
)
def test_loss_and_gradients_do_not_depend_on_rematerialisation(
    state, train, full_batch, remat, chunk_positions, layer_loop
):
    model = with_remat(MODEL, remat, chunk_positions)
    model = model.clone(config=model.config.model_copy(update={"layer_loop": layer_loop}))
    actual = run(train, state.replace(apply_fn=model.apply), split(make_rows(ragged_lengths()), 2), 2)
    assert_close(actual, full_batch)


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["dots", "layers"])
def test_rematerialised_layers_draw_the_same_dropout(state, train, remat):
    noisy = MODEL.clone(config=MODEL.config.model_copy(update={"dropout": 0.5}))
    batch = split(make_rows(ragged_lengths()), 2)
    kept, again = (
        run(train, state.replace(apply_fn=model.apply), batch, 2) for model in (noisy, with_remat(noisy, remat))
    )
    assert_close(again, kept)


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 8, 1)])
def test_a_rematerialised_step_does_not_depend_on_the_devices(state, full_batch, sizes):
    actual = run_on(make_full_mesh(*sizes), state.replace(apply_fn=with_remat(MODEL, "layers", 4).apply), 2)
    assert_close(actual, full_batch)


def test_the_step_counts_optimizer_steps_and_not_micro_batches(state, train):
    new, _, _ = train(state, split(make_rows(ragged_lengths()), 4), KEY, 4)
    assert int(new.step) == int(state.step) + 1


@pytest.mark.parametrize("S", [*(pytest.param(S, marks=pytest.mark.soak) for S in SPLITS[:-1]), SPLITS[-1]])
def test_validation_returns_sums_over_tokens(state, val, S):
    batch = make_rows(ragged_lengths())
    loss_sum, token_count, meta = val(state, split(batch, S))
    parts = [val(state, {name: jnp.asarray(leaf[r : r + 1])[None] for name, leaf in batch.items()}) for r in range(R)]
    assert float(token_count) == batch["padding_mask"].sum()
    np.testing.assert_allclose(loss_sum, sum(float(part[0]) for part in parts), rtol=1e-6)
    # The accuracy is a sum over the tokens too.
    (correct,) = meta["sums"].values()
    assert float(correct) == sum(float(part[2]["sums"]["accuracy"]) for part in parts)
    assert list(meta) == ["sums"]


@pytest.mark.soak
def test_dropout_is_drawn_from_the_key_and_validation_has_none(state, train, val):
    model = GPT(GPTConfig(layers=2, heads=4, width=32, dropout=0.5), VOCABULARY, T)
    noisy = state.replace(apply_fn=model.apply)
    batch = split(make_rows(np.full(R, T)), 2)
    losses = [float(train(noisy, batch, key, 2)[1]) for key in (KEY, KEY, jax.random.key(1))]
    assert losses[0] == losses[1] != losses[2]
    assert float(val(noisy, batch)[0]) == pytest.approx(float(val(state, batch)[0]), rel=1e-6)


class TableModel(nn.Module):
    """Logits looked up by token, the smallest model."""

    dtype: str

    @nn.compact
    def __call__(self, x_BxT, examples_B=None, targets=None, *, deterministic):
        table_VxV = self.param("table", nn.initializers.normal(0.02), (VOCABULARY, VOCABULARY), self.dtype)
        return table_VxV[x_BxT] if targets is None else cross_entropy_sum(table_VxV[x_BxT], *targets)[0]


def test_gradients_of_bfloat16_parameters_are_added_up_in_float32():
    seen = []
    tx = optax.GradientTransformation(lambda params: (), lambda grads, state, params: (seen.append(grads) or grads, ()))
    state = make_state(TableModel("bfloat16"), KEY, tx, jnp.zeros((1, T), jnp.int32), deterministic=True)
    batch = split(make_rows(np.full(R, T)), 8)
    new, loss, _ = PretrainGPT.train_step(state, batch, KEY, 8)
    assert {leaf.dtype for leaf in jax.tree.leaves(seen)} == {jnp.dtype("float32")}
    assert new.params["table"].dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32


def test_the_step_returns_the_meta_of_the_last_micro_batch():
    class WithMeta(PretrainGPT):
        @classmethod
        def forward(cls, apply_fn, params, batch, key):
            loss_sum, _ = super().forward(apply_fn, params, batch, key)
            return loss_sum, {"first_token": batch["x"][0, 0]}

    state = make_state(TableModel("float32"), KEY, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)
    batch = split(make_rows(np.full(R, T)), 4)
    _, _, meta = WithMeta.train_step(state, batch, KEY, 4)
    assert set(meta) == {"grad_norm", "first_token"}
    assert meta["first_token"] == batch["x"][-1, 0, 0]
    assert WithMeta.val_step(state, batch)[2]["first_token"] == batch["x"][-1, 0, 0]


class MaskingGPT(PretrainGPT):
    """A job that leaves odd targets out of the loss and returns the count of the others."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        mask = batch["padding_mask"] & (batch["y"] % 2 == 0)
        loss_sum, meta = super().forward(apply_fn, params, batch | {"padding_mask": mask}, key)
        return loss_sum, meta | {"token_count": jnp.sum(mask)}


@pytest.mark.soak
@pytest.mark.parametrize("S", [pytest.param(1, marks=pytest.mark.soak), 4])
def test_a_forward_can_mask_targets_and_return_the_token_count(state, train, val, S):
    """The result is the same as for a batch with that mask."""
    batch = make_rows(ragged_lengths())
    masked = batch | {"padding_mask": batch["padding_mask"] & (batch["y"] % 2 == 0)}
    expected = run(train, state, split(masked, S), S)
    own_train = jax.jit(MaskingGPT.train_step, static_argnums=3)
    assert_close(run(own_train, state, split(batch, S), S), expected)
    _, _, meta = own_train(state, split(batch, S), KEY, S)
    assert float(meta["token_count"]) == masked["padding_mask"].sum()
    assert_close(MaskingGPT.val_step(state, split(batch, S))[:2], val(state, split(masked, S))[:2])


def test_a_forward_without_tokens_has_zero_loss():
    state = make_state(TableModel("float32"), KEY, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)
    batch = make_rows(ragged_lengths())
    loss, grad_norm, _ = run(MaskingGPT.train_step, state, split(batch | {"y": batch["y"] * 0 + 1}, 2), 2)
    assert loss == grad_norm == 0


# Target weights.


def make_weighted_rows():
    """Return weights that sum to less than 1, and NaN for padding, which must be ignored."""
    batch = make_rows(ragged_lengths())
    weight_RxT = np.random.default_rng(5).uniform(0, 0.01, (R, T)).astype(np.float32)
    return batch | {"loss_weight": np.where(batch["padding_mask"], weight_RxT, np.nan)}


@pytest.mark.parametrize("S", [pytest.param(1, marks=pytest.mark.soak), 4])
@pytest.mark.parametrize("job", [BaseTrainer, PretrainGPT])
def test_weighted_loss_and_gradient_match_float64(job, S):
    batch = make_weighted_rows()
    state = make_state(TableModel("float32"), KEY, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)
    real = batch["padding_mask"]
    x, y, weight = (batch[name][real] for name in ("x", "y", "loss_weight"))
    weight = weight.astype(np.float64) / weight.sum(dtype=np.float64)
    logits = np.asarray(state.params["table"], np.float64)[x]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    gradient_VxV = np.zeros((VOCABULARY, VOCABULARY))
    np.add.at(gradient_VxV, x, weight[:, None] * (p - np.eye(VOCABULARY)[y]))
    expected = -np.sum(weight * np.log(p[np.arange(len(y)), y]))

    loss, grad_norm, params = run(jax.jit(job.train_step, static_argnums=3), state, split(batch, S), S)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    np.testing.assert_allclose(grad_norm, np.linalg.norm(gradient_VxV), rtol=1e-6)
    np.testing.assert_allclose(params["table"], state.params["table"] - gradient_VxV, atol=1e-6)
    loss_sum, count, _ = job.val_step(state, split(batch, S))
    np.testing.assert_allclose(loss_sum / count, expected, rtol=1e-6)
    np.testing.assert_allclose(count, batch["loss_weight"][real].sum(dtype=np.float64), rtol=1e-6)


def test_target_weights_apply_to_the_chunked_loss(state, val):
    model = GPT(MODEL.config, VOCABULARY, T, memory=MemoryConfig(loss_chunk_positions=4))
    batch = split(make_weighted_rows(), 2)
    assert_close(val(state.replace(apply_fn=model.apply), batch)[:2], val(state, batch)[:2])


def test_targets_with_zero_weights_have_zero_loss_and_update_nothing(train):
    state = make_state(TableModel("float32"), KEY, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)
    batch = make_rows(ragged_lengths()) | {"loss_weight": np.zeros((R, T), np.float32)}
    loss, grad_norm, _ = run(train, state, split(batch, 2), 2)
    assert loss == grad_norm == 0
