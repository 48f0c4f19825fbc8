"""How the processes of a job find each other: all report to process 0, which says who is there.

1. Process 0 listens on the coordinator's port, before JAX does. Every other process connects, trying again until the
   deadline, and says which one it is.
2. When all have come, or the deadline has passed, process 0 tells everyone who came, closes the port and hands it to
   JAX's coordination service.
3. Who is missing is named, and the job ends with 76 on all hosts that came: a start with fewer would be another job.
   If the spec allows it (`topology.elastic`), it begins with those that came, numbered anew in the same order.
"""

import contextlib
import ipaddress
import json
import socket
import time
from dataclasses import dataclass, replace
from typing import Any

from runner.cluster import Cluster
from runner.errors import RetryableError

_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_LINE_BYTES = 1 << 20


@dataclass
class _Guest:
    """A process that has reported to process 0."""

    connection: socket.socket
    process_id: int


def meet(cluster: Cluster, deadline_seconds: float, is_elastic: bool) -> Cluster:
    """Wait for the other processes; this one's place among those that came. Called on every host.

    Raises `RetryableError` naming who did not come within the deadline.
    """
    ends = time.monotonic() + deadline_seconds
    if cluster.process_id == 0:
        present = _receive(cluster, ends, deadline_seconds, is_elastic)
    else:
        present = _report(cluster, ends, deadline_seconds)
    return replace(cluster, num_processes=len(present), process_id=present.index(cluster.process_id))


def listening_address(cluster: Cluster) -> str:
    """HOST:PORT that process 0 listens on: the address itself, or every interface for a name.

    On its own host a name may stand for a loopback address that no other host reaches.
    """
    host, _, port = cluster.coordinator.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"[::]:{port}"
    return cluster.coordinator


def _receive(cluster: Cluster, ends: float, deadline_seconds: float, is_elastic: bool) -> list[int]:
    """Process 0's part: the processes that are there, in order."""
    guests: dict[int, _Guest] = {}
    with _listen(listening_address(cluster)) as listener, contextlib.ExitStack() as connections:
        while len(guests) < cluster.num_processes - 1 and (left_seconds := ends - time.monotonic()) > 0:
            listener.settimeout(left_seconds)
            with contextlib.suppress(TimeoutError):
                guest = _welcome(listener)
                if guest is not None and 0 < guest.process_id < cluster.num_processes:
                    connections.enter_context(guest.connection)
                    guests[guest.process_id] = guest
        present = [0, *sorted(guests)]
        missing = [process for process in range(cluster.num_processes) if process not in present]
        error = _complaint(missing, cluster.num_processes, deadline_seconds) if missing and not is_elastic else None
        for guest in guests.values():
            with contextlib.suppress(OSError):
                _send(guest.connection, {"present": present, "error": error})
    if error is not None:
        raise RetryableError(error)
    return present


def _complaint(missing: list[int], num_processes: int, deadline_seconds: float) -> str:
    who = f"process{'es' * (len(missing) > 1)} {', '.join(map(str, missing))}"
    return f"{who} of {num_processes} did not come within {deadline_seconds:g} s; run the same command again"


def _listen(address: str) -> socket.socket:
    host, port = _split(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::"
    if is_any and not socket.has_dualstack_ipv6():
        host, family, is_any = "", socket.AF_INET, False
    try:
        return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=is_any)
    except OSError as error:
        raise RetryableError(f"process 0 cannot listen on {address}: {error}") from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _welcome(listener: socket.socket) -> _Guest | None:
    """The next process that reports; None if it went away or is none of ours."""
    connection, _ = listener.accept()
    connection.settimeout(_ANSWER_SECONDS)
    try:
        return _Guest(connection, int(_receive_line(connection)["process_id"]))
    except (OSError, ValueError, KeyError, TypeError):
        connection.close()
        return None


def _report(cluster: Cluster, ends: float, deadline_seconds: float) -> list[int]:
    """The part of every other process."""
    reason = "no answer"
    while (left_seconds := ends - time.monotonic()) > 0:
        try:
            patience_seconds = min(left_seconds, _ANSWER_SECONDS)
            with socket.create_connection(_split(cluster.coordinator), patience_seconds) as connection:
                _send(connection, {"process_id": cluster.process_id})
                connection.settimeout(left_seconds + _ANSWER_SECONDS)
                answer = _receive_line(connection)
        except (OSError, ValueError) as error:  # not up yet, or gone again
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        if answer["error"] is not None:
            raise RetryableError(str(answer["error"]))
        return [int(process) for process in answer["present"]]
    raise RetryableError(
        f"process 0 of {cluster.num_processes} at {cluster.coordinator} could not be reached within "
        f"{deadline_seconds:g} s ({reason}); run the same command again"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as stream:
        line = stream.readline(_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended before an answer")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("an answer that is none of ours")
    return message
