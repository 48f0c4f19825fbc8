"""Save and commit: the protocol that makes a checkpoint one instant.

Layout: `checkpoints/<name>/manifest.json` and `checkpoints/<name>/arrays.<attempt>/`. The name of a checkpoint of a run
is its step. A directory without a manifest is not a checkpoint, whatever it holds.

Save, called on every host with the same step:
1. The writer copies what it must and returns; it writes in the background, below a name of this attempt, so a zombie of
   an earlier attempt can never write into files of this one. (On a CPU nothing is copied and all of it is in the
   background: training goes on in other memory, see `double_buffer`.)
2. The fingerprint of every leaf is dispatched on the device, from the very arrays that are saved. (After 1, because on
   a CPU the two would contend while the training thread waits.)
3. When every host's part is durable, host 0 notes size and CRC-32C of each file, reads its own part back if it is the
   first save of the run, checks that its attempt is still the newest, and creates `manifest.json`, which can be created
   only once. That instant is the commit.
4. Only then does retention delete: first the manifest, then the files, so that a kill in between leaves no directory
   that looks whole. Never the newest.

A zombie may have passed the check of 3 and been stopped before it creates the manifest. A newer attempt therefore
buries every unfinished step (`tombstone`) by an act of which only one can win, that or the commit: either the
zombie's checkpoint is whole and counts, or it can never be committed.

In a bucket training never waits for a save: while one is on its way, a save that falls due is left out and the ledger
says so. If `max_unsaved_seconds` pass from the begin of a save without any commit, the run ends with 76.

The state's memory held twice, on CPUs only, so that training goes on while a save reads.

On a CPU a save reads from the very memory of the arrays, and the step to which they are donated next would have to copy
them into fresh memory, on one thread. So training goes on with a copy in the memory that the save before has read (in
fresh memory while it still reads), and leaves that of this save for the next. Elsewhere a save copies out of the device
first, and none of this is needed.

The first save of a run, read back before it is committed: what was written is there, can be read, and has the bits.

Cheap: the main host alone reads, and only what its first device holds of each leaf, block by block into its own memory.
"""

import enum
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint import blocks as pieces
from runner.checkpoint import fingerprint
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.fingerprint import LeafLayout, compute_block_digest, make_chunks
from runner.checkpoint.leaves import Leaves, encode_leaves, make_abstract
from runner.checkpoint.manifest import CHECKPOINTS, Manifest, commit
from runner.checkpoint.readers import BlockReader
from runner.checkpoint.writers import ArrayWriter, WriteResult
from runner.console import warn
from runner.errors import FencedError, RemovedError, StorageError, format_error
from runner.run.attempt import Attempt
from runner.storage import JsonObject, Store


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(leaves: list[jax.Array], spare: list[jax.Array] | None) -> list[jax.Array]:
    """A copy of `leaves` by all threads of the device, in the memory of `spare`, or in fresh memory if that is None."""
    return [jnp.copy(leaf) for leaf in leaves]


class DoubleBuffer:
    """The memory of one state, and that of the state that was saved before."""

    def __init__(self) -> None:
        self.is_needed = jax.default_backend() == "cpu"
        self._spare: list[jax.Array] | None = None
        self._reader: Future[Any] | None = None  # the save that may still read the spare memory

    def swap(self, state: Any, reader: Future[Any] | None) -> Any:
        """The state to go on with: the same bits as `state`, in memory that `reader`, the save of it, does not read."""
        if not self.is_needed:
            return state
        spare = self._spare if self._reader is None or self._reader.done() else None
        leaves, structure = jax.tree.flatten(state)
        copies = list(leaves)
        for places in make_chunks(leaves):
            memory = None if spare is None else [spare[place] for place in places]
            for place, leaf in zip(places, _copy([leaves[place] for place in places], memory), strict=True):
                copies[place] = leaf
        self._spare, self._reader = leaves, reader
        return jax.tree.unflatten(structure, copies)


