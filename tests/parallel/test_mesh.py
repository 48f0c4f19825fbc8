"""Meshes of a spec's topology, and the arithmetic of batches on them."""

import jax
import numpy as np
import pytest

from runner.errors import InvalidError
from runner.parallel.mesh import (
    AXES,
    LOGICAL_AXIS_RULES,
    build_logical_axis_rules,
    count_batch_shards,
    format_batch_axes,
    is_mesh_possible,
    list_micro_batch_sizes,
    make_batch_sharding,
    make_mesh,
    read_device_memory_bytes,
    resolve_mesh_sizes,
    split_axes_over_slices,
    validate_sequence_sharding,
)
from runner.spec import MeshConfig


@pytest.mark.parametrize(
    ("mesh", "devices", "sizes"),
    [
        ({}, 8, {"data": 8}),
        ({}, 1, {}),
        ({"fsdp": 4, "tensor": 2}, 8, {"fsdp": 4, "tensor": 2}),
        ({"data": 2, "fsdp": "auto", "tensor": 2}, 16, {"data": 2, "fsdp": 4, "tensor": 2}),
        ({"data": 1, "fsdp": 1, "tensor": "auto"}, 6, {"tensor": 6}),
        ({"data": 2, "fsdp": 2, "tensor": 2}, 8, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 1, "sequence": "auto", "expert": 2}, 8, {"sequence": 4, "expert": 2}),
        ({"data": 2, "expert": "auto"}, 8, {"data": 2, "expert": 4}),
    ],
)
def test_auto_takes_the_remaining_devices(mesh, devices, sizes):
    assert resolve_mesh_sizes(MeshConfig(**mesh), devices) == dict.fromkeys(AXES, 1) | sizes
    assert is_mesh_possible(MeshConfig(**mesh), devices)


@pytest.mark.parametrize(
    ("mesh", "devices", "message"),
    [
        ({"data": 16}, 8, "data 16 x fsdp 1 x tensor 1 is larger than the 8 devices here"),
        ({"data": 2}, 8, "data 2 x fsdp 1 x tensor 1 does not use exactly the 8 devices here"),
        ({"data": 2}, 1, "is larger than the 1 device here"),
        ({"fsdp": 3}, 8, "data auto x fsdp 3 x tensor 1 does not fit the 8 devices here"),
        ({"fsdp": 16}, 8, "data auto x fsdp 16 x tensor 1 does not fit the 8 devices here"),
        ({"sequence": 3}, 8, "data auto x fsdp 1 x sequence 3 x tensor 1 does not fit the 8 devices here"),
        ({"data": 1, "expert": 4}, 8, "data 1 x fsdp 1 x expert 4 x tensor 1 does not use exactly the 8 devices here"),
    ],
)
def test_a_mesh_must_use_exactly_the_devices(mesh, devices, message):
    with pytest.raises(InvalidError, match=message):
        resolve_mesh_sizes(MeshConfig(**mesh), devices)
    assert not is_mesh_possible(MeshConfig(**mesh), devices)


class FakeDevice:
    """One of 2 x 4 devices in 2 slices."""

    platform = device_kind = "fake"

    def __init__(self, index: int):
        self.id, self.process_index, self.slice_index = index, index // 4, index // 4


@pytest.mark.parametrize(
    ("sizes", "across"),
    [
        ({"data": 2, "fsdp": 4}, "data"),
        ({"data": 8}, "data"),
        ({"data": 4, "tensor": 2}, "data"),
        ({"fsdp": 8}, "fsdp"),
        ({"fsdp": 4, "tensor": 2}, "fsdp"),
        ({"sequence": 4, "expert": 2}, "sequence"),
        ({"data": 2, "sequence": 2, "tensor": 2}, "data"),
    ],
)
def test_slices_are_separated_along_the_first_possible_axes(sizes, across):
    grid = make_mesh(sizes, [FakeDevice(index) for index in range(8)]).devices
    halves = np.split(grid, 2, axis=AXES.index(across))
    assert [{device.slice_index for device in half.flat} for half in halves] == [{0}, {1}]


