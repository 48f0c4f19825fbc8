"""One number of a plan with its unit and how it is known, and how a plan is shown: a table for people, or JSON.

What a plan tells on standard error while it works, so that nobody looks at a silent terminal for minutes.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.console import warn

# counted: arithmetic on the spec, the shapes and the data. compiled: by the compiled program's own figures.
# assumed: rests on a maker's peak figure, or on what the note says. measured: done here, and timed.
Basis = Literal["counted", "compiled", "assumed", "measured"]
Unit = Literal["", "bytes", "seconds", "FLOP", "share", "text"]

_SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")),
    "FLOP": (
        (1e21, "ZFLOP"),
        (1e18, "EFLOP"),
        (1e15, "PFLOP"),
        (1e12, "TFLOP"),
        (1e9, "GFLOP"),
        (1e6, "MFLOP"),
        (1, "FLOP"),
    ),
    "seconds": ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
}


@dataclass(frozen=True)
class Figure:
    """What is said of one thing. `note` tells how it comes about, or what is assumed."""

    name: str
    value: float | int | str
    unit: Unit
    basis: Basis
    note: str = ""

    @property
    def text(self) -> str:
        """The value for a person."""
        return self.value if isinstance(self.value, str) else format_amount(self.value, self.unit)


def format_amount(value: float, unit: Unit) -> str:
    """A number for a person, in the scale that suits it."""
    if unit == "share":
        return f"{100 * value:.1f}%"
    for scale, name in _SCALES.get(unit, ()):
        if abs(value) >= scale:
            return f"{value / scale:,.{0 if scale == 1 and unit != 'seconds' else 2}f} {name}"
    if unit in _SCALES:
        return f"{value:,.0f} {_SCALES[unit][-1][1]}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


@dataclass
class Section:
    """Figures that belong together."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(self, name: str, value: float | int | str, unit: Unit, basis: Basis, note: str = "") -> None:
        """One figure more."""
        self.figures.append(Figure(name, value, unit, basis, note))

    def __getitem__(self, name: str) -> Any:
        """The value of a figure."""
        return next(figure.value for figure in self.figures if figure.name == name)


def format_sections(sections: Iterable[Section]) -> list[str]:
    """A table for people: name, value, basis, note."""
    sections = [section for section in sections if section.figures]
    names = max(len(figure.name) for section in sections for figure in section.figures)
    lines: list[str] = []
    for section in sections:
        values = (
            max(len(figure.text) for figure in section.figures if figure.unit != "text") if _numbers(section) else 0
        )
        lines += ["", section.title]
        for figure in section.figures:
            if figure.unit == "text":
                lines.append(f"  {figure.name:{names}}  {figure.text}{_note(figure)}")
            else:
                lines.append(f"  {figure.name:{names}}  {figure.text:>{values}}  {figure.basis}{_note(figure)}")
    return [line.rstrip() for line in lines[1:]]


def _numbers(section: Section) -> bool:
    return any(figure.unit != "text" for figure in section.figures)


def _note(figure: Figure) -> str:
    return f": {figure.note}" if figure.note else ""


def sections_to_json(sections: Iterable[Section]) -> dict[str, Any]:
    """For scripts: section -> name -> value, unit, basis, note."""
    return {
        section.title: {
            figure.name: {"value": figure.value, "unit": figure.unit, "basis": figure.basis, "note": figure.note}
            for figure in section.figures
        }
        for section in sections
    }


_EVERY_SECONDS = 10.0


@contextlib.contextmanager
def report_progress(what: str) -> Iterator[None]:
    """Say that `what` begins, and from time to time how long it has taken. A compiler lets other threads run."""
    began, is_over = time.monotonic(), threading.Event()

    def tell() -> None:
        while not is_over.wait(_EVERY_SECONDS):
            warn(f"{what}: {time.monotonic() - began:.0f} s")

    warn(f"{what} ...")
    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
