"""Candidate meshes, their predicted traffic, and the bounded search over them."""

import functools
import math
import multiprocessing
from collections import Counter
from math import inf
from types import SimpleNamespace

import jax
import pytest

from runner.accelerator import parse_accelerator
from runner.parallel.mesh import AXES
from runner.plan import search
from runner.plan.checks import Findings, open_job
from runner.plan.mesh import iter_meshes, list_near_meshes, order_sizes
from runner.plan.prediction import ParameterPayload, Predictor, build_abstract, predict_collectives, sum_sent_bytes
from runner.plan.program import TargetMachine, read_planned_memory
from runner.plan.search import CompiledCandidate, JobVariant, Search, run_compilation
from runner.spec import load_document
from runner.train.compile import ProgramMemory
from runner.train.flops import Sizing
from runner.trainer import BaseTrainer

ONES = dict.fromkeys(AXES, 1)


# Candidate meshes.


def list_sizes(axis, *args):
    return {dict(mesh)[axis] for mesh in iter_meshes(*args)}


def test_every_mesh_uses_all_devices_once():
    found = list(iter_meshes(64, 131_072, 8))
    assert len(found) == len(set(found)) > 50
    assert {math.prod(dict(mesh).values()) for mesh in found} == {64}
    assert all(tuple(axis for axis, _ in mesh) == AXES for mesh in found)


@pytest.mark.parametrize(
    ("axis", "args", "sizes"),
    [
        ("tensor", (512, 1024, 1), {1, 2, 4, 8, 16}),
        ("expert", (64, 1024, 1), {1}),
        ("expert", (64, 1024, 8), {1, 2, 4, 8}),
        ("expert", (64, 1024, 6), {1, 2}),
        ("sequence", (64, 1024, 1), {1}),
        ("sequence", (64, 1, 1), {1}),  # linear layers
        ("sequence", (64, 8192, 1), {1, 2, 4}),
        ("sequence", (64, 131_072, 1), {1, 2, 4, 8, 16, 32, 64}),
        ("sequence", (64, 6 * 1024, 1), {1, 2}),  # 4 would need 8 half shards
        ("fsdp", (8, 1024, 1), {1, 2, 4, 8}),
    ],
)
def test_the_size_of_an_axis_is_limited_by_sequence_experts_and_neighbours(axis, args, sizes):
    assert list_sizes(axis, *args) == sizes


def test_nearby_meshes_move_a_factor_between_axes():
    near = [{axis: size for axis, size in mesh if size > 1} for mesh in list_near_meshes(ONES | {"fsdp": 512}, 8192, 1)]
    assert {"data": 8, "fsdp": 64} in near
    assert {"data": 16, "fsdp": 32} in near
    assert {"fsdp": 256, "tensor": 2} in near
    assert {"fsdp": 128, "sequence": 4} in near
    assert not any("expert" in mesh or mesh.get("sequence", 1) > 4 or mesh.get("tensor", 1) > 16 for mesh in near)


# Traffic.

SIZING = Sizing(
    tensor_bytes_per_token=100.0, sequence_bytes_per_token=10.0, expert_bytes_per_token=60.0, expert_parameters=7
)
WEIGHTS = ParameterPayload(shared=2400.0, of_experts=1200.0)


@pytest.mark.parametrize(
    ("axis", "bytes_"),
    [
        ("data", 2 * 3600 * 3 / 4),  # every gradient is reduced once
        ("fsdp", 3 * 3600 * 3 / 4),  # gathered forward and backward, scattered once
        ("sequence", 3 * 3600 * 3 / 4 + 10 * 4 * 5 * 3 / 4),  # plus the keys and values of three other shards
        ("expert", 3 * 2400 * 3 / 4 + 60 * 5 * 3 / 4),  # experts are not gathered; their tokens are sent
        ("tensor", 2 * 100 * 5 * 3 / 4),  # gathered and reduce-scattered
    ],
)
def test_each_axis_alone_sends_the_counted_bytes(axis, bytes_):
    sizes = ONES | {axis: 4}
    found = predict_collectives(sizes, WEIGHTS, SIZING, tokens=5, passes=2)
    assert sum_sent_bytes(found, sizes, ONES) == (pytest.approx(bytes_), 0)
    assert sum_sent_bytes(found, sizes, sizes) == (0, pytest.approx(bytes_))


