"""Figures of a plan with their units and basis, formatted as a table or as JSON; progress messages."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from runner.console import format_dollars, warn

# counted: arithmetic on the spec, the shapes and the data. compiled: reported by the compiled program. assumed: rests
# on a manufacturer's peak figure, or on what the note says. measured: done on this machine, and timed.
Basis = Literal["counted", "compiled", "assumed", "measured"]
Unit = Literal["", "bytes", "seconds", "FLOP", "share", "dollars", "text"]

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

_PROGRESS_SECONDS = 10.0


@dataclass(frozen=True)
class Figure:
    """Named value of a plan."""

    name: str  # key in the JSON form, which scripts rely on
    value: float | int | str  # number, or text for the unit `text`
    unit: Unit
    basis: Basis  # origin of the value, see `Basis`
    note: str = ""  # derivation of the value, or its assumptions
    label: str = ""  # name in the table, if it differs from the key

    @property
    def title(self) -> str:
        """Name in the table."""
        return self.label or self.name

    @property
    def text(self) -> str:
        """Value in a readable scale."""
        return self.value if isinstance(self.value, str) else format_amount(self.value, self.unit)


def format_amount(value: float, unit: Unit) -> str:
    """Return a number with its unit, in a readable scale."""
    if unit == "share":
        return f"{100 * value:.1f}%"
    if unit == "dollars":
        return format_dollars(value)
    # The first scale that gives a value of at least one.
    for scale, name in _SCALES.get(unit, ()):
        if abs(value) >= scale:
            return f"{value / scale:,.{0 if scale == 1 and unit != 'seconds' else 2}f} {name}"
    # Zero, and values below the smallest scale.
    if unit in _SCALES:
        return f"{value:,.0f} {_SCALES[unit][-1][1]}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


@dataclass
class Section:
    """Titled group of figures."""

    title: str
    figures: list[Figure] = field(default_factory=list)

    def add(
        self, name: str, value: float | int | str, unit: Unit, basis: Basis, note: str = "", *, label: str = ""
    ) -> None:
        """Append a figure."""
        self.figures.append(Figure(name, value, unit, basis, note, label))

    def __getitem__(self, name: str) -> Any:
        """Return the value of a figure by its key."""
        return next(figure.value for figure in self.figures if figure.name == name)


def format_sections(sections: Iterable[Section]) -> list[str]:
    """Return a table of all sections as lines: name, value, basis, note."""
    # A section without figures has no title either.
    sections = [section for section in sections if section.figures]
    name_width = max(len(figure.title) for section in sections for figure in section.figures)
    lines: list[str] = []
    for section in sections:
        # Numbers of a section are aligned to the right; texts stand apart from them.
        value_width = max((len(figure.text) for figure in section.figures if figure.unit != "text"), default=0)
        lines += ["", section.title]
        for figure in section.figures:
            note = f": {figure.note}" if figure.note else ""
            if figure.unit == "text":
                lines.append(f"  {figure.title:{name_width}}  {figure.text}{note}")
            else:
                lines.append(f"  {figure.title:{name_width}}  {figure.text:>{value_width}}  {figure.basis}{note}")
    return [line.rstrip() for line in lines[1:]]


def sections_to_json(sections: Iterable[Section]) -> dict[str, Any]:
    """Return all sections as section -> name -> value, unit, basis and note."""
    return {
        section.title: {
            figure.name: {"value": figure.value, "unit": figure.unit, "basis": figure.basis, "note": figure.note}
            for figure in section.figures
        }
        for section in sections
    }


@contextlib.contextmanager
def report_progress(activity: str) -> Iterator[None]:
    """Print on standard error that an activity begins and, from a thread, repeatedly how long it has taken."""
    began, is_over = time.monotonic(), threading.Event()

    def print_elapsed() -> None:
        while not is_over.wait(_PROGRESS_SECONDS):
            warn(f"{activity}: {time.monotonic() - began:.0f} s")

    warn(f"{activity} ...")
    thread = threading.Thread(target=print_elapsed, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
