"""Forecast of a compiled step as sections of a plan, as a trace for Perfetto, and against a run's measured times."""

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.errors import InvalidError
from runner.metrics.file import read_sample
from runner.plan.figures import Basis, Section, format_amount
from runner.plan.forecast import DeviceRates, Forecast, TypicalShares, build_trace, compute_forecast, get_live_bytes
from runner.plan.forecast.collectives import Collective
from runner.plan.program import CompiledProgram, TargetMachine, compute_sent_bytes
from runner.storage import JsonObject, open_store
from runner.train.compile import ProgramMemory

# Fitted to steps of GPT-2 124M and Llama 1B, measured on an H200 (`tests/benchmarks/accelerator`). The share of
# attention is that of heads of width 64, with their gradients.
_GPU_SHARES = TypicalShares(matmul=0.6, hbm=0.75, attention=0.35, launch_seconds=2e-6)

_NUM_OPS, _NUM_LINES, _NUM_BUFFERS, _NUM_TIMES = 20, 15, 8, 10


def get_device_rates(machine: TargetMachine, mesh_sizes: Mapping[str, int]) -> DeviceRates | None:
    """Return the speeds of one device of a machine, None where its chip's peak figures are unknown."""
    chip = None if machine.accelerator is None else machine.accelerator.chip
    if chip is None or chip.speeds is None:
        return None
    speeds, share = chip.speeds, 1 / chip.devices_per_chip

    def get_collective_seconds(collective: Collective) -> float:
        # One run of the collective: the schedule counts the runs itself.
        inside, across = compute_sent_bytes([replace(collective, count=1)], mesh_sizes, machine)
        links, network = speeds.interconnect_bytes_per_second, speeds.network_bytes_per_second
        return inside / (links * share) + across / (network * share)

    return DeviceRates(
        speeds.flops_per_second * share,
        speeds.hbm_bytes_per_second * share,
        get_collective_seconds,
        # Estimates of another compiler than the chip's are not in cycles of its clock.
        None if machine.is_faked else chip.clock_hertz,
        chip.matrix_units[1] if chip.matrix_units else 1,
        None if speeds.int8_per_second is None else speeds.int8_per_second * share,
        None if speeds.float8_per_second is None else speeds.float8_per_second * share,
        _GPU_SHARES if machine.is_compiled_for_gpus else None,
    )


def forecast_program(program: CompiledProgram, machine: TargetMachine) -> Forecast | None:
    """Return the forecast of a compiled step, None where the chip's peak figures are unknown."""
    sizes = program.train_setup.mesh_sizes
    rates = get_device_rates(machine, sizes)
    return None if rates is None else compute_forecast(program.step.text, sizes, rates)


def make_profile_sections(
    forecast: Forecast, program: CompiledProgram, machine: TargetMachine, model_flops_per_step: float | None
) -> list[Section]:
    """Return the sections of the forecast of `program`, whose chip must have known peak figures.

    The FLOPs of the model count those in 8 bits as bfloat16; None leaves MFU out.
    """
    basis: Basis = "compiled" if forecast.has_estimates else "assumed"

    has_range = forecast.has_estimates or machine.is_compiled_for_gpus

    def format_roofline(low: float) -> str:
        return f"{format_amount(low, 'seconds')} at the roofline" if has_range else ""

    # Shares are of the upper end of the range, which all parts add up to.
    parts = Section("where the time goes")
    whole = max(forecast.high, 1e-12)
    for part, (low, high) in forecast.sum_by_part().items():
        notes = [f"{high / whole:.1%}", format_roofline(low)]
        parts.add(part, high, "seconds", basis, ", ".join(note for note in notes if note))

    collectives = Section("collectives in time")
    for part, (exposed, hidden) in forecast.sum_collectives().items():
        collectives.add(part, exposed, "seconds", basis, f"exposed; {format_amount(hidden, 'seconds')} hidden")

    lines = Section("by line of source")
    for line, (low, high) in list(forecast.sum_by_line().items())[:_NUM_LINES]:
        lines.add(_shorten_path(line), high, "seconds", basis, format_roofline(low))

    ops = Section("the most expensive ops")
    # The note reads like "24 x matmuls in 12 ops, 3 ms at the roofline: experiments/gpt.py:80 mlp/dot_general".
    for number, op in enumerate(forecast.sum_similar_ops()[:_NUM_OPS], 1):
        runs = f"{op.runs:g} x " if op.runs != 1 else ""
        similar = f" in {op.num_ops} ops" if op.num_ops > 1 else ""
        notes = [f"{runs}{op.part}{similar}", format_roofline(op.low)]
        notes += [] if op.basis == "estimate" else [f"by {op.basis}"]
        operation = "/".join(op.op_name.split("/")[-3:])
        note = f"{', '.join(note for note in notes if note)}: {_shorten_path(op.line)} {operation}"
        ops.add(f"{number}. {op.name}", op.high, "seconds", basis, note.rstrip(": "))

    range_ = _make_range_section(forecast, machine, model_flops_per_step)
    return [range_, parts, collectives, lines, ops, _make_memory_section(forecast, program.step.memory, machine)]


