"""How a start, a save and a restore grow with the number of leaves of a state, in seconds of this process's CPU time.

A state of so many tiny leaves is begun and saved, and restored by a second job in a process where all is compiled. What
the job's own `init` costs to compile is told apart: it is no work of the runner.

    python -m tests.benchmarks.leaves [--leaves 500 1000 2000 5000]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from runner import ExecutionSpec, RestoreableJob
from tests.support.attempt import start


class Many(RestoreableJob):
    """So many leaves of four numbers."""

    num_leaves = 0
    total_steps = 1

    def init(self) -> Any:
        """Different bits in every leaf."""
        return {f"{number:06}": jnp.full((4,), number, jnp.float32) for number in range(self.num_leaves)}


def cpu_seconds(call: Callable[[], Any]) -> float:
    """That `call` takes, with all of its threads."""
    before = time.process_time()
    call()
    return time.process_time() - before


def measure(num_leaves: int) -> dict[str, float]:
    """CPU seconds by phase."""
    with tempfile.TemporaryDirectory() as directory:
        spec = ExecutionSpec(name="many", job="tests.benchmarks.leaves:Many", directory=directory)
        first, second = Many(spec), Many(spec)
        first.num_leaves = second.num_leaves = num_leaves
        own = cpu_seconds(lambda: jax.block_until_ready(jax.jit(first.init)()))
        begun = cpu_seconds(lambda: start(first))

        def save() -> None:
            first.step = 1
            first.save()
            first.checkpointer.wait_until_committed(1)

        saved = cpu_seconds(save)
        return {"init": own, "start": begun - own, "save": saved, "restore": cpu_seconds(lambda: start(second))}


def main() -> None:
    """Print a line a number of leaves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[500, 1000, 2000, 5000])
    for num_leaves in parser.parse_args().leaves:
        took = "  ".join(f"{name} {seconds:6.1f} s" for name, seconds in measure(num_leaves).items())
        print(f"{num_leaves:6} leaves: {took}", flush=True)


if __name__ == "__main__":
    main()
