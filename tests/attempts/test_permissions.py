"""Permissions: every file and directory that a run, a cache or an output consists of honours the umask."""

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.tokenise import Tokenise
from runner import ExecutionSpec
from runner.attempts.logs import drain_log_file, install_log_file
from runner.cli.app import main
from tests.support.job_process import ROOT, Job, make_uninterrupted_run
from tests.support.simulated_devices import environment
from tests.support.tiny_jobs import make_counter, make_gpt

UMASKS = [0o002, 0o027, 0o077]


@pytest.fixture(params=UMASKS, ids="{:03o}".format)
def umask(request):
    """Set the umask of this process, and return it."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def find_wrong_modes(top: Path, umask: int) -> dict[str, str]:
    """Return the modes that are not those that a plain `open` or `mkdir` gives, by path."""
    wrong = {}
    for directory, names, files in os.walk(top):
        for path in (Path(directory, name) for name in (*names, *files)):
            mode, full = stat.S_IMODE(path.lstat().st_mode), 0o777 if path.is_dir() else 0o666
            if mode & 0o777 != full & ~umask:
                wrong[str(path.relative_to(top))] = f"{mode:03o}"
    return wrong


def test_all_files_of_a_job_honour_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    options = {
        "checkpoint.every_steps": 2,
        "checkpoint.local_directory": str(tmp_path / "fast"),
        "checkpoint.local_every_steps": 1,
        "topology": {"compile_cache": "directory"},
        "config.total_steps": 4,
    }
    install_log_file()
    make_counter(tmp_path / "run", **options)()
    drain_log_file()
    assert main(["checkpoints", "copy", str(tmp_path / "run"), str(tmp_path / "copy")]) == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"events.jsonl", "attempts", "logs", "checkpoints", "job.json", "result.json"} <= names
    assert find_wrong_modes(tmp_path, umask) == {}


@pytest.mark.soak
def test_all_files_of_a_trainer_and_of_its_outputs_honour_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    options = {
        "checkpoint.every_steps": 2,
        "checkpoint.local_directory": str(tmp_path / "fast"),
        "checkpoint.local_every_steps": 1,
        "logging.tensorboard": True,
        "topology.compile_cache": "directory",
        "config.train.total_steps": 4,
    }
    make_gpt(tmp_path / "run", **options)()
    where = str(tmp_path / "run")
    for command in (
        ["export", where, "-o", str(tmp_path / "export")],
        ["evaluate", where, "--follow", "-o", str(tmp_path / "evaluations.jsonl")],
        ["report", where, "-o", str(tmp_path / "report.html")],
    ):
        assert main(command) == 0
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.jsonl", "tensorboard"} <= names
    assert find_wrong_modes(tmp_path, umask) == {}


def test_all_files_of_a_corpus_honour_the_umask(umask, tmp_path, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("one line of text\n" * 100)
    spec = {
        "name": "corpus",
        "job": "experiments.tokenise:Tokenise",
        "directory": str(tmp_path / "corpus"),
        "config": {"source": str(tmp_path / "text.txt"), "tokenizer": {"kind": "bytes"}},
    }
    Tokenise(ExecutionSpec.model_validate(spec))()
    assert find_wrong_modes(tmp_path, umask) == {}


@pytest.mark.soak
def test_a_colleague_of_the_group_resumes_a_run(tmp_path):
    """Two users of one group train in turn, and the run is that of one user; needs root."""
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("needs root and setpriv")
    options = ("config.step_seconds=0", "config.width=64", "checkpoint.every_steps=2", "checkpoint.keep_last=1")
    whole = make_uninterrupted_run("specs/counter.yaml", (*options, "config.total_steps=12"))
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    os.chown(shared, 0, 61000)
    for number, total_steps in enumerate((4, 8, 12)):
        cache = tmp_path / f"cache.{number % 2}"
        cache.mkdir(exist_ok=True)
        os.chown(cache, 61001 + number % 2, 61000)
        job = Job("specs/counter.yaml", shared / "run", (*options, f"config.total_steps={total_steps}"), cache=cache)
        user = ["setpriv", f"--reuid={61001 + number % 2}", "--regid=61000", "--clear-groups"]
        # Python and the directories above may be readable by root alone; nobody may write more than the modes allow.
        user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        command = [*user, "sh", "-c", 'umask 002; exec "$@"', "sh", sys.executable, "-m", "runner", *job.arguments]
        result = subprocess.run(
            command, cwd=ROOT, env=environment(1, cache) | {"HOME": str(cache)}, capture_output=True, text=True
        )
        assert result.returncode == 0, result.stderr
        assert [event["attempt"] for event in job.events("done")] == list(range(1, number + 2))
    assert job.result() == whole.result()
