"""The steps since the last row, kept on the device until they are asked for: nothing here waits in a step."""

import math
import time

import jax

from runner.errors import DivergedError
from runner.periodic import tokens_at
from runner.train.metrics.row import Row
from runner.train.step import GRAD_NORM, finite


class Window:
    """The steps since the last row, kept on the device until they are asked for: nothing here waits in a step."""

    def __init__(self, step: int = 0):
        self._pending: list[tuple[int, jax.Array, dict[str, jax.Array]]] = []
        self._last: tuple[int, float, dict[str, float]] | None = None
        self._since_step = step
        self._since_seconds = time.monotonic()

    def add(self, step: int, loss: jax.Array, meta: dict[str, jax.Array]) -> None:
        """Take what step `step` returned, without waiting for it."""
        self._pending.append((step, loss, meta))

    def fetch(self) -> None:
        """Wait for the device. Raises `DivergedError` naming the first step that is not finite."""
        for step, loss, meta in jax.device_get(self._pending):
            figures = {key: float(value) for key, value in meta.items()}
            grad_norm = figures.get(GRAD_NORM, 0.0)
            if not (math.isfinite(loss) and math.isfinite(grad_norm)):
                raise DivergedError(
                    f"step {step}: training diverged: loss {float(loss)}, gradient norm {grad_norm}; "
                    "the last good checkpoint is kept"
                )
            self._last = (step, float(loss), figures)
        self._pending = []

    def close(self, tokens_per_step: int) -> Row:
        """The row of the newest step; the next window begins."""
        self.fetch()
        assert self._last is not None, "a row needs a step"
        step, loss, figures = self._last
        seconds = time.monotonic() - self._since_seconds
        tokens = tokens_at(step - self._since_step, tokens_per_step)
        self._since_step = step
        self.restart_clock()
        order = [name for name in (GRAD_NORM, "learning_rate") if name in figures]
        first = {f"train/{name}": figures.pop(name) for name in order}
        return {
            "step": step,
            "train/loss": loss,
            **first,
            "train/tokens": tokens_at(step, tokens_per_step),
            "perf/tokens_per_second": tokens / max(seconds, 1e-9),
            **{f"train/{name}": finite(value) for name, value in figures.items()},
        }

    def restart_clock(self) -> None:
        """Leave out of the speed what has passed so far."""
        self._since_seconds = time.monotonic()
