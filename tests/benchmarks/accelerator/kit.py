"""Run the sections one after the other, each in a subprocess with a time limit, and record their figures.

1. Every outcome of a section (an exception, a crash, a hang, exhausted memory) is recorded, and the next section runs.
2. The results file is replaced after every new figure, so no figure is lost if the kit itself is killed.
3. When a section ends, all processes that it has started are killed, so that the next one has the device for itself.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from runner.process import bind_to_parent
from tests.benchmarks.accelerator.config import ROOT, SectionConfig
from tests.benchmarks.accelerator.result import Figure, Machine, Results, SectionResult, read_figures
from tests.benchmarks.accelerator.worker import get_tail
from tests.support import leftover

_POLL_SECONDS = 0.1
_MACHINE_SECONDS = 60.0


class RunnableSection(Protocol):
    """Section, as the kit uses it."""

    @property
    def name(self) -> str:
        """Name in the results."""

    @property
    def share(self) -> float:
        """Share of the total time, relative to the shares of the other sections."""

    def make_command(self, config: SectionConfig, figures: Path) -> list[str]:
        """Return the command that measures the section and appends its figures to the file `figures`."""


@dataclass(frozen=True)
class Kit:
    """One run of the kit.

    Attributes:
        sections: sections in the order of execution.
        minutes: time limit for all sections together.
        size: key of `SIZES`; None is full on an accelerator and tiny on a CPU.
        torch_python: Python interpreter that may have torch.
        out: results file.
        environment: environment variables of every subprocess.
    """

    sections: Sequence[RunnableSection]
    minutes: float
    size: str | None
    torch_python: str
    out: Path
    environment: Mapping[str, str]

    def run(self, commit: str) -> Results:
        """Run all sections, print each figure when it is measured, and return the results."""
        began = time.monotonic()
        waiting = tuple(SectionResult(section.name) for section in self.sections)
        results = Results(commit, self.size or "", self.minutes, time.time(), sections=waiting)
        results.write(self.out)
        with tempfile.TemporaryDirectory(prefix="accelerator-kit-", ignore_cleanup_errors=True) as scratch:
            environment = {"RUNNER_CACHE": str(Path(scratch) / "cache"), **self.environment}
            machine = query_machine(environment, min(_MACHINE_SECONDS, 60 * self.minutes))
            if isinstance(machine, str):
                results = replace(results, problem=machine)
                _print(f"no device: {machine}")
            else:
                results = replace(results, machine=machine)
                _print(f"device: {machine.num_devices} x {machine.device}")
            size = self.size or ("full" if results.machine and results.machine.device != "cpu" else "tiny")
            results = replace(results, size=size)
            results.write(self.out)
            remaining_seconds = 60 * self.minutes - (time.monotonic() - began)
            device = "" if isinstance(machine, str) else machine.device
            first = time.monotonic()
            deadlines = compute_deadlines([section.share for section in self.sections], remaining_seconds)
            for section, deadline in zip(self.sections, deadlines, strict=True):
                directory = Path(scratch) / section.name.replace(" ", "_")
                directory.mkdir()
                config = SectionConfig(size, str(directory), device, self.torch_python)
                results = self._run_section(section, config, first + deadline, results, environment)
        return results

    def _run_section(
        self,
        section: RunnableSection,
        config: SectionConfig,
        deadline: float,
        results: Results,
        environment: Mapping[str, str],
    ) -> Results:
        """Run one section until `deadline`, by the monotonic clock, and return `results` with its result.

        After the deadline it is not started, and its status stays `waiting`.
        """
        if time.monotonic() >= deadline:
            _print(f"{section.name}: not run: out of time")
            return results
        _print(f"{section.name}: at most {max(deadline - time.monotonic(), 0):.0f} s")
        began, before = time.monotonic(), leftover.find()
        figures_file, log = Path(config.scratch) / "figures.jsonl", Path(config.scratch) / "section.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                bind_to_parent(section.make_command(config, figures_file)),
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        # This is what the results file says if the kit is killed while the section runs.
        result = SectionResult(section.name, "cut", problem="the kit ended before it")
        results = results.with_section(result)
        results.write(self.out)
        try:
            while result.status == "cut" and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                # The exit code is read first: a process that has exited has written all its figures.
                code, figures = process.poll(), read_figures(figures_file)
                if code is None and len(figures) == len(result.figures):
                    continue
                for figure in figures[len(result.figures) :]:
                    _print(f"  {format_figure(figure)}")
                result = replace(result, seconds=round(time.monotonic() - began, 1), figures=figures)
                if code is not None:
                    result = replace(result, status="failed" if code else "done", problem=format_failure(code, log))
                results = results.with_section(result)
                results.write(self.out)
        finally:
            process.kill()
            process.wait()
            leftover.end_all_but(before)
        if result.status == "cut":
            seconds = round(time.monotonic() - began, 1)
            # What it has written since the last look, too.
            figures, problem = read_figures(figures_file), f"cut off after its {seconds:.0f} s"
            result = replace(result, seconds=seconds, figures=figures, problem=problem)
            results = results.with_section(result)
            results.write(self.out)
        problem = f": {result.problem}" if result.problem else ""
        _print(f"{section.name}: {result.status} after {result.seconds:.0f} s{problem}")
        return results


def compute_deadlines(shares: Sequence[float], seconds: float) -> list[float]:
    """Return the deadline of each section, in seconds since the start of the first one.

    A section starts as soon as the previous one has ended, so it may also use the time that earlier ones left over.
    """
    total = sum(shares)
    return [seconds * sum(shares[: number + 1]) / total for number in range(len(shares))]


def query_machine(environment: Mapping[str, str], seconds: float) -> Machine | str:
    """Return a description of the machine, or the reason why JAX did not start within `seconds`."""
    command = bind_to_parent([sys.executable, "-m", "tests.benchmarks.accelerator.machine"])
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=dict(environment), capture_output=True, text=True, timeout=seconds, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"jax does not start within {seconds:.0f} s"
    if done.returncode:
        return f"jax does not start: {get_tail(done.stderr)}"
    return Machine(**json.loads(done.stdout.strip().splitlines()[-1]))


def format_failure(code: int, log: Path) -> str:
    """Return the exit code of a section and the last lines of its log; an empty string if it succeeded."""
    if code == 0:
        return ""
    return f"ended with {code}: {get_tail(log.read_text(errors='replace'))}"


def format_figure(figure: Figure) -> str:
    value = f"{figure.value:.6g}" if isinstance(figure.value, float) else str(figure.value)
    return f"{figure.name}: {value} {figure.unit}".rstrip() + (f"  ({figure.note})" if figure.note else "")


def make_environment(unpacked: Path | None) -> dict[str, str]:
    """Return the environment variables of every subprocess.

    Modules are imported from this checkout, then from the directory of unpacked wheels, then from the current
    `PYTHONPATH`.
    """
    paths = [str(ROOT), *([str(unpacked)] if unpacked else []), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}


def _print(text: str) -> None:
    """Print a line without buffering, because the kit may be killed at any time."""
    print(text, flush=True)
