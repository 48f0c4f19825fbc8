"""Writers and readers of the arrays of a checkpoint: through Orbax on a disk, as pieces (`blocks`) in a bucket.

A writer copies the arrays off the device and returns a function that finishes the write in the background. Orbax writes
to a disk that all hosts share. For a bucket, each process writes its pieces to its own disk and then uploads them, in
parallel. The manifest of a checkpoint that was written as pieces has the key `shards`; any other was written by Orbax.

Readers load whole states, single leaves, or what a first save reads back. They claim no attempt and change no file.
"""

import contextlib
import functools
import re
import shutil
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import SingleDeviceSharding

from runner.checkpoint import blocks, fingerprint
from runner.checkpoint.blocks import Blocks, BlockTable, copy_to_host, write_blocks
from runner.checkpoint.leaves import Leaves, decode_leaves, encode_leaves, parse_dtype
from runner.checkpoint.manifest import Files, Manifest, ShardRecord
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.errors import PeerLostError, format_error
from runner.run.environment import probe_file_system
from runner.storage import JsonObject, LocalStore, Store, default_cache_directory
from runner.storage.store import translate_errors

NUM_UPLOADS = 8
GROUP_BYTES = 1 << 30  # of the leaves that are read at a time
# Errors of a write that fails. They cost one save; anything else is a bug and ends the run.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)
_CACHE_BYTES = 64 << 20  # without a cache, the table of contents is read again for every block


@dataclass(frozen=True)
class WriteResult:
    """Values of the manifest's keys `files` and `shards` for the arrays that a writer has written."""

    files: Files = field(default_factory=dict)
    shards: dict[str, list[ShardRecord]] | None = None


class ArrayWriter(Protocol):
    """Writer of arrays below one name of a store. Made and called on every host."""

    def start(
        self, target: str, leaves: dict[str, jax.Array], error: Exception | None = None
    ) -> Callable[[float], WriteResult]:
        """Start writing `leaves` below `target`. The arrays may be donated when this returns. Any thread.

        Raises none of `WRITE_ERRORS`: process 0 waits for the part of every host, and must learn that there is none.

        Args:
            target: name of a directory.
            leaves: the arrays by name.
            error: one of `WRITE_ERRORS`, with which this host has failed already; then nothing is written.

        Returns:
            A function of a deadline in seconds that blocks until the parts of all hosts are durable. Called on every
            host, on any thread. Its result counts on process 0 only. It may raise one of `WRITE_ERRORS`.
        """

    def discard(self, target: str) -> None:
        """Delete what a failed write has left. Called on every host; only process 0 touches shared files."""

    def close(self) -> None:
        """Stop the background threads, and delete temporary files."""


class OrbaxWriter:
    """Writer through Orbax, on a disk that all hosts share."""

    def __init__(self, store: Store, hosts: Hosts):
        assert isinstance(store, LocalStore), "orbax writes to a disk"
        self._store, self._root, self._hosts = store, store.root, hosts
        self._orbax = _make_orbax(hosts)
        self._num_saves = 0
        self._failed: set[str] = set()  # targets of failed writes that were not written since

    def start(
        self, target: str, leaves: dict[str, jax.Array], error: Exception | None = None
    ) -> Callable[[float], WriteResult]:
        """Copy the arrays out of the devices; Orbax writes them in the background."""
        self._delete_failed()
        self._failed.discard(target)
        self._num_saves += 1
        key = key_value.save_folder(self._num_saves)
        try:
            if error is None:
                self._orbax.save(self._root / target, args=ocp.args.PyTreeSave(leaves), force=True)
        except WRITE_ERRORS as caught:
            error = caught
        return lambda deadline_seconds: self._finish(target, key, deadline_seconds, error)

    def _finish(self, target: str, key: str, deadline_seconds: float, error: Exception | None) -> WriteResult:
        started = time.monotonic()
        try:
            if error is not None:
                raise error
            self._orbax.wait_until_finished()
            # Orbax flushes the data files and not the small ones beside them, such as `_METADATA`, nor the directories.
            # On a network disk a host can flush only what it has written itself.
            if not self._hosts.is_main:
                own = re.compile(rf"(.*\.)?process_{self._hosts.process_id}")
                self._store.flush_tree(target, lambda name: any(map(own.fullmatch, name.split("/"))))
        except WRITE_ERRORS as caught:
            error = caught
        _collect_parts(self._hosts, key, {}, error, deadline_seconds - (time.monotonic() - started))
        if not self._hosts.is_main:
            return WriteResult()
        self._store.flush_tree(target)
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

    def start(
        self, target: str, leaves: dict[str, jax.Array], error: Exception | None = None
    ) -> Callable[[float], WriteResult]:
        """Copy this process's shards to host memory; they are written and uploaded in the background."""
        # All hosts save the same steps in the same order, so the number of the save gives them the same key.
        self._num_saves += 1
        key, blocks = key_value.save_folder(self._num_saves), Blocks()
        try:
            if error is None:
                blocks = copy_to_host(leaves)
        except WRITE_ERRORS as caught:
            error = caught
        return lambda deadline_seconds: self._finish(target, blocks, key, deadline_seconds, error)

    def _finish(
        self, target: str, blocks: Blocks, key: str, deadline_seconds: float, error: Exception | None
    ) -> WriteResult:
        started = time.monotonic()
        directory, _, arrays = target.rpartition("/")
        table = BlockTable()
        try:
            if error is not None:
                raise error
            self._staging.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._staging) as temporary:
                table = write_blocks(Path(temporary), f"{arrays}/{self._hosts.process_id}", blocks)
                blocks.clear()  # frees the host's memory before the upload, which may take minutes
                _upload(self._store, Path(temporary), directory, table, deadline_seconds)
        except WRITE_ERRORS as caught:
            error = caught
        message = {"files": table.files, "shards": table.shards}
        left_seconds = deadline_seconds - (time.monotonic() - started)
        messages = _collect_parts(self._hosts, key, message, error, left_seconds)
        merged = BlockTable()
        for part in messages:
            merged.add(BlockTable(part["files"], part["shards"]))
        return WriteResult(merged.files, merged.shards)

    def discard(self, target: str) -> None:
        """Do nothing: uploaded pieces stay until the next attempt or retention deletes them."""

    def close(self) -> None:
        """Delete the temporary files."""
        shutil.rmtree(self._staging, ignore_errors=True)


