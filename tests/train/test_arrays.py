"""Training on data sets of arrays: the weights depend neither on the split of the batch nor on padding."""

import math
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from runner import BaseTrainer
from runner.errors import InvalidError, SpecError
from runner.storage import read_json
from tests.support.arrays import CHANGES, Bright, CountBright
from tests.support.tiny_jobs import make_gpt, read_rows, stop_after


def run(directory: Path, job_class: type[BaseTrainer] = CountBright, **changes: Any) -> BaseTrainer:
    job = make_gpt(directory, job_class, **CHANGES | changes)
    job()
    return job


def test_rows_and_result_count_examples(tmp_path: Path) -> None:
    job = run(tmp_path / "run")
    rows = read_rows(tmp_path / "run")
    assert [row["train/examples"] for row in rows] == [16 * step for step in range(1, 7)]
    assert all(row["perf/examples_per_second"] > 0 for row in rows)
    assert rows[-1]["perf/eval_examples_per_second"] > 0
    assert not any("token" in key for row in rows for key in row)
    result = read_json(job.store, "result.json")
    assert set(result) == {"step", "examples", "train_loss", "val_loss", "fingerprint"}
    assert result["examples"] == 96
    # 205 examples, of which 21 are set aside and 32 would be evaluated: the rest of the second batch is padding.
    right = rows[-1]["val/accuracy"] * 21
    assert right == pytest.approx(round(right), abs=1e-4)


# Meshes and micro-batches of each device.
SPLITS = [
    ({"data": 8}, 1),
    ({"data": 8}, 2),
    ({"data": 2, "fsdp": 4}, 2),
    ({"data": 1, "tensor": 4, "expert": 2}, 1),
]


@pytest.mark.soak
def test_the_split_of_the_batch_changes_the_weights_by_rounding_alone(tmp_path: Path) -> None:
    states, losses = [], []
    for number, (mesh, micro_batch) in enumerate(SPLITS):
        job = run(tmp_path / str(number), **{"topology.mesh": mesh, "config.train.micro_batch_examples": micro_batch})
        states.append(jax.device_get(job.state.params))
        losses.append([row["val/loss"] for row in read_rows(job.store.root) if "val/loss" in row])
    for state, loss in zip(states[1:], losses[1:], strict=True):
        jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-6), state, states[0])
        np.testing.assert_allclose(loss, losses[0], rtol=1e-5)


@pytest.mark.soak
def test_a_fixed_order_of_sums_gives_the_same_bits_on_any_mesh(tmp_path: Path) -> None:
    fixed = {"config.train.micro_batch_examples": 2, "config.train.same_bits_devices": 8}
    meshes = [{"data": 8}, {"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 8}]
    runs = [run(tmp_path / str(mesh), **fixed, **{"topology.mesh": mesh}) for mesh in meshes]
    assert len({read_json(job.store, "result.json")["fingerprint"] for job in runs}) == 1


@pytest.mark.soak
def test_the_size_of_a_validation_batch_changes_no_metric(tmp_path: Path) -> None:
    sizes = (None, 8, 24, 64)
    rows = [
        read_rows(run(tmp_path / str(size), **{"config.eval.global_batch_examples": size}).store.root) for size in sizes
    ]
    for other in rows[1:]:
        assert other[-1]["val/loss"] == pytest.approx(rows[0][-1]["val/loss"], rel=1e-6)
        assert other[-1]["val/accuracy"] == rows[0][-1]["val/accuracy"]


FEATURES: dict[str, dict[str, Any]] = {
    "epochs": {"config.train.total_steps": None, "config.train.total_epochs": 0.5},
    "averages": {"config.ema": {"decays": [0.5], "evaluate": True}},
    "noise": {"config.noise_scale": {"decay": 0.5}, "config.train.micro_batch_examples": 1},
    "replay": {"config.train.replay_every_steps": 2},
    "skips": {"config.train.skip_steps": [[1, 3]]},
    "spikes": {"config.stability": {"skip_update": {"loss_above": {"over_steps": 2}}}},
    "stages": {
        "config.stages": [
            {"from_step": 2, "set": {"train.global_batch_examples": 32, "optimizer.b1": 0.5}},
            {"from_step": 3, "set": {"data.options": {"seed": 1}}},
        ]
    },
    "ramp": {"config.train.batch_ramp": {"from_examples": 8, "over_steps": 2, "increments": 1}},
    "bfloat16": {"config.precision": {"params": "bfloat16", "rounding": "stochastic"}},
}


DAILY = ("replay",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DAILY else pytest.mark.soak) for name in FEATURES]
)
def test_a_resumed_run_has_the_bits_of_a_whole_one(tmp_path: Path, name: str) -> None:
    whole = run(tmp_path / "whole", **FEATURES[name])
    stop_after(make_gpt(tmp_path / "parts", CountBright, **CHANGES | FEATURES[name]), 3)
    parts = run(tmp_path / "parts", **FEATURES[name])
    assert read_json(parts.store, "result.json") == read_json(whole.store, "result.json")


