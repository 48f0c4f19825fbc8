"""Lifecycle of a job: check, claim the directory, restore or initialise the state, run, save the last state.

The order of `Lifecycle.run` is that of every job; it knows nothing of training. Every method is called on every host,
unless its docstring says process 0 only.
"""

import contextlib
import copy
import dataclasses
import functools
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import jax

from runner.attempts.attempt import DRAIN_SECONDS, Attempt, IncidentRecorder, claim_attempt
from runner.attempts.fence import Advice, RunIdentity, validate_directory, validate_owner
from runner.attempts.layout import RESULT, read_result
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.fork import (
    open_parent,
    restore_fork,
    validate_fork,
    validate_lineage,
    validate_parent_files,
    validate_parent_place,
)
from runner.checkpoint.inspect import keeps_metric, read_document
from runner.checkpoint.leaves import validate_leaves, validate_memory
from runner.checkpoint.manifest import Manifest, read_newest_manifest
from runner.checkpoint.policy import SaveKind
from runner.checkpoint.replicas import validate_replica_count
from runner.checkpoint.restore import RestoredState, validate_checkpoints
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.console import say, silence, warn
from runner.distributed.agreement import Hosts
from runner.distributed.clock import COMPILE, END, RESTORE, SET_UP, STEP, Clock, Progress, TimeCategory
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Watchdog
from runner.errors import DivergedError, HookError, MiscountError, PhaseError, ResumeError, StateError
from runner.history.hosts import start_naming_suspects
from runner.huggingface.load import load_init_from, validate_init_from
from runner.metrics.writers import RowLog
from runner.nvidia import GpuFaultError, gpu_errors
from runner.parallel.mesh import read_device_memory_bytes
from runner.process import read_node_name, report_faulty_host
from runner.recipe import Recipe
from runner.spec import Trajectory, compute_trajectory, dump_spec, validate_spec

_MAX_VALUE_CHARACTERS = 60


