"""The sections of a plan: what the job is, what it costs in memory, time and traffic, and what each number rests on."""

from typing import Any

import jax

from runner.checkpoint.policy import compute_best_interval_seconds
from runner.config import TrainerConfig
from runner.parallel.mesh import count_batch_shards, format_batch_axes, format_mesh
from runner.periodic import count_tokens
from runner.plan import program as estimate
from runner.plan.figures import Section, format_amount
from runner.plan.machine import TargetMachine
from runner.plan.program import (
    DURABLE_BYTES_PER_SECOND,
    STALL_BYTES_PER_SECOND,
    CompiledProgram,
    Roofline,
    StepWork,
    count_bytes,
    count_bytes_per_device,
    count_elements,
)
from runner.spec import ExecutionSpec
from runner.train.compile import MEMORY_SHARE
from runner.train.flops import Flops
from runner.train.state import TrainState


def make_job_section(spec: ExecutionSpec, machine: TargetMachine) -> Section:
    """What would run, and where."""
    section = Section("job")
    kind, number, hosts = machine.devices[0].device_kind, len(machine.devices), machine.num_hosts
    name = spec.topology.accelerator if spec.topology is not None else "any"
    section.add("name", spec.name, "text", "counted")
    section.add("job", spec.job, "text", "counted")
    here = f"{number} x {kind}" if not machine.is_faked else f"{number} devices"
    section.add("devices", f"{name}: {here} on {hosts} host{'s' * (hosts > 1)}", "text", "counted")
    section.add("compiler", machine.compiler, "text", "counted")
    return section


def make_state_section(abstract: Any) -> Section:
    """What the state weighs."""
    section = Section("state")
    parts = {"state": abstract}
    if isinstance(abstract, TrainState):
        section.add("parameters", count_elements(abstract.params), "", "counted")
        parts = {"parameter": abstract.params, "optimizer": abstract.opt_state}
        parts |= {"variable": abstract.variables} if abstract.variables else {}
        parts |= {f"rider {name}": rider for name, rider in abstract.riders.items() if jax.tree.leaves(rider)}
    for name, part in parts.items():
        section.add(f"{name} bytes", count_bytes(part), "bytes", "counted")
        section.add(f"{name} bytes on a device", count_bytes_per_device(part), "bytes", "counted")
    return section


def make_batch_section(config: TrainerConfig, program: CompiledProgram) -> Section:
    """How the global batch is split, and how far the run goes."""
    section, train, layout = Section("batch"), config.train, program.step.layout
    shards = count_batch_shards(layout.mesh)
    section.add("mesh", format_mesh(program.train_setup.mesh_sizes), "text", "counted")
    axes = format_batch_axes(layout.mesh)
    product = f"{layout.micro_batch_examples} examples x {shards} devices ({axes}) x {layout.micro_batches_per_device}"
    section.add("micro-batch x devices x accumulation", f"{product} = {train.global_batch_examples}", "text", "counted")
    section.add("tokens in a step", config.tokens_per_step, "", "counted")
    section.add("steps", config.total_steps, "", "counted")
    section.add("tokens of the run", count_tokens(config.total_steps, config.tokens_per_step), "", "counted")
    return section


def make_memory_section(program: CompiledProgram, machine: TargetMachine) -> Section:
    """What a step needs on each device, against what is there."""
    section, memory = Section("memory of a device"), program.step.memory
    section.add(
        "arguments", memory.arguments, "bytes", "compiled", "state, batch, and the key if the model draws from it"
    )
    section.add("temporaries", memory.temporaries, "bytes", "compiled")
    section.add("outputs", memory.outputs, "bytes", "compiled", "those that do not replace arguments")
    section.add("code", memory.code, "bytes", "compiled")
    section.add("needed", memory.needed, "bytes", "compiled", "arguments + temporaries + outputs")
    section.add("there", machine.hbm_bytes, "bytes", "assumed", f"{MEMORY_SHARE:.0%} of it may be planned")
    section.add("headroom", machine.hbm_bytes - memory.needed, "bytes", "compiled")
    return section


def make_flops_section(config: TrainerConfig, flops: Flops) -> Section:
    """FLOPs of the model, by formula."""
    section = Section("FLOPs")
    tokens = config.tokens_per_step
    section.add("of the model per token", flops.per_token, "FLOP", "counted", flops.formula)
    section.add("of the model per step", flops.per_token * tokens, "FLOP", "counted")
    again = "by remat, and by attention in its backward pass"
    section.add("computed again per step", flops.recomputed_per_token * tokens, "FLOP", "counted", again)
    return section


def make_collectives_section(program: CompiledProgram) -> Section:
    """What the devices send each other in a step, by kind and axis."""
    section = Section("collectives of a step")
    rows: dict[tuple[str, str], list[float]] = {}
    for collective in program.collectives:
        row = rows.setdefault((collective.kind, " x ".join(collective.axes) or "none"), [0, 0])
        row[0] += collective.count
        row[1] += collective.count * collective.sent_bytes_per_device
    for (kind, axes), (count, sent) in sorted(rows.items()):
        section.add(
            f"{kind} over {axes}", sent, "bytes", "compiled", f"sent by each device in {int(count)} collectives"
        )
    return section


