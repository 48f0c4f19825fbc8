"""The leaves of a checkpoint for whoever only looks: on one device, each checked by its fingerprint. Claims nothing."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from runner.checkpoint import fingerprint, reader
from runner.checkpoint.leaves import Leaves, dtype_called, from_stored, stored
from runner.checkpoint.manifest import Manifest
from runner.storage import Store

GROUP_BYTES = 1 << 30  # that are read at a time


class Leaf(NamedTuple):
    """One leaf as it was read back, and what is wrong with its bits, if anything is."""

    name: str
    array: jax.Array
    problem: str | None


def read_leaves(store: Store, directory: str, manifest: Manifest, names: Iterable[str]) -> Iterator[Leaf]:
    """The leaves of these names, on the first device of this process, some at a time, with the types they have there.

    Raises `ValueError` or `OSError` if the bytes are not there, or not those that the manifest names.
    """
    place = SingleDeviceSharding(jax.local_devices()[0])
    with reader.on_a_disk_where_orbax_wrote(store, directory, manifest) as source:
        for group in _groups(manifest, names, place):
            with jax.enable_x64(True):  # else types of 64 bits would come back as others
                arrays = from_stored(reader.read(source, directory, manifest, stored(group)), group)
                digests = fingerprint.leaf_digests(arrays)
            for name, array in arrays.items():
                is_good = digests[name] == manifest.leaves[name]["digest"]
                yield Leaf(name, array, None if is_good else f"the bits of {name} are not those that were saved")


def _groups(manifest: Manifest, names: Iterable[str], place: SingleDeviceSharding) -> Iterator[Leaves]:
    """Abstract leaves by name, so many at a time that they are about `GROUP_BYTES`."""
    group: Leaves = {}
    num_bytes = 0
    for name in names:
        shape, dtype = manifest.leaves[name]["shape"], manifest.leaves[name]["dtype"]
        try:
            group[name] = jax.ShapeDtypeStruct(shape, dtype_called(dtype), sharding=place)
        except TypeError as error:
            raise ValueError(f"{name} is of type {dtype}, which cannot be read without its job") from error
        num_bytes += int(np.prod(shape)) * group[name].dtype.itemsize
        if num_bytes >= GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group