class Lifecycle:
    """Life of one job in this process, from its checks to its end. `RestoreableJob` has one.

    Attributes:
        job: what the job says; the lifecycle sets its `attempt`, `checkpointer`, `state` and `step`.
    """

    def __init__(self, job: Recipe, *, is_trial: bool = False):
        """Prepare to run `job`. In a trial it is only checked, to learn whether an advice would be accepted."""
        self.job = job
        self.is_followed = False  # True if this process goes on with another job, for which this one works
        self._is_trial = is_trial
        self._thread: int | None = None  # on which the job runs
        self._is_claimed = False
        self._has_ended = False

    def run(self, hosts: Hosts, stop: StopNotice, clock: Clock, *, ends_process: bool = True) -> None:
        """Run the job to its end; see `RestoreableJob.__call__`.

        A job that hangs or has lost a peer ends the process, unless `ends_process` is False.
        """
        job = self.job
        job.run_earlier_jobs(hosts, stop, clock)
        incidents = IncidentRecorder()
        watchdog = Watchdog(
            hosts,
            job.spec.deadlines,
            clock,
            incidents.on_diagnosis,
            incidents.on_straggler,
            incidents.on_progress,
            ends_process=ends_process,
        )
        with watchdog as progress:
            if hosts.num_processes > 1:
                # The first use of JAX's devices waits for all processes, so no process may make it alone.
                jax.devices()
            # A finished job claims no attempt: running the command again must change nothing.
            if hosts.run_on_main(self.validate_directory):
                hosts.run_on_main(job.export)  # it may have been killed, or asked for later
                if hosts.is_main:
                    result, stopped = read_result(job.store), ""
                    if result is not None and result.stop_line is not None:
                        stopped = f", {result.stop_line} (step {result.step}); change the config of that hook to go on"
                    say(f"{job.spec.name}: done, nothing to do{stopped}")
                    if result is not None and self.find_newest_step() != result.step:
                        warn(f"{job.store.url}: checkpoint {result.step}, the last of this run, is not there any more")
                return

            progress.describe_wait = job.session.describe_wait
            with progress.report_phase(SET_UP):
                incidents.attempt = self.claim(hosts, stop, progress)

            # Record the real cause: if a collective fails because a peer was lost, the error is that of the peer.
            with job.attempt.record_outcome(), self._record_gpu_faults(), watchdog.explain_errors():
                try:
                    self.prepare_and_restore()
                    job.run()
                    with progress.report_phase(END):
                        watchdog.stop_reports()
                        self.finish()
                except DivergedError as error:
                    job.checkpointer.wait_until_finished()
                    step = job.checkpointer.saved_step
                    kept = f"checkpoint {step} is kept" if step else "no checkpoint was committed before"
                    raise DivergedError(f"{error}; {kept}") from error
                except (HookError, MiscountError, PhaseError, StateError):
                    # The job failed, but the save in progress is of an earlier, valid step: let it be committed.
                    job.checkpointer.wait_until_finished()
                    raise
                finally:
                    self._has_ended = True
                    if job.writes_own_rows:
                        self.row_log.close()
                    clock.enter(TimeCategory.SHUTDOWN)
                    job.compile_cache.close(DRAIN_SECONDS)

    @contextlib.contextmanager
    def _record_gpu_faults(self) -> Iterator[None]:
        """Raise the runner's error in place of JAX's on a GPU, and record the GPU if it has failed."""
        attempt = self.job.attempt
        try:
            with gpu_errors():
                yield
        except GpuFaultError as error:
            process = attempt.hosts.process_id
            devices = [] if error.ordinal is None else [process * jax.local_device_count() + error.ordinal]
            if attempt.owns_directory():
                attempt.events.append(
                    "device_fault",
                    attempt.progress.step,
                    devices=devices,
                    processes=[process],
                    hosts=[read_node_name()],
                    reason=str(error),
                )
            report_faulty_host()
            raise

    def validate_directory(self) -> bool:
        """Return True if the job is done. Process 0 only; claims and changes nothing.

        Raises `InvalidError` if the directory cannot be written, or belongs to another job, and `StorageError` if it
        cannot be reached.
        """
        job = self.job
        fork = job.spec.checkpoint.fork_from
        if fork is not None:
            with job.document.errors_at("checkpoint.fork_from"):
                validate_parent_place(fork, job.store)
        identity = compute_trajectory(job.spec, job.config)
        run_identity = self.make_run_identity(identity)
        validate_directory(job.store, job.spec.name, run_identity, self.find_newest_step, job.has_output)
        # A finished run is checked too: it is not the fork of another parent that its spec asks for.
        newest = None if fork is None else read_newest_manifest(job.store)
        if fork is not None and newest is not None:
            with job.document.errors_at("checkpoint.fork_from"):
                validate_lineage(fork, job.store, newest)
        result = read_result(job.store)
        if result is not None:
            self.validate_total(result.step)
        return job.done

    def make_run_identity(self, identity: Trajectory) -> RunIdentity:
        """Return the identity of the job, which tries each advice before it is given."""
        found = self.job.make_run_identity(identity)
        # Another trial within a trial would only look for advice that nobody reads.
        return found if self._is_trial else dataclasses.replace(found, is_accepted=self.is_accepted)

    def is_accepted(self, advice: Advice) -> bool:
        """Return True if a start that follows `advice` would pass all checks before the claim. Process 0 only.

        Makes such a job and checks it, which may read data. Changes nothing.
        """
        job = self.job
        data = copy.deepcopy(job.given_document.data)
        section, _, name = advice.key.partition(".")
        data[section] = (data.get(section) or {}) | {name: advice.value}
        if section == "checkpoint":
            # The fork, or the run with the weights, gets a directory of its own.
            data["directory"] = f"{str(data['directory']).rstrip('/')}.{uuid.uuid4().hex}"
            data[section].pop("init_from" if name == "fork_from" else "fork_from", None)
        try:
            former = read_document(job.store).data["config"]
            for key in advice.former:
                _, part, *rest = key.split(".")
                # The place of data is not compared, so it may be another one as well.
                if not rest or part == "data":
                    data["config"][part] = former[part]
                else:
                    data["config"].setdefault(part, {})[rest[0]] = former[part][rest[0]]
            document = dataclasses.replace(job.given_document, data=data)
            with silence():
                trial = Lifecycle(type(job)(validate_spec(document), document), is_trial=True)
                trial.job.setup(Hosts.single_process())
                if section != "checkpoint":
                    trial.validate_directory()
                trial.validate_checkpoints(trial.job.abstract_state())
        except Exception:  # noqa: BLE001 - the job's own code may raise anything, and the refusal has to be told
            return False
        return True

    def validate_total(self, step: int) -> None:
        """Raise `ResumeError` if the run has reached a `step` beyond its end. Process 0 only."""
        job = self.job
        if step > job.total_steps:
            raise ResumeError(
                f"{job.store.url}: the run has reached step {step}, and the spec ends it at step {job.total_steps}; "
                f"set its total to {step} steps or more, or use another directory"
            )

    def validate_newest(self, newest: Manifest) -> None:
        """Raise `ResumeError` if the run cannot end where the spec ends it. Process 0 only."""
        job = self.job
        self.validate_total(newest.step)
        if newest.lineage is not None and newest.lineage["step"] >= job.total_steps:
            raise ResumeError(
                f"{job.store.url}: the run was forked at step {newest.lineage['step']}, and the spec ends it there; "
                "give it more steps"
            )
        job.session.validate_newest(newest)

    def find_newest_step(self) -> int:
        """Return the step of the newest committed checkpoint, or 0. Process 0 only."""
        manifest = read_newest_manifest(self.job.store)
        return 0 if manifest is None else manifest.step

    def claim(self, hosts: Hosts, stop: StopNotice, progress: Progress) -> Attempt:
        """Check everything that can be checked, then claim the next attempt, which fences every earlier one."""
        job = self.job
        self._thread, self._has_ended = threading.get_ident(), False
        # All checks come before the claim: a job that cannot start must not stop one that is running.
        job.setup(hosts)
        identity, abstract = compute_trajectory(job.spec, job.config), job.abstract_state()
        is_new = hosts.run_on_main(lambda: self.validate_checkpoints(abstract))
        validate_leaves(abstract)
        validate_memory(abstract, read_device_memory_bytes())
        if is_new and job.spec.checkpoint.fork_from is not None:
            with job.document.errors_at("checkpoint.fork_from"):
                validate_parent_files(hosts, job.spec.checkpoint.fork_from)
        with job.document.errors_at("checkpoint.local_replicas"):
            validate_replica_count(job.spec.checkpoint.local_replicas, hosts)

        run_identity = self.make_run_identity(identity)
        attempt = claim_attempt(
            job.store,
            job.document,
            job.spec,
            identity,
            hosts,
            stop,
            progress,
            type(job),
            lambda owner: validate_owner(
                job.store, owner, job.spec.name, run_identity, self.find_newest_step, job.has_output
            ),
            job.discard_output,
        )
        job.attempt, job.lineage = attempt, attempt.lineage
        # A stop before the first step ends the process from another thread, which must still record the attempt's end.
        stop.on_idle_exit = lambda: attempt.record_idle_exit(job.step)
        own = job.identity()
        # The constructor opens the fast tier, whose directory may be unusable.
        with job.document.errors_at("checkpoint.local_directory"):
            job.checkpointer = Checkpointer(
                attempt,
                job.spec.checkpoint,
                job.spec.logging.every_steps,
                own,
                abstract,
                is_own=self.make_run_identity(own).is_continued,
                steps_per_epoch=None if job.spec.checkpoint.every_epochs is None else job.steps_per_epoch,
            )
        devices = {"devices": jax.device_count(), "device_kind": jax.devices()[0].device_kind}
        self._is_claimed = True
        attempt.start(job.spec.name, total_steps=job.total_steps, **devices)
        if hosts.is_main:
            start_naming_suspects(job.store, attempt.machines)
        job.compile_cache.publish(attempt.fence.check, hosts.process_id)
        return attempt

    def validate_checkpoints(self, abstract: Any = None) -> bool:
        """Check that the run's checkpoints, or else the fork or weights to start from, fit this job. Process 0 only.

        Needs `setup`, and the abstract state where the directory has no checkpoint. Returns True if it has none. Raises
        `ResumeError` if the checkpoints are of another trajectory, and `InvalidError` if there are none, and the run in
        `checkpoint.fork_from` or the weights in `checkpoint.init_from` do not fit.
        """
        job = self.job
        config, run_identity = job.spec.checkpoint, self.make_run_identity(job.identity())
        job.validate_export()
        newest = validate_checkpoints(job.store, run_identity)
        if newest is not None:
            self.validate_newest(newest)
        if newest is None and config.fork_from is not None:
            with job.document.errors_at("checkpoint.fork_from"):
                validate_fork(config.fork_from, run_identity, abstract, job.total_steps)
        elif newest is None:
            validate_init_from(job.document, config.initial_weights, job.family, lambda: job.weights(abstract))
        return newest is None

    def prepare_and_restore(self) -> None:
        """Compile, then restore or initialise the state."""
        job = self.job
        attempt, started = job.attempt, time.monotonic()
        with attempt.progress.report_phase(COMPILE):
            job.prepare()
        seconds = round(time.monotonic() - started, 4)
        attempt.record("prepare", None, seconds=seconds, **job.compile_cache.get_counts())
        with attempt.progress.report_phase(RESTORE):
            self.restore_or_init()
        attempt.progress.report_step(job.step)

    def restore_or_init(self) -> None:
        """Restore the newest good checkpoint, or fork another run, or initialise the state; write the resolved spec."""
        job = self.job
        job.session.before_restore()
        attempt, started, fork = job.attempt, time.monotonic(), job.spec.checkpoint.fork_from
        found = job.checkpointer.restore(
            lambda attachments: (self.row_log if job.writes_own_rows else job.session).find_problem(attachments)
        )
        is_fork = found is None and fork is not None
        if found is None and fork is not None:
            with job.document.errors_at("checkpoint.fork_from"):
                found, lineage = restore_fork(
                    attempt, fork, self.make_run_identity(job.identity()), job.abstract_state()
                )
            job.session.continue_program(found.manifest, is_start=True)
            job.state, job.step = found.state, found.manifest.step
            attempt.lineage.update(lineage)
            event, details = "fork", {key: lineage[key] for key in ("run", "id", "changes")}
        elif found is None:
            job.state, init_from = job.init_state(), job.spec.checkpoint.initial_weights
            if init_from is not None:
                weights = load_init_from(job.document, init_from, job.family, job.weights(job.state), attempt)
                job.state = job.replace_weights(job.state, weights)
            event, details = "init", dict[str, Any]()
        else:
            job.state, job.step = found.state, found.manifest.step
            run_identity, saved = self.make_run_identity(job.identity()), found.manifest.identity
            # Another attempt may have saved later steps since the check before the claim.
            run_identity.validate_trajectory(saved, f"checkpoint {job.step}", job.store.url, lambda: job.step)
            job.session.continue_program(found.manifest, is_start=True)
            attempt.report_moves(run_identity.list_moves(saved), job.step)
            attempt.report_spec_changes(run_identity.list_changes(saved), job.step)
            event, details = "restore", {"tier": found.tier}
            if found.fetched:
                details["from_replicas"] = list(found.fetched)
        digest, seconds = compute_fingerprint(job.state), round(time.monotonic() - started, 4)
        if attempt.hosts.is_main:
            # What follows replaces files of the run. A restore may take minutes, or be suspended.
            attempt.fence.check()
            # The run goes on beyond an earlier end. Before its rows change, it must not count as done any more.
            job.store.remove(RESULT)
        attempt.record(event, job.step, seconds=seconds, fingerprint=digest, **details)
        job.session.on_restored()
        job.checkpointer.begin(job.state, job.step)
        attachments, carry = ({}, None) if found is None else (found.attachments, found.manifest.carry)
        if job.writes_own_rows:
            self.row_log.rewind(job.step, attachments)
        # A state that is saved without a carry has a row, but that is in the parent's file.
        job.session.resume(job.step, attachments, {} if is_fork and carry is None else carry)
        # Written only here, because `auto` is now resolved, and a job that cannot start must not replace the last good
        # spec.
        if attempt.hosts.is_main:
            attempt.update_owner(compute_trajectory(job.spec, job.config))
            job.store.write("spec.yaml", dump_spec(job.resolved_spec(), job.list_spec_comments()).encode())
        if is_fork and found is not None:
            self.commit_fork(found.manifest.metric)
        job.session.after_restore()

    def go_back(self, found: RestoredState, name: str) -> None:
        """Continue the running job from a checkpoint that was loaded, called `name`. Later ones are quarantined."""
        job, before = self.job, self.job.step
        job.state, job.step = job.checkpointer.go_back(found), found.manifest.step
        job.session.continue_program(found.manifest, is_start=False)
        job.session.on_restored()
        if job.writes_own_rows:
            self.row_log.rewind(job.step)
        job.session.resume(job.step, {}, found.manifest.carry)
        job.attempt.record("load", job.step, name=name, before=before)
        job.attempt.progress.report_step(job.step)
        job.session.after_load()

    def commit_fork(self, metric: float | None) -> None:
        """Save the forked state as a checkpoint of this run, before its first step; then the parent may be deleted.

        `metric` is that of the parent's checkpoint.
        """
        job = self.job
        fork, hosts = job.spec.checkpoint.fork_from, job.attempt.hosts
        assert fork is not None, "the spec names the parent"
        if hosts.is_main:
            parent = open_parent(fork)
            job.session.adopt_parent(parent)
            metric = metric if metric is not None and keeps_metric(parent, job.spec) else None
        # Hooks have not started yet, so they are not called for this save.
        contents = dataclasses.replace(self.collect_save_contents(), metric=metric, announce=lambda: None)
        job.state = job.checkpointer.save(job.state, job.step, contents, SaveKind.REQUIRED)
        job.checkpointer.wait_until_committed(job.step)

    def finish(self) -> None:
        """Save the last state, write `result.json`, and print the summary of the run."""
        job = self.job
        validate_end(job.spec.job, job.step, job.attempt.progress.step, job.total_steps)
        job.state = job.checkpointer.save(job.state, job.step, self.collect_save_contents(), SaveKind.REQUIRED)
        # `result.json` says that the job is done, so the last state must be committed before it.
        job.checkpointer.wait_until_committed(job.step)
        result = job.result()
        job.attempt.finish(job.step, result, job.document)
        job.checkpointer.close()
        job.checkpointer.remove_fast_tier()
        job.attempt.hosts.run_on_main(job.export)
        if self.is_followed:
            return
        job.attempt.say(f"{job.spec.name}: done at step {job.step}, fingerprint {result['fingerprint']}")
        for line in (*format_end_lines(job.store.url, job.step), *job.session.format_next_steps()):
            job.attempt.say(line)

    @functools.cached_property
    def row_log(self) -> RowLog:
        """Rows of `log_metrics` in this attempt."""
        return RowLog(self.job.attempt, self.job.resolved_spec(), self.job.total_steps)

    def collect_save_contents(self) -> SaveContents:
        """Return the contents of a save, with the rows of `RestoreableJob.log_metrics`."""
        job = self.job
        contents = job.make_save_contents()
        if not job.writes_own_rows:
            return contents
        best, log = job.spec.checkpoint.keep_best, self.row_log

        def flush() -> None:
            contents.flush()
            log.sync()

        metric = (
            log.get_metric(best.metric, job.step) if best is not None and contents.metric is None else contents.metric
        )
        return dataclasses.replace(
            contents,
            metric=metric,
            attachments=lambda: contents.attachments() | log.get_attachments(),
            flush=flush,
        )

    def validate_running(self, method: str) -> None:
        """Raise `PhaseError` if `method` is called before the state is restored or after the end of the job."""
        job = self.job
        if self._has_ended:
            raise PhaseError(f"{type(job).__name__}.{method}: the job has ended; call it inside of run")
        if not self._is_claimed or job.state is None:
            raise PhaseError(
                f"{type(job).__name__}.{method}: the job is not running yet; call the job, and {method} inside of run"
            )

    def validate_between_steps(self, method: str) -> None:
        """Raise `PhaseError` if `method` is not called between two steps, on the thread of the job."""
        is_own = threading.get_ident() == self._thread
        phase = self.job.attempt.progress.phase
        if not is_own or phase != STEP:
            during = phase.name if is_own else "the work of a thread"
            raise PhaseError(
                f"{type(self.job).__name__}.{method}: it was called during {during}; call it between two steps of run"
            )


