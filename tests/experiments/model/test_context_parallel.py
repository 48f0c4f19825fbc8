"""Context parallelism: attention, whole models and their programs, compared with one device.

Shape legend: S accumulation steps, B examples, T sequence length, N heads of queries, K heads of keys, H width of a
head of queries and keys, W width of a head of values, V vocabulary.
"""

import functools
import itertools
import re
from dataclasses import replace

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from experiments.model import context_layout
from experiments.model.attention import cached_attention, causal_attention
from experiments.model.config import DecoderConfig
from experiments.model.context_layout import (
    AttentionInputs,
    AttentionOptions,
    AttentionShape,
    SequenceLayout,
    choose_context_method,
    compute_visits,
    find_peak_rates,
    make_sequence_layout,
    max_steps,
    predict_attention_seconds,
)
from experiments.model.context_splash import SequenceMask
from experiments.model.decoder import Decoder, PretrainDecoder
from runner.accelerator import CHIPS
from runner.config import MemoryConfig, TrainerConfig
from runner.parallel.mesh import make_batch_sharding, make_mesh, use_sharding_rules
from runner.plan.forecast.collectives import find_collectives
from runner.plan.forecast.hlo import ARRAY_PATTERN
from runner.train.state import compute_variable_shardings, get_shardings, make_abstract_state
from tests.experiments.model.attention_forms import blocked_attention
from tests.experiments.model.test_attention import Case, compute_value_and_gradients
from tests.experiments.model.test_decoder import ALL_FEATURES, LATENT
from tests.experiments.test_documents import LENGTHS, T, make_documents, pack_documents
from tests.support.bigram import BIGRAM_OPTIONS, read_trajectory, write_questions
from tests.support.libtpu import run_module
from tests.support.tiny_jobs import make_gpt

SOAK = pytest.mark.soak
WAYS = ("ring", "gather")
ALL = {"N": 4, "K": 2, "W": 6, "segments": True, "softcap": 2.0, "scale": 0.3, "sinks": True}
# By name: T in half shards, and other options. Half shards of 10 are split into blocks of 5, of 11 into 4 and 3.
CASES = {
    "plain": (10, {}),
    "grouped": (10, {"N": 6, "K": 2}),
    "narrow window": (10, {"window": 7}),
    "itself": (4, {"window": 1}),
    "wide window": (10, {"window": 25}),
    "softcap": (10, {"softcap": 2.0}),
    "segments": (10, {"segments": True}),
    "narrow values": (10, {"W": 4}),
    "odd": (11, {}),
    "sinks": (10, {"sinks": True, "window": 7}),
    "odd window": (11, {"window": 12, "segments": True}),
    "all": (11, ALL),
}


def make_mesh_over(**sizes):
    """Return a mesh over as many devices as the product of the sizes."""
    return make_mesh(sizes, jax.devices()[: int(np.prod([*sizes.values()]))])


@functools.cache
def expected(case):
    """Return output and gradients on one device."""
    arrays = [*map(jnp.asarray, case.make_arrays()), *map(jnp.asarray, case.make_segments())]
    run = jax.jit(functools.partial(compute_value_and_gradients, blocked_attention, **case.options))
    return jax.device_get(run(*arrays, **case.make_sinks()))


