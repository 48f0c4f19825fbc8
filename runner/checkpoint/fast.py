"""The fast tier: the newest states on this host's own disk or in its memory, beside the durable directory.

Each process keeps the pieces of a step that it needs itself, so nothing here is shared and nothing is waited for. A
step counts only if every process still has its part: together they choose the newest such step, so a host that comes
back empty, or with half a step, sends all of them to an older step or to the durable tier. A part is written aside and
renamed whole.
"""

import contextlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from runner.checkpoint import pieces
from runner.checkpoint.manifest import Manifest
from runner.spec import Trajectory
from runner.storage import LocalStore, encode_json, read_json

PART = "part.json"
KEPT_STEPS = 2
_ATTACHMENTS = "companions"  # the key of their names in a part


class FastTier:
    """The parts of one process. Made and called on every host."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._store = LocalStore(directory)

    def steps(self, identity: Trajectory) -> list[int]:
        """Steps of which this process has a whole part that was written for this job, ascending."""
        found = []
        for name in self._store.children(""):
            with contextlib.suppress(OSError, ValueError):
                if name.isdecimal() and read_json(self._store, f"{name}/{PART}")["identity"] == identity:
                    found.append(int(name))
        return sorted(found)

    def write(self, manifest: Manifest, blocks: pieces.Blocks, attachments: dict[str, bytes]) -> None:
        """Keep this process's part of a step, and delete what is older than the step before it."""
        step = str(manifest.step)
        aside = self.directory / f"{step}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        table = pieces.write(aside, "pieces", blocks)
        for name, content in attachments.items():
            (aside / name).write_bytes(content)
        part = replace(manifest, files=table.files, shards=table.shards)
        (aside / PART).write_bytes(encode_json(part.to_json() | {_ATTACHMENTS: sorted(attachments)}))
        shutil.rmtree(self.directory / step, ignore_errors=True)
        os.rename(aside, self.directory / step)
        self._forget(lambda present: present[:-KEPT_STEPS])

    def read(self, step: int, leaves: dict[str, Any]) -> tuple[dict[str, jax.Array], Manifest]:
        """The leaves of this process and the part's manifest. Raises `ValueError` or `OSError` if they are not good."""
        part = Manifest.from_json(read_json(self._store, f"{step}/{PART}"))
        if part.shards is None:
            raise ValueError(f"{PART} names no shards")
        return pieces.read(lambda name: self._store.read(f"{step}/{name}"), part.files, part.shards, leaves), part

    def attachments(self, step: int) -> dict[str, bytes]:
        """The small files that were kept with a step."""
        names = read_json(self._store, f"{step}/{PART}")[_ATTACHMENTS]
        return {name: self._store.read(f"{step}/{name}") for name in names}

    def forget_after(self, step: int) -> None:
        """Delete every step beyond `step`, and what was never whole."""
        for name in self._store.children(""):
            if name.endswith(".tmp"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        self._forget(lambda present: [other for other in present if other > step])

    def _forget(self, choose: Any) -> None:
        present = sorted(int(name) for name in self._store.children("") if name.isdecimal())
        for step in choose(present):
            shutil.rmtree(self.directory / str(step), ignore_errors=True)

    def room(self, part_bytes: int) -> str | None:
        """What is wrong if the disk cannot hold two parts, beside what is here already; None if it can."""
        self.directory.mkdir(parents=True, exist_ok=True)
        mine = sum(self._store.sizes("").values())
        free = shutil.disk_usage(self.directory).free + mine
        if free >= KEPT_STEPS * part_bytes:
            return None
        return (
            f"{self.directory} has room for {free / 1e9:.3f} GB, needs {KEPT_STEPS * part_bytes / 1e9:.3f} GB: "
            f"{KEPT_STEPS} checkpoints of {part_bytes / 1e9:.3f} GB on this host"
        )
