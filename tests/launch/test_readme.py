"""The commands of the pages on engines, in the form that runs on a laptop, as they stand there."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "launch").rglob("README.md"))
BLOCKS = {
    f"{page.parent.name}-{number}": block
    for page in PAGES
    for number, block in enumerate(re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL))
}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A repository with the committed specs, and `python`."""
    path = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "specs", path / "specs")
    (path / "bin").mkdir()
    (path / "bin" / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (path / "bin" / "python").chmod(0o755)
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "All of it"]):
        subprocess.run(["git", "-C", str(path), *arguments], check=True)
    return path


def test_every_page_has_a_command_to_run_and_they_submit_nothing():
    assert len(PAGES) == 4
    assert {name.rpartition("-")[0] for name in BLOCKS} == {page.parent.name for page in PAGES}
    for block in BLOCKS.values():
        commands = block.replace("\\\n", "").splitlines()
        assert all(command.startswith("python -m launch ") and "--dry-run" in command for command in commands)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_command_of_a_page_runs(project, name):
    variables = os.environ | {"PATH": f"{project}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-euc", BLOCKS[name]], cwd=project, env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_what_a_page_points_at_is_there(page):
    text = page.read_text()
    for link in re.findall(r"\]\((?!http)([^)#]+)", text):
        assert (page.parent / link).exists(), link
    for file in re.findall(r"`([\w./]+\.(?:py|sh))`", text):
        assert (ROOT / file).exists() or list(page.parent.glob(f"**/{file}")), file
