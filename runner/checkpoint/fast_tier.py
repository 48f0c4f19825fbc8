"""Fast tier: the newest states on each host's own disk or RAM disk, beside the durable directory.

Each process keeps the pieces of a step that it needs to restore itself (its *part*), so nothing here is shared and
nothing is waited for. A step counts only if every process still has its part of it: together they choose the newest
such step, so a host that comes back empty, or with half a step, sends all of them to an older step or to the durable
directory. A part is written under a temporary name, flushed, and renamed as a whole.

With `checkpoint.local_replicas` other hosts keep copies of each part. A host that comes back empty then gets its parts
from them, over the hosts' network, and nothing is read from the durable directory.

1. `choose_holders` places the copies in other failure domains: in other slices if there are enough of them, else on
   other hosts, else in other processes of the same host. No copies are made where other processes have the same blocks
   in their own parts, as data-parallel replicas have.
2. When a part is written, a thread sends it to its holders, file by file in chunks, and training waits for none of
   this. If steps come faster than they can be sent, some are left out, the same ones on all hosts. A step that was sent
   is kept until the next one has been. If a holder cannot be reached twice in a row, a warning is printed.
3. Each process serves one TCP port. A `put` stores a copy: under a temporary name, flushed, and renamed as a whole. A
   `get` returns a file of a part or of a copy. A request begins with a token that process 0 draws at the start. Nothing
   else is read before (`runner.distributed.rendezvous`), and the number of requests and of threads is bounded.
4. Before a restore, the processes gather which parts and copies they have, with the fingerprints of the states. If
   a process lacks its part of a step that can be completed, the restore reads that part from a holder, piece by piece
   into memory, and checks its bytes and its bits like those of any other part. If only some files of its own part are
   missing or damaged, it reads these from a holder: each process finds that out alone, while it reads, and tells the
   others in the gather after which they accept or reject the step together. If the bits are wrong although the bytes
   are those that were written, the step is read again, from other hosts that have the same blocks. The process has a
   whole part on its own disk again with the next fast save.
"""

import contextlib
import functools
import hmac
import ipaddress
import json
import os
import queue
import re
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

import jax
import numpy as np

from runner.checkpoint.arrays import INDEX_SUFFIX, encode_index, parse_index
from runner.checkpoint.blocks import (
    Blocks,
    BlockTable,
    Piece,
    Shards,
    parse_records,
    read_blocks,
    read_pieces,
    write_packs,
)
from runner.checkpoint.leaves import Leaves
from runner.checkpoint.manifest import FORMAT, FORMAT_1, Manifest, seal
from runner.console import warn
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.distributed.rendezvous import Acceptor
from runner.errors import InvalidError, NewerFormatError, PeerLostError, format_error, format_reason
from runner.spec import Trajectory, hash_record
from runner.storage import JsonObject, Key, LocalStore, compute_crc32c, parse_json, parse_number, validate_record
from runner.storage.store import fsync, make_directory

PART_FILE = "part.json"
COPIES = "copies"  # subdirectory for copies of the parts of other processes
NUM_KEPT_STEPS = 2
_HOST_FILE = "host"  # with the name of the host to which a directory of parts belongs
_ATTACHMENTS = "companions"  # the key of their names in a part
_PART_KEYS = (Key(_ATTACHMENTS, list, "Names."),)
_CHUNK_BYTES = 2**20
_SOCKET_SECONDS = 120.0  # without progress, such as while a part is flushed, after which a transfer is given up
_ROUND_SECONDS = 7 * 24 * 3600.0  # time to wait for a round
_ACCEPT_SECONDS = 0.1  # after which the port looks if it is to be closed
_NUM_SERVERS = 32  # requests that are answered at the same time, with a buffer of `_CHUNK_BYTES` each
_MAX_REQUESTS = 512  # with the token, that are answered or wait
_MAX_LINE_BYTES = 2**24
_MAX_RANGE_BYTES = 2**28  # of a file that is read from a holder; a run of pieces has at most `PIECE_BYTES`
_STEM = "arrays/blocks"  # of the files with the arrays. The same for all processes: one may have the part of another
_FILE_NAME = re.compile(r"([\w%.,=+@~-]+/)?[\w%.,=+@~-]+")

Fetch = Callable[[str, int, int | None], bytes]  # reads a range of a file of a part; to its end if that is None
Found = TypeVar("Found")


class UnusableTierError(InvalidError):
    """The disk of a host cannot hold its parts."""


