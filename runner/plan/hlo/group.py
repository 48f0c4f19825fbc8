"""Among whom: the replica groups of a collective as device ids, and the mesh axes that they span."""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping

import numpy as np

from runner.plan.hlo.program import Found

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([^()]*\))?)\))?(?: \{([^}]*)\})?")
_MESH_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


def span(found: Found, num_partitions: int, mesh_shape: Mapping[str, int]) -> tuple[tuple[str, ...], int]:
    """The mesh axes that the groups of a collective span, and the size of a group."""
    num_devices = math.prod(mesh_shape.values())
    rest = found.instruction.rest
    num_partitions = num_partitions if 0 < num_partitions < num_devices else num_devices
    if found.is_between_slices:
        groups = _slices(found.groups) * num_partitions
    elif found.kind == "collective-permute":
        groups = _ids(found.groups).reshape(-1, 2)
    else:
        # With a channel and without global ids the groups are of replicas, and all partitions of one take part.
        is_of_replicas = "channel_id=" in rest and "use_global_device_ids=" not in rest
        takes_all = (found.groups == "replica_groups={{0}}" and is_of_replicas) or found.groups == "replica_groups={}"
        groups = np.arange(num_partitions)[None] if takes_all or not found.groups else _groups(found.groups)
    if groups.size and groups.max() >= num_devices:
        raise ValueError(
            f"{found.kind} {found.instruction.name} names device {groups.max()}, and a mesh of "
            f"{dict(mesh_shape)} has {num_devices}"
        )
    coordinates = np.unravel_index(groups, tuple(mesh_shape.values()))
    axes = tuple(axis for axis, along in zip(mesh_shape, coordinates, strict=True) if (along != along[:, :1]).any())
    if found.kind == "collective-permute" and not found.is_between_slices:
        return axes, math.prod(mesh_shape[axis] for axis in axes)
    return axes, groups.shape[1]


@functools.lru_cache(maxsize=256)
def _groups(text: str) -> np.ndarray:
    """Device ids (groups, devices of a group); a shorter group repeats its first."""
    text = text.removeprefix("replica_groups=")
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh[1], mesh[2], mesh[3] or "")
    if text.startswith("["):
        return _iota(text)
    groups = [_ids(group) for group in re.findall(r"\{([\d, ]*)\}", text)]
    size = max(len(group) for group in groups)
    return np.stack([np.concatenate([group, np.full(size - len(group), group[0])]) for group in groups])


def _slices(text: str) -> np.ndarray:
    """Slice numbers (groups, slices of a group), from `{1,2}` or from devices, `{{100000,200000},{100001,200001}}`."""
    ids = _groups(text)
    return np.unique(ids // 100000 if text.startswith("{{") else ids, axis=0) - 1


@functools.lru_cache(maxsize=256)
def _ids(text: str) -> np.ndarray:
    """All numbers in a text; `3:5` is 3, 4, 5."""
    ranges = re.findall(r"(\d+)(?::(\d+))?", text)
    if not any(last for _, last in ranges):
        return np.array([int(first) for first, _ in ranges], np.int64)
    return np.concatenate([np.arange(int(first), int(last or first) + 1) for first, last in ranges])


def _iota(text: str) -> np.ndarray:
    """`[2,4]<=[4,2]T(1,0)`: 0 ... 7 as (4, 2), transposed, as (2, 4). A mesh leaves its own shape out."""
    match = _IOTA.match(text)
    assert match is not None, text
    first, second, order = (tuple(_ids(part)) if part else () for part in match.groups())
    ids = np.arange(math.prod(first)).reshape(second or first)
    return (ids.transpose(order) if order else ids).reshape(first if second else -1)


def _mesh_groups(sizes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """`mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`: groups along a and along a part of b.

    A part `(before)size` of an axis is the middle one when the axis is split into before x size x rest.
    """
    whole = {match[1]: int(match[2]) for match in _MESH_AXIS.finditer(sizes)}
    cuts: dict[str, set[int]] = {axis: {1, size} for axis, size in whole.items()}
    chosen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for match in _MESH_AXIS.finditer(grouped):
        before = int(match[3] or 1)
        after = before * int(match[4]) if match[4] else whole[match[1]]
        cuts[match[1]] |= {before, after}
        chosen[match[1]].append((before, after))
    dims, inside = [], []
    for axis in whole:
        bounds = sorted(cuts[axis]) if whole[axis] > 1 else [1, 1]
        for before, after in itertools.pairwise(bounds):
            inside.append(any(first <= before and after <= last for first, last in chosen[axis]))
            dims.append(after // before)
    ids = np.arange(math.prod(dims))
    if device_ids:
        ids = _iota(device_ids).reshape(-1) if device_ids.startswith("[") else _ids(device_ids)
    order = [index for index, is_inside in enumerate(inside) if not is_inside]
    order += [index for index, is_inside in enumerate(inside) if is_inside]
    group_size = math.prod(size for size, is_inside in zip(dims, inside, strict=True) if is_inside)
    return ids.reshape(dims).transpose(order).reshape(-1, group_size)
