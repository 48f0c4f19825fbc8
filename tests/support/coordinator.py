"""In-memory replacement of JAX's coordination service, for simulated processes that are threads of one test."""

import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from runner.distributed.agreement import Hosts, Liveness
from runner.distributed.key_value import KeyValueStore

DEADLINE_SECONDS = 60.0


class MemoryCoordinator:
    """Implementation of `key_value.CoordinatorClient` that wakes only those who wait for a key, and counts.

    Attributes:
        values: values by key.
        most_keys: largest number of keys at any time.
        num_held: bytes of all values now.
        most_held: largest number of these bytes at any time.
        num_calls: calls so far.
        num_bytes: bytes that calls have returned.
    """

    def __init__(self, num_processes: int):
        self.values: dict[str, str] = {}
        self.most_keys = self.num_held = self.most_held = self.num_calls = self.num_bytes = 0
        lock = threading.RLock()
        self._changed = threading.Condition(lock)  # for `wait_until`
        self._passed = threading.Condition(lock)  # for barriers
        self._awaited: dict[str, Future[str]] = {}  # by key
        self._num_waiting: dict[str, int] = {}
        self._num_processes = num_processes

    def hosts(self, deadline_seconds: float = DEADLINE_SECONDS) -> list[Hosts]:
        """Return one `Hosts` per simulated process."""
        store = KeyValueStore(self)
        number = self._num_processes
        return [
            Hosts(process, number, store, Liveness(store, process, number, {}), deadline_seconds)
            for process in range(number)
        ]

    def list_keys(self) -> list[str]:
        """Return the keys that exist now."""
        with self._changed:
            return sorted(self.values)

    def _count(self, *returned: str) -> None:
        self.num_calls, self.num_bytes = self.num_calls + 1, self.num_bytes + sum(map(len, returned))

    def key_value_set(self, key: str, value: str, allow_overwrite: bool) -> None:
        assert allow_overwrite
        with self._changed:
            self._count()
            self.num_held += len(value) - len(self.values.get(key, ""))
            self.values[key] = value
            self.most_keys, self.most_held = max(self.most_keys, len(self.values)), max(self.most_held, self.num_held)
            if key in self._awaited:
                self._awaited.pop(key).set_result(value)
            self._changed.notify_all()

    def key_value_try_get(self, key: str) -> str:
        with self._changed:
            found = self.values.get(key)
            self._count(found or "")
        if found is None:
            raise jax.errors.JaxRuntimeError(f"NOT_FOUND: Config key {key} not found.")
        return found

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        with self._changed:
            found = [(name, value) for name, value in self.values.items() if name.startswith(f"{key}/")]
            self._count(*itertools.chain.from_iterable(found))
        return found

    def key_value_delete(self, key: str) -> None:
        with self._changed:
            self._count()
            for name in [name for name in self.values if name == key or name.startswith(f"{key}/")]:
                self.num_held -= len(self.values.pop(name))

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        with self._changed:
            known, awaited = self.values.get(key), None
            if known is None:
                awaited = self._awaited.setdefault(key, Future())
        try:
            # A key that is deleted again at once has been seen all the same.
            found = known if awaited is None else awaited.result(timeout_in_ms / 1000)
        except TimeoutError as error:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: GetKeyValue() timed out with key: {key}") from error
        assert found is not None, "a key is known or awaited"
        with self._changed:
            self._count(found)
        return found

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        with self._changed:
            self._count()
            arrival = self._num_waiting.get(barrier_id, 0)
            self._num_waiting[barrier_id] = arrival + 1
            self._changed.notify_all()
            needed = (arrival // self._num_processes + 1) * self._num_processes
            if arrival + 1 == needed:
                self._passed.notify_all()
            if not self._passed.wait_for(lambda: self._num_waiting[barrier_id] >= needed, timeout_in_ms / 1000):
                raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: Barrier timed out. Id: {barrier_id}")

    def wait_until(self, is_true: Callable[[], bool]) -> None:
        """Block until `is_true` holds after a change of the store."""
        with self._changed:
            assert self._changed.wait_for(is_true, DEADLINE_SECONDS), self.values

    def num_at_barrier(self) -> int:
        """Return how many processes have reached a barrier so far, summed over all barriers."""
        return sum(self._num_waiting.values())


def run_on_all_hosts(hosts: Sequence[Hosts], act: Callable[[Hosts], Any]) -> list[Any]:
    """Call `act` concurrently for every host, and return the results in process order."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return list(pool.map(act, hosts))
