"""How the processes of a job find each other: all report to process 0, which says who is there.

1. Process 0 listens on the coordinator's port, before JAX does. Every other process connects, trying again until the
   deadline, and reports its process id.
2. When all have come, or the deadline has passed, process 0 tells everyone who came, closes the port and hands it to
   JAX's coordination service. The connections stay open as peer sockets: the kernel of a process that ends closes its
   own, which the other end sees at once (`liveness`).
3. Who is missing is named, and the job ends with 76 on all hosts that came: a start with fewer would be another job.
   If the spec allows it (`topology.elastic`), it begins with those that came, numbered anew in the same order.

Where this process stands among the processes of its job, from what the engine that started it has set.

JAX's own detection answers for TPU pods (one slice or several), SLURM and Open MPI; torchrun's variables are read here.
An engine that says "you are one of several" without saying where the others are is refused: a process that went on
alone would be one of N silent single-host runs.

Start-up: this process joins the others of its job, and gets the one object through which it talks with them.
"""

import contextlib
import ipaddress
import json
import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax._src import clusters, distributed

from runner.distributed.agreement import Hosts, Liveness, install_abort_handler
from runner.distributed.key_value import KeyValueStore
from runner.errors import InvalidError, RetryableError, format_error
from runner.spec import Deadlines

_JAX_CLUSTERS = ("GkeTpuCluster", "GceTpuCluster", "SlurmCluster", "OmpiCluster")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "MEGASCALE_NUM_SLICES")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_FLAGS = "--coordinator HOST:PORT --num-processes N --process-id K"


@dataclass(frozen=True)
class Placement:
    """Where one process stands in its job.

    Attributes:
        coordinator: HOST:PORT of process 0, the same on every process.
        local_devices: indices of the GPUs that are this process's, where one host runs several; None = all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def detect_placement(deadline_seconds: float) -> Placement | None:
    """Where this process stands; None if it is alone. Called on every host, before any other use of JAX.

    Raises `InvalidError` if the environment names peers but not their place, `RetryableError` if the name of process 0
    cannot be resolved within the deadline.
    """
    environment = os.environ
    found = _torchrun(environment) or _by_jax(deadline_seconds)
    if found is not None:
        return found if found.num_processes > 1 else None
    claim = _claim(environment)
    if claim is not None:
        raise InvalidError(
            f"{claim} in the environment says that this is one of several processes, but not where the others are; "
            f"give {_FLAGS}"
        )
    return None


def _torchrun(environment: Mapping[str, str]) -> Placement | None:
    """torchrun keeps MASTER_PORT for itself, so the coordinator listens on the port after it."""
    names = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
    if not all(environment.get(name) for name in names):
        return None
    address, port, size, rank = (environment[name] for name in names)
    coordinator = f"{address}:{environment.get('JAX_COORDINATOR_PORT') or int(port) + 1}"
    return Placement(coordinator, int(size), int(rank), _local_devices(environment))


def _by_jax(deadline_seconds: float) -> Placement | None:
    for name in _JAX_CLUSTERS:
        engine = getattr(clusters, name)
        if not engine.is_env_present():
            continue
        num_processes = engine.get_process_count()
        if num_processes == 1:
            return Placement("", 1, 0)
        port = os.environ.get("JAX_COORDINATOR_PORT")
        try:
            coordinator = engine.get_coordinator_address(int(deadline_seconds), port)
        except RuntimeError as error:
            raise RetryableError(f"cannot join the other processes of the job: {error}") from error
        return Placement(coordinator, num_processes, engine.get_process_id(), _local_devices(os.environ))
    return None


def _local_devices(environment: Mapping[str, str]) -> tuple[int, ...] | None:
    """The GPU of this process, if its host runs several processes of the job."""
    for size, rank in zip(_LOCAL_SIZES, _LOCAL_RANKS, strict=True):
        number = re.match(r"\d+", environment.get(size, ""))  # SLURM: 4(x2) for two hosts with 4 tasks each
        if number is not None and int(number[0]) > 1 and rank in environment:
            return (int(environment[rank]),)
    return None


def _claim(environment: Mapping[str, str]) -> str | None:
    """The variable that says that there are peers."""
    for name in _COUNTS:
        if environment.get(name, "").isdecimal() and int(environment[name]) > 1:
            return f"{name}={environment[name]}"
    for name in _LISTS:
        if "," in environment.get(name, ""):
            return f"{name}={environment[name]}"
    return None


_RETRY_SECONDS = 0.2
_ANSWER_SECONDS = 10.0
_LINE_BYTES = 1 << 20

Connections = dict[int, socket.socket]  # by process


@dataclass(frozen=True)
class RendezvousResult:
    """This process's placement among those that came, and its connections to them.

    Attributes:
        peer_sockets: process -> a connection that ends with it; to every other on process 0, elsewhere to process 0.
    """

    placement: Placement
    peer_sockets: dict[int, socket.socket]


def wait_for_peers(placement: Placement, deadline_seconds: float, is_elastic: bool) -> RendezvousResult:
    """Wait for the other processes. Called on every host, before JAX's own start.

    Blocks until all have come. Raises `RetryableError` naming who has not after the deadline.
    """
    ends = time.monotonic() + deadline_seconds
    if placement.process_id == 0:
        present, connections = _receive(placement, ends, deadline_seconds, is_elastic)
    else:
        present, connections = _report(placement, ends, deadline_seconds)
    mine = replace(placement, num_processes=len(present), process_id=present.index(placement.process_id))
    return RendezvousResult(mine, {present.index(process): connection for process, connection in connections.items()})


def get_bind_address(placement: Placement) -> str:
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
    with _listen(get_bind_address(placement)) as listener:
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


HEARTBEAT_SECONDS = 60  # of JAX; the watchdog notices sooner, and says more


def join_job(placement: Placement | None, deadlines: Deadlines, is_elastic: bool = False) -> Hosts:
    """Join the job's other processes; None = this one is alone.

    Called on every host, before any other use of JAX. Blocks until all are there, at most `deadlines.start_seconds`.
    Raises `RetryableError` naming who did not come; an elastic job begins with those that came.
    """
    if placement is None:
        return Hosts.single_process()
    meeting = wait_for_peers(placement, deadlines.start_seconds, is_elastic)
    placement = meeting.placement
    if placement.num_processes == 1:
        return Hosts.single_process()
    install_abort_handler()
    _join_coordinator(placement, deadlines)
    process_id, num_processes = placement.process_id, placement.num_processes
    store = KeyValueStore(distributed.global_state.client)
    liveness = Liveness(store, process_id, num_processes, meeting.peer_sockets)
    return Hosts(process_id, num_processes, store, liveness, deadlines.phase_seconds)


def _join_coordinator(placement: Placement, deadlines: Deadlines) -> None:
    """JAX's own start, with the coordination service in process 0. Its notice of preemption is `preemption`'s work."""
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=placement.coordinator,
            num_processes=placement.num_processes,
            process_id=placement.process_id,
            local_device_ids=placement.local_devices,
            coordinator_bind_address=get_bind_address(placement),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=int(deadlines.start_seconds),
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"cannot join the other processes of the job: {format_error(error)}") from error
