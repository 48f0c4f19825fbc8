"""Records of a run's history: frozen, with plain values, times in Unix seconds and durations in seconds.

`status --json` prints them, so the names of their fields are keys of its output.
"""

import enum
import math
from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from runner.distributed.clock import TimeCategory
from runner.storage import INT_MAX, JsonObject


class RunState(enum.Enum):
    """State of an attempt; the state of a run is that of its newest attempt."""

    RUNNING = "running"
    STALLED = "stalled"  # no sign of life, or the same step for much too long
    DONE = "done"
    PREEMPTED = "preempted"
    FAILED = "failed"  # exit code 1
    INVALID = "invalid"  # exit code 2
    RETRYABLE = "retryable"  # exit code 76
    KILLED = "killed"  # its process is gone and has recorded no exit code
    FENCED = "fenced"  # a newer attempt claimed the directory while it was alive


class Verification(enum.Enum):
    """Knowledge about a checkpoint without reading its arrays."""

    VERIFIED = "verified"  # its bits were read back and compared, after the save or by a restore
    COMMITTED = "committed"  # its manifest is complete
    DAMAGED = "damaged"  # its manifest is damaged, or files are missing or have another size
    UNCOMMITTED = "not committed"  # it is being written, or was never finished
    UNSEEN = "not looked at"  # committed according to the ledger


@dataclass(frozen=True)
class AttemptRecord:
    """One start of the job."""

    number: int  # number of the attempt, from 1
    began: float  # creation of its process 0, or else the first time that is known of it
    ended: float  # its last sign of life
    state: RunState
    since: float  # last progress of a stalled attempt; otherwise `ended`
    code: int | None = None  # exit code, None if it recorded none
    reason: str | None = None  # reason of a failure
    resumed_step: int | None = None  # step at which it started, 0 for a new state; None if it never had a state
    # `fast tier` or `run's directory`, with the processes whose part came from a replica; None if it restored no
    # checkpoint.
    restored_from: str | None = None
    reached_step: int | None = None  # last completed step; None if it never had a state
    lost_steps: int = 0  # steps that a later attempt repeated
    gap_seconds: float = 0.0  # time since the end of the previous attempt, or since the job was first submitted
    # Seconds by category, from `began` (or the end of the previous attempt, if later) to `ended`.
    seconds: Mapping[TimeCategory, float] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()  # host names by process
    num_processes: int | None = None
    num_devices: int | None = None
    device_kind: str | None = None  # JAX's name for the devices
    num_saves: int = 0  # saves that were begun
    environment: JsonObject = field(default_factory=dict)  # versions, CPUs and commit from its event `start`, unchecked


@dataclass(frozen=True)
class CheckpointRecord:
    """One directory below `checkpoints/`. A value that is not known is None."""

    name: str
    step: int | None  # step of the checkpoint
    trust: Verification  # what is known about it
    time: float | None = None  # when it was committed
    num_bytes: int | None = None  # size of its files
    attempt: int | None = None  # attempt that wrote it
    problem: str | None = None  # what is wrong with it


@dataclass(frozen=True)
class SaveRecord:
    """A committed save, whether or not its checkpoint still exists."""

    time: float
    attempt: int
    step: int
    num_bytes: int | None
    seconds_to_durable: float | None


@dataclass(frozen=True)
class Notice:
    """An event of the ledger that the user should know of."""

    time: float
    attempt: int
    event: str
    step: int | None
    text: str


@dataclass(frozen=True)
class ForkRecord:
    """Checkpoint of another run, the parent, with which a fork began."""

    run: str  # directory or URL of the parent at that time
    id: str  # id of the parent
    step: int  # step of the checkpoint, at which they part
    fingerprint: str
    # Dotted key -> [value in the parent, value in the fork], None where there is none. Not validated.
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StageRecord:
    """Stage of a run. A value that is not known is None."""

    number: int  # its number, from 1; 0 is the run before its first stage
    from_step: int  # completed steps before it
    tokens: int | None = None  # tokens consumed before it
    tokens_per_step: int | None = None  # tokens of each of its steps
    changes: tuple[str, ...] = ()  # what it changes, each a key with both values, as text
    why: str = ""  # reason that the spec gives; empty if it gives none
    began: float | None = None  # when the run has come to it


