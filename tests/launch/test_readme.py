"""The README pages of engines: their commands, which tests/repository/test_readme.py runs, submit nothing."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "launch").rglob("README.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_the_commands_of_a_page_submit_nothing(page):
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        commands = block.replace("\\\n", "").splitlines()
        assert all(command.startswith("python -m launch ") and "--dry-run" in command for command in commands)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_files_named_by_a_page_exist(page):
    for file in re.findall(r"`([\w./]+\.(?:py|sh))`", page.read_text()):
        assert (ROOT / file).exists() or list(page.parent.glob(f"**/{file}")), file
