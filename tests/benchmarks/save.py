"""Cost of an asynchronous save of 124M parameters with Adam state (1.5 GB) to the training loop.

Three kinds of windows alternate: steps without a save, the same steps with a save started before the first, and a
synchronous save alone. The script prints the extra wall time of the loop relative to the synchronous save, the time
that the loop was blocked, the time until the save is durable, and the peak memory relative to that before the first
save.

    python -m tests.benchmarks.save [--rounds 9] [--steps 6]

With `--borders` it trains a model of the size of gpt_nano instead, whose stages begin between its saves, and prints the
time for which a border stops the loop, relative to a save, and that with the step after it: XLA prepares a program for
a CPU when it first runs. Programs are compiled before the border is reached.

    python -m tests.benchmarks.save --borders [--rounds 9]
"""

import argparse
import functools
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

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


def run_steps(job: PretrainGPT, num_steps: int, save: bool) -> tuple[float, float]:
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


def save_synchronously(job: PretrainGPT) -> float:
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
        plain, _ = run_steps(job, num_steps, save=False)
        saving, blocked = run_steps(job, num_steps, save=True)
        job.checkpointer.wait_until_finished()
        yield RoundCosts(plain, saving, blocked, save_synchronously(job))


class TimedSteps(PretrainGPT):
    """Job that records when each step begins and ends, and waits for the programs of the next stage."""

    begins: ClassVar[dict[int, float]] = {}
    ends: ClassVar[dict[int, float]] = {}

    def prepare(self) -> None:
        """Compile, and measure each step from here on."""
        super().prepare()
        self.session.make_step = functools.partial(self.measure_step, self.session.make_step)  # type: ignore[method-assign]

    def measure_step(self, make_step: Callable[..., Any], *args: Any) -> Any:
        """Make a step and wait for the device."""
        # Compile without training beside it, as the step after the first of a stage is not measured.
        for thread in threading.enumerate():
            if thread.name.startswith("compile"):
                thread.join()
        self.begins[self.step + 1] = time.perf_counter()
        result = jax.block_until_ready(make_step(*args))
        self.ends[self.step + 1] = time.perf_counter()
        return result


def measure_borders(rounds: int) -> None:
    """Print the cost of a border between two stages relative to a save, with and without the step after it."""
    interval = 40
    total = interval * (rounds + 1)
    borders = [interval * number + interval // 2 for number in range(1, rounds + 1)]
    kinds: dict[str, Callable[[int], Any]] = {
        "weight decay": lambda number: {"optimizer.weight_decay": 0.1 + 0.01 * number},
        "batch": lambda number: {"train.global_batch_examples": 16 if number % 2 else 32},
        "schedule": lambda number: {"schedule": {"name": "linear" if number % 2 else "constant"}},
    }
    for kind, make_values in kinds.items():
        TimedSteps.begins.clear()
        TimedSteps.ends.clear()
        with tempfile.TemporaryDirectory() as directory:
            stages = [{"from_step": step, "set": make_values(number)} for number, step in enumerate(borders, 1)]
            make_job(
                "nano", Path(directory), total, job_class=TimedSteps, every_steps=interval, config={"stages": stages}
            )()
        begins, ends, saves = TimedSteps.begins, TimedSteps.ends, range(interval, total, interval)
        # A save or a border after a step delays the start of the next one.
        stop_ms = {step: 1e3 * (begins[step + 1] - ends[step]) for step in ends if step + 1 in ends}
        step_ms = {step: 1e3 * (ends[step] - begins[step]) for step in ends}
        plain = statistics.median(step_ms[step] for step in ends if (step - 1) % (interval // 2) > 5)
        border, save = (statistics.median(stop_ms[step] for step in places) for places in (borders, saves))
        first, after_save = (statistics.median(step_ms[step + 1] for step in places) for places in (borders, saves))
        with_step = (border + first) / (save + after_save)
        print(
            f"{kind}: border / save {border / save:.2f}, with the step after it {with_step:.2f}  (the loop stopped for "
            f"{border:.1f} and {save:.1f} ms; next steps {first:.1f} and {after_save:.1f} ms, others {plain:.1f} ms)",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--borders", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6)
    parsed = parser.parse_args()
    if parsed.borders:
        measure_borders(parsed.rounds)
        return
    with tempfile.TemporaryDirectory() as directory:
        job = start(make_job("124m", Path(directory), 10_000, batch=(2, 128)))
        state_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(job.state))
        run_steps(job, 1, save=False)
        read_peak_bytes()
        for _ in range(2):
            run_steps(job, parsed.steps, save=False)
        unsaved_peak_bytes = read_peak_bytes()
        run_steps(job, 2, save=True)
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
