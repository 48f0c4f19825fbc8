"""What a run needs of the place that it writes to, on a disk or in a bucket: the whole surface.

Names are relative to the run's directory, parts joined by `/`. Errors are those of the operating system, wherever it
is: `FileNotFoundError`, `FileExistsError`, `PermissionError`, and `TimeoutError` once a call's deadline is over. A
caller handles a full disk and a bucket that is down in one `except OSError`. What nobody handles ends the run with one
line: with 76, since it is a `StorageError` besides, or, of a disk, with 2, if only a person can mend it (`failure`).

Try again what is transient, with backoff and jitter, until a deadline; nothing else. Knows no store.

What the errors of a disk mean to a run: nothing there, another kind of thing, no permission, or no answer.

Whatever a `LocalStore` raises is `FileNotFoundError`, `FileExistsError` or one of the three here, each of which is an
`OSError` that names its path and ends a run, if nobody handles it, with the right exit code.
"""

import contextlib
import errno
import json
import os
import random
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import google_crc32c

from runner.errors import InvalidError, StorageError

Result = TypeVar("Result")

FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 10.0


class TransientError(OSError):
    """What may go away by itself: a throttled, overloaded or unreachable store, a connection that broke."""


class DeadlineError(StorageError, TimeoutError):
    """What was transient did not go away in time."""


class DeniedError(StorageError, PermissionError):
    """The store refuses: no permission, or credentials that have expired."""


def retry_with_backoff(act: Callable[[int], Result], what: str, deadline_seconds: float) -> Result:
    """Call `act(number of earlier tries)` until it does not raise `TransientError`.

    Waits between tries a random time up to twice the last bound (full jitter). Raises `DeadlineError` when the next try
    could not begin within `deadline_seconds`.
    """
    started, bound_seconds, tries = time.monotonic(), FIRST_WAIT_SECONDS, 0
    while True:
        try:
            return act(tries)
        except TransientError as error:
            tries += 1
            wait_seconds = random.uniform(0, bound_seconds)
            if time.monotonic() + wait_seconds - started > deadline_seconds:
                raise DeadlineError(
                    f"{what}: not within {deadline_seconds:.0f} s and {tries} tries; the last: {error}"
                ) from error
            time.sleep(wait_seconds)
            bound_seconds = min(2 * bound_seconds, LONGEST_WAIT_SECONDS)


_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_KIND = {
    errno.ENOTDIR: "is below a file",
    errno.EISDIR: "is a directory, needs a file",
    errno.ELOOP: "is a loop of links",
    errno.ENAMETOOLONG: "has a name too long for this disk",
    errno.ENXIO: "is no file",
}


class WrongKindError(InvalidError, OSError):
    """What stands there is of another kind than was asked for: a directory, a pipe, a link that leads nowhere."""


class ForbiddenError(InvalidError, PermissionError):
    """This user may not read or write there."""


class DiskError(StorageError):
    """The disk gave an error: it is full, broken or unreachable. That says nothing of what is stored on it."""


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Inside, errors of the operating system about `path` become those of this module."""
    try:
        yield
    except (InvalidError, DiskError, FileExistsError):
        raise
    except FileNotFoundError as error:
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                raise WrongKindError(f"{link} is a link that leads nowhere") from error
        raise
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise ForbiddenError(error.errno, error.strerror, str(path)) from error
        if error.errno in _OTHER_KIND:
            raise WrongKindError(f"{path} {_OTHER_KIND[error.errno]}") from error
        raise DiskError(error.errno, error.strerror, str(path)) from error


def find_kind(path: Path) -> str | None:
    """`a file`, `a directory`, or what else stands at `path`, links followed; None if nothing does.

    Raises `WrongKindError` for a link that cannot be followed, else `ForbiddenError` or `DiskError`.
    """
    try:
        with translate_errors(path):
            return _kind_of_mode(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _kind_of_mode(mode: int) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Raises `WrongKindError` for whatever is none; a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = _kind_of_mode(os.fstat(descriptor).st_mode)
    if kind != "a file":
        os.close(descriptor)
        raise WrongKindError(f"{path} is {kind}, needs a file")
    return os.fdopen(descriptor, "rb")


def make_directory(path: Path) -> None:
    """Create a directory and its parents, where they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise WrongKindError(f"{error.filename} is {find_kind(Path(error.filename))}, needs a directory") from error


