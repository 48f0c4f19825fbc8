"""Successive halving: at each rung, a number of steps, the best part of the runs goes on.

The decision reads one row of each run, that of the rung's step. Rows are bit-deterministic, so it depends neither on
the time nor on kills, nor on how many runs are made at once.
"""

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from runner.errors import InvalidError
from runner.history.ledger import get_float
from runner.metrics.file import MetricsTail
from runner.storage import Store


@dataclass(frozen=True)
class HalvingRule:
    """Rule `FACTOR@STEP,STEP`: at each of the steps 1/FACTOR of the settings go on, rounded up."""

    factor: int
    steps: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> "HalvingRule":
        """Return the rule of `3@100,300`. Raises `InvalidError`."""
        match = re.fullmatch(r"(\d{1,9})@(\d{1,15}(?:,\d{1,15})*)", text.replace(" ", ""))
        steps = tuple(map(int, match[2].split(","))) if match else ()
        if match is None or int(match[1]) < 2 or steps[0] < 1 or any(a >= b for a, b in itertools.pairwise(steps)):
            raise InvalidError(
                f"--halving {text}: needs FACTOR@STEP,STEP with a factor of 2 or more and ascending steps, such as "
                "3@100,300: a third of the runs goes on at step 100, and a third of these at step 300"
            )
        return cls(int(match[1]), steps)

    def format(self) -> str:
        """Return the text that `parse` reads."""
        return f"{self.factor}@{','.join(map(str, self.steps))}"


@dataclass(frozen=True)
class HalvingState:
    """What the rows say: where runs are stopped, and what is not decided yet."""

    stopped: Mapping[str, int]  # rung by run
    undecided: int | None  # first rung that is not decided; None if all are
    missing: Collection[str]  # runs whose rows at that rung are missing


def decide(
    rule: HalvingRule,
    settings: Sequence[Sequence[str]],
    values: Mapping[str, Mapping[int, float]],
    diverged: Collection[str],
    is_maximised: bool,
) -> HalvingState:
    """Return the decisions of all rungs that all runs still in have reached.

    `settings` are the runs of each setting, of which there are several if seeds repeat it: their mean counts. `values`
    is the metric by run and rung. A run that diverged before a rung ranks last there. Of equal settings the first goes
    on.
    """
    stopped: dict[str, int] = {}
    left = [*settings]
    for step in rule.steps:
        missing = [run for runs in left for run in runs if step not in values.get(run, {}) and run not in diverged]
        if missing:
            return HalvingState(stopped, step, missing)
        sign = -1 if is_maximised else 1
        scores = []
        for runs in left:
            known = [sign * values.get(run, {}).get(step, sign * math.inf) for run in runs]
            mean = math.fsum(known) / len(known) if all(map(math.isfinite, known)) else math.inf
            scores.append(mean)
        order = sorted(range(len(left)), key=lambda place: scores[place])
        kept = sorted(order[: -(-len(left) // rule.factor)])
        for place, runs in enumerate(left):
            if place not in kept:
                stopped |= {run: step for run in runs if step in values.get(run, {})}
        left = [left[place] for place in kept]
    return HalvingState(stopped, None, ())


@dataclass
class RungReader:
    """Metric of one run at the rungs, read from its rows as they come."""

    store: Store
    metric: str
    steps: Sequence[int]
    values: dict[int, float] = field(default_factory=dict)
    _last: float | None = None

    def __post_init__(self) -> None:
        self._tail = MetricsTail(self.store)

    def read(self) -> None:
        """Read the rows that are new. Raises `OSError`."""
        is_restart, rows, newest = self._tail.read()
        self._last = None if is_restart else self._last
        last = self._last
        for is_final, part in ((True, rows), (False, newest)):
            for row in part:
                step, value = row["step"], get_float(row, self.metric)
                for rung in self.steps:
                    # A row at the rung without the metric is completed by the next attempt, after a stop between them.
                    if rung not in self.values and (step > rung or (step == rung and value is not None)):
                        known = value if step == rung else last
                        self.values[rung] = math.nan if known is None else known
                last = value if value is not None else last
                self._last = last if is_final else self._last
