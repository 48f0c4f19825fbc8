"""Files and folders of the working directory with the names of other modules: the cause of a failure is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tiny_jobs import environment

ROOT = Path(__file__).parents[1]
# File of the working directory, and what the line says.
HIDING = {
    "random.py": r"random is .*/random\.py here, which hides Python's own module; rename it",
    "yaml.py": r"yaml is .*/yaml\.py here, which hides the one in .*/yaml/",
    "jax/__init__.py": r"jax is .*/jax/__init__\.py here, which hides the one in .*/jax/",
}
PROGRAMS = {"runner": ["runner", "schema", "x.yaml"], "launch": ["launch", "slurm", "x.yaml", "--dry-run"]}
# File of the working directory, the class that is imported, and what the line says.
HIDDEN = {
    # An editable install still finds the modules that the project has.
    "experiments/__init__.py": ("experiments.nothing:X", r"experiments is .*__init__\.py here, which hides the one in"),
    "experiments/mine.py": (
        "experiments.mine:Job",
        r"no module .*; experiments is the package in .*, which hides .*/exp",
    ),
    "runner/mine.py": ("runner.mine:Job", r"no module .*; runner is the package in .*, which hides .*/runner; give"),
    "runner/errors.py": (
        "runner.errors:Job",
        r"has no Job.*; runner is the package in .*, which hides .*/runner; give",
    ),
}


def start_in(directory: Path, file: str, program: str) -> tuple[int, str]:
    """Run a program with a file in the working directory, which is first on its path, as with `python -m runner`."""
    (directory / file).parent.mkdir(exist_ok=True)
    (directory / file).write_text("")
    (directory / "x.yaml").write_text("{name: x, job: 'experiments.gpt:PretrainGPT', directory: run, config: {}}")
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, ''); {program}"],
        cwd=directory,
        env=environment(1, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=300,
    )
    return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("file", "command"),
    [(file, "runner") for file in HIDING] + [(file, "launch") for file in HIDING if "jax" not in file],
)
def test_the_line_names_a_file_that_hides_a_module(tmp_path: Path, file: str, command: str) -> None:
    program = f"sys.argv = {PROGRAMS[command]}; import {command}.__main__ as m; sys.exit(m.main())"
    code, errors = start_in(tmp_path, file, program)
    assert (code, errors.count("\n")) == (2, 1), errors
    assert re.search(HIDING[file], errors), errors


@pytest.mark.parametrize("file", HIDDEN)
def test_the_line_names_a_folder_that_is_hidden(tmp_path: Path, file: str) -> None:
    path, line = HIDDEN[file]
    code, errors = start_in(tmp_path, file, f"import runner.spec as s; s.load_class('{path}', int)")
    assert code == 1
    assert re.search(line, errors.splitlines()[-1]), errors
