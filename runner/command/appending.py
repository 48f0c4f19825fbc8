"""A file of one's own that grows by an object a line, one for each step, and is gone on with after a kill."""

import os
from pathlib import Path

from runner.errors import InvalidError
from runner.storage import JsonObject, Store, encode_line, parse_lines


def refuse_inside(path: str, store: Store) -> None:
    """Raise `InvalidError` if a file would lie in the directory of a run, which owns all that is there."""
    if store.root is not None and Path(path).resolve().is_relative_to(store.root.resolve()):
        raise InvalidError(f"--output {path}: lies in the directory of the run, which alone writes there; name another")


def steps_in(path: str) -> list[int]:
    """The steps that have a line; a line that a kill has torn is taken away. Raises `InvalidError`."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidError(f"--output {path}: {error}") from error
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    return [record["step"] for record in parse_lines(whole) if type(record.get("step")) is int]


def append(path: str, record: JsonObject) -> None:
    """Add a line, durable when this returns."""
    with open(path, "ab") as file:
        file.write(encode_line(record))
        file.flush()
        os.fsync(file.fileno())
