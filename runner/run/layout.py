"""The names in a run's directory, what kind of thing each must be, and how its records are read.

In a bucket there are no kinds.

`job.json`: whose directory this is. Written by the first attempt, never again.

`result.json`: what is left of a run that reached its end. Main host only.
"""

import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from runner.errors import InvalidError, NewerFormatError, ResumeError
from runner.records import Key, validate_record
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import (
    JsonObject,
    Store,
    WrongKindError,
    create_file,
    encode_json,
    find_kind,
    local_directory,
    make_store,
    read_json,
    validate_path,
    validate_url,
)

LAYOUT = {
    "job.json": "a file",
    "attempts": "a directory",
    "spec.yaml": "a file",
    "events.jsonl": "a file",
    "metrics.jsonl": "a file",
    "checkpoints": "a directory",
    "quarantine": "a directory",
    "stacks": "a directory",
    "logs": "a directory",
    "profiles": "a directory",
    "tensorboard": "a directory",
    "wandb": "a directory",
    "result.json": "a file",
}
OPTIONAL_ENTRIES = ("compiled",)  # where something else stands under these names the run does without them, and says so

FORMAT = 1  # of a record that does not say


class DamagedRecordError(Exception):
    """A record is there, and is not whole or not what it should be."""


def read_record(store: Store, name: str, keys: Sequence[Key], needs: Sequence[str]) -> JsonObject | None:
    """The JSON object in a file of a run's directory, its types checked; None if there is no such file.

    Raises `DamagedRecordError`, `NewerFormatError`, else as the store does.
    """
    try:
        record = read_json(store, name)
        if record.get("format", FORMAT) != FORMAT:
            raise NewerFormatError(f"{store.url}/{name}: written by a newer runner, in format {record['format']}")
        validate_record(record, keys, needs)
    except FileNotFoundError:
        return None
    except (NewerFormatError, WrongKindError):
        raise
    except ValueError as error:
        raise DamagedRecordError(f"{store.url}/{name} is damaged ({error})") from error
    return record


def open_directory(document: Document, spec: ExecutionSpec) -> Store:
    """The run's directory, which need not be there yet.

    Raises `InvalidError` naming the line if this path or another in the spec can be none. Whether another run is at
    `init_from` matters only where it is read.
    """
    with document.errors_at("directory"):
        store = make_store(spec.directory)
    with document.errors_at("checkpoint.local_directory"):
        if spec.checkpoint.local_directory is not None:
            validate_path(local_directory(spec.checkpoint.local_directory))
    with document.errors_at("checkpoint.init_from"):
        if spec.checkpoint.initial_weights is not None:
            validate_url(spec.checkpoint.initial_weights.path)
    return store


def validate_entry_kinds(store: Store) -> None:
    """Raise `InvalidError` if something of another kind stands where the run would read or write."""
    if store.root is None:
        return
    validate_path(store.root)
    for name, needed in LAYOUT.items():
        path = store.root / name
        kind = find_kind(path)
        if kind not in (None, needed):
            raise InvalidError(f"{path} is {kind}, needs {needed}; move it away")


OWNER = "job.json"
_KEYS = (Key("id", str, "Id of the run."), Key("name", str, "Its name."), Key("identity", dict, "Its trajectory."))


@dataclass(frozen=True)
class Owner:
    """The job that a directory belongs to.

    Attributes:
        id: drawn when the directory was claimed first; the id in W&B too.
        time: of that claim, in Unix seconds.
        identity: what the spec alone says of the trajectory.
    """

    id: str
    name: str
    time: float
    identity: Trajectory

    @classmethod
    def now(cls, name: str, identity: Trajectory) -> Self:
        """The owner of a directory that is claimed now."""
        return cls(uuid.uuid4().hex[:12], name, time.time(), identity)


def write_owner(store: Store, owner: Owner) -> None:
    """Write down whose directory this is. Raises `FileExistsError` if that is written already."""
    create_file(store, OWNER, encode_json(asdict(owner)))


def read_owner(store: Store) -> Owner | None:
    """Whose directory this is, None if nobody's. Raises `ResumeError` if that cannot be told."""
    try:
        record = read_record(store, OWNER, _KEYS, [key.name for key in _KEYS])
    except DamagedRecordError as error:
        raise ResumeError(f"{error}: cannot tell whose directory this is") from error
    if record is None:
        return None
    return Owner(record["id"], record["name"], record.get("time", 0.0), record["identity"])


RESULT = "result.json"

RESULT_KEYS = (
    Key("step", int, "Optimizer steps completed."),
    Key(
        "fingerprint",
        str,
        "Digest of the whole state's bits, 32 hexadecimal digits; the same on any topology.",
    ),
    Key("tokens", int, "Tokens consumed since step 0; trainers only.", "tokens"),
    Key("train_loss", float | None, "`train/loss` of the last row of metrics; trainers only.", "nats"),
    Key(
        "val_loss",
        float | None,
        "`val/loss` of that row, null where nothing is kept out for validation; trainers only.",
        "nats",
    ),
    Key("stopped_by", str, "Name of the hook that has ended the run before its last step; absent where none has."),
    Key("stopped_because", str, "What that hook has given as its reason."),
    Key("stopped_rule", int, "32 bits of that hook, its class and its config: with the same ones the run is done."),
    Key("best_step", int | None, "The best step by `checkpoint.keep_best`; with the hook BestAtEnd."),
    Key("best_value", float | None, "The metric of that step, rounded to 32 bits; with the hook BestAtEnd."),
    Key("<name>", str | float | int | None, "What `on_end` of any other hook has returned under this name."),
)


@dataclass(frozen=True)
class RunResult:
    """What every job's result has, and of one that a hook has ended, which hook and why."""

    step: int
    fingerprint: str
    stopped_by: str | None = None
    stopped_because: str | None = None
    stopped_rule: int | None = None

    @property
    def stop_line(self) -> str | None:
        """Which hook has ended the run, and why; None if none has."""
        return None if self.stopped_by is None else f"stopped by {self.stopped_by}: {self.stopped_because}"


def read_result(store: Store) -> RunResult | None:
    """The result of a run, None if there is no whole one. Raises `NewerFormatError`, else as the store does."""
    try:
        record = read_record(store, RESULT, RESULT_KEYS, ["step", "fingerprint"])
    except DamagedRecordError:
        return None
    if record is None:
        return None
    stopped = {key: record.get(key) for key in ("stopped_by", "stopped_because", "stopped_rule")}
    return RunResult(record["step"], record["fingerprint"], **stopped)
