"""The keys of the JSON files that a run leaves. Each file's table stands beside the code that writes it.

The tables are what `specs/README.md` is generated from; tests compare them with files of real runs.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Key:
    """One key of a JSON object.

    Attributes:
        name: as it is written; `a.b` is a key of an object inside, `a.*` any key of it.
        type: of the value as Python reads it; anything that `isinstance` takes.
        meaning: what the value says; which jobs have the key, where not all do.
        unit: of a number, where the name does not tell.
    """

    name: str
    type: Any
    meaning: str
    unit: str = ""
