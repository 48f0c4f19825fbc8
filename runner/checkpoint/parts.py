"""Parts of the fast tier: what one process needs to restore itself at one step, in a directory of one host's disk.

A part has the files of a checkpoint that one process has written (`runner.checkpoint.blocks`), with `part.json` as its
manifest. It is written under a temporary name, flushed, and renamed as a whole. Its files may be read from several
places: this host's disk, and hosts that have a copy of the part or a part with the same blocks.
"""

import contextlib
import functools
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import jax
import numpy as np

from runner.checkpoint.arrays import INDEX_SUFFIX, encode_index, parse_index
from runner.checkpoint.blocks import (
    Blocks,
    BlockTable,
    Piece,
    Shards,
    parse_records,
    read_blocks,
    read_pieces,
    write_packs,
)
from runner.checkpoint.leaves import Leaves
from runner.checkpoint.manifest import FORMAT, FORMAT_1, Manifest, seal
from runner.errors import NewerFormatError, format_reason
from runner.spec import Trajectory, hash_record
from runner.storage import Key, LocalStore, compute_crc32c, parse_json, parse_number, validate_record
from runner.storage.store import fsync, make_directory

PART_FILE = "part.json"
NUM_KEPT_STEPS = 2
CHUNK_BYTES = 2**20  # copied at a time
_ATTACHMENTS = "companions"  # the key of their names in a part
_PART_KEYS = (Key(_ATTACHMENTS, list, "Names."),)
_STEM = "arrays/blocks"  # of the files with the arrays. The same for all processes: one may have the part of another
_FILE_NAME = re.compile(r"([\w%.,=+@~-]+/)?[\w%.,=+@~-]+")

Fetch = Callable[[str, int, int | None], bytes]  # reads a range of a file of a part; to its end if that is None
Found = TypeVar("Found")


class FastPart:
    """Part of a step, whose files are read from the first source that has them intact.

    Attributes:
        sources: places to read from, in this order: the process that has the files, or None for the own disk.
        manifest: the manifest of the part.
        is_fetched: True if a file came from another source than the own disk.
        problems: reasons why files were read from another source than the first.
    """

    def __init__(self, step: int, sources: list[tuple[int | None, Fetch]]):
        """Read `part.json`. Raises `ValueError` if no source has it intact."""
        self.sources = sources
        self.is_fetched = False
        self.problems: list[str] = []

        def parse(fetch: Fetch) -> tuple[Manifest, list[str]]:
            record = parse_json(fetch(PART_FILE, 0, None))
            # Parts of earlier versions have no digest of this file, and no sizes of the attachments.
            digest, written = record.pop("digest", None), record.get("format")
            is_intact = digest == hash_record(record) or (digest is None and written == FORMAT_1)
            if not is_intact or written not in (FORMAT_1, FORMAT):
                raise ValueError(f"{PART_FILE} does not match its own digest, or is of another format")
            validate_record(record, _PART_KEYS, [_ATTACHMENTS])
            manifest = Manifest.from_json(record)
            if manifest.step != step or (manifest.indexes is None and manifest.shards is None):
                raise ValueError(f"{PART_FILE} is of step {manifest.step} and stands in {step}, or names no shards")
            return manifest, list(map(str, record[_ATTACHMENTS]))

        self.manifest, self._attachments = self._try_sources(parse)

    def choose_source(self, number: int, own_process: int, reason: str) -> "FastPart":
        """Return the part as the source with this number has it, by the order of the processes. Raises like `FastPart`.

        Args:
            number: number of the source, counted from 0, modulo the number of sources.
            own_process: the process whose disk is `None` in `sources`.
            reason: reason to read from another source than the own disk.
        """
        sources = sorted(self.sources, key=lambda source: own_process if source[0] is None else source[0])
        number %= len(sources)
        part = FastPart(self.manifest.step, sources[number:] + sources[:number])
        part.problems = [] if sources[number][0] is None else [reason]
        return part

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """Return the leaves of this process. Raises `ValueError` if no source has an intact copy of some file."""
        return read_blocks(self._fetch_run, self._read_shards(), leaves)

    def _read_shards(self) -> Shards:
        files, indexes = self.manifest.files, self.manifest.indexes
        if indexes is None:  # an earlier version has written one file for each piece
            return parse_records(self.manifest.shards or {}, files)
        shards: Shards = {}
        for name in indexes:
            shards |= self._try_sources(functools.partial(_read_index, name, files[name])).shards
        return shards

    def read_attachments(self) -> dict[str, bytes]:
        """Return the small files that were written with the step. Raises as `read` does."""
        return {name: self._fetch(name) for name in self._attachments}

    def _fetch(self, name: str) -> bytes:
        # Parts of earlier versions have no sizes of the attachments.
        if name not in self.manifest.files:
            return self._try_sources(lambda fetch: fetch(name, 0, None))
        piece = Piece(name, 0, *self.manifest.files[name])
        return self._fetch_run([piece])[piece].tobytes()

    def _fetch_run(self, run: list[Piece]) -> dict[Piece, np.ndarray]:
        return self._try_sources(lambda fetch: read_pieces(fetch, run))

    def _try_sources(self, read: Callable[[Fetch], Found]) -> Found:
        """Return what `read` returns for the first source for which it raises no error. Called on any thread."""
        problems = []
        for process, fetch in self.sources:
            try:
                found = read(fetch)
            except (OSError, ValueError, KeyError, TypeError, NewerFormatError) as error:
                problems.append(("" if process is None else f"process {process}: ") + format_reason(error))
                continue
            if process is not None:
                self.is_fetched = True
            self.problems += problems
            return found
        raise ValueError("; ".join(problems))


