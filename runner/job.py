"""RestoreableJob: a job whose whole state is one pytree, and which survives anything. Knows nothing of neural nets.

A subclass says how the state begins (`init`) and advances it in `run`, calling `save_or_stop` after every step. The
base is the life of a job: is it done? claim the directory, restore or begin, run, save, end clean. Everything here is
called on every host; what only the main host does says so.
"""

import dataclasses
import os
import time
from typing import Any, ClassVar

import jax

from runner.checkpoint.checkpointer import Checkpointer
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.leaves import init_sharded, replicate_abstract, validate_leaves
from runner.checkpoint.restore import validate_checkpoints
from runner.checkpoint.save import SaveContents, SaveKind
from runner.console import say
from runner.distributed.agreement import Hosts
from runner.distributed.clock import COMPILE, END, RESTORE, SET_UP, Clock, Progress, TimeBucket
from runner.distributed.preemption import StopNotice
from runner.distributed.watchdog import Watchdog
from runner.errors import DivergedError, HookError, MiscountError, PreemptedError, StateError
from runner.huggingface.load import load_init_from, validate_init_from
from runner.huggingface.mapping import Family
from runner.run.attempt import (
    DRAIN_SECONDS,
    Attempt,
    IncidentRecorder,
    JobReport,
    claim_attempt,
    validate_end,
    validate_step,
)
from runner.run.compile_cache import CompileCache
from runner.run.fence import RunIdentity, is_done, validate_directory
from runner.run.layout import open_directory
from runner.spec import (
    Document,
    ExecutionSpec,
    JobConfig,
    Trajectory,
    compute_trajectory,
    dump_spec,
    make_document,
    validate_config,
    validate_hooks,
)
from runner.storage import JsonObject


