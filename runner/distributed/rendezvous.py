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
   A connection of a stranger, such as a port scan, holds up nothing (`Acceptor`).
3. If processes are missing, the error names them and the job ends with exit code 76 on all processes that joined,
   because a start with fewer processes would be a different job. With `topology.elastic` the job starts with those that
   joined, renumbered in the same order, unless other hosts run it already.
4. If process 0 is missing in an elastic job, the lowest process that is present takes its role. Processes that cannot
   reach process 0 find each other by notices in the directory of the run (`Members`), so the run must have begun. Each
   of them listens, and keeps trying to reach process 0 and the lower processes. When it reaches one of them, it stops
   listening, and the processes that have joined it follow.
"""

import contextlib
import ipaddress
import json
import math
import os
import re
import select
import selectors
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, Self

import jax

from runner.distributed.agreement import Hosts, Liveness, find_ranges, format_processes, install_abort_handler
from runner.distributed.key_value import KeyValueStore
from runner.distributed.limits import raise_descriptor_limit, raise_thread_limit
from runner.errors import InvalidError, RetryableError, format_error
from runner.jax_internals import clusters, distributed
from runner.spec import Deadlines
from runner.storage import JsonObject

# JAX's own detection, which has no public interface for reading the placement without starting the service.
_JAX_CLUSTERS = ("GkeTpuCluster", "GceTpuCluster", "SlurmCluster", "OmpiCluster")
_TORCHRUN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
_LOCAL_RANKS = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
# Variables that reveal a job of several processes: a number above one, or a list of several hosts.
_COUNTS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE", "MEGASCALE_NUM_SLICES")
_LISTS = ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")  # in either case
_FLAGS = "--coordinator HOST:PORT --num-processes N --process-id K"


@dataclass(frozen=True)
class Placement:
    """Position of one process in its job."""

    coordinator: str  # HOST:PORT of process 0, the same on every process
    num_processes: int
    process_id: int
    # Indices of the GPUs of this process, if its host runs several processes; None for all.
    local_devices: tuple[int, ...] | None = None


def detect_placement(deadline_seconds: float) -> Placement | None:
    """Return the placement from the launch environment, or None for a single-process job.

    Called on every process, before any other use of JAX. Raises InvalidError if the environment states that there are
    other processes, but not where, or contradicts itself; RetryableError if the name of process 0 is not resolved in
    time.
    """
    environment = os.environ
    try:
        if all(environment.get(name) for name in _TORCHRUN_VARIABLES):
            address, port, size, rank = (environment[name] for name in _TORCHRUN_VARIABLES)
            # torchrun uses MASTER_PORT itself, so the coordinator listens on the port after it.
            coordinator = f"{address}:{environment.get('JAX_COORDINATOR_PORT') or int(port) + 1}"
            placement: Placement | None = Placement(coordinator, int(size), int(rank), _find_local_devices())
        else:
            placement = _detect_with_jax(deadline_seconds)
        if placement is not None and placement.num_processes > 1:
            _, number = _split_address(placement.coordinator)
            if not 0 < number < 65536:
                raise ValueError(f"{number} is no port")
    except (ValueError, LookupError) as error:
        raise InvalidError(f"the launch environment cannot be read ({format_error(error)}); give {_FLAGS}") from error
    if placement is not None:
        if not 0 <= placement.process_id < placement.num_processes:
            raise InvalidError(
                f"the launch environment says that this is process {placement.process_id} of "
                f"{placement.num_processes}, counted from 0; give {_FLAGS}"
            )
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
        # The shell of `salloc` in an allocation of several tasks is a step of one task, but JAX reads the number of all
        # tasks.
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
    """Return the GPU of this process if its host runs several processes of the job, else None.

    A process that sees one GPU, because the engine has bound it, uses that.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "").strip(",") and "," not in os.environ["CUDA_VISIBLE_DEVICES"]:
        return None
    for size, rank in zip(_LOCAL_SIZES, _LOCAL_RANKS, strict=True):
        number = re.match(r"\d+", os.environ.get(size, ""))  # SLURM writes 4(x2) for two hosts with 4 tasks each.
        if number is not None and int(number[0]) > 1 and rank in os.environ:
            return (int(os.environ[rank]),)
    return None


