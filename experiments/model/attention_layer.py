"""The attention of a layer, from projections in to the projection out: grouped heads, or heads made of a latent.

Owns the parameters, the cache of a layer, and how both forms hand queries, keys and values to `attention`. Knows no MLP
and no stack of layers.

Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are made of one latent vector of a token,
and the part of a key that is rotated is one for all heads. A row is computed with the keys and values that are made.
A cached decode makes none: it keeps latents and rotated parts, moves the matrix that makes keys over to the queries and
the one that makes values behind attention, and so attends to one head, whose keys and values are the latents.

Shape legend: B batch, T sequence, D width, N heads of queries, K heads of keys and values, H width of a head of queries
and keys, S positions that a cache holds. Of latents: Q width of that of queries, C of that of keys and values, P part
of a head that is not rotated, R rotated part, W width of a head of values.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.model.attention import AttentionOptions, cached_attention, causal_attention
from experiments.model.config import DecoderConfig, LatentConfig, LayerKind
from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    FromHeads,
    RMSNorm,
    ToHeads,
    cut,
    flat,
    in_rows,
    num_shards,
    with_axes,
)
from experiments.model.rotary import Rotation, rotate
from runner.config import ContextParallelMethod
from runner.errors import InvalidError

LATENT_NORM_EPSILON = 1e-6  # in every published model, whatever its other norms have


class LayerCache(NamedTuple):
    """Keys and values of one layer, or of several that are stacked, at positions 0 to S - 1."""

    keys: jax.Array  # (B, S, K, H)
    values: jax.Array


class LatentCache(NamedTuple):
    """The latents of one layer, normalised, with the rotated parts behind them; or those of several layers."""

    latents: jax.Array  # (B, S, 1, C + R)


Cache = LayerCache | LatentCache


class SequenceInfo(NamedTuple):
    """What every layer is told of the rows at hand."""

    rotations: Mapping[LayerKind, Rotation | None]
    segments: jax.Array | None  # (B, T), of rows that hold several documents; 0 is padding
    real: jax.Array  # (B, T), bool: what is no padding
    start: jax.Array | None  # position of the first token, where there is a cache


class ComputePrecision(NamedTuple):
    """Parameters are kept in one type, and multiplied in the other."""

    params: DTypeLike
    compute: DTypeLike


def empty_cache(config: DecoderConfig, shape: tuple[int, ...], dtype: DTypeLike) -> Cache:
    """The cache of layers; `shape` is (layers, B, S)."""
    if config.latent is not None:
        return LatentCache(jnp.zeros((*shape, 1, config.latent.cached_width), dtype))
    shape = (*shape, config.key_heads, config.head_size)
    return LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class Attention(nn.Module):
    """Causal attention with grouped queries."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, row: SequenceInfo, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        config, (B, T, D) = self.config, x_BxTxD.shape
        N, K = config.heads, config.key_heads
        validate_head_sharding(N)
        # Flattened once for the three that read it, so that the backward pass keeps one copy and not three.
        x_BTxD = flat(in_rows(x_BxTxD))
        q_BxTxNxH, k_BxTxKxH = self._heads("query", N, x_BTxD, (B, T)), self._heads("key", K, x_BTxD, (B, T))
        v_BxTxKxH = self._heads("value", K, x_BTxD, (B, T))

        options = _options(config, self.kind)
        if cache is None:
            qkv, rope = (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH), config.rope_of(self.kind)
            turn = row.rotations[self.kind], "halves" if rope is None else rope.pairs
            a_BxTxNxH = causal_attention(*qkv, row.segments, *turn, **options, row_attention=self.row_attention)
        else:
            start = _start_of(row)
            q_BxTxNxH, k_BxTxKxH = (_rotated(x, row, config, self.kind) for x in (q_BxTxNxH, k_BxTxKxH))
            cache = LayerCache(_put(cache.keys, k_BxTxKxH, start), _put(cache.values, v_BxTxKxH, start))
            a_BxTxNxH = cached_attention(q_BxTxNxH, *cache, start, **options).astype(q_BxTxNxH.dtype)
        axes, has_bias = ("heads", "embed"), config.bias.attention_out
        out = FromHeads(D, axes, residual_stddev(config), *self.precision, has_bias, name="out")
        return out(a_BxTxNxH), cache

    def _heads(self, name: str, num_heads: int, x_BTxD: jax.Array, rows: tuple[int, int]) -> jax.Array:
        """Queries, keys or values by head, (B, T, N, H); the former two normalised as the config says."""
        config, features = self.config, num_heads * self.config.head_size
        options = (features, ("embed", "heads"), config.hidden_stddev, *self.precision, config.bias.query_key_value)
        norm = "none" if name == "value" else config.query_key_norm
        if norm == "whole":
            x_BTxNH = Dense(*options, name=name)(x_BTxD)
            x_BTxNH = make_norm(f"{name}_norm", config, self.precision, "heads")(x_BTxNH)
            return _cut_by_heads(x_BTxNH.reshape(*rows, num_heads, -1))
        x_BxTxNxH = ToHeads(*options, num_heads, name=name)(x_BTxD, rows)
        if norm == "head":
            x_BxTxNxH = make_norm(f"{name}_norm", config, self.precision, "head_dim")(x_BxTxNxH)
        return x_BxTxNxH


