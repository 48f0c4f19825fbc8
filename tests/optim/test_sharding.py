"""Optimizer state on a mesh: sharded like the parameters, with the steps of one device."""

import functools
from itertools import product

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.model import with_axes
from runner.data.packing import make_token_fields
from runner.optim.config import OPTIMIZERS, OptimizerConfig
from runner.optim.groups import Parameter, describe_parameters
from runner.optim.library import make_optimizer, update_in_float32
from runner.optim.muon import SphereState, keep_norms
from runner.optim.transforms import compute_gradient_point
from runner.parallel.mesh import make_mesh, use_sharding_rules
from runner.train.setup import build_train_setup
from runner.train.state import get_shardings, restart_averages, sharded_init
from tests.support.tiny_jobs import are_leaves_equal, make_gpt

SHAPES = {
    "wide": ((3, 8, 24), ("layers", "embed", "mlp")),
    "tall": ((24, 8), ("mlp", "embed")),
    "table": ((32, 8), ("vocab", "embed")),
    "scale": ((3, 8), ("layers", "embed")),
}
SHARDED_SIZE_MIN = 24  # elements; smaller parameters may stay replicated


class ParameterModel(nn.Module):
    @nn.compact
    def __call__(self, tokens, *, deterministic):
        init = nn.initializers.normal(0.5)
        return [self.param(name, with_axes(init, *axes), shape) for name, (shape, axes) in SHAPES.items()]


def make_train_setup(name, sizes, devices):
    keys = {"rank": 2, "projection_every_steps": 2} if name == "galore" else {}
    config = OptimizerConfig(name=name, learning_rate=0.1, **keys)
    make = functools.partial(make_optimizer, name, config, optax.constant_schedule(0.1))
    mesh = make_mesh(dict(zip(("data", "fsdp", "tensor"), sizes, strict=True)), devices)
    fields = make_token_fields({"x": np.int32}, 1)
    return build_train_setup(ParameterModel(), sharded_init, fields, make, None, mesh, jax.random.key(0))


def run_training(train_setup, steps=4):
    """Return the state after some steps, with leaves sharded like the abstract state."""
    state = train_setup.init_state()

    def step(state, noise):
        point = compute_gradient_point(state.params, state.opt_state)
        return state.apply_gradients(grads=jax.tree.map(jnp.add, point, noise))

    with use_sharding_rules(train_setup.mesh):
        step = jax.jit(step, out_shardings=get_shardings(train_setup.abstract_state))
        for number in range(steps):
            random = np.random.default_rng(number)
            noise = {name: random.normal(size=shape).astype(np.float32) for name, (shape, _) in SHAPES.items()}
            state = step(state, noise)
    return state


def find_norms(opt_state):
    """Return the norms by name that the state of muonh holds."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, SphereState))
    (found,) = [node for node in nodes if isinstance(node, SphereState)]
    return {name: norm for name, norm in found.norms.items() if not isinstance(norm, optax.MaskedNode)}


MESHES = [(1, 2, 1), (1, 2, 4)]
DAILY = [("muon", MESHES[0])]  # uses whole matrices, like galore; the others are element-wise
CASES = [pytest.param(*case, marks=() if case in DAILY else pytest.mark.soak) for case in product(OPTIMIZERS, MESHES)]


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=str)
def test_sharded_state_gives_the_steps_of_one_device(name, sizes):
    num = int(np.prod(sizes))
    train_setup = make_train_setup(name, sizes, jax.devices()[:num])
    cut, whole = run_training(train_setup), run_training(make_train_setup(name, (1, 1, 1), jax.devices()[:1]))
    for path, leaf in jax.tree_util.tree_leaves_with_path(cut.opt_state):
        assert leaf.size < SHARDED_SIZE_MIN or not leaf.sharding.is_fully_replicated, path
        key = jax.tree_util.keystr(path[-1:], simple=True)
        if key in SHAPES and leaf.shape == SHAPES[key][0]:
            assert leaf.sharding.is_equivalent_to(cut.params[key].sharding, leaf.ndim), path
    # Rounding rotates singular vectors: galore's values differ by 2e-4 on CPUs without AVX-512.
    rtol = 1e-3 if name == "galore" else 1e-4
    for found, expected in zip(jax.tree.leaves(cut), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-5)


def test_parameters_have_name_shape_and_axes():
    boxed = jax.eval_shape(lambda key: ParameterModel().init(key, None, deterministic=True), jax.random.key(0))[
        "params"
    ]
    assert describe_parameters(boxed) == {name: Parameter(name, shape, axes) for name, (shape, axes) in SHAPES.items()}
    plain = describe_parameters({"block": {"kernel": jax.ShapeDtypeStruct((2, 3), jnp.float32)}})
    assert plain == {"block": {"kernel": Parameter("block.kernel", (2, 3), (None, None))}}


def test_a_warm_start_moves_matrices_to_spheres_of_their_own_norms():
    train_setup = make_train_setup("muonh", (1, 2, 1), jax.devices()[:2])
    state = train_setup.init_state()
    params = jax.tree.map(lambda leaf: (2 * leaf).astype(jnp.bfloat16), state.params)
    begun = train_setup.restart_averages(state.replace(params=params))
    first, restarted = (find_norms(each.opt_state) for each in (state, begun))
    assert {*first} == {"tall", "wide"}
    for name, norm in restarted.items():
        np.testing.assert_allclose(norm, 2 * first[name], rtol=1e-2)
        np.testing.assert_allclose(norm, np.linalg.norm(params[name].astype(np.float32), axis=(-2, -1)), rtol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_matrices_keep_their_norms(dtype):
    """Rounding shrinks a matrix of bfloat16 a little in each step, so the norm of the last step is no radius."""
    tx = update_in_float32(keep_norms())
    start = jnp.asarray(np.random.default_rng(0).normal(size=(2, 32, 48)), dtype)

    @jax.jit
    def run(param):
        def step(number, carried):
            param, state = carried
            noise = jax.random.normal(jax.random.key(number), param.shape)
            update, state = tx.update(0.05 * noise / jnp.linalg.norm(noise, axis=(1, 2), keepdims=True), state, param)
            return (param.astype(jnp.float32) + update).astype(param.dtype), state

        return jax.lax.fori_loop(0, 300, step, (param, tx.init(param)))[0]

    norms = [np.linalg.norm(np.asarray(each, np.float32), axis=(1, 2)) for each in (start, run(start))]
    np.testing.assert_allclose(*norms, rtol=1e-3 if dtype == jnp.bfloat16 else 1e-6)


@pytest.mark.soak
def test_a_warm_start_restarts_the_average(tmp_path):
    job = make_gpt(tmp_path / "run", **{"config.optimizer.name": "schedule_free_adamw", "config.model.layers": 1})
    state = job.init_state()
    weights = jax.tree.map(lambda leaf: leaf + 1, job.weights(state))
    begun = restart_averages(state.replace(params=weights["params"]))
    assert are_leaves_equal(begun.opt_state[1].fast, weights["params"])
    assert are_leaves_equal(begun.params, weights["params"])
    assert all(
        a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
        for x, y in zip(jax.tree.leaves(begun.opt_state[1].fast), jax.tree.leaves(begun.params), strict=True)
        for a, b in zip((s.data for s in x.addressable_shards), (s.data for s in y.addressable_shards), strict=True)
    )
