"""Runs of every kind, whose steps the tests repeat."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.arrays import CHANGES, CountBright
from tests.support.tiny_jobs import get_job_name, make_gpt, stop_after
from tests.train.test_roll_back import NAN
from tests.train.test_stability import PoisonedLookup, make_poisoned

STEPS = 8
# Saves that leave steps between two checkpoints, all of which stay.
SAVES: dict[str, Any] = {"checkpoint.every_steps": 3, "checkpoint.keep_last": 99}
STAGES: dict[str, Any] = {
    "config.stages": [
        {"from_step": 4, "set": {"train.global_batch_examples": 24}},
        {"from_step": 6, "set": {"optimizer.learning_rate": 1.0e-2}},
    ]
}


def run_whole(directory: Path, **changes: Any) -> None:
    make_gpt(directory, **SAVES | changes)()


def run_killed(directory: Path) -> None:
    """With two restarts, of which the second has to repeat a step, because the newest checkpoint is gone."""
    stop_after(make_gpt(directory, **SAVES), 4)
    stop_after(make_gpt(directory, **SAVES), 5)
    shutil.rmtree(directory / "checkpoints/5")
    make_gpt(directory, **SAVES)()


def run_fork(directory: Path) -> None:
    parent = directory.with_name("parent")
    make_gpt(parent, **SAVES)()
    rate = "config.optimizer.learning_rate"
    fork = {"checkpoint.fork_from": {"run": str(parent), "step": 3, "changes": [rate]}, rate: 2.0e-3}
    make_gpt(directory, **SAVES | fork)()


def run_adapter(directory: Path) -> None:
    parent = directory.with_name("parent")
    make_gpt(parent, **SAVES)()
    make_gpt(
        directory,
        **SAVES | {"checkpoint.init_from": str(parent), "config.adapter": {"rank": 2, "targets": ["blocks.query"]}},
    )()


def run_mixture(directory: Path, **changes: Any) -> None:
    names = ("one", "two", "three")
    for number, name in enumerate(names):
        ids = np.arange(3000, dtype=np.uint16) * (number + 3) % 97
        np.save(directory.with_name(f"{name}.npy"), ids)
    mixture = [
        {"name": name, "source": str(directory.with_name(f"{name}.npy")), "weight": 1.0 + place}
        for place, name in enumerate(names)
    ]
    data = {"mixture": mixture, "sequence_length": 16}
    make_gpt(directory, **SAVES | {"config.data": data, "config.model.vocabulary_size": 97} | changes)()


def run_rolled_back(directory: Path) -> None:
    make_poisoned(directory, **NAN | {"job": get_job_name(PoisonedLookup)})()


def run_arrays(directory: Path) -> None:
    make_gpt(directory, CountBright, **CHANGES | SAVES | {"job": get_job_name(CountBright)})()


RUNS: dict[str, Callable[[Path], None]] = {
    "whole": run_whole,
    "killed": run_killed,
    "stages": lambda directory: run_whole(directory, **STAGES),
    "dropout": lambda directory: run_whole(directory, **{"config.model.dropout": 0.2}),
    "documents": lambda directory: run_whole(directory, **{"config.data.packing": "documents"}),
    "averages": lambda directory: run_whole(directory, **{"config.ema": {"decays": [0.9]}}),
    "skipped steps": lambda directory: run_whole(directory, **{"config.train.skip_steps": [[2, 4]]}),
    "micro-batches": lambda directory: run_whole(directory, **{"config.train.micro_batch_examples": 1}),
    "fork": run_fork,
    "adapter": run_adapter,
    "mixture": run_mixture,
    "rolled back": run_rolled_back,
    "arrays": run_arrays,
}
DAILY = ("killed", "stages")
