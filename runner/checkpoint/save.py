"""Save and commit: the protocol that makes a checkpoint appear atomically.

A checkpoint is `checkpoints/<name>/manifest.json` and the files below `checkpoints/<name>/arrays.<attempt>/`. The name
is the number of its step, or a name that the job chose. A directory without a manifest is not a checkpoint, whatever
it holds.

`Checkpointer.save` is called on every host with the same step. It blocks training only for the first two points:

1. **Copy.** The writer copies the arrays off the device and returns; it writes them in the background. Its target
   directory is named by the attempt. A *zombie*, a process of an earlier attempt that was suspended and continues late,
   therefore never writes into files of this attempt. (On a CPU the writer copies nothing: it reads the arrays in
   place, and training continues in other memory, see `DoubleBuffer`.)
2. **Fingerprint.** The digest of every leaf is dispatched on the devices, from the very arrays that are being saved.
3. **Durable.** In the background, every host's part becomes durable, and each process reads the part of another one
   back. In the first save of an attempt each also compares the bits that it would restore with those on its devices.
4. **Commit.** Process 0 puts size and CRC-32C of each file into the manifest, checks that its attempt is still the
   newest, and creates `manifest.json`, which can be created only once. That instant is the commit.
5. **Retention.** Only then are older checkpoints deleted: first the manifest, then the files, and never the newest.
   A separate thread does this, so that the next save does not wait for it.

A zombie may have passed the check of point 4 and been suspended right before it creates the manifest. A newer attempt
therefore retires every uncommitted step when it starts (`manifest.retire_uncommitted`). Retiring and committing a step
exclude each other, by an atomic operation of the store. So the checkpoint of the zombie is either complete and valid,
or it can never be committed.

In a bucket, an optional save that becomes due while another one is in progress is skipped, so that training does not
wait for it, and the event ledger records that; a save at a stop, at the end or on request waits. A save that fails is
reported and training continues. If `max_unsaved_minutes` pass after the start of a save without any commit, the run
ends with exit code 76.
"""

import functools
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp

from runner.attempts.attempt import Attempt
from runner.checkpoint import fingerprint
from runner.checkpoint.arrays import WRITE_ERRORS, ArrayWriter, FinishWrite, make_bits_check, make_writer
from runner.checkpoint.blocks import Blocks, copy_to_host
from runner.checkpoint.fast_tier import FastTier, UnusableTierError, open_fast_tier
from runner.checkpoint.leaves import (
    Leaves,
    copy_offloaded,
    encode_leaves,
    flatten_with_names,
    make_abstract,
    validate_leaf_forms,
)
from runner.checkpoint.manifest import (
    ARRAYS,
    CHECKPOINTS,
    RETIRED_SUFFIX,
    Manifest,
    commit,
    read_committed,
    read_newest_manifest,
)
from runner.checkpoint.policy import (
    Retention,
    SaveKind,
    SavePolicy,
    compute_best_interval_seconds,
    count_failures,
    estimate_hours_between_failures,
    find_replica_advice,
)
from runner.checkpoint.restore import AttachmentCheck, RestoredState, load_checkpoint, quarantine, restore_newest
from runner.console import warn
from runner.distributed.clock import SAVE
from runner.errors import DataError, FencedError, InvalidError, RemovedError, StorageError, format_error
from runner.spec import CheckpointConfig, Trajectory
from runner.storage import JsonObject, iterate_log, parse_number

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class SaveContents:
    """Contents of a save besides the state, and callbacks that belong to it.

    Attributes:
        metric: the value that `checkpoint.keep_best` compares; None if this step has none.
        roll_back_to: the newest checkpoint up to this step is kept as long as this save is the newest.
        features: for the manifest: fields of features of the job, by key; None if there are none.
        topology: for the manifest: the hardware, and what was chosen for it.
        carry: for the manifest: sums over the steps since the last row of metrics, for the next row; None if there are
            none.
        check: raises `DataError` if the steps since the last commit must not be saved. Called in the background, on
            every host.
        attachments: returns small files to store beside a state in the fast tier. Called on process 0.
        flush: makes files durable that must not be older than a committed checkpoint, such as metrics. Called in the
            background; may raise `OSError`.
        announce: called before a step is written into the run's directory, on every host, by the training thread.
    """

    metric: float | None = None
    roll_back_to: int | None = None
    features: JsonObject | None = None
    topology: JsonObject | None = None
    carry: JsonObject | None = None
    check: Callable[[], None] = lambda: None
    attachments: Callable[[], dict[str, bytes]] = dict
    flush: Callable[[], None] = lambda: None
    announce: Callable[[], None] = lambda: None


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(leaves: list[jax.Array], spare: list[jax.Array] | None) -> list[jax.Array]:
    """Copy `leaves` into the memory of `spare`, or into fresh memory if it is None. XLA uses all threads of a CPU."""
    return [jnp.copy(leaf) for leaf in leaves]


