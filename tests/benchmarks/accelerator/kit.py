"""Runs sections one after another, each in a process of its own that is ended in time, and keeps what each has seen.

1. Whatever a section does (raise, crash, hang, fill the memory), it is a recorded result, and the next one begins.
2. The JSON is replaced whenever a figure has come: what is killed, cut off or switched off has left all it has seen.
3. When a section is over nothing that it has started is left, so that the device is free for the next.
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
from tests.benchmarks.accelerator.agenda import ends
from tests.benchmarks.accelerator.result import Figure, Machine, Part, Results, read_figures
from tests.benchmarks.accelerator.size import ROOT, Setting
from tests.benchmarks.accelerator.turn import tail
from tests.support import leftover

_POLL_SECONDS = 0.1
_MACHINE_SECONDS = 60.0


class Measured(Protocol):
    """What the kit needs of a section."""

    @property
    def name(self) -> str:
        """As the results call it."""

    @property
    def share(self) -> float:
        """Of the minutes."""

    def command(self, setting: Setting, figures: Path) -> list[str]:
        """What measures it, and appends what it sees to the file `figures`."""


@dataclass(frozen=True)
class Kit:
    """One run of the kit.

    Attributes:
        sections: in their order.
        minutes: for all of it.
        size: which of `SIZES`; None: full on an accelerator, tiny on a CPU.
        torch_python: an interpreter that may have torch.
        out: the JSON.
        variables: what every process is started with.
    """

    sections: Sequence[Measured]
    minutes: float
    size: str | None
    torch_python: str
    out: Path
    variables: Mapping[str, str]

    def run(self, commit: str) -> Results:
        """Measure everything, and say each figure as it comes."""
        began = time.monotonic()
        waiting = tuple(Part(section.name) for section in self.sections)
        results = Results(commit, self.size or "", self.minutes, time.time(), parts=waiting)
        results.write(self.out)
        with tempfile.TemporaryDirectory(prefix="accelerator-kit-", ignore_cleanup_errors=True) as scratch:
            variables = {"RUNNER_CACHE": str(Path(scratch) / "cache"), **self.variables}
            machine = look_at_machine(variables, min(_MACHINE_SECONDS, 60 * self.minutes))
            if isinstance(machine, str):
                results = replace(results, problem=machine)
                say(f"no device: {machine}")
            else:
                results = replace(results, machine=machine)
                say(f"device: {machine.num_devices} x {machine.device}")
            size = self.size or ("full" if results.machine and results.machine.device != "cpu" else "tiny")
            results = replace(results, sizes=size)
            results.write(self.out)
            left = 60 * self.minutes - (time.monotonic() - began)
            device = "" if isinstance(machine, str) else machine.device
            first = time.monotonic()
            for section, end in zip(self.sections, ends([one.share for one in self.sections], left), strict=True):
                directory = Path(scratch) / section.name.replace(" ", "_")
                directory.mkdir()
                setting = Setting(size, str(directory), device, self.torch_python)
                results = self._run_one(section, setting, first + end, results, variables)
        return results

    def _run_one(
        self, section: Measured, setting: Setting, deadline: float, results: Results, variables: Mapping[str, str]
    ) -> Results:
        """One section until `deadline`, by the monotonic clock; the results with it. One that is too late waits on."""
        if time.monotonic() >= deadline:
            say(f"{section.name}: no time is left for it")
            return results
        say(f"{section.name}: {max(deadline - time.monotonic(), 0):.0f} s at most")
        began, before = time.monotonic(), leftover.find()
        figures, log = Path(setting.scratch) / "figures.jsonl", Path(setting.scratch) / "section.log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                bind_to_parent(section.command(setting, figures)),
                cwd=ROOT,
                env=dict(variables),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        part = Part(section.name, "cut", problem="the kit ended before it")
        results = results.with_part(part)
        results.write(self.out)
        try:
            while part.status == "cut" and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                code, seen = process.poll(), read_figures(figures)  # in this order: what has ended has written all
                if code is None and len(seen) == len(part.figures):
                    continue
                for figure in seen[len(part.figures) :]:
                    say(f"  {line(figure)}")
                part = replace(part, seconds=round(time.monotonic() - began, 1), figures=seen)
                if code is not None:
                    part = replace(part, status="failed" if code else "done", problem=why(code, log))
                results = results.with_part(part)
                results.write(self.out)
        finally:
            process.kill()
            process.wait()
            leftover.end_all_but(before)
        if part.status == "cut":
            seconds = round(time.monotonic() - began, 1)
            part = replace(part, seconds=seconds, problem=f"cut off after its {seconds:.0f} s")
            results = results.with_part(part)
            results.write(self.out)
        say(f"{section.name}: {part.status} after {part.seconds:.0f} s{': ' if part.problem else ''}{part.problem}")
        return results


def look_at_machine(variables: Mapping[str, str], seconds: float) -> Machine | str:
    """The machine as jax sees it, or why it does not."""
    command = bind_to_parent([sys.executable, "-m", "tests.benchmarks.accelerator.machine"])
    try:
        found = subprocess.run(
            command, cwd=ROOT, env=dict(variables), capture_output=True, text=True, timeout=seconds, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return f"jax does not start within {seconds:.0f} s"
    if found.returncode:
        return f"jax does not start: {tail(found.stderr)}"
    return Machine(**json.loads(found.stdout.strip().splitlines()[-1]))


def why(code: int, log: Path) -> str:
    """How a section ended, and the end of what it has printed; empty if it is well."""
    if code == 0:
        return ""
    return f"ended with {code}: {tail(log.read_text(errors='replace'))}"


def line(figure: Figure) -> str:
    """For a person who watches."""
    value = f"{figure.value:.6g}" if isinstance(figure.value, float) else str(figure.value)
    return f"{figure.name}: {value} {figure.unit}".rstrip() + (f"  ({figure.note})" if figure.note else "")


def say(text: str) -> None:
    """At once, since who reads it may cut the kit off."""
    print(text, flush=True)


def variables_of(carried: Path | None) -> dict[str, str]:
    """What every process is started with: this checkout first, then what was carried, then what is there."""
    paths = [str(ROOT), *([str(carried)] if carried else []), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
