"""Differences between file systems: what a run needs of one, and what it does where a call is missing.

Network and object file systems (gcsfuse, blobfuse, some configurations of Lustre) lack some calls of a local disk. A
missing call is recognised by its error code at each use, so that two directories may differ:

- hard links: `create_once` takes turns by a claim file and renames instead;
- locks (`flock`): `try_lock` says that there is none; an append is one write with `O_APPEND` in either case;
- flush of a directory: `fsync` leaves it out; a name is then as durable as the file system makes it by itself;
- stale handles (ESTALE): `retry_stale` looks the file up again.

Nothing replaces the rest: creation with O_EXCL, rename over a file, rename of a directory with its content, appends,
and the flush of a file. `probe_file_system` tries all of it once for each directory and process, and refuses a
directory where one of these fails.
"""

import contextlib
import errno
import fcntl
import functools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from runner.errors import InvalidError
from runner.storage.store import (
    WrongKindError,
    fsync,
    is_missing_call,
    make_directory,
    open_file,
    retry_stale,
    translate_errors,
)

CLAIM_SECONDS = 10.0  # a claim that does not change for so long is that of a process that was killed
_POLL_SECONDS = 0.05
# A file system without hard links may report that a file has too many.
_NO_LINK = (errno.EMLINK, errno.EXDEV)

Result = TypeVar("Result")


# Creation and locks.


def create_once(temporary: Path, path: Path) -> None:
    """Give a complete file its name `path`, unless something has that name already. Atomic among all processes.

    With hard links the kernel decides. Without them a process first creates `.<name>.claim`, which O_EXCL allows only
    one process, then checks that `path` is free and renames `temporary`. In both cases `path` appears with its whole
    content, and not at all once the directory of `temporary` was renamed. A claim whose process was killed is removed
    by the next process, after `CLAIM_SECONDS`. A process that is suspended for longer than that, exactly between its
    last check and its rename, replaces the file of another. Attempts and commits are safe from that too: attempts by
    the id in their claim (`Fence.check`), commits because a newer attempt has renamed the directory.

    Raises:
        FileExistsError: something has that name.
        FileNotFoundError: `temporary` or the directory is gone.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        if not is_missing_call(error) and error.errno not in _NO_LINK:
            raise
    else:
        return
    with _claim(path) as is_own:
        # In this order: a process that had the claim before may have created the file meanwhile.
        if os.path.lexists(path) or not is_own():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        os.rename(temporary, path)


@contextlib.contextmanager
def take_turns(path: Path) -> Iterator[None]:
    """Exclude other processes that replace `path` on a condition, for as long as the context lasts."""
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        if try_lock(descriptor, fcntl.LOCK_EX):
            yield
        else:
            with _claim(path):
                yield
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, operation: int) -> bool:
    """Lock an open file with `flock`; return False if the file system has no locks.

    Raises:
        BlockingIOError: with `LOCK_NB`, another process holds the lock.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if not is_missing_call(error) and error.errno != errno.ENOLCK:
            raise
        return False
    return True


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[Callable[[], bool]]:
    """Hold the claim of a name, and yield a function that returns True if it is still held."""
    claim, own = path.with_name(f".{path.name}.claim"), uuid.uuid4().hex.encode()
    seen, since = None, time.monotonic()
    while True:
        try:
            descriptor = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            break
        except FileExistsError:
            holder = _read_or_none(claim)
            if holder != seen:
                seen, since = holder, time.monotonic()
            elif time.monotonic() - since > CLAIM_SECONDS:
                claim.unlink(missing_ok=True)
            time.sleep(_POLL_SECONDS)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(own)
        yield lambda: _read_or_none(claim) == own
    finally:
        if _read_or_none(claim) == own:
            claim.unlink(missing_ok=True)


def _read_or_none(path: Path) -> bytes | None:
    try:
        return retry_stale(lambda: _read_whole(path))
    except (FileNotFoundError, WrongKindError):
        return None


def _read_whole(path: Path) -> bytes:
    with open_file(path) as file:
        return file.read()


