"""Policy: when to save, which checkpoints to keep, and which parts of ended runs to delete from the fast tier.

Saves are due by steps, by minutes, or at the interval that loses the least time, and at the steps that are kept
forever. Retention decides by step number, never by time and never by the order of a listing, so every listing gives the
same answer. Both decisions are pure functions of their arguments; the clock is an argument too.
"""

import contextlib
import enum
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Self

from runner.checkpoint.fast_tier import COPIES
from runner.checkpoint.manifest import CHECKPOINTS, Manifest, is_committed, read_committed, remove_files, uncommit
from runner.console import say, warn
from runner.errors import ResumeError, RunnerError
from runner.process import read_creation_ticks, read_machine_id
from runner.run.attempt import Attempt
from runner.run.layout import read_owner, read_result
from runner.spec import CheckpointConfig
from runner.storage import (
    DeadlineError,
    Key,
    LocalStore,
    Store,
    encode_json,
    make_store,
    parse_json,
    parse_number,
    read_json,
    validate_record,
)

# When to save.


def is_due(step: int, every_steps: int | None, last_step: int | None = None) -> bool:
    """Return True if work that is due every `every_steps` steps is due at `step`: always at `last_step`, never at 0."""
    if step <= 0:
        return False
    if step == last_step:
        return True
    return every_steps is not None and step % every_steps == 0


def is_overdue(now_seconds: float, since_seconds: float, every_minutes: float | None) -> bool:
    """Return True if `every_minutes` have passed since `since_seconds`."""
    return every_minutes is not None and now_seconds - since_seconds >= every_minutes * 60


class SaveKind(enum.Enum):
    """Destination of a save. A step that is saved goes into the fast tier too, if there is one."""

    FAST = "fast"  # into the fast tier alone
    DURABLE = "durable"  # into the run's directory; in a bucket left out while an earlier save is in progress
    REQUIRED = "required"  # into the run's directory, even if training must wait


def compute_best_interval_seconds(
    stall_seconds: float, durable_seconds: float, mean_time_between_failures_hours: float
) -> float:
    """Return the seconds between saves that lose the least time: sqrt(2 x stall x mean time between failures).

    Young, "A first order approximation to the optimum checkpoint interval" (1974); Daly (2006) refines it where the
    stall is not small against the interval.

    Args:
        stall_seconds: time that a save stops training.
        durable_seconds: time until a save is durable. The interval is never shorter: the next save could not begin.
        mean_time_between_failures_hours: as the spec estimates it.
    """
    least_loss_seconds = math.sqrt(2 * stall_seconds * mean_time_between_failures_hours * 3600)
    return max(least_loss_seconds, durable_seconds, 1.0)


