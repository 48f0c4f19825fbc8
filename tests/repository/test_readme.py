"""The README's commands, run as they stand there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCKS = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
SETUP = [block for block in BLOCKS if "-m venv" in block]
COMMANDS = [block for block in BLOCKS if "-m venv" not in block]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project whose `.venv` is the environment that the tests run in."""
    directory = tmp_path_factory.mktemp("readme") / "checkout"
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
    python = directory / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return directory


def run_block(block: str, checkout: Path) -> str:
    """Run one code block in `checkout` and return its output."""
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        ["bash", "-c", block], cwd=checkout, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_two_setup_commands_are_what_ci_runs_and_what_a_stranger_types() -> None:
    main, tests = SETUP
    assert main.strip().endswith(".venv/bin/python -m runner specs/gpt_small.yaml")
    assert tests.strip().endswith(".venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest")
    assert "'.[test]'" in (ROOT / ".ci" / "run").read_text()


def test_the_kill_and_resume_demonstration_prints_the_same_fingerprint_twice(checkout: Path) -> None:
    (block,) = [block for block in COMMANDS if "kill -9" in block]
    output = run_block(block, checkout)
    fingerprints = re.findall(r'result\.json: *"fingerprint": "([0-9a-f]{32})"', output)
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    events = (checkout / "runs/killed/events.jsonl").read_text().splitlines()
    starts = [event for event in map(json.loads, events) if event["event"] == "start"]
    assert len(starts) == 2, "the first run was killed before its end"


def test_every_other_command_runs(checkout: Path) -> None:
    others = [block for block in COMMANDS if "kill -9" not in block]
    assert others
    for block in others:
        run_block(block, checkout)
    assert json.loads((checkout / "runs/pod/result.json").read_text())["step"] == 200
