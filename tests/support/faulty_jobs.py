"""Counters that break the rules of a restorable job, each in one way, and some that hang or fail."""

import logging
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp

from experiments.counter import Counter, advance
from runner.checkpoint.save import SaveContents
from runner.distributed.agreement import Hosts
from runner.errors import DataError, DivergedError


class StepwiseCounter(Counter):
    """A counter whose step is a method."""

    def one_step(self) -> None:
        """What happens to the state."""
        self.state = advance(self.state)

    def run(self) -> None:
        """Step by step to the end, at the counter's pace."""
        while self.step < self.total_steps:
            self.one_step()
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()


class PrintingCounter(StepwiseCounter):
    """Code of a user that prints, and logs with the wrong number of values."""

    def one_step(self) -> None:
        """Say so in every way."""
        super().one_step()
        print(f"step {self.step} \u2713")
        print(f"step {self.step}", file=sys.stderr, flush=True)
        logging.getLogger(__name__).warning("%d of %d", self.step)


class FailingCounter(StepwiseCounter):
    """Raises in step 30."""

    def one_step(self) -> None:
        """Count, and fail."""
        super().one_step()
        if self.step + 1 == 30:
            raise ZeroDivisionError("a bug")


class HiddenStateCounter(StepwiseCounter):
    """An attribute that the state does not have: how often this process has counted."""

    seen = 0

    def one_step(self) -> None:
        """Add it."""
        self.seen += 1
        self.state = self.state | {"total": self.state["total"] + jnp.uint32(self.seen)}


class RejectedDataCounter(StepwiseCounter):
    """Process 1 finds its data wrong, and the other waits for it."""

    def setup(self, hosts: Hosts) -> None:
        """Before anything is claimed."""
        super().setup(hosts)
        if not hosts.is_main:
            raise DataError("no file matches")
        hosts.barrier()


class WeakTypeCounter(StepwiseCounter):
    """A leaf that is made anew from a Python number: restored, the next product with it would have another type."""

    def init(self) -> Any:
        """With one leaf more."""
        return super().init() | {"scale": jnp.float32(1.5)}

    def one_step(self) -> None:
        """Take the number anew."""
        super().one_step()
        self.state = self.state | {"scale": jnp.asarray(1.5)}


class ClockDependentCounter(StepwiseCounter):
    """Another value each time."""

    def one_step(self) -> None:
        """Take the nanoseconds of one host."""
        nanoseconds = self.attempt.hosts.agree(time.time_ns() % 2**32)
        self.state = self.state | {"total": self.state["total"] * 0 + jnp.uint32(nanoseconds)}


class SplitKeyCounter(StepwiseCounter):
    """A random key that is split, and not folded from the step."""

    def run(self) -> None:
        """Begin with the key of the seed."""
        self.key = jax.random.key(self.spec.seed)
        super().run()

    def one_step(self) -> None:
        """Add random numbers."""
        self.key, used = jax.random.split(self.key)
        self.state = self.state | {"values": self.state["values"] + jax.random.bits(used, (self.config.width,))}


class HangingCounter(StepwiseCounter):
    """The first attempt stands still in step 20."""

    def one_step(self) -> None:
        """Count, and sleep."""
        super().one_step()
        if (self.step + 1, self.attempt.number) == (20, 1):
            time.sleep(10_000)


class FailingPeerCounter(StepwiseCounter):
    """Process 1 raises in step 30."""

    def one_step(self) -> None:
        """Count, and fail."""
        super().one_step()
        if self.step + 1 == 30 and not self.attempt.hosts.is_main:
            raise ZeroDivisionError("a bug")


class DivergingCounter(Counter):
    """What it has counted is not finite at step 30."""

    def make_save_contents(self) -> SaveContents:
        """Refuse to save it."""
        if self.step >= 30:
            raise DivergedError(f"step {self.step} is not finite")
        return super().make_save_contents()


class ExitingCounter(Counter):
    """Calls `sys.exit(code)` in the method named `place`, as a stranger's script does at its end."""

    place, code = "", 0

    def __getattribute__(self, name: str) -> Any:
        """Leave in the method that is asked for."""
        if name == object.__getattribute__(self, "place"):
            sys.exit(object.__getattribute__(self, "code"))
        return super().__getattribute__(name)
