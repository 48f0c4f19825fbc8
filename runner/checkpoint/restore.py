"""Restore: the newest state that every host can have and that is, bit for bit, what was saved.

Called on every host. The candidates are the steps of the durable tier, as host 0 lists them, and the steps of which
every host still has its part in the fast tier; newest first, of one step the fast tier first. Each is checked in three
layers, bytes (size and CRC of every file against the manifest), shape (names, shapes, dtypes) and bits (the
fingerprint, computed again on the device from the restored arrays), and all hosts take the same verdict.

What fails in the durable tier is quarantined, but only after an older one has passed: if none does nothing is touched.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax

from runner.attempt.claim import Attempt
from runner.checkpoint import fingerprint, reader
from runner.checkpoint.fast import FastTier
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    NotCommittedError,
    check_leaves,
    committed,
    file_problems,
    read_manifest,
    steps,
)
from runner.checkpoint.tombstone import bury, finish_burials
from runner.errors import ResumeError, StorageError
from runner.spec import Trajectory
from runner.storage import Store, read_log
from runner.terminal import warn

Tier = Literal["durable", "fast"]
AttachmentCheck = Callable[[dict[str, bytes]], str | None]  # why a job cannot go on with them


@dataclass(frozen=True)
class Restored:
    """A state that has passed every check, with the manifest that it came with.

    Attributes:
        attachments: the small files that the fast tier had beside it.
    """

    state: Any
    manifest: Manifest
    tier: Tier = "durable"
    attachments: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class Rejected:
    """A checkpoint that was not restored, and why."""

    step: int
    reason: str
    tier: Tier
    was_committed: bool = True


class Restorer:
    """Restores of one attempt. Made and called on every host."""

    def __init__(self, attempt: Attempt, fast: FastTier | None):
        self._attempt, self._fast = attempt, fast

    def restore(
        self, abstract: Any, identity: Trajectory, problem_with: AttachmentCheck = lambda _: None
    ) -> Restored | None:
        """The newest state that passes every check; None if nothing was ever committed.

        `problem_with` is asked on the main host about what the fast tier has kept beside a state.

        `abstract` has the shape, dtype and sharding of every leaf: the checkpoint may have been written on any other
        mesh. Raises `ResumeError`, with nothing touched, if checkpoints exist and none can be restored.
        """
        store, hosts = self._attempt.store, self._attempt.hosts
        if hosts.is_main:
            finish_burials(store)
        durable = hosts.agree(steps(store) if hosts.is_main else [])
        candidates = [(step, 0) for step in durable] + [(step, 1) for step in self._common(identity)]
        rejected: list[Rejected] = []
        for step, is_fast in sorted(candidates, reverse=True):
            found = self._try_fast(step, abstract, problem_with) if is_fast else self._try(store, str(step), abstract)
            if isinstance(found, Restored):
                self._set_aside(rejected, step)
                return found
            rejected.append(found)
        self._refuse_to_start_over(rejected)
        self._set_aside(rejected, None)
        return None

    def _refuse_to_start_over(self, rejected: list[Rejected]) -> None:
        store, hosts = self._attempt.store, self._attempt.hosts
        events = read_log(store, "events") if hosts.is_main else []
        was_committed = hosts.agree(any(event.get("event") == "commit" for event in events))
        if was_committed or any(other.was_committed for other in rejected):
            reasons = "".join(f"\n  step {other.step}: {other.reason}" for other in rejected)
            raise ResumeError(
                f"{store.url}: checkpoints were committed here and none can be restored; nothing was touched. "
                f"Repair one, or use another directory to start over{reasons or chr(10) + '  all are missing'}"
            )

    def load(self, name: str, abstract: Any) -> Restored:
        """The checkpoint `name`, checked like any other. Raises `ResumeError` if it cannot be restored."""
        found = self._try(self._attempt.store, name, abstract)
        if isinstance(found, Rejected):
            raise ResumeError(f"{self._attempt.store.url}/{CHECKPOINTS}/{name}: {found.reason}")
        return found

    def restore_weights(self, source: Store, name: str | None, abstract: Any) -> Restored:
        """The leaves of `abstract` alone from another run: from its checkpoint `name`, or from the newest that is good.

        Raises `ResumeError` if there is none.
        """
        hosts = self._attempt.hosts
        names = [] if name is None else [name]
        if name is None and hosts.is_main:
            names = [str(step) for step in sorted(committed(source), reverse=True)]
        rejected: list[Rejected] = []
        for candidate in hosts.agree(names):
            found = self._try(source, candidate, abstract, weights_only=True)
            if isinstance(found, Restored):
                return found
            rejected.append(found)
        reasons = "; ".join(f"{other.step}: {other.reason}" for other in rejected)
        raise ResumeError(f"checkpoint.init_from: {source.url}: {reasons or 'no checkpoint is here'}")

    def _common(self, identity: Trajectory) -> list[int]:
        """Steps of which every host has its part in the fast tier."""
        present = self._attempt.hosts.gather([] if self._fast is None else self._fast.steps(identity))
        return sorted(set.intersection(*(set(own) for own in present)))

    def _try_fast(self, step: int, abstract: Any, problem_with: AttachmentCheck) -> Restored | Rejected:
        assert self._fast is not None, "only a fast tier has such a step"
        problem, part = None, None
        arrays: dict[str, jax.Array] = {}
        attachments: dict[str, bytes] = {}
        try:
            arrays, part = self._fast.read(step, _flatten(abstract))
            check_leaves(part, abstract)
            attachments = self._fast.attachments(step)
            problem = problem_with(attachments) if self._attempt.hosts.is_main else None
        except (ValueError, OSError, KeyError) as error:
            problem = f"process {self._attempt.hosts.process_id}: {error}"
        problem = self._first(problem)
        if problem is None and part is not None:
            state = _unflatten(abstract, arrays)
            problem = _bits_problem(state, part)
            if problem is None:
                return Restored(state, part, "fast", attachments)
        return Rejected(step, problem or "no part", "fast")

    def _try(self, store: Store, name: str, abstract: Any, weights_only: bool = False) -> Restored | Rejected:
        directory, step = f"{CHECKPOINTS}/{name}", int(name) if name.isdecimal() else -1
        manifest, problem, was_committed = self._read_manifest(store, directory)
        problem = self._first(problem)
        if problem is not None or manifest is None:
            return Rejected(step, problem or "no manifest", "durable", was_committed)
        check_leaves(manifest, abstract, weights_only)
        arrays: dict[str, jax.Array] = {}
        try:
            arrays = reader.read(store, directory, manifest, _flatten(abstract))
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            problem = str(error)
        problem = self._first(problem)
        if problem is None:
            state = _unflatten(abstract, arrays)
            problem = _bits_problem(state, manifest)
            if problem is None:
                return Restored(state, manifest)
        return Rejected(step, problem, "durable")

    def _read_manifest(self, store: Store, directory: str) -> tuple[Manifest | None, str | None, bool]:
        """The manifest, what is wrong with it or its files on this host, and whether the step was committed at all."""
        hosts = self._attempt.hosts
        try:
            manifest = read_manifest(store, directory)
            if manifest.shards is not None:  # each piece is checked when it is read
                return manifest, None, True
            found = file_problems(store, directory, manifest.files, hosts.process_id, hosts.num_processes)
            return manifest, next(iter(found), None), True
        except NotCommittedError as error:
            return None, str(error), False
        except StorageError:
            raise  # that the store is down says nothing of the checkpoint
        except (ValueError, OSError) as error:
            return None, f"{MANIFEST}: {error}", True

    def _first(self, problem: str | None) -> str | None:
        """The first problem that any host has, on every host."""
        return next((text for text in self._attempt.hosts.gather(problem) if text is not None), None)

    def _set_aside(self, rejected: list[Rejected], restored: int | None) -> None:
        """Quarantine what was committed and is bad, delete what was never committed, and record both."""
        attempt = self._attempt
        if self._fast is not None:
            self._fast.forget_after(-1 if restored is None else restored)
        if not attempt.hosts.is_main:
            return
        for other in rejected:
            attempt.fence.check()
            if other.tier == "durable" and other.was_committed:
                self._quarantine(other)
            attempt.events.append("fallback", restored, rejected=other.step, reason=other.reason, tier=other.tier)
            warn(f"checkpoint {other.step} ({other.tier}) not restored: {other.reason}")
        for step in steps(attempt.store):
            attempt.fence.check()
            bury(attempt.store, step, attempt.number)

    def _quarantine(self, rejected: Rejected) -> None:
        """Move a bad checkpoint away as evidence, its manifest first, so that it is never picked again."""
        attempt, store, source = self._attempt, self._attempt.store, f"{CHECKPOINTS}/{rejected.step}"
        target = f"quarantine/{rejected.step}.{attempt.number}"
        if store.root is None and store.exists(f"{source}/{MANIFEST}"):
            store.write(f"{target}/{MANIFEST}", store.read(f"{source}/{MANIFEST}"))
            store.remove(f"{source}/{MANIFEST}")
        store.move_tree(source, target)
        attempt.events.append("quarantine", rejected.step, reason=rejected.reason, moved_to=f"{store.url}/{target}")


def _flatten(tree: Any) -> dict[str, Any]:
    return dict(zip(fingerprint.leaf_names(tree), jax.tree.leaves(tree), strict=True))


def _unflatten(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in _flatten(abstract)])


def _bits_problem(state: Any, manifest: Manifest) -> str | None:
    for name, digest in fingerprint.leaf_digests(state).items():
        if digest != manifest.leaves[name]["digest"]:
            return f"the bits of {name} are not those that were saved"
    return None