class FastPart:
    """Part of a step, whose files are read from the first source that has them intact.

    Attributes:
        sources: places to read from, in this order: the process that has the files, or None for the own disk.
        manifest: the manifest of the part.
        is_fetched: True if a file came from another source than the own disk.
        problems: reasons why files were read from another source than the first.
    """

    def __init__(self, step: int, sources: list[tuple[int | None, Fetch]]):
        """Read `part.json`. Raises `ValueError` if no source has it intact."""
        self.sources = sources
        self.is_fetched = False
        self.problems: list[str] = []

        def parse(fetch: Fetch) -> tuple[Manifest, list[str]]:
            record = parse_json(fetch(PART_FILE, 0, None))
            # Parts of earlier versions have no digest of this file, and no sizes of the attachments.
            digest, written = record.pop("digest", None), record.get("format")
            is_intact = digest == hash_record(record) or (digest is None and written == FORMAT_1)
            if not is_intact or written not in (FORMAT_1, FORMAT):
                raise ValueError(f"{PART_FILE} does not match its own digest, or is of another format")
            validate_record(record, _PART_KEYS, [_ATTACHMENTS])
            manifest = Manifest.from_json(record)
            if manifest.step != step or (manifest.indexes is None and manifest.shards is None):
                raise ValueError(f"{PART_FILE} is of step {manifest.step} and stands in {step}, or names no shards")
            return manifest, list(map(str, record[_ATTACHMENTS]))

        self.manifest, self._attachments = self._try_sources(parse)

    def choose_source(self, number: int, own_process: int, reason: str) -> "FastPart":
        """Return the part as the source with this number has it, by the order of the processes. Raises like `FastPart`.

        Args:
            number: number of the source, counted from 0, modulo the number of sources.
            own_process: the process whose disk is `None` in `sources`.
            reason: reason to read from another source than the own disk.
        """
        sources = sorted(self.sources, key=lambda source: own_process if source[0] is None else source[0])
        number %= len(sources)
        part = FastPart(self.manifest.step, sources[number:] + sources[:number])
        part.problems = [] if sources[number][0] is None else [reason]
        return part

    def read(self, leaves: Leaves) -> dict[str, jax.Array]:
        """Return the leaves of this process. Raises `ValueError` if no source has an intact copy of some file."""
        return read_blocks(self._fetch_run, self._read_shards(), leaves)

    def _read_shards(self) -> Shards:
        files, indexes = self.manifest.files, self.manifest.indexes
        if indexes is None:  # an earlier version has written one file for each piece
            return parse_records(self.manifest.shards or {}, files)
        shards: Shards = {}
        for name in indexes:
            shards |= self._try_sources(functools.partial(_read_index, name, files[name])).shards
        return shards

    def read_attachments(self) -> dict[str, bytes]:
        """Return the small files that were written with the step. Raises as `read` does."""
        return {name: self._fetch(name) for name in self._attachments}

    def _fetch(self, name: str) -> bytes:
        # Parts of earlier versions have no sizes of the attachments.
        if name not in self.manifest.files:
            return self._try_sources(lambda fetch: fetch(name, 0, None))
        piece = Piece(name, 0, *self.manifest.files[name])
        return self._fetch_run([piece])[piece].tobytes()

    def _fetch_run(self, run: list[Piece]) -> dict[Piece, np.ndarray]:
        return self._try_sources(lambda fetch: read_pieces(fetch, run))

    def _try_sources(self, read: Callable[[Fetch], Found]) -> Found:
        """Return what `read` returns for the first source for which it raises no error. Called on any thread."""
        problems = []
        for process, fetch in self.sources:
            try:
                found = read(fetch)
            except (OSError, ValueError, KeyError, TypeError, NewerFormatError) as error:
                problems.append(("" if process is None else f"process {process}: ") + format_reason(error))
                continue
            if process is not None:
                self.is_fetched = True
            self.problems += problems
            return found
        raise ValueError("; ".join(problems))


def _read_index(name: str, entry: list[Any], fetch: Fetch) -> BlockTable:
    return parse_index(name, fetch(name, 0, None), entry)


def make_fetch(store: LocalStore) -> Fetch:
    """Return the function that reads the files of a part on this host's own disk."""

    def fetch(name: str, begin: int, end: int | None) -> bytes:
        return store.read(name) if end is None else store.read_range(name, begin, end, None)

    return fetch


