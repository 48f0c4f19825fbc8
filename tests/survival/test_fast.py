"""The fast tier: seconds old on the same machine, and nothing more than the durable tier when the machine is gone.

Real processes, two of two devices each, each with a part of its own; machines are lost by deleting parts.
"""

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from runner.history.reader import read_history
from runner.storage import LocalStore
from tests.support.damage import flip_bit, list_damages
from tests.support.job_process import (
    ROOT,
    Attempt,
    Job,
    environment,
    has_state,
    kill_all_when,
    list_common_steps,
    list_copied_steps,
    list_fast_tier_parts,
    make_uninterrupted_counter_run,
    make_uninterrupted_run,
)

GPT = (
    "specs/gpt_nano.yaml",
    "config.train.total_steps=60",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "checkpoint.every_steps=20",
    "logging.every_steps=5",
    "config.eval.batches=2",
)
COUNTER = (
    "specs/counter.yaml",
    "config.total_steps=60",
    "config.step_seconds=0.08",
    "config.width=4096",
    "checkpoint.every_steps=20",
)
DEVICES, PROCESSES = 2, 2


def make_job(tmp_path: Path, what: tuple[str, ...] = COUNTER) -> Job:
    fast = (f"checkpoint.local_directory={tmp_path / 'fast'}", "checkpoint.local_every_steps=3")
    return Job(what[0], tmp_path / "run", (*what[1:], *fast), devices=DEVICES)


def parts(tmp_path: Path, process: int) -> dict[int, Path]:
    """Return the steps of which a process has a part in its fast tier."""
    return list_fast_tier_parts(tmp_path / "fast", process)


def common(tmp_path: Path) -> list[int]:
    """Return the steps of which every process has a part."""
    return list_common_steps(tmp_path / "fast", PROCESSES)


def run_until(job: Job, happens: Callable[[], bool], what: str) -> list[Attempt]:
    """Start both processes and kill both with -9 once it happens."""
    attempts = job.start_processes(PROCESSES)
    kill_all_when(attempts, happens, what)
    return attempts


def finish(job: Job, num_processes: int = PROCESSES) -> dict[str, object]:
    """Run to the end; the event of the restore."""
    paceless = job if job.spec == GPT[0] else job.with_options("config.step_seconds=0")
    attempts = paceless.start_processes(num_processes)
    for attempt in attempts:
        attempt.expect(0)
    restores = [event for event in job.events("restore") if event["attempt"] == attempts[0].number]
    return (
        {key: restores[0][key] for key in ("step", "tier", "from_replicas") if key in restores[0]} if restores else {}
    )


def expected(what: tuple[str, ...] = COUNTER) -> object:
    """Return the outcome of two undisturbed processes without a fast tier."""
    if what is COUNTER:
        return make_uninterrupted_counter_run(COUNTER[1:]).outcome()
    return make_uninterrupted_run(what[0], what[1:], DEVICES, PROCESSES).outcome()


@pytest.mark.soak
def test_a_crash_restores_from_the_fast_tier(
    tmp_path: Path,
) -> None:
    job = make_job(tmp_path, GPT)
    run_until(job, lambda: max(common(tmp_path), default=0) > 21, "a fast step beyond the durable one")
    newest = common(tmp_path)[-1]
    assert newest > job.newest()
    assert finish(job) == {"step": newest, "tier": "fast"}
    assert job.outcome() == expected(GPT)


