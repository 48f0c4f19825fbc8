"""Steps of a run, repeated in a scratch directory: its job goes on from one of its checkpoints, as at a restart.

The run is only read. The scratch directory gets what a restart needs: the owner, one checkpoint, the records of
roll-backs and of failed kernels. The job saves nothing there, and sends nothing to W&B or to a recipient of
notifications. Its hooks are called.
"""

import contextlib
import fcntl
import os
import random
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from runner.attempts.events import ROLL_BACK_FOLDER
from runner.attempts.layout import OWNER
from runner.checkpoint.inspect import SPEC, copy_checkpoint, read_document
from runner.checkpoint.manifest import CHECKPOINTS, Manifest, read_committed
from runner.console import format_duration, say, warn
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.distributed.preemption import StopNotice
from runner.errors import InvalidError
from runner.history.ledger import get_float, get_step
from runner.job import make_job, prepare_process
from runner.metrics.file import read_rows
from runner.metrics.rows import Row
from runner.spec import Document, Trust, parse_document, validate_spec
from runner.spec.document import dump_yaml, format_overrides
from runner.storage import STEP_MAX, JsonObject, LocalStore, Store, open_store, read_log
from runner.train.kernel_check import RECORD
from runner.trainer import BaseTrainer

_PREFIX, _LOCK = "runner-retrace-", ".lock"
# Values with which a job keeps its output in its directory; they change no bit.
QUIET = {
    "checkpoint.local_directory": None,
    "checkpoint.local_every_steps": None,
    "checkpoint.local_replicas": 0,
    "logging.wandb": "disabled",
    "logging.tensorboard": False,
    "logging.notify": None,
    "logging.profile": None,
}
_NO_SAVES = {
    "checkpoint.every_steps": STEP_MAX,
    "checkpoint.every_minutes": None,
    "checkpoint.every_epochs": None,
    "checkpoint.every": None,
}


@dataclass(frozen=True)
class RetraceRequest:
    """Request for the steps of a run from its newest checkpoint before `step`."""

    directory: str  # of the run, or its URL
    step: int  # last step that is wanted
    overrides: Sequence[str] = ()  # `KEY=VALUE` of keys that may have other values than in the run
    is_any_device: bool = False  # True: on all devices of this machine, whatever the run had
    trust: Sequence[str] = ()  # modules, see `runner.spec.Trust`
    newest_checkpoint: int = STEP_MAX  # newest one to begin from; 0: the beginning, where every key may differ
    code: str | None = None  # directory whose modules come before others in the process of the steps (`side`)


@dataclass
class Retracing:
    """Job of a run in a scratch directory, between two steps.

    Attributes:
        job: the job, with its state and the number of completed steps.
        run: directory of the run.
        manifests: manifests of the run by committed step.
        start: completed steps from which the steps are repeated.
    """

    job: BaseTrainer
    run: Store
    manifests: dict[int, Manifest]
    start: int
    _batches: Any = field(repr=False)

    @property
    def hardware(self) -> JsonObject:
        """Hardware of the run at `start`, or else at its first checkpoint; empty if it has none."""
        return {} if self._saved is None else self._saved.topology or {}

    @property
    def environment(self) -> JsonObject:
        """Versions and machines of the run at that time."""
        return {} if self._saved is None else self._saved.environment or {}

    @property
    def _saved(self) -> Manifest | None:
        return self.manifests.get(self.start) or self.manifests.get(min(self.manifests, default=-1))

    def load_arrays(self, step: int) -> dict[str, np.ndarray]:
        """Return the examples of the batch after `step` completed steps, in order: (N, ...) by field."""
        batch = self.job.batch(step=step)
        return {name: np.asarray(values).reshape(-1, *values.shape[2:]) for name, values in batch.items()}

    def advance(self) -> None:
        """Make the next step, with its row and the calls of hooks."""
        job, session = self.job, self.job.session
        session.enter_stage(job.step)
        batch, has_target = next(self._batches.seek(job.step))
        job.state, loss, meta = session.make_step(job.state, batch, has_target, job.train_setup.key)
        job.step += 1
        session.add_step(job.step, loss, meta)
        job.attempt.progress.report_step(job.step)
        session.write_row()

    def advance_to(self, step: int) -> None:
        """Make all steps up to `step`."""
        while self.job.step < step:
            self.advance()

    def read_rows(self) -> list[Row]:
        """Return the rows of the steps that were repeated."""
        self.job.session.report.sync()
        return read_rows(self.job.store)


