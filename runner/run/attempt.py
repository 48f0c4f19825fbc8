"""An attempt: one start of a job, on all its hosts, in a directory that is now its own.

How a job counts its steps: in whole numbers, never backwards, never beyond the end. Else nothing is committed.

What a job keeps beside its state, and tells at its end: nothing, unless its class has more to tell.

What one wants to know when a run has ended: lines for a person.

What the watchdog finds is kept where a person looks: in the ledger, beside it, or on the terminal.
"""

import contextlib
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner import console
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.distributed.heartbeat import StragglerReport
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import format_thread_stacks
from runner.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    FailedError,
    FencedError,
    InvalidError,
    MiscountError,
    PreemptedError,
    RunnerError,
    StorageError,
    format_error,
)
from runner.run import clock_file
from runner.run.environment import collect_environment, compare_environments, read_submit_time
from runner.run.events import EventLog
from runner.run.fence import Fence
from runner.run.layout import RESULT, Owner, read_owner, write_owner
from runner.run.logs import open_log_file
from runner.run.notifications import Notifier
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import BackgroundWriter, JsonObject, Store, encode_json, open_log, read_log

_LONGEST_VALUE = 60  # characters of what stands in a step's place


def validate_step(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """Raise `MiscountError` unless `step` may stand where `last_step` was completed before.

    It may stay where it is, also beyond the total: where a checkpoint is that was made for a larger one.
    """
    if type(step) is not int:
        value = " ".join(repr(step).split())[:_LONGEST_VALUE]
        problem = f"is {value}, of type {type(step).__name__}; needs to be a plain int, from self.step += 1"
    elif step < last_step:
        problem = f"went back to {step}; only load may set it back"
    elif step > max(total_steps, last_step):
        problem = f"is {step}, beyond the end"
    else:
        return
    raise MiscountError(f"{job}: step {problem} (last step {last_step}, total_steps {total_steps}); it is not saved")


def validate_end(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """As `validate_step`, and raise it unless the job has come to its end, now that `run` has returned."""
    validate_step(job, step, last_step, total_steps)
    if step < total_steps:
        raise MiscountError(
            f"{job}: run returned at step {step} of {total_steps}: the job is not done; run must go on to total_steps"
        )


class JobReport:
    """Nothing is kept. A trainer's `Report` has its rows."""

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Why the job cannot go on from a state of the fast tier that has these beside it; None if it can.

        Called on the main host only, while an older state can still be taken.
        """
        return None

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None) -> None:
        """The state of `step` is there, new or restored; `attachments` came with it from the fast tier.

        `carry` is that of the payload it was saved with.

        Called once, on every host, before the first step.
        """

    def result(self, step: int) -> JsonObject:
        """What `result.json` says besides step and fingerprint. Called at the end, on every host."""
        return {}

    def format_next_steps(self) -> Sequence[str]:
        """What one may want of the run now that it has ended: lines for a person, printed last."""
        return ()


def format_end_lines(directory: str, step: int) -> list[str]:
    """Where the files are, what a kill does, what the fingerprint is for. To be printed after `done at step ...`."""
    return [
        f"files: {directory} (result.json, spec.yaml, checkpoints/{step} ...)",
        "run the same command again: now it does nothing; after a kill, at any moment, it goes on from the last save",
        "fingerprint: of the state's every bit; killed or not, the same spec on the same hardware ends in the same one",
    ]


DRAIN_SECONDS = 10.0  # for what grows in a bucket, when the process ends


@dataclass(frozen=True)
class Attempt:
    """What every part of a running job needs of its attempt. Made by `claim_attempt`, on every host.

    Attributes:
        number: counted from 1; the newest alone may write.
        run_id: the same for all attempts in one directory.
        store: the run's directory.
        stop: whether the job was asked to stop.
        progress: of the training thread, for the watchdog.
        background_writer: sends what grows in a bucket.
        environment: versions, commit and hosts, see `environment`; empty on other hosts than the main one.
        alerts: calls who wants to hear of the run; nobody on other hosts than the main one.
    """

    number: int
    run_id: str
    store: Store
    hosts: Hosts
    stop: StopNotice
    progress: Progress
    fence: Fence
    events: EventLog
    background_writer: BackgroundWriter
    environment: JsonObject = field(default_factory=dict)
    alerts: Notifier = field(default_factory=lambda: Notifier(None, {}))

    def say(self, line: str) -> None:
        """Tell a line. By default other hosts than the main one show warnings alone, and only log it."""
        console.say(line)

    def record(self, event: str, step: int | None, **details: Any) -> None:
        """Put an event into the ledger, on the main host only."""
        if self.hosts.is_main:
            self.events.append(event, step, **details)

    def start(self, name: str, **devices: Any) -> None:
        """Tell, in the ledger and a line, that the job `name` begins on these devices."""
        began = self.progress.clock.began
        known = devices | read_submit_time() | self.environment
        self.record("start", None, began=began, processes=self.hosts.num_processes, **known)
        self.say(f"{name}: attempt {self.number} in {self.store.url}")

    def owns_directory(self) -> bool:
        """Whether this attempt may still write, as far as can be told without waiting for a network. Any thread."""
        try:
            self.fence.check_locally()
        except (FencedError, OSError):
            return False
        return True

    def record_idle_exit(self, step: int) -> None:
        """Tell that the job was asked to stop before it began, and so saves nothing. Any host, right before the end."""
        self.events.append("preempt", step, saved=False)
        self.end(EXIT_PREEMPTED)

    def end(self, code: int) -> None:
        """Keep the exit code that this process has come to, and give what is on its way some seconds. Any thread."""
        self.progress.clock.end(code)
        self.background_writer.drain(DRAIN_SECONDS)
        self.alerts.drain(DRAIN_SECONDS)

    @contextlib.contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Around all that the job does: however it ends is kept, and why, if it has failed. Called on every host."""
        code = EXIT_DONE
        try:
            yield
        except FencedError as error:
            self.progress.clock.attach_store(None)  # the directory is another's, or gone
            code = error.exit_code
            raise
        except BaseException as error:
            code = error.exit_code if isinstance(error, RunnerError) else FailedError.exit_code
            if not isinstance(error, PreemptedError) and self.owns_directory():
                self.events.append("failed", self.progress.step, code=code, reason=_reason(error))
            raise
        finally:
            self.end(code)

    def finish(self, step: int, result: JsonObject) -> None:
        """Write `result.json`, unless a newer attempt has taken the directory, and wait for the others."""
        if self.hosts.is_main:
            self.fence.check()
            self.store.write(RESULT, encode_json(result))
        self.record("done", step, fingerprint=result["fingerprint"])
        self.hosts.barrier()

    def print_end(self, name: str, step: int, fingerprint: str, next_steps: Sequence[str]) -> None:
        """Print what a person wants to know when the job `name` has ended; `next_steps` are those of its account."""
        self.say(f"{name}: done at step {step}, fingerprint {fingerprint}")
        for line in (*format_end_lines(self.store.url, step), *next_steps):
            self.say(line)

    def report_environment_changes(self, saved_with: JsonObject | None, step: int) -> None:
        """Tell, in a line and the ledger, what is not as it was when `step` was saved.

        Only the same versions promise the same bits.
        """
        found = compare_environments(saved_with, self.environment) if saved_with and self.environment else []
        if found:
            self.say(f"changed since step {step} was saved: {'; '.join(found)}")
            self.record("changed", step, changes=found)


def _reason(error: BaseException) -> str:
    """One line; a message of the runner's own is one for people."""
    return str(error).split("\n", 1)[0][:500] if isinstance(error, RunnerError) else format_error(error)


def claim_attempt(
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
        try:
            with contextlib.suppress(FileExistsError):
                write_owner(store, Owner.now(spec.name, identity))
            owner = read_owner(store)
            if owner is None:
                raise StorageError(f"{store.url} does not give back what was written")
            return [owner.id, fence.claim()]
        except InvalidError as error:
            raise document.error("directory", str(error)) from error
        except PermissionError as error:
            raise document.error("directory", f"cannot be written: {error}") from error
        except OSError as error:
            raise StorageError(f"{store.url} cannot be written: {error}") from error

    run_id, number = hosts.run_on_main(take)
    fence.attempt = number
    open_log_file(store, run_id, number, hosts.process_id, background)
    if hosts.is_main:
        clock_file.start_clock_file(progress.clock, store, number, background)
    log = open_log(store, "events", f"{number:06}.{hosts.process_id}", background)
    alerts = _alerts(spec, store, number, hosts)
    events = EventLog(log, number, hosts.process_id, alerts.on_event)
    names = hosts.gather(socket.gethostname())
    environment = collect_environment(job_class, names) if hosts.is_main else {}
    return Attempt(number, run_id, store, hosts, stop, progress, fence, events, background, environment, alerts)


def _alerts(spec: ExecutionSpec, store: Store, attempt: int, hosts: Hosts) -> Notifier:
    """Those of this attempt."""
    notify = spec.logging.notify if hosts.is_main else None
    alerts = Notifier(notify, {"run": spec.name, "directory": store.url, "attempt": attempt})
    alerts.report_frequent_preemption(lambda: read_log(store, "events"))
    return alerts


class IncidentRecorder:
    """Called by the watchdog, from its thread.

    Attributes:
        attempt: None until the directory is claimed: nothing is written there before.
    """

    def __init__(self) -> None:
        self.attempt: Attempt | None = None

    def on_verdict(self, verdict: str, code: int) -> None:
        """Keep what helps to understand why the job is stalled. Any host, right before the process ends."""
        stacks = f"{verdict}\n\n{format_thread_stacks()}"
        attempt = self._owner()
        if attempt is None:
            console.warn(stacks)
            return
        attempt.events.append("stuck", attempt.progress.step, reason=verdict)
        attempt.store.write(f"stacks/{attempt.number:06}.{attempt.hosts.process_id}.txt", stacks.encode())
        attempt.end(code)

    def on_progress(self, step: int) -> None:
        """How far this attempt has come, for those who ask what a kill has cost. Main host only."""
        attempt = self._owner()
        if attempt is not None:
            attempt.events.append("progress", step)

    def on_straggler(self, straggling: StragglerReport) -> None:
        """Which processes come late to their steps. Main host only."""
        late, step, after_seconds = straggling.processes, straggling.step, straggling.after_seconds
        if self.attempt is not None:
            self.attempt.events.append("straggler", step, late=late, after_seconds=after_seconds)
        after = ", ".join(
            f"process {process} came to step {step} {after_seconds[process]:.2f} s after the first" for process in late
        )
        console.warn(f"straggler: {after}" if after else "straggler: all processes are in time again")

    def _owner(self) -> Attempt | None:
        """The attempt, if it has claimed the directory and no newer one has since."""
        return self.attempt if self.attempt is not None and self.attempt.owns_directory() else None
