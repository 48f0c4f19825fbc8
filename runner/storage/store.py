"""Store interface, errors, retries, parallel calls, digests, and JSON files with tables of their keys.

`Store` is the interface to a run's directory, on a disk or in a bucket. Names are relative to the run's directory, with
parts joined by `/`.

Errors are those of the operating system on every kind of store: `FileNotFoundError`, `FileExistsError`,
`PermissionError`, and `TimeoutError` once the deadline of a call is over. A caller therefore handles a full disk and a
bucket that is down in one `except OSError`. An unhandled error ends the run with one line and the exit code
of its second base class: 76 for a `StorageError`, 2 for an `InvalidError`, which only a person can repair.

On a disk, `translate_errors` reduces the errors of the operating system to `FileNotFoundError`, `FileExistsError`,
`WrongKindError`, `ForbiddenError` and `DiskError`; each of them names its path.

The keys of each JSON file are a table (`Key`) next to the code that writes the file. Readers check a file by it
(`validate_record`), `.github/docs/reference` is generated from the tables, and tests compare them with files of real
runs.
"""

import contextlib
import errno
import json
import os
import random
import stat
import threading
import time
import uuid
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar

import google_crc32c

from runner.errors import InvalidError, StorageError

Result = TypeVar("Result")
NUM_REQUESTS = 16  # at the same time; the clients of the cloud services have as many connections
JsonObject = dict[str, Any]
Version = str
ABSENT: Version = ""  # the version of a file that does not exist

TIME_MAX = 253_402_300_799.0  # the last second of the year 9999, in Unix seconds
STEP_MAX = (1 << 53) - 1  # a float holds every step up to this one
INT_MAX = (1 << 63) - 1  # largest whole number of a JSON file
_NESTING_MAX = 64  # levels of lists and objects in a JSON file
FIRST_WAIT_SECONDS = 0.2
_LONGEST_WAIT_SECONDS = 10.0
_FOLDED_BYTES_MAX = 1 << 26  # of files that become one, all of which are in memory


class TransientError(OSError):
    """A failure that may go away by itself: throttling, an overloaded or unreachable store, a broken connection."""


class DeadlineError(StorageError, TimeoutError):
    """A transient failure that did not go away before the deadline."""


class DeniedError(StorageError, PermissionError):
    """A refusal by the store: no permission, or expired credentials."""


class WrongKindError(InvalidError, OSError):
    """A path of another kind than was asked for: a directory, a pipe, a broken link."""


class ForbiddenError(InvalidError, PermissionError):
    """A path that this user may not read or write."""


class DiskError(StorageError):
    """An error of the disk itself: full, broken or unreachable. It says nothing about what is stored there."""


class ChangedError(InvalidError, OSError):
    """A file that no longer has the version that was asked for: replaced, truncated, or gone."""


class FileInfo(NamedTuple):
    """Entry of a listing. `crc32c` is None where the store does not report it."""

    size_bytes: int
    version: Version
    crc32c: str | None = None


class Store(Protocol):
    """One directory and everything below it. Every call blocks and may come from any thread."""

    url: str

    @property
    def root(self) -> Path | None:
        """Path of the directory if it is on a disk, where other libraries may write too; None for a bucket."""

    def read(self, name: str) -> bytes:
        """Return the content of `name`. Raises `FileNotFoundError`."""

    def read_versioned(self, name: str) -> tuple[bytes, Version]:
        """Return the content of `name` and its version, or (b"", ABSENT) if it does not exist."""

    def read_range(self, name: str, start: int, stop: int, version: Version | None) -> bytes:
        """Return bytes `start .. stop` of `name`, which must have the version that `list_files` reported; None for any.

        Raises `ChangedError` if it has another version or ends before `stop`, `FileNotFoundError` if it does not exist;
        in a bucket, an object that is gone may raise either error.
        """

    def write(self, name: str, content: bytes) -> None:
        """Replace `name` by `content` atomically. The content is durable when this returns.

        A reader sees the old content, the new content or no file, never a part.
        """

    def write_if(self, name: str, content: bytes, version: Version) -> Version:
        """Replace `name` like `write`, but only if its present version is `version`; return the new version.

        Of several writers that try at once one succeeds; the others get `FileExistsError`. With ABSENT this creates the
        file.
        """

    def exists(self, name: str) -> bool:
        """Return True if there is anything under `name`."""

    def list_names(self, prefix: str) -> list[str]:
        """Return the names of the files and directories directly below `prefix`, in no order."""

    def list_sizes(self, prefix: str) -> dict[str, int]:
        """Return the size in bytes of every file below `prefix`, by its name relative to `prefix`, sorted."""

    def list_files(self, start: str) -> dict[str, FileInfo]:
        """Return every file at any depth whose name begins with `start`, sorted; in a bucket this is one listing."""

    def compute_digest(self, name: str) -> str:
        """Return the CRC-32C of the content as 8 hexadecimal digits. Reads the content if the store reports none."""

    def upload(self, source: Path, name: str, deadline_seconds: float) -> None:
        """Copy the local file `source` to `name`."""

    def remove(self, name: str) -> None:
        """Delete a file. A file that is already gone is fine."""

    def remove_tree(self, prefix: str) -> None:
        """Delete everything below `prefix`."""


