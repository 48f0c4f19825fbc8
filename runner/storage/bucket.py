"""A store in a bucket: every call has a deadline, is tried again when the failure is transient, and never in between.

A driver speaks one service's protocol through its own client. It turns that client's errors into those of the
operating system, `TransientError` among them; the client's own retries are off, so that the deadline here is the truth.

Keeps growing files of a bucket up to date from one background thread, so that nobody waits for the network.

An object cannot be appended to. What grows is therefore written anew, whole, each time it has changed: the newest
content wins, and content that is overtaken is never sent. A failure is kept for `flush` to raise, said once, and tried
again.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from runner.console import warn
from runner.storage.store import (
    ABSENT,
    ChangedError,
    FileInfo,
    TransientError,
    Version,
    compute_crc32c,
    retry_with_backoff,
)

PERIOD_SECONDS = 1.0


class BackgroundWriter:
    """Objects by name, each with a function that writes its newest content. Thread-safe."""

    def __init__(self) -> None:
        self._changed: dict[str, Callable[[], None]] = {}
        self._condition = threading.Condition()
        self._sending = threading.Lock()
        self._warned = False
        self._thread: threading.Thread | None = None

    def mark(self, name: str, send: Callable[[], None]) -> None:
        """Have `send` called soon: it writes what `name` should hold, and may raise `OSError`."""
        with self._condition:
            self._changed[name] = send
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="background writer", daemon=True)
                self._thread.start()
            self._condition.notify()

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._changed)
            try:
                self.flush()
                self._warned = False
            except OSError as error:
                if not self._warned:
                    warn(f"cannot be written, will be tried again: {error}")
                self._warned = True
            time.sleep(PERIOD_SECONDS)

    def drain(self, seconds: float) -> None:
        """Before the end of the process: give what has changed some seconds to arrive. Never raises."""

        def send() -> None:
            with contextlib.suppress(OSError):
                self.flush()

        thread = threading.Thread(target=send, name="drain", daemon=True)
        thread.start()
        thread.join(seconds)

    def flush(self) -> None:
        """Send what has changed, now, and wait. Raises the first `OSError`; what was not sent is tried again later."""
        with self._sending:
            with self._condition:
                changed, self._changed = self._changed, {}
            first: OSError | None = None
            for name, send in changed.items():
                try:
                    send()
                except OSError as error:
                    first = first or error
                    with self._condition:
                        self._changed.setdefault(name, send)
            if first is not None:
                raise first


CALL_SECONDS = 120.0
TRY_SECONDS = 30.0  # without a byte, one try is given up
CONNECT_SECONDS = 10.0
NUM_CONNECTIONS = 16
_NUM_DELETERS = 8


class ObjectInfo(NamedTuple):
    """What a listing says of one object; a name that ends in `/` stands for all that is below it."""

    key: str
    size: int
    version: Version = ABSENT
    crc32c: str | None = None


class Driver(Protocol):
    """One service. Keys are whole, without the bucket. Every call is one try."""

    def get(self, key: str) -> tuple[bytes, Version]:
        """Content and version."""

    def get_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes `start .. stop`, `start < stop`. Raises `FileExistsError` if the present version is another one."""

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        """Write if the present version is `version`, None for any; else raise `FileExistsError`."""

    def put_file(self, key: str, source: Path) -> None:
        """Write a file, in parallel parts where the service can."""

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`; with a delimiter, no deeper than it."""

    def crc32c(self, key: str) -> str | None:
        """The digest that the service reports, None if it reports none. Raises `FileNotFoundError`."""

    def copy(self, key: str, target: str) -> None:
        """Copy an object within the bucket, without reading it."""

    def delete(self, key: str) -> None:
        """Delete; one that is gone already is fine."""


class BucketStore:
    """Everything below one prefix of a bucket."""

    root = None

    def __init__(self, url: str, prefix: str, driver: Driver):
        self.url = url
        self._prefix = prefix
        self._driver = driver

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _below(self, prefix: str) -> str:
        return f"{self._key(prefix)}/".lstrip("/") if prefix else f"{self._prefix}/".lstrip("/")

    def _what(self, verb: str, name: str) -> str:
        return f"{verb} {self.url}/{name}"

    def read(self, name: str) -> bytes:
        """See `Store`."""
        return retry_with_backoff(
            lambda _: self._driver.get(self._key(name))[0], self._what("read", name), CALL_SECONDS
        )

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        """See `Store`."""
        try:
            return retry_with_backoff(
                lambda _: self._driver.get(self._key(name)), self._what("read", name), CALL_SECONDS
            )
        except FileNotFoundError:
            return b"", ABSENT

    def read_range(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """See `Store`."""
        key, what = self._key(name), self._what("read", name)

        def act(_: int) -> bytes:
            try:
                content = self._driver.get_range(key, start, stop, version)
            except FileExistsError as error:
                raise ChangedError(f"{self.url}/{name} is no longer the object that it was") from error
            if len(content) != stop - start:
                raise TransientError(f"{key}: {len(content)} bytes came, needs {stop - start}")
            return content

        return retry_with_backoff(act, what, CALL_SECONDS) if start < stop else b""

    def write(self, name: str, content: bytes) -> None:
        """See `Store`."""
        retry_with_backoff(
            lambda _: self._driver.put(self._key(name), content, None), self._what("write", name), CALL_SECONDS
        )

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        """See `Store`. `content` must be this writer's alone: after a try whose answer was lost it tells who won."""

        def act(earlier_tries: int) -> Version:
            try:
                return self._driver.put(self._key(name), content, version)
            except FileExistsError:
                if earlier_tries:
                    present, present_version = self._driver.get(self._key(name))
                    if present == content:
                        return present_version
                raise

        return retry_with_backoff(act, self._what("write", name), CALL_SECONDS)

    def exists(self, name: str) -> bool:
        """See `Store`."""
        key = self._key(name)
        return any(entry.key == key for entry in self._list(key, "/"))

    def list_names(self, prefix: str) -> list[str]:
        """See `Store`."""
        start = self._below(prefix)
        return [entry.key[len(start) :].rstrip("/") for entry in self._list(start, "/")]

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """See `Store`."""
        start = self._below(prefix)
        return dict(sorted((entry.key[len(start) :], entry.size) for entry in self._list(start, "")))

    def list_files(self, start: str) -> dict[str, FileInfo]:
        """See `Store`."""
        top = self._below("")
        found = self._list(top + start, "")
        return dict(sorted((entry.key[len(top) :], FileInfo(*entry[1:])) for entry in found))

    def _list(self, prefix: str, delimiter: str) -> list[ObjectInfo]:
        return retry_with_backoff(
            lambda _: list(self._driver.list(prefix, delimiter)), f"list {self.url} below {prefix}", CALL_SECONDS
        )

    def compute_digest(self, name: str) -> str:
        """See `Store`."""
        reported = retry_with_backoff(
            lambda _: self._driver.crc32c(self._key(name)), self._what("look at", name), CALL_SECONDS
        )
        return compute_crc32c(self.read(name)) if reported is None else reported

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        """See `Store`."""
        retry_with_backoff(
            lambda _: self._driver.put_file(self._key(name), source), self._what("write", name), deadline_seconds
        )

    def move_tree(self, source: str, target: str) -> None:
        """See `Store`."""

        def move(name: str) -> None:
            old, new = f"{source}/{name}", f"{target}/{name}"
            retry_with_backoff(
                lambda _: self._driver.copy(self._key(old), self._key(new)), self._what("copy", old), CALL_SECONDS
            )
            self.remove(old)

        with ThreadPoolExecutor(_NUM_DELETERS, thread_name_prefix="move") as pool:
            list(pool.map(move, self.list_sizes(source)))

    def remove(self, name: str) -> None:
        """See `Store`."""
        retry_with_backoff(lambda _: self._driver.delete(self._key(name)), self._what("delete", name), CALL_SECONDS)

    def remove_tree(self, prefix: str) -> None:
        """See `Store`."""
        with ThreadPoolExecutor(_NUM_DELETERS, thread_name_prefix="delete") as pool:
            list(pool.map(lambda name: self.remove(f"{prefix}/{name}"), self.list_sizes(prefix)))
