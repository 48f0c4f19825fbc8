"""Restarts of a supervised job after faults that leave its fast tier whole, in part, or not at all.

Processes of `specs/counter.yaml`, each with its own part of the array, run under `launch local`. In turns one process
is killed with -9, one is killed and its fast tier deleted, process 0 is killed and its fast tier deleted, and all are
killed and all fast tiers deleted. For each fault the script prints the median seconds from the kill to the first new
step with those of each phase, and the seconds of the restore relative to one from own parts. It also prints for how
long a fast save blocks the loop with and without replicas. With `--bucket` the durable directory is in an emulator of
S3, each of whose requests takes so many milliseconds longer, with `--bandwidth` through a link of limited bandwidth.

    python -m tests.benchmarks.replicas [--megabytes 125] [--processes 4] [--rounds 5] [--bucket 20] [--bandwidth 200]
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from experiments.counter import Counter, advance
from runner.distributed.clock import TimeCategory
from runner.history.goodput import START_CATEGORIES, list_restarts
from runner.history.reader import read_history
from runner.storage import open_store, read_log
from tests.support.job_process import list_common_steps, list_copied_steps
from tests.support.object_stores import Faults, route_stores_to, start_backend

_SCRATCH = "REPLICAS_SCRATCH"  # variable with a directory for the files of `ShardedCounter`
_POLL_SECONDS = 0.2
_STANDBY_SECONDS = 8  # age of an attempt when its standbys are started
_DEADLINE_SECONDS = 300.0


class ShardedCounter(Counter):
    """Counter whose array is sharded over all devices, so that no process has the part of another.

    After its first step each process writes a file with its id and the time.
    """

    def abstract_state(self) -> Any:
        """Return the leaves with the array sharded."""
        state = super().abstract_state()
        values = state["values"]
        sharding = NamedSharding(values.sharding.mesh, PartitionSpec("device"))
        return state | {"values": jax.ShapeDtypeStruct(values.shape, values.dtype, sharding=sharding)}

    def run(self) -> None:
        """Take the first step, report it, and go on."""
        self.state = jax.block_until_ready(advance(self.state))
        self.step += 1
        path = Path(os.environ[_SCRATCH]) / f"first.{jax.process_index()}"
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_text(json.dumps({"pid": os.getpid(), "time": time.time()}))
        temporary.replace(path)
        super().run()


class Fault(NamedTuple):
    """A fault, and the source of the state that a restart has after it.

    Attributes:
        killed: processes that are killed; -1 is the last one, None all of them.
        loses_fast_tier: True if their fast tiers are deleted.
        source: `fast`, `replica` or `durable`.
    """

    killed: int | None
    loses_fast_tier: bool
    source: str


FAULTS = {
    "a process": Fault(-1, False, "fast"),
    "a host with its fast tier": Fault(-1, True, "replica"),
    "process 0 with its fast tier": Fault(0, True, "replica"),
    "all hosts with their fast tiers": Fault(None, True, "durable"),
}


class Restart(NamedTuple):
    """A measured restart.

    Attributes:
        fault: name of the fault.
        total: seconds from the kill to the first new step.
        phases: seconds of each phase until the first step began.
        restore: seconds of the restore, part of `phases`.
    """

    fault: str
    total: float
    phases: dict[TimeCategory, float]
    restore: float


class SupervisedRun:
    """A run under `launch local`, with the means to hurt it. Use as a context manager."""

    def __init__(self, directory: str, scratch: Path, megabytes: int, num_processes: int, num_replicas: int):
        self.directory, self.scratch = directory, scratch
        self._num_processes, self._num_replicas = num_processes, num_replicas
        settings = {
            "directory": directory,
            "job": "tests.benchmarks.replicas:ShardedCounter",
            "config.width": megabytes * 250_000 * num_processes,  # of four bytes
            "config.total_steps": 10**6,
            "config.step_seconds": 1.5,  # time to send a part before the next one
            "checkpoint.every_steps": 9,
            "checkpoint.local_directory": scratch / "fast",
            "checkpoint.local_every_steps": 2,
            "checkpoint.local_replicas": num_replicas,
        }
        words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "launch", "local", "specs/counter.yaml", *words]
        command += ["--processes", str(num_processes), "--standby-seconds", str(_STANDBY_SECONDS)]
        variables = {_SCRATCH: str(scratch), "RUNNER_CACHE": str(scratch / "cache")}
        self._log = (scratch / "log").open("wb")
        self._launcher = subprocess.Popen(
            command, env=os.environ | variables, stdout=self._log, stderr=subprocess.STDOUT
        )

    def __enter__(self) -> "SupervisedRun":
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.send_signal(signal.SIGTERM)
        self._launcher.wait()
        self._log.close()

    def list_events(self, event: str) -> list[dict[str, Any]]:
        """Return the events of one kind."""
        return [row for row in read_log(open_store(self.directory), "events") if row["event"] == event]

    def read_first_step(self, process: int) -> dict[str, Any]:
        """Return what a process has written after its first step; nothing if it has not."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.scratch / f"first.{process}").read_text())
        return {}

    def hurt(self, fault: Fault) -> float:
        """Wait until the fault can be survived, cause it, and return the seconds to the first new step."""
        began, fast = time.time(), self.scratch / "fast"
        everyone = range(self._num_processes)
        self.wait_for(lambda: time.time() > began + _STANDBY_SECONDS + 4 and self._is_ready())
        killed = everyone if fault.killed is None else [everyone[fault.killed]]
        pids = [self.read_first_step(process)["pid"] for process in killed]
        killed_time = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for process in killed if fault.loses_fast_tier else ():
            for path in fast.glob(f"*/{process}"):
                shutil.rmtree(path)
        self.wait_for(lambda: all(self.read_first_step(each).get("time", 0) > killed_time for each in everyone))
        return max(self.read_first_step(each)["time"] for each in everyone) - killed_time

    def _is_ready(self) -> bool:
        """Return True if all have copies of a part beyond the last durable step, and none is being written now."""
        fast = self.scratch / "fast"
        steps = set(list_common_steps(fast, self._num_processes))
        for process in range(self._num_processes) if self._num_replicas else ():
            steps &= list_copied_steps(fast, process)
        commits = [commit["step"] for commit in self.list_events("commit") if commit.get("tier") != "fast"]
        being_written = [*fast.glob("*/*/*.tmp"), *fast.glob("*/*/copies/*/*.tmp")]
        return max(steps, default=0) > max(commits, default=10**6) and not being_written

    def wait_for(self, happens: Callable[[], bool]) -> None:
        """Wait until `happens` returns True; fail if the job ends or `_DEADLINE_SECONDS` pass."""
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not happens():
            log = self.scratch / "log"
            assert self._launcher.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(_POLL_SECONDS)