def test_the_flops_are_those_of_an_example(tmp_path: Path) -> None:
    job = run(tmp_path / "run")
    assert job.flops_per_token(job.train_setup).per_token == 3 * 2 * math.prod((4, 4, 1, 2))


class Counting(CountBright):
    """Trainer whose targets are the bright images alone."""

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        logits_BxK = apply_fn({"params": params}, batch["image"], deterministic=key is None)
        is_bright_B = batch["padding_mask"] & (batch["label"] == 1)
        loss_B = -jax.nn.log_softmax(logits_BxK)[:, 1] + 0.0 * batch["index"].sum(axis=1)
        count = jnp.sum(is_bright_B, dtype=jnp.float32)
        return jnp.sum(jnp.where(is_bright_B, loss_B, 0)), {cls.count_name: count}

    count_name = "target_count"


class CountingTokens(Counting):
    count_name = "token_count"


def test_a_forward_may_count_targets_itself(tmp_path: Path) -> None:
    jobs = [run(tmp_path / job_class.__name__, job_class) for job_class in (Counting, CountingTokens)]
    rows = [[row["train/loss"] for row in read_rows(job.store.root)] for job in jobs]
    assert rows[0] == rows[1]
    plain = run(tmp_path / "plain")
    assert rows[0] != [row["train/loss"] for row in read_rows(plain.store.root)]


class Classifier(BaseTrainer):
    def model(self) -> nn.Module:
        return Bright()


def test_a_classifier_of_x_and_y_overrides_nothing(tmp_path: Path) -> None:
    job = run(tmp_path / "run", Classifier, **{"config.data.source": "tests.support.arrays:Named"})
    rows, own = read_rows(job.store.root), run(tmp_path / "own")
    for row, other in zip(rows, read_rows(own.store.root), strict=True):
        assert row["train/loss"] == pytest.approx(other["train/loss"], rel=1e-6)
        assert row.get("val/accuracy", 0.0) == pytest.approx(other.get("val/accuracy", 0.0), rel=1e-6)


class NoInputs(BaseTrainer):
    def model(self) -> nn.Module:
        return Bright()


class NoForward(NoInputs):
    @classmethod
    def model_inputs(cls, batch: Any) -> tuple[jax.Array, ...]:
        return (batch["image"],)


class Unread(CountBright):
    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        return super().forward(apply_fn, params, {**batch, "index": jnp.zeros((1, 2))}, key)


class Reserved(CountBright):
    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> tuple[jax.Array, dict[str, Any]]:
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum, meta | {"examples": 1.0}


@pytest.mark.parametrize(
    ("job_class", "changes", "message"),
    [
        (NoInputs, {}, "hold image, index, label, padding_mask and no x; override model_inputs"),
        (NoForward, {}, "hold image, index, label, padding_mask and no x; override forward of NoForward"),
        (Unread, {}, "hold index, which forward never reads"),
        (Reserved, {}, "'examples' as meta, which is a reserved name"),
        (CountBright, {"topology.mesh": {"sequence": 2, "data": 4}}, r"topology\.mesh\.sequence=2 shards sequences"),
        (CountBright, {"config.data.sequence_length": 9}, "not a subclass of Source.*leave data.sequence_length out"),
        (
            CountBright,
            {"config.data.source": "tests.support.arrays:Bad", "config.data.options": {"kind": "x"}},
            "Bad: e",
        ),
    ],
)
def test_a_job_that_does_not_fit_its_arrays_is_refused_at_the_start(
    tmp_path: Path, job_class: type[BaseTrainer], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((InvalidError, SpecError), match=message):
        run(tmp_path / "run", job_class, **changes)
    assert not (tmp_path / "run").exists()


def test_targets_of_another_shape_than_the_logits_are_refused(tmp_path: Path) -> None:
    """They would be broadcast, and every label compared with every image."""
    message = r"logits of shape \(\d+, 2\) do not fit targets y of shape \(\d+, 1\) with weights of shape \(\d+,\)"
    with pytest.raises(InvalidError, match=message):
        run(tmp_path / "run", Classifier, **{"config.data.source": "tests.support.arrays:NamedColumn"})


# Data of a stage, and how it is refused before the first step.
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data.options": {"size": 5}}, r"changes the shape of the state.* float32\[16,2\] would become .*\[25,2\]"),
        ({"data.source": "tests.support.arrays:Named"}, r"its step cannot be traced with its data: KeyError: 'image'"),
        ({"data.sequence_length": 16}, r"data.sequence_length: the data are arrays"),
    ],
)
def test_a_stage_with_data_that_do_not_fit_is_refused_at_the_start(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidError, match=message):
        run(tmp_path / "run", **{"config.stages": [{"from_step": 3, "set": values}]})
    assert not (tmp_path / "run" / "attempts").exists()
