"""TPU VMs through gcloud: the commands of one queued resource, the programs on its hosts, and parsers of their output.

The programs are the `.sh` files beside this module. In the directory `~/NAME` of each host:

| file | content |
|---|---|
| `code/`, `venv/`, `installed` | the commit, the environment that runs it, and which commit that is |
| `log` | output of setup and job; `log.previous` is that of the previous job |
| `lock` | locked by the job as long as any of its processes lives |
| `pid` | the job's process group |
| `submitted` | time of the request for the machines, in Unix seconds; empty if they were kept from an earlier job |
| `exit_code` | exit code of the job, written once it has ended |

`attend` is the single step that brings a host from any state to a running job, and may be repeated at any time: it
starts the job if it is not running and has not ended. The job outlives the connection that started it, and on a host
that was rebooted the next `attend` starts it again.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from launch.options import Value, fill_program, read_program
from runner.console import say
from runner.errors import InvalidError, RetryableError

MAX_TRIES = 20
DEADLINE_SECONDS = 600.0
_TPUS = ("gcloud", "compute", "tpus")
# Errors that no retry fixes, unless the network is down too: gcloud advises a new login even when it could not reach
# the server.
_USER_ERROR = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|RESOURCE_EXHAUSTED|quota|permission|not been used in project"
    r"|active account|auth login|eauthentication|unrecognized arguments|argument --|Invalid choice|required property",
    re.IGNORECASE,
)
_NETWORK_ERROR = re.compile(
    r"ConnectionPool|TransportError|resolve|timed out|Connection (reset|refused)|UNAVAILABLE", re.IGNORECASE
)
_MISSING = re.compile("NOT_FOUND|was not found")
CREATE_TIME = "createTime"  # placeholder for the time in printed commands; the job ignores it
FIRST_LOG_LINES = 20  # shown of a job that was running before
_STATUS = re.compile(r"^tpu-vm: worker (\d+) (empty|started|running|stopped|ended (\d+))(?: of ([0-9a-f]+))?$", re.M)
_LOG_START = re.compile(r"^tpu-vm: log from (\d+)$")


@dataclass(frozen=True)
class ResourceState:
    """State of a queued resource."""

    name: str  # name of the state, such as ACTIVE
    error: str = ""  # reason of a failure
    created: int | None = None  # time of the request, in Unix seconds; None if the answer does not say


@dataclass(frozen=True)
class _NodeState:
    """State of one slice, and the number of its hosts."""

    state: str
    num_workers: int


@dataclass(frozen=True)
class QueuedResource:
    """Commands of one queued resource, which holds one TPU VM node per slice."""

    name: str  # name of the resource
    num_slices: int
    location: tuple[str, ...]  # options --zone and --project
    request: tuple[str, ...] = ()  # options of `create` beyond names and location
    ssh_options: tuple[str, ...] = ()  # options of `ssh` and `scp`

    @property
    def nodes(self) -> list[str]:
        """Names of the slices."""
        if self.num_slices == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.num_slices)]

    def create(self) -> list[str]:
        """Return the command that queues a request for all slices."""
        nodes = [f"--node-id={self.name}"]
        if self.num_slices > 1:
            nodes = [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
        return [*_TPUS, "queued-resources", "create", self.name, *nodes, *self.request, *self.location, "--quiet"]

    def describe(self) -> list[str]:
        """Return the command that prints the state of the resource."""
        return [*_TPUS, "queued-resources", "describe", self.name, *self.location, "--format=json"]

    def describe_node(self, node: str) -> list[str]:
        """Return the command that prints state and workers of one slice."""
        return [*_TPUS, "tpu-vm", "describe", node, *self.location, "--format=json"]

    def delete(self) -> list[str]:
        """Return the command that deletes the request and its machines."""
        return [*_TPUS, "queued-resources", "delete", self.name, *self.location, "--force", "--quiet"]

    def ssh(self, node: str, worker: str, script: str) -> list[str]:
        """Return the command that runs a script on one worker of a slice, or on `all`."""
        alive = "--ssh-flag=-o ServerAliveInterval=30"  # ends a connection that hangs
        return [*_TPUS, "tpu-vm", "ssh", node, f"--worker={worker}", *self._access, alive, f"--command={script}"]

    def scp(self, node: str, source: str, target: str) -> list[str]:
        """Return the command that copies a file to the home directory of every worker of a slice."""
        return [*_TPUS, "tpu-vm", "scp", source, f"{node}:{target}", "--worker=all", *self._access]

    @property
    def _access(self) -> tuple[str, ...]:
        return (*self.location, *self.ssh_options, "--quiet")


class Gcloud:
    """Executor of the commands of one resource.

    Every method raises `InvalidError` for an error that the user must fix, and `RetryableError` for one that persisted
    over all retries.
    """

    def __init__(self, resource: QueuedResource, pause_seconds: float):
        self._resource = resource
        self._pause_seconds = pause_seconds

    def read_state(self) -> ResourceState | None:
        """Return the state of the queued resource, None if there is none."""
        answer = self._describe(self._resource.describe())
        if answer is None:
            return None
        state = answer.get("state") or {}
        error = (state.get("failedData") or {}).get("error") or {}
        try:
            # RFC 3339, in UTC
            created: datetime | None = datetime.fromisoformat(str(answer.get("createTime")))
        except ValueError:
            created = None
        if created is not None and created.tzinfo is None:
            created = created.replace(tzinfo=UTC)
        seconds = None if created is None else int(created.timestamp())
        return ResourceState(state.get("state", "UNKNOWN"), error.get("message", ""), seconds)

    def read_node(self, node: str) -> _NodeState | None:
        """Return the state of one slice, None if there is none."""
        answer = self._describe(self._resource.describe_node(node))
        if answer is None:
            return None
        # A node has one network endpoint per host; an answer without the list counts as one host.
        return _NodeState(answer.get("state", ""), len(answer.get("networkEndpoints") or [None]))

    def create(self) -> None:
        """Queue the request. If it exists already, an earlier try has succeeded, but its answer was lost."""
        self._execute_with_retries(self._resource.create(), "ALREADY_EXISTS")

    def delete(self) -> None:
        """Delete the resource with its machines, and wait until it is gone."""
        exists = self.read_state() is not None
        # The command returns before the machines are gone, and a new request needs the name.
        while exists:
            self._execute_with_retries(self._resource.delete(), f"{_MISSING.pattern}|DELETING")
            exists = self.read_state() is not None
            if exists:
                time.sleep(self._pause_seconds)

    def _describe(self, command: Sequence[str]) -> dict[str, Any] | None:
        output = self._execute_with_retries(command, _MISSING.pattern)
        try:
            return None if output is None else dict(json.loads(output))
        except ValueError:
            raise RetryableError(f"gcloud's answer is not JSON: {output!r:.100}") from None

    def _execute_with_retries(self, command: Sequence[str], expected_error: str) -> str | None:
        """Return the output of a command, or None if it fails with an error that matches `expected_error`."""
        # The cloud's API sometimes fails for minutes, which must not end a job that runs for weeks.
        for retries_left in reversed(range(MAX_TRIES)):
            code, output, errors = execute(command)
            if code == 0:
                return output
            if re.search(expected_error, errors):
                return None
            raise_user_error(errors)
            if _MISSING.search(errors):  # a zone, a network or an account that the request names
                raise InvalidError(find_error_line(errors))
            if retries_left:
                time.sleep(self._pause_seconds)
        raise RetryableError(f"{' '.join(command[:5])}: {find_error_line(errors)}")


def execute(command: Sequence[str], deadline_seconds: float = DEADLINE_SECONDS) -> tuple[int, str, str]:
    """Run a command and return its exit code, output and errors; at the deadline it is killed with all its children.

    The command has a session of its own, so that Ctrl-C on the terminal does not interrupt it.
    """
    process = _start(command, subprocess.PIPE)
    try:
        output, errors = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        _kill_session(process)
        output, errors = process.communicate()
        errors += f"no answer within {deadline_seconds:.0f} s"
    return process.returncode, output, errors


def _start(command: Sequence[str], stderr: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        errors="replace",
        start_new_session=True,
    )


def _kill_session(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has a session of its own, with all of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def raise_user_error(errors: str) -> None:
    """Raise `InvalidError` with gcloud's own line if a retry cannot fix the errors."""
    line = find_error_line(errors)
    if line.startswith("ERROR: (gcloud") and _USER_ERROR.search(line) and not _NETWORK_ERROR.search(errors):
        raise InvalidError(line)