@pytest.mark.parametrize("axis", AXES)
def test_more_micro_batches_resend_parameters_but_not_gradients_over_data(axis):
    sizes = ONES | {axis: 4}
    once, eight_times = (
        sum_sent_bytes(
            predict_collectives(sizes, WEIGHTS, SIZING, tokens=5, passes=2, accumulate_steps=steps), sizes, ONES
        )[0]
        for steps in (1, 8)
    )
    of_parameters = {"fsdp": 3 * 3600, "sequence": 3 * 3600, "expert": 3 * 2400}.get(axis, 0) * 3 / 4
    assert eight_times - once == pytest.approx(7 * of_parameters)


def test_gradients_over_data_are_float32():
    sizes, half = ONES | {"data": 4}, ParameterPayload(WEIGHTS.shared / 2, WEIGHTS.of_experts / 2, itemsize=2)
    found = [
        sum_sent_bytes(predict_collectives(sizes, weights, SIZING, 5, 2), sizes, ONES) for weights in (WEIGHTS, half)
    ]
    assert found[0] == found[1]


def test_an_all_reduce_costs_twice_a_reduce_scatter():
    whole = ParameterPayload(2400.0, 1200.0, whole_share=0.5)
    sizes = ONES | {"fsdp": 4}
    assert sum_sent_bytes(predict_collectives(sizes, whole, SIZING, 5, 2), sizes, ONES)[0] == pytest.approx(
        1.5 * 3 * 3600 * 3 / 4
    )


def test_experts_are_gathered_over_the_axes_that_do_not_shard_them():
    sizes = ONES | {"fsdp": 2, "expert": 4}
    found = sum(
        flow.factor * flow.payload for flow in predict_collectives(sizes, WEIGHTS, SIZING, 0, 2) if "fsdp" in flow.axes
    )
    assert found == 3 * 2400 + 3 * 1200 / 4


# Sizing of decoders.

HYBRID = "{key_heads: 2, value_heads: 4, key_head_dim: 8, value_head_dim: 8}"


def make_job(*overrides, accelerator="v5p-64", spec="specs/llama3_8b.yaml"):
    findings = Findings()
    job = open_job(load_document(spec, [f"topology.accelerator={accelerator}", *overrides]), findings)
    assert isinstance(job, BaseTrainer), findings.problems
    return job


@functools.cache
def make_predictor(*overrides, accelerator="v5p-64", spec="specs/llama3_8b.yaml"):
    """Trace a job for its FLOPs, which takes much longer than `make_job`."""
    job = make_job(*overrides, accelerator=accelerator, spec=spec)
    flops = job.flops_per_token(build_abstract(job.setup_builder, order_sizes(ONES)))
    return job, Predictor(job, flops, parse_accelerator(accelerator))


def test_a_decoder_sends_keys_and_values_and_expert_tokens():
    job = make_job()
    sizing = job.sizing(ONES)
    assert sizing.sequence_bytes_per_token == 32 * (3 + 1) * 2 * 8 * 128 * 2  # layers, rounds, keys and values, bf16
    assert sizing.sequence_bytes_per_token == 2 * job.sizing(ONES | {"tensor": 2}).sequence_bytes_per_token
    assert (sizing.num_experts, sizing.expert_parameters, sizing.expert_bytes_per_token) == (1, 0, 0)
    sparse = make_job(
        "config.model={vocabulary_size: 256, layers: 3, heads: 4, width: 64, mlp_width: 128, "
        "moe: {experts: 8, experts_per_token: 2, expert_width: 32, dense_layers: 1}}",
        spec="specs/moe_nano.yaml",
    )
    sizing = sparse.sizing(ONES)
    assert (sizing.num_experts, sizing.expert_parameters) == (8, 2 * 8 * 3 * 64 * 32)
    assert sizing.can_shard_sequences
    assert sizing.expert_bytes_per_token == 5 * 2 * 2 * 64 * 4  # journeys, layers, experts of a token, width, float32


@pytest.mark.parametrize("spec", [pytest.param("llama3_8b", marks=pytest.mark.soak), "gpt_7b"])
def test_attention_kept_by_dots_is_not_counted_again(spec):
    def count(accelerator, remat, compute="bfloat16"):
        options = f"config.memory.remat={remat}", f"config.precision.compute={compute}"
        _, found = make_predictor(*options, accelerator=accelerator, spec=f"specs/{spec}.yaml")
        return found.flops.recomputed_per_token

    assert 0 < count("v5p-64", "none") == count("v5p-64", "dots") < count("v5p-64", "layers")
    # On GPUs those of cuDNN are kept, which has 16 bits.
    assert count("v5p-64", "none") == count("h100-64", "none") == count("h100-64", "dots")
    assert count("h100-64", "none", "float32") < count("h100-64", "dots", "float32")


