"""Whoever judges the weights, each at its own cadence; and what becomes of their figures. Called on every host.

An evaluator that fails costs its own figures and one line, never the run: what it raises, figures that no row can hold,
figures that are not finite (null in the row), and other figures on another host than on host 0, whose stand in the row.
An evaluator that raises on one host alone, before it has met the others in a program over all devices, leaves them
waiting there: every host names it at once (see the watchdog), and the deadline of a phase ends the wait (76).
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from runner.attempt.claim import Attempt
from runner.config import TrainerConfig
from runner.errors import RunnerError, first_line
from runner.hosts.agreement import Hosts
from runner.hosts.progress import EVALUATION, Failure, Phase
from runner.periodic import is_due
from runner.spec import hash_of
from runner.terminal import warn
from runner.train.meta import LIST_MAX, bins_of, finite
from runner.train.metrics.row import Row

TEXT_CHARACTERS_MAX = 1 << 14
Figures = Row
_KEY = re.compile(r"[\w.-]+(/[\w.-]+)+")
_OF_OTHERS = ("train/", "perf/", "data/")


class Evaluator(Protocol):
    """Judges weights. Called on every host.

    One that has an attribute `every_steps` is asked each so many steps, and by `eval.every_steps` where that is None;
    one that has `name` is called so in messages, else by its class.
    """

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """Figures by their key in a row (`val/...`); None if it ended early because the job was asked to stop.

        A figure is a number, a text, a list of at most 64 numbers, a histogram as rows have it, or None; the same on
        every host.
        """


class Evaluations:
    """All evaluators of a job. Made and called on every host."""

    def __init__(self, attempt: Attempt, config: TrainerConfig[Any], evaluators: Sequence[Evaluator]):
        self._attempt, self._rule, self._last_step = attempt, config.eval, config.total_steps
        self._evaluators = list(evaluators)

    def due(self, step: int) -> list[Evaluator]:
        """Who is asked at `step`: all at step 0 with `at_start`, all at the last one with `at_end`."""
        if step == 0:
            return self._evaluators if self._rule.at_start else []
        last_step = self._last_step if self._rule.at_end else None
        return [each for each in self._evaluators if is_due(step, self._every_steps(each), last_step)]

    def _every_steps(self, evaluator: Evaluator) -> int | None:
        own = getattr(evaluator, "every_steps", None)
        return self._rule.every_steps if own is None else own

    @property
    def has_any(self) -> bool:
        """Whether anybody judges."""
        return bool(self._evaluators)

    def evaluate(self, weights: Any, step: int, is_asked_for: bool = False) -> Row | None:
        """The figures of all who are due; None if the job was asked to stop meanwhile.

        Where it is asked for and nobody is due, those of all.
        """
        found: Row = {}
        asked = self.due(step) or (self._evaluators if is_asked_for else [])
        with self._attempt.progress.during(EVALUATION):
            for evaluator in asked:
                figures = self._ask(evaluator, weights, step, found)
                if figures is None:
                    return None
                found |= figures
        told = {key: value for key, value in found.items() if not isinstance(value, str | list | dict)}
        self._attempt.record("evaluate", step, figures=told)
        return found

    def _ask(self, evaluator: Evaluator, weights: Any, step: int, before: Row) -> Figures | None:
        """Host 0's figures, if every host has some; None if the job was asked to stop."""
        hosts, name = self._attempt.hosts, name_of(evaluator)
        figures, problem = _outcome(lambda: evaluator.evaluate(weights, step, hosts))
        is_stopping = figures is None and problem is None
        problem = problem or (None if is_stopping else _problem_with(figures, before))
        digest = None if problem or is_stopping else hash_of(_plain(figures or {}))
        words = f"evaluator {name} at step {step}: {problem} on process {hosts.process_id}"
        failure = None if problem is None else Failure(words, is_end=False)
        wait = Phase(f"the wait for evaluator {name} of the others", EVALUATION.bucket)
        with self._attempt.progress.awaiting(wait, failure):
            told = hosts.gather([problem, digest, is_stopping])
        if any(is_stopping for _, _, is_stopping in told):
            return None
        raised = {process: each for process, (each, _, _) in enumerate(told) if each is not None}
        if raised:
            process, reason = min(raised.items())
            where = f" on process {process}" if hosts.num_processes > 1 else ""
            self._tell(name, step, f"{reason}{where}; the row of this step has none of its figures")
            return {}
        others = [process for process, (_, digest, _) in enumerate(told) if digest != told[0][1]]
        if others:
            self._tell(name, step, f"process {others[0]} has other figures than process 0, whose stand in the row")
        found = _plain(figures or {})
        if broken := [key for key, value in (figures or {}).items() if _is_broken(value)]:
            self._tell(name, step, f"{', '.join(broken)}: not finite; null in the row")
        return found

    def _tell(self, name: str, step: int, reason: str) -> None:
        if self._attempt.hosts.is_main:
            warn(f"evaluator {name} at step {step}: {reason}")
        self._attempt.record("evaluation_problem", step, evaluator=name, reason=reason)


def name_of(evaluator: Evaluator) -> str:
    """What messages call it."""
    return str(getattr(evaluator, "name", None) or type(evaluator).__name__)


def _outcome(evaluate: Callable[[], Figures | None]) -> tuple[Figures | None, str | None]:
    """Its figures, or what it has raised; whatever the runner itself raises is no fault of the evaluator."""
    try:
        return evaluate(), None
    except RunnerError:
        raise
    except Exception as error:  # noqa: BLE001 - somebody else's code, of which training needs nothing
        return {}, first_line(error)


def _problem_with(figures: Any, before: Row) -> str | None:
    """Why a row cannot hold these figures."""
    if not isinstance(figures, Mapping):
        return f"it returns a {type(figures).__name__}, needs a dictionary of figures by their key in a row"
    for key, value in figures.items():
        if not (isinstance(key, str) and _KEY.fullmatch(key)) or key.startswith(_OF_OTHERS):
            return f"it returns a figure named {key!r}, needs a key such as val/accuracy"
        if key in before:
            return f"it returns {key}, which another evaluator has returned"
        if not _is_figure(value):
            return (
                f"it returns as {key} {_kind(value)}; a row needs a number, null, a text of at most "
                f"{TEXT_CHARACTERS_MAX:,} characters, or a list of at most {LIST_MAX} numbers"
            )
    return None


def _is_figure(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= TEXT_CHARACTERS_MAX
    if isinstance(value, list | tuple):
        return len(value) <= LIST_MAX and all(map(_is_number, value))
    if isinstance(value, dict):
        return bins_of(value) is not None
    return _is_number(value)


def _is_number(value: Any) -> bool:
    if value is None or isinstance(value, bool | int | float):
        return True
    return getattr(value, "shape", None) == () and hasattr(value, "__float__") and value.dtype.kind in "biuf"


def _kind(value: Any) -> str:
    return f"a text of {len(value):,} characters" if isinstance(value, str) else f"a {type(value).__name__}"


def _is_broken(value: Any) -> bool:
    """Whether a number, or one of a list, is not finite."""
    if value is None or isinstance(value, str | dict):
        return False
    if isinstance(value, list | tuple):
        return any(map(_is_broken, value))
    return not math.isfinite(value)


def _plain(figures: Figures) -> Figures:
    """As JSON has them; what is not finite is null."""

    def plain(value: Any) -> Any:
        if value is None or isinstance(value, str | dict):
            return value
        if isinstance(value, list | tuple):
            return [plain(each) for each in value]
        if isinstance(value, int):
            return value
        return finite(value)

    return {key: plain(value) for key, value in figures.items()}
