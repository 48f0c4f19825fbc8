"""`progress.json`: how far a run is, in one small file, for supervisors and other programs that ask often.

Process 0 writes it when its attempt starts, resumes, commits a save, and reaches the end of the run. Each write is
conditional on the version before it, so an attempt that is fenced never replaces what a newer one has written. The
ledger has the same facts, but grows with the run.
"""

import threading

from runner.attempts.fence import Fence
from runner.attempts.layout import PROGRESS, DamagedRecordError, read_record
from runner.console import warn
from runner.errors import FencedError, NewerFormatError, RunnerError
from runner.storage import ABSENT, TIME_MAX, BackgroundWriter, JsonObject, Key, Store, Version, encode_json

FORMAT = 1
PROGRESS_KEYS = (
    Key("format", int, "Version of this layout."),
    Key("attempt", int, "Newest attempt that has started."),
    Key("hosts", list | None, "Host name of each of its processes; null if the job cannot run without one of them."),
    Key("step", int | None, "Newest committed step; null if there is none."),
    Key("total_steps", int | None, "Step at which the job is done; null if it is not known."),
    Key("committed", float | None, "When a save was last committed; null if none was.", "Unix seconds"),
    Key("done", str | None, "Digest of the spec whose last step this attempt has saved; null before."),
)


def read_progress_file(store: Store) -> JsonObject | None:
    """Return the values of `PROGRESS_KEYS`, or None if there is no such file. Raises as `read_record`."""
    record = read_record(store, PROGRESS, PROGRESS_KEYS, [key.name for key in PROGRESS_KEYS])
    if record is not None and not 0 <= (record["committed"] or 0.0) <= TIME_MAX:  # nor NaN
        raise DamagedRecordError(f"{store.url}/{PROGRESS} is damaged: committed is no time")
    return record


class ProgressFile:
    """Writer of `progress.json` for one attempt. Process 0 only; any thread.

    An error of the disk causes a warning, and the run continues; in a bucket the background writer tries again.
    """

    def __init__(self, store: Store, fence: Fence, is_elastic: bool, background_writer: BackgroundWriter):
        self._store, self._fence, self._is_elastic = store, fence, is_elastic
        self._background_writer = background_writer
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._values: JsonObject = {}  # empty before the start, and if the file is not this attempt's to write
        self._version: Version = ABSENT  # of the file when this attempt wrote it

    def on_event(self, event: JsonObject) -> None:
        """Write what an event of the ledger changes."""
        name, changes = event["event"], JsonObject()
        if name == "start":
            changes = self._begin(event)
        elif name in ("restore", "load"):
            changes = {"step": event["step"]}
        elif name in ("init", "fork"):
            changes = {"step": None}
        elif name == "commit":
            changes = {"step": event["step"], "committed": event["time"]}
        elif name == "done":
            changes = {"done": event["spec"]}
        with self._lock:
            if not changes or (name != "start" and not self._values):
                return
            self._values = self._values | changes
        if self._store.root is None:
            self._background_writer.mark(PROGRESS, self._write)
            return
        try:
            self._write()
        except OSError as error:
            warn(f"{PROGRESS} cannot be written ({error})")

    def _begin(self, start: JsonObject) -> JsonObject:
        before: JsonObject = {}
        try:
            before = read_progress_file(self._store) or {}
        except NewerFormatError:
            return {}
        except (RunnerError, OSError, DamagedRecordError):
            pass  # it is written again
        return {
            "format": FORMAT,
            "attempt": self._fence.attempt,
            "hosts": start["hosts"] if self._is_elastic else None,
            "step": before.get("step"),
            "total_steps": start.get("total_steps"),
            "committed": before.get("committed"),
            "done": None,
        }

    def _write(self) -> None:
        with self._writing:
            while True:
                with self._lock:
                    values = self._values
                if not values:
                    return
                try:
                    self._version = self._store.write_if(PROGRESS, encode_json(values), self._version)
                    return
                except FileExistsError:  # of an earlier attempt, or deleted
                    self._version = self._store.read_versioned(PROGRESS)[1]
                try:
                    self._fence.check()
                except FencedError:  # which ends the attempt at its next save
                    with self._lock:
                        self._values = {}
