"""The trajectory: the keys of a spec on which the bits of a run depend. A resume refuses a change in any of them."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from runner.spec.model import ExecutionSpec, JobConfig

Trajectory = dict[str, Any]  # dotted key -> value, as JSON


def trajectory(spec: ExecutionSpec, config: JobConfig) -> Trajectory:
    """Flat dotted key -> value of all that the state's bits depend on; everything else may change on resume."""
    free = tuple(f"config.{key}." for key in config.free_keys)
    flat = {"job": spec.job, "seed": spec.seed, **_flatten(config.model_dump(mode="json"), "config.")}
    return {key: value for key, value in flat.items() if not f"{key}.".startswith(free)}


def filled_in(saved: Trajectory, present: Trajectory, config: JobConfig) -> Trajectory:
    """`saved`, which an older version of the job may have written, with today's default of each key that it lacks.

    A later version that adds a key gives it the default that keeps every older trajectory. `present` are the keys that
    define one today; `config` is what they come from, and tells which defaults its choices lead to.
    """
    defaults = _defaults_beside(saved, config, "config")
    filled = {key: value for key, value in defaults.items() if key in present} | saved
    return {key: _entries_filled_in(value, config, key.split(".")[1:]) for key, value in filled.items()}


def _defaults_beside(saved: Trajectory, model: BaseModel, prefix: str) -> Trajectory:
    """Defaults of the keys of `model` of which `saved` has nothing, neither the key nor one below it."""
    found: Trajectory = {}
    for name, field in type(model).model_fields.items():
        key, value = f"{prefix}.{name}", getattr(model, name)
        if any(f"{other}.".startswith(f"{key}.") for other in saved):
            found |= _defaults_beside(saved, value, key) if isinstance(value, BaseModel) else {}
        elif not field.is_required():
            default = type(model).model_construct(**{name: field.get_default(call_default_factory=True)})
            found |= _flatten(default.model_dump(mode="json", include={name}), f"{prefix}.")
    return found


def _entries_filled_in(saved: Any, model: Any, path: Sequence[str]) -> Any:
    """A saved list of sections, each with today's default of every key that it lacks; any other value as it is."""
    for name in path:
        model = getattr(model, name, None)
    if not (isinstance(saved, list) and isinstance(model, list) and model and isinstance(model[0], BaseModel)):
        return saved
    fields = type(model[0]).model_fields
    names = {name for name, field in fields.items() if not field.is_required()}
    defaults = {name: fields[name].get_default(call_default_factory=True) for name in names}
    dumped = type(model[0]).model_construct(**defaults).model_dump(mode="json", include=names)
    return [_in_order(dumped | entry, list(fields)) if isinstance(entry, dict) else entry for entry in saved]


def _in_order(entry: Trajectory, names: Sequence[str]) -> Trajectory:
    """The same with its keys as a model writes them."""
    return {name: entry[name] for name in (*(name for name in names if name in entry), *(entry.keys() - set(names)))}


def hash_of(record: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _flatten(data: Trajectory, prefix: str) -> Trajectory:
    flat: Trajectory = {}
    for key, value in data.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
