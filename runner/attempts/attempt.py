"""`Attempt`: one start of a job on all its processes, in a directory that it has claimed.

It holds the services that every part of a running job needs, records the end of the attempt, and reports to the user.
`IncidentRecorder` stores the findings of the watchdog.
"""

import contextlib
import faulthandler
import socket
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner import console
from runner.attempts.clock_file import start_clock_file
from runner.attempts.ended import start_folding
from runner.attempts.environment import (
    collect_environment,
    collect_machines,
    collect_versions,
    compare_environments,
    describe_machine,
    probe_file_system,
    read_submit_time,
    validate_versions,
)
from runner.attempts.events import EventLog
from runner.attempts.fence import Fence, is_unstarted
from runner.attempts.layout import RESULT, Owner, digest_forecast, read_owner, replace_owner, write_owner
from runner.attempts.logs import open_log_file
from runner.attempts.membership import WaitingHosts
from runner.attempts.notify import Notifier
from runner.attempts.progress_file import ProgressFile
from runner.attempts.take_over import describe_running_attempt
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Progress
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Diagnosis, StragglerReport
from runner.errors import (
    EXIT_DONE,
    EXIT_PREEMPTED,
    DivergedError,
    FailedError,
    FencedError,
    InvalidError,
    PreemptedError,
    RemovedError,
    ResumeError,
    RetryableError,
    RunnerError,
    StorageError,
    format_error,
)
from runner.spec import Document, ExecutionSpec, Trajectory
from runner.storage import BackgroundWriter, JsonlLog, JsonObject, Store, encode_json, read_log

# A host may go on for so long with what an NFS has told it before: directories are cached for up to 60 s by default.
_SHARED_SECONDS = 70.0
_POLL_SECONDS = 0.2
_MAX_NAMED = 4  # processes in a message
DRAIN_SECONDS = 10.0  # for uploads and notifications, when the process ends


