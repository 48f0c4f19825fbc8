"""Spec models validate themselves, also when constructed in Python."""

import pytest
from pydantic import ValidationError

from runner.spec import CheckpointConfig, ExecutionSpec, MeshConfig


def test_a_spec_constructed_in_python_needs_no_topology_and_is_frozen() -> None:
    spec = ExecutionSpec(name="tiny", job="a:B", directory="runs")
    assert spec.topology is None
    with pytest.raises(ValidationError):
        spec.seed = 1
    with pytest.raises(ValidationError, match="only one may be"):
        MeshConfig(data="auto", tensor="auto")
    with pytest.raises(ValidationError, match="all null"):
        CheckpointConfig(every_steps=None)
