"""Options and helpers that several engines share: the base of their command lines, and shell programs.

A shell program is a file beside the module that fills in its values. The file begins with a comment that describes it,
up to the first blank line; the program is what follows. `@{name}` in the program is a placeholder for a value.
"""

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Annotated, ClassVar

import typer

from runner.errors import InvalidError
from runner.spec import CheckpointConfig

DEFAULT_GRACE_SECONDS = 300
SUBMIT_TIME_VARIABLE = "RUNNER_SUBMITTED"  # environment variable with the time of submission, in Unix seconds
MAX_NUMBER = 2**31 - 1  # largest number that every engine accepts

_STANDBY_SECONDS = 30
Nodes = Annotated[int | None, typer.Option(min=1, metavar="N", help="Number of nodes where the spec names no chips.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be submitted, and submit nothing.")]
Exclude = Annotated[
    list[str], typer.Option(metavar="NODE", help="Node that the job must not get, such as a suspect host; repeatable.")
]
GraceSeconds = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        show_default=f"checkpoint.grace_seconds, else {DEFAULT_GRACE_SECONDS}",
        help="Time that a job gets to save its state after it is asked to stop.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SpecOptions:
    """A spec and its overrides, and checks of the values of all options."""

    # Options whose text is checked elsewhere, or is arbitrary: YAML, and options that an engine checks itself.
    free_texts: ClassVar[tuple[str, ...]] = ("spec", "overrides")
    # Options of the form NAME=VALUE, whose value may be any text.
    pairs: ClassVar[tuple[str, ...]] = ()

    spec: Annotated[str, typer.Argument(metavar="SPEC", help="Path of the job's spec, a YAML file.")]
    overrides: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Override a dotted key of the spec; repeatable."),
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Raise `InvalidError` for a value that no engine can use: empty or unprintable text, or too large a number."""
        for name in (each.name for each in fields(self)):
            value = getattr(self, name)
            option = {"spec": "SPEC", "overrides": "--set"}.get(name, f"--{name.replace('_', '-')}")
            if type(value) is int and value > MAX_NUMBER:
                raise InvalidError(f"{option} {value}: needs at most {MAX_NUMBER}")
            for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
                if name in self.pairs:
                    text, equals, given = text.partition("=")
                    if not text or not equals:
                        raise InvalidError(f"{option} {text + equals + given!r:.100}: needs the form NAME=VALUE")
                # Python presents bytes that are not UTF-8 as lone surrogates, which no manifest can hold.
                if any("\ud800" <= character <= "\udfff" for character in text):
                    raise InvalidError(f"{option} {text!r:.100}: is not UTF-8")
                is_plain = text.isprintable() and text == text.strip() and text
                if name not in self.free_texts and not is_plain:
                    raise InvalidError(f"{option} {text!r:.100}: needs printable text without blanks around it")


@dataclass(frozen=True, kw_only=True)
class LaunchArguments(SpecOptions):
    """Arguments of every engine that runs a job."""

    max_restarts: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Restarts after exit code 76 between two commits; 75 does not count."),
    ] = 100
    standby_seconds: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Age of the job's process when its successor is started ahead; 0 for never."
        ),
    ] = _STANDBY_SECONDS


def find_grace_seconds(grace_seconds: int | None, checkpoint: CheckpointConfig) -> int:
    """Return the grace period of the command line, else of the spec, in whole seconds."""
    return math.ceil(grace_seconds or checkpoint.grace_seconds or DEFAULT_GRACE_SECONDS)


def runner_arguments(spec: str, overrides: Sequence[str]) -> list[str]:
    """Return the words after `python` of the command that every host runs."""
    return ["-m", "runner", spec, *set_arguments(overrides)]


def restart_arguments(arguments: LaunchArguments) -> list[str]:
    """Return the words that pass the options of restarts on to `launch.worker`."""
    standby = ["--standby-seconds", str(arguments.standby_seconds)]
    words = ["--max-restarts", str(arguments.max_restarts)]
    return words if arguments.standby_seconds == _STANDBY_SECONDS else words + standby


def set_arguments(overrides: Sequence[str]) -> list[str]:
    """Return the words that pass overrides on to the runner."""
    return [word for override in overrides for word in ("--set", override)]


Value = str | int | Sequence[str] | None
_PLAIN = re.compile(r"[A-Za-z0-9_.,-]+")
_PLACEHOLDER = re.compile(r"@\{(\w+)\}")


def read_program(package: str, name: str) -> str:
    """Return the shell program in a file of a package, without the comment that describes it."""
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    _, _, program = text.partition("\n\n")
    return program


def fill_program(program: str, **values: Value) -> str:
    """Put values into the placeholders of a shell program; each must have one.

    Args:
        program: text with placeholders.
        values: a sequence is words, which are quoted one by one. A text is inserted without quotes, so it must consist
            of letters, digits and `_.,-`. The line of a placeholder whose value is None is left out.
    """
    found = _PLACEHOLDER.findall(program)
    # A placeholder that was forgotten on either side would run as shell text on every host.
    assert set(found) == set(values), f"placeholders for {found}, values for {list(values)}"
    absent = {name for name, value in values.items() if value is None}
    # The whole line of an optional value is left out, so that the programs need no `if`.
    lines = [line for line in program.splitlines() if not absent & set(_PLACEHOLDER.findall(line))]

    def format_value(value: Value) -> str:
        if isinstance(value, str):
            assert _PLAIN.fullmatch(value), f"{value!r} needs quotes"
            return value
        return str(value) if isinstance(value, int) else shlex.join(value or ())

    return _PLACEHOLDER.sub(lambda placeholder: format_value(values[placeholder[1]]), "\n".join(lines))
