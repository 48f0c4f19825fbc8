"""RestoreableJob without a neural network: it counts, and mixes the count into an array.

The smallest complete job: a config, an `init` and a `run`. Tests use it to exercise the base class quickly.

Shape legend: W width.
"""

import time

import jax
import jax.numpy as jnp
from pydantic import Field, NonNegativeFloat, PositiveInt

from runner import RestoreableJob
from runner.spec import JobConfig

State = dict[str, jax.Array]


class CounterConfig(JobConfig):
    """Configuration of the counter."""

    total_steps: PositiveInt = Field(description="Step at which the job is done.")
    width: PositiveInt = Field(default=1024, lt=2**31, description="Elements of the array.")
    step_seconds: NonNegativeFloat = Field(default=0.0, description="Pause after each step, to watch it run.")

    @property
    def free_keys(self) -> frozenset[str]:
        """Keys that may change on resume: neither the pause nor the total changes a completed step."""
        return frozenset({"step_seconds", "total_steps"})


@jax.jit
def advance(state: State) -> State:
    """Return the state after one step: a linear congruential generator in every element, and the sum so far."""
    values_W = state["values"] * jnp.uint32(1664525) + jnp.uint32(1013904223) + state["count"]
    return {"count": state["count"] + 1, "total": state["total"] + values_W.sum(dtype=jnp.uint32), "values": values_W}


class Counter(RestoreableJob):
    """Job that counts to `total_steps`."""

    Config = CounterConfig

    @property
    def total_steps(self) -> int:
        """Step at which the job is done."""
        return int(self.config.total_steps)

    def init(self) -> State:
        """Return zeros, and an array that begins with the seed."""
        values_W = jnp.arange(self.config.width, dtype=jnp.uint32) + jnp.uint32(self.spec.seed)
        return {"count": jnp.uint32(0), "total": jnp.uint32(0), "values": values_W}

    def run(self) -> None:
        """Count from the current step to the last one."""
        while self.step < self.total_steps:
            self.state = advance(self.state)
            self.step += 1
            time.sleep(self.config.step_seconds)
            # Saves when the checkpoint policy says so, and ends the attempt if the job is asked to stop.
            self.save_or_stop()
