"""When hooks are called, and what becomes of what they say: the part of the training loop that is theirs.

The order at step k, on every host: the row of k is made, with its evaluation if one is due; `on_row`; the evaluation
that a hook has asked for; `on_evaluation`; the new counters go into the state, with a mark of what was called
(`FiredCalls`); then the state may be saved. So a saved state is ahead of its calls in one case alone: a stop came
during the
evaluation of its step. Whoever resumes there evaluates first, and then makes the calls that the mark lacks.

A stop of a hook is in the mark too: who resumes the last step, after a kill before `result.json`, ends there as well.
Observers have no mark: for them a row counts as seen once it is whole in the file.

One call of one hook, on every host: what it raises, returns and takes. Host 0's verdict is everyone's.

The hosts meet once after each call, whether it has raised or not, so that all of them know: a hook that raises on one
host ends them all, and each names it. Where it leaves the others waiting, in a program over all devices, the watchdog
names it and ends them. One that hangs is named by the watchdog too, by the phase of its host.

A job that calls hooks between its steps: what their verdicts change in the life of a job.
"""

import functools
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import jax
import numpy as np

from runner.console import warn
from runner.distributed.clock import LocalFailure, Phase, TimeBucket
from runner.errors import FencedError, HookError, InvalidError, RetryableError, format_error
from runner.hook.counters import FiredCalls, HookState, decode, encode
from runner.hook.listing import STATE_NAME, HookList, ListedHook, load_hooks
from runner.hook.protocol import Act, Moment, Verdict
from runner.job import RestoreableJob
from runner.metrics.rows import Row
from runner.run.attempt import Attempt
from runner.run.layout import read_owner, read_result
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import JsonObject, read_log
from runner.train.evaluators import add_averages
from runner.train.setup import TrainSetupBuilder
from runner.train.state import TrainState

_SLOW_SECONDS, _SLOW_STEPS = 1.0, 10.0  # a call that takes longer than both is told of, once a hook
_STEERING = ("on_row", "on_evaluation")


@dataclass
class HookCaller:
    """Calls the hooks of one attempt. Made and called on every host, by the training thread."""

    attempt: Attempt
    _told: set[tuple[str, str]] = field(default_factory=set)

    def steer(self, listed: ListedHook, method: str, moment: Moment) -> Verdict:
        """Call `on_row` or `on_evaluation`: host 0's verdict, on every host. Raises `HookError` on every host."""
        own, found = self._call(listed, method, moment)
        acts = [told["act"] for told in found]
        if own and len(set(acts)) > 1 and self._is_new(listed, "verdict"):
            others = next(process for process, act in enumerate(acts) if act != acts[0])
            warn(
                f"hook {listed.name} says {acts[0]} on process 0 and {acts[others]} on process {others}, in {method} "
                f"at step {moment.step}: process 0 decides"
            )
        first = found[0]
        counters = None if first["counters"] is None else decode(first["counters"], listed.counters)
        return Verdict(Act(first["act"]), counters, first["reason"])

    def tell(self, listed: ListedHook, method: str, moment: Moment) -> JsonObject:
        """Call one of the others: what `on_end` returns on host 0, on every host. Raises `HookError` likewise."""
        return dict(self._call(listed, method, moment)[1][0])

    def _call(self, listed: ListedHook, method: str, moment: Moment) -> tuple[bool, list[JsonObject]]:
        """Whether this is host 0, and what every host was told."""
        hosts, progress = self.attempt.hosts, self.attempt.progress
        began_seconds = time.monotonic()
        with progress.report_phase(Phase(f"hook {listed.name}.{method}", TimeBucket.EVALUATION)):
            told, problem = _outcome(listed, method, moment)
        self._note_time(listed, method, moment.step, time.monotonic() - began_seconds)
        words = f"hook {listed.name} in {method} at step {moment.step}"
        failure = (
            None if problem is None else LocalFailure(f"{words} on process {hosts.process_id}: {problem}", is_end=True)
        )
        wait = Phase(f"the wait for hook {listed.name}.{method} of the others", TimeBucket.EVALUATION)
        with progress.report_phase(wait), progress.report_wait(wait, failure):
            found = hosts.gather([told if hosts.is_main or method in _STEERING else {}, problem])
        for process, (_, other) in enumerate(found):
            if other is not None:
                where = f" on process {process}" if hosts.num_processes > 1 else ""
                raise HookError(f"{words}{where}: {other}")
        return hosts.is_main, [each for each, _ in found]

    def _note_time(self, listed: ListedHook, method: str, step: int, seconds: float) -> None:
        usual_seconds = statistics.median(self.attempt.progress.get_step_seconds() or [0.0])
        if seconds < max(_SLOW_SECONDS, _SLOW_STEPS * usual_seconds) or not self._is_new(listed, method):
            return
        steps = f", as long as {seconds / usual_seconds:.0f} steps" if usual_seconds > 0 else ""
        warn(f"hook {listed.name} took {seconds:.1f} s in {method} at step {step}{steps}")
        self.attempt.record("slow_hook", step, hook=f"{listed.name}.{method}", seconds=round(seconds, 3))

    def _is_new(self, listed: ListedHook, what: str) -> bool:
        """Whether this has not been told of the hook yet in this attempt."""
        is_new = (listed.name, what) not in self._told
        self._told.add((listed.name, what))
        return is_new


