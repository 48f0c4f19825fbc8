"""Who decides about a step: the commit of a checkpoint, or the tombstone that says it will never be one.

A process of an earlier attempt may still be about to commit a step that its successor has found unfinished. Each of
the two is an act of which only one can win, on a disk and in a bucket.
"""

from dataclasses import replace

from runner.checkpoint.manifest import CHECKPOINTS, FORMAT, MANIFEST, TOMBSTONE, Manifest, parse_manifest, seal
from runner.storage import ABSENT, JsonObject, LocalStore, OtherKindError, Store, kind_of, number_in

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
    content, version = store.read_versioned(f"{directory}/{MANIFEST}") if store.root is None else (b"", ABSENT)
    if "contested" in _whole(content):
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
    if _is_directory(store, directory) and not store.exists(f"{directory}/{MANIFEST}"):
        store.move_tree(directory, f"{directory}{BURIED}")
        finish_burials(store)


def finish_burials(store: Store) -> None:
    """End what a killed `bury` has begun on a disk: delete the renamed directory, or give a committed one its name.

    Where that name is taken by another that is committed too, both stay. What is no directory was not put there by a
    run, and stays.
    """
    for name in store.children(CHECKPOINTS) if store.root is not None else []:
        buried, source = f"{CHECKPOINTS}/{name}", f"{CHECKPOINTS}/{name.removesuffix(BURIED)}"
        if buried == source or number_in(name.removesuffix(BURIED)) is None or not _is_directory(store, buried):
            continue
        if not store.exists(f"{buried}/{MANIFEST}"):
            store.remove_tree(buried)
        elif not store.exists(f"{source}/{MANIFEST}"):
            store.remove_tree(source)
            store.move_tree(buried, source)


def _is_directory(store: Store, name: str) -> bool:
    """Whether a directory of a disk stands there."""
    try:
        return store.root is not None and kind_of(store.root / name) == "a directory"
    except OtherKindError:
        return False


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
    if version != ABSENT and not 0 < _whole(content).get(TOMBSTONE, 0) <= attempt:
        return False
    try:
        store.write_if(f"{directory}/{MANIFEST}", _tombstone(attempt), version)
    except FileExistsError:
        return False
    return True


def _tombstone(attempt: int) -> bytes:
    return seal({"format": FORMAT, TOMBSTONE: attempt})


def _whole(content: bytes) -> JsonObject:
    """What a manifest or tombstone says; nothing if it is damaged, or of a newer runner."""
    try:
        return parse_manifest(content)
    except ValueError:
        return {}
