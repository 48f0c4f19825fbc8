"""Summary of the event ledger per attempt, read once from the first event to the last, in bounded memory.

An attempt keeps its newest `_MARKS_MAX` saves. The whole run keeps `_NOTICES_MAX` notices, `_POINTS_MAX` validation
losses, and the commits of the checkpoints that exist and of the newest others, because a listing may be older than the
ledger. A value in an event that has the wrong type is treated as missing.
"""

import collections
import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from runner.attempts.events import EVENT_KEYS
from runner.console import format_duration
from runner.distributed.clock import TimeCategory
from runner.history.records import Notice, SaveRecord
from runner.storage import STEP_MAX, TIME_MAX, JsonlTail, JsonObject, Store

_NOTICES_MAX = 50
_EVENTS_MAX = 100
STAGES_MAX = 200
_FIGURES_MAX = 64
_MARKS_MAX = 256
_NAMED_PROCESSES_MAX = 8
_POINTS_MAX = 2048
_PROGRAM_CHANGES_MAX = 64
_UNSEEN_MAX = 64
_STEP_EVENTS = {
    "init",
    "fork",
    "restore",
    "save",
    "commit",
    "evaluate",
    "progress",
    "preempt",
    "done",
    "failed",
    "stuck",
}
_TEXT_MAX = 300


@dataclass
class AttemptEvents:
    """Summary of the events of one attempt. A value without an event is None, or 0 seconds."""

    number: int
    first: float = math.inf  # time of its first event
    last: float = -math.inf  # time of its last event
    start: JsonObject = field(default_factory=dict)  # its event `start`
    compile_seconds: float = 0.0  # time until everything was compiled
    restore_seconds: float = 0.0  # time of the restore or initialization
    ready: float | None = None  # when the state was available
    resumed_step: int | None = None  # step of that state
    restored_from: str | None = None  # tier from which a checkpoint was restored, with the source of its parts
    step: int | None = None  # last completed step in any event
    # Steps between a step to which the job went back while it ran, and the step that it had reached.
    repeated_steps: int = 0
    num_saves: int = 0  # saves that were begun
    stall_seconds: float = 0.0  # time for which saves blocked training
    # (step, seconds spent on steps until then) of the newest saves.
    marks: "collections.deque[tuple[int, float]]" = field(default_factory=lambda: collections.deque(maxlen=_MARKS_MAX))
    end: str | None = None  # name of the event that ended it
    code: int | None = None  # exit code in that event
    reason: str | None = None  # reason in that event
    straggler: JsonObject = field(default_factory=dict)  # its last event `straggler`

    def interpolate_steps_seconds(self, step: int, reached_step: int, reached_seconds: float) -> float:
        """Return the time spent on steps when `step` was completed; `reached_seconds` belong to the last step.

        It is the time recorded by the save of that step, or an interpolation between saves.
        """
        # Steps between two saves are assumed to take equally long; the error is at most a fraction of one interval.
        before, after = (self.resumed_step or 0, 0.0), (reached_step, reached_seconds)
        for mark in self.marks:
            if mark[0] <= step:
                before = mark
            elif mark[0] < after[0]:
                after = mark
        if step <= before[0] or after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0])


class _CommitRecord(NamedTuple):
    """Commit of a checkpoint according to the ledger."""

    time: float
    num_bytes: int
    attempt: int


