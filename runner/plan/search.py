"""Search for the best mesh, micro-batch and job settings, ranked by predicted step time.

1. Enumerate every mesh over the devices that batch, sequences and experts can be split over (some hundreds; `mesh`
   describes the bounds), every micro-batch, and every choice of `BaseTrainer.search_space`.
2. Drop by arithmetic what cannot fit (state by its shapes and shardings, activations by the job's own formula), and
   predict the least step time of the rest from matmuls, memory traffic and the collectives of the mesh. The state is
   traced once and resharded for each mesh, so some thousand predictions take seconds.
3. Schedule the spec as it is and the best few of different meshes or micro-batches, which takes a tenth of a
   compilation (`program.schedule_program`), drop those that do not fit, and rank the rest by the time of their ops at
   the roofline (`profile`).
4. Schedule the best of them with other choices too, among them those of `BaseTrainer.final_choices`.
5. Compile the best and the spec to the end, and rank them by the compiler's estimates of their ops.

Each compilation is a process, which can be killed: XLA has no way to stop one.
"""

import contextlib
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from runner.accelerator import Accelerator
from runner.console import warn
from runner.errors import EXIT_DONE, EXIT_FAILED, InvalidError
from runner.parallel.mesh import resolve_mesh_sizes
from runner.plan import checks, report
from runner.plan.checks import Findings, check_text, load_data
from runner.plan.figures import format_amount
from runner.plan.mesh import MeshSizes, iter_meshes, order_sizes
from runner.plan.prediction import SINGLE_DEVICE, Prediction, Predictor, build_abstract
from runner.plan.profile import forecast_program
from runner.plan.program import (
    TYPICAL_SHARE,
    Roofline,
    TargetMachine,
    compile_program,
    open_machine,
    request_dumps,
    schedule_program,
)
from runner.process import count_cpus, read_memory_bytes
from runner.spec import Document, load_document, parse_document
from runner.spec.document import dump_yaml
from runner.train.compile import MEMORY_SHARE
from runner.train.flops import Flops
from runner.trainer import BaseTrainer

_NUM_COMPILED, _NUM_TRIED = 5, 16
_NUM_FINALISTS = 2  # candidates that are compiled to the end, besides the spec as it is
# Compilations at the same time, and what one needs: 4.7 GB were measured for Llama 3 8B with unrolled layers.
_MAX_PROCESSES, _PROCESS_BYTES = 4, 6 * 2**30
_POLL_SECONDS = 0.2

_Choices = tuple[tuple[str, Any], ...]  # values of the job's own settings by dotted key


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, with its prediction; `is_spec` marks the spec as it is."""

    mesh: MeshSizes
    choices: _Choices
    prediction: Prediction
    is_spec: bool = False

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, see `Prediction.rank`."""
        return self.prediction.rank

    @property
    def layout(self) -> tuple[MeshSizes, int]:
        """Mesh and micro-batch. Candidates that differ in other choices alone often have the same predicted time."""
        return self.mesh, self.prediction.micro_batch_examples

    @property
    def settings(self) -> dict[str, Any]:
        """Values by dotted key of the spec."""
        return {
            "topology.mesh": dict(self.mesh),
            "config.train.micro_batch_examples": self.prediction.micro_batch_examples,
            **dict(self.choices),
        }

    @property
    def overrides(self) -> list[str]:
        """Settings as `--set` takes them; none for the spec as it is."""
        return [] if self.is_spec else [_format_override(key, value) for key, value in self.settings.items()]

    def describe(self) -> str:
        """Return the settings for a line of the report."""
        return "the spec as it is" if self.is_spec else " ".join(self.overrides)


def _format_override(key: str, value: Any) -> str:
    return f"{key}={dump_yaml(value, default_flow_style=True, width=sys.maxsize).splitlines()[0]}"


@dataclass(frozen=True)
class CompiledCandidate:
    """Candidate that fits when compiled."""

    candidate: Candidate
    times: Roofline  # roofline of the compiled step
    # Memory that a device needs, as compiled; by arithmetic if the chip's compiler is not available.
    needed_bytes: float
    # Step time if each op of the compiled program takes as long as its roofline; None if the chip's compiler is not
    # available.
    op_by_op_seconds: float | None = None
    # Step time by the compiler's estimates; None where it has written none, and for a program that was only scheduled.
    forecast_seconds: float | None = None

    @property
    def least_seconds(self) -> float:
        """Lower bound of the step time."""
        return self.times.step_seconds if self.op_by_op_seconds is None else self.op_by_op_seconds

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key. Only the best by their lower bounds are compiled to the end, which gives their forecast."""
        seconds = self.forecast_seconds
        return seconds is None, self.least_seconds if seconds is None else seconds

    def get_share_saved(self, other: "CompiledCandidate") -> float:
        """Return the share of the other's step time that this one saves, by the best figure that both have."""
        if self.forecast_seconds is None or other.forecast_seconds is None:
            return 1 - self.least_seconds / other.least_seconds
        return 1 - self.forecast_seconds / other.forecast_seconds

    def describe(self) -> str:
        """Return step time, memory and settings for a line of the report."""
        times = {
            "forecast": self.forecast_seconds,
            "op by op at least": self.op_by_op_seconds,
            "lowest step time": self.times.step_seconds,
        }
        parts = [f"{name} {format_amount(value, 'seconds')}" for name, value in times.items() if value is not None]
        needed = format_amount(self.needed_bytes, "bytes")
        return f"{', '.join(parts)} (bound by {self.times.bound}), {needed} per device: {self.candidate.describe()}"


