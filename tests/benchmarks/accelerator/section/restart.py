"""kill -9 to the first new step on this device, by phase, over a hand-written program: `tests.benchmarks.restart`."""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import restart
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.size import Setting

SPEC = "specs/gpt_nano.yaml"


def measure(setting: Setting) -> Iterator[Figure]:
    """With a warm compile cache; each round gives its whole, so that one that is cut off is worth what came before."""
    rows, floors = [], []
    for number in range(1, setting.sizes.rounds + 1):
        with tempfile.TemporaryDirectory(dir=setting.scratch) as scratch:
            rows.append(restart.measure(SPEC, Path(scratch), 1, cold=False))
        with tempfile.TemporaryDirectory(dir=setting.scratch) as scratch:
            floors.append(restart.measure_floor(Path(scratch), 1, cold=False))
        about = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in rows[-1].items())
        yield Figure(f"round {number}: kill to first new step", sum(rows[-1].values()), "seconds", about)
        yield Figure(f"round {number}: by hand", floors[-1], "seconds", "the program that a hand loop needs")
    ratio = statistics.median(sum(row.values()) / floor for row, floor in zip(rows, floors, strict=True))
    yield Figure("restart over its floor", ratio, "times", f"median of {len(rows)}")
