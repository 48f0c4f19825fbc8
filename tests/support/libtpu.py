"""libtpu, which only one process of a machine can hold at a time."""

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
    """Wait until no other test of this machine, of whatever suite, has it."""
    with (Path(tempfile.gettempdir()) / "runner-tests-libtpu.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_module(module: str, *arguments: str) -> Any:
    """The JSON that a module of the tests prints last: run as a program, since libtpu stays with the process."""
    words = [sys.executable, "-m", module, *arguments]
    with lock_libtpu():
        done = subprocess.run(
            words, cwd=ROOT, env=environment(1), capture_output=True, text=True, timeout=WHOLE_RUN_DEADLINE_SECONDS
        )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
