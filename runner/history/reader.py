"""`HistoryReader`: the history of one run directory. It reports what it cannot read instead of failing.

Reading is bounded, whatever the size of the run:

- Rows of `metrics.jsonl`: a sample is read, see `runner.metrics.file.read_sample`.
- Checkpoints: the manifests of the `_SEEN_MAX` newest steps and of as many other names are read, and no arrays. For
  older steps the ledger is trusted.
"""

import copy
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeVar

import yaml

from runner.attempts.clock_file import SILENT_SECONDS, decode_clock_file, get_clock_file_name
from runner.attempts.ended import unpack
from runner.attempts.environment import ENVIRONMENT_KEYS
from runner.attempts.layout import ATTEMPTS, TEXT_FOLDER, read_owner, read_result
from runner.checkpoint.manifest import CHECKPOINTS, NotCommittedError, read_manifest
from runner.config import SOURCE_NAME, TOTAL_KEYS, StageConfig, locate_stages
from runner.console import format_duration
from runner.distributed.clock import MIN_STEP_DEADLINE_SECONDS, STEP_DEADLINE_FACTOR, TimeCategory
from runner.errors import (
    EXIT_DONE,
    EXIT_FAILED,
    EXIT_INVALID,
    EXIT_PREEMPTED,
    EXIT_RETRYABLE,
    InvalidError,
    StorageError,
)
from runner.history.goodput import CLOCK_TOLERANCE_SECONDS, AttemptTimeline, align_timelines, compute_goodput
from runner.history.ledger import (
    STAGES_MAX,
    AttemptEvents,
    LedgerReader,
    LedgerSummary,
    get_float,
    get_int,
    get_step,
    get_time,
    to_single_line,
)
from runner.history.records import (
    AttemptRecord,
    CheckpointRecord,
    ForkRecord,
    History,
    Notice,
    RunState,
    StageRecord,
    StragglerRecord,
    Throughput,
    Verification,
)
from runner.metrics.file import read_sample
from runner.metrics.rows import find_unit
from runner.spec import format_setting, list_value_changes
from runner.storage import STEP_MAX, DiskError, JsonObject, Store, open_store, parse_json, parse_number
from runner.storage.store import validate_nesting

_SEEN_MAX = 32
_NUM_READERS = 16
_NUM_CHECKPOINT_READERS = 8
_SPEED_ROWS = 20
_MAX_MOVED = 8  # attempts in a notice
_SPEC_BYTES_MAX = 1 << 19  # which take a second to parse
_LOOP = (
    TimeCategory.DATA_WAIT,
    TimeCategory.STEPS,
    TimeCategory.LOST_STEPS,
    TimeCategory.EVALUATION,
    TimeCategory.SAVE_STALL,
)
_SILENT_WITHOUT_CLOCK_SECONDS = 120.0  # for attempts of an older runner, whose events are a minute apart
_STATES_BY_CODE = {
    EXIT_DONE: RunState.DONE,
    EXIT_FAILED: RunState.FAILED,
    EXIT_INVALID: RunState.INVALID,
    EXIT_PREEMPTED: RunState.PREEMPTED,
    EXIT_RETRYABLE: RunState.RETRYABLE,
}
_STATES_BY_EVENT = {
    "done": RunState.DONE,
    "preempt": RunState.PREEMPTED,
    "failed": RunState.FAILED,
    "stuck": RunState.RETRYABLE,
}
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Value = TypeVar("Value")


def open_text_stores(store: Store) -> list[Store]:
    """Return the directories of the jobs that tokenise the text of a run; none if its spec does not ask for them."""
    names = [name for name in sorted(store.list_names(TEXT_FOLDER)) if re.fullmatch(SOURCE_NAME, name)]
    return [open_store(f"{store.url}/{TEXT_FOLDER}/{name}") for name in names]


def read_history(store: Store, now: float | None = None) -> History:
    """Return the history of a run; see `HistoryReader.read`."""
    return HistoryReader(store).read(now)


