"""The trajectory: the keys of a spec on which the bits of a run depend. A resume refuses a change in any of them."""

import hashlib
import json
from typing import Any

from runner.spec.model import ExecutionSpec, JobConfig

Trajectory = dict[str, Any]  # dotted key -> value, as JSON


def trajectory(spec: ExecutionSpec, config: JobConfig) -> Trajectory:
    """Flat dotted key -> value of all that the state's bits depend on; everything else may change on resume."""
    free = tuple(f"config.{key}." for key in config.free_keys)
    flat = {"job": spec.job, "seed": spec.seed, **_flatten(config.model_dump(mode="json"), "config.")}
    return {key: value for key, value in flat.items() if not f"{key}.".startswith(free)}


def hash_of(record: dict[str, Any]) -> str:
    """SHA-256 of the canonical JSON, in hexadecimal."""
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _flatten(data: Trajectory, prefix: str) -> Trajectory:
    flat: Trajectory = {}
    for key, value in data.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value})
    return flat
