"""Shell programs in files: each is good bash, and values go in quoted or not at all."""

import subprocess
import tomllib
from pathlib import Path

import pytest

from launch.options import fill_program, read_program

LAUNCH = Path(__file__).parents[2] / "launch"
PROGRAMS = sorted(LAUNCH.rglob("*.sh"))


def package_of(path):
    return ".".join(path.parent.relative_to(LAUNCH.parent).parts)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(LAUNCH)))
def test_every_program_is_good_bash_below_a_comment_that_says_what_it_does(path):
    subprocess.run(["bash", "-n", path], check=True)
    comment, _, program = path.read_text().partition("\n\n")
    assert all(line.startswith("#") for line in comment.splitlines())
    assert read_program(package_of(path), path.name) == program
    assert not program.startswith(("#", "\n"))


def test_every_program_is_installed_with_its_package():
    settings = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert "*.sh" in settings["package-data"]["*"]
    assert all((path.parent / "__init__.py").exists() for path in PROGRAMS)


def test_words_go_in_quoted_one_by_one():
    nasty = ["it's", "$(touch hacked) `touch hacked`; touch hacked\n&& touch hacked", "@{name}", ""]
    program = fill_program("printf '%s|' @{words}", words=nasty)
    assert subprocess.run(["bash", "-c", program], capture_output=True, text=True).stdout == "|".join([*nasty, ""])


def test_a_text_stands_as_it_is_and_a_line_without_its_value_is_left_out():
    program = 'a="$HOME/@{name}" $b\n. @{file}\ntail -n @{number} @{name}\n'
    assert fill_program(program, name="gpt-2.tar", file=None, number=0) == 'a="$HOME/gpt-2.tar" $b\ntail -n 0 gpt-2.tar'


@pytest.mark.parametrize("text", ["a b", "$HOME", "it's", '"', "a;b", "`", "\n", "", "*", "~", "@{name}"])
def test_a_text_that_needs_quotes_is_refused(text):
    with pytest.raises(AssertionError):
        fill_program("echo @{name}", name=text)


@pytest.mark.parametrize("values", [{}, {"name": "a", "other": "b"}, {"other": "b"}])
def test_a_place_without_a_value_and_a_value_without_a_place_are_refused(values):
    with pytest.raises(AssertionError):
        fill_program("echo @{name}", **values)
