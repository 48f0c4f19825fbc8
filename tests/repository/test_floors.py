"""Each dependency has a floor that was installed and tried, and a ceiling where its next major version breaks us.

The daily tests compare the declared floors with `golden/floors.txt`, the versions that were tried. The soak test
installs these with pip, and trains, resumes, reports and exports with them, on each Python at hand.
"""

import importlib.metadata
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.support.virtual_environment import PROJECT, ROOT

FLOORS = ROOT / "tests" / "golden" / "floors.txt"
# Their next major version is announced with changes that break us.
CEILINGS = {"orbax-checkpoint": "1", "pydantic": "3"}
PYTHONS = ("3.11", "3.12", "3.13")
SECONDS = 1800
OPTIONS = (
    "config.train.total_steps=4",
    "config.train.global_batch_examples=8",
    "config.data.sequence_length=32",
    "config.schedule={name: constant}",
    "config.eval.batches=1",
    "config.model={layers: 1, heads: 2, width: 16}",
    "checkpoint.every_steps=2",
)


def list_requirements() -> list[Requirement]:
    return [Requirement(text) for text in PROJECT["dependencies"]]


def read_tried_versions() -> dict[str, Version]:
    lines = [line for line in FLOORS.read_text().splitlines() if not line.startswith("#")]
    return {name: Version(version) for name, _, version in (line.partition("==") for line in lines)}


def get_limits(requirement: Requirement, operator: str) -> list[Version]:
    return [Version(each.version) for each in requirement.specifier if each.operator == operator]


def test_every_floor_is_the_version_that_was_tried() -> None:
    floors = {each.name: get_limits(each, ">=") for each in list_requirements()}
    assert floors == {name: [version] for name, version in read_tried_versions().items()}


def test_dependencies_have_the_ceilings_that_they_need() -> None:
    ceilings = {each.name: get_limits(each, "<") for each in list_requirements()}
    assert {name: found for name, found in ceilings.items() if found} == {
        name: [Version(ceiling)] for name, ceiling in CEILINGS.items()
    }


def test_the_installed_versions_are_within_the_limits() -> None:
    for requirement in list_requirements():
        assert requirement.specifier.contains(importlib.metadata.version(requirement.name), prereleases=True)


def find_python(version: str) -> Path | None:
    """Return an interpreter of this version on the path, or among those of pyenv."""
    candidates = [Path(found)] if (found := shutil.which(f"python{version}")) else []
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates += sorted(root.glob(f"versions/{version}.*/bin/python"), reverse=True)
    for candidate in candidates:
        # A shim of pyenv may stand for no version.
        words = [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


@pytest.mark.soak
@pytest.mark.parametrize("version", PYTHONS)
def test_the_lowest_versions_train_resume_report_and_export(version: str, tmp_path: Path) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} on the path or in pyenv")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    own = tmp_path / "venv" / "bin" / "python"
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "XLA_FLAGS")}
    variables |= {"JAX_PLATFORMS": "cpu", "RUNNER_CACHE": str(tmp_path / "cache")}

    def run(*words: str | Path) -> str:
        done = subprocess.run(
            [own, *words], cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    # A copy, since a build writes into the source.
    source = tmp_path / "source"
    source.mkdir()
    for name in ("runner", "experiments", "launch", "specs", "pyproject.toml", "README.md"):
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, source)
    run("-m", "pip", "install", "--quiet", "--only-binary", ":all:", "--no-binary", "runner", "-c", FLOORS, source)
    code = "import importlib.metadata as m, sys; print(*map(m.version, sys.argv[1:]))"
    tried = read_tried_versions()
    assert [*map(Version, run("-c", code, *tried).split())] == [*tried.values()]

    spec = source / "specs" / "gpt_nano.yaml"
    options = [word for option in (f"directory={tmp_path / 'run'}", *OPTIONS) for word in ("--set", option)]
    assert "done at step 4" in run("-m", "runner", spec, *options)
    options += ["--set", "config.train.total_steps=8"]
    assert "done at step 8" in run("-m", "runner", spec, *options)
    run("-m", "runner", "status", tmp_path / "run")
    run("-m", "runner", "report", tmp_path / "run", "-o", tmp_path / "report.html")
    run("-m", "runner", "export", tmp_path / "run", "-o", tmp_path / "exported")
    run("-m", "runner", "plan", spec, *options)