def create_file(store: Store, name: str, content: bytes) -> None:
    """Create `name` atomically and durably. Raises `FileExistsError` if it already exists."""
    store.write_if(name, content, ABSENT)


def probe_store(store: Store) -> None:
    """Write, read and delete a small file. Raises `InvalidError` with the reason if that is not possible."""
    # A unique name: several jobs may probe one prefix at the same time.
    name, content = f".probe.{uuid.uuid4().hex[:8]}", b"may this run write here?\n"
    try:
        store.write(name, content)
        if store.read(name) != content:
            raise InvalidError(f"{store.url} does not give back what was written")
        store.remove(name)
    # A write creates missing directories, so only a missing bucket raises this error.
    except FileNotFoundError as error:
        raise InvalidError(f"{store.url} cannot be written: the bucket does not exist ({error})") from error
    except PermissionError as error:
        raise InvalidError(f"{store.url} cannot be written: no permission ({error})") from error


# Retries.


def retry_with_backoff(act: Callable[[int], Result], what: str, deadline_seconds: float) -> Result:
    """Call `act` until it does not raise `TransientError`, with exponential backoff and full jitter.

    Every other error is raised at once: only a transient failure can be cured by trying again. `act` gets the number of
    earlier tries. `what` names the call in the `DeadlineError` that ends them.
    """
    started, longest_wait_seconds, num_tries = time.monotonic(), FIRST_WAIT_SECONDS, 0
    while True:
        try:
            return act(num_tries)
        except TransientError as error:
            num_tries += 1
            # The jitter spreads hosts that failed together, so that they do not come back together.
            wait_seconds = random.uniform(0, longest_wait_seconds)
            if time.monotonic() + wait_seconds - started > deadline_seconds:
                raise DeadlineError(
                    f"{what}: not within {deadline_seconds:.0f} s and {num_tries} tries; the last: {error}"
                ) from error
            time.sleep(wait_seconds)
            longest_wait_seconds = min(2 * longest_wait_seconds, _LONGEST_WAIT_SECONDS)


def run_in_parallel(calls: Sequence[Callable[[], Result]]) -> list[Result]:
    """Return the results of all calls, up to `NUM_REQUESTS` of them running at a time.

    Raises the error of the first call, in the order of `calls`, that failed. The threads are daemons, so that a read
    that hangs cannot keep a dying process alive.
    """
    results: dict[int, Result] = {}
    errors: dict[int, BaseException] = {}
    waiting = iter(range(len(calls)))
    lock = threading.Lock()

    def work() -> None:
        # After the first error the threads take no further calls, so the caller learns of it soon.
        while not errors:
            with lock:
                index = next(waiting, None)
            if index is None:
                return
            try:
                results[index] = calls[index]()
            except BaseException as error:  # noqa: BLE001 - nothing is swallowed: the caller raises it
                errors[index] = error

    threads = [threading.Thread(target=work, name="call", daemon=True) for _ in range(min(NUM_REQUESTS, len(calls)))]
    # A single call needs no thread.
    if len(threads) == 1:
        work()
    else:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[index] for index in range(len(calls))]


def fold_files(
    store: Store,
    folded: str,
    names: Mapping[str, int],
    present: Container[str],
    combine: Callable[[dict[str, bytes]], bytes],
    find_contained: Callable[[dict[str, bytes], bytes], list[str]],
) -> None:
    """Replace files that nobody writes any more by one file `folded`, in two calls, so that nothing is ever missing.

    The first call writes `folded`. A later call deletes the files whose content is in it. A reader that has listed the
    files before the first call has until the second one to read them. Files that have changed in between are kept. A
    kill leaves nothing that the next call does not finish.

    `names` are the files with their sizes; nothing happens if they are larger than `_FOLDED_BYTES_MAX` in total.
    `present` tells whether `folded` exists. `combine` returns the content of `folded`, from contents by name;
    `find_contained` the names of those contents that are in the content of `folded`. Raises `OSError`.
    """
    if not names or sum(names.values()) > _FOLDED_BYTES_MAX:
        return
    contents = dict(zip(names, run_in_parallel([partial(store.read, name) for name in names]), strict=True))
    if folded not in present:
        with contextlib.suppress(FileExistsError):  # An attempt that was suspended may still do the same.
            create_file(store, folded, combine(contents))
        return
    surplus = find_contained(contents, store.read(folded))
    run_in_parallel([partial(store.remove, name) for name in surplus])


