"""TPU VMs as gcloud sees them: the commands of one queued resource, how they are run, and what their answers mean."""

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

MOST_TRIES = 20
DEADLINE_SECONDS = 600.0
_TPUS = ("gcloud", "compute", "tpus")
# What gcloud says where trying again is no use, and what it says when the network is away: that wins, for gcloud
# advises a new login even when it could not reach the server.
_USER_MUST_ACT = re.compile(
    r"PERMISSION_DENIED|UNAUTHENTICATED|INVALID_ARGUMENT|RESOURCE_EXHAUSTED|quota|permission|not been used in project"
    r"|active account|auth login|eauthentication|unrecognized arguments|argument --|Invalid choice|required property",
    re.IGNORECASE,
)
_MISSING = re.compile("NOT_FOUND|was not found")
_NETWORK = re.compile(
    r"ConnectionPool|TransportError|resolve|timed out|Connection (reset|refused)|UNAVAILABLE", re.IGNORECASE
)


@dataclass(frozen=True)
class ResourceState:
    """What `describe` says of a queued resource.

    Attributes:
        name: of the state.
        error: why it failed.
        created: when it was asked for, in Unix seconds; None if the answer does not say.
    """

    name: str
    error: str = ""
    created: int | None = None


@dataclass(frozen=True)
class Node:
    """What `describe` says of one slice."""

    state: str
    num_workers: int


@dataclass(frozen=True)
class Resource:
    """The commands of one queued resource, which holds one TPU VM node per slice.

    Attributes:
        location: --zone and --project.
        request: what `create` asks for beyond names and location.
        ssh_options: of `ssh` and `scp`.
    """

    name: str
    num_slices: int
    location: tuple[str, ...]
    request: tuple[str, ...] = ()
    ssh_options: tuple[str, ...] = ()

    @property
    def nodes(self) -> list[str]:
        """Names of its slices."""
        if self.num_slices == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.num_slices)]

    def create(self) -> list[str]:
        """Queue a request for all slices."""
        nodes = [f"--node-id={self.name}"]
        if self.num_slices > 1:
            nodes = [f"--node-count={self.num_slices}", f"--node-prefix={self.name}"]
        return [*_TPUS, "queued-resources", "create", self.name, *nodes, *self.request, *self.location, "--quiet"]

    def describe(self) -> list[str]:
        """Its state."""
        return [*_TPUS, "queued-resources", "describe", self.name, *self.location, "--format=json"]

    def describe_node(self, node: str) -> list[str]:
        """ResourceState and workers of one slice."""
        return [*_TPUS, "tpu-vm", "describe", node, *self.location, "--format=json"]

    def delete(self) -> list[str]:
        """Take it out of the queue, and its machines with it."""
        return [*_TPUS, "queued-resources", "delete", self.name, *self.location, "--force", "--quiet"]

    def ssh(self, node: str, worker: str, script: str) -> list[str]:
        """Run a script on one worker of a slice, or on `all`."""
        alive = "--ssh-flag=-o ServerAliveInterval=30"  # so that a connection that hangs is one that ends
        return [*_TPUS, "tpu-vm", "ssh", node, f"--worker={worker}", *self._access, alive, f"--command={script}"]

    def scp(self, node: str, source: str, target: str) -> list[str]:
        """Copy a file to the home directory of every worker of a slice."""
        return [*_TPUS, "tpu-vm", "scp", source, f"{node}:{target}", "--worker=all", *self._access]

    @property
    def _access(self) -> tuple[str, ...]:
        return (*self.location, *self.ssh_options, "--quiet")


class Gcloud:
    """Runs the commands of one resource. Errors that the user must mend are `InvalidError`, others `RetryableError`."""

    def __init__(self, resource: Resource, pause_seconds: float):
        self._resource = resource
        self._pause_seconds = pause_seconds

    def state(self) -> ResourceState | None:
        """Of the queued resource; None if there is none."""
        answer = self._describe(self._resource.describe())
        if answer is None:
            return None
        state = answer.get("state") or {}
        error = (state.get("failedData") or {}).get("error") or {}
        created = _unix_seconds(answer.get("createTime"))
        return ResourceState(state.get("state", "UNKNOWN"), error.get("message", ""), created)

    def node(self, node: str) -> Node | None:
        """Of one slice; None if there is none."""
        answer = self._describe(self._resource.describe_node(node))
        return None if answer is None else Node(answer.get("state", ""), len(answer.get("networkEndpoints") or [None]))

    def create(self) -> None:
        """Queue the request; one that is there already, from a try whose answer was lost, is the same."""
        self._patiently(self._resource.create(), "ALREADY_EXISTS")

    def delete(self) -> None:
        """Delete it and wait until it is gone, machines and all."""
        is_there = self.state() is not None
        while is_there:
            self._patiently(self._resource.delete(), f"{_MISSING.pattern}|DELETING")
            is_there = self.state() is not None
            if is_there:
                time.sleep(self._pause_seconds)

    def _describe(self, command: Sequence[str]) -> dict[str, Any] | None:
        output = self._patiently(command, _MISSING.pattern)
        try:
            return None if output is None else dict(json.loads(output))
        except ValueError:
            raise RetryableError(f"gcloud's answer is no JSON: {output!r:.100}") from None

    def _patiently(self, command: Sequence[str], otherwise: str) -> str | None:
        """Output of a command that is tried again; None if it ends with an error that says `otherwise`."""
        for tries_left in reversed(range(MOST_TRIES)):
            code, output, errors = execute(command)
            if code == 0:
                return output
            if re.search(otherwise, errors):
                return None
            check(errors)
            if _MISSING.search(errors):  # a zone, a network or an account that the request names
                raise InvalidError(first_line(errors))
            if tries_left:
                time.sleep(self._pause_seconds)
        raise RetryableError(f"{' '.join(command[:5])}: {first_line(errors)}")


def _unix_seconds(text: object) -> int | None:
    """Of a time as Google's interfaces write it: RFC 3339, in UTC; None if it is none."""
    try:
        moment = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp())


def execute(command: Sequence[str], deadline_seconds: float = DEADLINE_SECONDS) -> tuple[int, str, str]:
    """Exit code, output and errors of a command, which is killed with all of its children at the deadline.

    It has a session of its own, so that a Ctrl-C on the terminal does not cut it short.
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
        kill(process)
        output, errors = process.communicate()
        errors += f"no answer within {deadline_seconds:.0f} s"
    return process.returncode, output, errors


def kill(process: "subprocess.Popen[str]") -> None:
    """Kill a process that has a session of its own, with all of its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def check(errors: str) -> None:
    """Raise `InvalidError` with gcloud's own line if it is one that no further try mends."""
    line = first_line(errors)
    if line.startswith("ERROR: (gcloud") and _USER_MUST_ACT.search(line) and not _NETWORK.search(errors):
        raise InvalidError(line)


def first_line(errors: str) -> str:
    """The line of gcloud's that says what went wrong."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    return next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no error was given")
