"""Throughput of a run beside each read-only command (sample, evaluate, ...), relative to the run alone.

The run has one core of its own, and the commands have the others. Windows of some seconds with and without a command
alternate; a command that ends within its window is started again.

    python -m tests.benchmarks.read_only_commands [--rounds 5] [--seconds 10] [--commands sample evaluate]
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

SPEC = "specs/gpt_nano.yaml"
COMMANDS = {
    "sample": ["sample", "{directory}", "--tokens", "200"],
    "evaluate": ["evaluate", "{directory}"],
    "export": ["export", "{directory}", "-o", "{directory}.export"],
    "checkpoints": ["checkpoints", "{directory}", "--deep"],
}


@contextlib.contextmanager
def start_training(directory: Path, core: int) -> Iterator[Path]:
    """Train an endless run on one core inside the context, and yield the path of its metrics, one row per step."""
    options = {
        "directory": directory,
        "config.train.total_steps": 10_000_000,
        "logging.every_steps": 1,
        "config.eval.every_steps": 10_000_000,
        "checkpoint.every_steps": 500,
    }
    sets = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "runner", SPEC, *sets]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}), env=make_environment()
    )
    try:
        while not list(directory.glob("checkpoints/*/manifest.json")):
            assert process.poll() is None, "the run has ended"
            time.sleep(0.2)
        yield directory / "metrics.jsonl"
    finally:
        process.kill()
        process.wait()


def make_environment() -> dict[str, str]:
    """Return the environment of this process with JAX on the CPU."""
    return os.environ | {"JAX_PLATFORMS": "cpu"}


def measure_steps_per_second(rows: Path, seconds: float, words: list[str] | None, cores: set[int]) -> float:
    """Return the run's steps per second in a window in which `python -m runner WORDS`, if given, runs repeatedly."""
    reader: subprocess.Popen[bytes] | None = None
    before, began = count_rows(rows), time.perf_counter()
    while time.perf_counter() - began < seconds:
        if words is not None and (reader is None or reader.poll() is not None):
            assert reader is None or reader.returncode == 0, words
            subprocess.run(["rm", "-rf", f"{rows.parent}.export"], check=True)
            reader = subprocess.Popen(
                [sys.executable, "-m", "runner", *words],
                stdout=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
                env=make_environment(),
            )
        time.sleep(0.05)
    after, ended = count_rows(rows), time.perf_counter()
    if reader is not None:
        reader.kill()
        reader.wait()
    return (after - before) / (ended - began)


def count_rows(rows: Path) -> int:
    """Return the number of rows so far."""
    return rows.read_bytes().count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--commands", nargs="+", default=list(COMMANDS), choices=list(COMMANDS))
    parsed = parser.parse_args()
    core, *others = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch, start_training(Path(scratch) / "run", core) as rows:
        ratios: dict[str, list[float]] = {name: [] for name in parsed.commands}
        for _ in range(parsed.rounds):
            for name in parsed.commands:
                words = [word.format(directory=rows.parent) for word in COMMANDS[name]]
                alone = measure_steps_per_second(rows, parsed.seconds, None, set(others))
                ratios[name].append(measure_steps_per_second(rows, parsed.seconds, words, set(others)) / alone)
    for name, found in ratios.items():
        spread = f"{min(found):.3f}-{max(found):.3f}"
        print(f"{name}: steps/s, relative to the run alone {statistics.median(found):.3f} ({spread})")


if __name__ == "__main__":
    main()
