"""Reading the arrays of a checkpoint: whole states, single leaves, and the read-back of a first save.

A manifest with `shards` describes pieces (`blocks`); any other checkpoint was written by Orbax. Nothing here claims an
attempt or changes a file.
"""

import contextlib
import tempfile
import urllib.parse
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from jax.sharding import SingleDeviceSharding

from runner.checkpoint import blocks, fingerprint
from runner.checkpoint.leaves import Leaves, decode_leaves, encode_leaves, parse_dtype
from runner.checkpoint.manifest import Manifest
from runner.storage import LocalStore, Store

GROUP_BYTES = 1 << 30  # of the leaves that are read at a time
_CACHE_BYTES = 64 << 20  # without a cache, the table of contents is read anew for every block


def read_arrays(store: Store, directory: str, manifest: Manifest, leaves: Leaves) -> dict[str, jax.Array]:
    """Return the arrays that `leaves` describe (shape, dtype, sharding) from one checkpoint. Called on every host.

    Raises:
        ValueError: bytes are missing or wrong.
        OSError: the store could not read them.
    """
    if manifest.shards is not None:
        return blocks.read_blocks(
            lambda name: store.read(f"{directory}/{name}"), manifest.files, manifest.shards, leaves
        )
    with _fetch_for_orbax(store, directory, manifest) as source:
        assert source.root is not None
        restore_args = {
            name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
            for name, leaf in leaves.items()
        }
        # A partial restore, since a caller may want fewer leaves than the checkpoint has.
        arguments = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            restored = checkpointer.restore(source.root / directory / manifest.arrays, args=arguments)
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
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(store.read(f"{directory}/{name}"))

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
        records = manifest.shards[name]
        return blocks.read_block(
            lambda file: store.read(f"{directory}/{file}"), manifest.files, records, leaf.dtype, index, leaf.shape
        )
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
