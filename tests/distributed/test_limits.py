"""Limits of the system on open files and threads, with which a job is started."""

import _thread
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runner.distributed.limits import raise_descriptor_limit, raise_thread_limit
from runner.errors import InvalidError
from tests.support.job_process import ROOT

PROGRAM = """
import resource, sys
from runner.distributed.limits import raise_descriptor_limit
soft, hard, connections = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
raise_descriptor_limit(connections)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
# By the soft and hard limit and the connections to other processes: the soft limit after it, or None if it is refused.
LIMITS = {
    "enough": ((4096, 4096, 2), 4096),
    "a soft limit that can be raised": ((200, 4096, 2), 128 + 2 + 1024),
    "a hard limit without spare files": ((200, 400, 200), 400),
    "exactly enough": ((328, 328, 200), 328),
    "one too few": ((327, 327, 200), None),
    "none for a large pod": ((1024, 1024, 8192), None),
    "a large pod": ((1024, 4096, 2048), 2048 + 128 + 1024),
}


@pytest.mark.daily(3)
@pytest.mark.parametrize(("given", "raised"), LIMITS.values(), ids=LIMITS)
def test_the_limit_of_open_files_is_raised_or_the_start_refused(given: tuple[int, ...], raised: int | None) -> None:
    command = [sys.executable, "-c", PROGRAM, *map(str, given)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if raised is None:
        assert f"may open {given[1]} files at most, needs {128 + given[2]}, of which {given[2]} are for" in ended.stderr
    else:
        assert ended.stdout == f"{raised}\n", ended.stderr


def test_a_job_that_may_not_open_enough_files_ends_with_2(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "runner", "specs/counter.yaml", "--set", f"directory={tmp_path / 'run'}"]
    limited = ["bash", "-c", 'ulimit -n 120; exec "$@"', "limited", *command]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert "may open 120 files at most, needs 128, of which 0" in line
    assert not (tmp_path / "run").exists()


def test_an_unlimited_process_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", None)
    raise_descriptor_limit(1 << 20)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (9, 9))
    with pytest.raises(InvalidError, match="LimitNOFILE"):
        raise_descriptor_limit(2)


SETPRIV = ("setpriv", "--reuid=65534", "--inh-caps=+dac_override", "--ambient-caps=+dac_override")  # as another user


@pytest.mark.soak
@pytest.mark.parametrize("limit", [1, 3, 6, 10, 18, 26, 34, 50, 80])
def test_a_job_that_may_not_start_enough_threads_ends_with_2(limit: int, tmp_path: Path) -> None:
    """Root may start any number, so this needs to be root and to become somebody else."""
    for directory in (tmp_path, *tmp_path.parents[:2]):
        directory.chmod(0o777)
    command = [sys.executable, "-m", "runner", "specs/counter.yaml", "--set", f"directory={tmp_path / 'run'}"]
    command += ["--set", "config.total_steps=20", "--set", "config.step_seconds=0"]
    limited = [*SETPRIV, "bash", "-c", f'export HOME={tmp_path}; ulimit -u {limit}; exec "$@"', "limited", *command]
    ended = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True, check=False)
    if ended.returncode == 0:
        assert limit > 34
        return
    assert ended.returncode == 2, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert re.match(r"this process may start \d+ more threads, needs about \d+; raise the limit", line)
    assert not (tmp_path / "run").exists()


def test_threads_are_counted_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started, start = [], _thread.start_new_thread

    def start_few(*arguments: Any) -> int:
        if len(started) == 5:
            raise RuntimeError("can't start new thread")
        started.append(start(*arguments))
        return started[-1]

    before = _thread._count()
    monkeypatch.setenv("NPROC", "4")
    raise_thread_limit()
    monkeypatch.setattr(_thread, "start_new_thread", start_few)
    with pytest.raises(InvalidError, match="may start 5 more threads, needs about 44"):
        raise_thread_limit()
    while _thread._count() > before:
        time.sleep(0.001)
