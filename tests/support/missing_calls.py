"""File systems without hard links, locks or flushes of directories: in this process, or under a preloaded library."""

import errno
import fcntl
import functools
import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("missing_calls.c")
# The errors with which file systems say that they lack a call.
ERRORS = (errno.ENOSYS, errno.EPERM, errno.ENOTSUP, errno.EINVAL)
CALLS = ("link", "flock", "fcntl", "fsyncdir")


def take_calls_away(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSYS) -> None:
    """Let hard links, locks and flushes of directories fail in this process, for all directories."""
    fsync = os.fsync

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(code, os.strerror(code))

    def flush(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            refuse()
        fsync(descriptor)

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(fcntl, "lockf", refuse)


@functools.cache
def build_library() -> Path:
    """Compile the library to preload, once in this process; skips the test if there is no compiler."""
    if not shutil.which("gcc"):
        pytest.skip("needs gcc")
    library = Path(tempfile.mkdtemp(dir=os.environ["RUNNER_TESTS_SESSION"])) / "missing_calls.so"
    subprocess.run(["gcc", "-O1", "-Wall", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library


def make_variables(root: Path, calls: str = "", code: int = errno.ENOSYS, stale: str = "") -> Any:
    """Return the environment in which a process lacks calls below `root`, and gets ESTALE now and then.

    Args:
        root: directory.
        calls: names of calls, as in `missing_calls.c`.
        code: number of their error.
        stale: `N,M`: every Nth open and every Mth read fails once.
    """
    variables = {"LD_PRELOAD": str(build_library()), "FS_ROOT": str(root), "FS_ERRNO": str(code)}
    variables |= {"FS_LOG": str(root.with_name(f"{root.name}.calls")), "FS_MISSING": calls}
    return variables | ({"FS_STALE": stale} if stale else {})
