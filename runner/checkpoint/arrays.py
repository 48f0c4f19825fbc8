"""Writer and reader of the arrays of a checkpoint.

Every process writes its shards into files of its own (`blocks.write_packs`): `<arrays>/<process>.<n>.bin`, and the
table of what is in them, `<arrays>/<process>.json`. On a disk that all hosts share it writes them in place; for a
bucket it writes them to its own disk and uploads them, in parallel. The arrays are copied off the device first, and
the rest happens in the background.

Nothing is committed before it was read back. When the parts of all processes are durable, each process reads the files
of another one, so that a directory which the hosts do not share is found. On a disk it reads every byte. In a bucket
it compares the digest that the service reports, and reads a rotating share of the files in full. In the first save of
an attempt each process also reads all that it would need for a restore, and compares the bits with those on its
devices.

Before format 2 a checkpoint on a disk was written by Orbax, as zarr arrays in an OCDBT database, and one in a bucket
as one file for each piece of a shard. Both are still read. Readers claim no attempt and change no file.
"""

import contextlib
import shutil
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import tensorstore
from jax.sharding import SingleDeviceSharding

from runner.checkpoint import blocks, fingerprint
from runner.checkpoint.blocks import Blocks, BlockTable, Index, Owners, Shards, copy_to_host, write_packs
from runner.checkpoint.leaves import Leaves, decode_leaves, encode_leaves, parse_dtype
from runner.checkpoint.manifest import (
    FORMAT,
    INDEX_KEYS,
    Files,
    Manifest,
    OwnersRecord,
    parse_manifest,
    seal,
    validate_files,
)
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.errors import NewerFormatError, PeerLostError, format_error
from runner.storage import (
    JsonObject,
    LocalStore,
    Store,
    as_local,
    compute_crc32c,
    default_cache_directory,
    validate_record,
)
from runner.storage.store import make_directory, retry_stale, translate_errors

NUM_UPLOADS = 8
INDEX_SUFFIX = ".json"  # of the table of what one process has written; the packs end in `.<n>.bin`
_GROUP_BYTES = 1 << 30  # of the leaves that are read at a time
READ_BACK_SHARE = 8  # of so many files in a bucket, one is read in full before a commit, another one each time
# Errors of a write that fails. They cost one save; anything else is a bug and ends the run.
WRITE_ERRORS = (OSError, ValueError, RuntimeError)
_CACHE_BYTES = 64 << 20  # without a cache, the table of contents is read again for every block
_EXTRA_SECONDS = 10.0  # for which process 0 outlasts the deadline of the slowest write, to report that failure


@dataclass(frozen=True)
class WriteResult:
    """Values of keys of the manifest for the arrays that a writer has written. They count on process 0 only."""

    files: Files = field(default_factory=dict)
    indexes: list[str] = field(default_factory=list)
    owners: dict[str, OwnersRecord] = field(default_factory=dict)
    read_back: bool = False


# Checks the bits of a checkpoint that can be read but is not committed. Raises `ValueError` or `OSError`.
BitsCheck = Callable[["ArrayReader"], None]


class FinishWrite(Protocol):
    """Function that finishes a write. Called on every host, on any thread."""

    def __call__(
        self, deadline_seconds: float, check: BitsCheck | None = None, error: Exception | None = None
    ) -> WriteResult:
        """Block until the parts of all hosts are durable and were read back. May raise one of `WRITE_ERRORS`.

        The parts must be durable within `deadline_seconds`. `check` is given in the first save of an attempt. With
        `error`, one of `WRITE_ERRORS`, this host writes nothing, and the save fails.
        """


