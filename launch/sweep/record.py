"""Root of a sweep: its record `sweep.json`, and the lock that keeps a second process off it."""

import contextlib
import fcntl
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from launch.supervisor import read_progress
from runner.attempts.layout import OWNER, DamagedRecordError
from runner.errors import InvalidError
from runner.history.ledger import to_single_line
from runner.history.sweep import SWEEP, Sweep, SweepRun, read_last_metric, read_sweep
from runner.spec.document import format_overrides
from runner.storage import ABSENT, Store, open_store, read_log
from runner.storage.local import try_lock

_LOCK = "sweep.lock"


class SweepRecord:
    """The record of a sweep, and its writer. Only the process that holds the lock writes."""

    def __init__(self, store: Store, spec: str, overrides: Sequence[str], sweep: Sweep):
        self.store, self.spec, self._overrides, self.sweep = store, spec, [*overrides], sweep
        self._version = ABSENT

    def open(self, metric: str | None) -> bool:
        """Read the record, and return True if there is one, of this sweep. Writes nothing.

        `metric` is that of the command line. Raises `InvalidError` if the root holds anything else.
        """
        url = self.store.url
        content, self._version = self.store.read_versioned(SWEEP)
        try:
            known = read_sweep(self.store) if content else None
        except DamagedRecordError as error:
            raise InvalidError(f"--root: {error}; use another root, or restore it from a backup") from error
        if known is None:
            names = {*self.store.list_names("")}
            if OWNER in names:
                raise InvalidError(f"--root {url}: holds a run; use another root")
            if taken := sorted(names & {run.name for run in self.sweep.runs}):
                raise InvalidError(f"--root {url}: has {taken[0]}, but no {SWEEP}; use another root")
            return False
        new, differences = self.sweep, []
        if (known.name, known.digest) != (new.name, new.digest):
            differences.append(f"the spec {known.spec} with its --set had other values")
        differences += [
            f"{key} was {json.dumps(known.rule.get(key))}, is {json.dumps(new.rule.get(key))}"
            for key in dict.fromkeys([*known.rule, *new.rule])
            if known.rule.get(key) != new.rule.get(key)
        ]
        if metric is not None and known.metric != metric:
            differences.append(f"--metric was {known.metric}, is {metric}")
        if known.is_maximised != new.is_maximised:
            differences.append(f"--maximise was {'' if known.is_maximised else 'not '}given")
        if bool(known.ladder) != bool(new.ladder):
            differences.append(f"it is {'a' if known.ladder else 'no'} ladder")
        if differences:
            raise InvalidError(
                f"--root {url}: two sweeps in one root: {'; '.join(differences)}; use another root, or the command of "
                "that sweep"
            )
        self.sweep = known
        return True

    def write(self, sweep: Sweep) -> None:
        """Write the record. Raises `InvalidError` if another process has written it, or `OSError`."""
        try:
            self._version = self.store.write_if(SWEEP, sweep.encode(), self._version)
        except FileExistsError:
            raise InvalidError(
                f"{self.store.url}/{SWEEP}: another sweep has written it; only one may use a root at a time"
            ) from None
        self.sweep = sweep

    def add_run(self, run: SweepRun) -> None:
        """Record one more run."""
        self.write(replace(self.sweep, runs=(*self.sweep.runs, run)))

    @property
    def plain_name(self) -> str:
        """A plain name that belongs to this root alone."""
        return f"runner-sweep-{hashlib.sha256(self.store.url.encode()).hexdigest()[:16]}"

    @property
    def logs(self) -> Path:
        """Directory of the output of the runs: below the root, or of this machine if the root is in a bucket."""
        root = self.store.root
        return Path(tempfile.gettempdir(), f"{self.plain_name}.logs") if root is None else root / "logs"

    def open_run(self, name: str) -> Store:
        """Return the store of a run's directory."""
        return open_store(self.directory(name))

    def directory(self, name: str) -> str:
        """Return the directory of a run."""
        return f"{self.store.url}/{name}"

    def list_overrides(self, run: SweepRun) -> list[str]:
        """Return the overrides with which the spec is that of a run."""
        own = {**run.values, "name": f"{self.sweep.name}-{run.name}", "directory": self.directory(run.name)}
        return [*self._overrides, *format_overrides(own)]

    def is_done(self, run: SweepRun) -> bool:
        """Return True if a run has reached its end."""
        return read_progress(self.spec, self.list_overrides(run)).is_done

    def find_divergence(self, run: SweepRun) -> str | None:
        """Return the reason if the newest attempt of a run ended because training diverged, else None."""
        events = [row for row in read_log(self.open_run(run.name), "events") if row.get("event") in ("start", "failed")]
        last = events[-1] if events else {}
        return to_single_line(last.get("reason")) if last.get("diverged") is True else None

    def read_metric(self, run: SweepRun) -> float | None:
        """Return the metric of the newest row of a run that has it; None if none has."""
        with contextlib.suppress(FileNotFoundError):
            return read_last_metric(self.open_run(run.name), self.sweep.metric)
        return None


@contextlib.contextmanager
def lock_root(record: SweepRecord) -> Iterator[None]:
    """Hold the lock of a root. It ends with the process, by kill -9 too.

    In a bucket, and on a file system without locks, it covers the processes of this machine; another machine that
    writes `sweep.json` at the same time makes the next write fail. Raises `InvalidError` if a process holds it.
    """
    store, path = record.store, Path(tempfile.gettempdir(), f"{record.plain_name}.lock")
    if store.root is not None:
        store.root.mkdir(parents=True, exist_ok=True)
        path = store.root / _LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            try_lock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 20, 0).decode(errors="replace").strip()
            raise InvalidError(
                f"--root {store.url}: another sweep runs there (process id {holder or '?'}); wait for it, or stop it"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield
    finally:
        os.close(descriptor)
