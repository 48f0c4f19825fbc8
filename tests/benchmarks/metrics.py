"""Cost of a row, a save and a start in a run that already has many rows, on a disk and in an in-memory bucket.

    python -m tests.benchmarks.metrics [--rows 1000 100000 1000000]

In the bucket, the existing rows are one object, as earlier versions wrote them: the first start splits it into parts,
the second finds the parts. Times are those of this process; a real bucket adds the time of its requests.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runner.attempts.fence import Fence
from runner.metrics.file import MetricsFile, open_metrics_file
from runner.storage import BackgroundWriter, LocalStore, Store, encode_line
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

NUM_MEASURED = 300


def make_row(step: int) -> dict[str, Any]:
    """Return a row of realistic length."""
    return {
        "step": step,
        "train/loss": 3.0 + 1 / (step + 1),
        "train/grad_norm": 0.5 + 1 / (step + 3),
        "train/learning_rate": 1e-3 / (step + 7),
        "train/tokens": step * 524_288,
        "perf/tokens_per_second": 1e6 / (step + 1) + 1 / 3,
        "perf/mfu": 0.4 + 1 / (step + 9),
    }


class IdleWriter(BackgroundWriter):
    """Background writer that never sends, so that the cost of a row is measured in the explicit sync."""

    def mark(self, name: str, send: Callable[[], None]) -> None:
        """Do nothing."""


def open_metrics(store: Store, num_rows: int) -> tuple[MetricsFile, float]:
    """Open the metrics of a new attempt that resumes at the newest step, and return the seconds that this takes."""
    fence = Fence(store)
    fence.claim()
    metrics = open_metrics_file(store, IdleWriter(), fence)
    started = time.perf_counter()
    assert metrics.rewind(num_rows) is not None
    return metrics, time.perf_counter() - started


def measure_median_microseconds(act: Callable[[int], Any]) -> float:
    """Return the median microseconds over `NUM_MEASURED` calls."""
    seconds = []
    for number in range(NUM_MEASURED):
        started = time.perf_counter()
        act(number)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds) * 1e6


def measure(name: str, store: Store, num_rows: int, sent: list[int]) -> None:
    """Print the costs for a number of rows, one line per start."""
    for _ in range(2 if store.root is None else 1):
        metrics, start_seconds = open_metrics(store, num_rows)
        sent.clear()

        def add(number: int, metrics: MetricsFile = metrics) -> None:
            metrics.append(make_row(num_rows + 1 + number))

        def add_and_sync(number: int, metrics: MetricsFile = metrics) -> None:
            metrics.append(make_row(num_rows + NUM_MEASURED + 1 + number))
            metrics.sync()

        append = measure_median_microseconds(add)
        metrics.sync()
        sync = measure_median_microseconds(add_and_sync)
        save = measure_median_microseconds(
            lambda _, metrics=metrics: (metrics.get_newest(), metrics.get_tail().encode())
        )
        largest = f", at most {max(sent):,} bytes sent" if sent else ""
        print(
            f"{name}, {num_rows:,} rows: a row {append:.0f} us, a durable one {sync:.0f} us{largest}; "
            f"the metrics of a save {save:.0f} us; a start {start_seconds:.2f} s",
            flush=True,
        )


def main() -> None:
    """Measure disk and bucket for each number of rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000, 100_000, 1_000_000])
    for num_rows in parser.parse_args().rows:
        content = b"".join(encode_line(make_row(step)) for step in range(1, num_rows + 1))
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
