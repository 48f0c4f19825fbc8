"""The forecast of a step as sections of a plan, and as a file that Perfetto opens.

The forecast of a step beside what a run of it took, by the rows that the run has left. Only reads.
"""

import json
import math
import os
import statistics
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from runner.errors import InvalidError
from runner.history.reader import read_sample
from runner.plan.figures import Basis, Section, format_amount
from runner.plan.forecast import DeviceRates, Forecast, build_trace, compute_forecast, get_live_bytes
from runner.plan.forecast.collectives import Collective
from runner.plan.machine import TargetMachine
from runner.plan.program import CompiledProgram, compute_sent_bytes
from runner.storage import JsonObject, open_store
from runner.train.compile import ProgramMemory

_NUM_OPS, _NUM_LINES, _NUM_HELD, _NUM_TIMES = 20, 15, 8, 10


def get_device_rates(machine: TargetMachine, mesh_sizes: Mapping[str, int]) -> DeviceRates | None:
    """What one device of a machine can do, None where its chip's peak figures are not known."""
    chip = None if machine.accelerator is None else machine.accelerator.chip
    if chip is None or chip.speeds is None:
        return None
    speeds, share = chip.speeds, 1 / chip.devices_per_chip

    def collective_seconds(collective: Collective) -> float:
        inside, across = compute_sent_bytes([replace(collective, count=1)], mesh_sizes, machine)
        links, network = speeds.interconnect_bytes_per_second, speeds.network_bytes_per_second
        return inside / (links * share) + across / (network * share)

    return DeviceRates(
        speeds.flops_per_second * share,
        speeds.hbm_bytes_per_second * share,
        collective_seconds,
        None if machine.is_faked else chip.clock_hertz,
        chip.matrix_units[1] if chip.matrix_units else 1,
    )


def forecast_program(program: CompiledProgram, machine: TargetMachine) -> Forecast | None:
    """The forecast of a compiled step, None where the chip's peak figures are not known."""
    sizes = program.train_setup.mesh_sizes
    rates = get_device_rates(machine, sizes)
    return None if rates is None else compute_forecast(program.step.text, sizes, rates)


def forecast_step_seconds(program: CompiledProgram, machine: TargetMachine) -> float | None:
    """A step's time by the compiler's estimates, for ranking programs; None where the compiler has written none."""
    found = forecast_program(program, machine)
    return found.high if found is not None and found.has_estimates else None


def make_profile_sections(
    found: Forecast, program: CompiledProgram, machine: TargetMachine, model_flops_per_step: float | None
) -> list[Section]:
    """The sections of a forecast; without the FLOPs of the model there is no MFU."""
    return [
        _range_section(found, machine, model_flops_per_step),
        _part_section(found),
        _collective_section(found),
        _line_section(found),
        _op_section(found),
        _memory_section(found, program.step.memory),
    ]


def _range_section(found: Forecast, machine: TargetMachine, model_flops: float | None) -> Section:
    section = Section("forecast of a step")
    assert machine.accelerator is not None, "its peak figures are known"
    chip, (low, high) = machine.accelerator.chip, sorted((found.low, found.high))
    section.add("at the rooflines of its ops", found.low, "seconds", "assumed", "no op is faster")
    if found.has_estimates:
        assert chip.clock_hertz is not None, "estimates are cycles"
        cycles = f"cycles by {machine.compiler}, at {chip.clock_hertz / 1e9:.2f} GHz"
        section.add("by the compiler's estimates", found.high, "seconds", "compiled", cycles)
    else:
        section.add("estimates", _why_none(machine), "text", "compiled")
    if model_flops is not None and low:
        peak = len(machine.devices) * chip.speeds.flops_per_second / chip.devices_per_chip if chip.speeds else 1.0
        section.add("MFU at most", model_flops / (low * peak), "share", "assumed", "where every op is at its roofline")
        if found.has_estimates:
            section.add("MFU by the estimates", model_flops / (high * peak), "share", "compiled")
    section.add("FLOPs of a device", found.flops, "FLOP", "compiled", "of matmuls and kernels, as compiled")
    if found.num_unknown:
        note = "they count by their arrays alone: the forecast is too short by what they compute"
        section.add("kernels without a cost", found.num_unknown, "", "compiled", note)
    if found.num_endless:
        note = "trips are not known: they count once, and the forecast is too short"
        section.add("loops that count once", found.num_endless, "", "compiled", note)
    return section


def _why_none(machine: TargetMachine) -> str:
    if machine.is_faked:
        return f"none, since {machine.compiler} stands in: all is rooflines, of the fusions of another compiler"
    return f"none in the program of {machine.compiler}, or no clock is known for the chip: all is rooflines"


def _basis(found: Forecast) -> Basis:
    return "compiled" if found.has_estimates else "assumed"


def _at_roofline(found: Forecast, low: float) -> str:
    return f", {format_amount(low, 'seconds')} at the roofline" if found.has_estimates else ""


def _part_section(found: Forecast) -> Section:
    section = Section("where the time goes")
    whole = max(found.high, 1e-12)
    for part, (low, high) in found.by_part().items():
        section.add(part, high, "seconds", _basis(found), f"{high / whole:.1%}{_at_roofline(found, low)}")
    return section


