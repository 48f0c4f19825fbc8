"""Counter jobs that each break one rule of a restorable job, hang or fail."""

import logging
import os
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
    """Counter whose step is a method that subclasses override."""

    def one_step(self) -> None:
        """Advance the state by one step."""
        self.state = advance(self.state)

    def run(self) -> None:
        """Step to the end, at the pace of the config."""
        while self.step < self.total_steps:
            self.one_step()
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()


class PrintingCounter(StepwiseCounter):
    """Counter that prints to both streams and makes a malformed call of the logger, as user code may."""

    def one_step(self) -> None:
        """Advance, then print and log."""
        super().one_step()
        print(f"step {self.step} \u2713")
        print(f"step {self.step}", file=sys.stderr, flush=True)
        logging.getLogger(__name__).warning("%d of %d", self.step)


class FailingCounter(StepwiseCounter):
    """Counter that raises in step 30."""

    def one_step(self) -> None:
        """Count, and fail."""
        super().one_step()
        if self.step + 1 == 30:
            raise ZeroDivisionError("a bug")


class FailingGpuCounter(StepwiseCounter):
    """Counter whose step 10 raises an error of XLA, with the text in the variable FAULT."""

    def one_step(self) -> None:
        """Count, and fail."""
        super().one_step()
        if self.step + 1 == 10:
            raise jax.errors.JaxRuntimeError(os.environ["FAULT"])


class HiddenStateCounter(StepwiseCounter):
    """Counter whose result depends on an attribute outside the state: the steps of this process."""

    seen = 0

    def one_step(self) -> None:
        """Add the number of steps of this process."""
        self.seen += 1
        self.state = self.state | {"total": self.state["total"] + jnp.uint32(self.seen)}


class RejectedDataCounter(StepwiseCounter):
    """Counter whose process 1 rejects its data while process 0 waits at a barrier."""

    def setup(self, hosts: Hosts) -> None:
        """Raise on process 1, before the directory is claimed."""
        super().setup(hosts)
        if not hosts.is_main:
            raise DataError("no file matches")
        hosts.barrier()


class WeakTypeCounter(StepwiseCounter):
    """Counter that replaces a leaf by a weakly typed one, so that a restored state would compute in another type."""

    def init(self) -> Any:
        """Add a leaf to the state of the counter."""
        return super().init() | {"scale": jnp.float32(1.5)}

    def one_step(self) -> None:
        """Replace the leaf by an array made from a Python number, which is weakly typed."""
        super().one_step()
        self.state = self.state | {"scale": jnp.asarray(1.5)}


class ClockDependentCounter(StepwiseCounter):
    """Counter whose state depends on the time of day."""

    def one_step(self) -> None:
        """Store the nanoseconds of process 0's clock."""
        nanoseconds = self.attempt.hosts.agree(time.time_ns() % 2**32)
        self.state = self.state | {"total": self.state["total"] * 0 + jnp.uint32(nanoseconds)}


class SplitKeyCounter(StepwiseCounter):
    """Counter that splits a random key in each step instead of folding the step into it."""

    def run(self) -> None:
        """Start from the key of the seed, also after a resume."""
        self.key = jax.random.key(self.spec.seed)
        super().run()

    def one_step(self) -> None:
        """Add random numbers to the state."""
        self.key, used = jax.random.split(self.key)
        self.state = self.state | {"values": self.state["values"] + jax.random.bits(used, (self.config.width,))}


class HangingCounter(StepwiseCounter):
    """Counter that hangs in step 20 of the first attempt."""

    def one_step(self) -> None:
        """Advance, then sleep."""
        super().one_step()
        if (self.step + 1, self.attempt.number) == (20, 1):
            time.sleep(10_000)


class FailingPeerCounter(StepwiseCounter):
    """Counter whose process 1 raises in step 30."""

    def one_step(self) -> None:
        """Count, and fail."""
        super().one_step()
        if self.step + 1 == 30 and not self.attempt.hosts.is_main:
            raise ZeroDivisionError("a bug")


class DivergingCounter(Counter):
    """Counter that diverges at step 30."""

    def make_save_contents(self) -> SaveContents:
        """Raise from step 30 on, as for a state that is not finite."""
        if self.step >= 30:
            raise DivergedError(f"step {self.step} is not finite")
        return super().make_save_contents()


class ExitingCounter(Counter):
    """Counter that calls `sys.exit(code)` when the method named `place` is looked up, as a script may at its end."""

    place, code = "", 0

    def __getattribute__(self, name: str) -> Any:
        """Exit at the lookup of the configured method."""
        if name == object.__getattribute__(self, "place"):
            sys.exit(object.__getattribute__(self, "code"))
        return super().__getattribute__(name)
