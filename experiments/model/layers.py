"""Parts that models here are made of: projections, norms, the gated MLP, and what the backward pass finds of them.

Owns no architecture. Tokens are flattened to two dimensions before each matmul, which still shards over batch, where
the form of the platform has it so (`form`), but not where rows are cut (`flat`). Norms and activations keep their
inputs alone for the backward pass and compute the rest again, which is faster than to write it out and read it back in
a scan over layers.

The residual stream is cut along positions over `sequence` and `tensor` (`in_stream`). What is cut by heads or columns
over `tensor` needs all positions of its part of the row (`in_rows`): so there the stream is gathered before the first
matmul of a part and scattered behind its last, instead of being whole everywhere and summed up.

Shape legend: B batch, T sequence, V vocabulary, D width, M hidden width of the MLP, I and O input and output of any
dense layer.

Layer norm and RMS norm over the last axis, in float32, and what their backward pass finds. Pure.

A sum over a row that stands by itself reads the whole residual stream once more. So on a TPU the statistics of a row, a
number or two, are kept for the backward pass (`form.kept`), and a layer norm takes mean and mean square in one pass,
which the matmul before it can make as it writes. Gradients are written out: a layer norm's that is derived also adds up
differences from the mean, which make 0. Elsewhere the input alone is kept, and all is computed again.

Shape legend: ... tokens, D width.

Gradients of matrices whose columns are cut: scattered, where libtpu would sum them up whole on every device.

libtpu makes a reduce-scatter of a sum of which each device keeps rows. Where it keeps columns, which are what lies
together in memory, it makes an all-reduce, which sends twice as much. So there the gradient is made the other way
round, which costs a matmul nothing, and each device turns its own part back (`form.scatters_rows_alone`).
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
    in_order,
    keeps_heads_apart,
    kept,
    platform,
    policy_of_dots,
    scatters_rows_alone,
    with_gradient_in_order,
)
from runner.parallel.mesh import STATE_AXES, list_axes, select_dividing_axes

Found = tuple[jax.Array, ...]

_with_gradient = functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
_again = functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))


def rms_norm(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    """Return x / rms(x) times `scale_D`, in float32."""
    return (_rms_norm_kept if keeps_heads_apart() else _rms_norm_again)(epsilon, x, scale_D)


@_again
def _rms_norm_again(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(_mean(x * x) + epsilon) * scale_D


@_with_gradient
def _rms_norm_kept(epsilon: float, x: jax.Array, scale_D: jax.Array) -> jax.Array:
    return _rms_norm_forward(epsilon, x, scale_D)[0]


def _rms_norm_forward(epsilon: float, x: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, Found]:
    wide = x.astype(jnp.float32)
    inverse = kept(lax.rsqrt(_mean(wide * wide) + epsilon))
    return wide * inverse * scale_D, (x, inverse, scale_D)


def _rms_norm_backward(epsilon: float, found: Found, dy: jax.Array) -> Found:
    x, inverse, scale_D = found
    normal, dnormal = x.astype(jnp.float32) * inverse, dy * scale_D
    dx = inverse * (dnormal - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _over_tokens(dy * normal, scale_D)


_rms_norm_kept.defvjp(_rms_norm_forward, _rms_norm_backward)


def layer_norm(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """Return x, less its mean and divided by its standard deviation, times `scale_D`, plus `bias_D`, in float32."""
    return (_layer_norm_kept if keeps_heads_apart() else _layer_norm_again)(epsilon, x, scale_D, bias_D)


@_again
def _layer_norm_again(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    mean = _mean(x)
    return (x - mean) * (lax.rsqrt(_mean(jnp.square(x - mean)) + epsilon) * scale_D) + bias_D


@_with_gradient
def _layer_norm_kept(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    return _layer_norm_forward(epsilon, x, scale_D, bias_D)[0]


def _layer_norm_forward(epsilon: float, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> tuple[jax.Array, Found]:
    wide = x.astype(jnp.float32)
    mean, mean_square = kept(_mean(wide)), _mean(wide * wide)
    inverse = kept(lax.rsqrt(jnp.maximum(mean_square - mean * mean, 0) + epsilon))
    return (wide - mean) * inverse * scale_D + bias_D, (x, mean, inverse, scale_D, bias_D)


def _layer_norm_backward(epsilon: float, found: Found, dy: jax.Array) -> Found:
    x, mean, inverse, scale_D, bias_D = found
    normal, dnormal = (x.astype(jnp.float32) - mean) * inverse, dy * scale_D
    dx = inverse * (dnormal - _mean(dnormal) - normal * _mean(dnormal * normal))
    return dx.astype(x.dtype), _over_tokens(dy * normal, scale_D), _over_tokens(dy, bias_D)


_layer_norm_kept.defvjp(_layer_norm_forward, _layer_norm_backward)


def _mean(x: jax.Array) -> jax.Array:
    return jnp.mean(x, axis=-1, keepdims=True)


def _over_tokens(x: jax.Array, parameter_D: jax.Array) -> jax.Array:
    """The sum over all tokens, in the type of a parameter."""
    return jnp.sum(x, axis=tuple(range(x.ndim - 1))).astype(parameter_D.dtype)


def scattered_back(matrix: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    """`matrix` (I, O), which lies as `spec` says; None is no mesh. On TPUs its gradient is scattered where O is cut."""
    if spec is None or not scatters_rows_alone():
        return matrix
    rows, columns = spec
    is_cut = any(axis in STATE_AXES for axis in cutting(columns))
    return _turned_back(PartitionSpec(columns, rows), matrix) if is_cut else matrix


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _turned_back(turned: PartitionSpec, matrix: jax.Array) -> jax.Array:
    return matrix


def _turned_back_backward(turned: PartitionSpec, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    columns, rows = turned
    scattered = jax.lax.with_sharding_constraint(gradient.T, turned)
    return (jax.lax.with_sharding_constraint(scattered.T, PartitionSpec(rows, columns)),)


_turned_back.defvjp(lambda turned, matrix: (matrix, None), _turned_back_backward)


def whole_on_each(matrix: jax.Array, spec: PartitionSpec, axes: tuple[str, ...]) -> jax.Array:
    """For each device along mesh axes, the matrix (I, O), which lies as `spec` says, turned: (devices, O, I).

    O is whole on each, I as it lies. Backwards each device's gradient is scattered over those of the axes that cut O,
    and what it then has is summed up over the others.
    """
    axes, rows, columns = (cutting(entry) for entry in (axes, *spec))
    columns = tuple(axis for axis in columns if axis in axes)
    others = tuple(axis for axis in axes if axis not in columns)

    def on_device(part: jax.Array) -> jax.Array:
        part = jax.lax.pcast(part, others, to="varying").T
        whole = jax.lax.all_gather(part, columns, tiled=True) if columns else part
        return (with_gradient_in_order(whole) if scatters_rows_alone() else whole)[None]

    specs = PartitionSpec(rows, columns), PartitionSpec(axes, None, rows)
    return jax.shard_map(on_device, in_specs=specs[0], out_specs=specs[1])(matrix)


def cutting(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of an entry of a `PartitionSpec` along which there are several devices."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in list_axes(entry) if mesh.shape[axis] > 1)


INIT_STDDEV = 0.02
STREAM = ("batch", "stream", "embed_act")
Activation = Literal["swiglu", "geglu", "squared_relu"]
Remat = Literal["none", "dots", "layers"]


def cut(x: jax.Array, *names: str) -> jax.Array:
    """`x` with each axis cut by the logical name it has here, over mesh axes as far as they divide it."""
    spec = cuts_of(x.shape, *names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def cuts_of(shape: tuple[int, ...], *names: str) -> PartitionSpec | None:
    """Over which mesh axes `cut` lays each axis of an array; None where the caller has no mesh or no rules."""
    mesh, spec = jax.sharding.get_abstract_mesh(), nn.logical_to_mesh_axes(names)
    if mesh.empty or not spec:
        return None
    return PartitionSpec(
        *(select_dividing_axes(size, entry, mesh.shape) for size, entry in zip(shape, spec, strict=True))
    )


def in_stream(x_BxTxD: jax.Array) -> jax.Array:
    """As the residual stream lies."""
    return cut(x_BxTxD, *STREAM)


def kept_in_stream(x_BxTxD: jax.Array) -> jax.Array:
    """As the residual stream lies, and `kept`: in the order of its axes then, as norms and matmuls read it."""
    x_BxTxD, spec = in_stream(x_BxTxD), cuts_of(x_BxTxD.shape, *STREAM)
    if not keeps_heads_apart() or spec is None:
        return kept(x_BxTxD)
    return kept(jax.shard_map(in_order, in_specs=spec, out_specs=spec, check_vma=False)(x_BxTxD))


def in_rows(x_BxTxD: jax.Array) -> jax.Array:
    """As a matmul needs it whose columns are cut over `tensor`."""
    return cut(x_BxTxD, "batch", "sequence", "embed_act")


def flat(x_BxTxI: jax.Array) -> jax.Array:
    """Tokens in one axis, (BT, I); as they are where the form of the platform says so.

    Also where rows are cut, since the two axes then cannot become one.
    """
    return x_BxTxI if row_parts() > 1 or keeps_heads_apart() else x_BxTxI.reshape(-1, x_BxTxI.shape[-1])


def row_parts() -> int:
    """Into how many parts the rules of the caller cut each row."""
    return num_shards("sequence")


def num_shards(name: str) -> int:
    """Devices over which the rules of the caller cut a logical axis."""
    spec = nn.logical_to_mesh_axes((name,))
    return num_devices(spec[0]) if spec else 1


def num_devices(entry: str | tuple[str, ...] | None) -> int:
    """Devices along the mesh axes of an entry of a `PartitionSpec`, on the mesh of the caller; without one 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in list_axes(entry))


