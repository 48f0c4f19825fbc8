"""Faked CPU devices: of this process of pytest, and of the processes that tests start."""

import os
from pathlib import Path

from runner.process import make_environment

# Compiling is most of what these tests cost, and half of that is LLVM's optimiser.
_UNOPTIMIZED = "--xla_backend_optimization_level=0"


def fake_here(devices: int) -> None:
    """Give this process so many faked devices. Before jax is imported; processes that it starts inherit them."""
    os.environ.update(make_environment(devices, {"XLA_FLAGS": _UNOPTIMIZED}))


def environment(devices: int, cache: Path | None = None) -> dict[str, str]:
    """What a job's process runs under: `devices` faked CPU devices of its own, whatever this process has."""
    given = {name: value for name, value in os.environ.items() if name != "NPROC"}  # which this process's devices need
    variables = make_environment(devices, given) | {"PYTHONUNBUFFERED": "1"}
    return variables if cache is None else variables | {"RUNNER_CACHE": str(cache)}