def find_error_line(errors: str) -> str:
    """Return the line with the reason in gcloud's error output."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no error was given")


@dataclass(frozen=True)
class HostStatus:
    """Status of the job on one host."""

    state: str  # empty (no code yet), started, running, ended or stopped
    code: int | None = None  # exit code, if it has ended
    commit: str = ""  # commit that it runs


@dataclass(frozen=True)
class HostPrograms:
    """Shell programs of one job."""

    name: str  # name of its directory, of letters, digits and hyphens
    commit: str  # commit to run
    archive: str  # name of the file with the commit, in the home directory
    digests: Sequence[str]  # digest and name of each file of code in the home directory, one after the other
    packages: Sequence[str]  # arguments of `pip install`
    directory: str  # working directory in the code
    arguments: Sequence[str]  # arguments of `python -m launch.worker`
    environment: str | None = None  # file in the home directory with NAME=value lines for the job, if any

    def attend(self, submit_time: int | str | None) -> str:
        """Return a program that starts the job unless it runs or has ended, and prints the status.

        A job that was asked to stop (75) is started again.

        The time is that of the request for the machines, in Unix seconds; None if it is not known.
        """
        return self._enter_and(
            "attend.sh",
            commit=self.commit,
            digests=self.digests,
            submitted=submit_time,
            job=[self.job()],
        )

    def job(self) -> str:
        """Return the program that sets up and runs the job, detached, and records how it ended."""
        return fill_program(
            read_program(__package__, "job.sh"),
            archive=self.archive,
            digests=self.digests,
            packages=self.packages,
            directory=[self.directory],
            environment=self.environment,
            arguments=self.arguments,
        )

    def tail(self, first_line: int | None) -> str:
        """Return a program that prints the log from a line on (None: the last few lines) until the job ends."""
        last_lines = FIRST_LOG_LINES if first_line is None else None
        program = read_program(__package__, "tail.sh")
        return fill_program(program, name=self.name, first_line=first_line, last_lines=last_lines)

    def stop(self) -> str:
        """Return a program that ends the job and deletes its exit code, so that `attend` starts it again."""
        return self._enter_and("stop.sh")

    def _enter_and(self, name: str, **values: Value) -> str:
        enter = fill_program(read_program(__package__, "enter.sh"), name=self.name)
        return f"{enter}\n{fill_program(read_program(__package__, name), **values)}"


def parse_statuses(output: str) -> dict[int, HostStatus]:
    """Return the statuses by worker that `attend` or `stop` has printed on all workers of a slice.

    gcloud's own lines in the output are skipped.
    """
    return {
        int(worker): HostStatus(words.split()[0], int(code) if code else None, commit)
        for worker, words, code, commit in _STATUS.findall(output)
    }


def _parse_log_start(line: str) -> int | None:
    """Return the number of the log's next line, if this line of `tail` says it."""
    match = _LOG_START.match(line)
    return None if match is None else int(match[1])


