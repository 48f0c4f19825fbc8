"""Restart of a pod with fewer hosts: refused naming the missing hosts, or resumed if the spec allows it."""

import collections
import contextlib
import os
import random
import shutil
import signal
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import yaml

from runner.process import make_placements
from tests.support.job_process import (
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    make_uninterrupted_counter_run,
)
from tests.support.same_bits import SAME_BITS_OPTIONS
from tests.support.tiny_jobs import get_job_name, make_gpt_document
from tests.test_values import TrainLookup

SPEC = "specs/counter.yaml"
OPTIONS = ("config.width=64", "config.total_steps=400")
SOON_SECONDS = 15
SOON = f"deadlines.start_seconds={SOON_SECONDS}"


def start_without(job: Job, lost: int) -> list[Attempt]:
    """Start three processes and kill one before it joins; return the others."""
    attempts = job.start_processes(3)
    attempts[lost].kill()
    return [attempt for process, attempt in enumerate(attempts) if process != lost]


@pytest.mark.soak
def test_missing_hosts_are_named_and_no_host_runs_alone(tmp_path):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, SOON))
    without_second, without_first = start_without(job, 1), start_without(job, 0)
    for attempt in without_second:
        attempt.expect(76)
        said = f"process 1 of 3 did not join within {SOON_SECONDS} s; run the same command again"
        assert said in attempt.output, attempt.output
    for attempt in without_first:
        attempt.expect(76)
        assert "process 0 of 3 at 127.0.0.1:" in attempt.output
    assert not job.directory.exists()


@pytest.mark.soak
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_elastic_job_resumes_with_the_present_hosts(tmp_path, lost):
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, "topology.elastic=true", "config.step_seconds=0.02"))
    attempts = job.start_processes(3)
    attempts[0].wait_until(lambda: job.newest() >= 50, "step 50")
    for attempt in attempts:
        attempt.kill()
    for attempt in start_without(job.with_options("config.step_seconds=0", SOON), lost):
        attempt.expect(0)
    assert [start["processes"] for start in job.events("start")] == [3, 2]
    assert job.events("restore")[0]["step"] >= 50
    assert job.result() == make_uninterrupted_counter_run(OPTIONS).result()


@pytest.mark.soak
def test_an_elastic_job_waits_for_hosts_over_which_its_batch_divides(tmp_path):
    options = ("topology.elastic=true", "topology.mesh={data: auto, fsdp: 1}", "config.train.total_steps=4", SOON)
    options = (*options, "config.schedule.warmup_steps=0")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", (*options, "config.train.global_batch_examples=8"), devices=1)
    for attempt in start_without(job, 1):
        # Two of three: 8 examples divide over them.
        attempt.expect(0)
    job = Job("specs/gpt_nano.yaml", tmp_path / "other", (*options, "config.train.global_batch_examples=9"), devices=1)
    for attempt in start_without(job, 1):
        attempt.expect(76)
        assert "2 of 3 processes joined, and mesh and batch do not divide over their 2 devices" in attempt.output
    assert not job.directory.exists()
    for attempt in job.start_processes(3):
        attempt.expect(0)


@pytest.mark.soak
@pytest.mark.parametrize(("num_processes", "lost"), [(2, 1), (3, 2), (2, 0), (3, 0)])
def test_an_elastic_job_grows_at_a_save_once_its_lost_host_waits(tmp_path, num_processes, lost):
    """Of three processes two go on, and their coordination service has the port that the third one asks."""
    options = ("topology.elastic=true", "topology.grow=at_save", "deadlines.start_seconds=20")
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *options, "config.step_seconds=0.3", "checkpoint.every_steps=20"))
    placements = make_placements(num_processes)

    def start_worker(process: int) -> Attempt:
        return Attempt(job, ["launch.worker", *job.arguments, *placements[process]], 1)

    workers = [start_worker(process) for process in range(num_processes)]
    other = workers[0 if lost else 1]
    other.wait_until(lambda: job.newest() >= 10, "a checkpoint")
    workers[lost].kill_tree()
    other.wait_until(lambda: len(job.events("start")) == 2, "the start without it")
    workers[lost] = start_worker(lost)
    for worker in workers:
        worker.expect(0)
    assert [start["processes"] for start in job.events("start")] == [num_processes, num_processes - 1, num_processes]
    (grow,), (stop,) = job.events("grow"), job.events("preempt")
    assert grow["processes"] == 1
    assert stop["saved"] is True
    assert job.events("restore")[-1]["step"] == stop["step"]
    assert job.result() == make_uninterrupted_counter_run(OPTIONS).result()
    assert list((job.directory / "waiting").iterdir()) == []