def measure(run: SupervisedRun, num_rounds: int, faults: dict[str, Fault]) -> list[Restart]:
    """Cause each fault `num_rounds` times, in turns."""
    run.wait_for(lambda: bool(run.read_first_step(0)))
    totals = [(name, run.hurt(faults[name])) for _, name in itertools.product(range(num_rounds), faults)]
    run.hurt(Fault(-1, False, "fast"))  # so that the clock of the last measured attempt is complete
    seconds_of = {
        attempt.number: seconds for attempt, seconds in list_restarts(read_history(open_store(run.directory)).attempts)
    }
    restores = {restore["attempt"]: restore for restore in run.list_events("restore")}
    found = []
    for attempt, (name, total) in enumerate(totals, 2):
        restore = restores[attempt]
        source = "replica" if "from_replicas" in restore else restore["tier"]
        assert source == faults[name].source, f"{name}: {restore}"
        found.append(Restart(name, total, seconds_of[attempt], restore["seconds"]))
    return found


def main() -> None:
    """Measure with and without replicas, and print the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=125, help="size of the part of each process")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--bucket", type=float, metavar="MS", help="latency of a bucket that holds the run")
    parser.add_argument(
        "--bandwidth", type=float, metavar="MB/S", help="bandwidth of that bucket for all hosts together"
    )
    parsed = parser.parse_args()
    blocked, restarts = dict[int, list[float]](), list[Restart]()
    with contextlib.ExitStack() as stack:
        backend = None
        if parsed.bucket is not None:
            backend = stack.enter_context(start_backend("s3"))
            route_stores_to(stack.enter_context(pytest.MonkeyPatch.context()), backend)
            bandwidth = parsed.bandwidth * 1e6 if parsed.bandwidth else None
            backend.proxy.faults = Faults(latency_seconds=parsed.bucket / 1000, bytes_per_second=bandwidth)
        for num_replicas in (0, 1):
            faults = {name: fault for name, fault in FAULTS.items() if num_replicas or fault.source == "fast"}
            with tempfile.TemporaryDirectory() as scratch:
                directory = f"{scratch}/run" if backend is None else backend.url(f"run-{num_replicas}")
                run = SupervisedRun(directory, Path(scratch), parsed.megabytes, parsed.processes, num_replicas)
                with run:
                    # The restarts of the last run, which has replicas, are printed.
                    restarts = measure(run, parsed.rounds, faults)
                    saves = [save for save in run.list_events("save") if save.get("tier") == "fast"]
                blocked[num_replicas] = [save["blocked_seconds"] for save in saves]
    own = statistics.median(restart.restore for restart in restarts if FAULTS[restart.fault].source == "fast")
    for name, fault in FAULTS.items():
        measured = [restart for restart in restarts if restart.fault == name]
        restores = [restart.restore for restart in measured]
        median = statistics.median(restores)
        total = statistics.median(restart.total for restart in measured)
        print(
            f"{name}: {total:.2f} s to a new step; restore ({fault.source}) {median:.2f} s, {median / own:.2f} of own"
        )
        phases = {
            category.value: round(statistics.median(restart.phases[category] for restart in measured), 2)
            for category in (TimeCategory.GAP, *START_CATEGORIES)
        }
        phases["end of the others, first step"] = round(total - sum(phases.values()), 2)
        print(f"  {phases}, restores {restores}")
    for num_replicas, values in blocked.items():
        print(f"a fast save with {num_replicas} replicas blocks the loop for {statistics.median(values) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
