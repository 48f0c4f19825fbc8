"""Restore of the newest state that every host can read and that is bit-identical to the saved one.

Every function is called on every host, unless its docstring says otherwise. The candidates of a restore are the steps
of the durable directory, as process 0 lists them, and the steps of which every host still has its part in the fast
tier. They are tried from the newest to the oldest. Of equal steps the fast tier is tried first, unless the durable
checkpoint has another fingerprint or an unreadable manifest: what was committed outranks a part that an earlier attempt
has left on its host. Each candidate passes three checks, in which all hosts get the same result:

1. bytes: size and CRC-32C of every file against the manifest;
2. shape: names, shapes and types of the leaves against the job's state;
3. bits: the fingerprint, computed again on the devices from the restored arrays.

A durable checkpoint that fails is quarantined, but only after an older one has passed. If none passes, nothing is
changed and the job refuses to start.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import numpy as np

from runner.attempts.attempt import Attempt
from runner.attempts.fence import RunIdentity
from runner.checkpoint import arrays as readers
from runner.checkpoint import fingerprint
from runner.checkpoint.fast_tier import FastTier
from runner.checkpoint.leaves import (
    Leaves,
    decode_leaves,
    encode_leaves,
    flatten_with_names,
    has_frozen_base,
    make_abstract,
    map_weight_names,
    validate_manifest_leaves,
    validate_weight_name,
)
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    MAX_LISTINGS,
    QUARANTINE,
    Manifest,
    NotCommittedError,
    find_file_problems,
    finish_retirements,
    is_committed,
    list_steps,
    quarantine_files,
    read_manifest,
    read_newest_manifest,
    retire_uncommitted,
)
from runner.checkpoint.parts import FastPart
from runner.console import warn
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, NewerFormatError, ResumeError, StorageError
from runner.spec import PARAMS, Trajectory
from runner.storage import DiskError, Store, open_store, read_log, split_checkpoint

Tier = Literal["durable", "fast"]
Found = TypeVar("Found", "RestoredState", Manifest)
AttachmentCheck = Callable[[dict[str, bytes]], str | None]  # returns the reason why a job cannot continue
_MAX_NAMES = 20  # of checkpoints in a message
_MAX_SOURCES = 3  # of a part whose bits are wrong
_RESUMING_EVENTS = ("init", "fork", "restore", "load")  # after which an attempt goes on from `step`


@dataclass(frozen=True)
class RestoredState:
    """State that has passed every check, with its manifest."""

    state: Any
    manifest: Manifest
    tier: Tier = "durable"  # that it was read from
    attachments: dict[str, bytes] = field(default_factory=dict)  # small files that the fast tier stores beside it
    fetched: Sequence[int] = ()  # processes whose part of the fast tier, or a file of it, came from a replica
    is_committed: bool = True  # True if the run's directory has this state, so that it need not be saved again


@dataclass(frozen=True)
class RejectedCheckpoint:
    """Checkpoint that was not restored, and the reason, one line for a message."""

    name: str  # for a tier's own checkpoints the step
    reason: str
    tier: Tier
    was_committed: bool = True  # False if it has no manifest
    may_be_good: bool = False  # if it could not be read now, which says nothing about its content


class _RestoreProblem(NamedTuple):
    """Reason why a host cannot restore a checkpoint, as it is sent to the other hosts."""

    reason: str
    may_be_good: bool = False


# Restore of the job's own run.


def restore_newest(
    attempt: Attempt,
    fast_tier: FastTier | None,
    abstract: Any,
    is_own: Callable[[Trajectory, int], bool],
    find_attachment_problem: AttachmentCheck = lambda _: None,
) -> RestoredState | None:
    """Return the newest state that passes every check; None if nothing was ever committed.

    Checkpoints that failed are set aside: durable ones are quarantined, uncommitted ones are deleted. `abstract` has
    shape, dtype and sharding of every leaf; the checkpoint may have been written on any other mesh. Parts in the fast
    tier are ignored unless `is_own` returns True for their trajectory and step, and refused if
    `find_attachment_problem`, which is called on process 0, returns a reason.

    Raises:
        ResumeError: checkpoints exist and none can be restored; nothing was touched.
        StorageError: the same, where the disk failed.
        NewerFormatError: a newer runner has written one of them; nothing was touched.
    """
    store, hosts = attempt.store, attempt.hosts
    if hosts.is_main:
        finish_retirements(store)
    # Listings of a shared disk may differ between hosts, so all hosts use the one of process 0.
    durable_steps = hosts.agree(list_steps(store) if hosts.is_main else [])
    parts: dict[int, FastPart] = {}
    if fast_tier is not None:
        limits, newest = hosts.agree(find_limits(store, durable_steps) if hosts.is_main else None)
        parts = fast_tier.list_parts(is_own, dict(limits), newest)
    listed = hosts.gather([(step, part.manifest.fingerprint) for step, part in parts.items()])
    # Parts of one step with other bits are not parts of one state.
    fast_steps = dict(set.intersection(*({(step, bits) for step, bits in own} for own in listed)))

    def compare_tiers() -> list[tuple[int, bool]]:
        """Return (step, True if the state in the fast tier is the same) of checkpoints that were committed."""
        found = []
        for step in sorted(fast_steps.keys() & set(durable_steps)):
            with contextlib.suppress(NotCommittedError):
                try:
                    is_same = read_manifest(store, f"{CHECKPOINTS}/{step}").fingerprint == fast_steps[step]
                except (ValueError, DiskError):  # the restore says what is wrong with it
                    is_same = False
                found.append((step, is_same))
        return found

    same = {int(step): bool(is_same) for step, is_same in hosts.run_on_main(compare_tiers)}
    rejected: list[RejectedCheckpoint] = []
    # Sorted by step, then by rank.
    candidates = [(step, 1, False) for step in durable_steps]
    candidates += [(step, 2 if same.get(step, True) else 0, True) for step in fast_steps]
    for step, _, is_fast in sorted(candidates, reverse=True):
        if is_fast:
            found = _try_fast(hosts, parts[step], abstract, find_attachment_problem)
        else:
            found = _try_durable(hosts, store, str(step), abstract)
        if isinstance(found, RestoredState):
            _set_aside(attempt, fast_tier, rejected, step)
            return replace(found, is_committed=same.get(step, False)) if is_fast else found
        rejected.append(found)
    # Nothing was restored. The job may start from step 0 only if nothing was ever committed. The event ledger tells,
    # even if somebody has deleted the directories of the checkpoints.
    events = read_log(store, "events") if hosts.is_main else []
    commits = [event for event in events if event.get("event") == "commit" and event.get("tier") != "fast"]
    if hosts.agree(bool(commits)) or any(other.was_committed for other in rejected):
        reasons = "".join(f"\n  step {other.name}: {other.reason}" for other in rejected)
        if any(other.may_be_good for other in rejected):
            raise StorageError(f"{store.url}: no checkpoint can be read now; nothing was touched{reasons}")
        raise ResumeError(
            f"{store.url}: checkpoints were committed here and none can be restored; nothing was touched. "
            f"Repair one, or use another directory to start over{reasons or chr(10) + '  all are missing'}"
        )
    _set_aside(attempt, fast_tier, rejected, None)
    return None


def find_limits(store: Store, durable_steps: list[int]) -> tuple[list[tuple[int, int]], int]:
    """Return (attempt, lowest step from which a later attempt has resumed) of each, and the newest committed step.

    Process 0 only.
    """
    resumed: dict[int, int] = {}
    for event in read_log(store, "events"):
        attempt, step = event.get("attempt"), event.get("step")
        if event.get("event") in _RESUMING_EVENTS and isinstance(attempt, int) and isinstance(step, int):
            resumed[attempt] = min(step, resumed.get(attempt, step))
    limits: list[tuple[int, int]] = []
    for attempt in reversed(range(max(resumed, default=0))):
        following = limits[-1][1] if limits else resumed[attempt + 1]
        limits.append((attempt, min(following, resumed.get(attempt + 1, following))))
    committed = (step for step in sorted(durable_steps, reverse=True) if is_committed(store, str(step)))
    return limits, next(committed, 0)


def load_checkpoint(attempt: Attempt, name: str, abstract: Any) -> RestoredState:
    """Return the checkpoint `name` of the job's own run if it passes the checks of `restore_newest`.

    Raises `ResumeError` if it does not.
    """
    found = _try_durable(attempt.hosts, attempt.store, name, abstract)
    if isinstance(found, RejectedCheckpoint):
        names = sorted(attempt.store.list_names(CHECKPOINTS)) if attempt.hosts.is_main else []
        has = ", ".join(attempt.hosts.agree(names)[:_MAX_NAMES]) or "none"
        raise ResumeError(f"{attempt.store.url}/{CHECKPOINTS}/{name}: {found.reason}; the run has {has}")
    return found


def _try_fast(
    hosts: Hosts, part: FastPart, abstract: Any, find_attachment_problem: AttachmentCheck
) -> RestoredState | RejectedCheckpoint:
    step = part.manifest.step
    bits_problem: str | None = None
    for number in itertools.count():
        problem = None
        arrays: dict[str, jax.Array] = {}
        attachments: dict[str, bytes] = {}
        try:
            if bits_problem is not None:
                part = part.choose_source(number - 1, hosts.process_id, bits_problem)
            arrays = part.read(encode_leaves(flatten_with_names(abstract)))
            validate_manifest_leaves(part.manifest, abstract)
            attachments = part.read_attachments()
            reason = find_attachment_problem(attachments) if hosts.is_main else None
            problem = None if reason is None else _RestoreProblem(reason)
        except (ValueError, OSError, KeyError) as error:
            problem = _RestoreProblem(f"process {hosts.process_id}: {error}")
        # A fingerprint is a collective, so no host may compute it before all hosts have their arrays.
        problem = _gather_first_problem(hosts, problem)
        if problem is not None:
            return RejectedCheckpoint(str(step), problem.reason, "fast")
        state = _unflatten(abstract, arrays)
        try:
            bits_problem = fingerprint.find_bits_problem(state, part.manifest.leaves)
        except fingerprint.ReplicaError as error:  # on every host
            bits_problem = str(error)
        # Each host compares with the digests of its own part, so one may find a problem that the others do not.
        results = hosts.gather([bits_problem, part.is_fetched, len(part.sources)])
        bits_problem = next((reason for reason, *_ in results if reason is not None), None)
        if bits_problem is None:
            break
        # The bytes are those that were written, but the memory of a host may have been wrong when it wrote them. Other
        # processes with the same blocks have copied these from their own devices. The digests do not tell whose part is
        # wrong, so all processes read from the first source of their blocks, then all from the second.
        num_sources = max(count for *_, count in results)
        if num_sources == 1 or number == min(num_sources, _MAX_SOURCES):
            return RejectedCheckpoint(str(step), bits_problem, "fast")
    if part.problems:
        warn(
            f"process {hosts.process_id}: {len(part.problems)} files of step {step} of the fast tier were damaged, "
            f"read from a replica: {part.problems[0]}"
        )
    fetched = [process for process, (_, is_fetched, _) in enumerate(results) if is_fetched]
    return RestoredState(state, part.manifest, "fast", attachments, fetched)


def _try_durable(
    hosts: Hosts, store: Store, name: str, abstract: Any, weights_only: bool = False
) -> RestoredState | RejectedCheckpoint:
    directory = f"{CHECKPOINTS}/{name}"
    # 1. Bytes.
    manifest = _check_files(hosts, store, name)
    if isinstance(manifest, RejectedCheckpoint):
        return manifest
    # 2. Shape. Other leaves mean that code or spec have changed, which no older checkpoint would help: this raises.
    validate_manifest_leaves(manifest, abstract, weights_only)
    arrays: dict[str, jax.Array] = {}
    problem = None
    try:
        arrays = readers.read_arrays(store, directory, manifest, encode_leaves(flatten_with_names(abstract)))
    except DiskError as error:
        problem = _RestoreProblem(str(error), may_be_good=True)
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        problem = _RestoreProblem(str(error))
    problem = _gather_first_problem(hosts, problem)
    if problem is not None:
        return RejectedCheckpoint(name, problem.reason, "durable", may_be_good=problem.may_be_good)
    # 3. Bits.
    state = _unflatten(abstract, arrays)
    bits_problem = fingerprint.find_bits_problem(state, manifest.leaves)
    if bits_problem is not None:
        return RejectedCheckpoint(name, bits_problem, "durable")
    return RestoredState(state, manifest)


def _check_files(hosts: Hosts, store: Store, name: str, with_pieces: bool = False) -> Manifest | RejectedCheckpoint:
    """Return the manifest of a checkpoint whose files have the right bytes. Every host checks its share of them.

    Arrays whose bytes are checked again when they are read are left out, unless `with_pieces`.
    """
    directory = f"{CHECKPOINTS}/{name}"
    manifest, problem, was_committed = None, None, True
    try:
        manifest = read_manifest(store, directory)
        if with_pieces or not manifest.is_checked_in_reading:
            bad = find_file_problems(store, directory, manifest.files, hosts.process_id, hosts.num_processes)
            problem = _RestoreProblem(bad[0]) if bad else None
    except NotCommittedError as error:
        problem, was_committed = _RestoreProblem(str(error)), False
    except NewerFormatError:
        raise
    except DiskError as error:
        problem = _RestoreProblem(f"{MANIFEST} or a file: {error}", may_be_good=True)
    except StorageError:
        raise  # that the store is down says nothing about the checkpoint
    except (ValueError, OSError) as error:
        problem = _RestoreProblem(f"{MANIFEST}: {error}")
    problem = _gather_first_problem(hosts, problem)
    if problem is not None or manifest is None:
        problem = problem or _RestoreProblem("no manifest")
        return RejectedCheckpoint(name, problem.reason, "durable", was_committed, problem.may_be_good)
    return manifest


def _gather_first_problem(hosts: Hosts, problem: _RestoreProblem | None) -> _RestoreProblem | None:
    """Return the first problem that any host has, on every host."""
    found = (other for other in hosts.gather(problem) if other is not None)
    return next((_RestoreProblem(*other) for other in found), None)


def _unflatten(abstract: Any, arrays: dict[str, jax.Array]) -> Any:
    leaves = decode_leaves(arrays, flatten_with_names(abstract))
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves.values())


def _set_aside(
    attempt: Attempt,
    fast_tier: FastTier | None,
    rejected: list[RejectedCheckpoint],
    restored: int | None,
) -> None:
    """Quarantine committed checkpoints that are bad, delete uncommitted ones, and record both."""
    if fast_tier is not None:
        # A newer attempt on this host may have saved later states while this one read, or was suspended.
        attempt.fence.check()
        fast_tier.delete_after(-1 if restored is None else restored)
    if not attempt.hosts.is_main:
        return
    store = attempt.store
    for other in rejected:
        attempt.fence.check()
        if other.tier == "durable" and other.was_committed:
            quarantine(attempt, int(other.name), other.reason)
        attempt.events.append("fallback", restored, rejected=int(other.name), reason=other.reason, tier=other.tier)
        warn(f"checkpoint {other.name} ({other.tier}) not restored: {other.reason}")
    # Uncommitted saves of earlier attempts must be retired before this attempt saves: a process of such an attempt may
    # still be running and about to commit.
    for step in list_steps(store):
        attempt.fence.check()
        retire_uncommitted(store, step, attempt.number)


def quarantine(attempt: Attempt, step: int, reason: str) -> None:
    """Move a committed step out of the run's checkpoints, into `quarantine/`. Process 0 only."""
    attempt.fence.check()
    store = attempt.store
    # Attempts are numbered from 1 again if the files of earlier attempts were lost, so the name may be taken.
    name = place = f"{step}.{attempt.number}"
    taken, number = set(store.list_names(QUARANTINE)), 0
    while place in taken:
        number += 1
        place = f"{name}.{number}"
    quarantine_files(store, step, place, attempt.number)
    attempt.events.append("quarantine", step, reason=reason, moved_to=f"{store.url}/{QUARANTINE}/{place}")


