"""The collectives of a module: kind, mesh axes, bytes, how often."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from runner.plan.hlo.count import counts_of
from runner.plan.hlo.group import span
from runner.plan.hlo.program import Found, read
from runner.plan.hlo.source import sources_in
from runner.plan.hlo.text import op_name_of, output_of, sizes_in


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


def collectives(text: str, mesh_shape: Mapping[str, int]) -> list[Collective]:
    """All collectives of a module, in the order of the text; `mesh_shape` is axis -> size, in mesh order.

    Raises `ValueError` if a group names devices that the mesh does not have.
    """
    return [collective for _, collective in located_collectives(text, mesh_shape)]


def located_collectives(text: str, mesh_shape: Mapping[str, int]) -> list[tuple[Found, Collective]]:
    """`collectives`, each with the place in the text that it was read from."""
    program, sources = read(text), sources_in(text)
    counts = counts_of(program)
    op_names = {call.callee: call.op_name for call in program.calls}
    fused = {call.callee for call in program.calls if call.opcode == "fusion"}
    leaders: dict[tuple[str, ...], str] = {}
    for found in program.found:
        if found.chain and (found.chain not in leaders or found.instruction.name in program.started):
            leaders[found.chain] = found.instruction.name
    result: list[Collective] = []
    places: list[Found] = []
    for found in program.found:
        computation, name = found.instruction.computation, found.instruction.name
        count, is_at_least = counts[computation]
        if not count or leaders.get(found.chain, name) != name:
            continue
        axes, size = span(found, program.num_partitions, mesh_shape)
        kind, bytes_ = found.kind, found.bytes
        if computation in fused and kind == "all-reduce" and program.slices.get(name, 0) * size == bytes_:
            kind = "reduce-scatter"
        elif kind == "reduce-scatter" or (kind == "all-gather" and found.is_between_slices):
            bytes_ *= size
        rest = found.instruction.rest
        op_name, source = op_name_of(rest) or op_names.get(computation, ""), sources.of(rest)
        shapes, between = sizes_in(output_of(found.instruction)), found.is_between_slices
        places.append(found)
        result.append(Collective(kind, axes, size, bytes_, count, op_name, is_at_least, between, shapes, source))
    return list(zip(places, result, strict=True))


def sent_bytes_by_axes(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes that one device sends in one run of the module, by kind and axes; the largest first."""
    sums: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for collective in collectives:
        sums[collective.kind, collective.axes] += collective.count * collective.sent_bytes_per_device
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
