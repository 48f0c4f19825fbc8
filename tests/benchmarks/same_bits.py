"""Step time with `train.same_bits_devices` relative to without, in alternating slices of one process.

Both jobs have the same micro-batches on the same simulated CPU devices, which share the cores of this machine, so the
ratio compares computation and not communication. The script prints the median of the ratios of adjacent slices. For a
TPU, compare the output of `python -m runner plan SPEC --profile` with and without the key.

    python -m tests.benchmarks.same_bits [--size 10m] [--devices 2] [--slices 8] [--steps 4]
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import jax

from runner.process import make_environment
from tests.benchmarks.jobs import BATCHES, SIZES, make_job
from tests.support.attempt import start


def main() -> None:
    """Print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="10m")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--slices", type=int, default=8)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    os.environ.update(make_environment(options.devices, os.environ))  # before jax initialises its devices
    examples, length = BATCHES[options.size]
    micro_batch = max(1, examples // (2 * options.devices))
    with tempfile.TemporaryDirectory() as directory:
        jobs = [
            start(
                make_job(
                    options.size,
                    Path(directory) / name,
                    1,
                    train={"micro_batch_examples": micro_batch, "same_bits_devices": devices},
                )
            )
            for name, devices in (("usual", None), ("same", options.devices))
        ]
        states, seconds = [job.state for job in jobs], list[list[float]]()
        for _ in range(options.slices + 1):  # the first slice warms up
            seconds.append([])
            for number, job in enumerate(jobs):
                batches = [job.compiled.layout.batch(job.dataset, "train", step) for step in range(options.steps)]
                began = time.perf_counter()
                for batch in batches:
                    states[number], loss, _ = job.compiled.executable(states[number], batch, job.train_setup.key)
                jax.block_until_ready(loss)
                seconds[-1].append((time.perf_counter() - began) / options.steps)
    ratios = [same / usual for usual, same in seconds[1:]]
    usual, same = (statistics.median(times) for times in zip(*seconds[1:], strict=True))
    print(
        f"{options.size}, {examples} x {length} tokens in micro-batches of {micro_batch} on {options.devices} devices: "
        f"{same:.4f} s a step, as usual {usual:.4f} s; ratio median {statistics.median(ratios):.3f} "
        f"(least {min(ratios):.3f}, most {max(ratios):.3f})"
    )


if __name__ == "__main__":
    main()