def test_reductions_of_gradients_are_waited_for_on_a_tpu():
    exposed = {}
    for accelerator in ("v5p-64", "h100-64"):
        _, found = make_predictor(accelerator=accelerator)
        for micro_batch in (1, 2):
            sizes = ONES | {"data": 4, "fsdp": 16}
            state = found.measure_state(found.shard_state(order_sizes(sizes)))
            exposed[accelerator, micro_batch] = found.predict(sizes, micro_batch, state).exposed_seconds
    assert exposed["h100-64", 1] == exposed["h100-64", 2] == 0
    # Gradients are reduced in each micro-batch.
    assert exposed["v5p-64", 1] == pytest.approx(2 * exposed["v5p-64", 2])


@pytest.mark.parametrize("chunk", ["null", 512])  # of the loss: all logits of a device, or some
def test_memory_grows_with_the_tokens_per_device_not_with_the_sequence(chunk):
    keys = f"config.memory.loss_chunk_positions={chunk}"
    rows = {length: make_job(f"config.data.sequence_length={length}", keys) for length in (8192, 32_768)}
    one, four = (rows[length].sizing(ONES | {"sequence": parts}) for length, parts in ((8192, 1), (32_768, 4)))
    assert one == four


@pytest.mark.soak
@pytest.mark.parametrize(
    "spec", ["moe_nano", *(pytest.param(spec, marks=pytest.mark.soak) for spec in ("llama_nano", "gpt_small"))]
)
def test_a_resharded_abstract_state_equals_one_built_on_the_mesh(spec):
    job, predictor = make_predictor("config.model.vocabulary_size=320", accelerator="v5e-64", spec=f"specs/{spec}.yaml")
    meshes = [
        {"fsdp": 8},
        {"tensor": 16},
        {"fsdp": 2, "sequence": 4, "expert": 2, "tensor": 2},
        {"expert": 8, "fsdp": 3},
    ]
    for sizes in (order_sizes(ONES | mesh) for mesh in meshes):
        drawn = build_abstract(job.setup_builder, sizes).abstract_state
        laid = predictor.shard_state(sizes)
        shapes = [[leaf.sharding.shard_shape(leaf.shape) for leaf in jax.tree.leaves(state)] for state in (laid, drawn)]
        assert shapes[0] == shapes[1]


# Search.


@pytest.mark.parametrize(("spec", "axis"), [("llama3_8b_128k", "sequence"), ("qwen3_30b_a3b", "expert")])
@pytest.mark.soak
def test_a_search_over_five_axes_finds_meshes_along_each(spec, axis):
    accelerator = parse_accelerator("v5p-64")
    assert accelerator is not None
    found = Search(f"specs/{spec}.yaml", (f"topology.accelerator={accelerator}",))
    candidates = found.list_candidates(found.list_variants(), accelerator, 95 * 2**30)
    assert any(dict(candidate.mesh)[axis] > 1 for candidate in candidates)
    assert [one.rank for one in candidates] == sorted(one.rank for one in candidates)


def test_the_spec_as_it_is_is_a_candidate():
    accelerator = parse_accelerator("v5e-8")
    assert accelerator is not None
    settings = {"topology.accelerator": "v5e-8", "topology.mesh": "{data: auto, tensor: 2}"}
    words = [f"{key}={value}" for key, value in settings.items()]
    found = Search("specs/llama_nano.yaml", (*words, "config.train.micro_batch_examples=4"))
    start = found.make_start(accelerator, 16 * 2**30)
    assert start is not None
    assert start.overrides == []
    assert start.settings == {
        "topology.mesh": ONES | {"data": 4, "tensor": 2},
        "config.train.micro_batch_examples": 4,
        "config.memory.remat": "none",
        "config.memory.loss_chunk_positions": None,
        "config.model.layer_loop": "scan",
    }
    # A layer waits for what goes over `tensor`, and on a TPU nothing overlaps with the reduction of gradients.
    assert start.rank[0] == start.prediction.times.step_seconds + start.prediction.exposed_seconds
    assert start.prediction.exposed_seconds > 0
    (same,) = (
        candidate
        for candidate in found.list_candidates(found.list_variants(), accelerator, 16 * 2**30)
        if candidate.settings == start.settings | {"config.model.layer_loop": "unroll"}
    )
    assert same.prediction == start.prediction
    others = Search("specs/llama_nano.yaml", (words[0], "topology.mesh={data: 8}"))
    alone = others.make_start(accelerator, 16 * 2**30)
    assert alone is not None
    assert alone.prediction.exposed_seconds == alone.prediction.times.interconnect > 0
    without_choices = Search("specs/vit_nano.yaml", (words[0], "topology.mesh={data: 8}"))
    assert without_choices.make_start(accelerator, 16 * 2**30) is not None
    assert Search("specs/llama_nano.yaml", (words[0], "topology.mesh={data: 3}")).make_start(accelerator, 2**30) is None


