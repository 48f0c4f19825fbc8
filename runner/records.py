"""The keys of the JSON files that a run leaves. Each file's table stands beside the code that writes it.

The tables are what `specs/README.md` is generated from; tests compare them with files of real runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PARAMS = "params"  # by `--weights`: those that are trained, and not an average of them


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


def validate_record(record: Mapping[str, Any], keys: Iterable[Key], needs: Iterable[str] = ()) -> None:
    """Raise `ValueError` if a key of `needs` is missing from a JSON object, or one of `keys` has another type.

    What stands below a `*` in the name of a key is needed in each object there.
    """
    for name in needs:
        if name not in record:
            raise ValueError(f"the key {name} is missing")
    for key in keys:
        for value in _values_at(record, key.name.split("."), key.name, is_needed=False):
            if not _is_of(value, key.type):
                raise ValueError(f"{key.name} is of another type: {str(value)[:60]!r}")


def _values_at(value: Any, path: Sequence[str], name: str, is_needed: bool) -> Iterator[Any]:
    """The values of a key; those of a list of objects one after the other."""
    if not path:
        yield value
    elif isinstance(value, list) and is_needed:
        for item in value:
            yield from _values_at(item, path, name, is_needed)
    elif not isinstance(value, Mapping):
        raise ValueError(f"{name} is missing: {str(value)[:60]!r} is no object")
    elif path[0] == "*":
        for item in value.values():
            yield from _values_at(item, path[1:], name, is_needed=True)
    elif path[0] in value:
        yield from _values_at(value[path[0]], path[1:], name, is_needed)
    elif is_needed:
        raise ValueError(f"{name} is missing in one of its objects")


def _is_of(value: Any, kind: Any) -> bool:
    """As `isinstance`; but JSON writes some floats without a point, and true is no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) or (isinstance(value, int) and isinstance(0.0, kind))
