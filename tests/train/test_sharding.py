"""Sharded equals unsharded: a step of every kind of model, on meshes of all axes with 8 and 16 simulated devices.

The table is built from `AXES` and the kinds in `tests.support.sharded`: a new axis is tested in all pairs, and a new
key of the model or memory config is reported until some kind sets it.
"""

import functools
import itertools
import json
import math
from collections.abc import Iterator

import pytest
from pydantic import BaseModel

from runner.parallel.mesh import AXES
from tests.support.sharded import KINDS, MOST_DEVICES, Difference, difference, make_job, meshes
from tests.support.tiny import finish, mesh_id, start_python

SOAK = pytest.mark.soak
DEVICE_COUNTS = (8, MOST_DEVICES)
DAILY = ("dense", {"data": 2, "sequence": 2, "tensor": 2})
# Keys that do not affect sharding: sources of values and scales of weights.
MESH_INDEPENDENT = {"preset", "vocabulary_size", "base_width"}
CASES = [
    pytest.param(kind, mesh, id=f"{kind} on {mesh_id(mesh)}", marks=() if (kind, mesh) == DAILY else SOAK)
    for kind, mesh in itertools.product(KINDS, meshes(8))
]


def check_difference(found: Difference) -> None:
    assert found.loss <= 1e-5
    assert found.gradient <= 1e-4
    assert found.variables == 0


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_step_on_eight_devices_equals_one_device(kind: str, mesh: dict[str, int]) -> None:
    check_difference(difference(kind, mesh, 8))


@functools.cache
def run_on_sixteen(kind: str) -> dict[str, Difference]:
    """Run all meshes in a process with 16 devices and return the differences by mesh."""
    output = finish(start_python("-m", "tests.support.sharded", str(MOST_DEVICES), kind, devices=MOST_DEVICES), 7200)
    return {mesh: Difference(*found) for mesh, found in json.loads(output.splitlines()[-1]).items()}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", meshes(MOST_DEVICES), ids=mesh_id)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_sixteen_devices_equals_one_device(kind: str, mesh: dict[str, int]) -> None:
    check_difference(run_on_sixteen(kind)[mesh_id(mesh)])


@pytest.mark.parametrize("number", DEVICE_COUNTS)
def test_the_meshes_cover_each_axis_all_pairs_and_two_triples(number: int) -> None:
    found = meshes(number)
    assert {math.prod(mesh.values()) for mesh in found} == {number}
    for count, expected in ((1, len(AXES)), (2, math.comb(len(AXES), 2)), (3, 2)):
        assert len({tuple(mesh) for mesh in found if len(mesh) == count}) == expected
    assert DAILY[1] in meshes(8)


def iterate_sections(section: BaseModel) -> Iterator[BaseModel]:
    """Yield a section of a config and its subsections, except rope scaling, which changes only values."""
    yield section
    for key in type(section).model_fields:
        if isinstance(inner := getattr(section, key), BaseModel) and key != "scaling":
            yield from iterate_sections(inner)


def test_every_model_and_memory_key_is_changed_by_a_kind() -> None:
    keys, changed = set(), set()
    for kind in KINDS:
        config = make_job(kind, {}).config
        for section in (*iterate_sections(config.model), config.memory):
            fields = type(section).model_fields
            keys |= {*fields}
            defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            changed |= {key for key in fields if getattr(section, key) != defaults[key]}
    assert keys - changed == MESH_INDEPENDENT
