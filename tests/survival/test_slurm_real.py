"""A job under a real SLURM that is requeued, killed and robbed of a node ends with the bits of an undisturbed one."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.spec import read_spec
from tests.support import job_process
from tests.support.leftover import is_dead
from tests.support.slurm_cluster import NODES, SlurmCluster, wait_until
from tests.support.special_characters import MULTILINE_OVERRIDE, TEXTS
from tests.support.two_files import write_two_files

pytestmark = pytest.mark.soak

OPTIONS = (
    "config.train.total_steps=600",
    "config.eval.every_steps=200",
    "checkpoint.every_steps=20",
    "logging.every_steps=20",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    directory = tmp_path_factory.mktemp("slurm")
    running = SlurmCluster(directory)
    yield running
    running.stop()


class SlurmJob:
    """A job that was submitted by `python -m launch slurm`, in a working directory of its own."""

    def __init__(self, cluster: SlurmCluster, job: job_process.Job, working_directory: Path, *options: str):
        self.cluster, self.job = cluster, job
        working_directory.mkdir()
        variables = cluster.variables | job_process.environment(job.devices, job.cache)
        variables |= {name: cluster.variables[name] for name in ("SLURM_CONF", "PATH")}
        command = [sys.executable, "-m", "launch", "slurm", *job.arguments, "--output", "job.log", *options]
        # Found from any directory, as an installed project is.
        variables["PYTHONPATH"] = str(job_process.ROOT)
        result = subprocess.run(command, cwd=working_directory, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        self.id = re.fullmatch(r"submitted as job (\d+)\n", result.stdout)[1]
        self.log = working_directory / "job.log"

    def report(self) -> str:
        log = self.log.read_text(errors="replace") if self.log.exists() else "none"
        return f"{self.cluster.job(self.id)}\n--- the job's log\n{log}\n{self.cluster.report()}"

    def wait_until(self, happens, what: str) -> None:
        wait_until(happens, what, self.report)

    def num_restarts(self) -> int:
        return int(self.cluster.job(self.id)["Restarts"])

    def await_commit(self, attempt: int) -> None:
        def has_committed() -> bool:
            state = self.cluster.job(self.id)["JobState"]
            assert state in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"), f"{state}\n{self.report()}"
            return any(row["attempt"] == attempt for row in self.job.events("commit"))

        self.wait_until(has_committed, f"a commit of attempt {attempt}")

    def await_restart(self, number: int) -> None:
        self.wait_until(lambda: self.num_restarts() >= number, f"restart {number}")

    def await_end(self) -> dict[str, str]:
        """Wait for the end; what SLURM says of it."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        self.wait_until(lambda: self.cluster.job(self.id)["JobState"] in over, "the end of the job")
        return self.cluster.job(self.id)


def test_restarts_take_the_standby_of_each_task(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ("config.total_steps=600", "config.step_seconds=0.1", "checkpoint.every_steps=10")
    spec = str(job_process.ROOT / "specs" / "counter.yaml")
    undisturbed = job_process.Job(spec, tmp_path / "undisturbed", (*options, "config.step_seconds=0"), devices=1)
    undisturbed.launch(num_processes=2).expect(0, job_process.WHOLE_RUN_DEADLINE_SECONDS)
    job = job_process.Job(spec, tmp_path / "run", options, devices=1)
    submitted = SlurmJob(cluster, job, tmp_path / "work", "--nodes", "2", "--standby-seconds", "3")

    def await_standbys(attempt: int) -> list[list[int]]:
        """Wait until an attempt has committed and its standbys wait; return trainer and standby of each task."""
        submitted.await_commit(attempt)

        def find() -> list[list[int]]:
            return [cluster.find_runner_pids(submitted.id, process_id) for process_id in range(2)]

        submitted.wait_until(lambda: all(len(pids) == 2 for pids in find()), "a standby of each task")
        pids = find()
        submitted.wait_until(lambda: all(is_idle(standby) for _, standby in pids), "idle standbys")
        return pids

    def find_main(attempt: int) -> int:
        return int(json.loads((job.directory / "attempts" / str(attempt)).read_bytes())["pid"])

    (main, standby), (other, other_standby) = await_standbys(attempt=1)
    assert find_main(1) == main
    os.kill(other, signal.SIGKILL)
    (main, second_standby), (other, other_second_standby) = await_standbys(attempt=2)
    assert (main, other) == (standby, other_standby) == (find_main(2), other_standby), submitted.report()
    # The standby of one task has been killed: its shell starts a process.
    os.kill(other_second_standby, signal.SIGKILL)
    os.kill(main, signal.SIGKILL)
    submitted.await_commit(attempt=3)
    assert find_main(3) == second_standby, submitted.report()
    assert cluster.find_task_pid(submitted.id, 1) not in (other, other_second_standby)
    # The queue ends a standby.
    (main, standby), (other, other_standby) = await_standbys(attempt=3)
    cluster.command("scontrol", "requeue", submitted.id)
    submitted.await_restart(1)
    submitted.await_commit(attempt=4)
    assert find_main(4) not in (main, standby)
    assert not {main, standby, other, other_standby} & set(cluster.find_runner_pids(submitted.id, 0))
    *_, (last, standby) = await_standbys(attempt=4)
    end = submitted.await_end()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "1"), submitted.report()
    assert is_dead(last)
    assert is_dead(standby)
    assert job.outcome() == undisturbed.outcome()
    first, second, third, _ = job.events("start")
    assert first["submitted"] < second["submitted"] < third["submitted"] <= third["began"] + 1
    # Nothing is said of a standby that has ended unused.
    tail = submitted.log.read_text().rpartition("counter: done")[2]
    assert "error" not in tail, submitted.report()


