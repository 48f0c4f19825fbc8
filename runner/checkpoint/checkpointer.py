"""The checkpoints of one attempt, in five verbs: restore, load, save, wait, close. All that a job sees of them.

Composes what the spec asks for: where arrays are written, the fast tier, when to save, what stays.
"""

import re
import shutil
from typing import Any

import jax
import numpy as np

from runner import console
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.leaves import encode_leaves, flatten_with_names, make_abstract, validate_leaf_forms
from runner.checkpoint.manifest import RETIRED_SUFFIX, Manifest
from runner.checkpoint.policy import Retention, SavePolicy, compute_best_interval_seconds
from runner.checkpoint.restore import AttachmentCheck, RestoredState, Restorer
from runner.checkpoint.save import SaveContents, SaveKind, Saver
from runner.checkpoint.weight_names import map_weight_names
from runner.checkpoint.writers import ArrayWriter, BlockWriter, OrbaxWriter
from runner.distributed.agreement import Hosts
from runner.distributed.clock import SAVE
from runner.errors import InvalidError, StorageError
from runner.records import PARAMS
from runner.run.attempt import Attempt
from runner.spec import CheckpointConfig, ExecutionSpec, Trajectory
from runner.storage import default_cache_directory, local_directory, open_store, split_checkpoint

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


class Checkpointer:
    """Made and called on every host, from the training thread alone.

    `abstract` has the shape, dtype and sharding of every leaf of the state, `identity` what defines its trajectory.
    Raises `InvalidError` on every host if the fast tier of one cannot hold its parts.
    """

    def __init__(self, attempt: Attempt, spec: ExecutionSpec, identity: Trajectory, abstract: Any):
        rule = spec.checkpoint
        self._attempt, self._rule, self._identity, self._abstract = attempt, rule, identity, abstract
        fast = _open_fast_tier(rule, attempt.hosts, attempt.run_id, abstract)
        self._retention = Retention(
            attempt, rule.keep_last, rule.keep_every_steps, None if rule.keep_best is None else rule.keep_best.mode
        )
        self._saver = Saver(attempt, _open_writer(attempt), fast, rule.max_unsaved_minutes * 60, self._after_commit)
        self._restorer = Restorer(attempt, fast)
        self._policy = SavePolicy(rule, spec.logging.every_steps, attempt.hosts.agree)
        self._asked_step: int | None = None
        self._saved_step: int | None = None  # that is durable, or on its way to be
        self._said_interval_seconds = 1e-9
        self._has_warned_of_grace = False

    def restore(self, problem_with: AttachmentCheck) -> RestoredState | None:
        """The newest good state, in whichever tier; None if nothing was ever committed. See `Restorer.restore`."""
        found = self._restorer.restore(self._abstract, self._identity, problem_with)
        self._saver.reads_back = found is None
        if found is not None:
            step = found.manifest.step
            self._warn_of_grace(found.manifest.seconds, step)
            self._attempt.say(f"restored step {step} from the {found.tier} tier")
            self._attempt.report_environment_changes(found.manifest.environment, step)
            if found.tier == "durable":
                self._saved_step = found.manifest.step
        return found

    def begin(self, state: Any, step: int) -> None:
        """Before the first step: delete what a killed attempt has left undeleted, and start the clock.

        Raises `StateError` if `state` has another form than `abstract`: it could not be restored.
        """
        validate_leaf_forms(state, self._abstract, step)
        if self._attempt.hosts.is_main:
            self._retention.look()
        self._policy.saved()

    def load(self, name: str) -> RestoredState:
        """The checkpoint `name` of this run. Raises `ResumeError` if it is not good."""
        return self._restorer.load(name, self._abstract)

    def load_weights(self, source: str, weights: Any, which: str = PARAMS) -> Any:
        """Leaves like those of `weights` alone, from another run's directory or one of its checkpoints.

        `which` are those that were trained, or an average of them by its name, which comes in the types of `weights`.
        """
        directory, name = split_checkpoint(source)
        wanted = {of: make_abstract(leaf) for of, leaf in flatten_with_names(weights).items()}
        saved = map_weight_names(which, wanted)
        abstract = {saved[of]: leaf if saved[of] == of else _wide(leaf) for of, leaf in wanted.items()}
        found = self._restorer.restore_weights(open_store(directory), name, abstract)
        called = "weights" if which == PARAMS else which
        self._attempt.say(f"{called} of step {found.manifest.step} taken from {source}")
        leaves = {of: found.state[saved[of]] for of in wanted}
        narrow = [leaf if saved[of] == of else leaf.astype(wanted[of].dtype) for of, leaf in leaves.items()]
        return jax.tree.unflatten(jax.tree.structure(weights), narrow)

    def ask_for(self, step: int) -> None:
        """A save of `step` is due, whatever else."""
        self._asked_step = step

    def due(self, step: int, last_step: int) -> SaveKind | None:
        """Which save is due at `step`, if any."""
        if step == self._asked_step:
            return SaveKind.REQUIRED
        interval_seconds = 0.0 if self._rule.every is None else self._best_interval_seconds(step)
        return self._policy.due(step, last_step, interval_seconds)

    def save(self, state: Any, step: int, payload: SaveContents, kind: SaveKind, name: str | None = None) -> Any:
        """Begin to save `state` as `checkpoints/<name>`, by default the step; returns the state to go on with.

        Only what is returned may be donated. A step that is saved already is not saved again. Raises `StateError`, with
        nothing written, if a restore would refuse this state, and `InvalidError` if `name` cannot be a checkpoint's.
        """
        if name is None and kind is not SaveKind.FAST and self._saved_step == step:
            return state
        _check_name(name, step)
        validate_leaf_forms(state, self._abstract, step)
        here = self._attempt.environment or None
        job, identity = self._attempt.run_id, self._identity
        draft = Manifest(name=name or str(step), step=step, job=job, identity=identity, environment=here)
        with self._attempt.progress.report_phase(SAVE):
            is_durable, state = self._saver.save(draft, state, payload, kind)
        self._warn_of_grace(self._saver.durable_seconds, step)
        if is_durable:
            self._policy.saved()
            if draft.is_of_a_step:
                self._saved_step = step
        return state

    def wait(self, step: int) -> None:
        """Block until what was saved last is committed. Raises `StorageError` if it could not be."""
        with self._attempt.progress.report_phase(SAVE):
            is_committed = self._saver.wait()
        if not is_committed:
            raise StorageError(f"the state of step {step} could not be saved; run the same command again")

    def settle(self) -> None:
        """Block until the save on its way, if there is one, is committed or given up."""
        with self._attempt.progress.report_phase(SAVE):
            self._saver.wait()

    def raise_if_hopeless(self) -> None:
        """Raise if the state was found corrupt, or nothing could be committed for too long. Never waits."""
        self._saver.raise_if_hopeless()

    def close(self) -> None:
        """Stop the background threads. What was saved must have been waited for."""
        self._saver.close()

    def _after_commit(self, manifest: Manifest) -> None:
        """In the background."""
        if self._attempt.hosts.is_main and manifest.is_of_a_step:
            self._retention.apply(manifest)

    def _best_interval_seconds(self, step: int) -> float:
        """The interval of `every: auto`; none before the first save, which measures what one costs."""
        saver, hours = self._saver, self._rule.mean_time_between_failures_hours
        if saver.stall_seconds is None:
            return 0.0
        seconds = compute_best_interval_seconds(saver.stall_seconds, saver.durable_seconds, hours)
        if not 0.5 < seconds / self._said_interval_seconds < 2:
            self._said_interval_seconds = seconds
            self._attempt.say(
                f"checkpoint.every: auto: every {seconds:.1f} s, for a save that stalls {saver.stall_seconds:.3f} s "
                f"and {hours:g} hours between failures"
            )
            self._attempt.record("cadence", step, seconds=round(seconds, 3), stall_seconds=saver.stall_seconds)
        return seconds

    def _warn_of_grace(self, save_seconds: float, step: int) -> None:
        """Say it, once, if a save takes longer than the engine gives after SIGTERM."""
        grace_seconds = self._rule.grace_seconds
        if grace_seconds is None or save_seconds <= grace_seconds or self._has_warned_of_grace:
            return
        self._has_warned_of_grace = True
        reason = (
            f"a save takes {save_seconds:.1f} s, checkpoint.grace_seconds is {grace_seconds:g}: a preemption may cost "
            "up to a save interval; give more grace, or add a fast tier (checkpoint.local_directory)"
        )
        if self._attempt.hosts.is_main:
            console.warn(reason)
        self._attempt.record("grace", step, reason=reason)


