"""RestoreableJob: a job whose complete state is one pytree, which the runner saves and restores.

A subclass initialises the state (`init`) and advances it in `run`, where it calls `save_or_stop` after every step.
`RestoreableJob.__call__` does the rest, in this order: stop if the job is done; check the spec and the directory; claim
the directory; restore or initialise the state; run; save the last state. The base class makes no assumption about what
the job computes. Every method is called on every host, unless its docstring says process 0 only.

The *trajectory* of a job is the sequence of its states. It is identified by the values of the keys that determine it
(`identity`), such as seed, model and data; a resumed job must have the same values.
"""

import copy
import dataclasses
import functools
import os
import re
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from runner.checkpoint.fast_tier import validate_replica_count
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
from runner.checkpoint.leaves import init_sharded, replicate_abstract, validate_leaves, validate_memory
from runner.checkpoint.manifest import Manifest, read_newest_manifest
from runner.checkpoint.policy import SaveKind
from runner.checkpoint.restore import validate_checkpoints
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.console import say, silence, warn
from runner.distributed.agreement import Hosts
from runner.distributed.clock import COMPILE, END, RESTORE, SET_UP, STEP, Clock, Progress, TimeCategory
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Watchdog
from runner.errors import (
    DivergedError,
    HookError,
    InvalidError,
    MiscountError,
    PhaseError,
    PreemptedError,
    ResumeError,
    StateError,
)
from runner.huggingface.load import load_init_from, validate_init_from
from runner.huggingface.mapping import Family
from runner.metrics.meta import UnfitMetricsError, parse_metrics
from runner.metrics.writers import RowLog
from runner.parallel.mesh import read_device_memory_bytes
from runner.run.attempt import DRAIN_SECONDS, Attempt, IncidentRecorder, claim_attempt
from runner.run.compile_cache import CompileCache
from runner.run.fence import Advice, RunIdentity, is_done, validate_directory, validate_owner
from runner.run.layout import RESULT, open_directory, read_result
from runner.spec import (
    Document,
    ExecutionSpec,
    JobConfig,
    Trajectory,
    compute_trajectory,
    dump_spec,
    list_former_paths,
    make_document,
    validate_config,
    validate_hooks,
    validate_spec,
)
from runner.storage import JsonObject, Store

_METRIC_KEY = re.compile(r"(?!step$)[\w.-]+(/[\w.-]+)*")
_RESERVED_KEYS = ("perf/",)
_MAX_VALUE_CHARACTERS = 60


