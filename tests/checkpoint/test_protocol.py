"""Any interleaving of save, upload, crash, restart, zombie and retention leaves a newest checkpoint that verifies.

The real Checkpointer, restore and BucketStore run over a bucket in memory. A process is cut off before any one of its
calls to the store, for good (kill -9), or while newer attempts do what they like (SIGSTOP, then SIGCONT); or an answer
is lost after the call has worked. hypothesis chooses where.
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
from runner.checkpoint.arrays import BlockWriter
from runner.checkpoint.policy import SaveKind
from runner.checkpoint.restore import restore_newest
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.errors import FencedError
from runner.spec import CheckpointConfig
from runner.storage import TransientError, bucket
from runner.storage import store as retry
from tests.support.attempt import make_attempt
from tests.support.memory_bucket import MemoryDriver, MemoryLog, make_memory_bucket

KEEP_LAST = 2
Rows = list[dict[str, Any]]


class Killed(BaseException):
    """The process is no more."""


class Mortal:
    """One process's way to the bucket: before call number `at`, something happens."""

    def __init__(self, driver: MemoryDriver):
        self._driver = driver
        self._num_calls = 0
        self._is_dead = False
        self._loses_answer = False
        self.at: int | None = None
        self.happens: Callable[[], None] = self.die

    def arm(self, at: int | None, happens: Callable[[], None]) -> None:
        """Have `happens` called before the `at`-th call from now on."""
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
                raise Killed
            result = list(act(*arguments)) if name == "list" else act(*arguments)
            if self._loses_answer:
                self._loses_answer = False
                raise TransientError("the answer was lost")
            return result

        return call


def state_of(step: int) -> dict[str, jax.Array]:
    """The only right bits of a step."""
    return {"count": jnp.int32(step), "values": jnp.arange(5, dtype=jnp.float32) * step}


class Process:
    """One attempt of a job of which only the saves matter."""

    def __init__(self, world: "World"):
        self.mortal = Mortal(world.driver)
        self.world = world
        store = make_memory_bucket(self.mortal)  # type: ignore[arg-type]
        self.attempt = make_attempt(store, MemoryLog(world.rows))
        writer = BlockWriter(store, self.attempt.hosts, world.staging)
        rule = CheckpointConfig(keep_last=KEEP_LAST, max_unsaved_minutes=1.0)
        self.saver = Checkpointer(self.attempt, rule, 1, {}, abstract(), writer)
        found = restore_newest(self.attempt, None, abstract(), {}.__eq__)
        self.step = 0 if found is None else found.manifest.step
        if found is not None:
            assert_right(found.state, self.step)
        self.saver.begin(state_of(self.step), self.step)

    def save(self) -> None:
        """Save the next step."""
        self.step += 1
        self.saver.save(state_of(self.step), self.step, SaveContents(), SaveKind.REQUIRED)
        if self.saver.wait_until_finished():
            self.world.durable = max(self.world.durable, self.step)


def abstract() -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in state_of(0).items()
    }


def assert_right(state: dict[str, jax.Array], step: int) -> None:
    for name, leaf in state_of(step).items():
        np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(leaf))


class World:
    """The bucket, and what must be true of it whatever happened."""

    def __init__(self, staging: Path):
        self.driver, self.staging = MemoryDriver(), staging
        self.rows: Rows = []
        self.durable = 0

    def check(self) -> None:
        store = make_memory_bucket(self.driver)
        entries = [entry for entry in inspect.list_entries(store, inspect.VerifyDepth.FILES) if entry.is_committed]
        assert [entry.problems for entry in entries] == [()] * len(entries), "a committed checkpoint does not verify"
        newest = max((int(entry.name) for entry in entries), default=0)
        assert newest >= self.durable, "a durable step is lost"


@pytest.fixture(autouse=True)
def one_call_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the same choices give the same interleaving."""
    for module, name in (
        (writer, "NUM_UPLOADS"),
        (blocks, "NUM_READERS"),
        (bucket, "_NUM_DELETERS"),
        (manifest, "_NUM_READERS"),
    ):
        monkeypatch.setattr(module, name, 1)
    monkeypatch.setattr(retry, "FIRST_WAIT_SECONDS", 0.0)


@contextlib.contextmanager
def an_end() -> Iterator[None]:
    """A process may be killed, or find that it was overtaken."""
    with contextlib.suppress(Killed, FencedError):
        yield


CALLS = st.integers(min_value=0, max_value=24)
ACT = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 3)),
    st.tuples(st.just("kill"), CALLS),
    st.tuples(st.just("kill in start"), CALLS),
    st.tuples(st.just("stop and continue"), CALLS, st.integers(0, 3)),
    st.tuples(st.just("lose an answer"), CALLS),
)
COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]}


def play(world: World, acts: list[tuple[Any, ...]]) -> None:
    process = Process(world)
    for act in acts:
        if act[0] == "save":
            for _ in range(act[1]):
                process.save()
        elif act[0] == "lose an answer":
            process.mortal.arm(act[1], process.mortal.lose_answer)
            process.save()
        elif act[0] == "kill":
            process.mortal.arm(act[1], process.mortal.die)
            with an_end():
                process.save()
            world.check()
            process = Process(world)
        elif act[0] == "kill in start":
            with an_end():
                start_and_die(world, act[1])
            world.check()
            process = Process(world)
        else:
            process = overtake(world, process, act[1], act[2])
        world.check()
    assert_right_after_restart(world)


def start_and_die(world: World, at: int) -> None:
    """An attempt that is killed while it claims, restores, quarantines or clears away."""
    original = Mortal.__init__

    def armed(self: Mortal, driver: MemoryDriver) -> None:
        original(self, driver)
        self.arm(at, self.die)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mortal, "__init__", armed)
        Process(world)


def overtake(world: World, zombie: Process, at: int, num_saves: int) -> Process:
    """Stop a process in its save; a newer one starts and saves; then the zombie goes on. The newer one."""
    newer: list[Process] = []

    def start_newer() -> None:
        newer.append(Process(world))
        for _ in range(num_saves):
            newer[0].save()
        world.check()

    zombie.mortal.arm(at, start_newer)
    with an_end():
        zombie.save()
    zombie.mortal.die()
    return newer[0] if newer else Process(world)


def assert_right_after_restart(world: World) -> None:
    assert Process(world).step >= world.durable


@settings(max_examples=60, **COMMON)  # type: ignore[arg-type]
@given(acts=st.lists(ACT, max_size=5))
def test_any_interleaving_leaves_a_newest_checkpoint_that_verifies(tmp_path: Path, acts: list[tuple[Any, ...]]) -> None:
    play(World(tmp_path), acts)


@pytest.mark.soak
@settings(max_examples=3000, **COMMON)  # type: ignore[arg-type]
@given(acts=st.lists(ACT, max_size=12))
def test_any_longer_interleaving_too(tmp_path: Path, acts: list[tuple[Any, ...]]) -> None:
    play(World(tmp_path), acts)


@pytest.mark.parametrize("at", range(16))
@pytest.mark.parametrize("num_saves", [0, 1, 3])
def test_a_zombie_stopped_before_any_call_of_its_save_breaks_nothing(tmp_path: Path, at: int, num_saves: int) -> None:
    play(World(tmp_path), [("save", 2), ("stop and continue", at, num_saves), ("save", 1)])


@pytest.mark.parametrize("at", range(24))
def test_a_kill_before_any_call_of_a_save_or_its_retention_breaks_nothing(tmp_path: Path, at: int) -> None:
    play(World(tmp_path), [("save", 3), ("kill", at), ("save", 1)])
