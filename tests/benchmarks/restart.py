"""kill -9 to the first new step with a warm compile cache, split into phases that sum to the whole.

python -m tests.benchmarks.restart [--rounds 5] [--spec specs/gpt_nano.yaml]
"""

import argparse
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runner.storage import LocalStore, parse_lines, read_log

PHASES = {
    "death to spawn": None,
    "interpreter, imports, data, checks": "start",
    "compile (from the cache)": "prepare",
    "restore": "restore",
    "first step": None,
}


def spawn(spec: str, directory: Path) -> "subprocess.Popen[bytes]":
    """Start the runner, with a row for every step."""
    command = [
        sys.executable,
        "-m",
        "runner",
        spec,
        "--set",
        f"directory={directory}",
        "--set",
        "logging.every_steps=1",
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def wait_for_step(directory: Path, step: int, old_file: int) -> float:
    """When the first row beyond `step` appeared in the file that replaced the one with inode `old_file`."""
    path = directory / "metrics.jsonl"
    while path.stat().st_ino == old_file or not any(row["step"] > step for row in parse_lines(path.read_bytes())):
        time.sleep(0.001)
    return time.time()


def committed(directory: Path) -> list[int]:
    """Committed steps, ascending."""
    return sorted(int(path.parent.name) for path in directory.glob("checkpoints/*/manifest.json"))


def measure(spec: str, directory: Path) -> dict[str, float]:
    """One kill and restart: seconds by phase."""
    process = spawn(spec, directory)
    before = committed(directory)
    while committed(directory)[-1:] == before[-1:]:
        time.sleep(0.001)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.time()
    process.wait()
    restored = committed(directory)[-1]
    old_file = (directory / "metrics.jsonl").stat().st_ino
    spawned = time.time()
    process = spawn(spec, directory)
    attempt = max(int(path.name) for path in (directory / "attempts").iterdir()) + 1
    while not any(
        event["attempt"] == attempt and event["event"] == "restore"
        for event in read_log(LocalStore(directory), "events")
    ):
        time.sleep(0.001)
    stepped = wait_for_step(directory, restored, old_file)
    process.kill()
    process.wait()
    events = {
        event["event"]: event["time"]
        for event in read_log(LocalStore(directory), "events")
        if event["attempt"] == attempt and event["event"] in PHASES.values()
    }
    times = [killed, spawned, events["start"], events["prepare"], events["restore"], stepped]
    return {name: after - before for name, (before, after) in zip(PHASES, itertools.pairwise(times), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--spec", default="specs/gpt_nano.yaml")
    parsed = parser.parse_args()
    results = []
    for _ in range(parsed.rounds):
        with tempfile.TemporaryDirectory() as directory:
            results.append(measure(parsed.spec, Path(directory)))
    print(json.dumps({name: round(statistics.median(r[name] for r in results), 3) for name in PHASES}, indent=1))
    print(f"whole: {statistics.median(sum(r.values()) for r in results):.3f} s (median of {parsed.rounds})")


if __name__ == "__main__":
    main()
