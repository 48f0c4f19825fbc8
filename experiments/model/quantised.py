"""8-bit matmuls for training (`precision.matmul`): int8 or float8 operands, whose scales are computed at each call.

Recipe, that of SwitchBack (Wortsman et al., 2023, arXiv 2304.13013) and of torchao's `rowwise_with_gw_hp`:

| matmul | operands | scales |
|---|---|---|
| forward, x w | both in 8 bits | one for each token of x, one for each column of w |
| gradient of x, dy w^T | both in 8 bits; w as in the forward pass | one for each token of dy times w's scales |
| gradient of w, x^T dy | compute type | none |

A scale is the largest absolute value of its row or column over the largest number of the 8-bit type, so nothing is
clipped, and gradients pass the rounding unchanged (straight through). int8 is rounded to the nearest value and
accumulated in int32. float8 is e4m3 forward and e5m2 for gradients, and accumulated in float32. The gradient of w sums
over tokens, so its scales would be shared by all tokens of a micro-batch: the result would depend on the split into
micro-batches, and noise grows with their number. The table's scales depend on one token or on the weights alone. So
there is no state, a resumed run has the same bits, and splits and meshes change nothing but rounding. Rounding to
nearest needs no random numbers; stochastic rounding would need them for each token.

Inside of `use_matmul_type` every `multiply` is quantised. Models enter it for their layers alone, so embedding and head
stay in the compute type; routers, gates and other narrow matmuls never call `multiply`.

Routed experts (`expert_parallel`) differ in one point: for the gradient of x, w is quantised a second time, with one
scale for each row. The scale of a row is applied to the sums. The scale of a column depends on the expert, so dy would
have to be multiplied by an array of its own size before rounding.

Libraries. Qwix 0.1.8 finds matmuls by replacing functions of JAX in the whole process, and recognises weights by the
identity of the parameter, which is lost after a cast. Its functions with quantised gradients are private, and scale
the gradient of w over tokens. AQT 0.9.0 is being removed from its main user in favour of Qwix (maxtext#3912), and
neither takes a maximum over devices inside of a `shard_map`, where experts are computed.

Shape legend: T any axes of tokens, I contracted axes, O further axes of the weights.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from experiments.model.platform import QUANTISED_NAME
from runner.config import MatmulType

_SMALLEST = 1e-30  # values of a row that are all smaller count as zeros
_current: contextvars.ContextVar[MatmulType] = contextvars.ContextVar("matmul_type", default="compute")


class EightBitTypes(NamedTuple):
    """Types of operands."""

    forward: DTypeLike
    gradient: DTypeLike


TYPES = {
    "int8": EightBitTypes(jnp.int8, jnp.int8),
    "float8": EightBitTypes(jnp.float8_e4m3fn, jnp.float8_e5m2),
}


@contextlib.contextmanager
def use_matmul_type(matmul: MatmulType) -> Iterator[None]:
    """Quantise every `multiply` that is traced inside of the context; `compute` leaves them in their type."""
    token = _current.set(matmul)
    try:
        yield
    finally:
        _current.reset(token)


def get_matmul_type() -> MatmulType:
    """Return the type of `use_matmul_type`; `compute` outside of it."""
    return _current.get()


def get_accumulator(dtype: DTypeLike) -> DTypeLike:
    """Return the type in which products of such operands are summed."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


class Quantised(NamedTuple):
    """Values in 8 bits, and the float32 factors that turn them back, of size 1 along the axes that share them."""

    values: jax.Array
    scale: jax.Array


