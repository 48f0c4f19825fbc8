"""Cost of hooks, evaluators and weight averages per step: a run with them, relative to the same run without.

Both runs are set up once, and slices of their steps alternate, so that both see the same machine load. Hooks receive a
row every 1 or 10 steps (`--every`), more often than in most runs. Evaluations take place every `--evaluate` steps;
their own time is excluded, but their effect on later steps is included. The script prints the median ratio over slices
and the load of the machine before and after.

    python -m tests.benchmarks.hook [--of hooks all] [--slices 30] [--steps 20] [--every 1 10] [--size small]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.gpt import PretrainGPT
from runner.distributed.agreement import Hosts
from runner.spec import LoggingConfig
from runner.train.evaluators import Evaluator
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start

HOOKS = ["tests.support.hooks:RowCounter", "runner.hook:EarlyStopping"]


class TimedEvaluator:
    """Evaluator that measures the total seconds of another evaluator."""

    def __init__(self, evaluator: Evaluator):
        self._evaluator, self.seconds = evaluator, 0.0

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Any:
        """Return the metrics of the measured evaluator."""
        began = time.perf_counter()
        try:
            return self._evaluator.evaluate(weights, step, hosts)
        finally:
            self.seconds += time.perf_counter() - began


class ParameterEvaluator:
    """Evaluator of one number computed from all parameters."""

    def __init__(self, name: str, figure: Any):
        self._name, self._figure = name, jax.jit(figure)

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> dict[str, float]:
        """Return the number."""
        return {f"val/{self._name}": float(self._figure(jax.tree.leaves(weights["params"])))}


class EvaluatedGPT(PretrainGPT):
    """GPT with three timed evaluators."""

    def evaluator(self) -> Any:
        found = [
            *self.builtin_evaluators,
            ParameterEvaluator("squares", lambda leaves: sum(jnp.vdot(leaf, leaf) for leaf in leaves)),
            ParameterEvaluator("largest", lambda leaves: jnp.stack([jnp.max(jnp.abs(leaf)) for leaf in leaves]).max()),
        ]
        self.timed = [TimedEvaluator(each) for each in found]
        return self.timed


def add_hooks(job: PretrainGPT, evaluate: int) -> PretrainGPT:
    """Return the same job with two hooks."""
    return PretrainGPT(job.spec.model_copy(update={"hooks": HOOKS}))


def add_everything(job: PretrainGPT, evaluate: int) -> PretrainGPT:
    """Return the same job with two hooks, three evaluators and an average of its weights."""
    config = job.spec.config | {"ema": {"decays": [0.999]}, "eval": {"every_steps": evaluate, "batches": 2}}
    return EvaluatedGPT(job.spec.model_copy(update={"hooks": HOOKS, "config": config}))


VARIANTS = {"hooks": ("two hooks", add_hooks), "all": ("EMA, three evaluators and two hooks", add_everything)}


def run_slices(job: Any, steps: int) -> Iterator[float]:
    """Run steps like `BaseTrainer.run`, and yield the seconds of each `steps` steps without those of evaluators."""
    start(job)
    train_step, key, report = job.compiled.executable, job.train_setup.key, job.session.report
    timed = getattr(job, "timed", [])
    with report.display(0):
        job.state = job.session.hook_dispatcher.start(job.state, 0)
        while True:
            began, evaluating = time.perf_counter(), sum(each.seconds for each in timed)
            for _ in range(steps):
                job.state, loss, meta = train_step(job.state, job.batch("train", job.step), key)
                job.step += 1
                report.add_step(job.step, loss, meta)
                job.session.write_row()
                job.save_or_stop()
            jax.block_until_ready(job.state)
            yield time.perf_counter() - began - (sum(each.seconds for each in timed) - evaluating)


def measure(variant: str, parsed: argparse.Namespace, every: int) -> list[tuple[float, float]]:
    """Return the seconds of slices without and with the variant, in pairs, after a first pair that compiles."""
    with tempfile.TemporaryDirectory() as scratch:
        runs = []
        for name in ("without", "with"):
            made = make_job(parsed.size, Path(scratch) / name, 10**9, every_steps=10**9)
            made = PretrainGPT(made.spec.model_copy(update={"logging": LoggingConfig(every_steps=every), "name": name}))
            job = VARIANTS[variant][1](made, parsed.evaluate) if name == "with" else made
            runs.append(run_slices(job, parsed.steps))
        return [(next(runs[0]), next(runs[1])) for _ in range(parsed.slices + 1)][1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--of", nargs="+", default=[*VARIANTS], choices=[*VARIANTS])
    parser.add_argument("--slices", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--evaluate", type=int, default=20)
    parser.add_argument("--size", default="small")
    parsed = parser.parse_args()
    for variant in parsed.of:
        for every in parsed.every:
            before = os.getloadavg()[0]
            pairs = measure(variant, parsed, every)
            ratios = [on / off for off, on in pairs]
            quarters = statistics.quantiles(ratios, n=4)
            usual = statistics.median(off for off, _ in pairs) / parsed.steps
            print(
                f"a row each {every} steps of {1000 * usual:.1f} ms: with {VARIANTS[variant][0]} over without "
                f"{statistics.median(ratios):.3f} (quartiles {quarters[0]:.3f}-{quarters[2]:.3f}); load "
                f"{before:.1f} before, {os.getloadavg()[0]:.1f} after"
            )


if __name__ == "__main__":
    main()
