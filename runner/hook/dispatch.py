"""Dispatch of hooks: when they are called, and how their verdicts affect the run.

**Order at step k, on every host:**

1. The row of step k is made, with its evaluation if one is due.
2. `on_row` of each hook.
3. The evaluation that a hook has requested, if it was not due.
4. `on_evaluation` of each hook, if the step was evaluated.
5. The row is written, with the metrics that hooks have logged; if a hook raises, without those.
6. The new counters go into the train state, with a record of the calls made (`FiredCalls`).
7. The state may be saved.

A saved state therefore lacks calls of its own step only if the job was asked to stop during the evaluation. An attempt
that resumes from such a state evaluates first, and then makes the calls that are missing in `FiredCalls`. Calls of
observers are not recorded there: observers count as called for a row once the row is complete in the file. `FiredCalls`
also records that a hook has stopped the run, so an attempt that resumes at the last step, after a kill before
`result.json`, ends there.

**At the end.** A row, or an evaluation, that is there only because the run ends at this step is not part of a longer
run. Counters that include calls for it are therefore not saved: only `on_checkpoint` and `on_end` see them, and they
follow from the saved ones and the row. `on_row` of a hook with counters does not see such an evaluation.

**One call.** The verdict of process 0 applies on every host. All processes synchronize once after each call, even if it
raised, so that all of them know the outcome: a hook that raises on one host ends the run on all hosts, and each prints
the hook's name. If the other hosts hang in a collective because of the failure, the watchdog prints it and ends them.
The watchdog also prints the name of a hook that hangs.
"""

import contextlib
import copy
import inspect
import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from runner.attempts.attempt import Attempt
from runner.attempts.layout import read_owner
from runner.console import warn
from runner.distributed.clock import LocalFailure, Phase, TimeCategory
from runner.errors import (
    FencedError,
    HookError,
    InvalidError,
    PreemptedError,
    RetryableError,
    format_error,
    format_place,
)
from runner.hook.hooks import Act, Moment, Verdict
from runner.hook.listing import (
    STATE_NAME,
    FiredCalls,
    HookList,
    HookState,
    ListedHook,
    decode_counters,
    encode_counters,
)
from runner.metrics.rows import Row
from runner.storage import JsonObject, read_log
from runner.train.report import Report
from runner.train.state import TrainState
from runner.train.weights import DONATED, are_donated, copy_containers

_SLOW_SECONDS, _SLOW_STEPS = 1.0, 10.0  # a call that takes longer than both is warned of, once per hook and method
_INT_MAX_DIGITS = 300
_OWN_FILES = (__file__, inspect.getfile(Moment))
_VERDICT_METHODS = ("on_row", "on_evaluation")
_RESULT_KEYS = (
    *("step", "tokens", "examples", "train_loss", "val_loss", "fingerprint"),
    *("stopped_by", "stopped_because", "stopped_rule"),
)


def call_hook(listed: ListedHook, method: str, moment: Moment) -> tuple[JsonObject, str | None]:
    """Call a method of a hook on this host.

    Infrastructure failures inside of a hook are raised, because they are not errors of the hook; other code reports
    them to the other hosts. Returns (return value for JSON, None), or (neutral value, reason why the run cannot
    continue).
    """
    try:
        returned = _encode_returned(listed, method, getattr(listed.hook, method)(moment))
        return returned | ({"logged": moment.logged} if moment.logged and moment.hosts.is_main else {}), None
    except (RetryableError, FencedError):
        raise
    except KeyboardInterrupt:
        raise  # a stop, see `_HookCaller`
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and moment.hosts.num_processes > 1:
            raise  # a collective broken by a lost peer, which the watchdog reports
        # The last frame in the hook's own code is what its author needs; `Moment.log` and the checks here are not.
        frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in _OWN_FILES]
        place = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else format_place(getattr(listed.hook, method))
        neutral = {"act": Act.GO_ON.value, "counters": None, "reason": ""}
        return neutral, f"{format_error(error)} (at {place})"


