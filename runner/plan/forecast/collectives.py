"""Among whom: the replica groups of a collective as device ids, and the mesh axes that they span.

The collectives of a module: kind, mesh axes, bytes, how often.
"""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from runner.plan.forecast.hlo import (
    RawCollective,
    count_runs,
    get_output_shape,
    parse_op_name,
    parse_program,
    parse_shape_sizes,
)
from runner.plan.forecast.sources import parse_sources

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([^()]*\))?)\))?(?: \{([^}]*)\})?")
_MESH_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")


def find_group_axes(
    found: RawCollective, num_partitions: int, mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
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


@dataclass(frozen=True)
class Collective:
    """One collective of a module, and how often a run of the module runs it.

    `bytes` is the larger of what one device puts in and what it gets out: the gathered array of an all-gather, the
    whole input of a reduce-scatter, the array of an all-reduce, a device's own array for the others; the sum over all
    arrays where several are combined, without the padding of tiles. A `ragged-all-to-all` counts its whole buffer.
    """

    kind: str
    axes: tuple[str, ...]  # along which the devices of a group differ, in mesh order; not always all along an axis
    group_size: int  # devices of the largest group; of a collective-permute all devices along `axes`
    bytes: int
    count: int
    op_name: str  # the traced operation that it comes from, if the compiler kept it
    is_at_least: bool = False  # `count` is a lower bound: a loop around it has a number of trips that is not known
    is_between_slices: bool = False  # over the network of hosts, not the interconnect of chips
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)  # of what one device gets out
    source: str = field(default="", compare=False)  # file:line that it comes from, if the compiler kept it

    @property
    def rounds(self) -> int:
        """How often a ring passes the payload on: an all-reduce is a reduce-scatter and an all-gather."""
        return 2 if self.kind == "all-reduce" else 1

    @property
    def sent_bytes_per_device(self) -> int:
        """Bytes that one device sends in one of the `count` runs, on a bandwidth-optimal ring."""
        if self.group_size == 1:
            return 0
        if self.kind == "collective-permute":
            return self.bytes
        return self.rounds * self.bytes * (self.group_size - 1) // self.group_size


def find_collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """All collectives of a module, in the order of the text; `mesh_shape` is axis -> size, in mesh order.

    Raises `ValueError` if a group names devices that the mesh does not have.
    """
    return [collective for _, collective in locate_collectives(text, mesh_shape)]


def locate_collectives(text: str, mesh_shape: Mapping[str, int]) -> list[tuple[RawCollective, Collective]]:
    """`find_collectives`, each with the place in the text that it was read from."""
    program, sources = parse_program(text), parse_sources(text)
    counts = count_runs(program)
    op_names = {call.callee: call.op_name for call in program.calls}
    fused = {call.callee for call in program.calls if call.opcode == "fusion"}
    leaders: dict[tuple[str, ...], str] = {}
    for found in program.found:
        if found.chain and (found.chain not in leaders or found.instruction.name in program.started):
            leaders[found.chain] = found.instruction.name
    result: list[Collective] = []
    places: list[RawCollective] = []
    for found in program.found:
        computation, name = found.instruction.computation, found.instruction.name
        count, is_at_least = counts[computation]
        if not count or leaders.get(found.chain, name) != name:
            continue
        axes, size = find_group_axes(found, program.num_partitions, mesh_shape)
        kind, bytes_ = found.kind, found.bytes
        if computation in fused and kind == "all-reduce" and program.slices.get(name, 0) * size == bytes_:
            kind = "reduce-scatter"
        elif kind == "reduce-scatter" or (kind == "all-gather" and found.is_between_slices):
            bytes_ *= size
        rest = found.instruction.rest
        op_name, source = parse_op_name(rest) or op_names.get(computation, ""), sources.of(rest)
        shapes, between = parse_shape_sizes(get_output_shape(found.instruction)), found.is_between_slices
        places.append(found)
        result.append(Collective(kind, axes, size, bytes_, count, op_name, is_at_least, between, shapes, source))
    return list(zip(places, result, strict=True))


def sum_sent_bytes_by_axes(find_collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes that one device sends in one run of the module, by kind and axes; the largest first."""
    sums: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for collective in find_collectives:
        sums[collective.kind, collective.axes] += collective.count * collective.sent_bytes_per_device
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
