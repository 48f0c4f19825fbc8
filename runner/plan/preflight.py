"""Plan of a spec: check, compile, report. The exit code is 0 if the job would run, else 2."""

import contextlib
import functools
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from runner.accelerator import Accelerator, parse_accelerator
from runner.checkpoint.leaves import validate_memory
from runner.checkpoint.policy import find_replica_advice
from runner.console import warn, write_lines, write_text
from runner.distributed.agreement import Hosts
from runner.errors import EXIT_DONE, EXIT_INVALID, InvalidError
from runner.job import RestoreableJob
from runner.plan import checks, report
from runner.plan.checks import Findings
from runner.plan.figures import Section, format_amount, format_sections, report_progress, sections_to_json
from runner.plan.forecast.module import find_largest_arrays
from runner.plan.mesh import MeshWarning
from runner.plan.prediction import Prediction
from runner.plan.profile import (
    forecast_program,
    make_comparison_section,
    make_profile_sections,
    read_timed_rows,
    write_trace,
)
from runner.plan.program import CompiledProgram, TargetMachine, compile_program, open_machine
from runner.plan.report import EarlyEstimate, build_first_setup, estimate_early, format_first_estimate
from runner.plan.search import CompiledCandidate, Search, find_smallest_slice
from runner.spec import Document, load_document
from runner.spec.document import dump_yaml
from runner.storage import JsonObject
from runner.storage.bucket import limit_call_seconds
from runner.train.checks import find_unmeasured_saves
from runner.train.compile import StepTooLargeError
from runner.train.program import Program
from runner.train.setup import TrainSetup
from runner.train.stages import format_rounded_starts
from runner.trainer import BaseTrainer

_NUM_LARGEST_ARRAYS = 5
_QUICK_CALL_SECONDS = 10.0
_RED, _GREEN = 31, 32  # colours of a terminal
_NUM_SHOWN = 3  # candidates that are shown before they are compiled


@dataclass(frozen=True)
class PlanRequest:
    """Options of the command line."""

    spec: str  # path of the spec
    overrides: tuple[str, ...] = ()  # values of `--set`
    as_json: bool = False  # True to print JSON instead of a table
    is_quick: bool = False  # True to check without compiling
    is_anyway: bool = False  # True to compile even if a check has failed
    is_search: bool = False  # True to rank meshes, micro-batches and the job's own settings
    hours: float | None = None  # time in which the run must end, to choose the chips too
    minutes: float = math.inf  # time after which a search ends, once a candidate fits
    is_profile: bool = False  # True to add the forecast of the step, op by op
    trace: Path | None = None  # file for the schedule, for Perfetto
    against: str | None = None  # directory of a run to compare the forecast with


def plan(request: PlanRequest) -> int:
    """Print the plan of a spec, and return the exit code."""
    if request.is_search or request.hours is not None:
        return _search(request)
    # These would otherwise be found wrong only after minutes of compilation.
    if request.trace is not None and not request.trace.absolute().parent.is_dir():
        raise InvalidError(f"--trace {request.trace}: {request.trace.absolute().parent} is not a directory")
    if request.against is not None:
        read_timed_rows(request.against)

    findings = Findings()
    _, sections = _check(load_document(request.spec, request.overrides), request, findings)
    if request.as_json:
        content = {**findings.to_json(), "plan": sections_to_json(sections)}
        write_text(json.dumps(content, indent=2) + "\n")
    else:
        count = len(findings.problems)
        verdict = "would run, as far as can be told without compiling" if request.is_quick else "would run"
        verdict = f"would not run: {count} problem{'s' * (count > 1)}" if count else verdict
        if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
            verdict = f"\x1b[{_RED if count else _GREEN}m{verdict}\x1b[0m"
        write_text(f"{verdict}\n", is_program=True)
        write_text("".join(f"problem: {line}\n" for line in findings.problems) + "\n")
        lines = format_sections(sections) if sections else []
        lines += ["", *(f"warning: {line}" for line in findings.warnings)] if findings.warnings else []
        write_lines(lines)
    return EXIT_INVALID if findings.problems else EXIT_DONE


def check_variant(spec: str, overrides: tuple[str, ...]) -> JsonObject:
    """Return the findings of a quick plan, and which rows the job writes."""
    findings, facts = Findings(), JsonObject()
    with findings.collect():
        job, _ = _check(load_document(spec, overrides), PlanRequest(spec, is_quick=True), findings)
        if isinstance(job, BaseTrainer) and not findings.problems:
            evaluation = job.config.eval
            facts = {
                "total_steps": job.total_steps,
                "row_steps": job.spec.logging.every_steps,
                "evaluation_steps": evaluation.every_steps,
                "evaluates": evaluation.every_steps is not None or evaluation.at_end,
            }
    return {**findings.to_json(), "facts": facts}


