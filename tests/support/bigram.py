"""Bigram trainer whose `forward` returns every kind of metric, and evaluators with their own schedule or failure."""

import json
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from experiments.gpt import PretrainGPT
from runner import BaseTrainer
from runner.distributed.agreement import Hosts
from runner.metrics.meta import Meta, histogram
from runner.storage import parse_lines
from runner.train.loss import cross_entropy_sum, document_arguments, target_weights

TEXT = "".join(f"{number} squared is {number * number}.\n" for number in range(1500))
BIGRAM_OPTIONS: dict[str, Any] = {
    "config.model": {"layers": 1, "heads": 1, "width": 8},
    "config.data.sequence_length": 16,
    "config.train.global_batch_examples": 16,
    "config.train.micro_batch_examples": 1,
    "config.eval.batches": 1,
}


class BigramModel(nn.Module):
    """Bigram language model: one matrix of logits by token."""

    size: int

    @nn.compact
    def __call__(self, x_BxT: jax.Array, *, deterministic: bool, segments: Any = None, positions: Any = None) -> Any:
        logits_BxTxV = nn.Embed(self.size, self.size, name="table")(x_BxT)
        return logits_BxTxV if segments is None else logits_BxTxV * (segments > 0)[..., None]


class TableEvaluator:
    """Evaluator with its own interval that returns a number and a list."""

    name = "own"

    def __init__(self, every_steps: int | None):
        self.every_steps = every_steps

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> dict[str, Any]:
        table = np.asarray(jax.tree.leaves(weights["params"])[0], np.float64)
        return {"val/own/sum": table.sum(), "val/own/rows": table[:4].sum(axis=1).tolist()}


class BigramTrainer(BaseTrainer):
    """Trainer of the bigram model that returns metrics of every kind."""

    Config = PretrainGPT.Config

    def model(self) -> BigramModel:
        return BigramModel(self.vocabulary_size)

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Meta]:
        documents = document_arguments(apply_fn, batch)
        logits_BxTxV = apply_fn({"params": params}, batch["x"], **documents, deterministic=key is None)
        weights_BxT = target_weights(batch)
        loss_sum, _ = cross_entropy_sum(logits_BxTxV, batch["y"], weights_BxT)
        right_BxT = (jnp.argmax(logits_BxTxV, -1) == batch["y"]) & batch["padding_mask"]
        is_space_BxT = (batch["y"] == ord(" ")) & batch["padding_mask"]
        parts_P = jnp.sum(right_BxT.reshape(right_BxT.shape[0], 4, -1), (0, 2)).astype(jnp.float32)
        return loss_sum, {
            "largest": jnp.max(logits_BxTxV),
            "by_part": parts_P,
            "logits": histogram(logits_BxTxV, bins=8),
            "sums": {
                "right": jnp.sum(right_BxT),
                "entropy": loss_sum,
                "parts": parts_P,
                "right_spaces": (jnp.sum(right_BxT & is_space_BxT), jnp.sum(is_space_BxT)),
                "nothing": (jnp.float32(0), jnp.float32(0)),
            },
        }


class EvaluatedBigramTrainer(BigramTrainer):
    """Bigram trainer with the evaluators of the spec and a `TableEvaluator` every 3 steps."""

    def evaluator(self) -> Any:
        return [*self.builtin_evaluators, TableEvaluator(3)]


class OtherCodeTrainer(BigramTrainer):
    """Trainer whose loss has another factor on process 1, as from an image with other code."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: jax.Array | None) -> tuple[jax.Array, Meta]:
        loss_sum, _ = super().forward(apply_fn, params, batch, key)
        return loss_sum * (1.0 + jax.process_index()), {}


class FailingEvaluator:
    """Evaluator that raises on process 1 while the other processes wait in a collective."""

    name = "alone"

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> dict[str, Any]:
        """Raise on process 1; hang elsewhere."""
        if hosts.process_id == 1:
            raise ValueError("no such figure")
        multihost_utils.process_allgather(np.zeros(1))
        return {}


class FailingEvaluatorTrainer(BigramTrainer):
    """Bigram trainer whose only evaluator fails."""

    def evaluator(self) -> Any:
        return FailingEvaluator()


def write_questions(path: Path, number: int = 12) -> Path:
    questions = [
        {"question": f"{i} squared is", "choices": [str(i * i), str(i + 1000), f"the {i}"], "answer": i % 3}
        for i in range(number)
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))
    return path


def read_trajectory(directory: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without their speed and time, which differ between runs."""
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]
