"""Sharded equals unsharded: a step of every kind of model, on meshes of all axes with 8 and 16 simulated devices.

The table is built from `AXES` and the kinds in `tests.support.sharded_step`: a new axis is tested in all pairs, and a
new key of the model or memory config is reported until some kind sets it.
"""

import functools
import json
import math
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from runner.parallel.mesh import AXES
from tests.support.sharded_step import (
    JOB_KINDS,
    MAX_DEVICES,
    Difference,
    list_kind_meshes,
    list_meshes,
    make_job,
    measure_difference,
)
from tests.support.tiny_jobs import format_mesh, start_python, wait_for_output

SOAK = pytest.mark.soak
DEVICE_COUNTS = (8, MAX_DEVICES)
DAILY = ("dense", {"data": 2, "sequence": 2, "tensor": 2})
# Keys that do not affect sharding: sources of values and scales of weights.
MESH_INDEPENDENT = {"preset", "vocabulary_size", "base_width"}
CASES = [
    pytest.param(kind, mesh, id=f"{kind} on {format_mesh(mesh)}", marks=() if (kind, mesh) == DAILY else SOAK)
    for kind in JOB_KINDS
    for mesh in list_kind_meshes(kind, 8)
]


def check_difference(kind: str, found: Difference) -> None:
    assert found.loss <= JOB_KINDS[kind].loss
    assert found.gradient <= JOB_KINDS[kind].gradient
    assert found.variables == 0


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_step_on_eight_devices_equals_one_device(kind: str, mesh: dict[str, int]) -> None:
    check_difference(kind, measure_difference(kind, mesh, 8))


@functools.cache
def run_on_sixteen(kind: str) -> dict[str, Difference]:
    """Run all meshes in a process with 16 devices and return the differences by mesh."""
    output = wait_for_output(
        start_python("-m", "tests.support.sharded_step", str(MAX_DEVICES), kind, devices=MAX_DEVICES), 7200
    )
    return {mesh: Difference(*found) for mesh, found in json.loads(output.splitlines()[-1]).items()}


@pytest.mark.soak
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        pytest.param(kind, mesh, id=f"{kind} on {format_mesh(mesh)}")
        for kind in JOB_KINDS
        for mesh in list_kind_meshes(kind, MAX_DEVICES)
    ],
)
def test_a_step_on_sixteen_devices_equals_one_device(kind: str, mesh: dict[str, int]) -> None:
    check_difference(kind, run_on_sixteen(kind)[format_mesh(mesh)])


@pytest.mark.parametrize("number", DEVICE_COUNTS)
def test_the_meshes_cover_each_axis_all_pairs_and_two_triples(number: int) -> None:
    found = list_meshes(number)
    assert {math.prod(mesh.values()) for mesh in found} == {number}
    for count, expected in ((1, len(AXES)), (2, math.comb(len(AXES), 2)), (3, 2)):
        assert len({tuple(mesh) for mesh in found if len(mesh) == count}) == expected
    assert DAILY[1] in list_meshes(8)


def iterate_sections(section: BaseModel) -> Iterator[BaseModel]:
    """Yield a section of a config and its subsections, except rope scaling, which changes only values."""
    yield section
    for key in type(section).model_fields:
        if isinstance(inner := getattr(section, key), BaseModel) and key != "scaling":
            yield from iterate_sections(inner)


def test_every_model_and_memory_key_is_changed_by_a_kind() -> None:
    keys, changed = set(), set()
    for kind in JOB_KINDS:
        config = make_job(kind, {}).config
        for section in (*iterate_sections(config.model), config.memory):
            fields = type(section).model_fields
            keys |= {*fields}
            defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            changed |= {key for key in fields if getattr(section, key) != defaults[key]}
    assert keys - changed == MESH_INDEPENDENT
