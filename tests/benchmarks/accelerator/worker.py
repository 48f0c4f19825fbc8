"""Subprocesses: commands that run to completion, and workers that run slices of training steps on request.

Workers let programs that cannot share a process be compared on one device: all of them are started, and then each in
turn runs a slice of steps while the others wait.

A worker and the process that controls it exchange lines. The worker writes JSON to what was its standard output:
`Ready` once it has compiled, then one `SliceDone` for every number of steps that it reads from its standard input, and
`Finished` when its input ends. Everything else that it prints goes to its log.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from runner.process import bind_to_parent
from tests.benchmarks.accelerator.config import ROOT

_TAIL_LINES = 12


class CommandError(Exception):
    """Error of a command that ended with an unexpected exit code."""


def run_module(*words: str, codes: tuple[int, ...] = (0,), changes: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Run `python -m WORDS` in the root of the checkout; return its exit code and standard output.

    Args:
        codes: expected exit codes.
        changes: environment variables to set.

    Raises:
        CommandError: the exit code is not one of `codes`.
    """
    done = subprocess.run(
        bind_to_parent([sys.executable, "-m", *words]),
        cwd=ROOT,
        env=os.environ | (changes or {}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode not in codes:
        output = get_tail(done.stdout + done.stderr)
        raise CommandError(f"{' '.join(words[:3])} ended with {done.returncode}: {output}")
    return done.returncode, done.stdout


def get_tail(text: str) -> str:
    """Return the last lines of the output of a process."""
    return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])


@dataclass(frozen=True)
class Ready:
    """Message of a worker right before its first step.

    Attributes:
        parameters: number of model parameters.
        planned_bytes: device memory of the compiled step, as reported by the compiler; None if it is not known.
        flops_per_token: model FLOPs per token, by formula; None for PyTorch, which trains the same model.
        version: framework and version of the worker; empty for the runner.
    """

    parameters: int
    planned_bytes: int | None = None
    flops_per_token: float | None = None
    version: str = ""


@dataclass(frozen=True)
class SliceDone:
    """Message of a worker after a slice of steps, when the device has finished them.

    Attributes:
        seconds: wall time of the whole slice.
    """

    seconds: float


@dataclass(frozen=True)
class Finished:
    """Last message of a worker.

    Attributes:
        peak_bytes: peak device memory; None if it is not measured on this device.
        fingerprint: fingerprint of the train state; None for PyTorch.
    """

    peak_bytes: int | None = None
    fingerprint: str | None = None


Message = TypeVar("Message", Ready, SliceDone, Finished)


class WorkerError(Exception):
    """Error of a worker that exited instead of answering; the message ends with the last lines of its log."""


class WorkerConnection:
    """Connection of a worker to the process that controls it.

    The worker must create it before it prints anything, because it redirects standard output to standard error.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def send(self, message: Ready | SliceDone | Finished) -> None:
        self._out.write(json.dumps(asdict(message)) + "\n")
        self._out.flush()

    def wait_for_slice(self) -> int | None:
        """Wait for the next request; return its number of steps, or None if there are no more requests."""
        line = sys.stdin.readline()
        return int(line) if line.strip() else None


class Worker:
    """Worker process, as seen by the process that controls it. Leaving its context kills the process.

    Every method, including the constructor, raises `WorkerError` if the process exits instead of answering.

    Attributes:
        ready: the first message of the worker.
        step_seconds: seconds per step of each slice so far.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path):
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                bind_to_parent(command),
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.step_seconds: list[float] = []
        self.ready = self._receive(Ready)

    def run_slice(self, num_steps: int) -> None:
        """Run `num_steps` steps and record their time in `step_seconds`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{num_steps}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._make_error() from None
        self.step_seconds.append(self._receive(SliceDone).seconds / num_steps)

    def finish(self) -> Finished:
        """Ask the worker to end, and return its last message after it has exited."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        message = self._receive(Finished)
        self._process.wait()
        return message

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()

    def _receive(self, kind: type[Message]) -> Message:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._make_error()
        return kind(**json.loads(line))

    def _make_error(self) -> WorkerError:
        code = self._process.wait()
        return WorkerError(f"ended with {code}: {get_tail(self._log.read_text(errors='replace'))}")
