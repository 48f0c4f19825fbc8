"""Distillation: its loss against a reference in NumPy, and a student that is split, stopped and resumed."""

import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.distill import DistillGPT, compute_divergence
from runner.cli.app import main
from runner.errors import DataError, InvalidError, PreemptedError
from tests.support.tiny_jobs import TEXT, StopAfter, make_gpt, read_rows

B, T, V = 2, 5, 11


def draw_logits(seed: int, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (B, T, V)).astype(np.float32)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def select_top(logits: np.ndarray, top_k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the fields of a teacher: logsumexp, top logits, their ids."""
    ids = np.argsort(-logits, axis=-1)[..., :top_k].astype(np.int32)
    log_sum = np.log(np.exp(logits.astype(np.float64)).sum(-1)).astype(np.float32)
    return log_sum, np.take_along_axis(logits, ids, -1), ids


@pytest.mark.parametrize("top_k", [1, 3, V - 1, V])
@pytest.mark.parametrize("scale", [0.1, 3.0, 30.0])
def test_the_divergence_counts_all_other_tokens_as_one(top_k: int, scale: float) -> None:
    student, teacher = draw_logits(0), draw_logits(1, scale)
    log_sum, top, ids = select_top(teacher, top_k)
    log_p, log_q = log_softmax(teacher), log_softmax(student)
    expected = np.zeros((B, T))
    for place in np.ndindex(B, T):
        chosen = ids[place]
        rest = np.setdiff1d(np.arange(V), chosen)
        expected[place] = (np.exp(log_p[place][chosen]) * (log_p[place] - log_q[place])[chosen]).sum()
        if len(rest):
            p, q = np.exp(log_p[place][rest]).sum(), np.exp(log_q[place][rest]).sum()
            expected[place] += p * np.log(p / q)
    found = compute_divergence(jnp.asarray(student), log_sum, top, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if top_k == V:
        exact = (np.exp(log_p) * (log_p - log_q)).sum(-1)
        np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("top_k", [3, V])
def test_the_gradient_is_finite_and_vanishes_at_the_teacher(top_k: int) -> None:
    teacher = draw_logits(1)
    log_sum, top, ids = select_top(teacher, top_k)
    differentiate = jax.grad(lambda logits, *fields: compute_divergence(logits, *fields).sum())
    np.testing.assert_allclose(differentiate(jnp.asarray(teacher), log_sum, top, ids), 0, atol=1e-5)
    # A student that gives all others no measurable probability still learns of them.
    sure = jnp.asarray(np.where(teacher == teacher.max(-1, keepdims=True), 100, 0).astype(np.float32))
    gradient = np.asarray(differentiate(sure, log_sum, top, ids))
    assert np.isfinite(gradient).all()
    assert np.abs(gradient).max() > 0.1
    # A token without a prediction has neither a divergence nor a gradient.
    unknown = np.full_like(log_sum, np.inf), np.zeros_like(top), np.zeros_like(ids)
    assert not np.any(compute_divergence(sure, *unknown))
    assert not np.any(differentiate(sure, *unknown))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Predictions of a teacher for documents of odd sizes."""
    directory = tmp_path_factory.mktemp("distill")
    for number, size in enumerate((2000, 41, 1500, 7, 1333)):
        (directory / f"{number}.txt").write_text(TEXT[number * 2000 :][:size])
    changes = {"config.train.total_steps": 2, "config.optimizer.learning_rate": 0.1, "config.schedule.warmup_steps": 0}
    make_gpt(directory / "teacher", **changes)()
    words = [str(directory / "teacher"), "--data", str(directory / "[0-9].txt"), "--save-top-k", "4"]
    assert main(["evaluate", *words, "-o", str(directory / "top")]) == 0
    return directory / "top"


def make_student(directory: Path, corpus: Path, **changes: Any) -> DistillGPT:
    data = {"source": str(corpus), "options": {"top_k": 4}, "sequence_length": 16, "packing": "documents"}
    keys = {"job": "experiments.distill:DistillGPT", "config.data": data, "checkpoint.every_steps": 2}
    job = make_gpt(directory, DistillGPT, **keys, **changes)
    assert isinstance(job, DistillGPT)
    return job


def test_a_stopped_student_resumes_to_the_same_bits(corpus: Path, tmp_path: Path) -> None:
    make_student(tmp_path / "whole", corpus)()
    stopped = make_student(tmp_path / "stopped", corpus)
    with pytest.raises(PreemptedError):
        stopped(stop=StopAfter(stopped, 5))
    make_student(tmp_path / "stopped", corpus)()
    for name in ("fingerprint", "train_loss", "val_loss"):
        results = [json.loads((tmp_path / run / "result.json").read_text())[name] for run in ("whole", "stopped")]
        assert results[0] == results[1]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("mesh", "micro_batch"), [({"data": 8}, 1), ({"data": 2, "sequence": 4}, 4), ({"fsdp": 4, "tensor": 2}, 2)]
)
def test_the_split_of_the_batch_changes_a_loss_by_rounding_alone(
    corpus: Path, tmp_path: Path, mesh: dict[str, int], micro_batch: int
) -> None:
    """Document starts without a prediction and padding leave a different number of predictions in each micro-batch."""
    rows = []
    for sizes, examples in (({"data": 1, "tensor": 8}, 16), (mesh, micro_batch)):
        directory = tmp_path / f"{len(rows)}"
        split = {"config.train.micro_batch_examples": examples, "config.train.total_steps": 3}
        make_student(directory, corpus, **{"topology.mesh": sizes}, **split)()
        rows.append(read_rows(directory))
    for one, same in zip(*rows, strict=True):
        for key in ("train/loss", "train/divergence", "train/grad_norm"):
            np.testing.assert_allclose(one[key], same[key], rtol=2e-4, err_msg=key)


@pytest.mark.soak
def test_weight_0_is_the_loss_of_the_data_alone(corpus: Path, tmp_path: Path) -> None:
    make_student(tmp_path / "weighted", corpus, **{"config.distill": {"weight": 0.0}, "config.train.total_steps": 3})()
    data = {"source": str(corpus), "sequence_length": 16, "packing": "documents"}
    make_gpt(tmp_path / "plain", **{"config.data": data, "config.train.total_steps": 3})()
    for one, other in zip(read_rows(tmp_path / "weighted"), read_rows(tmp_path / "plain"), strict=True):
        np.testing.assert_allclose(one["train/loss"], other["train/loss"], rtol=1e-5)
        if "val/loss" in other:
            np.testing.assert_allclose(one["val/loss"], other["val/loss"], rtol=1e-5)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "vocabulary": ({"config.model.vocabulary_size": 200}, r"has 256 ids .* the model's vocabulary 200"),
    "no predictions": ({"config.data.options": {}}, r"set data\.options\.top_k"),
    "chunks": ({"config.memory": {"loss_chunk_positions": 8}}, r"loss_chunk_positions=8: .* whole logits"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_student_that_does_not_fit_the_predictions_is_refused(corpus: Path, tmp_path: Path, name: str) -> None:
    changes, message = MISTAKES[name]
    with pytest.raises((InvalidError, DataError)) as caught:
        make_student(tmp_path / "run", corpus, **changes)()
    assert re.search(message, str(caught.value))
