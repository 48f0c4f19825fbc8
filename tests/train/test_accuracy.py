"""Token accuracy of validation: the share of targets that are the most probable next token, from its forward pass."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from experiments.model.decoder import PretrainDecoder
from runner import BaseTrainer
from tests.support.attempt import start
from tests.support.bigram import BigramModel
from tests.support.tiny_jobs import make_gpt


class PlainBigram(BaseTrainer):
    """A trainer with the `forward` of `BaseTrainer`."""

    Config = PretrainGPT.Config

    def model(self) -> BigramModel:
        return BigramModel(self.vocabulary_size)


DECODER = {"config.model": {"layers": 2, "heads": 4, "width": 32, "mlp_width": 64}}
EXPERTS = {
    "config.model": {**DECODER["config.model"], "moe": {"experts": 4, "experts_per_token": 2, "expert_width": 16}}
}
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
DAILY = {"the base class", "GPT", "decoder in chunks"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.soak] * (name not in DAILY)) for name in JOBS])
def test_the_accuracy_is_that_of_the_most_probable_tokens(tmp_path: Path, name: str) -> None:
    job_class, changes = JOBS[name]
    job = start(make_gpt(tmp_path / "run", job_class, **changes))
    batch = job.batch("validation", 0)
    rows = {field: np.asarray(values).reshape(-1, values.shape[-1]) for field, values in batch.items()}
    documents = {f"{key}s": rows[key] for key in ("segment", "position") if key in rows}
    variables = {"params": job.state.params, **job.state.variables}
    logits_RxTxV = np.asarray(job.model().apply(variables, rows["x"], **documents, deterministic=True))
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
