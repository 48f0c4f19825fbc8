"""Tables of the keys in the JSON files of a run, and their validation. Each table is next to the code that writes it.

`specs/README.md` is generated from the tables; tests compare them with files of real runs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TIME_MAX = 253_402_300_799.0  # the last second of the year 9999, in Unix seconds
STEP_MAX = (1 << 53) - 1  # a float holds every step up to this one
INT_MAX = (1 << 63) - 1  # largest whole number of a record
PARAMS = "params"  # value of `--weights` for the trained parameters, as opposed to an average of them


@dataclass(frozen=True)
class Key:
    """One key of a JSON object.

    Attributes:
        name: its name; `a.b` is the key `b` of the object `a`, `a.*` any key of it.
        type: type of the value as Python reads it; anything that `isinstance` accepts.
        meaning: one sentence for the documentation, with the jobs that have the key if not all do.
        unit: unit of a number, if it is not part of the name.
    """

    name: str
    type: Any
    meaning: str
    unit: str = ""


def validate_record(record: Mapping[str, Any], keys: Iterable[Key], needs: Iterable[str] = ()) -> None:
    """Check the keys and types of a JSON object.

    Args:
        record: the object.
        keys: keys whose type is checked if they are present. A key below a `*` is required in each object there.
        needs: names of the required keys.

    Raises:
        ValueError: a required key is missing, or a value has the wrong type.
    """
    for name in needs:
        if name not in record:
            raise ValueError(f"the key {name} is missing")
    for key in keys:
        for value in _iterate_values(record, key.name.split("."), key.name, is_required=False):
            if isinstance(value, bool):  # In Python true is a number, in JSON it is not.
                is_valid = key.type is bool
            else:  # JSON writes some floats without a decimal point.
                is_valid = isinstance(value, key.type) or (isinstance(value, int) and isinstance(0.0, key.type))
                # Python reads whole numbers of any size, which neither a float nor an array holds.
                is_valid = is_valid and not (isinstance(value, int) and abs(value) > INT_MAX)
            if not is_valid:
                raise ValueError(f"{key.name} is of another type: {format_value(value)}")


def format_value(value: Any) -> str:
    """Return the beginning of a value of a record, for a message."""
    return repr(str(value)[:60])


def _iterate_values(value: Any, path: Sequence[str], name: str, is_required: bool) -> Iterator[Any]:
    """Iterate over the values of a key, through the objects of a list and the values of a `*`."""
    if not path:
        yield value
    elif isinstance(value, list) and is_required:
        for item in value:
            yield from _iterate_values(item, path, name, is_required)
    elif not isinstance(value, Mapping):
        raise ValueError(f"{name} is missing: {format_value(value)} is not an object")
    elif path[0] == "*":
        for item in value.values():
            yield from _iterate_values(item, path[1:], name, is_required=True)
    elif path[0] in value:
        yield from _iterate_values(value[path[0]], path[1:], name, is_required)
    elif is_required:
        raise ValueError(f"{name} is missing in one of its objects")
