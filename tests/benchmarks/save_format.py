"""Saves and restores in the runner's own format, relative to Orbax's, which wrote checkpoints of manifest format 1.

Each sample is a process of its own, which saves a state a few times, restores it, and reports medians: seconds for
which the caller waits, until the save is durable, and of a restore; size, files, and the peak memory of the process.
Processes of both writers alternate. With `--backend` the runner also saves into a local server of that cloud, into
which Orbax cannot be directed; `tests.benchmarks.storage` compares that with the cloud's own client.

    python -m tests.benchmarks.save_format [--rounds 3] [--backend s3]
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from runner import ExecutionSpec, RestoreableJob
from tests.support.attempt import start
from tests.support.object_stores import start_backend

SIZES = {"537 MB, 16 leaves": (16, 8 << 20), "13 MB, 400 leaves": (400, 8 << 10)}  # leaves, float32 of each
SAVES = 4  # the first of a process is left out: it compares bits with the devices, and compiles
FIGURES = ("waits", "durable", "restore", "megabytes", "files", "peak_megabytes")


class ArraysJob(RestoreableJob):
    """Job whose state is random arrays."""

    size = (1, 1)
    total_steps = 1 << 20

    def init(self) -> Any:
        """Return arrays of float32."""
        num_leaves, num_elements = self.size
        keys = jax.random.split(jax.random.key(0), num_leaves)
        return {f"leaf{number:03}": jax.random.normal(key, (num_elements,)) for number, key in enumerate(keys)}


def make_spec(directory: str) -> ExecutionSpec:
    """Return the spec of an `ArraysJob`."""
    return ExecutionSpec(name="arrays", job="tests.benchmarks.save_format:ArraysJob", directory=directory)


def measure_packs(directory: str) -> dict[str, Any]:
    """Save and restore with the runner's own writer."""
    job = start(ArraysJob(make_spec(directory)))
    waits, durable = [], []
    for step in range(1, SAVES + 1):
        job.step = step
        began = time.perf_counter()
        job.save()
        waits.append(time.perf_counter() - began)
        job.checkpointer.wait_until_committed(step)
        durable.append(time.perf_counter() - began)
    began = time.perf_counter()
    found = job.checkpointer.load(str(SAVES))
    jax.block_until_ready(found.state)
    return summarise(waits, durable, time.perf_counter() - began, directory)


def measure_orbax(directory: str) -> dict[str, Any]:
    """Save and restore with Orbax's asynchronous checkpointer, with its defaults."""
    import orbax.checkpoint as ocp  # noqa: PLC0415 - only in the process that measures it

    job = ArraysJob(make_spec(directory))
    state = jax.block_until_ready(jax.jit(job.init)())
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    waits, durable = [], []
    for step in range(1, SAVES + 1):
        began = time.perf_counter()
        checkpointer.save(Path(directory) / "checkpoints" / str(step), args=ocp.args.StandardSave(state))
        waits.append(time.perf_counter() - began)
        checkpointer.wait_until_finished()
        durable.append(time.perf_counter() - began)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    began = time.perf_counter()
    path = Path(directory) / "checkpoints" / str(SAVES)
    jax.block_until_ready(checkpointer.restore(path, args=ocp.args.StandardRestore(abstract)))
    return summarise(waits, durable, time.perf_counter() - began, directory)


def summarise(waits: list[float], durable: list[float], restore: float, directory: str) -> dict[str, Any]:
    """Return the figures of a process; size and files are those of the last save, and 0 in a bucket."""
    files = [path for path in Path(directory).glob(f"checkpoints/{SAVES}/**/*") if path.is_file()]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(path.stat().st_size for path in files) / 1e6
    values = statistics.median(waits[1:]), statistics.median(durable[1:]), restore, size, len(files), peak / 1e3
    return dict(zip(FIGURES, values, strict=True))


WRITERS: dict[str, Callable[[str], dict[str, Any]]] = {"packs": measure_packs, "orbax": measure_orbax}


def sample(writer: str, size: str, directory: str) -> dict[str, Any]:
    """Run one process and return its figures."""
    command = [sys.executable, "-m", "tests.benchmarks.save_format", "--sample", writer, size, directory]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ)
    return dict(json.loads(found.stdout.splitlines()[-1]))


def main() -> None:
    """Print the figures of each writer, and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--backend", choices=("s3", "gs", "az"))
    parser.add_argument("--sample", nargs=3, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.sample is not None:
        writer, size, directory = parsed.sample
        ArraysJob.size = SIZES[size]
        print(json.dumps(WRITERS[writer](directory)))
        return
    for size in SIZES:
        samples: dict[str, list[dict[str, Any]]] = {writer: [] for writer in WRITERS}
        for _ in range(parsed.rounds):
            for writer, found in samples.items():
                with tempfile.TemporaryDirectory() as directory:
                    found.append(sample(writer, size, directory))
        medians = {
            writer: {name: statistics.median(each[name] for each in found) for name in FIGURES}
            for writer, found in samples.items()
        }
        for name in FIGURES:
            own, other = medians["packs"][name], medians["orbax"][name]
            print(f"{size}: {name}: packs {own:.4g}, orbax {other:.4g}, ratio {own / other:.2f}", flush=True)
        if parsed.backend is not None:
            backend = start_backend(parsed.backend)
            os.environ |= backend.environment
            there = sample("packs", size, backend.url(f"format{SIZES[size][0]}"))
            own = medians["packs"]
            for name in FIGURES[:3]:
                print(f"{size}: {name}: {parsed.backend} {there[name]:.4g}, disk {own[name]:.4g}", flush=True)


if __name__ == "__main__":
    main()
