"""Lines that are only ever appended: one file on a disk, parts of one writer each in a bucket."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from runner.storage.background_writer import BackgroundWriter
from runner.storage.local import LocalStore, append_line
from runner.storage.store import JsonObject, Store, encode_line, parse_lines

PART_BYTES = 1 << 20
NUM_READERS = 16


class Log(Protocol):
    """JSON objects in the order of their appending, by any number of writers."""

    def append(self, row: JsonObject) -> None:
        """Add one row. On a disk it is there on return, in a bucket soon. Raises `OSError`."""


class LocalLog:
    """`<name>.jsonl`, shared by all writers."""

    def __init__(self, store: Store, name: str):
        assert store.root is not None, "a local log needs a disk"
        self._path = store.root / f"{name}.jsonl"

    def append(self, row: JsonObject) -> None:
        """See `Log`."""
        append_line(self._path, encode_line(row))


class BucketLog:
    """`<name>/<writer>.<part>.jsonl`: each writer has parts of its own, and begins a new one when one is large."""

    def __init__(self, store: Store, name: str, writer: str, background: BackgroundWriter):
        self._store, self._background = store, background
        self._stem = f"{name}/{writer}"
        self._lock = threading.Lock()
        self._part = 0
        self._content = b""

    def append(self, row: JsonObject) -> None:
        """See `Log`."""
        with self._lock:
            if len(self._content) > PART_BYTES:
                self._part += 1
                self._content = b""
            self._content += encode_line(row)
            name, content = f"{self._stem}.{self._part:04}.jsonl", self._content
            self._background.mark(name, lambda: self._store.write(name, content))


def open_log(store: Store, name: str, writer: str, background: BackgroundWriter) -> Log:
    """The log `name` for one writer, whose name no other may have."""
    return BucketLog(store, name, writer, background) if store.root is None else LocalLog(store, name)


def read_log(store: Store, name: str) -> list[JsonObject]:
    """All rows of all writers; of several writers by their `time`."""
    rows = list(iterate_log(store, name))
    return sorted(rows, key=_time) if store.root is None else rows


def iterate_log(store: Store, name: str) -> Iterator[JsonObject]:
    """The rows one by one, so that they need not fit into memory: in a bucket those of one writer after another's."""
    if store.root is not None:
        for line in LocalStore(store.root).lines(f"{name}.jsonl"):
            yield from parse_lines(line.rstrip(b"\n"))
        return
    parts = sorted(store.children(name))
    with ThreadPoolExecutor(NUM_READERS) as pool:
        for start in range(0, len(parts), NUM_READERS):
            for content in pool.map(lambda part: store.read(f"{name}/{part}"), parts[start : start + NUM_READERS]):
                yield from parse_lines(content)


def _time(row: JsonObject) -> float:
    """When a row was written; 0 where it does not say."""
    moment = row.get("time")
    return moment if isinstance(moment, int | float) else 0.0
