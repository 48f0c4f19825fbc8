"""What the errors of a disk mean to a run: nothing there, another kind of thing, no permission, or no answer.

Whatever a `LocalStore` raises is `FileNotFoundError`, `FileExistsError` or one of the three here, each of which is an
`OSError` that names its path and ends a run, if nobody handles it, with the right exit code.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from runner.errors import InvalidError, StorageError

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_OTHER_KIND = {
    errno.ENOTDIR: "is below a file",
    errno.EISDIR: "is a directory, needs a file",
    errno.ELOOP: "is a loop of links",
    errno.ENAMETOOLONG: "has a name too long for this disk",
    errno.ENXIO: "is no file",
}


class OtherKindError(InvalidError, OSError):
    """What stands there is of another kind than was asked for: a directory, a pipe, a link that leads nowhere."""


class ForbiddenError(InvalidError, PermissionError):
    """This user may not read or write there."""


class DiskError(StorageError):
    """The disk gave an error: it is full, broken or unreachable. That says nothing of what is stored on it."""


@contextlib.contextmanager
def translating(path: Path) -> Iterator[None]:
    """Inside, errors of the operating system about `path` become those of this module."""
    try:
        yield
    except (InvalidError, DiskError, FileExistsError):
        raise
    except FileNotFoundError as error:
        for link in (path, *path.parents):
            if link.is_symlink() and not link.exists():
                raise OtherKindError(f"{link} is a link that leads nowhere") from error
        raise
    except OSError as error:
        if error.errno in _FORBIDDEN:
            raise ForbiddenError(error.errno, error.strerror, str(path)) from error
        if error.errno in _OTHER_KIND:
            raise OtherKindError(f"{path} {_OTHER_KIND[error.errno]}") from error
        raise DiskError(error.errno, error.strerror, str(path)) from error


def kind_of(path: Path) -> str | None:
    """`a file`, `a directory`, or what else stands at `path`, links followed; None if nothing does.

    Raises `OtherKindError` for a link that cannot be followed, else `ForbiddenError` or `DiskError`.
    """
    try:
        with translating(path):
            return _kind_of_mode(path.stat().st_mode)
    except FileNotFoundError:
        return None


def _kind_of_mode(mode: int) -> str:
    kinds = {stat.S_IFREG: "a file", stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def open_file(path: Path) -> BinaryIO:
    """Open a file to read. Raises `OtherKindError` for whatever is none; a pipe is not waited for."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = _kind_of_mode(os.fstat(descriptor).st_mode)
    if kind != "a file":
        os.close(descriptor)
        raise OtherKindError(f"{path} is {kind}, needs a file")
    return os.fdopen(descriptor, "rb")


def make_directory(path: Path) -> None:
    """Create a directory and its parents, where they are missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError as error:
        raise OtherKindError(f"{error.filename} is {kind_of(Path(error.filename))}, needs a directory") from error
