"""Packed documents have the same loss and gradients as one sequence per document.

The reference has one document per sequence and no segments, which is the program for unpacked data. Shape legend: S
accumulation steps, B examples, T sequence length.
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
from runner.config import MemoryConfig
from runner.parallel.mesh import make_batch_sharding, use_sharding_rules
from runner.train.state import compute_variable_shardings, get_shardings, make_abstract_state
from tests.experiments.model.attention_forms import blocked_attention, fused_attention, xla_attention
from tests.support.tiny_jobs import are_leaves_equal, make_full_mesh

VOCABULARY, T = 31, 128
LENGTHS = [[37, 1, 60, 22], [90, 20], [128], [5, 5, 5]]  # document lengths of each sequence; the rest is padding
NUM_DOCUMENTS = sum(map(len, LENGTHS))
FORMS = {"blocks": blocked_attention, "xla": xla_attention, "tpu": fused_attention}
GRADIENT_TX = optax.sgd(1.0)  # the change of the parameters in a step is the gradient


@functools.cache
def make_model(layer_loop="scan", **memory):
    config = GPTConfig(layers=2, heads=2, width=32, layer_loop=layer_loop)
    return GPT(config, VOCABULARY, T, memory=MemoryConfig(**memory))


def make_documents(lengths):
    """Make the tokens of each document of each sequence, one more than its inputs."""
    generator = np.random.default_rng(3)
    return [[generator.integers(0, VOCABULARY, length + 1) for length in row] for row in lengths]


def pack_documents(rows, padding_before=0.5):
    """Pack documents into a batch (B, T); `padding_before` is the share of the padding before the documents."""
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


def make_single_document_batch(rows):
    """Make a batch with one sequence per document, without segments and positions."""
    batch = pack_documents([[document] for documents in rows for document in documents], padding_before=0)
    missing = NUM_DOCUMENTS - len(batch["x"])  # sequences of padding, so that all cases share one program
    return {name: np.pad(batch[name], ((0, missing), (0, 0))) for name in ("x", "y", "padding_mask")}


@functools.cache
def initial_params():
    init = jax.jit(functools.partial(make_model().init, deterministic=True))
    return nn.unbox(init(jax.random.key(0), jnp.zeros((1, T), jnp.int32)))["params"]


@functools.cache
def compile_loss(model, form):
    """Compile the summed loss and gradients of a batch with one implementation of attention."""

    def loss(params, batch):
        batch = batch | {"example": jnp.arange(batch["x"].shape[0])}
        return PretrainGPT.forward(model.apply, params, batch, None)[0]

    compiled = jax.jit(jax.value_and_grad(loss))

    def compute(params, batch):
        # The kernels of the gradient are traced after those of the loss.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpt, "causal_attention", lambda *arrays, row_attention: FORMS[form](*arrays))
            patch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
            return compiled(params, batch)

    return compute


def compute_loss_and_gradients(batch, model=None, form="blocks"):
    return jax.device_get(compile_loss(model or make_model(), form)(initial_params(), batch))


def assert_close(actual, expected):
    """Check equality to 1e-6, relative to the loss and to each parameter's largest gradient (0 for the key bias)."""
    for got, want in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * max(np.abs(want).max(), 1e-2))


@pytest.fixture(scope="module")
def expected():
    return compute_loss_and_gradients(make_single_document_batch(make_documents(LENGTHS)))


@pytest.mark.parametrize("form", ["blocks", *(pytest.param(form, marks=pytest.mark.soak) for form in ("xla", "tpu"))])
def test_packed_documents_have_the_loss_and_gradients_of_single_ones(form, expected):
    assert_close(compute_loss_and_gradients(pack_documents(make_documents(LENGTHS)), form=form), expected)


@pytest.mark.parametrize(
    ("layer_loop", "remat", "chunk"),
    [
        ("unroll", "layers", 32),
        pytest.param("unroll", "none", None, marks=pytest.mark.soak),
        pytest.param("scan", "layers", 32, marks=pytest.mark.soak),
        pytest.param("scan", "dots", None, marks=pytest.mark.soak),
    ],
)
def test_packing_works_with_every_layer_loop_remat_and_chunk(layer_loop, remat, chunk, expected):
    model = make_model(layer_loop, remat=remat, loss_chunk_positions=chunk)
    assert_close(compute_loss_and_gradients(pack_documents(make_documents(LENGTHS)), model), expected)


def test_the_order_of_documents_and_sequences_does_not_matter(expected):
    reordered = [row[::-1] for row in make_documents(LENGTHS)[::-1]]
    assert_close(compute_loss_and_gradients(pack_documents(reordered)), expected)


def test_the_content_of_padding_does_not_change_any_bit():
    batch = pack_documents(make_documents(LENGTHS))
    changes = {"x": VOCABULARY - 1, "y": 7, "position": np.arange(T, dtype=np.int32)}
    other = {name: np.where(batch["padding_mask"], batch[name], value) for name, value in changes.items()}
    assert are_leaves_equal(compute_loss_and_gradients(batch), compute_loss_and_gradients(batch | other))


def test_sequences_of_only_padding_contribute_nothing():
    some = make_documents(LENGTHS)[:2]
    assert_close(
        compute_loss_and_gradients(pack_documents([*some, [], []])),
        compute_loss_and_gradients(make_single_document_batch(some)),
    )
    loss, gradients = compute_loss_and_gradients(pack_documents([[]] * 4))
    assert loss == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


# Train steps.


def make_state(params):
    return TrainState.create(apply_fn=make_model().apply, params=params, tx=GRADIENT_TX)


def take_step(rows, S, mesh):
    """Take a train step over (S, B, T); return the loss, the gradient norm and the new parameters."""
    batch = {name: jnp.asarray(leaf.reshape(S, -1, T)) for name, leaf in pack_documents(rows).items()}
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
def test_packed_documents_do_not_depend_on_micro_batches_and_devices(S, sizes):
    rows = make_documents(sorted(LENGTHS * 2))  # micro-batches with different numbers of tokens
    halves = [compute_loss_and_gradients(pack_documents(half)) for half in (rows[:4], rows[4:])]
    loss, gradients = jax.tree.map(lambda a, b: (a + b) / sum(map(sum, LENGTHS * 2)), *halves)
    params = jax.tree.map(np.subtract, jax.device_get(initial_params()), gradients)
    assert_close(take_step(rows, S, make_full_mesh(*sizes)), (loss, optax.tree.norm(gradients), params))
