"""Restore from replicas of the fast tier, relative to a restore from own parts and from the durable directory.

Processes of `specs/counter.yaml`, each with its own part of the array, are killed, and started again after nothing, the
parts of the last process, or the whole fast tier were deleted. The script prints the median seconds of a restore by
source with their ratios, and the seconds for which a fast save blocks the loop with and without replicas. With
`--bucket` the durable directory is in an emulator of S3, each of whose requests takes so many milliseconds longer.

    python -m tests.benchmarks.replicas [--megabytes 500] [--processes 2] [--rounds 3] [--bucket 20]
"""

import argparse
import contextlib
import itertools
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.counter import Counter
from runner.storage import open_store, read_log
from tests.benchmarks.restart import kill, spawn
from tests.support.job_process import list_common_steps
from tests.support.object_stores import Faults, route_stores_to, start_backend

SOURCES = ("own parts", "a replica", "durable directory")
_POLL_SECONDS = 0.2
_STEP_SECONDS = 1.5  # time to send a part before the next one


class ShardedCounter(Counter):
    """Counter whose array is sharded over all devices, so that no process has the part of another."""

    def abstract_state(self) -> Any:
        """Return the leaves with the array sharded."""
        state = super().abstract_state()
        values = state["values"]
        sharding = NamedSharding(values.sharding.mesh, PartitionSpec("device"))
        return state | {"values": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}


def make_options(scratch: Path, megabytes: int, num_processes: int, num_replicas: int) -> list[str]:
    """Return the options of a run whose parts have this size on each process."""
    settings = {
        "job": "tests.benchmarks.replicas:ShardedCounter",
        "config.width": megabytes * 250_000 * num_processes,  # of four bytes
        "config.total_steps": 10**6,
        "config.step_seconds": _STEP_SECONDS,
        "checkpoint.every_steps": 9,
        "checkpoint.local_directory": scratch / "fast",
        "checkpoint.local_every_steps": 2,
        "checkpoint.local_replicas": num_replicas,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def list_events(directory: str, event: str, attempt: int | None = None) -> list[dict[str, object]]:
    """Return the events of one kind, of one attempt or of all."""
    rows = read_log(open_store(directory), "events")
    return [row for row in rows if row["event"] == event and attempt in (None, row["attempt"])]


def measure(
    directory: str, scratch: Path, megabytes: int, num_processes: int, num_replicas: int
) -> tuple[dict[str, float], list[float]]:
    """Return the seconds of a restore by source, and those for which fast saves blocked the loop."""
    fast, cache = scratch / "fast", scratch / "cache"
    options = make_options(scratch, megabytes, num_processes, num_replicas)
    restores, blocked = dict[str, float](), list[float]()
    sources = [source for source in SOURCES if num_replicas or source != "a replica"]
    for attempt, source in enumerate(["", *sources], 1):
        processes = spawn("specs/counter.yaml", directory, cache, num_processes, options)
        while not list_events(directory, "init" if attempt == 1 else "restore", attempt):
            time.sleep(_POLL_SECONDS)
            assert all(process.poll() is None for process in processes)
        if source:
            (restore,) = list_events(directory, "restore", attempt)
            tier = "durable" if source == "durable directory" else "fast"
            assert (restore["tier"], "from_replicas" in restore) == (tier, source == "a replica"), restore
            restores[source] = float(str(restore["seconds"]))
        begun = max(list_common_steps(fast, num_processes), default=0) if source != "durable directory" else 0

        def is_ready(begun: int = begun) -> bool:
            steps = list_common_steps(fast, num_processes)
            copies = [
                {int(path.name) for path in fast.glob(f"*/*/copies/{process}/*[0-9]")}
                for process in range(num_processes)
            ]
            newest = max(set(steps).intersection(*copies) if num_replicas else steps, default=0)
            commits = [commit for commit in list_events(directory, "commit") if commit.get("tier") != "fast"]
            durable = max((int(str(commit["step"])) for commit in commits), default=0)
            return newest > max(begun + 2, durable) and durable > 0

        while not is_ready():
            time.sleep(_POLL_SECONDS)
            assert all(process.poll() is None for process in processes)
        kill(processes)
        saves = list_events(directory, "save", attempt)
        blocked += [float(str(save["blocked_seconds"])) for save in saves if save.get("tier") == "fast"]
        following = [*sources, ""][attempt - 1]
        if following == "a replica":
            (host,) = fast.glob(f"*/{num_processes - 1}")
            shutil.rmtree(host)
        if following == "durable directory":
            shutil.rmtree(fast)
    return restores, blocked


def main() -> None:
    """Measure with and without replicas, in turns, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--bucket", type=float, metavar="MS", help="latency of a bucket that holds the run")
    parsed = parser.parse_args()
    restores: dict[str, list[float]] = {source: [] for source in SOURCES}
    blocked: dict[int, list[float]] = {0: [], 1: []}
    with contextlib.ExitStack() as stack:
        backend = None
        if parsed.bucket is not None:
            backend = stack.enter_context(start_backend("s3"))
            route_stores_to(stack.enter_context(pytest.MonkeyPatch.context()), backend)
            backend.proxy.faults = Faults(latency_seconds=parsed.bucket / 1000)
        for number, num_replicas in itertools.product(range(parsed.rounds), blocked):
            with tempfile.TemporaryDirectory() as scratch:
                directory = f"{scratch}/run" if backend is None else backend.url(f"{number}-{num_replicas}")
                found, seconds = measure(directory, Path(scratch), parsed.megabytes, parsed.processes, num_replicas)
            blocked[num_replicas] += seconds
            if num_replicas:
                for source, value in found.items():
                    restores[source].append(value)
    own = statistics.median(restores["own parts"])
    for source, values in restores.items():
        median = statistics.median(values)
        print(f"restore from {source}: {median:.2f} s, {median / own:.2f} of one from own parts ({values})")
    for num_replicas, values in blocked.items():
        print(f"a fast save with {num_replicas} replicas blocks the loop for {statistics.median(values) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
