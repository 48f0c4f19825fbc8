"""Time from kill -9 to the first new step by phase, relative to a hand-written program.

The hand-written program is the floor of a restart. Floor and restart are measured in pairs, with a warm compile cache
or, with `--cold`, with an empty one. With `--standby` the restart takes processes that wait ready, as those of
supervisors do; the floor has none.

    python -m tests.benchmarks.restart [--rounds 5] [--spec specs/gpt_nano.yaml] [--processes 1] [--cold] [--standby]
"""

import argparse
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
from collections.abc import Sequence
from pathlib import Path

from launch.supervisor import ProcessStarter
from runner.process import find_free_port, make_placements
from runner.storage import LocalStore, parse_lines, read_log

PHASES = {
    "death to spawn": None,
    "interpreter, imports, data, checks": "start",
    "compile": "prepare",
    "restore": "restore",
    "first step": None,
}

STANDBY_SECONDS = 10  # for the imports of a standby

Processes = list["subprocess.Popen[bytes]"]


def make_starter(num_processes: int, cache: Path) -> ProcessStarter:
    """Return the starter of the processes of a job, whose output is dropped."""
    quiet = subprocess.DEVNULL
    return ProcessStarter(
        num_processes,
        os.environ | {"RUNNER_CACHE": str(cache)},
        lambda command, variables, inherited: subprocess.Popen(
            command, env=variables, stdout=quiet, stderr=quiet, pass_fds=inherited
        ),
    )


def spawn(
    spec: str,
    directory: Path | str,
    cache: Path,
    num_processes: int,
    options: Sequence[str] = (),
    starter: ProcessStarter | None = None,
) -> Processes:
    """Start the runner on every host, with a row for every step and additional `options`, by `starter` if given."""
    words = ["-m", "runner", spec, "--set", f"directory={directory}", "--set", "logging.every_steps=1", *options]
    starter = starter or make_starter(num_processes, cache)
    return [starter.start([*words, *placement]) for placement in make_placements(num_processes)]


def kill(processes: Processes) -> None:
    """Kill -9 all processes and wait."""
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.wait()


def wait_for_step(directory: Path, step: int, old_file: int) -> float:
    """Wait for the first row after `step` in the file that replaced inode `old_file`, and return the time."""
    path = directory / "metrics.jsonl"
    while path.stat().st_ino == old_file or not any(row["step"] > step for row in parse_lines(path.read_bytes())):
        time.sleep(0.001)
    return time.time()


def list_committed_steps(directory: Path) -> list[int]:
    """Return the committed steps, ascending."""
    return sorted(int(path.parent.name) for path in directory.glob("checkpoints/*/manifest.json"))


def measure(spec: str, scratch: Path, num_processes: int, cold: bool, has_standby: bool = False) -> dict[str, float]:
    """Kill and restart a run once; return the seconds of each phase."""
    directory, cache = scratch / "run", scratch / "cache"
    starter = make_starter(num_processes, cache)
    if has_standby:
        starter.start_standbys()
        time.sleep(STANDBY_SECONDS)
    processes = spawn(spec, directory, cache, num_processes)
    while not list_committed_steps(directory):
        time.sleep(0.001)
    killed = time.time()
    kill(processes)
    if cold:
        shutil.rmtree(cache)
    restored = list_committed_steps(directory)[-1]
    old_file = (directory / "metrics.jsonl").stat().st_ino
    spawned = time.time()
    processes = spawn(spec, directory, cache, num_processes, starter=starter)
    attempt = max(int(path.name) for path in (directory / "attempts").glob("*[0-9]")) + 1

    def read_event_times() -> dict[str, float]:
        rows = read_log(LocalStore(directory), "events")
        return {row["event"]: row["time"] for row in rows if row["attempt"] == attempt and row["process"] == 0}

    while "restore" not in read_event_times():
        time.sleep(0.001)
    stepped = wait_for_step(directory, restored, old_file)
    kill(processes)
    at = read_event_times()
    times = [killed, spawned, at["start"], at["prepare"], at["restore"], stepped]
    return {name: after - before for name, (before, after) in zip(PHASES, itertools.pairwise(times), strict=True)}


def run_floor(directory: Path, num_processes: int, *options: str) -> float:
    """Run the hand-written program on every host and return its seconds."""
    command = [sys.executable, "-m", "tests.benchmarks.restart_floor", str(directory), *options]
    coordinator = f"127.0.0.1:{find_free_port()}"
    started = time.monotonic()
    commands = [command]
    if num_processes > 1:
        places = [["--place", coordinator, str(num_processes), str(process)] for process in range(num_processes)]
        commands = [[*command, *place] for place in places]
    quiet = subprocess.DEVNULL
    running = [subprocess.Popen(words, stdout=quiet, stderr=quiet) for words in commands]
    if any(process.wait() for process in running):
        raise SystemExit("the floor program failed")
    return time.monotonic() - started


def measure_floor(scratch: Path, num_processes: int, cold: bool) -> float:
    """Return the seconds of the hand-written program from its start to the first step after a restore."""
    run_floor(scratch, num_processes, "--prepare")
    if cold:
        shutil.rmtree(scratch / "cache")
    return run_floor(scratch, num_processes)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spec", default="specs/gpt_nano.yaml")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--standby", action="store_true")
    parsed = parser.parse_args()
    results, floors = [], []
    for _ in range(parsed.rounds):
        with tempfile.TemporaryDirectory() as scratch:
            floors.append(measure_floor(Path(scratch), parsed.processes, parsed.cold))
        with tempfile.TemporaryDirectory() as scratch:
            results.append(measure(parsed.spec, Path(scratch), parsed.processes, parsed.cold, parsed.standby))
    print(json.dumps({name: round(statistics.median(r[name] for r in results), 3) for name in PHASES}, indent=1))
    whole, floor = statistics.median(sum(r.values()) for r in results), statistics.median(floors)
    print(f"total: {whole:.3f} s, floor {floor:.3f} s (medians of {parsed.rounds})")
    ratio = statistics.median(sum(r.values()) / f for r, f in zip(results, floors, strict=True))
    print(f"restart / floor: {ratio:.2f}")


if __name__ == "__main__":
    main()
