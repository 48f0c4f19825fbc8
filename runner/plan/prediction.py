"""Predicted memory, communication and lowest step time of a job on a mesh, by arithmetic, before anything is compiled.

Each collective has a payload, the whole array of a group of devices, and a factor: the number of times that a ring
passes the payload on (1 for an all-gather or a reduce-scatter, 2 for an all-reduce). A device sends
`factor x payload x (n - 1) / n` along an axis of n. By axis:

- `data`: the float32 gradients of a device's parameters, reduced once per step, unless they are reduced before its end
  (see `runner.parallel.reduction`). All other collectives run in each micro-batch.
- `fsdp`, `sequence` and `expert` together: parameters, gathered in every pass, and their gradients, scattered once. The
  experts' own matrices are sharded over `expert` already, so they go over the other two.
- `sequence`: keys and values. Ring and all-gather send the same number of bytes.
- `expert`: tokens, to their experts and back, by all-to-all. Tokens for experts on the same device are not sent.
- `tensor`: the residual stream, all-gathered before a sharded matmul and reduce-scattered after it.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from runner.accelerator import Accelerator, PeakRates
from runner.checkpoint.leaves import flatten_with_names
from runner.config import TrainerConfig
from runner.errors import InvalidError
from runner.parallel import reduction
from runner.parallel.mesh import (
    AXES,
    BATCH_AXES,
    STATE_AXES,
    list_micro_batch_sizes,
    make_abstract_mesh,
    split_axes_over_slices,
    validate_same_bits_mesh,
    validate_sequence_sharding,
)
from runner.plan.mesh import MeshSizes, compute_small_share, find_small_shards, order_sizes
from runner.plan.program import (
    Roofline,
    StepWork,
    compute_hbm_traffic,
    compute_roofline,
    count_bytes_per_device,
    count_elements,
    split_over_domains,
)
from runner.train.flops import Flops, Sizing
from runner.train.setup import TrainSetup, TrainSetupBuilder
from runner.train.state import reshard_abstract_state
from runner.trainer import BaseTrainer

SINGLE_DEVICE = order_sizes(dict.fromkeys(AXES, 1))

_GRADIENT_ITEMSIZE = 4  # gradients over `data` are float32
_LONG_SEQUENCE = 16_384  # tokens
_AWAITED_AXES = (("sequence",), ("expert",), ("tensor",))  # of collectives that a layer waits for


@dataclass(frozen=True)
class PredictedCollective:
    """Collectives of one kind in a step."""

    axes: tuple[str, ...]  # mesh axes that they span
    factor: float  # number of times that a ring passes the payload on, over the whole step
    payload: float  # bytes of the whole array of a group
    is_reduction: bool = False  # True for an all-reduce or a reduce-scatter, with which libtpu overlaps nothing


@dataclass(frozen=True)
class ParameterPayload:
    """Parameters in the type in which they are sent, in bytes, on one part of `tensor`."""

    shared: float  # bytes of all parameters but the experts' own
    of_experts: float  # bytes of the experts' own parameters
    # Share that the compiler gathers and reduces by all-reduce, since their shards are too small.
    whole_share: float = 0.0
    itemsize: int = 4  # bytes of an element in that type


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
    """Return the collectives of a step.

    A device computes `tokens` in a step: its examples, times its part of a sequence. The `passes` over the parameters
    in a micro-batch are forward, backward and recomputation. The gradients wait if they are reduced over `data` once,
    at the end of the step.
    """
    num_shards = math.prod(sizes[axis] for axis in STATE_AXES)
    # One gather per pass and one scatter of the gradients; an all-reduce in their place sends twice as much.
    gathers, scatters = passes * accumulate_steps, accumulate_steps
    whole = weights.whole_share
    data_rounds = _GRADIENT_ITEMSIZE / weights.itemsize if waits else accumulate_steps
    # A device reduces its own shard of the gradients with its peers along `data`.
    reduced = (weights.shared + weights.of_experts) / num_shards * data_rounds
    other_axes = tuple(axis for axis in STATE_AXES if axis != "expert")
    of_experts = weights.of_experts / sizes["expert"]
    return [
        PredictedCollective(("data",), 2, reduced, is_reduction=True),
        PredictedCollective(STATE_AXES, gathers * (1 - whole), weights.shared),
        PredictedCollective(STATE_AXES, 2 * gathers * whole, weights.shared, is_reduction=True),
        PredictedCollective(STATE_AXES, scatters * (1 + whole), weights.shared, is_reduction=True),
        PredictedCollective(other_axes, gathers * (1 - whole), of_experts),
        PredictedCollective(other_axes, 2 * gathers * whole, of_experts, is_reduction=True),
        PredictedCollective(other_axes, scatters * (1 + whole), of_experts, is_reduction=True),
        # The payload is the keys and values of the whole sequence.
        PredictedCollective(("sequence",), 1, tokens * sizes["sequence"] * sizing.sequence_bytes_per_token),
        PredictedCollective(("expert",), 1, tokens * sizing.expert_bytes_per_token),
        # A gather before a matmul and a scatter behind it.
        PredictedCollective(("tensor",), 2, tokens * sizing.tensor_bytes_per_token),
    ]


def predict_ordered_collectives(parameters: float, itemsize: int, num_subtrees: int) -> list[PredictedCollective]:
    """Return the collectives of a step that sums gradients in a fixed order (see `runner.parallel.reduction`).

    Parameters are gathered once over `fsdp`, in the type in which they are stored. Each device sends the shares of its
    subtrees to all others, and gathers the others' shares of the whole sum.
    """
    gradient = parameters * _GRADIENT_ITEMSIZE
    return [
        PredictedCollective(("fsdp",), 1, parameters * itemsize),
        PredictedCollective(BATCH_AXES, num_subtrees, gradient, is_reduction=True),
        PredictedCollective(BATCH_AXES, 1, gradient, is_reduction=True),
    ]


def sum_sent_bytes(
    collectives: list[PredictedCollective], sizes: Mapping[str, int], over_domains: Mapping[str, int]
) -> tuple[float, float]:
    """Return the bytes that a device sends in a step inside its slice or GPU node, and out of it."""
    interconnect = network = 0.0
    for collective in collectives:
        inside, across = split_over_domains(sizes, over_domains, collective.axes, collective.factor, collective.payload)
        interconnect += inside
        network += across
    return interconnect, network


@dataclass(frozen=True)
class StateSize:
    """Size of the state on one device."""

    state_bytes: float  # whole state, without what is offloaded to the host
    parameter_bytes: float  # parameters, in the type in which they are stored
    num_parameters: int
    whole_share: float = 0.0  # see `ParameterPayload`
    offloaded_bytes: float = 0.0  # optimizer state in host memory


@dataclass(frozen=True)
class Prediction:
    """Predicted cost of a step on one mesh with one micro-batch."""

    micro_batch_examples: int  # examples of a device in a micro-batch
    state_bytes: float
    working_bytes: float  # gradients and activations on a device, by formula
    sent_bytes: float  # bytes that a device sends in a step
    times: Roofline
    # Time of the collectives that nothing overlaps with: those over `tensor`, `sequence` and `expert`, which a layer
    # waits for, and on a TPU all reductions.
    exposed_seconds: float = 0.0
    is_lower_bound: bool = False  # True if the job does not state its activations, so that more memory is needed

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key: least predicted step time first, and of equals the one with less time on all resources.

        Everything except the exposed collectives is assumed to overlap. By the roofline alone, dozens of meshes would
        be equal.
        """
        step_seconds, total_seconds = self.times.rank
        return step_seconds + self.exposed_seconds, total_seconds

    @property
    def needed_bytes(self) -> float:
        """Memory that a device needs."""
        return self.state_bytes + self.working_bytes


