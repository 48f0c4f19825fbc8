"""Whose directory this is, and whether a spec would continue what is there: the wrong run is refused."""

from collections.abc import Container

from runner.attempt.claim import OWNER
from runner.errors import InvalidError, ResumeError, StorageError
from runner.spec import Document, Trajectory
from runner.storage import JsonObject, Store, probe, read_json

_MISSING = object()


def check_directory(store: Store, document: Document, name: str, identity: Trajectory, unread: Container[str]) -> None:
    """Refuse a directory that cannot be written, or is another job's. Main host only; claims and changes nothing.

    Raises `InvalidError`, or `StorageError` if it cannot be reached.
    """
    try:
        if store.root is None:
            probe(store)
        owner = _owner(store)
        if owner is None:
            return
        if owner.get("name") != name:
            raise ResumeError(
                f"{store.url} belongs to the job {owner.get('name')!r}, this one is {name!r}; use another directory"
            )
        saved = owner.get("identity", {})
        refuse_another_trajectory(saved, identity, unread, "this directory's job", document, store.url)
    except InvalidError as error:
        raise error if isinstance(error, ResumeError) else document.error("directory", str(error)) from error
    except OSError as error:
        raise StorageError(f"{store.url} cannot be reached: {error}") from error


def _owner(store: Store) -> JsonObject | None:
    try:
        return read_json(store, OWNER)
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ResumeError(f"{store.url}/{OWNER} is damaged ({error}): cannot tell whose directory this is") from error


def refuse_another_trajectory(
    saved: Trajectory, present: Trajectory, unread: Container[str], owner: str, document: Document, url: str
) -> None:
    """Raise `ResumeError` with a line for each key that would change the trajectory; those in `unread` do not."""
    compared = [key for key in saved | present if key not in unread]
    keys = [key for key in compared if saved.get(key, _MISSING) != present.get(key, _MISSING)]
    if not keys:
        return
    lines = [
        document.line(tuple(key.split(".")), f"{owner} has {saved.get(key)!r}, the spec {present.get(key)!r}")
        for key in keys
    ]
    raise ResumeError("\n".join(lines) + f"\n{url}: this would be another trajectory; use another directory")


def is_done(store: Store, total_steps: int) -> bool:
    """Whether the job of this directory reached its end, now or in an earlier attempt."""
    try:
        return bool(read_json(store, "result.json")["step"] >= total_steps)
    except (FileNotFoundError, ValueError, KeyError):
        return False
