"""Checkpoints: orbax behind a handful of verbs, and the protocol that makes them trustworthy.

Layout: `checkpoints/<name>/manifest.json` and `checkpoints/<name>/arrays.<attempt>/` (orbax). The name of a checkpoint
of a run is its step. A directory without a manifest is not a checkpoint, whatever it holds.

Save, called on every host with the same step:
1. Orbax copies what it must and returns; it writes in the background, into a directory named after this attempt, so a
   zombie of an earlier attempt can never write into files of this one.
2. The fingerprint of every leaf is dispatched on the device, from the very arrays that are saved. (After 1, because on
   a CPU the two would contend while the training thread waits.)
3. When every host's part is durable, host 0 notes size and CRC-32C of each file, checks that its attempt is still the
   newest, and creates `manifest.json`, which can be created only once. That instant is the commit.
4. Only then does retention delete: first the manifest, then the files, so that a kill in between leaves no directory
   that looks whole. Never the newest.

Restore, called on every host: the candidates are host 0's list, newest first. Each is checked in three layers, bytes
(size and CRC of every file against the manifest), shape (names, shapes, dtypes) and bits (the fingerprint, computed
again on the device from the restored arrays), and all hosts take the same verdict. What fails is quarantined, but only
after an older one has passed: if none passes nothing is touched.
"""

import contextlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from runner import fingerprint
from runner.errors import FencedError, ResumeError, StorageError
from runner.hosts import Hosts
from runner.ledger import Fence, Ledger
from runner.manifest import (
    FORMAT,
    MANIFEST,
    check_leaves,
    committed_steps,
    encode_manifest,
    file_problem,
    read_manifest,
    step_directories,
)
from runner.storage import crc32c, list_files, publish_new, remove_tree
from runner.terminal import warn

_WRITE_ERRORS = (OSError, ValueError, RuntimeError)


@dataclass(frozen=True)
class Fallback:
    """A checkpoint that was not restored, and why."""

    name: str
    reason: str
    committed: bool


def _make_checkpointer() -> ocp.AsyncCheckpointer:
    """Without compression: it costs seconds of the cores that train, and weights hardly shrink."""
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler(use_compression=False))


def _flatten(tree: Any) -> dict[str, Any]:
    return dict(zip(fingerprint.leaf_names(tree), jax.tree.leaves(tree), strict=True))


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).split(chr(10), 1)[0][:300]}"


