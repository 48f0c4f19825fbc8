"""What the job has written down of itself, read from outside."""

from collections.abc import Sequence

from runner.errors import RunnerError
from runner.spec import load_document, validate_spec
from runner.storage import JsonObject, open_store, read_log


def read_ledger(spec: str, overrides: Sequence[str]) -> list[JsonObject]:
    """The events of the job in its directory; none if the spec is wrong or the directory cannot be read.

    The job itself says what is wrong with it.
    """
    try:
        return read_log(open_store(validate_spec(load_document(spec, list(overrides))).directory), "events")
    except (RunnerError, OSError):
        return []


def newest_step(spec: str, overrides: Sequence[str]) -> int | None:
    """The newest step that was committed, None if there is none."""
    rows = read_ledger(spec, overrides)
    return max((row["step"] for row in rows if row["event"] == "commit"), default=None)
