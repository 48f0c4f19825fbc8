"""Cost of an asynchronous save of 124M parameters with Adam state (1.5 GB) to the training loop.

Three kinds of windows alternate: steps without a save, the same steps with a save started before the first, and a
synchronous save alone. The script prints the extra wall time of the loop relative to the synchronous save, the time
that the loop was blocked, the time until the save is durable, and the peak memory relative to that before the first
save.

    python -m tests.benchmarks.save [--rounds 9] [--steps 6]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.gpt import PretrainGPT
from runner.storage import read_log
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start


@dataclass(frozen=True)
class RoundCosts:
    """Seconds of one round: loop without a save, loop with a save, blocked time, and synchronous save alone."""

    plain: float
    saving: float
    blocked: float
    alone: float

    @property
    def extra(self) -> float:
        """Extra seconds of the loop with a save."""
        return self.saving - self.plain


def steps(job: PretrainGPT, num_steps: int, save: bool) -> tuple[float, float]:
    """Run `num_steps` steps, optionally with a save, and return the total and the blocked seconds."""
    started = time.perf_counter()
    blocked = 0.0
    if save:
        job.save()
        blocked = time.perf_counter() - started
    for _ in range(num_steps):
        job.state, loss, _ = job.compiled.executable(job.state, job.batch(), job.train_setup.key)
        job.step += 1
    jax.block_until_ready(loss)
    return time.perf_counter() - started, blocked


def synchronous(job: PretrainGPT) -> float:
    """Save, wait until the save is finished, and return the seconds."""
    job.step += 1
    started = time.perf_counter()
    job.save()
    job.checkpointer.wait_until_finished()
    return time.perf_counter() - started


def read_peak_bytes() -> int:
    """Return the peak resident memory since the last call (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def measure(job: PretrainGPT, rounds: int, num_steps: int) -> Iterator[RoundCosts]:
    """Yield the costs of each round; the windows of a round run one after the other."""
    for _ in range(rounds):
        plain, _ = steps(job, num_steps, save=False)
        saving, blocked = steps(job, num_steps, save=True)
        job.checkpointer.wait_until_finished()
        yield RoundCosts(plain, saving, blocked, synchronous(job))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = start(make_job("124m", Path(directory), 10_000, batch=(2, 128)))
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(job.state))
        steps(job, 1, save=False)
        read_peak_bytes()
        for _ in range(2):
            steps(job, parsed.steps, save=False)
        unsaved_peak_bytes = read_peak_bytes()
        steps(job, 2, save=True)
        job.checkpointer.wait_until_finished()
        rows = []
        for costs in measure(job, parsed.rounds, parsed.steps):
            rows.append(costs)
            print(
                f"loop {costs.plain:.2f} s, with save {costs.saving:.2f} s, blocked {costs.blocked:.3f} s, "
                f"synchronous {costs.alone:.2f} s",
                flush=True,
            )
        durable = [event["seconds_to_durable"] for event in read_log(job.store, "events") if event["event"] == "commit"]
    extra = statistics.median(row.extra for row in rows)
    alone = statistics.median(row.alone for row in rows)
    print(f"state {state_bytes / 1e9:.2f} GB")
    print(f"extra loop time / synchronous save: {extra / alone:.2f}  ({extra:.2f} s / {alone:.2f} s)")
    print(f"blocked: {statistics.median(row.blocked for row in rows):.3f} s")
    print(f"time to durable while training: {statistics.median(durable[1::2]):.2f} s")
    print(f"extra peak memory: {(read_peak_bytes() - unsaved_peak_bytes) / state_bytes:.2f} copies of the state")


if __name__ == "__main__":
    main()
