"""Runs of a sweep as jobs of a queue."""

from launch.options import LaunchArguments
from launch.sweep.record import SweepRecord
from runner.errors import InvalidError
from runner.spec import Document, ExecutionSpec


def find_topology(document: Document, spec: ExecutionSpec, arguments: LaunchArguments) -> str | None:
    """Return the accelerator of a job whose spec names no number of chips."""
    return None


def submit(record: SweepRecord, arguments: LaunchArguments, at_once: int | None, *, is_dry: bool) -> int:
    """Submit all runs that have not ended."""
    raise InvalidError("--engine slurm and jobset: not available yet")
