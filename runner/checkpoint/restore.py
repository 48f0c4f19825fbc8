"""Restore: the newest state that every host can have and that is, bit for bit, what was saved.

Called on every host. The candidates are the steps of the durable tier, as host 0 lists them, and the steps of which
every host still has its part in the fast tier; newest first, of one step the fast tier first. Each is checked in three
layers, bytes (size and CRC of every file against the manifest), shape (names, shapes, dtypes) and bits (the
fingerprint, computed again on the device from the restored arrays), and all hosts take the same verdict.

What fails in the durable tier is quarantined, but only after an older one has passed: if none does nothing is touched.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax

from runner.checkpoint import fingerprint, readers
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.leaves import decode_leaves, encode_leaves, flatten_with_names, validate_manifest_leaves
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    Manifest,
    NotCommittedError,
    find_file_problems,
    finish_retirements,
    list_steps,
    read_manifest,
    read_newest_manifest,
    retire_uncommitted,
)
from runner.checkpoint.weight_names import has_adapter, validate_weight_name
from runner.console import warn
from runner.errors import InvalidError, NewerFormatError, ResumeError, StorageError
from runner.records import PARAMS
from runner.run.attempt import Attempt
from runner.run.fence import RunIdentity
from runner.spec import Trajectory
from runner.storage import DiskError, Store, open_store, parse_number, read_log, split_checkpoint

Tier = Literal["durable", "fast"]
AttachmentCheck = Callable[[dict[str, bytes]], str | None]  # why a job cannot go on with them
QUARANTINE = "quarantine"


@dataclass(frozen=True)
class RestoredState:
    """A state that has passed every check, with the manifest that it came with.

    Attributes:
        attachments: the small files that the fast tier had beside it.
    """

    state: Any
    manifest: Manifest
    tier: Tier = "durable"
    attachments: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True)
class RejectedCheckpoint:
    """A checkpoint that was not restored, and why.

    Attributes:
        may_be_good: it could not be read now; that says nothing of what it holds.
    """

    step: int
    reason: str
    tier: Tier
    was_committed: bool = True
    may_be_good: bool = False


class RestoreProblem(NamedTuple):
    """Why a host cannot restore a checkpoint."""

    reason: str
    may_be_good: bool = False


class Restorer:
    """Restores of one attempt. Made and called on every host."""

    def __init__(self, attempt: Attempt, fast: FastTier | None):
        self._attempt, self._fast = attempt, fast

    def restore(
        self, abstract: Any, identity: Trajectory, problem_with: AttachmentCheck = lambda _: None
    ) -> RestoredState | None:
        """The newest state that passes every check; None if nothing was ever committed.

        `problem_with` is asked on the main host about what the fast tier has kept beside a state.

        `abstract` has the shape, dtype and sharding of every leaf: the checkpoint may have been written on any other
        mesh. Raises with nothing touched, if checkpoints exist and none can be restored: `ResumeError`, or
        `StorageError` where the disk failed, or `NewerFormatError` as soon as one is met.
        """
        store, hosts = self._attempt.store, self._attempt.hosts
        if hosts.is_main:
            finish_retirements(store)
        durable = hosts.agree(list_steps(store) if hosts.is_main else [])
        candidates = [(step, 0) for step in durable] + [(step, 1) for step in self._common(identity)]
        rejected: list[RejectedCheckpoint] = []
        for step, is_fast in sorted(candidates, reverse=True):
            found = self._try_fast(step, abstract, problem_with) if is_fast else self._try(store, str(step), abstract)
            if isinstance(found, RestoredState):
                self._set_aside(rejected, step)
                return found
            rejected.append(found)
        self._refuse_to_start_over(rejected)
        self._set_aside(rejected, None)
        return None

    def _refuse_to_start_over(self, rejected: list[RejectedCheckpoint]) -> None:
        store, hosts = self._attempt.store, self._attempt.hosts
        events = read_log(store, "events") if hosts.is_main else []
        durable = [event for event in events if event.get("event") == "commit" and event.get("tier") != "fast"]
        was_committed = hosts.agree(bool(durable))
        if was_committed or any(other.was_committed for other in rejected):
            reasons = "".join(f"\n  step {other.step}: {other.reason}" for other in rejected)
            if any(other.may_be_good for other in rejected):
                raise StorageError(f"{store.url}: no checkpoint can be read now; nothing was touched{reasons}")
            raise ResumeError(
                f"{store.url}: checkpoints were committed here and none can be restored; nothing was touched. "
                f"Repair one, or use another directory to start over{reasons or chr(10) + '  all are missing'}"
            )

    def load(self, name: str, abstract: Any) -> RestoredState:
        """The checkpoint `name`, checked like any other. Raises `ResumeError` if it cannot be restored."""
        found = self._try(self._attempt.store, name, abstract)
        if isinstance(found, RejectedCheckpoint):
            raise ResumeError(f"{self._attempt.store.url}/{CHECKPOINTS}/{name}: {found.reason}")
        return found

    def restore_weights(self, source: Store, name: str | None, abstract: Any) -> RestoredState:
        """The leaves of `abstract` alone from another run: from its checkpoint `name`, or from the newest that is good.

        Raises `ResumeError` if there is none.
        """
        hosts = self._attempt.hosts
        names = [] if name is None else [name]
        if name is None and hosts.is_main:
            names = [str(step) for step in reversed(list_steps(source))]
        rejected: list[RejectedCheckpoint] = []
        for candidate in hosts.agree(names):
            found = self._try(source, candidate, abstract, weights_only=True)
            if isinstance(found, RestoredState):
                return found
            rejected.append(found)
        told = [other for other in rejected if other.was_committed or name is not None]
        reasons = "; ".join(f"{other.step}: {other.reason}" for other in told)
        if any(other.may_be_good for other in rejected):
            raise StorageError(f"checkpoint.init_from: {source.url}: no checkpoint can be read now: {reasons}")
        raise ResumeError(f"checkpoint.init_from: {source.url}: {reasons or 'no checkpoint is here'}")

    def _common(self, identity: Trajectory) -> list[int]:
        """Steps of which every host has its part in the fast tier."""
        present = self._attempt.hosts.gather([] if self._fast is None else self._fast.steps(identity))
        return sorted(set.intersection(*(set(own) for own in present)))

    def _try_fast(self, step: int, abstract: Any, problem_with: AttachmentCheck) -> RestoredState | RejectedCheckpoint:
        assert self._fast is not None, "only a fast tier has such a step"
        problem, part = None, None
        arrays: dict[str, jax.Array] = {}
        attachments: dict[str, bytes] = {}
        try:
            arrays, part = self._fast.read(step, encode_leaves(flatten_with_names(abstract)))
            validate_manifest_leaves(part, abstract)
            attachments = self._fast.attachments(step)
            reason = problem_with(attachments) if self._attempt.hosts.is_main else None
            problem = None if reason is None else RestoreProblem(reason)
        except (ValueError, OSError, KeyError) as error:
            problem = RestoreProblem(f"process {self._attempt.hosts.process_id}: {error}")
        problem = self._first(problem)
        if problem is None and part is not None:
            state = _unflatten(abstract, arrays)
            different = _bits_problem(state, part)
            if different is None:
                return RestoredState(state, part, "fast", attachments)
            problem = RestoreProblem(different)
        return RejectedCheckpoint(step, problem.reason if problem else "no part", "fast")

    def _try(
        self, store: Store, name: str, abstract: Any, weights_only: bool = False
    ) -> RestoredState | RejectedCheckpoint:
        directory, step = f"{CHECKPOINTS}/{name}", parse_number(name)
        step = -1 if step is None else step
        manifest, problem, was_committed = self._read_manifest(store, directory)
        problem = self._first(problem)
        if problem is not None or manifest is None:
            problem = problem or RestoreProblem("no manifest")
            return RejectedCheckpoint(step, problem.reason, "durable", was_committed, problem.may_be_good)
        validate_manifest_leaves(manifest, abstract, weights_only)
        arrays: dict[str, jax.Array] = {}
        try:
            arrays = readers.read_arrays(store, directory, manifest, encode_leaves(flatten_with_names(abstract)))
        except DiskError as error:
            problem = RestoreProblem(str(error), may_be_good=True)
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            problem = RestoreProblem(str(error))
        problem = self._first(problem)
        if problem is not None:
            return RejectedCheckpoint(step, problem.reason, "durable", may_be_good=problem.may_be_good)
        state = _unflatten(abstract, arrays)
        different = _bits_problem(state, manifest)
        return RestoredState(state, manifest) if different is None else RejectedCheckpoint(step, different, "durable")

    def _read_manifest(self, store: Store, directory: str) -> tuple[Manifest | None, RestoreProblem | None, bool]:
        """The manifest, what is wrong with it or its files on this host, and whether the step was committed at all."""
        hosts = self._attempt.hosts
        try:
            manifest = read_manifest(store, directory)
            if manifest.shards is not None:  # each piece is checked when it is read
                return manifest, None, True
            found = find_file_problems(store, directory, manifest.files, hosts.process_id, hosts.num_processes)
            return manifest, RestoreProblem(found[0]) if found else None, True
        except NotCommittedError as error:
            return None, RestoreProblem(str(error)), False
        except NewerFormatError:
            raise
        except DiskError as error:
            return None, RestoreProblem(f"{MANIFEST} or a file: {error}", may_be_good=True), True
        except StorageError:
            raise  # that the store is down says nothing of the checkpoint
        except (ValueError, OSError) as error:
            return None, RestoreProblem(f"{MANIFEST}: {error}"), True

    def _first(self, problem: RestoreProblem | None) -> RestoreProblem | None:
        """The first problem that any host has, on every host."""
        found = (other for other in self._attempt.hosts.gather(problem) if other is not None)
        return next((RestoreProblem(*other) for other in found), None)

    def _set_aside(self, rejected: list[RejectedCheckpoint], restored: int | None) -> None:
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
        for step in list_steps(attempt.store):
            attempt.fence.check()
            retire_uncommitted(attempt.store, step, attempt.number)

    def _quarantine(self, rejected: RejectedCheckpoint) -> None:
        """Move a bad checkpoint away as evidence, its manifest first, so that it is never picked again."""
        attempt, store, source = self._attempt, self._attempt.store, f"{CHECKPOINTS}/{rejected.step}"
        target = self._free_place(f"{QUARANTINE}/{rejected.step}.{attempt.number}")
        if store.root is None and store.exists(f"{source}/{MANIFEST}"):
            store.write(f"{target}/{MANIFEST}", store.read(f"{source}/{MANIFEST}"))
            store.remove(f"{source}/{MANIFEST}")
        store.move_tree(source, target)
        attempt.events.append("quarantine", rejected.step, reason=rejected.reason, moved_to=f"{store.url}/{target}")

    def _free_place(self, name: str) -> str:
        """`name`, or the next that nothing has: attempts count from 1 again where their numbers were lost."""
        taken = set(self._attempt.store.list_names(QUARANTINE))
        places = (name, *(f"{name}.{number}" for number in range(1, len(taken) + 1)))
        return next(place for place in places if place.removeprefix(f"{QUARANTINE}/") not in taken)


def validate_checkpoints(store: Store, claimant: RunIdentity) -> bool:
    """Refuse to continue checkpoints of another trajectory; whether there are any. Main host only."""
    manifest = read_newest_manifest(store)
    if manifest is not None:
        claimant.validate_trajectory(manifest.identity, f"checkpoint {manifest.name}", store.url)
    return manifest is not None


def validate_source_run(text: str, weights: str = PARAMS) -> None:
    """Raise `InvalidError` if `text`, another run or one of its checkpoints, has no such weights to be restored."""
    directory, name = split_checkpoint(text)
    store = open_store(directory)
    try:
        manifest = read_newest_manifest(store) if name is None else read_manifest(store, f"{CHECKPOINTS}/{name}")
        if manifest is None:
            raise ResumeError(f"{store.url}: no checkpoint is here")
        if has_adapter(manifest.leaves):
            raise InvalidError(
                f"{text} is of a run with an adapter; export it, which merges, and begin with the export"
            )
        validate_weight_name(manifest.leaves, weights)
    except InvalidError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise ResumeError(f"{store.url}/{CHECKPOINTS}/{name}: {error}") from error


def _unflatten(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    """The state from what a reader has read."""
    leaves = decode_leaves(arrays, flatten_with_names(abstract))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values())


def _bits_problem(state: Any, manifest: Manifest) -> str | None:
    for name, digest in fingerprint.compute_leaf_digests(state).items():
        if digest != manifest.leaves[name]["digest"]:
            return f"the bits of {name} are not those that were saved"
    return None
