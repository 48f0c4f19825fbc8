"""A row of several documents is no more than its documents: it has the loss and the gradients that they have alone.

Alone, each document has a row of its own and the model is told of no segments, which is the program of rows that are
one document. Shape legend: S accumulation steps, B examples, T sequence length.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.experimental import pallas as pl

from experiments import gpt
from experiments.gpt import GPT, GPTConfig, PretrainGPT
from experiments.model.attention import blocked_attention, fused_attention, xla_attention
from runner.config import MemoryConfig
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.train.state import compute_variable_shardings, get_shardings, make_abstract_state
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh

VOCABULARY, T = 31, 128
LENGTHS = [[37, 1, 60, 22], [90, 20], [128], [5, 5, 5]]  # of the documents of each row; the rest is padding
NUM_DOCUMENTS = sum(map(len, LENGTHS))
FORMS = {"blocks": blocked_attention, "xla": xla_attention, "tpu": fused_attention}
TX = optax.sgd(1.0)  # so that the parameters that a step takes away are its gradient


@functools.cache
def make_model(layer_loop="scan", **memory):
    config = GPTConfig(layers=2, heads=2, width=32, layer_loop=layer_loop)
    return GPT(config, VOCABULARY, T, memory=MemoryConfig(**memory))


def documents(lengths):
    """Tokens of each document of each row, one more than its inputs."""
    generator = np.random.default_rng(3)
    return [[generator.integers(0, VOCABULARY, length + 1) for length in row] for row in lengths]


def pack(rows, padding_before=0.5):
    """A batch (B, T) whose rows hold these documents one after the other, with a share of the padding before them."""
    names = ("x", "y", "segment", "position", "padding_mask")
    batch = {name: np.zeros((len(rows), T), np.int32) for name in names}
    for row, documents in enumerate(rows):
        start = int(padding_before * (T - sum(len(tokens) - 1 for tokens in documents)))
        for number, tokens in enumerate(documents, 1):
            place = (row, slice(start, start + len(tokens) - 1))
            batch["x"][place], batch["y"][place] = tokens[:-1], tokens[1:]
            batch["segment"][place], batch["position"][place] = number, np.arange(len(tokens) - 1)
            batch["padding_mask"][place] = 1
            start = place[1].stop
    return batch | {"padding_mask": batch["padding_mask"].astype(bool)}


def alone(rows):
    """A batch with a row for each document, as from data without documents: no segments, no positions."""
    batch = pack([[document] for documents in rows for document in documents], padding_before=0)
    missing = NUM_DOCUMENTS - len(batch["x"])  # rows of padding, so that one program serves all
    return {name: np.pad(batch[name], ((0, missing), (0, 0))) for name in ("x", "y", "padding_mask")}


@functools.cache
def initial_params():
    init = jax.jit(functools.partial(make_model().init, deterministic=True))
    return nn.unbox(init(jax.random.key(0), jnp.zeros((1, T), jnp.int32)))["params"]


@functools.cache
def compiled(model, form):
    """The summed loss of a batch by `model`, and its gradients, with this form of attention."""

    def loss(params, batch):
        batch = batch | {"example": jnp.arange(batch["x"].shape[0])}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpt, "causal_attention", lambda *arrays, row_attention: FORMS[form](*arrays))
            patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
            return PretrainGPT.forward(model.apply, params, batch, None)[0]

    return jax.jit(jax.value_and_grad(loss))


def loss_and_gradients(batch, model=None, form="blocks"):
    return jax.device_get(compiled(model or make_model(), form)(initial_params(), batch))


def assert_same(actual, expected):
    """Equal to a millionth: of the loss, and of each parameter's largest gradient. (That of a key's bias is 0.)"""
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(np.abs(want).max(), 1e-2))


@pytest.fixture(scope="module")
def expected():
    return loss_and_gradients(alone(documents(LENGTHS)))


@pytest.mark.parametrize("form", ["blocks", "xla", pytest.param("tpu", marks=pytest.mark.soak)])
def test_documents_in_one_row_have_the_loss_and_gradients_that_they_have_alone(form, expected):
    assert_same(loss_and_gradients(pack(documents(LENGTHS)), form=form), expected)


@pytest.mark.parametrize(
    ("layer_loop", "remat", "chunk"),
    [
        ("unroll", "layers", 32),
        pytest.param("unroll", "none", None, marks=pytest.mark.soak),
        pytest.param("scan", "layers", 32, marks=pytest.mark.soak),
        pytest.param("scan", "dots", None, marks=pytest.mark.soak),
    ],
)
def test_however_layers_are_compiled_they_are_told_of_the_documents(layer_loop, remat, chunk, expected):
    model = make_model(layer_loop, remat=remat, loss_chunk_positions=chunk)
    assert_same(loss_and_gradients(pack(documents(LENGTHS)), model), expected)


def test_the_order_of_documents_in_a_row_and_of_the_rows_changes_nothing(expected):
    reordered = [row[::-1] for row in documents(LENGTHS)[::-1]]
    assert_same(loss_and_gradients(pack(reordered)), expected)


def test_what_padding_holds_changes_no_bit():
    batch = pack(documents(LENGTHS))
    changes = {"x": VOCABULARY - 1, "y": 7, "position": np.arange(T, dtype=np.int32)}
    other = {name: np.where(batch["padding_mask"], batch[name], value) for name, value in changes.items()}
    assert are_leaves_equal(loss_and_gradients(batch), loss_and_gradients(batch | other))


def test_rows_of_nothing_but_padding_add_nothing():
    some = documents(LENGTHS)[:2]
    assert_same(loss_and_gradients(pack([*some, [], []])), loss_and_gradients(alone(some)))
    loss, gradients = loss_and_gradients(pack([[]] * 4))
    assert loss == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


# Train steps.


def make_state(params):
    return TrainState.create(apply_fn=make_model().apply, params=params, tx=TX)


def step(rows, S, mesh):
    """Loss, gradient norm and new parameters of a train step over (S, B, T)."""
    batch = {name: jnp.asarray(leaf.reshape(S, -1, T)) for name, leaf in pack(rows).items()}
    state, key = make_state(initial_params()), jax.random.key(0)
    init = functools.partial(make_model().init, deterministic=True)
    boxed = jax.eval_shape(init, key, jnp.zeros((1, T), jnp.int32))
    abstract = make_abstract_state(make_state, state.params, compute_variable_shardings(boxed["params"], mesh), mesh)
    state, batch = jax.device_put((state, batch), (get_shardings(abstract), make_batch_sharding(mesh)))
    with use_sharding_rules(mesh):
        new, loss, meta = jax.jit(PretrainGPT.train_step, static_argnums=3)(state, batch, key, S)
    return jax.device_get((loss, meta["grad_norm"], new.params))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("S", "sizes"),
    [
        (2, (2, 2, 2)),
        *(
            pytest.param(*split, marks=pytest.mark.soak)
            for split in [(1, (8, 1, 1)), (1, (1, 8, 1)), (4, (1, 2, 4)), (8, (1, 1, 8))]
        ),
    ],
)
def test_documents_are_the_same_in_any_split_over_micro_batches_and_devices(S, sizes):
    rows = documents(sorted(LENGTHS * 2))  # micro-batches of other numbers of tokens
    halves = [loss_and_gradients(pack(half)) for half in (rows[:4], rows[4:])]
    loss, gradients = jax.tree.map(lambda a, b: (a + b) / sum(map(sum, LENGTHS * 2)), *halves)
    params = jax.tree.map(np.subtract, jax.device_get(initial_params()), gradients)
    assert_same(step(rows, S, make_full_mesh(*sizes)), (loss, optax.tree.norm(gradients), params))