def _encode_returned(listed: ListedHook, method: str, returned: Any) -> JsonObject:
    """Encode the return value of a method as JSON. Raises `TypeError` or `ValueError` if it is invalid."""

    def parse_int(text: str) -> int:
        # Other readers of `result.json` do not know longer ones.
        if len(text) > _INT_MAX_DIGITS:
            raise ValueError(f"returned an integer of {len(text):,} digits, needs at most {_INT_MAX_DIGITS}")
        return int(text)

    if method == "on_end" and (returned is None or isinstance(returned, Mapping)):
        return dict(json.loads(json.dumps(dict(returned or {}), allow_nan=False), parse_int=parse_int))
    if method not in _VERDICT_METHODS and returned is None:
        return {}
    if method in _VERDICT_METHODS and returned is None:
        returned = Verdict()
    if method not in _VERDICT_METHODS or not isinstance(returned, Verdict):
        needs = {"on_end": "a mapping or None", "on_row": "a Verdict or None", "on_evaluation": "a Verdict or None"}
        raise TypeError(f"returned a {type(returned).__name__}, needs {needs.get(method, 'None')}")
    # An observer may be added or removed between attempts, so it must not influence the trajectory.
    if listed.counters is None and (returned.act is not Act.GO_ON or returned.counters is not None):
        raise TypeError("returned a verdict, which an Observer cannot; derive the class from Hook")
    counters = None if returned.counters is None else encode_counters(returned.counters, listed.counters)
    return {"act": returned.act.value, "counters": counters, "reason": str(returned.reason)}


class HookInterruptedError(Exception):
    """A hook raised `KeyboardInterrupt`, on any host: the job stops at the next poll. Raised on every host."""


@dataclass
class _HookCaller:
    """Caller of the hooks of one attempt, which synchronizes the hosts after each call. Training thread only."""

    attempt: Attempt
    _warned: set[tuple[str, str]] = field(default_factory=set)  # hook and subject of each warning

    def get_verdict(self, listed: ListedHook, method: str, moment: Moment) -> tuple[Verdict, Row]:
        """Call `on_row` or `on_evaluation`; return process 0's verdict and the metrics that it has logged.

        Raises `HookError` on every host.
        """
        # A hook that decides differently on hosts is a bug, but a harmless one: warn, and follow process 0.
        returned = self._call_on_all(listed, method, moment)
        acts = [each["act"] for each in returned]
        if self.attempt.hosts.is_main and len(set(acts)) > 1 and self._is_first(listed, "verdict"):
            other = next(process for process, act in enumerate(acts) if act != acts[0])
            warn(
                f"hook {listed.name} says {acts[0]} on process 0 and {acts[other]} on process {other}, in {method} "
                f"at step {moment.step}: process 0 decides"
            )
        first = returned[0]
        counters = None if first["counters"] is None else decode_counters(first["counters"], listed.counters)
        return Verdict(Act(first["act"]), counters, first["reason"]), first.get("logged", {})

    def call(self, listed: ListedHook, method: str, moment: Moment) -> JsonObject:
        """Call one of the other methods and return process 0's result. Raises `HookError` on every host."""
        return dict(self._call_on_all(listed, method, moment)[0])

    def _call_on_all(self, listed: ListedHook, method: str, moment: Moment) -> list[JsonObject]:
        """Return the encoded return value of every host."""
        hosts, progress = self.attempt.hosts, self.attempt.progress
        began_seconds = time.monotonic()
        with progress.report_phase(Phase(f"hook {listed.name}.{method}", TimeCategory.EVALUATION)):
            # Taken before the call: a hook that donates arrays could also remove them from the containers.
            leaves, is_interrupted = jax.tree.leaves(moment.weights), False
            try:
                returned, problem = call_hook(listed, method, moment)
            except KeyboardInterrupt:
                returned, problem, is_interrupted = {}, None, True
            problem = DONATED if are_donated(leaves) else problem
        self._warn_if_slow(listed, method, moment.step, time.monotonic() - began_seconds)

        # Every host gets here, whatever its call did, so this gather cannot deadlock on a failure.
        place = f"hook {listed.name} in {method} at step {moment.step}"
        failure = None
        if problem is not None:
            failure = LocalFailure(f"{place} on process {hosts.process_id}: {problem}", is_end=True)
        wait = Phase(f"the wait for hook {listed.name}.{method} of the others", TimeCategory.EVALUATION)
        with progress.report_phase(wait), progress.report_wait(wait, failure):
            shown = returned if hosts.is_main or method in _VERDICT_METHODS else {}
            outcomes = hosts.gather([shown, problem, is_interrupted])
        for process, (_, other, _) in enumerate(outcomes):
            if other is not None:
                where = f" on process {process}" if hosts.num_processes > 1 else ""
                raise HookError(f"{place}{where}: {other}")
        if any(is_interrupted for *_, is_interrupted in outcomes):
            self.attempt.stop.stop_at_next_poll(f"KeyboardInterrupt in hook {listed.name}")
            raise HookInterruptedError(f"hook {listed.name} was interrupted in {method}")
        return [each for each, _, _ in outcomes]

    def _warn_if_slow(self, listed: ListedHook, method: str, step: int, seconds: float) -> None:
        usual_seconds = statistics.median(self.attempt.progress.get_step_seconds() or [0.0])
        if seconds < max(_SLOW_SECONDS, _SLOW_STEPS * usual_seconds) or not self._is_first(listed, method):
            return
        steps = f", as long as {seconds / usual_seconds:.0f} steps" if usual_seconds > 0 else ""
        warn(f"hook {listed.name} took {seconds:.1f} s in {method} at step {step}{steps}")
        self.attempt.record("slow_hook", step, hook=f"{listed.name}.{method}", seconds=round(seconds, 3))

    def _is_first(self, listed: ListedHook, subject: str) -> bool:
        """Return True at the first call for a hook and a subject, so that each is warned of once per attempt."""
        is_first = (listed.name, subject) not in self._warned
        self._warned.add((listed.name, subject))
        return is_first


