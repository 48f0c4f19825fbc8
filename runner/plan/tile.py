"""Shards that are smaller than the tiles in which a TPU holds an array: known from shapes and shardings alone.

A tile has 128 columns and 8 rows of 32 bits, 16 of 16 bits ("TPU tiled layouts", openxla/xla, docs/tiled_layout.md),
and the compiler chooses which axis of a matrix lies along which. So a cut axis of less than a tile's rows is below it
either way. Such a shard is gathered and reduced as if it were whole: by all-reduce.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from runner.train.mesh import STATE_AXES, axes_in

_TILE_BYTES = 32  # of one column of a tile
_LEAST_SHARE = 0.01  # of all parameters; what is less is not worth a word


@dataclass(frozen=True)
class SmallShard:
    """A parameter that a mesh cuts below the tile."""

    name: str
    shape: tuple[int, ...]
    axis: int
    rows: int  # of a shard along that axis
    tile_rows: int

    @property
    def size(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


def small_shards(parameters: Mapping[str, Any], itemsize: int) -> list[SmallShard]:
    """Those of abstract parameters with shardings that are below the tile of their type when sent, largest first.

    Only the last two axes lie in tiles. None if all of them together are next to nothing.
    """
    tile_rows = _TILE_BYTES // itemsize
    found = []
    for name, leaf in parameters.items():
        shard = leaf.sharding.shard_shape(leaf.shape)
        for axis in range(max(leaf.ndim - 2, 0), leaf.ndim):
            if _is_cut_over_state(leaf.sharding.spec, axis) and shard[axis] < min(tile_rows, leaf.shape[axis]):
                found.append(SmallShard(name, leaf.shape, axis, shard[axis], tile_rows))
                break
    total = sum(math.prod(leaf.shape) for leaf in parameters.values())
    if sum(shard.size for shard in found) < _LEAST_SHARE * total:
        return []
    return sorted(found, key=lambda shard: -shard.size)


def share_of(shards: Iterable[SmallShard], parameters: Mapping[str, Any]) -> float:
    """The share of all parameters that they hold."""
    return sum(shard.size for shard in shards) / sum(math.prod(leaf.shape) for leaf in parameters.values())


def _is_cut_over_state(spec: Any, axis: int) -> bool:
    axes = spec[axis] if axis < len(spec) else None
    return bool({*axes_in(axes)} & {*STATE_AXES})
