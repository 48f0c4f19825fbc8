"""Fingerprint: a digest of a pytree's bits that does not depend on the topology, computed on the devices.

Each leaf is read as 32-bit words. Every word is mixed with its position in the *global* array by a bijection, and the
mixed words are added as integers. Integer sums are exact in any order, so the digest is the same on 1, 2 or 8 devices,
in one process or several, in any sharding. Because the mixing is a bijection of the word, changing any single word
always changes the digest; two lanes make 64 bits a leaf. Nothing here knows a file or a host.

Every device digests its own copy of its own shard, in one pass. Devices that hold the same shard must come to the same
digest: if they do not, one of them has silently corrupted its copy, and it is named. The digest of a leaf is the sum of
one digest for each shard.

A program over many leaves takes longer to compile, for each leaf, than one over few. All work on the leaves of a state
is therefore done in chunks of at most `CHUNK_LEAVES`, and chunks of equal leaves are compiled once.
"""

import functools
import hashlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from runner.accelerator import HOST_MEMORY
from runner.checkpoint.manifest import LeafRecord, LeafShape
from runner.errors import RetryableError

CHUNK_LEAVES = 64
_LANES = ((0x85EBCA6B, 15), (0x27D4EB2F, 13))  # of the digest: multiplier and shift
_PART_BYTES = 16 << 20  # of a block that a host digests at a time


class ReplicaError(RetryableError):
    """Devices that should hold the same bits hold different ones; `devices` are those that differ from most."""

    def __init__(self, message: str, devices: Sequence[jax.Device] = ()):
        super().__init__(message)
        self.devices = devices


# Names and shapes of leaves.


def list_leaf_names(tree: Any) -> list[str]:
    """Return the dotted path of every leaf, such as `params.block.kernel`, in `jax.tree.leaves` order."""
    paths, _ = jax.tree_util.tree_flatten_with_path(tree)
    return [format_leaf_name(path) for path, _ in paths]


def format_leaf_name(path: Any) -> str:
    """Return the dotted name of a leaf from its path in a tree."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def describe_leaves(tree: Any) -> dict[str, LeafShape]:
    """Return shape and dtype of every leaf by name, from arrays or abstract arrays."""
    return dict(zip(list_leaf_names(tree), map(_get_shape, jax.tree.leaves(tree)), strict=True))


def _get_shape(leaf: Any) -> LeafShape:
    return LeafShape(shape=list(leaf.shape), dtype=str(leaf.dtype))


def make_chunks(leaves: Sequence[Any]) -> list[list[int]]:
    """Return the indices of all leaves in chunks of at most `CHUNK_LEAVES`.

    Leaves of one shape, dtype and sharding fill chunks of their own; the remainders of all kinds share the last ones.
    A leaf in host memory is a chunk of its own, so that the device has to hold no more than one of them.
    """

    def cut(indices: list[int]) -> list[list[int]]:
        return [indices[begin : begin + CHUNK_LEAVES] for begin in range(0, len(indices), CHUNK_LEAVES)]

    kinds: dict[Any, list[int]] = defaultdict(list)
    for index, leaf in enumerate(leaves):
        kinds[leaf.shape, leaf.dtype, leaf.sharding].append(index)
    chunks, rest = [], []
    for (*_, sharding), indices in kinds.items():
        if sharding.memory_kind == HOST_MEMORY:
            chunks += [[index] for index in indices]
            continue
        num_whole = len(indices) - len(indices) % CHUNK_LEAVES
        chunks += cut(indices[:num_whole])
        rest += indices[num_whole:]
    return chunks + cut(rest)


# The digest of one array.


@functools.partial(jax.jit, static_argnames="whole")
def compute_leaf_digest(block: jax.Array, whole: tuple[int, ...] | None = None, start: Any = ()) -> jax.Array:
    """Return the digest of one array, or the part that a block contributes to it: uint32[2].

    Jitted, so that leaves of one shape, as parameters and their moments are, are traced once. `whole` is the shape of
    the array in which the block begins at `start`; None if the block is the array itself.
    """
    if block.size == 0:
        return jnp.zeros(2, jnp.uint32)  # XLA of jax 0.11.2 crashes on a sum over no elements with a shard's offset
    words = _to_words(block)
    finer = words.shape[block.ndim :]  # a wide type is several words an element
    starts = [*start, *[0] * (words.ndim - len(start))]
    position = _compute_position(words.shape, (*(block.shape if whole is None else whole), *finer), starts)
    placed = words ^ (position * jnp.uint32(0x9E3779B1))
    # A product carries bits upwards only: without this fold a changed sign bit could take few values, and two cancel.
    first = _mix(placed ^ (placed >> 16), *_LANES[0])
    lanes = (first, _mix(first, *_LANES[1]))
    zeros = (jnp.uint32(0), jnp.uint32(0))
    # Both lanes are one reduction: XLA then reads the array once and vectorises, ten times faster on a CPU than two
    # sums.
    sums = lax.reduce(lanes, zeros, lambda left, right: tuple(map(jnp.add, left, right)), tuple(range(words.ndim)))
    return jnp.stack(sums)


def _to_words(leaf: jax.Array) -> jax.Array:
    """Return the bits of `leaf` as uint32, with one more trailing axis for types wider than 32 bits."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.uint32)
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        leaf = jnp.stack([leaf.real, leaf.imag], axis=-1)
    bits = leaf.dtype.itemsize * 8
    if bits >= 32:
        return lax.bitcast_convert_type(leaf, jnp.uint32)
    return lax.bitcast_convert_type(leaf, {8: jnp.uint8, 16: jnp.uint16}[bits]).astype(jnp.uint32)


