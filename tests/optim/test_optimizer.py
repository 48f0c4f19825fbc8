"""Optimizers by name, against values computed by hand, and the config keys that each reads."""

import math
from dataclasses import replace
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runner.config import ModelConfig, TrainerConfig
from runner.errors import InvalidError
from runner.optim.config import OPTIMIZERS, READERS, SCHEDULES, OptimizerConfig, ScheduleConfig
from runner.optim.groups import Parameter
from runner.optim.library import make_optimizer, update_in_float32
from runner.optim.transforms import compute_gradient_point
from runner.train.optimizer import SPEC, choose_optimizer
from tests.support.tiny_jobs import are_leaves_equal, make_gpt, merge

TOTAL = 100
NAMES = get_args(OptimizerConfig.model_fields["name"].annotation)
SMALL = {"galore": {"rank": 1, "projection_every_steps": 2}}  # for matrices of two rows and columns


def make_config(name, **config):
    return OptimizerConfig(name=name, **SMALL.get(name, {}) | config)


PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [3.0, 4.0]]), "bias": jnp.asarray([5.0, -6.0])}
PARAMETERS = {"kernel": Parameter("kernel", (2, 2), (None, None)), "bias": Parameter("bias", (2,), (None,))}


def run_steps(name, grads, *, rate=0.1, steps=1, **config):
    """Return the parameters after some steps with the same, unclipped gradient."""
    config = make_config(name, learning_rate=rate, clip_norm=None, **config)
    tx = make_optimizer(name, config, optax.constant_schedule(rate), PARAMETERS)
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
GRADS = {"kernel": jnp.asarray([[0.5, -0.5], [2.0, 1e-3]]), "bias": jnp.asarray([-1.0, 3.0])}


# The moments of adam include the decay, which their sign hides, and the matrices of muonh do not decay.
DECOUPLED = [name for name in NAMES if name not in ("adam", "muonh")]


@pytest.mark.daily(3)
@pytest.mark.parametrize("rate", [0.1, pytest.param(1e-3, marks=pytest.mark.soak)])
@pytest.mark.parametrize("name", DECOUPLED)
def test_only_matrices_decay_and_by_the_learning_rate(name, rate):
    params = run_steps(name, ZEROS, rate=rate, weight_decay=0.25)
    np.testing.assert_allclose(params["kernel"], PARAMS["kernel"] * (1 - rate * 0.25), rtol=1e-6)
    assert (params["bias"] == PARAMS["bias"]).all()


def make_test_optimizer(name, **config):
    """Return the optimizer with a learning rate of 0.1 times the step."""
    config = make_config(name, learning_rate=1.0, clip_norm=None, **config)
    return make_optimizer(name, config, lambda step: 0.1 * step, PARAMETERS)


@pytest.mark.parametrize("name", DECOUPLED)
def test_decay_uses_the_current_rate_and_adds_no_state(name):
    tx = make_test_optimizer(name, weight_decay=0.25)
    state = tx.init(PARAMS)
    assert [path for path, _ in list_leaves(state)] == [
        path for path, _ in list_leaves(make_test_optimizer(name, weight_decay=0.0).init(PARAMS))
    ]
    updates, state = tx.update(ZEROS, state, PARAMS)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
    updates, _ = tx.update(ZEROS, state, PARAMS)
    first = 0.9 if name == "sgd" else 0.0  # momentum adds the decay of the previous step again
    np.testing.assert_allclose(updates["kernel"], -PARAMS["kernel"] * 0.1 * 0.25 * (1 + first), rtol=1e-6)
    assert (updates["bias"] == 0).all()


