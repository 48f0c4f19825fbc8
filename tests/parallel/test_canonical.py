"""Canonicalised programs: same values, each operation once, and calls inlined."""

import collections
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, check_jaxpr, jaxprs_in_params
from jax.sharding import PartitionSpec

from runner.parallel.canonical import canonicalise
from runner.parallel.mesh import BATCH_AXES, use_sharding_rules
from tests.support.tiny_jobs import make_partial_mesh

X = jnp.linspace(-2.0, 3.0, 24, dtype=jnp.float32).reshape(4, 6)


ROW = np.arange(6, dtype=np.float32)


def compute_softmaxes(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x) * jax.nn.softmax(x) + jax.nn.softmax(x)


@jax.custom_jvp
def compute_cube(x: jax.Array) -> jax.Array:
    return x * x * x


@jax.custom_vjp
def halve(x: jax.Array) -> jax.Array:
    return x / 2


compute_cube.defjvp(lambda primals, tangents: (compute_cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]))
halve.defvjp(lambda x: (halve(x), None), lambda _, given: (given / 2,))


def run_scan(x: jax.Array) -> jax.Array:
    return lax.scan(lambda carry, _: (compute_softmaxes(carry), carry.sum()), x, None, length=3)[0]


def run_loop(x: jax.Array) -> jax.Array:
    return lax.while_loop(
        lambda carry: carry[0] < 3, lambda carry: (carry[0] + 1, compute_softmaxes(carry[1])), (0, x)
    )[1]


def run_cond(x: jax.Array) -> jax.Array:
    return lax.cond(x.sum() > 0, compute_softmaxes, lambda x: compute_softmaxes(-x), x)


def run_shard_map(x: jax.Array) -> jax.Array:
    specs = PartitionSpec(BATCH_AXES)
    return jax.shard_map(
        lambda part: compute_softmaxes(part) + lax.psum(part, BATCH_AXES),
        in_specs=specs,
        out_specs=specs,
        check_vma=False,
    )(x)


# All constructs of a program; operations with inner programs are listed by name.
PROGRAMS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "plain": compute_softmaxes,
    "jit": lambda x: jax.jit(compute_softmaxes)(x) + jax.jit(compute_softmaxes)(x + 1),
    "custom_jvp_call": lambda x: compute_cube(x) + compute_cube(x) * x,
    "custom_vjp_call": lambda x: halve(x) + halve(x) * x,
    "remat2": jax.checkpoint(compute_softmaxes),
    "remat2, alike": jax.checkpoint(compute_softmaxes, prevent_cse=False),
    "scan": run_scan,
    "while": run_loop,
    "cond": run_cond,
    "shard_map": run_shard_map,
    "constants": lambda x: x * np.arange(6, dtype=np.float32) + x * np.arange(6, dtype=np.float32),
    "scalars": lambda x: jnp.where(x > 0, x * 2.0, -x) + 2.0 * x,
    "constants in jit": lambda x: jax.jit(lambda x: x * ROW)(x) + jax.jit(lambda x: x * ROW)(x),
    "known branch": lambda x: (
        lax.cond(True, compute_softmaxes, jnp.sin, x) + lax.switch(1, [jnp.sin, compute_softmaxes], x)
    ),
    "branch of a platform": lambda x: (
        lax.platform_dependent(x, cpu=compute_softmaxes, default=jnp.sin) + compute_softmaxes(x)
    ),
    "half": lambda x: compute_softmaxes(x.astype(jnp.bfloat16)).astype(jnp.float32),
}
NOT_DIFFERENTIABLE = {"while"}
# Those whose gradient has other operations with inner programs.
DAILY_GRADIENTS = {"custom_jvp_call", "custom_vjp_call", "remat2", "scan", "cond", "shard_map"}


def list_inner_programs(program: Jaxpr) -> Iterator[Jaxpr]:
    yield program
    for equation in program.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from list_inner_programs(inner)


def trace(function: Callable[..., Any], *inputs: Any) -> ClosedJaxpr:
    return jax.make_jaxpr(function)(*inputs)


CASES = [
    *(pytest.param(name, False, id=name) for name in PROGRAMS),
    *(
        pytest.param(name, True, id=f"gradient of {name}", marks=() if name in DAILY_GRADIENTS else pytest.mark.soak)
        for name in PROGRAMS
        if name not in NOT_DIFFERENTIABLE
    ),
]


@pytest.mark.daily(8)
@pytest.mark.parametrize(("name", "is_gradient"), CASES)
def test_the_canonical_program_computes_the_same_without_duplicates(name: str, is_gradient: bool) -> None:
    function = PROGRAMS[name]
    if is_gradient:
        if name in NOT_DIFFERENTIABLE:
            function = lambda x: jnp.vdot(x, PROGRAMS[name](x))  # noqa: E731 - another program, of its values
        else:
            function = jax.grad(lambda x: jnp.vdot(x, PROGRAMS[name](x)))
    with use_sharding_rules(make_partial_mesh({"data": 4})):
        once = trace(canonicalise(function), X)
        check_jaxpr(once.jaxpr)
        np.testing.assert_allclose(jax.jit(canonicalise(function))(X), jax.jit(function)(X), rtol=1e-5, atol=1e-6)
    for program in list_inner_programs(once.jaxpr):
        operations = collections.Counter(
            (each.primitive.name, tuple(map(str, each.invars)), str(each.params)) for each in program.eqns
        )
        assert set(operations.values()) <= {1}
        names = {each.primitive.name for each in program.eqns}
        assert not names & {"jit", "custom_jvp_call", "custom_vjp_call", "closed_call", "sin"}
        assert name == "cond" or "cond" not in names


