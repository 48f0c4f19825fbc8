"""The train state is born sharded: the same bits as unsharded, and nothing of it whole on a device."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner import BaseTrainer
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.parallel.mesh import AXES
from runner.train import state as train_state
from tests.support.tiny import FACTORISATIONS, MESHES, gpt, leaves_equal, mesh_of, set_mesh

KEY = jax.random.key(3)
MODEL = GPT(GPTConfig(layers=2, heads=4, width=32), 256, 16)
TOKENS_BxT = jnp.zeros((1, 16), jnp.int32)
OPTIMIZERS = ["adamw", "lion", "sgd", "adafactor"]
FSDP = [sizes for sizes in FACTORISATIONS if sizes[1] > 1]


@pytest.fixture(scope="module")
def unsharded():
    return jax.jit(lambda key: nn.unbox(MODEL.init(key, TOKENS_BxT, deterministic=True)))(KEY)


def axes_of(sharding):
    """The mesh axes that cut an array."""
    cuts = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    return {axis for axes in cuts for axis in axes if sharding.mesh.shape[axis] > 1}


@pytest.mark.parametrize("sizes", MESHES)
def test_sharded_init_equals_the_unsharded_init_bit_for_bit(unsharded, sizes):
    mesh = mesh_of(*sizes)
    variables, shardings = BaseTrainer.sharded_init(MODEL, KEY, TOKENS_BxT, mesh=mesh, deterministic=True)
    assert leaves_equal(variables, unsharded)
    for leaf, sharding in zip(jax.tree.leaves(variables), jax.tree.leaves(shardings), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        assert leaf.addressable_shards[0].data.size == math.prod(sharding.shard_shape(leaf.shape))


def abstract_states(tmp_path, name, sizes):
    return train_setup_of(gpt(tmp_path / "run", **set_mesh(*sizes), **{"config.optimizer.name": name})).abstract_state


def train_setup_of(job):
    return job.setup_builder.build(jax.devices())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_parameter_and_no_moment_is_replicated_over_fsdp(tmp_path, name):
    for sizes in FSDP:
        state = abstract_states(tmp_path, name, sizes)
        params, moments = jax.tree.leaves(state.params), jax.tree.leaves(state.opt_state)
        large = [leaf for leaf in moments if leaf.size >= 32]
        assert len(params) >= 10
        assert len(large) >= {"adamw": 2, "adafactor": 1}.get(name, 1) * len(params)
        for leaf in params + large:
            assert "fsdp" in axes_of(leaf.sharding), (sizes, leaf)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
def test_a_moment_lies_like_its_parameter(tmp_path, name):
    for sizes in FACTORISATIONS:
        state = abstract_states(tmp_path, name, sizes)
        params = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state.params)]
        moments = [(leaf.shape, leaf.sharding) for leaf in jax.tree.leaves(state.opt_state) if leaf.size >= 32]
        assert moments == params * (len(moments) // len(params))


@pytest.mark.parametrize("sizes", [(1, 1, 8), (2, 2, 2), (1, 4, 2)])
def test_the_tensor_axis_cuts_every_matrix_of_heads_mlp_and_vocabulary(tmp_path, sizes):
    state = abstract_states(tmp_path, "adamw", sizes)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        if path[-1].key in ("kernel", "embedding"):
            assert "tensor" in axes_of(leaf.sharding), jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    "sizes", [*(pytest.param(sizes, marks=pytest.mark.soak) for sizes in ((1, 8, 1), (1, 2, 4))), (2, 2, 2)]
)
def test_every_device_holds_only_its_share(tmp_path, sizes):
    state = train_setup_of(gpt(tmp_path / "run", **set_mesh(*sizes))).init_state()
    matrices = [leaf for leaf in jax.tree.leaves(state) if leaf.size >= 256 * 32]
    assert len(matrices) >= 3
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.num_devices == 8
    for leaf in matrices:
        assert leaf.addressable_shards[0].data.size == leaf.size // (sizes[1] * sizes[2])


def compiled_init(monkeypatch, train_setup):
    """What the one jit of `init_state` compiled to."""
    compiled = []

    def record(function, **options):
        jitted = real_jit(function, **options)

        def call(*arguments):
            if isinstance(arguments[0], jax.core.Tracer):  # `sharded_init`, inside it
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
def test_nothing_is_materialised_unsharded(tmp_path, monkeypatch):
    """What one device allocates for the init, outputs and temporaries, is far below the state."""
    wide = {"config.model.width": 256, "config.model.layers": 2, "config.optimizer.name": "adamw"}
    figures = {}
    for sizes in ((8, 1, 1), (1, 8, 1)):
        train_setup = train_setup_of(gpt(tmp_path / "run", **set_mesh(*sizes), **wide))
        full = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(train_setup.abstract_state))
        analysis = compiled_init(monkeypatch, train_setup)
        figures[sizes] = analysis.output_size_in_bytes, analysis.temp_size_in_bytes
    assert figures[8, 1, 1][0] >= full
    output, temporaries = figures[1, 8, 1]
    assert output < full / 7
    assert temporaries < full / 4


def test_an_axis_that_does_not_divide_is_left_whole_and_another_is_cut():
    mesh = mesh_of(1, 4, 2)

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
    assert axes_of(shardings["params"]["odd"]) == {"tensor", "fsdp"}
    assert axes_of(shardings["params"]["prime"]) == set()
    assert axes_of(shardings["params"]["plain"]) == {"fsdp"}
    assert not cuts["scalar"]
    assert all((leaf == 1).all() for leaf in jax.tree.leaves(variables))
    assert mesh.axis_names == AXES


def test_weights_of_another_seed_are_other_weights(unsharded):
    other, _ = BaseTrainer.sharded_init(MODEL, jax.random.key(4), TOKENS_BxT, mesh=mesh_of(8, 1, 1), deterministic=True)
    assert not leaves_equal(other, unsharded)
    assert np.isfinite(jax.device_get(other["params"]["embedding"])).all()


class Halved(PretrainGPT):
    """Parameters half as large as the model's own, each whole on every device."""

    @staticmethod
    def sharded_init(model, key, *args, mesh, **kwargs):
        variables, shardings = BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
        whole = NamedSharding(mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: leaf / 2, variables), jax.tree.map(lambda _: whole, shardings)