@dataclass(frozen=True)
class Attempt:
    """One start of a job, and the services of the running job. Made by `claim_attempt` on every process."""

    number: int  # number of the attempt, from 1; only the newest one may write
    run_id: str  # id of the run, the same for all attempts in one directory
    store: Store  # the run's directory
    hosts: Hosts  # this process and its peers
    stop: StopNotice  # stop request of this process
    progress: Progress  # phase and step of the training thread, for the watchdog
    fence: Fence  # single-writer rule of the directory
    events: EventLog  # event ledger
    background_writer: BackgroundWriter  # uploads files that grow in a bucket
    # Versions, commit and hosts, see `environment`; empty except on process 0.
    environment: JsonObject = field(default_factory=dict)
    # Engine and machine of each process, see `MACHINE_KEYS`; empty except on process 0.
    machines: JsonObject = field(default_factory=dict)
    # Checkpoint of another run with which this run began (`lineage` of a manifest); filled by the restore, and empty if
    # the run is no fork.
    lineage: JsonObject = field(default_factory=dict)
    # Notifications about the run; silent except on process 0.
    notifier: Notifier = field(default_factory=lambda: Notifier(None, {}))
    # Hosts that wait to join; None unless the job may grow by them, and on other processes than 0.
    waiting: WaitingHosts | None = None
    is_elastic: bool = False  # True if the job may run without some of its hosts

    def say(self, line: str) -> None:
        """Print a line. By default processes other than process 0 show only warnings, and log this line."""
        console.say(line)

    def record(self, event: str, step: int | None, **details: Any) -> None:
        """Write an event to the ledger, on process 0 only. Called on every process."""
        if self.hosts.is_main:
            self.events.append(event, step, **details)

    def start(self, name: str, **devices: Any) -> None:
        """Record and print that the run `name` starts on these devices."""
        began = self.progress.clock.began
        details = devices | read_submit_time() | self.environment | self.machines
        self.record("start", None, began=began, processes=self.hosts.num_processes, **details)
        self.say(f"{name}: attempt {self.number} in {self.store.url}")

    def stop_to_grow(self, step: int) -> None:
        """Request a stop if all hosts that are missing wait to join.

        Called after each start of a durable save; acts on process 0.
        """
        if self.waiting is not None and self.waiting.is_growth_due():
            self.record("grow", step, processes=self.waiting.num_missing)
            self.stop.request_stop("all missing hosts wait to join")

    def owns_directory(self) -> bool:
        """Return True if this attempt may write, as far as can be told without a network. Any thread."""
        try:
            self.fence.check_locally()
        except (FencedError, OSError):
            return False
        return True

    def find_fence_error(self) -> RunnerError | None:
        """Return the error to end with if this attempt may not write any more; else None. Any thread.

        Asks the store, which may raise `OSError`.
        """
        try:
            self.fence.check()
        except FencedError as error:
            self.progress.clock.attach_store(None)
            return self._explain_fence(error)
        return None

    def _explain_fence(self, error: FencedError) -> RunnerError:
        is_split = self.hosts.num_missing or self.hosts.liveness.find_disconnected()
        if self.is_elastic and is_split and not isinstance(error, RemovedError):
            # Hosts of the job that could not reach these ones continue. This group joins them at a later start.
            return RetryableError(f"{error}; its hosts go on without this one")
        return error

    def record_idle_exit(self, step: int) -> None:
        """Record a stop before the first step, which saves nothing. Any process, right before it ends."""
        self.events.append("preempt", step, saved=False)
        self.end(EXIT_PREEMPTED)

    def end(self, code: int) -> None:
        """Record the exit code of this process, and give uploads and notifications some seconds. Any thread."""
        self.progress.clock.end(code)
        if self.waiting is not None:
            self.waiting.close()
        # Uploads come first, because they contain the record of the end; notifications only refer to it.
        self.background_writer.drain(DRAIN_SECONDS)
        self.notifier.drain(DRAIN_SECONDS)

    @contextlib.contextmanager
    def record_outcome(self) -> Iterator[None]:
        """Record how the code inside the context ends, and the reason if it fails. Called on every process."""
        code = EXIT_DONE
        try:
            yield
        except FencedError as error:
            # The directory belongs to another attempt or is gone, so nothing may be written there, including the clock.
            self.progress.clock.attach_store(None)
            ending = self._explain_fence(error)
            code = ending.exit_code
            if ending is not error:
                raise ending from error
            raise
        except BaseException as error:
            code, reason = FailedError.exit_code, format_error(error)
            if isinstance(error, RunnerError):  # Its message is written for users and needs no type in front.
                code, reason = error.exit_code, str(error).split("\n", 1)[0][:500]
            if self.owns_directory():
                if not isinstance(error, PreemptedError):
                    kind = {"diverged": True} if isinstance(error, DivergedError) else {}
                    self.events.append("failed", self.progress.step, code=code, reason=reason, **kind)
                self.events.flush()
            raise
        finally:
            self.end(code)

    def finish(self, step: int, result: JsonObject, document: Document) -> None:
        """Write `result.json` on process 0 and wait for the others. Raises `FencedError` if the attempt is fenced."""
        if self.hosts.is_main:
            # A newer attempt may have claimed the directory since the last commit.
            self.fence.check()
            self.store.write(RESULT, encode_json(result))
        self.record("done", step, fingerprint=result["fingerprint"], spec=document.compute_digest())
        if self.hosts.is_main:
            self.events.flush()
        self.hosts.barrier()

    def report_moves(self, moves: Sequence[str], step: int) -> None:
        """Print and record that data or classes were moved or renamed since `step` was saved, without other changes."""
        if moves:
            self.say(f"moved since step {step} was saved, with the same content: {'; '.join(moves)}")
            self.record("moved", step, changes=list(moves))

    def report_spec_changes(self, changes: Sequence[str], step: int) -> None:
        """Print and record that keys of the spec have changed which take effect only after `step`."""
        if changes:
            self.say(f"changed in the spec from step {step} on: {'; '.join(changes)}")
            self.record("spec_changed", step, changes=list(changes))

    def update_owner(self, identity: Trajectory) -> None:
        """Give `job.json` the identity that the run has from now on. Process 0 only."""
        owner = read_owner(self.store)
        if owner is not None and owner.identity != identity:
            replace_owner(self.store, owner, identity)

    def report_environment_changes(self, saved_environment: JsonObject | None, step: int) -> None:
        """Print and record the differences from the environment in which `step` was saved.

        Bit-identical results are promised only for equal versions.
        """
        if not saved_environment or not self.environment:
            return
        changes = compare_environments(saved_environment, self.environment)
        if changes:
            self.say(f"changed since step {step} was saved: {'; '.join(changes)}")
            self.record("changed", step, changes=changes)


