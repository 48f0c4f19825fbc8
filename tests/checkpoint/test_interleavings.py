"""Interleavings of save, upload, crash, restart, zombie and retention: the newest checkpoint always verifies.

The real Checkpointer, restore and BucketStore run over an in-memory bucket. A process is stopped before one of its
calls to the store, forever (kill -9) or while newer attempts run (SIGSTOP, then SIGCONT); or the response to a
successful call is lost. Hypothesis chooses where.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint import arrays as writer
from runner.checkpoint import blocks, inspect, manifest
from runner.checkpoint.arrays import ArrayWriter
from runner.checkpoint.policy import SaveKind
from runner.checkpoint.restore import restore_newest
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.errors import FencedError
from runner.spec import CheckpointConfig
from runner.storage import TransientError
from runner.storage import store as retry
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import MemoryDriver, MemoryLog, make_memory_bucket

KEEP_LAST = 2
Rows = list[dict[str, Any]]


class KilledError(BaseException):
    """Simulated end of a process."""


class FaultyDriver:
    """The driver of one process, which triggers a fault before call number `at`."""

    batch_size = 2  # so that a checkpoint is deleted with several calls

    def __init__(self, driver: MemoryDriver):
        self._driver = driver
        self._num_calls = 0
        self._is_dead = False
        self._loses_answer = False
        self.at: int | None = None
        self.happens: Callable[[], None] = self.die

    def arm(self, at: int | None, happens: Callable[[], None]) -> None:
        """Call `happens` before the `at`-th call from now on."""
        self._num_calls, self.at, self.happens = 0, at, happens

    def die(self) -> None:
        self._is_dead = True

    def lose_answer(self) -> None:
        self._loses_answer = True

    def __getattr__(self, name: str) -> Any:
        act = getattr(self._driver, name)

        def call(*arguments: Any) -> Any:
            if self._num_calls == self.at:
                self.at = None
                self.happens()
            self._num_calls += 1
            if self._is_dead:
                raise KilledError
            result = list(act(*arguments)) if name == "list" else act(*arguments)
            if self._loses_answer:
                self._loses_answer = False
                raise TransientError("the answer was lost")
            return result

        return call


def make_state(step: int) -> dict[str, jax.Array]:
    return {"count": jnp.int32(step), "values": jnp.arange(5, dtype=jnp.float32) * step}


class SavingProcess:
    """An attempt of a job that only saves."""

    def __init__(self, world: "BucketModel"):
        self.faults = FaultyDriver(world.driver)
        self.world = world
        store = make_memory_bucket(self.faults)  # type: ignore[arg-type]
        self.attempt = make_attempt(store, MemoryLog(world.rows))
        writer = ArrayWriter(store, self.attempt.hosts, world.staging)
        rule = CheckpointConfig(keep_last=KEEP_LAST, max_unsaved_minutes=1.0)
        self.saver = Checkpointer(self.attempt, rule, 1, {}, make_abstract_state(), writer)
        found = restore_newest(self.attempt, None, make_abstract_state(), lambda identity, step: identity == {})
        self.step = 0 if found is None else found.manifest.step
        if found is not None:
            assert_state_of(found.state, self.step)
        self.saver.begin(make_state(self.step), self.step)
        self.saver._retention.wait()  # one call at a time

    def save(self) -> None:
        """Save the next step."""
        self.step += 1
        self.saver.save(make_state(self.step), self.step, SaveContents(), SaveKind.REQUIRED)
        if self.saver.wait_until_finished():
            self.world.durable = max(self.world.durable, self.step)


def make_abstract_state() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        for name, leaf in make_state(0).items()
    }


def assert_state_of(state: dict[str, jax.Array], step: int) -> None:
    for name, leaf in make_state(step).items():
        np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(leaf))


class BucketModel:
    """The bucket, and its invariants."""

    def __init__(self, staging: Path):
        self.driver, self.staging = MemoryDriver(), staging
        self.rows: Rows = []
        self.durable = 0

    def check(self) -> None:
        store = make_memory_bucket(self.driver)
        entries = [entry for entry in inspect.list_entries(store, inspect.VerifyDepth.FILES) if entry.is_committed]
        assert [entry.problems for entry in entries] == [()] * len(entries), "a committed checkpoint does not verify"
        newest = max((int(entry.name) for entry in entries), default=0)
        assert newest >= self.durable, "a durable step was lost"


@pytest.fixture(autouse=True)
def serialise_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make one call at a time, so that the same choices give the same interleaving."""
    for module, name in (
        (writer, "NUM_UPLOADS"),
        (blocks, "NUM_READERS"),
        (retry, "NUM_REQUESTS"),
        (manifest, "_NUM_READERS"),
    ):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.0)


