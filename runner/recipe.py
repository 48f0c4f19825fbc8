"""Recipe: what a job says about its state, its steps and its identity. `RestoreableJob` adds how it runs.

Every method is called on every host, unless its docstring says process 0 only. `runner.lifecycle` calls them, in this
order: `run_earlier_jobs`, `setup`, `prepare`, `init_state` or a restore, `run`, `result`. A job whose attempts do more
than advance the state, such as a trainer, has a `JobSession` of its own.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, ClassVar

import jax

from runner.attempts.attempt import Attempt
from runner.attempts.compile_cache import CompileCache
from runner.attempts.fence import RunIdentity, is_done
from runner.attempts.layout import open_directory
from runner.checkpoint.fingerprint import compute_fingerprint
from runner.checkpoint.leaves import init_sharded, replicate_abstract
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.save import Checkpointer, SaveContents
from runner.distributed.agreement import Hosts
from runner.distributed.clock import Clock
from runner.distributed.preemption import StopNotice
from runner.huggingface.mapping import Family
from runner.spec import (
    Document,
    ExecutionSpec,
    JobConfig,
    Trajectory,
    compute_trajectory,
    list_former_paths,
    make_document,
    validate_config,
    validate_hooks,
)
from runner.storage import JsonObject, Store


class JobSession:
    """Work of a job in an attempt besides advancing its state. This base does nothing; see `runner.session`.

    The methods are called in this order, on every host, unless their docstring says process 0 only.
    """

    def validate_newest(self, newest: Manifest) -> None:
        """Raise `ResumeError` if the run cannot end where the spec ends it. Process 0 only.

        `newest` is its newest checkpoint, of a step that is not beyond the end.
        """

    def describe_wait(self) -> str:
        """Return the call into user code that has not returned, for the report of a hang; empty by default.

        Called on another thread, so it must not wait for anything.
        """
        return ""

    def before_restore(self) -> None:
        """Complete what a killed attempt has begun, before a state is chosen."""

    def find_problem(self, attachments: dict[str, bytes]) -> str | None:
        """Return the reason why the job cannot continue from a fast-tier state with these attachments; None if it can.

        Called on process 0 only, while an older state can still be chosen.
        """
        return None

    def continue_program(self, manifest: Manifest, is_start: bool) -> None:
        """Compare the program of the job with the one that has made a restored checkpoint.

        `is_start` is False if the running job goes back to the checkpoint.
        """

    def on_restored(self) -> None:
        """Adapt the job to its state, which was restored or initialised, or loaded by the running job."""

    def resume(self, step: int, attachments: dict[str, bytes], carry: JsonObject | None) -> None:
        """Continue at `step`. Called before the first step, and after each `load` of the running job.

        `attachments` are files that the fast tier saved with the state. `carry` is that of the checkpoint's manifest;
        None if it has none, empty for a fork of such a checkpoint.
        """

    def adopt_parent(self, parent: Store) -> None:
        """Copy the files that a fork needs from its parent's directory, besides the checkpoint. Process 0 only."""

    def after_restore(self) -> None:
        """Do what needs the whole directory of a run that begins or goes on, right before `run`."""

    def after_load(self) -> None:
        """Reset what depends on later steps, after the running job has gone back to a checkpoint."""

    def result(self, step: int) -> JsonObject:
        """Return the keys of `result.json` besides step and fingerprint. Called at the end."""
        return {}

    def format_next_steps(self) -> Sequence[str]:
        """Return lines that tell the user what to do with the finished run; printed last."""
        return ()


class Recipe:
    """Statements of what a job is. A subclass of `RestoreableJob` overrides those that differ.

    Attributes:
        Config: pydantic model of the spec's `config`, which a subclass overrides.
        needs_topology: True if the job needs a `topology`; the default is used if the spec has none.
        writes_own_rows: True if the rows of `metrics.jsonl` are those of `log_metrics`.
        former_paths: paths (`module:Class`) that this class had earlier, whose runs it continues. Not inherited.
        attempt: the running attempt; exists once the directory is claimed.
        checkpointer: saves and restores; exists once the directory is claimed.
        session: what the job does in an attempt besides advancing its state.
        document: where the spec came from, for errors with a line.
        given_document: `document` before `complete_document`.
        spec: the spec.
        config: `spec.config`, an instance of `Config`.
        store: the run's directory.
        compile_cache: cache of compiled programs.
        lineage: origin of a run that was forked, once its directory is claimed; see `Attempt.lineage`.
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

        `document` says where the spec came from; by default it is made from the spec. Raises `SpecError`, which names
        file, line and key, if the spec is wrong.
        """
        document = make_document(spec) if document is None else document
        self.given_document = document
        self.document = self.complete_document(document, spec)
        self.spec = validate_hooks(self.document, spec, type(self))
        # `Any`, since only the subclass knows the fields of its `Config`.
        self.config: Any = validate_config(self.document, self.Config)
        self.store = open_directory(self.document, spec)
        if self.spec.checkpoint.every_epochs is not None and (problem := self.find_epoch_problem()):
            raise self.document.error("checkpoint.every_epochs", problem)
        self.compile_cache = CompileCache(self.store if spec.shares_compiled_programs else None)
        self.lineage: JsonObject = {}
        self.session = JobSession()
        self.state: Any = None
        self.step = 0

    @classmethod
    def complete_document(cls, document: Document, spec: ExecutionSpec) -> Document:
        """Return the document with keys of `config` filled in that follow from its other keys; by default unchanged."""
        return document

    @property
    def total_steps(self) -> int:
        """Step at which the job is done; by default the config's."""
        return int(self.config.total_steps)

    def find_epoch_problem(self) -> str | None:
        """Return why the job has no epochs of data by which it could save; None if it has `steps_per_epoch`."""
        return f"{type(self).__name__} has no epochs; use every_steps or every_minutes"

    @property
    def steps_per_epoch(self) -> Fraction:
        """Steps in which the training data are read once. Needs `setup`, and a job without `find_epoch_problem`."""
        raise NotImplementedError

    @property
    def done(self) -> bool:
        """True if the job has reached its end, now or in an earlier attempt."""
        return is_done(self.store, lambda: self.total_steps)

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

    def validate_export(self) -> None:
        """Raise `SpecError` if `export` could not export this run. Process 0 only; called at a start and in plans."""

    def export(self) -> None:
        """Export the finished run, unless that was done. Process 0 only; called at each start of a finished run too."""

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
        return RunIdentity(self.document, self.config, identity, self.unread_keys, self.former_values)

    def list_spec_comments(self) -> list[str]:
        """Return lines of comment above the resolved spec, about what its keys do not say."""
        return []

    def resolved_spec(self) -> ExecutionSpec:
        """Return the spec with every default and `auto` filled in, as it is written to `spec.yaml`. Needs `prepare`."""
        spec = self.spec.model_copy(update={"config": self.config.model_dump(mode="json")})
        fork = spec.checkpoint.fork_from
        # Before the restore it is not known to which step `newest` or `best` refers.
        if fork is None or not self.lineage:
            return spec
        fork = fork.model_copy(update={"step": self.lineage["step"]})
        return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"fork_from": fork})})

    def make_save_contents(self) -> SaveContents:
        """Return the contents of a save besides the state, such as its metric. Called right before each save.

        May wait for the device. Raises `DivergedError` if the state must not be saved.
        """
        return SaveContents()

    def result(self) -> JsonObject:
        """Return the content of `result.json`. Called at the end."""
        return {"step": self.step, **self.session.result(self.step), "fingerprint": compute_fingerprint(self.state)}
