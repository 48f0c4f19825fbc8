"""Data sets of arrays for tests: images with labels, bad examples of every kind, and a classifier of the images."""

import time
from pathlib import Path
from typing import Any, ClassVar

import flax.linen as nn
import grain
import jax
import jax.numpy as jnp
import numpy as np

from runner import BaseTrainer

SIZE = 4
CHANGES: dict[str, Any] = {
    "job": "tests.support.arrays:CountBright",
    "config.model": {},
    "config.data": {"source": "tests.support.arrays:Images", "validation_fraction": 0.1},
    "config.optimizer.learning_rate": 0.03,
    "config.train.total_steps": 6,
    "config.eval": {"every_steps": 3, "batches": 2},
}


class Images:
    """Random images that are a function of their index; the label tells the bright ones."""

    padding: ClassVar = {"label": -1}

    def __init__(self, examples: int = 205, seed: int = 0, size: int = SIZE, name: str = "images"):
        self.examples, self.seed, self.size = examples, seed, size
        self.fingerprint = name

    def __len__(self) -> int:
        return self.examples

    def __getitem__(self, index: int) -> dict[str, Any]:
        assert 0 <= index < self.examples
        image = np.random.default_rng([self.seed, index]).standard_normal((self.size, self.size, 1), np.float32)
        return {"image": image, "label": int(image.mean() > 0), "index": np.array([index, index + 1], np.int64)}


BAD_EXAMPLES: dict[str, tuple[Any, str]] = {
    "raises": (None, r"example 6: __getitem__ raised ZeroDivisionError: "),
    "none": (lambda example: None, r"example 6: is None, needs a dict"),
    "tuple": (lambda example: (1, 2), r"example 6: is a tuple, needs a dict"),
    "shape": (
        lambda example: example | {"image": np.zeros((3, 4, 1), np.float32)},
        r"example 6: image is float32 of shape \(3, 4, 1\), and that of the first example is float32 of shape \(4, 4",
    ),
    "rank": (lambda example: example | {"label": np.zeros(1, np.int32)}, r"example 6: label is int32 of shape \(1,\)"),
    "dtype": (lambda example: example | {"image": np.zeros((4, 4, 1), np.uint8)}, r"example 6: image is uint8 of"),
    "missing": (
        lambda example: {"image": example["image"], "index": example["index"]},
        r"6: has no label, and",
    ),
    "unknown": (
        lambda example: example | {"mask": 1},
        r"example 6: has the field mask, and the first example",
    ),
    "object": (lambda example: example | {"label": np.array([{}])}, r"example 6: label is object, needs integers"),
    "complex": (lambda example: example | {"label": np.complex64(1)}, r"example 6: label is complex64, needs integers"),
    "text": (lambda example: example | {"label": np.array("a")}, r"example 6: label is <U1, needs integers"),
    "list": (lambda example: example | {"label": [1]}, r"example 6: label is a list, needs an array or a number"),
    "duration": (lambda example: example | {"label": np.timedelta64(1, "s")}, r"6: label is timedelta64\[s\], needs"),
    "wide float": (lambda example: example | {"label": np.longdouble(1)}, r"example 6: label is float128, needs"),
    "huge float": (
        lambda example: example | {"image": example["image"].astype(np.float64) * 1e300},
        r"example 6: image holds float64 beyond float32",
    ),
    "large": (lambda example: example | {"label": 1 << 40}, r"example 6: label holds int64 beyond int32"),
}


class Bad(Images):
    """Images of which number 6 is bad."""

    def __init__(self, kind: str):
        super().__init__(examples=40)
        self.kind = kind

    def __getitem__(self, index: int) -> Any:
        change = BAD_EXAMPLES[self.kind][0]
        if index == 6 and change is None:
            return 1 // 0
        return change(super().__getitem__(index)) if index == 6 else super().__getitem__(index)


class Named(Images):
    """Images and labels under the names that the default `forward` reads."""

    padding: ClassVar = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = super().__getitem__(index)
        return {"x": example["image"], "y": example["label"]}


class NamedColumn(Named):
    """Labels of shape (1,), which the default `forward` cannot compare with logits."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = super().__getitem__(index)
        return example | {"y": np.array([example["y"]])}


class Stubborn(Images):
    """Images of which one hangs, or cannot be reached, until a file exists."""

    def __init__(self, until: str, at: int, is_unreachable: bool = False):
        super().__init__()
        self.until, self.at, self.is_unreachable = Path(until), at, is_unreachable

    def __getitem__(self, index: int) -> dict[str, Any]:
        while index == self.at and not self.until.exists():
            if self.is_unreachable:
                raise ConnectionResetError("the server went away")
            time.sleep(0.1)
        return super().__getitem__(index)


class Changing(Images):
    """Images of which one differs where a file exists."""

    def __init__(self, changed: str, at: int = 0):
        super().__init__()
        self.changed, self.at = Path(changed), at

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = super().__getitem__(index)
        is_changed = index == self.at and self.changed.exists()
        return example | {"image": example["image"] + np.float32(1)} if is_changed else example


class GrainImages:
    """Images through a data set of grain."""

    def __init__(self, examples: int = 100, factor: float = 1.0):
        images = grain.MapDataset.source(Images(examples))
        self.images = images.map(lambda example: example | {"image": example["image"] * factor})

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.images[index]  # type: ignore[no-any-return]


class Bright(nn.Module):
    """Logits of the labels of images."""

    @nn.compact
    def __call__(self, image_BxHxWx1: jax.Array, *, deterministic: bool) -> jax.Array:
        return nn.Dense(2)(image_BxHxWx1.reshape(len(image_BxHxWx1), -1))


class CountBright(BaseTrainer):
    """Trainer of `Bright`."""

    def model(self) -> Bright:
        return Bright()

    @classmethod
    def model_inputs(cls, batch: Any) -> tuple[jax.Array, ...]:
        return (batch["image"],)

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits_BxK = apply_fn({"params": params}, batch["image"], deterministic=key is None)
        label_B, is_real_B = batch["label"], batch["padding_mask"]
        # A label of -1 has no log probability; its loss is not counted.
        loss_B = -jnp.take_along_axis(jax.nn.log_softmax(logits_BxK), jnp.maximum(label_B, 0)[:, None], axis=1)[:, 0]
        num_right = jnp.sum(is_real_B & (logits_BxK.argmax(-1) == label_B), dtype=jnp.float32)
        loss_B += 0.0 * batch["index"].sum(axis=1)
        return jnp.sum(jnp.where(is_real_B, loss_B, 0)), {"sums": {"accuracy": num_right}}