def _collective_section(found: Forecast) -> Section:
    section = Section("collectives in time")
    for part, (exposed, hidden) in found.collectives().items():
        section.add(part, exposed, "seconds", _basis(found), f"exposed; hidden {format_amount(hidden, 'seconds')}")
    return section


def _line_section(found: Forecast) -> Section:
    section = Section("by line of source")
    for line, (low, high) in list(found.by_line().items())[:_NUM_LINES]:
        section.add(_short(line), high, "seconds", _basis(found), _at_roofline(found, low).removeprefix(", "))
    return section


def _op_section(found: Forecast) -> Section:
    section = Section("the most expensive ops")
    for number, op in enumerate(found.sums_of_alike()[:_NUM_OPS], 1):
        runs = f"{op.runs:g} x " if op.runs != 1 else ""
        whose = "" if op.basis == "estimate" else f", by {op.basis}"
        alike = f" in {op.alike} ops" if op.alike > 1 else ""
        about = f"{runs}{op.part}{alike}{_at_roofline(found, op.low)}{whose}: {_short(op.line)} {_tail(op.op_name)}"
        section.add(f"{number}. {op.name}", op.high, "seconds", _basis(found), about.rstrip(": "))
    return section


def _memory_section(found: Forecast, memory: ProgramMemory) -> Section:
    section, alive = Section("memory over the step"), found.alive
    section.add("temporaries at the peak", alive.peak, "bytes", "counted", "alive at a time, by the scheduled order")
    if memory.peak:
        error = f"the count is {(alive.peak - memory.peak) / memory.peak:+.1%} off"
        section.add("the same by the compiler", memory.peak, "bytes", "compiled", error)
    section.add("temporaries as planned", memory.temporaries, "bytes", "compiled", "with what lies between them")
    for number, most in enumerate(compute_memory_timeline(found, _NUM_TIMES)):
        name = f"{number * 100 // _NUM_TIMES} to {(number + 1) * 100 // _NUM_TIMES}% of the time"
        section.add(name, most, "bytes", "counted", "at most" if number == 0 else "")
    for number, held in enumerate(alive.at_peak[:_NUM_HELD], 1):
        section.add(f"alive at the peak, {number}.", held.bytes, "bytes", "counted", f"{held.shape} {held.op.name}")
    return section


def compute_memory_timeline(found: Forecast, number: int) -> list[int]:
    """The most bytes of temporaries in each of so many equal stretches of the step."""
    most, whole = [0] * number, max(found.high, 1e-12)
    for one in found.timing.drawn:
        if one.lane == "compute":
            held = get_live_bytes(found, one.stack, one.turns)
            first = math.floor(number * one.start / whole + 1e-9)
            last = math.ceil(number * (one.start + one.seconds) / whole - 1e-9)
            for index in range(first, min(last, number)):
                most[index] = max(most[index], held)
    return most


def _short(line: str) -> str:
    """A file below the current directory by its path from there."""
    here = os.getcwd() + os.sep
    return line.removeprefix(here)


def _tail(op_name: str) -> str:
    return "/".join(op_name.split("/")[-3:])


def write_trace(path: Path, found: Forecast, name: str) -> None:
    """Write the schedule where Perfetto can open it. Raises `InvalidError` if the file cannot be written."""
    try:
        path.write_text(json.dumps(build_trace(found, name)))
    except OSError as error:
        raise InvalidError(f"--trace {path}: {error.strerror}") from error


def read_timed_rows(url: str) -> tuple[JsonObject, ...]:
    """Rows of a run that tell how long its steps took. Raises `InvalidError` if there are none."""
    try:
        rows = read_sample(open_store(url))
    except (OSError, ValueError) as error:
        raise InvalidError(f"--against {url}: its metrics cannot be read: {error}") from error
    timed = tuple(row for row in rows if _number(row, "perf/step_seconds_median"))
    if not timed:
        raise InvalidError(f"--against {url}: got no row of metrics.jsonl with perf/step_seconds_median, needs a run's")
    return timed


def make_comparison_section(found: Forecast, planned_bytes: int, rows: tuple[JsonObject, ...]) -> Section:
    """What was measured, and how far the forecast is from it. Which devices the run had is not looked at."""
    section = Section("against a run")
    seconds = statistics.median(_number(row, "perf/step_seconds_median") for row in rows)
    about = f"median of {len(rows)} rows, of the devices that the run had"
    section.add("step", seconds, "seconds", "measured", about)
    section.add("over the rooflines of its ops", seconds / found.low, "", "measured", "times; the forecast's lower end")
    if found.has_estimates:
        section.add("over the compiler's estimates", seconds / found.high, "", "measured", "times; the upper end")
    shares = [share for row in rows if (share := _number(row, "perf/mfu"))]
    if shares:
        section.add("MFU", statistics.median(shares), "share", "measured")
    peak = max((_number(row, "perf/peak_bytes") for row in rows), default=0.0)
    if peak:
        error = f"planned are {planned_bytes / peak - 1:+.1%} of it"
        section.add("peak memory of a device", peak, "bytes", "measured", error)
    return section


def _number(row: JsonObject, key: str) -> float:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else 0.0
