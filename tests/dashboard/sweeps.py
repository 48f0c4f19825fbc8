"""Synthetic sweeps: a record, and a small run directory for each run that has begun."""

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.history.sweep import SWEEP, Sweep, SweepRun
from runner.storage import JsonObject, LocalStore, encode_json, encode_line

SPEC = "name: {name}\njob: a:B\ndirectory: runs/{name}\nconfig: {{train: {{total_steps: {total}}}}}\n"
DIVERGED = {"event": "failed", "code": 1, "reason": "step 130: training diverged: the loss is nan", "diverged": True}


def write_sweep_run(
    store: LocalStore,
    level: float,
    rate: float = 1.0,
    num_rows: int = 40,
    total: int = 400,
    seed: int = 0,
    end: JsonObject | None = None,
    ago_seconds: float = 0.0,
    every: int = 5,
) -> None:
    """Write a run whose losses fall to `level`, in rows of ten steps, with a validation loss in each `every`-th row."""
    numbers, now = random.Random(seed), time.time() - ago_seconds
    began = now - 20 - 2.0 * num_rows
    name = store.root.name
    store.write("job.json", encode_json({"id": f"{seed:012x}", "name": name, "time": began, "identity": {}}))
    store.write("spec.yaml", SPEC.format(name=name, total=total).encode())
    start = {"event": "start", "began": began, "total_steps": total, "processes": 1, "devices": 8, "hosts": ["h"]}
    events: list[JsonObject] = [
        start | {"time": began + 2},
        {"event": "init", "time": began + 10, "step": 0, "seconds": 5.0},
        {"event": "progress", "time": now - 1, "step": num_rows * 10},
        *([] if end is None else [{"time": now, "step": num_rows * 10} | end]),
    ]
    store.write_chunks("events.jsonl", (encode_line({"attempt": 1, "process": 0} | each) for each in events))
    rows: list[JsonObject] = []
    for index in range(num_rows):
        step = (index + 1) * 10
        loss = level + (10.8 - level) * math.exp(-rate * step / 60) + numbers.gauss(0, 0.03)
        row = {"step": step, "train/loss": loss, "train/tokens": step * 4096, "perf/time": began + 12 + 2.0 * index,
               "perf/attempt": 1}  # fmt: skip
        rows.append(row | ({"val/loss": level + 0.05 + (loss - level) * 0.9} if (index + 1) % every == 0 else {}))
    store.write_chunks("metrics.jsonl", map(encode_line, rows))


def write_record(root: Path, runs: Sequence[SweepRun], **more: Any) -> Sweep:
    """Write `sweep.json`; `more` replaces its values."""
    sweep = Sweep(
        **{"name": "gpt-small-rates", "spec": "specs/gpt_small.yaml", "digest": "0" * 16, "metric": "val/loss",
           "is_maximised": False, "rule": {}, "runs": tuple(runs)} | more
    )  # fmt: skip
    LocalStore(root).write(SWEEP, sweep.encode())
    return sweep


def make_sweep(
    root: Path, num_runs: int = 30, *, num_seeds: int = 1, is_halving: bool = False, kinds: bool = True
) -> None:
    """Make a sweep most of whose runs are done; the last ones run, one has diverged, and one has not begun.

    Args:
        is_halving: every run but a quarter is stopped at step 100, and of these every run but a quarter at step 200.
        kinds: the runs also differ in a boolean, a text, a list and a key that some of them lack.
    """
    numbers = random.Random(7)
    runs = []
    for index in range(num_runs):
        setting = index // num_seeds
        numbers.seed(setting + 11)
        rate = 10 ** numbers.uniform(-4.2, -1.8)
        values: dict[str, Any] = {"config.optimizer.learning_rate": float(f"{rate:.3g}")}
        values["config.optimizer.weight_decay"] = round(numbers.uniform(0.0, 0.2), 3)
        values["config.train.global_batch_examples"] = numbers.choice([64, 128, 256, 512])
        if kinds:
            values["config.model.tied"] = setting % 2 == 0
            values["config.optimizer.name"] = numbers.choice(["adamw", "muon", "lion"])
            if setting % 5:
                values["config.optimizer.betas"] = [0.9, numbers.choice([0.95, 0.99])]
            if setting % 3:
                values["config.schedule.warmup_steps"] = numbers.choice([0, 100, 400])
        if num_seeds > 1:
            values["seed"] = index % num_seeds
        away = (math.log10(rate) + 2.8) ** 2
        level = 2.1 + 0.35 * away + 0.4 * abs(values["config.optimizer.weight_decay"] - 0.1)
        level += {"adamw": 0.05, "muon": 0.0, "lion": 0.12}[values.get("config.optimizer.name", "muon")]
        level += random.Random(index).gauss(0, 0.02)
        speed = 1.6 / (1 + away)
        num_rows, end, stopped = 40, {"event": "done"}, None
        is_late = index >= num_runs - max(num_runs // 10, 1)
        if index == num_runs - 1 and num_runs > 3:
            runs.append(SweepRun(f"{index:03}", values))
            continue
        if rate > 10**-1.95 or index == 4:
            num_rows, end = 13, DIVERGED
        elif is_late:
            num_rows, end = 12 + 3 * (index % 7), None
        elif is_halving and level > 2.35:
            stopped = 100 if level > 2.6 else 200
            num_rows, end = stopped // 10, {"event": "preempt", "code": 75}
        store = LocalStore(root / f"{index:03}")
        write_sweep_run(store, level, speed, num_rows, seed=index, end=end, ago_seconds=60.0 * (end is not None))
        runs.append(SweepRun(f"{index:03}", values, stopped, None if stopped is None else level + 0.1))
    write_record(root, runs, rule={"method": "random", "runs": num_runs, "halving": 4 if is_halving else None})
