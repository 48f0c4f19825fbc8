"""What was seen: figures in sections, on one machine, in one JSON that is read back whole or refused."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

FORMAT = 1
Unit = Literal["", "seconds", "bytes", "share", "times"]
# cut: its time was over. waiting: its turn has not come, or never came.
Status = Literal["done", "failed", "cut", "waiting"]


@dataclass(frozen=True)
class Figure:
    """One thing that was seen; None where it could not be, and `note` says why."""

    name: str
    value: float | bool | str | None
    unit: Unit = ""
    note: str = ""


@dataclass(frozen=True)
class Part:
    """One section: how it ended, and what it has seen until then. `problem` is why it failed."""

    name: str
    status: Status = "waiting"
    seconds: float = 0.0
    figures: tuple[Figure, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Machine:
    """Where it was seen.

    Attributes:
        device: the kind that jax gives it.
        memory_bytes: what jax may take of one device, where the backend tells.
        versions: of the packages that are there, by name.
    """

    device: str
    num_devices: int
    memory_bytes: int | None
    num_cpus: int
    python: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Results:
    """One run of the kit. `machine` is None, with a `problem`, where jax did not start."""

    commit: str
    sizes: str
    minutes: float
    time: float  # when it began, Unix seconds
    machine: Machine | None = None
    problem: str = ""
    parts: tuple[Part, ...] = ()

    def with_part(self, part: Part) -> "Results":
        """The same with one section as it stands now."""
        return replace(self, parts=tuple(part if part.name == other.name else other for other in self.parts))

    def write(self, path: Path) -> None:
        """Replace the file at once, so that who is killed while writing leaves the one before."""
        scratch = path.with_name(path.name + ".part")
        scratch.write_text(json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        scratch.replace(path)


def read_results(path: Path) -> Results:
    """What `write` has written. Raises `ValueError` for another format."""
    content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise ValueError(f"{path}: got no results of the kit in format {FORMAT}")
    try:
        parts = tuple(
            Part(**part | {"figures": tuple(Figure(**figure) for figure in part["figures"])})
            for part in content.pop("parts")
        )
        machine = content.pop("machine")
        return Results(**content, machine=None if machine is None else Machine(**machine), parts=parts)
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: got no results of the kit: {error}") from error


def write_figure(path: Path, figure: Figure) -> None:
    """Append one figure to the file of a section that is running."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(figure)) + "\n")


def read_figures(path: Path) -> tuple[Figure, ...]:
    """The whole lines of that file; one that was cut off, and all after it, is left out."""
    return tuple(_figures(path.read_bytes())) if path.exists() else ()


def _figures(content: bytes) -> Iterator[Figure]:
    for line in content.splitlines():
        try:
            yield Figure(**json.loads(line))
        except (ValueError, TypeError):
            return
