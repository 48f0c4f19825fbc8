"""Cost of Python's garbage collector per step: a run that collects at its rows, relative to one with the default.

Both runs are set up once, and slices of their steps alternate, so that both see the same machine load. The script
prints the median ratio over slices, the pauses of the collector in each run, and the load of the machine.

    python -m tests.benchmarks.garbage [--slices 30] [--steps 100] [--size nano] [--objects 0]

`--objects` keeps so many more containers alive, as a process with more modules and larger programs has them.
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from runner.console import silence
from runner.process import GarbageCollection
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start


class Pauses:
    """Seconds that the collector has taken, by a callback."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = 0.0
        gc.callbacks.append(self)

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.seconds.append(time.perf_counter() - self._began)


def run_slices(job: Any, steps: int, collection: GarbageCollection, pauses: Pauses) -> Iterator[float]:
    """Run steps like `BaseTrainer.run`, and yield the seconds of each `steps` steps."""
    start(job)
    session, executable, key = job.session, job.compiled.executable, job.train_setup.key
    with session.report.display(0):
        job.state = session.hook_dispatcher.start(job.state, 0)
        session.garbage_collection = collection
        while True:
            with collection:
                collection.collect()  # in a run once, after the first row
                pauses.seconds.clear()
                began = time.perf_counter()
                for _ in range(steps):
                    job.state, loss, meta = executable(job.state, job.batch("train", job.step), key)
                    job.step += 1
                    session.report.add_step(job.step, loss, meta)
                    session.write_row()
                    job.save_or_stop()
                jax.block_until_ready(job.state)
                seconds = time.perf_counter() - began
            yield seconds


class DefaultCollection(GarbageCollection):
    """Collector as Python has it."""

    def __enter__(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slices", type=int, default=30)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--size", default="nano")
    parser.add_argument("--objects", type=int, default=0)
    parsed = parser.parse_args()
    kept = [{number: []} for number in range(parsed.objects // 2)]
    pauses = Pauses()
    with tempfile.TemporaryDirectory() as scratch, silence():
        runs = []
        for name, collection in (("default", DefaultCollection()), ("rows", GarbageCollection())):
            job = make_job(parsed.size, Path(scratch) / name, 10**9, every_steps=10**9)
            runs.append(run_slices(job, parsed.steps, collection, pauses))
        before, pairs = os.getloadavg()[0], list[list[float]]()
        taken: dict[str, list[float]] = {"default": [], "rows": []}
        for number in range(parsed.slices + 1):
            pair = []
            for name, run in zip(taken, runs, strict=True):
                pair.append(next(run))
                taken[name] += pauses.seconds if number else []
            pairs += [pair] if number else []
    ratios = [on / off for off, on in pairs]
    quarters = statistics.quantiles(ratios, n=4)
    num_steps = parsed.slices * parsed.steps
    print(
        f"{1000 * statistics.median(off for off, _ in pairs) / parsed.steps:.2f} ms a step: collected at rows over "
        f"default {statistics.median(ratios):.4f} (quartiles {quarters[0]:.4f}-{quarters[2]:.4f}); load {before:.1f} "
        f"before, {os.getloadavg()[0]:.1f} after"
    )
    for name, seconds in taken.items():
        print(
            f"{name}: {len(seconds)} collections in {num_steps} steps, {1000 * sum(seconds) / num_steps:.3f} ms a "
            f"step, longest {1000 * max(seconds, default=0):.1f} ms"
        )
    del kept


if __name__ == "__main__":
    main()
