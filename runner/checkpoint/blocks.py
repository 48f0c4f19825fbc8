"""Arrays stored as pieces: each process writes its own shards, and any process reads the pieces that it needs.

This is the format for places that Orbax cannot write to: buckets, and disks that belong to one host alone. A shard is
a block of one global array; of replicated shards the device of lowest rank has the one that counts. Its bytes, in C
order, are cut into pieces of at most `PIECE_BYTES`, and each piece is one file. One pass writes a piece and computes
its CRC-32C. The table of pieces goes into the manifest: a reader on any other mesh, or with other processes, finds
there which pieces hold the elements that it wants. All of it is data, none of it code.
"""

import urllib.parse
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint.manifest import Files, ShardRecord
from runner.storage import compute_crc32c

PIECE_BYTES = 64 << 20
NUM_READERS = 8

Index = tuple[slice, ...]
Blocks = dict[str, list[tuple[list[int], np.ndarray]]]  # leaf -> (start, block) of each shard, in this host's memory


class DamagedBlockError(ValueError):
    """A piece whose bytes are not those that were written."""


class BlockTable:
    """Files with size and CRC-32C, and shards by leaf, that one process or several have written."""

    def __init__(self, files: Files | None = None, shards: dict[str, list[ShardRecord]] | None = None):
        self.files = files or {}
        self.shards = shards or {}

    def add(self, other: "BlockTable") -> None:
        """Add what another process has written."""
        self.files |= other.files
        for name, shards in other.shards.items():
            self.shards.setdefault(name, []).extend(shards)


# Write.