def _read_index(name: str, entry: list[Any], fetch: Fetch) -> BlockTable:
    return parse_index(name, fetch(name, 0, None), entry)


def make_fetch(store: LocalStore) -> Fetch:
    """Return the function that reads the files of a part on this host's own disk."""

    def fetch(name: str, begin: int, end: int | None) -> bytes:
        return store.read(name) if end is None else store.read_range(name, begin, end, None)

    return fetch


class PartDirectory:
    """Directory of the parts of one process by step: its own, or the copies on another host."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.pinned_steps: set[int] = set()  # steps that are kept beside the newest: sent last, and being sent
        self._store = LocalStore(directory)

    def list_parts(
        self, is_own: Callable[[Trajectory, int], bool], last_steps: Mapping[int, int]
    ) -> dict[int, FastPart]:
        """Return by step each part that this run can continue from. Of its files only `part.json` has been read.

        Args:
            is_own: returns True for a trajectory, saved at a step, that this run continues.
            last_steps: by attempt, the lowest step from which a later attempt has resumed; its later parts are ignored.
        """
        found = {}
        for step in self._list_present():
            with contextlib.suppress(ValueError):
                part = FastPart(step, [(None, make_fetch(LocalStore(self.directory / str(step))))])
                manifest = part.manifest
                if is_own(manifest.identity, step) and step <= last_steps.get(manifest.attempt, step):
                    found[step] = part
        return found

    def _list_present(self) -> list[int]:
        return sorted(step for step in map(parse_number, self._store.list_names("")) if step is not None)

    def write(self, manifest: Manifest, blocks: Blocks, attachments: dict[str, bytes]) -> None:
        """Write this process's part of a step, and delete all but the newest `NUM_KEPT_STEPS`. Raises `OSError`."""
        temporary = self.directory / f"{manifest.step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        index = f"{_STEM}{INDEX_SUFFIX}"
        (temporary / index).parent.mkdir(parents=True)
        # In one order, because a process with the same blocks may hold them on its devices in another one.
        in_order = {leaf: sorted(own, key=lambda each: each[0]) for leaf, own in sorted(blocks.items())}
        table = write_packs(temporary, _STEM, in_order)
        for name, content in ({index: encode_index(table)} | attachments).items():
            (temporary / name).write_bytes(content)
            table.files[name] = [len(content), compute_crc32c(content)]
        part = replace(manifest, files=table.files, indexes=[index])
        (temporary / PART_FILE).write_bytes(seal(part.to_json() | {_ATTACHMENTS: sorted(attachments)}))
        self.publish(temporary.name, manifest.step)
        self.delete_old()

    def publish(self, temporary: str, step: int, guard: contextlib.AbstractContextManager[None] | None = None) -> None:
        """Make a directory of complete files the part of a step, inside of `guard` if given. Raises `OSError`."""
        # On a RAM disk a flush costs nothing. On a disk it makes the part one that a power cut of the host spares.
        self._store.flush_tree(temporary)
        with guard or contextlib.nullcontext():
            self._store.remove_tree(str(step))
            os.rename(self.directory / temporary, self.directory / str(step))
        fsync(self.directory)

    def receive(
        self, stream: BinaryIO, step: int, files: Mapping[str, int], guard: contextlib.AbstractContextManager[None]
    ) -> None:
        """Receive a part from another process. Raises `ValueError` or `OSError`, with nothing of it left.

        Args:
            stream: connection, from which the content of the files is read.
            step: step of the part.
            files: size in bytes of each file.
            guard: entered while the part is made visible; an error that it raises prevents that.
        """
        # What a peer sends is data: no name may lead out of the directory, and no size may fill the disk.
        sizes = {validate_name(name): int(size) for name, size in files.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        if min(sizes.values(), default=0) < 0 or sum(sizes.values()) > shutil.disk_usage(self.directory).free:
            raise ValueError(f"{self.directory} has no room for a part of {sum(sizes.values()):,} bytes")
        # The thread is in the name because a transfer that was given up may still be writing.
        temporary = self.directory / f"{step}.{threading.get_ident()}.tmp"
        try:
            for name, size in sizes.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                with (temporary / name).open("wb") as file:
                    copy_bytes(stream, file, size)
            self.publish(temporary.name, step, guard)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.delete_old()

    def delete_old(self) -> None:
        """Delete all but the newest `NUM_KEPT_STEPS` and `pinned_steps`."""
        self._delete([step for step in self._list_present()[:-NUM_KEPT_STEPS] if step not in self.pinned_steps])

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

    def find_space_problem(self, part_bytes: int, copied_bytes: int, is_sending: bool) -> str | None:
        """Return a message if the disk has no room; None if it has. Raises `OSError`.

        Args:
            part_bytes: size of a part of this process.
            copied_bytes: size of a part of each process of which this one holds copies, together.
            is_sending: True if other processes hold copies for this one.
        """
        make_directory(self.directory)
        # Parts that are there already will be replaced, so their space counts as free.
        own_bytes = sum(self._store.list_sizes("").values())
        free_bytes = shutil.disk_usage(self.directory).free + own_bytes
        # Besides the newest steps, the two of `pinned_steps` and one that is being written; and one being received.
        num_parts = NUM_KEPT_STEPS + 3 * is_sending
        needed_bytes = num_parts * part_bytes + (NUM_KEPT_STEPS + 1) * copied_bytes
        if free_bytes >= needed_bytes:
            return None
        copies = f", and {NUM_KEPT_STEPS + 1} copies of {copied_bytes / 1e9:.3f} GB" if copied_bytes else ""
        return (
            f"{self.directory} has room for {free_bytes / 1e9:.3f} GB, needs {needed_bytes / 1e9:.3f} GB: {num_parts} "
            f"checkpoints of {part_bytes / 1e9:.3f} GB on this host{copies}"
        )


def copy_bytes(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    """Copy so many bytes. Raises `ValueError` if the source ends earlier."""
    while num_bytes:
        chunk = source.read(min(num_bytes, CHUNK_BYTES))
        if not chunk:
            raise ValueError(f"{num_bytes} bytes are missing at the end")
        target.write(chunk)
        num_bytes -= len(chunk)


def validate_name(name: Any) -> str:
    """Return the name of a file of a part. Raises `ValueError` if it could lead out of the part's directory."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"a part cannot contain a file {name!r}")
    return name
