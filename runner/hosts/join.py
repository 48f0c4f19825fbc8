"""The processes of a job: start-up, the main host, agreement, and the loss of a peer.

Host 0 decides, everyone hears. Agreement runs over the coordination service's key-value store, never over a device
collective, so it works before any mesh exists and while devices are busy. Every wait has a deadline and names who is
late. When a peer dies, JAX's coordination service ends the survivors with SIGABRT, past any Python handler;
`start` turns that into exit code 76.
"""

import contextlib
import ctypes
import json
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from runner.errors import EXIT_RETRYABLE, InvalidError, PeerLostError, RetryableError, first_line
from runner.hosts.placement import Cluster
from runner.hosts.preemption import end_process
from runner.hosts.rendezvous import listening_address, meet
from runner.spec import Deadlines

HEARTBEAT_SECONDS = 60  # of JAX; the watchdog notices sooner, and says more
_LEAVE_SECONDS = 10
_DEPARTURE_SECONDS = 0.2
_FOREVER_SECONDS = 7 * 24 * 3600


class Hosts:
    """This process and its peers. One instance a process, made by `start`."""

    def __init__(
        self,
        client: Any,
        process_id: int,
        num_processes: int,
        deadline_seconds: float = 3600.0,
        lifelines: dict[int, socket.socket] | None = None,
    ):
        self._client = client
        self.process_id = process_id
        self.num_processes = num_processes
        self.suspects_peer = False  # a collective has failed here
        self.on_peer_lost: Callable[[], None] | None = None  # called before JAX ends this process
        self._lifelines = lifelines or {}
        self._deadline_seconds = deadline_seconds
        self._num_calls = 0
        self._last_gather = "runner/gather/0"

    @property
    def is_main(self) -> bool:
        """Whether this is host 0, which decides and writes."""
        return self.process_id == 0

    def _get(self, key: str, deadline_seconds: float, what: str) -> str:
        try:
            return self._client.blocking_key_value_get(key, int(deadline_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(f"{what} did not come within {deadline_seconds:.0f} s ({first_line(error)})") from error

    def _set(self, key: str, value: str) -> None:
        try:
            self._client.key_value_set(key, value, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(f"the coordinator cannot be reached ({first_line(error)})") from error

    def publish(self, key: str, value: Any) -> None:
        """Set `key` to `value` (JSON) for every host. Never waits for one. Any thread."""
        self._set(key, json.dumps(value))

    def peek(self, key: str) -> Any:
        """The value of `key` (JSON), None if it has none yet. Never waits for a host. Any thread."""
        try:
            return json.loads(self._client.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise PeerLostError(f"the coordinator cannot be reached ({first_line(error)})") from error

    def peek_all(self, prefix: str) -> dict[str, Any]:
        """The values (JSON) of all keys `prefix`/<name>, by name. Never waits for a host. Any thread."""
        try:
            rows = self._client.key_value_dir_get(prefix)
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(f"the coordinator cannot be reached ({first_line(error)})") from error
        return {key.rpartition("/")[2]: json.loads(value) for key, value in rows}

    def gone(self) -> list[int]:
        """Processes that have ended, of those that this one has a lifeline to. Any thread."""
        poll = select.poll()  # `select` refuses the descriptors of a pod of a thousand hosts
        for connection in self._lifelines.values():
            poll.register(connection, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return [process for process, connection in self._lifelines.items() if connection.fileno() in ended]

    def dead(self) -> list[int]:
        """Those that are gone and have not left in order. Any thread."""
        return [process for process in self.gone() if self.peek(f"runner/left/{process}") is None]

    def gather(self, value: Any, deadline_seconds: float | None = None) -> list[Any]:
        """Every host's `value` (JSON), in order of process. Blocks until all have come. Called on every host."""
        if self.num_processes == 1:
            return [value]
        self._num_calls += 1
        prefix = f"runner/gather/{self._num_calls}"
        self.publish(f"{prefix}/{self.process_id}", value)
        self._meet(prefix, self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        if self.is_main:  # all have read what was agreed and gathered before
            for past in ("runner/agree", self._last_gather):
                self._client.key_value_delete(past)
        self._last_gather = prefix
        values = self.peek_all(prefix)
        return [values[str(process)] for process in range(self.num_processes)]

    def _meet(self, prefix: str, deadline_seconds: float) -> None:
        """Wait until every host has set its key below `prefix`: one call to the coordinator, however many there are."""
        try:
            self._client.wait_at_barrier(f"{prefix}/all", int(deadline_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            came = self.peek_all(prefix)
            late = [str(process) for process in range(self.num_processes) if str(process) not in came]
            who = f"process{'es' * (len(late) > 1)} {', '.join(late) or '(all came)'} of {self.num_processes}"
            raise PeerLostError(f"{who} did not come within {deadline_seconds:.0f} s ({first_line(error)})") from error

    def collect(self, key: str, value: Any, deadline_seconds: float) -> list[Any]:
        """Every host's `value` (JSON) on host 0, in order of process; elsewhere this host's alone.

        For background threads, whose calls have no order: `key` must be the same on every host and never used again.
        Blocks host 0 alone. Called on every host.
        """
        if self.num_processes == 1 or not self.is_main:
            if not self.is_main:
                self.publish(f"{key}/{self.process_id}", value)
            return [value]
        values = [value]
        for process in range(1, self.num_processes):
            name = f"{key}/{process}"
            values.append(json.loads(self._get(name, deadline_seconds, f"the part of process {process}")))
            self._client.key_value_delete(name)
        return values

    def agree(self, value: Any) -> Any:
        """Host 0's `value` (JSON) on every host; the others' is ignored. Called on every host."""
        if self.num_processes == 1:
            return value
        self._num_calls += 1
        key = f"runner/agree/{self._num_calls}"
        if self.is_main:
            self.publish(key, value)
            return value
        return json.loads(self._get(key, self._deadline_seconds, "the decision of process 0"))

    def main_first(self, act: Callable[[], Any]) -> Any:
        """Run `act` on host 0 and return its JSON result on every host; its `InvalidError` is raised on every host.

        For what may fail on the main host while the others wait. Called on every host.
        """
        result: dict[str, Any] = {}
        if self.is_main:
            try:
                result = {"value": act()}
            except InvalidError as error:
                result = {"invalid": str(error)}
        result = self.agree(result)
        if "invalid" in result:
            raise InvalidError(result["invalid"])
        return result["value"]

    def barrier(self) -> None:
        """Wait until every host is here. Called on every host."""
        self.gather(None)

    def announce_stop(self) -> None:
        """Tell every host that the job was asked to stop."""
        self._set("runner/stop/asked", "1")

    def await_stop(self) -> None:
        """Block until any host has announced a stop."""
        self._get("runner/stop/asked", _FOREVER_SECONDS, "the end of the job")

    def exchange_ticks(self, tick: int) -> list[int]:
        """Publish this host's tick and return every host's."""
        self._set(f"runner/stop/tick/{self.process_id}", str(tick))
        keys = {process: f"runner/stop/tick/{process}" for process in range(self.num_processes)}
        return [
            int(self._get(key, self._deadline_seconds, f"the answer of process {process} to a stop"))
            for process, key in keys.items()
        ]

    def leave(self, code: int) -> None:
        """Before an end that all hosts come to, with `code`: host 0, whose end the others would notice, leaves last."""
        if self.num_processes == 1:
            return
        _abort.code = code
        with contextlib.suppress(PeerLostError):
            self._set(f"runner/left/{self.process_id}", "1")
            if self.is_main:
                for process in range(self.num_processes):
                    self._get(f"runner/left/{process}", _LEAVE_SECONDS, f"process {process}")
                time.sleep(_DEPARTURE_SECONDS)


class _Abort:
    """Turns SIGABRT, which the coordination service raises when a peer is lost, into an exit code.

    It comes from a thread of JAX's own, past Python, so the handler is installed at C level.
    """

    code = EXIT_RETRYABLE
    hosts: Hosts | None = None

    def install(self) -> None:
        prototype = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = prototype(self._handle)
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, prototype)
        libc.signal(signal.SIGABRT, self._handler)

    def _handle(self, number: int) -> None:
        if self.code == EXIT_RETRYABLE and self.hosts is not None and self.hosts.on_peer_lost is not None:
            self.hosts.on_peer_lost()
        lost = "peer lost: another process of the job died or cannot be reached; run the same command again"
        end_process(self.code, lost if self.code == EXIT_RETRYABLE else None)


_abort = _Abort()


def start(cluster: Cluster | None, deadlines: Deadlines, is_elastic: bool = False) -> Hosts:
    """Join the job's other processes; None = this one is alone.

    Called on every host, before any other use of JAX. Raises `RetryableError` if the others cannot be reached.
    """
    if cluster is None:
        return Hosts(None, 0, 1)
    meeting = meet(cluster, deadlines.start_seconds, is_elastic)
    cluster = meeting.cluster
    if cluster.num_processes == 1:
        return Hosts(None, 0, 1)
    jax.config.update("jax_enable_preemption_service", False)
    _abort.install()
    try:
        jax.distributed.initialize(
            coordinator_address=cluster.coordinator,
            num_processes=cluster.num_processes,
            process_id=cluster.process_id,
            local_device_ids=cluster.local_devices,
            coordinator_bind_address=listening_address(cluster),
            cluster_detection_method="deactivate",
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            initialization_timeout=int(deadlines.start_seconds),
            shutdown_timeout_seconds=60,
        )
    except (RuntimeError, ValueError) as error:
        raise RetryableError(f"cannot join the other processes of the job: {first_line(error)}") from error
    state = distributed.global_state
    place = (state.client, state.process_id, state.num_processes)
    _abort.hosts = Hosts(*place, deadlines.phase_seconds, meeting.lifelines)
    return _abort.hosts