def parse_log_lines(output: str) -> list[str]:
    """Return the lines of the log in the output of `tail`."""
    lines = output.splitlines()
    # gcloud's own lines, such as notes about SSH keys, come before the log.
    starts = [number for number, line in enumerate(lines, start=1) if _parse_log_start(line) is not None]
    return lines[starts[0] :] if starts else []


class LogTail:
    """A thread that shows a remote log on this terminal until the job has ended.

    Each line is shown once and in order, over connections that break.
    """

    def __init__(self, connect: Callable[[int | None], Sequence[str]], first_line: int | None, pause_seconds: float):
        """Start the thread.

        `connect` makes the command that prints the log from a numbered line on (None: the last few lines) until the job
        ends.
        """
        self._connect = connect
        self._next_line = first_line
        self._pause_seconds = pause_seconds
        self._process: subprocess.Popen[str] | None = None
        self._has_ended = threading.Event()
        self._is_abandoned = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, deadline_seconds: float) -> None:
        """Show the rest of the log of a job that has ended, and stop."""
        self._has_ended.set()
        self._thread.join(deadline_seconds)
        self.abandon()

    def abandon(self) -> None:
        """Stop at once."""
        self._is_abandoned = True
        self._has_ended.set()
        if self._process is not None:
            _kill_session(self._process)

    def _run(self) -> None:
        while not self._is_abandoned:
            # Read before the connection: lines that are written during it are shown by it or by one more.
            is_last = self._has_ended.is_set()
            self._show()
            if is_last:
                return
            self._has_ended.wait(self._pause_seconds)

    def _show(self) -> None:
        """Show the log over one connection; an incomplete last line is left to the next connection."""
        self._process = _start(self._connect(self._next_line), subprocess.DEVNULL)
        assert self._process.stdout is not None
        has_started = False
        for line in self._process.stdout:
            if not has_started:
                start = _parse_log_start(line.rstrip())
                has_started = start is not None
                self._next_line = start if has_started else self._next_line
            # Only whole lines count, so that the next connection begins with the one that was cut short.
            elif line.endswith("\n") and not self._is_abandoned:
                say(line.rstrip())
                self._next_line = (self._next_line or 1) + 1
        self._process.wait()