class HistoryReader:
    """Reader of one run. Keep it to read the run repeatedly: it reads each event once."""

    def __init__(self, store: Store):
        self._store, self._ledger_reader = store, LedgerReader(store)
        self._unread: list[str] = []

    def read(self, now: float | None = None) -> History:
        """Return the history of the run, in its state at `now` in Unix seconds (None: at this moment).

        Raises `InvalidError` if there is no run in the directory, and `StorageError` if a bucket does not answer.
        """
        store = self._store
        is_present, now = now is None, time.time() if now is None else now
        self._unread = []
        no_names: list[str] = []
        children = self._try(lambda: store.list_names(CHECKPOINTS), no_names)
        # Checkpoints are listed before the ledger is read, so that each of them has its commit event there.
        steps = sorted(step for step in map(parse_number, children) if step is not None)
        names = sorted(name for name in children if parse_number(name) is None and not name.startswith("."))
        ledger = self._try(lambda: self._ledger_reader.read(set(steps)), LedgerSummary())
        timelines = self._read_timelines(ledger)
        clock = timelines[-1].clock if timelines and is_present else None
        if clock is not None and clock.uptime is not None and clock.is_process_alive:
            # The process is alive on this machine, so all times are moved by the error of the clock that it had.
            age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - clock.uptime
            shift_seconds = now - age_seconds - timelines[-1].began
            if abs(shift_seconds) > CLOCK_TOLERANCE_SECONDS:
                timelines = [timeline.shift(shift_seconds) for timeline in timelines]
        if not timelines:
            raise InvalidError(f"{store.url}: no run is here" + "".join(f"; {line}" for line in self._unread[:1]))
        sample: tuple[JsonObject, ...] = self._try(lambda: read_sample(store), ())
        spec = self._try(lambda: parse_spec(store.read("spec.yaml")), None)
        spec = spec if isinstance(spec, dict) else {}
        result = self._try(lambda: read_result(store), None)
        owner = self._try(lambda: read_owner(store), None)
        if num_skipped := self._ledger_reader.num_skipped:
            self._unread.append(f"{num_skipped:,} lines of events.jsonl: they are no events, and are skipped")

        newer = [*timelines[1:], None]
        outcomes = [infer_outcome(timeline, after, now) for timeline, after in zip(timelines, newer, strict=True)]
        is_alive = outcomes[-1].is_alive
        shares = compute_goodput(timelines, now if is_alive else None)
        starts = [timeline.events.start for timeline in timelines]
        hosts = [start["hosts"] if isinstance(start.get("hosts"), list) else [] for start in starts]
        attempts = tuple(
            AttemptRecord(
                number=timeline.events.number,
                began=share.began,
                ended=share.ended,
                state=outcome.state,
                since=outcome.since,
                code=outcome.code,
                reason=outcome.reason,
                resumed_step=timeline.events.resumed_step,
                restored_from=timeline.events.restored_from,
                reached_step=timeline.reached_step,
                lost_steps=share.lost_steps,
                gap_seconds=share.gap_seconds,
                seconds=share.seconds,
                hosts=tuple(map(to_single_line, host_names)),
                num_processes=get_int(start, "processes"),
                num_devices=get_int(start, "devices"),
                device_kind=to_single_line(start["device_kind"]) if "device_kind" in start else None,
                num_saves=timeline.events.num_saves,
                environment={key.name: start[key.name] for key in ENVIRONMENT_KEYS if key.name in start},
            )
            for timeline, share, outcome, start, host_names in zip(
                timelines, shares, outcomes, starts, hosts, strict=True
            )
        )
        seconds = {category: sum(share.seconds[category] for share in shares) for category in TimeCategory}
        seconds[TimeCategory.GAP] = sum(share.gap_seconds for share in shares)
        # Windows never overlap, so the gaps and windows sum to the time from the first to the last moment.
        wall_seconds = shares[-1].ended - shares[0].began + shares[0].gap_seconds
        total_steps = _find_total_steps(timelines, spec)
        last = attempts[-1]
        if result is None:
            is_done = False
        elif result.stopped_by is None:
            is_done = not is_alive and result.step >= (total_steps or 0)
        else:  # A hook ended the run, and with another rule a later attempt may have continued it.
            is_done = not is_alive and (last.reached_step is None or last.reached_step <= result.step)
        if result is not None and is_done:
            step = result.step
        else:
            step = next((each.reached_step for each in reversed(attempts) if each.reached_step is not None), 0)

        # Older runners recorded no evaluations in the ledger, so the sample of rows is used too.
        losses = dict(ledger.validation)
        if ledger.best_validation is not None:
            losses.setdefault(*ledger.best_validation)
        for row in sample:
            loss = get_float(row, "val/loss")
            if loss is not None:
                losses.setdefault(row["step"], loss)
        validation = sorted(losses.items())
        stages, problems = read_stages(spec, ledger.stages)
        self._unread += problems
        return History(
            url=store.url,
            id=None if owner is None else owner.id,
            name=None if owner is None else to_single_line(owner.name),
            now=now,
            state=RunState.DONE if is_done else last.state,
            since=last.since,
            reason=last.reason if not is_done or result is None else result.stop_line,
            step=step,
            total_steps=total_steps,
            attempts=attempts,
            seconds=seconds,
            wall_seconds=wall_seconds,
            goodput=seconds[TimeCategory.STEPS] / wall_seconds if wall_seconds > 0 else 0.0,
            lost_steps=sum(share.lost_steps + share.repeated_steps for share in shares),
            speed=_compute_throughput(sample, last, total_steps if is_alive else None),
            checkpoints=tuple(self._try(lambda: self._read_checkpoints(steps, names, ledger), [])),
            row=sample[-1] if sample else {},
            trend=sample,
            validation=tuple(validation),
            best_validation=min(validation, key=lambda point: point[1], default=None),
            figures={key: value for key, (_, value) in ledger.figures.items()},
            is_language_model=ledger.is_language_model,
            straggling=_find_stragglers(timelines[-1].events),
            warnings=(*ledger.notices, *list_clock_notices(timelines)),
            saves=tuple(ledger.saves),
            events=tuple(ledger.events),
            fork=read_fork(ledger.fork),
            stages=stages,
            program_changes=tuple(step for _, step in ledger.program_changes),
            spec=spec,
            unread=tuple(self._unread),
        )

    def _try(self, read: Callable[[], Value], default: Value, name: str = "") -> Value:
        """Return the result of `read`, or `default` if the file is missing or damaged; damage is noted in `_unread`.

        Errors of a parser do not say which file it is; they need its `name`. Raises `StorageError` if a bucket does not
        answer, which says nothing about its content.
        """
        try:
            return read()
        except FileNotFoundError:
            return default
        except DiskError as error:
            self._unread.append(to_single_line(str(error)))
        except StorageError:
            raise
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            self._unread.append(to_single_line(f"{name}: {error}" if name else str(error)))
        return default

    def _read_timelines(self, ledger: LedgerSummary) -> list[AttemptTimeline]:
        no_names: list[str] = []
        names = set(self._try(lambda: self._store.list_names(ATTEMPTS), no_names))
        folded: dict[str, bytes] = {}
        nothing_folded: dict[str, bytes] = {}
        for block in sorted(name for name in names if re.fullmatch(r"\d+-\d+\.zip", name)):
            content = self._try(partial(self._store.read, f"{ATTEMPTS}/{block}"), None)
            if content is not None:
                folded.update(self._try(partial(unpack, content), nothing_folded, f"{ATTEMPTS}/{block}"))
        claims = {found for found in map(parse_number, names | set(folded)) if found is not None and found > 0}

        def read(name: str) -> bytes | None:
            if name in names:
                return self._try(lambda: self._store.read(f"{ATTEMPTS}/{name}"), None)
            return folded.get(name)

        def read_timeline(number: int) -> AttemptTimeline:
            events = ledger.attempts.get(number) or AttemptEvents(number)
            nothing: JsonObject = {}
            claim, clock_file = read(str(number)) if number in claims else None, read(f"{number}.clock")
            record, clock = nothing, None
            if claim is not None:
                record = self._try(lambda: parse_json(claim), nothing, f"{ATTEMPTS}/{number}")
            if clock_file is not None:
                clock = self._try(lambda: decode_clock_file(clock_file), None, get_clock_file_name(number))
            return AttemptTimeline(events, clock, get_time(record))

        with ThreadPoolExecutor(_NUM_READERS) as pool:
            timelines = list(pool.map(read_timeline, sorted(claims | set(ledger.attempts))))
        return align_timelines(
            [each for each in timelines if each.clock or each.claimed is not None or math.isfinite(each.events.last)]
        )

    def _read_checkpoints(
        self, steps: Sequence[int], names: Sequence[str], ledger: LedgerSummary
    ) -> list[CheckpointRecord]:
        records = []
        # Reading manifests costs a request each, so only those of the newest checkpoints are read.
        for step in steps[:-_SEEN_MAX]:
            commit = ledger.commits.get(step)
            known = (None, None, None) if commit is None else commit
            records.append(CheckpointRecord(str(step), step, Verification.UNSEEN, *known))
        with ThreadPoolExecutor(_NUM_CHECKPOINT_READERS) as pool:
            seen = [*map(str, steps[-_SEEN_MAX:]), *names[:_SEEN_MAX]]
            return [*records, *pool.map(lambda name: self._read_checkpoint(name, ledger.verified), seen)]

    def _read_checkpoint(self, name: str, verified: set[int]) -> CheckpointRecord:
        directory = f"{CHECKPOINTS}/{name}"
        try:
            manifest = read_manifest(self._store, directory)
            sizes = self._store.list_sizes(directory)
        except NotCommittedError as error:
            return CheckpointRecord(name, parse_number(name), Verification.UNCOMMITTED, problem=str(error))
        except (OSError, ValueError) as error:
            if isinstance(error, StorageError) and not isinstance(error, DiskError):
                raise  # A bucket that does not answer says nothing about its content.
            return CheckpointRecord(name, parse_number(name), Verification.DAMAGED, problem=str(error))
        problem = None
        # Sizes come with the listing; checksums would need every byte and are left to `checkpoints --verify`.
        for file, (size, _) in manifest.files.items():
            if sizes.get(file) != size:
                problem = f"{file} is missing" if file not in sizes else f"{file} has {sizes[file]} bytes, needs {size}"
                break
        # A manifest that matches its own digest may still have been written by another program.
        moment = get_time({"time": manifest.time})
        is_verified = manifest.is_step and manifest.step in verified
        trust = Verification.DAMAGED if problem else Verification.VERIFIED if is_verified else Verification.COMMITTED
        return CheckpointRecord(name, manifest.step, trust, moment, manifest.num_bytes, manifest.attempt, problem)


