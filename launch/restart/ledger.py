"""What the job has written down of itself, read from outside."""

from collections.abc import Sequence

from runner.errors import RunnerError
from runner.history.read import read_history
from runner.history.record import History
from runner.spec import load_document, validate_spec
from runner.storage import Store, iterate_log, open_store


def open_directory(spec: str, overrides: Sequence[str]) -> Store:
    """The job's directory. Raises `InvalidError` if the spec is wrong."""
    return open_store(validate_spec(load_document(spec, list(overrides))).directory)


def newest_step(spec: str, overrides: Sequence[str]) -> int | None:
    """The newest step that was committed; None if there is none or it cannot be told: the job itself says why."""
    try:
        rows = iterate_log(open_directory(spec, overrides), "events")
        return max((row["step"] for row in rows if row.get("event") == "commit"), default=None)
    except (RunnerError, OSError):
        return None


def history_of(spec: str, overrides: Sequence[str]) -> History | None:
    """The history of the job; None if it has none or it cannot be read."""
    try:
        return read_history(open_directory(spec, overrides))
    except (RunnerError, OSError):
        return None
