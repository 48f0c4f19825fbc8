"""Causal attention, in the implementation that is fast on the platform that the program is compiled for.

The module chooses between implementations and holds those in plain JAX. It owns no parameters and no dropout. Every
implementation computes softmax(cap(q k^T scale)) v over the present and past positions, with the softmax in float32.
`IMPLEMENTATIONS` lists those of each platform with what each supports.

- Grouped queries: K heads of keys and values serve N heads of queries, N / K neighbours each. Keys are never repeated
  in a device's memory.
- Sinks (attention sinks, Xiao et al., 2023): for each head of queries a score that every query has beside those of its
  keys, and whose value is zero.
- Segments, if sequences hold several documents, number them 1, 2, ...; 0 is padding. Every implementation then attends
  only within a segment. Padding attends to padding, so each position attends at least to itself and all values are
  finite; no real position attends to padding. Without segments the program is the one for sequences of a single
  document.

Shape legend: B batch, T sequence, N heads of queries, K heads of keys and values, G = N / K, H width of a head of
queries and keys, W width of a head of values, Q queries of one block, S keys that a block of queries attends to, or
those of a cache.
"""

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from experiments.model.context_layout import AttentionInputs, AttentionOptions, make_sequence_layout, score_scale
from experiments.model.layers import constrain, num_devices, num_sequence_shards, num_shards, packs_heads
from experiments.model.platform import (
    LANES,
    LONG_BLOCK_TOKENS,
    LONG_STEP,
    SAVED_NAME,
    SPLASH_BLOCK_TOKENS,
    compute_capability,
    import_for_tpu,
    is_cudnn_forward,
    mark_saved,
    platform,
    uses_long_blocks,
    vmem_limit_bytes,
    with_row_major_layout,
)
from experiments.model.ring_attention import sharded_attention
from experiments.model.rotary import Pairs, Rotation, rotate, rotate_halves
from runner.config import ContextParallelMethod
from runner.errors import InvalidError
from runner.jax_internals import omit_mask_gradients
from runner.storage import JsonObject
from runner.train.kernel_check import KernelCase, KernelTrial, Owner, get_kernel_use
from runner.train.observation import observe

KEY_AXES = ("batch", "sequence", "heads", "head_dim")
# Axes of arrays in kernels that need every position of a sequence. No rule shards an axis that is named "row".
WHOLE_SEQUENCE_AXES = ("batch", "row", "heads", "head_dim")
MAX_BLOCKS = 8
MASK_BYTES_MAX = 2**30  # of the mask that cuDNN gets for the documents of a device's sequences
MIN_BLOCK_TOKENS = 64


class BlockSizes(NamedTuple):
    """Block sizes of the splash attention kernel."""

    multiple: int  # the sequence is padded to it; also the keys whose scores are computed at once
    read: int  # positions that are read at once


def causal_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxKxH: jax.Array,
    v_BxTxKxW: jax.Array,
    segments_BxT: jax.Array | None = None,
    rotation: Rotation | None = None,
    pairs: Pairs = "halves",
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks_N: jax.Array | None = None,
    row_attention: ContextParallelMethod = "auto",
) -> jax.Array:
    """Attend from every position to itself and the past of its segment.

    The platform is that of the mesh (`jax.set_mesh`), so that a program compiled ahead of time for a TPU on a machine
    without one gets the TPU's kernel. Without a mesh it is the platform that the program is lowered for. Under a mesh
    with logical axis rules, batch and heads may be sharded; heads of keys need not divide over the devices that share
    heads of queries. Positions may be sharded too (context parallelism), if every device has two halves of equal
    length. Sequences of other lengths, which training refuses, are gathered on every device.

    Args:
        q_BxTxNxH: queries.
        k_BxTxKxH: keys.
        v_BxTxKxW: values.
        segments_BxT: documents of each sequence; None if it is one document.
        rotation: rotary positions to apply to queries and keys first; a kernel that can does so as it reads them.
        pairs: elements that rotate together.
        window: positions that a query attends to.
        softcap: soft-cap of scores.
        scale: factor on scores.
        sinks_N: score of each head of queries for the value zero, in the dtype of `q`.
        row_attention: how keys reach queries if positions are sharded (`memory.row_attention`).

    Returns:
        (B, T, N, W) in the dtype of `v`.

    Raises:
        InvalidError: sizes or options that no implementation supports.
    """
    # Such a window masks nothing, and without one more implementations can be selected.
    window = None if window is not None and window >= q_BxTxNxH.shape[1] else window
    options = AttentionOptions(window, softcap, scale)
    inputs = AttentionInputs(q_BxTxNxH, k_BxTxKxH, v_BxTxKxW, segments_BxT, rotation, sinks_N)
    _validate(inputs, options)
    use, rotating = get_kernel_use(), None
    rotates_halves = rotation is not None and pairs == "halves" and 2 * rotation.cos.shape[-1] == q_BxTxNxH.shape[-1]
    # A v4, whose kernels have the compiler's limit of VMEM, has no room for the rotated keys.
    has_room = platform() == "tpu" and vmem_limit_bytes() is not None
    if rotates_halves and has_room and num_sequence_shards() == 1:
        one = select_implementation("tpu", inputs, options)
        rotating = one if one.applies_rotation else None
    if rotation is not None and rotating is None:
        q, k = (rotate(x, rotation, pairs) for x in (q_BxTxNxH, k_BxTxKxH))
        inputs = inputs._replace(q=q, k=k, rotation=None)
    observe("attention entropy", functools.partial(_compute_entropy, inputs, options, pairs))
    k, v = (_repeat_for_mesh(x, q_BxTxNxH.shape[2]) for x in (inputs.k, inputs.v))
    inputs = inputs._replace(k=k, v=v)
    if rotating is not None:
        use.record(_make_case(rotating, inputs, options))
        return rotating.attend(inputs, options)
    # With positions on several devices the choice is another one: ring or all-gather.
    layout = make_sequence_layout(inputs, options, row_attention)
    if layout is not None:
        attend = sharded_attention
        if layout.has_kernel and use.is_allowed(splash_attention.__name__):
            # The case of the same kernel for whole sequences: the order of the blocks is not a part of the kernel.
            use.record(_make_case(SPLASH, inputs, options))
            attend = import_for_tpu("experiments.model.context_splash").sharded_splash_attention
        return cast(jax.Array, attend(layout, inputs))
    # All of them are traced, but only the one of the platform that the program is lowered for is compiled.
    selected = {name: select_implementation(name, inputs, options) for name in IMPLEMENTATIONS}
    implementations = {name: functools.partial(one.attend, options=options) for name, one in selected.items()}
    if (target := platform()) is not None:
        name = "cuda" if target == "gpu" else target
        if (one := selected.get(name, selected["default"])).owner is not None:
            use.record(_make_case(one, inputs, options))
        elif (fastest := IMPLEMENTATIONS.get(name, IMPLEMENTATIONS["default"])[0]).owner is not None:
            use.slow_forms["attention"] = f"{one.attend.__name__}: {find_obstacle(fastest, inputs, options)}"
        return implementations.get(name, implementations["default"])(inputs)
    return jax.lax.platform_dependent(inputs, **implementations)