def test_a_mesh_that_does_not_divide_over_slices_is_rejected():
    assert split_axes_over_slices({"data": 2, "fsdp": 6, "tensor": 1}, 4) == [2, 2, 1, 1, 1]
    with pytest.raises(
        InvalidError, match="data 3 x fsdp 2 x tensor 1 cannot be laid over 4 slices; make data a multi"
    ):
        split_axes_over_slices({"data": 3, "fsdp": 2, "tensor": 1}, 4)


@pytest.mark.parametrize(
    ("sizes", "examples", "shard"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, "data x fsdp", (3, 2, 16)),
        ({"data": 2, "sequence": 4}, "data x fsdp", (3, 4, 4)),
        ({"fsdp": 2, "expert": 2, "sequence": 2}, "data x fsdp x expert", (3, 2, 8)),
    ],
)
def test_a_mesh_shards_the_batch_by_examples_and_positions(sizes, examples, shard):
    mesh = make_mesh(sizes)
    assert mesh.axis_names == AXES
    assert set(mesh.devices.flat) == set(jax.devices())
    assert count_batch_shards(mesh) == 8 // shard[1]
    assert format_batch_axes(mesh) == examples
    assert make_batch_sharding(mesh).shard_shape((3, 8, 16)) == shard


def test_tensor_and_expert_axes_use_the_nearest_devices():
    grid = make_mesh({"data": 2, "expert": 2, "tensor": 2}).devices.reshape(2, 2, 2)
    assert [[device.id for device in row] for row in grid[0]] == [[0, 1], [2, 3]]


ROWS = [
    (4, 10, None, "sequence_length=10 does not divide into two halves .*=4 devices; use 8 or 16, or a .* axis of 1"),
    (4, 12, None, "sequence_length=12 does not divide into two halves .*=4 devices; use 8 or 16, or a .* axis of 2"),
    (4, 2, None, "sequence_length=2 does not divide into two halves .* devices; use 8, or a sequence axis of 1"),
    (2, 16, 6, "loss_chunk_positions=6 does not divide the 8 positions .* use 2"),
]


@pytest.mark.parametrize(("devices", "length", "chunk", "message"), ROWS)
def test_sequences_that_do_not_divide_are_rejected_with_valid_numbers(devices, length, chunk, message):
    with pytest.raises(InvalidError, match=message):
        validate_sequence_sharding(make_mesh({"sequence": devices, "data": 8 // devices}), length, chunk)


def test_sharding_rules_of_the_job_precede_those_of_the_runner():
    own = (("channels", ("fsdp", "tensor")), ("mlp", None))
    assert build_logical_axis_rules(own, "Job") == (*own, *LOGICAL_AXIS_RULES)
    with pytest.raises(InvalidError, match=r"Job.logical_axis_rules: 'channels' names the mesh axis 'tensr'; .*tensor"):
        build_logical_axis_rules([("channels", "tensr")], "Job")


def test_micro_batches_divide_the_examples_of_a_device():
    assert list_micro_batch_sizes(96, "auto", 8) == [12, 6, 4, 3, 2, 1]
    assert list_micro_batch_sizes(96, 4, 8) == [4]
    assert list_micro_batch_sizes(8, "auto", 8) == [1]


@pytest.mark.parametrize(
    ("examples", "micro", "shards", "message"),
    [
        (100, "auto", 8, r"global_batch_examples=100 does not divide over 8 devices \(data x fsdp\); use 96 or 104"),
        (4, "auto", 8, r"global_batch_examples=4 does not divide over 8 devices \(data x fsdp\); use 8"),
        (96, 5, 8, r"micro_batch_examples=5 does not divide the 12 examples of a device .* \[12, 6, 4, 3, 2, 1\]"),
        (96, 24, 8, r"micro_batch_examples=24 does not divide the 12 examples"),
    ],
)
def test_a_batch_that_does_not_divide_is_rejected_with_valid_numbers(examples, micro, shards, message):
    with pytest.raises(InvalidError, match=message):
        list_micro_batch_sizes(examples, micro, shards)


def test_a_simulated_device_has_a_share_of_the_memory():
    assert 2**20 < read_device_memory_bytes() < 2**50
