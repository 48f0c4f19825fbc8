"""Tokens/s that one host can feed, and the cost of its start-up.

1. sequences of 2,048 and 8,192 tokens from local files on one core: tokens/s of the reads alone and of whole batches;
2. the same from an in-memory bucket with a latency of 20 ms, and from the emulator of a service with that latency;
3. bytes fetched from the bucket, relative to the bytes that the sequences need;
4. CPU time of a ranged read of 4 KiB by the service's client;
5. start-up time with a corpus of 10 MB and a sparse one of 10 GB;
6. with `packing: documents`: the bytes that one of 1, 4, 16, 64 and 256 hosts fetches in an epoch for its share of a
   batch of 256, relative to the bytes needed; CPU seconds of the first and of later batches of 512 on one host.

    python -m tests.benchmarks.data_feed [--backends gs s3 az] [--seconds 3]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from runner.data import Source
from runner.data.corpus_index import HEAD_BYTES, INDEX, CorpusIndex, CorpusShard
from runner.storage import LocalStore, Version, compute_crc32c, open_store
from tests.data.buckets import URL, CountingDriver, put_in_bucket, serve_from, write_corpus
from tests.data.datasets import load
from tests.support.object_stores import BACKENDS, Faults, start_backend

LATENCY_SECONDS = 0.02
NUM_TOKENS = 1 << 26
BATCHES = {2048: 64, 8192: 16}  # sequence length: sequences of a batch on this host
READ_BYTES = 4096
NUM_HOSTS = (1, 4, 16, 64, 256)
BATCH_EXAMPLES = 256
DOCUMENT_TOKENS = 700  # mean of a web corpus


class DelayedDriver(CountingDriver):
    """Bucket driver with a constant latency and unlimited concurrency."""

    def get_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        time.sleep(LATENCY_SECONDS)
        return super().get_range(key, start, stop, version)


def write_shards(directory: Path, num_tokens: int, num_shards: int = 4) -> Path:
    """Write a sparse corpus of zeros with one document per shard."""
    store, size = LocalStore(directory), num_tokens // num_shards
    entries = []
    for number in range(num_shards):
        name, ends = f"{number:05}", np.array([size], "<i8").tobytes()
        store.write(f"{name}.ends", ends)
        store.write(f"{name}.bin", b"")
        os.truncate(directory / f"{name}.bin", 2 * size)
        digest = store.compute_digest(f"{name}.bin") if size < 1 << 26 else "00000000"
        entries.append(CorpusShard(name, size, 1, 0, compute_crc32c(bytes(HEAD_BYTES)), digest, compute_crc32c(ends)))
    store.write(INDEX, CorpusIndex("uint16", 50_304, {"kind": "zeros"}, None, tuple(entries)).encode())
    return directory


def measure_rate(read: Callable[[int], None], tokens: int, seconds: float) -> str:
    """Call `read(number)` for `seconds`, and format its tokens/s by wall time and by CPU time."""
    read(0)
    wall, cpu, number = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        number += 1
        read(number)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{number * tokens / wall / 1e6:8.2f} M tokens/s, {number * tokens / cpu / 1e6:8.2f} M tokens/s of CPU"


def measure_random_reads(tokens: Source, what: str, seconds: float) -> None:
    """Print the rate of reads at random positions."""
    for length, count in BATCHES.items():
        starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, (1 << 12, count))
        figures = measure_rate(
            lambda number, starts=starts, length=length: tokens.read_many(starts[number % len(starts)], length + 1),
            length * count,
            seconds,
        )
        print(f"{what}, {count} rows of {length:,}: {figures}", flush=True)


def measure_local(directory: Path, seconds: float) -> None:
    """Measure part 1."""
    np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS, np.uint16).tofile(directory / "train.bin")
    dataset = load(directory / "train.bin", cache=directory, vocabulary_size=50_304)
    measure_random_reads(dataset.train_sources[0].source, "local .bin", seconds)
    for length, count in BATCHES.items():
        whole = load(directory / "train.bin", cache=directory, sequence_length=length)
        figures = measure_rate(
            lambda number, whole=whole, count=count: whole.read("train", number * count, count), length * count, seconds
        )
        print(f"local .bin, {count} whole rows of {length:,}: {figures}", flush=True)
    measure_random_reads(
        load(write_shards(directory / "shards", NUM_TOKENS), cache=directory).train_sources[0].source,
        "local corpus",
        seconds,
    )


def measure_slow_bucket(directory: Path, seconds: float) -> None:
    """Measure parts 2 and 3 with an in-memory bucket."""
    driver = DelayedDriver()
    for name in ("train.bin", "more.bin"):
        content = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS // 8, np.uint16).tobytes()
        driver.put(f"corpus/{name}", content, None)
    with pytest.MonkeyPatch.context() as patch:
        serve_from(patch, driver)
        for length, count in BATCHES.items():
            settings = {"sequence_length": length, "vocabulary_size": 50_304}
            tokens = load(f"{URL}/*.bin", cache=directory, cache_bytes=0, **settings).train_sources[0].source
            driver.ranges.clear()
            starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, (1 << 12, count))
            calls: list[int] = []

            def read(number: int, tokens=tokens, starts=starts, calls=calls, size=length + 1) -> None:
                calls.append(number)
                tokens.read_many(starts[number], size)

            figures = measure_rate(read, length * count, seconds)
            share = driver.bytes_fetched / (len(calls) * count * (length + 1) * 2)
            print(f"bucket, {LATENCY_SECONDS * 1e3:.0f} ms, {count} rows of {length:,}: {figures}; fetched {share:.3f}")
            warm = load(f"{URL}/*.bin", cache=directory, **settings).train_sources[0].source
            warm.read_many(starts[0], length + 1)
            figures = measure_rate(
                lambda _, tokens=warm, starts=starts[0], size=length + 1: tokens.read_many(starts, size),
                length * count,
                seconds,
            )
            print(f"the same from the cache on the disk: {figures}", flush=True)


def measure_service(url: str, seconds: float) -> None:
    """Measure parts 2 and 4 with a real client."""
    store = open_store(url)
    version = store.list_files("train.bin")["train.bin"].version
    for number in range(10):
        store.read_range("train.bin", number, number + READ_BYTES, version)
    cpu = time.process_time()
    for number in range(100):
        store.read_range("train.bin", number, number + READ_BYTES, version)
    print(f"{url[:2]}: CPU of one read of 4 KiB: {(time.process_time() - cpu) * 10:.2f} ms", flush=True)
    with tempfile.TemporaryDirectory() as cache:
        tokens = (
            load(f"{url}/train.bin", cache=Path(cache), cache_bytes=0, vocabulary_size=50_304).train_sources[0].source
        )
        measure_random_reads(tokens, f"{url[:2]}, emulator with {LATENCY_SECONDS * 1e3:.0f} ms", seconds)


def measure_start(directory: Path) -> None:
    """Measure part 5."""
    for size in (10_000_000, 10_000_000_000):
        place = write_shards(directory / str(size), size // 2, 10)
        started = time.perf_counter()
        load(place, cache=directory / "start", vocabulary_size=50_304)
        figure = time.perf_counter() - started
        started = time.perf_counter()
        load(f"{place}/*.bin", cache=directory / f"start{size}", vocabulary_size=50_304)
        bare = time.perf_counter() - started
        print(f"start of {size / 1e6:,.0f} MB: corpus {figure:.3f} s, .bin files without an index {bare:.3f} s")


def measure_packing(directory: Path) -> None:
    """Measure part 6 from an in-memory bucket and from the disk."""
    random = np.random.default_rng(0)
    sizes = random.lognormal(np.log(DOCUMENT_TOKENS) - 0.5, 1.0, 5 * NUM_TOKENS // DOCUMENT_TOKENS).astype(int) + 1
    shards = np.array_split(sizes, 16)
    write_corpus(directory / "packed", [[np.zeros(size, np.uint16) for size in shard] for shard in shards])
    settings = {"cache": directory, "sequence_length": 2048, "packing": "documents", "validation_fraction": 0}
    cpu = time.process_time()
    dataset = load(directory / "packed", batch_examples=512, **settings)
    for step in range(5):
        dataset.read("train", step * 512, 512)
        cpu, before = time.process_time(), cpu
        print(f"packed, 512 rows of a disk, batch {step}: {cpu - before:.2f} s of CPU", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        driver = put_in_bucket(patch, directory / "packed", CountingDriver())
        for num_hosts in NUM_HOSTS:
            dataset = load(URL, cache_bytes=0, batch_examples=BATCH_EXAMPLES, **settings)
            driver.ranges.clear()
            count, needed = BATCH_EXAMPLES // num_hosts, 0
            for step in range(dataset.num_train_examples // BATCH_EXAMPLES):
                rows = dataset.read("train", step * BATCH_EXAMPLES, count)
                needed += 2 * int(rows["padding_mask"].sum())
            of_ends = sum(stop - start for key, start, stop in driver.ranges if key.endswith(".ends"))
            print(
                f"packed, one of {num_hosts} hosts: fetched {driver.bytes_fetched / needed:.3f}, "
                f"of it ends {of_ends / needed:.3f}, in {len(driver.ranges):,} requests",
                flush=True,
            )


def main() -> None:
    """Print all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=BACKENDS)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--service", help="measure this URL alone")
    options = parser.parse_args()
    if options.service:
        measure_service(options.service, options.seconds)
        return
    with tempfile.TemporaryDirectory() as directory:
        measure_local(Path(directory), options.seconds)
        measure_slow_bucket(Path(directory) / "cache", options.seconds)
        measure_start(Path(directory))
        measure_packing(Path(directory))
    for name in options.backends:
        with start_backend(name) as backend:
            content = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS // 64, np.uint16).tobytes()
            backend.write("feed/train.bin", content)
            backend.proxy.faults = Faults(latency_seconds=LATENCY_SECONDS)
            command = [sys.executable, "-m", "tests.benchmarks.data_feed", "--service", backend.url("feed")]
            subprocess.run(
                [*command, "--seconds", str(options.seconds)], env=os.environ | backend.environment, check=True
            )


if __name__ == "__main__":
    main()
