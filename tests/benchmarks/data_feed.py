"""How many tokens a second one host can feed, and what its start costs.

1. rows of 2,048 and 8,192 tokens from local files, one core: tokens/s of reading alone, and of whole rows;
2. the same from a bucket in memory that answers after 20 ms, and from the emulator of a service with that latency;
3. bytes fetched from the bucket over bytes that the rows need;
4. CPU of one ranged read of 4 KiB by the service's client;
5. start-up with a corpus of 10 MB and a sparse one of 10 GB;
6. with `packing: documents`, of a batch of 256 rows, bytes that one of 1, 4, 16, 64 and 256 hosts fetches over what its
   rows need, in an epoch; of one of 512 rows on one host, CPU seconds until the first batch, and of one after it.

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
ROWS = {2048: 64, 8192: 16}  # tokens of a row: rows of a batch on this host
READ_BYTES = 4096
NUM_HOSTS = (1, 4, 16, 64, 256)
BATCH_EXAMPLES = 256
DOCUMENT_TOKENS = 700  # the mean of a web corpus


class SlowDriver(CountingDriver):
    """A bucket that answers late, to any number at a time."""

    def get_range(self, key: str, start: int, stop: int, version: Version) -> bytes:
        time.sleep(LATENCY_SECONDS)
        return super().get_range(key, start, stop, version)


def write_shards(directory: Path, num_tokens: int, num_shards: int = 4) -> Path:
    """A corpus of zeros, which takes no space, of one document a shard."""
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


def tokens_per_second(read: Callable[[int], None], tokens: int, seconds: float) -> str:
    """Call `read(number)` for so long; its tokens by the clock, and by the CPU of this process."""
    read(0)
    wall, cpu, number = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - wall < seconds:
        number += 1
        read(number)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return f"{number * tokens / wall / 1e6:8.2f} M tokens/s, {number * tokens / cpu / 1e6:8.2f} M tokens/s of CPU"


def feed(tokens: Source, what: str, seconds: float) -> None:
    """Rows at random places."""
    for length, count in ROWS.items():
        starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, (1 << 12, count))
        figures = tokens_per_second(
            lambda number, starts=starts, length=length: tokens.read_many(starts[number % len(starts)], length + 1),
            length * count,
            seconds,
        )
        print(f"{what}, {count} rows of {length:,}: {figures}", flush=True)


def measure_local(directory: Path, seconds: float) -> None:
    """Part 1."""
    np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS, np.uint16).tofile(directory / "train.bin")
    dataset = load(directory / "train.bin", cache=directory, vocabulary_size=50_304)
    feed(dataset.train_sources[0].source, "local .bin", seconds)
    for length, count in ROWS.items():
        whole = load(directory / "train.bin", cache=directory, sequence_length=length)
        figures = tokens_per_second(
            lambda number, whole=whole, count=count: whole.read("train", number * count, count), length * count, seconds
        )
        print(f"local .bin, {count} whole rows of {length:,}: {figures}", flush=True)
    feed(
        load(write_shards(directory / "shards", NUM_TOKENS), cache=directory).train_sources[0].source,
        "local corpus",
        seconds,
    )


def measure_slow_bucket(directory: Path, seconds: float) -> None:
    """Parts 2 and 3, with a bucket in memory."""
    driver = SlowDriver()
    for name in ("train.bin", "more.bin"):
        content = np.random.default_rng(0).integers(0, 50_000, NUM_TOKENS // 8, np.uint16).tobytes()
        driver.put(f"corpus/{name}", content, None)
    with pytest.MonkeyPatch.context() as patch:
        serve_from(patch, driver)
        for length, count in ROWS.items():
            settings = {"sequence_length": length, "vocabulary_size": 50_304}
            tokens = load(f"{URL}/*.bin", cache=directory, cache_bytes=0, **settings).train_sources[0].source
            driver.ranges.clear()
            starts = np.random.default_rng(0).integers(0, len(tokens) - length - 1, (1 << 12, count))
            calls: list[int] = []

            def read(number: int, tokens=tokens, starts=starts, calls=calls, size=length + 1) -> None:
                calls.append(number)
                tokens.read_many(starts[number], size)

            figures = tokens_per_second(read, length * count, seconds)
            share = driver.bytes_fetched / (len(calls) * count * (length + 1) * 2)
            print(f"bucket, {LATENCY_SECONDS * 1e3:.0f} ms, {count} rows of {length:,}: {figures}; fetched {share:.3f}")
            warm = load(f"{URL}/*.bin", cache=directory, **settings).train_sources[0].source
            warm.read_many(starts[0], length + 1)
            figures = tokens_per_second(
                lambda _, tokens=warm, starts=starts[0], size=length + 1: tokens.read_many(starts, size),
                length * count,
                seconds,
            )
            print(f"the same from the cache on the disk: {figures}", flush=True)


def measure_service(url: str, seconds: float) -> None:
    """Parts 2 and 4, with a real client, in a process of its own."""
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
        feed(tokens, f"{url[:2]}, emulator with {LATENCY_SECONDS * 1e3:.0f} ms", seconds)


def measure_start(directory: Path) -> None:
    """Part 5."""
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
    """Part 6: with a bucket in memory, and from the disk."""
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
    """Print all figures."""
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
