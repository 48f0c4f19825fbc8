"""GPT-2: parameters, axis names, layer loops, precision, sharding and memory.

Shape legend: B batch, T sequence, V vocabulary.
"""

import functools
import json
import math
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from pydantic import ValidationError

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner.config import MemoryConfig

VOCABULARY, SEQUENCE = 61, 24
TOKENS_BxT = np.random.default_rng(7).integers(0, VOCABULARY, (3, SEQUENCE), dtype=np.int32)
KNOWN_NAMES = {"vocab", "embed", "positions", "heads", "mlp", "layers"}


def make_model(*, layers=3, param_dtype=jnp.float32, compute_dtype=jnp.float32, **config):
    config = GPTConfig(layers=layers, heads=2, width=32, **config)
    return GPT(config, VOCABULARY, SEQUENCE, param_dtype, compute_dtype)


def init(model):
    return jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), TOKENS_BxT)


@functools.cache
def make_logits_function():
    """Return a function from tokens to logits in one program; without jit, each op would be compiled separately."""
    model = make_model()
    params, apply = init(model), jax.jit(functools.partial(model.apply, deterministic=True))
    return lambda tokens_BxT: np.asarray(apply(params, tokens_BxT))


def test_gpt2_small_has_its_published_number_of_parameters():
    model = GPT(GPTConfig(layers=12, heads=12, width=768), vocabulary_size=50257, sequence_length=1024)
    shapes = jax.eval_shape(lambda: init(model))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == 124_439_808


def test_every_parameter_axis_has_a_logical_name():
    boxed = jax.eval_shape(lambda: init(make_model()))
    boxes = jax.tree.leaves(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    assert boxes
    for box in boxes:
        assert len(box.names) == box.value.ndim
        assert set(box.names) <= KNOWN_NAMES


def test_axis_names_distinguish_matrices_from_vectors():
    boxed = jax.eval_shape(lambda: init(make_model()))["params"]
    is_box = lambda leaf: isinstance(leaf, nn.LogicallyPartitioned)  # noqa: E731
    for path, box in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
        is_matrix = len(set(box.names) - {"layers"}) == 2
        assert is_matrix == (path[-1].key in ("kernel", "embedding", "positions"))


def test_initial_weights_follow_gpt2():
    model = GPT(GPTConfig(layers=8, heads=2, width=64), 512, SEQUENCE)
    params = jax.device_get(nn.unbox(init(model))["params"])
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "bias" in name:
            assert (leaf == 0).all(), name
        elif "scale" in name:
            assert (leaf == 1).all(), name
        else:
            stddev = 0.02 / math.sqrt(2 * 8) if "_out" in name else 0.02
            np.testing.assert_allclose(leaf.std(), stddev, rtol=0.05, err_msg=name)
    kernel = params["blocks"]["mlp_in"]["kernel"]
    assert (kernel[0] != kernel[1]).any()


@pytest.mark.soak
def test_both_layer_loops_have_the_same_weights_and_logits():
    scanned, unrolled = make_model(layer_loop="scan"), make_model(layer_loop="unroll")
    params = init(scanned)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, params, init(unrolled)))
    logits = [model.apply(params, TOKENS_BxT, deterministic=True) for model in (scanned, unrolled)]
    np.testing.assert_allclose(*logits, atol=1e-6)


@pytest.mark.soak
def test_the_program_of_scanned_layers_does_not_grow_with_depth():
    def count_program_lines(layers, layer_loop):
        model = make_model(layers=layers, layer_loop=layer_loop)
        params = nn.unbox(jax.eval_shape(lambda: init(model)))
        grad = jax.grad(lambda params: model.apply(params, TOKENS_BxT, deterministic=True).sum())
        return len(jax.jit(grad).lower(params).compile().as_text().splitlines())

    assert count_program_lines(8, "scan") == pytest.approx(count_program_lines(2, "scan"), rel=0.02)
    assert count_program_lines(8, "unroll") > 2 * count_program_lines(2, "unroll")


def test_future_tokens_do_not_change_past_logits():
    changed_BxT = TOKENS_BxT.copy()
    changed_BxT[:, 10:] = (TOKENS_BxT[:, 10:] + 1) % VOCABULARY
    before, after = map(make_logits_function(), (TOKENS_BxT, changed_BxT))
    assert (before[:, :10] == after[:, :10]).all()
    assert (before[:, 10:] != after[:, 10:]).any(axis=-1).all()


def test_a_prefix_has_the_first_logits_of_the_whole_sequence():
    whole, part = map(make_logits_function(), (TOKENS_BxT, TOKENS_BxT[:, :9]))
    np.testing.assert_allclose(part, whole[:, :9], atol=1e-6)


@pytest.mark.soak
@pytest.mark.parametrize("layer_loop", ["scan", "unroll"])
def test_dropout_follows_its_key_and_is_off_when_deterministic(layer_loop):
    model = make_model(dropout=0.3, layer_loop=layer_loop)
    params = init(model)

    def logits(seed, deterministic=False):
        return model.apply(params, TOKENS_BxT, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)})

    assert (logits(0) == logits(0)).all()
    assert (logits(0) != logits(1)).any()
    assert (logits(0, deterministic=True) == logits(1, deterministic=True)).all()
    assert (logits(0, deterministic=True) == make_model().apply(params, TOKENS_BxT, deterministic=True)).all()


