"""Attention modules of a layer, from input projections to the output projection: grouped-query and latent attention.

The modules own the parameters and the cache of a layer; `attention` computes. Both accept a cache for decoding.

Multi-head latent attention (DeepSeek-V2, 2024): the keys and values of all heads are projected from one latent vector
per token, and all heads share the rotated part of a key. A whole sequence is computed with the keys and values
themselves. A cached decode never makes them: it caches latents and rotated parts, applies the key projection to the
queries and the value projection to attention's result, and so attends to a single head, whose keys and values are the
latents.

Shape legend: B batch, T sequence, D width, N heads of queries, K heads of keys and values, H width of a head of queries
and keys, S positions of a cache. For latents: Q width of the queries' latent, C of that of keys and values, P part of a
head that is not rotated, R rotated part, W width of a head of values.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.model.attention import cached_attention, causal_attention
from experiments.model.config import DecoderConfig, LatentConfig, LayerKind, Sharing
from experiments.model.context_layout import AttentionOptions
from experiments.model.layers import (
    INIT_STDDEV,
    Dense,
    FromHeads,
    Matrix,
    RMSNorm,
    ToHeads,
    apply_gate,
    constrain,
    flatten_tokens,
    gather_stream,
    packs_heads,
    rms_norm,
    validate_head_sharding,
    with_axes,
)
from experiments.model.quantised import multiply
from experiments.model.rotary import Rotation, rotate
from runner.config import ContextParallelMethod

LATENT_NORM_EPSILON = 1e-6  # in every published model, whatever the epsilon of its other norms


class _LayerCache(NamedTuple):
    """Keys and values of one layer, or of several stacked layers, at positions 0 to S - 1."""

    keys: jax.Array  # (B, S, K, H)
    values: jax.Array


class _LatentCache(NamedTuple):
    """Normalised latents of one layer or of several stacked layers, followed by the rotated parts of keys."""

    latents: jax.Array  # (B, S, 1, C + R)


class DeltaCache(NamedTuple):
    """State of one linear layer, or of several stacked ones, after the tokens that it has read."""

    inputs: jax.Array  # (B, conv_width - 1, K, I): the last inputs of the convolution
    states: jax.Array  # (B, K, R, P, W), float32


Cache = _LayerCache | _LatentCache | DeltaCache


class SequenceInfo(NamedTuple):
    """Properties of the sequences at hand that every layer needs."""

    rotations: Mapping[LayerKind, Rotation | None]
    segments: jax.Array | None  # (B, T), of sequences that hold several documents; 0 is padding
    real: jax.Array  # (B, T), bool: not padding
    start: jax.Array | None  # position of the first token, if there is a cache
    num_real: jax.Array | None = None  # tokens of a call with a cache that are real; None: all
    # Keys and values that the last layer of each kind gives to layers without their own: not rotated, or its cache.
    given: Mapping[LayerKind, _LayerCache] | None = None
    examples: jax.Array | None = None  # (B), place of each example in the step; None: 0, 1, 2 ...


class ComputePrecision(NamedTuple):
    """Dtype of parameters and dtype of matmuls."""

    params: DTypeLike
    compute: DTypeLike


def make_cache(
    config: DecoderConfig, kind: LayerKind, sharing: Sharing, shape: tuple[int, ...], dtype: DTypeLike
) -> Cache | None:
    """Return an empty cache of stacked layers of one kind, None if they need none; `shape` is (layers, B, S)."""
    linear = config.linear
    if kind == "linear" and linear is not None:
        K, R, P, W = (
            linear.key_heads,
            linear.value_heads // linear.key_heads,
            linear.key_head_dim,
            linear.value_head_dim,
        )
        inputs = jnp.zeros((*shape[:2], linear.conv_width - 1, K, 2 * P + R * W), dtype)
        return DeltaCache(inputs, jnp.zeros((*shape[:2], K, R, P, W), jnp.float32))
    if config.latent is not None:
        return _LatentCache(jnp.zeros((*shape, 1, config.latent.cached_width), dtype))
    if sharing == "takes":
        return None
    shape = (*shape, config.get_key_heads(kind), config.get_head_size(kind))
    return _LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


class Attention(nn.Module):
    """Causal grouped-query attention, with keys and values of its own or with those of an earlier layer."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    row_attention: ContextParallelMethod = "auto"
    sharing: Sharing = "none"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, cache: _LayerCache | None
    ) -> tuple[jax.Array, _LayerCache | None]:
        """Return the output (B, T, D), and the cache with the keys and values of these tokens, if there is one.

        A layer that gives its keys and values returns them also if there is no cache.
        """
        config, (B, T, D) = self.config, x_BxTxD.shape
        N, K = config.heads, config.get_key_heads(self.kind)
        validate_head_sharding(N)
        # The condition of `fused_attention`: other arrays would be copied before its kernel and after it.
        is_packed = not config.attention_sinks and packs_heads(N, K, config.get_head_size(self.kind))
        # Flattened once for the three projections, so that the backward pass keeps one copy and not three.
        x_BTxD = flatten_tokens(gather_stream(x_BxTxD))
        q_BxTxNxH, gate_BxTxNxH = self._heads("query", N, x_BTxD, (B, T), is_packed)
        given = None
        if self.sharing == "takes":
            assert info.given is not None, "layers that take keys and values come after those that give them"
            k_BxTxKxH, v_BxTxKxH = given = info.given[self.kind]
        else:
            k_BxTxKxH, shared_BxTxKxH = self._heads("key", K, x_BTxD, (B, T), is_packed)
            v_BxTxKxH = (
                self._heads("value", K, x_BTxD, (B, T), is_packed)[0] if shared_BxTxKxH is None else shared_BxTxKxH
            )
            if config.value_norm:
                ones_H = jnp.ones(v_BxTxKxH.shape[-1:], jnp.float32)
                v_BxTxKxH = rms_norm(config.norm_epsilon, v_BxTxKxH, ones_H).astype(self.precision.compute)
        sinks_N = None
        if config.attention_sinks:
            init = with_axes(nn.initializers.zeros, "heads")
            sinks_N = self.param("sinks", init, (N,), self.precision.params).astype(self.precision.compute)

        options = _make_options(config, self.kind)
        if cache is None and (given is None or info.start is None):
            # The rotation is passed on unapplied: a kernel that can rotates queries and keys as it reads them.
            qkv, rope = (q_BxTxNxH, k_BxTxKxH, v_BxTxKxH), config.get_rope(self.kind)
            rotation = info.rotations[self.kind], "halves" if rope is None else rope.pairs
            a_BxTxNxH = causal_attention(
                *qkv, info.segments, *rotation, **options._asdict(), sinks_N=sinks_N, row_attention=self.row_attention
            )
            if self.sharing == "gives":
                cache = _LayerCache(k_BxTxKxH, v_BxTxKxH)
        else:
            assert info.start is not None, "a call with a cache needs start"
            # The cache holds rotated keys: their positions are known now and never change.
            q_BxTxNxH = _rotate(q_BxTxNxH, info, config, self.kind)
            if cache is not None:
                k_BxTxKxH = _rotate(k_BxTxKxH, info, config, self.kind)
                keys, values = _update(cache.keys, k_BxTxKxH, info.start), _update(cache.values, v_BxTxKxH, info.start)
                given = cache = _LayerCache(keys, values)
            assert given is not None
            a_BxTxNxH = cached_attention(q_BxTxNxH, *given, info.start, **options._asdict(), sinks_N=sinks_N)
            a_BxTxNxH = a_BxTxNxH.astype(q_BxTxNxH.dtype)
        if gate_BxTxNxH is not None:
            a_BxTxNxH = apply_gate(jax.nn.sigmoid, a_BxTxNxH, gate_BxTxNxH)
        axes, has_bias = ("heads", "embed"), config.bias.attention_out
        out = FromHeads(D, axes, residual_stddev(config), *self.precision, has_bias, is_packed, name="out")
        return out(a_BxTxNxH), cache

    def _heads(
        self, name: str, num_heads: int, x_BTxD: jax.Array, token_shape: tuple[int, int], is_packed: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return queries, keys or values, (B, T, N, H), and what else the projection makes.

        That are the gates of queries, and the values if they are keys without norm, where the config has them. Queries
        and keys are normalised as the config says.
        """
        config, has_gate = self.config, self.config.attention_gate and name == "query"
        features = num_heads * config.get_head_size(self.kind) * (2 if has_gate else 1)
        options = (features, ("embed", "heads"), config.hidden_stddev, *self.precision, config.bias.query_key_value)
        norm = "none" if name == "value" else config.query_key_norm
        if norm == "whole":
            # The norm runs over all heads, so the product is not split into heads before it.
            x_BTxNH = Dense(*options, name=name)(x_BTxD)
            x_BTxNH = make_norm(f"{name}_norm", config, self.precision, "heads")(x_BTxNH)
            return _constrain_heads(x_BTxNH.reshape(*token_shape, num_heads, -1)), None
        x_BxTxNxH, other_BxTxNxH = ToHeads(*options, is_packed, num_heads, name=name)(x_BTxD, token_shape), None
        if has_gate:
            x_BxTxNxH, other_BxTxNxH = jnp.split(x_BxTxNxH, 2, axis=-1)
        if name == "key" and config.has_keys_as_values(self.kind):
            other_BxTxNxH = x_BxTxNxH
        if norm == "head":
            x_BxTxNxH = make_norm(f"{name}_norm", config, self.precision, "head_dim")(x_BxTxNxH)
        return x_BxTxNxH, other_BxTxNxH


class LatentAttention(nn.Module):
    """Causal multi-head latent attention."""

    config: DecoderConfig
    kind: LayerKind
    precision: ComputePrecision
    row_attention: ContextParallelMethod = "auto"

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, cache: _LatentCache | None
    ) -> tuple[jax.Array, _LatentCache | None]:
        """Return the output (B, T, D), and the cache with the latents of these tokens, if there is one."""
        config, latent, (B, T, D) = self.config, self._latent, x_BxTxD.shape
        N, C, P = config.heads, latent.key_value_rank, latent.plain_head_dim
        has_bias = config.bias.query_key_value  # only the projections to latents can have one
        validate_head_sharding(N)
        x_BTxD = flatten_tokens(gather_stream(x_BxTxD))
        # Small models project to queries directly; large ones through a latent of their own.
        if latent.query_rank is None:
            q_BTxNH = self._dense("query", N * config.head_size, ("embed", "heads"))(x_BTxD)
        else:
            down = self._dense("query_down", latent.query_rank, ("embed", "latent"), has_bias)
            c_BTxQ = self._norm("query_norm")(down(x_BTxD))
            q_BTxNH = self._dense("query_up", N * config.head_size, ("latent", "heads"))(c_BTxQ)
        q_BxTxNxH = _constrain_heads(q_BTxNH.reshape(B, T, N, config.head_size))
        q_BxTxNxP, q_BxTxNxR = q_BxTxNxH[..., :P], _rotate(q_BxTxNxH[..., P:], info, config, self.kind)
        both_BTxCR = self._dense("key_value_down", latent.cached_width, ("embed", "latent"), has_bias)(x_BTxD)
        c_BTxC = self._norm("key_value_norm")(both_BTxCR[..., :C])
        k_BxTx1xR = _rotate(both_BTxCR[..., C:].reshape(B, T, 1, -1), info, config, self.kind)
        up = Matrix((C, N * (P + latent.value_head_dim)), ("latent", "heads"), *self.precision, name="key_value_up")
        up_CxNPW = up()
        if cache is None:
            # In training all keys and values are projected anyway, so plain attention on them is cheapest.
            kv_BxTxNxPW = _constrain_heads(multiply(c_BTxC, up_CxNPW).reshape(B, T, N, -1))
            # The rotated part of a key is shared by all heads.
            k_BxTxNxR = jnp.broadcast_to(k_BxTx1xR, q_BxTxNxR.shape)
            q_BxTxNxH, k_BxTxNxH = _concatenate(q_BxTxNxP, q_BxTxNxR), _concatenate(kv_BxTxNxPW[..., :P], k_BxTxNxR)
            options = _make_options(config, self.kind)._asdict()
            qkv = (q_BxTxNxH, k_BxTxNxH, kv_BxTxNxPW[..., P:])
            a_BxTxNxW = causal_attention(*qkv, info.segments, **options, row_attention=self.row_attention)
        else:
            assert info.start is not None, "a call with a cache needs start"
            new = _concatenate(c_BTxC.reshape(B, T, 1, C), k_BxTx1xR)
            cache = _LatentCache(_update(cache.latents, new, info.start))
            # With a cache the projection moves to the few new queries, so that keys and values are never made.
            a_BxTxNxW = self._attend_to_latents(q_BxTxNxP, q_BxTxNxR, up_CxNPW, cache, info.start)
        axes = ("heads", "embed")
        out = FromHeads(D, axes, residual_stddev(config), *self.precision, config.bias.attention_out, name="out")
        return out(a_BxTxNxW), cache

    def _attend_to_latents(
        self, q_BxTxNxP: jax.Array, q_BxTxNxR: jax.Array, up_CxNPW: jax.Array, cache: _LatentCache, start: jax.Array
    ) -> jax.Array:
        """Attend as if keys and values were projected from all latents of the cache; returns (B, T, N, W)."""
        N, C, P = self.config.heads, self._latent.key_value_rank, self._latent.plain_head_dim
        up_CxNxPW = up_CxNPW.reshape(C, N, -1)
        q_BxTxNxC = jnp.einsum("btnp,cnp->btnc", q_BxTxNxP, up_CxNxPW[..., :P])
        options = _make_options(self.config, self.kind)._asdict()
        # By default the scale is that of a head, and not of a latent, which these queries are as wide as.
        options["scale"] = options["scale"] or 1 / math.sqrt(self.config.head_size)
        keys, values = cache.latents, cache.latents[..., :C]
        a_BxTxNxC = cached_attention(_concatenate(q_BxTxNxC, q_BxTxNxR), keys, values, start, **options)
        return jnp.einsum("btnc,cnw->btnw", a_BxTxNxC.astype(q_BxTxNxP.dtype), up_CxNxPW[..., P:])

    @property
    def _latent(self) -> LatentConfig:
        assert self.config.latent is not None, "latent attention needs config.model.latent"
        return self.config.latent

    def _norm(self, name: str) -> RMSNorm:
        return RMSNorm(LATENT_NORM_EPSILON, "latent", self.config.norm_offset, *self.precision, name=name)

    def _dense(self, name: str, features: int, axes: tuple[str, str], has_bias: bool = False) -> Dense:
        return Dense(features, axes, INIT_STDDEV, *self.precision, has_bias, name=name)


def make_norm(name: str, config: DecoderConfig, precision: ComputePrecision, axis: str = "embed") -> RMSNorm:
    """Return a norm with the config's epsilon and form of scale."""
    return RMSNorm(config.norm_epsilon, axis, config.norm_offset, *precision, name=name)


def residual_stddev(config: DecoderConfig) -> float:
    """Return the initial standard deviation of matmuls whose results are added to the residual stream."""
    return config.hidden_stddev / math.sqrt(2 * config.layers)


def _make_options(config: DecoderConfig, kind: LayerKind) -> AttentionOptions:
    scale = None if config.query_scale == "auto" else config.query_scale
    return AttentionOptions(config.get_window(kind), config.attention_softcap, scale)


def _rotate(x_BxTxNxH: jax.Array, info: SequenceInfo, config: DecoderConfig, kind: LayerKind) -> jax.Array:
    rotation, rope = info.rotations[kind], config.get_rope(kind)
    return x_BxTxNxH if rotation is None or rope is None else rotate(x_BxTxNxH, rotation, rope.pairs)


def _update(cached: jax.Array, new: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(cached, new.astype(cached.dtype), (0, start, 0, 0))


def _concatenate(first: jax.Array, second: jax.Array) -> jax.Array:
    return jnp.concatenate([first, second], axis=-1)


def _constrain_heads(x_BxTxNxH: jax.Array) -> jax.Array:
    return constrain(x_BxTxNxH, "batch", "sequence", "heads", "head_dim")
