"""Results of a run: figures by section, measured on one machine, stored as one JSON file."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

FORMAT = 1
Unit = Literal["", "seconds", "bytes", "share", "times"]
# cut: the section was killed at its time limit, or the kit was stopped. waiting: the section has not started.
Status = Literal["done", "failed", "cut", "waiting"]


@dataclass(frozen=True)
class Figure:
    """One measured value.

    Attributes:
        value: None if it could not be measured; `note` then gives the reason.
    """

    name: str
    value: float | bool | str | None
    unit: Unit = ""
    note: str = ""


@dataclass(frozen=True)
class SectionResult:
    """Result of one section, possibly still running.

    Attributes:
        seconds: run time so far.
        figures: figures that the section has yielded so far, also if it failed later.
        problem: reason why it did not complete; empty if it did.
    """

    name: str
    status: Status = "waiting"
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """Machine on which the figures were measured.

    Attributes:
        device: device kind, as reported by JAX.
        memory_bytes: memory of one device that JAX may allocate; None if the backend does not report it.
        versions: versions of the installed packages, by name.
    """

    device: str
    num_devices: int
    memory_bytes: int | None
    num_cpus: int
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Results:
    """Results of one run of the kit.

    Attributes:
        size: key of `SIZES`; `sizes` in the JSON.
        time: start of the run, in Unix seconds.
        machine: None if JAX did not start; `problem` then gives the reason.
        sections: results in the order of execution; `parts` in the JSON.
    """

    commit: str
    size: str
    minutes: float
    time: float
    machine: Machine | None = None
    problem: str = ""
    sections: tuple[SectionResult, ...] = ()

    def with_section(self, section: SectionResult) -> "Results":
        """Return a copy in which `section` replaces the result of the same name."""
        return replace(self, sections=tuple(section if section.name == old.name else old for old in self.sections))

    def write(self, path: Path) -> None:
        """Replace the file atomically, so that a kill during the write leaves the previous results."""
        content = {"format": FORMAT}
        names = {"size": "sizes", "sections": "parts"}
        content |= {names.get(name, name): value for name, value in asdict(self).items()}
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(path)


def read_results(path: Path) -> Results:
    """Read a file that `Results.write` has written.

    Raises:
        ValueError: the file has another format.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: not results of the accelerator kit in format {FORMAT}")
    try:
        sections = tuple(
            SectionResult(**part | {"figures": tuple(Figure(**figure) for figure in part["figures"])})
            for part in content.pop("parts")
        )
        size, machine = content.pop("sizes"), content.pop("machine")
        machine = None if machine is None else Machine(**machine)
        return Results(**content, size=size, machine=machine, sections=sections)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: not results of the accelerator kit: {error}") from error


def append_figure(path: Path, figure: Figure) -> None:
    """Append one figure to the figures file of a running section."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> tuple[Figure, ...]:
    """Return the figures in the figures file of a section, up to the first incomplete line; none without a file."""
    figures: list[Figure] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            figures.append(Figure(**json.loads(line)))
        except (ValueError, TypeError):
            break
    return tuple(figures)
