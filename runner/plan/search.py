"""What to ask for: meshes x micro-batches x what the job declares, ranked by predicted step time.

1. Every mesh over the devices whose batch divides, every micro-batch, every choice of `BaseTrainer.search_space`.
2. Arithmetic leaves out what cannot fit (state by its shapes and shardings, activations by the job's own formula) and
   predicts the least step time of the rest: matmuls, memory traffic, and the collectives that such a mesh needs.
3. The best few are compiled, those that do not fit are dropped, and the rest is ranked by what was compiled.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import yaml
from jax.sharding import AbstractMesh

from runner.accelerator import Accelerator, Speeds
from runner.errors import InvalidError
from runner.plan import checks, estimate, report
from runner.plan.checks import Findings
from runner.plan.data_check import load_data
from runner.plan.estimate import TYPICAL_SHARE, Roofline, Work, split_over_domains
from runner.plan.machine import Machine
from runner.plan.program import Program, bytes_on_a_device, compile_design, num_elements
from runner.spec import Document, load_document
from runner.train.blueprint import Blueprint
from runner.train.compilation import MEMORY_SHARE
from runner.train.design import Design
from runner.train.flops import Flops
from runner.train.mesh import AXES, BATCH_AXES, micro_batch_sizes, over_slices
from runner.trainer import BaseTrainer

_NUM_COMPILED, _NUM_TRIED = 3, 16
_MAX_TENSOR = 16  # beyond a few chips next to each other, tensor parallelism only waits for its network


Sizes = tuple[tuple[str, int], ...]  # devices by axis, in the order of AXES
Choices = tuple[tuple[str, Any], ...]  # values of the job's own knobs by dotted key


@dataclass(frozen=True)
class Candidate:
    """One way to run the job, and what arithmetic says of it."""

    mesh: Sizes
    micro_batch_examples: int
    choices: Choices
    state_bytes: float  # of a device
    working_bytes: float  # gradients and activations, by formula
    times: Roofline

    @property
    def rank(self) -> tuple[float, float]:
        """Least step time first; of equals the one with less of everything else."""
        return self.times.step_seconds, sum(
            (self.times.compute, self.times.memory, self.times.interconnect, self.times.network)
        )

    @property
    def settings(self) -> dict[str, Any]:
        """By dotted key."""
        return {
            "topology.mesh": dict(self.mesh),
            "config.train.micro_batch_examples": self.micro_batch_examples,
            **dict(self.choices),
        }

    @property
    def overrides(self) -> list[str]:
        """As `--set` takes them."""
        return [_override(key, value) for key, value in self.settings.items()]


def _override(key: str, value: Any) -> str:
    return f"{key}={yaml.safe_dump(value, default_flow_style=True, sort_keys=False).splitlines()[0]}"


@dataclass(frozen=True)
class Compiled:
    """A candidate that fits, with the figures of its compiled program."""

    candidate: Candidate
    program: Program
    times: Roofline


@dataclass(frozen=True)
class Model:
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
        if isinstance(job, BaseTrainer) and load_data(job.design, findings)[1]:
            return job
        raise InvalidError("\n".join(findings.problems) or "only a trainer has steps to search for")

    def models(self) -> list[Model]:
        """The job under each choice of its knobs."""
        space = self.open_job([]).search_space()
        found = []
        for values in itertools.product(*space.values()):
            choices = tuple(zip(space, values, strict=True))
            job = self.open_job([_override(key, value) for key, value in choices])
            blueprint = _draw_abstractly(job.design, tuple((axis, 1) for axis in AXES))
            try:
                found.append(Model(job, choices, job.flops_per_token(blueprint)))
            except ValueError as error:
                raise InvalidError(f"{job.spec.job}: {error}") from error
        return found

    def candidates(self, models: list[Model], accelerator: Accelerator, hbm_bytes: int) -> list[Candidate]:
        """All that may fit, best first."""
        speeds = accelerator.chip.speeds
        assert speeds is not None, "peak figures are known of what is searched for"
        found: list[Candidate] = []
        for mesh in _meshes(accelerator.num_devices or 1):
            found += self._on_mesh(models, mesh, accelerator, speeds, hbm_bytes)
        return sorted(found, key=lambda candidate: candidate.rank)

    def _on_mesh(
        self, models: list[Model], mesh: Sizes, accelerator: Accelerator, speeds: Speeds, hbm_bytes: int
    ) -> Iterator[Candidate]:
        job, sizes = models[0].job, dict(mesh)
        global_batch, shards = job.config.train.global_batch_examples, math.prod(sizes[axis] for axis in BATCH_AXES)
        try:
            micro_batches = micro_batch_sizes(global_batch, "auto", shards)
            over_domains = dict(zip(AXES, over_slices(sizes, _num_domains(accelerator)), strict=True))
        except InvalidError:
            return
        state = _draw_abstractly(job.design, mesh).abstract_state
        state_bytes, num_parameters = bytes_on_a_device(state), num_elements(state.params)
        gradient_bytes = bytes_on_a_device(state.params)
        for model, micro_batch in itertools.product(models, micro_batches):
            tokens = micro_batch * job.config.data.sequence_length
            sizing = model.job.sizing(sizes["tensor"])
            accumulate_steps = global_batch // (micro_batch * shards)
            working_bytes = gradient_bytes * min(accumulate_steps, 2) + tokens * sizing.activation_bytes_per_token
            if state_bytes + working_bytes > hbm_bytes * MEMORY_SHARE:
                continue
            reduced_bytes = tokens * sizing.tensor_bytes_per_token
            work = _work(model, sizes, over_domains, state_bytes, num_parameters, reduced_bytes, accumulate_steps)
            times = estimate.roofline(work, speeds, accelerator.chip.devices_per_chip)
            yield Candidate(mesh, micro_batch, model.choices, state_bytes, working_bytes, times)

    def compile_best(self, candidates: list[Candidate], machine: Machine) -> tuple[list[Compiled], list[str]]:
        """The best few that fit when compiled, best first, and a line for each that did not.

        Formulas miss what a compiler adds. So each failure tells by how much they were wrong for its choices, and what
        would not fit by that either is not tried; and at last the one that needs least is.
        """
        limit_bytes = machine.hbm_bytes * MEMORY_SHARE
        found: list[Compiled] = []
        dropped: dict[Candidate, str] = {}
        excess: dict[Choices, float] = {}

        def attempt(candidate: Candidate) -> None:
            try:
                found.append(self._compile(candidate, machine))
            except InvalidError as error:
                dropped[candidate] = f"{' '.join(candidate.overrides)}: {str(error).partition(';')[0]}"
                needed_bytes = getattr(error.__cause__, "needed_bytes", 0)
                last = excess.get(candidate.choices, 1.0)
                excess[candidate.choices] = max(1.1 * last, needed_bytes / candidate.working_bytes)

        for candidate in candidates:
            if len(found) == _NUM_COMPILED or len(found) + len(dropped) == _NUM_TRIED:
                break
            if candidate.state_bytes + excess.get(candidate.choices, 1.0) * candidate.working_bytes <= limit_bytes:
                attempt(candidate)
        smallest = min(candidates, key=lambda candidate: candidate.state_bytes + candidate.working_bytes, default=None)
        if not found and smallest is not None and smallest not in dropped:
            attempt(smallest)
        return sorted(found, key=lambda compiled: compiled.times.step_seconds), list(dropped.values())

    def _compile(self, candidate: Candidate, machine: Machine) -> Compiled:
        job = self.open_job(candidate.overrides)
        blueprint = job.design.draw(machine.devices)
        program = compile_design(job.design, blueprint, machine, with_val=False)
        _, times = report.roofline_section(job.design.counted, job.flops_per_token(blueprint), program, machine)
        return Compiled(candidate, program, times or candidate.times)


def _draw_abstractly(design: Design, mesh: Sizes) -> Blueprint:
    """The job over a mesh of no devices, which gives its state shapes and shardings: no backend is started."""
    abstract: Any = AbstractMesh(tuple(size for _, size in mesh), tuple(axis for axis, _ in mesh))
    return design.draw_on(abstract, jax.eval_shape(lambda: jax.random.key(design.seed)))


def _meshes(num_devices: int) -> Iterator[Sizes]:
    for tensor in (size for size in range(1, _MAX_TENSOR + 1) if num_devices % size == 0):
        left = num_devices // tensor
        for fsdp in (size for size in range(1, left + 1) if left % size == 0):
            found = {"data": left // fsdp, "fsdp": fsdp, "tensor": tensor}
            yield tuple((axis, found[axis]) for axis in AXES)


def _num_domains(accelerator: Accelerator) -> int:
    """Slices, or GPU nodes."""
    return accelerator.num_slices if accelerator.chip.is_tpu else accelerator.hosts_per_slice * accelerator.num_slices


def _work(
    model: Model,
    sizes: dict[str, int],
    over_domains: dict[str, int],
    state_bytes: float,
    num_parameters: int,
    reduced_bytes: float,
    accumulate_steps: int,
) -> Work:
    """What one device does in a step: gradients are reduced in every micro-batch, as XLA does it."""
    job, flops = model.job, model.flops
    compute_bytes = 2 if job.config.precision.compute == "bfloat16" else 4
    parameter_bytes = num_parameters * compute_bytes / sizes["tensor"]
    passes = 3 if job.config.memory.remat == "layers" else 2
    executed = (flops.per_token + flops.recomputed_per_token) * job.config.tokens_per_step
    traffic = estimate.hbm_traffic(state_bytes, parameter_bytes, passes, accumulate_steps)
    collectives = (
        (("fsdp",), passes + 1, parameter_bytes),  # gathered in each pass, gradients scattered once
        (("data",), 2, parameter_bytes / sizes["fsdp"]),
        (("tensor",), 2, reduced_bytes),
    )
    interconnect = network = 0.0
    for axes, factor, payload in collectives:
        inside, across = split_over_domains(sizes, over_domains, axes, factor, payload)
        interconnect += accumulate_steps * inside
        network += accumulate_steps * across
    num_devices = math.prod(sizes.values())
    return Work(executed / num_devices, traffic, interconnect, network)


def smallest_slice(search: Search, accelerator: Accelerator, hours: float) -> tuple[Accelerator, list[Candidate]]:
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
        needed_hours = candidates[0].times.step_seconds / TYPICAL_SHARE * steps / 3600
        best = f"; {accelerator.name}-{num_chips} needs {needed_hours:,.1f}"
        if needed_hours <= hours:
            return slice_, candidates
    reason = best or "; it fits on none"
    raise InvalidError(f"no slice of {accelerator.name} ends {models[0].job.spec.name} in {hours:g} hours{reason}")
