"""From a spec's topology to a mesh, and the arithmetic of batches over it."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from runner.errors import InvalidError
from runner.spec import Mesh
from runner.train.mesh import (
    AXES,
    batch_sharding,
    device_memory_bytes,
    does_mesh_fit,
    make_mesh,
    mesh_sizes,
    micro_batch_sizes,
    num_batch_shards,
    over_slices,
)


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ({}, 8, (8, 1, 1)),
        ({}, 1, (1, 1, 1)),
        ({"fsdp": 4, "tensor": 2}, 8, (1, 4, 2)),
        ({"data": 2, "fsdp": "auto", "tensor": 2}, 16, (2, 4, 2)),
        ({"data": 1, "fsdp": 1, "tensor": "auto"}, 6, (1, 1, 6)),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, (2, 2, 2)),
    ],
)
def test_auto_takes_the_devices_that_the_other_axes_leave(mesh, devices, sizes):
    assert tuple(mesh_sizes(Mesh(**mesh), devices).values()) == sizes
    assert does_mesh_fit(Mesh(**mesh), devices)


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"data": 16}, 8, "data 16 x fsdp 1 x tensor 1 is larger than the 8 devices here"),
        ({"data": 2}, 8, "data 2 x fsdp 1 x tensor 1 does not use exactly the 8 devices here"),
        ({"data": 2}, 1, "is larger than the 1 device here"),
        ({"fsdp": 3}, 8, "data auto x fsdp 3 x tensor 1 does not use exactly the 8 devices here"),
        ({"fsdp": 16}, 8, "data auto x fsdp 16 x tensor 1 is larger than the 8 devices here"),
    ],
)
def test_a_mesh_that_does_not_use_exactly_the_devices_is_refused_with_the_numbers(mesh, devices, message):
    with pytest.raises(InvalidError, match=message):
        mesh_sizes(Mesh(**mesh), devices)
    assert not does_mesh_fit(Mesh(**mesh), devices)


class FakeDevice:
    """One of 2 x 4 devices in 2 slices."""

    platform = device_kind = "fake"

    def __init__(self, index: int):
        self.id, self.process_index, self.slice_index = index, index // 4, index // 4


@pytest.mark.parametrize(
    ("sizes", "across"),
    [((2, 4, 1), "data"), ((8, 1, 1), "data"), ((4, 1, 2), "data"), ((1, 8, 1), "fsdp"), ((1, 4, 2), "fsdp")],
)
def test_slices_are_told_apart_by_the_first_axis_that_can(sizes, across):
    grid = make_mesh(dict(zip(AXES, sizes, strict=True)), [FakeDevice(index) for index in range(8)]).devices
    halves = np.split(grid, 2, axis=AXES.index(across))
    assert [{device.slice_index for device in half.flat} for half in halves] == [{0}, {1}]


def test_a_mesh_that_cannot_be_laid_over_slices_is_refused():
    assert over_slices({"data": 2, "fsdp": 6, "tensor": 1}, 4) == [2, 2, 1]
    with pytest.raises(
        InvalidError, match="data 3 x fsdp 2 x tensor 1 cannot be laid over 4 slices; make data a multi"
    ):
        over_slices({"data": 3, "fsdp": 2, "tensor": 1}, 4)


def test_the_mesh_has_every_device_once_and_shards_the_batch_over_data_and_fsdp():
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    assert mesh.axis_names == AXES
    assert set(mesh.devices.flat) == set(jax.devices())
    assert num_batch_shards(mesh) == 4
    assert batch_sharding(mesh).spec == PartitionSpec(None, ("data", "fsdp"), None)
    assert batch_sharding(mesh).shard_shape((3, 8, 16)) == (3, 2, 16)


def test_micro_batches_are_the_divisors_of_a_devices_share():
    assert micro_batch_sizes(96, "auto", 8) == [12, 6, 4, 3, 2, 1]
    assert micro_batch_sizes(96, 4, 8) == [4]
    assert micro_batch_sizes(8, "auto", 8) == [1]


@pytest.mark.parametrize(
    ("examples", "micro", "shards", "message"),
    [
        (100, "auto", 8, r"global_batch_examples=100 does not divide over 8 devices \(data x fsdp\); use 96 or 104"),
        (4, "auto", 8, r"global_batch_examples=4 does not divide over 8 devices \(data x fsdp\); use 8"),
        (96, 5, 8, r"micro_batch_examples=5 does not divide the 12 examples of a device .* \[12, 6, 4, 3, 2, 1\]"),
        (96, 24, 8, r"micro_batch_examples=24 does not divide the 12 examples"),
    ],
)
def test_a_batch_that_leaves_a_rest_is_refused_with_numbers_that_work(examples, micro, shards, message):
    with pytest.raises(InvalidError, match=message):
        micro_batch_sizes(examples, micro, shards)


def test_a_faked_device_has_its_share_of_the_machines_memory():
    assert 2**20 < device_memory_bytes() < 2**50