def _outcome(listed: ListedHook, method: str, moment: Moment) -> tuple[JsonObject, str | None]:
    """What this host's hook has said, as JSON; why it cannot go on, None if it can.

    What infrastructure has done to a hook is not its fault, and raised: who waits for this host hears of it otherwise.
    """
    try:
        returned = getattr(listed.hook, method)(moment)
        return _told(listed, method, returned), None
    except (RetryableError, FencedError):
        raise
    except (Exception, SystemExit) as error:  # a user's hook may raise anything
        if isinstance(error, jax.errors.JaxRuntimeError) and moment.hosts.num_processes > 1:
            raise  # a collective that a lost peer has broken: the watchdog names that
        return {"act": Act.GO_ON.value, "counters": None, "reason": ""}, _reason(error)


def _told(listed: ListedHook, method: str, returned: Any) -> JsonObject:
    """What a method has returned, as JSON. Raises `TypeError` or `ValueError` if it may not return that."""
    if method == "on_end" and (returned is None or isinstance(returned, Mapping)):
        return dict(json.loads(json.dumps(dict(returned or {}), allow_nan=False)))
    if method not in _STEERING and returned is None:
        return {}
    if method in _STEERING and returned is None:
        returned = Verdict()
    if method not in _STEERING or not isinstance(returned, Verdict):
        needs = {"on_end": "a mapping or None", "on_row": "a Verdict or None", "on_evaluation": "a Verdict or None"}
        raise TypeError(f"returned a {type(returned).__name__}, needs {needs.get(method, 'None')}")
    if listed.counters is None and (returned.act is not Act.GO_ON or returned.counters is not None):
        raise TypeError("returned a verdict, and an Observer only looks; derive it from Hook")
    counters = None if returned.counters is None else encode(returned.counters, listed.counters)
    return {"act": returned.act.value, "counters": counters, "reason": str(returned.reason)}


def _reason(error: BaseException) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{format_error(error)} (at {frames[-1].filename}:{frames[-1].lineno})"


_TAKEN = ("step", "tokens", "train_loss", "val_loss", "fingerprint", "stopped_by", "stopped_because", "stopped_rule")


