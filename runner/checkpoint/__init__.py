"""Checkpoints that can be trusted: saved in one instant, restored only if every bit is right.

- `shard` arrays as pieces, written by each process and read by any
- `array` how arrays reach a directory: through orbax, or piece by piece
- `fast` the tier on a host's own disk
- `commit` saving, and the protocol that makes it one instant
- `retention` which steps may go, and how
- `restore` the newest state that every host can have
- `opening` from what a spec says to the parts above
"""

from runner.checkpoint.array import OrbaxWriter, PieceWriter
from runner.checkpoint.commit import Place, Saver, raise_unless_committed
from runner.checkpoint.fast import FastTier
from runner.checkpoint.opening import Checkpoints, open_checkpoints
from runner.checkpoint.restore import Restorer
from runner.checkpoint.retention import Retention, delete, superfluous

__all__ = [
    "Checkpoints",
    "FastTier",
    "OrbaxWriter",
    "PieceWriter",
    "Place",
    "Restorer",
    "Retention",
    "Saver",
    "delete",
    "open_checkpoints",
    "raise_unless_committed",
    "superfluous",
]
