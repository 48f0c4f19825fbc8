"""Markdown table of results: `python -m tests.benchmarks.accelerator.table results.json`."""

import argparse
import time
from pathlib import Path

from runner.plan.figures import format_amount
from tests.benchmarks.accelerator.result import Figure, Results, SectionResult, read_results

_HEADER = "| section | figure | value | note |\n|---|---|---|---|"
_INCOMPLETE = {"failed": "failed", "cut": "cut off", "waiting": "not run"}


def render(results: Results) -> str:
    """Return a line that describes the run, and a table with a row per figure and per incomplete section."""
    rows = [row for section in results.sections for row in _format_rows(section)]
    return "\n".join([_describe_run(results), "", _HEADER, *rows]) + "\n"


def _describe_run(results: Results) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(results.time))
    run = f"{day}, commit {results.commit[:12]}{'+' if results.commit.endswith('+') else ''}, {results.size} sizes"
    if results.machine is None:
        return f"No device: {_format_cell(results.problem)} ({run})"
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    memory = "" if machine.memory_bytes is None else f" ({format_amount(machine.memory_bytes, 'bytes')} for jax)"
    host = f"**{machine.num_devices} x {machine.device}**{memory}, {machine.num_cpus} CPUs"
    return f"{host}; {run}; Python {machine.python}, {versions}."


def _format_rows(section: SectionResult) -> list[str]:
    rows = [
        f"| {section.name} | {_format_cell(figure.name)} | {format_value(figure)} | {_format_cell(figure.note)} |"
        for figure in section.figures
    ]
    if section.status != "done":
        rows.append(f"| {section.name} | | {_INCOMPLETE[section.status]} | {_format_cell(section.problem)} |")
    return rows


def format_value(figure: Figure) -> str:
    """Format the value of a figure with its unit."""
    value = figure.value
    if value is None:
        return "not measured"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, str):
        return _format_cell(value)
    return f"{value:.2f} times" if figure.unit == "times" else format_amount(value, figure.unit)


def _format_cell(text: str) -> str:
    """Return the last line of `text` for a table cell. The last line of a traceback is the error message."""
    return text.strip().splitlines()[-1].replace("|", "\\|") if text.strip() else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    print(render(read_results(parser.parse_args().results)), end="")


if __name__ == "__main__":
    main()
