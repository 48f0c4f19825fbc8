"""The first save of a run, read back before it is committed: what was written is there, can be read, and has the bits.

Cheap: the main host alone reads, and only what its first device holds of each leaf, block by block into its own memory.
"""

from dataclasses import dataclass

import jax
import numpy as np

from runner.checkpoint.fingerprint import LeafLayout, block_digest
from runner.checkpoint.leaves import Leaves
from runner.checkpoint.manifest import Manifest
from runner.checkpoint.reader import BlockReader
from runner.storage import Store


@dataclass(frozen=True)
class ReadBack:
    """What is compared: the leaves as they are stored (shape, dtype, sharding), and how the state lies on devices."""

    leaves: Leaves
    layout: LeafLayout

    def check(self, store: Store, directory: str, manifest: Manifest, digests: list[jax.Array]) -> None:
        """Raise `ValueError` or `OSError` naming the leaf that does not come back. Main host only."""
        device = jax.local_devices()[0]
        blocks = BlockReader(store, directory, manifest)
        expected = self.layout.digests_on(device, digests)
        for name, leaf in self.leaves.items():
            index = leaf.sharding.addressable_devices_indices_map(leaf.shape).get(device)
            if index is None:
                continue
            block = blocks.read(name, leaf, index)
            start = [part.indices(size)[0] for part, size in zip(index, leaf.shape, strict=True)]
            if block.dtype != leaf.dtype or not np.array_equal(block_digest(block, leaf.shape, start), expected[name]):
                raise ValueError(f"what was read back of {name} is not what was saved")
