"""Section `save`: cost of an asynchronous save to the training loop on this device.

The measurement is that of `tests.benchmarks.save`, with windows that are longer than a save.
"""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax

from tests.benchmarks import save
from tests.benchmarks.accelerator.config import SectionConfig
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start

_WARMUP_STEPS = 3
_WINDOW_OVER_SAVE = 1.5  # length of a window, relative to a synchronous save


def measure(config: SectionConfig) -> Iterator[Figure]:
    """Measure a synchronous save, which determines the length of the windows, then the rounds of windows."""
    sizes = config.sizes
    job = start(make_job(sizes.save, Path(config.scratch) / "run", 10**6, layer_loop="scan", batch=sizes.save_batch))
    yield Figure("bytes of the state", sum(leaf.nbytes for leaf in jax.tree.leaves(job.state)), "bytes")
    save.run_steps(job, _WARMUP_STEPS, save=False)
    seconds, _ = save.run_steps(job, _WARMUP_STEPS, save=False)
    save.save_synchronously(job)
    alone = save.save_synchronously(job)
    yield Figure("a synchronous save", alone, "seconds", "the second, the loop stands still")
    num_steps = max(1, math.ceil(_WINDOW_OVER_SAVE * alone / (seconds / _WARMUP_STEPS)))
    rows = list(save.measure(job, sizes.rounds, num_steps))
    note = f"median of {len(rows)}"
    yield Figure("the loop stands still for a save", statistics.median(row.blocked for row in rows), "seconds", note)
    extra = statistics.median(row.extra for row in rows)
    note += f", of {num_steps} steps that take {statistics.median(row.plain for row in rows):.3f} s without"
    yield Figure("the loop takes longer for a save", extra, "seconds", note)
    ratio = extra / statistics.median(row.alone for row in rows)
    yield Figure("that over a synchronous save", ratio, "share")
