"""Which of the other processes are there: who has disconnected, who has crashed, and how to leave in order.

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

from runner.errors import EXIT_RETRYABLE, PeerLostError
from runner.hosts import key_value
from runner.hosts.key_value import KeyValueStore
from runner.hosts.preemption import end_process

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

    def disconnected(self) -> list[int]:
        """Processes that have ended, of those that this one has a socket to. Never waits. Any thread."""
        poll = select.poll()  # `select` refuses the descriptors of a pod of a thousand hosts
        for connection in self._peer_sockets.values():
            poll.register(connection, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(0)}
        return [process for process, connection in self._peer_sockets.items() if connection.fileno() in ended]

    def crashed(self) -> list[int]:
        """Those that are disconnected and have not left in order. Never waits for a host. Any thread.

        Raises `PeerLostError` if the coordinator cannot be reached.
        """
        return [process for process in self.disconnected() if self._store.peek(_departure(process)) is None]

    def left(self) -> dict[int, int]:
        """Those that have left in order, and with which code. Never waits for a host. Any thread.

        Raises `PeerLostError` if the coordinator cannot be reached.
        """
        return self._store.peek_all(key_value.DEPARTURES)

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

    def call_before_abort(self, act: Callable[[], None] | None) -> None:
        """Let `act`, which knows more of the lost peer, end this process when JAX is about to; None = nobody does."""
        _abort.act = act


def _departure(process: int) -> str:
    return key_value.of_process(key_value.DEPARTURES, process)


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


def exit_on_abort() -> None:
    """From now on SIGABRT ends this process with an exit code. Called before this process joins the others."""
    _abort.install()
