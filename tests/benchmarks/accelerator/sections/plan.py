"""Section `plan`: memory and step time predicted by `python -m runner plan`, compared with a measured run."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runner.accelerator import CHIPS, find_chip
from runner.storage import parse_lines
from tests.benchmarks.accelerator.config import SectionConfig
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.sections.speed import write_tokens
from tests.benchmarks.accelerator.worker import run_module

FORECAST = "forecast of a step, at the rooflines of its ops"
_NUM_ROWS, _STEPS_PER_ROW = 3, 10  # rows of metrics after the first, which is not measured


def measure(config: SectionConfig, name: str) -> Iterator[Figure]:
    """Run the model, then plan it with the present device, and without a device for a chip of the same kind."""
    model, scratch = config.sizes.models[name], Path(config.scratch)
    directory, total_steps = scratch / "run", (_NUM_ROWS + 1) * _STEPS_PER_ROW
    logging = f"logging.every_steps={_STEPS_PER_ROW}"
    arguments = model.make_arguments(directory, write_tokens(model, scratch), total_steps, logging)
    run_module("runner", *arguments)
    rows = parse_lines((directory / "metrics.jsonl").read_bytes())[1:]
    measured = statistics.median(row["perf/step_seconds_median"] for row in rows)
    peak = max((row["perf/peak_bytes"] for row in rows if "perf/peak_bytes" in row), default=None)
    yield Figure("seconds of a step, measured", measured, "seconds", f"median of {len(rows)} rows")
    note = "" if peak is not None else "not counted on this device"
    yield Figure("peak memory, measured", peak, "bytes", note)
    yield _make_memory_figure("planned on the device", _run_plan(*arguments), peak)
    chip = next((known for known, chip in CHIPS.items() if chip == find_chip(config.device) and chip.speeds), None)
    if chip is None:
        yield Figure(FORECAST, None, "seconds", f"the peak figures of {config.device} are not known")
        return
    words = ("--topology", f"{chip}-1", "--profile", "--against", str(directory))
    plan = _run_plan(*arguments, *words, changes={"JAX_PLATFORMS": "cpu"})
    yield _make_memory_figure("planned without the device", plan, peak)
    lowest = _get_value(plan, "roofline of a step", "lowest step time")
    yield _make_time_figure("lowest step time by plan", lowest, measured)
    forecast = _get_value(plan, "forecast of a step", "at the rooflines of its ops")
    yield _make_time_figure(FORECAST, forecast, measured)
    for figure, content in plan.get("against a run", {}).items():
        yield Figure(f"plan --against: {figure}", content["value"], content["unit"], content["note"])


def _run_plan(*words: str, changes: dict[str, str] | None = None) -> Any:
    """Return the sections of the plan. Exit code 2, for a job that would not run, is accepted."""
    _, output = run_module("runner", "plan", *words, "--anyway", "--json", codes=(0, 2), changes=changes)
    return json.loads(output)["plan"]


def _get_value(plan: Any, section: str, name: str) -> float | None:
    value = plan.get(section, {}).get(name)
    return None if value is None else float(value["value"])


def _make_time_figure(title: str, predicted: float | None, measured: float) -> Figure:
    note = f"measured is {measured / predicted:.2f} times that" if predicted else "not part of the plan"
    return Figure(title, predicted, "seconds", note)


def _make_memory_figure(title: str, plan: Any, peak: int | None) -> Figure:
    needed = _get_value(plan, "memory of a device", "needed")
    note = f"{needed / peak - 1:+.1%} of the measured peak" if needed and peak else ""
    return Figure(f"memory {title}", needed, "bytes", note)
