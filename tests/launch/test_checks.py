"""Launchers refuse what `plan` refuses, and say what only the hosts of the job can tell."""

import re
import socket
import subprocess
from pathlib import Path

import pytest
import yaml

from launch.app import main
from launch.checks import check_job, list_unshipped_data
from launch.options import LaunchArguments
from runner.errors import EXIT_DONE, EXIT_INVALID
from tests.attempts.test_take_over import first_attempt, make_job

ENGINES = {"slurm": [], "jobset": ["--image", "registry/job:1"], "tpu-vm": ["--zone", "z"]}
# Overrides of `specs/gpt_nano.yaml`, a part of the line, and the engines that refuse the job.
PROBLEMS = {
    "none": ((), "", set()),
    "batch": (("config.train.global_batch_examples=7",), "does not divide over", set(ENGINES)),
    "key": (("config.model.headz=2",), "config.model.headz", set(ENGINES)),
    "data": (("config.data.source=nowhere/*.bin",), "no file matches", {"slurm"}),
    "weights": (("checkpoint.init_from=nowhere",), "nowhere", {"slurm"}),
    "bucket": (("directory=s3://bucket/run",), "s3://bucket/run", set()),
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Git repository with a committed spec, as the working directory; no service answers."""
    spec = yaml.safe_load((Path(__file__).parents[2] / "specs/gpt_nano.yaml").read_text())
    for name in ("gpus", "tpus"):
        place = {"gpus": str(tmp_path / "run"), "tpus": "gs://bucket/run"}[name]
        spec["directory"], spec["topology"] = place, {"accelerator": {"gpus": "h100-8", "tpus": "v5e-8"}[name]}
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All of it"]):
        subprocess.run(["git", "-C", str(tmp_path), *words], check=True)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    for name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("source", "is_named"),
    [
        ("shipped/*.txt", False),
        ("shipped", False),
        ("ignored/*.txt", True),
        ("../outside.txt", True),
        ("*/*.txt", True),
        ("nowhere/*.txt", False),
        ("python-stdlib", False),
        ("gs://bucket/*.txt", False),
    ],
)
def test_data_that_no_commit_has_are_named(source: str, is_named: bool, repository: Path) -> None:
    for name in ("shipped", "ignored"):
        (repository / name).mkdir()
        (repository / name / "a file.txt").write_text("text")
    (repository / ".gitignore").write_text("ignored\n")
    (repository.parent / "outside.txt").write_text("text")
    subprocess.run(["git", "-C", str(repository), "add", "."], check=True)
    given = LaunchArguments(spec="tpus.yaml", overrides=[f"config.data.source='{source}'"])
    lines = list_unshipped_data(given)
    assert [line.startswith(f"config.data.source={source}: files of this machine") for line in lines] == [
        True
    ] * is_named


@pytest.mark.parametrize("engine", ["slurm", "jobset"])
def test_a_package_that_this_machine_lacks_is_told_and_hosts_may_have_it(
    engine: str, repository: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    package = repository / "packages" / "google"
    package.mkdir(parents=True)
    reason = 'raise ModuleNotFoundError("No module named google.cloud", name="google.cloud")'
    (package / "__init__.py").write_text(reason)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{Path(__file__).parents[2]}")
    spec = {"slurm": ["gpus.yaml", "--set", "directory=gs://bucket/run"], "jobset": ["tpus.yaml"]}[engine]
    code = main([engine, *spec, *ENGINES[engine], "--dry-run"])
    errors = capfd.readouterr().err
    assert code == (EXIT_INVALID if engine == "slurm" else EXIT_DONE), errors
    assert re.search(r"needs the package google\.cloud; install it with pip install .*gcs", errors)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.daily(3)
def test_a_job_that_plan_refuses_is_not_submitted(
    engine: str, problem: str, repository: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    overrides, line, refusing = PROBLEMS[problem]
    spec = "gpus.yaml" if engine == "slurm" else "tpus.yaml"
    words = [engine, spec, *ENGINES[engine], "--dry-run", *(word for each in overrides for word in ("--set", each))]
    code = main(words)
    output, errors = capfd.readouterr()
    assert code == (EXIT_INVALID if engine in refusing else EXIT_DONE), errors
    if problem == "weights" and engine != "slurm":  # not looked at without the directory
        line = "gs://bucket/run cannot be reached"
    assert line in errors
    assert bool(output) == (engine not in refusing)
    assert "Traceback" not in errors
    if problem == "batch":
        assert main([*words, "--skip-checks"]) == EXIT_DONE


def test_an_attempt_that_runs_in_the_directory_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job = make_job(tmp_path / "run")
    with first_attempt(job) as first:
        overrides = [word for word in job.arguments[1:] if word != "--set"]
        assert main(["slurm", job.spec, "--dry-run", *(w for each in overrides for w in ("--set", each))]) == EXIT_DONE
        assert f"in use by attempt 1 on host {socket.gethostname()} (process id {first.process.pid})" in (
            capfd.readouterr().err
        )


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["slurm", "--nodes", "3"], 3),
        (["slurm", "--nodes", "3", "--gpus-per-node", "4"], 12),
        (["jobset", "--image", "a/b:1", "--nodes", "3", "--volume-claim", "disk=/runs"], 3),
    ],
    ids=["nodes", "GPUs", "pods"],
)
def test_a_batch_that_does_not_divide_over_the_nodes_is_refused(
    words: list[str], devices: int, capfd: pytest.CaptureFixture[str]
) -> None:
    engine, *options = words
    assert main([engine, "specs/gpt_nano.yaml", *options, "--set", "directory=/runs/x", "--dry-run"]) == EXIT_INVALID
    assert f"global_batch_examples=32 does not divide over {devices} devices" in capfd.readouterr().err


def test_checks_that_cannot_be_made_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "missing"))
    check_job(LaunchArguments(spec="specs/counter.yaml"), has_shared_files=True)
    assert "the job was not checked, since plan --quick gave no result (FileNotFoundError)" in capfd.readouterr().err