class _AttemptOutcome(NamedTuple):
    """State of an attempt."""

    state: RunState
    since: float  # beginning of the state, in Unix seconds
    is_alive: bool = False  # True if there are recent signs of life, so that its time continues
    code: int | None = None  # exit code, if one was recorded
    reason: str | None = None  # reason of a failure


def list_clock_notices(timelines: Sequence[AttemptTimeline]) -> list[Notice]:
    """Return a notice if times of attempts had to be moved, since their clocks disagree."""
    moved = [timeline for timeline in timelines if abs(timeline.shift_seconds) > CLOCK_TOLERANCE_SECONDS]
    if not moved:
        return []
    numbers = ", ".join(str(timeline.events.number) for timeline in moved[:_MAX_MOVED])
    numbers += ", ..." if len(moved) > _MAX_MOVED else ""
    most_seconds = max(abs(timeline.shift_seconds) for timeline in moved)
    text = (
        f"the clocks of the hosts disagree by up to {format_duration(most_seconds)}; the times of attempt {numbers} "
        "are moved by that much, durations are those of monotonic clocks"
    )
    return [Notice(moved[-1].ended, moved[-1].events.number, "clock", None, text)]


def infer_outcome(timeline: AttemptTimeline, newer: AttemptTimeline | None, now: float) -> _AttemptOutcome:
    """Return the outcome of an attempt: the exit code that its clock or an event has recorded.

    An attempt without one was killed, was fenced, or is alive: on the machine where it ran its process is looked up,
    and elsewhere `SILENT_SECONDS` without a sign of life mean that it is not alive.
    """
    events, clock, ended = timeline.events, timeline.clock, timeline.ended
    code = events.code if clock is None or clock.reading.code is None else clock.reading.code
    if code is not None or events.end is not None:
        state = _STATES_BY_CODE.get(code, RunState.FAILED) if code is not None else _STATES_BY_EVENT[str(events.end)]
        return _AttemptOutcome(state, ended, False, code, events.reason)
    if newer is not None:
        # An attempt that was still active when the next one claimed the directory was not killed, but shut out.
        is_fenced = newer.claimed is not None and ended > newer.claimed
        return _AttemptOutcome(RunState.FENCED if is_fenced else RunState.KILLED, ended)
    if clock is not None and clock.is_process_alive is False:
        return _AttemptOutcome(RunState.KILLED, ended)
    if now - ended > (_SILENT_WITHOUT_CLOCK_SECONDS if clock is None else SILENT_SECONDS):
        return _AttemptOutcome(RunState.STALLED, ended)
    if clock is not None and clock.reading.category is TimeCategory.STEPS:
        # It sends heartbeats, but may be stuck at one step. The deadline is that of the watchdog.
        num_steps = max(clock.reading.step - (events.resumed_step or 0), 0)
        current_seconds = now - timeline.shift_seconds - clock.reading.since
        finished_seconds = max(clock.reading.seconds[TimeCategory.STEPS.index] - current_seconds, 0.0)
        if num_steps:
            limit_seconds = max(MIN_STEP_DEADLINE_SECONDS, STEP_DEADLINE_FACTOR * (finished_seconds / num_steps))
            if current_seconds > limit_seconds:
                return _AttemptOutcome(RunState.STALLED, clock.reading.since + timeline.shift_seconds, is_alive=True)
    return _AttemptOutcome(RunState.RUNNING, timeline.began, is_alive=True)


