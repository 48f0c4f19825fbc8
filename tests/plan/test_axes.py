"""Traffic of a whole step along each mesh axis alone, compared with counts made by hand.

Shape legend: B examples of a micro-batch on one device, T sequence, V vocabulary, D width, M hidden width, L layers,
E experts, K experts of a token, F hidden width of an expert.
"""

import functools
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner.accelerator import parse_accelerator
from runner.parallel.mesh import AXES
from runner.plan.forecast.collectives import Collective, find_collectives
from runner.plan.forecast.hlo import get_output_shape, iter_instructions, parse_shape_sizes
from runner.plan.forecast.module import find_largest_arrays
from runner.plan.prediction import ParameterPayload, predict_collectives, predict_ordered_collectives, sum_sent_bytes
from runner.plan.program import TargetMachine, compute_sent_bytes, open_machine
from runner.train.layout import list_batch_layouts
from runner.trainer import BaseTrainer
from tests.plan.tpu_program import parse_shapes
from tests.support.libtpu import run_module
from tests.support.tiny_jobs import format_mesh, make_gpt

N = 8  # all devices are on one axis
B = 1
LOSS, TOKENS = 1, 1  # scalars that are reduced for every sharding of the batch
NORM_SUMS = 1  # gradient norms, where gradients are sharded
REDUCED = "all-reduce and reduce-scatter"
STATE_AXES = ("fsdp", "expert")  # axes that are equivalent for a dense model


class Shapes(NamedTuple):
    """Sizes of a decoder with as many key-value heads as query heads, or of a GPT, where M is 4 D."""

    L: int
    T: int
    V: int
    D: int
    M: int

    @property
    def stream(self) -> int:
        """Numbers in the residual stream of a micro-batch, X below."""
        return B * self.T * self.D

    def changes(self, **model: Any) -> dict[str, Any]:
        """Return the sizes as keys of a spec."""
        return {
            "config.model": {"layers": self.L, "heads": N, "width": self.D, "vocabulary_size": self.V, **model},
            "config.optimizer.clip_norm": None,
            "config.data.tokenizer": "bytes",
            "config.data.sequence_length": self.T,
            "config.train.micro_batch_examples": B,
        }


TINY = Shapes(L=3, T=32, V=256, D=64, M=128)
# The shards are whole tiles of a TPU, and sequence shards and their halves have sizes that nothing else has.
LARGE = Shapes(L=3, T=6144, V=8192, D=1024, M=4096)


def make_decoder(axis: str, directory: Path, shapes: Shapes, **changes: Any) -> BaseTrainer:
    """Make a decoder on `N` devices along `axis`, with one micro-batch per step."""
    examples = B * N if axis in ("data", *STATE_AXES) else B
    mesh = {"topology.mesh": {"data": 1} | {axis: N}, "config.train.global_batch_examples": examples}
    model = shapes.changes(key_value_heads=N, mlp_width=shapes.M, tied_embedding=False)
    return make_gpt(directory, PretrainDecoder, **{**model, **mesh, **changes})


def compile_step(job: BaseTrainer) -> tuple[str, list[Collective]]:
    """Return the HLO text of a job's train step on the devices of this process, and its collectives."""
    train_setup = job.setup_builder.build(jax.devices()[:N])
    text = train_setup.compile_train(job.train_step, list_batch_layouts(job.config, train_setup.mesh)[0]).text
    return text, find_collectives(text, train_setup.mesh_sizes)


