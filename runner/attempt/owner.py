"""`job.json`: whose directory this is. Written by the first attempt, never again."""

import time
import uuid
from dataclasses import asdict, dataclass
from typing import Self

from runner.attempt.layout import DamagedError, read_record
from runner.errors import ResumeError
from runner.record import Key
from runner.spec import Trajectory
from runner.storage import Store, create, encode_json

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
    create(store, OWNER, encode_json(asdict(owner)))


def read_owner(store: Store) -> Owner | None:
    """Whose directory this is, None if nobody's. Raises `ResumeError` if that cannot be told."""
    try:
        record = read_record(store, OWNER, _KEYS, [key.name for key in _KEYS])
    except DamagedError as error:
        raise ResumeError(f"{error}: cannot tell whose directory this is") from error
    if record is None:
        return None
    return Owner(record["id"], record["name"], record.get("time", 0.0), record["identity"])