class SavePolicy:
    """Decision at each step whether a save is due, by `checkpoint` of the spec. Called on every host.

    Args:
        config: the spec's `checkpoint`.
        logging_every_steps: steps between two checks of `every_minutes`.
        decide: broadcasts process 0's argument to every host, because clocks differ between hosts.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        logging_every_steps: int,
        decide: Callable[[bool], bool],
        clock: Callable[[], float] = time.monotonic,
    ):
        self._config, self._logging_every_steps = config, logging_every_steps
        self._decide, self._clock = decide, clock
        self._last_save_seconds = clock()

    def record_save(self) -> None:
        """Restart the interval: a durable save has begun, or a state was restored."""
        self._last_save_seconds = self._clock()

    def find_due_save(self, step: int, last_step: int, interval_seconds: float) -> SaveKind | None:
        """Return the kind of save that is due at `step`, None if none is. The same on every host.

        Args:
            step: the current step.
            last_step: the step at which the job ends.
            interval_seconds: interval of `every: auto`; used only with it.
        """
        config = self._config
        if is_due(step, config.every_steps if config.every is None else None, last_step):
            return SaveKind.REQUIRED if step == last_step else SaveKind.DURABLE
        # A step to keep forever must be saved, whatever the other intervals are.
        if is_due(step, config.keep_every_steps):
            return SaveKind.DURABLE
        every_minutes = config.every_minutes if config.every is None else interval_seconds / 60
        # `decide` is a collective, so every host must reach it: the conditions before it are equal on all hosts.
        if (
            every_minutes is not None
            and is_due(step, self._logging_every_steps)
            and self._decide(is_overdue(self._clock(), self._last_save_seconds, every_minutes))
        ):
            return SaveKind.DURABLE
        return SaveKind.FAST if is_due(step, config.local_every_steps) else None


# Retention.

Mode = Literal["min", "max"]


def find_superfluous_steps(
    metrics: Mapping[int, float | None],
    keep_last: int,
    keep_every_steps: int | None = None,
    best: Mode | None = None,
    roll_back_to: int | None = None,
    read_back: Collection[int] = (),
) -> list[int]:
    """Return the committed steps to delete, ascending.

    Args:
        metrics: the value that `best` compares, for each committed step.
        keep_last: number of newest steps to keep.
        keep_every_steps: multiples of this are kept.
        best: keep the step with the best value too; of equal values the older step.
        roll_back_to: keep the newest step up to this one too.
        read_back: steps of which every byte was read back before the commit; the newest of them is kept.
    """
    steps = sorted(metrics)
    kept = set(steps[-keep_last:])
    if keep_every_steps is not None:
        kept |= {step for step in steps if step % keep_every_steps == 0}
    if best is not None:
        kept |= {step for step in [find_best_step(metrics, best)] if step is not None}
    if roll_back_to is not None:
        kept |= set([step for step in steps if step <= roll_back_to][-1:])
    kept |= set([step for step in steps if step in read_back][-1:])
    return [step for step in steps if step not in kept]


METRIC = "metric.json"  # beside a manifest without a metric: what was measured after its commit

METRIC_KEYS = (
    Key("metric", float, "Value that `checkpoint.keep_best` compares."),
    Key("end", bool, "True if the step has it only because the run ended there."),
)


class StepMetric(NamedTuple):
    """Value that `checkpoint.keep_best` compares, of one step.

    Attributes:
        at_end: value of the step if the run ends there, or has not gone on yet.
        before_end: value of the step of a longer run: none if it was evaluated only because the run ended there.
    """

    at_end: float | None
    before_end: float | None


def get_step_metric(manifest: Manifest) -> StepMetric:
    """Return the value with which a step was committed."""
    carry = manifest.carry or {}
    return StepMetric(manifest.metric, carry.get("metric") if "end" in carry else manifest.metric)


def read_step_metric(store: Store, manifest: Manifest) -> StepMetric:
    """Return the value of a committed step, which may have been measured after its commit."""
    if manifest.metric is not None:
        return get_step_metric(manifest)
    try:
        record = read_json(store, f"{CHECKPOINTS}/{manifest.name}/{METRIC}")
        validate_record(record, METRIC_KEYS, [key.name for key in METRIC_KEYS])
    except (FileNotFoundError, ValueError):  # none was measured, or the file is damaged
        return StepMetric(None, None)
    metric = float(record["metric"])
    return StepMetric(metric, None if record["end"] else metric)


def read_metrics(store: Store) -> dict[int, float | None]:
    """Return the value that `checkpoint.keep_best` compares, by committed step."""
    return select_metrics({step: read_step_metric(store, each) for step, each in read_committed(store).items()})


def select_metrics(steps: Mapping[int, StepMetric]) -> dict[int, float | None]:
    """Return the value to compare for each step, by whether the run has gone on behind it."""
    newest = max(steps, default=0)
    return {step: metric.at_end if step == newest else metric.before_end for step, metric in steps.items()}


def find_best_step(metrics: Mapping[int, float | None], mode: Mode) -> int | None:
    """Return the step with the best value, of equal values the older step; None if no step has a value."""
    measured = {step: value for step, value in sorted(metrics.items()) if value is not None and value == value}
    choose = min if mode == "min" else max
    return choose(measured, key=lambda step: measured[step]) if measured else None


def delete_step(attempt: Attempt, step: int) -> None:
    """Delete one committed step. Process 0 only. Raises `FencedError` or `OSError`."""
    attempt.fence.check()
    directory = f"{CHECKPOINTS}/{step}"
    # The manifest goes first: a kill in between leaves a directory that is not taken for a checkpoint.
    uncommit(attempt.store, directory, attempt.number)
    remove_files(attempt.store, directory)


class _CommittedStep(NamedTuple):
    """Values of a step by which it is kept or deleted."""

    metric: StepMetric
    roll_back_to: int | None
    read_back: bool


class Retention:
    """Committed steps of a run, and the rule by which they are kept. Process 0 only, one thread at a time."""

    def __init__(self, attempt: Attempt, keep_last: int, keep_every_steps: int | None = None, best: Mode | None = None):
        self._attempt = attempt
        self._rule = (keep_last, keep_every_steps, best)
        self._steps: dict[int, _CommittedStep] = {}
        self._undeleted: list[int] = []  # steps that could not be deleted, the one to try next first

    def scan(self) -> None:
        """Read which steps are committed, and delete what an attempt that was killed should have deleted."""
        store, self._steps = self._attempt.store, {}
        for step, manifest in read_committed(store).items():
            # Without a rule for the best step no value matters, and each is a file of its own.
            metric = get_step_metric(manifest) if self._rule[2] is None else read_step_metric(store, manifest)
            self._steps[step] = _CommittedStep(metric, manifest.roll_back_to, manifest.read_back)
        self._undeleted = []
        if self._steps and isinstance(store, LocalStore):
            # An attempt that was killed right after it created a manifest has not flushed its name.
            store.flush_names(f"{CHECKPOINTS}/{max(self._steps)}")
        self._prune()

    def add(self, manifest: Manifest) -> None:
        """Add a step that has just been committed, and delete the steps that it makes superfluous."""
        # A step that has just been committed has no value that was measured later.
        self._steps[manifest.step] = _CommittedStep(
            get_step_metric(manifest), manifest.roll_back_to, manifest.read_back
        )
        self._prune()

    def add_metric(self, step: int, metric: float, *, is_end: bool) -> None:
        """Add the value of a step that was evaluated after its commit; `is_end` if only because the run ends there."""
        known = self._steps.get(step)
        if known is not None and known.metric.at_end is None:
            self._attempt.fence.check()
            record = {"metric": metric, "end": is_end}
            self._attempt.store.write(f"{CHECKPOINTS}/{step}/{METRIC}", encode_json(record))
            self._steps[step] = known._replace(metric=StepMetric(metric, None if is_end else metric))

    def forget_after(self, step: int) -> list[int]:
        """Forget the steps beyond `step`, which is loaded again, and return them."""
        later = sorted(other for other in [*self._steps, *self._undeleted] if other > step)
        self._steps = {other: committed for other, committed in self._steps.items() if other <= step}
        self._undeleted = [other for other in self._undeleted if other <= step]
        # Of a step that could not be deleted there may be no manifest any more, and so no checkpoint.
        return [other for other in later if is_committed(self._attempt.store, str(other))]

    def _prune(self) -> None:
        metrics = select_metrics({step: committed.metric for step, committed in self._steps.items()})
        # A spike that is running may still be rolled back, as the newest state knows.
        roll_back_to = self._steps[max(self._steps)].roll_back_to if self._steps else None
        read_back = {step for step, committed in self._steps.items() if committed.read_back}
        # Steps that could not be deleted count for no rule, since their manifests may be gone. One of them is tried
        # again at each save, so that a save has a bounded amount of work, and all of them at the next start.
        superfluous = find_superfluous_steps(metrics, *self._rule, roll_back_to, read_back)
        for step in [*self._undeleted[:1], *superfluous]:
            is_known = step in self._undeleted
            try:
                delete_step(self._attempt, step)
            except DeadlineError as error:
                # The whole store does not answer, so the other steps would take as long.
                warn(f"checkpoint {step} cannot be deleted, will be tried again: {error}")
                return
            except OSError as error:
                if is_known:
                    self._undeleted.remove(step)
                else:
                    warn(f"checkpoint {step} cannot be deleted and stays, will be tried again: {error}")
                    del self._steps[step]
                self._undeleted.append(step)
                continue
            if is_known:
                self._undeleted.remove(step)
            else:
                del self._steps[step]


# Which parts of other runs to delete from the disk of a host.


_RUN_FILE = "run.json"
_REMOVED_SUFFIX = ".removed"  # of a run's name here while its parts are being deleted
_RUN_NAME = re.compile(rf"[0-9a-f]{{12}}({re.escape(_REMOVED_SUFFIX)})?")
_MAX_RUNS = 100  # that a start looks at
_MAX_SIBLINGS = 1000  # among which a renamed run is looked for
_LOOK_SECONDS = 20.0  # for which a start waits; the directories of other runs may hang
_QUIET_SECONDS = 3600.0
_RUN_KEYS = (
    Key("directory", str, "Path or URL of the run's directory."),
    Key("ancestors", dict, "Inode of each directory above, by path, that is on the disk of the run's directory."),
    Key("id", str, "Id of the run."),
    Key("machine", str, "Boot and process numbering of the machine; empty if the system does not tell."),
    Key("process", int, "Id of the process."),
    Key("created", int | None, "When it was created, in ticks since boot."),
)


@dataclass(frozen=True)
class RunFile:
    """Content of `run.json` in the fast tier of a process; the fields are `_RUN_KEYS`."""

    directory: str
    ancestors: Mapping[str, int]
    id: str
    machine: str
    process: int
    created: int | None

    @classmethod
    def create(cls, store: Store, run_id: str) -> Self:
        """Return the record of this process. Raises `OSError`."""
        ancestors = {}
        if store.root is not None:
            device = store.root.stat().st_dev
            found = {str(each): each.stat() for each in store.root.parents}
            # What is above the mount point tells nothing of the disk.
            ancestors = {path: status.st_ino for path, status in found.items() if status.st_dev == device}
        process = os.getpid()
        return cls(store.url, ancestors, run_id, read_machine_id(), process, read_creation_ticks(process))

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Return the record in the fast tier of a process. Raises `OSError` or `ValueError`."""
        record = parse_json(LocalStore(directory).read(_RUN_FILE))
        validate_record(record, _RUN_KEYS, [key.name for key in _RUN_KEYS])
        return cls(**{key.name: record[key.name] for key in _RUN_KEYS})

    def is_quiet(self, directory: Path) -> bool:
        """Return True if the process has ended; where that cannot be told, if it has written nothing lately."""
        if self.machine and self.machine == read_machine_id():
            return self.created != read_creation_ticks(self.process)
        times = [entry.stat().st_mtime for entry in os.scandir(directory)]
        return time.time() - max(times, default=0.0) >= _QUIET_SECONDS


