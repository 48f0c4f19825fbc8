"""The rows of a run: collected without waiting, evaluated, written on the main host, shown wherever a person looks."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import jax

from runner.attempt.account import Account
from runner.attempt.claim import Attempt
from runner.config import TrainerConfig
from runner.hosts.agreement import Hosts
from runner.hosts.progress import EVALUATION
from runner.periodic import is_due, tokens_at
from runner.spec import ExecutionSpec
from runner.storage import JsonObject
from runner.train.metrics.disk import NAME
from runner.train.metrics.file import open_metrics
from runner.train.metrics.line import Tail
from runner.train.metrics.row import Row
from runner.train.metrics.sinks import Sink, open_sinks
from runner.train.metrics.window import Window
from runner.train.profile import Profiler
from runner.train.validation import Figures


class Evaluator(Protocol):
    """Judges weights. Called on every host."""

    def evaluate(self, weights: Any, step: int, hosts: Hosts) -> Figures | None:
        """Figures by their key in a row (`val/...`); None if it ended early because the job was asked to stop."""


class Report(Account):
    """The rows of one attempt. Made and called on every host; rows stand on the main host alone.

    `mfu_of_a_token_per_second` is what each token a second adds to MFU, 0 where that is not known. `data_figures` says
    what a row tells of the data by its step. `after_row` is called after each row: what may take time, and is not
    needed for the first steps, can begin there.
    """

    def __init__(
        self,
        attempt: Attempt,
        spec: ExecutionSpec,
        config: TrainerConfig,
        evaluators: Sequence[Evaluator],
        mfu_of_a_token_per_second: float,
        data_figures: Callable[[int], Row],
        after_row: Callable[[], None],
    ):
        self._attempt, self._spec, self._config, self._evaluators = attempt, spec, config, evaluators
        self._mfu_of_a_token_per_second, self._after_row = mfu_of_a_token_per_second, after_row
        self._data_figures = data_figures
        self._metrics = open_metrics(attempt.store, attempt.background, attempt.fence)
        self._sinks: list[Sink] = []
        self._profiler = Profiler(attempt, spec.logging.profile)
        self._resumed_row: Row | None = None  # of the step that was resumed from
        self.window = Window(0)

    def problem_with(self, attachments: dict[str, bytes]) -> str | None:
        """Why the rows that were kept beside a state cannot follow those of the file; None if they can.

        They cannot where a later attempt, on other machines, went back behind them. Main host only.
        """
        if NAME not in attachments:
            return None
        try:
            after = Tail.decode(attachments[NAME]).after
        except ValueError as error:
            return str(error)
        is_gap = after is not None and not self._metrics.reaches(after)
        return f"a later attempt went back behind step {after}, which its rows follow" if is_gap else None

    def resume(self, step: int, attachments: dict[str, bytes]) -> None:
        """Drop the rows beyond `step`; those that came with the state may be ahead of the file. Called once."""
        if self._attempt.hosts.is_main:
            tail = Tail.decode(attachments[NAME]) if NAME in attachments else None
            self._resumed_row = self._metrics.rewind(step, tail)
        self.window = Window(step)

    @contextlib.contextmanager
    def showing(self, step: int) -> Iterator[None]:
        """Inside, rows are shown; however it is left, the sinks are closed."""
        if self._attempt.hosts.is_main:
            self._sinks = open_sinks(self._attempt, self._spec, self._config, step)
        self.window.restart_clock()
        self._profiler.watch()
        self._profiler.at(step)
        try:
            yield
        finally:
            self._profiler.close(self._attempt.progress.step)
            for sink in self._sinks:
                sink.close()

    # Rows.

    def add_step(self, step: int, loss: jax.Array, meta: dict[str, jax.Array]) -> None:
        """Take what step `step` returned. Waits for it only where a profile begins or ends."""
        self.window.add(step, loss, meta)
        self._profiler.at(step, loss)

    def is_row_due(self, step: int) -> bool:
        """Whether `step` has a row of its own: it is logged, or evaluated."""
        return is_due(step, self._spec.logging.every_steps, self._config.total_steps) or self._is_evaluation_due(step)

    def add_row(self, weights: Any, step: int) -> None:
        """Write the row of `step`, evaluated if it is time. Waits for the device.

        Raises `DivergedError` if a step was not finite.
        """
        row = self.window.close(self._config.tokens_per_step) | self._data_figures(step)
        if self._mfu_of_a_token_per_second:
            row["perf/mfu"] = row["perf/tokens_per_second"] * self._mfu_of_a_token_per_second
        if self._is_evaluation_due(step):
            row |= self._evaluate(weights, step) or {}
        row |= {"perf/time": time.time(), "perf/attempt": self._attempt.number}
        if self._attempt.hosts.is_main:
            self._attempt.fence.glance()
            self._metrics.append(row)
            self._show(row)
        self._after_row()

    def complete_row(
        self, weights: Any, step: int, before_it_is_kept: Callable[[Row], None] = lambda row: None
    ) -> bool:
        """A stop may have come before the evaluation of the step that was saved for it: do it now.

        False if the job was asked to stop once more. `before_it_is_kept` is called with the whole row, on every host.
        """
        row = self._attempt.hosts.agree(self._resumed_row)
        if row is None or not self.lacks_evaluation(row, step):
            return True
        return self.evaluate_row(weights, row, before_it_is_kept)

    def lacks_evaluation(self, row: Row, step: int) -> bool:
        """Whether the row of `step` was to be evaluated, and a stop came before."""
        return self._is_evaluation_due(step) and not self.is_evaluated(row)

    def is_evaluated(self, row: Row) -> bool:
        """Whether it has figures of an evaluation."""
        return any(key.startswith("val/") for key in row)

    def evaluate_row(self, weights: Any, row: Row, before_it_is_kept: Callable[[Row], None]) -> bool:
        """Evaluate the weights of the newest row, and keep it with the figures; False if a stop came meanwhile."""
        figures = self._evaluate(weights, row["step"])
        if figures is None:
            return False
        before_it_is_kept(row | figures)
        if self._attempt.hosts.is_main:
            self._metrics.replace_last(row | figures)
            self._show(row | figures)
        return True

    def restart_clock(self) -> None:
        """Leave out of the speed of steps what has passed so far."""
        self.window.restart_clock()

    @property
    def has_evaluators(self) -> bool:
        """Whether anything evaluates the weights."""
        return bool(self._evaluators)

    def _is_evaluation_due(self, step: int) -> bool:
        return bool(self._evaluators) and is_due(step, self._config.eval.every_steps, self._config.total_steps)

    def _evaluate(self, weights: Any, step: int) -> Row | None:
        """Figures of all evaluators; None if the job was asked to stop meanwhile."""
        found: Row = {}
        with self._attempt.progress.during(EVALUATION):
            for evaluator in self._evaluators:
                figures = evaluator.evaluate(weights, step, self._attempt.hosts)
                if figures is None:
                    return None
                found |= figures
        self.window.restart_clock()
        self._attempt.record("evaluate", step, figures=found)
        return found

    def _show(self, row: Row) -> None:
        for sink in self._sinks:
            sink.show(row)

    # What others ask for.

    def result(self, step: int) -> JsonObject:
        """Tokens, and the losses of the newest row."""
        row: Row = self._attempt.hosts.agree(self.newest_row())
        tokens = tokens_at(step, self._config.tokens_per_step)
        return {"tokens": tokens, "train_loss": row.get("train/loss"), "val_loss": row.get("val/loss")}

    def next_lines(self) -> Sequence[str]:
        """The command that shows what the model has learned."""
        return [f"text from the model: python -m runner sample {shlex.quote(self._attempt.store.url)}"]

    def metric(self, name: str, step: int) -> float | None:
        """The value in the row of `step`, the newest; None if it has none. On other hosts than the main one, None."""
        row = self.newest_row()
        value = row.get(name) if row.get("step") == step else None
        return None if value is None else float(value)

    def newest_row(self) -> Row:
        """Empty if there is none, and on other hosts than the main one."""
        return self._metrics.newest() if self._attempt.hosts.is_main else {}

    def attachments(self) -> dict[str, bytes]:
        """The rows that may be behind a state in the fast tier, since they are not durable yet. Main host only."""
        return {NAME: self._metrics.tail().encode()}

    def sync(self) -> None:
        """Wait until the rows are durable: they are never behind a checkpoint. Any thread; raises `OSError`."""
        self._metrics.sync()
