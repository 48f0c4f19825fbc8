"""Sizes, bytes and memories of what instructions make."""

import functools
import math
import re
from dataclasses import dataclass

from runner.plan.hlo.text import ARRAY, array_bytes, sizes_of

_SPACE = re.compile(r"S\((\d+)\)")
_HOST = 5  # XLA's number for the memory of the host


@dataclass(frozen=True)
class Array:
    """One array. `bytes` are those that it takes in memory, in whole tiles; `space` is 0 for main memory."""

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    space: int

    @property
    def elements(self) -> int:
        """How many values it holds."""
        return math.prod(self.dims)

    @property
    def held_bytes(self) -> int:
        """Bytes of the device's main memory that it takes up."""
        return self.bytes if self.space == 0 else 0

    @property
    def main_bytes(self) -> int:
        """Bytes that go through main memory: none for what lies in the chip's fast memory."""
        return self.bytes if self.space in (0, _HOST) else 0


@functools.lru_cache(maxsize=65536)
def arrays_in(shape: str) -> tuple[Array, ...]:
    """The array of a shape, or those of a tuple, in order."""
    found = []
    for match in ARRAY.finditer(shape):
        space = _SPACE.search(match[3] or "")
        found.append(
            Array(match[1], sizes_of(match), array_bytes(match, is_padded=True), int(space[1]) if space else 0)
        )
    return tuple(found)
