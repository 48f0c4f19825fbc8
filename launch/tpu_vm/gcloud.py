"""TPU VMs through gcloud: the commands of one queued resource, how they are run, and how their answers are read."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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


@dataclass(frozen=True)
class ResourceState:
    """State of a queued resource.

    Attributes:
        name: name of the state, such as ACTIVE.
        error: reason of a failure.
        created: time of the request, in Unix seconds; None if the answer does not say.
    """

    name: str
    error: str = ""
    created: int | None = None


@dataclass(frozen=True)
class NodeState:
    """State of one slice, and the number of its hosts."""

    state: str
    num_workers: int


@dataclass(frozen=True)
class QueuedResource:
    """Commands of one queued resource, which holds one TPU VM node per slice.

    Attributes:
        name: name of the resource.
        num_slices: number of slices.
        location: options --zone and --project.
        request: options of `create` beyond names and location.
        ssh_options: options of `ssh` and `scp`.
    """

    name: str
    num_slices: int
    location: tuple[str, ...]
    request: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()

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

    def read_node(self, node: str) -> NodeState | None:
        """Return the state of one slice, None if there is none."""
        answer = self._describe(self._resource.describe_node(node))
        if answer is None:
            return None
        return NodeState(answer.get("state", ""), len(answer.get("networkEndpoints") or [None]))

    def create(self) -> None:
        """Queue the request. If it exists already, an earlier try has made it, whose answer was lost."""
        self._execute_with_retries(self._resource.create(), "ALREADY_EXISTS")

    def delete(self) -> None:
        """Delete the resource with its machines, and wait until it is gone."""
        exists = self.read_state() is not None
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
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=deadline_seconds)
    except subprocess.TimeoutExpired:
        kill_session(process)
        output, errors = process.communicate()
        errors += f"no answer within {deadline_seconds:.0f} s"
    return process.returncode, output, errors


def kill_session(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has a session of its own, with all of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def raise_user_error(errors: str) -> None:
    """Raise `InvalidError` with gcloud's own line if a retry cannot fix the errors."""
    line = find_error_line(errors)
    if line.startswith("ERROR: (gcloud") and _USER_ERROR.search(line) and not _NETWORK_ERROR.search(errors):
        raise InvalidError(line)


def find_error_line(errors: str) -> str:
    """Return the line in gcloud's errors that says what went wrong."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no error was given")
