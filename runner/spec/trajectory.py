"""The trajectory: the keys of a spec on which the bits of a run depend. A resume refuses a change in any of them."""

import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from runner.spec.model import ExecutionSpec, JobConfig

Trajectory = dict[str, Any]  # dotted key to JSON value; a key in a list of sections has the section's index as a part
_INDEX = re.compile(r"\.\d+(?=\.)")


def compute_trajectory(spec: ExecutionSpec, config: JobConfig) -> Trajectory:
    """Return all keys on which the state's bits depend; everything else may change on resume."""
    free = tuple(f"config.{key}." for key in config.free_keys)
    flat = {"job": spec.job, "seed": spec.seed, **_flatten(config.model_dump(mode="json"), "config.")}
    return {key: value for key, value in flat.items() if not f"{_INDEX.sub('', key)}.".startswith(free)}


def fill_in_defaults(saved: Trajectory, present: Trajectory, config: JobConfig) -> Trajectory:
    """Return a saved trajectory with today's default of each key that it lacks.

    An older version of the job may have written it. A later version that adds a key gives it the default that keeps
    every older trajectory.

    Args:
        saved: trajectory of a checkpoint.
        present: trajectory of today's spec, whose keys are those to fill in.
        config: config of today's spec; its choices determine which defaults apply.
    """
    saved = _flatten(saved, "")
    defaults = _find_missing_defaults(saved, config, "config")
    return {key: value for key, value in defaults.items() if key in present} | saved


def _find_missing_defaults(saved: Trajectory, model: BaseModel, prefix: str) -> Trajectory:
    """Return the defaults of the keys of `model` for which `saved` has neither the key nor one below it."""
    found: Trajectory = {}
    for name, field in type(model).model_fields.items():
        key, value = f"{prefix}.{name}", getattr(model, name)
        if any(f"{other}.".startswith(f"{key}.") for other in saved):
            for place, section in _list_sections(key, value):
                found |= _find_missing_defaults(saved, section, place)
        elif not field.is_required():
            default = type(model).model_construct(**{name: field.get_default(call_default_factory=True)})
            found |= _flatten(default.model_dump(mode="json", include={name}), f"{prefix}.")
    return found


def hash_record(record: dict[str, Any]) -> str:
    """Return the SHA-256 of the canonical JSON of a record, in hexadecimal."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _list_sections(key: str, value: Any) -> Iterator[tuple[str, BaseModel]]:
    """Yield the section that a value is, or the sections that it lists, each with its dotted key."""
    items = enumerate(value) if isinstance(value, list) else ()
    for place, section in [(key, value), *((f"{key}.{index}", item) for index, item in items)]:
        if isinstance(section, BaseModel):
            yield place, section


def _flatten(data: Trajectory, prefix: str) -> Trajectory:
    flat: Trajectory = {}
    for key, value in data.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
