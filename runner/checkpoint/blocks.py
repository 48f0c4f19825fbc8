"""Arrays stored as byte ranges: each process writes its own shards, and any process reads the ranges that it needs.

A shard is a block of one global array; of replicated shards the device of lowest rank has the one that counts. Its
bytes, in C order, are cut into *pieces* of at most `PIECE_BYTES`, each with its CRC-32C. The table of shards names for
each piece the file and the range in it: a reader on any other mesh, or with other processes, finds there which ranges
hold the elements that it wants. All of it is data, none of it code.

A checkpoint has few files: each process writes its pieces one after another into *packs* of at most `PACK_BYTES`, and
its part of the table beside them (`write_packs`). A checkpoint in a bucket before format 2 has one file for each piece.
"""

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import numpy as np

from runner.checkpoint.manifest import Files, ShardRecord
from runner.storage import ChangedError, JsonObject, compute_crc32c
from runner.storage.store import retry_stale

PIECE_BYTES = 64 << 20
PACK_BYTES = 3 << 29  # one object of a bucket; several are uploaded side by side
NUM_READERS = 8
_BUFFER_BYTES = 1 << 20
_MAX_OVERLAPS = 1 << 16  # blocks of which a reader looks for the owners; for more it reads all tables
_DIGEST_BYTES = 4 << 20  # digested at a time, because the training thread waits for the interpreter meanwhile

Index = tuple[slice, ...]
Blocks = dict[str, list[tuple[list[int], np.ndarray]]]  # leaf -> (start, block) of each shard, in this host's memory


class DamagedBlockError(ValueError):
    """A piece whose bytes are not those that were written."""


class Piece(NamedTuple):
    """Range of a file, with the CRC-32C of its bytes."""

    file: str
    begin: int
    size: int
    crc32c: str

    @property
    def end(self) -> int:
        """Offset of the first byte after the piece."""
        return self.begin + self.size


class Shard(NamedTuple):
    """Block of an array: its start and size on each axis, and the pieces that hold it, in order."""

    start: list[int]
    shape: list[int]
    pieces: list[Piece]

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return int(np.prod(self.shape))


Shards = dict[str, list[Shard]]  # by name of the leaf


@dataclass
class BlockTable:
    """Files with size and CRC-32C, and shards by leaf, that one process has written."""

    files: Files = field(default_factory=dict)
    shards: Shards = field(default_factory=dict)