@pytest.mark.soak
def test_a_lost_machine_restores_from_the_durable_tier(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_until(job, lambda: job.newest() >= 20 and max(common(tmp_path), default=0) > 21, "a durable step")
    durable = job.newest()
    (machine,) = (tmp_path / "fast").glob("*/1")
    shutil.rmtree(machine)
    assert finish(job) == {"step": durable, "tier": "durable"}
    assert job.outcome() == expected()


@pytest.mark.soak
def test_a_step_with_a_missing_part_is_not_restored(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_until(job, lambda: len(common(tmp_path)) > 1 and common(tmp_path)[-1] > 21, "two fast steps beyond step 20")
    older, newest = common(tmp_path)[-2:]
    (blocks,) = (parts(tmp_path, 1)[newest] / "arrays").glob("blocks.*.bin")
    blocks.unlink()
    restored = finish(job)
    assert restored == max(
        {"step": older, "tier": "fast"}, {"step": job.newest() if older < 20 else 0, "tier": "durable"},
        key=lambda found: found["step"],
    )  # fmt: skip
    fallbacks = job.events("fallback")
    assert [(event["rejected"], event["tier"]) for event in fallbacks] == [(newest, "fast")]
    assert f"{blocks.name} is missing" in fallbacks[0]["reason"]
    assert job.outcome() == expected()


@pytest.mark.soak
def test_a_flipped_bit_in_a_part_falls_back(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_until(job, lambda: len(common(tmp_path)) > 1 and common(tmp_path)[-1] > 21, "two fast steps beyond step 20")
    newest = common(tmp_path)[-1]
    (blocks,) = (parts(tmp_path, 0)[newest] / "arrays").glob("blocks.*.bin")
    content = bytearray(blocks.read_bytes())
    content[len(content) // 3] ^= 4
    blocks.write_bytes(content)
    assert int(str(finish(job)["step"])) < newest
    assert job.outcome() == expected()


@pytest.mark.soak
def test_parts_of_another_mesh_are_ignored(tmp_path: Path) -> None:
    """One process cannot have all of a state of which two have kept a half each."""
    job = make_job(tmp_path, GPT).with_options("topology.mesh={data: 1, fsdp: auto, tensor: 1}")
    run_until(job, lambda: job.newest() >= 20 and max(common(tmp_path), default=0) > 21, "a durable step")
    durable = job.newest()
    alone = job.start()
    alone.wait_until(lambda: has_state(alone), "a state")
    (restore,) = alone.events("restore")
    alone.kill()
    assert (restore["step"], restore["tier"]) in {(durable, "durable")}


@pytest.mark.soak
@pytest.mark.parametrize("is_lost", [True, False])
def test_a_kill_after_the_last_step_ends_with_one_durable_save(is_lost: bool, tmp_path: Path) -> None:
    options = ("config.total_steps=60", "config.step_seconds=0.05", "checkpoint.every_steps=60")
    fast = (f"checkpoint.local_directory={tmp_path / 'fast'}", "checkpoint.local_every_steps=60")
    job = Job("specs/counter.yaml", tmp_path / "run", (*options, *fast))
    attempt = job.start()
    attempt.wait_until(lambda: job.newest() == 60, "the last step")
    attempt.kill()
    if is_lost:
        shutil.rmtree(job.checkpoints / "60")
    (job.directory / "result.json").unlink(missing_ok=True)
    job.finish()
    assert job.committed() == [60]
    assert job.outcome() == make_uninterrupted_run("specs/counter.yaml", options).outcome()


@pytest.mark.soak
def test_a_single_process_restores_from_its_fast_tier(tmp_path: Path) -> None:
    options = ("config.total_steps=60", "config.step_seconds=0.02", "checkpoint.every_steps=30")
    fast = (f"checkpoint.local_directory={tmp_path / 'fast'}", "checkpoint.local_every_steps=2")
    job = Job("specs/counter.yaml", tmp_path / "run", (*options, *fast))
    attempt = job.start()
    attempt.wait_until(lambda: max(parts(tmp_path, 0), default=0) >= 20, "a fast step")
    attempt.kill()
    newest = max(parts(tmp_path, 0))
    again = job.finish()
    (restore,) = again.events("restore")
    assert (restore["step"], restore["tier"]) == (newest, "fast")
    assert job.outcome() == make_uninterrupted_run("specs/counter.yaml", options).outcome()
    assert not parts(tmp_path, 0)  # of a run that is done


@pytest.mark.soak
def test_all_processes_continue_without_a_fast_tier_that_one_cannot_use(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_until(job, lambda: job.newest() >= 20 and max(common(tmp_path), default=0) > 21, "a durable step")
    durable = job.newest()
    (machine,) = (tmp_path / "fast").glob("*/1")
    shutil.rmtree(machine)
    machine.touch()
    assert finish(job) == {"step": durable, "tier": "durable"}
    assert len(job.events("fast_tier_off")) == 1
    assert job.outcome() == expected()


SMALL_DISK = """import shutil, sys
usage = shutil.disk_usage("/")._replace(free=10**6)
shutil.disk_usage = lambda path: usage
from runner.cli.app import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_too_small_fast_disk_is_refused_at_startup(tmp_path: Path) -> None:
    """Start on a disk that says it has a megabyte left: no disk is too small for a state that fits in memory."""
    job = make_job(tmp_path).with_options("config.width=1000000")
    words = [word for option in (f"directory={job.directory}", *job.options) for word in ("--set", option)]
    result = subprocess.run(
        [sys.executable, "-c", SMALL_DISK, job.spec, *words],
        cwd=ROOT,
        env=environment(1),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2, result.stderr
    (line,) = result.stderr.splitlines()
    assert "checkpoint.local_directory" in line
    assert "has room for 0.001 GB, needs 0.008 GB: 2 checkpoints" in line
    assert not job.committed()


# Replicas of parts on other hosts.


SHARDED = (*GPT, "topology.mesh={data: 1, fsdp: auto, tensor: 1}")


def run_with_replicas(
    tmp_path: Path, what: tuple[str, ...], num_processes: int, owners: Sequence[int]
) -> tuple[Job, int]:
    """Run until all have a part of a step beyond the durable one, and `owners` copies of it; kill and return the step.

    Each of the owners sends its part to the process that follows.
    """
    job = make_job(tmp_path, what).with_options("checkpoint.local_replicas=1")
    attempts = job.start_processes(num_processes)

    def find_copied() -> int:
        steps = [set(list_fast_tier_parts(tmp_path / "fast", process)) for process in range(num_processes)]
        for process in owners:
            steps.append(list_copied_steps(tmp_path / "fast", process, (process + 1) % num_processes))
        return max(set.intersection(*steps), default=0)

    kill_all_when(attempts, lambda: find_copied() > max(21, job.newest()), "copies of a step beyond the durable one")
    copied = {path.name for path in (tmp_path / "fast").glob("*/*/copies/*")}
    assert copied == set(map(str, owners))
    step = find_copied()
    for process in range(num_processes):  # Parts that were not sent yet would be restored instead.
        for newer, part in parts(tmp_path, process).items():
            if newer > step:
                shutil.rmtree(part)
    return job, step


def lose(tmp_path: Path, *processes: int) -> None:
    """Delete all that these processes have in the fast tier."""
    for process in processes:
        (host,) = (tmp_path / "fast").glob(f"*/{process}")
        shutil.rmtree(host)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("what", "process", "num_processes", "owners"),
    [
        # Every process has the whole state of the counter, but process 0 alone has the rows.
        pytest.param(COUNTER, 0, 3, [0], id="counter-0 of 3"),
        pytest.param(COUNTER, 2, 3, [0], id="counter-2 of 3", marks=pytest.mark.soak),
        pytest.param(SHARDED, 0, 2, [0, 1], id="sharded gpt-0 of 2", marks=pytest.mark.soak),
        pytest.param(SHARDED, 1, 2, [0, 1], id="sharded gpt-1 of 2", marks=pytest.mark.soak),
    ],
)
def test_a_host_that_comes_back_empty_gets_its_part_from_a_replica(
    what: tuple[str, ...], process: int, num_processes: int, owners: list[int], tmp_path: Path
) -> None:
    job, step = run_with_replicas(tmp_path, what, num_processes, owners)
    lose(tmp_path, process)
    assert finish(job, num_processes) == {"step": step, "tier": "fast", "from_replicas": [process]}
    attempt = read_history(LocalStore(job.directory)).attempts[-1]
    assert attempt.restored_from == f"fast tier, process {process} from a replica"
    whole = make_uninterrupted_counter_run(what[1:]) if what is COUNTER else make_uninterrupted_run(
        what[0], what[1:], DEVICES, PROCESSES
    )  # fmt: skip
    assert job.outcome() == whole.outcome()


@pytest.mark.soak
def test_two_of_three_empty_hosts_get_the_state_of_the_third(tmp_path: Path) -> None:
    job, step = run_with_replicas(tmp_path, COUNTER, 3, [0])
    lose(tmp_path, 1, 2)
    assert finish(job, 3) == {"step": step, "tier": "fast", "from_replicas": [1, 2]}
    assert job.outcome() == expected()


FILES = tuple((process, name) for name in ("part.json", "arrays/*.bin", "arrays/*.json") for process in (0, 1))
DAMAGES = {"flip bit": flip_bit, **list_damages(Path(__file__))}


@functools.cache
def make_killed_run(what: tuple[str, ...], owners: tuple[int, ...]) -> tuple[Path, int]:
    """Return the directory of a job of two processes, killed when `owners` had copies of a step, and that step."""
    base = Path(os.environ["RUNNER_TESTS_SESSION"]) / f"damaged parts.{len(owners)}.{os.getpid()}"
    (base / "elsewhere").mkdir(parents=True)
    _, step = run_with_replicas(base, what, PROCESSES, owners)
    return base, step


def finish_damaged_run(
    tmp_path: Path, what: tuple[str, ...], owners: tuple[int, ...], files: dict[tuple[object, str], str]
) -> tuple[dict[str, object], int]:
    """Finish a copy of the killed run, in which files of the step that it had copied are damaged.

    Args:
        tmp_path: a new directory.
        what: spec and options.
        owners: processes of whose parts there are copies.
        files: damage, by the directory of a process or of copies, and a pattern of the files in its part.

    Returns:
        The event of the restore, and the step.
    """
    source, step = make_killed_run(what, owners)
    base = tmp_path / "job"
    shutil.copytree(source, base, symlinks=True)
    for (place, pattern), damage in files.items():
        paths = [path for path in (base / "fast").glob(f"*/{place}/{step}/{pattern}") if path.is_file()]
        assert paths
        for path in paths:
            DAMAGES[damage](path)
    job = make_job(base, what).with_options("checkpoint.local_replicas=1")
    restored = finish(job)
    whole = make_uninterrupted_counter_run(what[1:]) if what is COUNTER else make_uninterrupted_run(
        what[0], what[1:], DEVICES, PROCESSES
    )  # fmt: skip
    assert job.outcome() == whole.outcome()
    return restored, step


@pytest.mark.soak
def test_damaged_files_of_several_processes_are_read_from_replicas(tmp_path: Path) -> None:
    files = {(0, "arrays/*.bin"): "flip bit", (0, "arrays/*.json"): "delete", (1, "arrays/*.bin"): "torn"}
    restored, step = finish_damaged_run(tmp_path, COUNTER, (0,), files)
    assert restored == {"step": step, "tier": "fast", "from_replicas": [0, 1]}


@pytest.mark.soak
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("process", "pattern"), FILES)
def test_a_damaged_file_of_a_part_is_read_from_a_replica(
    process: int, pattern: str, damage: str, tmp_path: Path
) -> None:
    restored, step = finish_damaged_run(tmp_path, COUNTER, (0,), {(process, pattern): damage})
    fetched = {} if damage == "move behind link" else {"from_replicas": [process]}
    assert restored == {"step": step, "tier": "fast"} | fetched


@pytest.mark.soak
@pytest.mark.parametrize("damage", ["flip bit", "delete"])
@pytest.mark.parametrize(("process", "pattern"), [(0, "metrics.jsonl"), (1, "arrays/*.bin")])
def test_a_damaged_file_of_a_trainer_is_read_from_a_replica(
    process: int, pattern: str, damage: str, tmp_path: Path
) -> None:
    restored, step = finish_damaged_run(tmp_path, SHARDED, (0, 1), {(process, pattern): damage})
    assert restored == {"step": step, "tier": "fast", "from_replicas": [process]}


@pytest.mark.soak
@pytest.mark.parametrize("pattern", ["part.json", "arrays/*.bin", "arrays/*.json"])
def test_without_an_intact_replica_an_older_step_is_restored(pattern: str, tmp_path: Path) -> None:
    # Process 1 has the whole state too.
    files: dict[tuple[object, str], str] = {(place, pattern): "flip bit" for place in ("0", "1", "1/copies/0")}
    restored, step = finish_damaged_run(tmp_path, COUNTER, (0,), files)
    source, _ = make_killed_run(COUNTER, (0,))
    older = max(each for each in common(source) if each < step)
    durable = make_job(source).newest()
    assert restored == {"step": max(older, durable), "tier": "fast" if older >= durable else "durable"}


@pytest.mark.soak
def test_without_part_and_copy_the_durable_tier_is_read(tmp_path: Path) -> None:
    job, _ = run_with_replicas(tmp_path, SHARDED, 2, [0, 1])
    lose(tmp_path, 0)
    shutil.rmtree(next((tmp_path / "fast").glob("*/1/copies")))
    durable = job.newest()
    assert finish(job) == {"step": durable, "tier": "durable"}
    assert job.outcome() == make_uninterrupted_run(SHARDED[0], SHARDED[1:], DEVICES, PROCESSES).outcome()


@pytest.mark.soak
def test_more_replicas_than_other_processes_are_refused(tmp_path: Path) -> None:
    job = make_job(tmp_path).with_options("checkpoint.local_replicas=2")
    for attempt in job.start_processes(PROCESSES):
        attempt.expect(2)
        assert "checkpoint.local_replicas=2: 2 needs at least 3 processes, and the job has 2" in attempt.output
