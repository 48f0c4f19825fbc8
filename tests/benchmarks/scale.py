"""Cost at process 0, in the coordinator and in the bucket, by number of hosts, of what all hosts do together.

The hosts are threads of this process. They run the runner's own rendezvous, agreement, watchdogs, saves and restores
over sockets, and over a coordinator and a bucket in memory, which count: calls and bytes of the coordinator, requests
to the bucket, bytes of the manifest and of the record of a crash, and the CPU time of process 0. Hosts hold the shards
of `--chips` chips of a state of `--leaves` leaves. Exponents are those of the growth from the number of hosts before: 1
is linear, 2 quadratic.

The bucket takes the time of a real one for each request and each byte, and refuses requests beyond a number a second,
which the runner then tries again. The seconds of a save contain those in which this machine computes for all hosts.

Above 1,024 hosts, saves, restores and replicas are left out, since the work of so many hosts takes one machine long.

With `--gib` each host writes as many objects as for a state of so many GiB a host: their size is scaled down, and the
bucket takes the time of the whole size.

    python -m tests.benchmarks.scale [--hosts 16 64 256] [--chips 8] [--leaves 60] [--gib 4.7]
"""

import argparse
import collections
import io
import math
import multiprocessing
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from runner.attempts.attempt import Attempt, IncidentRecorder
from runner.attempts.events import EventLog
from runner.checkpoint import blocks
from runner.checkpoint.arrays import ArrayReader, ArrayWriter, open_arrays
from runner.checkpoint.manifest import Manifest, read_manifest
from runner.checkpoint.parts import PartDirectory
from runner.checkpoint.replicas import COPIES, ProcessPlace, Replicas
from runner.data.remote import CacheSettings
from runner.data.source_files import BucketFile, BucketFiles
from runner.data.token_files import open_token_files
from runner.distributed.agreement import Hosts, Liveness
from runner.distributed.clock import Clock
from runner.distributed.limits import raise_descriptor_limit
from runner.distributed.rendezvous import Placement, wait_for_peers
from runner.distributed.watchdog import Diagnosis, Periods, Watchdog
from runner.spec import Deadlines
from runner.storage import JsonlLog, LocalStore
from runner.storage.bucket import ObjectInfo
from runner.storage.store import TransientError, Version, compute_crc32c
from tests.support.attempt import make_attempt
from tests.support.coordinator import MemoryCoordinator
from tests.support.memory_bucket import MemoryDriver, make_memory_bucket

SHARD_ELEMENTS = 8  # of float32, in each shard: the size of arrays is not measured
DEADLINE_SECONDS = 3600.0
TARGET = "checkpoints/1/arrays.1"
LATENCY_SECONDS, BYTES_PER_SECOND = 0.03, 100e6  # of a request to the bucket, and of its connection
REQUESTS_PER_SECOND = {"put": 3500, "delete": 3500, "delete_batch": 3500, "get": 5500, "list": 5500}  # S3, one prefix
PAGE_KEYS = 1000  # of a listing
DATA_FILES, DATA_TOKENS = 1000, 1 << 15  # of a source, and in each file
DOLLARS = {"put": 5e-6, "list": 5e-6, "get": 4e-7}  # of a request to S3 Standard


@dataclass
class Pod:
    """Hosts that run in threads, with their coordinator and bucket."""

    num_hosts: int
    num_chips: int
    num_leaves: int
    scratch: Path
    bytes_scale: float | None = None  # bytes for which a byte of an array stands; None: the bucket takes no time
    requests: "collections.Counter[str]" = field(default_factory=collections.Counter)
    sizes: dict[str, float] = field(default_factory=dict)  # of what an act has written, by name

    def __post_init__(self) -> None:
        self.coordinator = MemoryCoordinator(self.num_hosts)
        self.hosts = self.coordinator.hosts(DEADLINE_SECONDS)
        self.bucket = make_memory_bucket(self._make_driver())
        self.manifest = Manifest(name="1", step=1, arrays="arrays.1")
        self.sharding = _FirstAxis(self.num_hosts, self.num_chips)

    def _make_driver(self) -> MemoryDriver:
        if self.bytes_scale is not None:
            return _TimedDriver(lambda name: self.requests.update([name]), self.bytes_scale)
        driver = MemoryDriver()
        driver.before = lambda verb, key: self.requests.update([verb])
        return driver

    def run_on_all(self, act: Callable[[Hosts], Any], chosen: Sequence[Hosts] | None = None) -> tuple[list[Any], float]:
        """Call `act` on all hosts, or on the `chosen` ones, at once; return results, and CPU seconds of process 0."""
        results: dict[int, Any] = {}
        seconds = [0.0]

        def run(hosts: Hosts) -> None:
            began = time.thread_time()
            results[hosts.process_id] = act(hosts)
            if hosts.is_main:
                seconds[0] = time.thread_time() - began

        threads = [threading.Thread(target=run, args=(each,)) for each in chosen or self.hosts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [result for _, result in sorted(results.items())], seconds[0]

    def make_leaves(self, process: int) -> dict[str, Any]:
        """Return what a writer uses of the arrays of one process, each split over all chips along its first axis."""
        rows = range(process * self.num_chips, (process + 1) * self.num_chips)
        found = {}
        for number in range(self.num_leaves):
            shards = [
                SimpleNamespace(
                    replica_id=0,
                    index=(slice(row, row + 1), slice(0, SHARD_ELEMENTS)),
                    data=np.full((1, SHARD_ELEMENTS), row + number, np.float32).view(_HostArray),
                )
                for row in rows
            ]
            shape = self.num_hosts * self.num_chips, SHARD_ELEMENTS
            found[f"params.layer{number:03}.kernel"] = SimpleNamespace(
                addressable_shards=shards,
                shape=shape,
                size=math.prod(shape),
                dtype=np.dtype(np.float32),
                sharding=self.sharding,
            )
        return found

    # What is measured.

    def join(self) -> float:
        """Meet at process 0, over real sockets of this machine."""
        with socket.create_server(("127.0.0.1", 0)) as probe:
            coordinator = f"127.0.0.1:{probe.getsockname()[1]}"

        def join(hosts: Hosts) -> None:
            found = wait_for_peers(Placement(coordinator, self.num_hosts, hosts.process_id), DEADLINE_SECONDS)
            for connection in found.peer_sockets.values():
                connection.close()

        raise_descriptor_limit(2 * self.num_hosts)
        # The others have a process of their own, since thousands of threads would slow down the one of process 0.
        others = multiprocessing.get_context("fork").Process(target=self.run_on_all, args=(join, self.hosts[1:]))
        others.start()
        began = time.thread_time()
        join(self.hosts[0])
        cpu_seconds = time.thread_time() - began
        others.join()
        return cpu_seconds

    def start(self) -> float:
        """Gather what differs little, as ten times in a start, and make one decision."""
        return self.run_on_all(lambda hosts: (hosts.gather(["mesh", 8, "a" * 64]), hosts.agree({"step": 3})))[1]

    def reduce_places(self) -> float:
        """Compare the versions of all hosts, of which each has another name, as twice in a start."""
        versions = {f"distribution-{number}": "1.2.3" for number in range(20)}

        def reduce(hosts: Hosts) -> Any:
            place = [f"host-{hosts.process_id}.cluster.example.com", versions]
            return hosts.reduce(place, lambda places: [place[1] for place in places].count(versions))

        return self.run_on_all(reduce)[1]

    def read_data(self) -> float:
        """Find the layout and the sample of token files in a bucket at process 0, and give both to all hosts."""
        content = io.BytesIO()
        np.save(content, np.arange(DATA_TOKENS, dtype=np.uint16))
        driver, size_bytes = self._make_driver(), len(content.getvalue())
        driver.objects = {f"run/{number:04}.npy": (content.getvalue(), "1") for number in range(DATA_FILES)}
        store = make_memory_bucket(driver)
        files = tuple(BucketFile(store.url, f"{number:04}.npy", size_bytes, "1") for number in range(DATA_FILES))

        def find() -> Any:
            tokens = open_token_files(BucketFiles("data", files, store, True), CacheSettings(self.scratch / "cache"))
            return tokens.fingerprint, tokens.records

        return self.run_on_all(lambda hosts: hosts.run_on_main(find))[1]

    def gather_names(self) -> float:
        """Gather a value of each host that no other has, the worst case of a gather."""
        return self.run_on_all(lambda hosts: hosts.gather(f"host-{hosts.process_id}.cluster.example.com"))[1]

    def find_parts(self) -> float:
        """Connect the replicas of all hosts, and find their parts of a step, of which one host has lost its own."""

        def find(hosts: Hosts) -> None:
            number, process = self.num_hosts, hosts.process_id
            directory = self.scratch / "fast" / str(process)
            owners = [(process - 1) % number]
            replicas = Replicas(PartDirectory(directory), hosts, owners, "token")
            for owner, parts in [(process, directory), (owners[0], directory / COPIES / str(owners[0]))]:
                if process != 1 or owner != process:
                    PartDirectory(parts).write(Manifest(name="1", step=1, attempt=1, fingerprint="f"), {}, {})
            try:
                place = ProcessPlace(None, f"host-{process}.cluster.example.com", f"{process:064}")
                replicas.connect("127.0.0.1", [(process + 1) % number], place)
                assert [*replicas.list_parts(lambda *_: True, {}, 0)] == [1]
                hosts.barrier()
            finally:
                replicas.close()

        return self.run_on_all(find)[1]

    def stop(self) -> float:
        """Agree on the step of a stop."""
        return self.run_on_all(lambda hosts: hosts.agree_on_tick(8))[1]

    def watch(self) -> float:
        """Exchange the heartbeats of a period, whose CPU seconds are given for each second of the job."""
        watchdogs = [Watchdog(hosts, Deadlines(), Clock(), *[lambda *_: None] * 3) for hosts in self.hosts]
        for _ in range(2):  # the second time all heartbeats are there
            cpu_seconds = self.run_on_all(lambda hosts: watchdogs[hosts.process_id]._poll())[1]
        return cpu_seconds / Periods.choose(self.num_hosts).poll_seconds

    def crash(self) -> float:
        """End the last host: process 0 finds out and names it, and the hosts that are to record it do so."""
        raise_descriptor_limit(2 * self.num_hosts)  # both ends of the connections are in this process
        ends = {process: socket.socketpair() for process in range(1, self.num_hosts)}
        main = self.hosts[0]
        liveness = Liveness(main.store, 0, self.num_hosts, {process: near for process, (near, _) in ends.items()})
        attempt = make_attempt(LocalStore(self.scratch / "run"))
        watchdogs = [self._make_watchdog(attempt, hosts) for hosts in self.hosts]
        watchdogs[0] = self._make_watchdog(attempt, Hosts(0, self.num_hosts, main.store, liveness))
        for watchdog in watchdogs:
            watchdog._poll()
        ends[self.num_hosts - 1][1].close()
        began = time.thread_time()
        watchdogs[0]._poll()
        cpu_seconds = time.thread_time() - began
        for watchdog in watchdogs[1:-1]:
            watchdog._poll()
        assert all(watchdog.has_ended for watchdog in watchdogs[:-1])
        files = [file for file in (self.scratch / "run").rglob("*") if file.is_file()]
        self.sizes = {
            "files of the record": sum("stacks" in file.parts for file in files),
            "kB of the record": sum(file.stat().st_size for file in files) / 1e3,
        }
        for end in (end for pair in ends.values() for end in pair):
            end.close()
        return cpu_seconds

    def _make_watchdog(self, attempt: Attempt, hosts: Hosts) -> "_Watchdog":
        incidents = IncidentRecorder()
        log = JsonlLog(attempt.store, "events", f"{attempt.number:06}.{hosts.process_id}", attempt.background_writer)
        incidents.attempt = replace(attempt, hosts=hosts, events=EventLog(log, attempt.number, hosts.process_id))
        return _Watchdog(hosts, Deadlines(), Clock(), incidents.on_diagnosis, *[lambda *_: None] * 2)

    def save(self) -> float:
        """Write the arrays into the bucket, read them back as a later save of an attempt does, and commit."""

        def save(hosts: Hosts) -> Any:
            writer = ArrayWriter(self.bucket, hosts, self.scratch / str(hosts.process_id))
            written = writer.start(TARGET, self.make_leaves(hosts.process_id))(DEADLINE_SECONDS)
            if hosts.is_main:
                self.manifest = Manifest(
                    name="1",
                    step=1,
                    arrays="arrays.1",
                    files=written.files,
                    indexes=written.indexes,
                    owners=written.owners,
                )
                self.bucket.write("checkpoints/1/manifest.json", self.manifest.encode())
                self.sizes = {"MB of manifest": len(self.manifest.encode()) / 1e6}

        return self.run_on_all(save)[1]

    def restore_one(self) -> float:
        """Read the blocks of one host, on the mesh that saved them; the other hosts do the same."""
        began, process = time.process_time(), self.num_hosts // 2
        manifest = read_manifest(self.bucket, "checkpoints/1")
        with open_arrays(self.bucket, "checkpoints/1", manifest) as reader:
            assert isinstance(reader, ArrayReader)
            wanted = [
                (name, leaf, shard)
                for name, leaf in self.make_leaves(process).items()
                for shard in leaf.addressable_shards
            ]
            with ThreadPoolExecutor(blocks.NUM_READERS) as pool:
                found = pool.map(lambda want: reader.read_block(want[0], want[1], want[2].index), wanted)
                assert all(np.array_equal(block, shard.data) for block, (*_, shard) in zip(found, wanted, strict=True))
        return time.process_time() - began

    def delete(self) -> float:
        """Delete the checkpoint, as retention does."""
        began = time.thread_time()
        self.bucket.remove_tree("checkpoints/1")
        return time.thread_time() - began


class _TimedDriver(MemoryDriver):
    """Driver that takes the time of a service, refuses what exceeds its rate, and counts both."""

    def __init__(self, count: Callable[[str], None], bytes_scale: float):
        super().__init__()
        self._count, self._bytes_scale = count, bytes_scale
        self._taken = dict.fromkeys(REQUESTS_PER_SECOND, (0.0, 0.0))  # requests of the last second, and when
        self.before = lambda verb, key: self._request(verb)

    def _request(self, verb: str) -> None:
        with self._lock:
            rate, now = REQUESTS_PER_SECOND[verb], time.monotonic()
            taken, moment = self._taken[verb]
            taken = max(taken - (now - moment) * rate, 0.0)
            is_refused = taken >= rate
            self._taken[verb] = taken + (not is_refused), now
            self._count("refusal" if is_refused else verb)
        time.sleep(LATENCY_SECONDS)
        if is_refused:
            raise TransientError("503: SlowDown")

    def _transfer(self, key: str, num_bytes: int) -> None:
        scale = self._bytes_scale if key.endswith(".bin") else 1.0  # of arrays alone
        time.sleep(num_bytes * scale / BYTES_PER_SECOND)

    def get(self, key: str) -> tuple[bytes, Version]:
        found = super().get(key)
        self._transfer(key, len(found[0]))
        return found

    def get_range(self, key: str, start: int, stop: int, version: Version | None) -> bytes:
        found = super().get_range(key, start, stop, version)
        self._transfer(key, len(found))
        return found

    def put(self, key: str, content: bytes, version: Version | None) -> Version:
        self._transfer(key, len(content))
        return super().put(key, content, version)

    def list(self, prefix: str, delimiter: str) -> Iterator[ObjectInfo]:
        found = [*super().list(prefix, delimiter)]
        for _ in range(PAGE_KEYS, len(found), PAGE_KEYS):
            self._request("list")
        yield from found

    def crc32c(self, key: str) -> str | None:
        self._request("get")  # of its metadata alone
        return compute_crc32c(self.objects[key][0])


class _Watchdog(Watchdog):
    """Watchdog that calls back where another one ends the process."""

    has_ended = False

    def _end(self, diagnosis: Diagnosis, is_recorder: bool, is_fenced: bool = False) -> None:
        self._on_diagnosis(diagnosis, is_recorder)
        self.has_ended = True


class _Chip(NamedTuple):
    """Device."""

    process_index: int
    number: int


@dataclass(frozen=True)
class _FirstAxis:
    """Sharding of the first axis over all chips."""

    num_hosts: int
    num_chips: int

    def devices_indices_map(self, shape: tuple[int, ...]) -> dict[_Chip, tuple[slice, ...]]:
        """Return the block of each chip."""
        return {
            _Chip(process, chip): (slice(row, row + 1), slice(0, shape[1]))
            for process in range(self.num_hosts)
            for chip in range(self.num_chips)
            for row in [process * self.num_chips + chip]
        }


class _HostArray(np.ndarray):  # type: ignore[type-arg]
    """Shard in the memory of a host."""

    def copy_to_host_async(self) -> None:
        """Do nothing."""


ACTS = ("join", "start", "reduce_places", "read_data", "gather_names", "stop", "watch", "crash")
HEAVY_ACTS = ("find_parts", "save", "restore_one", "delete")
MOST_HEAVY_HOSTS = 1024


def measure(num_hosts: int, num_chips: int, num_leaves: int, bytes_scale: float) -> dict[str, dict[str, float]]:
    """Return the figures of each act."""
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        pod = Pod(num_hosts, num_chips, num_leaves, Path(scratch), bytes_scale)
        for name in (*ACTS, *(HEAVY_ACTS if num_hosts <= MOST_HEAVY_HOSTS else ())):
            coordinator, pod.requests, pod.sizes = pod.coordinator, collections.Counter(), {}
            coordinator.num_calls = coordinator.num_bytes = 0
            coordinator.most_keys, coordinator.most_held = len(coordinator.values), coordinator.num_held
            began = time.monotonic()
            cpu_seconds = getattr(pod, name)()
            wall_seconds = time.monotonic() - began
            dollars = sum(DOLLARS.get(verb, 0.0) * count for verb, count in pod.requests.items())
            found[name] = {
                "calls": coordinator.num_calls,
                "keys in the coordinator": coordinator.most_keys,
                "MB in the coordinator": coordinator.most_held / 1e6,
                "MB out of the coordinator": coordinator.num_bytes / 1e6,
                "CPU seconds of process 0": cpu_seconds,
                "seconds of all, on this machine": wall_seconds,
                **{f"bucket {verb}s": float(count) for verb, count in sorted(pod.requests.items())},
                **({"dollars": dollars} if dollars else {}),
                **pod.sizes,
            }
    return found


def main() -> None:
    """Print the figures, with their growth."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--chips", type=int, default=8)
    parser.add_argument("--leaves", type=int, default=60)
    parser.add_argument("--gib", type=float)
    parsed = parser.parse_args()
    bytes_scale = 1.0
    if parsed.gib is not None:
        num_bytes = parsed.chips * parsed.leaves * SHARD_ELEMENTS * np.dtype(np.float32).itemsize
        blocks.PACK_BYTES, blocks.PIECE_BYTES = (
            max(1, round(limit / 2**30 * num_bytes / parsed.gib)) for limit in (blocks.PACK_BYTES, blocks.PIECE_BYTES)
        )
        bytes_scale = parsed.gib * 2**30 / num_bytes
    threading.stack_size(256 << 10)
    sys.setswitchinterval(1.0)  # thousands of threads that ask for the interpreter every 5 ms would leave it no time
    before: tuple[int, dict[str, dict[str, float]]] | None = None
    for num_hosts in parsed.hosts:
        found = measure(num_hosts, parsed.chips, parsed.leaves, bytes_scale)
        for act, figures in found.items():
            texts = []
            for name, value in figures.items():
                earlier = 0.0 if before is None else before[1][act].get(name, 0.0)
                growth = ""
                if before is not None and value > 0 and earlier > 0:
                    growth = f" (exponent {math.log(value / earlier) / math.log(num_hosts / before[0]):.1f})"
                texts.append(f"{name} {value:,.4g}{growth}")
            print(f"{num_hosts} hosts, {act}: {', '.join(texts)}", flush=True)
        before = num_hosts, found


if __name__ == "__main__":
    main()
