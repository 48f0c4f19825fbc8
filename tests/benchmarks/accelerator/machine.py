"""Description of this machine: `python -m tests.benchmarks.accelerator.machine` prints it as one line of JSON.

It is a program of its own because JAX may crash or hang when it initialises the device.
"""

import importlib.metadata
import json
import os
import platform
from dataclasses import asdict

import jax

from tests.benchmarks.accelerator.result import Machine

_PACKAGES = ("jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "flax", "optax", "orbax-checkpoint", "numpy")


def describe_machine() -> Machine:
    """Return the devices that JAX finds and the versions of the installed packages."""
    devices = jax.devices()
    stats = devices[0].memory_stats() or {}
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    memory_bytes = stats.get("bytes_limit")
    return Machine(
        devices[0].device_kind,
        len(devices),
        None if memory_bytes is None else int(memory_bytes),
        os.cpu_count() or 1,
        platform.python_version(),
        versions,
    )


if __name__ == "__main__":
    print(json.dumps(asdict(describe_machine())))