def _check_name(name: str | None, step: int) -> None:
    """Raise `InvalidError` unless `name` is one, and no other step's."""
    if name is None or name == str(step):
        return
    if not _NAME.fullmatch(name) or name.endswith(RETIRED_SUFFIX):
        raise InvalidError(
            f"a checkpoint cannot be called {name!r}: a name is 1 to 100 letters, digits, `._-`, begins with a letter "
            f"or a digit, and does not end in {RETIRED_SUFFIX}"
        )
    if name.isdecimal():
        raise InvalidError(f"step {step} cannot be saved as {name!r}: numbers are names of steps")


def _open_writer(attempt: Attempt) -> ArrayWriter:
    if attempt.store.root is not None:
        return OrbaxWriter(attempt.store, attempt.hosts)
    staging = default_cache_directory() / "staging" / f"{attempt.run_id}.{attempt.hosts.process_id}"
    shutil.rmtree(staging, ignore_errors=True)  # of an attempt that was killed
    return BlockWriter(attempt.store, attempt.hosts, staging)


def _open_fast_tier(rule: CheckpointConfig, hosts: Hosts, run_id: str, abstract: Any) -> FastTier | None:
    if rule.local_directory is None:
        return None
    fast = FastTier(local_directory(rule.local_directory) / run_id / str(hosts.process_id))
    try:
        problem = fast.room(sum(_own_bytes(leaf) for leaf in encode_leaves(flatten_with_names(abstract)).values()))
    except OSError as error:
        problem = f"cannot be written: {error}"
    problem = next((text for text in hosts.gather(problem) if text is not None), None)
    if problem is not None:
        raise InvalidError(problem)
    return fast


def _own_bytes(leaf: Any) -> int:
    """Bytes of an abstract array that this process holds, each element once."""
    shard = leaf.sharding.shard_shape(leaf.shape)
    blocks = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
    return int(np.prod(shard)) * leaf.dtype.itemsize * len(blocks)


def _wide(leaf: Any) -> Any:
    """As an average has it: in float32."""
    return jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding)
