"""How the arrays of a checkpoint reach its directory: through orbax, or piece by piece.

A writer copies what it must and returns a function that does the rest in the background. Orbax writes where all hosts
share a disk. For a bucket each process stages its pieces on its own disk and then sends them, in parallel. What a
checkpoint was written with stands in its manifest: those with `shards` hold pieces.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import jax
import orbax.checkpoint as ocp

from runner.checkpoint import blocks as pieces
from runner.checkpoint.manifest import Files, ShardRecord
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.storage import Store

NUM_UPLOADS = 8


@dataclass(frozen=True)
class WriteResult:
    """What the manifest must say of the arrays that a writer has written."""

    files: Files = field(default_factory=dict)
    shards: dict[str, list[ShardRecord]] | None = None


class ArrayWriter(Protocol):
    """Writes arrays below one name of a store. Called on every host."""

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """Begin to write below `target`; returns as soon as the arrays may be donated. On any thread.

        The function returned blocks until every host's part is durable, at most so many seconds; what it returns counts
        on the main host. It may raise `OSError` or `ValueError`.
        """

    def discard(self, target: str) -> None:
        """Delete what a failed write has left. Main host only for what is shared."""

    def close(self) -> None:
        """Stop background threads."""


def _make_checkpointer(hosts: Hosts) -> ocp.AsyncCheckpointer:
    """Without compression: it costs seconds of the cores that train, and weights hardly shrink.

    Named processes make orbax meet at the coordinator. By default it meets in collectives, which from a background
    thread would mix with those of a step.
    """
    processes = ocp.options.MultiprocessingOptions(active_processes=set(range(hosts.num_processes)))
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=processes)


class OrbaxWriter:
    """Orbax on a disk that all hosts share."""

    def __init__(self, store: Store, hosts: Hosts):
        assert store.root is not None, "orbax writes to a disk"
        self._store, self._root, self._hosts = store, store.root, hosts
        self._orbax = _make_checkpointer(hosts)
        self._failed: set[str] = set()  # where a write has failed, and nothing was written since

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """See `ArrayWriter`."""
        self._free()
        self._failed.discard(target)
        self._orbax.save(self._root / target, args=ocp.args.PyTreeSave(leaves), force=True)
        return lambda _: self._finish(target)

    def _finish(self, target: str) -> WriteResult:
        self._orbax.wait_until_finished()
        if not self._hosts.is_main:
            return WriteResult()
        arrays = target.rpartition("/")[2]
        sizes = self._store.list_sizes(target)
        return WriteResult(
            {f"{arrays}/{name}": [size, self._store.compute_digest(f"{target}/{name}")] for name, size in sizes.items()}
        )

    def discard(self, target: str) -> None:
        """See `ArrayWriter`."""
        self._orbax = _make_checkpointer(self._hosts)  # the old one would report this failure again
        self._failed.add(target)
        self._free()

    def _free(self) -> None:
        """Delete what failed writes have left.

        Orbax ends a write with the first of its failures, while other threads of it go on: what they leave after the
        failure was told is deleted when the next save begins, or at the end.
        """
        if not self._hosts.is_main:
            return
        for path in (self._root / target for target in self._failed):
            with contextlib.suppress(OSError):  # then it stays until the next attempt
                for leftover in path.parent.glob(f"{path.name}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                path.parent.rmdir()

    def close(self) -> None:
        """See `ArrayWriter`."""
        self._orbax.close()
        self._free()


class BlockWriter:
    """Pieces into a bucket, staged on this host's own disk."""

    def __init__(self, store: Store, hosts: Hosts, staging: Path):
        self._store, self._hosts = store, hosts
        self._staging = staging
        self._num_saves = 0

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """See `ArrayWriter`."""
        blocks = pieces.copy_to_host(leaves)
        self._num_saves += 1
        key = key_value.save_folder(self._num_saves)
        return lambda deadline_seconds: self._finish(target, blocks, key, deadline_seconds)

    def _finish(self, target: str, blocks: pieces.Blocks, key: str, deadline_seconds: float) -> WriteResult:
        started = time.monotonic()
        directory, _, arrays = target.rpartition("/")
        message: dict[str, Any]
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._staging) as temporary:
                table = pieces.write_blocks(Path(temporary), f"{arrays}/{self._hosts.process_id}", blocks)
                blocks.clear()
                upload(self._store, Path(temporary), directory, table, deadline_seconds)
            message = {"files": table.files, "shards": table.shards}
        except OSError as error:
            if self._hosts.num_processes == 1:
                raise
            message = {"error": f"process {self._hosts.process_id}: {error}"}
        left_seconds = max(deadline_seconds - (time.monotonic() - started), 1.0)
        messages = self._hosts.collect(key, message, left_seconds + 10)
        whole = pieces.BlockTable()
        for part in messages:
            if "error" in part:
                raise OSError(part["error"])
            whole.add(pieces.BlockTable(part["files"], part["shards"]))
        return WriteResult(whole.files, whole.shards)

    def discard(self, target: str) -> None:
        """See `ArrayWriter`. What has been uploaded stays until the next attempt or retention deletes it."""

    def close(self) -> None:
        """See `ArrayWriter`."""
        shutil.rmtree(self._staging, ignore_errors=True)


def upload(store: Store, source: Path, directory: str, table: pieces.BlockTable, deadline_seconds: float) -> None:
    """Send the files of `table`, which stand below `source`, to the same names below `directory`, in parallel."""
    started = time.monotonic()

    def send(name: str) -> None:
        left_seconds = deadline_seconds - (time.monotonic() - started)
        store.upload(source / name, f"{directory}/{name}", max(left_seconds, 0.0))

    with ThreadPoolExecutor(NUM_UPLOADS, thread_name_prefix="upload") as pool:
        try:
            list(pool.map(send, table.files))
        finally:
            pool.shutdown(cancel_futures=True)