# State and weights of another run.


@dataclass(frozen=True)
class SourceRun:
    """Another run from whose checkpoints this one begins; nothing is changed there."""

    store: Store  # its directory
    # Returns names of checkpoints in the order in which they are tried. Called on process 0.
    list_candidates: Callable[[], list[str]]
    where: str  # beginning of the message if none is good
    is_named: bool  # by the user; else those that were never committed are skipped silently.

    def restore(
        self, hosts: Hosts, abstract: Any, weights_only: bool = False
    ) -> tuple[RestoredState, list[RejectedCheckpoint]]:
        """Return the first good checkpoint, and those rejected before it. Called on every host.

        With `weights_only`, leaves that only the checkpoint has are ignored. Raises `ResumeError` if no candidate is
        good, and `StorageError` if one cannot be read now, and none of the others is good.
        """
        return self._find_first_good(hosts, lambda name: _try_durable(hosts, self.store, name, abstract, weights_only))

    def validate_files(self, hosts: Hosts) -> None:
        """Check, with the errors of `restore`, that it will find a checkpoint whose files have the right bytes."""
        self._find_first_good(hosts, lambda name: _check_files(hosts, self.store, name, with_pieces=True))

    def _find_first_good(
        self, hosts: Hosts, check: Callable[[str], Found | RejectedCheckpoint]
    ) -> tuple[Found, list[RejectedCheckpoint]]:
        def has_changed(candidates: list[str], rejected: list[str]) -> bool:
            return self.list_candidates() != candidates or not all(is_committed(self.store, each) for each in rejected)

        for _ in range(MAX_LISTINGS):
            candidates: list[str] = hosts.run_on_main(self.list_candidates)
            rejected: list[RejectedCheckpoint] = []
            for candidate in candidates:
                found = check(candidate)
                if not isinstance(found, RejectedCheckpoint):
                    return found, [other for other in rejected if other.was_committed or self.is_named]
                rejected.append(found)
            # The other run may be alive and delete its old checkpoints while they are read: then it has a newer one.
            bad = [other.name for other in rejected if other.was_committed]
            if not hosts.run_on_main(functools.partial(has_changed, candidates, bad)):
                break
        told = [f"{other.name}: {other.reason}" for other in rejected if other.was_committed or self.is_named]
        if any(other.may_be_good for other in rejected):
            raise StorageError(f"{self.where}: no checkpoint can be read now: {'; '.join(told)}")
        raise ResumeError(f"{self.where}: {'; '.join(told) or 'no checkpoint is here'}")


