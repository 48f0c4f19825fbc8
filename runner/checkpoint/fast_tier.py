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

from runner.checkpoint import blocks as pieces
from runner.checkpoint.manifest import Manifest
from runner.records import Key, validate_record
from runner.spec import Trajectory
from runner.storage import JsonObject, LocalStore, compute_crc32c, encode_json, parse_number, read_json

PART = "part.json"
KEPT_STEPS = 2
_ATTACHMENTS = "companions"  # the key of their names in a part
_DIGESTS = "companion_digests"  # their CRC-32C, by name; parts of earlier versions have none
_PART_KEYS = (Key(_ATTACHMENTS, list, "Names."), Key(f"{_DIGESTS}.*", str, "CRC-32C."))


class FastTier:
    """The parts of one process. Made and called on every host."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._store = LocalStore(directory)

    def steps(self, identity: Trajectory) -> list[int]:
        """Steps of which this process has a whole part that was written for this job, ascending."""
        found = []
        for step in self._present():
            with contextlib.suppress(OSError, ValueError):
                if self._part(step)[0].identity == identity:
                    found.append(step)
        return found

    def _present(self) -> list[int]:
        return sorted(step for step in map(parse_number, self._store.list_names("")) if step is not None)

    def _part(self, step: int) -> tuple[Manifest, JsonObject]:
        """What a part says of itself. Raises `ValueError` if it is damaged, or `OSError`."""
        record = read_json(self._store, f"{step}/{PART}")
        validate_record(record, _PART_KEYS, [_ATTACHMENTS])
        part = Manifest.from_json(record)
        if part.step != step or part.shards is None:
            raise ValueError(f"{PART} is of step {part.step} and stands in {step}, or names no shards")
        return part, record

    def write(self, manifest: Manifest, blocks: pieces.Blocks, attachments: dict[str, bytes]) -> None:
        """Keep this process's part of a step, and delete what is older than the step before it."""
        step = str(manifest.step)
        aside = self.directory / f"{step}.tmp"
        shutil.rmtree(aside, ignore_errors=True)
        table = pieces.write_blocks(aside, "pieces", blocks)
        for name, content in attachments.items():
            (aside / name).write_bytes(content)
        part = replace(manifest, files=table.files, shards=table.shards)
        digests = {name: compute_crc32c(content) for name, content in attachments.items()}
        record = part.to_json() | {_ATTACHMENTS: sorted(attachments), _DIGESTS: digests}
        (aside / PART).write_bytes(encode_json(record))
        self._store.remove_tree(step)
        os.rename(aside, self.directory / step)
        self._forget(lambda present: present[:-KEPT_STEPS])

    def read(self, step: int, leaves: dict[str, Any]) -> tuple[dict[str, jax.Array], Manifest]:
        """The leaves of this process and the part's manifest. Raises `ValueError` or `OSError` if they are not good."""
        part, _ = self._part(step)
        return pieces.read_blocks(
            lambda name: self._store.read(f"{step}/{name}"), part.files, part.shards or {}, leaves
        ), part

    def attachments(self, step: int) -> dict[str, bytes]:
        """The small files that were kept with a step. Raises as `read` does."""
        _, record = self._part(step)
        found = {name: self._store.read(f"{step}/{name}") for name in map(str, record[_ATTACHMENTS])}
        for name, digest in record.get(_DIGESTS, {}).items():
            if name not in found or compute_crc32c(found[name]) != digest:
                raise ValueError(f"{name} does not match its CRC-32C")
        return found

    def forget_after(self, step: int) -> None:
        """Delete every step beyond `step`, and what was never whole."""
        for name in self._store.list_names(""):
            if name.endswith(".tmp"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        self._forget(lambda present: [other for other in present if other > step])

    def _forget(self, choose: Any) -> None:
        for step in choose(self._present()):
            with contextlib.suppress(OSError):
                self._store.remove_tree(str(step))

    def room(self, part_bytes: int) -> str | None:
        """What is wrong if the disk cannot hold two parts, beside what is here already; None if it can."""
        self.directory.mkdir(parents=True, exist_ok=True)
        mine = sum(self._store.list_sizes("").values())
        free = shutil.disk_usage(self.directory).free + mine
        if free >= KEPT_STEPS * part_bytes:
            return None
        return (
            f"{self.directory} has room for {free / 1e9:.3f} GB, needs {KEPT_STEPS * part_bytes / 1e9:.3f} GB: "
            f"{KEPT_STEPS} checkpoints of {part_bytes / 1e9:.3f} GB on this host"
        )
