"""In-memory bucket reached through its own URLs, and corpora to put there."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runner.data.corpus_index import COMPLETION_DTYPE, ENDS_DTYPE, INDEX, CorpusIndex, CorpusShard
from runner.storage import LocalStore, TransientError, Version
from runner.storage.bucket import BucketStore
from tests.support.memory_bucket import MemoryDriver

URL = "s3://bkt/corpus"


class CountingDriver(MemoryDriver):
    """A driver that records the (key, start, stop) of each ranged read in `ranges`."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[str, int, int]] = []

    def get_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        self.ranges.append((key, start, stop))
        return super().get_range(key, start, stop, version)

    @property
    def bytes_fetched(self) -> int:
        return sum(stop - start for _, start, stop in self.ranges)


def make_failing_callback(rate: float) -> Callable[[str, str], None]:
    """Return a driver callback that fails a share of the requests, the same ones in each run."""
    chance = random.Random(0)

    def before(verb: str, key: str) -> None:
        if chance.random() < rate:
            raise TransientError("503 Slow Down")

    return before


def put_in_bucket(monkeypatch: pytest.MonkeyPatch, directory: Path, driver: Any = None) -> Any:
    """Copy the files of `directory` to URL in an in-memory bucket, by default a `CountingDriver`; return its driver."""
    driver = driver or CountingDriver()
    serve_from(monkeypatch, driver)
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            driver.put(f"corpus/{path.relative_to(directory).as_posix()}", path.read_bytes(), None)
    return driver


def serve_from(monkeypatch: pytest.MonkeyPatch, driver: MemoryDriver) -> None:
    """Serve every URL of `bkt` from the in-memory bucket, without waiting between retries."""

    def open_bucket(url: str, *_: str) -> BucketStore:
        return BucketStore(url.rstrip("/"), url.rstrip("/").partition("://")[2].partition("/")[2], driver)

    monkeypatch.setattr("runner.storage.url._open_bucket", open_bucket)
    monkeypatch.setattr("runner.storage.store.FIRST_WAIT_SECONDS", 0.0)


def write_corpus(
    directory: Path,
    shards: Sequence[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    vocabulary_size: int = 1 << 16,
    change: Callable[[CorpusIndex], CorpusIndex] = lambda index: index,
    marks_of: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Path:
    """Write shards of documents and their index; `marks_of` returns the completion mask of an array of ids."""
    store, entries = LocalStore(directory), []
    for number, documents in enumerate(shards):
        ids = np.concatenate([np.empty(0, dtype), *(np.asarray(document, dtype) for document in documents)])
        ids = ids.astype(np.dtype(dtype).newbyteorder("<"))
        ends = np.cumsum([len(document) for document in documents]).astype(ENDS_DTYPE)
        store.write(f"{number:05}.bin", ids.tobytes())
        store.write(f"{number:05}.ends", ends.tobytes())
        answers = None if marks_of is None else marks_of(ids).astype(COMPLETION_DTYPE)
        if answers is not None:
            store.write(f"{number:05}.answers", answers.tobytes())
        entries.append(CorpusShard.from_arrays(f"{number:05}", ids, ends, answers))
    index = change(CorpusIndex(dtype, vocabulary_size, {"kind": "bytes"}, None, tuple(entries)))
    store.write(INDEX, index.encode())
    return directory


def make_random_shards(
    sizes: Sequence[Sequence[int]], vocabulary_size: int = 1000, seed: int = 0
) -> list[list[list[int]]]:
    """Return shards of documents of the given sizes with random ids."""
    random = np.random.default_rng(seed)
    return [[random.integers(0, vocabulary_size, size).tolist() for size in shard] for shard in sizes]
