"""How the processes of a job agree. Host 0 decides, everyone hears.

Agreement runs over the coordinator's key-value store, never over a device collective, so it works before any mesh
exists and while devices are busy. Every wait has a deadline and names who is late.

1. The training thread of every process makes the same calls in the same order, so each process counts them alone and
   call n is the same everywhere.
2. In `agree` process 0 writes its decision and goes on. Another process blocks until it can read it.
3. In `gather` every process writes its value, waits at a barrier, and reads all values.
4. Who is at the barrier of call n has read everything of the calls before. So behind it process 0 deletes the decisions
   of those calls, and the values of the gather before. Its own values stay until the next: others still read them.
5. A loop that only agrees would meet at no barrier, so after `MAX_DECISIONS` decisions `agree` gathers first.

Which of the other processes are there: who has disconnected, who has crashed, and how to leave in order.

1. The kernel of a process that ends closes its peer sockets (`rendezvous`), which the other end sees at once.
2. A process that leaves in order says so at the coordinator first. Who disconnects without having said so has crashed.
3. The coordination service ends with process 0, and JAX then ends the others with SIGABRT, past any Python handler. So
   process 0 leaves last, and SIGABRT becomes an exit code: that of the order to leave, or else 76.
"""

import contextlib
import ctypes
import select
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from runner.distributed import key_value
from runner.distributed.key_value import KeyValueStore
from runner.distributed.preemption import end_process
from runner.errors import EXIT_RETRYABLE, InvalidError, PeerLostError

_LEAVE_SECONDS = 10
_DEPARTURE_SECONDS = 0.2  # in which the others come from their last word to their end


class Liveness:
    """This process's view of the others. One a process.

    `peer_sockets` is process -> a connection that ends with it: to every other on process 0, elsewhere to process 0.
    """

    def __init__(
        self, store: KeyValueStore, process_id: int, num_processes: int, peer_sockets: dict[int, socket.socket]
    ):
        self._store, self._peer_sockets = store, peer_sockets
        self._process_id, self._num_processes = process_id, num_processes

    def find_disconnected(self) -> list[int]:
        """Processes that have ended, of those that this one has a socket to. Never waits. Any thread."""
        poll = select.poll()  # `select` refuses the descriptors of a pod of a thousand hosts
        for connection in self._peer_sockets.values():
            poll.register(connection, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return [process for process, connection in self._peer_sockets.items() if connection.fileno() in ended]

    def find_crashed(self) -> list[int]:
        """Those that are disconnected and have not left in order. Never waits for a host. Any thread.

        Raises `PeerLostError` if the coordinator cannot be reached.
        """
        return [process for process in self.find_disconnected() if self._store.try_get(_departure(process)) is None]

    def read_departures(self) -> dict[int, int]:
        """Those that have left in order, and with which code. Never waits for a host. Any thread.

        Raises `PeerLostError` if the coordinator cannot be reached.
        """
        return self._store.list_values(key_value.DEPARTURES)

    def leave(self, code: int) -> None:
        """Say that this process is about to end in order, with `code`. Called on every host.

        Blocks process 0 until all have said so, at most some seconds. Raises nothing: the job is over.
        """
        if self._num_processes == 1:
            return
        _abort.code = code
        with contextlib.suppress(PeerLostError):
            self._store.set(_departure(self._process_id), code)
            if self._process_id == 0:
                for process in range(self._num_processes):
                    self._store.get(_departure(process), _LEAVE_SECONDS, f"process {process}")
                time.sleep(_DEPARTURE_SECONDS)

    def set_abort_callback(self, act: Callable[[], None] | None) -> None:
        """Let `act`, which knows more of the lost peer, end this process when JAX is about to; None = nobody does."""
        _abort.act = act


def _departure(process: int) -> str:
    return key_value.process_key(key_value.DEPARTURES, process)


class _Abort:
    """Turns SIGABRT, which the coordination service raises when a peer is lost, into an exit code.

    It comes from a thread of JAX's own, past Python, so the handler is installed at C level.
    """

    def __init__(self) -> None:
        self.code = EXIT_RETRYABLE
        self.act: Callable[[], None] | None = None
        self._prototype = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = self._prototype(self._handle)

    def install(self) -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, self._prototype)
        libc.signal(signal.SIGABRT, self._handler)

    def _handle(self, number: int) -> None:
        if self.code == EXIT_RETRYABLE and self.act is not None:
            self.act()
        lost = "peer lost: another process of the job died or cannot be reached; run the same command again"
        end_process(self.code, lost if self.code == EXIT_RETRYABLE else None)


_abort = _Abort()  # a process has one handler of a signal, and C may call it for as long as the process lives


def install_abort_handler() -> None:
    """From now on SIGABRT ends this process with an exit code. Called before this process joins the others."""
    _abort.install()


_FOREVER_SECONDS = 7 * 24 * 3600


