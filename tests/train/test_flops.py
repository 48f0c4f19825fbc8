"""FLOPs: the formula matches counts in traced programs, and the counts match arithmetic by hand.

Shape legend: S accumulation steps, B examples, T sequence, V vocabulary, D width, N query heads, K heads of keys and
values, G = N / K query heads per key head, H width of a head.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec

from experiments.gpt import GPT, GPTConfig, PretrainGPT
from runner import BaseTrainer
from runner.accelerator import CHIPS
from runner.config import MemoryConfig
from runner.distributed.agreement import Hosts
from runner.train.flops import compute_transformer_flops, count_matmul_flops, count_train_flops
from tests.support.tiny_jobs import make_full_mesh, make_gpt

LAYERS, D, V, T, B = 3, 32, 61, 128, 4
BLOCK = 64  # query block of the CPU's attention, which attends to every key up to that of its last query
A_10x20, B_20x30 = jnp.zeros((10, 20)), jnp.zeros((20, 30))
PRODUCT = 2 * 10 * 20 * 30


def count_flops(function, *args, platform="cpu"):
    return count_matmul_flops(jax.make_jaxpr(function)(*args), platform=platform)


def multiply(a, b):
    return a @ b


# Formula.


def count_train_step(model, num_steps, platform):
    """Return the FLOPs per token of a train step, optimizer included, traced for `platform`."""
    tokens_BxT = jnp.zeros((1, T), jnp.int32)

    def make():
        params = nn.unbox(model.init(jax.random.key(0), tokens_BxT, deterministic=True))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-3))

    def step(state, batch, key):
        return PretrainGPT.train_step(state, batch, key, num_steps)

    tokens = jax.ShapeDtypeStruct((num_steps, B // num_steps, T), jnp.int32)
    batch = {"x": tokens, "y": tokens, "padding_mask": jax.ShapeDtypeStruct(tokens.shape, jnp.bool_)}
    return count_flops(step, jax.eval_shape(make), batch, jax.random.key(0), platform=platform) / (B * T)


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("platform", "num_steps", "heads"), [("cpu", 1, 4), pytest.param("cuda", 2, 1, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("chunk", [pytest.param(None, marks=pytest.mark.soak), 32])
@pytest.mark.parametrize(
    ("layer_loop", "remat"),
    [
        ("scan", "none"),
        ("unroll", "dots"),
        ("scan", "layers"),
        *(
            pytest.param(loop, remat, marks=pytest.mark.soak)
            for loop, remat in (("unroll", "none"), ("scan", "dots"), ("unroll", "layers"))
        ),
    ],
)
def test_the_formula_matches_a_traced_train_step(layer_loop, remat, chunk, platform, num_steps, heads):
    config = GPTConfig(layers=LAYERS, heads=heads, width=D, dropout=0.1, layer_loop=layer_loop)
    model = GPT(config, V, T, memory=MemoryConfig(remat=remat, loss_chunk_positions=chunk))
    flops = compute_transformer_flops(
        layers=LAYERS,
        layer_parameters=12 * D**2,
        output_parameters=V * D,
        attention_width=D,
        attended_keys=(T + BLOCK) / 2 if platform == "cpu" else T,
        remat=remat,
        last_parameters=4 * D**2,
        is_attention_recomputed=platform == "cpu",
    )
    assert count_train_step(model, num_steps, platform) == flops.per_token + flops.recomputed_per_token


def test_the_formula_holds_for_grouped_query_attention():
    N, K, H = 8, 2, 4
    shapes = {"query": (D, N * H), "key": (D, K * H), "value": (D, K * H), "out": (N * H, D), "unembed": (D, V)}

    def loss(params, x_BxTxD):
        q_BxTxKxGxH = (x_BxTxD @ params["query"]).reshape(B, T, K, N // K, H)
        k_BxTxKxH, v_BxTxKxH = ((x_BxTxD @ params[name]).reshape(B, T, K, H) for name in ("key", "value"))
        weights = jax.nn.softmax(jnp.einsum("btkgh,bskh->bkgts", q_BxTxKxGxH, k_BxTxKxH))
        a_BxTxD = jnp.einsum("bkgts,bskh->btkgh", weights, v_BxTxKxH).reshape(B, T, N * H) @ params["out"]
        return jax.nn.logsumexp((x_BxTxD + a_BxTxD) @ params["unembed"], axis=-1).sum()

    args = {name: jnp.zeros(shape) for name, shape in shapes.items()}, jnp.zeros((B, T, D))
    executed = count_flops(jax.grad(loss, argnums=(0, 1)), *args) / (B * T)
    flops = compute_transformer_flops(
        layers=1,
        layer_parameters=2 * D * N * H + 2 * D * K * H,
        output_parameters=V * D,
        attention_width=N * H,
        attended_keys=T,
        is_attention_recomputed=False,
    )
    assert executed == flops.per_token
    assert flops.recomputed_per_token == 0


def test_flops_in_8_bits_count_by_their_own_peak():
    parts = {"layers": 2, "layer_parameters": 100, "output_parameters": 50, "attention_width": 1, "attended_keys": 0}
    options = {"remat": "layers", "last_parameters": 20, "matmul": "int8", "quantised_parameters": 90}
    flops = compute_transformer_flops(**parts, **options)
    assert (flops.per_token, flops.recomputed_per_token) == (6 * 250, 2 * 2 * 80)
    assert (flops.quantised_per_token, flops.quantised_recomputed_per_token) == (4 * 2 * 90, 2 * 2 * 70)
    equal = flops.convert_to_bfloat16(CHIPS["v5e"].speeds)  # int8 is twice as fast as bfloat16
    assert (equal.per_token, equal.recomputed_per_token) == (6 * 250 - 4 * 90, 2 * 2 * 80 - 2 * 70)
    assert flops.convert_to_bfloat16(CHIPS["v4"].speeds).per_token == flops.per_token


def test_gpt2_small_matches_its_published_sizes():
    flops = compute_transformer_flops(
        layers=12,
        layer_parameters=12 * 768**2,
        output_parameters=50257 * 768,
        attention_width=768,
        attended_keys=1024 / 2,
    )
    assert flops.per_token == 6 * (12 * 7_077_888 + 38_597_376) + 12 * 12 * 768 * 512 == 797_815_296
    for term in ("12 layers x 7,077,888", "38,597,376 of the output", "768 wide x 512 keys", "= 797,815,296"):
        assert term in flops.formula


# FLOPs of a job.


def test_default_flops_are_counted_and_the_gpt_formula_halves_attention(tmp_path):
    job = make_gpt(tmp_path / "run", **{"config.memory.remat": "layers", "config.memory.loss_chunk_positions": 4})
    job.setup(Hosts.single_process())
    width, length, layers = 32, 16, 2
    counted, by_formula = BaseTrainer.flops_per_token(job, job.train_setup), job.flops_per_token(job.train_setup)
    matmuls = 6 * (layers * 12 * width**2 + 256 * width)
    assert counted.per_token == matmuls + 12 * layers * width * length
    assert by_formula.per_token == matmuls + 12 * layers * width * length / 2
    square = 6 * width * length * layers
    assert counted.recomputed_per_token == by_formula.recomputed_per_token + square / 2
    assert "counted in the program traced for cpu" in counted.formula


def test_flops_without_rematerialisation_have_none_recomputed():
    flops = count_train_flops(lambda b, a: (a @ b).sum(), B_20x30, A_10x20, num_tokens=10, platform="cpu")
    assert (flops.per_token, flops.recomputed_per_token) == (3 * PRODUCT / 10, 0)


# Counting.


def test_a_matmul_counts_two_flops_per_product():
    assert count_flops(multiply, A_10x20, B_20x30) == PRODUCT
    assert count_flops(jax.vmap(multiply), jnp.zeros((7, 10, 20)), jnp.zeros((7, 20, 30))) == 7 * PRODUCT
    assert count_flops(lambda a: jnp.sin(a) + 1, A_10x20) == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_convolutions_are_counted_like_in_xla(groups):
    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", feature_group_count=groups)

    args = jnp.zeros((2, 6, 9, 8)), jnp.zeros((4, 6 // groups, 3, 2))
    assert count_flops(convolve, *args) == jax.jit(convolve).lower(*args).compile().cost_analysis()["flops"]
    assert count_flops(convolve, *args) == 2 * (2 * 4 * 7 * 7) * (6 // groups * 3 * 2)


def test_a_loop_body_counts_once_per_iteration():
    def loop(a, b):
        return jax.lax.scan(lambda carry, _: (carry, jax.lax.map(lambda row: row @ b, a).sum()), 0, length=5)

    assert count_flops(loop, A_10x20, B_20x30) == 5 * PRODUCT


def test_calls_count_once_and_custom_gradients_count_as_defined():
    with_tangent, with_gradient = jax.custom_jvp(multiply), jax.custom_vjp(multiply)
    with_tangent.defjvp(lambda primals, tangents: (multiply(*primals), tangents[0] @ primals[1]))
    with_gradient.defvjp(lambda a, b: (a @ b, (a, b)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))
    for call in (jax.jit(multiply), jax.checkpoint(multiply), with_tangent, with_gradient):
        assert count_flops(call, A_10x20, B_20x30) == PRODUCT

    def gradient(call):
        return jax.value_and_grad(lambda a, b: jnp.sin(call(a, b)).sum(), argnums=(0, 1))

    assert count_flops(gradient(with_gradient), A_10x20, B_20x30) == 3 * PRODUCT
    assert count_flops(gradient(with_tangent), A_10x20, B_20x30) == 2 * PRODUCT


def test_the_most_expensive_branch_counts():
    branches = [lambda a: a, lambda a: a @ a.T @ a, lambda a: a @ (a.T @ a)]
    assert count_flops(lambda a, index: jax.lax.switch(index, branches, a), A_10x20, 1) == 2 * 2 * 10 * 20 * 20


@pytest.mark.parametrize(("platform", "times"), [("tpu", 2), ("cuda", 3), ("cpu", 1)])
def test_only_the_branch_of_the_platform_counts(platform, times):
    def again(times):
        return lambda a, b: sum((jnp.sin(a * k) @ b).sum() for k in range(times))

    def loss(a, b):
        return jax.lax.platform_dependent(a, b, tpu=again(2), cuda=again(3), default=again(1))

    assert (
        count_flops(jax.value_and_grad(loss, argnums=(0, 1)), A_10x20, B_20x30, platform=platform)
        == 3 * times * PRODUCT
    )


def test_shard_map_counts_on_every_device():
    mesh = make_full_mesh(2, 2, 2)
    spec = PartitionSpec(("data", "fsdp"))
    mapped = jax.shard_map(multiply, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    assert count_flops(mapped, jnp.zeros((16, 20)), B_20x30) == 2 * 2 * 16 * 20 * 30  # rows are replicated over tensor
    half = jax.shard_map(
        multiply,
        mesh=mesh,
        axis_names={"data"},
        in_specs=(PartitionSpec("data"), PartitionSpec()),
        out_specs=PartitionSpec("data"),
    )
    assert count_flops(jax.jit(half), jnp.zeros((16, 20)), B_20x30) == 2 * 16 * 20 * 30


def test_a_loop_of_unknown_length_is_rejected_if_it_contains_matmuls():
    def until_large(step):
        return lambda a: jax.lax.while_loop(lambda a: a.sum() < 9, step, a)

    assert count_flops(until_large(lambda a: a + 1), A_10x20) == 0
    with pytest.raises(ValueError, match="how often while runs the matmuls"):
        count_flops(until_large(lambda a: a @ a.T @ a), A_10x20)


def test_a_kernel_counts_its_estimate_and_needs_one():
    def kernel(estimate):
        def copy(source, target):
            target[...] = source[...]

        return pl.pallas_call(copy, jax.ShapeDtypeStruct(A_10x20.shape, A_10x20.dtype), cost_estimate=estimate)

    assert count_flops(kernel(pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0)), A_10x20) == 77
    with pytest.raises(ValueError, match="pallas_call does not say how many FLOPs"):
        count_flops(kernel(None), A_10x20)
