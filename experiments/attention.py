"""Causal attention, in the form that is fast on the platform the program is compiled for.

Owns the choice between implementations and nothing else: no parameters, no dropout, no model. Every form computes
softmax(q k^T / sqrt(H)) v over past and present positions, with the softmax in float32.

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


def causal_attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
    """Attend from every position to itself and the past; returns (B, T, N, H) in the dtype of `q`.

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
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        platform = "cuda" if device.platform == "gpu" else device.platform
        return forms.get(platform, xla_attention)(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)
    return jax.lax.platform_dependent(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, **forms)


@functools.partial(jax.checkpoint, prevent_cse=False)
def blocked_attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
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
        visible_QxS = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
        scores_BxNxQxS = jnp.where(visible_QxS, scores_BxNxQxS / math.sqrt(H), -jnp.inf)
        weights_BxNxQxS = jax.nn.softmax(scores_BxNxQxS, axis=-1).astype(v_BxTxNxH.dtype)
        blocks.append(jnp.einsum("bnqs,bnsh->bnqh", weights_BxNxQxS, v_BxNxTxH[:, :, :stop]))
    return jnp.concatenate(blocks, axis=2).transpose(0, 2, 1, 3)


def xla_attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
    """Attend by JAX's own composition of matmuls and a float32 softmax."""
    return jax.nn.dot_product_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True, implementation="xla")


def cudnn_attention(q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array) -> jax.Array:
    """Attend by cuDNN's fused kernel (16-bit floats only)."""
    return jax.nn.dot_product_attention(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH, is_causal=True, implementation="cudnn")


def pallas_attention(
    q_BxTxNxH: jax.Array, k_BxTxNxH: jax.Array, v_BxTxNxH: jax.Array, *, block_tokens: int
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

    def attend(*qkv_BxTxNxH: jax.Array) -> jax.Array:
        qkv_BxNxTxH = (x_BxTxNxH.transpose(0, 2, 1, 3) for x_BxTxNxH in qkv_BxTxNxH)
        scale = 1 / math.sqrt(q_BxTxNxH.shape[3])
        out_BxNxTxH = tpu_flash.flash_attention(*qkv_BxNxTxH, causal=True, sm_scale=scale, block_sizes=sizes)
        return out_BxNxTxH.transpose(0, 2, 1, 3)

    if not jax.sharding.get_abstract_mesh().empty:
        spec = _partition_spec()
        attend = jax.shard_map(attend, in_specs=(spec, spec, spec), out_specs=spec, check_vma=False)
    return attend(q_BxTxNxH, k_BxTxNxH, v_BxTxNxH)


def _divides_over_mesh(q_BxTxNxH: jax.Array) -> bool:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return True
    sharding = jax.sharding.NamedSharding(mesh, _partition_spec())
    try:
        sharding.shard_shape(q_BxTxNxH.shape)
    except ValueError:
        return False
    return True


def _partition_spec() -> jax.sharding.PartitionSpec:
    return nn.logical_to_mesh_axes(AXES) or jax.sharding.PartitionSpec()