def _check(document: Document, request: PlanRequest, findings: Findings) -> tuple[RestoreableJob | None, list[Section]]:
    machine = _open_machine(document, findings)
    with limit_call_seconds(_QUICK_CALL_SECONDS) if request.is_quick else contextlib.nullcontext():
        job = checks.open_job(document, findings)
        sections = [] if job is None else _make_sections(job, machine, findings, request)
        if job is not None:
            checks.check_tracking(job, findings)
    return job, sections


def _open_machine(document: Document, findings: Findings) -> TargetMachine | None:
    topology = document.data.get("topology")
    text = topology.get("accelerator", "any") if isinstance(topology, dict) else "any"
    if not isinstance(text, str):
        return None  # the check of the spec reports it
    # Not all that can be run can be planned for, such as GPUs whose number is that of a launch option.
    with findings.collect(is_local=True):
        # The error names the line of the spec, or the option, that the accelerator comes from.
        try:
            is_relaxed = isinstance(topology, dict) and topology.get("deterministic") is False
            return open_machine(parse_accelerator(text), is_deterministic=not is_relaxed)
        except InvalidError as error:
            raise document.error("topology.accelerator", str(error)) from error
    return None


def _make_sections(
    job: RestoreableJob, machine: TargetMachine | None, findings: Findings, request: PlanRequest
) -> list[Section]:
    sections = [] if machine is None else [report.make_job_section(job.spec, machine)]
    if isinstance(job, BaseTrainer):
        return sections + _make_trainer_sections(job, machine, findings, request)
    # A job that is not a trainer has no step to compile, so a plan can only size its state.
    with findings.collect():
        job.setup(Hosts.single_process())
    sections.append(checks.check_directory(job, True, findings))
    if machine is None:
        return sections
    abstract_state = job.abstract_state()
    checks.check_weights(job, abstract_state, findings)
    with findings.collect():
        validate_memory(abstract_state, machine.hbm_bytes)
    sections.append(report.make_state_section(abstract_state))
    return [*sections, _make_checkpoint_section(job, abstract_state, machine, None, findings)]


