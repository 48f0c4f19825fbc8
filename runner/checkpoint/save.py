"""Save and commit: the protocol that makes a checkpoint one instant.

Layout: `checkpoints/<name>/manifest.json` and `checkpoints/<name>/arrays.<attempt>/`. The name of a checkpoint of a run
is its step. A directory without a manifest is not a checkpoint, whatever it holds.

Save, called on every host with the same step:
1. The writer copies what it must and returns; it writes in the background, below a name of this attempt, so a zombie of
   an earlier attempt can never write into files of this one. (On a CPU nothing is copied and all of it is in the
   background: training goes on in other memory, see `unshare`.)
2. The fingerprint of every leaf is dispatched on the device, from the very arrays that are saved. (After 1, because on
   a CPU the two would contend while the training thread waits.)
3. When every host's part is durable, host 0 notes size and CRC-32C of each file, checks that its attempt is still the
   newest, and creates `manifest.json`, which can be created only once. That instant is the commit.
4. Only then does retention delete: first the manifest, then the files, so that a kill in between leaves no directory
   that looks whole. Never the newest.

A zombie may have passed the check of 3 and been stopped before it creates the manifest. A newer attempt therefore
retires every unfinished step (`manifest.retire`) by an act of which only one can win, that or the commit: either the
zombie's checkpoint is whole and counts, or it can never be committed.

In a bucket training never waits for a save: while one is on its way, a save that falls due is left out and the ledger
says so. If `max_unsaved_seconds` pass from the begin of a save without any commit, the run ends with 76.
"""

import contextlib
import functools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.attempt.event_log import EventLog
from runner.attempt.fence import Fence
from runner.checkpoint import fingerprint, pieces
from runner.checkpoint.fast import FastTier
from runner.checkpoint.manifest import CHECKPOINTS, FORMAT
from runner.checkpoint.tombstone import commit
from runner.checkpoint.writer import Writer
from runner.errors import FencedError, StorageError, first_line
from runner.hosts.agreement import Hosts
from runner.storage import Store
from runner.terminal import warn

WRITE_ERRORS = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Place:
    """Where checkpoints are, and whose attempt this is. The same parts for saving and for restoring."""

    store: Store
    hosts: Hosts
    fence: Fence
    ledger: EventLog
    fast: FastTier | None = None


@dataclass
class _Save:
    """One save on its way: all that the background needs."""

    manifest: dict[str, Any]
    layout: fingerprint.Layout
    digests: jax.Array
    started_seconds: float
    finish: Callable[[float], dict[str, Any]] | None
    host: pieces.Host | None
    companions: dict[str, bytes]
    error: BaseException | None = None

    def with_digests(self) -> dict[str, Any]:
        """The manifest with the fingerprint of every leaf. Waits for the device."""
        found = self.layout.leaf_digests(self.digests)
        leaves = {name: record | {"digest": found[name]} for name, record in self.manifest["leaves"].items()}
        return self.manifest | {"leaves": leaves, "fingerprint": fingerprint.combine(leaves)}

    @property
    def directory(self) -> str:
        return f"{CHECKPOINTS}/{self.manifest['name']}"

    @property
    def target(self) -> str:
        return f"{self.directory}/{self.manifest['arrays']}"


@functools.partial(jax.jit, donate_argnums=1, keep_unused=True)
def _copy(state: Any, spare: Any) -> Any:
    """A copy of `state` by all threads of the device, in the memory of `spare`, or in fresh memory if that is None."""
    return jax.tree.map(jnp.copy, state)