@pytest.mark.soak
def test_parameters_are_born_by_sharded_init_and_lie_as_it_says(tmp_path, monkeypatch):
    usual, halved = (train_setup_of(gpt(tmp_path / "run", job, **set_mesh(1, 8, 1))) for job in (PretrainGPT, Halved))
    state = halved.init_state()
    assert leaves_equal(state.params, jax.tree.map(lambda leaf: leaf / 2, usual.init_state().params))
    assert all(axes_of(leaf.sharding) == set() for leaf in jax.tree.leaves(state.params))
    for leaf, abstract in zip(jax.tree.leaves(state), jax.tree.leaves(halved.abstract_state), strict=True):
        assert leaf.sharding.is_equivalent_to(abstract.sharding, leaf.ndim)
    compiled_init(monkeypatch, halved)


def test_the_state_at_step_0_has_the_bits_of_sharded_init(tmp_path):
    job = gpt(tmp_path / "run", **set_mesh(2, 2, 2))
    train_setup = train_setup_of(job)
    variables, _ = job.sharded_init(job.model(), train_setup.key, TOKENS_BxT, mesh=train_setup.mesh, deterministic=True)
    assert leaves_equal(train_setup.init_state().params, variables["params"])


def test_other_parameters_than_the_models_are_refused(tmp_path):
    class Others(PretrainGPT):
        @staticmethod
        def sharded_init(model, key, *args, mesh, **kwargs):
            variables, shardings = BaseTrainer.sharded_init(model, key, *args, mesh=mesh, **kwargs)
            return {"params": {"all": variables["params"]}}, {"params": {"all": shardings["params"]}}

    with pytest.raises(InvalidError, match="sharded_init returns other parameters"):
        gpt(tmp_path / "run", Others).setup(Hosts.single_process())


def test_sharded_init_may_be_replaced_where_the_mesh_is_abstract(tmp_path):
    job = gpt(tmp_path / "run", Halved)
    mesh = AbstractMesh(tuple(8 if axis == "fsdp" else 1 for axis in AXES), AXES)
    train_setup = job.setup_builder.build_on_mesh(mesh, jax.eval_shape(lambda: KEY))
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(train_setup.abstract_state)} == {mesh}
