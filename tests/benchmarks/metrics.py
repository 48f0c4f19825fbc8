"""What a row, a save and a start cost in a run that has many rows already, on a disk and in a bucket in memory.

    python -m tests.benchmarks.metrics [--rows 1000 100000 1000000]

A bucket's rows were written as one object by an earlier version: the first start makes parts of them, the second is one
of a run that has them. Times are of this process alone: a real bucket adds the time of its calls and of their bytes.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.metrics.file import MetricsFile, open_metrics_file
from runner.run.fence import Fence
from runner.storage import BackgroundWriter, LocalStore, Store, encode_line
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

NUM_MEASURED = 300


def row(step: int) -> dict[str, Any]:
    """As long as a real one."""
    return {
        "step": step,
        "train/loss": 3.0 + 1 / (step + 1),
        "train/grad_norm": 0.5 + 1 / (step + 3),
        "train/learning_rate": 1e-3 / (step + 7),
        "train/tokens": step * 524_288,
        "perf/tokens_per_second": 1e6 / (step + 1) + 1 / 3,
        "perf/mfu": 0.4 + 1 / (step + 9),
    }


class Quiet(BackgroundWriter):
    """Sends nothing by itself, so that what a row costs is measured where it is sent."""

    def mark(self, name: str, send: Callable[[], None]) -> None:
        """Nothing."""


def start(store: Store, num_rows: int) -> tuple[MetricsFile, float]:
    """The metrics of a new attempt that restores the newest step, and how many seconds that takes."""
    fence = Fence(store)
    fence.claim()
    metrics = open_metrics_file(store, Quiet(), fence)
    started = time.perf_counter()
    assert metrics.rewind(num_rows) is not None
    return metrics, time.perf_counter() - started


def median_microseconds(act: Callable[[int], Any]) -> float:
    """Of so many calls."""
    seconds = []
    for number in range(NUM_MEASURED):
        started = time.perf_counter()
        act(number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def measure(name: str, store: Store, num_rows: int, sent: list[int]) -> None:
    """Print a line for each start."""
    for _ in range(2 if store.root is None else 1):
        metrics, start_seconds = start(store, num_rows)
        sent.clear()

        def add(number: int, metrics: MetricsFile = metrics) -> None:
            metrics.append(row(num_rows + 1 + number))

        def add_and_sync(number: int, metrics: MetricsFile = metrics) -> None:
            metrics.append(row(num_rows + NUM_MEASURED + 1 + number))
            metrics.sync()

        append = median_microseconds(add)
        metrics.sync()
        sync = median_microseconds(add_and_sync)
        save = median_microseconds(lambda _, metrics=metrics: (metrics.get_newest(), metrics.get_tail().encode()))
        largest = f", at most {max(sent):,} bytes sent" if sent else ""
        print(
            f"{name}, {num_rows:,} rows: a row {append:.0f} us, one made durable {sync:.0f} us{largest}; "
            f"what a save needs {save:.0f} us; a start {start_seconds:.2f} s",
            flush=True,
        )


def main() -> None:
    """Measure on both, for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    for num_rows in parser.parse_args().rows:
        content = b"".join(encode_line(row(step)) for step in range(1, num_rows + 1))
        with tempfile.TemporaryDirectory() as directory:
            disk = LocalStore(Path(directory))
            disk.write("metrics.jsonl", content)
            measure("disk", disk, num_rows, [])
        driver, sent = MemoryDriver(), list[int]()
        put = driver.put
        driver.put = lambda key, content, version, put=put, sent=sent: (  # type: ignore[method-assign,misc]
            sent.append(len(content)) or put(key, content, version)
        )
        bucket = make_memory_bucket(driver)
        bucket.write("metrics.jsonl", content)
        del content
        measure("bucket", bucket, num_rows, sent)
        print(f"bucket, {num_rows:,} rows: {len(driver.objects)} objects", flush=True)


if __name__ == "__main__":
    main()