JsonObject = dict[str, Any]
Version = str
ABSENT: Version = ""  # the version of what is not there


class ChangedError(InvalidError, OSError):
    """A file is no longer the version that was asked for: replaced, cut, or gone."""


class FileInfo(NamedTuple):
    """What a listing says of one file. `crc32c` is None where the store does not report it."""

    size_bytes: int
    version: Version
    crc32c: str | None = None


class Store(Protocol):
    """One directory and all that is below it. Every call blocks; every call may come from any thread."""

    url: str

    @property
    def root(self) -> Path | None:
        """The directory itself if it is on a disk, where other libraries may write too."""

    def read(self, name: str) -> bytes:
        """The content of `name`. Raises `FileNotFoundError`."""

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        """The content of `name` and its version, (b"", ABSENT) if it is not there."""

    def read_range(self, name: str, start: int, stop: int, version: Version) -> bytes:
        """Bytes `start .. stop` of `name`, which must have this version: see `listing`.

        Raises `ChangedError` if it has another one or ends before `stop`, `FileNotFoundError` if it is not there;
        in a bucket, one that is gone may be either.
        """

    def write(self, name: str, content: bytes) -> None:
        """Replace `name` by `content`: a reader sees the old, the new or nothing, never a part. Durable on return."""

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        """Like `write`, but raises `FileExistsError` unless what is there has this version; the new version.

        Several writers may try at once: one wins. With ABSENT it creates.
        """

    def exists(self, name: str) -> bool:
        """Whether anything is there under `name`."""

    def list_names(self, prefix: str) -> list[str]:
        """Names of what stands directly below `prefix`, files and directories, in no order."""

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """Bytes of every file below `prefix` by its name relative to `prefix`, sorted."""

    def list_files(self, start: str) -> dict[str, FileInfo]:
        """Every file whose name begins with `start`, at any depth, sorted; in a bucket one listing."""

    def compute_digest(self, name: str) -> str:
        """CRC-32C of the content: 8 hexadecimal digits. Reads the content where the store does not report one."""

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        """Copy a file of this machine to `name`."""

    def move_tree(self, source: str, target: str) -> None:
        """Give all that is below `source` a new name. In a bucket, file by file."""

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone already is fine."""

    def remove_tree(self, prefix: str) -> None:
        """Delete all that is below `prefix`."""


def create_file(store: Store, name: str, content: bytes) -> None:
    """Create `name`, atomically and durably. Raises `FileExistsError` if it is there already."""
    store.write_if(name, content, ABSENT)


def probe_store(store: Store) -> None:
    """Write a small file, read it, delete it. Raises `InvalidError` with the reason if that is not allowed."""
    name, content = f".probe.{uuid.uuid4().hex[:8]}", b"may this run write here?\n"
    try:
        store.write(name, content)
        if store.read(name) != content:
            raise InvalidError(f"{store.url} does not give back what was written")
        store.remove(name)
    except FileNotFoundError as error:
        raise InvalidError(f"{store.url} cannot be written: the bucket does not exist ({error})") from error
    except PermissionError as error:
        raise InvalidError(f"{store.url} cannot be written: no permission ({error})") from error


def compute_crc32c(content: Any) -> str:
    """CRC-32C of bytes, or of a read-only array of them: 8 hexadecimal digits, the digest that object stores report."""
    checksum = google_crc32c.Checksum()
    checksum.update(content)
    return checksum.hexdigest().decode()


def encode_json(value: Any) -> bytes:
    """JSON text with a newline, keys in the order given."""
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(store: Store, name: str) -> JsonObject:
    """The JSON object in `name`. Raises `FileNotFoundError`, or `ValueError` if it is not a whole JSON object."""
    return parse_json(store.read(name))


def parse_json(content: bytes) -> JsonObject:
    """The JSON object in `content`. Raises `ValueError` if that is anything else."""
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def parse_number(name: str) -> int | None:
    """The number that a name is, as it was written by the runner: `7`, but neither `007` nor the digits of others."""
    return int(name) if name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0") else None


def encode_line(row: JsonObject) -> bytes:
    """One JSON object as a line."""
    return (json.dumps(row) + "\n").encode()


def parse_lines(content: bytes) -> list[JsonObject]:
    """The JSON objects of a file of lines. A line that is none, such as a torn one, is left out."""
    rows = []
    for line in content.split(b"\n"):
        with contextlib.suppress(ValueError):
            rows.append(parse_json(line))
    return rows