def cached_attention(
    q_BxTxNxH: jax.Array,
    k_BxSxKxH: jax.Array,
    v_BxSxKxW: jax.Array,
    start: jax.Array | int,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    sinks_N: jax.Array | None = None,
) -> jax.Array:
    """Attend from positions `start` to `start` + T - 1 to the keys of a cache, which are at positions 0 to S - 1.

    Each query attends to keys at its own position and before. Later entries of the cache are masked, but must be
    finite. `start` may be traced. The function is for decoding; its gradient is not optimised.

    Returns:
        (B, T, N, W) in the dtype of `v`.
    """
    options = AttentionOptions(window, softcap, scale)
    _validate(AttentionInputs(q_BxTxNxH, k_BxSxKxH, v_BxSxKxW), options)
    q_BxNxTxH, k_BxKxSxH, v_BxKxSxW = (x.transpose(0, 2, 1, 3) for x in (q_BxTxNxH, k_BxSxKxH, v_BxSxKxW))
    positions_Tx1 = (start + jnp.arange(q_BxTxNxH.shape[1]))[:, None]
    mask_TxS = _causal_mask(positions_Tx1, jnp.arange(k_BxSxKxH.shape[1]), window)
    out_BxNxTxW = _attend(q_BxNxTxH, k_BxKxSxH, v_BxKxSxW, mask_TxS, options, sinks_N)
    return out_BxNxTxW.transpose(0, 2, 1, 3)


def _validate(inputs: AttentionInputs, options: AttentionOptions) -> None:
    q, k, v = inputs[:3]
    num_heads, num_key_heads = q.shape[2], k.shape[2]
    if num_heads % num_key_heads:
        raise InvalidError(
            f"attention: {num_heads} heads of queries do not divide over {num_key_heads} heads of keys and values; "
            f"use a multiple of {num_key_heads}"
        )
    if k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InvalidError(
            f"attention: queries {q.shape}, keys {k.shape} and values {v.shape} do not fit each other; "
            "use (B, T, N, H), (B, T, K, H) and (B, T, K, W)"
        )
    window, softcap = options.window, options.softcap
    if window is not None and window < 1:
        raise InvalidError(f"attention: window={window} leaves no position to attend to; use at least 1, or null")
    if softcap is not None and softcap <= 0:
        raise InvalidError(f"attention: softcap={softcap} does not bound scores; use a number above 0, or null")


# Plain JAX.