class ArrayWriter:
    """Writer of arrays below one name of a store. Made and called on every host.

    `staging` is a directory on this host's own disk for files on their way into a bucket; it is deleted in the end.
    """

    def __init__(self, store: Store, hosts: Hosts, staging: Path):
        self._store, self._hosts, self._staging = store, hosts, staging
        self._num_saves = 0
        self._owners: dict[Any, Owners | None] = {}  # by sharding and shape
        self._failed: set[str] = set()  # targets of failed writes that were not written since

    def start(self, target: str, leaves: dict[str, jax.Array], error: Exception | None = None) -> FinishWrite:
        """Start writing `leaves` below `target`. The arrays may be donated when this returns. Any thread.

        Raises none of `WRITE_ERRORS`: process 0 waits for the part of every host, and must learn that there is none.
        With `error`, one of them with which this host has failed already, nothing is written.
        """
        # All hosts save the same steps in the same order, so the number of the save gives them the same keys.
        self._num_saves += 1
        number, blocks = self._num_saves, Blocks()
        self._failed.discard(target)
        copy_error = error
        try:
            if error is None:
                blocks = copy_to_host(leaves)
        except WRITE_ERRORS as caught:
            copy_error = caught
        sizes = {name: leaf.size for name, leaf in leaves.items()}
        shardings = {name: (leaf.sharding, leaf.shape) for name, leaf in leaves.items()}

        def finish(
            deadline_seconds: float, check: BitsCheck | None = None, error: Exception | None = None
        ) -> WriteResult:
            deadline = time.monotonic() + deadline_seconds
            parts = self.finish_part(number, target, blocks, sizes, deadline, copy_error or error)
            # In the first save of an attempt every process reads what it would need for a restore.
            owners = self._find_owners(shardings) if self._hosts.is_main or check is not None else {}
            return self.read_back(number, target, parts, deadline, check, owners)

        return finish

    def finish_part(
        self,
        number: int,
        target: str,
        blocks: Blocks,
        sizes: Mapping[str, int],
        deadline: float,
        error: Exception | None,
    ) -> list[JsonObject]:
        """Write the part of this process, and wait until all parts are durable; return all of them on process 0."""
        message: JsonObject = {}
        try:
            if error is not None:
                raise error
            message = self.write_part(target, blocks, deadline)
        except WRITE_ERRORS as caught:
            error = caught
        blocks.clear()  # frees the host's memory
        folder = key_value.save_folder(number, "written")
        parts: list[JsonObject] = []
        try:
            parts = _collect(self._hosts, folder, message, error, deadline)
            # The shards of all processes must hold each element of every leaf once.
            for name, size in sizes.items() if self._hosts.is_main else ():
                if (written := sum(part["elements"].get(name, 0) for part in parts)) != size:
                    raise ValueError(f"the processes have written {written} of the {size} elements of {name}")
        except WRITE_ERRORS as caught:
            error = caught
        # The others read what all have written, so they must know that all is there.
        if self._hosts.num_processes > 1 and (self._hosts.is_main or error is None):
            reason = self._announce(number, None if error is None else format_error(error), deadline)
            error = error or (None if reason is None else OSError(reason))
        if error is not None:
            raise error
        return parts

    def _find_owners(self, shardings: Mapping[str, tuple[jax.sharding.Sharding, Any]]) -> dict[str, OwnersRecord]:
        """Return the processes that write the blocks of each leaf, as the manifest has them; empty for one process."""
        if self._hosts.num_processes == 1:
            return {}
        found: dict[str, OwnersRecord] = {}
        for name, place in shardings.items():
            if place not in self._owners:
                self._owners[place] = Owners.from_sharding(*place)
            owners = self._owners[place]
            if owners is not None:
                record = OwnersRecord(leaves=[], grid=owners.grid, runs=owners.runs)
                found.setdefault(repr(owners), record)["leaves"].append(name)
        return {str(number): record for number, record in enumerate(found.values())}

    def _announce(self, number: int, reason: str | None, deadline: float) -> str | None:
        """Return on every process the reason of process 0 why a save has failed; None if it goes on."""
        store = self._hosts.store
        if self._hosts.is_main:
            store.set(key_value.save_outcome_key(number), reason)
            # Every process has passed that save: it takes part in the steps between two saves.
            store.delete(key_value.save_outcome_key(number - 2))
            return reason
        left_seconds = max(deadline - time.monotonic(), 1.0) + 2 * _EXTRA_SECONDS
        found: str | None = store.get(key_value.save_outcome_key(number), left_seconds, "the parts of all processes")
        return found

    def write_part(self, target: str, blocks: Blocks, deadline: float) -> JsonObject:
        """Write this process's files durably; return the message about them for process 0."""
        directory, _, arrays = target.rpartition("/")
        process = self._hosts.process_id
        index = f"{arrays}/{process}{INDEX_SUFFIX}"
        elements = {name: sum(block.size for _, block in own) for name, own in blocks.items()}

        def write(top: Path) -> BlockTable:
            with translate_errors(top / arrays):
                # The directory is made before anything is written and never again: when a newer attempt has renamed it,
                # what follows must fail.
                make_directory(top / arrays)
                table = write_packs(top, f"{arrays}/{process}", blocks)
                blocks.clear()
                content = encode_index(table)
                (top / index).unlink(missing_ok=True)
                with retry_stale(lambda: (top / index).open("xb")) as file:
                    file.write(content)
                table.files[index] = [len(content), compute_crc32c(content)]
                return table

        if isinstance(self._store, LocalStore):
            table = write(self._store.root / directory)
            # On a network disk a host can flush only what it has written itself.
            self._store.flush_tree(target, lambda name: name.partition(".")[0] == str(process))
        else:
            self._staging.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self._staging) as temporary:
                table = write(Path(temporary))
                _upload(self._store, Path(temporary), directory, table.files, deadline)
        return {"files": table.files, "elements": elements}

    def read_back(
        self,
        number: int,
        target: str,
        parts: list[JsonObject],
        deadline: float,
        check: BitsCheck | None,
        owners: dict[str, OwnersRecord],
    ) -> WriteResult:
        """Read the files of another process back, and on process 0 wait until all processes have done so."""
        hosts, (directory, _, arrays) = self._hosts, target.rpartition("/")
        indexes = [f"{arrays}/{process}{INDEX_SUFFIX}" for process in range(hosts.num_processes)]
        error: Exception | None = None
        try:
            # Another process each time, and itself only if it is alone.
            other = (hosts.process_id + 1 + number % max(hosts.num_processes - 1, 1)) % hosts.num_processes
            is_full = check is not None or self._store.root is not None
            for problem in find_read_back_problems(self._store, directory, indexes[other], number, is_full):
                hint = "" if other == hosts.process_id else f", which process {other} has written"
                shared = "" if not hint or self._store.root is None else "; all hosts must share `directory`"
                raise OSError(f"process {hosts.process_id} cannot read back {problem}{hint}{shared}")
            if check is not None:
                check(ArrayReader(self._store, directory, indexes, owners=owners))
        except WRITE_ERRORS as caught:
            error = caught
        _collect(hosts, key_value.save_folder(number, "read"), {}, error, deadline)
        files = {name: entry for part in parts for name, entry in part.get("files", {}).items()}
        return WriteResult(files, indexes, owners, is_full)

    def discard(self, target: str) -> None:
        """Delete what a failed write has left of this process. Uploaded files stay until the next attempt."""
        if not isinstance(self._store, LocalStore):
            return
        self._failed.add(target)
        # Other processes may still write, each its own files, which they delete themselves.
        with contextlib.suppress(OSError):  # what cannot be deleted stays until the next attempt
            for name in self._store.list_names(target):
                if name.partition(".")[0] == str(self._hosts.process_id):
                    self._store.remove(f"{target}/{name}")
            for path in (self._store.root / target, (self._store.root / target).parent):
                path.rmdir()

    def close(self) -> None:
        """Delete the temporary files, and on process 0 what processes that ended have left of failed writes."""
        if not isinstance(self._store, LocalStore):
            shutil.rmtree(self._staging, ignore_errors=True)
        elif self._hosts.is_main:
            for target in self._failed:
                with contextlib.suppress(OSError):
                    self._store.remove_tree(target)
                    (self._store.root / target).parent.rmdir()