def _make_trainer_sections(
    job: BaseTrainer, machine: TargetMachine | None, findings: Findings, request: PlanRequest
) -> list[Section]:
    # A job whose shapes do not depend on its data gets the first estimate before the data are read. Problems are
    # reported later, in their place.
    is_independent_of_data = not job.setup_builder.needs_data
    if machine is not None and is_independent_of_data:
        with contextlib.suppress(InvalidError):
            warn(format_first_estimate(job, build_first_setup(job, machine), machine))

    # Data, directory and mesh are each checked, whatever the others say.
    data = checks.check_data(job, findings, 1 if machine is None else machine.num_hosts)
    sections = [data.section, checks.check_directory(job, data.is_found, findings)]
    mesh = None
    if machine is not None:
        # Without a number of chips in the spec, the devices are those of this machine.
        has_number = machine.accelerator is not None and machine.accelerator.num_chips is not None
        with findings.collect(is_local=not has_number):
            mesh = job.setup_builder.make_mesh(machine.devices)
    if machine is None or mesh is None or not data.can_build_step:
        return sections

    train_setup = job.setup_builder.build_on_mesh(mesh, jax.random.key(job.spec.seed))
    abstract_state = train_setup.abstract_state
    # Initial weights are compared with the shapes of the state before minutes of compilation.
    checks.check_weights(job, abstract_state, findings)
    with findings.collect():
        job.setup_builder.validate_logits(train_setup)
    estimate = estimate_early(job, train_setup, machine)
    if not is_independent_of_data:
        warn(format_first_estimate(job, train_setup, machine))
    # What is known by now is not worth minutes of compilation.
    if findings.problems and not (request.is_anyway or request.is_quick):
        findings.warnings.append("nothing was compiled, because of the problems; --anyway compiles nevertheless")
        return sections
    if request.is_quick:
        # Stages may have other step times.
        num_steps = None if job.programs.has_stages else job.programs.config_in_steps.total_steps
        sections += report.make_estimate_sections(job.spec, estimate, machine, num_steps)
        return sections
    if estimate is not None:
        _add_mesh_warnings(job, estimate, estimate.small_shard_warnings, findings)

    first = None if estimate is None else estimate.first
    program: CompiledProgram | None = None
    with report_progress(f"compiling {job.spec.name} for {job.topology.accelerator}"), findings.collect():
        try:
            # Without the chip's compiler, arithmetic chooses the micro-batch.
            micro_batch = first.micro_batch_examples if machine.is_faked and first is not None else None
            program = compile_program(job.setup_builder, train_setup, machine, micro_batch=micro_batch)
        except InvalidError as error:
            if not isinstance(error.__cause__, StepTooLargeError):
                raise
            # Show what would fill the memory.
            largest, builder = Section("largest arrays of a device"), job.setup_builder
            try:
                compiled = builder.compile_smallest(train_setup)
            except jax.errors.JaxRuntimeError:
                # libtpu does not return a program that is too large. XLA for CPU compiles it for the stand-ins.
                compiled = builder.compile_smallest(builder.build(machine.stand_ins))
            for buffer in find_largest_arrays(compiled.text, _NUM_LARGEST_ARRAYS):
                largest.add(buffer.shape, buffer.bytes, "bytes", "compiled", buffer.op_name)
            sections += [report.make_state_section(abstract_state), largest]
            raise
    if program is None:
        return [*sections, _make_checkpoint_section(job, abstract_state, machine, None, findings)]

    if estimate is not None:
        _add_mesh_warnings(job, estimate, estimate.find_warnings(program), findings)
    if machine.is_faked:
        check_memory_by_arithmetic(job, first, machine, findings)
    config = job.setup_builder.config_in_steps
    missed = find_unmeasured_saves(job.spec, job.config, job.programs.config_in_steps.total_steps)
    if missed is not None:
        findings.warnings.append(job.document.format_problem(("checkpoint", "keep_best"), missed))
    sections += [
        report.make_batch_section(job.programs.config_in_steps, program),
        report.make_state_section(abstract_state),
        report.make_memory_section(program, machine, first),
        report.make_collectives_section(program),
    ]
    # A job with a kernel of its own may not state its FLOPs; all other sections are still possible.
    step_seconds = model_flops = None
    try:
        flops = job.flops_per_token(train_setup)
    except ValueError as error:
        findings.warnings.append(f"{job.spec.job}: no FLOPs and no roofline: {error}")
    else:
        num_steps = job.programs.plans[0].stop if job.programs.has_stages else None
        roofline, times = report.make_roofline_section(config, flops, program, machine, num_steps)
        sections += [report.make_flops_section(job.config, flops), roofline]
        step_seconds = None if times is None else times.step_seconds
        speeds = None if machine.accelerator is None else machine.accelerator.chip.speeds
        equal = flops if speeds is None else flops.convert_to_bfloat16(speeds)
        model_flops = equal.per_token * job.config.units_per_step

    if request.is_profile:
        forecast = forecast_program(program, machine)
        if forecast is None:
            findings.warnings.append("--profile: no forecast, since this device has no peak figures in the catalogue")
        else:
            if request.trace is not None:
                write_trace(request.trace, forecast, request.spec)
            sections += make_profile_sections(forecast, program, machine, model_flops)
            if request.against is not None:
                with findings.collect():
                    rows = read_timed_rows(request.against)
                    planned_bytes = first.needed_bytes if machine.is_faked and first else program.step.memory.needed
                    sections.append(make_comparison_section(forecast, planned_bytes, rows))
    checkpoint = _make_checkpoint_section(job, abstract_state, machine, step_seconds, findings)
    slow_forms = train_setup.kernels.slow_forms
    if kernels := report.make_kernels_section(job.kernel_cases(train_setup), slow_forms).figures:
        sections.append(Section("kernels", kernels))
    sections += [checkpoint, report.make_compilation_section(program)]
    if job.programs.has_stages and (data.is_found or not findings.problems):
        sections += make_stage_sections(job, train_setup, machine, step_seconds, findings, has_data=data.is_found)
    # The stages' own times come after that of the run as a whole.
    own = [section for section in sections if not section.title.startswith("stage ")]
    if (cost := report.make_cost_section(job.spec, machine, own)).figures:
        sections.append(cost)
    return sections


