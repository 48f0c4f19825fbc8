"""Search for the best mesh, micro-batch and job settings, ranked by predicted step time.

1. Enumerate every mesh over the devices that batch, sequences and experts can be split over (some hundreds; `mesh`
   describes the bounds), every micro-batch, and every choice of `BaseTrainer.search_space`.
2. Drop by arithmetic what cannot fit (state by its shapes and shardings, activations by the job's own formula), and
   predict the least step time of the rest from matmuls, memory traffic and the collectives of the mesh. The state is
   traced once and resharded for each mesh, so some thousand predictions take seconds.
3. Compile the spec as it is and the best few, drop those that do not fit, and rank the rest by the compiled program: by
   the compiler's estimates of its ops where it writes them (`profile`), else by the roofline.
4. Also compile the best of them with the settings of `BaseTrainer.final_choices`, which take long to compile.
"""

import functools
import itertools
import sys
import time
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from runner.accelerator import Accelerator
from runner.console import warn
from runner.errors import InvalidError
from runner.parallel.mesh import resolve_mesh_sizes
from runner.plan import checks, report
from runner.plan.checks import Findings, check_text, load_data
from runner.plan.figures import format_amount
from runner.plan.mesh import MeshSizes, iter_meshes, order_sizes
from runner.plan.prediction import SINGLE_DEVICE, Prediction, Predictor, build_abstract
from runner.plan.profile import forecast_step_seconds
from runner.plan.program import TYPICAL_SHARE, CompiledProgram, Roofline, TargetMachine, compile_program
from runner.spec import Document, load_document, parse_document
from runner.spec.document import dump_yaml
from runner.train.compile import MEMORY_SHARE
from runner.train.flops import Flops
from runner.trainer import BaseTrainer

_NUM_COMPILED, _NUM_TRIED = 3, 16

Choices = tuple[tuple[str, Any], ...]  # values of the job's own settings by dotted key


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, with its prediction; `is_spec` marks the spec as it is."""

    mesh: MeshSizes
    choices: Choices
    prediction: Prediction
    is_spec: bool = False

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, see `Prediction.rank`."""
        return self.prediction.rank

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
    """Candidate that fits when compiled.

    Attributes:
        candidate: the candidate.
        program: its compiled step.
        times: roofline of the compiled step.
        needed_bytes: memory that a device needs, as compiled; by arithmetic if the chip's compiler is not available.
        forecast_seconds: step time by the compiler's estimates, None where it has written none.
    """

    candidate: Candidate
    program: CompiledProgram
    times: Roofline
    needed_bytes: float
    forecast_seconds: float | None = None

    @property
    def rank_seconds(self) -> float:
        """Step time that it is ranked by: the forecast, else the roofline."""
        return self.times.step_seconds if self.forecast_seconds is None else self.forecast_seconds

    def describe(self) -> str:
        """Return step time, memory and settings for a line of the report."""
        step, bound = format_amount(self.times.step_seconds, "seconds"), self.times.bound
        needed, seconds = format_amount(self.needed_bytes, "bytes"), self.forecast_seconds
        forecast = "" if seconds is None else f"forecast {format_amount(seconds, 'seconds')}, "
        settings = self.candidate.describe()
        return f"{forecast}lowest step time {step} (bound by {bound}), {needed} per device: {settings}"


