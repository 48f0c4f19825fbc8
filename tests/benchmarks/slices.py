"""A trainer that takes turns with something else, slice of steps by slice of steps, and is timed meanwhile."""

import time
from collections.abc import Callable

import jax

from runner import BaseTrainer


class Slices(BaseTrainer):
    """Mixed into a job's class, before it: after every slice of steps the loop stands still until its next turn."""

    _turn: Callable[[float], int]
    _slice_end = 0
    _slice_started = 0.0

    def take_turns(self, num_steps: int, turn: Callable[[float], int]) -> None:
        """The first slice has `num_steps` steps; `turn(seconds of the slice)` returns how many the next one has.

        To be called right before `run`. What `turn` raises ends `run`, with the state of the last step.
        """
        self._turn, self._slice_end, self._slice_started = turn, self.step + num_steps, time.perf_counter()

    def save_or_stop(self) -> None:
        """As ever; at the end of a slice, wait for the device and hand over."""
        super().save_or_stop()
        if self.step < self._slice_end:
            return
        jax.block_until_ready(self.state)
        self._slice_end += self._turn(time.perf_counter() - self._slice_started)
        self._slice_started = time.perf_counter()