class Checkpoints:
    """The checkpoints of one directory, for one attempt. Made and called on every host."""

    def __init__(self, directory: Path, hosts: Hosts, fence: Fence, ledger: Ledger):
        self.directory = directory / "checkpoints"
        self.quarantine = directory / "quarantine"
        self._hosts = hosts
        self._fence = fence
        self._ledger = ledger
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")
        self._pending: Future[bool] | None = None
        self._orbax = _make_checkpointer()

    # Saving. Called on every host.

    def save(
        self,
        name: str,
        state: Any,
        record: dict[str, Any],
        before_commit: Callable[[], None],
        after_commit: Callable[[], None],
    ) -> None:
        """Begin to save `state` under `name`; returns as soon as the arrays may be donated.

        Waits for an earlier save that is still being written. `record` goes into the manifest.
        """
        self.wait()
        if self._hosts.is_main:
            self._fence.check()
        started = time.monotonic()
        target = self.directory / name / f"arrays.{self._fence.attempt}"
        manifest = {"format": FORMAT, "name": name, "attempt": self._fence.attempt, "time": time.time()} | record
        manifest |= {"arrays": target.name, "leaves": fingerprint.describe(state)}
        error: BaseException | None = None
        try:
            self._orbax.save(target, args=ocp.args.PyTreeSave(_flatten(state)), force=True)
        except _WRITE_ERRORS as caught:
            error = caught
        digests = fingerprint.dispatch(state)
        blocked_seconds = time.monotonic() - started
        if self._hosts.is_main:
            self._ledger.append("save", record["step"], blocked_seconds=round(blocked_seconds, 4))
        names = fingerprint.leaf_names(state)

        def commit() -> bool:
            try:
                if error is not None:
                    raise error
                self._orbax.wait_until_finished()
                before_commit()
                self._commit(manifest, names, digests, started)
            except FencedError:
                raise
            except _WRITE_ERRORS as failure:
                self._give_up(target, record["step"], failure)
                return False
            after_commit()
            return True

        self._pending = self._worker.submit(commit)

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
        committed, fenced = self._hosts.agree([committed, fenced])
        if fenced is not None:
            raise FencedError(fenced)
        return committed

    def _commit(self, manifest: dict[str, Any], names: list[str], digests: jax.Array, started: float) -> None:
        if not self._hosts.is_main:
            return
        directory = self.directory / manifest["name"]
        for name, (high, low) in zip(names, jax.device_get(digests).tolist(), strict=True):
            manifest["leaves"][name]["digest"] = f"{high:08x}{low:08x}"
        manifest["fingerprint"] = fingerprint.combine(manifest["leaves"])
        files = list_files(directory / manifest["arrays"])
        manifest["files"] = {
            f"{manifest['arrays']}/{name}": [path.stat().st_size, crc32c(path)] for name, path in files.items()
        }
        self._fence.check()
        publish_new(directory / MANIFEST, encode_manifest(manifest))
        seconds = time.monotonic() - started
        num_bytes = sum(size for size, _ in manifest["files"].values())
        self._ledger.append(
            "commit",
            manifest["step"],
            fingerprint=manifest["fingerprint"],
            seconds_to_durable=round(seconds, 4),
            bytes=num_bytes,
        )

    def _give_up(self, target: Path, step: int, failure: BaseException) -> None:
        """Say loudly that a save failed, and free its space. Training goes on; the next save is tried."""
        self._orbax = _make_checkpointer()  # the old one would report this failure again
        if not self._hosts.is_main:
            return
        self._fence.check()
        reason = _first_line(failure)
        for leftover in target.parent.glob(f"{target.name}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        with contextlib.suppress(OSError):
            target.parent.rmdir()
        warn(f"SAVE FAILED at step {step}: {reason}; the last commit is intact")
        self._ledger.append("save_failed", step, reason=reason)

    # Retention. Main host only.

    def retain(self, keep_last: int, keep_every_steps: int | None) -> None:
        """Delete committed steps beyond the last `keep_last`, except multiples of `keep_every_steps`."""
        steps = committed_steps(self.directory)
        for step in steps[:-keep_last]:
            if keep_every_steps is None or step % keep_every_steps:
                self._fence.check()
                (self.directory / str(step) / MANIFEST).unlink(missing_ok=True)
                remove_tree(self.directory / str(step))

    # Restoring. Called on every host.

    def restore(self, abstract: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest state that passes every check, and its manifest; None if nothing was ever committed.

        `abstract` has the shape, dtype and sharding of every leaf: the checkpoint may have been written on any other
        mesh. Raises `ResumeError`, with nothing touched, if checkpoints exist and none can be restored.
        """
        candidates = self._hosts.agree(
            sorted((int(path.name) for path in step_directories(self.directory)), reverse=True)
        )
        rejected: list[Fallback] = []
        for step in candidates:
            result = self._try_restore(self.directory / str(step), abstract, rejected)
            if result is not None:
                self._set_aside(rejected, step)
                return result
        was_committed = self._hosts.agree(any(event["event"] == "commit" for event in self._ledger.events()))
        if was_committed or any(fallback.committed for fallback in rejected):
            reasons = "".join(f"\n  step {fallback.name}: {fallback.reason}" for fallback in rejected)
            raise ResumeError(
                f"{self.directory}: checkpoints were committed here and none can be restored; nothing was touched. "
                f"Repair one, or use another directory to start over{reasons or chr(10) + '  all are missing'}"
            )
        self._set_aside(rejected, None)
        return None

    def load(self, name: str, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The checkpoint `name`, checked like any other. Raises `ResumeError` if it cannot be restored."""
        rejected: list[Fallback] = []
        result = self._try_restore(self.directory / name, abstract, rejected)
        if result is None:
            raise ResumeError(f"{self.directory / name}: {rejected[0].reason}")
        return result

    def restore_weights(self, source: Path, abstract: Any) -> tuple[Any, dict[str, Any]]:
        """The leaves of `abstract` alone from another run: `source` is its directory, or one of its checkpoints.

        Takes the newest one that passes every check. Raises `ResumeError` if there is none.
        """
        steps = [source / "checkpoints" / str(step) for step in reversed(committed_steps(source / "checkpoints"))]
        candidates = [source] if (source / MANIFEST).exists() else steps
        rejected: list[Fallback] = []
        for directory in self._hosts.agree([str(path) for path in candidates]):
            result = self._try_restore(Path(directory), abstract, rejected, weights_only=True)
            if result is not None:
                return result
        reasons = "; ".join(f"{fallback.name}: {fallback.reason}" for fallback in rejected)
        raise ResumeError(f"checkpoint.init_from: {source}: {reasons or 'no checkpoint is here'}")

    def _try_restore(
        self, directory: Path, abstract: Any, rejected: list[Fallback], weights_only: bool = False
    ) -> tuple[Any, dict[str, Any]] | None:
        manifest, problem, committed = None, None, True
        try:
            manifest = read_manifest(directory)
            problem = file_problem(directory, manifest, self._hosts.process_id, self._hosts.num_processes)
        except FileNotFoundError:
            problem, committed = "no manifest.json: it was never committed", False
        except (ValueError, OSError) as error:
            problem = str(error)
        problem = next((text for text in self._hosts.gather(problem) if text is not None), None)
        if problem is None and manifest is not None:
            check_leaves(manifest, abstract, weights_only)
            state = self._read_arrays(directory / manifest["arrays"], abstract)
            problem = self._bits_problem(state, manifest)
            if problem is None:
                return state, manifest
        rejected.append(Fallback(directory.name, problem or "no manifest", committed))
        return None

    def _read_arrays(self, directory: Path, abstract: Any) -> Any:
        leaves = _flatten(abstract)
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in leaves.items()
        }
        arguments = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=True)
        restored = self._orbax.restore(directory, args=arguments)
        return jax.tree.unflatten(jax.tree.structure(abstract), [restored[name] for name in leaves])

    def _bits_problem(self, state: Any, manifest: dict[str, Any]) -> str | None:
        for name, digest in fingerprint.leaf_digests(state).items():
            if digest != manifest["leaves"][name]["digest"]:
                return f"the bits of {name} are not those that were saved"
        return None

    def _set_aside(self, rejected: list[Fallback], restored: int | None) -> None:
        """Quarantine what was committed and is bad, delete what was never committed, and record both."""
        if not self._hosts.is_main:
            return
        for fallback in rejected:
            source = self.directory / fallback.name
            self._fence.check()
            if fallback.committed:
                target = self.quarantine / f"{fallback.name}.{self._fence.attempt}"
                target.parent.mkdir(parents=True, exist_ok=True)
                source.rename(target)
                self._ledger.append("quarantine", int(fallback.name), reason=fallback.reason, moved_to=str(target))
            else:
                remove_tree(source)
            self._ledger.append("fallback", restored, rejected=int(fallback.name), reason=fallback.reason)
            warn(f"checkpoint {fallback.name} not restored: {fallback.reason}")
        for path in step_directories(self.directory):
            if not (path / MANIFEST).exists():
                remove_tree(path)

    def close(self) -> None:
        """Stop the background threads. The pending save must have been waited for."""
        self._worker.shutdown()
        self._orbax.close()


def raise_unless_committed(committed: bool, step: int) -> None:
    """Raise `StorageError` if the state of a job that ends could not be saved."""
    if not committed:
        raise StorageError(f"the state of step {step} could not be saved; run the same command again")