class RestoreableJob:
    """Base of every job. Construct it with a spec, then call it."""

    Config: ClassVar[type[JobConfig]] = JobConfig
    needs_topology: ClassVar[bool] = False

    attempt: Attempt  # once the directory is claimed
    checkpointer: Checkpointer  # likewise

    def __init__(self, spec: ExecutionSpec, document: Document | None = None):
        """Check `spec.config` against `Config`. `document` is where the spec came from, for errors with a line."""
        self.document = make_document(spec) if document is None else document
        self.spec = validate_hooks(self.document, spec, type(self))
        self.config: Any = validate_config(self.document, self.Config)
        self.store = open_directory(self.document, spec)
        self.compile_cache = CompileCache(self.store if spec.shares_compiled_programs else None)
        self.state: Any = None
        self.step = 0  # completed

    # What a job says of itself.

    @property
    def total_steps(self) -> int:
        """The step at which the job is done, by default the config's."""
        return int(self.config.total_steps)

    def setup(self, hosts: Hosts) -> None:
        """Check and prepare what `init` and `run` need, before anything is written. Nothing by default."""

    def prepare(self) -> None:
        """Make ready what takes time and needs `attempt`, such as compiled code. Nothing by default."""

    def init(self) -> Any:
        """The state at step 0: a pytree of jax arrays, a pure function of the spec."""
        raise NotImplementedError

    def weights(self, state: Any) -> Any:
        """The fields of `state`, which is then a dataclass, that `checkpoint.init_from` replaces."""
        raise self.document.error("checkpoint.init_from", f"{type(self).__name__} has no weights to take over")

    def replace_weights(self, state: Any, weights: Any) -> Any:
        """The state at step 0, begun with other weights, as `weights` names them. Called on every host."""
        return dataclasses.replace(state, **weights)

    def family(self) -> Family | None:
        """How the weights are called and laid out in Hugging Face's files; None: they have no form there."""
        return None

    def abstract_state(self) -> Any:
        """Shape, dtype and sharding of every leaf of the state, by default a copy on every device of the job."""
        return replicate_abstract(jax.eval_shape(self.init))

    def init_state(self) -> Any:
        """`init`, each leaf strongly typed and born with the sharding that `abstract_state` gives it."""
        return init_sharded(self.init, self.abstract_state())

    def run(self) -> None:
        """Advance `state` to `total_steps`: after each step add one to `step` and call `save_or_stop`.

        To return before that is an error, and so is `sys.exit`.
        """
        raise NotImplementedError

    def identity(self) -> Trajectory:
        """What defines the trajectory, by dotted key: a resumed job must have the same. Needs `setup`."""
        return compute_trajectory(self.spec, self.config)

    @property
    def unread_keys(self) -> frozenset[str]:
        """Dotted keys that nothing reads as the spec stands: whatever a run was begun with, it goes on."""
        return frozenset()

    def resolved_spec(self) -> ExecutionSpec:
        """The spec with every default and `auto` filled in, as it is saved. Needs `prepare`."""
        return self.spec.model_copy(update={"config": self.config.model_dump(mode="json")})

    def make_save_contents(self) -> SaveContents:
        """What rides on a save of this step besides the state. Called right before each save.

        May wait for the device, and raise `DivergedError` if the state must not be saved.
        """
        return SaveContents()

    @property
    def report(self) -> JobReport:
        """What the job keeps beside its state, and tells at its end; nothing by default. Needs `prepare`."""
        return JobReport()

    def result(self) -> JsonObject:
        """The content of `result.json`. Called at the end."""
        return {"step": self.step, **self.report.result(self.step), "fingerprint": compute_fingerprint(self.state)}

    # The life of a job.

    @property
    def done(self) -> bool:
        """Whether the job reached its end, now or in an earlier attempt."""
        return is_done(self.store, lambda: self.total_steps)

    def __call__(self, hosts: Hosts | None = None, stop: StopNotice | None = None, clock: Clock | None = None) -> None:
        """Done? Then nothing. Else: barrier, restore or init, `run`, final save, `result.json`, barrier."""
        hosts, stop, clock = hosts or Hosts.single_process(), stop or StopNotice(), clock or Clock()
        found = IncidentRecorder()
        watch = Watchdog(hosts, self.spec.deadlines, clock, found.on_verdict, found.on_straggler, found.on_progress)
        with watch as progress:
            if hosts.run_on_main(self.validate_directory):
                if hosts.is_main:
                    say(f"{self.spec.name}: done, nothing to do")
                return
            with progress.report_phase(SET_UP):
                found.attempt = self.claim_directory(hosts, stop, progress)
            with self.attempt.record_outcome():
                try:
                    self.prepare_and_restore()
                    self.run()
                    with progress.report_phase(END):
                        self._finish()
                except (DivergedError, HookError, MiscountError, StateError):
                    self.checkpointer.settle()  # what was good may still be on its way to the disk
                    raise
                finally:
                    clock.enter(TimeBucket.SHUTDOWN)
                    self.compile_cache.close(DRAIN_SECONDS)

    def claim_directory(self, hosts: Hosts, stop: StopNotice, progress: Progress) -> Attempt:
        """Check all that can be checked, and take the next attempt: from here on every earlier one is fenced."""
        self.setup(hosts)
        identity, abstract = compute_trajectory(self.spec, self.config), self.abstract_state()
        hosts.run_on_main(lambda: self.validate_checkpoints(abstract))
        validate_leaves(abstract)
        attempt = claim_attempt(self.store, self.document, self.spec, identity, hosts, stop, progress, type(self))
        self.attempt = attempt
        stop.on_idle_exit = lambda: attempt.record_idle_exit(self.step)
        with self.document.errors_at("checkpoint.local_directory"):
            self.checkpointer = Checkpointer(attempt, self.spec, self.identity(), abstract)
        devices = {"devices": jax.device_count(), "device_kind": jax.devices()[0].device_kind}
        attempt.start(self.spec.name, total_steps=self.total_steps, **devices)
        self.compile_cache.publish(attempt.fence.check, hosts.process_id)
        return attempt

    def prepare_and_restore(self) -> None:
        """Compile, then restore or init: after it `run` may make its first step."""
        attempt, started = self.attempt, time.monotonic()
        with attempt.progress.report_phase(COMPILE):
            self.prepare()
        seconds = round(time.monotonic() - started, 4)
        attempt.record("prepare", None, seconds=seconds, **self.compile_cache.get_counts())
        with attempt.progress.report_phase(RESTORE):
            self._restore_or_init()
        attempt.progress.report_step(self.step)

    def validate_directory(self) -> bool:
        """Refuse a directory that cannot be written or is another job's; whether the job is done. Main host only."""
        identity = compute_trajectory(self.spec, self.config)
        validate_directory(
            self.store, self.spec.name, RunIdentity(self.document, self.config, identity, self.unread_keys)
        )
        return self.done

    def validate_checkpoints(self, abstract: Any = None) -> None:
        """Those of the directory; where it has none, weights that do not fit `abstract`. Main host, after `setup`."""
        claimant = RunIdentity(self.document, self.config, self.identity(), self.unread_keys)
        if not validate_checkpoints(self.store, claimant):
            validate_init_from(
                self.document, self.spec.checkpoint.initial_weights, self.family, lambda: self.weights(abstract)
            )

    def _restore_or_init(self) -> None:
        """Take up the newest good checkpoint, or begin at step 0, and save the resolved spec."""
        attempt, started = self.attempt, time.monotonic()
        found = self.checkpointer.restore(lambda attachments: self.report.find_problem(attachments))
        if found is None:
            self.state, rule = self.init_state(), self.spec.checkpoint.initial_weights
            if rule is not None:
                whole = self.weights(self.state)
                weights = load_init_from(self.document, rule, self.family, whole, self.checkpointer, attempt)
                self.state = self.replace_weights(self.state, weights)
            event, details = "init", {}
        else:
            self.state, self.step = found.state, found.manifest.step
            event, details = "restore", {"tier": found.tier}
        digest, seconds = compute_fingerprint(self.state), round(time.monotonic() - started, 4)
        attempt.record(event, self.step, seconds=seconds, fingerprint=digest, **details)
        if attempt.hosts.is_main:
            self.store.write("spec.yaml", dump_spec(self.resolved_spec()).encode())
        self.checkpointer.begin(self.state, self.step)
        self.report.resume(self.step, *((found.attachments, found.manifest.carry) if found is not None else ({}, None)))

    def _finish(self) -> None:
        validate_end(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        self.save()
        self.checkpointer.wait(self.step)
        result = self.result()
        self.attempt.finish(self.step, result)
        self.checkpointer.close()
        self.attempt.print_end(self.spec.name, self.step, result["fingerprint"], self.report.format_next_steps())

    # What a job calls.

    def save_or_stop(self) -> None:
        """After a step: save if it is time, and if the job was asked to stop, save and raise `PreemptedError`."""
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        self.attempt.progress.report_step(self.step)
        is_stopping = self.attempt.stop.poll()
        self.checkpointer.raise_if_hopeless()
        if is_stopping:
            self.save()
            self.checkpointer.wait(self.step)
            self.attempt.record("preempt", self.step, saved=True)
            self.attempt.hosts.barrier()
            raise PreemptedError(f"stopped as asked; step {self.step} is saved; run the same command again")
        kind = self.checkpointer.due(self.step, self.total_steps)
        if kind is not None:
            self.state = self.checkpointer.save(self.state, self.step, self.make_save_contents(), kind)

    def save(self, suffix: str | os.PathLike[str] | None = None) -> None:
        """Begin to save the state as `checkpoints/<suffix>`, by default the step; durable once committed.

        Only steps are resumed from and retained by count; a checkpoint of another name is kept until deleted by hand.
        Raises `InvalidError` if `suffix` cannot be the name of a checkpoint.
        """
        validate_step(self.spec.job, self.step, self.attempt.progress.step, self.total_steps)
        name = None if suffix is None else os.fspath(suffix)
        self.state = self.checkpointer.save(self.state, self.step, self.make_save_contents(), SaveKind.REQUIRED, name)

    def load(self, suffix: str | os.PathLike[str]) -> None:
        """Replace the state and the step by those of `checkpoints/<suffix>`. Raises `ResumeError` if it is not good."""
        found = self.checkpointer.load(os.fspath(suffix))
        self.state, self.step = found.state, found.manifest.step
        self.attempt.progress.report_step(self.step)