def test_a_repository_of_two_files_runs_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The user's module is found in the directory of the submission, and options of srun reach each step."""
    write_two_files(tmp_path / "work", str(tmp_path / "run"), total_steps=6)
    variables = cluster.variables | job_process.environment(1, tmp_path / "cache")
    variables |= {name: cluster.variables[name] for name in ("SLURM_CONF", "PATH")}
    variables["PYTHONPATH"] = str(job_process.ROOT)
    options = ["--nodes", "2", "--cpus-per-task", "1", "--output", "job.log", "--srun-option=--comment=two files"]
    command = [sys.executable, "-m", "launch", "slurm", "rnn.yaml", *options]
    result = subprocess.run(command, cwd=tmp_path / "work", env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    number = re.fullmatch(r"submitted as job (\d+)\n", result.stdout)[1]
    over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
    wait_until(lambda: cluster.job(number)["JobState"] in over, "the end of the job", cluster.report)
    log = (tmp_path / "work" / "job.log").read_text()
    assert cluster.job(number)["JobState"] == "COMPLETED", log
    assert json.loads((tmp_path / "run" / "result.json").read_text())["step"] == 6


def is_idle(pid: int) -> bool:
    """Return True if a process has slept for a while."""
    readings = []
    for _ in range(4):
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        readings.append((state, fields[10:12]))
        time.sleep(0.25)
    return all(reading == ("S", readings[0][1]) for reading in readings)


def test_slurm_requeues_and_a_lost_node_change_no_bit(cluster: SlurmCluster, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    spec = str(job_process.ROOT / "specs" / "gpt_nano.yaml")
    undisturbed = job_process.Job(spec, tmp_path / "undisturbed", OPTIONS, devices=1, cache=cache)
    undisturbed.launch(num_processes=2).expect(0, job_process.WHOLE_RUN_DEADLINE_SECONDS)

    job = job_process.Job(spec, tmp_path / "disturbed run", OPTIONS, devices=1, cache=cache)
    submitted = SlurmJob(cluster, job, tmp_path / "work", "--nodes", "2", "--cpus-per-task", "1")
    submitted.await_commit(attempt=1)
    cluster.kill_node(NODES[1])
    submitted.await_restart(1)
    cluster.start_node(NODES[1])
    for num_restarts in (2, 3, 4):
        submitted.await_commit(attempt=num_restarts)
        cluster.command("scontrol", "requeue", submitted.id)
        submitted.await_restart(num_restarts)
    for attempt, process_id in ((5, 1), (6, 0)):
        submitted.await_commit(attempt)
        os.kill(cluster.find_task_pid(submitted.id, process_id), signal.SIGKILL)

    end = submitted.await_end()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "4"), submitted.report()
    for start in job.events("start"):  # SLURM tells whole seconds, and of a job that is queued again, when that was
        assert start["began"] - 600 < start["submitted"] <= start["began"] + 1
    assert job.outcome() == undisturbed.outcome()
    assert job.num_attempts() == 7
    log = submitted.log.read_text()
    assert log.count("launch: ended with 75; SLURM decides whether the job starts again") >= 3, log
    # Each of the two came after a commit, from which on restarts are counted anew.
    assert len(re.findall("launch: ended with 76; restart 1 of 100, on the same nodes in [12] s", log)) == 2, log
    assert "exiting without another save" not in log, "a task got SIGTERM twice"
    assert len(job.events("preempt")) >= 3


def test_spare_nodes_replace_lost_ones_without_the_queue(tmp_path: Path) -> None:
    nodes = [f"127.0.0.{number}" for number in range(1, 6)]
    options = ("config.total_steps=500", "config.step_seconds=0.1", "checkpoint.every_steps=10")
    spec = str(job_process.ROOT / "specs" / "counter.yaml")
    undisturbed = job_process.Job(spec, tmp_path / "undisturbed", (*options, "config.step_seconds=0"), devices=1)
    undisturbed.launch(num_processes=2).expect(0, job_process.WHOLE_RUN_DEADLINE_SECONDS)

    job = job_process.Job(spec, tmp_path / "run", options, devices=1)
    (tmp_path / "slurm").mkdir()
    cluster = SlurmCluster(tmp_path / "slurm", nodes)
    try:
        submitted = SlurmJob(cluster, job, tmp_path / "work", "--nodes", "2", "--spare-nodes", "3")
        submitted.await_commit(attempt=1)
        # A machine that dies: SLURM has not noticed yet when the job starts again.
        cluster.kill_node(nodes[1])
        os.kill(cluster.find_task_pid(submitted.id, 1), signal.SIGKILL)
        submitted.await_commit(attempt=2)
        cluster.command("scontrol", "update", f"nodename={nodes[2]}", "state=drain", "reason=test")
        os.kill(cluster.find_task_pid(submitted.id, 0), signal.SIGKILL)
        submitted.await_commit(attempt=3)
        # As the process on a node with a defective device does.
        next((tmp_path / "work").glob("*.restarts")).with_suffix(".faulty").write_text(f"{nodes[3]}\n")
        os.kill(cluster.find_task_pid(submitted.id, 0), signal.SIGKILL)
        submitted.await_commit(attempt=4)
        end = submitted.await_end()
    finally:
        cluster.stop()
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "0"), submitted.report()
    assert job.outcome() == undisturbed.outcome()
    restarts = re.findall(r"launch: ended with 76; restart (\d) of 100, on (\S+) in", submitted.log.read_text())
    expected = [("1", f"{nodes[0]},{nodes[number + 1]}") for number in range(1, 4)]  # a commit before each
    assert restarts == expected, submitted.report()