@dataclass
class LedgerSummary:
    """Summary of all events."""

    checkpoints: Set[int] = frozenset()  # the requested steps
    attempts: dict[int, AttemptEvents] = field(default_factory=dict)  # events by attempt
    # Commits of the requested steps and of a few others, by step.
    commits: dict[int, _CommitRecord] = field(default_factory=dict)
    # Steps of `commits` whose bits were read back, or restored, since their last commit.
    verified: set[int] = field(default_factory=set)
    forgotten: int = -1  # the newest step that was not requested and whose commit was dropped
    validation: list[tuple[int, float]] = field(default_factory=list)  # (step, val/loss) of the surviving trajectory
    best_validation: tuple[int, float] | None = None  # the lowest of them
    # Step and value of the newest other figures of evaluations, by key.
    figures: dict[str, tuple[int, float]] = field(default_factory=dict)
    is_language_model: bool = True  # False if the newest compiled model returns no logits over ids
    notices: "collections.deque[Notice]" = field(default_factory=lambda: collections.deque(maxlen=_NOTICES_MAX))
    num_invalid: int = 0  # events without a number of an attempt, a time or a name; they were skipped
    saves: list[SaveRecord] = field(default_factory=list)  # all commits, or a part of very many
    events: "collections.deque[JsonObject]" = field(default_factory=lambda: collections.deque(maxlen=_EVENTS_MAX))
    fork: JsonObject = field(default_factory=dict)  # the newest event `fork`; empty if the run is no fork
    # An event `stage` of each of the first `STAGES_MAX` stages, by its first step: that of its border, if it is known.
    stages: dict[int, JsonObject] = field(default_factory=dict)
    # (attempt, step) of each change of the program in the surviving trajectory, with spec and hardware unchanged; the
    # newest of them.
    program_changes: list[tuple[int, int]] = field(default_factory=list)


def get_int(row: JsonObject, key: str) -> int | None:
    """Return the value of a key if it is a whole number, else None."""
    value = row.get(key)
    # `bool` is an `int` in Python, and a damaged line may hold a number that no array or date can.
    return value if type(value) is int and abs(value) < 1 << 62 else None


def get_float(row: JsonObject, key: str) -> float | None:
    """Return the value of a key if it is a finite number, else None."""
    value = row.get(key)
    if type(value) is int:
        return float(value) if abs(value) < 1 << 62 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def get_step(row: JsonObject, key: str = "step") -> int | None:
    """Return the value of a key if it may be a number of steps, else None."""
    step = get_int(row, key)
    return step if step is not None and 0 <= step <= STEP_MAX else None


def get_time(row: JsonObject, key: str = "time") -> float | None:
    """Return the value of a key if it may be a time in Unix seconds, else None."""
    moment = get_float(row, key)
    return moment if moment is not None and 0 <= moment <= TIME_MAX else None


def get_seconds(row: JsonObject, key: str) -> float:
    """Return the value of a key if it may be a duration in seconds, else 0."""
    return get_time(row, key) or 0.0


def to_single_line(value: Any) -> str:
    """Return a value as one line of bounded length, without characters that control a terminal."""
    try:
        shown = value if isinstance(value, str) else repr(value)
    except ValueError:  # Python refuses to write a whole number of thousands of digits.
        shown = "?"
    return "".join(each if each.isprintable() else " " for each in shown[: 4 * _TEXT_MAX]).strip()[:_TEXT_MAX]


class LedgerReader:
    """Reader of the ledger of one run, which reads each event once, however often `read` is called."""

    def __init__(self, store: Store):
        self._tail, self._summary = JsonlTail(store, "events"), LedgerSummary()
        self._is_consistent = True  # False while events that the tail has returned may be missing in the summary

    def read(self, checkpoints: Set[int]) -> LedgerSummary:
        """Return the summary of all events so far, with the commits of these steps. It is valid until the next call.

        Raises `OSError` if the store does not answer.
        """
        # An error in the previous call may have lost events between the tail and the summary: all are read again.
        if not self._is_consistent:
            self._tail.restart()
        self._is_consistent = False
        added = self._read_new_events(checkpoints)
        if any(step <= self._summary.forgotten and step not in self._summary.commits for step in added):
            # A step that was not requested before may have been dropped, for instance after a listing failed.
            self._tail.restart()
            self._read_new_events(checkpoints)
        self._is_consistent = True
        return self._summary

    @property
    def num_skipped(self) -> int:
        """Number of lines of the ledger that are not events, and were skipped."""
        return self._tail.num_skipped + self._summary.num_invalid

    def _read_new_events(self, checkpoints: Set[int]) -> Set[int]:
        """Apply the new events, and return the steps that were not requested in the previous call."""
        has_restarted, rows = self._tail.read()
        if has_restarted:
            self._summary = LedgerSummary(checkpoints)
        added = checkpoints - self._summary.checkpoints
        self._summary.checkpoints = checkpoints
        apply_events(self._summary, rows)
        return added


