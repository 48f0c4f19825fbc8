"""8-bit matmuls: the recipe against NumPy, independence of other tokens, and which matmuls of a model are quantised."""

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from experiments.gpt import GPT, GPTConfig
from experiments.model import quantised
from experiments.model.config import DecoderConfig
from experiments.model.decoder import Decoder
from experiments.model.moe import MoeConfig, Routing, compute_experts
from experiments.model.quantised import (
    RoundingSeed,
    differentiate_in_8_bits,
    draw_offsets,
    multiply,
    multiply_in_8_bits,
    quantise,
    round_by_offsets,
    use_matmul_type,
)
from runner.config import MemoryConfig
from tests.support.sharded_step import DECODER, EXPERTS, HYBRID, LATENT
from tests.support.tiny_jobs import make_gpt as make_small_gpt
from tests.support.tiny_jobs import read_outcome

B, T, I, N, H = 2, 3, 32, 2, 5  # noqa: E741
LIMITS = {"int8": (127, 127), "float8": (448, 57344)}
DTYPES = {"int8": (np.int8, np.int8), "float8": (jnp.float8_e4m3fn, jnp.float8_e5m2)}
TYPES = [*LIMITS]


def make_operands(dtype=np.float32):
    """Return tokens, weights and a gradient of their product."""
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=shape), dtype) for shape in ((B, T, I), (I, N * H), (B, T, N * H)))


@functools.partial(jax.jit, static_argnums=(0, 1))
def differentiate(matmul, num_contracted, x, w, dy):
    """Return a product and its gradients."""
    with use_matmul_type(matmul):
        y, pull_back = jax.vjp(functools.partial(multiply, num_contracted=num_contracted), x, w)
    return y, *pull_back(dy)


def round_to(values, axis, limit, dtype):
    """Return 8-bit values as float64, and their scale along `axis`."""
    scale = np.abs(values).max(axis=axis, keepdims=True) / limit
    scaled = values / scale
    return (np.round(scaled) if dtype == np.int8 else scaled.astype(dtype)).astype(np.float64), scale


