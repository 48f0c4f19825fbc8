"""Fork: a new run in a new directory that begins with the whole state of another run, its parent.

`checkpoint.fork_from` names the parent, its step and the keys whose values differ. The protocol:

1. Before the directory is claimed, process 0 compares the parent's manifest with the job: its leaves must be those of
   the job, and its trajectory too, except for the keys in `changes`. Then all hosts check the bytes of its files, each
   a share. If anything is wrong, nothing is written.
2. If the run has no checkpoint of its own, the state is restored from the parent, with all checks of a restore and on
   any mesh. The parent is only read: a damaged checkpoint stays where it is.
3. The fork's first act is a commit of this state, as its own checkpoint of the same step. A kill before that commit
   begins again at 1; after it the parent is never read, and may be deleted.

Position in the data, random keys, schedules and the total are functions of the absolute step and of the fork's own
spec. So a fork without changes has the bits of its parent, and one with other data takes the batch that these data
would have at that step if the run had had them from its start.

Every manifest of the fork holds its lineage (`LINEAGE_KEYS`), and with it that of its parent.
"""

import dataclasses
from typing import Any

from runner.attempts.attempt import Attempt
from runner.attempts.fence import RunIdentity, is_listed, shorten_keys
from runner.checkpoint.inspect import BEST, find_best_checkpoint, read_document
from runner.checkpoint.leaves import flatten_with_names, has_frozen_base, validate_manifest_leaves
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    Manifest,
    NotCommittedError,
    is_committed,
    list_steps,
    read_manifest,
    read_newest_manifest,
)
from runner.checkpoint.restore import RestoredState, SourceRun
from runner.console import escape_unprintable, warn
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError, ResumeError, StorageError, suggest_nearest
from runner.spec import PARAMS, ExecutionSpec, ForkConfig, is_below, validate_spec
from runner.storage import JsonObject, Store, local_directory, open_store, resolve_place, split_checkpoint, validate_url

NEWEST = "newest"
_MAX_NAMED = 20  # steps in a message
_MAX_LEAVES = 16  # in a message


# The parent.


def _validate_parent_name(fork: ForkConfig) -> None:
    """Raise `InvalidError` if `run` names a checkpoint, or cannot be a directory. Reads nothing."""
    directory, name = split_checkpoint(fork.run)
    if name is not None:
        raise InvalidError(f"run names a checkpoint, {fork.run}; write run: {directory} and step: {name}")
    validate_url(fork.run)


def open_parent(fork: ForkConfig) -> Store:
    """Return the parent's directory. Raises `InvalidError` if `run` cannot be one."""
    _validate_parent_name(fork)
    return open_store(fork.run)


def validate_parent_place(fork: ForkConfig, own: Store) -> None:
    """Raise `InvalidError` if the directories of a fork and its parent overlap. Reads nothing of the parent."""
    _validate_parent_name(fork)
    theirs, ours = (resolve_place(place).split("/") for place in (fork.run, own.url))
    shorter = min(len(theirs), len(ours))
    if theirs[:shorter] != ours[:shorter]:
        return
    if theirs == ours:
        raise InvalidError(f"{own.url} is the parent's own directory; give the fork another directory")
    # No run may lie inside another: it would be deleted with it, and no tool would find it.
    relation = "lies in" if len(ours) > shorter else "contains"
    raise InvalidError(f"{own.url} {relation} the parent's directory, {fork.run}; give the fork another directory")