def apply_events(summary: LedgerSummary, rows: Iterable[JsonObject]) -> LedgerSummary:
    """Add events that follow those in the summary, and return the summary."""
    for row in rows:
        number, moment, event = get_int(row, "attempt"), get_time(row), row.get("event")
        # A line of a later version, or a damaged one, must not hide the history around it.
        if number is None or number < 1 or moment is None or not isinstance(event, str):
            summary.num_invalid += 1
            continue
        summary.events.append(row)
        attempt = summary.attempts.setdefault(number, AttemptEvents(number))
        attempt.first, attempt.last = min(attempt.first, moment), max(attempt.last, moment)
        step = get_step(row)
        if step is not None and event in _STEP_EVENTS:
            attempt.step = step if attempt.step is None else max(attempt.step, step)
        match event:
            case "start":
                attempt.start = row
            case "compile":
                summary.is_language_model = row.get("language_model") is not False
            case "prepare":
                attempt.compile_seconds = get_seconds(row, "seconds")
            case "init" | "fork" | "restore":
                attempt.restore_seconds, attempt.ready = get_seconds(row, "seconds"), moment
                attempt.resumed_step = step
                if event == "restore":
                    fetched = row.get("from_replicas")
                    names = ", ".join(map(str, fetched[:_NAMED_PROCESSES_MAX])) if isinstance(fetched, list) else ""
                    source = f", process {to_single_line(names)} from a replica" if names else ""
                    attempt.restored_from = f"fast tier{source}" if row.get("tier") == "fast" else "run's directory"
                if event == "fork":
                    summary.fork = row
                # An attempt that was suspended, and shut out meanwhile, may record its restore after a newer one.
                if step is not None and number == max(summary.attempts):
                    _drop_steps_after(summary, step)
                    # A restore computes every fingerprint, but a state of the fast tier is not a checkpoint in the
                    # directory.
                    if event == "restore" and row.get("tier") != "fast":
                        summary.verified.add(step)
                    # Written before the restore in the same attempt. An earlier attempt that began at this step, and
                    # saved no later one, has left no step of its program.
                    summary.program_changes = [
                        known for known in summary.program_changes if known[1] < step or known[0] == number
                    ]
            case "changed":
                if step is not None and isinstance(row.get("program"), list) and row.get("expected") is False:
                    summary.program_changes = [*summary.program_changes, (number, step)][-_PROGRAM_CHANGES_MAX:]
            case "load" if step is not None:
                _drop_steps_after(summary, step)
                attempt.repeated_steps += max((get_step(row, "before") or 0) - step, 0)
            case "stage":
                begin = get_step(row, "from_step")
                is_known = begin in summary.stages
                # An attempt that resumes within a stage enters it again.
                if begin and (step == begin or not is_known) and (is_known or len(summary.stages) < STAGES_MAX):
                    summary.stages[begin] = row
            case "save":
                blocked_seconds, clock = get_seconds(row, "blocked_seconds"), row.get("clock")
                steps_seconds = get_seconds(clock, TimeCategory.STEPS.value) if isinstance(clock, dict) else None
                if steps_seconds is None and attempt.ready is not None:  # An older runner recorded no clock.
                    steps_seconds = max(moment - blocked_seconds - attempt.ready - attempt.stall_seconds, 0.0)
                if step is not None and steps_seconds is not None:
                    attempt.marks.append((step, steps_seconds))
                attempt.num_saves += 1
                attempt.stall_seconds += blocked_seconds
            case "commit":
                if step is not None and row.get("tier") != "fast":
                    _apply_commit(summary, attempt, row, step, moment)
            case "evaluate":
                figures = row.get("figures")
                figures = figures if isinstance(figures, dict) else {}
                loss = get_float(figures, "val/loss")
                # An evaluation is repeated if a run was killed between it and the next save.
                is_new = not summary.validation or step is None or step > summary.validation[-1][0]
                if step is not None and loss is not None and is_new:
                    summary.validation.append((step, loss))
                    if summary.best_validation is None or loss < summary.best_validation[1]:
                        summary.best_validation = (step, loss)
                    if len(summary.validation) > _POINTS_MAX:
                        # Half of the points are dropped; `best_validation` was noted before.
                        summary.validation = summary.validation[::2]
                if step is not None:
                    for key in figures:
                        name, value = to_single_line(key), get_float(figures, key)
                        if value is not None and (name in summary.figures or len(summary.figures) < _FIGURES_MAX):
                            summary.figures[name] = step, value
            case "failed":
                # The first failure counts, and that of process 0 before others: later ones are often its consequence.
                if attempt.end is None or (row.get("process") == 0 and attempt.end == "failed"):
                    attempt.end, attempt.code = "failed", get_int(row, "code")
                    attempt.reason = to_single_line(row.get("reason"))
            case "stuck":
                attempt.end, attempt.reason = "stuck", to_single_line(row.get("reason"))
            case "preempt" | "done":
                attempt.end = event
            case "straggler":
                attempt.straggler = row
        if event in NOTICES:
            summary.notices.append(Notice(moment, number, event, step, to_single_line(NOTICES[event](row))))
    return summary


