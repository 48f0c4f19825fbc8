"""A counter whose state goes bad on one device, for tests of what is found and said."""

import jax
import numpy as np

from experiments.counter import Counter

BAD_STEP = 25


class CorruptCounter(Counter):
    """At one step of the first attempt one device's copy of `values` has another bit than the others'."""

    def save_or_stop(self) -> None:
        """As ever, with the bit flipped before."""
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