def make_writer(store: Store, hosts: Hosts, run_id: str) -> ArrayWriter:
    """Return the writer for a store. Called on every host."""
    staging = default_cache_directory() / "staging" / f"{run_id}.{hosts.process_id}"
    shutil.rmtree(staging, ignore_errors=True)  # files of an attempt that was killed
    return ArrayWriter(store, hosts, staging)


def _collect(
    hosts: Hosts, folder: str, message: JsonObject, error: Exception | None, deadline: float
) -> list[JsonObject]:
    """Send the message of this process to process 0; return the messages of all there. Called on every host.

    Raises `OSError` on process 0 if the part of any process has failed, and on the others if their own has.
    """
    if error is not None and hosts.is_main:
        # The others cannot change the outcome, so they are not waited for. Their messages are deleted with those of the
        # next save.
        with contextlib.suppress(PeerLostError):
            hosts.collect(folder, message, 0.0)
        raise error
    if error is not None:
        message = {"error": f"process {hosts.process_id}: {format_error(error)}"}
    messages = hosts.collect(folder, message, max(deadline - time.monotonic(), 1.0) + _EXTRA_SECONDS)
    for part in messages:
        if "error" in part:
            raise OSError(part["error"]) from error
    return messages


def _upload(store: Store, source: Path, directory: str, names: Iterable[str], deadline: float) -> None:
    """Upload files from below `source` to the same names below `directory`, in parallel."""

    def send(name: str) -> None:
        store.upload(source / name, f"{directory}/{name}", max(deadline - time.monotonic(), 0.0))

    with ThreadPoolExecutor(NUM_UPLOADS, thread_name_prefix="upload") as pool:
        try:
            list(pool.map(send, names))
        finally:
            pool.shutdown(cancel_futures=True)


