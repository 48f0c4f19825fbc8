"""The history of one directory. Reads each thing once, and tells what it could not read instead of falling over it.

The newest rows of `metrics.jsonl` and a sample of all, whatever its size.

What bounds it: on a disk `_NUM_BLOCKS` blocks spread over the file and its end are read, in a bucket the newest objects
and `_PARTS_MAX` of the others, and of what was found `ROWS_MAX` rows stay.

The checkpoints that are there, and what is known of them without reading an array.

What bounds it: the manifests of the `SEEN_MAX` newest steps and of as many other names are read. Of older ones the
ledger's word is taken.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import yaml

from runner.checkpoint.manifest import CHECKPOINTS, Manifest, NotCommittedError, read_manifest
from runner.distributed.clock import TimeBucket
from runner.errors import InvalidError, StorageError
from runner.history.goodput import AttemptGoodput, AttemptOutcome, AttemptTimeline, compute_goodput, infer_outcome
from runner.history.ledger import AttemptEvents, LedgerReader, LedgerSummary, get_float, get_int, to_single_line
from runner.history.records import (
    AttemptRecord,
    CheckpointRecord,
    History,
    RunState,
    StragglerRecord,
    Throughput,
    Verification,
)
from runner.metrics.file import METRICS_FILE, read_content
from runner.metrics.rows import select_surviving
from runner.run.clock_file import ClockRecord, decode_clock_file, get_clock_file_name
from runner.run.environment import ENVIRONMENT_KEYS
from runner.run.layout import RunResult, read_owner, read_result
from runner.storage import DiskError, JsonObject, Store, parse_number, read_json
from runner.storage.store import open_file, translate_errors

ROWS_MAX = 512
_NUM_BLOCKS = 128
_BLOCK_BYTES = 1 << 13
_TAILS_BYTES = (1 << 16, 1 << 20, 1 << 24)  # the next where the one before holds no whole row
_PARTS_MAX = 16
_NEWEST = 64


def read_sample(store: Store) -> tuple[JsonObject, ...]:
    """Rows in order of step, the newest last; empty if there are none. Raises `OSError`, or `ValueError` of damage."""
    texts = _texts_in_bucket(store) if store.root is None else _texts_on_disk(store.root / METRICS_FILE)
    lines = list(select_surviving(texts))
    newest, step = lines[-_NEWEST:], max(len(lines) // (ROWS_MAX - _NEWEST), 1)
    return tuple(line.row for line in [*lines[: -_NEWEST or None][::step], *newest])


def _texts_on_disk(path: Path) -> list[bytes]:
    try:
        with translate_errors(path), open_file(path) as file:
            size = file.seek(0, 2)
            tail: list[bytes] = []
            start = size
            for tail_bytes in _TAILS_BYTES:
                start = max(size - tail_bytes, 0)
                file.seek(start)
                tail = _whole_lines(file.read(size - start), start == 0)
                if start == 0 or any(select_surviving(tail)):
                    break
            stride = max(start // _NUM_BLOCKS, _BLOCK_BYTES)
            texts: list[bytes] = []
            for offset in range(0, start, stride):
                file.seek(offset)
                texts += _whole_lines(file.read(min(_BLOCK_BYTES, start - offset)), offset == 0)
            return texts + tail
    except FileNotFoundError:
        return []


def _whole_lines(content: bytes, is_first: bool) -> list[bytes]:
    """The lines of a block, without the first, which may have begun before it; the last is told by its end."""
    lines = content.split(b"\n")
    return lines if is_first else lines[1:]


def _texts_in_bucket(store: Store) -> Iterator[bytes]:
    """Of the parts some, evenly, and always the last: the object that grows may hold one row alone."""
    try:
        names, content = read_content(store)
    except FileNotFoundError:  # somebody has deleted a part
        names, content = [], store.read_versioned(METRICS_FILE)[0]
    step = max(len(names) // _PARTS_MAX, 1)
    chosen: Sequence[str] = sorted({*names[::step], *names[-1:]}, key=names.index)
    with ThreadPoolExecutor(_PARTS_MAX) as pool:
        contents = list(pool.map(lambda name: _read_if_there(store, name), chosen))
    for each in (*contents, content):
        yield from each.splitlines()


def _read_if_there(store: Store, name: str) -> bytes:
    """A newer attempt may have dropped it meanwhile."""
    try:
        return store.read(name)
    except FileNotFoundError:
        return b""


SEEN_MAX = 32
_NUM_READERS_CHECKPOINT = 8


def list_names(store: Store) -> tuple[list[int], list[str]]:
    """Steps ascending, and other names sorted."""
    names = store.list_names(CHECKPOINTS)
    found = sorted(step for step in map(parse_number, names) if step is not None)
    return found, sorted(name for name in names if parse_number(name) is None and not name.startswith("."))


def read_checkpoints(
    store: Store, steps: Sequence[int], names: Sequence[str], ledger: LedgerSummary
) -> list[CheckpointRecord]:
    """Those of `list_names`, with what the manifests and the ledger say."""
    older = [_told(step, ledger) for step in steps[:-SEEN_MAX]]
    with ThreadPoolExecutor(_NUM_READERS_CHECKPOINT) as pool:
        seen = [*map(str, steps[-SEEN_MAX:]), *names[:SEEN_MAX]]
        return [*older, *pool.map(lambda name: _look(store, name, ledger), seen)]


def _told(step: int, ledger: LedgerSummary) -> CheckpointRecord:
    time, num_bytes, attempt = ledger.commits.get(step, (None, None, None))
    return CheckpointRecord(str(step), step, Verification.UNSEEN, time, num_bytes, attempt)


def _look(store: Store, name: str, ledger: LedgerSummary) -> CheckpointRecord:
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(store, directory)
        problem = _problem(store.list_sizes(directory), manifest)
    except NotCommittedError as error:
        return CheckpointRecord(name, parse_number(name), Verification.UNCOMMITTED, problem=str(error))
    except StorageError as error:
        if not isinstance(error, DiskError):
            raise  # that a bucket is down says nothing of what is in it
        return CheckpointRecord(name, parse_number(name), Verification.DAMAGED, problem=str(error))
    except (OSError, ValueError) as error:
        return CheckpointRecord(name, parse_number(name), Verification.DAMAGED, problem=str(error))
    is_verified = manifest.is_of_a_step and manifest.step in ledger.verified
    trust = Verification.DAMAGED if problem else Verification.VERIFIED if is_verified else Verification.COMMITTED
    return CheckpointRecord(name, manifest.step, trust, manifest.time, manifest.num_bytes, manifest.attempt, problem)


def _problem(sizes: dict[str, int], manifest: Manifest) -> str | None:
    for name, (size, _) in manifest.files.items():
        if sizes.get(name) != size:
            return f"{name} {'is missing' if name not in sizes else f'has {sizes[name]} bytes, needs {size}'}"
    return None


_NUM_READERS = 16
_SPEED_ROWS = 20
_LOOP = (TimeBucket.DATA_WAIT, TimeBucket.STEPS, TimeBucket.LOST_STEPS, TimeBucket.EVALUATION, TimeBucket.SAVE_STALL)
_YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Value = TypeVar("Value")


def read_history(store: Store, now: float | None = None) -> History:
    """See `HistoryReader.read`."""
    return HistoryReader(store).read(now)


class HistoryReader:
    """Reads one run. Who looks at it again and again keeps one, for it reads each event once."""

    def __init__(self, store: Store):
        self._store, self._ledger = store, LedgerReader(store)

    def read(self, now: float | None = None) -> History:
        """The history of the run, as it stands at `now` (Unix seconds; None: this moment).

        Raises `InvalidError` where there is no run, `StorageError` if a bucket does not answer.
        """
        return _history(_Reader(self._store, self._ledger), time.time() if now is None else now)


def _history(reader: "_Reader", now: float) -> History:
    store = reader.store
    steps, names = reader.steps_and_names()
    ledger = reader.ledger(set(steps))
    lives = reader.lives(ledger)
    if not lives:
        raise InvalidError(f"{store.url}: no run is here" + "".join(f"; {line}" for line in reader.unread[:1]))
    sample, spec, result = reader.sample(), reader.spec(), reader.result()
    owner = reader.try_to(lambda: read_owner(store), None)
    total_steps = _total_steps(lives, spec)
    endings = [infer_outcome(life, newer, now) for life, newer in zip(lives, [*lives[1:], None], strict=True)]
    shares = compute_goodput(lives, now if endings[-1].is_alive else None)
    attempts = tuple(map(_attempt, lives, shares, endings))
    seconds, wall_seconds = _sum(shares), shares[-1].ended - shares[0].began + shares[0].gap_seconds
    last, validation = attempts[-1], _validation(ledger, sample)
    is_done = _is_done(result, total_steps, attempts[-1]) and not endings[-1].is_alive
    return History(
        url=store.url,
        id=None if owner is None else owner.id,
        name=None if owner is None else to_single_line(owner.name),
        now=now,
        state=RunState.DONE if is_done else last.state,
        since=last.since,
        reason=last.reason if not is_done or result is None else result.stop_line,
        step=_step(attempts, result if is_done else None),
        total_steps=total_steps,
        attempts=attempts,
        seconds=seconds,
        wall_seconds=wall_seconds,
        goodput=seconds[TimeBucket.STEPS] / wall_seconds if wall_seconds > 0 else 0.0,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        speed=_speed(sample, last, total_steps if endings[-1].is_alive else None),
        checkpoints=reader.checkpoints(steps, names, ledger),
        row=sample[-1] if sample else {},
        trend=sample,
        validation=tuple(validation),
        best_validation=min(validation, key=lambda point: point[1], default=None),
        straggling=_straggling(lives[-1].told),
        warnings=tuple(ledger.notices),
        saves=tuple(ledger.saves),
        events=tuple(ledger.events),
        spec=spec,
        unread=tuple(reader.unread),
    )


class _Reader:
    """Reads the parts of one directory; what is damaged is noted in `unread`, not raised."""

    def __init__(self, store: Store, ledger: LedgerReader):
        self.store, self._ledger = store, ledger
        self.unread: list[str] = []

    def try_to(self, read: Callable[[], Value], otherwise: Value) -> Value:
        """What `read` returns, `otherwise` if it cannot. Raises `StorageError` if a bucket does not answer."""
        try:
            return read()
        except FileNotFoundError:
            return otherwise
        except DiskError as error:
            self.unread.append(to_single_line(str(error)))
        except StorageError:
            raise
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            self.unread.append(to_single_line(str(error)))
        return otherwise

    def steps_and_names(self) -> tuple[list[int], list[str]]:
        """Of the directories below `checkpoints/`."""
        nothing: tuple[list[int], list[str]] = ([], [])
        return self.try_to(lambda: list_names(self.store), nothing)

    def checkpoints(
        self, steps: Sequence[int], names: Sequence[str], ledger: LedgerSummary
    ) -> tuple[CheckpointRecord, ...]:
        """What is known of those."""
        return tuple(self.try_to(lambda: read_checkpoints(self.store, steps, names, ledger), []))

    def ledger(self, checkpoints: set[int]) -> LedgerSummary:
        """The events."""
        return self.try_to(lambda: self._ledger.read(checkpoints), LedgerSummary())

    def sample(self) -> tuple[JsonObject, ...]:
        """Rows of metrics, the newest last."""
        return self.try_to(lambda: read_sample(self.store), ())

    def result(self) -> RunResult | None:
        """`result.json`."""
        return self.try_to(lambda: read_result(self.store), None)

    def spec(self) -> JsonObject:
        """`spec.yaml` as it stands there, unchecked."""
        content = self.try_to(lambda: self.store.read("spec.yaml"), b"")
        found = self.try_to(lambda: yaml.load(content, _YAML_LOADER), None)  # noqa: S506 - both are safe loaders
        return found if isinstance(found, dict) else {}

    def lives(self, ledger: LedgerSummary) -> list[AttemptTimeline]:
        """Every attempt of which it is known when it was, in order."""
        nothing: list[str] = []
        names = set(self.try_to(lambda: self.store.list_names("attempts"), nothing))
        claims = {found for found in map(parse_number, names) if found is not None and found > 0}
        numbers = sorted(claims | set(ledger.attempts))
        with ThreadPoolExecutor(_NUM_READERS) as pool:
            kept = pool.map(lambda each: self._clock(each) if f"{each}.clock" in names else None, numbers)
            claimed = pool.map(lambda each: self._claim(each) if each in claims else None, numbers)
            told = [ledger.attempts.get(each) or AttemptEvents(each) for each in numbers]
            found = [AttemptTimeline(*parts) for parts in zip(told, kept, claimed, strict=True)]
        return [life for life in found if life.kept or life.claimed is not None or math.isfinite(life.told.last)]

    def _clock(self, attempt: int) -> ClockRecord | None:
        return self.try_to(lambda: decode_clock_file(self.store.read(get_clock_file_name(attempt))), None)

    def _claim(self, attempt: int) -> float | None:
        found: JsonObject = self.try_to(lambda: read_json(self.store, f"attempts/{attempt}"), {})
        return get_float(found, "time")


def _attempt(life: AttemptTimeline, share: AttemptGoodput, ending: AttemptOutcome) -> AttemptRecord:
    start = life.told.start
    hosts = start.get("hosts")
    return AttemptRecord(
        number=life.told.number,
        began=share.began,
        ended=share.ended,
        state=ending.state,
        since=ending.since,
        code=ending.code,
        reason=ending.reason,
        resumed_step=life.told.resumed_step,
        reached_step=life.reached_step,
        lost_steps=share.lost_steps,
        gap_seconds=share.gap_seconds,
        seconds=share.seconds,
        hosts=tuple(map(to_single_line, hosts)) if isinstance(hosts, list) else (),
        num_processes=get_int(start, "processes"),
        num_devices=get_int(start, "devices"),
        device_kind=to_single_line(start["device_kind"]) if "device_kind" in start else None,
        num_saves=life.told.num_saves,
        environment={key.name: start[key.name] for key in ENVIRONMENT_KEYS if key.name in start},
    )


def _sum(shares: Sequence[AttemptGoodput]) -> dict[TimeBucket, float]:
    """All attempts and the gaps between them."""
    seconds = {bucket: sum(share.seconds[bucket] for share in shares) for bucket in TimeBucket}
    return seconds | {TimeBucket.GAP: sum(share.gap_seconds for share in shares)}


def _total_steps(lives: Sequence[AttemptTimeline], spec: JsonObject) -> int | None:
    """As the newest attempt that says has it; of a run by a runner that did not, from its spec."""
    for life in reversed(lives):
        found = get_int(life.told.start, "total_steps")
        if found is not None:
            return found
    config = spec.get("config")
    sections = [config, config.get("train")] if isinstance(config, dict) else []
    known = [get_int(section, "total_steps") for section in sections if isinstance(section, dict)]
    return next((found for found in known if found is not None), None)


def _is_done(result: RunResult | None, total_steps: int | None, newest: AttemptRecord) -> bool:
    """Whether a run is where its result says: at its last step, or where a hook has ended it and nobody went on."""
    if result is None or result.stopped_by is None:
        return result is not None and result.step >= (total_steps or 0)
    return newest.reached_step is None or newest.reached_step <= result.step


def _step(attempts: Sequence[AttemptRecord], result: RunResult | None) -> int:
    """Where the run stands: where its result, or else the newest attempt that came to a state, is."""
    if result is not None:
        return result.step
    return next((each.reached_step for each in reversed(attempts) if each.reached_step is not None), 0)


def _validation(ledger: LedgerSummary, sample: Sequence[JsonObject]) -> list[tuple[int, float]]:
    """By the ledger, and the best with it; of a run by a runner that did not say, by the sample of rows."""
    points = dict(ledger.validation)
    if ledger.best_validation is not None:
        points.setdefault(*ledger.best_validation)
    for row in sample:
        loss = get_float(row, "val/loss")
        if loss is not None:
            points.setdefault(row["step"], loss)
    return sorted(points.items())


def _speed(sample: Sequence[JsonObject], attempt: AttemptRecord, total_steps: int | None) -> Throughput:
    """Over the newest rows of the newest attempt, else over all of its loop, and as the newest row says."""
    row = sample[-1] if sample else {}
    newest = [each for each in sample[-_SPEED_ROWS:] if each.get("perf/attempt") == attempt.number]
    seconds, tokens = (_between(newest, key) for key in ("perf/time", "train/tokens"))
    told, mfu = get_float(row, "perf/tokens_per_second"), get_float(row, "perf/mfu")
    step_seconds, per_second = None, told
    if seconds:
        step_seconds = seconds / (newest[-1]["step"] - newest[0]["step"])
        per_second = tokens / seconds if tokens else told
    elif attempt.reached_step is not None and attempt.reached_step > (attempt.resumed_step or 0):
        loop_seconds = sum(attempt.seconds[bucket] for bucket in _LOOP)
        step_seconds = loop_seconds / (attempt.reached_step - (attempt.resumed_step or 0))
    left = None
    if step_seconds is not None and total_steps is not None:
        left = step_seconds * max(total_steps - (attempt.reached_step or 0), 0)
    per_device = None if per_second is None or not attempt.num_devices else per_second / attempt.num_devices
    if mfu and told and per_second:
        mfu *= per_second / told
    return Throughput(step_seconds, per_second, per_device, mfu, left)


def _between(rows: Sequence[JsonObject], key: str) -> float | None:
    """By how much a figure has grown from the first row to the last; None if that is not known, or it has not."""
    if len(rows) < 2:
        return None
    first, last = get_float(rows[0], key), get_float(rows[-1], key)
    return None if first is None or last is None or last <= first else last - first


def _straggling(told: AttemptEvents) -> StragglerRecord | None:
    """Who comes late in the newest attempt, if anybody does."""
    late, after = told.straggler.get("late"), told.straggler.get("after_seconds")
    hosts = told.start.get("hosts")
    if not (isinstance(late, list) and late and isinstance(after, list)):
        return None
    found = {}
    for process in late:
        if type(process) is int and 0 <= process < len(after) and isinstance(after[process], int | float):
            is_named = isinstance(hosts, list) and process < len(hosts)
            host = f" ({to_single_line(hosts[process])})" if isinstance(hosts, list) and is_named else ""
            found[f"process {process}{host}"] = float(after[process])
    return StragglerRecord(get_int(told.straggler, "step") or 0, found)
