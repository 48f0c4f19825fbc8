"""Image classification by a vision transformer (Dosovitskiy et al., 2021), on a data set of arrays.

`Patterns` generates images of noisy stripes, whose direction is the label. Replace it by a class that reads your
images.

Shape legend: B examples, H and W rows and columns, P width of a patch, T patches, D width, N heads, K classes.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import DTypeLike
from pydantic import Field, PositiveInt

from experiments.model import with_axes
from experiments.model.config import SizedConfig
from runner import BaseTrainer
from runner.config import TrainerConfig
from runner.train.step import Batch


class Patterns:
    """Grey images of noisy stripes in one of `classes` directions. An image is a function of its index alone."""

    def __init__(self, examples: int = 4096, size: int = 16, classes: int = 8, noise: float = 1.5, waves: float = 2.0):
        self.examples, self.size, self.classes = examples, size, classes
        self.noise, self.waves = noise, waves
        self.fingerprint = f"stripes {size} {classes} {noise} {waves}"

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, np.ndarray | int]:
        """Return `image` (H, W, 1) and its `label`."""
        random, label = np.random.default_rng(index), index % self.classes
        rows, columns = np.mgrid[: self.size, : self.size] / self.size
        waves, phase = self.waves * random.uniform(1, 2), random.uniform(0, 2 * np.pi)
        distance = columns * np.cos(np.pi * label / self.classes) + rows * np.sin(np.pi * label / self.classes)
        image = np.sin(2 * np.pi * waves * distance + phase) + self.noise * random.standard_normal(distance.shape)
        return {"image": image[..., None].astype(np.float32), "label": label}


class ViTConfig(SizedConfig):
    """Architecture of a vision transformer."""

    layers: PositiveInt = Field(description="Transformer layers.")
    width: PositiveInt = Field(description="Width of the residual stream.")
    heads: PositiveInt = Field(description="Attention heads; divides width.")
    patch: PositiveInt = Field(description="Width of a square patch in pixels; divides the size of an image.")
    classes: PositiveInt = Field(description="Classes.")


class EncoderLayer(nn.Module):
    """Transformer layer in which every position attends to all others."""

    heads: int
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x_BxTxD: jax.Array) -> jax.Array:
        """Return the residual stream after the layer."""
        (B, T, D), init = x_BxTxD.shape, nn.initializers.lecun_normal()
        dense = functools.partial(nn.Dense, dtype=self.dtype, param_dtype=self.param_dtype)
        norm = functools.partial(nn.LayerNorm, dtype=self.dtype, param_dtype=self.param_dtype)
        qkv_BxTx3D = dense(3 * D, kernel_init=with_axes(init, "embed", "heads"))(norm()(x_BxTxD))
        q, k, v = jnp.split(qkv_BxTx3D.reshape(B, T, 3 * self.heads, D // self.heads), 3, axis=2)
        attended_BxTxD = jax.nn.dot_product_attention(q, k, v).reshape(B, T, D)
        x_BxTxD += dense(D, kernel_init=with_axes(init, "heads", "embed"))(attended_BxTxD)
        h_BxTx4D = nn.gelu(dense(4 * D, kernel_init=with_axes(init, "embed", "mlp"))(norm()(x_BxTxD)))
        return x_BxTxD + dense(D, kernel_init=with_axes(init, "mlp", "embed"))(h_BxTx4D)


class VisionTransformer(nn.Module):
    """Logits of the classes of an image, from the mean over its patches."""

    config: ViTConfig
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, image_BxHxWx1: jax.Array, *, deterministic: bool) -> jax.Array:
        """Return logits (B, K)."""
        config, P, dtypes = self.config, self.config.patch, (self.dtype, self.param_dtype)
        x_BxHxWxD = nn.Conv(config.width, (P, P), (P, P), dtype=self.dtype, param_dtype=self.param_dtype)(image_BxHxWx1)
        x_BxTxD = x_BxHxWxD.reshape(len(image_BxHxWx1), -1, config.width)
        x_BxTxD += self.param("positions", nn.initializers.normal(0.02), x_BxTxD.shape[1:], self.param_dtype)
        for _ in range(config.layers):
            x_BxTxD = EncoderLayer(config.heads, *dtypes)(x_BxTxD)
        x_BxD = nn.LayerNorm(dtype=self.dtype, param_dtype=self.param_dtype)(x_BxTxD).mean(axis=1)
        return nn.Dense(config.classes, dtype=self.dtype, param_dtype=self.param_dtype)(x_BxD)


class ClassifyImages(BaseTrainer):
    """Trainer of a `VisionTransformer`, with its accuracy."""

    Config = TrainerConfig[ViTConfig]

    def model(self) -> VisionTransformer:
        """Return the model of the config."""
        return VisionTransformer(self.config.model, self.config.precision.compute, self.config.precision.params)

    @classmethod
    def model_inputs(cls, batch: Batch) -> tuple[jax.Array, ...]:
        """Return the images."""
        return (batch["image"],)

    returns_loss_sum = True

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Batch, key: jax.Array | None) -> tuple[jax.Array, Any]:
        """Return the summed cross-entropy of the labels, and the images that are classified correctly."""
        logits_BxK = apply_fn({"params": params}, batch["image"], deterministic=key is None).astype(jnp.float32)
        label_B, is_real_B = batch["label"], batch["padding_mask"]
        loss_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxK, label_B)
        num_right = jnp.sum(is_real_B & (logits_BxK.argmax(axis=-1) == label_B), dtype=jnp.float32)
        return jnp.sum(jnp.where(is_real_B, loss_B, 0)), {"sums": {"accuracy": num_right}}

    @classmethod
    def predict(cls, apply_fn: Any, params: Any, batch: Batch) -> dict[str, jax.Array]:
        """Return the most probable class of each image, and the logits of all."""
        logits_BxK = apply_fn({"params": params}, batch["image"], deterministic=True)
        return {"class": logits_BxK.argmax(axis=-1), "logits": logits_BxK}