@pytest.mark.parametrize("matmul", TYPES)
def test_a_product_and_its_gradients_follow_the_recipe(matmul: str) -> None:
    (forward_limit, gradient_limit), (forward, gradient) = LIMITS[matmul], DTYPES[matmul]
    x, w, dy = make_operands()
    xq, x_scale = round_to(np.asarray(x), -1, forward_limit, forward)
    wq, w_scale = round_to(np.asarray(w), 0, forward_limit, forward)
    dyq, dy_scale = round_to(np.asarray(dy) * w_scale, -1, gradient_limit, gradient)
    expected = ((xq @ wq) * x_scale * w_scale, (dyq @ wq.T) * dy_scale, np.einsum("bti,bto->io", x, dy))
    for found, want in zip(differentiate(matmul, 1, x, w, dy), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.daily(1)
@pytest.mark.parametrize("matmul", TYPES)
def test_heads_in_axes_of_their_own_give_the_same_bits(matmul: str) -> None:
    x, w, dy = make_operands(jnp.bfloat16)
    flat = differentiate(matmul, 1, x, w, dy)
    apart = differentiate(matmul, 1, x, w.reshape(I, N, H), dy.reshape(B, T, N, H))
    assert all((a.reshape(b.shape) == b).all() for a, b in zip(apart, flat, strict=True))
    flat = differentiate(matmul, 1, dy, w.T, x)
    apart = differentiate(matmul, 2, dy.reshape(B, T, N, H), w.T.reshape(N, H, I), x)
    assert all((a.reshape(b.shape) == b).all() for a, b in zip(apart, flat, strict=True))


@pytest.mark.parametrize("matmul", TYPES)
def test_a_token_does_not_depend_on_the_others(matmul: str) -> None:
    x, w, dy = make_operands()
    y, dx, _ = differentiate(matmul, 1, x, w, dy)
    # The other example is a thousand times larger, as are its gradients.
    larger = jnp.asarray([1.0, 1000.0])[:, None, None]
    for found, want in zip(differentiate(matmul, 1, larger * x, w, larger * dy), (y, dx), strict=False):
        assert (found[0] == want[0]).all()


@pytest.mark.parametrize("matmul", TYPES)
@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_an_undefined_value_shows_in_its_token_alone(matmul: str, value: float) -> None:
    x, w, dy = make_operands()
    y, dx, _ = differentiate(matmul, 1, x.at[0, 0, 0].set(value), w, dy.at[1, 0, 0].set(value))
    assert jnp.isnan(y[0, 0]).all()
    assert jnp.isfinite(y[0, 1:]).all()
    assert jnp.isnan(dx[1, 0]).all()
    assert jnp.isfinite(dx[0]).all()
    assert (differentiate(matmul, 1, 0 * x, w, 0 * dy)[0] == 0).all()


@pytest.mark.parametrize(
    ("matmul", "capacity"),
    [
        ("int8", None),
        ("float8", 1.0),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in (("int8", 1.0), ("float8", None))),
    ],
)
def test_experts_follow_the_recipe(matmul: str, capacity: float | None) -> None:
    (forward_limit, gradient_limit), (forward, gradient) = LIMITS[matmul], DTYPES[matmul]
    random, E, D, F = np.random.default_rng(0), 2, 16, 8
    into, out, x, dy = (random.normal(size=shape) for shape in ((E, D, F), (E, F, D), (1, T, D), (1, T, D)))
    into, out, x, dy = (array.astype(np.float32) for array in (into, out, x, dy))
    experts, gates = np.array([1, 0, 1]), np.array([0.5, 2.0, 1.0], np.float32)
    kept = np.ones((1, T, 1), bool)
    routing = Routing(experts[None, :, None], gates[None, :, None], kept, kept, gates[None, :, None])
    config = MoeConfig(experts=E, experts_per_token=1, capacity_factor=capacity and E * capacity)

    @jax.jit
    def differentiate_experts(*arrays):
        def compute(x, into, out):
            return compute_experts(x, routing, [into, out], [], config, "squared_relu")

        with use_matmul_type(matmul):
            y, pull_back = jax.vjp(compute, *arrays[:3])
        return y, *pull_back(arrays[3])

    want = [np.zeros_like(array, np.float64) for array in (x, x, into, out)]
    for token, (expert, gate) in enumerate(zip(experts, gates, strict=True)):

        def multiply(row, w, axis, is_forward):
            """Return a row times a matrix, or its transpose, from operands in 8 bits."""
            limit, dtype = (forward_limit, forward) if is_forward else (gradient_limit, gradient)
            values, scale = round_to(row, -1, limit, dtype)
            w_values, w_scale = round_to(w, axis, forward_limit, forward)
            w_values = (w_values * w_scale).T if axis else w_values * w_scale
            return (values * scale) @ w_values

        row, dy_D = x[0, token], dy[0, token]
        both = multiply(row, into[expert], 0, True)
        hidden = (np.maximum(both, 0) ** 2 * gate).astype(np.float32)
        want[0][0, token] = multiply(hidden, out[expert], 0, True)
        dhidden = multiply(dy_D, out[expert], 1, False)
        want[3][expert] += np.outer(hidden, dy_D)
        dboth = (dhidden * gate * 2 * np.maximum(both, 0)).astype(np.float32)
        want[1][0, token] = multiply(dboth, into[expert], 1, False)
        want[2][expert] += np.outer(row, dboth)
    for found, wanted in zip(differentiate_experts(x, into, out, dy), want, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


DRAWS = 4096
EXAMPLES = jnp.asarray([3, 10])


def list_grid(matmul: str) -> np.ndarray:
    """Return the finite values of the type of gradients, sorted; int8 is used symmetrically."""
    if matmul == "int8":
        return np.arange(-127, 128.0)
    values = np.arange(256, dtype=np.uint8).view(DTYPES[matmul][1]).astype(float)
    return np.unique(values[np.isfinite(values)])


def make_seed(number: int, examples: Any = EXAMPLES) -> RoundingSeed:
    """Return the seed of a matmul at one of many steps."""
    return RoundingSeed(jax.random.bits(jax.random.key(number), dtype=jnp.uint32), examples)


@functools.cache
def draw_steps(number: int) -> np.ndarray:
    """Return the offsets (S, B, T, O) of two matmuls at each of `number` steps."""
    words = jax.vmap(lambda step: jax.random.bits(jax.random.key(step), dtype=jnp.uint32))(jnp.arange(number))
    words = jnp.stack([words, words + 1], axis=1).reshape(-1)
    draw = jax.jit(jax.vmap(lambda word: draw_offsets(RoundingSeed(word, jnp.arange(4)), (4, 32, 64), 2)))
    return np.asarray(draw(words), np.float64)


def test_offsets_are_uniform_and_those_of_neighbours_uncorrelated() -> None:
    centred = draw_steps(32) - 0.5
    assert np.abs(centred).max() < 0.5
    sigma = 1 / np.sqrt(12)
    for axis in range(4):
        # Means along all other axes, then the product of neighbours at several distances.
        others = tuple(other for other in range(4) if other != axis)
        size = centred.size / centred.shape[axis]
        assert np.abs(centred.mean(axis=others)).max() < 4.5 * sigma / np.sqrt(size)
        for distance in (1, 2, 3, 8, 16, 32):
            count = centred.shape[axis] - distance
            if count > 0:
                products = np.take(centred, range(count), axis) * np.take(
                    centred, range(distance, count + distance), axis
                )
                assert abs(products.mean()) < 4.5 * sigma**2 / np.sqrt(products.size)
    # The variance of sums over columns or positions shows correlations that are weaker than those of any two.
    for axis in (2, 3):
        sums = centred.sum(axis=axis)
        expected = centred.shape[axis] / 12
        assert abs(sums.var() / expected - 1) < 5 * np.sqrt(2 / sums.size)
    assert abs(centred.var() * 12 - 1) < 5 * np.sqrt(0.8 / centred.size)


@pytest.mark.parametrize("matmul", TYPES)
def test_the_mean_of_many_stochastic_roundings_is_the_value(matmul: str) -> None:
    limit, dtype = LIMITS[matmul][1], DTYPES[matmul][1]
    # All magnitudes down to the subnormals of float8, and both ends.
    random = np.random.default_rng(0)
    values = random.uniform(-1, 1, 256) * limit * 2.0 ** -random.integers(0, 8 if matmul == "int8" else 34, 256)
    values = jnp.asarray(np.concatenate([values, [limit, -limit, 0.0, 0.3]]), jnp.float32)

    @jax.jit
    def draw(numbers):
        def one(number):
            offsets = draw_offsets(make_seed(number, jnp.zeros(1)), (1, values.size), 1)[0]
            return round_by_offsets(values, offsets, dtype).astype(jnp.float32)

        return jax.vmap(one)(numbers)

    drawn, exact = np.asarray(draw(jnp.arange(DRAWS)), np.float64), np.asarray(values, np.float64)
    # The largest value of the type that is not above, and the smallest one that is not below.
    grid = list_grid(matmul)
    below = grid[np.searchsorted(grid, exact, side="right") - 1]
    above = grid[np.searchsorted(grid, exact, side="left")]
    assert ((drawn == below) | (drawn == above)).all()
    gap = above - below
    bound = gap * (2.0**-17 + 5 * 0.5 / np.sqrt(DRAWS))
    assert (np.abs(drawn.mean(axis=0) - exact) <= bound).all()
    nearest = np.asarray(jnp.round(values) if matmul == "int8" else values.astype(dtype).astype(jnp.float32))
    assert (np.abs(nearest - exact) > bound).mean() > 0.5


@pytest.mark.parametrize("matmul", TYPES)
def test_values_of_the_type_are_not_rounded_and_none_is_beyond_its_limit(matmul: str) -> None:
    limit, dtype = LIMITS[matmul][1], DTYPES[matmul][1]
    grid = jnp.asarray(list_grid(matmul), jnp.float32)
    for offset in (2.0**-17, 0.5, 1 - 2.0**-17):
        found = round_by_offsets(grid, jnp.full(grid.shape, offset), dtype)
        assert (found.astype(jnp.float32) == grid).all()
        # The product of the largest value and the reciprocal of its scale may be off by rounding.
        rows = jnp.asarray(np.random.default_rng(0).normal(size=(1000, 8)), jnp.float32)
        values = quantise(rows, (1,), dtype, offsets=jnp.full(rows.shape, offset)).values.astype(jnp.float32)
        largest = jnp.max(jnp.abs(values), axis=1)
        assert ((largest == limit) | (largest == np.unique(jnp.abs(grid))[-2])).all()
        assert (largest == limit).mean() > 0.9


@pytest.mark.daily(1)
@pytest.mark.parametrize("matmul", TYPES)
def test_the_mean_gradient_of_an_input_is_that_of_an_exact_gradient_of_the_result(matmul: str) -> None:
    x, w, dy = make_operands()
    _, pull_back = jax.vjp(lambda x: multiply_in_8_bits(matmul, 1, x, w), x)
    residuals = jax.tree.map(jnp.asarray, (x, quantise(w, (0,), DTYPES[matmul][0])))
    draw = jax.jit(lambda number: differentiate_in_8_bits(matmul, 1, (*residuals, make_seed(number)), dy)[0])
    drawn = np.asarray(jax.lax.map(draw, jnp.arange(DRAWS)), np.float64)
    kernel = np.asarray(residuals[1].values, np.float64) * np.asarray(residuals[1].scale, np.float64)
    exact = np.asarray(dy, np.float64) @ kernel.T
    bound = 5 * drawn.std(axis=0) / np.sqrt(DRAWS) + 1e-5 * np.abs(exact).max()
    assert (np.abs(drawn.mean(axis=0) - exact) < bound).all()
    assert (np.abs(np.asarray(pull_back(dy)[0]) - exact) > bound).mean() > 0.5


@pytest.mark.daily(1)
@pytest.mark.parametrize("matmul", TYPES)
def test_stochastic_rounding_changes_the_gradient_of_the_input_alone(matmul: str) -> None:
    x, w, dy = make_operands()

    @jax.jit
    def compute(seed, x, w, dy):
        y, pull_back = jax.vjp(lambda x, w: multiply_in_8_bits(matmul, 1, x, w, seed), x, w)
        return y, *pull_back(dy)

    nearest, first, again, other = (
        compute(seed, x, w, dy) for seed in (None, make_seed(0), make_seed(0), make_seed(1))
    )
    for place, is_changed in enumerate((False, True, False)):
        assert (first[place] == again[place]).all()
        assert (first[place] != nearest[place]).any() == is_changed
        assert (first[place] != other[place]).any() == is_changed
    # An example by itself, and tokens and columns in other axes, have the same bits.
    alone = compute(make_seed(0, EXAMPLES[1:]), x[1:], w, dy[1:])
    assert (alone[1] == first[1][1:]).all()
    flat = compute(make_seed(0), x.reshape(B * T, I), w, dy.reshape(B * T, -1))
    assert (flat[1].reshape(x.shape) == first[1]).all()
    heads = compute(make_seed(0), x, w.reshape(I, N, H), dy.reshape(B, T, N, H))
    assert (heads[1] == first[1]).all()
    assert (compute(make_seed(0, EXAMPLES[::-1]), x, w, dy)[1] != first[1]).any()


def make_gpt(matmul: str) -> GPT:
    return GPT(GPTConfig(layers=2, heads=2, width=32), 64, 16, memory=MemoryConfig(remat="dots"), matmul=matmul)


def make_decoder(matmul: str, **keys: object) -> Decoder:
    return Decoder(DecoderConfig(**DECODER | keys), 64, memory=MemoryConfig(remat="dots"), matmul=matmul)


def count_dots(model):
    """Return the number of matmuls in 8 bits in the traced forward and backward pass of a layer, by dtype."""
    tokens = jnp.zeros((1, 16), jnp.int32)
    variables = jax.eval_shape(functools.partial(model.init, deterministic=True), jax.random.key(0), tokens)

    def loss(params):
        targets = tokens, jnp.ones(tokens.shape)
        found = model.apply({**variables, "params": params}, tokens, targets=targets, deterministic=False)
        return found if isinstance(found, jax.Array) else found[0]

    found: Counter[str] = Counter()

    def visit(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general" and equation.invars[1].aval.dtype.itemsize == 1:
                found[equation.invars[0].aval.dtype.name] += 1
            for inner in jaxprs_in_params(equation.params):
                visit(inner)

    visit(jax.make_jaxpr(jax.grad(loss))(variables["params"]).jaxpr)
    return found


LINEAR = {key: HYBRID[key] for key in ("linear", "head_dim")} | {"layer_pattern": ["linear"]}
# Model -> its matmuls in 8 bits, each with one forward and one for the gradient of its input, and those recomputed.
QUANTISED = {
    "gpt": (make_gpt, 6, 0),
    "llama": (make_decoder, 7, 0),
    # All but the router. The product into the hidden layer of experts is not kept.
    "experts": (functools.partial(make_decoder, moe=EXPERTS | {"shared_experts": 1}), 4 + 3 + 2, 1),
    # Queries and keys and values have latents; keys and values are made by one matrix.
    "latent": (functools.partial(make_decoder, **LATENT | {"layer_loop": "scan", "neftune_alpha": 0.0}), 5 + 3, 0),
    # All but beta and decay of a linear layer.
    "linear": (functools.partial(make_decoder, **LINEAR), 5 + 3, 0),
    # The layer of the decoder, and another one with the projection of its input.
    "further": (functools.partial(make_decoder, layers=1, extra_predictions=1), 7 + 7 + 1, 0),
}


DAILY = ("gpt", "llama")


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.soak) for name in QUANTISED]
)
def test_the_matmuls_of_layers_are_in_8_bits(name: str) -> None:
    make, number, recomputed = QUANTISED[name]
    assert count_dots(make("float8")) == {"float8_e4m3fn": number + recomputed, "float8_e5m2": number}


