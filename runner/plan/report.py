"""Sections of a plan, and the estimate that is printed before anything is compiled.

The first estimate of a job on a mesh, the warnings about that mesh and the better meshes near it are arithmetic on an
abstract state and take seconds. Only the search for a better mesh uses the compiler, for one matmul at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import optax

from runner.checkpoint.leaves import flatten_with_names
from runner.checkpoint.policy import (
    compute_best_interval_seconds,
    compute_expected_goodput,
    estimate_hours_between_failures,
)
from runner.config import TrainerConfig
from runner.console import format_dollars
from runner.parallel.mesh import STATE_AXES, count_batch_shards, format_batch_axes, format_mesh, resolve_mesh_sizes
from runner.plan.figures import Basis, Section, format_amount, report_progress
from runner.plan.mesh import (
    MeshSizes,
    MeshWarning,
    ParameterPasses,
    SmallShard,
    find_mesh_warnings,
    find_small_shards,
    is_significant,
    list_near_meshes,
    make_small_shard_warning,
    order_sizes,
)
from runner.plan.prediction import Prediction, Predictor, build_abstract, count_passes
from runner.plan.program import (
    DURABLE_BYTES_PER_SECOND,
    RESTART_SECONDS,
    STALL_BYTES_PER_SECOND,
    TYPICAL_SHARE,
    CompiledProgram,
    Roofline,
    StepWork,
    TargetMachine,
    compute_hbm_traffic,
    compute_roofline,
    count_bytes,
    count_bytes_per_device,
    count_elements,
    uses_all_reduce,
)
from runner.spec import CheckpointConfig, ExecutionSpec
from runner.train.compile import MEMORY_SHARE, CompiledStep
from runner.train.flops import Flops
from runner.train.kernel_check import KernelCase
from runner.train.optimizer import compute_rates
from runner.train.setup import TrainSetup
from runner.train.stages import StagePlan
from runner.train.state import TrainState
from runner.trainer import BaseTrainer

_NUM_PROBED_MESHES = 4
_NUM_PROBED_PARAMETERS = 2  # of different shapes, on each mesh
_TILE_COLUMNS = 128
_COURSE_COLUMNS, _COURSE_HEIGHTS = 48, "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class EarlyEstimate:
    """Estimate of a job on a mesh by arithmetic, for chips with known peak figures."""

    predictor: Predictor
    machine: TargetMachine
    train_setup: TrainSetup

    @property
    def sizes(self) -> MeshSizes:
        """Sizes of the job's mesh."""
        return order_sizes(self.train_setup.mesh_sizes)

    @property
    def first(self) -> Prediction | None:
        """Prediction for the largest micro-batch that fits, or for the smallest if none does."""
        found = self.predictor.predict_allowed(self.sizes, self.train_setup.abstract_state)
        return next((one for one in found if self._fits(one)), found[-1] if found else None)

    def _fits(self, prediction: Prediction) -> bool:
        return prediction.needed_bytes <= self.machine.usable_bytes

    @property
    def line(self) -> str:
        """First estimate, for the user."""
        found = self.first
        mesh = format_mesh(dict(self.sizes))
        if found is None:
            return f"first estimate: {mesh} cannot hold the batch"
        available = format_amount(self.machine.usable_bytes, "bytes")
        state, fits = format_amount(found.state_bytes, "bytes"), "so the job fits"
        if not self._fits(found):
            fits = "so the job does not fit"
        elif found.is_lower_bound:
            fits = "besides activations, whose size the job does not state (`sizing`)"
        step, needed = format_amount(found.times.step_seconds, "seconds"), format_amount(found.needed_bytes, "bytes")
        return (
            f"first estimate, by arithmetic: {mesh}, {found.micro_batch_examples} example(s) per device: a device "
            f"needs {needed}, {state} of it for the state, and may use {available}, {fits}; a step takes at least "
            f"{step}, bound by {found.times.bound}"
        )

    @property
    def small_shard_warnings(self) -> list[MeshWarning]:
        """Warning that the mesh splits parameters below the tile of a TPU, or none."""
        found, first = self._find_small_shards(self.train_setup.abstract_state), self.first
        if not found or first is None:
            return []
        dtype = self.predictor.job.config.precision.compute
        return [make_small_shard_warning(found, format_mesh(dict(self.sizes)), dtype, first.sent_bytes)]

    def _find_small_shards(self, abstract_state: Any) -> list[SmallShard]:
        if not self.predictor.accelerator.chip.is_tpu:
            return []
        return find_small_shards(_flatten_parameters(abstract_state), self.predictor.sent_itemsize)

    def find_warnings(self, program: CompiledProgram) -> list[MeshWarning]:
        """Return the significant warnings about a compiled step. Only a TPU's own compiler shows them."""
        chip = self.predictor.accelerator.chip
        # XLA for CPU and GPU choose their collectives differently.
        if not chip.is_tpu or self.machine.is_faked:
            return []
        passes = ParameterPasses(
            program.step.layout.micro_batches_per_device,
            layers=count_passes(self.predictor.job.config),
            logits=3,  # one of them for the lookup, where the table is that of the embedding
        )
        sharded_axes = {axis for axis, size in self.sizes if axis in STATE_AXES and size > 1}
        parameters = _flatten_parameters(self.train_setup.abstract_state)
        found = find_mesh_warnings(program.collectives, parameters, passes, sharded_axes)
        bytes_per_second = self.predictor.speeds.interconnect_bytes_per_second / chip.devices_per_chip
        # Traffic that is small beside the compute time can be hidden behind it.
        first = self.first
        seconds = 0.0 if first is None else first.times.compute
        return [warning for warning in found if is_significant(warning, bytes_per_second, seconds)]

    def suggest_mesh(self, warning: MeshWarning) -> str:
        """Return the end of a warning's line: a mesh near this one that avoids it, or "".

        Where libtpu is available, meshes are tried with the compiler until one avoids the problem.
        """
        if not warning.is_avoidable:
            return ""
        near = self._list_near_meshes()
        # Fake CPU devices do not show what the compiler of the chip does with small shards.
        if self.machine.is_faked or not near:
            return f"; by arithmetic {_format_suggestion(*near[0])} avoids this" if near else ""
        with report_progress(f"trying meshes near {format_mesh(dict(self.sizes))}"):
            for sizes, prediction in near[:_NUM_PROBED_MESHES]:
                if not self._uses_all_reduce(sizes, warning.names):
                    suggestion = _format_suggestion(sizes, prediction)
                    return f"; {suggestion} gathers and scatters them, as compiling one matmul shows"
        return ""

    def _list_near_meshes(self) -> list[tuple[MeshSizes, Prediction]]:
        """Return meshes near this one that fit and have no small shards, best first."""
        job, sizing = self.predictor.job, self.predictor.job.sizing(dict(self.sizes))
        length = sizing.get_shardable_length(job.config.data.units_per_example)
        found = []
        for sizes in list_near_meshes(dict(self.sizes), length, sizing.num_experts):
            if not self.predictor.list_micro_batches(dict(sizes)):
                continue
            abstract_state = self.predictor.shard_state(sizes)
            fitting = [one for one in self.predictor.predict_allowed(sizes, abstract_state) if self._fits(one)]
            if not fitting or self._find_small_shards(abstract_state):
                continue
            # Rows or columns of the narrowest shard of a matrix, along an axis that is sharded. Meshes whose shards
            # keep whole columns of a tile come first.
            widths = [
                shard
                for leaf in _flatten_parameters(abstract_state).values()
                if leaf.ndim > 1
                for size, shard in list(zip(leaf.shape, leaf.sharding.shard_shape(leaf.shape), strict=True))[-2:]
                if shard < size
            ]
            is_narrow = min(widths, default=_TILE_COLUMNS) < _TILE_COLUMNS
            found.append(((is_narrow, *fitting[0].times.rank), sizes, fitting[0]))
        return [(sizes, prediction) for _, sizes, prediction in sorted(found, key=lambda each: each[0])]

    def _uses_all_reduce(self, sizes: MeshSizes, names: Sequence[str]) -> bool:
        """Return True if the compiler moves some of these parameters by all-reduce on a mesh."""
        parameters = _flatten_parameters(self.predictor.shard_state(sizes))
        dtype = self.predictor.job.config.precision.compute
        # One parameter of each shape, of equals the first, largest first.
        by_shape = {parameters[name].shape[-2:]: parameters[name] for name in reversed(names)}
        leaves = list(reversed(by_shape.values()))[:_NUM_PROBED_PARAMETERS]
        try:
            return any(uses_all_reduce(self.machine.devices, sizes, leaf, dtype) for leaf in leaves)
        except jax.errors.JaxRuntimeError:
            # A mesh that the compiler rejects is no suggestion.
            return True


