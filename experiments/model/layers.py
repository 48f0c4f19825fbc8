"""Layers: projections, norms and the gated MLP, with the sharding and the residuals of each.

Where the platform's form asks for it (`platform`), tokens are flattened to two dimensions before each matmul; not where
the sequence is sharded (`flatten_tokens`). Activations keep only their inputs for the backward pass and recompute the
rest, which is faster than writing residuals out and reading them back in a scan over layers.

Residual stream. It is sharded along positions over the mesh axes `sequence` and `tensor` (`constrain_stream`). A matmul
whose heads or columns are sharded over `tensor` needs all positions of its shard of the sequence (`gather_stream`). So
the stream is all-gathered before the first matmul of a block and reduce-scattered after the last one, instead of being
replicated everywhere and all-reduced.

Norms. They are computed in float32 over the last axis. A separate reduction over the width reads the whole residual
stream once more. So on TPUs and GPUs the statistics, one or two numbers per token, are saved for the backward pass
(`mark_saved`), and a layer norm computes mean and mean square in one pass, which libtpu can fuse into the matmul before
it. The gradients are written out: the derived gradient of a layer norm also sums differences from the mean, which add
up to 0. On CPUs only the input is saved, and everything is recomputed.

Gradients of matrices with sharded columns. libtpu makes a reduce-scatter of a sum whose rows are sharded. If the
columns are sharded, which are contiguous in memory, it makes an all-reduce, which sends twice as much. So on a TPU the
gradient is computed transposed, which costs a matmul nothing, and each device transposes its own shard back
(`platform.reduce_scatters_only_rows`).

Shape legend: B batch, T sequence, V vocabulary, D width, M hidden width of the MLP, N heads, H and W widths of a head,
I and O input and output of any dense layer. Norms take any leading axes of tokens.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax
from jax.nn.initializers import Initializer
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from experiments.model.platform import (
    LANES,
    dots_policy,
    keeps_residuals,
    mark_saved,
    mark_weight,
    platform,
    reduce_scatters_only_rows,
    sums_tokens_by_matmul,
    uses_head_major_layout,
    with_row_major_gradient,
    with_row_major_layout,
    writes_gelu_gradient,
)
from experiments.model.quantised import get_matmul_type, multiply
from runner.errors import InvalidError
from runner.parallel.mesh import STATE_AXES, list_axes, select_dividing_axes

INIT_STDDEV = 0.02
STREAM_AXES = ("batch", "stream", "embed_act")
Activation = Literal["swiglu", "geglu", "squared_relu", "clamped_swiglu"]
CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_ALPHA = 7.0, 1.702  # of GPT-OSS
Remat = Literal["none", "dots", "layers"]
Residuals = tuple[jax.Array, ...]

_custom_gradient = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
_recompute = functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))


# Norms.


def rms_norm(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Return x / rms(x) times `scale_D`, in float32."""
    return (_rms_norm_saved if keeps_residuals() else _rms_norm_recomputed)(epsilon, x, scale_D)