# Model with two layers, except "further", and its matmuls whose gradients are rounded stochastically.
ROUNDED = {
    "gpt": (make_gpt, 2 * 6),
    "llama": (make_decoder, 2 * 7),
    "linear": (functools.partial(make_decoder, **LINEAR), 2 * (5 + 3)),
    # Routed experts are rounded to the nearest value.
    "experts": (functools.partial(make_decoder, moe=EXPERTS | {"shared_experts": 1}), 2 * (4 + 3)),
    "further": (functools.partial(make_decoder, layers=1, extra_predictions=1), 7 + 7 + 1),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gpt" else pytest.mark.soak) for name in ROUNDED]
)
@pytest.mark.soak
def test_each_matmul_of_each_layer_draws_its_own_numbers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, number = ROUNDED[name]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)))
    drawn: list[tuple[int, tuple[int, ...]]] = []

    def draw(seed, *args):
        jax.debug.callback(lambda word, examples: drawn.append((int(word), (*examples.tolist(),))), *seed)
        return draw_offsets(seed, *args)

    monkeypatch.setattr(quantised, "draw_offsets", draw)

    model = make("int8")
    # Both loops have the same variables.
    variables = jax.jit(functools.partial(model.init, deterministic=True))(jax.random.key(0), tokens)

    def iter_words(model, num_steps):
        """Yield the words of each step, sorted."""
        examples = {"examples_B" if isinstance(model, GPT) else "examples": EXAMPLES}
        options = {"targets": (tokens, jnp.ones(tokens.shape)), "deterministic": False, **examples}

        def loss(params, key):
            rngs = {"rounding": key, "dropout": key}
            found = model.apply({**variables, "params": params}, tokens, rngs=rngs, **options)
            return found if isinstance(found, jax.Array) else found[0]

        differentiate = jax.jit(jax.grad(loss))
        for step in range(num_steps):
            drawn.clear()
            jax.block_until_ready(differentiate(variables["params"], jax.random.fold_in(jax.random.key(0), step)))
            jax.effects_barrier()
            assert {examples for _, examples in drawn} == {(*EXAMPLES.tolist(),)}
            yield sorted(word for word, _ in drawn)

    words, next_words = iter_words(model, 2)
    assert len(words) == len({*words}) == number
    assert not {*words} & {*next_words}
    for loop, remat in (("scan", "none"), ("unroll", "layers")):
        config = model.config.model_copy(update={"layer_loop": loop})
        assert [*iter_words(model.clone(config=config, memory=MemoryConfig(remat=remat)), 1)] == [words]