@dataclass(frozen=True)
class JobVariant:
    """Job under one choice of its own settings, independent of mesh and micro-batch."""

    job: BaseTrainer
    choices: Choices
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
        """Return the job under additional overrides, with the vocabulary that its data or its spec gives.

        Raises:
            InvalidError: lists all problems.
        """
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
        micro_batches, wanted = predictor.list_micro_batches(dict(mesh)), job.config.train.micro_batch_examples
        if not micro_batches:
            return None
        state = predictor.measure_state(predictor.shard_state(mesh))
        predictions = [predictor.predict(dict(mesh), size, state) for size in micro_batches if wanted in ("auto", size)]
        limit_bytes = hbm_bytes * MEMORY_SHARE
        fitting = [prediction for prediction in predictions if prediction.needed_bytes <= limit_bytes]
        if not predictions:
            return None
        keys = job.search_space() | job.final_choices()
        choices = tuple((key, functools.reduce(getattr, key.split(".")[1:], job.config)) for key in keys)
        return Candidate(mesh, choices, (fitting or predictions[-1:])[0], is_spec=True)

    def compile_best(
        self, candidates: list[Candidate], machine: TargetMachine, start: Candidate | None = None, minutes: float = inf
    ) -> tuple[list[CompiledCandidate], list[str]]:
        """Compile the best few candidates, and print each result as it comes.

        Args:
            candidates: candidates that may fit, best first.
            machine: machine to compile for.
            start: the spec as it is, which is compiled first, so that the result is never slower.
            minutes: after this time no further candidate is compiled, once one fits.

        Returns:
            Candidates that fit, best first, and a line for each that does not.
        """
        end_seconds = time.monotonic() + 60 * minutes
        limit_bytes = machine.hbm_bytes * MEMORY_SHARE
        compiled: list[CompiledCandidate] = []
        dropped: dict[Candidate, str] = {}
        # Formulas underestimate memory. A candidate that does not fit gives a correction factor for its choices, and
        # candidates that do not fit after this correction are not tried.
        excess: dict[Choices, float] = {}

        def compile_candidate(candidate: Candidate) -> None:
            try:
                job = self.open_job(candidate.overrides)
                train_setup = job.setup_builder.build(machine.devices)
                program = compile_program(job.setup_builder, train_setup, machine, with_val=False)
                config, flops = job.setup_builder.config_in_steps, job.flops_per_token(train_setup)
                _, times = report.make_roofline_section(config, flops, program, machine)
                seconds = forecast_step_seconds(program, machine)
                needed_bytes = candidate.prediction.needed_bytes if machine.is_faked else program.step.memory.needed
                times = times or candidate.prediction.times
                compiled.append(CompiledCandidate(candidate, program, times, needed_bytes, seconds))
                warn(f"compiled: {compiled[-1].describe()}")
            except InvalidError as error:
                dropped[candidate] = f"{candidate.describe()}: {str(error).partition(';')[0]}"
                warn(f"does not fit: {dropped[candidate]}")
                needed_bytes = getattr(error.__cause__, "needed_bytes", 0)
                last = excess.get(candidate.choices, 1.0)
                excess[candidate.choices] = max(1.1 * last, needed_bytes / candidate.prediction.working_bytes)

        if start is not None:
            compile_candidate(start)
            candidates = [each for each in candidates if each.settings != start.settings]
        most = _NUM_COMPILED + len(compiled)
        for candidate in candidates:
            is_late = time.monotonic() >= end_seconds and bool(compiled)
            if len(compiled) == most or len(compiled) + len(dropped) == _NUM_TRIED or is_late:
                break
            predicted = candidate.prediction
            if predicted.state_bytes + excess.get(candidate.choices, 1.0) * predicted.working_bytes <= limit_bytes:
                compile_candidate(candidate)
        # If none of them fits, try the candidate that needs least memory.
        smallest = min(candidates, key=lambda candidate: candidate.prediction.needed_bytes, default=None)
        if not compiled and smallest is not None and smallest not in dropped:
            compile_candidate(smallest)
        others = [each for each in compiled if not each.candidate.is_spec]
        if others:
            best = min(others, key=lambda each: each.rank_seconds).candidate
            tried = [each.candidate.settings for each in compiled]
            final = self.open_job([]).final_choices()
            for values in itertools.product(*final.values()):
                choices = dict(best.choices) | dict(zip(final, values, strict=True))
                candidate = replace(best, choices=tuple(choices.items()))
                if candidate.settings not in tried and time.monotonic() < end_seconds:
                    compile_candidate(candidate)
        return sorted(compiled, key=lambda candidate: candidate.rank_seconds), list(dropped.values())


def find_smallest_slice(
    search: Search, variants: list[JobVariant], accelerator: Accelerator, hours: float
) -> tuple[Accelerator, list[Candidate]]:
    """Return the smallest slice on which something may fit and the run ends in time, with its candidates.

    `variants` are those of the search. The run is assumed to reach `TYPICAL_SHARE` of the best speed.

    Raises:
        InvalidError: no slice does.
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
