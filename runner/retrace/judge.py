"""Statistics of a paired trial: the difference of a metric between two runs of the same steps.

The second half of the steps is judged, because a change needs some steps to have its effect. Differences of successive
steps are not independent: the weights of the two runs drift apart slowly. So the pairs are averaged in 8 blocks of
successive steps, and the interval is that of Student's t for these 8 numbers.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Literal, NamedTuple

from runner.errors import InvalidError

NUM_BLOCKS = 8
MIN_STEPS = 4 * NUM_BLOCKS  # of a trial, so that a block has two steps
_MAX_TIMES_LONGER = 100  # a longer trial that is advised
_T_975 = 2.3646  # 97.5% quantile of Student's t with NUM_BLOCKS - 1 degrees of freedom

Outcome = Literal["better", "no worse", "worse", "unclear", "same"]


class Criterion(NamedTuple):
    """Metric of a row by which a change is judged; less is better."""

    key: str  # of the row
    margin: float  # largest increase that is accepted, as a share of the old value
    has_noise: bool = True  # False: all values of a run are alike, such as its memory


# By the name of `--judge`.
CRITERIA = {
    "loss": Criterion("train/loss", 0.001),
    "step-time": Criterion("perf/step_seconds_median", 0.02),
    "memory": Criterion("perf/peak_bytes", 0.0, has_noise=False),
    "host-memory": Criterion("perf/host_bytes", 0.05, has_noise=False),
    "gradient-norm": Criterion("train/grad_norm", 0.05),
}


class Comparison(NamedTuple):
    """Difference of a metric, new minus old, as shares of the old mean, with its 95% interval."""

    name: str
    margin: float
    old: float  # mean
    new: float  # mean
    difference: float
    low: float
    high: float
    num_pairs: int  # steps that were judged
    is_same: bool  # True if all values are equal

    @property
    def outcome(self) -> Outcome:
        """Outcome: the whole interval must be on one side of the margin."""
        if self.is_same:
            return "same"
        if self.low > self.margin:
            return "worse"
        if self.high < 0 and self.difference < -self.margin:
            return "better"
        return "no worse" if self.high <= self.margin else "unclear"

    @property
    def num_steps_needed(self) -> int:
        """Steps of a trial whose interval would be about as narrow as the margin; for an unclear outcome."""
        width = (self.high - self.low) / 2
        ratio = width / self.margin if self.margin else math.inf
        return 2 * math.ceil(self.num_pairs * min(ratio**2, 1e6))

    def advise(self) -> str:
        """Return what would make an unclear outcome clear, with options of `trial`."""
        # A longer trial than that says only that the change is too small for this margin.
        is_possible = self.num_steps_needed <= _MAX_TIMES_LONGER * 2 * self.num_pairs
        advices = [f"try about --steps {self.num_steps_needed}"] if is_possible else []
        if (percent := math.ceil(self.high * 1e4) / 100) < 100:
            advices.append(f"accept a larger increase by --judge {self.name}={percent:g}%")
        return ", or ".join(advices) or "try many more steps"

    def format(self) -> str:
        """Return the line for people."""
        old, new = (f"{value:,.0f}" if value >= 1e6 else f"{value:.6g}" for value in (self.old, self.new))
        values = f"{self.name}: {old} -> {new}"
        if self.is_same:
            return f"{values}, the same at each of {self.num_pairs} steps"
        interval = f"{self.difference:+.3%}, 95% interval {self.low:+.3%} to {self.high:+.3%}"
        return f"{values}, {interval}, accepted {self.margin:+.2%}: {self.outcome.upper()}"


def parse_criteria(values: Sequence[str]) -> dict[str, Criterion]:
    """Return the criteria of `NAME` or `NAME=MARGIN`, by default the loss. Raises `InvalidError`."""
    found = {}
    for value in values or ["loss"]:
        name, _, margin = value.partition("=")
        if name not in CRITERIA:
            raise InvalidError(f"--judge {value}: there is no {name}; needs one of {', '.join(CRITERIA)}")
        criterion = CRITERIA[name]
        if margin:
            try:
                number = float(margin.removesuffix("%")) / (100 if margin.endswith("%") else 1)
            except ValueError:
                number = math.nan
            if not 0 <= number < 1:
                raise InvalidError(f"--judge {value}: needs a margin of 0 to below 1, such as {name}=0.1%")
            criterion = criterion._replace(margin=number)
        found[name] = criterion
    return found


def compare_paired(name: str, criterion: Criterion, old: Sequence[float], new: Sequence[float]) -> Comparison | None:
    """Compare the values of a metric at the same steps in two runs; None if there are too few, or none is above 0.

    A value of the new run that is not finite makes it worse.
    """
    pairs = list(zip(old, new, strict=True))[len(old) // 2 :]
    if len(pairs) < NUM_BLOCKS or not all(math.isfinite(first) for first, _ in pairs):
        return None
    before, after = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    if before <= 0:
        return None
    is_same = all(first == second for first, second in pairs)
    difference = (after - before) / before
    if not math.isfinite(difference):
        return Comparison(name, criterion.margin, before, after, math.inf, math.inf, math.inf, len(pairs), False)
    half_width = 0.0
    if criterion.has_noise:
        edges = [len(pairs) * number // NUM_BLOCKS for number in range(NUM_BLOCKS + 1)]
        changes = [second - first for first, second in pairs]
        blocks = [statistics.fmean(changes[edges[k] : edges[k + 1]]) for k in range(NUM_BLOCKS)]
        half_width = _T_975 * statistics.stdev(blocks) / math.sqrt(NUM_BLOCKS) / before
    low, high = difference - half_width, difference + half_width
    return Comparison(name, criterion.margin, before, after, difference, low, high, len(pairs), is_same)
