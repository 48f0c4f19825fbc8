"""The file for SkyPilot: its recovery, and the command that it runs on each node."""

import subprocess
from pathlib import Path

import pytest
import yaml

from launch import worker
from runner.errors import EXIT_PREEMPTED, EXIT_RETRYABLE

PATH = Path(__file__).parents[2] / "launch" / "skypilot.yaml"
TASK = yaml.safe_load(PATH.read_text())


def run_script(home: Path, script: str, **variables: str) -> list[str]:
    """Run a script of the file with fake programs, and return the words that these got, one a line."""
    for name in ("job/bin/python", "bin/uv"):
        program = home / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(f'#!/bin/bash\nprintf "%s\\n" {program.name} "$@"\n')
        program.chmod(0o755)
    variables |= {"HOME": str(home), "PATH": f"{home / 'bin'}:/usr/bin:/bin"}
    result = subprocess.run(["bash", "-c", script], cwd=home, env=variables, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_job_gets_new_nodes_only_after_preempted_and_retryable():
    recovery = TASK["resources"]["job_recovery"]
    assert recovery == {"recover_on_exit_codes": [EXIT_PREEMPTED, EXIT_RETRYABLE], "max_restarts_on_errors": 0}
    # SkyPilot refuses to launch while a variable is null.
    assert {name for name, value in TASK["envs"].items() if value is None} == {"SPEC", "DIRECTORY"}


@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_runs_the_worker_at_its_place(tmp_path, rank):
    words = run_script(
        tmp_path,
        TASK["run"],
        SPEC="my specs/a.yaml",
        DIRECTORY="gs://bucket/a b",
        SKYPILOT_NODE_IPS="10.0.0.1\n10.0.0.2",
        SKYPILOT_NUM_NODES="2",
        SKYPILOT_NODE_RANK=str(rank),
    )
    assert words[:3] == ["python", "-m", "launch.worker"]
    arguments = worker._COMMANDS.parse([worker._COMMAND, *words[3:]])
    assert isinstance(arguments, worker.WorkerArguments)
    assert (arguments.spec, arguments.overrides) == ("my specs/a.yaml", ["directory=gs://bucket/a b"])
    assert (arguments.coordinator, arguments.num_processes, arguments.process_id) == ("10.0.0.1:8476", 2, rank)
    # SkyPilot signals all processes of a node, so that a signal sent on would be the second one.
    assert not arguments.forward_signals


def test_set_up_installs_the_runner_and_the_requirements(tmp_path):
    package = "runner[cuda,gcs] @ https://example.org/runner.whl"
    words = run_script(tmp_path, TASK["setup"], PACKAGE=package)
    assert words == ["uv", "pip", "install", "--python", str(tmp_path / "job/bin/python"), package]
    (tmp_path / "requirements.txt").write_text("einops\n")
    assert run_script(tmp_path, TASK["setup"], PACKAGE=package)[-2:] == ["--requirement", "requirements.txt"]
