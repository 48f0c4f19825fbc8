"""Cost of buckets, fingerprints and the fast tier: ratios of interleaved measurements against local servers.

1. blocked time of a save of the 10M GPT to a bucket, relative to a disk;
2. fingerprint with comparison of replicas: seconds per GB, share of the 10M GPT's step time at the default interval;
3. upload and restore of 0.25 GB in pieces, relative to the cloud's own client with the same concurrency;
4. restore from the fast tier relative to the bucket, with injected latency.

    python -m tests.benchmarks.storage [--backend s3] [--rounds 5]
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from runner.checkpoint import arrays, blocks, fingerprint
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.parts import PartDirectory
from runner.distributed.agreement import Hosts
from runner.spec import CheckpointConfig
from runner.storage import Store, open_store
from tests.benchmarks.jobs import make_job
from tests.support.attempt import start
from tests.support.object_stores import BUCKET, Backend, start_backend

LATENCY_SECONDS = 0.05
NUM_ARRAYS, ARRAY_SHAPE = 16, (1024, 4096)


def measure_seconds(act: Callable[[], Any]) -> float:
    """Return the seconds of a call until its arrays are ready."""
    started = time.perf_counter()
    jax.block_until_ready(act())
    return time.perf_counter() - started


def measure_blocked_time(backend: Backend, rounds: int) -> None:
    """Measure parts 1 and 2."""
    with tempfile.TemporaryDirectory() as directory:
        local = start(make_job("10m", Path(directory), 10_000))
        remote = start(make_job("10m", Path(directory), 10_000, url=backend.url("blocked")))
        pairs = []
        for _ in range(rounds + 1):
            for job in (local, remote):
                job.state, loss, _ = job.compiled.executable(job.state, job.batch(), job.train_setup.key)
                job.step += 1
                jax.block_until_ready(loss)
            pair = []
            for job in (local, remote):
                started = time.perf_counter()
                job.save()
                pair.append(time.perf_counter() - started)
                job.checkpointer.wait_until_finished()
            pairs.append(pair)
        ratios = [there / here for here, there in pairs[1:]]
        print(
            f"blocked by a save of 10M: disk {statistics.median(p[0] for p in pairs[1:]):.4f} s, "
            f"{backend.name} {statistics.median(p[1] for p in pairs[1:]):.4f} s, ratio {statistics.median(ratios):.2f}",
            flush=True,
        )
        num_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(local.state))
        digest = [
            measure_seconds(lambda: fingerprint.LeafLayout(local.state).dispatch(local.state)) for _ in range(rounds)
        ]
        steps = []
        for _ in range(rounds):
            started = time.perf_counter()
            local.state, loss, _ = local.compiled.executable(local.state, local.batch(), local.train_setup.key)
            jax.block_until_ready(loss)
            steps.append(time.perf_counter() - started)
        every_steps = CheckpointConfig().every_steps or 1
        share = statistics.median(digest) / (every_steps * statistics.median(steps))
        print(
            f"fingerprint: {statistics.median(digest) / num_bytes * 1e9:.3f} s per GB, {share:.4%} of the 10M GPT's "
            f"steps at a save every {every_steps} steps",
            flush=True,
        )


def make_arrays() -> dict[str, jax.Array]:
    """Make 0.25 GB of float32 arrays."""
    keys = jax.random.split(jax.random.key(0), NUM_ARRAYS)
    return {f"layer.{number}": jax.random.normal(key, ARRAY_SHAPE) for number, key in enumerate(keys)}


def make_plain_client(backend: Backend) -> tuple[Callable[[Path, str], Any], Callable[[str, Path], Any]]:
    """Return functions that upload and download a file with the cloud's own client."""
    if backend.name == "s3":
        import boto3  # noqa: PLC0415 - only the client that is measured

        client = boto3.client("s3")
        return (
            lambda path, key: client.upload_file(str(path), BUCKET, key),
            lambda key, path: client.download_file(BUCKET, key, str(path)),
        )
    if backend.name == "gs":
        from google.auth.credentials import AnonymousCredentials  # noqa: PLC0415
        from google.cloud import storage  # noqa: PLC0415

        bucket = storage.Client(project="p", credentials=AnonymousCredentials()).bucket(BUCKET)
        return (
            lambda path, key: bucket.blob(key).upload_from_filename(str(path)),
            lambda key, path: bucket.blob(key).download_to_filename(str(path)),
        )
    from azure.storage.blob import BlobServiceClient  # noqa: PLC0415

    service = BlobServiceClient.from_connection_string(os.environ["AZURE_STORAGE_CONNECTION_STRING"])
    container = service.get_container_client(BUCKET)
    return (
        lambda path, key: container.upload_blob(key, path.open("rb"), overwrite=True),
        lambda key, path: path.write_bytes(container.download_blob(key).readall()),
    )


