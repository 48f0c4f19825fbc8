"""Whose directory this is, and whether a spec would continue what is there: the wrong run is refused.

The fence: which attempt a directory belongs to.

An attempt is one start of the job, on all its hosts. Each attempt claims the next number by creating
`attempts/<number>`, which can succeed only once, on a disk and in a bucket. Whoever finds a higher number than its own
is fenced: it ends and writes nothing more, so two attempts never share a directory. Whoever finds its own claim gone
ends too: somebody has removed the directory, or unmounted it, and what is there now is another.
"""

import os
import socket
import time
import uuid
from collections.abc import Callable, Container
from dataclasses import dataclass

from runner.errors import FencedError, InvalidError, RemovedError, ResumeError, StorageError
from runner.run.layout import read_owner, read_result, validate_entry_kinds
from runner.spec import Document, JobConfig, Trajectory, fill_in_defaults
from runner.storage import Store, create_file, encode_json, parse_number, probe_store, read_json

_ATTEMPTS = "attempts"


class Fence:
    """The single-writer rule of one directory. Main host only, except `attempt`."""

    def __init__(self, store: Store, attempt: int | None = None):
        self._store = store
        self._newest_seen = 0
        self._id: str | None = None  # in the claim, on the host that made it
        self.attempt = attempt

    def newest(self) -> int:
        """The highest attempt that has claimed the directory, 0 if none has."""
        names = self._store.list_names(_ATTEMPTS)
        self._newest_seen = max((number for number in map(parse_number, names) if number is not None), default=0)
        return self._newest_seen

    def claim(self) -> int:
        """Take the next attempt number, fencing every earlier attempt."""
        claim_id = uuid.uuid4().hex
        record = {"time": time.time(), "host": socket.gethostname(), "pid": os.getpid(), "id": claim_id}
        while True:
            number = self.newest() + 1
            try:
                create_file(self._store, f"{_ATTEMPTS}/{number}", encode_json(record))
            except FileExistsError:
                continue
            self._newest_seen = self.attempt = number
            self._id = claim_id
            return number

    def check(self) -> None:
        """Raise `FencedError` if a newer attempt owns the directory, `RemovedError` if it is not the claimed one."""
        self.newest()
        self._raise_if_fenced()
        if self._id is not None and not self._is_claim_there():
            raise self._removed()

    def check_locally(self) -> None:
        """Like `check`, but never waits for a network: in a bucket, what the last `check` has seen."""
        if self._store.root is not None:
            self.newest()
        self._raise_if_fenced()

    def _raise_if_fenced(self) -> None:
        assert self.attempt is not None, "the attempt has a number"
        if self._newest_seen < self.attempt:
            raise self._removed()
        if self._newest_seen > self.attempt:
            raise FencedError(
                f"attempt {self._newest_seen} has taken over {self._store.url}; attempt {self.attempt} stops"
            )

    def _is_claim_there(self) -> bool:
        """Whether `attempts/<number>` is the one that this attempt made, and not that of a run begun there since."""
        try:
            return read_json(self._store, f"{_ATTEMPTS}/{self.attempt}").get("id") == self._id
        except (FileNotFoundError, ValueError):
            return False

    def _removed(self) -> RemovedError:
        return RemovedError(
            f"{self._store.url}: {_ATTEMPTS}/{self.attempt}, this attempt's claim, is gone: somebody has removed the "
            "directory, a part of it, or its disk, under the running job; put it back, or start anew"
        )


@dataclass(frozen=True)
class RunIdentity:
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

    def validate_trajectory(self, saved: Trajectory, owner: str, url: str) -> None:
        """Raise `ResumeError` with a line for each key in which `saved`, of `owner`, is another trajectory.

        What is `auto` on one side is not known there yet. A checkpoint's identity has what it led to.
        """
        saved, present = fill_in_defaults(saved, self.identity, self.config), self.identity
        lines = [
            self.document.format_problem(
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


def validate_directory(store: Store, name: str, claimant: RunIdentity) -> None:
    """Refuse a directory that cannot be written, or is another job's. Main host only; claims and changes nothing.

    Raises `InvalidError`, or `StorageError` if it cannot be reached.
    """
    try:
        validate_entry_kinds(store)
        if store.root is None:
            probe_store(store)
        owner = read_owner(store)
        if owner is None:
            return
        if owner.name != name:
            raise ResumeError(
                f"{store.url} belongs to the job {owner.name!r}, this one is {name!r}; use another directory"
            )
        claimant.validate_trajectory(owner.identity, "this directory's job", store.url)
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
