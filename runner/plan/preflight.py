"""The whole of a plan: check, compile, report; exit 0 when the job would run, 2 when not."""

import contextlib
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import Mesh

from runner.accelerator import Accelerator, parse_accelerator
from runner.console import warn
from runner.distributed.agreement import Hosts
from runner.errors import EXIT_DONE, EXIT_INVALID, InvalidError
from runner.job import RestoreableJob
from runner.plan import checks, report
from runner.plan.checks import Findings, check_data
from runner.plan.estimate import EarlyEstimate, build_first_setup, estimate_early, format_first_estimate
from runner.plan.figures import Section, format_amount, format_sections, report_progress, sections_to_json
from runner.plan.forecast.sources import find_largest_arrays
from runner.plan.machine import TargetMachine, open_machine
from runner.plan.mesh import MeshWarning
from runner.plan.profile import (
    forecast_program,
    make_comparison_section,
    make_profile_sections,
    read_timed_rows,
    write_trace,
)
from runner.plan.program import CompiledProgram, compile_program
from runner.plan.search import CompiledCandidate, Search, find_smallest_slice
from runner.spec import Document, load_document
from runner.train.compile import StepTooLargeError
from runner.train.setup import TrainSetup, TrainSetupBuilder
from runner.trainer import BaseTrainer

_NUM_LARGEST = 5


@dataclass(frozen=True)
class PlanRequest:
    """What the command line asks for."""

    spec: str
    overrides: tuple[str, ...] = ()
    as_json: bool = False
    is_search: bool = False
    hours: float | None = None  # in which the run must end: choose the chips too
    is_profile: bool = False  # op by op
    trace: Path | None = None  # where to write the schedule for Perfetto
    against: str | None = None  # a run's directory


def plan(request: PlanRequest) -> int:
    """Print the plan of a spec; the exit code."""
    if request.is_search or request.hours is not None:
        return _search(request)
    _refuse_early(request)
    findings = Findings()
    document = load_document(request.spec, request.overrides)
    machine = _open_machine(document, findings)
    job = checks.open_job(document, findings)
    sections = [] if job is None else _sections(job, machine, findings, request)
    if request.as_json:
        content = {"problems": findings.problems, "warnings": findings.warnings, "plan": sections_to_json(sections)}
        print(json.dumps(content, indent=2))
    else:
        lines = format_sections(sections) if sections else []
        lines += ["", *(f"warning: {line}" for line in findings.warnings)] if findings.warnings else []
        lines += ["", *(f"problem: {line}" for line in findings.problems)] if findings.problems else []
        lines += ["", "would not run" if findings.problems else "would run"]
        print("\n".join(lines).lstrip("\n"))
    return EXIT_INVALID if findings.problems else EXIT_DONE


def _refuse_early(request: PlanRequest) -> None:
    """What would else be found wrong when all has been compiled."""
    if request.trace is not None and not request.trace.absolute().parent.is_dir():
        raise InvalidError(f"--trace {request.trace}: {request.trace.absolute().parent} is no directory")
    if request.against is not None:
        read_timed_rows(request.against)


def _open_machine(document: Document, findings: Findings) -> TargetMachine | None:
    topology = document.data.get("topology")
    text = topology.get("accelerator", "any") if isinstance(topology, dict) else "any"
    if not isinstance(text, str):
        return None  # the spec's own check says so
    with findings.collect():
        try:
            accelerator: Accelerator | None = parse_accelerator(text)
            return open_machine(accelerator)
        except InvalidError as error:
            raise document.error("topology.accelerator", str(error)) from error
    return None


def _sections(
    job: RestoreableJob, machine: TargetMachine | None, findings: Findings, request: PlanRequest
) -> list[Section]:
    sections = [] if machine is None else [report.make_job_section(job.spec, machine)]
    if isinstance(job, BaseTrainer):
        if machine is not None and _needs_no_data(job):
            _tell_first(job, machine)
        num_hosts = 1 if machine is None else machine.num_hosts
        data = check_data(job.setup_builder, findings, num_hosts)
        sections += [data.section, checks.check_directory(job, data.is_found, findings)]
        mesh: Mesh | None = None
        if machine is not None:
            with findings.collect():
                mesh = job.setup_builder.make_mesh(machine.devices)
        if machine is None or mesh is None or not data.can_draw:
            return sections
        return sections + _trainer_sections(job, mesh, machine, findings, request)
    with findings.collect():
        job.setup(Hosts.single_process())
    sections.append(checks.check_directory(job, True, findings))
    if machine is None:
        return sections
    abstract = job.abstract_state()
    checks.check_weights(job, abstract, findings)
    return [*sections, report.make_state_section(abstract), _checkpoint_section(job, abstract, machine, None, findings)]


