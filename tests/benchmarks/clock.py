"""Cost of an attempt's clock per step: microseconds of the training thread, with and without a file to persist it.

python -m tests.benchmarks.clock [DIRECTORY]
"""

import sys
import tempfile
import time
from pathlib import Path

from runner.attempts.clock_file import start_clock_file
from runner.console import say
from runner.distributed.clock import Progress
from runner.storage import BackgroundWriter, LocalStore

STEPS = 100_000
ROUNDS = 5


def measure_step_microseconds(directory: Path | None) -> float:
    """Return the CPU time of the clock's calls for one step, as the minimum over rounds."""
    progress, batches = Progress(), iter(lambda: 0, 1)
    if directory is not None:
        (directory / "attempts").mkdir(exist_ok=True)
        start_clock_file(progress.clock, LocalStore(directory), 1, BackgroundWriter())
    found = []
    for _ in range(ROUNDS):
        began = time.thread_time()
        for step in range(STEPS):
            progress.take_batch(batches)
            progress.report_step(step)
        found.append((time.thread_time() - began) / STEPS * 1e6)
    return min(found)


def main(directory: Path) -> None:
    """Print both times."""
    say(f"progress and clock: {measure_step_microseconds(None):.2f} us a step")
    say(f"kept in {directory}: {measure_step_microseconds(directory):.2f} us a step")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
