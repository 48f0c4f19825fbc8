"""The model of `.github/docs/model.md` supports every feature with only the code of that page.

Shape legend: T sequence.
"""

import importlib.util
import re
import shutil
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import yaml

from runner import BaseTrainer, ExecutionSpec
from runner.config import MemoryConfig
from runner.parallel.mesh import STATE_AXES
from runner.storage import read_json, read_log
from runner.train.flops import compute_transformer_flops, count_train_flops
from tests.experiments.test_documents import (
    LENGTHS,
    VOCABULARY,
    T,
    assert_close,
    make_documents,
    make_single_document_batch,
    pack_documents,
)
from tests.support.tiny_jobs import FACTORISATIONS, ROOT, TEXT, make_mesh_options, merge, read_trajectory

SOAK = pytest.mark.soak
PAGE = (ROOT / ".github" / "docs" / "model.md").read_text()
TYPES = {"param_dtype": "float32", "compute_dtype": "float32"}
SAVED, STEPS = 2, 4
# A step subtracts exactly the gradient.
SGD = {"name": "sgd", "learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0, "clip_norm": None}
KEPT_OPTIONS = [("none", None), ("dots", None), ("layers", None), ("layers", 32)]  # memory options of layers and loss


def read_page_file(name):
    """Return the content of a file that the page writes."""
    (text,) = re.findall(rf"^cat > {re.escape(name)} <<'END'\n(.*?)^END$", PAGE, re.DOTALL | re.MULTILINE)
    return text


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Module of the page, imported from the file that the page writes."""
    path = tmp_path_factory.mktemp("page") / "parallel.py"
    path.write_text(read_page_file("parallel.py"))
    spec = importlib.util.spec_from_file_location("parallel", path)
    module = sys.modules["parallel"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["parallel"]


@pytest.fixture(scope="module")
def make_job(page, tmp_path_factory):
    """Factory of jobs with the page's spec, another text and fewer steps; `changes` are dotted keys."""
    directory = tmp_path_factory.mktemp("jobs")
    text = directory / "text.txt"
    text.write_text(TEXT)
    little = {
        "config.data.source": str(text),
        "config.data.validation_fraction": 0,
        "config.train.total_steps": STEPS,
        "checkpoint.every_steps": SAVED,
        "logging.every_steps": 1,
    }

    def make(name, **changes):
        document = merge(
            yaml.safe_load(read_page_file("parallel.yaml")), little | {"directory": str(directory / name)} | changes
        )
        return page.PretrainParallel(ExecutionSpec.model_validate(document))

    return make


@pytest.fixture(scope="module")
def uninterrupted(make_job):
    """Finished run with the memory options of the page, on a mesh of three axes."""
    job = make_job("undisturbed", **make_mesh_options(2, 2, 2))
    job()
    return job


@pytest.mark.soak
def test_a_resumed_run_has_the_same_bits(uninterrupted, make_job):
    root = shutil.copytree(uninterrupted.store.root, uninterrupted.store.root.parent / "again")
    *_, last = sorted((root / "checkpoints").iterdir())
    shutil.rmtree(last)
    (root / "result.json").unlink()
    again = make_job("again", **make_mesh_options(2, 2, 2))
    again()
    resumed = next(event for event in read_log(again.store, "events") if event["event"] == "restore")
    assert resumed["step"] == SAVED
    assert [row["step"] for row in read_trajectory(again.store.root)] == list(range(1, STEPS + 1))
    assert read_trajectory(again.store.root) == read_trajectory(uninterrupted.store.root)
    assert read_json(again.store, "result.json") == read_json(uninterrupted.store, "result.json")


@SOAK
def test_a_sharded_step_has_the_loss_of_one_device(uninterrupted, make_job):
    """Compare with the loss and gradient norm of the default `forward`, which uses logits."""
    job = make_job("one", **{"config.memory": {}})
    batch = {
        name: leaf.reshape(-1, leaf.shape[-1]) for name, leaf in jax.device_get(uninterrupted.batch(step=0)).items()
    }
    loss = make_loss(BaseTrainer.forward, job.model())
    params = jax.device_get(uninterrupted.train_setup.init_state().params)
    loss_sum, gradients = jax.jit(jax.value_and_grad(loss))(params, batch | {"example": np.arange(len(batch["x"]))})
    count = batch["padding_mask"].sum()
    first = read_trajectory(uninterrupted.store.root)[0]
    assert first["train/loss"] == pytest.approx(float(loss_sum / count), abs=1e-5)
    assert first["train/grad_norm"] == pytest.approx(float(optax.tree.norm(gradients) / count), rel=1e-4)


def take_first_step(job, devices):
    """Return the loss of the first step on these devices, and the parameters before and after it."""
    train_setup = job.setup_builder.build(devices)
    compiled = job.setup_builder.compile(train_setup, 1 << 30)
    state = train_setup.init_state()
    before = jax.device_get(state.params)
    batch = compiled.layout.batch(job.dataset, "train", 0)
    state, loss, _ = compiled.executable(state, batch, train_setup.key)
    return float(loss), before, jax.device_get(state.params)


@pytest.fixture(scope="module")
def single_device_step(make_job):
    return take_first_step(make_job("one", **{"config.optimizer": SGD}), jax.devices()[:1])


@SOAK
@pytest.mark.parametrize("mesh", FACTORISATIONS)
def test_loss_and_gradients_on_many_devices_equal_one(mesh, make_job, single_device_step):
    expected, before, after = single_device_step
    # Half as many key heads as query heads, so that eight devices may share them.
    loss, same_before, sharded_after = take_first_step(
        make_job("many", **{"config.optimizer": SGD}, **make_mesh_options(*mesh)), jax.devices()
    )
    assert loss == pytest.approx(expected, abs=1e-5)
    gradients, sharded = (
        jax.tree.map(np.subtract, first, second) for first, second in ((before, after), (same_before, sharded_after))
    )
    for got, want in zip(jax.tree.leaves(sharded), jax.tree.leaves(gradients), strict=True):
        assert np.abs(want).max() > 0
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


def test_every_matrix_is_sharded_by_its_names(make_job):
    train_setup = make_job("names", **make_mesh_options(2, 2, 2)).setup_builder.build(jax.devices())
    shardings = train_setup.abstract_state.params
    specs = {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.sharding.spec)
        for path, leaf in jax.tree_util.tree_leaves_with_path(shardings)
    }
    assert specs["embedding"] == ("tensor", STATE_AXES)
    assert specs["layers.query.kernel"] == specs["layers.mlp.up.kernel"] == (None, STATE_AXES, "tensor")
    assert specs["layers.out.kernel"] == specs["layers.mlp.down.kernel"] == (None, "tensor", STATE_AXES)


