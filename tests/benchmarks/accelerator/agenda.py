"""Which sections there are, in the order of their worth, and which share of the minutes each may take."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from json import dumps
from pathlib import Path

from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.size import Setting


@dataclass(frozen=True)
class Section:
    """A module of `section`, with what its `measure` takes after the setting.

    `share` is of all minutes, relative to the other sections'. What one leaves over the next may take.
    """

    name: str
    module: str
    share: float
    arguments: tuple[str, ...] = ()

    def command(self, setting: Setting, figures: Path) -> list[str]:
        """Measure in a process of its own, which appends its figures to that file."""
        module = "tests.benchmarks.accelerator.section"
        return [sys.executable, "-m", module, self.name, dumps(asdict(setting)), str(figures)]

    def measure(self, setting: Setting) -> Iterator[Figure]:
        """What the module yields. Imports it, and so jax where it needs that."""
        module = import_module(f"tests.benchmarks.accelerator.section.{self.module}")
        figures: Iterator[Figure] = module.measure(setting, *self.arguments)
        return figures


SECTIONS = (
    Section("theorems", "theorem", 0.22),
    Section("speed of gpt2_124m", "speed", 0.20, ("gpt2_124m",)),
    Section("determinism", "determinism", 0.16, ("gpt2_124m",)),
    Section("plan", "forecast", 0.13, ("gpt2_124m",)),
    Section("save", "save_stall", 0.06),
    Section("speed of llama_1b", "speed", 0.15, ("llama_1b",)),
    Section("restart", "restart", 0.08),
)


def chosen(words: Sequence[str]) -> tuple[Section, ...]:
    """The sections whose name begins with one of these, by default all. Raises `ValueError` for a strange word."""
    for word in words:
        if not any(section.name.startswith(word) for section in SECTIONS):
            names = ", ".join(repr(section.name) for section in SECTIONS)
            raise ValueError(f"--sections: got {word!r}, needs the beginning of one of {names}")
    return tuple(section for section in SECTIONS if not words or section.name.startswith(tuple(words)))


def ends(shares: Sequence[float], seconds: float) -> list[float]:
    """When each section must be over, in seconds from the first one's beginning."""
    whole = sum(shares)
    return [seconds * sum(shares[: number + 1]) / whole for number in range(len(shares))]