@dataclass(frozen=True)
class Predictor:
    """Predictions for one job under one choice of its own settings, on an accelerator with known peak figures."""

    job: BaseTrainer
    flops: Flops
    accelerator: Accelerator

    @property
    def speeds(self) -> PeakRates:
        """Peak figures of a chip."""
        speeds = self.accelerator.chip.speeds
        assert speeds is not None, "callers predict only for chips with known peak figures"
        return speeds

    @property
    def sent_itemsize(self) -> int:
        """Bytes of a parameter's element as it is gathered."""
        return int(jnp.dtype(self.job.config.precision.compute).itemsize)

    @functools.cached_property
    def single_device_state(self) -> Any:
        """Abstract state on one device, from which it is derived for any mesh."""
        return build_abstract(self.job.setup_builder, SINGLE_DEVICE).abstract_state

    def shard_state(self, sizes: MeshSizes) -> Any:
        """Return the abstract state, shapes and shardings, on a mesh of no devices."""
        mesh, is_sharded = make_abstract_mesh(dict(sizes)), self.job.config.memory.shard_optimizer
        return reshard_abstract_state(self.single_device_state, mesh, is_sharded)

    def measure_state(self, abstract_state: Any) -> StateSize:
        """Return the size of an abstract state with shardings."""
        small_share = 0.0
        # Only a TPU holds arrays in tiles, so only its compiler moves small shards whole.
        if self.accelerator.chip.is_tpu:
            parameters = flatten_with_names({"params": abstract_state.params})
            small_share = compute_small_share(find_small_shards(parameters, self.sent_itemsize), parameters)
        return StateSize(
            count_bytes_per_device(abstract_state),
            count_bytes_per_device(abstract_state.params),
            count_elements(abstract_state.params),
            small_share,
            count_bytes_per_device(abstract_state, on_host=True),
        )

    def list_micro_batches(self, sizes: Mapping[str, int]) -> list[int]:
        """Return the micro-batch sizes to choose from, largest first; none for a mesh that cannot split the batch."""
        config = self.job.config
        shards = math.prod(sizes[axis] for axis in BATCH_AXES)
        try:
            split_axes_over_slices(sizes, _count_domains(self.accelerator))
            mesh = make_abstract_mesh(dict(order_sizes(sizes)))
            validate_sequence_sharding(mesh, config.data.sequence_length, config.memory.loss_chunk_positions)
            devices, wanted = config.train.same_bits_devices, config.train.micro_batch_examples
            # A fixed order of sums allows only meshes that keep this order, and the micro-batch of the spec.
            if devices is not None:
                validate_same_bits_mesh(mesh, devices)
            return list_micro_batch_sizes(
                config.train.global_batch_examples, "auto" if devices is None else wanted, shards
            )
        except InvalidError:
            return []

    def predict(self, sizes: Mapping[str, int], micro_batch: int, state: StateSize) -> Prediction:
        """Return the cost of a step with `micro_batch` examples per device in a micro-batch."""
        config = self.job.config
        chip = self.accelerator.chip
        tokens = micro_batch * config.data.units_per_example / sizes["sequence"]
        sizing = self.job.sizing(sizes)
        shards = math.prod(sizes[axis] for axis in BATCH_AXES)
        accumulate_steps = config.train.global_batch_examples // (micro_batch * shards)
        passes = count_passes(config)

        # Parameters as they are gathered.
        element_bytes = self.sent_itemsize / sizes["tensor"]
        of_experts = min(sizing.expert_parameters, state.num_parameters)
        shared = state.num_parameters - of_experts
        weights = ParameterPayload(
            shared * element_bytes, of_experts * element_bytes, state.whole_share, self.sent_itemsize
        )

        # Traffic between devices. With one micro-batch there is one set of gradients, with more also their sum.
        over_domains = dict(zip(AXES, split_axes_over_slices(sizes, _count_domains(self.accelerator)), strict=True))
        groups, gradients = config.train.same_bits_devices, state.parameter_bytes * min(accumulate_steps, 2)
        if groups is None:
            waits = reduction.has_deferred_all_reduce(sizes, is_tpu=chip.is_tpu)
            step_tokens = accumulate_steps * tokens
            found = predict_collectives(sizes, weights, sizing, step_tokens, passes, accumulate_steps, waits=waits)
        else:
            itemsize = jnp.dtype(config.precision.params).itemsize
            found = predict_ordered_collectives(
                state.num_parameters, itemsize, reduction.count_subtrees(groups, shards)
            )
            gradients = reduction.compute_held_bytes(
                state.num_parameters, itemsize if sizes["fsdp"] > 1 else 0, groups, shards
            )
        inside, across = sum_sent_bytes(found, sizes, over_domains)

        # Work and memory of a device.
        # The FLOPs of a step are the same on every mesh.
        flops = self.flops.convert_to_bfloat16(self.speeds)
        executed = (flops.per_token + flops.recomputed_per_token) * config.units_per_step
        gathered_bytes = weights.shared + weights.of_experts / sizes["expert"]
        # Offloaded leaves are read and written on the device too.
        state_bytes = state.state_bytes + state.offloaded_bytes
        traffic = compute_hbm_traffic(state_bytes, gathered_bytes, passes, accumulate_steps)
        work = StepWork(executed / math.prod(sizes.values()), traffic, inside, across)
        # Activations exist for one micro-batch at a time.
        activation_bytes = sizing.head_bytes + tokens * sizing.activation_bytes_per_token
        # Offloaded optimizer state is moved to the device for the update, when activations are no longer needed.
        working_bytes = gradients + max(activation_bytes, state.offloaded_bytes)
        times = compute_roofline(work, self.speeds, chip.devices_per_chip)
        # Gathers of parameters overlap with other layers, and except on TPUs reductions too.
        awaited = [each for each in found if each.axes in _AWAITED_AXES or (chip.is_tpu and each.is_reduction)]
        waiting = compute_roofline(
            StepWork(0, 0, *sum_sent_bytes(awaited, sizes, over_domains)), self.speeds, chip.devices_per_chip
        )
        sent_bytes = work.interconnect_bytes + work.network_bytes
        is_lower_bound = not sizing.activation_bytes_per_token
        return Prediction(
            micro_batch,
            state.state_bytes,
            working_bytes,
            sent_bytes,
            times,
            exposed_seconds=waiting.interconnect + waiting.network,
            is_lower_bound=is_lower_bound,
        )

    def predict_allowed(self, sizes: MeshSizes, abstract_state: Any) -> list[Prediction]:
        """Return the prediction for every micro-batch that the spec allows, largest first, whether it fits or not."""
        state, allowed = self.measure_state(abstract_state), self.job.config.train.micro_batch_examples
        micro_batches = [size for size in self.list_micro_batches(dict(sizes)) if allowed in ("auto", size)]
        return [self.predict(dict(sizes), size, state) for size in micro_batches]

    def iter_fitting(self, sizes: Mapping[str, int], state: StateSize, limit_bytes: float) -> Iterator[Prediction]:
        """Yield the predictions of every micro-batch that fits, largest first."""
        for micro_batch in self.list_micro_batches(sizes):
            found = self.predict(sizes, micro_batch, state)
            # Smaller micro-batches may fit where larger ones do not, so all are tried.
            if found.needed_bytes <= limit_bytes:
                yield found


def count_passes(config: TrainerConfig) -> int:
    """Return the passes over the parameters in a micro-batch: forward, backward and recomputation."""
    return 3 if config.memory.remat == "layers" else 2


def build_abstract(setup_builder: TrainSetupBuilder, sizes: MeshSizes) -> TrainSetup:
    """Return the setup of a job on a mesh without devices.

    Its shapes are found with a shorter sequence if the real length takes long to trace.
    """
    length = setup_builder.config.data.units_per_example
    traced_length = math.gcd(length, _LONG_SEQUENCE) if length > _LONG_SEQUENCE else length
    return setup_builder.build_on_mesh(
        make_abstract_mesh(dict(sizes)), jax.eval_shape(lambda: jax.random.key(setup_builder.seed)), traced_length
    )


def _count_domains(accelerator: Accelerator) -> int:
    """Return the number of slices, or of groups of GPUs that one fast interconnect joins."""
    if accelerator.chip.is_tpu:
        return accelerator.num_slices
    return -(-accelerator.hosts_per_slice // accelerator.chip.hosts_per_domain) * accelerator.num_slices
