"""The coordinator's key-value store: every key that the runner uses, and the only calls that reach the store.

JAX's coordination service in process 0 keeps the keys in memory. Nothing grows for ever, so beside each key stands who
writes it, who deletes it, and the most keys there can be of its kind; P is the number of processes. A kind whose key
ends in a process is overwritten by that process. Only three kinds are counted (calls, saves), and those are deleted.
"""

import json
from typing import Any, Protocol

import jax

from runner.errors import PeerLostError, format_error

# `agree` on process 0 writes a key a call. Process 0 deletes them all at the next gather, which `agree` itself makes
# after MAX_DECISIONS without one: at most MAX_DECISIONS.
DECISIONS = "runner/decision"
MAX_DECISIONS = 64

# A host that was asked to stop writes it, once a job. Never deleted: 1.
STOP_REQUEST = "runner/stop/request"

# The watchdog of process 0 writes it before the job ends, and where something has failed on one host alone; then the
# next such word, or the verdict, overwrites it. Never deleted: 1.
VERDICT = "runner/verdict"

# The straggler rounds of process 0 overwrite it. Never deleted: 1.
ROUND = "runner/round"

# Folders of one key a process, which that process overwrites: its last beat (watchdog), the last round in which it told
# of its arrival (straggler), its tick when the stop was asked for (preemption), that it left in order (liveness).
# Never deleted: P each.
HEARTBEATS = "runner/beat"
ARRIVALS = "runner/arrival"
STOP_TICKS = "runner/stop/tick"
DEPARTURES = "runner/departure"

# One barrier for all gathers: the service counts how often it was passed, but keeps every other name for ever.
_BARRIER = "runner/all"


def process_key(folder: str, process: int) -> str:
    """The key of one process in `folder`."""
    return f"{folder}/{process}"


def decision_key(call: int) -> str:
    """What process 0 has decided in one call of `agree`. See `DECISIONS`."""
    return f"{DECISIONS}/{call}"


def gather_folder(call: int) -> str:
    """Folder of every process's value in one gather, written by each.

    Process 0 deletes it in the next, when others may have begun the one after: at most 3 P.
    """
    return f"runner/gathered/{call}"


def save_folder(save: int) -> str:
    """Folder of what each process has written of one save (checkpoint/writer, by `collect`), from all but process 0.

    Process 0 deletes it when it has read all. If it gave up, late parts stay until the next save that it has read
    whole: at most P for each save in a row that fails, and `checkpoint.max_unsaved_minutes` ends the job over those.
    """
    return f"runner/pieces/{save}"


class CoordinatorClient(Protocol):
    """What is used of the client of JAX's coordination service. Each call may raise `JaxRuntimeError`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None: ...

    def key_value_try_get(self, key: str) -> str: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...

    def key_value_delete(self, key: str) -> None: ...

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str: ...

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None: ...


class KeyValueStore:
    """The store, for values in JSON. Any host, any thread.

    Each call raises `PeerLostError` if the coordinator cannot be reached. A process that is alone has no client, and
    makes no call.
    """

    def __init__(self, client: CoordinatorClient | None):
        self._client = client

    @property
    def _service(self) -> CoordinatorClient:
        assert self._client is not None, "a process that is alone has no peers to tell"
        return self._client

    def set(self, key: str, value: Any) -> None:
        """Set `key` to `value` for every host. Never waits for one."""
        try:
            self._service.key_value_set(key, json.dumps(value), allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            raise _unreachable(error) from error

    def get(self, key: str, deadline_seconds: float, what: str) -> Any:
        """Block until `key` has a value, and return it. Raises `PeerLostError` naming `what` after the deadline."""
        try:
            return json.loads(self._service.blocking_key_value_get(key, int(deadline_seconds * 1000)))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(
                f"{what} did not come within {deadline_seconds:.0f} s ({format_error(error)})"
            ) from error

    def try_get(self, key: str) -> Any:
        """The value of `key`, None if it has none yet. Never waits for a host."""
        try:
            return json.loads(self._service.key_value_try_get(key))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise _unreachable(error) from error

    def list_values(self, folder: str) -> dict[int, Any]:
        """The values in `folder` by process. Never waits for a host."""
        try:
            rows = self._service.key_value_dir_get(folder)
        except jax.errors.JaxRuntimeError as error:
            raise _unreachable(error) from error
        return {int(key.rpartition("/")[2]): json.loads(value) for key, value in rows}

    def delete(self, key: str) -> None:
        """Delete `key`, and all below it if it is a folder. Main host only. Nothing happens if there is none."""
        try:
            self._service.key_value_delete(key)
        except jax.errors.JaxRuntimeError as error:
            raise _unreachable(error) from error

    def barrier(self, deadline_seconds: float) -> None:
        """Block until every process is here: one call to the coordinator, however many there are.

        Called on every host, from one thread. Raises `PeerLostError` after the deadline.
        """
        try:
            self._service.wait_at_barrier(_BARRIER, int(deadline_seconds * 1000))
        except jax.errors.JaxRuntimeError as error:
            raise PeerLostError(format_error(error)) from error


def _unreachable(error: jax.errors.JaxRuntimeError) -> PeerLostError:
    return PeerLostError(f"the coordinator cannot be reached ({format_error(error)})")
