"""How the processes of a job find each other: all report to process 0, which says who is there.

1. Process 0 listens on the coordinator's port, before JAX does. Every other process connects, trying again until the
   deadline, and reports its process id.
2. When all have come, or the deadline has passed, process 0 tells everyone who came, closes the port and hands it to
   JAX's coordination service. The connections stay open as peer sockets: the kernel of a process that ends closes its
   own, which the other end sees at once (`liveness`).
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

from runner.errors import RetryableError
from runner.hosts.placement import Placement

_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_LINE_BYTES = 1 << 20

Connections = dict[int, socket.socket]  # by process


@dataclass(frozen=True)
class Meeting:
    """This process's placement among those that came, and its connections to them.

    Attributes:
        peer_sockets: process -> a connection that ends with it; to every other on process 0, elsewhere to process 0.
    """

    placement: Placement
    peer_sockets: dict[int, socket.socket]


def meet(placement: Placement, deadline_seconds: float, is_elastic: bool) -> Meeting:
    """Wait for the other processes. Called on every host, before JAX's own start.

    Blocks until all have come. Raises `RetryableError` naming who has not after the deadline.
    """
    ends = time.monotonic() + deadline_seconds
    if placement.process_id == 0:
        present, connections = _receive(placement, ends, deadline_seconds, is_elastic)
    else:
        present, connections = _report(placement, ends, deadline_seconds)
    mine = replace(placement, num_processes=len(present), process_id=present.index(placement.process_id))
    return Meeting(mine, {present.index(process): connection for process, connection in connections.items()})


def listening_address(placement: Placement) -> str:
    """HOST:PORT that process 0 listens on: the address itself, or every interface for a name.

    On its own host a name may stand for a loopback address that no other host reaches.
    """
    host, _, port = placement.coordinator.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"[::]:{port}"
    return placement.coordinator


def _receive(
    placement: Placement, ends: float, deadline_seconds: float, is_elastic: bool
) -> tuple[list[int], Connections]:
    """Process 0's part: the processes that are there, in order."""
    guests: Connections = {}
    with _listen(listening_address(placement)) as listener:
        while len(guests) < placement.num_processes - 1 and (left_seconds := ends - time.monotonic()) > 0:
            listener.settimeout(left_seconds)
            with contextlib.suppress(TimeoutError):
                guests |= _welcome(listener, placement.num_processes)
        present = [0, *sorted(guests)]
        missing = [process for process in range(placement.num_processes) if process not in present]
        error = _complaint(missing, placement.num_processes, deadline_seconds) if missing and not is_elastic else None
        for connection in guests.values():
            with contextlib.suppress(OSError):
                _send(connection, {"present": present, "error": error})
    if error is not None:
        raise RetryableError(error)
    return present, guests


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


def _welcome(listener: socket.socket, num_processes: int) -> Connections:
    """The next process that reports, with its connection; none if it went away or is none of ours."""
    connection, _ = listener.accept()
    connection.settimeout(_ANSWER_SECONDS)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        process = int(_receive_line(connection)["process_id"])
        if 0 < process < num_processes:
            return {process: connection}
    connection.close()
    return {}


def _report(placement: Placement, ends: float, deadline_seconds: float) -> tuple[list[int], Connections]:
    """The part of every other process."""
    reason = "no answer"
    while (left_seconds := ends - time.monotonic()) > 0:
        try:
            connection = socket.create_connection(_split(placement.coordinator), min(left_seconds, _ANSWER_SECONDS))
        except OSError as error:  # not up yet
            reason = str(error)
            time.sleep(_RETRY_SECONDS)
            continue
        try:
            _send(connection, {"process_id": placement.process_id})
            connection.settimeout(left_seconds + _ANSWER_SECONDS)
            answer = _receive_line(connection)
        except (OSError, ValueError) as error:  # disconnected again
            connection.close()
            reason = str(error)
            continue
        if answer["error"] is not None:
            raise RetryableError(str(answer["error"]))
        return [int(process) for process in answer["present"]], {0: connection}
    raise RetryableError(
        f"process 0 of {placement.num_processes} at {placement.coordinator} could not be reached within "
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