def estimate_early(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> EarlyEstimate | None:
    """Return the estimate of a job on a mesh, None where the chip's peak figures or the job's FLOPs are unknown."""
    accelerator = machine.accelerator
    if accelerator is None or accelerator.chip.speeds is None:
        return None
    try:
        return EarlyEstimate(Predictor(job, job.flops_per_token(train_setup), accelerator), machine, train_setup)
    except ValueError:  # the job has a kernel that does not state its FLOPs
        return None


def format_first_estimate(job: BaseTrainer, train_setup: TrainSetup, machine: TargetMachine) -> str:
    """Return the first estimate for the user; for an unknown chip, only the size of the state."""
    estimate = estimate_early(job, train_setup, machine)
    if estimate is not None:
        return estimate.line
    state = format_amount(count_bytes_per_device(train_setup.abstract_state), "bytes")
    available = format_amount(machine.usable_bytes, "bytes")
    return (
        f"first estimate, by arithmetic: {format_mesh(train_setup.mesh_sizes)}: the state takes {state} of {available} "
        "per device; the time of a step is unknown for this device"
    )


def make_estimate_sections(
    spec: ExecutionSpec, estimate: EarlyEstimate | None, machine: TargetMachine, num_steps: int | None
) -> list[Section]:
    """Return the sections of the first estimate and of its costs, without those that are empty.

    `num_steps` is the number of steps that take the time of the estimate; None if it is not known.
    """
    section = Section("first estimate")
    first = None if estimate is None else estimate.first
    if first is not None:
        step_seconds = first.times.step_seconds
        section.add("needed", first.needed_bytes, "bytes", "assumed", "on each device, by arithmetic")
        section.add(
            "lowest step time", step_seconds, "seconds", "assumed", f"bound by {first.times.bound}, by arithmetic"
        )
        if num_steps is not None:
            note = "without restarts"
            section.add(
                "time to the end", num_steps * step_seconds, "seconds", "assumed", note, label="time of the run"
            )
    return [each for each in (section, make_cost_section(spec, machine, [section])) if each.figures]


def build_first_setup(job: BaseTrainer, machine: TargetMachine) -> TrainSetup:
    """Return the setup of a job on a mesh without devices. Raises InvalidError if it does not match the machine."""
    return build_abstract(job.setup_builder, order_sizes(resolve_mesh_sizes(job.topology.mesh, len(machine.devices))))


def _flatten_parameters(abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return flatten_with_names({"params": abstract_state.params})


def _format_suggestion(sizes: MeshSizes, prediction: Prediction) -> str:
    return f"{format_mesh(dict(sizes))} ({format_amount(prediction.sent_bytes, 'bytes')} by arithmetic)"


def make_job_section(spec: ExecutionSpec, machine: TargetMachine) -> Section:
    """Return the section of the job and the devices that it is planned for."""
    section = Section("job")
    kind, number, hosts = machine.devices[0].device_kind, len(machine.devices), machine.num_hosts
    name = spec.topology.accelerator if spec.topology is not None else "any"
    section.add("name", spec.name, "text", "counted")
    section.add("job", spec.job, "text", "counted")
    # The kind of a fake device would be "cpu".
    here = f"{number} x {kind}" if not machine.is_faked else f"{number} devices"
    section.add("devices", f"{name}: {here} on {hosts} host{'s' * (hosts > 1)}", "text", "counted")
    section.add("compiler", machine.compiler, "text", "counted")
    return section


def make_state_section(abstract_state: Any) -> Section:
    """Return the section of the state's size, in all and on one device."""
    section = Section("state")
    # JSON key -> printed label and part of the state.
    parts = {"state": ("state", abstract_state)}
    if isinstance(abstract_state, TrainState):
        section.add("parameters", count_elements(abstract_state.params), "", "counted")
        parts = {
            "parameter": ("parameter", abstract_state.params),
            "optimizer": ("optimizer", abstract_state.opt_state),
        }
        if abstract_state.variables:
            parts["variable"] = "variable", abstract_state.variables
        for name, rider in abstract_state.riders.items():
            if jax.tree.leaves(rider):
                parts[f"rider {name}"] = f"auxiliary {name}", rider
    for name, (label, part) in parts.items():
        section.add(f"{name} bytes", count_bytes(part), "bytes", "counted", label=f"{label} bytes")
        on_device = count_bytes_per_device(part)
        section.add(f"{name} bytes on a device", on_device, "bytes", "counted", label=f"{label} bytes on a device")
    return section


def make_batch_section(config: TrainerConfig, program: CompiledProgram) -> Section:
    """Return the section of the mesh, the split of the global batch, and the length of the run."""
    section, train, layout = Section("batch"), config.train, program.step.layout
    # The product that makes up the global batch.
    shards = count_batch_shards(layout.mesh)
    section.add("mesh", format_mesh(program.train_setup.mesh_sizes), "text", "counted")
    axes = format_batch_axes(layout.mesh)
    product = f"{layout.micro_batch_examples} examples x {shards} devices ({axes}) x {layout.micro_batches_per_device}"
    section.add("micro-batch x devices x accumulation", f"{product} = {train.global_batch_examples}", "text", "counted")
    section.add(f"{config.data.unit} in a step", config.units_per_step, "", "counted")
    section.add("steps", config.total_steps, "", "counted")
    section.add(f"{config.data.unit} of the run", config.count_units(config.total_steps), "", "counted")
    return section


def add_courses(section: Section, stages: Sequence[StagePlan], schedules: Sequence[optax.Schedule] | None) -> None:
    """Add drawings of the batch and, if the schedules of all stages are given, of the learning rate over the run."""
    starts, total = [stage.start for stage in stages], stages[-1].stop
    # The first and the last step, and others at equal distances.
    steps = np.unique(np.linspace(0, total - 1, min(total, _COURSE_COLUMNS)).round().astype(np.int64))
    if schedules is not None:
        rates = compute_rates(schedules, starts, steps)
        borders = compute_rates(schedules, starts, np.array(starts))
        note = ", ".join(f"{rate:.3g} from step {start:,}" for start, rate in zip(starts, borders, strict=True))
        section.add("learning rate", _draw_course(rates), "text", "counted", f"0 to {rates.max():.3g}: {note}")
    batches = np.array([stage.config.train.global_batch_examples for stage in stages])
    of_steps = batches[np.searchsorted(starts, steps, side="right") - 1]
    sizes = ", ".join(f"{batch:,} from step {start:,}" for start, batch in zip(starts, batches.tolist(), strict=True))
    section.add("examples in a step", _draw_course(of_steps), "text", "counted", sizes)


def _draw_course(values: np.ndarray) -> str:
    """Return one character for each value, whose height is the share of the largest."""
    heights = np.ceil(values / max(float(values.max()), 1e-30) * len(_COURSE_HEIGHTS)).astype(int)
    return "".join(_COURSE_HEIGHTS[max(height - 1, 0)] for height in heights)


def add_stage(section: Section, job: BaseTrainer, stage: StagePlan, *, has_data: bool) -> None:
    """Add length, tokens and sources of one stage of a run; the sources only if their data are there."""
    steps, config = stage.stop - stage.start, job.config
    unit, units = config.data.unit, config.count_units(stage.stop) - config.count_units(stage.start)
    section.add("from step", stage.start, "", "counted", stage.why)
    section.add("steps", steps, "", "counted")
    section.add(f"{unit} in a step", stage.config.units_per_step, "", "counted")
    section.add(f"{unit} of the stage", units, "", "counted")
    if not has_data:
        return
    dataset = job.programs.get_dataset(stage.number)
    shares = [
        dataset.compute_shares(*job.programs.count_examples(stage.number, step)) for step in (stage.start, stage.stop)
    ]
    for before, after in zip(*shares, strict=True):
        note = f"the stage takes {after.units - before.units:,} {unit}, from epoch {before.epochs:.4g} on"
        section.add(f"epochs of {after.name}", after.epochs - before.epochs, "", "counted", note)


def make_memory_section(program: CompiledProgram, machine: TargetMachine, first: Prediction | None) -> Section:
    """Return the section of a device's memory; the need is by arithmetic (`first`) without the chip's compiler."""
    section, memory = Section("memory of a device"), program.step.memory
    note = "state, batch, and the random key if the model uses one"
    offloaded = count_bytes_per_device(program.train_setup.abstract_state, on_host=True)
    # A fake device has no memory of a host.
    arguments = memory.arguments - offloaded if machine.is_faked else memory.arguments
    section.add("arguments", arguments, "bytes", "compiled", note)
    if offloaded:
        note = "optimizer state, by config.memory.offload_optimizer; its transfers are part of no predicted time"
        section.add("in host memory", offloaded, "bytes", "counted", note)
    if not machine.is_faked:  # those of XLA for CPU say nothing about the chip
        section.add("temporaries", memory.temporaries, "bytes", "compiled")
    note = "outputs that do not reuse the memory of arguments"
    section.add("outputs", memory.outputs, "bytes", "compiled", note)
    if not machine.is_faked:
        section.add("code", memory.code, "bytes", "compiled")
    needed, note = memory.needed, "arguments + temporaries + outputs + code"
    if memory.workspace:
        why = "at most, for the gradient of attention: cuDNN keeps the gradients of all scores of a layer on Hopper"
        section.add("workspace of cuDNN", memory.workspace, "bytes", "assumed", why)
        note += " + workspace"
    if machine.is_faked and first is not None:
        least = "at least, since the job states no activations, " if first.is_lower_bound else ""
        needed, note = int(first.needed_bytes), f"{least}by arithmetic: the chip's compiler is not here"
    elif machine.is_faked:
        needed = arguments + memory.outputs
        note = "at least, without temporaries: the chip's compiler is not here"
    basis: Basis = "counted" if machine.is_faked else "compiled"
    section.add("needed", needed, "bytes", basis, note)
    note = f"a step may use {MEMORY_SHARE:.0%} of it"
    section.add("there", machine.hbm_bytes, "bytes", "assumed", note, label="capacity")
    section.add("headroom", int(machine.usable_bytes) - needed, "bytes", basis, f"of these {MEMORY_SHARE:.0%}")
    return section


def make_flops_section(config: TrainerConfig, flops: Flops) -> Section:
    """Return the section of the model's FLOPs, by formula."""
    section = Section("FLOPs")
    units, unit = config.units_per_step, config.data.unit.removesuffix("s")
    per_unit, per_step = f"model FLOPs per {unit}", "model FLOPs per step"
    section.add(f"of the model per {unit}", flops.per_token, "FLOP", "counted", flops.formula, label=per_unit)
    section.add("of the model per step", flops.per_token * units, "FLOP", "counted", label=per_step)
    recomputed = flops.recomputed_per_token * units
    note = "by activation checkpointing, and by attention in its backward pass"
    section.add("computed again per step", recomputed, "FLOP", "counted", note, label="recomputed FLOPs per step")
    return section


def make_collectives_section(program: CompiledProgram) -> Section:
    """Return the section of a step's collectives by kind and mesh axes."""
    section = Section("collectives of a step")
    # Number of runs and bytes sent, by kind and axes.
    sums: dict[tuple[str, str], list[float]] = {}
    for collective in program.collectives:
        counted = sums.setdefault((collective.kind, " x ".join(collective.axes) or "none"), [0, 0])
        counted[0] += collective.count
        counted[1] += collective.count * collective.sent_bytes_per_device
    for (kind, axes), (count, sent) in sorted(sums.items()):
        note = f"sent by each device in {int(count)} collective{'s' * (count != 1)}"
        section.add(f"{kind} over {axes}", sent, "bytes", "compiled", note)
    return section


def compute_step_work(config: TrainerConfig, flops: Flops, program: CompiledProgram) -> StepWork:
    """Return the work of one device in a step."""
    sizes, abstract = program.train_setup.mesh_sizes, program.train_setup.abstract_state
    # Recomputation takes time, but it does not count for MFU.
    executed = (flops.per_token + flops.recomputed_per_token) * config.units_per_step
    # Before a matmul the parameters are gathered over every axis but `tensor`.
    gathered = count_elements(abstract.params) / sizes["tensor"]
    passes = count_passes(config)
    # Parameters are gathered in the type of the computation.
    compute_bytes = 2 if config.precision.compute == "bfloat16" else 4
    # Offloaded leaves are read and written on the device too.
    state_bytes = count_bytes_per_device(abstract) + count_bytes_per_device(abstract, on_host=True)
    traffic = compute_hbm_traffic(
        state_bytes, gathered * compute_bytes, passes, program.step.layout.micro_batches_per_device
    )
    num_devices = program.train_setup.mesh.size
    return StepWork(executed / num_devices, traffic, program.interconnect_bytes, program.network_bytes)


def make_roofline_section(
    config: TrainerConfig, flops: Flops, program: CompiledProgram, machine: TargetMachine, num_steps: int | None = None
) -> tuple[Section, Roofline | None]:
    """Return the section of the lowest time of a step and of `num_steps` (None: the run), and the roofline if known."""
    section = Section("roofline of a step")
    speeds = None if machine.accelerator is None else machine.accelerator.chip.speeds
    if machine.accelerator is None or speeds is None:
        section.add("times", "unknown: this device has no peak figures in the catalogue", "text", "assumed")
        return section, None
    num_quantised, flops = flops.quantised_per_token, flops.convert_to_bfloat16(speeds)
    work = compute_step_work(config, flops, program)
    times = compute_roofline(work, speeds, machine.accelerator.chip.devices_per_chip)
    note = f"{format_amount(work.flops, 'FLOP')} per device, {speeds.flops_per_second / 1e12:,.0f} TFLOP/s per chip"
    note += ", those in 8 bits converted to bfloat16 by their peak" if num_quantised else ""
    section.add("compute", times.compute, "seconds", "assumed", note)
    traffic = "state read and written once, parameters read in each pass of each micro-batch"
    hbm = f"{speeds.hbm_bytes_per_second / 1e9:,.0f} GB/s per chip"
    note = f"{format_amount(work.hbm_bytes, 'bytes')}: {traffic}; {hbm}"
    section.add("memory", times.memory, "seconds", "assumed", note)
    links = f"{speeds.interconnect_bytes_per_second / 1e9:,.0f} GB/s per chip"
    note = f"{format_amount(work.interconnect_bytes, 'bytes')} sent per device, {links}"
    section.add("interconnect", times.interconnect, "seconds", "assumed", note)
    # A job on one slice or node sends nothing over the network.
    if work.network_bytes:
        across = f"{format_amount(work.network_bytes, 'bytes')} sent per device between slices or nodes"
        note = f"{across}, {speeds.network_bytes_per_second / 1e9:g} GB/s per chip"
        section.add("network", times.network, "seconds", "assumed", note)
    step_seconds = times.step_seconds
    note = f"bound by {times.bound}, if everything overlaps"
    section.add("lowest step time", step_seconds, "seconds", "assumed", note)
    units = config.units_per_step
    section.add(f"{config.data.unit}/s", units / step_seconds, "", "assumed")
    run_seconds = step_seconds * (config.total_steps if num_steps is None else num_steps)
    label = "time of the run" if num_steps is None else "time of the stage"
    section.add("time to the end", run_seconds, "seconds", "assumed", "without restarts", label=label)
    # MFU is per chip, which may show several devices.
    chips = program.train_setup.mesh.size / machine.accelerator.chip.devices_per_chip
    mfu = flops.per_token * units / (step_seconds * chips * speeds.flops_per_second)
    note = "model FLOPs over peak FLOPs, without recomputation"
    section.add("MFU there", mfu, "share", "assumed", note, label="MFU at that step time")
    return section, times


@dataclass(frozen=True)
class _SaveCost:
    """Assumed times of a save on one machine, and hours between the failures of the job."""

    stall_seconds: float
    durable_seconds: float
    hours: float

    def find_best_interval(self) -> float:
        """Return the seconds between two saves that lose the least time."""
        return compute_best_interval_seconds(self.stall_seconds, self.durable_seconds, self.hours)

    def add_goodput(self, section: Section, name: str, interval_seconds: float, label: str = "") -> None:
        """Add the expected goodput with a save each `interval_seconds`."""
        restart_seconds = RESTART_SECONDS + self.durable_seconds  # a restore is assumed to take as long as a save
        share = compute_expected_goodput(interval_seconds, self.stall_seconds, restart_seconds, self.hours)
        note = f"a save each {format_amount(interval_seconds, 'seconds')}, {restart_seconds:.0f} s for a restart"
        section.add(name, share, "share", "assumed", note, label=label)


def make_checkpoint_section(
    spec: ExecutionSpec, abstract_state: Any, machine: TargetMachine, step_seconds: float | None
) -> tuple[Section, float]:
    """Return the section of a save's size and time and of the best interval, and the seconds until it is durable."""
    section, config = Section("checkpoint"), spec.checkpoint
    total = count_bytes(abstract_state)
    # Every host writes its own shards, so the time of a save shrinks with the number of hosts.
    per_host = total / machine.num_hosts
    given_hours = config.mean_time_between_failures_hours
    hours = given_hours or estimate_hours_between_failures(len(machine.devices))
    cost = _SaveCost(per_host / STALL_BYTES_PER_SECOND, per_host / DURABLE_BYTES_PER_SECOND, hours)
    best = cost.find_best_interval()
    section.add("bytes", total, "bytes", "counted")
    note = "each host writes its share"
    section.add("bytes of a host", int(per_host), "bytes", "counted", note, label="bytes per host")
    note = f"at {DURABLE_BYTES_PER_SECOND / 1e9:g} GB/s per host"
    section.add("time to durable", cost.durable_seconds, "seconds", "assumed", note, label="time until durable")
    note = f"at {STALL_BYTES_PER_SECOND / 1e9:g} GB/s per host, out of its devices"
    section.add("stall", cost.stall_seconds, "seconds", "assumed", note)
    source = f", assumed for {len(machine.devices)} device(s)" if given_hours is None else ""
    note = f"Young and Daly, {hours:.3g} h between failures (checkpoint.mean_time_between_failures_hours{source})"
    section.add("best interval", best, "seconds", "assumed", note)
    # The spec takes the interval in steps.
    if step_seconds is not None:
        steps = max(1, round(best / step_seconds))
        section.add("best interval in steps", steps, "", "assumed", "at the lowest step time")

    interval_seconds = _find_save_interval(config, cost, step_seconds)
    if interval_seconds is not None:
        cost.add_goodput(section, "expected goodput", interval_seconds)
    if config.every is None:
        cost.add_goodput(section, "goodput at best interval", best, "goodput with every: auto")
    if machine.num_hosts > 1 and not config.local_replicas:
        local = replace(cost, durable_seconds=0.0)  # on the hosts' own disks
        label = "goodput with local_replicas: 1"
        local.add_goodput(section, "goodput with replicas", local.find_best_interval(), label)
    return section, cost.durable_seconds


def make_cost_section(spec: ExecutionSpec, machine: TargetMachine, sections: Sequence[Section]) -> Section:
    """Return the section of the run's costs, from the figures of other sections; without a price or a time it is empty.

    The run is assumed to reach `TYPICAL_SHARE` of the best speed, and the expected goodput of its saves.
    """
    section = Section("cost")
    price = None if spec.topology is None else spec.topology.price
    figures = {figure.name: figure.value for each in sections for figure in each.figures}  # later ones are of the whole
    run_seconds = figures.get("time to the end")
    if price is None or not isinstance(run_seconds, float):
        return section
    num_chips = len(machine.devices)
    if machine.accelerator is not None:
        num_chips //= machine.accelerator.chip.devices_per_chip
    per_second = num_chips * price.dollars_per_chip_hour / 3600
    dated = "" if price.as_of is None else f", prices of {price.as_of}"
    note = f"{num_chips:,} chips at {format_dollars(price.dollars_per_chip_hour, is_rate=True)} an hour{dated}"
    section.add("lowest cost", run_seconds * per_second, "dollars", "assumed", f"at the lowest step time; {note}")
    goodput = figures.get("expected goodput", figures.get("goodput at best interval"))
    note = f"{TYPICAL_SHARE:.0%} of that speed" + (", and the expected goodput" if goodput is not None else "")
    cost = run_seconds / TYPICAL_SHARE / float(goodput or 1.0) * per_second
    section.add("expected cost", cost, "dollars", "assumed", note)
    return section


def _find_save_interval(config: CheckpointConfig, cost: _SaveCost, step_seconds: float | None) -> float | None:
    """Return the seconds between the saves of a spec, those in replicas included; None if it depends on the step."""

    def to_seconds(steps: int | None) -> list[float]:
        return [] if steps is None or step_seconds is None else [steps * step_seconds / TYPICAL_SHARE]

    seconds = [cost.find_best_interval()] if config.every is not None else to_seconds(config.every_steps)
    seconds += [60 * config.every_minutes] if config.every_minutes is not None else []
    seconds = [max(each, cost.durable_seconds) for each in seconds]  # a save does not begin before the last one ends
    return min(seconds + to_seconds(config.local_every_steps if config.local_replicas else None), default=None)


def make_compilation_section(program: CompiledProgram) -> Section:
    """Return the section of the compilation, whose times differ from one run to the next."""
    assert isinstance(program.step, CompiledStep), "a plan compiles to the end"
    section = Section("compilation")
    section.add("program", program.step.digest, "text", "compiled")
    if options := program.step.options:
        flags = " ".join(f"--{name}={str(value).lower()}" for name, value in options.items())
        section.add("flags", flags, "text", "counted", "of the chip; LIBTPU_INIT_ARGS sets others")
    section.add("train step", program.compile_seconds, "seconds", "compiled")
    if program.val_compile_seconds is not None:
        section.add("validation step", program.val_compile_seconds, "seconds", "compiled")
    return section


def make_kernels_section(cases: Sequence[KernelCase], slow_forms: Mapping[str, str]) -> Section:
    """Return the section of the kernels that a step uses, what replaces them if they fail their test, and what is slow.

    `slow_forms` are operations without a kernel, with the reason.
    """
    section = Section("kernels")
    for role in sorted({case.role for case in cases}):
        own = [case for case in cases if case.role == role]
        owners = " and ".join(sorted({case.owner for case in own}))
        parts = [
            f"{kernel}, {sum(case.kernel == kernel for case in own)} case(s), or else {fallback}"
            for kernel, fallback in sorted({(case.kernel, case.fallback) for case in own})
        ]
        section.add(role, f"{owners} (tested at start)", "text", "counted", "; ".join(parts))
    for role, reason in sorted(slow_forms.items()):
        section.add(f"{role}, slow form", "plain XLA ops", "text", "counted", reason)
    return section