def encode_index(table: BlockTable) -> bytes:
    """Return the content of the table of what one process has written (`INDEX_KEYS`)."""
    shards = {
        name: [{"start": start, "shape": shape, "pieces": pieces} for start, shape, pieces in own]
        for name, own in table.shards.items()
    }
    return seal({"format": FORMAT, "files": table.files, "shards": shards})


def read_index(store: Store, directory: str, name: str, entry: list[Any] | None = None) -> BlockTable:
    """Return the table of what one process has written; `entry` is its size and CRC-32C, if a commit has recorded them.

    Raises `DamagedBlockError` if it is missing or damaged, `NewerFormatError` if another version has written it, and
    `OSError` if the store could not read it.
    """
    try:
        content = store.read(f"{directory}/{name}")
    except FileNotFoundError as error:
        raise blocks.DamagedBlockError(f"{name} is missing") from error
    return parse_index(name, content, entry)


def parse_index(name: str, content: bytes, entry: list[Any] | None = None) -> BlockTable:
    """Return the table of what one process has written, from the content of its file. See `read_index`."""
    if entry is not None and [len(content), compute_crc32c(content)] != entry:
        raise blocks.DamagedBlockError(f"{name} does not match its size and CRC-32C in the manifest")
    try:
        record = parse_manifest(content)
        validate_record(record, INDEX_KEYS, ["files", "shards"])
        validate_files(record["files"])
        return BlockTable(record["files"], blocks.parse_shards(record["shards"], record["files"]))
    except NewerFormatError:
        raise
    except ValueError as error:
        raise blocks.DamagedBlockError(f"{name}: {error}") from error


def find_read_back_problems(store: Store, directory: str, index: str, number: int, is_full: bool) -> Iterator[str]:
    """Iterate over what is wrong with the files of one process before a commit; `index` is the name of their table.

    Reads every byte if `is_full`, and otherwise a share of a bucket's files that depends on the number of the save.
    Raises `NewerFormatError` or `OSError` as `read_index` does.
    """
    try:
        table = read_index(store, directory, index)
    except blocks.DamagedBlockError as error:
        yield str(error)
        return
    # Files are opened by their names: a listing of a network disk may be old.
    for place, (name, (size, digest)) in enumerate(sorted(table.files.items())):
        path = f"{directory}/{name}"
        is_read = is_full or (place + number) % READ_BACK_SHARE == 0
        try:
            if is_read and store.root is None:
                content = store.read(path)
                found = [len(content), compute_crc32c(content)]
            else:
                # A disk computes the digest from the bytes, which must be as many; a bucket reports it.
                found = [
                    (as_local(store).root / path).stat().st_size if store.root is not None else size,
                    store.compute_digest(path),
                ]
        except FileNotFoundError:
            yield f"{path}: it is not there"
            continue
        if found != [size, digest]:
            yield f"{path}: its bytes are not those that were written"


def make_bits_check(layout: fingerprint.LeafLayout, digests: list[jax.Array], leaves: Leaves) -> BitsCheck:
    """Return a check that what this process would restore has the bits on its devices.

    `digests` are those of `layout.dispatch`, `leaves` the abstract leaves as they are stored.
    """

    def check(reader: ArrayReader) -> None:
        own = {device: layout.digests_on(device, digests) for device in jax.local_devices()}
        for name, leaf in leaves.items():
            # Replicas have equal digests, so one of them is enough.
            indices = leaf.sharding.addressable_devices_indices_map(leaf.shape)
            for index, device in {str(index): (index, device) for device, index in indices.items()}.values():
                block = reader.read_block(name, leaf, index)
                start = [part.indices(size)[0] for part, size in zip(index, leaf.shape, strict=True)]
                is_same = block.dtype == leaf.dtype and np.array_equal(
                    fingerprint.compute_block_digest(block, leaf.shape, start), own[device][name]
                )
                if not is_same:
                    raise ValueError(f"what was read back of {name} is not what was saved")

    return check


# Readers.