def make_stage_sections(
    job: BaseTrainer,
    train_setup: TrainSetup,
    machine: TargetMachine,
    step_seconds: float | None,
    findings: Findings,
    *,
    has_data: bool = True,
) -> list[Section]:
    """Check and compile each stage of a run, and report it; the first section shows the run as a whole.

    `step_seconds` is the lowest time of a step before the first stage, if it is known. Text that must be tokenised
    first has no data yet.
    """
    whole = Section("stages")
    with findings.collect():
        uses_config_rates = job.setup_builder.optimizer_choice.uses_config_rates(job.programs.plans[0].config)
        report.add_courses(whole, job.programs.plans, job.programs.schedules if uses_config_rates else None)
    unit = job.config.data.unit
    whole.add(unit, job.config.count_units(job.config.total_steps), "", "counted", label=f"{unit} of the run")
    for line in [*format_rounded_starts(job.config, job.programs.plans), *job.programs.list_idle_rates()]:
        findings.warnings.append(line)
    sections = [whole]
    run_seconds = None if step_seconds is None else step_seconds * job.programs.plans[0].stop
    for stage, stage_job in zip(job.programs.plans[1:], job.stage_jobs[1:], strict=True):
        section = Section(f"stage {stage.number}")
        sections.append(section)
        builder = stage_job.setup_builder
        own = Program(stage, builder, machine.devices)
        found = Findings()
        num_steps, times = stage.stop - stage.start, None
        with found.collect():
            own.validate(train_setup.abstract_state, machine.devices)
            report.add_stage(section, job, stage, has_data=has_data)
            found.warnings += own.find_restarts(job.programs.get_dataset(stage.number)) if has_data else []
            estimate = report.estimate_early(stage_job, own.train_setup, machine)
            first = None if estimate is None else estimate.first
            micro_batch = first.micro_batch_examples if machine.is_faked and first is not None else None
            with report_progress(f"compiling stage {stage.number}"):
                program = compile_program(builder, own.train_setup, machine, micro_batch=micro_batch)
            if machine.is_faked:
                check_memory_by_arithmetic(stage_job, first, machine, found)
            with contextlib.suppress(ValueError):  # a job that does not state its FLOPs
                flops = stage_job.flops_per_token(own.train_setup)
                roofline, times = report.make_roofline_section(stage.config, flops, program, machine, num_steps)
                if times is not None:
                    named = {"lowest step time", "time to the end"}
                    section.figures += [figure for figure in roofline.figures if figure.name in named]
            memory = report.make_memory_section(program, machine, first)
            section.figures += [figure for figure in memory.figures if figure.name in {"needed", "headroom"}]
            section.add("train step", program.compile_seconds, "seconds", "compiled", label="compilation")
        run_seconds = None if run_seconds is None or times is None else run_seconds + num_steps * times.step_seconds
        findings.problems += [f"stage {stage.number}: {line}" for line in found.problems]
        # Warnings that all stages share are shown once.
        findings.warnings += [line for line in found.warnings if line not in findings.warnings]
    if run_seconds is not None:
        note = "without restarts, over all stages"
        whole.add("time to the end", run_seconds, "seconds", "assumed", note, label="time of the run")
    return sections


def check_memory_by_arithmetic(
    job: BaseTrainer, first: Prediction | None, machine: TargetMachine, findings: Findings
) -> None:
    """Add a problem if the step does not fit by arithmetic, for a chip whose compiler is not available."""
    there = f"{format_amount(machine.usable_bytes, 'bytes')} are there"
    is_too_large = first is not None and first.needed_bytes > machine.usable_bytes
    if first is None or (first.is_lower_bound and not is_too_large):
        findings.warnings.append(
            f"whether a step fits in memory is unknown: {machine.compiler} stands in for the compiler of "
            f"{machine.accelerator}, and the job does not state its activations (`sizing` of the trainer); {there}"
        )
    elif is_too_large:
        text = (
            "by arithmetic, since the chip's compiler is not here, a step with "
            f"{first.micro_batch_examples} example(s) a device needs {format_amount(first.needed_bytes, 'bytes')} "
            f"on each device and {there}; use a smaller "
            "micro_batch_examples, more devices, a larger fsdp or tensor axis, or config.memory.remat"
        )
        findings.problems.append(job.document.format_problem(("topology",), text))


def _add_mesh_warnings(
    job: BaseTrainer, estimate: EarlyEstimate, warnings: list[MeshWarning], findings: Findings
) -> None:
    for warning in warnings:
        text = warning.text + estimate.suggest_mesh(warning)
        findings.warnings.append(job.document.format_problem(("topology", "mesh"), text))