def sum_payload(found: Iterable[Collective], axis: str, itemsize: int = 1) -> dict[str, int]:
    """Return the number of items in all collectives of a step by kind; all must be along `axis`."""
    sums: Counter[str] = Counter()
    for one in found:
        assert (one.axes, one.group_size) == ((axis,), N)
        assert not one.is_at_least or "all-to-all" in one.kind  # there may be several rounds
        sums[one.kind] += one.count * one.bytes
    return {kind: number // itemsize for kind, number in sums.items()}


def sum_by_axes(found: Iterable[Collective], itemsize: int = 1) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return the number of items in all collectives of a step by kind and axes."""
    sums: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for one in found:
        sums[one.kind, one.axes] += one.count * one.bytes
    return {key: number // itemsize for key, number in sums.items()}


# A decoder compiled for CPUs, which all-reduce whole gradients and activations. Only the gradients that the model
# itself scatters are reduce-scattered: that of the embedding, and that of the head with a chunked loss.

LEAVES = 7 + 2 + 3  # seven matrices and two norms per layer; embedding, head and final norm


def count_decoder_on_cpu(axis: str, s: Shapes) -> dict[str, int]:
    """Count the items in each kind of collective of a step."""
    matrices, norms = 4 * s.D**2 + 3 * s.D * s.M, 2 * s.D  # per layer
    gradients = s.L * (matrices + norms) + 2 * s.V * s.D + s.D
    if axis == "data":
        return {"all-reduce": gradients + LOSS + TOKENS}
    if axis in STATE_AXES:
        # Embedding and head are gathered once, since the gathered arrays are kept for the backward pass.
        forward, backward, table = gradients, s.L * (matrices + norms) + s.D, s.V * s.D
        # The norm of each gradient leaf is reduced too.
        reduced = gradients - table + LOSS + TOKENS + LEAVES
        return {"all-gather": forward + backward, "all-reduce": reduced, "reduce-scatter": table}
    X = s.stream
    # The stream is gathered before attention, MLP and logits in the forward pass, and after attention, MLP and lookup
    # in the backward pass. Token ids are gathered too, since each device looks up those in its vocabulary shard.
    gathered = s.L * 2 * X + X + s.L * 2 * X + X + B * s.T
    # Forward: the results of attention and MLP, and the embeddings looked up. Backward: one gradient for each matrix
    # that reads the stream: q, k, v, gate, up, and the head.
    stream = s.L * 2 * X + X + s.L * 5 * X + X
    ends = 3 * B * s.T  # per token: the largest logit, the sum of exponentials, and the logit of the label
    return {"all-gather": gathered, "all-reduce": stream + ends + s.L * norms + s.D + LEAVES - 3}


@pytest.mark.parametrize(
    "axis", ["fsdp", *(pytest.param(axis, marks=pytest.mark.soak) for axis in ("tensor", "data", "expert"))]
)
def test_a_decoder_sends_the_counted_bytes_along_one_axis(axis: str, tmp_path: Path) -> None:
    _, found = compile_step(make_decoder(axis, tmp_path / "run", TINY))
    assert sum_payload(found, axis, itemsize=4) == count_decoder_on_cpu(axis, TINY)


@pytest.mark.soak
@pytest.mark.parametrize(
    "axis", ["fsdp", *(pytest.param(axis, marks=pytest.mark.soak) for axis in ("sequence", "expert"))]
)
def test_chunked_logits_send_no_more_than_unchunked_logits(axis: str, tmp_path: Path) -> None:
    """Check that the head's gradient is accumulated over all chunks on each device and then reduce-scattered once."""
    shapes = TINY._replace(T=4 * N * 2)
    head = 4 * shapes.V * shapes.D
    whole, in_chunks = (
        compile_step(
            make_decoder(axis, tmp_path / str(chunk), shapes, **{"config.memory.loss_chunk_positions": chunk})
        )[1]
        for chunk in (None, 2)
    )
    moved = {("all-reduce", (axis,)): -head, ("reduce-scatter", (axis,)): head}
    assert sum_by_axes(in_chunks) == {key: size + moved.get(key, 0) for key, size in sum_by_axes(whole).items()}


def test_no_device_gathers_the_batch_for_its_only_example(tmp_path: Path) -> None:
    shapes, sizes = Shapes(L=1, T=48, V=256, D=64, M=160), {"fsdp": N // 2, "tensor": 2}
    batch = {"topology.mesh": {"data": 1} | sizes, "config.train.global_batch_examples": B * sizes["fsdp"]}
    text, _ = compile_step(make_decoder("fsdp", tmp_path / "run", shapes, **batch))
    tokens = B * sizes["fsdp"] * shapes.T
    found = {shape for one in iter_instructions(text) for shape in parse_shapes(get_output_shape(one))}
    assert (B * shapes.T, shapes.D) in found
    assert [shape for shape in found if tokens in shape] == []


# The same for TPUs, in bfloat16 except norms. Axes that shard a matmul operand communicate in rings during the matmul.

NORMS_ON_TPU = 6  # norms of the matrices sharded over `tensor`; some are added before they are reduced
HOPS = N + 1  # of a bidirectional ring: one initial hop, and two in each of N / 2 rounds
E, K, F = 16, 2, 512
EXPERTS = {"config.model.mlp_width": F, "config.model.moe": {"experts": E, "experts_per_token": K}}
CHUNK = 512
CAPACITY = {"config.model.moe.capacity_factor": 1.0}
Bytes = dict[str, int]  # bytes by kind of collective, per device and step


def count_norm_bytes(s: Shapes) -> int:
    """Count the bytes of all norm scales, which stay float32."""
    return 4 * (s.L * 2 * s.D + s.D)


def count_data_on_tpu(s: Shapes) -> Bytes:
    """Count for `data`: every gradient is all-reduced in float32."""
    gradients = s.L * (4 * s.D**2 + 3 * s.D * s.M) + 2 * s.V * s.D
    return {"all-reduce": 4 * (gradients + LOSS + TOKENS) + count_norm_bytes(s)}


def count_fsdp_on_tpu(s: Shapes) -> Bytes:
    """Count for `fsdp`: matrices use rings in the forward and backward pass and for their gradients.

    The head uses a ring only for its gradient; the gradient of the embedding is reduce-scattered.
    """
    matrices, table = 2 * (4 * s.D**2 + 3 * s.D * s.M), 2 * s.V * s.D
    return {
        "collective-permute": (3 * s.L * matrices + table) * HOPS // N,
        "all-gather": 2 * table + 2 * count_norm_bytes(s) - 4 * s.D,  # the final norm is gathered once
        "reduce-scatter": table,
        "all-reduce": count_norm_bytes(s) + 4 * (LOSS + TOKENS + NORM_SUMS),
    }


def count_chunks_on_tpu(s: Shapes) -> Bytes:
    """Count for `fsdp` with a chunked loss: the head's gradient is accumulated and reduce-scattered once."""
    found, table = count_fsdp_on_tpu(s), 2 * s.V * s.D
    around = found["collective-permute"] - table * HOPS // N
    return found | {"collective-permute": around, "reduce-scatter": found["reduce-scatter"] + table}


def count_sequence_on_tpu(s: Shapes) -> Bytes:
    """Count for `sequence`: that of `fsdp`, plus keys and values of whole sequences, gathered in both passes."""
    found, row = count_fsdp_on_tpu(s), 2 * B * s.T * s.D
    half = row // (2 * N)  # half of a device's sequence shard, for which another device computes attention
    forward, backward = 2 + 2, 2 + 2 + 2  # even and odd halves of queries and results; the same again and gradients
    return {
        "all-gather": found["all-gather"] + s.L * (2 + 2) * row,
        "collective-permute": found["collective-permute"] + s.L * (forward + backward) * half,
        REDUCED: found["all-reduce"] + found["reduce-scatter"] + s.L * 2 * row,
    }


def count_tensor_on_tpu(s: Shapes) -> Bytes:
    """Count for `tensor`: the residual stream is gathered before attention and MLP and reduce-scattered after them."""
    stream, ids = 2 * s.stream, 4 * B * s.T
    return {
        "all-gather": 4 * s.L * stream + 2 * stream + 2 * ids,
        "reduce-scatter": 4 * s.L * stream,
        # The embeddings looked up, and the stream's gradient from the head; the largest logits are bfloat16.
        "all-reduce": 2 * stream + count_norm_bytes(s) + 2 * ids + ids // 2 + 4 * NORMS_ON_TPU,
    }


def count_outside_experts(s: Shapes) -> Bytes:
    """Count for `expert` without the experts: like `fsdp`; routers are gathered, their gradients reduced in float32."""
    matrices, table, router = 2 * 4 * s.D**2, 2 * s.V * s.D, s.D * E
    statistics = s.L * 4 * (E + 1)  # load of each expert, and router entropy
    return {
        "collective-permute": (3 * s.L * matrices + table) * HOPS // N,
        "all-gather": 2 * table + 2 * count_norm_bytes(s) - 4 * s.D + s.L * 2 * router,
        "reduce-scatter": table,
        "all-reduce": count_norm_bytes(s) + s.L * 4 * router + statistics + 4 * (LOSS + TOKENS + NORM_SUMS),
    }


def count_expert_on_tpu(s: Shapes) -> Bytes:
    """Count for `expert`: tokens are sent in windows, one round for a balanced load, and again in the backward pass."""
    found = count_outside_experts(s)
    window = 8 * math.ceil(1.25 * B * s.T * K / N / 8)
    gates, counts = 4 * N * window, 4 * E
    return found | {
        "ragged-all-to-all": s.L * (2 + 3) * 2 * N * window * s.D,
        "all-to-all": s.L * ((1 + 2) * gates + counts),
        "all-reduce": found["all-reduce"] + s.L * 4,  # the number of rounds
    }


def count_capacity_on_tpu(s: Shapes) -> Bytes:
    """Count for `expert` with capacity: slots are sent there and back in both passes, gates and gradients once."""
    found = count_outside_experts(s)
    slots = E * B * math.ceil(s.T * K / E)
    return found | {
        "all-to-all": s.L * ((2 + 2) * 2 * slots * s.D + 2 * 4 * slots),
        "all-reduce": found["all-reduce"] + s.L * 2 * 4,  # number of assignments, and of those kept
    }


class TpuCase(NamedTuple):
    """A decoder on one axis, and its hand-counted bytes."""

    axis: str
    by_hand: Callable[[Shapes], Bytes]
    changes: Mapping[str, Any] = MappingProxyType({})


TPU_CASES = {
    "data": TpuCase("data", count_data_on_tpu),
    "fsdp": TpuCase("fsdp", count_fsdp_on_tpu),
    "fsdp, logits in chunks": TpuCase("fsdp", count_chunks_on_tpu, {"config.memory.loss_chunk_positions": CHUNK}),
    "sequence": TpuCase("sequence", count_sequence_on_tpu),
    "expert": TpuCase("expert", count_expert_on_tpu, EXPERTS),
    "expert, with capacity": TpuCase("expert", count_capacity_on_tpu, EXPERTS | CAPACITY),
    "tensor": TpuCase("tensor", count_tensor_on_tpu),
}


def test_every_axis_has_a_count_for_tpus() -> None:
    assert {each.axis for each in TPU_CASES.values()} == {*AXES}


@functools.cache
def run_tpu_program(name: str) -> dict[str, Any]:
    """Run `print_tpu_program` in a process of its own and return its result."""
    return dict(run_module("tests.plan.test_axes", name))


@pytest.mark.soak
@pytest.mark.parametrize("name", TPU_CASES)
def test_a_tpu_sends_the_counted_bytes_along_one_axis(name: str) -> None:
    """Check the count, and thereby that all-to-all is used only along `expert`."""
    by_hand, found = TPU_CASES[name].by_hand(LARGE), dict(run_tpu_program(name)["payload"])
    if REDUCED in by_hand:
        found[REDUCED] = found.pop("all-reduce") + found.pop("reduce-scatter")
    assert found == by_hand


@pytest.mark.soak
@pytest.mark.parametrize("name", TPU_CASES)
def test_no_array_on_a_tpu_is_quadratic_in_the_sequence_or_holds_all_logits(name: str) -> None:
    found = run_tpu_program(name)
    shapes = [tuple(shape) for shape in found["shapes"]]
    of_vocabulary = [shape for shape in shapes if LARGE.V in shape and LARGE.D not in shape]
    share = (
        found["examples"] * TPU_CASES[name].changes.get("config.memory.loss_chunk_positions", LARGE.T) * LARGE.V // N
    )
    if TPU_CASES[name].axis == "tensor":
        assert of_vocabulary == []  # the vocabulary is sharded
    else:
        assert max(map(math.prod, of_vocabulary)) == share
    assert max(map(math.prod, shapes)) <= max(share, E * LARGE.T * LARGE.D, LARGE.V * LARGE.D)
    parts = {LARGE.T, LARGE.T // N, LARGE.T // (2 * N)}
    assert [shape for shape in shapes if LARGE.T in shape and sum(size in parts for size in shape) > 1] == []


def print_tpu_program(name: str) -> None:
    """Print the bytes of the collectives by kind, the sizes of all results, and the examples of a batch, as JSON."""
    machine = open_machine(parse_accelerator("v5e-8"))
    assert machine is not None
    axis, _, changes = TPU_CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        job = make_decoder(axis, Path(directory) / "run", LARGE, **{"config.precision.compute": "bfloat16"}, **changes)
        train_setup = job.setup_builder.build(machine.devices)
        text = train_setup.compile_train(job.train_step, list_batch_layouts(job.config, train_setup.mesh)[0]).text
    sizes = {shape for one in iter_instructions(text) for shape in parse_shape_sizes(get_output_shape(one))}
    found = sum_payload(find_collectives(text, train_setup.mesh_sizes), axis)
    print(json.dumps({"payload": found, "shapes": sorted(sizes), "examples": job.config.train.global_batch_examples}))


@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_the_prediction_of_a_plan_is_within_25_percent_of_the_count(axis: str, tmp_path: Path) -> None:
    sizes = dict.fromkeys(AXES, 1) | {axis: N}
    counted = TPU_CASES[axis].by_hand(LARGE)
    on_a_ring = 2 * counted.pop("all-reduce") + sum(counted.get(kind, 0) for kind in ("all-gather", "reduce-scatter"))
    sent_bytes = on_a_ring * (N - 1) / N + counted.get("collective-permute", 0)
    job = make_decoder(axis, tmp_path / "run", LARGE, **{"config.precision.compute": "bfloat16"})
    L, _, V, D, M = LARGE
    weights = ParameterPayload(2.0 * (L * (4 * D**2 + 3 * D * M) + 2 * V * D) / sizes["tensor"], 0.0, itemsize=2)
    predicted, _ = sum_sent_bytes(
        predict_collectives(sizes, weights, job.sizing(sizes), B * LARGE.T, passes=2), sizes, dict.fromkeys(AXES, 1)
    )
    assert predicted == pytest.approx(sent_bytes, rel=0.25)


# A GPT compiled for CPUs, with a tied embedding and biases.

TINY_GPT = Shapes(L=3, T=32, V=256, D=64, M=256)
GPT_LEAVES = 20
GPT_MATRICES, GPT_VECTORS = (
    12 * TINY_GPT.D**2,
    13 * TINY_GPT.D,
)  # per layer; vectors are two norms and a bias per matrix
GPT_PARAMETERS = (
    TINY_GPT.L * (GPT_MATRICES + GPT_VECTORS) + TINY_GPT.V * TINY_GPT.D + TINY_GPT.T * TINY_GPT.D + 2 * TINY_GPT.D
)


def make_small_gpt(axis: str, directory: Path, accumulate_steps: int = 1, shapes: Shapes = TINY_GPT) -> BaseTrainer:
    """Return a GPT over `N` devices along `axis`."""
    examples = B * accumulate_steps * (1 if axis == "tensor" else N)
    mesh = {"topology.mesh": {"data": 1} | {axis: N}, "config.train.global_batch_examples": examples}
    return make_gpt(directory, PretrainGPT, **shapes.changes(), **mesh)


def count_gpt_on_cpu(axis: str) -> dict[str, int]:
    """Count the items in each kind of collective of a step."""
    L, T, V, D, _ = TINY_GPT
    if axis == "data":
        return {"all-reduce": GPT_PARAMETERS + LOSS + TOKENS}
    # The embedding is used twice, by the lookup and the logits, and both gradients are reduced before they are added.
    gradients = GPT_PARAMETERS + V * D
    if axis == "fsdp":
        forward = gradients  # every use gathers
        # The backward pass needs no biases. It gathers norm scales twice: for recomputation and for the gradient.
        backward = L * (GPT_MATRICES + 2 * 2 * D) + 2 * D
        reduced = gradients - V * D + LOSS + TOKENS + GPT_LEAVES - 1
        return {"all-gather": forward + backward, "all-reduce": reduced, "reduce-scatter": V * D}
    X = TINY_GPT.stream
    gathered = L * 2 * X + X + L * 2 * X + X + B * T + T * D  # the last term is the gradient of the position embedding
    stream = L * 2 * X + X + L * 4 * X + X  # backward: q, k, v, and one after the MLP
    vectors = L * 2 * D + D  # only norm scales: the gradients of biases are computed from gathered tokens
    sharded_leaves = 11  # 6 matrices, 4 biases (without those of the two output projections) and the embedding
    return {"all-gather": gathered, "all-reduce": stream + 3 * B * T + vectors + sharded_leaves}


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["data", "fsdp", "tensor"])
def test_a_gpt_sends_the_counted_bytes_along_one_axis(axis: str, tmp_path: Path) -> None:
    _, found = compile_step(make_small_gpt(axis, tmp_path / "run"))
    assert sum_payload(found, axis, itemsize=4) == count_gpt_on_cpu(axis)


# Gradients over `data`: reduced once per step, independent of accumulation, and only the shards of each device.


def select_data_axis(found: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Return the float32 items of the collectives that include `data`, by kind and axes."""
    return sum_by_axes((one for one in found if "data" in one.axes), itemsize=4)


GRADIENTS: list[tuple[dict[str, int], str, dict[tuple[str, ...], int]]] = [
    ({"data": 8}, "float32", {("data",): GPT_PARAMETERS + LOSS + TOKENS}),
    ({"data": 8}, "bfloat16", {("data",): GPT_PARAMETERS + LOSS + TOKENS}),
    ({"data": 2, "fsdp": 4}, "float32", {("data",): GPT_PARAMETERS // 4 + LOSS, ("data", "fsdp"): TOKENS}),
    ({"data": 4, "fsdp": 2}, "float32", {("data",): GPT_PARAMETERS // 2 + LOSS, ("data", "fsdp"): TOKENS}),
    ({"fsdp": 8}, "float32", {}),
]
_DAILY_GRADIENTS = [({"data": 2, "fsdp": 4}, 8)]


@pytest.mark.parametrize(
    ("mesh", "compute", "expected", "accumulate_steps"),
    [
        pytest.param(
            *of_mesh,
            accumulate_steps,
            id=f"{format_mesh(of_mesh[0])}, {of_mesh[1]}, {accumulate_steps} micro-batches",
            marks=() if (of_mesh[0], accumulate_steps) in _DAILY_GRADIENTS else pytest.mark.soak,
        )
        for of_mesh in GRADIENTS
        for accumulate_steps in (1, 8)
    ],
)
def test_gradients_are_reduced_along_data_once_per_step_as_shards(
    mesh: dict[str, int],
    compute: str,
    expected: dict[tuple[str, ...], int],
    accumulate_steps: int,
    tmp_path: Path,
) -> None:
    changes = {"topology.mesh": {"data": 1} | mesh, "config.precision.compute": compute}
    examples = {"config.train.global_batch_examples": B * N * accumulate_steps}
    _, found = compile_step(make_gpt(tmp_path / "run", PretrainGPT, **TINY_GPT.changes(), **changes, **examples))
    assert select_data_axis(found) == {("all-reduce", axes): number for axes, number in expected.items()}


# Two slices: only `data` spans slices, so their traffic is that along `data`.


@pytest.mark.parametrize(
    ("mesh", "numbers"),
    [
        # The devices of a slice reduce their shards within the slice (two stages), then exchange shares of the sum.
        ({"data": 2, "fsdp": 4}, GPT_PARAMETERS / 4 + LOSS + TOKENS / 4),
        pytest.param({"data": 4, "fsdp": 2}, (GPT_PARAMETERS / 2 + LOSS) / 2 + TOKENS / 4, marks=pytest.mark.soak),
        pytest.param({"data": 8}, (GPT_PARAMETERS + LOSS + TOKENS) / 4, marks=pytest.mark.soak),
    ],
)
@pytest.mark.parametrize("accumulate_steps", [pytest.param(1, marks=pytest.mark.soak), 8])
def test_slices_exchange_only_their_gradient_sums(
    mesh: dict[str, int], numbers: float, accumulate_steps: int, tmp_path: Path
) -> None:
    changes = {"topology.mesh": mesh, "config.train.global_batch_examples": B * N * accumulate_steps}
    _, found = compile_step(make_gpt(tmp_path / "run", PretrainGPT, **TINY_GPT.changes(), **changes))
    devices = tuple(jax.devices()[:N])
    machine = TargetMachine(devices, devices, parse_accelerator("2xv5e-4"), "", True, 0)
    _, network = compute_sent_bytes(found, dict.fromkeys(AXES, 1) | mesh, machine)
    assert network == pytest.approx(4 * 2 * numbers / 2)  # an all-reduce between two slices


# Order-deterministic reduction: each array is redistributed by shares, and the shares of the sum are gathered.


@pytest.mark.parametrize(
    ("mesh", "groups", "subtrees"),
    [
        ({"data": 2, "fsdp": 2}, 16, 1),  # the four groups of a device form one subtree
        pytest.param({"data": 8}, 8, 1, marks=pytest.mark.soak),
        pytest.param({"data": 2, "fsdp": 4}, 8, 1, marks=pytest.mark.soak),
        pytest.param({"data": 4}, 24, 2, marks=pytest.mark.soak),  # six groups form two subtrees
    ],
    ids=str,
)
def test_same_bits_sends_subtree_sums_and_gathers_the_result(
    mesh: dict[str, int], groups: int, subtrees: int, tmp_path: Path
) -> None:
    sizes, number, axes = dict.fromkeys(AXES, 1) | mesh, math.prod(mesh.values()), tuple(mesh)
    changes = {"topology.mesh": {"data": 1} | mesh, "config.train.same_bits_devices": groups}
    examples = {"config.train.global_batch_examples": B * groups}
    job = make_gpt(tmp_path / "run", PretrainGPT, **TINY_GPT.changes(), **changes, **examples)
    train_setup = job.setup_builder.build(jax.devices()[:number])
    text = train_setup.compile_train(job.train_step, list_batch_layouts(job.config, train_setup.mesh)[0]).text
    assert sum_by_axes(find_collectives(text, train_setup.mesh_sizes), itemsize=4) == {
        ("all-to-all", axes): subtrees * GPT_PARAMETERS,
        ("all-gather", axes): GPT_PARAMETERS + groups * (LOSS + TOKENS),
        **({("all-gather", ("fsdp",)): GPT_PARAMETERS} if "fsdp" in mesh else {}),
    }
    predicted, _ = sum_sent_bytes(
        predict_ordered_collectives(GPT_PARAMETERS, 4, subtrees), sizes, dict.fromkeys(AXES, 1)
    )
    gathered = GPT_PARAMETERS * (1 - 1 / sizes["fsdp"])
    assert predicted == pytest.approx(4 * (gathered + (subtrees + 1) * GPT_PARAMETERS * (1 - 1 / number)))


@pytest.mark.soak
def test_the_largest_array_of_a_step_is_the_saved_activations(tmp_path: Path) -> None:
    long = TINY_GPT._replace(T=128)  # so that activations are larger than the gradients of a layer
    text, _ = compile_step(make_small_gpt("data", tmp_path / "run", shapes=long))
    first = find_largest_arrays(text, 1)[0]
    assert (first.bytes, first.shape) == (long.L * B * long.T * long.M * 4, f"f32[{long.L},{B},{long.T},{long.M}]")
    assert "jvp(GPT)/while/body" in first.op_name
    names = {buffer.op_name for buffer in find_largest_arrays(text, 200)}
    assert "state.params['blocks']['mlp_in']['kernel']" in names


if __name__ == "__main__":
    print_tpu_program(sys.argv[1])