class ArrayReader:
    """Reader of the arrays of one checkpoint. Any thread. A table is read when an array needs it.

    Args:
        store: the run's directory.
        directory: the checkpoint.
        indexes: names of the tables of all processes.
        files: size and CRC-32C of each file, if the checkpoint is committed.
        shards: the blocks of each array instead, if there are no such tables.
        owners: processes that have written the blocks of each leaf; leaves without them may need any table.
    """

    def __init__(
        self,
        store: Store,
        directory: str,
        indexes: Sequence[str] = (),
        files: Files | None = None,
        shards: Shards | None = None,
        owners: Mapping[str, OwnersRecord] | None = None,
    ):
        self._store, self._directory, self._indexes, self._files = store, directory, indexes, files
        self._shards: Shards = dict(shards or {})
        self._owners = {
            name: Owners(each["grid"], each["runs"]) for each in (owners or {}).values() for name in each["leaves"]
        }
        self._lock = threading.Lock()  # over the tables
        self._tables: set[int] = set()  # processes whose tables were read
        if shards is not None:
            self._validate_sizes("", files or {})

    def _find_tables(self, name: str, shape: Sequence[int], indices: Iterable[Index]) -> set[int]:
        """Return the processes whose tables may hold some blocks of an array."""
        owners, found = self._owners.get(name), set[int]()
        for index in indices:
            start, extent = blocks.get_start(index, shape), blocks.get_extent(index, shape)
            own = None if owners is None else owners.find(shape, start, extent)
            if own is None:
                return set(range(len(self._indexes)))
            found |= own
        return found

    def _read_tables(self, processes: set[int]) -> None:
        """Read the tables of these processes that were not read yet.

        Raises:
            ValueError: a table is missing or damaged.
            OSError: the store could not read it.
        """

        def read(process: int) -> BlockTable:
            name = self._indexes[process]
            return read_index(
                self._store, self._directory, name, None if self._files is None else list(self._files[name])
            )

        with self._lock:
            missing = sorted(processes - self._tables)
            if not missing:
                return
            with ThreadPoolExecutor(blocks.NUM_READERS, thread_name_prefix="read") as pool:
                tables = list(pool.map(read, missing))
            # The files of a process begin like its table, so for one process few are listed.
            start = f"{self._indexes[missing[0]].removesuffix(INDEX_SUFFIX)}." if len(missing) == 1 else ""
            self._validate_sizes(start, {name: entry for table in tables for name, entry in table.files.items()})
            for table in tables:
                for leaf, own in table.shards.items():
                    self._shards.setdefault(leaf, []).extend(own)
            self._tables |= processes

    def _validate_sizes(self, start: str, files: Files) -> None:
        """Check the sizes of files of a bucket, whose names begin with `start`. Raises as `_read_tables` does."""
        if self._store.root is not None:
            return
        # A range that a bucket answers with fewer bytes is asked for again, as after a broken connection, so an object
        # that is too short must be found before.
        top = f"{self._directory}/"
        sizes = {name[len(top) :]: info.size_bytes for name, info in self._store.list_files(top + start).items()}
        for name, (size, _) in files.items():
            if sizes.get(name) != size:
                has = f"has {sizes[name]} bytes, the manifest says {size}" if name in sizes else "is missing"
                raise blocks.DamagedBlockError(f"{name} {has}")

    def _fetch(self, run: list[blocks.Piece]) -> dict[blocks.Piece, np.ndarray]:
        def read(name: str, begin: int, end: int) -> bytes:
            return self._store.read_range(f"{self._directory}/{name}", begin, end, None)

        return blocks.read_pieces(read, run)

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """Return the arrays that `leaves` describe (shape, dtype, sharding). Called on every host.

        Raises `ValueError` for bytes that are missing or wrong, and `OSError` for those that the store cannot read.
        """
        needed: set[int] = set()
        for name, leaf in leaves.items():
            indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
            needed |= self._find_tables(name, leaf.shape, indices)
        self._read_tables(needed)
        return blocks.read_blocks(self._fetch, self._shards, leaves)

    def read_block(self, name: str, leaf: Any, index: Index) -> np.ndarray:
        """Return one block of the array `name`, which `leaf` describes, in host memory. Raises as `read` does."""
        self._read_tables(self._find_tables(name, leaf.shape, [index]))
        return blocks.read_block(self._fetch, self._shards.get(name, []), leaf.dtype, index, leaf.shape)


