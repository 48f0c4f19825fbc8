"""Many leaves, few programs.

A program over many leaves takes longer to compile, for each leaf, than one over few. So what is done to every leaf of a
state is done chunk by chunk, and chunks that are alike are compiled once.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

CHUNK_LEAVES = 64


def chunks(leaves: Sequence[Any]) -> list[list[int]]:
    """The places of all leaves, at most `CHUNK_LEAVES` together.

    Leaves of one shape, dtype and sharding fill chunks of their own; what is left over of each kind stands together.
    """
    kinds: dict[Any, list[int]] = defaultdict(list)
    for place, leaf in enumerate(leaves):
        kinds[leaf.shape, leaf.dtype, leaf.sharding].append(place)
    found, rest = [], []
    for places in kinds.values():
        num_whole = len(places) - len(places) % CHUNK_LEAVES
        found += _cut(places[:num_whole])
        rest += places[num_whole:]
    return found + _cut(rest)


def _cut(places: list[int]) -> list[list[int]]:
    return [places[begin : begin + CHUNK_LEAVES] for begin in range(0, len(places), CHUNK_LEAVES)]
