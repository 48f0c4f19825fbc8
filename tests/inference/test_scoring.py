"""Score records: metrics that add up, as JSON that every reader accepts."""

import json
import math

import numpy as np
import pytest

from runner.inference.evaluate import Score, format_record, make_record
from runner.train.evaluators import ValidationSize, ValidationSums


def make_sums(loss: float, num_tokens: float, num_correct: float) -> ValidationSums:
    return ValidationSums(loss, num_tokens, {}, {"accuracy": np.float64(num_correct)})


def test_a_score_is_weighted_by_tokens_and_counts_bytes_of_all_sets() -> None:
    score = Score(7, {"a": make_sums(30.0, 10.0, 10.0), "b": make_sums(100.0, 90.0, 40.0)})
    record = make_record(score, {"a": ValidationSize(10, 40), "b": ValidationSize(90, 160)})
    assert record["loss"] == 130 / 100
    assert record["perplexity"] == math.exp(1.3)
    assert (record["loss_per_byte"], record["bytes"], record["tokens"]) == (130 / 200, 200, 100)
    assert record["sets"]["a"] == {
        "loss": 3.0,
        "perplexity": math.exp(3),
        "loss_per_byte": 0.75,
        "tokens": 10,
        "bytes": 40,
        "metrics": {"accuracy": 1.0},
    }
    assert record["metrics"] == {"accuracy": 0.5}
    assert format_record(record) == [
        "step 7 a: loss 3.000000 nats a token, perplexity 20.0855, "
        "0.750000 nats a byte, accuracy 1 (10 tokens, 40 bytes)",
        "step 7 b: loss 1.111111 nats a token, perplexity 3.0377, "
        "0.625000 nats a byte, accuracy 0.4444 (90 tokens, 160 bytes)",
        "step 7: loss 1.300000 nats a token, perplexity 3.6693, "
        "0.650000 nats a byte, accuracy 0.5 (100 tokens, 200 bytes)",
    ]


@pytest.mark.parametrize(
    ("sums", "size", "line"),
    [
        ((8.0, 4.0), ValidationSize(0, None, "why"), "loss 2.000000 nats a token, perplexity 7.3891 (4 tokens)"),
        ((8.0, 4.0), ValidationSize(5, 20), "loss 2.000000 nats a token, perplexity 7.3891 (4 tokens)"),
        ((5.0, 2.5), ValidationSize(3, 9), "loss 2.000000 nats a token, perplexity 7.3891 (2 tokens)"),
        ((8000.0, 4.0), ValidationSize(0, None, "why"), "loss 2000.000000 nats a token (4 tokens)"),
        ((math.nan, 4.0), ValidationSize(4, 4), "loss is not finite (4 tokens)"),
        ((0.0, 0.0), ValidationSize(0, 0), "no loss, because there is no target (0 tokens)"),
    ],
)
def test_unknown_and_non_finite_values_are_omitted(sums: tuple[float, float], size: ValidationSize, line: str) -> None:
    record = make_record(Score(1, {"data": ValidationSums(*sums)}), {"data": size})
    assert format_record(record) == [f"step 1: {line}"]
    text = json.dumps(record, allow_nan=False)
    assert json.loads(text)["sets"]["data"]["loss_per_byte"] is None


@pytest.mark.parametrize(
    ("is_language_model", "line"),
    [
        (True, "loss 2.000000 nats a token, perplexity 7.3891, accuracy 0.75, margin - (4 tokens)"),
        (False, "loss 2.000000, accuracy 0.75, margin - (4 targets)"),
    ],
)
def test_metrics_of_the_job_stand_beside_its_loss(is_language_model: bool, line: str) -> None:
    last = {"token_count": 2, "moe/0/load": 1.0, "gates": [1.0]}
    sums = ValidationSums(8.0, 4.0, last, {"accuracy": 3.0, "margin": (0.0, 0.0)})
    record = make_record(Score(1, {"data": sums}), {"data": ValidationSize(0, None)}, is_language_model)
    assert format_record(record) == [f"step 1: {line}"]
    own = {"accuracy": 0.75, "gates": [1.0], "margin": None, "moe/0/load": 1.0}
    assert record["metrics"] == record["sets"]["data"]["metrics"] == own
    assert record.get("language_model", True) == is_language_model
    assert (record["perplexity"] is None) == (not is_language_model)
    two = make_record(Score(1, {"a": sums, "b": sums}), {}, is_language_model)
    assert two["metrics"] == {"accuracy": 0.75}
    assert two["sets"]["a"]["metrics"] == own
