"""Membership of an elastic job (`topology.elastic`), whose hosts may be missing at a start and return later.

When process 0 is missing, hosts can only reach the directory of the run. A process that cannot reach process 0
writes `waiting/<process>` there every few seconds, with the address on which it accepts others (`Membership`). The
lowest process that waits takes the role of process 0 at the deadline of the start (`runner.distributed.rendezvous`).

Two groups of hosts that cannot reach each other must not repeatedly fence each other: each claim of the directory would
end the other group at its next save. So a group that lacks hosts begins only if no attempt runs in the directory, and
none has run while the group waited for the others, because the hosts of an attempt that has just ended are about to
return. An attempt runs if its clock file changes. If two groups begin at the same moment, the fence ends one of them
with 76, and that one then waits.

With `topology.grow: at_save` the running job stops at a save once all missing hosts wait (`WaitingHosts`).
"""

import contextlib
import socket
import threading
import time

from runner.attempts.clock_file import FLUSH_SECONDS, IDLE_SECONDS, decode_clock_file, get_clock_file_name
from runner.attempts.fence import Fence
from runner.attempts.layout import read_owner
from runner.distributed.rendezvous import ANNOUNCE_SECONDS
from runner.errors import InvalidError, RetryableError, RunnerError, StorageError
from runner.spec import ExecutionSpec
from runner.storage import Store, encode_json, open_store, parse_json, parse_number, read_log

_DAY_SECONDS = 86400.0
WAITING = "waiting"  # files of processes that wait to join
_WAITING_SECONDS = 60.0  # since the last sign of life of a host that waits
_LOOK_SECONDS = ANNOUNCE_SECONDS
_FRESH_SECONDS = 10.0  # since the last sign of life of a process that accepts others
_CLOSE_SECONDS = 5.0  # for the notice of a process that has joined
# Within this time the clock of a running attempt reaches the directory, also on a network file system.
_OBSERVE_SECONDS = 2.5 * max(FLUSH_SECONDS, IDLE_SECONDS)
_OBSERVE_POLL_SECONDS = 0.5
_MAX_LOWER = 16  # processes below its own whose notices a process reads; one that is alive is enough
_STORE_SECONDS = 10.0  # for a slow directory, when the clock of an attempt is observed


class _Notices:
    """Files in `waiting/`, each of one process. If the content of a file changes, its process is alive."""

    def __init__(self, store: Store):
        self._store = store
        # By process; moments are those of the monotonic clock.
        self.contents: dict[int, bytes] = {}  # newest
        self.found_seconds: dict[int, float] = {}  # at which a file was first seen
        self.changed_seconds: dict[int, float] = {}  # of the last change since then, if there was any

    def look(self, below: int | None = None) -> None:
        """Read the files of all processes, or the lowest of those `below` a number. Raises `OSError`."""
        # Other names are of files that are being written.
        found = (parse_number(name) for name in self._store.list_names(WAITING))
        processes = sorted(process for process in found if process is not None)
        if below is not None:
            processes = [process for process in processes if 0 < process < below][:_MAX_LOWER]
        for process in processes:
            with contextlib.suppress(OSError):  # one that has joined removes its file
                content = self._store.read(f"{WAITING}/{process}")
                is_changed = self.contents.get(process, content) != content
                self.contents[process] = content
                self.found_seconds.setdefault(process, time.monotonic())
                if is_changed:
                    self.changed_seconds[process] = time.monotonic()


