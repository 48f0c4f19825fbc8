"""All runs below a directory or a bucket's prefix. A run is a directory with a `job.json`, and holds no others.

What bounds the search: so many levels, directories and runs. Symbolic links are not followed, so it comes to an end.
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from runner.storage import LocalStore, Store, store_at

_MARK = "job.json"
LEVELS_MAX = 6
DIRECTORIES_MAX = 5000
RUNS_MAX = 1000


class FoundRun(NamedTuple):
    """A run: its name in addresses, which says nothing of where it is, its path below the root, its store."""

    id: str
    path: str
    store: Store


@dataclass(frozen=True)
class Found:
    """The runs by path, and what a person must know of the search."""

    runs: list[FoundRun]
    notes: list[str]


def find_runs(root: Store) -> Found:
    """Search below `root`, which may be a run itself. Raises `OSError` if `root` cannot be read."""
    runs: list[FoundRun] = []
    level = [""]
    num_directories = 0
    for depth in range(LEVELS_MAX + 1):
        below: list[str] = []
        for path in sorted(level):
            num_directories += 1
            if num_directories > DIRECTORIES_MAX or len(runs) >= RUNS_MAX:
                note = (
                    f"The search ended after {num_directories - 1} directories and {len(runs)} runs; look below fewer."
                )
                return Found(sorted(runs, key=_path_of), [note])
            names = _children(root, path)
            if _MARK in names:
                runs.append(FoundRun(_id_of(path), path, _below(root, path)))
            elif depth < LEVELS_MAX:
                below += [f"{path}/{name}".lstrip("/") for name in names if names[name] and not name.startswith(".")]
        level = below
    return Found(sorted(runs, key=_path_of), [])


def _path_of(run: FoundRun) -> str:
    return run.path


def _id_of(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def _children(root: Store, path: str) -> dict[str, bool]:
    """Names directly below, and whether each may be a directory; none of what has gone or may not be read."""
    try:
        return dict(_listed(root, path))
    except OSError:
        if not path:
            raise
        return {}


def _listed(root: Store, path: str) -> Iterator[tuple[str, bool]]:
    if root.root is None:
        for name in root.children(path):
            yield name, "." not in name
        return
    with os.scandir(root.root / path) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _below(root: Store, path: str) -> Store:
    if not path:
        return root
    return store_at(f"{root.url}/{path}") if root.root is None else LocalStore(root.root / path)
