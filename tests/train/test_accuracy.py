"""Token accuracy of validation: the share of targets that are the most probable next token, from its forward pass."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer
from runner.errors import InvalidError
from tests.support.attempt import start
from tests.support.bigram import BigramModel
from tests.support.tiny_jobs import make_gpt


class PlainBigram(BaseTrainer):
    """A trainer with the `forward` of `BaseTrainer`."""

    Config = PretrainGPT.Config

    def model(self) -> BigramModel:
        return BigramModel(self.vocabulary_size)


DECODER = {"config.model": {"layers": 2, "heads": 4, "width": 32, "mlp_width": 64}}
EXPERTS = {"config.model": {**DECODER["config.model"], "moe": {"experts": 4, "experts_per_token": 2}}}
CHUNKS = {"config.memory.loss_chunk_positions": 4}
JOBS: dict[str, tuple[type[BaseTrainer], dict[str, Any]]] = {
    "the base class": (PlainBigram, {}),
    "GPT": (PretrainGPT, {}),
    "GPT in chunks": (PretrainGPT, CHUNKS),
    "GPT sharded over its vocabulary": (PretrainGPT, {"topology.mesh": {"data": "auto", "tensor": 2}}),
    "decoder": (PretrainDecoder, DECODER),
    "decoder in chunks": (PretrainDecoder, DECODER | CHUNKS),
    "decoder with experts": (PretrainDecoder, EXPERTS),
    "packed documents": (PretrainGPT, {"config.data.packing": "documents"}),
    "ordered sums": (PretrainGPT, {"config.train.same_bits_devices": 8, "config.train.micro_batch_examples": 1}),
}
DAILY = {"the base class", "GPT"}


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in DAILY)) for name in JOBS])
def test_the_accuracy_is_that_of_the_most_probable_tokens(tmp_path: Path, name: str) -> None:
    job_class, changes = JOBS[name]
    job = start(make_gpt(tmp_path / "run", job_class, **changes))
    batch = job.batch("validation", 0)
    rows = {field: np.asarray(values).reshape(-1, values.shape[-1]) for field, values in batch.items()}
    documents = {f"{key}s": rows[key] for key in ("segment", "position") if key in rows}
    variables = {"params": job.state.params, **job.state.variables}
    apply = jax.jit(functools.partial(job.model().apply, deterministic=True))
    logits_RxTxV = np.asarray(apply(variables, rows["x"], **documents))
    # Untrained weights are rarely right, so every third target becomes their prediction.
    best_RxT = logits_RxTxV.argmax(-1)
    y_RxT = np.where(np.arange(best_RxT.size).reshape(best_RxT.shape) % 3, rows["y"], best_RxT).astype(np.int32)
    is_correct_RxT = (best_RxT == y_RxT) & rows["padding_mask"]
    targets = jax.device_put(y_RxT.reshape(batch["y"].shape), batch["y"].sharding)
    validation = job.builtin_evaluators.validation
    state = validation.make_val_state(job.weights(job.state), 0)
    _, count, meta = validation.compiled(state, {**batch, "y": targets})
    assert float(meta["sums"]["accuracy"]) == is_correct_RxT.sum() > count / 4
    assert count == rows["padding_mask"].sum()
    # A train step computes none of it.
    assert "accuracy" not in str(job.compiled.executable.out_info)


# Batches of validation.

SIZES: dict[str, dict[str, Any]] = {
    "smaller": {"global_batch_examples": 8},
    "larger, and no divisor of the examples": {"global_batch_examples": 24},
    "micro-batches": {"micro_batch_examples": 1},
    "both": {"global_batch_examples": 32, "micro_batch_examples": 2},
    "all at once": {"global_batch_examples": 48},
}


def evaluate_initial_weights(directory: Path, **changes: Any) -> tuple[dict[str, Any], Any]:
    """Return the metrics of untrained weights on 40 examples, and the shape of their batches."""
    eval_changes = {f"config.eval.{key}": value for key, value in changes.pop("eval", {}).items()}
    options = {"config.train.global_batch_examples": 40, "config.eval.batches": 1, "config.eval.bits_per_byte": True}
    job = start(make_gpt(directory, PlainBigram, **options, **eval_changes, **changes))
    validation = job.builtin_evaluators.validation
    metrics = validation.evaluate(job.weights(job.state), 0, job.attempt.hosts)
    assert metrics is not None
    return metrics, validation._sets[0].batch(0)["x"].shape


@pytest.mark.soak
def test_validation_metrics_do_not_depend_on_the_batch_size(tmp_path: Path) -> None:
    expected, shape = evaluate_initial_weights(tmp_path / "usual")
    assert shape[0] * shape[1] == 40
    assert expected["val/bits_per_byte"] == pytest.approx(expected["val/loss"] / np.log(2), rel=1e-6)
    for number, (name, sizes) in enumerate(SIZES.items()):
        found, shape = evaluate_initial_weights(tmp_path / str(number), eval=sizes)
        assert found == pytest.approx(expected, rel=1e-6), name
        assert shape[0] * shape[1] == sizes.get("global_batch_examples", 40), name


BAD_SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "no number": ({"global_batch_examples": "all"}, r"config\.eval\.global_batch_examples: .*got 'all'"),
    "zero": ({"global_batch_examples": 0}, r"config\.eval\.global_batch_examples: .*0"),
    "auto": ({"micro_batch_examples": "auto"}, r"config\.eval\.micro_batch_examples: .*auto"),
    "not over the devices": ({"global_batch_examples": 20}, r"config\.eval: global_batch_examples=20 .*use 16 or 24"),
    "no divisor": ({"micro_batch_examples": 4}, r"config\.eval: micro_batch_examples=4 does not divide the 5"),
    "of a task": (
        {"multiple_choice": [{"name": "a", "path": "a.jsonl", "micro_batch_examples": -1}]},
        r"config\.eval\.multiple_choice\.0\.micro_batch_examples: .*-1",
    ),
}


@pytest.mark.parametrize(("sizes", "line"), BAD_SIZES.values(), ids=BAD_SIZES)
def test_bad_sizes_of_a_validation_batch_are_one_line(tmp_path: Path, sizes: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidError, match=line) as caught:
        evaluate_initial_weights(tmp_path / "run", eval=sizes)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run" / "events.jsonl").exists()


def test_a_job_with_batches_of_its_own_refuses_a_validation_batch_size(tmp_path: Path) -> None:
    class OwnBatches(PlainBigram):
        def batch(self, slice: str = "train", step: int | None = None) -> Any:
            return super().batch(slice, step)

    with pytest.raises(InvalidError, match=r"config\.eval\.global_batch_examples: batch\(\) of the job"):
        make_gpt(tmp_path / "run", OwnBatches, **{"config.eval.global_batch_examples": 8})()
