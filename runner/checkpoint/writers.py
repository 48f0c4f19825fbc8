"""Writers of the arrays of a checkpoint: through Orbax on a disk, as pieces into a bucket.

A writer copies the arrays off the device and returns a function that finishes the write in the background. Orbax writes
to a disk that all hosts share. For a bucket, each process writes its pieces to its own disk and then uploads them, in
parallel. The manifest of a checkpoint that was written as pieces has the key `shards`.
"""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import jax
import orbax.checkpoint as ocp

from runner.checkpoint.blocks import Blocks, BlockTable, copy_to_host, write_blocks
from runner.checkpoint.manifest import Files, ShardRecord
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.storage import JsonObject, Store, default_cache_directory

NUM_UPLOADS = 8


@dataclass(frozen=True)
class WriteResult:
    """Values of the manifest's keys `files` and `shards` for the arrays that a writer has written."""

    files: Files = field(default_factory=dict)
    shards: dict[str, list[ShardRecord]] | None = None


class ArrayWriter(Protocol):
    """Writer of arrays below one name of a store. Made and called on every host."""

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """Start writing `leaves` below `target`. The arrays may be donated when this returns. Any thread.

        Returns:
            A function of a deadline in seconds that blocks until the parts of all hosts are durable. Called on every
            host, on any thread. Its result counts on process 0 only. It may raise `OSError` or `ValueError`.
        """

    def discard(self, target: str) -> None:
        """Delete what a failed write has left. Called on every host; only process 0 touches shared files."""

    def close(self) -> None:
        """Stop the background threads, and delete temporary files."""


class OrbaxWriter:
    """Writer through Orbax, on a disk that all hosts share."""

    def __init__(self, store: Store, hosts: Hosts):
        assert store.root is not None, "orbax writes to a disk"
        self._store, self._root, self._hosts = store, store.root, hosts
        self._orbax = _make_orbax(hosts)
        self._failed: set[str] = set()  # targets of failed writes that were not written since

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """Copy the arrays out of the devices; Orbax writes them in the background."""
        self._delete_failed()
        self._failed.discard(target)
        self._orbax.save(self._root / target, args=ocp.args.PyTreeSave(leaves), force=True)
        return lambda _: self._finish(target)

    def _finish(self, target: str) -> WriteResult:
        self._orbax.wait_until_finished()
        if not self._hosts.is_main:
            return WriteResult()
        # Orbax reports no sizes or digests, so process 0 reads all files once. They are still in the page cache.
        arrays = target.rpartition("/")[2]
        sizes = self._store.list_sizes(target)
        return WriteResult(
            {f"{arrays}/{name}": [size, self._store.compute_digest(f"{target}/{name}")] for name, size in sizes.items()}
        )

    def discard(self, target: str) -> None:
        """Delete what a failed write has left, now and again before the next write."""
        self._orbax = _make_orbax(self._hosts)  # the old one would raise the same error again at the next save
        self._failed.add(target)
        self._delete_failed()

    def _delete_failed(self) -> None:
        # After its first failure Orbax returns while other threads of it still write. The files that they leave are
        # deleted when the next save starts, or in `close`.
        if not self._hosts.is_main:
            return
        for path in (self._root / target for target in self._failed):
            with contextlib.suppress(OSError):  # a directory that cannot be deleted stays until the next attempt
                for leftover in path.parent.glob(f"{path.name}*"):
                    shutil.rmtree(leftover, ignore_errors=True)
                path.parent.rmdir()

    def close(self) -> None:
        """Stop the threads of Orbax."""
        self._orbax.close()
        self._delete_failed()


def _make_orbax(hosts: Hosts) -> ocp.AsyncCheckpointer:
    # With explicit `active_processes` Orbax synchronizes through the coordinator. By default it uses collectives, which
    # a background thread would interleave with those of the train step.
    processes = ocp.options.MultiprocessingOptions(active_processes=set(range(hosts.num_processes)))
    # Compression takes seconds of CPU time that training needs, and weights hardly compress.
    handler = ocp.PyTreeCheckpointHandler(use_compression=False, multiprocessing_options=processes)
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=processes)


class BlockWriter:
    """Writer of pieces into a bucket, by way of files on this host's own disk."""

    def __init__(self, store: Store, hosts: Hosts, staging: Path):
        self._store, self._hosts = store, hosts
        self._staging = staging
        self._num_saves = 0

    def start(self, target: str, leaves: dict[str, jax.Array]) -> Callable[[float], WriteResult]:
        """Copy this process's shards to host memory; they are written and uploaded in the background."""
        blocks = copy_to_host(leaves)
        # All hosts save the same steps in the same order, so the number of the save gives them the same key.
        self._num_saves += 1
        key = key_value.save_folder(self._num_saves)
        return lambda deadline_seconds: self._finish(target, blocks, key, deadline_seconds)

    def _finish(self, target: str, blocks: Blocks, key: str, deadline_seconds: float) -> WriteResult:
        started = time.monotonic()
        directory, _, arrays = target.rpartition("/")
        message: JsonObject
        try:
            self._staging.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._staging) as temporary:
                table = write_blocks(Path(temporary), f"{arrays}/{self._hosts.process_id}", blocks)
                blocks.clear()  # frees the host's memory before the upload, which may take minutes
                _upload(self._store, Path(temporary), directory, table, deadline_seconds)
            message = {"files": table.files, "shards": table.shards}
        except OSError as error:
            if self._hosts.num_processes == 1:
                raise
            # Process 0 waits for a message of every process, so that it learns of a failure at once.
            message = {"error": f"process {self._hosts.process_id}: {error}"}
        # Process 0 must outlast the deadline of the slowest upload, to report that failure and not a missing message.
        left_seconds = max(deadline_seconds - (time.monotonic() - started), 1.0)
        messages = self._hosts.collect(key, message, left_seconds + 10)
        merged = BlockTable()
        for part in messages:
            if "error" in part:
                raise OSError(part["error"])
            merged.add(BlockTable(part["files"], part["shards"]))
        return WriteResult(merged.files, merged.shards)

    def discard(self, target: str) -> None:
        """Do nothing: uploaded pieces stay until the next attempt or retention deletes them."""

    def close(self) -> None:
        """Delete the temporary files."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _upload(store: Store, source: Path, directory: str, table: BlockTable, deadline_seconds: float) -> None:
    """Upload the files of `table` from below `source` to the same names below `directory`, in parallel."""
    started = time.monotonic()

    def send(name: str) -> None:
        left_seconds = deadline_seconds - (time.monotonic() - started)
        store.upload(source / name, f"{directory}/{name}", max(left_seconds, 0.0))

    with ThreadPoolExecutor(NUM_UPLOADS, thread_name_prefix="upload") as pool:
        try:
            list(pool.map(send, table.files))
        finally:
            pool.shutdown(cancel_futures=True)


def make_writer(store: Store, hosts: Hosts, run_id: str) -> ArrayWriter:
    """Return the writer for a store. Called on every host."""
    if store.root is not None:
        return OrbaxWriter(store, hosts)
    staging = default_cache_directory() / "staging" / f"{run_id}.{hosts.process_id}"
    shutil.rmtree(staging, ignore_errors=True)  # files of an attempt that was killed
    return BlockWriter(store, hosts, staging)
