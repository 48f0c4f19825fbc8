"""The rows of `metrics.jsonl` as they come, on a disk or in a bucket, each read once. For who looks at a living run.

On a disk it goes on behind the last line that it has read, as long as that line still stands there; in a bucket it
reads only the parts that are new. If a resumed attempt has dropped rows, all are read again. Memory holds a line at a
time, or the content of one part.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from runner.storage import GrowingFile, Store
from runner.train.metrics.bucket import decode_parts, read_content
from runner.train.metrics.disk import NAME
from runner.train.metrics.line import surviving
from runner.train.metrics.row import Row


class Fed(NamedTuple):
    """What one reading gives.

    Attributes:
        is_anew: whether what was fed before is void, and `rows` begins with the first.
        rows: that stand for good; to be used up before the next reading. May raise `OSError`.
        newest: the rows after them, which a later reading gives again.
    """

    is_anew: bool
    rows: Iterator[Row]
    newest: list[Row]


class RowFeed(Protocol):
    """The rows of one run."""

    def read(self) -> Fed:
        """What is new since the last reading; nothing where there are no rows yet. Raises `OSError`."""


class DiskFeed:
    """See `RowFeed`."""

    def __init__(self, directory: Path):
        self._file = GrowingFile(directory / NAME)
        self._step = -1

    def read(self) -> Fed:
        """See `RowFeed`."""
        is_anew, lines = self._file.read()
        if is_anew:
            self._step = -1
        return Fed(is_anew, self._rows(lines), [])

    def _rows(self, lines: Iterable[bytes]) -> Iterator[Row]:
        for text in lines:
            for line in surviving([text], beyond=self._step):
                self._step = line.step
                yield line.row


class BucketFeed:
    """See `RowFeed`."""

    def __init__(self, store: Store):
        self._store = store
        self._parts: list[str] = []  # that were read, in order
        self._step = -1

    def read(self) -> Fed:
        """See `RowFeed`."""
        names, content = read_content(self._store, self._parts)
        if names and names[0] in self._parts:
            names = [*self._parts[: self._parts.index(names[0])], *names]
        is_anew = names[: len(self._parts)] != self._parts or not self._parts
        if is_anew:
            self._parts, self._step = [], -1
        sealed = decode_parts(content)
        newest = surviving(content.splitlines(), beyond=sealed[-1].last_step if sealed else -1)
        return Fed(is_anew, self._rows(names[len(self._parts) :]), [line.row for line in newest])

    def _rows(self, names: Iterable[str]) -> Iterator[Row]:
        for name in names:
            for line in surviving(self._store.read(name).splitlines(), beyond=self._step):
                self._step = line.step
                yield line.row
            self._parts.append(name)


def open_feed(store: Store) -> RowFeed:
    """The rows of the run in a directory, on a disk or in a bucket."""
    return BucketFeed(store) if store.root is None else DiskFeed(store.root)
