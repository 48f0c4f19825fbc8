"""`launch sweep` on this machine: real runs that are killed and stopped, and mistakes that start nothing."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys

import pytest

from launch.app import main
from launch.sweep.record import SweepRecord, lock_root
from runner.history.sweep import Sweep
from runner.storage import LocalStore
from tests.support.job_process import DEADLINE_SECONDS, ROOT, environment

COUNTER = ["specs/counter.yaml", "--set", "config.total_steps=60", "--set", "checkpoint.every_steps=5"]
GPT = ["specs/gpt_nano.yaml"] + [
    word
    for setting in (
        "config.train={total_steps: 60, global_batch_examples: 8}",
        "config.eval={every_steps: 20, batches: 2}",
        "logging.every_steps=20",
        "config.data.sequence_length=32",
        "checkpoint.every_steps=5",
    )
    for word in ("--set", setting)
]
LEARNING_RATES = "config.optimizer.learning_rate"
SWEEPS = {
    "grid": [*COUNTER, "--set", "config.step_seconds=0.05", "--grid", "seed=0,1", "--grid", "config.width=64,128"],
    "halving": [*GPT, "--grid", f"{LEARNING_RATES}=1e-3,3e-3,1e-2", "--halving", "2@20,40"],
    "search": [*GPT, "--search", f"{LEARNING_RATES}=log(1e-3,1e-1)", "--number", "5"],
}


def start(words, root, at_once=2):
    command = [sys.executable, "-m", "launch", "sweep", *words, "--root", str(root), "--at-once", str(at_once)]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment(1, None), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == code, output
    return output


def read_outcome(root, output):
    """Return the record, the fingerprints of the runs that were not stopped, and the table."""
    record = json.loads((root / "sweep.json").read_text())
    fingerprints = {
        name: json.loads((root / name / "result.json").read_text())["fingerprint"]
        for name, run in record["runs"].items()
        if run["stopped_step"] is None
    }
    table = [line for line in output.splitlines() if re.match(r"run |\d{3}  |sweep: best", line)]
    return record, fingerprints, table


def list_descendants(pid):
    found = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    pairs = [tuple(map(int, line.split())) for line in found.splitlines()]
    pids = [pid]
    for parent in pids:
        pids += [child for child, above in pairs if above == parent and child not in pids]
    return pids


def kill_all(process, is_whole_tree):
    """Kill the sweep, or all of its tree; the pids are known before anything dies."""
    pids = list_descendants(process.pid)
    for pid in pids if is_whole_tree else pids[:1]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.daily(1)
@pytest.mark.parametrize("way", ["sweep", "tree", "term"])
@pytest.mark.parametrize("name", list(SWEEPS))
def test_a_sweep_that_is_killed_ends_as_an_undisturbed_one(name, way, tmp_path, request):
    num_kills = 10 if request.config.getoption("-m") == "soak" else 2
    expected = read_outcome(tmp_path / "a", finish(start(SWEEPS[name], tmp_path / "a")))
    generator, root, num_done = random.Random(f"{name} {way}"), tmp_path / "b", 0
    while True:
        process = start(SWEEPS[name], root)
        if num_done == num_kills:
            break
        try:
            process.wait(generator.uniform(1, 20))
            break  # it has ended before
        except subprocess.TimeoutExpired:
            num_done += 1
        if way == "term":
            process.send_signal(signal.SIGTERM)
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
            assert process.returncode in (75, 0, -signal.SIGTERM), output
        else:
            kill_all(process, way == "tree")
    output = finish(process)
    assert read_outcome(root, output) == expected
    again = start(SWEEPS[name], root)
    assert "started" not in finish(again)


@pytest.mark.soak
def test_a_diverged_run_is_a_result_and_a_failed_one_is_tried_again(tmp_path):
    words = [*GPT, "--grid", f"{LEARNING_RATES}=1e-3,1e30"]
    output = finish(start([*words, "--set", "config.optimizer.clip_norm=null"], tmp_path / "root"))
    assert "001: diverged: step 3" in output
    assert re.search(r"^000 .* done, best$", output, re.MULTILINE)
    assert "started" not in finish(start([*words, "--set", "config.optimizer.clip_norm=null"], tmp_path / "root"))


def test_a_second_sweep_and_another_sweep_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["sweep", *COUNTER, "--root", str(tmp_path / "root"), "--skip-checks", "--grid"]
    store = LocalStore(tmp_path / "root")
    sweep = Sweep("counter", "x", "0", "", is_maximised=False, rule={}, runs=())
    with lock_root(SweepRecord(store, "x", [], sweep)):
        assert main([*words, "seed=0,1"]) == 2
    assert "another sweep runs there" in capsys.readouterr().err
    assert not (tmp_path / "root" / "sweep.json").exists()
    record = {
        "name": "counter",
        "spec": "x",
        "digest": "0",
        "metric": "a",
        "is_maximised": False,
        "rule": {},
        "runs": {},
    }
    store.write("sweep.json", json.dumps(record).encode())
    assert main([*words, "seed=0,1"]) == 2
    assert "two sweeps in one root" in (problem := capsys.readouterr().err)
    assert "grid was null" in problem
    store.write("sweep.json", b"{")
    assert main([*words, "seed=0,1"]) == 2
    assert "damaged" in capsys.readouterr().err
    store.remove("sweep.json")
    store.write("job.json", b"{}")
    assert main([*words, "seed=0,1"]) == 2
    assert "holds a run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no settings"),
        (["--grid", "seed=0,1", "--engine", "slurm", "--halving", "2@10"], "--halving: slurm cannot"),
        (
            ["--grid", "seed=0,1", "--engine", "jobset", "--at-once", "2", "--", "--image", "a:1", "--nodes", "1"],
            "--at-once",
        ),
        (["--search", "config.width=int(1,9)", "--number", "3", "--engine", "slurm"], "--search: slurm"),
        (["--search", "config.width=int(1,9)", "--number", "3", "--halving", "2@10"], "--halving and --search"),
        (["--grid", "seed=0,1", "--", "--processess", "2"], "did you mean --processes"),
        (["--grid", "seed=0,1", "--", "--set", "a=1"], "before --"),
        (["--grid", "seed=0,1", "--set", "seed=1"], "seed is given twice"),
        (["--grid", "seed=0,1", "--file", "none.yaml"], "--file none.yaml: cannot be read"),
        (["--grid", "seed=0,1", "--metric", ""], "--metric"),
        (["--grid", "seed=0,1", "--set", f"name={'x' * 126}"], "name: the runs are called"),
    ],
)
def test_a_mistake_is_one_message_and_starts_nothing(words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    root = tmp_path / "root"
    assert main(["sweep", "specs/counter.yaml", "--root", str(root), *words]) == 2
    output, problems = capsys.readouterr()
    assert message in problems
    assert output == ""
    assert not root.exists()


def test_refused_values_are_named_with_their_runs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["--grid", "config.model.heads=4,3", "--grid", "seed=0,1", "--grid", "config.optimizer.learning_rat=1.0"]
    assert main(["sweep", *GPT, "--root", str(tmp_path / "root"), *words]) == 2
    problems = capsys.readouterr().err
    assert "all runs: --set config.optimizer.learning_rat=1.0: unknown key; did you mean" in problems
    assert "run 002 (config.model.heads=3, seed=0, config.optimizer.learning_rat=1.0) and 1 more: " in problems
    for rule, message in (("2@30", "use 20 or 40"), ("2@60", "not below")):
        words = ["--grid", "seed=0,1", "--halving", rule]
        assert main(["sweep", *GPT, "--root", str(tmp_path / "root"), *words]) == 2
        assert message in capsys.readouterr().err


def test_the_file_gives_the_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    file = tmp_path / "sweep.yaml"
    file.write_text("runs: [{config.width: 8}, {config.total_steps: 9}]\ngrid: {seed: [0, 1]}\nmetric: loss\n")
    words = ["sweep", "specs/counter.yaml", "--root", str(tmp_path / "root"), "--file", str(file), "--dry-run"]
    assert main([*words, "--skip-checks"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "000  config.width=8, seed=0",
        "001  config.width=8, seed=1",
        "002  config.total_steps=9, seed=0",
        "003  config.total_steps=9, seed=1",
    ]
    file.write_text("grids: {seed: [0, 1]}\n")
    assert main(words) == 2
    assert "sweep.yaml:1: grids: unknown key; did you mean grid?" in capsys.readouterr().err
    assert not (tmp_path / "root").exists()
