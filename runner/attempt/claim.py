"""An attempt: one start of a job, on all its hosts, in a directory that is now its own."""

import contextlib
import socket
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from runner import terminal
from runner.attempt.environment import describe
from runner.attempt.event_log import EventLog
from runner.attempt.fence import Fence
from runner.errors import StorageError
from runner.hosts.agreement import Hosts
from runner.hosts.preemption import StopNotice
from runner.hosts.progress import Progress
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import BackgroundWriter, JsonObject, Store, create, encode_json, open_log, read_json

OWNER = "job.json"


@dataclass(frozen=True)
class Attempt:
    """What every part of a running job needs of its attempt. Made by `claim`, on every host.

    Attributes:
        number: counted from 1; the newest alone may write.
        run_id: the same for all attempts in one directory.
        store: the run's directory.
        stop: whether the job was asked to stop.
        progress: of the training thread, for the watchdog.
        background: sends what grows in a bucket.
        environment: versions, commit and hosts, see `environment`; empty on other hosts than the main one.
    """

    number: int
    run_id: str
    store: Store
    hosts: Hosts
    stop: StopNotice
    progress: Progress
    fence: Fence
    events: EventLog
    background: BackgroundWriter
    environment: JsonObject = field(default_factory=dict)

    def say(self, line: str) -> None:
        """Print a line, on the main host only."""
        if self.hosts.is_main:
            terminal.say(line)

    def record(self, event: str, step: int | None, **details: Any) -> None:
        """Put an event into the ledger, on the main host only."""
        if self.hosts.is_main:
            self.events.append(event, step, **details)


def claim(
    store: Store,
    document: Document,
    spec: ExecutionSpec,
    identity: Trajectory,
    hosts: Hosts,
    stop: StopNotice,
    progress: Progress,
    job_class: type,
) -> Attempt:
    """Take the next attempt in `store`; from here on every earlier attempt is fenced. Called on every host.

    The first attempt also writes down whose directory this is: `identity` is what the spec alone says of the
    trajectory. Raises `InvalidError` on every host if the directory cannot be written.
    """
    fence, background = Fence(store), BackgroundWriter()

    def take() -> list[Any]:
        owner = {"id": uuid.uuid4().hex[:12], "name": spec.name, "time": time.time(), "identity": identity}
        try:
            with contextlib.suppress(FileExistsError):
                create(store, OWNER, encode_json(owner))
            return [read_json(store, OWNER)["id"], fence.claim()]
        except (PermissionError, NotADirectoryError) as error:
            raise document.error("directory", f"cannot be written: {error}") from error
        except OSError as error:
            raise StorageError(f"{store.url} cannot be written: {error}") from error

    run_id, number = hosts.main_first(take)
    fence.attempt = number
    log = open_log(store, "events", f"{number:06}.{hosts.process_id}", background)
    events = EventLog(log, number, hosts.process_id)
    names = hosts.gather(socket.gethostname())
    environment = describe(job_class, names) if hosts.is_main else {}
    return Attempt(number, run_id, store, hosts, stop, progress, fence, events, background, environment)
