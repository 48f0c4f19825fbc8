"""Stability policy: which updates are skipped, what a skipped update leaves as it was, and runs that pass bad data."""

import functools
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

from experiments.gpt import PretrainGPT
from runner import BaseTrainer, ExecutionSpec
from runner.errors import DivergedError, InvalidError
from runner.optim.config import OPTIMIZERS
from runner.train.features.stability import STABILITY, is_spike
from runner.train.step import skip_step
from tests.support import same_bits
from tests.support.job_process import run_runner
from tests.support.tiny_jobs import (
    are_leaves_equal,
    environment,
    get_job_name,
    make_gpt_document,
    read_outcome,
    read_rows,
    read_trajectory,
    stop_after,
)
from tests.test_values import TrainLookup

MARK = 0xC3  # first byte of the only character that is not ASCII
KILL_AT = "TEST_STABILITY_KILL_AT"  # step after which the process kills itself, in the tests with real processes
STEPS = 24


class PoisonedLookup(TrainLookup):
    """Lookup-table job whose loss is multiplied by `factor` in sequences with the marked byte."""

    factor = float("nan")

    @classmethod
    def forward(cls, apply_fn: Any, params: Any, batch: Any, key: Any) -> Any:
        loss_sum, meta = super().forward(apply_fn, params, batch, key)
        is_poisoned = jnp.any((batch["x"] == MARK) | (batch["y"] == MARK))
        # Multiplied, so that the gradient is poisoned too.
        return loss_sum * jnp.where(is_poisoned, cls.factor, 1.0), meta

    def save_or_stop(self) -> None:
        super().save_or_stop()
        if os.environ.get(KILL_AT) == str(self.step):
            os.kill(os.getpid(), signal.SIGKILL)


class SpikedLookup(PoisonedLookup):
    """The same, with a finite spike of the loss."""

    factor = 1e4


class CleanLookup(PoisonedLookup):
    """The same job with nothing poisoned."""

    factor = 1.0


def make_poisoned_document(directory: Path, **changes: Any) -> Any:
    """Return the spec of a job with one poisoned character, in one or two sequences of an epoch of 12 steps."""
    source = directory.parent / "poisoned.txt"
    lines = [f"{number} squared is {number * number}.\n" for number in range(140)]
    if not source.exists():
        source.write_text("".join([*lines[:17], "ÿ\n", *lines[17:]]))
    base = {
        "config.data": {"source": str(source), "sequence_length": 16, "validation_fraction": 0.05},
        "config.train": {"total_steps": STEPS, "global_batch_examples": 16, "micro_batch_examples": 1},
        "config.eval.every_steps": 12,
    }
    return make_gpt_document(directory, **base | changes)


def make_poisoned(directory: Path, job_class: type[BaseTrainer] = PoisonedLookup, **changes: Any) -> BaseTrainer:

    return job_class(ExecutionSpec.model_validate(make_poisoned_document(directory, **changes)))


PROCESS = {"job": get_job_name(PoisonedLookup)}
SKIP: dict[str, Any] = {"config.stability": {"non_finite": "skip"}}


def list_skipped(directory: Path) -> list[int]:
    """Return the steps whose update was skipped, of a run with a row for each step."""
    counts = [0, *(row["train/skipped_updates"] for row in read_rows(directory))]
    return [step for step, (before, after) in enumerate(itertools.pairwise(counts), 1) if after > before]


# The decision.


@pytest.mark.parametrize("size", [3, 13, *(pytest.param(size, marks=pytest.mark.soak) for size in (2, 8, 128))])
def test_a_spike_is_sigmas_deviations_above_the_mean_of_a_full_window(size: int) -> None:
    window = np.random.default_rng(size).normal(3, 0.5, size).astype(np.float32)
    mean, deviation = np.mean(window, dtype=np.float64), np.std(window, ddof=1, dtype=np.float64)

    def judge(sigmas: float, count: int = size, values: Any = window) -> bool:
        value = jnp.float32(mean + 4 * deviation)
        return bool(jax.jit(is_spike, static_argnums=3)(jnp.asarray(values), jnp.int32(count), value, sigmas))

    assert (judge(3.999), judge(4.001)) == (True, False)
    assert not judge(1, count=size - 1)
    assert judge(1, count=size + 1)
    assert not judge(1, values=np.full(size, 1, np.float32))


