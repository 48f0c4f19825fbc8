"""Arrays as pieces: each process writes the shards that are its own, and any process reads the pieces that it needs.

For places that orbax cannot write: buckets, and disks that one host has for itself. A shard is a block of one global
array that no other device of lower rank holds too; its bytes, in C order, are cut into pieces of at most PIECE_BYTES.
One pass writes a piece and takes its CRC-32C. The table of pieces goes into the manifest: a reader on any other mesh,
or with other processes, finds there which pieces hold the elements that it wants. All of it is data, none of it code.
"""

import urllib.parse
from collections.abc import Callable, Iterator
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
    """The bytes of a piece are not those that were written."""


def copy_to_host(leaves: dict[str, jax.Array], share: Literal["own", "all"] = "own") -> Blocks:
    """Shards of every leaf that this process holds. The arrays may be donated as soon as this returns.

    Of `own`, those that no device of lower rank holds too, all processes together have each once; of `all`, every
    process has what it needs to restore itself alone.
    """
    own = {name: _shards(leaf, share) for name, leaf in leaves.items()}
    for shards in own.values():
        for shard in shards:
            shard.data.copy_to_host_async()
    return {
        name: [(_start(shard.index, leaves[name].shape), np.asarray(shard.data)) for shard in shards]
        for name, shards in own.items()
    }


def _shards(leaf: jax.Array, share: Literal["own", "all"]) -> list[Any]:
    if share == "own":
        return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]
    return list({str(shard.index): shard for shard in leaf.addressable_shards}.values())


def _start(index: Index, shape: tuple[int, ...]) -> list[int]:
    return [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]


class BlockTable:
    """What one process has written: its files with size and CRC-32C, and its shards by leaf."""

    def __init__(self, files: Files | None = None, shards: dict[str, list[ShardRecord]] | None = None):
        self.files = files or {}
        self.shards = shards or {}

    def add(self, other: "BlockTable") -> None:
        """Take in what another process has written."""
        self.files |= other.files
        for name, shards in other.shards.items():
            self.shards.setdefault(name, []).extend(shards)


def write_blocks(directory: Path, prefix: str, blocks: Blocks) -> BlockTable:
    """Write every shard below `directory`/`prefix`; names in the table are relative to `directory`. Not flushed."""
    table = BlockTable()
    (directory / prefix).mkdir(parents=True, exist_ok=True)
    for leaf, own in blocks.items():
        for start, block in own:
            stem = f"{prefix}/{urllib.parse.quote(leaf, safe='.')}.{'_'.join(map(str, start))}"
            pieces = []
            for number, piece in enumerate(_pieces(block)):
                name = f"{stem}.{number}"
                with (directory / name).open("wb", buffering=0) as file:
                    if file.write(piece.data) != len(piece):
                        raise OSError(f"{name}: the disk is full")
                table.files[name] = [len(piece), compute_crc32c(piece)]
                pieces.append(name)
            record = ShardRecord(start=start, shape=list(block.shape), pieces=pieces)
            table.shards.setdefault(leaf, []).append(record)
    return table


def _pieces(block: np.ndarray) -> Iterator[np.ndarray]:
    data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    data.flags.writeable = False
    for begin in range(0, max(len(data), 1), PIECE_BYTES):
        yield data[begin : begin + PIECE_BYTES]


def read_blocks(
    fetch: Callable[[str], bytes], files: Files, shards: dict[str, list[ShardRecord]], leaves: dict[str, Any]
) -> dict[str, jax.Array]:
    """The arrays that `leaves` describe (shape, dtype and sharding), from the pieces that this process needs.

    `fetch` reads a file by its name. Raises `DamagedBlockError` naming the piece whose bytes are wrong.
    """

    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        try:
            needed = {name: _needed(leaf, shards.get(name, [])) for name, leaf in leaves.items()}
            futures = {
                piece: pool.submit(_fetch_checked, fetch, files, piece)
                for records in needed.values()
                for record in records
                for piece in record["pieces"]
            }
            return {name: _assemble(leaf, needed[name], futures) for name, leaf in leaves.items()}
        finally:
            pool.shutdown(cancel_futures=True)


def read_block(
    fetch: Callable[[str], bytes],
    files: Files,
    records: list[ShardRecord],
    dtype: Any,
    index: Index,
    shape: tuple[int, ...],
) -> np.ndarray:
    """One block of one array of this `shape`, from the `records` of its shards, in this host's memory.

    Raises `DamagedBlockError` like `read_blocks`.
    """
    start, extent = _start(index, shape), _extent(index, shape)
    blocks = []
    for record in records:
        if _overlap(record, start, extent) is not None:
            content = b"".join(_fetch_checked(fetch, files, name) for name in record["pieces"])
            blocks.append((record, _block(record, dtype, content)))
    return _fill(blocks, dtype, start, extent)


def _fetch_checked(fetch: Callable[[str], bytes], files: Files, name: str) -> bytes:
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


def _needed(leaf: Any, records: list[ShardRecord]) -> list[ShardRecord]:
    indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
    wanted = [(_start(index, leaf.shape), _extent(index, leaf.shape)) for index in indices]
    return [record for record in records if any(_overlap(record, *block) is not None for block in wanted)]


def _extent(index: Index, shape: tuple[int, ...]) -> list[int]:
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return [stop - start for start, stop, _ in bounds]


def _overlap(record: ShardRecord, start: list[int], extent: list[int]) -> list[tuple[slice, slice]] | None:
    """Where a shard and a block meet: (in the shard, in the block) on each axis; None if they do not."""
    meeting = []
    for own, size, other, length in zip(record["start"], record["shape"], start, extent, strict=True):
        begin, end = max(own, other), min(own + size, other + length)
        if begin >= end:
            return None
        meeting.append((slice(begin - own, end - own), slice(begin - other, end - other)))
    return meeting


def _assemble(leaf: Any, records: list[ShardRecord], futures: dict[str, Future[bytes]]) -> jax.Array:
    blocks = [(record, _block(record, leaf.dtype, _content(record, futures))) for record in records]

    def block_at(index: Index | None) -> np.ndarray:
        assert index is not None, "every device has an index"
        return _fill(blocks, leaf.dtype, _start(index, leaf.shape), _extent(index, leaf.shape))

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, block_at)


def _content(record: ShardRecord, futures: dict[str, Future[bytes]]) -> bytes:
    """The bytes of a shard, which `futures` then holds no more: a state may be as large as this host's memory."""
    pieces = [futures.pop(name).result() for name in record["pieces"]]
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _block(record: ShardRecord, dtype: Any, content: bytes) -> np.ndarray:
    return np.frombuffer(content, jnp.dtype(dtype)).reshape(record["shape"])


def _fill(blocks: list[tuple[ShardRecord, np.ndarray]], dtype: Any, start: list[int], extent: list[int]) -> np.ndarray:
    """The block of this extent that begins at `start`, from the shards that meet it."""
    for record, block in blocks:
        if record["start"] == start and record["shape"] == extent:
            return block
    whole = np.empty(extent, dtype)
    num_filled = 0
    for record, block in blocks:
        meeting = _overlap(record, start, extent)
        if meeting is not None:
            whole[tuple(there for _, there in meeting)] = block[tuple(here for here, _ in meeting)]
            num_filled += int(np.prod([here.stop - here.start for here, _ in meeting]))
    if num_filled != whole.size:
        raise DamagedBlockError(f"the manifest's shards hold {num_filled} of {whole.size} elements of a block")
    return whole
