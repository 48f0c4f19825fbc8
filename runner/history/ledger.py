"""What the events tell of each attempt, read once from the first to the last, in bounded memory.

What bounds it: an attempt keeps its newest `_MARKS_MAX` saves, the whole run `NOTICES_MAX` notices and `_POINTS_MAX`
validation losses, commits only of the checkpoints that are there and the newest of others, which a listing may lack
that was made before. Whatever in a line is not as it should be is taken for not there.
"""

import collections
import math
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field
from typing import Any

from runner.distributed.clock import TimeBucket
from runner.history.records import Notice, SaveRecord
from runner.storage import JsonlTail, JsonObject, Store

NOTICES_MAX = 50
EVENTS_MAX = 100
_MARKS_MAX = 256
_POINTS_MAX = 2048
_UNSEEN_MAX = 64
_OF_A_STEP = {"init", "restore", "save", "commit", "evaluate", "progress", "preempt", "done", "failed", "stuck"}
_TEXT_MAX = 300


@dataclass
class AttemptEvents:
    """What the ledger tells of one attempt; what it does not is None, or 0 seconds."""

    number: int
    first: float = math.inf
    last: float = -math.inf
    start: JsonObject = field(default_factory=dict)
    compile_seconds: float = 0.0
    restore_seconds: float = 0.0
    ready: float | None = None  # when the state was there
    resumed_step: int | None = None
    step: int | None = None
    num_saves: int = 0
    stall_seconds: float = 0.0
    marks: "collections.deque[tuple[int, float]]" = field(default_factory=lambda: collections.deque(maxlen=_MARKS_MAX))
    end: str | None = None
    code: int | None = None
    reason: str | None = None
    straggler: JsonObject = field(default_factory=dict)

    def steps_seconds_at(self, step: int, reached_step: int, reached_seconds: float) -> float:
        """What its steps had taken when `step` was completed: as the save of that step says, or in proportion."""
        before, after = (self.resumed_step or 0, 0.0), (reached_step, reached_seconds)
        for mark in self.marks:
            if mark[0] <= step:
                before = mark
            elif mark[0] < after[0]:
                after = mark
        if step <= before[0] or after[0] <= before[0]:
            return before[1]
        return before[1] + (after[1] - before[1]) * (step - before[0]) / (after[0] - before[0])


@dataclass
class LedgerSummary:
    """All that the events tell.

    Attributes:
        checkpoints: the steps that are asked for.
        commits: of them, and of a few that are not: time, bytes, attempt.
        verified: steps whose bits were read back, of `commits`, or restored, since their last commit.
        forgotten: the newest step that was not asked for and whose commit is no more in `commits`.
        validation: (step, val/loss) of the surviving trajectory.
        saves: all commits, of very many a part.
        events: the newest.
    """

    checkpoints: Set[int] = frozenset()
    attempts: dict[int, AttemptEvents] = field(default_factory=dict)
    commits: dict[int, tuple[float, int, int]] = field(default_factory=dict)
    verified: set[int] = field(default_factory=set)
    forgotten: int = -1
    validation: list[tuple[int, float]] = field(default_factory=list)
    best_validation: tuple[int, float] | None = None
    notices: "collections.deque[Notice]" = field(default_factory=lambda: collections.deque(maxlen=NOTICES_MAX))
    saves: list[SaveRecord] = field(default_factory=list)
    events: "collections.deque[JsonObject]" = field(default_factory=lambda: collections.deque(maxlen=EVENTS_MAX))


def get_int(row: JsonObject, key: str) -> int | None:
    """The value of a key if it is one."""
    value = row.get(key)
    return value if type(value) is int and abs(value) < 1 << 62 else None


def get_float(row: JsonObject, key: str) -> float | None:
    """The value of a key if it is a finite number."""
    value = row.get(key)
    if type(value) is int:
        return float(value) if abs(value) < 1 << 62 else None
    return value if isinstance(value, float) and math.isfinite(value) else None


def to_single_line(value: Any) -> str:
    """A value in one line of bounded length; what a terminal would obey is left out."""
    shown = value if isinstance(value, str) else repr(value)
    return "".join(each if each.isprintable() else " " for each in shown[: 4 * _TEXT_MAX]).strip()[:_TEXT_MAX]


class LedgerReader:
    """Reads the events of one run, each once, however often one looks."""

    def __init__(self, store: Store):
        self._feed, self._ledger = JsonlTail(store, "events"), LedgerSummary()
        self._is_whole = True  # whether the ledger holds all that the feed has given

    def read(self, checkpoints: Set[int]) -> LedgerSummary:
        """All that the events tell by now, of commits those of the steps in `checkpoints`.

        It is good until the next reading. Raises `OSError` if the store does not answer.
        """
        if not self._is_whole:
            self._feed.restart()
        self._is_whole = False
        appeared = self._take_in(checkpoints)
        if any(step <= self._ledger.forgotten and step not in self._ledger.commits for step in appeared):
            self._feed.restart()  # as when the listing failed at first
            self._take_in(checkpoints)
        self._is_whole = True
        return self._ledger

    def _take_in(self, checkpoints: Set[int]) -> Set[int]:
        """Take in what is new; the steps that are asked for the first time, of a ledger that is not begun here."""
        is_anew, rows = self._feed.read()
        if is_anew:
            self._ledger = LedgerSummary(checkpoints)
        appeared = checkpoints - self._ledger.checkpoints
        self._ledger.checkpoints = checkpoints
        apply_events(self._ledger, rows)
        return appeared