class Saver:
    """Saves of one attempt, at most one at a time on its way. Made and called on every host."""

    def __init__(
        self,
        place: Place,
        writer: Writer,
        max_unsaved_seconds: float,
        before_commit: Callable[[], None],
        after_commit: Callable[[dict[str, Any]], None],
    ):
        self._place = place
        self._writer = writer
        self._max_unsaved_seconds = max_unsaved_seconds
        self._before_commit = before_commit
        self._after_commit = after_commit
        self._may_leave_out = place.store.root is None
        self._is_unshared = jax.default_backend() == "cpu"
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._pending: Future[bool] | None = None
        self._fast_worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fast")
        self._pending_fast: Future[None] | None = None
        self._spare: Any = None
        self._spare_reader: Future[bool] | None = None  # the durable save that may still read the spare memory
        self._reader: Future[bool] | None = None  # the one that reads the state of the last `save`
        self._unsaved_since_seconds: float | None = None
        self.stall_seconds: float | None = None  # that the last durable save has blocked its caller
        self.durable_seconds = 0.0  # that the last one has taken to be durable

    def save(
        self,
        name: str,
        state: Any,
        record: dict[str, Any],
        *,
        durable: bool = True,
        fast: bool = False,
        companions: dict[str, bytes] | None = None,
        must: bool = False,
    ) -> bool:
        """Begin to save `state` under `name`; whether a durable save began. Only `unshare(state)` may be donated then.

        Waits for an earlier save that is still being written; in a bucket, unless it `must`, leaves this one out.
        `record` goes into the manifest, `companions` beside a part in the fast tier.
        """
        place = self._place
        if durable and self._may_leave_out and not must and self._is_busy():
            if place.hosts.is_main:
                place.ledger.append("save_left_out", record["step"], reason="an earlier save is still on its way")
            durable = False
        if not (durable or fast):
            return False
        if durable:
            self.wait()
        self._wait_for_fast()
        if place.hosts.is_main:
            place.fence.glance()
        started = time.monotonic()
        if durable and self._unsaved_since_seconds is None:
            self._unsaved_since_seconds = started
        manifest = {"format": FORMAT, "name": name, "attempt": place.fence.attempt, "time": time.time()} | record
        manifest |= {"arrays": f"arrays.{place.fence.attempt}", "leaves": fingerprint.describe(state)}
        leaves = dict(zip(fingerprint.leaf_names(state), jax.tree.leaves(state), strict=True))
        save = _Save(manifest, fingerprint.Layout(state), jnp.zeros(0), started, None, None, companions or {})
        try:
            if durable:
                save.finish = self._begin(save.target, leaves)
            if fast:
                save.host = pieces.copy_to_host(leaves, "all")
        except WRITE_ERRORS as caught:
            save.error = caught
        save.digests = fingerprint.dispatch(state)
        if save.host is not None:
            self._pending_fast = self._fast_worker.submit(self._keep_fast, save, save.host)
        if durable:
            self._pending = self._worker.submit(self._work, save)
        self._reader = self._pending if durable else None
        self.stall_seconds = time.monotonic() - started
        if place.hosts.is_main:
            blocked_seconds = round(self.stall_seconds, 4)
            tier = {} if durable else {"tier": "fast"}
            place.ledger.append("save", record["step"], blocked_seconds=blocked_seconds, **tier)
        return durable

    def _begin(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], dict[str, Any]]:
        """What writes the arrays in the background, once they may be donated or need not be."""
        if self._is_unshared:
            return lambda deadline_seconds: self._writer.start(target, leaves)(deadline_seconds)
        return self._writer.start(target, leaves)

    def unshare(self, state: Any) -> Any:
        """The state to go on with after a `save`: the same bits, in memory that no save reads.

        On a CPU a save reads from the very memory of the arrays, and the step to which they are donated next would
        have to copy them into fresh memory, on one thread. So training goes on with a copy in the memory that the save
        before has read (in fresh memory while it still reads), and leaves that of this save for the next.
        """
        if not self._is_unshared:
            return state
        spare = self._spare if self._spare_reader is None or self._spare_reader.done() else None
        self._spare, self._spare_reader = state, self._reader
        return _copy(state, spare)

    def _is_busy(self) -> bool:
        """Whether an earlier save is on its way: host 0's answer, on every host."""
        return bool(self._place.hosts.agree(self._pending is not None and not self._pending.done()))

    def _work(self, save: _Save) -> bool:
        """The background part of a durable save; whether it was committed."""
        manifest = self._manifest(save)
        try:
            if save.error is not None:
                raise save.error
            assert save.finish is not None
            written = save.finish(self._max_unsaved_seconds)
            self._before_commit()
            if self._place.hosts.is_main:
                seconds = round(time.monotonic() - save.started_seconds, 4)
                self._commit(save, manifest | written | {"seconds": seconds})
        except FencedError:
            raise
        except WRITE_ERRORS as failure:
            self._give_up(save, failure)
            return False
        self._unsaved_since_seconds = None
        self.durable_seconds = time.monotonic() - save.started_seconds
        self._after_commit(manifest)
        return True

    def _manifest(self, save: _Save) -> dict[str, Any]:
        """The manifest with digests. Raises `ReplicaError` if the state is corrupt on some device."""
        try:
            return save.with_digests()
        except fingerprint.ReplicaError as error:
            step = save.manifest["step"]
            self._place.ledger.append("corruption", step, reason=str(error))
            raise fingerprint.ReplicaError(f"step {step} is not saved: {error}; the last commit is intact") from error

    def _keep_fast(self, save: _Save, host: pieces.Host) -> None:
        assert self._place.fast is not None
        manifest = self._manifest(save)
        try:
            self._place.fast.write(manifest, host, save.companions)
        except WRITE_ERRORS as failure:
            warn(f"step {save.manifest['step']} is not in the fast tier: {first_line(failure)}")
            self._place.ledger.append("save_failed", save.manifest["step"], tier="fast", reason=first_line(failure))
            return
        if self._place.hosts.is_main:
            seconds = round(time.monotonic() - save.started_seconds, 4)
            self._place.ledger.append("commit", save.manifest["step"], tier="fast", seconds_to_durable=seconds)

    def _commit(self, save: _Save, manifest: dict[str, Any]) -> None:
        """Main host only."""
        place, attempt = self._place, self._place.fence.attempt
        assert attempt is not None
        place.fence.check()
        try:
            commit(place.store, save.directory, manifest, attempt)
        except (FileExistsError, FileNotFoundError):  # another attempt has decided about this step
            place.fence.check()
            raise
        place.ledger.append(
            "commit",
            manifest["step"],
            fingerprint=manifest["fingerprint"],
            seconds_to_durable=round(time.monotonic() - save.started_seconds, 4),
            bytes=sum(size for size, _ in manifest["files"].values()),
        )

    def _give_up(self, save: _Save, failure: BaseException) -> None:
        """Say loudly that a save failed, and free its space. Training goes on; the next save is tried."""
        place = self._place
        if place.hosts.is_main:
            place.fence.check()
        self._writer.discard(save.target)
        if not place.hosts.is_main:
            return
        if place.store.root is not None:
            with contextlib.suppress(OSError):
                (place.store.root / save.directory).rmdir()
        reason, step = first_line(failure), save.manifest["step"]
        warn(f"SAVE FAILED at step {step}: {reason}; the last commit is intact")
        place.ledger.append("save_failed", step, reason=reason)

    def wait(self) -> bool:
        """Block until the pending save is committed or given up; whether it was committed. True if none is pending.

        Called on every host; all get host 0's answer.
        """
        if self._pending is None:
            return True
        committed, fenced = False, None
        try:
            committed = self._pending.result()
        except FencedError as error:
            fenced = str(error)
        self._pending = None
        committed, fenced = self._place.hosts.agree([committed, fenced])
        if fenced is not None:
            raise FencedError(fenced)
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
        if self._place.hosts.is_main and since is not None:
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


def raise_unless_committed(committed: bool, step: int) -> None:
    """Raise `StorageError` if the state of a job that ends could not be saved."""
    if not committed:
        raise StorageError(f"the state of step {step} could not be saved; run the same command again")
