"""Store in a bucket, and the background writer of growing files.

A `Driver` speaks the protocol of one service through the service's own client. It turns the errors of that client into
those of the operating system, `TransientError` among them. The retries of the clients are switched off: `BucketStore`
gives every call one deadline and tries again with exponential backoff until then, only after a transient failure.

An object cannot be appended to, so a growing file is written again as a whole each time it has changed.
`BackgroundWriter` does this from one thread, so that no other thread waits for the network: the newest content wins,
and content that has been overtaken is never sent. A failed write is printed once and tried again; `flush` raises the
error.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

from runner.console import warn
from runner.errors import StorageError
from runner.storage.store import (
    ABSENT,
    ChangedError,
    DeniedError,
    FileInfo,
    Result,
    TransientError,
    Version,
    compute_crc32c,
    retry_with_backoff,
    run_in_parallel,
)

CALL_SECONDS = 120.0  # deadline of a call, with all its tries
TRY_SECONDS = 30.0  # a try is abandoned when no byte has arrived for so long
CONNECT_SECONDS = 10.0
PERIOD_SECONDS = 1.0  # between two writes of the background writer
IDLE_SECONDS = 10.0  # after which its thread ends


@contextlib.contextmanager
def limit_call_seconds(seconds: float) -> Iterator[None]:
    """Set the deadline of all calls inside the context, for a command whose user waits for a result."""
    global CALL_SECONDS
    before, CALL_SECONDS = CALL_SECONDS, seconds
    try:
        yield
    finally:
        CALL_SECONDS = before


class ObjectInfo(NamedTuple):
    """Entry of a listing. A key that ends in `/` stands for everything below it."""

    key: str
    size: int
    version: Version = ABSENT
    crc32c: str | None = None


class Driver(Protocol):
    """Client of one service. Keys are whole, without the bucket. Every call is a single try.

    Attributes:
        batch_size: largest number of keys of a `delete_batch`; 1 if the service has no such call.
    """

    batch_size: int

    def get(self, key: str) -> tuple[bytes, Version]:
        """Return content and version of an object."""

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        """Return bytes `start .. stop`, not empty. Raises `FileExistsError` unless `version` is present (None: any)."""

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        """Write an object if its present version is `version`, or any if that is None; return the new version.

        Raises `FileExistsError` if the present version is another one.
        """

    def put_file(self, key: str, source: Path) -> None:
        """Write an object from a local file, in parallel parts where the service can."""

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        """Iterate over the objects whose key begins with `prefix`, not deeper than the delimiter if there is one."""

    def crc32c(self, key: str) -> str | None:
        """Return the CRC-32C that the service reports, None if it reports none. Raises `FileNotFoundError`."""

    def delete(self, key: str) -> None:
        """Delete an object. One that is already gone is fine."""

    def delete_batch(self, keys: Sequence[str]) -> None:
        """Delete several objects with one call. Raises an error, after all are tried, if one cannot be deleted."""


def make_error(status: int | None, message: str) -> OSError:
    """Return the error of the operating system for the HTTP status with which a service refuses a call."""
    status = int(status or 0)
    if status == 404:
        return FileNotFoundError(message)
    if status == 412:  # a condition does not hold
        return FileExistsError(message)
    if status in (401, 403):
        return DeniedError(message)
    if status in (408, 429) or (status >= 500 and status != 501):  # 501: the service has no such call
        return TransientError(message)
    return OSError(message)


class BucketStore:
    """`Store` of everything below one prefix of a bucket."""

    root = None

    def __init__(self, url: str, prefix: str, driver: Driver):
        self.url = url
        self._prefix = prefix
        self._driver = driver

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _key_below(self, prefix: str) -> str:
        return f"{self._key(prefix)}/".lstrip("/") if prefix else f"{self._prefix}/".lstrip("/")

    def _retry(self, verb: str, name: str, act: Callable[[int], Result]) -> Result:
        return retry_with_backoff(act, f"{verb} {self.url}/{name}", CALL_SECONDS)

    def read(self, name: str) -> bytes:
        return self._retry("read", name, lambda _: self._driver.get(self._key(name))[0])

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        try:
            return self._retry("read", name, lambda _: self._driver.get(self._key(name)))
        except FileNotFoundError:
            return b"", ABSENT

    def read_range(self, name: str, start: int, stop: int, version: Version | None) -> bytes:
        key = self._key(name)

        def act(_: int) -> bytes:
            try:
                content = self._driver.get_range(key, start, stop, version)
            except FileExistsError as error:
                raise ChangedError(f"{self.url}/{name} is no longer the object that it was") from error
            # A connection that breaks may end a body early without an error of the client.
            if len(content) != stop - start:
                raise TransientError(f"{key}: {len(content)} bytes came, needs {stop - start}")
            return content

        return self._retry("read", name, act) if start < stop else b""

    def write(self, name: str, content: bytes) -> None:
        self._retry("write", name, lambda _: self._driver.put(self._key(name), content, None))

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        """Replace `name` only if it has `version`; return the new version.

        `content` must be unique to this writer: if the answer to a try is lost, the content shows which writer
        succeeded.
        """

        def act(num_earlier_tries: int) -> Version:
            try:
                return self._driver.put(self._key(name), content, version)
            except FileExistsError:
                # An earlier try may have succeeded although its answer was lost. Then this writer has succeeded.
                if num_earlier_tries:
                    present, present_version = self._driver.get(self._key(name))
                    if present == content:
                        return present_version
                raise

        return self._retry("write", name, act)

    def exists(self, name: str) -> bool:
        key = self._key(name)
        # A listing also has longer keys that begin in the same way.
        return any(entry.key == key for entry in self._list(key, "/"))

    def list_names(self, prefix: str) -> list[str]:
        start = self._key_below(prefix)
        return [entry.key[len(start) :].rstrip("/") for entry in self._list(start, "/")]

    def list_sizes(self, prefix: str) -> dict[str, int]:
        start = self._key_below(prefix)
        return dict(sorted((entry.key[len(start) :], entry.size) for entry in self._list(start, "")))

    def list_files(self, start: str) -> dict[str, FileInfo]:
        top = self._key_below("")
        found = self._list(top + start, "")
        return dict(sorted((entry.key[len(top) :], FileInfo(*entry[1:])) for entry in found))

    def _list(self, prefix: str, delimiter: str) -> list[ObjectInfo]:
        # A listing is read to its end inside one try, so that an error on a later page does not leave a partial result.
        return retry_with_backoff(
            lambda _: list(self._driver.list(prefix, delimiter)), f"list {self.url} below {prefix}", CALL_SECONDS
        )

    def compute_digest(self, name: str) -> str:
        # Services that report a digest of another kind report None here.
        reported = self._retry("look at", name, lambda _: self._driver.crc32c(self._key(name)))
        return compute_crc32c(self.read(name)) if reported is None else reported

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        retry_with_backoff(
            lambda _: self._driver.put_file(self._key(name), source), f"write {self.url}/{name}", deadline_seconds
        )

    def remove(self, name: str) -> None:
        self._retry("delete", name, lambda _: self._driver.delete(self._key(name)))

    def remove_tree(self, prefix: str) -> None:
        names = [f"{prefix}/{name}" for name in self.list_sizes(prefix)]
        size = self._driver.batch_size
        batches = [names[start : start + size] for start in range(0, len(names), size)]
        run_in_parallel([partial(self._remove_batch, batch) for batch in batches])

    def _remove_batch(self, names: list[str]) -> None:
        if len(names) > 1:
            what, keys = f"{names[0]} and {len(names) - 1} more", [self._key(name) for name in names]
            try:
                self._retry("delete", what, lambda _: self._driver.delete_batch(keys))
                return
            except StorageError:
                raise
            except OSError:
                pass  # one is already gone, or a service that speaks the protocol of another one lacks this call
        for name in names:
            self.remove(name)


class BackgroundWriter:
    """Writer of named objects from one background thread. Thread-safe.

    Memory holds at most one function for each name. The thread ends after `IDLE_SECONDS` without a change.
    """

    def __init__(self) -> None:
        self._changed: dict[str, Callable[[], None]] = {}
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._has_warned = False
        self._thread: threading.Thread | None = None

    def mark(self, name: str, send: Callable[[], None]) -> None:
        """Schedule a call of `send`, which writes the newest content of `name` and may raise `OSError`."""
        with self._condition:
            self._changed[name] = send
            if self._thread is None:
                # A daemon thread lets the process end while the bucket is down; `drain` gives it some seconds before.
                self._thread = threading.Thread(target=self._work, name="background writer", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                if not self._condition.wait_for(lambda: self._changed, IDLE_SECONDS):
                    self._thread = None
                    return
            try:
                self.flush()
                self._has_warned = False
            except OSError as error:
                if not self._has_warned:
                    warn(f"cannot be written, will be tried again: {error}")
                self._has_warned = True
            # However often a file changes, it is written at most once in a period.
            time.sleep(PERIOD_SECONDS)

    def drain(self, seconds: float) -> None:
        """Wait at most some seconds for changed content to arrive, at the end of the process. Never raises."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.flush()

        # The calls of a store may take longer than `seconds`, so they run in a thread that can be left behind.
        thread = threading.Thread(target=send, name="drain", daemon=True)
        thread.start()
        thread.join(seconds)

    def flush(self) -> None:
        """Send everything that has changed and wait for it.

        Raises the first `OSError`. Parts that were not sent stay marked and are sent again later.
        """
        # Two flushes at once could write an older content after a newer one.
        with self._sending:
            with self._condition:
                changed, self._changed = self._changed, {}
            first: OSError | None = None
            for name, send in changed.items():
                try:
                    send()
                except OSError as error:
                    first = first or error
                    # Content that was marked meanwhile is newer and must not be replaced by this one.
                    with self._condition:
                        self._changed.setdefault(name, send)
            if first is not None:
                raise first