class Membership:
    """Membership of an elastic job, as one process sees it while it waits for process 0. Implements `Members`.

    A thread reads and writes the directory, so that a slow one does not keep this process from joining. Nothing is
    written where there is no run yet. Problems with the directory are reported by the job itself.
    """

    def __init__(self, spec: ExecutionSpec, process_id: int):
        self._spec = spec
        self._process_id = process_id
        self._address: str | None = None
        self._notices: _Notices | None = None
        self._newest_clock: tuple[int, bytes] | None = None  # of the newest attempt
        self._running_attempt: int | None = None  # last attempt that has run since this process began to wait
        self._thread = threading.Thread(target=self._work, name="membership", daemon=True)
        self._closed = threading.Event()
        self.run_id: str | None = None

    def announce(self, address: str | None) -> None:
        """Publish from now on that this process waits, and the HOST:PORT at which others can join it, if any.

        Does not block.
        """
        self._address = address
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        """Remove the notice of this process, or one that an earlier process of its host has left.

        Called when the process has joined. One that could not join leaves its notice: its supervisor starts another.
        """
        self._closed.set()
        if self._thread.ident is None:
            self._thread.start()
        # Do not wait for a slow directory: the other processes wait for this one, and a leftover notice does no harm.
        self._thread.join(_CLOSE_SECONDS)

    def list_addresses(self) -> list[str]:
        """Return the addresses of the processes before this one that wait, the lowest first.

        For the first seconds the list may include the notice of a dead host.
        """
        if self._notices is None:
            return []
        earliest = time.monotonic() - _FRESH_SECONDS
        found = {}
        for process, seconds in list((self._notices.found_seconds | self._notices.changed_seconds).items()):
            if seconds > earliest:
                with contextlib.suppress(ValueError):
                    found[process] = parse_json(self._notices.contents[process]).get("address")
        return [address for _, address in sorted(found.items()) if isinstance(address, str)]

    def find_running_attempt(self) -> int | None:
        """Return the number of the attempt of other hosts that runs, or has run since this process began to wait.

        None if there is none. Blocks while the clock of the newest attempt is observed. Raises `StorageError` if the
        directory does not answer.
        """
        if self._running_attempt is not None:
            return self._running_attempt
        found: list[int | None] = []

        def observe() -> None:
            # The job itself reports what is wrong with a directory that is no valid one.
            with contextlib.suppress(OSError, RetryableError):
                try:
                    found.append(find_running_attempt(open_store(str(self._spec.directory))))
                except InvalidError:
                    found.append(None)

        thread = threading.Thread(target=observe, name="observe", daemon=True)
        thread.start()
        thread.join(_OBSERVE_SECONDS + _STORE_SECONDS)
        if not found:
            raise StorageError(
                f"{self._spec.directory} does not tell whether an attempt runs; run the same command again"
            )
        return found[0]

    def _work(self) -> None:
        name = f"{WAITING}/{self._process_id}"
        with contextlib.suppress(OSError, RunnerError):
            store = open_store(str(self._spec.directory))
            notices = _Notices(store)
            while not self._closed.is_set():
                with contextlib.suppress(OSError, RunnerError):
                    self._look(store, name, notices)
                self._closed.wait(_LOOK_SECONDS)
            store.remove(name)

    def _look(self, store: Store, name: str, notices: _Notices) -> None:
        owner = read_owner(store)
        if owner is None:
            return
        self.run_id, self._notices = owner.id, notices
        notice = {"host": socket.gethostname(), "time": time.time(), "address": self._address}
        store.write(name, encode_json(notice))
        notices.look(below=self._process_id)
        number = Fence(store).find_newest()
        clock = (number, _read_clock(store, number))
        if self._newest_clock not in (None, clock):
            self._running_attempt = number
        self._newest_clock = clock


def find_running_attempt(store: Store) -> int | None:
    """Return the number of the newest attempt if it runs, else None.

    Returns immediately if the attempt has ended, or if its process ran on this machine and is gone. Otherwise its clock
    is observed for `_OBSERVE_SECONDS`.
    """
    deadline, first = time.monotonic() + _OBSERVE_SECONDS, None
    while True:
        number = Fence(store).find_newest()
        if not number:
            return None
        content = _read_clock(store, number)
        with contextlib.suppress(ValueError):
            record = decode_clock_file(content)
            if record.has_ended:
                return None
        first = first or (number, content)
        if (number, content) != first:
            return number
        if time.monotonic() >= deadline:
            return None
        time.sleep(_OBSERVE_POLL_SECONDS)


def _read_clock(store: Store, number: int) -> bytes:
    try:
        return store.read(get_clock_file_name(number))
    except FileNotFoundError:
        return b""


class WaitingHosts:
    """Hosts that an elastic job has begun without, and that wait to join it. On process 0 only.

    A thread polls the files in `waiting/`. If the content of a file changes, its host is alive and counts as waiting
    for a minute, because a host writes nothing between two tries to join. A host that joins and soon fails must not
    stop the job at every save. Therefore each growth within a day doubles the number of saves before the next one.
    """

    def __init__(self, store: Store, num_missing: int):
        self.num_missing = num_missing  # processes that the job has begun without
        self._notices = _Notices(store)
        day_ago = time.time() - _DAY_SECONDS
        times = [event.get("time") for event in read_log(store, "events") if event.get("event") == "grow"]
        self._num_saves_left = 2 ** sum(isinstance(each, float) and each > day_ago for each in times)
        self._is_requested = False
        self._closed = threading.Event()
        threading.Thread(target=self._look, name="waiting", daemon=True).start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def is_growth_due(self) -> bool:
        """Return True, once, if the job should stop to begin again with all hosts. Called after each save."""
        self._num_saves_left -= 1
        earliest = time.monotonic() - _WAITING_SECONDS
        num_waiting = sum(seconds > earliest for seconds in list(self._notices.changed_seconds.values()))
        is_due = not self._is_requested and self._num_saves_left <= 0 and num_waiting >= self.num_missing
        self._is_requested |= is_due
        return is_due

    def _look(self) -> None:
        while not self._closed.wait(_LOOK_SECONDS):
            with contextlib.suppress(OSError):
                self._notices.look()
