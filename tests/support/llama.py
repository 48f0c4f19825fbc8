"""Small user-defined Llama: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, no biases, untied output.

Shape legend: B batch, T sequence, D width, N heads, K key heads, H width of a head.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
from pydantic import Field, PositiveInt

from runner import BaseTrainer
from runner.config import ModelConfig, TrainerConfig


class LlamaConfig(ModelConfig):
    """Sizes of the model."""

    layers: PositiveInt = Field(default=4, description="Blocks.")
    width: PositiveInt = Field(default=64, description="Width of the residual stream.")
    heads: PositiveInt = Field(default=4, description="Query heads.")
    key_heads: PositiveInt = Field(default=2, description="Key and value heads.")


def dense(features: int, axes: tuple[str, str]) -> nn.Dense:
    """Make a linear layer without bias, with logical axis names."""
    return nn.Dense(
        features, use_bias=False, kernel_init=nn.with_logical_partitioning(nn.initializers.normal(0.02), axes)
    )


def rotate(x_BxTxNxH: jax.Array) -> jax.Array:
    """Apply rotary position embeddings."""
    _, T, _, H = x_BxTxNxH.shape
    angles_TxH = jnp.arange(T)[:, None] / 10_000 ** (jnp.arange(H // 2) / (H // 2))
    cos, sin = jnp.cos(angles_TxH)[None, :, None], jnp.sin(angles_TxH)[None, :, None]
    first, second = jnp.split(x_BxTxNxH, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)


class Block(nn.Module):
    """Transformer block: attention and MLP."""

    config: LlamaConfig

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        N, K, D = self.config.heads, self.config.key_heads, self.config.width
        B, T, H = *x_BxTxD.shape[:2], D // N
        y_BxTxD = nn.RMSNorm()(x_BxTxD)
        q_BxTxNxH, k_BxTxKxH, v_BxTxKxH = (
            dense(heads * H, ("embed", "heads"))(y_BxTxD).reshape(B, T, heads, H) for heads in (N, K, K)
        )
        mixed_BxTxNxH = jax.nn.dot_product_attention(rotate(q_BxTxNxH), rotate(k_BxTxKxH), v_BxTxKxH, is_causal=True)
        x_BxTxD = x_BxTxD + dense(D, ("heads", "embed"))(mixed_BxTxNxH.reshape(B, T, D))
        y_BxTxD = nn.RMSNorm()(x_BxTxD)
        gate, up = (dense(4 * D, ("embed", "mlp"))(y_BxTxD) for _ in range(2))
        return x_BxTxD + dense(D, ("mlp", "embed"))(nn.silu(gate) * up)


class Llama(nn.Module):
    """The language model."""

    config: LlamaConfig
    vocabulary_size: int

    @nn.compact
    def __call__(self, tokens_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
        init = nn.with_logical_partitioning(nn.initializers.normal(0.02), ("vocab", "embed"))
        x_BxTxD = nn.Embed(self.vocabulary_size, self.config.width, embedding_init=init)(tokens_BxT)
        for _ in range(self.config.layers):
            x_BxTxD = Block(self.config)(x_BxTxD)
        return dense(self.vocabulary_size, ("embed", "vocab"))(nn.RMSNorm()(x_BxTxD))


class PretrainLlama(BaseTrainer):
    """Next-token pretraining of the small Llama."""

    Config = TrainerConfig[LlamaConfig]

    def model(self) -> Llama:
        """Build the model from the config."""
        return Llama(self.config.model, self.vocabulary_size)