@contextlib.contextmanager
def suppress_process_end() -> Iterator[None]:
    """Suppress the kill of a process and its fencing by a newer one."""
    with contextlib.suppress(KilledError, FencedError):
        yield


CALLS = st.integers(min_value=0, max_value=24)
ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("kill"), CALLS),
    st.tuples(st.just("kill in start"), CALLS),
    st.tuples(st.just("stop and continue"), CALLS, st.integers(0, 3)),
    st.tuples(st.just("lose an answer"), CALLS),
)
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def play(world: BucketModel, acts: list[tuple[Any, ...]]) -> None:
    process = SavingProcess(world)
    for act in acts:
        if act[0] == "save":
            for _ in range(act[1]):
                process.save()
        elif act[0] == "lose an answer":
            process.faults.arm(act[1], process.faults.lose_answer)
            process.save()
        elif act[0] == "kill":
            process.faults.arm(act[1], process.faults.die)
            with suppress_process_end():
                process.save()
            world.check()
            process = SavingProcess(world)
        elif act[0] == "kill in start":
            with suppress_process_end():
                start_and_kill(world, act[1])
            world.check()
            process = SavingProcess(world)
        else:
            process = overtake(world, process, act[1], act[2])
        world.check()
    assert_restart_is_durable(world)


def start_and_kill(world: BucketModel, at: int) -> None:
    """Start an attempt that is killed while it claims, restores, quarantines or cleans up."""
    original = FaultyDriver.__init__

    def armed(self: FaultyDriver, driver: MemoryDriver) -> None:
        original(self, driver)
        self.arm(at, self.die)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FaultyDriver, "__init__", armed)
        SavingProcess(world)


def overtake(world: BucketModel, zombie: SavingProcess, at: int, num_saves: int) -> SavingProcess:
    """Stop a process during a save, run a newer one with saves, continue the zombie, and return the newer one."""
    newer: list[SavingProcess] = []

    def start_newer() -> None:
        newer.append(SavingProcess(world))
        for _ in range(num_saves):
            newer[0].save()
        world.check()

    zombie.faults.arm(at, start_newer)
    with suppress_process_end():
        zombie.save()
    zombie.faults.die()
    return newer[0] if newer else SavingProcess(world)


def assert_restart_is_durable(world: BucketModel) -> None:
    assert SavingProcess(world).step >= world.durable


@settings(max_examples=60, **COMMON)  # type: ignore[arg-type]
@given(acts=st.lists(ACTIONS, max_size=5))
def test_the_newest_checkpoint_verifies_after_short_interleavings(tmp_path: Path, acts: list[tuple[Any, ...]]) -> None:
    play(BucketModel(tmp_path), acts)


@pytest.mark.soak
@settings(max_examples=3000, **COMMON)  # type: ignore[arg-type]
@given(acts=st.lists(ACTIONS, max_size=12))
def test_the_newest_checkpoint_verifies_after_long_interleavings(tmp_path: Path, acts: list[tuple[Any, ...]]) -> None:
    play(BucketModel(tmp_path), acts)


@pytest.mark.daily(12)
@pytest.mark.parametrize(
    ("num_saves", "at"),
    [
        pytest.param(num_saves, at, marks=() if num_saves == 1 or at % 4 == 0 else pytest.mark.soak)
        for num_saves in (0, 1, 3)
        for at in range(16)
    ],
)
def test_a_zombie_stopped_at_any_call_of_its_save_is_harmless(tmp_path: Path, at: int, num_saves: int) -> None:
    play(BucketModel(tmp_path), [("save", 2), ("stop and continue", at, num_saves), ("save", 1)])


@pytest.mark.daily(12)
@pytest.mark.parametrize("at", range(24))
def test_a_kill_at_any_call_of_a_save_is_harmless(tmp_path: Path, at: int) -> None:
    play(BucketModel(tmp_path), [("save", 3), ("kill", at), ("save", 1)])