class DoubleBuffer:
    """Second buffer for the state, on CPUs only, so that training continues while a save reads the first.

    On a CPU a save reads the arrays in place, so the next step could not reuse their memory although they are donated
    to it: it would copy them, on a single thread. Therefore `swap` copies the state into a second buffer, with all
    threads, and training continues there. The two buffers alternate: the buffer that one save reads becomes the target
    of the copy at the next save. If the earlier save has not finished reading by then, fresh memory is allocated
    instead. On other devices a save copies the arrays to the host first, and no second buffer is needed.
    """

    def __init__(self) -> None:
        self.is_needed = jax.default_backend() == "cpu"
        self._spare: list[jax.Array] | None = None
        self._reader: Future[Any] | None = None  # the save that may still read the spare memory

    def swap(self, state: Any, reader: Future[Any] | None) -> Any:
        """Return a copy of the state to continue training with, in memory that its save, `reader`, does not read."""
        if not self.is_needed:
            return state
        spare = self._spare if self._reader is None or self._reader.done() else None
        leaves, structure = jax.tree.flatten(state)
        copies = list(leaves)
        for places in fingerprint.make_chunks(leaves):
            memory = None if spare is None else [spare[place] for place in places]
            for place, leaf in zip(places, _copy([leaves[place] for place in places], memory), strict=True):
                copies[place] = leaf
        self._spare, self._reader = leaves, reader
        return jax.tree.unflatten(structure, copies)


@dataclass
class _Save:
    """Save in progress: everything that its background part needs."""

    manifest: Manifest  # without digests and files, which are not known yet
    layout: fingerprint.LeafLayout
    contents: SaveContents
    started_seconds: float  # by the monotonic clock
    attachments: dict[str, bytes]  # for the fast tier
    leaves: Leaves | None = None  # abstract, as they are stored, if their bits are read back
    finish: FinishWrite | None = None
    digests: list[jax.Array] = field(default_factory=list)  # the device may still be computing them

    @property
    def directory(self) -> str:
        return f"{CHECKPOINTS}/{self.manifest.name}"

    @property
    def target(self) -> str:
        return f"{self.directory}/{self.manifest.arrays}"

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self.started_seconds, 4)


