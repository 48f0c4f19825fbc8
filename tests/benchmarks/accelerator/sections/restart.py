"""Section `restart`: time from kill -9 to the first new step, relative to a hand-written program.

The measurement is that of `tests.benchmarks.restart`.
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import restart
from tests.benchmarks.accelerator.config import SectionConfig
from tests.benchmarks.accelerator.result import Figure

SPEC = "specs/gpt_nano.yaml"


def measure(config: SectionConfig) -> Iterator[Figure]:
    """Measure restarts with a warm compilation cache.

    Every round yields both of its times, so that a section that is cut off keeps the earlier rounds.
    """
    rows, floors = [], []
    for number in range(1, config.sizes.rounds + 1):
        with tempfile.TemporaryDirectory(dir=config.scratch) as scratch:
            rows.append(restart.measure(SPEC, Path(scratch), 1, cold=False))
        with tempfile.TemporaryDirectory(dir=config.scratch) as scratch:
            floors.append(restart.measure_floor(Path(scratch), 1, cold=False))
        note = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in rows[-1].items())
        yield Figure(f"round {number}: kill to first new step", sum(rows[-1].values()), "seconds", note)
        yield Figure(f"round {number}: by hand", floors[-1], "seconds", "the program that a hand loop needs")
    ratio = statistics.median(sum(row.values()) / floor for row, floor in zip(rows, floors, strict=True))
    yield Figure("restart over its floor", ratio, "times", f"median of {len(rows)}")
