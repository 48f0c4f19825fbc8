"""Run one section and append its figures to a file; see the package."""

import json
import sys
from pathlib import Path

from tests.benchmarks.accelerator.config import SectionConfig
from tests.benchmarks.accelerator.result import append_figure
from tests.benchmarks.accelerator.sections import SECTIONS


def main(name: str, config: str, figures: str) -> None:
    (section,) = (section for section in SECTIONS if section.name == name)
    for figure in section.measure(SectionConfig(**json.loads(config))):
        append_figure(Path(figures), figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
