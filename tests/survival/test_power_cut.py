"""A power cut at any moment: the run continues from its newest commit and ends with the same bits.

The disk is a real ext4 on a loop device. A cut drops everything that was not flushed: the file system is shut down
without a flush of its log (`EXT4_IOC_SHUTDOWN`), the processes are killed, and it is mounted again.
"""

import contextlib
import fcntl
import os
import random
import struct
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.harness import WHOLE_RUN_DEADLINE_SECONDS, Attempt, Job
from tests.support.inputs import write_texts

pytestmark = pytest.mark.soak

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN, _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
DISK_BYTES = 1 << 30


class Disk:
    """A file system whose power can be cut."""

    def __init__(self, directory: Path):
        self.image, self.mount_point = directory / "disk.img", directory / "disk"
        with self.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run(["mkfs.ext4", "-q", self.image], check=True)
        self.mount_point.mkdir()
        self.mount()

    def mount(self) -> None:
        subprocess.run(["mount", "-o", "loop", self.image, self.mount_point], check=True)

    def cut(self, attempt: Attempt) -> None:
        """Cut the power of the disk and of the machine that runs `attempt`, and start both again."""
        attempt.freeze()
        descriptor = os.open(self.mount_point, os.O_RDONLY)
        fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        os.close(descriptor)
        attempt.kill_tree()
        attempt.wait()
        self.unmount()
        self.mount()

    def unmount(self) -> None:
        for _ in range(100):  # files of a process that was killed may still be closing
            if subprocess.run(["umount", self.mount_point], capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        subprocess.run(["umount", "-l", self.mount_point], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
        pytest.skip("needs root and loop devices")
    found = Disk(tmp_path)
    yield found
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        found.unmount()


def finish_through_cuts(disk: Disk, job: Job, num_cuts: int, seed: int) -> int:
    """Run a job to its end with cuts at random moments; return the number of cuts behind a commit."""
    moments, num_behind_commit = random.Random(seed), 0
    for _ in range(num_cuts):
        attempt = job.start()
        # Moments are counted from the first new commit of the attempt or from its start, so that cuts lie in all
        # phases: start-up, between saves, in a save, in retention.
        if moments.random() < 0.8:
            newest = job.newest()
            if not attempt.reaches(lambda before=newest: job.newest() > before, "a commit"):
                break
        time.sleep(moments.uniform(0, 2.0))
        if attempt.process.poll() is not None:
            break
        committed = job.newest()
        disk.cut(attempt)
        assert job.newest() >= committed or committed == 0, "the newest commit is gone"
        num_behind_commit += committed > 0
    attempt = job.start()
    attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    # A commit that was seen was durable: its files are whole, so nothing was ever quarantined.
    assert not (job.directory / "quarantine").exists(), os.listdir(job.directory / "quarantine")
    return num_behind_commit


COUNTER = ("config.total_steps=600", "checkpoint.every_steps=10", "checkpoint.keep_last=1")
GPT = (
    "config.train.total_steps=60",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.eval.batches=2",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=1",
    "logging.every_steps=1",
)
STORMS = {"counter": ("specs/counter.yaml", COUNTER, 15), "gpt_nano": ("specs/gpt_nano.yaml", GPT, 10)}


@pytest.mark.parametrize("name", STORMS)
def test_power_cuts_change_no_bit(name: str, disk: Disk, tmp_path: Path) -> None:
    spec, options, num_cuts = STORMS[name]
    cache = tmp_path / "cache"
    undisturbed = Job(spec, tmp_path / "undisturbed", options, cache=cache)
    undisturbed.finish()
    job = replace(undisturbed, directory=disk.mount_point / "run")
    assert finish_through_cuts(disk, job, num_cuts, seed=1) > num_cuts // 2
    assert job.outcome() == undisturbed.outcome()


def test_a_commit_survives_a_power_cut_seconds_later(disk: Disk, tmp_path: Path) -> None:
    job = Job("specs/counter.yaml", disk.mount_point / "run", (*COUNTER, "checkpoint.every_steps=50"))
    attempt = job.start()
    attempt.until(lambda: job.newest() >= 100, "the second commit")
    attempt.freeze()
    newest = job.newest()
    time.sleep(12)  # more than the interval at which ext4 commits its journal
    disk.cut(attempt)
    assert job.newest() == newest
    attempt = job.start()
    attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert job.events("restore")[-1]["step"] == newest


def test_power_cuts_change_no_byte_of_a_corpus(disk: Disk, tmp_path: Path) -> None:
    source = write_texts(tmp_path / "texts", [f"text {i} " * (i % 7 + 1) for i in range(400)])
    spec = tmp_path / "tokenise.yaml"
    spec.write_text(
        "name: tokenise\njob: experiments.tokenise:Tokenise\ndirectory: unused\n"
        f"config: {{source: '{source}', tokenizer: {{kind: bytes}}, shard_bytes: 1000}}\n"
    )
    undisturbed = Job(str(spec), tmp_path / "undisturbed")
    undisturbed.finish()
    job = Job(str(spec), disk.mount_point / "run")
    moments = random.Random(2)
    for _ in range(5):
        attempt = job.start()
        has_begun = attempt.reaches(lambda: (job.directory / "corpus" / "00000.json").exists(), "the first piece")
        time.sleep(moments.uniform(0, 0.3))
        if not has_begun or attempt.process.poll() is not None:
            break
        disk.cut(attempt)
    job.finish()
    names = sorted(path.name for path in (undisturbed.directory / "corpus").iterdir())
    assert sorted(path.name for path in (job.directory / "corpus").iterdir()) == names
    for name in set(names) - {"owner.json"}:
        assert (job.directory / "corpus" / name).read_bytes() == (undisturbed.directory / "corpus" / name).read_bytes()
