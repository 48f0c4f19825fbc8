"""Gated delta net (Yang et al., 2024): linear attention, whose layers read a sequence into a state of constant size.

Each head of values has a state S (P, W), which maps keys to values. A token forgets a part of it, corrects what it
holds for the token's key by the share beta, and reads it with its query:

    S <- exp(g) S
    S <- S + beta k (v - S^T k)^T
    o  = S^T q

Queries, keys and values first pass a short causal convolution with a SiLU; queries and keys are then normalised to
length 1, so that the correction never overshoots. g is at most 0, beta between 0 and 1. The result is normalised by
head, and multiplied by the SiLU of an output gate.

Chunks. The recurrence is computed for chunks of 64 tokens at once. Inside of a chunk the corrections depend on one
another by a unit-triangular system, which is solved for all chunks together; a scan over chunks then carries the state
along (the WY form of Yang et al., 2024b). All of it is matmuls in float32, and so is the state. The backward pass keeps
only the projections of the input and computes the chunks again.

Documents. At the first token of a segment the state begins at zero, and the convolution reads nothing before it. A
border may be at any position of a chunk: corrections, reads and writes across it are masked. Padding (segment 0) is a
document of its own. A decay factor is a difference of sums over a chunk, so packed documents equal single ones within
rounding.

Sharding. Heads are sharded over `tensor`, and a head of keys is on one device with the heads of values that it serves.
The positions of a sequence cannot be sharded.

Shape legend: B batch, T sequence, D width, K heads of keys, R heads of values for each of them, P width of a head of
keys, W width of a head of values, I = 2 P + R W inputs of the convolution for each head of keys, L positions that the
convolution reads, C positions of a chunk, N chunks.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from experiments.model.attention_layer import ComputePrecision, DeltaCache, SequenceInfo, residual_stddev
from experiments.model.config import DecoderConfig, LinearConfig
from experiments.model.layers import (
    FromHeads,
    Residuals,
    RMSNorm,
    ToHeads,
    apply_gate,
    constrain,
    flatten_tokens,
    gather_stream,
    num_sequence_shards,
    validate_head_sharding,
    with_axes,
)
from experiments.model.quantised import get_matmul_type, use_matmul_type
from runner.errors import InvalidError

CHUNK = 64
LENGTH_EPSILON = 1e-6  # added to the squared length of queries and keys, as in every published model
DECAY_RATES = (0.01, 16.0)  # of new heads, in exp(a_log)

# The inverse of a triangular system amplifies rounding, and a TPU would round the factors of float32 matmuls.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class GatedDeltaNet(nn.Module):
    """A linear layer, from the projections of its input to the output projection."""

    config: DecoderConfig
    precision: ComputePrecision

    @nn.compact
    def __call__(
        self, x_BxTxD: jax.Array, info: SequenceInfo, cache: DeltaCache | None
    ) -> tuple[jax.Array, DeltaCache | None]:
        """Return the output (B, T, D), and the cache after these tokens, if there is one."""
        config, linear, (B, T, D) = self.config, self.config.linear, x_BxTxD.shape
        assert linear is not None, "a linear layer needs config.model.linear"
        K, R, L = linear.key_heads, linear.value_heads // linear.key_heads, linear.conv_width
        P, W = linear.key_head_dim, linear.value_head_dim
        validate_head_sharding(K, "linear.key_heads")
        if (number := num_sequence_shards()) > 1:
            raise InvalidError(
                f"topology.mesh.sequence={number}: linear layers (config.model.layer_pattern) need whole sequences on "
                "each device; make it 1, and shard over fsdp or tensor instead"
            )
        x_BTxD = flatten_tokens(gather_stream(x_BxTxD))

        def project(name: str, width: int) -> jax.Array:
            options = (K * width, ("embed", "heads"), config.hidden_stddev, *self.precision, False)
            # The few columns of beta and decay are cheap, and decay is exponentiated.
            with use_matmul_type("compute" if name in ("ba", "beta", "decay") else get_matmul_type()):
                return ToHeads(*options, num_heads=K, name=name)(x_BTxD, (B, T))

        if linear.projections == "fused":
            qkvz, ba = project("qkvz", 2 * (P + R * W)), project("ba", 2 * R)
            x_BxTxKxI, z_BxTxKxRW = jnp.split(qkvz, [2 * P + R * W], axis=-1)
            b_BxTxKxR, a_BxTxKxR = jnp.split(ba, 2, axis=-1)
        else:
            x_BxTxKxI = jnp.concatenate([project("query", P), project("key", P), project("value", R * W)], axis=-1)
            z_BxTxKxRW, b_BxTxKxR, a_BxTxKxR = project("gate", R * W), project("beta", R), project("decay", R)

        def parameter(name: str, init: Any, *shape: int) -> jax.Array:
            axes = ("heads", "conv_input", "conv")[: len(shape)]
            value = self.param(name, with_axes(init, *axes), shape, self.precision.params)
            return value.astype(jnp.float32)

        def init_rates(key: jax.Array, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
            # Uniform rates of decay, as in published models.
            return jnp.log(jax.random.uniform(key, shape, jnp.float32, *DECAY_RATES)).astype(dtype)

        init, widths = nn.initializers.normal(L**-0.5), {"query": P, "key": P, "value": R * W}
        # A filter for each input, in the form of published files: (inputs, 1, L).
        taps = [parameter(f"{name}_conv", init, K * width, 1, L).reshape(K, width, L) for name, width in widths.items()]
        weights = _DeltaWeights(
            jnp.concatenate(taps, axis=1),
            parameter("a_log", init_rates, K * R).reshape(K, R),
            parameter("dt_bias", nn.initializers.ones, K * R).reshape(K, R),
        )
        if cache is None:
            age_BxT = None
            if info.segments is not None:
                # Tokens of its document before each token.
                is_border_BxT = info.segments[:, 1:] != info.segments[:, :-1]
                first_BxT = jnp.where(jnp.pad(is_border_BxT, ((0, 0), (1, 0))), jnp.arange(T), 0)
                age_BxT = jnp.arange(T) - jax.lax.cummax(first_BxT, axis=1)
            o_BxTxKxRW, _ = _read_sequence(P, x_BxTxKxI, b_BxTxKxR, a_BxTxKxR, weights, age_BxT)
        else:
            assert info.start is not None, "a call with a cache needs start"
            # A sequence begins with an empty state, whatever the cache held before.
            before = DeltaCache(*(jnp.where(info.start == 0, 0, leaf) for leaf in cache))
            inputs_BxSxKxI = jnp.concatenate([before.inputs.astype(x_BxTxKxI.dtype), x_BxTxKxI], axis=1)
            count = T if info.num_real is None else info.num_real
            is_real_T = jnp.arange(T) < count
            arrays = (x_BxTxKxI, b_BxTxKxR, a_BxTxKxR, weights, None)
            o_BxTxKxRW, states = _read_sequence(P, *arrays, before, is_real_T)
            # The last inputs that are real; padding comes after them.
            last = jax.lax.dynamic_slice_in_dim(inputs_BxSxKxI, count, L - 1, axis=1)
            cache = DeltaCache(last.astype(cache.inputs.dtype), states)

        shape = (B, T, K * R, W)
        norm = RMSNorm(config.norm_epsilon, "head_dim", False, self.precision.params, jnp.float32, name="norm")
        y_BxTxNxW = apply_gate(jax.nn.silu, norm(o_BxTxKxRW.reshape(shape)), z_BxTxKxRW.reshape(shape))
        y_BxTxNxW = constrain(y_BxTxNxW, "batch", "sequence", "heads", "head_dim")
        return FromHeads(D, ("heads", "embed"), residual_stddev(config), *self.precision, False, name="out")(
            y_BxTxNxW
        ), cache


class _DeltaWeights(NamedTuple):
    """Parameters of a linear layer beside its matmuls, float32."""

    taps: jax.Array  # (K, I, L), filters of the convolution; the last tap is that of the token itself
    a_log: jax.Array  # (K, R), logarithm of the rate of decay
    dt_bias: jax.Array  # (K, R), added to the decay that a token asks for


@functools.partial(jax.checkpoint, prevent_cse=False, static_argnums=(0,))
def _read_sequence(
    P: int,
    x_BxTxKxI: jax.Array,
    b_BxTxKxR: jax.Array,
    a_BxTxKxR: jax.Array,
    weights: _DeltaWeights,
    age_BxT: jax.Array | None,
    before: DeltaCache | None = None,
    is_real_T: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Return what each token reads (B, T, K, R W), float32 and without norm and gate, and the states at the end.

    P is the width of a head of keys. Queries, keys and values `x` come before the convolution, beta `b` before the
    sigmoid, and the decay `a` before the softplus. `age_BxT` is the number of tokens before each token in its document;
    None if a sequence is one document. `is_real_T` is False for padding at the end, which changes no state.
    """
    B, T, K, R = b_BxTxKxR.shape
    inputs = None if before is None else before.inputs
    x_BxTxKxI = jax.nn.silu(convolve(x_BxTxKxI.astype(jnp.float32), weights.taps, inputs, age_BxT))
    q_BxTxKxP, k_BxTxKxP, v_BxTxKxRW = jnp.split(x_BxTxKxI, [P, 2 * P], axis=-1)
    q_BxTxKxP, k_BxTxKxP = (
        x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + LENGTH_EPSILON) for x in (q_BxTxKxP, k_BxTxKxP)
    )
    beta_BxTxKxR = jax.nn.sigmoid(b_BxTxKxR.astype(jnp.float32))
    step_BxTxKxR = jax.nn.softplus(a_BxTxKxR.astype(jnp.float32) + weights.dt_bias)
    g_BxTxKxR = -jnp.exp(weights.a_log) * step_BxTxKxR
    if is_real_T is not None:
        beta_BxTxKxR, g_BxTxKxR = (jnp.where(is_real_T[:, None, None], x, 0) for x in (beta_BxTxKxR, g_BxTxKxR))
    o_BxTxKxRxW, states = apply_delta_rule(
        q_BxTxKxP * P**-0.5,
        k_BxTxKxP,
        v_BxTxKxRW.reshape(B, T, K, R, -1),
        beta_BxTxKxR,
        g_BxTxKxR,
        None if age_BxT is None else age_BxT == 0,
        None if before is None else before.states,
    )
    return o_BxTxKxRxW.reshape(B, T, K, -1), states


