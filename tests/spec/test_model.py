"""The models check what they can alone, also when a spec is made in Python."""

import pytest
from pydantic import ValidationError

from runner.spec import CheckpointConfig, ExecutionSpec, MeshConfig


def test_a_spec_made_in_python_needs_no_topology_and_cannot_be_changed() -> None:
    spec = ExecutionSpec(name="tiny", job="a:B", directory="runs")
    assert spec.topology is None
    with pytest.raises(ValidationError):
        spec.seed = 1
    with pytest.raises(ValidationError, match="only one may be"):
        MeshConfig(data="auto", tensor="auto")
    with pytest.raises(ValidationError, match="both null"):
        CheckpointConfig(every_steps=None)
