"""Inspection of checkpoints on any store: list them, verify every byte or every bit, copy one.

Listing and verifying change nothing. A copy is verified on both sides: while it is read, and where it has arrived.
"""

import datetime
import enum
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from runner.checkpoint import fingerprint
from runner.checkpoint.arrays import read_leaves
from runner.checkpoint.manifest import (
    CHECKPOINTS,
    MANIFEST,
    MAX_LISTINGS,
    Manifest,
    NotCommittedError,
    find_file_problems,
    is_committed,
    read_manifest,
    read_newest_manifest,
)
from runner.errors import EXIT_DONE, EXIT_FAILED, EXIT_INVALID, InvalidError, NewerFormatError, StorageError
from runner.storage import Store, compute_crc32c, create_file

_NUM_COPIERS = 4


def copy_checkpoint(source: Store, name: str | None, target: Store) -> str:
    """Copy one committed checkpoint, by default the newest, to the same name in `target`; return its name.

    Raises:
        InvalidError: there is none, it is damaged, or the target has one of that name.
    """
    if name is not None:
        return _copy_named(source, name, target)
    for _ in range(MAX_LISTINGS):
        newest = read_newest_manifest(source)
        if newest is None:
            raise InvalidError(f"{source.url}: no checkpoint is here")
        try:
            return _copy_named(source, newest.name, target)
        except (InvalidError, FileNotFoundError):
            # The run deletes its old checkpoints while one of them is copied: then there is a newer one.
            if is_committed(source, newest.name):
                raise
            target.remove_tree(f"{CHECKPOINTS}/{newest.name}")
    raise StorageError(f"{source.url}: {MAX_LISTINGS} times a checkpoint was deleted while it was copied")


def _copy_named(source: Store, name: str, target: Store) -> str:
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(source, directory)
    except (FileNotFoundError, ValueError) as error:
        raise InvalidError(f"{source.url}/{directory}: {error}") from error
    if target.exists(f"{directory}/{MANIFEST}"):
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten")

    def copy_file(file: str) -> None:
        content = source.read(f"{directory}/{file}")
        if [len(content), compute_crc32c(content)] != list(manifest.files[file]):
            raise InvalidError(f"{source.url}/{directory}: {file} is not what its manifest says; nothing was committed")
        target.write(f"{directory}/{file}", content)

    with ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="copy") as pool:
        list(pool.map(copy_file, manifest.files))
    problems = find_file_problems(target, directory, manifest.files)
    if problems:
        raise InvalidError(f"{target.url}/{directory}: {problems[0]}; nothing was committed")
    # As in a save, the manifest comes last and commits the copy.
    try:
        create_file(target, f"{directory}/{MANIFEST}", manifest.encode())
    except FileExistsError as error:
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten") from error
    return name


class VerifyDepth(enum.Enum):
    """Depth to which a checkpoint is verified."""

    MANIFEST = "manifest"  # the manifest alone
    FILES = "files"  # size and CRC-32C of every file; in a bucket as the store itself reports them
    BITS = "bits"  # every byte is read, and the fingerprint of every leaf computed again


@dataclass(frozen=True)
class CheckpointEntry:
    """One directory below `checkpoints/`, and what is wrong with it.

    Attributes:
        name: name of the directory.
        manifest: None if it is missing, damaged, or of a newer runner.
        problems: one line each.
        is_committed: False if the directory has no manifest.
        is_newer: True if a newer runner has written it.
    """

    name: str
    manifest: Manifest | None
    problems: tuple[str, ...] = ()
    is_committed: bool = True
    is_newer: bool = False


def list_entries(store: Store, depth: VerifyDepth = VerifyDepth.MANIFEST) -> Iterator[CheckpointEntry]:
    """Iterate over every checkpoint: steps by number, then other names. Raises `StorageError` if one is unreachable.

    Checkpoints that a live run commits meanwhile come last.
    """
    seen = set[str]()
    for _ in range(MAX_LISTINGS):
        has_vanished = False
        for entry in _list_unseen(store, depth, seen):
            # The run deletes a checkpoint only once it has a newer one, which is listed then.
            has_vanished = has_vanished or not entry.is_committed
            seen.add(entry.name)
            yield entry
        if not has_vanished:
            return