class Checkpointer:
    """Checkpoints of one attempt: restore, save policy, save, commit, retention.

    Made and called on every host, from the training thread alone. At most one durable save is in progress at a time.
    `abstract` has shape, dtype and sharding of every leaf of the state; `is_own` returns True for a trajectory, saved
    at a step, that `identity` continues, by default for an equal one. The constructor raises `InvalidError`, on every
    host, if the fast tier of one cannot hold its parts, and the run has saved nothing.

    Attributes:
        saved_step: newest step whose durable save has begun in this attempt, or with which the attempt has begun.
    """

    def __init__(
        self,
        attempt: Attempt,
        config: CheckpointConfig,
        logging_every_steps: int,
        identity: Trajectory,
        abstract: Any,
        writer: ArrayWriter | None = None,
        is_own: Callable[[Trajectory, int], bool] | None = None,
        steps_per_epoch: Fraction | None = None,
    ):
        self._is_own = is_own or (lambda saved, step: saved == identity)
        self._attempt, self._config, self._identity, self._abstract = attempt, config, identity, abstract
        self._fast_tier: FastTier | None = None
        self._tier_problem: str | None = None  # why this attempt has no fast tier although the spec has
        try:
            self._fast_tier = open_fast_tier(attempt, config, encode_leaves(flatten_with_names(abstract)))
        except UnusableTierError as error:  # on every host
            # A disk that became full or read-only must not keep a run from going on: without it preemptions only cost
            # more. A run that has saved nothing is refused: its spec may be wrong, or its only states may be in the
            # fast tier.
            if not attempt.hosts.run_on_main(lambda: read_newest_manifest(attempt.store) is not None):
                raise
            self._tier_problem = str(error)
        self._writer = writer or make_writer(attempt.store, attempt.hosts, attempt.run_id)
        self._policy = SavePolicy(config, logging_every_steps, attempt.hosts.agree, steps_per_epoch=steps_per_epoch)
        best = None if config.keep_best is None else config.keep_best.mode
        self._retention = Retention(attempt, config.keep_last, config.keep_every_steps, best)
        self._max_unsaved_seconds = config.max_unsaved_minutes * 60

        self._buffer = DoubleBuffer()
        # One thread each, so that saves are committed in the order in which they were started.
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._fast_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fast")
        self._pending: Future[bool] | None = None
        self._pending_fast: Future[None] | None = None

        self._checking = threading.Lock()
        self._refusal: str | None = None  # reason of `SaveContents.check` on this process
        self._reads_bits_back = True  # until the first commit of the attempt
        self._has_committed = False  # the run, in this attempt or an earlier one
        self._num_returns = 0  # of `go_back` in a bucket, which may have left arrays of later steps
        self._requested_step: int | None = None
        self.saved_step: int | None = None
        self._pending_step: int | None = None  # the step of `_pending`; None for a checkpoint with another name
        self._unsaved_since_seconds: float | None = None  # start of the first save since the last commit
        self._stall_seconds: float | None = None  # time for which the last durable save blocked training
        self._durable_seconds = 0.0  # from the start of the last durable save to its commit
        self._reported_interval_seconds = 1e-9
        # With `every: auto` process 0 decides, which also reads the ledger.
        self._hours_between_failures = config.mean_time_between_failures_hours or estimate_hours_between_failures(
            jax.device_count()
        )
        self._has_warned_of_grace = False

    def set_identity(self, identity: Trajectory) -> None:
        """Save this trajectory with later states. Called between two steps."""
        self._identity = identity

    # Restore.

    def restore(self, find_attachment_problem: AttachmentCheck) -> RestoredState | None:
        """Return the newest good state of this run; None if nothing was ever committed. See `restore_newest`."""
        if self._tier_problem is not None:
            if self._attempt.hosts.is_main:
                warn(f"checkpoint.local_directory: {self._tier_problem}; this attempt continues without the fast tier")
            self._attempt.record("fast_tier_off", None, reason=self._tier_problem)
        found = restore_newest(self._attempt, self._fast_tier, self._abstract, self._is_own, find_attachment_problem)
        self._has_committed = found is not None
        if found is not None:
            step = found.manifest.step
            self._warn_of_grace(found.manifest.seconds, step)
            fetched = ", ".join(map(str, found.fetched))
            source = f", the part of process {fetched} from a replica" if fetched else ""
            tier = "fast tier" if found.tier == "fast" else "run's directory"
            self._attempt.say(f"restored step {step} from the {tier}{source}")
            self._attempt.report_environment_changes(found.manifest.environment, step)
            self._attempt.lineage.update(found.manifest.lineage or {})
            # A step that is only in the fast tier is not saved yet: it is lost with the machine.
            if found.is_committed:
                self.saved_step = step
        return found

    def load(self, name: str) -> RestoredState:
        """Return the checkpoint `name` of this run, which a save in progress may be about to commit.

        Raises `InvalidError` if no checkpoint can have that name, and `ResumeError` if it is not good.
        """
        if parse_number(name) is None:
            _validate_name(name)
        self.wait_until_finished()
        return load_checkpoint(self._attempt, name, self._abstract)

    def go_back(self, found: RestoredState) -> Any:
        """Continue from a state of `load`, and return the state to train on with: a restart must not resume later.

        Later checkpoints are moved to `quarantine/`. The state is saved if no other would be left; raises
        `StorageError` if it could not be.
        """
        step, hosts, state = found.manifest.step, self._attempt.hosts, found.state
        self._wait_for_fast_save()
        self._requested_step = None
        self._num_returns += self._attempt.store.root is None
        # Later checkpoints are moved only when there is an earlier one, so that a kill in between leaves one to resume
        # from. Retention must not count them any more, or it would delete this step as an old one.
        later = self._retention.forget_after(step) if hosts.is_main else []
        committed = hosts.run_on_main(lambda: list(read_committed(self._attempt.store)))
        self.saved_step = step if step in committed else None
        if committed and min(committed) > step:
            manifest = found.manifest
            contents = SaveContents(
                manifest.metric, manifest.roll_back_to, manifest.features, manifest.topology, manifest.carry
            )
            state = self.save(state, step, contents, SaveKind.REQUIRED)
            self.wait_until_committed(step)
        if self._fast_tier is not None:
            self._fast_tier.withdraw_after(step)
        if hosts.is_main:
            for other in later:
                quarantine(self._attempt, other, f"checkpoint {found.manifest.name}, of step {step}, was loaded")
        hosts.barrier()
        self._policy.record_save()
        return state

    def discard_after(self, step: int, reason: str) -> bool:
        """Quarantine the checkpoints of steps after `step`, and delete such states of the fast tier.

        Called on every host, right before the job ends. Changes nothing and returns False if no other checkpoint would
        be left.
        """
        attempt = self._attempt
        self.wait_until_finished()
        self._wait_for_fast_save()
        steps = attempt.hosts.run_on_main(lambda: sorted(read_committed(attempt.store)))
        if all(each > step for each in steps):
            return False
        if self._fast_tier is not None:
            self._fast_tier.withdraw_after(step)
        if attempt.hosts.is_main:
            self._retention.wait()
            for each in steps:
                if each > step:
                    quarantine(attempt, each, reason)
        attempt.hosts.barrier()
        return True

    def _wait_for_fast_save(self) -> None:
        if self._pending_fast is not None:
            self._pending_fast.result()
            self._pending_fast = None

    def begin(self, state: Any, step: int) -> None:
        """Prepare for the first step: delete what a killed attempt should have deleted, and start the clock.

        Raises `StateError` if `state` has another form than `abstract`, so that it could not be restored.
        """
        validate_leaf_forms(state, self._abstract, step)
        if self._attempt.hosts.is_main:
            self._retention.scan()
            if (advice := find_replica_advice(self._attempt.hosts.num_processes, self._config)) is not None:
                warn(f"checkpoint: {advice}")
            if self._config.every is not None and self._config.mean_time_between_failures_hours is None:
                self._worker.submit(self._estimate_hours_between_failures)
        self._policy.record_save()

    def _estimate_hours_between_failures(self) -> None:
        try:
            record = count_failures(iterate_log(self._attempt.store, "events"), self._attempt.number)
        except OSError as error:
            warn(f"checkpoint.every: auto: earlier failures cannot be counted: {format_error(error)}")
        else:
            self._hours_between_failures = estimate_hours_between_failures(jax.device_count(), record)

    def add_metric(self, step: int, metric: float, *, is_end: bool) -> None:
        """Add the metric of a step that was committed without it. Process 0 only, between two steps, after `begin`.

        `is_end` is True if it was measured only because the run ends there.
        """
        # On the thread that commits, so that a save of this step that is in progress is known by then.
        self._worker.submit(self._retention.add_metric, step, metric, is_end=is_end).result()

    # Save policy.

    def request_save(self, step: int) -> None:
        """Make a save due at `step`, regardless of the schedule in the spec."""
        self._requested_step = step

    def find_due_save(self, step: int, last_step: int) -> SaveKind | None:
        """Return the kind of save that is due at `step`, None if none is. The same on every host."""
        if step == self._requested_step:
            return SaveKind.REQUIRED
        interval_seconds = 0.0
        # With `every: auto` the first save is due at once, because it measures the cost of a save.
        if self._config.every is not None and self._stall_seconds is not None:
            hours = self._hours_between_failures
            interval_seconds = compute_best_interval_seconds(self._stall_seconds, self._durable_seconds, hours)
            if not 0.5 < interval_seconds / self._reported_interval_seconds < 2:
                self._reported_interval_seconds = interval_seconds
                self._attempt.say(
                    f"checkpoint.every: auto: every {interval_seconds:.1f} s, for a save that stalls "
                    f"{self._stall_seconds:.3f} s and {hours:.3g} hours between failures"
                )
                seconds = round(interval_seconds, 3)
                self._attempt.record("cadence", step, seconds=seconds, stall_seconds=self._stall_seconds)
        return self._policy.find_due_save(step, last_step, interval_seconds)

    # Save.

    def save(self, state: Any, step: int, contents: SaveContents, kind: SaveKind, name: str | None = None) -> Any:
        """Start saving `state` as `checkpoints/<name>`, by default the step. Called on every host.

        A step that is saved already is not saved again. Waits for an earlier save that is still in progress, unless
        this one is skipped (`_should_skip`).

        Returns:
            The state to continue training with. The caller may donate this one, but not `state`.

        Raises:
            StateError: a restore would refuse this state; nothing was written.
            InvalidError: `name` cannot be the name of a checkpoint.
            FencedError: a newer attempt owns the directory.
        """
        if name is None and kind is not SaveKind.FAST and self.saved_step == step:
            return state
        if name is not None:
            _validate_name(name, step)
        # A state that could not be restored must never become the newest checkpoint.
        validate_leaf_forms(state, self._abstract, step)
        manifest = Manifest(
            name=name or str(step),
            step=step,
            job=self._attempt.run_id,
            identity=self._identity,
            lineage=self._attempt.lineage or None,
            environment=self._attempt.environment or None,
        )
        with self._attempt.progress.report_phase(SAVE):
            is_fast = self._fast_tier is not None and manifest.is_step
            is_durable = kind is not SaveKind.FAST and not self._should_skip(step, kind)
            if is_durable or is_fast:
                state = self._start(manifest, state, contents, is_durable, is_fast)
        self._warn_of_grace(self._durable_seconds, step)
        if is_durable:
            self._policy.record_save()
            if manifest.is_step:
                self.saved_step = step
            self._pending_step = step if manifest.is_step else None
        return state

    def _should_skip(self, step: int, kind: SaveKind) -> bool:
        """Return True if training would have to wait for an earlier save into a bucket, and this one is optional."""
        if kind is SaveKind.REQUIRED or self._attempt.store.root is not None:
            return False
        # The progress of the background differs between hosts, so process 0 decides for all of them.
        if not self._attempt.hosts.agree(self._pending is not None and not self._pending.done()):
            return False
        self._attempt.record("save_left_out", step, reason="an earlier save is still in progress")
        return True

    def _start(self, manifest: Manifest, state: Any, contents: SaveContents, is_durable: bool, is_fast: bool) -> Any:
        """Do points 1 and 2 of the protocol, and start the rest. Returns the state to continue training with."""
        attempt, step = self._attempt, manifest.step
        if is_durable and manifest.is_step:
            contents.announce()

        # Earlier saves must end first, because only one of each kind may be in progress. The local check of the fence
        # costs no network access, and ends a superseded attempt before it writes anything.
        if is_durable:
            self._wait_until_finished(with_deletions=False)
        self._wait_for_fast_save()
        if attempt.hosts.is_main:
            attempt.fence.check_locally()

        started_seconds = time.monotonic()
        if is_durable and self._unsaved_since_seconds is None:
            self._unsaved_since_seconds = started_seconds
        manifest = replace(
            manifest,
            attempt=attempt.number,
            time=time.time(),
            arrays=f"{ARRAYS}{attempt.number}" + f".{self._num_returns}" * (self._num_returns > 0),
            metric=contents.metric,
            roll_back_to=contents.roll_back_to,
            features=contents.features,
            topology=contents.topology,
            carry=contents.carry,
        )
        attachments = contents.attachments() if is_fast and attempt.hosts.is_main else {}
        save = _Save(manifest, fingerprint.LeafLayout(state), contents, started_seconds, attachments)

        # 1. Copy. An error here must not raise: the other hosts would wait for this one. The writer reports it to them,
        # and it fails the save in the background, where every failure of a write is handled.
        leaves = encode_leaves(dict(zip(save.layout.names, jax.tree.leaves(state), strict=True)))
        blocks: Blocks | None = None
        error: Exception | None = None
        try:
            if not self._buffer.is_needed:
                leaves = {name: copy_offloaded(leaf) for name, leaf in leaves.items()}
        except WRITE_ERRORS as caught:
            error = caught
        if is_durable:
            if self._buffer.is_needed:
                # On a CPU the writer reads the arrays in place, so all of it can happen in the background.
                save.finish = lambda *arguments: self._writer.start(save.target, leaves)(*arguments)
            else:
                save.finish = self._writer.start(save.target, leaves, error)
            save.leaves = jax.tree.map(make_abstract, leaves) if self._reads_bits_back else None
        try:
            if is_fast and error is None:
                blocks = copy_to_host(leaves, "all")
        except WRITE_ERRORS as caught:
            error = caught
        if is_fast and error is not None:
            self._report_fast_failure(step, error)

        # 2. Fingerprint. After the copy, because on a CPU the two would contend while the training thread waits.
        save.digests = save.layout.dispatch(state)

        # 3 to 5, in the background.
        if blocks is not None:
            self._pending_fast = self._fast_worker.submit(self._write_fast, save, blocks)
        if is_durable:
            self._pending = self._worker.submit(self._commit, save)

        stall_seconds = time.monotonic() - started_seconds
        if is_durable:  # the interval of `every: auto` is one of durable saves
            self._stall_seconds = stall_seconds
        tier = {} if is_durable else {"tier": "fast"}
        clock = attempt.progress.clock.read_step_seconds()
        attempt.record("save", step, blocked_seconds=round(stall_seconds, 4), clock=clock, **tier)
        return self._buffer.swap(state, self._pending if is_durable else None)

    # The background part of a save.

    def _commit(self, save: _Save) -> bool:
        """Do points 3 to 5 of the protocol; return True if the save was committed, False if it failed."""
        attempt = self._attempt
        manifest = self._add_digests(save)
        try:
            # 3. Durable: the arrays of every host, and what must not be behind the checkpoint, such as metrics.
            assert save.finish is not None
            check = None if save.leaves is None else make_bits_check(save.layout, save.digests, save.leaves)
            written = save.finish(self._max_unsaved_seconds, check, self._find_refusal(save.contents))
            save.contents.flush()
            if attempt.hosts.is_main:
                attempt.events.flush()

            # 4. Commit, on process 0.
            if attempt.hosts.is_main:
                manifest = replace(
                    manifest,
                    files=written.files,
                    indexes=written.indexes,
                    owners=written.owners or None,
                    read_back=written.read_back,
                    seconds=save.seconds,
                )
                # The check of the fence comes as late as possible. If a newer attempt retires this step after it, the
                # commit fails.
                attempt.fence.check()
                try:
                    commit(attempt.store, save.directory, manifest, attempt.number)
                except (FileExistsError, FileNotFoundError):
                    attempt.fence.check()  # if a newer attempt was first, this raises the better error
                    raise
                attempt.events.append(
                    "commit",
                    manifest.step,
                    fingerprint=manifest.fingerprint,
                    seconds_to_durable=save.seconds,
                    bytes=manifest.num_bytes,
                    read_back=check is not None,
                )
        except WRITE_ERRORS as failure:
            # Warn and free the space. Training continues, and the next due save is tried.
            if attempt.hosts.is_main:
                attempt.fence.check()
            self._writer.discard(save.target)
            if attempt.hosts.is_main:
                reason, step = format_error(failure), manifest.step
                left = "the last commit is intact" if self._has_committed else "nothing is committed yet"
                warn(f"SAVE FAILED at step {step}: {reason}; {left}")
                attempt.events.append("save_failed", step, reason=reason)
            return False
        self._has_committed = True
        self._unsaved_since_seconds = None
        self._durable_seconds = time.monotonic() - save.started_seconds

        # 5. Retention. A checkpoint with another name than its step is kept until it is deleted by hand.
        if attempt.hosts.is_main and manifest.is_step:
            self._retention.add(manifest)
        return True

    def _write_fast(self, save: _Save, blocks: Blocks) -> None:
        assert self._fast_tier is not None
        manifest = self._add_digests(save)
        try:
            if (refusal := self._find_refusal(save.contents)) is not None:
                raise refusal
            self._fast_tier.write(manifest, blocks, save.attachments)
        except WRITE_ERRORS as failure:
            self._report_fast_failure(manifest.step, failure)
            return
        self._attempt.record("commit", manifest.step, tier="fast", seconds_to_durable=save.seconds)
        self._fast_tier.send(manifest.step)

    def _report_fast_failure(self, step: int, failure: Exception) -> None:
        warn(f"step {step} is not in the fast tier: {format_error(failure)}")
        self._attempt.events.append("save_failed", step, tier="fast", reason=format_error(failure))

    def _find_refusal(self, contents: SaveContents) -> OSError | None:
        """Return the error with which a write on this process fails because of `SaveContents.check`, if it does.

        The job is asked to stop, and ends with the `DataError` instead of its next save.
        """
        with self._checking:
            try:
                contents.check()
            except DataError as error:
                if self._refusal is None:
                    self._refusal = f"{error}; the steps since the last commit are not saved"
                    self._attempt.stop.request_stop(self._refusal)
                return OSError(str(error))
        return None

    def _add_digests(self, save: _Save) -> Manifest:
        """Return the manifest with the fingerprint of every leaf. Waits for the devices.

        Raises `ReplicaError` if the state is corrupt on some device, so that it must not be saved.
        """
        step = save.manifest.step
        try:
            digests = save.layout.leaf_digests(save.digests)
        except fingerprint.ReplicaError as error:
            processes = sorted({device.process_index for device in error.devices})
            devices = [device.id for device in error.devices]
            self._attempt.events.append("corruption", step, reason=str(error), devices=devices, processes=processes)
            raise fingerprint.ReplicaError(f"step {step} is not saved: {error}; the last commit is intact") from error
        leaves = fingerprint.add_digests(save.layout.shapes, digests)
        return replace(save.manifest, leaves=leaves, fingerprint=fingerprint.combine_digests(leaves))

    # Wait.

    def wait_until_committed(self, step: int) -> None:
        """Block until the last save is committed. Called on every host. Raises `StorageError` if it failed."""
        if not self.wait_until_finished():
            raise StorageError(f"the state of step {step} could not be saved; run the same command again")

    def wait_until_finished(self) -> bool:
        """Block until the save in progress is committed or has failed. Called on every host.

        Superfluous checkpoints are deleted when this returns. Returns False on every host if process 0 could not commit
        the save. Raises `FencedError` if a newer attempt owns the directory, and `DataError` of `SaveContents.check`.
        """
        with self._attempt.progress.report_phase(SAVE):
            return self._wait_until_finished(with_deletions=True)

    def _wait_until_finished(self, *, with_deletions: bool) -> bool:
        if self._pending is None:
            if with_deletions and self._attempt.hosts.is_main:
                self._retention.wait()
            return True
        is_committed, fenced, is_removed = False, None, False
        try:
            is_committed = self._pending.result()
            if with_deletions:
                self._retention.wait()
        except FencedError as error:
            fenced, is_removed = str(error), isinstance(error, RemovedError)
        self._pending = None
        # Only process 0 knows whether it has committed, and all hosts must end together. A host with a refusal of its
        # own ends too.
        outcome = self._attempt.hosts.agree([is_committed, fenced, is_removed, self._refusal])
        is_committed, fenced, is_removed, refusal = outcome
        if fenced is not None:
            raise (RemovedError if is_removed else FencedError)(fenced)
        refusal = refusal or self._refusal
        if refusal is not None:
            raise DataError(refusal)
        # Every host must learn this from process 0: they read a checkpoint back together.
        self._reads_bits_back = self._reads_bits_back and not is_committed
        if not is_committed and self.saved_step == self._pending_step:
            self.saved_step = None  # a later save of the step, such as that of a stop, must not be skipped
        return bool(is_committed)

    def raise_if_failing(self) -> None:
        """Raise if the job must not continue without a save. Never waits.

        Raises `ReplicaError` if the state was found corrupt, and `StorageError` if nothing could be committed for
        `max_unsaved_minutes`. Each host decides alone, since both errors end with exit code 76.
        """
        for pending in (self._pending, self._pending_fast):
            error = pending.exception() if pending is not None and pending.done() else None
            if isinstance(error, fingerprint.ReplicaError):
                raise error
        since_seconds = self._unsaved_since_seconds
        if self._attempt.hosts.is_main and since_seconds is not None:
            unsaved_seconds = time.monotonic() - since_seconds
            if unsaved_seconds > self._max_unsaved_seconds:
                raise StorageError(
                    f"nothing could be saved for {unsaved_seconds / 60:.1f} minutes "
                    f"(checkpoint.max_unsaved_minutes: {self._max_unsaved_seconds / 60:g}); run the same command again"
                )

    def close(self) -> None:
        """Stop the background threads. Call `wait_until_finished` first."""
        if self._fast_tier is not None:
            self._fast_tier.close()
        self._fast_worker.shutdown()
        self._worker.shutdown()
        self._retention.close()
        self._writer.close()

    def remove_fast_tier(self) -> None:
        """Delete the fast tier of this process, because the run is done. Call `close` first."""
        if self._fast_tier is not None:
            self._fast_tier.remove()

    def _warn_of_grace(self, save_seconds: float, step: int) -> None:
        """Warn, once, if a save takes longer than the scheduler gives after SIGTERM."""
        grace_seconds = self._config.grace_seconds
        if grace_seconds is None or save_seconds <= grace_seconds or self._has_warned_of_grace:
            return
        self._has_warned_of_grace = True
        reason = (
            f"a save takes {save_seconds:.1f} s, checkpoint.grace_seconds is {grace_seconds:g}: a preemption may cost "
            "up to a save interval; give more grace, or add a fast tier (checkpoint.local_directory)"
        )
        if self._attempt.hosts.is_main:
            warn(reason)
        self._attempt.record("grace", step, reason=reason)


def _validate_name(name: str, step: int | None = None) -> None:
    if name == str(step):
        return
    if not _NAME.fullmatch(name) or name.endswith(RETIRED_SUFFIX):
        raise InvalidError(
            f"a checkpoint cannot be called {name!r}: a name is 1 to 100 letters, digits, `._-`, begins with a letter "
            f"or a digit, and does not end in {RETIRED_SUFFIX}"
        )
    # A number would be restored, and counted by retention, as the checkpoint of that step.
    if name.isdecimal():
        what = "a checkpoint cannot be called" if step is None else f"step {step} cannot be saved as"
        raise InvalidError(f"{what} {name!r}: numbers are names of steps")