def copy_to_host(leaves: dict[str, jax.Array], share: Literal["own", "all"] = "own") -> Blocks:
    """Copy this process's shards of every leaf to host memory. The arrays may be donated when this returns.

    Args:
        leaves: the arrays by name.
        share: `own` for the shards that no device of lower rank has too, so that all processes together have each
            once; `all` for everything that this process needs to restore itself alone.
    """
    shards_of = {}
    for name, leaf in leaves.items():
        if share == "own":
            shards = [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
        else:
            shards = list({str(shard.index): shard for shard in leaf.addressable_shards}.values())
        # All copies are started before the first is waited for, so that they run side by side.
        for shard in shards:
            shard.data.copy_to_host_async()
        shards_of[name] = shards
    return {
        name: [(_get_start(shard.index, leaves[name].shape), np.asarray(shard.data)) for shard in shards]
        for name, shards in shards_of.items()
    }


def write_blocks(directory: Path, prefix: str, blocks: Blocks) -> BlockTable:
    """Write every shard below `directory`/`prefix`, without flushing.

    Returns:
        The table of what was written, with names relative to `directory`.
    """
    table = BlockTable()
    (directory / prefix).mkdir(parents=True, exist_ok=True)
    for leaf, own in blocks.items():
        for start, block in own:
            # The start on each axis makes names of different processes different; quoting keeps names of leaves apart.
            stem = f"{prefix}/{urllib.parse.quote(leaf, safe='.')}.{'_'.join(map(str, start))}"
            data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
            data.flags.writeable = False  # the digest takes read-only memory without a copy
            names: list[str] = []
            for begin in range(0, max(len(data), 1), PIECE_BYTES):
                piece, name = data[begin : begin + PIECE_BYTES], f"{stem}.{len(names)}"
                with (directory / name).open("wb", buffering=0) as file:
                    if file.write(piece.data) != len(piece):
                        raise OSError(f"{name}: the disk is full")
                table.files[name] = [len(piece), compute_crc32c(piece)]
                names.append(name)
            record = ShardRecord(start=start, shape=list(block.shape), pieces=names)
            table.shards.setdefault(leaf, []).append(record)
    return table


# Read.


def read_blocks(
    fetch: Callable[[str], bytes], shards: dict[str, list[ShardRecord]], leaves: dict[str, Any]
) -> dict[str, jax.Array]:
    """Return the arrays that `leaves` describe, from the pieces that this process needs.

    Args:
        fetch: reads and verifies a file by its name, as `fetch_verified` does. Called on several threads.
        shards: the blocks of every array.
        leaves: shape, dtype and sharding of each array by name.

    Raises:
        DamagedBlockError: the pieces do not hold all elements of an array; or what `fetch` raises.
    """
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        try:
            needed = {}
            for name, leaf in leaves.items():
                indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
                blocks = [(_get_start(index, leaf.shape), _get_extent(index, leaf.shape)) for index in indices]
                needed[name] = [
                    record
                    for record in shards.get(name, [])
                    if any(_find_overlap(record, *block) is not None for block in blocks)
                ]
            futures = {
                piece: pool.submit(fetch, piece)
                for records in needed.values()
                for record in records
                for piece in record["pieces"]
            }
            return {name: _assemble(leaf, needed[name], futures) for name, leaf in leaves.items()}
        finally:
            # After an error the pieces that are still queued are not needed.
            pool.shutdown(cancel_futures=True)


def read_block(
    fetch: Callable[[str], bytes], records: list[ShardRecord], dtype: Any, index: Index, shape: tuple[int, ...]
) -> np.ndarray:
    """Return the block at `index` of one array of this shape, in host memory.

    Args:
        fetch: reads and verifies a file by its name.
        records: the shards of the array.
        dtype: element type of the array.
        index: the wanted block.
        shape: global shape of the array.

    Raises:
        DamagedBlockError: as in `read_blocks`.
    """
    start, extent = _get_start(index, shape), _get_extent(index, shape)
    blocks = []
    for record in records:
        if _find_overlap(record, start, extent) is not None:
            content = b"".join(map(fetch, record["pieces"]))
            blocks.append((record, _decode_block(record, dtype, content)))
    return _fill(blocks, dtype, start, extent)


def fetch_verified(fetch: Callable[[str], bytes], files: Files, name: str) -> bytes:
    """Return the content of a file, with the size and the CRC-32C that `files` give.

    Raises:
        DamagedBlockError: it is missing, or its bytes are wrong; the message names it.
    """
    try:
        content = fetch(name)
    except FileNotFoundError as error:
        raise DamagedBlockError(f"{name} is missing") from error
    size, digest = files[name]
    if len(content) != size:
        raise DamagedBlockError(f"{name} has {len(content)} bytes, the manifest says {size}")
    if compute_crc32c(content) != digest:
        raise DamagedBlockError(f"{name} does not match its CRC-32C")
    return content


def _get_start(index: Index, shape: tuple[int, ...]) -> list[int]:
    return [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]


def _get_extent(index: Index, shape: tuple[int, ...]) -> list[int]:
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return [stop - start for start, stop, _ in bounds]


def _find_overlap(record: ShardRecord, start: list[int], extent: list[int]) -> list[tuple[slice, slice]] | None:
    """Return the slices (of the shard, of the block) on each axis where both overlap; None if they do not."""
    overlap = []
    for own, size, other, length in zip(record["start"], record["shape"], start, extent, strict=True):
        begin, end = max(own, other), min(own + size, other + length)
        if begin >= end:
            return None
        overlap.append((slice(begin - own, end - own), slice(begin - other, end - other)))
    return overlap


def _assemble(leaf: Any, records: list[ShardRecord], futures: dict[str, Future[bytes]]) -> jax.Array:
    blocks = []
    for record in records:
        # Taking the futures out frees each piece once it is used: a state may be as large as this host's memory.
        pieces = [futures.pop(name).result() for name in record["pieces"]]
        content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        blocks.append((record, _decode_block(record, leaf.dtype, content)))

    def get_block(index: Index | None) -> np.ndarray:
        assert index is not None, "every device has an index"
        return _fill(blocks, leaf.dtype, _get_start(index, leaf.shape), _get_extent(index, leaf.shape))

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, get_block)


def _decode_block(record: ShardRecord, dtype: Any, content: bytes) -> np.ndarray:
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(record["shape"])


def _fill(blocks: list[tuple[ShardRecord, np.ndarray]], dtype: Any, start: list[int], extent: list[int]) -> np.ndarray:
    """Return the block of this start and extent, from the shards that overlap it."""
    # In the usual case the mesh is the one that saved, and a shard is the wanted block: nothing is copied.
    for record, block in blocks:
        if record["start"] == start and record["shape"] == extent:
            return block
    whole = np.empty(extent, dtype)
    num_filled = 0
    for record, block in blocks:
        overlap = _find_overlap(record, start, extent)
        if overlap is not None:
            whole[tuple(there for _, there in overlap)] = block[tuple(here for here, _ in overlap)]
            num_filled += int(np.prod([here.stop - here.start for here, _ in overlap]))
    # Shards do not overlap each other, so counting elements is enough to find a gap.
    if num_filled != whole.size:
        raise DamagedBlockError(f"the manifest's shards hold {num_filled} of {whole.size} elements of a block")
    return whole