def apply_events(ledger: LedgerSummary, rows: Iterable[JsonObject]) -> LedgerSummary:
    """Take in events that follow those that it has."""
    for row in rows:
        attempt, moment, event = get_int(row, "attempt"), get_float(row, "time"), row.get("event")
        if attempt is None or attempt < 1 or moment is None or not isinstance(event, str):
            continue
        ledger.events.append(row)
        told = ledger.attempts.setdefault(attempt, AttemptEvents(attempt))
        told.first, told.last = min(told.first, moment), max(told.last, moment)
        step = get_int(row, "step")
        if step is not None and event in _OF_A_STEP:
            told.step = step if told.step is None else max(told.step, step)
        if event in _TAKE:
            _TAKE[event](ledger, told, row, step, moment)
        if event in NOTICES:
            ledger.notices.append(Notice(moment, attempt, event, step, to_single_line(NOTICES[event](row))))
    return ledger


def _start(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    told.start = row


def _prepare(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    told.compile_seconds = get_float(row, "seconds") or 0.0


def _begin(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    """`init` and `restore`: what lies beyond this step is done again."""
    told.restore_seconds, told.ready = get_float(row, "seconds") or 0.0, moment
    told.resumed_step = step
    if step is None:
        return
    ledger.commits = {known: commit for known, commit in ledger.commits.items() if known <= step}
    ledger.verified = {known for known in ledger.verified if known <= step}
    if row.get("event") == "restore" and row.get("tier") != "fast":
        ledger.verified.add(step)
    if ledger.validation and ledger.validation[-1][0] > step:
        ledger.validation = [point for point in ledger.validation if point[0] <= step]
        ledger.best_validation = min(ledger.validation, key=lambda point: point[1], default=None)


def _save(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    blocked_seconds, clock = get_float(row, "blocked_seconds") or 0.0, row.get("clock")
    counted = get_float(clock, TimeBucket.STEPS.value) or 0.0 if isinstance(clock, dict) else None
    if counted is None and told.ready is not None:  # of a runner that kept no clock
        counted = max(moment - blocked_seconds - told.ready - told.stall_seconds, 0.0)
    if step is not None and counted is not None:
        told.marks.append((step, counted))
    told.num_saves += 1
    told.stall_seconds += blocked_seconds


def _commit(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    size = get_int(row, "bytes")
    if step is not None and row.get("tier") != "fast":
        ledger.saves.append(SaveRecord(moment, told.number, step, size, get_float(row, "seconds_to_durable")))
        if len(ledger.saves) > _POINTS_MAX:
            ledger.saves = ledger.saves[1::2]
    if step is not None and row.get("tier") != "fast" and size is not None:
        ledger.commits.pop(step, None)  # so that the newest is the last
        ledger.commits[step] = (moment, size, told.number)
        if row.get("read_back") is True:
            ledger.verified.add(step)
        if len(ledger.commits) > len(ledger.checkpoints) + 2 * _UNSEEN_MAX:
            _forget(ledger)


def _forget(ledger: LedgerSummary) -> None:
    """Of the commits that nobody has asked for keep the newest."""
    unseen = [step for step in ledger.commits if step not in ledger.checkpoints]
    for step in unseen[:-_UNSEEN_MAX]:
        del ledger.commits[step]
        ledger.verified.discard(step)
        ledger.forgotten = max(ledger.forgotten, step)


def _evaluate(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    figures = row.get("figures")
    loss = get_float(figures, "val/loss") if isinstance(figures, dict) else None
    if step is None or loss is None or (ledger.validation and step <= ledger.validation[-1][0]):
        return
    ledger.validation.append((step, loss))
    if ledger.best_validation is None or loss < ledger.best_validation[1]:
        ledger.best_validation = (step, loss)
    if len(ledger.validation) > _POINTS_MAX:
        ledger.validation = ledger.validation[::2]


def _failed(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    """The first that is told, the main host's before others': what comes after it is often its consequence."""
    if told.end is None or (row.get("process") == 0 and told.end == "failed"):
        told.end, told.code, told.reason = "failed", get_int(row, "code"), to_single_line(row.get("reason"))


def _stuck(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    told.end, told.reason = "stuck", to_single_line(row.get("reason"))


def _end(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    """`preempt` and `done`."""
    told.end = str(row["event"])


def _straggler(ledger: LedgerSummary, told: AttemptEvents, row: JsonObject, step: int | None, moment: float) -> None:
    told.straggler = row


_TAKE: dict[str, Callable[[LedgerSummary, AttemptEvents, JsonObject, int | None, float], None]] = {
    "start": _start,
    "prepare": _prepare,
    "init": _begin,
    "restore": _begin,
    "save": _save,
    "commit": _commit,
    "evaluate": _evaluate,
    "failed": _failed,
    "stuck": _stuck,
    "preempt": _end,
    "done": _end,
    "straggler": _straggler,
}

NOTICES: dict[str, Callable[[JsonObject], Any]] = {
    "failed": lambda row: row.get("reason"),
    "stuck": lambda row: row.get("reason"),
    "corruption": lambda row: row.get("reason"),
    "save_failed": lambda row: f"the save of step {row.get('step')} failed: {row.get('reason')}",
    "fallback": lambda row: f"checkpoint {row.get('rejected')} was not restored: {row.get('reason')}",
    "quarantine": lambda row: f"checkpoint {row.get('step')} is in {row.get('moved_to')}: {row.get('reason')}",
    "grace": lambda row: row.get("reason"),
    "changed": lambda row: row.get("changes"),
    "evaluation_problem": lambda row: f"evaluator {row.get('evaluator')}: {row.get('reason')}",
    "sink_off": lambda row: f"{row.get('sink')} gets no rows any more: {row.get('reason')}",
    "profile": lambda row: f"the steps after {row.get('start')} up to {row.get('step')}: {row.get('path')}",
}
