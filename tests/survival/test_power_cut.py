"""A power cut at any moment: the run continues from its newest commit and ends with the same bits.

The disk is a real file system on a loop device. A cut drops everything that was not flushed: the file system is shut
down without a flush of its log (`EXT4_IOC_SHUTDOWN`, the same for XFS), the processes are killed, and it is mounted
again.
"""

import contextlib
import fcntl
import os
import random
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.job_process import WHOLE_RUN_DEADLINE_SECONDS, Attempt, Job
from tests.support.tokenise_inputs import write_text_files

pytestmark = pytest.mark.soak

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN, _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
DISK_BYTES = 1 << 30


class Disk:
    """A file system whose power can be cut."""

    def __init__(self, directory: Path, kind: str):
        self.image, self.mount_point = directory / "disk.img", directory / "disk"
        with self.image.open("wb") as file:
            file.truncate(DISK_BYTES)
        subprocess.run([f"mkfs.{kind}", "-q", self.image], check=True)
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
        for _ in range(300):  # files of a process that was killed may still be closing
            if subprocess.run(["umount", self.mount_point], capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        subprocess.run(["umount", self.mount_point], check=True)


@pytest.fixture
def make_disk(tmp_path: Path) -> Iterator[Callable[[str], Disk]]:
    made: list[Disk] = []

    def make(kind: str) -> Disk:
        if os.geteuid() != 0 or not Path("/dev/loop-control").exists():
            pytest.skip("needs root and loop devices")
        if shutil.which(f"mkfs.{kind}") is None:
            pytest.skip(f"needs mkfs.{kind}")
        made.append(Disk(tmp_path, kind))
        return made[-1]

    yield make
    for disk in made:
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            disk.unmount()


@dataclass(frozen=True)
class Storm:
    """Cuts at random moments of runs of one spec, until there were `num_cuts`.

    Attributes:
        spec: The spec.
        options: Its options.
        num_cuts: Number of cuts.
        kind: File system.
        processes: Number of processes of the job.
        has_fast_tier: The fast tier is on the same disk.
    """

    spec: str
    options: tuple[str, ...]
    num_cuts: int
    kind: str = "ext4"
    processes: int = 1
    has_fast_tier: bool = False

    def start(self, job: Job) -> Attempt:
        return job.start() if self.processes == 1 else job.launch(self.processes)

    def run(self, disk: Disk, job: Job, check: Callable[[], None]) -> None:
        """Cut, and run to the end after the last cut; `check` is called after each run that ends."""
        moments, num_cuts = random.Random(1), 0
        while num_cuts < self.num_cuts:
            attempt = self.start(job)
            # Moments are counted from the first new commit of the attempt or from its start, so that cuts lie in all
            # phases: start-up, between saves, in a save, in retention.
            if moments.random() < 0.8:
                newest = job.newest()
                attempt.wait_until_or_exit(lambda newest=newest: job.newest() > newest, "a commit")
            time.sleep(moments.uniform(0, 2.0))
            if attempt.process.poll() is not None:
                attempt.expect(0)
                check()
                shutil.rmtree(job.directory)
                continue
            committed = find_committed(job)
            disk.cut(attempt)
            num_cuts += 1
            assert job.newest() >= committed, f"checkpoint {committed} is gone after cut {num_cuts}"
        attempt = self.start(job)
        attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
        check()


def find_committed(job: Job) -> int:
    """The newest step whose commit was complete."""
    return max((row["step"] for row in job.events("commit") if row.get("tier") != "fast"), default=0)


COUNTER = ("config.total_steps=600", "checkpoint.every_steps=10", "checkpoint.keep_last=1")
GPT = (
    "config.train.total_steps=200",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.eval.batches=2",
    "checkpoint.every_steps=3",
    "checkpoint.keep_last=1",
    "logging.every_steps=1",
)
STORMS = {
    "counter": Storm("specs/counter.yaml", COUNTER, 10),
    "counter on xfs": Storm("specs/counter.yaml", COUNTER, 6, kind="xfs"),
    "counter, two processes": Storm("specs/counter.yaml", COUNTER, 5, processes=2),
    "gpt_nano": Storm("specs/gpt_nano.yaml", GPT, 8),
    "gpt_nano, fast tier": Storm("specs/gpt_nano.yaml", (*GPT, "checkpoint.every_steps=20"), 6, has_fast_tier=True),
}


@pytest.mark.parametrize("name", STORMS)
def test_a_run_survives_power_cuts_with_the_same_bits(
    name: str, make_disk: Callable[[str], Disk], tmp_path: Path
) -> None:
    storm = STORMS[name]
    disk = make_disk(storm.kind)
    undisturbed = Job(storm.spec, tmp_path / "undisturbed", storm.options, cache=tmp_path / "cache")
    undisturbed.finish()
    # Compiled programs and the fast tier lose power, too.
    job = replace(undisturbed, directory=disk.mount_point / "run", cache=disk.mount_point / "cache")
    if storm.has_fast_tier:
        fast = disk.mount_point / "fast"
        job = job.with_options(f"checkpoint.local_directory={fast}", "checkpoint.local_every_steps=2")
    restored = set[str]()

    def check() -> None:
        assert job.outcome() == undisturbed.outcome()
        # A commit that was seen was durable: its files are whole, so nothing was ever set aside.
        assert job.events("quarantine") == []
        assert [row for row in job.events("fallback") if row["tier"] == "fast"] == []
        restored.update(row["tier"] for row in job.events("restore"))

    storm.run(disk, job, check)
    assert ("fast" in restored) == storm.has_fast_tier


def test_the_checkpoint_of_a_commit_survives_a_cut_seconds_later(
    make_disk: Callable[[str], Disk], tmp_path: Path
) -> None:
    disk = make_disk("ext4")
    job = Job("specs/counter.yaml", disk.mount_point / "run", (*COUNTER, "checkpoint.every_steps=50"))
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() >= 100, "the second commit")
    attempt.freeze()
    newest = job.newest()
    time.sleep(12)  # more than the interval at which ext4 commits its journal
    disk.cut(attempt)
    assert job.newest() == newest
    attempt = job.start()
    attempt.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert job.events("restore")[-1]["step"] == newest