class _OrbaxReader:
    """Reader of arrays that Orbax has written to a disk: zarr arrays in an OCDBT database. Any thread.

    TensorStore reads them, without Orbax: it needs no meeting of all processes, and raises its errors as they are.
    """

    def __init__(self, path: Path):
        # TensorStore parses a URL, in which a path must be quoted.
        self._base = f"file://{urllib.parse.quote(str(path.absolute()))}/"
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE_BYTES}})

    def _read(self, name: str, leaf: Any) -> jax.Array:
        spec = {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": self._base, "path": f"{name}/"}}
        array = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        if array.shape != leaf.shape or array.dtype.numpy_dtype != leaf.dtype:
            raise ValueError(f"{name} is {array.dtype.name}{list(array.shape)}, not {leaf.dtype}{list(leaf.shape)}")
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        # All blocks of an array are read side by side, and each once.
        reads = {str(index): array[index].read() for index in indices}
        contents = {key: read.result() for key, read in reads.items()}
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: contents[str(index)])

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """Return the arrays that `leaves` describe (shape, dtype, sharding). Raises `ValueError` or `OSError`."""
        try:
            return {name: self._read(name, leaf) for name, leaf in leaves.items()}
        # TensorStore raises these for files that are missing or damaged.
        except (KeyError, IndexError, NotImplementedError, RuntimeError, TypeError) as error:
            raise ValueError(format_error(error)) from error


@contextlib.contextmanager
def open_arrays(store: Store, directory: str, manifest: Manifest) -> Iterator[ArrayReader | _OrbaxReader]:
    """Yield the reader of a committed checkpoint. Called on every host.

    Raises `ValueError` if a table of what it holds is missing or damaged, and `OSError` if it cannot be read.
    """
    if manifest.indexes is not None:
        yield ArrayReader(store, directory, manifest.indexes, manifest.files, owners=manifest.owners)
    elif manifest.shards is not None:
        yield ArrayReader(
            store, directory, files=manifest.files, shards=blocks.parse_records(manifest.shards, manifest.files)
        )
    elif store.root is not None:
        yield _OrbaxReader(store.root / directory / manifest.arrays)
    else:
        # A checkpoint that Orbax has written comes into a bucket by copying it there. It is read from a copy on this
        # host's disk.
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
            yield _OrbaxReader(Path(temporary) / directory / manifest.arrays)


def read_arrays(store: Store, directory: str, manifest: Manifest, leaves: Leaves) -> dict[str, jax.Array]:
    """Return the arrays of one checkpoint that `leaves` describe; see `ArrayReader.read`. Called on every host."""
    with open_arrays(store, directory, manifest) as reader:
        return reader.read(leaves)


class RestoredLeaf(NamedTuple):
    """One leaf as it was read back. `problem` says what is wrong with its bits; None if they are right."""

    name: str
    array: jax.Array
    problem: str | None


def read_leaves(store: Store, directory: str, manifest: Manifest, names: Iterable[str]) -> Iterator[RestoredLeaf]:
    """Iterate over leaves by name, on the first device of this process, in the types that they were saved in.

    About `_GROUP_BYTES` of them are in memory at a time. Raises as `ArrayReader.read` does.
    """
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    with open_arrays(store, directory, manifest) as reader:
        for group in _group_leaves(manifest, names, sharding):
            with jax.enable_x64(True):  # else types of 64 bits would come back as others
                arrays = decode_leaves(reader.read(encode_leaves(group)), group)
                digests = fingerprint.compute_leaf_digests(arrays)
            for name, array in arrays.items():
                is_good = digests[name] == manifest.leaves[name]["digest"]
                yield RestoredLeaf(
                    name, array, None if is_good else f"the bits of {name} are not those that were saved"
                )


def _group_leaves(manifest: Manifest, names: Iterable[str], sharding: SingleDeviceSharding) -> Iterator[Leaves]:
    """Yield abstract leaves by name in groups of about `_GROUP_BYTES`."""
    group: Leaves = {}
    num_bytes = 0
    for name in names:
        shape, dtype = manifest.leaves[name]["shape"], manifest.leaves[name]["dtype"]
        try:
            group[name] = jax.ShapeDtypeStruct(shape, parse_dtype(dtype), sharding=sharding)
        except TypeError as error:
            raise ValueError(f"{name} is of type {dtype}, which cannot be read without its job") from error
        num_bytes += int(np.prod(shape)) * group[name].dtype.itemsize
        if num_bytes >= _GROUP_BYTES:
            yield group
            group, num_bytes = {}, 0
    if group:
        yield group
