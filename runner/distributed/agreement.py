"""Agreement between the processes of a job, and detection of lost peers.

**Agreement** uses the coordinator's key-value store instead of device collectives, so it works before a mesh exists and
while devices are busy. Every wait has a deadline, and its error names the missing processes.

1. The training threads of all processes make the same calls in the same order. Each process counts its calls, so
   call n is the same call everywhere.
2. `agree`: process 0 writes its decision and continues. The others block until they can read it.
3. `gather`: every process writes its value and waits at a barrier. Process 0 then reads all values and publishes them,
   equal ones of successive processes once, so that the others read one key each.
4. A process that reached the barrier of call n has read everything of earlier calls. After the barrier process 0
   therefore deletes the decisions of those calls, and what it published in the previous gather.
5. A loop that only calls `agree` would reach no barrier, so `agree` gathers first after `MAX_DECISIONS` decisions.

**Liveness** distinguishes processes that crashed from processes that exited cleanly.

1. When a process ends, its kernel closes its peer sockets (`rendezvous`), and the other end notices at once.
2. Before a clean exit a process announces its departure in the key-value store. A process that disconnects without an
   announcement has crashed.
3. The coordination service ends with process 0, and JAX then kills the other processes with SIGABRT, on a thread where
   Python's signal handlers do not run. Process 0 therefore exits last, and a handler in C turns SIGABRT into an exit
   code: the announced one, or else 76.
"""

import contextlib
import ctypes
import ipaddress
import itertools
import select
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from runner.distributed import key_value
from runner.distributed.key_value import KeyValueStore, process_key
from runner.distributed.preemption import end_process
from runner.errors import EXIT_RETRYABLE, InvalidError, PeerLostError

_LEAVE_SECONDS = 10
_EXIT_SECONDS = 0.2  # from the announcement of a process to its end
_FOREVER_SECONDS = 7 * 24 * 3600