def _trainer_sections(
    job: BaseTrainer, mesh: Mesh, machine: TargetMachine, findings: Findings, request: PlanRequest
) -> list[Section]:
    train_setup = job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed))
    abstract = train_setup.abstract_state
    checks.check_weights(job, abstract, findings)
    outlook = estimate_early(job, train_setup, machine)
    if not _needs_no_data(job):  # else it has been told already
        warn(format_first_estimate(job, train_setup, machine))
    if outlook is not None:
        _warn_of(job, outlook, outlook.small, findings)
    with report_progress(f"compiling {job.spec.name} for {job.topology.accelerator}"):
        program, sections = _compile(job.setup_builder, train_setup, machine, findings)
    if program is None:
        return [*sections, _checkpoint_section(job, abstract, machine, None, findings)]
    if outlook is not None:
        _warn_of(job, outlook, outlook.faults(program), findings)
    sections = [
        report.make_batch_section(job.setup_builder.config_in_steps, program),
        report.make_state_section(abstract),
        report.make_memory_section(program, machine),
        report.make_collectives_section(program),
    ]
    step_seconds = model_flops = None
    try:
        flops = job.flops_per_token(train_setup)
    except ValueError as error:
        findings.warnings.append(f"{job.spec.job}: no FLOPs and no roofline: {error}")
    else:
        roofline, times = report.make_roofline_section(job.setup_builder.config_in_steps, flops, program, machine)
        sections += [report.make_flops_section(job.config, flops), roofline]
        step_seconds = None if times is None else times.step_seconds
        model_flops = flops.per_token * job.config.tokens_per_step
    sections += _profile(program, machine, model_flops, findings, request)
    checkpoint = _checkpoint_section(job, abstract, machine, step_seconds, findings)
    return [*sections, checkpoint, report.make_compilation_section(program)]


def _needs_no_data(job: BaseTrainer) -> bool:
    """Whether a job can be drawn before its data are read."""
    return job.setup_builder.has_vocabulary_size and job.config.train.total_epochs is None


def _tell_first(job: BaseTrainer, machine: TargetMachine) -> None:
    """The first estimate, before data are read and anything is compiled. What is wrong is told later, in its place."""
    with contextlib.suppress(InvalidError):
        warn(format_first_estimate(job, build_first_setup(job, machine), machine))


def _warn_of(job: BaseTrainer, outlook: EarlyEstimate, faults: list[MeshWarning], findings: Findings) -> None:
    """A warning for each fault of the mesh, with a mesh that cures it if one is near."""
    for fault in faults:
        findings.warnings.append(job.document.format_problem(("topology", "mesh"), fault.text + outlook.cure(fault)))


def _profile(
    program: CompiledProgram,
    machine: TargetMachine,
    model_flops: float | None,
    findings: Findings,
    request: PlanRequest,
) -> list[Section]:
    """The step op by op, where that is asked for."""
    if not request.is_profile:
        return []
    found = forecast_program(program, machine)
    if found is None:
        findings.warnings.append("--profile: no forecast, since no peak figures are known for this device")
        return []
    if request.trace is not None:
        write_trace(request.trace, found, request.spec)
    sections = make_profile_sections(found, program, machine, model_flops)
    if request.against is not None:
        with findings.collect():
            rows = read_timed_rows(request.against)
            sections.append(make_comparison_section(found, program.step.memory.needed, rows))
    return sections


def _checkpoint_section(
    job: RestoreableJob, abstract: Any, machine: TargetMachine, step_seconds: float | None, findings: Findings
) -> Section:
    section, save_seconds = report.make_checkpoint_section(job.spec, abstract, machine, step_seconds)
    checks.check_grace(job, save_seconds, "assumed", findings)
    return section


