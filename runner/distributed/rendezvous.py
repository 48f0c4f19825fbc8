"""Start-up of a multi-process job: launch environment, rendezvous with process 0, start of `jax.distributed`.

**Launch environment.** JAX detects TPU pods (one slice or several), SLURM and Open MPI; the variables of torchrun are
read here. An environment that states the number of processes but not where the others are is refused: a process that
continued alone would be one of N silent single-process runs.

**Rendezvous**, before `jax.distributed.initialize`:

1. Process 0 listens on the coordinator's port. Every other process connects, retrying until the deadline, and reports
   its process id.
2. When all processes have joined, or the deadline has passed, process 0 answers every process that joined, closes the
   port and leaves it to JAX's coordination service. The connections stay open as peer sockets: the kernel of a process
   that ends closes them, which the other end notices at once (`agreement.Liveness`).
3. If processes are missing, the error names them and the job ends with exit code 76 on all processes that joined,
   because a start with fewer processes would be a different job. With `topology.elastic` the job starts with those that
   joined, renumbered in the same order. A process that comes later goes on asking; with `topology.grow` it says in the
   run's directory that it waits (`runner.run.attempt`).
"""

import contextlib
import ipaddress
import json
import os
import re
import select
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax._src import clusters, distributed

from runner.distributed.agreement import Hosts, Liveness, install_abort_handler
from runner.distributed.key_value import KeyValueStore
from runner.errors import InvalidError, RetryableError, format_error
from runner.spec import Deadlines

# JAX's own detection, which has no public interface for reading the placement without starting the service.
_JAX_CLUSTERS = ("GkeTpuCluster", "GceTpuCluster", "SlurmCluster", "OmpiCluster")
_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
# Variables that reveal a job of several processes: a number above one, or a list of several hosts.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "MEGASCALE_NUM_SLICES")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_FLAGS = "--coordinator HOST:PORT --num-processes N --process-id K"


@dataclass(frozen=True)
class Placement:
    """Position of one process in its job.

    Attributes:
        coordinator: HOST:PORT of process 0, the same on every process.
        num_processes: processes of the job.
        process_id: this process.
        local_devices: indices of the GPUs of this process, if its host runs several processes; None for all.
    """

    coordinator: str
    num_processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def detect_placement(deadline_seconds: float) -> Placement | None:
    """Return the placement from the launch environment, or None for a single-process job.

    Called on every process, before any other use of JAX.

    Raises:
        InvalidError: the environment states that there are other processes, but not where.
        RetryableError: the name of process 0 cannot be resolved within the deadline.
    """
    environment = os.environ
    if all(environment.get(name) for name in _TORCHRUN_VARIABLES):
        address, port, size, rank = (environment[name] for name in _TORCHRUN_VARIABLES)
        # torchrun uses MASTER_PORT itself, so the coordinator listens on the port after it.
        coordinator = f"{address}:{environment.get('JAX_COORDINATOR_PORT') or int(port) + 1}"
        placement: Placement | None = Placement(coordinator, int(size), int(rank), _find_local_devices())
    else:
        placement = _detect_with_jax(deadline_seconds)
    if placement is not None:
        return placement if placement.num_processes > 1 else None
    claims = [name for name in _COUNTS if environment.get(name, "").isdecimal() and int(environment[name]) > 1]
    claims += [name for name in _LISTS if "," in environment.get(name, "")]
    if claims:
        raise InvalidError(
            f"{claims[0]}={environment[claims[0]]} in the environment says that this is one of several processes, but "
            f"not where the others are; give {_FLAGS}"
        )
    return None


def _detect_with_jax(deadline_seconds: float) -> Placement | None:
    for name in _JAX_CLUSTERS:
        cluster = getattr(clusters, name)
        if not cluster.is_env_present():
            continue
        # In an allocation of several tasks the shell of `salloc` is a step of one, to which JAX gives their number.
        step_tasks = os.environ.get("SLURM_STEP_NUM_TASKS") if name == "SlurmCluster" else None
        num_processes = int(step_tasks or cluster.get_process_count())
        if num_processes == 1:
            return Placement("", 1, 0)
        port = os.environ.get("JAX_COORDINATOR_PORT")
        try:
            coordinator = cluster.get_coordinator_address(int(deadline_seconds), port)
        except RuntimeError as error:
            raise RetryableError(f"cannot join the other processes of the job: {error}") from error
        return Placement(coordinator, num_processes, cluster.get_process_id(), _find_local_devices())
    return None


