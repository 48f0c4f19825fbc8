"""The names in a run's directory, what kind of thing each must be, and how its records are read.

In a bucket there are no kinds.
"""

from collections.abc import Sequence

from runner.errors import InvalidError, NewerFormatError
from runner.record import Key, check
from runner.spec import Document, ExecutionSpec
from runner.storage import (
    JsonObject,
    OtherKindError,
    Store,
    check_url,
    check_way,
    kind_of,
    local_directory,
    read_json,
    store_at,
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
EXPENDABLE = ("compiled",)  # where something else stands under these names the run does without them, and says so

FORMAT = 1  # of a record that does not say


class DamagedError(Exception):
    """A record is there, and is not whole or not what it should be."""


def read_record(store: Store, name: str, keys: Sequence[Key], needs: Sequence[str]) -> JsonObject | None:
    """The JSON object in a file of a run's directory, its types checked; None if there is no such file.

    Raises `DamagedError`, `NewerFormatError`, else as the store does.
    """
    try:
        record = read_json(store, name)
        if record.get("format", FORMAT) != FORMAT:
            raise NewerFormatError(f"{store.url}/{name}: written by a newer runner, in format {record['format']}")
        check(record, keys, needs)
    except FileNotFoundError:
        return None
    except (NewerFormatError, OtherKindError):
        raise
    except ValueError as error:
        raise DamagedError(f"{store.url}/{name} is damaged ({error})") from error
    return record


def open_directory(document: Document, spec: ExecutionSpec) -> Store:
    """The run's directory, which need not be there yet.

    Raises `InvalidError` naming the line if this path or another in the spec can be none. Whether another run is at
    `init_from` matters only where it is read.
    """
    with document.blaming("directory"):
        store = store_at(spec.directory)
    with document.blaming("checkpoint.local_directory"):
        if spec.checkpoint.local_directory is not None:
            check_way(local_directory(spec.checkpoint.local_directory))
    with document.blaming("checkpoint.init_from"):
        if spec.checkpoint.weights is not None:
            check_url(spec.checkpoint.weights.path)
    return store


def refuse_other_kinds(store: Store) -> None:
    """Raise `InvalidError` if something of another kind stands where the run would read or write."""
    if store.root is None:
        return
    check_way(store.root)
    for name, needed in LAYOUT.items():
        path = store.root / name
        kind = kind_of(path)
        if kind not in (None, needed):
            raise InvalidError(f"{path} is {kind}, needs {needed}; move it away")
