"""The site of the pages in .github/docs: it builds without a warning, and its page of messages quotes real ones."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repository.test_readme import DOCS, ROOT

CONFIG = ROOT / ".github" / "mkdocs.yml"
TASKS = ("start", "your_data", "model", "cluster", "change", "look_back", "python", "sweeps", "troubleshooting")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of the site, built so that a broken link or anchor, or a page without a place in the menu, fails."""
    directory = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", CONFIG, "-d", directory]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory


def test_every_page_is_in_the_site(site: Path) -> None:
    for page in DOCS.rglob("*.md"):
        assert (site / page.relative_to(DOCS).with_suffix(".html")).is_file(), page
    assert all((site / f"{name}.html").is_file() for name in TASKS)
    assert "global_batch_examples" in (site / "search" / "search_index.json").read_text()


def test_links_to_source_code_lead_to_pages_of_the_site(site: Path) -> None:
    (link,) = set(re.findall(r'href="([^"]*specs/gpt_nano[^"]*)"', (site / "start.html").read_text()))
    assert "gpt_nano" in (site / link).read_text()
    assert 'href="../../' not in (site / "start.html").read_text()


def test_lists_and_tables_are_not_paragraphs(site: Path) -> None:
    """Python-Markdown needs an empty line before them, and four spaces inside lists, where GitHub does not."""
    for page in site.rglob("*.html"):
        article = page.read_text().partition("<article")[2].partition("</article>")[0]
        for paragraph in re.findall(r"<p>(.*?)</p>", re.sub(r"<pre.*?</pre>", "", article, flags=re.DOTALL), re.DOTALL):
            assert not re.search(r"^\s*(- |\d+\. |\|)|```", paragraph, re.MULTILINE), f"{page}: {paragraph}"


def test_the_site_loads_nothing_from_other_hosts(site: Path) -> None:
    for page in (site / "index.html", site / "start.html"):
        assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="https?:', page.read_text())


def test_quoted_messages_are_those_of_the_code() -> None:
    """The first cells of the tables by message are parts of literals in the code, between backquotes."""
    text = (DOCS / "troubleshooting.md").read_text().partition("## By message")[2].partition("## Before")[0]
    cells = re.findall(r"^\| (`.*?)(?<!\\) \| ", text, re.MULTILINE)
    assert len(cells) >= 20
    code = "".join(path.read_text() for name in ("runner", "launch") for path in sorted((ROOT / name).rglob("*.py")))
    literals = re.sub(r'"\s*\n\s*f?"', "", code)  # literals that Python joins
    for cell in cells:
        if cell.startswith("`plan`"):
            continue
        for part in re.findall(r"`([^`]+)`", cell):
            assert part == "..." or part in literals, part