def _collect_parts(
    hosts: Hosts, key: str, message: JsonObject, error: Exception | None, left_seconds: float
) -> list[JsonObject]:
    """Send the message of this process to process 0; return the messages of all there. Called on every host.

    Raises:
        OSError: on process 0, the part of a process has failed; on the others, their own.
    """
    if error is not None and hosts.is_main:
        # The others cannot change the outcome, so they are not waited for. Their messages are deleted with those of the
        # next save.
        with contextlib.suppress(PeerLostError):
            hosts.collect(key, message, 0.0)
        raise error
    if error is not None:
        message = {"error": f"process {hosts.process_id}: {format_error(error)}"}
    # Process 0 must outlast the deadline of the slowest write, to report that failure and not a missing message.
    messages = hosts.collect(key, message, max(left_seconds, 1.0) + 10)
    for part in messages:
        if "error" in part:
            raise OSError(part["error"]) from error
    return messages


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
    # Orbax locks its files and flushes their directories. Where that is not possible the arrays are pieces, as in a
    # bucket, which need neither.
    if hosts.agree(hosts.is_main and store.root is not None and not probe_file_system(store.root).list_missing()):
        return OrbaxWriter(store, hosts)
    staging = default_cache_directory() / "staging" / f"{run_id}.{hosts.process_id}"
    shutil.rmtree(staging, ignore_errors=True)  # files of an attempt that was killed
    return BlockWriter(store, hosts, staging)


def _make_fetch(store: Store, directory: str, manifest: Manifest) -> Callable[[str], bytes]:
    """Return a function that reads and verifies a file of a checkpoint."""
    return functools.partial(blocks.fetch_verified, lambda name: store.read(f"{directory}/{name}"), manifest.files)


def read_arrays(store: Store, directory: str, manifest: Manifest, leaves: Leaves) -> dict[str, jax.Array]:
    """Return the arrays that `leaves` describe (shape, dtype, sharding) from one checkpoint. Called on every host.

    Raises:
        ValueError: bytes are missing or wrong.
        OSError: the store could not read them.
    """
    if manifest.shards is not None:
        return blocks.read_blocks(_make_fetch(store, directory, manifest), manifest.shards, leaves)
    with _fetch_for_orbax(store, directory, manifest) as source:
        assert source.root is not None
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in leaves.items()
        }
        # A partial restore, since a caller may want fewer leaves than the checkpoint has.
        arguments = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=True)
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(source.root / directory / manifest.arrays, args=arguments)
        except (KeyError, RuntimeError) as error:
            # Orbax raises these, among them "Event loop is closed", for files that vanish while it reads.
            raise ValueError(f"{directory}: {format_error(error)}") from error
        return {name: restored[name] for name in leaves}


@contextlib.contextmanager
def _fetch_for_orbax(store: Store, directory: str, manifest: Manifest) -> Iterator[Store]:
    """Yield a store to read from: the store itself, or a copy on this host's disk if Orbax could not read there.

    A checkpoint that Orbax has written comes into a bucket by copying it there.
    """
    if store.root is not None or manifest.shards is not None:
        yield store
        return
    with tempfile.TemporaryDirectory() as temporary:

        def download(name: str) -> None:
            path = Path(temporary) / directory / name
            content = store.read(f"{directory}/{name}")
            # A disk that is full says nothing about the checkpoint.
            with translate_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)

        with ThreadPoolExecutor(blocks.NUM_READERS, thread_name_prefix="read") as pool:
            list(pool.map(download, manifest.files))
        yield LocalStore(Path(temporary))


