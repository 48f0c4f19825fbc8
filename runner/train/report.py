"""Rows of metrics: collected without waiting for the device, evaluated, written by process 0, displayed."""

import collections
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from typing import Any

import jax

from runner.attempts.attempt import Attempt
from runner.checkpoint.policy import is_due
from runner.config import TrainerConfig
from runner.errors import ResumeError
from runner.metrics.file import METRICS_FILE, find_tail_problem, open_metrics_file, read_encoded_rows
from runner.metrics.meta import Meta
from runner.metrics.rows import EncodedRow, Row, RowTail
from runner.metrics.window import NO_SUMS, MetricsWindow, StepTimer
from runner.metrics.writers import RowDisplay, open_displays
from runner.parallel.mesh import read_gpu_utilization, read_memory_counter, read_peak_memory_bytes
from runner.process import read_free_memory_bytes, read_resident_bytes
from runner.spec import ExecutionSpec
from runner.spec.document import format_trust
from runner.storage import JsonObject
from runner.train.evaluators import Evaluator, EvaluatorSchedule
from runner.train.feature import Feature
from runner.train.profiler import Profiler

_DISCARDED_MAX = 500  # rows in the record of a roll-back
# In the carry of the last step: what it has only because the run ends there.
END, _END_ROW, _END_EVALUATION = "end", "row", "evaluation"
_AT_END = "perf/at_end"  # in a row whose evaluation it has only because the run ends there
_DISCARDED_KEYS = ("step", "train/tokens", "train/examples", "perf/time", "train/loss")


