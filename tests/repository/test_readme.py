"""The commands of every README.md, run as they stand there.

A ```bash block is run; what needs a cluster, libtpu or hours is a ```text block. Blocks of a page run in their order,
the pages in one checkout, README.md first, each in an environment with the base install and the extras that it names.
The demonstration of kill and resume is tried daily too, of a smaller model, without LLVM's optimiser.
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
PAGES = sorted(
    (
        path
        for path in ROOT.rglob("README.md")
        if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
    ),
    key=lambda path: (len(path.parts), path),
)
DEADLINE_SECONDS = 900.0  # for a hang
LANGUAGES = {"bash", "text", "python", "yaml", "json"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[str]:
    """The blocks to run."""
    return [text for language, text in FENCE.findall(page.read_text()) if language == "bash"]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


SETUP = [block for block in blocks(ROOT / "README.md") if "-m venv" in block]
(DEMONSTRATION,) = [block for block in blocks(ROOT / "README.md") if "kill -9" in block]


SMALLER = {
    "{layers: 2, heads: 4, width: 64,": "{layers: 1, heads: 4, width: 16,",
    "sequence_length: 64": "sequence_length: 32",
    "examples: 32": "examples: 8",
    "batches: 4": "batches: 2",
}


def copy_project(directory: Path) -> Path:
    """A copy of the project, under git, whose `.venv` is the base install."""
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
def demonstration(checkout: Path) -> str:
    """What the demonstration of kill and resume prints."""
    return run_block(DEMONSTRATION, checkout, as_a_person())


def as_a_person() -> dict[str, str]:
    """The environment without what is set for tests alone."""
    return {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_PLATFORMS")}


def run_block(block: str, checkout: Path, variables: dict[str, str]) -> str:
    """Run one block in `checkout` and return its output. No process that it has started is left."""
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


def test_the_two_setup_commands_are_what_ci_runs_and_what_a_stranger_types() -> None:
    main, tests = SETUP
    assert main.strip().endswith(".venv/bin/python -m runner specs/gpt_small.yaml")
    assert tests.strip().endswith(".venv/bin/pip install -q -e '.[test]' && .venv/bin/python -m pytest")
    assert "'.[test]'" in (ROOT / ".ci" / "run").read_text()


def test_readme_is_short_enough_to_be_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT).parent))
def test_blocks_say_their_language_and_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    found = FENCE.findall(text)
    assert len(found) * 2 == len(re.findall(r"^ *```", text, re.MULTILINE)), "a block is not closed, or indented"
    assert {language for language, _ in found} <= LANGUAGES
    for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        linked = page.parent / target if target else page
        assert linked.is_file(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked), f"{target}#{anchor}"


def test_the_kill_and_resume_demonstration_prints_the_same_fingerprint_twice_of_a_smaller_model(
    tmp_path: Path,
) -> None:
    copy = copy_project(tmp_path / "checkout")
    spec = copy / "specs/gpt_nano.yaml"
    text = spec.read_text()
    for line, smaller in SMALLER.items():
        assert text.count(line) == 1
        text = text.replace(line, smaller)
    spec.write_text(text)
    expect_the_same_fingerprint_twice(run_block(DEMONSTRATION, copy, environment(1)), copy)


@pytest.mark.soak
def test_the_kill_and_resume_demonstration_prints_the_same_fingerprint_twice(
    demonstration: str, checkout: Path
) -> None:
    expect_the_same_fingerprint_twice(demonstration, checkout)


def expect_the_same_fingerprint_twice(demonstration: str, checkout: Path) -> None:
    fingerprints = re.findall(r'result\.json: *"fingerprint": "([0-9a-f]{32})"', demonstration)
    assert len(fingerprints) == 2
    assert len(set(fingerprints)) == 1
    events = parse_lines((checkout / "runs/killed/events.jsonl").read_bytes())
    starts = [event for event in events if event["event"] == "start"]
    assert len(starts) == 2, "the first run was killed before its end"
    assert json.loads((checkout / "runs/killed/result.json").read_text())["step"] == 200


@pytest.mark.soak
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT).parent))
def test_every_other_command_of_a_page_runs(page: Path, checkout: Path, request: pytest.FixtureRequest) -> None:
    if "runs/undisturbed" in page.read_text():
        request.getfixturevalue("demonstration")  # which later commands look at
    if page == ROOT / "README.md":
        (checkout / "runs/gpt_small").symlink_to("undisturbed")  # for the run of the first block, which takes minutes
    shutil.rmtree(checkout / ".venv")
    make_virtual_environment(checkout / ".venv", list_named_extras(page.read_text()), checkout)
    for block in blocks(page):
        if block not in (*SETUP, DEMONSTRATION):
            run_block(block, checkout, as_a_person())