class Liveness:
    """Detection of processes that crashed or exited, as seen from this process. One per process."""

    def __init__(
        self, store: KeyValueStore, process_id: int, num_processes: int, peer_sockets: dict[int, socket.socket]
    ):
        """Create the detector.

        Each of the connections, by process, closes when that process ends. Process 0 has one to every other process,
        the others have one to process 0.
        """
        self._store, self._peer_sockets = store, peer_sockets
        self._process_id, self._num_processes = process_id, num_processes

    def find_disconnected(self) -> list[int]:
        """Return the connected processes that have ended. Does not wait. Any thread."""
        poll = select.poll()  # `select.select` rejects the file descriptors of a pod with a thousand hosts.
        for connection in self._peer_sockets.values():
            poll.register(connection, select.POLLIN)
        closed = {descriptor for descriptor, _ in poll.poll(0)}
        return [process for process, connection in self._peer_sockets.items() if connection.fileno() in closed]

    def get_own_address(self) -> str:
        """Return the address of this host on its connections to the others; the loopback address without connections.

        A loopback address, which processes of one host may use with each other, is returned only if there is no other.
        """
        addresses = [connection.getsockname()[0] for connection in self._peer_sockets.values()]
        found = [ipaddress.ip_address(str(address).partition("%")[0].removeprefix("::ffff:")) for address in addresses]
        return str(min(found, key=lambda address: address.is_loopback, default="127.0.0.1"))

    def find_crashed(self) -> list[int]:
        """Return the processes that have disconnected without announcing it. Waits for none of them. Any thread."""
        departures = key_value.DEPARTURES
        return [
            process
            for process in self.find_disconnected()
            if self._store.try_get(process_key(departures, process)) is None
        ]

    def read_departures(self) -> dict[int, int]:
        """Return the exit code of each process that has announced its exit. Waits for none of them. Any thread."""
        return self._store.list_values(key_value.DEPARTURES)

    def leave(self, code: int) -> None:
        """Announce that this process is about to exit with `code`. Called on every process.

        Process 0 blocks until all processes have announced their exit, for at most `_LEAVE_SECONDS` each, because the
        coordination service ends with it. Never raises, because the job is over.
        """
        if self._num_processes == 1:
            return
        _abort_handler.code = code
        with contextlib.suppress(PeerLostError):
            self._store.set(process_key(key_value.DEPARTURES, self._process_id), code)
            if self._process_id == 0:
                self._store.get_all(key_value.DEPARTURES, range(self._num_processes), _LEAVE_SECONDS, "process {}")
                time.sleep(_EXIT_SECONDS)

    def set_abort_callback(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when JAX is about to kill this process; None removes the callback.

        The watchdog uses it to name the lost peer, and to exit before the general message is printed.
        """
        _abort_handler.callback = callback


class _AbortHandler:
    """Handler that turns SIGABRT, which the coordination service raises when a peer is lost, into an exit code.

    The signal arrives on a thread of JAX that never runs Python code, so the handler is installed in C.
    """

    def __init__(self) -> None:
        self.code = EXIT_RETRYABLE
        self.callback: Callable[[], None] | None = None
        self._prototype = ctypes.CFUNCTYPE(None, ctypes.c_int)
        self._handler = self._prototype(self._handle)

    def install(self) -> None:
        libc = ctypes.CDLL(None)
        libc.signal.argtypes = (ctypes.c_int, self._prototype)
        libc.signal(signal.SIGABRT, self._handler)

    def _handle(self, number: int) -> None:
        if self.code != EXIT_RETRYABLE:
            end_process(self.code)
        if self.callback is not None:
            self.callback()
        end_process(
            EXIT_RETRYABLE,
            "peer lost: another process of the job died or cannot be reached; run the same command again",
        )


# A module global, because C may call the handler for as long as the process lives.
_abort_handler = _AbortHandler()


def install_abort_handler() -> None:
    """Turn SIGABRT into an exit code from now on. Called before this process joins the others."""
    _abort_handler.install()


class Hosts:
    """This process and its peers: broadcasts, gathers and barriers. One per process, made by `rendezvous.join_job`.

    `store` is for the threads that watch the job only. `num_missing` processes of an elastic job did not join in time.
    """

    def __init__(
        self,
        process_id: int,
        num_processes: int,
        store: KeyValueStore,
        liveness: Liveness,
        deadline_seconds: float = 3600.0,
        num_missing: int = 0,
    ):
        self.process_id, self.num_processes, self.num_missing = process_id, num_processes, num_missing
        self.store, self.liveness = store, liveness
        self._deadline_seconds = deadline_seconds
        self._num_calls = 0
        self._num_decisions = 0  # since the last gather
        self._published: str | None = None  # key of the values of the last gather
        self._abandoned: list[str] = []

    @classmethod
    def single_process(cls, num_missing: int = 0) -> "Hosts":
        """Return the `Hosts` of a single-process job, which needs no coordinator and never waits."""
        store = KeyValueStore(None)
        return cls(0, 1, store, Liveness(store, 0, 1, {}), num_missing=num_missing)

    @property
    def is_main(self) -> bool:
        """True on process 0, which decides and writes."""
        return self.process_id == 0

    def agree(self, value: Any) -> Any:
        """Broadcast `value` (JSON) of process 0 to every process; the values of the others are ignored.

        Called on every process, by the training thread. Blocks the others until process 0 calls it. Blocks process 0
        only in every `MAX_DECISIONS`-th call in a row, until all processes call it. Raises PeerLostError at the
        deadline.
        """
        if self.num_processes == 1:
            return value
        if self._num_decisions == key_value.MAX_DECISIONS:
            self.barrier()  # Deletes the decisions, see the module docstring.
        self._num_calls += 1
        self._num_decisions += 1
        key = key_value.decision_key(self._num_calls)
        if self.is_main:
            self.store.set(key, value)
            return value
        return self.store.get(key, self._deadline_seconds, "the decision of process 0")

    def gather(self, value: Any, deadline_seconds: float | None = None) -> list[Any]:
        """Return `value` (JSON) of every process, in order of process.

        Called on every process, by the training thread. Blocks until all processes call it. Raises PeerLostError that
        names the missing processes at the deadline.
        """
        if self.num_processes == 1:
            return [value]
        deadline_seconds = self._deadline_seconds if deadline_seconds is None else deadline_seconds
        folder = self._meet(value, deadline_seconds)
        key = self._published = key_value.gathered_key(self._num_calls)
        if not self.is_main:
            runs = self.store.get(key, deadline_seconds, "the values that process 0 has gathered")
            return [value for count, value in runs for _ in range(count)]
        values = self._take_values(folder)
        self.store.set(key, [[len([*run]), each] for each, run in itertools.groupby(values)])
        return values

    def reduce(self, value: Any, function: Callable[[list[Any]], Any]) -> Any:
        """Return the JSON result of `function`, which process 0 calls with the `value` (JSON) of every process.

        Costs less than `gather` if the values differ and only process 0 needs all of them. An `InvalidError` of
        `function` is raised on every process; raises `PeerLostError` as `gather` does. Called on every process, by the
        training thread.
        """
        if self.num_processes == 1:
            return function([value])
        folder = self._meet(value, self._deadline_seconds)
        return self.run_on_main(lambda: function(self._take_values(folder)))

    def distribute(self, value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
        """Return the result for this process of `function`, which process 0 calls with the `value` of every process.

        `function` returns a result for each process, in order. Values and results are JSON. Costs less than `gather`
        if a process needs few of the values. Blocks and raises as `reduce` does. Called on every process, by the
        training thread.
        """
        if self.num_processes == 1:
            return function([value])[0]
        folder = self._meet(value, self._deadline_seconds)
        results: list[Any] = []
        self.run_on_main(lambda: results.extend(function(self._take_values(folder))))
        key = self._published = key_value.gathered_key(self._num_calls)
        if not self.is_main:
            return self.store.get(process_key(key, self.process_id), self._deadline_seconds, "the result of process 0")
        for process, result in enumerate(results[1:], 1):
            self.store.set(process_key(key, process), result)
        return results[0]

    def _take_values(self, folder: str) -> list[Any]:
        """Return the values of all processes, and delete them. Process 0 only."""
        by_process = self.store.list_values(folder)
        self.store.delete(folder)
        return [by_process[process] for process in range(self.num_processes)]

    def barrier(self) -> None:
        """Block until every process calls this. Called on every process, by the training thread. Raises as `gather`."""
        if self.num_processes > 1:
            folder = self._meet(None, self._deadline_seconds)
            if self.is_main:
                self.store.delete(folder)

    def _meet(self, value: Any, deadline_seconds: float) -> str:
        """Write the value of this process, and wait until every process has done so; return the folder of the values.

        Process 0 deletes it. Raises `PeerLostError`.
        """
        self._num_calls += 1
        folder = key_value.gather_folder(self._num_calls)
        self.store.set(process_key(folder, self.process_id), value)
        try:
            self.store.barrier(deadline_seconds)
        except PeerLostError as error:
            present = self.store.list_values(folder)
            missing = [process for process in range(self.num_processes) if process not in present]
            who = format_processes(missing) if missing else "process (none is missing)"
            raise PeerLostError(
                f"{who} of {self.num_processes} did not arrive within {deadline_seconds:.0f} s ({error})"
            ) from error
        # Every process has reached the barrier, so none still reads earlier decisions or the previous gather.
        if self.is_main:
            self.store.delete(key_value.DECISIONS)
            if self._published is not None:
                self.store.delete(self._published)
        self._published, self._num_decisions = None, 0
        return folder

    def run_on_main(self, function: Callable[[], Any]) -> Any:
        """Run `function` on process 0, and return its JSON result on every process.

        Its `InvalidError` is raised on every process, so that a check on process 0 cannot leave the others waiting.
        Called on every process, by the training thread.
        """
        # Any other error ends process 0, which the watchdogs of the others report.
        result: dict[str, Any] = {}
        if self.is_main:
            try:
                result = {"value": function()}
            except InvalidError as error:
                result = {"invalid": str(error)}
        result = self.agree(result)
        if "invalid" in result:
            raise InvalidError(result["invalid"])
        return result["value"]

    def collect(self, folder: str, value: Any, deadline_seconds: float) -> list[Any]:
        """Gather `value` (JSON) of every process on process 0; return all of them there, and `[value]` on the others.

        For background threads, whose calls are not ordered among the processes. Called on every process; blocks only
        process 0, which raises PeerLostError that names the missing process at the deadline. The `folder` of
        `key_value` is the same on every process and never used again.
        """
        if not self.is_main:
            self.store.set(process_key(folder, self.process_id), value)
        if self.num_processes == 1 or not self.is_main:
            return [value]
        try:
            others = self.store.get_all(
                folder, range(1, self.num_processes), deadline_seconds, "the part of process {}"
            )
        except PeerLostError:
            self._abandoned.append(folder)
            raise
        # A process may have written to an abandoned folder after the deadline. It has written to this folder since, so
        # that write is complete, and the abandoned folders can be deleted for good.
        for past in (*self._abandoned, folder):
            self.store.delete(past)
        self._abandoned = []
        return [value, *others]

    def announce_stop(self) -> None:
        """Tell every process, including this one, that a stop was requested. Any process, any thread."""
        self.store.set(key_value.STOP_REQUEST, True)

    def await_stop(self) -> None:
        """Block until any process has announced a stop. Needs a thread of its own."""
        self.store.get(key_value.STOP_REQUEST, _FOREVER_SECONDS, "the end of the job")

    def agree_on_tick(self, tick: int) -> int:
        """Return the highest of the ticks of all processes.

        Called once on every process. Blocks until all processes have called it. Raises PeerLostError that names the
        missing process at the deadline.
        """
        store, deadline_seconds = self.store, self._deadline_seconds
        if self.is_main:
            others, answer = range(1, self.num_processes), "the answer of process {} to a stop"
            tick = max([tick, *store.get_all(key_value.STOP_TICKS, others, deadline_seconds, answer)])
            store.set(key_value.STOP_TICK, tick)
            return tick
        store.set(process_key(key_value.STOP_TICKS, self.process_id), tick)
        return int(store.get(key_value.STOP_TICK, deadline_seconds, "the tick at which all processes stop"))

    def leave(self, code: int) -> None:
        """Announce that this process is about to exit with `code`, see `Liveness.leave`. The last call of a process."""
        self.liveness.leave(code)


def find_ranges(numbers: Sequence[int]) -> list[list[int]]:
    """Return the first and the last number of each range in ascending `numbers`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def format_processes(numbers: Sequence[int]) -> str:
    """Return the name of processes with ascending numbers, three and more in a row as a range: `processes 0-6, 8`."""
    listed = (
        f"{first}-{last}" if last - first > 1 else ", ".join(map(str, range(first, last + 1)))
        for first, last in find_ranges(numbers)
    )
    return f"process{'es' * (len(numbers) > 1)} {', '.join(listed)}"
