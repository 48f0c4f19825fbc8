"""`init`: the files that it writes train and resume as they are, and it overwrites nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner.cli.app import main
from runner.spec import read_spec
from tests.support.job_process import ROOT, disable_compiler_optimizer, environment


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("runner.distributed.preemption.StopNotice.install_signal_handlers", lambda self: None)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_train_as_they_are(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "my_model2"]) == 0
    assert "to train: python -m runner my_model2.yaml" in capsys.readouterr().out
    assert sorted(os.listdir(directory)) == [".gitignore", "my_model2.py", "my_model2.yaml"]
    assert read_spec("my_model2.yaml").job == "my_model2:PretrainMyModel2"
    variables = disable_compiler_optimizer(environment(1)) | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "runner", "my_model2.yaml", "--set", "config.train.total_steps=12"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    assert json.loads((directory / "runs" / "my_model2" / "result.json").read_text())["step"] == 12


@pytest.mark.parametrize("name", ["my_model.py", "my_model.yaml"])
@pytest.mark.parametrize("kind", ["file", "directory", "broken link"])
def test_nothing_is_overwritten(name: str, kind: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if kind == "file":
        (directory / name).write_text("mine")
    elif kind == "directory":
        (directory / name).mkdir()
    else:
        (directory / name).symlink_to("nowhere")
    assert main(["init", "my_model"]) == 2
    assert os.listdir(directory) == [name]
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{name} exists already" in line


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("My", "needs a lower case letter"),
        ("2x", "needs a lower case letter"),
        ("a-b", "needs a lower case letter"),
        ("a b", "needs a lower case letter"),
        ("", "needs a lower case letter"),
        ("../a", "needs a lower case letter"),
        ("a.b", "needs a lower case letter"),
        ("class", "needs a lower case letter"),
        ("caf\u00e9", "needs a lower case letter"),
        ("a" * 41, "needs a lower case letter"),
        ("random", "a module random is installed already"),
        ("jax", "a module jax is installed already"),
        ("runner", "a module runner is installed already"),
    ],
)
def test_a_name_that_no_module_can_have_is_refused(
    name: str, words: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", name]) == 2
    assert os.listdir(directory) == []
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
