"""Section `determinism`: bits of separately compiled programs, and cost of the flags of `topology.deterministic`."""

import os
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from runner.accelerator import DETERMINISTIC_FLAGS, has_gpu
from tests.benchmarks.accelerator.config import Model, SectionConfig
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.sections.speed import SHARED, make_trainer_command
from tests.benchmarks.accelerator.worker import Worker

WITH, WITHOUT = "with the flags", "without"
_VALUES = {WITH: "true", WITHOUT: "false"}  # of topology.deterministic


def measure(config: SectionConfig, name: str) -> Iterator[Figure]:
    """Compare the step times with and without the flags, then each final state with that of a second program."""
    model, scratch = config.sizes.models[name], Path(config.scratch)
    fingerprints = {}
    num_steps = max(1, model.steps // 2)  # per slice
    with ExitStack() as stack:
        workers = {kind: stack.enter_context(_start_worker(model, scratch, kind, 1)) for kind in _VALUES}
        for _ in range(model.rounds + 1):
            for worker in workers.values():
                worker.run_slice(num_steps)
        measured = {kind: worker.step_seconds[1:] for kind, worker in workers.items()}
        for kind, seconds in measured.items():
            yield Figure(f"seconds of a step {kind}", statistics.median(seconds), "seconds")
        yield _make_cost_figure(measured)
        for kind, worker in workers.items():
            fingerprints[kind] = worker.finish().fingerprint
    num_steps *= model.rounds + 1
    for kind in _VALUES:
        with _start_worker(model, scratch, kind, 2) as worker:
            worker.run_slice(num_steps)
            second = worker.finish().fingerprint
        first = fingerprints[kind]
        note = f"of the state after {num_steps} steps, each compiled with an empty cache: {first}, {second}"
        yield Figure(f"two programs {kind} give the same bits", first == second, "", note)


def _make_cost_figure(measured: dict[str, list[float]]) -> Figure:
    """Return the extra step time with the flags, relative to the step time without."""
    flags = DETERMINISTIC_FLAGS["gpu" if has_gpu(os.environ) else "cpu"]
    if not flags:
        return Figure("cost of the flags", None, "share", "the runner sets none here: both programs are the same")
    ratios = [slow / fast for slow, fast in zip(measured[WITH], measured[WITHOUT], strict=True)]
    note = f"{' '.join(flags)}; median over pairs of turns, {min(ratios) - 1:+.1%} to {max(ratios) - 1:+.1%}"
    return Figure("cost of the flags", statistics.median(ratios) - 1, "share", note)


def _start_worker(model: Model, scratch: Path, kind: str, number: int) -> Worker:
    """Start a worker with a compilation cache of its own, so that it does not reuse the program of another one."""
    name = f"{_VALUES[kind]}_{number}"
    command = make_trainer_command(model, scratch, name, f"topology.deterministic={_VALUES[kind]}")
    environment = os.environ | SHARED | {"RUNNER_CACHE": str(scratch / f"cache_{name}")}
    return Worker(command, environment, scratch / f"{name}.log")
