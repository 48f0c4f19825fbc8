"""What arithmetic says of a job on a mesh, before anything is compiled: what it keeps, sends and computes.

What the devices of a mesh send each other in a step, by axis: the formulas that a plan predicts by.

Each collective has a payload, the whole array of a group of devices, and a factor: how often a ring passes it on (1 a
gather or a scatter, 2 an all-reduce). A device sends `factor x payload x (n - 1) / n` along an axis of n.

- `data`: the gradients of a device's parameters in float32, reduced once a step, unless they do not wait for its end
  (see `runner.parallel.reduction`); all else goes in each micro-batch.
- `fsdp`, `sequence` and `expert` together: parameters, gathered in every pass, and their gradients, scattered once; of
  experts' own matrices, which `expert` has cut already, over the other two.
- `sequence`: keys and values, in a ring or gathered, which is the same number of bytes.
- `expert`: tokens, to their experts and back. All of them go, by all-to-all, but those for experts that are here.
- `tensor`: the residual stream, gathered before what is cut and scattered behind it.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from runner.accelerator import Accelerator, PeakRates
from runner.checkpoint.leaves import flatten_with_names
from runner.errors import InvalidError
from runner.parallel import reduction
from runner.parallel.mesh import (
    AXES,
    BATCH_AXES,
    STATE_AXES,
    list_micro_batch_sizes,
    split_axes_over_slices,
    validate_same_bits_mesh,
    validate_sequence_sharding,
)
from runner.plan import program
from runner.plan.mesh import MeshSizes, compute_small_share, find_small_shards, order_sizes
from runner.plan.program import Roofline, StepWork, count_bytes_per_device, count_elements, split_over_domains
from runner.train.flops import Flops, Sizing
from runner.train.setup import TrainSetup, TrainSetupBuilder
from runner.train.state import reshard_abstract_state
from runner.trainer import BaseTrainer

_REDUCED_ITEMSIZE = 4  # of gradients over `data`, which are float32


@dataclass(frozen=True)
class PredictedCollective:
    """One kind of collective of a step."""

    axes: tuple[str, ...]
    factor: float
    payload: float


@dataclass(frozen=True)
class ParameterPayload:
    """The parameters in the type in which they are sent, as far as `tensor` does not cut them: bytes.

    Attributes:
        itemsize: bytes of a parameter in that type.
        whole_share: of them, what the compiler gathers and reduces by all-reduce, since their shards are too small.
    """

    shared: float
    of_experts: float
    whole_share: float = 0.0
    itemsize: int = 4


def predict_collectives(
    sizes: Mapping[str, int],
    weights: ParameterPayload,
    sizing: Sizing,
    tokens: float,
    passes: int,
    accumulate_steps: int = 1,
    *,
    waits: bool = True,
) -> list[PredictedCollective]:
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
        PredictedCollective(("data",), 2, reduced),
        PredictedCollective(STATE_AXES, rounds, weights.shared),
        PredictedCollective(beside_experts, rounds, of_own_experts),
        PredictedCollective(("sequence",), 1, tokens * sizes["sequence"] * sizing.sequence_bytes_per_token),
        PredictedCollective(("expert",), 1, tokens * sizing.expert_bytes_per_token),
        PredictedCollective(("tensor",), 2, tokens * sizing.tensor_bytes_per_token),
    ]


def predict_ordered_collectives(parameters: float, itemsize: int, num_subtrees: int) -> list[PredictedCollective]:
    """The collectives of a step whose sums have a fixed order, see `runner.parallel.reduction`.

    Parameters are gathered once over `fsdp`, in the type in which they are stored; of every device its subtrees go to
    all others by shares, and of the whole sum each has the others' shares gathered.
    """
    gradient = parameters * _REDUCED_ITEMSIZE
    return [
        PredictedCollective(("fsdp",), 1, parameters * itemsize),
        PredictedCollective(BATCH_AXES, num_subtrees, gradient),
        PredictedCollective(BATCH_AXES, 1, gradient),
    ]


def sum_sent_bytes(
    found: list[PredictedCollective], sizes: Mapping[str, int], over_domains: Mapping[str, int]
) -> tuple[float, float]:
    """Bytes that a device sends in a step inside its slice or GPU node, and out of it."""
    interconnect = network = 0.0
    for flow in found:
        inside, across = split_over_domains(sizes, over_domains, flow.axes, flow.factor, flow.payload)
        interconnect += inside
        network += across
    return interconnect, network


_LONG_ROW = 16_384  # positions
SINGLE_DEVICE = order_sizes(dict.fromkeys(AXES, 1))  # the mesh of one device


@dataclass(frozen=True)
class StateSize:
    """The state on one device, and the parameters as they are sent.

    Attributes:
        whole_share: see `ParameterPayload`.
    """

    state_bytes: float
    parameter_bytes: float  # in the type in which they are kept
    num_parameters: int
    whole_share: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """Of one mesh and one micro-batch."""

    micro_batch_examples: int
    state_bytes: float  # of a device
    working_bytes: float  # gradients and activations, by formula
    sent_bytes: float  # by a device in a step
    times: Roofline

    @property
    def needed_bytes(self) -> float:
        """Of a device."""
        return self.state_bytes + self.working_bytes


@dataclass(frozen=True)
class Predictor:
    """Arithmetic for one job with one choice of its own knobs."""

    job: BaseTrainer
    flops: Flops
    accelerator: Accelerator

    @property
    def speeds(self) -> PeakRates:
        """Of its chips, which must be known."""
        speeds = self.accelerator.chip.speeds
        assert speeds is not None, "peak figures are known of what is predicted for"
        return speeds

    @functools.cached_property
    def whole(self) -> Any:
        """The abstract state on one device, from which it is known on any mesh."""
        return build_abstract(self.job.setup_builder, SINGLE_DEVICE).abstract_state

    def state_on(self, sizes: MeshSizes) -> Any:
        """The abstract state over a mesh of no devices: shapes and shardings."""
        return reshard_abstract_state(self.whole, abstract_mesh(sizes))

    def size_of(self, abstract: Any) -> StateSize:
        """Of an abstract state with shardings."""
        small = 0.0
        if self.accelerator.chip.is_tpu:
            parameters = flatten_with_names({"params": abstract.params})
            small = compute_small_share(find_small_shards(parameters, self.sent_itemsize), parameters)
        state_bytes, parameter_bytes = count_bytes_per_device(abstract), count_bytes_per_device(abstract.params)
        return StateSize(state_bytes, parameter_bytes, count_elements(abstract.params), small)

    @property
    def sent_itemsize(self) -> int:
        """Bytes of a parameter as it is gathered."""
        return int(jnp.dtype(self.job.config.precision.compute).itemsize)

    def micro_batches(self, sizes: Mapping[str, int]) -> list[int]:
        """Those that a search may choose from, largest first; none if the mesh cannot hold the batch or its rows."""
        config = self.job.config
        shards = math.prod(sizes[axis] for axis in BATCH_AXES)
        try:
            split_axes_over_slices(sizes, _num_domains(self.accelerator))
            mesh = abstract_mesh(order_sizes(sizes))
            validate_sequence_sharding(mesh, config.data.sequence_length, config.memory.loss_chunk_positions)
            devices, wanted = config.train.same_bits_devices, config.train.micro_batch_examples
            if devices is not None:
                validate_same_bits_mesh(mesh, devices)
            return list_micro_batch_sizes(
                config.train.global_batch_examples, "auto" if devices is None else wanted, shards
            )
        except InvalidError:
            return []

    def predict(self, sizes: Mapping[str, int], micro_batch: int, state: StateSize) -> Prediction:
        """What a step takes with `micro_batch` examples a device."""
        config = self.job.config
        tokens = micro_batch * config.data.sequence_length / sizes["sequence"]
        sizing = self.job.sizing(sizes)
        shards = math.prod(sizes[axis] for axis in BATCH_AXES)
        accumulate_steps = config.train.global_batch_examples // (micro_batch * shards)
        sent_bytes = self.sent_itemsize / sizes["tensor"]
        of_experts = min(sizing.expert_parameters, state.num_parameters)
        shared = state.num_parameters - of_experts
        weights = ParameterPayload(shared * sent_bytes, of_experts * sent_bytes, state.whole_share, self.sent_itemsize)
        passes = 3 if config.memory.remat == "layers" else 2
        over_domains = dict(zip(AXES, split_axes_over_slices(sizes, _num_domains(self.accelerator)), strict=True))
        groups, gradients = config.train.same_bits_devices, state.parameter_bytes * min(accumulate_steps, 2)
        if groups is None:
            waits = reduction.has_deferred_all_reduce(sizes, is_tpu=self.accelerator.chip.is_tpu)
            found = predict_collectives(
                sizes, weights, sizing, accumulate_steps * tokens, passes, accumulate_steps, waits=waits
            )
        else:
            itemsize = jnp.dtype(config.precision.params).itemsize
            found = predict_ordered_collectives(
                state.num_parameters, itemsize, reduction.count_subtrees(groups, shards)
            )
            gradients = reduction.compute_held_bytes(
                state.num_parameters, itemsize if sizes["fsdp"] > 1 else 0, groups, shards
            )
        inside, across = sum_sent_bytes(found, sizes, over_domains)
        executed = (self.flops.per_token + self.flops.recomputed_per_token) * config.tokens_per_step
        whole_bytes = weights.shared + weights.of_experts / sizes["expert"]
        traffic = program.compute_hbm_traffic(state.state_bytes, whole_bytes, passes, accumulate_steps)
        work = StepWork(executed / math.prod(sizes.values()), traffic, inside, across)
        working_bytes = gradients + sizing.head_bytes + tokens * sizing.activation_bytes_per_token
        times = program.compute_roofline(work, self.speeds, self.accelerator.chip.devices_per_chip)
        sent_in_step = work.interconnect_bytes + work.network_bytes
        return Prediction(micro_batch, state.state_bytes, working_bytes, sent_in_step, times)

    def fitting(self, sizes: Mapping[str, int], state: StateSize, limit_bytes: float) -> Iterator[Prediction]:
        """Those of every micro-batch that fits, largest first."""
        for micro_batch in self.micro_batches(sizes):
            found = self.predict(sizes, micro_batch, state)
            if found.needed_bytes <= limit_bytes:
                yield found


def abstract_mesh(sizes: MeshSizes) -> Any:
    """A mesh of no devices."""
    return AbstractMesh(tuple(size for _, size in sizes), tuple(axis for axis, _ in sizes))


def build_abstract(setup_builder: TrainSetupBuilder, sizes: MeshSizes) -> TrainSetup:
    """The job over a mesh of no devices; its shapes are found by a shorter row where its own takes long to trace."""
    length = setup_builder.config.data.sequence_length
    row_length = math.gcd(length, _LONG_ROW) if length > _LONG_ROW else length
    return setup_builder.build_on_mesh(
        abstract_mesh(sizes), jax.eval_shape(lambda: jax.random.key(setup_builder.seed)), row_length
    )


def _num_domains(accelerator: Accelerator) -> int:
    """Slices, or GPU nodes."""
    return accelerator.num_slices if accelerator.chip.is_tpu else accelerator.hosts_per_slice * accelerator.num_slices