class FastTier:
    """Parts of one process, in its own directory. Made on every host."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.pinned_steps: set[int] = set()  # steps that are kept beside the newest: sent last, and being sent
        self._store = LocalStore(directory)

    def list_parts(
        self, is_own: Callable[[Trajectory, int], bool], last_steps: Mapping[int, int]
    ) -> dict[int, FastPart]:
        """Return by step each part that this run can continue from. Of its files only `part.json` has been read.

        Args:
            is_own: returns True for a trajectory, saved at a step, that this run continues.
            last_steps: by attempt, the lowest step from which a later attempt has resumed; its later parts are ignored.
        """
        found = {}
        for step in self._list_present():
            with contextlib.suppress(ValueError):
                part = FastPart(step, [(None, make_fetch(LocalStore(self.directory / str(step))))])
                manifest = part.manifest
                if is_own(manifest.identity, step) and step <= last_steps.get(manifest.attempt, step):
                    found[step] = part
        return found

    def _list_present(self) -> list[int]:
        return sorted(step for step in map(parse_number, self._store.list_names("")) if step is not None)

    def write(self, manifest: Manifest, blocks: Blocks, attachments: dict[str, bytes]) -> None:
        """Write this process's part of a step, and delete all but the newest `NUM_KEPT_STEPS`. Raises `OSError`."""
        temporary = self.directory / f"{manifest.step}.tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        index = f"{_STEM}{INDEX_SUFFIX}"
        (temporary / index).parent.mkdir(parents=True)
        # In one order, because a process with the same blocks may hold them on its devices in another one.
        in_order = {leaf: sorted(own, key=lambda each: each[0]) for leaf, own in sorted(blocks.items())}
        table = write_packs(temporary, _STEM, in_order)
        for name, content in ({index: encode_index(table)} | attachments).items():
            (temporary / name).write_bytes(content)
            table.files[name] = [len(content), compute_crc32c(content)]
        part = replace(manifest, files=table.files, indexes=[index])
        (temporary / PART_FILE).write_bytes(seal(part.to_json() | {_ATTACHMENTS: sorted(attachments)}))
        self.publish(temporary.name, manifest.step)
        self.delete_old()

    def publish(self, temporary: str, step: int, guard: contextlib.AbstractContextManager[None] | None = None) -> None:
        """Make a directory of complete files the part of a step, inside of `guard` if given. Raises `OSError`."""
        # On a RAM disk a flush costs nothing. On a disk it makes the part one that a power cut of the host spares.
        self._store.flush_tree(temporary)
        with guard or contextlib.nullcontext():
            self._store.remove_tree(str(step))
            os.rename(self.directory / temporary, self.directory / str(step))
        fsync(self.directory)

    def receive(
        self, stream: BinaryIO, step: int, files: Mapping[str, int], guard: contextlib.AbstractContextManager[None]
    ) -> None:
        """Receive a part from another process. Raises `ValueError` or `OSError`, with nothing of it left.

        Args:
            stream: connection, from which the content of the files is read.
            step: step of the part.
            files: size in bytes of each file.
            guard: entered while the part is made visible; an error that it raises prevents that.
        """
        # What a peer sends is data: no name may lead out of the directory, and no size may fill the disk.
        sizes = {_validate_name(name): int(size) for name, size in files.items()}
        self.directory.mkdir(parents=True, exist_ok=True)
        if min(sizes.values(), default=0) < 0 or sum(sizes.values()) > shutil.disk_usage(self.directory).free:
            raise ValueError(f"{self.directory} has no room for a part of {sum(sizes.values()):,} bytes")
        # The thread is in the name because a transfer that was given up may still be writing.
        temporary = self.directory / f"{step}.{threading.get_ident()}.tmp"
        try:
            for name, size in sizes.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                with (temporary / name).open("wb") as file:
                    _copy(stream, file, size)
            self.publish(temporary.name, step, guard)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.delete_old()

    def delete_old(self) -> None:
        """Delete all but the newest `NUM_KEPT_STEPS` and `pinned_steps`."""
        self._delete([step for step in self._list_present()[:-NUM_KEPT_STEPS] if step not in self.pinned_steps])

    def delete_after(self, step: int) -> None:
        """Delete every step beyond `step`, and every part that was never whole."""
        for name in self._store.list_names(""):
            if name.endswith(".tmp"):
                shutil.rmtree(self.directory / name, ignore_errors=True)
        self._delete([other for other in self._list_present() if other > step])

    def _delete(self, steps: list[int]) -> None:
        for step in steps:
            # A part that cannot be deleted only takes space: the next write tries again.
            with contextlib.suppress(OSError):
                self._store.remove_tree(str(step))

    def find_space_problem(self, part_bytes: int, copied_bytes: int, is_sending: bool) -> str | None:
        """Return a message if the disk has no room; None if it has. Raises `OSError`.

        Args:
            part_bytes: size of a part of this process.
            copied_bytes: size of a part of each process of which this one holds copies, together.
            is_sending: True if other processes hold copies for this one.
        """
        make_directory(self.directory)
        # Parts that are there already will be replaced, so their space counts as free.
        own_bytes = sum(self._store.list_sizes("").values())
        free_bytes = shutil.disk_usage(self.directory).free + own_bytes
        # Besides the newest steps, the two of `pinned_steps` and one that is being written; and one being received.
        num_parts = NUM_KEPT_STEPS + 3 * is_sending
        needed_bytes = num_parts * part_bytes + (NUM_KEPT_STEPS + 1) * copied_bytes
        if free_bytes >= needed_bytes:
            return None
        copies = f", and {NUM_KEPT_STEPS + 1} copies of {copied_bytes / 1e9:.3f} GB" if copied_bytes else ""
        return (
            f"{self.directory} has room for {free_bytes / 1e9:.3f} GB, needs {needed_bytes / 1e9:.3f} GB: {num_parts} "
            f"checkpoints of {part_bytes / 1e9:.3f} GB on this host{copies}"
        )