def _find_local_devices() -> tuple[int, ...] | None:
    """Return the GPU of this process if its host runs several processes of the job, else None."""
    for size, rank in zip(_LOCAL_SIZES, _LOCAL_RANKS, strict=True):
        number = re.match(r"\d+", os.environ.get(size, ""))  # SLURM writes 4(x2) for two hosts with 4 tasks each.
        if number is not None and int(number[0]) > 1 and rank in os.environ:
            return (int(os.environ[rank]),)
    return None


_RETRY_SECONDS = 0.2
ANNOUNCE_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_MAX_LINE_BYTES = 1 << 20

Connections = dict[int, socket.socket]  # by process


@dataclass(frozen=True)
class RendezvousResult:
    """Placement of this process among those that joined, and its connections to them.

    Attributes:
        placement: the placement, renumbered if processes are missing.
        peer_sockets: by process, a connection that closes when it ends: on process 0 to every other process, on the
            others to process 0.
    """

    placement: Placement
    peer_sockets: Connections


def wait_for_peers(
    placement: Placement, deadline_seconds: float, is_elastic: bool, announce: Callable[[], None] = lambda: None
) -> RendezvousResult:
    """Block until every process has joined. Called on every process, before `jax.distributed.initialize`.

    Args:
        placement: position of this process.
        deadline_seconds: time for all processes to join.
        is_elastic: if True, return with the processes that joined before the deadline.
        announce: called every `ANNOUNCE_SECONDS` while process 0 does not answer.

    Raises:
        RetryableError: processes did not join in time, and the message names them; or process 0 cannot be reached.
    """
    end_seconds = time.monotonic() + deadline_seconds
    if placement.process_id == 0:
        present, connections = _accept_peers(placement, end_seconds, deadline_seconds, is_elastic)
    else:
        present, connections = _join_process_0(placement, end_seconds, deadline_seconds, announce)
    renumbered = replace(placement, num_processes=len(present), process_id=present.index(placement.process_id))
    return RendezvousResult(
        renumbered, {present.index(process): connection for process, connection in connections.items()}
    )


def get_bind_address(placement: Placement) -> str:
    """Return the HOST:PORT on which process 0 listens: the address itself, or every interface for a host name.

    On its own host a name may resolve to a loopback address, which no other host can reach.
    """
    host, _, port = placement.coordinator.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return f"[::]:{port}"
    return placement.coordinator


def _accept_peers(
    placement: Placement, end_seconds: float, deadline_seconds: float, is_elastic: bool
) -> tuple[list[int], Connections]:
    """Run the rendezvous on process 0; return the processes that joined, in order, and their connections."""
    num_processes = placement.num_processes
    peers: Connections = {}
    with _listen(get_bind_address(placement)) as listener:
        while not _has_all(peers, num_processes - 1) and (left_seconds := end_seconds - time.monotonic()) > 0:
            listener.settimeout(left_seconds)
            with contextlib.suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(_ANSWER_SECONDS)
                process = None
                # A connection that closes early, or that is not from this job (a port scan), must not end the start.
                with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                    process = int(_receive_line(connection)["process_id"])
                if process is not None and 0 < process < num_processes:
                    peers[process] = connection
                else:
                    connection.close()
        _drop_closed(peers)
        present = [0, *sorted(peers)]
        missing = [str(process) for process in range(num_processes) if process not in present]
        error = None
        if missing and not is_elastic:
            who = f"process{'es' * (len(missing) > 1)} {', '.join(missing)} of {num_processes}"
            error = f"{who} did not join within {deadline_seconds:g} s; run the same command again"
        for connection in peers.values():
            with contextlib.suppress(OSError):
                _send(connection, {"present": present, "error": error})
    if error is not None:
        raise RetryableError(error)
    return present, peers


def _has_all(peers: Connections, count: int) -> bool:
    """Return True if `count` processes have joined and wait; those that have ended since are dropped."""
    if len(peers) == count:
        _drop_closed(peers)
    return len(peers) == count


def _drop_closed(peers: Connections) -> None:
    poller, processes = select.poll(), {connection.fileno(): process for process, connection in peers.items()}
    for number in processes:
        poller.register(number, select.POLLIN)
    for number, _ in poller.poll(0):
        # A process that waits for the answer sends nothing more, so what can be read is the end of the connection.
        peers.pop(processes[number]).close()