class Projection(nn.Module):
    """The kernel of a matmul, and its bias if it has one.

    They are flat in every form: heads and their width are one axis, so that what has two axes is a matrix, and what has
    one is not.
    """

    features: int
    axes: tuple[str, str]
    stddev: float = INIT_STDDEV
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    has_bias: bool = True

    def kernel_for(self, num_inputs: int) -> jax.Array:
        """The kernel, (I, O), in `compute_dtype`."""
        kernel_init = with_axes(nn.initializers.normal(self.stddev), *self.axes)
        kernel_IxO = self.param("kernel", kernel_init, (num_inputs, self.features), self.param_dtype)
        return scattered_back(kernel_IxO.astype(self.compute_dtype), cuts_of(kernel_IxO.shape, *self.axes))

    def with_bias(self, y: jax.Array, *shape: int) -> jax.Array:
        """`y` and the bias, if there is one, as an array of `shape`: that of the last axes of `y`, flat by default."""
        if not self.has_bias:
            return y
        bias_O = self.param("bias", with_axes(nn.initializers.zeros, self.axes[1]), (self.features,), self.param_dtype)
        return y + bias_O.astype(self.compute_dtype).reshape(shape or bias_O.shape)

    def of_tokens(self, x_BTxI: jax.Array) -> jax.Array:
        """The product, with the bias, of tokens in one flat axis or in two."""
        y_BTxO = x_BTxI @ self.kernel_for(x_BTxI.shape[-1])
        if x_BTxI.ndim == 2 and self.axes[1] == "embed" and num_shards("stream") > 1 and platform() != "tpu":
            # Of one example a device the stream's cut of positions could be one of flat tokens, and the partitioner
            # would gather the whole batch to multiply what is cut so.
            y_BTxO = cut(y_BTxO, "batch", "embed_act")
        return self.with_bias(y_BTxO)


