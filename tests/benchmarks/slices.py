"""Training loop that pauses after every slice of steps, so that another program can use the machine meanwhile."""

import time
from collections.abc import Callable

import jax

from runner import BaseTrainer


class SlicedTrainer(BaseTrainer):
    """Mixin, placed before the job's class, that times slices of steps and calls a function between them."""

    _on_slice_end: Callable[[float], int]
    _slice_end = 0
    _slice_started = 0.0

    def start_slices(self, num_steps: int, on_slice_end: Callable[[float], int]) -> None:
        """Start the first slice, of `num_steps` steps. Must be called right before `run`.

        Args:
            on_slice_end: called after each slice with its seconds; returns the number of steps of the next one. An
                exception that it raises ends `run`, with the state of the last step.
        """
        self._on_slice_end, self._slice_end = on_slice_end, self.step + num_steps
        self._slice_started = time.perf_counter()

    def save_or_stop(self) -> None:
        super().save_or_stop()
        if self.step < self._slice_end:
            return
        jax.block_until_ready(self.state)
        self._slice_end += self._on_slice_end(time.perf_counter() - self._slice_started)
        self._slice_started = time.perf_counter()