@pytest.mark.soak
def test_bfloat16_compute_keeps_float32_params_and_stays_close():
    full, half = make_model(), make_model(compute_dtype=jnp.bfloat16)
    params = init(half)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    gradient = jax.grad(lambda params: half.apply(params, TOKENS_BxT, deterministic=True).astype(jnp.float32).sum())
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient(params))} == {jnp.dtype("float32")}
    logits = half.apply(params, TOKENS_BxT, deterministic=True)
    assert logits.dtype == jnp.bfloat16
    expected = full.apply(params, TOKENS_BxT, deterministic=True)
    np.testing.assert_allclose(logits.astype(jnp.float32), expected, atol=0.02)


def test_heads_that_do_not_divide_the_width_are_rejected():
    with pytest.raises(ValidationError, match="width=32 does not divide over heads=5; use a multiple of 5"):
        GPTConfig(layers=1, heads=5, width=32)


@pytest.mark.soak
@pytest.mark.parametrize("layer_loop", ["scan", pytest.param("unroll", marks=pytest.mark.soak)])
def test_a_sharded_gpt_equals_one_device_and_gathers_only_weights(layer_loop):
    command = [sys.executable, "-m", "tests.experiments.sharded_gpt", layer_loop]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "Involuntary full rematerialization" not in done.stderr
    for result in json.loads(done.stdout):
        assert result["difference"] < 1e-5, result
        assert result["gathered_activations"] == [], result
        assert (result["gathers"] > 0) == (result["mesh"][1] > 1), result


@pytest.mark.soak
@pytest.mark.parametrize("splits", [(4,), pytest.param((2, 8), marks=pytest.mark.soak)], ids=str)
def test_dropout_does_not_depend_on_the_split_into_micro_batches(splits):
    model = make_model(dropout=0.3)
    params = nn.unbox(init(model))
    tokens_BxT = jax.random.randint(jax.random.key(3), (8, TOKENS_BxT.shape[1]), 0, model.vocabulary_size)
    state = TrainState.create(apply_fn=model.apply, params=params["params"], tx=optax.sgd(0.1))

    def loss(accumulate_steps):
        split = tokens_BxT.reshape(accumulate_steps, 8 // accumulate_steps, -1)
        batch = {"x": split, "y": split, "padding_mask": jnp.ones(split.shape, bool)}
        return PretrainGPT.train_step(state, batch, jax.random.key(7), accumulate_steps)[1]

    whole = loss(1)
    for accumulate_steps in splits:
        np.testing.assert_allclose(loss(accumulate_steps), whole, rtol=1e-6)


# Memory.


def compile_gradient(config, vocabulary_size, shape, **memory):
    """Compile the gradient of the summed loss of a GPT over a batch of `shape` (B, T)."""
    model = GPT(GPTConfig(**config), vocabulary_size, shape[1], memory=MemoryConfig(**memory))
    tokens_BxT = jax.ShapeDtypeStruct(shape, jnp.int32)
    boxed = jax.eval_shape(functools.partial(model.init, deterministic=True), jax.random.key(0), tokens_BxT)

    def loss(params, tokens_BxT):
        return model.apply(params, tokens_BxT, None, (tokens_BxT, jnp.ones(shape)), deterministic=True)

    return jax.jit(jax.value_and_grad(loss)).lower(nn.unbox(boxed), tokens_BxT).compile()


def read_temporary_bytes(compiled):
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.soak
def test_activation_checkpointing_saves_memory():
    config = {"layers": 6, "heads": 2, "width": 32}
    everything, dots, layers = (
        read_temporary_bytes(compile_gradient(config, 32, (4, 128), remat=remat))
        for remat in ("none", "dots", "layers")
    )
    assert dots < 0.9 * everything
    assert layers < 0.75 * dots


@pytest.mark.soak
def test_unrolled_layers_are_recomputed():
    """Check that recomputation is not merged with the forward pass; the CPU compiler may still schedule it early."""
    config = {"layers": 3, "heads": 2, "width": 32, "layer_loop": "unroll"}
    kept, again = (compile_gradient(config, 32, (2, 64), remat=remat).as_text() for remat in ("none", "layers"))
    assert again.count(" tanh(") >= 2 * kept.count(" tanh(") > 0


@pytest.mark.soak
@pytest.mark.parametrize("remat", ["none", "layers"])
def test_a_chunked_loss_never_holds_all_logits(remat):
    (B, T), V = (2, 96), 1021

    def find_largest_logits(compiled):
        shapes = [tuple(map(int, shape.split(","))) for shape in re.findall(r"\w\[([\d,]+)\]", compiled.as_text())]
        return max(math.prod(shape) for shape in shapes if V in shape)

    config = {"layers": 1, "heads": 2, "width": 8}
    whole, chunked = (
        compile_gradient(config, V, (B, T), remat=remat, loss_chunk_positions=chunk) for chunk in (None, 16)
    )
    assert find_largest_logits(whole) == B * T * V
    assert find_largest_logits(chunked) == B * 16 * V
    assert read_temporary_bytes(chunked) < 0.5 * read_temporary_bytes(whole)