class RestoredLeaf(NamedTuple):
    """One leaf as it was read back. `problem` says what is wrong with its bits; None if they are right."""

    name: str
    array: jax.Array
    problem: str | None


def read_leaves(store: Store, directory: str, manifest: Manifest, names: Iterable[str]) -> Iterator[RestoredLeaf]:
    """Iterate over leaves by name, on the first device of this process, in the types that they were saved in.

    About `GROUP_BYTES` of them are in memory at a time.

    Raises:
        ValueError: bytes are missing or wrong, or a type cannot be read without the job's code.
        OSError: the store could not read them.
    """
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    with _fetch_for_orbax(store, directory, manifest) as source:
        for group in _group_leaves(manifest, names, sharding):
            with jax.enable_x64(True):  # else types of 64 bits would come back as others
                arrays = decode_leaves(read_arrays(source, directory, manifest, encode_leaves(group)), group)
                digests = fingerprint.compute_leaf_digests(arrays)
            for name, array in arrays.items():
                is_good = digests[name] == manifest.leaves[name]["digest"]
                yield RestoredLeaf(
                    name, array, None if is_good else f"the bits of {name} are not those that were saved"
                )


def _group_leaves(manifest: Manifest, names: Iterable[str], sharding: SingleDeviceSharding) -> Iterator[Leaves]:
    """Yield abstract leaves by name in groups of about `GROUP_BYTES`."""
    group: Leaves = {}
    num_bytes = 0
    for name in names:
        shape, dtype = manifest.leaves[name]["shape"], manifest.leaves[name]["dtype"]
        try:
            group[name] = jax.ShapeDtypeStruct(shape, parse_dtype(dtype), sharding=sharding)
        except TypeError as error:
            raise ValueError(f"{name} is of type {dtype}, which cannot be read without its job") from error
        num_bytes += int(np.prod(shape)) * group[name].dtype.itemsize
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group


def verify_read_back(
    store: Store, directory: str, manifest: Manifest, leaves: Leaves, digests: dict[str, np.ndarray]
) -> None:
    """Read a checkpoint back before its commit: its files are there, can be read, and have the right bits.

    This is cheap: one process reads, and only what its first device holds of each leaf, block by block into host
    memory. Process 0 only, any thread.

    Args:
        store: the run's directory.
        directory: the checkpoint.
        manifest: its manifest, not yet written.
        leaves: the leaves as they are stored: shape, dtype, sharding.
        digests: digest of every leaf's shard on the first device of this process.

    Raises:
        ValueError: a leaf does not come back; the message names it.
        OSError: the store could not read it.
    """
    device = jax.local_devices()[0]
    context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})
    for name, leaf in leaves.items():
        index = leaf.sharding.addressable_devices_indices_map(leaf.shape).get(device)
        if index is None:  # the leaf is on other devices
            continue
        block = read_stored_block(store, directory, manifest, name, leaf, index, context)
        start = [part.indices(size)[0] for part, size in zip(index, leaf.shape, strict=True)]
        digest = fingerprint.compute_block_digest(block, leaf.shape, start) if block.dtype == leaf.dtype else None
        if digest is None or not np.array_equal(digest, digests[name]):
            raise ValueError(f"what was read back of {name} is not what was saved")


def read_stored_block(
    store: Store,
    directory: str,
    manifest: Manifest,
    name: str,
    leaf: Any,
    index: blocks.Index,
    context: tensorstore.Context,
) -> np.ndarray:
    """Return one block of the array `name`, which `leaf` describes, in host memory. Any thread.

    Raises:
        ValueError: bytes are missing or wrong.
        OSError: the store could not read them.
    """
    if manifest.shards is not None:
        fetch = _make_fetch(store, directory, manifest)
        return blocks.read_block(fetch, manifest.shards[name], leaf.dtype, index, leaf.shape)
    # A restore by Orbax makes all processes meet, but process 0 is here alone. So the file format of Orbax, zarr in an
    # OCDBT database, is opened directly.
    assert store.root is not None, "orbax wrote it, on a disk"
    base = f"file://{urllib.parse.quote(str(store.root / directory / manifest.arrays))}"
    spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
    array = tensorstore.open(spec, open=True, read=True, context=context).result()
    if array.shape != leaf.shape:
        raise ValueError(f"{name} has the shape {list(array.shape)}, not {list(leaf.shape)}")
    block: np.ndarray = array[index].read().result()
    return block