# Digests.


def compute_crc32c(content: Any) -> str:
    """Return the CRC-32C of bytes, or of a read-only array of bytes, as 8 hexadecimal digits.

    Object stores report the same digest of their objects.
    """
    return compute_chunked_crc32c([content])


def compute_chunked_crc32c(chunks: Iterable[Any]) -> str:
    """Return the CRC-32C of content that need not be in memory at once, as 8 hexadecimal digits."""
    checksum = google_crc32c.Checksum()
    for chunk in chunks:
        checksum.update(chunk)
    return checksum.hexdigest().decode()


# JSON files.


def encode_json(value: Any) -> bytes:
    """Return `value` as JSON text with a newline, with keys in the order given."""
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(store: Store, name: str) -> JsonObject:
    """Return the JSON object in `name`. Raises `ValueError` if the content is anything else, or incomplete."""
    return parse_json(store.read(name))


def parse_json(content: bytes) -> JsonObject:
    """Return the JSON object in `content`. Raises `ValueError` if the content is anything else."""
    try:
        value = json.loads(content)
    # json raises this, which is no ValueError, for deeply nested text.
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    # Few files have so many brackets, of which most are not inside each other.
    if content.count(b"[") + content.count(b"{") > _NESTING_MAX:
        validate_nesting(value)
    return value


def validate_nesting(value: Any) -> None:
    """Raise `ValueError` if parsed JSON or YAML has more than `_NESTING_MAX` levels.

    It is passed on to functions that recurse, from stacks of any depth.
    """
    inner = [value]
    for _ in range(_NESTING_MAX):
        lists = (each.values() if isinstance(each, dict) else each for each in inner if isinstance(each, dict | list))
        inner = [leaf for leaves in lists for leaf in leaves]
    if any(isinstance(each, dict | list) for each in inner):
        raise ValueError("nested too deeply")


def parse_number(name: str) -> int | None:
    """Return the number in a file name that is a number as the runner writes it; None for other names.

    `7` is a number; `007` and the digits of other scripts are not, since the runner never writes them.
    """
    return int(name) if name.isascii() and name.isdecimal() and (name == "0" or name[0] != "0") else None


# Keys of JSON files.


@dataclass(frozen=True)
class Key:
    """One key of a JSON object."""

    name: str  # its name; `a.b` is the key `b` of the object `a`, `a.*` any key of it
    type: Any  # type of the value as Python reads it; anything that `isinstance` accepts
    meaning: str  # one sentence for the documentation, with the jobs that have the key if not all do
    unit: str = ""  # unit of a number, if it is not part of the name


def validate_record(record: Mapping[str, Any], keys: Iterable[Key], needs: Iterable[str]) -> None:
    """Raise `ValueError` if a JSON object lacks a key of `needs`, or the value of one of `keys` has the wrong type.

    A key below a `*` is required in each object there.
    """
    for name in needs:
        if name not in record:
            raise ValueError(f"the key {name} is missing")
    for key in keys:
        for value in _iterate_values(record, key.name.split("."), key.name, is_required=False):
            if isinstance(value, bool):  # In Python true is a number, in JSON it is not.
                is_valid = key.type is bool
            else:  # JSON writes some floats without a decimal point.
                is_valid = isinstance(value, key.type) or (isinstance(value, int) and isinstance(0.0, key.type))
                # Python reads whole numbers of any size, which neither a float nor an array holds.
                is_valid = is_valid and not (isinstance(value, int) and abs(value) > INT_MAX)
            if not is_valid:
                raise ValueError(f"{key.name} is of another type: {format_value(value)}")


def format_value(value: Any) -> str:
    """Return the beginning of a value of a record, for a message."""
    return repr(str(value)[:60])