def test_a_time_limit_preempts_and_scancel_ends_a_job(cluster: SlurmCluster, tmp_path: Path) -> None:
    options = ("config.total_steps=100000", "config.step_seconds=0.1", "checkpoint.every_steps=50")
    job = job_process.Job(str(job_process.ROOT / "specs" / "counter.yaml"), tmp_path / "run", options, devices=1)
    limits = ("--time", "2", "--grace-seconds", "59")  # SLURM counts limits in minutes
    submitted = SlurmJob(cluster, job, tmp_path / "work", *limits)
    submitted.await_restart(1)
    assert "launch: preempted; starting again" in submitted.log.read_text(), submitted.report()
    saved = job.newest()
    assert [row["step"] for row in job.events("preempt")] == [saved]
    submitted.await_commit(attempt=2)
    cluster.command("scancel", submitted.id)
    end = submitted.await_end()
    assert (end["JobState"], end["Restarts"]) == ("CANCELLED", "1"), submitted.report()
    assert job.newest() > saved
    assert "launch: ended with 75; SLURM decides whether the job starts again" in submitted.log.read_text()


def test_special_characters_reach_a_job_unchanged(cluster: SlurmCluster, tmp_path: Path) -> None:
    spec = tmp_path / "my specs; it's $HOME" / "#SBATCH counter.yaml"
    spec.parent.mkdir()
    spec.write_text((job_process.ROOT / "specs" / "counter.yaml").read_text())
    project, group = json.dumps("".join(TEXTS)), "".join(reversed(TEXTS))
    options = (
        f"name={'Az0._-' * 21}",
        f"project={project}",
        f"group={json.dumps(group)}",
        MULTILINE_OVERRIDE,
        "config.total_steps=5",
        "config.step_seconds=0",
    )
    job = job_process.Job(str(spec), tmp_path / "#SBATCH; it's here", options, devices=1)
    comment = 'it\'s "two" words \\ #SBATCH $HOME %j 数'
    submitted = SlurmJob(cluster, job, tmp_path / "work", f"--sbatch-option=--comment={comment}")
    end = submitted.await_end()
    assert (end["JobState"], end["ExitCode"], end["NumNodes"]) == ("COMPLETED", "0:0", "1"), submitted.report()
    assert end["JobName"] == "Az0._-" * 21
    shown = cluster.command("scontrol", "--oneliner", "show", "job", submitted.id)
    assert f"Comment={comment} " in shown
    saved = read_spec(job.directory / "spec.yaml")
    assert (saved.project, saved.group, saved.seed) == (json.loads(project), group, 1)
    assert not list(tmp_path.rglob("pwned"))


