"""Sharded equals unsharded: a step of every kind of model, over meshes of all axes on 8 and on 16 faked devices.

The table is made of `AXES` and of the kinds in `tests.support.sharded`: a new axis is in all pairs, and a new key of a
model or of what a step keeps is missed until some kind has it.
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
NUMBERS = (8, MOST_DEVICES)
DAILY = ("dense", {"data": 2, "sequence": 2, "tensor": 2})
# What no mesh can betray: where values come from, and by what number weights are scaled.
OF_NO_MESH = {"preset", "vocabulary_size", "base_width"}
CASES = [
    pytest.param(kind, mesh, id=f"{kind} on {mesh_id(mesh)}", marks=() if (kind, mesh) == DAILY else SOAK)
    for kind, mesh in itertools.product(KINDS, meshes(8))
]


def check(found: Difference) -> None:
    assert found.loss <= 1e-5
    assert found.gradient <= 1e-4
    assert found.variables == 0


@pytest.mark.parametrize(("kind", "mesh"), CASES)
def test_a_step_on_eight_devices_is_that_on_one(kind: str, mesh: dict[str, int]) -> None:
    check(difference(kind, mesh, 8))


@functools.cache
def found_on_sixteen(kind: str) -> dict[str, Difference]:
    """By mesh, of a process that has so many devices."""
    output = finish(start_python("-m", "tests.support.sharded", str(MOST_DEVICES), kind, devices=MOST_DEVICES), 7200)
    return {mesh: Difference(*found) for mesh, found in json.loads(output.splitlines()[-1]).items()}


@pytest.mark.soak
@pytest.mark.parametrize("mesh", meshes(MOST_DEVICES), ids=mesh_id)
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_on_sixteen_devices_is_that_on_one(kind: str, mesh: dict[str, int]) -> None:
    check(found_on_sixteen(kind)[mesh_id(mesh)])


@pytest.mark.parametrize("number", NUMBERS)
def test_the_meshes_are_each_axis_alone_all_pairs_and_two_triples(number: int) -> None:
    found = meshes(number)
    assert {math.prod(mesh.values()) for mesh in found} == {number}
    for count, expected in ((1, len(AXES)), (2, math.comb(len(AXES), 2)), (3, 2)):
        assert len({tuple(mesh) for mesh in found if len(mesh) == count}) == expected
    assert DAILY[1] in meshes(8)


def sections_of(section: BaseModel) -> Iterator[BaseModel]:
    """A section of a config, and those in it; but not how angles are stretched, which moves numbers alone."""
    yield section
    for key in type(section).model_fields:
        if isinstance(inner := getattr(section, key), BaseModel) and key != "scaling":
            yield from sections_of(inner)


def test_every_key_of_a_model_and_of_what_a_step_keeps_is_changed_by_a_kind() -> None:
    keys, changed = set(), set()
    for kind in KINDS:
        config = make_job(kind, {}).config
        for section in (*sections_of(config.model), config.memory):
            fields = type(section).model_fields
            keys |= {*fields}
            defaults = {key: field.get_default(call_default_factory=True) for key, field in fields.items()}
            changed |= {key for key in fields if getattr(section, key) != defaults[key]}
    assert keys - changed == OF_NO_MESH