_RETRY_SECONDS = 0.2
ANNOUNCE_SECONDS = 3.0
_ANSWER_SECONDS = 10.0
_CONNECT_SECONDS = 2.0  # for a process that may have left its notice behind
_OBSERVATION_SECONDS = 40.0  # which `Members.find_running_attempt` may take
_ANY_HOSTS = ("192.0.2.1", "2001:db8::1")  # addresses of documentation (RFC 5737, 3849), reached by the default route
_LISTEN_PERIODS = 4  # of ANNOUNCE_SECONDS, in which others find a process that listens
_MAX_LISTENERS = 5
_MAX_GREETING_BYTES = 1 << 12
_MAX_LINE_BYTES = 1 << 20  # of an answer, which has the numbers of all processes as ranges
_CHUNK_BYTES = 1 << 16

Connections = dict[int, socket.socket]  # by process


class Members(Protocol):
    """Membership of an elastic job as its directory shows it. Implemented by `runner.attempts.membership`."""

    run_id: str | None  # id of the run in the directory; None while there is none, or it is not known yet

    def announce(self, address: str | None) -> None:
        """Publish from now on that this process waits, and the HOST:PORT at which others can join it, if any.

        Does not block.
        """

    def list_addresses(self) -> list[str]:
        """Return the addresses of the processes before this one that wait, the lowest first."""

    def find_running_attempt(self) -> int | None:
        """Return the number of the attempt of other hosts that runs or has run during the wait, or None.

        Blocks for at most `_OBSERVATION_SECONDS`. Raises `RetryableError` if the directory does not answer.
        """


@dataclass(frozen=True)
class RendezvousResult:
    """Placement of this process among those that joined, and its connections to them."""

    placement: Placement  # the placement, renumbered if processes are missing, with the address of its process 0
    # By process, a connection that closes when it ends: on process 0 to every other process, on the others to process
    # 0.
    peer_sockets: Connections


def wait_for_peers(placement: Placement, deadline_seconds: float, members: Members | None = None) -> RendezvousResult:
    """Block until every process has joined. Called on every process, before `jax.distributed.initialize`.

    An elastic job, with `members`, begins with the processes that joined before the deadline, and takes up to
    `_OBSERVATION_SECONDS` longer if some are missing. Otherwise all must join. Raises RetryableError that names the
    missing processes, or if process 0 cannot be reached, or if the elastic job runs on other hosts.
    """
    end_seconds = time.monotonic() + deadline_seconds
    if placement.process_id == 0:
        address = placement.coordinator
        with _Listener(placement, get_bind_address(placement), members) as listener:
            present, connections = listener.wait_for_all(end_seconds, deadline_seconds)
    else:
        present, connections, address = _join_lower_process(placement, end_seconds, deadline_seconds, members)
    numbers = {process: number for number, process in enumerate(present)}
    renumbered = replace(
        placement, coordinator=address, num_processes=len(present), process_id=numbers[placement.process_id]
    )
    return RendezvousResult(renumbered, {numbers[process]: connection for process, connection in connections.items()})


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


def bypass_proxies(variables: MutableMapping[str, str], address: str) -> None:
    """Add the host of an address to `no_proxy`, if the environment names a proxy, and keep what is there.

    gRPC, with which JAX connects to process 0, would ask the proxy for that connection, but a proxy is for hosts
    outside of the cluster. Call it before JAX starts. `address` is HOST:PORT of process 0.
    """
    if not any(name.lower() in _PROXIES and value for name, value in variables.items()):
        return
    host, _ = _split_address(address)
    # A program that finds `no_proxy` does not read `NO_PROXY`, and gRPC does not read it beside `no_grpc_proxy`.
    exceptions = {"no_proxy": variables.get("no_proxy", variables.get("NO_PROXY", ""))}
    exceptions |= {name: variables[name] for name in ("no_grpc_proxy",) if name in variables}
    for name, hosts in exceptions.items():
        known = [each.strip() for each in hosts.split(",")]
        if host not in known:
            variables[name] = ",".join(filter(None, [*known, host]))