def read_parent_manifest(fork: ForkConfig) -> tuple[Store, Manifest]:
    """Return the parent's directory, and the manifest of the checkpoint that a fork would begin with. Process 0 only.

    Raises `InvalidError` if there is no such checkpoint, or its manifest is damaged or of a newer runner, and
    `StorageError` if the parent cannot be reached.
    """
    store = open_parent(fork)
    name: str | None = None
    try:
        if fork.step == NEWEST:
            manifest = read_newest_manifest(store)
            if manifest is None:
                raise ResumeError(f"{store.url}: no checkpoint is here; needs the directory of a run that has saved")
            return store, manifest
        name = find_best_checkpoint(store, validate_spec(read_document(store))) if fork.step == BEST else str(fork.step)
        return store, read_manifest(store, f"{CHECKPOINTS}/{name}")
    except NotCommittedError as error:
        # A step whose directory exists is being written, or its save was never finished.
        steps = list_steps(store)
        state = "is not committed (yet)" if fork.step in steps else "was never saved, or has been deleted"
        committed = [str(step) for step in steps[-_MAX_NAMED:] if is_committed(store, str(step))]
        there = f"steps {', '.join(committed)}" if committed else "no checkpoint"
        raise ResumeError(f"{store.url}: step {name} {state}; the run has {there}") from error
    except (InvalidError, StorageError):
        raise
    except ValueError as error:
        reason = escape_unprintable(str(error))
        raise ResumeError(f"{store.url}/{CHECKPOINTS}/{name}: {reason}; choose another step") from error


def find_continued_manifest(store: Store, fork: ForkConfig | None) -> Manifest | None:
    """Return the newest manifest of a run, or else that of its parent; None if there is none. Process 0 only.

    A parent that cannot be used counts as none here: the check before the claim reports it.
    """
    manifest = read_newest_manifest(store)
    if manifest is not None or fork is None:
        return manifest
    try:
        return read_parent_manifest(fork)[1]
    except InvalidError:
        return None


# Checks.


def validate_fork(fork: ForkConfig, run_identity: RunIdentity, abstract: Any, total_steps: int) -> Manifest:
    """Check that a run can begin as this fork, and return the parent's manifest. Process 0 only; writes nothing.

    Of arrays only names and shapes are checked. Raises `InvalidError`, which says what to do, if it cannot begin so,
    and `StorageError` if the parent cannot be reached.
    """
    store, manifest = read_parent_manifest(fork)
    where = f"{store.url}/{CHECKPOINTS}/{manifest.name}"
    changes = run_identity.compare_values(manifest.identity)
    ending = "a fork takes the whole state"
    wanted = {
        name: (list(leaf.shape), str(leaf.dtype))
        for name, leaf in flatten_with_names(abstract).items()
        if name.startswith(f"{PARAMS}.")
    }
    saved = {name: (leaf["shape"], leaf["dtype"]) for name, leaf in manifest.leaves.items()}
    if wanted and wanted.items() <= saved.items() and not has_frozen_base(manifest.leaves):
        ending += "; to take weights alone, use checkpoint.init_from"
    # Another job has another config, so its keys say nothing.
    if "job" in changes and not is_listed("job", fork.changes):
        theirs, ours = changes["job"]
        raise ResumeError(f"{where} is of the job {theirs}, this one is {ours}; {ending}")
    try:
        validate_manifest_leaves(manifest, abstract, max_listed=_MAX_LEAVES)
    except ResumeError as error:
        first, *leaves = str(error).split("\n")
        raise ResumeError("\n".join([f"{store.url}: {first}; {ending}", *leaves])) from error
    _validate_changes(fork, run_identity, manifest, where)
    if manifest.step >= total_steps:
        raise InvalidError(
            f"{where} is at step {manifest.step}, and the run ends at step {total_steps}; give it more steps, or "
            "choose an earlier checkpoint"
        )
    return manifest


def validate_known_changes(fork: ForkConfig, run_identity: RunIdentity) -> None:
    """Check the changes of a fork before its data are known, whose keys are left out. Process 0 only.

    Raises the errors of `validate_fork` about them.
    """
    store, manifest = read_parent_manifest(fork)
    known = {key: value for key, value in manifest.identity.items() if key in run_identity.identity}
    partial = dataclasses.replace(manifest, identity=known)
    entries = [entry for entry in fork.changes if any(is_listed(key, [entry]) for key in known)]
    where = f"{store.url}/{CHECKPOINTS}/{manifest.name}"
    _validate_changes(fork.model_copy(update={"changes": entries}), run_identity, partial, where)


def validate_parent_files(hosts: Hosts, fork: ForkConfig) -> None:
    """Check the bytes of the checkpoint that a fork would begin with, by reading them. Called on every host.

    Raises `ResumeError` if they are not those that were saved, and `StorageError` if the parent cannot be reached.
    """
    _make_source(open_parent(fork), fork).validate_files(hosts)


