"""Whose directory this is, and whether a spec would continue what is there: the wrong run is refused."""

from collections.abc import Callable, Container
from dataclasses import dataclass

from runner.attempt.layout import refuse_other_kinds
from runner.attempt.owner import read_owner
from runner.attempt.result import read_result
from runner.errors import InvalidError, ResumeError, StorageError
from runner.spec import Document, JobConfig, Trajectory, filled_in
from runner.storage import Store, probe


@dataclass(frozen=True)
class Claimant:
    """What a start says of the run that it would continue.

    Attributes:
        document: the spec, for errors with a line.
        config: of the job, checked; it has the defaults of keys that an older run has not written down.
        identity: what defines the trajectory, as far as it is known yet.
        unread: dotted keys that nothing reads as the spec stands; they change no trajectory.
    """

    document: Document
    config: JobConfig
    identity: Trajectory
    unread: Container[str]

    def refuse_another_trajectory(self, saved: Trajectory, owner: str, url: str) -> None:
        """Raise `ResumeError` with a line for each key in which `saved`, of `owner`, is another trajectory.

        What is `auto` on one side is not known there yet. A checkpoint's identity has what it led to.
        """
        saved, present = filled_in(saved, self.identity, self.config), self.identity
        lines = [
            self.document.line(
                tuple(key.split(".")), f"{owner} has {_value(saved, key)}, the spec {_value(present, key)}"
            )
            for key in saved | present
            if key not in self.unread
            and _value(saved, key) != _value(present, key)
            and "auto" not in (saved.get(key), present.get(key))
        ]
        if lines:
            raise ResumeError("\n".join(lines) + f"\n{url}: this would be another trajectory; use another directory")


def _value(identity: Trajectory, key: str) -> str:
    return repr(identity[key]) if key in identity else "nothing"


def check_directory(store: Store, name: str, claimant: Claimant) -> None:
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
        claimant.refuse_another_trajectory(owner.identity, "this directory's job", store.url)
    except InvalidError as error:
        raise error if isinstance(error, ResumeError) else claimant.document.error("directory", str(error)) from error
    except OSError as error:
        raise StorageError(f"{store.url} cannot be reached: {error}") from error


def is_done(store: Store, total_steps: Callable[[], int]) -> bool:
    """Whether the job of this directory reached its end, now or in an earlier attempt.

    `total_steps` may read data, and is asked only where there is a result. A damaged `result.json` says nothing: the
    run then ends once more, from its last checkpoint.
    """
    result = read_result(store)
    return result is not None and result.step >= total_steps()
