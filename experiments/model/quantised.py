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
there is no state, a resumed run has the same bits, and splits and meshes change nothing but rounding.

With `precision.gradient_rounding: stochastic` dy is rounded to one of its two neighbours, with probabilities that make
the mean exact (`round_by_offsets`). Its random numbers are a hash of the step's key, the layer, the matmul in it, the
example's index in the step, the position and the column (`draw_offsets`): element-wise integer arithmetic that fuses
into the quantisation, with the same numbers whatever the split, the mesh and the attempt. A layer draws them if it is
called through `rounds_gradients` with a key named "rounding". All other operands are rounded to the nearest value.

Inside of `use_matmul_type` every `multiply` is quantised. Models enter it for their layers alone, so embedding and head
stay in the compute type; routers, gates and other narrow matmuls never call `multiply`.

Routed experts (`expert_parallel`) differ in one point: for the gradient of x, w is quantised a second time, with one
scale for each row. The scale of a row is applied to the sums. The scale of a column depends on the expert, so dy would
have to be multiplied by an array of its own size before rounding. dy is always rounded to the nearest value: slots do
not know the example and the position of their tokens.

Libraries. Qwix 0.1.8 finds matmuls by replacing functions of JAX in the whole process, and recognises weights by the
identity of the parameter, which is lost after a cast. Its functions with quantised gradients are private, and scale
the gradient of w over tokens. AQT 0.9.0 is being removed from its main user in favour of Qwix (maxtext#3912), and
neither takes a maximum over devices inside of a `shard_map`, where experts are computed.

Shape legend: T any axes of tokens, I contracted axes, O further axes of the weights.
"""

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from experiments.model.platform import QUANTISED_NAME
from runner.config import MatmulType, PrecisionConfig

ROUNDING = "rounding"  # name of the random key
_SMALLEST = 1e-30  # values of a row that are all smaller count as zeros
_ROUNDING_KEY = 0x38626974  # folded into the step's key
_OFFSET_BITS = 16
_current: contextvars.ContextVar[MatmulType] = contextvars.ContextVar("matmul_type", default="compute")
_layer: contextvars.ContextVar["_LayerRounding | None"] = contextvars.ContextVar("layer_rounding", default=None)
LayerCall = TypeVar("LayerCall", bound=Callable[..., Any])


class _EightBitTypes(NamedTuple):
    """Types of operands."""

    forward: DTypeLike
    gradient: DTypeLike


TYPES = {
    "int8": _EightBitTypes(jnp.int8, jnp.int8),
    "float8": _EightBitTypes(jnp.float8_e4m3fn, jnp.float8_e5m2),
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


class _LayerRounding(NamedTuple):
    """Random word of a layer at a step (uint32), the index of each example in the step (B), and numbers for matmuls."""

    word: jax.Array
    examples: jax.Array
    numbers: Iterator[int]


class RoundingSeed(NamedTuple):
    """Random word of a matmul at a step (uint32), and the index of each example in the step (B)."""

    word: jax.Array
    examples: jax.Array


def rounds_gradients(get_examples: Callable[[Any], jax.Array | None]) -> Callable[[LayerCall], LayerCall]:
    """Return a decorator for the call of a layer, (x_BxTxD, info, ...), whose 8-bit matmuls may round stochastically.

    They do if the caller of the model passes a key named "rounding" (`make_rounding_keys`), which a loop over layers
    must split. Their numbers follow the order of the layer's calls of `multiply`.

    Args:
        get_examples: function of `info` that returns the index of each example in the step; None is 0, 1, 2 ...
    """

    def decorate(call: LayerCall) -> LayerCall:
        @functools.wraps(call)
        def call_layer(layer: nn.Module, x_BxTxD: jax.Array, info: Any, *args: Any, **kwargs: Any) -> Any:
            if not layer.has_rng(ROUNDING):
                return call(layer, x_BxTxD, info, *args, **kwargs)
            examples_B = get_examples(info)
            examples_B = jnp.arange(x_BxTxD.shape[0]) if examples_B is None else examples_B
            word = jax.random.bits(layer.make_rng(ROUNDING), dtype=jnp.uint32)
            token = _layer.set(_LayerRounding(word, examples_B, itertools.count()))
            try:
                return call(layer, x_BxTxD, info, *args, **kwargs)
            finally:
                _layer.reset(token)

        return call_layer  # type: ignore[return-value]

    return decorate


def make_rounding_keys(precision: PrecisionConfig, key: jax.Array | None) -> dict[str, jax.Array]:
    """Return the key "rounding" of a step with this key, if gradients are rounded stochastically; else nothing."""
    if key is None or precision.gradient_rounding == "nearest":
        return {}
    return {ROUNDING: jax.random.fold_in(key, _ROUNDING_KEY)}


def draw_offsets(seed: RoundingSeed, shape: tuple[int, ...], num_token_axes: int) -> jax.Array:
    """Return float32 numbers between 0 and 1, of this shape, multiples of 2^-17; their mean is 1/2.

    The numbers are hashed from the word of the matmul, the example, the position and the column, so they depend neither
    on the sharding, nor on the examples that share a micro-batch, nor on the number of axes of tokens and columns.

    `shape` is T and O, of which T has the first `num_token_axes` axes: (B, T) or (BT,).
    """
    tokens, columns = shape[:num_token_axes], shape[num_token_axes:]
    length = math.prod(tokens) // seed.examples.size
    example_B = _hash(seed.examples.astype(jnp.uint32) + _hash(seed.word))
    token_BxT = _hash(example_B[:, None] + jnp.arange(length, dtype=jnp.uint32))
    column_O = _hash(jnp.arange(math.prod(columns), dtype=jnp.uint32) + _hash(~seed.word))
    token_words = token_BxT.reshape(*tokens, *[1] * len(columns))
    words = _hash(token_words ^ column_O.reshape(columns)) >> (32 - _OFFSET_BITS)
    # The middles of 2^16 equal intervals.
    return (words.astype(jnp.float32) + 0.5) * 2.0**-_OFFSET_BITS


def _hash(words: jax.Array) -> jax.Array:
    """Return a bijection of words (uint32) whose upper bits depend on all bits: lowbias32 without its last shift.

    Source: C. Wellons, Prospecting for hash functions (https://nullprogram.com/blog/2018/07/31/).
    """
    words = (words ^ (words >> 16)) * jnp.uint32(0x7FEB352D)
    return (words ^ (words >> 15)) * jnp.uint32(0x846CA68B)


def round_by_offsets(values: jax.Array, offsets: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return float32 values within the range of an 8-bit type as one of their two neighbours in it.

    A value between neighbours a < b becomes b if its distance to b, in units of b - a, is at most the offset. Over
    uniform offsets the mean is the value. Values of the type stay as they are, and NaNs where the type has them.
    """
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.floor(values + offsets).astype(dtype)
    # The gap of neighbours is the power of two below the value, but at least the smallest normal number, divided by 2
    # for each bit of the mantissa. Products by a power of two are exact, and so is the sum: the quotient is below 8,
    # and a float32 then has at least 20 bits behind the point. Division might be inexact, so there is none.
    info = jnp.finfo(dtype)
    exponent = lax.bitcast_convert_type(values, jnp.uint32) & 0x7F800000
    exponent = jnp.maximum(exponent, (127 + int(info.minexp)) << 23) - (int(info.nmant) << 23)
    gap, inverse = (lax.bitcast_convert_type(each, jnp.float32) for each in (exponent, (254 << 23) - exponent))
    return (jnp.floor(values * inverse + offsets) * gap).astype(dtype)


def get_accumulator(dtype: DTypeLike) -> DTypeLike:
    """Return the type in which products of such operands are summed."""
    return jnp.int32 if jnp.issubdtype(dtype, jnp.integer) else jnp.float32


class Quantised(NamedTuple):
    """Values in 8 bits, and the float32 factors that turn them back, of size 1 along the axes that share them."""

    values: jax.Array
    scale: jax.Array


def quantise(
    x: jax.Array,
    axes: tuple[int, ...],
    dtype: DTypeLike,
    mesh_axes: tuple[str, ...] = (),
    offsets: jax.Array | None = None,
) -> Quantised:
    """Return `x` in 8 bits, with a scale that is shared along `axes`.

    A row with an infinite or undefined value has such a scale, so that the product shows it.

    Args:
        x: array of floats.
        axes: axes that share a scale: those that are contracted.
        dtype: 8-bit type.
        mesh_axes: inside of a `shard_map`, the mesh axes over which `axes` are sharded.
        offsets: random numbers for stochastic rounding (`round_by_offsets`); None rounds to the nearest value.
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
    if offsets is not None:
        # An offset, unlike rounding, could take a value beyond the limit.
        return Quantised(round_by_offsets(jnp.clip(scaled, -limit, limit), offsets, dtype), largest / limit)
    return Quantised((jnp.round(scaled) if is_integer else scaled).astype(dtype), largest / limit)


def multiply(x_TxI: jax.Array, kernel_IxO: jax.Array, num_contracted: int = 1) -> jax.Array:
    """Return the product (T, O) in the type of both operands, quantised as the context says.

    The first `num_contracted` axes of the kernel are the last ones of `x`. It is a matrix if it is not quantised.
    """
    matmul = get_matmul_type()
    if matmul == "compute":
        return x_TxI @ kernel_IxO
    layer, seed = _layer.get(), None
    if layer is not None:
        seed = RoundingSeed(layer.word + jnp.uint32(next(layer.numbers)), layer.examples)
    return checkpoint_name(multiply_in_8_bits(matmul, num_contracted, x_TxI, kernel_IxO, seed), QUANTISED_NAME)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def multiply_in_8_bits(
    matmul: MatmulType, num_contracted: int, x_TxI: jax.Array, kernel_IxO: jax.Array, seed: RoundingSeed | None = None
) -> jax.Array:
    """Return the product of `multiply` from operands in 8 bits, whatever the context; `seed` is for its gradient."""
    return _multiply_forward(matmul, num_contracted, x_TxI, kernel_IxO, seed)[0]


def _multiply_forward(
    matmul: MatmulType, num_contracted: int, x_TxI: jax.Array, kernel_IxO: jax.Array, seed: RoundingSeed | None
) -> tuple[jax.Array, Any]:
    types, first = TYPES[matmul], x_TxI.ndim - num_contracted
    x_axes, kernel_axes = tuple(range(first, x_TxI.ndim)), tuple(range(num_contracted))
    x, kernel = quantise(x_TxI, x_axes, types.forward), quantise(kernel_IxO, kernel_axes, types.forward)
    sums_TxO = _dot(x.values, kernel.values, (x_axes, kernel_axes), get_accumulator(types.forward))
    num_columns = kernel_IxO.ndim - num_contracted
    token_scale = x.scale.reshape(*x_TxI.shape[:first], *[1] * num_columns)
    y_TxO = sums_TxO.astype(jnp.float32) * token_scale * kernel.scale.reshape(kernel_IxO.shape[num_contracted:])
    # The weights are kept in 8 bits alone, as their own gradient does not need them.
    return y_TxO.astype(x_TxI.dtype), (x_TxI, kernel, seed)


def differentiate_in_8_bits(
    matmul: MatmulType,
    num_contracted: int,
    residuals: tuple[jax.Array, Quantised, RoundingSeed | None],
    dy_TxO: jax.Array,
) -> tuple[jax.Array, jax.Array, None]:
    """Return the gradients of tokens and weights from the residuals of the product and its gradient."""
    types, (x_TxI, kernel, seed) = TYPES[matmul], residuals
    first = x_TxI.ndim - num_contracted
    columns, tokens = tuple(range(first, dy_TxO.ndim)), tuple(range(first))
    # The columns' scales are factors along the contracted axes, so they are applied before rounding.
    scaled_TxO = dy_TxO.astype(jnp.float32) * kernel.scale.reshape(dy_TxO.shape[first:])
    offsets = None if seed is None else draw_offsets(seed, dy_TxO.shape, first)
    dy = quantise(scaled_TxO, columns, types.gradient, offsets=offsets)
    kernel_columns = tuple(range(num_contracted, kernel.values.ndim))
    sums_TxI = _dot(dy.values, kernel.values, (columns, kernel_columns), get_accumulator(types.gradient))
    dx_TxI = sums_TxI.astype(jnp.float32) * dy.scale.reshape(*x_TxI.shape[:first], *[1] * num_contracted)
    dkernel_IxO = _dot(x_TxI, dy_TxO, (tokens, tokens), None)
    return dx_TxI.astype(x_TxI.dtype), dkernel_IxO, None


multiply_in_8_bits.defvjp(_multiply_forward, differentiate_in_8_bits)


def _dot(
    a: jax.Array, b: jax.Array, contracted: tuple[tuple[int, ...], tuple[int, ...]], accumulator: DTypeLike | None
) -> jax.Array:
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=accumulator)