ACCELERATOR = parse_accelerator("v5e-8")
LLAMA = Search("specs/llama_nano.yaml", ("topology.accelerator=v5e-8", "topology.mesh={data: auto, tensor: 2}"))


@pytest.fixture(scope="module")
def start():
    """The spec of `LLAMA` as it is."""
    return LLAMA.make_start(ACCELERATOR, 16 * 2**30)


@pytest.fixture(scope="module")
def candidates():
    return LLAMA.list_candidates(LLAMA.list_variants(), ACCELERATOR, 16 * 2**30)


# The tracker of `multiprocessing`'s resources is killed with the processes that a test has left behind.
IGNORED_WARNING = "ignore:resource_tracker"


def make_target(hbm_bytes=16 * 2**30, *, is_faked=False):
    return TargetMachine((), (), ACCELERATOR, "", is_faked, hbm_bytes)


@pytest.mark.parametrize(
    ("has_time", "is_faked", "loops"),
    [
        # The spec as it is, five other layouts, the best of them with other choices, and the finalists with estimates.
        (True, False, {(False, "scan"): 2, (False, "unroll"): 9, (True, "scan"): 1, (True, "unroll"): 2}),
        pytest.param(True, True, {(False, "scan"): 2, (False, "unroll"): 9}, marks=pytest.mark.soak),
        pytest.param(False, False, {(False, "scan"): 1}, marks=pytest.mark.soak),
    ],
)
def test_the_best_by_their_ops_are_compiled_to_the_end(has_time, is_faked, loops, start, candidates, monkeypatch):
    assert {each.settings["config.model.layer_loop"] for each in candidates} == {"unroll"}
    compiled = []

    def run_compilation(_, candidate, machine, is_whole, is_over):
        """Pretend that the third of all is the fastest by its ops, the fourth next, and the spec by the estimates."""
        compiled.append((is_whole, candidate))
        place = 1 + [each for _, each in compiled].index(candidate)
        seconds = {3: 1.0, 4: 2.0}.get(place, 9.0)
        times = SimpleNamespace(step_seconds=0.5, bound="memory")
        return CompiledCandidate(candidate, times, 2**20, seconds, 10.0 - seconds if is_whole else None)

    monkeypatch.setattr(search, "run_compilation", run_compilation)
    monkeypatch.setattr(search, "_MAX_PROCESSES", 1)
    end_seconds = inf if has_time else 0.0
    results, dropped = LLAMA.compile_best(candidates, make_target(is_faked=is_faked), start, end_seconds)
    assert dropped == []
    found = Counter((is_whole, candidate.settings["config.model.layer_loop"]) for is_whole, candidate in compiled)
    assert found == loops
    assert compiled[0][1].is_spec
    if has_time:
        layouts = [candidate.layout for _, candidate in compiled]
        assert len(set(layouts[:6])) == 6
        assert set(layouts[6:11]) == {layouts[2]}
        assert compiled[6][1].settings == compiled[2][1].settings | {"config.model.layer_loop": "scan"}
        assert results[0].candidate == (compiled[2][1] if is_faked else start)


@pytest.mark.filterwarnings(IGNORED_WARNING)
@pytest.mark.usefixtures("libtpu")
@pytest.mark.soak
def test_a_scheduled_step_has_the_ops_and_memory_of_the_compiled_one(start):
    scheduled, whole = (
        run_compilation(LLAMA, start, make_target(), is_whole, lambda: False) for is_whole in (False, True)
    )
    assert whole.forecast_seconds > whole.op_by_op_seconds == scheduled.op_by_op_seconds > 0
    assert scheduled.forecast_seconds is None
    assert scheduled.times == whole.times
    # Only the whole program has code, a fifth of what this small step needs.
    assert 0.7 < scheduled.needed_bytes / whole.needed_bytes < 1
    assert scheduled.needed_bytes > start.prediction.state_bytes