def _listen(address: str) -> socket.socket:
    host, port = _split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_any = host == "::"
    # One socket for IPv4 and IPv6 where possible: the other processes may resolve the name to either.
    if is_any and not socket.has_dualstack_ipv6():
        host, family, is_any = "", socket.AF_INET, False
    try:
        # All processes of a large job connect at the same moment, hence the long backlog.
        return socket.create_server((host, port), family=family, backlog=4096, dualstack_ipv6=is_any)
    except OSError as error:
        raise RetryableError(f"process 0 cannot listen on {address}: {error}") from error


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _join_process_0(
    placement: Placement, end_seconds: float, deadline_seconds: float, announce: Callable[[], None]
) -> tuple[list[int], Connections]:
    """Run the rendezvous on another process; return the processes that joined, and the connection to process 0."""
    reason, next_seconds = "no answer", time.monotonic() + ANNOUNCE_SECONDS
    while (left_seconds := end_seconds - time.monotonic()) > 0:
        connection = None
        try:
            address = _split_address(placement.coordinator)
            connection = socket.create_connection(address, min(left_seconds, _ANSWER_SECONDS))
            _send(connection, {"process_id": placement.process_id})
            connection.settimeout(left_seconds + _ANSWER_SECONDS)
            answer = _receive_line(connection)
            error, present = answer["error"], [int(process) for process in answer["present"]]
            if placement.process_id not in present:
                raise ValueError("the answer leaves this process out")
        # Process 0 is not up yet, or is being restarted, or something else has its port for now.
        except (OSError, ValueError, KeyError, TypeError, OverflowError) as failure:
            reason = f"no {failure} in the answer" if isinstance(failure, KeyError) else str(failure)
            if connection is not None:
                connection.close()
            if time.monotonic() >= next_seconds:
                announce()
                next_seconds = time.monotonic() + ANNOUNCE_SECONDS
            time.sleep(_RETRY_SECONDS)
            continue
        if error is not None:
            raise RetryableError(str(error))
        return present, {0: connection}
    raise RetryableError(
        f"process 0 of {placement.num_processes} at {placement.coordinator} could not be reached within "
        f"{deadline_seconds:g} s ({reason}); run the same command again"
    )


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive_line(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as stream:
        line = stream.readline(_MAX_LINE_BYTES)
    if not line.endswith(b"\n"):
        raise ValueError("the connection ended before an answer")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the answer is not one of this protocol")
    return message


# Timeout of JAX's coordination service. It is long, because the runner's watchdog notices a lost process sooner and
# names it.
_HEARTBEAT_TIMEOUT_SECONDS = 60


def join_job(
    placement: Placement | None,
    deadlines: Deadlines,
    is_elastic: bool = False,
    announce: Callable[[], None] = lambda: None,
) -> Hosts:
    """Join the other processes of the job and start `jax.distributed`.

    Called on every process, before any other use of JAX. Blocks until all processes have joined, for at most
    `deadlines.start_seconds`.

    Args:
        placement: position of this process; None for a single-process job.
        deadlines: deadlines of the spec.
        is_elastic: if True, the job starts with the processes that joined in time.
        announce: called every `ANNOUNCE_SECONDS` while process 0 does not answer.

    Raises:
        RetryableError: processes did not join in time; the message names them.
    """
    if placement is None:
        return Hosts.single_process()
    result = wait_for_peers(placement, deadlines.start_seconds, is_elastic, announce)
    num_missing = placement.num_processes - result.placement.num_processes
    placement = result.placement
    process_id, num_processes = placement.process_id, placement.num_processes
    if num_processes == 1:
        return Hosts.single_process(num_missing)
    install_abort_handler()
    # `runner.distributed.preemption` watches for preemption itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            coordinator_address=placement.coordinator,
            num_processes=num_processes,
            process_id=process_id,
            local_device_ids=placement.local_devices,
            coordinator_bind_address=get_bind_address(placement),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_SECONDS,
            initialization_timeout=int(deadlines.start_seconds),
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"cannot join the other processes of the job: {format_error(error)}") from error
    store = KeyValueStore(distributed.global_state.client)
    liveness = Liveness(store, process_id, num_processes, result.peer_sockets)
    return Hosts(process_id, num_processes, store, liveness, deadlines.phase_seconds, num_missing)
