"""Objects of a bucket, read by exact ranges: through the cache, many requests at a time. Knows no tokens.

An object is read only in the version that the listing at the start has named, so one that is replaced under a running
job is found by the next read.
"""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from runner.data.remote.cache import RangeCache
from runner.data.source import BucketFile
from runner.errors import DataError
from runner.storage import ChangedError, DeniedError, Store

NUM_REQUESTS = 16  # at a time; as many as the clients of the services have connections
REQUEST_BYTES_MAX = 4 << 20

Result = TypeVar("Result")


class ByteRange(NamedTuple):
    """Bytes `start .. stop` of an object."""

    file: BucketFile
    start: int
    stop: int


class BucketReader:
    """Reads objects of one store. Safe to use from several threads."""

    def __init__(self, store: Store, cache: RangeCache) -> None:
        self._store, self._cache = store, cache

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range. Those that touch are fetched in one request.

        Raises `DataError` if an object has changed, is gone or may not be read, `OSError` if the bucket is down.
        """
        found = [self._cache.get(range_.file.versioned_url, range_.start, range_.stop) for range_ in ranges]
        missing = [index for index, content in enumerate(found) if content is None]
        missing.sort(key=lambda index: (ranges[index].file.name, ranges[index].start))
        groups = _touching(ranges, missing)
        for group, content in zip(groups, in_parallel([self._request(ranges, group) for group in groups]), strict=True):
            first = ranges[group[0]].start
            for index in group:
                file, start, stop = ranges[index]
                piece = content[start - first : stop - first]
                self._cache.put(file.versioned_url, start, stop, piece)
                found[index] = piece
        return [content for content in found if content is not None]

    def check(self, files: Sequence[BucketFile], start: str) -> None:
        """Raise `DataError` if an object is another one than at the start, or gone. `start` begins all their names."""
        listing = self._store.listing(start)
        for file in files:
            present = listing.get(file.name)
            if present is None or (present.size_bytes, present.version) != (file.size_bytes, file.version):
                raise changed(file)

    def fetch(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range from the bucket itself, past the cache. Raises as `read` does."""
        return in_parallel([self._request(ranges, [index]) for index in range(len(ranges))])

    def _request(self, ranges: Sequence[ByteRange], group: Sequence[int]) -> Callable[[], bytes]:
        file, start, _ = ranges[group[0]]
        stop = max(ranges[index].stop for index in group)

        def fetch() -> bytes:
            try:
                return self._store.read_range(file.name, start, stop, file.version)
            except (ChangedError, FileNotFoundError) as error:
                raise changed(file) from error
            except DeniedError as error:
                raise DataError(f"{file} cannot be read: no permission ({error})") from error

        return fetch


def changed(file: BucketFile) -> DataError:
    """The error for an object that is no longer what it was."""
    return DataError(f"{file}: changed or gone since the job started; a running job needs its token files unchanged")


def in_parallel(acts: Sequence[Callable[[], Result]]) -> list[Result]:
    """The results of all `acts`, some at a time. Raises what the first that failed has raised.

    The threads are daemons: a read that hangs cannot keep a dying process alive.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    waiting = iter(range(len(acts)))
    taking = threading.Lock()

    def work() -> None:
        while not errors:
            with taking:
                index = next(waiting, None)
            if index is None:
                return
            try:
                results[index] = acts[index]()
            except BaseException as error:  # noqa: BLE001 - nothing is swallowed: the caller raises it
                errors[index] = error

    threads = [threading.Thread(target=work, name="range", daemon=True) for _ in range(min(NUM_REQUESTS, len(acts)))]
    if len(threads) == 1:
        work()
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(acts))]


def _touching(ranges: Sequence[ByteRange], indices: Sequence[int]) -> list[list[int]]:
    """Groups of `indices`, which are sorted by object and start, whose ranges overlap or follow each other."""
    groups: list[list[int]] = []
    first = stop = 0
    for index in indices:
        file, start, end = ranges[index]
        is_same = bool(groups) and ranges[groups[-1][0]].file == file and start <= stop
        if is_same and max(end, stop) - first <= REQUEST_BYTES_MAX:
            groups[-1].append(index)
            stop = max(stop, end)
        else:
            groups.append([index])
            first, stop = start, end
    return groups