def _make_checkpoint_section(
    job: RestoreableJob, abstract_state: Any, machine: TargetMachine, step_seconds: float | None, findings: Findings
) -> Section:
    section, save_seconds = report.make_checkpoint_section(job.spec, abstract_state, machine, step_seconds)
    checks.check_grace(job, save_seconds, "assumed", findings)
    if (advice := find_replica_advice(machine.num_hosts, job.spec.checkpoint)) is not None:
        findings.warnings.append(job.document.format_problem(("checkpoint",), advice))
    return section


def _search(request: PlanRequest) -> int:
    """Rank the ways to run the job on the chips of the spec, or on the fewest chips that end it in time."""
    end_seconds = time.monotonic() + 60 * request.minutes
    search = Search(request.spec, request.overrides)
    topology = search.open_job([]).topology
    accelerator = parse_accelerator(topology.accelerator)
    # Ranking needs the peak figures of the chip.
    if accelerator is None or accelerator.chip.speeds is None:
        raise search.load_document([]).error(
            "topology.accelerator",
            f"got {topology.accelerator}, but a search needs chips with known peak figures; name some, or use "
            "--topology",
        )
    if request.hours is None:
        machine = open_machine(accelerator, is_deterministic=topology.deterministic)
        candidates = search.list_candidates(search.list_variants(), accelerator, machine.hbm_bytes)
        start = search.make_start(accelerator, machine.hbm_bytes)
    else:
        # `open_machine` requires that the largest machine is opened first.
        largest = Accelerator(accelerator.name, accelerator.chip.slice_sizes[-1])
        open_machine(largest, is_deterministic=topology.deterministic)
        accelerator, candidates = find_smallest_slice(search, search.list_variants(), accelerator, request.hours)
        machine, start = open_machine(accelerator, is_deterministic=topology.deterministic), None
    for candidate in candidates[:_NUM_SHOWN]:
        predicted = candidate.prediction
        seconds, needed = format_amount(predicted.rank[0], "seconds"), format_amount(predicted.needed_bytes, "bytes")
        warn(f"by arithmetic: {seconds} a step, {needed} per device: {candidate.describe()}")
    found, dropped = search.compile_best(candidates, machine, start, end_seconds)
    # JSON lists only the candidates that fit.
    if request.as_json:
        content = [
            {
                "settings": {"topology.accelerator": str(accelerator), **compiled.candidate.settings},
                "lowest_step_seconds": compiled.times.step_seconds,
                "bound": compiled.times.bound,
                "op_by_op_step_seconds": compiled.op_by_op_seconds,
                "forecast_step_seconds": compiled.forecast_seconds,
                "needed_bytes": compiled.needed_bytes,
                "predicted_step_seconds": compiled.candidate.prediction.times.step_seconds,
                "predicted_bytes": compiled.candidate.prediction.needed_bytes,
            }
            for compiled in found
        ]
        write_text(json.dumps(content, indent=2) + "\n")
    else:
        lines = _format_search(found, dropped, len(candidates), accelerator, machine)
        write_lines(lines)
    return EXIT_DONE if found else EXIT_INVALID


def _format_search(
    found: list[CompiledCandidate],
    dropped: list[str],
    num_candidates: int,
    accelerator: Accelerator,
    machine: TargetMachine,
) -> list[str]:
    lines = [f"{accelerator}: {num_candidates} candidates fit by arithmetic; best when compiled by {machine.compiler}:"]
    for number, compiled in enumerate(found, 1):
        lines.append(f"  {number}. {compiled.describe()}")
    lines += [f"  does not fit: {line}" for line in dropped]
    if not found:
        return [*lines, "", "nothing fits: use more chips, or a smaller global batch, model or sequence"]
    spec = next((compiled for compiled in found if compiled.candidate.is_spec), None)
    if spec is found[0]:
        return [*lines, "", "nothing that was compiled is faster than the spec as it is"]
    if spec is not None:
        saved = found[0].get_share_saved(spec)
        lines += ["", f"a step of the first takes {saved:.1%} less time than one of the spec as it is"]
    # The best settings as a part of the spec.
    tree: dict[str, Any] = {"topology": {"accelerator": str(accelerator)}}
    for key, value in found[0].candidate.settings.items():
        *parents, last = key.split(".")
        functools.reduce(lambda branch, name: branch.setdefault(name, {}), parents, tree)[last] = value
    return [*lines, "", "the first, for the spec:", "", dump_yaml(tree).rstrip()]