def load_weights(attempt: Attempt, source: str, weights: Any, name: str = PARAMS) -> Any:
    """Return the weights of another run, from its newest good checkpoint, or from `source` if that names one.

    `weights` are arrays with the names, shapes, types and shardings of the result. `name` is `params`, or that of an
    average; averages are stored in float32 and cast. Raises `ResumeError` if there is no such checkpoint, or it is not
    good, and `StorageError` if it cannot be read now.
    """
    directory, checkpoint = split_checkpoint(source)
    wanted = {leaf_name: make_abstract(leaf) for leaf_name, leaf in flatten_with_names(weights).items()}
    saved_names = map_weight_names(name, wanted)
    abstract = _make_saved_abstract(wanted, name)
    store = open_store(directory)

    def list_candidates() -> list[str]:
        return [checkpoint] if checkpoint is not None else [str(step) for step in reversed(list_steps(store))]

    run = SourceRun(store, list_candidates, f"checkpoint.init_from: {store.url}", is_named=checkpoint is not None)
    found, _ = run.restore(attempt.hosts, abstract, weights_only=True)
    attempt.say(f"{'weights' if name == PARAMS else name} of step {found.manifest.step} taken from {source}")
    leaves = [
        found.state[saved_names[leaf_name]]
        if saved_names[leaf_name] == leaf_name
        else found.state[saved_names[leaf_name]].astype(leaf.dtype)
        for leaf_name, leaf in wanted.items()
    ]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def _make_saved_abstract(wanted: Leaves, name: str) -> Leaves:
    """Return the leaves of a checkpoint that hold the `wanted` ones, by their names there; see `load_weights`."""
    saved_names = map_weight_names(name, wanted)
    return {
        saved_names[leaf_name]: leaf
        if saved_names[leaf_name] == leaf_name
        else jax.ShapeDtypeStruct(leaf.shape, np.float32, sharding=leaf.sharding)
        for leaf_name, leaf in wanted.items()
    }


