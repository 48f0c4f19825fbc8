"""Layout of a run directory: file names, the kind of each, and the records `job.json`, `forecast.json`, `result.json`.

A bucket has no kinds of entries: every entry is an object. `job.json` says which job owns the directory; the first
attempt writes it, and it is never written again. `result.json` is written by process 0 when the run has reached its
end.
"""

import contextlib
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from runner.errors import InvalidError, NewerFormatError, ResumeError
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import (
    STEP_MAX,
    DiskError,
    ForbiddenError,
    JsonObject,
    Key,
    Store,
    WrongKindError,
    create_file,
    encode_json,
    find_kind,
    local_directory,
    make_store,
    read_json,
    validate_path,
    validate_record,
    validate_url,
)

ATTEMPTS = "attempts"  # folder of the claims and clocks
PROGRESS = "progress.json"
TEXT_FOLDER = "tokenise"  # of the jobs that tokenise the text of a run, each in a directory with the layout of a run
# Checked before anything is claimed, so that no run fails late because of a wrong entry.
LAYOUT = {
    "job.json": "a file",
    ATTEMPTS: "a directory",
    "spec.yaml": "a file",
    "events.jsonl": "a file",
    "metrics.jsonl": "a file",
    "checkpoints": "a directory",
    "quarantine": "a directory",
    "roll_backs": "a directory",
    "stacks": "a directory",
    "waiting": "a directory",
    "logs": "a directory",
    "assets": "a directory",
    TEXT_FOLDER: "a directory",
    "profiles": "a directory",
    "media": "a directory",
    "tensorboard": "a directory",
    "wandb": "a directory",
    "result.json": "a file",
    "forecast.json": "a file",
    PROGRESS: "a file",
}
# If an entry of another kind has one of these names, the run continues without it and prints a warning.
OPTIONAL_ENTRIES = ("compiled",)

FORMAT = 1  # of a record without a format


class DamagedRecordError(Exception):
    """A record exists, but is incomplete or has values of wrong types."""


def read_record(store: Store, name: str, keys: Sequence[Key], needs: Sequence[str]) -> JsonObject | None:
    """Return the JSON object in a file of a run's directory, or None if there is no such file; see `validate_record`.

    Raises `DamagedRecordError`, `NewerFormatError` if a newer runner wrote the record, or `OSError`.
    """
    try:
        record = read_json(store, name)
        if record.get("format", FORMAT) != FORMAT:
            raise NewerFormatError(f"{store.url}/{name}: written by a newer runner, in format {record['format']}")
        validate_record(record, keys, needs)
    except FileNotFoundError:
        return None
    except (NewerFormatError, WrongKindError):  # Both are kinds of ValueError, but not damage.
        raise
    except ValueError as error:
        raise DamagedRecordError(f"{store.url}/{name} is damaged ({error})") from error
    return record


def open_directory(document: Document, spec: ExecutionSpec) -> Store:
    """Return the run's directory, which need not exist yet.

    Of `checkpoint.init_from` only the form is checked here; its content is checked when it is read. Raises
    `InvalidError` with the line of a path in the spec that is not valid.
    """
    with document.errors_at("directory"):
        store = make_store(spec.directory)
    with document.errors_at("checkpoint.local_directory"):
        if spec.checkpoint.local_directory is not None:
            # A disk of the host that fails must not end a run: the checkpointer finds out, and decides.
            with contextlib.suppress(DiskError, ForbiddenError):
                validate_path(local_directory(spec.checkpoint.local_directory))
    with document.errors_at("checkpoint.init_from"):
        if spec.checkpoint.initial_weights is not None:
            validate_url(spec.checkpoint.initial_weights.path)
    return store


def validate_entry_kinds(store: Store) -> None:
    """Raise `InvalidError` if there is a file in place of a directory of the layout, or the reverse."""
    if store.root is None:
        return
    validate_path(store.root)
    for name, needed in LAYOUT.items():
        path = store.root / name
        kind = find_kind(path)
        if kind not in (None, needed):
            raise InvalidError(f"{path} is {kind}, needs {needed}; move it away")


OWNER = "job.json"
_OWNER_KEYS = (
    Key("id", str, "Id of the run."),
    Key("name", str, "Its name."),
    Key("identity", dict, "Its trajectory."),
    Key(
        "forecast", str | None, "SHA-256 of `forecast.json` as the run began with it; null or absent if there was none."
    ),
)


@dataclass(frozen=True)
class Owner:
    """Job that owns a directory."""

    id: str  # random id from the first claim of the directory; also the run id in W&B
    name: str  # name of the run
    time: float  # time of that claim, in Unix seconds
    identity: Trajectory  # keys of the spec that define the trajectory
    forecast: str | None = None  # digest of `forecast.json` at that claim; None if there was none

    @classmethod
    def create(cls, name: str, identity: Trajectory, forecast: str | None = None) -> Self:
        """Return a new owner with a random id and the current time."""
        return cls(uuid.uuid4().hex[:12], name, time.time(), identity, forecast)

    def encode(self) -> bytes:
        """Return the content of `job.json`."""
        record = asdict(self)
        return encode_json({key: value for key, value in record.items() if (key, value) != ("forecast", None)})


def write_owner(store: Store, owner: Owner) -> None:
    """Write `job.json`. Raises `FileExistsError` if the directory has an owner already."""
    create_file(store, OWNER, owner.encode())


