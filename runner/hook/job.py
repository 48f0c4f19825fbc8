"""A job that calls hooks between its steps: what their verdicts change in the life of a job."""

import functools
from typing import Any, ClassVar

from runner.attempt.result import read_result
from runner.hook.listing import Hooks, load_hooks
from runner.hook.steering import Steering
from runner.job import RestoreableJob
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import JsonObject
from runner.train.design import Design
from runner.train.ema_validation import with_averages
from runner.train.metrics.row import Row


class HookedJob(RestoreableJob):
    """Base of `BaseTrainer`. Its `report` has rows; its loop calls `begin_steering` once and `steer` after each row."""

    calls_hooks: ClassVar[bool] = True

    design: Design  # from the trainer's constructor on

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        super().__init__(spec, document)
        seen: Any = self
        self.hooks: Hooks = load_hooks(self.document, spec.hook_entries, seen)

    @functools.cached_property
    def steering(self) -> Steering:
        """The hooks at work in this attempt."""
        report: Any = self.report
        return Steering(self.hooks, self.attempt, report, self.evaluated_weights)

    def evaluated_weights(self, state: Any) -> Any:
        """What evaluators and hooks are shown of a state: its weights, and by `ema` their averages that ride along."""
        return with_averages(self.weights, state)

    def begin_steering(self) -> None:
        """Make up for what a stop has kept from the step that is resumed: its evaluation, and the calls of hooks."""
        report: Any = self.report
        self.state = self.steering.start(self.state, self.step)

        def fire(row: Row) -> None:
            self.state = self.steering.fire(self.state, self.step, row)

        if not report.complete_row(self.evaluated_weights(self.state), self.step, fire):
            self.save_or_stop()
        self.steer()

    def steer(self) -> None:
        """Let hooks see the row of this step, if it has one; they may have it saved, or make it the last."""
        self.state = self.steering.after_row(self.state, self.step)
        if self.steering.save_step == self.step:
            self.checkpointer.ask_for(self.step)

    @property
    def total_steps(self) -> int:
        """The config's, or where a hook has ended the run. Of epochs the data are read on this host."""
        stop = self.steering.stop if "steering" in vars(self) else None
        return self.design.counted.total_steps if stop is None else stop.step

    @property
    def done(self) -> bool:
        """Whether the job reached its end, or a hook that the spec still has so has ended it."""
        return super().done or self.hooks.has_stopped(read_result(self.store))

    def identity(self) -> Trajectory:
        """The base's, and that of hooks with counters."""
        return super().identity() | self.hooks.identity()

    def resolved_spec(self) -> ExecutionSpec:
        """The base's, with the config of each hook filled in."""
        return super().resolved_spec().model_copy(update={"hooks": self.hooks.entries()})

    def result(self) -> JsonObject:
        """The base's, and what hooks add: it is their last call, and the state is saved."""
        self.steering.end(self.state, self.step)
        return super().result() | self.steering.result()