@pytest.mark.soak
def test_of_two_groups_that_cannot_reach_each_other_one_trains_and_the_other_waits(tmp_path):
    """Both begin at the same moment, so that both claim the directory. The fence ends one of them."""
    options = ("topology.elastic=true", "deadlines.start_seconds=15", "checkpoint.every_steps=10")
    job = Job(SPEC, tmp_path / "run", (*OPTIONS, *options, "config.step_seconds=0.2"))
    attempts = job.start_processes(3)
    attempts[0].wait_until(lambda: job.newest() >= 10, "a checkpoint")
    for attempt in attempts:
        attempt.kill()
    # The second group asks for process 0 where nothing listens.
    placements = [make_placements(3)[0], *make_placements(3)[1:]]
    workers = [Attempt(job, ["launch.worker", *job.arguments, *placement], 1) for placement in placements]
    for worker in workers:
        worker.expect(0)
    text = "\n".join(worker.output for worker in workers)
    assert "runs the job on other hosts" in text, text
    # Every commit is of the attempt that had the directory, and none was made twice.
    owners = [(commit["attempt"], commit["step"]) for commit in job.events("commit")]
    assert owners == sorted(owners)
    assert len({step for _, step in owners}) == len(owners)
    assert job.result() == make_uninterrupted_counter_run(OPTIONS).result()


STEP_SECONDS = "TEST_ELASTIC_STEP_SECONDS"
NUM_HOSTS = 6
NUM_FAULTS, NUM_STEPS = (int(os.environ.get(name, number)) for name, number in (("FAULTS", "100"), ("STEPS", "6000")))


class SlowLookup(TrainLookup):
    """Job whose steps take a while."""

    def save_or_stop(self) -> None:
        time.sleep(float(os.environ.get(STEP_SECONDS, "0")))
        super().save_or_stop()


