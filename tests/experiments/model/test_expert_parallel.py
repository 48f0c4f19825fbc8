"""Expert parallelism: a layer with sharded experts or sequences, compared with one device.

Shape legend: as in `experiments.model.moe`.
"""

import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.model import expert_parallel, moe
from experiments.model.decoder import PretrainDecoder
from experiments.model.moe import MixtureOfExperts, MoeConfig
from experiments.model.quantised import use_matmul_type
from runner.errors import InvalidError
from runner.parallel.mesh import BATCH_AXES, make_mesh, use_sharding_rules
from runner.plan.forecast.collectives import find_collectives
from runner.train.state import compute_variable_shardings
from tests.support.job_process import environment, run_runner
from tests.support.tiny_jobs import AXIS_MESHES, format_mesh, make_gpt, make_partial_mesh

SOAK = pytest.mark.soak
KEY = jax.random.key(0)
B, T, D, E, K, F = 8, 24, 16, 8, 2, 12
LAYER = {"experts": E, "experts_per_token": K, "auxiliary_loss": 0.5, "router_z_loss": 0.1, "bias_rate": 0.01}
ROOM = {"dropless": {}, "capacity": {"capacity_factor": 1.0}}
BIASES = (("bias", True),)
DEEPSEEK = {"gate": "sigmoid", "shared_experts": 1, "groups": 4, "groups_per_token": 2, "routed_scale": 2.5}
MESHES = [
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"expert": 4, "tensor": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
    {"sequence": 2, "expert": 2, "tensor": 2},
    {"sequence": 8},
    *(mesh for mesh in AXIS_MESHES if {"expert", "sequence"} & {*mesh}),
]
DATA_AND_EXPERT, ALL_CUTS, ROWS_CUT = MESHES[1], MESHES[3], MESHES[4]
# Experts favoured by the router's biases: none; one that every token chooses; two on one device that get all tokens.
TRAFFIC = {"any": (), "one": (5,), "two": (4, 5)}


def make_inputs():
    """Return tokens, and a mask of sequences that are whole, padded, or only padding."""
    lengths = np.asarray([T, T, 1, 0, 7, T, 13, 2])
    return jax.random.normal(jax.random.key(1), (B, T, D)), jnp.asarray(np.arange(T) < lengths[:, None])


@functools.cache
def make_layer(room, traffic, family=()):
    """Return a layer and its variables, with scores so far apart that rounding does not change the chosen experts."""
    config = MoeConfig(**LAYER | ROOM[room] | dict(family))
    model = MixtureOfExperts(config, F, "swiglu", 0.3)
    variables = jax.jit(lambda key: nn.unbox(model.init(key, *make_inputs())))(KEY)
    variables = jax.tree.map(lambda leaf: 20 * leaf, variables)
    favoured = np.isin(np.arange(E), TRAFFIC[traffic])
    for name, leaf in variables["params"].items():
        if name.endswith("_bias"):
            variables["params"][name] = 0.3 * jax.random.normal(jax.random.key(2), leaf.shape)
    variables["balance"]["bias"] = jnp.linspace(-0.2, 0.2, E) + 9 * jnp.asarray(favoured, jnp.float32)
    return model, variables


def make_gradient_function(model):
    def loss(variables, x_BxTxD, real_BxT):
        y_BxTxD, statistics = model.apply(variables, x_BxTxD, real_BxT)
        total = jnp.sum(jnp.where(real_BxT[..., None], 1 + jnp.sin(y_BxTxD), 0)) + jnp.sum(statistics["loss_B"])
        return total, (jnp.where(real_BxT[..., None], y_BxTxD, 0), statistics)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)


@functools.cache
def expected(*names):
    model, variables = make_layer(*names)
    return jax.device_get(jax.jit(make_gradient_function(model))(variables, *make_inputs()))


def shard_inputs(mesh, model, variables):
    """Return variables, tokens and the mask of real tokens, sharded as in a job."""
    boxed = jax.eval_shape(model.init, KEY, *make_inputs())
    variables = jax.device_put(variables, compute_variable_shardings(boxed, mesh))
    stream = NamedSharding(mesh, PartitionSpec(BATCH_AXES, ("sequence", "tensor")))
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES, "sequence"))
    return variables, jax.device_put(make_inputs()[0], stream), jax.device_put(make_inputs()[1], rows)