GREETING_SECONDS = 10.0
MAX_STRANGERS = 256
_PAUSE_SECONDS = 0.05  # after an accept that failed because this process has too many open files


class Greeting(NamedTuple):
    """Connection that is read no more: it has sent a line, or too long a one, or has ended."""

    connection: socket.socket  # the connection, which does not block; its reader closes it
    line: bytes  # what it has sent; it ends with a newline only if it is a whole line


@dataclass
class _Stranger:
    """Connection that has not sent its first line."""

    connection: socket.socket
    end_seconds: float
    line: bytearray = field(default_factory=bytearray)

    def read(self, max_line_bytes: int) -> bool:
        """Read what has come of the line, and return True if no more is to be read."""
        try:
            # What follows the line is left to its reader.
            found = self.connection.recv(max_line_bytes - len(self.line), socket.MSG_PEEK)
            self.line += self.connection.recv(found.find(b"\n") + 1 or len(found))
        except BlockingIOError:
            return False
        except OSError:
            return True
        return not found or self.line.endswith(b"\n") or len(self.line) == max_line_bytes


class Acceptor:
    """Connections to a port of this process, bounded in number, time and memory until each has said who it is.

    Any host of the network can connect, and say nothing, or a byte a minute. One thread therefore reads the first line
    of all connections at the same time:

    - A connection has `GREETING_SECONDS` for its whole first line, however its bytes arrive.
    - At most `MAX_STRANGERS` connections have not sent theirs. A further one takes the place of the oldest.
    - A line has at most as many bytes as the protocol needs. Nothing beyond the line is read.
    """

    def __init__(self, listener: socket.socket, max_line_bytes: int):
        """Take over a listening socket; a line has at most `max_line_bytes`, the newline included."""
        self._listener, self._max_line_bytes = listener, max_line_bytes
        self._strangers: dict[int, _Stranger] = {}  # by file descriptor, the oldest first
        self._selector = selectors.DefaultSelector()
        self._listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def close(self) -> None:
        """Stop listening, and close the connections that have not sent their first line."""
        for number in list(self._strangers):
            self._forget(number).close()
        self._selector.close()
        self._listener.close()

    def poll(self, seconds: float) -> list[Greeting]:
        """Return the connections that have sent their first line, as soon as there is one, or after this time."""
        end_seconds = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            while self._strangers and next(iter(self._strangers.values())).end_seconds <= now:
                self._close_oldest()
            oldest = next(iter(self._strangers.values()), None)
            until_seconds = end_seconds if oldest is None else min(oldest.end_seconds, end_seconds)
            ready = {key.fd for key, _ in self._selector.select(max(until_seconds - now, 0))}
            # Lines that have come are read before new connections may take the place of theirs.
            greetings = self.read_lines(ready)
            if self._listener.fileno() in ready:
                greetings += self.read_lines(self.accept_waiting())
            if greetings or time.monotonic() >= end_seconds:
                return greetings

    def read_lines(self, numbers: set[int]) -> list[Greeting]:
        """Read from the connections with these file descriptors, and return those that are read no more."""
        greetings = []
        for number in numbers & self._strangers.keys():
            stranger = self._strangers[number]
            if stranger.read(self._max_line_bytes):
                self._forget(number)
                greetings.append(Greeting(stranger.connection, bytes(stranger.line)))
        return greetings

    def accept_waiting(self) -> set[int]:
        """Accept the connections that wait, and return their file descriptors."""
        accepted = set()
        for _ in range(MAX_STRANGERS):
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                break
            except OSError:
                # The connection has ended already, or there are too many open files.
                self._close_oldest()
                time.sleep(_PAUSE_SECONDS)
                break
            connection.setblocking(False)
            if len(self._strangers) == MAX_STRANGERS:
                self._close_oldest()
            self._strangers[connection.fileno()] = _Stranger(connection, time.monotonic() + GREETING_SECONDS)
            self._selector.register(connection, selectors.EVENT_READ)
            accepted.add(connection.fileno())
        return accepted

    def _close_oldest(self) -> None:
        with contextlib.suppress(StopIteration):
            self._forget(next(iter(self._strangers))).close()

    def _forget(self, number: int) -> socket.socket:
        self._selector.unregister(number)
        return self._strangers.pop(number).connection


