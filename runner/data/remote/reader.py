"""Objects of a bucket, read by exact ranges: through the cache, many requests at a time.

An object is read only in the version that the listing at the start has named, so one that is replaced under a running
job is found by the next read.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from runner.data.cache import cache_key
from runner.data.reader import ByteRange, Derived, DiskReader, Reader, changed
from runner.data.remote.cache import CacheSettings
from runner.data.remote.copy import Copies
from runner.data.source import BucketFile, BucketFiles, File, SourceFile, SourceFiles, blaming, bucket_file
from runner.errors import DataError
from runner.storage import ChangedError, DeniedError, Store

NUM_REQUESTS = 16  # at a time; as many as the clients of the services have connections
REQUEST_BYTES_MAX = 4 << 20

Result = TypeVar("Result")


def open_reader(source: SourceFiles | BucketFiles, settings: CacheSettings) -> Reader:
    """What reads the files of a source."""
    if isinstance(source, SourceFiles):
        return DiskReader(settings.directory)
    return BucketReader(source.name, source.store, settings)


class BucketReader:
    """Reads objects of one store. Safe to use from several threads."""

    is_remote = True

    def __init__(self, source: str, store: Store, settings: CacheSettings, itemsize: int = 2) -> None:
        """`source` is what `data.source` says; the cache suits rows of ids of `itemsize` bytes."""
        self._source, self._store, self._settings = source, store, settings
        self._cache = settings.open(itemsize)
        self._disk = DiskReader(settings.directory)
        self._copies = Copies(settings.directory, source, settings.max_bytes)

    def for_ids_of(self, itemsize: int) -> "BucketReader":
        """See `Reader`."""
        return BucketReader(self._source, self._store, self._settings, itemsize)

    def read(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """See `Reader`. Ranges of one object that touch are fetched in one request; files that are kept are read."""
        found = [self._at_hand(range_) for range_ in ranges]
        missing = [index for index, content in enumerate(found) if content is None]
        missing.sort(key=lambda index: (str(ranges[index].file), ranges[index].start))
        groups = _touching(ranges, missing)
        requests = [_split(ranges, group) for group in groups]
        contents = iter(self.fetch([request for pieces in requests for request in pieces]))
        for group, pieces in zip(groups, requests, strict=True):
            content, first = b"".join(next(contents) for _ in pieces), ranges[group[0]].start
            for index in group:
                file, start, stop = ranges[index]
                piece = content[start - first : stop - first]
                self._cache.put(_in_bucket(file).versioned_url, start, stop, piece)
                found[index] = piece
        return [content for content in found if content is not None]

    def _at_hand(self, range_: ByteRange) -> bytes | None:
        """The bytes of a range, if they are on this host's disk."""
        if isinstance(range_.file, SourceFile):
            return self._disk.read([range_])[0]
        return self._cache.get(range_.file.versioned_url, range_.start, range_.stop)

    def find(self, places: Sequence[str]) -> list[File | None]:
        """See `Reader`. One listing."""
        top = f"{self._store.url}/"
        names = [place.removeprefix(top) for place in places]
        with blaming(self._source):
            start = os.path.commonprefix(names)  # noqa: RUF071 - of characters: no part of a path
            listing = self._store.listing(start) if names else {}
        return [bucket_file(self._store.url, name, listing[name]) if name in listing else None for name in names]

    def check(self, files: Sequence[File]) -> None:
        """See `Reader`. One listing. What is kept on this host's disk is no longer fetched."""
        objects = [file for file in files if isinstance(file, BucketFile)]
        for present, file in zip(self.find([str(file) for file in objects]), objects, strict=True):
            if present != file:
                raise changed(file)

    def fetch(self, ranges: Sequence[ByteRange]) -> list[bytes]:
        """The bytes of each range from the bucket itself, past the cache. Raises as `read` does."""
        return in_parallel([partial(self._request, *range_) for range_ in ranges])

    def copies(self, files: Sequence[File]) -> list[SourceFile]:
        """See `Reader`."""
        objects = map(_in_bucket, files)
        return self.keep(
            [
                Derived(file, cache_key("copy", [file]), file.size_bytes, partial(self._chunks, file), file.crc32c)
                for file in objects
            ]
        )

    def _chunks(self, file: BucketFile) -> Iterator[bytes]:
        """The whole object."""
        for start in range(0, file.size_bytes, REQUEST_BYTES_MAX):
            yield from self.fetch([ByteRange(file, start, min(start + REQUEST_BYTES_MAX, file.size_bytes))])

    def keep(self, wanted: Sequence[Derived]) -> list[SourceFile]:
        """See `Reader`."""
        if wanted:
            self._copies.make_room(wanted)
        return in_parallel([partial(self._copies.get, derived) for derived in wanted])

    def _request(self, file: File, start: int, stop: int) -> bytes:
        try:
            return self._store.read_range(_in_bucket(file).name, start, stop, _in_bucket(file).version)
        except (ChangedError, FileNotFoundError) as error:
            raise changed(file) from error
        except DeniedError as error:
            raise DataError(f"{file} cannot be read: no permission ({error})") from error


def _in_bucket(file: File) -> BucketFile:
    assert isinstance(file, BucketFile)
    return file


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


def _split(ranges: Sequence[ByteRange], group: Sequence[int]) -> list[ByteRange]:
    """The requests for what a group needs: one, but for a range that is larger than one should be."""
    file, first, stop = ranges[group[0]].file, ranges[group[0]].start, max(ranges[index].stop for index in group)
    return [
        ByteRange(file, start, min(start + REQUEST_BYTES_MAX, stop)) for start in range(first, stop, REQUEST_BYTES_MAX)
    ]