def _drop_steps_after(summary: LedgerSummary, step: int) -> None:
    """Forget everything after the step from which an attempt resumes or continues, because it will be repeated."""
    summary.commits = {known: commit for known, commit in summary.commits.items() if known <= step}
    summary.verified = {known for known in summary.verified if known <= step}
    summary.figures = {key: known for key, known in summary.figures.items() if known[0] <= step}
    summary.stages = {begin: row for begin, row in summary.stages.items() if begin <= step}
    summary.program_changes = [known for known in summary.program_changes if known[1] <= step]
    if summary.validation and summary.validation[-1][0] > step:
        summary.validation = [point for point in summary.validation if point[0] <= step]
        summary.best_validation = min(summary.validation, key=lambda point: point[1], default=None)


def _apply_commit(summary: LedgerSummary, attempt: AttemptEvents, row: JsonObject, step: int, moment: float) -> None:
    size = get_int(row, "bytes")
    size = None if size is None or size < 0 else size
    summary.saves.append(SaveRecord(moment, attempt.number, step, size, get_time(row, "seconds_to_durable")))
    if len(summary.saves) > _POINTS_MAX:
        # Half of the points are dropped, and the newest stays: a chart of a long run needs no more.
        summary.saves = summary.saves[1::2]
    if size is None:
        return
    summary.commits.pop(step, None)  # The newest commit must be the last one in the dictionary.
    summary.commits[step] = _CommitRecord(moment, size, attempt.number)
    if row.get("read_back") is True:
        summary.verified.add(step)
    if len(summary.commits) > len(summary.checkpoints) + 2 * _UNSEEN_MAX:
        unseen = [known for known in summary.commits if known not in summary.checkpoints]
        for known in unseen[:-_UNSEEN_MAX]:
            del summary.commits[known]
            summary.verified.discard(known)
            summary.forgotten = max(summary.forgotten, known)