class Owners(NamedTuple):
    """Processes that have written the blocks of arrays, so that a reader opens only the tables that it needs.

    Attributes:
        grid: number of blocks on each axis; all have the same size.
        runs: [number of blocks, process], for the blocks in C order.
    """

    grid: list[int]
    runs: list[list[int]]

    @classmethod
    def from_sharding(cls, sharding: jax.sharding.Sharding, shape: tuple[int, ...]) -> "Owners | None":
        """Return the owners of the blocks of an array that `copy_to_host` gives as `own`; None for unequal blocks."""
        # As for `replica_id`, the first device of those with one block counts.
        owner_of: dict[tuple[int, ...], int] = {}
        devices: Mapping[Any, Any] = sharding.devices_indices_map(shape)
        for device, index in devices.items():
            owner_of.setdefault(tuple(get_start(index, shape)), device.process_index)
        grid = [len(set(starts)) for starts in zip(*owner_of, strict=True)]
        if len(owner_of) != math.prod(grid) or any(size % count for size, count in zip(shape, grid, strict=True)):
            return None
        in_order = (owner_of[start] for start in sorted(owner_of))
        return cls(grid, [[len([*run]), process] for process, run in itertools.groupby(in_order)])

    def find(self, shape: Sequence[int], start: Sequence[int], extent: Sequence[int]) -> set[int] | None:
        """Return the processes that have elements of a block of an array of this shape; None if it may be any."""
        if 0 in extent:
            return set()
        if len(self.grid) != len(shape):
            return None
        ranges, ends = [], list(itertools.accumulate(count for count, _ in self.runs))
        for size, count, begin, length in zip(shape, self.grid, start, extent, strict=True):
            if count < 1 or size % count:
                return None
            ranges.append(range(begin // (size // count), -(-(begin + length) // (size // count))))
        if math.prod(map(len, ranges)) > _MAX_OVERLAPS or not ends or ends[-1] != math.prod(self.grid):
            return None
        found = set()
        for place in itertools.product(*ranges):
            number = 0
            for count, own in zip(self.grid, place, strict=True):
                number = number * count + own
            found.add(self.runs[bisect.bisect_right(ends, number)][1])
        return found


def parse_records(records: dict[str, list[ShardRecord]], files: Files) -> Shards:
    """Return the shards that the key `shards` of a manifest describes, where each piece is a whole file."""
    return {
        name: [
            Shard(each["start"], each["shape"], [Piece(piece, 0, *files[piece]) for piece in each["pieces"]])
            for each in shards
        ]
        for name, shards in records.items()
    }


def parse_shards(records: JsonObject, files: Files) -> Shards:
    """Return the shards in the table of one process, from its key `shards`, whose keys have been checked.

    Raises `ValueError` if a piece is not inside one of the `files` of the process, or a number is none.
    """
    found: Shards = {}
    for name, shards in records.items():
        for each in shards:
            if not all(type(number) is int and number >= 0 for number in (*each["start"], *each["shape"])):
                raise ValueError(f"a shard of {name} has a start or a shape that is not a list of whole numbers")
            pieces = []
            for entry in each["pieces"]:
                if not isinstance(entry, list) or list(map(type, entry)) != [str, int, int, str]:
                    raise ValueError(f"a piece of {name} is not [file, begin, size, CRC-32C]")
                piece = Piece(*entry)
                if piece.begin < 0 or piece.size < 0 or piece.end > files.get(piece.file, [-1])[0]:
                    raise ValueError(f"a piece of {name} is outside of the files of its process")
                pieces.append(piece)
            found.setdefault(name, []).append(Shard(each["start"], each["shape"], pieces))
    return found


# Write.


def copy_to_host(leaves: dict[str, jax.Array], share: Literal["own", "all"] = "own") -> Blocks:
    """Copy this process's shards of every leaf to host memory. The arrays may be donated when this returns.

    The share `own` has the shards that no device of lower rank has too, so that all processes together have each once;
    `all` has everything that this process needs to restore itself alone.
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
        name: [(get_start(shard.index, leaves[name].shape), np.asarray(shard.data)) for shard in shards]
        for name, shards in shards_of.items()
    }


def write_packs(directory: Path, stem: str, blocks: Blocks) -> BlockTable:
    """Write every shard of this process into `directory`/`stem`.0.bin, `stem`.1.bin, ..., without flushing.

    The directory must exist and not be replaced meanwhile: what is written there is one process's part of one save.
    Returns the table of what was written, with names relative to `directory`.
    """
    table = BlockTable()
    pack: _PackFile | None = None
    try:
        for leaf, own in blocks.items():
            for start, block in own:
                pieces: list[Piece] = []
                for content in _cut(block):
                    if pack is None or pack.num_bytes + len(content) > PACK_BYTES:
                        if pack is not None:
                            table.files[pack.name] = pack.close()
                        pack = _PackFile(directory, f"{stem}.{len(table.files)}.bin")
                    pieces.append(pack.append(content))
                table.shards.setdefault(leaf, []).append(Shard(start, list(block.shape), pieces))
        if pack is not None:
            table.files[pack.name] = pack.close()
    finally:
        if pack is not None:
            pack.file.close()
    return table


class _PackFile:
    """Pack that is being written."""

    def __init__(self, directory: Path, name: str):
        self.name, self.num_bytes = name, 0
        # A new file in any case: to open what lies there could wait for the reader of a pipe, or write through a link.
        (directory / name).unlink(missing_ok=True)
        self.file: BinaryIO = retry_stale(lambda: (directory / name).open("xb", buffering=_BUFFER_BYTES))
        self._digest = google_crc32c.Checksum()

    def append(self, content: np.ndarray) -> Piece:
        digest = google_crc32c.Checksum()
        for begin in range(0, len(content), _DIGEST_BYTES):
            chunk = content[begin : begin + _DIGEST_BYTES]
            digest.update(chunk)
            self._digest.update(chunk)
        self.file.write(content.data)
        piece = Piece(self.name, self.num_bytes, len(content), digest.hexdigest().decode())
        self.num_bytes += len(content)
        return piece

    def close(self) -> list[Any]:
        """Close the file, and return its size and CRC-32C."""
        self.file.close()
        return [self.num_bytes, self._digest.hexdigest().decode()]


def _cut(block: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the bytes of a block in pieces of at most `PIECE_BYTES`; none for an empty block."""
    data = np.ascontiguousarray(block).reshape(-1).view(np.uint8)
    data.flags.writeable = False  # the digest takes read-only memory without a copy
    for begin in range(0, len(data), PIECE_BYTES):
        yield data[begin : begin + PIECE_BYTES]


# Read.

Fetch = Callable[[list[Piece]], dict[Piece, np.ndarray]]  # reads and verifies a run of pieces, as `read_pieces` does


def _plan_reads(pieces: Iterable[Piece]) -> list[list[Piece]]:
    """Return the pieces in runs, each adjacent in one file and read at once, of at most `PIECE_BYTES` together."""
    runs: list[list[Piece]] = []
    for piece in sorted(set(pieces)):
        last = runs[-1][-1] if runs else None
        if (
            last is not None
            and (last.file, last.end) == (piece.file, piece.begin)
            and piece.end - runs[-1][0].begin <= PIECE_BYTES
        ):
            runs[-1].append(piece)
        else:
            runs.append([piece])
    return runs


def read_pieces(read: Callable[[str, int, int], bytes], run: list[Piece]) -> dict[Piece, np.ndarray]:
    """Return the bytes of each piece of a run of `_plan_reads`, verified: uint8[size].

    `read` returns the bytes from one offset of a file to another. Raises `DamagedBlockError`, which names the file, if
    it is missing or bytes are wrong.
    """
    first, last = run[0], run[-1]
    try:
        content = np.frombuffer(read(first.file, first.begin, last.end), np.uint8)
    except FileNotFoundError as error:
        raise DamagedBlockError(f"{first.file} is missing") from error
    except ChangedError as error:  # it ends earlier
        raise DamagedBlockError(
            f"{first.file} has fewer than {last.end} bytes, the manifest says at least so many"
        ) from error
    if len(content) != last.end - first.begin:
        raise DamagedBlockError(
            f"{first.file} has {len(content)} bytes from {first.begin} on, the manifest says {last.end - first.begin}"
        )
    found = {}
    for piece in run:
        found[piece] = content[piece.begin - first.begin : piece.end - first.begin]
        if compute_crc32c(found[piece]) != piece.crc32c:
            raise DamagedBlockError(f"{piece.file} does not match its CRC-32C at {piece.begin}..{piece.end}")
    return found


def read_blocks(fetch: Fetch, shards: Shards, leaves: dict[str, Any]) -> dict[str, jax.Array]:
    """Return the arrays that `leaves` describe, from the pieces that this process needs, each read once.

    `fetch` is called on several threads. Raises what it raises, and `DamagedBlockError` if the pieces do not hold all
    elements of an array.
    """
    with ThreadPoolExecutor(NUM_READERS, thread_name_prefix="read") as pool:
        try:
            needed = {}
            for name, leaf in leaves.items():
                indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
                blocks = [(get_start(index, leaf.shape), get_extent(index, leaf.shape)) for index in indices]
                needed[name] = [
                    shard
                    for shard in shards.get(name, [])
                    if any(_find_overlap(shard, *block) is not None for block in blocks)
                ]
            futures: dict[Piece, Future[dict[Piece, np.ndarray]]] = {}
            for run in _plan_reads(piece for own in needed.values() for shard in own for piece in shard.pieces):
                futures |= dict.fromkeys(run, pool.submit(fetch, run))
            return {name: _assemble(leaf, needed[name], futures) for name, leaf in leaves.items()}
        finally:
            # After an error the runs that are still queued are not needed.
            pool.shutdown(cancel_futures=True)


def read_block(fetch: Fetch, shards: list[Shard], dtype: Any, index: Index, shape: tuple[int, ...]) -> np.ndarray:
    """Return the block at `index` of an array of this global shape, in host memory. Raises as `read_blocks` does."""
    start, extent = get_start(index, shape), get_extent(index, shape)
    blocks = []
    for shard in shards:
        if _find_overlap(shard, start, extent) is not None:
            found: dict[Piece, np.ndarray] = {}
            for run in _plan_reads(shard.pieces):
                found |= fetch(run)
            blocks.append((shard, _decode_block(shard, dtype, [found[piece] for piece in shard.pieces])))
    return _fill(blocks, dtype, start, extent)


def get_start(index: Index, shape: Sequence[int]) -> list[int]:
    """Return the offset of a block on each axis."""
    return [part.indices(size)[0] for part, size in zip(index, shape, strict=True)]


def get_extent(index: Index, shape: Sequence[int]) -> list[int]:
    """Return the size of a block on each axis."""
    bounds = [part.indices(size) for part, size in zip(index, shape, strict=True)]
    return [stop - start for start, stop, _ in bounds]


def _find_overlap(shard: Shard, start: list[int], extent: list[int]) -> list[tuple[slice, slice]] | None:
    """Return the slices (of the shard, of the block) on each axis where both overlap; None if they do not."""
    overlap = []
    for own, size, other, length in zip(shard.start, shard.shape, start, extent, strict=True):
        begin, end = max(own, other), min(own + size, other + length)
        if begin >= end:
            return None
        overlap.append((slice(begin - own, end - own), slice(begin - other, end - other)))
    return overlap


def _assemble(leaf: Any, shards: list[Shard], futures: dict[Piece, Future[dict[Piece, np.ndarray]]]) -> jax.Array:
    blocks = []
    for shard in shards:
        # Taking the futures out frees each run once it is used: a state may be as large as this host's memory.
        contents = []
        for piece in shard.pieces:
            future = futures.pop(piece, None)
            if future is None:
                raise DamagedBlockError(f"two shards have the piece of {piece.file} at {piece.begin}")
            contents.append(future.result()[piece])
        blocks.append((shard, _decode_block(shard, leaf.dtype, contents)))

    def get_block(index: Index | None) -> np.ndarray:
        assert index is not None, "every device has an index"
        return _fill(blocks, leaf.dtype, get_start(index, leaf.shape), get_extent(index, leaf.shape))

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, get_block)


def _decode_block(shard: Shard, dtype: Any, contents: list[np.ndarray]) -> np.ndarray:
    content = contents[0] if len(contents) == 1 else np.concatenate([np.empty(0, np.uint8), *contents])
    # Checked before numpy sees the bytes: a shape is data, and may be of any size.
    if len(content) != shard.num_elements * jnp.dtype(dtype).itemsize:
        raise DamagedBlockError(f"a shard of the shape {shard.shape} has {len(content)} bytes")
    return content.view(jnp.dtype(dtype)).reshape(shard.shape)


def _fill(blocks: list[tuple[Shard, np.ndarray]], dtype: Any, start: list[int], extent: list[int]) -> np.ndarray:
    """Return the block of this start and extent, from the shards that overlap it."""
    # In the usual case the mesh is the one that saved, and a shard is the wanted block: nothing is copied.
    for shard, block in blocks:
        if shard.start == start and shard.shape == extent:
            return block
    whole = np.empty(extent, dtype)
    num_filled = 0
    for shard, block in blocks:
        overlap = _find_overlap(shard, start, extent)
        if overlap is not None:
            whole[tuple(there for _, there in overlap)] = block[tuple(here for here, _ in overlap)]
            num_filled += int(np.prod([here.stop - here.start for here, _ in overlap]))
    # Shards do not overlap each other, so counting elements is enough to find a gap.
    if num_filled != whole.size:
        raise DamagedBlockError(f"the manifest's shards hold {num_filled} of {whole.size} elements of a block")
    return whole