class OtherRun:
    """Fast tiers of another run on this host, and the decision whether it can ever resume from them.

    It cannot in two cases:

    - The run is done: it has a `result.json`, and no part is of a later step, as those of a run that was extended are.
    - The run was deleted: its directory is missing, or belongs to another run. A disk that is not mounted now looks
      alike, so the nearest directory above that exists must be one of the run's own disk, by its inode. A run that was
      renamed is found below that directory by the id in its `job.json`.

    What cannot be decided is kept: directories that cannot be read, and parts without `run.json`. A run is also kept
    while one of its processes lives on this machine, or, where this cannot be told, for `_QUIET_SECONDS`.
    """

    def __init__(self, path: Path):
        self.path, self.run_id = path, path.name

    def find_end(self) -> str | None:
        """Return why no process of the run will ever read its parts here, or None if one may.

        Raises:
            OSError, ValueError, RunnerError: this cannot be told.
        """
        processes = [each for each in self.path.iterdir() if parse_number(each.name) is not None]
        records = {each: RunFile.read(each) for each in processes}
        if not records or not all(
            record.id == self.run_id and record.is_quiet(each) for each, record in records.items()
        ):
            return None
        places = [place for each in processes for place in (each, *(each / COPIES).glob("*")) if place.is_dir()]
        steps = [step for place in places for path in place.iterdir() if (step := parse_number(path.name)) is not None]
        # The processes may have begun at different times, with the run in different places.
        ends = [
            self.find_end_in(make_store(directory), ancestors, max(steps, default=0))
            for directory, ancestors in {record.directory: record.ancestors for record in records.values()}.items()
        ]
        return None if None in ends else ends[0]

    def find_end_in(self, store: Store, ancestors: Mapping[str, int], last_step: int) -> str | None:
        """Return what `find_end` does, for one place of the run's directory."""
        owner = read_owner(store)
        if owner is not None and owner.id == self.run_id:
            result = read_result(store)
            return None if result is None or last_step > result.step else f"the run in {store.url} is done"
        deleted = f"the run in {store.url} was deleted"
        if store.root is None:
            return deleted if owner is not None or not store.list_names("") else None
        if owner is None and os.path.lexists(store.root):  # it may be about to be filled again
            return None
        nearest = next(each for each in store.root.parents if os.path.lexists(each))
        if ancestors.get(str(nearest)) != nearest.stat().st_ino:
            return None
        return None if self.may_be_below(nearest, len(store.root.relative_to(nearest).parts)) else deleted

    def may_be_below(self, top: Path, depth: int) -> bool:
        """Return True if the run is at this depth below a directory, or if there are too many directories to tell."""
        tops, num_seen = [top], 0
        for _ in range(depth):
            below: list[Path] = []
            for each in tops:
                with contextlib.suppress(PermissionError):  # of another user, as the run is not
                    below += [Path(entry) for entry in os.scandir(each) if entry.is_dir()]
                if num_seen + len(below) > _MAX_SIBLINGS:
                    return True
            tops, num_seen = below, num_seen + len(below)
        for each in tops:
            with contextlib.suppress(PermissionError, ResumeError):  # no run can continue there
                owner = read_owner(LocalStore(each))
                if owner is not None and owner.id == self.run_id:
                    return True
        return False


