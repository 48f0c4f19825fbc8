"""Whole jobs of four processes that read their tokens from a bucket, and are struck: the bits are those from a disk."""

import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.data.buckets import make_random_shards, write_corpus
from tests.data.datasets import write_bin, write_npy
from tests.data.golden import write_megatron, write_records
from tests.support.cloud_job import CloudJob, make_unique_name
from tests.support.job_process import SMALL_GPT_OPTIONS, WHOLE_RUN_DEADLINE_SECONDS, Job, make_uninterrupted_run
from tests.support.object_stores import BACKENDS, Faults, start_backend

NUM_PROCESSES = 4
NUM_STRIKES = 3
OUTAGE_SECONDS = 60.0
NUM_OUTAGE_REQUESTS = 30  # requests of an outage, which the retries of all processes make in half a minute
OPTIONS = (
    *SMALL_GPT_OPTIONS,
    "config.train.total_steps=24",
    "config.model.vocabulary_size=1000",
    "config.eval.every_steps=12",
    "checkpoint.every_steps=4",
)
SMALL = ("config.data.packing=documents",)


def mixture_options(place: str) -> str:
    """Three sources of three kinds below a directory or a URL."""
    sources = (("corpus", "corpus", 2), ("tokens", "tokens/*.bin", 1.5), ("array", "array.npy", 0.5))
    named = [f"{{name: {name}, source: {place}/{path}, weight: {weight}}}" for name, path, weight in sources]
    return f"config.data.mixture=[{', '.join(named)}]"


def format_options(place: str) -> str:
    """Files of other tools below a directory or a URL, read by ranges and whole."""
    web = f"{{name: web, source: {place}/web.idx, weight: 2}}"
    return f"config.data.mixture=[{web}, {{name: code, source: {place}/code.array_record, options: {{dtype: uint16}}}}]"


# What the data is made of: options for what lies at a place.
KINDS = {
    "corpus": lambda place: (f"config.data.source={place}/corpus",),
    "documents": lambda place: (f"config.data.source={place}/corpus", "config.data.packing=documents"),
    "tokens": lambda place: (f"config.data.source={place}/tokens/*.bin",),
    "formats": lambda place: (format_options(place), "config.data.packing=documents"),
    "mixture": lambda place: (mixture_options(place), f"config.data.validation={{other: {place}/tokens/b.bin}}"),
}
CASES = [
    ("gs", "mixture"),
    ("s3", "documents"),
    ("az", "tokens"),
    ("az", "mixture"),
    ("s3", "corpus"),
    ("gs", "formats"),
]


def write_data(directory: Path) -> None:
    """What all the kinds are made of."""
    shards = make_random_shards([[500, 3000, 40], [7000], [60, 9000], [100] * 50])
    write_corpus(directory / "corpus", shards, vocabulary_size=1000)
    write_bin(directory / "tokens" / "a.bin", np.arange(9000) % 1000)
    write_bin(directory / "tokens" / "b.bin", np.arange(7000) * 7 % 1000)
    write_npy(directory / "array.npy", np.arange(4000) * 3 % 1000)
    write_megatron(directory / "web.idx", shards[1] + shards[3])
    write_records(directory / "code.array_record", shards[0] + shards[2])


def damage_cache(cache: Path, chance: random.Random) -> None:
    """Keep the cache, lose it, or tear it."""
    (file,) = cache.glob("*.cache") if cache.exists() else (None,)
    choice = chance.choice(["keep", "lose", "tear"])
    if choice == "lose":
        shutil.rmtree(cache, ignore_errors=True)
    elif choice == "tear" and file is not None:
        content = np.fromfile(file, np.uint8, count=1 << 20)
        content[:: chance.randint(50, 500)] ^= 1
        with file.open("r+b") as opened:
            opened.write(content.tobytes())


