"""The pages of engines: their commands, which tests/repository/test_readme.py runs, submit nothing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {"cluster": "launch", "kubernetes": "launch/kubernetes", "slurm": "launch/slurm", "tpu_vm": "launch/tpu_vm"}
PAGES |= {"laptop_to_gke": "launch", "laptop_to_slurm": "launch"}


def read_page(name):
    return (ROOT / ".github" / "docs" / f"{name}.md").read_text()


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_submit_nothing(page):
    blocks = re.findall(r"```bash\n(.*?)```", read_page(page), re.DOTALL)
    assert blocks
    for block in blocks:
        commands = block.replace("\\\n", "").splitlines()
        assert all(command.startswith("python -m launch ") and "--dry-run" in command for command in commands)


@pytest.mark.parametrize("page", PAGES)
def test_files_named_by_a_page_exist(page):
    for file in re.findall(r"`([\w./]+\.(?:py|sh))`", read_page(page)):
        assert (ROOT / file).exists() or list((ROOT / PAGES[page]).glob(f"**/{file}")), file
