"""Whole jobs of four processes that read their tokens from a bucket, and are struck: the bits are those from a disk."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.data.buckets import random_shards, write_corpus
from tests.support.cloud import CloudJob, free_name
from tests.support.harness import LITTLE, WHOLE_RUN_DEADLINE_SECONDS, Job
from tests.support.servers import BACKENDS, Faults, start_backend

NUM_PROCESSES = 4
NUM_STRIKES = 3
NUM_REFUSED = 30  # requests of an outage, which the retries of all processes make in half a minute
OPTIONS = (
    *LITTLE,
    "config.train.total_steps=24",
    "config.model.vocabulary_size=1000",
    "config.eval.every_steps=12",
    "checkpoint.every_steps=4",
)


def spoil(cache: Path, chance: random.Random) -> None:
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
@pytest.mark.parametrize("name", BACKENDS)
def test_four_processes_with_a_bucket_in_trouble_train_to_the_bits_of_a_run_from_a_disk(
    name: str, tmp_path: Path
) -> None:
    chance = random.Random(name)
    corpus = write_corpus(
        tmp_path / "corpus", random_shards([[500, 3000, 40], [7000], [60, 9000]]), vocabulary_size=1000
    )
    whole = Job("specs/gpt_nano.yaml", tmp_path / "whole", (*OPTIONS, f"config.data.source={corpus}"))
    for attempt in whole.start_processes(NUM_PROCESSES):  # as many: another topology rounds otherwise
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    with start_backend(name) as backend:
        place = free_name("data")
        for path in corpus.iterdir():
            backend.write(f"{place}/{path.name}", path.read_bytes())
        cache = tmp_path / "cache"
        options = (*OPTIONS, f"config.data.source={backend.url(place)}", "config.data.cache_bytes=1000000")
        job = CloudJob(
            backend, free_name("run"), "specs/gpt_nano.yaml", options, variables={"RUNNER_CACHE": str(cache)}
        )
        for _ in range(NUM_STRIKES):
            backend.proxy.faults = Faults(error_rate=0.3, latency_seconds=0.01)
            step, attempts = job.newest(), job.start_processes(NUM_PROCESSES)
            attempts[0].until_server(lambda step=step: job.newest() > step, "commit")
            for attempt in attempts:
                attempt.kill()
            spoil(cache, chance)
        backend.proxy.faults = Faults(error_rate=0.1)
        step, attempts = job.newest(), job.start_processes(NUM_PROCESSES)
        attempts[0].until_server(lambda: job.newest() > step, "commit")
        backend.proxy.faults = Faults(outage=True)
        attempts[0].until_server(lambda: backend.proxy.fired["outage"] >= NUM_REFUSED, "requests in an outage")
        backend.proxy.faults = Faults()
        for attempt in attempts:
            attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        assert job.result()["fingerprint"] == whole.result()["fingerprint"]
