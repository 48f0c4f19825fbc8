"""Steps and validation sets without targets: their mean losses are null, and such a step updates no parameters."""

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments.gpt import PretrainGPT
from runner.cli.app import run_command
from runner.metrics.writers import _encode_value, _format_row
from runner.optim.config import OPTIMIZERS
from runner.storage import LocalStore, read_json, read_log
from runner.train.loss import target_weights
from runner.train.step import skip_step
from tests.data.buckets import write_corpus
from tests.support.attempt import start
from tests.support.tiny_jobs import (
    are_leaves_equal,
    make_gpt,
    make_mesh_options,
    read_rows,
    read_trajectory,
    stop_after,
)
from tests.test_values import TrainLookup

T, BATCH = 8, 8
EMPTY = [2, 4, 6, 8, 10, 12, 14, 16]  # even ids are the prompt, odd ids the completion
FULL = [2, 4, 6, 1, 3, 5, 7, 9]


def write_marked_corpus(directory: Path, documents: Any) -> Path:
    return write_corpus(directory, [documents], vocabulary_size=32, marks_of=lambda ids: ids % 2)


def make_config(source: Path, **changes: Any) -> dict[str, Any]:
    data = {"source": str(source), "train_on": "answers", "packing": "pad", "sequence_length": T}
    config = {
        "config.data": data | {"validation_fraction": 0.25},
        "config.model": {"layers": 1, "heads": 1, "width": 8},
    }
    train = {"total_steps": 8, "global_batch_examples": BATCH}
    return config | {"config.train": train, "config.optimizer.weight_decay": 0.5, **changes}


HOOKS = [{"hook": "runner.hook:StopAtLoss", "config": {"value": 1.0}}, "runner.hook:BestAtEnd"]
HOOKS += [{"hook": "runner.hook:EarlyStopping", "config": {"patience": 1}}]


@pytest.mark.soak
def test_a_run_without_targets_has_null_losses_and_updates_nothing(tmp_path: Path, capsys: Any) -> None:
    changes = make_config(write_marked_corpus(tmp_path / "corpus", [EMPTY] * 80), hooks=HOOKS)
    changes |= {"checkpoint.keep_best": {"metric": "val/loss"}, "logging.tensorboard": True, "config.ema.decays": [0.9]}
    changes |= {"config.eval": {"every_steps": 2, "batches": 1}, "config.metrics.norms": "groups"}
    changes["job"] = "tests.test_values:TrainLookup"
    job = make_gpt(tmp_path / "run", TrainLookup, **changes)
    first = start(make_gpt(tmp_path / "first", TrainLookup, **changes)).state
    job()
    assert are_leaves_equal(first.params, job.state.params)
    assert are_leaves_equal(first.riders["ema"], job.state.riders["ema"])
    assert int(job.state.step) == 8
    found = read_rows(tmp_path / "run")
    assert [row["step"] for row in found] == [*range(1, 9)]
    nulls = {"train/loss", "train/loss_mean", "train/grad_norm", "val/loss", "val/accuracy"}
    assert {key for row in found for key in row if row[key] is None} == nulls
    result = read_json(LocalStore(tmp_path / "run"), "result.json")
    assert (result["train_loss"], result["val_loss"], result["best_step"]) == (None, None, None)
    assert "stopped_by" not in result
    told = capsys.readouterr()
    assert "step 2/8  loss -  val -" in told.out
    lines = {line for line in told.err.splitlines() if "no target" in line}
    assert ["100% of" in line for line in lines] == [True, True]
    assert not [each for each in read_log(job.store, "events") if each["event"] == "evaluation_problem"]
    # Read-only commands.
    for arguments in (["metrics", str(tmp_path / "run"), "--csv"], ["status", str(tmp_path / "run")]):
        assert run_command(arguments) == 0
    assert run_command(["evaluate", str(tmp_path / "run"), "--trust", "tests"]) == 0
    assert "no loss, because there is no target" in capsys.readouterr().out


def test_writers_omit_null_values() -> None:
    assert _encode_value(None) == b""
    assert _format_row({"step": 1, "train/loss": None, "val/loss": None}) == "loss -  val -"
    assert _format_row({"step": 1, "val/loss": 2.0, "val/accuracy": 0.25}) == "val 2.0000  val accuracy 0.25"


def test_plan_warns_of_sequences_without_targets(tmp_path: Path, capsys: Any) -> None:
    dialogues = [EMPTY, FULL, FULL] * 40
    job = make_gpt(tmp_path / "run", TrainLookup, **make_config(write_marked_corpus(tmp_path / "corpus", dialogues)))
    lines = job.dataset.find_missing_targets()
    assert ["33%" in line or "34%" in line for line in lines] == [True, True]
    few = make_gpt(
        tmp_path / "few",
        TrainLookup,
        **make_config(write_marked_corpus(tmp_path / "other", [EMPTY, *[FULL] * 15] * 10)),
    )
    assert few.dataset.find_missing_targets() == []


