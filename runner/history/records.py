"""The records of a run's history: frozen, of plain values, in Unix seconds and seconds."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from runner.distributed.clock import TimeBucket
from runner.storage import JsonObject


class RunState(enum.Enum):
    """How an attempt has ended, or that it lives; of a run, that of its newest attempt."""

    RUNNING = "running"
    STALLED = "stalled"  # no sign of life, or the same step for far too long
    DONE = "done"
    PREEMPTED = "preempted"
    FAILED = "failed"  # exit code 1
    INVALID = "invalid"  # exit code 2
    RETRYABLE = "retryable"  # exit code 76
    KILLED = "killed"  # its process is gone, and has said nothing
    FENCED = "fenced"  # a newer attempt took the directory while it lived


class Verification(enum.Enum):
    """What is known of a checkpoint without reading its arrays."""

    VERIFIED = "verified"  # its bits were read back and compared: after the save, or by a restore
    COMMITTED = "committed"  # its manifest is whole
    DAMAGED = "damaged"  # its manifest is not, or files are missing or of another size
    UNCOMMITTED = "not committed"  # it is being written, or never was to its end
    UNSEEN = "not looked at"  # the ledger says that it was committed


@dataclass(frozen=True)
class AttemptRecord:
    """One start of the job.

    Attributes:
        began: when its process 0 was created, or else the first that is known of it.
        ended: its last sign of life.
        since: of a stalled one: when it moved last; else as `ended`.
        code: the exit code, None where it left none.
        resumed_step: 0 for a new state; None if it came to none.
        reached_step: the last one completed; None likewise.
        lost_steps: those that a later attempt has done again.
        gap_seconds: from the end of the attempt before, or from when the first was submitted.
        seconds: by bucket, from `began` (or the end of the attempt before, if that is later) to `ended`.
        hosts: names of the machines, by process.
        num_saves: saves that were begun.
        environment: what its event `start` says of versions, CPUs and the commit, unchecked.
    """

    number: int
    began: float
    ended: float
    state: RunState
    since: float
    code: int | None = None
    reason: str | None = None
    resumed_step: int | None = None
    reached_step: int | None = None
    lost_steps: int = 0
    gap_seconds: float = 0.0
    seconds: Mapping[TimeBucket, float] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    num_processes: int | None = None
    num_devices: int | None = None
    device_kind: str | None = None
    num_saves: int = 0
    environment: JsonObject = field(default_factory=dict)


@dataclass(frozen=True)
class CheckpointRecord:
    """One directory below `checkpoints/`; what is not known is None."""

    name: str
    step: int | None
    trust: Verification
    time: float | None = None
    num_bytes: int | None = None
    attempt: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class SaveRecord:
    """A commit, whether its checkpoint is still there or not."""

    time: float
    attempt: int
    step: int
    num_bytes: int | None
    seconds_to_durable: float | None


@dataclass(frozen=True)
class Notice:
    """Something in the ledger that a person should know."""

    time: float
    attempt: int
    event: str
    step: int | None
    text: str


@dataclass(frozen=True)
class StragglerRecord:
    """Which processes of the newest attempt come late to `step`, and how many seconds after the first."""

    step: int
    late: Mapping[str, float]


@dataclass(frozen=True)
class Throughput:
    """Over the newest rows, everything included: evaluation, saves, waits. None where it is not known.

    Attributes:
        step_seconds: of a job without rows, over its newest attempt.
        tokens_per_second, mfu: where rows have no time, as the newest has them.
        left_seconds: to the last step, at that pace; only of a run that lives.
    """

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    tokens_per_second_per_device: float | None = None
    mfu: float | None = None
    left_seconds: float | None = None


@dataclass(frozen=True)
class History:
    """All that can be told of one run.

    Attributes:
        url: its directory.
        id, name: None where `job.json` is missing or damaged.
        now: when it was looked at.
        since: of `state`.
        step: the last one completed that the newest attempt is known to have; else the newest known.
        attempts: in order.
        seconds: by bucket, over all attempts and the gaps between them; they sum to `wall_seconds`.
        wall_seconds: from when the first attempt was submitted, or else its begin, to the end of the newest one, or to
            now if that lives.
        goodput: the share of the wall time that went into steps of the final trajectory.
        checkpoints: steps ascending, then other names.
        row: the newest of `metrics.jsonl`; empty for a job without metrics.
        trend: rows, at most some hundred, spread over the run, the newest among them.
        validation: (step, val/loss) likewise; `best_validation` is the lowest of all that are known.
        saves: all commits, or every second, fourth, ... of very many.
        events: the newest of the ledger, in its order, unchecked.
        spec: `spec.yaml` as it stands there; empty where it is missing or damaged.
        unread: what could not be read, a line each.
    """

    url: str
    id: str | None
    name: str | None
    now: float
    state: RunState
    since: float
    reason: str | None
    step: int
    total_steps: int | None
    attempts: tuple[AttemptRecord, ...]
    seconds: Mapping[TimeBucket, float]
    wall_seconds: float
    goodput: float
    lost_steps: int
    speed: Throughput
    checkpoints: tuple[CheckpointRecord, ...] = ()
    row: JsonObject = field(default_factory=dict)
    trend: tuple[JsonObject, ...] = ()
    validation: tuple[tuple[int, float], ...] = ()
    best_validation: tuple[int, float] | None = None
    straggling: StragglerRecord | None = None
    warnings: tuple[Notice, ...] = ()
    saves: tuple[SaveRecord, ...] = ()
    events: tuple[JsonObject, ...] = ()
    spec: JsonObject = field(default_factory=dict)
    unread: tuple[str, ...] = ()


def to_json(value: Any) -> Any:
    """A record, or a part of one, as plain JSON: enums by their value, what is no finite number as null."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(to_json(key)): to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | int) else str(value)