def test_counted_flops_equal_the_formula(make_job):
    job = make_job("flops")
    model, length = job.config.model, job.config.data.sequence_length
    width, keys = model.width, model.width * model.key_value_heads // model.heads
    expected = compute_transformer_flops(
        layers=model.layers,
        layer_parameters=2 * width**2 + 2 * width * keys + 3 * width * model.mlp_width,
        output_parameters=job.vocabulary_size * width,
        attention_width=width,
        attended_keys=length,  # such short sequences have a single block with all keys
    )
    found = job.flops_per_token(job.setup_builder.build(jax.devices()))
    assert found.per_token == pytest.approx(expected.per_token, rel=1e-6)
    all_kept = make_job("kept", **{"config.memory": {}})
    assert (
        found.recomputed_per_token
        > all_kept.flops_per_token(all_kept.setup_builder.build(jax.devices())).recomputed_per_token
    )


# The model: memory options and packed documents.


def make_model(page, remat="none", chunk=None):
    sizes = yaml.safe_load(read_page_file("parallel.yaml"))["config"]["model"]
    memory = MemoryConfig(remat=remat, loss_chunk_positions=chunk)
    return page.Parallel(page.ParallelConfig(**sizes), VOCABULARY, TYPES, memory)


def make_loss(forward, model):
    return lambda params, batch: forward(model.apply, params, batch, None)[0]


@pytest.fixture(scope="module")
def params(page):
    init = make_model(page).init
    return nn.unbox(
        jax.jit(lambda key: init(key, jnp.zeros((1, T), jnp.int32), deterministic=True))(jax.random.key(0))
    )["params"]


@pytest.fixture(scope="module")
def expected(page, params):
    """Loss and gradients from logits, with one document per sequence."""
    loss = make_loss(BaseTrainer.forward, make_model(page))
    batch = make_single_document_batch(make_documents(LENGTHS))
    return jax.jit(jax.value_and_grad(loss))(params, batch | {"example": np.arange(len(batch["x"]))})


@SOAK
@pytest.mark.parametrize(("remat", "chunk"), KEPT_OPTIONS)
def test_memory_options_and_packing_change_no_gradient(remat, chunk, page, params, expected):
    loss = make_loss(page.PretrainParallel.forward, make_model(page, remat, chunk))
    assert_close(jax.jit(jax.value_and_grad(loss))(params, pack_documents(make_documents(LENGTHS))), expected)


@SOAK
def test_saving_less_recomputes_more(page, params):
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        for name, leaf in pack_documents(make_documents(LENGTHS)).items()
    }
    again = [
        count_train_flops(
            make_loss(page.PretrainParallel.forward, make_model(page, *kept)),
            params,
            batch,
            num_tokens=batch["x"].size,
            platform="cpu",
        ).recomputed_per_token
        for kept in KEPT_OPTIONS
    ]
    assert again[:3] == sorted(set(again[:3]))
    assert again[3] == again[2], "a loss in chunks computes the gradient of its logits with itself"