class LatentAttention(nn.Module):
    """Causal attention whose keys and values, and queries where they have a rank, are made of latents."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, row: SequenceInfo, cache: LatentCache | None
    ) -> tuple[jax.Array, LatentCache | None]:
        config, latent, (B, T, D) = self.config, self._latent, x_BxTxD.shape
        N, C, P = config.heads, latent.key_value_rank, latent.plain_head_dim
        validate_head_sharding(N)
        x_BTxD = flat(in_rows(x_BxTxD))
        q_BxTxNxH = _cut_by_heads(self._queries(x_BTxD).reshape(B, T, N, config.head_size))
        q_BxTxNxP, q_BxTxNxR = q_BxTxNxH[..., :P], self._rotated(q_BxTxNxH[..., P:], row)
        both_BTxCR = self._dense("key_value_down", latent.cached_width, ("embed", "latent"), self._has_bias)(x_BTxD)
        c_BTxC = self._norm("key_value_norm")(both_BTxCR[..., :C])
        k_BxTx1xR = self._rotated(both_BTxCR[..., C:].reshape(B, T, 1, -1), row)
        up = Matrix((C, N * (P + latent.value_head_dim)), ("latent", "heads"), *self.precision, name="key_value_up")
        up_CxNPW = up()
        if cache is None:
            kv_BxTxNxPW = _cut_by_heads((c_BTxC @ up_CxNPW).reshape(B, T, N, -1))
            k_BxTxNxR = jnp.broadcast_to(k_BxTx1xR, q_BxTxNxR.shape)
            q_BxTxNxH, k_BxTxNxH = _joined(q_BxTxNxP, q_BxTxNxR), _joined(kv_BxTxNxPW[..., :P], k_BxTxNxR)
            options = _options(config, self.kind)
            qkv = (q_BxTxNxH, k_BxTxNxH, kv_BxTxNxPW[..., P:])
            a_BxTxNxW = causal_attention(*qkv, row.segments, **options, row_attention=self.row_attention)
        else:
            new, start = _joined(c_BTxC.reshape(B, T, 1, C), k_BxTx1xR), _start_of(row)
            cache = LatentCache(_put(cache.latents, new, start))
            a_BxTxNxW = self._attend_to_latents(q_BxTxNxP, q_BxTxNxR, up_CxNPW, cache, start)
        axes, has_bias = ("heads", "embed"), config.bias.attention_out
        out = FromHeads(D, axes, residual_stddev(config), *self.precision, has_bias, name="out")
        return out(a_BxTxNxW), cache

    def _queries(self, x_BTxD: jax.Array) -> jax.Array:
        """Queries of all heads, (BT, NH)."""
        num_features, rank = self.config.heads * self.config.head_size, self._latent.query_rank
        if rank is None:
            return self._dense("query", num_features, ("embed", "heads"))(x_BTxD)
        c_BTxQ = self._norm("query_norm")(self._dense("query_down", rank, ("embed", "latent"), self._has_bias)(x_BTxD))
        return self._dense("query_up", num_features, ("latent", "heads"))(c_BTxQ)

    def _attend_to_latents(
        self, q_BxTxNxP: jax.Array, q_BxTxNxR: jax.Array, up_CxNPW: jax.Array, cache: LatentCache, start: jax.Array
    ) -> jax.Array:
        """Attend as to keys and values that are made of all latents of the cache; returns (B, T, N, W)."""
        N, C, P = self.config.heads, self._latent.key_value_rank, self._latent.plain_head_dim
        up_CxNxPW = up_CxNPW.reshape(C, N, -1)
        q_BxTxNxC = jnp.einsum("btnp,cnp->btnc", q_BxTxNxP, up_CxNxPW[..., :P])
        options = _options(self.config, self.kind)
        options["scale"] = options["scale"] or 1 / math.sqrt(self.config.head_size)  # of a head, not of a latent
        keys, values = cache.latents, cache.latents[..., :C]
        a_BxTxNxC = cached_attention(_joined(q_BxTxNxC, q_BxTxNxR), keys, values, start, **options)
        return jnp.einsum("btnc,cnw->btnw", a_BxTxNxC.astype(q_BxTxNxP.dtype), up_CxNxPW[..., P:])

    @property
    def _latent(self) -> LatentConfig:
        assert self.config.latent is not None, "these heads are made of latents"
        return self.config.latent

    @property
    def _has_bias(self) -> bool:
        """Of the matmuls that make latents, the only ones that may have a bias."""
        return self.config.bias.query_key_value

    def _rotated(self, x_BxTxNxR: jax.Array, row: SequenceInfo) -> jax.Array:
        return _rotated(x_BxTxNxR, row, self.config, self.kind)

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(LATENT_NORM_EPSILON, "latent", self.config.norm_offset, *self.precision, name=name)

    def _dense(self, name: str, features: int, axes: tuple[str, str], has_bias: bool = False) -> Dense:
        return Dense(features, axes, INIT_STDDEV, *self.precision, has_bias, name=name)


class Matrix(nn.Module):
    """The kernel of a matmul, for whoever multiplies by parts of it too."""

    shape: tuple[int, int]
    axes: tuple[str, str]
    param_dtype: DTypeLike
    compute_dtype: DTypeLike

    @nn.compact
    def __call__(self) -> jax.Array:
        init = with_axes(nn.initializers.normal(INIT_STDDEV), *self.axes)
        return self.param("kernel", init, self.shape, self.param_dtype).astype(self.compute_dtype)


def make_norm(name: str, config: DecoderConfig, precision: ComputePrecision, axis: str = "embed") -> RMSNorm:
    """A norm as the config says."""
    return RMSNorm(config.norm_epsilon, axis, config.norm_offset, *precision, name=name)


def residual_stddev(config: DecoderConfig) -> float:
    """Of the matmuls whose results are added to the residual stream."""
    return config.hidden_stddev / math.sqrt(2 * config.layers)


def validate_head_sharding(num_heads: int) -> None:
    """Raise `InvalidError` if devices would share a head, by the mesh and the rules of the caller."""
    if num_heads % num_shards("heads"):
        sizes = ", ".join(f"{axis} {size}" for axis, size in jax.sharding.get_abstract_mesh().shape.items())
        raise InvalidError(
            f"config.model.heads={num_heads} does not divide over the devices that share the heads (mesh: {sizes}); "
            "make topology.mesh.tensor a divisor of it"
        )


def _options(config: DecoderConfig, kind: LayerKind) -> AttentionOptions:
    scale = None if config.query_scale == "auto" else config.query_scale
    return {"window": config.window_of(kind), "softcap": config.attention_softcap, "scale": scale}


def _rotated(x_BxTxNxH: jax.Array, row: SequenceInfo, config: DecoderConfig, kind: LayerKind) -> jax.Array:
    rotation, rope = row.rotations[kind], config.rope_of(kind)
    return x_BxTxNxH if rotation is None or rope is None else rotate(x_BxTxNxH, rotation, rope.pairs)


def _start_of(row: SequenceInfo) -> jax.Array:
    assert row.start is not None, "a cache is read from a position on"
    return row.start


def _put(cached: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    """What is cached, with what is new from `start` on."""
    return jax.lax.dynamic_update_slice(cached, new.astype(cached.dtype), (0, start, 0, 0))


def _joined(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=-1)


def _cut_by_heads(x_BxTxNxH: jax.Array) -> jax.Array:
    return cut(x_BxTxNxH, "batch", "sequence", "heads", "head_dim")
