"""Sections of the kit: their order, their shares of the time limit, and one module per kind of section.

Each module has a function `measure(config, ...)` that yields figures as soon as they are measured, the most important
first. A section that raises an exception has failed; the figures that it has yielded are kept.

`python -m tests.benchmarks.accelerator.sections NAME CONFIG FILE` runs one section in the process of its own that the
kit starts for it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from json import dumps
from pathlib import Path

from tests.benchmarks.accelerator.config import SectionConfig
from tests.benchmarks.accelerator.result import Figure


@dataclass(frozen=True)
class Section:
    """Section of the kit.

    Attributes:
        module: module of this package that measures it.
        share: share of the time limit, relative to the shares of the other sections. Time that a section leaves over
            passes to the next ones.
        arguments: arguments of the module's `measure` after the configuration.
    """

    name: str
    module: str
    share: float
    arguments: tuple[str, ...] = ()

    def make_command(self, config: SectionConfig, figures: Path) -> list[str]:
        """Return the command that measures the section and appends its figures to the file `figures`."""
        return [sys.executable, "-m", __name__, self.name, dumps(asdict(config)), str(figures)]

    def measure(self, config: SectionConfig) -> Iterator[Figure]:
        """Yield the figures of the section. Imports its module, and with it JAX."""
        module = import_module(f"{__name__}.{self.module}")
        figures: Iterator[Figure] = module.measure(config, *self.arguments)
        return figures


# In the order of execution, by importance.
SECTIONS = (
    Section("theorems", "resume", 0.22),
    Section("speed of gpt2_124m", "speed", 0.20, ("gpt2_124m",)),
    Section("determinism", "determinism", 0.16, ("gpt2_124m",)),
    Section("plan", "plan", 0.13, ("gpt2_124m",)),
    Section("save", "save", 0.06),
    Section("speed of llama_1b", "speed", 0.15, ("llama_1b",)),
    Section("restart", "restart", 0.08),
)


def select_sections(prefixes: Sequence[str]) -> tuple[Section, ...]:
    """Return the sections whose name begins with one of `prefixes`; all sections if there are none.

    Raises:
        ValueError: no section begins with one of the prefixes.
    """
    for prefix in prefixes:
        if not any(section.name.startswith(prefix) for section in SECTIONS):
            names = ", ".join(repr(section.name) for section in SECTIONS)
            raise ValueError(f"--sections: {prefix!r} matches no section; use a prefix of {names}")
    return tuple(section for section in SECTIONS if not prefixes or section.name.startswith(tuple(prefixes)))