class _Listener:
    """Listener of process 0, or of a process that may take its role, and the processes that have joined it.

    Raises `RetryableError` if it cannot listen. `address` is its HOST:PORT.
    """

    def __init__(self, placement: Placement, bind_address: str, members: Members | None):
        self._placement = placement
        self._members = members
        self._peers: Connections = {}
        listener = _listen(bind_address)
        host, _ = _split_address(bind_address)
        self.address = _join_address(host, listener.getsockname()[1])
        self._acceptor = Acceptor(listener, _MAX_GREETING_BYTES)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()

    def accept(self, seconds: float) -> None:
        """Accept processes for this time at most; return once one has joined and no other waits."""
        end_seconds, has_joined = time.monotonic() + seconds, False
        while not has_joined:
            greetings = self._acceptor.poll(max(end_seconds - time.monotonic(), 0))
            if not greetings and time.monotonic() >= end_seconds:
                return
            for connection, line in greetings:
                process = None
                # A connection that closes early, or that is not from this job (a port scan), must not end the start.
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError, OverflowError):
                    greeting = _parse_message(line)
                    # The address may have belonged to another job before.
                    run_id = None if self._members is None else self._members.run_id
                    is_own_run = self._placement.process_id == 0 or greeting["run"] == run_id
                    process = int(greeting["process_id"]) if is_own_run else None
                if process is None or not self._placement.process_id < process < self._placement.num_processes:
                    connection.close()
                    continue
                connection.settimeout(_ANSWER_SECONDS)
                with contextlib.suppress(OSError):  # `_drop_closed` finds one that has ended
                    _send(connection, {"joined": self._placement.process_id})
                if process in self._peers:
                    self._peers[process].close()
                self._peers[process] = connection
                has_joined = True

    def wait_for_all(self, end_seconds: float, deadline_seconds: float) -> tuple[list[int], Connections]:
        """Wait until all processes have joined, or until the deadline, and `answer`. Process 0 only."""
        next_seconds = time.monotonic() + ANNOUNCE_SECONDS
        while not self._has_all() and (left_seconds := end_seconds - time.monotonic()) > 0:
            self.accept(min(left_seconds, ANNOUNCE_SECONDS))
            if self._members is not None and time.monotonic() >= next_seconds:
                # The others may run without this process, which then waits for them to stop.
                self._members.announce(self._placement.coordinator)
                next_seconds = math.inf
        return self.answer(deadline_seconds)

    def answer(self, deadline_seconds: float) -> tuple[list[int], Connections]:
        """Answer every process that has joined; return the processes, in order, and their connections.

        Raises RetryableError if the job cannot begin without the processes that are missing.
        """
        _drop_closed(self._peers)
        num_processes, own = self._placement.num_processes, self._placement.process_id
        error = None
        if self._members is not None and len(self._peers) < num_processes - 1:
            try:
                attempt = self._members.find_running_attempt()
            except RetryableError as failure:
                error = str(failure)
            else:
                if attempt is not None:
                    error = f"attempt {attempt} runs the job on other hosts; run the same command again to join them"
            self.accept(0)
            _drop_closed(self._peers)
            error = None if self._has_all() else error
        present = [own, *sorted(self._peers)]
        missing = sorted({*range(num_processes)}.difference(present))
        if missing and self._members is None:
            error = (
                f"{format_processes(missing)} of {num_processes} did not join within {deadline_seconds:g} s; run the "
                "same command again"
            )
        # The answers fit into the buffers of the kernel, unless the other end is none of this protocol.
        answered_seconds = time.monotonic() + _ANSWER_SECONDS
        answer = {"present": find_ranges(present), "error": error}
        for connection in self._peers.values():
            connection.settimeout(max(answered_seconds - time.monotonic(), _RETRY_SECONDS))
            with contextlib.suppress(OSError):
                _send(connection, answer)
        if error is not None:
            raise RetryableError(error)
        return present, self._peers

    def abandon(self) -> None:
        """Stop listening, and close the connections of the processes that have joined, which ask again elsewhere."""
        self._acceptor.close()
        for connection in self._peers.values():
            connection.close()

    def _has_all(self) -> bool:
        """Return True if all processes have joined and wait; those that have ended since are dropped."""
        count = self._placement.num_processes - 1
        if len(self._peers) == count:
            _drop_closed(self._peers)
        return len(self._peers) == count


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
        raise RetryableError(f"cannot listen on {address} for the other processes: {error}") from error


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _join_lower_process(
    placement: Placement, end_seconds: float, deadline_seconds: float, members: Members | None
) -> tuple[list[int], Connections, str]:
    """Run the rendezvous on a process other than 0.

    Returns the processes that joined, in order; the connections; the address of the process with the role of process 0.
    """
    process_0, listener, reason = placement.coordinator, None, "no answer"
    announce_seconds = time.monotonic() + ANNOUNCE_SECONDS
    answer_seconds = _ANSWER_SECONDS + (0 if members is None else _OBSERVATION_SECONDS)
    num_listeners = 0
    while (left_seconds := end_seconds - time.monotonic()) > 0:
        for address in [process_0, *([] if members is None else members.list_addresses())]:
            patience_seconds = _ANSWER_SECONDS if address == process_0 else _CONNECT_SECONDS
            try:
                connection = socket.create_connection(_split_address(address), min(left_seconds, patience_seconds))
            # The process has not started yet, or is being restarted.
            except (OSError, ValueError, OverflowError) as failure:
                reason = str(failure) if address == process_0 else reason
                continue
            lines = _LineReader(connection)
            try:
                # A process that may take the role of process 0 accepts others between its attempts to reach that.
                patience_seconds = left_seconds + answer_seconds if members is None else 2 * _ANSWER_SECONDS
                _ask_to_join(lines, placement.process_id, members, time.monotonic() + patience_seconds)
                if listener is not None:
                    listener.abandon()
                    listener = None
                if members is not None:
                    # A job that runs without both processes grows once it knows of both.
                    lines.wait(announce_seconds)
                    members.announce(None)
                answered_seconds = max(end_seconds, time.monotonic()) + answer_seconds
                present = _receive_answer(lines, placement, answered_seconds)
            # The process has ended, or has followed a lower process, or another program uses its port.
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as failure:
                connection.close()
                reason = f"no {failure} in the answer" if isinstance(failure, KeyError) else str(failure)
                continue
            return present, {present[0]: connection}, address
        is_due = listener is None and num_listeners < _MAX_LISTENERS and time.monotonic() >= announce_seconds
        if members is not None and is_due:
            host = _find_own_host(process_0)
            if host is not None:
                num_listeners += 1
                listener = _Listener(placement, _join_address(host, 0), members)
                # Others need time to find it, also after the deadline, if a process that this one had joined is lost.
                end_seconds = max(end_seconds, time.monotonic() + _LISTEN_PERIODS * ANNOUNCE_SECONDS)
            members.announce(None if listener is None else listener.address)
        if listener is None:
            time.sleep(_RETRY_SECONDS)
        else:
            listener.accept(_RETRY_SECONDS)
    if listener is not None and members is not None and members.run_id is not None:
        with listener:
            present, connections = listener.answer(deadline_seconds)
        return present, connections, listener.address
    raise RetryableError(
        f"process 0 of {placement.num_processes} at {process_0} could not be reached within "
        f"{deadline_seconds:g} s ({reason}); run the same command again"
    )


