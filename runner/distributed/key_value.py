"""The coordinator's key-value store: every key that the runner uses, and the only calls that reach the store.

JAX's coordination service in process 0 keeps the keys in memory, so nothing may accumulate. The comment at each key
states its writer, who deletes it, and the largest number of keys of its kind; P is the number of processes. A key that
ends in a process id is overwritten by that process. Only the kinds that are numbered (by call, by save or by round) are
deleted, since they would accumulate.
"""

import json
from collections.abc import Iterable
from typing import Any, Protocol

import jax

from runner.errors import PeerLostError, format_error

# Written by process 0, one key per call of `Hosts.agree`. Process 0 deletes all of them at the next gather, which
# `agree` performs itself after MAX_DECISIONS calls without one. At most MAX_DECISIONS keys.
DECISIONS = "runner/decision"
MAX_DECISIONS = 64

# Written by a process that was asked to stop, once per job. Never deleted: 1 key.
STOP_REQUEST = "runner/stop/request"

# The tick of each process except 0 when the stop was requested (preemption), and the highest of all, which process 0
# publishes. Never deleted: P keys.
STOP_TICKS, STOP_TICK = "runner/stop/ticks", "runner/stop/tick"

# Written by the watchdog of process 0: a warning when something failed on one process alone, and the diagnosis before
# the job ends. Each overwrites the previous one. Never deleted: 1 key.
DIAGNOSIS = "runner/diagnosis"

# Overwritten by process 0 at the start of each round of straggler detection. Never deleted: 1 key.
ROUND = "runner/round"

# Written by process 0, one key per round in which all processes send their part of a step to those that hold copies of
# it. Process 0 deletes the key of a round when the next one but one begins: at most 3 keys.
REPLICA_ROUNDS = "runner/replica/round"

# Folders with one key per process, which that process overwrites. Never deleted: P keys each.
HEARTBEATS = "runner/beat"  # its last heartbeat (watchdog)
ARRIVALS = "runner/arrival"  # the last round in which it reported its arrival (straggler detection)
DEPARTURES = "runner/departure"  # its exit code, announced before a clean exit (liveness)

# One name for all barriers: the service counts how often a name was passed, but would keep each new name forever.
_BARRIER = "runner/all"


def process_key(folder: str, process: int) -> str:
    """Return the key of one process in `folder`."""
    return f"{folder}/{process}"


def decision_key(call: int) -> str:
    """Return the key of the value that process 0 broadcasts in one call of `Hosts.agree`; see `DECISIONS`."""
    return f"{DECISIONS}/{call}"


def gather_folder(call: int) -> str:
    """Return the folder of the values of one gather or barrier, one key per process.

    Process 0 deletes it when it has read them, when other processes may already be in the next one: at most 2 P keys.
    """
    return f"runner/gathering/{call}"


def gathered_key(call: int) -> str:
    """Return the key in which process 0 publishes the values of one gather, as a list of [number of processes, value].

    It is the folder of one result for each other process if `Hosts.distribute` is called. Process 0 deletes it at the
    next barrier or gather: at most 2 P keys.
    """
    return f"runner/gathered/{call}"


def save_folder(save: int, stage: str) -> str:
    """Return the folder in which each process except 0 reports a stage of one save; see `Hosts.collect`.

    The stages are `written`, with the files of the process, and `read`. Process 0 deletes the folder when it has read
    every key. If process 0 gives up, late keys remain until the next save that it reads completely: at most P keys for
    each consecutive failed save, and `checkpoint.max_unsaved_minutes` ends the job over those.
    """
    return f"runner/save/{save}/{stage}"


def save_outcome_key(save: int) -> str:
    """Return the key in which process 0 tells whether the parts of all processes of one save are there.

    Process 0 deletes the key of a save when it writes that of the next one but one: at most 3 keys.
    """
    return f"runner/save/outcome/{save}"


def replica_folder(number: int) -> str:
    """Return the folder in which each process except 0 reports that it has sent its part in a round.

    Process 0 deletes it when all have, see `Hosts.collect`: at most P keys.
    """
    return f"runner/replica/sent/{number}"


class CoordinatorClient(Protocol):
    """Methods used of the client of JAX's coordination service. Each may raise `JaxRuntimeError`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        """Set a key."""

    def key_value_try_get(self, key: str) -> str:
        """Return the value of a key, or raise an error with NOT_FOUND."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return all keys below a folder, with their values."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key and all keys below it."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Wait until a key has a value, and return it."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Wait until every process is at the barrier."""


class KeyValueStore:
    """The store, for JSON values. Any process, any thread.

    Every method raises `PeerLostError` if the coordinator cannot be reached. A single-process job has no client and
    calls no method.
    """

    def __init__(self, client: CoordinatorClient | None):
        self._client = client

    @property
    def _service(self) -> CoordinatorClient:
        assert self._client is not None, "a single-process job has no key-value store"
        return self._client

    def set(self, key: str, value: Any) -> None:
        """Set `key` to `value` for every process, without waiting for any."""
        try:
            self._service.key_value_set(key, json.dumps(value), allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _make_unreachable_error(error) from error

    def get(self, key: str, deadline_seconds: float, description: str) -> Any:
        """Block until `key` has a value, and return it. Raises PeerLostError with the description at the deadline."""
        try:
            return json.loads(self._service.blocking_key_value_get(key, int(deadline_seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            reason = format_error(error)
            raise PeerLostError(f"{description} did not arrive within {deadline_seconds:.0f} s ({reason})") from error

    def get_all(self, folder: str, processes: Iterable[int], deadline_seconds: float, description: str) -> list[Any]:
        """Block until each of the processes has a value in `folder`, and return the values. Waits for one at a time.

        `deadline_seconds` are those of each wait. The `PeerLostError` starts with `description`, in which `{}` stands
        for the process.
        """
        return [
            self.get(process_key(folder, process), deadline_seconds, description.format(process))
            for process in processes
        ]

    def try_get(self, key: str) -> Any:
        """Return the value of `key`, or None if it has none yet. Does not wait for other processes."""
        try:
            return json.loads(self._service.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _make_unreachable_error(error) from error

    def list_values(self, folder: str) -> dict[int, Any]:
        """Return the values in `folder` by process. Does not wait for other processes."""
        try:
            entries = self._service.key_value_dir_get(folder)
        except jax.errors.JaxRuntimeError as error:
            raise _make_unreachable_error(error) from error
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in entries}

    def delete(self, key: str) -> None:
        """Delete `key`, and everything below it if it is a folder. Process 0 only. A missing key is not an error."""
        try:
            self._service.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise _make_unreachable_error(error) from error

    def barrier(self, deadline_seconds: float) -> None:
        """Block until every process calls this, always from one thread. Raises `PeerLostError` after the deadline."""
        try:
            self._service.wait_at_barrier(_BARRIER, int(deadline_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(format_error(error)) from error


def _make_unreachable_error(error: jax.errors.JaxRuntimeError) -> PeerLostError:
    return PeerLostError(f"the coordinator cannot be reached ({format_error(error)})")
