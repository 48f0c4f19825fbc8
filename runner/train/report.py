"""The rows of a run: collected without waiting, evaluated, written on the main host, shown wherever a person looks."""

import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from runner.config import TrainerConfig
from runner.metrics.file import METRICS_FILE, open_metrics_file
from runner.metrics.meta import Meta
from runner.metrics.rows import Row, RowTail
from runner.metrics.window import MetricsWindow, StepTimer
from runner.metrics.writers import RowDisplay, open_displays
from runner.parallel.mesh import read_peak_memory_bytes
from runner.periodic import count_tokens, is_due
from runner.run.attempt import Attempt, JobReport
from runner.spec import ExecutionSpec
from runner.storage import JsonObject
from runner.train.evaluators import Evaluator, EvaluatorSchedule
from runner.train.profiler import Profiler


class Report(JobReport):
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
        self._attempt, self._spec, self._config = attempt, spec, config
        self._evaluations = EvaluatorSchedule(attempt, config, evaluators)
        self._mfu_of_a_token_per_second, self._after_row = mfu_of_a_token_per_second, after_row
        self._data_figures = data_figures
        self._metrics = open_metrics_file(attempt.store, attempt.background_writer, attempt.fence)
        self._sinks: list[RowDisplay] = []
        self._profiler = Profiler(attempt, spec.logging.profile)
        self._resumed_row: Row | None = None  # of the step that was resumed from
        self._pace: StepTimer | None = None  # while rows are shown, on the main host
        self.window = MetricsWindow(0)

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Why the rows that were kept beside a state cannot follow those of the file; None if they can.

        They cannot where a later attempt, on other machines, went back behind them. Main host only.
        """
        if METRICS_FILE not in attachments:
            return None
        try:
            after = RowTail.decode(attachments[METRICS_FILE]).after
        except ValueError as error:
            return str(error)
        is_gap = after is not None and not self._metrics.has_step(after)
        return f"a later attempt went back behind step {after}, which its rows follow" if is_gap else None

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None = None) -> None:
        """Drop the rows beyond `step`; those that came with the state may be ahead of the file. Called once.

        `carry` is that of the window which the save fell into.
        """
        if self._attempt.hosts.is_main:
            tail = RowTail.decode(attachments[METRICS_FILE]) if METRICS_FILE in attachments else None
            self._resumed_row = self._metrics.rewind(step, tail)
        is_whole = carry is not None or step == 0 or self._resumed_row is not None
        self.window = MetricsWindow(step, carry, is_whole)

    @contextlib.contextmanager
    def showing(self, step: int) -> Iterator[None]:
        """Inside, rows are shown; however it is left, the sinks are closed."""
        if self._attempt.hosts.is_main:
            self._sinks = open_displays(self._attempt, self._spec, self._config, step)
            self._pace = StepTimer()
        self.restart_clock()
        self._profiler.watch()
        self._profiler.at(step)
        try:
            yield
        finally:
            if self._pace is not None:
                self._pace.close()
            self._profiler.close(self._attempt.progress.step)
            for sink in self._sinks:
                sink.close()

    # Rows.

    def add_step(self, step: int, loss: jax.Array, meta: Meta) -> None:
        """Take what step `step` returned. Waits for it only where a profile begins or ends."""
        self.window.add(step, loss, meta)
        if self._pace is not None:
            self._pace.add(loss)
        self._profiler.at(step, loss)

    def is_row_due(self, step: int) -> bool:
        """Whether `step` has a row of its own: it is logged, or evaluated."""
        is_logged = is_due(step, self._spec.logging.every_steps, self._config.total_steps)
        return is_logged or bool(self._evaluations.due(step))

    def add_row(self, weights: Any, step: int) -> None:
        """Write the row of `step`, evaluated if it is time. Waits for the device.

        Raises `DivergedError` if a step was not finite.
        """
        row = self.window.close(self._config.tokens_per_step) | self._data_figures(step)
        if self._mfu_of_a_token_per_second:
            row["perf/mfu"] = row["perf/tokens_per_second"] * self._mfu_of_a_token_per_second
        row |= {} if self._pace is None else self._pace.pop_percentiles()
        peak_bytes = read_peak_memory_bytes()
        row |= {} if peak_bytes is None else {"perf/peak_bytes": peak_bytes}
        if self._evaluations.due(step):
            row |= self._evaluations.evaluate(weights, step) or {}
        self.restart_clock()
        self._append(row)
        self._after_row()

    def _append(self, row: Row) -> None:
        row |= {"perf/time": time.time(), "perf/attempt": self._attempt.number}
        if self._attempt.hosts.is_main:
            self._attempt.fence.check_locally()
            self._metrics.append(row)
            self._show(row)

    def complete_row(
        self, weights: Any, step: int, before_it_is_kept: Callable[[Row], None] = lambda row: None
    ) -> bool:
        """Before the first step: evaluate what is to be evaluated at the start, or was not evaluated any more.

        A stop may have come before the evaluation of the step that was saved for it: it is done now. False if the job
        was asked to stop once more. `before_it_is_kept` is called with the whole row that was there, on every host.
        """
        row = self._attempt.hosts.agree(self._resumed_row)
        if row is not None:
            return not self.is_evaluation_missing(row, step) or self.evaluate_row(weights, row, before_it_is_kept)
        if step > 0 or not self._evaluations.due(step):
            return True
        figures = self._evaluations.evaluate(weights, step)
        self.restart_clock()
        if figures is not None:
            self._append({"step": 0, "train/tokens": 0, **figures})
        return figures is not None

    def is_evaluation_missing(self, row: Row, step: int) -> bool:
        """Whether the row of `step` was to be evaluated, and a stop came before."""
        return bool(self._evaluations.due(step)) and not self.is_evaluated(row)

    def is_evaluated(self, row: Row) -> bool:
        """Whether it has figures of an evaluation."""
        return any(key.startswith("val/") for key in row)

    def evaluate_row(self, weights: Any, row: Row, before_it_is_kept: Callable[[Row], None]) -> bool:
        """Evaluate the weights of the newest row, and keep it with the figures; False if a stop came meanwhile."""
        figures = self._evaluations.evaluate(weights, row["step"], is_asked_for=True)
        self.restart_clock()
        if figures is None:
            return False
        before_it_is_kept(row | figures)
        if self._attempt.hosts.is_main:
            self._metrics.replace_last(row | figures)
            self._show(row | figures)
        return True

    @property
    def has_evaluators(self) -> bool:
        """Whether anything evaluates the weights."""
        return self._evaluations.has_any

    def restart_clock(self) -> None:
        """Leave what has passed so far out of the speed of the next steps."""
        self.window.restart_clock()
        if self._pace is not None:
            self._pace.restart()

    def _show(self, row: Row) -> None:
        for sink in self._sinks:
            sink.show(row)

    # What others ask for.

    def result(self, step: int) -> JsonObject:
        """Tokens, and the losses of the newest row."""
        row: Row = self._attempt.hosts.agree(self.newest_row())
        tokens = count_tokens(step, self._config.tokens_per_step)
        return {"tokens": tokens, "train_loss": row.get("train/loss"), "val_loss": row.get("val/loss")}

    def format_next_steps(self) -> Sequence[str]:
        """The command that shows what the model has learned."""
        return [f"text from the model: python -m runner sample {shlex.quote(self._attempt.store.url)}"]

    def metric(self, name: str, step: int) -> float | None:
        """The value in the row of `step`, the newest; None if it has none. On other hosts than the main one, None."""
        row = self.newest_row()
        value = row.get(name) if row.get("step") == step else None
        return None if value is None else float(value)

    def newest_row(self) -> Row:
        """Empty if there is none, and on other hosts than the main one."""
        return self._metrics.get_newest() if self._attempt.hosts.is_main else {}

    def attachments(self) -> dict[str, bytes]:
        """The rows that may be behind a state in the fast tier, since they are not durable yet. Main host only."""
        return {METRICS_FILE: self._metrics.get_tail().encode()}

    def sync(self) -> None:
        """Wait until the rows are durable: they are never behind a checkpoint. Any thread; raises `OSError`."""
        self._metrics.sync()
