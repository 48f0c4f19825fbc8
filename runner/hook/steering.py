"""When hooks are called, and what becomes of what they say: the part of the training loop that is theirs.

The order at step k, on every host: the row of k is made, with its evaluation if one is due; `on_row`; the evaluation
that a hook has asked for; `on_evaluation`; the new counters go into the state, with a mark of what was called
(`Fired`); then the state may be saved. So a saved state is ahead of its calls in one case alone: a stop came during the
evaluation of its step. Whoever resumes there evaluates first, and then makes the calls that the mark lacks.

A stop of a hook is in the mark too: who resumes the last step, after a kill before `result.json`, ends there as well.
Observers have no mark: for them a row counts as seen once it is whole in the file.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import numpy as np

from runner.attempt.claim import Attempt
from runner.attempt.owner import read_owner
from runner.errors import HookError, InvalidError
from runner.hook.call import Caller
from runner.hook.counters import Branch, Fired
from runner.hook.listing import RIDER, Hooks, Listed
from runner.hook.protocol import Act, Moment
from runner.storage import JsonObject, read_log
from runner.terminal import warn
from runner.train.metrics.row import Row
from runner.train.variables import TrainState

_TAKEN = ("step", "tokens", "train_loss", "val_loss", "fingerprint", "stopped_by", "stopped_because", "stopped_rule")


class Rows(Protocol):
    """What is needed of the rows of a run: see `Report`."""

    @property
    def has_evaluators(self) -> bool:
        """Whether anything evaluates the weights."""

    def newest_row(self) -> Row:
        """The newest row; empty if there is none, and on other hosts than the main one."""

    def lacks_evaluation(self, row: Row, step: int) -> bool:
        """Whether the row of `step` was to be evaluated, and a stop came before."""

    def is_evaluated(self, row: Row) -> bool:
        """Whether it has figures of an evaluation."""

    def evaluate_row(self, weights: Any, row: Row, before_it_is_kept: Callable[[Row], None]) -> bool:
        """Keep the newest row with the figures of its weights, once it was shown; False if a stop came meanwhile."""

    def restart_clock(self) -> None:
        """Leave out of the speed of steps what has passed so far."""


@dataclass(frozen=True)
class Stop:
    """A hook has ended the run: `step` is its last."""

    hook: Listed
    step: int
    reason: str

    def result(self) -> JsonObject:
        """What `result.json` says of it."""
        return {"stopped_by": self.hook.name, "stopped_because": self.reason, "stopped_rule": self.hook.rule}


class Steering:
    """The hooks of one attempt at work. Made and called on every host, by the training thread.

    Attributes:
        stop: who has ended the run; None while nobody has.
        save_step: the last step that a hook wanted to be saved.
    """

    def __init__(self, hooks: Hooks, attempt: Attempt, rows: Rows, weights_of: Callable[[TrainState], Any]):
        self._hooks, self._attempt, self._rows, self._weights_of = hooks, attempt, rows, weights_of
        self._caller = Caller(attempt)
        self._seen = Fired()  # by observers
        self._told: JsonObject = {}
        self._run_began = 0.0
        self.stop: Stop | None = None
        self.save_step = 0

    def start(self, state: TrainState, step: int) -> TrainState:
        """Before the first step of the attempt: who has stopped the run, and `on_start`.

        Raises `InvalidError` if a hook waits for evaluations where there are none.
        """
        if not self._hooks.listed:
            return state
        waiting = self._hooks.listening_to("on_evaluation")
        if waiting and not self._rows.has_evaluators:
            raise InvalidError(f"hooks: {waiting[0].name} waits for evaluations, and nothing evaluates this job")
        hosts, row = self._attempt.hosts, self._newest_row()
        owner = read_owner(self._attempt.store) if hosts.is_main else None
        self._run_began = hosts.agree(0.0 if owner is None else owner.time)
        is_open = row.get("step") == step and self._rows.lacks_evaluation(row, step)
        is_evaluated = row.get("step") == step and self._rows.is_evaluated(row)
        self._seen = Fired(row=0 if is_open else step, evaluation=step if is_evaluated else 0)
        branch = self._read(state)
        if branch.fired.stopped:
            stopper = self._hooks.of_rule(branch.fired.stopped)
            self.stop = None if stopper is None else Stop(stopper, step, hosts.agree(self._reason_of_stop(step)))
        if branch.fired.stopped and self.stop is None:  # the spec tells this hook otherwise now
            state = self._write(state, branch, replace(branch, fired=replace(branch.fired, stopped=0)))
        for each in self._hooks.listening_to("on_start"):
            self._caller.tell(each, "on_start", self._moment(each, state, step, row))
        return state

    def after_row(self, state: TrainState, step: int) -> TrainState:
        """Make the calls for `step` if the newest row is its, and it is whole; the state with the new counters."""
        return self.fire(state, step, self._newest_row()) if self._hooks.listed else state

    def fire(self, state: TrainState, step: int, row: Row) -> TrainState:
        """Likewise for the row of this step, which is the same on every host."""
        if row.get("step") != step or self._rows.lacks_evaluation(row, step) or not self._hooks.listed:
            return state
        before = branch = self._read(state)
        branch = self._ask("on_row", "row", branch, state, step, row)

        def show(whole: Row) -> None:
            nonlocal branch
            branch = self._ask("on_evaluation", "evaluation", branch, state, step, whole)

        if self._rows.is_evaluated(row):
            show(row)
        elif branch.fired.asked == step and self._rows.has_evaluators:
            self._rows.evaluate_row(self._weights_of(state), row, show)
        self._rows.restart_clock()
        return self._write(state, before, branch)

    def checkpoint(self, state: TrainState, step: int) -> None:
        """The state of `step` is about to be saved in the run's directory: `on_checkpoint`."""
        self._tell("on_checkpoint", state, step)

    def end(self, state: TrainState, step: int) -> None:
        """The last step is complete: `on_end`. Raises `HookError` if what a hook adds to the result cannot be added."""
        for name, told in self._tell("on_end", state, step).items():
            if twice := [key for key in told if key in _TAKEN or key in self._told]:
                raise HookError(f"hook {name}: result.json has {twice[0]} already")
            self._told |= told

    def result(self) -> JsonObject:
        """What `result.json` says of hooks."""
        return self._told | ({} if self.stop is None else self.stop.result())

    def _tell(self, method: str, state: TrainState, step: int) -> dict[str, JsonObject]:
        """Call a method that steers nothing: what each hook has returned, by its name."""
        listening = self._hooks.listening_to(method)
        if not listening:
            return {}
        row = self._newest_row()
        return {each.name: self._caller.tell(each, method, self._moment(each, state, step, row)) for each in listening}

    def _ask(self, method: str, mark: str, branch: Branch, state: TrainState, step: int, row: Row) -> Branch:
        """Call a method of all hooks that have not been called so for `step`; the branch with what they have said."""
        fired, counters, is_marked = branch.fired, dict(branch.counters), False
        for each in self._hooks.listening_to(method):
            is_observer = each.counters is None
            if getattr(self._seen if is_observer else branch.fired, mark) >= step:
                continue
            is_marked = is_marked or not is_observer
            verdict = self._caller.steer(each, method, self._moment(each, state, step, row, counters.get(each.name)))
            if verdict.counters is not None:
                counters[each.name] = verdict.counters
            if verdict.act in (Act.EVALUATE, Act.STOP) and not self._rows.is_evaluated(row):
                fired = replace(fired, asked=step)
            if verdict.act is Act.SAVE:
                self.save_step = step
            if verdict.act is Act.EVALUATE and not self._rows.has_evaluators:
                warn(f"hook {each.name} asks for an evaluation at step {step}, and nothing evaluates this job")
            if verdict.act is Act.STOP and self.stop is None:
                self.stop = Stop(each, step, verdict.reason)
                fired = replace(fired, stopped=each.rule)
                self._attempt.record("stop", step, hook=each.name, reason=verdict.reason)
                self._attempt.say(
                    f"hook {each.name} ends the run at step {step}: {verdict.reason or 'no reason given'}"
                )
        self._seen = replace(self._seen, **{mark: step})
        return Branch(replace(fired, **{mark: step}) if is_marked else fired, counters)

    def _moment(self, each: Listed, state: TrainState, step: int, row: Row, counters: Any = None) -> Moment:
        if counters is None and each.counters is not None:
            counters = self._read(state).counters[each.name]
        own = jax.tree.map(np.copy, counters)
        return Moment(step, dict(row), self._weights_of(state), own, self._attempt.hosts, self._run_began)

    def _newest_row(self) -> Row:
        """The same on every host."""
        return dict(self._attempt.hosts.agree(self._rows.newest_row()))

    def _read(self, state: TrainState) -> Branch:
        return Branch.read(state.riders[RIDER]) if self._hooks.steering else Branch(Fired(), {})

    def _write(self, state: TrainState, before: Branch, branch: Branch) -> TrainState:
        return state if not self._hooks.steering or branch is before else branch.placed(state, RIDER)

    def _reason_of_stop(self, step: int) -> str:
        """What the hook has said when it stopped the run at `step`, in an earlier attempt. Main host only."""
        events = read_log(self._attempt.store, "events") if self._attempt.hosts.is_main else []
        told = [event.get("reason") for event in events if (event.get("event"), event.get("step")) == ("stop", step)]
        return str(told[-1]) if told else ""
