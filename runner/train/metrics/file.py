"""`metrics.jsonl`: the rows of the surviving trajectory, on a disk and in a bucket. Main host only.

The file holds each logged step exactly once, in order, whatever was killed: a row is written before the checkpoint of
its step is committed, and a resumed attempt first drops the rows beyond the checkpoint it restored. What a row or a
save costs, in time and memory, does not depend on how many rows there are; only a start reads them again.
"""

from collections.abc import Iterator
from typing import Protocol

from runner.attempt.fence import Fence
from runner.storage import BackgroundWriter, LocalStore, Store
from runner.train.metrics.bucket import BucketMetrics, read_texts
from runner.train.metrics.disk import NAME, MetricsFile
from runner.train.metrics.line import Line, Tail, surviving
from runner.train.metrics.row import Row


class Metrics(Protocol):
    """The rows of one directory."""

    def rewind(self, step: int, tail: Tail | None = None) -> Row | None:
        """Keep the rows up to `step`, of the file and then of `tail`, and open it for more; the row of `step`."""

    def reaches(self, step: int) -> bool:
        """Whether the file has a row of `step`. Before `rewind`."""

    def append(self, row: Row) -> None:
        """Add one row. Never raises for a store that is full or down: the row is kept, and tried again."""

    def replace_last(self, row: Row) -> None:
        """Write the last row anew, with what was still missing in it."""

    def newest(self) -> Row:
        """The newest row, empty if there is none."""

    def tail(self) -> Tail:
        """The rows that may not be durable yet."""

    def sync(self) -> None:
        """Wait until all rows are durable. Raises `OSError` if they cannot be, `FencedError` if others write them."""

    def close(self) -> None:
        """Release what is open."""


def open_metrics(store: Store, background: BackgroundWriter, fence: Fence) -> Metrics:
    """The metrics of a run's directory, for the attempt that `fence` stands for."""
    if store.root is None:
        return BucketMetrics(store, background, fence)
    return MetricsFile(LocalStore(store.root), fence)


def read_lines(store: Store, step: int | None = None) -> Iterator[Line]:
    """The rows of a run up to `step` (None: all), for who looks at it; each once, in order, and no torn line."""
    texts = read_texts(store) if store.root is None else LocalStore(store.root).lines(NAME)
    return surviving(texts, step)


def read_rows(store: Store) -> list[Row]:
    """All of them, decoded."""
    return [line.row for line in read_lines(store)]
