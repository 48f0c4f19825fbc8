"""Collectives of a module: kind, mesh axes that their replica groups span, bytes, and run counts."""

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Mapping
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
from runner.plan.forecast.module import parse_sources

# `[2,4]<=[4,2]T(1,0)`
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
# `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^()]*(?:\([^()]*\))?)\))?(?: \{([^}]*)\})?")
_MESH_AXIS = re.compile(r"'([^']+)'(?:=(\d+)|:\((\d+)\)(\d+))?")

# The multislice runtime numbers devices from this multiple of their slice's number, and slices from one.
_DEVICES_PER_SLICE_NUMBER = 100000


@dataclass(frozen=True)
class Collective:
    """Collective of a module, and how often one run of the module runs it.

    `bytes` is the larger of one device's input and output: the gathered array of an all-gather, the whole input of a
    reduce-scatter, the array of an all-reduce, a device's own array for the other kinds. It is the sum over all arrays
    where several are combined, without the padding of tiles. A `ragged-all-to-all` counts its whole buffer.
    """

    kind: str  # one of `hlo.COLLECTIVE_KINDS`
    # Mesh axes along which the devices of a group differ, in mesh order. A group may span a part of an axis.
    axes: tuple[str, ...]
    group_size: int  # devices of the largest group; for a collective-permute, all devices along `axes`
    bytes: int
    count: int  # runs in one run of the module
    op_name: str  # traced operation that it comes from, "" if the compiler dropped it
    is_at_least: bool = False  # `count` is a lower bound, since a loop around the collective has an unknown trip count
    is_between_slices: bool = False  # it uses the hosts' network, not the chips' interconnect
    shapes: tuple[tuple[int, ...], ...] = field(default=(), compare=False)  # sizes of one device's results
    source: str = field(default="", compare=False)  # `file:line` that it comes from, "" if the compiler dropped it

    @property
    def rounds(self) -> int:
        """Number of times that a ring passes the payload on: 2 for an all-reduce (reduce-scatter and all-gather)."""
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
    """Return all collectives of optimised HLO, in order, for a mesh of axis -> size, which must have their devices."""
    return [collective for _, collective in locate_collectives(text, mesh_shape)]


def locate_collectives(text: str, mesh_shape: Mapping[str, int]) -> list[tuple[RawCollective, Collective]]:
    """Return all collectives as `find_collectives` does, each with its place in the text."""
    program, sources = parse_program(text), parse_sources(text)
    counts = count_runs(program)
    op_names = {call.callee: call.op_name for call in program.calls}
    fused = {call.callee for call in program.calls if call.opcode == "fusion"}
    # An asynchronous collective is several ops; the one that starts it counts, or the first if none is marked.
    leaders: dict[tuple[str, ...], str] = {}
    for raw in program.collectives:
        if raw.chain and (raw.chain not in leaders or raw.instruction.name in program.started):
            leaders[raw.chain] = raw.instruction.name
    located: list[tuple[RawCollective, Collective]] = []
    for raw in program.collectives:
        computation, name, rest = raw.instruction.computation, raw.instruction.name, raw.instruction.rest
        # A collective in dead code never runs.
        count, is_at_least = counts[computation]
        if not count or leaders.get(raw.chain, name) != name:
            continue
        axes, group_size = _find_axes_and_group_size(raw, program.num_partitions, mesh_shape)
        kind, num_bytes = raw.kind, raw.bytes
        if computation in fused and kind == "all-reduce" and program.slices.get(name, 0) * group_size == num_bytes:
            kind = "reduce-scatter"
        elif kind == "reduce-scatter" or (kind == "all-gather" and raw.is_between_slices):
            # The text states the size of one device's part.
            num_bytes *= group_size
        collective = Collective(
            kind,
            axes,
            group_size,
            num_bytes,
            count,
            op_name=parse_op_name(rest) or op_names.get(computation, ""),
            is_at_least=is_at_least,
            is_between_slices=raw.is_between_slices,
            shapes=parse_shape_sizes(get_output_shape(raw.instruction)),
            source=sources.get_line(rest),
        )
        located.append((raw, collective))
    return located


