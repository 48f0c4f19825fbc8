"""LoRA: starts equal to the base, matches a NumPy reference, keeps the base frozen, and is merged for readers."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer, ExecutionSpec, open_checkpoint
from runner.checkpoint.leaves import flatten_with_names
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.huggingface.load import ADAPTER_BASE
from runner.inference.evaluate import EvaluationRequest, evaluate
from runner.inference.open_run import SampleRequest, open_run, sample
from runner.parallel.mesh import STATE_AXES
from runner.storage import parse_lines
from runner.train.weights import get_model_state, get_model_weights, replace_base
from tests.support.tiny_jobs import (
    are_leaves_equal,
    get_job_name,
    make_gpt,
    make_gpt_document,
    make_mesh_options,
    stop_after,
)
from tests.test_values import TrainLookup

STEPS, STOP = 4, 2
COMMON: dict[str, Any] = {
    "config.schedule": {"name": "constant"},
    "config.optimizer": {"learning_rate": 0.01, "weight_decay": 0.1},
    "config.train": {"total_steps": STEPS, "global_batch_examples": 16},
    "config.eval": {"batches": 1},
    "config.data.sequence_length": 8,
    "checkpoint.every_steps": 2,
}
SIZES = {"layers": 2, "heads": 2, "width": 16}
DECODER = SIZES | {"mlp_width": 24, "layer_pattern": ["window", "full"], "window": 4}
# Job class, its config, targets (a module and a matrix) and the number of adapted matrices.
MODELS: dict[str, tuple[type[BaseTrainer], dict[str, Any], list[str], int]] = {
    "lookup": (TrainLookup, {}, ["Embed_*"], 1),  # fast to compile
    "stacked": (PretrainGPT, {"config.model": SIZES}, ["blocks.query", "blocks.mlp_*.kernel"], 3),
    "unrolled": (PretrainDecoder, {"config.model": DECODER}, ["*.query", "*layer_1*.mlp.down.kernel"], 3),
}
EMA = {"config.ema": {"decays": [0.5], "evaluate": True}}


def make_base_job(name: str, directory: Path, **changes: Any) -> BaseTrainer:
    job_class, model, _, _ = MODELS[name]
    return make_gpt(directory, job_class, **{"job": get_job_name(job_class)} | COMMON | model | changes)


def make_lora_job(name: str, directory: Path, base: Path, **changes: Any) -> BaseTrainer:
    rule = {"rank": 4, "alpha": 6.0, "targets": MODELS[name][2]}
    return make_base_job(name, directory, **{"checkpoint.init_from": str(base), "config.adapter": rule} | EMA | changes)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapter")


@pytest.fixture(
    scope="module", params=["lookup", *(pytest.param(name, marks=pytest.mark.soak) for name in ("stacked", "unrolled"))]
)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(parent: Path, name: str) -> BaseTrainer:
    found = make_base_job(name, parent / f"{name}_base")
    found()
    return found


@pytest.fixture(scope="module")
def uninterrupted(parent: Path, name: str, base: BaseTrainer) -> BaseTrainer:
    found = make_lora_job(name, parent / f"{name}_whole", base.store.root)
    found()
    return found


def make_batch(job: BaseTrainer, num_steps: int = 1) -> dict[str, jax.Array]:
    """Return a batch (S, B, T) of 16 examples, in which some targets are padding."""
    shape = (num_steps, 16 // num_steps, 8)
    x = jax.random.randint(jax.random.key(3), shape, 0, job.vocabulary_size)
    return {"x": x, "y": jnp.roll(x, 1, axis=-1), "padding_mask": x % 5 > 0}


def init_state_with_base(job: BaseTrainer, base: BaseTrainer) -> Any:
    """Return the initial state with the weights of the base."""
    job.setup(Hosts.single_process())
    return replace_base(job.train_setup.init_state(), get_model_weights(base.state))


def randomise_adapter(state: Any) -> Any:
    draw = lambda leaf: 0.1 * jax.random.normal(jax.random.key(leaf.size), leaf.shape)  # noqa: E731
    return state.replace(params=jax.tree.map(draw, state.params))


def test_every_matrix_has_its_own_adapter_that_starts_as_zero(name, base, parent):
    job = make_lora_job(name, parent / f"{name}_start", base.store.root)
    state = init_state_with_base(job, base)
    leaves = flatten_with_names(state.params)
    assert len(leaves) == 2 * MODELS[name][3]
    own = flatten_with_names(state.variables["base"])
    for leaf, matrix in leaves.items():
        weight, which = own[leaf.rpartition(".")[0]], leaf.rpartition(".")[2]
        *stack, rows, columns = weight.shape
        assert matrix.shape == ((*stack, rows, 4) if which == "lora_a" else (*stack, 4, columns))
        assert bool(jnp.any(matrix)) == (which == "lora_a")
        if which == "lora_a":
            assert float(jnp.abs(matrix).max()) <= rows**-0.5
    assert are_leaves_equal(get_model_weights(state), get_model_weights(base.state))
    batch = make_batch(job)
    ours, theirs = jax.jit(job.val_step)(state, batch), jax.jit(base.val_step)(base.state, batch)
    assert float(ours[0]) == pytest.approx(float(theirs[0]), rel=1e-6)


def test_merged_and_unmerged_weights_have_the_same_loss(name, base, parent):
    state = randomise_adapter(
        init_state_with_base(make_lora_job(name, parent / f"{name}_start", base.store.root), base)
    )
    val_step, batch = jax.jit(base.val_step), make_batch(base)
    unmerged, merged, untouched = (val_step(each, batch)[0] for each in (state, get_model_state(state), base.state))
    assert float(unmerged) == pytest.approx(float(merged), rel=1e-5)
    assert abs(float(unmerged) - float(untouched)) > 1e-2


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_three_steps_match_a_numpy_reference(name, base, parent, num_steps):
    """Compare with NumPy, from the gradient of the base model at the merged weights: dA = s dW B', dB = s A' dW."""
    plain_sgd = {"name": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
    job = make_lora_job(
        name, parent / f"{name}_hand", base.store.root, **{"config.optimizer": plain_sgd, "config.ema": None}
    )
    state = randomise_adapter(init_state_with_base(job, base))
    batch, scale = make_batch(job, num_steps), 6.0 / 4
    flat = jax.tree.map(lambda leaf: leaf.reshape(1, 16, 8), batch)

    def loss(params: Any) -> jax.Array:
        total, count, _ = base.val_step(base.state.replace(params=params), flat)
        return total / count

    expected = {leaf: np.asarray(matrix, np.float64) for leaf, matrix in flatten_with_names(state.params).items()}
    weights = {leaf: np.asarray(own, np.float64) for leaf, own in flatten_with_names(base.state.params).items()}
    gradient, step = jax.jit(jax.grad(loss)), jax.jit(job.train_step, static_argnums=3)
    for number in range(3):
        now = dict(weights)
        for a in [leaf for leaf in expected if leaf.endswith("lora_a")]:
            target, b = a.removesuffix(".lora_a"), a.removesuffix("a") + "b"
            now[target] = weights[target] + scale * expected[a] @ expected[b]
        leaves = [now[leaf].astype(np.float32) for leaf in flatten_with_names(base.state.params)]
        grads = flatten_with_names(gradient(jax.tree.unflatten(jax.tree.structure(base.state.params), leaves)))
        for a in [leaf for leaf in expected if leaf.endswith("lora_a")]:
            target, b = a.removesuffix(".lora_a"), a.removesuffix("a") + "b"
            dw = np.asarray(grads[target], np.float64)
            da, db = scale * dw @ np.swapaxes(expected[b], -1, -2), scale * np.swapaxes(expected[a], -1, -2) @ dw
            expected[a], expected[b] = expected[a] - 0.5 * da, expected[b] - 0.5 * db
        state, _, meta = step(state, batch, jax.random.key(number), num_steps)
    for leaf, matrix in flatten_with_names(state.params).items():
        np.testing.assert_allclose(matrix, expected[leaf], rtol=1e-4, atol=1e-5)
    assert float(meta["grad_norm"]) > 0


def test_the_base_stays_unchanged_and_has_no_moments(uninterrupted, base):
    assert are_leaves_equal(uninterrupted.state.variables["base"], base.state.params)
    size = sum(leaf.size for leaf in jax.tree.leaves(uninterrupted.state.params))
    moments = sum(leaf.size for leaf in jax.tree.leaves(uninterrupted.state.opt_state) if leaf.ndim)
    assert moments == 2 * size < sum(leaf.size for leaf in jax.tree.leaves(base.state.params))
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(uninterrupted.state.params))


def test_resumed_run_is_bit_identical(name, uninterrupted, base, parent):
    first = make_lora_job(name, parent / f"{name}_resumed", base.store.root)
    stop_after(first, STOP + 1)
    again = make_lora_job(name, parent / f"{name}_resumed", base.store.root)
    again()
    assert are_leaves_equal(again.state, uninterrupted.state)


def test_sharded_run_equals_the_unsharded_run(name, uninterrupted, base, parent):
    cut = make_lora_job(name, parent / f"{name}_cut", base.store.root, **make_mesh_options(2, 2, 2))
    cut()
    assert all("fsdp" in str(leaf.sharding.spec) for leaf in jax.tree.leaves(cut.state.params))
    for leaf, matrix in flatten_with_names(cut.state.params).items():
        np.testing.assert_allclose(matrix, flatten_with_names(uninterrupted.state.params)[leaf], rtol=1e-3, atol=1e-4)
    like = get_model_weights(cut.train_setup.abstract_state)
    opened, _ = open_checkpoint(uninterrupted.store.root / "checkpoints" / str(STEPS), like=like)
    expected = flatten_with_names(get_model_weights(uninterrupted.state))
    for leaf, found in flatten_with_names(opened).items():
        assert found.sharding == flatten_with_names(like)[leaf].sharding
        np.testing.assert_allclose(found, expected[leaf], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weights", ["params", "ema_0.5"])
def test_readers_see_merged_weights(uninterrupted, weights):
    seen = get_model_weights(uninterrupted.state)["params"]
    if weights != "params":
        seen = get_model_weights(uninterrupted.state.replace(params=uninterrupted.state.riders["ema"]["0.5"]))["params"]
    opened, _ = open_checkpoint(uninterrupted.store.root, weights=weights)
    assert "variables" not in opened
    assert flatten_with_names(opened["params"]).keys() == flatten_with_names(seen).keys()
    for leaf, found in flatten_with_names(opened["params"]).items():
        np.testing.assert_allclose(found, flatten_with_names(seen)[leaf], rtol=1e-6, atol=1e-7)
    row = parse_lines(uninterrupted.store.read("metrics.jsonl"))[-1]
    scored = next(
        iter(
            evaluate(
                open_run(str(uninterrupted.store.root), trust=["tests"]),
                EvaluationRequest(weights=weights),
                Hosts.single_process(),
            )
        )
    )
    key = "val/loss" if weights == "params" else f"val/{weights}/loss"
    assert scored["loss"] == pytest.approx(row[key], rel=1e-6)
    pieces = sample(
        open_run(str(uninterrupted.store.root), trust=["tests"]), SampleRequest("1 ", num_tokens=3, weights=weights)
    )
    assert "".join(pieces).startswith("1 ")


# Validation.

ADAPTER: dict[str, Any] = {"targets": ["blocks.query"]}
INVALID_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no base": ({"checkpoint.init_from": None}, "config.adapter: an adapter is trained beside .* set checkpoint.init_"),
    "nothing fits": (
        {"config.adapter": {"targets": ["blocks.qery"]}},
        "'blocks.qery' matches no .* blocks.query.kernel",
    ),
    "one of two": (
        {"config.adapter": {"targets": ["blocks.query", "x"]}},
        "'x' matches no parameter; the matrices",
    ),
    "no matrix": (
        {"config.adapter": {"targets": ["*.bias"]}},
        r"bias. fits blocks.* no matrix: .* needs matrices, such as",
    ),
    "a norm": (
        {"config.adapter": {"targets": ["final_norm"]}},
        "'final_norm' fits final_norm.bias, which is no matrix",
    ),
    "rank 0": ({"config.adapter": ADAPTER | {"rank": 0}}, "config.adapter.rank"),
    "alpha 0": ({"config.adapter": ADAPTER | {"alpha": 0.0}}, "config.adapter.alpha"),
    "no targets": ({"config.adapter": {"targets": []}}, "config.adapter.targets"),
    "a name of PEFT's": ({"config.adapter": ADAPTER | {"lora_alpha": 8.0}}, "lora_alpha.* alpha"),
    "rounding": ({"config.precision": {"params": "bfloat16", "rounding": "stochastic"}}, "an adapter is float32"),
    "a base that is not there": ({"checkpoint.init_from": "nowhere/at/all"}, "checkpoint.init_from.*nowhere"),
}


@pytest.mark.parametrize("case", INVALID_CONFIGS)
def test_invalid_adapters_are_rejected_in_one_line(case, tmp_path):
    changes, message = INVALID_CONFIGS[case]
    beside = {"checkpoint.init_from": str(tmp_path / "base"), "config.adapter": ADAPTER}
    document = make_gpt_document(tmp_path / "run", **COMMON | {"config.model": SIZES} | beside | changes)

    def begin() -> None:
        PretrainGPT(ExecutionSpec.model_validate(document)).setup(Hosts.single_process())

    with pytest.raises(InvalidError, match=message) as error:  # exit code 2
        begin()
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_another_base_is_rejected_and_a_deleted_base_is_not_needed(tmp_path):
    first = make_base_job("lookup", tmp_path / "first")
    first()
    other = make_base_job("lookup", tmp_path / "other", seed=1)
    other()

    def job(base: Path) -> BaseTrainer:
        return make_lora_job("lookup", tmp_path / "run", base)

    begun = job(tmp_path / "first")
    stop_after(begun, STOP)
    for another in (tmp_path / "other", tmp_path / "other" / "checkpoints" / str(STEPS)):
        with pytest.raises(InvalidError, match=f"{ADAPTER_BASE}: .* has 'run .*', the spec 'run "):
            job(another)()
    with pytest.raises(InvalidError, match="is of a run with an adapter; export it"):
        make_lora_job("lookup", tmp_path / "second", tmp_path / "run")()
    shutil.move(tmp_path / "first", tmp_path / "moved")
    stop_after(job(tmp_path / "moved"), STOP + 1)
    shutil.rmtree(tmp_path / "moved")
    last = job(tmp_path / "first")
    last()
    manifest = json.loads((tmp_path / "run" / "checkpoints" / str(STEPS) / "manifest.json").read_text())
    assert manifest["identity"][ADAPTER_BASE] == begun.setup_builder.base_identity[ADAPTER_BASE]


def test_a_bfloat16_base_has_a_float32_adapter(tmp_path):
    types = {"config.precision": {"params": "bfloat16", "compute": "float32"}}
    job = make_lora_job("stacked", tmp_path / "run", tmp_path / "base", **types | make_mesh_options(2, 2, 2))
    abstract = job.setup_builder.build(jax.devices()).abstract_state
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract.params)} == {jnp.dtype("float32")}
    assert {leaf.dtype for leaf in jax.tree.leaves(abstract.variables["base"])} == {jnp.dtype("bfloat16")}
    query = abstract.params["blocks"]["query"]["kernel"]
    assert query["lora_a"].sharding.spec == PartitionSpec(None, STATE_AXES, None)  # like embed and heads of the base
    assert query["lora_b"].sharding.spec == PartitionSpec(
        None, None, ("tensor", "fsdp")
    )  # also over fsdp, where it divides
    for leaf in jax.tree.leaves((abstract.params, abstract.variables, abstract.opt_state)):
        assert leaf.ndim == 0 or "fsdp" in str(leaf.sharding.spec)