def _validate_changes(
    fork: ForkConfig, run_identity: RunIdentity, manifest: Manifest, where: str
) -> dict[str, list[Any]]:
    """Return the keys that differ from the parent, with its value and the present one.

    Raises `InvalidError` if some of them are not in `fork.changes`, or that names no key.
    """
    changes = run_identity.compare_values(manifest.identity)
    unlisted = {key: values for key, values in changes.items() if not is_listed(key, fork.changes)}
    # An extension or a later stage, say, alters no step up to this one. Keys that may change are taken as unchanged.
    saved = manifest.identity | {key: ours for key, (_, ours) in changes.items() if key not in unlisted}
    if unlisted and not run_identity.keeps_past(saved, list(unlisted), manifest.step):
        lines = [f"  {key}: the parent has {theirs!r}, this spec {ours!r}" for key, (theirs, ours) in unlisted.items()]
        wanted = ", ".join([*fork.changes, *shorten_keys(unlisted)])
        first = f"{where} has other values for keys that changes does not list; to allow them, use the last line"
        raise ResumeError("\n".join([first, *lines, f"  changes: [{wanted}]"]))
    known = {*manifest.identity, *run_identity.identity}
    for entry in fork.changes:
        is_known = any(is_listed(key, [entry]) for key in known) or is_below(entry, run_identity.config.free_keys)
        # Keys outside of the trajectory may always change, so naming them is no mistake.
        top = entry.partition(".")[0]
        if not is_known and (top not in ExecutionSpec.model_fields or top in ("config", "hooks")):
            sections = {".".join(key.split(".")[:n]) for key in known for n in range(1, key.count(".") + 2)}
            raise InvalidError(f"changes: there is no key {entry}{suggest_nearest(entry, sorted(sections))}")
    return changes


def validate_lineage(fork: ForkConfig, own: Store, manifest: Manifest) -> None:
    """Raise `ResumeError` if a run, by its newest manifest, is not the fork that its spec names. Reads no parent."""
    hint = "a run is forked once: use another directory, or leave checkpoint.fork_from out"
    if manifest.lineage is None:
        raise ResumeError(f"{own.url} has a run that is no fork, at step {manifest.step}; {hint}")
    run, step = manifest.lineage["run"], manifest.lineage["step"]
    given = fork.run.rstrip("/") if "://" in fork.run else str(local_directory(fork.run))
    if resolve_place(given) != resolve_place(run) or fork.step not in (step, NEWEST, BEST):
        raise ResumeError(
            f"{own.url} was forked from {run} at step {step}, the spec names {given}, {fork.step}; {hint}"
        )


# Restore.


def restore_fork(
    attempt: Attempt, fork: ForkConfig, run_identity: RunIdentity, abstract: Any
) -> tuple[RestoredState, JsonObject]:
    """Return the parent's state, and the lineage of the fork that begins with it. Called on every host.

    Raises `ResumeError` if no such checkpoint is good, or it is not what the fork may continue, and `StorageError` if
    it cannot be read now.
    """
    store, hosts = open_parent(fork), attempt.hosts
    found, rejected = _make_source(store, fork).restore(hosts, abstract)
    manifest = found.manifest
    where = f"{store.url}/{CHECKPOINTS}/{manifest.name}"
    for other in rejected if hosts.is_main else []:
        warn(f"checkpoint {other.name} of {store.url} is not forked from: {other.reason}")
        attempt.events.append(
            "fallback", manifest.step, rejected=int(other.name), reason=f"{store.url}: {other.reason}", tier="durable"
        )
    changes = _validate_changes(fork, run_identity, manifest, where)
    attempt.say(f"forked from {where}" + (f", with other values of {', '.join(changes)}" if changes else ""))
    return found, manifest.make_lineage(store, changes)


def _make_source(store: Store, fork: ForkConfig) -> SourceRun:
    def list_candidates() -> list[str]:
        if fork.step == NEWEST:
            return [str(step) for step in reversed(list_steps(store))]
        return [read_parent_manifest(fork)[1].name]

    return SourceRun(store, list_candidates, f"{store.url}: no good checkpoint to fork from", fork.step != NEWEST)