def _find_axes_and_group_size(
    raw: RawCollective, num_partitions: int, mesh_shape: Mapping[str, int]
) -> tuple[tuple[str, ...], int]:
    num_devices = math.prod(mesh_shape.values())
    rest = raw.instruction.rest
    num_partitions = num_partitions if 0 < num_partitions < num_devices else num_devices
    if raw.is_between_slices:
        # Slices are the outermost split of the mesh, so the first device of slice i is i * num_partitions.
        ids = _parse_groups(raw.groups)
        slices = ids // _DEVICES_PER_SLICE_NUMBER if raw.groups.startswith("{{") else ids
        groups = (np.unique(slices, axis=0) - 1) * num_partitions
    elif raw.kind == "collective-permute":
        groups = _parse_ids(raw.groups).reshape(-1, 2)
    else:
        # With a channel but without global ids the groups are of replicas, and all partitions of one take part.
        is_of_replicas = "channel_id=" in rest and "use_global_device_ids=" not in rest
        takes_all = (raw.groups == "replica_groups={{0}}" and is_of_replicas) or raw.groups == "replica_groups={}"
        groups = np.arange(num_partitions)[None] if takes_all or not raw.groups else _parse_groups(raw.groups)
    if groups.size and groups.max() >= num_devices:
        raise ValueError(
            f"{raw.kind} {raw.instruction.name}: the program names device {groups.max()}, but the mesh "
            f"{dict(mesh_shape)} has {num_devices} devices; pass the mesh that it was compiled for"
        )
    # An axis is spanned if its coordinate differs within some group.
    coordinates = np.unravel_index(groups, tuple(mesh_shape.values()))
    axes = tuple(axis for axis, along in zip(mesh_shape, coordinates, strict=True) if (along != along[:, :1]).any())
    if raw.kind == "collective-permute" and not raw.is_between_slices:
        return axes, math.prod(mesh_shape[axis] for axis in axes)
    return axes, groups.shape[1]


@functools.lru_cache(maxsize=256)
def _parse_groups(text: str) -> np.ndarray:
    """Return device ids of shape (groups, devices per group). A shorter group repeats its first device."""
    text = text.removeprefix("replica_groups=")
    if mesh := _MESH.match(text):
        return _parse_mesh_groups(mesh[1], mesh[2], mesh[3] or "")
    if text.startswith("["):
        return _parse_iota(text)
    groups = [_parse_ids(group) for group in re.findall(r"\{([\d, ]*)\}", text)]
    size = max(len(group) for group in groups)
    return np.stack([np.concatenate([group, np.full(size - len(group), group[0])]) for group in groups])


@functools.lru_cache(maxsize=256)
def _parse_ids(text: str) -> np.ndarray:
    """Return all numbers in a text. `3:5` is 3, 4, 5."""
    ranges = re.findall(r"(\d+)(?::(\d+))?", text)
    if not any(last for _, last in ranges):
        return np.array([int(first) for first, _ in ranges], np.int64)
    return np.concatenate([np.arange(int(first), int(last or first) + 1) for first, last in ranges])


def _parse_iota(text: str) -> np.ndarray:
    """Return the ids of an iota: `[2,4]<=[4,2]T(1,0)` is 0 ... 7 as (4, 2), transposed, reshaped to (2, 4).

    The iota of a mesh does not state the final shape.
    """
    match = _IOTA.match(text)
    assert match is not None, text
    first, second, order = (tuple(_parse_ids(part)) if part else () for part in match.groups())
    ids = np.arange(math.prod(first)).reshape(second or first)
    return (ids.transpose(order) if order else ids).reshape(first if second else -1)


def _parse_mesh_groups(sizes: str, device_ids: str | None, grouped: str) -> np.ndarray:
    """Return the groups of the mesh form: `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`.

    The braces list the axes along which the devices of a group differ: here all of a, and a part of b. A part
    `(before)size` of an axis is the middle one when the axis is split into before x size x rest.
    """
    whole = {match[1]: int(match[2]) for match in _MESH_AXIS.finditer(sizes)}
    cuts: dict[str, set[int]] = {axis: {1, size} for axis, size in whole.items()}
    chosen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for match in _MESH_AXIS.finditer(grouped):
        before = int(match[3] or 1)
        after = before * int(match[4]) if match[4] else whole[match[1]]
        cuts[match[1]] |= {before, after}
        chosen[match[1]].append((before, after))
    # Split each axis at its cuts into sub-axes, and note which of them lie inside a group.
    dims, inside = [], []
    for axis in whole:
        bounds = sorted(cuts[axis]) if whole[axis] > 1 else [1, 1]
        for before, after in itertools.pairwise(bounds):
            inside.append(any(first <= before and after <= last for first, last in chosen[axis]))
            dims.append(after // before)
    ids = np.arange(math.prod(dims))
    if device_ids:
        ids = _parse_iota(device_ids).reshape(-1) if device_ids.startswith("[") else _parse_ids(device_ids)
    order = [index for index, is_inside in enumerate(inside) if not is_inside]
    order += [index for index, is_inside in enumerate(inside) if is_inside]
    group_size = math.prod(size for size, is_inside in zip(dims, inside, strict=True) if is_inside)
    return ids.reshape(dims).transpose(order).reshape(-1, group_size)