def make_batch(weights_BxT: Any, splits: int = 2) -> Any:
    generator = np.random.default_rng(0)
    shape = (splits, BATCH // splits, T)
    x, y = generator.integers(0, 32, (2, *shape)).astype(np.int32)
    segment = np.ones(shape, np.int32)
    position = np.broadcast_to(np.arange(T, dtype=np.int32), shape)
    mask = np.ones(shape, np.bool_)
    weights = np.asarray(weights_BxT, np.float32).reshape(shape)
    return {"x": x, "y": y, "padding_mask": mask, "segment": segment, "position": position, "loss_weight": weights}


CASES = [{"config.optimizer.name": name} for name in OPTIMIZERS]
CASES += [{"config.precision": {"params": "bfloat16", "rounding": "stochastic"}}]
CASES += [{"config.train.same_bits_devices": 2, "config.train.micro_batch_examples": 1}]
CASES += [{"config.ema.decays": [0.5], "config.noise_scale": {}}]


class TokenCountGPT(PretrainGPT):
    """A job that returns its own token count."""

    @classmethod
    def forward(cls, apply_fn, params, batch, key):
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        return loss_sum, meta | {"token_count": target_weights(batch).sum(), "sums": {"own": loss_sum}}


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("changes", "job_class"),
    [
        pytest.param(case, each, id="-".join([*map(str, case.values()), each.__name__]))
        for case in CASES
        for each in (TrainLookup, PretrainGPT, TokenCountGPT)
        # A lookup table has no matrix for these.
        if each is not TrainLookup or case.get("config.optimizer.name") not in ("muon", "normuon", "muonh", "galore")
    ],
)
def test_a_step_without_targets_updates_only_counters(job_class: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    name = changes.get("config.optimizer.name", "adamw")
    base = make_config(
        write_marked_corpus(tmp_path / "corpus", [FULL] * 80),
        **{"config.optimizer.name": name, **make_mesh_options(1, 1, 1)},
    )
    base |= {"config.model": {"layers": 1, "heads": 1, "width": 8}, "config.schedule": {"warmup_steps": 0}}
    base |= {"config.schedule": {"name": "constant"}} if name == "schedule_free_adamw" else {}
    base |= {"config.optimizer.rank": 2} if name == "galore" else {}
    job = make_gpt(tmp_path / "run", job_class, **base | changes)
    setup = job.setup_builder.build(jax.devices()[:1], lambda: None)
    layout = job.setup_builder.list_layouts(setup)[0]
    executable = setup.compile_train(job.train_step, layout).executable

    def run(*weights: float, skips: bool = job_class is not TokenCountGPT) -> tuple[Any, list[Any]]:
        state, metas = setup.init_state(), []
        for weight in weights:
            batch = make_batch(np.full((BATCH, T), weight), layout.accumulate_steps)
            arrays = {key: jax.device_put(batch[key], layout.sharding) for key in layout.fields}
            if weight or not skips:
                state, _, meta = executable(state, arrays, setup.key)
            else:
                state, _, meta = jax.jit(functools.partial(skip_step, schedule=setup.schedule))(state)
            metas.append(jax.device_get(meta))
        return state, metas

    moved, _ = run(1)
    held, metas = run(1, 0)
    assert [float(meta["token_count"]) for meta in metas] == [BATCH * T, 0]
    assert ("own" in metas[1]) == (job_class is TokenCountGPT)
    assert np.isnan(metas[1].get("own", np.nan))
    for field in ("params", "riders", "variables"):
        assert are_leaves_equal(getattr(moved, field), getattr(held, field))
    assert int(held.step) == 2
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(state.opt_state) for state in (moved, held)), strict=True)
    changed = [jax.tree_util.keystr(path) for (path, a), (_, b) in pairs if not are_leaves_equal(a, b)]
    assert changed
    assert all(path.endswith(".count") for path in changed)
    # The schedule advances: after an initial step without targets, the next step has the second learning rate.
    after, metas = run(0, 1)
    assert metas[1]["learning_rate"] == np.float32(setup.schedule(1))
    assert not are_leaves_equal(after.params, setup.init_state().params)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(after.params))


@pytest.mark.soak
def test_steps_without_targets_are_skipped_wherever_a_run_is_resumed(tmp_path: Path) -> None:
    """Half of the sequences have no target, and a batch is one sequence."""
    changes = make_config(write_marked_corpus(tmp_path / "corpus", [EMPTY, FULL] * 40), **{"logging.every_steps": 3})
    changes |= {"config.train": {"total_steps": 12, "global_batch_examples": 1}, **make_mesh_options(1, 1, 8)}
    whole = make_gpt(tmp_path / "whole", TrainLookup, **changes)
    whole()
    found = read_trajectory(tmp_path / "whole")
    assert {row["train/loss"] is None for row in found} == {True, False}
    assert all(row["train/loss_mean"] is None or row["train/loss_mean"] > 1 for row in found)
    for step in (1, 5, 8):
        stop_after(make_gpt(tmp_path / "cut", TrainLookup, **changes), step)
    again = make_gpt(tmp_path / "cut", TrainLookup, **changes)
    again()
    assert read_trajectory(tmp_path / "cut") == found
    assert are_leaves_equal(again.state, whole.state)