@_recompute
def _rms_norm_recomputed(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(_mean(x * x) + epsilon) * scale_D


@_custom_gradient
def _rms_norm_saved(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    return _rms_norm_forward(epsilon, x, scale_D)[0]


def _rms_norm_forward(epsilon: float, x: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, Residuals]:
    wide = x.astype(jnp.float32)
    inverse = mark_saved(lax.rsqrt(_mean(wide * wide) + epsilon))
    return wide * inverse * scale_D, (x, inverse, scale_D)


def _rms_norm_backward(epsilon: float, residuals: Residuals, dy: jax.Array) -> Residuals:
    x, inverse, scale_D = residuals
    normal, dnormal = x.astype(jnp.float32) * inverse, dy * scale_D
    # The gradient of the norm itself removes the component along the normalised input.
    dx = inverse * (dnormal - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _sum_over_tokens(dy * normal, scale_D)


_rms_norm_saved.defvjp(_rms_norm_forward, _rms_norm_backward)


def layer_norm(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Return x minus its mean, divided by its standard deviation, times `scale_D`, plus `bias_D`, in float32."""
    return (_layer_norm_saved if keeps_residuals() else _layer_norm_recomputed)(epsilon, x, scale_D, bias_D)


@_recompute
def _layer_norm_recomputed(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    mean = _mean(x)
    return (x - mean) * (lax.rsqrt(_mean(jnp.square(x - mean)) + epsilon) * scale_D) + bias_D


@_custom_gradient
def _layer_norm_saved(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    return _layer_norm_forward(epsilon, x, scale_D, bias_D)[0]


def _layer_norm_forward(
    epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array
) -> tuple[jax.Array, Residuals]:
    wide = x.astype(jnp.float32)
    mean, mean_square = mark_saved(_mean(wide)), _mean(wide * wide)
    # Rounding can make the difference of the two means slightly negative.
    inverse = mark_saved(lax.rsqrt(jnp.maximum(mean_square - mean * mean, 0) + epsilon))
    return (wide - mean) * inverse * scale_D + bias_D, (x, mean, inverse, scale_D, bias_D)


def _layer_norm_backward(epsilon: float, residuals: Residuals, dy: jax.Array) -> Residuals:
    x, mean, inverse, scale_D, bias_D = residuals
    normal, dnormal = (x.astype(jnp.float32) - mean) * inverse, dy * scale_D
    dx = inverse * (dnormal - _mean(dnormal) - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _sum_over_tokens(dy * normal, scale_D), _sum_over_tokens(dy, bias_D)


_layer_norm_saved.defvjp(_layer_norm_forward, _layer_norm_backward)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _sum_over_tokens(x: jax.Array, parameter_D: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=tuple(range(x.ndim - 1))).astype(parameter_D.dtype)


# Sharding of activations and of the gradients of matrices. All of it follows the mesh and the rules of the caller.


def constrain(x: jax.Array, *names: str) -> jax.Array:
    """Return `x` with a sharding constraint from logical axis names, over those mesh axes that divide its axes."""
    spec = make_partition_spec(x.shape, *names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def make_partition_spec(shape: tuple[int, ...], *names: str) -> PartitionSpec | None:
    """Return the spec by which `constrain` shards an array of this shape; None without a mesh or without rules."""
    mesh, spec = jax.sharding.get_abstract_mesh(), nn.logical_to_mesh_axes(names)
    if mesh.empty or not spec:
        return None
    return PartitionSpec(
        *(select_dividing_axes(size, entry, mesh.shape) for size, entry in zip(shape, spec, strict=True))
    )


def constrain_stream(x_BxTxD: jax.Array) -> jax.Array:
    """Return `x` sharded as the residual stream is."""
    return constrain(x_BxTxD, *STREAM_AXES)


def save_stream(x_BxTxD: jax.Array) -> jax.Array:
    """Return `x` sharded as the residual stream is and marked as saved; row-major, as norms and matmuls read it."""
    x_BxTxD, spec = constrain_stream(x_BxTxD), make_partition_spec(x_BxTxD.shape, *STREAM_AXES)
    if not uses_head_major_layout() or spec is None:
        return mark_saved(x_BxTxD)
    return mark_saved(jax.shard_map(with_row_major_layout, in_specs=spec, out_specs=spec, check_vma=False)(x_BxTxD))


def gather_stream(x_BxTxD: jax.Array) -> jax.Array:
    """Return `x` as a matmul with columns sharded over `tensor` needs it: positions sharded over `sequence` alone."""
    return constrain(x_BxTxD, "batch", "sequence", "embed_act")


def flatten_tokens(x_BxTxI: jax.Array) -> jax.Array:
    """Return tokens in one axis, (BT, I); unchanged in the head-major form and where the sequence is sharded.

    Two axes of which the second is sharded cannot become one without communication.
    """
    return x_BxTxI if num_sequence_shards() > 1 or uses_head_major_layout() else x_BxTxI.reshape(-1, x_BxTxI.shape[-1])


def num_sequence_shards() -> int:
    """Return the number of devices that share each sequence (context parallelism)."""
    return num_shards("sequence")


def num_shards(name: str) -> int:
    """Return the number of devices over which the rules of the caller shard a logical axis."""
    spec = nn.logical_to_mesh_axes((name,))
    return num_devices(spec[0]) if spec else 1


def packs_heads(num_heads: int, num_key_heads: int, width: int) -> bool:
    """Return True if the TPU kernel of attention reads such heads packed: several in the lanes of a register."""
    if width >= LANES or LANES % width or num_sequence_shards() > 1:
        return False
    pack, group = LANES // width, num_heads // num_key_heads
    return num_key_heads % (pack * num_shards("heads")) == 0 and (group == 1 or group % pack == 0)


def validate_head_sharding(num_heads: int, key: str = "heads") -> None:
    """Raise `InvalidError` if the heads do not divide over the devices that share them, on the caller's mesh."""
    if num_heads % num_shards("heads"):
        sizes = ", ".join(f"{axis} {size}" for axis, size in jax.sharding.get_abstract_mesh().shape.items())
        raise InvalidError(
            f"config.model.{key}={num_heads} does not divide over the devices that share the heads (mesh: {sizes}); "
            "make topology.mesh.tensor a divisor of it"
        )


def num_devices(entry: str | tuple[str, ...] | None) -> int:
    """Return the number of devices along the mesh axes of an entry of a `PartitionSpec`; 1 without a mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in list_axes(entry))


def split_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes of an entry of a `PartitionSpec` along which there is more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in list_axes(entry) if mesh.shape[axis] > 1)


def with_scattered_gradient(matrix: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """Return `matrix` (I, O), sharded by `spec`; on TPUs its gradient is reduce-scattered if O is sharded.

    Without a mesh `spec` is None.
    """
    if spec is None or not reduce_scatters_only_rows():
        return matrix
    rows, columns = spec
    has_sharded_columns = any(axis in STATE_AXES for axis in split_axes(columns))
    return _transpose_gradient(PartitionSpec(columns, rows), matrix) if has_sharded_columns else matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _transpose_gradient(transposed: PartitionSpec, matrix: jax.Array) -> jax.Array:
    return matrix


def _transpose_gradient_backward(transposed: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    columns, rows = transposed
    scattered = jax.lax.with_sharding_constraint(gradient.T, transposed)
    return (jax.lax.with_sharding_constraint(scattered.T, PartitionSpec(rows, columns)),)


_transpose_gradient.defvjp(lambda transposed, matrix: (matrix, None), _transpose_gradient_backward)


def replicate_per_device(matrix: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """Return a copy of `matrix` (I, O) for each device along `axes`, transposed: (devices, O, I).

    Each copy has O gathered and I sharded as in `spec`. In the backward pass each device's gradient is reduce-scattered
    over those of `axes` that shard O, and the result is all-reduced over the others.
    """
    axes, rows, columns = (split_axes(entry) for entry in (axes, *spec))
    columns = tuple(axis for axis in columns if axis in axes)
    others = tuple(axis for axis in axes if axis not in columns)

    def replicate(shard: jax.Array) -> jax.Array:
        shard = jax.lax.pcast(shard, others, to="varying").T
        whole = jax.lax.all_gather(shard, columns, tiled=True) if columns else shard
        return (with_row_major_gradient(whole) if reduce_scatters_only_rows() else whole)[None]

    specs = PartitionSpec(rows, columns), PartitionSpec(axes, None, rows)
    return jax.shard_map(replicate, in_specs=specs[0], out_specs=specs[1])(matrix)


# Modules.


class Projection(nn.Module):
    """Kernel of a matmul with an optional bias; base class of `Dense`, `ToHeads` and `FromHeads`.

    Parameters are flat in every form: heads and their width are one axis. So a parameter with two axes is a matrix, and
    one with a single axis is not, which weight decay relies on.
    """

    features: int
    axes: tuple[str, str]
    stddev: float = INIT_STDDEV
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    has_bias: bool = True
    is_packed: bool = False  # heads are packed (`packs_heads`)

    def make_kernel(self, num_inputs: int) -> jax.Array:
        """Return the kernel (I, O) in `compute_dtype`."""
        kernel_init = with_axes(nn.initializers.normal(self.stddev), *self.axes)
        kernel_IxO = self.param("kernel", kernel_init, (num_inputs, self.features), self.param_dtype)
        spec = make_partition_spec(kernel_IxO.shape, *self.axes)
        return with_scattered_gradient(mark_weight(kernel_IxO.astype(self.compute_dtype)), spec)

    def add_bias(self, y: jax.Array, *shape: int) -> jax.Array:
        """Return `y` plus the bias, if there is one, reshaped to `shape`: the last axes of `y`, one axis by default."""
        if not self.has_bias:
            return y
        bias_O = self.param("bias", with_axes(nn.initializers.zeros, self.axes[1]), (self.features,), self.param_dtype)
        bias_O = bias_O.astype(self.compute_dtype)
        # A kernel writes the gradient of packed heads, so their sum over tokens is no part of what makes them.
        if self.is_packed and sums_tokens_by_matmul(y.dtype):
            return _add_with_matmul_gradient(y, bias_O)
        return y + bias_O.reshape(shape or bias_O.shape)

    def project(self, x_BTxI: jax.Array) -> jax.Array:
        """Return the product plus the bias, for tokens in one flat axis or in two."""
        y_BTxO = multiply(x_BTxI, self.make_kernel(x_BTxI.shape[-1]))
        if x_BTxI.ndim == 2 and self.axes[1] == "embed" and num_shards("stream") > 1 and platform() != "tpu":
            # With one example per device the partitioner could read the stream's sharding of positions as a sharding of
            # flat tokens, and would gather the whole batch to multiply what is sharded so.
            y_BTxO = constrain(y_BTxO, "batch", "embed_act")
        return self.add_bias(y_BTxO)


@jax.custom_vjp
def _add_with_matmul_gradient(y_BxTxO: jax.Array, bias_O: jax.Array) -> jax.Array:
    """Return the sum; the gradient of the bias is a product with ones, accumulated in float32."""
    return y_BxTxO + bias_O


def _sum_tokens_by_matmul(_: None, gradient_BxTxO: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Eight rows fill a tile. Without the barrier the compiler would make a reduction of the matmul.
    ones_8xBxT = lax.optimization_barrier(jnp.ones((8, *gradient_BxTxO.shape[:2]), gradient_BxTxO.dtype))
    sum_8xO = jnp.einsum("kbt,bto->ko", ones_8xBxT, gradient_BxTxO, preferred_element_type=jnp.float32)
    return gradient_BxTxO, sum_8xO[0].astype(gradient_BxTxO.dtype)


_add_with_matmul_gradient.defvjp(lambda y, bias: (y + bias, None), _sum_tokens_by_matmul)


class Dense(Projection):
    """Matmul with an optional bias, for tokens in one flat axis or in two."""

    @nn.compact
    def __call__(self, x_BTxI: jax.Array) -> jax.Array:
        """Return the product plus the bias."""
        return self.project(x_BTxI)


class ToHeads(Projection):
    """Matmul whose result is split into heads: (B, T, N, H) from what `flatten_tokens` makes of (B, T, I).

    In the head-major form heads precede positions in memory, as the attention kernel reads them.
    """

    num_heads: int = 1

    @nn.compact
    def __call__(self, x_BTxI: jax.Array, token_shape: tuple[int, int]) -> jax.Array:
        """Return heads (B, T, N, H); `token_shape` is (B, T)."""
        N, H = self.num_heads, self.features // self.num_heads
        kernel_IxO = self.make_kernel(x_BTxI.shape[-1])
        if self.is_packed or not uses_head_major_layout():
            y_BxTxNxH = self.add_bias(multiply(x_BTxI, kernel_IxO)).reshape(*token_shape, N, H)
        elif get_matmul_type() == "compute":
            # The einsum names heads last although the kernel wants them first: with this order the compiler copies
            # neither the result nor its gradients.
            y_BxTxNxH = self.add_bias(jnp.einsum("bti,inh->btnh", x_BTxI, kernel_IxO.reshape(-1, N, H)), N, H)
        else:
            y_BxTxNxH = self.add_bias(multiply(x_BTxI, kernel_IxO.reshape(-1, N, H)), N, H)
        return constrain(y_BxTxNxH, "batch", "sequence", "heads", "head_dim")


class FromHeads(Projection):
    """Matmul that reads heads: (B, T, O) from (B, T, N, W), in the memory layout of `ToHeads`."""

    @nn.compact
    def __call__(self, x_BxTxNxW: jax.Array) -> jax.Array:
        """Return (B, T, O)."""
        B, T, N, W = x_BxTxNxW.shape
        if uses_head_major_layout() and not self.is_packed:
            if get_matmul_type() != "compute":
                return self.add_bias(multiply(x_BxTxNxW, self.make_kernel(N * W).reshape(N, W, -1), num_contracted=2))
            x_BxNxTxW, kernel_NxWxO = x_BxTxNxW.transpose(0, 2, 1, 3), self.make_kernel(N * W).reshape(N, W, -1)
            return self.add_bias(jnp.einsum("bntw,nwo->bto", x_BxNxTxW, kernel_NxWxO))
        x_BTxNW = flatten_tokens(x_BxTxNxW.reshape(B, T, N * W))
        return self.project(x_BTxNW).reshape(B, T, -1)


class Matrix(nn.Module):
    """Kernel of a matmul, for callers that also multiply by parts of it."""

    shape: tuple[int, int]
    axes: tuple[str, str]
    param_dtype: DTypeLike
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self) -> jax.Array:
        """Return the kernel in the compute dtype."""
        init = with_axes(nn.initializers.normal(INIT_STDDEV), *self.axes)
        return mark_weight(self.param("kernel", init, self.shape, self.param_dtype).astype(self.compute_dtype))


class RMSNorm(nn.Module):
    """RMS norm over the last axis, computed in float32 and returned in `compute_dtype`.

    With `has_offset` the parameter is the distance of the scale from 1. `axis` is the logical name of the last axis.
    """

    epsilon: float
    axis: str = "embed"
    has_offset: bool = False
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x`, normalised and scaled."""
        init = nn.initializers.zeros if self.has_offset else nn.initializers.ones
        scale = self.param("scale", with_axes(init, self.axis), x.shape[-1:], self.param_dtype)
        scale = scale.astype(jnp.float32)
        return rms_norm(self.epsilon, x, 1 + scale if self.has_offset else scale).astype(self.compute_dtype)


class LayerNorm(nn.Module):
    """Layer norm computed in float32 and returned in `compute_dtype`, with the parameters of `flax.linen.LayerNorm`."""

    epsilon: float
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return `x`, normalised, scaled and shifted."""
        inits = {"scale": nn.initializers.ones, "bias": nn.initializers.zeros}
        scale, bias = (
            self.param(name, with_axes(init, "embed"), x.shape[-1:], self.param_dtype) for name, init in inits.items()
        )
        return layer_norm(self.epsilon, x, scale, bias).astype(self.compute_dtype)


class GatedMLP(nn.Module):
    """MLP with a gate: two input projections and one output projection; with `squared_relu` one of each."""

    width: int
    activation: Activation = "swiglu"
    out_stddev: float = INIT_STDDEV
    has_bias: bool = False
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    in_stddev: float = INIT_STDDEV

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """Return the output of the MLP, (B, T, D)."""
        B, T, D = x_BxTxD.shape
        x_BTxD = flatten_tokens(gather_stream(x_BxTxD))
        names = ("up",) if self.activation == "squared_relu" else ("gate", "up")
        hidden = [self._dense(name, self.width, ("embed", "mlp"), self.in_stddev)(x_BTxD) for name in names]
        hidden = [mark_saved(constrain(h.reshape(B, T, -1), "batch", "sequence", "mlp")) for h in hidden]
        h_BTxM = flatten_tokens(activate(self.activation, *hidden))
        return self._dense("down", D, ("mlp", "embed"), self.out_stddev)(h_BTxM).reshape(B, T, D)

    def _dense(self, name: str, features: int, axes: tuple[str, str], stddev: float) -> Dense:
        return Dense(features, axes, stddev, self.param_dtype, self.compute_dtype, self.has_bias, name=name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def activate(activation: Activation, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
    """Return the hidden layer of an MLP from its gate and its up projection, or from the up projection alone."""
    if activation == "squared_relu":
        return jnp.square(jax.nn.relu(first))
    assert second is not None, "a gated MLP has two input projections"
    if activation == "clamped_swiglu":
        first = jnp.minimum(first, CLAMPED_SWIGLU_LIMIT)
        second = jnp.clip(second, -CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
        return first * jax.nn.sigmoid(CLAMPED_SWIGLU_ALPHA * first) * (second + 1)
    gate = jax.nn.silu(first) if activation == "swiglu" else jax.nn.gelu(first, approximate=True)
    return gate * second


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def apply_gate(activation: Callable[[jax.Array], jax.Array], x: jax.Array, gate: jax.Array) -> jax.Array:
    """Return `x` times the activation of its gates, in their dtype; only the two are kept for the backward pass."""
    return (x * activation(gate.astype(x.dtype))).astype(gate.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """Return tanh-approximated GELU; only `x` is kept for the backward pass."""
    return _gelu_with_gradient(x) if writes_gelu_gradient() else nn.gelu(x, approximate=True)


@jax.custom_vjp
def _gelu_with_gradient(x: jax.Array) -> jax.Array:
    return nn.gelu(x, approximate=True)


def _gelu_backward(x: jax.Array, dy: jax.Array) -> tuple[jax.Array]:
    # The approximation is x sigmoid(2 u) with u = sqrt(2 / pi) (x + 0.044715 x^3).
    wide, factor = x.astype(jnp.float32), 2 * math.sqrt(2 / math.pi)
    square = wide * wide
    gate = nn.sigmoid(factor * wide * (1 + 0.044715 * square))
    slope = gate + wide * gate * (1 - gate) * factor * (1 + 3 * 0.044715 * square)
    return ((dy.astype(jnp.float32) * slope).astype(x.dtype),)


_gelu_with_gradient.defvjp(lambda x: (_gelu_with_gradient(x), x), _gelu_backward)


def with_axes(init: Initializer, *axes: str) -> Callable[..., jax.Array]:
    """Return `init` with a logical name for every axis of the parameter that it makes."""
    return nn.with_logical_partitioning(init, axes)  # type: ignore[return-value]


def rematerialised(block: type[nn.Module], remat: Remat, *, is_in_line: bool) -> type[nn.Module]:
    """Return `block` with activation checkpointing as `memory.remat` asks.

    Args:
        block: class of a layer.
        remat: `none` keeps all residuals, `dots` the results of matmuls, `layers` only the inputs of layers.
        is_in_line: True if the layers are unrolled. In a loop the backward pass is a loop of its own. For unrolled
            layers only an optimization barrier (`prevent_cse`) keeps the compiler from merging recomputed values with
            those of the forward pass, and so from keeping them. The CPU compiler still moves some recomputation to
            where it saves nothing.
    """
    if remat == "none":
        return block
    return nn.remat(
        block, prevent_cse=is_in_line, policy=dots_policy(is_in_line=is_in_line) if remat == "dots" else None
    )
