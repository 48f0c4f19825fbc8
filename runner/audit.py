"""Look at checkpoints from outside, on any store: list them, check every byte, copy one elsewhere. Restores nothing."""

import datetime
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from runner.errors import InvalidError
from runner.manifest import (
    CHECKPOINTS,
    MANIFEST,
    NotCommittedError,
    encode_manifest,
    file_problems,
    newest_manifest,
    read_manifest,
)
from runner.storage import Store, create, digest_of

_NUM_COPIERS = 4


@dataclass(frozen=True)
class Entry:
    """One directory below `checkpoints/`, and what is wrong with it."""

    name: str
    manifest: dict[str, Any] | None
    problems: tuple[str, ...] = ()
    is_committed: bool = True


def entries(store: Store, verify: bool = False) -> Iterator[Entry]:
    """Every checkpoint, steps in order and then names; with `verify`, every file of it checked against the manifest."""
    names = sorted(store.children(CHECKPOINTS), key=lambda name: (not name.isdecimal(), name.zfill(20)))
    for name in names:
        directory = f"{CHECKPOINTS}/{name}"
        try:
            manifest = read_manifest(store, directory)
        except NotCommittedError as error:
            yield Entry(name, None, (str(error),), is_committed=False)
        except (ValueError, KeyError) as error:
            yield Entry(name, None, (f"{MANIFEST}: {error}",))
        else:
            yield Entry(name, manifest, tuple(file_problems(store, directory, manifest)) if verify else ())


def report(store: Store, verify: bool) -> tuple[list[str], bool]:
    """Lines for a person, and whether all that is committed is good as far as it was checked."""
    lines, is_good = [], True
    for entry in entries(store, verify):
        if entry.manifest is None:
            state = "DAMAGED" if entry.is_committed else "not committed"
            lines.append(f"{entry.name:>10}  {state}")
        else:
            num_bytes = sum(size for size, _ in entry.manifest["files"].values())
            moment = datetime.datetime.fromtimestamp(entry.manifest["time"]).isoformat(" ", "seconds")
            state = "DAMAGED" if entry.problems else "good" if verify else "committed"
            lines.append(
                f"{entry.name:>10}  {state}  {num_bytes / 1e6:,.1f} MB in {len(entry.manifest['files'])} files  "
                f"{moment}  attempt {entry.manifest['attempt']}  fingerprint {entry.manifest['fingerprint']}"
            )
        lines += [f"{'':>10}  {problem}" for problem in entry.problems]
        is_good = is_good and not (entry.problems and entry.is_committed)
    return lines or [f"{store.url}: no checkpoints"], is_good


def copy(source: Store, name: str | None, target: Store) -> str:
    """Copy one committed checkpoint, by default the newest, to the same name in `target`; its name.

    Every byte is checked on the way, and what has arrived is checked again before its manifest commits it. Raises
    `InvalidError` if there is none, if it is damaged, or if the target has one of that name.
    """
    newest = newest_manifest(source) if name is None else None
    if name is None:
        if newest is None:
            raise InvalidError(f"{source.url}: no checkpoint is here")
        name = str(newest["name"])
    directory = f"{CHECKPOINTS}/{name}"
    try:
        manifest = read_manifest(source, directory)
    except (FileNotFoundError, ValueError) as error:
        raise InvalidError(f"{source.url}/{directory}: {error}") from error
    if target.exists(f"{directory}/{MANIFEST}"):
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten")

    def copy_file(file: str) -> None:
        content = source.read(f"{directory}/{file}")
        if [len(content), digest_of(content)] != list(manifest["files"][file]):
            raise InvalidError(f"{source.url}/{directory}: {file} is not what its manifest says; nothing was committed")
        target.write(f"{directory}/{file}", content)

    with ThreadPoolExecutor(_NUM_COPIERS, thread_name_prefix="copy") as pool:
        list(pool.map(copy_file, manifest["files"]))
    problems = file_problems(target, directory, manifest)
    if problems:
        raise InvalidError(f"{target.url}/{directory}: {problems[0]}; nothing was committed")
    try:
        create(target, f"{directory}/{MANIFEST}", encode_manifest(manifest))
    except FileExistsError as error:
        raise InvalidError(f"{target.url}/{directory} is there already; nothing is overwritten") from error
    return name