def write_run_file(directory: Path, store: Store, run_id: str) -> None:
    """Name the run and this process in the fast tier of this process. Raises `OSError`."""
    LocalStore(directory).write(_RUN_FILE, encode_json(asdict(RunFile.create(store, run_id))))


def remove_parts(directory: Path) -> None:
    """Delete the fast tier of this process, whose run is done. What cannot be deleted is left for other runs."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()  # by the last process of this host


def remove_ended_runs(local_directory: Path, own_id: str) -> None:
    """Delete the parts of other runs that can never resume from them. Called at the start, on every process.

    Waits for `_LOOK_SECONDS` at most; the rest is done in the background. Never raises, because a run must not depend
    on others.
    """

    def work() -> None:
        with contextlib.suppress(OSError):
            names = sorted(name for name in os.listdir(local_directory) if _RUN_NAME.fullmatch(name))
            for path in [local_directory / name for name in names if name != own_id][:_MAX_RUNS]:
                # Another process may do the same now, and the directories of other runs may be in any state.
                with contextlib.suppress(OSError, ValueError, RunnerError):
                    removed = path
                    if not path.name.endswith(_REMOVED_SUFFIX):
                        reason = OtherRun(path).find_end()
                        if reason is None:
                            continue
                        # Renamed first, so that a process which comes back meanwhile has an empty directory.
                        removed = path.rename(f"{path}{_REMOVED_SUFFIX}")
                        say(f"removed the parts of run {path.name} in {local_directory}: {reason}")
                    shutil.rmtree(removed, ignore_errors=True)

    thread = threading.Thread(target=work, name="ended runs", daemon=True)
    thread.start()
    thread.join(_LOOK_SECONDS)
