"""Step time of the runner relative to the best hand-written loop for the same model and batch.

The runner's own loop runs with data, logging and checkpoints at the default intervals. After every slice of steps it
waits for as many hand-written steps, so that both see the same machine load. The script prints the median ratio over
slices.

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
from tests.benchmarks.slices import SlicedTrainer
from tests.support.attempt import start


class SlicedGPT(SlicedTrainer, PretrainGPT):
    """GPT job whose loop runs in slices."""


def compare(job: SlicedGPT, hand: Any, num_steps: int) -> list[tuple[float, float]]:
    """Run the job to its end, alternating with the result of `make_hand_step`; return the seconds of both per slice."""
    step_by_hand, state, x_BxT, y_BxT = hand
    seconds: list[tuple[float, float]] = []

    def run_by_hand(runner_seconds: float) -> int:
        nonlocal state
        started = time.perf_counter()
        for _ in range(num_steps):
            state, loss = step_by_hand(state, x_BxT, y_BxT)
        jax.block_until_ready((state, loss))
        seconds.append((runner_seconds, time.perf_counter() - started))
        return num_steps

    job.start_slices(num_steps, run_by_hand)
    job.run()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", nargs="+", choices=[name.lower() for name in SIZES], default=["10m", "124m"])
    parser.add_argument("--layer-loops", nargs="+", choices=("scan", "unroll"), default=["scan", "unroll"])
    parser.add_argument("--slices", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parsed = parser.parse_args()
    for size in parsed.sizes:
        for layer_loop in parsed.layer_loops:
            hand = make_hand_step(SIZES[size.upper()], layer_loop)
            with tempfile.TemporaryDirectory() as directory:
                total_steps = (parsed.slices + 1) * parsed.steps  # the first slice compiles
                job = start(make_job(size, Path(directory), total_steps, layer_loop=layer_loop, job_class=SlicedGPT))
                assert isinstance(job, SlicedGPT)
                seconds = compare(job, hand, parsed.steps)
                job.checkpointer.wait_until_finished()
            mine, other = zip(*seconds[1:], strict=True)
            ratios = [a / b for a, b in seconds[1:]]
            print(
                f"{size} {layer_loop}: runner {statistics.median(mine) / parsed.steps:.4f} s, "
                f"by hand {statistics.median(other) / parsed.steps:.4f} s, ratio median "
                f"{statistics.median(ratios):.3f} (least {min(ratios):.3f}, most {max(ratios):.3f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