def claim_attempt(
    store: Store,
    document: Document,
    spec: ExecutionSpec,
    identity: Trajectory,
    hosts: Hosts,
    stop: StopNotice,
    progress: Progress,
    job_class: type,
    validate: Callable[[Owner], None],
    discard: Callable[[], None],
) -> Attempt:
    """Claim the next attempt in `store`, which fences every earlier attempt. Called on every process.

    The first attempt also writes the owner of the directory. `validate` raises `ResumeError` if another job owns it;
    this is checked a second time here, because another job may have begun in the directory during the set-up. `discard`
    removes the output outside of the directory of an attempt that did no work; it is called if the directory is free
    for this spec for that reason. The git commit of `job_class` is recorded.

    Raises `InvalidError`, on every process, if the directory cannot be written, or belongs to another job.
    """
    fence, background_writer = Fence(store), BackgroundWriter()

    def open_directory() -> str:
        # The first thing that is written there, before the claim ends another attempt.
        with translate_store_errors():
            missing = [] if store.root is None else probe_file_system(store.root).list_missing()
            if missing:
                console.say(f"{store.url}: its file system has no {', no '.join(missing)}; the run does without")
            return write_token(store, hosts)

    def claim_directory() -> list[Any]:
        with translate_store_errors():
            # Two first attempts may race: one of them writes the owner, and both read the same one back.
            with contextlib.suppress(FileExistsError):
                write_owner(store, Owner.create(spec.name, identity, digest_forecast(store)))
            owner = read_owner(store)
            if owner is None:
                raise StorageError(f"{store.url} does not give back what was written")
            validate(owner)
            is_replaced = owner.identity != identity and is_unstarted(store)
            if (other := describe_running_attempt(store)) is not None:
                console.say(f"takes over {store.url} from {other}")
            number = fence.claim()
            if is_replaced:
                # In this order, so that the directory is still free after a kill in between.
                discard()
                replace_owner(store, owner, identity)
            return [owner.id, number]

    @contextlib.contextmanager
    def translate_store_errors() -> Iterator[None]:
        try:
            yield
        except ResumeError:
            raise
        except InvalidError as error:
            raise document.error("directory", str(error)) from error
        except PermissionError as error:
            raise document.error("directory", f"cannot be written: {error}") from error
        except OSError as error:
            raise StorageError(f"{store.url} cannot be written: {error}") from error

    machines: list[JsonObject] = []  # on process 0

    def validate_places(places: list[Any]) -> None:
        validate_versions([(machine["host"], versions) for machine, versions in places])
        machines.extend(machine for machine, _ in places)

    hosts.reduce([describe_machine(), collect_versions()], validate_places)
    token = hosts.run_on_main(open_directory)
    with translate_store_errors():
        validate_shared(store, hosts, token, min(_SHARED_SECONDS, spec.deadlines.phase_seconds / 2))
    run_id, number = hosts.run_on_main(claim_directory)
    fence.join(number)
    # From here on this attempt owns the directory, and writes what it had to hold back: log lines, clock, events.
    open_log_file(store, run_id, number, hosts.process_id, background_writer)
    if hosts.is_main:
        start_clock_file(progress.clock, store, number, background_writer)
        start_folding(store, number)
    log = JsonlLog(store, "events", f"{number:06}.{hosts.process_id}", background_writer)
    payload = {"run": spec.name, "directory": store.url, "attempt": number}
    notifier = Notifier(spec.logging.notify if hosts.is_main else None, payload)
    notifier.report_frequent_preemption(lambda: read_log(store, "events"))
    is_elastic = spec.topology is not None and spec.topology.elastic
    readers = [notifier.on_event]
    if hosts.is_main:
        readers.append(ProgressFile(store, fence, is_elastic, background_writer).on_event)
    events = EventLog(log, number, hosts.process_id, readers)
    environment = collect_environment(job_class, [each["host"] for each in machines]) if hosts.is_main else {}
    waiting = None
    if hosts.is_main and hosts.num_missing and spec.topology is not None and spec.topology.grow == "at_save":
        waiting = WaitingHosts(store, hosts.num_missing)
    return Attempt(
        number,
        run_id,
        store,
        hosts,
        stop,
        progress,
        fence,
        events,
        background_writer,
        environment,
        collect_machines(machines) if hosts.is_main else {},
        notifier=notifier,
        waiting=waiting,
        is_elastic=is_elastic,
    )


def write_token(store: Store, hosts: Hosts) -> str:
    """Write the file for `validate_shared`, and return its name; empty if there is only one process. Process 0 only."""
    if hosts.num_processes == 1:
        return ""
    name = f".shared.{uuid.uuid4().hex}"
    store.write(name, name.encode())
    return name