def open_job(directory: str, trust: Sequence[str]) -> BaseTrainer:
    """Return the job of a run by its directory or URL, to be read and not to be run.

    Texts that the run has tokenised are replaced by its corpora. `trust` is as in `RetraceRequest`. Raises
    `InvalidError` if there is no run of a trainer.
    """
    store = open_store(directory)
    document = read_document(store, Trust(tuple(trust)))
    # The directory may have been copied or moved since the run began.
    document = replace(document, data=document.data | {"directory": directory})
    job = make_job(document, validate_spec(document))
    if not isinstance(job, BaseTrainer):
        raise InvalidError(f"{store.url}: its job {job.spec.job} is no trainer; needs a run of a BaseTrainer")
    return job


def validate_step(run: Store, step: int, newest: int) -> None:
    """Raise `InvalidError` if a run, which has made `newest` steps, has not made this one."""
    if not 0 < step <= newest:
        reason = "has not made a step yet" if not newest else f"has made the steps 1 to {newest}"
        raise InvalidError(f"{run.url}: --step {step}: the run {reason}")


def choose_checkpoint(run: Store) -> int:
    """Return the step of a random checkpoint, of several not the first. Raises `InvalidError` if there is none."""
    steps = [step for step in sorted(read_committed(run)) if step]
    if not steps:
        raise InvalidError(f"{run.url}: no checkpoint is here")
    return random.choice(steps[1:] or steps)


def make_document(
    text: str, name: str, values: Mapping[str, Any], overrides: Sequence[str], is_any_device: bool, trust: Trust
) -> Document:
    """Return the document of a run's spec with the overrides of a user, and with `values`, which take precedence.

    `name` is that of the file in messages, and `is_any_device` as in `RetraceRequest`.
    """
    given = [*(["topology={}"] if is_any_device else []), *overrides, *format_overrides(values)]
    return replace(parse_document(text, name, given), trust=trust)


def _describe_way(run: Store, start: int, step: int) -> str:
    """Return how many steps of a run lead from a checkpoint to a step, and how long they took in the run."""
    times = [
        (row["step"], seconds)
        for row in read_rows(run)
        if (seconds := get_float(row, "perf/step_seconds_median")) is not None
    ]
    # Steps of other stages may take another time.
    near = [seconds for each, seconds in times if start < each <= step] or [seconds for _, seconds in times]
    count = step - start
    where = f"checkpoint {start}" if start else "the beginning"
    took = f", about {format_duration(count * statistics.median(near))} by the step time of the run" if near else ""
    return f"{count} step{'s' * (count != 1)} from {where}{took}"


def _copy_past(run: Store, steps: Sequence[int], is_new: bool, scratch: LocalStore) -> int | None:
    """Copy what a restart needs, with the newest good checkpoint of these ascending `steps`, and return its step.

    None if there is no such checkpoint.

    If `is_new`, the owner is left out, which has the values of keys that stay: another run may begin there.
    """
    names = [
        *([] if is_new else [OWNER]),
        RECORD,
        *(f"{ROLL_BACK_FOLDER}/{name}" for name in run.list_sizes(ROLL_BACK_FOLDER)),
    ]
    for name in names:
        with contextlib.suppress(FileNotFoundError):
            scratch.write(name, run.read(name))
    for step in reversed(steps):
        try:
            copy_checkpoint(run, str(step), scratch)
            return step
        except (InvalidError, FileNotFoundError) as error:
            warn(f"checkpoint {step} cannot be used, an older one is: {error}")
            scratch.remove_tree(f"{CHECKPOINTS}/{step}")
    return None