def count_pieces(job: Job) -> int:
    return len(list((job.directory / "corpus").glob("[0-9][0-9][0-9][0-9][0-9].json")))


def test_a_corpus_survives_power_cuts_with_the_same_bytes(make_disk: Callable[[str], Disk], tmp_path: Path) -> None:
    disk = make_disk("ext4")
    source = write_text_files(tmp_path / "texts", [f"text {i} " * (i % 7 + 1) for i in range(400)])
    spec = tmp_path / "tokenise.yaml"
    spec.write_text(
        "name: tokenise\njob: experiments.tokenise:Tokenise\ndirectory: unused\n"
        f"config: {{source: '{source}', tokenizer: {{kind: bytes}}, shard_bytes: 1000}}\n"
    )
    undisturbed = Job(str(spec), tmp_path / "undisturbed")
    undisturbed.finish()
    job = Job(str(spec), disk.mount_point / "run")
    moments, num_cuts = random.Random(2), 0
    while num_cuts < 8:
        attempt = job.start()
        if moments.random() < 0.8:
            num_pieces = count_pieces(job)
            attempt.wait_until_or_exit(lambda before=num_pieces: count_pieces(job) > before, "the next piece")
        time.sleep(moments.uniform(0, 0.3))
        if attempt.process.poll() is not None:
            attempt.expect(0)
            shutil.rmtree(job.directory)
            continue
        disk.cut(attempt)
        num_cuts += 1
    job.finish()
    names = sorted(path.name for path in (undisturbed.directory / "corpus").iterdir())
    assert sorted(path.name for path in (job.directory / "corpus").iterdir()) == names
    for name in set(names) - {"owner.json"}:
        assert (job.directory / "corpus" / name).read_bytes() == (undisturbed.directory / "corpus" / name).read_bytes()
