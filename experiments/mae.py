"""Masked autoencoder (He et al., 2022): an encoder sees a few patches of an image, a decoder reconstructs the others.

Shape legend: B examples, T patches, V visible ones, D width, C pixels of a patch.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from pydantic import Field, PositiveInt

from experiments.model.config import SizedConfig
from experiments.vit import EncoderLayer, Patterns
from runner import BaseTrainer
from runner.config import TrainerConfig
from runner.train.step import Batch


class UnlabelledPatterns(Patterns):
    """Images of stripes alone."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        """Return `image` (H, W, 1)."""
        return {"image": super().__getitem__(index)["image"]}


class MAEConfig(SizedConfig):
    """Architecture of a masked autoencoder."""

    layers: PositiveInt = Field(description="Layers of the encoder.")
    decoder_layers: PositiveInt = Field(description="Layers of the decoder.")
    width: PositiveInt = Field(description="Width of the residual stream.")
    heads: PositiveInt = Field(description="Attention heads; divides width.")
    patch: PositiveInt = Field(description="Width of a square patch in pixels; divides the size of an image.")
    visible_patches: PositiveInt = Field(description="Patches of an image that the encoder sees.")


def split_patches(image_BxHxWx1: jax.Array, patch: int) -> jax.Array:
    """Return the patches of images, row by row, (B, T, C)."""
    B, H, W, _ = image_BxHxWx1.shape
    x = image_BxHxWx1.reshape(B, H // patch, patch, W // patch, patch)
    return x.swapaxes(2, 3).reshape(B, -1, patch * patch)


def draw_orders(key: jax.Array, example_B: jax.Array, num_patches: int) -> jax.Array:
    """Return a random order of the patches of each example (B, T), the same in any split of the batch."""

    def draw(example: jax.Array) -> jax.Array:
        return jax.random.permutation(jax.random.fold_in(key, example), num_patches)

    return jax.vmap(draw)(example_B)


class MaskedAutoencoder(nn.Module):
    """Reconstruction of all patches from the first ones of an order."""

    config: MAEConfig
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, patch_BxTxC: jax.Array, order_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
        """Return the patches (B, T, C); `order_BxT` begins with the visible ones."""
        config, (_, T, C), types = self.config, patch_BxTxC.shape, (self.dtype, self.param_dtype)
        V, D, init = config.visible_patches, config.width, nn.initializers.normal(0.02)
        position_TxD = self.param("positions", init, (T, D), self.param_dtype)
        decoder_position_TxD = self.param("decoder_positions", init, (T, D), self.param_dtype)
        x_BxTxD = nn.Dense(D, dtype=self.dtype, param_dtype=self.param_dtype, name="embedding")(patch_BxTxC)
        x_BxVxD = jnp.take_along_axis(x_BxTxD + position_TxD, order_BxT[:, :V, None], axis=1)
        for layer in range(config.layers):
            x_BxVxD = EncoderLayer(config.heads, *types, name=f"encoder_{layer}")(x_BxVxD)
        # Hidden patches are one learned vector; the inverse of the order puts all patches in their places.
        hidden_D = self.param("hidden", init, (D,), self.param_dtype).astype(x_BxVxD.dtype)
        hidden_BxHxD = jnp.broadcast_to(hidden_D, (len(x_BxVxD), T - V, D))
        ordered_BxTxD = jnp.concatenate([x_BxVxD, hidden_BxHxD], axis=1)
        x_BxTxD = jnp.take_along_axis(ordered_BxTxD, jnp.argsort(order_BxT, axis=1)[..., None], axis=1)
        x_BxTxD += decoder_position_TxD
        for layer in range(config.decoder_layers):
            x_BxTxD = EncoderLayer(config.heads, *types, name=f"decoder_{layer}")(x_BxTxD)
        x_BxTxD = nn.LayerNorm(dtype=self.dtype, param_dtype=self.param_dtype)(x_BxTxD)
        return nn.Dense(C, dtype=self.dtype, param_dtype=self.param_dtype, name="pixels")(x_BxTxD)


class ReconstructImages(BaseTrainer):
    """Trainer of a `MaskedAutoencoder`; its accuracy is the share of hidden pixels whose sign is right."""

    Config = TrainerConfig[MAEConfig]

    def model(self) -> MaskedAutoencoder:
        """Return the model of the config."""
        return MaskedAutoencoder(self.config.model, self.config.precision.compute, self.config.precision.params)

    @classmethod
    def model_inputs(cls, batch: Batch, key: jax.Array | None = None) -> tuple[jax.Array, ...]:
        """Return the patches and their orders; without a key, as in evaluations, they are always the same."""
        patch_BxTxC = split_patches(batch["image"], cls.config.model.patch)
        example_B = batch.get("example", jnp.arange(len(patch_BxTxC)))
        return patch_BxTxC, draw_orders(jax.random.key(0) if key is None else key, example_B, patch_BxTxC.shape[1])

    returns_loss_sum = True

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """Return the squared error of hidden patches, each a target, and the hidden pixels whose sign is right."""
        patch_BxTxC, order_BxT = cls.model_inputs(batch, key)
        found_BxTxC = apply_fn({"params": params}, patch_BxTxC, order_BxT, deterministic=key is None)
        rank_BxT = jnp.argsort(order_BxT, axis=1)
        is_target_BxT = (rank_BxT >= cls.config.model.visible_patches) & batch["padding_mask"][:, None]
        error_BxT = jnp.mean(jnp.square(found_BxTxC.astype(jnp.float32) - patch_BxTxC), axis=-1)
        is_right_BxTxC = (found_BxTxC > 0) == (patch_BxTxC > 0)
        num_right = jnp.sum(is_right_BxTxC.mean(axis=-1) * is_target_BxT, dtype=jnp.float32)
        num_targets = jnp.sum(is_target_BxT, dtype=jnp.float32)
        meta = {"target_count": num_targets, "sums": {"accuracy": num_right}}
        return jnp.sum(jnp.where(is_target_BxT, error_BxT, 0)), meta
