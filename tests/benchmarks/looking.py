"""What a run that trains notices of those who look at it: its steps a second beside each, over those alone.

The run has one core of its own, and whoever looks the others. Windows of some seconds with a looker and without one
take turns; in a window with one its command is started again whenever it has ended.

    python -m tests.benchmarks.looking [--rounds 5] [--seconds 10] [--lookers sample evaluate]
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
LOOKERS = {
    "sample": ["sample", "{directory}", "--tokens", "200"],
    "evaluate": ["evaluate", "{directory}"],
    "export": ["export", "{directory}", "-o", "{directory}.export"],
    "checkpoints": ["checkpoints", "{directory}", "--deep"],
}


@contextlib.contextmanager
def training(directory: Path, core: int) -> Iterator[Path]:
    """A run on one core that does not end by itself; its rows, one a step."""
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
        command, stdout=subprocess.DEVNULL, preexec_fn=lambda: os.sched_setaffinity(0, {core}), env=environment()
    )
    try:
        while not list(directory.glob("checkpoints/*/manifest.json")):
            assert process.poll() is None, "the run has ended"
            time.sleep(0.2)
        yield directory / "metrics.jsonl"
    finally:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """This one's, for a CPU."""
    return os.environ | {"JAX_PLATFORMS": "cpu"}


def steps_a_second(rows: Path, seconds: float, words: list[str] | None, cores: set[int]) -> float:
    """Steps that the run takes in a window beside `python -m runner WORDS`, over and over; None: beside nobody."""
    looker: subprocess.Popen[bytes] | None = None
    before, began = count(rows), time.perf_counter()
    while time.perf_counter() - began < seconds:
        if words is not None and (looker is None or looker.poll() is not None):
            assert looker is None or looker.returncode == 0, words
            subprocess.run(["rm", "-rf", f"{rows.parent}.export"], check=True)
            looker = subprocess.Popen(
                [sys.executable, "-m", "runner", *words],
                stdout=subprocess.DEVNULL,
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
                env=environment(),
            )
        time.sleep(0.05)
    after, ended = count(rows), time.perf_counter()
    if looker is not None:
        looker.kill()
        looker.wait()
    return (after - before) / (ended - began)


def count(rows: Path) -> int:
    """Rows so far."""
    return rows.read_bytes().count(b"\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--lookers", nargs="+", default=list(LOOKERS), choices=list(LOOKERS))
    parsed = parser.parse_args()
    core, *others = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as scratch, training(Path(scratch) / "run", core) as rows:
        ratios: dict[str, list[float]] = {name: [] for name in parsed.lookers}
        for _ in range(parsed.rounds):
            for name in parsed.lookers:
                words = [word.format(directory=rows.parent) for word in LOOKERS[name]]
                alone = steps_a_second(rows, parsed.seconds, None, set(others))
                ratios[name].append(steps_a_second(rows, parsed.seconds, words, set(others)) / alone)
    for name, found in ratios.items():
        spread = f"{min(found):.3f}-{max(found):.3f}"
        print(f"{name}: steps a second over those alone {statistics.median(found):.3f} ({spread})")


if __name__ == "__main__":
    main()