class Hosts:
    """This process and its peers. One a process, made by `join.start`.

    Attributes:
        store: for the threads that watch the job, and for nobody else.
        liveness: which peers are there.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        store: KeyValueStore,
        liveness: Liveness,
        deadline_seconds: float = 3600.0,
    ):
        self.process_id, self.num_processes = process_id, num_processes
        self.store, self.liveness = store, liveness
        self._deadline_seconds = deadline_seconds
        self._num_calls = 0
        self._num_decisions = 0  # since the last gather
        self._last_gather: str | None = None
        self._abandoned: list[str] = []

    @classmethod
    def single_process(cls) -> "Hosts":
        """A job of one process, which needs no coordinator and never waits."""
        store = KeyValueStore(None)
        return cls(0, 1, store, Liveness(store, 0, 1, {}))

    @property
    def is_main(self) -> bool:
        """Whether this is host 0, which decides and writes."""
        return self.process_id == 0

    def agree(self, value: Any) -> Any:
        """Host 0's `value` (JSON) on every host; the others' is ignored. Called on every host, by the training thread.

        Blocks the others until host 0 is here, and host 0 only at each `MAX_DECISIONS`-th call in a row, until all are.
        Raises `PeerLostError` after the deadline.
        """
        if self.num_processes == 1:
            return value
        if self._num_decisions == key_value.MAX_DECISIONS:
            self.barrier()
        self._num_calls += 1
        self._num_decisions += 1
        key = key_value.decision_key(self._num_calls)
        if self.is_main:
            self.store.set(key, value)
            return value
        return self.store.get(key, self._deadline_seconds, "the decision of process 0")

    def gather(self, value: Any, deadline_seconds: float | None = None) -> list[Any]:
        """Every host's `value` (JSON), in order of process. Called on every host, by the training thread.

        Blocks until all have come. Raises `PeerLostError` naming who is late after the deadline.
        """
        if self.num_processes == 1:
            return [value]
        self._num_calls += 1
        folder = key_value.gather_folder(self._num_calls)
        self.store.set(key_value.process_key(folder, self.process_id), value)
        self._meet(folder, self._deadline_seconds if deadline_seconds is None else deadline_seconds)
        if self.is_main:
            self.store.delete(key_value.DECISIONS)
            if self._last_gather is not None:
                self.store.delete(self._last_gather)
        self._last_gather, self._num_decisions = folder, 0
        values = self.store.list_values(folder)
        return [values[process] for process in range(self.num_processes)]

    def _meet(self, folder: str, deadline_seconds: float) -> None:
        """Wait until every host is here, each with its key in `folder`, by which the late ones are known."""
        try:
            self.store.barrier(deadline_seconds)
        except PeerLostError as error:
            came = self.store.list_values(folder)
            late = [str(process) for process in range(self.num_processes) if process not in came]
            who = f"process{'es' * (len(late) > 1)} {', '.join(late) or '(all came)'} of {self.num_processes}"
            raise PeerLostError(f"{who} did not come within {deadline_seconds:.0f} s ({error})") from error

    def barrier(self) -> None:
        """Wait until every host is here. Called on every host, by the training thread. Raises as `gather` does."""
        self.gather(None)

    def run_on_main(self, act: Callable[[], Any]) -> Any:
        """Run `act` on host 0 and return its JSON result on every host; its `InvalidError` is raised on every host.

        For what may fail on the main host while the others wait. Called on every host, by the training thread.
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

    def collect(self, folder: str, value: Any, deadline_seconds: float) -> list[Any]:
        """Every host's `value` (JSON) on host 0, in order of process; elsewhere this host's alone.

        For background threads, whose calls have no order among all: `folder` (of `key_value`) is the same on every host
        and never used again. Called on every host. Blocks host 0 alone; there it raises `PeerLostError` naming who is
        late after the deadline.
        """
        if not self.is_main:
            self.store.set(key_value.process_key(folder, self.process_id), value)
        if self.num_processes == 1 or not self.is_main:
            return [value]
        try:
            others = [
                self.store.get(
                    key_value.process_key(folder, process), deadline_seconds, f"the part of process {process}"
                )
                for process in range(1, self.num_processes)
            ]
        except PeerLostError:
            self._abandoned.append(folder)
            raise
        # Each process writes its parts in order, so what it wrote after we had given up is there by now.
        for past in (*self._abandoned, folder):
            self.store.delete(past)
        self._abandoned = []
        return [value, *others]

    def announce_stop(self) -> None:
        """Tell every host, this one too, that the job was asked to stop. Any host, any thread."""
        self.store.set(key_value.STOP_REQUEST, True)

    def await_stop(self) -> None:
        """Block until any host has announced a stop. On a thread of its own."""
        self.store.get(key_value.STOP_REQUEST, _FOREVER_SECONDS, "the end of the job")

    def exchange_ticks(self, tick: int) -> list[int]:
        """Publish this host's tick and return every host's, in order of process. Called on every host, once.

        Blocks until all have answered. Raises `PeerLostError` naming who has not, after the deadline.
        """
        self.store.set(key_value.process_key(key_value.STOP_TICKS, self.process_id), tick)
        keys = [key_value.process_key(key_value.STOP_TICKS, process) for process in range(self.num_processes)]
        return [
            self.store.get(key, self._deadline_seconds, f"the answer of process {process} to a stop")
            for process, key in enumerate(keys)
        ]

    def leave(self, code: int) -> None:
        """See `Liveness.leave`. Called on every host, last."""
        self.liveness.leave(code)