def compute_step_work(config: TrainerConfig, flops: Flops, program: CompiledProgram) -> StepWork:
    """What one device does in a step."""
    sizes, abstract = program.train_setup.mesh_sizes, program.train_setup.abstract_state
    executed = (flops.per_token + flops.recomputed_per_token) * config.tokens_per_step
    whole = count_elements(abstract.params) / sizes["tensor"]
    passes = 3 if config.memory.remat == "layers" else 2
    compute_bytes = 2 if config.precision.compute == "bfloat16" else 4
    accumulate_steps = program.step.layout.micro_batches_per_device
    traffic = estimate.compute_hbm_traffic(
        count_bytes_per_device(abstract), whole * compute_bytes, passes, accumulate_steps
    )
    num_devices = program.train_setup.mesh.size
    return StepWork(executed / num_devices, traffic, program.interconnect_bytes, program.network_bytes)


def make_roofline_section(
    config: TrainerConfig, flops: Flops, program: CompiledProgram, machine: TargetMachine
) -> tuple[Section, Roofline | None]:
    """The least time of a step, and of the run."""
    section = Section("roofline of a step")
    speeds = None if machine.accelerator is None else machine.accelerator.chip.speeds
    if machine.accelerator is None or speeds is None:
        section.add("times", "no peak figures are known for this device", "text", "assumed")
        return section, None
    work = compute_step_work(config, flops, program)
    times = estimate.compute_roofline(work, speeds, machine.accelerator.chip.devices_per_chip)
    peak = f"{speeds.flops_per_second / 1e12:,.0f} TFLOP/s a chip"
    section.add("compute", times.compute, "seconds", "assumed", f"{format_amount(work.flops, 'FLOP')} a device, {peak}")
    hbm = f"{speeds.hbm_bytes_per_second / 1e9:,.0f} GB/s a chip"
    traffic = "state read and written once, parameters read in each pass of each micro-batch"
    section.add(
        "memory", times.memory, "seconds", "assumed", f"{format_amount(work.hbm_bytes, 'bytes')}: {traffic}; {hbm}"
    )
    link = f"{speeds.interconnect_bytes_per_second / 1e9:,.0f} GB/s out of a chip"
    inside = f"{format_amount(work.interconnect_bytes, 'bytes')} sent by a device"
    section.add("interconnect", times.interconnect, "seconds", "assumed", f"{inside}, {link}")
    if work.network_bytes:
        across = f"{format_amount(work.network_bytes, 'bytes')} sent by a device between slices or nodes"
        share = f"{speeds.network_bytes_per_second / 1e9:g} GB/s a chip"
        section.add("network", times.network, "seconds", "assumed", f"{across}, {share}")
    step_seconds = times.step_seconds
    section.add("lowest step time", step_seconds, "seconds", "assumed", f"bound by {times.bound}, if all overlap")
    tokens = config.tokens_per_step
    section.add("tokens/s", tokens / step_seconds, "", "assumed")
    section.add("time to the end", step_seconds * config.total_steps, "seconds", "assumed", "without restarts")
    chips = program.train_setup.mesh.size / machine.accelerator.chip.devices_per_chip
    mfu = flops.per_token * tokens / (step_seconds * chips * speeds.flops_per_second)
    section.add(
        "MFU there", mfu, "share", "assumed", "FLOPs of the model over peak; what is computed again not counted"
    )
    return section, times


def make_checkpoint_section(
    spec: ExecutionSpec, abstract: Any, machine: TargetMachine, step_seconds: float | None
) -> tuple[Section, float]:
    """What a save weighs and takes, and when to save."""
    section = Section("checkpoint")
    total = count_bytes(abstract)
    on_a_host = total / machine.num_hosts
    durable_seconds, stall_seconds = on_a_host / DURABLE_BYTES_PER_SECOND, on_a_host / STALL_BYTES_PER_SECOND
    hours = spec.checkpoint.mean_time_between_failures_hours
    best = compute_best_interval_seconds(stall_seconds, durable_seconds, hours)
    section.add("bytes", total, "bytes", "counted")
    section.add("bytes of a host", int(on_a_host), "bytes", "counted", "each writes its share")
    durable = f"at {DURABLE_BYTES_PER_SECOND / 1e9:g} GB/s a host"
    section.add("time to durable", durable_seconds, "seconds", "assumed", durable)
    section.add(
        "stall",
        stall_seconds,
        "seconds",
        "assumed",
        f"at {STALL_BYTES_PER_SECOND / 1e9:g} GB/s out of a host's devices",
    )
    failures = f"Young and Daly, {hours:g} h between failures (checkpoint.mean_time_between_failures_hours)"
    section.add("best interval", best, "seconds", "assumed", failures)
    if step_seconds is not None:
        section.add(
            "best interval in steps", max(1, round(best / step_seconds)), "", "assumed", "at the lowest step time"
        )
    return section, durable_seconds


def make_compilation_section(program: CompiledProgram) -> Section:
    """What was compiled. Differs from one time to the next."""
    section = Section("compilation")
    section.add("program", program.step.digest, "text", "compiled")
    if options := program.step.options:
        flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
        section.add("flags", flags, "text", "counted", "of the chip; LIBTPU_INIT_ARGS sets others")
    section.add("train step", program.compile_seconds, "seconds", "compiled")
    if program.val_compile_seconds is not None:
        section.add("validation step", program.val_compile_seconds, "seconds", "compiled")
    return section
