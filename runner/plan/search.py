"""What to ask for: meshes x micro-batches x what the job declares, ranked by predicted step time.

1. Every mesh over the devices whose batch, rows and experts divide (some hundreds: `mesh` says what bounds them), every
   micro-batch, every choice of `BaseTrainer.search_space`.
2. Arithmetic leaves out what cannot fit (state by its shapes and shardings, activations by the job's own formula) and
   predicts the least step time of the rest: matmuls, memory traffic, and the collectives that such a mesh needs. The
   state is drawn once, and laid over each mesh: some thousand predictions take seconds.
3. The best few are compiled, those that do not fit are dropped, and the rest is ranked by what was compiled: by the
   compiler's estimates of its ops where it writes them (`profile`), else by the bound.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import yaml

from runner.accelerator import Accelerator
from runner.errors import InvalidError
from runner.plan import checks, report
from runner.plan.checks import Findings, load_data
from runner.plan.machine import TargetMachine
from runner.plan.mesh import MeshSizes, iter_meshes
from runner.plan.prediction import SINGLE_DEVICE, Prediction, Predictor, build_abstract
from runner.plan.profile import forecast_step_seconds
from runner.plan.program import TYPICAL_SHARE, CompiledProgram, Roofline, compile_program
from runner.spec import Document, load_document
from runner.train.compile import MEMORY_SHARE
from runner.train.flops import Flops
from runner.trainer import BaseTrainer

_NUM_COMPILED, _NUM_TRIED = 3, 16

Choices = tuple[tuple[str, Any], ...]  # values of the job's own knobs by dotted key


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, and what arithmetic says of it."""

    mesh: MeshSizes
    choices: Choices
    prediction: Prediction

    @property
    def rank(self) -> tuple[float, float]:
        """Least step time first; of equals the one with less of everything else."""
        return self.prediction.times.rank

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted key."""
        return {
            "topology.mesh": dict(self.mesh),
            "config.train.micro_batch_examples": self.prediction.micro_batch_examples,
            **dict(self.choices),
        }

    @property
    def overrides(self) -> list[str]:
        """As `--set` takes them."""
        return [_override(key, value) for key, value in self.settings.items()]


def _override(key: str, value: Any) -> str:
    return f"{key}={yaml.safe_dump(value, default_flow_style=True, sort_keys=False).splitlines()[0]}"


@dataclass(frozen=True)
class CompiledCandidate:
    """A candidate that fits, with the figures of its compiled program."""

    candidate: Candidate
    program: CompiledProgram
    times: Roofline
    forecast_seconds: float | None = None  # by the compiler's estimates, where it has written any

    @property
    def rank_seconds(self) -> float:
        """What it is ranked by: the forecast, else the bound."""
        return self.times.step_seconds if self.forecast_seconds is None else self.forecast_seconds


@dataclass(frozen=True)
class JobVariant:
    """What does not depend on mesh or micro-batch: the job under one choice of its own knobs."""

    job: BaseTrainer
    choices: Choices
    flops: Flops


class Search:
    """The search of one spec. `overrides` are the user's own."""

    def __init__(self, spec: str, overrides: tuple[str, ...]):
        self._spec, self._overrides = spec, overrides

    def document(self, more: list[str]) -> Document:
        """The spec under some overrides more."""
        return load_document(self._spec, [*self._overrides, *more])

    def open_job(self, more: list[str]) -> BaseTrainer:
        """The job, with the vocabulary that its data or its spec gives. Raises `InvalidError` with all problems."""
        findings = Findings()
        job = checks.open_job(self.document(more), findings)
        if isinstance(job, BaseTrainer) and load_data(job.setup_builder, findings)[1]:
            return job
        raise InvalidError("\n".join(findings.problems) or "only a trainer has steps to search for")

    def models(self) -> list[JobVariant]:
        """The job under each choice of its knobs."""
        space = self.open_job([]).search_space()
        found = []
        for values in itertools.product(*space.values()):
            choices = tuple(zip(space, values, strict=True))
            job = self.open_job([_override(key, value) for key, value in choices])
            train_setup = build_abstract(job.setup_builder, SINGLE_DEVICE)
            try:
                found.append(JobVariant(job, choices, job.flops_per_token(train_setup)))
            except ValueError as error:
                raise InvalidError(f"{job.spec.job}: {error}") from error
        return found

    def candidates(self, models: list[JobVariant], accelerator: Accelerator, hbm_bytes: int) -> list[Candidate]:
        """All that may fit, best first."""
        limit_bytes = hbm_bytes * MEMORY_SHARE
        predictors = [Predictor(model.job, model.flops, accelerator) for model in models]
        first = predictors[0]
        length, num_experts = first.job.config.data.sequence_length, first.job.sizing(dict(SINGLE_DEVICE)).num_experts
        found: list[Candidate] = []
        for mesh in iter_meshes(accelerator.num_devices or 1, length, num_experts):
            if not first.micro_batches(dict(mesh)):
                continue
            state = first.size_of(first.state_on(mesh))
            for model, predictor in zip(models, predictors, strict=True):
                fitting = predictor.fitting(dict(mesh), state, limit_bytes)
                found += [Candidate(mesh, model.choices, prediction) for prediction in fitting]
        return sorted(found, key=lambda candidate: candidate.rank)

    def compile_best(
        self, candidates: list[Candidate], machine: TargetMachine
    ) -> tuple[list[CompiledCandidate], list[str]]:
        """The best few that fit when compiled, best first, and a line for each that did not.

        Formulas miss what a compiler adds. So each failure tells by how much they were wrong for its choices, and what
        would not fit by that either is not tried; and at last the one that needs least is.
        """
        limit_bytes = machine.hbm_bytes * MEMORY_SHARE
        found: list[CompiledCandidate] = []
        dropped: dict[Candidate, str] = {}
        excess: dict[Choices, float] = {}

        def attempt(candidate: Candidate) -> None:
            try:
                found.append(self._compile(candidate, machine))
            except InvalidError as error:
                dropped[candidate] = f"{' '.join(candidate.overrides)}: {str(error).partition(';')[0]}"
                needed_bytes = getattr(error.__cause__, "needed_bytes", 0)
                last = excess.get(candidate.choices, 1.0)
                excess[candidate.choices] = max(1.1 * last, needed_bytes / candidate.prediction.working_bytes)

        for candidate in candidates:
            if len(found) == _NUM_COMPILED or len(found) + len(dropped) == _NUM_TRIED:
                break
            predicted = candidate.prediction
            if predicted.state_bytes + excess.get(candidate.choices, 1.0) * predicted.working_bytes <= limit_bytes:
                attempt(candidate)
        smallest = min(candidates, key=lambda candidate: candidate.prediction.needed_bytes, default=None)
        if not found and smallest is not None and smallest not in dropped:
            attempt(smallest)
        return sorted(found, key=lambda compiled: compiled.rank_seconds), list(dropped.values())

    def _compile(self, candidate: Candidate, machine: TargetMachine) -> CompiledCandidate:
        job = self.open_job(candidate.overrides)
        train_setup = job.setup_builder.build(machine.devices)
        program = compile_program(job.setup_builder, train_setup, machine, with_val=False)
        _, times = report.make_roofline_section(
            job.setup_builder.config_in_steps, job.flops_per_token(train_setup), program, machine
        )
        return CompiledCandidate(
            candidate, program, times or candidate.prediction.times, forecast_step_seconds(program, machine)
        )


def find_smallest_slice(search: Search, accelerator: Accelerator, hours: float) -> tuple[Accelerator, list[Candidate]]:
    """The smallest slice on which something may fit and the run ends in time, at `TYPICAL_SHARE` of the best speed.

    Raises `InvalidError` if none does.
    """
    models = search.models()
    steps = models[0].job.total_steps
    best = ""
    for num_chips in accelerator.chip.slice_sizes:
        slice_ = Accelerator(accelerator.name, num_chips)
        speeds = slice_.chip.speeds
        assert speeds is not None, "peak figures are known of what is searched for"
        candidates = search.candidates(models, slice_, speeds.hbm_bytes // slice_.chip.devices_per_chip)
        if not candidates:
            continue
        needed_hours = candidates[0].prediction.times.step_seconds / TYPICAL_SHARE * steps / 3600
        best = f"; {accelerator.name}-{num_chips} needs {needed_hours:,.1f}"
        if needed_hours <= hours:
            return slice_, candidates
    reason = best or "; it fits on none"
    raise InvalidError(f"no slice of {accelerator.name} ends {models[0].job.spec.name} in {hours:g} hours{reason}")
