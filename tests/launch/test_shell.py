"""Shell programs in files: each is valid bash, and values are inserted quoted or rejected."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from launch.options import fill_program, read_program

LAUNCH = Path(__file__).parents[2] / "launch"
PROGRAMS = sorted(LAUNCH.rglob("*.sh"))


def get_package(path):
    return ".".join(path.parent.relative_to(LAUNCH.parent).parts)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(LAUNCH)))
def test_every_program_is_valid_bash_with_a_header_comment(path):
    subprocess.run(["bash", "-n", path], check=True)
    comment, _, program = path.read_text().partition("\n\n")
    assert all(line.startswith("#") for line in comment.splitlines())
    assert read_program(get_package(path), path.name) == program
    assert not program.startswith(("#", "\n"))


def test_every_program_is_package_data():
    settings = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "*.sh" in settings["package-data"]["*"]
    assert all((path.parent / "__init__.py").exists() for path in PROGRAMS)


def test_words_are_quoted_individually():
    special = ["it's", "$(touch hacked) `touch hacked`; touch hacked\n&& touch hacked", "@{name}", ""]
    program = fill_program("printf '%s|' @{words}", words=special)
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True).stdout == "|".join([*special, ""])


def test_a_plain_text_is_inserted_and_a_line_without_value_is_dropped():
    program = 'a="$HOME/@{name}" $b\n. @{file}\ntail -n @{number} @{name}\n'
    assert fill_program(program, name="gpt-2.tar", file=None, number=0) == 'a="$HOME/gpt-2.tar" $b\ntail -n 0 gpt-2.tar'


@pytest.mark.parametrize("text", ["a b", "$HOME", "it's", '"', "a;b", "`", "\n", "", "*", "~", "@{name}"])
def test_a_text_that_needs_quotes_is_rejected(text):
    with pytest.raises(AssertionError):
        fill_program("echo @{name}", name=text)


@pytest.mark.parametrize("values", [{}, {"name": "a", "other": "b"}, {"other": "b"}])
def test_unmatched_placeholders_and_values_are_rejected(values):
    with pytest.raises(AssertionError):
        fill_program("echo @{name}", **values)