NARROW = jax.tree.map(lambda leaf: (leaf / 3).astype(jnp.bfloat16), PARAMS)


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_parameters_are_updated_in_float32(name):
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), NARROW)
    tx = make_test_optimizer(name)
    narrow_state, wide_state = update_in_float32(tx).init(NARROW), tx.init(wide)
    narrow, kinds = NARROW, list_dtypes(narrow_state)
    assert kinds == list_dtypes(wide_state)
    for _ in range(3):
        updates, narrow_state = update_in_float32(tx).update(GRADS, narrow_state, narrow)
        expected, wide_state = tx.update(GRADS, wide_state, wide)
        assert list_dtypes(updates) == list_dtypes(wide)
        assert list_dtypes(narrow_state) == kinds
        assert are_leaves_equal((updates, narrow_state), (expected, wide_state))
        narrow = optax.apply_updates(narrow, updates)
        assert are_leaves_equal(narrow, jax.tree.map(lambda p, u: (p + u).astype(jnp.bfloat16), wide, updates))
        wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), narrow)


@pytest.mark.parametrize("param", [1.0, -1.0, 1.2578125, 1.9921875, 3e-5])
@pytest.mark.parametrize("sign", [1, -1])
def test_small_updates_of_bfloat16_parameters_are_lost(param, sign):
    param = jnp.bfloat16(param)
    for share, is_lost in ((1 / 513, True), (1 / 255, False)):
        update = jnp.float32(sign * share) * param.astype(jnp.float32)
        assert bool(optax.apply_updates(param, update) == param) == is_lost


def list_dtypes(tree):
    return [(path, leaf.shape, leaf.dtype) for path, leaf in list_leaves(tree)]


def test_the_first_step_of_adamw_is_the_sign_of_the_gradient():
    params = run_steps("adamw", GRADS, weight_decay=0.0)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], PARAMS[name] - 0.1 * np.sign(GRADS[name]), rtol=1e-4)


def test_adamw_uses_the_betas_and_eps_of_the_spec():
    b1, b2, eps, g = 0.8, 0.9, 0.5, 2.0
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, g), PARAMS)
    grads_then = jax.tree.map(jnp.negative, grads)
    config = OptimizerConfig(learning_rate=0.1, b1=b1, b2=b2, eps=eps, weight_decay=0.0, clip_norm=None)
    tx = make_optimizer("adamw", config, optax.constant_schedule(0.1), PARAMETERS)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    updates, _ = tx.update(grads_then, state, PARAMS)
    m = (b1 * (1 - b1) * g - (1 - b1) * g) / (1 - b1**2)
    v = (b2 * (1 - b2) * g**2 + (1 - b2) * g**2) / (1 - b2**2)
    np.testing.assert_allclose(updates["bias"], [-0.1 * m / (math.sqrt(v) + eps)] * 2, rtol=1e-5)


def test_lion_steps_by_the_sign():
    params = run_steps("lion", GRADS, weight_decay=0.0)
    np.testing.assert_allclose(params["bias"], PARAMS["bias"] - 0.1 * np.sign(GRADS["bias"]), rtol=1e-6)


def test_sgd_follows_the_gradient_with_momentum():
    params = run_steps("sgd", GRADS, weight_decay=0.0, momentum=0.5, steps=2)
    np.testing.assert_allclose(params["bias"], PARAMS["bias"] - 0.1 * GRADS["bias"] * (1 + 1.5), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_reads_the_schedule(name):
    schedule = optax.piecewise_constant_schedule(0.0, {})
    tx = make_optimizer(name, make_config(name, learning_rate=1.0), schedule, PARAMETERS)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))


