"""Look at checkpoints from outside, on any store: list them, check every byte. Restores nothing."""

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from runner.checkpoint.manifest import CHECKPOINTS, MANIFEST, Manifest, NotCommittedError, file_problems, read_manifest
from runner.storage import Store

_NUM_COPIERS = 4


@dataclass(frozen=True)
class Entry:
    """One directory below `checkpoints/`, and what is wrong with it."""

    name: str
    manifest: Manifest | None
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
            yield Entry(name, manifest, tuple(file_problems(store, directory, manifest.files)) if verify else ())


def report(store: Store, verify: bool) -> tuple[list[str], bool]:
    """Lines for a person, and whether all that is committed is good as far as it was checked."""
    lines, is_good = [], True
    for entry in entries(store, verify):
        if entry.manifest is None:
            state = "DAMAGED" if entry.is_committed else "not committed"
            lines.append(f"{entry.name:>10}  {state}")
        else:
            manifest = entry.manifest
            moment = datetime.datetime.fromtimestamp(manifest.time).isoformat(" ", "seconds")
            state = "DAMAGED" if entry.problems else "good" if verify else "committed"
            lines.append(
                f"{entry.name:>10}  {state}  {manifest.num_bytes / 1e6:,.1f} MB in {len(manifest.files)} files  "
                f"{moment}  attempt {manifest.attempt}  fingerprint {manifest.fingerprint}"
            )
        lines += [f"{'':>10}  {problem}" for problem in entry.problems]
        is_good = is_good and not (entry.problems and entry.is_committed)
    return lines or [f"{store.url}: no checkpoints"], is_good