class Report:
    """Rows of metrics of one attempt. Made and called on every host; only process 0 holds the rows.

    Attributes:
        window: metrics of the steps since the last row.
        lacks_last_row: True if the run ends at the step that the attempt resumes from, and the row of this step is
            still missing.
    """

    def __init__(
        self,
        attempt: Attempt,
        spec: ExecutionSpec,
        config: TrainerConfig,
        evaluators: Sequence[Evaluator],
        mfu_per_token_rate: float,
        get_data_metrics: Callable[[int], Row],
        is_language_model: bool = True,
        features: Sequence[Feature] = (),
        epoch_steps: Fraction | None = None,
    ):
        """Open the metrics of an attempt, by the resolved spec and the config with its total in steps.

        `mfu_per_token_rate` is the MFU of one token (or example, by the unit of the data) per second, 0 if unknown.
        `get_data_metrics` returns the metrics of the data at a step. A model is no language model if its outputs are
        not logits of tokens. `epoch_steps` are the steps of `eval.every_epochs`.
        """
        self._attempt, self._spec, self._config = attempt, spec, config
        self._is_language_model = is_language_model
        self._evaluations = EvaluatorSchedule(attempt, config, evaluators, epoch_steps)
        self._mfu_per_token_rate, self._get_data_metrics = mfu_per_token_rate, get_data_metrics
        self._metrics = open_metrics_file(attempt.store, attempt.background_writer, attempt.fence)
        self._displays: list[RowDisplay] = []
        self._profiler = Profiler(attempt, spec.logging.profile)
        self._resumed_row: Row | None = None  # row of the step that was resumed from
        self._end_carry: JsonObject | None = None  # at the last step, for a run that is extended beyond it
        self.lacks_last_row = False
        self._timer: StepTimer | None = None  # on process 0, while rows are displayed
        self._cpu_mark = (time.process_time(), time.monotonic())  # at the previous row
        self._features = features
        self.window = MetricsWindow(0, watchers=features)

    # Resuming.

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Return the reason why the rows saved with a state cannot continue the rows of the file; None if they can."""
        return find_tail_problem(self._metrics, attachments)

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None = None) -> None:
        """Remove the rows after `step`, and continue the metrics window of the save.

        A row of `step` that the present spec does not ask for is removed too, and so is such an evaluation: the run
        ended there, and was extended. Called before the first step, and again if the running job loads a checkpoint.
        Displays then restart with the remaining rows. The rows in `attachments`, saved with the state, may be newer
        than those of the file. `carry` is that of the save; None if `step` has a row.
        """
        end, is_last = (carry or {}).get(END), step == self._config.total_steps
        # The sums of the steps since the row before `step`; with them the row of `step` can be made again.
        has_sums = bool(carry) and end != _END_EVALUATION
        row: Row | None = None
        if self._attempt.hosts.is_main:
            tail = RowTail.decode(attachments[METRICS_FILE]) if METRICS_FILE in attachments else None
            row = self._metrics.rewind(step, tail)
            if row is not None and has_sums and not self.is_row_due(step):
                self._metrics.rewind(step - 1)
                row = None
            elif row is not None and self.has_other_evaluation(row, end):
                # Evaluators that are due are called again (`complete_row`).
                row = self.remove_evaluation(row)
                self._metrics.replace_last(row)
        has_row = self._attempt.hosts.agree(row is not None)
        self._resumed_row = row
        self._end_carry = carry if is_last and (has_sums or end is not None) else None
        if has_row or (self.is_row_due(step) and not is_last):
            carry = {}  # the row contains these sums; a fork has it in its parent's file
        # Without carry the means of the next row would lack the steps before the save.
        is_whole = carry is not None or step == 0 or has_row
        sums = carry if has_sums else None
        self.window = MetricsWindow(step, sums, is_whole, self._features, has_row=has_row or step == 0)
        self.lacks_last_row = is_last and step > 0 and not has_row and has_sums
        if self._displays:
            for display in self._displays:
                display.close()
            self._displays = self._open_displays(step)
        self.restart_clock()

    def has_other_evaluation(self, row: Row, end: str | None) -> bool:
        """Return True if the evaluation in the row of the resumed step is not the one that the present spec asks for.

        `end` is that of the carry; earlier versions did not mark the row.
        """
        step = row["step"]
        is_of_end = bool(row.get(_AT_END)) or end == _END_EVALUATION
        if not self.is_evaluated(row):
            return False
        if step != self._config.total_steps:
            return is_of_end and not (self._evaluations.are_all_due(step) and not self.is_suspect(row))
        # A run that was extended and set back may have called some of the evaluators that are due at its end.
        num_anyway = len(self._evaluations.list_due(step, has_end=False))
        return not row.get(_AT_END) and 0 < num_anyway < len(self._evaluations.list_due(step))

    def complete_row(self, weights: Any, step: int, before_write: Callable[[Row], None] = lambda row: None) -> bool:
        """Write what the step that the attempt resumes from lacks: an evaluation, the last row, or that of step 0.

        An evaluation is missing if the previous attempt was asked to stop: it then saves the step without evaluating
        it. The last row is missing if the total was set to a step that an earlier attempt has reached. Called before
        the first step. `before_write` is called with the complete row on every host, before it is written; not for the
        last row, which is the newest one afterwards.

        Returns False if the job was asked to stop during the evaluation. Raises `ResumeError` if the last row cannot
        be made, since an earlier version has saved the step without its results.
        """
        row = self._attempt.hosts.agree(self._resumed_row)
        if row is not None:
            if not self.is_evaluation_missing(row, step):
                return True
            metrics = self.evaluate_requested(weights, row)
            if metrics is not None:
                row |= metrics
                # Before it is written: after a kill in between both are repeated, and neither is lost.
                before_write(row)
                self.replace_row(row)
            return metrics is not None
        is_due_now = bool(self._evaluations.list_due(step))
        if not self.lacks_last_row and (step > 0 or not is_due_now):
            return True
        if self.lacks_last_row and not self.window.has_last:
            raise ResumeError(
                f"{self._attempt.store.url}: step {step} was saved by an earlier version, without the metrics of its "
                f"last row; set the total of the run to {step + 1} steps or more"
            )
        row = self._close_window(step) if self.lacks_last_row else {"step": 0, f"train/{self._config.data.unit}": 0}
        found = self._evaluate(weights, step) if is_due_now else {}
        if found is not None:
            self._append(self._finish(row | found))
            self.lacks_last_row = False
        return found is not None

    # Rows during training.

    @contextlib.contextmanager
    def display(self, step: int) -> Iterator[None]:
        """Display rows inside the context, from `step` on; the displays are closed at its end."""
        if self._attempt.hosts.is_main:
            self._displays = self._open_displays(step)
            self._timer = StepTimer()
            self._cpu_mark = (time.process_time(), time.monotonic())
        self.restart_clock()
        self._profiler.watch_requests()
        self._profiler.on_step(step)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.close()
            self._profiler.close(self._attempt.progress.step)
            for display in self._displays:
                display.close()

    def _open_displays(self, step: int) -> list[RowDisplay]:
        config = self._config
        return open_displays(self._attempt, self._spec, config.total_steps, config.count_units, step)

    def add_step(self, step: int, loss: jax.Array, meta: Meta) -> None:
        """Add the results of step `step`. Waits for the device only if a profile starts or ends at this step."""
        self.window.add(step, loss, meta)
        if self._timer is not None:
            self._timer.add(loss)
        self._profiler.on_step(step, loss)

    def is_row_due(self, step: int) -> bool:
        """Return True if `step` has a row of its own: it is logged, or evaluated."""
        is_logged = is_due(step, self._spec.logging.every_steps, self._config.total_steps)
        return is_logged or bool(self._evaluations.list_due(step))

    @property
    def carry(self) -> JsonObject | None:
        """Contribution of the steps since the last row to the next one, for a save; None if the step has a row.

        At the last step, whose row may be there only because the run ends, it is that without this row.
        """
        return self.window.carry if self._end_carry is None else self._end_carry

    def add_row(self, weights: Any, step: int, before_write: Callable[[Row], None] | None = None) -> None:
        """Write the row of `step`, with an evaluation if it is due. Waits for the device.

        `before_write` is called with the complete row on every host, and may add to it. If it raises, the row is
        written nevertheless. Raises `DivergedError` as `MetricsWindow.fetch` does.
        """
        # Closing the window fetches losses and meta, which waits for the device.
        row = self._close_window(step)
        if self._mfu_per_token_rate:
            row["perf/mfu"] = row[f"perf/{self._config.data.unit}_per_second"] * self._mfu_per_token_rate
        row |= {} if self._timer is None else self._timer.pop_percentiles() | self._read_usage()
        # A stop during the evaluation leaves the row without it; the next attempt completes it (`complete_row`).
        if self._evaluations.list_due(step) and not self.is_suspect(row):
            row |= self._evaluate(weights, step) or {}
        self.restart_clock()
        row = self._finish(row)
        try:
            if before_write is not None:
                # The times of processes differ, so all get the row as process 0 will read it.
                row = self._attempt.hosts.agree(EncodedRow.from_row(row).row if self._attempt.hosts.is_main else {})
                before_write(row)
        finally:
            self._append(row)

    def _read_usage(self) -> Row:
        """Return the use of memory and CPUs by process 0 and its devices. Does not wait for the devices."""
        before, self._cpu_mark = self._cpu_mark, (time.process_time(), time.monotonic())
        busy_seconds, seconds = (after - earlier for after, earlier in zip(self._cpu_mark, before, strict=True))
        usage = {
            "perf/peak_bytes": read_peak_memory_bytes(),
            "perf/device_bytes": read_memory_counter("bytes_in_use"),
            "perf/device_utilization": read_gpu_utilization(),
            "perf/host_bytes": read_resident_bytes(),
            "perf/host_free_bytes": read_free_memory_bytes(),
            "perf/cpu_cores": busy_seconds / max(seconds, 1e-9),
        }
        return {key: value for key, value in usage.items() if value is not None}

    def _close_window(self, step: int) -> Row:
        """Return the metrics of the row of `step`, the newest one, and keep what a save of the last step needs."""
        self.window.fetch()
        sums = self.window.carry
        row = self.window.close(self._config.count_units, self._config.data.unit) | self._get_data_metrics(step)
        if step == self._config.total_steps:
            if not self._evaluations.list_due(step, has_end=False) and not is_due(step, self._spec.logging.every_steps):
                self._end_carry = None if sums is None else sums | {END: _END_ROW}
            elif self.is_end_evaluation(row):
                self._end_carry = NO_SUMS | {END: _END_EVALUATION}
        return row

    def is_end_row(self, row: Row) -> bool:
        """Return True if the row, or the calls of hooks for it, are there only because the run ends at its step."""
        step = row["step"]
        is_due_anyway = is_due(step, self._spec.logging.every_steps) or self._evaluations.list_due(step, has_end=False)
        return step == self._config.total_steps and (not is_due_anyway or self._may_be_discarded(row))

    def is_end_evaluation(self, row: Row) -> bool:
        """Return True if an evaluation of the step of a row is made only because the run ends there."""
        step = row["step"]
        due = self._evaluations.list_due(step)
        due_anyway = [] if self._may_be_discarded(row) else self._evaluations.list_due(step, has_end=False)
        return step == self._config.total_steps and len(due_anyway) < len(due)

    def _finish(self, row: Row) -> Row:
        """Return a new row with its time and attempt."""
        return row | {"perf/time": time.time(), "perf/attempt": self._attempt.number} | self._mark_end(row)

    def _append(self, row: Row) -> None:
        if self._attempt.hosts.is_main:
            # A newer attempt may own the directory by now; a fenced one must not write.
            self._attempt.fence.check_locally()
            self._metrics.append(row)
            self._show(row)

    def _mark_end(self, row: Row) -> Row:
        return {_AT_END: True} if self.is_evaluated(row) and self.is_end_evaluation(row) else {}

    def _show(self, row: Row) -> None:
        for display in self._displays:
            display.show(row)

    def restart_clock(self) -> None:
        """Exclude the time that has passed so far from the speed of the next steps."""
        self.window.restart_clock()
        if self._timer is not None:
            self._timer.restart()

    # Evaluations, for the trainer and its hooks.

    def enter_stage(self, evaluators: Sequence[Evaluator], mfu_per_token_rate: float) -> None:
        """Use the evaluators and the FLOPs of the next stage from now on."""
        self._evaluations = EvaluatorSchedule(self._attempt, self._config, evaluators)
        self._mfu_per_token_rate = mfu_per_token_rate

    @property
    def has_evaluators(self) -> bool:
        """True if the job has evaluators."""
        return self._evaluations.has_any

    def is_evaluation_missing(self, row: Row, step: int) -> bool:
        """Return True if an evaluation is due at `step` but the row has none, because of a stop."""
        return bool(self._evaluations.list_due(step)) and not self.is_evaluated(row) and not self.is_suspect(row)

    def is_suspect(self, row: Row) -> bool:
        """Return True if a feature may still discard the step of a row, such as one with a high loss.

        Evaluators and hooks are then not called, and it cannot be the best step.
        """
        return self._may_be_discarded(row) and row["step"] != self._config.total_steps

    def _may_be_discarded(self, row: Row) -> bool:
        return any(feature.is_suspect(row) for feature in self._features)

    def is_evaluated(self, row: Row) -> bool:
        """Return True if the row has metrics of an evaluation."""
        return any(key.startswith("val/") for key in row)

    def remove_evaluation(self, row: Row) -> Row:
        """Return the row without metrics of an evaluation."""
        return {key: value for key, value in row.items() if not key.startswith(("val/", "perf/eval_", _AT_END))}

    def evaluate_requested(self, weights: Any, row: Row) -> Row | None:
        """Evaluate the weights of a row by all evaluators; return the metrics of the evaluation.

        Returns None if the job was asked to stop meanwhile.
        """
        metrics = self._evaluate(weights, row["step"], is_requested=True)
        return None if metrics is None else metrics | self._mark_end(row | metrics)

    def _evaluate(self, weights: Any, step: int, is_requested: bool = False) -> Row | None:
        started = time.monotonic()
        metrics = self._evaluations.evaluate(weights, step, is_requested)
        if metrics:
            speed: Row = {"perf/eval_seconds": time.monotonic() - started}
            units_per_second = self._evaluations.pop_units_per_second()
            if units_per_second is not None:
                speed[f"perf/eval_{self._config.data.unit}_per_second"] = units_per_second
            # The times of processes differ, and hooks get the same row on all of them.
            metrics |= self._attempt.hosts.agree(speed)
        self.restart_clock()
        return metrics

    def replace_row(self, row: Row) -> None:
        """Replace the newest row, of the same step, by a more complete one."""
        if self._attempt.hosts.is_main:
            self._metrics.replace_last(row)
            self._show(row)

    # Results.

    def result(self, step: int) -> JsonObject:
        """Return the number of tokens (or examples), and the losses of the newest row."""
        row: Row = self._attempt.hosts.agree(self.get_newest_row())
        units = {self._config.data.unit: self._config.count_units(step)}
        return units | {"train_loss": row.get("train/loss"), "val_loss": row.get("val/loss")}

    def format_next_steps(self) -> Sequence[str]:
        """Return a line with a command for the trained model."""
        task, command = ("sample from", "sample") if self._is_language_model else ("evaluate", "evaluate")
        trust = format_trust(self._spec.model_dump(mode="json"))
        return [f"to {task} the model: python -m runner {command} {shlex.quote(self._attempt.store.url)}{trust}"]

    def add_metric(self, carry: JsonObject | None, name: str, step: int) -> JsonObject | None:
        """Return the carry of the last step with the metric that the step has if the run is extended."""
        if carry is None or END not in carry or self.is_metric_of_end(name):
            return carry
        value = self.metric(name, step)
        return carry if value is None else carry | {"metric": value}

    def is_metric_of_end(self, name: str) -> bool:
        """Return True if the newest row has a metric only because the run ends at its step."""
        row = self.get_newest_row()
        if row.get("step") != self._config.total_steps:
            return False
        return self.is_end_row(row) or (not name.startswith("train/") and self.is_end_evaluation(row))

    def metric(self, name: str, step: int) -> float | None:
        """Return a metric of the row of `step`, if it is the newest row; else None. None on processes other than 0."""
        row = self.get_newest_row()
        value = row.get(name) if row.get("step") == step and not self.is_suspect(row) else None
        return float(value) if isinstance(value, int | float) else None

    def get_newest_row(self) -> Row:
        """Return the newest row; empty if there is none. Empty on processes other than 0."""
        return self._metrics.get_newest() if self._attempt.hosts.is_main else {}

    def list_losses_after(self, step: int) -> list[Row]:
        """Return step, tokens, time and loss of the newest rows after `step`. Process 0 only."""
        with contextlib.suppress(OSError):
            self._metrics.sync()
        lines = read_encoded_rows(self._attempt.store)
        rows = [line.row for line in collections.deque((line for line in lines if line.step > step), _DISCARDED_MAX)]
        return [{key: row[key] for key in _DISCARDED_KEYS if key in row} for row in rows]

    def attachments(self) -> dict[str, bytes]:
        """Return the rows to save with a state in the fast tier; they may not be durable yet. Process 0 only."""
        return {METRICS_FILE: self._metrics.get_tail().encode()}

    def sync(self) -> None:
        """Wait until the rows are durable. Called before each commit. Thread-safe; raises `OSError`."""
        self._metrics.sync()