def test_clipping_scales_the_whole_gradient_and_null_does_not_clip():
    grads = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 4.0)}
    norm = math.sqrt(4 * 9 + 2 * 16)
    for clip_norm, scale in ((1.0, 1 / norm), (100.0, 1.0), (None, 1.0)):
        config = OptimizerConfig(name="sgd", weight_decay=0.0, momentum=0.0, clip_norm=clip_norm)
        tx = make_optimizer("sgd", config, optax.constant_schedule(1.0), PARAMETERS)
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates["kernel"], -3.0 * scale * np.ones((2, 2)), rtol=1e-6)
        np.testing.assert_allclose(updates["bias"], -4.0 * scale * np.ones(2), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "adamw" else pytest.mark.soak) for name in DECOUPLED]
)
def test_biases_and_norms_of_stacked_layers_do_not_decay(name, tmp_path):
    """Stacked biases and norms have two axes like matrices, but their names distinguish them."""
    changes = {"config.optimizer.name": name, "config.optimizer.weight_decay": 0.5, "config.schedule.name": "constant"}
    changes |= {"config.schedule.warmup_steps": 0, "config.schedule.final_learning_rate": 0.0}
    abstract = make_gpt(tmp_path / "run", **changes).setup_builder.build(jax.devices()).abstract_state
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract.params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates = jax.jit(lambda zeros, params: abstract.tx.update(zeros, abstract.tx.init(params), params)[0])(
        zeros, params
    )
    decayed = {jax.tree_util.keystr(path): bool((leaf < 0).all()) for path, leaf in list_leaves(updates)}
    still = {jax.tree_util.keystr(path): bool((leaf == 0).all()) for path, leaf in list_leaves(updates)}
    stacked_vectors = [path for path, leaf in list_leaves(params) if "blocks" in str(path) and leaf.ndim == 2]
    assert len(stacked_vectors) >= 8
    for path in decayed:
        is_matrix = "kernel" in path or "embedding" in path or "positions" in path
        assert (decayed[path], still[path]) == (is_matrix, not is_matrix), path


def list_leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


# Config keys read by each name.

OTHER_VALUES = {
    "optimizer.learning_rate": 0.5,
    "optimizer.b1": 0.5,
    "optimizer.b2": 0.5,
    "optimizer.eps": 0.1,
    "optimizer.momentum": 0.5,
    "optimizer.weight_decay": 0.5,
    "optimizer.clip_norm": 0.1,
    "optimizer.moments": "bfloat16",
    "optimizer.matrices": ["other"],
    "optimizer.rank": 2,
    "optimizer.projection_every_steps": 3,
    "optimizer.projection_scale": 0.5,
    "optimizer.groups": [{"pattern": "kernel", "rate": 0.5}],
    "schedule.warmup_steps": 20,
    "schedule.final_learning_rate": 0.01,
    "schedule.warmup_share": 0.2,
    "schedule.decay_steps": 30,
    "schedule.power": 2.0,
    "schedule.cycles": 3,
}
CHOICES = [("optimizer", name) for name in NAMES] + [("schedule", name) for name in SCHEDULES]
KEYS = [f"optimizer.{key}" for key in OptimizerConfig.model_fields if key != "name"]
KEYS += [f"schedule.{key}" for key in ScheduleConfig.model_fields if key != "name"]


def make_full_config(section, name, **changes):
    """Return a config whose `section` has this name; `changes` are dotted keys."""
    data = {
        "model": {},
        "data": {"sequence_length": 8},
        "optimizer": {"learning_rate": 0.1},
        "schedule": {"name": "constant"},
        "train": {"total_steps": TOTAL, "global_batch_examples": 1},
    }
    data[section] |= {"name": name} | SMALL.get(name, {})
    if name == "wsd":
        data[section]["decay_steps"] = 20
    if name == "inverse_square_root" and "schedule.warmup_share" not in changes:
        data[section]["warmup_steps"] = 10
    return TrainerConfig[ModelConfig].model_validate(merge(data, changes))


def make_optimizer_spec(config):
    return choose_optimizer(SPEC, SPEC, config)


def describe_program(config):
    """Return the learning rates of a run, and the jaxpr of its update with all constants."""
    schedule = make_optimizer_spec(config).build_schedule(config)
    both = {name: replace(PARAMETERS["kernel"], name=name) for name in ("kernel", "other")}
    # Only the table has weight decay with muonh.
    table = Parameter("table", (2, 2), ("vocab", None))
    others = {"bias": PARAMETERS["bias"], "table": table}
    tx = make_optimizer_spec(config).build_optimizer(config, schedule, both | others)

    def step(params, state):
        point = compute_gradient_point(params, state)
        return tx.update(jax.tree.map(jnp.sin, point), state, params)

    params = PARAMS | {"other": PARAMS["kernel"], "table": PARAMS["kernel"]}
    return np.asarray(schedule(jnp.arange(TOTAL))).tolist(), str(jax.make_jaxpr(step)(params, tx.init(params)))


