"""The commands of every README.md and of every page in .github/docs.

A ```bash block is run; a ```text block needs a cluster, libtpu or hours and is not. The blocks of a page run in order.
All pages share one checkout, README.md first, and each has an environment with the base install and the extras that it
names. The demonstration of kill and resume also runs daily, with a smaller model and without LLVM's optimiser.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from runner.storage import parse_lines
from tests.support.simulated_devices import environment
from tests.support.virtual_environment import list_named_extras, make_virtual_environment

ROOT = Path(__file__).parents[2]
DOCS = ROOT / ".github" / "docs"
READMES = [
    path for path in ROOT.rglob("README.md") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
PAGES = sorted([*READMES, *DOCS.rglob("*.md")], key=lambda path: (len(path.parts), path))
DEADLINE_SECONDS = 900.0  # only a hang takes this long
LANGUAGES = {"bash", "text", "python", "yaml", "json"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def list_bash_blocks(page: Path) -> list[str]:
    return [text for language, text in FENCE.findall(page.read_text()) if language == "bash"]


def list_anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings in GitHub's form."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SETUP = [block for block in list_bash_blocks(ROOT / "README.md") if "-m venv" in block]
(DEMONSTRATION,) = [block for block in list_bash_blocks(ROOT / "README.md") if "kill -9" in block]


SMALLER_SETTINGS = {
    "{layers: 2, heads: 4, width: 64,": "{layers: 1, heads: 4, width: 16,",
    "sequence_length: 64": "sequence_length: 32",
    "examples: 32": "examples: 8",
    "batches: 4": "batches: 2",
}


def copy_project(directory: Path) -> Path:
    """Copy the project into a Git repository whose `.venv` is the base install."""
    shutil.copytree(ROOT, directory, ignore=shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache"))
    make_virtual_environment(directory / ".venv", root=directory)
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@x"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *words], cwd=directory, check=True)
    return directory


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_project(tmp_path_factory.mktemp("readme") / "checkout")


@pytest.fixture(scope="module")
def demonstration_output(checkout: Path) -> str:
    """Output of the demonstration of kill and resume."""
    return run_block(DEMONSTRATION, checkout, make_user_environment())


def make_user_environment() -> dict[str, str]:
    """Return the environment without the variables that only tests set."""
    return {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def run_block(block: str, checkout: Path, variables: dict[str, str]) -> str:
    """Run a block in `checkout`, kill its remaining processes, and return its output."""
    variables = variables.copy()
    variables["PATH"] = f"{checkout / '.venv' / 'bin'}:{variables['PATH']}"
    with subprocess.Popen(
        ["bash", "-e", "-c", block],
        cwd=checkout,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=DEADLINE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, f"{block}\n{output}"
    return output


def test_the_setup_commands_of_the_readme_match_ci() -> None:
    main, tests = SETUP
    assert main.strip().endswith(".venv/bin/python -m runner specs/gpt_small.yaml")
    assert tests.strip().endswith(".venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest")
    assert "'.[test]'" in (ROOT / ".ci" / "run").read_text()


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_blocks_have_a_language_and_links_have_targets(page: Path) -> None:
    text = page.read_text()
    found = FENCE.findall(text)
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block is not closed, or is indented"
    assert {language for language, _ in found} <= LANGUAGES
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.is_file(), target
        if anchor and linked.suffix == ".md":
            assert anchor in list_anchors(linked), f"{target}#{anchor}"


@pytest.mark.soak
def test_the_demonstration_with_a_smaller_model_prints_equal_fingerprints(
    tmp_path: Path,
) -> None:
    copy = copy_project(tmp_path / "checkout")
    spec = copy / "specs/gpt_nano.yaml"
    text = spec.read_text()
    for line, smaller in SMALLER_SETTINGS.items():
        assert text.count(line) == 1
        text = text.replace(line, smaller)
    spec.write_text(text)
    check_demonstration(run_block(DEMONSTRATION, copy, environment(1)), copy)


@pytest.mark.soak
def test_the_demonstration_prints_equal_fingerprints(demonstration_output: str, checkout: Path) -> None:
    check_demonstration(demonstration_output, checkout)


def check_demonstration(demonstration_output: str, checkout: Path) -> None:
    fingerprints = re.findall(r'result\.json: *"fingerprint": "([0-9a-f]{32})"', demonstration_output)
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    events = parse_lines((checkout / "runs/killed/events.jsonl").read_bytes())
    starts = [event for event in events if event["event"] == "start"]
    assert len(starts) == 2, "the killed run must have resumed"
    assert json.loads((checkout / "runs/killed/result.json").read_text())["step"] == 200


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_other_commands_of_a_page_run(page: Path, checkout: Path, request: pytest.FixtureRequest) -> None:
    if "runs/undisturbed" in page.read_text():
        request.getfixturevalue("demonstration_output")  # later commands read its run
    # It stands for the run of the first block of README.md, which takes minutes.
    stand_in = checkout / "runs/gpt_small"
    if page == ROOT / "README.md":
        stand_in.symlink_to("undisturbed")
    shutil.rmtree(checkout / ".venv")
    make_virtual_environment(checkout / ".venv", list_named_extras(page.read_text()), checkout)
    for block in list_bash_blocks(page):
        if block not in (*SETUP, DEMONSTRATION):
            run_block(block, checkout, make_user_environment())
    stand_in.unlink(missing_ok=True)  # other pages submit the spec of that name, whose directory would be another run's