class RowSource(Protocol):
    """What is needed of the rows of a run: see `Report`."""

    @property
    def has_evaluators(self) -> bool:
        """Whether anything evaluates the weights."""

    def newest_row(self) -> Row:
        """The newest row; empty if there is none, and on other hosts than the main one."""

    def is_evaluation_missing(self, row: Row, step: int) -> bool:
        """Whether the row of `step` was to be evaluated, and a stop came before."""

    def is_evaluated(self, row: Row) -> bool:
        """Whether it has figures of an evaluation."""

    def evaluate_row(self, weights: Any, row: Row, before_it_is_kept: Callable[[Row], None]) -> bool:
        """Keep the newest row with the figures of its weights, once it was shown; False if a stop came meanwhile."""

    def restart_clock(self) -> None:
        """Leave out of the speed of steps what has passed so far."""


@dataclass(frozen=True)
class HookStop:
    """A hook has ended the run: `step` is its last."""

    hook: ListedHook
    step: int
    reason: str

    def result(self) -> JsonObject:
        """What `result.json` says of it."""
        return {"stopped_by": self.hook.name, "stopped_because": self.reason, "stopped_rule": self.hook.rule}


class HookDispatcher:
    """The hooks of one attempt at work. Made and called on every host, by the training thread.

    Attributes:
        stop: who has ended the run; None while nobody has.
        save_step: the last step that a hook wanted to be saved.
    """

    def __init__(self, hooks: HookList, attempt: Attempt, rows: RowSource, weights_of: Callable[[TrainState], Any]):
        self._hooks, self._attempt, self._rows, self._weights_of = hooks, attempt, rows, weights_of
        self._caller = HookCaller(attempt)
        self._seen = FiredCalls()  # by observers
        self._told: JsonObject = {}
        self._run_began = 0.0
        self.stop: HookStop | None = None
        self.save_step = 0

    def start(self, state: TrainState, step: int) -> TrainState:
        """Before the first step of the attempt: who has stopped the run, and `on_start`.

        Raises `InvalidError` if a hook waits for evaluations where there are none.
        """
        if not self._hooks.listed:
            return state
        waiting = self._hooks.list_implementing("on_evaluation")
        if waiting and not self._rows.has_evaluators:
            raise InvalidError(f"hooks: {waiting[0].name} waits for evaluations, and nothing evaluates this job")
        hosts, row = self._attempt.hosts, self._newest_row()
        owner = read_owner(self._attempt.store) if hosts.is_main else None
        self._run_began = hosts.agree(0.0 if owner is None else owner.time)
        is_open = row.get("step") == step and self._rows.is_evaluation_missing(row, step)
        is_evaluated = row.get("step") == step and self._rows.is_evaluated(row)
        self._seen = FiredCalls(row=0 if is_open else step, evaluation=step if is_evaluated else 0)
        branch = self._read(state)
        if branch.fired.stopped:
            stopper = self._hooks.find_by_digest(branch.fired.stopped)
            self.stop = None if stopper is None else HookStop(stopper, step, hosts.agree(self._reason_of_stop(step)))
        if branch.fired.stopped and self.stop is None:  # the spec tells this hook otherwise now
            state = self._write(state, branch, replace(branch, fired=replace(branch.fired, stopped=0)))
        for each in self._hooks.list_implementing("on_start"):
            self._caller.tell(each, "on_start", self._moment(each, state, step, row))
        return state

    def after_row(self, state: TrainState, step: int) -> TrainState:
        """Make the calls for `step` if the newest row is its, and it is whole; the state with the new counters."""
        return self.fire(state, step, self._newest_row()) if self._hooks.listed else state

    def fire(self, state: TrainState, step: int, row: Row) -> TrainState:
        """Likewise for the row of this step, which is the same on every host."""
        if row.get("step") != step or self._rows.is_evaluation_missing(row, step) or not self._hooks.listed:
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
        listening = self._hooks.list_implementing(method)
        if not listening:
            return {}
        row = self._newest_row()
        return {each.name: self._caller.tell(each, method, self._moment(each, state, step, row)) for each in listening}

    def _ask(self, method: str, mark: str, branch: HookState, state: TrainState, step: int, row: Row) -> HookState:
        """Call a method of all hooks that have not been called so for `step`; the branch with what they have said."""
        fired, counters, is_marked = branch.fired, dict(branch.counters), False
        for each in self._hooks.list_implementing(method):
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
                self.stop = HookStop(each, step, verdict.reason)
                fired = replace(fired, stopped=each.rule)
                self._attempt.record("stop", step, hook=each.name, reason=verdict.reason)
                self._attempt.say(
                    f"hook {each.name} ends the run at step {step}: {verdict.reason or 'no reason given'}"
                )
        self._seen = replace(self._seen, **{mark: step})
        return HookState(replace(fired, **{mark: step}) if is_marked else fired, counters)

    def _moment(self, each: ListedHook, state: TrainState, step: int, row: Row, counters: Any = None) -> Moment:
        if counters is None and each.counters is not None:
            counters = self._read(state).counters[each.name]
        own = jax.tree.map(np.copy, counters)
        return Moment(step, dict(row), self._weights_of(state), own, self._attempt.hosts, self._run_began)

    def _newest_row(self) -> Row:
        """The same on every host."""
        return dict(self._attempt.hosts.agree(self._rows.newest_row()))

    def _read(self, state: TrainState) -> HookState:
        return HookState.read(state.riders[STATE_NAME]) if self._hooks.stateful else HookState(FiredCalls(), {})

    def _write(self, state: TrainState, before: HookState, branch: HookState) -> TrainState:
        return state if not self._hooks.stateful or branch is before else branch.placed(state, STATE_NAME)

    def _reason_of_stop(self, step: int) -> str:
        """What the hook has said when it stopped the run at `step`, in an earlier attempt. Main host only."""
        events = read_log(self._attempt.store, "events") if self._attempt.hosts.is_main else []
        told = [event.get("reason") for event in events if (event.get("event"), event.get("step")) == ("stop", step)]
        return str(told[-1]) if told else ""