def measure_throughput(backend: Backend, store: Store, rounds: int) -> None:
    """Measure part 3."""
    leaves = make_arrays()
    num_bytes = sum(leaf.nbytes for leaf in leaves.values())
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in leaves.items()
    }
    up, down = make_plain_client(backend)
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        writer = arrays.ArrayWriter(store, Hosts.single_process(), directory / "staging")
        files = []
        for name, leaf in leaves.items():
            files.append(directory / name)
            files[-1].write_bytes(memoryview(jax.device_get(leaf)).cast("B"))
        for number in range(rounds):
            started = time.perf_counter()
            written = writer.start(f"c/{number}/arrays", leaves)(600.0)
            saved = Manifest(arrays="arrays", files=written.files, indexes=written.indexes)
            ours_up = time.perf_counter() - started
            started = time.perf_counter()
            with ThreadPoolExecutor(arrays.NUM_UPLOADS) as pool:
                list(pool.map(lambda file: up(file, f"plain/{file.name}"), files))
            plain_up = time.perf_counter() - started
            started = time.perf_counter()
            jax.block_until_ready(arrays.read_arrays(store, f"c/{number}", saved, abstract))
            ours_down = time.perf_counter() - started
            started = time.perf_counter()
            with ThreadPoolExecutor(blocks.NUM_READERS) as pool:
                list(pool.map(lambda file: down(f"plain/{file.name}", Path(f"{file}.back")), files))
            plain_down = time.perf_counter() - started
            rows.append((plain_up / ours_up, plain_down / ours_down, ours_up, ours_down))
            store.remove_tree(f"c/{number}")
    up_ratio, down_ratio, up_seconds, down_seconds = (statistics.median(column) for column in zip(*rows, strict=True))
    print(
        f"upload {num_bytes / up_seconds / 1e6:.0f} MB/s, {up_ratio:.2f} of the plain client's throughput; "
        f"restore {num_bytes / down_seconds / 1e6:.0f} MB/s, {down_ratio:.2f} of it",
        flush=True,
    )


def measure_tiers(backend: Backend, rounds: int) -> None:
    """Measure part 4."""
    leaves = {name: leaf[:64] for name, leaf in make_arrays().items()} | {"count": jnp.int32(1)}
    abstract = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding) for name, leaf in leaves.items()
    }
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        fast = PartDirectory(directory / "fast")
        manifest = Manifest(name="1", step=1, job="benchmark", identity={}, arrays="arrays")
        fast.write(manifest, blocks.copy_to_host(leaves, "all"), {})
        store = open_store(backend.url("tiers"))
        written = arrays.ArrayWriter(store, Hosts.single_process(), directory / "staging").start("c/1/arrays", leaves)(
            600.0
        )
        saved = replace(manifest, files=written.files, indexes=written.indexes)
        backend.proxy.faults.latency_seconds = LATENCY_SECONDS
        ratios = [
            measure_seconds(lambda: fast.list_parts(lambda *_: True, {})[1].read(abstract))
            / measure_seconds(lambda: arrays.read_arrays(store, "c/1", saved, abstract))
            for _ in range(rounds)
        ]
        backend.proxy.reset()
    print(
        f"restore from the fast tier over restore from {backend.name} with {LATENCY_SECONDS} s latency a request: "
        f"{statistics.median(ratios):.3f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", choices=("gs", "s3", "az"), default="s3")
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    with start_backend(parsed.backend) as backend:
        os.environ.update(backend.environment)
        measure_blocked_time(backend, parsed.rounds)
        measure_tiers(backend, parsed.rounds)
        os.environ.update(backend.server.environment(backend.server.port))
        measure_throughput(backend, open_store(backend.url("throughput")), parsed.rounds)


if __name__ == "__main__":
    main()