def read_fork(event: JsonObject) -> ForkRecord | None:
    """Return the record in an event `fork` or in the lineage of a manifest; None if there is none."""
    step, changes = get_step(event), event.get("changes")
    if step is None:
        return None
    run, run_id, fingerprint = (to_single_line(event.get(key) or "?") for key in ("run", "id", "fingerprint"))
    return ForkRecord(run, run_id, step, fingerprint, changes if isinstance(changes, dict) else {})


def format_changes(fork: ForkRecord) -> list[str]:
    """Return a line for each key in which a fork differs from its parent.

    Totals on which the learning rates of only one of the two depend are left out: the other has recorded none.
    """
    lines: list[str] = []
    pairs = {
        key: values if isinstance(values, list) and len(values) == 2 else ["?", "?"]
        for key, values in fork.changes.items()
    }
    totals = {key: pair for key, pair in pairs.items() if key.removeprefix("config.") in TOTAL_KEYS}
    if any(all(pair[side] is None for pair in totals.values()) for side in (0, 1)):
        pairs = {key: pair for key, pair in pairs.items() if key not in totals}
    for key, (theirs, ours) in pairs.items():
        lines += map(to_single_line, list_value_changes(to_single_line(key), theirs, ours))
    return lines


def read_stages(spec: JsonObject, events: Mapping[int, JsonObject]) -> tuple[tuple[StageRecord, ...], list[str]]:
    """Return the stages of the content of `spec.yaml`, or else of the events, and a line for each problem of it."""
    config: Any = spec.get("config")
    if isinstance(config, dict) and config.get("stages"):
        config = copy.deepcopy(config)  # the values of each stage are put into it
    given = config.get("stages") if isinstance(config, dict) else None
    problems = []
    if given is not None and not isinstance(given, list):
        problems.append("config.stages of spec.yaml: it is no list")
    entries = given if isinstance(given, list) else []
    if len(entries) > STAGES_MAX:
        problems.append(f"config.stages of spec.yaml: only the first {STAGES_MAX} of {len(entries)} stages are read")
    sizes = [
        get_int(section, key) if isinstance(section := config.get(name), dict) else None
        for name, key in (("train", "global_batch_examples"), ("data", "sequence_length"))
        if entries
    ]
    has_tokens = all(size is not None and size > 0 for size in sizes)
    batch, length = (size or 0 for size in sizes) if entries and has_tokens else (1, 1)
    kept: list[StageConfig] = []
    found: list[StageRecord] = []
    for index, entry in enumerate(entries[:STAGES_MAX]):
        try:
            # A later version may have added keys.
            stage = StageConfig.model_validate({key: entry[key] for key in StageConfig.model_fields if key in entry})
            *_, before, start = locate_stages(batch, length, [*kept, stage])
        except (TypeError, ValueError, OverflowError):
            problems.append(f"config.stages.{index} of spec.yaml: it is no stage")
            continue
        if not before.step < start.step <= STEP_MAX or (stage.from_tokens is not None and not has_tokens):
            problems.append(f"config.stages.{index} of spec.yaml: its first step is not known, or before another stage")
            continue
        kept.append(stage)
        event = events.get(start.step, {})
        found.append(
            StageRecord(
                number=len(found) + 1,
                from_step=start.step,
                tokens=start.units if has_tokens else None,
                tokens_per_step=start.units_per_step if has_tokens else None,
                changes=tuple(apply_stage(config, stage.set)),
                why=to_single_line(stage.why or ""),
                began=get_time(event) if get_step(event) == start.step else None,
            )
        )
    if not found:
        for number, begin in enumerate(sorted(events), 1):
            event = events[begin]
            began = get_time(event) if get_step(event) == begin else None
            found.append(StageRecord(number, begin, why=to_single_line(event.get("why") or ""), began=began))
    return tuple(found), problems