@dataclass(frozen=True)
class StragglerRecord:
    """Straggling processes of the newest attempt, and their arrival at `step` in seconds after the first process."""

    step: int
    late: Mapping[str, float]


@dataclass(frozen=True)
class Throughput:
    """Throughput over the newest rows, including evaluation, saves and waits. A value that is not known is None."""

    step_seconds: float | None = None  # duration of a step; of a job without rows, over its newest attempt
    tokens_per_second: float | None = None  # of the newest row, if rows have no time
    tokens_per_second_per_device: float | None = None  # likewise
    mfu: float | None = None  # model FLOPs utilization, likewise
    left_seconds: float | None = None  # estimated time to the last step, if the run is alive
    examples_per_second: float | None = None  # of a run whose rows count examples instead of tokens
    examples_per_second_per_device: float | None = None  # likewise

    @property
    def rate(self) -> tuple[str, float | None, float | None]:
        """Unit that the rows count, and its number per second on all devices and on each."""
        if self.examples_per_second is not None:
            return "examples", self.examples_per_second, self.examples_per_second_per_device
        return "tokens", self.tokens_per_second, self.tokens_per_second_per_device


@dataclass(frozen=True)
class History:
    """History of one run."""

    url: str  # its directory
    id: str | None  # its id; None if `job.json` is missing or damaged
    name: str | None
    now: float  # when the directory was read
    state: RunState
    since: float  # beginning of that state
    reason: str | None  # reason of a failure, or of a stop by a hook
    step: int  # last completed step of the newest attempt that had a state, or of a finished run
    total_steps: int | None  # step at which the run is done
    attempts: tuple[AttemptRecord, ...]  # its attempts in order
    # Seconds by category, over all attempts and the gaps between them; they sum to `wall_seconds`.
    seconds: Mapping[TimeCategory, float]
    # From the first submission, or else the beginning of the first attempt, to the end of the newest attempt, or to
    # `now` if that is alive.
    wall_seconds: float
    goodput: float  # fraction of the wall time that was spent on steps of the final trajectory
    lost_steps: int  # steps that were repeated
    speed: Throughput
    checkpoints: tuple[CheckpointRecord, ...] = ()  # its checkpoints: steps in ascending order, then other names
    row: JsonObject = field(default_factory=dict)  # newest row of `metrics.jsonl`; empty for a job without metrics
    trend: tuple[JsonObject, ...] = ()  # some hundred rows at most, spread over the run, including the newest
    # (step, val/loss) of the surviving trajectory, at most some thousand.
    validation: tuple[tuple[int, float], ...] = ()
    best_validation: tuple[int, float] | None = None  # the lowest of all that are known
    # The newest figures of evaluations by key, such as `val/accuracy`; some dozen at most.
    figures: Mapping[str, float] = field(default_factory=dict)
    is_language_model: bool = True  # False if the loss is in no known unit, since the model returns no logits over ids
    straggling: StragglerRecord | None = None  # straggling processes, if there are any
    warnings: tuple[Notice, ...] = ()  # newest notices
    saves: tuple[SaveRecord, ...] = ()  # all commits, or every second, fourth, ... of very many
    events: tuple[JsonObject, ...] = ()  # newest events of the ledger in its order, unchecked
    fork: ForkRecord | None = None  # where it was forked from; None if it is not a fork
    stages: tuple[StageRecord, ...] = ()  # its stages in order, also those that have not begun
    # Steps after which another program made the steps, with spec and hardware unchanged; the newest.
    program_changes: tuple[int, ...] = ()
    spec: JsonObject = field(default_factory=dict)  # content of `spec.yaml`; empty if it is missing or damaged
    unread: tuple[str, ...] = ()  # one line for everything that could not be read

    def find_stage(self, step: int) -> int:
        """Return how many stages begin at `step` or earlier."""
        return bisect([stage.from_step for stage in self.stages], step)


def to_json(value: Any) -> Any:
    """Return a record, or a part of one, as JSON values: enums by their value, non-finite numbers as None."""
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
    # YAML has whole numbers that are too long for Python to write in decimal digits.
    if type(value) is int and abs(value) > INT_MAX:
        return None
    return value if value is None or isinstance(value, str | int) else str(value)
