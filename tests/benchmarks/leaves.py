"""Growth of start, save and restore time with the number of leaves of the state, in CPU seconds of this process.

A state of many tiny leaves is initialised and saved, and restored by a second job in the same process, which reuses the
compiled programs. The compilation of the job's own `init` is listed separately, since it is not work of the runner.

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


class ManyLeavesJob(RestoreableJob):
    """Job whose state has `num_leaves` leaves of four numbers."""

    num_leaves = 0
    total_steps = 1

    def init(self) -> Any:
        """Return leaves with different values."""
        return {f"{number:06}": jnp.full((4,), number, jnp.float32) for number in range(self.num_leaves)}


def measure_cpu_seconds(call: Callable[[], Any]) -> float:
    """Return the CPU seconds of `call`, including all threads."""
    before = time.process_time()
    call()
    return time.process_time() - before


def measure(num_leaves: int) -> dict[str, float]:
    """Return the CPU seconds of each phase."""
    with tempfile.TemporaryDirectory() as directory:
        spec = ExecutionSpec(name="many", job="tests.benchmarks.leaves:ManyLeavesJob", directory=directory)
        first, second = ManyLeavesJob(spec), ManyLeavesJob(spec)
        first.num_leaves = second.num_leaves = num_leaves
        own = measure_cpu_seconds(lambda: jax.block_until_ready(jax.jit(first.init)()))
        begun = measure_cpu_seconds(lambda: start(first))

        def save() -> None:
            first.step = 1
            first.save()
            first.checkpointer.wait_until_committed(1)

        saved = measure_cpu_seconds(save)
        return {"init": own, "start": begun - own, "save": saved, "restore": measure_cpu_seconds(lambda: start(second))}


def main() -> None:
    """Print one line per number of leaves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[500, 1000, 2000, 5000])
    for num_leaves in parser.parse_args().leaves:
        took = "  ".join(f"{name} {seconds:6.1f} s" for name, seconds in measure(num_leaves).items())
        print(f"{num_leaves:6} leaves: {took}", flush=True)


if __name__ == "__main__":
    main()
