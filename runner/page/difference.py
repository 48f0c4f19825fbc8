"""Where the specs of several runs differ, key by key."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from runner.errors import SpecError
from runner.spec import parse_document

_OWN = ("name", "directory")  # that tell runs apart, and say nothing of what they do
ABSENT = "(absent)"
UNREADABLE = "(unreadable)"


class Difference(NamedTuple):
    """A dotted key, and the value that each run has under it, as JSON."""

    key: str
    values: list[str]


def differences(specs: Sequence[str | None]) -> list[Difference]:
    """The keys that not all specs, given as YAML, have with one value, sorted; None or what cannot be read has none."""
    flat = [_flat(text) for text in specs]
    keys = sorted({key for values in flat if values is not None for key in values} - set(_OWN))
    found = (
        Difference(key, [UNREADABLE if values is None else values.get(key, ABSENT) for values in flat]) for key in keys
    )
    return [each for each in found if len(set(each.values)) > 1]


def _flat(text: str | None) -> dict[str, str] | None:
    try:
        return None if text is None else dict(_leaves(parse_document(text, "spec.yaml").data, ""))
    except SpecError:
        return None


def _leaves(value: Any, path: str) -> list[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        below = f"{path}." if path else ""
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{below}{key}")]
    return [(path, json.dumps(value))]
