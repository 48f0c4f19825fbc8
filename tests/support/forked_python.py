"""Processes of `python -m MODULE` that are forked from one that has imported jax and the runner.

The imports take most of the time of a short run: about 2 s of CPU time a process. Each process of pytest starts one
template (`tests.support.template_process`), which imports the modules and waits; a request has it fork a child, which
then has its own process id, standard streams and environment, and runs the module as `python -m` does.

A request whose environment differs from that of the template in a variable that an import may read is refused:
`start` then executes a new interpreter.
"""

import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import jax  # noqa: F401  sets variables when it is imported, which the template gets too

from runner.process import bind_to_parent
from tests.support import leftover
from tests.support.simulated_devices import environment
from tests.support.template_process import WORD

ROOT = Path(__file__).resolve().parents[2]
# Variables that no import reads, in addition to those of the runner and of tests.
_FREE_VARIABLES = {"XLA_FLAGS", "NPROC", "PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"}
_FREE_PREFIXES = ("RUNNER_", "PAUSE_", "PYTEST_XDIST_")
_VARIABLES = environment(1)  # before any test changes them


class ForkedProcess:
    """A child of the template process, with the methods of `subprocess.Popen` that tests of whole processes use."""

    def __init__(self, report: int):
        self._report = report  # pipe from the template: the process id, then the exit status
        self.returncode: int | None = None
        self.pid = self._read_word()

    def _read_word(self) -> int:
        content = os.read(self._report, WORD.size)
        assert len(content) == WORD.size, "the template process has ended"
        return int(WORD.unpack(content)[0])

    def _wait(self, seconds: float | None) -> int | None:
        report = select.poll()  # unlike `select.select`, it takes descriptors above 1,023
        report.register(self._report, select.POLLIN)
        if self.returncode is None and report.poll(None if seconds is None else seconds * 1000):
            self.returncode = self._read_word()
            os.close(self._report)
        return self.returncode

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the process runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status; raise TimeoutExpired if the process does not end within `timeout` seconds."""
        code = self._wait(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the report is under way
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[str],
    variables: Mapping[str, str],
    stdout: IO[bytes],
    stderr: IO[bytes],
    wrapper: Sequence[str] = (),
) -> "ForkedProcess | subprocess.Popen[bytes]":
    """Start `WRAPPER python -m ARGUMENTS` in the root of the repository, without input; it ends with this process."""
    if _can_watch_processes() and not wrapper and _is_like_template(variables):
        return _get_template().fork(arguments, variables, stdout, stderr)
    return subprocess.Popen(
        bind_to_parent([*wrapper, sys.executable, "-m", *arguments]),
        cwd=ROOT,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
    )


def run(
    arguments: Sequence[str], variables: Mapping[str, str], timeout: float, merge_streams: bool = False
) -> "subprocess.CompletedProcess[str]":
    """Run `python -m ARGUMENTS` as `start` does, and return its exit status and its output.

    With `merge_streams`, the standard error stream is part of `stdout`. Raises TimeoutExpired after `timeout` seconds.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as problems:
        process = start(arguments, variables, output, output if merge_streams else problems)
        try:
            code = process.wait(timeout)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, read_output(output), read_output(problems))


def read_output(file: IO[bytes]) -> str:
    """Return what processes have written to a file, which they may still write to."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")


@functools.cache
def _can_watch_processes() -> bool:
    """Return True if the system gives out descriptors of processes: Linux from 5.3 on."""
    if sys.platform != "linux":
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _is_like_template(variables: Mapping[str, str]) -> bool:
    return _without_free(variables) == _without_free(_VARIABLES)


def _without_free(variables: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in variables.items()
        if name not in _FREE_VARIABLES and not name.startswith(_FREE_PREFIXES)
    }


class _Template:
    """The template process of this process, and the socket on which it takes requests.

    It ends with this process, which closes the socket, and its children with it.
    """

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                bind_to_parent([sys.executable, "-m", "tests.support.template_process", str(theirs.fileno())]),
                cwd=ROOT,
                env=leftover.outliving(_VARIABLES),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def fork(
        self, arguments: Sequence[str], variables: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> ForkedProcess:
        """Have the template fork a child and return it."""
        request = json.dumps([list(arguments), dict(variables)]).encode()
        report, theirs = os.pipe()
        with open(os.devnull, "rb") as nothing:
            streams = [nothing.fileno(), stdout.fileno(), stderr.fileno()]
            socket.send_fds(self._requests, [request], [*streams, theirs])
        os.close(theirs)
        child = ForkedProcess(report)
        leftover.add(child.pid)
        return child


@functools.cache
def _get_template() -> _Template:
    """Return the template of this process, which is started at the first call."""
    return _Template()
