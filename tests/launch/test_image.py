"""`launch image`: the Dockerfile, the build context, and builds with a fake and with a real builder."""

import os
import shutil
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from launch.app import main
from launch.image.engine import BUILDERS
from tests.support.two_files import PROJECT, commit_all, make_repository, write_two_files

ROOT = Path(__file__).parents[2]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    path = make_repository(tmp_path / "project", "gs://bucket/rnn")
    monkeypatch.chdir(path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return path


def launch(*words):
    return main(["image", "rnn.yaml", "--tag", "registry/job:1", *words])


def render(capsys, *words):
    """Return the lines of the Dockerfile, without comments."""
    assert launch("--dry-run", "--runner", "runner==0.9", *words) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]


@pytest.mark.parametrize(
    ("words", "extras"),
    [
        ([], "gcs"),
        (["--set", "topology.accelerator=v5e-16"], "tpu,gcs"),
        (["--set", "topology.accelerator=h100-16", "--set", "directory=s3://bucket/rnn"], "cuda,s3"),
        (["--set", "topology.accelerator=cpu", "--set", "directory=az://bucket/rnn"], "azure"),
        (["--extra", "parquet", "--extra", "gcs"], "gcs,parquet"),
    ],
)
def test_the_image_has_the_extras_of_accelerator_and_bucket(repository, capsys, words, extras):
    assert f"RUN pip install 'runner[{extras}]==0.9'" in render(capsys, *words)


def test_a_local_job_needs_no_extra(repository, capsys):
    assert "RUN pip install runner==0.9" in render(capsys, "--set", "directory=/runs")


def test_lines_of_optional_values_are_left_out(repository, capsys):
    lines = render(capsys)
    assert not [line for line in lines if "apt-get" in line or "/opt/packages" in line or "requirement" in line]
    (repository / "requirements.txt").write_text("thing @ git+https://example.org/thing\n")
    commit_all(repository)
    lines = render(capsys)
    assert "RUN pip install --requirement requirements.txt" in lines
    assert [line for line in lines if "apt-get install -y --no-install-recommends git " in line]


def test_the_job_runs_in_the_directory_of_the_command(repository, capsys, monkeypatch):
    write_two_files(repository / "a b", "gs://bucket/rnn")
    commit_all(repository)
    monkeypatch.chdir(repository / "a b")
    assert "WORKDIR '/job/a b'" in render(capsys)


@pytest.fixture
def builder(repository, tmp_path, monkeypatch):
    """A docker that keeps its context and its arguments."""
    path = tmp_path / "bin"
    path.mkdir()
    (path / "docker").write_text(
        f'#!/bin/bash\necho "$@" >>{tmp_path}/calls\n[ "$1" = push ] || cp -r "${{@: -1}}" {tmp_path}/context\n'
        f"exit $(cat {tmp_path}/code 2>/dev/null || echo 0)\n"
    )
    (path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("is_own", [False, True])
def test_the_context_has_the_commit_and_the_runner(repository, builder, capsys, is_own):
    if is_own:
        (repository / "pyproject.toml").write_text(PROJECT)
        commit_all(repository)
    else:
        (builder / "runner-9-py3-none-any.whl").write_bytes(b"wheel")
    (repository / "later.py").write_text("")  # not committed
    words = [] if is_own else ["--runner", str(builder / "runner-9-py3-none-any.whl")]
    assert launch(*words, "--push") == 0
    context = builder / "context"
    dockerfile = (context / "Dockerfile").read_text()
    (name,) = {path.name for path in context.iterdir()} - {"Dockerfile", "code.tar.gz"}
    assert f"COPY {name} /opt/packages/" in dockerfile
    assert f" '/opt/packages/{name}[gcs]'\n" in dockerfile
    with tarfile.open(fileobj=BytesIO((context / "code.tar.gz").read_bytes())) as archive:
        assert {"rnn.py", "rnn.yaml"} <= set(archive.getnames())
        assert "later.py" not in archive.getnames()
    build, push = (builder / "calls").read_text().splitlines()
    assert build.startswith("build --tag registry/job:1 /")
    assert push == "push registry/job:1"
    assert "built registry/job:1 and pushed it" in capsys.readouterr().out


def test_a_failed_build_exits_with_1_and_pushes_nothing(repository, builder, capsys):
    (builder / "code").write_text("3")
    assert launch("--runner", "runner==1", "--push") == 1
    assert len((builder / "calls").read_text().splitlines()) == 1
    assert "docker build ended with 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tag", "Registry/Job"], "--tag 'Registry/Job': needs an image"),
        (["--base", "a b"], "--base 'a b': needs an image"),
        (["--runner", "none.whl"], "--runner none.whl: needs a wheel"),
        (["--requirements", "none.txt"], "--requirements none.txt: is not in commit"),
        (["--set", "seed=x"], "seed"),
        (["--extra", "parket"], "did you mean parquet?"),
        (["--builder", "kaniko", "--runner", "runner==1"], "kaniko: not on the PATH"),
    ],
)
def test_a_wrong_option_exits_with_2(repository, words, message, capsys):
    assert launch(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


def find_base() -> str | None:
    """Return the image that the environment names for real builds, if a builder is there."""
    return os.environ.get("RUNNER_TEST_BASE_IMAGE") if any(map(shutil.which, BUILDERS)) else None


@pytest.mark.soak
@pytest.mark.skipif(find_base() is None, reason="needs buildah and RUNNER_TEST_BASE_IMAGE")
def test_two_files_run_in_the_image_that_is_built(tmp_path, monkeypatch):
    repository = tmp_path / "project"
    write_two_files(repository, "runs/rnn")
    (repository / "requirements.txt").write_text("colorama\n")
    commit_all(repository)
    monkeypatch.chdir(repository)
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("STORAGE_DRIVER", "vfs")
    words = ["--builder", "buildah", "--base", find_base(), "--runner", str(ROOT)]
    assert launch(*words) == 0
    container = subprocess.run(
        ["buildah", "from", "registry/job:1"], check=True, capture_output=True, text=True
    ).stdout.strip()
    try:
        done = subprocess.run(
            ["buildah", "run", container, "--", "python", "-m", "launch.worker", "rnn.yaml"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        subprocess.run(["buildah", "run", container, "--", "python", "-c", "import colorama"], check=True)
    finally:
        subprocess.run(["buildah", "rm", container], check=True, capture_output=True)
