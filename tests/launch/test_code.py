"""The code that hosts get: a commit, the runner and further packages, for own and other repositories."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from launch import code
from launch.app import main
from launch.code import find_runner, read_code
from launch.tpu_vm.gcloud import HostPrograms
from runner.errors import InvalidError
from tests.support.two_files import PROJECT, commit_all, git, make_repository, write_two_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    path = make_repository(tmp_path / "project", "runs/rnn")
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def checkout(tmp_path):
    """Checkout of the runner, as its pyproject.toml says."""
    path = tmp_path / "checkout"
    (path / "runner").mkdir(parents=True)
    (path / "pyproject.toml").write_text(PROJECT)
    (path / "runner" / "__init__.py").write_text("")
    commit_all(path)
    return path


def test_the_runners_own_repository_is_installed_from_its_code(repository):
    (repository / "pyproject.toml").write_text(PROJECT)
    commit_all(repository)
    found = read_code("rnn.yaml", None, None)
    assert found.list_package_words(("tpu", "gcs"), "../..") == ["--editable", ".[tpu,gcs]"]
    assert found.list_package_words((), "../..") == ["--editable", "."]


def test_another_repository_gets_the_runner_that_runs_this_command(repository, checkout, monkeypatch):
    monkeypatch.setattr(code.runner, "__file__", str(checkout / "runner" / "__init__.py"))
    found = read_code("rnn.yaml", None, None)
    head = subprocess.run(["git", "-C", checkout, "rev-parse", "HEAD"], capture_output=True, text=True).stdout[:12]
    assert found.list_package_words(("tpu",), "../..") == [f"../../runner-{head}.tar.gz[tpu]"]
    with tarfile.open(fileobj=BytesIO(found.runner.content)) as archive:
        assert "runner/__init__.py" in archive.getnames()
    with tarfile.open(fileobj=BytesIO(found.archive)) as archive:
        assert sorted(archive.getnames()) == ["rnn.py", "rnn.yaml"]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("git+https://example.org/runner@c0ffee", ["runner[tpu] @ git+https://example.org/runner@c0ffee"]),
        ("git+ssh://git@example.org/runner@c0ffee", ["runner[tpu] @ git+ssh://git@example.org/runner@c0ffee"]),
        (
            "https://example.org/runner-1-py3-none-any.whl",
            ["runner[tpu] @ https://example.org/runner-1-py3-none-any.whl"],
        ),
        ("runner==0.9.0", ["runner[tpu]==0.9.0"]),
        ("runner ~= 0.9", ["runner[tpu]~= 0.9"]),
    ],
)
def test_a_source_becomes_a_requirement_of_pip(source, words):
    assert find_runner(source).list_words(("tpu",), ".", "..") == words


@pytest.mark.parametrize("name", ["runner-0.9.0-py3-none-any.whl", "runner-0.9.0.tar.gz"])
def test_a_package_file_is_copied_under_its_own_name(name, tmp_path):
    (tmp_path / name).write_bytes(b"package")
    found = find_runner(str(tmp_path / name))
    assert found.content == b"package"
    assert found.list_words(("tpu", "s3"), ".", "../../..") == [f"../../../{name}[tpu,s3]"]


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("none.whl", "needs a wheel, a checkout"),
        ("runner", "needs a wheel, a checkout"),
        ("other==1.0", "needs a wheel, a checkout"),
        ("runner==1.0 --index-url=http://x", "needs a wheel, a checkout"),
        ("notes.txt", "needs a wheel (.whl)"),
        ("bad name.whl", "needs a wheel (.whl)"),
        ("plain", "is no checkout of the runner"),
        ("other", "is no checkout of the runner"),
    ],
)
def test_a_source_that_is_no_runner_is_refused(source, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("notes.txt", "bad name.whl"):
        (tmp_path / name).write_text("")
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "pyproject.toml").write_text('[project]\nname = "other"\n')
    commit_all(tmp_path / "other")
    with pytest.raises(InvalidError) as caught:
        find_runner(source)
    assert source in str(caught.value)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("origin", "expected"),
    [
        (
            {"url": "https://example.org/r", "vcs_info": {"vcs": "git", "commit_id": "c0ffee"}},
            "git+https://example.org/r@c0ffee",
        ),
        ({"url": "https://example.org/runner-1.whl", "archive_info": {}}, "https://example.org/runner-1.whl"),
        ({"url": "file:///no/such/runner-1.whl", "archive_info": {}}, None),
        ({"url": "WHEEL", "archive_info": {}}, "WHEEL"),
        ({}, None),
        (None, None),
    ],
)
def test_the_origin_that_pip_has_recorded_is_shipped(origin, expected, tmp_path, monkeypatch):
    wheel = tmp_path / "run ner" / "runner-1-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"")

    class Distribution:
        def read_text(self, name):
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin).replace("WHEEL", wheel.as_uri())

    monkeypatch.setattr(code.runner, "__file__", str(tmp_path / "site-packages" / "runner" / "__init__.py"))
    monkeypatch.setattr(code.metadata, "distribution", lambda name: Distribution())
    if expected is None:
        with pytest.raises(InvalidError, match="give --runner"):
            code._find_own_source()
    else:
        assert code._find_own_source() == expected.replace("WHEEL", str(wheel))


def test_a_checkout_without_git_is_packed_as_it_is(repository, checkout):
    shutil.rmtree(checkout / ".git")
    (checkout / "runner" / "__pycache__").mkdir()
    (checkout / "runner" / "__pycache__" / "x.pyc").write_text("")
    (checkout / "data.bin").write_text("not a part of the package")
    found = find_runner(str(checkout))
    assert find_runner(str(checkout)) == found
    assert re.fullmatch(r"runner-[0-9a-f]{12}\.tar\.gz", found.file)
    with tarfile.open(fileobj=BytesIO(found.content)) as archive:
        assert archive.getnames() == ["pyproject.toml", "runner/__init__.py"]
    (checkout / "runner" / "__init__.py").write_text("changed = True\n")
    assert find_runner(str(checkout)).file != found.file


def test_a_checkout_in_a_repository_that_does_not_track_it_is_packed(repository, checkout):
    shutil.rmtree(checkout / ".git")
    outer = checkout.parent
    (outer / "notes.txt").write_text("")
    git(outer, "init", "-q")
    git(outer, "add", "notes.txt")
    git(outer, "commit", "-qm", "Notes")
    with tarfile.open(fileobj=BytesIO(find_runner(str(checkout)).content)) as archive:
        assert "runner/__init__.py" in archive.getnames()


def test_uncommitted_changes_of_the_runner_are_reported(repository, checkout, caplog):
    (checkout / "runner" / "__init__.py").write_text("changed = True\n")
    find_runner(str(checkout))
    assert "uncommitted changes of the runner" in caplog.text


def test_a_job_in_a_subdirectory_runs_there(repository, monkeypatch):
    write_two_files(repository / "deep" / "er", "runs/rnn")
    (repository / "requirements.txt").write_text("einops\n")
    commit_all(repository)
    monkeypatch.chdir(repository / "deep" / "er")
    found = read_code("rnn.yaml", "runner==1", None)
    assert (str(found.directory), found.spec, found.root) == ("deep/er", "rnn.yaml", "./../..")
    assert found.list_package_words((), "x") == ["runner==1", "--requirement", "../../requirements.txt"]
    assert read_code("../../rnn.yaml", "runner==1", None).spec == "../../rnn.yaml"


def test_only_committed_requirements_are_installed(repository):
    (repository / "requirements.txt").write_text("einops\n")
    assert read_code("rnn.yaml", "runner==1", None).requirements is None
    with pytest.raises(InvalidError, match=r"--requirements requirements.txt: is not in commit"):
        read_code("rnn.yaml", "runner==1", "requirements.txt")
    (repository / "more.txt").write_text("einops\n")
    commit_all(repository)
    assert read_code("rnn.yaml", "runner==1", None).requirements == "requirements.txt"
    assert read_code("rnn.yaml", "runner==1", "more.txt").requirements == "more.txt"


def test_a_repository_of_two_files_runs_on_local_processes(repository):
    command = [sys.executable, "-m", "launch", "local", "rnn.yaml", "--processes", "2", "--devices-per-process", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((repository / "runs" / "rnn" / "result.json").read_text())["step"] == 4


def test_a_dry_run_on_tpu_vms_installs_the_runner_and_not_the_repository(repository, capfd):
    settings = ["--set", "directory=gs://bucket/rnn", "--set", "topology.accelerator=v5e-8", "--skip-checks"]
    assert main(["tpu-vm", "rnn.yaml", "--zone", "z", *settings, "--dry-run", "--runner", str(ROOT)]) == 0
    output, problems = capfd.readouterr()
    assert "[tpu,gcs]" in output
    assert "--editable" not in output
    assert "scp runner-" in output
    assert "the runner is installed from runner-" in problems


@pytest.mark.soak
def test_the_program_of_a_host_installs_the_runner_and_runs_two_files(repository, tmp_path):
    (repository / "requirements.txt").write_text("colorama\n")
    commit_all(repository)
    found = read_code("rnn.yaml", str(ROOT), None)
    home = tmp_path / "home"
    (home / "rnn").mkdir(parents=True)
    (home / "rnn-code.tar.gz").write_bytes(found.archive)
    (home / found.runner.file).write_bytes(found.runner.content)
    packages = found.list_package_words((), "../..")
    digests = [hashlib.sha256(found.archive).hexdigest(), "rnn-code.tar.gz"]
    programs = HostPrograms("rnn", "c0ffee", "rnn-code.tar.gz", digests, packages, ".", ["rnn.yaml"])
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(home), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        ["bash", "-c", programs.job()], cwd=home / "rnn", env=environment, capture_output=True, text=True
    )
    output = done.stdout + done.stderr
    assert (home / "rnn" / "exit_code").read_text() == "0\n", output
    assert (home / "rnn" / "code" / "runs" / "rnn" / "result.json").is_file(), output
    installed = home / "rnn" / "venv" / "bin" / "python"
    subprocess.run([installed, "-c", "import colorama, runner; assert 'venv' in runner.__file__"], check=True)