# Texts of events that are no notices. A name in braces stands for a detail of the event.
_WORDS = {
    "start": "the attempt has begun with {processes} processes on {devices} x {device_kind}",
    "prepare": "everything is compiled, after {seconds}",
    "compile": "the train step is compiled, with micro-batches of {micro_batch_examples} examples per device",
    "stage": "stage {number} begins",
    "kernels": "the kernels have passed their tests: {kernels}",
    "init": "the state was initialised in {seconds}",
    "restore": "the state was restored from the {tier} tier in {seconds}",
    "fork": "the state was taken from step {step} of {run} in {seconds}",
    "load": "checkpoint {name} was loaded, instead of step {before}",
    "save": "a save has begun; training waited for {blocked_seconds}",
    "commit": "the save is durable, {seconds_to_durable} after it began",
    "cadence": "there is a save every {seconds} from now on",
    "progress": "training goes on",
    "straggler": "processes that are late: {late}",
    "evaluate": "the weights were evaluated: {figures}",
    "stop": "{hook} ends the run: {reason}",
    "slow_hook": "{hook} took {seconds}",
    "preempt": "the job was asked to stop",
    "done": "the job is done",
}
_COMMON_KEYS = frozenset(key.name for key in EVENT_KEYS)


def format_event(row: JsonObject) -> str:
    """Return an event of the ledger in words, in one line. Names and details may be those of another version."""
    event = row.get("event")
    details = collections.defaultdict(lambda: "?", {key: _format_detail(key, value) for key, value in row.items()})
    if isinstance(event, str) and event in _WORDS:
        return to_single_line(_WORDS[event].format_map(details))
    words = str(event).replace("_", " ")
    if isinstance(event, str) and event in NOTICES:
        return to_single_line(f"{words}: {NOTICES[event](row)}")
    rest = ", ".join(f"{key.replace('_', ' ')} {details[key]}" for key in row if key not in _COMMON_KEYS)
    return to_single_line(f"{words}: {rest}" if rest else words)


def _format_detail(key: str, value: Any) -> str:
    """Return the value of a detail, seconds as a duration, and the numbers of a mapping with their names."""
    if isinstance(value, dict):
        numbers = {name: inner for name, inner in value.items() if isinstance(inner, int | float)}
        return ", ".join(f"{name} {_format_detail(name, inner)}" for name, inner in numbers.items()) or "none"
    if isinstance(value, list):
        return ", ".join(map(to_single_line, value[:_NAMED_PROCESSES_MAX])) or "none"
    if isinstance(value, float) and math.isfinite(value):
        is_duration = "seconds" in key and 0.1 <= value < TIME_MAX
        return format_duration(value) if is_duration else f"{value:.2g} s" if "seconds" in key else f"{value:.4g}"
    return to_single_line(value)


# Events that are shown as notices, and the text of each.
NOTICES: dict[str, Callable[[JsonObject], Any]] = {
    "failed": lambda row: row.get("reason"),
    "stuck": lambda row: row.get("reason"),
    "corruption": lambda row: row.get("reason"),
    "device_fault": lambda row: (
        row.get("reason")
        or (
            f"gradients of step {row.get('step')} differ when they are computed again; suspected devices: "
            f"{row.get('devices')}, on {row.get('hosts')}"
        )
    ),
    "save_failed": lambda row: f"the save of step {row.get('step')} failed: {row.get('reason')}",
    "fast_tier_off": lambda row: f"continues without the fast tier: {row.get('reason')}",
    "fallback": lambda row: f"checkpoint {row.get('rejected')} was not restored: {row.get('reason')}",
    "roll_back": lambda row: (
        f"rolled back because of {row.get('reason')} at step {row.get('detected')}: "
        f"{row.get('batches')} batches after step {row.get('step')} are skipped"
    ),
    "quarantine": lambda row: f"checkpoint {row.get('step')} is in {row.get('moved_to')}: {row.get('reason')}",
    "grace": lambda row: row.get("reason"),
    "grow": lambda row: f"stops after step {row.get('step')} to begin with all processes",
    "changed": lambda row: row.get("changes"),
    "evaluation_problem": lambda row: f"evaluator {row.get('evaluator')}: {row.get('reason')}",
    "sink_off": lambda row: f"{row.get('sink')} gets no more rows: {row.get('reason')}",
    "profile": lambda row: f"steps after {row.get('start')} up to {row.get('step')}: {row.get('path')}",
}
