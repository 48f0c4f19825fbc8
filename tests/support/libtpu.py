"""Serialised use of libtpu, which only one process of a machine can load at a time."""

import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.job_process import ROOT, WHOLE_RUN_DEADLINE_SECONDS, environment


@contextlib.contextmanager
def lock_libtpu() -> Iterator[None]:
    """Hold the machine-wide lock, shared by all checkouts."""
    with (Path(tempfile.gettempdir()) / "runner-tests-libtpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_module(module: str, *arguments: str) -> Any:
    """Run a test module as a program and return the JSON of its last line; a process never unloads libtpu."""
    words = [sys.executable, "-m", module, *arguments]
    with lock_libtpu():
        done = subprocess.run(
            words, cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=WHOLE_RUN_DEADLINE_SECONDS
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
