"""Changes of values of a spec as text, for events, `status`, `lineage` and the dashboard."""

import json
import sys
from typing import Any

from runner.console import escape_unprintable
from runner.spec.document import dump_yaml

_MAX_CHARACTERS = 120  # of each value of a change
_MAX_EXACT = 1 << 53  # largest whole number up to which a float holds every other


def list_value_changes(key: str, former: Any, present: Any) -> list[str]:
    """Return a line such as `train.total_steps: 60 -> 80` for a key, or for each entry of a section that differs."""
    if isinstance(former, dict) and isinstance(present, dict) and former and present:
        pairs = ((f"{key}.{name}", former.get(name), present.get(name)) for name in former | present)
        return [line for name, old, new in pairs if old != new for line in list_value_changes(name, old, new)]
    # A saved value may be any text.
    return [escape_unprintable(f"{key}: {' -> '.join(_cut_alike(format_setting(former), format_setting(present)))}")]


def _cut_alike(former: str, present: str) -> list[str]:
    """Return two texts, of which long ones are cut to the part in which they differ."""
    if max(len(former), len(present)) <= _MAX_CHARACTERS:
        return [former, present]
    pairs = enumerate(zip(former, present, strict=False))
    same = next((number for number, (one, other) in pairs if one != other), min(len(former), len(present)))
    first = max(0, same - _MAX_CHARACTERS // 4)
    last = first + _MAX_CHARACTERS
    return [f"{'...' * bool(first)}{text[first:last]}{'...' * (len(text) > last)}" for text in (former, present)]


def format_setting(value: Any) -> str:
    """Return a value of a spec as short text: names and weights of a mixture, plain text, or JSON."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        shown = ([each[key] for key in ("name", "weight") if key in each] for each in value)
        return ", ".join(" ".join(map(format_setting, parts)) for parts in shown)
    if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_EXACT:
        return str(int(value))
    try:
        if _is_stages(value):
            return ", ".join(f"from step {first}: {json.dumps(keys, default=str)}" for first, keys, *_ in value)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):  # Python does not write whole numbers of thousands of digits.
        return "?"


def format_yaml(value: Any) -> str:
    """Return a value of a trajectory as one line of YAML that can be copied into a spec."""
    if isinstance(value, list | dict):
        return dump_yaml(list_stages(value), default_flow_style=True, width=sys.maxsize).strip()
    return repr(value) if isinstance(value, str) else json.dumps(value)


def list_stages(value: Any) -> Any:
    """Return stages as they are saved in the form of `config.stages`; any other value is returned as it is.

    Keys of sources that have their default, which is null or empty, are left out.
    """
    if not _is_stages(value):
        return value
    return [
        {"from_step": first, "set": {key: _drop_empty(each) for key, each in keys.items()}} for first, keys, *_ in value
    ]


def _drop_empty(value: Any) -> Any:
    """Return a list of mappings without the keys that are null or empty."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        return value
    return [{key: given for key, given in each.items() if given is not None and given != {}} for each in value]


def _is_stages(value: Any) -> bool:
    """Return True if a value is a list of stages as they are saved: first step, keys, and digests of what they read."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(
            isinstance(each, list) and len(each) > 1 and isinstance(each[0], int) and isinstance(each[1], dict)
            for each in value
        )
    )
