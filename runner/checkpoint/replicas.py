"""Replicas: copies of the parts of the fast tier on other hosts.

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
4. Before a restore, process 0 learns which parts and copies all processes have, with the fingerprints of the states,
   and tells each process where its own blocks are. If a process lacks its part of a step that can be completed, the
   restore reads that part from a holder, piece by piece into memory, and checks its bytes and its bits like those of
   any other part. If only some files of its own part are missing or damaged, it reads these from a holder: each process
   finds that out alone, while it reads, and tells the others in the gather after which they accept or reject the step
   together. If the bits are wrong although the bytes
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
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from runner.checkpoint.parts import CHUNK_BYTES, FastPart, Fetch, PartDirectory, copy_bytes, validate_name
from runner.console import warn
from runner.distributed import key_value
from runner.distributed.agreement import Hosts
from runner.distributed.rendezvous import Acceptor
from runner.errors import InvalidError, PeerLostError, format_error
from runner.spec import Trajectory
from runner.storage import JsonObject, LocalStore, parse_number

COPIES = "copies"  # subdirectory for copies of the parts of other processes
_SOCKET_SECONDS = 120.0  # without progress, such as while a part is flushed, after which a transfer is given up
_ROUND_SECONDS = 7 * 24 * 3600.0  # time to wait for a round
_ACCEPT_SECONDS = 0.1  # after which the port looks if it is to be closed
_NUM_SERVERS = 32  # requests that are answered at the same time, with a buffer of `CHUNK_BYTES` each
_MAX_SOURCES = 8  # of a part, that a process is told of
_MAX_REQUESTS = 512  # with the token, that are answered or wait
_MAX_LINE_BYTES = 2**24
_MAX_RANGE_BYTES = 2**28  # of a file that is read from a holder; a run of pieces has at most `PIECE_BYTES`


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


def validate_replica_count(num_replicas: int, hosts: Hosts) -> None:
    """Raise `InvalidError` if the job has too few processes for `checkpoint.local_replicas`."""
    if num_replicas >= hosts.num_processes + hosts.num_missing:
        raise InvalidError(
            f"{num_replicas} needs at least {num_replicas + 1} processes, and the job has {hosts.num_processes}"
        )


def locate_parts(
    listed: Sequence[Sequence[tuple[int, int, str]]], blocks: Sequence[str], first_step: int
) -> list[list[tuple[int, str, list[tuple[int, int]]]]]:
    """Return for each process where it finds its blocks of each state that all processes have or can get.

    Each entry has the step, the fingerprint of the state, and at most `_MAX_SOURCES` pairs of a holder and the owner of
    the part or copy that it holds.

    Args:
        listed: owner, step and fingerprint of each part and copy, by holder.
        blocks: digest of the blocks that the part of each process contains.
        first_step: lowest step of interest.
    """
    num_processes = len(blocks)
    holdings: dict[tuple[int, str], dict[str, list[tuple[int, int]]]] = {}  # by state, then by blocks
    for holder, of_holder in enumerate(listed):
        for owner, step, digest in of_holder:
            if step >= first_step and owner < num_processes:
                holdings.setdefault((step, digest), {}).setdefault(blocks[owner], []).append((holder, owner))
    located: list[list[tuple[int, str, list[tuple[int, int]]]]] = [[] for _ in blocks]
    for step, digest in sorted(holdings):
        found = [holdings[step, digest].get(own, []) for own in blocks]
        if not all(found) or not any(owner == 0 for _, owner in found[0]):
            continue
        for process, usable in enumerate(found):
            # What it has itself, which for process 0 should be its own part, then what its neighbours do not ask for.
            first = process % len(usable)
            nearest = sorted(usable[first:] + usable[:first], key=lambda place: (place[0] != process, place[1] != 0))
            located[process].append((step, digest, nearest[:_MAX_SOURCES]))
    return located


class Replicas:
    """Copies that this process holds for others, and its connections to them. Made by `runner.checkpoint.fast_tier`.

    Parts are sent in rounds: process 0 chooses a step, all processes send their parts of it, and the next round begins
    when all have. So there are copies of the same steps of all processes, however slow the network is. A round and its
    requests belong to a *generation*. A holder refuses requests of an earlier generation than its own.
    """

    def __init__(self, parts: PartDirectory, hosts: Hosts, owners: Sequence[int], token: str):
        """Start to serve requests.

        Args:
            parts: parts of this process.
            hosts: all processes of the job.
            owners: processes of whose parts this process holds copies.
            token: secret of this start of the job.
        """
        self._parts, self._hosts, self._owners, self._token = parts, hosts, owners, token
        self._addresses: dict[int, tuple[str, int]] = {}  # of the servers of processes; on process 0 of all
        self._holders: Sequence[int] = ()
        self._places: Sequence[ProcessPlace] = ()  # of all processes, on process 0
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

    def connect(self, address: str, holders: Sequence[int], place: ProcessPlace) -> None:
        """Begin to send parts. Called on every host.

        Args:
            address: address of this process on its connections to others.
            holders: processes that hold copies of the parts of this one.
            place: place of this process.
        """

        def find_addresses(values: list[Any]) -> list[Any]:
            self._places = [ProcessPlace(*fields) for _, _, _, fields in values]
            # Another process of a host may know an address by which other hosts reach it, where one knows loopback
            # alone.
            best = {
                place.host: address
                for place, (address, *_) in zip(self._places, values, strict=True)
                if not ipaddress.ip_address(address).is_loopback
            }
            everyone = [
                (best.get(place.host, address), port)
                for place, (address, port, *_) in zip(self._places, values, strict=True)
            ]
            self._addresses = dict(enumerate(everyone))
            return [[(holder, everyone[holder]) for holder in own] for _, _, own, _ in values]

        self._holders = holders
        self._add_addresses(self._hosts.distribute([address, self.port, [*holders], astuple(place)], find_addresses))
        threading.Thread(target=self._send_in_rounds, name="send replicas", daemon=True).start()

    def _add_addresses(self, addresses: Iterable[tuple[int, Sequence[Any]]]) -> None:
        self._addresses.update((process, (host, port)) for process, (host, port) in addresses)

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
            last_steps: as in `PartDirectory.list_parts`.
            first_step: lowest step worth restoring.
        """
        parts = self._parts.list_parts(is_own, last_steps)
        copies = [(owner, self._open_copies(owner).list_parts(is_own, last_steps)) for owner in self._list_copied()]
        listed = [
            (owner, step, part.manifest.fingerprint)
            for owner, present in [(self._hosts.process_id, parts), *copies]
            for step, part in present.items()
        ]

        def locate(everywhere: list[Any]) -> list[Any]:
            located = locate_parts(everywhere, [place.blocks for place in self._places], first_step)
            holders = [{holder for *_, found in own for holder, _ in found} for own in located]
            return [
                [own, [(holder, self._addresses[holder]) for holder in needed]]
                for own, needed in zip(located, map(sorted, holders), strict=True)
            ]

        located, addresses = self._hosts.distribute(listed, locate)
        self._add_addresses(addresses)
        process_id = self._hosts.process_id
        for step, digest, found in located:
            part = parts.get(step)
            has_part = part is not None and part.manifest.fingerprint == digest
            if has_part:
                usable = [place for place in found if tuple(place) != (process_id, process_id)]
            else:
                # Only the part of process 0 has attachments.
                usable = [(holder, owner) for holder, owner in found if process_id != 0 or owner == 0]
            sources: list[tuple[int | None, Fetch]] = [
                (holder, functools.partial(self.fetch, step, holder, owner)) for holder, owner in usable
            ]
            if part is not None and has_part:
                part.sources += sources
            else:
                with contextlib.suppress(ValueError):
                    parts[step] = FastPart(step, sources)
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
                self._parts.pinned_steps = {last_step, step}
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
        directory = self._parts.directory / str(step)
        try:
            paths = [path for path in sorted(directory.rglob("*")) if path.is_file()]
            files = {path.relative_to(directory).as_posix(): path.stat().st_size for path in paths}
            if not files:
                raise ValueError(f"{directory}: there is no such part")
            request = {"kind": "put", "owner": self._hosts.process_id, "step": step, "files": files}
            with self.request(holder, request | {"generation": generation}) as stream:
                for path in paths:
                    with path.open("rb") as file:
                        shutil.copyfileobj(file, stream, CHUNK_BYTES)
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
            connection.makefile("rwb", buffering=CHUNK_BYTES) as file,
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
                            connection.recv(CHUNK_BYTES)
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
            with contextlib.suppress(OSError), connection, connection.makefile("rwb", buffering=CHUNK_BYTES) as stream:
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
            own_directory = self._parts.directory / str(step)
            if owner == self._hosts.process_id and own_directory.exists():
                directory = own_directory
            with LocalStore(directory).open(validate_name(request["file"])) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                begin, end = int(request["begin"]), num_bytes if request["end"] is None else int(request["end"])
                if not 0 <= begin <= end <= num_bytes:
                    raise ValueError(f"the file has {num_bytes} bytes, not {begin}..{end}")
                _write_line(stream, {"error": None, "size": end - begin})
                file.seek(begin)
                copy_bytes(file, stream, end - begin)
            stream.flush()

    @contextlib.contextmanager
    def hold_generation(self, generation: int) -> Iterator[None]:
        """Prevent a new generation while a copy is published. Raises `ValueError` if the copy is of an earlier one."""
        with self._changed:
            if generation != self._generation:
                raise ValueError("the step was given up meanwhile")
            yield

    def _get_directory(self, owner: int) -> Path:
        return self._parts.directory / COPIES / str(owner)

    def _open_copies(self, owner: int) -> PartDirectory:
        return PartDirectory(self._get_directory(owner))

    def _list_copied(self) -> list[int]:
        """Return the processes of which this one has copies."""
        try:
            names = os.listdir(self._parts.directory / COPIES)
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