def validate_shared(store: Store, hosts: Hosts, token: str, seconds: float) -> None:
    """Raise `InvalidError` on every process if one of them does not see what process 0 has written.

    Hosts that have other directories under the same name would wait for each other at the first save, or commit
    checkpoints that lack their parts. Called on every process. Each makes one listing and one read; where it sees
    nothing, it looks again for so many seconds. The file is removed.
    """
    if hosts.num_processes == 1:
        return
    try:
        hosts.reduce([find_sharing_problem(store, token, seconds), socket.gethostname(), store.url], _validate_sharing)
    finally:
        if hosts.is_main:
            with contextlib.suppress(OSError):  # a file that stays does no harm
                store.remove(token)


def _validate_sharing(places: Sequence[tuple[str | None, str, str]]) -> None:
    blind = [(process, *place) for process, place in enumerate(places) if place[0] is not None]
    if blind:
        named = ", ".join(
            f"process {process} (host {host}, {url}: {problem})" for process, problem, host, url in blind[:_MAX_NAMED]
        )
        more = f" and {len(blind) - _MAX_NAMED} others" if len(blind) > _MAX_NAMED else ""
        _, host, url = places[0]
        raise InvalidError(
            f"{named}{more} cannot see what process 0 (host {host}) writes into {url}; give all hosts of the job one "
            "shared disk or bucket, under the same path"
        )


def find_sharing_problem(store: Store, token: str, seconds: float) -> str | None:
    """Return None as soon as the file is there, the reason if it is not within so many seconds."""
    started = time.monotonic()
    while True:
        try:
            # A listing makes a client of NFS ask the server again, where its cache may answer for a name alone.
            is_there = token in store.list_names("") and store.read(token) == token.encode()
            problem = None if is_there else "nothing is there"
        except OSError as error:
            problem = format_error(error)
        if problem is None or time.monotonic() - started > seconds:
            return problem
        time.sleep(_POLL_SECONDS)


class IncidentRecorder:
    """Callbacks of the watchdog, called on the watchdog's threads."""

    def __init__(self) -> None:
        self.attempt: Attempt | None = None  # until the directory is claimed; nothing is written there before

    def on_diagnosis(self, diagnosis: Diagnosis, is_recorder: bool) -> tuple[str, int] | None:
        """Record why the job is stalled, with the stacks of all threads. Any process, right before it ends.

        Only a recorder writes to the directory. Returns the line and exit code to end with if a newer attempt owns the
        directory or it is gone; else None.
        """
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            stacks = f"{diagnosis.line}\n\n{file.read().decode(errors='replace')}"
        attempt = self.attempt
        try:
            ending = None if attempt is None else attempt.find_fence_error()
        except OSError:
            attempt = ending = None
        if ending is not None:
            return str(ending), ending.exit_code
        if attempt is None:
            console.warn(stacks)
            return None
        if is_recorder:
            # The event comes first, because it is small, and the hang may be that of the directory.
            details = {"reason": diagnosis.line, "lost": list(diagnosis.lost), "late": list(diagnosis.late)}
            attempt.events.append("stuck", attempt.progress.step, **details)
            try:
                attempt.store.write(f"stacks/{attempt.number:06}.{attempt.hosts.process_id}.txt", stacks.encode())
            except OSError as error:  # a full disk; the end of the attempt is recorded nevertheless
                console.warn(f"the stacks of this process cannot be written ({error})")
        assert diagnosis.code is not None, "it is no warning"
        attempt.end(diagnosis.code)
        return None

    def on_progress(self, step: int) -> None:
        """Record the last completed step, so that the cost of a kill can be computed. Process 0 only."""
        # A newer attempt may have claimed the directory since.
        if self.attempt is not None and self.attempt.owns_directory():
            self.attempt.events.append("progress", step)

    def on_straggler(self, report: StragglerReport) -> None:
        """Record and print which processes straggle. Process 0 only."""
        if self.attempt is not None:
            self.attempt.events.append(
                "straggler", report.step, late=report.processes, after_seconds=report.after_seconds
            )
        arrivals = ", ".join(
            f"process {process} reached step {report.step} {report.after_seconds[process]:.2f} s after the first"
            for process in report.processes
        )
        console.warn(f"straggler: {arrivals}" if arrivals else "straggler: all processes are on time again")
