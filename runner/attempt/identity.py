"""Whose directory this is, and whether a spec would continue what is there: the wrong run is refused."""

from collections.abc import Container

from runner.attempt.layout import refuse_other_kinds
from runner.attempt.owner import read_owner
from runner.attempt.result import read_result
from runner.errors import InvalidError, ResumeError, StorageError
from runner.spec import Document, JobConfig, Trajectory, filled_in
from runner.storage import Store, probe


def check_directory(
    store: Store, document: Document, name: str, identity: Trajectory, config: JobConfig, unread: Container[str]
) -> None:
    """Refuse a directory that cannot be written, or is another job's. Main host only; claims and changes nothing.

    Raises `InvalidError`, or `StorageError` if it cannot be reached.
    """
    try:
        refuse_other_kinds(store)
        if store.root is None:
            probe(store)
        owner = read_owner(store)
        if owner is None:
            return
        if owner.name != name:
            raise ResumeError(
                f"{store.url} belongs to the job {owner.name!r}, this one is {name!r}; use another directory"
            )
        saved = filled_in(owner.identity, identity, config)
        refuse_another_trajectory(saved, identity, unread, "this directory's job", document, store.url)
    except InvalidError as error:
        raise error if isinstance(error, ResumeError) else document.error("directory", str(error)) from error
    except OSError as error:
        raise StorageError(f"{store.url} cannot be reached: {error}") from error


def refuse_another_trajectory(
    saved: Trajectory, present: Trajectory, unread: Container[str], owner: str, document: Document, url: str
) -> None:
    """Raise `ResumeError` with a line for each key that would change the trajectory; those in `unread` do not.

    `saved` is `filled_in`.
    """
    lines = [
        document.line(tuple(key.split(".")), f"{owner} has {_value(saved, key)}, the spec {_value(present, key)}")
        for key in saved | present
        if key not in unread and _value(saved, key) != _value(present, key)
    ]
    if lines:
        raise ResumeError("\n".join(lines) + f"\n{url}: this would be another trajectory; use another directory")


def _value(identity: Trajectory, key: str) -> str:
    return repr(identity[key]) if key in identity else "nothing"


def is_done(store: Store, total_steps: int) -> bool:
    """Whether the job of this directory reached its end, now or in an earlier attempt.

    A damaged `result.json` says nothing: the run then ends once more, from its last checkpoint.
    """
    result = read_result(store)
    return result is not None and result.step >= total_steps
