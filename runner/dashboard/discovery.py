"""Runs below a directory or a bucket's prefix, and the differences of their specs.

A run is a directory with a `job.json`, and no run lies inside another. The search is bounded in levels, directories and
runs. It does not follow symbolic links, so it cannot run in circles.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from runner.errors import SpecError
from runner.spec import parse_document
from runner.storage import LocalStore, Store, make_store

ABSENT = "(absent)"
UNREADABLE = "(unreadable)"
LEVELS_MAX = 6
DIRECTORIES_MAX = 5000
RUNS_MAX = 1000

_RUN_FILE = "job.json"
_IDENTIFYING_KEYS = ("name", "directory")  # differ between any two runs, and do not change what they do


class DiscoveredRun(NamedTuple):
    """Run below the root.

    Attributes:
        id: name in addresses, which does not reveal the path.
        path: path below the root.
        store: its directory.
    """

    id: str
    path: str
    store: Store


@dataclass(frozen=True)
class DiscoveryResult:
    """Runs in order of path, and notes about the search for the user."""

    runs: list[DiscoveredRun]
    notes: list[str]


def find_runs(root: Store) -> DiscoveryResult:
    """Search below `root`, which may be a run itself.

    Raises:
        OSError: `root` cannot be read.
    """
    runs: list[DiscoveredRun] = []
    notes: list[str] = []
    level = [""]
    num_directories = 0
    for depth in range(LEVELS_MAX + 1):
        next_level: list[str] = []
        for path in sorted(level):
            num_directories += 1
            # A root such as `/` or a whole bucket would otherwise be listed for hours.
            if num_directories > DIRECTORIES_MAX or len(runs) >= RUNS_MAX:
                notes.append(
                    f"The search ended after {num_directories - 1} directories and {len(runs)} runs; "
                    "choose a directory with fewer."
                )
                break
            names = _list_children(root, path)
            if _RUN_FILE in names:
                if not path:
                    store = root
                else:
                    store = make_store(f"{root.url}/{path}") if root.root is None else LocalStore(root.root / path)
                # Paths may hold any bytes, so an address holds a digest of the path.
                run_id = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
                runs.append(DiscoveredRun(run_id, path, store))
            elif depth < LEVELS_MAX:
                below = (name for name, may_be_directory in names.items() if may_be_directory)
                next_level += [f"{path}/{name}".lstrip("/") for name in below if not name.startswith(".")]
        if notes:
            break
        level = next_level
    return DiscoveryResult(sorted(runs, key=lambda run: run.path), notes)


def _list_children(root: Store, path: str) -> dict[str, bool]:
    """Return the names directly below a path, each with True if it may be a directory.

    A path that has been deleted or may not be read has none, unless it is the root.
    """
    try:
        if root.root is None:
            # A bucket does not tell a prefix from an object; names of files have a suffix.
            return {name: "." not in name for name in root.list_names(path)}
        with os.scandir(root.root / path) as entries:
            return {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    except OSError:
        if not path:
            raise
        return {}


class SpecDifference(NamedTuple):
    """Dotted key, and the value of each run under it as JSON."""

    key: str
    values: list[str]


def find_differences(specs: Sequence[str | None]) -> list[SpecDifference]:
    """Return the keys, sorted, whose values are not equal in all specs.

    Args:
        specs: specs as YAML. None, or one that cannot be read, has no values.
    """
    flat: list[dict[str, str] | None] = []
    for text in specs:
        try:
            flat.append(None if text is None else dict(_flatten(parse_document(text, "spec.yaml").data, "")))
        # The spec of a killed or foreign run may be damaged.
        except SpecError:
            flat.append(None)
    keys = sorted({key for values in flat if values is not None for key in values} - set(_IDENTIFYING_KEYS))
    found = (
        SpecDifference(key, [UNREADABLE if values is None else values.get(key, ABSENT) for values in flat])
        for key in keys
    )
    return [each for each in found if len(set(each.values)) > 1]


def _flatten(value: Any, path: str) -> list[tuple[str, str]]:
    """Return the leaves of a tree of mappings as pairs of dotted key and JSON."""
    if isinstance(value, Mapping) and value:
        prefix = f"{path}." if path else ""
        return [leaf for key, inner in value.items() for leaf in _flatten(inner, f"{prefix}{key}")]
    return [(path, json.dumps(value))]