def compute_sharded(sizes, *names):
    model, variables = make_layer(*names)
    mesh = make_partial_mesh(sizes)
    arrays = shard_inputs(mesh, model, variables)
    with use_sharding_rules(mesh):
        return jax.device_get(jax.jit(make_gradient_function(model))(*arrays))


def assert_same(actual, expected):
    (loss, (y, statistics)), gradients = actual
    (expected_loss, (expected_y, expected_statistics)), expected_gradients = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    np.testing.assert_allclose(y, expected_y, rtol=0, atol=1e-5 * np.abs(expected_y).max())
    for name in ("load_E", "dropped"):
        np.testing.assert_array_equal(statistics[name], expected_statistics[name])
    for name in ("loss_B", "entropy"):
        np.testing.assert_allclose(statistics[name], expected_statistics[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def list_cases(daily, *tables):
    """Return all combinations; all but `daily` are marked as soak tests."""
    return [
        pytest.param(*case, id="-".join([format_mesh(case[0]), *case[1:]]), marks=() if case == daily else SOAK)
        for case in itertools.product(MESHES, *tables)
    ]


@pytest.mark.parametrize(("mesh", "room", "traffic"), list_cases((ALL_CUTS, "dropless", "two"), ROOM, TRAFFIC))
def test_a_sharded_layer_equals_one_device(mesh, room, traffic):
    assert_same(compute_sharded(mesh, room, traffic, BIASES), expected(room, traffic, BIASES))


@pytest.mark.parametrize(
    ("mesh", "room", "matmul"), list_cases((ALL_CUTS, "dropless", "int8"), ROOM, ("int8", "float8"))
)
@pytest.mark.soak
def test_a_sharded_layer_in_8_bits_equals_one_device(mesh, room, matmul):
    model, variables = make_layer(room, "any")
    with use_matmul_type(matmul):
        whole = jax.device_get(jax.jit(make_gradient_function(model))(variables, *make_inputs()))
        sharded = compute_sharded(mesh, room, "any")
    difference = np.abs(whole[0][1][0] - expected(room, "any")[0][1][0]).max()
    assert difference > 1e-3, "matmuls are not in 8 bits"
    # A value of a hidden layer between two 8-bit values may be rounded to either, which changes this token only.
    for a, b in ((sharded[0][1][0], whole[0][1][0]), (sharded[1][1], whole[1][1])):
        is_other = np.abs(a - b).max(axis=-1) > 1e-5 * np.abs(b).max()
        assert is_other.sum() <= 2, f"{is_other.sum()} of {is_other.size} tokens"


@pytest.mark.soak
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("mesh", [DATA_AND_EXPERT, ROWS_CUT], ids=format_mesh)
def test_shared_experts_and_groups_when_sharded(mesh, room):
    family = tuple(DEEPSEEK.items())
    assert_same(compute_sharded(mesh, room, "any", family), expected(room, "any", family))


@pytest.mark.soak
@pytest.mark.parametrize("sizes", [{"expert": 8}, ROWS_CUT], ids=format_mesh)
@pytest.mark.parametrize("room", ROOM)
def test_batches_that_do_not_divide_stay_in_place(room, sizes):
    """Check indivisible batches, which occur in sampling."""
    model, variables = make_layer(room, "any")
    x_BxTxD, real_BxT = make_inputs()[0][:3, :5], jnp.ones((3, 5), jnp.bool_)
    expected = jax.jit(make_gradient_function(model))(variables, x_BxTxD, real_BxT)
    mesh = make_mesh(sizes)
    placed = shard_inputs(mesh, model, variables)[0]
    with use_sharding_rules(mesh):
        actual = jax.jit(make_gradient_function(model))(placed, x_BxTxD, real_BxT)
    assert_same(*jax.device_get((actual, expected)))


def emulated_ragged_all_to_all(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
    """Emulate `jax.lax.ragged_all_to_all` from its documentation.

    The result is NaN if devices disagree about a size, and where nothing is sent: on a TPU that is undefined.
    """
    output = jnp.full_like(output, jnp.nan)
    sent, starts, sizes, ends = (
        jax.lax.all_gather(each, axis_name) for each in (operand, input_offsets, send_sizes, output_offsets)
    )
    here, rows = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
    for source in range(sent.shape[0]):
        place = rows - ends[source, here]
        found = sent[source].at[starts[source, here] + place].get(mode="clip")
        found = jnp.where(sizes[source, here] == recv_sizes[source], found, jnp.nan)
        output = jnp.where(((place >= 0) & (place < sizes[source, here]))[:, None], found, output)
    return output


@pytest.mark.soak
@pytest.mark.parametrize("traffic", TRAFFIC)
def test_ragged_exchange_equals_dense_exchange(traffic, monkeypatch, interpreted_products):
    """Check with an emulated operation, which CPUs lack; everything else is as on a TPU."""
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", emulated_ragged_all_to_all)
    monkeypatch.setattr(moe, "platform", lambda: "tpu")
    assert_same(compute_sharded(DATA_AND_EXPERT, "dropless", traffic, BIASES), expected("dropless", traffic, BIASES))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("num_experts", [8, 6])
def test_gathered_weights_are_whole_and_gradients_scattered(num_experts, axis):
    mesh = make_partial_mesh({"fsdp": 4, "data": 2})
    spec = PartitionSpec(*[None] * axis, "fsdp")
    whole_ExDxF, weight_ExDxF = jax.random.normal(KEY, (2, num_experts, 8, 12))

    def total(part):
        found = expert_parallel._gather_weights(part, ("fsdp",), axis)
        return jnp.sum(found * weight_ExDxF)[None], found[None]

    def gradient(part):
        return jax.grad(lambda part: total(part)[0][0])(part)

    with use_sharding_rules(mesh):
        in_all = jax.shard_map(total, in_specs=spec, out_specs=PartitionSpec(("data", "fsdp")), check_vma=False)
        _, found = jax.jit(in_all)(whole_ExDxF)
        cut = jax.shard_map(gradient, in_specs=spec, out_specs=spec, check_vma=False)
        summed = jax.jit(cut)(whole_ExDxF)
    for each in found:
        np.testing.assert_array_equal(each, whole_ExDxF)
    np.testing.assert_allclose(summed, 4 * weight_ExDxF, rtol=1e-6)  # each of four devices has the same tokens


# Communication.


def list_collectives(sizes, room):
    """Return the collectives of the compiled gradients of a layer that involve more than one device."""
    model, variables = make_layer(room, "any")
    mesh = make_partial_mesh(sizes)
    arrays = shard_inputs(mesh, model, variables)
    with use_sharding_rules(mesh):
        text = jax.jit(make_gradient_function(model)).lower(*arrays).compile().as_text()
    return [found for found in find_collectives(text, dict(mesh.shape)) if found.group_size > 1]


@pytest.fixture(scope="module")
def fixed_slot_collectives():
    return list_collectives(DATA_AND_EXPERT, "capacity")


ROUTER_BYTES = 4 * D * E


@pytest.mark.soak
@pytest.mark.parametrize(("mesh", "room"), list_cases(None, ROOM))
def test_only_tokens_cross_the_expert_axis(mesh, room):
    check_collectives(mesh, list_collectives(mesh, room))


def test_only_tokens_cross_the_expert_axis_in_fixed_slots(fixed_slot_collectives):
    check_collectives(DATA_AND_EXPERT, fixed_slot_collectives)


def check_collectives(cut, found):
    state = tuple(axis for axis in ("fsdp", "sequence") if axis in cut)
    dealt = [each.bytes for each in found if each.kind == "all-to-all" and each.axes == state]
    travels = [each for each in found if each.kind == "all-to-all" and each.axes != state]
    assert {each.axes for each in travels} == ({("expert",)} if "expert" in cut else set())
    others = [each for each in found if "expert" in each.axes and each.kind != "all-to-all"]
    assert [each for each in others if each.bytes > ROUTER_BYTES + 4 * (E + 4)] == []
    whole = 4 * E * D * F // math.prod(cut.get(axis, 1) for axis in ("expert", "tensor"))
    for kind in ("all-gather", "reduce-scatter"):
        matrices = [each for each in found if each.kind == kind and each.axes == state]
        # Both matrices into the hidden layer are exchanged as one; each device first sends a share to every other.
        sizes = sorted(each.bytes for each in matrices if each.bytes in (whole, 2 * whole))
        assert sizes == ([whole, 2 * whole] if state else []), kind
    number = math.prod(cut[axis] for axis in state)
    assert sorted(dealt) == (2 * [whole // number] + 2 * [2 * whole // number] if state else [])
    summed = [each.axes for each in found if each.kind == "all-reduce" and each.bytes > 2 * ROUTER_BYTES]
    assert set(summed) <= {("data",)}


def test_bytes_of_fixed_slots_match_a_count_by_hand(fixed_slot_collectives):
    """Check 2 x 4 devices with 24 tokens each, 6 for each of 8 experts, with 16 floats and a gate."""
    slots = 6 * 8
    by_hand = 4 * (slots * 16 * 4) + 2 * (
        slots * 4
    )  # tokens there and back in both passes; gates there, their gradients back
    found = [each for each in fixed_slot_collectives if each.kind == "all-to-all"]
    assert sum(each.bytes * each.count for each in found) == by_hand
    assert sum(each.sent_bytes_per_device for each in found) == by_hand * 3 // 4


@pytest.mark.parametrize(
    ("tokens", "per_token", "here", "devices", "window", "rounds"),
    [(4096, 8, 16, 8, 5120, 7), (4096, 8, 4, 32, 1280, 13), (24, 2, 2, 4, 16, 3), (4096, 2, 1, 8, 1280, 4)],
)
def test_window_size_and_worst_number_of_rounds(tokens, per_token, here, devices, window, rounds):
    assert expert_parallel.choose_window(tokens, per_token, here, devices) == window
    assert math.ceil(tokens * min(per_token, here) / window) == rounds


# Jobs.


def make_job(directory, **changes):
    model = {"layers": 2, "heads": 4, "width": 32, "mlp_width": 16, "moe": {"experts": 8, "experts_per_token": 2}}
    return make_gpt(directory, PretrainDecoder, **{"config.model": model} | changes)


def test_experts_and_their_moments_are_sharded_over_their_axis(tmp_path):
    mesh = {"fsdp": 2, "expert": 2, "tensor": 2}
    job = make_job(tmp_path / "run", **{"topology.mesh": mesh})
    state = job.setup_builder.build(jax.devices()).abstract_state
    leaves = jax.tree_util.tree_leaves_with_path((state.params, state.opt_state))
    found = [
        (path[-1].key, leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in leaves
        if leaf.ndim == 4 and path[-2].key == "moe"
    ]
    share = {"gate": (2, 4, 16, 8), "up": (2, 4, 16, 8), "down": (2, 4, 8, 16)}  # layers, experts, then a matrix
    assert sorted(found) == sorted([*share.items()] * 3)  # the parameter and its two moments


@pytest.mark.soak
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_recomputed_flops_of_rounds_are_counted(tmp_path, capacity_factor):
    def recomputed(number, remat):
        mesh = {"data": "auto", "expert": number}
        changes = {"config.model.moe.capacity_factor": capacity_factor, "config.memory.remat": remat}
        job = make_job(tmp_path / f"{number}-{remat}", **changes, **{"topology.mesh": mesh})
        return job.flops_per_token(job.setup_builder.build(jax.devices())).recomputed_per_token

    experts = 2 * 2 * 2 * 2 * 32 * 16  # FLOPs x layers and experts per token x matrices into the hidden width x width
    assert recomputed(4, "none") - recomputed(1, "none") == (experts if capacity_factor is None else 0)
    for remat in ("dots", "layers"):
        assert recomputed(4, remat) == recomputed(1, remat)


@pytest.mark.parametrize(
    ("experts", "axis", "advice"),
    [(6, 4, "use 4 or 8 experts, or an expert axis of 2"), (4, 8, "use 8 experts, or an expert axis of 4")],
)
def test_experts_that_do_not_divide_are_refused_with_alternatives(tmp_path, experts, axis, advice):
    mesh = {"data": "auto", "expert": axis}
    job = make_job(tmp_path / "run", **{"config.model.moe.experts": experts, "topology.mesh": mesh})
    with pytest.raises(InvalidError) as refused:
        job()
    line = f"config.model.moe.experts={experts} does not divide over topology.mesh.expert={axis}; {advice}"
    assert line in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.soak
def test_plan_refuses_experts_that_do_not_divide():
    sizes = ["--set", "config.model.moe.experts=12", "--set", "topology.mesh.expert=8"]
    code, output = run_runner(environment(1), "plan", "specs/moe_nano.yaml", "--topology", "cpu-8", *sizes)
    assert code == 2, output
    assert "config.model.moe.experts=12 does not divide over topology.mesh.expert=8; use 8 or 16 experts" in output
