"""The parts of a message about a spec: the place to blame, what was got, and the choice that was probably meant."""

import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """Where a value was written: `specs/x.yaml:14`, or the `--set` that gave it."""

    text: str
    line: int = 0
    key: str = ""  # the dotted key that `text` already names, for a --set

    def blame(self, path: KeyPath, message: str) -> str:
        """One line that blames `path`, written here; a --set that names the key itself is not made to repeat it."""
        key = ".".join(path)
        line = ": ".join([self.text, message] if key in ("", self.key) else [self.text, key, message])
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def got(value: Any) -> str:
    """A value of a document, short enough for a message."""
    if isinstance(value, str):
        return f"{value[:60]!r} (text)"
    if isinstance(value, dict | list):
        return "a mapping" if isinstance(value, dict) else "a list"
    return json.dumps(value)[:60]


def did_you_mean(word: str, choices: Sequence[str], prefix: str = "") -> str:
    """`; did you mean ...?`, or nothing where no choice is near."""
    near = difflib.get_close_matches(word, choices, n=1)
    return f"; did you mean {prefix}{near[0]}?" if near else ""


def nearest_or_all(word: str, choices: Sequence[str], prefix: str = "") -> str:
    """`; did you mean ...?`, or all the choices where none is near."""
    return did_you_mean(word, choices, prefix) or (f"; choose from {', '.join(choices)}" if choices else "")
