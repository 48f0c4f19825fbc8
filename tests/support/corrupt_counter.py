"""Counter whose replicated state is corrupted on one device, for tests of the detection of corruption."""

import jax
import numpy as np

from experiments.counter import Counter

BAD_STEP = 25


class CorruptCounter(Counter):
    """Counter that flips a bit of one device's copy of `values` at one step of the first attempt."""

    def save_or_stop(self) -> None:
        """Flip the bit at `BAD_STEP`, then save as usual."""
        if self.step == BAD_STEP and self.attempt.number == 1:
            leaf = self.state["values"]
            copies = []
            for number, shard in enumerate(leaf.addressable_shards):
                copy = np.array(shard.data)
                copy[7] ^= np.uint32(1 << 5) if number == 1 else np.uint32(0)
                copies.append(jax.device_put(copy, shard.device))
            bad = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, copies)
            self.state = self.state | {"values": bad}
        super().save_or_stop()