def validate_replica_count(num_replicas: int, hosts: Hosts) -> None:
    """Raise `InvalidError` if the job has too few processes for `checkpoint.local_replicas`."""
    if num_replicas >= hosts.num_processes + hosts.num_missing:
        raise InvalidError(
            f"{num_replicas} needs at least {num_replicas + 1} processes, and the job has {hosts.num_processes}"
        )


def open_fast_tier(
    directory: Path, hosts: Hosts, leaves: Leaves, num_replicas: int = 0
) -> tuple[FastTier, "Replicas | None"]:
    """Open the fast tier of this process, with room for its parts and copies. Called on every host.

    Args:
        directory: the process's own directory.
        hosts: all processes of the job.
        leaves: abstract arrays with shardings, as they are stored.
        num_replicas: `checkpoint.local_replicas`. An elastic job has fewer while hosts are missing.

    Returns:
        The fast tier, and its replicas if there are to be any.

    Raises:
        UnusableTierError: on every host, if the disk of one cannot hold its parts.
    """
    fast_tier, part_bytes, host = FastTier(directory), 0, socket.gethostname()
    blocks_of: dict[str, list[str]] = {}
    for name, leaf in leaves.items():
        # A process keeps each block that it holds once, however many of its devices have a copy.
        blocks = {str(index) for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values()}
        part_bytes += int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize * len(blocks)
        blocks_of[name] = sorted(blocks)
    slice_index = getattr(jax.local_devices()[0], "slice_index", None)
    gathered = hosts.gather([part_bytes, slice_index, host, hash_record(blocks_of)])
    places = [ProcessPlace(*place) for _, *place in gathered]
    own = [process for process, place in enumerate(places) if place.host == host]
    if not num_replicas:
        _clear_former_parts(directory.parent, host, set(map(str, own)), None)
        shutil.rmtree(directory / COPIES, ignore_errors=True)
    elif own[0] == hosts.process_id:
        # One process of a host takes over what its former numbers have left.
        _clear_former_parts(directory.parent, host, set(map(str, own)), directory / COPIES)
    holders = choose_holders(places, min(num_replicas, hosts.num_processes - 1))
    owners = [owner for owner, holding in enumerate(holders) if hosts.process_id in holding]
    try:
        copied_bytes = sum(gathered[owner][0] for owner in owners)
        problem = fast_tier.find_space_problem(part_bytes, copied_bytes, bool(holders[hosts.process_id]))
        LocalStore(directory).write(_HOST_FILE, host.encode())
    except OSError as error:
        problem = f"cannot be written: {error}"
    # The message is gathered, so that all hosts end together and none waits for one that has gone.
    problem = next((text for text in hosts.gather(problem) if text is not None), None)
    if problem is not None:
        raise UnusableTierError(problem)
    if not num_replicas or hosts.num_processes == 1:
        return fast_tier, None
    if hosts.is_main and len({place.host for place in places}) <= num_replicas:
        warn("checkpoint.local_replicas: all copies of a part are on one host, and are lost with it")
    replicas = Replicas(fast_tier, hosts, owners, hosts.agree(secrets.token_hex(16)))
    replicas.connect(hosts.gather([hosts.liveness.get_own_address(), replicas.port]), holders, places)
    return fast_tier, replicas