def convolve(
    x_BxTxKxI: jax.Array, taps_KxIxL: jax.Array, before_BxSxKxI: jax.Array | None, age_BxT: jax.Array | None
) -> jax.Array:
    """Return the causal convolution of each input with its own filter; S = L - 1 inputs come before the first token.

    A sum of L shifted products, which the compiler fuses. A token reads none that is farther back than its `age_BxT`.
    """
    T, L = x_BxTxKxI.shape[1], taps_KxIxL.shape[-1]
    if before_BxSxKxI is None:
        padded = jnp.pad(x_BxTxKxI, ((0, 0), (L - 1, 0), (0, 0), (0, 0)))
    else:
        padded = jnp.concatenate([before_BxSxKxI.astype(x_BxTxKxI.dtype), x_BxTxKxI], axis=1)
    total = jnp.zeros_like(x_BxTxKxI)
    for tap in range(L):
        lag, shifted = L - 1 - tap, padded[:, tap : tap + T]
        if age_BxT is not None and lag:
            shifted = jnp.where((age_BxT >= lag)[..., None, None], shifted, 0)
        total += shifted * taps_KxIxL[..., tap]
    return total


def apply_delta_rule(
    q_BxTxKxP: jax.Array,
    k_BxTxKxP: jax.Array,
    v_BxTxKxRxW: jax.Array,
    beta_BxTxKxR: jax.Array,
    g_BxTxKxR: jax.Array,
    is_first_BxT: jax.Array | None = None,
    states_BxKxRxPxW: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Apply the gated delta rule, in chunks; all arrays are float32.

    Args:
        q_BxTxKxP: queries.
        k_BxTxKxP: keys, at most of length 1.
        v_BxTxKxRxW: values.
        beta_BxTxKxR: shares that are corrected, 0 to 1.
        g_BxTxKxR: logarithms of the shares of a state that are kept, at most 0.
        is_first_BxT: True at the first token of each document; None: a sequence is one document.
        states_BxKxRxPxW: states before the first token; None: zeros.

    Returns:
        What each token reads, (B, T, K, R, W), and the states after the last token.
    """
    B, T, K, R, W = v_BxTxKxRxW.shape
    # A short sequence, such as the one token of a cached decode, is a short chunk.
    C = min(CHUNK, 1 << (T - 1).bit_length())

    def split(x: jax.Array, *axes: int) -> jax.Array:
        """Return chunks first, then `axes`, which are those of one chunk; padded with zeros, which change no state."""
        x = jnp.pad(x, ((0, 0), (0, -T % C), *[(0, 0)] * (x.ndim - 2)))
        return x.reshape(B, -1, C, *x.shape[2:]).transpose(1, 0, *(axis + 1 for axis in axes))

    q_NxBxKxCxP, k_NxBxKxCxP, v_NxBxKxRxCxW = (
        split(q_BxTxKxP, 2, 1, 3),
        split(k_BxTxKxP, 2, 1, 3),
        split(v_BxTxKxRxW, 2, 3, 1, 4),
    )
    beta_NxBxKxRxC, g_NxBxKxRxC = split(beta_BxTxKxR, 2, 3, 1), split(g_BxTxKxR, 2, 3, 1)
    sum_NxBxKxRxC = jnp.cumsum(g_NxBxKxRxC, axis=-1)
    # Documents of a chunk by number, where 0 is the one that the state at its beginning belongs to.
    document_NxBxC = jnp.zeros((g_NxBxKxRxC.shape[0], B, C), jnp.int32)
    if is_first_BxT is not None:
        document_NxBxC = jnp.cumsum(split(is_first_BxT.astype(jnp.int32), 1), axis=-1)
    document = document_NxBxC[:, :, None, None]
    is_seen = jnp.tril(jnp.ones((C, C), bool)) & (document[..., :, None] == document[..., None, :])
    difference = sum_NxBxKxRxC[..., :, None] - sum_NxBxKxRxC[..., None, :]
    # Masked before the exponential, which could overflow above the diagonal.
    decay_NxBxKxRxCxC = jnp.exp(jnp.where(is_seen, difference, -jnp.inf))
    # Decays since the beginning of the chunk, and up to its end: 0 across a border.
    since_NxBxKxRxC = jnp.exp(jnp.where(document == 0, sum_NxBxKxRxC, -jnp.inf))
    up_to_NxBxKxRxC = decay_NxBxKxRxCxC[..., -1, :]

    # Each correction is computed from those before it in its chunk.
    overlap = _einsum("nbkcp,nbksp->nbkcs", k_NxBxKxCxP, k_NxBxKxCxP)[:, :, :, None] * decay_NxBxKxRxCxC
    system_NxBxKxRxCxC = jnp.where(jnp.tri(C, k=-1, dtype=bool), beta_NxBxKxRxC[..., None] * overlap, 0)
    inverse_NxBxKxRxCxC = invert_unit_triangular(jax.lax.stop_gradient(system_NxBxKxRxCxC))
    scores = _einsum("nbkcp,nbksp->nbkcs", q_NxBxKxCxP, k_NxBxKxCxP)[:, :, :, None] * decay_NxBxKxRxCxC

    def read_chunk(S: jax.Array, chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, since, up_to, system, inverse, scores = chunk
        known = since[..., None] * _einsum("bkcp,bkrpw->bkrcw", k, S)
        correction = _solve_unit_triangular(system, inverse, beta[..., None] * (v - known))
        o = since[..., None] * _einsum("bkcp,bkrpw->bkrcw", q, S) + _einsum("bkrcs,bkrsw->bkrcw", scores, correction)
        S = since[..., -1:, None] * S + _einsum("bkcp,bkrcw->bkrpw", k, up_to[..., None] * correction)
        return S, o

    zeros = jnp.zeros((B, K, R, k_BxTxKxP.shape[-1], W), jnp.float32)
    states = zeros if states_BxKxRxPxW is None else states_BxKxRxPxW
    chunks = (q_NxBxKxCxP, k_NxBxKxCxP, v_NxBxKxRxCxW, beta_NxBxKxRxC, since_NxBxKxRxC, up_to_NxBxKxRxC)
    states, o_NxBxKxRxCxW = jax.lax.scan(read_chunk, states, (*chunks, system_NxBxKxRxCxC, inverse_NxBxKxRxCxC, scores))
    return o_NxBxKxRxCxW.transpose(1, 0, 4, 2, 3, 5).reshape(B, -1, K, R, W)[:, :T], states


def count_rule_flops(linear: LinearConfig) -> float:
    """Return the FLOPs of the delta rule for a token, in one forward pass of a layer whose sequences are whole chunks.

    A state is read by a key and by a query, and a key writes to it. In a chunk a token's key and query meet all keys,
    its correction and its result are sums over all values, and blocks of the inverse are joined.
    """
    states = 6 * linear.key_head_dim * linear.value_width
    inverse = 2 * linear.value_heads * (CHUNK**2 - 1) / 3
    return states + 4 * CHUNK * (linear.key_width + linear.value_width) + inverse


def count_rule_bytes(linear: LinearConfig) -> float:
    """Return the bytes of a token that exist while the delta rule of one layer is computed with its gradient.

    Scores, their decays, the triangular system and its inverse are as wide as a chunk, and each chunk has states.
    """
    return 4.0 * (6 * CHUNK * linear.value_heads + 2 * linear.key_head_dim * linear.value_width / CHUNK)


def invert_unit_triangular(system: jax.Array) -> jax.Array:
    """Return the inverse of 1 + `system` (..., C, C), which is strictly lower triangular; C is a power of two.

    Inverses of the blocks on the diagonal are joined in pairs: ((F, 0), (A, G)) has the inverse ((F', 0), (-G' A F',
    G')). This is stable like forward substitution, and made of matmuls, which the partitioner shards, as it does not
    shard a triangular solve. A series of powers would overflow where many keys of a chunk are alike.
    """
    *lead, C, _ = system.shape
    inverse, size = jnp.ones((*lead, C, 1, 1), system.dtype), 1
    while size < C:
        pairs = system.reshape(*lead, C // (2 * size), 2, size, C // (2 * size), 2, size)[..., 1, :, :, 0, :]
        lower = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)
        first, last = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        joint = -_einsum("...ij,...jk,...kl->...il", last, lower, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverse, size = jnp.concatenate([top, jnp.concatenate([joint, last], axis=-1)], axis=-2), 2 * size
    return inverse[..., 0, :, :]


@jax.custom_vjp
def _solve_unit_triangular(system: jax.Array, inverse: jax.Array, right: jax.Array) -> jax.Array:
    """Return the solution u of (1 + `system`) u = `right`, with the inverse at hand.

    The gradient of the system is an outer product of the solution; that of its inverse would be two products more.
    """
    return _einsum("bkrcs,bkrsw->bkrcw", inverse, right)


def _solve_backward(residuals: Residuals, gradient: jax.Array) -> tuple[jax.Array, None, jax.Array]:
    inverse, solution = residuals
    of_right = _einsum("bkrcs,bkrcw->bkrsw", inverse, gradient)
    return -_einsum("bkrcw,bkrsw->bkrcs", of_right, solution), None, of_right


_solve_unit_triangular.defvjp(
    lambda *arrays: (solution := _solve_unit_triangular(*arrays), (arrays[1], solution)), _solve_backward
)
