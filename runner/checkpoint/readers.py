"""How the arrays of a checkpoint come back from its directory, whatever wrote them.

The leaves of a checkpoint for whoever only looks: on one device, each checked by its fingerprint. Claims nothing.
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
from runner.checkpoint.manifest import Files, Manifest
from runner.storage import LocalStore, Store

_CACHE_BYTES = 64 << 20  # without it, the table of contents is read anew for every block


def read_arrays(store: Store, directory: str, manifest: Manifest, leaves: Leaves) -> dict[str, jax.Array]:
    """The arrays that `leaves` describe (shape, dtype, sharding) from one checkpoint. Called on every host.

    Raises `ValueError` or `OSError` if the bytes are not there or not good.
    """
    if manifest.shards is not None:
        return blocks.read_blocks(
            lambda name: store.read(f"{directory}/{name}"), manifest.files, manifest.shards, leaves
        )
    with on_a_disk_where_orbax_wrote(store, directory, manifest) as source:
        assert source.root is not None
        return _read_orbax(source.root / directory / manifest.arrays, leaves)


@contextlib.contextmanager
def on_a_disk_where_orbax_wrote(store: Store, directory: str, manifest: Manifest) -> Iterator[Store]:
    """Where to read from: the store itself, or a copy on this host's disk, since orbax reads nowhere else."""
    if store.root is not None or manifest.shards is not None:
        yield store
        return
    with tempfile.TemporaryDirectory() as temporary:
        download(store, directory, manifest.files, Path(temporary) / directory)
        yield LocalStore(Path(temporary))


class BlockReader:
    """Blocks of the arrays of one checkpoint, into this host's memory. From any thread of one host."""

    def __init__(self, store: Store, directory: str, manifest: Manifest):
        self._store, self._directory, self._manifest = store, directory, manifest
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def read(self, name: str, leaf: Any, index: blocks.Index) -> np.ndarray:
        """One block of the array `name`, which `leaf` describes. Raises `ValueError` or `OSError` if it is not good."""
        if self._manifest.shards is not None:
            records = self._manifest.shards[name]
            return blocks.read_block(self._fetch, self._manifest.files, records, leaf.dtype, index, leaf.shape)
        root = self._store.root
        assert root is not None, "orbax wrote it, on a disk"
        base = f"file://{urllib.parse.quote(str(root / self._directory / self._manifest.arrays))}"
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"}}
        array = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        if array.shape != leaf.shape:
            raise ValueError(f"{name} has the shape {list(array.shape)}, not {list(leaf.shape)}")
        block: np.ndarray = array[index].read().result()
        return block

    def _fetch(self, name: str) -> bytes:
        return self._store.read(f"{self._directory}/{name}")


def download(store: Store, directory: str, files: Files, target: Path) -> None:
    """Copy the files of a checkpoint to the same names below `target`, in parallel."""

    def fetch(name: str) -> None:
        path = target / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(store.read(f"{directory}/{name}"))

    with ThreadPoolExecutor(blocks.NUM_READERS, thread_name_prefix="read") as pool:
        list(pool.map(fetch, files))


def _read_orbax(path: Path, leaves: Leaves) -> dict[str, jax.Array]:
    restore_args = {
        name: ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)
        for name, leaf in leaves.items()
    }
    arguments = ocp.args.PyTreeRestore(leaves, restore_args=restore_args, partial_restore=True)
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    with checkpointer:
        restored = checkpointer.restore(path, args=arguments)
    return {name: restored[name] for name in leaves}


GROUP_BYTES = 1 << 30  # that are read at a time


class RestoredLeaf(NamedTuple):
    """One leaf as it was read back, and what is wrong with its bits, if anything is."""

    name: str
    array: jax.Array
    problem: str | None


def read_leaves(store: Store, directory: str, manifest: Manifest, names: Iterable[str]) -> Iterator[RestoredLeaf]:
    """The leaves of these names, on the first device of this process, some at a time, with the types they have there.

    Raises `ValueError` or `OSError` if the bytes are not there, or not those that the manifest names.
    """
    place = SingleDeviceSharding(jax.local_devices()[0])
    with on_a_disk_where_orbax_wrote(store, directory, manifest) as source:
        for group in _groups(manifest, names, place):
            with jax.enable_x64(True):  # else types of 64 bits would come back as others
                arrays = decode_leaves(read_arrays(source, directory, manifest, encode_leaves(group)), group)
                digests = fingerprint.compute_leaf_digests(arrays)
            for name, array in arrays.items():
                is_good = digests[name] == manifest.leaves[name]["digest"]
                yield RestoredLeaf(
                    name, array, None if is_good else f"the bits of {name} are not those that were saved"
                )


def _groups(manifest: Manifest, names: Iterable[str], place: SingleDeviceSharding) -> Iterator[Leaves]:
    """Abstract leaves by name, so many at a time that they are about `GROUP_BYTES`."""
    group: Leaves = {}
    num_bytes = 0
    for name in names:
        shape, dtype = manifest.leaves[name]["shape"], manifest.leaves[name]["dtype"]
        try:
            group[name] = jax.ShapeDtypeStruct(shape, parse_dtype(dtype), sharding=place)
        except TypeError as error:
            raise ValueError(f"{name} is of type {dtype}, which cannot be read without its job") from error
        num_bytes += int(np.prod(shape)) * group[name].dtype.itemsize
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group