def _iterate_values(value: Any, path: Sequence[str], name: str, is_required: bool) -> Iterator[Any]:
    """Iterate over the values of a key, through the objects of a list and the values of a `*`."""
    if not path:
        yield value
    elif isinstance(value, list) and is_required:
        for item in value:
            yield from _iterate_values(item, path, name, is_required)
    elif not isinstance(value, Mapping):
        raise ValueError(f"{name} is missing: {format_value(value)} is not an object")
    elif path[0] == "*":
        for item in value.values():
            yield from _iterate_values(item, path[1:], name, is_required=True)
    elif path[0] in value:
        yield from _iterate_values(value[path[0]], path[1:], name, is_required)
    elif is_required:
        raise ValueError(f"{name} is missing in one of its objects")


# Errors and kinds of files on a disk.

_MISSING_CALL = {errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.ENOTTY}
STALE_TRIES, _STALE_SECONDS = 4, 0.05
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_WRONG_KIND = {
    errno.ENOTDIR: "is below a file",
    errno.EISDIR: "is a directory, needs a file",
    errno.ELOOP: "is a loop of links",
    errno.ENAMETOOLONG: "has a name too long for this disk",
    errno.ENXIO: "is no file",
}


@contextlib.contextmanager
def translate_errors(path: Path) -> Iterator[None]:
    """Turn errors of the operating system about `path` inside the block into errors of this module."""
    try:
        yield
    except (InvalidError, DiskError, FileExistsError):
        raise
    except FileNotFoundError as error:
        # A broken link is an error that the user must fix, whereas a missing file is often expected.
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                raise WrongKindError(f"{link} is a link that leads nowhere") from error
        raise
    except OSError as error:
        # The class decides the exit code: only a person can grant a permission or remove a wrong file, whereas a disk
        # that failed may answer at the next try.
        if error.errno in _FORBIDDEN:
            raise ForbiddenError(f"{path}: {error.strerror}") from error
        if error.errno in _WRONG_KIND:
            raise WrongKindError(f"{path} {_WRONG_KIND[error.errno]}") from error
        raise DiskError(error.errno, error.strerror, str(path)) from error


def find_kind(path: Path) -> str | None:
    """Return `a file`, `a directory`, or the other kind of file at `path`, following links; None if there is nothing.

    Raises the errors of `translate_errors`.
    """
    try:
        with translate_errors(path):
            return _format_kind(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _format_kind(mode: int) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises `WrongKindError` for anything else than a file, without waiting for a pipe."""
    # Without O_NONBLOCK, opening a pipe would wait for a writer, perhaps for ever.
    return open_descriptor(retry_stale(lambda: os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)), path)


def open_descriptor(descriptor: int, path: Path) -> BinaryIO:
    """Return the open descriptor of `path` as a file. Raises `WrongKindError` for anything else, and closes it then."""
    kind = _format_kind(os.fstat(descriptor).st_mode)
    if kind != "a file":
        os.close(descriptor)
        raise WrongKindError(f"{path} is {kind}, needs a file")
    return os.fdopen(descriptor, "rb")


def make_directory(path: Path) -> None:
    """Create a directory and its missing parents durably. Raises `WrongKindError` if something else is in the way."""
    missing: list[Path] = []
    try:
        if not path.is_dir():
            missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise WrongKindError(f"{error.filename} is {find_kind(Path(error.filename))}, needs a directory") from error
    except FileNotFoundError as error:
        first = Path(error.filename)
        if not first.parent.is_dir() or first.is_symlink():
            raise
        # The entries of /proc are made by the kernel alone.
        reason = f"{first.parent} takes no new directories; name a directory on a disk"
        raise WrongKindError(f"{path} cannot be created: {reason}") from error
    for each in missing:
        # A directory that may be entered but not listed cannot be opened, and so not be flushed.
        with contextlib.suppress(PermissionError):
            fsync(each.parent)


def fsync(path: Path, is_strict: bool = False) -> None:
    """Flush a file, or the names in a directory, to the disk.

    A file system that cannot flush directories is accepted unless `is_strict`: there is nothing that could be done.
    """
    descriptor = retry_stale(lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    except OSError as error:
        if is_strict or not is_missing_call(error) or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def is_missing_call(error: OSError) -> bool:
    """Return True if an error may say that the file system does not have a call, and not that it failed."""
    return error.errno in _MISSING_CALL


def retry_stale(act: Callable[[], Result]) -> Result:
    """Call `act`, again if a handle is stale (ESTALE): a file on NFS was replaced while its name was looked up."""
    for _ in range(STALE_TRIES):
        try:
            return act()
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            time.sleep(_STALE_SECONDS)
    return act()