# Probe.


class FileSystem(NamedTuple):
    """Calls that the file system of a directory has."""

    has_links: bool
    has_locks: bool
    flushes_directories: bool

    def list_missing(self) -> list[str]:
        """Return what is missing, in words."""
        names = ("hard links", "locks", "flushes of directories")
        return [name for name, is_there in zip(names, self, strict=True) if not is_there]


@functools.cache
def probe_file_system(directory: Path) -> FileSystem:
    """Return what the file system of a directory offers. Creates the directory; tried once in each process.

    Raises:
        InvalidError: a run cannot be kept there, whatever is done.
        DiskError, ForbiddenError: the directory cannot be written now, or not by this user.
    """
    with translate_errors(directory):
        make_directory(directory)
        return _probe(directory)


def _probe(directory: Path) -> FileSystem:
    top = directory / f".probe.{uuid.uuid4().hex[:8]}"
    top.mkdir()
    try:
        first, second = top / "first", top / "second"

        def need(what: str, act: Callable[[], bool]) -> None:
            reason = "it did something else"
            try:
                if act():
                    return
            except OSError as error:
                # Another error, such as that of a full disk, says nothing about the kind of the file system.
                if not is_missing_call(error):
                    raise
                reason = error.strerror or str(error)
            raise InvalidError(
                f"{directory}: its file system cannot {what} ({reason}), which a run needs; use a directory on another "
                "one (runner/run/README.md lists what it must offer)"
            )

        need("create a file with O_EXCL", lambda: _create(first, b"1"))
        need("refuse to create a file that exists (O_EXCL)", lambda: not _create(first, b"2"))
        need("flush a file (fsync)", lambda: _flush_file(first))
        need("append to a file", lambda: _append(first, b"2") and _read(first) == b"12")
        need("rename a file over another", lambda: _replace(first, second) and os.listdir(top) == ["second"])
        need("rename a directory", lambda: _rename_directory(top))
        return FileSystem(
            has_links=_has(lambda: os.link(second, first), *_NO_LINK),
            has_locks=_has_locks(second),
            flushes_directories=_has(lambda: fsync(top, is_strict=True)),
        )
    finally:
        shutil.rmtree(top, ignore_errors=True)


def _create(path: Path, content: bytes) -> bool:
    try:
        with retry_stale(lambda: open(path, "xb")) as file:
            file.write(content)
    except FileExistsError:
        return False
    return _read(path) == content


def _read(path: Path) -> bytes:
    return retry_stale(path.read_bytes)


def _flush_file(path: Path) -> bool:
    fsync(path, is_strict=True)
    return True


def _append(path: Path, content: bytes) -> bool:
    descriptor = retry_stale(lambda: os.open(path, os.O_WRONLY | os.O_APPEND))
    try:
        return os.write(descriptor, content) == len(content)
    finally:
        os.close(descriptor)


def _replace(first: Path, second: Path) -> bool:
    retry_stale(lambda: second.write_bytes(b"old"))
    os.replace(first, second)
    return _read(second) == b"12"


def _rename_directory(top: Path) -> bool:
    (top / "old").mkdir()
    retry_stale(lambda: (top / "old" / "file").write_bytes(b"1"))
    os.rename(top / "old", top / "new")
    is_moved = _read(top / "new" / "file") == b"1" and not (top / "old").exists()
    shutil.rmtree(top / "new")
    return is_moved


def _has(act: Callable[[], object], *codes: int) -> bool:
    try:
        act()
    except OSError as error:
        if not is_missing_call(error) and error.errno not in codes:
            raise
        return False
    return True


def _has_locks(path: Path) -> bool:
    """Return True if a whole file can be locked (`flock`), and a range of it (`fcntl`), which libraries use."""
    descriptor = retry_stale(lambda: os.open(path, os.O_RDWR))
    try:
        return try_lock(descriptor, fcntl.LOCK_EX) and _has(
            lambda: fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB), errno.ENOLCK
        )
    finally:
        os.close(descriptor)
