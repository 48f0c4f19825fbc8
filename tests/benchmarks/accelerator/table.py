"""The Markdown table of what was seen: `python -m tests.benchmarks.accelerator.table results.json`."""

import argparse
import time
from pathlib import Path

from runner.plan.figures import format_amount
from tests.benchmarks.accelerator.result import Figure, Part, Results, read_results

_HEAD = "| section | figure | seen | note |\n|---|---|---|---|"
_ENDS = {"failed": "failed", "cut": "its time was over", "waiting": "its turn never came"}


def render(results: Results) -> str:
    """A line on where and how, then a row a figure; a section that is not whole says so in a row of its own."""
    rows = [row for part in results.parts for row in _rows(part)]
    return "\n".join([_where(results), "", _HEAD, *rows]) + "\n"


def _where(results: Results) -> str:
    day = time.strftime("%Y-%m-%d", time.gmtime(results.time))
    about = f"{day}, commit {results.commit[:12]}{'+' if results.commit.endswith('+') else ''}, {results.sizes} sizes"
    if results.machine is None:
        return f"No device: {_cell(results.problem)} ({about})"
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    memory = "" if machine.memory_bytes is None else f" ({format_amount(machine.memory_bytes, 'bytes')} for jax)"
    what = f"**{machine.num_devices} x {machine.device}**{memory}, {machine.num_cpus} CPUs"
    return f"{what}; {about}; Python {machine.python}, {versions}."


def _rows(part: Part) -> list[str]:
    rows = [
        f"| {part.name} | {_cell(figure.name)} | {shown(figure)} | {_cell(figure.note)} |" for figure in part.figures
    ]
    if part.status != "done":
        rows.append(f"| {part.name} | | {_ENDS[part.status]} | {_cell(part.problem)} |")
    return rows


def shown(figure: Figure) -> str:
    """The value for a person."""
    value = figure.value
    if value is None:
        return "not seen"
    if isinstance(value, bool):
        return "yes" if value else "**no**"
    if isinstance(value, str):
        return _cell(value)
    return f"{value:.2f} times" if figure.unit == "times" else format_amount(value, figure.unit)


def _cell(text: str) -> str:
    """The last line alone, which is what an error says."""
    return text.strip().splitlines()[-1].replace("|", "\\|") if text.strip() else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("results", type=Path)
    print(render(read_results(parser.parse_args().results)), end="")


if __name__ == "__main__":
    main()
