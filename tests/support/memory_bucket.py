"""In-memory bucket: the real `BucketStore` over a driver that keeps a dict and can inject failures."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from runner.storage.bucket import BucketStore, ObjectInfo
from runner.storage.store import ABSENT, Version, compute_crc32c


class MemoryDriver:
    """Bucket driver with versioned objects in a dict; `before` is called with (verb, key) and may raise."""

    batch_size = 1000

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, Version]] = {}
        self.before: Callable[[str, str], None] = lambda verb, key: None
        self.reports_digests = True
        self._lock = threading.RLock()
        self._versions = itertools.count(1)

    def get(self, key: str) -> tuple[bytes, Version]:
        self.before("get", key)
        with self._lock:
            if key not in self.objects:
                raise FileNotFoundError(key)
            return self.objects[key]

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        self.before("get", key)
        with self._lock:
            if key not in self.objects:
                raise FileNotFoundError(key)
            content, present = self.objects[key]
            if version not in (None, present):
                raise FileExistsError(key)
        return content[start:stop]

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        self.before("put", key)
        with self._lock:
            present = self.objects.get(key, (b"", ABSENT))[1]
            if version is not None and version != present:
                raise FileExistsError(key)
            self.objects[key] = (bytes(content), str(next(self._versions)))
            return self.objects[key][1]

    def put_file(self, key: str, source: Path) -> None:
        self.put(key, source.read_bytes(), None)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        self.before("list", prefix)
        with self._lock:
            found = {key: value for key, value in self.objects.items() if key.startswith(prefix)}
        entries = set()
        for key, (content, version) in found.items():
            inner, deeper, _ = key[len(prefix) :].partition(delimiter) if delimiter else (key, "", "")
            digest = compute_crc32c(content) if self.reports_digests and not deeper else None
            entries.add(
                ObjectInfo(prefix + inner + "/", 0) if deeper else ObjectInfo(key, len(content), version, digest)
            )
        yield from entries

    def crc32c(self, key: str) -> str | None:
        return compute_crc32c(self.get(key)[0]) if self.reports_digests else None

    def delete(self, key: str) -> None:
        self.before("delete", key)
        with self._lock:
            self.objects.pop(key, None)

    def delete_batch(self, keys: Sequence[str]) -> None:
        self.before("delete_batch", keys[0])
        with self._lock:
            for key in keys:
                self.objects.pop(key, None)


def make_memory_bucket(driver: MemoryDriver | None = None) -> BucketStore:
    return BucketStore("mem://bucket/run", "run", driver or MemoryDriver())


class MemoryLog:
    """In-memory `JsonlLog`, optionally in a list shared with a reader."""

    def __init__(self, rows: list[dict[str, Any]] | None = None):
        self.rows = [] if rows is None else rows

    def append(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

    def flush(self) -> None:
        """Do nothing, since rows are never buffered."""