def quantise(x: jax.Array, axes: tuple[int, ...], dtype: DTypeLike, mesh_axes: tuple[str, ...] = ()) -> Quantised:
    """Return `x` in 8 bits, with a scale that is shared along `axes`.

    A row with an infinite or undefined value has such a scale, so that the product shows it.

    Args:
        x: array of floats.
        axes: axes that share a scale: those that are contracted.
        dtype: 8-bit type.
        mesh_axes: inside of a `shard_map`, the mesh axes over which `axes` are sharded.
    """
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    limit = float(jnp.iinfo(dtype).max if is_integer else jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    if mesh_axes:
        largest = lax.pmax(largest, mesh_axes)
    largest = jnp.maximum(largest, _SMALLEST)
    # The reciprocal is computed once for each row; a division of each value might be rewritten into one or not.
    # Rounding takes the largest value back to the limit, so nothing is clipped.
    scaled = wide * (limit / largest)
    return Quantised((jnp.round(scaled) if is_integer else scaled).astype(dtype), largest / limit)


def multiply(x_TxI: jax.Array, kernel_IxO: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Return the product (T, O) in the type of both operands, quantised as the context says.

    Args:
        x_TxI: tokens, with any leading axes.
        kernel_IxO: weights, whose first `num_contracted` axes are the last ones of `x`; a matrix if not quantised.
        num_contracted: number of contracted axes.
    """
    matmul = get_matmul_type()
    if matmul == "compute":
        return x_TxI @ kernel_IxO
    return checkpoint_name(multiply_in_8_bits(matmul, num_contracted, x_TxI, kernel_IxO), QUANTISED_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_in_8_bits(matmul: MatmulType, num_contracted: int, x_TxI: jax.Array, kernel_IxO: jax.Array) -> jax.Array:
    """Return the product of `multiply` from operands in 8 bits, whatever the context."""
    return _multiply_forward(matmul, num_contracted, x_TxI, kernel_IxO)[0]


def _multiply_forward(
    matmul: MatmulType, num_contracted: int, x_TxI: jax.Array, kernel_IxO: jax.Array
) -> tuple[jax.Array, Any]:
    types, first = TYPES[matmul], x_TxI.ndim - num_contracted
    x_axes, kernel_axes = tuple(range(first, x_TxI.ndim)), tuple(range(num_contracted))
    x, kernel = quantise(x_TxI, x_axes, types.forward), quantise(kernel_IxO, kernel_axes, types.forward)
    sums_TxO = _dot(x.values, kernel.values, (x_axes, kernel_axes), get_accumulator(types.forward))
    num_columns = kernel_IxO.ndim - num_contracted
    token_scale = x.scale.reshape(*x_TxI.shape[:first], *[1] * num_columns)
    y_TxO = sums_TxO.astype(jnp.float32) * token_scale * kernel.scale.reshape(kernel_IxO.shape[num_contracted:])
    # The weights are kept in 8 bits alone, as their own gradient does not need them.
    return y_TxO.astype(x_TxI.dtype), (x_TxI, kernel)


def differentiate_in_8_bits(
    matmul: MatmulType, num_contracted: int, residuals: tuple[jax.Array, Quantised], dy_TxO: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of tokens and weights from the residuals of the product and its gradient."""
    types, (x_TxI, kernel) = TYPES[matmul], residuals
    first = x_TxI.ndim - num_contracted
    columns, tokens = tuple(range(first, dy_TxO.ndim)), tuple(range(first))
    # The columns' scales are factors along the contracted axes, so they are applied before rounding.
    scaled_TxO = dy_TxO.astype(jnp.float32) * kernel.scale.reshape(dy_TxO.shape[first:])
    dy = quantise(scaled_TxO, columns, types.gradient)
    kernel_columns = tuple(range(num_contracted, kernel.values.ndim))
    sums_TxI = _dot(dy.values, kernel.values, (columns, kernel_columns), get_accumulator(types.gradient))
    dx_TxI = sums_TxI.astype(jnp.float32) * dy.scale.reshape(*x_TxI.shape[:first], *[1] * num_contracted)
    dkernel_IxO = _dot(x_TxI, dy_TxO, (tokens, tokens), None)
    return dx_TxI.astype(x_TxI.dtype), dkernel_IxO


multiply_in_8_bits.defvjp(_multiply_forward, differentiate_in_8_bits)


def _dot(
    a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]], accumulator: DTypeLike | None
) -> jax.Array:
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=accumulator)
