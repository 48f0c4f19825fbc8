"""Processes of `python -m MODULE` that are forked from one that has imported jax and the runner.

The imports take most of the time of a short run: about 2 s of CPU time a process. Each process of pytest starts one
template process, which imports the modules and waits; a request has it fork a child, which then has its own process id,
standard streams, environment and working directory, and runs the module as `python -m` does. Nothing of jax is
initialized in the template, which has no threads that a fork would lose.

A request whose environment differs from that of the template in a variable that an import may read is refused:
`start` then executes a new interpreter.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from runner.__main__ import restart_with_allocator_options
from runner.process import bind_to_parent
from tests.support import leftover
from tests.support.simulated_devices import environment

ROOT = Path(__file__).resolve().parents[2]
# Variables that no import reads, in addition to those of the runner and of tests.
_FREE_VARIABLES = {"XLA_FLAGS", "NPROC", "PYTHONUNBUFFERED", "PYTEST_CURRENT_TEST"}
_FREE_PREFIXES = ("RUNNER_", "PAUSE_", "PYTEST_XDIST_")
_IMPORTS = ("flax.linen", "flax.training.train_state", "optax", "runner.session", "runner.trainer", "runner.cli.app")
_WORD = struct.Struct("q")  # of the process id, then of the exit status
_MAX_REQUEST_BYTES = 1 << 17
_PR_SET_PDEATHSIG = 1
_ALLOCATOR = "GLIBC_TUNABLES"  # read by the C library when the template starts
_VARIABLES = environment(1)  # before any test changes them


class ForkedProcess:
    """A child of the template process, with the methods of `subprocess.Popen` that tests of whole processes use."""

    def __init__(self, report: int):
        self._report = report  # pipe from the template: the process id, then the exit status
        self.returncode: int | None = None
        self.pid = self._read_word()

    def _read_word(self) -> int:
        content = os.read(self._report, _WORD.size)
        assert len(content) == _WORD.size, "the template process has ended"
        return int(_WORD.unpack(content)[0])

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._report], [], [], seconds)[0]:
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
    """The template process of this process, and the socket on which it takes requests."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                bind_to_parent([sys.executable, "-m", "tests.support.forked_python", str(theirs.fileno())]),
                cwd=ROOT,
                env=leftover.outliving(_VARIABLES),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def close(self) -> None:
        """End the template process and, with it, the children that still run."""
        self._requests.close()
        self._process.wait()

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


def _serve(requests: int) -> list[str]:
    """Fork a child for each request until the other end closes the socket; in a child, return its arguments."""
    connection = socket.socket(fileno=requests)
    children: dict[int, tuple[int, int]] = {}  # by descriptor of the process: its id and the pipe for its status
    poll = select.poll()
    poll.register(requests, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == requests:
                content, given, _, _ = socket.recv_fds(connection, _MAX_REQUEST_BYTES, 4)
                if not content:
                    os._exit(0)
                *streams, report = given
                template = os.getpid()
                child = os.fork()
                if not child:
                    connection.detach()
                    return _become(content, streams, template)
                os.write(report, _WORD.pack(child))
                process = os.pidfd_open(child)
                children[process] = child, report
                poll.register(process, select.POLLIN)
                for stream in streams:
                    os.close(stream)
            else:
                child, report = children.pop(descriptor)
                poll.unregister(descriptor)
                status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # nobody waits for this child
                    os.write(report, _WORD.pack(status))
                os.close(descriptor)
                os.close(report)


def _become(content: bytes, streams: Sequence[int], template: int) -> list[str]:
    """Make this child the process of a request, and return its arguments."""
    failed = ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGUSR1)) != 0
    if failed or os.getppid() != template:
        os._exit(1)
    arguments, variables = json.loads(content)
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    allocator = {name: value for name, value in os.environ.items() if name == _ALLOCATOR}
    os.environ.clear()
    os.environ.update(variables | allocator)
    sys.orig_argv = [sys.executable, "-m", *arguments]
    return list(arguments)


if __name__ == "__main__":
    restart_with_allocator_options()
    for _name in _IMPORTS:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    del sys.modules["runner.__main__"]  # runpy warns of a module that it runs and finds imported
    sys.argv = _serve(int(sys.argv[1]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
