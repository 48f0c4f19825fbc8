"""Fast tier: the newest states on each host's own disk or RAM disk, beside the durable directory.

Each process keeps the pieces of a step that it needs to restore itself (its *part*), so nothing here is shared and
nothing is waited for. A step counts only if every process still has its part of it: together they choose the newest
such step, so a host that comes back empty, or with half a step, sends all of them to an older step or to the durable
directory. A part is written under a temporary name, flushed, and renamed as a whole.
"""

import contextlib
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np

from runner.checkpoint.blocks import Blocks, read_blocks, write_blocks
from runner.checkpoint.leaves import Leaves
from runner.checkpoint.manifest import Manifest
from runner.distributed.agreement import Hosts
from runner.errors import InvalidError
from runner.records import Key, validate_record
from runner.spec import Trajectory
from runner.storage import JsonObject, LocalStore, compute_crc32c, encode_json, parse_number, read_json
from runner.storage.store import fsync, make_directory

PART_FILE = "part.json"
NUM_KEPT_STEPS = 2
_HOST_FILE = "host"  # with the name of the host to which a directory of parts belongs
_ATTACHMENTS = "companions"  # the key of their names in a part
_DIGESTS = "companion_digests"  # their CRC-32C, by name; parts of earlier versions have none
_PART_KEYS = (Key(_ATTACHMENTS, list, "Names."), Key(f"{_DIGESTS}.*", str, "CRC-32C."))


class FastTier:
    """Parts of one process, in its own directory. Made on every host."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._store = LocalStore(directory)

    def list_steps(self, is_own: Callable[[Trajectory, int], bool]) -> list[int]:
        """Return the steps of which this process has a whole part that `is_own` by trajectory and step, ascending."""
        found = []
        for step in self._list_present():
            with contextlib.suppress(OSError, ValueError):
                if is_own(self._read_part(step)[0].identity, step):
                    found.append(step)
        return found

    def _list_present(self) -> list[int]:
        return sorted(step for step in map(parse_number, self._store.list_names("")) if step is not None)

    def _read_part(self, step: int) -> tuple[Manifest, JsonObject]:
        """Return the manifest of a part, and its whole record. Raises `ValueError` if it is damaged, or `OSError`."""
        record = read_json(self._store, f"{step}/{PART_FILE}")
        validate_record(record, _PART_KEYS, [_ATTACHMENTS])
        part = Manifest.from_json(record)
        if part.step != step or part.shards is None:
            raise ValueError(f"{PART_FILE} is of step {part.step} and stands in {step}, or names no shards")
        return part, record

    def write(self, manifest: Manifest, blocks: Blocks, attachments: dict[str, bytes]) -> None:
        """Write this process's part of a step, and delete all but the newest `NUM_KEPT_STEPS`. Raises `OSError`."""
        step = str(manifest.step)
        temporary = self.directory / f"{step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        table = write_blocks(temporary, "pieces", blocks)
        for name, content in attachments.items():
            (temporary / name).write_bytes(content)
        part = replace(manifest, files=table.files, shards=table.shards)
        digests = {name: compute_crc32c(content) for name, content in attachments.items()}
        record = part.to_json() | {_ATTACHMENTS: sorted(attachments), _DIGESTS: digests}
        (temporary / PART_FILE).write_bytes(encode_json(record))
        # On a RAM disk a flush costs nothing. On a disk it makes the part one that a power cut of the host spares.
        self._store.flush_tree(temporary.name)
        self._store.remove_tree(step)
        os.rename(temporary, self.directory / step)
        fsync(self.directory)
        self._delete(self._list_present()[:-NUM_KEPT_STEPS])

    def read(self, step: int, leaves: Leaves) -> tuple[dict[str, jax.Array], Manifest]:
        """Return the leaves of this process and the manifest of the part.

        Raises:
            ValueError: the part is damaged.
            OSError: it cannot be read.
        """
        part, _ = self._read_part(step)
        arrays = read_blocks(lambda name: self._store.read(f"{step}/{name}"), part.files, part.shards or {}, leaves)
        return arrays, part

    def read_attachments(self, step: int) -> dict[str, bytes]:
        """Return the small files that were written with a step. Raises as `read` does."""
        _, record = self._read_part(step)
        found = {name: self._store.read(f"{step}/{name}") for name in map(str, record[_ATTACHMENTS])}
        for name, digest in record.get(_DIGESTS, {}).items():
            if name not in found or compute_crc32c(found[name]) != digest:
                raise ValueError(f"{name} does not match its CRC-32C")
        return found

    def delete_after(self, step: int) -> None:
        """Delete every step beyond `step`, and every part that was never whole."""
        for name in self._store.list_names(""):
            if name.endswith(".tmp"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        self._delete([other for other in self._list_present() if other > step])

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            # A part that cannot be deleted only takes space: the next write tries again.
            with contextlib.suppress(OSError):
                self._store.remove_tree(str(step))

    def find_space_problem(self, part_bytes: int) -> str | None:
        """Return a message if the disk has no room for `NUM_KEPT_STEPS` parts; None if it has. Raises `OSError`."""
        make_directory(self.directory)
        # Parts that are there already will be replaced, so their space counts as free.
        own_bytes = sum(self._store.list_sizes("").values())
        free_bytes = shutil.disk_usage(self.directory).free + own_bytes
        if free_bytes >= NUM_KEPT_STEPS * part_bytes:
            return None
        return (
            f"{self.directory} has room for {free_bytes / 1e9:.3f} GB, needs {NUM_KEPT_STEPS * part_bytes / 1e9:.3f} "
            f"GB: {NUM_KEPT_STEPS} checkpoints of {part_bytes / 1e9:.3f} GB on this host"
        )


def open_fast_tier(directory: Path, hosts: Hosts, leaves: Leaves) -> FastTier:
    """Return the fast tier of this process, with room for its parts. Called on every host.

    Args:
        directory: the process's own directory.
        hosts: all processes of the job.
        leaves: abstract arrays with shardings, as they are stored.

    Raises:
        InvalidError: on every host, if the disk of one cannot hold its parts.
    """
    fast_tier, part_bytes, host = FastTier(directory), 0, socket.gethostname()
    names = hosts.gather(host)
    _delete_former_parts(directory.parent, host, {str(process) for process, name in enumerate(names) if name == host})
    for leaf in leaves.values():
        # A process keeps each block that it holds once, however many of its devices have a copy.
        blocks = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        part_bytes += int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize * len(blocks)
    try:
        problem = fast_tier.find_space_problem(part_bytes)
        (directory / _HOST_FILE).write_text(host)
    except OSError as error:
        problem = f"cannot be written: {error}"
    # The message is gathered, so that all hosts end together and none waits for one that has gone.
    problem = next((text for text in hosts.gather(problem) if text is not None), None)
    if problem is not None:
        raise InvalidError(problem)
    return fast_tier


def _delete_former_parts(directory: Path, host: str, own: set[str]) -> None:
    """Delete the parts of processes that this host had under other numbers, before the job lost or exchanged a host.

    Args:
        directory: directory of the run, with a directory for each process.
        host: name of this host. Where hosts share a disk, those of the others are left alone.
        own: numbers of the processes on this host.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if parse_number(path.name) is None or path.name in own:
                continue
            with contextlib.suppress(OSError, ValueError):
                if (path / _HOST_FILE).read_text() == host:
                    shutil.rmtree(path, ignore_errors=True)