def validate_step(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """Check that a job's step may follow `last_step`, the last completed one.

    A step is a plain int that never decreases. It may stay the same, even beyond `total_steps`: a checkpoint may have
    been made for a larger total. Raises `MiscountError` if the step is wrong; then nothing may be saved.
    """
    # An exact check: a bool is an int in Python, and integers of NumPy or JAX cannot be written as JSON.
    if type(step) is not int:
        value = " ".join(repr(step).split())[:_MAX_VALUE_CHARACTERS]
        problem = f"is {value}, of type {type(step).__name__}; needs to be a plain int, from self.step += 1"
    elif step < last_step:
        problem = f"went back to {step}; only load may set it back"
    elif step > max(total_steps, last_step):
        problem = f"is {step}, beyond the end"
    else:
        return
    raise MiscountError(f"{job}: step {problem} (last step {last_step}, total_steps {total_steps}); it is not saved")


def validate_end(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """Check like `validate_step`, and that the job has reached its end, now that `run` has returned."""
    validate_step(job, step, last_step, total_steps)
    if step < total_steps:
        raise MiscountError(
            f"{job}: run returned at step {step} of {total_steps}: the job is not done; run must go on to total_steps"
        )


def format_end_lines(directory: str, step: int) -> list[str]:
    """Return the lines to print after `done at step ...`: where the files are, and the effect of another start."""
    return [
        f"files: {directory} (result.json, spec.yaml, checkpoints/{step} ...)",
        "run the same command again: a finished job exits at once, and an interrupted one resumes from its last save",
        "the fingerprint is a digest of the state; with the same spec and hardware, interruptions do not change it",
    ]