def _compile(
    setup_builder: TrainSetupBuilder, train_setup: TrainSetup, machine: TargetMachine, findings: Findings
) -> tuple[CompiledProgram | None, list[Section]]:
    """The compiled steps; if they do not fit, none, and the sections that tell what would fill the memory."""
    sections: list[Section] = []
    with findings.collect():
        try:
            return compile_program(setup_builder, train_setup, machine), sections
        except StepTooLargeError:
            sections = [
                report.make_state_section(train_setup.abstract_state),
                _largest_section(setup_builder, train_setup, machine),
            ]
            raise
    return None, sections


def _largest_section(setup_builder: TrainSetupBuilder, train_setup: TrainSetup, machine: TargetMachine) -> Section:
    """The largest arrays of the smallest step, which does not fit. What libtpu refuses, the stand-ins compile."""
    section = Section("largest arrays of a device")
    try:
        compiled = setup_builder.compile_smallest(train_setup)
    except jax.errors.JaxRuntimeError:
        compiled = setup_builder.compile_smallest(setup_builder.build(machine.stand_ins))
    for buffer in find_largest_arrays(compiled.text, _NUM_LARGEST):
        section.add(buffer.shape, buffer.bytes, "bytes", "compiled", buffer.op_name)
    return section


def _search(request: PlanRequest) -> int:
    """Rank the ways to run the job on the chips that the spec names, or on the fewest that end it in time."""
    search = Search(request.spec, request.overrides)
    topology = search.open_job([]).topology
    accelerator = parse_accelerator(topology.accelerator)
    if accelerator is None or accelerator.chip.speeds is None:
        raise search.document([]).error(
            "topology.accelerator", f"got {topology.accelerator}, needs chips to search for"
        )
    if request.hours is None:
        machine = open_machine(accelerator)
        candidates = search.candidates(search.models(), accelerator, machine.hbm_bytes)
    else:
        open_machine(Accelerator(accelerator.name, accelerator.chip.slice_sizes[-1]))
        accelerator, candidates = find_smallest_slice(search, accelerator, request.hours)
        machine = open_machine(accelerator)
    found, dropped = search.compile_best(candidates, machine)
    if request.as_json:
        print(json.dumps([_as_json(compiled, accelerator) for compiled in found], indent=2))
    else:
        print("\n".join(_search_lines(found, dropped, len(candidates), accelerator, machine)))
    return EXIT_DONE if found else EXIT_INVALID


def _search_lines(
    found: list[CompiledCandidate],
    dropped: list[str],
    num_candidates: int,
    accelerator: Accelerator,
    machine: TargetMachine,
) -> list[str]:
    lines = [f"{accelerator}: {num_candidates} ways fit by arithmetic; compiled by {machine.compiler}:"]
    for number, compiled in enumerate(found, 1):
        step, bound = format_amount(compiled.times.step_seconds, "seconds"), compiled.times.bound
        needed = format_amount(compiled.program.step.memory.needed, "bytes")
        settings = " ".join(compiled.candidate.overrides)
        seconds = compiled.forecast_seconds
        forecast = "" if seconds is None else f"forecast {format_amount(seconds, 'seconds')}, "
        lines.append(f"  {number}. {forecast}lowest step time {step} ({bound}), {needed} a device: {settings}")
    lines += [f"  does not fit: {line}" for line in dropped]
    if not found:
        return [*lines, "", "nothing fits: more chips, or a smaller global batch, model or sequence"]
    tree: dict[str, Any] = {"topology": {"accelerator": str(accelerator)}}
    for key, value in found[0].candidate.settings.items():
        *parents, last = key.split(".")
        functools.reduce(lambda branch, name: branch.setdefault(name, {}), parents, tree)[last] = value
    return [*lines, "", "the first, for the spec:", "", yaml.safe_dump(tree, sort_keys=False).rstrip()]


def _as_json(compiled: CompiledCandidate, accelerator: Accelerator) -> dict[str, Any]:
    return {
        "settings": {"topology.accelerator": str(accelerator), **compiled.candidate.settings},
        "lowest_step_seconds": compiled.times.step_seconds,
        "bound": compiled.times.bound,
        "forecast_step_seconds": compiled.forecast_seconds,
        "needed_bytes": compiled.program.step.memory.needed,
        "predicted_step_seconds": compiled.candidate.prediction.times.step_seconds,
        "predicted_bytes": compiled.candidate.prediction.needed_bytes,
    }