@dataclass(frozen=True)
class JobVariant:
    """Job under one choice of its own settings, independent of mesh and micro-batch."""

    job: BaseTrainer
    choices: _Choices
    flops: Flops


class Search:
    """Search for one spec under the user's overrides."""

    def __init__(self, spec: str, overrides: tuple[str, ...], text: str | None = None):
        """Search for the spec in a file, or for the `text` of one that is not written yet."""
        self._spec, self._overrides, self._text = spec, overrides, text

    def load_document(self, more: list[str]) -> Document:
        """Return the spec under additional overrides."""
        if self._text is not None:
            return parse_document(self._text, self._spec, [*self._overrides, *more])
        return load_document(self._spec, [*self._overrides, *more])

    def open_job(self, more: list[str]) -> BaseTrainer:
        """Return the job under additional overrides, with its vocabulary. Raises InvalidError with all problems."""
        findings = Findings()
        job = checks.open_job(self.load_document(more), findings)
        if isinstance(job, BaseTrainer):
            is_untokenised = bool(check_text(job, findings))
            # Data that cannot be read are not needed if the step depends only on the spec.
            if not findings.problems and (is_untokenised or load_data(job.setup_builder, findings)[1]):
                return job
        raise InvalidError(
            "\n".join(findings.problems)
            or f"{self._spec}: only a trainer has steps to search for; plan it without --search"
        )

    def list_variants(self) -> list[JobVariant]:
        """Return the job under each choice of its settings."""
        job = self.open_job([])
        space = job.search_space() | {key: values[:1] for key, values in job.final_choices().items()}
        variants = []
        # A choice may change the FLOPs, for example by recomputation, so the job is opened again for each.
        for values in itertools.product(*space.values()):
            choices = tuple(zip(space, values, strict=True))
            job = self.open_job([_format_override(key, value) for key, value in choices])
            train_setup = build_abstract(job.setup_builder, SINGLE_DEVICE)
            try:
                variants.append(JobVariant(job, choices, job.flops_per_token(train_setup)))
            except ValueError as error:
                raise InvalidError(f"{job.spec.job}: {error}") from error
        return variants

    def list_candidates(self, variants: list[JobVariant], accelerator: Accelerator, hbm_bytes: int) -> list[Candidate]:
        """Return all candidates that may fit, best first."""
        limit_bytes = hbm_bytes * MEMORY_SHARE
        predictors = [Predictor(variant.job, variant.flops, accelerator) for variant in variants]
        # The size of the state depends on the mesh alone, so one variant measures it for all.
        first = predictors[0]
        sizing = first.job.sizing(dict(SINGLE_DEVICE))
        length = sizing.get_shardable_length(first.job.config.data.units_per_example)
        candidates: list[Candidate] = []
        for mesh in iter_meshes(accelerator.num_devices or 1, length, sizing.num_experts):
            # A mesh that every variant rejects is skipped, which saves the work of sharding the state.
            if not any(predictor.list_micro_batches(dict(mesh)) for predictor in predictors):
                continue
            state = first.measure_state(first.shard_state(mesh))
            for variant, predictor in zip(variants, predictors, strict=True):
                fitting = predictor.iter_fitting(dict(mesh), state, limit_bytes)
                candidates += [Candidate(mesh, variant.choices, prediction) for prediction in fitting]
        return sorted(candidates, key=lambda candidate: candidate.rank)

    def make_start(self, accelerator: Accelerator, hbm_bytes: int) -> Candidate | None:
        """Return the spec as it is, with its prediction; None if its mesh does not fit the accelerator."""
        job = self.open_job([])
        try:
            mesh = order_sizes(resolve_mesh_sizes(job.topology.mesh, accelerator.num_devices or 1))
            flops = job.flops_per_token(build_abstract(job.setup_builder, SINGLE_DEVICE))
        except (InvalidError, ValueError):
            return None
        predictor = Predictor(job, flops, accelerator)
        if not predictor.list_micro_batches(dict(mesh)):
            return None
        predictions = predictor.predict_allowed(mesh, predictor.shard_state(mesh))
        limit_bytes = hbm_bytes * MEMORY_SHARE
        fitting = [prediction for prediction in predictions if prediction.needed_bytes <= limit_bytes]
        if not predictions:
            return None
        keys = job.search_space() | job.final_choices()
        choices = tuple((key, functools.reduce(getattr, key.split(".")[1:], job.config)) for key in keys)
        return Candidate(mesh, choices, (fitting or predictions[-1:])[0], is_spec=True)

    def compile_best(
        self,
        candidates: list[Candidate],
        machine: TargetMachine,
        start: Candidate | None = None,
        end_seconds: float = inf,
    ) -> tuple[list[CompiledCandidate], list[str]]:
        """Compile the best few candidates, print each result as it comes, and return those that fit, best first.

        The second value has a line for each that does not fit. `start` is the spec as it is, which is compiled first,
        so that the result is never slower. The search ends at `end_seconds` of `time.monotonic`, once one candidate
        fits.
        """
        limit_bytes = machine.usable_bytes
        compiled: dict[Candidate, CompiledCandidate] = {}
        dropped: dict[Candidate, str] = {}
        # Formulas underestimate memory. A candidate that does not fit gives a correction factor for its choices, and
        # candidates that do not fit after this correction are not tried.
        excess: dict[_Choices, float] = {}
        num_processes = max(1, min(count_cpus(), read_memory_bytes() // _PROCESS_BYTES, _MAX_PROCESSES))

        has_left = threading.Event()  # set after an interrupt too

        def is_over() -> bool:
            return has_left.is_set() or (bool(compiled) and time.monotonic() >= end_seconds)

        def compile_all(queue: Iterable[Candidate], most: float = inf, is_whole: bool = False) -> None:
            """Compile candidates until `most` have been compiled, several at the same time."""
            pending: dict[Future[CompiledCandidate | tuple[str, float] | None], Candidate] = {}
            queue = iter(queue)
            while True:
                while len(pending) < num_processes and len(compiled) + len(pending) < most and not is_over():
                    if (candidate := next(queue, None)) is None:
                        break
                    pending[executor.submit(run_compilation, self, candidate, machine, is_whole, is_over)] = candidate
                if not pending:
                    return
                for future in futures.wait(pending, return_when=futures.FIRST_COMPLETED).done:
                    candidate, result = pending.pop(future), future.result()
                    if isinstance(result, CompiledCandidate):
                        compiled[candidate] = result
                        warn(f"{'compiled' if is_whole else 'scheduled'}: {result.describe()}")
                    elif result is not None:
                        reason, needed_bytes = result
                        compiled.pop(candidate, None)
                        dropped[candidate] = f"{candidate.describe()}: {reason}"
                        warn(f"does not fit: {dropped[candidate]}")
                        last = excess.get(candidate.choices, 1.0)
                        excess[candidate.choices] = max(1.1 * last, needed_bytes / candidate.prediction.working_bytes)

        def may_fit(candidate: Candidate) -> bool:
            predicted = candidate.prediction
            factor = excess.get(candidate.choices, 1.0)
            return predicted.state_bytes + factor * predicted.working_bytes <= limit_bytes

        def iter_layouts() -> Iterator[Candidate]:
            """Yield the spec, and the first candidate of each layout that may fit."""
            tried = [] if start is None else [start]
            yield from tried
            while len(tried) < _NUM_TRIED:
                layouts = {each.layout for each in tried if each not in dropped}
                left = (
                    each for each in candidates if each.layout not in layouts and each not in tried and may_fit(each)
                )
                if (candidate := next(left, None)) is None:
                    return
                tried.append(candidate)
                yield candidate

        if start is not None:
            candidates = [each for each in candidates if each.settings != start.settings]
        with ThreadPoolExecutor(num_processes) as executor, contextlib.ExitStack() as stack:
            stack.callback(has_left.set)
            compile_all(iter_layouts(), _NUM_COMPILED + (start is not None))
            # If none of them fits, try the candidate that needs least memory.
            smallest = min(candidates, key=lambda candidate: candidate.prediction.needed_bytes, default=None)
            if not compiled and smallest is not None and smallest not in dropped:
                compile_all([smallest])
            if compiled:
                best = min(compiled.values(), key=lambda each: each.rank).candidate
                final = self.open_job([]).final_choices()
                finals = (dict(zip(final, values, strict=True)) for values in itertools.product(*final.values()))
                variants = [replace(best, choices=tuple((dict(best.choices) | values).items())) for values in finals]
                variants += [each for each in candidates if each.layout == best.layout and may_fit(each)]
                known = [candidate.settings for candidate in (*compiled, *dropped)]
                untried = [replace(each, is_spec=False) for each in variants if each.settings not in known]
                compile_all(untried, len(compiled) + _NUM_COMPILED)
            # The compiler's estimates may differ from the order by lower bounds.
            if not machine.is_faked:
                ranked = sorted(compiled.values(), key=lambda each: each.rank)
                finalists = [
                    each.candidate
                    for place, each in enumerate(ranked)
                    if place < _NUM_FINALISTS or each.candidate.is_spec
                ]
                compile_all(finalists, is_whole=True)
        return sorted(compiled.values(), key=lambda each: each.rank), list(dropped.values())


def run_compilation(
    search: Search, candidate: Candidate, machine: TargetMachine, is_whole: bool, is_over: Callable[[], bool]
) -> CompiledCandidate | tuple[str, float] | None:
    """Compile a candidate in another process, which is killed once the search is over.

    With `is_whole` it is compiled to the end, for the compiler's estimates, otherwise scheduled only. Returns the
    result; or why the candidate does not fit, and the bytes that it needs; or None if the search is over.
    """
    assert machine.accelerator is not None, "a search needs chips with known peak figures"
    # A forked process would share libtpu's threads and locks.
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        receiver, sender = context.Pipe(duplex=False)
        target = (machine.accelerator, machine.hbm_bytes)
        arguments = (sender, search, candidate, target, None if is_whole else Path(directory))
        process = context.Process(target=compile_and_send, args=arguments, daemon=True)
        process.start()
        sender.close()
        try:
            while not receiver.poll(_POLL_SECONDS):
                if is_over():
                    return None
            result: CompiledCandidate | tuple[str, float] = receiver.recv()
            return result
        except EOFError:
            process.join()
            return f"its compilation ended with exit code {process.exitcode}", 0.0
        finally:
            process.kill()
            process.join()


def compile_and_send(
    sender: Connection, search: Search, candidate: Candidate, target: tuple[Accelerator, int], directory: Path | None
) -> None:
    """Compile a candidate, send the result of `run_compilation`, and end this process.

    `target` is the accelerator, and the memory of one of its devices; `directory` as in `_compile_candidate`.
    """
    os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"  # the parent has opened it too
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, and its end this process
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        wait([parent.sentinel])
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(EXIT_FAILED)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if directory is not None:
        request_dumps(directory)
    try:
        machine = replace(open_machine(target[0]), hbm_bytes=target[1])
        sender.send(_compile_candidate(search, candidate, machine, directory))
    except InvalidError as error:
        sender.send((str(error).partition(";")[0], getattr(error.__cause__, "needed_bytes", 0)))
    # A thread may still compile.
    os._exit(EXIT_DONE)


def _compile_candidate(
    search: Search, candidate: Candidate, machine: TargetMachine, directory: Path | None
) -> CompiledCandidate:
    """Compile a candidate in this process, or schedule it with dumps in `directory`. Raises InvalidError."""
    job = search.open_job(candidate.overrides)
    train_setup = job.setup_builder.build(machine.devices)
    if directory is None:
        program = compile_program(job.setup_builder, train_setup, machine, with_val=False)
    else:
        program = schedule_program(job.setup_builder, train_setup, machine, directory)
    config, flops = job.setup_builder.config_in_steps, job.flops_per_token(train_setup)
    times = report.make_roofline_section(config, flops, program, machine)[1] or candidate.prediction.times
    forecast = None if machine.is_faked else forecast_program(program, machine)
    if forecast is None:
        return CompiledCandidate(candidate, times, candidate.prediction.needed_bytes)
    estimate = forecast.high if forecast.has_estimates else None
    return CompiledCandidate(candidate, times, program.step.memory.needed, forecast.low, estimate)


def find_smallest_slice(
    search: Search, variants: list[JobVariant], accelerator: Accelerator, hours: float
) -> tuple[Accelerator, list[Candidate]]:
    """Return the smallest slice on which something may fit and the run ends in time, with its candidates.

    The run is assumed to reach `TYPICAL_SHARE` of the best speed. Raises InvalidError if no slice ends it in time.
    """
    steps = variants[0].job.total_steps
    best = ""
    for num_chips in accelerator.chip.slice_sizes:
        # Sizes are in ascending order, so the first that ends in time is the smallest.
        slice_ = Accelerator(accelerator.name, num_chips)
        candidates = search.list_candidates(variants, slice_, slice_.chip.device_hbm_bytes)
        if not candidates:
            continue
        needed_hours = candidates[0].prediction.times.step_seconds / TYPICAL_SHARE * steps / 3600
        best = f"{slice_} needs {f'{needed_hours:,.1f}' if needed_hours >= 1 else f'{needed_hours:.2g}'} hours"
        if needed_hours <= hours:
            return slice_, candidates
    reason = best or "the job fits on none"
    name = variants[0].job.spec.name
    raise InvalidError(
        f"--hours {hours:g}: no slice of {accelerator.name} ends {name} in {hours:g} hours: {reason}; "
        "give more hours or a larger chip"
    )