class Dense(Projection):
    """Matmul, and bias if it has one, of tokens in one flat axis or in two."""

    @nn.compact
    def __call__(self, x_BTxI: jax.Array) -> jax.Array:
        return self.of_tokens(x_BTxI)


class ToHeads(Projection):
    """A matmul whose result is cut into heads: (B, T, N, H) of what `flat` gives of (B, T, I).

    In memory heads stand before positions where the attention kernel of the platform reads them so.
    """

    num_heads: int = 1

    @nn.compact
    def __call__(self, x_BTxI: jax.Array, rows: tuple[int, int]) -> jax.Array:
        """`rows` is (B, T)."""
        N, H = self.num_heads, self.features // self.num_heads
        kernel_IxO = self.kernel_for(x_BTxI.shape[-1])
        if keeps_heads_apart():
            # In this order, though the kernel wants heads first: so the compiler copies nothing, its gradients neither.
            y_BxTxNxH = self.with_bias(jnp.einsum("bti,inh->btnh", x_BTxI, kernel_IxO.reshape(-1, N, H)), N, H)
        else:
            y_BxTxNxH = self.with_bias(x_BTxI @ kernel_IxO).reshape(*rows, N, H)
        return cut(y_BxTxNxH, "batch", "sequence", "heads", "head_dim")