@dataclass(frozen=True)
class _HookStop:
    """Stop of the run by a hook; `step` is the last one."""

    hook: ListedHook
    step: int
    reason: str

    def result(self) -> JsonObject:
        """Return the part of `result.json` about the stop."""
        return {"stopped_by": self.hook.name, "stopped_because": self.reason, "stopped_rule": self.hook.digest}


class HookDispatcher:
    """Dispatcher of the hooks of one attempt. Made and called on every host, by the training thread."""

    def __init__(
        self, hooks: HookList, attempt: Attempt, report: Report, get_weights: Callable[[TrainState], Any]
    ) -> None:
        self._hooks, self._attempt, self._report, self._get_weights = hooks, attempt, report, get_weights
        self._caller = _HookCaller(attempt)
        self._seen = FiredCalls()  # calls of observers, which the train state does not record
        self._at_end: HookState | None = None  # with the calls that are made only because the run ends
        self._logged: Row = {}  # metrics that hooks have logged for the row of the present step
        self._result: JsonObject = {}
        self._run_began = 0.0
        self.stop: _HookStop | None = None
        self.save_step = 0

    def start(self, state: TrainState, step: int) -> TrainState:
        """Restore a stop by a hook in an earlier attempt, and call `on_start`. Called before the first step."""
        if not self._hooks.listed:
            return state
        waiting = self._hooks.list_implementing("on_evaluation")
        if waiting and not self._report.has_evaluators:
            raise InvalidError(
                f"hooks: {waiting[0].name} waits for evaluations, and this job has no evaluators; remove the hook"
            )
        hosts, row = self._attempt.hosts, self._read_newest_row()
        owner = read_owner(self._attempt.store) if hosts.is_main else None
        self._run_began = hosts.agree(0.0 if owner is None else owner.time)
        state = self.go_to(state, step)
        for each in self._hooks.list_implementing("on_start"):
            with contextlib.suppress(HookInterruptedError):
                self._caller.call(each, "on_start", self._make_moment(each, state, step, row))
        return state

    def go_to(self, state: TrainState, step: int) -> TrainState:
        """Continue after `step`, which was restored or loaded. Returns the state; a void stop is removed from it."""
        if not self._hooks.listed:
            return state
        hosts, row = self._attempt.hosts, self._read_newest_row()
        self.stop, self.save_step, self._at_end = None, 0, None

        # Observers were called for the row that the attempt resumes from, unless it or its evaluation is missing.
        is_own_row = row.get("step") == step
        is_open = self._report.is_evaluation_missing(row, step) if is_own_row else self._report.lacks_last_row
        is_evaluated = is_own_row and self._report.is_evaluated(row)
        self._seen = FiredCalls(row=0 if is_open else step, evaluation=step if is_evaluated else 0)

        hook_state = self._read_state(state)
        if hook_state.fired.stopped:
            stopper = self._hooks.find_by_digest(hook_state.fired.stopped)
            if stopper is not None:
                # The reason is in the event ledger of the attempt that stopped.
                ledger = read_log(self._attempt.store, "events") if hosts.is_main else []
                stops = [event for event in ledger if (event.get("event"), event.get("step")) == ("stop", step)]
                self.stop = _HookStop(stopper, step, hosts.agree(str(stops[-1].get("reason")) if stops else ""))
            else:  # the hook was removed from the spec, or its config changed, so the run continues
                running = replace(hook_state, fired=replace(hook_state.fired, stopped=0))
                state = self._write_state(state, hook_state, running)
        return state

    @property
    def has_hooks(self) -> bool:
        """True if the job has hooks."""
        return bool(self._hooks.listed)

    def on_newest_row(self, state: TrainState, step: int) -> TrainState:
        """Make the calls for `step` that are missing, if the newest row of the file is that of `step` and complete."""
        if not self._hooks.listed:
            return state
        row = self._read_newest_row()
        former = dict(row)
        state = self.on_row(state, step, row)
        if row != former:
            self._report.replace_row(row)
        return state

    def on_row(self, state: TrainState, step: int, row: Row) -> TrainState:
        """Make the calls for `step`; return the state with new counters.

        `row` is the same on every host, and gets the metrics of an evaluation that a hook requests, and those that
        hooks log.
        """
        if row.get("step") != step or not self._hooks.listed:
            return state
        if self._report.is_evaluation_missing(row, step) or self._report.is_suspect(row):
            return state
        stop, given = self.stop, dict(row)
        self._logged = {}
        try:
            return self._call_for_row(state, step, row)
        except HookInterruptedError:
            # Discard the calls of this step, with an evaluation that they have requested: the state that is saved now
            # lacks them, and the next attempt makes them again.
            self.stop = stop
            row.clear()
            row.update(given)
            return state

    def _call_for_row(self, state: TrainState, step: int, row: Row) -> TrainState:
        # Reading waits for the device, but the row of this step is complete, so the device is done with the step.
        before = self._read_state(state)
        after = self._get_verdicts("on_row", "row", before, state, step, row)
        kept = before if self._report.is_end_row(row) else after

        def on_evaluation(row: Row) -> None:
            nonlocal after
            after = self._get_verdicts("on_evaluation", "evaluation", after, state, step, row)

        if self._report.is_evaluated(row):
            on_evaluation(row)
        elif after.fired.asked == step and self._report.has_evaluators:
            metrics = self._report.evaluate_requested(self._get_weights(state), row)
            if metrics is not None:  # else the job was asked to stop meanwhile
                row |= metrics
                on_evaluation(row)
        row |= self._logged
        # Exclude the time of slow hooks from the speed of the next steps.
        self._report.restart_clock()
        is_evaluation_kept = not self._report.is_end_evaluation(row) or after.fired.asked == step
        kept = after if is_evaluation_kept and kept is not before else kept
        self._at_end = None if kept is after else after
        return self._write_state(state, before, kept)

    def on_checkpoint(self, state: TrainState, step: int) -> None:
        """Call `on_checkpoint`, right before the state of `step` is saved in the run's directory."""
        with contextlib.suppress(HookInterruptedError):
            self._call_all("on_checkpoint", state, step)

    def on_end(self, state: TrainState, step: int) -> None:
        """Call `on_end`, after the last step. Raises `HookError` if two values for one key of `result.json` result."""
        try:
            returned_by_name = self._call_all("on_end", state, step)
        except HookInterruptedError as error:
            raise PreemptedError(f"{error}; step {step} is saved; run the same command again") from error
        for name, returned in returned_by_name.items():
            if taken := [key for key in returned if key in _RESULT_KEYS or key in self._result]:
                raise HookError(f"hook {name}: result.json has {taken[0]} already; use another key")
            self._result |= returned

    def result(self) -> JsonObject:
        """Return the part of `result.json` about hooks."""
        return self._result | ({} if self.stop is None else self.stop.result())

    def _call_all(self, method: str, state: TrainState, step: int) -> dict[str, JsonObject]:
        """Call a method without verdict of all hooks that override it; return the results by hook name."""
        implementing = self._hooks.list_implementing(method)
        if not implementing:
            return {}
        row = self._read_newest_row()
        return {
            each.name: self._caller.call(each, method, self._make_moment(each, state, step, row))
            for each in implementing
        }

    def _get_verdicts(
        self, method: str, mark: str, before: HookState, state: TrainState, step: int, row: Row
    ) -> HookState:
        """Call a method of all hooks that have not been called for `step`, and note what their verdicts request.

        `mark` is the field of `FiredCalls` that belongs to the method. Returns the hook state with the new counters.
        """
        fired, counters, is_marked = before.fired, dict(before.counters), False
        for each in self._hooks.list_implementing(method):
            is_observer = each.counters is None
            # Calls that the mark contains were made before the save that this attempt resumed from.
            if getattr(self._seen if is_observer else before.fired, mark) >= step:
                continue
            is_marked = is_marked or not is_observer
            is_hidden = method == "on_row" and not is_observer and self._report.is_end_evaluation(row)
            seen = self._report.remove_evaluation(row) if is_hidden else row
            moment = self._make_moment(each, state, step, seen, counters.get(each.name), can_log=True)
            verdict, logged = self._caller.get_verdict(each, method, moment)
            prefix = f"{'val' if method == 'on_evaluation' else 'hook'}/{each.name}"
            self._logged |= {f"{prefix}/{key}": value for key, value in logged.items()}
            if verdict.counters is not None:
                counters[each.name] = verdict.counters
            # The last step of a run is evaluated, so a stop requests an evaluation too.
            is_evaluated = self._report.is_evaluated(row) and not self._report.is_end_evaluation(row)
            if verdict.act in (Act.EVALUATE, Act.STOP) and not is_evaluated:
                fired = replace(fired, asked=step)
            if verdict.act is Act.SAVE:
                self.save_step = step
            if verdict.act is Act.EVALUATE and not self._report.has_evaluators:
                warn(f"hook {each.name} requests an evaluation at step {step}, and this job has no evaluators")
            # The first hook that stops the run is named; later ones in the same step change nothing.
            if verdict.act is Act.STOP and self.stop is None:
                self.stop = _HookStop(each, step, verdict.reason)
                fired = replace(fired, stopped=each.digest)
                self._attempt.record("stop", step, hook=each.name, reason=verdict.reason)
                self._attempt.say(
                    f"hook {each.name} ends the run at step {step}: {verdict.reason or 'no reason given'}"
                )
        self._seen = replace(self._seen, **{mark: step})
        return HookState(replace(fired, **{mark: step}) if is_marked else fired, counters)

    def _make_moment(
        self, each: ListedHook, state: TrainState, step: int, row: Row, counters: Any = None, can_log: bool = False
    ) -> Moment:
        """Return the argument of a hook's call, with copies of row, weights and counters that the hook may modify."""
        if counters is None and each.counters is not None:
            counters = (self._at_end or self._read_state(state)).counters[each.name]
        # Copies, because a hook may modify its arguments.
        own, weights = jax.tree.map(np.copy, counters), copy_containers(self._get_weights(state))
        logged: dict[str, float | None] | None = {} if can_log else None
        return Moment(step, copy.deepcopy(row), weights, own, self._attempt.hosts, self._run_began, logged)

    def _read_newest_row(self) -> Row:
        """Return the newest row, the same on every host."""
        # Only process 0 holds the rows.
        return dict(self._attempt.hosts.agree(self._report.get_newest_row()))

    def _read_state(self, state: TrainState) -> HookState:
        if not self._hooks.stateful:
            return HookState(FiredCalls(), {})
        return HookState.from_arrays(state.riders[STATE_NAME])

    def _write_state(self, state: TrainState, before: HookState, after: HookState) -> TrainState:
        return state if not self._hooks.stateful or after is before else after.replace_in(state, STATE_NAME)
