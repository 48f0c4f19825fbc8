"""A trainer that is no language model: it tells bright images from dark ones, and counts images instead of tokens."""

from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from runner import BaseTrainer
from runner.data import Source

PIXELS, SHADES, IMAGES = 16, 4, 512
CHANGES: dict[str, Any] = {
    "job": "tests.support.images:Classify",
    "config.model": {},
    "config.data": {"source": "tests.support.images:Images", "sequence_length": PIXELS, "validation_fraction": 0.1},
    "config.optimizer.learning_rate": 0.03,
    "config.train.total_steps": 6,
    "config.eval": {"every_steps": 3, "batches": 2},
}


class Images(Source):
    """Images of a few pixels, one after another; each pixel knows whether its image is bright."""

    vocabulary_size = SHADES
    fingerprint = "images"
    fields: ClassVar = {"label": np.int32}

    def __init__(self) -> None:
        self.shades = np.random.default_rng(0).integers(0, SHADES, (IMAGES, PIXELS))
        self.labels = (self.shades.mean(axis=1) > (SHADES - 1) / 2).astype(np.int32)

    def __len__(self) -> int:
        return IMAGES * PIXELS

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.shades.ravel()[start:stop]

    def read_field(self, name: str, start: int, stop: int) -> np.ndarray:
        # A batch holds a field where the token is the target, so the first target has the label of its image.
        return np.repeat(self.labels, PIXELS)[start:stop]


class Classifier(nn.Module):
    """Logits of an image, one for each class."""

    @nn.compact
    def __call__(self, x_BxT: jax.Array, *, deterministic: bool) -> jax.Array:
        return nn.Dense(2)(jax.nn.one_hot(x_BxT, SHADES).reshape(x_BxT.shape[0], -1))


class Classify(BaseTrainer):
    """Trainer of `Classifier`, with its accuracy."""

    def model(self) -> Classifier:
        return Classifier()

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits_BxC = apply_fn({"params": params}, batch["x"], deterministic=key is None)
        label_B, is_real_B = batch["label"][:, 0], batch["padding_mask"][:, 0]
        loss_B = optax.softmax_cross_entropy_with_integer_labels(logits_BxC, label_B)
        num_images = jnp.sum(is_real_B, dtype=jnp.float32)
        num_right = jnp.sum(is_real_B & (logits_BxC.argmax(-1) == label_B), dtype=jnp.float32)
        return jnp.sum(loss_B * is_real_B), {"token_count": num_images, "sums": {"accuracy": (num_right, num_images)}}


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