def _compute_position(block: tuple[int, ...], whole: tuple[int, ...], start: list[jax.Array | int]) -> jax.Array:
    """Return the row-major index in the whole array of every word of a block that begins at `start`, modulo 2**32."""
    position = jnp.zeros(block, jnp.uint32)
    for axis, first in enumerate(start):
        stride = math.prod(whole[axis + 1 :]) % 2**32
        index = lax.broadcasted_iota(jnp.uint32, block, axis) + jnp.uint32(first)
        position = position + index * jnp.uint32(stride)
    return position


def _mix(words: jax.Array, odd_multiplier: int, shift: int) -> jax.Array:
    """Apply a bijection of 32-bit words: multiply by an odd number, then fold the high bits into the low ones."""
    mixed = words * jnp.uint32(odd_multiplier)
    return mixed ^ (mixed >> shift)


def compute_block_digest(block: np.ndarray, whole: tuple[int, ...], start: Sequence[int]) -> np.ndarray:
    """Return the digest of `compute_leaf_digest` for a block in host memory: uint32[2].

    The block is digested in parts, so that the temporary arrays are small beside it.
    """
    if block.nbytes > _PART_BYTES:
        axis = int(np.argmax(block.shape))
        halves = np.array_split(block, 2, axis)
        second = [first + (halves[0].shape[axis] if axis == number else 0) for number, first in enumerate(start)]
        return compute_block_digest(halves[0], whole, start) + compute_block_digest(halves[1], whole, second)
    itemsize = block.dtype.itemsize
    words = np.ascontiguousarray(block).reshape(-1)
    words = words.view(np.uint32) if itemsize >= 4 else words.view(f"u{itemsize}").astype(np.uint32)
    num_words = max(itemsize // 4, 1)
    position = np.zeros((1,), np.uint32)
    for axis, (size, first) in enumerate(zip((*block.shape, num_words), (*start, 0), strict=True)):
        stride = math.prod((*whole, num_words)[axis + 1 :]) % 2**32
        index = (np.arange(size, dtype=np.uint32) + np.uint32(first)) * np.uint32(stride)
        position = (position[:, None] + index).reshape(-1)
    placed = words ^ (position * np.uint32(0x9E3779B1))
    placed ^= placed >> 16
    lanes = []
    for odd_multiplier, shift in _LANES:
        placed = placed * np.uint32(odd_multiplier)
        placed ^= placed >> shift
        lanes.append(placed.sum(dtype=np.uint32))
    return np.array(lanes)


# The digests of a whole tree.


@jax.jit
def _digest_unsharded(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([compute_leaf_digest(leaf) for leaf in leaves])[None]


@functools.partial(jax.jit, static_argnames=("mesh", "specs"))
def _digest_shards(leaves: list[jax.Array], mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.Array:
    """Return the digest of every leaf's shard on every device: uint32[devices in mesh order, leaves, 2], replicated."""
    shapes = [leaf.shape for leaf in leaves]
    # An offloaded leaf is digested on the devices too.
    leaves = [
        jax.device_put(leaf, jax.memory.Space.Device)
        if jax.typeof(leaf).memory_space == jax.memory.Space.Host
        else leaf
        for leaf in leaves
    ]

    def get_start(block: jax.Array, spec: PartitionSpec) -> list[jax.Array | int]:
        starts: list[jax.Array | int] = []
        for axis, size in enumerate(block.shape):
            names = spec[axis] if axis < len(spec) else None
            starts.append(0 if names is None else lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(size))
        return starts

    def digest_on_one_device(*blocks: jax.Array) -> jax.Array:
        rows = [
            compute_leaf_digest(block, shape, get_start(block, spec))
            for block, shape, spec in zip(blocks, shapes, specs, strict=True)
        ]
        return jnp.stack(rows)[None]

    # `shard_map` gives one digest for each device. A sum over the sharded array would give one for each shard, and a
    # corrupt replica would go unnoticed.
    every_device = PartitionSpec(tuple(mesh.axis_names))
    local = jax.shard_map(digest_on_one_device, mesh=mesh, in_specs=specs, out_specs=every_device, check_vma=False)
    return lax.with_sharding_constraint(local(*leaves), NamedSharding(mesh, PartitionSpec()))


@functools.lru_cache(maxsize=4096)
def _list_replicas(sharding: NamedSharding, shape: tuple[int, ...]) -> np.ndarray:
    """Return the device numbers, in mesh order, that hold each shard: int[shards, replicas]."""
    indices = sharding.devices_indices_map(shape)
    rows: dict[str, list[int]] = {}
    for row, device in enumerate(sharding.mesh.devices.flat):
        rows.setdefault(str(indices[device]), []).append(row)
    return np.array(list(rows.values()))


class LeafLayout:
    """Names, shapes and shardings of a tree's leaves, which outlive its arrays.

    Attributes:
        names: dotted names in `jax.tree.leaves` order.
        shapes: shape and dtype by name.
    """

    def __init__(self, tree: Any):
        leaves = jax.tree.leaves(tree)
        self.names = list_leaf_names(tree)
        self.shapes = dict(zip(self.names, map(_get_shape, leaves), strict=True))
        # All leaves are digested by one `shard_map` only if they are all sharded over one mesh.
        meshes = {leaf.sharding.mesh if isinstance(leaf.sharding, NamedSharding) else None for leaf in leaves}
        mesh = meshes.pop()
        self._mesh = mesh if isinstance(mesh, Mesh) and not meshes else None
        self._shardings = [(leaf.sharding, leaf.shape) for leaf in leaves]
        self._chunks = make_chunks(leaves)

    def dispatch(self, tree: Any) -> list[jax.Array]:
        """Start digesting every leaf of `tree` on every device, without waiting. Called on every host.

        The arrays may be donated to a later computation when this returns. Returns the argument of `leaf_digests`: for
        each chunk uint32[devices, leaves, 2], replicated.
        """
        leaves = jax.tree.leaves(tree)
        digests = []
        for indices in self._chunks:
            chunk = [leaves[index] for index in indices]
            if self._mesh is None:
                digests.append(_digest_unsharded(chunk))
            else:
                digests.append(_digest_shards(chunk, self._mesh, tuple(leaf.sharding.spec for leaf in chunk)))
        return digests

    def leaf_digests(self, digests: list[jax.Array]) -> dict[str, str]:
        """Return the hexadecimal digest of every leaf by name. Waits for the device. Any thread.

        Raises `ReplicaError`, which names leaf and devices, if the copies of a shard differ.
        """
        values = self._in_leaf_order(digests)
        found = {}
        for number, (name, (sharding, shape)) in enumerate(zip(self.names, self._shardings, strict=True)):
            replicas = np.zeros((1, 1), int) if self._mesh is None else _list_replicas(sharding, shape)
            lanes = values[:, number][replicas]
            if (lanes != lanes[:, :1]).any():
                devices = self._find_minority(replicas, lanes)
                named = ", ".join(f"device {device.id} (process {device.process_index})" for device in devices)
                verb = "has" if len(devices) == 1 else "have"
                raise ReplicaError(f"{name}: {named} {verb} other bits than the replicas of the same shard", devices)
            high, low = lanes[:, 0].astype(np.uint64).sum(axis=0) % 2**32
            found[name] = f"{high:08x}{low:08x}"
        return found

    def digests_on(self, device: jax.Device, digests: list[jax.Array]) -> dict[str, np.ndarray]:
        """Return the digest of every leaf's shard on one device, uint32[2] by name. Waits for the device."""
        row = 0 if self._mesh is None else list(self._mesh.devices.flat).index(device)
        return dict(zip(self.names, self._in_leaf_order(digests)[row], strict=True))

    def _in_leaf_order(self, digests: list[jax.Array]) -> np.ndarray:
        """Return the digests of all chunks in the order of `names`: uint32[devices, leaves, 2]."""
        rows = np.concatenate(jax.device_get(digests), axis=1)
        indices = np.concatenate(self._chunks)
        values = np.empty_like(rows)
        values[:, indices] = rows
        return values

    def _find_minority(self, replicas: np.ndarray, lanes: np.ndarray) -> list[jax.Device]:
        """Return the devices whose copy differs from that of most; all of them if there is no majority."""
        assert self._mesh is not None
        shard = int(np.argmax((lanes != lanes[:, :1]).any(axis=(1, 2))))
        votes: dict[bytes, list[int]] = {}
        for row, value in zip(replicas[shard], lanes[shard], strict=True):
            votes.setdefault(value.tobytes(), []).append(int(row))
        most = max(votes.values(), key=len)
        has_majority = 2 * len(most) > len(replicas[shard])
        rows = [row for row in replicas[shard] if not (has_majority and row in most)]
        devices = list(self._mesh.devices.flat)
        return [devices[row] for row in rows]


def compute_leaf_digests(tree: Any) -> dict[str, str]:
    """Return the hexadecimal digest of every leaf by name. Waits for the device. Called on every host.

    Raises `ReplicaError` if the copies of a shard differ.
    """
    layout = LeafLayout(tree)
    return layout.leaf_digests(layout.dispatch(tree))


def find_bits_problem(tree: Any, leaves: Mapping[str, LeafRecord]) -> str | None:
    """Return the first leaf with other bits than a manifest records, as a sentence; None if all are right.

    Waits for the device. Called on every host. Raises `ReplicaError` if the copies of a shard differ.
    """
    for name, digest in compute_leaf_digests(tree).items():
        if digest != leaves[name]["digest"]:
            return f"the bits of {name} are not those that were saved"
    return None


def compute_fingerprint(tree: Any) -> str:
    """Return the digest of a whole pytree's bits as 32 hexadecimal digits. Called on every host."""
    layout = LeafLayout(tree)
    return combine_digests(add_digests(layout.shapes, layout.leaf_digests(layout.dispatch(tree))))


def add_digests(shapes: Mapping[str, LeafShape], digests: Mapping[str, str]) -> dict[str, LeafRecord]:
    """Return the records of leaves for a manifest: shape, dtype and digest by name."""
    return {name: LeafRecord(**shape, digest=digests[name]) for name, shape in shapes.items()}


def combine_digests(leaves: Mapping[str, LeafRecord]) -> str:
    """Return the digest of a whole state from the records of its leaves: 32 hexadecimal digits."""
    whole = hashlib.blake2b(digest_size=16)
    for name in sorted(leaves):
        record = leaves[name]
        shape = ",".join(str(size) for size in record["shape"])
        whole.update(f"{name} {record['dtype']} {shape} {record['digest']}\n".encode())
    return whole.hexdigest()