class FromHeads(Projection):
    """A matmul that reads heads: (B, T, O) of (B, T, N, W), which stand in memory as `ToHeads` has it."""

    @nn.compact
    def __call__(self, x_BxTxNxW: jax.Array) -> jax.Array:
        B, T, N, W = x_BxTxNxW.shape
        if keeps_heads_apart():
            x_BxNxTxW, kernel_NxWxO = x_BxTxNxW.transpose(0, 2, 1, 3), self.kernel_for(N * W).reshape(N, W, -1)
            return self.with_bias(jnp.einsum("bntw,nwo->bto", x_BxNxTxW, kernel_NxWxO))
        x_BTxNW = flat(x_BxTxNxW.reshape(B, T, N * W))
        return self.of_tokens(x_BTxNW).reshape(B, T, -1)


class RMSNorm(nn.Module):
    """Division by the root mean square over the last axis, times a scale; in float32, handed on in `compute_dtype`.

    With `has_offset` the scale is kept as its distance from 1. `axis` is the logical name of the last axis.
    """

    epsilon: float
    axis: str = "embed"
    has_offset: bool = False
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.zeros if self.has_offset else nn.initializers.ones
        scale = self.param("scale", with_axes(init, self.axis), x.shape[-1:], self.param_dtype)
        scale = scale.astype(jnp.float32)
        return rms_norm(self.epsilon, x, 1 + scale if self.has_offset else scale).astype(self.compute_dtype)


class LayerNorm(nn.Module):
    """A layer norm in float32, handed on in `compute_dtype`, with the parameters of `flax.linen.LayerNorm`."""

    epsilon: float
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        inits = {"scale": nn.initializers.ones, "bias": nn.initializers.zeros}
        scale, bias = (
            self.param(name, with_axes(init, "embed"), x.shape[-1:], self.param_dtype) for name, init in inits.items()
        )
        return layer_norm(self.epsilon, x, scale, bias).astype(self.compute_dtype)


class GatedMLP(nn.Module):
    """Two matmuls in, one a gate, and one out; with `squared_relu` one in and one out."""

    width: int
    activation: Activation = "swiglu"
    out_stddev: float = INIT_STDDEV
    has_bias: bool = False
    param_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike = jnp.float32
    in_stddev: float = INIT_STDDEV

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        B, T, D = x_BxTxD.shape
        x_BTxD = flat(in_rows(x_BxTxD))
        names = ("up",) if self.activation == "squared_relu" else ("gate", "up")
        hidden = [self._dense(name, self.width, ("embed", "mlp"), self.in_stddev)(x_BTxD) for name in names]
        hidden = [kept(cut(h.reshape(B, T, -1), "batch", "sequence", "mlp")) for h in hidden]
        h_BTxM = flat(activate(self.activation, *hidden))
        return self._dense("down", D, ("mlp", "embed"), self.out_stddev)(h_BTxM).reshape(B, T, D)

    def _dense(self, name: str, features: int, axes: tuple[str, str], stddev: float) -> Dense:
        return Dense(features, axes, stddev, self.param_dtype, self.compute_dtype, self.has_bias, name=name)


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def activate(activation: Activation, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
    """Return the hidden layer of an MLP from its gate and the other half, or from its one half."""
    if activation == "squared_relu":
        return jnp.square(jax.nn.relu(first))
    assert second is not None, "a gated MLP has two halves"
    gate = jax.nn.silu(first) if activation == "swiglu" else jax.nn.gelu(first, approximate=True)
    return gate * second


@functools.partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """Return GELU by tanh, keeping only `x` for the backward pass."""
    return nn.gelu(x, approximate=True)


def with_axes(init: Initializer, *axes: str) -> Callable[..., jax.Array]:
    """Return `init` with a logical name for every axis of what it makes."""
    return nn.with_logical_partitioning(init, axes)  # type: ignore[return-value]


def rematerialised(block: type[nn.Module], remat: Remat, *, is_in_line: bool) -> type[nn.Module]:
    """`block`, keeping what `memory.remat` says of what it computes.

    In a loop the backward pass is a loop of its own. In line, only a barrier keeps the compiler from finding the
    forward pass's results equal to what is computed again, and from keeping them; the CPU's compiler then still moves
    things to where they save nothing.
    """
    if remat == "none":
        return block
    return nn.remat(block, prevent_cse=is_in_line, policy=policy_of_dots() if remat == "dots" else None)
