"""Step time with tokens from a bucket, relative to the same tokens from a local file.

The same compiled step of one GPT alternates between two data sets, each read through the prefetcher of a run: a file,
and an uncached object in the emulator of a service with a latency of 20 ms. The script prints the median of the ratios
of adjacent slices.

    python -m tests.benchmarks.data_step [--backend s3] [--size 10m] [--slices 8] [--steps 8]
"""

import argparse
import contextlib
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from runner.data import Dataset, Prefetcher
from tests.benchmarks.jobs import BATCHES, SIZES, make_job
from tests.data.datasets import load
from tests.support.attempt import start
from tests.support.object_stores import BACKENDS, Faults, route_stores_to, start_backend

LATENCY_SECONDS = 0.02
NUM_TOKENS = 1 << 21


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=BACKENDS, default="s3")
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    examples, length = BATCHES[options.size]
    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
        start_backend(options.backend) as backend,
    ):
        ids = np.random.default_rng(0).integers(0, SIZES[options.size]["vocabulary_size"], NUM_TOKENS, np.uint16)
        path = Path(directory) / "train.bin"
        ids.tofile(path)
        backend.write("step/train.bin", path.read_bytes())
        route_stores_to(patch, backend)
        backend.proxy.faults = Faults(latency_seconds=LATENCY_SECONDS)
        job = start(make_job(options.size, Path(directory) / "run", 1))
        layout, step_of, state = job.compiled.layout, job.compiled.executable, job.state

        def make_prefetcher(source: str) -> Prefetcher:
            settings = {"sequence_length": length, "vocabulary_size": 1 << 16}
            cache = {} if source == str(path) else {"cache_bytes": 0}
            dataset: Dataset = load(source, cache=Path(directory) / "cache", **settings, **cache)
            return Prefetcher(layout.batch(dataset, "train", step) for step in itertools.count())

        seconds: list[list[float]] = []
        with (
            contextlib.closing(make_prefetcher(str(path))) as local,
            contextlib.closing(make_prefetcher(f"{backend.url('step')}/train.bin")) as remote,
        ):
            for _ in range(options.slices + 1):  # the first slice warms up
                seconds.append([])
                for feed in (local, remote):
                    began = time.perf_counter()
                    for _ in range(options.steps):
                        state, loss, _ = step_of(state, next(feed), job.train_setup.key)
                    jax.block_until_ready(loss)
                    seconds[-1].append((time.perf_counter() - began) / options.steps)
        ratios = [remote / local for local, remote in seconds[1:]]
        print(
            f"{options.size}, {examples} x {length} tokens, {options.backend} after {LATENCY_SECONDS * 1e3:.0f} ms: "
            f"{statistics.median(other for _, other in seconds[1:]):.4f} s a step, from a file "
            f"{statistics.median(own for own, _ in seconds[1:]):.4f} s; ratio median {statistics.median(ratios):.3f} "
            f"(least {min(ratios):.3f}, most {max(ratios):.3f})"
        )


if __name__ == "__main__":
    main()
