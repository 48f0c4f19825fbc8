"""What the devices of a mesh send each other in a step, by axis: the formulas that a plan predicts by.

Each collective has a payload, the whole array of a group of devices, and a factor: how often a ring passes it on (1 a
gather or a scatter, 2 an all-reduce). A device sends `factor x payload x (n - 1) / n` along an axis of n.

- `data`: the gradients of a device's parameters in float32, reduced once a step, unless they do not wait for its end
  (see `runner.train.data_sum`); all else goes in each micro-batch.
- `fsdp`, `sequence` and `expert` together: parameters, gathered in every pass, and their gradients, scattered once; of
  experts' own matrices, which `expert` has cut already, over the other two.
- `sequence`: keys and values, in a ring or gathered, which is the same number of bytes.
- `expert`: tokens, to their experts and back. All of them go, by all-to-all, but those for experts that are here.
- `tensor`: the residual stream, gathered before what is cut and scattered behind it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from runner.plan.estimate import split_over_domains
from runner.train.mesh import BATCH_AXES, STATE_AXES
from runner.train.sizing import Sizing

_REDUCED_ITEMSIZE = 4  # of gradients over `data`, which are float32


@dataclass(frozen=True)
class Flow:
    """One kind of collective of a step."""

    axes: tuple[str, ...]
    factor: float
    payload: float


@dataclass(frozen=True)
class Weights:
    """The parameters in the type in which they are sent, as far as `tensor` does not cut them: bytes.

    Attributes:
        itemsize: bytes of a parameter in that type.
        whole_share: of them, what the compiler gathers and reduces by all-reduce, since their shards are too small.
    """

    shared: float
    of_experts: float
    whole_share: float = 0.0
    itemsize: int = 4


def flows(
    sizes: Mapping[str, int],
    weights: Weights,
    sizing: Sizing,
    tokens: float,
    passes: int,
    accumulate_steps: int = 1,
    *,
    waits: bool = True,
) -> list[Flow]:
    """The collectives of a step.

    Args:
        tokens: of a device in a step: its examples, times its part of a row.
        passes: over the parameters in a micro-batch: forward, backward, and what is computed again.
        waits: whether gradients are reduced over `data` once a step.
    """
    cut = math.prod(sizes[axis] for axis in STATE_AXES)
    rounds = accumulate_steps * (passes + 1) * (1 + weights.whole_share)
    rounds_of_data = _REDUCED_ITEMSIZE / weights.itemsize if waits else accumulate_steps
    reduced = (weights.shared + weights.of_experts) / cut * rounds_of_data
    of_own_experts = weights.of_experts / sizes["expert"]
    beside_experts = tuple(axis for axis in STATE_AXES if axis != "expert")
    return [
        Flow(("data",), 2, reduced),
        Flow(STATE_AXES, rounds, weights.shared),
        Flow(beside_experts, rounds, of_own_experts),
        Flow(("sequence",), 1, tokens * sizes["sequence"] * sizing.sequence_bytes_per_token),
        Flow(("expert",), 1, tokens * sizing.expert_bytes_per_token),
        Flow(("tensor",), 2, tokens * sizing.tensor_bytes_per_token),
    ]


def flows_in_order(parameters: float, itemsize: int, num_subtrees: int) -> list[Flow]:
    """The collectives of a step whose sums have a fixed order, see `runner.train.fixed_order`.

    Parameters are gathered once over `fsdp`, in the type in which they are stored; of every device its subtrees go to
    all others by shares, and of the whole sum each has the others' shares gathered.
    """
    gradient = parameters * _REDUCED_ITEMSIZE
    return [
        Flow(("fsdp",), 1, parameters * itemsize),
        Flow(BATCH_AXES, num_subtrees, gradient),
        Flow(BATCH_AXES, 1, gradient),
    ]


def sent(found: list[Flow], sizes: Mapping[str, int], over_domains: Mapping[str, int]) -> tuple[float, float]:
    """Bytes that a device sends in a step inside its slice or GPU node, and out of it."""
    interconnect = network = 0.0
    for flow in found:
        inside, across = split_over_domains(sizes, over_domains, flow.axes, flow.factor, flow.payload)
        interconnect += inside
        network += across
    return interconnect, network
