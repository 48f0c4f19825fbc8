"""`launch local` through a storm of random faults: the job ends by itself, with the bits of an undisturbed run."""

import collections
import contextlib
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import threading
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from runner.data.sampling import ShuffledOrder
from tests.data.datasets import write_bin
from tests.support.job_process import (
    WHOLE_RUN_DEADLINE_SECONDS,
    Attempt,
    Job,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)
from tests.support.leftover import list_children
from tests.support.same_bits import SAME_BITS_OPTIONS
from tests.support.tiny_jobs import get_job_name, make_gpt_document
from tests.test_values import TrainLookup

SICK = Path(__file__).parents[1] / "support" / "sick_process"
SHORT_FREEZE_SECONDS = 2.0
SMALL_FILE_BYTES = 4096


def children(parent: int) -> list[int]:
    """The living child processes of a process."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, ppid = path.read_text().rpartition(")")[2].split()[:2]
            if int(ppid) == parent and state != "Z":
                found.append(int(path.parent.name))
    return found


FAULTS_IN_A_ROW_MAX = 3  # without a commit: the launcher gives a job up that ends five times without getting on


@dataclass
class Storm:
    """Faults at random moments in random processes of a launched job."""

    launched: Attempt
    chance: random.Random
    slow_disk: Path
    longest_pause_seconds: float
    num_processes: int
    fast_tier: Path | None = None
    num_faults: int = 0

    def inject_fault(self) -> None:
        """Inject one fault; do nothing if no process is alive."""
        time.sleep(self.chance.uniform(0.0, self.longest_pause_seconds))
        pids = children(self.launched.process.pid)
        if not pids:
            return
        faults = [self.kill, self.terminate, self.freeze, self.fill_disk, self.slow_down]
        if self.fast_tier is not None:
            faults = [*faults, self.lose_host, self.lose_host]
        fault = self.chance.choice(faults)
        with contextlib.suppress(ProcessLookupError):
            fault(self.chance.choice(pids))
            self.num_faults += 1

    def kill(self, pid: int) -> None:
        """kill -9."""
        os.kill(pid, signal.SIGKILL)

    def lose_host(self, pid: int) -> None:
        """kill -9, and the loss of a fast tier; often that of another process, which goes on to write there."""
        assert self.fast_tier is not None
        os.kill(pid, signal.SIGKILL)
        if directories := sorted(self.fast_tier.glob("*/[0-9]")):
            shutil.rmtree(self.chance.choice(directories), ignore_errors=True)

    def terminate(self, pid: int) -> None:
        """SIGTERM."""
        os.kill(pid, signal.SIGTERM)

    def freeze(self, pid: int) -> None:
        """Stop the process for a while; some never continue where peers can notice it."""
        # A frozen standby would be waited for at the rendezvous.
        trainers = list_children(self.launched.process.pid)[: self.num_processes]
        is_for_good = len(trainers) > 1 and pid in trainers and self.chance.random() < 0.5
        os.kill(pid, signal.SIGSTOP)
        if not is_for_good:
            time.sleep(self.chance.uniform(0.0, SHORT_FREEZE_SECONDS))
            os.kill(pid, signal.SIGCONT)

    def fill_disk(self, pid: int) -> None:
        """Make larger writes fail for a while."""
        soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (SMALL_FILE_BYTES, hard))
        time.sleep(self.chance.uniform(0.0, SHORT_FREEZE_SECONDS))
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))

    def slow_down(self, pid: int) -> None:
        """Make every fsync slow for a while."""
        self.slow_disk.touch()
        time.sleep(self.chance.uniform(0.0, 2 * SHORT_FREEZE_SECONDS))
        self.slow_disk.unlink()


def weather(
    job: Job,
    num_processes: int,
    num_faults: int,
    longest_pause_seconds: float,
    monkeypatch: pytest.MonkeyPatch,
    fast_tier: Path | None = None,
    standby_seconds: int = 0,
) -> float:
    """Run the job through so many faults to its end; the seconds that it took."""
    slow_disk = job.directory.parent / "slow"
    monkeypatch.setenv("SLOW_DISK", str(slow_disk))
    monkeypatch.setenv("PYTHONPATH", str(SICK))
    started = time.monotonic()
    launched = job.launch(num_processes, max_restarts=1000, grace_seconds=30, standby_seconds=standby_seconds)
    storm = Storm(launched, random.Random(num_faults), slow_disk, longest_pause_seconds, num_processes, fast_tier)
    newest, num_in_a_row = 0, 0
    while storm.num_faults < num_faults:
        assert launched.process.poll() is None, launched.report(f"ended after {storm.num_faults} faults")
        storm.inject_fault()
        num_in_a_row += 1
        if num_in_a_row == FAULTS_IN_A_ROW_MAX:
            launched.wait_until(lambda newest=newest: job.newest() > newest, f"a commit beyond {newest}")
        if job.newest() > newest:
            newest, num_in_a_row = job.newest(), 0
    launched.expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    # The end of a peer is no failure of the others.
    assert not [failure for failure in job.events("failed") if failure["code"] == 1]
    # Orbax prints one of its own when a disk is full: its loop is closed before its last write has failed.
    # A hang before the claim of the directory prints stacks, whose lines have no comma before `in`.
    found = re.search(r'File "[^"]*/runner/[^"]*", line \d+, in ', launched.output)
    near = "" if found is None else launched.output[max(found.start() - 2000, 0) : found.end() + 3000]
    assert not found, launched.report(f"printed a traceback:\n{near}\n---")
    return time.monotonic() - started


def at_its_pace(job: Job, whole: Job, num_processes: int) -> float:
    """Seconds of the undisturbed job, at the pace of the disturbed one."""
    started = time.monotonic()
    undisturbed_job = replace(job, directory=job.directory.parent / "undisturbed")
    undisturbed_job.launch(num_processes).expect(0, WHOLE_RUN_DEADLINE_SECONDS)
    assert undisturbed_job.outcome() == whole.outcome()
    return time.monotonic() - started


COUNTER = ("config.width=64", "checkpoint.every_steps=10")


@pytest.mark.soak
def test_a_few_faults(tmp_path, monkeypatch):
    steps = ("config.total_steps=1000",)
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, *steps, "config.step_seconds=0.02"))
    weather(job, 1, 3, 1.0, monkeypatch, standby_seconds=1)
    assert job.result() == make_uninterrupted_counter_run((*COUNTER, *steps)).result()


@pytest.mark.soak
def test_a_hundred_faults(tmp_path, monkeypatch):
    steps = ("config.total_steps=24000",)
    job = Job("specs/counter.yaml", tmp_path / "run", (*COUNTER, *steps, "config.step_seconds=0.01"))
    seconds = weather(job, 1, 100, 6.0, monkeypatch)
    whole = make_uninterrupted_run("specs/counter.yaml", (*COUNTER, *steps))
    assert job.result() == whole.result()
    print(f"100 faults: {seconds:.0f} s, undisturbed {at_its_pace(job, whole, 1):.0f} s")


@pytest.mark.soak
def test_fifteen_faults_of_a_gpt_on_two_processes(tmp_path, monkeypatch):
    options = ("config.train.total_steps=2000", "checkpoint.every_steps=20", "logging.every_steps=100")
    job = Job("specs/gpt_nano.yaml", tmp_path / "run", options, devices=1)
    seconds = weather(job, 2, 15, 20.0, monkeypatch, standby_seconds=2)
    whole = make_uninterrupted_run("specs/gpt_nano.yaml", options, num_processes=2)
    assert job.outcome() == whole.outcome()
    print(f"15 faults: {seconds:.0f} s, undisturbed {at_its_pace(job, whole, 2):.0f} s")


@pytest.mark.soak
def test_thirty_faults_and_lost_hosts_of_four_processes_with_replicas(tmp_path, monkeypatch):
    options = (
        *("config.width=4096", "config.total_steps=2500", "checkpoint.every_steps=50"),
        *(f"checkpoint.local_directory={tmp_path / 'fast'}", "checkpoint.local_every_steps=4"),
        "checkpoint.local_replicas=1",
    )
    job = Job("specs/counter.yaml", tmp_path / "run", (*options, "config.step_seconds=0.1"))
    weather(job, 4, 30, 8.0, monkeypatch, tmp_path / "fast")
    assert job.result() == make_uninterrupted_counter_run(options[:3]).result()
    restores = job.events("restore")
    sources = collections.Counter("replica" if "from_replicas" in each else each["tier"] for each in restores)
    assert sources["replica"], sources
    print(f"restores by source: {dict(sources)}")


# Kills of a run of three stages, around every border and between.

STRIKE = "TEST_STORM_STRIKE"  # step, signal, seconds after it, and process
STARTS, STEPS = (5, 11, 17), 24


class StruckLookup(TrainLookup):
    """Job that sends itself a signal when it has completed a step, before it may save, or a while after that."""

    def save_or_stop(self) -> None:
        strike = os.environ.get(STRIKE, "").split()
        if strike and self.step >= int(strike[0]) and self.attempt.hosts.process_id == int(strike[3]):
            del os.environ[STRIKE]
            act = (os.kill, (os.getpid(), int(strike[1])))
            if delay_seconds := float(strike[2]):
                threading.Timer(delay_seconds, *act).start()
            else:
                act[0](*act[1])
        time.sleep(0.02)
        super().save_or_stop()


def make_staged_job(directory: Path, **changes: Any) -> Job:
    """Return a job of three stages: mixture; batch and sequence length; schedule."""
    entries = []
    for seed, name in enumerate("ab"):
        write_bin(directory / f"{name}.bin", np.random.default_rng(seed).integers(256, size=4000))
        entries.append({"name": name, "source": str(directory / f"{name}.bin")})
    stages = [
        {"set": {"data.mixture.0.weight": 3.0}},
        {"set": {"train.global_batch_examples": 16, "data.sequence_length": 32}},
        {"set": {"schedule": {"name": "linear"}, "optimizer.weight_decay": 0.5}, "why": "anneal"},
    ]
    settings = {
        "job": get_job_name(StruckLookup),
        "checkpoint.every_steps": 3,
        "logging.every_steps": 2,
        "config.model.vocabulary_size": 256,
        "config.data": {"mixture": entries, "sequence_length": 16, "validation_fraction": 0.1},
        "config.schedule": {"name": "wsd", "warmup_steps": 2, "decay_steps": 3},
        "config.train": {"global_batch_examples": 8, "total_steps": STEPS},
        "config.ema": {"decays": [0.9]},
        "config.eval": {"every_steps": 5, "batches": 1},
        "config.stages": [{"from_step": start} | stage for start, stage in zip(STARTS, stages, strict=True)],
    }
    spec = directory / "spec.yaml"
    spec.write_text(yaml.safe_dump(make_gpt_document(directory / "run", **settings | changes)))
    return Job(str(spec), directory / "run")


def read_stages(job: Job) -> set[tuple[Any, ...]]:
    """Return the stages that the attempts have entered; a resume enters the one in which it goes on."""
    keys = ("number", "from_step", "why", "program", "micro_batch_examples")
    return {tuple(event[key] for key in keys) for event in job.events("stage")}


def list_moments(num_places: int) -> list[tuple[int, float]]:
    """Return (step, seconds after it) before, at and after each border, and at random between."""
    chance = random.Random(num_places)
    around = [(step, 0.0) for start in STARTS for step in (start - 1, start, start + 1)]
    return sorted([*around, *((start + 2, chance.uniform(0, 0.2)) for start in (0, *STARTS))])


def strike(
    job: Job, moments: Sequence[tuple[int, float]], places: Sequence[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Strike the job at these moments, and run it to its end.

    Args:
        job: the job.
        moments: step, and seconds after it, of each strike.
        places: processes and devices of each, of one attempt after another, from the first again after the last.
        monkeypatch: for the environment of the attempts.
    """
    for number, (step, delay_seconds) in enumerate(moments):
        num_processes, devices = places[number % len(places)]
        given = signal.SIGTERM if number % 3 == 2 else signal.SIGKILL
        monkeypatch.setenv(STRIKE, f"{step} {given:d} {delay_seconds} {number % num_processes}")
        attempts = replace(job, devices=devices).start_processes(num_processes)
        attempts[number % num_processes].expect(75 if given == signal.SIGTERM else -signal.SIGKILL)
        for peer in attempts:
            peer.kill()
    monkeypatch.delenv(STRIKE)
    num_processes, devices = places[len(moments) % len(places)]
    for attempt in replace(job, devices=devices).start_processes(num_processes):
        attempt.expect(0)


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2])
def test_strikes_around_every_border_of_stages_change_no_bit_row_or_event(
    num_processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_staged_job(tmp_path)
    whole = replace(job, directory=tmp_path / "whole")
    whole.launch(num_processes).expect(0)
    strike(job, list_moments(num_processes), [(num_processes, 1)], monkeypatch)
    assert job.outcome() == whole.outcome()
    assert read_stages(job) == read_stages(whole)
    assert len(read_stages(job)) == len(STARTS)


@pytest.mark.soak
def test_strikes_around_every_border_on_eight_two_and_one_devices_change_no_bit_or_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XLA_FLAGS")
    job = make_staged_job(tmp_path, **SAME_BITS_OPTIONS)
    whole = replace(job, directory=tmp_path / "whole", devices=8)
    whole.finish()
    places = [(1, 8), (1, 2), (1, 1)]
    strike(job, list_moments(len(places)), places, monkeypatch)
    assert job.outcome() == whole.outcome()


# Data of a run of stages, as the steps of its processes have got them.

LENGTH = 16
# Batch, and share of each source, of each stage.
MIXTURES: list[tuple[int, dict[str, float]]] = [
    (8, {"a": 1, "b": 1}),
    (8, {"a": 3, "b": 1}),
    (16, {"a": 3, "c": 1}),
    (16, {"a": 1, "b": 1}),
]


class RecordingLookup(StruckLookup):
    """Job that records the sequences that enter each step on the devices of a process."""

    def prepare(self) -> None:
        super().prepare()
        make_step = self.session.make_step

        def record_step(state: Any, batch: Any, *arguments: Any) -> Any:
            self.record(batch)
            return make_step(state, batch, *arguments)

        self.session.make_step = record_step  # type: ignore[method-assign]

    def record(self, batch: Any) -> None:
        S, B, _ = batch["x"].shape
        sequences: dict[int, Any] = {}
        for shard in batch["x"].addressable_shards:
            places = itertools.product(*(range(size)[part] for size, part in zip((S, B), shard.index, strict=False)))
            values = np.asarray(shard.data).reshape(-1, LENGTH).tolist()
            sequences |= {micro * B + row: value for (micro, row), value in zip(places, values, strict=True)}
        path = self.store.root / "read" / f"{self.step}.{self.attempt.hosts.process_id}.{self.attempt.number}"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(sequences))


