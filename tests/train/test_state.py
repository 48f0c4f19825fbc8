"""Sharded initialisation of the train state: bit-identical to unsharded, and no device holds all of it."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner import BaseTrainer
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.parallel.mesh import AXES
from runner.train import state as train_state
from tests.support.tiny_jobs import (
    FACTORISATIONS,
    MESHES,
    are_leaves_equal,
    make_full_mesh,
    make_gpt,
    make_mesh_options,
)

KEY = jax.random.key(3)
MODEL = GPT(GPTConfig(layers=2, heads=4, width=32), 256, 16)
TOKENS_BxT = jnp.zeros((1, 16), jnp.int32)
OPTIMIZERS = ["adamw", "lion", "sgd", "adafactor"]
FSDP = [sizes for sizes in FACTORISATIONS if sizes[1] > 1]


@pytest.fixture(scope="module")
def unsharded():
    return jax.jit(lambda key: nn.unbox(MODEL.init(key, TOKENS_BxT, deterministic=True)))(KEY)


def get_sharded_axes(sharding):
    """Return the mesh axes that an array is sharded over."""
    cuts = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    return {axis for axes in cuts for axis in axes if sharding.mesh.shape[axis] > 1}


@pytest.mark.daily(2)
@pytest.mark.parametrize("sizes", MESHES)
def test_sharded_init_is_bit_identical_to_unsharded_init(unsharded, sizes):
    mesh = make_full_mesh(*sizes)
    variables, shardings = BaseTrainer.sharded_init(MODEL, KEY, TOKENS_BxT, mesh=mesh, deterministic=True)
    assert are_leaves_equal(variables, unsharded)
    for leaf, sharding in zip(jax.tree.leaves(variables), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.size == math.prod(sharding.shard_shape(leaf.shape))


def make_abstract_state(tmp_path, name, sizes):
    return build_train_setup(
        make_gpt(tmp_path / "run", **make_mesh_options(*sizes), **{"config.optimizer.name": name})
    ).abstract_state


def build_train_setup(job):
    return job.setup_builder.build(jax.devices())


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.soak if name in ("lion", "sgd") else ()) for name in OPTIMIZERS]
)
def test_parameters_and_moments_are_sharded_over_fsdp(tmp_path, name):
    for sizes in FSDP:
        state = make_abstract_state(tmp_path, name, sizes)
        params, moments = jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state)
        large = [leaf for leaf in moments if leaf.size >= 32]
        assert len(params) >= 10
        assert len(large) >= {"adamw": 2, "adafactor": 1}.get(name, 1) * len(params)
        for leaf in params + large:
            assert "fsdp" in get_sharded_axes(leaf.sharding), (sizes, leaf)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_moments_are_sharded_like_their_parameters(tmp_path, name):
    for sizes in FACTORISATIONS:
        state = make_abstract_state(tmp_path, name, sizes)
        params = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state.params)]
        moments = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 32]
        assert moments == params * (len(moments) // len(params))


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2), (1, 4, 2)])
def test_matrices_of_heads_mlp_and_vocabulary_are_sharded_over_tensor(tmp_path, sizes):
    state = make_abstract_state(tmp_path, "adamw", sizes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if path[-1].key in ("kernel", "embedding"):
            assert "tensor" in get_sharded_axes(leaf.sharding), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "sizes", [*(pytest.param(sizes, marks=pytest.mark.soak) for sizes in ((1, 8, 1), (1, 2, 4))), (2, 2, 2)]
)
def test_every_device_holds_only_its_shard(tmp_path, sizes):
    state = build_train_setup(make_gpt(tmp_path / "run", **make_mesh_options(*sizes))).init_state()
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.size >= 256 * 32]
    assert len(matrices) >= 3
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.num_devices == 8
    for leaf in matrices:
        assert leaf.addressable_shards[0].data.size == leaf.size // (sizes[1] * sizes[2])


def measure_init_memory(monkeypatch, train_setup):
    """Return the memory figures of the program that `init_state` compiles."""
    compiled = []

    def record(function, **options):
        jitted = real_jit(function, **options)

        def call(*arguments):
            if isinstance(arguments[0], jax.core.Tracer):  # the nested jit of `sharded_init`
                return jitted(*arguments)
            compiled.append(jitted.lower(*arguments).compile())
            return compiled[-1](*arguments)

        return call

    real_jit = jax.jit
    with monkeypatch.context() as patch:
        patch.setattr(train_state.jax, "jit", record)
        train_setup.init_state()
    (program,) = compiled
    return program.memory_analysis()


@pytest.mark.soak
def test_init_materialises_nothing_unsharded(tmp_path, monkeypatch):
    """A device allocates far less than the state for outputs and temporaries of the init."""
    wide = {"config.model.width": 256, "config.model.layers": 2, "config.optimizer.name": "adamw"}
    figures = {}
    for sizes in ((8, 1, 1), (1, 8, 1)):
        train_setup = build_train_setup(make_gpt(tmp_path / "run", **make_mesh_options(*sizes), **wide))
        full = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(train_setup.abstract_state))
        analysis = measure_init_memory(monkeypatch, train_setup)
        figures[sizes] = analysis.output_size_in_bytes, analysis.temp_size_in_bytes
    assert figures[8, 1, 1][0] >= full
    output, temporaries = figures[1, 8, 1]
    assert output < full / 7
    assert temporaries < full / 4


def test_dimensions_that_do_not_divide_are_not_sharded():
    mesh = make_full_mesh(1, 4, 2)

    class Odd(nn.Module):
        @nn.compact
        def __call__(self, x):
            axes = nn.with_logical_partitioning
            self.param("odd", axes(nn.initializers.ones, ("embed", "mlp")), (30, 64))
            self.param("prime", axes(nn.initializers.ones, ("embed", "mlp")), (7, 11))
            self.param("plain", nn.initializers.ones, (3, 32, 16))
            self.param("scalar", nn.initializers.ones, ())
            return x

    variables, shardings = train_state.sharded_init(Odd(), KEY, TOKENS_BxT, mesh=mesh)
    cuts = {name: sharding.spec for name, sharding in shardings["params"].items()}
    assert get_sharded_axes(shardings["params"]["odd"]) == {"tensor", "fsdp"}
    assert get_sharded_axes(shardings["params"]["prime"]) == set()
    assert get_sharded_axes(shardings["params"]["plain"]) == {"fsdp"}
    assert not cuts["scalar"]
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(variables))
    assert mesh.axis_names == AXES


def test_another_seed_gives_other_weights(unsharded):
    other, _ = BaseTrainer.sharded_init(
        MODEL, jax.random.key(4), TOKENS_BxT, mesh=make_full_mesh(8, 1, 1), deterministic=True
    )
    assert not are_leaves_equal(other, unsharded)
    assert np.isfinite(jax.device_get(other["params"]["embedding"])).all()


class HalvedGPT(PretrainGPT):
    """A job whose `sharded_init` returns halved, replicated parameters."""

    @staticmethod
    def sharded_init(model, key, *args, mesh, **kwargs):
        variables, shardings = BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: leaf / 2, variables), jax.tree.map(lambda _: whole, shardings)


@pytest.mark.soak
def test_an_overridden_sharded_init_decides_values_and_shardings(tmp_path, monkeypatch):
    usual, halved = (
        build_train_setup(make_gpt(tmp_path / "run", job, **make_mesh_options(1, 8, 1)))
        for job in (PretrainGPT, HalvedGPT)
    )
    state = halved.init_state()
    assert are_leaves_equal(state.params, jax.tree.map(lambda leaf: leaf / 2, usual.init_state().params))
    assert all(get_sharded_axes(leaf.sharding) == set() for leaf in jax.tree.leaves(state.params))
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(halved.abstract_state), strict=True):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
    measure_init_memory(monkeypatch, halved)


def test_the_initial_state_has_the_parameters_of_sharded_init(tmp_path):
    job = make_gpt(tmp_path / "run", **make_mesh_options(2, 2, 2))
    train_setup = build_train_setup(job)
    variables, _ = job.sharded_init(job.model(), train_setup.key, TOKENS_BxT, mesh=train_setup.mesh, deterministic=True)
    assert are_leaves_equal(train_setup.init_state().params, variables["params"])


def test_sharded_init_with_other_parameters_is_rejected(tmp_path):
    class Others(PretrainGPT):
        @staticmethod
        def sharded_init(model, key, *args, mesh, **kwargs):
            variables, shardings = BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
            return {"params": {"all": variables["params"]}}, {"params": {"all": shardings["params"]}}

    with pytest.raises(InvalidError, match="sharded_init returns other parameters"):
        make_gpt(tmp_path / "run", Others).setup(Hosts.single_process())


def test_an_overridden_sharded_init_works_on_an_abstract_mesh(tmp_path):
    job = make_gpt(tmp_path / "run", HalvedGPT)
    sizes = tuple(8 if axis == "fsdp" else 1 for axis in AXES)
    mesh = AbstractMesh(sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    train_setup = job.setup_builder.build_on_mesh(mesh, jax.eval_shape(lambda: KEY))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(train_setup.abstract_state)} == {mesh}