@dataclass
class Cluster:
    """Hosts of a job, each of which its supervisor and its process, and faults of random ones."""

    job: Job
    fast_tier: Path
    chance: random.Random
    counts: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        self.placements = make_placements(NUM_HOSTS)
        self.workers = [self.start_worker(host) for host in range(NUM_HOSTS)]

    def start_worker(self, host: int) -> Attempt:
        options = ["--max-restarts", "10000", "--standby-seconds", "0"]
        return Attempt(self.job, ["launch.worker", *self.job.arguments, *options, *self.placements[host]], 1)

    def send(self, hosts: list[int], number: int) -> None:
        """Send a signal to all processes of these hosts."""
        for host in hosts:
            worker = self.workers[host]
            for pid in (worker.process.pid, *worker.children()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    def inject_fault(self) -> None:
        faults = [self.kill, self.stop, self.freeze, self.lose_fast_tier, self.damage_fast_tier, self.lose_hosts]
        fault = self.chance.choice([*faults, self.lose_host_0, self.split])
        self.counts[fault.__name__] += 1
        fault()

    def choose(self, count: int = 1) -> list[int]:
        """Return so many random hosts."""
        return self.chance.sample(range(NUM_HOSTS), count)

    def kill(self) -> None:
        """kill -9 the process of a host."""
        for pid in self.workers[self.choose()[0]].children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM to the process of a host."""
        for pid in self.workers[self.choose()[0]].children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def freeze(self) -> None:
        """Stop a host for a moment."""
        hosts = self.choose()
        self.send(hosts, signal.SIGSTOP)
        time.sleep(self.chance.uniform(0, 5))
        self.send(hosts, signal.SIGCONT)

    def lose_fast_tier(self) -> None:
        """kill -9 the process of a host, and delete its fast tier, or that of another host."""
        self.kill()
        if directories := sorted(self.fast_tier.glob("*/[0-9]")):
            shutil.rmtree(self.chance.choice(directories), ignore_errors=True)

    def damage_fast_tier(self) -> None:
        """Cut a file of the fast tier short, a part or a copy of one, and kill -9 the process of a host."""
        # Directories come and go meanwhile, which `os.walk` passes over.
        if files := sorted(Path(top) / name for top, _, names in os.walk(self.fast_tier) for name in names):
            path = self.chance.choice(files)
            with contextlib.suppress(OSError):
                os.truncate(path, path.stat().st_size // 2)
        self.kill()

    def lose_hosts(self) -> None:
        """Lose one or two hosts with their fast tiers for a while; the others go on."""
        self.replace_hosts(self.choose(self.chance.choice([1, 2])))

    def lose_host_0(self) -> None:
        self.replace_hosts([0])

    def replace_hosts(self, hosts: list[int]) -> None:
        """Lose these hosts, and provide empty ones after a while."""
        for host in hosts:
            self.workers[host].kill_tree()
        for directory in self.fast_tier.glob("*/[0-9]"):
            if int(directory.name) in hosts:
                shutil.rmtree(directory, ignore_errors=True)
        time.sleep(self.chance.choice([0, 5, 25]))
        for host in hosts:
            self.workers[host] = self.start_worker(host)

    def split(self) -> None:
        """Disconnect some hosts, so that the others take them for dead, until those go on without them."""
        hosts = self.choose(self.chance.choice([1, 3]))
        self.send(hosts, signal.SIGSTOP)
        time.sleep(self.chance.uniform(20, 40))
        self.send(hosts, signal.SIGCONT)


@pytest.mark.soak
def test_faults_of_an_elastic_job_on_six_hosts_change_no_bit(tmp_path, monkeypatch):
    settings = {
        "job": get_job_name(SlowLookup),
        "topology.elastic": True,
        "topology.grow": "at_save",
        "deadlines.start_seconds": 10,
        "checkpoint.every_steps": 50,
        "checkpoint.local_directory": str(tmp_path / "fast"),
        "checkpoint.local_every_steps": 5,
        "checkpoint.local_replicas": 1,
        "logging.every_steps": 50,
        "config.train": {"global_batch_examples": 12, "total_steps": NUM_STEPS},
        "config.eval": {"every_steps": 500, "batches": 1},
    }
    same_bits = {**SAME_BITS_OPTIONS, "config.train.same_bits_devices": 12}
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "run", **settings | same_bits)))
    whole = Job(str(spec), tmp_path / "whole", (f"checkpoint.local_directory={tmp_path / 'other'}",))
    whole.with_options("checkpoint.local_replicas=0").finish()
    monkeypatch.setenv(STEP_SECONDS, "0.1")
    job = replace(whole, directory=tmp_path / "run", options=())
    cluster = Cluster(job, tmp_path / "fast", random.Random(NUM_FAULTS))
    newest, num_in_a_row, began = 0, 0, time.monotonic()
    while sum(cluster.counts.values()) < NUM_FAULTS:
        time.sleep(cluster.chance.uniform(0, 15))
        if all(worker.process.poll() is not None for worker in cluster.workers):
            break
        cluster.inject_fault()
        num_in_a_row += 1
        if num_in_a_row == 3:
            deadline = time.monotonic() + 300
            while job.newest() <= newest:
                assert time.monotonic() < deadline, cluster.workers[0].report(f"no commit beyond {newest}")
                time.sleep(0.1)
        if job.newest() > newest:
            newest, num_in_a_row = job.newest(), 0
    for worker in cluster.workers:
        worker.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert sum(cluster.counts.values()) == NUM_FAULTS
    commits = [commit for commit in job.events("commit") if commit.get("tier") != "fast"]
    owners = [(commit["attempt"], commit["step"]) for commit in commits]
    assert owners == sorted(owners)
    assert len({step for _, step in owners}) == len(owners)
    assert job.result() == whole.result()
    assert not [failure for failure in job.events("failed") if failure["code"] == 1]
    sizes = collections.Counter(start["processes"] for start in job.events("start"))
    assert len(sizes) > 1, sizes
    print(f"{dict(cluster.counts)} in {time.monotonic() - began:.0f} s, attempts by hosts: {dict(sizes)}")
