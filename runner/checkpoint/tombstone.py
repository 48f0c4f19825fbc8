"""Who decides about a step: the commit of a checkpoint, or the tombstone that says it will never be one.

A process of an earlier attempt may still be about to commit a step that its successor has found unfinished. Each of
the two is an act of which only one can win, on a disk and in a bucket.
"""

import json
from dataclasses import replace

from runner.checkpoint.manifest import CHECKPOINTS, FORMAT, MANIFEST, TOMBSTONE, Manifest, seal
from runner.storage import ABSENT, LocalStore, Store

BURIED = ".retired"  # the directory of a step whose files are being deleted


def commit(store: Store, directory: str, manifest: Manifest, attempt: int) -> None:
    """Create the manifest of `directory`, all of whose files are durable.

    Raises `FileExistsError` or `FileNotFoundError` if another attempt was first: with a commit, or with `bury`.
    """
    name = f"{directory}/{MANIFEST}"
    if isinstance(store, LocalStore):
        store.create_from(f"{directory}/{manifest.arrays}", name, manifest.encode())
        return
    present, version = store.read_versioned(name)
    if present == _tombstone(attempt):
        store.write_if(name, replace(manifest, contested=True).encode(), version)
    else:
        store.write_if(name, manifest.encode(), ABSENT)


def uncommit(store: Store, directory: str, attempt: int) -> None:
    """Make a committed checkpoint one no more, before its files are deleted.

    Where an earlier attempt may still be about to commit the same step, a tombstone stays in its place.
    """
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if store.root is None and _says(content, "contested"):
        store.write_if(f"{directory}/{MANIFEST}", _tombstone(attempt), version)
    else:
        store.remove(f"{directory}/{MANIFEST}")


def bury(store: Store, step: int, attempt: int) -> None:
    """Delete a step that was never committed, so that no earlier attempt can commit it any more; else leave it alone.

    On a disk the whole directory is renamed, which decides at once; if a manifest came with it, it is renamed back.
    In a bucket a tombstone takes the place that only one can take, and stays until this attempt commits the step.
    """
    directory = f"{CHECKPOINTS}/{step}"
    if store.root is None:
        if _put_tombstone(store, directory, attempt):
            remove_files(store, directory)
        return
    if not store.exists(f"{directory}/{MANIFEST}"):
        store.move_tree(directory, f"{directory}{BURIED}")
        finish_burials(store)


def finish_burials(store: Store) -> None:
    """End what a killed `bury` has begun on a disk: delete the renamed directory, or give a committed one its name."""
    for name in store.children(CHECKPOINTS) if store.root is not None else []:
        if name.endswith(BURIED):
            directory = f"{CHECKPOINTS}/{name}"
            if store.exists(f"{directory}/{MANIFEST}"):
                store.move_tree(directory, directory.removesuffix(BURIED))
            else:
                store.remove_tree(directory)


def remove_files(store: Store, directory: str) -> None:
    """Delete all of a checkpoint but its manifest; on a disk the directory goes too, if it has none."""
    for name in store.children(directory):
        if name != MANIFEST:
            store.remove_tree(f"{directory}/{name}")
    if store.root is not None and not store.exists(f"{directory}/{MANIFEST}"):
        store.remove_tree(directory)


def _put_tombstone(store: Store, directory: str, attempt: int) -> bool:
    """Whether a tombstone stands there now; False if the step is committed, or a newer attempt has put its own."""
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if version != ABSENT and not (_says(content, TOMBSTONE) and json.loads(content)[TOMBSTONE] <= attempt):
        return False
    try:
        store.write_if(f"{directory}/{MANIFEST}", _tombstone(attempt), version)
    except FileExistsError:
        return False
    return True


def _tombstone(attempt: int) -> bytes:
    return seal({"format": FORMAT, TOMBSTONE: attempt})


def _says(content: bytes, key: str) -> bool:
    try:
        return key in json.loads(content)
    except (ValueError, TypeError):
        return False