def _ask_to_join(lines: "_LineReader", process_id: int, members: Members | None, end_seconds: float) -> None:
    """Join the process at the other end, which has the role of process 0 or may take it.

    Raises ValueError, or another error of sockets and of JSON, if something else is at the other end.
    """
    lines.connection.settimeout(_ANSWER_SECONDS)
    _send(lines.connection, {"process_id": process_id, "run": None if members is None else members.run_id})
    if int(lines.receive(end_seconds)["joined"]) >= process_id:
        raise ValueError("the answer is of no lower process")


def _receive_answer(lines: "_LineReader", placement: Placement, end_seconds: float) -> list[int]:
    """Return the processes that have joined, once all have or the deadline of the other end has passed.

    Raises RetryableError if the job does not begin, and as `_ask_to_join`.
    """
    answer = lines.receive(end_seconds)
    error, present = answer["error"], list[int]()
    for first, last in answer["present"]:
        if not max(present, default=-1) < int(first) <= int(last) < placement.num_processes:
            raise ValueError("the answer has processes that the job does not have")
        present += range(int(first), int(last) + 1)
    if placement.process_id not in present:
        raise ValueError("the answer leaves this process out")
    if error is not None:
        raise RetryableError(str(error))
    return present


def _find_own_host(coordinator: str) -> str | None:
    """Return the IP address of this host in the network of process 0, or else in that of the default route, if any."""
    process_0, _ = _split_address(coordinator)
    for host in (process_0, *_ANY_HOSTS):
        # A socket for datagrams that is connected has an address, and sends nothing.
        with contextlib.suppress(OSError, ValueError):
            family, *_, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(address)
                own = str(probe.getsockname()[0])
                # A host may know its own name as an address of loopback, which no other host can reach.
                if not ipaddress.ip_address(own).is_loopback or own == process_0 or process_0 == "localhost":
                    return own
    return None


