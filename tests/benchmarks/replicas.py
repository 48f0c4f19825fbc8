"""Restore from replicas of the fast tier, relative to a restore from own parts and from the durable directory.

Processes of `specs/counter.yaml` are killed, and started again after nothing, the parts of the last process, or the
whole fast tier were deleted. The script prints the median seconds of a restore by source with their ratios, and the
seconds for which a fast save blocks the loop with and without replicas.

    python -m tests.benchmarks.replicas [--megabytes 500] [--processes 2] [--rounds 3]
"""

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path

from runner.storage import LocalStore, read_log
from tests.benchmarks.restart import kill, list_committed_steps, spawn
from tests.support.job_process import list_common_steps

SOURCES = ("own parts", "a replica", "durable directory")
_POLL_SECONDS = 0.05
_STEP_SECONDS = 1.5  # time to send a part before the next one


def make_options(scratch: Path, megabytes: int, num_replicas: int) -> list[str]:
    """Return the options of a run whose parts have this size on each process."""
    settings = {
        "config.width": megabytes * 250_000,  # of four bytes
        "config.total_steps": 10**6,
        "config.step_seconds": _STEP_SECONDS,
        "checkpoint.every_steps": 9,
        "checkpoint.local_directory": scratch / "fast",
        "checkpoint.local_every_steps": 2,
        "checkpoint.local_replicas": num_replicas,
    }
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def list_events(directory: Path, event: str, attempt: int) -> list[dict[str, object]]:
    """Return the events of one kind of an attempt."""
    return [
        row for row in read_log(LocalStore(directory), "events") if (row["event"], row["attempt"]) == (event, attempt)
    ]


def measure(
    scratch: Path, megabytes: int, num_processes: int, num_replicas: int
) -> tuple[dict[str, float], list[float]]:
    """Return the seconds of a restore by source, and those for which fast saves blocked the loop."""
    directory, fast, cache = scratch / "run", scratch / "fast", scratch / "cache"
    options, restores, blocked = make_options(scratch, megabytes, num_replicas), dict[str, float](), list[float]()
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
            durable = max(list_committed_steps(directory), default=0)
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
    parsed = parser.parse_args()
    restores: dict[str, list[float]] = {source: [] for source in SOURCES}
    blocked: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(parsed.rounds):
        for num_replicas in blocked:
            with tempfile.TemporaryDirectory() as scratch:
                found, seconds = measure(Path(scratch), parsed.megabytes, parsed.processes, num_replicas)
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