def _find_first_step(run: Store) -> int:
    """Return the step at which a run began: that of its fork, or 0."""
    events = (get_step(event) for event in read_log(run, "events") if event.get("event") == "fork")
    return next((step for step in events if step is not None), 0)


@contextlib.contextmanager
def scratch_directory() -> Iterator[Path]:
    """Yield a directory that exists as long as the context, and remove those of processes that were killed."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        # The lock of a process ends with it. Others may have made what is there, such as a pipe.
        with contextlib.suppress(OSError):
            lock = os.open(left / _LOCK, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if left.stat().st_uid == os.getuid():
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as directory, (Path(directory) / _LOCK).open("wb") as own:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(own, fcntl.LOCK_EX)
        yield Path(directory) / "run"


def _explain_refusal(
    error: InvalidError, request: RetraceRequest, run: Store, scratch: LocalStore, oldest: int | None
) -> InvalidError:
    """Return the error for a job that cannot begin in a scratch directory, with what helps."""
    # What is advised about a directory does not help here.
    head, found, _ = str(error).partition(f"\n  {scratch.url}: ")
    if found:
        return InvalidError(f"{head}\n  {run.url}: is repeated as it was, so this key stays")
    if "topology" in head and not request.is_any_device:
        return InvalidError(f"{head}\n--any-device uses the devices of this machine instead")
    if oldest is None:
        return error
    nearest = f"step {oldest + 1} is the nearest that can be computed again, {_describe_way(run, oldest, oldest + 1)}"
    return InvalidError(f"{head}\n{run.url}: no checkpoint before step {request.step} is left; {nearest}")


@contextlib.contextmanager
def retrace(request: RetraceRequest) -> Iterator[Retracing]:
    """Set up the job of a run at its newest good checkpoint before a step, and remove the scratch directory at the end.

    Raises:
        InvalidError: there is no run of a trainer, or it cannot go on here.
    """
    document = open_job(request.directory, request.trust).document
    run = open_store(request.directory)
    manifests = read_committed(run)
    with scratch_directory() as directory:
        scratch = LocalStore(directory)
        newest = min(request.step - 1, request.newest_checkpoint)
        usable = sorted(step for step in manifests if step <= newest)
        copied = _copy_past(run, usable, request.newest_checkpoint == 0, scratch)
        start = _find_first_step(run) if copied is None else copied
        if start < request.step:
            say(f"{run.url}: to step {request.step}: {_describe_way(run, start, request.step)}")
        made = make_document(
            dump_yaml(document.data),
            f"{run.url}/{SPEC}",
            QUIET | _NO_SAVES | {"directory": str(directory)},
            request.overrides,
            request.is_any_device,
            Trust(tuple(request.trust)),
        )
        job = make_job(made, validate_spec(made))
        assert isinstance(job, BaseTrainer), "the class is that of the run"
        prepare_process(job)
        # The oldest checkpoint, if the beginning of the run is needed.
        oldest = min(manifests, default=None) if copied is None else None
        try:
            attempt = job.lifecycle.claim(Hosts.single_process(), StopNotice(), Progress())
        except InvalidError as error:
            raise _explain_refusal(error, request, run, scratch, oldest) from error
        with attempt.record_outcome():
            try:
                job.lifecycle.prepare_and_restore()
            except InvalidError as error:
                raise _explain_refusal(error, request, run, scratch, oldest) from error
            if job.step >= request.step:
                parent = job.lineage.get("run", "another run")
                raise InvalidError(
                    f"{run.url}: was forked from {parent} at step {job.step}; that run has made step {request.step}"
                )
            with job.session.open() as batches:
                yield Retracing(job, run, manifests, job.step, batches)
            job.checkpointer.close()
