"""What `plan` says of a model, with the device and without it, beside what a run of it took."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.accelerator import CHIPS, find_chip
from runner.storage import parse_lines
from tests.benchmarks.accelerator.process import run_module
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.section.speed import write_tokens
from tests.benchmarks.accelerator.size import Setting

FORECAST = "forecast of a step, at the rooflines of its ops"
_ROUNDS, _STEPS = 3, 10  # rows of the run after the first, and steps of each


def measure(setting: Setting, name: str) -> Iterator[Figure]:
    """Run it, then plan it for the device at hand, and for the same chip by its name, as a machine without it would."""
    model, scratch = setting.sizes.models[name], Path(setting.scratch)
    directory, total_steps = scratch / "run", (_ROUNDS + 1) * _STEPS
    arguments = model.arguments(directory, write_tokens(model, scratch), total_steps, f"logging.every_steps={_STEPS}")
    run_module("runner", *arguments)
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())[1:]
    measured = statistics.median(row["perf/step_seconds_median"] for row in rows)
    peak = max((row["perf/peak_bytes"] for row in rows if "perf/peak_bytes" in row), default=None)
    yield Figure("seconds of a step, measured", measured, "seconds", f"median of {len(rows)} rows")
    about = "" if peak is not None else "not counted on this device"
    yield Figure("peak memory, measured", peak, "bytes", about)
    planned = _plan(*arguments)
    yield from _memory("planned on the device", planned, peak)
    chip = next((known for known, chip in CHIPS.items() if chip == find_chip(setting.device) and chip.speeds), None)
    if chip is None:
        about = f"the peak figures of {setting.device} are not known"
        yield Figure(FORECAST, None, "seconds", about)
        return
    words = ("--topology", f"{chip}-1", "--profile", "--against", str(directory))
    planned = _plan(*arguments, *words, changes={"JAX_PLATFORMS": "cpu"})
    yield from _memory("planned without the device", planned, peak)
    lowest = _value(planned, "roofline of a step", "lowest step time")
    yield _beside("lowest step time by plan", lowest, measured)
    yield _beside(FORECAST, _value(planned, "forecast of a step", "at the rooflines of its ops"), measured)
    for figure, said in planned.get("against a run", {}).items():
        yield Figure(f"plan --against: {figure}", said["value"], said["unit"], said["note"])


def _plan(*words: str, changes: dict[str, str] | None = None) -> Any:
    """The sections of a plan, of one that would not run too."""
    _, output = run_module("runner", "plan", *words, "--json", codes=(0, 2), changes=changes)
    return json.loads(output)["plan"]


def _value(plan: Any, section: str, name: str) -> float | None:
    found = plan.get(section, {}).get(name)
    return None if found is None else float(found["value"])


def _beside(title: str, forecast: float | None, measured: float) -> Figure:
    about = f"measured is {measured / forecast:.2f} times that" if forecast else "plan does not say"
    return Figure(title, forecast, "seconds", about)


def _memory(title: str, plan: Any, peak: int | None) -> Iterator[Figure]:
    needed = _value(plan, "memory of a device", "needed")
    off = f"{needed / peak - 1:+.1%} of the measured peak" if needed and peak else ""
    yield Figure(f"memory {title}", needed, "bytes", off)
