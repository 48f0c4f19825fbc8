"""A trainer that is no language model: it tells bright images from dark ones, on a data set of arrays."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from runner import BaseTrainer

PIXELS, SHADES, IMAGES = 16, 4, 512
CHANGES: dict[str, Any] = {
    "job": "tests.support.images:Classify",
    "config.model": {},
    "config.data": {"source": "tests.support.images:Images", "validation_fraction": 0.1},
    "config.optimizer.learning_rate": 0.03,
    "config.train.total_steps": 6,
    "config.eval": {"every_steps": 3, "batches": 2},
}


class Images:
    """Images of a few pixels, each with a label that tells whether it is bright."""

    fingerprint = "images"

    def __init__(self) -> None:
        self.shades = np.random.default_rng(0).integers(0, SHADES, (IMAGES, PIXELS), np.int32)
        self.labels = (self.shades.mean(axis=1) > (SHADES - 1) / 2).astype(np.int32)

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"shades": self.shades[index], "label": self.labels[index]}


class Classifier(nn.Module):
    """Logits of an image, one for each class."""

    @nn.compact
    def __call__(self, shades_BxP: jax.Array, *, deterministic: bool) -> jax.Array:
        return nn.Dense(2)(jax.nn.one_hot(shades_BxP, SHADES).reshape(len(shades_BxP), -1))


class Classify(BaseTrainer):
    """Trainer of `Classifier`, with its accuracy."""

    def model(self) -> Classifier:
        return Classifier()

    @classmethod
    def model_inputs(cls, batch: Any) -> tuple[jax.Array, ...]:
        return (batch["shades"],)

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits_BxC = apply_fn({"params": params}, batch["shades"], deterministic=key is None)
        label_B, is_real_B = batch["label"], batch["padding_mask"]
        loss_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxC, label_B)
        num_images = jnp.sum(is_real_B, dtype=jnp.float32)
        num_right = jnp.sum(is_real_B & (logits_BxC.argmax(-1) == label_B), dtype=jnp.float32)
        return jnp.sum(loss_B * is_real_B), {"target_count": num_images, "sums": {"accuracy": (num_right, num_images)}}


class RateText(BaseTrainer):
    """Trainer on tokens whose model returns one number for a sequence, so that it writes no text."""

    def model(self) -> nn.Module:
        return Rating()

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        rating_B = apply_fn({"params": params}, batch["x"], deterministic=key is None)
        return jnp.sum(jnp.square(rating_B - batch["y"][:, -1])), {"token_count": jnp.float32(len(rating_B))}


class Rating(nn.Module):
    """Number for a sequence."""

    @nn.compact
    def __call__(self, x_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
        return nn.Dense(1)(x_BxT.astype(jnp.float32))[:, 0]


class Bright:
    """Evaluator of the share of images that the weights call bright, which may write into its weights."""

    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
        bias = np.asarray(weights["params"]["Dense_0"].pop("bias"))
        return {"val/bright": float(bias[1] > bias[0]), "val/step": step}


class Broken(Bright):
    def evaluate(self, weights: Any, step: int, hosts: Any) -> dict[str, Any]:
        raise ValueError("no image is there")


class ClassifyAndJudge(Classify):
    """Trainer with evaluators of its own."""

    def evaluator(self) -> list[Any]:
        return [*self.builtin_evaluators, Broken(), Bright()]


class NeedsBatch(Classify):
    """Trainer whose evaluator needs a running job."""

    def evaluator(self) -> list[Any]:
        self.batch("validation", 0)
        return [*self.builtin_evaluators, Bright()]
