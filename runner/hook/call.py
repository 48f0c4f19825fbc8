"""One call of one hook, on every host: what it raises, returns and takes. Host 0's verdict is everyone's.

The hosts meet once after each call, whether it has raised or not, so that all of them know: a hook that raises on one
host ends them all, and each names it. Where it leaves the others waiting, in a program over all devices, the watchdog
names it and ends them. One that hangs is named by the watchdog too, by the phase of its host.
"""

import json
import statistics
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from runner.attempt.claim import Attempt
from runner.errors import FencedError, HookError, RetryableError, first_line
from runner.hook.counters import decode, encode
from runner.hook.listing import Listed
from runner.hook.protocol import Act, Moment, Verdict
from runner.hosts.clock import Bucket
from runner.hosts.progress import Failure, Phase
from runner.storage import JsonObject
from runner.terminal import warn

_SLOW_SECONDS, _SLOW_STEPS = 1.0, 10.0  # a call that takes longer than both is told of, once a hook
_STEERING = ("on_row", "on_evaluation")


@dataclass
class Caller:
    """Calls the hooks of one attempt. Made and called on every host, by the training thread."""

    attempt: Attempt
    _told: set[tuple[str, str]] = field(default_factory=set)

    def steer(self, listed: Listed, method: str, moment: Moment) -> Verdict:
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

    def tell(self, listed: Listed, method: str, moment: Moment) -> JsonObject:
        """Call one of the others: what `on_end` returns on host 0, on every host. Raises `HookError` likewise."""
        return dict(self._call(listed, method, moment)[1][0])

    def _call(self, listed: Listed, method: str, moment: Moment) -> tuple[bool, list[JsonObject]]:
        """Whether this is host 0, and what every host was told."""
        hosts, progress = self.attempt.hosts, self.attempt.progress
        began_seconds = time.monotonic()
        with progress.during(Phase(f"hook {listed.name}.{method}", Bucket.EVALUATION)):
            told, problem = _outcome(listed, method, moment)
        self._note_time(listed, method, moment.step, time.monotonic() - began_seconds)
        words = f"hook {listed.name} in {method} at step {moment.step}"
        failure = None if problem is None else Failure(f"{words} on process {hosts.process_id}: {problem}", is_end=True)
        wait = Phase(f"the wait for hook {listed.name}.{method} of the others", Bucket.EVALUATION)
        with progress.during(wait), progress.awaiting(wait, failure):
            found = hosts.gather([told if hosts.is_main or method in _STEERING else {}, problem])
        for process, (_, other) in enumerate(found):
            if other is not None:
                where = f" on process {process}" if hosts.num_processes > 1 else ""
                raise HookError(f"{words}{where}: {other}")
        return hosts.is_main, [each for each, _ in found]

    def _note_time(self, listed: Listed, method: str, step: int, seconds: float) -> None:
        usual_seconds = statistics.median(self.attempt.progress.gaps() or [0.0])
        if seconds < max(_SLOW_SECONDS, _SLOW_STEPS * usual_seconds) or not self._is_new(listed, method):
            return
        steps = f", as long as {seconds / usual_seconds:.0f} steps" if usual_seconds > 0 else ""
        warn(f"hook {listed.name} took {seconds:.1f} s in {method} at step {step}{steps}")
        self.attempt.record("slow_hook", step, hook=f"{listed.name}.{method}", seconds=round(seconds, 3))

    def _is_new(self, listed: Listed, what: str) -> bool:
        """Whether this has not been told of the hook yet in this attempt."""
        is_new = (listed.name, what) not in self._told
        self._told.add((listed.name, what))
        return is_new


def _outcome(listed: Listed, method: str, moment: Moment) -> tuple[JsonObject, str | None]:
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


def _told(listed: Listed, method: str, returned: Any) -> JsonObject:
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
    return f"{first_line(error)} (at {frames[-1].filename}:{frames[-1].lineno})"