class HookedJob(RestoreableJob):
    """Base of `BaseTrainer`. Its `report` has rows; its loop calls `begin_steering` once and `steer` after each row."""

    calls_hooks: ClassVar[bool] = True

    setup_builder: TrainSetupBuilder  # from the trainer's constructor on

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        super().__init__(spec, document)
        seen: Any = self
        self.hooks: HookList = load_hooks(self.document, spec.hook_entries, seen)

    @functools.cached_property
    def hook_dispatcher(self) -> HookDispatcher:
        """The hooks at work in this attempt."""
        report: Any = self.report
        return HookDispatcher(self.hooks, self.attempt, report, self.get_evaluated_weights)

    def get_evaluated_weights(self, state: Any) -> Any:
        """What evaluators and hooks are shown of a state: its weights, and by `ema` their averages that ride along."""
        return add_averages(self.weights, state)

    def begin_steering(self) -> None:
        """Make up for what a stop has kept from the step that is resumed: its evaluation, and the calls of hooks."""
        report: Any = self.report
        self.state = self.hook_dispatcher.start(self.state, self.step)

        def fire(row: Row) -> None:
            self.state = self.hook_dispatcher.fire(self.state, self.step, row)

        if not report.complete_row(self.get_evaluated_weights(self.state), self.step, fire):
            self.save_or_stop()
        self.steer()

    def steer(self) -> None:
        """Let hooks see the row of this step, if it has one; they may have it saved, or make it the last."""
        self.state = self.hook_dispatcher.after_row(self.state, self.step)
        if self.hook_dispatcher.save_step == self.step:
            self.checkpointer.ask_for(self.step)

    @property
    def total_steps(self) -> int:
        """The config's, or where a hook has ended the run. Of epochs the data are read on this host."""
        stop = self.hook_dispatcher.stop if "hook_dispatcher" in vars(self) else None
        return self.setup_builder.config_in_steps.total_steps if stop is None else stop.step

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
        self.hook_dispatcher.end(self.state, self.step)
        return super().result() | self.hook_dispatcher.result()