def test_every_key_has_another_value_in_the_table():
    assert set(OTHER_VALUES) == set(KEYS)


@pytest.mark.daily(6)
@pytest.mark.parametrize(("section", "name"), CHOICES)
def test_a_key_changes_its_readers_and_is_rejected_for_others(section, name):
    usual, unread = describe_program(make_full_config(section, name)), {}
    for key in (key for key in KEYS if key.startswith(section)):
        config = make_full_config(section, name, **{key: OTHER_VALUES[key]})
        is_read = name in READERS.get(key, (name,))
        assert list(make_optimizer_spec(config).find_problems(config)) == ([] if is_read else [key])
        if is_read:
            assert describe_program(config) != usual, key
        else:
            unread[key] = OTHER_VALUES[key]
    assert describe_program(make_full_config(section, name, **unread)) == usual


def test_every_name_has_a_table_entry_with_a_source():
    assert set(OPTIMIZERS) == set(NAMES)
    assert set(SCHEDULES) == set(get_args(ScheduleConfig.model_fields["name"].annotation))
    assert all(published.source for published in (*OPTIMIZERS.values(), *SCHEDULES.values()))
    for name, published in OPTIMIZERS.items():
        assert {key: getattr(OptimizerConfig(name=name), key) for key in published.defaults} == published.defaults


def test_the_defaults_of_the_first_version_are_unchanged():
    old = {"b1": 0.9, "b2": 0.95, "eps": 1e-8, "momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.0}
    for name in ("adamw", "lion", "sgd", "adafactor"):
        config = OptimizerConfig(name=name)
        assert {key: getattr(config, key) for key in old} == old


def test_the_reference_names_the_readers_of_a_key():
    for key, readers in READERS.items():
        section, _, name = key.partition(".")
        model = {"optimizer": OptimizerConfig, "schedule": ScheduleConfig}[section]
        assert model.model_fields[name].description.endswith(f"({', '.join(readers)}).")


def test_defaults_and_keys_of_an_own_optimizer_are_accepted():
    config = make_full_config("optimizer", "sgd", **{"optimizer.b1": 0.9})
    assert make_optimizer_spec(config).find_problems(config) == {}
    config = make_full_config("optimizer", "sgd", **{"optimizer.b1": 0.5, "optimizer.learning_rate": None})
    assert choose_optimizer(optax.sgd(0.1), SPEC, config).find_problems(config) == {}
    assert set(choose_optimizer("lion", SPEC, config).find_problems(config)) == {"optimizer", "optimizer.name"}
    assert set(make_optimizer_spec(config).find_problems(config)) == {"optimizer", "optimizer.b1"}


def test_without_a_schedule_the_rate_is_constant():
    config = make_full_config("schedule", "cosine", **{"schedule.warmup_steps": 1})
    constant = choose_optimizer(SPEC, None, make_full_config("schedule", "constant"))
    rates = [float(constant.build_schedule(config)(step)) for step in (1, 50, 99)]
    assert rates == pytest.approx([0.1] * 3)
    assert float(make_optimizer_spec(config).build_schedule(config)(99)) < 0.001


def test_an_optax_optimizer_of_the_job_is_used_unchanged():
    config, own, rate = make_full_config("optimizer", "sgd"), optax.sgd(0.1), optax.constant_schedule(0.5)
    assert choose_optimizer(own, SPEC, config).build_optimizer(config, None, PARAMETERS) is own
    assert choose_optimizer(own, SPEC, config).build_schedule(config) is None
    assert choose_optimizer(own, rate, config).build_schedule(config) is rate


@pytest.mark.parametrize(("optimizer", "schedule"), [("adamm", SPEC), (SPEC, "cosin"), (None, SPEC)])
def test_an_invalid_name_is_rejected(optimizer, schedule):
    with pytest.raises(InvalidError, match=r"(optimizer|schedule)\(\) of the job .* needs one of"):
        choose_optimizer(optimizer, schedule, make_full_config("optimizer", "adamw"))