def _clear_former_parts(directory: Path, host: str, own: set[str], copies: Path | None) -> None:
    """Delete the parts of processes that this host had under other numbers, before the job lost or exchanged a host.

    Args:
        directory: directory of the run, with a directory for each process.
        host: name of this host. Where hosts share a disk, those of the others are left alone.
        own: numbers of the processes on this host.
        copies: directory to which the parts are moved instead, from where the other processes can fetch them.
    """
    with contextlib.suppress(OSError):
        for path in directory.iterdir():
            if parse_number(path.name) is None or path.name in own:
                continue
            with contextlib.suppress(OSError, ValueError):
                if LocalStore(path).read(_HOST_FILE).decode() != host:
                    continue
                if copies is not None:
                    former = path / COPIES
                    for source in [path, *(former.iterdir() if former.is_dir() else [])]:
                        (copies / source.name).mkdir(parents=True, exist_ok=True)
                        for part in source.iterdir():
                            target = copies / source.name / part.name
                            if parse_number(part.name) is not None and not target.exists():
                                os.rename(part, target)
                shutil.rmtree(path, ignore_errors=True)


# Replicas.


@dataclass(frozen=True)
class ProcessPlace:
    """Place of a process, for the choice of those that hold copies for it.

    Attributes:
        slice_index: slice of its devices; None if there is only one.
        host: name of its host.
        blocks: digest of the blocks that its part contains.
    """

    slice_index: int | None
    host: str
    blocks: str


def choose_holders(places: Sequence[ProcessPlace], count: int) -> list[list[int]]:
    """Return for each process the processes to which it sends copies of its parts: `count`, or none.

    A process sends none if as many others have the same blocks in their own parts, as data-parallel replicas have.
    Process 0 always sends its part, because it alone has the attachments.
    """
    hosts = [place.host for place in places]
    levels: list[list[Any]] = [[place.slice_index for place in places], hosts, list(range(len(places)))]
    # The coarsest domains of which there are enough.
    domain_of = next(level for level in levels if len(set(level)) > count)
    members: dict[Any, list[int]] = {}
    domains_with: dict[str, set[Any]] = {}  # by blocks
    for process, (domain, place) in enumerate(zip(domain_of, places, strict=True)):
        members.setdefault(domain, []).append(process)
        domains_with.setdefault(place.blocks, set()).add(domain)
    domains = list(members)
    holders: list[list[int]] = [[] for _ in places]
    for number, own in enumerate(members.values()):
        others = [members[domains[(number + offset) % len(domains)]] for offset in range(1, count + 1)]
        for index, process in enumerate(own):
            # One of the domains with these blocks is its own.
            if process == 0 or len(domains_with[places[process].blocks]) <= count:
                holders[process] = [other[index % len(other)] for other in others]
    return holders


