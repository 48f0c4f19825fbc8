"""One section, in the process that the kit gives it: its arguments are NAME SETTING FILE."""

import json
import sys
from pathlib import Path

from tests.benchmarks.accelerator.agenda import SECTIONS
from tests.benchmarks.accelerator.result import write_figure
from tests.benchmarks.accelerator.size import Setting


def main(name: str, setting: str, figures: str) -> None:
    (section,) = (section for section in SECTIONS if section.name == name)
    for figure in section.measure(Setting(**json.loads(setting))):
        write_figure(Path(figures), figure)


if __name__ == "__main__":
    main(*sys.argv[1:])
