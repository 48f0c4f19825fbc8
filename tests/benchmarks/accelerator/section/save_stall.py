"""What an asynchronous save costs the loop on this device: `tests.benchmarks.save`, with windows as long as a save."""

import math
import statistics
from collections.abc import Iterator
from pathlib import Path

import jax

from tests.benchmarks import save
from tests.benchmarks.accelerator.result import Figure
from tests.benchmarks.accelerator.size import Setting
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start

_WARM_STEPS, _MARGIN = 3, 1.5


def measure(setting: Setting) -> Iterator[Figure]:
    """A synchronous save first, which says how long the windows are to be; then rounds of all three windows."""
    sizes = setting.sizes
    job = start(make_job(sizes.save, Path(setting.scratch) / "run", 10**6, layer_loop="scan", batch=sizes.save_batch))
    yield Figure("bytes of the state", sum(leaf.nbytes for leaf in jax.tree.leaves(job.state)), "bytes")
    save.steps(job, _WARM_STEPS, save=False)
    seconds, _ = save.steps(job, _WARM_STEPS, save=False)
    save.synchronous(job)
    alone = save.synchronous(job)
    yield Figure("a synchronous save", alone, "seconds", "the second, the loop stands still")
    num_steps = max(1, math.ceil(_MARGIN * alone / (seconds / _WARM_STEPS)))
    rows = list(save.measure(job, sizes.rounds, num_steps))
    about = f"median of {len(rows)}"
    yield Figure("the loop stands still for a save", statistics.median(row.blocked for row in rows), "seconds", about)
    extra = statistics.median(row.extra for row in rows)
    about += f", of {num_steps} steps that take {statistics.median(row.plain for row in rows):.3f} s without"
    yield Figure("the loop takes longer for a save", extra, "seconds", about)
    ratio = extra / statistics.median(row.alone for row in rows)
    yield Figure("that over a synchronous save", ratio, "share")
