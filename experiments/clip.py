"""Contrastive training of images and captions (Radford et al., 2021): each image finds its caption among others.

Candidates are the `group` consecutive examples of the batch to which an example belongs, so that the loss does not
depend on how the batch is split, as long as groups stay whole.

Shape legend: B examples, T bytes of a caption, D width, E width of the shared space, G examples of a group, N groups.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from pydantic import Field, PositiveInt

from experiments.model.config import SizedConfig
from experiments.vit import EncoderLayer, Patterns, VisionTransformer, ViTConfig
from runner import BaseTrainer
from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.train.step import Batch

CAPTION_BYTES = 32


class CaptionedPatterns(Patterns):
    """Images of stripes, each with a caption that names their direction."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        """Return `image` (H, W, 1) and `caption` (T), bytes that end with zeros."""
        found = super().__getitem__(index)
        text = f"stripes at {180 * found['label'] / self.classes:.0f} degrees".encode().ljust(CAPTION_BYTES, b"\0")
        return {"image": found["image"], "caption": np.frombuffer(text, np.uint8)}


class CLIPConfig(SizedConfig):
    """Architecture of the two encoders."""

    image: ViTConfig = Field(description="Encoder of images; `classes` is the width of the shared space.")
    text_layers: PositiveInt = Field(description="Layers of the encoder of captions.")
    group: PositiveInt = Field(description="Examples among which a caption is found; divides a micro-batch.")


class DualEncoder(nn.Module):
    """Unit vectors of images and captions in one space, and the scale of their products."""

    config: CLIPConfig
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(
        self, image_BxHxWx1: jax.Array, caption_BxT: jax.Array, *, deterministic: bool
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return vectors of images (B, E) and of captions (B, E), and the scale."""
        config, D, types = self.config, self.config.image.width, (self.dtype, self.param_dtype)
        image_BxE = VisionTransformer(config.image, *types, name="image")(image_BxHxWx1, deterministic=deterministic)
        x_BxTxD = nn.Embed(256, D, dtype=self.dtype, param_dtype=self.param_dtype)(caption_BxT.astype(jnp.int32))
        x_BxTxD += self.param("positions", nn.initializers.normal(0.02), x_BxTxD.shape[1:], self.param_dtype)
        for _ in range(config.text_layers):
            x_BxTxD = EncoderLayer(config.image.heads, *types)(x_BxTxD)
        caption_BxE = nn.Dense(config.image.classes, dtype=self.dtype, param_dtype=self.param_dtype)(x_BxTxD.mean(1))
        scale = jnp.exp(self.param("log_scale", nn.initializers.constant(2.0), (), jnp.float32))

        def normalise(x_BxE: jax.Array) -> jax.Array:
            x_BxE = x_BxE.astype(jnp.float32)
            return x_BxE * jax.lax.rsqrt(jnp.sum(jnp.square(x_BxE), axis=-1, keepdims=True) + 1e-6)

        return normalise(image_BxE), normalise(caption_BxE), scale


class MatchCaptions(BaseTrainer):
    """Trainer of a `DualEncoder`; its accuracy is the share of images that find their caption in the group."""

    Config = TrainerConfig[CLIPConfig]

    def model(self) -> DualEncoder:
        """Return the model of the config."""
        return DualEncoder(self.config.model, self.config.precision.compute, self.config.precision.params)

    @classmethod
    def model_inputs(cls, batch: Batch) -> tuple[jax.Array, ...]:
        """Return images and captions."""
        return batch["image"], batch["caption"]

    returns_loss_sum = True

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """Return the cross-entropy of captions by image and of images by caption, halved, and correct captions."""
        image_BxE, caption_BxE, scale = apply_fn(
            {"params": params}, *cls.model_inputs(batch), deterministic=key is None
        )
        # `plan` counts the FLOPs of a single example without a key.
        B, G = len(image_BxE), 1 if len(image_BxE) == 1 and key is None else cls.config.model.group
        if B % G:
            raise InvalidError(f"config.model.group={G} does not divide a micro-batch of {B}; use a divisor")
        image, caption, bytes_NxGxT = (x.reshape(B // G, G, -1) for x in (image_BxE, caption_BxE, batch["caption"]))
        is_real_NxG = batch["padding_mask"].reshape(B // G, G)
        # All captions that are equal to the right one count as correct, and padding is not a candidate.
        is_same = (bytes_NxGxT[:, :, None] == bytes_NxGxT[:, None]).all(axis=-1) & is_real_NxG[:, None]
        logits = jnp.where(is_real_NxG[:, None], scale * jnp.einsum("nie,nje->nij", image, caption), -1e9)
        by_caption = jnp.where(is_real_NxG[:, None], scale * jnp.einsum("nie,nje->nij", caption, image), -1e9)
        share = is_same / jnp.maximum(is_same.sum(axis=-1, keepdims=True), 1)
        loss_NxG = -0.5 * jnp.sum(share * (jax.nn.log_softmax(logits) + jax.nn.log_softmax(by_caption)), axis=-1)
        is_right_NxG = jnp.take_along_axis(is_same, logits.argmax(axis=-1)[..., None], axis=-1)[..., 0] & is_real_NxG
        meta = {"sums": {"accuracy": jnp.sum(is_right_NxG, dtype=jnp.float32)}}
        return jnp.sum(jnp.where(is_real_NxG, loss_NxG, 0)), meta