def blocked_attention(inputs: AttentionInputs, options: AttentionOptions) -> jax.Array:
    """Attend in blocks of queries, each block to the keys that its queries may see and few others.

    This skips nearly half of the work of a masked square, and with a window everything to the left of it. Batch and
    heads are the leading, adjacent batch dimensions of plain matmuls: XLA's CPU backend merges them into one, and the
    partitioner still sees two and shards both. The backward pass keeps only q, k and v and recomputes the weights,
    which is faster than writing them out and reading them back in a scan over layers.
    """
    T, window = inputs.q.shape[1], options.window
    # More blocks skip more of the square, but are smaller matmuls and a larger program.
    block_tokens = max(MIN_BLOCK_TOKENS, -(-T // MAX_BLOCKS))

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def attend(inputs: AttentionInputs) -> jax.Array:
        q_BxNxTxH, k_BxKxTxH, v_BxKxTxW = (x.transpose(0, 2, 1, 3) for x in inputs[:3])
        ids_BxT = inputs.segments
        blocks = []
        for start in range(0, T, block_tokens):
            stop = min(start + block_tokens, T)
            # Keys to the left of the first query's window are seen by no query of the block.
            first = 0 if window is None else max(0, start - window + 1)
            mask = _causal_mask(jnp.arange(start, stop)[:, None], jnp.arange(first, stop), window)
            if ids_BxT is not None:
                mask &= _segment_mask(ids_BxT[:, start:stop], ids_BxT[:, first:stop])  # (B, 1, Q, S)
            keys, values = k_BxKxTxH[:, :, first:stop], v_BxKxTxW[:, :, first:stop]
            blocks.append(_attend(q_BxNxTxH[:, :, start:stop], keys, values, mask, options, inputs.sinks))
        return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)

    return attend(inputs)


def _attend(
    q_BxNxQxH: jax.Array,
    k_BxKxSxH: jax.Array,
    v_BxKxSxW: jax.Array,
    mask: jax.Array,
    options: AttentionOptions,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """Attend where the mask, (Q, S) or (B, 1, Q, S), is true; queries that share a key head are rows of one matmul."""
    B, N, Q, _ = q_BxNxQxH.shape
    K = k_BxKxSxH.shape[1]
    weights_BxNxQxS = _compute_weights(q_BxNxQxH, k_BxKxSxH, mask, options, sinks_N).astype(v_BxKxSxW.dtype)
    out = jnp.einsum("bkrs,bksw->bkrw", weights_BxNxQxS.reshape(B, K, N // K * Q, -1), v_BxKxSxW)
    return out.reshape(B, N, Q, -1)


def _compute_weights(
    q_BxNxQxH: jax.Array, k_BxKxSxH: jax.Array, mask: jax.Array, options: AttentionOptions, sinks_N: jax.Array | None
) -> jax.Array:
    """Return the weights of the keys, (B, N, Q, S) in float32. With sinks their sum is less than 1."""
    B, N, Q, H = q_BxNxQxH.shape
    K = k_BxKxSxH.shape[1]
    grouped = (B, K, N // K * Q)
    scores = jnp.einsum(
        "bkrh,bksh->bkrs", q_BxNxQxH.reshape(*grouped, H), k_BxKxSxH, preferred_element_type=jnp.float32
    )
    scores_BxNxQxS = scores.reshape(B, N, Q, -1) / (math.sqrt(H) if options.scale is None else 1 / options.scale)
    if options.softcap is not None:
        scores_BxNxQxS = options.softcap * jnp.tanh(scores_BxNxQxS / options.softcap)
    scores_BxNxQxS = jnp.where(mask, scores_BxNxQxS, -jnp.inf)
    # In float32, since bfloat16 has too few digits for a sum over thousands of keys.
    if sinks_N is None:
        return jax.nn.softmax(scores_BxNxQxS, axis=-1)
    sinks_Nx1x1 = sinks_N.astype(jnp.float32)[:, None, None]
    most_BxNxQx1 = jax.lax.stop_gradient(jnp.maximum(scores_BxNxQxS.max(-1, keepdims=True), sinks_Nx1x1))
    weights_BxNxQxS = jnp.exp(scores_BxNxQxS - most_BxNxQx1)
    return weights_BxNxQxS / (weights_BxNxQxS.sum(-1, keepdims=True) + jnp.exp(sinks_Nx1x1 - most_BxNxQx1))


def _compute_entropy(inputs: AttentionInputs, options: AttentionOptions, pairs: Pairs) -> jax.Array:
    """Return the mean entropy of each head's weights over all real positions, in nats: (N,).

    The weights are those of plain JAX, whatever kernel attends. A sink counts as one more key.
    """
    q, k = inputs.q, inputs.k
    if inputs.rotation is not None:
        q, k = (rotate(x, inputs.rotation, pairs) for x in (q, k))
    positions_T = jnp.arange(q.shape[1])
    mask, is_real_BxT = (
        _causal_mask(positions_T[:, None], positions_T, options.window),
        jnp.ones(q.shape[:2], jnp.bool_),
    )
    if inputs.segments is not None:
        mask, is_real_BxT = mask & _segment_mask(inputs.segments, inputs.segments), inputs.segments > 0
    weights_BxNxTxT = _compute_weights(q.transpose(0, 2, 1, 3), k.transpose(0, 2, 1, 3), mask, options, inputs.sinks)
    rest_BxNxT = jnp.maximum(1 - weights_BxNxTxT.sum(-1), 0) if inputs.sinks is not None else 0.0
    entropy_BxNxT = jax.scipy.special.entr(weights_BxNxTxT).sum(-1) + jax.scipy.special.entr(rest_BxNxT)
    total_N = jnp.sum(entropy_BxNxT * is_real_BxT[:, None], axis=(0, 2))
    return total_N / jnp.maximum(jnp.sum(is_real_BxT), 1)


def _causal_mask(positions_Qx1: jax.Array, positions_S: jax.Array, window: int | None) -> jax.Array:
    mask_QxS = positions_Qx1 >= positions_S
    return mask_QxS if window is None else mask_QxS & (positions_Qx1 - positions_S < window)


def _segment_mask(queries_BxQ: jax.Array, keys_BxS: jax.Array) -> jax.Array:
    """Return True where query and key are of one segment, (B, 1, Q, S)."""
    return (queries_BxQ[:, :, None] == keys_BxS[:, None, :])[:, None]


def xla_attention(inputs: AttentionInputs, options: AttentionOptions) -> jax.Array:
    """Attend by JAX's own composition of matmuls and a float32 softmax."""
    return _dot_product_attention("xla", inputs, options)


def cudnn_attention(inputs: AttentionInputs, options: AttentionOptions) -> jax.Array:
    """Attend by cuDNN's fused kernel.

    JAX can split it over devices, but not inside of a `jax.shard_map` over some axes of the mesh. Segments become a
    mask of T x T positions, which all heads and layers share and which has no gradient.

    cuDNN can also be told where the documents of a sequence begin, and then skips the rest of the square. That form is
    not used: on Hopper its deterministic gradient needs memory for the square of all tokens of a batch before cuDNN
    9.25 (NVIDIA/cudnn-frontend, pull request 398), a sequence may hold only so many documents, and JAX before 0.11
    takes the wrong keys for grouped heads (jax-ml/jax, pull request 39521).
    """
    # What the kernel's gradient reads is kept, in place of the results of matmuls before biases and rotation.
    inputs = inputs._replace(q=mark_saved(inputs.q), k=mark_saved(inputs.k), v=mark_saved(inputs.v))
    attend: Callable[[AttentionInputs], jax.Array] = functools.partial(_dot_product_attention, "cudnn", options=options)
    if inputs.segments is not None:
        attend = jax.checkpoint(attend, policy=is_cudnn_forward)  # a backward pass makes the mask again
    with omit_mask_gradients():
        return _attend_on_each_device(attend, inputs)


def _dot_product_attention(
    implementation: Literal["xla", "cudnn"], inputs: AttentionInputs, options: AttentionOptions
) -> jax.Array:
    """Attend by `jax.nn.dot_product_attention`, which needs values as wide as keys: narrower ones are padded."""
    assert options.softcap is None
    width, segments_BxT = inputs.v.shape[3], inputs.segments
    missing = inputs.k.shape[3] - width
    out_BxTxNxH = jax.nn.dot_product_attention(
        inputs.q,
        inputs.k,
        jnp.pad(inputs.v, ((0, 0), (0, 0), (0, 0), (0, missing))) if missing else inputs.v,
        mask=None if segments_BxT is None else _segment_mask(segments_BxT, segments_BxT),
        scale=options.scale,
        is_causal=True,
        local_window_size=None if options.window is None else (options.window - 1, 0),
        implementation=implementation,
    )
    return out_BxTxNxH[..., :width] if missing else out_BxTxNxH


def _supports_cudnn(inputs: AttentionInputs) -> bool:
    """Return True if the GPU that the program is compiled for supports these heads, and has room for a mask."""
    capability, (B, T, _, H) = compute_capability(), inputs.q.shape
    if capability is None or H % 8 or (256 if capability >= (9, 0) else 128) < H:
        return False
    sequences = B // num_devices(next(iter(_partition_spec(WHOLE_SEQUENCE_AXES)), None))
    return inputs.segments is None or (T % 2 == 0 and 2 * sequences * T * T <= MASK_BYTES_MAX)


# TPU kernels.


def fused_attention(
    inputs: AttentionInputs, options: AttentionOptions, block: int | None = None, is_packed: bool | None = None
) -> jax.Array:
    """Attend by the kernels of `tpu_attention`.

    A block has `block` positions, by default as many as cost least. The kernels read several heads from one row of
    lanes if `is_packed` says so, by default if they can.
    """
    module = import_for_tpu("experiments.model.tpu_attention")
    block = _fused_block_tokens(inputs.q, inputs.v) if block is None else block
    is_packed = _can_pack(inputs) if is_packed is None else is_packed
    packed_head = inputs.q.shape[3] if is_packed else None
    causal, scale = module.CausalBlocks(block, options.window), score_scale(inputs.q, options)
    kernel = module.FusedAttention(causal, scale, options.softcap, vmem_limit_bytes(), packed_head)
    return _attend_on_tpu(kernel.attend, block, inputs, packed_head)


def splash_attention(inputs: AttentionInputs, options: AttentionOptions, blocks: BlockSizes | None = None) -> jax.Array:
    """Attend by JAX's fused TPU kernels, which skip blocks of keys that no query of a block may see."""
    splash, module = map(
        import_for_tpu, ("jax.experimental.pallas.ops.tpu.splash_attention", "experiments.model.context_splash")
    )
    group = inputs.q.shape[2] // inputs.k.shape[2]
    blocks = blocks or _splash_block_tokens(inputs.q.shape[1], options.window, inputs.q, inputs.v)
    factor = score_scale(inputs.q, options)

    def attend(inputs: AttentionInputs) -> jax.Array:
        q, k, v, ids, _, sinks_N = inputs
        # The kernel takes no scale. In its own dtype the product is rounded once; rounding the factor first would be a
        # second error. A power of two rounds nothing, so it needs no wider dtype on the way, which keeps that out of
        # the matmul before.
        if math.frexp(factor)[0] == 0.5:
            q_BxNxTxH = q * jnp.asarray(factor, q.dtype)
        else:
            q_BxNxTxH = (q.astype(jnp.float32) * factor).astype(q.dtype)
        # Batch and key heads are mapped axes, which the two cores of a chip may share; the kernel's own axes are not.
        mask = module.SequenceMask(np.arange(q.shape[2]), q.shape[2], options.window)
        kernel = module.make_kernel(mask, group, *blocks, options.softcap, SAVED_NAME)
        sinks_KxG = () if sinks_N is None else (sinks_N.reshape(-1, group),)
        attend_sequence = jax.vmap(kernel, in_axes=(0, 0, 0, None, *[0] * len(sinks_KxG)))
        attend_sequences = jax.vmap(attend_sequence, in_axes=(0, 0, 0, 0, *[None] * len(sinks_KxG)))
        segments = None if ids is None else splash.SegmentIds(ids, ids)
        q_BxKxGxTxH = q_BxNxTxH.reshape(*k.shape[:2], group, *q.shape[2:])
        out: jax.Array = attend_sequences(q_BxKxGxTxH, k, v, segments, *sinks_KxG)
        return out.reshape(*q.shape[:3], -1)

    return _attend_on_tpu(attend, blocks.multiple, inputs)


def _attend_on_tpu(
    kernel: Callable[[AttentionInputs], jax.Array],
    multiple: int,
    inputs: AttentionInputs,
    packed_head: int | None = None,
) -> jax.Array:
    """Attend by a kernel that takes queries (B, N, T, H), keys and values (B, K, T, ...).

    With `packed_head`, the width of a head, the kernel takes and returns packed heads (B, T, N H) instead. Cosines and
    sines come to it as (B or 1, T, lanes of a block), the same for both halves of a head.

    T is padded to whole blocks at the end, where no real position attends.
    """
    T, rotation = inputs.q.shape[1], inputs.rotation
    if rotation is not None:
        repeats = 2 if packed_head is None else 2 * (LANES // packed_head)
        angles = Rotation(*(jnp.concatenate([x] * repeats, axis=-1)[:, :, 0] for x in rotation))
        inputs = inputs._replace(rotation=angles)

    def attend(inputs: AttentionInputs) -> jax.Array:
        padding = [(0, 0), (0, -T % multiple)]
        padded: AttentionInputs = jax.tree.map(
            lambda x: jnp.pad(x, padding + [(0, 0)] * (x.ndim - 2)), inputs._replace(sinks=None)
        )

        # Arrays that are head-major in memory already are not moved by this transpose; for others it becomes a part of
        # the matmul that makes them. The reshape of packed heads moves nothing either.
        def reorder(x: jax.Array) -> jax.Array:
            return x.transpose(0, 2, 1, 3) if packed_head is None else x.reshape(*x.shape[:2], -1)

        q, k, v = (checkpoint_name(with_row_major_layout(reorder(x)), SAVED_NAME) for x in padded[:3])
        out = with_row_major_layout(kernel(padded._replace(q=q, k=k, v=v, sinks=inputs.sinks)))
        return (out.transpose(0, 2, 1, 3) if packed_head is None else out.reshape(padded.q.shape))[:, :T]

    return _attend_on_each_device(attend, inputs)


def _attend_on_each_device(attend: Callable[[AttentionInputs], jax.Array], inputs: AttentionInputs) -> jax.Array:
    """Call `attend` on each device, under a mesh, with its own sequences and heads: the partitioner splits no kernel.

    Cosines and sines have the axes of ids.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return attend(inputs)
    heads, ids = _partition_spec(WHOLE_SEQUENCE_AXES), _partition_spec(WHOLE_SEQUENCE_AXES[:2])
    # Angles that all sequences share have a batch axis of 1, which is not sharded.
    is_angle_sharded = inputs.rotation is not None and inputs.rotation.cos.shape[0] > 1
    angle = ids if is_angle_sharded else jax.sharding.PartitionSpec()
    specs = AttentionInputs._make([heads, heads, heads, ids, angle, jax.sharding.PartitionSpec(*heads[2:3])])
    out: jax.Array = jax.shard_map(attend, in_specs=(specs,), out_specs=heads, check_vma=False)(inputs)
    return out


def _splash_block_tokens(length: int, window: int | None, *heads: jax.Array) -> BlockSizes:
    """Return the block sizes of `splash_attention` for a sequence of such queries and values.

    They rest on libtpu's schedules for v5e and v5p (`tests/benchmarks/tpu_attention.py`): larger blocks lose less time
    between blocks, and skip less of the square.
    """
    unit = next(size for size in SPLASH_BLOCK_TOKENS if _is_worth_padding(length, size))
    padded = length + -length % unit
    is_long = uses_long_blocks(padded, min(padded, window or padded), *heads)
    return BlockSizes(unit, LONG_BLOCK_TOKENS if is_long else unit)


def _fused_block_tokens(q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array) -> int:
    """Return the block length of `fused_attention`, to which sequences are padded; 0 if the sequence does not fit.

    The cost of shorter blocks is that of libtpu's schedules (`tests/benchmarks/tpu_attention.py`).
    """
    length, costs = q_BxTxNxH.shape[1], {}
    for block in range(LANES, 1025, LANES):
        if _is_worth_padding(length, block) and _fused_bytes_left(block, q_BxTxNxH, v_BxTxKxW) >= 0:
            costs[block] = (length + -length % block) ** 2 * (1 + 200 / block)
    return min(costs, key=costs.__getitem__, default=0)


def _can_pack(inputs: AttentionInputs) -> bool:
    """Return True if `fused_attention` can read several heads from one row of lanes."""
    return inputs.sinks is None and _fit_lanes(inputs.q, inputs.v)


def _fit_lanes(q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array) -> bool:
    (N, H), (K, W) = q_BxTxNxH.shape[2:], v_BxTxKxW.shape[2:]
    return H == W and packs_heads(N, K, H)


def _fused_bytes_left(block: int, q_BxTxNxH: jax.Array, v_BxTxKxW: jax.Array) -> int:
    """Return the VMEM that `fused_attention` leaves free with blocks of this length; negative if it does not fit.

    It holds the gradients of a sequence's keys and values, two blocks of each of eight arrays, and what is computed
    from the scores of a long step. Except on a v4, which does not rotate in the kernel, it also holds the rotated keys
    of a sequence, a block of queries, and two blocks of each of four arrays of angles. If heads are packed, each has
    blocks of its own for queries, their gradients and those of the result. By libtpu's count up to 2 MiB come on top.
    """
    length, size, memory = q_BxTxNxH.shape[1], q_BxTxNxH.dtype.itemsize, vmem_limit_bytes()
    padded = length + -length % block
    head, value = (-(-x.shape[3] // LANES) * LANES for x in (q_BxTxNxH, v_BxTxKxW))
    needed = (head + value) * (4 * padded + 8 * block * size) + 10 * block * min(block, LONG_STEP) + 2**21
    if memory is not None:
        needed += head * (size * padded + size * block + 32 * block)
    if _fit_lanes(q_BxTxNxH, v_BxTxKxW):
        needed += block * (LANES // q_BxTxNxH.shape[3]) * LANES * (4 + 2 * size)
    return (2**24 if memory is None else memory) - needed


# The choice.


class _AttentionImplementation(NamedTuple):
    """Implementation of attention and what it supports. All of them support grouped heads, windows and scales."""

    attend: Callable[..., jax.Array]  # of inputs and options
    dtypes: tuple[DTypeLike, ...] = ()  # empty: all
    softcap: bool = True
    sinks: bool = True
    wide_values: bool = True  # values that are wider than keys; all support narrower ones
    fits: Callable[[AttentionInputs], bool] = lambda _: True  # condition on shapes
    length_multiple: int = 1  # sequences are padded to it, by at most an eighth
    applies_rotation: bool = False
    owner: Owner | None = None  # of its kernel, which is tested before it is used; None: it has no kernel
    needs_even_sharding: bool = False  # batch and heads must divide: the partitioner cannot split a kernel


BLOCKED = _AttentionImplementation(blocked_attention)
XLA = _AttentionImplementation(xla_attention, softcap=False, sinks=False, wide_values=False)
CUDNN = XLA._replace(
    attend=cudnn_attention,
    dtypes=(jnp.bfloat16, jnp.float16),
    fits=_supports_cudnn,
    owner="library",
    needs_even_sharding=True,
)
SPLASH = _AttentionImplementation(splash_attention, length_multiple=LANES, needs_even_sharding=True, owner="library")
FUSED = SPLASH._replace(
    attend=fused_attention,
    dtypes=(jnp.bfloat16, jnp.float32),
    fits=lambda inputs: _fused_block_tokens(inputs.q, inputs.v) > 0,
    applies_rotation=True,
    owner="ours",
)
# By platform, fastest first; the last one of each supports everything.
IMPLEMENTATIONS: dict[str, tuple[_AttentionImplementation, ...]] = {
    "cpu": (BLOCKED,),
    "cuda": (CUDNN, XLA._replace(dtypes=(jnp.float32,)), BLOCKED),
    "tpu": (FUSED, SPLASH, XLA, BLOCKED),
    "default": (XLA, BLOCKED),
}


def select_implementation(
    platform: str, inputs: AttentionInputs, options: AttentionOptions
) -> _AttentionImplementation:
    """Return the first implementation of a platform that supports these inputs.

    Implementations that `memory.attention` excludes, and kernels that have failed their test, are left out.
    """
    return next(one for one in IMPLEMENTATIONS[platform] if not find_obstacle(one, inputs, options))


def find_obstacle(one: _AttentionImplementation, inputs: AttentionInputs, options: AttentionOptions) -> str:
    """Return why an implementation cannot be used for these inputs, in a few words; empty if it can."""
    q_BxTxNxH, k_BxTxKxH, v_BxTxKxW = inputs[:3]
    use, name = get_kernel_use(), one.attend.__name__
    # cuDNN is the one kernel of a library for which there is another choice on its platform.
    excluded = {"auto": (), "ours": (CUDNN.attend,), "library": (FUSED.attend,)}[use.attention]
    if one.attend in excluded:
        return f"memory.attention={use.attention} excludes {name}"
    if not use.is_allowed(name):
        return f"{name} has failed its test"
    if one.dtypes and q_BxTxNxH.dtype not in one.dtypes:
        return f"{name} needs {' or '.join(jnp.dtype(dtype).name for dtype in one.dtypes)}, not {q_BxTxNxH.dtype.name}"
    if options.softcap is not None and not one.softcap:
        return f"{name} has no soft-cap"
    if inputs.sinks is not None and not one.sinks:
        return f"{name} has no sinks"
    if v_BxTxKxW.shape[3] > k_BxTxKxH.shape[3] and not one.wide_values:
        return f"{name} needs values that are not wider than keys"
    if not one.fits(inputs):
        kind = "" if inputs.segments is None else ", with documents"
        return f"{name} does not fit {q_BxTxNxH.shape[1]} positions and heads of {q_BxTxNxH.shape[3]}{kind}"
    if not _is_worth_padding(q_BxTxNxH.shape[1], one.length_multiple):
        return f"{name} would pad {q_BxTxNxH.shape[1]} positions to a multiple of {one.length_multiple}"
    spec = _partition_spec(WHOLE_SEQUENCE_AXES)
    divides = all(size % num_devices(entry) == 0 for size, entry in zip(q_BxTxNxH.shape, spec, strict=False))
    if one.needs_even_sharding and not divides:
        return f"{name} needs sequences and heads that divide over the mesh"
    return ""


# Tests of kernels.

MAX_TESTED_GROUP = 4
SCORE_STDDEV = 2.0  # sharp enough that a key too many or too few shows in a row


def reference_attention(inputs: AttentionInputs, options: AttentionOptions) -> jax.Array:
    """Attend in float32 with every score of the square at once: the definition, written without any other function."""
    q, k, v = (x.astype(jnp.float32) for x in inputs[:3])
    _, _, _, segments_BxT, rotation, sinks_N = inputs
    window, softcap, scale = options
    if rotation is not None:
        q, k = rotate_halves(q, rotation), rotate_halves(k, rotation)
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores_BxNxTxS = product("btnh,bsnh->bnts", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores_BxNxTxS = softcap * jnp.tanh(scores_BxNxTxS / softcap)
    positions_T = jnp.arange(q.shape[1])
    distance_TxS = positions_T[:, None] - positions_T
    mask = (distance_TxS >= 0) & (distance_TxS < (q.shape[1] if window is None else window))
    if segments_BxT is not None:
        mask = mask & (segments_BxT[:, None, :, None] == segments_BxT[:, None, None, :])
    weights_BxNxTxS = jnp.where(mask, jnp.exp(scores_BxNxTxS), 0)
    total_BxNxTx1 = jnp.sum(weights_BxNxTxS, axis=-1, keepdims=True)
    if sinks_N is not None:
        total_BxNxTx1 += jnp.exp(sinks_N.astype(jnp.float32))[:, None, None]
    return product("bnts,bsnw->btnw", weights_BxNxTxS / total_BxNxTx1, v)


def _make_case(one: _AttentionImplementation, inputs: AttentionInputs, options: AttentionOptions) -> KernelCase:
    """Return the case of a kernel for such arrays: the same blocks and masks on few heads and few blocks."""
    q_BxTxNxH, _, v_BxTxKxW, segments_BxT, rotation, sinks_N = inputs
    (_, T, N, H), (_, _, K, W), dtype = q_BxTxNxH.shape, v_BxTxKxW.shape, q_BxTxNxH.dtype
    window, blocks = options.window, BlockSizes(1, 256)
    if one.attend is fused_attention:
        block = _fused_block_tokens(q_BxTxNxH, v_BxTxKxW)
        blocks = BlockSizes(block, block)
    elif one.attend is splash_attention:
        blocks = _splash_block_tokens(T, window, q_BxTxNxH, v_BxTxKxW)
    # A row of lanes at least, if heads are packed.
    is_packed = one.attend is fused_attention and _can_pack(inputs)
    pack = LANES // H if is_packed else 1
    group = min(N // K, max(MAX_TESTED_GROUP, pack))
    heads = group * min(K, max(2, pack))
    # A pair of blocks without a window; with one as many as let a query see its edge. Windows keep their place in
    # a block, and sequences their padding.
    number = 2
    if window is not None:
        number = min(window // blocks.read, 2) + 2
        window = min(window, min(window // blocks.read, 2) * blocks.read + window % blocks.read)
    padding = -T % blocks.multiple
    length = min(T, number * blocks.read - padding)
    window = None if window is None or window >= length else window
    facts: JsonObject = {
        "sequences": 1 if rotation is None or rotation.cos.shape[0] == 1 else 2,
        "positions": length,
        "heads": heads,
        "key_heads": heads // group,
        "head": H,
        "value": W,
        "blocks": list(blocks),
        "segments": segments_BxT is not None,
        "rotation": rotation is not None,
        "sinks": sinks_N is not None,
        "packed": is_packed,
        **options._replace(window=window)._asdict(),
    }
    fallbacks = {"fused_attention": "JAX's splash attention", "splash_attention": "plain XLA ops"}
    return KernelCase(
        one.attend.__name__,
        "attention",
        one.owner or "ours",
        fallbacks.get(one.attend.__name__, "plain XLA ops"),
        facts,
        dtype.name,
        functools.partial(make_attention_trial, one.attend, facts, dtype),
        (__file__, str(Path(__file__).with_name("tpu_attention.py"))),
        is_demanded=one.owner == "ours" and get_kernel_use().attention == "ours",
    )


def make_attention_trial(attend: Callable[..., jax.Array], facts: Mapping[str, Any], dtype: DTypeLike) -> KernelTrial:
    """Return the functions to compare, result and gradients of attention, with random inputs."""
    generator, options = np.random.default_rng(0), AttentionOptions(*(facts[name] for name in AttentionOptions._fields))
    B, T, N, K, H, W = (facts[name] for name in ("sequences", "positions", "heads", "key_heads", "head", "value"))
    q, k, v, g = (
        generator.normal(size=(B, T, *shape)).astype(np.float32) for shape in ((N, H), (K, H), (K, W), (N, W))
    )
    q *= SCORE_STDDEV / (math.sqrt(H) * (H**-0.5 if facts["scale"] is None else facts["scale"]))
    inputs: dict[str, np.ndarray] = {name: x.astype(dtype) for name, x in zip("qkvg", (q, k, v, g), strict=True)}
    if facts["sinks"]:
        inputs["sinks"] = generator.normal(size=N).astype(dtype)
    if facts["segments"]:
        # Two short documents, padding, and between them one that is longer than the window, whose edge would show in
        # none of the others.
        cuts = [part + int(generator.integers(1 + T // 20)) for part in (T // 20, T - T // 8, T - T // 20)]
        ids_T = 1 + np.sum(np.arange(T)[:, None] >= np.array(cuts[:2]), axis=1)
        inputs["segments"] = np.tile(np.where(np.arange(T) < cuts[2], ids_T, 0).astype(np.int32), (B, 1))
    if facts["rotation"]:
        radians = generator.uniform(0, 2 * math.pi, (B, T, 1, H // 2))
        inputs |= {"cos": np.cos(radians).astype(np.float32), "sin": np.sin(radians).astype(np.float32)}
    if attend is fused_attention:
        attend = functools.partial(fused_attention, block=facts["blocks"][0], is_packed=facts["packed"])
    elif attend is splash_attention:
        attend = functools.partial(splash_attention, blocks=BlockSizes(*facts["blocks"]))

    def run(form: Callable[..., jax.Array], *leaves: jax.Array) -> Any:
        named = dict(zip(inputs, leaves, strict=True))
        rotation = Rotation(named["cos"], named["sin"]) if "cos" in named else None

        def attend_to(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            return form(AttentionInputs(q, k, v, named.get("segments"), rotation, sinks), options)

        out, pull_back = jax.vjp(attend_to, *(named[name] for name in ("q", "k", "v", "sinks") if name in named))
        return out, *pull_back(named["g"].astype(out.dtype))

    def reference(*leaves: jax.Array) -> Any:
        wide = (x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x for x in leaves)
        return run(reference_attention, *wide)

    return KernelTrial(functools.partial(run, attend), reference, tuple(inputs.values()))


def _is_worth_padding(length: int, multiple: int) -> bool:
    return 8 * (-length % multiple) <= length


def _repeat_for_mesh(x_BxTxKxH: jax.Array, num_heads: int) -> jax.Array:
    """Return keys or values, repeated until their heads divide over the devices that share the heads of queries.

    Otherwise each device would hold all of them. Each head is repeated as often as there are devices that need it, and
    each device holds only its own copy.
    """
    K = x_BxTxKxH.shape[2]
    number = num_shards("heads")
    if num_heads % number or K % number == 0:
        return x_BxTxKxH
    repeated = jnp.repeat(x_BxTxKxH, math.lcm(K, number) // K, axis=2)
    return constrain(repeated, *KEY_AXES)


def _partition_spec(axes: tuple[str, ...]) -> jax.sharding.PartitionSpec:
    return nn.logical_to_mesh_axes(axes) or jax.sharding.PartitionSpec()