def _make_range_section(forecast: Forecast, machine: TargetMachine, model_flops: float | None) -> Section:
    section = Section("forecast of a step")
    assert machine.accelerator is not None, "its peak figures are known"
    # The sum of the rooflines may exceed the sum of the estimates.
    chip, (low, high) = machine.accelerator.chip, sorted((forecast.low, forecast.high))
    section.add("at the rooflines of its ops", forecast.low, "seconds", "assumed", "no op can be faster")
    if forecast.has_estimates:
        assert chip.clock_hertz is not None, "estimates are in cycles"
        cycles = f"cycles estimated by {machine.compiler}, at {chip.clock_hertz / 1e9:.2f} GHz"
        section.add("by the compiler's estimates", forecast.high, "seconds", "compiled", cycles)
    elif machine.is_compiled_for_gpus:
        shares = f"{_GPU_SHARES.matmul:.0%} in matmuls, {_GPU_SHARES.attention:.0%} in attention"
        note = f"{shares}, {_GPU_SHARES.hbm:.0%} of the memory bandwidth"
        section.add("at typical shares of the peaks", forecast.high, "seconds", "assumed", note)
    elif machine.is_faked:
        reason = f"none: {machine.compiler} stands in for the chip's compiler; every time is a roofline of its fusions"
        section.add("estimates", reason, "text", "compiled")
    else:
        reason = f"none in the program of {machine.compiler}, or the chip's clock is unknown; every time is a roofline"
        section.add("estimates", reason, "text", "compiled")
    if model_flops is not None and low:
        peak = len(machine.devices) * chip.speeds.flops_per_second / chip.devices_per_chip if chip.speeds else 1.0
        section.add("MFU at most", model_flops / (low * peak), "share", "assumed", "if every op is at its roofline")
        if forecast.has_estimates:
            section.add("MFU by the estimates", model_flops / (high * peak), "share", "compiled")
        elif machine.is_compiled_for_gpus:
            section.add("MFU at typical shares", model_flops / (high * peak), "share", "assumed")
    note = "of matmuls and kernels, as compiled"
    section.add("FLOPs of a device", forecast.flops, "FLOP", "compiled", note, label="FLOPs per device")
    if forecast.num_unknown:
        note = "counted by their arrays alone; the forecast leaves out their computation"
        section.add("kernels without a cost", forecast.num_unknown, "", "compiled", note)
    if forecast.num_endless:
        note = "their trip count is unknown; the forecast counts one trip, which is too short"
        section.add("loops that count once", forecast.num_endless, "", "compiled", note, label="loops counted once")
    return section


