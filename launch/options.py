"""What the command lines of several engines share.

Shell programs: files beside the module that knows what they are given, and how that goes in.

A file begins with a comment that says what it does, up to the first blank line; the program is what follows. `@{name}`
in it is a place for a value.
"""

import argparse
import math
import re
import shlex
from collections.abc import Sequence
from importlib import resources

from runner.errors import InvalidError
from runner.spec import CheckpointConfig

Value = str | int | Sequence[str] | None
_PLAIN = re.compile(r"[A-Za-z0-9_.,-]+")
_PLACE = re.compile(r"@\{(\w+)\}")


def read_program(package: str, name: str) -> str:
    """The program in a file of a package."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    _, _, program = text.partition("\n\n")
    return program


def fill(program: str, **values: Value) -> str:
    """Put values into their places; each must have one.

    A sequence is words, which are quoted one by one. A text stands as it is, in quotes too, so it must be one that no
    shell reads more into: letters, digits and `_.,-`. A line that asks for a value that is None is left out.
    """
    assert set(_PLACE.findall(program)) == set(values), f"places for {_PLACE.findall(program)}, got {list(values)}"
    absent = {name for name, value in values.items() if value is None}
    lines = [line for line in program.splitlines() if not absent & set(_PLACE.findall(line))]
    return _PLACE.sub(lambda place: _word(values[place[1]]), "\n".join(lines))


def _word(value: Value) -> str:
    if isinstance(value, str):
        assert _PLAIN.fullmatch(value), f"{value!r} needs quotes"
        return value
    return str(value) if isinstance(value, int) else shlex.join(value or ())


GRACE_SECONDS = 300
SUBMITTED = "RUNNER_SUBMITTED"  # tells a process when its job was submitted, in Unix seconds
_LARGEST = 2**31 - 1
_ANY_TEXT = ("spec", "set", "sbatch_option")  # a path, YAML, and what is checked by its own engine


def positive(text: str) -> int:
    """An integer of at least 1, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return _checked_size(number)


def natural(text: str) -> int:
    """An integer of at least 0, for argparse."""
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return _checked_size(number)


def _checked_size(number: int) -> int:
    """The number, if engines can hold it."""
    if number > _LARGEST:
        raise argparse.ArgumentTypeError(f"{number} is more than {_LARGEST}")
    return number


def add_grace_seconds(parser: argparse.ArgumentParser, meaning: str) -> None:
    """`--grace-seconds`: what a job that is asked to stop gets to save its state."""
    parser.add_argument(
        "--grace-seconds",
        type=positive,
        metavar="N",
        help=f"{meaning}; default checkpoint.grace_seconds, else {GRACE_SECONDS}",
    )


def grace_seconds(parsed: argparse.Namespace, checkpoint: CheckpointConfig) -> int:
    """What the command line gives, else what the spec says, in whole seconds."""
    return math.ceil(parsed.grace_seconds or checkpoint.grace_seconds or GRACE_SECONDS)


def runner_arguments(spec: str, overrides: Sequence[str]) -> list[str]:
    """What follows `python`: the one command that every host runs."""
    return ["-m", "runner", spec, *set_arguments(overrides)]


def set_arguments(overrides: Sequence[str]) -> list[str]:
    """`--set` once for each override."""
    return [word for override in overrides for word in ("--set", override)]


def check_texts(parsed: argparse.Namespace) -> None:
    """Raise `InvalidError` for an option that no engine can mean: empty, blank, or with what cannot be printed."""
    for name, value in vars(parsed).items():
        for text in _texts(value):
            option = name if name == "spec" else f"--{name.replace('_', '-')}"
            if any("\ud800" <= character <= "\udfff" for character in text):
                raise InvalidError(f"{option} {text!r:.100}: is not UTF-8")
            if name not in _ANY_TEXT and (not text.isprintable() or text != text.strip() or not text):
                raise InvalidError(f"{option} {text!r:.100}: needs text, printable, without blanks around it")


def _texts(value: object) -> list[str]:
    """The texts that an option was given; of NAME=VALUE only the name, since a value may be any text."""
    if isinstance(value, tuple):
        return [value[0]]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []
