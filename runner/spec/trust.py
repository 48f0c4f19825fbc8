"""Modules whose classes the spec of a run's directory may name.

A class that a spec names is code, and importing its module runs it. A user's own spec may name any module. The
`spec.yaml` of a run's directory may be somebody else's: from it only classes of this project are imported, and those of
modules that the user allows, before anything is imported.
"""

import importlib.util
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner.errors import InvalidError
from runner.spec.model import CLASS_PATH

OWN_PACKAGES = ("experiments", "runner")
_HOME = Path(__file__).resolve().parents[2]  # directory of the installed packages of this project


@dataclass(frozen=True)
class Trust:
    """Modules that a document may name which the user has not written.

    Attributes:
        modules: names of modules that the user allows besides those of this project, each with its submodules.
    """

    modules: tuple[str, ...] = ()

    def validate(self, path: str) -> None:
        """Raise `InvalidError` unless the class path `module:Class` is of a module that is allowed. Imports nothing."""
        module = path.partition(":")[0]
        if _is_below(module, self.modules):
            return
        place = ""
        if _is_below(module, OWN_PACKAGES):
            # A package of this name in the working directory, or on PYTHONPATH, is not that of this project.
            found = importlib.util.find_spec(module.partition(".")[0])
            origin = None if found is None or found.origin is None else Path(found.origin).resolve()
            if origin is not None and origin.parent.parent == _HOME:
                return
            place = f" at {origin or 'an unknown place'}"
        raise InvalidError(
            f"{path} comes from module {module}{place}, which this directory names; if you trust it, pass --trust "
            f"{module}"
        )


def list_named_modules(data: Any) -> Iterator[str]:
    """Yield the modules of all class paths in the plain data of a spec."""
    if isinstance(data, dict | list):
        for value in data.values() if isinstance(data, dict) else data:
            yield from list_named_modules(value)
    elif isinstance(data, str) and CLASS_PATH.fullmatch(data):
        yield data.partition(":")[0]


def _is_below(module: str, names: Collection[str]) -> bool:
    return any(f"{module}.".startswith(f"{name}.") for name in names)