class JobReport:
    """Data of a job besides its state, which it reports at its end. The base has none; see `runner.train.report`."""

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Return the reason why the job cannot continue from a fast-tier state with these attachments; None if it can.

        Called on process 0 only, while an older state can still be chosen.
        """
        return None

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None) -> None:
        """Continue at `step`. Called on every process before the first step, and after each `load` of the running job.

        Args:
            step: step of the state, new or restored.
            attachments: files that the fast tier saved with the state.
            carry: `carry` of the checkpoint's manifest; None if it has none, empty for a fork of such a checkpoint.
        """

    def result(self, step: int) -> JsonObject:
        """Return the keys of `result.json` besides step and fingerprint. Called on every process at the end."""
        return {}

    def format_next_steps(self) -> Sequence[str]:
        """Return lines that tell the user what to do with the finished run; printed last."""
        return ()


class RestoreableJob:
    """Base class of every job. Construct it with a spec, then call it.

    Attributes:
        Config: pydantic model of the spec's `config`, which a subclass overrides.
        needs_topology: True if the spec must have a `topology`.
        writes_own_rows: True if the rows of `metrics.jsonl` are those of `log_metrics`.
        former_paths: paths (`module:Class`) that this class had earlier, whose runs it continues. Not inherited.
        attempt: the running attempt; exists once the directory is claimed.
        checkpointer: saves and restores; exists once the directory is claimed.
        document: where the spec came from, for errors with a line.
        spec: the spec.
        config: `spec.config`, an instance of `Config`.
        store: the run's directory.
        compile_cache: cache of compiled programs.
        state: the pytree; None until it is restored or initialised.
        step: number of completed steps.
    """

    Config: ClassVar[type[JobConfig]] = JobConfig
    needs_topology: ClassVar[bool] = False
    writes_own_rows: ClassVar[bool] = True
    former_paths: ClassVar[Sequence[str]] = ()

    attempt: Attempt
    checkpointer: Checkpointer

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        """Validate `spec.config` against `Config`.

        Args:
            spec: the spec.
            document: where the spec came from; by default it is made from the spec.

        Raises:
            SpecError: the spec is wrong; the message names file, line and key.
        """
        document = make_document(spec) if document is None else document
        self._given_document, self._is_trial = document, False
        self.document = self.complete_document(document, spec)
        self.spec = validate_hooks(self.document, spec, type(self))
        # `Any`, since only the subclass knows the fields of its `Config`.
        self.config: Any = validate_config(self.document, self.Config)
        self.store = open_directory(self.document, spec)
        self.compile_cache = CompileCache(self.store if spec.shares_compiled_programs else None)
        self.state: Any = None
        self.step = 0
        self._thread: int | None = None  # on which the job runs
        self._has_ended = False

    # Methods for a subclass to override.

    @classmethod
    def complete_document(cls, document: Document, spec: ExecutionSpec) -> Document:
        """Return the document with keys of `config` filled in that follow from its other keys; by default unchanged."""
        return document

    @property
    def total_steps(self) -> int:
        """Step at which the job is done; by default the config's."""
        return int(self.config.total_steps)

    def run_earlier_jobs(self, hosts: Hosts, stop: StopNotice, clock: Clock) -> None:
        """Run the jobs whose output this job reads to their end. Does nothing by default.

        Called on every host, before anything else. For jobs that are done it must return fast, because it is part of
        each start.
        """

    def setup(self, hosts: Hosts) -> None:
        """Check and prepare what `init` and `run` need, before anything is written. Does nothing by default."""

    def has_output(self) -> bool:
        """Return True if the job has made something besides checkpoints. Process 0 only; False by default."""
        return False

    def discard_output(self) -> None:
        """Remove the output of an attempt that did no work, before a start with another spec. Process 0 only."""

    def prepare(self) -> None:
        """Do slow preparations that need `attempt`, such as compiling. Does nothing by default."""

    def init(self) -> Any:
        """Return the state at step 0: a pytree of jax arrays. A pure function of the spec."""
        raise NotImplementedError

    def weights(self, state: Any) -> Any:
        """Return the fields of `state`, a dataclass, that `checkpoint.init_from` replaces, by name."""
        raise self.document.error(
            "checkpoint.init_from", f"{type(self).__name__} has no weights that could be replaced; remove the key"
        )

    def replace_weights(self, state: Any, weights: Any) -> Any:
        """Return the state at step 0 with other `weights`, which has the fields that `self.weights` returns."""
        return dataclasses.replace(state, **weights)

    def family(self) -> Family | None:
        """Return names and layout of the weights in Hugging Face files; None if the job has no such format."""
        return None

    def abstract_state(self) -> Any:
        """Return shape, dtype and sharding of every leaf of the state; by default replicated on every device."""
        return replicate_abstract(jax.eval_shape(self.init))

    def init_state(self) -> Any:
        """Return the state of `init`, strongly typed, each leaf created in the sharding of `abstract_state`."""
        return init_sharded(self.init, self.abstract_state())

    def run(self) -> None:
        """Advance `state` to `total_steps`: after each step add one to `step` and call `save_or_stop`.

        It is an error to return before `total_steps`, or to call `sys.exit`.
        """
        raise NotImplementedError

    def identity(self) -> Trajectory:
        """Return the values that identify the trajectory, by dotted key. Needs `setup`."""
        return compute_trajectory(self.spec, self.config)

    @property
    def unread_keys(self) -> frozenset[str]:
        """Dotted keys that have no effect with this spec, so that a resumed run may have other values for them."""
        return frozenset()

    @property
    def former_values(self) -> Mapping[str, Sequence[str]]:
        """Earlier values of identity keys that are equivalent to the current value: former paths of renamed classes."""
        with self.document.errors_at("job"):
            return {"job": list_former_paths(type(self))}

    def make_run_identity(self, identity: Trajectory) -> RunIdentity:
        """Return the identity to compare with a saved trajectory. `identity` has this job's keys known so far."""
        # Another trial within a trial would only look for advice that nobody reads.
        is_accepted = (lambda advice: False) if self._is_trial else self.is_accepted
        return RunIdentity(
            self.document, self.config, identity, self.unread_keys, self.former_values, is_accepted=is_accepted
        )

    def is_accepted(self, advice: Advice) -> bool:
        """Return True if a start that follows `advice` would pass all checks before the claim. Process 0 only.

        Makes such a job and checks it, which may read data. Changes nothing.
        """
        data = copy.deepcopy(self._given_document.data)
        section, _, name = advice.key.partition(".")
        data[section] = (data.get(section) or {}) | {name: advice.value}
        if section == "checkpoint":
            # The fork, or the run with the weights, gets a directory of its own.
            data["directory"] = f"{str(data['directory']).rstrip('/')}.{uuid.uuid4().hex}"
            data[section].pop("init_from" if name == "fork_from" else "fork_from", None)
        try:
            former = read_document(self.store).data["config"]
            for key in advice.former:
                _, part, *rest = key.split(".")
                # The place of data is not compared, so it may be another one as well.
                if not rest or part == "data":
                    data["config"][part] = former[part]
                else:
                    data["config"].setdefault(part, {})[rest[0]] = former[part][rest[0]]
            document = dataclasses.replace(self._given_document, data=data)
            with silence():
                job = type(self)(validate_spec(document), document)
                job._is_trial = True
                job.setup(Hosts.single_process())
                if section != "checkpoint":
                    job.validate_directory()
                job.validate_checkpoints(job.abstract_state())
        except Exception:  # noqa: BLE001 - the job's own code may raise anything, and the refusal has to be told
            return False
        return True

    def resolved_spec(self) -> ExecutionSpec:
        """Return the spec with every default and `auto` filled in, as it is written to `spec.yaml`. Needs `prepare`."""
        spec = self.spec.model_copy(update={"config": self.config.model_dump(mode="json")})
        fork = spec.checkpoint.fork_from
        # Before the restore it is not known to which step `newest` or `best` refers.
        if fork is None or "attempt" not in vars(self) or not self.attempt.lineage:
            return spec
        fork = fork.model_copy(update={"step": self.attempt.lineage["step"]})
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"fork_from": fork})})

    def make_save_contents(self) -> SaveContents:
        """Return the contents of a save besides the state, such as its metric. Called right before each save.

        May wait for the device.

        Raises:
            DivergedError: the state must not be saved.
        """
        return SaveContents()

    @property
    def report(self) -> JobReport:
        """Report that the job collects during the run and prints at its end; empty by default. Needs `prepare`."""
        return JobReport()

    def result(self) -> JsonObject:
        """Return the content of `result.json`. Called at the end."""
        return {"step": self.step, **self.report.result(self.step), "fingerprint": compute_fingerprint(self.state)}

    # The life of a job.

    @property
    def done(self) -> bool:
        """True if the job has reached its end, now or in an earlier attempt."""
        return is_done(self.store, lambda: self.total_steps)

    def describe_stop(self) -> str:
        """Return why a finished job ended before its last step, as the end of a line; nothing if it did not."""
        result = read_result(self.store)
        if result is None or result.stop_line is None:
            return ""
        return f", {result.stop_line} (step {result.step}); change the config of that hook to go on"

    def __call__(self, hosts: Hosts | None = None, stop: StopNotice | None = None, clock: Clock | None = None) -> None:
        """Run the job to its end: restore or initialise, `run`, final save, `result.json`. A finished job does nothing.

        Args:
            hosts: all processes of the job; by default this one alone.
            stop: notice that the job was asked to stop.
            clock: accounting of the attempt's time.

        Raises:
            PreemptedError: the job was asked to stop; its state is saved.
            RunnerError: any other end, with its exit code.
        """
        hosts, stop, clock = hosts or Hosts.single_process(), stop or StopNotice(), clock or Clock()
        self.run_earlier_jobs(hosts, stop, clock)
        incidents = IncidentRecorder()
        watchdog = Watchdog(
            hosts, self.spec.deadlines, clock, incidents.on_diagnosis, incidents.on_straggler, incidents.on_progress
        )
        with watchdog as progress:
            if hosts.num_processes > 1:
                # The first use of JAX's devices waits for all processes, so no process may make it alone.
                jax.devices()
            # A finished job claims no attempt: running the command again must change nothing.
            if hosts.run_on_main(self.validate_directory):
                if hosts.is_main:
                    say(f"{self.spec.name}: done, nothing to do{self.describe_stop()}")
                return

            progress.describe_wait = self.describe_wait
            with progress.report_phase(SET_UP):
                incidents.attempt = self.claim_directory(hosts, stop, progress)

            # Record the real cause: if a collective fails because a peer was lost, the error is that of the peer.
            with self.attempt.record_outcome(), watchdog.explain_errors():
                try:
                    self.prepare_and_restore()
                    self.run()
                    with progress.report_phase(END):
                        watchdog.stop_reports()
                        self.finish()
                except (DivergedError, HookError, MiscountError, PhaseError, StateError):
                    # The job failed, but the save in progress is of an earlier, valid step: let it be committed.
                    self.checkpointer.wait_until_finished()
                    raise
                finally:
                    self._has_ended = True
                    if self.writes_own_rows:
                        self.row_log.close()
                    clock.enter(TimeCategory.SHUTDOWN)
                    self.compile_cache.close(DRAIN_SECONDS)

    def validate_directory(self) -> bool:
        """Return True if the job is done. Process 0 only; claims and changes nothing.

        Raises:
            InvalidError: the directory cannot be written, or belongs to another job.
            StorageError: it cannot be reached.
        """
        fork = self.spec.checkpoint.fork_from
        if fork is not None:
            with self.document.errors_at("checkpoint.fork_from"):
                validate_parent_place(fork, self.store)
        identity = compute_trajectory(self.spec, self.config)
        run_identity = self.make_run_identity(identity)
        validate_directory(self.store, self.spec.name, run_identity, self.find_newest_step, self.has_output)
        # A finished run is checked too: it is not the fork of another parent that its spec asks for.
        newest = None if fork is None else read_newest_manifest(self.store)
        if fork is not None and newest is not None:
            with self.document.errors_at("checkpoint.fork_from"):
                validate_lineage(fork, self.store, newest)
        result = read_result(self.store)
        if result is not None:
            self.validate_total(result.step)
        return self.done

    def validate_total(self, step: int) -> None:
        """Raise `ResumeError` if the run has reached a `step` beyond its end. Process 0 only."""
        if step > self.total_steps:
            raise ResumeError(
                f"{self.store.url}: the run has reached step {step}, and the spec ends it at step {self.total_steps}; "
                f"set its total to {step} steps or more, or use another directory"
            )

    def validate_newest(self, newest: Manifest) -> None:
        """Raise `ResumeError` if the run cannot end where the spec ends it. Process 0 only.

        Args:
            newest: manifest of its newest checkpoint.
        """
        self.validate_total(newest.step)
        if newest.lineage is not None and newest.lineage["step"] >= self.total_steps:
            raise ResumeError(
                f"{self.store.url}: the run was forked at step {newest.lineage['step']}, and the spec ends it there; "
                "give it more steps"
            )

    def find_newest_step(self) -> int:
        """Return the step of the newest committed checkpoint, or 0. Process 0 only."""
        manifest = read_newest_manifest(self.store)
        return 0 if manifest is None else manifest.step

    def describe_wait(self) -> str:
        """Return the call into user code that has not returned, for the report of a hang; empty by default.

        Called on another thread, so it must not wait for anything.
        """
        return ""

    def claim_directory(self, hosts: Hosts, stop: StopNotice, progress: Progress) -> Attempt:
        """Check everything that can be checked, then claim the next attempt, which fences every earlier one."""
        self._thread, self._has_ended = threading.get_ident(), False
        # All checks come before the claim: a job that cannot start must not stop one that is running.
        self.setup(hosts)
        identity, abstract = compute_trajectory(self.spec, self.config), self.abstract_state()
        is_new = hosts.run_on_main(lambda: self.validate_checkpoints(abstract))
        validate_leaves(abstract)
        validate_memory(abstract, read_device_memory_bytes())
        if is_new and self.spec.checkpoint.fork_from is not None:
            with self.document.errors_at("checkpoint.fork_from"):
                validate_parent_files(hosts, self.spec.checkpoint.fork_from)
        with self.document.errors_at("checkpoint.local_replicas"):
            validate_replica_count(self.spec.checkpoint.local_replicas, hosts)

        run_identity = self.make_run_identity(identity)
        attempt = claim_attempt(
            self.store,
            self.document,
            self.spec,
            identity,
            hosts,
            stop,
            progress,
            type(self),
            lambda owner: validate_owner(
                self.store, owner, self.spec.name, run_identity, self.find_newest_step, self.has_output
            ),
            self.discard_output,
        )
        self.attempt = attempt
        # A stop before the first step ends the process from another thread, which must still record the attempt's end.
        stop.on_idle_exit = lambda: attempt.record_idle_exit(self.step)
        own = self.identity()
        # The constructor opens the fast tier, whose directory may be unusable.
        with self.document.errors_at("checkpoint.local_directory"):
            self.checkpointer = Checkpointer(
                attempt,
                self.spec.checkpoint,
                self.spec.logging.every_steps,
                own,
                abstract,
                is_own=self.make_run_identity(own).is_continued,
            )
        devices = {"devices": jax.device_count(), "device_kind": jax.devices()[0].device_kind}
        attempt.start(self.spec.name, total_steps=self.total_steps, **devices)
        self.compile_cache.publish(attempt.fence.check, hosts.process_id)
        return attempt

    def validate_checkpoints(self, abstract: Any = None) -> bool:
        """Check that the run's checkpoints, or else the fork or weights to start from, fit this job. Process 0 only.

        Needs `setup`. Returns True if the run has no checkpoint yet.

        Args:
            abstract: the abstract state; needed only where the directory has no checkpoint.

        Raises:
            ResumeError: the checkpoints are of another trajectory.
            InvalidError: there are none, and the run in `checkpoint.fork_from` or the weights in `checkpoint.init_from`
                do not fit.
        """
        config, run_identity = self.spec.checkpoint, self.make_run_identity(self.identity())
        newest = validate_checkpoints(self.store, run_identity)
        if newest is not None:
            self.validate_newest(newest)
        if newest is None and config.fork_from is not None:
            with self.document.errors_at("checkpoint.fork_from"):
                validate_fork(config.fork_from, run_identity, abstract, self.total_steps)
        elif newest is None:
            validate_init_from(self.document, config.initial_weights, self.family, lambda: self.weights(abstract))
        return newest is None

    def prepare_and_restore(self) -> None:
        """Compile, then restore or initialise the state."""
        attempt, started = self.attempt, time.monotonic()
        with attempt.progress.report_phase(COMPILE):
            self.prepare()
        seconds = round(time.monotonic() - started, 4)
        attempt.record("prepare", None, seconds=seconds, **self.compile_cache.get_counts())
        with attempt.progress.report_phase(RESTORE):
            self.restore_or_init()
        attempt.progress.report_step(self.step)

    def restore_or_init(self) -> None:
        """Restore the newest good checkpoint, or fork another run, or initialise the state; write the resolved spec."""
        attempt, started, fork = self.attempt, time.monotonic(), self.spec.checkpoint.fork_from
        found = self.checkpointer.restore(
            lambda attachments: self.report.find_problem(attachments) or self.row_log.find_problem(attachments)
        )
        is_fork = found is None and fork is not None
        if found is None and fork is not None:
            with self.document.errors_at("checkpoint.fork_from"):
                found, lineage = restore_fork(
                    attempt, fork, self.make_run_identity(self.identity()), self.abstract_state()
                )
            self.continue_program(found.manifest, is_start=True)
            self.state, self.step = found.state, found.manifest.step
            attempt.lineage.update(lineage)
            event, details = "fork", {key: lineage[key] for key in ("run", "id", "changes")}
        elif found is None:
            self.state, init_from = self.init_state(), self.spec.checkpoint.initial_weights
            if init_from is not None:
                weights = load_init_from(self.document, init_from, self.family, self.weights(self.state), attempt)
                self.state = self.replace_weights(self.state, weights)
            event, details = "init", dict[str, Any]()
        else:
            self.state, self.step = found.state, found.manifest.step
            run_identity, saved = self.make_run_identity(self.identity()), found.manifest.identity
            # Another attempt may have saved later steps since the check before the claim.
            run_identity.validate_trajectory(saved, f"checkpoint {self.step}", self.store.url, lambda: self.step)
            self.continue_program(found.manifest, is_start=True)
            attempt.report_moves(run_identity.list_moves(saved), self.step)
            attempt.report_spec_changes(run_identity.list_changes(saved), self.step)
            event, details = "restore", {"tier": found.tier}
            if found.fetched:
                details["from_replicas"] = list(found.fetched)
        digest, seconds = compute_fingerprint(self.state), round(time.monotonic() - started, 4)
        if attempt.hosts.is_main:
            # What follows replaces files of the run. A restore may take minutes, or be suspended.
            attempt.fence.check()
            # The run goes on beyond an earlier end. Before its rows change, it must not count as done any more.
            self.store.remove(RESULT)
        attempt.record(event, self.step, seconds=seconds, fingerprint=digest, **details)
        self.on_restored()
        self.checkpointer.begin(self.state, self.step)
        attachments, carry = ({}, None) if found is None else (found.attachments, found.manifest.carry)
        if self.writes_own_rows:
            self.row_log.rewind(self.step, attachments)
        # A state that is saved without a carry has a row, but that is in the parent's file.
        self.report.resume(self.step, attachments, {} if is_fork and carry is None else carry)
        # Written only here, because `auto` is now resolved, and a job that cannot start must not replace the last good
        # spec.
        if attempt.hosts.is_main:
            attempt.update_owner(compute_trajectory(self.spec, self.config))
            self.store.write("spec.yaml", dump_spec(self.resolved_spec()).encode())
        if is_fork and found is not None:
            self.commit_fork(found.manifest.metric)

    def continue_program(self, manifest: Manifest, is_start: bool) -> None:
        """Compare the program of the job with the one that has made a restored checkpoint. Does nothing by default.

        Args:
            manifest: manifest of the checkpoint.
            is_start: False if the running job goes back to the checkpoint.
        """

    def on_restored(self) -> None:
        """Adapt the job to `state`, which was restored or initialised. Does nothing by default."""

    def commit_fork(self, metric: float | None) -> None:
        """Save the forked state as a checkpoint of this run, before its first step; then the parent may be deleted.

        Args:
            metric: metric of the parent's checkpoint.
        """
        fork, hosts = self.spec.checkpoint.fork_from, self.attempt.hosts
        assert fork is not None, "the spec names the parent"
        if hosts.is_main:
            parent = open_parent(fork)
            self.adopt_parent(parent)
            metric = metric if metric is not None and keeps_metric(parent, self.spec) else None
        # Hooks have not started yet, so they are not called for this save.
        contents = dataclasses.replace(self._collect_save_contents(), metric=metric, announce=lambda: None)
        self.state = self.checkpointer.save(self.state, self.step, contents, SaveKind.REQUIRED)
        self.checkpointer.wait_until_committed(self.step)

    def adopt_parent(self, parent: Store) -> None:
        """Copy the files that a fork needs from its parent's directory, besides the checkpoint. Process 0 only."""

    def finish(self) -> None:
        """Save the last state, write `result.json`, and print the summary of the run."""
        validate_end(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        self.save()
        # `result.json` says that the job is done, so the last state must be committed before it.
        self.checkpointer.wait_until_committed(self.step)
        result = self.result()
        self.attempt.finish(self.step, result, self.document)
        self.checkpointer.close()
        self.checkpointer.remove_fast_tier()
        self.attempt.say(f"{self.spec.name}: done at step {self.step}, fingerprint {result['fingerprint']}")
        for line in (*format_end_lines(self.store.url, self.step), *self.report.format_next_steps()):
            self.attempt.say(line)

    # Methods that `run` calls.

    def save_or_stop(self) -> None:
        """Save if a save is due. Called after every step.

        Raises:
            PreemptedError: the job was asked to stop; its state is saved and committed.
            PhaseError: the job is not running.
        """
        self.validate_running("save_or_stop")
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        self.attempt.progress.report_step(self.step)
        # `poll` gives every host the same answer at the same step, so all of them save and stop together.
        is_stopping = self.attempt.stop.poll()
        self.checkpointer.raise_if_failing()
        if is_stopping:
            self.save()
            self.checkpointer.wait_until_committed(self.step)
            self.attempt.record("preempt", self.step, saved=True)
            # No host may leave while another still needs it.
            self.attempt.hosts.barrier()
            self.checkpointer.close()
            raise PreemptedError(f"stopped as asked; step {self.step} is saved; run the same command again")
        kind = self.checkpointer.find_due_save(self.step, self.total_steps)
        if kind is not None:
            self.state = self.checkpointer.save(self.state, self.step, self._collect_save_contents(), kind)
            if self.checkpointer.saved_step == self.step:
                self.attempt.stop_to_grow(self.step)

    def save(self, suffix: str | os.PathLike[str] | None = None) -> None:
        """Start saving the state as `checkpoints/<suffix>`, by default the step. It is durable once it is committed.

        A job resumes only from checkpoints that are named by their step, and only these count for retention. A
        checkpoint with another name is kept until someone deletes it.

        Raises:
            InvalidError: `suffix` cannot be the name of a checkpoint.
            PhaseError: the job is not running.
        """
        self.validate_running("save")
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        name = None if suffix is None else _parse_name(suffix)
        contents = self._collect_save_contents()
        self.state = self.checkpointer.save(self.state, self.step, contents, SaveKind.REQUIRED, name)

    def load(self, suffix: str | os.PathLike[str]) -> None:
        """Replace state and step by those of `checkpoints/<suffix>` and continue from there. Called between steps.

        The effect is that of a restore at this step: later checkpoints are moved to `quarantine/`, and later rows are
        removed.

        Raises:
            InvalidError: no checkpoint can have that name.
            ResumeError: the checkpoint is damaged, or does not exist.
            PhaseError: the job is not running, or the call is not made between two steps on the job's thread.
        """
        self.validate_running("load")
        if threading.get_ident() != self._thread or self.attempt.progress.phase != STEP:
            phase = (
                self.attempt.progress.phase.name if threading.get_ident() == self._thread else "the work of a thread"
            )
            raise PhaseError(
                f"{type(self).__name__}.load: it was called during {phase}; call it between two steps of run"
            )
        name, before = _parse_name(suffix), self.step
        found = self.checkpointer.load(name)
        self.state, self.step = self.checkpointer.go_back(found), found.manifest.step
        self.continue_program(found.manifest, is_start=False)
        self.on_restored()
        if self.writes_own_rows:
            self.row_log.rewind(self.step)
        self.report.resume(self.step, {}, found.manifest.carry)
        self.attempt.record("load", self.step, name=name, before=before)
        self.attempt.progress.report_step(self.step)

    def log_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Write metrics of the current step into `metrics.jsonl` and its mirrors. Called on every host, inside `run`.

        A second call at the same step adds to its row. Rows are part of the trajectory: a resumed run has each step
        once. `checkpoint.keep_best` may name one of the metrics.

        Args:
            metrics: metrics by key, such as `accuracy` or `eval/accuracy`, of the kinds that an evaluator may return.
                If a row cannot hold one of them, a warning is printed and none of this call is written. Numbers that
                are not finite become null.

        Raises:
            PhaseError: the job is not running, or is a trainer, which writes the rows itself.
        """
        self.validate_running("log_metrics")
        if not self.writes_own_rows:
            raise PhaseError(
                f"{type(self).__name__}.log_metrics: a trainer writes its rows itself; return metrics from forward, or "
                "from an evaluator"
            )
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        try:
            row, not_finite = parse_metrics(metrics, {}, _METRIC_KEY, _RESERVED_KEYS)
        except UnfitMetricsError as error:
            warn(f"log_metrics at step {self.step}: {error}; the row has no metric of this call")
            return
        if not_finite:
            warn(f"log_metrics at step {self.step}: {', '.join(not_finite)}: not finite; null in the row")
        self.row_log.add(self.step, row)

    @functools.cached_property
    def row_log(self) -> RowLog:
        """Rows of `log_metrics` in this attempt."""
        return RowLog(self.attempt, self.resolved_spec(), self.total_steps)

    def _collect_save_contents(self) -> SaveContents:
        """Return the contents of a save, with the rows of `log_metrics`."""
        contents = self.make_save_contents()
        if not self.writes_own_rows:
            return contents
        best, log = self.spec.checkpoint.keep_best, self.row_log

        def flush() -> None:
            contents.flush()
            log.sync()

        metric = (
            log.get_metric(best.metric, self.step) if best is not None and contents.metric is None else contents.metric
        )
        return dataclasses.replace(
            contents,
            metric=metric,
            attachments=lambda: contents.attachments() | log.get_attachments(),
            flush=flush,
        )

    def validate_running(self, method: str) -> None:
        """Raise `PhaseError` if `method` is called before the state is restored or after the end of the job."""
        if self._has_ended:
            raise PhaseError(f"{type(self).__name__}.{method}: the job has ended; call it inside of run")
        if "checkpointer" not in vars(self) or self.state is None:
            raise PhaseError(
                f"{type(self).__name__}.{method}: the job is not running yet; call the job, and {method} inside of run"
            )


class TextJob(RestoreableJob):
    """Job that tokenises text to `corpus` in its directory, for a trainer whose spec has `data.tokenise`."""

    @property
    def vocabulary_size(self) -> int:
        """Vocabulary size of the corpus, or an upper bound of it."""
        raise NotImplementedError

    def find_text(self) -> None:
        """Raise `InvalidError` if there is no such text. Needs neither the tokenizer nor other hosts."""
        raise NotImplementedError


def validate_step(job: str, step: Any, last_step: int, total_steps: int) -> None:
    """Check that a job's step may follow `last_step`, the last completed one.

    A step is a plain int that never decreases. It may stay the same, even beyond `total_steps`: a checkpoint may have
    been made for a larger total.

    Raises:
        MiscountError: the step is wrong; nothing may be saved.
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


def _parse_name(suffix: str | os.PathLike[str]) -> str:
    """Return the name of a checkpoint. Raises `InvalidError` if it is neither a string nor a path."""
    if not isinstance(suffix, str | os.PathLike):
        raise InvalidError(f"got {suffix!r} as the name of a checkpoint, needs a string such as '5'")
    return os.fspath(suffix)