def apply_stage(config: Any, values: Mapping[str, Any]) -> list[str]:
    """Set the values of a stage in a config, as far as it has these keys, and return a line for each change."""
    lines = []
    for key, value in values.items():
        *path, last = key.split(".")
        former: Any = None
        try:
            parent: Any = config
            for part in path:
                parent = parent[int(part)] if isinstance(parent, list) else parent[part]
            place = int(last) if isinstance(parent, list) else last
            former = parent.get(place) if isinstance(parent, dict) else parent[place]
            parent[place] = value
        except (LookupError, TypeError, ValueError):
            pass
        pairs = [(key, former, value)]
        if isinstance(former, dict) and isinstance(value, dict):
            pairs = [(f"{key}.{name}", former.get(name), own) for name, own in value.items()]
        for name, old, new in pairs:
            old_text, new_text = format_setting(old), format_setting(new)
            if old != new or len(pairs) == 1:
                text = new_text if old_text in (new_text, "null") else f"{old_text} -> {new_text}"
                lines.append(to_single_line(f"{name}: {text}"))
    return lines


def parse_spec(content: bytes) -> object:
    """Return the content of a `spec.yaml`, without validation: a later version of the runner may have written it.

    Raises `ValueError` if it is too large, or has aliases, which could stand for any amount of data.
    """
    if len(content) > _SPEC_BYTES_MAX:
        raise ValueError(f"spec.yaml has {len(content)} bytes, more than {_SPEC_BYTES_MAX}")
    # No runner writes an alias, but a path may have an asterisk.
    if b"*" in content and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, _YAML_LOADER)):
        raise ValueError("spec.yaml has aliases")
    spec = yaml.load(content, _YAML_LOADER)  # noqa: S506 - both are safe loaders
    validate_nesting(spec)
    return spec


