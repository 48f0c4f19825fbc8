"""Arithmetic on the chips' peak figures: the least time of a step, and what a save takes. Pure; imports no jax.

A roofline: a step cannot be faster than its matmuls at peak FLOP/s, its memory traffic at HBM bandwidth, or its
collectives at the bandwidth of their network, and it is as fast as the slowest of these if all overlap.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from runner.accelerator import Speeds

# What a host writes to a bucket or a shared disk, and what it copies out of its devices: assumed, not measured.
DURABLE_BYTES_PER_SECOND = 1e9
STALL_BYTES_PER_SECOND = 10e9

# The share of peak that a tuned step is taken to reach where a time is promised rather than bounded.
TYPICAL_SHARE = 0.5


@dataclass(frozen=True)
class Work:
    """What one device does in one step."""

    flops: float
    hbm_bytes: float
    interconnect_bytes: float
    network_bytes: float


@dataclass(frozen=True)
class Roofline:
    """Seconds that each resource needs for a step."""

    compute: float
    memory: float
    interconnect: float
    network: float

    @property
    def step_seconds(self) -> float:
        """The least time of a step: that of the slowest resource."""
        return max(self.compute, self.memory, self.interconnect, self.network)

    @property
    def rank(self) -> tuple[float, float]:
        """The least first: by the time of a step; of equals the one with less of everything else."""
        return self.step_seconds, self.compute + self.memory + self.interconnect + self.network

    @property
    def bound(self) -> str:
        """The slowest resource."""
        times = {
            "compute": self.compute,
            "memory": self.memory,
            "interconnect": self.interconnect,
            "network": self.network,
        }
        return max(times, key=lambda name: times[name])


def roofline(work: Work, speeds: Speeds, devices_per_chip: int) -> Roofline:
    """The times of `work` on one device, which is a part of a chip if that shows several."""
    share = 1 / devices_per_chip
    return Roofline(
        work.flops / (speeds.flops_per_second * share),
        work.hbm_bytes / (speeds.hbm_bytes_per_second * share),
        work.interconnect_bytes / (speeds.interconnect_bytes_per_second * share),
        work.network_bytes / (speeds.network_bytes_per_second * share),
    )


def hbm_traffic(state_bytes: float, parameter_bytes: float, passes: int, accumulate_steps: int) -> float:
    """Bytes that one device moves through its memory in a step, at least.

    The optimizer reads and writes the state once; each of `passes` passes over the model (forward, backward, what is
    computed again) reads the parameters once in every micro-batch. Activations are left out.
    """
    return 2 * state_bytes + accumulate_steps * passes * parameter_bytes


def split_over_domains(
    sizes: Mapping[str, int], over_domains: Mapping[str, int], axes: tuple[str, ...], sent_factor: float, payload: float
) -> tuple[float, float]:
    """Bytes that a device sends inside its domain (a slice, a GPU node) and out of it, for a collective over `axes`.

    Done in two stages, as every good implementation does: inside each domain, and then across on what each device of a
    domain then holds. `sent_factor` is 2 for an all-reduce, 1 for the others; `payload` is the whole array of a group.
    """
    group, across = 1, 1
    for axis in axes:
        group *= sizes[axis]
        across *= over_domains[axis]
    inside = group // across
    return (
        sent_factor * payload * (inside - 1) / inside,
        sent_factor * (payload / inside) * (across - 1) / across,
    )
