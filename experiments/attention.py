"""Causal attention, in the form that is fast on the platform the program is compiled for.

Owns the choice between implementations and nothing else: no parameters, no dropout, no model. Every form computes
softmax(q k^T / sqrt(H)) v over past and present positions, with the softmax in float32.

Where a row holds several documents, `segments_BxT` (int32) numbers them: 1, 2, ... in a row, 0 is padding. Then every
form attends within a segment alone. Padding attends to padding: each position sees itself at least, so that all values
are finite, and no real position ever sees padding. Without segments the program is that of rows which are one document.

Shape legend: B batch, T sequence, N heads, H width of a head, Q queries of one block, S keys that a block of queries
sees.
"""

import functools
import importlib
import math

import flax.linen as nn
import jax
import jax.numpy as jnp

AXES = ("batch", "sequence", "heads", "head_dim")
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
MAX_BLOCKS = 8
MIN_BLOCK_TOKENS = 64
TPU_BLOCK_TOKENS = (512, 256, 128)


def causal_attention(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Attend from every position to itself and the past of its segment; returns (B, T, N, H) in the dtype of `q`.

    The platform is that of the mesh (`jax.set_mesh`), so that compiling ahead of time for a TPU on a machine without
    one takes the TPU's kernel; without a mesh, the one that the program is lowered for. Under a mesh with logical axis
    rules, batch and heads may be sharded.
    """
    forms = {"cpu": blocked_attention, "default": xla_attention}
    block_tokens = next((size for size in TPU_BLOCK_TOKENS if q_BxTxNxH.shape[1] % size == 0), None)
    if block_tokens is not None and _divides_over_mesh(q_BxTxNxH):
        forms["tpu"] = functools.partial(pallas_attention, block_tokens=block_tokens)
    if q_BxTxNxH.dtype in CUDNN_DTYPES and jax.default_backend() == "gpu":
        # Tracing this form asks the installed cuDNN for its version, so it can only be offered where there is one.
        forms["cuda"] = cudnn_attention
    arrays = (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, *(() if segments_BxT is None else (segments_BxT,)))
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        platform = "cuda" if device.platform == "gpu" else device.platform
        return forms.get(platform, xla_attention)(*arrays)
    return jax.lax.platform_dependent(*arrays, **forms)


@functools.partial(jax.checkpoint, prevent_cse=False)
def blocked_attention(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Attend block of queries by block of queries, each to no more keys than its last query may see.

    Skips nearly half of the work of a masked square. Batch and heads lead, as adjacent batch dimensions of plain
    matmuls: XLA's CPU backend merges them into one, and the partitioner still sees them apart and shards both. The
    backward pass keeps q, k and v alone and computes the weights again, which is faster than writing them out and
    reading them back in a scan over layers.
    """
    T, H = q_BxTxNxH.shape[1], q_BxTxNxH.shape[3]
    q_BxNxTxH, k_BxNxTxH, v_BxNxTxH = (x.transpose(0, 2, 1, 3) for x in (q_BxTxNxH, k_BxTxNxH, v_BxTxNxH))
    block_tokens = max(MIN_BLOCK_TOKENS, -(-T // MAX_BLOCKS))
    blocks = []
    for start in range(0, T, block_tokens):
        stop = min(start + block_tokens, T)
        scores_BxNxQxS = jnp.einsum(
            "bnqh,bnsh->bnqs",
            q_BxNxTxH[:, :, start:stop],
            k_BxNxTxH[:, :, :stop],
            preferred_element_type=jnp.float32,
        )
        visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)  # (Q, S), with segments (B, 1, Q, S)
        if segments_BxT is not None:
            visible &= _same_segment(segments_BxT[:, start:stop], segments_BxT[:, :stop])
        scores_BxNxQxS = jnp.where(visible, scores_BxNxQxS / math.sqrt(H), -jnp.inf)
        weights_BxNxQxS = jax.nn.softmax(scores_BxNxQxS, axis=-1).astype(v_BxTxNxH.dtype)
        blocks.append(jnp.einsum("bnqs,bnsh->bnqh", weights_BxNxQxS, v_BxNxTxH[:, :, :stop]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def xla_attention(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Attend by JAX's own composition of matmuls and a float32 softmax."""
    mask_Bx1xTxT = None if segments_BxT is None else _same_segment(segments_BxT, segments_BxT)
    return jax.nn.dot_product_attention(
        q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, mask=mask_Bx1xTxT, is_causal=True, implementation="xla"
    )


def cudnn_attention(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array, segments_BxT: jax.Array | None = None
) -> jax.Array:
    """Attend by cuDNN's fused kernel (16-bit floats only).

    With segments, block by block instead: cuDNN takes a mask as a bias of all T x T scores, JAX then asks it for that
    bias's gradient too, and together with that gradient not every GPU has an algorithm that gives the same bits twice.
    """
    if segments_BxT is not None:
        return blocked_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, segments_BxT)
    return jax.nn.dot_product_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True, implementation="cudnn")


def pallas_attention(
    q_BxTxNxH: jax.Array,
    k_BxTxNxH: jax.Array,
    v_BxTxNxH: jax.Array,
    segments_BxT: jax.Array | None = None,
    *,
    block_tokens: int,
) -> jax.Array:
    """Attend by the fused TPU kernel; `block_tokens` divides T.

    The partitioner cannot split such a kernel, so under a mesh each device runs it on its own rows and heads.
    """
    tpu_flash = importlib.import_module("jax.experimental.pallas.ops.tpu.flash_attention")  # slow, and for TPUs alone
    sizes = tpu_flash.BlockSizes(
        block_b=1,
        **dict.fromkeys(("block_q", "block_k_major", "block_k"), block_tokens),
        **dict.fromkeys(("block_q_major_dkv", "block_k_major_dkv", "block_k_dkv", "block_q_dkv"), block_tokens),
        **dict.fromkeys(("block_k_major_dq", "block_k_dq", "block_q_dq"), block_tokens),
    )

    def attend(*arrays: jax.Array) -> jax.Array:
        qkv_BxNxTxH = (x_BxTxNxH.transpose(0, 2, 1, 3) for x_BxTxNxH in arrays[:3])
        segment_ids = tpu_flash.SegmentIds(arrays[3], arrays[3]) if segments else None
        scale = 1 / math.sqrt(q_BxTxNxH.shape[3])
        out_BxNxTxH = tpu_flash.flash_attention(
            *qkv_BxNxTxH, segment_ids=segment_ids, causal=True, sm_scale=scale, block_sizes=sizes
        )
        return out_BxNxTxH.transpose(0, 2, 1, 3)

    segments = () if segments_BxT is None else (segments_BxT,)
    if not jax.sharding.get_abstract_mesh().empty:
        spec, spec_of_ids = _partition_spec(AXES), _partition_spec(AXES[:2])
        in_specs = (spec, spec, spec, *[spec_of_ids] * len(segments))
        attend = jax.shard_map(attend, in_specs=in_specs, out_specs=spec, check_vma=False)
    return attend(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, *segments)


def _same_segment(queries_BxQ: jax.Array, keys_BxS: jax.Array) -> jax.Array:
    """Which queries and keys are of one segment: (B, 1, Q, S)."""
    return (queries_BxQ[:, :, None] == keys_BxS[:, None, :])[:, None]


def _divides_over_mesh(q_BxTxNxH: jax.Array) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return True
    sharding = jax.sharding.NamedSharding(mesh, _partition_spec(AXES))
    try:
        sharding.shard_shape(q_BxTxNxH.shape)
    except ValueError:
        return False
    return True


def _partition_spec(axes: tuple[str, ...]) -> jax.sharding.PartitionSpec:
    return nn.logical_to_mesh_axes(axes) or jax.sharding.PartitionSpec()