def test_a_softmax_and_its_gradient_share_their_sum() -> None:
    def loss(x: jax.Array) -> jax.Array:
        return jnp.vdot(x, jax.nn.softmax(x))

    def broadcasts(function: Callable[..., Any]) -> int:
        """Count broadcasts before compilation, including implicit ones of other operations."""
        return jax.jit(function).lower(X).as_text().count("stablehlo.broadcast_in_dim")

    gradient = jax.value_and_grad(loss)
    divisions = [each for each in trace(canonicalise(gradient), X).jaxpr.eqns if each.primitive.name == "div"]
    first, second = (each.invars[1] for each in divisions if each.invars[1].aval.shape == X.shape)
    assert first is second
    assert broadcasts(canonicalise(gradient)) < broadcasts(gradient)


def test_rematerialised_operations_stay_separate() -> None:
    def loss(x: jax.Array, prevent_cse: bool) -> jax.Array:
        return jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)), prevent_cse=prevent_cse)(x).sum()

    def sines_and_barriers(prevent_cse: bool) -> tuple[int, int]:
        program = trace(canonicalise(jax.value_and_grad(lambda x: loss(x, prevent_cse))), X).jaxpr
        names = [each.primitive.name for each in program.eqns]
        return names.count("sin"), names.count("optimization_barrier")

    assert sines_and_barriers(prevent_cse=True) == (3, 1)
    assert sines_and_barriers(prevent_cse=False) == (2, 0)


@pytest.mark.parametrize("reverse", [False, True])
def test_an_unrolled_scan_shares_operations_between_iterations(reverse: bool) -> None:
    def function(x: jax.Array, unroll: int) -> Any:
        def body(carry: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry + row, jnp.sin(x[0]) * row

        return lax.scan(body, x[0], x, unroll=unroll, reverse=reverse)

    program = trace(canonicalise(lambda x: function(x, len(X))), X).jaxpr
    names = [each.primitive.name for each in program.eqns]
    assert (names.count("sin"), names.count("scan")) == (1, 0)
    for unroll in (1, 2, len(X)):
        found, expected = jax.jit(canonicalise(lambda x: function(x, unroll)))(X), function(X, 1)  # noqa: B023 - called here
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)


def test_operations_traced_under_other_settings_differ() -> None:
    def function(key: jax.Array) -> Any:
        with jax.threefry_partitionable(False):
            first = jax.random.bits(key, (6,))
        with jax.threefry_partitionable(True):
            return first, jax.random.bits(key, (6,))

    key = jax.random.key(0)
    found = jax.jit(canonicalise(function))(key)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in function(key)]
    assert found[0].tobytes() != found[1].tobytes()


def test_rematerialisation_works_with_operands_that_do_not_vary() -> None:
    mesh = make_partial_mesh({"data": 4})

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        specs = PartitionSpec(), PartitionSpec("data")
        waves = jax.checkpoint(lambda weights, x: jnp.sin(jnp.sin(x * weights)))
        return jax.shard_map(waves, mesh=mesh, in_specs=specs, out_specs=specs[1])(weights, x).sum()

    found, expected = (jax.jit(each)(X[0], X) for each in (canonicalise(jax.grad(loss)), jax.grad(loss)))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_literals_are_equal_only_with_equal_bits_and_type() -> None:
    def function(x: jax.Array) -> Any:
        one, other = x * np.float32(0.0), x * np.float32(-0.0)
        return one, other, x.astype(jnp.int32) * 2, x * 2

    found = jax.jit(canonicalise(function))(X)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in jax.jit(function)(X)]


def test_effects_are_kept_in_order() -> None:
    seen: list[float] = []

    def function(x: jax.Array) -> jax.Array:
        for _ in range(2):
            jax.debug.callback(lambda value: seen.append(float(value)), x[0, 0], ordered=True)
        jax.debug.callback(lambda value: seen.append(float(value)), x[0, 1], ordered=True)
        return x

    jax.jit(canonicalise(function))(X)
    jax.effects_barrier()
    assert seen == [float(X[0, 0]), float(X[0, 0]), float(X[0, 1])]


def test_an_unused_result_is_available_to_later_operations() -> None:
    def function(x: jax.Array) -> Any:
        values, _ = lax.top_k(x, 2)
        _, places = lax.top_k(x, 2)
        return values, places

    program = trace(canonicalise(function), X).jaxpr
    assert sum(each.primitive.name == "top_k" for each in program.eqns) == 1
    for found, expected in zip(jax.jit(canonicalise(function))(X), function(X), strict=True):
        np.testing.assert_array_equal(found, expected)