def check_case(case, way, mesh):
    attend = functools.partial(causal_attention, row_attention=way)
    arrays = [*map(jnp.asarray, case.make_arrays()), *map(jnp.asarray, case.make_segments())]
    with use_sharding_rules(mesh):
        run = jax.jit(functools.partial(compute_value_and_gradients, attend, **case.options))
        actual = run(*arrays, **case.make_sinks())
    for got, want in zip(actual, expected(case), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


ATTENTION = [
    ("all", "ring", {"sequence": 4}),
    *(
        pytest.param(name, way, sizes, marks=SOAK)
        for name, way, sizes in itertools.product(
            CASES,
            WAYS,
            [{"sequence": 2}, {"sequence": 4}, {"sequence": 8}, {"sequence": 2, "tensor": 2, "fsdp": 2}],
        )
    ),
]


@pytest.fixture
def short_blocks(monkeypatch):
    """Split a half shard into several blocks, the last of them padded."""
    monkeypatch.setattr(context_layout, "MAX_BLOCK_TOKENS", 5)


@pytest.mark.parametrize(("name", "way", "sizes"), ATTENTION, ids=str)
def test_sharded_attention_equals_attention_on_one_device(name, way, sizes, short_blocks):
    half, options = CASES[name]
    check_case(Case(T=2 * sizes["sequence"] * half, B=2, **options), way, make_mesh_over(**sizes))


KERNEL_CASES = [
    (2, Case(T=512, N=2, K=1, H=64, W=32, B=1, segments=True, softcap=2.0)),
    (4, Case(T=1024, N=1, K=1, H=64, W=64, B=1, window=140)),
    (4, Case(T=1024, N=2, K=2, H=64, W=64, B=1, window=600, segments=True)),
    (4, Case(T=1024, N=2, K=1, H=64, W=64, B=1, window=100, segments=True, scale=0.2)),
    (2, Case(T=512, N=4, K=2, H=64, W=64, B=1, sinks=True)),
]


@pytest.fixture
def interpreted(monkeypatch, interpreted):
    """Choose the program for TPUs, with interpreted kernels."""
    monkeypatch.setattr(context_layout, "platform", lambda: "tpu")


@pytest.mark.soak
@pytest.mark.parametrize(("devices", "case"), KERNEL_CASES)
def test_the_splash_kernel_on_gathered_keys_equals_one_device(devices, case, interpreted):
    check_case(
        case,
        "gather",
        make_mesh_over(sequence=devices, fsdp=8 // devices) if case.B > 1 else make_mesh_over(sequence=devices),
    )
    with use_sharding_rules(make_mesh_over(sequence=devices)):
        q, k, v, _ = map(jnp.asarray, case.make_arrays())
        assert make_sequence_layout(AttentionInputs(q, k, v), AttentionOptions(), "auto").has_kernel


@pytest.mark.parametrize(("queries", "keys"), [(range(8, 12), slice(0, 4)), (range(8, 12), slice(8, 12))])
def test_the_mask_of_a_block_agrees_with_its_elements(queries, keys):
    for window in (None, *range(1, 14)):
        mask = SequenceMask(np.array([*queries]), 12, window)
        element = mask.mask_function(np.array([*queries])[:, None], np.arange(keys.start, keys.stop))
        block = mask[slice(0, 4), keys]
        assert (block.any(), block.all()) == (element.any(), element.all())


# Balance of work.


def make_block_pairs(devices, half, way, block=1, window=None):
    return SequenceLayout(
        2 * devices * half, devices, "sequence", None, way, AttentionOptions(window), 1.0, block, False
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("devices", [2, 3, 4, 8])
@pytest.mark.parametrize("window", [None, 3, 40])
def test_every_query_visits_every_visible_key_once_with_balanced_work(devices, way, window):
    half = 6
    rows = make_block_pairs(devices, half, way, window=window)
    met = np.zeros((rows.length, rows.length), int)
    for number in range(rows.num_rounds):
        work = []
        for place in range(devices):
            visits = compute_visits(rows, place, number)
            keys = (visits.key_positions[0][:, None] + np.arange(half)).reshape(-1)
            for pair, one in np.ndindex(visits.count.shape):
                first, count = visits.first[pair, one], visits.count[pair, one]
                met[visits.query_positions[pair, one], keys[first : first + count]] += 1
            work.append(visits.count.sum(axis=1).max())
        steps = max_steps(rows, range(number, number + 1))
        assert steps == max(work)
        assert window is not None or set(work) == {steps}
    distance = np.arange(rows.length)[:, None] - np.arange(rows.length)
    assert (met == (distance >= 0) & (distance < (window or rows.length))).all()
    halves = 2 * devices * half + 1 if way == "gather" else 2 * half
    assert window is not None or steps == halves


@pytest.mark.parametrize(("window", "preceding"), [(1, 0), (2, 1), (13, 1), (14, 2), (40, 4), (49, 7), (96, 7)])
def test_a_window_needs_only_the_devices_that_it_reaches(window, preceding):
    assert make_block_pairs(8, 6, "ring", window=window).num_preceding == preceding


# Choice of the method.

LONG = AttentionShape(
    shards=8, batch=1, length=131_072, heads=32, key_heads=8, key_width=128, value_width=128, has_kernel=True
)


@pytest.mark.parametrize(
    ("kind", "changes", "way"),
    [
        ("TPU v5p", {}, "gather"),  # the ring has no such kernel
        ("TPU v5 lite", {"length": 2**21}, "ring"),  # gathered keys would not fit
        ("NVIDIA H100", {"has_kernel": False}, "ring"),  # the ring overlaps the transfer of keys with compute
        ("NVIDIA H100", {"has_kernel": False, "length": 2**12, "shards": 64}, "gather"),  # too short to hide a transfer
        ("cpu", {"has_kernel": False}, "ring"),
    ],
)
def test_auto_takes_the_faster_method(kind, changes, way):
    shape = replace(LONG, **changes)
    assert choose_context_method(shape, *find_peak_rates(kind, shape.shards)) == way


def test_predicted_seconds_follow_the_formula():
    shape = AttentionShape(shards=2, batch=3, length=64, heads=4, key_heads=2, key_width=16, value_width=8, itemsize=4)
    speeds = CHIPS["v5e"].speeds
    scores, chunk = 3 * 4 * 64 * 32 / 2, 3 * 32 * 2 * 24 * 4
    tile, move = 8 * scores / 819e9, chunk / 1e6
    forward, backward = (2 * scores * width / 197e12 for width in (24, 64))
    found = predict_attention_seconds(shape, speeds, 1e6)
    assert found["gather"] == pytest.approx(forward + backward + 6 * tile + 3 * move)
    assert found["ring"] == pytest.approx(2 * move + 2 * 2 * move + 3 * move)
    slow = predict_attention_seconds(shape, speeds, 1e15)
    assert slow["ring"] == pytest.approx(forward + backward + 6 * tile, rel=1e-3)
    assert find_peak_rates("NVIDIA H100", 8)[1] > find_peak_rates("NVIDIA H100", 16)[1]
    assert find_peak_rates("TPU7x", 16)[0].flops_per_second == CHIPS["tpu7x"].speeds.flops_per_second / 2


# Indivisible sequences, and caches.


@pytest.mark.parametrize("length", [1, 7, 12])
def test_sequences_that_do_not_divide_are_attended_to_whole(length):
    check_case(Case(T=length, B=1, N=2, K=2), "ring", make_mesh_over(sequence=4))


def test_cached_attention_under_context_parallelism():
    q, k, v, _ = map(jnp.asarray, Case(T=24, K=2).make_arrays())
    want = blocked_attention(q, k, v)
    with use_sharding_rules(make_mesh_over(sequence=4)):
        attend = jax.jit(cached_attention)
        for part in (slice(0, 8), slice(8, 9), slice(9, 24)):
            np.testing.assert_allclose(attend(q[:, part], k, v, part.start), want[:, part], atol=1e-5)


# Whole models.

VOCABULARY = 31
DECODER = ALL_FEATURES | {"layers": 2, "heads": 8, "window": 40}
MODELS = {
    "gpt": (GPT, GPTConfig(layers=2, heads=4, width=48, dropout=0.3), PretrainGPT),
    "decoder": (Decoder, DecoderConfig(**DECODER), PretrainDecoder),
    "narrow window": (Decoder, DecoderConfig(**DECODER | {"window": 5}), PretrainDecoder),
    "latent": (Decoder, DecoderConfig(**LATENT), PretrainDecoder),
    "one document a row": (Decoder, DecoderConfig(**DECODER), PretrainDecoder),
}
SIZES = [
    {"sequence": 8},
    {"sequence": 2, "tensor": 2, "fsdp": 2},
    {"data": 2, "sequence": 4},
    {"sequence": 4, "tensor": 2},
]
GRADIENTS = optax.trace(decay=0.0)  # its state is the gradients of the last step


def make_model(name, **memory):
    model, config, _ = MODELS[name]
    lengths = (T,) if model is GPT else ()
    return model(config, VOCABULARY, *lengths, memory=MemoryConfig(**memory))


def make_batch(name, S):
    """Return (S, B, T): packed documents, or sequences without segments and positions."""
    fields = pack_documents(make_documents(sorted(LENGTHS)))
    if name == "one document a row":
        fields = {name: fields[name] for name in ("x", "y", "padding_mask")}
    return {name: jnp.asarray(leaf.reshape(S, -1, T)) for name, leaf in fields.items()}


def make_config(model):
    """Return the parts of a config that a step reads, with defaults for the rest."""
    data, train = {"source": "none", "sequence_length": T}, {"total_steps": 1, "global_batch_examples": len(LENGTHS)}
    return TrainerConfig[type(model.config)](model=model.config, data=data, train=train, schedule={"name": "constant"})


def compile_step(name, model, mesh, S):
    """Return a compiled train step over (S, B, T), and its arguments."""
    job = type("Job", (MODELS[name][2],), {"config": make_config(model)})
    boxed = jax.eval_shape(functools.partial(model.init, deterministic=True), jax.random.key(0), jnp.zeros((1, T), int))
    init = jax.jit(lambda key: nn.unbox(model.init(key, jnp.zeros((1, T), int), deterministic=True))["params"])
    params = init(jax.random.key(0))

    def make_state(params):
        return TrainState.create(apply_fn=model.apply, params=params, tx=GRADIENTS)

    state = make_state(params)
    abstract = make_abstract_state(make_state, state.params, compute_variable_shardings(boxed["params"], mesh), mesh)
    arguments = jax.device_put((state, make_batch(name, S)), (get_shardings(abstract), make_batch_sharding(mesh)))
    arguments = (*arguments, jax.random.key(1))
    with use_sharding_rules(mesh):
        return jax.jit(job.train_step, static_argnums=3).lower(*arguments, S).compile(), arguments


@functools.cache
def take_step_on_one_device(name):
    compiled, arguments = compile_step(name, make_model(name), make_mesh_over(data=1), 1)
    new, loss, _ = compiled(*arguments)
    return jax.device_get((loss, new.opt_state.trace))


STEPS = [
    pytest.param(name, sizes, way, S, marks=SOAK)
    for name, (number, sizes), way in itertools.product(MODELS, enumerate(SIZES), WAYS)
    for S in ((1, 2) if number == 1 else (1,))
]


def check_program(text, model, mesh):
    """Check that no device holds T x T scores or all logits, and that attention communicates over its own axis only."""
    shapes = {tuple(map(int, found[2].split(","))) for found in ARRAY_PATTERN.finditer(text) if found[2]}
    assert not [shape for shape in shapes if shape.count(T) > 1 or np.prod(shape) >= T * T * model.config.heads]
    assert not [shape for shape in shapes if VOCABULARY in shape and np.prod(shape) >= len(LENGTHS) * T * VOCABULARY]
    sizes = {axis: int(size) for axis, size in mesh.shape.items()}
    found = [one for one in find_collectives(text, sizes) if re.search("blocks/.*shard_map/", one.op_name)]
    assert {one.axes for one in found} == {("sequence",)}
    assert {one.kind for one in found} <= {"all-gather", "collective-permute", "reduce-scatter", "all-reduce"}


@pytest.mark.parametrize(("name", "sizes", "way", "S"), STEPS, ids=str)
def test_a_sharded_step_has_the_loss_and_gradients_of_one_device(name, sizes, way, S):
    model = make_model(name, row_attention=way, loss_chunk_positions=4)
    compiled, arguments = compile_step(name, model, make_mesh_over(**sizes), S)
    check_program(compiled.as_text(), model, make_mesh_over(**sizes))
    new, loss, _ = jax.device_get(compiled(*arguments))
    want_loss, want = take_step_on_one_device(name)
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for got, gradient in zip(jax.tree.leaves(new.opt_state.trace), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, gradient, rtol=0, atol=1e-4 * max(np.abs(gradient).max(), 1e-3))


@pytest.mark.soak
@pytest.mark.parametrize("way", WAYS)
def test_evaluation_under_context_parallelism_equals_one_device(way, tmp_path):
    questions = write_questions(tmp_path / "questions.jsonl")
    changes = BIGRAM_OPTIONS | {
        "config.model": {"layers": 1, "heads": 2, "width": 16},
        "config.train.micro_batch_examples": "auto",
        "config.train.total_steps": 3,
        "config.eval.at_end": True,
        "config.eval.multiple_choice": [{"name": "squares", "path": str(questions)}],
        "config.eval.samples": {"prompts": ["1 squared is 1.", "2"], "tokens": 20},
        "config.memory.row_attention": way,
    }
    rows = []
    for name, mesh in {"one": {"data": 8}, "cut": {"data": 2, "sequence": 4}}.items():
        make_gpt(tmp_path / name, **changes, **{"topology.mesh": mesh})()
        rows.append(read_trajectory(tmp_path / name)[-1])
    own = [key for key in rows[0] if key.startswith(("val/", "train/"))]
    assert {"val/squares/acc", "val/sample/0", "val/loss"} <= {*own}
    for key in own:
        want = rows[0][key]
        assert rows[1][key] == (want if isinstance(want, str) else pytest.approx(want, rel=1e-4)), key


# Programs compiled for TPUs.


def compile_for_tpu(*overrides, examples):
    sizes = ["layers=3", "heads=4", "key_value_heads=2", "head_dim=64", *overrides]
    others = ["topology.mesh.sequence=4", "config.data.sequence_length=4096"]
    others += [f"config.train.global_batch_examples={examples}"]
    others += ["config.memory.loss_chunk_positions=128", "config.precision.compute=bfloat16"]
    words = "specs/llama_nano.yaml", "v5e-4", *others, *(f"config.model.{key}" for key in sizes)
    return run_module("tests.experiments.model.context_program", *words)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("overrides", "examples", "gathered"),
    [
        ((), 1, {"all-gather": 4, "reduce-scatter": 2, "collective-permute": 10}),
        ((), 2, {"all-gather": 4, "reduce-scatter": 2, "collective-permute": 10}),
        (("layer_pattern=[window]", "window=700"), 1, {"collective-permute": 6}),
    ],
    ids=["whole rows", "two rows", "a window"],
)
def test_a_tpu_program_gathers_keys_and_runs_its_kernel(overrides, examples, gathered):
    found = compile_for_tpu(*overrides, examples=examples)
    assert found["kernels"] == 3
    assert {tuple(axes) for _, axes, _ in found["collectives"]} == {("sequence",)}
    kinds = [kind for kind, _, _ in found["collectives"]]
    assert {kind: kinds.count(kind) for kind in kinds} == gathered
    assert {bytes_ for kind, _, bytes_ in found["collectives"] if kind == "all-gather"} <= {
        examples * 4096 * 2 * 64 * 2
    }
    row = examples * 4096 * 4 * 64  # all queries of a sequence; the kernel saves as many softmax statistics
    assert found["most"] <= row
    assert not [shape for shape in found["shapes"] if shape[:1] == [3] and shape.count(4096)]  # saved by each layer


@pytest.mark.soak
def test_a_tpu_reduce_scatters_gradients_of_gathered_keys():
    assert run_module("tests.experiments.model.context_gradient") == ["reduce-scatter"]
