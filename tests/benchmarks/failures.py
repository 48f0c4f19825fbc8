"""Wall time of a fixed amount of work under random failures (kill -9), relative to an uninterrupted run.

For each mean time T between failures, the time from the start of an attempt to its failure is uniform in [T/2, 3T/2].
The ratio is printed beside the prediction of Young and Daly for the measured restart time R, the stall D of a save and
the interval W between saves: 1 / ((1 - D / W) * (1 - (R + W / 2) / T)).

    python -m tests.benchmarks.failures [--seconds 120] [--mean 60 30 15]
"""

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from runner.storage import LocalStore, read_log

STEP_SECONDS, SAVE_STEPS = 0.02, 50


def run_attempt(directory: Path, total_steps: int, kill_after_seconds: float | None) -> bool:
    """Run one attempt; return True if the job finished before the kill."""
    settings = {
        "directory": directory,
        "config.total_steps": total_steps,
        "config.step_seconds": STEP_SECONDS,
        "checkpoint.every_steps": SAVE_STEPS,
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "runner", "specs/counter.yaml", *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        return process.wait(kill_after_seconds) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return False


def run_to_end(directory: Path, total_steps: int, mean_seconds: float | None, seed: int) -> tuple[float, int]:
    """Restart the job until it finishes; return the wall seconds and the number of kills."""
    chance, num_kills, started = random.Random(seed), 0, time.monotonic()
    while True:
        gap_seconds = None if mean_seconds is None else chance.uniform(0.5, 1.5) * mean_seconds
        if run_attempt(directory, total_steps, gap_seconds):
            return time.monotonic() - started, num_kills
        num_kills += 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of work")
    parser.add_argument("--mean", type=float, nargs="+", default=[60.0, 30.0, 15.0], help="seconds between failures")
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args()
    total_steps = int(parsed.seconds / STEP_SECONDS)
    with tempfile.TemporaryDirectory() as scratch:
        whole_seconds, _ = run_to_end(Path(scratch) / "whole", total_steps, None, 0)
        print(f"uninterrupted: {whole_seconds:.1f} s for {total_steps} steps", flush=True)
        start_seconds = whole_seconds - total_steps * STEP_SECONDS
        for mean_seconds in parsed.mean:
            directory = Path(scratch) / str(mean_seconds)
            seconds, num_kills = run_to_end(directory, total_steps, mean_seconds, parsed.seed)
            rows = read_log(LocalStore(directory), "events")
            stall_seconds = statistics.median(row["blocked_seconds"] for row in rows if row["event"] == "save")
            interval_seconds = SAVE_STEPS * STEP_SECONDS
            lost_share = (start_seconds + interval_seconds / 2) / mean_seconds
            predicted = 1 / ((1 - stall_seconds / interval_seconds) * (1 - lost_share))
            print(
                f"T {mean_seconds:.0f} s: {num_kills} kills, {seconds:.1f} s, over uninterrupted "
                f"{seconds / whole_seconds:.2f}, Young and Daly {predicted:.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
