"""Shell programs: files beside the module that knows what they are given, and how that goes in.

A file begins with a comment that says what it does, up to the first blank line; the program is what follows. `@{name}`
in it is a place for a value.
"""

import re
import shlex
from collections.abc import Sequence
from importlib import resources

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