@dataclass(frozen=True)
class ReadBack:
    """What is compared: the leaves as they are stored (shape, dtype, sharding), and how the state lies on devices."""

    leaves: Leaves
    layout: LeafLayout

    def check(self, store: Store, directory: str, manifest: Manifest, digests: list[jax.Array]) -> None:
        """Raise `ValueError` or `OSError` naming the leaf that does not come back. Main host only."""
        device = jax.local_devices()[0]
        blocks = BlockReader(store, directory, manifest)
        expected = self.layout.digests_on(device, digests)
        for name, leaf in self.leaves.items():
            index = leaf.sharding.addressable_devices_indices_map(leaf.shape).get(device)
            if index is None:
                continue
            block = blocks.read(name, leaf, index)
            start = [part.indices(size)[0] for part, size in zip(index, leaf.shape, strict=True)]
            if block.dtype != leaf.dtype or not np.array_equal(
                compute_block_digest(block, leaf.shape, start), expected[name]
            ):
                raise ValueError(f"what was read back of {name} is not what was saved")


WRITE_ERRORS = (OSError, ValueError, RuntimeError)


class SaveKind(enum.Enum):
    """Where a save goes. Whatever is saved as a step goes into the fast tier too, if there is one."""

    FAST = "fast"  # into the fast tier alone
    DURABLE = "durable"  # into the run's directory; in a bucket left out while an earlier save is on its way
    REQUIRED = "required"  # into the run's directory, whatever it takes


@dataclass(frozen=True)
class SaveContents:
    """What rides on a save besides the state.

    Attributes:
        metric: the value that `checkpoint.keep_best` compares, None if this step has none.
        topology: for the manifest: the hardware, and what was chosen for it.
        carry: for the manifest: what the job needs besides the state to write its next row; None if nothing.
        attachments: makes the small files that a state in the fast tier must have beside it. Main host only.
        flush: makes durable what must not be behind a checkpoint; may raise `OSError`. In the background.
        announce: called before a step is written into the run's directory, on every host, by the training thread.
    """

    metric: float | None = None
    topology: JsonObject | None = None
    carry: JsonObject | None = None
    attachments: Callable[[], dict[str, bytes]] = dict
    flush: Callable[[], None] = lambda: None
    announce: Callable[[], None] = lambda: None


@dataclass
class _Save:
    """One save on its way: all that the background needs."""

    draft: Manifest  # without digests and files
    flush: Callable[[], None]
    layout: fingerprint.LeafLayout
    started_seconds: float
    digests: list[jax.Array] | None = None
    finish: Callable[[float], WriteResult] | None = None
    blocks: pieces.Blocks | None = None
    read_back: ReadBack | None = None
    attachments: dict[str, bytes] = field(default_factory=dict)
    error: BaseException | None = None

    def manifest(self) -> Manifest:
        """The draft with the fingerprint of every leaf. Waits for the device."""
        assert self.digests is not None
        leaves = fingerprint.add_digests(self.layout.shapes, self.layout.leaf_digests(self.digests))
        return replace(self.draft, leaves=leaves, fingerprint=fingerprint.combine_digests(leaves))

    @property
    def directory(self) -> str:
        return f"{CHECKPOINTS}/{self.draft.name}"

    @property
    def target(self) -> str:
        return f"{self.directory}/{self.draft.arrays}"

    @property
    def seconds(self) -> float:
        """Since the save began."""
        return round(time.monotonic() - self.started_seconds, 4)


class Saver:
    """Saves of one attempt, at most one at a time on its way. Made and called on every host.

    Attributes:
        reads_back: whether nothing of this run was ever committed: then a save is read back first.
        stall_seconds: that the last durable save has blocked its caller; None before the first.
        durable_seconds: that the last one has taken to be durable.
    """

    def __init__(
        self,
        attempt: Attempt,
        writer: ArrayWriter,
        fast: FastTier | None,
        max_unsaved_seconds: float,
        after_commit: Callable[[Manifest], None],
    ):
        self._attempt = attempt
        self._writer = writer
        self._fast = fast
        self._max_unsaved_seconds = max_unsaved_seconds
        self._after_commit = after_commit
        self._buffer = DoubleBuffer()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._pending: Future[bool] | None = None
        self._fast_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fast")
        self._pending_fast: Future[None] | None = None
        self._unsaved_since_seconds: float | None = None
        self.reads_back = False
        self.stall_seconds: float | None = None
        self.durable_seconds = 0.0

    def save(self, draft: Manifest, state: Any, payload: SaveContents, kind: SaveKind) -> tuple[bool, Any]:
        """Begin to save `state`: whether a durable save began, and the state to go on with.

        `draft` names the checkpoint, its step and its run. Only the state that is returned may be donated. Waits for an
        earlier save that is still being written, unless this one is left out for it.
        """
        is_fast = self._fast is not None and draft.is_of_a_step
        is_durable = kind is not SaveKind.FAST and not self._is_left_out(draft.step, kind)
        if not (is_durable or is_fast):
            return False, state
        if is_durable and draft.is_of_a_step:
            payload.announce()
        if is_durable:
            self.wait()
        self._wait_for_fast()
        if self._attempt.hosts.is_main:
            self._attempt.fence.check_locally()
        started_seconds = time.monotonic()
        if is_durable and self._unsaved_since_seconds is None:
            self._unsaved_since_seconds = started_seconds
        reader = self._begin(self._prepare(draft, state, payload, is_fast, started_seconds), state, is_durable, is_fast)
        self.stall_seconds = stall_seconds = time.monotonic() - started_seconds
        tier = {} if is_durable else {"tier": "fast"}
        clock = self._attempt.progress.clock.read_step_seconds()
        self._attempt.record("save", draft.step, blocked_seconds=round(stall_seconds, 4), clock=clock, **tier)
        return is_durable, self._buffer.swap(state, reader)

    def _is_left_out(self, step: int, kind: SaveKind) -> bool:
        """Whether training is not to wait, in a bucket, for an earlier save: host 0's answer, on every host."""
        if kind is SaveKind.REQUIRED or self._attempt.store.root is not None:
            return False
        if not self._attempt.hosts.agree(self._pending is not None and not self._pending.done()):
            return False
        self._attempt.record("save_left_out", step, reason="an earlier save is still on its way")
        return True

    def _prepare(
        self, draft: Manifest, state: Any, payload: SaveContents, is_fast: bool, started_seconds: float
    ) -> _Save:
        number = self._attempt.number
        draft = replace(
            draft,
            attempt=number,
            time=time.time(),
            arrays=f"arrays.{number}",
            metric=payload.metric,
            topology=payload.topology,
            carry=payload.carry,
        )
        attachments = payload.attachments() if is_fast and self._attempt.hosts.is_main else {}
        layout = fingerprint.LeafLayout(state)
        return _Save(draft, payload.flush, layout, started_seconds, attachments=attachments)

    def _begin(self, save: _Save, state: Any, is_durable: bool, is_fast: bool) -> Future[bool] | None:
        """Copy what must be copied, then the digests (step 2), then the background; what still reads the state."""
        leaves = encode_leaves(dict(zip(save.layout.names, jax.tree.leaves(state), strict=True)))
        try:
            if is_durable:
                save.finish = self._start_to_write(save.target, leaves)
                save.read_back = ReadBack(jax.tree.map(make_abstract, leaves), save.layout) if self.reads_back else None
            if is_fast:
                save.blocks = pieces.copy_to_host(leaves, "all")
        except WRITE_ERRORS as caught:
            save.error = caught
        save.digests = save.layout.dispatch(state)
        if save.blocks is not None:
            self._pending_fast = self._fast_worker.submit(self._keep_fast, save, save.blocks)
        if not is_durable:
            return None
        self._pending = self._worker.submit(self._work, save)
        return self._pending

    def _start_to_write(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """What writes the arrays in the background, once they may be donated or need not be."""
        if self._buffer.is_needed:
            return lambda deadline_seconds: self._writer.start(target, leaves)(deadline_seconds)
        return self._writer.start(target, leaves)

    def _work(self, save: _Save) -> bool:
        """The background part of a durable save; whether it was committed."""
        manifest = self._manifest(save)
        try:
            if save.error is not None:
                raise save.error
            assert save.finish is not None
            written = save.finish(self._max_unsaved_seconds)
            save.flush()
            if self._attempt.hosts.is_main:
                whole = replace(manifest, files=written.files, shards=written.shards, seconds=save.seconds)
                self._commit(save, whole)
        except FencedError:
            raise
        except WRITE_ERRORS as failure:
            self._give_up(save, failure)
            return False
        self.reads_back = False
        self._unsaved_since_seconds = None
        self.durable_seconds = time.monotonic() - save.started_seconds
        self._after_commit(manifest)
        return True

    def _manifest(self, save: _Save) -> Manifest:
        """The manifest with digests. Raises `ReplicaError` if the state is corrupt on some device."""
        try:
            return save.manifest()
        except fingerprint.ReplicaError as error:
            step = save.draft.step
            self._attempt.events.append("corruption", step, reason=str(error))
            raise fingerprint.ReplicaError(f"step {step} is not saved: {error}; the last commit is intact") from error

    def _keep_fast(self, save: _Save, blocks: pieces.Blocks) -> None:
        assert self._fast is not None
        manifest = self._manifest(save)
        try:
            self._fast.write(manifest, blocks, save.attachments)
        except WRITE_ERRORS as failure:
            warn(f"step {manifest.step} is not in the fast tier: {format_error(failure)}")
            self._attempt.events.append("save_failed", manifest.step, tier="fast", reason=format_error(failure))
            return
        self._attempt.record("commit", manifest.step, tier="fast", seconds_to_durable=save.seconds)

    def _commit(self, save: _Save, manifest: Manifest) -> None:
        """Main host only."""
        attempt = self._attempt
        if save.read_back is not None and save.digests is not None:
            save.read_back.check(attempt.store, save.directory, manifest, save.digests)
        attempt.fence.check()
        try:
            commit(attempt.store, save.directory, manifest, attempt.number)
        except (FileExistsError, FileNotFoundError):  # another attempt has decided about this step
            attempt.fence.check()
            raise
        attempt.events.append(
            "commit",
            manifest.step,
            fingerprint=manifest.fingerprint,
            seconds_to_durable=save.seconds,
            bytes=manifest.num_bytes,
            read_back=save.read_back is not None,
        )

    def _give_up(self, save: _Save, failure: BaseException) -> None:
        """Say loudly that a save failed, and free its space. Training goes on; the next save is tried."""
        attempt = self._attempt
        if attempt.hosts.is_main:
            attempt.fence.check()
        self._writer.discard(save.target)
        if not attempt.hosts.is_main:
            return
        reason, step = format_error(failure), save.draft.step
        warn(f"SAVE FAILED at step {step}: {reason}; the last commit is intact")
        attempt.events.append("save_failed", step, reason=reason)

    def wait(self) -> bool:
        """Block until the pending save is committed or given up; whether it was committed. True if none is pending.

        Called on every host; all get host 0's answer.
        """
        if self._pending is None:
            return True
        committed, fenced, is_removed = False, None, False
        try:
            committed = self._pending.result()
        except FencedError as error:
            fenced, is_removed = str(error), isinstance(error, RemovedError)
        self._pending = None
        committed, fenced, is_removed = self._attempt.hosts.agree([committed, fenced, is_removed])
        if fenced is not None:
            raise (RemovedError if is_removed else FencedError)(fenced)
        return committed

    def _wait_for_fast(self) -> None:
        if self._pending_fast is not None:
            self._pending_fast.result()
            self._pending_fast = None

    def raise_if_hopeless(self) -> None:
        """Raise `ReplicaError` if the state was found corrupt, `StorageError` if nothing was committed for too long.

        Never waits. Each host decides alone, since all of them end with 76.
        """
        for pending in (self._pending, self._pending_fast):
            error = pending.exception() if pending is not None and pending.done() else None
            if isinstance(error, fingerprint.ReplicaError):
                raise error
        since = self._unsaved_since_seconds
        if self._attempt.hosts.is_main and since is not None:
            unsaved_seconds = time.monotonic() - since
            if unsaved_seconds > self._max_unsaved_seconds:
                raise StorageError(
                    f"nothing could be saved for {unsaved_seconds / 60:.1f} minutes "
                    f"(checkpoint.max_unsaved_minutes: {self._max_unsaved_seconds / 60:g}); run the same command again"
                )

    def close(self) -> None:
        """Stop the background threads. The pending save must have been waited for."""
        self._fast_worker.shutdown()
        self._worker.shutdown()
        self._writer.close()
