"""Order-deterministic gradient reduction: summation tree, train steps on any device count, and invalid configs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner.errors import InvalidError
from runner.parallel import reduction
from runner.parallel.canonical import canonicalise
from runner.parallel.mesh import BATCH_AXES, use_sharding_rules, validate_same_bits_mesh
from runner.train.state import (
    compute_variable_shardings,
    get_shardings,
    make_abstract_state,
)
from runner.train.step import StepOptions, train_step, val_step
from tests.support.simulated_devices import USER_COMPILER_OPTIONS
from tests.support.tiny_jobs import are_leaves_equal, format_mesh, make_gpt, make_partial_mesh
from tests.support.train_states import make_state

# Summation tree.


class Term:
    """A term that records the order of its additions."""

    def __init__(self, text):
        self.text = text

    def __add__(self, other):
        return Term(f"({self.text}+{other.text})")


def sum_over_devices(num_groups, num_devices):
    """Add groups the way `num_devices` devices do, first within each device, then along the rest of the tree."""
    own, known, depth = num_groups // num_devices, {}, reduction.compute_stack_depth(num_groups, num_devices)
    for device, schedule in enumerate(reduction.make_device_schedules(num_groups, num_devices)):
        stack = {}
        for number, (place, joined) in enumerate(zip(schedule.slots, schedule.merges, strict=True)):
            term = Term(str(own * device + number))
            for count in range(joined):
                term = stack[place + joined - 1 - count] + term
            stack[place] = term
            assert max(place + joined - 1, place) < depth
        assert len(schedule.nodes) <= reduction.count_subtrees(num_groups, num_devices) <= depth
        known |= {node: stack[place] for place, node in enumerate(schedule.nodes)}
    return reduction._sum_node(reduction.get_root_node(num_groups), num_groups, known).text


def test_groups_are_summed_as_a_tree():
    assert sum_over_devices(8, 8) == "(((0+1)+(2+3))+((4+5)+(6+7)))"
    assert sum_over_devices(6, 6) == "(((0+1)+(2+3))+(4+5))"
    assert sum_over_devices(3, 3) == "((0+1)+2)"


@pytest.mark.parametrize("num_groups", range(1, 49))
def test_the_order_of_additions_does_not_depend_on_the_devices(num_groups):
    sizes = [size for size in range(1, num_groups + 1) if num_groups % size == 0]
    assert len({sum_over_devices(num_groups, size) for size in sizes}) == 1


# Train steps.

V, T, M, KEY = 64, 16, 12, jax.random.key(0)
# Two layers where they are compiled with the options of users.
MODELS = {number: GPT(GPTConfig(layers=number, heads=2, width=16, dropout=0.1), V, T) for number in (1, 2)}
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
ONE_DEVICE = {"data": 2}
MESHES = [{}, {"fsdp": 3}, {"data": 4}, {"data": 3, "fsdp": 2}, {"data": 6}, {"fsdp": 2}, {"data": 2, "fsdp": 2}]


@functools.cache
def make_batch(m):
    generator = np.random.default_rng(0)
    x = generator.integers(0, V, (M, m, T)).astype(np.int32)
    mask = generator.random((M, m, T)) < 0.9
    return {"x": x, "y": np.roll(x, -1, -1), "padding_mask": mask, "loss_weight": generator.random(x.shape, np.float32)}


def init_train_state(model, key):
    return make_state(model, key, TX, jnp.zeros((1, T), jnp.int32), deterministic=True)


@functools.cache
def run_steps(sizes, num_groups, m, options=()):
    """Return state, losses, norms and validation loss after three steps compiled with these options."""
    mesh, model = make_partial_mesh(dict(sizes)), MODELS[2 if options else 1]
    init_state = functools.partial(init_train_state, model)
    boxed = jax.eval_shape(lambda key: model.init(key, jnp.zeros((1, T), jnp.int32), deterministic=True), KEY)
    abstract = make_abstract_state(init_state, KEY, compute_variable_shardings(boxed["params"], mesh), mesh)
    shardings = get_shardings(abstract)

    def step(state, batch):
        key = jax.random.fold_in(KEY, state.step)
        step_options = StepOptions(norms="groups", num_groups=num_groups)
        return train_step(PretrainGPT.forward, state, batch, key, M, step_options)

    with use_sharding_rules(mesh):
        state = jax.jit(init_state, out_shardings=shardings)(KEY)
        batch = jax.device_put(make_batch(m), NamedSharding(mesh, PartitionSpec(BATCH_AXES)))
        jitted = jax.jit(canonicalise(step), out_shardings=(shardings, None, None), compiler_options=dict(options))
        found = []
        for _ in range(3):
            state, loss, meta = jitted(state, batch)
            found.append((loss, meta))
        sums = jax.jit(canonicalise(functools.partial(val_step, PretrainGPT.forward, num_groups=num_groups)))(
            state, batch
        )
    return jax.device_get((state.params, state.opt_state, found, sums))


@pytest.mark.parametrize(
    ("sizes", "num_groups", "m", "options"),
    [
        pytest.param({"fsdp": 3}, 12, 1, (), id="compiled in little time", marks=pytest.mark.soak),
        pytest.param({}, 12, 1, (), id="one device, compiled in little time", marks=pytest.mark.soak),
        *(
            pytest.param(
                *(sizes, num_groups, m, tuple(USER_COMPILER_OPTIONS.items())),
                id=f"{format_mesh(sizes)}, {num_groups} groups of {m}",
                marks=pytest.mark.soak,
            )
            for num_groups, m in ((12, 1), (12, 2), (6, 1))
            for sizes in MESHES
            if num_groups % np.prod([*sizes.values()]) == 0
        ),
    ],
)
def test_steps_are_bit_identical_on_any_number_of_devices(sizes, num_groups, m, options):
    expected = run_steps(tuple(ONE_DEVICE.items()), num_groups, m, options)
    assert are_leaves_equal(run_steps(tuple(sizes.items()), num_groups, m, options), expected)
    assert expected[2][0][1]["grad_norm"] > 0.1  # so the gradient was clipped


@pytest.mark.soak
def test_ordinary_steps_depend_on_the_number_of_devices():
    """Check the power of the tests above: other steps do depend on the number of devices."""
    on_two, *others = (run_steps((("data", size),), size, 1)[0] for size in (2, 3, 4, 6))
    assert not all(are_leaves_equal(params, on_two) for params in others)


@pytest.mark.parametrize(
    ("sizes", "devices", "message"),
    [
        ({"data": 8}, 12, "cannot be spread over 8 devices .*; use 1, 2, 3, 4, 6, 12"),
        ({"data": 2, "tensor": 2}, 4, "holds for data x fsdp alone, and topology.mesh.tensor is 2"),
        ({"data": 2, "sequence": 2}, 4, "holds for data x fsdp alone, and topology.mesh.sequence is 2"),
        ({"expert": 4}, 4, "holds for data x fsdp alone, and topology.mesh.expert is 4"),
    ],
)
def test_a_mesh_that_cannot_keep_the_order_is_rejected(sizes, devices, message):
    with pytest.raises(InvalidError, match=message):
        validate_same_bits_mesh(make_partial_mesh(sizes), devices)


def test_a_batch_that_does_not_divide_into_groups_is_rejected(tmp_path):
    train = {"total_steps": 1, "global_batch_examples": 40, "micro_batch_examples": 2, "same_bits_devices": 8}
    with pytest.raises(ValueError, match="micro-batches of 2 on same_bits_devices=8; use 32 or 48"):
        _ = make_gpt(tmp_path / "run", **{"config.train": train}).config