class Replicas:
    """Copies that this process holds for others, and its connections to them. Made by `open_fast_tier`.

    Parts are sent in rounds: process 0 chooses a step, all processes send their parts of it, and the next round begins
    when all have. So there are copies of the same steps of all processes, however slow the network is. A round and its
    requests belong to a *generation*. A holder refuses requests of an earlier generation than its own.
    """

    def __init__(self, fast_tier: FastTier, hosts: Hosts, owners: Sequence[int], token: str):
        """Start to serve requests.

        Args:
            fast_tier: the fast tier of this process.
            hosts: all processes of the job.
            owners: processes of whose parts this process holds copies.
            token: secret of this start of the job.
        """
        self._fast_tier, self._hosts, self._owners, self._token = fast_tier, hosts, owners, token
        self._addresses: list[tuple[str, int]] = []  # of the server of each process
        self._holders: Sequence[int] = ()
        self._places: Sequence[ProcessPlace] = ()
        self._num_failures: dict[int, int] = {}  # transfers to a holder that failed, one after another
        self._changed = threading.Condition()
        self._waiting_step: int | None = None  # for the next round
        self._written_step = -1  # the last one of which this process has its part
        self._generation, self._is_closing = 0, False
        self._requests: queue.SimpleQueue[socket.socket | None] = queue.SimpleQueue()
        self._num_requests, self._num_servers = 0, 0  # that wait or are answered; threads that answer them
        has_both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if has_both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=128, dualstack_ipv6=has_both)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(listener, len(token) + 1)
        self._accepting = threading.Thread(target=self.accept_requests, name="replicas", daemon=True)
        self._accepting.start()

    def connect(
        self,
        addresses: Sequence[tuple[str, int]],
        holders: Sequence[Sequence[int]],
        places: Sequence[ProcessPlace],
    ) -> None:
        """Begin to send parts.

        Args:
            addresses: address and port of each process.
            holders: processes that hold copies, for each process.
            places: places of all processes.
        """
        # Another process of a host may know an address by which other hosts reach it, where one knows loopback alone.
        best: dict[str, str] = {}
        for place, (address, _) in zip(places, addresses, strict=True):
            if not ipaddress.ip_address(address).is_loopback:
                best[place.host] = address
        self._addresses = [
            (best.get(place.host, address), port) for place, (address, port) in zip(places, addresses, strict=True)
        ]
        self._holders, self._places = holders[self._hosts.process_id], places
        if any(holders):
            threading.Thread(target=self._send_in_rounds, name="send replicas", daemon=True).start()

    def send(self, step: int) -> None:
        """Report that this process has its part of a step; process 0 chooses it for the next round. Never waits."""
        with self._changed:
            self._waiting_step = self._written_step = step
            self._changed.notify_all()

    def begin_generation(self) -> None:
        """Invalidate all copies that have not arrived yet. Called on every host, before a barrier."""
        with self._changed:
            self._generation += 1
            self._waiting_step, self._written_step = None, -1
            self._changed.notify_all()

    def list_parts(
        self, is_own: Callable[[Trajectory, int], bool], last_steps: Mapping[int, int], first_step: int
    ) -> dict[int, FastPart]:
        """Return the parts of this process, with all that other processes have of them. Called on every host.

        Parts that this process lacks are included, if all processes can get theirs of the same state.

        Args:
            is_own: returns True for a trajectory, saved at a step, that this run continues.
            last_steps: as in `FastTier.list_parts`.
            first_step: lowest step worth restoring.
        """
        process_id, everyone = self._hosts.process_id, range(self._hosts.num_processes)
        parts = self._fast_tier.list_parts(is_own, last_steps)
        copies = [(owner, self._open_copies(owner).list_parts(is_own, last_steps)) for owner in self._list_copied()]
        listed = [
            [owner, step, part.manifest.fingerprint]
            for owner, present in [(process_id, parts), *copies]
            for step, part in present.items()
        ]
        # (holder, owner) of each part or copy, by its blocks and by the state.
        holdings: dict[tuple[str, int, str], list[tuple[int, int]]] = {}
        for holder, of_holder in enumerate(self._hosts.gather(listed)):
            for owner, step, digest in of_holder:
                if owner in everyone:
                    holdings.setdefault((self._places[owner].blocks, step, digest), []).append((holder, owner))

        def list_whole(process: int, step: int, digest: str) -> list[tuple[int, int]]:
            """Return (holder, owner) of each part that a process can use as its own."""
            found = holdings.get((self._places[process].blocks, step, digest), [])
            return [each for each in found if process or each[1] == 0]  # Only the part of process 0 has attachments.

        def make_sources(found: Iterable[tuple[int, int]]) -> list[tuple[int | None, Fetch]]:
            return [(holder, functools.partial(self.fetch, step, holder, owner)) for holder, owner in found]

        for step, digest in sorted({(step, digest) for _, step, digest in holdings}):
            if step < first_step or not all(list_whole(process, step, digest) for process in everyone):
                continue
            part = parts.get(step)
            if part is not None and part.manifest.fingerprint == digest:
                found = holdings[self._places[process_id].blocks, step, digest]
                part.sources += make_sources(each for each in found if each != (process_id, process_id))
            else:
                with contextlib.suppress(ValueError):
                    parts[step] = FastPart(step, make_sources(list_whole(process_id, step, digest)))
        return parts

    def delete_after(self, step: int) -> None:
        """Delete copies of steps beyond `step`, and those of processes for which this one is no holder any more."""
        for owner in self._list_copied():
            if owner in self._owners:
                self._open_copies(owner).delete_after(step)
            else:
                shutil.rmtree(self._get_directory(owner), ignore_errors=True)

    def close(self) -> None:
        """Stop serving and sending."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._accepting.join()

    # Sending.

    def _send_in_rounds(self) -> None:
        """Send this process's part of the step of each round. Ends with the job."""
        store, number, last_step = self._hosts.store, 0, -1
        with contextlib.suppress(PeerLostError):
            while not self._is_closing:
                number += 1
                key = f"{key_value.REPLICA_ROUNDS}/{number}"
                if self._hosts.is_main:
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing or self._waiting_step is not None)
                        step, self._waiting_step = self._waiting_step, None
                        generation = self._generation
                    store.set(key, [step, generation])
                    store.delete(f"{key_value.REPLICA_ROUNDS}/{number - 2}")
                step, generation = store.get(key, _ROUND_SECONDS, "the next round of replicas")
                if step is None:
                    return
                self._fast_tier.pinned_steps = {last_step, step}
                self._wait_until_written(step, generation)
                for holder in self._holders:
                    self.send_to_holder(holder, step, generation)
                last_step = step
                self._hosts.collect(key_value.replica_folder(number), None, _ROUND_SECONDS)

    def _wait_until_written(self, step: int, generation: int) -> None:
        """Wait for this process's part of a step, which process 0 may have written sooner."""

        def is_written_or_given_up() -> bool:
            return self._is_closing or self._generation != generation or self._written_step >= step

        with self._changed:
            self._changed.wait_for(is_written_or_given_up, _SOCKET_SECONDS)

    def send_to_holder(self, holder: int, step: int, generation: int) -> None:
        """Send this process's part of a step to one holder. Warns at the second failure in a row; never raises."""
        directory = self._fast_tier.directory / str(step)
        try:
            paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            files = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
            if not files:
                raise ValueError(f"{directory}: there is no such part")
            request = {"kind": "put", "owner": self._hosts.process_id, "step": step, "files": files}
            with self.request(holder, request | {"generation": generation}) as stream:
                for path in paths:
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, stream, _CHUNK_BYTES)
                stream.flush()
                _read_answer(stream)
            self._num_failures[holder] = 0
        except Exception as error:  # noqa: BLE001 - a failed copy must not end the thread
            # The first failure may be that of a step which was given up, or of a job that ends.
            self._num_failures[holder] = number = self._num_failures.get(holder, 0) + 1
            if number == 2:
                warn(f"step {step} has no replica on process {holder}: {format_error(error)}")

    @contextlib.contextmanager
    def request(self, process: int, request: JsonObject) -> Iterator[BinaryIO]:
        """Connect to a process, send the request, and give the stream."""
        with (
            socket.create_connection(self._addresses[process], _SOCKET_SECONDS) as connection,
            connection.makefile("rwb", buffering=_CHUNK_BYTES) as file,
        ):
            stream = cast(BinaryIO, file)
            stream.write(self._token.encode() + b"\n")
            _write_line(stream, request)
            yield stream

    def fetch(self, step: int, holder: int, owner: int, name: str, begin: int, end: int | None) -> bytes:
        """Return a range of a file of the part of `owner` that `holder` has.

        Args:
            step: step of the part.
            holder: process that is asked.
            owner: process that has written the part.
            name: name of the file.
            begin: offset of the first byte.
            end: offset after the last byte; None for the end of the file.

        Raises:
            OSError: the holder cannot be reached.
            ValueError: it does not have the range. `KeyError` or `TypeError`: its answer is wrong.
        """
        request = {"kind": "get", "owner": owner, "step": step, "file": name, "begin": begin, "end": end}
        with self.request(holder, request) as stream:
            size = int(_read_answer(stream)["size"])
            if not 0 <= size <= _MAX_RANGE_BYTES:
                raise ValueError(f"a range of a file of a part cannot have {size:,} bytes")
            content = stream.read(size)
        if len(content) != size:
            raise ValueError(f"the connection was closed in the middle of {name}")
        return content

    # Serving.

    def accept_requests(self) -> None:
        """Pass on the connections that have sent the token of this start of the job. A thread, ends with `close`."""
        while not self._is_closing:
            for connection, line in self._acceptor.poll(_ACCEPT_SECONDS):
                problem = None
                if not hmac.compare_digest(line.strip(), self._token.encode()):
                    problem = "the token is not that of this start of the job"
                elif self._num_requests >= _MAX_REQUESTS:
                    problem = f"process {self._hosts.process_id} has {_MAX_REQUESTS} requests already"
                if problem is not None:
                    with connection, contextlib.suppress(OSError):
                        with contextlib.suppress(BlockingIOError):
                            # What has come of the request: unread bytes could make the answer unreadable.
                            connection.recv(_CHUNK_BYTES)
                        connection.send(json.dumps({"error": f"ValueError: {problem}"}).encode() + b"\n")
                    continue
                with self._changed:
                    self._num_requests += 1
                self._requests.put(connection)
                if self._num_servers < min(self._num_requests, _NUM_SERVERS):
                    self._num_servers += 1
                    threading.Thread(target=self.answer_requests, name="replica", daemon=True).start()
        self._acceptor.close()
        for _ in range(self._num_servers):
            self._requests.put(None)

    def answer_requests(self) -> None:
        """Answer one request after the other. A thread, ends with `close`."""
        while (connection := self._requests.get()) is not None:
            connection.settimeout(_SOCKET_SECONDS)
            # A request comes from the network: nothing in it may end more than its own connection.
            with (
                contextlib.suppress(OSError),
                connection,
                connection.makefile("rwb", buffering=_CHUNK_BYTES) as stream,
            ):
                try:
                    self.answer_request(cast(BinaryIO, stream))
                except Exception as error:  # noqa: BLE001
                    _write_line(cast(BinaryIO, stream), {"error": format_error(error)})
            with self._changed:
                self._num_requests -= 1

    def answer_request(self, stream: BinaryIO) -> None:
        """Answer one request, whose token has been read. Raises any error if it is wrong."""
        request = _read_line(stream)
        owner, step = int(request["owner"]), int(request["step"])
        if request["kind"] == "put":
            if owner not in self._owners:
                raise ValueError(f"process {self._hosts.process_id} holds no copies for process {owner}")
            guard = self.hold_generation(request["generation"])
            self._open_copies(owner).receive(stream, step, request["files"], guard)
            _write_line(stream, {"error": None})
        else:
            directory = self._get_directory(owner) / str(step)
            own_directory = self._fast_tier.directory / str(step)
            if owner == self._hosts.process_id and own_directory.exists():
                directory = own_directory
            with LocalStore(directory).open(_validate_name(request["file"])) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                begin, end = int(request["begin"]), num_bytes if request["end"] is None else int(request["end"])
                if not 0 <= begin <= end <= num_bytes:
                    raise ValueError(f"the file has {num_bytes} bytes, not {begin}..{end}")
                _write_line(stream, {"error": None, "size": end - begin})
                file.seek(begin)
                _copy(file, stream, end - begin)
            stream.flush()

    @contextlib.contextmanager
    def hold_generation(self, generation: int) -> Iterator[None]:
        """Prevent a new generation while a copy is published. Raises `ValueError` if the copy is of an earlier one."""
        with self._changed:
            if generation != self._generation:
                raise ValueError("the step was given up meanwhile")
            yield

    def _get_directory(self, owner: int) -> Path:
        return self._fast_tier.directory / COPIES / str(owner)

    def _open_copies(self, owner: int) -> FastTier:
        return FastTier(self._get_directory(owner))

    def _list_copied(self) -> list[int]:
        """Return the processes of which this one has copies."""
        try:
            names = os.listdir(self._fast_tier.directory / COPIES)
        except OSError:
            return []
        return sorted(owner for owner in map(parse_number, names) if owner is not None)


