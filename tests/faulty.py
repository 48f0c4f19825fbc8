"""Counters that break the rules of a restorable job, each in one way, and some that hang or fail."""

import time

import jax
import jax.numpy as jnp

from experiments.counter import Counter, advance
from runner.errors import DivergedError


class KeepsStateOutside(Counter):
    """An attribute that the state does not have."""

    def run(self) -> None:
        """Count, and add what was counted since the start of the process."""
        seen = 0
        while self.step < self.total_steps:
            seen += 1
            self.state = self.state | {"total": self.state["total"] + jnp.uint32(seen)}
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()


class DependsOnTheClock(Counter):
    """Another value each time."""

    def run(self) -> None:
        """Count nanoseconds."""
        while self.step < self.total_steps:
            self.state = self.state | {"total": jnp.uint32(time.time_ns() % 2**32)}
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()


class Hangs(Counter):
    """The first attempt stands still at step 20."""

    def run(self) -> None:
        """Count, and sleep."""
        while self.step < self.total_steps:
            self.state = advance(self.state)
            self.step += 1
            if (self.step, self.fence.attempt) == (20, 1):
                time.sleep(10_000)
            self.save_or_stop()


class SplitsItsKey(Counter):
    """A random key that is split, and not folded from the step."""

    def run(self) -> None:
        """Add random numbers."""
        key = jax.random.key(self.spec.seed)
        while self.step < self.total_steps:
            key, used = jax.random.split(key)
            self.state = self.state | {"values": self.state["values"] + jax.random.bits(used, (self.config.width,))}
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()


class Diverges(Counter):
    """What it has counted is not finite at step 30."""

    def check_state(self) -> None:
        """Refuse to save it."""
        if self.step >= 30:
            raise DivergedError(f"step {self.step} is not finite")


class HasABug(Counter):
    """Process 1 raises at step 30."""

    def run(self) -> None:
        """Count, and fail."""
        while self.step < self.total_steps:
            self.state = advance(self.state)
            self.step += 1
            if self.step == 30 and not self.hosts.is_main:
                raise ZeroDivisionError("a bug")
            time.sleep(0.02)
            self.save_or_stop()