def _find_total_steps(timelines: Sequence[AttemptTimeline], spec: JsonObject) -> int | None:
    """Return the total steps of the newest attempt that recorded them, or else those in the spec."""
    for timeline in reversed(timelines):
        found = get_step(timeline.events.start, "total_steps")
        if found is not None:
            return found
    config = spec.get("config")
    sections = [config, config.get("train")] if isinstance(config, dict) else []
    known = [get_step(section, "total_steps") for section in sections if isinstance(section, dict)]
    # A spec with `total_tokens` alone needs the job's class to compute the steps, which is not imported here.
    return next((found for found in known if found is not None), None)


def _compute_throughput(sample: Sequence[JsonObject], attempt: AttemptRecord, total_steps: int | None) -> Throughput:
    """Return the throughput over the newest rows of the newest attempt, or else over its whole loop."""
    row = sample[-1] if sample else {}
    unit = find_unit(row)
    newest = [each for each in sample[-_SPEED_ROWS:] if each.get("perf/attempt") == attempt.number]
    seconds, increase = (_compute_increase(newest, key) for key in ("perf/time", f"train/{unit}"))
    reported, mfu = get_float(row, f"perf/{unit}_per_second"), get_float(row, "perf/mfu")
    step_seconds, per_second = None, reported
    # Differences of clock times include stalls between rows, which also delay the end of the run.
    if seconds:
        step_seconds = seconds / (newest[-1]["step"] - newest[0]["step"])
        per_second = increase / seconds if increase else reported
    elif attempt.reached_step is not None and attempt.reached_step > (attempt.resumed_step or 0):
        loop_seconds = sum(attempt.seconds[category] for category in _LOOP)
        step_seconds = loop_seconds / (attempt.reached_step - (attempt.resumed_step or 0))
    left_seconds = None
    if step_seconds is not None and total_steps is not None:
        left_seconds = step_seconds * max(total_steps - (attempt.reached_step or 0), 0)
    per_device = None
    if per_second is not None and attempt.num_devices:
        per_device = per_second / attempt.num_devices
    if mfu and reported and per_second:
        mfu *= per_second / reported  # The row's MFU is that of its own interval.
    rates = {f"{unit}_per_second": per_second, f"{unit}_per_second_per_device": per_device}
    return Throughput(step_seconds, mfu=mfu, left_seconds=left_seconds, **rates)


def _compute_increase(rows: Sequence[JsonObject], key: str) -> float | None:
    """Return the increase of a value from the first row to the last; None if it is unknown or not positive."""
    if len(rows) < 2:
        return None
    first, last = get_float(rows[0], key), get_float(rows[-1], key)
    return None if first is None or last is None or last <= first else last - first


def _find_stragglers(events: AttemptEvents) -> StragglerRecord | None:
    late, after_seconds = events.straggler.get("late"), events.straggler.get("after_seconds")
    hosts = events.start.get("hosts")
    if not (isinstance(late, list) and late and isinstance(after_seconds, list)):
        return None
    found = {}
    for process in late:
        if not (type(process) is int and 0 <= process < len(after_seconds)):
            continue
        seconds = get_float({"seconds": after_seconds[process]}, "seconds")
        if seconds is not None:
            has_name = isinstance(hosts, list) and process < len(hosts)
            host = f" ({to_single_line(hosts[process])})" if isinstance(hosts, list) and has_name else ""
            found[f"process {process}{host}"] = seconds
    return StragglerRecord(get_step(events.straggler) or 0, found)