def test_a_requeued_job_excludes_its_faulty_nodes(tmp_path: Path) -> None:
    """The first node is excluded by the user, the second is faulty, and SLURM has no other choice than the third."""
    nodes = [f"127.0.0.{number}" for number in range(1, 4)]
    options = ("config.total_steps=300", "config.step_seconds=0.1", "checkpoint.every_steps=10")
    job = job_process.Job(str(job_process.ROOT / "specs" / "counter.yaml"), tmp_path / "run", options, devices=1)
    (tmp_path / "slurm").mkdir()
    cluster = SlurmCluster(tmp_path / "slurm", nodes)
    try:
        submitted = SlurmJob(cluster, job, tmp_path / "work", "--nodes", "1", f"--sbatch-option=--exclude={nodes[0]}")
        submitted.await_commit(attempt=1)
        first = cluster.job(submitted.id)["NodeList"]
        # As the process on a node with a defective device does.
        (tmp_path / "work" / f"counter-{submitted.id}.faulty").write_text(f"{first}\n$(touch {tmp_path}/run/no)\n")
        os.kill(cluster.find_task_pid(submitted.id, 0), signal.SIGKILL)
        submitted.await_commit(attempt=2)
        second = cluster.job(submitted.id)
        excluded = cluster.command("scontrol", "show", "hostnames", second["ExcNodeList"]).split()
        end = submitted.await_end()
    finally:
        cluster.stop()
    assert {first, second["NodeList"]} == {nodes[1], nodes[2]}
    assert {*excluded} == {nodes[0], first}
    assert (end["JobState"], end["Restarts"]) == ("COMPLETED", "1"), submitted.report()
    log = submitted.log.read_text()
    assert "launch: the queue gives the job other nodes than" in log, log
    assert job.events("done")


def test_an_array_of_a_sweep_is_requeued_by_task_and_submitted_once(cluster: SlurmCluster, tmp_path: Path) -> None:
    working_directory, root, spec = tmp_path / "work", tmp_path / "root", str(job_process.ROOT / "specs/counter.yaml")
    working_directory.mkdir()
    variables = cluster.variables | job_process.environment(1, None)
    variables |= {name: cluster.variables[name] for name in ("SLURM_CONF", "PATH")}
    variables["PYTHONPATH"] = str(job_process.ROOT)
    options = ("config.total_steps=300", "config.step_seconds=0.1", "checkpoint.every_steps=10")
    words = [word for option in options for word in ("--set", option)]

    def sweep() -> str:
        command = [sys.executable, "-m", "launch", "sweep", spec, *words, "--grid", "seed=0,1,2", "--root", str(root)]
        command += ["--engine", "slurm", "--at-once", "2", "--skip-checks", "--", "--nodes", "1"]
        result = subprocess.run(command, cwd=working_directory, env=variables, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    def read_events(name: str, event: str) -> list[dict]:
        rows = job_process.read_lines(root / name / "events.jsonl")
        return [row for row in rows if row["event"] == event]

    def report() -> str:
        logs = "\n".join(path.read_text(errors="replace") for path in working_directory.glob("*.log"))
        return f"{logs}\n{cluster.report()}"

    array = re.search(r"3 runs submitted as array job (\d+)", sweep())[1]
    assert "submitted" not in (again := sweep())
    assert again.count("is in the queue as") == 3
    wait_until(lambda: all(read_events(name, "commit") for name in ("000", "001")), "commits of two tasks", report)
    assert not read_events("002", "start")  # at most two at once
    # A requeue of one task leaves the others alone, also the one whose id is that of the array.
    cluster.command("scancel", "--signal=TERM", "--batch", f"{array}_0")
    wait_until(lambda: len(read_events("000", "start")) == 2, "a second start of the first task", report)
    done = [root / name / "result.json" for name in ("000", "001", "002")]
    wait_until(lambda: all(path.exists() for path in done), "the end of all tasks", report)
    assert len(read_events("001", "start")) == 1, report()
    for name, path in zip(("000", "001", "002"), done, strict=True):
        undisturbed = job_process.Job(spec, tmp_path / name, (*options[:1], f"seed={int(name)}"), devices=1)
        undisturbed.start().expect(0)
        expected = json.loads((undisturbed.directory / "result.json").read_text())
        assert json.loads(path.read_text())["fingerprint"] == expected["fingerprint"]
    wait_until(lambda: "3 of 3 runs" in sweep(), "a sweep without anything left", report)
    log = working_directory / f"counter-{array}_0.log"
    assert "preempted; starting again" in log.read_text()
