"""Who decides about a step: the commit of a checkpoint, or the tombstone that says it will never be one.

Each is an act of which only one can win, on a disk and in a bucket.
"""

import json
from typing import Any

from runner.checkpoint.manifest import CHECKPOINTS, FORMAT, MANIFEST, encode_manifest
from runner.storage import ABSENT, LocalStore, Store

_RETIRED = ".retired"


def commit(store: Store, directory: str, manifest: dict[str, Any], attempt: int) -> None:
    """Create the manifest of `directory`, all of whose files are durable.

    Raises `FileExistsError` or `FileNotFoundError` if another attempt was first: with a commit, or with `retire`.
    """
    name = f"{directory}/{MANIFEST}"
    if isinstance(store, LocalStore):
        store.create_from(f"{directory}/{manifest['arrays']}", name, encode_manifest(manifest))
        return
    present, version = store.read_versioned(name)
    if present == _void(attempt):
        store.write_if(name, encode_manifest(manifest | {"contested": True}), version)
    else:
        store.write_if(name, encode_manifest(manifest), ABSENT)


def withdraw(store: Store, directory: str, attempt: int) -> None:
    """Make a committed checkpoint one no more, before its files are deleted.

    Where an earlier attempt may still be about to commit the same step, a void stays in its place.
    """
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if store.root is None and _says(content, "contested"):
        store.write_if(f"{directory}/{MANIFEST}", _void(attempt), version)
    else:
        store.remove(f"{directory}/{MANIFEST}")


def retire(store: Store, step: int, attempt: int) -> None:
    """Delete a step that was never committed, so that no earlier attempt can commit it any more; else leave it alone.

    On a disk the whole directory is renamed, which decides at once; if a manifest came with it, it is renamed back.
    In a bucket a void manifest takes the place that only one can take, and stays until this attempt commits the step.
    """
    directory = f"{CHECKPOINTS}/{step}"
    if store.root is None:
        if _make_void(store, directory, attempt):
            remove_files(store, directory)
        return
    if not store.exists(f"{directory}/{MANIFEST}"):
        store.move_tree(directory, f"{directory}{_RETIRED}")
        settle(store)


def settle(store: Store) -> None:
    """End what a killed `retire` has begun."""
    for name in store.children(CHECKPOINTS) if store.root is not None else []:
        if name.endswith(_RETIRED):
            directory = f"{CHECKPOINTS}/{name}"
            if store.exists(f"{directory}/{MANIFEST}"):
                store.move_tree(directory, directory.removesuffix(_RETIRED))
            else:
                store.remove_tree(directory)


def _make_void(store: Store, directory: str, attempt: int) -> bool:
    """Whether `directory` is void now; False if it is committed, or a newer attempt has made it void."""
    content, version = store.read_versioned(f"{directory}/{MANIFEST}")
    if version != ABSENT and not (_says(content, "void") and json.loads(content)["void"] <= attempt):
        return False
    try:
        store.write_if(f"{directory}/{MANIFEST}", _void(attempt), version)
    except FileExistsError:
        return False
    return True


def _void(attempt: int) -> bytes:
    return encode_manifest({"format": FORMAT, "void": attempt})


def _says(content: bytes, key: str) -> bool:
    try:
        return key in json.loads(content)
    except (ValueError, TypeError):
        return False


def remove_files(store: Store, directory: str) -> None:
    """Delete all of a checkpoint but its manifest; on a disk the directory goes too, if it has none."""
    for name in store.children(directory):
        if name != MANIFEST:
            store.remove_tree(f"{directory}/{name}")
    if store.root is not None and not store.exists(f"{directory}/{MANIFEST}"):
        store.remove_tree(directory)
