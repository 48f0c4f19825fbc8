"""A RestoreableJob with no neural net: counts, and folds the count into an array. The fast proof of the base class.

Array shapes: W = width.
"""

import time

import jax
import jax.numpy as jnp
from pydantic import Field, NonNegativeFloat, PositiveInt

from runner import RestoreableJob
from runner.spec import JobConfig

State = dict[str, jax.Array]


class CounterConfig(JobConfig):
    """How far to count."""

    total_steps: PositiveInt = Field(description="Step at which the job is done.")
    width: PositiveInt = Field(default=1024, description="Elements of the array.")
    step_seconds: NonNegativeFloat = Field(default=0.0, description="Pause after each step, to be watched.")

    @property
    def free_keys(self) -> frozenset[str]:
        """The pace moves no bit, and counting may go on further."""
        return frozenset({"step_seconds", "total_steps"})


@jax.jit
def advance(state: State) -> State:
    """One step of a linear congruential generator in every element, and the sum so far."""
    values_W = state["values"] * jnp.uint32(1664525) + jnp.uint32(1013904223) + state["count"]
    return {"count": state["count"] + 1, "total": state["total"] + values_W.sum(dtype=jnp.uint32), "values": values_W}


class Counter(RestoreableJob):
    """Counts to `total_steps`."""

    Config = CounterConfig

    @property
    def total_steps(self) -> int:
        """The step at which the job is done."""
        return int(self.config.total_steps)

    def init(self) -> State:
        """Zeros, and an array that begins with the seed."""
        values_W = jnp.arange(self.config.width, dtype=jnp.uint32) + jnp.uint32(self.spec.seed)
        return {"count": jnp.uint32(0), "total": jnp.uint32(0), "values": values_W}

    def run(self) -> None:
        """Count."""
        while self.step < self.total_steps:
            self.state = advance(self.state)
            self.step += 1
            time.sleep(self.config.step_seconds)
            self.save_or_stop()