def replace_owner(store: Store, owner: Owner, identity: Trajectory) -> None:
    """Write `job.json` with another identity."""
    store.write(OWNER, replace(owner, identity=identity).encode())


def read_owner(store: Store) -> Owner | None:
    """Return the owner of the directory, or None if it has none. Raises `ResumeError` if `job.json` is damaged."""
    try:
        record = read_record(store, OWNER, _OWNER_KEYS, [key.name for key in _OWNER_KEYS[:3]])
    except DamagedRecordError as error:
        raise ResumeError(f"{error}: cannot tell which job owns the directory; use another directory") from error
    if record is None:
        return None
    return Owner(record["id"], record["name"], record.get("time", 0.0), record["identity"], record.get("forecast"))


FORECAST = "forecast.json"
FORECAST_KEYS = (
    Key("loss", float, "Validation loss that the law expects at the end of the run.", "nats"),
    Key("low", float, "Lower end of its interval.", "nats"),
    Key("high", float, "Upper end of its interval.", "nats"),
    Key("coverage", float, "Probability with which the interval contains the loss, if the law holds."),
    Key("parameters", int, "Parameters of the run, embeddings included."),
    Key("tokens", int, "Tokens of the run.", "tokens"),
    Key("ladder", str, "Directory or URL of the ladder."),
    Key("law", dict, "The law, and the runs that it was fitted to; as in `sweep.json`."),
)


def write_forecast(store: Store, record: JsonObject) -> None:
    """Write `forecast.json` into the directory of a run that has not begun; the same record may be written again.

    Raises `InvalidError` if the run has begun without it, or another forecast is there: none is ever replaced.
    """
    content = encode_json({"format": FORMAT} | record)
    try:
        create_file(store, FORECAST, content)
    except FileExistsError:
        if store.read(FORECAST) != content:
            raise InvalidError(
                f"{store.url}/{FORECAST}: another forecast is there, and none is ever replaced; use another directory"
            ) from None
    # The first attempt records what it finds, so this also covers a run that began in between.
    owner = read_owner(store)
    if owner is not None and owner.forecast != hashlib.sha256(content).hexdigest():
        raise InvalidError(f"{store.url}: the run has begun without this forecast; one that is made afterwards is none")


def digest_forecast(store: Store) -> str | None:
    """Return the digest of `forecast.json`, or None if there is none."""
    try:
        return hashlib.sha256(store.read(FORECAST)).hexdigest()
    except FileNotFoundError:
        return None


def read_forecast(store: Store) -> JsonObject | None:
    """Return the forecast of a run, or None if it has none.

    Raises `DamagedRecordError` if it is damaged, or is not the one that the run began with; `NewerFormatError`;
    `ResumeError` if `job.json` is damaged; `OSError`.
    """
    record = read_record(store, FORECAST, FORECAST_KEYS, [key.name for key in FORECAST_KEYS])
    owner = None if record is None else read_owner(store)
    if owner is not None and owner.forecast != digest_forecast(store):
        raise DamagedRecordError(f"{store.url}/{FORECAST} was written or changed after the run had begun: no forecast")
    return record


RESULT = "result.json"

RESULT_KEYS = (
    Key("step", int, "Completed optimizer steps."),
    Key(
        "fingerprint", str, "Digest of the bits of the whole state, 32 hexadecimal digits; independent of the topology."
    ),
    Key("tokens", int, "Tokens consumed since step 0; trainers only.", "tokens"),
    Key("examples", int, "Examples consumed since step 0, instead of tokens where a trainer's data are arrays."),
    Key("train_loss", float | None, "`train/loss` of the last row of metrics; trainers only.", "nats"),
    Key(
        "val_loss",
        float | None,
        "`val/loss` of the last row of metrics, null if there is no validation data; trainers only.",
        "nats",
    ),
    Key("stopped_by", str, "Name of the hook that ended the run before its last step; absent if none did."),
    Key("stopped_because", str, "Reason given by that hook."),
    Key(
        "stopped_rule",
        int,
        "Digest (32 bits) of that hook, its class and its config; while it is unchanged the run counts as done.",
    ),
    Key("best_step", int | None, "Best step by `checkpoint.keep_best`; with the hook BestAtEnd."),
    Key("best_value", float | None, "Metric of the best step, rounded to 32 bits; with the hook BestAtEnd."),
    Key("<name>", str | float | int | None, "Value that `on_end` of any other hook returned under this name."),
)


@dataclass(frozen=True)
class RunResult:
    """Part of `result.json` that every job has, and the hook that ended the run, if one did."""

    step: int
    fingerprint: str
    stopped_by: str | None = None
    stopped_because: str | None = None
    stopped_rule: int | None = None

    @property
    def stop_line(self) -> str | None:
        """The hook that ended the run and its reason, in one line; None if no hook did."""
        return None if self.stopped_by is None else f"stopped by {self.stopped_by}: {self.stopped_because}"


def read_result(store: Store) -> RunResult | None:
    """Return the result of a run, or None if it is missing or damaged.

    Raises `NewerFormatError` if a newer runner wrote it, or `OSError`.
    """
    try:
        record = read_record(store, RESULT, RESULT_KEYS, ["step", "fingerprint"])
    except DamagedRecordError:
        return None
    if record is None:
        return None
    stopped = {key: record.get(key) for key in ("stopped_by", "stopped_because", "stopped_rule")}
    # A step that no run can have counts as damage.
    if not 0 <= record["step"] <= STEP_MAX:
        return None
    return RunResult(record["step"], record["fingerprint"], **stopped)
