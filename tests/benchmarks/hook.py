"""What hooks cost a step: a run with two hooks that count, over the same run without.

Both runs are set up once; slices of some steps of one and of the other take turns, so both see the same machine. Each
step has a row here (`--every 1`), which is more than any run has. Printed: the median of the ratio over slices.

    python -m tests.benchmarks.hook [--slices 30] [--steps 20] [--every 10] [--size small]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from experiments.gpt import PretrainGPT
from runner.spec import Logging
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start

HOOKS = ("tests.support.hooked:Counts", "runner.hook:EarlyStopping")


def slices(job: Any, steps: int) -> Iterator[float]:
    """Seconds of each next `steps` steps, as `BaseTrainer.run` makes them."""
    start(job)
    train_step, key, report = job.compiled.executable, job.blueprint.key, job.report
    with report.showing(0):
        job.state = job.steering.start(job.state, 0)
        while True:
            began = time.perf_counter()
            for _ in range(steps):
                job.state, loss, meta = train_step(job.state, job.batch("train", job.step), key)
                job.step += 1
                report.add_step(job.step, loss, meta)
                if report.is_row_due(job.step):
                    report.add_row(job.weights(job.state), job.step)
                    job.state = job.steering.after_row(job.state, job.step)
                job.save_or_stop()
            jax.block_until_ready(job.state)
            yield time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, nargs="+", default=[1, 10])
    parser.add_argument("--size", default="small")
    parsed = parser.parse_args()
    for every in parsed.every:
        with tempfile.TemporaryDirectory() as scratch:
            runs = []
            for name, hooks in {"without": (), "with": HOOKS}.items():
                made = make_job(parsed.size, Path(scratch) / name, 10**9, every_steps=10**9)
                changes = {"hooks": [*hooks], "logging": Logging(every_steps=every), "name": name}
                runs.append(slices(PretrainGPT(made.spec.model_copy(update=changes)), parsed.steps))
            pairs = [[next(run) for run in runs] for _ in range(parsed.slices + 1)][1:]
        ratios = [with_hooks / without for without, with_hooks in pairs]
        quarters = statistics.quantiles(ratios, n=4)
        usual = statistics.median(without for without, _ in pairs) / parsed.steps
        print(
            f"a row each {every} steps of {1000 * usual:.1f} ms: with two hooks over without "
            f"{statistics.median(ratios):.3f} (quartiles {quarters[0]:.3f}-{quarters[2]:.3f})"
        )


if __name__ == "__main__":
    main()
