"""Optimizers and schedules by name, against values worked out by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from runner.config import OptimizerConfig, ScheduleConfig
from runner.hosts.agreement import Hosts
from runner.train.optimizer import clip, make_optimizer, make_schedule
from tests.support.tiny import gpt

PEAK, TOTAL = 1.0, 100
NAMES = ["adamw", "lion", "sgd", "adafactor"]


def rates(name, steps, **config):
    schedule = make_schedule(name, ScheduleConfig(name=name or "constant", **config), PEAK, TOTAL)
    return [float(schedule(step)) for step in steps]


def test_every_schedule_warms_up_linearly_from_zero():
    for name in ("constant", "linear", "cosine", "wsd"):
        config = {"decay_steps": 20} if name == "wsd" else {}
        assert rates(name, [0, 1, 5, 9, 10], warmup_steps=10, **config) == pytest.approx([0, 0.1, 0.5, 0.9, 1.0])


def test_constant_stays_and_no_name_is_constant():
    assert rates("constant", [0, 50, 100]) == [1.0] * 3
    assert rates(None, [0, 50, 100]) == [1.0] * 3


def test_linear_falls_evenly_to_its_end():
    assert rates("linear", [0, 25, 50, 100], final_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.2])


def test_cosine_falls_along_half_a_wave_to_its_end():
    halfway, quarter = 0.55, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4))
    actual = rates("cosine", [20, 40, 60, 100], warmup_steps=20, final_learning_rate=0.1)
    assert actual == pytest.approx([1.0, quarter, halfway, 0.1])


def test_wsd_holds_its_plateau_until_the_decay():
    config = {"warmup_steps": 10, "decay_steps": 20, "final_learning_rate": 0.1}
    actual = rates("wsd", [10, 50, 79, 80, 90, 100], **config)
    assert actual == pytest.approx([1.0, 1.0, 1.0, 1.0, 0.55, 0.1])


def test_schedules_stay_at_their_end():
    assert rates("linear", [101, 1000], final_learning_rate=0.2) == pytest.approx([0.2, 0.2])
    assert rates("cosine", [101, 1000], final_learning_rate=0.2) == pytest.approx([0.2, 0.2])


PARAMS = {"kernel": jnp.asarray([[1.0, -2.0], [3.0, 4.0]]), "bias": jnp.asarray([5.0, -6.0])}
IS_MATRIX = {"kernel": True, "bias": False}


def updated(name, grads, *, rate=0.1, steps=1, is_matrix=None, **config):
    """Parameters after some steps with the same gradient."""
    tx = make_optimizer(
        name,
        OptimizerConfig(name=name, learning_rate=rate, **config),
        optax.constant_schedule(rate),
        is_matrix or IS_MATRIX,
    )
    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


ZEROS = jax.tree.map(jnp.zeros_like, PARAMS)
GRADS = {"kernel": jnp.asarray([[0.5, -0.5], [2.0, 1e-3]]), "bias": jnp.asarray([-1.0, 3.0])}


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_a_zero_gradient_shows_that_only_matrices_decay(name):
    params = updated(name, ZEROS, weight_decay=0.25)
    np.testing.assert_allclose(params["kernel"], PARAMS["kernel"] * (1 - 0.1 * 0.25), rtol=1e-6)
    assert (params["bias"] == PARAMS["bias"]).all()


def test_adafactor_decays_only_matrices():
    params = updated("adafactor", ZEROS, weight_decay=0.25)
    assert (params["bias"] == PARAMS["bias"]).all()
    assert (abs(params["kernel"]) < abs(PARAMS["kernel"])).all()


def test_the_first_step_of_adamw_is_the_sign_of_the_gradient():
    params = updated("adamw", GRADS, weight_decay=0.0)
    for name in PARAMS:
        np.testing.assert_allclose(params[name], PARAMS[name] - 0.1 * np.sign(GRADS[name]), rtol=1e-4)


def test_adamw_uses_the_betas_and_eps_of_the_spec():
    b1, b2, eps, g = 0.8, 0.9, 0.5, 2.0
    grads = jax.tree.map(lambda leaf: jnp.full_like(leaf, g), PARAMS)
    grads_then = jax.tree.map(jnp.negative, grads)
    config = OptimizerConfig(learning_rate=0.1, b1=b1, b2=b2, eps=eps, weight_decay=0.0)
    tx = make_optimizer("adamw", config, optax.constant_schedule(0.1), IS_MATRIX)
    _, state = tx.update(grads, tx.init(PARAMS), PARAMS)
    updates, _ = tx.update(grads_then, state, PARAMS)
    m = (b1 * (1 - b1) * g - (1 - b1) * g) / (1 - b1**2)
    v = (b2 * (1 - b2) * g**2 + (1 - b2) * g**2) / (1 - b2**2)
    np.testing.assert_allclose(updates["bias"], [-0.1 * m / (math.sqrt(v) + eps)] * 2, rtol=1e-5)


def test_lion_steps_by_the_sign():
    params = updated("lion", GRADS, weight_decay=0.0)
    np.testing.assert_allclose(params["bias"], PARAMS["bias"] - 0.1 * np.sign(GRADS["bias"]), rtol=1e-6)


def test_sgd_follows_the_gradient_with_momentum():
    params = updated("sgd", GRADS, weight_decay=0.0, momentum=0.5, steps=2)
    np.testing.assert_allclose(params["bias"], PARAMS["bias"] - 0.1 * GRADS["bias"] * (1 + 1.5), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_takes_its_rate_from_the_schedule(name):
    schedule = optax.piecewise_constant_schedule(0.0, {})
    tx = make_optimizer(name, OptimizerConfig(name=name, learning_rate=1.0), schedule, IS_MATRIX)
    updates, _ = tx.update(GRADS, tx.init(PARAMS), PARAMS)
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates)) or name == "adafactor"


def test_clipping_scales_the_whole_gradient_and_null_does_not_clip():
    grads = {"kernel": jnp.full((2, 2), 3.0), "bias": jnp.full(2, 4.0)}
    norm = math.sqrt(4 * 9 + 2 * 16)
    for clip_norm, scale in ((1.0, 1 / norm), (100.0, 1.0), (None, 1.0)):
        tx = clip(optax.sgd(1.0), clip_norm)
        updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
        np.testing.assert_allclose(updates["kernel"], -3.0 * scale * np.ones((2, 2)), rtol=1e-6)
        np.testing.assert_allclose(updates["bias"], -4.0 * scale * np.ones(2), rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_biases_and_norms_of_stacked_layers_do_not_decay(name, tmp_path):
    """Stacked, they have two axes like a matrix; their names tell them apart."""
    changes = {"config.optimizer.name": name, "config.optimizer.weight_decay": 0.5, "config.schedule.name": "constant"}
    changes |= {"config.schedule.warmup_steps": 0, "config.schedule.final_learning_rate": 0.0}
    job = gpt(tmp_path / "run", **changes)
    job.setup(Hosts.alone())
    abstract = job.abstract_state()
    params = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), abstract.params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = abstract.tx.update(zeros, abstract.tx.init(params), params)
    decayed = {jax.tree_util.keystr(path): bool((leaf < 0).all()) for path, leaf in leaves(updates)}
    still = {jax.tree_util.keystr(path): bool((leaf == 0).all()) for path, leaf in leaves(updates)}
    stacked_vectors = [path for path, leaf in leaves(params) if "blocks" in str(path) and leaf.ndim == 2]
    assert len(stacked_vectors) >= 8
    for path in decayed:
        is_matrix = "kernel" in path or "embedding" in path or "positions" in path
        assert (decayed[path], still[path]) == (is_matrix, not is_matrix), path


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)