@pytest.mark.soak
def test_no_number_is_drawn_without_stochastic_rounding_and_in_validation(tmp_path: Path) -> None:
    def trace(key, **precision):
        changes = {f"config.precision.{name}": value for name, value in precision.items()}
        job = make_small_gpt(tmp_path / "run", **changes, **{"config.model.layers": 1})
        model, batch = job.model(), {"x": jnp.zeros((1, 16), jnp.int32), "y": jnp.zeros((1, 16), jnp.int32)}
        batch |= {"example": jnp.zeros(1, jnp.int32), "padding_mask": jnp.ones((1, 16), bool)}
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), batch["x"], deterministic=True))["params"]

        def loss(params):
            return job.forward(model.apply, params, batch, key)[0]

        return str(jax.make_jaxpr(jax.grad(loss))(params))

    key, stochastic = jax.random.key(0), {"gradient_rounding": "stochastic"}
    assert "floor" not in trace(key, matmul="int8")
    assert "floor" in trace(key, matmul="int8", **stochastic)
    assert trace(None, matmul="int8", **stochastic) == trace(None, matmul="int8")


@pytest.mark.soak
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("matmul", TYPES)
def test_the_split_into_micro_batches_changes_only_rounding(matmul: str, rounding: str, tmp_path: Path) -> None:
    def train(micro_batch: int) -> list[float]:
        options = {"config.precision.matmul": matmul, "config.train.micro_batch_examples": micro_batch}
        options["config.precision.gradient_rounding"] = rounding
        job = make_small_gpt(tmp_path / str(micro_batch), **options)
        job()
        return [row["train/loss"] for row in read_outcome(tmp_path / str(micro_batch))[0] if "train/loss" in row]

    np.testing.assert_allclose(train(1), train(2), rtol=1e-4)
