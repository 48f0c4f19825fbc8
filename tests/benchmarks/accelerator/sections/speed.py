"""Sections `speed of ...`: MFU, step time and memory of the runner, relative to compiled PyTorch.

Both train the same shapes on the same device, in two workers that run slices of steps alternately. Figures call the
runner `ours` and PyTorch `torch`, and a slice a turn.
"""

import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import numpy as np

from runner.accelerator import find_chip
from tests.benchmarks.accelerator.config import Model, SectionConfig
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.worker import Worker, WorkerError

OURS, PEER = "ours", "torch"
_NUM_TOKENS = 10_000_000  # so that the validation split of 0.0005 holds a sequence of either model
# Environment of workers that share a machine: they allocate device memory on demand, and a worker that waits for its
# next slice, or a thread that waits for another, does not spin on a CPU.
SHARED = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_WAIT_POLICY": "passive"}


def measure(config: SectionConfig, name: str) -> Iterator[Figure]:
    """Measure both programs; if PyTorch is missing or fails, record that and measure the runner alone."""
    model, scratch = config.sizes.models[name], Path(config.scratch)
    commands = {OURS: make_trainer_command(model, scratch), PEER: _make_torch_command(config, model)}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for program, command in commands.items():
            try:
                worker = Worker(command, os.environ | SHARED, scratch / f"{program}.log")
            except (WorkerError, OSError) as error:
                if program == OURS:
                    raise
                yield Figure(f"{PEER}: seconds of a step", None, "seconds", f"compiled torch is not available: {error}")
                continue
            workers[program] = stack.enter_context(worker)
            yield Figure(f"{program}: parameters", worker.ready.parameters, "", worker.ready.version)
            if program == OURS:
                yield from _measure_alone(config, model, worker)
        yield from _measure_alternately(config, model, workers)


def _measure_alone(config: SectionConfig, model: Model, ours: Worker) -> Iterator[Figure]:
    """Measure the runner before PyTorch starts, whose compilation may exceed the time limit of the section."""
    for _ in range(2):  # the first slice warms up
        ours.run_slice(model.steps)
    seconds = ours.step_seconds[-1]
    yield Figure("ours alone: seconds of a step", seconds, "seconds", f"one turn of {model.steps} steps")
    yield _make_mfu_figure("ours alone", config.device, model, ours.ready.flops_per_token, seconds)


def _measure_alternately(config: SectionConfig, model: Model, workers: dict[str, Worker]) -> Iterator[Figure]:
    """Run slices of all workers alternately, then yield their figures. A failed PyTorch is removed from `workers`."""
    for _ in range(model.rounds + 1):  # the first round compiles and warms up
        for program, worker in list(workers.items()):
            try:
                worker.run_slice(model.steps)
            except WorkerError as error:
                if program == OURS:
                    raise
                yield Figure(f"{PEER}: seconds of a step", None, "seconds", str(error))
                del workers[program]
    measured = {program: worker.step_seconds[-model.rounds :] for program, worker in workers.items()}
    flops = workers[OURS].ready.flops_per_token
    for program, seconds in measured.items():
        note = f"median of {model.rounds} turns of {model.steps} steps, {min(seconds):.4g} to {max(seconds):.4g}"
        yield Figure(f"{program}: seconds of a step", statistics.median(seconds), "seconds", note)
        yield _make_mfu_figure(program, config.device, model, flops, statistics.median(seconds))
    if PEER in measured:
        ratios = [peer / ours for ours, peer in zip(measured[OURS], measured[PEER], strict=True)]
        note = f"{PEER} / {OURS}, median over pairs of turns, {min(ratios):.3f} to {max(ratios):.3f}"
        yield Figure("speed beside the peer", statistics.median(ratios), "times", note)
    for program, worker in workers.items():
        peak_bytes = worker.finish().peak_bytes
        note = "" if peak_bytes is not None else "not counted on this device"
        yield Figure(f"{program}: peak memory", peak_bytes, "bytes", note)
        if worker.ready.planned_bytes is not None:
            yield Figure(f"{program}: memory of the step by its compiler", worker.ready.planned_bytes, "bytes")


def make_trainer_command(model: Model, scratch: Path, name: str = OURS, *options: str) -> list[str]:
    """Return the command of a worker that trains `model` with the runner's own loop, in the directory `scratch/name`.

    Its total number of steps exceeds that of all slices.
    """
    arguments = model.make_arguments(scratch / name, write_tokens(model, scratch), 10**6, *options)
    return [sys.executable, "-m", "tests.benchmarks.accelerator.trainer", *arguments]


def write_tokens(model: Model, scratch: Path) -> Path:
    """Write a file of random tokens of the model's vocabulary, unless it exists; return its path."""
    path = scratch / f"{model.name}.bin"
    if not path.exists():
        tokens = np.random.default_rng(0).integers(model.shape.vocabulary_size, size=_NUM_TOKENS)
        path.write_bytes(tokens.astype("<u2").tobytes())
    return path


def _make_torch_command(config: SectionConfig, model: Model) -> Sequence[str]:
    return [
        config.torch_python,
        "-m",
        "tests.benchmarks.accelerator.torch_gpt",
        json.dumps(asdict(model.shape)),
    ]


def _make_mfu_figure(program: str, device: str, model: Model, flops: float | None, seconds: float) -> Figure:
    """Return the MFU for `flops` per token and `seconds` per step."""
    chip = find_chip(device)
    if chip is None or chip.speeds is None or flops is None:
        return Figure(f"{program}: MFU", None, "share", f"the peak of {device} is not known")
    achieved = flops * model.shape.tokens_per_step / seconds
    note = f"{flops:,.0f} FLOPs a token, {model.shape.tokens_per_step:,} tokens a step"
    return Figure(f"{program}: MFU", achieved / chip.speeds.flops_per_second, "share", note)
