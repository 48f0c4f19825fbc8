"""Which keys a query may see, as the fused TPU kernel asks for it. Imports the kernel, which is slow."""

from typing import Any

import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

_EMPTY, _PARTLY, _FULL = (np.array([block]) for block in ([False], [True, False], [True]))


class RowMask(splash.Mask):
    """Which keys queries may see that stand at `positions`; keys stand at 0 to `num_keys` - 1.

    The kernel computes masks by itself, from `q_sequence`, and asks this one of each block of T x T only whether it
    sees all of it, some or nothing: so that is all there is in a block of it. Blocks that are written out, as the
    kernel's own masks have them, take half a minute for 131,072 positions.
    """

    def __init__(self, positions: np.ndarray, num_keys: int, window: int | None):
        self.q_sequence, self._num_keys, self._window = positions.astype(np.int32), num_keys, window

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.q_sequence), self._num_keys)

    def mask_function(self, queries: Any, keys: Any) -> Any:
        """Of positions: called by the kernel, too."""
        visible = queries >= keys
        return visible if self._window is None else visible & (queries - keys < self._window)

    def __getitem__(self, index: Any) -> np.ndarray:
        queries, keys = self.q_sequence[index[0]], index[1]  # queries of a block follow each other
        least, most = queries[0] - (keys.stop - 1), queries[-1] - keys.start  # distances
        reach = most + 1 if self._window is None else self._window
        if most < 0 or least >= reach:
            return _EMPTY
        return _FULL if least >= 0 and most < reach else _PARTLY

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RowMask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[bytes, int, int | None]:
        return self.q_sequence.tobytes(), self._num_keys, self._window
