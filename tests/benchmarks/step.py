"""Step time of the runner over that of the best hand-written loop for the same model and batch.

The runner's own loop runs with data, logging and checkpoints at the default cadence; after every slice of steps it
hands over to as many hand-written steps, so both see the same machine. Printed: the median over slices of the ratio.

    python -m tests.benchmarks.step [--sizes small 10m 124m] [--layer-loops scan unroll] [--slices 5] [--steps 10]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax

from experiments.gpt import PretrainGPT
from tests.benchmarks.hand_loop import SIZES, make_hand_step
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start


class Sliced(PretrainGPT):
    """A GPT job that lets another loop run for a while after every `slice_steps` steps, and times both."""

    slice_steps = 10

    def compare_with(self, hand: Any) -> None:
        """Set the other loop: what `make_hand_step` returns."""
        self.step_by_hand, self.hand_state, self.x_BxT, self.y_BxT = hand
        self.seconds: list[tuple[float, float]] = []
        self.slice_started = time.perf_counter()

    def save_or_stop(self) -> None:
        """As ever; at the end of a slice, wait for the device and hand over."""
        super().save_or_stop()
        if self.step % self.slice_steps:
            return
        jax.block_until_ready(self.state)
        mine = time.perf_counter() - self.slice_started
        started = time.perf_counter()
        for _ in range(self.slice_steps):
            self.hand_state, loss = self.step_by_hand(self.hand_state, self.x_BxT, self.y_BxT)
        jax.block_until_ready((self.hand_state, loss))
        self.seconds.append((mine, time.perf_counter() - started))
        self.slice_started = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=[name.lower() for name in SIZES], default=["10m", "124m"])
    parser.add_argument("--layer-loops", nargs="+", choices=("scan", "unroll"), default=["scan", "unroll"])
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parsed = parser.parse_args()
    Sliced.slice_steps = parsed.steps
    for size in parsed.sizes:
        for layer_loop in parsed.layer_loops:
            hand = make_hand_step(SIZES[size.upper()], layer_loop)
            with tempfile.TemporaryDirectory() as directory:
                total_steps = (parsed.slices + 1) * parsed.steps  # the first slice warms up
                job = start(make_job(size, Path(directory), total_steps, layer_loop=layer_loop, job_class=Sliced))
                assert isinstance(job, Sliced)
                job.compare_with(hand)
                job.run()
                job.checkpointer.settle()
            mine, other = zip(*job.seconds[1:], strict=True)
            ratios = [a / b for a, b in job.seconds[1:]]
            print(
                f"{size} {layer_loop}: runner {statistics.median(mine) / parsed.steps:.4f} s, "
                f"by hand {statistics.median(other) / parsed.steps:.4f} s, ratio median "
                f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
