"""All runs below a directory or a bucket's prefix. A run is a directory with a `job.json`, and holds no others.

What bounds the search: so many levels, directories and runs. Symbolic links are not followed, so it comes to an end.

Where the specs of several runs differ, key by key.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runner.errors import SpecError
from runner.spec import parse_document
from runner.storage import LocalStore, Store, make_store

_OWN = ("name", "directory")  # that tell runs apart, and say nothing of what they do
ABSENT = "(absent)"
UNREADABLE = "(unreadable)"


class SpecDifference(NamedTuple):
    """A dotted key, and the value that each run has under it, as JSON."""

    key: str
    values: list[str]


def find_differences(specs: Sequence[str | None]) -> list[SpecDifference]:
    """The keys that not all specs, given as YAML, have with one value, sorted; None or what cannot be read has none."""
    flat = [_flat(text) for text in specs]
    keys = sorted({key for values in flat if values is not None for key in values} - set(_OWN))
    found = (
        SpecDifference(key, [UNREADABLE if values is None else values.get(key, ABSENT) for values in flat])
        for key in keys
    )
    return [each for each in found if len(set(each.values)) > 1]


def _flat(text: str | None) -> dict[str, str] | None:
    try:
        return None if text is None else dict(_leaves(parse_document(text, "spec.yaml").data, ""))
    except SpecError:
        return None


def _leaves(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        below = f"{path}." if path else ""
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{below}{key}")]
    return [(path, json.dumps(value))]


_MARK = "job.json"
LEVELS_MAX = 6
DIRECTORIES_MAX = 5000
RUNS_MAX = 1000


class DiscoveredRun(NamedTuple):
    """A run: its name in addresses, which says nothing of where it is, its path below the root, its store."""

    id: str
    path: str
    store: Store


@dataclass(frozen=True)
class DiscoveryResult:
    """The runs by path, and what a person must know of the search."""

    runs: list[DiscoveredRun]
    notes: list[str]


def find_runs(root: Store) -> DiscoveryResult:
    """Search below `root`, which may be a run itself. Raises `OSError` if `root` cannot be read."""
    runs: list[DiscoveredRun] = []
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
                return DiscoveryResult(sorted(runs, key=_path_of), [note])
            names = _children(root, path)
            if _MARK in names:
                runs.append(DiscoveredRun(_id_of(path), path, _below(root, path)))
            elif depth < LEVELS_MAX:
                below += [f"{path}/{name}".lstrip("/") for name in names if names[name] and not name.startswith(".")]
        level = below
    return DiscoveryResult(sorted(runs, key=_path_of), [])


def _path_of(run: DiscoveredRun) -> str:
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
        for name in root.list_names(path):
            yield name, "." not in name
        return
    with os.scandir(root.root / path) as entries:
        for entry in entries:
            yield entry.name, entry.is_dir(follow_symlinks=False)


def _below(root: Store, path: str) -> Store:
    if not path:
        return root
    return make_store(f"{root.url}/{path}") if root.root is None else LocalStore(root.root / path)