# What a skipped update leaves as it was.

CASES: dict[str, dict[str, Any]] = {name: {"config.optimizer.name": name} for name in OPTIMIZERS}
CASES["schedule_free_adamw"] |= {"config.schedule": {"name": "constant"}}
for each in ("muon", "normuon", "muonh"):
    CASES[each] |= {"config.optimizer.matrices": ["*embedding"]}
CASES["galore"] |= {"config.optimizer.matrices": ["*embedding"], "config.optimizer.rank": 2}
CASES |= {
    "rounding": {"config.precision": {"params": "bfloat16", "rounding": "stochastic"}},
    "same_bits": {"config.train.same_bits_devices": 8},
    "averages": {"config.ema.decays": [0.5], "config.noise_scale": {}},
    "groups": {"config.optimizer.groups": [{"pattern": "*embedding", "frozen": True}, {"pattern": "*bias", "rate": 2}]},
    "offload": {"config.memory.offload_optimizer": True},
    "fsdp": {"topology.mesh": {"data": 2, "fsdp": 4}, "config.train.micro_batch_examples": 1},
}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("watched", "name"),
    [
        *(("non_finite", name) for name in CASES),
        # The reason for a skip does not matter to the others.
        *itertools.product(["grad_norm_above", "loss_above"], ["averages", "same_bits"]),
    ],
)
def test_a_skipped_update_changes_only_counters(watched: str, name: str, tmp_path: Path) -> None:
    policy = {"non_finite": "skip"} if watched == "non_finite" else {"skip_update": {watched: {"over_steps": 3}}}
    changes = {"config.schedule": {"warmup_steps": 0}, "config.stability": policy} | CASES[name]
    job = make_poisoned(tmp_path / "run", **changes)
    type(job).factor = float("nan") if watched == "non_finite" else 1e9
    num_devices = 8 if name == "fsdp" else 1
    setup = job.setup_builder.build(jax.devices()[:num_devices], lambda: None)
    layout = job.setup_builder.list_layouts(setup)[0]
    executable = setup.compile_train(job.train_step, layout).executable
    clean = [layout.batch(job.dataset, "train", step) for step in range(3)]
    clean = [batch | {key: jnp.where(batch[key] == MARK, 1, batch[key]) for key in ("x", "y")} for batch in clean]
    poisoned = clean[0] | {"y": jnp.where(clean[0]["y"] == ord(" "), MARK, clean[0]["y"])}

    def run(batches: list[Any]) -> tuple[Any, list[Any]]:
        state, metas = setup.init_state(), []
        for batch in batches:
            arrays = {key: jax.device_put(batch[key], layout.sharding) for key in layout.fields}
            state, _, meta = executable(state, arrays, setup.key)
            metas.append(jax.device_get(meta))
        return state, metas

    moved, _ = run(clean)
    held, metas = run([*clean, poisoned])
    assert [int(meta["skipped_updates"]) for meta in metas] == [0, 0, 0, 1]
    assert (int(moved.step), int(held.step)) == (3, 4)
    assert np.isnan(metas[3].get("noise_scale", np.nan))
    policies = [state.riders.pop(STABILITY) for state in (moved, held)]
    assert [int(each["consecutive"]) for each in policies] == [0, 1]
    assert watched == "non_finite" or are_leaves_equal(policies[0]["window"], policies[1]["window"])
    for field in ("params", "riders", "variables"):
        assert are_leaves_equal(getattr(moved, field), getattr(held, field))
    pairs = zip(*(jax.tree_util.tree_leaves_with_path(state.opt_state) for state in (moved, held)), strict=True)
    changed = [jax.tree_util.keystr(path) for (path, a), (_, b) in pairs if not are_leaves_equal(a, b)]
    assert changed
    assert all(path.endswith(".count") for path in changed)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "parts"),
    [
        *((name, ("skip", "back")) for name in CASES),
        ("averages", ("back",)),
        ("same_bits", ("back",)),
        ("gpt", ("skip", "back")),
    ],
)
def test_a_policy_that_never_triggers_changes_no_bit(
    name: str, parts: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without its optimiser XLA computes the scalars of some updates, such as the learning rate, in another way.
    same_bits.use_user_compiler_options(monkeypatch)
    skip = {"skip_update": {"grad_norm_above": {"sigmas": 1e9, "over_steps": 2}}, "non_finite": "skip"}
    back = {"roll_back": {"loss_above_sigmas": 1e9, "over_steps": 2, "skip_examples": 16}}
    policy = (skip if "skip" in parts else {}) | (back if "back" in parts else {})
    changes = {"config.train.total_steps": 6} | CASES.get(name, {})
    jobs = [
        make_poisoned(tmp_path / name, PretrainGPT if name == "gpt" else CleanLookup, **changes | policies)
        for name, policies in (("without", {}), ("with", {"config.stability": policy}))
    ]
    for job in jobs:
        job()
    own = jobs[1].state.riders.pop(STABILITY)
    assert {int(own[key]) for key in ("accepted", "low") if key in own} == {6}
    assert not any(int(own[key]) for key in ("skipped", "high") if key in own)
    for field in ("params", "opt_state", "riders", "variables"):
        assert are_leaves_equal(*(getattr(job.state, field) for job in jobs))


@pytest.mark.soak
def test_a_step_without_targets_is_no_skip(tmp_path: Path) -> None:
    job = make_poisoned(tmp_path / "run", **SKIP)
    setup = job.setup_builder.build(jax.devices()[:1], lambda: None)
    skip = functools.partial(skip_step, schedule=setup.schedule, auxiliary_states=setup.auxiliary_states)
    state, _, meta = jax.jit(skip)(setup.init_state())
    assert (int(state.step), int(meta["skipped_updates"]), int(meta["consecutive_skips"])) == (1, 0, 0)


@pytest.mark.soak
def test_skips_are_bit_identical_on_one_two_and_eight_devices(tmp_path: Path) -> None:
    policy = {"skip_update": {"grad_norm_above": {"sigmas": 0.1, "over_steps": 2}}, "non_finite": "skip"}
    options = same_bits.SAME_BITS_OPTIONS | {"config.stability": policy, "config.schedule": {}}
    job = make_poisoned(tmp_path / "run", CleanLookup, **options)
    on_one, *others = (same_bits.compute_bits(job, number) for number in same_bits.DEVICE_COUNTS)
    assert any("window" in name for name in on_one)
    assert all(other == on_one for other in others)


# Runs.


@pytest.mark.soak
def test_a_poisoned_example_is_passed_with_skip(tmp_path: Path) -> None:
    make_poisoned(tmp_path / "run", **SKIP)()
    skipped = list_skipped(tmp_path / "run")
    assert len(skipped) in (2, 4)
    rows = {row["step"]: row for row in read_rows(tmp_path / "run")}
    for step, row in rows.items():
        for key in ("train/loss", "train/loss_mean", "train/grad_norm"):
            assert (row[key] is None) == (step in skipped)
    # Resumed inside of a series of skips, the run ends in the same bits and rows.
    stop_after(make_poisoned(tmp_path / "stopped", **SKIP), skipped[0])
    make_poisoned(tmp_path / "stopped", **SKIP)()
    assert read_outcome(tmp_path / "stopped") == read_outcome(tmp_path / "run")


@pytest.mark.soak
def test_a_poisoned_example_ends_a_run_without_skip(tmp_path: Path) -> None:
    with pytest.raises(DivergedError, match="training diverged: loss nan"):
        make_poisoned(tmp_path / "run")()


@pytest.mark.soak
def test_a_run_ends_after_too_many_successive_skips(tmp_path: Path) -> None:
    policy = {"config.stability": {"non_finite": "skip", "max_consecutive_skips": 3}, "checkpoint.every_steps": 2}
    job = make_poisoned(tmp_path / "run", **policy)
    type(job).forward = classmethod(lambda cls, *args: (TrainLookup.forward(*args)[0] * jnp.nan, {}))
    for _ in range(2):  # and again after a restart
        with pytest.raises(DivergedError, match="3 successive updates were skipped"):
            job()
        assert [row["train/skipped_updates"] for row in read_rows(tmp_path / "run")] == [1, 2]
        again = make_poisoned(tmp_path / "run", **policy)
        type(again).forward = type(job).forward
        job = again


@pytest.mark.soak
@pytest.mark.parametrize("key", ["loss_above", "grad_norm_above"])
def test_a_spike_that_ruins_a_run_is_passed_with_the_policy(key: str, tmp_path: Path) -> None:
    # The first poisoned step with this seed is the tenth, so that the window is full before it.
    spread = {
        "seed": 5,
        "config.optimizer": {"name": "sgd", "learning_rate": 3.0, "clip_norm": None},
        "config.schedule": {"name": "constant", "warmup_steps": 0},
        "config.train.total_steps": 96,
        "config.eval.every_steps": 96,
    }
    policy = {"config.stability": {"skip_update": {key: {"sigmas": 6, "over_steps": 8}}}}
    make_poisoned(tmp_path / "clean", CleanLookup, **spread)()
    make_poisoned(tmp_path / "policy", SpikedLookup, **spread | policy)()
    clean, policed = (read_trajectory(tmp_path / name)[-1]["val/loss"] for name in ("clean", "policy"))
    assert list_skipped(tmp_path / "policy")[0] == 10
    assert policed == pytest.approx(clean, rel=0.01)
    try:
        make_poisoned(tmp_path / "without", SpikedLookup, **spread)()
    except DivergedError:
        return
    assert read_trajectory(tmp_path / "without")[-1]["val/loss"] > 2 * clean


# Refusals.


@pytest.mark.soak
def test_a_policy_added_to_a_run_is_refused(tmp_path: Path) -> None:
    stop_after(make_poisoned(tmp_path / "run", CleanLookup), 1)
    with pytest.raises(InvalidError, match="stability") as error:
        make_poisoned(tmp_path / "run", CleanLookup, **SKIP)()
    assert "another trajectory" in str(error.value)


@pytest.mark.soak
def test_the_limit_of_successive_skips_may_change(tmp_path: Path) -> None:
    stop_after(make_poisoned(tmp_path / "run", CleanLookup, **SKIP), 1)
    policy = {"config.stability": {"non_finite": "skip", "max_consecutive_skips": 7}}
    stop_after(make_poisoned(tmp_path / "run", CleanLookup, **policy), 2)


def test_a_step_that_ignores_the_policy_is_refused(tmp_path: Path) -> None:
    class OwnStep(CleanLookup):
        @classmethod
        def train_step(cls, state, batch, key, accumulate_steps):
            return state.replace(step=state.step + 1), jnp.float32(1), {}

    with pytest.raises(InvalidError, match=r"riders\.stability.*judge_update"):
        make_poisoned(tmp_path / "run", OwnStep, **SKIP)()


@pytest.mark.parametrize(
    "changes",
    [SKIP, {"config.ema": {"decays": [0.9]}}, {"config.noise_scale": {}}],
    ids=["stability", "ema", "noise_scale"],
)
def test_a_job_that_leaves_out_an_auxiliary_state_of_its_config_is_refused(changes: Any, tmp_path: Path) -> None:
    class Forgetful(CleanLookup):
        @classmethod
        def auxiliary_states(cls):
            return ()

    with pytest.raises(InvalidError, match=r"config\.\w+: auxiliary_states"):
        make_poisoned(tmp_path / "run", Forgetful, **changes)()


# Real processes.


@pytest.mark.soak
def test_kills_around_a_skip_end_in_the_bits_of_an_undisturbed_run(tmp_path: Path) -> None:

    def run(name: str, **variables: str) -> int:
        document = make_poisoned_document(tmp_path / name, **SKIP, **{"checkpoint.every_steps": 2}, **PROCESS)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
        return run_runner(environment(1, **variables), str(tmp_path / f"{name}.yaml"))[0]

    assert run("whole") == 0
    first = list_skipped(tmp_path / "whole")[0]
    for step in (first - 1, first, first + 1, first + 3, first + 5):
        assert run("killed", **{KILL_AT: str(step)}) == -signal.SIGKILL
    assert run("killed") == 0
    assert read_outcome(tmp_path / "killed") == read_outcome(tmp_path / "whole")


@pytest.mark.soak
def test_a_poisoned_example_ends_a_process_with_1_and_with_skip_with_0(tmp_path: Path) -> None:

    for name, changes, code in (("stop", {}, 1), ("skip", SKIP, 0)):
        document = make_poisoned_document(tmp_path / name, **changes, **PROCESS)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(document))
        found, output = run_runner(environment(1), str(tmp_path / f"{name}.yaml"))
        assert found == code, output
        assert "Traceback" not in output