def _list_unseen(store: Store, depth: VerifyDepth, seen: set[str]) -> Iterator[CheckpointEntry]:
    names = set(store.list_names(CHECKPOINTS)) - seen
    for name in sorted(names, key=lambda name: (not name.isdecimal(), name.zfill(20))):
        directory = f"{CHECKPOINTS}/{name}"
        try:
            manifest = read_manifest(store, directory)
        except NotCommittedError as error:
            yield CheckpointEntry(name, None, (str(error),), is_committed=False)
        except NewerFormatError as error:
            yield CheckpointEntry(name, None, (str(error),), is_newer=True)
        except StorageError:
            raise
        except (ValueError, OSError) as error:
            yield CheckpointEntry(name, None, (f"{MANIFEST}: {error}",))
        else:
            problems = tuple(_find_problems(store, directory, manifest, depth))
            if problems and not is_committed(store, name):
                # The run deletes its old checkpoints while this command reads them.
                yield CheckpointEntry(name, None, ("was deleted by the run meanwhile",), is_committed=False)
            else:
                yield CheckpointEntry(name, manifest, problems)


def _find_problems(store: Store, directory: str, manifest: Manifest, depth: VerifyDepth) -> list[str]:
    if depth is VerifyDepth.MANIFEST:
        return []
    problems = find_file_problems(store, directory, manifest.files, trust_store=depth is not VerifyDepth.BITS)
    # Arrays of damaged files cannot be read, so the bits are compared only if all files are good.
    if problems or depth is not VerifyDepth.BITS:
        return problems
    if fingerprint.combine_digests(manifest.leaves) != manifest.fingerprint:
        return ["the fingerprint is not that of the leaves"]
    try:
        leaves = read_leaves(store, directory, manifest, manifest.leaves)
        return [leaf.problem for leaf in leaves if leaf.problem is not None]
    except StorageError:
        raise
    except (ValueError, OSError) as error:
        return [str(error)]


def format_report(store: Store, depth: VerifyDepth, best: str | None = None) -> tuple[list[str], int]:
    """Return lines for a person about every checkpoint, and an exit code.

    Args:
        store: the run's directory.
        depth: how far each checkpoint is verified.
        best: name of the checkpoint to mark as the best.

    Returns:
        The lines, and 0 if everything committed is good as far as it was verified, 1 if not, 2 if a newer runner has
        written some of it.
    """
    lines, code = [], EXIT_DONE
    for entry in list_entries(store, depth):
        is_bad = bool(entry.problems and entry.is_committed)
        if entry.manifest is None:
            state = "of a newer runner" if entry.is_newer else "DAMAGED" if is_bad else "not committed"
            lines.append(f"{entry.name:>10}  {state}")
        else:
            manifest = entry.manifest
            try:
                moment = datetime.datetime.fromtimestamp(manifest.time).isoformat(" ", "seconds")
            except (ValueError, OverflowError, OSError):  # a time that no calendar has
                moment = "at an unknown time"
            state = "DAMAGED" if is_bad else "committed" if depth is VerifyDepth.MANIFEST else "good"
            lines.append(
                f"{entry.name:>10}  {state}  {manifest.num_bytes / 1e6:,.1f} MB in {len(manifest.files)} files  "
                f"{moment}  attempt {manifest.attempt}  fingerprint {manifest.fingerprint}"
                + (f"  best: {manifest.metric:g}" if entry.name == best and manifest.metric is not None else "")
            )
        lines += [f"{'':>10}  {problem}" for problem in entry.problems]
        code = max(code, EXIT_INVALID if entry.is_newer else EXIT_FAILED if is_bad else EXIT_DONE)
    return lines or [f"{store.url}: no checkpoints"], code