def read_recorded(job: Job, step: int) -> list[Any]:
    """Return the sequences of a step in their order; processes share them, and attempts agree on them."""
    found: dict[str, dict[int, Any]] = {}
    for path in (job.directory / "read").glob(f"{step}.*"):
        _, process, _ = path.name.split(".")
        sequences = json.loads(path.read_text())
        assert found.setdefault(process, sequences) == sequences
    assert sum(map(len, found.values())) == len({index for each in found.values() for index in each})
    merged = {int(index): value for each in found.values() for index, value in each.items()}
    return [merged[index] for index in range(len(merged))]


@pytest.mark.soak
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_each_example_of_each_source_enters_one_step_in_an_epoch(
    num_processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order_of: dict[str, ShuffledOrder] = {}
    window_of: dict[tuple[int, ...], tuple[str, int]] = {}
    for number, name in enumerate("abc"):
        tokens = np.random.default_rng(number).integers(256, size=[700, 1700, 700][number])
        write_bin(tmp_path / f"{name}.bin", tokens)
        num_windows = (int(len(tokens) * 0.9) - 1) // LENGTH
        order_of[name] = ShuffledOrder(num_windows, zlib.crc32(f"0 {name}".encode()))
        windows = tokens[: num_windows * LENGTH].reshape(-1, LENGTH).tolist()
        window_of |= {tuple(window): (name, index) for index, window in enumerate(windows)}

    entries = [
        [{"name": name, "source": str(tmp_path / f"{name}.bin"), "weight": weight} for name, weight in shares.items()]
        for _, shares in MIXTURES
    ]
    starts = (0, *STARTS)
    settings = {
        "job": get_job_name(RecordingLookup),
        "checkpoint.every_steps": 3,
        "config.model.vocabulary_size": 256,
        "config.data": {"mixture": entries[0], "sequence_length": LENGTH, "validation_fraction": 0.1},
        "config.train": {"global_batch_examples": MIXTURES[0][0], "total_steps": STEPS},
        "config.eval": {"batches": 1},
        "config.stages": [
            {"from_step": start, "set": {"data.mixture": entries[number], "train.global_batch_examples": batch}}
            for number, (start, (batch, _)) in enumerate(zip(starts, MIXTURES, strict=True))
            if number
        ],
    }
    spec = tmp_path / "spec.yaml"
    spec.write_text(yaml.safe_dump(make_gpt_document(tmp_path / "run", **settings)))
    job = Job(str(spec), tmp_path / "run")
    # In the middle of a stage, and at a border.
    strike(job, [(8, 0.0), (17, 0.0)], [(num_processes, 1)], monkeypatch)

    taken: dict[str, list[int]] = {name: [] for name in order_of}
    for start, stop, (batch, shares) in zip(starts, (*STARTS, STEPS), MIXTURES, strict=True):
        before = {name: len(indices) for name, indices in taken.items()}
        for step in range(start, stop):
            sequences = read_recorded(job, step)
            assert len(sequences) == batch
            for sequence in sequences:
                name, index = window_of[tuple(sequence)]
                taken[name].append(index)
        for name, indices in taken.items():
            due = (stop - start) * batch * shares.get(name, 0) / sum(shares.values())
            assert abs(len(indices) - before[name] - due) <= 1
    for name, indices in taken.items():
        assert indices == [order_of[name][number] for number in range(len(indices))]
    # Some epochs of the first source, and less than one of the second.
    num_epochs = [len(taken[name]) / order_of[name].num_windows for name in "abc"]
    assert num_epochs[0] > 2
    assert num_epochs[1] < 1