# Protocol: a request is the line of the token and a line of JSON, an answer a line of JSON. Files follow the line with
# their sizes, in its order.


def _write_line(stream: BinaryIO, record: JsonObject) -> None:
    stream.write(json.dumps(record).encode() + b"\n")
    stream.flush()


def _read_line(stream: BinaryIO) -> JsonObject:
    line = stream.readline(_MAX_LINE_BYTES)
    record = json.loads(line) if line.endswith(b"\n") else None
    if not isinstance(record, dict):
        raise ValueError("the connection was closed")
    return record


def _read_answer(stream: BinaryIO) -> JsonObject:
    answer = _read_line(stream)
    if answer.get("error") is not None:
        raise ValueError(str(answer["error"]))
    return answer


def _copy(source: BinaryIO, target: BinaryIO, num_bytes: int) -> None:
    """Copy so many bytes. Raises `ValueError` if the source ends earlier."""
    while num_bytes:
        chunk = source.read(min(num_bytes, _CHUNK_BYTES))
        if not chunk:
            raise ValueError(f"{num_bytes} bytes are missing at the end")
        target.write(chunk)
        num_bytes -= len(chunk)


def _validate_name(name: Any) -> str:
    """Return the name of a file of a part. Raises `ValueError` if it could lead out of the part's directory."""
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name) or {".", ".."} & set(name.split("/")):
        raise ValueError(f"a part cannot contain a file {name!r}")
    return name