def _join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _send(connection: socket.socket, message: JsonObject) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


class _LineReader:
    """Reader of the lines of a connection, with a deadline for each line, however its bytes arrive."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self._buffer = b""

    def wait(self, end_seconds: float) -> None:
        """Block until something more has come, or until the deadline."""
        if not self._buffer:
            poll = select.poll()  # `select.select` refuses the descriptors of a process that has opened 1,024
            poll.register(self.connection, select.POLLIN)
            poll.poll(max(end_seconds - time.monotonic(), 0) * 1000)

    def receive(self, end_seconds: float) -> JsonObject:
        """Return the next line. Raises TimeoutError after the deadline (monotonic), ValueError for another protocol."""
        while b"\n" not in self._buffer:
            left_seconds = end_seconds - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError("no whole answer in time")
            self.connection.settimeout(left_seconds)
            found = self.connection.recv(_CHUNK_BYTES)
            self._buffer += found
            if not found or len(self._buffer) > _MAX_LINE_BYTES:
                raise ValueError("the connection ended before an answer")
        line, _, self._buffer = self._buffer.partition(b"\n")
        return _parse_message(line)


def _parse_message(line: bytes) -> JsonObject:
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("the answer is not one of this protocol")
    return message


# Timeout of JAX's coordination service. It is long, because the runner's watchdog notices a lost process sooner and
# names it.
_HEARTBEAT_TIMEOUT_SECONDS = 60


def join_job(placement: Placement | None, deadlines: Deadlines, members: Members | None = None) -> Hosts:
    """Join the other processes of the job and start `jax.distributed`.

    Called on every process, before any other use of JAX. Blocks until all processes have joined, see `wait_for_peers`,
    whose errors it raises; and InvalidError if a limit of this process is too low. `placement` is None for a
    single-process job, `members` for a job that is not elastic.
    """
    raise_thread_limit()
    if placement is None:
        raise_descriptor_limit(0)
        return Hosts.single_process()
    # Process 0 has a connection of the watchdog and one of the coordination service to every other one.
    raise_descriptor_limit(2 * placement.num_processes if placement.process_id == 0 else 2)
    result = wait_for_peers(placement, deadlines.start_seconds, members)
    num_missing = placement.num_processes - result.placement.num_processes
    placement = result.placement
    process_id, num_processes = placement.process_id, placement.num_processes
    if num_processes == 1:
        return Hosts.single_process(num_missing)
    install_abort_handler()
    bypass_proxies(os.environ, placement.coordinator)
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