@pytest.mark.soak
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_faults_of_a_data_bucket_change_no_bit(name: str, kind: str, tmp_path: Path) -> None:
    chance = random.Random(f"{name} {kind}")
    write_data(tmp_path / "data")
    whole = Job("specs/gpt_nano.yaml", tmp_path / "whole", (*OPTIONS, *KINDS[kind](str(tmp_path / "data"))))
    for attempt in whole.start_processes(NUM_PROCESSES):  # as many: another topology rounds otherwise
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    with start_backend(name) as backend:
        place = make_unique_name("data")
        for path in (tmp_path / "data").rglob("*.*"):
            backend.write(f"{place}/{path.relative_to(tmp_path / 'data')}", path.read_bytes())
        cache = tmp_path / "cache"
        options = (*OPTIONS, *KINDS[kind](backend.url(place)), "config.data.cache_bytes=1000000")
        job = CloudJob(
            backend, make_unique_name("run"), "specs/gpt_nano.yaml", options, variables={"RUNNER_CACHE": str(cache)}
        )
        for _ in range(NUM_STRIKES):
            backend.proxy.faults = Faults(error_rate=0.3, latency_seconds=0.01)
            step, attempts = job.newest(), job.start_processes(NUM_PROCESSES)
            attempts[0].wait_for_server(lambda step=step: job.newest() > step, "commit")
            for attempt in attempts:
                attempt.kill()
            damage_cache(cache, chance)
        backend.proxy.faults = Faults(error_rate=0.1)
        step, attempts = job.newest(), job.start_processes(NUM_PROCESSES)
        attempts[0].wait_for_server(lambda: job.newest() > step, "commit")
        backend.proxy.faults = Faults(outage=True)
        attempts[0].wait_for_server(
            lambda: backend.proxy.fired["outage"] >= NUM_OUTAGE_REQUESTS, "requests in an outage"
        )
        backend.proxy.faults = Faults()
        for attempt in attempts:
            attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        assert job.result()["fingerprint"] == whole.result()["fingerprint"]
        assert job.rows() == whole.rows()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all the kinds are made of, on a disk."""
    directory = tmp_path_factory.mktemp("data")
    write_data(directory)
    return directory


@pytest.mark.soak
@pytest.mark.parametrize("name", BACKENDS)
def test_an_outage_of_the_data_bucket_delays_training_only(name: str, data: Path) -> None:
    long = ("config.train.total_steps=600", "checkpoint.every_steps=100", "config.eval.every_steps=300")
    options = (*OPTIONS, *long)  # so that steps are left whose tokens nobody has asked for yet
    whole = make_uninterrupted_run(
        "specs/gpt_nano.yaml", (*options, *KINDS["mixture"](str(data))), num_processes=NUM_PROCESSES
    )
    with start_backend(name) as backend:
        place, proxy = make_unique_name("data"), backend.proxy
        for path in data.rglob("*.*"):
            backend.write(f"{place}/{path.relative_to(data)}", path.read_bytes())
        options = (*options, *KINDS["mixture"](backend.url(place)), "config.data.cache_bytes=0")
        job = CloudJob(backend, make_unique_name("run"), "specs/gpt_nano.yaml", options)
        attempts = job.start_processes(NUM_PROCESSES)
        attempts[0].wait_for_server(lambda: job.events("progress"), "some steps")
        begun, num_requests = time.monotonic(), len(proxy.requests)
        proxy.faults = Faults(outage=True)
        attempts[0].wait_for_server(lambda: time.monotonic() - begun >= OUTAGE_SECONDS, "the end of the outage")
        refused = [path for _, path in proxy.requests[num_requests:]]
        proxy.faults = Faults()
        for attempt in attempts:
            attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        assert proxy.fired["outage"] >= NUM_OUTAGE_REQUESTS
        assert any(place in path for path in refused)
        assert job.result()["fingerprint"] == whole.result()["fingerprint"]
        assert job.rows() == whole.rows()


@pytest.mark.soak
def test_kills_of_gpt_small_with_a_corpus_in_a_bucket_change_no_bit(
    tmp_path: Path,
) -> None:
    on_disk = Job("specs/tokenise_stdlib.yaml", tmp_path / "tokens", (f"config.output={tmp_path / 'corpus'}",))
    on_disk.finish()
    whole = Job("specs/gpt_small.yaml", tmp_path / "whole", (*SMALL, f"config.data.source={tmp_path / 'corpus'}"))
    whole.finish()
    with start_backend("s3") as backend:
        place = make_unique_name("corpus")
        CloudJob(
            backend, make_unique_name("tokens"), "specs/tokenise_stdlib.yaml", (f"config.output={backend.url(place)}",)
        ).finish()
        assert backend.read(f"{place}/index.json") == (tmp_path / "corpus" / "index.json").read_bytes()
        job = CloudJob(
            backend,
            make_unique_name("small"),
            "specs/gpt_small.yaml",
            (*SMALL, f"config.data.source={backend.url(place)}"),
            variables={"RUNNER_CACHE": str(tmp_path / "cache")},
        )
        for _ in range(NUM_STRIKES):
            step, attempt = job.newest(), job.start()
            attempt.wait_for_server(lambda step=step: job.newest() > step, "commit")
            attempt.kill()
        job.finish()
        assert job.result()["fingerprint"] == whole.result()["fingerprint"]
        assert job.rows() == whole.rows()