def _make_memory_section(forecast: Forecast, memory: ProgramMemory, machine: TargetMachine) -> Section:
    section, live = Section("memory over the step"), forecast.memory
    section.add("temporaries at the peak", live.peak, "bytes", "counted", "alive at one time, by the scheduled order")
    # It is 0 where the compiler reports no peak, and another quantity where XLA for CPU stands in.
    if memory.peak and not machine.is_faked:
        error = f"the count is {(live.peak - memory.peak) / memory.peak:+.1%} off"
        section.add("the same by the compiler", memory.peak, "bytes", "compiled", error)
    note = "including gaps between buffers"
    section.add("temporaries as planned", memory.temporaries, "bytes", "compiled", note)
    for number, most in enumerate(compute_memory_timeline(forecast, _NUM_TIMES)):
        name = f"{number * 100 // _NUM_TIMES} to {(number + 1) * 100 // _NUM_TIMES}% of the time"
        section.add(name, most, "bytes", "counted", "at most" if number == 0 else "")
    for number, buffer in enumerate(live.peak_buffers[:_NUM_BUFFERS], 1):
        note = f"{buffer.shape} {buffer.op.name}"
        section.add(f"alive at the peak, {number}.", buffer.bytes, "bytes", "counted", note)
    return section


def compute_memory_timeline(forecast: Forecast, number: int) -> list[int]:
    """Return the peak bytes of temporaries in each of `number` equal intervals of the step."""
    # Only ops have live buffers; transfers run beside them.
    peaks, whole = [0] * number, max(forecast.high, 1e-12)
    for span in forecast.timing.spans:
        if span.lane == "compute":
            live_bytes = get_live_bytes(forecast, span.stack, span.trips)
            # The tolerance keeps an op that ends on a border out of the next interval.
            first = math.floor(number * span.start / whole + 1e-9)
            last = math.ceil(number * (span.start + span.seconds) / whole - 1e-9)
            for index in range(first, min(last, number)):
                peaks[index] = max(peaks[index], live_bytes)
    return peaks


def _shorten_path(line: str) -> str:
    return line.removeprefix(os.getcwd() + os.sep)


def write_trace(path: Path, forecast: Forecast, name: str) -> None:
    """Write the schedule as a trace that Perfetto opens. Raises InvalidError if the file cannot be written."""
    try:
        path.write_text(json.dumps(build_trace(forecast, name)))
    except OSError as error:
        raise InvalidError(f"--trace {path}: {error.strerror}") from error


def read_timed_rows(url: str) -> tuple[JsonObject, ...]:
    """Return the rows of a run's metrics that hold its step time. Raises InvalidError if there are none."""
    try:
        rows = read_sample(open_store(url))
    except (OSError, ValueError) as error:
        raise InvalidError(f"--against {url}: its metrics cannot be read: {error}") from error
    # Not every row holds a step time.
    timed = tuple(row for row in rows if _get_number(row, "perf/step_seconds_median"))
    if not timed:
        raise InvalidError(
            f"--against {url}: no row of its metrics.jsonl holds perf/step_seconds_median; "
            "give the directory of a run that has trained"
        )
    return timed


def make_comparison_section(forecast: Forecast, planned_bytes: float, rows: tuple[JsonObject, ...]) -> Section:
    """Return the section that compares a forecast with a run, whose devices are not checked against the plan's."""
    section = Section("against a run")
    seconds = statistics.median(_get_number(row, "perf/step_seconds_median") for row in rows)
    section.add("step", seconds, "seconds", "measured", f"median of {len(rows)} rows, on the run's own devices")
    note = "times the lower end of the forecast"
    section.add("over the rooflines of its ops", seconds / forecast.low, "", "measured", note)
    if forecast.has_estimates:
        note = "times the upper end of the forecast"
        section.add("over the compiler's estimates", seconds / forecast.high, "", "measured", note)
    elif forecast.high > forecast.low:
        section.add("over typical shares of the peaks", seconds / forecast.high, "", "measured", "the upper end")
    # A run on devices without known peak figures has no MFU.
    shares = [share for row in rows if (share := _get_number(row, "perf/mfu"))]
    if shares:
        section.add("MFU", statistics.median(shares), "share", "measured")
    peak = max((_get_number(row, "perf/peak_bytes") for row in rows), default=0.0)
    if peak:
        error = f"the plan's figure differs by {planned_bytes / peak - 1:+.1%}"
        section.add("peak memory of a device", peak, "bytes", "measured", error)
    return section


def _get_number(row: JsonObject, key: str) -> float:
    """Return a number of a row, 0 if it has none under this key."""
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