BUFFERS = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <2 reduce_sum.157 @0> (size=512,offset=0): f32[]{:T(128)}
allocation 1: size 4000, parameter 7, shape |f32[10,100]| at ShapeIndex {}, maybe-live-out:
allocation 2: size 300, parameter 8, shape |f32[75]| at ShapeIndex {}:
allocation 3: size 192, output shape is |(s32[], f32[10,100])|, maybe-live-out:
allocation 4: size 8, maybe-live-out:
allocation 5: size 64, constant:
allocation 6: size 1000, preallocated-temp:
allocation 7: size 6000, color 1, preallocated-temp:
"""


def test_planned_memory_is_that_of_the_device_alone():
    assert read_planned_memory(BUFFERS) == ProgramMemory(4300, 200, 1150, code=0)


@pytest.mark.soak
@pytest.mark.filterwarnings(IGNORED_WARNING)
@pytest.mark.usefixtures("libtpu")
def test_a_step_too_large_when_scheduled_says_what_it_needs(start):
    reason, needed_bytes = run_compilation(LLAMA, start, make_target(2**20), False, lambda: False)
    assert "needs" in reason
    assert needed_bytes > 2**20


@pytest.mark.filterwarnings(IGNORED_WARNING)
def test_a_compilation_is_killed_once_the_search_is_over(start):
    assert run_compilation(LLAMA, start, make_target(), True, lambda: True) is None
    assert multiprocessing.active_children() == []


def test_the_search_for_same_bits_keeps_micro_batch_and_order():
    _, found = make_predictor("config.train.same_bits_devices=64", "config.train.micro_batch_examples=2")
    assert (
        found.list_micro_batches(ONES | {"fsdp": 64}) == found.list_micro_batches(ONES | {"data": 4, "fsdp": 8}) == [2]
    )
    assert found.list_micro_batches(ONES) == [2]
    for refused in ({"fsdp": 32, "tensor": 2}, {"fsdp": 32, "sequence": 2}, {"data": 128}):
        assert found.list_micro_batches(ONES | refused) == []


def test_a_mesh_rejected_by_one_variant_is_tried_for_the_others(monkeypatch):
    """Check with a first variant that rejects meshes over `fsdp` and a second that accepts all."""
    _, usual = make_predictor("config.model.vocabulary_size=320")

    class RejectingVariant:
        job = usual.job

        def __getattr__(self, name):
            return getattr(usual, name)

        def list_micro_batches(self, sizes):
            return [] if sizes["fsdp"] > 1 else usual.list_micro_batches(sizes)

        def iter_fitting(self, sizes, state, limit_bytes):
            return iter(()) if sizes["fsdp"] > 1 else usual.iter_fitting(sizes, state, limit_bytes)

    variants = [JobVariant(usual.job, ((name, True),), usual.flops) for name in ("refuses", "takes")]
    given = iter([RejectingVariant(), usual])
    monkeypatch.setattr(search, "Predictor", lambda *_: next(given))
    candidates = Search("", ()).list_candidates(variants, usual.accelerator, 95 * 2**30)
    assert {one.choices[0][0] for one in candidates if dict(one.mesh)["fsdp"] > 1} == {"takes"}
    assert {one.choices[0][0] for one in candidates} == {"refuses", "takes"}


def test_logits_of_extra_predictions_exist_together_unless_the_loss_is_chunked():
    model = "config.model={vocabulary_size: 256, layers: 2, heads: 4, width: 64, mlp_width: 128, extra_predictions: %d}"
    sizes = {}
    for chunk in ("null", "32"):
        options = [f"config.memory.loss_chunk_positions={chunk}", "config.memory.remat=layers"]
        sizings = [make_job(model % extra, *options, spec="specs/llama_nano.yaml").sizing(ONES) for extra in (0, 2)]
        sizes[chunk] = sizings[1].activation_bytes_per_token - sizings[0].activation_bytes_per_token
    assert sizes["null"] - sizes["32"] == 2 * 256 * (4 + 4)


def test_sequences_of_linear_layers_are_not_sharded():
    job = make_job(f"config.model.linear={HYBRID}", "config.model.layer_pattern=[linear, full]")
    assert not job.sizing(ONES).can_shard_sequences
