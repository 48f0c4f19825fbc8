"""What a save of 124M parameters with their Adam state (1.5 GB) costs the training loop.

Three windows, interleaved: steps without a save; the same steps with a save begun before the first; and a save done
synchronously, with nothing else. Printed: the extra wall time of the loop over the time of the synchronous save, the
time that the loop was blocked, the time to durable, and the peak of memory of all windows over that of windows before
the first save.

    python -m tests.benchmarks.save [--rounds 9] [--steps 6]
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import jax

from experiments.gpt import PretrainGPT
from runner.storage import read_log
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start


def steps(job: PretrainGPT, num_steps: int, save: bool) -> tuple[float, float]:
    """Seconds of `num_steps` steps, loop to loop, and of those the seconds that the save blocked."""
    started = time.perf_counter()
    blocked = 0.0
    if save:
        job.save()
        blocked = time.perf_counter() - started
    for _ in range(num_steps):
        job.state, loss, _ = job.compiled.executable(job.state, job.batch(), job.blueprint.key)
        job.step += 1
    jax.block_until_ready(loss)
    return time.perf_counter() - started, blocked


def synchronous(job: PretrainGPT) -> float:
    """Seconds of a save that is waited for."""
    job.step += 1
    started = time.perf_counter()
    job.save()
    job.checkpointer.settle()
    return time.perf_counter() - started


def peak_bytes() -> int:
    """Peak resident memory since the last call (Linux)."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parsed = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        job = start(make_job("124m", Path(directory), 10_000, batch=(2, 128)))
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(job.state))
        steps(job, 1, save=False)
        peak_bytes()
        for _ in range(2):
            steps(job, parsed.steps, save=False)
        unsaved_peak_bytes = peak_bytes()
        steps(job, 2, save=True)
        job.checkpointer.settle()
        rows = []
        for _ in range(parsed.rounds):
            plain, _ = steps(job, parsed.steps, save=False)
            saving, blocked = steps(job, parsed.steps, save=True)
            job.checkpointer.settle()
            alone = synchronous(job)
            rows.append((plain, saving, blocked, alone))
            print(
                f"loop {plain:.2f} s, with save {saving:.2f} s, blocked {blocked:.3f} s, synchronous {alone:.2f} s",
                flush=True,
            )
        durable = [event["seconds_to_durable"] for event in read_log(job.store, "events") if event["event"] == "commit"]
    extra = statistics.median(saving - plain for plain, saving, *_ in rows)
    alone = statistics.median(row[3] for row in rows)
    print(f"state {state_bytes / 1e9:.2f} GB")
    print(f"extra loop time / synchronous save: {extra / alone:.2f}  ({extra:.2f} s / {alone:.2f} s)")
    print(f"blocked: {statistics.median(row[2] for row in rows):.3f} s")
    print(f"time to durable while training: {statistics.median(durable[1::2]):.2f} s")
    print(f"extra peak memory: {(peak_bytes() - unsaved_peak_bytes) / state_bytes:.2f} copies of the state")


if __name__ == "__main__":
    main()