# Checks before an attempt is claimed. Process 0 only.


def validate_checkpoints(store: Store, run_identity: RunIdentity) -> Manifest | None:
    """Return the manifest of the run's newest checkpoint; None if it has none. Process 0 only.

    Raises `ResumeError` if the checkpoint is of another trajectory.
    """
    manifest = read_newest_manifest(store)
    if manifest is None:
        return None
    owner = f"checkpoint {manifest.name}"
    run_identity.validate_trajectory(manifest.identity, owner, store.url, lambda: manifest.step)
    return manifest


def validate_source_run(source: str, weights: Any, name: str = PARAMS) -> None:
    """Raise `InvalidError` if a run does not have the weights that `load_weights`, with these arguments, would read.

    Process 0 only. `weights` may be abstract.
    """
    directory, checkpoint = split_checkpoint(source)
    store = open_store(directory)
    try:
        manifest = (
            read_newest_manifest(store) if checkpoint is None else read_manifest(store, f"{CHECKPOINTS}/{checkpoint}")
        )
        if manifest is None:
            raise ResumeError(f"{store.url}: no checkpoint is here")
        if has_frozen_base(manifest.leaves):
            raise InvalidError(
                f"{source} is of a run with an adapter; export it, which merges the adapter, and use the export instead"
            )
        validate_weight_name(manifest.leaves, name)
        validate_manifest_leaves(manifest, _make_saved_abstract(flatten_with_names(weights), name), may_hold_more=True)
    except InvalidError:
        raise
    except (FileNotFoundError, ValueError) as error:
        raise ResumeError(f"{store.url}/{CHECKPOINTS}/{checkpoint}: {error}") from error
